"""One attention under several policies: each says of the block what it says alone."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax

NAMES = ("h2o+caote", "snapkv(window=8)+fast_caote", "h2o@adakv", "snapkv(window=8)+caote(per='query')")
S = 36  # room for a block above what a head may hold of the largest budget


def rows():
    shapes = dict(query=4, key=2, value=2)
    rng = np.random.default_rng(0)
    return [rng.normal(size=(2, 16, n, 8)).astype(np.float32) for n in shapes.values()]


def cache_of(states):
    cache = kvjax.KVCache.init(batch=2, kv_heads=2, slots=S, head_dim=8)
    return dataclasses.replace(cache, state=states)


def test_each_policy_says_what_it_says_alone_block_after_block():
    policies = [kvjax.parse(name) for name in NAMES]
    budgets = range(8, 8 + len(policies))
    states = tuple(policy.state(2, 2, 2, S, 8) for policy in policies)
    query, key, value = rows()
    together, own = cache_of(states), [cache_of(state) for state in states]

    @jax.jit
    def observe(together, own, block):
        alone = [
            kvjax.observe(cache, *block, policy=policy, budget=budget)
            for cache, policy, budget in zip(own, policies, budgets, strict=True)
        ]
        return kvjax.observe_each(together, *block, policies=policies, budgets=budgets), alone

    for start in (0, 8):
        block = [x[:, start : start + 8] for x in (query, key, value)]
        (out, together, said), alone = observe(together, own, block)
        own = [cache for _, cache, _ in alone]
        for index, (expected, _, of_one) in enumerate(alone):
            np.testing.assert_allclose(out, expected, atol=1e-6)
            np.testing.assert_allclose(said[index].scores, of_one.scores, rtol=1e-5, atol=1e-7)
            jax.tree.map(
                lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), together.state[index],
                own[index].state,
            )  # fmt: skip


def test_queries_of_another_batch_are_refused():
    q, k, v = (np.asarray(x) for x in rows()[:3])
    with pytest.raises(ValueError, match="do not fit each other and a cache"):
        kvjax.observe_each(
            cache_of((kvjax.h2o().state(2, 2, 2, S, 8),)), np.concatenate([q, q]), k, v, policies=["h2o"], budgets=[4]
        )


def test_it_is_of_one_layer():
    layer = cache_of((kvjax.h2o().state(2, 2, 2, S, 8),))
    with pytest.raises(ValueError, match="expected a KVCache whose state is a tuple of 1, one per policy"):
        kvjax.observe_each(kvjax.LayerCaches((layer, layer)), *rows(), policies=["h2o"], budgets=[4])
