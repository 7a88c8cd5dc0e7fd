"""Mathematics for models that reason at length: MATH-500 and AIME from JSONL files, by the answer in the last box.

The records come from a folder with ``math500.jsonl`` or ``aime.jsonl``: one problem per line, with the fields
``problem`` (or ``question``) and ``answer``, as the published files have them. The prompt asks for steps and a boxed
answer; ``--prompts`` reads other wording. An answer is right if it equals the reference after the usual normalisation
(:func:`plain`), or is the same number.

A reasoning model is run with its own sampling: ``--temperature`` and ``--top-p``, and ``--repeats`` answers per
problem, whose mean counts. A policy then evicts in decode, far behind the prompt.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from collections.abc import Mapping
from fractions import Fraction

import models
from evals import answering, command_line, documents, evaluator
from evals.documents import DataSet, Task

EXAMPLES = """examples:
  python -m evals mathematics --model path/to/DeepSeek-R1-Distill-Qwen-7B --chat --data folder --tasks math500
      --temperature 0.6 --top-p 0.95 --policies full,snapkv,rkv --budgets 512,1024 --out runs/math500
  python -m evals mathematics --data folder --tasks aime --repeats 8 --temperature 0.6 --new-tokens 32000
"""
_PROMPT = "{context}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
NEW_TOKENS = 16_384
_UNITS = r"(?:degrees?|cm|mm|m|km|inch(?:es)?|feet|ft|units?|miles?|hours?|minutes?|seconds?|dollars?|cents?|percent)"


def last_answer(text: str) -> str:
    """Return what a text gives as its answer: the content of its last box, or else its last number; "" for neither.

    Example:
        >>> from evals.mathematics import last_answer
        >>> last_answer(r"\\boxed{1}? No: \\boxed{\\sqrt{2}}.")
        '\\\\sqrt{2}'
        >>> last_answer("It is 12.")
        '12'
    """
    for start in reversed([match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]):
        depth = 1
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if not depth:
                return text[start:place].strip()
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?", text)
    return numbers[-1].rstrip(",") if numbers else ""


def plain(answer: str) -> str:
    """Return an answer without what LaTeX adds for the eye, units, and a variable in front, as answers are compared.

    Spaces, dollar and percent signs, degrees, ``\\\\left`` and ``\\\\right`` go; ``\\\\dfrac`` and ``\\\\tfrac`` are
    ``\\\\frac``; braces are put around single arguments; ``a/b`` is a fraction; commas that group thousands go.

    Example:
        >>> from evals.mathematics import plain
        >>> plain(r"x = \\dfrac12 \\text{ cm}"), plain(r"\\left( 1, 0 \\right)")
        ('\\\\frac{1}{2}', '(1,0)')
        >>> plain("$1,000$")
        '1000'
    """
    text = answer.strip().rstrip(".").replace("\n", " ")
    text = re.sub(r"\\(?:left|right|displaystyle|big|Big)(?![a-zA-Z])", "", text)
    text = re.sub(r"\\[!,;:>]|\\quad|\\qquad|~", " ", text).replace("\\ ", " ")
    text = re.sub(r"(?<=[\d})])\s*\\(?:text|mbox|mathrm|textrm)\s*\{[^{}]*\}(?:\^\{?\d\}?)?\s*$", "", text)  # a unit
    text = re.sub(r"\\(?:text|mbox|mathrm|textrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(rf"(?<=\d)\s*{_UNITS}\s*$", "", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|\\\$|\$|\\%|%", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\s+", "", text)
    text = re.sub(r"^[a-zA-Z](?:\([a-zA-Z]\))?(?:=|\\in)", "", text)
    text = re.sub(r"\\frac(\d)(\d)(?!\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac(\d)\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\frac(\{[^{}]*\})(\d)", r"\\frac\1{\2}", text)
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"^(-?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text)
    if re.fullmatch(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", text):
        text = text.replace(",", "")
    return text.removeprefix("+")


def equal(answer: str, reference: str) -> bool:
    """Return whether two answers are, after normalisation, one text, one number, or the same numbers in order."""
    one, other = plain(answer), plain(reference)
    if not one or not other:
        return False
    if one == other:
        return True
    if (value := _number(one)) is not None:
        return value == _number(other)
    if one[0] in "([{" and (one[0], one[-1]) == (other[0], other[-1]):
        parts = [re.split(r",(?![^{(\[]*[})\]])", text[1:-1]) for text in (one, other)]
        if len(parts[0]) == len(parts[1]) > 1:
            return all(map(equal, *parts))
    return False


def _number(text: str) -> Fraction | None:
    """Return the number that a plain answer is: an integer, a decimal, a fraction or a mixed number; None if none."""
    whole = re.fullmatch(r"([-+]?)(\d+)?\\frac\{(-?\d+)\}\{(-?\d+)\}", text)
    if whole:
        sign, own, above, below = whole.groups()
        if not int(below):
            return None
        value = Fraction(int(own or 0)) + Fraction(int(above), int(below))
        return -value if sign == "-" else value
    return Fraction(text) if re.fullmatch(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)", text) else None


_TASK = Task(
    _PROMPT,
    NEW_TOKENS,
    lambda answer, reference, record: float(equal(last_answer(answer), reference)),
    lambda record: [str(record["answer"])],
    lambda record: {"context": record["problem"] if "problem" in record else record["question"]},
)
TASKS = {"math500": _TASK, "aime": _TASK}


def read_tasks(flags: argparse.Namespace) -> Mapping[str, Task]:
    """Return the tasks with the wording and the length of an answer that the flags ask for."""
    found = documents.read_tasks(TASKS, flags.prompts)
    return {name: dataclasses.replace(task, new_tokens=flags.new_tokens) for name, task in found.items()}


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    DATA.add_flags(flags)
    flags.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="most tokens of an answer")
    flags.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token")
    flags.add_argument("--top-p", type=float, help="draw only from the fewest tokens whose probabilities sum to this")
    flags.add_argument("--repeats", type=int, default=1, help="answers per problem, each drawn anew")
    flags.set_defaults(when="block")


def check(flags: argparse.Namespace) -> None:
    """Check the flags before any work."""
    DATA.check(flags)
    command_line.check_least(flags, new_tokens=1, repeats=1)
    if flags.repeats > 1 and flags.temperature == 0:
        raise ValueError(f"--repeats is {flags.repeats}, but at --temperature 0 all answers are the same; raise it.")


def make_groups(flags: argparse.Namespace, config: models.Config, tokenizer: models.Tokenizer) -> list[evaluator.Group]:
    """Make one group per task, in which each problem comes ``--repeats`` times."""
    return [
        dataclasses.replace(group, size=group.size * flags.repeats, draw=functools.partial(_repeated, group, flags))
        for group in DATA.make_groups(flags, config, tokenizer)
    ]


def _repeated(group: evaluator.Group, flags: argparse.Namespace) -> list[answering.Prompt]:
    return list(group.draw()) * flags.repeats


def command(flags: argparse.Namespace) -> None:
    """Run the evaluation."""
    evaluator.command(flags, make_groups, title=DATA.title, notes=DATA.notes, check=check)


def notes(flags: argparse.Namespace) -> list[str]:
    """Return the notes below the table about prompts, sampling and the comparison of answers."""
    drawn = "greedy" if flags.temperature == 0 else f"temperature {flags.temperature:g}, top-p {flags.top_p or 1:g}"
    prompts = "a boxed answer, step by step" if flags.prompts is None else flags.prompts
    return [f"prompts: {prompts}", f"answers: {drawn}, {flags.repeats} per problem; the last box, normalised"]


DATA = DataSet(
    "Mathematics: MATH-500 and AIME", TASKS, 'a JSON file: {"math500": "... {context} ..."}', read_tasks, notes
)
