"""Each family through the engine: block by block over a cache, its logits are those of transformers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from kernels_pallas.add_rms_norm.reference import rms_norm
from models import decoder, dense, engine
from models.config import Rope
from models.rotary import rope_frequencies
from models.steps import _entered, at_layer
from tests.evals.test_selections import simulate
from tests.models import reference, tiny
from tests.models.make_golden import BLOCK, GOLDEN, MASKED, MODELS, NEAR, PROMPT, PROMPTS, RECENT
from tests.tiers import first, nightly


def golden(name):
    arrays = np.load(GOLDEN / name / "golden.npz")
    return arrays["tokens_0"], arrays["logits_0"]


# By layers that differ; by one program tests/campaign compares every family with the reference.
@pytest.mark.parametrize("name", first(1, ["smollm3", "gemma2", "gemma3"]))
def test_blocks_over_a_cache_give_the_logits_of_transformers(name, run_by_layer):
    model, _ = models.load(GOLDEN / name)
    tokens, logits = golden(name)
    found = models.hidden_states(model, tokens, policy="h2o", budget=tokens.shape[1], block=20).hidden
    np.testing.assert_allclose(engine.logits_of(model, found), logits, atol=1e-4, rtol=0)


# One of each kind of attention, which differ in how a cache is read; all of them are compared without one below.
KINDS = """
llama_llama3 phi4_mini gemma3_vision olmo3 gpt_oss deepseek_v2 deepseek_v3 glm4_moe_lite deepseek_v32 qwen3_next qwen3_5
granite4_h gemma4 gemma4_e gemma3n
""".split()


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name", first(len(KINDS), [*KINDS, *(name for name in MASKED if name not in KINDS)], rest=nightly)
)
def test_a_prompt_and_decode_give_the_logits_of_transformers_with_all_tokens_and_under_a_mask(name):
    model, _ = models.load(GOLDEN / name)
    arrays, row, length = np.load(GOLDEN / name / "golden.npz"), len(MODELS[name]) - 1, PROMPTS.get(name, PROMPT)
    tokens, full, masked = (arrays[f"{kind}_{row}"] for kind in ("tokens", "logits", "recency"))
    assert np.abs(masked - full).max() > 1
    for logits, settings in (
        (full, dict(block=BLOCK)),
        (masked, dict(block=BLOCK, policy="recency", budget=RECENT)),
    ):
        prompt = models.hidden_states(model, tokens[:, :length], **settings).hidden
        decode = models.teacher_forced(model, tokens, prompt=length, **settings).hidden
        for found, expected in ((prompt, logits[:, :length]), (decode, logits[:, length - 1 :])):
            np.testing.assert_allclose(engine.logits_of(model, found), expected, atol=1e-4, rtol=0)


def test_logits_bend_to_the_soft_cap_in_selections():
    model, _ = models.load(GOLDEN / "gemma2")
    tokens, logits = golden("gemma2")
    np.testing.assert_allclose(simulate(model, tokens, "oracle", 0.0), logits, atol=1e-4, rtol=0)


def test_the_steps_of_a_selection_bend_to_the_soft_cap():
    capped = dict(norms="both", attention_soft_cap=0.5, attention_multiplier=0.3)
    config = tiny.config(architecture="gemma2", **capped)
    weights, tokens = reference.parameters(config, sharpness=4.0), np.arange(5, 25)[None]
    settings = dict(block=20, max_new_tokens=12, end=())
    found = models.generate(reference.decoder(config, weights), tokens, select="oracle", budget=1.0, **settings)
    expected = reference.run(weights, config, tokens[0], new_tokens=12)
    assert found.tokens[0].tolist() == expected.tokens


def test_what_a_predictor_reads_bends_to_the_soft_cap():
    model, _ = models.load(GOLDEN / "gemma2")
    tokens = golden("gemma2")[0]
    uncapped = models.Decoder(dataclasses.replace(model.config, attention_soft_cap=None), model.arrays())
    read = jax.jit(models.butler_input)
    assert np.abs(np.asarray(read(model, tokens)) - np.asarray(read(uncapped, tokens))).max() > 1e-2


def test_expected_attention_refuses_logits_with_a_soft_cap():
    model, _ = models.load(GOLDEN / "gemma2")
    with pytest.raises(ValueError, match="logits with a soft cap"):
        models.prefill(model, golden("gemma2")[0], policy="expected_attention", budget=8)


def test_a_norm_with_an_offset_is_computed_in_float32():
    x, weight = np.array([1.0, -3.0], jnp.bfloat16), np.array([1e-3, -1e-3], jnp.bfloat16)
    wide = np.array([1.0, -3.0]) / np.sqrt(5.0) * (1 + np.asarray(weight, np.float64))
    found = jax.jit(lambda x, weight: rms_norm(x, weight, 0.0, offset=True))(x, weight)
    np.testing.assert_array_equal(found, wide.astype(np.float32).astype(jnp.bfloat16))


EXPERTS = "expert=2,tensor=2"


@pytest.mark.parametrize(
    ("name", "mesh", "held"),
    [
        ("mixtral", "data=1,tensor=2", dict(expert_gate_up=(2, 2, 16, 2, 12))),
        ("mixtral", EXPERTS, dict(expert_gate_up=(2, 1, 16, 2, 12))),
        pytest.param(
            "gpt_oss", EXPERTS,
            dict(expert_gate_up=(2, 1, 16, 2, 12), expert_up_bias=(2, 1, 12), router_bias=(2, 1), sink_logits=(2, 2)),
            marks=pytest.mark.matrix,
        ),
        (
            "qwen3_moe_mixed", EXPERTS,
            dict(
                expert_gate_up=(2, 1, 16, 2, 12), router=(2, 16, 1), gate_up=(4, 16, 2, 10), down=(4, 10, 16),
                qkv=(6, 16, 1, 4, 8),
            ),
        ),
    ],
)  # fmt: skip
def test_experts_on_several_devices_give_the_logits_of_one(name, mesh, held):
    model, _ = models.load(GOLDEN / name, mesh=models.parse_mesh(mesh))
    layers = {name: array for layer in model.layers for name, array in layer.arrays().items()}  # the last with each
    shards = {name: layers[name].addressable_shards[0].data.shape for name in held}
    assert shards == {name: shape[1:] for name, shape in held.items()}  # of four experts
    tokens, logits = golden(name)
    program = jax.jit(lambda model, tokens: model(tokens)).lower(model, tokens).compile()
    np.testing.assert_allclose(program(model, tokens), logits, atol=1e-4, rtol=0)
    whole = ("f32[4,12,16]", "f32[4,16,24]", "f32[4,16,2,12]")
    assert [shape for shape in whole if shape in program.as_text()] == [], "a device holds all experts"


def test_attention_in_chunks_is_that_of_all_queries(monkeypatch):
    """Compute each query's softmax by itself, for two rows, the second one padded, with a window and sinks."""
    monkeypatch.setattr(dense, "QUERIES_A_CHUNK", 4)
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 10, 2, 8), *[(2, 10, 1, 8)] * 2))
    position = np.array([np.arange(10), [*range(7), -1, -1, -1]])
    sinks = np.array([0.5, -1], np.float32)
    run = jax.jit(dense.attention_in_chunks, static_argnums=5)
    found = np.asarray(run(query, key, value, position, 3, 2.0, sinks))
    for row, t in zip(*np.nonzero(position >= 0), strict=True):
        seen = slice(max(0, t - 2), t + 1)
        for head in range(2):
            logits = 2 * np.tanh(key[row, seen, 0] @ query[row, t, head] / 8**0.5 / 2)
            weights = reference.softmax(np.append(logits, sinks[head]))[:-1]
            np.testing.assert_allclose(found[row, t, head], weights @ value[row, seen, 0], atol=1e-5)


def test_a_predictor_reads_what_the_attention_of_layer_0_reads():
    model, _ = models.load(GOLDEN / "olmo2")
    tokens = golden("olmo2")[0]
    read = jax.jit(functools.partial(models.butler_input, source="attention_input"))
    np.testing.assert_array_equal(
        read(model, tokens), np.asarray(model.embedding[...])[tokens]
    )  # OLMo-2 has no norm before attention
    model, _ = models.load(GOLDEN / "granite")
    x = 3.0 * np.asarray(model.embedding[...])[tokens]
    norm = np.asarray(model.layers[0].attention_norm[...])
    expected = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * norm
    np.testing.assert_allclose(read(model, tokens), expected, atol=1e-5)


def test_keys_are_turned_by_the_rotary_embedding_of_their_layer():
    config = models.load(GOLDEN / "smollm3")[0].config  # its last layer has none
    plan = type("Plan", (), {"positions": "compact", "policy": None, "repeats": None})

    embedding, tokens = np.zeros((config.vocab_size, config.hidden_size)), np.zeros((1, 3), int)
    _, block = _entered(config, plan, embedding, tokens, jnp.arange(3)[None], jnp.array([3]), None, None)
    at = (at_layer(config, block, layer) for layer in (0, 3))
    (frequency, wave), (none, no_wave) = ((here.context.frequency, here.waves[1]) for here in at)
    assert (np.asarray(frequency)[0, :2] > 0).all() and np.asarray(wave).any()
    assert not np.asarray(none).any() and not np.asarray(no_wave).any()


def test_a_text_of_the_original_length_keeps_longropes_short_factors():
    rope = Rope(type="longrope", factor=4.0, original_positions=64, short_factor=(1.0, 1.0), long_factor=(2.0, 4.0))
    frequencies = jax.jit(lambda lengths: rope_frequencies(rope, 4, lengths)[0])(np.array([63, 64, 65], np.int32))
    np.testing.assert_allclose(frequencies, [[1, 0.01], [1, 0.01], [0.5, 0.0025]])


logits_of = jax.jit(lambda model, tokens: model(tokens))


def largest_difference(model, name, row=0, tokens=None):
    golden = np.load(GOLDEN / name / "golden.npz")
    logits = logits_of(model, golden[f"tokens_{row}"][:, :tokens])
    return float(np.max(np.abs(np.asarray(logits) - golden[f"logits_{row}"][:, :tokens])))


# Each family's logits are compared with the reference's in tests/campaign; here, those that differ in kind.
BY_DEFAULT = (
    "llama_yarn_mscale",
    "qwen3_sliding",
    "granite",
    "olmo2_bias",
    "qwen3_moe_mixed",
    "gemma3",
    "phi3",
    "ministral3",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "qwen3_next",
    "granite4_h_moe",
)
ROWS = [(name, row) for name, lengths in MODELS.items() for row in range(len(lengths))]


OTHERS = sorted((name for name in MODELS if name not in BY_DEFAULT), key=lambda name: name not in KINDS)
ON_A_GPU = ["olmo2_bias", "gemma3", "gpt_oss", *OTHERS]


@pytest.mark.parametrize("name", first(2, first(len(KINDS), ON_A_GPU, rest=nightly)))
def test_few_tokens_on_a_gpu_have_the_logits_of_transformers(name, monkeypatch):
    """There a layer leaves the sum of its last product's parts to the next norm; here by the references of kernels."""
    monkeypatch.setattr(decoder, "platform", lambda: "gpu")
    monkeypatch.setattr(decoder, "LEAST", 8)
    model, _ = models.load(GOLDEN / name)
    model.config = dataclasses.replace(model.config, pad=7)  # whose programs no other test has
    of_text, of_token = largest_difference(model, name), largest_difference(model, name, tokens=1)
    assert max(of_text, of_token) < NEAR[name]
    if model.config.altup is not None:  # whose streams take the sum at once
        return
    x, waves = decoder.entered(model.config, model.embedding[...], *(jnp.zeros((1, 1), int),) * 2, jnp.ones(1, int))
    weights, own = model.layers[0].arrays(), decoder.rope_of_layer(model.config, 0, waves)
    config, zero = model.config, jnp.zeros((1, 1), int)

    def run():
        if config.recurrent_layers[:1] == (0,):
            return decoder.run_recurrent(config, weights, x, zero)[0]
        return decoder.run_layer(config, weights, x, own, lambda q, k, v: (q, None, None))[0]

    made = jax.eval_shape(run)
    assert isinstance(made, decoder.Unsummed)


@pytest.mark.parametrize(
    ("name", "row"),
    [pytest.param(*case, marks=() if case[0] in BY_DEFAULT and not case[1] else pytest.mark.matrix) for case in ROWS],
)
def test_logits_are_those_of_transformers(name, row):
    model, _ = models.load(GOLDEN / name)
    assert largest_difference(model, name, row) < NEAR[name]
