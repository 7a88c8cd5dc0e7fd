"""Booksum: summaries of a book's chapters, compared with human ones by ROUGE-L.

Kryściński et al. 2021 (arXiv 2105.08209). The records are the rows of test.csv, with the fields ``chapter`` and
``summary_text``, in a folder or on the hub (kmfoda/booksum). The data set comes without prompts, so the wording is our
own; ``--prompts`` reads other wording. The middle of a chapter that is too long is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

import models
from evals import documents, evaluator, metrics
from evals.documents import Task

REPOSITORY = "kmfoda/booksum"
EXAMPLES = """examples:
  python -m evals booksum --data booksum --samples 20 --policies full,snapkv,snapkv+caote --budgets 512
  python -m evals booksum --model path/to/Llama-3.1-8B-Instruct --chat --data hub --budgets 2048 --out runs/booksum
"""
TASKS = {
    "booksum": Task(
        "Here is a chapter of a book.\n\nChapter:\n{context}\n\n"
        "Summarise what happens in the chapter in a few paragraphs.\n\nSummary:",
        512,
        lambda answer, reference, record: metrics.rouge_l(answer, reference),
        lambda record: [record["summary_text"]],
        lambda record: {"context": record["chapter"]},
    )
}


def read_tasks(path: Path | None) -> Mapping[str, Task]:
    """Return the task with the prompt of a JSON file.

    Args:
        path: a file with an object that holds the prompt under "booksum"; None for our own wording.

    Returns:
        The task by its name.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file has another format.

    Example:
        >>> from evals import booksum
        >>> list(booksum.read_tasks(None))
        ['booksum']
    """
    return TASKS if path is None else documents.with_prompts(TASKS, documents.read_object(path), {}, path)


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    documents.add_flags(flags, list(TASKS), 'a JSON file: {"booksum": "... {context} ..."}')


def check(flags: argparse.Namespace) -> None:
    """Check the flags before any work."""
    documents.check(flags, TASKS, _file)
    read_tasks(flags.prompts)


def make_groups(flags: argparse.Namespace, config: models.Config, tokenizer: models.Tokenizer) -> list[evaluator.Group]:
    """Make the one group."""
    return documents.make_groups(flags, config, tokenizer, read_tasks(flags.prompts), _file, _from_hub)


def notes(flags: argparse.Namespace) -> list[str]:
    """Return the notes below the table about prompts and metrics."""
    prompts = "kvjax's own; none is published" if flags.prompts is None else flags.prompts
    return [f"prompts: {prompts}", "metric: ROUGE-L by rouge-score, without stemming"]


def command(flags: argparse.Namespace) -> None:
    """Run the evaluation."""
    evaluator.command(flags, make_groups, title="Booksum: ROUGE-L", notes=notes, check=check)


def _file(task: str) -> str:
    return "test.csv"


def _from_hub(file: str) -> Iterator[str]:
    return documents.lines_of_hub(REPOSITORY, file)
