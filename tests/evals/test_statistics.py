"""Intervals against textbook values, and comparisons of paired outcomes."""

import pytest

from evals import statistics


@pytest.mark.parametrize(
    ("successes", "trials", "expected"),
    [(0, 10, (0.0, 0.2775)), (5, 10, (0.2366, 0.7634)), (81, 263, (0.2553, 0.3662)), (10, 10, (0.7225, 1.0))],
)
def test_wilsons_interval_has_the_textbook_values(successes, trials, expected):
    assert statistics.wilson(successes, trials) == pytest.approx(expected, abs=5e-4)


def test_an_interval_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1 trial"):
        statistics.wilson(0, 0)


def test_a_difference_is_that_of_the_same_samples():
    first, second = [True, False, False, True] * 25, [True, True, False, True] * 25
    mean, low, high = statistics.paired_difference(first, second)
    assert mean == 0.25
    assert 0 < low < mean < high


def test_equal_outcomes_are_within_noise():
    _, low, high = statistics.paired_difference([True] * 20, [True] * 20)
    assert low < 0 < high
    assert statistics.verdict(low, high) == "within noise"


def test_a_worse_policy_is_called_so():
    _, low, high = statistics.paired_difference([True] * 40, [False] * 40)
    assert statistics.verdict(low, high) == "no"


def test_outcomes_of_different_samples_are_refused():
    with pytest.raises(ValueError, match="1 and 2 outcomes cannot be paired"):
        statistics.paired_difference([True], [True, False])
