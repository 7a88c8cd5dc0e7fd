"""Needle tasks in plain English: facts hidden in prose, look-alikes among them, and a question about one.

A fact states the code (or weight, price, ...) of a key. The key is one or two words and the value four random digits,
so an answer cannot be guessed and has to be read from the context. Everything is a pure function of a seed and of the
sentences in :mod:`evals.prose`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any, Literal, NamedTuple

import numpy as np

from evals import prose

Placement = Literal["after", "before", "both"]
INTRODUCTIONS = (
    "",
    "Note that",
    "Remember that",
    "It is known that",
    "According to the judge,",
    "In the old market,",
    "As usual,",
    "Everyone said that",
)


class Fact(NamedTuple):
    """A stated fact: the ``attribute`` of ``key`` is ``value``."""

    attribute: str
    key: str
    value: str


class Sample(NamedTuple):
    """One question. ``tokens`` encode ``prompt`` and begin with BOS; a model answers well if it continues with
    ``answer_tokens``. The tokens before ``context_end`` are known before the closing question is. ``text`` numbers the
    texts of an evaluation, and ``depth`` says where in its text a needle was placed, from 0 to 1.
    """

    prompt: str
    answer: str
    tokens: list[int]
    answer_tokens: list[int]
    context_end: int
    text: int = 0
    depth: float = 0.0


ATTEMPTS = 10_000  # to draw a fact unlike those before, until there seems to be none


def random_fact(
    rng: np.random.Generator,
    others: Sequence[Fact] = (),
    *,
    two_words: float = 1.0,
    alike: float = 0.0,
) -> Fact:
    """Draw a fact that none of ``others`` contradicts; its value differs from theirs.

    Args:
        two_words: the share of keys with two words ("amber falcon"); the rest have one ("falcon").
        alike: the share of facts that look like one of ``others``: they have the same first or second word, or the
            same key under another attribute.
    """
    taken = {(other.attribute, other.key) for other in others}
    values = {other.value for other in others}
    for _ in range(ATTEMPTS):
        attribute, first, second = pick(rng, prose.ATTRIBUTES), pick(rng, prose.ADJECTIVES), pick(rng, prose.NOUNS)
        key = f"{first} {second}" if rng.random() < two_words else second
        if others and rng.random() < alike:
            other = others[int(rng.integers(len(others)))]
            match int(rng.integers(3)):
                case 0:
                    attribute, key = other.attribute, f"{other.key.split()[0]} {second}"
                case 1:
                    attribute, key = other.attribute, f"{first} {other.key.split()[-1]}"
                case _:
                    key = other.key
        value = f"{int(rng.integers(10_000)):04d}"
        words = key.split()
        real = len(words) == 1 or (words[0] in prose.ADJECTIVES and words[1] in prose.NOUNS)
        if real and (attribute, key) not in taken and value not in values:
            return Fact(attribute, key, value)
    raise ValueError(f"{len(others):,} facts leave no other one that differs from all of them; lower --facts.")


def statement(fact: Fact, introduction: str = "") -> str:
    """Return the sentence that states a fact, such as 'Note that the code of amber falcon is 4719.'"""
    return f"{introduction} the {_of(fact)} is {fact.value}." if introduction else f"The {_of(fact)} is {fact.value}."


def question(fact: Fact) -> str:
    """Return the question that a fact answers."""
    return f"Question: what is the {_of(fact)}?"


def cue(fact: Fact, placement: Placement = "after") -> str:
    """Return the beginning of the answer, such as 'Answer: the code of amber falcon is'.

    After a question it repeats the question's words, as RULER's needles do. A question that was asked before the text
    has to be remembered, so its cue repeats nothing.
    """
    return "Answer:" if placement == "before" else f"Answer: the {_of(fact)} is"


def needle(
    seed: int,
    tokenizer: Any,
    length: int,
    depth: float | None = None,
    facts: int = 10,
    question: Placement = "after",
    haystack: prose.Part = "test",
) -> Sample:
    """Make a prompt of ``length`` tokens with one fact to find among ``facts - 1`` look-alikes, a question and a cue.

    Args:
        seed: everything random in the sample follows from it.
        tokenizer: has ``encode(text)``, which returns ids, or an object with ``.ids``, with BOS in front.
        length: the largest number of prompt tokens; the prompt is shorter by less than a sentence or two.
        depth: the fact's place in the text, from 0 (the beginning) to 1 (the end), moved to a boundary between
            sentences; None draws it.
        facts: the number of facts in the text, including the one that is asked for.
        question: where the question stands: after the text, before it, or both.
        haystack: the part of :mod:`evals.prose` that the other sentences are from; no line of it comes twice.

    Raises:
        ValueError: the depth is outside [0, 1], ``facts`` is below 1, or the length cannot hold the facts.
    """
    return needles(seed, tokenizer, length, depth, facts, question, haystack)[0]


def needles(
    seed: int,
    tokenizer: Any,
    length: int,
    depth: float | None = None,
    facts: int = 10,
    question: Placement = "after",
    haystack: prose.Part = "test",
    asked: int = 1,
) -> list[Sample]:
    """Make prompts of one text, each of which asks for another of its facts.

    ``depth`` is the place of the first prompt's fact; the others lie anywhere. The other arguments, and the errors, are
    those of :func:`needle`.
    """
    if depth is not None and not 0 <= depth <= 1:
        raise ValueError(f"depth is {depth}; expected a number from 0 (the beginning) to 1 (the end).")
    if facts < 1:
        raise ValueError(f"facts is {facts}; expected at least 1.")
    if facts > length:  # checked before they are drawn
        raise ValueError(f"{facts} facts take more than the length {length}; give fewer facts or a greater length.")
    if question not in ("after", "before", "both"):
        raise ValueError(f"question is {question!r}; expected 'after', 'before' or 'both'.")
    if not 1 <= asked <= facts:
        raise ValueError(f"{asked} of {facts} facts are asked for; give a number from 1 to {facts}.")
    rng = np.random.default_rng([seed, length, facts])
    depth = float(rng.random()) if depth is None else depth
    stated = [random_fact(rng)]
    while len(stated) < facts:
        stated.append(random_fact(rng, stated, alike=0.3))
    sentences = [_state(rng, fact) for fact in stated]
    target, others = sentences[0], sentences[1:]
    frames = [_frame(fact, question) for fact in stated[:asked]]

    size = lambda text: len(ids(tokenizer, text)) - 1  # noqa: E731  without BOS
    room = length - 1 - max(size(opening) + size("\n" + closing) for opening, closing in frames)
    room -= sum(size(" " + sentence) for sentence in sentences)
    filler: list[str] = []
    drawn = prose.draw(rng, haystack)
    while room > 0:
        filler.append(next(drawn))
        room -= size(" " + filler[-1])
    places = np.sort(rng.random(len(others)))
    while True:
        body = spread(filler, others, places)
        sizes = np.cumsum([0] + [size(" " + sentence) for sentence in body])
        at = int(np.searchsorted(sizes, depth * sizes[-1], side="right")) - 1
        text = " ".join([*body[:at], target, *body[at:]])
        prompts = [f"{opening}{text}\n{closing}" for opening, closing in frames]
        tokens = [ids(tokenizer, prompt) for prompt in prompts]
        longest = max(map(len, tokens))
        if longest <= length:
            break
        if not filler:
            raise ValueError(
                f"{facts} facts and a question take {longest} tokens, more than the length {length}; "
                "give fewer facts or a greater length."
            )
        filler.pop()
    return [
        Sample(
            prompt,
            fact.value,
            own,
            ids(tokenizer, f"{prompt} {fact.value}")[len(own) :],
            len(ids(tokenizer, opening + text)),
        )
        for prompt, own, fact, (opening, _) in zip(prompts, tokens, stated[:asked], frames, strict=True)
    ]


def pick[Item](rng: np.random.Generator, items: Sequence[Item]) -> Item:
    """Draw one of some texts or numbers."""
    return items[int(rng.integers(len(items)))]


def filling(
    rng: np.random.Generator, form: Mapping[str, Any], words: Mapping[str, Sequence[str] | range], seen: set[Any]
) -> dict[str, str]:
    """Draw what the names in braces of a form's templates stand for, all different.

    Args:
        form: its texts, alone or in lists; ``form["unique"]`` are the names that tell its facts apart.
        words: what is drawn from for each name; "noun2" is another one of "noun".
        seen: what was drawn for facts before, which this one is none of; it is added.
    """
    texts = "".join("".join(part) for part in form.values())
    names = sorted({name for _, name, _, _ in Formatter().parse(texts) if name})
    for _ in range(ATTEMPTS):
        chosen = {name: str(pick(rng, words[name.rstrip("23")])) for name in names}
        apart = (texts, *(chosen[name] for name in form["unique"]))
        if apart not in seen and len({*chosen.values()}) == len(chosen):
            seen.add(apart)
            return chosen
    raise ValueError(f"no fact like {texts!r:.60} is left that differs from those before; lower --facts.")


def _of(fact: Fact) -> str:
    return f"{fact.attribute} of {fact.key}"


def _state(rng: np.random.Generator, fact: Fact) -> str:
    return statement(fact, pick(rng, INTRODUCTIONS) if rng.random() < 0.5 else "")


def _frame(asked: Fact, placement: Placement) -> tuple[str, str]:
    """Return what stands before the text and after it."""
    opening = "" if placement == "after" else f"{question(asked)}\n"
    closing = cue(asked, placement)
    return opening, closing if placement == "before" else f"{question(asked)}\n{closing}"


def spread(filler: list[str], others: list[str], places: np.ndarray) -> list[str]:
    """Insert sentences into the filler, each at its share of the text, in ascending order."""
    body = list(filler)
    for sentence, place in zip(reversed(others), reversed(places), strict=True):
        body.insert(int(place * (len(filler) + 1)), sentence)
    return body


def ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text from a tokenizer that returns them, or an object with ``.ids``."""
    encoded = tokenizer.encode(text)
    return list(getattr(encoded, "ids", encoded))
