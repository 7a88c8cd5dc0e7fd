"""Ablations: their definitions, what may be claimed from outcomes, and the command, without a long run."""

import dataclasses
import json

import pytest

import kvjax
from evals import needle, report, verdicts
from evals.__main__ import main
from evals.experiments import ablation, ablations, claims, study_report
from evals.experiments.ablations import STUDIES, Claim, Gain, Point, Run, Study
from tests.tiers import first, matrix

A, B, C, D = (Run(policy, 0.25) for policy in ("tova", "tova+caote", "h2o", "h2o+caote"))


@pytest.mark.parametrize("study", STUDIES.values(), ids=list(STUDIES))
def test_every_policy_parses_and_fits_its_budget_and_block(study):
    study.check(ablations.LENGTH)
    assert ablations.FULL in study.runs
    as_they_are = ("full", report.READS)
    names = {
        run: run.policy if run.policy.startswith(as_they_are) else str(kvjax.parse(run.policy)) for run in study.runs
    }
    spelt = {dataclasses.replace(run, policy=name) for run, name in names.items()}
    assert len(spelt) == len(study.runs)  # nothing is measured twice under two spellings


@pytest.mark.parametrize("study", STUDIES.values(), ids=list(STUDIES))
def test_claims_are_about_runs_of_their_study(study):
    assert study.claims
    texts = [claim.text for claim in study.claims]
    assert len(set(texts)) == len(texts)
    for claim in study.claims:
        assert {*claim.plus, *claim.minus} <= set(study.runs)
        assert sum(weight for weight, _ in claim.weights()) == pytest.approx(0)
        assert not set(claim.plus) & set(claim.minus)
    places = [(point.panel, point.line, point.x) for point in study.points]
    assert len(set(places)) == len(places)


def test_a_study_that_does_not_fit_is_refused():
    study = Study("x", "", "", (Point("", "", "", Run("snapkv", 0.01)),), (), ())
    with pytest.raises(ValueError, match="always keeps 0 first and 32 last"):
        study.check(512)
    with pytest.raises(ValueError, match="a block has 16"):
        dataclasses.replace(study, points=(Point("", "", "", Run("snapkv", 0.5, block=16)),)).check(512)


@pytest.mark.parametrize(
    ("claim", "outcomes", "difference", "verdict"),
    [
        (Claim("", "", (B,), (A,)), {A: [0] * 60, B: [1] * 60}, 1, "holds"),
        (Claim("", "", (A,), (B,)), {A: [0] * 60, B: [1] * 60}, -1, "does not"),
        (Claim("", "", (A,), (B,)), {A: [0, 1] * 30, B: [0, 1] * 30}, 0, "within noise"),
        (Claim("", "", (A,), (B,), "same"), {A: [0, 1] * 60, B: [0, 1] * 60}, 0, "holds"),
        (Claim("", "", (A,), (B,), "same"), {A: [0, 1] * 3, B: [0, 1] * 3}, 0, "within noise"),
        (Claim("", "", (A,), (B,), "same"), {A: [0] * 60, B: [1] * 60}, -1, "does not"),
        # both gain half, on average over two policies
        (Claim("", "", (B, D), (A, C)), {A: [0] * 60, B: [1] * 60, C: [1] * 60, D: [1] * 60}, 0.5, "holds"),
        # CAOTE gains 1 over tova and 0 over h2o
        (Gain("", "", (B, D), (A, C)), {A: [0] * 60, B: [1] * 60, C: [1] * 60, D: [1] * 60}, 1, "holds"),
        (Gain("", "", (B, D), (A, C)), {A: [0] * 60, B: [1] * 60, C: [0] * 60, D: [1] * 60}, 0, "within noise"),
    ],
)
def test_claims_by_hand(claim, outcomes, difference, verdict):
    judged = claims.judge(claim, outcomes)
    assert judged["difference"] == pytest.approx(difference)
    assert judged["low"] <= judged["difference"] <= judged["high"]
    assert judged["verdict"] == verdict
    assert judged["sides"][0] - judged["sides"][1] == pytest.approx(difference)


def test_a_comparison_at_the_ceiling_or_the_floor_is_marked():
    claim = Claim("", "x", (A,), (B,), "same")
    for share, note in ((0, "all near 0"), (30, ""), (60, "all near 1")):
        outcomes = [1] * share + [0] * (60 - share)
        judged = claims.judge(claim, {A: outcomes, B: outcomes})
        assert judged["note"] == note
        assert note in verdicts.sentence(judged)


def test_a_claim_needs_the_same_samples():
    with pytest.raises(ValueError, match="needs the same samples"):
        claims.judge(Claim("", "x", (A,), (B,)), {A: [1], B: [1, 0]})


def result_of(run, hits=3, samples=4):
    correct = [1] * hits + [0] * (samples - hits)
    figures = {"recall": hits / samples, "low": 0.1, "high": 0.99, "cache_bytes": 2**20, "bytes_per_token": 2048.0}
    return {
        **{"policy": run.policy, "budget": run.slots(512), "share": run.budget, "when": run.when},
        **{"question": run.question, "block": run.block, "cache_dtype": run.cache_dtype, "correct": correct, **figures},
    }


def test_finished_runs_are_not_measured_again_and_each_new_one_is_saved():
    by_block = Run("h2o", 0.25, "block")
    points = tuple(Point("", "", str(place), run) for place, run in enumerate((A, B, A, C, by_block)))
    study = Study("x", "", "", points, (), ())
    measured, saved = [], []

    def of_runs(together):
        measured.extend(together)
        return [result_of(run) for run in together]

    results = ablation.measure(
        study, of_runs, done=[result_of(B, hits=1), result_of(D)], on_result=lambda results: saved.append(len(results))
    )
    assert measured == [A, C, by_block]
    assert saved == [3, 4]  # what is done already is never lost
    assert [ablation.run_of(result) for result in results] == [A, B, C, by_block]
    assert results[1]["recall"] == 0.25


@pytest.mark.parametrize("study", first(1, STUDIES.values()), ids=list(STUDIES))
def test_every_study_has_a_table_and_a_picture(study, tmp_path):
    results = {run: result_of(run) for run in study.runs}
    table = study_report.table(study, results)
    assert all(run.policy in table for run in study.runs)
    assert len(ablation.judge(study, list(results.values()))) == len(study.claims)
    study_report.figure(study, results, tmp_path / "picture.png", recency=needle.RECENCY)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_list_of_claims_is_made_of_the_files_that_hold_some(tmp_path):
    claim = {"paper": "CAOTE", "claim": "better\nthan", "verdict": "holds", "difference": 0.5, "low": 0.1, "high": 0.9}
    data = {"title": "A study", "samples": 7, "command": "python -m evals x", "claims": [claim]}
    (tmp_path / "a.json").write_text(json.dumps(data))
    noted = {**claim, "verdict": "does not", "sides": [0.0, 0.5], "note": "all near 0"}
    (tmp_path / "b.json").write_text(json.dumps({**data, "claims": [noted], "claims_measure": "cosine"}))
    (tmp_path / "c.json").write_text('[{"claims": 1}]')
    text = claims.markdown(tmp_path)
    assert "| CAOTE | better than | holds | +0.50 [+0.10, +0.90] |  |" in text
    assert "| CAOTE | better than | does not (all near 0) | +0.50 [+0.10, +0.90] | 0.00 and 0.50 |" in text
    assert "[a.json](a.json), 7 samples per setting, made by `python -m evals x`. Differences of recall." in text
    assert "Differences of cosine." in text and "c.json" not in text


@pytest.fixture
def tiny_study(monkeypatch):
    runs = (Run("tova", 0.25), Run("tova+caote", 0.25))
    points = tuple(Point("", "line", str(i), run) for i, run in enumerate(runs))
    claims = (Claim("CAOTE", "CAOTE improves TOVA", runs[1:], runs[:1]),)
    study = Study("tiny", "A tiny study", "", points, claims, (ablations.FULL,))
    monkeypatch.setitem(STUDIES, "tiny", study)
    return study


SMALL = ["--length", "256", "--depths", "2", "--samples", "2", "--facts", "4", "--batch", "4"]


@matrix
def test_the_command_writes_all_and_resumes(tiny_study, tmp_path, capsys, run_eval):
    figures, listed = tmp_path / "out.json", tmp_path / "CLAIMS.md"
    arguments = ["ablation", "tiny", *SMALL, "--json", str(figures)]
    data, printed = run_eval(*arguments[:-2])
    assert data["complete"] and data["samples"] == 4
    assert [ablation.run_of(result) for result in data["results"]] == list(tiny_study.runs)
    assert [point["result"] for point in data["points"]] == [1, 2]
    assert verdicts.sentence(data["claims"][0]) in printed

    data["results"][2]["correct"] = [1] * 4  # what a resumed study must keep
    data["results"] = data["results"][1:]
    figures.write_text(json.dumps(data))
    assert main([*arguments, "--resume"]) == 0
    again = json.loads(figures.read_text())
    assert [ablation.run_of(result) for result in again["results"]] == list(tiny_study.runs)
    assert again["results"][2]["correct"] == [1] * 4

    data["fingerprints"]["weights"] = "others"
    figures.write_text(json.dumps(data))
    assert main([*arguments, "--resume"]) == 2
    assert "was made with different weights" in capsys.readouterr().err
    figures.write_text(json.dumps(again))

    assert main([*arguments, "--resume", "--seed", "7"]) == 2
    assert "made with another seed" in capsys.readouterr().err

    assert main(["ablation", "claims", "--results", str(tmp_path), "--markdown", str(listed)]) == 0
    assert "| CAOTE | CAOTE improves TOVA | " in listed.read_text()
