"""RULER's tasks (Hsieh et al. 2024, arXiv 2404.06654): their wording, and samples of any length."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from evals import documents, prose
from evals.evaluator import TextSample
from evals.tasks import spread
from kvjax._src.checks import check_names

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = np.linspace(0, 1, 40)
HOPS = 4  # of variable tracking
LONG = 4096  # from this length on, common words are repeated as often as in RULER's long prompts


class Wording(NamedTuple):
    """A prompt around ``{context}``, and the text that the answer begins with."""

    prompt: str
    answer: str
    needle: str = ""


# {kind} is "number", "numbers", "uuid" or "uuids", {verb} is "is" or "are", {count} is the number of variables, and
# {query} is what the question asks for.
WORDING = {
    "niah": Wording(
        "Remember the {kind} in this text.\n{context}\nQuestion: what {verb} the {kind} of {query}?\n",
        "Answer: the {kind} of {query} {verb}",
        "The {kind} of {key} is {value}.",
    ),
    "vt": Wording(
        "Variables are assigned in this text. Follow each assignment.\n\n{context}\n"
        "Question: which variables have the value {query}?\n",
        "Answer: the {count} variables that have the value {query} are",
    ),
    "cwe": Wording(
        "In this numbered list some words come more often than others. Remember those.\n{context}\n"
        "Question: which 10 words come most often in the list?\n",
        "Answer: the 10 words that come most often are",
    ),
    "fwe": Wording(
        "Count the words of this coded text; the dots do not count.\n{context}\n"
        "Question: which three words come most often?\n",
        "Answer: the three words that come most often are",
    ),
    "qa": Wording(
        "Answer the question from these documents, with the answer alone.\n\n{context}\n\n"
        "Answer the question from the documents above, with the answer alone.\nQuestion: {query}\n",
        "Answer:",
    ),
}


class Needles(NamedTuple):
    """The needles of a task, and the haystack that hides them."""

    haystack: str  # "noise", "essay" or "needle"
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1


NEEDLES = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", values="uuids"),
    "niah_multikey_1": Needles("essay", num_keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", keys="uuids", values="uuids"),
    "niah_multivalue": Needles("essay", num_values=4),
    "niah_multiquery": Needles("essay", num_keys=4, num_queries=4),
}
TASKS = (*NEEDLES, "vt", "cwe", "fwe", "qa_1", "qa_2")
QA = ("qa_1", "qa_2")
ESSAYS = tuple(task for task, needles in NEEDLES.items() if needles.haystack == "essay")
NEW_TOKENS = {**dict.fromkeys(NEEDLES, 128), "vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
SHORT = dict(zip(TASKS, "S1 S2 S3 MK1 MK2 MK3 MV MQ VT CWE FWE QA1 QA2".split(), strict=True))


class Documents(NamedTuple):
    """Texts, and questions about them: each has its answers, the texts that hold them, and texts that are close."""

    texts: list[str]
    questions: list[tuple[str, tuple[str, ...], list[int], list[int]]]


@dataclasses.dataclass(frozen=True)
class Sources:
    """The sources of samples: an essay's sentences (None for built-in prose), and the QA tasks' documents."""

    essay: Sequence[str] | None = None
    documents: Mapping[str, Documents] = dataclasses.field(default_factory=dict)


class Draft(NamedTuple):
    """A sample before it is fitted to its length: the context, the question, the beginning of the answer, and the
    reference answers.
    """

    context: str
    question: str
    answer: str
    references: tuple[str, ...]


def sample(
    task: str,
    index: int,
    tokenizer: Any,
    length: int,
    sources: Sources | None = None,
    *,
    seed: int = 0,
    chat: bool = False,
) -> TextSample:
    """Make the sample ``index`` of a task, as long as fits: prompt and answer take at most ``length`` tokens.

    Args:
        task: one of ``TASKS``.
        index: the same index gives the same sample, whichever others are made.
        sources: what samples are made of; our prose by default.
        chat: put the prompt into the model's chat template, and the beginning of the answer after the assistant's
            header.

    Raises:
        ValueError: the task is unknown, the length cannot hold it, a QA task has no documents, or ``chat`` is asked of
            a tokenizer without a chat template.
    """
    check_names("task", task, TASKS)
    sources = Sources() if sources is None else sources
    if task in QA and task not in sources.documents:
        raise ValueError(f"the task {task} needs a file of questions and documents; name it with --qa.")
    build, least = builder(task, index, length, sources, seed)
    room = length - NEW_TOKENS[task]

    check_fits(task, encoded(build(least), tokenizer, chat), length)
    units = _most_that_fits(lambda units: len(encoded(build(units), tokenizer, chat)), room, least)
    draft = build(least if units is None else units)
    known, _ = _prompt_text(draft, tokenizer, chat)
    tokens = encoded(draft, tokenizer, chat)
    known_tokens = tokenizer.encode(known, add_special_tokens=not chat)
    return TextSample(tokens, documents.common_prefix(known_tokens, tokens), draft.references)


def encoded(draft: Draft, tokenizer: Any, chat: bool) -> list[int]:
    return tokenizer.encode(_prompt_text(draft, tokenizer, chat)[1], add_special_tokens=not chat)


def _prompt_text(draft: Draft, tokenizer: Any, chat: bool) -> tuple[str, str]:
    return documents.prompt_text(tokenizer, draft.context, draft.question, draft.answer, chat=chat)


def check_fits(task: str, smallest: Sequence[int], length: int) -> None:
    room = length - NEW_TOKENS[task]
    if len(smallest) > room:
        raise ValueError(
            f"the task {task} takes at least {len(smallest):,} tokens, but {room:,} are left of the length {length:,} "
            f"beside the {NEW_TOKENS[task]} of the answer; give a greater length."
        )


def _most_that_fits(count: Callable[[int], int], room: int, least: int) -> int | None:
    """Find the largest n >= ``least`` with ``count(n) <= room``, where ``count`` grows about linearly."""
    low, cost = least, count(least)
    if cost > room:
        return None
    first, first_cost = low, cost
    high, high_cost = None, 0
    guess = 2 * low + 8
    for attempt in range(40):
        here = count(guess)
        if here <= room:
            low, cost = guess, here
        else:
            high, high_cost = guess, here
        if high is not None and high - low <= 1:
            break
        if high is None:
            rate = max((cost - first_cost) / (low - first), 1e-3)
            guess = low + 1 + int((room - cost) / rate * 1.01)
        elif attempt < 8:
            guess = min(max(low + (room - cost) * (high - low) // max(high_cost - cost, 1), low + 1), high - 1)
        else:
            guess = (low + high) // 2
    return low


def builder(task: str, index: int, length: int, sources: Sources, seed: int) -> tuple[Callable[[int], Draft], int]:
    """Return a function that makes a sample of n units (lines, sentences, words or documents), and the least n."""
    start = [seed, index, length, TASKS.index(task)]
    fresh = lambda: np.random.default_rng(start)  # noqa: E731  the same numbers for every n
    if task in NEEDLES:
        needles = NEEDLES[task]
        hidden = needles.num_keys * needles.num_values
        essay = _Sentences(sources.essay, seed=start) if needles.haystack == "essay" else None
        return lambda n: _needles(fresh(), needles, n, essay), hidden
    if task == "vt":
        return lambda n: _variables(fresh(), n), 5
    if task == "cwe":
        return lambda n: _common_words(fresh(), n, length), 20
    if task == "fwe":
        vocabulary = max((length - NEW_TOKENS["fwe"]) // 50, 5)
        return lambda n: _frequent_words(fresh(), n, vocabulary), 30
    library = sources.documents[task]
    own = library.questions[index % len(library.questions)][2]
    return lambda n: _question(fresh(), library, index, n), len(own)


class _Sentences:
    """The first n sentences of an essay, repeated where it is too short, or of built-in prose."""

    def __init__(self, essay: Sequence[str] | None, seed: Sequence[int]) -> None:
        self.found: list[str] = []
        self.coming = prose.draw(np.random.default_rng(seed)) if essay is None else itertools.cycle(essay)

    def first(self, count: int) -> list[str]:
        self.found += itertools.islice(self.coming, max(0, count - len(self.found)))
        return self.found[:count]


def _needles(rng: np.random.Generator, task: Needles, units: int, essay: _Sentences | None) -> Draft:
    several = task.num_values * task.num_queries > 1
    one, many = ("number", "numbers") if task.values == "numbers" else ("uuid", "uuids")
    state = lambda key, value: WORDING["niah"].needle.format(kind=one, kinds=many, key=key, value=value)  # noqa: E731
    keys: list[str] = []
    while len(keys) < task.num_keys:
        if (key := _random(rng, task.keys)) not in keys:
            keys.append(key)
    values = {key: [_random(rng, task.values) for _ in range(task.num_values)] for key in keys}
    hidden = [state(key, value) for key in keys for value in values[key]]
    rng.shuffle(hidden)
    queries = [keys[i] for i in rng.permutation(len(keys))[: task.num_queries]]
    if essay is not None:
        sentences = essay.first(units)
        depths = np.sort(rng.choice(DEPTHS, len(hidden), replace=False))
        for needle, depth in reversed(list(zip(hidden, depths, strict=True))):
            sentences.insert(int(depth * units), needle)
        context = " ".join(sentences)
    else:
        other = np.random.default_rng(rng.integers(2**63))  # the first lines are the same for every number of them

        def line() -> str:
            """State a value of a key that is not asked for."""
            while (key := _random(other, task.keys)) in keys:
                pass
            return state(key, _random(other, task.values))

        lines = [NOISE if task.haystack == "noise" else line() for _ in range(units)]
        for needle, place in zip(hidden, np.sort(rng.random(len(hidden)))[::-1], strict=True):
            lines.insert(int(place * (units + 1)), needle)
        context = "\n".join(lines)
    query = queries[0] if len(queries) == 1 else f"{', '.join(queries[:-1])}, and {queries[-1]}"
    words = dict(kind=many if several else one, verb="are" if several else "is", query=query)
    return _draft("niah", context, tuple(value for key in queries for value in values[key]), **words)


def _variables(rng: np.random.Generator, units: int) -> Draft:
    """Make one chain of four hops among noise, after a short example with names of three letters."""
    example = _chain(rng, 3, 5)
    asked = _chain(rng, 5, units)
    shown = f"{example.context}{example.question}{example.answer} {' '.join(example.references)}\n\n"
    return asked._replace(context=shown + asked.context)


def _chain(rng: np.random.Generator, letters: int, units: int) -> Draft:
    names: list[str] = []
    while len(names) <= HOPS:
        if (name := _letters(rng, letters, string.ascii_uppercase)) not in names:
            names.append(name)
    value = str(rng.integers(10_000, 100_000))
    links = [f"VAR {names[0]} = {value}"] + [f"VAR {b} = VAR {a}" for a, b in itertools.pairwise(names)]
    lines = spread([NOISE] * units, links, np.sort(rng.random(len(links))))
    return _draft("vt", "\n".join(lines), tuple(names), query=value, count=str(HOPS + 1))


def _common_words(rng: np.random.Generator, units: int, length: int) -> Draft:
    """Make a list, after an example, with ten frequent words: 30 times against 3 for others; 6 against 1 if short."""
    often, seldom = (30, 3) if length >= LONG else (6, 1)
    example = _word_list(rng, *((40, 10, 3) if length >= LONG else (20, 3, 1)))
    asked = _word_list(rng, units, often, seldom)
    answer = " ".join(f"{place}. {word}" for place, word in enumerate(example.references, 1))
    shown = f"{example.context}{example.question}{example.answer} {answer}\n"
    return asked._replace(context=shown + asked.context)


def _word_list(rng: np.random.Generator, units: int, often: int, seldom: int) -> Draft:
    words = _words()
    known = words[: len(_plain())] if units <= len(_plain()) else words
    drawn = [known[i] for i in rng.permutation(len(known))[:units]]
    common, others = drawn[:10], drawn[10:]
    listed = common * often + others * seldom
    rng.shuffle(listed)
    return _draft("cwe", " ".join(f"{place}. {word}" for place, word in enumerate(listed, 1)), tuple(common))


def _frequent_words(rng: np.random.Generator, units: int, vocabulary: int) -> Draft:
    """Make a text of six-letter words by a zeta law with exponent 2: the top word is dots, the next three are asked."""
    words: list[str] = []
    while len(words) < vocabulary:
        if (word := _letters(rng, 6, string.ascii_lowercase)) not in words:
            words.append(word)
    words[0] = "..."
    text: list[str] = []
    for rank, word in enumerate(words, 1):
        text += [word] * int(units / rank**2 / (math.pi**2 / 6))
    rng.shuffle(text)
    return _draft("fwe", " ".join(text), tuple(words[1:4]))


def _question(rng: np.random.Generator, library: Documents, index: int, units: int) -> Draft:
    query, answers, own, near = library.questions[index % len(library.questions)]
    near = [near[i] for i in rng.permutation(len(near))]
    far = [i for i in rng.permutation(len(library.texts)).tolist() if i not in {*own, *near}]
    others = near + far or own
    wanted = units - len(own)
    chosen = own + (others * (wanted // len(others) + 1))[:wanted]
    order = np.random.default_rng(rng.integers(2**63)).permutation(len(chosen))
    listed = [f"Document {place}:\n{library.texts[chosen[i]]}" for place, i in enumerate(order, 1)]
    return _draft("qa", "\n\n".join(listed), answers, query=query)


def _draft(family: str, context: str, references: tuple[str, ...], **words: str) -> Draft:
    wording = WORDING[family]
    before, after = wording.prompt.split("{context}", 1)
    fill = lambda text: text.format(**words)  # noqa: E731
    return Draft(fill(before) + context, fill(after), fill(wording.answer), references)


def _random(rng: np.random.Generator, kind: str) -> str:
    if kind == "numbers":
        return str(rng.integers(10**6, 10**7))
    if kind == "uuids":
        return str(uuid.UUID(bytes=rng.bytes(16), version=4))
    pick = lambda words: words[int(rng.integers(len(words)))]  # noqa: E731
    return f"{pick(prose.ADJECTIVES)} {pick(prose.NOUNS)}"


def _letters(rng: np.random.Generator, count: int, alphabet: str) -> str:
    return "".join(alphabet[i] for i in rng.integers(len(alphabet), size=count))


@functools.cache
def _plain() -> tuple[str, ...]:
    text = " ".join(prose.sentences("train") + prose.sentences("test"))
    return tuple(sorted({*prose.ADJECTIVES, *prose.NOUNS, *re.findall(r"\b[a-z]{4,}\b", text)}))


@functools.cache
def _words() -> tuple[str, ...]:
    """Return the plain words, followed by compounds, which only a very long list needs."""
    return (*_plain(), *(f"{first}-{second}" for first in prose.ADJECTIVES for second in prose.NOUNS))
