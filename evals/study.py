"""Studies: the runs that claims of papers are judged on. A file in evals/studies/ names their settings and the claims.

A study's file is a sweep's (`python -m evals sweep --help`) with a ``title``, the ``forms`` of the model in place of
``models``, ``names`` for policies, and tables ``[[claims]]`` (evals/claims.py). Its JSON file holds every score, so
claims can be judged again without a run. A killed run is resumed.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evals import claims, evaluator, report, results, statistics, sweep
from kvjax.checks import check_names
from models import commands, hosts, provenance

FOLDER = Path(__file__).with_name("studies")
OWN = ("title", "note", "forms", "names", "claims")
EXAMPLES = f"""studies: {", ".join(sorted(path.stem for path in FOLDER.glob("*.toml")))}

examples:
  python -m evals study fixed-memory --out runs/fixed-memory --json docs/results/fixed-memory.json
  python -m evals study fixed-memory --judge docs/results/fixed-memory.json --plot fixed-memory.png
"""


class Study(NamedTuple):
    """A study's file.

    Attributes:
        forms: the models of each form of a model, such as one base model, or several that were adapted with other
            seeds.
        names: what to call policies.
        content: what a sweep runs.
    """

    name: str
    title: str
    note: str
    forms: dict[str, list[str]]
    names: dict[str, str]
    claims: list[claims.Claim]
    content: dict[str, Any]

    @property
    def asked(self) -> int:
        """The needles that are asked for in each text."""
        return int(self.content.get("tasks", {}).get("needle", {}).get("asked", 1))


def find(name: str) -> Study:
    """Read a study by its name, or by the path of its file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: there is no study of that name, or its file cannot be read.

    Example:
        >>> from evals import study
        >>> study.find("fixed-memory").forms
        {'base': ['smollm2']}
    """
    path = Path(name)
    if path.suffix != ".toml":
        check_names("study", name, sorted(file.stem for file in FOLDER.glob("*.toml")))
        path = FOLDER / f"{name}.toml"
    content = sweep.read(path)
    own = {field: content.pop(field) for field in OWN if field in content}
    if "title" not in own or not isinstance(own.get("forms"), dict) or "models" in content:
        raise ValueError(
            f"{path} lacks a title, or forms in place of models; see evals/studies for how they are written."
        )
    names, forms = own.get("names", {}), own["forms"]
    content["models"] = list(dict.fromkeys(model for models in forms.values() for model in models))
    return Study(
        path.stem, own["title"], own.get("note", ""), forms, names, claims.read(own.get("claims", []), names), content
    )


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("study", metavar="STUDY", help="a name, or the path of a TOML file")
    flags.add_argument("--out", type=Path, help="the folder of its records; a killed run is resumed")
    flags.add_argument("--json", type=Path, help="write all scores, tables and claims here")
    flags.add_argument(
        "--judge", type=Path, metavar="JSON", help="judge the scores of such a file again, and run nothing"
    )
    flags.add_argument("--plot", type=Path, help="draw scores against the bytes held at most (.png, .svg or .pdf)")
    hosts.add_flags(flags)


def command(flags: argparse.Namespace) -> None:
    """Run a study, or read its scores; print tables and claims, and write JSON."""
    study = find(flags.study)
    report.check_outputs(flags.json, flags.plot)
    if flags.judge is not None:
        rows = _results(flags.judge)
        print(table(judge(study, list(scores_of(rows, study.asked)))))
        _draw(study, rows, flags.plot)
        return
    if flags.out is None:
        raise ValueError("a study takes hours, and --out names the folder from which it resumes: give one.")
    answered = sweep.answer(study.content, flags, f"python -m evals study {flags.study} --out {flags.out}")
    rows = with_scores(answered.store.records)
    judged = judge(study, list(scores_of(rows, study.asked)))
    sweep.show(rows)
    print(table(judged))
    if flags.json is not None:
        made = provenance.facts(flags.begun, study.content.get("seed", 0), answered.store.fingerprints)
        figures: dict[str, Any] = {
            "evaluation": "study",
            "study": study.name,
            "title": study.title,
            "settings": study.content,
        }
        told = {"results": rows, "claims": [as_row(form, row) for form, row in judged]}
        commands.write_json(flags.json, {**made, **figures, **told})
        print(f"figures: {flags.json}")
    _draw(study, rows, flags.plot)
    answered.check()


def _draw(study: Study, rows: Sequence[Mapping[str, Any]], path: Path | None) -> None:
    if path is not None:
        picture(study, rows, path)
        print(f"picture: {path}")


def picture(study: Study, rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw what the study's named policies score against the bytes that a prompt holds at most, with 95% intervals.

    There is a panel for each form of the model and each question; scores are means over the form's models.
    """
    questions = list(dict.fromkeys(row["question"] for row in rows))
    there = {row["model"] for row in rows}
    forms = [form for form, models in study.forms.items() if there.issuperset(models)]
    plt = report.pyplot()
    size = (4.6 * max(2, len(questions)), 3.9 * len(forms) + 0.6)
    figure, axes = plt.subplots(
        len(forms), len(questions), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    handles: dict[str, Any] = {}
    for (form, question), axis in zip(itertools.product(forms, questions), axes.flat, strict=True):
        own = [row for row in rows if row["model"] in study.forms[form] and row["question"] == question]
        for number, (policy, name) in enumerate(study.names.items()):
            points = sorted(_points(study, [row for row in own if row["policy"] == evaluator.full_name(policy)]))
            if not points:
                continue
            held, score, low, high = (np.array(part) for part in zip(*points, strict=True))
            if policy == "full":
                axis.axhspan(low[0], high[0], color=report.GREY, alpha=0.15, linewidth=0)
                handles[name] = axis.axhline(score[0], color=report.GREY, linestyle="--", linewidth=1)
                axis.annotate(f"{held[0]:.0f} MiB", (1, score[0]), xycoords=("axes fraction", "data"), fontsize=8,
                              ha="right", va="bottom")  # fmt: skip
                continue
            bars = axis.errorbar(
                held, score, [score - low, high - score], color=report.colour(number), marker="osv^D"[number % 5],
                markersize=4, linewidth=1.4, elinewidth=0.8, capsize=2,
            )  # fmt: skip
            handles.setdefault(name, bars)
        report.plain(axis)
        axis.set_title(f"{form}, question {question}", fontsize=10)
        axis.set_xlabel("MiB of keys and values held at most", fontsize=9)
        axis.set_ylim(-0.03, 1.03)
    axes[0][0].set_ylabel("score", fontsize=9)
    figure.suptitle(study.title, fontsize=11)
    report.legend(figure, handles, columns=3)
    report.save(figure, path)


def _points(study: Study, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, float, float, float]]:
    """Yield (MiB at most, score, its interval) for each budget: over samples, and over models."""
    for budget in dict.fromkeys(row["budget"] for row in rows):
        at = [row for row in rows if row["budget"] == budget]
        found = scores_of(at, study.asked)
        by_model: dict[str, list[float]] = {}
        for one in found:
            by_model.setdefault(one.model, []).extend(score for _, score in sorted(one.scores.items()))
        held = float(np.mean([row["peak_cache_bytes"] for row in at]))
        yield held / 2**20, *statistics.mean_interval(np.array(list(by_model.values())))


def _results(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a study's JSON file.

    Raises:
        FileNotFoundError: it does not exist.
        ValueError: it is no such file.
    """
    try:
        found = json.loads(commands.read_text(path, "study's JSON"))["results"]
        next(iter(scores_of(found)), None)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{path} is no JSON file of a study; name one that `python -m evals study` wrote.") from None
    return found


def with_scores(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of :func:`evals.evaluator.summarise`, each with its scores: by task, in the order of the samples.

    Scores are :func:`packed`.
    """
    rows = evaluator.summarise(records)
    by_row: dict[tuple[Any, ...], dict[str, dict[int, float]]] = {}
    for record in records:
        of_row = by_row.setdefault(tuple(record.get(name) for name in results.ROW), {})
        of_row.setdefault(record["task"], {})[record["sample"]] = record["score"]
    for row in rows:
        found = by_row[tuple(row[name] for name in results.ROW)]
        row["scores"] = {task: packed([value for _, value in sorted(scores.items())]) for task, scores in found.items()}
    return rows


def packed(scores: Sequence[float]) -> str | list[float]:
    """Return scores as a text of digits if each is 0 or 1, else rounded to four digits.

    Example:
        >>> from evals import study
        >>> study.packed([1.0, 0.0, 1.0]), study.packed([0.5, 1.0])
        ('101', [0.5, 1.0])
    """
    if set(scores) <= {0, 1}:
        return "".join(str(int(score)) for score in scores)
    return [round(score, 4) for score in scores]


def scores_of(rows: Sequence[Mapping[str, Any]], asked: int = 1) -> Iterator[claims.Found]:
    """Yield the scores that claims are judged by, from the rows of a study's JSON file.

    Args:
        asked: how many needles are asked for in each text. One text is one sample, whose score is their mean: answers
            from one cache are not independent.
    """
    for row in rows:
        each = asked if row["evaluation"] == "needle" else 1
        scores = {
            (task, i): float(np.mean([float(score) for score in found[i * each : (i + 1) * each]]))
            for task, found in row["scores"].items()
            for i in range(len(found) // each)
        }
        yield claims.Found(row["model"], row["policy"], tuple(row[name] for name in claims.PLACE), scores)


def judge(study: Study, found: Sequence[claims.Found]) -> list[tuple[str, claims.Judged]]:
    """Judge a study's claims on each form of the model."""
    there = {one.model for one in found}
    forms = {form: models for form, models in study.forms.items() if there.issuperset(models)}
    return [(form, row) for form, models in forms.items() for row in claims.judge(study.claims, found, models)]


def as_row(form: str, row: claims.Judged) -> dict[str, Any]:
    """Return a judged claim in JSON's types."""
    told: dict[str, Any] = {
        "form": form,
        "paper": row.claim.paper,
        "claim": row.claim.text,
        "expects": row.claim.expects,
    }
    told |= {"policy": row.claim.policy, "over": row.claim.over, "where": row.where}
    rounded = {name: round(value, 6) if isinstance(value, float) else value
               for name, value in row._asdict().items() if name not in ("claim", "where", "scores")}  # fmt: skip
    return told | {"scores": [round(score, 6) for score in row.scores]} | rounded


def table(judged: Sequence[tuple[str, claims.Judged]]) -> str:
    """Return the judged claims as a table in text."""
    rows = [as_row(form, row) for form, row in judged]
    bound = lambda name: lambda r: "n/a" if r[name] is None else f"{r[name]:.2f}"  # noqa: E731
    return report.table(
        rows,
        [
            ("form", "{form}"),
            ("paper", "{paper}"),
            ("claim", "{claim}"),
            ("where", lambda r: ", ".join(f"{value}" for value in r["where"].values())),
            ("verdict", "{verdict}"),
            ("difference", "{difference:+.3f}"),
            ("95%", "{low:+.3f}..{high:+.3f}"),
            ("of", lambda r: " and ".join(f"{score:.2f}" for score in r["scores"])),
            ("recency", bound("floor")),
            ("full", bound("ceiling")),
            ("samples", "{samples}"),
        ],
        left=5,
    )
