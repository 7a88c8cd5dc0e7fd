"""Attention over slots and its column statistics against NumPy float64, one query at a time."""

from __future__ import annotations

import functools
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import STATISTICS, cache_attention
from tests.kvjax.definitions import block_weights, column_statistics, weighted_values
from tests.tiers import first, matrix


class Case(NamedTuple):
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    key_position: np.ndarray
    query_position: np.ndarray


def case(seed: int, B: int = 2, T: int = 4, N: int = 4, K: int = 2, S: int = 9, D: int = 5) -> Case:
    """Slots in any order, some free; queries at the end of what was written, some of them padding."""
    rng = np.random.default_rng(seed)
    query, key, value = (rng.normal(size=shape) for shape in ((B, T, N, D), (B, K, S, D), (B, K, S, D)))
    key_position = np.stack([rng.permutation(S + 6)[:S] for _ in range(B * K)]).reshape(B, K, S)
    key_position[rng.random((B, K, S)) < 0.25] = -1
    query_position = S + 6 - T + np.tile(np.arange(T), (B, 1))
    if T > 1:
        query_position[-1, rng.permutation(T)[: int(rng.integers(T))]] = -1
    return Case(*(x.astype(np.float32) for x in (query, key, value)), *map(np.int32, (key_position, query_position)))


@functools.cache
def compiled(**options):
    return jax.jit(functools.partial(cache_attention, **{"statistics": STATISTICS, "window": 2} | options))


def attention(case: Case, **options):
    """The output and a dictionary of the statistics; a sliding window that is an array is traced."""
    traced = {name: options.pop(name) for name, value in [*options.items()] if isinstance(value, np.integer)}
    out, columns = compiled(**options)(*case, **traced)
    return np.asarray(out), {name: np.asarray(getattr(columns, name)) for name in options.get("statistics", STATISTICS)}


def statistics(weights: np.ndarray, case: Case, window: int) -> dict[str, np.ndarray]:
    return column_statistics(weights, case.query_position >= 0, window, case.key.shape[1])


def test_logits_are_bent_to_the_soft_cap():
    given = case(1)
    check(given._replace(query=10 * given.query), soft_cap=1.5, scale=0.5)


@pytest.mark.parametrize("soft_cap", [0, -1.0, float("inf"), float("nan"), True, "50"])
def test_a_soft_cap_that_is_not_a_number_above_0_is_refused(soft_cap):
    with pytest.raises(ValueError, match=r"soft_cap is .*; give a number above 0, or None"):
        cache_attention(*case(1), soft_cap=soft_cap)


def check(case: Case, *, window: int = 2, rtol: float = 2e-5, atol: float = 2e-6, **options) -> None:
    out, columns = attention(case, window=window, **options)
    weights = block_weights(case.query, case.key, case.key_position, case.query_position, **options)
    expected = weighted_values(weights, case.value, case.key_position)
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=rtol, atol=atol)
    for name, column in statistics(weights, case, window).items():
        np.testing.assert_allclose(columns[name], column, rtol=rtol, atol=atol, err_msg=name)


@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_output_and_statistics_are_those_of_the_definition(seed):
    check(case(seed))


SIZES = [
    *(dict(T=1), dict(N=3, K=1), dict(N=2, K=2), dict(N=8), dict(T=7, S=13, D=3)),
    *(dict(B=1, T=1, N=1, K=1, S=1, D=1), dict(B=3, T=5, N=6, K=3, S=17, D=11)),
]


@pytest.mark.parametrize("sizes", first(2, SIZES), ids=str)
def test_any_size_is_accepted_and_query_heads_read_the_kv_head_of_their_group(sizes):
    check(case(2, **sizes))


@pytest.mark.parametrize(
    "span", [*map(np.int32, (1, 3, 8, 100)), 3, pytest.param(1, marks=matrix)], ids=lambda span: type(span).__name__
)
def test_a_sliding_window_is_counted_in_positions_traced_or_not(span):
    check(case(3), sliding_window=span)


# Each window, and each group of heads: they meet in window_group_square alone, in windows below and above the block.
@pytest.mark.parametrize(
    ("window", "N", "K"), first(2, [(2, 6, 2), (9, 3, 1), (1, 6, 2), (4, 6, 2), (2, 3, 1), (4, 4, 4)])
)
def test_ragged_rows_have_windows_of_their_own(window, N, K):
    given = case(21, B=3, T=6, N=N, K=K)
    given.query_position[:] = [[9, 10, 11, 12, 13, 14], [-1, 11, -1, 12, 13, -1], [-1, -1, -1, 14, -1, -1]]
    check(given, window=window)
    assert (attention(given, window=window)[1]["window_variance"][2] == 0).all()  # of a single query


def test_the_variance_of_nearly_equal_weights_does_not_drown_in_rounding():
    given = case(22, T=6)
    given.query_position[:] = 14
    close = given._replace(query=given.query[:, :1] + np.float32(1e-3) * given.query)
    _, columns = attention(close, window=6)
    weights = block_weights(close.query, close.key, close.key_position, close.query_position)
    expected = statistics(weights, close, 6)["window_variance"]
    assert 0 < expected.max() < 1e-6
    np.testing.assert_allclose(columns["window_variance"], expected, rtol=2e-2, atol=1e-3 * expected.max())


def test_a_query_does_not_see_later_tokens():
    before = case(6, T=1)
    before = before._replace(key_position=np.where(before.key_position < 0, 20, before.key_position))
    query = before._replace(query_position=np.full_like(before.query_position, 10))
    out, columns = attention(query)
    later = np.repeat(query.key_position > 10, 2, axis=1)
    assert later.any() and (columns["sum"][later] == 0).all()
    changed = query._replace(value=np.where(query.key_position[..., None] > 10, 99, query.value))
    np.testing.assert_array_equal(attention(changed)[0], out)


def test_a_query_sees_itself():
    alone = case(7, T=1)
    alone.key_position[:], alone.query_position[:] = [9, 5, *[-1] * 7], 5
    out, columns = attention(alone)
    np.testing.assert_array_equal(columns["last"], np.broadcast_to([0, 1, *[0] * 7], (2, 4, 9)))
    np.testing.assert_allclose(out[:, 0], alone.value[:, [0, 0, 1, 1], 1], rtol=1e-6)


@hypothesis.given(seed=st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=10)
def test_permuting_the_slots_permutes_the_statistics_and_not_the_output(seed):
    given, order = case(seed), np.random.default_rng(seed).permutation(9)
    shuffled = given._replace(**{name: getattr(given, name)[:, :, order] for name in ("key", "value", "key_position")})
    (out, columns), (out_2, columns_2) = attention(given), attention(shuffled)
    np.testing.assert_allclose(out_2, out, rtol=1e-4, atol=1e-5)
    for name in STATISTICS:
        np.testing.assert_allclose(columns_2[name], columns[name][..., order], rtol=1e-5, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["key", "value"])
def test_what_a_free_slot_holds_does_not_matter_and_it_weighs_exactly_nothing(side, bad):
    given = case(8)
    free = given.key_position < 0
    assert free.any(-1).all()
    stale = given._replace(**{side: np.where(free[..., None], np.float32(bad), getattr(given, side))})
    (out, columns), (out_2, columns_2) = attention(given), attention(stale)
    np.testing.assert_array_equal(out_2, out)
    for name, column in columns.items():
        np.testing.assert_array_equal(columns_2[name], column)
        assert (column[np.repeat(free, column.shape[1] // 2, axis=1)] == 0).all()


@pytest.mark.parametrize("dtype", first(1, ["float32", "bfloat16"]))
def test_gradients_are_finite_and_no_free_slot_gets_one(dtype):
    given = case(8)
    free, positions = given.key_position < 0, tuple(map(jnp.asarray, given[3:]))

    @jax.jit
    def gradient(query, key, value):
        def loss(*qkv):
            return (cache_attention(*qkv, *positions)[0].astype(jnp.float32) ** 2).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(query, key, value)

    stale = np.where(free[..., None], np.nan, given.value)  # what an evicted token may have left behind
    grads = gradient(*(jnp.asarray(x, dtype) for x in (given.query, given.key, stale)))
    assert all(np.isfinite(np.asarray(grad, np.float32)).all() for grad in grads)
    assert all((np.asarray(grad, np.float32)[free] == 0).all() for grad in grads[1:])
    assert all((np.asarray(grad, np.float32)[~free] != 0).any() for grad in grads[1:])


def test_padding_gives_zeros_and_enters_no_statistic():
    given = case(10)
    given.query_position[:] = [[-1, 12, -1, 14], [-1, -1, -1, 14]]
    out, columns = attention(given)
    assert (out[given.query_position < 0] == 0).all()
    check(given)
    noise = given._replace(query=np.where((given.query_position < 0)[..., None, None], np.float32(1e3), given.query))
    for name, column in attention(noise)[1].items():
        np.testing.assert_array_equal(column, columns[name])


def test_a_row_without_a_valid_query_and_a_query_that_sees_no_slot_give_zeros():
    given = case(12)
    given.key_position[0, 1] = given.query_position[1] = -1
    out, columns = attention(given)
    assert (out[0, :, 2:] == 0).all() and (out[1] == 0).all()
    for column in columns.values():
        assert (column[0, column.shape[1] // 2 :] == 0).all() and (column[1] == 0).all()
    check(given)


def test_large_logits_do_not_overflow():
    given = case(14)
    check(given._replace(query=1e3 * given.query), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    first(
        1, [*(("bfloat16", sizes) for sizes in (dict(), dict(T=1), dict(B=1), dict(T=7, N=6, K=3))), ("float16", {})]
    ),
    ids=str,
)
def test_half_precision_is_computed_in_float32_and_given_back_as_it_came(dtype, sizes):
    """More than one row and KV head: XLA's CPU backend lacks some of bfloat16's batched products."""
    given = case(15, **sizes)
    narrow = given._replace(**{name: jnp.asarray(getattr(given, name), dtype) for name in ("query", "key", "value")})
    out, columns = compiled()(*narrow)
    wide = [np.asarray(x, np.float32) for x in narrow[:3]]
    weights = block_weights(wide[0], wide[1], given.key_position, given.query_position)
    assert out.dtype == dtype and all(column.dtype == jnp.float32 for column in columns)
    for name, column in statistics(weights, given, 2).items():
        np.testing.assert_allclose(getattr(columns, name), column, rtol=1e-4, atol=1e-6, err_msg=name)
    expected = weighted_values(weights, wide[2], given.key_position)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=2e-2, atol=2e-2)


def test_float64_stays_float64():
    given = case(16)
    with jax.enable_x64(True):
        given = given._replace(**{name: getattr(given, name).astype(np.float64) for name in ("query", "key", "value")})
        out, columns = compiled()(*given)
        assert out.dtype == columns.sum.dtype == np.float64
        weights = block_weights(given.query, given.key, given.key_position, given.query_position)
        np.testing.assert_allclose(
            out, weighted_values(weights, given.value, given.key_position), rtol=1e-11, atol=1e-13
        )
        np.testing.assert_allclose(columns.sum, weights.sum(2), rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize(
    "names", [("last", "window_mean"), *(pytest.param((name,), marks=matrix) for name in STATISTICS)], ids=str
)
def test_only_the_statistics_asked_for_are_given(names):
    _, columns = compiled(statistics=names)(*case(17))
    assert {name for name in STATISTICS if getattr(columns, name) is not None} == set(names)


def test_the_named_reference_is_what_auto_takes_on_a_cpu():
    by_name, auto = (compiled(**more).lower(*case(18)).as_text() for more in (dict(implementation="reference"), {}))
    assert by_name == auto


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"value": (2, 2, 8, 5)}, {}, r"query .* key \(2, 2, 9, 5\) and value \(2, 2, 8, 5\) do not fit: expected"),
        ({"key": (2, 3, 9, 5), "value": (2, 3, 9, 5)}, {}, r"do not fit: expected .* with N a multiple of K"),
        ({"query": (2, 4, 4, 6)}, {}, r"query \(2, 4, 4, 6\), key \(2, 2, 9, 5\)"),
        ({"query": (1, 4, 4, 5)}, {}, r"query \(1, 4, 4, 5\)"),
        ({"key_position": (2, 2, 8)}, {}, r"positions \(2, 2, 8\) and \(2, 4\) do not fit: expected \(2, 2, 9\)"),
        ({"query_position": (2, 3)}, {}, r"positions .* do not fit: .* \(2, 4\) for the queries"),
        ({}, {"statistics": ["sum", "entropy"]}, r"unknown statistic 'entropy'; expected one of sum, last, max"),
        ({}, {"statistics": ["window_mean"]}, r"observation window is 0; 'window_mean' needs at least 1 query"),
        ({}, {"statistics": ["sum", "window_log"], "window": -1}, r"observation window is -1; 'window_log' needs"),
        ({}, {"statistics": ["window_variance"]}, r"'window_variance' needs at least 1 query"),
        ({}, {"statistics": ["window_square"]}, r"'window_square' needs at least 1 query"),
        ({}, {"statistics": ["window_group_square"]}, r"'window_group_square' needs at least 1 query"),
        ({}, {"implementation": "cuda"}, r"unknown implementation 'cuda'; expected one of auto, reference"),
    ],
    ids=str,
)
def test_a_call_that_does_not_fit_is_refused(changes, options, message):
    given = case(19)
    given = given._replace(**{name: np.zeros(shape, getattr(given, name).dtype) for name, shape in changes.items()})
    with pytest.raises(ValueError, match=message):
        cache_attention(*given, **options)


def test_statistics_may_come_from_a_generator():
    run = functools.partial(cache_attention, statistics=(name for name in ["sum"]))
    assert jax.eval_shape(run, *case(20))[1].sum is not None


@pytest.mark.parametrize("statistics", [("sum", "last", "window_mean"), pytest.param((), marks=matrix)], ids=str)
def test_logits_are_laid_out_by_row_and_exponentials_made_once(statistics):
    B, T, K, G, D, S = 1, 8, 2, 3, 16, 72
    arrays = [jnp.ones((B, T, K * G, D)), *[jnp.ones((B, K, S, D))] * 2]
    positions = [jnp.zeros((B, K, S), jnp.int32), jnp.zeros((B, T), jnp.int32)]
    run = jax.jit(lambda *given: cache_attention(*given, statistics=statistics, window=4))
    text = run.lower(*arrays, *positions).compile().as_text()
    assert f"[{K},{G * T},{S}]" in text and f"[{K},{S},{G * T}]" not in text
    assert text.count(" exponential(") == 1
