"""A window of queries that come one by one says what it says in one block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kernels_pallas import STATISTICS, ColumnStatistics, cache_attention
from kvjax.window import Window, begin_anew, join, observed

B, K, G, S, D = 2, 2, 2, 12, 4
NAMES = frozenset(name for name in STATISTICS if name.startswith("window_"))


def columns_of(query, position, window):
    key = jax.random.normal(jax.random.key(1), (B, K, S, D))
    slots = jnp.broadcast_to(jnp.arange(S), (B, K, S))
    _, columns = cache_attention(query, key, key, slots, position, statistics=NAMES, window=window)
    return jax.tree.map(lambda column: column.reshape(B, K, -1, S), columns)


def block_of(tokens):
    query = jax.random.normal(jax.random.key(tokens), (B, tokens, K * G, D))
    return query, jnp.broadcast_to(S + jnp.arange(tokens), (B, tokens))


def entered(*counts):
    return jnp.array(counts, jnp.int32)


def same(columns, other):
    for name in sorted(NAMES):
        np.testing.assert_allclose(getattr(columns, name), getattr(other, name), rtol=2e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("parts", [(1,) * 6, (2, 1, 3), (5, 1)], ids=str)
def test_parts_of_a_window_joined_are_the_window(parts):
    query, position = block_of(sum(parts))
    window, start = Window.init(observed(NAMES), B, K, G, S), 0
    for size in parts:
        part = columns_of(query[:, start : start + size], position[:, start : start + size], 6)
        joined, window = join(window, part, entered(size, size), 6)
        start += size
    same(joined, columns_of(query, position, 6))
    assert window.queries.value.tolist() == [[6, 6], [6, 6]]


def test_a_block_with_a_whole_window_speaks_for_itself():
    query, position = block_of(6)
    window = Window.init(observed(NAMES), B, K, G, S)
    _, window = join(window, columns_of(query[:, :2], position[:, :2], 4), entered(2, 2), 4)
    whole = columns_of(query[:, 2:], position[:, 2:], 4)
    joined, window = join(window, whole, entered(4, 4), 4)
    assert all((getattr(joined, name) == getattr(whole, name)).all() for name in NAMES)
    assert window.queries.value.tolist() == [[4, 4], [4, 4]]


def test_a_row_without_queries_keeps_its_window():
    query, position = block_of(2)
    window = Window.init(observed(NAMES), B, K, G, S)
    one, window = join(window, columns_of(query[:, :1], position[:, :1], 4), entered(1, 1), 4)
    idle = position[:, 1:].at[1].set(-1)
    joined, window = join(window, columns_of(query[:, 1:], idle, 4), entered(1, 0), 4)
    assert window.queries.value.tolist() == [[2, 2], [1, 1]]
    same(*(ColumnStatistics(*(x if x is None else x[1] for x in columns)) for columns in (joined, one)))


def test_an_eviction_begins_a_window_anew_in_its_rows_and_layer():
    window = Window(kvjax.HeadState(jnp.full((3, B, K), 5)), {})
    state = begin_anew((window, ()), jnp.array([True, False]), layer=1)
    assert state[0].queries.value.tolist() == [[[5, 5], [5, 5]], [[0, 0], [5, 5]], [[5, 5], [5, 5]]]
    everywhere = begin_anew((window, ()), jnp.array([True, True]))[0]
    assert not everywhere.queries.value.any()


def test_what_no_window_observes_remembers_none():
    assert kvjax.parse("tova").state(B, K, G, S, D) == ()
    assert observed(frozenset({"sum", "last"})) == frozenset()


@pytest.mark.parametrize(
    "policy", ["snapkv(window=4)", "finch(window=4)", "cake(window=4)@cake", "laprox(window=4)+caote", "lava(window=4)"]
)
def test_single_queries_and_one_eviction_keep_what_a_block_keeps(policy):
    """Four tokens one by one, observed, then evicted by what all four said; or the four in one block."""
    policy, budget, T = kvjax.parse(policy), 8, 16
    sizes = dict(kv_heads=K, query_heads=K * G, head_dim=D, budget=budget + 8, block=4, layers=2)
    query = jax.random.normal(jax.random.key(0), (2, 1, T, K * G, D))
    key, value = jax.random.normal(jax.random.key(1), (2, 2, 1, T, K, D))
    gram = kvjax.output_projection(jax.random.normal(jax.random.key(2), (2, K * G, D, 8)), K, ("gram",))

    def fed(cache, start, stop, evicts):
        evidence, position = kvjax.Evidence.of_layers(cache, policy.allocation), jnp.arange(start, stop)[None]
        for layer in range(2):
            rows = (x[layer][:, start:stop] for x in (query, key, value))
            context = kvjax.Context(layer=layer, projection=gram.layer(layer))
            _, cache, said = kvjax.observe(cache, *rows, position, policy=policy, budget=budget, context=context)
            evidence = evidence.with_layer(cache, layer, said)
        return kvjax.evict(cache, evidence, budget) if evicts else cache

    def tokens(cache):
        layers = [cache.layer(layer) for layer in range(2)]
        return [sorted(x for x in row if x >= 0) for here in layers for row in np.asarray(here.position[0]).tolist()]

    start = fed(kvjax.empty_cache(policy, **sizes), 0, 12, True)
    at_once = fed(start, 12, 16, True)
    one_by_one = start
    for number in range(12, 16):
        one_by_one = fed(one_by_one, number, number + 1, number == 15)
    assert tokens(one_by_one) == tokens(at_once)
