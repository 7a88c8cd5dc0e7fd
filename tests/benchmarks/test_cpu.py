"""The short benchmark compares two runs by their rows; its parts are tested where they are made."""

import json

import pytest

from benchmarks import cpu, measure
from benchmarks.__main__ import main

ROWS = [
    {"name": "decode", "kind": "decode", "shape": "tiny", "batch": 1, "budget": 16, "prompt": 64, "policy": "none"}
    | {"milliseconds": 2.0, "low": 2.0, "high": 2.0, "floor_milliseconds": 1.0}
    | {"compiled_bytes": 30, "weight_bytes": 10, "cache_bytes": 10},
]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(measure, "device", lambda **_: measure.Device(1e9, 1e9))
    monkeypatch.setattr(cpu, "measured", lambda timing, *, tiny, on_rows: (on_rows(ROWS), ROWS)[1])


def test_a_run_against_an_older_one_prints_each_row_s_ratio(quick, tmp_path, capsys):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    before = [{**ROWS[0], "milliseconds": 4.0}, {"name": "gone", "milliseconds": 1.0}]
    old.write_text(json.dumps({"benchmark": "cpu", "results": before}))
    assert main(["cpu", "--tiny", "--json", str(new), "--against", str(old)]) == 0
    printed = capsys.readouterr().out
    assert "0.500" in printed and "gone" in printed and "geometric mean of 1" in printed
    assert json.loads(new.read_text())["results"] == ROWS


@pytest.mark.parametrize("text", ["", "[]", '{"benchmark": "rounds", "results": []}', '{"benchmark": "cpu"}'])
def test_a_file_that_holds_no_such_results_is_refused(text, quick, tmp_path, capsys):
    (tmp_path / "old.json").write_text(text)
    assert main(["cpu", "--against", str(tmp_path / "old.json")]) == 2
    assert "holds no results of `python -m benchmarks cpu" in capsys.readouterr().err


def test_a_missing_file_is_refused(quick, capsys):
    assert main(["cpu", "--against", "nowhere.json"]) == 2
    assert "nowhere.json" in capsys.readouterr().err
