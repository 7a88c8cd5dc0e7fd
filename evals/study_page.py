"""A study's page and picture, from its JSON file: scores for each form of the model and question, and the claims."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from evals import report, statistics, studies
from evals.claims import HOLDS, Judged
from evals.evaluator import full_name

MARKERS = "osv^D"


class Cell(NamedTuple):
    """A policy's scores under a budget, and the mean of the most bytes that a prompt's cache took, in MiB."""

    scores: Float[np.ndarray, "models samples"]
    held: float


def cells(study: studies.Study, rows: studies.Rows, form: str, question: str) -> dict[tuple[str, Any], Cell]:
    """Return what each policy scores under each budget, with a form of the model."""
    found: dict[tuple[str, Any], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["model"] in study.forms[form] and row["question"] == question:
            found.setdefault((row["policy"], row["budget"]), []).append(row)
    return {
        key: Cell(studies.samples(own, study.asked), float(np.mean([row["peak_cache_bytes"] for row in own])) / 2**20)
        for key, own in found.items()
    }


def panels(study: studies.Study, rows: studies.Rows) -> list[tuple[str, str]]:
    """Return the forms of the model and the questions that were run."""
    questions = dict.fromkeys(row["question"] for row in rows)
    return list(itertools.product(studies.forms(study, rows), questions))


def markdown(
    study: studies.Study, data: Mapping[str, Any], judged: Sequence[tuple[str, Judged]], picture: str | None = None
) -> str:
    """Write a study's page.

    Args:
        data: the content of its JSON file.
        judged: its claims, each with the form of the model.
        picture: the name of a picture to show.
    """
    rows = data["results"]
    machine = f"{data['cores']} cores" if data["device"] == "cpu" else data["device"]
    forms = studies.forms(study, rows)
    models = "; ".join(f"{form}: {', '.join(f'`{name}`' for name in names)}" for form, names in forms.items())
    text = [
        f"# {study.title}",
        f"{study.note} Models: {models}. Made by `{data['command']}` in {data['seconds'] / 3600:.1f} hours on "
        f"{machine}, at commit {data['commit']}; every score is in [{study.name}.json]({study.name}.json).",
        *([] if picture is None else [f"![Scores against the bytes held at most]({picture})"]),
        "Means with 95% intervals over texts, and the most bytes that one prompt's cache took. Bold: not worse than "
        "the column's best, on the same texts.",
    ]
    for form, question in panels(study, rows):
        text += [f"## {form.capitalize()}, question {question}", table(study, rows, form, question)]
    return "\n\n".join([*text, "## Claims", claim_table(judged)]) + "\n"


def table(
    study: studies.Study, rows: studies.Rows, form: str, question: str, policies: Sequence[str] | None = None
) -> str:
    """Return a table of policies and budgets: mean score, its 95% interval, and the most bytes that a prompt held.

    Args:
        policies: those to show, in this order; all by default, the best first.
    """
    found = cells(study, rows, form, question)
    budgets = sorted({budget for _, budget in found if budget is not None}, key=float)
    best = {budget: max((c.scores.mean(), p) for (p, b), c in found.items() if b == budget)[1] for budget in budgets}
    means = {p: np.mean([found[p, b].scores.mean() for b in budgets]) for p, budget in found if budget is not None}
    names = sorted(means, key=lambda p: -means[p]) if policies is None else [full_name(policy) for policy in policies]

    def told(policy: str, budget: Any) -> str:
        scores, held = found[policy, budget]
        mean, low, high = statistics.mean_interval(scores)
        text = f"{mean:.2f}"
        if budget is not None:
            _, _, above = statistics.paired_interval(scores - found[best[budget], budget].scores)
            text = f"**{text}**" if above >= 0 else text
        return f"{text} [{low:.2f}, {high:.2f}], {held:.0f} MiB"

    heads = [f"{budget:.0%}" if isinstance(budget, float) else f"{budget} slots" for budget in budgets]
    lines = [f"| policy | {' | '.join(heads)} |", f"|{' --- |' * (len(heads) + 1)}"]
    lines += [f"| `{policy}` | {' | '.join(told(policy, budget) for budget in budgets)} |" for policy in names]
    if ("full", None) in found:
        lines.append(f"| the full cache | {' | '.join([told('full', None), *[''] * (len(budgets) - 1)])} |")
    return "\n".join(lines)


def claim_table(judged: Sequence[tuple[str, Judged]]) -> str:
    """Return a table of judged claims."""
    columns = ("paper", "claim", "form", "where", "verdict", "difference, 95%", "of", "recency, full", "samples")
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for form, row in judged:
        where = ", ".join(f"{value:.0%}" if isinstance(value, float) else str(value) for value in row.where.values())
        bounds = ", ".join("n/a" if bound is None else f"{bound:.2f}" for bound in (row.floor, row.ceiling))
        verdict = f"**{row.verdict}**" if row.verdict == HOLDS else row.verdict
        both = " and ".join(f"{score:.2f}" for score in row.scores)
        difference = f"{row.difference:+.2f} [{row.low:+.2f}, {row.high:+.2f}]"
        told = (row.claim.paper, row.claim.text, form, where, verdict, difference, both, bounds, str(row.samples))
        lines.append(f"| {' | '.join(told)} |")
    return "\n".join(lines)


def picture(study: studies.Study, rows: studies.Rows, path: Path) -> None:
    """Draw what the policies that the study names score against the bytes that a prompt holds at most.

    There is a panel for each form of the model and each question, with 95% intervals.
    """
    plt = report.pyplot()
    drawn = panels(study, rows)
    across = len({question for _, question in drawn})
    down = len(drawn) // across
    size = (6.4 if across == 1 else 4.8 * across, 3.9 * down + 1)
    figure, axes = plt.subplots(down, across, figsize=size, sharey=True, squeeze=False, layout="constrained")
    handles: dict[str, Any] = {}
    for (form, question), axis in zip(drawn, axes.flat, strict=True):
        found = cells(study, rows, form, question)
        for number, (policy, name) in enumerate(study.names.items()):
            own = sorted((c.held, *statistics.mean_interval(c.scores)) for (p, _), c in found.items() if p == policy)
            if not own:
                continue
            held, score, low, high = (np.array(part) for part in zip(*own, strict=True))
            if policy == "full":
                axis.axhspan(low[0], high[0], color=report.GREY, alpha=0.12, linewidth=0)
                line = axis.axhline(score[0], color=report.GREY, linestyle="--", linewidth=1)
                handles[f"{name}, {held[0]:.0f} MiB"] = line
                continue
            bars = axis.errorbar(
                held, score, [score - low, high - score], color=report.colour(number), fmt=f"{MARKERS[number % 5]}-",
                markersize=4.5, linewidth=1.4, elinewidth=0.8, capsize=2,
            )  # fmt: skip
            handles.setdefault(name, bars)
        report.plain(axis)
        axis.set_title(f"{form}, question {question}", fontsize=10)
        axis.set_xlabel("MiB that a prompt's keys and values take at most", fontsize=9)
        axis.set_ylim(-0.03, 1.03)
    axes[0][0].set_ylabel("score", fontsize=9)
    figure.suptitle(study.title, fontsize=11)
    report.legend(figure, handles, columns=3)
    report.save(figure, path)
