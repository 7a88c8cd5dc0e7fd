"""The kernels of attention over chosen slots: interpreted against NumPy float64, lowered, and compiled for a TPU."""

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import select_attention
from kernels_pallas.select_attention import gpu, tpu
from tests.kernels_pallas import targets
from tests.kernels_pallas.targets import compiled_for_tpu, kernels_in, platforms
from tests.kernels_pallas.test_cache_attention import sinks_of
from tests.kernels_pallas.test_select_attention import Case, case, definition
from tests.tiers import first, matrix, nightly

KERNELS_OF = {"tpu": 1, "cuda": 2}  # of a call
both = pytest.mark.parametrize("name", targets.INTERPRETED)
compiled = functools.partial(targets.compiled_run, "select_attention")


def run(name: str, given: Case, **options: Any) -> np.ndarray:
    sinks = {name: options.pop(name) for name in ("sink_logits",) if name in options}
    return compiled(name, scale=given.query.shape[-1] ** -0.5, **options)(*given, **sinks)


def check(name: str, given: Case, *, tolerance: float = 2e-6, **options: Any) -> None:
    out = run(name, given, **options)
    assert out.dtype == given.query.dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), definition(*given, **options), rtol=0, atol=tolerance)


@both
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=2)
def test_output_is_that_of_the_definition(name, seed):
    check(name, case(seed))


@both
@pytest.mark.parametrize("H", first(1, [4, 2]))
def test_a_sink_takes_its_share_of_each_querys_weight(name, H, monkeypatch):
    monkeypatch.setattr(tpu, "SLOTS", 128)
    given = case(4, T=3, N=8, S=300, D=8, H=2 * H, M=200)
    check(name, given, sink_logits=sinks_of(given))


@both
def test_logits_are_bent_to_the_soft_cap_in_half_precision(name):
    given = case(2, T=3, H=2)
    numbers = (x.astype(jnp.bfloat16) for x in (10 * given.query, given.key, given.value))
    check(name, Case(*numbers, given.slots), tolerance=0.03, soft_cap=1.5)


@both
@pytest.mark.parametrize("order", ["random", "rising, none behind them", "the ends and few others"])
def test_many_chunks_parts_and_lists(name, order, monkeypatch):
    monkeypatch.setattr(tpu, "SLOTS", 128)
    monkeypatch.setattr(gpu, "BYTES", 1024)
    monkeypatch.setattr(gpu, "PARTS", 4)
    given = case(2, B=1, S=700, D=12, H=2, M=600)
    slots = given.slots
    if order.startswith("rising"):
        slots = np.sort(np.where(slots < 0, 700, slots), axis=-1)
        slots = np.where(slots < 700, slots, -1).astype(np.int32)
    if order.startswith("the ends"):
        slots = np.full_like(slots, -1)
        slots[0, 0, :34], slots[0, 1, :3] = np.r_[0:4, 670:700], [500, 501, 699]
    check(name, given._replace(slots=slots))


@both
def test_what_no_slot_points_at_does_not_matter(name):
    given = case(5)
    given.slots[..., 3:] = -1
    key, value = given.key.copy(), given.value.copy()
    for b, k in np.ndindex(key.shape[:2]):
        idle = ~np.isin(np.arange(key.shape[2]), given.slots[b].reshape(key.shape[1], -1)[k])
        key[b, k, idle], value[b, k, idle] = np.nan, np.inf
    np.testing.assert_array_equal(run(name, given._replace(key=key, value=value)), run(name, given))


def test_half_precision_is_computed_in_float32_and_a_tpu_has_no_float16():
    given = case(8)
    narrow = Case(*(x.astype(np.float16) for x in given[:3]), given.slots)
    with pytest.raises(NotImplementedError, match="queries are float16, but the kernels take float32, bfloat16"):
        check("tpu", narrow)
    check("gpu", narrow, tolerance=0.03)


def shapes(T: int, N: int, K: int, S: int, D: int, H: int, M: int, dtype: str):
    cache = (1, K, S, D), dtype
    sizes = ((1, T, N, D), dtype), cache, cache, ((1, H, M), "int32")
    return tuple(jax.ShapeDtypeStruct(*size) for size in sizes)


TARGETS = [
    (1, 32, 8, 8192, 128, 8, 2052, "bfloat16"),
    (1, 32, 8, 8192, 128, 32, 2052, "bfloat16"),
    (1, 6, 3, 1001, 80, 6, 300, "float32"),
    (5, 16, 1, 513, 96, 16, 129, "bfloat16"),
    (2, 7, 7, 300, 64, 7, 300, "bfloat16"),
]
every = pytest.mark.parametrize(("sizes",), first(1, [(x,) for x in TARGETS]), ids=str)


@every
@platforms
def test_auto_lowers_to_the_kernels(platform, sizes):
    assert kernels_in(platform, select_attention, *shapes(*sizes)) == KERNELS_OF[platform]


@platforms
def test_kernels_with_sinks_lower(platform):
    run = lambda sinks, *arrays: select_attention(*arrays, sink_logits=sinks)  # noqa: E731
    given = shapes(1, 64, 8, 8192, 64, 64, 2052, "bfloat16")
    assert kernels_in(platform, run, jax.ShapeDtypeStruct((64,), "bfloat16"), *given) == KERNELS_OF[platform]


@pytest.mark.parametrize(
    ("platform", "sizes", "reason"),
    [
        ("cuda", (1, 2, 1, 40, 1024, 1, 8, "float32"), "head dim is 1024, but the kernels take up to 256"),
        ("tpu", (1, 2, 1, 40, 1024, 1, 8, "float32"), "head dim is 1024, but the kernel takes up to 512"),
        ("tpu", (300, 2, 1, 40, 64, 1, 8, "float32"), "300 queries of 2 heads read a KV head"),
        ("tpu", (1, 4, 2, 1001, 64, 2, 31, "bfloat16"), "31 of 1001 slots are so few"),
    ],
    ids=str,
)
def test_what_a_kernel_cannot_do_auto_leaves_to_the_reference(platform, sizes, reason):
    targets.refused(platform, "select_attention", select_attention, shapes(*sizes), reason, scale=1.0)


@pytest.mark.accelerator
@every
def test_it_runs_on_a_gpu_or_tpu(sizes):
    targets.needs("gpu", "tpu")
    T, N, K, S, D, H, M, dtype = sizes
    given = case(11, 1, T, N, K, S, D, H, M)
    arrays = [jnp.asarray(x).astype(dtype) for x in given[:3]]
    targets.check_attention_here("select_attention", [*arrays, given.slots], scale=D**-0.5)


@pytest.mark.tpu
@matrix  # the TPU compiler is dear
@pytest.mark.parametrize(("sizes",), first(1, [(x,) for x in TARGETS], rest=nightly), ids=str)
@targets.topologies
def test_it_compiles_for_a_tpu(topology, sizes):
    program = compiled_for_tpu(topology, select_attention, *shapes(*sizes))
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 1


@pytest.mark.tpu
@matrix
def test_a_long_cache_is_read_where_it_is():
    """The program's own memory is that of the lists of slots, not of keys and values: 256 MiB each."""
    given = shapes(1, 32, 8, 131072, 128, 8, 32772, "bfloat16")
    assert compiled_for_tpu("v5e:2x2", select_attention, *given).memory_analysis().temp_size_in_bytes < 2**23
