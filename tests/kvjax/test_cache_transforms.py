"""Merging, against loops over tokens in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import merging
from kvjax.cache import floats_of
from tests.models import reference
from tests.models.reference.policies import Leaving
from tests.tiers import first

L, B, K, S, D = 2, 2, 2, 9, 4
evict = jax.jit(kvjax.evict)
merge = jax.jit(kvjax.merge, static_argnames="similarity")


def filled(seed=0, layers=L):
    """A cache whose heads hold from none to all of S tokens; what lies in free slots is no number."""
    rng = np.random.default_rng(seed)
    shape = (B, K, S) if layers is None else (layers, B, K, S)
    position = np.where(rng.random(shape) < 0.8, rng.permuted(np.broadcast_to(np.arange(S), shape), axis=-1), -1)
    position[..., 0, 0, :] = -1  # a head without tokens
    key, value = (np.where(position[..., None] >= 0, rng.normal(size=(*shape, D)), np.nan) for _ in range(2))
    rows = (x.astype(np.float32) for x in (key, value))
    return jax.device_put(kvjax.KVCache(*rows, position.astype(np.int32), np.full(B, S, np.int32)))


@pytest.mark.parametrize(("layers", "similarity"), first(1, [(L, 0.6), (None, 0.0)]))
def test_evicted_values_go_to_the_most_similar_key(layers, similarity):
    before = filled(1, layers)
    after = evict(before, np.random.default_rng(2).random(before.position.shape).astype(np.float32), budget=3)
    merged = merge(before, after, similarity=similarity)
    np.testing.assert_array_equal(merged.key, before.key)
    np.testing.assert_array_equal(merged.position, after.position)
    assert (np.asarray(merged.value) != np.asarray(after.value))[np.asarray(after.position) >= 0].any()
    definition = reference.policy(f"h2o+merge(similarity={similarity})")
    before, after, merged = (jax.tree.map(np.asarray, cache) for cache in (before, after, merged))
    for head in np.ndindex(*before.position.shape[:-1]):
        live, was = after.position[head] >= 0, before.position[head] >= 0
        gone, kept, choices = np.flatnonzero(was & ~live), np.flatnonzero(live), reference.Choices()
        rows = (before.key[head].astype(np.float64), before.value[head].astype(np.float64))
        if len(kept):
            expected = definition.merged(Leaving(*rows, None, gone, kept, choices))
            np.testing.assert_allclose(merged.value[head][live], expected[live], rtol=2e-5, atol=1e-6)


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


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: kvjax.merge(c, c.layer(0)), r"the caches \(.*\) and \(.*\) differ; give one cache before and after"),
        (lambda c: kvjax.merge(c, c, similarity=2.0), r"merge: similarity is 2.0; give a cosine in \[0, 1\]"),
        (lambda c: kvjax.merge(c, "cache"), r"merge: after is 'cache'"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(filled())
