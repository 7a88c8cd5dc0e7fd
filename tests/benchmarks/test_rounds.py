"""The rounds benchmark runs what it names."""

import json

import kvjax
from benchmarks.__main__ import main
from tests.tiers import matrix


@matrix
def test_the_command_times_every_link(tmp_path):
    out = tmp_path / "rounds.json"
    links = "caote,caote(rounds=2),caote(target='output')"
    arguments = ["--links", links, "--budget", "24", "--block", "8", "--repetitions", "2", "--json", str(out)]
    assert main(["rounds", *arguments]) == 0
    data = json.loads(out.read_text())
    assert data["command"].startswith("python -m benchmarks rounds --links 'caote,caote(rounds=2)")
    assert data["versions"]["kvjax"] == kvjax.__version__ and {"commit", "seconds", "cores"} <= set(data)
    results = data["results"]
    assert [r["link"] for r in results] == ["caote", "caote(rounds=2)", "caote(target='output')"]
    assert all(r["milliseconds"] >= r["lowest"] > 0 for r in results) and results[0]["ratio"] == 1


def test_no_repetition_is_refused(capsys):
    assert main(["rounds", "--repetitions", "0"]) == 2
    assert "--repetitions is 0" in capsys.readouterr().err
