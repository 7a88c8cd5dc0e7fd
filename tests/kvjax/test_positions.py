"""Which positions the keys' rotations stand for: against NumPy that keeps every key unrotated."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import KVCache, PagedCache
from kvjax.rotary import move
from tests.kvjax import definitions
from tests.tiers import first

B, K, G, T, D, BUDGET = 2, 2, 2, 3, 4, 5
N, MOST = K * G, BUDGET * K + T
FREQUENCY = np.array([[1.0, 0.3]], np.float32)
TURNED = kvjax.Context(frequency=FREQUENCY)
MODES = ("absolute", "compact", "index")
RAGGED = [(3, 0), (3, 2), (3, 3), (1, 0), (3, 3), (0, 3), (3, 3), (3, 1)]


def rotated(x: np.ndarray, position, frequency=FREQUENCY[0]) -> np.ndarray:
    """One vector, in float64: element i turns with element i + D / 2."""
    angle = float(position) * frequency.astype(np.float64)
    first, second = np.split(x.astype(np.float64), 2)
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)]
    )


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


positions_of = jax.jit(lambda cache: (cache if isinstance(cache, KVCache) else cache.layer()).position)


def run(name: str, positions: str, *, paged: bool = False, budget: int | None = BUDGET, counts=RAGGED, slots=MOST):
    """The output and what each head keeps, {(row, head): positions}, after each block."""
    cache = start(kvjax.parse(name), positions, paged, slots)
    for q, k, v, position in blocks(counts):
        out, cache = step(name, budget)(cache, q, k, v, position, FREQUENCY)
        held = np.asarray(positions_of(cache))
        yield np.asarray(out), {head: sorted(held[head][held[head] >= 0].tolist()) for head in np.ndindex(B, K)}


def reference(positions: str, kept_after, counts=RAGGED):
    """Outputs; each head's queries and keys are rotated from scratch at what the mode takes for their positions."""
    keys, values, index = ({head: {} for head in np.ndindex(B, K)} for _ in range(3))  # by absolute position
    kept = {head: [] for head in np.ndindex(B, K)}
    for (q, k, v, position), after in zip(blocks(counts), kept_after, strict=True):
        out = np.zeros((B, T, N, D))
        for b, head in np.ndindex(B, K):
            here, new = (b, head), [t for t in range(T) if position[b, t] >= 0]
            for rank, t in enumerate(new):
                p = int(position[b, t])
                keys[here][p], values[here][p] = k[b, t, head], v[b, t, head]
                index[here][p] = len(kept[here]) + rank
            live = sorted({*kept[here], *(int(position[b, t]) for t in new)})
            place = {"absolute": dict(zip(live, live, strict=True)), "compact": {p: i for i, p in enumerate(live)}}
            place = place.get(positions, index[here])
            for t in new:
                p = int(position[b, t])
                seen = [other for other in live if other <= p]
                key = np.array([rotated(keys[here][other], place[other]) for other in seen])
                for n in range(head * G, (head + 1) * G):
                    weights = definitions.softmax(key @ rotated(q[b, t, n], place[p]) * D**-0.5)
                    out[b, t, n] = weights @ np.array([values[here][other] for other in seen], np.float64)
        kept = after
        yield out


@pytest.mark.parametrize(
    ("name", "positions", "paged"),
    first(
        3,
        [
            ("random@layer", "compact", True),
            ("random@layer", "index", False),
            ("random", "compact", False),
            ("random@layer", "compact", False),
            ("random@layer", "index", True),
            ("random", "index", False),
            *(("random@layer", "absolute", paged) for paged in (False, True)),
            ("h2o@adakv", "compact", True),
        ],
    ),
)
def test_outputs_are_those_of_keys_rotated_from_scratch(name, positions, paged):
    results = list(run(name, positions, paged=paged))
    kept = [held for _, held in results]
    if name == "random@layer":
        assert any(len(held[b, 0]) != len(held[b, 1]) for held in kept for b in range(B))
    for (out, _), expected in zip(results, reference(positions, kept), strict=True):
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("positions", first(1, ["compact", "index"]))
def test_each_row_may_have_its_own_frequencies(positions):
    policy = kvjax.parse("random")
    both = np.array([[1.0, 0.3], [0.5, 0.02]], np.float32)
    together, alone = start(policy, positions), [start(policy, positions)] * B
    for q, k, v, position in blocks():
        out, together = step("random")(together, q, k, v, position, both)
        for b in range(B):
            expected, alone[b] = step("random")(alone[b], q, k, v, position, both[b : b + 1])
            np.testing.assert_allclose(np.asarray(out)[b], np.asarray(expected)[b], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("positions", first(1, ["compact", "index"]))
def test_heads_that_stand_for_each_query_head_are_turned_alike(positions):
    """A cache with N heads is given K keys: they are repeated before they are turned."""
    policy = kvjax.parse("random")
    cache = KVCache.init(batch=B, kv_heads=N, slots=BUDGET + T, head_dim=D, positions=positions)
    attend = jax.jit(functools.partial(kvjax.attend, policy=policy, budget=BUDGET))
    wide = cache
    for q, k, v, position in blocks():
        q, k = rotate_block(q, k, position)
        out, cache = attend(cache, q, k, v, position, context=TURNED)
        repeated = (np.repeat(x, G, axis=2) for x in (k, v))
        expected, wide = attend(wide, q, *repeated, position, context=TURNED)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    assert ((np.asarray(cache.position) >= 0).sum(-1) == BUDGET).all()


@pytest.mark.parametrize("far", [1000, 131_072, 2**22 + 1])
@pytest.mark.parametrize("positions", first(1, ["index", "compact"]))
def test_a_stream_of_millions_is_as_exact_as_its_beginning(positions, far):
    """float32 rounds far * frequency by up to 0.25 radian; both rotations of a key must round it alike."""
    cache = KVCache.init(batch=1, kv_heads=1, slots=6, head_dim=D, positions=positions)
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 6, 1, D)).astype(np.float32) for _ in range(3))
    frequency = np.float32([[0.987654, 0.0123]])
    position = far + 3 * np.arange(6, dtype=np.int32)[None]
    run = jax.jit(
        lambda cache, position: kvjax.attend(
            cache, *rotate_block(q, k, position, frequency), v, position, context=kvjax.Context(frequency=frequency)
        )[0]
    )
    near = np.arange(6, dtype=np.int32)[None]
    np.testing.assert_allclose(run(cache, position), run(cache, near), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("start_at", "end"), first(2, [(123, 4), (2**20 + 3, 5), (0, 7), (7, 0)]))
def test_move_is_a_rotation_at_the_end_alone(start_at, end):
    x = np.random.default_rng(1).normal(size=D).astype(np.float32)

    @jax.jit
    def at(p):
        angle = jnp.float32(p) * FREQUENCY[0]
        return kvjax.rotate(x, jnp.cos(angle), jnp.sin(angle))

    there = jax.jit(move)(at(start_at), np.int32(start_at), np.int32(end), FREQUENCY[0])
    np.testing.assert_allclose(there, at(end), rtol=1e-5, atol=1e-6)


def test_half_precision_keys_are_turned_in_single():
    cache = KVCache.init(batch=B, kv_heads=K, slots=MOST, head_dim=D, dtype=jnp.bfloat16, positions="compact")
    attend = jax.jit(functools.partial(kvjax.attend, policy=kvjax.parse("random"), budget=BUDGET, context=TURNED))
    for q, k, v, position in blocks():
        q, k = rotate_block(q, k, position)
        out, cache = attend(cache, *(np.asarray(x).astype(jnp.bfloat16) for x in (q, k, v)), position)
        assert out.dtype == jnp.bfloat16
    reference_kept = [held for _, held in run("random", "compact")]
    *_, expected = reference("compact", reference_kept)
    np.testing.assert_allclose(np.asarray(out).astype(np.float32), expected, atol=0.1)


@pytest.mark.parametrize("paged", [False, True], ids=["plain", "paged"])
@pytest.mark.parametrize("positions", ["compact", "index"])
def test_without_frequencies_keys_cannot_be_turned(positions, paged):
    cache = start(kvjax.parse("random"), positions, paged)
    with pytest.raises(
        ValueError, match=rf"positions='{positions}' turn keys, but no rotary frequencies were given; .*frequency="
    ):
        kvjax.attend(cache, *next(blocks())[:3], policy=kvjax.parse("random"), budget=BUDGET)


@pytest.mark.bad_input
def test_unknown_positions_are_refused():
    with pytest.raises(ValueError, match=r"unknown positions 'rank'; expected one of absolute, compact, index"):
        KVCache.init(batch=1, kv_heads=1, slots=1, head_dim=1, positions="rank")
    with pytest.raises(ValueError, match=r"unknown positions 'rank'"):
        PagedCache.init(batch=1, kv_heads=1, pages=1, page_size=1, most=1, head_dim=1, positions="rank")


@pytest.mark.matrix
@pytest.mark.parametrize("positions", MODES)
def test_gradients_through_evicting_blocks_are_finite(positions):
    policy = kvjax.parse("h2o+caote")
    given = [np.stack(x) for x in zip(*blocks(), strict=True)]

    @jax.jit
    def loss(scale, frequency):
        def body(cache, block):
            q, k, v, position = block
            q, k = rotate_block(scale * q, scale * k, position)
            out, cache = kvjax.attend(
                cache, q, k, v, position, policy=policy, budget=BUDGET, context=kvjax.Context(frequency=frequency)
            )
            return cache, (out**2).sum()

        return jax.lax.scan(body, start(policy, positions), given)[1].sum()

    slope, of_frequency = jax.grad(loss, argnums=(0, 1))(1.0, FREQUENCY)
    assert np.isfinite(slope) and slope != 0
    assert (np.asarray(of_frequency) == 0).all()
    eps = 1e-2
    np.testing.assert_allclose(slope, (loss(1 + eps, FREQUENCY) - loss(1 - eps, FREQUENCY)) / (2 * eps), rtol=0.05)
