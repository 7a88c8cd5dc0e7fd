"""Tests which positions the keys' rotations stand for; tests/campaign compares the outputs of whole runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import KVCache, PagedCache
from kvjax.rotary import move

B, K, G, T, D, BUDGET = 2, 2, 2, 3, 4, 5
N, MOST = K * G, BUDGET * K + T
FREQUENCY = np.array([[1.0, 0.3]], np.float32)
RAGGED = [(3, 0), (3, 2), (3, 3), (1, 0), (3, 3), (0, 3), (3, 3), (3, 1)]


def blocks(counts=RAGGED, seed: int = 0):
    """Unrotated queries and keys, values, and positions; padding stands anywhere."""
    rng, brought = np.random.default_rng(seed), np.zeros(B, int)
    for count in counts:
        position = np.full((B, T), -1, np.int32)
        for b in range(B):
            position[b, np.sort(rng.permutation(T)[: count[b]])] = brought[b] + np.arange(count[b])
        brought += count
        q, k, v = (rng.normal(size=(B, T, heads, D)).astype(np.float32) for heads in (N, K, K))
        yield 2 * q, k, v, position


@jax.jit
def rotate_block(q, k, position, frequency=FREQUENCY):
    angle = jnp.maximum(position, 0)[..., None] * frequency[:, None]
    cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
    return kvjax.rotate(jnp.asarray(q), cos, sin), kvjax.rotate(jnp.asarray(k), cos, sin)


@functools.cache
def start(policy, positions: str, paged: bool = False, slots: int = MOST):
    """In one program."""
    sizes = dict(batch=B, kv_heads=K, head_dim=D, positions=positions)
    pages = dict(pages=kvjax.pages_for(B * K * (BUDGET + T), B * K, 2), page_size=2, most=slots)

    def made():
        if paged:
            return PagedCache.init(**pages, init_state=lambda b, k, s: policy.state(b, k, G, s, D), **sizes)
        return KVCache.init(slots=slots, state=policy.state(B, K, G, slots, D), **sizes)

    return jax.jit(made)()


@functools.cache
def step(name: str, budget: int | None = BUDGET):
    policy = kvjax.parse(name)

    def run(cache, q, k, v, position, frequency):
        q, k = rotate_block(q, k, position, frequency)
        return kvjax.attend(
            cache, q, k, v, position, policy=policy, budget=budget, context=kvjax.Context(frequency=frequency)
        )

    return jax.jit(run)


def test_each_row_may_have_its_own_frequencies():
    policy, positions = kvjax.parse("random"), "compact"
    both = np.array([[1.0, 0.3], [0.5, 0.02]], np.float32)
    together, alone = start(policy, positions), [start(policy, positions)] * B
    for q, k, v, position in blocks():
        out, together = step("random")(together, q, k, v, position, both)
        for b in range(B):
            expected, alone[b] = step("random")(alone[b], q, k, v, position, both[b : b + 1])
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


@pytest.mark.parametrize(("start_at", "end"), [(123, 4), (2**20 + 3, 5)])
def test_move_is_a_rotation_at_the_end_alone(start_at, end):
    x = np.random.default_rng(1).normal(size=D).astype(np.float32)

    @jax.jit
    def at(p):
        angle = jnp.float32(p) * FREQUENCY[0]
        return kvjax.rotate(x, jnp.cos(angle), jnp.sin(angle))

    there = jax.jit(move)(at(start_at), np.int32(start_at), np.int32(end), FREQUENCY[0])
    np.testing.assert_allclose(there, at(end), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("positions", "paged"), [("compact", True), ("index", False)])
def test_without_frequencies_keys_cannot_be_turned(positions, paged):
    cache = start(kvjax.parse("random"), positions, paged)
    with pytest.raises(
        ValueError, match=rf"positions='{positions}' turn keys, but no rotary frequencies were given; .*frequency="
    ):
        kvjax.attend(cache, *next(blocks())[:3], policy=kvjax.parse("random"), budget=BUDGET)
