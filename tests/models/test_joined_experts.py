"""Experts that are stored together: in MXFP4 by its definition, and as floats, apart and together again."""

import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from models.folders import open_folder
from models.joined_experts import dequantised, put_together, taken_apart
from models.loading import describe
from tests.models.make_golden import GOLDEN
from tests.models.test_loading import assert_same, parameters


def mxfp4(byte: int, high: bool, scale: int) -> float:
    """One number by the formats' definition: sign, two bits of exponent, one of mantissa, 2 ** (scale - 127)."""
    bits = byte // 16 if high else byte % 16
    sign, exponent, mantissa = (-1) ** (bits >= 8), bits % 8 // 2, bits % 2
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)) * 2.0 ** (scale - 127)


def numbers(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[..., groups, 16] and [..., groups] -> [..., 32 groups], number by number."""
    out = np.zeros((*scales.shape, 32))
    for *at, i in np.ndindex(out.shape):
        out[(*at, i)] = mxfp4(int(blocks[(*at, i // 2)]), i % 2 == 1, int(scales[tuple(at)]))
    return out.reshape(*scales.shape[:-1], -1)


def test_each_byte_holds_two_numbers_that_their_scale_multiplies():
    blocks = np.arange(256, dtype=np.uint8).reshape(2, 8, 16)
    scales = np.array([[9, 10, 100, 120, 126, 127, 128, 140], [127, 127, 90, 127, 240, 200, 127, 127]], np.uint8)
    found = dequantised(blocks, scales)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, numbers(blocks, scales))


@pytest.fixture
def folder(tmp_path):
    """A gpt-oss of one layer in MXFP4, and its experts' numbers, [X, outputs, inputs]."""
    rng, X, E, F = np.random.default_rng(0), 3, 64, 32
    raw = json.loads((GOLDEN / "gpt_oss" / "config.json").read_text())
    raw |= dict(hidden_size=E, intermediate_size=F, num_local_experts=X, num_hidden_layers=1)
    raw |= dict(layer_types=["sliding_attention"], quantization_config={"quant_method": "mxfp4"})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (64, E), "model.norm.weight": (E,), "lm_head.weight": (64, E),
        layer + "input_layernorm.weight": (E,), layer + "post_attention_layernorm.weight": (E,),
        layer + "self_attn.q_proj.weight": (32, E), layer + "self_attn.q_proj.bias": (32,),
        layer + "self_attn.k_proj.weight": (16, E), layer + "self_attn.k_proj.bias": (16,),
        layer + "self_attn.v_proj.weight": (16, E), layer + "self_attn.v_proj.bias": (16,),
        layer + "self_attn.o_proj.weight": (E, 32), layer + "self_attn.o_proj.bias": (E,),
        layer + "self_attn.sinks": (4,), layer + "mlp.router.weight": (X, E), layer + "mlp.router.bias": (X,),
        layer + "mlp.experts.gate_up_proj_bias": (X, 2 * F), layer + "mlp.experts.down_proj_bias": (X, E),
    }  # fmt: skip
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    held = {}
    for part, outputs, inputs in (("gate_up", 2 * F, E), ("down", E, F)):
        blocks = rng.integers(0, 256, (X, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(118, 130, (X, outputs, inputs // 32), np.uint8)
        held[part] = numbers(blocks, scales)
        tensors |= {f"{layer}mlp.experts.{part}_proj_{kind}": x for kind, x in (("blocks", blocks), ("scales", scales))}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path, held, tensors


def test_experts_in_mxfp4_are_dequantised_as_they_load(folder):
    path, held, tensors = folder
    model, _ = models.load(path, dtype="float32")
    found = parameters(model)
    np.testing.assert_array_equal(np.swapaxes(found["layers.expert_gate"][0], 1, 2), held["gate_up"][:, 0::2])
    np.testing.assert_array_equal(np.swapaxes(found["layers.expert_up"][0], 1, 2), held["gate_up"][:, 1::2])
    np.testing.assert_array_equal(np.swapaxes(found["layers.expert_down"][0], 1, 2), held["down"])
    bias = tensors["model.layers.0.mlp.experts.gate_up_proj_bias"]
    np.testing.assert_array_equal(found["layers.expert_gate_bias"][0], bias[:, 0::2])
    np.testing.assert_array_equal(found["layers.expert_up_bias"][0], bias[:, 1::2])


def test_what_was_read_in_mxfp4_is_saved_as_numbers(folder, tmp_path):
    model, _ = models.load(folder[0])
    models.save(tmp_path / "saved", model)
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert_same(models.load(tmp_path / "saved")[0], model)


def test_a_part_of_an_expert_is_read_by_itself(folder):
    path, held, _ = folder
    tensors = taken_apart(open_folder(path).tensors)
    read = tensors["model.layers.0.mlp.experts.2.up_proj.weight"].read
    np.testing.assert_array_equal(read((slice(3, 9), slice(20, 41))), held["gate_up"][2, 1::2][3:9, 20:41])


def test_experts_that_are_stored_by_rows_are_those_stored_one_by_one(tmp_path):
    """As Qwen3.5 is published: all rows of gate before those of up."""
    shutil.copy(GOLDEN / "qwen3_5_moe" / "config.json", tmp_path)
    tensors = load_file(GOLDEN / "qwen3_5_moe" / "model.safetensors")
    apart = {name: tensors.pop(name) for name in list(tensors) if ".experts." in name}
    for stem in {name.partition(".experts.")[0] for name in apart}:
        each = {
            own: [apart[f"{stem}.experts.{x}.{own}_proj.weight"] for x in range(4)] for own in ("gate", "up", "down")
        }
        tensors[f"{stem}.experts.down_proj"] = np.stack(each["down"])
        tensors[f"{stem}.experts.gate_up_proj"] = np.concatenate([np.stack(each["gate"]), np.stack(each["up"])], axis=1)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same(models.load(tmp_path)[0], models.load(GOLDEN / "qwen3_5_moe")[0])
    name = next(name for name in tensors if name.endswith("gate_up_proj"))
    save_file(tensors | {name: tensors[name][..., 0]}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="which is not that of a layer's experts"):
        models.load(tmp_path)


def test_together_and_apart_again():
    tensors = load_file(GOLDEN / "gpt_oss" / "model.safetensors")
    apart = {
        "a.experts.0.gate_proj.weight": np.zeros((2, 3)), "a.experts.0.up_proj.weight": np.ones((2, 3)),
        "a.experts.0.down_proj.weight": np.zeros((3, 2)), "a.experts.0.gate_proj.bias": np.zeros(2),
        "a.experts.0.up_proj.bias": np.ones(2), "a.experts.0.down_proj.bias": np.zeros(3), "b": np.zeros(1),
    }  # fmt: skip
    found = put_together(apart)
    assert found["a.experts.gate_up_proj_bias"].tolist() == [[0, 1, 0, 1]]
    assert found["a.experts.gate_up_proj"].tolist() == [[[0, 1, 0, 1]] * 3]
    assert {name.replace("a.", "model.layers.0.mlp.") for name in found} - {"b"} <= tensors.keys()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(quantization_config={"quant_method": "fp8"}), "quant_method is 'fp8'; only 'mxfp4' is supported"),
        (dict(swiglu_limit=5.0), "swiglu_limit is 5.0; only 7.0 is supported"),
        (dict(quantization_config=["mxfp4"]), "cannot read it"),
    ],
)
def test_another_quantisation_or_limit_is_refused(change, said, tmp_path):
    raw = json.loads((GOLDEN / "gpt_oss" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    shutil.copy(GOLDEN / "gpt_oss" / "model.safetensors", tmp_path)
    with pytest.raises(ValueError, match=re.escape(said)):
        describe(tmp_path)


@pytest.mark.parametrize(
    ("name", "made", "said"),
    [
        ("gate_up_proj_scales", None, "it lacks the scales of model.layers.0.mlp.experts.gate_up_proj_blocks"),
        ("down_proj_blocks", None, "it lacks the blocks of model.layers.0.mlp.experts.down_proj_scales"),
        ("down_proj_scales", np.zeros((3, 64), np.uint8), "expected bytes, [..., groups, 16] and [..., groups]"),
        ("down_proj_blocks", np.zeros((3, 64, 16), np.uint8), "which is not that of a layer's experts"),
        ("gate_up_proj_blocks", np.zeros((3, 64, 2, 16), np.int32), "gate_up_proj_blocks is I32"),
    ],
)
def test_blocks_that_do_not_fit_their_scales_are_refused_in_one_sentence(folder, name, made, said):
    path, _, tensors = folder
    tensors.pop(f"model.layers.0.mlp.experts.{name}")
    if made is not None:
        tensors[f"model.layers.0.mlp.experts.{name}"] = made
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError) as caught:
        describe(path)
    assert said in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)
