"""Needle in a haystack: exact recall of a fact, under each policy and budget, over depths and lengths.

Every policy answers the same samples. Beside the policies stands plain recency, `streaming(sinks=0)`, the line that a
policy has to beat. Evicting after every block (the question is not known yet) and once when the prompt is in (it is)
are different problems, so they are reported side by side. `--question agnostic` holds the closing question back until
the context is compressed: then it is never known.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import models
from evals import evaluator, report, statistics, tasks
from evals.evaluator import PLACEMENTS, RECENCY, Question, Setting, check_sizes, make_settings
from models import commands, provenance

EXAMPLES = """examples:
  python -m evals needle --policies full,h2o,h2o+caote,snapkv,snapkv+caote --budgets 256,512 --plot needle.png
  python -m evals needle --model path/to/Llama-3.2-1B --lengths 4096,8192 --budgets 0.25 --when prompt --json out.json
"""


@dataclasses.dataclass(frozen=True)
class Cell:
    """The samples of one length and depth, and their prompts' tokens."""

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
) -> list[Cell]:
    """The samples that every policy answers: ``samples`` for each length and each of ``depths`` depths from 0 to 1.

    Raises:
        ValueError: a number of depths or samples below 1, or a length that cannot hold the facts.
    """
    if depths < 1 or samples < 1:
        raise ValueError(f"{depths} depths and {samples} samples were asked for; give at least 1 of each.")
    placement: tasks.Placement = "after" if question == "agnostic" else question
    cells: list[Cell] = []
    for length, depth in itertools.product(lengths, np.linspace(0, 1, depths) if depths > 1 else [0.5]):
        seeds = [seed + 1_000 * len(cells) + index for index in range(samples)]
        drawn = tuple(tasks.needle(s, tokenizer, length, float(depth), facts, placement) for s in seeds)
        cells.append(Cell(length, float(depth), drawn))
    return cells


def measure(
    model: models.Decoder,
    cells: Sequence[Cell],
    settings: Sequence[Setting],
    *,
    block: int = 128,
    batch: int = 16,
    progress: tqdm | None = None,
) -> list[dict[str, Any]]:
    """Answers every sample under each setting; settings that evict once share their prompts.

    Returns:
        For each setting ``correct`` (a list per cell), recall with its 95% interval, bytes of a sequence's cache at the
        end and at its largest, and tokens per second of prefill and decode, both without the step that compiled.
    """
    samples = [sample for cell in cells for sample in cell.samples]
    answer_length = max(len(sample.answer_tokens) for sample in samples)
    correct: dict[Setting, dict[int, bool]] = {setting: {} for setting in settings}
    parts: dict[Setting, list[evaluator.Batch]] = {setting: [] for setting in settings}
    for setting, part in evaluator.answers_each(
        model, samples, settings, new_tokens=answer_length, block=block, batch=batch
    ):
        parts[setting].append(part)
        if progress is not None:
            progress.set_description(setting.title())
            progress.update(len(part.rows))
        for row, tokens in zip(part.rows, part.tokens, strict=True):
            correct[setting][row] = exact(tokens.tolist(), samples[row])
    return [_result(setting, cells, correct[setting], parts[setting]) for setting in settings]


def _result(
    setting: Setting, cells: Sequence[Cell], correct: Mapping[int, bool], parts: Sequence[evaluator.Batch]
) -> dict[str, Any]:
    hits, total = sum(correct.values()), len(correct)
    row = iter(range(total))  # samples are numbered cell by cell
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
        "prefill_tokens_per_second": _rate([part.prefill for part in parts]),
        "decode_tokens_per_second": _rate([part.decode for part in parts]),
        "cells": [
            {"length": cell.length, "depth": cell.depth, "recall": sum(hit) / len(hit), "correct": list(map(int, hit))}
            for cell, hit in zip(cells, by_cell, strict=True)
        ],
    }


def compare(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each policy with a CAOTE link: is it better than the same policy without it, on the same samples?

    Where the link takes the group's mean, it is held against the exact form as well.
    """
    by_setting = {(r["policy"], r["budget"], r["when"], r["question"]): r for r in results}
    rows = []
    for (policy, *rest), result in by_setting.items():
        plain = report.without_caote(policy)
        exact = policy.replace("(group='mean')", "")
        for other in (plain, exact):
            if other == policy or (other, *rest) not in by_setting:
                continue
            outcomes = [[c for cell in r["cells"] for c in cell["correct"]] for r in (by_setting[other, *rest], result)]
            mean, low, high = statistics.paired_difference(*outcomes)
            rows.append(
                {
                    "policy": policy,
                    "against": other,
                    **dict(zip(("budget", "when", "question"), rest, strict=True)),
                    "difference": mean,
                    "low": low,
                    "high": high,
                    "better": statistics.verdict(low, high),
                }
            )
    return rows


def table(results: Sequence[dict[str, Any]], *, recency: str) -> str:
    """Gives each policy, budget, moment and question a row; a minus marks what stays under plain recency."""
    line = {(r["budget"], r["when"], r["question"]): r["recall"] for r in results if r["policy"] == recency}
    rows = []
    for r in results:
        floor = line.get((r["budget"], r["when"], r["question"]))
        under = floor is not None and r["recall"] < floor
        rows.append(
            (
                r["policy"],
                "all" if r["budget"] is None else str(r["budget"]),
                report.evicts(r),
                r["question"],
                f"{r['recall']:.3f}{'-' if under else ' '}",
                f"{r['low']:.3f}..{r['high']:.3f}",
                f"{r['cache_bytes'] / 2**20:.2f}",
                report.rate(r["prefill_tokens_per_second"]),
                report.rate(r["decode_tokens_per_second"]),
            )
        )
    head = ("policy", "budget", "evicts", "question", "recall", "95%", "cache MiB", "prefill tok/s", "decode tok/s")
    note = f"\n'-': under plain recency, {recency}" if any("-" in row[4] for row in rows) else ""
    return report.columns(head, rows, left=4) + note


def heat_map(results: Sequence[dict[str, Any]], path: Path, *, recency: str) -> None:
    """Draws recall over depth and length: a panel for each policy, a row of panels for each moment and budget.

    Above each panel stands its mean, in red where it is under plain recency.
    """
    plt = report.pyplot()
    full = [r for r in results if r["budget"] is None]
    evicting = [r for r in results if r["budget"] is not None]
    policies = list(dict.fromkeys(r["policy"] for r in evicting))
    groups = list(dict.fromkeys(map(report.group, evicting))) or [("after", "never", None)]
    columns = (["full"] if full else []) + policies
    questions = list(dict.fromkeys(question for question, *_ in groups))
    figure, axes = plt.subplots(
        len(groups), len(columns), figsize=(1.1 + 1.55 * len(columns), 1.25 + 1.9 * len(groups)), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    image: Any = None
    for row, (question, when, budget) in enumerate(groups):
        for column, policy in enumerate(columns):
            axis = axes[row][column]
            found = [
                r
                for r in results
                if r["policy"] == policy
                and (report.group(r) == (question, when, budget) or (policy == "full" and r["question"] == question))
            ]
            if not found:
                axis.set_axis_off()
                continue
            image = _panel(axis, found[0])
            if row == 0:
                name = "recency" if policy == recency else policy.replace("+", "\n+").replace("@", "\n@")
                axis.set_title(name, fontsize=8.5, pad=16)
            line = [
                r["recall"] for r in evicting if r["policy"] == recency and report.group(r) == (question, when, budget)
            ]
            under = bool(line) and found[0]["recall"] < line[0]
            axis.text(
                0.5, 1.03, f"{found[0]['recall']:.2f}", transform=axis.transAxes, ha="center", fontsize=9.5,
                fontweight="bold", color="#b3261e" if under else "black",
            )  # fmt: skip
            if row == len(groups) - 1:
                axis.set_xlabel("prompt tokens", fontsize=7)
            if column == 0:
                moment = {**report.MOMENTS, "prompt": "once, after the prompt", "never": ""}[when]
                asked = f"question {_ASKED[question]}\n" if len(questions) > 1 else ""
                axis.set_ylabel(f"{asked}budget {budget}, evicts\n{moment}\n\ndepth of the fact", fontsize=7.5)
            else:
                axis.set_yticklabels([])
    bar = figure.colorbar(image, ax=axes, shrink=0.6, pad=0.01, aspect=30)
    bar.set_label("exact recall", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    where = f", question {questions[0]} the text" if len(questions) == 1 else ""
    note = "; red: under plain recency" if any(r["policy"] == recency for r in evicting) else ""
    figure.suptitle(f"Exact recall of a fact{where}{note}", fontsize=12)
    with commands.replacing(path) as temporary:
        figure.savefig(temporary, dpi=160)
    plt.close(figure)


def add_flags(flags: argparse.ArgumentParser) -> None:
    """The command's flags."""
    evaluator.add_model_flags(flags)
    evaluator.add_setting_flags(flags, questions=PLACEMENTS)
    flags.add_argument("--lengths", default="512,1024", help="tokens of a prompt; several by comma")
    flags.add_argument("--depths", type=int, default=5, help="how many depths from 0 to 1")
    flags.add_argument("--samples", type=int, default=8, help="samples for each length and depth")
    flags.add_argument("--facts", type=int, default=10, help="facts in a text, of which one is asked for")


def command(flags: argparse.Namespace) -> None:
    """Runs the evaluation: checks, table, JSON, picture."""
    settings = make_settings(flags)
    lengths = check_sizes(flags)
    if flags.plot is not None:
        report.check_plot(flags.plot)
    commands.check_outputs([flags.json, flags.plot])
    model, tokenizer = evaluator.load(flags)

    cells = {
        question: make_cells(
            tokenizer,
            lengths=lengths,
            depths=flags.depths,
            samples=flags.samples,
            facts=flags.facts,
            question=question,
            seed=flags.seed,
        )
        for question in dict.fromkeys(setting.question for setting in settings)
    }
    for setting in settings:
        samples = [sample for cell in cells[setting.question] for sample in cell.samples]
        most = max(len(sample.answer_tokens) for sample in samples)
        evaluator.check_answers(model, samples, setting, new_tokens=most, block=flags.block, batch=flags.batch)
    each = len(lengths) * flags.depths * flags.samples
    results = []
    with tqdm(total=each * len(settings), unit="sample", file=sys.stderr, dynamic_ncols=True) as progress:
        for question, of_question in cells.items():
            asked = [setting for setting in settings if setting.question == question]
            results += measure(model, of_question, asked, block=flags.block, batch=flags.batch, progress=progress)
        progress.set_description("done")
    comparisons = compare(results)
    print(table(results, recency=RECENCY))
    if (together := evaluator.saved(settings, each)) is not None:
        print(together)
    if comparisons:
        print()
        print(report.comparison_table(comparisons))
    if flags.json is not None:
        figures = {
            "evaluation": "needle",
            "settings": evaluator.settings(flags),
            "results": results,
            "comparisons": comparisons,
        }
        provenance.write(flags, figures, evaluator.made_of(model, tokenizer))
        print(f"figures: {flags.json}")
    if flags.plot is not None:
        heat_map(results, flags.plot, recency=RECENCY)
        print(f"picture: {flags.plot}")


def exact(tokens: Sequence[int], sample: tasks.Sample) -> bool:
    """Whether an answer begins with the right tokens."""
    return list(tokens[: len(sample.answer_tokens)]) == list(sample.answer_tokens)


def check(flags: argparse.Namespace) -> None:
    """Refuses flags that could not work."""
    check_sizes(flags)
    if flags.depths < 1 or flags.samples < 1 or flags.facts < 1:
        raise ValueError(
            f"{flags.depths} depths, {flags.samples} samples and {flags.facts} facts; give at least 1 of each."
        )


def make_groups(flags: argparse.Namespace, config: models.Config, tokenizer: models.Tokenizer) -> list[evaluator.Group]:
    """The samples as groups for :func:`evals.evaluator.run`: a length's depths together."""
    groups = []
    questions: Any = commands.split_list(flags.question)
    for question, length in itertools.product(questions, check_sizes(flags)):
        cells = make_cells(
            tokenizer, lengths=[length], depths=flags.depths, samples=flags.samples, facts=flags.facts,
            question=question, seed=flags.seed,
        )  # fmt: skip
        samples = [sample for cell in cells for sample in cell.samples]
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


_ASKED = {"after": "known", "before": "asked before", "both": "asked before and after", "agnostic": "unknown"}


def _rate(parts: Sequence[tuple[float, float]]) -> float | None:
    tokens, seconds = (sum(part[index] for part in parts) for index in (0, 1))
    return tokens / seconds if seconds else None


def _panel(axis: Any, result: dict[str, Any]) -> Any:
    lengths = sorted({cell["length"] for cell in result["cells"]})
    depths = sorted({cell["depth"] for cell in result["cells"]})
    grid = np.full((len(depths), len(lengths)), np.nan)
    for cell in result["cells"]:
        grid[depths.index(cell["depth"]), lengths.index(cell["length"])] = cell["recall"]
    image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=6.5)
    axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=6.5)
    axis.tick_params(length=2)
    for spine in axis.spines.values():
        spine.set_visible(False)
    return image
