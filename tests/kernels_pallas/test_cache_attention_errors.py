"""Statistics of errors: each query's squared change of output without a token, against attention without it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import STATISTICS, cache_attention
from kvjax import dequantise, quantise
from tests.kernels_pallas import targets
from tests.kernels_pallas.test_cache_attention import case
from tests.kernels_pallas.test_cache_attention_kernels import options_of, shapes
from tests.kvjax.definitions import column_statistics
from tests.tiers import first, matrix, nightly

T, G, S, D = 5, 2, 7, 4
RTOL = {1: 1e-4, 15: 1e-2}
NAMES = tuple(name for name in STATISTICS if name != "window_log")  # errors are no probabilities
AT = np.array([[-1, 0, 4, 5, 6]])  # padding, and a query that sees one slot
POSITION = np.array([[[3, 0, -1, 1, 2, 5, 6]]])
sharpness = pytest.mark.parametrize("sharp", RTOL)  # 15: one token has nearly all of the weight


def without(query, key, value, seen, sinks, gone):
    """The outputs [G, T, D] of attention over the slots that are seen, but for one; 0 where nothing is.

    A head's sink is a token that all its queries see, of value 0; -1e300 stands for none.
    """
    logits = np.where(seen & (np.arange(S) != gone), query @ key.T / np.sqrt(D), -1e300)
    logits = np.concatenate([logits, np.broadcast_to(np.reshape(sinks, (G, 1, 1)), (*logits.shape[:2], 1))], axis=-1)
    weights = np.where(logits > -1e300, np.exp(logits - logits.max(axis=-1, keepdims=True)), 0)
    return (weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300))[..., :-1] @ value


def made(sharp: int, eight_bits: bool):
    """Queries, what attention is given of the slots, and the keys and values that it means."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=shape).astype(np.float32) for shape in ((1, T, G, D), *[(1, 1, S, D)] * 2))
    rows = dict(key=key, value=value)
    if eight_bits:
        k, v = jax.jit(lambda *rows: [quantise(x, "int8") for x in rows])(key, value)
        rows = dict(key=k.values, value=v.values, key_scale=k.scale, value_scale=v.scale)
        key, value = map(np.asarray, jax.jit(lambda *rows: [dequantise(*x) for x in rows])(k, v))
    return query * sharp, rows, key, value


def changes(query, key, value, sinks=(-1e300,) * G) -> np.ndarray:
    """The definition: [G, T, S, D], of the queries that are no padding."""
    seen = (POSITION[0, 0] >= 0) & (POSITION[0, 0] <= AT[0, 1:, None])
    each = (x.astype(np.float64) for x in (query[0, 1:].swapaxes(0, 1), key[0, 0], value[0, 0]))
    run = functools.partial(without, *each, seen, sinks)
    out = run(-1)
    return np.stack([out - run(slot) for slot in range(S)], axis=2)


@pytest.mark.parametrize("name", ["reference", *targets.INTERPRETED])
@sharpness
@pytest.mark.parametrize("eight_bits", [False, True])
def test_they_are_changes_of_the_output_when_a_token_is_taken_away(eight_bits, sharp, name):
    """With numbers of eight bits, of heads with sinks, of which one is small beside sharp logits."""
    query, rows, key, value = made(sharp, eight_bits)
    sinks = dict(sink_logits=np.array([0.5, 2 * sharp], np.float32)) if eight_bits else {}
    options = dict(statistics=frozenset(NAMES), window=2, errors=True, sliding_window=None, scale=D**-0.5)
    run = targets.compiled_run("cache_attention", name, **options)
    found = run(query, **rows, key_position=POSITION, query_position=AT, **sinks)[1]
    squares = np.zeros((1, G, T, S))
    squares[0, :, 1:] = (changes(query, key, value, *sinks.values()) ** 2).sum(axis=-1)
    for name, expected in column_statistics(squares, AT >= 0, 2, 1).items():
        if name in NAMES:
            np.testing.assert_allclose(getattr(found, name), expected, rtol=RTOL[sharp], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", targets.INTERPRETED)
def test_a_querys_only_slot_has_all_of_its_weight_however_its_logit_is_rounded(name):
    """The terms of a logit near 0 are large here, so that a sum in another order is another one."""
    rng, (T, D) = np.random.default_rng(0), (32, 64)
    key, value = (rng.normal(size=(1, 1, 1, D)).astype(np.float32) for _ in range(2))
    query = rng.normal(size=(1, T, 1, D))
    query = 10 * (query - (query @ key[0, 0, 0])[..., None] * key[0, 0, 0] / (key**2).sum()).astype(np.float32)
    options = dict(statistics=frozenset({"sum"}), window=0, errors=True, sliding_window=None, scale=D**-0.5)
    positions = dict(key_position=np.zeros((1, 1, 1), np.int32), query_position=np.arange(T, dtype=np.int32)[None])
    found = targets.compiled_run("cache_attention", name, **options)(query, 10 * key, value, **positions)[1].sum
    np.testing.assert_allclose(found[0, 0, 0], T * (value**2).sum(), rtol=1e-5)


@sharpness
def test_behind_the_output_projection_the_heads_of_a_group_count_together(sharp):
    query, rows, key, value = made(sharp, False)
    weight = np.random.default_rng(1).normal(size=(1, G, D, 3)).astype(np.float32)
    run = jax.jit(functools.partial(cache_attention, statistics=["max", "window_mean"], window=2, errors=True))
    found = run(query, **rows, key_position=POSITION, query_position=AT, projection=weight)[1]
    behind = (np.einsum("gtsd,gdf->tsf", changes(query, key, value), weight[0]) ** 2).sum(axis=-1)
    for column, expected in ((found.max, behind.max(axis=0)), (found.window_mean, behind[-2:].mean(axis=0))):
        np.testing.assert_allclose(column[0], np.tile(expected, (G, 1)), rtol=RTOL[sharp], atol=1e-5)


@pytest.mark.parametrize("name", targets.INTERPRETED)
def test_in_half_precision_and_in_pages_they_are_those_of_the_reference(name):
    """Outputs rounded to the cache's dtype would be as far off as some errors are large."""
    given, size = case(3, B=2, T=6, N=6, K=2, S=40, D=64), 8
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (2 * given.query, given.key, given.value)]
    options = options_of(given, statistics=frozenset({"max", "window_mean"}), window=4, errors=True)
    bias = np.random.default_rng(3).normal(size=given.key_position.shape).astype(np.float32)
    expected = targets.compiled_run("cache_attention", "reference", **options)(*narrow, *given[3:], bias=bias)[1]
    *pool, added = (np.asarray(x).reshape(-1, size, *x.shape[3:]) for x in (*narrow[1:], given.key_position, bias))
    pages = dict(table=np.arange(len(added)).reshape(2, 2, -1), query_position=given.query_position, bias=added)
    in_pages = targets.compiled_run("paged_attention", name, **options)(narrow[0], *pool, **pages)
    in_slots = targets.compiled_run("cache_attention", name, **options)(*narrow, *given[3:], bias=bias)
    for _, found in (in_pages, in_slots):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, expected)


# One kernel for the output, two more for the errors; with a single query another one combines a GPU's parts.
TARGETS = [((1, 128, 32, 8, 8320, 128, "bfloat16"), "window_mean"), ((1, 1, 6, 3, 1001, 80, "float32"), "last")]
every = pytest.mark.parametrize(("sizes", "name"), TARGETS, ids=str)


def attend(name):
    return functools.partial(cache_attention, statistics=[name], window=32, errors=True)


@every
@targets.platforms
def test_auto_lowers_to_the_kernels(platform, sizes, name):
    expected = 4 if platform == "cuda" and sizes[1] == 1 else 3
    assert targets.kernels_in(platform, attend(name), *shapes(*sizes)) == expected


def test_behind_the_output_projection_auto_leaves_them_to_the_reference():
    weight = jax.ShapeDtypeStruct((1, 2, 4, 3), "float32")
    given = shapes(1, 2, 2, 1, 40, 4, "float32")
    text = targets.lowered("cuda", lambda *x: attend("max")(*x[:-1], projection=x[-1]), *given, weight)
    assert not any(call in text for call in targets.CALLS["cuda"])


@pytest.mark.accelerator
@every
def test_they_run_on_a_gpu_or_tpu(sizes, name):
    targets.needs("gpu", "tpu")
    B, T, N, K, S, D, dtype = sizes
    given = case(11, B, T, N, K, S, D)
    arrays = [jnp.asarray(x).astype(dtype) if x.dtype == np.float32 else jnp.asarray(x) for x in given]
    options = options_of(given, statistics=frozenset([name]), window=32, errors=True)
    targets.check_attention_here("cache_attention", arrays, **options)


@pytest.mark.tpu
@matrix  # the TPU compiler is dear
@pytest.mark.parametrize(("sizes", "name"), first(1, TARGETS, rest=nightly), ids=str)
@targets.topologies
def test_they_compile_for_a_tpu(topology, sizes, name):
    program = targets.compiled_for_tpu(topology, attend(name), *shapes(*sizes))
    B, T, N, _, S, _, dtype = sizes
    expected = 2 if dtype == "float32" and T <= 32 else 3  # XLA joins attentions of the same queries that are alike
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == expected
    assert program.memory_analysis().temp_size_in_bytes < max(4 * B * N * T * S, 2**20)  # no [T, S] array
