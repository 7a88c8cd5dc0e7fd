"""CurDKV and LagKV against their definitions in NumPy: any slots, with holes, in any order."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.kvjax import blocks
from tests.kvjax.blocks import B, K

S, D = 24, 4
seeds = st.integers(0, 2**32 - 1)
close = functools.partial(np.testing.assert_allclose, rtol=2e-5)
few = hypothesis.settings(max_examples=8)


def slots(seed: int, *, equal: bool = False) -> kvjax.Observation:
    """Heads hold from 0 to all S tokens, of 40 or 33, in any slots; what lies in free ones is no number."""
    rng = np.random.default_rng(seed)
    text = np.array([40, 33], np.int32)
    position = np.full((B, K, S), -1, np.int32)
    for b, k in np.ndindex(B, K):
        live = int(rng.integers(S + 1))
        position[b, k, rng.permutation(S)[:live]] = rng.permutation(text[b])[:live]
    key, value = rng.normal(size=(2, B, K, S, D)) * rng.choice([0.1, 1, 50], (2, 1, 1, 1, D)) + rng.normal(size=D)
    if equal:
        key[:], value[:] = key[..., :1, :], value[..., :1, :]
    key[position < 0] = value[position < 0] = np.nan
    return blocks.make(0).observation._replace(
        key=key.astype(np.float32), value=value.astype(np.float32), position=position, next_position=text
    )


def scores(policy: kvjax.Policy, seen: kvjax.Observation) -> np.ndarray:
    """[B, K, S], before anything is protected."""
    result = np.asarray(jax.jit(policy.update)(None, (), seen)[0])
    assert result.dtype == np.float32 and result.shape == (B, K, 1, S)
    return result[:, :, 0]


@pytest.mark.parametrize("policy", [kvjax.curdkv(local_window=3), kvjax.lagkv(sinks=2, lag=5)], ids=str)
@few
@hypothesis.given(seed=seeds, empty=st.booleans())
def test_scores_are_from_0_to_1_of_heads_that_are_empty_or_hold_equal_tokens_too(policy, seed, empty):
    seen = slots(seed, equal=True)
    if empty:
        seen = seen._replace(position=np.full_like(seen.position, -1))
    result = scores(policy, seen)
    assert (result >= 0).all() and (result <= 1).all()


def in_a_row(key, value) -> kvjax.Observation:
    """Every head holds the same S tokens, in order."""
    rows = [np.broadcast_to(x.astype(np.float32), (B, K, S, D)) for x in (key, value)]
    position = np.broadcast_to(np.arange(S, dtype=np.int32), (B, K, S))
    return slots(0)._replace(key=rows[0], value=rows[1], position=position, next_position=np.full(B, S, np.int32))


def test_curdkvs_equal_tokens_tie_although_their_lengths_are_rounded_otherwise_and_zeros_are_zero():
    key = np.ones((S, D)) * (1 + 2e-7 * np.arange(S)[:, None])
    result = scores(kvjax.curdkv(local_window=8), in_a_row(key, np.ones((S, D))))
    close(result, 1 / S)
    assert (result == result[0, 0, 0]).all()
    assert (scores(kvjax.curdkv(), in_a_row(np.zeros((S, D)), np.zeros((S, D)))) == 0).all()


def test_lagkv_ranks_equal_tokens_by_how_recent_they_are():
    result = scores(kvjax.lagkv(sinks=4, lag=5), in_a_row(np.ones((S, D)), np.ones((S, D))))
    partition = np.arange(5) / 5
    close(result[0, 0], [1] * 4 + [*partition] * 3 + [1] * 5)


def test_lagkvs_elements_that_are_alike_but_for_rounding_say_nothing():
    rng = np.random.default_rng(0)
    key, value = rng.normal(size=(2, S, D))
    value[:, 1:3] = 1.0
    plain = scores(kvjax.lagkv(lag=5, cross_scoring=True), in_a_row(key, value))
    value[:, 1:3] += 1e-7 * rng.normal(size=(S, 2))
    close(scores(kvjax.lagkv(lag=5, cross_scoring=True), in_a_row(key, value)), plain, rtol=1e-6)


def test_lagkv_of_fewer_than_two_partitions_prefers_newer_tokens():
    rng = np.random.default_rng(1)
    result = scores(kvjax.lagkv(sinks=4, lag=11), in_a_row(*rng.normal(size=(2, S, D))))
    close(result[1, 1], [1] * 4 + [i / 20 for i in range(20)])


@pytest.mark.parametrize(
    ("name", "sinks", "recent"),
    [("curdkv", 4, 0), ("curdkv(sinks=0.5)", 8, 0), ("lagkv(lag=5)", 4, 5), ("lagkv(sinks=1,lag=3)", 1, 3)],
)
def test_sinks_stay_and_of_lagkv_the_last_lag(name, sinks, recent):
    assert kvjax.protected(kvjax.parse(name), 16) == (sinks, recent)


@pytest.mark.parametrize("policy", [kvjax.curdkv(), kvjax.lagkv(lag=32)], ids=str)
def test_memory_grows_with_the_slots_not_with_their_square(policy):
    def update(key, value, position):
        return policy.update(None, (), slots(0)._replace(key=key, value=value, position=position))[0]

    rows, position = jnp.zeros((B, K, 1024, D)), jnp.zeros((B, K, 1024), jnp.int32)
    program = jax.jit(update).lower(rows, rows, position).compile()
    assert program.memory_analysis().temp_size_in_bytes <= 16 * rows.nbytes < B * K * 1024**2 * 4
