"""Booksum from a folder: rows of a CSV with whole chapters in them, the prompt, the score, the command end to end."""

import csv
import dataclasses
import json

import pytest

import models
from evals import booksum, documents
from evals.__main__ import main
from evals.evaluator import Answer
from evals.results import read_records
from tests.tiers import matrix

ROWS = [
    {
        "bid": "1",
        "chapter": 'The fox ran.\n\n"Stop," said the owl, twice. ' * 9,
        "summary_text": "A fox ran.\nAn owl spoke.",
    },
    {"bid": "1", "chapter": "The river was calm. " * 12, "summary_text": "Nothing happens."},
]


def write(folder, rows=ROWS):
    folder.mkdir(exist_ok=True)
    with (folder / "test.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["bid", "chapter", "summary_text"])
        writer.writeheader()
        writer.writerows(rows)
    return folder


def test_rows_are_read_as_they_were_written(tmp_path):
    rows = [*ROWS, {**ROWS[0], "chapter": "A whole book. " * 20_000}]  # the csv module's own limit is 131,072
    assert list(documents.read_records(str(write(tmp_path, rows)), "test.csv", iter)) == rows


def test_a_chapter_and_a_summary_become_a_prompt_and_a_reference():
    _, tokenizer = models.load("retriever")
    task = booksum.TASKS["booksum"]
    sample = documents.make_sample(task, ROWS[0], tokenizer, 4000)
    assert ROWS[0]["chapter"] in tokenizer.decode(sample.tokens[: sample.context_end])
    assert tokenizer.decode(sample.tokens[sample.context_end :]).endswith("Summary:")
    assert sample.references == ("A fox ran.\nAn owl spoke.",)
    # Of 3 and 6 words "a", "fox" and "ran" are in common, in order.
    assert documents.score(task, Answer([], "A fox ran"), sample) == pytest.approx(2 * 3 / (3 + 6))


@matrix
def test_the_command_answers_from_a_folder(tmp_path, capsys, monkeypatch):
    short = dataclasses.replace(booksum.TASKS["booksum"], new_tokens=8)
    monkeypatch.setattr(booksum, "TASKS", {"booksum": short})
    data = write(tmp_path / "data")
    (tmp_path / "prompts.json").write_text(json.dumps({"booksum": "Sum up: {context}"}))
    line = f"booksum --data {data} --policies full,tova --budgets 64 --block 64 --length 160 --batch 2"
    assert main([*line.split(), "--prompts", str(tmp_path / "prompts.json"), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "booksum" in out and "ROUGE-L by rouge-score" in out
    records = read_records(tmp_path / "out")
    assert len(records) == 2 * 3 and all(0 <= record["score"] <= 1 for record in records)
    assert max(record["prompt_tokens"] for record in records) <= 160
