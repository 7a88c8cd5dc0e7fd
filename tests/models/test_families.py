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
from models.decoder import feed_forward, rms_norm
from models.parameters import parameter_shapes
from models.steps import at_layer, block_of
from tests.models.make_golden import GOLDEN
from tests.models.reference import made
from train.scorer import largest_attention

FAMILIES = ("olmo2", "smollm3", "granite", "phi4_mini", "qwen3_moe", "qwen3_moe_mixed", "mixtral", "gemma2", "gemma3")


def golden(name):
    arrays = np.load(GOLDEN / name / "golden.npz")
    return arrays["tokens_0"], arrays["logits_0"]


def parameters_of(model):
    return {name: functools.reduce(getattr, name.split("."), model)[...] for name in parameter_shapes(model.config)}


MIXED = ("smollm3", "qwen3_moe_mixed", "gemma2", "gemma3")  # whose layers differ: both ways to go through them
WAYS = [(name, way) for name in MIXED for way in ("one program", "layers")]
WAYS += [(name, ("layers", "one program")[i % 2]) for i, name in enumerate(FAMILIES) if name not in MIXED]


@pytest.mark.parametrize(("name", "each_way"), WAYS, indirect=["each_way"])
def test_blocks_over_a_cache_give_the_logits_of_transformers(name, each_way):
    model, _ = models.load(GOLDEN / name)
    tokens, logits = golden(name)
    found = models.prefill(model, tokens, policy="h2o", budget=tokens.shape[1], block=20, outputs="all").logits
    np.testing.assert_allclose(found, logits, atol=1e-4, rtol=0)


def test_keys_are_turned_in_layers_with_different_rotary_embeddings(each_way):
    model, _ = models.load(GOLDEN / "smollm3")
    settings = dict(policy="tova+positions(kind='compact')", budget=12, block=20, max_new_tokens=3, end=())
    out = models.generate(model, golden("smollm3")[0], **settings)
    assert out.cache.num_live.max() <= 12 and out.lengths.tolist() == [3]


def test_every_way_to_attend_bends_logits_to_the_soft_cap():
    model, _ = models.load(GOLDEN / "gemma2")
    tokens, logits = golden("gemma2")
    T = tokens.shape[1]
    pages = models.prefill(model, tokens, policy="h2o@adakv", budget=T, block=20, page_size=8, outputs="all")
    np.testing.assert_allclose(pages.logits, logits, atol=1e-4, rtol=0)
    simulated = simulate(model, tokens, "oracle", 0.0)
    np.testing.assert_allclose(simulated, logits, atol=1e-4, rtol=0)
    settings = dict(block=20, max_new_tokens=4, end=())
    selected = models.generate(model, tokens, select="oracle", budget=1.0, **settings)
    np.testing.assert_array_equal(selected.tokens, models.generate(model, tokens, **settings).tokens)
    butler = models.Butler(models.ButlerConfig.of(model.config), rngs=nnx.Rngs(0))
    layer_0 = models.butler_input(model, tokens)
    uncapped = models.Decoder(dataclasses.replace(model.config, attention_soft_cap=None), parameters_of(model))
    assert np.abs(layer_0 - models.butler_input(uncapped, tokens)).max() > 1e-2
    scored = models.generate(model, tokens, policy="butler", budget=T + 4, butler=butler, **settings)
    np.testing.assert_array_equal(scored.tokens, selected.tokens)


@pytest.mark.parametrize("name", ["smollm3", "gemma2"])
def test_policies_that_share_a_prompt_see_what_each_sees_alone(name):
    model, _ = models.load(GOLDEN / name)
    tokens = golden(name)[0]
    policies = ["tova", "expected_attention" if name == "smollm3" else "h2o+caote"]  # one reads the layers' frequencies
    each = models.prefill_each(model, tokens, policies=policies, budget=12)
    for policy, together in zip(policies, each, strict=True):
        alone = models.prefill(model, tokens, policy=policy, budget=12, when="prompt")
        np.testing.assert_allclose(together.logits, alone.logits, atol=1e-4)
        np.testing.assert_array_equal(np.sort(together.cache.position), np.sort(alone.cache.position))


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
    found = feed_forward(config, {name: jnp.asarray(array, jnp.float32) for name, array in weights.items()}, x)
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


def test_an_answer_on_a_mesh_with_experts_is_that_of_one_device():
    run = dict(policy="snapkv(window=4)+caote", budget=8, block=4, max_new_tokens=6)
    tokens = np.concatenate([golden("mixtral")[0]] * 2)[:2, :12]
    expected = models.generate(models.load(GOLDEN / "mixtral")[0], tokens, **run).tokens
    model, _ = models.load(GOLDEN / "mixtral", mesh=models.parse_mesh("data=2,expert=2,tensor=2"))
    np.testing.assert_array_equal(models.generate(model, tokens, **run).tokens, expected)


@pytest.mark.parametrize("mesh", ["data=1,tensor=2", "expert=2,tensor=2"])
def test_a_mix_of_dense_and_sparse_layers_is_split_over_devices(mesh):
    alone, _ = models.load(GOLDEN / "qwen3_moe_mixed")
    model, _ = models.load(GOLDEN / "qwen3_moe_mixed", mesh=models.parse_mesh(mesh))
    ways = {"data=1,tensor=2": 2, "expert=2,tensor=2": 4}[mesh]
    held = {name: array.addressable_shards[0].data.shape for name, array in model.layers.arrays().items()}
    assert held["expert_gate"] == (2, 4 // ways, 16, 12) and held["router"] == (2, 16, 4 // ways)
    assert held["gate"] == (4, 16, 10) and held["down"] == (4, 10, 16) and held["key"] == (6, 16, 1, 8)
    tokens, logits = golden("qwen3_moe_mixed")
    program = jax.jit(lambda model, tokens: model(tokens)).lower(model, tokens).compile()
    np.testing.assert_allclose(program(model, tokens), logits, atol=1e-4, rtol=0)
    assert "f32[4,16,12]" not in program.as_text(), "a device holds all experts"
    run = dict(policy="snapkv(window=4)+caote", budget=8, block=4, max_new_tokens=6)
    expected = models.generate(alone, tokens[:, :12], **run).tokens
    np.testing.assert_array_equal(models.generate(model, tokens[:, :12], **run).tokens, expected)


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
    weights = made.parameters(config)
    held = [len(weights.get(f"layers.{name}", ())) for name in ("gate", "router")]
    assert held == [2 - layers.count(None), layers.count(None)]
    model, position = made.decoder(config, weights), np.arange(6)[None]
    tokens, before = position, jnp.zeros((1, 6, 16))

    def attend(carry, layer, window, query, key, value):
        key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
        return attention_in_chunks(query, key, value, position, window), carry, None

    _, expected, _ = model.run(tokens, position, np.array([6]), attend, before, after_first=lambda x, carry: x)
    np.testing.assert_allclose(models.butler_input(model, tokens), expected, atol=1e-5)


def test_a_predictor_reads_what_the_attention_of_layer_0_reads():
    model, _ = models.load(GOLDEN / "olmo2")
    tokens = golden("olmo2")[0]
    found = models.butler_input(model, tokens, source="attention_input")
    np.testing.assert_array_equal(found, model.embedding[...][tokens])  # OLMo-2 has no norm before attention
    model, _ = models.load(GOLDEN / "granite")
    found = models.butler_input(model, tokens, source="attention_input")
    x = 3.0 * model.embedding[...][tokens]
    expected = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * model.layers.attention_norm[...][0]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_keys_are_turned_by_the_rotary_embedding_of_their_layer():
    config = models.load(GOLDEN / "smollm3")[0].config  # its last layer has none
    plan = type("Plan", (), {"positions": "compact", "policy": None})
    block = block_of(config, plan, jnp.arange(3)[None], jnp.array([3]), None)
    assert (at_layer(config, block, 0).frequency[0, :2] > 0).all() and at_layer(config, block, 0).waves[1].any()
    assert not at_layer(config, block, 3).frequency.any() and not at_layer(config, block, 3).waves[1].any()


def test_the_targets_of_a_scorer_have_the_soft_cap():
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 1, 2)), jnp.float32)
    logits = np.asarray(rows[0, :, 0] @ rows[0, :, 0].T, np.float64) / np.sqrt(2)
    weights = np.exp(0.3 * np.tanh(logits / 0.3)) * np.tri(3)
    weights /= weights.sum(axis=1, keepdims=True)
    found = largest_attention(rows, rows, jnp.arange(3), jnp.arange(3), soft_cap=0.3)[0, :, 0]
    np.testing.assert_allclose(found, [max(weights[1, 0], weights[2, 0]), weights[2, 1], 0], rtol=1e-5)
