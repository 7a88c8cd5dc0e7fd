"""The needle generator: the same on every run, within its length, and with one right answer."""

import re

import numpy as np
import pytest

from evals import prose, tasks
from train import data

PLACEMENTS = ("after", "before", "both")
GOLDEN = """\
The roof garden belongs to everyone, but only one man waters it. The traveler bought the palace for many years. The \
score of jade glacier is 2976. The judge was late, because the father touched the sacred walnut. The orchestra tuned \
for so long that the audience began to applaud. The score of opal basket is 0932. The old pilot still looks at the sky \
before he butters his bread. The old dog sleeps on the letters that come through the door. The tenor lost his voice on \
the ferry and found it at dinner. There was a garden beside the road, and nobody remembered it. The height of lonely \
cloak is 6065.
Question: what is the score of opal basket?
Answer: the score of opal basket is"""


@pytest.fixture(scope="module")
def tokenizer():
    return data.train_tokenizer()


@pytest.mark.parametrize("question", PLACEMENTS)
def test_same_seed_same_sample(tokenizer, question):
    one = tasks.needle(5, tokenizer, 300, depth=0.3, question=question)
    assert one == tasks.needle(5, tokenizer, 300, depth=0.3, question=question)
    assert one.prompt != tasks.needle(6, tokenizer, 300, depth=0.3, question=question).prompt


@pytest.mark.parametrize("question", PLACEMENTS)
@pytest.mark.parametrize("length", [200, 512, 1024])
def test_length_is_met_but_not_exceeded(tokenizer, question, length):
    for seed in range(8):
        sample = tasks.needle(seed, tokenizer, length, facts=4, question=question)
        assert length - 70 < len(sample.tokens) <= length
        assert sample.tokens == tokenizer.encode(sample.prompt).ids
        assert sample.tokens[0] == tokenizer.token_to_id(data.BOS)


@pytest.mark.parametrize("question", PLACEMENTS)
def test_the_answer_is_stated_once_and_for_the_asked_key_only(tokenizer, question):
    for seed in range(20):
        sample = tasks.needle(seed, tokenizer, 400, facts=10, question=question)
        asked = sample.prompt.split("Question: what is ")[1].split("?")[0]
        assert sample.prompt.lower().count(f"{asked} is {sample.answer}.") == 1
        assert sample.prompt.count(sample.answer) == 1
        text = tokenizer.decode(sample.tokens[: sample.context_end]).lower()
        assert f"{asked} is {sample.answer}." in text and "answer:" not in text


def test_the_continuation_is_four_digits_apart(tokenizer):
    sample = tasks.needle(0, tokenizer, 300)
    assert len(sample.answer_tokens) == 4
    assert tokenizer.decode(sample.answer_tokens).strip() == sample.answer


def test_depth_places_the_fact(tokenizer):
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        for seed in range(5):
            sample = tasks.needle(seed, tokenizer, 800, depth=depth)
            text = sample.prompt[: sample.prompt.index("\nQuestion")]
            before = len(tokenizer.encode(text[: text.index(f" is {sample.answer}.")]).ids)
            assert abs(before / sample.context_end - depth) < 0.08


def test_look_alikes_never_agree():
    rng = np.random.default_rng(0)
    facts = []
    for _ in range(60):
        facts.append(tasks.random_fact(rng, facts, alike=0.6))
    assert len({(fact.attribute, fact.key) for fact in facts}) == len(facts) == len({fact.value for fact in facts})
    words = [fact.key.split() for fact in facts]
    assert all(first in prose.ADJECTIVES and second in prose.NOUNS for first, second in words)
    assert len({first for first, _ in words}) < 50, "some share a word"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(depth=1.5), "depth is 1.5"),
        (dict(facts=0), "at least 1"),
        (dict(question="during"), "'after', 'before' or 'both'"),
        (dict(length=40), "more than the length 40"),
    ],
)
def test_bad_input(tokenizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        tasks.needle(0, tokenizer, **(dict(length=300) | arguments))


class Characters:
    """A token a character, the same on every machine."""

    encode = staticmethod(lambda text: [0, *map(ord, text)])


def test_a_sample_of_our_own_sentences_is_the_same_on_every_python():
    sample = tasks.needle(0, Characters, 700, depth=0.5, facts=3, haystack="fixed")
    assert sample.prompt == GOLDEN


def test_our_own_sentences_are_plain_and_none_of_the_librarys():
    fixed = prose.sentences("fixed")
    assert 200 < len(fixed) == len(set(fixed))
    assert all(re.fullmatch(r"[A-Z][a-z]*( [A-Za-z'\-]+[,;:]?)+\.", sentence) for sentence in fixed)
    assert set(fixed).isdisjoint(prose.sentences("train") + prose.sentences("test"))


def test_the_librarys_sentences_are_those_of_the_python_that_runs(monkeypatch):
    first = prose.digest()
    monkeypatch.setattr(prose, "MODULES", prose.MODULES[:20])
    for cached in (prose._library, prose.digest):
        cached.cache_clear()
    try:
        assert prose.digest() != first
    finally:
        monkeypatch.undo()
        for cached in (prose._library, prose.digest):
            cached.cache_clear()
    assert prose.digest() == first


def test_prose_is_plain_and_held_out():
    train, test = prose.sentences("train"), prose.sentences("test")
    assert len(train) > 1500 and len(test) > 200 and set(train).isdisjoint(test)
    assert not any(character.isdigit() for sentence in train + test for character in sentence)
