"""One program over all layers, and the host calling one after the other: the same tokens, logits and caches."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

import models
from models import Butler, ButlerConfig, by_layer
from models.steps import LayerCaches
from tests.models import reference
from tests.models.tiny import (
    BLOCK,
    CONFIG,
    LENGTHS,
    SETTINGS,
    SLIDING,
    STATE,
    TOKENS,
    UNEVEN,
    WINDOW,
    answers,
    assert_keeps,
    decoder,
    held,
    run,
    streamed,
    weights,
)
from tests.tiers import first

END = tuple(range(0, 256, 9))  # so many that the rows stop at different steps
QUESTIONS = np.array([5, 0, 2])
NOTHING = dict(policy=None, budget=None)
BY_LAYERS = {
    "scored from weights": dict(policy=STATE),
    "once, a question": dict(policy=WINDOW, when="prompt", evict_every=3, question=QUESTIONS),
    "heads exchange slots": dict(policy=UNEVEN, evict_every=3),
    "left windows": dict(policy=STATE, config=SLIDING),
    "nothing evicted": NOTHING | dict(config=SLIDING),
    "through the output": dict(policy="laprox(window=4)@model", evict_every=0, question=QUESTIONS),
    "measured": dict(policy="cake(window=4)@cake", when="prompt", question=QUESTIONS),
    "turned keys": dict(policy="tova+positions(kind='compact')", config=SLIDING),
}
# What the reference does not have, or decides by draws; each case is compiled twice.
CASES = {
    "drawn": dict(policy="streaming", evict_every=0, temperature=0.8, top_k=20, key=jax.random.key(3)),
    "not scored in decode": dict(policy="sage", when="prompt", question=5),
    "a predictor's": dict(policy="butler+caote", config=SLIDING, question=QUESTIONS),
    "selected": dict(select="oracle", budget=0.3, config=SLIDING),
}


def made(case):
    """The configuration of a case, and its settings."""
    settings = SETTINGS | case
    config = settings.pop("config", CONFIG)
    if settings.get("policy") == "butler+caote":
        settings["butler"] = Butler(ButlerConfig.of(config), rngs=nnx.Rngs(1))
    return config, settings


def assert_same_caches(one, other):
    assert held(one) == held(other)
    np.testing.assert_array_equal(one.next_position, other.next_position)


def each(run_by_layer, given):
    """What a run gives by one program, and by layers."""
    results = []
    for layers in (False, True):
        run_by_layer(layers)
        results.append(given())
    return results


@pytest.mark.parametrize("case", first(2, BY_LAYERS.values()), ids=BY_LAYERS)
def test_a_stream_by_layers_gives_the_references_tokens_and_keeps_what_it_keeps(case, run_by_layer):
    config, settings = made(case)
    steps, cache = streamed(decoder(config), TOKENS, lengths=LENGTHS, max_new_tokens=8, end=END, **settings)
    for row, length in enumerate(LENGTHS):
        told = settings | dict(question=0) | {k: v[row] for k, v in settings.items() if k == "question"}
        expected = run(TOKENS[row, :length], config, new_tokens=steps.shape[1], end=END, **told)
        assert [token for token in steps[row].tolist() if token >= 0] == expected.tokens
        assert_keeps(cache, row, expected)


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tokens_and_caches_are_the_same_both_ways_at_once_and_in_a_stream(case, run_by_layer):
    config, settings = made(case)
    settings |= dict(lengths=LENGTHS, max_new_tokens=8, end=END)
    one, layers = each(run_by_layer, lambda: models.generate(decoder(config), TOKENS, **settings))
    assert answers(layers) == answers(one)
    assert_same_caches(layers.cache, one.cache)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), layers.cache.state, one.cache.state)
    steps, cache = streamed(decoder(config), TOKENS, **settings)  # by layers still
    for row, tokens in enumerate(answers(one)):
        assert steps[row, : len(tokens)].tolist() == tokens
    assert_same_caches(cache, one.cache)


def test_small_layers_run_in_one_program_and_large_ones_one_by_one(monkeypatch):
    def cache_of_a_stream():
        settings = dict(lengths=LENGTHS, policy=STATE, max_new_tokens=8, end=END, **SETTINGS)
        return next(models.stream(decoder(), TOKENS, **settings))[1]

    layer = sum(array.nbytes for array in decoder().layers.arrays().values()) // CONFIG.num_layers
    monkeypatch.setattr(by_layer, "LARGE_LAYER", layer + 1)
    stacked = cache_of_a_stream()
    assert not isinstance(stacked, LayerCaches)
    monkeypatch.setattr(by_layer, "LARGE_LAYER", layer)
    layers = cache_of_a_stream()
    assert isinstance(layers, LayerCaches)
    for name in ("key", "value", "position", "live", "num_live", "next_position", "state"):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, atol=1e-4), getattr(layers, name), getattr(stacked, name)
        )
    for name in ("positions", "num_slots", "heads_shape", "nbytes"):
        assert getattr(layers, name) == getattr(stacked, name)


@pytest.mark.matrix
def test_inside_of_other_peoples_jit_and_vmap_it_is_one_program(run_by_layer):
    settings = dict(lengths=LENGTHS, policy=STATE, **SETTINGS)
    prefill = functools.partial(models.prefill, decoder(), TOKENS, **settings)
    inside = jax.jit(lambda scale: scale * prefill().logits)(1.0)
    np.testing.assert_allclose(inside, prefill().logits, atol=1e-4)
    drawn = functools.partial(models.generate, decoder(), TOKENS, max_new_tokens=3, temperature=1.0, end=(), **settings)
    keys = jax.random.split(jax.random.key(0), 2)
    alone = [drawn(key=key).tokens.tolist() for key in keys]
    assert jax.vmap(lambda key: drawn(key=key).tokens)(keys).tolist() == alone


@pytest.mark.parametrize("each_way", first(0, ["one program", "layers"]), indirect=True)
def test_logits_that_are_not_finite_are_refused_both_ways(each_way):
    model = reference.decoder(CONFIG, weights() | {"norm": np.full_like(weights()["norm"], np.nan)})
    with pytest.raises(ValueError, match="the model's logits are NaN or infinite"):
        models.generate(model, TOKENS, lengths=LENGTHS, max_new_tokens=2)


@pytest.mark.parametrize("each_way", ["one program", "layers"], indirect=True)
def test_a_threshold_begins_a_new_window_whatever_the_budget(each_way):
    """A budget of all slots keeps no token below the threshold, so the prompt's window has had its say."""
    name, settings = (
        "snapkv(window=4)@threshold(least=0.05)",
        dict(budget=100, when="prompt", evict_every=2, block=BLOCK),
    )
    prompt = TOKENS[:1, :21]
    tokens, cache = streamed(decoder(), prompt, policy=name, max_new_tokens=8, end=(), **settings)
    expected = run(prompt[0], policy=name, new_tokens=8, **settings)
    assert tokens[0].tolist() == expected.tokens
    assert_keeps(cache, 0, expected)
