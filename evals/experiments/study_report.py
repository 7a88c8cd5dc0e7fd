"""A study's table and picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evals import report
from evals.experiments.ablations import Point, Run, Study


def table(study: Study, results: Mapping[Run, dict[str, Any]]) -> str:
    """Return a table with one row per place in a study's picture, the references first."""
    places: list[tuple[str, str, str | float, Run]] = [("", "reference", "", run) for run in study.references]
    places += [(point.panel, point.line, point.x, point.run) for point in study.points]

    def at(r: dict[str, Any]) -> str:
        if study.by_bytes:
            return f"{r['bytes_per_token']:,.0f} B"
        return f"{r['x']:.0%}" if isinstance(r["x"], float) else str(r["x"]).replace("\n", " ")

    def evicts(r: dict[str, Any]) -> str:
        return "never" if r["budget"] is None else f"by {r['block']}" if r["when"] == "block" else "once"

    cells: list[tuple[str, report.Cell]] = [
        ("panel", "{panel}"),
        ("line", "{line}"),
        ("at", at),
        ("policy", "{policy}"),
        ("budget", report.budget),
        ("evicts", evicts),
        ("question", "{question}"),
        ("recall", "{recall:.3f}"),
        ("95%", "{low:.3f}..{high:.3f}"),
        ("cache MiB", lambda r: f"{r['cache_bytes'] / 2**20:.2f}"),
    ]
    rows = [{**results[run], "panel": panel, "line": line, "x": x} for panel, line, x, run in places]
    return "\n".join([report.table(rows, cells, left=7), *([study.note] if study.note else [])])


def figure(study: Study, results: Mapping[Run, dict[str, Any]], path: Path, *, recency: str) -> None:
    """Draw each run's recall with its 95% interval, panel by panel, with the full cache and recency as grey lines."""
    plt = report.pyplot()
    panels = list(dict.fromkeys(point.panel for point in study.points))
    across = 2 if len(panels) > 3 else len(panels)
    down = -(-len(panels) // across)
    places = [len({p.x for p in study.points if p.panel == panel}) for panel in panels]
    widths = [max(2.6, 0.9 + 0.75 * count) for count in places] if down == 1 else [4.8] * across
    drawing, axes = plt.subplots(
        down, across, figsize=(1.0 + sum(widths), 0.9 + 4.1 * down), squeeze=False, sharey=True, layout="constrained",
        width_ratios=widths,
    )  # fmt: skip
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, panel in zip(axes.flat, panels, strict=False):
        axis.set_title(panel, fontsize=11)
        axis.set_xlabel(study.axis, fontsize=10)
        _study_panel(axis, study, [p for p in study.points if p.panel == panel], results, recency)
    for axis in axes[:, 0]:
        axis.set_ylabel("exact recall", fontsize=10)
    drawing.suptitle(study.title, fontsize=13)
    if study.note:
        drawing.supxlabel(study.note, fontsize=9)
    report.save(drawing, path, dpi=130)


def _study_panel(
    axis: Any, study: Study, points: Sequence[Point], results: Mapping[Run, dict[str, Any]], recency: str
) -> None:
    everywhere = list(dict.fromkeys(point.line for point in study.points))  # a line has one colour in all panels
    lines = [line for line in everywhere if any(point.line == line for point in points)]
    xs: list[Any] = list(dict.fromkeys(_place(study, point, results) for point in points))
    numeric = all(isinstance(x, float) for x in xs)
    shares = {point.run.budget for point in points}
    questions = {point.run.question for point in points}
    results_here = {run: result for run, result in results.items() if run.question in questions}
    full = next((r for run, r in results_here.items() if run.budget is None), None)
    if full is not None:
        axis.axhline(full["recall"], color="#999999", linewidth=1, linestyle="--", label="full cache", zorder=1)
    floor: dict[float, float] = {}
    for run, result in results_here.items():
        if run.policy == recency and run.budget is not None and run.budget in shares:
            floor[run.budget] = result["recall"]
    if floor and numeric and not study.by_bytes:
        axis.plot(
            sorted(floor), [floor[x] for x in sorted(floor)], color="#999999", linewidth=1, label="recency", zorder=1
        )
    elif len(floor) == 1 and len(shares) == 1:
        axis.axhline(*floor.values(), color="#999999", linewidth=1, label="recency", zorder=1)
    for number, line in enumerate(lines):
        own = [point for point in points if point.line == line]
        found = [results[point.run] for point in own]
        shift, which = number - (len(lines) - 1) / 2, everywhere.index(line)
        if numeric:  # the axis is logarithmic, so points are shifted by a factor
            at = [float(_place(study, point, results)) * 1.015**shift for point in own]
        else:
            apart = 0.06 if study.connect else 0.72 / len(lines)
            at = [xs.index(_place(study, point, results)) + shift * apart for point in own]
        recall = [result["recall"] for result in found]
        error = [[r["recall"] - r["low"] for r in found], [r["high"] - r["recall"] for r in found]]
        axis.errorbar(
            at, recall, np.maximum(error, 0),  # at recall 1, rounding may put the interval's end below the recall
            color=report.colour(which), label=line.replace("\n", " "),
            marker="os^"[which // len(report.COLOURS) % 3],  # lines of the same colour have different marks
            markersize=4.5, linewidth=1.6, elinewidth=0.8, capsize=0, zorder=3,
            linestyle="-" if numeric or study.connect else "none",
        )  # fmt: skip
    if numeric:
        axis.set_xscale("log")
        ticks = _ticks(xs) if study.by_bytes else {x: f"{100 * x:g}%" for x in xs}
        axis.set_xticks(list(ticks), list(ticks.values()), fontsize=9.5)
        axis.minorticks_off()
    else:
        axis.set_xticks(range(len(xs)), [str(x) for x in xs], fontsize=9.5)
        axis.set_xlim(-0.6, len(xs) - 0.4)
    axis.set_ylim(-0.03, 1.03)
    report.plain(axis)
    axis.tick_params(labelsize=9.5)
    axis.set_axisbelow(True)
    place = (0.5, -0.16 if axis.get_xlabel() else -0.13)
    axis.legend(fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=place, ncols=2)


def _place(study: Study, point: Point, results: Mapping[Run, dict[str, Any]]) -> Any:
    """Return where a point is drawn on the axis."""
    return results[point.run]["bytes_per_token"] if study.by_bytes else point.x


def _ticks(xs: Sequence[float]) -> dict[float, str]:
    """Return the ticks of an axis in bytes: the powers of two among them, and the next ones around."""
    low, high = (round(bound(np.log2(end))) for bound, end in ((np.floor, min(xs)), (np.ceil, max(xs))))
    return {float(2**power): f"{2**power:,}" for power in range(low, high + 1)}
