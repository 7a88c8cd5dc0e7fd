"""One attention under several policies: each says of the block what it says alone."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax

NAMES = ("h2o+caote", "tova", "snapkv(window=4)", "snapkv(window=8)+fast_caote", "curdkv", "h2o@adakv")


def rows(layers=()):
    shapes = dict(query=4, key=2, value=2)
    return [jax.random.normal(jax.random.key(i), (*layers, 2, 12, n, 8)) for i, n in enumerate(shapes.values())]


def cache_of(states, layers=None):
    cache = kvjax.KVCache.init(batch=2, kv_heads=2, slots=12, head_dim=8, layers=layers)
    return dataclasses.replace(cache, state=states)


def test_each_policy_says_what_it_says_alone_block_after_block():
    policies = [kvjax.parse(name) for name in NAMES]
    budgets = range(8, 8 + len(policies))
    states = tuple(policy.state(2, 2, 2, 12, 8) for policy in policies)
    query, key, value = rows()
    together, own = cache_of(states), [cache_of(state) for state in states]
    for start in (0, 4):  # a block of 4, then one of 8
        block = [x[:, start : start * 2 + 4] for x in (query, key, value)]
        out, together, said = kvjax.observe_each(together, *block, policies=policies, budgets=budgets)
        for index, (policy, budget) in enumerate(zip(policies, budgets, strict=True)):
            expected, own[index], alone = kvjax.observe(own[index], *block, policy=policy, budget=budget)
            np.testing.assert_allclose(out, expected, atol=1e-6)
            np.testing.assert_allclose(said[index].scores, alone.scores, rtol=1e-5, atol=1e-7)
            jax.tree.map(
                lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), together.state[index],
                own[index].state,
            )  # fmt: skip


def test_a_layer_of_a_stack_is_written_in_its_place():
    policies = [kvjax.parse(name) for name in ("h2o", "tova")]
    states = tuple(
        jax.tree.map(lambda leaf: np.zeros((3, *leaf.shape), leaf.dtype), policy.state(2, 2, 2, 12, 8))
        for policy in policies
    )
    _, whole, said = kvjax.observe_each(
        cache_of(states, layers=3), *rows(), policies=policies, budgets=[4, 4], context=kvjax.Context(layer=1)
    )
    _, alone, one = kvjax.observe_each(
        cache_of(tuple(policy.state(2, 2, 2, 12, 8) for policy in policies)), *rows(), policies=policies, budgets=[4, 4]
    )
    np.testing.assert_allclose(said[0].scores, one[0].scores, rtol=1e-5)
    for stacked, plain in zip(jax.tree.leaves(whole.state), jax.tree.leaves(alone.state), strict=True):
        np.testing.assert_allclose(stacked[1], plain, rtol=1e-5)
        assert not stacked[0].any() and not stacked[2].any()


@pytest.mark.parametrize(
    "policies, budgets, states, said",
    [
        ([], [], 0, "at least one policy"),
        (["h2o", "full"], [4, 4], 2, "none of them 'full'"),
        (["h2o", "tova"], [4], 2, "one budget for each policy"),
        (["h2o", "tova"], [4, 4], 1, "a tuple of 2"),
        (["h2o", "h2o"], [4, 0.5], 2, "tokens per head"),
    ],
)
def test_what_does_not_go_together_is_refused(policies, budgets, states, said):
    state = tuple(kvjax.h2o().state(2, 2, 2, 12, 8) for _ in range(states))
    with pytest.raises(ValueError, match=said):
        kvjax.observe_each(cache_of(state), *rows(), policies=policies, budgets=budgets)
