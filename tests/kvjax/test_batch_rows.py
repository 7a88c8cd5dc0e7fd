"""Rows that come and go: a row holds what its sequence held, the other rows what they held before."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import kvjax
from tests.kvjax import blocks

L, B, K, D, BUDGET, BLOCK = 2, 3, 2, 4, 6, 4
KINDS = {"plain": "snapkv(window=2)", "paged": "h2o@layer"}


def empty(kind: str, batch: int, more: int = 0):
    sizes = dict(layers=L, batch=batch, kv_heads=K, query_heads=2 * K, head_dim=D, page_size=2)
    sizes |= dict(dtype="int8") if kind == "paged" else {}
    return blocks.empty(KINDS[kind], budget=BUDGET + more, block=BLOCK, **sizes)


@functools.cache
def sequence(kind: str, length: int, seed: int):
    """The cache of one sequence that has been evicted from."""
    rng = np.random.default_rng(seed)
    policy, cache = kvjax.parse(KINDS[kind]), empty(kind, 1)
    for start in range(0, length, BLOCK):
        position = np.arange(start, start + BLOCK, dtype=np.int32)[None]
        position = np.where(position < length, position, -1)
        for layer in range(L):
            rows = (rng.normal(size=(1, BLOCK, heads, D)).astype(np.float32) for heads in (2 * K, K, K))
            cache = observe(policy, cache, *rows, position, layer)
        cache = evict(cache, rng.normal(size=cache.position.shape).astype(np.float32), KINDS[kind])
    return cache


@functools.partial(jax.jit, static_argnames=("policy", "layer"))
def observe(policy, cache, query, key, value, position, layer):
    context = kvjax.Context(layer=layer)
    return kvjax.observe(cache, query, key, value, position, policy=policy, budget=BUDGET, context=context)[1]


@functools.partial(jax.jit, static_argnames="policy")
def evict(cache, scores, policy):
    return kvjax.evict(cache, scores, BUDGET, allocation=kvjax.parse(policy).allocation)


@jax.jit
def leaves_of(cache) -> list:
    """Of each layer: the positions, then what is kept of each slot, and the policy's state."""
    layers = [cache.layer(layer) for layer in range(L)]
    return [(here.position, [*here.entries.values()], jax.tree.leaves(here.state)) for here in layers]


def held(cache, row: int) -> list[dict]:
    """Each head's tokens: position -> key, value and per-slot state; and what the policy keeps per head."""
    out = []
    for slots, rows, state in jax.tree.map(np.asarray, leaves_of(cache)):
        arrays = [*rows, *(leaf for leaf in state if leaf.shape[:3] == slots.shape)]
        per_head = [leaf for leaf in state if leaf.shape[:3] != slots.shape]
        for head in range(K):
            tokens = {
                int(p): [array[row, head, slot].tolist() for array in arrays]
                for slot, p in enumerate(slots[row, head])
                if p >= 0
            }
            out.append({"tokens": tokens, "head": [x[row, head].tolist() for x in per_head]})
    return out


join, leave = (jax.jit(function, donate_argnums=0) for function in (kvjax.join, kvjax.leave))


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.given(moves=st.lists(st.tuples(st.integers(0, B - 1), st.integers(-1, 4)), min_size=1, max_size=8))
@hypothesis.settings(max_examples=6)
def test_a_row_holds_what_its_sequence_held_and_others_are_untouched(kind, moves):
    cache, expected = empty(kind, B), [None] * B
    for row, number in moves:
        if number < 0:
            cache, expected[row] = leave(cache, row), None
        else:
            expected[row] = sequence(kind, 5 + 3 * number, number)
            cache = join(cache, row, expected[row])
        for other, one in enumerate(expected):
            found = held(cache, other)
            if one is None:
                assert [head["tokens"] for head in found] == [{}] * (L * K)
                assert not np.concatenate([[0.0], *(x for head in found for x in head["head"])], axis=None).any()
                assert np.asarray(cache.next_position)[other] == 0
            else:
                assert found == held(one, 0)
                assert np.asarray(cache.next_position)[other] == np.asarray(one.next_position)[0]
    if cache.paged:
        used = np.asarray(cache.table)[np.asarray(cache.table) >= 0]
        free = np.asarray(cache.free)[: int(cache.num_free)]
        assert sorted([*used, *free]) == list(range(cache.owner.shape[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_larger_batch_takes_a_smaller_row(kind):
    cache = join(empty(kind, B, more=4), 1, sequence(kind, 8, 1))
    assert [head["tokens"] for head in held(cache, 1)] == [head["tokens"] for head in held(sequence(kind, 8, 1), 0)]


def test_a_row_that_remembers_more_or_less_of_a_token_is_refused():
    batch, one = (kvjax.empty_cache(f"rkv(window={n})", budget=8, block=8, kv_heads=1, head_dim=D) for n in (8, 4))
    with pytest.raises(ValueError, match="remembers more or less per token than the batch's"):
        kvjax.join(batch, 0, one)


def with_one_free_page():
    return dataclasses.replace(empty("paged", B), num_free=jax.device_put(np.int32(1)))


@pytest.mark.matrix  # outside jit each operation is a program
def test_a_row_that_finds_too_few_pages_is_refused():
    with pytest.raises(ValueError, match=r"the row does not fit: \d+ more free pages are needed"):
        kvjax.join(with_one_free_page(), 0, sequence("paged", 8, 1))


def test_a_row_that_finds_too_few_pages_is_nan_under_jit():
    joined = join(with_one_free_page(), 0, sequence("paged", 8, 1))
    assert any(np.isnan(np.asarray(leaf, np.float32)).any() for leaf in joined.entries.values())
    assert int(joined.num_free) == 0


def test_a_row_that_is_not_due_keeps_its_window():
    policy = kvjax.parse("snapkv(window=2)")
    cache = join(join(empty("plain", 2), 0, sequence("plain", 8, 1)), 1, sequence("plain", 8, 2)).layers[0]
    row = np.ones((2, 1, K, D), np.float32)
    observe = functools.partial(kvjax.observe, policy=policy, budget=BUDGET)
    _, cache, evidence = jax.jit(observe)(cache, np.repeat(row, 2, axis=2), row, row)
    before = np.asarray(cache.state.others[0].queries.value)
    cache = jax.jit(kvjax.evict)(cache, evidence, np.array([BUDGET, cache.num_slots + 1]))
    assert (np.asarray(cache.position) >= 0).sum(-1).tolist() == [[BUDGET] * K, [BUDGET + 1] * K]
    assert before.min() > 0 and np.asarray(cache.state.others[0].queries.value).tolist() == [
        [0] * K,
        before[1].tolist(),
    ]
