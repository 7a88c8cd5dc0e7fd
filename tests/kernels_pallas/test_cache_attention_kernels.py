"""The kernels of attention over slots: interpreted against NumPy float64, lowered, and compiled for a TPU."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import STATISTICS, cache_attention
from kernels_pallas.cache_attention import tpu
from tests.kernels_pallas import targets
from tests.kernels_pallas.targets import compiled_for_tpu, kernels_in, platforms
from tests.kernels_pallas.test_cache_attention import Case, case, check_definition, sinks_of
from tests.tiers import first, matrix, nightly

NUMBERS = ("query", "key", "value")
both = pytest.mark.parametrize("name", targets.INTERPRETED)
compiled = functools.partial(targets.compiled_run, "cache_attention")


def options_of(given: Case, **options):
    scale = options.pop("scale", given.query.shape[-1] ** -0.5)
    return dict(statistics=frozenset(STATISTICS), window=2, sliding_window=None, scale=scale) | options


def check(
    name: str, given: Case, rtol: float = 2e-5, atol: float = 2e-6, stale: bool = False, traced: bool = False, **options
):
    """Compare with the definition: of stale free slots, or a traced sliding window."""
    options, fed, more = options_of(given, **options), given, {}
    span = {name: options[name] for name in ("sliding_window", "soft_cap") if options.get(name) is not None}
    if stale:
        free = (given.key_position < 0)[..., None]
        fed = given._replace(key=np.where(free, np.nan, given.key), value=np.where(free, np.inf, given.value))
    if traced:
        more["sliding_window"] = options.pop("sliding_window")
    for which in ("bias", "sink_logits"):
        if which in options:
            more[which] = span[which] = options.pop(which)
    out, columns = compiled(name, **options)(*fed, **more)
    named = {name: options[name] for name in ("scale", "window")} | {"names": options["statistics"]}
    half = given.query.dtype != np.float32
    check_definition((out, columns), given, rtol=rtol, atol=atol, half=half, **named, **span)
    assert out.dtype == given.query.dtype
    return np.asarray(out), columns


@both
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=2)
def test_output_and_statistics_are_those_of_the_definition(name, seed):
    check(name, case(seed))


@both
@pytest.mark.parametrize(
    ("sizes", "options"),
    first(
        1, [(dict(B=1, T=1, N=16, K=1, S=131, D=80), dict(soft_cap=1.5)), (dict(B=2, T=5, N=9, K=3, S=40, D=64), {})]
    ),
    ids=str,
)
def test_any_size_is_accepted_and_logits_are_bent_to_the_soft_cap_and_get_their_bias(name, sizes, options):
    given = case(2, **sizes)
    bias = np.random.default_rng(2).normal(size=given.key_position.shape).astype(np.float32)
    bias[given.key_position < 0] = np.nan
    check(name, given._replace(query=10 * given.query) if options else given, window=3, bias=bias, **options)


@both
@pytest.mark.parametrize("T", first(1, [1, 5]))
def test_a_sink_takes_its_share_of_each_querys_weight(name, T, monkeypatch):
    """Try a query whose slots several programs share, and a block with padding; one head sees nothing."""
    monkeypatch.setattr(tpu, "SLOTS", 128)
    given = case(4, B=2, T=T, N=8, K=2, S=300, D=8)
    given.query_position[1, 1:3] = -1
    given.key_position[0, 1] = -1
    check(name, given, stale=True, sink_logits=sinks_of(given))


def test_a_block_whose_outputs_come_from_one_program_each_has_sinks():
    given = case(6, B=1, T=40, N=4, K=1, S=40, D=8)
    check("gpu", given, sink_logits=sinks_of(given), window=7, sliding_window=9, soft_cap=1.5)


@both
def test_many_blocks_of_queries_and_chunks_of_slots(name, monkeypatch):
    monkeypatch.setattr(tpu, "QUERIES", 32)
    monkeypatch.setattr(tpu, "SLOTS", 128)
    given = case(3, B=1, T=70, N=2, K=1, S=290, D=8)
    given.query_position[0, 5:20] = -1
    check(name, given, window=40, sliding_window=50, traced=True, rtol=5e-5)


@matrix
def test_statistics_of_a_window_begin_with_its_block(monkeypatch):
    monkeypatch.setattr(tpu, "QUERIES", 32)
    given = case(5, B=2, T=200, N=2, K=1, S=90, D=8)
    given.query_position[1, 30:] = -1  # this row's window lies in the first block, the other's in the last
    names = frozenset({"last", "window_mean", "window_variance", "window_place"})
    check("tpu", given, window=20, statistics=names, rtol=5e-5)


@both
@pytest.mark.parametrize("alone", [0, 1])
def test_stale_padded_and_blind(name, alone):
    """Free slots hold NaN, one row has padding, the other no query or a single one, one head no slot."""
    given = case(5)
    given.query_position[:] = [[-1, 11, -1, 12], [-1, -1, 14 if alone else -1, -1]]
    given.key_position[0, 1] = -1
    out, columns = check(name, given, stale=True)
    empty = [out[1], *(np.asarray(column)[1] for column in jax.tree.leaves(columns))]
    assert all((array == 0).all() for array in empty) == (not alone)
    assert (np.asarray(columns.sum)[np.repeat(given.key_position < 0, 2, axis=1)] == 0).all()


@platforms
@matrix
def test_kernels_with_a_soft_cap_lower(platform):
    capped = attend(("sum",), 4096, soft_cap=50.0)
    assert kernels_in(platform, capped, *shapes(1, 128, 16, 8, 8320, 256, "bfloat16")) == 2


@both
def test_only_the_statistics_asked_for_are_given_in_half_precision_too(name):
    given, names = case(7), ("last", "window_mean")
    narrow = given._replace(**{x: getattr(given, x).astype(jnp.dtype("bfloat16")) for x in NUMBERS})
    _, columns = check(name, narrow, rtol=1e-4, statistics=frozenset(names))
    assert {which for which in STATISTICS if getattr(columns, which) is not None} == set(names)


def test_float16_is_refused_on_a_tpu():
    given = case(7)
    narrow = given._replace(**{x: getattr(given, x).astype(np.float16) for x in NUMBERS})
    with pytest.raises(NotImplementedError, match="queries are float16, but the kernels take float32, bfloat16"):
        check("tpu", narrow)


@matrix
def test_gradients_are_the_references():
    given, options = case(9), options_of(case(9), statistics=frozenset(["sum"]))

    def gradient(run):
        def loss(query, key, value):
            out, columns = run(query, key, value, *given[3:], **options)
            return (out**2).sum() + (columns.sum**2).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*given[:3])

    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, *(gradient(targets.run_of("cache_attention", name)) for name in ("gpu", "reference")))


def shapes(B: int, T: int, N: int, K: int, S: int, D: int, dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    slots = ((B, K, S, D), dtype)
    sizes = (((B, T, N, D), dtype), slots, slots, ((B, K, S), jnp.int32), ((B, T), jnp.int32))
    return tuple(jax.ShapeDtypeStruct(*size) for size in sizes)


TARGETS = [
    ((1, 1, 32, 8, 8193, 128, "bfloat16"), ("last",), None),
    ((1, 128, 32, 8, 8320, 128, "bfloat16"), ("sum",), None),
    ((2, 5, 6, 3, 1001, 80, "float32"), STATISTICS, 40),
    ((1, 1, 1, 1, 1, 64, "float32"), STATISTICS, None),
    ((1, 1000, 7, 7, 300, 256, "bfloat16"), (), 7),
]


def kernels_of(platform, sizes, names) -> int:
    """The attention, its statistics, and on a GPU the combination of parts where there are few queries.

    With a single query the combination makes the statistics, and on a TPU the attention.
    """
    return 1 + (platform == "cuda" and sizes[1] < 64) + (sizes[1] > 1 and bool(names))


every = pytest.mark.parametrize(("sizes", "names", "span"), first(2, TARGETS), ids=str)


def attend(names, span, **options):
    return lambda *arrays: cache_attention(*arrays, statistics=names, window=32, sliding_window=span, **options)


@every
@platforms
def test_auto_lowers_to_the_kernels(platform, sizes, names, span):
    assert kernels_in(platform, attend(names, span), *shapes(*sizes)) == kernels_of(platform, sizes, names)


@platforms
@pytest.mark.parametrize("T", [1, 128])
def test_kernels_with_sinks_lower(platform, T):
    sizes, sinks = (1, T, 64, 8, 8320, 64, "bfloat16"), jax.ShapeDtypeStruct((64,), "bfloat16")
    run = lambda sinks, *arrays: attend(("last",), 128, sink_logits=sinks)(*arrays)  # noqa: E731
    assert kernels_in(platform, run, sinks, *shapes(*sizes)) == kernels_of(platform, sizes, ("last",))


@platforms
def test_what_a_kernel_cannot_do_auto_leaves_to_the_reference(platform):
    wide = shapes(1, 2, 2, 1, 40, 1024, "float32")
    options = dict(statistics=frozenset(), window=0, sliding_window=None, scale=1.0)
    reason = "head dim is 1024, but the kernels take up to"
    targets.refused(platform, "cache_attention", attend((), None), wide, reason, **options)


@pytest.mark.accelerator
@every
def test_it_runs_on_a_gpu_or_tpu(sizes, names, span):
    targets.needs("gpu", "tpu")
    B, T, N, K, S, D, dtype = sizes
    given = case(11, B, T, N, K, S, D)
    arrays = [jnp.asarray(x).astype(dtype) if x.dtype == np.float32 else jnp.asarray(x) for x in given]
    options = options_of(given, statistics=frozenset(names), window=32, sliding_window=span)
    targets.check_attention_here("cache_attention", arrays, **options)


# On a mesh, each chip on its own heads: see test_dispatch.py.
@pytest.mark.tpu
@matrix  # the TPU compiler is dear
@pytest.mark.parametrize(("sizes", "names", "span"), first(1, TARGETS, rest=nightly), ids=str)
@targets.topologies
def test_it_compiles_for_a_tpu(topology, sizes, names, span):
    program = compiled_for_tpu(topology, attend(names, span), *shapes(*sizes))
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == kernels_of("tpu", sizes, names)
    B, T, N, _, S, *_ = sizes
    assert program.memory_analysis().temp_size_in_bytes < max(4 * B * N * T * S, 2**20)  # no [T, S] array


@matrix
@pytest.mark.parametrize(
    ("sizes", "names", "span"),
    first(2, [*TARGETS[:3], ((8, 128, 32, 8, 8320, 128, "bfloat16"), ("window_mean",), 4096)], rest=nightly),
    ids=str,
)
def test_it_compiles_for_an_h100(sizes, names, span):
    """Its tiles fit into a multiprocessor's shared memory, and nothing is copied on its way in or out."""
    program = targets.compiled_for_gpu(attend(names, span), *shapes(*sizes))
    assert "copy(" not in program.as_text()
    B, T, N, _, S, *_ = sizes
    assert program.memory_analysis().temp_size_in_bytes < max(4 * B * N * T * S, 2**25)  # no [T, S] array
