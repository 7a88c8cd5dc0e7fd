"""The pages of studies, which docs/tables.py writes."""

import pytest

from docs import study_pages, tables
from evals import studies, study, study_panels


def test_a_page_shows_what_each_policy_scores_holds_and_claims(tmp_path):
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
    page = study_pages.page(read, {"results": rows, **made}, study.judge(read, rows))
    lines = [line for line in page.splitlines() if line.startswith("| ") and "---" not in line]
    assert lines[0] == "| policy | 50% |"
    assert lines[1].startswith("| `tova` | **0.88** [") and lines[1].endswith("], 4 MiB |")
    assert lines[2].startswith("| `recency` | 0.06 [") and lines[2].endswith("], 3 MiB |")
    assert lines[3] == "| the full cache | 1.00 [0.59, 1.00], 8 MiB |"
    told = "| TOVA | TOVA is better than recency |  | 8 | unknown, after every block: **holds**, +0.81 ["
    assert lines[-1].startswith(told) and lines[-1].endswith("] (0.88, 0.06; 0.06, 1.00) |")
    assert "![Scores against the bytes of a prompt's cache](small.png)" in page and "on 2 cores, commit c;" in page
    made["environments"] = [{"device": "NVIDIA H100", "commit": "d"}, {"device": "cpu", "cores": 8, "commit": "e"}]
    page = study_pages.page(read, {"results": rows, **made}, study.judge(read, rows))
    assert "on NVIDIA H100, commit d; 8 cores, commit e;" in page
    grown = [row | ({"increase": 0.025} if row["policy"] == "tova" else {}) for row in rows]
    (panel,) = study_panels.panels(read, grown)
    assert "], 4 MiB, perplexity +2.5% |" in study_pages.table(read, grown, panel)


def test_marks_are_of_the_study_with_the_most_samples_that_decides_a_claim(tmp_path):
    def made(name, **counts):
        file = tmp_path / f"{name}.toml"
        file.write_text(
            'title = "T"\nforms = {base = ["m"]}\npolicies = ["full", "tova", "recency"]\nbudgets = [0.5]\n'
            'question = ["unknown"]\n[tasks.needle]\n[[claims]]\npaper = "TOVA"\nsays = "more"\npolicies = ["tova"]\n'
            'over = ["recency"]\neach = ["budget"]\n'
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
    with pytest.raises(ValueError, match="no study judges tova wins"):
        study_pages.claim_marks([few], ["tova wins"])


def test_the_page_of_claims_is_one_screen():
    text = (tables.RESULTS / "CLAIMS.md").read_text()
    cells = [cell for line in text.splitlines() if line.startswith("|") for cell in line.strip("|").split("|")]
    assert len(text.splitlines()) <= 40 and len(text.split()) <= 1200
    assert max(len(cell.split()) for cell in cells) <= 12
