"""One prompt under many policies: each result is what that policy gives alone, and what the reference gives."""

import jax
import numpy as np
import pytest

import models
from models import driver, sharing
from tests.models.tiny import CONFIG, LENGTHS, STATE, TOKENS, answers, assert_keeps, decoder, held, run, streamed
from tests.tiers import first

BLOCK = 16  # a question of 7 tokens and the window of 16 queries fit
HELD_BACK = np.array([7, 0, 5])
FEW = ("full", ("snapkv(window=8)@adakv", 24), (f"{STATE}+protect(recent=0.5)", 40), ("expected_attention", 24))


def assert_is_the_references(result, asked, questions=(0, 0, 0), config=CONFIG, lengths=LENGTHS, **settings) -> None:
    """Each row's logits and tokens are those of a policy, or of a pair of a policy and its budget, alone."""
    policy, budget = asked if isinstance(asked, tuple) else (asked, None)
    settings |= {} if budget is None else dict(policy=policy, budget=budget)
    for row, (length, question) in enumerate(zip(lengths, questions, strict=True)):
        expected = run(TOKENS[row, :length], config, question=question, block=BLOCK, **settings)
        np.testing.assert_allclose(np.asarray(result.logits)[row], expected.logits[-1], atol=1e-4, rtol=0)
        assert_keeps(result.cache, row, expected)


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """Grows with every block that the model runs for several policies."""
    counted = []
    whole = driver.Steps.block

    def block(self, *given):
        counted.extend([1] if self.run.plan.each else [])
        return whole(self, *given)

    monkeypatch.setattr(driver.Steps, "block", block)
    return counted


@pytest.mark.parametrize(
    ("asked_of_each", "way"), first(1, [(FEW[:3], "one program"), (FEW, "one program"), (FEW[:2], "layers")])
)
def test_each_result_is_that_of_the_reference(asked_of_each, way, run_by_layer, passes) -> None:
    run_by_layer(way == "layers")
    settings = dict(block=BLOCK, when="prompt")
    each = models.prefill_each(
        decoder(), TOKENS, lengths=LENGTHS, policies=asked_of_each, question=HELD_BACK, **settings
    )
    for asked, ours in zip(asked_of_each, each, strict=True):
        assert_is_the_references(ours, asked, HELD_BACK, when="prompt")
        assert ours.cache.next_position.tolist() == LENGTHS.tolist()
    assert len(passes) == 4, "the model runs once for all: 60 tokens in blocks of 16"


def test_what_is_fed_again_is_fed_once_for_all_that_observe_it(passes) -> None:
    asked = (("kvzip(chunk=30)@uniform", 16), ("kvzip(chunk=30)@uniform", 24))
    each = models.prefill_each(decoder(), TOKENS, lengths=LENGTHS, policies=asked, block=BLOCK)
    for one, ours in zip(asked, each, strict=True):
        assert_is_the_references(ours, one, when="prompt")
    # The prompt, then two parts of 30 tokens, the second behind the words before it.
    assert len(passes) == 4 + 2 * 3


@pytest.mark.matrix
def test_pseudo_tokens_are_fed_once_too(passes) -> None:
    asked = (("dapq(window=4)", 16), ("dapq(window=4)", 24))
    assert len(list(models.prefill_each(decoder(), TOKENS, lengths=LENGTHS, policies=asked, block=BLOCK))) == 2
    assert len(passes) == 4 + 1


@pytest.mark.parametrize(("asked", "when"), first(1, [(STATE, "block"), ("streaming+positions", "prompt")]))
def test_what_has_nobody_to_share_with_runs_by_itself(asked, when, passes) -> None:
    settings = dict(block=BLOCK, when=when)
    each = models.prefill_each(decoder(), TOKENS, lengths=LENGTHS, policies=(asked, "full"), budget=24, **settings)
    assert_is_the_references(next(each), (asked, 24), when=when)
    assert not passes


def test_a_result_is_made_when_its_turn_comes_and_may_be_used_up_before_the_next(monkeypatch) -> None:
    made, whole = [], sharing._compressed
    monkeypatch.setattr(sharing, "_compressed", lambda *given: made.append(1) or whole(*given))
    each = models.prefill_each(decoder(), TOKENS, lengths=LENGTHS, policies=[(STATE, 24)] * 2, block=BLOCK)
    assert made == []
    found = []
    for number, ours in enumerate(each, start=1):
        assert len(made) == number
        found.append((np.array(ours.logits), held(ours.cache)))
        jax.tree.map(lambda array: array.delete(), ours.cache)  # as a step does that writes into it
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize(
    ("settings", "evict_every"),
    first(1, [(dict(policy=STATE, budget=24, question=HELD_BACK), None), (dict(policy="h2o@adakv", budget=24), 1)]),
)
def test_an_answer_to_what_was_prefilled_is_that_of_the_reference(settings, evict_every) -> None:
    settings, more = settings | dict(block=BLOCK), dict(max_new_tokens=9, end=(), evict_every=evict_every)
    prefilled = models.prefill(decoder(), TOKENS, lengths=LENGTHS, **settings)
    out = models.generate(decoder(), prefilled, **settings, **more)
    questions = settings.pop("question", np.zeros(3, int))
    for row, length in enumerate(LENGTHS):
        expected = run(TOKENS[row, :length], **settings, question=questions[row], new_tokens=9, evict_every=evict_every)
        assert answers(out)[row] == expected.tokens
        assert_keeps(out.cache, row, expected)
    steps, _ = streamed(decoder(), prefilled, question=questions, **settings, **more)
    np.testing.assert_array_equal(steps, out.tokens)


@pytest.fixture(scope="module")
def prefilled() -> models.Prefilled:
    return models.prefill(decoder(), TOKENS, lengths=LENGTHS, policy=STATE, budget=24, block=BLOCK, question=HELD_BACK)


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(lengths=LENGTHS), "leave cache= and lengths= out"),
        (dict(question=61), "do not fit prompts of"),
        (dict(policy="tova", budget=20), "not that of 'tova'"),
        (dict(budget=16), "the cache holds 31 tokens per head, but budget and question sum to"),
        (dict(question=None), "the cache holds 31 tokens per head, but budget and question sum to"),
    ],
)
def test_what_does_not_go_with_a_prefilled_prompt_is_refused(change, said, prefilled) -> None:
    settings = dict(policy=STATE, budget=24, question=HELD_BACK, block=BLOCK)
    with pytest.raises(ValueError, match=said):
        models.generate(decoder(), prefilled, **settings | change)


@pytest.mark.parametrize("take", (models.prefill, models.hidden_states, models.prefill_each))
def test_what_was_prefilled_is_no_prompt(take, prefilled) -> None:
    more = dict(policies=["full"]) if take is models.prefill_each else {}
    with pytest.raises(ValueError, match="these tokens are in a cache already"):
        take(decoder(), prefilled, **more)


def test_logits_of_all_tokens_are_no_start_of_an_answer(prefilled) -> None:
    every = prefilled._replace(logits=np.zeros((3, 60, CONFIG.vocab_size), np.float32))
    with pytest.raises(ValueError, match=r"the logits are .*; expected \(3, "):
        models.generate(decoder(), every, policy=STATE, budget=24, question=HELD_BACK, block=BLOCK)


def test_hidden_states_make_the_logits_of_all_tokens() -> None:
    settings = dict(policy=STATE, budget=24, block=BLOCK)
    hidden = models.hidden_states(decoder(), TOKENS, lengths=LENGTHS, question=HELD_BACK, **settings).hidden
    logits = np.asarray(jax.jit(type(decoder()).logits)(decoder(), hidden))
    for row, length in enumerate(LENGTHS):
        expected = run(TOKENS[row, :length], question=HELD_BACK[row], **settings).logits
        np.testing.assert_allclose(logits[row, :length], expected, atol=1e-4, rtol=0)
