"""Steps that read what a predictor foresees."""

import json

from papers.__main__ import main


def test_steps_with_a_selection_are_timed_beside_dense_ones(tmp_path, capsys):
    path = tmp_path / "out.json"
    line = f"selection --model retriever --contexts 64 --shares 0.5 --repetitions 2 --json {path}"
    assert main(line.split()) == 0
    rows = json.loads(path.read_text())["results"]
    assert [row["step"] for row in rows] == ["dense", "predictor", "separate", "max"]
    assert rows[0]["ratio"] == 1.0 and all(row["milliseconds"] > 0 for row in rows)
    assert rows[3]["bytes_ratio"] < rows[2]["bytes_ratio"] and "one set per group, max" in capsys.readouterr().out
