"""Keys, values or both of eight bits, a scale per row: every operation computes with the rows that they stand for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import STATISTICS, cache_attention, caote_topk, paged_attention, select_attention
from kvjax.quantise import check_dtypes
from tests.kvjax.definitions import block_weights, column_statistics, weighted_values

B, K, G, T, S, D = 2, 2, 2, 3, 9, 4
N = K * G
attend_to_pages = jax.jit(functools.partial(paged_attention, statistics=("sum",)))
attend_to_slots = jax.jit(select_attention)
leave = jax.jit(functools.partial(caote_topk, with_scores=True))


def rows_of(seed: int, dtype: str, *shape: int):
    """Rows, scales of different sizes if they are of eight bits, and the floats that they stand for."""
    rng = np.random.default_rng(seed)
    if dtype == "float32":
        rows = rng.normal(size=(*shape, D)).astype(dtype)
        return rows, None, rows.astype(np.float64)
    rows = rng.integers(-127, 128, (*shape, D)) if dtype == "int8" else 100 * rng.normal(size=(*shape, D))
    rows, scale = rows.astype(jnp.dtype(dtype)), np.exp(rng.normal(size=shape)).astype(np.float32) / 100
    return rows, scale, np.asarray(rows, np.float64) * scale[..., None]


def positions(seed: int, *shape: int):
    rng = np.random.default_rng(seed)
    position = np.stack([rng.permutation(12)[:S] for _ in range(int(np.prod(shape[:-1])))]).reshape(shape)
    position[rng.random(shape) < 0.25] = -1
    return np.int32(position)


@functools.cache
def case(dtype: str):
    of_key, of_value = check_dtypes(dtype)
    key, key_scale, true_key = rows_of(0, of_key, B, K, S)
    value, value_scale, true_value = rows_of(1, of_value, B, K, S)
    query = np.random.default_rng(2).normal(size=(B, T, N, D)).astype(np.float32)
    key_position, query_position = positions(3, B, K, S), np.int32([[9, 10, 11], [-1, 10, 11]])
    nothing = np.where(key_position >= 0, np.float32(1), np.nan)  # a token that has left may have had such a scale
    given = dict(key=key, value=value)
    scales = dict(key_scale=key_scale, value_scale=value_scale)
    given |= {name: scale * nothing for name, scale in scales.items() if scale is not None}
    return query, given, (true_key, true_value), key_position, query_position


@pytest.mark.parametrize("dtype", ["int8", "float32/float8_e4m3fn"])
def test_attention_and_its_statistics_are_those_of_the_definition(dtype):
    query, given, (key, value), key_position, query_position = case(dtype)
    out, columns = jax.jit(functools.partial(cache_attention, statistics=STATISTICS, window=2))(
        query, **given, key_position=key_position, query_position=query_position
    )
    weights = block_weights(query, key, key_position, query_position)
    np.testing.assert_allclose(out, weighted_values(weights, value, key_position), rtol=2e-5, atol=2e-6)
    for name, column in column_statistics(weights, np.asarray(query_position) >= 0, 2, K).items():
        np.testing.assert_allclose(getattr(columns, name), column, rtol=2e-5, atol=2e-6, err_msg=name)


def test_a_layer_is_read_with_its_own_scales():
    query, given, _, *position = case("int8")
    stacked = {name: np.stack([np.zeros_like(x), x]) for name, x in given.items()}
    run = jax.jit(lambda rows, layer: cache_attention(query, **rows, key_position=position[0],
                                                      query_position=position[1], layer=layer)[0])  # fmt: skip
    np.testing.assert_allclose(run(stacked, 1), run(given, None), rtol=1e-6)


def test_pages_are_read_with_their_scales():
    P, page, dtype = 7, 3, "int8"
    of_key, of_value = check_dtypes(dtype)
    key, key_scale, true_key = rows_of(4, of_key, P, page)
    value, value_scale, true_value = rows_of(5, of_value, P, page)
    query, *_, query_position = case(dtype)
    table = np.int32([[[2, 0, -1], [6, -1, -1]], [[1, 3, 5], [4, -1, -1]]])
    position = np.arange(P * page, dtype=np.int32).reshape(P, page) % 9
    rest = dict(position=position, table=table, query_position=query_position)
    out, columns = attend_to_pages(query, key=key, value=value, key_scale=key_scale, value_scale=value_scale, **rest)
    expected, own = attend_to_pages(query, key=np.float32(true_key), value=np.float32(true_value), **rest)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(columns.sum, own.sum, rtol=2e-5, atol=2e-6)


def test_chosen_slots_are_read_with_their_scales():
    query, given, (key, value), *_ = case("int8")
    given = {name: np.nan_to_num(x) if x.ndim == 3 else x for name, x in given.items()}
    slots = np.int32([[[0, 4, 7], [1, 3, -1]], [[2, 5, 8], [0, 6, -1]]])
    live = {"key": np.float32(key), "value": np.float32(value)}
    for name, scale in (("key", "key_scale"), ("value", "value_scale")):
        if scale in given:
            live[name] = np.where(given[scale][..., None] > 0, live[name], 0)
    found, expected = (attend_to_slots(query, **rows, slots=slots) for rows in (given, live))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def test_caote_scores_the_values_that_they_stand_for():
    _, given, (_, value), position, _ = case("int8")
    weights = np.where(np.asarray(position)[:, :, None] >= 0, np.random.default_rng(6).random((B, K, G, S)), 0)
    weights = np.float32(weights / weights.sum(-1, keepdims=True))
    rest = dict(position=position, budget=3)
    kept = leave(weights, given["value"], value_scale=given["value_scale"], **rest)
    expected = leave(weights, np.float32(value), **rest)
    np.testing.assert_array_equal(kept.position, expected.position)
    np.testing.assert_allclose(kept.scores, expected.scores, rtol=2e-5)


def test_missing_scales_and_scales_of_another_shape_are_refused():
    query, given, _, *position = case("int8")
    rest = dict(key_position=position[0], query_position=position[1])
    with pytest.raises(ValueError, match=r"key is int8, but key_scale is missing; give one scale per row, \(2, 2, 9\)"):
        cache_attention(query, given["key"], given["value"], **rest)
    with pytest.raises(ValueError, match=r"value_scale is \(2, 2\); expected \(2, 2, 9\), one scale per row of value"):
        cache_attention(query, **given | dict(value_scale=np.ones((2, 2), np.float32)), **rest)
