"""One prompt under many policies: each result is what that policy gives alone."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import models
from models import by_layer, sharing
from models.config import Rope

TOKENS = np.random.default_rng(0).integers(0, 64, (3, 90))
LENGTHS = np.array([90, 60, 75])
ASKED = (
    "full",
    ("snapkv(window=8)", 0.3),
    ("snapkv(window=16)+caote", 0.3),
    ("h2o+caote+protect(recent=0.5)", 24),
    ("h2o+caote+protect(recent=0.5)", 40),
    ("tova(heads='group')+caote", 0.2),
    ("h2o@adakv", 24),
    ("laprox(window=16)@model", 40),
    ("expected_attention", 0.3),
    ("kvzip(chunk=16)@layer", 0.4),
    ("kvzip(chunk=16)+caote", 24),
    ("snapkv(window=8)+merge", 20),
)


def model(**more: Any) -> models.Decoder:
    config = models.Config(64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2, **more)
    return models.Decoder(config, rngs=nnx.Rngs(0))


def assert_same(ours: models.Prefilled, alone: models.Prefilled) -> None:
    for found, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(alone), strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, atol=1e-5)


def policy_and_budget(asked: Any) -> dict[str, Any]:
    policy, budget = asked if isinstance(asked, tuple) else (asked, None)
    return dict(policy=policy, budget=budget)


@pytest.mark.parametrize(
    "question, asked_of_each", [(None, ASKED[::3]), ((7, 0, 5), ASKED)], ids=("known", "held back")
)
def test_each_result_is_that_of_its_policy_alone(question, asked_of_each) -> None:
    decoder = model()
    settings = dict(block=16, when="prompt", question=None if question is None else np.array(question))
    each = models.prefill_each(decoder, TOKENS, LENGTHS, policies=asked_of_each, **settings)
    for asked, ours in zip(asked_of_each, each, strict=True):
        assert_same(ours, models.prefill(decoder, TOKENS, LENGTHS, **policy_and_budget(asked), **settings))


def test_layers_one_by_one_give_the_same(monkeypatch) -> None:
    decoder, asked = model(), ("full", ("h2o+caote", 24), ("snapkv(window=8)@adakv", 24))
    settings = dict(block=16, when="prompt", question=3)
    one = list(models.prefill_each(decoder, TOKENS, policies=asked, **settings))
    monkeypatch.setattr(by_layer, "LARGE_LAYER", 0)
    for ours, alone in zip(models.prefill_each(decoder, TOKENS, policies=asked, **settings), one, strict=True):
        assert_same(ours, alone)


def test_the_model_runs_once_for_all_that_evict_once(monkeypatch) -> None:
    passes = []
    whole = sharing._block
    monkeypatch.setattr(sharing, "_block", lambda *given: passes.append(1) or whole(*given))
    asked = ("full", *(("h2o", budget) for budget in (8, 16, 24)), ("snapkv(window=8)", 16))
    alone = lambda *given, **more: pytest.fail("a policy ran by itself")  # noqa: E731
    monkeypatch.setattr(sharing, "prefill", alone)
    assert len(list(models.prefill_each(model(), TOKENS[:1], policies=asked, block=16))) == 5
    assert len(passes) == 6  # 90 tokens in blocks of 16


def test_what_is_fed_again_is_fed_once_for_all_that_observe_it(monkeypatch) -> None:
    passes = []
    whole = sharing._block
    monkeypatch.setattr(sharing, "_block", lambda *given: passes.append(1) or whole(*given))
    asked = (("kvzip(chunk=45)", 8), ("kvzip(chunk=45)", 24), ("dapq(window=4)", 8), ("dapq(window=4)", 24))
    assert len(list(models.prefill_each(model(), TOKENS[:1], policies=asked, block=16))) == 4
    # The prompt, then two parts of 45 tokens, the second behind the words before it; and the prompt, then 4 tokens.
    assert len(passes) == (6 + 2 * 4) + (6 + 1)


@pytest.mark.parametrize("asked, when", [("h2o", "block"), ("streaming+positions", "prompt"), ("sage", "prompt")])
def test_what_has_nobody_to_share_with_runs_by_itself(asked, when) -> None:
    decoder = model()
    settings = dict(block=32, when=when)
    each = models.prefill_each(decoder, TOKENS, LENGTHS, policies=(asked, "full", "full"), budget=40, **settings)
    assert_same(next(each), models.prefill(decoder, TOKENS, LENGTHS, policy=asked, budget=40, **settings))


def test_results_are_made_when_their_turn_comes(monkeypatch) -> None:
    made = []
    whole = sharing._compressed
    monkeypatch.setattr(sharing, "_compressed", lambda *given: made.append(1) or whole(*given))
    each = models.prefill_each(model(), TOKENS[:1], policies=[("h2o", budget) for budget in (8, 16, 24)], block=16)
    assert made == []
    next(each)
    assert made == [1]


def test_a_result_may_be_used_up_before_the_next_is_made() -> None:
    decoder, asked = model(), ("full", "full", ("h2o", 20), ("h2o", 20))
    found = [
        models.generate(decoder, ours, max_new_tokens=5, end=(), evict_every=0, **policy_and_budget(one)).tokens
        for one, ours in zip(asked, models.prefill_each(decoder, TOKENS, policies=asked, block=16), strict=True)
    ]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[2], found[3])


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
        models.prefill_each(model(), TOKENS, policies=policies, block=32)


# From what prefill gave to an answer.

ANSWERED = (
    dict(policy="full"),
    dict(policy="snapkv(window=8)", budget=0.3, when="prompt"),
    dict(policy="h2o+caote", budget=24, question=np.array([7, 3, 5])),
    dict(policy="h2o@adakv", budget=24),
    dict(policy="snapkv(window=8)@adakv", budget=0.4, when="prompt", question=np.array([7, 0, 5])),
)
EVERY = (0, None, 0, 1, None)  # each way to evict in decode


@pytest.mark.parametrize("settings, evict_every", [*zip(ANSWERED, EVERY, strict=True)])
def test_an_answer_to_what_was_prefilled_is_that_of_one_call(settings, evict_every) -> None:
    decoder, more = model(), dict(max_new_tokens=9, end=(), evict_every=evict_every)
    one = models.generate(decoder, TOKENS, lengths=LENGTHS, block=16, **settings, **more)
    prefilled = models.prefill(decoder, TOKENS, LENGTHS, block=16, **settings)
    two = models.generate(decoder, prefilled, block=16, **settings, **more)
    np.testing.assert_array_equal(one.tokens, two.tokens)
    assert one.cache.nbytes == two.cache.nbytes
    steps = [token for token, _ in models.stream(decoder, prefilled, block=16, **settings, **more)]
    np.testing.assert_array_equal(np.stack(steps, axis=1), one.tokens)


def test_answers_are_drawn_with_the_key_of_one_call() -> None:
    decoder, more = model(), dict(max_new_tokens=6, end=(), temperature=1.0, key=jax.random.key(3))
    one = models.generate(decoder, TOKENS, **more).tokens
    np.testing.assert_array_equal(models.generate(decoder, models.prefill(decoder, TOKENS), **more).tokens, one)


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(lengths=[90, 60, 75]), "leave cache= and lengths= out"),
        (dict(question=91), "a question is the last part"),
        (dict(policy="h2o", budget=20), "not that of 'h2o'"),
    ],
)
def test_what_does_not_go_with_a_prefilled_prompt_is_refused(change, said) -> None:
    decoder = model()
    with pytest.raises(ValueError, match=said):
        models.generate(decoder, models.prefill(decoder, TOKENS), **change)


@pytest.mark.parametrize("take", (models.prefill, models.hidden_states, models.prefill_each))
def test_what_was_prefilled_is_no_prompt(take) -> None:
    decoder = model()
    more = dict(policies=["full"]) if take is models.prefill_each else {}
    with pytest.raises(ValueError, match="these tokens are in a cache already"):
        take(decoder, models.prefill(decoder, TOKENS), **more)


@pytest.mark.parametrize("change", (dict(budget=10), dict(question=None)))
def test_an_answer_under_a_smaller_budget_than_the_prompt_is_refused(change) -> None:
    decoder, settings = model(), dict(policy="h2o", budget=24, question=10)
    prefilled = models.prefill(decoder, TOKENS, **settings)
    with pytest.raises(ValueError, match="the cache holds 34 tokens per head, but budget and question sum to"):
        models.generate(decoder, prefilled, **(settings | change))
    models.generate(decoder, prefilled, evict_every=0, max_new_tokens=2, **(settings | change))


@pytest.mark.parametrize("question", (None, 5))
def test_a_dynamic_rope_beyond_its_length_is_as_alone(question) -> None:
    rope = Rope(type="dynamic", factor=2.0, original_positions=24)
    decoder, settings = model(rope=rope), dict(block=16, when="prompt", question=question)
    asked = ("full", ("h2o", 24), ("h2o", 40))
    for one, ours in zip(asked, models.prefill_each(decoder, TOKENS, policies=asked, **settings), strict=True):
        assert_same(ours, models.prefill(decoder, TOKENS, **policy_and_budget(one), **settings))
    more = dict(policy="h2o", budget=40, max_new_tokens=4, end=())
    again = models.generate(decoder, ours, question=question, block=16, **more).tokens
    np.testing.assert_array_equal(again, models.generate(decoder, TOKENS, **settings, **more).tokens)


def test_logits_of_all_tokens_are_no_start_of_an_answer() -> None:
    decoder = model()
    with pytest.raises(ValueError, match="expected those of each row's last token"):
        models.generate(decoder, models.prefill(decoder, TOKENS, outputs="all"))


def test_hidden_states_make_the_logits_of_all_tokens() -> None:
    decoder, settings = model(), dict(policy="h2o", budget=20, block=16, question=5)
    logits = models.prefill(decoder, TOKENS, LENGTHS, outputs="all", **settings).logits
    hidden = models.hidden_states(decoder, TOKENS, LENGTHS, **settings).hidden
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(decoder.logits(hidden[row, :length]), logits[row, :length], atol=1e-6)
