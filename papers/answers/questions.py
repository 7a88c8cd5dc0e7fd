"""Questions about long texts, with their answers: rows that teach a model to look things up in its context.

``python -m papers questions --tokenizer smollm2 --rows 2400 --out qa.jsonl`` writes JSON lines of {"prompt",
"answer", "family", "more"}, which `python -m train.finetune --data` reads: a text, and questions about it one after the
other, at most one for 48 tokens. A row is a pure function of the seed and its number. The families are facts in several
wordings, lists of keys, chains of variables, counts, quotations, what people ask a text in a chat and, with ``--text``,
continuations of a text of one's own. The sentences around them are the part of :mod:`evals.prose` that no evaluation
uses; neither do evaluations use a word of the keys, an attribute, or a wording of what is made here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

import models
from evals import command_line, prose, sweep
from evals.tasks import filling, pick, spread
from models import commands, files
from models.commands.shared_flags import add_shared_flags, count
from models.loading import describe

CONTENT = sweep.read(Path(__file__).with_suffix(".toml"))
WORDINGS = [(wording["stated"], wording["asked"]) for wording in CONTENT["wordings"]]
EVENTS = CONTENT["events"]
ADJECTIVES, NOUNS, ATTRIBUTES = (CONTENT[name].split() for name in ("adjectives", "nouns", "attributes"))
WORDS: dict[str, Sequence[str] | range] = {
    name: words.split() for name, words in CONTENT["words"].items() if isinstance(words, str)
}
WORDS |= {"adjective": ADJECTIVES, "noun": NOUNS}
WORDS |= {
    name: [
        form.format(noun=noun, adjective=adjective, first=first)
        for noun, adjective, first in zip(NOUNS, itertools.cycle(ADJECTIVES), itertools.cycle(WORDS["first"]))
        for form in forms
    ]
    for name, forms in CONTENT["words"].items()
    if isinstance(forms, list)
}
WORDS["person"] = [*WORDS["first"], *(f"{first} {last}" for first in WORDS["first"] for last in WORDS["last"])]
WORDS |= {"year": range(1600, 2000), "amount": range(12, 990)}
COUNTS = "no one two three four five six seven eight nine".split()
SENTENCE = re.compile(r"[A-Z][^.?!\n]{40,160}[.?!](?=\s)")


Turn = tuple[str, str]  # what is asked, and the answer


class Row(NamedTuple):
    """A prompt, its answer, which begins with a space, the family that it is from, and more questions with answers."""

    prompt: str
    answer: str
    family: str
    more: list[Turn] = []  # noqa: RUF012  never changed


Sentences = Sequence[str]
Draft = tuple[Sentences, list[Turn]]  # what is hidden in the text, and what may be asked
TOKENS = 48  # of a row for each of its questions


def facts(rng: np.random.Generator) -> Draft:
    """State facts in one wording, and ask for them; some keys share a word, and some have two attributes."""
    stated: dict[tuple[str, str], str] = {}
    wanted, values = int(rng.integers(2, 11)), rng.permutation(10_000)
    while len(stated) < wanted:
        attribute, first, second = (pick(rng, words) for words in (ATTRIBUTES, ADJECTIVES, NOUNS))
        if stated and rng.random() < 0.3:
            other, key = list(stated)[int(rng.integers(len(stated)))]
            one, two = key.split()
            attribute, first, second = ((other, one, second), (other, first, two), (attribute, one, two))[
                int(rng.integers(3))
            ]
        stated.setdefault((attribute, f"{first} {second}"), f"{values[len(stated)]:04d}")
    said, asks = WORDINGS[int(rng.integers(len(WORDINGS)))]
    each = [dict(attribute=attribute, key=key, value=value) for (attribute, key), value in stated.items()]
    sentences = [said.format(**fact) for fact in each]
    return [s[:1].upper() + s[1:] for s in sentences], [(asks.format(**fact), fact["value"]) for fact in each]


def told(rng: np.random.Generator) -> Draft:
    """State what happened, and ask as people do; answers are whole sentences. One question is about nothing stated."""
    sentences, asked, seen, people = list[str](), list[Turn](), set[Any](), list[str]()
    for _ in range(int(rng.integers(4, 17))):
        form = CONTENT["told"][int(rng.integers(len(CONTENT["told"])))]
        chosen = filling(rng, form, WORDS, seen)
        parts = [_pick(rng, form[name]).format(**chosen) for name in ("stated", "later") if name in form]
        for place, part in zip(
            np.sort(rng.integers(len(sentences) + 1, size=len(parts)))[::-1], parts[::-1], strict=True
        ):
            sentences.insert(int(place), _sentence(part))
        which, answers = int(rng.integers(len(form["asked"]))), form["answer"]
        answer = (answers if isinstance(answers, str) else answers[which]).format(**chosen)
        asked.append((_sentence(form["asked"][which].format(**chosen)), _sentence(answer)))
        people += [chosen["person"]] if "person" in chosen else []
    # Half of the time a person of the text and what no form states, else a form about other people and things.
    if people and rng.random() < 0.5:
        question = pick(rng, CONTENT["absent"]["asked"]).format(person=pick(rng, people))
    else:
        form = CONTENT["told"][int(rng.integers(len(CONTENT["told"])))]
        question = pick(rng, form["asked"]).format(**filling(rng, form, WORDS, seen))
    return sentences, [*asked, (_sentence(question), CONTENT["unstated"])]


def _pick(rng: np.random.Generator, texts: str | list[str]) -> str:
    """Return a text, or one of several."""
    return texts if isinstance(texts, str) else pick(rng, texts)


def _sentence(text: str) -> str:
    """Begin with a capital, and write "an" for "a" before a vowel."""
    return re.sub(r"\b([Aa]) (?=[aeio])", r"\1n ", text[:1].upper() + text[1:])


def keys(rng: np.random.Generator) -> Draft:
    """List keys with values, and ask for the values."""
    count, mark = int(rng.integers(6, 25)), pick(rng, (": ", " = ", " -> "))
    words = [f"{a}-{n}" for a, n in zip(rng.permutation(ADJECTIVES), rng.permutation(NOUNS), strict=False)]
    values = [str(value) for value in rng.permutation(90_000)[:count] + 10_000]
    pairs = list(zip(words, values, strict=False))
    listed = "\n".join(f"{key}{mark}{value}" for key, value in pairs)
    return [f"\n{listed}\n"], [(f"Look up {key} in the list.\n{key}{mark.rstrip()}", value) for key, value in pairs]


def chains(rng: np.random.Generator) -> Draft:
    """Give variables values, some by way of others, and ask for the values behind the last ones."""
    names = list(rng.permutation([f"{a}{b}" for a, b in itertools.product("ABCDEFGHJK", "23456789")]))
    lines: list[list[str]] = []
    values = [str(value) for value in rng.permutation(9_000)[:4] + 1_000]
    ends = []
    for value in values[: int(rng.integers(1, 4))]:
        own = [names.pop() for _ in range(int(rng.integers(2, 5)))]
        lines.append([f"Let {own[0]} be {value}.", *(f"Let {b} be {a}." for a, b in itertools.pairwise(own))])
        ends.append(own[-1])
    order = np.sort(rng.random(sum(map(len, lines))))
    places = iter(order)
    placed = sorted((next(places), line) for own in itertools.zip_longest(*lines) for line in own if line)
    asked = [(f"Which number is {end}?\n{end} is", value) for end, value in zip(ends, values, strict=False)]
    return [line for _, line in placed], asked


def counts(rng: np.random.Generator) -> Draft:
    """Repeat two events, and ask how often each happened."""
    often = dict(zip(rng.permutation(EVENTS), map(int, rng.permutation(6)[:2]), strict=False))
    happened = [event for event, count in often.items() for _ in range(count)]
    asks = 'How many times does the text say "{}"? Answer with a word.\nAnswer:'
    return list(rng.permutation(happened)), [(asks.format(event), COUNTS[count]) for event, count in often.items()]


def quotations(rng: np.random.Generator) -> Draft:
    """Hide sentences about keys, and ask for them word by word."""
    said = ("{} was last seen near the {}.", "Nobody asked {} about the {}.", "They gave {} a {} and went home.")
    firsts, seconds = rng.permutation(ADJECTIVES)[:4], rng.permutation(NOUNS)
    named = [f"the {first} {second}" for first, second in zip(firsts, seconds, strict=False)]
    hidden = [pick(rng, said).format(name, thing) for name, thing in zip(named, seconds[4:], strict=False)]
    hidden = [sentence[:1].upper() + sentence[1:] for sentence in hidden]
    asked = [(f"Quote the sentence about {name}.\nQuotation:", said) for name, said in zip(named, hidden, strict=True)]
    return hidden, asked


# Each family, and its share of the rows.
FAMILIES: dict[str, tuple[Callable[[np.random.Generator], Draft], float]] = {
    "facts": (facts, 0.15),
    "keys": (keys, 0.05),
    "chains": (chains, 0.05),
    "counts": (counts, 0.05),
    "quotations": (quotations, 0.05),
    "told": (told, 0.65),
}


def row(seed: int, number: int, tokenizer: models.Tokenizer, length: int, sentences: Sequence[str] = ()) -> Row:
    """Make a row of at most ``length`` tokens, prompt and answer, from its seed and number.

    Where ``sentences`` of a text are given, a fifth of the rows ask how they go on.

    Raises:
        ValueError: no question fits into the length.
    """
    rng = np.random.default_rng([seed, number])
    if sentences and rng.random() < 0.2:
        return _continuation(rng, tokenizer, length, sentences)
    family = str(rng.choice(list(FAMILIES), p=[share for _, share in FAMILIES.values()]))
    draft, _ = FAMILIES[family]
    for _ in range(200):
        hidden, possible = draft(rng)
        asked = [possible[i] for i in rng.permutation(len(possible))[: max(1, length // TOKENS)]]
        places, filler = np.sort(rng.random(len(hidden))), list[str]()
        room = length - _size(tokenizer, _text(hidden, filler, places), asked, family)
        if room < 0:
            continue
        paragraph = int(rng.integers(3, 10)) if family == "told" else length
        for which, sentence in enumerate(prose.draw(rng, "train"), 1):
            if which % paragraph == 0:
                sentence = f"{sentence}\n\n"
            room -= len(tokenizer.encode(f" {sentence}"))
            if room < 0:
                break
            filler.append(sentence)
        return _row(tokenizer, _text(hidden, filler, places), asked, family)
    raise ValueError(f"the length {length} holds no question of the family {family!r}; give more, such as 512.")


def _row(tokenizer: models.Tokenizer, text: str, asked: Sequence[Turn], family: str) -> Row:
    """Return a text and what is asked about it as a row: in the model's chat template where people ask."""
    if family == "told" and tokenizer.chat_template is not None:
        return _chat(tokenizer, text, asked)
    (first, answer), *more = asked
    return Row(f"{text}\n{first}", f" {answer}", family, [(f"\n{other}", f" {answer}") for other, answer in more])


def _chat(tokenizer: models.Tokenizer, text: str, asked: Sequence[Turn]) -> Row:
    """Return a row whose questions are turns of a chat; the text and the first one are one message."""
    messages, turns, before = list[dict[str, str]](), list[Turn](), ""
    for question, answer in asked:
        content = question if messages else f"{text}\n\n{question}"
        messages.append({"role": "user", "content": content})
        prompt = tokenizer.chat(messages)
        ends = "" if len(turns) == len(asked) - 1 else tokenizer.special_tokens["eos_token"]  # training adds the last
        turns.append((prompt[len(before) :], f"{answer}{ends}"))
        before = f"{prompt}{answer}{ends}"
        messages.append({"role": "assistant", "content": answer})
    (prompt, answer), *more = turns
    return Row(prompt, answer, "told", more)


def _size(tokenizer: models.Tokenizer, text: str, asked: Sequence[Turn], family: str) -> int:
    """Count the tokens of a row: those of its prompts and answers, and the end token."""
    row = _row(tokenizer, text, asked, family)
    rest = (tokenizer.continuation(part) for part in (row.answer, *itertools.chain(*row.more)))
    return len(tokenizer.encode(row.prompt)) + sum(map(len, rest)) + 1


def _text(hidden: Sentences, filler: Sentences, places: Float[np.ndarray, "hidden"]) -> str:
    """Return a text: what is hidden stands at its places in the filler, in its order."""
    return " ".join(spread(list(filler), list(hidden), places)).replace(" \n", "\n").replace("\n ", "\n")


def _continuation(rng: np.random.Generator, tokenizer: models.Tokenizer, length: int, sentences: Sentences) -> Row:
    """Show a stretch of a text, and ask how some of its sentences go on."""
    start, held, most = int(rng.integers(len(sentences))), list[str](), max(1, length // TOKENS)
    asks = 'How does the sentence go on that begins "{}"?\nIt goes on:'
    turn = lambda said: (asks.format(" ".join(said.split()[:5])), " ".join(said.split()[5:10]))  # noqa: E731
    for sentence in itertools.islice(itertools.cycle(sentences), start, start + len(sentences)):
        asked = [turn(said) for said in [*held, sentence][:: max(1, (len(held) + 1) // most)][:most]]
        if _size(tokenizer, " ".join([*held, sentence]), asked, "continuations") > length:
            break
        held.append(sentence)
    if not held:
        raise ValueError(f"the length {length} holds no sentence with its question; give at least 256 tokens.")
    asked = [turn(said) for said in held[:: max(1, len(held) // most)][:most]]
    return _row(tokenizer, " ".join(held), [asked[i] for i in rng.permutation(len(asked))], "continuations")


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("--tokenizer", default="smollm2", help="the model whose tokens count")
    flags.add_argument("--rows", type=count, default=2400)
    flags.add_argument("--lengths", default="256,512", help="tokens per row, in turn; several by comma")
    flags.add_argument("--text", type=Path, help="a text whose sentences are asked for, too")
    add_shared_flags(flags, "seed", "out", out=dict(required=True, help="the file of JSON lines"))


def command(flags: argparse.Namespace) -> None:
    """Write the rows."""
    lengths = command_line.check_sizes(flags)
    files.check_outputs([flags.out])
    tokenizer = commands.check_tokenizer(flags.tokenizer, describe(flags.tokenizer)[1])
    sentences = [] if flags.text is None else SENTENCE.findall(files.read_text(flags.text, "text"))
    if flags.text is not None and not sentences:
        raise ValueError(f"{flags.text} holds no sentence of 40 to 160 characters; give a longer text.")
    with (
        files.replacing(flags.out) as temporary,
        temporary.open("w", encoding="utf-8") as file,
        commands.progress_bar("row", total=flags.rows) as progress,
    ):
        for number in range(flags.rows):
            made = row(flags.seed, number, tokenizer, lengths[number % len(lengths)], sentences)
            file.write(json.dumps(made._asdict(), ensure_ascii=False) + "\n")
            progress.update()
    print(f"rows: {flags.out}")
