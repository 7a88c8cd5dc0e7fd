"""Which tokens stay: a sort by (score, position) in NumPy says."""

import dataclasses
import functools
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kernels_pallas import topk
from kvjax.allocation import Allocation
from tests.kvjax import definitions

B, K, S = 2, 2, 9
MANY_TIES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.0 + 2**-23, 3e38, -3e38, np.nan, np.inf, -np.inf])
ANY_FLOAT = st.floats(width=32)  # subnormal numbers too: they have bits, and XLA's arithmetic takes them for zero


@functools.cache
def compiled(excess=None, bits=1):
    """The selection, which finds ``bits`` of a threshold in each round: one on a CPU, four elsewhere."""

    @jax.jit
    def keep(*given):
        with mock.patch.object(topk, "bits_here", lambda: bits):
            return kvjax.keep_mask(*given, excess=excess)

    return keep


def expected_mask(scores: np.ndarray, position: np.ndarray, budget: np.ndarray) -> np.ndarray:
    mask = np.zeros(position.shape, bool)
    for head in np.ndindex(position.shape[:-1]):
        mask[head] = definitions.kept(scores[head], position[head], int(budget[head[-2]] if len(head) > 1 else budget))
    return mask


@st.composite
def heads(draw, most_free: int = S) -> tuple[np.ndarray, np.ndarray]:
    """Scores and positions: tokens in any order, some slots free."""
    numbers = draw(st.sampled_from([MANY_TIES, ANY_FLOAT]))
    scores = np.array(draw(st.lists(numbers, min_size=B * K * S, max_size=B * K * S)), np.float32).reshape(B, K, S)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    position = np.stack([rng.permutation(50)[:S] for _ in range(B * K)]).reshape(B, K, S)
    free = draw(st.integers(0, most_free))
    for head in np.ndindex(B, K):
        position[head][rng.permutation(S)[: rng.integers(free + 1)]] = -1
    return scores, position.astype(np.int32)


@pytest.mark.parametrize("bits", [1, 4])
@hypothesis.given(heads=heads(), budget=st.tuples(*[st.integers(1, S + 3)] * B))
@hypothesis.settings(max_examples=40)
def test_the_best_by_score_then_by_position_stay(bits, heads, budget):
    scores, position = heads
    mask = np.asarray(compiled(bits=bits)(scores, position, np.array(budget, np.int32)))
    np.testing.assert_array_equal(mask, expected_mask(scores, position, np.array(budget)))


@hypothesis.given(heads=heads(most_free=2))
@hypothesis.settings(max_examples=30)
def test_the_argmin_of_decode_keeps_the_same_tokens(heads):
    scores, position = heads
    budget = np.maximum((position >= 0).sum(-1).max(-1) - 1, 1).astype(np.int32)
    mask = np.asarray(compiled(excess=1)(scores, position, budget))
    np.testing.assert_array_equal(mask, expected_mask(scores, position, budget))


def test_scores_of_half_precision_order_as_numbers():
    scores = np.array([-2.0, 0.5, -0.25, 3.0]).astype(jnp.bfloat16)
    assert compiled()(scores, np.arange(4, dtype=np.int32), np.int32(2)).tolist() == [False, True, False, True]


def test_each_head_has_its_own_budget_though_devices_number_theirs_from_zero():
    """Two devices have one head each; under its own number, the second would take the first one's budget."""
    sizes = dict(batch=1, kv_heads=1, pages=2, page_size=4, most=8, head_dim=2, layers=1)
    rows, scores = np.ones((1, 8, 1, 2), np.float32), np.random.default_rng(0).normal(size=(2, 2, 4)).astype(np.float32)
    own = Allocation("own", lambda c: c.best("head", np.array([[[1, 5]]])), scope="head", most=lambda L, K, budget: 5)

    def tokens_left(scores):
        cache = kvjax.insert(kvjax.PagedCache.init(**sizes), rows, rows, layer=0)
        evidence = kvjax.Evidence(scores, jnp.full(1, 8), allocation=own)
        return kvjax.evict(dataclasses.replace(cache, axis="tensor"), evidence, 3).num_live

    assert jax.jit(jax.vmap(tokens_left, axis_name="tensor"))(scores).ravel().tolist() == [1, 5]
