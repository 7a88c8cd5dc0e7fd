"""A cache that is kept: questions asked of it are answered as if each had come with its whole document."""

import pytest

import kvjax
import models
from tests.models.tiny import (
    DOCUMENT,
    LENGTHS,
    QUESTIONS,
    SETTINGS,
    STATE,
    TOKENS,
    UNEVEN,
    WINDOW,
    answers,
    assert_keeps,
    bytes_of,
    decoder,
    held,
    lengths_of,
    run,
    streamed,
)
from tests.tiers import first

NEW = 9
POLICIES = (STATE, UNEVEN, WINDOW, "sage(heads='query')", "streaming+positions", "expected_attention(future=8)")
POLICIES += ("laprox(window=4)@model", "cake(window=4)@cake")


def assert_is_from_scratch(out, documents, **settings):
    """Each row's answer and tokens are those of the reference, which was given the whole text."""
    for row, (document, question) in enumerate(zip(documents, QUESTIONS, strict=True)):
        text = [*document, *question]
        expected = run(text, question=len(question), new_tokens=NEW, **settings)
        assert answers(out)[row] == expected.tokens, question
        assert_keeps(out.cache, row, expected)


@pytest.mark.filterwarnings("ignore:.*made to choose once")
@pytest.mark.parametrize(
    "policy",
    [*first(2, POLICIES[:-1]), pytest.param(POLICIES[-1], marks=pytest.mark.nightly)],  # of 15 s, and paged as others
)
def test_questions_on_one_cache_are_runs_from_scratch(policy):
    settings = dict(policy=policy, **SETTINGS)
    kept = models.prefill(decoder(), DOCUMENT, **settings).cache
    asked = dict(max_new_tokens=NEW, end=(), **settings)
    many = models.generate(decoder(), QUESTIONS, cache=kvjax.repeat(kept, 3), question=lengths_of(QUESTIONS), **asked)
    assert_is_from_scratch(many, [DOCUMENT[0]] * 3, **settings)


def test_rows_of_a_cache_differ_in_what_they_have_seen():
    settings, documents = dict(policy=STATE, **SETTINGS), [row[:n] for row, n in zip(TOKENS, LENGTHS, strict=True)]
    kept = models.prefill(decoder(), documents, **settings).cache
    assert kept.next_position.tolist() == LENGTHS.tolist()
    asked = dict(max_new_tokens=NEW, end=(), **settings)
    out = models.generate(decoder(), QUESTIONS, cache=kept, question=lengths_of(QUESTIONS), **asked)
    assert_is_from_scratch(out, documents, **settings)


# Each way, layout and moment once: test_engine_paths compares the ways under each kind of policy.
@pytest.mark.parametrize(
    ("policy", "when", "each_way"),
    first(1, [(WINDOW, "block", "layers"), ("laprox(window=4)@model", "prompt", "one program")]),
    indirect=["each_way"],
)
def test_a_cache_may_be_asked_again(policy, when, each_way):
    settings = dict(policy=policy, when=when, **SETTINGS)
    kept = models.prefill(decoder(), DOCUMENT, **settings).cache
    before = bytes_of(kept)
    asked = dict(cache=kept, max_new_tokens=NEW, end=(), question=5, **settings)
    first_time, second = (models.generate(decoder(), QUESTIONS[:1], **asked) for _ in range(2))
    tokens, last = streamed(decoder(), QUESTIONS[:1], **asked)
    assert answers(first_time) == answers(second) == tokens.tolist()
    assert held(first_time.cache) == held(last)
    assert bytes_of(kept) == before
    expected = run([*DOCUMENT[0], *QUESTIONS[0]], question=5, new_tokens=NEW, **settings)
    assert answers(second)[0] == expected.tokens
    assert_keeps(second.cache, 0, expected)


@pytest.mark.parametrize(
    ("policy", "each_way"),
    first(1, [
        (STATE, "one program"), ("streaming+positions(kind='index')", "layers"), ("snapkv(window=4)@adakv", "layers"),
    ]),
    indirect=["each_way"],
)  # fmt: skip
def test_without_a_policy_nothing_more_leaves(policy, each_way):
    settings = dict(policy=policy, **SETTINGS)
    kept = models.prefill(decoder(), DOCUMENT, **settings).cache
    out = models.generate(decoder(), QUESTIONS[:1], cache=kept, max_new_tokens=NEW, end=(), block=8)
    expected = run([*DOCUMENT[0], *QUESTIONS[0]], question=5, new_tokens=NEW, evict_every=0, **settings)
    assert answers(out)[0] == expected.tokens
    assert_keeps(out.cache, 0, expected)
