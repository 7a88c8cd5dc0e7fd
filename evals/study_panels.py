"""A study's scores by policy and budget, and their picture, from its JSON file: a panel for each form and question."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from evals import report, statistics, studies

MARKERS = "osv^D"


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
        return f"{self.form} model, question {self.question}{length}"


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


def picture(made: Sequence[tuple[studies.Study, studies.Lines]], path: Path) -> None:
    """Draw what the policies that studies draw score against the bytes that a prompt holds at most, or keeps.

    Where a study evicts once, all policies hold the prompt at most, and what they keep is drawn.

    There is a panel for each study, form of the model, question and length, with 95% intervals, but for those with less
    than half as many of the drawn policies as the fullest one. What ran on fewer texts than the panel's others has an
    open marker: it is not to be compared by eye.
    """
    plt = report.pyplot()
    drawn = []
    for study, lines in made:
        run = {
            panel: len({p for p, _ in cells(study, lines, panel)} & set(study.drawn)) for panel in panels(study, lines)
        }
        drawn += [(study, lines, panel) for panel, count in run.items() if 2 * count >= max(run.values())]
    across = 2 if len(drawn) == 4 else min(3, len(drawn))
    down = -(-len(drawn) // across)
    size = (6.4 if across == 1 else 4.4 * across, 3.9 * down + 1)
    figure, axes = plt.subplots(
        down, across, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    called = [study.names.get(policy, policy) for study, _ in made for policy in study.drawn if policy != "full"]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(called))}
    handles: dict[str, Any] = {}
    fewer = False
    for (study, lines, panel), axis in zip(drawn, axes.flat, strict=False):
        found = cells(study, lines, panel)
        texts = max(len(cell.samples) for cell in found.values())
        for policy in study.drawn:
            name = study.names.get(policy, policy)
            own = sorted(
                (c.size if study.evicts_once else c.peak, *statistics.mean_interval(c.scores, 0, 1), len(c.samples))
                for (p, _), c in found.items()
                if p == policy
            )
            if not own:
                continue
            held, score, low, high, counts = (np.array(part) for part in zip(*own, strict=True))
            if policy == "full":
                axis.axhspan(low[0], high[0], color=report.GREY, alpha=0.12, linewidth=0)
                line = axis.axhline(score[0], color=report.GREY, linestyle="--", linewidth=1)
                bytes_of = "" if panel.length else f", {held[0]:.0f} MiB"  # they differ from length to length
                handles.setdefault(name + bytes_of, line)
                continue
            number = numbers[name]
            line = "-" if number < len(report.COLOURS) else ":"  # the second of a colour
            bars = axis.errorbar(
                held, score, [score - low, high - score], color=report.colour(number), fmt=MARKERS[number % 5] + line,
                markersize=4.5, linewidth=1.4, elinewidth=0.8, capsize=2,
            )  # fmt: skip
            few = counts < texts
            axis.plot(
                held[few], score[few], MARKERS[number % 5], color=report.colour(number), markerfacecolor="white",
                markersize=4.5, zorder=3,
            )  # fmt: skip
            fewer |= bool(few.any())
            handles.setdefault(name, bars)
        report.plain(axis)
        moment = report.MOMENTS.get(str(study.content.get("when")), "")
        title = f"{moment}, {panel.title()}"
        axis.set_title(title.replace(" model, ", " model,\n") if panel.length else title, fontsize=9)
        axis.set_ylim(-0.03, 1.03)
    for axis in axes.flat[len(drawn) :]:
        axis.set_visible(False)
    lowest = slice(max(0, len(drawn) - across), len(drawn))  # the lowest panel of each column
    for (study, *_), axis in zip(drawn[lowest], axes.flat[lowest], strict=True):
        axis.tick_params(labelbottom=True)
        most = "take behind the answer" if study.evicts_once else "take at most"
        axis.set_xlabel(f"MiB that a prompt's keys and values {most}", fontsize=9)
    for axis in axes[:, 0]:
        axis.set_ylabel("score", fontsize=9)
    title = "; ".join(study.title for study, _ in made)
    figure.suptitle(f"{title} (open markers: fewer texts)" if fewer else title, fontsize=11)
    report.legend(figure, handles, columns=3)
    report.save(figure, path)
