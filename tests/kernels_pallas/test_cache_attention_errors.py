"""The error of an output without a token, the largest and a window's, against attention that is computed without it."""

import functools

import jax
import numpy as np
import pytest

from kernels_pallas import cache_attention
from kvjax import dequantise, quantise

T, G, S, D = 5, 2, 7, 4
RTOL = {1: 1e-4, 8: 2e-2}


def without(query, key, value, seen, gone):
    """The outputs [G, T, D] of attention over the slots that are seen, but for one."""
    logits = np.where(seen & (np.arange(S) != gone), query @ key.T / np.sqrt(D), -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ value


@pytest.mark.parametrize("sharp", RTOL)  # 8: one token has nearly all of the weight
@pytest.mark.parametrize("eight_bits", [False, True])
def test_it_is_the_change_of_the_output_when_a_token_is_taken_away(eight_bits, sharp):
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=shape).astype(np.float32) for shape in ((1, T, G, D), *[(1, 1, S, D)] * 2))
    position, at = np.array([[[3, 0, -1, 1, 2, 5, 6]]]), np.array([[-1, 3, 4, 5, 6]])
    rows = dict(key=key, value=value)
    if eight_bits:
        k, v = jax.jit(lambda *rows: [quantise(x, "int8") for x in rows])(key, value)
        rows = dict(key=k.values, value=v.values, key_scale=k.scale, value_scale=v.scale)
        key, value = map(np.asarray, jax.jit(lambda *rows: [dequantise(*x) for x in rows])(k, v))
    query = query * sharp
    run = jax.jit(functools.partial(cache_attention, statistics=["max_error", "window_error"], window=2))
    found = run(query, **rows, key_position=position, query_position=at)[1]
    largest, summed = np.asarray(found.max_error)[0], np.asarray(found.window_error)[0]
    seen = (position[0, 0] >= 0) & (position[0, 0] <= at[0, 1:, None])
    each = (
        query[0, 1:].swapaxes(0, 1).astype(np.float64),
        key[0, 0].astype(np.float64),
        value[0, 0].astype(np.float64),
    )
    out = without(*each, seen, -1)
    for slot in range(S):
        change = np.linalg.norm(without(*each, seen, slot) - out, axis=-1)
        relative = change / np.linalg.norm(out, axis=-1)
        np.testing.assert_allclose(summed[:, slot], (change[:, -2:] ** 2).sum(axis=1), rtol=RTOL[sharp], atol=1e-6)
        if sharp == 1:
            np.testing.assert_allclose(largest[:, slot], relative.max(axis=1), rtol=1e-4, atol=1e-6)
