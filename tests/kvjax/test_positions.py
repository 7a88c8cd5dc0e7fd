"""Tests which positions the keys' rotations stand for; tests/campaign compares the outputs of whole runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import KVCache
from kvjax._src.compact_positions import next_index
from kvjax._src.rotary import move
from tests.kvjax.blocks import empty
from tests.kvjax.test_attend import BUDGET, B, D, K, N, T, blocks

FREQUENCY = np.array([[1.0, 0.3]], np.float32)


@jax.jit
def rotate_block(q, k, position, frequency=FREQUENCY):
    angle = jnp.maximum(position, 0)[..., None] * frequency[:, None]
    cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
    return kvjax.rotate(jnp.asarray(q), cos, sin), kvjax.rotate(jnp.asarray(k), cos, sin)


start = functools.partial(empty, batch=B, kv_heads=K, query_heads=N, head_dim=D, budget=BUDGET, block=T)


@functools.cache
def step(name: str):
    policy = kvjax.parse(name)

    def run(cache, q, k, v, position, frequency):
        q, k = rotate_block(q, k, position, frequency)
        return kvjax.attend(
            cache, q, k, v, position, policy=policy, budget=BUDGET, context=kvjax.Context(frequency=frequency)
        )

    return jax.jit(run)


def test_each_row_may_have_its_own_frequencies():
    name = "random+positions"
    both = np.array([[1.0, 0.3], [0.5, 0.02]], np.float32)
    together, alone = start(name), [start(name)] * B
    for q, k, v, position in blocks():
        out, together = step(name)(together, q, k, v, position, both)
        for b in range(B):
            expected, alone[b] = step(name)(alone[b], q, k, v, position, both[b : b + 1])
            np.testing.assert_allclose(np.asarray(out)[b], np.asarray(expected)[b], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("positions", ["index", "compact"])
def test_a_stream_of_millions_is_as_exact_as_its_beginning(positions):
    """float32 rounds far * frequency by up to 0.25 radian; both rotations of a key must round it alike."""
    sizes = dict(batch=1, kv_heads=1, slots=6, head_dim=D, positions=positions)
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 6, 1, D)).astype(np.float32) for _ in range(3))
    frequency = np.float32([[0.987654, 0.0123]])
    position = 2**22 + 1 + 3 * np.arange(6, dtype=np.int32)[None]

    @jax.jit
    def run(position):
        rows = *rotate_block(q, k, position, frequency), v
        return kvjax.attend(KVCache.init(**sizes), *rows, position, context=kvjax.Context(frequency=frequency))[0]

    near = np.arange(6, dtype=np.int32)[None]
    np.testing.assert_allclose(run(position), run(near), rtol=1e-4, atol=1e-5)


def test_the_next_index_counts_what_is_held_and_all_that_has_left_the_window():
    """Of 10 tokens, and a window of 4, the next query sees 7 to 9, of which 7 was evicted; 3 is still in its slot."""
    position = np.int32([[[3, 9, -1, 8]]])
    rows = np.zeros((*position.shape, D), np.float32)
    places = jax.jit(lambda cache, at, window: next_index(cache, at, kvjax.Context(sliding_window=window)))
    at = np.int32([[-1, 10]])
    for behind in (10, 11):  # the block may have been counted in an earlier layer
        cache = KVCache.of(rows, rows, position, np.int32([behind]))
        assert places(cache, at, 4).tolist() == [[7 + 2]]
        assert places(cache, at, 20).tolist() == [[3]]  # nothing has left yet


@pytest.mark.parametrize(("start_at", "end"), [(123, 4), (2**20 + 3, 5)])
def test_move_is_a_rotation_at_the_end_alone(start_at, end):
    x = np.random.default_rng(1).normal(size=D).astype(np.float32)

    @jax.jit
    def at(p):
        angle = jnp.float32(p) * FREQUENCY[0]
        return kvjax.rotate(x, jnp.cos(angle), jnp.sin(angle))

    there = jax.jit(move)(at(start_at), np.int32(start_at), np.int32(end), FREQUENCY[0])
    np.testing.assert_allclose(there, at(end), rtol=1e-5, atol=1e-6)
