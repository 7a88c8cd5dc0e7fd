"""The kernels on rows of eight bits, beside biases: against the reference, lowered, and compiled for a TPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice

from kernels_pallas import STATISTICS, cache_attention, caote_topk, paged_attention, select_attention
from kernels_pallas.cache_attention import tpu as attention_tpu
from kernels_pallas.select_attention import tpu as select_tpu
from tests.kernels_pallas.targets import compiled_for_tpu, kernels_in, on_device, platforms, run_of
from tests.tiers import first, matrix

OPERATIONS = {
    "cache_attention": cache_attention,
    "paged_attention": paged_attention,
    "select_attention": select_attention,
    "caote_topk": caote_topk,
}
B, K, G, S, D, P, PAGE, M = 1, 2, 2, 19, 8, 6, 8, 3
N = K * G
every = pytest.mark.parametrize("operation", OPERATIONS)


def rows(rng: np.random.Generator, dtype: str, *shape: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Rows, and scales if they are of eight bits; the scale of slot 3, which is free, is NaN."""
    if jnp.dtype(dtype).itemsize > 1:
        return rng.normal(size=(*shape, D)).astype(jnp.dtype(dtype)), None
    scale = np.exp(rng.normal(size=shape)) / 100
    scale[..., 3] = np.nan
    numbers = rng.integers(-127, 128, (*shape, D)) if dtype == "int8" else 100 * rng.normal(size=(*shape, D))
    return numbers.astype(jnp.dtype(dtype)), np.float32(scale)


def case(operation: str, T: int, query_dtype: str, dtypes: tuple[str, str]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments and options of an operation, as its reference takes them."""
    rng = np.random.default_rng(0)
    query = rng.normal(size=(B, T, N, D)).astype(jnp.dtype(query_dtype))
    shape = (P, PAGE) if operation == "paged_attention" else (B, K, S)
    (key, key_scale), (value, value_scale) = (rows(rng, dtype, *shape) for dtype in dtypes)
    scales, scale = dict(key_scale=key_scale, value_scale=value_scale), 0.3
    position = np.arange(np.prod(shape)).reshape(shape) % 20
    position[..., 3] = -1
    position, own = np.int32(position), np.int32(20 - T + np.arange(T)[None])
    names = frozenset(["sum"] if T == 1 else STATISTICS)
    seen = dict(statistics=names, window=2, sliding_window=None, scale=scale) | scales
    seen["bias"] = np.where(position < 0, np.nan, rng.normal(size=shape)).astype(np.float32)
    if operation == "cache_attention":
        return [query, key, value, position, own], seen
    if operation == "paged_attention":
        return [query, key, value, position, np.int32([[[4, 1, -1], [0, 5, 2]]]), own], seen
    if operation == "select_attention":
        slots = np.int32([[[0, 5, 18, -1], [1, 2, 4, 9]]])
        return [query, key, value, slots], dict(scale=scale) | scales
    weights = rng.random((B, K, G, S)) * (position[:, :, None] >= 0)
    weights = (weights / weights.sum(-1, keepdims=True)).astype(jnp.dtype(query_dtype))
    options = dict(fast=T > 1, norm=2, group="exact", excess=None, with_scores=True, value_scale=value_scale)
    return [weights, value, position, np.int32([5] * B), None], options


@functools.cache
def computed(operation: str, platform: str, T: int, query_dtype: str, dtypes: tuple[str, str]):
    """Return what the kernel or the reference gives for the case."""
    given, options = case(operation, T, query_dtype, dtypes)
    return jax.jit(functools.partial(run_of(operation, platform), **options))(*given)


INT8, FLOAT8 = (1, "float32", ("int8", "int8")), (3, "bfloat16", ("float8_e4m3fn", "bfloat16"))


@pytest.mark.parametrize(
    ("operation", "platform", "T", "query_dtype", "dtypes"),
    first(
        5,
        [
            *((operation, "gpu", *INT8) for operation in OPERATIONS),
            *((operation, "tpu", *INT8) for operation in OPERATIONS),
            ("cache_attention", "gpu", *FLOAT8),
            ("cache_attention", "tpu", *FLOAT8),
        ],
    ),
)
def test_a_kernel_computes_what_the_reference_does(operation, platform, T, query_dtype, dtypes, monkeypatch):
    monkeypatch.setattr(select_tpu, "FEW", 2**20)
    result, expected = (computed(operation, name, T, query_dtype, dtypes) for name in (platform, "reference"))
    half = query_dtype == "bfloat16" and operation != "caote_topk"
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-2 if half else 2e-6)
    jax.tree.map(close, *(jax.tree.map(lambda x: np.asarray(x, np.float32), x) for x in (result, expected)))


@matrix
def test_many_blocks_of_queries_and_chunks_of_slots_have_their_own_scales(monkeypatch):
    monkeypatch.setattr(attention_tpu, "QUERIES", 32)
    monkeypatch.setattr(attention_tpu, "SLOTS", 128)
    rng, slots = np.random.default_rng(1), 290
    (key, key_scale), (value, value_scale) = (rows(rng, "int8", B, 1, slots) for _ in range(2))
    position = jnp.asarray(np.where(np.arange(slots) == 3, -1, np.arange(slots))[None, None], jnp.int32)
    given = [jnp.asarray(rng.normal(size=(B, 70, 2, D)), jnp.float32), key, value, position, 220 + jnp.arange(70)[None]]
    options = dict(statistics=frozenset(["sum"]), window=0, sliding_window=None, scale=0.3)
    options |= dict(key_scale=key_scale, value_scale=value_scale)
    run = functools.partial(run_of, "cache_attention")
    result, expected = (jax.jit(functools.partial(run(name), **options))(*given) for name in ("tpu", "reference"))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), result, expected)


def shapes(operation: str, dtypes: tuple[str, str]) -> tuple[Any, tuple[jax.ShapeDtypeStruct | None, ...]]:
    """A call with the shapes of a decode step of Llama-3.1-8B, and its arguments."""
    B, K, N, S, D, P, page, M = 1, 8, 32, 8320, 128, 7000, 16, 130
    make = jax.ShapeDtypeStruct
    query, own = make((B, 1, N, D), jnp.bfloat16), make((B, 1), jnp.int32)
    slots = (P, page) if operation == "paged_attention" else (B, K, S)
    key, value = (make((*slots, D), dtype) for dtype in dtypes)
    key_scale, value_scale = (make(slots, jnp.float32) if x.dtype.itemsize == 1 else None for x in (key, value))
    position, bias = make(slots, jnp.int32), make(slots, jnp.float32)
    if operation == "caote_topk":

        def call(weights, value, scale, position, **options):
            return caote_topk(weights, value, position, 8192, value_scale=scale, excess=1, **options)

        return call, (make((B, K, N // K, S), jnp.float32), value, value_scale, position)
    others = {
        "cache_attention": dict(key_position=position, query_position=own, bias=bias),
        "paged_attention": dict(position=position, table=make((B, K, M), jnp.int32), query_position=own, bias=bias),
        "select_attention": dict(slots=make((B, K, S // 4), jnp.int32)),
    }[operation]

    def attend(query, key, value, key_scale, value_scale, *rest, **options):
        rest = dict(zip(others, rest, strict=True)) | options
        return OPERATIONS[operation](query, key, value, key_scale=key_scale, value_scale=value_scale, **rest)

    return attend, (query, key, value, key_scale, value_scale, *others.values())


eight = pytest.mark.parametrize("dtypes", first(1, [["int8"] * 2, ["float8_e4m3fn"] * 2]), ids="/".join)


@every
@platforms
@eight
def test_auto_lowers_to_the_kernels(operation, platform, dtypes):
    call, given = shapes(operation, dtypes)
    assert kernels_in(platform, call, *given)


def test_a_gpu_that_triton_converts_no_float8_on_takes_the_reference():
    """An A100 has compute capability 8.0."""
    operation = "cache_attention"
    call, given = shapes(operation, ("float8_e4m3fn", "float8_e4m3fn"))
    with on_device(AbstractDevice("NVIDIA A100-SXM4-80GB", 108, "gpu")):
        run = functools.partial(call, implementation="pallas_gpu")
        why = (
            "keys or values are float8_e4m3fn, which Triton reads from compute capability 8.9 on, and this GPU has 8.0"
        )
        with pytest.raises(NotImplementedError, match=why):
            jax.eval_shape(run, *given)
        text = jax.jit(call).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
        assert "triton" not in text
        call, given = shapes(operation, ("int8", "int8"))
        assert "triton" in jax.jit(call).trace(*given).lower(lowering_platforms=("cuda",)).as_text()


def test_rows_of_other_dtypes_are_refused_with_those_that_kernels_read():
    call, (query, _, value, _, *rest) = shapes("cache_attention", ("int8", "int8"))
    run = functools.partial(call, implementation="pallas_tpu")
    why = "keys are float64, but the kernels take float32, bfloat16, int8, float8_e4m3fn; use implementation="
    tpu = on_device(AbstractDevice("TPU v5e", 1, "tpu"))
    with jax.enable_x64(True), tpu, pytest.raises(NotImplementedError, match=why):
        jax.eval_shape(run, query, jax.ShapeDtypeStruct(value.shape, jnp.float64), value, None, *rest)


@pytest.mark.tpu
@matrix
@every
def test_it_compiles_for_a_tpu_without_a_copy_of_the_rows(operation):
    call, given = shapes(operation, ("int8", "int8"))
    program = compiled_for_tpu("v5e:2x2", call, *given)
    assert 'custom_call_target="tpu_custom_call"' in program.as_text()
    arrays = [x for x in given if x is not None]
    largest = max(x.size * x.dtype.itemsize for x in arrays)  # where no rows are of eight bits, as CAOTE reads no keys
    rows = min((x.size for x in arrays if x.dtype.itemsize == 1), default=largest)
    assert program.memory_analysis().temp_size_in_bytes < rows / 2
