"""InfiniteBench's 11 English tasks: retrieval, books, dialogue, code and arithmetic beyond 100,000 tokens.

Zhang et al. 2024 (arXiv 2402.13718). The records come from a folder with a file for each task, or from the hub
(xinrongzhang2022/InfiniteBench). The built-in prompts have the published structure in our own wording; ``--prompts``
takes a JSON file with prompts by task. A prompt that is too long loses its middle.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import models
from evals import documents, evaluator, metrics
from evals.documents import Task

REPOSITORY = "xinrongzhang2022/InfiniteBench"
EXAMPLES = """examples:
  python -m evals infinitebench --data InfiniteBench --tasks passkey,kv_retrieval --length 32000 --budgets 1024
  python -m evals infinitebench --model path/to/Llama-3.1-8B-Instruct --data hub --samples 20 --out runs/infinite
"""
_OPTIONS = "A. {option_a}\nB. {option_b}\nC. {option_c}\nD. {option_d}"


def _answers(record: Mapping[str, Any]) -> Sequence[Any]:
    answer = record["answer"]
    return answer if isinstance(answer, list) else [answer]


def _one_list(record: Mapping[str, Any]) -> Sequence[Any]:
    answer = record["answer"]
    return [answer[0] if isinstance(answer[0], list) else answer]


def _right_option(record: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    text = _answers(record)[0]
    return [("ABCD"[record["options"].index(text)], text)]


def _options(record: Mapping[str, Any]) -> dict[str, Any]:
    letters = zip("abcd", record["options"], strict=True)
    return {**record, **{f"option_{letter}": option for letter, option in letters}}


def _call(record: Mapping[str, Any]) -> dict[str, Any]:
    found = re.search(r"(func_\d+)\(-?\d+\)", record["input"])
    if found is None:
        raise KeyError("no call of a function in the input")
    return {**record, "func": found[1], "func_call": found[0]}


def _plain(metric: Any, **more: Any) -> Any:
    return lambda answer, reference, record: metric(answer, reference, **more)


def _name(answer: str, reference: tuple[str, str], record: Mapping[str, Any]) -> float:
    return metrics.named_choice(answer, *reference)


def _choose(answer: str, reference: tuple[str, str], record: Mapping[str, Any]) -> float:
    return metrics.choice(answer, *reference)


_HIDDEN = "Something important is hidden in this text, among much that is not. Find it; you will be asked for it.\n\n"
_BOOK = "Read this book; a question about it follows.\n\n{context}\n\n"
TASKS = {
    "passkey": Task(_HIDDEN + "{context}\n\n{input}\n\nThe pass key is", 6, _plain(metrics.first_number), _answers),
    "number_string": Task(
        _HIDDEN + "{context}\n\n{input}\n\nThe digits are", 12, _plain(metrics.first_number), _answers
    ),
    "kv_retrieval": Task(
        "Find the value of a key in this JSON object.\n\n{context}\n\n{input}", 50, _plain(metrics.word), _answers
    ),
    "longbook_sum_eng": Task(
        "Read this book.\n\n{context}\n\nSummarise it.\n\nSummary:", 1200, _plain(metrics.rouge_l_sum), _answers
    ),
    "longbook_choice_eng": Task(
        _BOOK + f"Question: {{input}}\n{_OPTIONS}\n\nThe letter of the right option is",
        40,
        _choose,
        _right_option,
        _options,
    ),
    "longbook_qa_eng": Task(
        _BOOK + "Question: {input}\nAnswer in a few words.\nAnswer:", 40, _plain(metrics.f1), _answers
    ),
    "longdialogue_qa_eng": Task(
        'In this script the name of one character was replaced by "$$MASK$$" once.\n\n{context}\n\n'
        "The name that stood there is",
        40,
        _plain(metrics.word, upper=True),
        _answers,
    ),
    "math_find": Task(
        "A question about a list follows it.\n\n{context}\n\n{input}", 3, _plain(metrics.first_number), _answers
    ),
    "math_calc": Task(
        "Give the value after each step of an expression, as here.\n\nExpression: 2 + 5 - 3\nValues: [2, 7, 4]\n\n"
        "Expression: {context}\nValues:",
        30_000,
        _plain(metrics.leading_values),
        _one_list,
    ),
    "code_run": Task(
        "This Python code has a function {func}.\n\n{context}\n\nWork out the value of {func_call}. "
        "The value of {func_call} is",
        5,
        _plain(metrics.last_integer),
        _answers,
        _call,
    ),
    "code_debug": Task(
        f"One function of this code was given an error on purpose.\n\n{{context}}\n\nOptions:\n{_OPTIONS}\n\n"
        "The letter of the right option is",
        5,
        _name,
        _right_option,
        _options,
    ),
}


def read_tasks(path: Path | None) -> Mapping[str, Task]:
    """The tasks, with the prompts of a JSON file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file of another format.
    """
    return TASKS if path is None else documents.with_prompts(TASKS, documents.read_object(path), {}, path)


def add_flags(flags: argparse.ArgumentParser) -> None:
    """The command's flags."""
    documents.add_flags(flags, list(TASKS), "a JSON file with prompts by task, with {context} and a record's fields")


def check(flags: argparse.Namespace) -> None:
    """Refuses flags that could not work."""
    documents.check(flags, TASKS, _file, read_tasks)


def make_groups(flags: argparse.Namespace, config: models.Config, tokenizer: models.Tokenizer) -> list[evaluator.Group]:
    """A group a task."""
    return documents.make_groups(flags, config, tokenizer, read_tasks(flags.prompts), _file, _from_hub)


def notes(flags: argparse.Namespace) -> list[str]:
    """What the table says of prompts and metrics."""
    if flags.prompts is not None:
        return [f"prompts: {flags.prompts}"]
    return ["prompts: the published structure, kvjax's wording (--prompts FILE for others); ROUGE by rouge-score"]


def command(flags: argparse.Namespace) -> None:
    """Runs the evaluation."""
    evaluator.command(flags, make_groups, title="InfiniteBench", notes=notes, check=check)


def _file(task: str) -> str:
    return f"{task}.jsonl"


def _from_hub(file: str) -> Iterator[str]:
    with documents.hub_file(REPOSITORY, file).open(encoding="utf-8") as content:
        yield from content
