"""Caches made for a policy have its room and its state; a repeated cache's rows go on as the row they were."""

import dataclasses
import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kvjax
from kvjax import PagedCache
from tests.kvjax.blocks import empty
from tests.kvjax.test_paged import check_pages, content
from tests.tiers import first

B, K, N, D, T, BUDGET = 2, 2, 4, 4, 4, 6
SIZES = dict(kv_heads=K, query_heads=N, head_dim=D, budget=BUDGET)
FREQUENCY = np.float32(0.1) ** np.arange(D // 2, dtype=np.float32)[None]
POLICIES = [
    ("h2o+caote", 2),
    ("snapkv(window=4)@adakv", 2),
    ("full", None),
    ("sage(heads='query')", 2),
    ("h2o@layer", None),
]


def made(policy: str, layers: int | None = None, **changes):
    return empty(policy, **dict(SIZES, layers=layers, batch=B, block=T, page_size=2) | changes)


def block(seed: int, layers: int | None = None) -> list[np.ndarray]:
    """Queries, keys and values of a block in each layer, and what a predictor says of it."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(layers or 1, B, T, heads, D)).astype(np.float32) for heads in (N, K, K, N, N)]


repeat = jax.jit(kvjax.repeat, static_argnums=1)


@jax.jit
def insert(cache, key, value):
    """Insert the same tokens into all layers."""
    if isinstance(cache, kvjax.LayerCaches):
        return cache.map(lambda layer: kvjax.insert(layer, key, value))
    for layer in range(cache.heads_shape[0]) if len(cache.heads_shape) == 3 else (None,):
        cache = kvjax.insert(cache, key, value, layer=layer)
    return cache


num_live = jax.jit(lambda cache: cache.num_live)


@functools.cache
def step(policy: str, budget: int | None = BUDGET):
    """A jitted block through all layers, after which each row holds its budget: outputs [L, B, T, N, D], the cache."""
    budget = None if policy == "full" else budget

    def run(cache, *rows):
        made_for = kvjax.parse(policy) if budget else None
        several = len(cache.heads_shape) == 3
        evidence = kvjax.Evidence.of_layers(cache, made_for.allocation) if several and budget else None
        position = cache.next_position[:, None] + jnp.arange(T)  # which the first layer's insertion moves
        outs = []
        for layer, (q, k, v, *predicted) in enumerate(zip(*rows, strict=True)):
            context = kvjax.Context(
                layer=layer if several else None, frequency=FREQUENCY, predicted=kvjax.Prediction(*predicted)
            )
            given = dict(policy=made_for, budget=budget, context=context)
            if not several:
                out, cache = kvjax.attend(cache, q, k, v, position, **given)
            else:
                out, cache, said = kvjax.observe(cache, q, k, v, position, **given)
                evidence = None if evidence is None else evidence.with_layer(cache, layer, said)
            outs.append(out)
        return jnp.stack(outs), cache if evidence is None else kvjax.evict(cache, evidence, budget)

    return jax.jit(run)


@functools.cache
def filled(policy: str, layers: int | None = None, blocks: int = 3, **changes):
    """A cache that has seen some blocks, and lost some tokens of them."""
    if policy == "full":
        changes = dict(budget=8 * T) | changes
    cache = made(policy, layers, **changes)
    for seed in range(blocks):
        _, cache = step(policy)(cache, *block(seed, layers))
    return cache


def rows_of(cache, rows: list[int]) -> dict:
    """What some rows hold, numbered from 0, per layer and head: position -> key, value and state."""
    held = content(cache)
    return {(layer, number, k): held[layer, row, k] for layer, _, k in held for number, row in enumerate(rows)}


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for head, tokens in a.items():
        assert tokens.keys() == b[head].keys()
        for position, row in tokens.items():
            np.testing.assert_array_equal(row, b[head][position], err_msg=f"{head} {position}")


@pytest.mark.parametrize(("policy", "layers"), first(3, POLICIES))
def test_a_cache_that_was_made_has_room_for_block_after_block_and_no_more(policy, layers):
    cache = filled(policy, layers)
    slots = 8 * T if policy == "full" else BUDGET + T
    if not isinstance(cache, PagedCache):
        assert cache.num_slots == slots
        assert (np.asarray(num_live(cache)) == (3 * T if policy == "full" else BUDGET)).all()
    else:
        # On average: heads compete.
        held = np.asarray(num_live(cache))
        assert held.sum() == BUDGET * held.size
        assert cache.owner.size == kvjax.pages_for(slots * held.size, held.size, 2)
    assert cache.next_position.tolist() == [3 * T] * B


@pytest.mark.parametrize(("policy", "layers"), first(1, [POLICIES[1], ("h2o@layer", None)]))
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=8)
def test_a_repeated_cache_holds_each_row_n_times(policy, layers, data):
    n = data.draw(st.sampled_from([1, 3]))
    blocks = data.draw(st.integers(0, 4))
    cache = filled(policy, layers, blocks)
    if data.draw(st.booleans()):  # heads with more pages than their tokens need
        _, k, v, *_ = (x[0] for x in block(7))
        cache = insert(cache, k, v)
    repeated = repeat(cache, n)
    rows = np.repeat(np.arange(B), n)
    assert_same(content(repeated), rows_of(cache, rows.tolist()))
    assert repeated.next_position.tolist() == np.asarray(cache.next_position)[rows].tolist()
    if isinstance(repeated, PagedCache):
        check_pages(repeated, fewest=False)
        assert int(repeated.num_free) == n * int(cache.num_free) and repeated.owner.size == n * cache.owner.size


def test_what_is_remembered_of_a_head_is_repeated_by_rows():
    for policy in ("expected_attention(sinks=1)", "expected_attention(sinks=1)@layer"):
        cache = made(policy, 2)

        def numbered(own):
            count = functools.partial(np.arange, dtype=np.float32)
            state = jax.tree.map(lambda leaf: count(leaf.size).astype(leaf.dtype).reshape(leaf.shape), own.state)
            return dataclasses.replace(own, state=state)

        cache = cache.map(numbered)
        of_parts = zip(*(x.layers if policy.endswith(")") else [x] for x in (cache, repeat(cache, 2))), strict=True)
        for one, two in of_parts:
            rows = len(one.heads_shape) - 2
            jax.tree.map(lambda a, b: np.testing.assert_array_equal(b, np.repeat(a, 2, rows)), one.state, two.state)  # noqa: B023


def test_on_a_mesh_rows_stay_where_they_are():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))

    def place(leaf):
        return NamedSharding(mesh, PartitionSpec("data") if leaf.ndim == 1 else PartitionSpec("data", "tensor"))

    cache = filled("h2o", 2)
    spread = jax.device_put(cache, jax.tree.map(place, cache))
    compiled = jax.jit(kvjax.repeat, static_argnums=1).lower(spread, 2).compile()
    assert not re.search("all-gather|all-to-all|collective-permute|all-reduce", compiled.as_text())
    repeated = compiled(spread)
    for key in (layer.key for layer in repeated.layers):
        assert key.sharding.is_equivalent_to(place(key), key.ndim)
    jax.tree.map(np.testing.assert_array_equal, repeated, repeat(cache, 2))
