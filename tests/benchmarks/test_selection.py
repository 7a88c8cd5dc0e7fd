"""Steps with a selection are timed beside dense ones."""

import json

from benchmarks.__main__ import main
from tests.tiers import matrix


@matrix
def test_the_command_writes_what_it_prints(tmp_path, capsys):
    out = tmp_path / "selection.json"
    arguments = ["--model", "retriever", "--contexts", "64", "--shares", "0.5", "--repetitions", "2"]
    assert main(["selection", *arguments, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["results"]
    assert [row["step"] for row in rows] == ["dense", "predictor", "separate", "max"]
    assert rows[0]["ratio"] == 1.0 and all(row["milliseconds"] > 0 for row in rows)
    assert rows[3]["bytes_ratio"] < rows[2]["bytes_ratio"]
    assert "one set per group, max" in capsys.readouterr().out


def test_a_share_above_one_is_refused(capsys):
    assert main(["selection", "--model", "retriever", "--shares", "2"]) == 2
    assert "give shares of the tokens" in capsys.readouterr().err
