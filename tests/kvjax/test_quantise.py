"""Keys, values or both of eight bits: how rows are rounded, and that everything reads what they stand for."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax._src.cache import floats_of
from kvjax._src.quantise import check_dtypes, is_quantised
from tests.kvjax.blocks import empty
from tests.tiers import first

B, K, G, T, D = 2, 2, 2, 4, 4
N = K * G
DTYPES = ["int8", "float8_e4m3fn"]
quantise, dequantise = jax.jit(kvjax.quantise, static_argnums=1), jax.jit(kvjax.dequantise)


@hypothesis.settings(max_examples=15)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), power=st.integers(-40, 40))
def test_numbers_are_rounded_to_the_nearest_multiple_of_the_rows_scale(seed, power):
    rows = np.random.default_rng(seed).standard_cauchy((5, D)) * 10.0**power
    rows = rows.astype(np.float32).astype(np.float64)
    values, scale = (np.asarray(x, np.float64) for x in quantise(rows.astype(np.float32), "int8"))
    largest = np.abs(rows).max(-1)
    usual = largest > 1e-30  # scales below float32's normal numbers are 0 or inexact
    np.testing.assert_allclose(scale[usual], largest[usual] / 127, rtol=1e-6)
    assert (np.abs(values).max(-1)[usual] == 127).all() and (values == np.rint(values)).all()
    error = np.abs(rows - values * scale[:, None])
    assert (error <= np.maximum(scale[:, None] * 0.50001, 1e-30)).all()


@hypothesis.settings(max_examples=15)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_floats_of_eight_bits_keep_four_bits_of_each_number(seed):
    rows = np.random.default_rng(seed).standard_cauchy((5, D)).astype(np.float32)
    values, scale = quantise(rows, "float8_e4m3fn")
    np.testing.assert_allclose(scale, np.abs(rows).max(-1) / 448, rtol=1e-6)
    error = np.abs(rows - np.asarray(dequantise(values, scale)))
    assert (error <= np.abs(rows) / 16 * 1.001 + np.asarray(scale)[:, None] * 2**-9).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_stay_zeros_and_rows_that_are_not_finite_do_not_look_finite(dtype):
    rows = np.float32([[0.0, -0.0], [np.inf, 1.0], [np.nan, 1.0], [-np.inf, 0.0]])
    back = np.asarray(dequantise(*quantise(rows, dtype)))
    assert (back[0] == 0).all() and not np.isfinite(back[1:]).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_straight_through_returns_the_same_numbers_and_the_derivative_of_the_rows(dtype):
    rows = np.random.default_rng(0).normal(size=(3, D)).astype(jnp.bfloat16)

    @jax.jit
    def rounded_and_slope(rows):
        rounded, back = jax.vjp(lambda x: kvjax.straight_through(x, dtype), rows)
        return rounded, back(jnp.full_like(rows, 3))[0]

    rounded, slope = map(np.asarray, rounded_and_slope(rows))
    assert rounded.dtype == rows.dtype
    np.testing.assert_array_equal(rounded, np.asarray(dequantise(*quantise(rows, dtype))).astype(rows.dtype))
    np.testing.assert_array_equal(slope.astype(np.float32), 3)


def blocks(seed: int = 0, steps: int = 4):
    """Queries, keys, values and positions; the second row sits out the first block. Heads have sizes of their own."""
    rng = np.random.default_rng(seed)
    position = np.arange(steps * T).reshape(steps, 1, T).repeat(B, 1)
    position[:, 1] -= T
    position = np.where(position < 0, -1, position)
    for at in position:
        query, key, value = (rng.normal(size=(B, T, heads, D)) for heads in (N, K, K))
        sizes = np.exp(2 * rng.normal(size=(B, T, K, 1)))  # so that a scale that is left out shows
        yield tuple(x.astype(np.float32) for x in (query, key * sizes, value / sizes)), at.astype(np.int32)


@jax.jit
def read(cache) -> kvjax.KVCache:
    """The rows as floats, in slots."""
    return floats_of(cache.layer() if isinstance(cache, kvjax.PagedCache) else cache)


insert = jax.jit(kvjax.insert)
evict = jax.jit(kvjax.evict)
MOVES = {
    "compact": jax.jit(lambda cache: kvjax.compact(cache, 2)),
    "larger": jax.jit(lambda cache: kvjax.compact(cache, 2 * T)),
    "repeat": jax.jit(lambda cache: kvjax.repeat(cache, 2)),
    "pack": jax.jit(lambda cache: kvjax.pack(cache, pages=9, page_size=1, most=3).layer()),
}


@functools.cache
def filled(dtype: str = "int8"):
    cache = empty(None, batch=B, kv_heads=K, query_heads=N, head_dim=D, budget=T, dtype=dtype)
    rows, position = next(blocks())
    return insert(cache, *rows[1:], np.broadcast_to(position[0], position.shape))


@pytest.mark.parametrize("change", MOVES)
def test_rows_keep_their_scales_wherever_they_move(change):
    cache = filled("int8/bfloat16")
    assert (cache.key.dtype, cache.value.dtype) == ("int8", "bfloat16")
    cache = evict(cache, np.random.default_rng(1).normal(size=cache.position.shape).astype(np.float32), 2)
    eight, floats = read(MOVES[change](cache)), MOVES[change](read(cache))
    np.testing.assert_array_equal(eight.position, floats.position)
    live = np.asarray(eight.position)[..., None] >= 0
    np.testing.assert_array_equal(np.where(live, eight.key, 0), np.where(live, floats.key, 0))
    np.testing.assert_array_equal(np.where(live, eight.value, 0), np.where(live, floats.value, 0))


def test_a_layer_of_pages_is_read_with_its_own_scales():
    sizes = dict(layers=2, batch=B, kv_heads=K, head_dim=D, pages=16, page_size=2, most=T, dtype="int8/bfloat16")

    @jax.jit
    def both(blocks):
        cache = kvjax.PagedCache.init(**sizes)
        for layer, (rows, position) in enumerate(blocks):
            cache = kvjax.insert(cache, *rows[1:], jnp.broadcast_to(position[0], position.shape), layer=layer)
        return [[floats_of(cache.layer(one)), floats_of(cache).layer(one)] for one in range(2)]

    for one, expected in both([*blocks(steps=2)]):
        assert one.num_live.tolist() == [[T] * K] * B and one.key.any()
        jax.tree.map(np.testing.assert_array_equal, one, expected)


@functools.cache
def compiled_step(dtype: str, layers: int):
    """A decode step of the layers of a donated cache of Llama's head dim, compiled for this machine."""
    policy = kvjax.parse("h2o+caote")
    sizes = dict(layers=layers, kv_heads=2, query_heads=4, head_dim=64, budget=1023, block=1, dtype=dtype)

    def step(cache, query):
        for layer in range(layers):
            row, context = query[:, :, :2], kvjax.Context(layer=layer, excess=1)  # which the layer before has made
            query, cache = kvjax.attend(cache, query, row, row, policy=policy, budget=1023, context=context)
        return query, cache

    cache = jax.eval_shape(lambda: kvjax.empty_cache(policy, **sizes))
    query = jax.ShapeDtypeStruct((1, 1, 4, 64), jnp.float32)
    return cache, jax.jit(step, donate_argnums=0).lower(cache, query).compile().memory_analysis()


@pytest.mark.parametrize("dtype", first(1, ["int8", "bfloat16/float8_e4m3fn"]))
def test_a_step_holds_the_bytes_of_its_dtypes_and_no_copy_of_the_cache_as_floats(dtype):
    (cache, memory), (_, of_floats) = compiled_step(dtype, 4), compiled_step("float32", 4)
    _, alone = compiled_step(dtype, 1)
    kinds, numbers = check_dtypes(dtype), 4 * cache.layers[0].key.size  # and as many of the values
    rows = sum(jnp.dtype(kind).itemsize * numbers for kind in kinds)
    scales = sum(4 * 4 * cache.layers[0].position.size for kind in kinds if is_quantised(kind))
    if all(map(is_quantised, kinds)):
        assert 2 * rows == 2 * 2 * numbers  # half of what bfloat16 takes
        assert scales * 16 == rows  # 4 bytes for 64
    assert of_floats.argument_size_in_bytes - memory.argument_size_in_bytes == 2 * 4 * numbers - rows - scales
    assert memory.alias_size_in_bytes >= rows + scales  # updated in place
    whole = 2 * 4 * numbers  # as float32
    of_a_layer = whole // 4  # which a CPU's products need
    # XLA has no scatter of float8 on a CPU: it converts a layer to float16 and back.
    in_float16 = 2 * numbers * kinds.count("float8_e4m3fn") // 4
    assert alone.temp_size_in_bytes - in_float16 < 1.5 * of_a_layer
    assert memory.temp_size_in_bytes - in_float16 < 2 * of_a_layer == whole / 2


def test_no_derivative_reaches_rows_of_eight_bits_and_the_queries_have_theirs():
    *_, ((query, key, value), position) = blocks()
    cache = MOVES["larger"](filled())

    def loss(query, key):
        return jnp.sum(kvjax.observe(cache, query, key, value, position + T, policy=None)[0] ** 2)

    of_query, of_key = jax.jit(jax.grad(loss, argnums=(0, 1)))(query, key)
    assert np.isfinite(of_query).all() and (np.asarray(of_query) != 0).any() and (np.asarray(of_key) == 0).all()
