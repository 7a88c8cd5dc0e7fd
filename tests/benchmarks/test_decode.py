"""The decode and prefill benchmarks run what they name and split a step as they say."""

import json

import pytest

from benchmarks import prefill
from benchmarks.__main__ import main
from benchmarks.decode import Grid
from tests.tiers import matrix


@matrix
def test_decode_writes_each_policy_at_each_prompt(tmp_path, capsys):
    out = tmp_path / "decode.json"
    assert main(["decode", "--tiny", "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    rows = written["results"]
    assert [(r["budget"], r["prompt"], r["policy"]) for r in rows] == [
        (16, 64, "h2o+caote"),
        (16, 1_000_000, "h2o+caote"),
        (16, 64, "streaming"),
        (16, 64, "none"),
        (None, 64, "none"),
    ]
    assert len({r["name"] for r in rows}) == len(rows) and written["settings"]["limits"]["copy_bytes"] > 0
    for r in rows:
        assert r["milliseconds"] > 0 and r["compiled_bytes"] > r["weight_bytes"] + r["cache_bytes"]
        assert r["floor_milliseconds"] == pytest.approx(
            1e3 * r["floor_bytes"] / written["settings"]["limits"]["copy_bytes"]
        )
    printed = capsys.readouterr().out
    assert "A decode step, in parts" in printed and "1,000,000" in printed


def test_the_rate_of_whole_prompts_counts_all_rows():
    row = {"shape": "tiny", "batch": 8, "prompt": 50, "policy": "h2o", "step_milliseconds": 1.0, "compilations": 0}
    rows = [row | {"budget": budget, "milliseconds": time} for budget, time in ((16, 200.0), (None, 500.0))]
    ours, full = prefill.feed_table(rows).splitlines()[-2:]
    assert "2,000" in ours and "2.50" in ours and "800" in full  # tokens a second, full / budget


@matrix
def test_prefill_rows_of_fed_prompts_say_what_they_fed():
    rows = prefill.feed_all(Grid(["tiny"], [1], [16], [24, 48], "h2o+caote", block=8, full=[24]), 2**30)
    assert [(r["budget"], r["prompt"], r["policy"]) for r in rows] == [
        (16, 24, "h2o+caote"),
        (16, 48, "h2o+caote"),
        (None, 24, "none"),
    ]
    assert rows[1]["compilations"] == 0 and all(r["step_milliseconds"] > 0 for r in rows)
    whole, ours = rows[2]["milliseconds"], rows[0]["milliseconds"]
    assert f"{whole / ours:.2f}" in prefill.feed_table(rows)
