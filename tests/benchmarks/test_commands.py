"""Benchmarks whose commands do all their work: each runs what it names and writes what it prints."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import models
from benchmarks import cpu, fixed_memory, measure, memory, prefill, questions, soak
from benchmarks.__main__ import main
from benchmarks.decode import Grid
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
    monkeypatch.setattr(cpu, "measurements", lambda timing, *, tiny: [row])
    before = [{**row, "milliseconds": 4.0}, {"name": "gone", "milliseconds": 1.0}]
    (tmp_path / "old.json").write_text(json.dumps({"benchmark": "cpu", "results": before}))
    assert rows_of(f"cpu --tiny --against {tmp_path / 'old.json'}") == [row]
    printed = capsys.readouterr().out
    assert "0.500" in printed and "gone" in printed and "geometric mean of 1" in printed


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
    rows = [*prefill.feed_all(Grid(["tiny"], [1], [16], [24, 48], "h2o+caote", block=8, full=[24]), 2**30)]
    assert [(r["budget"], r["prompt"], r["policy"]) for r in rows] == [
        (16, 24, "h2o+caote"),
        (16, 48, "h2o+caote"),
        (None, 24, "none"),
    ]
    assert rows[1]["compilations"] == 0 and all(r["step_milliseconds"] > 0 for r in rows)
    whole, ours = rows[2]["milliseconds"], rows[0]["milliseconds"]
    assert f"{whole / ours:.2f}" in prefill.feed_table(rows)


# Of one layer, and of fewer positions than the longest prompts.
CONFIG = models.Config(64, 32, 64, num_layers=1, num_heads=2, num_kv_heads=1, max_positions=256)


def test_under_a_budget_the_peak_is_the_same_for_all_prompts(model):
    prompts, like = [(1, 64), (1, 128), (1, 512)], models.Options(budget=16, block=8)
    found = [*fixed_memory.measurements(model, ["full", "recency"], ["block"], prompts, 64, like)]
    peaks = {name: [r.get("peak_bytes") for r in found if r["policy"] == name] for name in ("full", "recency")}
    assert peaks["full"][0] < peaks["full"][1] and peaks["full"][2] is None  # longer than the model's positions
    assert len(set(peaks["recency"])) == 1
    assert [r["seconds"] is not None for r in found] == [True] * 2 + [False] * 4
    lines = fixed_memory.table(found).splitlines()
    assert lines[2].split()[:2] == ["full", "1"] and "the model has 256" in lines[-1]


def test_a_line_has_the_rate_of_all_rows_and_is_compared_with_the_full_cache_of_the_same_prompt():
    full = {"policy": "full", "when": "block", "rows": 4, "prompt": 1000, "seconds": 8.0}
    full |= {"peak_bytes": 3 * 2**20, "cache_bytes": 2**21}
    ours = full | {"policy": "h2o", "when": "prompt", "seconds": 2.0}
    lines = fixed_memory.table([full, full | {"rows": 1, "seconds": 100.0}, ours]).splitlines()[2:]
    assert lines[0].split() == ["full", "4", "1,000", "3.0", "2.0", "500", "1.00"]
    assert lines[2].split() == ["h2o", "once", "4", "1,000", "3.0", "2.0", "2,000", "4.00"]


def test_a_run_is_flat_if_its_last_quarter_is_as_its_second():
    records = [{"ms": number} for number in (9, 9, 2, 4, 9, 9, 3, 6)]  # in the first quarter it warms up
    assert soak._flatness(records, "ms") == pytest.approx(0.5)


def test_answers_of_a_killed_command_are_counted_by_what_became_of_them():
    line = lambda number, answer="yes": json.dumps({"line": number, "answer": answer})  # noqa: E731
    expected = [line(number) for number in range(4)]
    assert soak._fates(expected, expected) == dict(answers=4, lost=0, twice=0, wrong=0)
    found = [line(0), line(0), line(1, "no"), line(3)]
    assert soak._fates(found, expected) == dict(answers=4, lost=1, twice=1, wrong=1)
    assert soak._until_end([5, 2, 7, 2], [2]) == [5, 2] and soak._until_end([5, 7], [2]) == [5, 7]


def test_a_prompt_longer_than_the_positions_is_fed_whole_and_compiles_in_its_first_part(model):
    rows = soak.prompt_parts(model, 40 * 8, "streaming", 16, 8)
    assert [row["done"] for row in rows] == [16 * (part + 1) for part in range(soak.PARTS)]
    assert sum(row["compilations"] for row in rows[1:]) == 0
    (_, said) = soak.tables(rows)["One prompt through one cache"]
    assert "Programs compiled after the first quarter: 0." in said


@matrix
def test_answers_among_others_are_those_alone_and_cancelled_ones_their_beginning(model, monkeypatch):
    for name, value in dict(POOL=3, LONGEST=12, MOST=4, CANCELLED=0.2).items():
        monkeypatch.setattr(soak, name, value)
    rows = soak.request_figures(model, 40, 2, "streaming", 8, 4)
    last = rows[-1]
    assert (last["wrong"], last["lost"], last["idle"]) == (0, 0, True)
    assert last["ended"] + last["cancelled"] == 40
    assert min(last["ended"], last["cancelled"]) > 0
    assert len(rows) == soak.PARTS


@matrix
def test_an_answer_that_differs_is_counted(model, monkeypatch):
    for name, value in dict(POOL=1, LONGEST=4, MOST=2).items():
        monkeypatch.setattr(soak, name, value)
    other = jnp.full((1, 2), CONFIG.vocab_size)  # a token that no answer has
    monkeypatch.setattr(models, "generate", lambda *_, **__: models.Generation(other, None, np.array([2])))
    last = soak.request_figures(model, 20, 2, "streaming", 8, 4)[-1]
    assert last["wrong"] >= last["ended"] > 0
