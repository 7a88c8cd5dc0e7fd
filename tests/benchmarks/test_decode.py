"""The decode and prefill benchmarks run what they name and split a step as they say."""

import json

import pytest

from benchmarks import decode, measure, prefill, steps
from benchmarks.__main__ import main
from tests.tiers import matrix

TIMING = measure.Timing(calls=2, repetitions=1, free=2**30, limits=measure.Device(1e9, 1e9))


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


@matrix
def test_what_does_not_fit_is_a_row_and_the_rest_runs(monkeypatch):
    needed = []
    real = steps.program

    def program(kind, setting, prompt, calls, *, free):
        if setting.budget is None:
            raise measure.DoesNotFit("a full cache needs 9 GiB")
        needed.append(real(kind, setting, prompt, calls, free=free))
        return needed[-1]

    monkeypatch.setattr(steps, "program", program)
    rows = decode.sweep("decode", ["tiny"], [1], [16], [64], "streaming", TIMING, block=8, full=[64])
    assert rows[-1]["refused"] == "a full cache needs 9 GiB" and rows[0]["milliseconds"] > 0
    assert "refused: a full cache needs 9 GiB" in decode.table(rows)


@matrix
def test_prefill_rows_of_fed_prompts_say_what_they_fed():
    rows = prefill.feed_all(["tiny"], [1], [16], [24, 48], "h2o+caote", 2**30, block=8, full=[24])
    assert [(r["budget"], r["prompt"], r["policy"]) for r in rows] == [
        (16, 24, "h2o+caote"),
        (16, 48, "h2o+caote"),
        (None, 24, "none"),
    ]
    assert rows[1]["compilations"] == 0 and all(r["step_milliseconds"] > 0 for r in rows)
    whole, ours = rows[2]["milliseconds"], rows[0]["milliseconds"]
    assert f"{whole / ours:.2f}" in prefill.feed_table(rows)
