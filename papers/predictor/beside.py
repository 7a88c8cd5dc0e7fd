"""Compare selections and draw their figures: what the experiments on them share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evals import report
from kvjax.sources import PREDICTOR


def sides(
    results: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], dict[str, Any]]]:
    """Yield the predictor with each other selection of its sparsity and mode, and the labels of their comparison."""
    for one, other in itertools.product(results, results):
        same = all(len({r.get(name) for r in (one, other)} - {None}) <= 1 for name in ("mode", "sparsity"))
        if same and one["select"] == PREDICTOR != other["select"]:
            yield one, other, {"select": one["select"], "against": other["select"], "sparsity": one["sparsity"]}


class Panel(NamedTuple):
    """A panel of :func:`dots`: the fields of its results that have a value and the ends of its interval."""

    title: str
    results: Sequence[Mapping[str, Any]]
    value: str = "accuracy"
    low: str = "low"
    high: str = "high"


def dots(panels: Sequence[Sequence[Panel]], path: Path, *, title: str) -> None:
    """Draw values from 0 to 1 with their intervals: a line per selection, a colour per sparsity."""
    plt = report.pyplot()
    every = [r for across in panels for panel in across for r in panel.results]
    names = list(dict.fromkeys(r["select"] for r in every))
    sparsities = sorted({r["sparsity"] for r in every if r["sparsity"] is not None})
    height = 0.5 + 0.16 * len(names) * (1 + len(sparsities))
    figure, axes = plt.subplots(
        len(panels), len(panels[0]), figsize=(1.6 + 3.2 * len(panels[0]), 1.3 + len(panels) * height),
        squeeze=False, sharey=True, sharex=True, layout="constrained",
    )  # fmt: skip
    handles: dict[str, Any] = {}
    for axis, panel in zip(axes.flat, itertools.chain(*panels), strict=True):
        for r in panel.results:
            dense = r["sparsity"] is None
            index = 0 if dense else sparsities.index(r["sparsity"])
            shift = 0 if dense else (index - (len(sparsities) - 1) / 2) * 0.7 / len(sparsities)
            value, low, high = (r[field] for field in panel[2:])
            drawn = axis.errorbar(
                value, names.index(r["select"]) + shift, xerr=[[max(value - low, 0)], [max(high - value, 0)]],
                fmt="osv^D"[index % 5], markersize=4.5, color="#777777" if dense else report.colour(index),
                elinewidth=1.2,
            )  # fmt: skip
            handles.setdefault("everything read" if dense else f"sparsity {r['sparsity']:g}", drawn)
        axis.set_title(panel.title, fontsize=9.5)
        axis.set_xlim(-0.02, 1.02)
        axis.set_yticks(range(len(names)), names, fontsize=8)
        report.plain(axis, grid="x")
    axes[0][0].invert_yaxis()
    report.legend(figure, handles, columns=5)
    figure.suptitle(title, fontsize=11)
    report.save(figure, path)
