"""Intervals against textbook values, and comparisons of paired outcomes."""

import math

import numpy as np
import pytest

from evals import statistics


@pytest.mark.parametrize(
    ("successes", "trials", "expected"),
    [(0, 10, (0.0, 0.2775)), (5, 10, (0.2366, 0.7634)), (81, 263, (0.2553, 0.3662)), (10, 10, (0.7225, 1.0))],
)
def test_wilsons_interval_has_the_textbook_values(successes, trials, expected):
    assert statistics.wilson(successes, trials) == pytest.approx(expected, abs=5e-4)


def test_equal_outcomes_are_within_noise_and_a_worse_policy_is_called_so():
    found = statistics.comparison([0] * 20)
    assert found["low"] < 0 < found["high"] and found["better"] == "within noise"
    assert statistics.comparison([-1] * 40)["better"] == "no"


def test_a_difference_is_told_from_0_just_where_the_exact_sign_test_does():
    for differing in range(1, 13):
        for wins in range(differing + 1):
            chance = sum(math.comb(differing, k) for k in range(max(wins, differing - wins), differing + 1))
            found = statistics.paired_interval([1] * wins + [-1] * (differing - wins) + [0] * 40)
            assert (statistics.verdict(*found[1:]) != "within noise") == (2 * chance / 2**differing <= 0.05)


@pytest.mark.parametrize("values", [[1] * 40, [-1] * 3, [1, -1], [1], [0.9] * 9 + [1.0], [-1.0, -0.5], [0.1] * 3])
def test_an_interval_of_differences_stays_between_minus_1_and_1_and_holds_the_mean(values):
    mean, low, high = statistics.paired_interval(values)
    assert -1 <= low <= mean <= high <= 1


def test_tangos_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    wins, losses, _ = rng.multinomial(80, [0.15, 0.05, 0.8], size=2000).T
    found = {pair: statistics._tango(*pair, 80) for pair in set(zip(wins.tolist(), losses.tolist(), strict=True))}
    held = [found[pair][0] <= 0.1 <= found[pair][1] for pair in zip(wins.tolist(), losses.tolist(), strict=True)]
    assert 0.94 < np.mean(held) < 0.965


def test_contrasts_over_several_settings_have_the_spread_of_their_own_samples():
    rng = np.random.default_rng(0)
    values = rng.choice([-1 / 7, 0, 1 / 7, 2 / 7], size=60)
    mean, low, high = statistics.paired_interval(values.tolist())
    half = 1.96 * values.std() / 60**0.5
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.1 * half)
    assert statistics.paired_interval(values.tolist()) == (mean, low, high), "the same each time"


def test_a_handful_of_samples_proves_nothing_of_a_contrast():
    assert statistics.paired_interval([0.25, 0.5, 0.25, 0.75, 0.5] + [0.0] * 55)[1] == 0
    assert statistics.paired_interval([0.25, 0.5, 0.25, 0.75, 0.5, 0.25] + [0.0] * 54)[1] > 0
