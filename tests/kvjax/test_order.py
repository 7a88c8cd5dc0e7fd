"""A cache keeps the ranks of its tokens, and a decode step that continues their order keeps what a sort would."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings

import kvjax
from kvjax._src.order import Ranked, renewed
from tests.kernels_pallas.test_order_tokens import SEEDS, leave, positions, ranks

B, K, S, D = 2, 2, 9, 4


@jax.jit
def closed(rank, position):
    cache = kvjax.KVCache.of(np.zeros((B, K, S, 1)), np.zeros((B, K, S, 1)), position, np.zeros(B, np.int32))
    return renewed(cache, Ranked(rank, ()), rank, position, gap=False).rank


@settings(deadline=None)
@given(seed=SEEDS)
def test_an_eviction_of_several_tokens_leaves_no_gap(seed):
    rng = np.random.default_rng(seed)
    position = positions(rng, most=S)
    rank = ranks(position)
    leave(position, lambda n: rng.permutation(n)[: rng.integers(n + 1)])
    live = position >= 0
    np.testing.assert_array_equal(np.asarray(closed(rank, position))[live], ranks(position)[live])


BUDGET, WINDOW = 8, 10


@functools.partial(jax.jit, static_argnames="excess")
def step(cache, drawn, excess=None):
    context = kvjax.Context(sliding_window=np.int32(WINDOW), excess=excess)
    query, key, value = drawn[:, :, :4], drawn[:, :, 4:6], drawn[:, :, 6:]
    return kvjax.attend(cache, query, key, value, policy="snapkv(window=2)+caote", budget=BUDGET, context=context)


rewind = jax.jit(kvjax.rewind)


def fed(excess, tokens=14, back=9):
    """Two blocks, then single tokens, of which some are taken back on the way."""
    rng = np.random.default_rng(0)
    made = dict(batch=B, kv_heads=K, query_heads=4, head_dim=D, budget=BUDGET, block=6)
    cache, outs, left = kvjax.empty_cache("snapkv(window=2)+caote", **made), [], False
    for _ in range(2):
        _, cache = step(cache, rng.normal(size=(B, 6, 8, D)))
    for number in range(tokens):
        if number == back:
            cache = rewind(cache, cache.next_position - 2)
        oldest = np.where(cache.live, cache.position, 99).min(axis=-1)
        left |= bool((oldest <= np.asarray(cache.next_position)[:, None] + 1 - WINDOW).any())
        out, cache = step(cache, rng.normal(size=(B, 1, 8, D)), excess=excess)
        outs.append(out)
    return np.concatenate(outs, axis=1), cache, left


def test_steps_that_continue_the_order_keep_what_steps_that_sort_keep():
    (out, cache, left), (expected, other, _) = fed(1), fed(None)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(cache.position, other.position)
    assert left  # some tokens the sliding window, before an eviction chose them


@pytest.mark.parametrize("broken", ["a token that no eviction has seen", "an eviction of another kind"])
def test_where_the_order_is_broken_a_step_sorts(broken):
    _, cache, _ = fed(1, tokens=2)
    rng = np.random.default_rng(1)
    if broken == "a token that no eviction has seen":
        token = rng.normal(size=(B, 1, K, D)).astype(np.float32)
        cache = jax.jit(kvjax.insert)(cache, token, token)
    else:
        cache = jax.jit(kvjax.evict)(cache, rng.normal(size=cache.position.shape), 4)
    drawn = rng.normal(size=(2, B, 1, 8, D))
    kept = {}
    for excess in (1, None):
        _, after = step(cache, drawn[0], excess=excess)
        kept[excess] = step(after, drawn[1], excess=excess)[1].position
    np.testing.assert_array_equal(kept[1], kept[None])
