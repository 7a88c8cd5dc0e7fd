"""Intervals against textbook values, and comparisons of paired outcomes."""

import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from evals import claims, statistics


@pytest.mark.parametrize(
    ("successes", "trials", "expected"),
    [(0, 10, (0.0, 0.2775)), (5, 10, (0.2366, 0.7634)), (81, 263, (0.2553, 0.3662)), (10, 10, (0.7225, 1.0))],
)
def test_wilsons_interval_has_the_textbook_values(successes, trials, expected):
    assert statistics.wilson(successes, trials) == pytest.approx(expected, abs=5e-4)


def test_what_is_no_score_is_compared_by_how_much_it_varies_alone():
    rng = np.random.default_rng(0)
    errors = 0.01 + 0.002 * rng.normal(size=20)
    assert statistics.comparison(errors.tolist())["better"] == "within noise"  # one text lost whole would outweigh it
    assert statistics.comparison(errors.tolist(), interval=statistics.mean_interval)["better"] == "yes"


def test_equal_outcomes_are_within_noise_and_a_worse_policy_is_called_so():
    found = statistics.comparison([0] * 20)
    assert found["low"] < 0 < found["high"] and found["better"] == "within noise"
    assert statistics.chance_above([0] * 20, 0) == statistics.chance_above([1], 0) * 0.5 == 0.5
    assert statistics.comparison([-1] * 40)["better"] == "no"


differences = st.lists(st.sampled_from([-1, -0.6, -0.2, -0.1, 0, 0.1, 0.2, 1]), min_size=2, max_size=90)


@given(st.lists(differences, min_size=1, max_size=3))
def test_an_interval_holds_just_the_bounds_that_are_not_rejected_and_the_mean(models):
    values = np.array([own[: min(map(len, models))] for own in models])
    mean, low, high = statistics.paired_interval(values)
    assert -1 <= low <= mean <= high <= 1
    bounds = np.linspace(-1, 1, 21)
    for side, end in ((values, low), (-values, -high)):
        assert all(statistics.chance_above(side, bound) > 0.0249 for bound in bounds[bounds > end + 1e-9])
        assert all(statistics.chance_above(side, bound) < 0.0251 for bound in bounds[bounds < end - 1e-9])


@given(differences, st.floats(-1, 1), st.floats(-1, 1))
def test_a_chance_rises_with_its_bound_and_that_of_several_models_is_the_largest(values, one, other):
    bounds = sorted([one, other])
    low, high = (statistics.chance_above(values, bound) for bound in bounds)
    assert low <= high + 1e-12
    assert statistics.chance_above([values, [0.0] * len(values)], one) >= statistics.chance_above(values, one)


def test_differences_that_vary_have_students_interval_and_values_that_are_no_scores_have_it_too():
    rng = np.random.default_rng(0)
    values = rng.choice([-1 / 7, 0, 1 / 7, 2 / 7], size=60)
    half = 2.001 * values.std(ddof=1) / 60**0.5
    low = statistics.paired_interval(values)[1]
    assert low == pytest.approx(values.mean() - half, abs=0.2 * half)
    assert statistics.paired_interval(9 * values) == statistics.mean_interval(9 * values)
    assert statistics.mean_interval(9 * values)[1:] == pytest.approx(
        (9 * (values.mean() - half), 9 * (values.mean() + half)), rel=1e-3
    )


def test_a_mean_of_samples_that_are_all_right_leaves_room_below():
    mean, low, high = statistics.mean_interval([1.0] * 20, 0, 1)
    assert (mean, high) == (1, 1) and 0.8 < low < statistics.wilson(20, 20)[0]
    assert statistics.mean_interval([[1.0, 0.0], [0.0, 1.0]], 0, 1)[0] == 0.5
    assert statistics.mean_interval([0.3]) == (0.3, 0.3, 0.3)
    with pytest.raises(ValueError, match="no values"):
        statistics.mean_interval([])


SIZES = (10, 20, 30, 40, 60, 90, 300)  # of the studies' samples; the fewest, 8, are of scores alone
MARGIN = claims.MARGIN


def chances(values, bound):
    """The p-values of samples [runs, size]; the smallest difference is that of each run."""
    smallest = np.min(np.abs(values), axis=1, where=np.abs(values) > 1e-9, initial=1.0) * np.any(
        np.abs(values) > 1e-9, axis=1
    )
    return statistics._chances(values.mean(axis=1), values.std(axis=1, ddof=1), smallest, values.shape[1], bound)


def verdicts(above, below):
    """Return which samples are called better or worse, not worse or worse than by the margin, and as good.

    ``above`` and ``below`` return the p-values that a mean, or that with the other sign, is a bound or less.
    """
    chances = {"above": above(0), "below": below(0), "not worse": above(-MARGIN), "worse": below(MARGIN)}
    chances["not better"] = below(-MARGIN)
    told = {name: chance < statistics.ONE_SIDE for name, chance in chances.items()}
    return {
        "better": told["above"] | told["below"],
        "not worse": told["not worse"],
        "worse": told["worse"],
        "as good": told["not worse"] & told["not better"],
    }


@pytest.mark.parametrize("size", SIZES)
def test_of_paired_outcomes_at_most_5_percent_of_runs_have_a_false_verdict(size):
    """All outcomes are counted: wins, losses and ties, at any rate; the difference is 0, or just the margin."""
    wins, losses = np.meshgrid(np.arange(size + 1), np.arange(size + 1))
    wins, losses = wins[wins + losses <= size], losses[wins + losses <= size]
    mean, differing = (wins - losses) / size, wins + losses
    deviation = np.sqrt((differing - size * mean**2) / (size - 1))
    smallest = (differing > 0).astype(float)
    found = verdicts(
        lambda bound: statistics._chances(mean, deviation, smallest, size, bound),
        lambda bound: statistics._chances(-mean, deviation, smallest, size, bound),
    )
    ways = scipy.special.gammaln([size + 1])[0] - sum(
        map(scipy.special.gammaln, (wins + 1, losses + 1, size - wins - losses + 1))
    )

    def often(told, win, loss):
        shares = zip((wins, losses, size - wins - losses), (win, loss, 1 - win - loss), strict=True)
        return np.exp(ways + sum(scipy.special.xlogy(count, share) for count, share in shares))[told].sum()

    for rate in (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95):
        assert often(found["better"], rate / 2, rate / 2) <= 0.05
    for wins_too in (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4):
        for name in ("not worse", "worse", "as good"):
            assert often(found[name], wins_too, wins_too + MARGIN) <= 0.05


def judge(values):
    return verdicts(lambda bound: chances(values, bound), lambda bound: chances(-values, bound))


def answers(one, other, whole=0.0):
    """Differences of texts of five questions that two policies answer, each text with its own ease.

    ``whole`` is the share of texts that the first loses altogether.
    """

    def draw(rng, shape):
        found = []
        for share in (one, other):
            ease = rng.beta(3 * share, 3 * (1 - share), size=shape)
            found.append(rng.binomial(5, ease) / 5)
        return np.where(rng.random(shape) < whole, 0.0, found[0]) - found[1]

    return draw


def drawn(**shares):
    """Differences in fifths of a text with given shares, such as ``lose3=0.1``."""
    sizes = [int(name[-1]) / 5 * (-1 if name.startswith("lose") else 1) for name in shares]
    chances = [*shares.values(), 1 - sum(shares.values())]
    return lambda rng, shape: rng.choice([*sizes, 0.0], p=chances, size=shape)


ALIKE = {  # the mean is 0
    "half": answers(0.5, 0.5), "nearly all": answers(0.95, 0.95), "hardly any": answers(0.05, 0.05),
    "rare": drawn(win1=0.03, lose1=0.03), "often": drawn(win1=0.2, lose1=0.2), "whole": drawn(win5=0.03, lose5=0.03),
    "lopsided": drawn(win1=0.2, lose2=0.1),
}  # fmt: skip
WORSE = {  # by the margin
    "half": answers(0.45, 0.5), "nearly all": answers(0.9, 0.95), "one of five": drawn(lose1=0.25),
    "whole texts": drawn(lose5=0.05), "both ways": drawn(win1=0.15, lose1=0.4), "lopsided": drawn(win1=0.15, lose2=0.2),
    "halves": drawn(lose3=1 / 12),
}  # fmt: skip


@pytest.mark.parametrize("size", (8, *SIZES))
def test_of_texts_with_several_answers_at_most_5_percent_of_runs_have_a_false_verdict(size):
    rng, runs = np.random.default_rng(0), 2000
    often = lambda told: told.mean() - 2 * (0.05 * 0.95 / runs) ** 0.5  # noqa: E731  less two standard errors
    for name, draw in ALIKE.items():
        assert often(judge(draw(rng, (runs, size)))["better"]) <= 0.05, name
    for name, draw in WORSE.items():
        found = judge(draw(rng, (runs, size)))
        for verdict in ("not worse", "worse", "as good"):
            assert often(found[verdict]) <= 0.05, (name, verdict)


def test_the_simulated_verdicts_are_those_of_claims():
    rng = np.random.default_rng(0)
    for size in (8, 60, 300):
        for draw in (*ALIKE.values(), answers(0.9, 0.5), answers(0.5, 0.52), drawn(lose1=0.01)):
            values = draw(rng, (5, size))
            found = judge(values)
            for run, own in enumerate(values):
                told = {expects: claims._outcome(expects, own[None]) for expects in claims.EXPECTS}
                shown = {expects: outcome for expects, (outcome, chance) in told.items() if chance < claims.LEVEL}
                assert ("better" in shown) == found["better"][run]
                assert (shown.get("not worse") == claims.HOLDS) == found["not worse"][run]
                assert (shown.get("not worse") == claims.FAILS) == found["worse"][run]
                assert (shown.get("as good") == claims.HOLDS) == found["as good"][run]
