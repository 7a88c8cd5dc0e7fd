"""The largest relative error of an output without a token, against attention that is computed again without it."""

import functools

import jax
import numpy as np
import pytest

from kernels_pallas import cache_attention
from kvjax import dequantise, quantise

T, G, S, D = 5, 2, 7, 4


def without(query, key, value, seen, gone):
    """The outputs [G, T, D] of attention over the slots that are seen, but for one."""
    logits = np.where(seen & (np.arange(S) != gone), query @ key.T / np.sqrt(D), -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ value


@pytest.mark.parametrize("eight_bits", [False, True])
def test_it_is_the_change_of_the_output_when_a_token_is_taken_away(eight_bits):
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=shape).astype(np.float32) for shape in ((1, T, G, D), *[(1, 1, S, D)] * 2))
    position, at = np.array([[[3, 0, -1, 1, 2, 5, 6]]]), np.array([[-1, 3, 4, 5, 6]])
    rows = dict(key=key, value=value)
    if eight_bits:
        k, v = jax.jit(lambda *rows: [quantise(x, "int8") for x in rows])(key, value)
        rows = dict(key=k.values, value=v.values, key_scale=k.scale, value_scale=v.scale)
        key, value = map(np.asarray, jax.jit(lambda *rows: [dequantise(*x) for x in rows])(k, v))
    run = jax.jit(functools.partial(cache_attention, statistics=["max_error"]))
    found = np.asarray(run(query, **rows, key_position=position, query_position=at)[1].max_error)[0]
    seen = (position[0, 0] >= 0) & (position[0, 0] <= at[0, 1:, None])
    each = (
        query[0, 1:].swapaxes(0, 1).astype(np.float64),
        key[0, 0].astype(np.float64),
        value[0, 0].astype(np.float64),
    )
    out = without(*each, seen, -1)
    for slot in range(S):
        change = np.linalg.norm(without(*each, seen, slot) - out, axis=-1) / np.linalg.norm(out, axis=-1)
        np.testing.assert_allclose(found[:, slot], change.max(axis=1), rtol=1e-4, atol=1e-6)
