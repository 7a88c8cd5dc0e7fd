"""Tasks that choose among continuations of a prompt, made from a text, by seed.

- continuation: which of four sentences comes next? The three wrong ones have about the same length.
- section: sentences of two sections, each followed by its section's title. Which title belongs to the last sentence?
- recall: a few words of the passage are repeated. Which of four words of the passage followed them?

A choice is scored by the log-probability of its tokens after the prompt: the sum, or for continuations the mean per
byte. The question is the last sentence of a continuation's passage, the sentence without a
title, or the repeated words. It is known when the context is compressed ("known"), or held back ("unknown"). By
chance, one choice in four is right, and one in two for sections.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from evals import texts
from evals.documents import common_prefix
from kvjax._src.checks import check_names

BY_CHANCE = "by chance: 0.25, of section 0.50"
CHOICES = 4
CUE = 3
ATTEMPTS = 1000


@dataclasses.dataclass(frozen=True)
class Sample:
    """A prompt, and the choices that may follow it."""

    tokens: list[int]  # of the prompt
    context_end: int  # the tokens before it are known before the question is
    choices: tuple[list[int], ...]
    right: int  # the index of the right choice
    sizes: tuple[int, ...]  # the divisor of each choice's log-probability


@dataclasses.dataclass(frozen=True)
class Draft:
    """A sample as text: the question follows the passage, and each choice follows both."""

    passage: str
    question: str
    choices: tuple[str, ...]
    right: int
    by_byte: bool = False


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text's sentences in order, and each section's title, first sentence, and end among them."""

    sentences: tuple[str, ...]
    sections: tuple[tuple[str, int, int], ...]


def read_corpus(text: str) -> Corpus:
    """Find the sentences of a text that are prose, and its sections as :func:`evals.texts.sections` reads them.

    Raises:
        ValueError: the text has fewer than 100 sentences.
    """
    found: list[str] = []
    places: list[tuple[str, int, int]] = []
    for title, paragraphs in texts.sections(text).items():
        start = len(found)
        for paragraph in paragraphs:
            found += [part for part in re.split(r"(?<=[.!?]) (?=[\"'“‘(]?[A-Z])", paragraph) if _is_prose(part)]
        places.append((title, start, len(found)))
    if len(found) < 100:
        raise ValueError(f"the text has {len(found)} sentences, but choices need at least 100; give a longer text.")
    return Corpus(tuple(found), tuple(places))


def draw(task: str, index: int, corpus: Corpus, tokenizer: Any, length: int, *, seed: int = 0) -> Sample:
    """Draw the sample of a number; the same seed gives the same one on every machine and for every policy.

    ``length`` is the largest number of tokens of prompt and choice together.

    Raises:
        ValueError: the task is unknown, or cannot be made from this text at this length.
    """
    check_names("task", task, TASKS)
    rng = np.random.default_rng([seed, index, length, list(TASKS).index(task)])
    count = functools.cache(lambda text: len(tokenizer.encode(text)))
    for _ in range(ATTEMPTS):
        draft = TASKS[task](rng, corpus, lambda text: count(" " + text), length)
        if draft is None:
            continue
        sample = _encoded(draft, tokenizer)
        if len(sample.tokens) + max(map(len, sample.choices)) <= length:
            return sample
    raise ValueError(f"no {task} of {length} tokens was found in the text; give a longer text, or another length.")


Count = Callable[[str], int]


def continuation(rng: np.random.Generator, corpus: Corpus, count: Count, length: int) -> Draft | None:
    """Draft a passage and four sentences that may come next, or return None where this draw does not serve."""
    end = int(rng.integers(2, len(corpus.sentences)))
    wanted = corpus.sentences[end]
    near = [s for s in corpus.sentences if abs(len(s) - len(wanted)) <= len(wanted) // 5]
    others = [near[int(i)] for i in rng.integers(len(near), size=4 * CHOICES)]
    passage = _before(corpus, end - 1, count, length - count(corpus.sentences[end - 1]) - 2 * count(wanted))
    if not 40 <= len(wanted) <= 300 or passage is None or len(passage) < 2:
        return None
    others = [s for s in dict.fromkeys(others) if s != wanted and s not in passage]
    if len(others) < CHOICES - 1:
        return None
    given, right = _shuffled(rng, wanted, others[: CHOICES - 1])
    return Draft(" ".join(passage), f" {corpus.sentences[end - 1]}", tuple(f" {s}" for s in given), right, by_byte=True)


def section(rng: np.random.Generator, corpus: Corpus, count: Count, length: int) -> Draft | None:
    """Draft sentences of two sections, each followed by its title, or return None where this draw does not serve."""
    large = [place for place in corpus.sections if place[0] and place[2] - place[1] >= 20]
    if len(large) < 2:
        raise ValueError(
            "the text has fewer than 2 titled sections of 20 sentences, which the task section is made of; leave it "
            "out, or write titles into the text as in '== Genesis =='."
        )
    pair = [large[int(i)] for i in rng.choice(len(large), size=2, replace=False)]
    orders = [list(rng.permutation(np.arange(start, end))) for _, start, end in pair]
    titles = tuple(f" {title}" for title, _, _ in pair)
    parts: list[str] = []
    right = int(rng.integers(2))
    question = f"{corpus.sentences[orders[right].pop()]} --"
    room = length - count(question) - 2 * max(map(count, titles)) - 8
    while all(orders):
        for side in rng.permutation(2):  # equally many of both sections
            parts.append(f"{corpus.sentences[orders[side].pop()]} --{titles[side]}\n\n")
        room -= sum(count(part) + 2 for part in parts[-2:])
        if room < 0:
            del parts[-2:]
            break
    return Draft("".join(parts), question, titles, right) if len(parts) >= 4 else None


def recall(rng: np.random.Generator, corpus: Corpus, count: Count, length: int) -> Draft | None:
    """Draft a passage and the words before one sentence's last word, or return None where this draw does not serve."""
    end = int(rng.integers(2, len(corpus.sentences)))
    passage = _before(corpus, end, count, length - 32)
    ends = [] if passage is None else [s for s in passage if _last_word(s) and len(s.split()) > CUE]
    if passage is None or not ends:
        return None
    *_, cue, wanted = re.split(rf" ((?:\S+ ){{{CUE}}})(?=\S+$)", f" {ends[int(rng.integers(len(ends)))][:-1]}")
    whole = " ".join(passage)
    words = set(re.findall(r"(?<= )[a-z]{4,}(?=[ .,;:!?])", whole)) - {wanted}
    # The wrong words end like the right one, so that word forms alone do not give the answer away.
    alike = sorted(words, key=lambda word: (-_same_end(word, wanted), abs(len(word) - len(wanted)), word))
    if whole.count(f" {cue}") != 1 or len(alike) < CHOICES - 1:
        return None
    given, right = _shuffled(rng, wanted, alike[: CHOICES - 1])
    return Draft(whole, f"\n\nAs it is written above: {cue.rstrip()}", tuple(f" {word}" for word in given), right)


TASKS: dict[str, Callable[[np.random.Generator, Corpus, Count, int], Draft | None]] = {
    "continuation": continuation,
    "section": section,
    "recall": recall,
}


def likeliest(sample: Sample, log_probability: Float[np.ndarray, "n"]) -> int:
    """Return the index of the choice that is chosen, from the log-probability of each choice's tokens."""
    return int(np.argmax(log_probability / np.array(sample.sizes)))


def _is_prose(sentence: str) -> bool:
    letters = sum(letter.isalpha() or letter in " ,;:'’.-" for letter in sentence)
    return 20 <= len(sentence) <= 600 and sentence[-1] in ".!?" and letters >= 0.9 * len(sentence)


def _before(corpus: Corpus, end: int, count: Count, room: int) -> list[str] | None:
    """Return the sentences before one, as many as fit into ``room`` tokens; None where the text has too few."""
    found: list[str] = []
    for place in range(end - 1, -1, -1):
        room -= count(corpus.sentences[place])
        if room < 0:
            return found[::-1]
        found.append(corpus.sentences[place])
    return None


def _last_word(sentence: str) -> str | None:
    """Return a sentence's last word without its mark, or None unless it is at least four small letters."""
    found = re.search(r" ([a-z]{4,})[.!?]$", sentence)
    return None if found is None else found[1]


def _same_end(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one[::-1], other[::-1], strict=False)) if a != b), len(one))


def _shuffled(rng: np.random.Generator, wanted: str, others: Sequence[str]) -> tuple[list[str], int]:
    given = list(others)
    right = int(rng.integers(len(given) + 1))
    given.insert(right, wanted)
    return given, right


def _encoded(draft: Draft, tokenizer: Any) -> Sample:
    """Encode each choice together with its prompt, so that words at the border are split as they are inside a text."""
    prompt = draft.passage + draft.question
    tokens = tokenizer.encode(prompt)
    found = [tokenizer.encode(prompt + choice)[len(tokens) :] for choice in draft.choices]
    sizes = [len(choice.encode()) if draft.by_byte else 1 for choice in draft.choices]
    known = common_prefix(tokens, tokenizer.encode(draft.passage))
    return Sample(tokens, known, tuple(found), draft.right, tuple(sizes))
