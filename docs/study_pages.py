"""The Markdown of studies: a page of each with its scores and claims, and the table of all claims."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from evals import report, statistics, studies
from evals.claims import HOLDS, NOISE, OPEN, Judgement
from evals.study_panels import Panel, cells, panels

PAPERS = ("CAOTE", "SAGE-KV", "LaProx")
CLAIM = (
    "A cell: the verdict ([how it is found](judging.md)), the difference with its 95% interval, and in brackets the "
    "scores of both sides, then those of the newest tokens and of the full cache. *Alone*: what the claim would be if "
    "it were its paper's only one."
)


def markdown(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (head, ["---"] * len(head), *lines))


def page(study: studies.Study, data: Mapping[str, Any], judged: Sequence[tuple[str, Judgement]]) -> str:
    """Return a study's page, beside which its picture stands.

    Args:
        data: the content of its JSON file.
        judged: its claims, each with the form of the model.
    """
    lines = data["results"]
    machines = "; ".join(map(_machine, data.get("environments", [data])))
    forms = studies.forms(study, lines)
    models = "; ".join(f"{form}: {', '.join(f'`{name}`' for name in names)}" for form, names in forms.items())
    text = [
        f"# {study.title}",
        f"{study.note} Models: {models}. Made by `{data['command']}` on "
        f"{machines}; every score is in [{study.name}.json]({study.name}.json).",
        f"![Scores against the bytes of a prompt's cache]({study.name}.png)",
        f"Means with 95% intervals over texts, and {'the bytes that one prompt keeps, with ' * study.evicts_once}the "
        "most bytes that one prompt's cache took. Bold: within noise of the column's best, on the same texts.",
    ]
    for panel in panels(study, lines):
        text += [f"## {panel.title().capitalize()}", table(study, lines, panel)]
    return "\n\n".join([*text, "## Claims", CLAIM, claim_table(study, judged)]) + "\n"


def _machine(environment: Mapping[str, Any]) -> str:
    """Return what answered, in words: the device and the commit."""
    device = f"{environment['cores']} cores" if environment["device"] == "cpu" else environment["device"]
    return f"{device}, commit {environment['commit']}"


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
        mean, low, high = statistics.mean_interval(scores, 0, 1)
        text = f"{mean:.2f}"
        if budget is not None:
            less = cell.less(found[best[budget], budget])
            text = f"**{text}**" if less.size and statistics.paired_interval(less)[2] >= 0 else text
        more = "" if increase is None else f", perplexity {increase:+.1%}"
        more += f", {len(samples)} samples" if len(samples) < most else ""
        size = f"{kept:.0f} of {peak:.0f}" if study.evicts_once else f"{peak:.0f}"
        return f"{text} [{low:.2f}, {high:.2f}], {size} MiB{more}"

    heads = [f"{budget:.0%}" if isinstance(budget, float) else f"{budget} slots" for budget in budgets]
    rows = [[f"`{policy}`", *(told(policy, budget) for budget in budgets)] for policy in names]
    if ("full", None) in found:
        rows.append(["the full cache", told("full", None), *[""] * (len(budgets) - 1)])
    return markdown(["policy", *heads], rows)


def claim_table(study: studies.Study, judged: Sequence[tuple[str, Judgement]]) -> str:
    """Return a table of a study's judged claims: a line per claim, by paper, a column per form.

    A cell has a line for each place where the claim was judged.
    """
    fixed = isinstance(study.content.get("when"), str)  # its name says it then
    says: dict[tuple[str, str], str] = {}
    texts: dict[tuple[str, str], list[int]] = {}
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for form, judgement in judged:
        claim = judgement.claim
        where = [_place(name, value) for name, value in judgement.where.items() if name != "when" or not fixed]
        key = claim.paper, claim.text
        says[key] = "; ".join(dict.fromkeys(filter(None, [says.get(key), claim.says, claim.elsewhere])))
        texts.setdefault(key, []).append(judgement.samples)
        found.setdefault(key, {}).setdefault(form, []).append(f"{', '.join(where)}: {_verdict_text(judgement)}")
    forms = list(dict.fromkeys(form for own in found.values() for form in own))
    papers = sorted({paper for paper, _ in found}, key=lambda paper: (paper not in PAPERS, paper == "ours", paper))
    rows = []
    for key, own in sorted(found.items(), key=lambda item: papers.index(item[0][0])):
        several = " or ".join(map(str, sorted(set(texts[key]))))
        rows.append([*key, says[key], several, *("<br>".join(own.get(form, [])) for form in forms)])
    return markdown(("paper", "claim", "as published", "texts", *forms), rows)


def claim_marks(judged: Iterable[tuple[studies.Study, Sequence[tuple[str, Judgement]]]], rows: Sequence[str]) -> str:
    """Return a table of the marks of chosen claims, on each form of a model, the question known and unknown.

    A mark is that of the study with the most samples among those that decide the claim there, and leads to its page.

    Args:
        rows: the claims, as :func:`_title` calls them.

    Raises:
        ValueError: a claim is in no study.
    """
    found: dict[str, dict[tuple[str, str], tuple[Any, ...]]] = {}
    says: dict[str, str] = {}
    for study, judgements in judged:
        for form, judgement in judgements:
            title = _title(judgement)
            says[title] = says.get(title) or judgement.claim.says
            rank = (judgement.verdict != OPEN, judgement.samples)
            cells, place = found.setdefault(title, {}), (form, _question(study, judgement))
            if place not in cells or rank > cells[place][0]:  # of equal ones the first
                cells[place] = rank, f"[{MARKS.get(judgement.verdict, judgement.verdict)}]({study.name}.md)"
    if missing := [row for row in rows if row not in found]:
        raise ValueError(f"no study judges {'; '.join(missing)}; it has {'; '.join(found)}.")
    places = list(itertools.product(("base", "adapted"), ("known", "unknown")))
    lines = []
    for row in rows:
        cells = found[row]
        most = max(samples for place, ((_, samples), _) in cells.items() if place in places)
        lines.append([row, says[row] or "-", *(cells[place][1] if place in cells else "" for place in places), most])
    return markdown(("claim", "the paper's figure", *map(", ".join, places), "samples"), lines)


MARKS = {HOLDS: f"**{HOLDS}**"}


def _title(judgement: Judgement) -> str:
    """Return a claim, and the budget if each has a verdict: "KVzip is not worse than the full cache, 25%"."""
    budget = judgement.where.get("budget")
    return judgement.claim.text if budget is None else f"{judgement.claim.text}, {_place('budget', budget)}"


def _question(study: studies.Study, judgement: Judgement) -> str:
    """Return what is known of the question where a claim was judged: its own, or the study's only one."""
    questions = study.content["question"]
    return str(judgement.where.get("question") or (questions if isinstance(questions, str) else questions[0]))


def _place(name: str, value: Any) -> str:
    """Return where a claim was judged, in words."""
    if name == "when":
        return report.MOMENTS[value]
    return f"{value:.0%}" if isinstance(value, float) else str(value)


def _verdict_text(judgement: Judgement) -> str:
    """Return a verdict with its figures; :data:`CLAIM` says what they are."""
    verdict = f"**{judgement.verdict}**" if judgement.verdict == HOLDS else judgement.verdict
    if judgement.verdict == NOISE != judgement.alone:
        verdict += f" (alone: {judgement.alone})"
    bounds = ", ".join("n/a" if bound is None else f"{bound:.2f}" for bound in (judgement.floor, judgement.ceiling))
    both = ", ".join(f"{score:.2f}" for score in judgement.scores)
    return f"{verdict}, {judgement.difference:+.2f} [{judgement.low:+.2f}, {judgement.high:+.2f}] ({both}; {bounds})"
