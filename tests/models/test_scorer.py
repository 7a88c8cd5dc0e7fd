"""Scorers, and their policy, zap: each token is scored once, by its hidden state, in the prompt and in decode."""

import dataclasses
import functools
import json
import math

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
import models
from models import driver, engine
from tests.models import reference
from tests.models.tiny import CONFIG, decoder
from tests.tiers import first

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 40))
LENGTHS = np.array([40, 23])


@functools.cache
def scorer(hidden=4, kind="scorer"):
    config, random = models.ScorerConfig(32, 2, 4, 2, hidden, kind, sinks=3), np.random.default_rng(2)
    size = {"gate": 0.5, "scorer": 0.3}[kind]
    drawn = {name: (size * random.normal(size=shape)).astype(np.float32) for name, shape in config.shapes.items()}
    return models.Scorer(config, jax.device_put(drawn))


def gate():
    return scorer(kind="gate")


@pytest.mark.parametrize("hidden", first(1, [4, 0]))
def test_the_network_is_its_definition(hidden):
    x = np.random.default_rng(3).normal(size=(1, 3, 32)).astype(np.float32)
    own = scorer(hidden)
    y = x.astype(np.float64)
    w = {name: np.asarray(getattr(own, name)[...], np.float64)[1] for name in own.config.shapes}
    if hidden:
        y = y @ w["input"] + w["input_bias"]
        y = 0.5 * y * (1 + np.vectorize(math.erf)(y / math.sqrt(2)))
    y = y @ w["output"] + w["output_bias"]
    np.testing.assert_allclose(jax.jit(lambda x: own(1, x))(x), y, rtol=1e-5, atol=1e-6)


@pytest.mark.matrix
def test_layer_by_layer_the_same_tokens_stay(run_by_layer):
    given = engine.check_prompt(decoder(), TOKENS, LENGTHS, None)
    options = models.Options("zap@uniform", 10, 8, "block", 1, networks=scorer())
    run, sizes, prompt = engine.prepare(decoder(), given, options)
    state, _ = driver.feed_prompt(driver.Steps.of(run, sizes), prompt, None)
    run_by_layer(False)
    alone = models.prefill(
        decoder(), TOKENS, lengths=LENGTHS, policy="zap@uniform", budget=10, block=8, networks=scorer()
    ).cache
    np.testing.assert_array_equal(np.sort(state.cache.position), np.sort(alone.position))


def test_a_scorer_is_read_as_it_was_written(tmp_path):
    models.save_network(tmp_path, scorer(), decoder(), "a small one")
    again = models.load_network(tmp_path, decoder())
    for name in ("input", "input_bias", "output", "output_bias"):
        np.testing.assert_array_equal(getattr(again, name)[...], getattr(scorer(), name)[...])
    longer = dataclasses.replace(CONFIG, max_positions=2 * CONFIG.max_positions, eos=(3,))  # the same to attention
    assert models.load_network(tmp_path, decoder(longer)).name == "scorer"
    turned = dataclasses.replace(CONFIG, rope=dataclasses.replace(CONFIG.rope, theta=5.0))
    with pytest.raises(ValueError, match=r"of another model, a small one: rope.theta .* there and 5.0 here; train one"):
        models.load_network(tmp_path, decoder(turned))
    about = json.loads((tmp_path / "scorer.json").read_text())
    about["model"]["config"] |= {"hidden_size": 1, "head_dim": 1, "num_heads": 1, "num_layers": 1}
    (other_model := tmp_path / "other").mkdir()
    (other_model / "scorer.json").write_text(json.dumps(about))
    (other_model / "scorer.safetensors").write_bytes((tmp_path / "scorer.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"head_dim 1 there and .* here, hidden_size .*, num_heads .* and 1 more;"):
        models.load_network(other_model, decoder())
    other = reference.decoder(CONFIG, reference.parameters(CONFIG, seed=5))
    with pytest.raises(ValueError, match="holds a scorer of another model, a small one, with this one's shape"):
        models.load_network(tmp_path, other)
    (tmp_path / "scorer.json").write_text("{}")
    with pytest.raises(ValueError, match="describes no scorer"):
        models.load_network(tmp_path, decoder())


def gate_by_hand(own, x):
    """The share of a token's own weight beside the sinks, one query at a time, in float64."""
    w = {name: np.asarray(getattr(own, name)[...], np.float64)[1] for name in own.config.shapes}
    score = np.zeros((len(x), 2))

    def normed(row, weight):
        return row / np.sqrt((row**2).mean() + 1e-6) * weight

    for t, k, g in np.ndindex(len(x), 2, 2):
        query = normed(x[t] @ w["query"][:, k, g] + w["query_bias"][k, g], w["query_norm"])
        weights = np.exp(w["sinks"][k] @ query / 2)
        own_weight = np.exp(normed(x[t] @ w["key"][:, k], w["key_norm"]) @ query / 2 + w["bias"][k, g])
        score[t, k] += own_weight / (own_weight + weights.sum()) / 2
    return score


def test_a_gate_and_its_loss_are_their_definitions():
    x, true = np.random.default_rng(3).normal(size=(1, 3, 32)), np.random.default_rng(4).uniform(size=(1, 3, 2))
    score = gate_by_hand(gate(), x[0])[None]
    said, loss = jax.jit(lambda own, x, true: (own(1, x), own.loss(1, x, true)))(
        gate(), x.astype(np.float32), true.astype(np.float32)
    )
    np.testing.assert_allclose(said, np.log(score), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss, -(true * np.log(score) + (1 - true) * np.log(1 - score)), rtol=1e-5)


def test_a_gates_weights_are_drawn_as_torch_draws_those_of_a_linear_map():
    """Evenly up to the root of the inputs' number; norms are 1, biases 0, and sinks lie near 0 but apart."""
    drawn = models.Scorer(models.ScorerConfig(64, 2, 4, 2, 16, "gate"), rngs=nnx.Rngs(0))
    for name in ("query", "key"):
        own = np.abs(getattr(drawn, name)[...])
        assert 0.99 / 8 < own.max() <= 1 / 8 and abs(own.mean() - 1 / 16) < 2e-3
    assert np.std(drawn.sinks[...]) == pytest.approx(0.02, rel=0.1)
    assert all((getattr(drawn, name)[...] == 1).all() for name in ("query_norm", "key_norm"))
    assert not any(getattr(drawn, name)[...].any() for name in ("query_bias", "bias"))


@pytest.mark.parametrize("kind", ["gate", "scorer"])
def test_files_from_before_both_kinds_had_one_config_are_read(tmp_path, kind):
    own = scorer(kind=kind)
    models.save_network(tmp_path, own, decoder(), "a small one")
    about = json.loads((tmp_path / f"{kind}.json").read_text())
    sizes = dict(hidden_size=32, num_layers=2, num_kv_heads=2)
    about[kind] = sizes | (dict(num_heads=4, dim=4, sinks=3) if kind == "gate" else dict(hidden=4))
    (tmp_path / f"{kind}.json").write_text(json.dumps(about))
    again = models.load_network(tmp_path, decoder())
    assert again.name == kind and again.config.shapes == own.config.shapes
    for name in own.config.shapes:
        np.testing.assert_array_equal(getattr(again, name)[...], getattr(own, name)[...])


@pytest.mark.matrix
def test_zap_reads_a_gate_in_16_bits():
    narrow = {name: getattr(gate(), name)[...].astype("bfloat16") for name in gate().config.shapes}
    own = models.Scorer(gate().config, narrow)
    with jax.numpy_dtype_promotion("strict"):
        kept = models.prefill(decoder(), TOKENS[:1], policy="zap@uniform", budget=10, block=8, networks=[own]).cache
    assert kept.num_live.max() == 10


def test_zap_says_what_it_lacks():
    rows = np.ones((1, 2, 1, 2), np.float32)

    def attend(context):
        cache = kvjax.KVCache.init(batch=1, kv_heads=1, slots=4, head_dim=2, state=kvjax.zap().init(1, 1, 1, 4, 2))
        return kvjax.attend(cache, rows, rows, rows, policy="zap@uniform", budget=2, context=context)

    wrong = kvjax.Context(predicted=kvjax.Prediction(score=np.ones((1, 2, 3), np.float32)))
    for context, said in (
        (kvjax.Context(), "'zap' reads a network's score"),
        (wrong, r"predicted scores \(1, 2, 3\) do not fit: expected \(1, 2, 1\)"),
    ):
        with pytest.raises(ValueError, match=said):
            jax.eval_shape(lambda: attend(context))  # noqa: B023
