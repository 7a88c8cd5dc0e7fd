"""The kernels for Hopper GPUs: interpreted against NumPy float64 while races are looked for, and lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice

from kernels_pallas import STATISTICS, cache_attention
from kernels_pallas.cache_attention import mosaic_gpu
from kernels_pallas.dispatch import Kernel
from tests.kernels_pallas.targets import check_attention_here, lowered, needs, on_device
from tests.kernels_pallas.test_cache_attention import Case, case, check_definition, sinks_of
from tests.kernels_pallas.test_cache_attention_kernels import options_of, shapes
from tests.tiers import first, matrix

RUN = Kernel("cache_attention", "mosaic_gpu").run
BY_NAME = dict(implementation="pallas_mosaic_gpu")


def rounded(given: Case, dtype: str) -> Case:
    """The case with keys and values of 16 bits; what free slots hold must not matter."""
    free = (given.key_position < 0)[..., None]
    stale = dict(query=given.query, key=np.where(free, np.nan, given.key), value=np.where(free, np.inf, given.value))
    return given._replace(**{name: x.astype(jnp.dtype(dtype)) for name, x in stale.items()})


def check(given: Case, run=RUN, **options) -> None:
    """Compare the output and all statistics with those of the definition in float64."""
    options = options_of(given, **options)
    sinks = {name: options.pop(name) for name in ("sink_logits",) if name in options}
    out, columns = jax.jit(functools.partial(run, **options))(*given, **sinks)
    assert out.dtype == given.query.dtype
    named = {name: options[name] for name in ("scale", "window", "sliding_window", "soft_cap") if name in options}
    check_definition((out, columns), given, rtol=1e-4, atol=5e-6, half=True, **named, **sinks)


interpreted = functools.partial(RUN, interpret=plgpu.InterpretGPUParams(detect_races=True))


def test_a_block_with_all_statistics(monkeypatch):
    """Three tiles of queries and of slots, the last ones not full, in a pipeline of two places."""
    monkeypatch.setattr(mosaic_gpu, "PROGRAMS", 1)
    monkeypatch.setattr(mosaic_gpu, "STAGES", 2)
    given = case(3, B=1, T=130, N=2, K=1, S=136, D=64)
    given.query_position[0, 5:20] = -1
    check(rounded(given, "bfloat16"), interpreted, window=90, sliding_window=100, sink_logits=sinks_of(given))


def test_a_step_of_decode_whose_slots_are_split(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "STAGES", 1)
    given = rounded(case(5, B=1, T=1, N=3, K=1, S=136, D=128), "float16")
    check(given, interpreted, soft_cap=1.5, sink_logits=sinks_of(given))


@matrix
def test_a_row_without_a_query():
    given = case(7, B=2, T=2, N=1, K=1, S=8, D=64)
    given.query_position[1] = -1
    check(rounded(given, "bfloat16"), interpreted)


TARGETS = [
    ((1, 1, 32, 8, 8320, 128, "bfloat16"), ("last",), None, 1),
    ((8, 1, 32, 8, 8192, 64, "float16"), (), None, 1),
    ((1, 128, 32, 8, 8320, 128, "bfloat16"), ("sum", "last", "window_mean"), None, 2),
    ((2, 40, 12, 2, 1000, 64, "bfloat16"), STATISTICS, 512, 3),
    ((1, 2, 1, 1, 8, 64, "bfloat16"), ("window_variance",), None, 2),
]
every = pytest.mark.parametrize(("sizes", "names", "span", "kernels"), first(1, TARGETS), ids=str)


def attend(names, span, **options):
    return lambda *arrays: cache_attention(*arrays, statistics=names, window=32, sliding_window=span, **options)


@every
def test_by_name_it_lowers_for_cuda(sizes, names, span, kernels):
    text = lowered("cuda", attend(names, span, **BY_NAME), *shapes(*sizes))
    assert text.count("@mosaic_gpu_v2") == kernels and "triton" not in text


@matrix
def test_vectors_are_stored_in_whole_tiles():
    """The interpreter cuts a vector at the end of its row; a GPU would write on into the next row."""
    text = lowered("cuda", attend(("sum", "window_group_square"), None, **BY_NAME), *shapes(*TARGETS[3][0]))
    results = [line.rpartition("->")[2] for line in text.splitlines() if "@mosaic_gpu_v2" in line]
    assert len(results) == 3 and "1024xf32" in results[1] and not any("1000xf32" in line for line in results)


def test_auto_takes_triton():
    text = lowered("cuda", attend(("sum",), None), *shapes(1, 64, 4, 2, 512, 128, "bfloat16"))
    assert "@__gpu$xla.gpu.triton" in text and "@mosaic_gpu_v2" not in text


@pytest.mark.accelerator
@every
def test_it_runs_on_a_gpu(sizes, names, span, kernels):
    needs("gpu")
    B, T, N, K, S, D, dtype = sizes
    given = rounded(case(11, B, T, N, K, S, D), dtype)
    if reason := mosaic_gpu.unsupported(*given):
        pytest.skip(reason)
    options = options_of(given, statistics=frozenset(names), window=32, sliding_window=span)
    check_attention_here("cache_attention", [*map(jnp.asarray, given)], file="mosaic_gpu", **options)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((1, 2, 2, 1, 40, 80, "bfloat16"), "the head dim is 80, but the kernels take 64 or 128"),
        ((1, 2, 2, 1, 41, 64, "bfloat16"), "there are 41 slots, but the kernels take a multiple of 8"),
        ((1, 2, 2, 1, 40, 64, "float32"), "queries are float32, but the kernels take bfloat16, float16"),
        ((1, 2, 65, 1, 40, 64, "float16"), "65 query heads share a KV head, but the kernels take up to 64"),
    ],
)
def test_what_it_cannot_do_is_said(sizes, said):
    with pytest.raises(NotImplementedError, match=f"^cache_attention on a GPU: {said}; use implementation='reference'"):
        lowered("cuda", attend((), None, **BY_NAME), *shapes(*sizes))


def test_queries_and_keys_have_one_dtype():
    query, key, value, *positions = shapes(1, 2, 2, 1, 40, 64, "bfloat16")
    mixed = jax.ShapeDtypeStruct(query.shape, "float16"), key, value, *positions
    said = "queries, keys and values are bfloat16 and float16, but the kernels take one dtype"
    assert mosaic_gpu.unsupported(*mixed) == said
    eight = query, *(jax.ShapeDtypeStruct(x.shape, "int8") for x in (key, value)), *positions
    assert mosaic_gpu.unsupported(*eight) == "keys are int8, but the kernels take bfloat16, float16"


@pytest.mark.parametrize(("kind", "capability"), [("NVIDIA A100-SXM4-80GB", 8.0), ("NVIDIA B200", 10.0)])
def test_only_hopper_has_wgmma(kind, capability):
    with on_device(AbstractDevice(kind, 108, "gpu")):
        reason = mosaic_gpu.unsupported(*shapes(1, 2, 2, 1, 40, 64, "bfloat16"))
    assert reason == f"the compute capability is {capability}, but the kernels use wgmma, which 9.0 alone has"
