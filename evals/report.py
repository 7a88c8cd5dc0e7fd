"""Shared by the tables and pictures of several evaluations: colours, columns, intervals."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from evals import statistics
from kvjax._src import install
from models import files
from models.commands import provenance

Cell = str | Callable[[Any], str]
CAOTE_LINKS = ("caote", "fast_caote")
MOMENTS = {"block": "by block", "prompt": "once", "published": "as published"}
READS = "select="  # a line's policy begins so where nothing is evicted, and a decode step reads a part
PICTURES = (".png", ".svg", ".pdf")
GREY = "#7d868f"  # text that reads on white and on black
# Okabe and Ito's colours, which colour-blind readers can tell apart, and violet; grey: reference lines.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#000000")


def percent(share: float) -> str:
    """Return a share in percent, halves upwards however they were added up: 0.575 is 58%.

    Example:
        >>> from evals.report import percent
        >>> percent(0.575), percent(23 / 40)
        ('58%', '58%')
    """
    return f"{math.floor(100 * share + 0.5 + 1e-9)}%"


def task_table(
    lines: Sequence[dict[str, Any]], *, recency: str, short: Mapping[str, str], notes: Sequence[str] = ()
) -> str:
    """Return a table with one line per setting and length: the mean of the tasks' means, and each task's mean.

    A minus marks a mean below plain recency. ``lines`` are those of :func:`evals.summaries.summarise`, and ``short``
    has the tasks' names in the head.
    """
    where = ("model", "evaluation", "length", "budget", "when", "question")
    under = below(lines, recency, "score", where)
    tasks = list(dict.fromkeys(task for r in lines for task in r["tasks"]))
    names = labels(lines)

    whole = short.get(tasks[0], tasks[0]) if len(tasks) == 1 else "mean"

    def of_task(task: str) -> tuple[str, Cell]:
        return short.get(task, task), lambda r: f"{r['tasks'][task]['score']:.2f}" if task in r["tasks"] else ""

    predicted: list[tuple[str, Cell]] = []
    if any("perplexity" in r for r in lines):
        predicted = [
            ("perplexity", lambda r: f"{r['perplexity']:.3f}"),
            ("against full", lambda r: f"{r['increase']:+.2%}" if "increase" in r else ""),
            ("95%", lambda r: between("+.2%", "increase_low", "increase_high")(r) if "increase" in r else ""),
        ]
    text = table(
        lines,
        [
            *names,
            (whole, lambda r: f"{r['score']:.3f}{'-' if under(r) else ' '}"),
            ("95%", "{low:.3f}..{high:.3f}"),
            *map(of_task, tasks if len(tasks) > 1 else ()),
            *predicted,
            ("cache MiB", lambda r: f"{r['cache_bytes'] / 2**20:.2f}"),
            ("decode tok/s", lambda r: "n/a" if (rate := r["decode_tokens_per_second"]) is None else f"{rate:,.0f}"),
        ],
        left=len(names),
    )
    marked = ["'-': under plain recency"] if any(map(under, lines)) else []
    return "\n".join([text, *marked, *notes])


def below(
    lines: Sequence[dict[str, Any]], recency: str, value: str, where: Sequence[str]
) -> Callable[[dict[str, Any]], bool]:
    """Return a function that tells whether a line's value is below that of plain recency with the same ``where``."""
    floors = {tuple(r[name] for name in where): r[value] for r in lines if r["policy"] == recency}
    return lambda r: r[value] < floors.get(tuple(r[name] for name in where), r[value])


def interval(bounds: Sequence[float | None] | None, form: str) -> str:
    """Return an interval as text, or "n/a" where there is none."""
    low, high = bounds or (None, None)
    return "n/a" if low is None or high is None else f"{low:{form}}..{high:{form}}"


def between(form: str, low: str = "low", high: str = "high") -> Callable[[Mapping[str, Any]], str]:
    """Return the cell of an interval whose ends are two fields of a line."""
    return lambda line: interval((line[low], line[high]), form)


def labels(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, Cell]]:
    """Return the columns that tell lines apart: :data:`LABELS` that lines have, and :data:`IF_SEVERAL` that differ."""
    there = [name for name in LABELS if any(name in line for line in lines)]
    there = [name for name in there if name not in IF_SEVERAL or len({line.get(name) for line in lines}) > 1]
    return [(name, LABELS[name]) for name in there]


def figure(head: str, field: str, form: str = ".3f", low: str = "low", high: str = "high") -> list[tuple[str, Cell]]:
    """Return the columns of a figure and of its 95% interval."""
    return [(head, f"{{{field}:{form}}}"), ("95%", between(form, low, high))]


DIFFERENCE = figure("difference", "difference", "+.3f")


def comparison_table(comparisons: Sequence[dict[str, Any]], figures: Sequence[tuple[str, Cell]] = DIFFERENCE) -> Table:
    """Return a table of comparisons, such as :func:`compare` makes: labels, figures, verdict."""
    names = labels(comparisons)
    verdict: list[tuple[str, Cell]] = [
        (name, f"{{{name}}}") for name in ("better", "larger", "farther") if any(name in line for line in comparisons)
    ]
    return table(comparisons, [*names, *figures, *verdict], left=len(names))


def compare(
    lines: Sequence[Mapping[str, Any]],
    against: str,
    values: Callable[[Mapping[str, Any]], Sequence[float]],
    where: Sequence[str] = (),
    fields: Sequence[str] = ("budget", "when", "evicts"),
    interval: statistics.Interval = statistics.paired_interval,
) -> list[dict[str, Any]]:
    """Compare each line with those of :func:`pairs`: the difference of their values of the same samples.

    Args:
        values: one number per sample of a line; lines with other numbers of samples are not compared.
        where: see :func:`pairs`.
        fields: those of a line that its comparisons have, too, beside ``where``.
        interval: of a mean of differences; see :func:`evals.statistics.comparison`.
    """
    found = []
    for line, other in pairs(lines, against, where):
        ours, theirs = values(line), values(other)
        if len(ours) == len(theirs) > 0:
            told = {"policy": line["policy"], "against": other["policy"]}
            told |= {name: line[name] for name in (*fields, *where) if name in line}
            differences = [a - b for a, b in zip(ours, theirs, strict=True)]
            found.append(told | statistics.comparison(differences, interval=interval))
    return found


def check_outputs(figures: Path | None, *pictures: Path | None) -> None:
    """Check before any work that a JSON file and pictures can be written; see :func:`check_plot`."""
    for path in pictures:
        if path is not None:
            check_plot(path)
    files.check_outputs([figures, *pictures])


def write(
    flags: argparse.Namespace,
    figures: Mapping[str, Any],
    digests: Mapping[str, Any],
    draw: Callable[[Path], None] = lambda path: None,
) -> None:
    """Write the JSON and draw the picture that a command's flags ask for, and print their paths."""
    if flags.json is not None:
        provenance.write(flags, figures, digests)
        print(f"figures: {flags.json}")
    if getattr(flags, "plot", None) is not None:
        draw(flags.plot)
        print(f"picture: {flags.plot}")


def check_plot(path: Path) -> None:
    """Raise ValueError or ImportError before any work if a picture cannot be drawn at the end."""
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"the picture {path} has the suffix {path.suffix!r}; give one of {', '.join(PICTURES)}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError(f"{path} cannot be drawn: {install.needed(['matplotlib'], 'plot')}") from None


def group(result: dict[str, Any]) -> tuple[str, str, Any]:
    """Return the panel in which a result is drawn: its question, moment and budget."""
    return result["question"], result["when"], result["budget"]


def budget(line: Mapping[str, Any]) -> str:
    """Return the budget of a line in words."""
    return "all" if line["budget"] is None else str(line["budget"])


def evicts(line: Mapping[str, Any]) -> str:
    """Return in words when the policy of a line evicts, such as "prompt, then never"."""
    if line.get("budget", line.get("sparsity")) is None or str(line.get("policy")).startswith(READS):
        return "never"
    if line.get("evicts") is None:  # simulated; or a file of an earlier version, which evicted at every step of decode
        return str(line.get("when") or "")
    prompt, every = line["evicts"]
    behind = {0: "never", 1: "every step"}.get(every, f"every {every}")
    return f"{prompt}, then {behind}"


def moment(group: tuple[str, str, Any]) -> str:
    """Return a group in words, for a panel's title."""
    question, when, budget = group
    if budget is None:
        return "full cache"
    unknown = ", question unknown" if question == "unknown" else ""
    return f"budget {budget}, {MOMENTS[when]}{unknown}"


LABELS: dict[str, Cell] = {
    **{name: f"{{{name}}}" for name in ("model", "evaluation", "length", "policy", "select", "against", "mode")},
    "sparsity": lambda r: "none" if r["sparsity"] is None or r["select"] == "full" else f"{r['sparsity']:g}",
    "budget": budget,
    "evicts": evicts,
    "question": "{question}",
    "task": "{task}",
    "metric": "{metric}",
}
IF_SEVERAL = ("model", "evaluation", "length")


def without_caote(policy: str) -> str:
    """Return a policy without its CAOTE links; its allocation is kept.

    >>> without_caote("h2o+caote(norm=1)+protect(sinks=4)@layer")
    'h2o+protect(sinks=4)@layer'
    """
    return re.sub(rf"\+({'|'.join(CAOTE_LINKS)})(\([^()]*\))?(?=[+@]|$)", "", policy)


def variants(policy: str) -> list[str]:
    """Return what a policy is always compared with: itself without CAOTE, and the exact form of the group's mean.

    >>> variants("h2o+caote(group='mean')"), variants("h2o")
    (['h2o', 'h2o+caote'], [])
    """
    found = without_caote(policy), policy.replace("(group='mean')", "")
    return [other for other in dict.fromkeys(found) if other != policy]


def pairs(
    lines: Sequence[Mapping[str, Any]], against: str, where: Sequence[str] = ()
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield each line with those that it is compared with: that of the policy ``against``, and its :func:`variants`.

    Both have the same budget and moment, and the same fields ``where``. The full cache has no budget, and neither it
    nor a selection has a moment.

    Example:
        >>> from evals import report
        >>> names = ("recency", "h2o", "h2o+caote")
        >>> lines = [dict(policy=name, budget=8, when="block") for name in names]
        >>> pairs = report.pairs(lines, "recency")
        >>> [(line["policy"], other["policy"]) for line, other in pairs]
        [('h2o', 'recency'), ('h2o+caote', 'recency'), ('h2o+caote', 'h2o')]
    """

    def beside(line: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        evict = not any(r["budget"] is None or r["policy"].startswith(READS) for r in (line, other))
        return (
            all(line.get(name) == other.get(name) for name in where)
            and other["budget"] in (None, line["budget"])
            and (not evict or line["when"] == other["when"])
        )

    for line in lines:
        for name in dict.fromkeys([against, *variants(line["policy"])]):
            found = [other for other in lines if other["policy"] == name != line["policy"] and beside(line, other)]
            if found:
                yield line, min(found, key=lambda other: other["when"] != line["when"])


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


def colour(index: int) -> str:
    """Return a line's colour; after the last colour comes the first again."""
    return COLOURS[index % len(COLOURS)]


def frameless(axis: Any) -> None:
    """Draw no frame and no ticks around a map."""
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)


def plain(axis: Any, *, grid: str = "y") -> None:
    """Draw light grid lines, and no frame on top and right."""
    axis.grid(axis=grid, color=GREY, alpha=0.25, linewidth=0.8)
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def legend(figure: Any, handles: Mapping[str, Any], *, columns: int = 4, size: int = 8) -> None:
    """Draw a figure's legend below its panels."""
    found = list(handles.values()), list(handles)
    figure.legend(*found, loc="outside lower center", ncols=min(columns, len(handles)), fontsize=size, frameon=False)


def save(figure: Any, path: Path, *, dpi: int = 160) -> None:
    """Write a figure to a file, whole or not at all, and close it."""
    with files.replacing(path) as temporary:
        figure.savefig(temporary, dpi=dpi)
    pyplot().close(figure)


def show(*texts: str) -> None:
    """Print the texts that are not empty, with an empty line between them."""
    print("\n\n".join(text for text in texts if text))


class Table(str):
    """A table in text, in aligned columns, with notes below it; empty without lines. :meth:`markdown` is for a page.

    Args:
        left: how many columns stand to the left; the others hold figures, to the right.

    Example:
        >>> from evals import report
        >>> head, lines = ("policy", "ms"), [("h2o", "1.5")]
        >>> table = report.Table(head, lines, left=1, notes=["on a CPU"])
        >>> print(table)
        policy   ms
        ------  ---
        h2o     1.5
        on a CPU
        >>> table.markdown()
        '| policy | ms |\\n| --- | ---: |\\n| h2o | 1.5 |\\n\\non a CPU'
    """

    cells: Sequence[Sequence[str]]
    left: int
    notes: Sequence[str]

    def __new__(
        cls, head: Sequence[str], lines: Sequence[Sequence[str]], *, left: int, notes: Sequence[str] = ()
    ) -> Table:
        """Return the text."""
        widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]

        def aligned(cells: Sequence[str]) -> str:
            parts = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
            return "  ".join(parts).rstrip()

        made = [aligned(head), aligned(["-" * width for width in widths]), *map(aligned, lines)] if lines else []
        found = super().__new__(cls, "\n".join([*made, *notes]))
        found.cells, found.left, found.notes = [head, *lines] if lines else [], left, notes
        return found

    def markdown(self) -> str:
        """Return the table in Markdown, which a page wraps; the notes below it become paragraphs."""
        made = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in self.cells]
        if made:
            rule = ("---" if i < self.left else "---:" for i in range(len(self.cells[0])))
            made.insert(1, f"| {' | '.join(rule)} |")
        return "\n\n".join(filter(None, ["\n".join(made), *self.notes]))


def table(
    lines: Sequence[Mapping[str, Any]], cells: Sequence[tuple[str, Cell]], *, left: int, notes: Sequence[str] = ()
) -> Table:
    """Return a table; it is empty without lines.

    Args:
        cells: each column's head, and the text of its cells: a format of the line's fields, or a function of the line.
        left, notes: as in :class:`Table`.

    Example:
        >>> from evals import report
        >>> cells = [("policy", "{policy}"), ("share", "{share:.1%}")]
        >>> print(report.table([{"policy": "h2o", "share": 0.5}], cells, left=1))
        policy  share
        ------  -----
        h2o     50.0%
    """
    texts = [[cell.format_map(r) if isinstance(cell, str) else cell(r) for _, cell in cells] for r in lines]
    return Table([head for head, _ in cells], texts, left=left, notes=notes)
