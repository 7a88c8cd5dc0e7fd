"""The kernels of attention over slots: interpreted against NumPy float64, lowered, and compiled for a TPU."""

from __future__ import annotations

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from kernels_pallas import STATISTICS, cache_attention
from kernels_pallas.cache_attention import reference, tpu
from kernels_pallas.dispatch import Kernel
from tests.kernels_pallas.targets import compiled_for_tpu, lowered, needs_gpu
from tests.kernels_pallas.test_cache_attention import Case, case, statistics
from tests.kvjax.definitions import block_weights, weighted_values

KERNELS = {
    "tpu": functools.partial(Kernel("cache_attention", "tpu").run, interpret=pltpu.InterpretParams()),
    "gpu": functools.partial(Kernel("cache_attention", "gpu").run, interpret=True),
}
RUNS = KERNELS | {"reference": reference.cache_attention}
both = pytest.mark.parametrize("name", KERNELS)


def options_of(given: Case, **options):
    scale = options.pop("scale", given.query.shape[-1] ** -0.5)
    return dict(statistics=frozenset(STATISTICS), window=2, sliding_window=None, scale=scale) | options


@functools.cache
def compiled(name: str, **options):
    return jax.jit(functools.partial(RUNS[name], **options))


def check(name: str, given: Case, rtol: float = 2e-5, atol: float = 2e-6, **options) -> None:
    options = options_of(given, **options)
    out, columns = compiled(name, **options)(*given)
    span = {name: options[name] for name in ("sliding_window", "soft_cap") if options.get(name) is not None}
    wide = [np.asarray(x, np.float32) for x in given[:3]]
    weights = block_weights(*wide[:2], given.key_position, given.query_position, scale=options["scale"], **span)
    expected = weighted_values(weights, wide[2], given.key_position)
    half = {} if given.query.dtype == np.float32 else dict(rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, **(dict(rtol=rtol, atol=atol) | half))
    assert out.dtype == given.query.dtype
    for which, column in statistics(weights, given, options["window"]).items():
        np.testing.assert_allclose(getattr(columns, which), column, rtol=rtol, atol=atol, err_msg=which)


@both
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=4)
def test_output_and_statistics_are_those_of_the_definition(name, seed):
    check(name, case(seed))


@both
@pytest.mark.parametrize(
    "sizes",
    [
        dict(B=1, T=1, N=1, K=1, S=1, D=1),
        dict(B=1, T=1, N=16, K=1, S=131, D=80),
        dict(B=2, T=5, N=9, K=3, S=40, D=64),
        dict(B=1, T=20, N=3, K=1, S=200, D=96),
    ],
    ids=str,
)
def test_any_size_is_accepted(name, sizes):
    check(name, case(2, **sizes), window=3)


@both
def test_many_blocks_of_queries_and_chunks_of_slots(name, monkeypatch):
    monkeypatch.setattr(tpu, "ROWS", 32)
    monkeypatch.setattr(tpu, "SLOTS", 128)
    given = case(3, B=1, T=70, N=2, K=1, S=290, D=8)
    given.query_position[0, 5:20] = -1
    check(name, given, window=40, sliding_window=50, rtol=5e-5)


@both
def test_statistics_of_a_window_begin_with_its_block(name, monkeypatch):
    monkeypatch.setattr(tpu, "ROWS", 32)
    given = case(5, B=2, T=200, N=2, K=1, S=90, D=8)
    given.query_position[1, 30:] = -1  # this row's window lies in the first block, the other's in the last
    names = frozenset({"last", "window_mean", "window_variance", "window_place"})
    options = options_of(given, window=20, statistics=names)
    _, columns = compiled(name, **options)(*given)
    weights = block_weights(*given[:2], given.key_position, given.query_position, scale=options["scale"])
    for which, column in statistics(weights, given, 20).items():
        if which in names:
            np.testing.assert_allclose(getattr(columns, which), column, rtol=5e-5, atol=2e-6, err_msg=which)


@both
def test_the_sliding_window_may_be_traced(name):
    given, options = case(4), options_of(case(4))
    del options["sliding_window"]
    for span in (1, 3):
        result, expected = (compiled(which, **options)(*given, sliding_window=span) for which in (name, "reference"))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), result, expected)


@both
def test_stale_padded_and_blind(name):
    """Free slots hold NaN, rows have padding, one row has no query, one head no slot."""
    given = case(5, B=3, T=6)
    given.query_position[:] = [[9, 10, 11, 12, 13, 14], [-1, 11, -1, 12, 13, -1], [-1] * 6]
    given.key_position[0, 1] = -1
    free = given.key_position < 0
    stale = given._replace(
        key=np.where(free[..., None], np.nan, given.key), value=np.where(free[..., None], np.inf, given.value)
    )
    options = options_of(given, window=3)
    result, expected = compiled(name, **options)(*stale), compiled("reference", **options)(*given)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), result, expected)
    assert (np.asarray(result[0])[2] == 0).all() and all((np.asarray(column)[2] == 0).all() for column in result[1])
    assert (np.asarray(result[1].sum)[np.repeat(free, 2, axis=1)] == 0).all()


@both
@pytest.mark.parametrize("T", [1, 4])
def test_logits_are_bent_to_the_soft_cap(name, T):
    given = case(8, T=T)
    check(name, given._replace(query=10 * given.query), soft_cap=1.5)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_kernels_with_a_soft_cap_lower(platform):
    sizes = (1, 128, 16, 8, 8320, 256, "bfloat16")
    target = {"tpu": "@tpu_custom_call", "cuda": "@__gpu$xla.gpu.triton"}[platform]
    assert lowered(platform, attend(("sum",), 4096, soft_cap=50.0), *shapes(*sizes)).count(target) == 2


@pytest.mark.tpu
def test_kernels_with_a_soft_cap_compile_for_a_tpu():
    capped = attend(("sum",), 4096, soft_cap=50.0)
    program = compiled_for_tpu("v5e:2x2", capped, *shapes(1, 128, 16, 8, 8320, 256, "bfloat16"))
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 2


@both
def test_large_logits_do_not_overflow(name):
    given = case(6)
    check(name, given._replace(query=1e3 * given.query), rtol=2e-3, atol=2e-3)


@both
def test_the_variance_of_nearly_equal_weights_does_not_drown_in_rounding(name):
    given = case(22, T=6)
    given.query_position[:] = 14
    close = given._replace(query=given.query[:, :1] + np.float32(1e-3) * given.query)
    _, columns = compiled(name, **options_of(close, window=6))(*map(jnp.asarray, close))
    weights = block_weights(close.query, close.key, close.key_position, close.query_position)
    expected = statistics(weights, close, 6)["window_variance"]
    np.testing.assert_allclose(columns.window_variance, expected, rtol=2e-2, atol=1e-3 * expected.max())


@both
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_computed_in_float32(name, dtype):
    given = case(7)
    narrow = given._replace(**{x: jnp.asarray(getattr(given, x), dtype) for x in ("query", "key", "value")})
    if (name, dtype) == ("tpu", "float16"):
        with pytest.raises(NotImplementedError, match="queries are float16, but the kernels take float32, bfloat16"):
            check(name, narrow)
    else:
        check(name, narrow, rtol=1e-4)


@both
@pytest.mark.parametrize("names", [(), ("last", "window_mean"), ("window_group_square",)], ids=str)
def test_only_the_statistics_asked_for_are_given(name, names):
    given = case(8)
    options = options_of(given, statistics=frozenset(names))
    out, columns = compiled(name, **options)(*given)
    assert {which for which in STATISTICS if getattr(columns, which) is not None} == set(names)
    expected = compiled("reference", **options)(*given)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), (out, columns), expected)


@both
def test_one_layer_of_stacked_keys_and_values_is_read(name):
    given, options = case(10), options_of(case(10))
    stacked = given._replace(
        **{which: np.stack([x * np.nan, x, x + 1]) for which, x in (("key", given.key), ("value", given.value))}
    )
    expected = compiled("reference", **options)(*given)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)
    for which in (name, "reference"):
        jax.tree.map(close, compiled(which, **options)(*stacked, layer=np.int32(1)), expected)


@both
def test_gradients_are_the_references(name):
    given, options = case(9), options_of(case(9), statistics=frozenset(["sum"]))

    def gradient(run):
        def loss(query, key, value):
            out, columns = run(query, key, value, *given[3:], **options)
            return (out**2).sum() + (columns.sum**2).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*given[:3])

    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, gradient(KERNELS[name]), gradient(reference.cache_attention))


def shapes(B: int, T: int, N: int, K: int, S: int, D: int, dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    slots = ((B, K, S, D), dtype)
    sizes = (((B, T, N, D), dtype), slots, slots, ((B, K, S), jnp.int32), ((B, T), jnp.int32))
    return tuple(jax.ShapeDtypeStruct(*size) for size in sizes)


TARGETS = [
    ((1, 1, 32, 8, 8193, 128, "bfloat16"), ("last",), None),
    ((1, 128, 32, 8, 8320, 128, "bfloat16"), ("sum",), None),
    ((2, 5, 6, 3, 1001, 80, "float32"), STATISTICS, 40),
    ((1, 1, 1, 1, 1, 64, "float32"), STATISTICS, None),
    ((1, 40, 16, 1, 513, 96, "bfloat16"), STATISTICS, None),
    ((1, 1000, 7, 7, 300, 256, "bfloat16"), (), 7),
]


def kernels_of(platform, sizes, names) -> int:
    """The attention, and its statistics; with a single query a GPU's second kernel combines its parts, too."""
    return 1 + (platform == "cuda" if sizes[1] == 1 else bool(names))


every = pytest.mark.parametrize(("sizes", "names", "span"), TARGETS, ids=str)


def attend(names, span, **options):
    return lambda *arrays: cache_attention(*arrays, statistics=names, window=32, sliding_window=span, **options)


@every
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_auto_lowers_to_the_kernels(platform, sizes, names, span):
    target = {"tpu": "@tpu_custom_call", "cuda": "@__gpu$xla.gpu.triton"}[platform]
    assert lowered(platform, attend(names, span), *shapes(*sizes)).count(target) == kernels_of(platform, sizes, names)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_what_a_kernel_cannot_do_auto_leaves_to_the_reference(platform):
    wide = shapes(1, 2, 2, 1, 40, 1024, "float32")
    assert "custom_call @" not in lowered(platform, attend((), None), *wide).replace("@Sharding", "")
    run = Kernel("cache_attention", {"cuda": "gpu"}.get(platform, platform)).run
    options = dict(statistics=frozenset(), window=0, sliding_window=None, scale=1.0)
    with pytest.raises(NotImplementedError, match=r"head dim is 1024, but the kernels take up to .*use .*'reference'"):
        jax.eval_shape(functools.partial(run, **options), *wide)


@pytest.mark.gpu
@every
def test_it_runs_on_a_gpu(sizes, names, span):
    needs_gpu()
    B, T, N, K, S, D, dtype = sizes
    given = case(11, B, T, N, K, S, D)
    arrays = [jnp.asarray(x).astype(dtype) if x.dtype == np.float32 else jnp.asarray(x) for x in given]
    options = options_of(given, statistics=frozenset(names), window=32, sliding_window=span)
    result = jax.jit(functools.partial(Kernel("cache_attention", "gpu").run, **options))(*arrays)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(functools.partial(reference.cache_attention, **options))(*arrays)
    half = dict(rtol=2e-2, atol=2e-2) if dtype != "float32" else dict(rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(*(np.asarray(x[0], np.float32) for x in (result, expected)), **half)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6), result[1], expected[1])


@pytest.mark.tpu
@every
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_it_compiles_for_a_tpu(topology, sizes, names, span):
    program = compiled_for_tpu(topology, attend(names, span), *shapes(*sizes))
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == kernels_of("tpu", sizes, names)
    B, T, N, _, S, *_ = sizes
    assert program.memory_analysis().temp_size_in_bytes < max(4 * B * N * T * S, 2**20)  # no [T, S] array


@pytest.mark.tpu
def test_each_chip_of_a_mesh_runs_the_kernels_on_its_own_heads():
    split = PartitionSpec(None, "tensor")
    specs = (PartitionSpec(None, None, "tensor"), split, split, split, PartitionSpec())
    given = shapes(2, 16, 32, 8, 1000, 128, "bfloat16")
    text = compiled_for_tpu("v5e:2x2", attend(("sum",), None), *given, specs=specs, chips=4).as_text()
    assert "tpu_custom_call" in text and "all-gather" not in text and "all-reduce" not in text
