"""Choices under selections: what is drawn, judged and compared, and what the command writes and refuses."""

import numpy as np
import pytest

from evals import loglikelihood, selections, simulator
from papers.choices import tasks as choices
from papers.predictor import zero_shot

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
