"""Mathematics for models that reason at length: MATH-500 and AIME from JSONL files, by the answer in the last box.

The records come from a folder with ``math500.jsonl`` or ``aime.jsonl``: one problem per line, with the fields
``problem`` (or ``question``) and ``answer``, as the published files have them. The prompt asks for steps and a boxed
answer; ``--prompts`` reads other wording. math-verify judges whether an answer equals the reference (:func:`right`).

A reasoning model is run with its own sampling: ``--temperature`` and ``--top-p``, and ``--repeats`` answers per
problem, whose mean counts. A policy then evicts in decode, far behind the prompt.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

import models
from evals import answering, documents, evaluator
from evals.documents import DataSet, Task
from kvjax._src import install
from models import fingerprints
from models.commands.shared_flags import add_shared_flags, count
from models.limited import Limited

EXAMPLES = """examples:
  python -m evals mathematics --model path/to/DeepSeek-R1-Distill-Qwen-7B --chat --data folder --tasks math500
      --temperature 0.6 --top-p 0.95 --policies full,snapkv,rkv --budgets 512,1024 --out runs/math500
  python -m evals mathematics --data folder --tasks aime --repeats 8 --temperature 0.6 --new-tokens 32000
"""
_PROMPT = "{context}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
NEW_TOKENS = 16_384


def last_box(text: str) -> str | None:
    """Return what the last whole box of a text holds; None if it has none.

    Example:
        >>> from evals.mathematics import last_box
        >>> last_box(r"\\boxed{1}? No: \\boxed{\\sqrt{2}}.")
        '\\\\sqrt{2}'
    """
    for start in reversed([match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]):
        depth = 1
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if not depth:
                return text[start:place].strip()
    return None


def right(text: str, reference: str) -> bool:
    """Return whether a text's last box is the reference, or without a box the answer that math-verify finds in it.

    An answer that takes more than ten seconds or 2 GiB to compare is wrong.

    Raises:
        ImportError: math-verify is not installed.

    Example:
        >>> from evals.mathematics import right
        >>> right(r"\\boxed{3}? No: \\boxed{1{,}000}.", "1000")
        True
    """
    box, equal = last_box(text), _judge()
    try:
        return equal(answer=text if box is None else box, reference=reference, boxed=box is not None)
    except ValueError:
        return False


@functools.cache
def _judge() -> Limited:
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError(f"for these tasks {install.needed(['math-verify'], 'eval')}")
    return Limited(Path(__file__).with_name("judge.py"), "equal", seconds=10, gib=2)


_TASK = Task(
    _PROMPT,
    NEW_TOKENS,
    lambda answer, reference, record: float(right(answer, reference)),
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
    flags.add_argument("--new-tokens", type=count, default=NEW_TOKENS, help="most tokens of an answer")
    add_shared_flags(flags, "temperature", "top_p")
    flags.add_argument("--repeats", type=count, default=1, help="answers per problem, each drawn anew")
    flags.set_defaults(when="block")


def check(flags: argparse.Namespace) -> None:
    """Check the flags before any work."""
    _judge()
    DATA.check(flags)
    if flags.repeats > 1 and flags.temperature == 0:
        raise ValueError(f"--repeats is {flags.repeats}, but at --temperature 0 all answers are the same; raise it.")


def make_groups(flags: argparse.Namespace, config: models.Config, tokenizer: models.Tokenizer) -> list[evaluator.Group]:
    """Make one group per task, in which each problem comes ``--repeats`` times."""
    return [
        dataclasses.replace(
            group,
            size=group.size * flags.repeats,
            draw=functools.partial(_repeated, group, flags),
            fields=lambda sample: {"text": fingerprints.digest([int(token) for token in sample.tokens])},
        )
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
    return [f"prompts: {prompts}", f"answers: {drawn}, {flags.repeats} per problem; the last box, by math-verify"]


DATA = DataSet(
    "Mathematics: MATH-500 and AIME", TASKS, 'a JSON file: {"math500": "... {context} ..."}', read_tasks, notes
)
