"""Ablations: the papers' tables on the embedded model, and which of their claims hold here.

This is the command; ablations.py beside it holds the studies. Each study measures the needle recall of its runs on the
same samples, and ends with the claims that it tests. `python -m evals ablation claims` collects the claims of all JSON
files.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evals import evaluator, needle, report, verdicts
from evals.experiments import claims, study_report
from evals.experiments.ablations import LENGTH, STUDIES, Run, Study
from kvjax.checks import check_names
from models import commands, provenance

EXAMPLES = f"""studies: {", ".join(STUDIES)}

examples:
  python -m evals ablation rounds --samples 4
  python -m evals ablation laprox --json docs/results/ablation-laprox.json --plot docs/results/ablation-laprox.png
  python -m evals ablation claims --results docs/results --markdown docs/results/CLAIMS.md
"""


TOGETHER = 24  # the most runs that share a prompt: a killed study loses at most so many


def measure(
    study: Study,
    of_runs: Callable[[list[Run]], list[dict[str, Any]]],
    *,
    done: Sequence[dict[str, Any]] = (),
    on_result: Callable[[list[dict[str, Any]]], None] | None = None,
) -> list[dict[str, Any]]:
    """Return the results of a study's runs in order; those in ``done`` are not measured again.

    Args:
        of_runs: measures runs of one question, block and dtype, which share their prompts where they can.
        on_result: called after each such group with all results so far, including those in ``done``.
    """
    found = {run_of(result): result for result in done if run_of(result) in study.runs}
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in study.runs:
        late = run.budget is None or run.when == "prompt"
        if run not in found:
            groups.setdefault((run.question, run.block, run.cache_dtype) if late else (run,), []).append(run)
    parts = (runs[start : start + TOGETHER] for runs in groups.values() for start in range(0, len(runs), TOGETHER))
    for together in parts:
        found.update(zip(together, of_runs(together), strict=True))
        if on_result is not None:
            on_result([found[run] for run in study.runs if run in found])
    return [found[run] for run in study.runs]


def judge(study: Study, results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Judge the study's claims by its results."""
    outcomes = {run_of(result): result["correct"] for result in results}
    return [claims.judge(claim, outcomes) for claim in study.claims]


def run_of(result: dict[str, Any]) -> Run:
    """Return the run that a result belongs to."""
    return Run(
        result["policy"], result["share"], result["when"], result["question"], result["block"],
        result.get("cache_dtype"),
    )  # fmt: skip


def per_token(result: dict[str, Any], length: int) -> dict[str, Any]:
    """Return a result with the bytes that its cache takes per token of a prompt of this length."""
    return result | {"bytes_per_token": round(result["cache_bytes"] / length, 1)}


def _setting(run: Run, length: int) -> needle.Setting:
    return needle.Setting(run.policy, run.slots(length), run.when, run.question, cache_dtype=run.cache_dtype)


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("study", metavar="STUDY", help=f"{', '.join(STUDIES)}; or claims, for the list of all claims")
    flags.add_argument("--model", default="retriever", help="'retriever', a Hugging Face folder, or a hub name")
    flags.add_argument("--length", type=int, default=LENGTH, help="tokens per prompt")
    flags.add_argument("--depths", type=int, default=5, help="number of depths from 0 to 1")
    flags.add_argument("--samples", type=int, default=20, help="samples per depth")
    flags.add_argument("--facts", type=int, default=10, help="facts per text; one of them is asked for")
    flags.add_argument("--batch", type=int, default=20)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--dtype", help="float32, bfloat16 or float16; the checkpoint's by default")
    flags.add_argument("--json", type=Path, help=f"write all figures here, after every {TOGETHER} runs")
    flags.add_argument("--resume", action="store_true", help="keep the runs that --json already holds")
    flags.add_argument("--plot", type=Path, help="write the picture here (.png, .svg or .pdf)")
    flags.add_argument(
        "--results", type=Path, default=Path("docs/results"), help="with claims: the folder of JSON files"
    )
    flags.add_argument("--markdown", type=Path, help="with claims: write the list here")


def command(flags: argparse.Namespace) -> None:
    """Run a study: check, measure, print the table and the claims, write JSON and picture; or collect the claims."""
    if flags.study == "claims":
        _collect(flags)
        return
    check_names("study", flags.study, [*STUDIES, "claims"])
    study = STUDIES[flags.study]
    evaluator.check_least(flags, length=1, batch=1)
    study.check(flags.length)
    if flags.resume and flags.json is None:
        raise ValueError("--resume continues a file, but no file was named; give --json.")
    report.check_outputs(flags.json, flags.plot)
    sampled = {
        name: getattr(flags, name) for name in ("model", "length", "depths", "samples", "facts", "seed", "dtype")
    }
    before = _read(flags.json, flags.study, sampled) if flags.resume else {}
    model, tokenizer = evaluator.load(flags)
    if flags.length > model.config.max_positions:
        raise ValueError(
            f"--length is {flags.length}, but {flags.model} takes {model.config.max_positions} positions; give fewer."
        )
    made_of = evaluator.made_of(model, tokenizer)
    if before:
        provenance.check_same(flags.json, before.get("fingerprints"), made_of)
    questions = dict.fromkeys(run.question for run in study.runs)
    cells = {question: needle.cells_for(flags, tokenizer, [flags.length], question) for question in questions}
    for run in study.runs:
        samples = needle.samples_of(cells[run.question])
        most = max(len(sample.answer_tokens) for sample in samples)
        setting = _setting(run, flags.length)
        evaluator.check_answers(model, samples, setting, new_tokens=most, block=run.block, batch=flags.batch)
    total = flags.depths * flags.samples
    aids = evaluator.load_aids(flags, [_setting(run, flags.length) for run in study.runs], model, tokenizer)

    def data(results: Sequence[dict[str, Any]], judged: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        places = {run: index for index, run in enumerate(map(run_of, results))}
        return {
            "evaluation": "ablation",
            "study": study.name,
            "title": study.title,
            "caveat": study.caveat,
            "settings": {**sampled, "batch": flags.batch},
            "samples": total,
            "seconds": round(sum(result["seconds"] for result in results), 1),
            "complete": len(results) == len(study.runs),
            "claims": list(judged),
            "points": [
                {"panel": point.panel, "line": point.line, "x": point.x, "result": places[point.run]}
                for point in study.points
                if point.run in places
            ],
            "results": list(results),
        }

    with commands.progress_bar("sample", total=total * len(study.runs)) as progress:

        def of_runs(together: list[Run]) -> list[dict[str, Any]]:
            settings = [_setting(run, flags.length) for run in together]
            begun, first = time.time(), together[0]
            results = needle.measure(
                model, cells[first.question], settings, block=first.block, batch=flags.batch, progress=progress,
                aids=aids,
            )  # fmt: skip
            seconds = round((time.time() - begun) / len(together), 1)
            return [
                {
                    **{name: value for name, value in per_token(result, flags.length).items() if name != "cells"},
                    "share": run.budget,
                    "block": run.block,
                    "seconds": seconds,
                    "correct": [hit for cell in result["cells"] for hit in cell["correct"]],
                }
                for run, result in zip(together, results, strict=True)
            ]

        def save(results: list[dict[str, Any]]) -> None:
            if flags.json is not None:
                provenance.write(flags, data(results), made_of)

        done = [per_token(result, flags.length) for result in before.get("results", [])]
        progress.update(total * len({run_of(result) for result in done} & set(study.runs)))
        results = measure(study, of_runs, done=done, on_result=save)
        progress.set_description("done")
    judged, by_run = judge(study, results), {run_of(result): result for result in results}
    claimed = (verdicts.sentence(claim).replace("\n", " ") for claim in judged)
    report.show(study_report.table(study, by_run), "\n".join(claimed))

    def draw(path: Path) -> None:
        study_report.figure(study, by_run, path, recency=needle.RECENCY)

    report.write(flags, data(results, judged), made_of, draw)


def _read(path: Path, study: str, sampled: dict[str, Any]) -> dict[str, Any]:
    """Read the data of an interrupted study; it is empty where there is no file.

    Raises:
        ValueError: the file belongs to another study, or its samples differ.
    """
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON; name another file, or leave --resume out.") from None
    if not isinstance(data, dict) or data.get("study") != study:
        raise ValueError(f"{path} is not of the study {study!r}; name another file, or leave --resume out.")
    differing = [name for name, value in sampled.items() if data["settings"].get(name) != value]
    if differing:
        raise ValueError(
            f"{path} was made with another {', '.join(differing)}; give the same again, or leave --resume out."
        )
    return data


def _collect(flags: argparse.Namespace) -> None:
    if not flags.results.is_dir():
        raise ValueError(f"there is no folder {flags.results}; give --results the folder with the JSON files.")
    commands.check_outputs([flags.markdown])
    text = claims.markdown(flags.results)
    if flags.markdown is None:
        print(text, end="")
        return
    with commands.replacing(flags.markdown) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(f"claims: {flags.markdown}")
