"""What each head reads, against a brute-force reading of the rule, one head and one query at a time."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import kvjax
from kvjax.selection import share_of_tokens
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
    slots = compiled(kvjax.select, budget=budget, sinks=sinks)(importance, position, query_position=queries)
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


def test_a_budget_a_row_holds_for_all_its_queries():
    importance, position, queries = case(2, rows=T)
    mask = compiled(kvjax.selected_mask)(importance, position, np.array([2, 5]), query_position=queries)
    every = np.broadcast_to(np.array([[2], [5]]), queries.shape)
    np.testing.assert_array_equal(mask, definitions(importance, position, queries, every, 4))


def test_sinks_come_on_top_of_the_budget_and_are_counted_once():
    position = np.arange(S, dtype=np.int32).reshape(1, 1, S)
    importance = np.where(position == 0, 9.0, position).astype(np.float32)  # slot 0 is a sink, and the best
    slots = compiled(kvjax.select, budget=3, sinks=2)(importance, position)
    assert slots.tolist() == [[[0, 1, S - 2, S - 1, -1]]]


def test_ties_go_to_the_more_recent_token_in_whatever_slot_it_is():
    position = np.array([[[7, 2, 9, 4, -1, 5]]], np.int32)
    slots = compiled(kvjax.select, budget=2, sinks=0)(np.zeros((1, 1, 6), np.float32), position)
    assert slots.tolist() == [[[0, 2]]]


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


def test_budgets_of_rows_take_the_size_that_is_given():
    importance, position, queries = case(7)
    run = compiled(kvjax.select, sinks=1, size=5)
    slots = run(importance, position, np.array([1, 4]), query_position=queries)
    expected = definitions(importance, position, queries, np.array([1, 4]), 1)
    np.testing.assert_array_equal(as_mask(np.asarray(slots)), expected)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(budget=0), "the budget is 0; at least 1 token must stay"),
        (dict(budget=0.0), r"the budget is 0.0; expected .* a share of the tokens \(a float in \(0, 1\]\)"),
        (dict(budget=1.5), "the budget is 1.5; expected"),
        (dict(budget=np.ones(3, np.int32), size=4), r"a budget of shape \(3,\) does not fit: expected \(2,\)"),
        (dict(budget=np.ones(2, np.int32)), "is an array.*give size="),
        (dict(sinks=-1), "sinks is -1"),
        (dict(size=4), "size is 4; a budget of 3 and 4 sinks take 7 slots"),
        (dict(budget=0.5, size=0), "size is 0"),
        (dict(position=np.zeros((B, 3, S), np.int32)), r"importance \(2, 4, 11\) does not fit positions \(2, 3, 11\)"),
        (dict(importance=np.zeros((B, H, T, S), np.float32)), "expected .B, H, S., one decode step's"),
        (dict(query_position=np.zeros((B, 1), np.int32)), r"query_position \(2, 1\) does not fit: expected \(2,\)"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_bad_input_is_named(change, message):
    importance, position, _ = case(8)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: kvjax.select(**dict(importance=importance, position=position, budget=3) | change))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("importance", "position"),
    [
        ((H, S), (B, K, S)),
        ((B, H, 1, T, S), (B, K, S)),
        ((B, H, S), (B, S)),
        ((B, H, S), (1, K, S)),
        ((B, 3, S), (B, K, S)),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_named(importance, position):
    with pytest.raises(ValueError, match=r"importance .* does not fit positions .*: expected"):
        kvjax.selected_mask(np.zeros(importance, np.float32), np.zeros(position, np.int32), 3)


@pytest.mark.bad_input
def test_whole_sequences_need_the_positions_of_their_queries():
    importance, position, _ = case(9, rows=T)
    with pytest.raises(ValueError, match="has 5 queries; give their positions"):
        kvjax.selected_mask(importance, position, 3)
