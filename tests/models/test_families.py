"""Each family through the engine: block by block over a cache, its logits are those of transformers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from evals.selections import simulate
from models.butler.module import attention_in_chunks
from models.config import Rope
from models.decoder import feed_forward, rms_norm, rope_frequencies
from models.parameters import parameter_shapes
from models.steps import at_layer, block_of
from tests.models import reference
from tests.models.make_golden import GOLDEN
from tests.tiers import first, matrix
from train.scorer import largest_attention

FAMILIES = ("olmo2", "smollm3", "granite", "phi4_mini", "qwen3_moe", "qwen3_moe_mixed", "mixtral", "gemma2", "gemma3")


def golden(name):
    arrays = np.load(GOLDEN / name / "golden.npz")
    return arrays["tokens_0"], arrays["logits_0"]


def parameters_of(model):
    return {name: functools.reduce(getattr, name.split("."), model)[...] for name in parameter_shapes(model.config)}


def of_reference(model, prompt, policy=None, **settings):
    """Return what the reference makes of one prompt."""
    policy = None if policy is None else reference.policy(policy)
    weights = {name: np.asarray(array, np.float64) for name, array in parameters_of(model).items()}
    return reference.run(weights, model.config, prompt, policy=policy, **settings)


MIXED = ("smollm3", "qwen3_moe_mixed", "gemma2", "gemma3")  # whose layers differ: both ways to go through them
WAYS = [("smollm3", "layers"), ("qwen3_moe_mixed", "one program"), ("gemma2", "layers")]
WAYS += [(name, way) for name in MIXED for way in ("one program", "layers") if (name, way) not in WAYS]
WAYS += [(name, ("layers", "one program")[i % 2]) for i, name in enumerate(FAMILIES) if name not in MIXED]


@pytest.mark.parametrize(("name", "each_way"), first(3, WAYS), indirect=["each_way"])
def test_blocks_over_a_cache_give_the_logits_of_transformers(name, each_way):
    model, _ = models.load(GOLDEN / name)
    tokens, logits = golden(name)
    found = models.prefill(model, tokens, policy="h2o", budget=tokens.shape[1], block=20, outputs="all").logits
    np.testing.assert_allclose(found, logits, atol=1e-4, rtol=0)


@matrix
def test_keys_are_turned_in_layers_with_different_rotary_embeddings(each_way):
    model, _ = models.load(GOLDEN / "smollm3")
    tokens, settings = golden("smollm3")[0], dict(policy="tova+positions(kind='compact')", budget=12, block=20)
    out = models.generate(model, tokens, max_new_tokens=3, end=(), **settings)
    assert out.tokens[0].tolist() == of_reference(model, tokens[0], new_tokens=3, **settings).tokens


@pytest.mark.parametrize("settings", first(1, [dict(policy="h2o@adakv", page_size=8), dict(policy="butler")]))
def test_logits_bend_to_the_soft_cap_over_pages_and_behind_a_predictor(settings):
    model, _ = models.load(GOLDEN / "gemma2")
    tokens, logits = golden("gemma2")
    if settings["policy"] == "butler":
        settings = settings | dict(butler=models.Butler(models.ButlerConfig.of(model.config), rngs=nnx.Rngs(0)))
    found = models.prefill(model, tokens, budget=tokens.shape[1], block=20, outputs="all", **settings)
    np.testing.assert_allclose(found.logits, logits, atol=1e-4, rtol=0)


def test_logits_bend_to_the_soft_cap_in_selections():
    model, _ = models.load(GOLDEN / "gemma2")
    tokens, logits = golden("gemma2")
    np.testing.assert_allclose(simulate(model, tokens, "oracle", 0.0), logits, atol=1e-4, rtol=0)


def test_the_steps_of_a_selection_bend_to_the_soft_cap():
    config = models.Config(
        64, 32, 48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, architecture="gemma2", norms="both",
        attention_soft_cap=0.5, attention_multiplier=0.3,
    )  # fmt: skip
    weights, tokens = reference.parameters(config, sharpness=4.0), np.arange(5, 25)[None]
    settings = dict(block=20, max_new_tokens=12, end=())
    found = models.generate(reference.decoder(config, weights), tokens, select="oracle", budget=1.0, **settings)
    expected = reference.run(weights, config, tokens[0], new_tokens=12)
    assert found.tokens[0].tolist() == expected.tokens


def test_what_a_predictor_reads_bends_to_the_soft_cap():
    model, _ = models.load(GOLDEN / "gemma2")
    tokens = golden("gemma2")[0]
    uncapped = models.Decoder(dataclasses.replace(model.config, attention_soft_cap=None), parameters_of(model))
    read = jax.jit(models.butler_input)
    assert np.abs(np.asarray(read(model, tokens)) - np.asarray(read(uncapped, tokens))).max() > 1e-2


@pytest.mark.parametrize("name", first(1, ["smollm3", "gemma2"]))
def test_policies_that_share_a_prompt_see_what_each_sees_alone(name):
    model, _ = models.load(GOLDEN / name)
    tokens = golden(name)[0]
    policies = ["tova", "expected_attention" if name == "smollm3" else "h2o+caote"]  # one reads the layers' frequencies
    each = models.prefill_each(model, tokens, policies=policies, budget=12)
    for policy, together in zip(policies, each, strict=True):
        alone = of_reference(model, tokens[0], policy, budget=12, when="prompt")
        np.testing.assert_allclose(together.logits[0], alone.logits[-1], atol=1e-4)
        for layer, head in np.ndindex(alone.kept.shape[:2]):
            held = np.asarray(together.cache.position)[layer, 0, head]
            assert sorted(held[held >= 0]) == np.flatnonzero(alone.kept[layer, head]).tolist()


@matrix
def test_what_is_calibrated_follows_the_layers():
    models_of = {name: models.load(GOLDEN / name)[0] for name in ("smollm3", "gemma2")}
    tokens = golden("gemma2")[0]
    of_layers = models.head_scores(models_of["smollm3"], tokens, length=50)
    config = dataclasses.replace(models_of["smollm3"].config, ropes=())
    all_rotated = models.head_scores(models.Decoder(config, parameters_of(models_of["smollm3"])), tokens, length=50)
    np.testing.assert_allclose(of_layers[:3], all_rotated[:3], atol=1e-5)
    assert np.abs(of_layers[3] - all_rotated[3]).min() > 1e-4
    capped = models.head_scores(models_of["gemma2"], tokens, length=50)
    config = dataclasses.replace(models_of["gemma2"].config, attention_soft_cap=1e-3)
    flat = models.head_scores(models.Decoder(config, parameters_of(models_of["gemma2"])), tokens, length=50)
    np.testing.assert_allclose(flat, 0.51, atol=1e-3)  # all weights are equal
    assert np.abs(capped - 0.51).max() > 1e-3


def test_expected_attention_refuses_logits_with_a_soft_cap():
    model, _ = models.load(GOLDEN / "gemma2")
    with pytest.raises(ValueError, match=r"this model.s logits have the soft cap 2.0; take another score"):
        models.prefill(model, golden("gemma2")[0], policy="expected_attention", budget=8)


def test_a_norm_with_an_offset_is_computed_in_float32():
    x, weight = jnp.array([1.0, -3.0], jnp.bfloat16), jnp.array([1e-3, -1e-3], jnp.bfloat16)
    wide = np.array([1.0, -3.0]) / np.sqrt(5.0) * (1 + np.asarray(weight, np.float64))
    found = rms_norm(x, weight, 0.0, offset=True)
    np.testing.assert_array_equal(found, wide.astype(np.float32).astype(jnp.bfloat16))


@pytest.mark.parametrize("normalise", [True, False])
def test_experts_are_those_of_a_loop_over_tokens(normalise):
    config = models.Config(
        8, 6, 5, num_layers=1, num_heads=1, num_kv_heads=1, num_experts=7, experts_per_token=3,
        normalise_experts=normalise,
    )  # fmt: skip
    draw = np.random.default_rng(0).normal
    weights = {name: draw(size=shape[1:]) for name, shape in parameter_shapes(config).items() if "layers." in name}
    weights = {name.removeprefix("layers."): array for name, array in weights.items()}
    weights["router"][:, 4] = 0
    x = np.abs(draw(size=(2, 3, 6))).astype(np.float32)
    weights["router"][:, 2] = -9  # an expert that no token goes to
    of_jax = {name: array.astype(np.float32) for name, array in weights.items()}
    found = np.asarray(jax.jit(lambda weights, x: feed_forward(config, weights, x))(of_jax, x))
    for row, token in np.ndindex(2, 3):
        y = x[row, token]
        exponentials = np.exp(y @ weights["router"])
        share = exponentials / exponentials.sum()
        best = np.argsort(-share)[:3]
        assert 2 not in best
        total = share[best].sum() if normalise else 1.0
        expected = np.zeros(6)
        for expert in best:
            gate, up = y @ weights["expert_gate"][expert], y @ weights["expert_up"][expert]
            expected += share[expert] / total * (gate / (1 + np.exp(-gate)) * up) @ weights["expert_down"][expert]
        np.testing.assert_allclose(found[row, token], expected, atol=1e-4)


@pytest.mark.parametrize(
    ("mesh", "held"), [("data=1,tensor=2", [(2, 2, 16, 12)] * 2), ("expert=2,tensor=2", [(2, 1, 16, 12)] * 4)]
)
def test_experts_on_several_devices_give_the_logits_of_one(mesh, held):
    model, _ = models.load(GOLDEN / "mixtral", mesh=models.parse_mesh(mesh))
    shards = model.layers.expert_gate[...].addressable_shards
    assert [shard.data.shape for shard in shards] == held  # of four experts
    tokens, logits = golden("mixtral")
    program = jax.jit(lambda model, tokens: model(tokens)).lower(model, tokens).compile()
    np.testing.assert_allclose(program(model, tokens), logits, atol=1e-4, rtol=0)
    assert "f32[4,16,12]" not in program.as_text(), "a device holds all experts"


@matrix
@pytest.mark.parametrize(
    ("name", "mesh"), [("mixtral", "data=2,expert=2,tensor=2"), ("qwen3_moe_mixed", "expert=2,tensor=2")]
)
def test_an_answer_on_a_mesh_with_experts_is_that_of_one_device(name, mesh):
    settings = dict(policy="snapkv(window=4)+caote", budget=8, block=4)
    tokens = np.concatenate([golden(name)[0]] * 2)[:, :12]
    expected = of_reference(models.load(GOLDEN / name)[0], tokens[0], new_tokens=6, **settings).tokens
    model, _ = models.load(GOLDEN / name, mesh=models.parse_mesh(mesh))
    out = models.generate(model, tokens, max_new_tokens=6, end=(), **settings)
    assert out.tokens.tolist() == [expected] * 2


@pytest.mark.parametrize("mesh", ["data=1,tensor=2", "expert=2,tensor=2"])
def test_a_mix_of_dense_and_sparse_layers_is_split_over_devices(mesh):
    model, _ = models.load(GOLDEN / "qwen3_moe_mixed", mesh=models.parse_mesh(mesh))
    ways = {"data=1,tensor=2": 2, "expert=2,tensor=2": 4}[mesh]
    held = {name: array.addressable_shards[0].data.shape for name, array in model.layers.arrays().items()}
    assert held["expert_gate"] == (2, 4 // ways, 16, 12) and held["router"] == (2, 16, 4 // ways)
    assert held["gate"] == (4, 16, 10) and held["down"] == (4, 10, 16) and held["key"] == (6, 16, 1, 8)
    tokens, logits = golden("qwen3_moe_mixed")
    program = jax.jit(lambda model, tokens: model(tokens)).lower(model, tokens).compile()
    np.testing.assert_allclose(program(model, tokens), logits, atol=1e-4, rtol=0)
    assert "f32[4,16,12]" not in program.as_text(), "a device holds all experts"


@pytest.mark.parametrize(("name", "choices"), [("qwen3_moe_mixed", 1), ("qwen3_moe", 0), ("qwen3", 0)])
def test_one_scan_chooses_between_the_kinds_of_a_mix(name, choices):
    model, _ = models.load(GOLDEN / name)
    program = jax.jit(lambda model, tokens: model(tokens)).lower(model, jnp.zeros((1, 4), jnp.int32)).as_text()
    assert (program.count("stablehlo.case"), program.count("stablehlo.while")) == (choices, 1)


@pytest.mark.parametrize("layers", [(None, 20), (20, None), (20, 20)])
def test_a_predictor_reads_layer_0_with_or_without_experts(layers):
    config = models.Config(
        64, 16, 12, num_layers=2, num_heads=2, num_kv_heads=1, num_experts=3, experts_per_token=2, dense_sizes=layers
    )
    weights = reference.parameters(config)
    held = [len(weights.get(f"layers.{name}", ())) for name in ("gate", "router")]
    assert held == [2 - layers.count(None), layers.count(None)]
    model, position = reference.decoder(config, weights), np.arange(6)[None]
    tokens, before = position, np.zeros((1, 6, 16), np.float32)

    def attend(carry, layer, window, query, key, value):
        key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
        return attention_in_chunks(query, key, value, position, window), carry, None

    @jax.jit
    def run(model):
        return model.run(tokens, position, np.array([6]), attend, before, after_first=lambda x, carry: x)[1]

    expected = run(model)
    np.testing.assert_allclose(jax.jit(models.butler_input)(model, tokens), expected, atol=1e-5)


def test_a_predictor_reads_what_the_attention_of_layer_0_reads():
    model, _ = models.load(GOLDEN / "olmo2")
    tokens = golden("olmo2")[0]
    read = jax.jit(functools.partial(models.butler_input, source="attention_input"))
    np.testing.assert_array_equal(
        read(model, tokens), np.asarray(model.embedding[...])[tokens]
    )  # OLMo-2 has no norm before attention
    model, _ = models.load(GOLDEN / "granite")
    x = 3.0 * np.asarray(model.embedding[...])[tokens]
    norm = np.asarray(model.layers.attention_norm[...])[0]
    expected = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * norm
    np.testing.assert_allclose(read(model, tokens), expected, atol=1e-5)


def test_keys_are_turned_by_the_rotary_embedding_of_their_layer():
    config = models.load(GOLDEN / "smollm3")[0].config  # its last layer has none
    plan = type("Plan", (), {"positions": "compact", "policy": None})

    @jax.jit
    def at(layers):
        block = block_of(config, plan, jnp.arange(3)[None], jnp.array([3]), None)
        found = [at_layer(config, block, layer) for layer in layers]
        return [(layer.frequency, layer.waves[1]) for layer in found]

    (frequency, wave), (none, no_wave) = at([0, 3])
    assert (np.asarray(frequency)[0, :2] > 0).all() and np.asarray(wave).any()
    assert not np.asarray(none).any() and not np.asarray(no_wave).any()


def test_the_targets_of_a_scorer_have_the_soft_cap():
    rows = np.random.default_rng(0).normal(size=(1, 3, 1, 2)).astype(np.float32)
    logits = np.asarray(rows[0, :, 0] @ rows[0, :, 0].T, np.float64) / np.sqrt(2)
    weights = np.exp(0.3 * np.tanh(logits / 0.3)) * np.tri(3)
    weights /= weights.sum(axis=1, keepdims=True)
    of_rows = jax.jit(functools.partial(largest_attention, soft_cap=0.3))
    found = np.asarray(of_rows(rows, rows, np.arange(3), np.arange(3)))[0, :, 0]
    np.testing.assert_allclose(found, [max(weights[1, 0], weights[2, 0]), weights[2, 1], 0], rtol=1e-5)


def test_a_text_of_the_original_length_keeps_longropes_short_factors():
    rope = Rope(type="longrope", factor=4.0, original_positions=64, short_factor=(1.0, 1.0), long_factor=(2.0, 4.0))
    frequencies, _ = rope_frequencies(rope, 4, np.array([63, 64, 65], np.int32))
    np.testing.assert_allclose(frequencies, [[1, 0.01], [1, 0.01], [0.5, 0.0025]])
