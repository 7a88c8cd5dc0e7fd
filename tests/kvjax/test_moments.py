"""MomentKV's moments against sums over the evicted tokens in float64: what stays, and what attention returns."""

import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax._src import moments
from tests.kvjax.blocks import empty
from tests.tiers import matrix

B, K, G, D, BUDGET, BLOCK, BLOCKS = 2, 2, 2, 4, 5, 3, 4
SIZES = dict(batch=B, kv_heads=K, query_heads=K * G, head_dim=D, budget=BUDGET, block=BLOCK)


class Head:
    """One head in float64, which keeps all tokens and knows which ones the library has left."""

    def __init__(self):
        self.key, self.value, self.kept = np.zeros((0, D)), np.zeros((0, D)), np.zeros(0, bool)
        self.received = np.zeros(0)

    def block(self, query, key, value):
        """The outputs [G, T, D] of a block and its tokens' scores, by equations 9, 10 and 12 as they are written."""
        before = len(self.kept)
        self.key, self.value = np.concatenate([self.key, key]), np.concatenate([self.value, value])
        self.kept = np.concatenate([self.kept, np.ones(len(key), bool)])
        self.received = np.concatenate([self.received, np.zeros(len(key))])
        gone, out = np.flatnonzero(~self.kept), np.zeros(query.shape)
        n, sums = len(gone), [x[gone].sum(axis=0) for x in (self.key, self.value)]
        outer = self.value[gone].T @ self.key[gone] - (np.outer(sums[1], sums[0]) / n if n else 0)
        k, v, slope = sums[0] / max(n, 1), sums[1] / max(n, 1), outer / (max(n, 1) * D**0.5)
        for g, t in np.ndindex(query.shape[:2]):
            seen = np.flatnonzero(self.kept & (np.arange(len(self.kept)) <= before + t))
            weights, lost = np.exp(self.key[seen] @ query[g, t] / D**0.5), n * np.exp(query[g, t] @ k / D**0.5)
            self.received[seen] += weights / weights.sum() / G
            mass = weights.sum() + lost
            out[g, t] = (weights @ self.value[seen] + lost * (v + slope @ query[g, t])) / mass
        return out, self.received * np.linalg.norm(self.value - v - self.key @ slope.T, axis=1)


@functools.cache
def paged():
    """The same cache in pages."""
    policy = kvjax.parse("h2o+moments+protect(recent=1)")
    make = lambda B, K, S: policy.state(B, K, G=G, S=S, D=D)  # noqa: E731
    sizes = dict(batch=B, kv_heads=K, head_dim=D, pages=16, page_size=3, most=BUDGET + BLOCK)
    return jax.jit(lambda: kvjax.PagedCache.init(**sizes, init_state=make))()


@pytest.mark.parametrize("pages", [False, pytest.param(True, marks=matrix)])
def test_attention_and_eviction_are_those_of_the_sums_over_what_was_evicted(pages, monkeypatch):
    monkeypatch.setattr(moments, "SLOTS", 4)  # so that a head in pages is read in two parts
    policy = kvjax.parse("h2o+moments+protect(recent=1)")
    cache, heads = paged() if pages else empty(policy, **SIZES), [[Head() for _ in range(K)] for _ in range(B)]
    read = jax.jit(lambda cache: cache.layer(None).position) if pages else lambda cache: cache.position
    step = jax.jit(lambda cache, *rows: kvjax.attend(cache, *rows, policy=policy, budget=BUDGET))
    given = np.random.default_rng(4).normal(size=(BLOCKS, 3, B, BLOCK, K * G, D)).astype(np.float32)
    for number, (query, key, value) in enumerate(given):
        out, cache = step(cache, query, key[:, :, :K], value[:, :, :K])
        position = np.asarray(read(cache))
        for b, k in np.ndindex(B, K):
            head, own = heads[b][k], slice(k * G, (k + 1) * G)
            expected, scores = head.block(query[b, :, own].swapaxes(0, 1), key[b, :, k], value[b, :, k])
            np.testing.assert_allclose(np.asarray(out)[b, :, own].swapaxes(0, 1), expected, rtol=1e-5, atol=1e-6)
            stays = np.sort(position[b, k][position[b, k] >= 0])
            scores = np.where(head.kept, scores, -np.inf)
            scores[-1] = np.inf
            np.testing.assert_array_equal(stays, np.sort(np.argsort(scores)[-BUDGET:])[-(number + 1) * BLOCK :])
            head.kept[:] = np.isin(np.arange(len(head.kept)), stays)
