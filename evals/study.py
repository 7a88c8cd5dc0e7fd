"""Studies: the runs that claims of papers are judged on; see :mod:`evals.studies` for their files.

A study's JSON file holds every score, so claims can be judged again without a run. A killed run is resumed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from evals import claims, report, results, studies, study_panels, sweep
from kvjax._src.former_names import TODAY, renamed_document
from models import files
from models.commands import provenance
from models.commands.shared_flags import HOSTS, add_shared_flags

EXAMPLES = f"""studies: {", ".join(sorted(path.stem for path in studies.FOLDER.glob("*.toml")))}

examples:
  python -m evals study fixed-memory --out runs/fixed-memory --json docs/results/fixed-memory.json
  python -m evals study fixed-memory --judge docs/results/fixed-memory.json --plot fixed-memory.png
"""


UNTOLD = ("claim", "where", "scores", "corrected", "alone", "verdict")


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("study", metavar="STUDY", help="a name, or the path of a TOML file")
    flags.add_argument(
        "--judge", type=Path, metavar="JSON", help="judge the scores of such a file again, and run nothing"
    )
    add_shared_flags(flags, "out", "json", "plot", *HOSTS)


def command(flags: argparse.Namespace) -> None:
    """Run a study, or read its scores; print tables and claims, and write JSON."""
    study = studies.find(flags.study)
    report.check_outputs(flags.json, flags.plot)
    answered: list[sweep.SweepRun] = []
    if flags.judge is not None:
        content = _content(flags.judge)
    else:
        if flags.out is None:
            raise ValueError("a study takes hours, and --out names the folder from which it resumes: give one.")
        answered = _answer(study, flags)
        stores = [one.store for one in answered]
        fingerprints = _unique(one for store in stores for one in store.fingerprints)
        facts = provenance.facts(flags.invocation, study.content.get("seed", 0), fingerprints)
        content = {
            **{name: facts[name] for name in ("command", "seed", "fingerprints")},  # this process may have run nothing
            "evaluation": "study",
            "study": study.name,
            "title": study.title,
            "settings": study.content,
            "environments": _unique(one for store in stores for one in store.environments),
            "results": studies.with_scores(_unique((one for store in stores for one in store.records), results.KEY)),
        }
        sweep.show(content["results"])
    lines = content["results"]
    judged = judge(study, lines)
    print(table(decide(judged)))
    if flags.json is not None:
        plain = [_plain(form, judgement) for form, judgement in judged]
        files.write_json(flags.json, content | TODAY | {"claims": plain})
        print(f"figures: {flags.json}")
    if flags.plot is not None:
        study_panels.picture(study, lines, flags.plot)
        print(f"picture: {flags.plot}")
    for one in answered:
        one.check()


def _answer(study: studies.Study, flags: argparse.Namespace) -> list[sweep.SweepRun]:
    """Run a study's sweeps, each in a folder of its own if they are several; all are checked before the first."""
    folders = (
        [flags.out / str(number) for number in range(1, 1 + len(study.sweeps))]
        if study.content.get("runs")
        else [flags.out]
    )
    for content in study.sweeps:
        sweep.plan(content)
    written = f"python -m evals study {flags.study} --out {flags.out}"
    return [
        sweep.answer(content, argparse.Namespace(**{**vars(flags), "out": folder}), written)
        for content, folder in zip(study.sweeps, folders, strict=True)
    ]


def _unique(found: Iterable[dict[str, Any]], names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return the first of those that are equal, or whose values of ``names`` are."""
    kept: dict[str, dict[str, Any]] = {}
    for one in found:
        kept.setdefault(json.dumps(one if names is None else [one.get(name) for name in names], sort_keys=True), one)
    return list(kept.values())


def _content(path: Path) -> dict[str, Any]:
    """Read a study's JSON file; ValueError where it is no such file."""
    try:
        content = renamed_document(json.loads(files.read_text(path, "study's JSON")))
        next(iter(studies.scores_of(content["results"])), None)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{path} is no JSON file of a study; name one that `python -m evals study` wrote.") from None
    return content


def judge(study: studies.Study, lines: studies.Lines) -> list[tuple[str, claims.Judgement]]:
    """Judge a study's claims on each form of the model, by the lines of its JSON file, each for itself."""
    found = list(studies.scores_of(lines, study.asked))
    return [
        (form, judgement)
        for form, models in studies.forms(study, lines).items()
        for judgement in claims.judge(study.claims, found, models)
    ]


def decide(judged: Sequence[tuple[str, claims.Judgement]]) -> list[tuple[str, claims.Judgement]]:
    """Return judged claims with the verdicts of :func:`evals.claims.decide`."""
    decided = claims.decide([judgement for _, judgement in judged])
    return [(form, judgement) for (form, _), judgement in zip(judged, decided, strict=True)]


def _plain(form: str, judgement: claims.Judgement) -> dict[str, Any]:
    """Return a judged claim in JSON's types, without a verdict: that depends on what else is judged with it."""
    told: dict[str, Any] = {
        "form": form,
        "paper": judgement.claim.paper,
        "claim": judgement.claim.text,
        "expects": judgement.claim.expects,
    }
    told |= {"policy": judgement.claim.policy, "over": judgement.claim.over, "where": judgement.where}
    rounded = {name: round(value, 6) if isinstance(value, float) else value
               for name, value in judgement._asdict().items() if name not in UNTOLD}  # fmt: skip
    return told | {"scores": [round(score, 6) for score in judgement.scores]} | rounded


def table(judged: Sequence[tuple[str, claims.Judgement]]) -> str:
    """Return the judged claims as a table in text."""
    lines = [_plain(form, judgement) | {"verdict": judgement.verdict} for form, judgement in judged]
    bound = lambda name: lambda r: "n/a" if r[name] is None else f"{r[name]:.2f}"  # noqa: E731
    return report.table(
        lines,
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
