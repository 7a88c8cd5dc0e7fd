"""The needle generator: the same on every run, within its length, and with one right answer."""

import numpy as np
import pytest

from evals import prose, tasks
from papers.retriever import data

PLACEMENTS = ("after", "before", "both")
GOLDEN = """\
Wet socks were hung on the rucksacks and dried a little with each mile. A cracked bell can be mended, but whoever \
listens closely will always hear the place. The score of opal basket is 0932. A newly sown field lay across the old \
right of way, and the party went round it in single file. The score of jade glacier is 2976. The chandler sells lamp \
glass by the yard and tobacco by the ounce. The height of lonely cloak is 6065. A retired captain sits by the window \
of the reading room and names every ship by its sound alone.
Question: what is the score of opal basket?
Answer: the score of opal basket is"""


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


class Characters:
    """A token a character, the same on every machine."""

    encode = staticmethod(lambda text: [0, *map(ord, text)])


def test_a_sample_is_the_same_wherever_it_is_made():
    sample = tasks.needle(0, Characters, 700, depth=0.5, facts=3)
    assert sample.prompt == GOLDEN
