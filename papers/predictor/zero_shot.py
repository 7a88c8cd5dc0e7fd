"""Choices under selections: the tasks of papers/choices/tasks.py, each token reading what a selection keeps.

Table 1 of arXiv 2503.07518 has zero-shot choice tasks under token sparsity. Here a text makes the tasks. Nothing is
evicted: each query of the prompt and of a choice reads what the selection keeps of all tokens before it, as in
`python -m papers coref`. A choice is judged by the log-probability of its tokens, as in `python -m papers choices`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import models
from evals import evaluator, loglikelihood, report, simulator, statistics
from evals.selections import Selection
from evals.simulator import Simulation
from kvjax.sources import PREDICTOR
from models import commands
from models.commands.programs import make_room
from models.networks import Networks
from papers.choices import tasks as choices
from papers.choices.tasks import Sample
from papers.predictor import beside
from papers.predictor.beside import Panel

SELECT = f"full,oracle,{PREDICTOR},quest,h2o+protect(recent=0),snapkv,streaming,random"


def measure(
    model: models.Decoder,
    samples: Mapping[str, Sequence[Sample]],
    chosen: Sequence[Selection],
    sparsities: Sequence[float],
    *,
    like: Simulation = simulator.DENSE,
    batch: int = 4,
    progress: tqdm = evaluator.QUIET,
) -> list[dict[str, Any]]:
    """Choose for each sample, by task, under each selection and sparsity; "full" reads everything, so it has none.

    Args:
        like: has what the selections read beside the model.
        batch: see :func:`evals.loglikelihood.simulate`.

    Returns:
        Lines of ``task`` ("all" for all tasks together), ``select``, ``sparsity``, the ``accuracy`` with its Wilson
        interval, and per sample whether it is ``correct``.
    """
    lines = []
    for selection in chosen:
        shares: Sequence[float | None] = [None] if selection.name == "full" else sparsities
        for sparsity in shares:
            make_room()
            progress.set_description(str(selection) if sparsity is None else f"{selection}, sparsity {sparsity:g}")
            told = {"select": str(selection), "sparsity": sparsity}
            every: list[int] = []
            simulation = like._replace(selection=selection, sparsity=sparsity or 0.0)
            for task, drawn in samples.items():
                ends = [(sample, end) for sample in drawn for end in sample.choices]
                found = loglikelihood.simulate(
                    model, [[*sample.tokens, *end] for sample, end in ends], simulation, batch=batch,
                    on_row=lambda *_: progress.update(),
                )  # fmt: skip
                sums = (own.log_probability[-len(end) :].sum() for own, (_, end) in zip(found, ends, strict=True))
                each = [np.array([next(sums) for _ in sample.choices]) for sample in drawn]
                correct = [int(choices.likeliest(s, x) == s.right) for s, x in zip(drawn, each, strict=True)]
                lines.append({"task": task, **told, **_accuracy(correct)})
                every += correct
            lines.append({"task": "all", **told, **_accuracy(every)})
    return lines


def draw(
    corpus: choices.Corpus, tokenizer: Any, length: int, count: int
) -> tuple[dict[str, list[Sample]], dict[str, str]]:
    """Draw samples of each task that can be made from the text; return them by task, and why the others cannot."""
    found: dict[str, list[Sample]] = {}
    missing: dict[str, str] = {}
    for task in choices.TASKS:
        try:
            found[task] = [choices.draw(task, i, corpus, tokenizer, length) for i in range(count)]
        except ValueError as error:
            missing[task] = str(error)
    if not found:
        raise ValueError("no choice task can be made: " + " ".join(missing.values()))
    return found, missing


def compare(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the predictor with each other selection on the same samples, over all tasks, at the same sparsity."""
    return [
        told | statistics.comparison([a - b for a, b in zip(ours["correct"], theirs["correct"], strict=True)])
        for ours, theirs, told in beside.sides([r for r in results if r["task"] == "all"])
    ]


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return a table with one line per selection and sparsity, and a column per task."""
    tasks = list(dict.fromkeys(r["task"] for r in results))
    lines: dict[Any, dict[str, Any]] = {}
    for r in results:  # that of all tasks is the last of its setting
        own = lines.setdefault((r["select"], r["sparsity"]), {})
        own |= {**r, r["task"]: r["accuracy"]}
    names = ("select", "sparsity")
    cells: list[tuple[str, report.Cell]] = [
        *((name, report.LABELS[name]) for name in names),
        *((task, f"{{{task}:.2f}}") for task in tasks),
        ("95%", "{low:.2f}..{high:.2f}"),
    ]
    note = f"{len(results[-1]['correct'])} samples; {choices.BY_CHANCE}"
    return report.table([*lines.values()], cells, left=2, notes=[note])


def run(
    flags: argparse.Namespace,
    text: str,
    model: models.Decoder,
    tokenizer: models.Tokenizer,
    chosen: Sequence[Selection],
    sparsities: Sequence[float],
    networks: Networks,
) -> dict[str, Any]:
    """Draw the samples that a command line asks for, choose, print the tables, and return the figures."""
    samples, missing = draw(choices.read_corpus(text), tokenizer, flags.chunk, flags.sequences or 20)
    sequences = sum(len(sample.choices) for drawn in samples.values() for sample in drawn)
    often = sum(1 if selection.name == "full" else len(sparsities) for selection in chosen)
    with commands.progress_bar("sequence", total=often * sequences) as progress:
        like = simulator.DENSE._replace(networks=networks, sinks=flags.sinks, heads=flags.heads)
        results = measure(model, samples, chosen, sparsities, like=like, batch=flags.batch, progress=progress)
        progress.set_description("done")
    comparisons = compare(results)
    accuracy = report.comparison_table(comparisons, report.figure("accuracy", "difference", "+.3f"))
    report.show(table(results), accuracy, *(f"{task}: {why}" for task, why in missing.items()))
    return {"results": results, "comparisons": comparisons}


def dots(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the accuracy of each selection and sparsity with its interval: a panel per task."""
    tasks = dict.fromkeys(r["task"] for r in results)
    panels = [Panel({"all": "all tasks"}.get(task, task), [r for r in results if r["task"] == task]) for task in tasks]
    beside.dots([panels], path, title="Right choices when each token reads a part of the text")


def _accuracy(correct: Sequence[int]) -> dict[str, Any]:
    low, high = statistics.wilson(sum(correct), len(correct))
    return {"accuracy": sum(correct) / len(correct), "low": low, "high": high, "correct": list(correct)}
