"""What each head reads, against a brute-force reading of the rule, one head and one query at a time."""

import functools
import math
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import kvjax
from kvjax._src.selection import share_of_tokens
from tests.kvjax.definitions import kept
from tests.tiers import first

B, H, K, S, T = 2, 4, 2, 11, 5


@functools.lru_cache(maxsize=None, typed=True)  # typed: a budget of 1 is not 1.0
def compiled(function, **options):
    return jax.jit(functools.partial(function, **options))


def case(seed: int, levels: int = 4, rows: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Importance with many ties, slots in any order and some of them free, and the queries' positions."""
    rng = np.random.default_rng(seed)
    shape = (B, H, S) if rows is None else (B, H, rows, S)
    importance = rng.integers(0, levels, shape).astype(np.float32)
    importance[rng.random(shape) < 0.1] = rng.choice([np.nan, np.inf, -np.inf, -0.0])
    position = np.stack([rng.permutation(S + 3)[:S] for _ in range(B * K)]).reshape(B, K, S).astype(np.int32)
    position[rng.random(position.shape) < 0.3] = -1
    queries = rng.integers(-1, S + 3, (B,) if rows is None else (B, rows)).astype(np.int32)
    return importance, position, queries


def definition(importance, position, query, budget, sinks) -> np.ndarray:
    """One head and one query: the budget's best of what it sees, and the first tokens."""
    seen = (position >= 0) & (position <= query)
    if isinstance(budget, float):
        budget = math.ceil(Fraction(str(budget)) * int(seen.sum()))
    return kept(importance, np.where(seen, position, -1), budget) | (seen & (position < sinks))


def definitions(importance, position, queries, budget, sinks) -> np.ndarray:
    """Of one step or of whole sequences; an array has a budget for each query."""
    out = np.zeros(importance.shape, bool)
    for place in np.ndindex(importance.shape[:-1]):
        b, h, *t = place
        own = int(budget[(b, *t)]) if isinstance(budget, np.ndarray) else budget
        out[place] = definition(importance[place], position[b, h // (H // K)], queries[(b, *t)], own, sinks)
    return out


def as_mask(slots: np.ndarray) -> np.ndarray:
    """Slots as a mask; fails where a slot comes twice, out of order, or behind a -1."""
    out = np.zeros((*slots.shape[:-1], S), bool)
    for place in np.ndindex(slots.shape[:-1]):
        row = slots[place][slots[place] >= 0]
        assert slots[place].tolist() == sorted(set(row.tolist())) + [-1] * (slots.shape[-1] - len(row))
        out[place][row] = True
    return out


budgets = pytest.mark.parametrize(("budget", "sinks"), first(2, [(3, 4), (0.7, 2), (S + 4, 1)]))


@budgets
@hypothesis.settings(max_examples=15)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_a_step_reads_what_the_rule_says(seed, budget, sinks):
    importance, position, queries = case(seed)
    seen = np.where(position <= queries[:, None, None], position, -1)
    slots = compiled(kvjax.select, budget=budget, sinks=sinks)(importance, seen)
    np.testing.assert_array_equal(as_mask(np.asarray(slots)), definitions(importance, position, queries, budget, sinks))


@budgets
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=10)
def test_whole_sequences_read_what_their_steps_would(seed, budget, sinks):
    importance, position, queries = case(seed, rows=T)
    mask = compiled(kvjax.selected_mask, budget=budget, sinks=sinks)(importance, position, query_position=queries)
    np.testing.assert_array_equal(mask, definitions(importance, position, queries, budget, sinks))


@pytest.mark.parametrize("rows", [None, T])
def test_each_query_can_have_a_budget_of_its_own(rows):
    importance, position, queries = case(1, rows=rows)
    own = np.random.default_rng(1).integers(1, S, queries.shape).astype(np.int32)
    mask = compiled(kvjax.selected_mask, sinks=2)(importance, position, own, query_position=queries)
    np.testing.assert_array_equal(mask, definitions(importance, position, queries, own, 2))


def test_any_share_of_some_tokens_is_at_least_one():
    assert [share_of_tokens(1e-9, tokens) for tokens in (0, 1, 10_000)] == [0, 1, 1]
    np.testing.assert_array_equal(share_of_tokens(0.3, np.arange(11)), [0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3])


def test_a_share_is_rounded_up_without_rounding_errors():
    S, share = 600, 0.07
    position, every = np.arange(S, dtype=np.int32).reshape(1, 1, S), np.arange(S, dtype=np.int32)[None]
    function = compiled(kvjax.selected_mask, budget=share, sinks=0)
    mask = function(np.zeros((1, 1, S, S), np.float32), position, query_position=every)
    counts = [math.ceil(Fraction(str(share)) * (i + 1)) for i in range(S)]
    np.testing.assert_array_equal(np.asarray(mask).sum(-1)[0, 0], counts)


def test_the_size_is_what_budget_and_sinks_can_come_to():
    importance, position, _ = case(5)

    def size(budget: int | float) -> int:
        return jax.eval_shape(functools.partial(kvjax.select, budget=budget, sinks=3), importance, position).shape[-1]

    assert [size(budget) for budget in (1, 5, 10, 99)] == [4, 8, S, S]
    assert [size(budget) for budget in (0.1, 0.5, 1.0)] == [2 + 3, 6 + 3, S]
