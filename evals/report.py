"""Shared by the tables and pictures of several evaluations: colours, columns, intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CAOTE_LINKS = ("caote", "fast_caote")
MOMENTS = {"block": "after every block", "prompt": "once", "published": "as published"}
PICTURES = (".png", ".svg", ".pdf")
GREY = "#7d868f"  # text that reads on white and on black
# Okabe and Ito's colours, which colour-blind readers can tell apart, with violet for black; grey: reference lines.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1")


def task_table(
    rows: Sequence[dict[str, Any]], *, recency: str, short: Mapping[str, str], notes: Sequence[str] = ()
) -> str:
    """Return a table with one row per setting and length: the mean of the tasks' means, and each task's mean.

    A minus marks a mean below plain recency.

    Args:
        rows: from :func:`evals.evaluator.summarise`.
        short: the tasks' names in the head.
        notes: lines below the table.
    """
    where = ("model", "evaluation", "length", "budget", "when", "question")
    line = {tuple(r[name] for name in where): r["score"] for r in rows if r["policy"] == recency}
    tasks = list(dict.fromkeys(task for r in rows for task in r["tasks"]))
    several = [name for name in ("model", "evaluation", "length") if len({r[name] for r in rows}) > 1]
    lines = []
    for r in rows:
        floor = line.get(tuple(r[name] for name in where))
        under = floor is not None and r["score"] < floor
        lines.append(
            (
                *(str(r[name]) for name in several),
                r["policy"],
                "all" if r["budget"] is None else str(r["budget"]),
                evicts(r),
                r["question"],
                f"{r['score']:.3f}{'-' if under else ' '}",
                f"{r['low']:.3f}..{r['high']:.3f}",
                *(f"{r['tasks'][task]['score']:.2f}" if task in r["tasks"] else "" for task in tasks),
                f"{r['cache_bytes'] / 2**20:.2f}",
                rate(r["decode_tokens_per_second"]),
            )
        )
    names = [short.get(task, task) for task in tasks]
    head = (*several, "policy", "budget", "evicts", "question", "mean", "95%", *names, "cache MiB", "decode tok/s")
    marked = [f"'-': under plain recency, {recency}"] if any("-" in row[len(several) + 4] for row in lines) else []
    return "\n".join([columns(head, lines, left=len(several) + 4), *marked, *notes])


def comparison_table(comparisons: Sequence[dict[str, Any]]) -> str:
    """Return a table of whether each policy with CAOTE is better than the same policy without it."""
    several = [name for name in ("length",) if len({c.get(name) for c in comparisons}) > 1]
    rows = [
        (
            *(str(c[name]) for name in several),
            c["policy"],
            c["against"],
            str(c["budget"]),
            evicts(c),
            c["question"],
            f"{c['difference']:+.3f}",
            f"{c['low']:+.3f}..{c['high']:+.3f}",
            c["better"],
        )
        for c in comparisons
    ]
    head = (*several, "policy", "against", "budget", "evicts", "question", "difference", "95%", "better")
    return columns(head, rows, left=5 + len(several))


def check_plot(path: Path) -> None:
    """Check before any work that a picture can be drawn at the end.

    Raises:
        ValueError: the suffix is unknown.
        ImportError: matplotlib is not installed.
    """
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"the picture {path} has the suffix {path.suffix!r}; give one of {', '.join(PICTURES)}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("pictures need matplotlib; install it with: pip install 'kvjax[plot]'.") from None


def group(result: dict[str, Any]) -> tuple[str, str, Any]:
    """Return the panel in which a result is drawn: its question, moment and budget."""
    return result["question"], result["when"], result["budget"]


def evicts(row: Mapping[str, Any]) -> str:
    """Return in words when the policy of a row evicts: in the prompt, and after it.

    Example:
        >>> from evals import report
        >>> report.evicts({"budget": 64, "when": "published", "evicts": ["prompt", 0]})
        'prompt, then never'
    """
    if row["budget"] is None:
        return "never"
    if row.get("evicts") is None:  # a file of an earlier version, which evicted at every step of decode
        return str(row["when"])
    prompt, every = row["evicts"]
    behind = {0: "never", 1: "every step"}.get(every, f"every {every}")
    return f"{prompt}, then {behind}"


def moment(group: tuple[str, str, Any]) -> str:
    """Return a group in words, for a panel's title."""
    question, when, budget = group
    if budget is None:
        return "full cache"
    unknown = ", question unknown" if question == "agnostic" else ""
    return f"budget {budget}, {'by block' if when == 'block' else MOMENTS[when]}{unknown}"


def without_caote(policy: str) -> str:
    """Return a policy without its CAOTE links; its allocation is kept.

    >>> without_caote("h2o+caote(rounds=2)+protect(recent=0.5)@layer")
    'h2o+protect(recent=0.5)@layer'
    """
    chain, at, allocation = policy.partition("@")
    return "+".join(link for link in chain.split("+") if link.split("(")[0] not in CAOTE_LINKS) + at + allocation


def pyplot() -> Any:
    """Import matplotlib.pyplot, set up to draw to files only."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rc("text", color=GREY)
    plt.rc("axes", labelcolor=GREY, edgecolor=GREY)
    plt.rc("xtick", color=GREY)
    plt.rc("ytick", color=GREY)
    plt.rc("savefig", transparent=True)
    plt.rc("legend", framealpha=0.0)
    return plt


def rate(per_second: float | None) -> str:
    """Return tokens per second as text, or "n/a" where they were not measured."""
    return "n/a" if per_second is None else f"{per_second:,.0f}"


def interval(bounds: Sequence[float | None] | None, form: str) -> str:
    """Return an interval as text, or "n/a" where there is none."""
    low, high = bounds or (None, None)
    return "n/a" if low is None or high is None else f"{low:{form}}..{high:{form}}"


def colour(index: int) -> str:
    """Return a line's colour; after the last colour comes the first again."""
    return COLOURS[index % len(COLOURS)]


def plain(axis: Any) -> None:
    """Draw light grid lines, and no frame on top and right."""
    axis.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.8)
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Return text in aligned columns: the first ``left`` columns to the left, figures to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        parts = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(parts).rstrip()

    return "\n".join([line(head), line(["-" * width for width in widths]), *map(line, rows)])
