"""Attention over slots and its column statistics against NumPy float64, one query at a time."""

import functools
import types
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import STATISTICS, cache_attention
from tests.kvjax.definitions import block_weights, column_statistics, weighted_values


class Case(NamedTuple):
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    key_position: np.ndarray
    query_position: np.ndarray


def sinks_of(given, seed: int = 0) -> np.ndarray:
    """A sink's logit for each query head: none, small beside the others, one of them, nearly all of the weight."""
    kinds = np.array([-np.inf, -2, 0.5, 9], np.float32)
    return np.random.default_rng(seed).permutation(np.resize(kinds, max(given.query.shape[2], 4)))[
        : given.query.shape[2]
    ]


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
    """The output and a dictionary of the statistics; a sliding window that is an array is traced, as sinks are."""
    kinds = np.integer, np.ndarray
    traced = {name: options.pop(name) for name, value in [*options.items()] if isinstance(value, kinds)}
    out, columns = compiled(**options)(*case, **traced)
    return np.asarray(out), {name: np.asarray(getattr(columns, name)) for name in options.get("statistics", STATISTICS)}


def statistics(weights: np.ndarray, case: Case, window: int) -> dict[str, np.ndarray]:
    return column_statistics(weights, case.query_position >= 0, window, case.key.shape[1])


def test_logits_are_bent_to_the_soft_cap():
    given = case(1)
    check(given._replace(query=10 * given.query), soft_cap=1.5, scale=0.5)


def check(case: Case, *, window: int = 2, **options) -> None:
    out, columns = attention(case, window=window, **options)
    check_definition((out, types.SimpleNamespace(**columns)), case, window=window, **options)


def check_definition(
    run, held: Case, *, window=2, rtol: float = 2e-5, atol: float = 2e-6, half=False, names=STATISTICS, **options
):
    """The output and statistics of a run against brute force on the slots laid out."""
    out, columns = run
    wide = [np.asarray(x, np.float32) for x in held[:3]]
    weights = block_weights(*wide[:2], held.key_position, held.query_position, **options)
    expected = weighted_values(weights, wide[2], held.key_position)
    coarse = dict(rtol=2e-2, atol=2e-2) if half else dict(rtol=rtol, atol=atol)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, **coarse)
    for name, column in statistics(weights, held, window).items():
        if name in names:
            np.testing.assert_allclose(getattr(columns, name), column, rtol=rtol, atol=atol, err_msg=name)


@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_output_and_statistics_are_those_of_the_definition(seed):
    check(case(seed))


@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_a_sink_takes_its_share_of_each_querys_weight(seed):
    given = case(seed)
    check(given, sink_logits=sinks_of(given, seed))


def test_with_all_weight_in_the_sink_or_none_the_output_is_0_or_as_without_one():
    given = case(2)
    all_of_it, none = (attention(given, window=2, sink_logits=np.full(4, x, np.float32)) for x in (1e4, -np.inf))
    without = attention(given, window=2)
    jax.tree.map(np.testing.assert_array_equal, none, without)
    assert all((array == 0).all() for array in jax.tree.leaves(all_of_it))


def test_a_sink_has_a_gradient():
    given = case(8)
    sinks = np.array([0.5, -1, 0, 2], np.float32)

    @jax.jit
    def loss(sinks):
        return (cache_attention(*given, sink_logits=sinks)[0] ** 2).sum()

    of_sinks, step = np.asarray(jax.grad(loss)(sinks)), np.float32(0.05)
    near = [
        (loss(sinks + step * unit) - loss(sinks - step * unit)) / (2 * step) for unit in np.eye(4, dtype=np.float32)
    ]
    np.testing.assert_allclose(of_sinks, near, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("sizes", [dict(T=1), dict(B=3, T=5, N=6, K=3, S=17, D=11)], ids=str)
def test_any_size_is_accepted_and_query_heads_read_the_kv_head_of_their_group(sizes):
    check(case(2, **sizes))


@pytest.mark.parametrize("span", [*map(np.int32, (1, 8)), 3], ids=lambda span: type(span).__name__)
def test_a_sliding_window_is_counted_in_positions_traced_or_not(span):
    check(case(3), sliding_window=span)


@pytest.mark.parametrize(("window", "N", "K"), [(2, 6, 2), (9, 3, 1)])  # below and above the block
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


@pytest.mark.parametrize("bad", [np.nan, np.inf])
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


def test_gradients_are_finite_and_no_free_slot_gets_one():
    given = case(8)
    free, positions = given.key_position < 0, given[3:]

    @jax.jit
    def gradient(query, key, value):
        def loss(*qkv):
            return (cache_attention(*qkv, *positions)[0] ** 2).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(query, key, value)

    stale = np.where(free[..., None], np.nan, given.value)  # what an evicted token may have left behind
    grads = gradient(given.query, given.key, stale)
    assert all(np.isfinite(np.asarray(grad)).all() for grad in grads)
    assert all((np.asarray(grad)[free] == 0).all() for grad in grads[1:])
    assert all((np.asarray(grad)[~free] != 0).any() for grad in grads[1:])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_computed_in_float32_and_given_back_as_it_came(dtype):
    given = case(15)
    narrow = given._replace(**{x: getattr(given, x).astype(jnp.dtype(dtype)) for x in ("query", "key", "value")})
    out, columns = compiled()(*narrow)
    assert out.dtype == dtype and all(getattr(columns, name).dtype == jnp.float32 for name in STATISTICS)
    check_definition((out, columns), narrow, rtol=1e-4, half=True)


@pytest.mark.parametrize("names", [("last", "window_mean"), *((name,) for name in STATISTICS)], ids=str)
def test_only_the_statistics_asked_for_are_given(names):
    run = functools.partial(cache_attention, statistics=(name for name in names), window=2)
    _, columns = jax.eval_shape(run, *case(17))
    assert {name for name in STATISTICS if getattr(columns, name) is not None} == set(names)


def test_logits_are_laid_out_by_row_and_exponentials_made_once():
    B, T, K, G, D, S = 1, 8, 2, 3, 16, 72
    arrays = [np.ones((B, T, K * G, D), np.float32), *[np.ones((B, K, S, D), np.float32)] * 2]
    positions = [np.zeros((B, K, S), np.int32), np.zeros((B, T), np.int32)]
    run = jax.jit(lambda *given: cache_attention(*given, statistics=("sum", "last", "window_mean"), window=4))
    text = run.lower(*arrays, *positions).compile().as_text()
    assert f"[{K},{G * T},{S}]" in text and f"[{K},{S},{G * T}]" not in text
    assert text.count(" exponential(") == 1
