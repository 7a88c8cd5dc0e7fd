"""config.json of both transformers generations, read and written."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from models.config import Config, Rope, described
from models.config_json import from_hugging_face, to_hugging_face
from models.parameters import parameter_shapes
from tests.models.make_golden import GOLDEN, MODELS

MINIMAL = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4,
}  # fmt: skip


LENGTH = "original_max_position_embeddings"


def of(family, **fields):
    return {"architectures": [f"{family}ForCausalLM"], **fields}


def read(**fields):
    return from_hugging_face(MINIMAL | fields)


# The families of the language models in others.
INSIDE = {"gemma3_vision": "gemma3_text", "mistral3_vision": "mistral", "qwen3_vl": "qwen3"}
INSIDE |= {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}


@pytest.mark.parametrize("name", INSIDE)
def test_the_language_model_of_a_model_that_sees_is_read_and_written(name):
    raw = json.loads((GOLDEN / name / "config.json").read_text())
    config = from_hugging_face(raw | {"eos_token_id": [5, 6]})
    assert config.architecture == INSIDE[name] and config.eos == (5, 6)  # as the whole model says
    written = to_hugging_face(config)
    assert "vision_config" not in written and written["model_type"] == INSIDE[name]
    assert from_hugging_face(written) == config
    named = raw["text_config"] | {"model_type": INSIDE[name]}
    assert from_hugging_face(raw | {"text_config": named}) == from_hugging_face(raw)


def test_a_language_model_within_another_is_refused_in_one_sentence():
    raw = json.loads((GOLDEN / "gemma3_vision" / "config.json").read_text())
    for changed, sentence in (
        (
            raw | {"text_config": raw["text_config"] | {"model_type": "llama"}},
            "has model_type 'llama'; expected gemma3_tex",
        ),
        (raw | {"text_config": None}, "text_config is None; expected the object that describes the language model"),
        (
            raw | {"model_type": "llava"},
            "architecture Gemma3ForConditionalGeneration is not supported; supported are Ll",
        ),
        (raw | {"quantization_config": {"bits": 4}}, "quantization_config is set, and only FP8 in blocks"),
    ):
        with pytest.raises(ValueError, match=sentence):
            from_hugging_face(changed)


def test_a_config_without_the_class_of_a_causal_model_is_read_by_its_model_type():
    plain = {name: value for name, value in MINIMAL.items() if name != "architectures"} | {"model_type": "llama"}
    for named in ({}, {"architectures": None}, {"architectures": []}, {"architectures": ["LlamaModel"]}):
        assert from_hugging_face(plain | named) == read()
    text = {"architectures": ["Gemma3TextModel"], "model_type": "gemma3_text"}
    assert from_hugging_face(plain | text).architecture == "gemma3_text"
    latent = json.loads((GOLDEN / "deepseek_v3" / "config.json").read_text())
    kimi = latent | {"architectures": None, "model_type": "kimi_k2"}
    assert from_hugging_face(kimi) == from_hugging_face(latent)
    with pytest.raises(
        ValueError, match="architecture LlamaForSequenceClassification is not supported; supported are Ll"
    ):
        from_hugging_face(plain | {"architectures": ["LlamaForSequenceClassification"]})
    with pytest.raises(ValueError, match="model_type 'gpt2', without architectures, is not supported; sup"):
        from_hugging_face(plain | {"model_type": "gpt2"})


@pytest.mark.parametrize(
    ("fields", "positions"),
    [
        ({"max_position_embeddings": 40_960, LENGTH: 32_768}, 131_072),  # Qwen3 as its card extends it
        ({"max_position_embeddings": 32_768, LENGTH: 32_768}, 131_072),  # Qwen2.5
        ({"max_position_embeddings": 32_768}, 131_072),  # as in transformers, the original length is the model's own
        ({"max_position_embeddings": 262_144, LENGTH: 32_768}, 262_144),
    ],
)
def test_yarn_multiplies_the_original_length_where_the_config_names_no_more(fields, positions):
    scaling = {"rope_type": "yarn", "factor": 4.0}
    config = read(rope_scaling=scaling, **fields)
    assert config.max_positions == positions
    assert from_hugging_face(to_hugging_face(dataclasses.replace(config, source=None))).max_positions == positions
    assert (
        read(rope_scaling=scaling | {"rope_type": "linear"}, **fields).max_positions
        == fields["max_position_embeddings"]
    )


@pytest.mark.parametrize("name", [name for name in MODELS if name not in INSIDE])
def test_both_generations_read_the_same_and_what_was_read_is_written(name):
    new = json.loads((GOLDEN / name / "config.json").read_text())
    parameters = dict(new["rope_parameters"])
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    if "sliding_attention" in parameters:
        old["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = dict(parameters["full_attention"])
    old["rope_theta"] = parameters.pop("rope_theta")
    if "partial_rotary_factor" in parameters:
        old["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
    kind = parameters.pop("rope_type")
    if kind != "default":
        old["rope_scaling"] = parameters | {"type": kind}
    config = from_hugging_face(new)
    assert config == from_hugging_face(old)
    assert to_hugging_face(config).items() >= new.items()


@pytest.mark.parametrize(
    ("fields", "scaling", "rope"),
    [
        ({}, {"rope_type": "linear", "factor": 2}, Rope(type="linear", factor=2.0)),
        (
            {LENGTH: 512},
            {"type": "yarn", "factor": 4.0, "truncate": False, "beta_slow": 2.0, "mscale": 0.5},
            Rope(type="yarn", factor=4.0, original_positions=512, truncate=False, beta_slow=2.0, mscale=0.5),
        ),
        ({LENGTH: 512}, {"type": "yarn", "factor": 4.0}, Rope(type="yarn", factor=4.0, original_positions=512)),
        # YaRN without a factor takes the ratio of lengths; "dynamic" grows from the model's own length.
        (
            {"max_position_embeddings": 2048},
            {"type": "yarn", "factor": None, LENGTH: 512},
            Rope(type="yarn", factor=4.0, original_positions=512),
        ),
        (
            {"max_position_embeddings": 512},
            {"type": "dynamic", "factor": 2.0, LENGTH: 7},
            Rope(type="dynamic", factor=2.0, original_positions=512),
        ),
    ],
)
def test_rope_scalings_of_all_generations_are_read(fields, scaling, rope):
    config = read(**fields, rope_scaling=scaling)
    assert config.rope == rope
    assert from_hugging_face(to_hugging_face(dataclasses.replace(config, source=None))) == config


def test_fields_left_out_take_their_defaults():
    assert read() == Config(64, 32, 48, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=8)
    assert read(**of("Qwen3")).head_dim == 128
    granite = read(**of("Granite"))
    assert (granite.attention_multiplier, granite.logits_scaling) == (1.0, 1.0)
    assert read(**of("Mistral")).sliding_windows == (4096,) * 3  # as in transformers
    assert read(**of("Mistral"), sliding_window=None).sliding_windows == (None,) * 3
    mixtral = read(**of("Mixtral"))
    assert (mixtral.rope.theta, mixtral.norm_epsilon, mixtral.num_experts) == (1e6, 1e-5, 8)
    scaled = read(rope_scaling={"rope_type": "llama3", "factor": 8.0}, max_position_embeddings=512).rope
    assert scaled == Rope(type="llama3", factor=8.0, original_positions=512, high_freq_factor=4.0)
    for name, bias in (("Qwen2", True), ("Mistral", False)):  # whatever they say
        config = read(**of(name), attention_bias=True)
        assert (config.attention_bias, config.output_bias) == (bias, False)


def test_every_fourth_layer_of_smollm3_has_no_rotary_embedding_by_default():
    config = read(**of("SmolLM3"), num_hidden_layers=8)
    assert [rope is None for rope in config.ropes] == [True, True, True, False] * 2
    assert config.tie_embeddings
    every = read(**of("SmolLM3"), no_rope_layers=[1, 1, 1])
    assert every.ropes == ()


def test_a_description_holds_the_features_that_a_model_has_and_no_others():
    plain, granite = described(read()), described(read(**of("Granite")))
    assert "attention_multiplier" not in plain and "partial_rotary_factor" not in plain["rope"]
    assert granite == plain | {"architecture": "granite", "attention_multiplier": 1.0}
    ropes = described(read(**of("SmolLM3"), no_rope_layers=[1, 0, 1]))["ropes"]
    assert ropes[::2] == [None, None] and ropes[1]["partial_rotary_factor"] == 0


def test_the_first_phi3_models_call_longrope_by_other_names():
    scaling = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    fields = dict(architectures=["Phi3ForCausalLM"], max_position_embeddings=512, original_max_position_embeddings=64)
    rope = read(**fields, rope_scaling=scaling).rope
    assert (rope.type, rope.factor, rope.original_positions) == ("longrope", 8.0, 64)
    assert read(**fields, rope_scaling=scaling | {"type": "yarn"}).rope == rope


# The config.json of public models, beside their number of parameters, or why they are refused.
PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())


def test_published_models_are_read_with_their_number_of_parameters_or_refused_in_one_sentence():
    wrong, accepted = [], 0
    for name, raw in PUBLISHED.items():
        try:
            shapes = parameter_shapes(from_hugging_face(raw)).values()
            found = sum(math.prod(shape) for shape in shapes)  # the language model's, where there is more
            accepted += 1
        except ValueError as error:
            found = str(error)
            assert found.endswith(".") and ". " not in found, found
        if found != raw.get("parameters") and not str(found).startswith(raw.get("refused", "nothing")):
            wrong.append((name, found))
    assert not wrong
    assert (accepted, len(PUBLISHED)) == (123, 159)


def test_published_models_have_their_windows_and_positions():
    read = {name: from_hugging_face(raw) for name, raw in PUBLISHED.items() if "parameters" in raw}
    names = ("Qwen3-30B-A3B", "gemma-2-2b", "gemma-3-1b", "gemma-3-27b-it", "Olmo-3-1025-7B", "EXAONE-4.0-32B")
    windows = [sum(window is not None for window in read[name].sliding_windows) for name in names]
    assert windows == [0, 13, 22, 52, 24, 48]
    names = ("Qwen3-8B", "Qwen3-8B with YaRN, as its card says", "Olmo-3-1025-7B", "Ministral-3-8B-Base-2512")
    assert [read[name].max_positions for name in names] == [40_960, 131_072, 65_536, 262_144]
    gemma = read["gemma-3-27b-it"]
    assert (gemma.rope, gemma.ropes[0]) == (Rope(1e6, "linear", 8.0), Rope(10_000.0))
    assert (gemma.attention_multiplier, gemma.eos, gemma.tie_embeddings) == (168**-0.5, (1, 106), True)


def test_gemma_without_a_cap_has_none_and_without_an_entry_has_its_own():
    gemma2 = from_hugging_face(PUBLISHED["gemma-2-2b"])
    assert (gemma2.attention_soft_cap, gemma2.logits_soft_cap) == (50.0, 30.0)
    gemma2 = from_hugging_face(PUBLISHED["gemma-2-2b"] | {"attn_logit_softcapping": None})
    assert (gemma2.attention_soft_cap, gemma2.logits_soft_cap) == (None, 30.0)
    other = from_hugging_face(PUBLISHED["gemma-2-2b"] | {"query_pre_attn_scalar": 144})  # as in the one of 27 B
    assert other.attention_multiplier == 1 / 12
    gemma3 = from_hugging_face(PUBLISHED["gemma-3-1b"])
    assert (gemma3.attention_soft_cap, gemma3.attention_multiplier) == (None, None)
    assert gemma3.ropes[:6] == (Rope(theta=10_000.0),) * 5 + (None,) and gemma3.rope.theta == 1e6


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"use_sliding_window": False, "max_window_layers": 1}, (None, None, None)),
        ({"use_sliding_window": True, "max_window_layers": 1}, (None, 8, 8)),
        ({"use_sliding_window": True}, (None, None, None)),
        (
            {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            (8, None, 8),
        ),
    ],
    ids=["unused", "from a layer on", "from layer 28 on", "layer by layer"],
)
def test_qwen_sliding_windows(fields, windows):
    assert read(**of("Qwen2"), sliding_window=8, **fields).sliding_windows == windows


def test_end_tokens():
    assert [read(eos_token_id=given).eos for given in (7, [7, 8], None)] == [(7,), (7, 8), ()]


def test_numbers_of_numpy_become_pythons_own():
    config = dataclasses.replace(read(), num_layers=np.int64(3), sliding_windows=[None, np.int32(4), None])
    assert (type(config.num_layers), type(config.sliding_windows[1])) == (int, int)
    assert config == dataclasses.replace(read(), sliding_windows=(None, 4, None))


MIXED = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 6, "moe_intermediate_size": 12, "num_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "sparse"),
    [
        ({"decoder_sparse_step": 4}, (3,)),
        ({"mlp_only_layers": [0, 9]}, (1, 2, 3, 4, 5)),  # transformers takes no notice of a layer that is not there
        ({"decoder_sparse_step": 3, "mlp_only_layers": [5]}, (2,)),
        ({"decoder_sparse_step": 7}, ()),
    ],
)
def test_layers_without_experts_are_those_of_transformers(fields, sparse):
    config = read(**MIXED | fields)
    assert config.dense_sizes == tuple(None if layer in sparse else 48 for layer in range(6))
    assert config.sparse_layers == sparse and config.intermediate_size == 12 and config.dense_size == 48
    assert config.dense_layers == tuple(layer for layer in range(6) if layer not in sparse)
    shapes = parameter_shapes(config)  # nothing is allocated for a layer that lacks it
    assert shapes["layers.gate"] == (6 - len(sparse), 32, 48)
    assert shapes.get("layers.expert_gate", (0,))[0] == len(sparse)


def test_a_mixtral_has_experts_in_all_layers():
    fields = {"architectures": ["MixtralForCausalLM"], "decoder_sparse_step": 2, "mlp_only_layers": [0]}
    assert read(**fields).dense_sizes == ()  # transformers reads neither of a Mixtral
