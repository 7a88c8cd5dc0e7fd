"""Merging as a part of an eviction; its values in whole runs are compared in tests/campaign."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax._src import merging
from kvjax._src.cache import floats_of
from tests.kvjax.blocks import empty, in_layers
from tests.models import reference
from tests.models.reference.policies import Leaving
from tests.tiers import first

B, K, G, D, BUDGET, BLOCK = 2, 2, 2, 4, 5, 3
S = BUDGET + BLOCK
SIZES = dict(batch=B, kv_heads=K, query_heads=K * G, head_dim=D, budget=BUDGET, block=BLOCK)


def blocks(seed, count):
    draw = np.random.default_rng(seed).normal(size=(count, 3, B, BLOCK, K * G, D)).astype(np.float32)
    return [(q, k[:, :, :K], v[:, :, :K]) for q, k, v in draw]


@functools.cache
def step(policy):
    """A jitted block: the cache after it."""
    return jax.jit(lambda cache, rows: kvjax.attend(cache, *rows, policy=kvjax.parse(policy), budget=BUDGET)[1])


def run(policy, some, *, dtype=jnp.float32, step=step):
    """The caches after each block."""
    cache, after = empty(policy, dtype=dtype, **SIZES), []
    run_block = step(policy)
    for rows in some:
        cache = run_block(cache, rows)
        after.append(cache)
    return after


def test_large_heads_are_merged_one_at_a_time_with_the_same_values(monkeypatch):
    some = blocks(4, 3)
    together = run("h2o+cam+protect(sinks=1)", some)[-1]
    monkeypatch.setattr(merging, "TOGETHER", 0)
    one_at_a_time = run("h2o+cam+protect(sinks=1)", some, step=step.__wrapped__)[-1]  # compiled anew
    np.testing.assert_allclose(one_at_a_time.value, together.value, rtol=1e-6)


def test_rows_of_eight_bits_change_only_where_others_came_in():
    cache = run("h2o", blocks(5, 1), dtype="int8")[0]
    cache = dataclasses.replace(cache, state=())
    fold = merging.Merging("first", lambda head: (head.value + 1.0, jnp.arange(S) == 0))
    after = np.where(np.asarray(cache.position) == 1, -1, np.asarray(cache.position))
    changed = jax.jit(lambda cache, after: merging.folded(fold, cache, cache.position, after))(cache, after)
    for name, rest in (("value", np.s_[..., 1:, :]), ("value_scale", np.s_[..., 1:])):
        np.testing.assert_array_equal(*(np.asarray(getattr(x, name))[rest] for x in (changed, cache)))
    read = jax.jit(lambda cache: kvjax.floats_of(cache).value[..., 0, :])
    found, old = (np.asarray(read(x)) for x in (changed, cache))
    np.testing.assert_allclose(found, old + 1, atol=0.05)


@pytest.mark.parametrize("name", ["h2o+cam+protect(sinks=1)", "h2o+match"])
def test_in_pages_values_and_biases_are_those_of_slots(name):
    policy, some = kvjax.parse(name), blocks(4, 3)

    @jax.jit
    def empty():
        make = functools.partial(policy.state, G=G, D=D)
        sizes = dict(batch=B, kv_heads=K, head_dim=D, pages=16, page_size=3, most=S)
        cache = kvjax.PagedCache.init(**sizes, init_state=lambda B, K, S: make(B, K, S=S))
        return cache.with_bias() if policy.merging.biased else cache

    cache, run_block, after = empty(), step(name), run(name, some)[-1]
    for rows in some:
        cache = run_block(cache, rows)
    order = lambda position: np.argsort(np.where(position < 0, 99, position), axis=-1)[..., :BUDGET]  # noqa: E731
    here = jax.jit(lambda cache: cache.layer(None))(cache)
    for read in (lambda x: x.position, lambda x: x.value, lambda x: x.bias):
        found, expected = (read(x) for x in (here, after))
        if found is not None or expected is not None:
            found, expected = (
                np.take_along_axis(
                    np.asarray(x), order(np.asarray(of.position)).reshape(B, K, -1, *(1,) * (x.ndim - 3)), 2
                )
                for x, of in ((found, here), (expected, after))
            )
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.matrix
def test_derivatives_pass_and_vmap_maps():
    some, policy = blocks(6, 3), kvjax.parse("h2o+merge")

    def total(scale):
        cache = kvjax.empty_cache(policy, **SIZES)
        for query, key, value in some:
            out, cache = kvjax.attend(cache, query, key, scale * value, policy=policy, budget=BUDGET)
        return jnp.sum(out**2)

    value, slope = jax.jit(jax.value_and_grad(total))(1.0)
    # Outputs are linear in the scale of the values, and so are merged values.
    np.testing.assert_allclose(slope, 2 * value, rtol=1e-4)
    np.testing.assert_allclose(jax.jit(jax.vmap(total))(np.float32([1, 2])), [value, 4 * value], rtol=1e-4)


@pytest.mark.bad_input
def test_evidence_of_all_layers_must_know_of_the_merging():
    policy = kvjax.parse("streaming+merge")

    def run():
        cache = kvjax.empty_cache(policy, layers=2, **SIZES)
        _, cache, said = kvjax.observe(cache, *blocks(7, 1)[0], policy=policy, context=kvjax.Context(layer=0))
        return kvjax.Evidence.of_layers(cache, policy.allocation).with_layer(cache, 0, said)

    with pytest.raises(ValueError, match=r"give Evidence.of_layers\(merging=policy.merging\)"):
        jax.eval_shape(run)


evict = jax.jit(kvjax.evict)


@functools.partial(jax.jit, static_argnames="similarity")
def merge(before, after, *, similarity=0.0):
    """Merge as the link does, between a cache and what an eviction has left of it."""
    return merging.folded(kvjax.merge(similarity=similarity).merging, after, before.position, after.position)


def filled(seed=0, layers=2):
    """A cache whose heads hold from none to all of S tokens; what lies in free slots is no number."""
    rng = np.random.default_rng(seed)
    shape = (B, K, S) if layers is None else (layers, B, K, S)
    position = np.where(rng.random(shape) < 0.8, rng.permuted(np.broadcast_to(np.arange(S), shape), axis=-1), -1)
    position[..., 0, 0, :] = -1  # a head without tokens
    key, value = (np.where(position[..., None] >= 0, rng.normal(size=(*shape, D)), np.nan) for _ in range(2))
    rows = (x.astype(np.float32) for x in (key, value))
    make = kvjax.KVCache.of if layers is None else in_layers
    return jax.device_put(make(*rows, position.astype(np.int32), np.full(B, S, np.int32)))


def whole(cache):
    """The keys, values and positions of a cache, those of layers stacked."""

    def of(name):
        parts = [np.asarray(getattr(own, name)) for own in getattr(cache, "layers", (cache,))]
        return np.stack(parts) if hasattr(cache, "layers") else parts[0]

    return types.SimpleNamespace(key=of("key"), value=of("value"), position=of("position"))


@pytest.mark.parametrize(("layers", "similarity"), first(1, [(2, 0.6), (None, 0.0)]))
def test_evicted_values_go_to_the_most_similar_key(layers, similarity):
    before = filled(1, layers)
    scores = np.random.default_rng(2).random(before.position.shape).astype(np.float32)
    merged, after = (
        evict(before, kvjax.Evidence(scores, np.ones(B, np.int32), merging=link and link.merging), budget=3)
        for link in (kvjax.merge(similarity=similarity), None)
    )
    before, after, merged = map(whole, (before, after, merged))
    np.testing.assert_array_equal(merged.key, before.key)
    np.testing.assert_array_equal(merged.position, after.position)
    assert (merged.value != after.value)[after.position >= 0].any()
    definition = reference.policy(f"h2o+merge(similarity={similarity})")
    for head in np.ndindex(*before.position.shape[:-1]):
        live, was = after.position[head] >= 0, before.position[head] >= 0
        gone, kept, choices = np.flatnonzero(was & ~live), np.flatnonzero(live), reference.Choices()
        rows = (before.key[head].astype(np.float64), before.value[head].astype(np.float64))
        if len(kept):
            expected = definition.merged(Leaving(*rows, None, gone, kept, choices, *[None] * 5))
            np.testing.assert_allclose(merged.value[head][live], expected[live], rtol=2e-5, atol=1e-6)


def test_a_value_goes_to_the_window_of_next_tokens_that_stay_by_the_attention_that_it_received():
    """CaM, by hand. Tokens 1, 3 and 6 leave; 1 has half of what 2 and 4 received, 3 more, and 6 a quarter of 7's."""
    slots = np.array([3, 0, 5, 7, 1, 4, 2, 6])  # the token of each slot
    received = np.float32([0.0, 0.2, 0.6, 0.9, 0.2, 0.4, 0.1, 0.4])
    value = np.float32([[1, 0], [2, 1], [0, 0], [4, 8], [0, 0], [0, 0], [8, 4], [0, 1]])
    gone = np.array([4, 0, 7, 8, 8])  # the slots of 1, 3 and 6; there are no more
    stays = np.isin(slots, [0, 2, 4, 5, 7])
    head = merging.Head(value[slots], value[slots], slots, stays, gone, received[slots], np.zeros(8), None)
    share = jax.jit(lambda head: merging.next_tokens(head, 2))
    merged, new = share(head)
    expected = value.copy()
    expected[[2, 4]] += 0.5 / 2 * value[1]
    expected[[4, 5]] += 1.0 / 2 * value[3]
    expected[7] += 0.25 * value[6]
    np.testing.assert_allclose(np.asarray(merged)[stays], expected[slots][stays], rtol=1e-6)
    assert slots[np.asarray(new)].tolist() == [5, 7, 4, 2]
    merged, new = share(head._replace(received=np.zeros(8, np.float32)))  # which nothing has seen is not merged
    assert not new.any() and (np.asarray(merged) == value[slots]).all()


def test_a_key_that_is_as_similar_as_asked_for_is_merged():
    """By hand: a direction that is the same has the cosine 1; half of a value as long as the target's is added."""
    key, value = np.float32([[2, 0], [1, 0], [0, 1]]), np.float32([[4, 0], [0, 4], [1, 1]])
    head = merging.Head(key, value, np.arange(3), np.arange(3) > 0, np.array([0]), np.zeros(3), np.zeros(3), None)
    merged, new = jax.jit(lambda head: merging.most_similar(head, 1.0))(head)
    np.testing.assert_allclose(merged[1:], [[2 / 1.5, 4 / 1.5], [1, 1]], rtol=1e-5)
    assert new.tolist() == [False, True, False]


def test_rows_of_eight_bits_are_merged_as_floats():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(1, S, 1, D)).astype(np.float32)
    sizes = dict(batch=1, kv_heads=1, slots=S, head_dim=D, dtype="int8")
    cache = jax.jit(lambda: kvjax.insert(kvjax.KVCache.init(**sizes), rows, rows[:, ::-1]))()
    evicted = evict(cache, np.arange(1, S + 1, dtype=np.float32)[None, None], budget=2)
    merged = merge(cache, evicted)
    read = jax.jit(floats_of)
    expected = merge(read(cache), read(evicted))
    assert merged.value.dtype == jnp.int8
    np.testing.assert_array_equal(merged.key, cache.key)
    live = np.asarray(evicted.position) >= 0
    np.testing.assert_allclose(*(np.asarray(x.value)[live] for x in (read(merged), expected)), atol=0.02)


def test_values_and_keys_of_zeros_have_a_derivative():
    gone, stays, received = np.array([0]), np.array([False, True, True]), np.zeros(3)

    def merged(key, value):
        head = merging.Head(key, value, np.arange(3), stays, gone, received, np.zeros(3), None)
        return merging.most_similar(head, 0.0)[0]

    gradient = jax.jit(jax.grad(lambda *rows: jnp.sum(merged(*rows) ** 2), argnums=(0, 1)))
    zeros = np.zeros((3, 4), np.float32)
    assert all(np.isfinite(np.asarray(array)).all() for array in gradient(zeros, zeros))
