"""Benchmarks whose commands do all their work: each writes what it prints, and says what its ways have in common."""

import json

import pytest

import models
from benchmarks import cpu, measure, memory, questions
from benchmarks.__main__ import main
from tests.tiers import matrix


@pytest.fixture
def rows_of(tmp_path):
    """Runs a command, and returns the rows that it wrote."""

    def run(line):
        path = tmp_path / "out.json"
        assert main([*line.split(), "--json", str(path)]) == 0
        return json.loads(path.read_text())["results"]

    return run


def test_the_facts_of_a_document_are_asked_for():
    _, tokenizer = models.load("retriever")
    document, asked, values = questions.quiz(tokenizer, 300, 4, seed=0)
    assert len(asked) == len(values) == 4 and len(document) < 300
    text = tokenizer.decode(document)
    for question, value in zip(asked, values, strict=True):
        assert value in text
        assert tokenizer.decode(question).strip().startswith("Question: what is the ")


@matrix
def test_uniform_slots_are_the_counted_bytes_and_pages_come_close():
    uniform = memory.compiled_bytes("tova", 1_024, 0.25, 64, 16)
    assert uniform["ratio"] == pytest.approx(1, abs=1e-3)
    assert uniform["slots"] == 16 * 8 * 256
    pages = memory.compiled_bytes("tova(heads='group')@model", 1_024, 0.25, 64, 16)
    assert uniform["ratio"] < pages["ratio"] < 1.1
    assert pages["decode_cache_bytes"] == pytest.approx(pages["array_bytes"], rel=1e-3)


def test_memory_is_that_of_the_slots_of_a_share(rows_of, capsys):
    (row,) = rows_of("memory --policies streaming --shares 0.5 --prompt 256 --block 32")
    assert row["budget"] == 128 and f"{row['slots']:,}" in capsys.readouterr().out
    assert row["ratio"] == pytest.approx(1, abs=1e-3)  # what is counted by hand is what the arrays take


def test_a_run_against_an_older_one_prints_each_row_s_ratio(rows_of, tmp_path, monkeypatch, capsys):
    row = {"name": "decode", "kind": "decode", "shape": "tiny", "batch": 1, "budget": 16, "prompt": 64}
    row |= {"policy": "none", "milliseconds": 2.0, "low": 2.0, "high": 2.0, "floor_milliseconds": 1.0}
    row |= {"compiled_bytes": 30, "weight_bytes": 10, "cache_bytes": 10}
    monkeypatch.setattr(measure, "device", lambda **_: measure.Device(1e9, 1e9))
    monkeypatch.setattr(cpu, "measurements", lambda timing, *, tiny, on_records: (on_records([row]), [row])[1])
    before = [{**row, "milliseconds": 4.0}, {"name": "gone", "milliseconds": 1.0}]
    (tmp_path / "old.json").write_text(json.dumps({"benchmark": "cpu", "results": before}))
    assert rows_of(f"cpu --tiny --against {tmp_path / 'old.json'}") == [row]
    printed = capsys.readouterr().out
    assert "0.500" in printed and "gone" in printed and "geometric mean of 1" in printed
