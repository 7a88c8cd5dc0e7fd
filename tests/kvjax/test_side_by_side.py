"""Caches that store keys and values side by side, as on a TPU: the same tokens, outputs and bits as in two arrays."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

import kvjax
from kernels_pallas import STATISTICS
from kernels_pallas.dispatch import Kernel
from kvjax.cache import entries_apart, entries_together, with_entries
from kvjax.merging import folded
from kvjax.split import on_mesh
from tests.kernels_pallas.targets import compiled_for_tpu
from tests.kvjax.blocks import empty as empty_of
from tests.tiers import first, nightly

B, K, G, D, BUDGET, BLOCK = 2, 2, 2, 4, 8, 4
SIZES = dict(batch=B, kv_heads=K, query_heads=K * G, head_dim=D, budget=BUDGET, block=BLOCK)
CONTEXT = kvjax.Context(frequency=np.float32([[1.0, 0.1]]))
same = np.testing.assert_array_equal
insert = jax.jit(kvjax.insert)


def blocks(steps: int = 4, tokens: int = BLOCK):
    rng = np.random.default_rng(0)
    for step in range(steps):
        rows = (rng.normal(size=(B, tokens, heads, D)) for heads in (K * G, K, K))
        position = np.broadcast_to(step * tokens + np.arange(tokens, dtype=np.int32), (B, tokens))
        yield *(x.astype(np.float32) for x in rows), position


def empty(policy: str, **sizes):
    return empty_of(policy, **SIZES | sizes)


@pytest.fixture
def as_on_a_tpu(monkeypatch):
    """Caches are made as on a TPU; attention and eviction are the reference's."""
    monkeypatch.setattr(kvjax.cache, "platform", lambda: "tpu")


@jax.jit
def together(cache):
    return dataclasses.replace(cache, entries=entries_together(cache.entries))


apart = jax.jit(lambda cache: dataclasses.replace(cache, entries=entries_apart(cache)))


def assert_same(side_by_side, cache):
    assert side_by_side.side_by_side and not cache.side_by_side and side_by_side.nbytes == cache.nbytes
    jax.tree.map(same, apart(side_by_side), cache)


@pytest.mark.parametrize(
    ("dtype", "stored"), [("bfloat16", True), ("int8", True), (("int8", "float32"), False)], ids=str
)
def test_on_a_tpu_short_rows_of_one_dtype_are_side_by_side(as_on_a_tpu, dtype, stored):
    for head_dim, short in ((64, True), (80, False), (32, False)):
        sizes = dict(batch=1, kv_heads=2, head_dim=head_dim, dtype=dtype)
        cache = jax.eval_shape(lambda sizes=sizes: kvjax.KVCache.init(**sizes, slots=3))
        assert cache.side_by_side == (stored and short) and cache.head_dim == head_dim
        halves = jax.eval_shape(lambda cache: (cache.key, cache.value), cache)
        assert all(half.shape == (1, 2, 3, head_dim) for half in halves)
        pages = jax.eval_shape(lambda sizes=sizes: kvjax.PagedCache.init(**sizes, pages=2, page_size=8, most=8))
        assert pages.side_by_side == cache.side_by_side


@pytest.mark.parametrize(
    ("name", "dtype"), first(1, [("key_norm+merge", "int8"), ("h2o+caote", "float32"), ("cake(window=2)@cake", "int8")])
)
def test_attention_and_eviction_are_those_of_two_arrays(name, dtype):
    """One layer, plain or paged: insertion, attention, what the policy reads, eviction, merging, moved pages."""
    policy = kvjax.parse(name)
    step = jax.jit(functools.partial(kvjax.attend, policy=policy, budget=BUDGET, context=CONTEXT))
    cache = empty(name, dtype=dtype, page_size=2)
    side_by_side = together(cache)
    for block in blocks():
        (out, cache), (expected, side_by_side) = step(cache, *block), step(side_by_side, *block)
        same(out, expected)
        assert_same(side_by_side, cache)


def test_layers_are_stacked_and_split_over_a_mesh():
    policy = kvjax.parse("h2o+caote")
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    context = dataclasses.replace(CONTEXT, layer=np.int32(1))
    step = jax.jit(functools.partial(kvjax.attend, policy=policy, budget=BUDGET, context=context))
    cache = empty("h2o+caote", layers=2)
    side_by_side = on_mesh(together(cache), mesh)
    for block in blocks(3):
        (out, cache), (expected, side_by_side) = step(cache, *block), step(side_by_side, *block)
        np.testing.assert_allclose(out, expected, rtol=1e-6)
    assert side_by_side.entries["key"].sharding.spec[1:3] == ("data", "tensor")
    assert_same(side_by_side, cache)
    of_layer = jax.jit(lambda cache: cache.layer(1))
    assert_same(of_layer(side_by_side), of_layer(cache))


def test_rows_come_and_go_and_a_cache_is_copied_and_changed():
    (_, *rows, position), *_ = blocks(1)
    cache = insert(empty("tova"), *rows, position)
    one = insert(empty("tova", batch=1), *(x[:1] for x in (*rows, position)))
    evicted = jax.jit(kvjax.evict)(cache, np.float32(np.arange(12).repeat(4)).reshape(B, K, -1), 2)
    sizes = dict(pages=16, page_size=2, most=12)
    swapped = lambda whole: with_entries(whole.entries, dict(key=whole.value, value=whole.key))  # noqa: E731
    changes = (
        lambda whole, part: kvjax.compact(whole, 5),
        lambda whole, part: kvjax.repeat(whole, 2),
        lambda whole, part: kvjax.pack(whole, **sizes),
        lambda whole, part: kvjax.repeat(kvjax.pack(whole, **sizes), 2),
        lambda whole, part: kvjax.join(whole, 1, part),
        lambda whole, part: dataclasses.replace(whole, entries=swapped(whole)),
        lambda whole, part: folded(kvjax.merge().merging, whole, whole.position, evicted.position),
    )
    changed = jax.jit(lambda whole, part: [change(whole, part) for change in changes])
    for found, expected in zip(changed(together(cache), together(one)), changed(cache, one), strict=True):
        assert_same(found, expected)


def test_a_row_joins_a_batch_that_stores_its_rows_otherwise():
    (_, *rows, position), *_ = blocks(1)
    cache, one = (insert(empty("tova", batch=n), *(x[:n] for x in (*rows, position))) for n in (B, 1))
    join = jax.jit(kvjax.join)
    expected = join(cache, 1, one)
    assert_same(join(together(cache), 1, one), expected)
    jax.tree.map(same, join(cache, 1, together(one)), expected)


def test_a_file_is_the_same_and_is_loaded_as_this_platform_stores_rows(tmp_path, monkeypatch):
    (_, *rows, position), *_ = blocks(1)
    cache = insert(empty("h2o@layer", dtype="int8", page_size=2), *rows, position)
    for name, saved in (("here", cache), ("there", together(cache))):
        kvjax.save_cache(tmp_path / name, saved, policy="h2o@layer")
    assert (tmp_path / "here").read_bytes() == (tmp_path / "there").read_bytes()
    jax.tree.map(same, kvjax.load_cache(tmp_path / "there"), cache)
    monkeypatch.setattr(kvjax.cache, "platform", lambda: "tpu")
    monkeypatch.setattr(kvjax.cache, "LANES", 2 * D)
    assert_same(kvjax.load_cache(tmp_path / "here"), cache)


def both(operation: str, *arrays: np.ndarray, **options):
    """Return what the kernel for TPU gives for keys and values side by side, and for two arrays."""
    run = jax.jit(functools.partial(Kernel(operation, "tpu").run, interpret=pltpu.InterpretParams(), **options))
    query, key, value, *others = arrays
    return run(query, np.concatenate([key, value], -1), None, *others), run(query, key, value, *others)


@pytest.mark.parametrize(
    ("operation", "T"), first(1, [("cache_attention", 1), ("paged_attention", 3), ("select_attention", 1)])
)
def test_kernels_read_one_array_as_two(operation, T):
    rng, S, page, dim = np.random.default_rng(0), 160, 32, 8
    query, key, value = (
        rng.normal(size=shape).astype(np.float32) for shape in ((1, T, K * G, dim), (1, K, S, dim), (1, K, S, dim))
    )
    position = np.maximum(rng.permutation(S + 9)[:S] - 9, -1).astype(np.int32)
    position = np.broadcast_to(position, (1, K, S))
    value = np.where(position[..., None] < 0, np.float32(np.nan), value)
    at = S + np.arange(T, dtype=np.int32)[None]
    options = dict(scale=0.3, soft_cap=None)
    attention = dict(statistics=frozenset(STATISTICS), window=2, sliding_window=None) | options
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    if operation == "cache_attention":
        jax.tree.map(close, *both(operation, query, key, value, position, at, **attention))
    pools = (x.reshape(-1, page, *x.shape[3:]) for x in (key, value, position))
    table = np.arange(K * S // page, dtype=np.int32).reshape(1, K, -1)
    if operation == "paged_attention":
        jax.tree.map(close, *both(operation, query, *pools, table, at, **attention))
    slots = np.broadcast_to(np.flatnonzero(position[0, 0] >= 0)[:50].astype(np.int32), (1, K, 50))
    if operation == "select_attention":
        close(*both(operation, query, key, value, slots, layer=None, **options))


@pytest.mark.matrix
def test_the_kernel_of_the_eviction_reads_values_behind_their_keys():
    rng, S, dim = np.random.default_rng(0), 160, 8
    weights = np.exp(rng.normal(size=(B, K, G, S))).astype(np.float32)
    weights /= weights.sum(-1, keepdims=True)
    value = rng.normal(size=(B, K, S, dim)).astype(np.float32)
    key = np.full_like(value, np.nan)
    key[..., ::2] = 3
    position = np.broadcast_to(np.arange(S, dtype=np.int32), (B, K, S))
    options = dict(fast=False, norm=2, group="exact", excess=None, with_scores=True)
    run = jax.jit(
        functools.partial(Kernel("caote_topk", "tpu").run, interpret=pltpu.InterpretParams(), **options),
        static_argnames="head_dim",
    )
    given = position, np.int32([50, 20]), None
    one = run(weights, np.concatenate([key, value], -1), *given, head_dim=dim)
    two = run(weights, value, *given)
    same(one.position, two.position)
    np.testing.assert_allclose(one.scores, two.scores, rtol=1e-5)


@pytest.mark.tpu
@nightly  # the TPU compiler takes 14 s
@pytest.mark.parametrize("tokens", [1, 128])
def test_compiled_for_a_tpu_nothing_copies_the_cache(as_on_a_tpu, tokens):
    """A decode step and a block over stacked layers in the shapes of Llama-3.2-1B."""
    policy, layers = kvjax.parse("snapkv+caote"), 16  # of fewer, XLA would hold the cache in VMEM
    sizes = dict(layers=layers, kv_heads=8, query_heads=32, head_dim=64, budget=8192, block=128, dtype="bfloat16")
    cache = jax.eval_shape(functools.partial(kvjax.empty_cache, policy, **sizes))
    leaves, structure = jax.tree.flatten(cache)

    def run(*arrays):
        *rows, query, key, value = arrays

        def layer(cache, index):
            out, cache = kvjax.attend(
                cache, query, key, value, policy=policy, budget=8192, context=kvjax.Context(layer=index)
            )
            return cache, out

        return jax.lax.scan(layer, jax.tree.unflatten(structure, rows), jnp.arange(layers))

    block = [jax.ShapeDtypeStruct((1, tokens, heads, 64), jnp.bfloat16) for heads in (32, 8, 8)]
    program = compiled_for_tpu("v5e:2x2", run, *leaves, *block, donate=range(len(leaves)))
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == (2 if tokens == 1 else 3)
    assert program.memory_analysis().temp_size_in_bytes < 5 * 2**20
