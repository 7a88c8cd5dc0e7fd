"""Studies: a sweep and its claims, whose JSON file is enough to judge them again."""

import json
from pathlib import Path

import numpy as np
import pytest

from evals import run_settings, studies, study, study_page
from evals.__main__ import main
from tests.evals.test_sweep import SMALL

CLAIMS = Path(__file__).with_name("claims.toml").read_text()


@pytest.mark.parametrize("path", sorted(studies.FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_each_study_runs_what_its_claims_compare(path):
    read = studies.find(path.stem)
    run = {"recency", *(run_settings.full_name(name) for name in read.content["policies"])}
    missing = {name for claim in read.claims for name in (claim.policy, claim.over)} - run
    assert not missing
    assert {"full", "recency"} <= run
    assert set(read.drawn) <= run
    assert set(read.names) <= run | {"caote", "match"}


def test_the_command_runs_judges_and_judges_again(tmp_path, capsys):
    settings, tasks, _ = SMALL.split("\n\n")
    file, out, figures = tmp_path / "small.toml", tmp_path / "run", tmp_path / "small.json"
    head, claimed = CLAIMS.split("[[claims]]", 1)
    file.write_text(head + settings.replace('models = ["retriever"]', "") + "\n" + tasks + "\n[[claims]]" + claimed)
    assert main(["study", str(file), "--out", str(out), "--json", str(figures)]) == 0
    printed = capsys.readouterr().out
    data = json.loads(figures.read_text())
    assert [claim["claim"] for claim in data["claims"]] == ["caote improves tova", "tova is not worse than full"]
    assert {row["policy"] for row in data["results"]} == {"full", "recency", "tova", "tova+caote"}
    assert all(len(row["scores"]["needle"]) == 4 for row in data["results"])
    again = tmp_path / "again.json"
    assert main(["study", str(file), "--judge", str(figures), "--json", str(again)]) == 0
    said = capsys.readouterr().out.partition("figures: ")[0].strip()
    assert said and said in printed and json.loads(again.read_text()) == data


def test_a_page_shows_what_each_policy_scores_holds_and_claims(tmp_path):
    file = tmp_path / "small.toml"
    file.write_text(
        'title = "Small"\nnote = "Texts."\nforms = {base = ["m"], adapted = ["a", "b"]}\n'
        'policies = ["full", "tova", "recency"]\nbudgets = [0.5]\n[tasks.needle]\nasked = 2\n'
        '[names]\n"tova" = "TOVA"\n"full" = "all"\n[[claims]]\npaper = "TOVA"\npolicies = ["tova"]\n'
        'over = ["recency"]\n'
    )
    place = {"evaluation": "needle", "length": 8, "when": "block", "question": "unknown", "samples": 16}
    rows = [
        {"model": "m", "policy": policy, "budget": budget, "peak_cache_bytes": held << 20, "scores": {"needle": scores}}
        | place
        | {"cache_bytes": 0}
        for policy, budget, held, scores in (
            ("full", None, 8, "11" * 8), ("tova", 0.5, 4, "11" * 6 + "1010"), ("recency", 0.5, 3, "10" + "00" * 7),
        )
    ]  # fmt: skip
    read = studies.find(str(file))
    assert list(studies.forms(read, rows)) == ["base"]
    made = {"command": "python -m evals study", "cores": 2, "device": "cpu", "commit": "c"}
    page = study_page.markdown(read, {"results": rows, **made}, study.judge(read, rows), "small.png")
    lines = [line for line in page.splitlines() if line.startswith("| ") and "---" not in line]
    assert lines[0] == "| policy | 50% |"
    assert lines[1].startswith("| `tova` | **0.88** [") and lines[1].endswith("], 4 MiB |")
    assert lines[2].startswith("| `recency` | 0.06 [") and lines[2].endswith("], 3 MiB |")
    assert lines[3] == "| the full cache | 1.00 [1.00, 1.00], 8 MiB |"
    told = "| TOVA | TOVA is better than recency |  | 8 | unknown, after every block: **holds**, +0.81 ["
    assert lines[-1].startswith(told) and lines[-1].endswith("] (0.88, 0.06; 0.06, 1.00) |")
    assert "![Scores against the bytes of a prompt's cache](small.png)" in page and "on 2 cores, commit c;" in page
    made["environments"] = [{"device": "NVIDIA H100", "commit": "d"}, {"device": "cpu", "cores": 8, "commit": "e"}]
    page = study_page.markdown(read, {"results": rows, **made}, study.judge(read, rows))
    assert "on NVIDIA H100, commit d; 8 cores, commit e;" in page
    grown = [row | ({"increase": 0.025} if row["policy"] == "tova" else {}) for row in rows]
    (panel,) = study_page.panels(read, grown)
    assert "], 4 MiB, perplexity +2.5% |" in study_page.table(read, grown, panel)
    study_page.picture([(read, rows)], tmp_path / "small.png")
    assert (tmp_path / "small.png").stat().st_size > 10_000


def test_answers_from_one_text_are_one_sample():
    place = {"length": 8, "budget": 4, "when": "block", "question": "unknown"}
    row = {"model": "m", "policy": "tova", "evaluation": "needle", **place, "scores": {"needle": "110001"}}
    (found,) = studies.scores_of([row], asked=3)
    assert found.scores == {("needle", 0): 2 / 3, ("needle", 1): 1 / 3}
    (found,) = studies.scores_of([row | {"evaluation": "ruler"}], asked=3)
    assert len(found.scores) == 6
    (found,) = studies.scores_of([row | {"scores": {"needle": "1-0001"}}], asked=3)
    assert found.scores == {("needle", 1): 1 / 3}


def test_cells_are_compared_on_the_samples_that_both_have():
    cell = study_page.Cell(["a", "b", "c"], np.array([[1.0, 0.5, 0.0]]), 1, 1)
    assert cell.less(study_page.Cell(["c", "b"], np.array([[1.0, 0.25]]), 1, 1)).tolist() == [[0.25, -1.0]]
