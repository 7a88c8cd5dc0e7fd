"""The sentences to hide facts in: many, plain, without facts, each line once in a text, and the same everywhere."""

import itertools
import re

import numpy as np

from evals import prose, ruler_tasks, tasks
from tests.evals.test_ruler import tokenizer_of

PLAIN = re.compile(r"[A-Z][a-z']*( [A-Za-z'\-]+[,;:]?)+\.")
LIKE_A_FACT = re.compile(
    r"\b(answer|code|height|magic|number|password|price|question|score|secret|uuid|value|variable|weight)\b", re.I
)
LINES = prose.HAYSTACK_FILE.read_text(encoding="utf-8").splitlines()


def test_figures_name_the_file_by_this_digest():
    """Another file gives other prompts; records made from the old one keep its digest."""
    assert prose.digest() == "c2be1c50e918e6c0"


def test_the_sentences_are_many_plain_and_no_facts():
    sentences = prose.sentences("train") + prose.sentences("test")
    assert 3000 < len(sentences) == len(set(sentences))
    assert all(PLAIN.fullmatch(sentence) and 8 <= len(sentence.split()) <= 27 for sentence in sentences)
    assert not [sentence for sentence in sentences if LIKE_A_FACT.search(sentence)]


def test_a_line_stands_for_every_choice_of_its_words():
    assert prose._choices("The {cow|old ox} ate {hay|corn}.") == (
        "The cow ate hay.", "The cow ate corn.", "The old ox ate hay.", "The old ox ate corn.",
    )  # fmt: skip
    assert len(prose._lines("train")) + len(prose._lines("test")) == len(LINES)


def line_of(sentence):
    return next(i for i, line in enumerate(prose._lines("test")) if sentence in line)


def test_no_line_comes_twice_before_all_have_come():
    lines = len(prose._lines("test"))
    drawn = list(itertools.islice(prose.draw(np.random.default_rng(0)), 2 * lines))
    for part in (drawn[:lines], drawn[lines:]):
        assert sorted(map(line_of, part)) == list(range(lines))
    assert drawn[:lines] != drawn[lines:]


def test_prompts_of_8192_words_repeat_no_line():
    words = tokenizer_of(str.split)  # a token a word
    for tokens in (tasks.needle(0, words, 8192).tokens, ruler_tasks.sample("niah_single_2", 0, words, 8192).tokens):
        text = " ".join(tokens)
        assert len(tokens) > 8000
        assert not [line for line in prose._lines("test") if sum(map(text.count, line)) > 1]


def test_what_is_trained_on_is_held_out_of_what_is_tested_with():
    train, test = prose.text("train"), prose.text("test")
    assert not [sentence for sentence in prose.sentences("train") if sentence in test]
    assert not [sentence for sentence in prose.sentences("test") if sentence in train]
