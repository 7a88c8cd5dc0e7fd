"""A study's page and picture, from its JSON file: scores for each form of the model and question, and the claims."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from evals import report, statistics, studies
from evals.claims import HOLDS, Judgement

MARKERS = "osv^D"
PAPERS = ("CAOTE", "SAGE-KV", "LaProx")
CLAIM = (
    "A cell: the verdict, the difference with its 95% interval, and in brackets the scores of both sides, then those "
    "of the newest tokens and of the full cache."
)


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


def _evicts_once(study: studies.Study) -> bool:
    """Return whether all policies hold the whole prompt, so that what they keep tells them apart."""
    return study.content.get("when") == "prompt"


def _machine(environment: Mapping[str, Any]) -> str:
    """Return what answered, in words: the device and the commit."""
    device = f"{environment['cores']} cores" if environment["device"] == "cpu" else environment["device"]
    return f"{device}, commit {environment['commit']}"


def markdown(
    study: studies.Study, data: Mapping[str, Any], judged: Sequence[tuple[str, Judgement]], picture: str | None = None
) -> str:
    """Write a study's page.

    Args:
        data: the content of its JSON file.
        judged: its claims, each with the form of the model.
        picture: the name of a picture to show.
    """
    lines = data["results"]
    machines = "; ".join(map(_machine, data.get("environments", [data])))
    forms = studies.forms(study, lines)
    models = "; ".join(f"{form}: {', '.join(f'`{name}`' for name in names)}" for form, names in forms.items())
    text = [
        f"# {study.title}",
        f"{study.note} Models: {models}. Made by `{data['command']}` on "
        f"{machines}; every score is in [{study.name}.json]({study.name}.json).",
        *([] if picture is None else [f"![Scores against the bytes of a prompt's cache]({picture})"]),
        f"Means with 95% intervals over texts, and {'the bytes that one prompt keeps, with ' * _evicts_once(study)}the "
        "most bytes that one prompt's cache took. Bold: not worse than the column's best, on the same texts.",
    ]
    for panel in panels(study, lines):
        text += [f"## {panel.title().capitalize()}", table(study, lines, panel)]
    return "\n\n".join([*text, "## Claims", CLAIM, claim_table([(study, judged)])]) + "\n"


def table(study: studies.Study, lines: studies.Lines, panel: Panel) -> str:
    """Return a table of policies and budgets, the best first: score, its 95% interval, and the most bytes held."""
    found = cells(study, lines, panel)
    budgets = sorted({budget for _, budget in found if budget is not None}, key=float)
    most = max(len(cell.samples) for cell in found.values())
    # The best is one of those with the most samples.
    best = {
        budget: max((len(c.samples), c.scores.mean(), p) for (p, b), c in found.items() if b == budget)[2]
        for budget in budgets
    }
    own = {p: [found[p, b].scores.mean() for b in budgets if (p, b) in found] for p, at in found if at is not None}
    names = sorted(own, key=lambda p: (-len(own[p]), -np.mean(own[p])))  # what lacks a budget comes last

    def told(policy: str, budget: Any) -> str:
        if (policy, budget) not in found:
            return ""
        samples, scores, peak, kept, increase = cell = found[policy, budget]
        mean, low, high = statistics.mean_interval(scores)
        text = f"{mean:.2f}"
        if budget is not None:
            less = cell.less(found[best[budget], budget])
            text = f"**{text}**" if less.size and statistics.paired_interval(less)[2] >= 0 else text
        more = "" if increase is None else f", perplexity {increase:+.1%}"
        more += f", {len(samples)} samples" if len(samples) < most else ""
        size = f"{kept:.0f} of {peak:.0f}" if _evicts_once(study) else f"{peak:.0f}"
        return f"{text} [{low:.2f}, {high:.2f}], {size} MiB{more}"

    heads = [f"{budget:.0%}" if isinstance(budget, float) else f"{budget} slots" for budget in budgets]
    text = [f"| policy | {' | '.join(heads)} |", f"|{' --- |' * (len(heads) + 1)}"]
    text += [f"| `{policy}` | {' | '.join(told(policy, budget) for budget in budgets)} |" for policy in names]
    if ("full", None) in found:
        text.append(f"| the full cache | {' | '.join([told('full', None), *[''] * (len(budgets) - 1)])} |")
    return "\n".join(text)


def claim_table(judged: Sequence[tuple[studies.Study, Sequence[tuple[str, Judgement]]]]) -> str:
    """Return a table of the judged claims of studies: a line per claim, by paper, a column per form.

    A cell has a line for each study and place where the claim was judged.
    """
    says: dict[tuple[str, str], str] = {}
    texts: dict[tuple[str, str], list[int]] = {}
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for study, judgements in judged:
        for form, judgement in judgements:
            fixed = isinstance(study.content.get("when"), str)  # its name says it then
            where = [place(name, value) for name, value in judgement.where.items() if name != "when" or not fixed]
            key = judgement.claim.paper, judgement.claim.text
            says[key] = says.get(key) or judgement.claim.says
            texts.setdefault(key, []).append(judgement.samples)
            text = f"{', '.join([study.name] * (len(judged) > 1) + where)}: {_verdict_text(judgement)}"
            found.setdefault(key, {}).setdefault(form, []).append(text)
    forms = list(dict.fromkeys(form for own in found.values() for form in own))
    papers = sorted({paper for paper, _ in found}, key=lambda paper: (paper not in PAPERS, paper == "ours", paper))
    columns = ("paper", "claim", "as published", "texts", *forms)
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for key, own in sorted(found.items(), key=lambda item: papers.index(item[0][0])):
        several = " or ".join(map(str, sorted(set(texts[key]))))
        cells = ("<br>".join(own.get(form, [])) for form in forms)
        lines.append(f"| {' | '.join((*key, says[key], several, *cells))} |")
    return "\n".join(lines)


def place(name: str, value: Any) -> str:
    """Return where a claim was judged, in words."""
    if name == "when":
        return report.MOMENTS[value]
    return f"{value:.0%}" if isinstance(value, float) else str(value)


def _verdict_text(judgement: Judgement) -> str:
    """Return a verdict with its figures; :data:`CLAIM` says what they are."""
    verdict = f"**{judgement.verdict}**" if judgement.verdict == HOLDS else judgement.verdict
    bounds = ", ".join("n/a" if bound is None else f"{bound:.2f}" for bound in (judgement.floor, judgement.ceiling))
    both = ", ".join(f"{score:.2f}" for score in judgement.scores)
    return f"{verdict}, {judgement.difference:+.2f} [{judgement.low:+.2f}, {judgement.high:+.2f}] ({both}; {bounds})"


def picture(made: Sequence[tuple[studies.Study, studies.Lines]], path: Path) -> None:
    """Draw what the policies that studies draw score against the bytes that a prompt holds at most, or keeps.

    Where a study evicts once, all policies hold the prompt at most, and what they keep is drawn.

    There is a panel for each study, form of the model, question and length, with 95% intervals, but for those with less
    than half as many of the drawn policies as the fullest one.
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
    for (study, lines, panel), axis in zip(drawn, axes.flat, strict=False):
        found = cells(study, lines, panel)
        for policy in study.drawn:
            name = study.names.get(policy, policy)
            own = sorted(
                (c.size if _evicts_once(study) else c.peak, *statistics.mean_interval(c.scores))
                for (p, _), c in found.items()
                if p == policy
            )
            if not own:
                continue
            held, score, low, high = (np.array(part) for part in zip(*own, strict=True))
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
        most = "take behind the answer" if _evicts_once(study) else "take at most"
        axis.set_xlabel(f"MiB that a prompt's keys and values {most}", fontsize=9)
    for axis in axes[:, 0]:
        axis.set_ylabel("score", fontsize=9)
    figure.suptitle("; ".join(study.title for study, _ in made), fontsize=11)
    report.legend(figure, handles, columns=3)
    report.save(figure, path)
