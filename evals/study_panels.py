"""A study's scores by policy and budget, and their picture, from its JSON file: a panel for each form and question."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from evals import report, statistics, studies

MARKERS = "osv^D"
QUESTIONS = {"known": "question known", "unknown": "question later"}
FORMS = ("base", "adapted")  # in this order, and with these colours, in all studies


def form_place(form: str) -> int:
    """Return the place of a form of the model among others."""
    return FORMS.index(form) if form in FORMS else len(FORMS)


class Cell(NamedTuple):
    """A policy's scores under a budget, and the means of the bytes that a prompt's cache takes, in MiB.

    ``samples`` name the columns of the scores. ``peak`` is the most that it took, ``size`` what is left behind the
    answer. ``increase`` is by how much its perplexity is above the full cache's, the models' mean; None where it was
    not measured.
    """

    samples: Sequence[Any]
    scores: Float[np.ndarray, "models samples"]
    peak: float
    size: float
    increase: float | None = None

    def less(self, other: Cell) -> Float[np.ndarray, "models samples"]:
        """Return the scores less another cell's, of the samples that both have."""
        shared = [key for key in self.samples if key in other.samples]
        own, theirs = ([cell.samples.index(key) for key in shared] for cell in (self, other))
        return self.scores[:, own] - other.scores[:, theirs]


class Panel(NamedTuple):
    """One table or picture of a study: a form of the model, a question, and a length where there are several."""

    form: str
    question: str
    length: int | None = None

    def title(self) -> str:
        """Return what it shows, in words."""
        length = "" if self.length is None else f", {self.length:,} tokens"
        form = f"{self.form} model, " if self.form else ""
        return f"{form}{QUESTIONS[self.question]}{length}"


def cells(study: studies.Study, lines: studies.Lines, panel: Panel) -> dict[tuple[str, Any], Cell]:
    """Return what each policy that was run with all models of the form scores under each budget in one panel."""
    found: dict[tuple[str, Any], list[Mapping[str, Any]]] = {}
    models = set(study.forms[panel.form])
    for line in lines:
        there = line["model"] in models and line["question"] == panel.question
        if there and panel.length in (None, line["length"]):
            found.setdefault((line["policy"], line["budget"]), []).append(line)
    return {
        key: Cell(
            *studies.samples(own, study.asked),
            float(np.mean([line["peak_cache_bytes"] for line in own])) / 2**20,
            float(np.mean([line["cache_bytes"] for line in own])) / 2**20,
            float(np.mean([line["increase"] for line in own])) if all("increase" in line for line in own) else None,
        )
        for key, own in found.items()
        if {line["model"] for line in own} == models
    }


def panels(study: studies.Study, lines: studies.Lines) -> list[Panel]:
    """Return the forms of the model, the questions and the lengths that were run."""
    there = {(line["model"], line["question"]) for line in lines}
    questions = dict.fromkeys(line["question"] for line in lines)
    forms, lengths = studies.forms(study, lines), sorted({line["length"] for line in lines})
    return [
        Panel(form, question, length)
        for form, question in itertools.product(forms, questions)
        if all((model, question) in there for model in forms[form])
        for length in (lengths if len(lengths) > 1 else [None])
    ]


def shown(study: studies.Study, lines: studies.Lines) -> list[Panel]:
    """Return the panels of a picture: of forms of one model, without those in which few drawn policies were run."""
    of_one = [panel for panel in panels(study, lines) if len(study.forms[panel.form]) == 1]
    run = {panel: len({p for p, _ in cells(study, lines, panel)} & set(study.drawn)) for panel in of_one}
    most = [panel for panel, count in run.items() if 3 * count >= 2 * max(run.values())]
    return sorted(most, key=lambda panel: form_place(panel.form))


def picture(study: studies.Study, lines: studies.Lines, path: Path) -> None:
    """Draw what the policies that a study draws answer, with 95% intervals: one panel across, to be read on a phone.

    Several budgets are drawn over the bytes that a prompt holds at most; where a study evicts once, all policies hold
    the prompt at most, and what they keep is drawn. One budget is a row for each policy. What ran on fewer texts than
    its panel's others has an open marker: it is not to be compared by eye.
    """
    plt = report.pyplot()
    drawn = {panel: cells(study, lines, panel) for panel in shown(study, lines)}
    several = len({budget for found in drawn.values() for _, budget in found if budget is not None}) > 1
    groups: dict[Panel, list[Panel]] = {}
    for panel in drawn:
        groups.setdefault(panel if several else panel._replace(form=""), []).append(panel)
    height = 2.6 if several else 0.6 + 0.32 * len(study.drawn)
    size = 5.6, height * len(groups) + 1.4
    figure, axes = plt.subplots(len(groups), figsize=size, sharex=True, squeeze=False, layout="constrained")
    handles: dict[str, Any] = {}
    for (group, own), axis in zip(groups.items(), axes[:, 0], strict=True):
        report.plain(axis, grid="y" if several else "x")
        axis.tick_params(labelsize=10, labelbottom=True)
        axis.set_title(group.title(), fontsize=10)
        if several:
            _over_bytes(axis, study, drawn[group], handles)
        else:
            _by_policy(axis, study, {panel.form: drawn[panel] for panel in own}, handles)
    fewer: dict[int, set[int]] = {}
    for found in drawn.values():
        counts = {len(cell.samples) for (policy, _), cell in found.items() if policy in study.drawn}
        fewer.setdefault(_most(found), set()).update(counts - {_most(found)})
    marks = [
        f"open markers: {' or '.join(map(str, sorted(counts)))} texts in place of {most}"
        for most, counts in sorted(fewer.items())
        if counts
    ]
    figure.suptitle("\n".join([textwrap.fill(study.title, 52), *marks]), fontsize=11)
    held = "behind the answer" if study.evicts_once else "at most"
    label = f"MiB of a prompt's keys and values {held}" if several else "right answers, %"
    axes[-1, 0].set_xlabel(label, fontsize=10)
    report.legend(figure, handles, columns=2, size=10)
    report.save(figure, path)


def _most(found: Mapping[tuple[str, Any], Cell]) -> int:
    """Return the most texts that a policy of a panel was run on."""
    return max(len(cell.samples) for cell in found.values())


def _percent(cell: Cell) -> Float[np.ndarray, "3"]:
    """Return a mean and the ends of its interval, in percent."""
    return 100 * np.array(statistics.mean_interval(cell.scores, 0, 1))


def _over_bytes(
    axis: Any, study: studies.Study, found: Mapping[tuple[str, Any], Cell], handles: dict[str, Any]
) -> None:
    """Draw a line for each policy, its budgets over their bytes; the full cache is a dashed line."""
    texts, number = _most(found), -1
    for policy in study.drawn:
        name = study.names.get(policy, policy)
        number += policy != "full"
        own = sorted((cell for (p, _), cell in found.items() if p == policy), key=lambda cell: cell.peak)
        if not own:
            continue
        held = np.array([cell.size if study.evicts_once else cell.peak for cell in own])
        score, low, high = np.array([_percent(cell) for cell in own]).T
        if policy == "full":
            axis.axhspan(low[0], high[0], color=report.GREY, alpha=0.12, linewidth=0)
            handles[name] = axis.axhline(score[0], color=report.GREY, linestyle="--", linewidth=1)
            continue
        colour, marker = report.colour(number), MARKERS[number % 5]
        bars = axis.errorbar(
            held, score, [score - low, high - score], color=colour, fmt=f"{marker}-", markersize=5, linewidth=1.5,
            elinewidth=0.8, capsize=2,
        )  # fmt: skip
        few = np.array([len(cell.samples) for cell in own]) < texts
        axis.plot(held[few], score[few], marker, color=colour, markerfacecolor="white", markersize=5, zorder=3)
        handles[name] = bars
    axis.set_ylim(-3, 103)
    axis.set_ylabel("right answers, %", fontsize=10)


def _by_policy(
    axis: Any, study: studies.Study, forms: Mapping[str, Mapping[tuple[str, Any], Cell]], handles: dict[str, Any]
) -> None:
    """Draw a row for each policy, a point in it for each form of the model; the full cache is a dashed line."""
    own = {
        form: {policy: cell for (policy, _), cell in found.items() if policy in study.drawn}
        for form, found in forms.items()
    }
    there = [policy for policy in study.drawn if policy != "full" and all(policy in found for found in own.values())]
    there.sort(key=lambda policy: sum(found[policy].scores.mean() for found in own.values()))
    for number, (form, found) in enumerate(own.items()):
        colour, marker = report.colour(form_place(form)), MARKERS[form_place(form)]
        score, low, high = np.array([_percent(found[policy]) for policy in there]).T
        rows = np.arange(len(there)) + 0.12 * (2 * number - len(own) + 1)
        bars = axis.errorbar(
            score, rows, xerr=[score - low, high - score], color=colour, fmt=marker, markersize=5, elinewidth=0.8,
            capsize=2,
        )  # fmt: skip
        few = np.array([len(found[policy].samples) for policy in there]) < _most(forms[form])
        axis.plot(score[few], rows[few], marker, color=colour, markerfacecolor="white", markersize=5, zorder=3)
        full = _percent(found["full"])
        axis.axvspan(*full[1:], color=colour, alpha=0.08, linewidth=0)
        line = axis.axvline(full[0], color=colour, linestyle="--", linewidth=1)
        handles |= {f"{form} model": bars, f"{form}, full cache": line}
    axis.set_yticks(range(len(there)), [study.names.get(policy, policy) for policy in there])
    axis.set_xlim(-3, 103)
