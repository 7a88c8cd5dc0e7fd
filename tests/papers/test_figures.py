"""The predictor's figures: agreement by hand, choices under selections, steps that read what it foresees."""

import json

import numpy as np
import pytest

from evals import loglikelihood, selections, simulator
from papers.__main__ import main
from papers.choices import tasks as choices
from papers.predictor import figures, zero_shot


def test_agreement_by_hand():
    one = np.array([4.0, 3.0, 2.0, 1.0])
    # Two layers of two heads over one sequence: the same wishes, twice as strong, the opposite, and half of each.
    logits = np.array([[[one, 2 * one]], [[-one, np.array([4.0, 1.0, 3.0, 2.0])]]])
    found = figures.agreement(logits)
    last = np.corrcoef(one, [4.0, 1.0, 3.0, 2.0])[0, 1]
    wanted = [[1, 1, -1, last], [1, 1, -1, last], [-1, -1, 1, -last], [last, last, -last, 1]]
    np.testing.assert_allclose(found["correlation"], wanted, atol=1e-12)
    np.testing.assert_allclose(found["overlap"], [[1, 1, 0, 0.5], [1, 1, 0, 0.5], [0, 0, 1, 0.5], [0.5, 0.5, 0.5, 1]])
    assert found["consensus"] == pytest.approx((1 - 1 + last - 1 + last - last) / 6)
    assert found["common"] == pytest.approx((1 + 0 + 0.5 + 0 + 0.5 + 0.5) / 6)
    assert found["consensus_interval"] is None
    first, second = found["layers"]
    assert (first["consensus_within"], second["consensus_within"]) == (pytest.approx(1), pytest.approx(-last))
    assert (first["common_next"], second["common_next"]) == (pytest.approx(0.25), None)


def test_agreement_breaks_ties_towards_the_more_recent_and_bears_flat_heads():
    found = figures.agreement(np.array([[[[0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]]]]))
    assert found["overlap"] == [[1, 1], [1, 1]]
    assert found["consensus"] == 0


def test_accuracy_is_written(tiny_folder, text_file, run_eval):
    flags = ["--model", str(tiny_folder), "--text", str(text_file), "--chunk", "24", "--sequences", "4"]
    data, printed = run_eval("predictor", "accuracy", *flags, "--select", "butler,random")
    assert (data["evaluation"], data["sequences"]) == ("predictor accuracy", 4)
    assert [r["select"] for r in data["results"]] == ["butler", "random"]
    assert all(f"{r['hit_rate']:.3f}" in printed for r in data["results"])


TEXT = " ".join(f"A boat that had a crew of {i} men went by the old town of {i}." for i in range(9, 200))


@pytest.fixture(scope="module")
def samples(retriever):
    samples, missing = zero_shot.draw(choices.read_corpus(TEXT), retriever[1], 256, 2)
    assert list(missing) == ["section", "recall"]
    return samples


def test_only_tasks_that_the_text_has_are_drawn(samples):
    assert list(samples) == ["continuation"]
    assert all(len(sample.tokens) + max(map(len, sample.choices)) <= 256 for sample in samples["continuation"])


def test_a_choice_is_judged_by_its_own_tokens(tiny, samples):
    model = tiny[0]
    streaming = selections.parse_selection("streaming")
    rows = zero_shot.measure(model, samples, [streaming], [0.5])
    halved = simulator.Simulation(streaming, 0.5)
    expected = []
    for sample in samples["continuation"]:
        each = loglikelihood.simulate(model, [[*sample.tokens, *end] for end in sample.choices], halved)
        sums = [
            row.log_probability[-len(end) :].sum() / size
            for row, end, size in zip(each, sample.choices, sample.sizes, strict=True)
        ]
        expected.append(int(np.argmax(sums) == sample.right))
    assert [row["correct"] for row in rows] == [expected, expected]
    assert [row["task"] for row in rows] == ["continuation", "all"]


def test_the_predictor_is_compared_on_the_same_samples():
    def row(select, sparsity, correct, task="all"):
        return {"task": task, "select": select, "sparsity": sparsity, "correct": correct}

    found = zero_shot.compare(
        [row("full", None, [1, 1]), row("butler", 0.5, [1, 0]), row("h2o", 0.5, [0, 0]), row("h2o", 0.7, [1, 1]),
         row("h2o", 0.5, [1, 1], "recall")]
    )  # fmt: skip
    assert [(line["against"], line["difference"]) for line in found] == [("full", -0.5), ("h2o", 0.5)]


def test_steps_with_a_selection_are_timed_beside_dense_ones(tmp_path, capsys):
    path = tmp_path / "out.json"
    line = f"selection --model retriever --contexts 64 --shares 0.5 --repetitions 2 --json {path}"
    assert main(line.split()) == 0
    rows = json.loads(path.read_text())["results"]
    assert [row["step"] for row in rows] == ["dense", "predictor", "separate", "max"]
    assert rows[0]["ratio"] == 1.0 and all(row["milliseconds"] > 0 for row in rows)
    assert rows[3]["bytes_ratio"] < rows[2]["bytes_ratio"] and "one set per group, max" in capsys.readouterr().out
