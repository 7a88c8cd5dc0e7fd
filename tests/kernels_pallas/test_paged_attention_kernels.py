"""The kernels of attention over pages: interpreted against NumPy float64, lowered, and compiled for a TPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import STATISTICS, paged_attention
from kernels_pallas.paged_attention import tpu
from tests.kernels_pallas import targets
from tests.kernels_pallas.targets import compiled_for_tpu, kernels_in, platforms
from tests.kernels_pallas.test_cache_attention import case, check_definition, sinks_of
from tests.kernels_pallas.test_cache_attention_kernels import kernels_of, options_of
from tests.kernels_pallas.test_paged_attention import paged
from tests.tiers import first, matrix, nightly

both = pytest.mark.parametrize("name", targets.INTERPRETED)
compiled = functools.partial(targets.compiled_run, "paged_attention")


@pytest.fixture(autouse=True)
def few_pages(monkeypatch):
    """Chunks of a few pages, so that a small table has several and the interpreter is quick."""
    monkeypatch.setattr(tpu, "PAGES", 4)


def check(
    name: str, sizes: dict, page: int, *, counts=None, seed: int = 0, change=lambda given: given, holes=(),
    biased: bool = False, sinks: bool = False, **options
):  # fmt: skip
    """Compare with the definition; ``holes`` are pages of the table that are taken away, wherever they stand."""
    tolerance = {key: options.pop(key) for key in ("rtol", "atol", "half") if key in options}
    pages, held = paged(change(case(seed, **sizes)), page, counts, seed)
    for b, k, place in holes:
        pages.table[b, k, place] = held.key_position[b, k, place * page : (place + 1) * page] = -1
    options = options_of(pages, **options)
    names = options["statistics"]
    pool = np.random.default_rng(seed).normal(size=pages.position.shape).astype(np.float32)
    bias = dict(bias=pool[pages.table].reshape(held.key_position.shape)) if biased else {}
    given = dict(bias=pool) if biased else {}
    if sinks:
        given["sink_logits"] = bias["sink_logits"] = sinks_of(held)
    result = compiled(name, **options)(*pages, **given)
    assert result[0].dtype == pages.query.dtype
    assert {which for which in STATISTICS if getattr(result[1], which) is not None} == set(names)
    named = {"scale": options["scale"], "window": options["window"]}
    named |= {name: options[name] for name in ("sliding_window", "soft_cap") if options.get(name) is not None}
    check_definition(result, held, names=names, **tolerance, **named, **bias)


LONG = dict(B=1, T=1, N=16, K=1, S=144, D=80)
BLOCK = dict(B=2, T=3, N=6, K=3, S=192, D=8)


@both
def test_heads_own_all_pages_some_or_none(name):
    check(name, BLOCK, 32, counts=np.array([[6, 0, 1], [3, 5, 0]]))


@both
@pytest.mark.parametrize("T", first(1, [1, 3]))
def test_a_sink_takes_its_share_of_each_querys_weight(name, T):
    check(name, BLOCK | dict(T=T), 32, counts=np.array([[6, 0, 1], [3, 5, 0]]), sinks=True)


@both
def test_a_table_with_holes_reads_what_is_there(name):
    """No head's pages need be the first of its row."""
    check(name, BLOCK, 32, seed=4, counts=np.full((2, 3), 6), holes=[(0, 0, 0), (0, 0, 3), (1, 1, 1), (1, 1, 5)])


def narrow(given, dtype="bfloat16"):
    return given._replace(**{x: getattr(given, x).astype(jnp.dtype(dtype)) for x in ("query", "key", "value")})


@both
@pytest.mark.parametrize(
    ("sizes", "page", "options"),
    first(
        1,
        [
            (LONG, 16, dict(half=True, soft_cap=1.5, statistics=frozenset(["last", "window_mean"]))),
            (dict(B=1, T=1, N=4, K=2, S=640, D=64), 128, dict(statistics=frozenset(["window_group_square"]))),
        ],
    ),
    ids=["the most", "wide pages"],  # a set prints otherwise in each process
)
def test_any_size_half_precision_soft_caps_and_biases(name, sizes, page, options):
    def change(given):
        given = given._replace(query=10 * given.query) if "soft_cap" in options else given
        return narrow(given) if "half" in options else given

    options |= dict(biased=True, rtol=1e-4 if "half" in options else 2e-5)
    check(name, sizes, page, seed=2, window=3, change=change, **options)


@matrix
def test_many_blocks_of_queries_and_chunks_of_pages(monkeypatch):
    monkeypatch.setattr(tpu.tpu, "QUERIES", 32)

    def pad(given):
        given.query_position[0, 5:20] = -1
        return given

    sizes = dict(B=1, T=70, N=2, K=1, S=384, D=8)
    check("tpu", sizes, 32, change=pad, window=40, sliding_window=50, rtol=5e-5, counts=np.array([[9]]))


def shapes(B: int, T: int, N: int, K: int, M: int, page: int, D: int, dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    pool, position, table = (32 * B * K * M + 5, page), jnp.int32, ((B, K, M), jnp.int32)
    rows = ((*pool, D), dtype)
    sizes = (((B, T, N, D), dtype), rows, rows, (pool, position), table, ((B, T), jnp.int32))
    return tuple(jax.ShapeDtypeStruct(*size) for size in sizes)


TARGETS = [
    ((1, 1, 32, 8, 520, 16, 128, "bfloat16"), ("last",), None),
    ((1, 128, 32, 8, 65, 128, 128, "bfloat16"), ("sum",), None),
    ((2, 5, 6, 3, 31, 32, 80, "float32"), STATISTICS, 40),
    ((1, 130, 7, 7, 19, 16, 256, "bfloat16"), (), 7),
]


every = pytest.mark.parametrize(("sizes", "names", "span"), first(1, TARGETS), ids=str)


def attend(names, span, **options):
    return lambda *arrays: paged_attention(*arrays, statistics=names, window=32, sliding_window=span, **options)


@pytest.fixture
def many_pages(monkeypatch, few_pages):
    monkeypatch.setattr(tpu, "PAGES", 32)


@every
@platforms
def test_auto_lowers_to_the_kernels(platform, sizes, names, span, many_pages):
    assert kernels_in(platform, attend(names, span), *shapes(*sizes)) == kernels_of(platform, sizes, names)


CANNOT = {
    "tpu": [
        ((1, 2, 2, 1, 4, 4, 64, "float32"), "a page has 4 slots, but the kernels take multiples of 8"),
        ((1, 2, 2, 1, 4, 200, 512, "float32"), "16 pages of 200 slots of 512 numbers do not fit into a chunk"),
        ((2, 1, 8, 8, 8193, 8, 64, "bfloat16"), "the page table has 131088 entries, but the kernels take up to 131072"),
        ((1, 2, 2, 1, 4, 8, 1024, "float32"), "the head dim is 1024, but the kernels take up to 512"),
    ],
    "cuda": [((1, 2, 2, 1, 4, 8, 1024, "float32"), "the head dim is 1024, but the kernels take up to 256")],
}


@pytest.mark.parametrize(("platform", "sizes", "reason"), [(p, *cannot) for p in CANNOT for cannot in CANNOT[p]])
def test_what_a_kernel_cannot_do_auto_leaves_to_the_reference(platform, sizes, reason):
    options = dict(statistics=frozenset(), window=0, sliding_window=None, scale=1.0)
    targets.refused(platform, "paged_attention", attend((), None), shapes(*sizes), reason, **options)


@pytest.mark.accelerator
@every
def test_it_runs_on_a_gpu_or_tpu(sizes, names, span):
    targets.needs("gpu", "tpu")
    B, T, N, K, M, page, D, dtype = sizes
    pages, _ = paged(case(11, B, T, N, K, M * page, D), page)
    arrays = [jnp.asarray(x).astype(dtype) if x.dtype == np.float32 else jnp.asarray(x) for x in pages]
    options = options_of(pages, statistics=frozenset(names), window=32, sliding_window=span)
    targets.check_attention_here("paged_attention", arrays, **options)


@pytest.mark.tpu
@matrix  # the TPU compiler is dear
@pytest.mark.parametrize(("sizes", "names", "span"), first(1, TARGETS, rest=nightly), ids=str)
@targets.topologies
def test_it_compiles_for_a_tpu(topology, sizes, names, span, many_pages):
    program = compiled_for_tpu(topology, attend(names, span), *shapes(*sizes))
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == kernels_of("tpu", sizes, names)
    D, dtype = sizes[6:]
    if D % 128 == 0:  # else XLA gives a program's pages another layout, and copies them at its start
        pool = shapes(*sizes)[1]
        assert program.memory_analysis().temp_size_in_bytes < pool.size * jnp.dtype(dtype).itemsize


@matrix
@pytest.mark.parametrize(("sizes", "names", "span"), first(2, TARGETS, rest=nightly), ids=str)
def test_it_compiles_for_an_h100(sizes, names, span):
    program = targets.compiled_for_gpu(attend(names, span), *shapes(*sizes))
    assert "gather(" not in program.as_text()  # pages are read in place
