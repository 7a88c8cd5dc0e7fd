"""One program over all layers, and the host calling one after the other: the same tokens, logits and caches."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

import models
from models import Butler, ButlerConfig, Config, by_layer
from models.steps import LayerCaches
from tests.models import reference

SIZES = dict(num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=256)
CONFIGS = {
    "plain": Config(64, 32, 48, **SIZES),
    "sliding": Config(64, 32, 48, architecture="mistral", sliding_windows=(None, 9, None, 30), **SIZES),
}
TOKENS = np.stack([np.random.default_rng(row).permutation(64)[:45] for row in range(2)])
LENGTHS = np.array([45, 31])
END = (1, 14, 48, 57, 61)  # in most cases the rows stop at different steps
SETTINGS = dict(lengths=LENGTHS, budget=14, block=8)
# Every kind of policy, both moments, all periods and both models; each case is compiled twice.
CASES = {
    "nothing evicted": dict(policy=None, budget=None, config="sliding"),
    "scored from weights": dict(policy="h2o+caote", config="sliding"),
    "once, a question": dict(policy="snapkv(window=8)+caote", when="prompt", evict_every=3, question=np.array([5, 0])),
    "heads exchange slots, once": dict(policy="h2o@adakv", when="prompt", evict_every=3, config="sliding"),
    "not scored in decode": dict(policy="sage", when="prompt", question=9),
    "through the output": dict(policy="laprox(window=4)@model", evict_every=0, question=np.array([5, 0])),
    "drawn": dict(policy="streaming", evict_every=0, temperature=0.8, top_k=20, key=jax.random.key(3)),
    "turned keys": dict(policy="tova+positions(kind='compact')", config="sliding"),
    "a predictor's": dict(policy="butler+caote", config="sliding", question=np.array([5, 0])),
    "selected": dict(select="oracle", budget=0.3, config="sliding"),
}
# Nothing evicted, each block, and once at the end; their tokens are compared above.
PREFILLS = {
    **{name: CASES[name] for name in ("nothing evicted", "through the output")},
    "measured": dict(policy="cake(window=4)@cake", when="prompt", question=np.array([5, 0])),
}


@functools.cache
def model_of(config):
    return reference.decoder(CONFIGS[config], reference.parameters(CONFIGS[config]))


@functools.cache
def predictor():
    return Butler(ButlerConfig.of(CONFIGS["plain"]), rngs=nnx.Rngs(1))


def made(case):
    """The model of a case, and its settings."""
    settings = SETTINGS | case
    if "butler" in (settings.get("policy") or settings.get("select") or ""):
        settings["butler"] = predictor()
    return model_of(settings.pop("config", "plain")), settings


def places(cache):
    """The positions that each head of each layer holds."""
    layers = [np.asarray(cache.layer(index).position) for index in range(cache.heads_shape[0])]
    return [[sorted(head[head >= 0].tolist()) for head in layer.reshape(-1, layer.shape[-1])] for layer in layers]


def assert_same_caches(one, other):
    assert places(one) == places(other)
    np.testing.assert_array_equal(one.next_position, other.next_position)


def each(run_by_layer, run):
    """What a run gives by one program, and by layers."""
    results = []
    for layers in (False, True):
        run_by_layer(layers)
        results.append(run())
    return results


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tokens_and_caches_are_the_same_both_ways_at_once_and_in_a_stream(case, run_by_layer):
    model, settings = made(case)
    settings |= dict(max_new_tokens=8, end=END)
    one, layers = each(run_by_layer, lambda: models.generate(model, TOKENS, **settings))
    np.testing.assert_array_equal(layers.tokens, one.tokens)
    np.testing.assert_array_equal(layers.lengths, one.lengths)
    assert_same_caches(layers.cache, one.cache)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), layers.cache.state, one.cache.state)
    streamed = list(models.stream(model, TOKENS, **settings))  # by layers still
    for row, length in enumerate(one.lengths):
        assert [int(token[row]) for token, _ in streamed][:length] == one.tokens[row, :length].tolist()
    assert_same_caches(streamed[-1][1], one.cache)


@pytest.mark.parametrize("case", PREFILLS.values(), ids=PREFILLS)
def test_logits_of_all_tokens_are_the_same_both_ways(case, run_by_layer):
    model, settings = made(case)
    settings.pop("evict_every", None)
    one, layers = each(run_by_layer, lambda: models.prefill(model, TOKENS, outputs="all", **settings))
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(layers.logits[row, :length], one.logits[row, :length], atol=1e-5, rtol=0)
    assert_same_caches(layers.cache, one.cache)


def test_a_stream_by_one_program_is_the_stream_by_layers(run_by_layer):
    model, settings = made(CASES["once, a question"])
    one, layers = each(
        run_by_layer,
        lambda: [token.tolist() for token, _ in models.stream(model, TOKENS, max_new_tokens=8, end=END, **settings)],
    )
    assert layers == one


def test_small_layers_run_in_one_program_and_large_ones_one_by_one(monkeypatch):
    def cache_of_a_stream():
        return next(models.stream(model_of("plain"), TOKENS, policy="h2o", budget=14, block=8, max_new_tokens=1))[1]

    layer = sum(array.nbytes for array in model_of("plain").layers.arrays().values()) // 4
    monkeypatch.setattr(by_layer, "LARGE_LAYER", layer + 1)
    assert not isinstance(cache_of_a_stream(), LayerCaches)
    monkeypatch.setattr(by_layer, "LARGE_LAYER", layer)
    assert isinstance(cache_of_a_stream(), LayerCaches)


def test_inside_of_other_peoples_jit_and_vmap_it_is_one_program(run_by_layer):
    model, settings = model_of("plain"), SETTINGS | dict(policy="h2o")
    logits = models.prefill(model, TOKENS, **settings).logits
    inside = jax.jit(lambda scale: scale * models.prefill(model, TOKENS, **settings).logits)(1.0)
    np.testing.assert_allclose(inside, logits, atol=1e-5)
    drawn = functools.partial(models.generate, model, TOKENS, max_new_tokens=3, temperature=1.0, end=(), **settings)
    keys = jax.random.split(jax.random.key(0), 2)
    alone = [drawn(key=key).tokens.tolist() for key in keys]
    assert jax.vmap(lambda key: drawn(key=key).tokens)(keys).tolist() == alone


def test_logits_that_are_not_finite_are_refused_both_ways(each_way):
    weights = dict(reference.parameters(CONFIGS["plain"]))
    weights["norm"] = np.full_like(weights["norm"], np.nan)
    model = reference.decoder(CONFIGS["plain"], weights)
    with pytest.raises(ValueError, match="the model's logits are NaN or infinite"):
        models.generate(model, TOKENS, lengths=LENGTHS, max_new_tokens=2)


def test_the_cache_of_a_stream_by_layers_is_read_like_one_of_stacked_arrays(run_by_layer):
    model, settings = made(dict(policy="h2o+caote"))
    stacked, layers = each(
        run_by_layer, lambda: next(cache for _, cache in models.stream(model, TOKENS, max_new_tokens=1, **settings))
    )
    assert isinstance(layers, LayerCaches)
    for name in ("key", "value", "position", "live", "num_live", "next_position", "state"):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, atol=1e-4), getattr(layers, name), getattr(stacked, name)
        )
    for name in ("positions", "num_slots", "heads_shape", "nbytes"):
        assert getattr(layers, name) == getattr(stacked, name)
