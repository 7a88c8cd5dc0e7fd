"""The predictor's figures: definitions by hand, and what the commands write and refuse."""

import numpy as np
import pytest

from papers.predictor import figures


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
