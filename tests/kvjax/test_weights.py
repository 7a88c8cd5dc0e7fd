"""The statistic "weights": all attention weights of a block, wherever a cache holds its tokens."""

import functools

import jax
import numpy as np
import pytest

import kvjax
from tests.tiers import first

B, K, G, T, D = 2, 2, 2, 5, 8
SUMMED = kvjax.base_score("summed", lambda o: o.columns.weights.sum(3), statistics=("weights",))
PLAIN = kvjax.parse("h2o(accumulate=False)+protect(recent=0)")
CAPPED = {"sliding_window": 7, "soft_cap": 2.0, "scale": 0.7}
PLACES = {
    "plain": ({}, {}, ""),
    "of layers, in a window": (dict(layers=2), CAPPED, ""),
    "turned, in a window": (dict(positions="compact"), CAPPED, ""),
    "paged, in eight bits": (dict(dtype="int8"), {}, "layer"),
    "paged, of layers, in a window": (dict(layers=2), CAPPED, "layer"),
}


def scores(policy, of_cache, context, steps=3):
    """Return what a policy says of a cache after some blocks, the last of which has padding."""
    rng = np.random.default_rng(0)
    sizes = dict(batch=B, kv_heads=K, query_heads=K * G, head_dim=D, budget=T * steps, block=T)
    cache = kvjax.empty_cache(policy, **sizes, **of_cache)
    context = kvjax.Context(**context, layer=1 if "layers" in of_cache else None)
    observe = jax.jit(functools.partial(kvjax.observe, policy=policy, context=context))
    for step in range(steps):
        q, k, v = (rng.normal(size=(B, T, heads, D)).astype(np.float32) for heads in (K * G, K, K))
        position = np.broadcast_to(np.arange(T) + step * T, (B, T)).copy()
        position[0, T - step :] = -1 if step == steps - 1 else position[0, T - step :]
        _, cache, evidence = observe(cache, q, k, v, position)
    return np.asarray(evidence.scores)


@pytest.mark.parametrize("place", first(3, PLACES))
def test_their_sum_is_the_statistic_sum(place):
    options, context, allocation = PLACES[place]
    options, link = dict(options), []
    if turned := options.pop("positions", None):
        link = [kvjax.parse(f"h2o+positions(kind='{turned}')").links[1]]
        context = context | {"frequency": np.float32([[1.0, 0.3, 0.1, 0.03]])}
    policies = [kvjax.chain(base, *link) @ (allocation or "uniform") for base in (SUMMED, PLAIN)]
    found, expected = (scores(policy, options, context) for policy in policies)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
