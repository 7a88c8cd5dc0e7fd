"""A window of queries that come one by one says what it says in one block."""

import dataclasses
import functools

import jax
import numpy as np

import kvjax
from kernels_pallas import STATISTICS, ColumnStatistics, cache_attention
from kvjax._src import window as windows
from kvjax._src.window import Window, begin_anew, observed

B, K, G, S, D = 2, 2, 2, 12, 4
NAMES = frozenset(name for name in STATISTICS if name.startswith("window_"))
join = jax.jit(windows.join, static_argnums=3)


@functools.partial(jax.jit, static_argnums=2)
def columns_of(query, position, window):
    key = np.random.default_rng(1).normal(size=(B, K, S, D)).astype(np.float32)
    slots = np.broadcast_to(np.arange(S), (B, K, S))
    _, columns = cache_attention(query, key, key, slots, position, statistics=NAMES, window=window)
    return jax.tree.map(lambda column: column.reshape(B, K, -1, S), columns)


def block_of(tokens):
    query = np.random.default_rng(tokens).normal(size=(B, tokens, K * G, D)).astype(np.float32)
    return query, np.tile(S + np.arange(tokens), (B, 1))


begun = jax.jit(lambda: Window.init(observed(NAMES), B, K, G, S))


def entered(*counts):
    return np.array(counts, np.int32)


def same(columns, other):
    for name in sorted(NAMES):
        np.testing.assert_allclose(getattr(columns, name), getattr(other, name), rtol=2e-5, atol=1e-7, err_msg=name)


def test_parts_of_a_window_joined_are_the_window():
    query, position = block_of(6)
    window, start = begun(), 0
    for size in (2, 1, 3):
        part = columns_of(query[:, start : start + size], position[:, start : start + size], 6)
        joined, window = join(window, part, entered(size, size), 6)
        start += size
    same(joined, columns_of(query, position, 6))
    assert window.queries.value.tolist() == [[6, 6], [6, 6]]


def test_a_block_with_a_whole_window_speaks_for_itself():
    query, position = block_of(6)
    window = begun()
    _, window = join(window, columns_of(query[:, :2], position[:, :2], 4), entered(2, 2), 4)
    whole = columns_of(query[:, 2:], position[:, 2:], 4)
    joined, window = join(window, whole, entered(4, 4), 4)
    assert all((getattr(joined, name) == getattr(whole, name)).all() for name in NAMES)
    assert window.queries.value.tolist() == [[4, 4], [4, 4]]


def test_a_row_without_queries_keeps_its_window():
    query, position = block_of(2)
    window = begun()
    one, window = join(window, columns_of(query[:, :1], position[:, :1], 4), entered(1, 1), 4)
    idle = np.where([[False], [True]], -1, position[:, 1:])
    joined, window = join(window, columns_of(query[:, 1:], idle, 4), entered(1, 0), 4)
    assert window.queries.value.tolist() == [[2, 2], [1, 1]]
    same(*(ColumnStatistics(*(x if x is None else x[1] for x in columns)) for columns in (joined, one)))


def test_an_eviction_begins_a_window_anew_in_its_rows_of_all_layers():
    for layers in ((), (3,)):
        window = Window(kvjax.HeadState(jax.device_put(np.full((*layers, B, K), 5))), {})
        state = jax.jit(begin_anew)((window, ()), np.array([True, False]))
        expected = np.broadcast_to([[0, 0], [5, 5]], (*layers, B, K))
        np.testing.assert_array_equal(state[0].queries.value, expected)


def test_a_window_goes_on_in_rows_whose_budget_is_above_all_slots():
    """A budget of all slots is none: beside a longer text the same row would have more of them."""
    window = Window(kvjax.HeadState(np.full((2, K), 5, np.int32)), {})
    held = np.broadcast_to(np.arange(S, dtype=np.int32), (2, K, S))
    cache = kvjax.KVCache.init(batch=2, kv_heads=K, slots=S, head_dim=D, state=(window, ()))
    cache = dataclasses.replace(cache, position=held)
    scores = np.broadcast_to(np.arange(S, dtype=np.float32), held.shape)
    left = jax.jit(kvjax.evict)(cache, scores, np.array([S, S + 1]))
    assert left.num_live.tolist() == [[S] * K] * 2
    assert left.state[0].queries.value.tolist() == [[0] * K, [5] * K]
