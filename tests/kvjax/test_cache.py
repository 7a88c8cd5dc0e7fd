"""The cache against a dictionary: what is stored where, and that nothing else moves."""

import dataclasses
import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import KVCache

B, K, S, D, T = 2, 2, 6, 3, 3
insert = jax.jit(kvjax.insert)
evict = jax.jit(kvjax.evict)
compact = jax.jit(kvjax.compact, static_argnums=1)


@functools.cache
def empty(slots: int = S, *, dtype=jnp.float32) -> KVCache:
    def made():
        state = {"seen": jnp.ones((B, K, slots, 2)), "age": jnp.ones((B, K, slots), jnp.int32)}
        return KVCache.init(batch=B, kv_heads=K, slots=slots, head_dim=D, dtype=dtype, state=state)

    return jax.jit(made)()


def rows_of(position: np.ndarray, dtype=np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values that tell which token they belong to: 100 * row + 10 * head + position, and halves of it."""
    b, t, k = np.ogrid[: position.shape[0], : position.shape[1], :K]
    number = 100.0 * b + 10.0 * k + position[:, :, None] + 0 * t
    rows = np.repeat(number[..., None], D, axis=-1) + np.arange(D) / 8
    return rows.astype(dtype), (rows / 2).astype(dtype)


def put(cache: KVCache, position: list[list[int]]) -> KVCache:
    position = np.array(position, np.int32)
    return insert(cache, *rows_of(position, cache.key.dtype), position)


@functools.cache
def some_freed() -> KVCache:
    """Full heads, of which slots 1, 4 (row 0) and 0, 5 (row 1) were freed in head 0, slots 2, 3 in head 1."""
    cache = put(empty(), [list(range(S))] * B)
    scores = np.ones((B, K, S), np.float32)
    scores[0, 0, [1, 4]] = scores[1, 0, [0, 5]] = scores[0, 1, [2, 3]] = scores[1, 1, [2, 3]] = 0
    return evict(cache, scores, 4)


def leaves(cache: KVCache) -> dict[str, np.ndarray]:
    named = jax.tree_util.tree_leaves_with_path(cache)
    return {
        jax.tree_util.keystr(path[-1:] if path[0].name == "entries" else path): np.asarray(leaf) for path, leaf in named
    }


def assert_same(a: KVCache, b: KVCache) -> None:
    for name, leaf in leaves(a).items():
        np.testing.assert_array_equal(leaf, leaves(b)[name], err_msg=name)


def test_freed_slots_are_reused_and_nothing_else_moves():
    before = some_freed()
    after = put(before, [[6, 7]] * B)
    expected = np.array([[[0, 6, 2, 3, 7, 5], [0, 1, 6, 7, 4, 5]], [[6, 1, 2, 3, 4, 7], [0, 1, 6, 7, 4, 5]]])
    np.testing.assert_array_equal(after.position, expected)
    entered = expected >= 6
    for name, leaf in leaves(after).items():
        if name != ".next_position":
            np.testing.assert_array_equal(leaf[~entered], leaves(before)[name][~entered], err_msg=name)
    key, value = map(np.asarray, rows_of(np.array([[6, 7]] * B)))
    np.testing.assert_array_equal(np.asarray(after.key)[entered].reshape(B, K, 2, D), key.swapaxes(1, 2))
    np.testing.assert_array_equal(np.asarray(after.value)[entered].reshape(B, K, 2, D), value.swapaxes(1, 2))


@pytest.mark.parametrize("block", [[[6, -1], [-1, -1]], [[6], [-1]]], ids=["of two", "of one"])
def test_the_state_of_a_slot_is_zero_when_a_token_enters(block):
    full = some_freed()
    before = dataclasses.replace(full, state=jax.tree.map(np.ones_like, full.state))
    after = put(before, block)
    entered = np.asarray(after.position) == 6
    assert entered.sum() == K
    for name in ("seen", "age"):
        assert (np.asarray(after.state[name])[entered] == 0).all()
        np.testing.assert_array_equal(np.asarray(after.state[name])[~entered], 1)


def test_keys_are_cast_to_the_caches_dtype():
    key, value = rows_of(np.array([[0, 1]] * B))
    cache = insert(empty(dtype=jnp.bfloat16), key, value)
    assert cache.key.dtype == cache.value.dtype == jnp.bfloat16
    expected = np.asarray(key).astype(jnp.bfloat16).swapaxes(1, 2)
    np.testing.assert_array_equal(np.asarray(cache.key)[:, :, :2], expected)


def test_under_jit_a_token_without_a_free_slot_makes_its_row_nan():
    cache = put(empty(), [list(range(S))] * B)
    key, value = rows_of(np.array([[6, 7]] * B))
    after = insert(cache, key, value)
    assert np.asarray(after.position).tolist() == [[[0, 1, 2, 3, 7, 6]] * K] * B
    assert np.isnan(after.key[:, :, 4:]).all()
    np.testing.assert_array_equal(after.key[:, :, :4], cache.key[:, :, :4])
    with pytest.raises(ValueError, match=f"slots is 4, but a head holds {S} tokens: evict"):
        compact.__wrapped__(cache, 4)
    assert np.isnan(compact(cache, 4).key).all()


def test_a_layer_of_several_equals_a_cache_alone_and_the_others_are_left():
    cache, alone = kvjax.LayerCaches((empty(),) * 3), empty()

    @jax.jit
    def attend(cache, key, value, position):
        return kvjax.attend(cache, key, key, value, position, context=kvjax.Context(layer=np.int32(2)))[1]

    for positions in ([[0, 1, 2], [0, -1, -1]], [[3, 4], [1, 2]]):
        cache = attend(cache, *rows_of(np.array(positions)), np.array(positions, np.int32))
        alone = put(alone, positions)
    assert_same(cache.layers[2], alone)
    for other in cache.layers[:2]:
        assert_same(other, empty())


def test_arrays_of_several_layers_are_no_plain_cache():
    key, position = np.zeros((3, B, K, S, D), np.float32), np.zeros((3, B, K, S), np.int32)
    with pytest.raises(ValueError, match=r"position is \(3, 2, 2, 6\); a KVCache is of one layer, \[B, K, S\]"):
        KVCache.of(key, key, position, np.zeros(B, np.int32))


def test_compact_keeps_order_and_content():
    whole = some_freed()
    small = last = compact(whole, 4)
    assert small.num_slots == 4 and small.key.shape[-2:] == (4, D)
    for head in np.ndindex(B, K):
        live = np.asarray(whole.position)[head] >= 0
        for name in ("key", "value", "position"):
            expected = np.asarray(getattr(whole, name))[head][live]
            np.testing.assert_array_equal(np.asarray(getattr(last, name))[head], expected)
    assert small.next_position.tolist() == whole.next_position.tolist()


def test_pages_are_not_compacted():
    pages = kvjax.empty_cache("h2o@model", layers=2, kv_heads=K, head_dim=D, budget=4)
    with pytest.raises(ValueError, match="there is nothing to compact"):
        kvjax.compact(pages, 4)


# The whole life of a cache, against sets of tokens.

Block = st.tuples(*[st.integers(0, T)] * B)  # how many tokens each row of a block brings


@functools.cache
def life_step():
    def step(cache, position, scores, budget):
        cache = kvjax.insert(cache, *_rows_in_jax(position), position)
        return kvjax.evict(cache, scores, budget)

    return jax.jit(step)


@functools.cache
def life_start():
    return jax.jit(lambda cache, position: kvjax.insert(cache, *_rows_in_jax(position), position))


def _rows_in_jax(position):
    number = 1000.0 * jnp.arange(B)[:, None, None] + 500.0 * jnp.arange(K) + position[:, :, None]
    rows = jnp.repeat(number[..., None], D, axis=-1)
    return rows, -rows


@hypothesis.given(blocks=st.lists(Block, min_size=1, max_size=8), seed=st.integers(0, 2**32 - 1))
def test_a_cache_holds_what_a_dictionary_would(blocks, seed):
    rng = np.random.default_rng(seed)
    budget = S - T
    cache = empty()
    held: dict[tuple[int, int], dict[int, float]] = {head: {} for head in np.ndindex(B, K)}  # position -> key
    brought = [0] * B
    for block in blocks:
        position = np.full((B, T), -1, np.int32)
        for b, count in enumerate(block):
            places = np.sort(rng.permutation(T)[:count])
            position[b, places] = brought[b] + np.arange(count)
            brought[b] += count
        before = leaves(cache)
        scores_by_position = rng.permutation(200).astype(np.float32)
        # Scores belong to tokens; find out first where they will lie.
        inserted = life_start()(cache, position)
        scores = scores_by_position[np.maximum(np.asarray(inserted.position), 0)]
        cache = life_step()(cache, position, scores, budget)
        after = leaves(cache)
        live = after[".position"] >= 0
        for (b, k), tokens in held.items():
            tokens |= {int(p): 1000.0 * b + 500.0 * k + p for p in position[b] if p >= 0}
            best = sorted(tokens, key=lambda p: scores_by_position[p], reverse=True)[:budget]
            held[b, k] = {p: tokens[p] for p in best}
            here = live[b, k]
            slots = zip(after[".position"][b, k, here], after["['key']"][b, k, here], strict=True)
            assert {int(p): float(row[0]) for p, row in slots} == held[b, k]
        stayed = live & (before[".position"] == after[".position"])
        np.testing.assert_array_equal(after["['value']"][stayed], before["['value']"][stayed])
        np.testing.assert_array_equal(after["['value']"][live], -after["['key']"][live])
        assert cache.next_position.tolist() == brought


# In place.


def test_a_donated_cache_is_updated_in_place():
    """A layer alone is: a step changes all layers of several."""
    layer = jax.jit(lambda: KVCache.init(batch=2, kv_heads=2, slots=80, head_dim=8))()
    cache = kvjax.LayerCaches((layer,) * 3)

    def step(cache, key, value, scores):
        return kvjax.evict(cache.map(lambda layer: kvjax.insert(layer, key, value)), scores, 64)

    rows, scores = np.ones((2, 1, 2, 8), np.float32), np.ones((3, 2, 2, 80), np.float32)
    program = jax.jit(step, donate_argnums=0).lower(cache, rows, rows, scores).compile()
    text = program.as_text()
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", text).group(1)
    aliased = {(int(out), int(into)) for out, into in re.findall(r"\{(\d+)\}: \((\d+), \{\}", aliases)}
    leaves = len(jax.tree.leaves(layer))
    own = {(leaf, leaf) for first in range(0, 3 * leaves, leaves) for leaf in range(first, first + 3)}
    assert own <= aliased  # key, value, position
    assert program.memory_analysis().alias_size_in_bytes >= 3 * (layer.key.nbytes + layer.value.nbytes)
    whole = ",".join(map(str, layer.key.shape))
    assert f"f32[{whole}]" in text
    assert not re.findall(rf"f32\[{whole}\]\S* copy\(.*", text)
