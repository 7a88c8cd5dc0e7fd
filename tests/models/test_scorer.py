"""A scorer's policy, zap: each token is scored once, by its hidden state, in the prompt and in decode."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

import kvjax
import models
from models import driver, engine
from models.scorer import parameter_shapes
from tests.models import reference
from tests.models.tiny import CONFIG, decoder
from tests.tiers import first

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 40))
LENGTHS = np.array([40, 23])


@functools.cache
def scorer(hidden=4):
    config, random = models.ScorerConfig(32, num_layers=2, num_kv_heads=2, hidden=hidden), np.random.default_rng(2)
    shapes = parameter_shapes(config)
    drawn = {name: (0.3 * random.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()}
    return models.Scorer(config, jax.device_put(drawn))


@pytest.mark.parametrize("hidden", first(1, [4, 0]))
def test_the_network_is_its_definition(hidden):
    x = np.random.default_rng(3).normal(size=(1, 3, 32)).astype(np.float32)
    own = scorer(hidden)
    y = x.astype(np.float64)
    w = {name: np.asarray(getattr(own, name)[...], np.float64)[1] for name in parameter_shapes(own.config)}
    if hidden:
        y = y @ w["input"] + w["input_bias"]
        y = 0.5 * y * (1 + np.vectorize(math.erf)(y / math.sqrt(2)))
    y = y @ w["output"] + w["output_bias"]
    np.testing.assert_allclose(jax.jit(lambda x: own(1, x))(x), y, rtol=1e-5, atol=1e-6)


@pytest.mark.matrix
def test_layer_by_layer_the_same_tokens_stay(run_by_layer):
    given = engine.check_prompt(decoder(), TOKENS, LENGTHS, None)
    options = models.Options("zap", 10, 8, "block", 1, networks=scorer())
    run, sizes, prompt = engine.prepare(decoder(), given, options)
    state, _ = driver.feed_prompt(driver.Steps.of(run, sizes), prompt, None)
    run_by_layer(False)
    alone = models.prefill(
        decoder(), TOKENS, lengths=LENGTHS, policy="zap", budget=10, block=8, networks=scorer()
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
    with pytest.raises(ValueError, match=r"holds a scorer of another model, a small one: rope .* there and .* here"):
        models.load_network(tmp_path, decoder(turned))
    other = reference.decoder(CONFIG, reference.parameters(CONFIG, seed=5))
    with pytest.raises(ValueError, match="holds a scorer of another model, a small one, with this one's shape"):
        models.load_network(tmp_path, other)
    (tmp_path / "scorer.json").write_text("{}")
    with pytest.raises(ValueError, match="describes no scorer"):
        models.load_network(tmp_path, decoder())


def test_zap_says_what_it_lacks():
    rows = np.ones((1, 2, 1, 2), np.float32)

    def attend(context):
        cache = kvjax.KVCache.init(batch=1, kv_heads=1, slots=4, head_dim=2, state=kvjax.zap().init(1, 1, 1, 4, 2))
        return kvjax.attend(cache, rows, rows, rows, policy="zap", budget=2, context=context)

    wrong = kvjax.Context(predicted=kvjax.Prediction(score=np.ones((1, 2, 3), np.float32)))
    for context, said in (
        (kvjax.Context(), "nothing was predicted"),
        (wrong, r"predicted scores \(1, 2, 3\) do not fit: expected \(1, 2, 1\)"),
    ):
        with pytest.raises(ValueError, match=said):
            jax.eval_shape(lambda: attend(context))  # noqa: B023
