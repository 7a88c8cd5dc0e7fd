"""Questions on a kept document are answered as from scratch, and counted."""

import json

import models
from benchmarks import questions
from benchmarks.__main__ import main
from tests.tiers import matrix


def test_the_facts_of_a_document_are_asked_for():
    _, tokenizer = models.load("retriever")
    document, asked, values = questions.asked(tokenizer, 300, 4, seed=0)
    assert len(asked) == len(values) == 4 and len(document) < 300
    text = tokenizer.decode(document)
    for question, value in zip(asked, values, strict=True):
        assert value in text
        assert tokenizer.decode(question).strip().startswith("Question: what is the ")


@matrix
def test_the_command_writes_what_it_prints(tmp_path, capsys):
    out = tmp_path / "questions.json"
    arguments = ["--model", "retriever", "--length", "200", "--questions", "2", "--policy", "keydiff", "--budget", "64"]
    assert main(["questions", *arguments, "--repetitions", "1", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["results"]
    assert [row["way"] for row in rows] == ["scratch", "kept", "at once"] * 2
    assert all(row["same_as_scratch"] for row in rows)
    assert rows[0]["right"] == 2, "the full cache answers so short a document"
    assert rows[3]["kept_bytes"] < rows[0]["kept_bytes"]
    assert "as scratch" in capsys.readouterr().out
