"""A study that shares its prompts says what the same study says without."""

import json

from benchmarks.__main__ import main
from tests.tiers import matrix


@matrix
def test_the_command_writes_what_it_prints(tmp_path, capsys):
    out = tmp_path / "sharing.json"
    arguments = ["--model", "retriever", "--length", "400", "--samples", "1", "--policies", "tova,h2o@adakv"]
    assert main(["sharing", *arguments, "--budgets", "48", "--json", str(out)]) == 0
    alone, shared = json.loads(out.read_text())["results"]
    assert (alone["prompts"], shared["prompts"], shared["settings"]) == (2, 1, 2)
    assert shared["same_answers"]
    assert "through the model" in capsys.readouterr().out
