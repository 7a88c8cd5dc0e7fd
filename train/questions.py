"""Questions about long texts, with their answers: rows that teach a model to look things up in its context.

``python -m train.questions --tokenizer smollm2 --rows 2400 --out questions.jsonl`` writes JSON lines of {"prompt",
"answer", "family"}, which `python -m train.finetune --data` reads. A row is a pure function of the seed and its number.
The families are facts in several wordings, lists of keys, chains of variables, counts, quotations and, with ``--text``,
continuations of a text of one's own. The sentences around them are the part of :mod:`evals.prose` that no evaluation
uses.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

import models
from evals import evaluator, prose, tasks
from models import commands
from models.load import describe

EXAMPLES = """examples:
  python -m train.questions --tokenizer smollm2 --rows 2400 --lengths 256,512 --out questions.jsonl
  python -m train.questions --tokenizer smollm2 --text king-james.txt --out questions.jsonl
"""
# How a fact is stated, asked for, and how its answer begins.
WORDINGS = (
    (
        "The {attribute} of {key} is {value}.",
        "Question: what is the {attribute} of {key}?\nAnswer: the {attribute} of {key} is",
    ),
    ("{key} has the {attribute} {value}.", "What {attribute} does {key} have?\nAnswer:"),
    (
        "Write down {value} as the {attribute} of {key}.",
        "Which {attribute} was written down for {key}?\nIt is",
    ),
    (
        "One of the special numbers for {key}, its {attribute}, is: {value}.",
        "What is the special {attribute} for {key}?\nThe special {attribute} for {key} is",
    ),
    ("[{key}] {attribute} = {value}", "[{key}] {attribute} ="),
)
EVENTS = (
    "The bell rang.",
    "A door closed.",
    "Someone laughed.",
    "The dog barked.",
    "A train passed.",
    "The lamp went out.",
)
COUNTS = "no one two three four five six seven eight nine".split()
SENTENCE = re.compile(r"[A-Z][^.?!\n]{40,160}[.?!](?=\s)")


class Row(NamedTuple):
    """A prompt, its answer, which begins with a space, and the family that it is from."""

    prompt: str
    answer: str
    family: str


Sentences = Sequence[str]
Draft = tuple[Sentences, str, str]  # what is hidden in the text, what is asked, and the answer


def facts(rng: np.random.Generator) -> Draft:
    """State facts in one wording, and ask for one of them.

    Example:
        >>> import numpy as np
        >>> from train import questions
        >>> hidden, asked, answer = questions.facts(np.random.default_rng(0))
        >>> sum(answer in sentence for sentence in hidden)
        1
    """
    stated: list[tasks.Fact] = []
    for _ in range(int(rng.integers(2, 11))):
        stated.append(tasks.random_fact(rng, stated, alike=0.3))
    said, asks = WORDINGS[int(rng.integers(len(WORDINGS)))]
    sentences = [said.format(**fact._asdict()) for fact in stated]
    wanted = stated[int(rng.integers(len(stated)))]
    return [s[:1].upper() + s[1:] for s in sentences], asks.format(**wanted._asdict()), wanted.value


def keys(rng: np.random.Generator) -> Draft:
    """List keys with values, and ask for the value of one.

    Example:
        >>> import numpy as np
        >>> from train import questions
        >>> hidden, asked, answer = questions.keys(np.random.default_rng(0))
        >>> answer in hidden[0], asked.startswith("Look up")
        (True, True)
    """
    count, mark = int(rng.integers(6, 25)), tasks.pick(rng, (": ", " = ", " -> "))
    words = [f"{a}-{n}" for a, n in zip(rng.permutation(prose.ADJECTIVES), rng.permutation(prose.NOUNS), strict=False)]
    values = [str(value) for value in rng.permutation(90_000)[:count] + 10_000]
    wanted = int(rng.integers(count))
    listed = "\n".join(f"{key}{mark}{value}" for key, value in zip(words, values, strict=False))
    return [f"\n{listed}\n"], f"Look up {words[wanted]} in the list.\n{words[wanted]}{mark.rstrip()}", values[wanted]


def chains(rng: np.random.Generator) -> Draft:
    """Give variables values, some by way of others, and ask for the value behind one.

    Example:
        >>> import numpy as np
        >>> from train import questions
        >>> hidden, asked, answer = questions.chains(np.random.default_rng(0))
        >>> sum(sentence.endswith(f" be {answer}.") for sentence in hidden)
        1
    """
    names = list(rng.permutation([f"{a}{b}" for a, b in itertools.product("ABCDEFGHJK", "23456789")]))
    lines: list[list[str]] = []
    values = [str(value) for value in rng.permutation(9_000)[:4] + 1_000]
    ends = []
    for value in values[: int(rng.integers(1, 4))]:
        own = [names.pop() for _ in range(int(rng.integers(2, 5)))]
        lines.append([f"Let {own[0]} be {value}.", *(f"Let {b} be {a}." for a, b in itertools.pairwise(own))])
        ends.append(own[-1])
    wanted = int(rng.integers(len(ends)))
    order = np.sort(rng.random(sum(map(len, lines))))
    places = iter(order)
    placed = sorted((next(places), line) for own in itertools.zip_longest(*lines) for line in own if line)
    return [line for _, line in placed], f"Which number is {ends[wanted]}?\n{ends[wanted]} is", values[wanted]


def counts(rng: np.random.Generator) -> Draft:
    """Repeat an event among others, and ask how often it happened.

    Example:
        >>> import numpy as np
        >>> from train import questions
        >>> hidden, asked, answer = questions.counts(np.random.default_rng(0))
        >>> count = sum(sentence in asked for sentence in hidden)
        >>> questions.COUNTS[count] == answer
        True
    """
    event, other = rng.permutation(EVENTS)[:2]
    often = int(rng.integers(1, 6))
    happened = [event] * often + [other] * int(rng.integers(0, 4))
    return (
        list(rng.permutation(happened)),
        f'How many times does the text say "{event}"? Answer with a word.\nAnswer:',
        COUNTS[often],
    )


def quotations(rng: np.random.Generator) -> Draft:
    """Hide sentences about keys, and ask for one word by word.

    Example:
        >>> import numpy as np
        >>> from train import questions
        >>> hidden, asked, answer = questions.quotations(np.random.default_rng(0))
        >>> answer in hidden
        True
    """
    said = ("{} was last seen near the {}.", "Nobody asked {} about the {}.", "They gave {} a {} and went home.")
    firsts, seconds = rng.permutation(prose.ADJECTIVES)[:4], rng.permutation(prose.NOUNS)
    named = [f"the {first} {second}" for first, second in zip(firsts, seconds, strict=False)]
    hidden = [tasks.pick(rng, said).format(name, thing) for name, thing in zip(named, seconds[4:], strict=False)]
    hidden = [sentence[:1].upper() + sentence[1:] for sentence in hidden]
    wanted = int(rng.integers(len(named)))
    return hidden, f"Quote the sentence about {named[wanted]}.\nQuotation:", hidden[wanted]


# Each family, and its share of the rows.
FAMILIES: dict[str, tuple[Callable[[np.random.Generator], Draft], float]] = {
    "facts": (facts, 0.4),
    "keys": (keys, 0.2),
    "chains": (chains, 0.15),
    "counts": (counts, 0.1),
    "quotations": (quotations, 0.15),
}


def row(seed: int, number: int, tokenizer: models.Tokenizer, length: int, sentences: Sequence[str] = ()) -> Row:
    """Make a row of at most ``length`` tokens, prompt and answer.

    Args:
        seed: the row is a function of it and of ``number``.
        sentences: those of a text; a fifth of the rows then ask how one of them goes on.

    Raises:
        ValueError: no question fits into the length.

    Example:
        >>> import models
        >>> from train import questions
        >>> _, tokenizer = models.load("retriever")
        >>> one = questions.row(0, 0, tokenizer, 256)
        >>> len(tokenizer.encode(one.prompt + one.answer)) <= 256, one.answer[0]
        (True, ' ')
    """
    rng = np.random.default_rng([seed, number])
    size = lambda text: len(tokenizer.encode(text)) - 1  # noqa: E731  without BOS
    if sentences and rng.random() < 0.2:
        return _continuation(rng, size, length, sentences)
    family = str(rng.choice(list(FAMILIES), p=[share for _, share in FAMILIES.values()]))
    draft, _ = FAMILIES[family]
    for _ in range(20):
        hidden, asked, answer = draft(rng)
        places, filler = np.sort(rng.random(len(hidden))), list[str]()
        room = length - 2 - size(_text(hidden, filler, asked, places) + f" {answer}")
        if room < 0:
            continue
        for sentence in prose.draw(rng, "train"):
            room -= size(f" {sentence}") + 1  # two sentences may join in one token more
            if room < 0:
                break
            filler.append(sentence)
        return Row(_text(hidden, filler, asked, places), f" {answer}", family)
    raise ValueError(f"the length {length} holds no question of the family {family!r}; give at least 256 tokens.")


def _text(hidden: Sentences, filler: Sentences, asked: str, places: Float[np.ndarray, "hidden"]) -> str:
    """Return a prompt: what is hidden stands at its places in the filler, in its order."""
    body = list(filler)
    for sentence, place in zip(reversed(hidden), reversed(places), strict=True):
        body.insert(int(place * (len(filler) + 1)), sentence)
    return " ".join(body).replace(" \n", "\n").replace("\n ", "\n") + f"\n{asked}"


def _continuation(rng: np.random.Generator, size: Callable[[str], int], length: int, sentences: Sequence[str]) -> Row:
    """Show a stretch of a text, and ask how one of its sentences goes on."""
    start = int(rng.integers(len(sentences)))
    first = sentences[start]
    words = first.split()
    asked = f'How does the sentence go on that begins "{" ".join(words[:5])}"?\nIt goes on:'
    answer = f" {' '.join(words[5:10])}"
    room, before, after = length - 2 - size(f"{first}\n{asked}{answer}"), list[str](), list[str]()
    if room < 0:
        raise ValueError(f"the length {length} holds no sentence with its question; give at least 256 tokens.")
    for sentence in itertools.islice(itertools.cycle(sentences), start + 1, start + len(sentences)):
        room -= size(f" {sentence}") + 1
        if room < 0:
            break
        (before if rng.random() < 0.5 else after).append(sentence)
    return Row(f"{' '.join([*before, first, *after])}\n{asked}", answer, "continuations")


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command's flags."""
    flags = commands.parser(
        "kvjax-questions",
        "train.questions",
        description="Writes questions about long texts, with answers.",
        examples=EXAMPLES,
    )
    flags.add_argument("--tokenizer", default="smollm2", help="the model whose tokens count")
    flags.add_argument("--rows", type=int, default=2400)
    flags.add_argument("--lengths", default="256,512", help="tokens per row, in turn; several by comma")
    flags.add_argument("--text", type=Path, help="a text whose sentences are asked for, too")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--out", type=Path, required=True, help="the file of JSON lines")
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    flags = parser().parse_args(arguments)
    return commands.run(lambda: _run(flags), "train.questions")


def _run(flags: argparse.Namespace) -> None:
    lengths = [evaluator.positive("length", text) for text in commands.listed("length", flags.lengths, "--lengths 512")]
    if flags.rows < 1:
        raise ValueError(f"--rows is {flags.rows}; give at least 1.")
    commands.check_outputs([flags.out])
    tokenizer = commands.check_tokenizer(flags.tokenizer, describe(flags.tokenizer)[1])
    sentences = [] if flags.text is None else SENTENCE.findall(commands.read_text(flags.text, "text"))
    if flags.text is not None and not sentences:
        raise ValueError(f"{flags.text} holds no sentence of 40 to 160 characters; give a longer text.")
    with (
        commands.replacing(flags.out) as temporary,
        temporary.open("w", encoding="utf-8") as file,
        commands.progress_bar("row", total=flags.rows) as progress,
    ):
        for number in range(flags.rows):
            made = row(flags.seed, number, tokenizer, lengths[number % len(lengths)], sentences)
            file.write(json.dumps(made._asdict(), ensure_ascii=False) + "\n")
            progress.update()
    print(f"rows: {flags.out}")


if __name__ == "__main__":
    raise SystemExit(main())
