"""Weights of eight bits with a scale for each block are read as their products, in parts, and saved as numbers."""

import json
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import models
from models.block_scaled import block_of
from models.folders import open_folder
from tests.models.make_golden import GOLDEN

BLOCK = (8, 6)  # of rows and columns; neither divides all
FP8 = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "fmt": "e4m3", "activation_scheme": "dynamic"}


def write(file, arrays):
    """A safetensors file by hand, as the package writes no eight bits of NumPy."""
    names, header, at = {"float32": "F32", "float8_e4m3fn": "F8_E4M3"}, {}, 0
    for name, array in arrays.items():
        offsets = [at, at + array.nbytes]
        header[name] = {"dtype": names[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
        at += array.nbytes
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for array in arrays.values()))


def folder(place, changed=None):
    """DeepSeek-V3's golden model with its projections in eight bits, and the numbers that these stand for."""
    rng, stored, numbers = np.random.default_rng(0), {}, {}
    for name, array in load_file(GOLDEN / "deepseek_v3" / "model.safetensors").items():
        stored[name] = numbers[name] = array
        if "_proj" in name:
            counts = [-(-size // own) for size, own in zip(array.shape, BLOCK, strict=True)]
            scale = rng.uniform(0.5, 2, counts).astype(np.float32)
            each = scale.repeat(BLOCK[0], axis=0).repeat(BLOCK[1], axis=1)[: array.shape[0], : array.shape[1]]
            stored[name], stored[f"{name}_scale_inv"] = (array / each).astype(jnp.float8_e4m3fn), scale
            numbers[name] = stored[name].astype(np.float32) * each
    write(place / "model.safetensors", stored | (changed or {}))
    raw = json.loads((GOLDEN / "deepseek_v3" / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(raw | {"quantization_config": FP8}))
    return numbers


def test_weights_are_numbers_times_the_scales_of_their_blocks(tmp_path):
    (tmp_path / "eight").mkdir()
    numbers = folder(tmp_path / "eight")
    models.save(tmp_path / "floats", models.load(tmp_path / "eight", dtype="float32")[0])
    found = load_file(tmp_path / "floats" / "model.safetensors")
    assert found.keys() == numbers.keys()
    for name in found:
        np.testing.assert_array_equal(found[name], numbers[name], err_msg=name)
    assert "quantization_config" not in json.loads((tmp_path / "floats" / "config.json").read_text())
    assert models.load(tmp_path / "eight")[0].embedding[...].dtype == jnp.bfloat16


def test_a_part_is_read_by_the_blocks_that_it_lies_in(tmp_path):
    numbers, name = folder(tmp_path), "model.layers.1.self_attn.q_b_proj.weight"
    tensor = open_folder(tmp_path).tensors[name]
    window = slice(5, 29), slice(4, 11)
    np.testing.assert_array_equal(tensor.read(window), numbers[name][window])


NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({f"{NAME}_scale_inv": np.ones((1, 1), np.float32)}, r"its scales are F32 \(1, 1\); expected F32 \(3, 3\)"),
        ({NAME: np.ones((20, 16), np.float32)}, "it lacks the weight in eight bits of model.layers.0.mlp.up_proj"),
        ({"model.norm.weight": np.ones(16, jnp.float8_e4m3fn)}, "it lacks the scales of model.norm.weight"),
    ],
)
def test_scales_that_do_not_fit_are_refused(tmp_path, changed, sentence):
    folder(tmp_path, changed)
    with pytest.raises(ValueError, match=sentence):
        models.load(tmp_path)


@pytest.mark.parametrize(
    "changed", [{"quant_method": "awq"}, {"weight_block_size": None}, {"weight_block_size": [128]}, {"fmt": "e5m2"}]
)
def test_other_kinds_have_no_blocks(changed):
    assert block_of(FP8) == BLOCK and block_of(FP8 | changed) is None and block_of(None) is None
