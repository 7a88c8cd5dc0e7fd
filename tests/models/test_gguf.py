"""GGUF files become the models they were written from; what is wrong with one is said in a sentence."""

import contextlib
import dataclasses
import functools
import itertools
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
import tokenizers
from flax import nnx
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tqdm import tqdm

import models
from models.config import NO_ROPE, Config, Rope
from models.folders import find_folder
from models.gguf_config import LONG_FACTORS, SHORT_FACTORS, family_in
from models.gguf_tensors import names_in
from models.loading import describe, published_sampling
from models.parameters import layers_with, parameter_shapes, tensor_names
from models.sampling import Sampling
from models.saving import _tensors as saved_tensors
from tests.bad_input.campaign import calls
from tests.kvjax.test_registry import installed
from tests.models import reference
from tests.models.make_golden import GOLDEN
from tests.models.test_loading import PEAK, assert_same, parameters

SMALL = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, norm_epsilon=1e-5,
    max_positions=128, rope=Rope(500_000.0), bos=1, eos=(2,), pad=0,
)  # fmt: skip
CONFIGS = {
    "llama": Config(**SMALL),
    "llama_tied": Config(**SMALL, tie_embeddings=True),
    "llama_biases": Config(**SMALL, attention_bias=True, output_bias=True),
    "qwen2": Config(**SMALL, architecture="qwen2", attention_bias=True),
    "qwen3": Config(**SMALL, architecture="qwen3", query_key_norm=True, head_dim=32, tie_embeddings=True),
    "olmo2": Config(**SMALL, architecture="olmo2", wide_query_key_norm=True, norms="after"),
    "smollm3": Config(**SMALL | {"num_layers": 4}, architecture="smollm3", ropes=(None, None, None, NO_ROPE)),
    "granite": Config(
        **SMALL, architecture="granite", embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=8.0,
        attention_multiplier=0.015625,
    ),
    "phi3": Config(**SMALL, architecture="phi3", sliding_windows=(16, 16)),
    "phi4_mini": Config(
        **SMALL | {"rope": Rope(
            10_000.0, "longrope", 4.0, 32, attention_factor=1.25, partial_rotary_factor=0.75,
            short_factor=(1.0,) * 5 + (1.5,), long_factor=(1.0, 1.5, 2.5, 3.5, 4.0, 6.0),
        )},
        architecture="phi3", tie_embeddings=True,
    ),
    "mixtral": Config(**SMALL, architecture="mixtral", num_experts=4, experts_per_token=2, normalise_experts=True),
    "qwen3moe_mixed": Config(
        **SMALL | {"num_layers": 4}, architecture="qwen3_moe", query_key_norm=True, num_experts=4, experts_per_token=2,
        normalise_experts=True, dense_sizes=(64, None, None, 64),
    ),
    "gemma2": Config(
        **SMALL, architecture="gemma2", norms="both", norm_offset=True, activation="gelu_tanh", tie_embeddings=True,
        embedding_multiplier=8.0, attention_soft_cap=50.0, logits_soft_cap=30.0, sliding_windows=(16, None),
    ),
    "gemma3": Config(
        **SMALL | {"num_layers": 6}, architecture="gemma3_text", norms="both", norm_offset=True, tie_embeddings=True,
        activation="gelu_tanh", query_key_norm=True, embedding_multiplier=8.0, sliding_windows=(16,) * 5 + (None,),
        ropes=(Rope(20_000.0),) * 5 + (None,),
    ),
}  # fmt: skip
CONFIGS |= {
    "gemma": Config(
        **SMALL, architecture="gemma", norm_offset=True, activation="gelu_tanh", tie_embeddings=True,
        embedding_multiplier=8.0,
    ),
    "olmo3": Config(
        **SMALL | {"rope": Rope(500_000.0, "yarn", 4.0, 32)}, architecture="olmo3", wide_query_key_norm=True,
        norms="after", sliding_windows=(16, None), ropes=(Rope(500_000.0), None),
    ),
    "exaone4": Config(
        **SMALL, architecture="exaone4", query_key_norm=True, norms="after", sliding_windows=(16, None),
        ropes=(None, NO_ROPE),
    ),
    "exaone4_full": Config(**SMALL, architecture="exaone4", query_key_norm=True, norms="after", tie_embeddings=True),
    "seed_oss": Config(**SMALL, architecture="seed_oss", attention_bias=True),
    "ministral3": Config(
        **SMALL | {"rope": Rope(
            500_000.0, "yarn", 4.0, 32, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.25,
        )},
        architecture="ministral3",
    ),
    "gpt_oss": Config(
        **SMALL | {"rope": Rope(500_000.0, "yarn", 4.0, 32, truncate=False)}, architecture="gpt_oss",
        sliding_windows=(16, None), attention_bias=True, output_bias=True, attention_sinks=True, num_experts=4,
        experts_per_token=2, normalise_experts=True, expert_biases=True, activation="clamped_swiglu",
    ),
}  # fmt: skip
LLAMA_CPP = {"mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "olmo3": "olmo2"}
LLAMA_CPP |= {"ministral3": "mistral3", "gpt_oss": "gpt-oss"}  # architectures with other names


@functools.cache
def model_of(config):
    """A model where norms and biases are random, too, so that a missed one shows."""
    return reference.decoder(config)


def written_from(name):
    return model_of(CONFIGS[name])


@functools.cache
def tensors_of(config):
    """The model's tensors by llama.cpp's names, in Hugging Face's order of rows."""
    saved, names, found = saved_tensors(model_of(config), config.architecture), tensor_names(config), {}
    renamed = names_in(LLAMA_CPP.get(config.architecture, config.architecture))
    for name in parameter_shapes(config):
        for layer in range(config.num_layers):
            key = renamed(names[name]).format(layer, "").removesuffix("[]")
            experts = [saved.get(names[name].format(layer, x)) for x in range(config.num_experts)]
            if layer not in layers_with(config, name) and name.startswith("layers."):
                continue
            if "expert" in name:
                found[key] = np.stack(experts)
            elif names[name].format(layer) in saved:
                found[key] = saved[names[name].format(layer)] + (config.norm_offset and "norm" in name)
            elif name in ("layers.query", "layers.gate"):  # Phi-3's fused projections
                fused, key = ("qkv", "attn_qkv") if name == "layers.query" else ("gate_up", "ffn_up")
                hold = "self_attn" if fused == "qkv" else "mlp"
                found[f"blk.{layer}.{key}.weight"] = saved[f"model.layers.{layer}.{hold}.{fused}_proj.weight"]
    return found


def interleaved(name, tensor, config):
    """A head's rows as llama.cpp's Llama has them: element i beside element i + D / 2."""
    neighbours = (
        "llama",
        "mixtral",
        "smollm3",
        "granite",
        "ministral3",
    )  # llama.cpp rotates neighbouring elements of these
    if config.architecture not in neighbours or not any(part in name for part in ("attn_q.", "attn_k.")):
        return tensor
    half = config.head_dim // 2
    heads = tensor.reshape(-1, config.head_dim, *tensor.shape[1:])
    rows = [head[i + side * half] for head in heads for i in range(half) for side in (0, 1)]
    return np.stack(rows).reshape(tensor.shape)


def keys_of(config):
    prefix = LLAMA_CPP.get(config.architecture, config.architecture)
    own = {
        "granite": {
            "embedding_scale": config.embedding_multiplier, "residual_scale": config.residual_multiplier,
            "logit_scale": config.logits_scaling, "attention.scale": config.attention_multiplier,
        },
        "phi3": {
            "attention.sliding_window": config.sliding_windows[0] or 0,
            "rope.scaling.original_context_length": config.rope.original_positions or config.max_positions,
            "rope.scaling.attn_factor": config.rope.attention_factor,
            "rope.dimension_count": config.rope.rotated(config.head_dim),
        },
        "mixtral": {"expert_count": config.num_experts, "expert_used_count": config.experts_per_token},
        "qwen3_moe": {
            "expert_count": config.num_experts, "expert_used_count": config.experts_per_token,
            "expert_feed_forward_length": config.intermediate_size,
            "feed_forward_length": config.dense_size if config.dense_sizes else 7,
        },
        "gemma2": {
            "attention.sliding_window": 16, "attn_logit_softcapping": config.attention_soft_cap,
            "final_logit_softcapping": config.logits_soft_cap,
        },
        "gemma3_text": {"attention.sliding_window": 16, "rope.freq_base_swa": 20_000.0},
        "gpt_oss": {
            "expert_count": config.num_experts, "expert_used_count": config.experts_per_token,
            "expert_feed_forward_length": config.intermediate_size, "attention.sliding_window": 16,
        },
        "ministral3": {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.25},
    }.get(config.architecture, {})  # fmt: skip
    if config.architecture in ("olmo3", "exaone4") and any(config.sliding_windows):
        own |= {"attention.sliding_window": 16, "attention.sliding_window_pattern": [True, False]}
    if config.rope.type == "yarn":
        own |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": config.rope.factor,
            "rope.scaling.original_context_length": config.rope.original_positions,
        }  # fmt: skip
    return {
        "general.architecture": prefix, f"{prefix}.block_count": config.num_layers,
        f"{prefix}.context_length": config.max_positions, f"{prefix}.embedding_length": config.hidden_size,
        f"{prefix}.feed_forward_length": config.intermediate_size, f"{prefix}.attention.head_count": config.num_heads,
        f"{prefix}.attention.head_count_kv": config.num_kv_heads, f"{prefix}.attention.key_length": config.head_dim,
        f"{prefix}.attention.value_length": config.head_dim,
        f"{prefix}.attention.layer_norm_rms_epsilon": config.norm_epsilon,
        f"{prefix}.rope.freq_base": config.rope.theta, f"{prefix}.rope.dimension_count": config.head_dim,
        "tokenizer.ggml.bos_token_id": config.bos, "tokenizer.ggml.eos_token_id": config.eos[0],
        "tokenizer.ggml.padding_token_id": config.pad,
    } | {f"{prefix}.{name}": value for name, value in own.items()}  # fmt: skip


def write(file, keys, tensors, endianess=gguf.GGUFEndian.LITTLE):
    """A file with these keys (None leaves one out) and tensors: arrays, or pairs of a kind and quantised bytes."""
    writer = gguf.GGUFWriter(file, keys.get("general.architecture") or "llama", endianess=endianess)
    writer.kv_data = [{}]  # the architecture, which the writer has put there, is among the keys
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in keys.items():
        if value is not None:
            add.get(type(value), writer.add_array)(key, value)
    for name, tensor in tensors.items():
        kind, data = tensor if isinstance(tensor, tuple) else (Kind.F32, tensor)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture
def make(tmp_path):
    """Writes a model: ``make(name, keys, kind=..., change=...)``; vectors stay in float32, as llama.cpp has it."""

    def make(name="llama", keys=None, kind=Kind.F32, change=None, **options):
        config = CONFIGS[name]
        tensors = {key: interleaved(key, tensor, config) for key, tensor in tensors_of(config).items()}
        tensors = {key: t if t.ndim == 1 else (kind, gguf.quants.quantize(t, kind)) for key, t in tensors.items()}
        if config.rope.type == "longrope":
            tensors[LONG_FACTORS] = np.array(config.rope.long_factor, np.float32)
            tensors[SHORT_FACTORS] = np.array(config.rope.short_factor, np.float32)
        if change:
            change(tensors)
        return write(tmp_path / "model.gguf", keys_of(config) | (keys or {}), tensors, **options)

    return make


def refused(file, *words, kind=ValueError):
    """Loading ends in one sentence that names the file and has these words."""
    with pytest.raises(kind) as caught:
        models.load(file)
    said = str(caught.value)
    assert "\n" not in said and str(file) in said, said
    for word in words:
        assert word in said
    assert caught.value.__cause__ is None and (caught.value.__suppress_context__ or not caught.value.__context__)


def test_a_file_that_says_of_other_layers_whether_they_have_a_window_is_refused(make):
    key = "olmo2.attention.sliding_window_pattern"
    refused(make("olmo3", {key: [True]}), "windowed is [True]; expected true or false for each layer.", key)
    refused(make("olmo3", {key: 2}), "windowed is 2; expected true or false for each layer.", key)
    file = make("olmo3", {key: None})  # every fourth layer has none
    assert models.load(file)[0].config.sliding_windows == (16, 16)


@pytest.mark.parametrize("name", CONFIGS)
def test_model_is_the_one_it_was_written_from(name, make):
    model, tokenizer = models.load(make(name))
    assert model.config == CONFIGS[name]
    assert tokenizer is None
    compared = written_from(name)
    if model.config.norm_offset:  # llama.cpp stores 1 + weight, rounded
        for path, leaf in nnx.to_flat_state(nnx.state(model)):
            if "norm" in path[-1]:
                of = lambda held, key: held[key] if isinstance(key, int) else getattr(held, key)  # noqa: E731
                theirs = functools.reduce(of, path, compared)[...]
                np.testing.assert_allclose(leaf[...], theirs, atol=1e-6)
                leaf[...] = theirs
    assert_same(model, compared)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("llama", {"embedding": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}),
        ("llama_biases", {"layers.value_bias": "blk.{}.attn_v.bias", "layers.output_bias": "blk.{}.attn_output.bias"}),
        (
            "olmo2",
            {
                "layers.wide_query_norm": "blk.{}.attn_q_norm.weight",
                "layers.attention_post_norm": "blk.{}.post_attention_norm.weight",
            },
        ),
        (
            "gemma2",
            {"layers.feed_norm": "blk.{}.ffn_norm.weight", "layers.feed_post_norm": "blk.{}.post_ffw_norm.weight"},
        ),
        (
            "gpt_oss",
            {
                "layers.sink_logits": "blk.{}.attn_sinks.weight", "layers.router_bias": "blk.{}.ffn_gate_inp.bias",
                "layers.expert_up_bias": "blk.{}.ffn_up_exps.bias[{}]",
                "layers.feed_norm": "blk.{}.post_attention_norm.weight",
            },
        ),
        (
            "qwen3moe_mixed",
            {
                "layers.router": "blk.{}.ffn_gate_inp.weight", "layers.expert_up": "blk.{}.ffn_up_exps.weight[{}]",
                "layers.up": "blk.{}.ffn_up.weight",
            },
        ),
    ],
)  # fmt: skip
def test_tensors_are_called_as_in_llama_cpp(name, named):
    config = CONFIGS[name]
    renamed, names = names_in(LLAMA_CPP.get(config.architecture, config.architecture)), tensor_names(config)
    assert {parameter: renamed(names[parameter]) for parameter in named} == named


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F16, "float16"), (Kind.BF16, "bfloat16"), (Kind.Q8_0, "float32")])
def test_weights_have_the_dtype_that_was_stored_or_the_one_asked_for(kind, dtype, make):
    file = make(kind=kind)
    for asked in (None, "bfloat16", "float32"):
        found = {array.dtype.name for array in parameters(models.load(file, dtype=asked)[0]).values()}
        assert found == {asked or dtype}


def readable_kinds():
    for kind in Kind:
        try:
            gguf.quants.dequantize(np.zeros(gguf.GGML_QUANT_SIZES[kind][1], np.uint8), kind)
        except NotImplementedError:
            continue
        yield kind


@pytest.mark.parametrize("kind", list(readable_kinds()), ids=lambda kind: kind.name)
def test_every_kind_that_the_package_dequantises_is_read(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["models.mesh"], "CHUNK_BYTES", 3000)  # two rows and a bit
    config = Config(**SMALL | {"hidden_size": 256, "num_layers": 1})  # whole blocks of every kind
    tensors = dict(tensors_of(config))
    block, size = gguf.GGML_QUANT_SIZES[kind]
    # Bytes below 0x3C: whatever of them is a half-precision scale is a moderate number.
    data = np.random.default_rng(0).integers(0, 0x3C, (96, 256 // block * size), np.uint8)
    tensors["blk.0.ffn_gate.weight"] = (kind, data)
    model, _ = models.load(write(tmp_path / "model.gguf", keys_of(config), tensors), dtype="float32")
    np.testing.assert_array_equal(np.asarray(parameters(model)["layers.gate"])[0].T, gguf.quants.dequantize(data, kind))


@pytest.mark.parametrize("name", ["llama", "llama_biases"])
def test_rows_are_in_order_whatever_part_is_read(name, make, monkeypatch):
    monkeypatch.setattr(sys.modules["models.mesh"], "CHUNK_BYTES", 700)  # ends within a head
    assert_same(models.load(make(name))[0], written_from(name))


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices; conftest.py forces them on a CPU")
def test_sharded_model_has_the_same_weights(make):
    model, _ = models.load(make("llama_biases"), mesh=models.parse_mesh("data=2,tensor=2"))
    assert_same(model, written_from("llama_biases"))


@pytest.mark.matrix
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_peak_memory_is_at_most_1_3_times_the_weights(tmp_path):
    # So large that the weights are what a process takes.
    config = Config(16_000, 512, 1536, num_layers=12, num_heads=8, num_kv_heads=2)
    keys = keys_of(dataclasses.replace(config, bos=1, eos=(2,), pad=0))
    zeros = {
        name: tensor if tensor.ndim == 1 else (Kind.Q8_0, np.zeros((len(tensor), tensor.shape[1] // 32 * 34), np.uint8))
        for name, tensor in tensors_of.__wrapped__(config).items()
    }
    model_of.cache_clear()
    file = write(tmp_path / "model.gguf", keys, zeros)
    tiny = write(tmp_path / "tiny.gguf", keys_of(CONFIGS["llama"]), tensors_of(CONFIGS["llama"]))
    command = [sys.executable, "-c", PEAK, str(tiny), str(file), "float32"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout
    assert float(output) <= 1.3


def test_describe_reads_no_weights_and_a_predictor_lies_beside_the_file(make):
    file = make()
    assert find_folder(file) == file.parent
    with file.open("r+b") as stream:
        stream.seek(-400, 2)
        stream.write(b"\xff" * 400)  # NaN
    assert describe(file)[0] == CONFIGS["llama"]


SCALING = "llama.rope.scaling."
LINEAR = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
YARN = Rope(500_000.0, "yarn", 4.0, 32)


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({}, Rope(500_000.0)),
        ({"llama.rope.freq_base": None}, Rope(10_000.0)),
        (LINEAR | {"llama.rope.scaling.type": "none"}, Rope(500_000.0)),
        (LINEAR, Rope(500_000.0, "linear", 4.0)),
        ({"llama.rope.scale_linear": 2.0}, Rope(500_000.0, "linear", 2.0)),
        (LINEAR | {"llama.rope.scaling.type": "yarn", f"{SCALING}original_context_length": 32}, YARN),
    ],
)
def test_rope_scaling(keys, rope, make):
    assert describe(make(keys=keys))[0].rope == rope


def frequencies(rope):
    return reference.inverse_frequencies(rope, CONFIGS["llama"].head_dim, 8)[0]


def with_factors(factors):
    return lambda tensors: tensors.update({"rope_freqs.weight": np.asarray(factors, np.float32)})


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 65_536)])
def test_frequency_factors_are_llama_3_1s_scaling(factor, original, make):
    rope = Rope(500_000.0, "llama3", factor, original)
    found = describe(make(change=with_factors(frequencies(Rope(500_000.0)) / frequencies(rope))))[0].rope
    np.testing.assert_allclose(frequencies(found), frequencies(rope), rtol=1e-5)
    assert describe(make(change=with_factors(np.ones(8))))[0].rope == Rope(500_000.0)


@pytest.mark.parametrize(
    "keys",
    [
        {"llama.expert_count": 0, "llama.expert_used_count": 0},
        {"llama.vocab_size": 96, "llama.tensor_data_layout": "Meta AI original pth"},
        {"llama.attention.head_count": [4, 4], "llama.attention.head_count_kv": [2, 2]},
        {"llama.attention.key_length": None, "llama.attention.value_length": None, "llama.rope.dimension_count": None},
        {"general.alignment": 64},
        {"general.name": "Any name", "quantize.imatrix.file": "a.dat"},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_keys_that_change_nothing(keys, make):
    assert_same(models.load(make(keys=keys))[0], written_from("llama"))


@given(st.floats(0, 1, exclude_max=True))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_truncated_file_is_refused_wherever_it_ends(make, share):
    file = make(keys=bpe("gpt-2"))
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    refused(file, "truncated")


@given(st.integers(24, 3000), st.binary(min_size=1, max_size=8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_damaged_header_ends_in_a_sentence_or_a_model(make, at, damage):
    file = make("llama_tied", keys=bpe("gpt-2"))
    whole = file.read_bytes()
    file.write_bytes(whole[:at] + damage + whole[at + len(damage) :])
    try:
        models.load(file)
    except ValueError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("kind", "said"), [(99, "stored in type 99"), (int(Kind.Q4_K), "not a whole number of blocks")]
)
def test_types_that_do_not_fit_are_refused(kind, said, make):
    file = make(change=lambda tensors: tensors.update({"output_norm.weight": np.ones(64, np.float32)}))
    name = b"output_norm.weight"
    content = bytearray(file.read_bytes())
    at = content.index(name) + len(name) + 4 + 8  # the number of axes, and one axis
    content[at : at + 4] = struct.pack("<I", kind)
    file.write_bytes(content)
    refused(file, "output_norm.weight", said)


def test_package_that_is_missing_is_named(make, monkeypatch):
    file = make()
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(file, "pip install -e '.[gguf]'", kind=ImportError)


@pytest.mark.parametrize(
    ("keys", "sampling", "unknown"),
    [
        ({"temp": 0.5, "top_k": 3, "min_p": 0.25, "penalty_last_n": 64}, Sampling(0.5, 3, min_p=0.25), None),
        ({"top_k": 3}, Sampling(), None),
        (
            {"temp": 0.5, "penalty_repeat": 1.5, "xtc_probability": 0.5},
            Sampling(0.5),
            "penalty_repeat, xtc_probability",
        ),
    ],
)
def test_the_published_sampling_is_that_of_the_keys(keys, sampling, unknown, make):
    file = make(keys={f"general.sampling.{name}": value for name, value in keys.items()})
    with contextlib.nullcontext() if unknown is None else pytest.warns(match=f"sets {unknown}, which is not applied"):
        assert published_sampling(file) == sampling


def test_folder_with_nothing_but_the_file_names_it(make):
    file = make()
    with pytest.raises(FileNotFoundError, match=r"no config\.json.*or the file .*model\.gguf"):
        models.load(file.parent)


ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<pad>", "<s>", "<|end|>", "<|eot_id|>", "<tool>", "[PAD5]"]
TYPES = [3, 3, 3, 3, 4, 5]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "12 3", "Ġ 1", "Ġ Ġ", "l l", "' ll", "i n", "Ċ Ċ", "! !", ". Ċ"]
TOKENS = [*SPECIAL, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}"
TEXT = st.lists(
    st.sampled_from([*"the tin 123'll!. \n\tÉ½中", "\u0301", "he", "12", " the", "\n\n", "'LL", "<s>"]), max_size=12
).map("".join)


def bpe(pre, **keys):
    types = [*TYPES, *[1] * (len(TOKENS) - len(TYPES))]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": MERGES, "tokenizer.chat_template": TEMPLATE,
        **{f"tokenizer.ggml.{name}": value for name, value in keys.items()},
    }  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Gives the tokenizer of a file with these keys."""

    def read(keys):
        config = dataclasses.replace(CONFIGS["llama_tied"], vocab_size=400)
        folder = tmp_path_factory.mktemp("tokenizer")
        return describe(write(folder / "model.gguf", keys_of(config) | keys, tensors_of(config)))[1]

    return read


@pytest.fixture(scope="module")
def gpt2(tokenizer):
    return tokenizer(bpe("gpt-2"))


@given(TEXT)
def test_texts_come_back(gpt2, text):
    assert gpt2.decode(gpt2.encode(text), skip_special_tokens=False) == text


def test_letters_are_merged_in_the_order_of_the_merges(gpt2):
    merged = ["Ġthe", "Ġ", "Ġ", "123", "!!", "ĊĊ", "<s>", "in", "t"]
    assert gpt2.encode(" the  123!!\n\n<s>int") == [TOKENS.index(token) for token in merged]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'", "LL", " go", " 1234", "!!", "\n\n ", " the", " ½", ".", " myFun"]),
        ("smollm", ["I", "'", "LL", " go", " ", "1", "2", "3", "4", "!!", "\n\n ", " the", " ", "½", ".", " myFun"]),
        ("default", ["I", "'", "LL", " go", " ", "123", "4", "!!", "\n\n ", " the", " ", "½", ".", " myFun"]),
        ("llama-bpe", ["I", "'LL", " go", " ", "123", "4", "!!\n\n", " ", " the", " ", "½", ".", " myFun"]),
        ("qwen2", ["I", "'LL", " go", " ", "1", "2", "3", "4", "!!\n\n", " ", " the", " ", "½", ".", " myFun"]),
        ("refact", ["I", "'", "LL", " go", " ", "1", "2", "3", "4", "!!", "\n\n ", " the", " ", "½", ".", " myFun"]),
        ("dbrx", ["I", "'LL", " go", " ", "123", "4", "!!\n\n", " ", " the", " ", "½", ".", " myFun"]),
        ("deepseek-v3", ["I", "'LL", " go", " ", "123", "4", "!!\n\n", " ", " the", " ", "½", ".", " myFun"]),
        ("qwen35", ["I", "'LL", " go", " ", "1", "2", "3", "4", "!!\n\n", " ", " the", " ", "½", ".", " myFun"]),
        ("glm4", ["I", "'LL", " go", " ", "123", "4", "!!\n\n", " ", " the", " ", "½", ".", " myFun"]),
        ("gpt-4o", ["I'LL", " go", " ", "123", "4", "!!\n\n", " ", " the", " ", "½", ".", " my", "Fun"]),
    ],
)
def test_pre_tokenizers_split_texts(pre, pieces, tokenizer):
    split = tokenizer(bpe(pre)).backend.pre_tokenizer.pre_tokenize_str("I'LL go 1234!!\n\n  the ½. myFun")
    decode = tokenizers.decoders.ByteLevel().decode
    assert [decode([piece]) for piece, _ in split] == pieces


def test_llama_takes_a_whole_token_without_its_merges(tokenizer):
    keys = bpe("llama-bpe")
    keys["tokenizer.ggml.merges"] = [merge for merge in MERGES if merge != "12 3"]
    assert tokenizer(keys).encode("123", add_special_tokens=False) == [TOKENS.index("123")]


def test_qwen_composes_characters(tokenizer):
    backend = tokenizer(bpe("qwen2"))
    assert backend.encode("e\u0301") == backend.encode("é")


def test_special_tokens_and_chat_template(tokenizer):
    found = tokenizer(bpe("gpt-2"))
    assert (found.bos, found.eos, found.pad) == (1, 2, 0)
    assert found.chat([{"role": "user", "content": "hi"}]) == "<s>hi<|eot_id|>"
    assert found.encode("<|end|>") == [2] and found.decode([2]) == ""
    assert found.encode("a<tool>")[-1] == 4 and found.decode([4]) == "<tool>"
    assert found.backend.token_to_id("[PAD5]") is None and found.vocab_size == len(TOKENS) - 1, "an unused place"


@pytest.mark.parametrize(
    ("pre", "keys", "around"),
    [
        ("gpt-2", {}, ([], [])),
        ("llama-bpe", {}, ([1], [])),
        ("llama-bpe", {"add_bos_token": False}, ([], [])),
        ("gpt-2", {"add_bos_token": True}, ([1], [])),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, ([1], [2])),
    ],
)
def test_tokens_around_a_text(pre, keys, around, tokenizer):
    before, behind = around
    text = [TOKENS.index("a")]
    assert tokenizer(bpe(pre, **keys)).encode("a") == [*before, *text, *behind]


@pytest.mark.parametrize(
    ("keys", "eos"),
    [
        (bpe("gpt-2"), (2, 3)),  # the template ends turns by a control token
        (bpe("gpt-2") | {"tokenizer.chat_template": "none"}, (2,)),
        (bpe("gpt-2", eot_token_id=0, eom_token_id=4), (2, 0, 4, 3)),
        (bpe("gpt-2", eos_token_id=2**32 - 1), (3,)),
    ],
)
def test_end_tokens(keys, eos, make):
    config = describe(make(change=widened, keys=keys))[0]
    assert config.eos == eos


@pytest.mark.parametrize("kind", [1, 3, 4])  # normal, control, user-defined
def test_a_token_that_ends_a_turn_is_a_control_token_whatever_its_type_is(kind, make):
    keys = bpe("gpt-2")
    keys["tokenizer.ggml.token_type"][3] = kind
    config, found = describe(make(change=widened, keys=keys))
    assert config.eos == (2, 3)
    assert found.encode("a<|eot_id|>")[-1] == 3 and found.decode([3]) == ""


def test_a_token_that_the_file_names_as_an_end_is_a_control_token(tokenizer):
    keys = bpe("gpt-2", eos_token_id=4)  # <tool>, which is user-defined
    assert tokenizer(keys).decode([4]) == ""


def widened(tensors):
    tensors |= {name: np.zeros((400, 64), np.float32) for name in ("token_embd.weight", "output.weight")}


def put(tensors):
    def change(written):
        for name, tensor in tensors.items():
            written[name] = tensor.astype(np.float32) if isinstance(tensor, np.ndarray) else tensor
            if tensor is None:
                del written[name]

    return change


@pytest.mark.parametrize(("made", "said"), calls("gguf.txt"))
def test_a_file_is_refused(made, said, make):
    refused(make(**eval(made)), said)


def test_a_family_of_an_installed_package_is_found(tmp_path, monkeypatch):
    code = "from models.families import Family, Gguf\nown = Family(dict, gguf=Gguf('own'))"
    installed(tmp_path, "pkg_gguf", code, families="mine = pkg_gguf:own")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert family_in({"general.architecture": "own"})[0] == "mine"


def test_a_file_that_names_no_pre_tokenizer_is_split_as_in_llama_cpp_with_a_warning(tokenizer):
    with pytest.warns(UserWarning, match=r"does not name its pre-tokenizer \(tokenizer.ggml.pre\).* called 'default'"):
        found = tokenizer(bpe(None))
    text = "I'LL go 1234!!"
    assert found.encode(text) == tokenizer(bpe("default")).encode(text) != tokenizer(bpe("llama-bpe")).encode(text)


def test_what_a_file_says_of_bos_does_not_count_beside_a_tokenizer_json(make):
    file = make(keys={"tokenizer.ggml.add_bos_token": False})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "tokenizer" / name, file.parent)
    with pytest.warns(UserWarning, match=r"model\.gguf says that add_bos_token is false, but tokenizer\.json puts one"):
        found = describe(file)[1]
    assert found.encode("a")[0] == found.bos


@pytest.mark.parametrize("keys", [{}, bpe("deepseek-llm"), {"tokenizer.ggml.model": "t5"}])
def test_tokenizer_beside_the_file_is_used(keys, make):
    file = make(keys=keys, change=widened)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "tokenizer" / name, file.parent)
    expected = json.loads((GOLDEN / "tokenizer" / "expected.json").read_text())
    found = describe(file)[1]
    assert [found.encode(text) for text in expected["texts"]] == expected["ids"]


PIECES = {
    "▁": -3.0, "t": -9.0, "h": -9.0, "e": -9.0, "a": -9.0, "b": -9.0, "▁t": -1.0, "he": -1.5, "▁the": -2.0, "th": -0.5,
    "ab": -4.0, "aba": -4.5, "▁▁": -5.0, "bab": -3.5, "the": -2.5,
}  # fmt: skip


def sentencepiece(**keys):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [*[0.0] * 259, *PIECES.values()],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES)],
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{name}": value for name, value in keys.items()},
    }


def joined_by_score(text):
    """SentencePiece's definition: of all neighbours that make a piece, the best are joined; of equals, the first."""
    pieces = list(text)
    while True:
        pairs = [(-PIECES[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in PIECES]
        if not pairs:
            return pieces
        at = min(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def expected_ids(text):
    names = sentencepiece()["tokenizer.ggml.tokens"]
    ids = []
    for piece in joined_by_score(text):
        known = piece in PIECES
        ids += [names.index(piece)] if known else [names.index(f"<0x{byte:02X}>") for byte in piece.encode()]
    return ids


@pytest.fixture(scope="module")
def pieces(tokenizer):
    return tokenizer(sentencepiece()), tokenizer(sentencepiece(add_space_prefix=False, add_bos_token=False))


@example("tha th")  # "th" scores better than "▁t"
@given(st.text(st.sampled_from("theab é中"), min_size=1, max_size=12))
def test_pieces_are_joined_by_score_and_texts_come_back(pieces, text):
    with_prefix, without = pieces
    assert with_prefix.decode(with_prefix.encode(text)) == without.decode(without.encode(text)) == text
    spaced = text.replace(" ", "▁")
    assert with_prefix.encode(text) == [1, *expected_ids("▁" + spaced)]
    assert without.encode(text) == expected_ids(spaced)


def test_gemma_4s_pieces_are_joined_in_the_order_of_its_merges(pieces, tokenizer):
    merges = [
        f"{piece[:at]} {piece[at:]}"
        for piece in sorted(PIECES, key=lambda piece: -PIECES[piece])
        for at in range(1, len(piece))
        if {piece[:at], piece[at:]} <= PIECES.keys()
    ]
    own = {"model": "gemma4", "merges": merges, "scores": None, "add_space_prefix": False, "add_bos_token": False}
    found = tokenizer(sentencepiece(**own))
    for text in ("the bath tha", "aba  bab\né", "中the"):
        assert found.encode(text) == pieces[1].encode(text) and found.decode(found.encode(text)) == text


# Phi-3's vocabulary behind SentencePiece's, with a chat as its template writes it.
PHI3 = ["<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>"]
CHAT = "<|user|>\nthe<|end|>\n<|assistant|>\n"


def phi3(**keys):
    keys = sentencepiece() | {"general.architecture": "phi3", "general.name": "mine"} | keys
    keys["tokenizer.ggml.tokens"] = keys["tokenizer.ggml.tokens"] + PHI3
    keys["tokenizer.ggml.scores"] = keys["tokenizer.ggml.scores"] + [0.0] * 4
    keys["tokenizer.ggml.token_type"] = keys["tokenizer.ggml.token_type"] + [3, 3, 3, 4]
    return keys


@pytest.fixture
def of_keys(make):
    """Gives the tokenizer of a file with these keys, of the architecture that they name."""
    return lambda keys: describe(make(keys["general.architecture"], keys=keys, change=widened))[1]


@pytest.mark.parametrize("named", [{}, {"general.architecture": "llama", "general.name": "A Phi-3 mini"}])
def test_phi3s_special_tokens_take_in_the_blanks_behind_them(named, of_keys):
    found = of_keys(phi3(**named))
    endoftext, assistant, end, user = (found.backend.token_to_id(token) for token in PHI3)
    the, newline, blank = (found.backend.token_to_id(token) for token in ("▁the", "<0x0A>", "▁"))
    assert found.encode(CHAT, add_special_tokens=False) == [user, the, end, assistant]
    assert found.encode("<|endoftext|>\n", add_special_tokens=False) == [endoftext, blank, newline]


def test_other_vocabularies_keep_the_blanks_behind_special_tokens(of_keys):
    found = of_keys(phi3(**{"general.architecture": "llama"}))
    newline = found.backend.token_to_id("<0x0A>")
    assert found.encode(CHAT, add_special_tokens=False).count(newline) == 3


def test_bar_counts_every_tensor(make, monkeypatch):
    counted = []
    monkeypatch.setattr(tqdm, "update", lambda bar, count: counted.append((count, bar.total)))
    models.load(make())
    assert len(counted) == counted[0][1] == 3 + 2 * 9
