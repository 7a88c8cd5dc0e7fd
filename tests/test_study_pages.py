"""The parts of studies' pages, and their tables in CSV, which docs/tables.py writes."""

import csv
import io

import pytest

from docs import study_pages, tables
from evals import studies, study


def test_parts_show_what_each_policy_scores_holds_and_claims(tmp_path):
    file = tmp_path / "small.toml"
    file.write_text(
        'title = "Small"\nnote = "Texts."\nforms = {base = ["m"], adapted = ["a", "b"]}\n'
        'policies = ["full", "tova", "recency"]\nbudgets = [0.5]\n[tasks.needle]\nasked = 2\n'
        '[names]\n"tova" = "TOVA"\n[[claims]]\npaper = "TOVA"\npolicies = ["tova"]\n'
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
    judged = study.judge(read, rows)
    lines = study_pages.scores(read, rows).splitlines()
    said = "Answers that are right, with 95% intervals over 8 texts. 50% of the tokens are kept. Question later. "
    assert lines[0] == f"{said}Bold: within noise of the best of 2 policies."
    assert lines[2] == "| policy | 50% | MiB at most |"
    assert lines[4].startswith("| TOVA `tova` | **88%**<br>[") and lines[4].endswith("] | 4 |")
    assert lines[5].startswith("| recency `recency` | 6%<br>[") and lines[5].endswith("] | 3 |")
    assert lines[6] == "| full | 100%<br>[59, 100] | 8 |"
    told = study_pages.claims(read, judged, []).splitlines()
    assert told[2] == "| claim | base, later |"
    assert told[-1].startswith("| TOVA is better than recency | **holds** +81 [")
    made = {"command": "python -m evals study small --out here", "results": rows}
    text = study_pages.made(read, made)
    assert (
        "base: `m`" in text and "[policies](small.csv)" in text and text.endswith("\n\n    python -m evals study small")
    )
    grown = [row | ({"increase": 0.025} if row["policy"] == "tova" else {}) for row in rows]
    table = list(csv.DictReader(io.StringIO(study_pages.scores_csv(read, grown))))
    first = table[0]
    assert (first["policy"], first["right %"], first["texts"], first["MiB at most"]) == ("tova", "87.5", "8", "4.0")
    assert [row["perplexity +%"] for row in table] == ["2.5", "", ""]
    (claim,) = csv.DictReader(io.StringIO(study_pages.claims_csv(read, judged)))
    assert (claim["verdict"], claim["where"], claim["difference"]) == ("holds", "question later, by block", "81.2")
    assert (claim["newest tokens %"], claim["full cache %"], claim["texts"]) == ("6.2", "100.0", "8")


def test_scores_stand_beside_their_allocations_and_the_best_first(tmp_path):
    file = tmp_path / "small.toml"
    file.write_text(
        'title = "Small"\nforms = {base = ["m"]}\npolicies = ["full", "tova", "snapkv", "snapkv@model"]\n'
        "budgets = [0.5]\n[tasks.needle]\nasked = 2\n"
    )
    place = {"model": "m", "evaluation": "needle", "length": 8, "when": "block", "question": "unknown", "samples": 16}
    rows = [
        {"policy": policy, "budget": budget, "peak_cache_bytes": held << 20, "cache_bytes": 0}
        | place
        | {"scores": {"needle": scores * 8}}
        for policy, budget, held, scores in (
            ("full", None, 8, "11"), ("recency", 0.5, 3, "00"), ("tova", 0.5, 4, "10"), ("snapkv", 0.5, 4, "00"),
            ("snapkv@model", 0.5, 5, "11"),
        )
    ]  # fmt: skip
    table = study_pages.allocations(studies.find(str(file)), rows).splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == ["| score", "| ---", "| `snapkv`", "| `tova`"]
    uniform, shared, model, as_they_are = table[4].split(" | ")[1:]
    assert uniform.startswith("0%") and uniform.endswith("4 MiB")
    assert model.startswith("**100%**") and model.endswith("5 MiB") and (shared, as_they_are) == ("", " |")


def test_a_page_says_where_fewer_texts_were_run_and_leaves_undecided_claims_to_the_csv():
    read = studies.find("fixed-memory")
    lines = tables.read("fixed-memory.json")["results"]
    text = study_pages.scores(read, lines)
    (kvgrad,) = (line for line in text.splitlines() if line.startswith("| KVgrad"))
    assert kvgrad.count("<br>20 texts") == 4 and text.count("<br>20 texts") == 16
    assert len([line for line in text.splitlines() if line.startswith("|")]) == 2 + len(read.drawn)
    judged = tables.judgements()["fixed-memory"]
    chosen = "the gate is not worse than the full cache, 25%"
    few, more = (study_pages.claims(read, judged, named) for named in ([], [chosen, "CAOTE improves H2O"]))
    assert chosen not in few and f"| {chosen} | not shown" in more and "CAOTE improves H2O" not in more


@pytest.mark.parametrize("name", tables.STUDIES)
def test_a_study_shows_few_policies_and_its_page_asks_and_answers_first(name):
    read = studies.find(name)
    assert 3 <= len(read.drawn) <= 9 and set(read.drawn) <= set(read.names)
    title, asked, answer = (tables.RESULTS / f"{name}.md").read_text().split("\n\n")[:3]
    assert title.startswith("# ") and asked.startswith("**Asked:** ") and answer.startswith("**Answer:** ")


def test_marks_are_of_the_paper_s_setting_or_of_the_most_samples_that_decide_a_claim(tmp_path):
    def made(name, elsewhere="", **counts):
        file = tmp_path / f"{name}.toml"
        file.write_text(
            'title = "T"\nforms = {base = ["m"]}\npolicies = ["full", "tova", "recency"]\nbudgets = [0.5]\n'
            'question = ["unknown"]\n[tasks.needle]\n[[claims]]\npaper = "TOVA"\nsays = "more"\npolicies = ["tova"]\n'
            f'over = ["recency"]\neach = ["budget"]\nelsewhere = "{elsewhere}"\n'
        )
        place = {"evaluation": "needle", "length": 8, "when": "block", "question": "unknown", "budget": 0.5}
        rows = [
            {"model": "m", "policy": policy, "scores": {"needle": scores}} | place for policy, scores in counts.items()
        ]
        read = studies.find(str(file))
        return read, study.decide(study.judge(read, rows))

    few, many, most = (
        made(name, tova="1" * count, recency=other * count)
        for name, count, other in (("few", 20, "0"), ("many", 40, "1"), ("most", 30, "0"))
    )
    table = study_pages.claim_marks([few, many, most], ["tova is better than recency, 50%"])
    told = "| tova is better than recency, 50% | more |  | [not shown](many.md) |  |  | 40 |"
    assert table.splitlines()[-1] == told
    told = "| tova is better than recency, 50% | more |  | [**holds**](most.md) |  |  | 30 |"
    assert study_pages.claim_marks([few, most], ["tova is better than recency, 50%"]).splitlines()[-1] == told
    other = made("other", "another task", tova="1" * 50, recency="0" * 50)
    assert study_pages.claim_marks([other, most], ["tova is better than recency, 50%"]).splitlines()[-1] == told
    with pytest.raises(ValueError, match="no study judges tova wins"):
        study_pages.claim_marks([few], ["tova wins"])


def test_the_page_of_claims_is_one_screen():
    text = (tables.RESULTS / "CLAIMS.md").read_text()
    cells = [cell for line in text.splitlines() if line.startswith("|") for cell in line.strip("|").split("|")]
    assert len(text.splitlines()) <= 40 and len(text.split()) <= 1200
    assert max(len(cell.split()) for cell in cells) <= 12
