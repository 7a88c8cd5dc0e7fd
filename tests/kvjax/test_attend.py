"""attend() = insert + attention + scores + evict: rows, budgets and layers; whole runs: tests/campaign."""

import functools

import jax
import numpy as np

import kvjax
from kvjax import KVCache

B, K, G, T, D, BUDGET = 2, 2, 2, 3, 4, 6
N, S = K * G, BUDGET + T
# How many tokens each row brings in each block: rows start late, pause and end early.
RAGGED = [(3, 0), (3, 2), (3, 3), (1, 0), (3, 3), (0, 3), (3, 3), (3, 0)]


def blocks(counts=RAGGED, seed: int = 0):
    """Queries, keys, values and positions of each block; padding stands anywhere."""
    rng, brought = np.random.default_rng(seed), np.zeros(B, int)
    for count in counts:
        position = np.full((B, T), -1, np.int32)
        for b in range(B):
            position[b, np.sort(rng.permutation(T)[: count[b]])] = brought[b] + np.arange(count[b])
        brought += count
        q, k, v = (rng.normal(size=(B, T, heads, D)).astype(np.float32) for heads in (N, K, K))
        yield 2 * q, k, v, position


@functools.cache
def start(policy=None, slots: int = S) -> KVCache:
    """In one program."""

    def made():
        state = () if policy is None else policy.state(B, K, G, slots, D)
        return KVCache.init(batch=B, kv_heads=K, slots=slots, head_dim=D, state=state)

    return jax.jit(made)()


@functools.cache
def step(name: str | None, **options):
    policy = None if name is None else kvjax.parse(name)
    return jax.jit(functools.partial(kvjax.attend, policy=policy, **options))


def num_live(cache: KVCache) -> np.ndarray:
    return (np.asarray(cache.position) >= 0).sum(-1)


def test_a_row_above_the_budget_is_not_evicted_from_by_a_block_without_its_tokens():
    cache = start(kvjax.parse("h2o"), slots=12)
    *first, last = blocks([(3, 3), (3, 3), (3, 0)])
    for block in first:
        _, cache = step("h2o")(cache, *block)
    _, cache = step("h2o", budget=4)(cache, *last)
    assert num_live(cache).tolist() == [[4] * K, [6] * K]


def test_without_a_budget_the_policy_observes_and_evicts_nothing():
    policy = kvjax.parse("h2o")
    cache = start(policy, slots=12)
    received = np.zeros(B)
    for block in blocks([(3, 3), (3, 0), (3, 1)]):
        _, cache = step("h2o")(cache, *block)
        received += (block[3] >= 0).sum(1)
    assert num_live(cache).tolist() == [[9] * K, [4] * K]
    for sums in cache.state:  # a query head of the group each
        np.testing.assert_allclose(np.asarray(sums).sum(2), np.broadcast_to(received[:, None], (B, K)), rtol=1e-5)


def test_in_a_scan_and_under_vmap_blocks_give_what_calls_give():
    policy = kvjax.parse("h2o+caote")
    cache, outs = start(policy), []
    for block in blocks():
        out, cache = step("h2o+caote", budget=BUDGET)(cache, *block)
        outs.append(out)

    def scan(cache, given):
        def body(cache, block):
            out, cache = kvjax.attend(cache, *block, policy=policy, budget=BUDGET)
            return cache, out

        return jax.lax.scan(body, cache, given)

    given = [np.stack(x) for x in zip(*blocks(), strict=True)]
    scanned, out = jax.jit(scan)(start(policy), given)
    np.testing.assert_allclose(out, outs, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(scanned.position, cache.position)
    rows = jax.tree.map(lambda leaf: np.asarray(leaf)[:, None], start(policy))
    each, out = jax.jit(jax.vmap(scan, in_axes=(0, 1)))(rows, [x[:, :, None] for x in given])
    np.testing.assert_allclose(np.moveaxis(out[:, :, 0], 0, 1), outs, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(each.position[:, 0], cache.position)


def test_positions_that_begin_anew_with_each_block_are_nan_under_jit():
    """Outside jit they are refused: tests/bad_input/calls.txt."""
    (*block, _), relative = next(blocks([(3, 3)])), np.tile(np.arange(T, dtype=np.int32), (B, 1))
    first, cache = step("h2o", budget=BUDGET)(start(kvjax.parse("h2o")), *block, relative)
    second, _ = step("h2o", budget=BUDGET)(cache, *block, relative)
    assert np.isfinite(first).all() and np.isnan(second).all()


def test_taking_back_from_below_0_under_jit_takes_all():
    cache = jax.jit(kvjax.insert)(start(), *(np.ones((B, T, K, D), np.float32),) * 2)
    cache = jax.jit(kvjax.rewind)(cache, np.array([-1, 2]))
    assert cache.next_position.tolist() == [0, 2] and num_live(cache).tolist() == [[0] * K, [2] * K]
