"""One prompt under many policies: each result is what that policy gives alone, and what the reference gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import models
from models import sharing
from models.config import Rope
from tests.models.tiny import CONFIG, LENGTHS, STATE, TOKENS, answers, assert_keeps, decoder, run, streamed
from tests.tiers import first

BLOCK = 16  # a question of 7 tokens and the window of 16 queries fit
HELD_BACK = np.array([7, 0, 5])
FEW = ("full", (STATE, 24), ("snapkv(window=8)@adakv", 24), ("h2o+protect(recent=0.5)", 40))
MANY = (
    ("snapkv(window=16)+caote", 24),
    ("laprox(window=16)@model", 40),
    ("kvzip(chunk=16)+caote", 24),
    ("snapkv(window=8)+merge", 20),
    ("h2o+caote+protect(recent=0.5)", 24),
    ("snapkv(window=8)", 0.9),
    ("tova(heads='group')+caote", 0.2),
    ("expected_attention", 0.9),
    ("kvzip(chunk=16)@layer", 0.4),
)


def assert_same(ours: models.Prefilled, alone: models.Prefilled) -> None:
    for found, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(alone), strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, atol=2e-5)


def policy_and_budget(asked: Any) -> dict[str, Any]:
    policy, budget = asked if isinstance(asked, tuple) else (asked, None)
    return dict(policy=policy, budget=budget)


def named(asked: Any) -> dict[str, Any]:
    """The same as the reference takes it."""
    given = policy_and_budget(asked)
    return given if given["budget"] is not None else {}


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """Grows with every block that the model runs for several policies."""
    counted = []
    whole = sharing._block
    monkeypatch.setattr(sharing, "_block", lambda *given: counted.append(1) or whole(*given))
    return counted


@pytest.mark.parametrize(("asked_of_each", "way"), first(1, [(FEW, "one program"), (FEW[:2], "layers")]))
def test_each_result_is_that_of_the_reference(asked_of_each, way, run_by_layer, passes) -> None:
    run_by_layer(way == "layers")
    settings = dict(block=BLOCK, when="prompt")
    each = models.prefill_each(decoder(), TOKENS, LENGTHS, policies=asked_of_each, question=HELD_BACK, **settings)
    for asked, (cache, logits) in zip(asked_of_each, each, strict=True):
        for row, (length, question) in enumerate(zip(LENGTHS, HELD_BACK, strict=True)):
            expected = run(TOKENS[row, :length], question=question, **settings, **named(asked))
            np.testing.assert_allclose(np.asarray(logits)[row], expected.logits[-1], atol=1e-4, rtol=0)
            assert_keeps(cache, row, expected)
        assert cache.next_position.tolist() == LENGTHS.tolist()
    assert len(passes) == 4, "the model runs once for all: 60 tokens in blocks of 16"


# Without a question, and with one; every leaf of the caches, which the reference does not have.
@pytest.mark.parametrize(
    ("question", "asked_of_each"),
    [
        pytest.param(None, FEW[1:], marks=pytest.mark.matrix),
        *(pytest.param((7, 0, 5), ("full", asked), marks=pytest.mark.matrix) for asked in MANY[:4]),
        # Each of 7 s, and of a kind that one above has.
        *(pytest.param((7, 0, 5), ("full", asked), marks=pytest.mark.nightly) for asked in MANY[4:]),
    ],
)
def test_each_result_is_that_of_its_policy_alone(question, asked_of_each) -> None:
    settings = dict(block=BLOCK, when="prompt", question=None if question is None else np.array(question))
    each = models.prefill_each(decoder(), TOKENS, LENGTHS, policies=asked_of_each, **settings)
    for asked, ours in zip(asked_of_each, each, strict=True):
        if asked != "full":
            assert_same(ours, models.prefill(decoder(), TOKENS, LENGTHS, **policy_and_budget(asked), **settings))


def test_what_is_fed_again_is_fed_once_for_all_that_observe_it(passes) -> None:
    asked = (("kvzip(chunk=30)", 16), ("kvzip(chunk=30)", 24))
    each = models.prefill_each(decoder(), TOKENS, LENGTHS, policies=asked, block=BLOCK)
    for (_, budget), (cache, _) in zip(asked, each, strict=True):
        assert_keeps(cache, 1, run(TOKENS[1, :37], policy="kvzip(chunk=30)", budget=budget, block=BLOCK))
    # The prompt, then two parts of 30 tokens, the second behind the words before it.
    assert len(passes) == 4 + 2 * 3


@pytest.mark.matrix
def test_pseudo_tokens_are_fed_once_too(passes) -> None:
    asked = (("kvzip(chunk=30)", 16), ("kvzip(chunk=30)", 24), ("dapq(window=4)", 16), ("dapq(window=4)", 24))
    assert len(list(models.prefill_each(decoder(), TOKENS, LENGTHS, policies=asked, block=BLOCK))) == 4
    assert len(passes) == (4 + 2 * 3) + (4 + 1)


@pytest.mark.parametrize(
    ("asked", "when"),
    [
        (STATE, "block"),
        pytest.param("streaming+positions", "prompt", marks=pytest.mark.matrix),
        pytest.param("sage", "prompt", marks=pytest.mark.matrix),
    ],
)
def test_what_has_nobody_to_share_with_runs_by_itself(asked, when, passes) -> None:
    settings = dict(block=BLOCK, when=when)
    each = models.prefill_each(decoder(), TOKENS, LENGTHS, policies=(asked, "full"), budget=24, **settings)
    assert_same(next(each), models.prefill(decoder(), TOKENS, LENGTHS, policy=asked, budget=24, **settings))
    assert asked == "sage" or not passes


@pytest.mark.matrix
def test_results_are_made_when_their_turn_comes(monkeypatch) -> None:
    made = []
    whole = sharing._compressed
    monkeypatch.setattr(sharing, "_compressed", lambda *given: made.append(1) or whole(*given))
    each = models.prefill_each(decoder(), TOKENS, LENGTHS, policies=FEW[1:3], block=BLOCK, question=HELD_BACK)
    assert made == []
    next(each)
    assert made == [1]


def test_a_result_may_be_used_up_before_the_next_is_made() -> None:
    asked, more = ((STATE, 24), (STATE, 24)), dict(max_new_tokens=5, end=(), evict_every=0, block=BLOCK)
    each = models.prefill_each(decoder(), TOKENS, LENGTHS, policies=asked, block=BLOCK)
    found = [
        streamed(decoder(), ours, **more, **policy_and_budget(one))[0] for one, ours in zip(asked, each, strict=True)
    ]
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize(
    "policies, said",
    [
        ([], "give at least one policy"),
        ("h2o", "give a list of policies"),
        (None, "give a list of policies"),
        ([("h2o", 8, 3)], "pair of a policy and its budget"),
        (["h2o"], "needs a budget"),
        ([("h2o", 0.5), ("snapkv", 8)], "always keeps 0 first and 32 last"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_runs(policies, said) -> None:
    with pytest.raises(ValueError, match=said):
        models.prefill_each(decoder(), TOKENS, policies=policies, block=32)


# From what prefill gave to an answer.

ANSWERED = [
    (dict(policy=STATE, budget=24, question=HELD_BACK), None),
    pytest.param(dict(policy="full"), 0, marks=pytest.mark.matrix),
    pytest.param(dict(policy="snapkv(window=8)", budget=0.9, when="prompt"), None, marks=pytest.mark.matrix),
    pytest.param(dict(policy="h2o@adakv", budget=24), 1, marks=pytest.mark.matrix),
    # Of 20 s, and all that it adds is that a question and pages meet.
    pytest.param(
        dict(policy="snapkv(window=8)@adakv", budget=0.9, when="prompt", question=HELD_BACK), None,
        marks=pytest.mark.nightly,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "evict_every"), ANSWERED)
def test_an_answer_to_what_was_prefilled_is_that_of_the_reference(settings, evict_every) -> None:
    settings, more = settings | dict(block=BLOCK), dict(max_new_tokens=9, end=(), evict_every=evict_every)
    prefilled = models.prefill(decoder(), TOKENS, LENGTHS, **settings)
    out = models.generate(decoder(), prefilled, **settings, **more)
    told = dict(settings) if settings["policy"] != "full" else dict(block=BLOCK)
    questions = told.pop("question", np.zeros(3, int))
    for row, length in enumerate(LENGTHS):
        expected = run(TOKENS[row, :length], **told, question=questions[row], new_tokens=9, evict_every=evict_every)
        assert answers(out)[row] == expected.tokens
        assert_keeps(out.cache, row, expected)
    np.testing.assert_array_equal(streamed(decoder(), prefilled, **settings, **more)[0], out.tokens)


@pytest.mark.matrix
def test_an_answer_has_the_bytes_and_the_draws_of_one_call() -> None:
    more = dict(max_new_tokens=6, end=(), temperature=1.0, key=jax.random.key(3), policy=STATE, budget=24, block=BLOCK)
    one = models.generate(decoder(), TOKENS, lengths=LENGTHS, **more)
    prefilled = models.prefill(decoder(), TOKENS, LENGTHS, policy=STATE, budget=24, block=BLOCK)
    two = models.generate(decoder(), prefilled, **more)
    np.testing.assert_array_equal(two.tokens, one.tokens)
    assert one.cache.nbytes == two.cache.nbytes


@pytest.fixture(scope="module")
def prefilled() -> models.Prefilled:
    return models.prefill(decoder(), TOKENS, LENGTHS, policy=STATE, budget=24, block=BLOCK, question=HELD_BACK)


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(lengths=LENGTHS), "leave cache= and lengths= out"),
        (dict(question=61), "a question is the last part"),
        (dict(policy="tova", budget=20), "not that of 'tova'"),
        (dict(budget=16), "the cache holds 31 tokens per head, but budget and question sum to"),
        (dict(question=None), "the cache holds 31 tokens per head, but budget and question sum to"),
    ],
)
def test_what_does_not_go_with_a_prefilled_prompt_is_refused(change, said, prefilled) -> None:
    settings = dict(policy=STATE, budget=24, question=HELD_BACK, block=BLOCK)
    with pytest.raises(ValueError, match=said):
        models.generate(decoder(), prefilled, **settings | change)


@pytest.mark.matrix
@pytest.mark.parametrize("change", (dict(budget=16), dict(question=None)))
def test_a_smaller_budget_is_fine_where_nothing_more_leaves(change, prefilled) -> None:
    settings = dict(policy=STATE, budget=24, question=HELD_BACK, block=BLOCK) | change
    out = models.generate(decoder(), prefilled, evict_every=0, max_new_tokens=2, end=(), **settings)
    assert out.cache.num_live.max() == 24 + 7 + 1


@pytest.mark.parametrize("take", (models.prefill, models.hidden_states, models.prefill_each))
def test_what_was_prefilled_is_no_prompt(take, prefilled) -> None:
    more = dict(policies=["full"]) if take is models.prefill_each else {}
    with pytest.raises(ValueError, match="these tokens are in a cache already"):
        take(decoder(), prefilled, **more)


def test_logits_of_all_tokens_are_no_start_of_an_answer(prefilled) -> None:
    every = prefilled._replace(logits=np.zeros((3, 60, CONFIG.vocab_size), np.float32))
    with pytest.raises(ValueError, match="expected those of each row's last token"):
        models.generate(decoder(), every, policy=STATE, budget=24, question=HELD_BACK, block=BLOCK)


@pytest.mark.matrix
@pytest.mark.parametrize("question", (None, 5))
def test_a_dynamic_rope_beyond_its_length_is_as_alone(question) -> None:
    config = dataclasses.replace(CONFIG, rope=Rope(type="dynamic", factor=2.0, original_positions=24))
    settings, asked = dict(block=BLOCK, when="prompt", question=question or 0), ("full", ("h2o", 24))
    for one, ours in zip(asked, models.prefill_each(decoder(config), TOKENS, policies=asked, **settings), strict=True):
        for row in range(3):
            expected = run(TOKENS[row], config, **settings, **named(one))
            np.testing.assert_allclose(np.asarray(ours.logits)[row], expected.logits[-1], atol=1e-4, rtol=0)
            assert_keeps(ours.cache, row, expected)


def test_hidden_states_make_the_logits_of_all_tokens() -> None:
    settings = dict(policy=STATE, budget=24, block=BLOCK)
    hidden = models.hidden_states(decoder(), TOKENS, LENGTHS, question=HELD_BACK, **settings).hidden
    logits = np.asarray(jax.jit(type(decoder()).logits)(decoder(), hidden))
    for row, length in enumerate(LENGTHS):
        expected = run(TOKENS[row, :length], question=HELD_BACK[row], **settings).logits
        np.testing.assert_allclose(logits[row, :length], expected, atol=1e-4, rtol=0)
