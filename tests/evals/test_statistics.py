"""Intervals against textbook values, and comparisons of paired outcomes."""

import itertools
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
    assert statistics.chance([0] * 20) == 1
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


def test_equal_samples_show_no_equivalence_before_one_in_twenty_would_have_differed():
    """Where 5% of the outcomes are -1, the mean is the margin, and n samples are all equal in 0.95^n of runs."""
    for count in (5, 10, 30, 58, 59, 60):
        exact = 0.95**count
        assert statistics.chance_beyond([0.0] * count, 0.05, both=False) == pytest.approx(exact, abs=0.01)
        assert statistics.chance_beyond([[0.0] * count] * 3, 0.05) == pytest.approx(exact, abs=0.01)
    assert statistics.chance_beyond([0.0] * 30, 0.05) > 0.05 > statistics.chance_beyond([0.0] * 90, 0.05)


def test_losses_and_wins_beyond_a_margin_have_cloppers_and_pearsons_chance():
    losses, count = 3, 40
    values = [-1.0] * losses + [0.0] * (count - losses)
    at_most = lambda share: sum(math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(losses + 1))  # noqa: E731
    assert statistics.chance_beyond(values, 0.2, both=False) == pytest.approx(at_most(0.2), abs=0.01)
    assert statistics.chance_beyond([-x for x in values], 0.2) == pytest.approx(at_most(0.2), abs=0.01)
    # Without losses: the worst sample outweighs the margin, and each win.
    wins = [-x for x in values]
    assert statistics.chance_beyond(wins, 0.05, both=False) == pytest.approx(0.95**count / 2**losses, abs=0.005)


@pytest.mark.parametrize("count", [5, 10, 30, 60])
@pytest.mark.parametrize(
    "shares", [{-1: 0.05, 0: 0.95}, {-0.5: 0.1, 0: 0.9}, {-1: 0.1, 0.5: 0.1, 0: 0.8}, {-1: 0.1, 0: 0.85, 1: 0.05}]
)
def test_at_the_margin_an_equivalence_is_claimed_in_at_most_5_percent_of_runs(count, shares):
    assert sum(outcome * share for outcome, share in shares.items()) == pytest.approx(-0.05)
    often = 0.0
    for counts in itertools.product(range(count + 1), repeat=len(shares) - 1):
        drawn = dict(zip(shares, (*counts, count - sum(counts)), strict=True))
        mean = sum(outcome * drawn[outcome] for outcome in drawn) / count
        if min(drawn.values()) < 0 or mean < 0 or (count > 30 and len(shares) > 2):
            continue  # claimed with a mean of 0 and more only; of three outcomes, 60 are too many to count
        if statistics.chance_beyond(np.repeat(list(drawn), list(drawn.values())), 0.05, both=False) < 0.05:
            ways = math.factorial(count) / math.prod(math.factorial(n) for n in drawn.values())
            often += ways * math.prod(shares[outcome] ** n for outcome, n in drawn.items())
    assert often <= 0.05


def test_with_several_models_the_chance_and_the_interval_follow_the_same_resamples():
    rng = np.random.default_rng(0)
    for shift in np.linspace(0, 0.6, 13):
        values = rng.normal(shift, 0.3, (3, 1)) + rng.normal(0, 0.4, 30)
        _, low, high = statistics.paired_interval(values)
        assert (statistics.verdict(low, high) != "within noise") == (statistics.chance(values) <= 0.05)
    apart = np.repeat([[-0.1], [0.1], [0.6]], 40, axis=1)
    assert statistics.chance(apart) > 0.05, "two models of three say so, and 40 samples of each do not make it three"
