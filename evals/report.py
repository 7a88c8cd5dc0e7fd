"""Tables for the terminal, and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models.commands import replacing

CAOTE_LINKS = ("caote", "fast_caote")
PICTURES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, which the colour-blind can tell apart too; grey is for reference lines.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


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
    return columns(head, rows, left=4) + note


def task_table(
    rows: Sequence[dict[str, Any]], *, recency: str, short: Mapping[str, str], notes: Sequence[str] = ()
) -> str:
    """A row for each setting and length: the tasks' mean and each task's; a minus marks a mean under plain recency.

    Args:
        rows: as :func:`evals.running.summarise` gives them.
        short: the tasks' names in the head.
        notes: lines below.
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
                "never" if r["budget"] is None else r["when"],
                r["question"],
                f"{r['score']:.3f}{'-' if under else ' '}",
                f"{r['low']:.3f}..{r['high']:.3f}",
                *(f"{r['tasks'][task]['score']:.2f}" if task in r["tasks"] else "" for task in tasks),
                f"{r['cache_bytes'] / 2**20:.2f}",
                _rate(r["decode_tokens_per_second"]),
            )
        )
    names = [short.get(task, task) for task in tasks]
    head = (*several, "policy", "budget", "evicts", "question", "mean", "95%", *names, "cache MiB", "decode tok/s")
    marked = [f"'-': under plain recency, {recency}"] if any("-" in row[len(several) + 4] for row in lines) else []
    return "\n".join([columns(head, lines, left=len(several) + 4), *marked, *notes])


def task_map(rows: Sequence[dict[str, Any]], path: Path, *, title: str, short: Mapping[str, str]) -> None:
    """The score of each policy in each task as colour and figure, a panel for each moment, budget and length."""
    plt = pyplot()
    where = lambda r: (r["model"], r["evaluation"], r["length"], r["question"], r["when"], r["budget"])  # noqa: E731
    groups = list(dict.fromkeys(where(r) for r in rows if r["budget"] is not None)) or [where(rows[0])]
    tasks = list(dict.fromkeys(task for r in rows for task in r["tasks"]))
    shown = [
        [r for r in rows if where(r) == group or (r["budget"] is None and where(r)[:4] == group[:4])]
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
        axis.set_yticks(range(len(found)), [r["policy"] for r in found], fontsize=7)
        axis.tick_params(length=0)
        for spine in axis.spines.values():
            spine.set_visible(False)
        length = "" if group[2] is None else f"{group[2]:,} tokens, "
        axis.set_title(f"{length}{_moment(group[3:])}", fontsize=8.5)
    figure.suptitle(title, fontsize=11)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=160)
    plt.close(figure)


def comparison_table(comparisons: Sequence[dict[str, Any]]) -> str:
    """Is X + caote better than X? A row each."""
    several = [name for name in ("length",) if len({c.get(name) for c in comparisons}) > 1]
    rows = [
        (
            *(str(c[name]) for name in several),
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
    head = (*several, "policy", "against", "budget", "evicts", "question", "difference", "95%", "better")
    return columns(head, rows, left=5 + len(several))


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
    plt = pyplot()
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


def fidelity_table(results: Sequence[dict[str, Any]]) -> str:
    """A row for each setting: means over layers, tokens and samples, and the tokens that heads hold."""
    rows = []
    for r in results:
        held = np.array(r["retained"]["mean"])
        rows.append(
            (
                r["policy"],
                "all" if r["budget"] is None else str(r["budget"]),
                "never" if r["budget"] is None else r["when"],
                r["question"],
                *(f"{r[name]:.3f}" for name in ("error", "cosine", "output_error", "output_cosine")),
                f"{r['kl']:.3f}",
                f"{r['kl_interval'][0]:.3f}..{r['kl_interval'][1]:.3f}",
                f"{held.min():.0f}..{held.max():.0f}",
            )
        )
    head = (
        "policy",
        "budget",
        "evicts",
        "question",
        "error",
        "cosine",
        "error W_O",
        "cosine W_O",
        "KL",
        "95%",
        "tokens",
    )
    return columns(head, rows, left=4) + (
        "\nerror: |full - evicted| / |full| of the attention output, mean over layers; W_O: behind the projection; "
        "tokens: of the heads' means, the smallest and the largest"
    )


def layer_lines(results: Sequence[dict[str, Any]], path: Path, *, recency: str) -> None:
    """Error and cosine over layers, before and behind W_O: a line a policy, a row for each budget and moment."""
    plt = pyplot()
    groups = list(dict.fromkeys(map(_group, results)))
    if len(groups) > 1:
        groups = [group for group in groups if group[2] is not None]  # the full cache has no budget, and no error
    panels = (
        ("error", "relative error"),
        ("cosine", "cosine"),
        ("output_error", "relative error behind W_O"),
        ("output_cosine", "cosine behind W_O"),
    )
    figure, axes = plt.subplots(
        len(groups), len(panels), figsize=(13.5, 1.4 + 2.9 * len(groups)), squeeze=False, layout="constrained"
    )
    handles: dict[str, Any] = {}
    policies = [name for name in dict.fromkeys(r["policy"] for r in results) if name not in (recency, "full")]
    bases = list(dict.fromkeys(map(without_caote, policies)))  # one colour each, dashed with CAOTE
    for number, group in enumerate(groups):
        for axis, (name, title) in zip(axes[number], panels, strict=True):
            for r in (r for r in results if _group(r) == group):
                layer = [x["layer"] + 1 for x in r["layers"]]
                if r["policy"] in policies:
                    index = bases.index(without_caote(r["policy"]))
                    style = {
                        "color": COLOURS[index % len(COLOURS)],
                        "marker": "osv^D"[index % 5],
                        "linestyle": "-" if r["policy"] in bases else "--",
                    }
                else:
                    style = {"color": "#999999", "marker": "", "linestyle": "-"}
                (line,) = axis.plot(layer, [x[name] for x in r["layers"]], linewidth=1.5, markersize=4, **style)
                bounds = np.array([x[f"{name}_interval"] for x in r["layers"]]).T
                axis.fill_between(layer, *bounds, color=style["color"], alpha=0.12, linewidth=0)
                handles.setdefault("recency" if r["policy"] == recency else r["policy"], line)
            if number == 0:
                axis.set_title(title, fontsize=9.5)
            if number == len(groups) - 1:
                axis.set_xlabel("layer", fontsize=8.5)
            axis.set_xticks(range(1, len(results[0]["layers"]) + 1))
            axis.tick_params(labelsize=8)
            axis.grid(axis="y", color="#eeeeee", linewidth=0.8)
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
        axes[number, 0].set_ylabel(_moment(group), fontsize=8)
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=min(4, len(handles)), fontsize=8,
        frameon=False,
    )  # fmt: skip
    figure.suptitle("Attention outputs of the answer's tokens: evicted against full cache", fontsize=12)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=160)
    plt.close(figure)


def head_map(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens that each layer and head retains: the mean over samples as colour, mean and range in figures.

    Where all heads hold the same there is nothing to see: only other results are shown, if there are any.
    """
    plt = pyplot()
    shown = [r for r in results if r["budget"] is not None and np.ptp(r["retained"]["mean"]) > 0] or list(results)
    layers, heads = np.array(shown[0]["retained"]["mean"]).shape
    down = -(-len(shown) // 4)
    across = -(-len(shown) // down)
    figure, axes = plt.subplots(
        down, across, figsize=(0.9 + across * max(2.5, 0.9 + 0.95 * heads), 0.9 + down * (0.9 + 0.36 * layers)),
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for axis in axes.flat[len(shown) :]:
        axis.set_axis_off()
    for axis, r in zip(axes.flat, shown, strict=False):
        held = {name: np.array(r["retained"][name]) for name in ("mean", "smallest", "largest")}
        image = axis.imshow(held["mean"], cmap="viridis", aspect="auto", vmin=0, vmax=max(held["mean"].max(), 1))
        if layers * heads <= 96:  # figures are readable
            for (layer, head), mean in np.ndenumerate(held["mean"]):
                axis.text(
                    head, layer, f"{mean:.0f}\n{held['smallest'][layer, head]}..{held['largest'][layer, head]}",
                    ha="center", va="center", fontsize=6, linespacing=0.95,
                    color="black" if mean > 0.6 * held["mean"].max() else "white",
                )  # fmt: skip
        axis.set_title(f"{r['policy'].replace('@', chr(10) + '@')}, {_moment(_group(r))}", fontsize=7.5)
        axis.set_xticks(range(heads), [str(head + 1) for head in range(heads)], fontsize=7)
        axis.set_yticks(range(layers), [str(layer + 1) for layer in range(layers)], fontsize=7)
        axis.tick_params(length=0)
        axis.set_xlabel("KV head", fontsize=7.5)
        for spine in axis.spines.values():
            spine.set_visible(False)
        figure.colorbar(image, ax=axis, shrink=0.8, aspect=20).ax.tick_params(labelsize=6)
    for axis in axes[:, 0]:
        axis.set_ylabel("layer", fontsize=7.5)
    figure.suptitle("Tokens retained by each head: mean, smallest..largest over samples", fontsize=11)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=160)
    plt.close(figure)


def perplexity_table(results: Sequence[dict[str, Any]]) -> str:
    """A row for each selection and sparsity, against the model that reads everything."""
    rows = [
        (
            r["select"],
            "none" if r["select"] == "full" else f"{r['sparsity']:g}",
            f"{r['perplexity']:.3f}",
            _interval((r["low"], r["high"]), ".3f"),
            "" if r["select"] == "full" else f"{r['increase']:+.2%}",
            "" if r["select"] == "full" else _interval((r["increase_low"], r["increase_high"]), "+.2%"),
        )
        for r in results
    ]
    return columns(("select", "sparsity", "perplexity", "95%", "against full", "95%"), rows, left=1)


def ratio_table(comparisons: Sequence[dict[str, Any]]) -> str:
    """How much larger is the perplexity than the predictor's? A row each."""
    rows = [
        (
            c["select"],
            c["against"],
            f"{c['sparsity']:g}",
            f"{c['increase']:+.2%}",
            _interval((c["low"], c["high"]), "+.2%"),
            c["larger"],
        )
        for c in comparisons
    ]
    return columns(("select", "against", "sparsity", "perplexity", "95%", "larger"), rows, left=2)


def coref_table(results: Sequence[dict[str, Any]]) -> str:
    """A row for each selection, mode and sparsity."""
    rows = [
        (
            r["select"],
            r["mode"],
            "none" if r["sparsity"] is None else f"{r['sparsity']:g}",
            f"{r['accuracy']:.3f}",
            _interval((r["low"], r["high"]), ".3f"),
            f"{r['coverage']:.3f}",
            _interval((r["coverage_low"], r["coverage_high"]), ".3f"),
        )
        for r in results
    ]
    note = "\naccuracy: names that are right as a whole; coverage: the mean share of a name's tokens that are right"
    return columns(("select", "mode", "sparsity", "accuracy", "95%", "coverage", "95%"), rows, left=2) + note


def coref_comparison_table(comparisons: Sequence[dict[str, Any]]) -> str:
    """Is the predictor better? A row for each other selection; the verdict is on accuracy."""
    rows = [
        (
            c["select"],
            c["against"],
            c["mode"],
            f"{c['sparsity']:g}",
            f"{c['difference']:+.3f}",
            _interval((c["low"], c["high"]), "+.3f"),
            f"{c['coverage_difference']:+.3f}",
            _interval((c["coverage_low"], c["coverage_high"]), "+.3f"),
            c["better"],
        )
        for c in comparisons
    ]
    head = ("select", "against", "mode", "sparsity", "accuracy", "95%", "coverage", "95%", "better")
    return columns(head, rows, left=3)


def accuracy_table(results: Sequence[dict[str, Any]]) -> str:
    """How much of the oracle's tokens each source finds, over all layers but the first: a row each."""
    rows = [
        (
            r["select"],
            f"{r['sparsity']:g}",
            *(
                text
                for name in ("token_accuracy", "hit_rate", "mass")
                for text in (f"{r[name]:.3f}", _interval(r[f"{name}_interval"], ".3f"))
            ),
        )
        for r in results
    ]
    head = ("select", "sparsity", "token accuracy", "95%", "hit rate", "95%", "mass", "95%")
    return columns(head, rows, left=1) + (
        "\ntoken accuracy: share of the oracle's tokens that are chosen, of the last query; hit rate: of all; "
        "mass: attention on what is chosen"
    )


def hit_comparison_table(comparisons: Sequence[dict[str, Any]]) -> str:
    """Does the predictor find more of the oracle's tokens? A row for each other source."""
    rows = [
        (
            c["select"],
            c["against"],
            f"{c['sparsity']:g}",
            f"{c['difference']:+.3f}",
            _interval((c["low"], c["high"]), "+.3f"),
            c["better"],
        )
        for c in comparisons
    ]
    return columns(("select", "against", "sparsity", "hit rate", "95%", "better"), rows, left=2)


def layer_table(results: Sequence[dict[str, Any]]) -> str:
    """Token accuracy and hit rate of each source, a row a layer; layers are counted from 1."""
    rows = [
        (
            r["select"],
            f"{r['sparsity']:g}",
            str(layer["layer"] + 1),
            *(
                text
                for name in ("token_accuracy", "hit_rate")
                for text in (f"{layer[name]:.3f}", _interval(layer[f"{name}_interval"], ".3f"))
            ),
            f"{layer['mass']:.3f}",
        )
        for r in results
        for layer in r["layers"]
    ]
    head = ("select", "sparsity", "layer", "token accuracy", "95%", "hit rate", "95%", "mass")
    return columns(head, rows, left=1)


def agreement_table(figures: dict[str, Any]) -> str:
    """Consensus within each layer and with the next, a row a layer; below, over all pairs of heads."""

    def figure(value: float | None) -> str:
        return "" if value is None else f"{value:.3f}"

    rows = [
        (
            str(row["layer"] + 1),
            *(figure(row[name]) for name in ("consensus_within", "consensus_next", "common_within", "common_next")),
        )
        for row in figures["layers"]
    ]
    head = ("layer", "correlation within", "with the next", "common top 50% within", "with the next")
    lines = [columns(head, rows, left=0)]
    for name, what in (("consensus", "cross-head consensus (correlation)"), ("common", "common top 50%")):
        bounds = figures[f"{name}_interval"]
        lines.append(f"{what}, all pairs: {figures[name]:.3f}" + (f" {_interval(bounds, '.3f')}" if bounds else ""))
    return "\n".join(lines)


def policy_perplexity_table(results: Sequence[dict[str, Any]]) -> str:
    """A row for each policy and budget; the difference to the dense model as CAOTE's tables 4 and 8 have it."""
    rows = [
        (
            r["policy"],
            str(r["budget"]),
            f"{r['perplexity']:.3f}",
            _interval((r["low"], r["high"]), ".3f"),
            f"{r['difference']:+.3f}",
            f"{r['increase']:+.2%}",
            _interval((r["increase_low"], r["increase_high"]), "+.2%"),
        )
        for r in results
    ]
    return columns(("policy", "budget", "perplexity", "95%", "difference", "against full", "95%"), rows, left=1)


def policy_ratio_table(comparisons: Sequence[dict[str, Any]]) -> str:
    """How much larger is the perplexity with CAOTE than without? A row each."""
    rows = [
        (
            c["policy"],
            c["against"],
            str(c["budget"]),
            f"{c['increase']:+.2%}",
            _interval((c["low"], c["high"]), "+.2%"),
            c["larger"],
        )
        for c in comparisons
    ]
    return columns(("policy", "against", "budget", "perplexity", "95%", "larger"), rows, left=2)


def perplexity_lines(
    results: Sequence[dict[str, Any]], policies: Sequence[dict[str, Any]], path: Path, *, title: str
) -> None:
    """Perplexity over sparsity, a line a selection, and over the budget, a line a policy: a panel each that has any.

    The dense model is a grey line. An axis of perplexity is logarithmic where its largest is more than three times its
    smallest.
    """
    dense = next(r for r in results if r["select"] == "full")
    selected = [r for r in results if r["select"] != "full"]
    reads, keeps = "sparsity: share of the tokens that a row does not read", "budget: slots per head"
    if any(isinstance(r["budget"], float) for r in policies):
        keeps = "budget: slots per head (from 1), or a share of the chunk"
    panels = [(selected, "select", "sparsity", reads)] * bool(selected)
    panels += [(list(policies), "policy", "budget", keeps)] * bool(policies)
    plt = pyplot()
    figure, axes = plt.subplots(
        1, max(len(panels), 1), figsize=(6.4 * max(len(panels), 1), 4.2), layout="constrained", squeeze=False
    )
    for axis, (rows, name, along, label) in zip(axes[0], panels, strict=False):
        _perplexity_panel(axis, dense, rows, name, along)
        axis.set_xlabel(label)
    axes[0, 0].set_ylabel("perplexity")
    figure.suptitle(title, fontsize=10.5)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=160)
    plt.close(figure)


def _perplexity_panel(axis: Any, dense: dict[str, Any], rows: list[dict[str, Any]], name: str, along: str) -> None:
    axis.axhline(dense["perplexity"], color="#999999", linewidth=1, linestyle="--", label="full")
    for index, chosen in enumerate(dict.fromkeys(r[name] for r in rows)):
        line = sorted((r for r in rows if r[name] == chosen), key=lambda r: r[along])
        colour = _colour(index)
        style = dict(marker="osv^DPX"[index % 7], linestyle="-" if index < len(COLOURS) else ":")
        x, y = [r[along] for r in line], [r["perplexity"] for r in line]
        axis.plot(x, y, color=colour, linewidth=1.5, markersize=4.5, label=chosen, **style)
        if all(r["increase_low"] is not None for r in line):  # of the difference to the dense model, by paired chunks
            low, high = ([dense["perplexity"] * (1 + r[f"increase_{end}"]) for r in line] for end in ("low", "high"))
            axis.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
    values = [dense["perplexity"], *(r["perplexity"] for r in rows)]
    if max(values) > 3 * min(values):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(pyplot().FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(pyplot().NullFormatter())
    places = sorted({r[along] for r in rows})
    if len(places) <= 12:
        axis.set_xticks(places, [f"{place:g}" for place in places])
    _plain(axis)
    axis.legend(fontsize=8, frameon=False)


def coref_dots(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy and coverage, a row a selection with its intervals, a colour a sparsity; a pair of panels a mode."""
    plt = pyplot()
    modes = list(dict.fromkeys(r["mode"] for r in results))
    names = list(dict.fromkeys(r["select"] for r in results))
    sparsities = sorted({r["sparsity"] for r in results if r["sparsity"] is not None})
    figure, axes = plt.subplots(
        len(modes), 2, figsize=(9, 1.3 + len(modes) * (0.5 + 0.16 * len(names) * (1 + len(sparsities)))),
        squeeze=False, sharey=True, sharex=True, layout="constrained",
    )  # fmt: skip
    handles: dict[str, Any] = {}
    for row, mode in enumerate(modes):
        for axis, (value, low, high) in zip(
            axes[row], (("accuracy", "low", "high"), ("coverage", "coverage_low", "coverage_high")), strict=True
        ):
            for r in (r for r in results if r["mode"] == mode):
                dense = r["sparsity"] is None
                index = 0 if dense else sparsities.index(r["sparsity"])
                shift = 0 if dense else (index - (len(sparsities) - 1) / 2) * 0.7 / max(len(sparsities), 1)
                bounds = [[max(r[value] - r[low], 0)], [max(r[high] - r[value], 0)]]
                drawn = axis.errorbar(
                    r[value], names.index(r["select"]) + shift, xerr=bounds, fmt="osv^D"[index % 5], markersize=4.5,
                    color="#777777" if dense else _colour(index), elinewidth=1.2,
                )  # fmt: skip
                handles.setdefault("everything read" if dense else f"sparsity {r['sparsity']:g}", drawn)
            axis.set_xlim(-0.02, 1.02)
            axis.set_yticks(range(len(names)), names, fontsize=8)
            axis.grid(axis="x", color="#eeeeee", linewidth=0.8)
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
            axis.tick_params(labelsize=8)
            if row == 0:
                axis.set_title(
                    {"accuracy": "accuracy: whole name", "coverage": "coverage: its tokens"}[value], fontsize=9.5
                )
        axes[row][0].set_ylabel({"teacher": "teacher-forced", "generate": "generated"}[mode], fontsize=9)
    axes[0][0].invert_yaxis()
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=min(5, len(handles)), fontsize=8,
        frameon=False,
    )  # fmt: skip
    figure.suptitle(f"Co-reference: naming the place again ({results[0]['samples']} samples)", fontsize=11)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=160)
    plt.close(figure)


def source_lines(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Token accuracy and hit rate over layers, a line a source, a row of panels a sparsity."""
    plt = pyplot()
    sparsities = list(dict.fromkeys(r["sparsity"] for r in results))
    names = list(dict.fromkeys(r["select"] for r in results))
    panels = (("token_accuracy", "token accuracy (last query)"), ("hit_rate", "hit rate (all queries)"))
    figure, axes = plt.subplots(
        len(sparsities), 2, figsize=(9, 1.1 + 3 * len(sparsities)), squeeze=False, sharey="row", layout="constrained"
    )
    for row, sparsity in enumerate(sparsities):
        for axis, (measure, title) in zip(axes[row], panels, strict=True):
            for r in (r for r in results if r["sparsity"] == sparsity):
                index = names.index(r["select"])
                layer = [x["layer"] + 1 for x in r["layers"]]
                axis.plot(
                    layer, [x[measure] for x in r["layers"]], color=_colour(index), marker="osv^DPX"[index % 7],
                    linewidth=1.5, markersize=4.5, label=r["select"],
                )  # fmt: skip
                if all(x[f"{measure}_interval"] for x in r["layers"]):
                    bounds = np.array([x[f"{measure}_interval"] for x in r["layers"]]).T
                    axis.fill_between(layer, *bounds, color=_colour(index), alpha=0.12, linewidth=0)
            axis.axhline(1 - sparsity, color="#999999", linewidth=1, linestyle="--")
            axis.set_xticks([x["layer"] + 1 for x in results[0]["layers"]])
            _plain(axis)
            if row == 0:
                axis.set_title(title, fontsize=9.5)
        axes[row][0].set_ylabel(f"found, sparsity {sparsity:g}", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("layer", fontsize=9)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize=8, frameon=False)
    figure.suptitle("Share of the oracle's tokens that a source chooses (dashed: by chance)", fontsize=11)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=160)
    plt.close(figure)


def agreement_map(figures: dict[str, Any], path: Path) -> None:
    """Correlation and common top 50% of all pairs of heads as heat maps, lines between the layers."""
    plt = pyplot()
    heads, layers = figures["heads"], len(figures["layers"])
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.7), layout="constrained")
    panels = (
        ("correlation", f"correlation of logits: mean {figures['consensus']:.2f}", "RdBu_r", -1),
        ("overlap", f"common tokens of the top 50%: mean {figures['common']:.2f}", "viridis", 0),
    )
    for axis, (name, title, colours, lowest) in zip(axes, panels, strict=True):
        image = axis.imshow(np.array(figures[name]), cmap=colours, vmin=lowest, vmax=1, interpolation="nearest")
        for layer in range(1, layers):
            for draw in (axis.axhline, axis.axvline):
                draw(layer * heads - 0.5, color="white" if lowest == 0 else "black", linewidth=0.6)
        step = -(-layers // 16)
        middle = [layer * heads + (heads - 1) / 2 for layer in range(0, layers, step)]
        axis.set_xticks(middle, [str(layer + 1) for layer in range(0, layers, step)], fontsize=8)
        axis.set_yticks(middle, [str(layer + 1) for layer in range(0, layers, step)], fontsize=8)
        axis.tick_params(length=0)
        axis.set_xlabel("heads, by layer", fontsize=9)
        axis.set_title(title, fontsize=9.5)
        figure.colorbar(image, ax=axis, shrink=0.8, aspect=25).ax.tick_params(labelsize=7)
    figure.suptitle("Do heads want the same tokens? The last query of each sequence", fontsize=11)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=160)
    plt.close(figure)


def _moment(group: tuple[str, str, Any]) -> str:
    question, when, budget = group
    if budget is None:
        return "full cache"
    unknown = ", question unknown" if question == "agnostic" else ""
    return f"budget {budget}, {'once' if when == 'prompt' else 'by block'}{unknown}"


def without_caote(policy: str) -> str:
    """The policy without its CAOTE links, with the same allocation.

    >>> without_caote("h2o+caote(rounds=2)+protect(recent=0.5)@layer")
    'h2o+protect(recent=0.5)@layer'
    """
    chain, at, allocation = policy.partition("@")
    return "+".join(link for link in chain.split("+") if link.split("(")[0] not in CAOTE_LINKS) + at + allocation


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files only."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


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


def _interval(bounds: Sequence[float | None] | None, form: str) -> str:
    low, high = bounds or (None, None)
    return "n/a" if low is None or high is None else f"{low:{form}}..{high:{form}}"


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _plain(axis: Any) -> None:
    """Light grid lines, and no frame on top and right."""
    axis.grid(axis="y", color="#eeeeee", linewidth=0.8)
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Aligned text; the first ``left`` columns to the left, figures to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        parts = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(parts).rstrip()

    return "\n".join([line(head), line(["-" * width for width in widths]), *map(line, rows)])
