"""Experiments on a device, as the report tells them."""

import json

from benchmarks import measure, report


def test_each_experiment_says_what_was_predicted_and_what_follows():
    path = measure.RESULTS / "h200_experiments.json"
    (document,) = report.parts_of({"file": path.name, **json.loads(path.read_text())})
    text = report.section(document)
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    assert len(lines) == len(document["results"]) and all(len(cells) == 4 and all(cells) for cells in lines)
    assert "On NVIDIA H200, jax 0.11.2" in text and "python -m" not in text
