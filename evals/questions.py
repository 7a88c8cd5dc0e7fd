"""Freely asked questions about a document in plain English, answered as `models.ask` answers them.

A document hides facts of many forms (who, when, how much, which of two, why, a list, a value that changed later), each
in a sentence among prose. Questions have six wordings each, and one is about something that the text does not say. The
document is read before they are asked, in the model's chat template where it has one. An answer is right if it has one
of the accepted forms; a wrong one is either false or says nothing.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import models
from evals import command_line, evaluator, metrics, prose, report, run_settings, sweep, tasks, texts
from evals.evaluator import Answer, Group, TextSample
from models import asking, commands, fingerprints
from models.commands.shared_flags import add_shared_flags, count

EXAMPLES = """examples:
  python -m evals questions --model smollm2 --policies full,streaming,repeat --budgets 0.25 --samples 2
  python -m evals questions --model smollm2 --text handbook.txt --lengths 1000,2000 --policies gate --budgets 0.1,0.25
      --out runs/questions --json questions.json
"""
TITLE = "Freely asked questions"
CONTENT = sweep.read(Path(__file__).with_suffix(".toml"))
FORMS = {form["name"]: form for form in CONTENT["forms"]}
WORDS: dict[str, Sequence[str] | range] = {
    name: re.split(r"[|\n]", words.strip()) for name, words in CONTENT["words"].items()
}
WORDS |= {"year": range(1750, 1990), "count": range(21, 999)}
ABSENT = "not there"
NEW_TOKENS = 48
SENTENCE = re.compile(r"[A-Z][^.?!\n]{40,200}[.?!](?=\s)")


class Question(NamedTuple):
    """A question: its form and wording, and what makes an answer right; see questions.toml."""

    form: str
    asked: str
    answers: tuple[str, ...] = ()
    all: tuple[str, ...] = ()
    never: tuple[str, ...] = ()


def judge(answer: str, question: Question) -> str:
    """Return "right", "false", or "none" for an answer that is empty or says that the text does not say.

    Case, punctuation, articles and white space do not count, and commas in numbers neither.

    Example:
        >>> from evals.questions import Question, judge
        >>> question = Question("how much", "How much was it?", answers=("1200",))
        >>> judge("It was 1,200 pounds.", question)
        'right'
        >>> judge("The text does not say.", question)
        'none'
    """
    said = f" {metrics.normalised(answer)} "
    has = lambda text: f" {metrics.normalised(text)} " in said  # noqa: E731
    nothing = not said.strip() or any(words in answer.lower() for words in CONTENT["nothing"]["said"])
    if question.form == ABSENT:
        return "right" if nothing else "false"
    right = any(map(has, question.answers)) if question.answers else all(map(has, question.all))
    if right and not any(map(has, question.never)):
        return "right"
    return "none" if nothing else "false"


def draw(seed: int, facts: int) -> tuple[list[tuple[str, float]], list[Question]]:
    """Draw the sentences that state facts, each with its place in the text from 0 to 1, and the questions about them.

    The last question is about what the text does not say. No fact contradicts another one.
    """
    rng = np.random.default_rng(seed)
    stated, questions, seen = list[tuple[str, float]](), list[Question](), set[Any]()
    # Every form comes before one comes again.
    order = [name for _ in range(facts) for name in rng.permutation([name for name in FORMS if name != ABSENT])]
    for name in itertools.chain(order[:facts], [ABSENT]):
        form = FORMS[name]
        chosen = tasks.filling(rng, form, WORDS, seen)
        fill = lambda texts, chosen=chosen: tuple(text.format(**chosen) for text in texts)  # noqa: E731
        first, second = np.sort(rng.random(2))
        if "later" in form:
            stated.append((tasks.pick(rng, fill(form["later"])), float(second)))
        if "stated" in form:
            stated.append((tasks.pick(rng, fill(form["stated"])), float(first)))
        judged = {part: fill(form.get(part, ())) for part in ("answers", "all", "never")}
        questions.append(Question(name, tasks.pick(rng, fill(form["asked"])), **judged))
    return stated, questions


def document(
    seed: int,
    tokenizer: models.Tokenizer,
    length: int,
    stated: Sequence[tuple[str, float]],
    sentences: Sequence[str] = (),
) -> str:
    """Make a text of at most ``length`` tokens, in paragraphs of six sentences, that states facts at their places.

    Args:
        sentences: what stands around the facts: a text's own sentences from a random one on; by default the prose of
            which no training text is made.

    Raises:
        ValueError: the length does not hold the facts.
    """
    rng = np.random.default_rng([seed, length])
    start = int(rng.integers(max(1, len(sentences))))
    coming = itertools.cycle([*sentences[start:], *sentences[:start]]) if sentences else prose.draw(rng)
    size = lambda text: len(tokenizer.encode(text, add_special_tokens=False))  # noqa: E731
    room = length - sum(size(f" {sentence}") for sentence, _ in stated)
    if room < 0:
        taken = f"{len(stated)} statements take {length - room} tokens"
        raise ValueError(f"{taken}, more than the length {length}; lower --facts.")
    filler = list[str]()
    for sentence in coming:
        room -= size(f" {sentence}") + 1
        if room < 0:
            break
        filler.append(sentence)
    body = list(filler)
    for sentence, place in sorted(stated, key=lambda fact: -fact[1]):
        body.insert(int(place * (len(filler) + 1)), sentence)
    return "\n\n".join(" ".join(body[first : first + 6]) for first in range(0, len(body), 6))


def samples(
    tokenizer: models.Tokenizer, length: int, count: int, facts: int, seed: int, sentences: Sequence[str] = ()
) -> list[TextSample]:
    """Draw documents, and make the prompts of their questions as :func:`models.ask` makes them."""
    found = []
    for number in range(count):
        own = seed + number
        stated, questions = draw(own, facts)
        form = asking.Form.of(tokenizer, None)
        read = form.document(document(own, tokenizer, length, stated, sentences))
        found += [
            TextSample([*read, *form.question(one.asked)], len(read), (*one.answers, *one.all), (number, one))
            for one in questions
        ]
    return found


def score(answer: Answer, sample: TextSample) -> float:
    """Return 1 for a right answer, else 0."""
    return float(judge(answer.text, sample.extra[1]) == "right")


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    command_line.add_model_flags(flags)
    command_line.add_setting_flags(flags, budgets="0.25", when="block")
    flags.add_argument("--lengths", default="1000", help="tokens of a document; several by comma")
    flags.add_argument("--samples", type=count, default=4, help="documents per length")
    flags.add_argument("--facts", type=count, default=7, help="facts per document; one question more is asked")
    texts.add_text_flag(flags, otherwise="built-in prose")
    add_shared_flags(flags, "out")
    flags.set_defaults(question="unknown", evict_every=0, batch=8)


def check(flags: argparse.Namespace) -> None:
    """Check the flags before any work."""
    command_line.check_sizes(flags)
    run_settings.make_settings(flags, ("unknown",))
    _sentences(flags)


def make_groups(flags: argparse.Namespace, config: models.Config, tokenizer: models.Tokenizer) -> list[Group]:
    """Make one group per length."""
    sentences = _sentences(flags)
    return [
        Group(
            "questions", length, flags.samples * (flags.facts + 1),
            functools.partial(samples, tokenizer, length, flags.samples, flags.facts, flags.seed, sentences),
            NEW_TOKENS, score, questions=("unknown",), data=fingerprints.digest([CONTENT, sentences]),
            fields=lambda sample: {
                "text": sample.extra[0], "form": sample.extra[1].form, "asked": sample.extra[1].asked,
                "expected": sample.extra[1]._asdict(),
            },
        )
        for length in command_line.check_sizes(flags)
    ]  # fmt: skip


def _sentences(flags: argparse.Namespace) -> list[str]:
    if flags.text is None:
        return []
    found = [" ".join(sentence.split()) for sentence in SENTENCE.findall(texts.read_text(flags.text))]
    if len(found) < 100:
        raise ValueError(f"{flags.text} has {len(found)} sentences of 40 to 200 characters; give a text with 100.")
    return found


def judgements(records: Iterable[Mapping[str, Any]]) -> str:
    """Make the table of right, false and missing answers by policy, and of the right ones by form."""
    counts: dict[Any, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for record in records:
        expected: dict[str, Any] = record["expected"]
        fields: dict[str, Any] = {k: v if isinstance(v, str) else tuple(v) for k, v in expected.items()}
        question = Question(**fields)
        found = counts[record["policy"], record["budget"], record["length"]]
        judged = judge(record["answer"], question)
        found.update([judged, f"{question.form} {judged}", f"{question.form} all"])
    lines = [
        dict(policy=policy, budget=budget, length=length, counts=found)
        for (policy, budget, length), found in counts.items()
    ]

    def kind(name: str) -> tuple[str, Any]:
        return name, lambda line: str(line["counts"][name])

    def form(name: str) -> tuple[str, Any]:
        return name, lambda line: f"{line['counts'][f'{name} right']}/{line['counts'][f'{name} all']}"

    columns: list[tuple[str, Any]] = [
        ("policy", "{policy}"),
        ("budget", lambda line: "all" if line["budget"] is None else str(line["budget"])),
        ("length", "{length}"),
        *[kind(name) for name in ("right", "false", "none")],
        *[form(name) for name in FORMS],
    ]
    return report.table(lines, columns, left=1)


def command(flags: argparse.Namespace) -> None:
    """Run the evaluation: check, read the documents, ask, print the tables, write JSON and picture."""
    records = evaluator.command(flags, make_groups, title=TITLE, notes=_notes, check=check)
    report.show("", judgements(records))


def _notes(flags: argparse.Namespace) -> list[str]:
    around = "built-in prose" if flags.text is None else Path(flags.text).name
    lengths = ", ".join(commands.split_list(flags.lengths))
    return [f"{flags.samples} documents of {lengths} tokens, {flags.facts + 1} questions each, among {around}"]
