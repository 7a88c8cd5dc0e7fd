"""InfiniteBench's 11 English tasks: retrieval, books, dialogue, code and arithmetic beyond 100,000 tokens.

Zhang et al. 2024 (arXiv 2402.13718). The records come from a folder with one file per task, or from the hub
(xinrongzhang2022/InfiniteBench). The metrics are those of the published script. The built-in prompts have the published
structure in our own wording; ``--prompts official`` gets the published ones for open models, and ``--prompts FILE``
reads them from JSON or from a copy of the published prompt.py. The middle of a prompt that is too long is left out.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evals import documents, metrics
from evals.documents import DataSet, PublishedFile, Task, metric_of
from models import files

REPOSITORY = "xinrongzhang2022/InfiniteBench"
# The wording is only in the project's repository; the commit and the digest pin it.
PROMPTS = PublishedFile(
    "https://raw.githubusercontent.com/OpenBMB/InfiniteBench/88b3daa6989da2fbe0077170d7a3c84c25d5ae58/src/prompt.py",
    "d49a6891d6bc61522bb428d66a07b092a6bb6bc195aa0fe103eddd6bb39c7f10",
)
OPEN_MODELS = "yarn_mistral_templates"  # the published prompts that the open models' scripts share
EXAMPLES = """examples:
  python -m evals infinitebench --data InfiniteBench --tasks passkey,kv_retrieval --length 32000 --budgets 1024
  python -m evals infinitebench --model path/to/Llama-3.1-8B-Instruct --data hub --prompts official --out runs/infinite
"""
_OPTIONS = "A. {option_a}\nB. {option_b}\nC. {option_c}\nD. {option_d}"


def _answers(record: Mapping[str, Any]) -> Sequence[Any]:
    answer = record["answer"]
    return answer if isinstance(answer, list) else [answer]


def _first_answer(record: Mapping[str, Any]) -> Sequence[Any]:
    return _answers(record)[:1]


def _one_list(record: Mapping[str, Any]) -> Sequence[Any]:
    answer = record["answer"]
    return [answer[0] if isinstance(answer[0], list) else answer]


def _right_option(record: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    text = _answers(record)[0]
    return [("ABCD"[record["options"].index(text)], text)]


def _question(record: Mapping[str, Any]) -> dict[str, Any]:
    return {**record, "question": record["input"]}


def _options(record: Mapping[str, Any]) -> dict[str, Any]:
    letters = dict(zip("ABCD", record["options"], strict=True))
    names = {f"option_{letter.lower()}": option for letter, option in letters.items()}
    return {**_question(record), **names, **{f"OPTION_{letter}": option for letter, option in letters.items()}}


def _list_question(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record's fields with the question in front of the list, as in the published prompt."""
    asked = re.search(r"The .+ of", record["input"])
    if asked is None:
        raise KeyError("no number that is asked for in the input")
    return {**record, "prefix": f"What is {asked[0].lower()[:-3]} in the following list?"}


def _call(record: Mapping[str, Any]) -> dict[str, Any]:
    found = re.search(r"(func_\d+)\(-?\d+\)", record["input"])
    if found is None:
        raise KeyError("no call of a function in the input")
    return {**record, "func": found[1], "func_call": found[0]}


_HIDDEN = "Something important is hidden in this text, among much that is not. Find it; you will be asked for it.\n\n"
_BOOK = "Read this book; a question about it follows.\n\n{context}\n\n"
TASKS = {
    "passkey": Task(_HIDDEN + "{context}\n\n{input}\n\nThe pass key is", 6, metric_of(metrics.first_number), _answers),
    "number_string": Task(
        _HIDDEN + "{context}\n\n{input}\n\nThe digits are", 12, metric_of(metrics.first_number), _answers
    ),
    "kv_retrieval": Task(
        "Find the value of a key in this JSON object.\n\n{context}\n\n{input}", 50, metric_of(metrics.word), _answers
    ),
    "longbook_sum_eng": Task(
        "Read this book.\n\n{context}\n\nSummarise it.\n\nSummary:",
        1200, metric_of(metrics.rouge_l, kind="rougeLsum"), _answers,
    ),
    "longbook_choice_eng": Task(
        _BOOK + f"Question: {{input}}\n{_OPTIONS}\n\nThe letter of the right option is",
        40, lambda answer, option, _: metrics.choice(answer, *option), _right_option, _options,
    ),
    "longbook_qa_eng": Task(
        _BOOK + "Question: {input}\nAnswer in a few words.\nAnswer:", 40, metric_of(metrics.f1), _answers, _question
    ),
    "longdialogue_qa_eng": Task(
        'In this script the name of one character was replaced by "$$MASK$$" once.\n\n{context}\n\n'
        "The name that stood there is",
        40, metric_of(metrics.word, upper=True), _first_answer,
    ),
    "math_find": Task(
        "A question about a list follows it.\n\n{context}\n\n{input}",
        3, metric_of(metrics.first_number), _first_answer, _list_question,
    ),
    "math_calc": Task(
        "Give the value after each step of an expression, as here.\n\nExpression: 2 + 5 - 3\nValues: [2, 7, 4]\n\n"
        "Expression: {context}\nValues:",
        30_000, metric_of(metrics.leading_values), _one_list,
    ),
    "code_run": Task(
        "This Python code has a function {func}.\n\n{context}\n\nWork out the value of {func_call}. "
        "The value of {func_call} is",
        5, metric_of(metrics.last_integer), _answers, _call,
    ),
    "code_debug": Task(
        f"One function of this code was given an error on purpose.\n\n{{context}}\n\nOptions:\n{_OPTIONS}\n\n"
        "The letter of the right option is",
        5, lambda answer, option, _: metrics.named_choice(answer, *option), _right_option, _options,
    ),
}  # fmt: skip


def read_tasks(path: Path | None) -> Mapping[str, Task]:
    """Return the tasks with the prompts of a file: JSON with prompts by task, or a copy of the published prompt.py.

    ``path`` may be "official", for the published prompts, or None, for our own wording. FileNotFoundError or ValueError
    where the file is not there, or has another format.
    """
    if path == documents.OFFICIAL:
        prompts = _assigned(documents.published_text(PROMPTS), PROMPTS.address)
        return documents.with_prompts(TASKS, prompts, {}, PROMPTS.address)
    if path is not None and path.suffix == ".py":
        return documents.with_prompts(TASKS, _assigned(files.read_text(path, "prompts"), path), {}, path)
    return documents.read_tasks(TASKS, path)


def notes(flags: argparse.Namespace) -> list[str]:
    """Return the notes below the table about prompts and metrics."""
    if flags.prompts is None:
        found = "the published structure, kvjax's wording (--prompts official for the published ones)"
    else:
        found = "as published for open models" if flags.prompts == documents.OFFICIAL else str(flags.prompts)
    return [f"prompts: {found}", "metrics: as InfiniteBench's script computes them"]


def _assigned(text: str, source: str | Path) -> dict[str, Any]:
    """Return the prompts that a Python file assigns to ``OPEN_MODELS``, without running the file."""
    try:
        found = [
            ast.literal_eval(line.value)
            for line in ast.parse(text).body
            if isinstance(line, ast.Assign) and [ast.unparse(target) for target in line.targets] == [OPEN_MODELS]
        ]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        found = []
    if len(found) != 1 or not isinstance(found[0], dict):
        raise ValueError(f"{source} does not assign prompts to {OPEN_MODELS}; give InfiniteBench's src/prompt.py.")
    return found[0]


DATA = DataSet(
    "InfiniteBench", TASKS,
    "'official', InfiniteBench's prompt.py, or a JSON file with prompts by task, with {context} and other fields",
    lambda flags: read_tasks(flags.prompts), notes, functools.partial(documents.lines_of_hub, REPOSITORY),
)  # fmt: skip
add_flags, check, make_groups, command = DATA.add_flags, DATA.check, DATA.make_groups, DATA.command
