"""Studies: a sweep and its claims, whose JSON file is enough to judge them again."""

import json
from pathlib import Path

import numpy as np
import pytest

from evals import claims, studies, study, study_panels
from evals.__main__ import main
from tests.evals.test_sweep import SMALL
from tests.tiers import matrix

CLAIMS = Path(__file__).with_name("claims.toml").read_text()


@pytest.mark.parametrize("path", sorted(studies.FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_each_study_runs_what_its_claims_compare(path):
    read = studies.find(path.stem)
    run = {"recency", *read.policies}
    missing = {name for claim in read.claims for name in (claim.policy, claim.over)} - run
    assert not missing
    assert {"full", "recency"} <= run
    assert set(read.drawn) <= run
    assert set(read.names) <= run | {"caote", "fast_caote", "match"}


@matrix
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
    again, picture = tmp_path / "again.json", tmp_path / "small.png"
    assert main(["study", str(file), "--judge", str(figures), "--json", str(again), "--plot", str(picture)]) == 0
    said = capsys.readouterr().out.partition("figures: ")[0].strip()
    assert picture.stat().st_size > 10_000
    assert said and said in printed and json.loads(again.read_text()) == data


def test_former_names_are_translated_once(tmp_path):
    file, figures = tmp_path / "small.toml", tmp_path / "small.json"
    file.write_text(
        'title = "Small"\nforms = {base = ["retriever"]}\npolicies = ["kvzip"]\nbudgets = [8]\n[tasks.needle]\n'
    )
    (line,) = lines_of(kvzip=(("01",), 1))
    former = {
        "environments": [{"versions": {"kvjax": "0.2.0"}}],
        "results": [line | {"policy": "kvzip@model(normalise=False)"}],
    }
    figures.write_text(json.dumps(former))
    for _ in range(2):
        assert main(["study", str(file), "--judge", str(figures), "--json", str(figures)]) == 0
        assert [line["policy"] for line in json.loads(figures.read_text())["results"]] == ["kvzip"]


@pytest.mark.matrix
def test_a_study_of_several_runs_makes_what_each_of_them_answers(tmp_path):
    settings, tasks, _ = SMALL.split("\n\n")
    file, out, figures = tmp_path / "small.toml", tmp_path / "run", tmp_path / "small.json"
    runs = '[[runs]]\npolicies = ["full", "tova"]\n[[runs]]\npolicies = ["tova+caote"]\nfirst = 2\n'
    shared = settings.replace('models = ["retriever"]', 'title = "Small"\nforms = {base = ["retriever"]}')
    file.write_text(f"{shared}\n{runs}{tasks}\n")
    assert studies.find(str(file)).policies == ["full", "tova", "tova+caote"]
    assert main(["study", str(file), "--out", str(out), "--json", str(figures)]) == 0
    data = json.loads(figures.read_text())
    counts = {line["policy"]: len(line["scores"]["needle"]) for line in data["results"]}
    assert counts == {"full": 4, "tova": 4, "recency": 4, "tova+caote": 2} and len(data["fingerprints"]) == 1


def test_answers_from_one_text_are_one_sample():
    place = {"length": 8, "budget": 4, "when": "block", "question": "unknown"}
    row = {"model": "m", "policy": "tova", "evaluation": "needle", **place, "scores": {"needle": "110001"}}
    (found,) = studies.scores_of([row], asked=3)
    assert found.scores == {("needle", 0): 2 / 3, ("needle", 1): 1 / 3}
    (found,) = studies.scores_of([row | {"evaluation": "ruler"}], asked=3)
    assert len(found.scores) == 6
    (found,) = studies.scores_of([row | {"evaluation": "generation", "scores": {"facts": "110001"}}], asked=3)
    assert found.scores == {("facts", 0): 2 / 3, ("facts", 1): 1 / 3}
    (found,) = studies.scores_of([row | {"scores": {"needle": "1-0001"}}], asked=3)
    assert found.scores == {("needle", 1): 1 / 3}


def test_a_study_says_how_many_questions_a_text_has():
    tasks = {"questions": 8, "fixed-memory": 5, "ruler": 1}
    read = {name: studies.find(name) for name in tasks}
    assert {name: study.asked for name, study in read.items()} == tasks


def test_scores_stand_at_their_samples_places_and_models_share_samples():
    place = dict(length=8, budget=4, when="block", question="unknown", evaluation="ruler", task="vt")
    sizes = dict(cache_bytes=1, peak_cache_bytes=1, prefill=[0, 0], decode=[0, 0])
    scores = {"one": {0: 1.0, 2: 0.0, 3: 1.0}, "two": {1: 1.0, 2: 1.0, 3: 0.0}}
    records = [
        {"model": model, "policy": "tova", "sample": sample, "score": score, **place, **sizes}
        for model, own in scores.items()
        for sample, score in own.items()
    ]
    lines = studies.with_scores(records)
    assert [line["scores"] for line in lines] == [{"vt": "1-01"}, {"vt": "-110"}]
    shared, found = studies.samples(lines, 1)
    assert [sample[-1] for sample in shared] == [2, 3] and found.tolist() == [[0, 1], [1, 0]]


PLACE = {"length": 8, "budget": 4, "when": "block", "question": "unknown", "evaluation": "needle"}


def lines_of(**by_policy):
    """The lines of a study of two models, with the facts' scores of each."""
    return [
        {"model": model, "policy": policy, **PLACE, "scores": {"needle": scores}, "peak_cache_bytes": peak * 2**20,
         "cache_bytes": 2**20, "increase": 0.25 * (1 + number)}
        for policy, (of_models, peak) in by_policy.items()
        for number, (model, scores) in enumerate(zip("mn", of_models, strict=False))
    ]  # fmt: skip


def test_a_study_is_judged_by_its_texts_and_drawn_where_all_of_its_models_ran():
    read = studies.find("fixed-memory")
    claimed = claims.Claim("ours", "", "tova", "h2o")
    read = read._replace(forms={"base": ["m", "n"]}, claims=[claimed])
    both = dict(tova=(("1" * 20, "1" * 10 + "0" * 10), 3), h2o=(("0" * 20, "0" * 20), 2))
    ((form, judged),) = study.judge(read, lines_of(**both))
    assert (form, judged.samples, judged.scores) == ("base", 4, (0.75, 0.0))  # of five facts in each text
    panel = study_panels.Panel("base", "unknown")
    found = study_panels.cells(read, lines_of(**both, alone=(("1" * 20,), 9)), panel)
    assert set(found) == {("tova", 4), ("h2o", 4)}
    cell = found["tova", 4]
    assert (cell.peak, cell.size, cell.increase) == (3, 1, 0.375)
    assert cell.scores.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_cells_are_compared_on_the_samples_that_both_have():
    cell = study_panels.Cell(["a", "b", "c"], np.array([[1.0, 0.5, 0.0]]), 1, 1)
    assert cell.less(study_panels.Cell(["c", "b"], np.array([[1.0, 0.25]]), 1, 1)).tolist() == [[0.25, -1.0]]


def test_a_picture_has_forms_of_one_model_and_what_most_drawn_policies_ran_in(tmp_path):
    read = studies.find("ruler-block")
    settings = {
        "question": "unknown",
        "when": "block",
        "evaluation": "ruler",
        "peak_cache_bytes": 2**20,
        "cache_bytes": 2**20,
    }
    lines = [
        {"model": "smollm2-documents", "policy": policy, "budget": None if policy == "full" else 0.25, "length": length,
         "scores": {"vt": "1101"}} | settings
        for policy in read.drawn
        for length in (1024, 2048)
        if policy == "full" or length == 1024
    ]  # fmt: skip
    assert study_panels.shown(read, lines) == [study_panels.Panel("adapted", "unknown", 1024)]
    two = read._replace(forms={"adapted": ["smollm2-documents"], "both": ["smollm2-documents"] * 2})
    assert {panel.form for panel in study_panels.shown(two, lines)} == {"adapted"}
    one, several = tmp_path / "one.png", tmp_path / "several.png"
    study_panels.picture(read, lines, one)
    wider = [line | {"budget": 0.5, "peak_cache_bytes": 2**21} for line in lines if line["policy"] != "full"]
    study_panels.picture(read, [*lines, *wider], several)
    assert min(path.stat().st_size for path in (one, several)) > 10_000
