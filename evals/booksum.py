"""Booksum: summaries of a book's chapters, compared with human ones by ROUGE-L.

Kryściński et al. 2021 (arXiv 2105.08209). The records are those of test.csv, with the fields ``chapter`` and
``summary_text``, in a folder or on the hub (kmfoda/booksum). The data set comes without prompts, so the wording is our
own; ``--prompts`` reads other wording. The middle of a chapter that is too long is left out.
"""

from __future__ import annotations

import argparse
import functools

from evals import documents, metrics
from evals.documents import DataSet, Task

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
        documents.metric_of(metrics.rouge_l),
        lambda record: [record["summary_text"]],
        lambda record: {"context": record["chapter"]},
    )
}


def notes(flags: argparse.Namespace) -> list[str]:
    """Return the notes below the table about prompts and metrics."""
    prompts = "kvjax's own; none is published" if flags.prompts is None else flags.prompts
    return [f"prompts: {prompts}", "metric: ROUGE-L by rouge-score, without stemming"]


DATA = DataSet(
    "Booksum: ROUGE-L", TASKS, 'a JSON file: {"booksum": "... {context} ..."}',
    lambda flags: documents.read_tasks(TASKS, flags.prompts), notes,
    functools.partial(documents.lines_of_hub, REPOSITORY), lambda task: "test.csv",
)  # fmt: skip
add_flags, check, make_groups, command = DATA.add_flags, DATA.check, DATA.make_groups, DATA.command
