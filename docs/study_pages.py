"""The parts of a study's page, its tables in CSV, and the table of all claims.

A study's page is written by hand, but for its table of scores, its table of claims, and what made them. All policies
and all claims are in two CSV files beside it.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

import kvjax
from evals import report, statistics, studies
from evals.claims import ELSEWHERE, FAILS, HOLDS, OPEN, Judgement
from evals.run_settings import RECENCY
from evals.study_panels import QUESTIONS, Cell, Panel, cells, form_place, panels, shown

DECIDED = (HOLDS, FAILS, ELSEWHERE)


def markdown(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (head, ["---"] * len(head), *lines))


def made(study: studies.Study, data: Mapping[str, Any]) -> str:
    """Return what a study's figures are from: its texts, models, files and command."""
    forms = studies.forms(study, data["results"])
    models = "; ".join(f"{form}: {', '.join(f'`{name}`' for name in names)}" for form, names in forms.items())
    name = study.name
    return (
        f"{study.note} [Models](index.md#models-and-texts): {models}.\n\n"
        f"All [policies]({name}.csv), [claims]({name}-claims.csv) and [answers]({name}.json), made by:\n\n"
        f"    {data['command'].partition(' --out')[0]}"
    )


def scores(study: studies.Study, lines: studies.Lines) -> str:
    """Return a table of the policies that a study draws, the best first: answers, intervals and bytes.

    There is a column for each question, form of the model and budget, and a row for each policy and length.
    """
    drawn = shown(study, lines)
    tables = {panel: cells(study, lines, panel) for panel in drawn}
    budgets = sorted({budget for found in tables.values() for _, budget in found if budget is not None}, key=float)
    columns = [
        (panel._replace(length=None), budget)
        for panel, found in tables.items()
        for budget in budgets
        if any(at == budget for _, at in found)
    ]
    asked = list(QUESTIONS)
    columns = sorted(dict.fromkeys(columns), key=lambda column: asked.index(column[0].question))
    several = [len({getattr(panel, name) for panel in drawn}) > 1 for name in ("question", "form", "length")]
    several.append(len(budgets) > 1 or sum(several[:2]) == 0)
    rows: list[list[str]] = []
    for length in dict.fromkeys(panel.length for panel in drawn):
        own = {panel._replace(length=None): found for panel, found in tables.items() if panel.length == length}
        of_policy: dict[str, dict[tuple[Panel, Any], Cell]] = {}
        for panel, found in own.items():
            for (policy, budget), cell in sorted(found.items(), key=lambda item: float(item[0][1] or 0)):
                of_policy.setdefault(policy, {})[panel, budget] = cell
        means = {
            policy: np.mean([cell.scores.mean() for cell in of_policy[policy].values()])
            for policy in study.drawn
            if policy in of_policy
        }
        for policy in sorted(means, key=lambda policy: (policy == "full", -means[policy])):
            row = [f"{length:,}"] if several[2] else []
            row.append(study.names.get(policy, policy) + f" `{policy}`" * (policy != "full"))
            first = {panel: budget for panel, budget in reversed(columns)}
            for panel, budget in columns:
                at = None if policy == "full" else budget
                there = (policy, at) in own.get(panel, {}) and (policy != "full" or budget == first[panel])
                row.append(_score(own[panel], own[panel][policy, at], budget, policy) if there else "")
            rows.append([*row, *_bytes(study, of_policy[policy])])
    heads = [
        ", ".join(
            part
            for part, told in (
                (QUESTIONS[panel.question].removeprefix("question "), several[0]),
                (panel.form, several[1]),
                (_budget(budget), several[3]),
            )
            if told
        )
        for panel, budget in columns
    ]
    sizes = ["MiB kept", "MiB at most"] if study.evicts_once else ["MiB at most"]
    head = [*(["tokens"] if several[2] else []), "policy", *heads, *sizes]
    return f"{_caption(study, tables)}\n\n{markdown(head, rows)}"


ALLOCATIONS = {
    "uniform": "equal budgets<br>`@uniform`",
    "adakv": "a layer's heads compete<br>`@adakv`",
    "model": "all heads, by shares of their sum<br>`@model`",
    "model(normalise=False)": "all heads, by the scores themselves<br>`@model(normalise=False)`",
}


def allocations(study: studies.Study, lines: studies.Lines) -> str:
    """Return a table for each form of the model: what each score answers, and holds, under each allocation.

    The scores stand in the order of what they answer under the best of their allocations.
    """
    tables = []
    for panel in shown(study, lines):
        found = cells(study, lines, panel)
        of_score: dict[str, dict[str, tuple[str, Any]]] = {}
        for policy, budget in found:
            if policy not in ("full", RECENCY):
                whole = kvjax.parse(policy)
                of_score.setdefault(whole.chain_name, {})[whole.allocation.name] = policy, budget
        best = {score: max(found[key].scores.mean() for key in own.values()) for score, own in of_score.items()}
        rows = [
            [f"`{score}`", *(_with_bytes(found, of_score[score].get(name)) for name in ALLOCATIONS)]
            for score in sorted(of_score, key=lambda score: -best[score])
        ]
        tables.append(f"{_caption(study, {panel: found})}\n\n{markdown(['score', *ALLOCATIONS.values()], rows)}")
    return "\n\n".join(tables)


def _with_bytes(found: Mapping[tuple[str, Any], Cell], key: tuple[str, Any] | None) -> str:
    """Return a policy's score and the MiB that it holds at most; "" where it was not run."""
    if key is None:
        return ""
    policy, budget = key
    return f"{_score(found, found[key], budget, policy)}<br>{found[key].peak:.0f} MiB"


def _budget(budget: Any) -> str:
    return f"{budget:.0%}" if isinstance(budget, float) else f"{budget} slots"


def _score(found: Mapping[tuple[str, Any], Cell], cell: Cell, budget: Any, policy: str) -> str:
    """Return a mean in percent with its interval, bold if within noise of the best policy under that budget."""
    most = max(len(one.samples) for one in found.values())
    text, low, high = map(report.percent, statistics.mean_interval(cell.scores, 0, 1))
    if policy != "full":
        # The best is one of those with the most samples.
        own = [one for (_, at), one in found.items() if at == budget]
        best = max(own, key=lambda one: (len(one.samples), one.scores.mean()))
        less = cell.less(best)
        text = f"**{text}**" if less.size and statistics.paired_interval(less)[2] >= 0 else text
    few = f"<br>{len(cell.samples)} texts" if len(cell.samples) < most else ""
    return f"{text}<br>[{low[:-1]}, {high[:-1]}]{few}"


def _bytes(study: studies.Study, held: Mapping[tuple[Panel, Any], Cell]) -> list[str]:
    """Return the MiB that a policy keeps and holds at most, one figure for each budget if they differ."""
    by_budget: dict[Any, list[Cell]] = {}
    for (_, budget), cell in held.items():
        by_budget.setdefault(budget, []).append(cell)
    ordered = [by_budget[budget] for budget in sorted(by_budget, key=lambda budget: (budget is None, budget))]
    sizes = [f"{np.mean([cell.size for cell in own]):.0f}" for own in ordered]
    peaks = [f"{max(cell.peak for cell in own):.0f}" for own in ordered]
    return [", ".join(dict.fromkeys(told)) for told in ([sizes, peaks] if study.evicts_once else [peaks])]


def _caption(study: studies.Study, tables: Mapping[Panel, Mapping[tuple[str, Any], Cell]]) -> str:
    """Return what the figures of :func:`scores` are, and of how many texts."""
    most = {panel: max(len(cell.samples) for cell in found.values()) for panel, found in tables.items()}
    counts: dict[str, int] = {}
    for panel, count in most.items():
        name = f"{panel.form} model" if panel.length is None else f"of {panel.length:,} tokens"
        if any(most[other] != count for other in most if other == panel._replace(question=other.question)):
            name += f", {QUESTIONS[panel.question]}"
        counts[name] = count
    unit = "prompts" if "ruler" in study.content["tasks"] else "texts"
    each = ", ".join(f"{count} {unit} ({name})" for name, count in counts.items())
    texts = f"{next(iter(counts.values()))} {unit}" if len(set(counts.values())) == 1 else each
    questions = {QUESTIONS[panel.question] for panel in tables}
    asked = f" {questions.pop().capitalize()}." if len(questions) == 1 else ""
    budgets = {budget for found in tables.values() for _, budget in found if budget is not None}
    kept = f" {_budget(budgets.pop())} of the tokens are kept." if len(budgets) == 1 else ""
    policies = len({policy for found in tables.values() for policy, _ in found if policy != "full"})
    return (
        f"Answers that are right, with 95% intervals over {texts}.{kept}{asked} Bold: within noise of the best of "
        f"{policies} policies."
    )


def claims(study: studies.Study, judged: Sequence[tuple[str, Judgement]], chosen: Sequence[str]) -> str:
    """Return a table of a study's claims that are decided on a form; of the page of claims all but undecided ones.

    A cell has the verdict and the difference in points, with its 95% interval.

    Args:
        chosen: the claims of that page, as :func:`_title` calls them.
    """
    forms = sorted((form for form, models in study.forms.items() if len(models) == 1), key=form_place)
    found: dict[str, dict[tuple[str, str], str]] = {}
    told: set[str] = set()
    for form, judgement in judged:
        if form not in forms:
            continue
        title, length = _title(judgement), judgement.where.get("length")
        row = title if length is None else f"{title}, {length:,} tokens"
        said = judgement.verdict in DECIDED or (title in chosen and judgement.verdict != OPEN)
        told |= {row} if said else set()
        place = form, QUESTIONS[_question(study, judgement)].removeprefix("question ")
        found.setdefault(row, {})[place] = _verdict_text(judgement)
    there = {place for in_places in found.values() for place in in_places}
    words = [question.removeprefix("question ") for question in QUESTIONS.values()]
    places = [place for place in itertools.product(forms, words) if place in there]
    rows = [[row, *(own.get(place, "") for place in places)] for row, own in found.items() if row in told]
    rest = len(found) - len(rows)
    more = f" {rest} more {'is' if rest == 1 else 'are'} not decided." if rest else ""
    heads = [", ".join(place) for place in places]
    note = f"[The verdict](judging.md), and the difference in points with its 95% interval.{more}"
    return f"{note}\n\n{markdown(['claim', *heads], rows)}"


def scores_csv(study: studies.Study, lines: studies.Lines) -> str:
    """Return all policies of a study in CSV: answers in percent, with intervals and bytes."""
    rows = []
    for panel in panels(study, lines):
        found = cells(study, lines, panel)
        order = sorted(found.items(), key=lambda item: (float(item[0][1] or 2**31), -item[1].scores.mean()))
        for (policy, budget), cell in order:
            percent = (f"{100 * value:.1f}" for value in statistics.mean_interval(cell.scores, 0, 1))
            increase = "" if cell.increase is None else f"{100 * cell.increase:.1f}"
            sizes = f"{cell.size:.1f}", f"{cell.peak:.1f}"
            place = panel.form, QUESTIONS[panel.question].removeprefix("question "), panel.length or ""
            share = "" if budget is None else _budget(budget)
            name = study.names.get(policy, "")
            rows.append([*place, share, policy, name, *percent, len(cell.samples), *sizes, increase])
    head = ("model", "question", "tokens", "budget", "policy", "name", "right %", "low", "high", "texts",
            "MiB kept", "MiB at most", "perplexity +%")  # fmt: skip
    return _csv(head, rows)


def claims_csv(study: studies.Study, judged: Sequence[tuple[str, Judgement]]) -> str:
    """Return all judged claims of a study in CSV.

    *Alone* is what a claim would be if it were its paper's only one. Scores are those of both sides, of the newest
    tokens and of the full cache.
    """
    rows = []
    for form, judgement in judged:
        claim = judgement.claim
        where = ", ".join(_place(name, value) for name, value in judgement.where.items())
        says = "; ".join(filter(None, (claim.says, claim.elsewhere)))
        figures = (judgement.difference, judgement.low, judgement.high, *judgement.scores, judgement.floor,
                   judgement.ceiling)  # fmt: skip
        percent = ("" if figure is None else f"{100 * figure:.1f}" for figure in figures)
        rows.append([claim.paper, claim.text, says, form, where, judgement.verdict, judgement.alone, *percent,
                     judgement.samples])  # fmt: skip
    head = ("paper", "claim", "as published", "model", "where", "verdict", "alone", "difference", "low", "high",
            "right %", "other %", "newest tokens %", "full cache %", "texts")  # fmt: skip
    return _csv(head, rows)


def _csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue()


def claim_marks(judged: Iterable[tuple[studies.Study, Sequence[tuple[str, Judgement]]]], rows: Sequence[str]) -> str:
    """Return a table of the marks of chosen claims, on each form of a model, the question known and later.

    A mark leads to its study's page. Of the studies that decide the claim there it is that of one in the paper's own
    setting, if there is one, and of these the one with the most samples.

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
            rank = (judgement.verdict != OPEN, not judgement.claim.elsewhere, judgement.samples)
            marks, place = found.setdefault(title, {}), (form, _question(study, judgement))
            if place not in marks or rank > marks[place][0]:  # of equal ones the first
                marks[place] = rank, f"[{MARKS.get(judgement.verdict, judgement.verdict)}]({study.name}.md)"
    if missing := [row for row in rows if row not in found]:
        raise ValueError(f"no study judges {'; '.join(missing)}; it has {'; '.join(found)}.")
    places = list(itertools.product(("base", "adapted"), QUESTIONS))
    lines: list[list[Any]] = []
    before = ""
    for row in rows:
        marks, figure = found[row], says[row] or "-"
        most = max(samples for place, ((*_, samples), _) in marks.items() if place in places)
        told = "the same" if figure == before != "-" else figure
        before = figure
        lines.append([row, told, *(marks[place][1] if place in marks else "" for place in places), most])
    heads = (f"{form}, {QUESTIONS[question].removeprefix('question ')}" for form, question in places)
    return markdown(("claim", "the paper's figure", *heads, "samples"), lines)


MARKS = {HOLDS: f"**{HOLDS}**"}


def _title(judgement: Judgement) -> str:
    """Return a claim, and the budget if each has a verdict: "KVzip is not worse than the full cache, 25%"."""
    budget = judgement.where.get("budget")
    return judgement.claim.text if budget is None else f"{judgement.claim.text}, {_place('budget', budget)}"


def _question(study: studies.Study, judgement: Judgement) -> str:
    """Return what is known of the question where a claim was judged: its own, or the study's only one."""
    if "question" in judgement.where:
        return str(judgement.where["question"])
    questions = study.content["question"]
    return str(questions if isinstance(questions, str) else questions[0])


def _place(name: str, value: Any) -> str:
    """Return where a claim was judged, in words."""
    if name == "when":
        return report.MOMENTS[value]
    if name == "question":
        return QUESTIONS[value]
    return _budget(value) if name == "budget" else f"{value:,} tokens" if name == "length" else str(value)


def _verdict_text(judgement: Judgement) -> str:
    """Return a verdict, and the difference in points with its interval where there was room for one."""
    if judgement.verdict == OPEN:
        return OPEN
    points = [f"{round(100 * figure):+d}" for figure in (judgement.difference, judgement.low, judgement.high)]
    verdict = MARKS.get(judgement.verdict, judgement.verdict)
    return f"{verdict} {points[0]} [{points[1]}, {points[2]}]"
