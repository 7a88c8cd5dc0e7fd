"""Needle in a haystack: exact recall of a fact, under each policy and budget, over depths and lengths.

Every policy answers the same samples. The baseline that a policy has to beat is plain recency: the newest tokens.
A policy can evict after every block, when the question is not known yet, or once after the whole prompt, when it is.
These are different problems, so they are reported side by side. `--question unknown` holds the closing question back
until the context is compressed, so that no eviction of the prompt ever sees it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import models
from evals import command_line, evaluator, report, tasks
from evals.run_settings import RECENCY
from models import commands
from models.commands.shared_flags import add_shared_flags, count

# With the embedded model good policies differ at the first once after the prompt, at the second after every block.
BUDGETS = "40,128"
EXAMPLES = """examples:
  python -m evals needle --policies full,tova,tova+caote,snapkv,snapkv+caote --budgets 40,128 --plot needle.png
  python -m evals needle --policies tova,snapkv+caote --against snapkv
  python -m evals needle --model path/to/Llama-3.2-1B --lengths 4096,8192 --budgets 0.25 --when prompt --json out.json
"""


def draw(
    tokenizer: Any,
    length: int,
    *,
    depths: int,
    samples: int,
    facts: int,
    seed: int = 0,
    asked: int = 1,
) -> list[tasks.Sample]:
    """Draw the samples that every policy answers, text by text: ``samples`` texts for each of the depths in [0, 1].

    Of each text ``asked`` facts are asked for. If there are several, each has the depth that it lies nearest to.

    Raises:
        ValueError: the length cannot hold the facts.
    """
    places = np.linspace(0, 1, depths) if depths > 1 else np.array([0.5])
    drawn = []
    for text, (place, index) in enumerate(itertools.product(range(depths), range(samples))):
        own, depth = seed + 1_000 * place + index, float(places[place])
        for sample in tasks.needles(own, tokenizer, length, depth, facts, asked=asked):
            at = place
            if asked > 1:  # each fact lies where its sentence does
                at = int(np.argmin(np.abs(places - sample.prompt.index(f" {sample.answer}.") / len(sample.prompt))))
            drawn.append(sample._replace(text=text, depth=float(places[at])))
    return sorted(drawn, key=lambda sample: (sample.text, sample.depth))


def heat_map(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw recall with the values in the cells: one line per policy, one column per depth.

    Lengths stand side by side; moments, questions and budgets below each other, of one length two by two. The
    background is transparent, and the text has a grey that reads on white and on black. A policy below plain recency
    is named in red.
    """
    plt = report.pyplot()
    results = _by_setting(records)
    evicting = [r for r in results if r["budget"] is not None]
    groups = list(dict.fromkeys(map(report.group, evicting))) or [(results[0]["question"], "never", None)]
    lengths = sorted({record["length"] for record in records})
    panels = {
        group: [r for r in results if r["question"] == group[0] and (r["budget"] is None or report.group(r) == group)]
        for group in groups
    }
    depths = sorted({record["depth"] for record in records})
    most = max(len(found) for found in panels.values())
    across = min(2 if len(lengths) == 1 else 1, len(groups))
    down = -(-len(groups) // across)
    figure = plt.figure(
        figsize=(across * (2.4 + len(lengths) * (0.6 + 0.44 * (len(depths) + 1))), 0.5 + down * (0.8 + 0.27 * most)),
        layout="constrained",
    )
    parts = figure.subfigures(down, across, squeeze=False).ravel()
    for part, ((question, when, budget), found) in zip(parts, panels.items(), strict=False):
        axes = part.subplots(1, len(lengths), squeeze=False)[0]
        for axis, length in zip(axes, lengths, strict=True):
            _panel(axis, found, length, depths, named=axis is axes[0])
        moment = {**report.MOMENTS, "prompt": "once, after the prompt"}.get(when)
        under = "full cache" if budget is None else f"budget {budget}, evicted {moment}"
        part.suptitle(f"question {question}, {under}", x=0.01, ha="left", fontsize=10.5, fontweight="bold")
    if any(map(report.below(results, RECENCY, "recall", ("budget", "when", "question")), results)):
        parts[-1].supxlabel("red: below plain recency", fontsize=9, color="#d1495b", x=0.99, ha="right")
    report.save(figure, path, dpi=150)


def _by_setting(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the recall of each setting, and its ``cells``: that of each length and depth."""
    scores: dict[tuple[Any, ...], dict[tuple[int, float], list[float]]] = {}
    names = ("policy", "budget", "when", "question")
    for record in records:
        of_setting = scores.setdefault(tuple(record[name] for name in names), {})
        of_setting.setdefault((record["length"], record["depth"]), []).append(record["score"])
    return [
        {
            **dict(zip(names, setting, strict=True)),
            "recall": float(np.mean(list(itertools.chain(*cells.values())))),
            "cells": {cell: float(np.mean(found)) for cell, found in cells.items()},
        }
        for setting, cells in scores.items()
    ]


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    command_line.add_model_flags(flags)
    command_line.add_setting_flags(flags, budgets=BUDGETS)
    flags.add_argument("--lengths", default="512,1024", help="tokens per prompt; several by comma")
    flags.add_argument("--depths", type=count, default=5, help="number of depths from 0 to 1")
    flags.add_argument("--samples", type=count, default=8, help="samples per length and depth")
    flags.add_argument("--facts", type=count, default=10, help="facts per text")
    flags.add_argument(
        "--asked",
        type=count,
        default=1,
        help="facts per text that are asked for, each by a prompt of its own; with --question unknown these share the "
        "reading of the text, and a ratio is one of its tokens",
    )
    add_shared_flags(flags, "out")


def command(flags: argparse.Namespace) -> None:
    """Run the evaluation: check the flags, answer the samples, print the table, write JSON and picture."""
    evaluator.command(
        flags, make_groups, title="Needles: facts found", notes=lambda _: [], check=check, picture=heat_map
    )


def exact(tokens: Sequence[int], sample: tasks.Sample) -> bool:
    """Return whether an answer begins with the right tokens."""
    return list(tokens[: len(sample.answer_tokens)]) == list(sample.answer_tokens)


def check(flags: argparse.Namespace) -> None:
    """Check the flags before any work."""
    command_line.check_sizes(flags)
    if not 1 <= flags.asked <= flags.facts:
        raise ValueError(f"--asked is {flags.asked}; give a number from 1 to the {flags.facts} facts of a text.")


def make_groups(flags: argparse.Namespace, config: models.Config, tokenizer: models.Tokenizer) -> list[evaluator.Group]:
    """Return the samples as groups for :func:`evals.evaluator.run`, one per question and length with all its depths."""
    groups = []
    questions = commands.split_list(flags.question)
    for question, (place, length) in itertools.product(questions, enumerate(command_line.check_sizes(flags))):
        samples = draw(
            tokenizer, length, depths=flags.depths, samples=flags.samples, facts=flags.facts,
            seed=flags.seed + 1_000 * flags.depths * place, asked=flags.asked,  # each length has texts of its own
        )  # fmt: skip
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
                fields=lambda sample: {"depth": sample.depth, "text": sample.text},
            )
        )
    return groups


def _panel(axis: Any, found: Sequence[dict[str, Any]], length: int, depths: Sequence[float], *, named: bool) -> None:
    """Draw the policies at one prompt length, with the mean over its depths in the last column."""
    grid = np.array([[*(r["cells"].get((length, depth), np.nan) for depth in depths), np.nan] for r in found])
    axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for y, values in enumerate(grid):
        for x, value in enumerate(values[:-1]):
            if not np.isnan(value):
                axis.text(x, y, f"{value:.2g}", ha="center", va="center", fontsize=8.5,
                          color="black" if value > 0.6 else "white")  # fmt: skip
        if not np.all(np.isnan(values[:-1])):
            axis.text(len(depths), y, f"{np.nanmean(values[:-1]):.2f}", ha="center", va="center", fontsize=9,
                      fontweight="bold")  # fmt: skip
    axis.set_xticks(range(len(depths) + 1), [*(f"{depth:.0%}" for depth in depths), "mean"], fontsize=8.5)
    axis.set_yticks(range(len(found)), [r["policy"] for r in found])
    axis.tick_params(colors=report.GREY, labelleft=named, labelsize=9)
    floor = next((r["recall"] for r in found if r["policy"] == RECENCY), 0.0)
    for label, result in zip(axis.get_yticklabels(), found, strict=False):  # without names there are no labels
        if result["recall"] < floor:
            label.set_color("#d1495b")
    axis.text(0, 1.02, f"{length:,} tokens", transform=axis.transAxes, fontsize=9.5)
    axis.set_xlabel("depth of the fact", fontsize=9)
    report.frameless(axis)
