"""Tables for the terminal, and pictures."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from models.commands import replacing

PICTURES = (".png", ".svg", ".pdf")


def table(results: Sequence[dict[str, Any]], *, recency: str) -> str:
    """A row for each policy, budget, moment and question; a minus marks what stays under plain recency."""
    line = {(r["budget"], r["when"], r["question"]): r["recall"] for r in results if r["policy"] == recency}
    rows = []
    for r in results:
        floor = line.get((r["budget"], r["when"], r["question"]))
        under = floor is not None and r["recall"] < floor
        rows.append(
            (
                r["policy"],
                "all" if r["budget"] is None else str(r["budget"]),
                "never" if r["budget"] is None else r["when"],
                r["question"],
                f"{r['recall']:.3f}{'-' if under else ' '}",
                f"{r['low']:.3f}..{r['high']:.3f}",
                f"{r['cache_bytes'] / 2**20:.2f}",
                _rate(r["prefill_tokens_per_second"]),
                _rate(r["decode_tokens_per_second"]),
            )
        )
    head = ("policy", "budget", "evicts", "question", "recall", "95%", "cache MiB", "prefill tok/s", "decode tok/s")
    note = f"\n'-': under plain recency, {recency}" if any("-" in row[4] for row in rows) else ""
    return _columns(head, rows, left=4) + note


def comparison_table(comparisons: Sequence[dict[str, Any]]) -> str:
    """Is X + caote better than X? A row each."""
    rows = [
        (
            c["policy"],
            c["against"],
            str(c["budget"]),
            c["when"],
            c["question"],
            f"{c['difference']:+.3f}",
            f"{c['low']:+.3f}..{c['high']:+.3f}",
            c["better"],
        )
        for c in comparisons
    ]
    return _columns(("policy", "against", "budget", "evicts", "question", "difference", "95%", "better"), rows, left=5)


def environment() -> dict[str, Any]:
    """The device and the versions that figures were made with."""
    packages = ("kvjax", "jax", "jaxlib", "flax", "numpy")
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {"device": jax.devices()[0].device_kind, "versions": {"python": platform.python_version(), **versions}}


def check_plot(path: Path) -> None:
    """Refuses a picture that could not be drawn at the end.

    Raises:
        ValueError: an unknown suffix.
        ImportError: matplotlib is not installed.
    """
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"the picture {path} has the suffix {path.suffix!r}; give one of {', '.join(PICTURES)}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("pictures need matplotlib; install it with: pip install 'kvjax[plot]'.") from None


def heat_map(results: Sequence[dict[str, Any]], path: Path, *, recency: str) -> None:
    """Recall over depth and length: a panel for each policy, a row of panels for each moment and budget.

    Above each panel stands its mean, in red where it is under plain recency.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    full = [r for r in results if r["budget"] is None]
    evicting = [r for r in results if r["budget"] is not None]
    policies = list(dict.fromkeys(r["policy"] for r in evicting))
    groups = list(dict.fromkeys(map(_group, evicting))) or [("after", "never", None)]
    columns = (["full"] if full else []) + policies
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
                and (_group(r) == (question, when, budget) or (policy == "full" and r["question"] == question))
            ]
            if not found:
                axis.set_axis_off()
                continue
            image = _panel(axis, found[0])
            if row == 0:
                axis.set_title("recency" if policy == recency else policy.replace("+", "\n+"), fontsize=8.5, pad=16)
            line = [r["recall"] for r in evicting if r["policy"] == recency and _group(r) == (question, when, budget)]
            under = bool(line) and found[0]["recall"] < line[0]
            axis.text(
                0.5, 1.03, f"{found[0]['recall']:.2f}", transform=axis.transAxes, ha="center", fontsize=9.5,
                fontweight="bold", color="#b3261e" if under else "black",
            )  # fmt: skip
            if row == len(groups) - 1:
                axis.set_xlabel("prompt tokens", fontsize=7)
            if column == 0:
                moment = {"block": "after every block", "prompt": "once, after the prompt", "never": ""}[when]
                axis.set_ylabel(f"budget {budget}, evicts\n{moment}\n\ndepth of the fact", fontsize=7.5)
            else:
                axis.set_yticklabels([])
    bar = figure.colorbar(image, ax=axes, shrink=0.6, pad=0.01, aspect=30)
    bar.set_label("exact recall", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    asked = " and ".join(dict.fromkeys(question for question, *_ in groups))
    note = "; red: under plain recency" if any(r["policy"] == recency for r in evicting) else ""
    figure.suptitle(f"Exact recall of a fact, question {asked} the text{note}", fontsize=12)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=160)
    plt.close(figure)


def _group(result: dict[str, Any]) -> tuple[str, str, Any]:
    return result["question"], result["when"], result["budget"]


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


def _rate(rate: float | None) -> str:
    return "n/a" if rate is None else f"{rate:,.0f}"


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Aligned text; the first ``left`` columns to the left, figures to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        parts = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(parts).rstrip()

    return "\n".join([line(head), line(["-" * width for width in widths]), *map(line, rows)])
