"""DapQ: the tokens that stay are the reference's, and those fed again leave no trace, in any layout, batch and turn."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax
import models
from kvjax.schedule import moments, repeats_of
from models import engine
from models.by_layer import LayerSteps
from tests.models.test_kvzip import LENGTHS, TOKENS, in_order_rows
from tests.models.tiny import assert_keeps, decoder, held, run
from tests.tiers import first

N = 6
NAME = f"dapq(window={N},kernel=3)"
SETTINGS = dict(budget=14, block=8)
ROWS = [(0, 40), (1, 23)]


@pytest.mark.parametrize("policy", first(1, [NAME, f"dapq(window={N},kernel=3,tokens='first')"]))
def test_the_tokens_that_stay_are_those_of_the_reference(policy):
    cache, _ = models.prefill(decoder(), TOKENS, LENGTHS, policy=policy, **SETTINGS)
    for row, length in ROWS:
        assert_keeps(cache, row, run(TOKENS[row, :length], policy=policy, **SETTINGS))
    assert cache.next_position.tolist() == [40, 23]


TOGETHER = dict(policy=f"{NAME}+caote@adakv", **SETTINGS)


@pytest.mark.matrix
def test_the_pseudo_tokens_come_behind_the_context_not_behind_the_question():
    cache, logits = models.prefill(decoder(), TOKENS, LENGTHS, question=3, **TOGETHER)
    for row, length in ROWS:
        expected = run(TOKENS[row, :length], question=3, **TOGETHER)
        assert_keeps(cache, row, expected)
        np.testing.assert_allclose(np.asarray(logits)[row], expected.logits[-1], atol=1e-4)


def test_a_prompt_shorter_than_the_window_is_fed_more_than_once():
    given = engine.check_prompt(decoder(), TOKENS, np.array([4, 23]), None)
    wanted = kvjax.parse(NAME).needs.reconstruction
    rows = [row[:length] for row, length in zip(TOKENS, given.lengths, strict=True)]
    blocks = repeats_of(rows, given.lengths, wanted, 8)
    assert blocks.tokens[0, 0, -N:].tolist() == [*TOKENS[0, :4], *TOKENS[0, :2]]
    assert blocks.tokens[0, 1, -N:].tolist() == TOKENS[1, 23 - N : 23].tolist()
    assert blocks.positions[0, :, -N:].tolist() == [list(range(4, 4 + N)), list(range(23, 23 + N))]
    assert blocks.parts[0].tolist() == [[0, 4, 4], [0, 23, 23]]


@pytest.mark.matrix
def test_they_leave_no_trace():
    cache, logits = models.prefill(decoder(), TOKENS, LENGTHS, policy=NAME, budget=1.0, block=8)
    full, expected = models.prefill(decoder(), TOKENS, LENGTHS, block=8)
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    for part in ("key", "value"):
        np.testing.assert_allclose(in_order_rows(cache, part), in_order_rows(full, part), atol=1e-5)


@pytest.mark.matrix
def test_layer_by_layer_and_among_many_policies_the_same_tokens_stay():
    together = models.prefill(decoder(), TOKENS, LENGTHS, question=3, **TOGETHER).cache
    given = engine.check_prompt(decoder(), TOKENS, LENGTHS, 3)
    options = engine.Options(kvjax.parse(TOGETHER["policy"]), 14, 8)
    own, prompt = engine.prepare(decoder(), given, options, None, None, None)
    state, _ = engine._fed(LayerSteps(own), prompt, None)
    assert held(state.cache) == held(together)
    asked = ["streaming", TOGETHER["policy"]]
    _, each = models.prefill_each(decoder(), TOKENS, LENGTHS, policies=asked, question=3, **SETTINGS)
    assert held(each.cache) == held(together)


@pytest.mark.matrix
def test_a_second_turn_is_observed_with_all_that_came_before():
    first_turn, _ = models.prefill(decoder(), TOKENS[:1, :24], policy=NAME, budget=1.0, block=8)
    cache, _ = models.prefill(decoder(), TOKENS[:1, 24:], cache=first_turn, policy=NAME, **SETTINGS)
    assert_keeps(cache, 0, run(TOKENS[0], policy=NAME, **SETTINGS))


@pytest.mark.matrix
def test_answers_of_the_engine_are_those_of_the_reference():
    served = models.Engine(decoder(), rows=2, policy=NAME, max_new_tokens=3, **SETTINGS)
    handle = served.submit(TOKENS[0].tolist(), end=())
    answer = [made.token for made in served.run() if made.handle == handle]
    assert answer == run(TOKENS[0], policy=NAME, evict_every=0, new_tokens=3, **SETTINGS).tokens


def test_cake_may_measure_the_pseudo_queries_and_no_words_are_asked():
    policy = kvjax.parse(f"{NAME}@cake")
    assert policy.needs.window == N and "window_log" in policy.needs.statistics | policy.allocation.statistics
    _, tokenizer = models.load("retriever")
    assert models.with_repeat_prompt(policy, tokenizer) is policy
    for when in ("block", "prompt", "published"):
        assert moments(kvjax.parse("dapq"), when, None) == ("prompt", 0)


@pytest.mark.bad_input
def test_a_block_holds_all_pseudo_tokens():
    with pytest.raises(ValueError, match=r"observes the last 6 queries, but a block has 4: give a block of at least 6"):
        models.prefill(decoder(), TOKENS, policy=NAME, budget=14, block=4)


@pytest.mark.matrix
def test_a_row_whose_turn_is_only_a_question_has_no_pseudo_tokens():
    settings = dict(policy="dapq(window=4)", budget=16, block=8)
    kept = models.prefill(decoder(), TOKENS[:, :30], **settings).cache
    both = models.prefill(decoder(), TOKENS[:, 30:], cache=kept, question=np.array([3, 10]), **settings)
    one = models.prefill(decoder(), TOKENS[1:, :30], **settings).cache
    alone = models.prefill(decoder(), TOKENS[1:, 30:], cache=one, question=10, **settings)
    np.testing.assert_allclose(np.asarray(both.logits)[1], np.asarray(alone.logits)[0], atol=1e-4)
