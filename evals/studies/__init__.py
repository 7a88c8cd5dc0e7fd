"""The studies' files, and the scores that their JSON files hold.

A study's file is a sweep's (`python -m evals sweep --help`) with a ``title``, the ``forms`` of the model in place of
``models``, ``names`` for policies and links, the policies that are ``drawn``, and tables ``[[claims]]``
(evals/claims.py). Where not all models, policies, budgets and samples were run with each other, tables ``[[runs]]`` say
what was: each is a sweep that has the file's entries and, in their place or beside them, its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from evals import claims, results, run_settings, summaries, sweep
from kvjax._src.checks import check_names

FOLDER = Path(__file__).parent
OWN = ("title", "note", "forms", "names", "drawn", "claims")
Lines = Sequence[Mapping[str, Any]]


class Study(NamedTuple):
    """A study's file.

    Attributes:
        forms: the models of each form of a model, such as one base model, or several that were adapted with other
            seeds.
        names: what to call policies and links.
        drawn: the policies of its picture.
        content: what is run: a sweep, or what the sweeps in its ``runs`` share.
    """

    name: str
    title: str
    note: str
    forms: dict[str, list[str]]
    names: dict[str, str]
    drawn: list[str]
    claims: list[claims.Claim]
    content: dict[str, Any]

    @property
    def sweeps(self) -> list[dict[str, Any]]:
        """Return the sweeps that make the study's figures, one after the other."""
        shared = {name: value for name, value in self.content.items() if name != "runs"}
        return [{**shared, **own, "tasks": _tasks(shared, own)} for own in self.content.get("runs", [{}])]

    @property
    def policies(self) -> list[str]:
        """Return the policies that any of the sweeps runs."""
        return list(dict.fromkeys(run_settings.full_name(name) for one in self.sweeps for name in one["policies"]))

    @property
    def asked(self) -> int:
        """The questions of a task about each text: needles that are asked for, facts of a generation, or free ones."""
        tasks = self.content.get("tasks", {})
        if "generation" in tasks:
            return int(tasks["generation"].get("facts", 5))
        if "questions" in tasks:
            return int(tasks["questions"].get("facts", 7)) + 1
        return int(tasks.get("needle", {}).get("asked", 1))

    @property
    def evicts_once(self) -> bool:
        """Return whether all policies hold the whole prompt, so that what they keep tells them apart."""
        return self.content.get("when") == "prompt"


def _tasks(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tasks of a run: those of the file, each with the run's flags in place of its own."""
    tasks, changed = (content.get("tasks", {}) for content in (shared, own))
    return {task: {**tasks.get(task, {}), **changed.get(task, {})} for task in {**tasks, **changed}}


def find(name: str) -> Study:
    """Read a study by its name, or by the path of its file."""
    path = Path(name)
    if path.suffix != ".toml":
        check_names("study", name, sorted(file.stem for file in FOLDER.glob("*.toml")))
        path = FOLDER / f"{name}.toml"
    content = sweep.read(path)
    own = {field: content.pop(field) for field in OWN if field in content}
    if "title" not in own or not isinstance(own.get("forms"), dict) or "models" in content:
        raise ValueError(f"{path} lacks a title, or forms in place of models; see those of evals/studies.")
    forms, entries = own["forms"], own.get("claims", [])
    links = {entry.get("link") for entry in entries}
    names = {
        name if name in links else run_settings.full_name(name): called for name, called in own.get("names", {}).items()
    }
    content["models"] = list(dict.fromkeys(model for models in forms.values() for model in models))
    judged = claims.read(entries, names)
    found = Study(path.stem, own["title"], own.get("note", ""), forms, names, [], judged, content)
    drawn = [run_settings.full_name(name) for name in own.get("drawn", found.policies)]
    return found._replace(drawn=drawn)


def with_scores(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of :func:`evals.summaries.summarise`, each with its scores by task, in the samples' order.

    Scores are :func:`packed`, with None for a sample that a run has left out.
    """
    lines = summaries.summarise(records)
    by_setting: dict[tuple[Any, ...], dict[str, dict[int, float]]] = {}
    for record in records:
        of_setting = by_setting.setdefault(tuple(record.get(name) for name in results.SETTING), {})
        of_setting.setdefault(record["task"], {})[record["sample"]] = record["score"]
    for line in lines:
        found = by_setting[tuple(line[name] for name in results.SETTING)]
        line["scores"] = {
            task: packed([scores.get(sample) for sample in range(max(scores) + 1)]) for task, scores in found.items()
        }
    return lines


def packed(scores: Sequence[float | None]) -> str | list[float | None]:
    """Return scores as digits if each is 0 or 1 ("10-1"), else rounded to four places; ``-`` or None is none."""
    if set(scores) <= {0, 1, None}:
        return "".join("-" if score is None else str(int(score)) for score in scores)
    return [None if score is None else round(score, 4) for score in scores]


def scores_of(lines: Sequence[Mapping[str, Any]], asked: int = 1) -> Iterator[claims.PolicyScores]:
    """Yield the scores that claims are judged by, from the lines of a study's JSON file.

    If a task asks several questions about each text (:attr:`Study.asked`), one text is one sample, whose score is their
    mean: answers from one cache are not independent. A text that lacks an answer is left out.
    """
    for line in lines:
        each = asked if line["evaluation"] in ("needle", "generation", "questions") else 1
        scores = {
            (task, i): float(np.mean([float(score) for score in of_text]))
            for task, found in line["scores"].items()
            for i in range(len(found) // each)
            if not {"-", None}.intersection(of_text := found[i * each : (i + 1) * each])
        }
        yield claims.PolicyScores(line["model"], line["policy"], tuple(line[name] for name in claims.PLACE), scores)


def samples(lines: Lines, asked: int) -> tuple[list[Any], Float[np.ndarray, "models samples"]]:
    """Return the samples that a policy was run on with all of the models that its lines have, and their scores.

    The lines are those of one policy under one budget; each evaluation has samples of its own.
    """
    by_model: dict[str, dict[Any, float]] = {}
    for one in scores_of(lines, asked):
        of_model = by_model.setdefault(one.model, {})
        evaluation, length, *_ = one.place  # budgets are compared on the same samples
        of_model |= {(evaluation, length, *sample): score for sample, score in one.scores.items()}
    first, *others = by_model.values()
    shared = sorted(key for key in first if all(key in other for other in others))
    return shared, np.array([[of_model[key] for key in shared] for of_model in by_model.values()])


def forms(study: Study, lines: Lines) -> dict[str, list[str]]:
    """Return the forms of the model, with their models, all of which have results."""
    there = {line["model"] for line in lines}
    return {form: models for form, models in study.forms.items() if there.issuperset(models)}
