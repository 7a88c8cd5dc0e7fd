"""Needle in a haystack: exact recall of a fact, under each policy and budget, over depths and lengths.

Every policy answers the same samples. The baseline that a policy has to beat is plain recency: the newest tokens.
A policy can evict after every block, when the question is not known yet, or once after the whole prompt, when it is.
These are different problems, so they are reported side by side. `--question unknown` holds the closing question back
until the context is compressed, so that no eviction of the prompt ever sees it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import models
from evals import answering, command_line, evaluator, report, run_settings, statistics, summaries, tasks
from evals.command_line import check_sizes
from evals.run_settings import PLACEMENTS, RECENCY, Question, Setting, make_settings
from models import commands

# With the embedded model good policies differ at the first once after the prompt, at the second after every block.
BUDGETS = "40,128"
EXAMPLES = """examples:
  python -m evals needle --policies full,h2o,h2o+caote,snapkv,snapkv+caote --budgets 40,128 --plot needle.png
  python -m evals needle --policies tova,snapkv+caote --against snapkv
  python -m evals needle --model path/to/Llama-3.2-1B --lengths 4096,8192 --budgets 0.25 --when prompt --json out.json
"""


@dataclasses.dataclass(frozen=True)
class Cell:
    """The samples of one length and depth, with the tokens of their prompts."""

    length: int
    depth: float
    samples: tuple[tasks.Sample, ...]


def make_cells(
    tokenizer: Any,
    *,
    lengths: Sequence[int],
    depths: int,
    samples: int,
    facts: int,
    question: Question,
    seed: int = 0,
    asked: int = 1,
) -> list[Cell]:
    """Make the samples that every policy answers: ``samples`` for each length and each of ``depths`` depths in [0, 1].

    Args:
        asked: how many facts of each text are asked for. If there are several, a cell has those that lie nearest to
            its depth.

    Raises:
        ValueError: ``depths`` or ``samples`` is below 1, or a length cannot hold the facts.
    """
    if depths < 1 or samples < 1:
        raise ValueError(f"depths is {depths} and samples is {samples}; give at least 1 of each.")
    places = np.linspace(0, 1, depths) if depths > 1 else np.array([0.5])
    cells: list[Cell] = []
    for length in lengths:
        drawn: list[list[tasks.Sample]] = [[] for _ in places]
        for text, (cell, index) in enumerate(itertools.product(range(len(places)), range(samples))):
            own, depth = seed + 1_000 * (len(cells) + cell) + index, float(places[cell])
            for sample in tasks.needles(own, tokenizer, length, depth, facts, placement(question), asked=asked):
                at = cell if asked == 1 else int(np.argmin(np.abs(places - _depth(sample))))
                drawn[at].append(sample._replace(text=text))
        cells += [Cell(length, float(depth), tuple(found)) for depth, found in zip(places, drawn, strict=True)]
    return cells


def _depth(sample: tasks.Sample) -> float:
    """Return where a sample's fact stands in its text, from 0 to 1."""
    return sample.prompt.index(f" {sample.answer}.") / len(sample.prompt)


def placement(question: Question) -> tasks.Placement:
    """Return where a prompt asks; "unknown" is held back until the prompt is compressed.

    >>> placement("unknown"), placement("both")
    ('after', 'both')
    """
    return "after" if question == "known" or question == "unknown" else question


def cells_for(
    flags: argparse.Namespace, tokenizer: Any, lengths: Sequence[int], question: Question, asked: int = 1
) -> list[Cell]:
    """Make the samples that a command line asks for."""
    return make_cells(
        tokenizer, lengths=lengths, depths=flags.depths, samples=flags.samples, facts=flags.facts, question=question,
        seed=flags.seed, asked=asked,
    )  # fmt: skip


def samples_of(cells: Sequence[Cell]) -> list[tasks.Sample]:
    """Return the samples of all cells, in the order in which they are answered."""
    return [sample for cell in cells for sample in cell.samples]


def measure(
    model: models.Decoder,
    cells: Sequence[Cell],
    settings: Sequence[Setting],
    *,
    block: int = 128,
    batch: int = 16,
    progress: tqdm = evaluator.QUIET,
    aids: answering.Aids = answering.NO_AIDS,
) -> list[dict[str, Any]]:
    """Answer every sample under each setting; settings that evict once share their prompts.

    Args:
        aids: see :func:`evals.answering.answers`.

    Returns:
        For each setting: ``correct`` (one list per cell), recall with its 95% interval, the bytes of one sequence's
        cache at the end and at its largest, and the tokens per second of prefill and decode. Both rates leave out the
        step that compiled.
    """
    samples = samples_of(cells)
    answer_length = max(len(sample.answer_tokens) for sample in samples)
    correct: dict[Setting, dict[int, bool]] = {setting: {} for setting in settings}
    parts: dict[Setting, list[answering.Batch]] = {setting: [] for setting in settings}
    for setting, part in answering.answers_each(
        model, samples, settings, new_tokens=answer_length, feed=answering.Feed(block, batch, aids)
    ):
        parts[setting].append(part)
        progress.set_description(setting.title())
        progress.update(len(part.rows))
        for row, tokens in zip(part.rows, part.tokens, strict=True):
            correct[setting][row] = exact(tokens.tolist(), samples[row])
    return [_result(setting, cells, correct[setting], parts[setting]) for setting in settings]


def _result(
    setting: Setting, cells: Sequence[Cell], correct: Mapping[int, bool], parts: Sequence[answering.Batch]
) -> dict[str, Any]:
    hits, total = sum(correct.values()), len(correct)
    row = iter(range(total))  # the samples are numbered cell by cell
    by_cell = [[correct[next(row)] for _ in cell.samples] for cell in cells]
    low, high = statistics.wilson(hits, total)
    return {
        **setting.row(),
        "recall": hits / total,
        "low": low,
        "high": high,
        "samples": total,
        "cache_bytes": parts[-1].cache_bytes,
        "peak_cache_bytes": parts[-1].peak_cache_bytes,
        "prefill_tokens_per_second": summaries.per_second([part.prefill for part in parts]),
        "decode_tokens_per_second": summaries.per_second([part.decode for part in parts]),
        "cells": [
            {"length": cell.length, "depth": cell.depth, "recall": sum(hit) / len(hit), "correct": list(map(int, hit))}
            for cell, hit in zip(cells, by_cell, strict=True)
        ],
    }


def compare(results: Sequence[dict[str, Any]], against: str = RECENCY) -> list[dict[str, Any]]:
    """Compare each policy with those of :func:`evals.report.pairs`, on the same samples."""
    hits = lambda row: [hit for cell in row["cells"] for hit in cell["correct"]]  # noqa: E731
    return report.compare(results, against, hits, ("question",))


def table(results: Sequence[dict[str, Any]], *, recency: str) -> str:
    """Return a table with one row per policy, budget, moment and question; a minus marks recall below plain recency."""
    under = report.below(results, recency, "recall", ("budget", "when", "question"))
    names = report.labels(results)
    text = report.table(
        results,
        [
            *names,
            ("recall", lambda r: f"{r['recall']:.3f}{'-' if under(r) else ' '}"),
            ("95%", "{low:.3f}..{high:.3f}"),
            ("cache MiB", lambda r: f"{r['cache_bytes'] / 2**20:.2f}"),
            ("prefill tok/s", lambda r: report.rate(r["prefill_tokens_per_second"])),
            ("decode tok/s", lambda r: report.rate(r["decode_tokens_per_second"])),
        ],
        left=len(names),
    )
    return text + ("\n'-': under plain recency" if any(map(under, results)) else "")


def heat_map(results: Sequence[dict[str, Any]], path: Path, *, recency: str) -> None:
    """Draw recall with the values in the cells: one row per policy, one column per depth.

    Lengths stand side by side; moments, questions and budgets below each other, of one length two by two. The
    background is transparent, and the text has a grey that reads on white and on black. A policy below plain recency
    is named in red.
    """
    plt = report.pyplot()
    evicting = [r for r in results if r["budget"] is not None]
    groups = list(dict.fromkeys(map(report.group, evicting))) or [(results[0]["question"], "never", None)]
    lengths = sorted({cell["length"] for r in results for cell in r["cells"]})
    panels = {group: [r for r in results if r["budget"] is None or report.group(r) == group] for group in groups}
    panels = {(question, *rest): [r for r in found if r["question"] == question]
              for (question, *rest), found in panels.items()}  # fmt: skip
    depths = len({cell["depth"] for r in results for cell in r["cells"]})
    most = max(len(found) for found in panels.values())
    across = min(2 if len(lengths) == 1 else 1, len(groups))
    down = -(-len(groups) // across)
    figure = plt.figure(
        figsize=(across * (2.4 + len(lengths) * (0.6 + 0.44 * (depths + 1))), 0.5 + down * (0.8 + 0.27 * most)),
        layout="constrained",
    )
    parts = figure.subfigures(down, across, squeeze=False).ravel()
    for part, ((question, when, budget), found) in zip(parts, panels.items(), strict=False):
        line = part.subplots(1, len(lengths), squeeze=False)[0]
        floor = next((r["recall"] for r in found if r["policy"] == recency), 0.0)
        for axis, length in zip(line, lengths, strict=True):
            _panel(axis, found, length, recency, floor, named=axis is line[0])
            axis.set_xlabel("depth of the fact", fontsize=9)
        moment = {**report.MOMENTS, "prompt": "once, after the prompt"}.get(when)
        under = "full cache" if budget is None else f"budget {budget}, evicted {moment}"
        title = f"question {_ASKED.get(question, question)}, {under}"
        part.suptitle(title, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
    if any(map(report.below(results, recency, "recall", ("budget", "when", "question")), results)):
        parts[-1].supxlabel("red: below plain recency", fontsize=9, color="#d1495b", x=0.99, ha="right")
    report.save(figure, path, dpi=150)


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    command_line.add_model_flags(flags)
    command_line.add_setting_flags(flags, budgets=BUDGETS, questions=PLACEMENTS)
    flags.add_argument("--lengths", default="512,1024", help="tokens per prompt; several by comma")
    flags.add_argument("--depths", type=int, default=5, help="number of depths from 0 to 1")
    flags.add_argument("--samples", type=int, default=8, help="samples per length and depth")
    flags.add_argument("--facts", type=int, default=10, help="facts per text")
    flags.add_argument(
        "--asked",
        type=int,
        default=1,
        help="facts per text that are asked for, each by a prompt of its own; with --question unknown these share the "
        "reading of the text, and a ratio is one of its tokens (default: %(default)s)",
    )


def command(flags: argparse.Namespace) -> None:
    """Run the evaluation: check the flags, answer the samples, print the table, write JSON and picture."""
    settings = make_settings(flags)
    lengths = check_sizes(flags)
    report.check_outputs(flags.json, flags.plot)
    model, tokenizer = command_line.load(flags)
    aids = evaluator.load_aids(flags, settings, model, tokenizer)

    questions = dict.fromkeys(setting.question for setting in settings)
    cells = {question: cells_for(flags, tokenizer, lengths, question, flags.asked) for question in questions}
    for setting in settings:
        samples = samples_of(cells[setting.question])
        most = max(len(sample.answer_tokens) for sample in samples)
        answering.check_answers(
            model, samples, setting, new_tokens=most, block=flags.block, batch=flags.batch, aids=aids
        )
    each = len(lengths) * flags.depths * flags.samples * flags.asked
    results = []
    with commands.progress_bar("sample", total=each * len(settings)) as progress:
        for question, of_question in cells.items():
            asked = [setting for setting in settings if setting.question == question]
            results += measure(
                model, of_question, asked, block=flags.block, batch=flags.batch, progress=progress, aids=aids
            )
        progress.set_description("done")
    comparisons, together = compare(results, run_settings.baseline(flags)), run_settings.sharing_note(settings, each)
    told = "\n".join([table(results, recency=RECENCY), *([] if together is None else [together])])
    report.show(told, report.comparison_table(comparisons))
    figures = {
        "evaluation": "needle",
        "settings": command_line.settings(flags),
        "results": results,
        "comparisons": comparisons,
    }
    digests = evaluator.digests(model, tokenizer, aids.networks)
    report.write(flags, figures, digests, lambda path: heat_map(results, path, recency=RECENCY))


def exact(tokens: Sequence[int], sample: tasks.Sample) -> bool:
    """Return whether an answer begins with the right tokens."""
    return list(tokens[: len(sample.answer_tokens)]) == list(sample.answer_tokens)


def check(flags: argparse.Namespace) -> None:
    """Check the flags before any work.

    Raises:
        ValueError: a length is no number of tokens, or the block, batch, depths, samples or facts are below 1.
    """
    check_sizes(flags)
    if flags.depths < 1 or flags.samples < 1 or flags.facts < 1:
        raise ValueError(
            f"{flags.depths} depths, {flags.samples} samples and {flags.facts} facts; give at least 1 of each."
        )
    if not 1 <= flags.asked <= flags.facts:
        raise ValueError(f"--asked is {flags.asked}; give a number from 1 to the {flags.facts} facts of a text.")


def make_groups(flags: argparse.Namespace, config: models.Config, tokenizer: models.Tokenizer) -> list[evaluator.Group]:
    """Return the samples as groups for :func:`evals.evaluator.run`, one per question and length with all its depths."""
    groups = []
    questions: Any = commands.split_list(flags.question)
    for question, length in itertools.product(questions, check_sizes(flags)):
        cells = cells_for(flags, tokenizer, [length], question, flags.asked)
        samples = sorted(samples_of(cells), key=lambda sample: sample.text)
        groups.append(
            evaluator.Group(
                "needle",
                length,
                len(samples),
                functools.partial(list, samples),
                max(len(sample.answer_tokens) for sample in samples),
                lambda answer, sample: float(exact(answer.tokens, sample)),
                end=(),
                questions=(question,),
            )
        )
    return groups


_ASKED = {"before": "asked before", "both": "asked before and after"}


def _panel(axis: Any, found: Sequence[dict[str, Any]], length: int, recency: str, floor: float, *, named: bool) -> None:
    """Draw the policies at one prompt length, with the mean over its depths in the last column."""
    depths = sorted({cell["depth"] for r in found for cell in r["cells"]})
    recall = [{cell["depth"]: cell["recall"] for cell in r["cells"] if cell["length"] == length} for r in found]
    grid = np.array([[*(row.get(depth, np.nan) for depth in depths), np.nan] for row in recall])
    axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for y, row in enumerate(grid):
        for x, value in enumerate(row[:-1]):
            if not np.isnan(value):
                axis.text(x, y, f"{value:.2g}", ha="center", va="center", fontsize=8.5,
                          color="black" if value > 0.6 else "white")  # fmt: skip
        if not np.all(np.isnan(row[:-1])):
            axis.text(len(depths), y, f"{np.nanmean(row[:-1]):.2f}", ha="center", va="center", fontsize=9,
                      fontweight="bold")  # fmt: skip
    axis.set_xticks(range(len(depths) + 1), [*(f"{depth:.0%}" for depth in depths), "mean"], fontsize=8.5)
    axis.set_yticks(range(len(found)), ["recency" if r["policy"] == recency else r["policy"] for r in found])
    axis.tick_params(colors=report.GREY, labelleft=named, labelsize=9)
    for label, result in zip(axis.get_yticklabels(), found, strict=False):  # without names there are no labels
        if result["recall"] < floor:
            label.set_color("#d1495b")
    axis.text(0, 1.02, f"{length:,} tokens", transform=axis.transAxes, fontsize=9.5)
    report.frameless(axis)
