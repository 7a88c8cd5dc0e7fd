"""The order that a decode step continues is the one that a sort of the positions gives."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax._src.order import Held, Order, Ranked, by_position, continued, renewed

B, K, S, D = 2, 2, 9, 4
SEEDS = st.integers(0, 2**32 - 1)


@functools.partial(jax.jit, static_argnums=4)
def step_of(rank, position, after_rank, after, shifts):
    held = Held.of(rank, position, shifts)
    return continued(held, after_rank, after), held.wrong


sorted_by_position = jax.jit(by_position)


@jax.jit
def closed(rank, position):
    cache = kvjax.KVCache.of(np.zeros((B, K, S, 1)), np.zeros((B, K, S, 1)), position, np.zeros(B, np.int32))
    return renewed(cache, Ranked(rank, ()), rank, position, gap=False).rank


def positions(rng, least=0, most=S - 1):
    """Positions below 50 of a few tokens, in slots anywhere."""
    position = np.full((B, K, S), -1, np.int32)
    for head in np.ndindex(B, K):
        slots = rng.permutation(S)[: rng.integers(least, most + 1)]
        position[head][slots] = rng.permutation(50)[: len(slots)]
    return position


def ranks(position):
    return np.argsort(np.argsort(np.where(position < 0, 99, position), axis=-1), axis=-1).astype(np.int32) + 1


def leave(position, choose):
    for head in np.ndindex(B, K):
        live = np.flatnonzero(position[head] >= 0)
        by_age = live[np.argsort(position[head][live])]
        position[head][by_age[choose(len(by_age))]] = -1


def enter(rng, position, rank):
    for head in np.ndindex(B, K):
        slot = rng.choice(np.flatnonzero(position[head] < 0))
        position[head][slot], rank[head][slot] = 60, 0


@settings(deadline=None)
@given(seed=SEEDS, shifts=st.booleans(), new=st.booleans())
def test_a_step_continues_the_order(seed, shifts, new):
    rng = np.random.default_rng(seed)
    position = positions(rng)
    rank = ranks(position)
    leave(position, lambda n: rng.permutation(n)[: rng.integers(2)])  # the eviction's
    leave(position, lambda n: np.arange(n)[n - rng.integers(min(n, 2) + 1) :])  # taken back
    if shifts:
        leave(position, lambda n: np.arange(n)[: rng.integers(3)])
    after, after_rank = position.copy(), rank.copy()
    if new:
        enter(rng, after, after_rank)
    found, wrong = step_of(rank, position, after_rank, after, shifts)
    expected, live = sorted_by_position(after), after >= 0
    assert not np.any(wrong)
    np.testing.assert_array_equal(np.asarray(found.place)[live], np.asarray(expected.place)[live])
    held = np.arange(S) < live.sum(axis=-1, keepdims=True)
    np.testing.assert_array_equal(np.asarray(found.slot)[held], np.asarray(expected.slot)[held])
    rest = np.where(held, S, np.asarray(found.slot))
    assert not np.take_along_axis(np.pad(live, ((0, 0), (0, 0), (0, 1))), rest, axis=-1).any()  # a free slot or S


@settings(deadline=None)
@given(seed=SEEDS)
def test_two_gaps_and_a_token_without_a_rank_are_seen(seed):
    rng = np.random.default_rng(seed)
    position = positions(rng, least=5)
    rank = ranks(position)
    fewer, unranked = position.copy(), rank.copy()
    leave(fewer, lambda n: 1 + rng.permutation(n - 2)[:2])
    np.put_along_axis(unranked, np.argmax(position, axis=-1)[..., None], 0, axis=-1)
    for shifts in (False, True):
        assert np.all(step_of(rank, fewer, rank, fewer, shifts)[1])
        assert np.all(step_of(unranked, position, unranked, position, shifts)[1])


@settings(deadline=None)
@given(seed=SEEDS)
def test_an_eviction_of_several_tokens_leaves_no_gap(seed):
    rng = np.random.default_rng(seed)
    position = positions(rng, most=S)
    rank = ranks(position)
    leave(position, lambda n: rng.permutation(n)[: rng.integers(n + 1)])
    live = position >= 0
    np.testing.assert_array_equal(np.asarray(closed(rank, position))[live], ranks(position)[live])


def test_sorting_and_back():
    order = Order(np.array([[[2, 0, 3, 3]]]), np.array([[[1, 3, 0, 3]]]))  # of S = 3 slots and no slot 3
    order = Order(order.slot[..., :3], order.place[..., :3])
    x = np.array([[[[5.0, 7.0, 9.0]]]])
    in_order, back = jax.jit(lambda order, x: (order.sort(x, -1), order.unsort(order.sort(x, -1))))(order, x)
    assert in_order.tolist() == [[[[9.0, 5.0, -1.0]]]]
    assert np.asarray(back)[0, 0, 0, [0, 2]].tolist() == [5.0, 9.0]


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
