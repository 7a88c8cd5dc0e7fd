"""Summarise the records of samples: means with intervals, differences between policies, and a picture."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evals import report, results, statistics
from evals.run_settings import RECENCY


def summarise(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one line per setting and length: the mean of the tasks' means, its 95% interval, and each task's mean.

    The interval is Wilson's over texts, of which each task counts as much: answers from one text, where records name
    it, are not independent. Where records have a text's "loss", lines have the "perplexity" of the texts, and its
    "increase" over the full cache's on the same texts.
    """
    collected: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        collected.setdefault(tuple(record.get(name) for name in results.SETTING), []).append(record)
    lines = []
    losses = {key: {r["text"]: r["loss"] for r in found if "loss" in r} for key, found in collected.items()}
    for key, found in collected.items():
        scores: dict[str, list[float]] = {}
        for record in found:
            scores.setdefault(record["task"], []).append(record["score"])
        means = {task: sum(values) / len(values) for task, values in scores.items()}
        mean = sum(means.values()) / len(means)
        texts = collections.Counter(task for task, _ in {_text(record) for record in found})
        trials = len(texts) ** 2 / sum(1 / count for count in texts.values())
        low, high = statistics.wilson(mean * trials, trials)
        lines.append(
            {
                **dict(zip(results.SETTING, key, strict=True)),
                "evicts": found[0].get("evicts"),
                "score": mean,
                "low": low,
                "high": high,
                "samples": len(found),
                "cache_bytes": round(sum(r["cache_bytes"] for r in found) / len(found)),
                "peak_cache_bytes": round(sum(r["peak_cache_bytes"] for r in found) / len(found)),
                "prefill_tokens_per_second": per_second([r["prefill"] for r in found]),
                "decode_tokens_per_second": per_second([r["decode"] for r in found]),
                "tasks": {task: {"score": means[task], "samples": len(scores[task])} for task in means},
                **_perplexity(losses[key], losses.get((*key[:3], "full", None, "block", key[6]), {})),
            }
        )
    return lines


def compare(records: Sequence[dict[str, Any]], against: str = RECENCY) -> list[dict[str, Any]]:
    """Compare each policy with those of :func:`evals.report.pairs`, on the same samples, as :func:`summarise` does."""
    names = (*results.SETTING, "evicts")
    settings: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in records:
        about = {name: record.get(name) for name in names}
        setting = settings.setdefault(tuple(map(str, about.values())), about | {"found": {}})
        setting["found"][record["task"], record["sample"]] = record["score"], _text(record)
    lines = []
    for line, other in report.pairs(list(settings.values()), against, ("model", "evaluation", "length", "question")):
        if both := [sample for sample in line["found"] if sample in other["found"]]:
            told = {"policy": line["policy"], "against": other["policy"]}
            told |= {name: line[name] for name in names if name != "policy"}
            by_text: dict[tuple[str, Any], list[float]] = {}
            for (score, text), (theirs, _) in ((line["found"][sample], other["found"][sample]) for sample in both):
                by_text.setdefault(text, []).append(score - theirs)
            lines.append(told | statistics.comparison(*_weighted(by_text)))
    return lines


def _text(record: Mapping[str, Any]) -> tuple[str, Any]:
    """Return what tells a record's text from others: its task, and its text's number or its own."""
    return record["task"], record.get("text", record["sample"])


def _weighted(by_text: Mapping[tuple[str, Any], Sequence[float]]) -> tuple[list[float], float]:
    """Return one number per text from -1 to 1, and a scale; by their product each task counts as much in the mean."""
    texts = collections.Counter(task for task, _ in by_text)
    fewest = min(texts.values())
    weighted = [sum(found) / len(found) * fewest / texts[task] for (task, _), found in by_text.items()]
    return weighted, len(by_text) / (len(texts) * fewest)


def task_map(lines: Sequence[dict[str, Any]], path: Path, *, title: str, short: Mapping[str, str]) -> None:
    """Draw each policy's score in each task as colour and number, one panel per moment, budget and length."""
    plt = report.pyplot()
    where = lambda r: (r["model"], r["evaluation"], r["length"], r["question"], r["when"], r["budget"])  # noqa: E731
    groups = list(dict.fromkeys(where(r) for r in lines if r["budget"] is not None)) or [where(lines[0])]
    tasks = list(dict.fromkeys(task for r in lines for task in r["tasks"]))
    shown = [
        [r for r in lines if where(r) == group or (r["budget"] is None and where(r)[:4] == group[:4])]
        for group in groups
    ]
    figure, axes = plt.subplots(
        len(groups), 1, figsize=(3.4 + 0.62 * len(tasks), 0.9 + sum(0.95 + 0.3 * len(found) for found in shown)),
        squeeze=False, layout="constrained", height_ratios=[0.95 + 0.3 * len(found) for found in shown],
    )  # fmt: skip
    for axis, group, found in zip(axes[:, 0], groups, shown, strict=True):
        none = {"score": np.nan}
        grid = np.array([[r["score"], *(r["tasks"].get(task, none)["score"] for task in tasks)] for r in found])
        axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        for (row, column), value in np.ndenumerate(grid):
            if not np.isnan(value):
                axis.text(
                    column, row, f"{value:.2f}", ha="center", va="center", fontsize=7,
                    color="black" if value > 0.6 else "white", fontweight="bold" if column == 0 else "normal",
                )  # fmt: skip
        axis.set_xticks(range(len(tasks) + 1), ["mean", *(short.get(task, task) for task in tasks)], fontsize=7)
        more = [f", perplexity {r['increase']:+.1%}" if "increase" in r and r["budget"] else "" for r in found]
        names = [r["policy"] + perplexity for r, perplexity in zip(found, more, strict=True)]
        axis.set_yticks(range(len(found)), names, fontsize=7)
        report.frameless(axis)
        length = "" if group[2] is None else f"{group[2]:,} tokens, "
        axis.set_title(f"{length}{report.moment(group[3:])}", fontsize=8.5)
    figure.suptitle(title, fontsize=11)
    report.save(figure, path)


def per_second(parts: Sequence[tuple[float, float]]) -> float | None:
    """Return the tokens per second of several pairs of tokens and seconds, or None where no second was measured."""
    tokens, seconds = (sum(part[index] for part in parts) for index in (0, 1))
    return tokens / seconds if seconds else None


def _perplexity(losses: Mapping[int, float], full: Mapping[int, float]) -> dict[str, Any]:
    """Return a line's perplexity, and its increase over that of the full cache with its 95% interval over texts."""
    if not losses:
        return {}
    told: dict[str, Any] = {"perplexity": math.exp(sum(losses.values()) / len(losses))}
    more = [loss - full[text] for text, loss in losses.items() if text in full]
    if not more or losses is full:
        return told
    mean, low, high = (math.exp(x) - 1 for x in statistics.mean_interval(more))
    several = len(more) > 1
    return told | dict(increase=mean, increase_low=low if several else None, increase_high=high if several else None)
