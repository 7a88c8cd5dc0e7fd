"""README's picture: run `python docs/readme_picture.py` whenever docs/results/slots.json has changed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from docs import tables  # noqa: E402
from evals import report  # noqa: E402

PICTURE = DOCS / "images" / "memory.png"
# What a line shows, its colour, and where its labels stand: above the points (1) or below (-1).
SERIES = (
    ("full cache", ("full", None), report.COLOURS[1], 1),
    ("the gate, 1,024 slots", ("gate", 1024), report.COLOURS[2], 1),
    ("the gate, 512 slots", ("gate", 512), report.COLOURS[0], 1),
    ("newest tokens, 512 slots", ("recency", 512), report.GREY, -1),
)


def points(results: list[dict[str, Any]], policy: str, budget: int | None) -> list[tuple[int, float, float]]:
    """Return a policy's prompt lengths, each with the most MiB that a prompt's cache took and the share of answers."""
    own = [r for r in results if (r["policy"], r["budget"]) == (policy, budget)]
    return sorted((r["length"], r["peak_cache_bytes"] / 2**20, r["score"]) for r in own)


def draw(path: Path) -> None:
    """Draw peak memory over prompt length, with the share of the questions that were answered at each point."""
    results, plt = tables.read("slots.json")["results"], report.pyplot()
    figure, axes = plt.subplots(figsize=(6, 4.5), layout="constrained")
    for name, (policy, budget), colour, side in SERIES:
        lengths, peaks, scores = zip(*points(results, policy, budget), strict=True)
        axes.plot(lengths, peaks, marker="o", color=colour, linewidth=2.5, label=name)
        for length, peak, score in zip(lengths, peaks, scores, strict=True):
            axes.annotate(
                report.percent(score), (length, peak), (-8 if policy == "full" else 14, 6 * side),
                textcoords="offset points",
                color=colour, fontsize=12, fontweight="bold", ha="right" if policy == "full" else "center",
                va="bottom" if side > 0 else "top",
            )  # fmt: skip
    ticks = [512, 1024, 2048, 4096]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=12)
    axes.tick_params(axis="y", labelsize=12)
    axes.set_xlim(0, 4500)
    axes.set_ylim(0, 200)
    axes.set_xlabel("prompt, tokens", fontsize=13)
    axes.set_ylabel("most memory held, MiB", fontsize=13)
    axes.legend(fontsize=12, frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


if __name__ == "__main__":
    draw(PICTURE)
