"""Confidence intervals of shares and means, and comparisons on the same samples. No interval is corrected for multiple
comparisons.

Each kind of figure has one method throughout the project: a share of yes-or-no outcomes has Wilson's interval, a mean
has that of :func:`mean_interval`, and a difference on the same samples has that of :func:`paired_interval`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import scipy
from jaxtyping import Float

Z = 1.959964  # 95%
RESAMPLES = 10_000


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """Return the 95% interval of a share (Wilson's score interval).

    ``successes`` may also be a sum of outcomes between 0 and 1. They vary less than yes-or-no outcomes with the same
    mean, so the interval is then too wide rather than too narrow.

    Example:
        >>> from evals.statistics import wilson
        >>> [round(bound, 3) for bound in wilson(8, 10)]
        [0.49, 0.943]
    """
    if trials < 1:
        raise ValueError(f"trials is {trials}; an interval needs at least 1 trial.")
    share = successes / trials  # by hand, as SciPy's takes whole successes only
    centre = (share + Z**2 / (2 * trials)) / (1 + Z**2 / trials)
    half = Z / (1 + Z**2 / trials) * math.sqrt(share * (1 - share) / trials + Z**2 / (4 * trials**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_interval(differences: Sequence[float] | Float[np.ndarray, "models samples"]) -> tuple[float, float, float]:
    """Return the mean of differences on the same samples, and its 95% interval, which stays within their range.

    Differences of two yes-or-no outcomes (-1, 0 or 1) of one model have Tango's score interval (Statistics in Medicine
    17, 1998), the counterpart of Wilson's for pairs. All others, such as contrasts averaged over several budgets, have
    the interval of :func:`mean_interval` over samples. Both are widened to include 0 unless :func:`chance` finds a
    difference at the 5% level; for -1, 0 and 1 that is the exact sign test (McNemar's). So a handful of samples proves
    nothing.

    Args:
        differences: one per sample; or a row per model, of models that differ in the seed of their training.

    Example:
        >>> from evals.statistics import paired_interval
        >>> [round(x, 2) for x in paired_interval([1, 1, 1, 1, 1, 1, 0, 0])]
        [0.75, 0.18, 0.93]
        >>> [round(x, 2) for x in paired_interval([0.25, 0.5, 0.0, 0.5, 0.25])]
        [0.3, 0.0, 0.45]
    """
    values = np.atleast_2d(np.asarray(differences, np.float64))
    mean, low, high = mean_interval(differences)
    if len(values) == 1 and set(values[0]) <= {-1, 0, 1}:
        low, high = _tango(int(np.sum(values > 0)), int(np.sum(values < 0)), values.size)
    if chance(differences) > 0.05:
        low, high = min(low, 0.0), max(high, 0.0)
    return mean, low, high


def comparison(differences: Sequence[float]) -> dict[str, Any]:
    """Return the mean of differences on the same samples as fields of a table's line, with its interval and verdict."""
    mean, low, high = paired_interval(differences)
    return {"difference": mean, "low": low, "high": high, "better": verdict(low, high)}


def mean_interval(values: Sequence[float] | Float[np.ndarray, "models samples"]) -> tuple[float, float, float]:
    """Return the mean over samples and its 95% interval: a percentile bootstrap, 10,000 resamples, fixed seed.

    Args:
        values: one per sample; or a row per model, and then models are drawn again as samples are.

    Example:
        >>> from evals.statistics import mean_interval
        >>> [round(x, 2) for x in mean_interval([1.0, 2.0, 3.0, 2.0])]
        [2.0, 1.25, 2.75]
    """
    array = np.atleast_2d(np.asarray(values, np.float64))
    if not array.size:
        raise ValueError("there are no values; an interval needs at least 1.")
    low, high = np.percentile(_resampled(array), [2.5, 97.5])
    return float(array.mean()), float(low), float(high)


def _resampled(values: Float[np.ndarray, "models samples"]) -> Float[np.ndarray, "resamples"]:
    """Return the means of resamples: of the samples, the same for all models, and of the models."""
    rng = np.random.default_rng(0)
    if values.shape[1] == 1:  # SciPy asks for two, and two equal ones have the same means
        values = np.repeat(values, 2, axis=1)
    means = scipy.stats.bootstrap(
        (values,),
        lambda drawn, axis: np.ascontiguousarray(drawn).mean(axis),  # else equal sums are not equal to the last bit
        axis=1, n_resamples=RESAMPLES, batch=next(_parts(values.size)), method="percentile", rng=rng,
    ).bootstrap_distribution  # fmt: skip
    return _over_models(rng, means)


def _over_models(rng: np.random.Generator, means: Float[np.ndarray, "models part"]) -> Float[np.ndarray, "part"]:
    """Draw the models again for each resample, as often as there are models, and return the means over them."""
    weights = np.eye(len(means))[rng.integers(len(means), size=means.T.shape)].mean(axis=1)
    return np.sum(weights * means.T, axis=1)


def _parts(size: int) -> Iterator[int]:
    """Yield the counts of parts of the resamples, each of which takes little memory with ``size`` values in one."""
    most = max(1, min(RESAMPLES, 1_000_000 // size))
    return (min(most, RESAMPLES - start) for start in range(0, RESAMPLES, most))


def chance(differences: Sequence[float] | Float[np.ndarray, "models samples"]) -> float:
    """Return the p-value of the sign-flip test: how often random signs give a sum at least as far from 0.

    Of several models (:func:`paired_interval`), a sample's differences are averaged; and the p-value is at least that
    of the resamples of :func:`mean_interval`, in which models are drawn again.

    Example:
        >>> from evals.statistics import chance
        >>> chance([1, 1, 1, 1, 1, 0, 0])
        0.0625
    """
    array = np.atleast_2d(np.asarray(differences, np.float64))
    if len(array) == 1:
        return _sign_flip(array[0])
    means = _resampled(array)
    least = min(int(np.sum(means <= 0)), int(np.sum(means >= 0)))
    return max(_sign_flip(array.mean(axis=0)), min(1.0, 2 * (1 + least) / (1 + RESAMPLES)))


def _sign_flip(values: Float[np.ndarray, "samples"]) -> float:
    sizes = np.abs(values[values != 0])
    if not len(sizes):
        return 1.0
    if np.all(sizes == 1):
        return float(scipy.stats.binomtest(int(np.sum(values > 0)), len(sizes)).pvalue)
    rng, far, found = np.random.default_rng(0), abs(math.fsum(values)) * (1 - 1e-9), 0
    for count in _parts(len(sizes)):
        signs = 2.0 * rng.integers(2, size=(count, len(sizes))) - 1
        found += int(np.sum(np.abs(signs @ sizes) >= far))
    return (1 + found) / (1 + RESAMPLES)


def chance_beyond(
    differences: Sequence[float] | Float[np.ndarray, "models samples"], margin: float, *, both: bool = True
) -> float:
    """Return the p-value of the hypothesis that the mean lies beyond a margin: above ``margin`` or below ``-margin``.

    Small values say that both sides are as good, which no test of a difference can (two one-sided tests). Equal samples
    do not say that all others are equal. So the resamples have one sample more, of -1, the worst that scores between 0
    and 1 can give, and weights of a Dirichlet distribution (Gaffke 2005, "Three test statistics for a nonparametric
    one-sided hypothesis on the mean of a nonnegative variable"). For losses of 1 alone, that is Clopper's and Pearson's
    exact test. Models are drawn again, as by :func:`mean_interval`.

    Args:
        both: whether the mean may not be above ``margin`` either; else it may only not be below ``-margin``.

    Example:
        >>> from evals.statistics import chance_beyond
        >>> [round(chance_beyond([0.0] * count, 0.05), 2) for count in (5, 50, 100)]
        [0.77, 0.08, 0.01]
    """
    array = np.atleast_2d(np.asarray(differences, np.float64))
    return max(_chance_below(side, -margin) for side in (array, -array)[: 1 + both])


def _chance_below(values: Float[np.ndarray, "models samples"], bound: float) -> float:
    rng, size = np.random.default_rng(0), values.shape[1] + 1
    worst = min(-1.0, float(values.min()))
    below = 0
    for count in _parts(size):
        weights = rng.standard_exponential((count, size), np.float32)
        weights /= weights.sum(axis=1, keepdims=True)
        by_model = values @ weights[:, 1:].T + worst * weights[:, 0]
        below += int(np.sum(_over_models(rng, by_model) <= bound))
    return (1 + below) / (1 + RESAMPLES)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation, which is NaN if one side is constant.

    Example:
        >>> from evals.statistics import rank_correlation
        >>> round(rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]), 3)
        0.8
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", scipy.stats.ConstantInputWarning)
        return float(scipy.stats.spearmanr(a, b).statistic)


def _tango(wins: int, losses: int, count: int) -> tuple[float, float]:
    low = _solve(lambda difference: _score(wins, losses, count, difference) - Z)
    return low, _solve(lambda difference: _score(wins, losses, count, difference) + Z)


def _score(wins: int, losses: int, count: int, difference: float) -> float:
    """Return by how many standard errors wins minus losses exceed what ``difference`` predicts; it falls with it."""
    # The maximum-likelihood share of losses under that difference solves 2 n x^2 + b x + c = 0.
    b = -wins - losses + (2 * count - wins + losses) * difference
    c = -losses * difference * (1 - difference)
    share = (math.sqrt(max(b * b - 8 * count * c, 0.0)) - b) / (4 * count)
    above = wins - losses - count * difference
    variance = count * (2 * share + difference * (1 - difference))
    return above / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, above) if above else 0.0


def _solve(falling: Callable[[float], float]) -> float:
    if falling(-1.0) <= 0 or falling(1.0) >= 0:  # no zero in between
        return -1.0 if falling(-1.0) <= 0 else 1.0
    return scipy.optimize.bisect(falling, -1.0, 1.0)


def verdict(low: float, high: float) -> str:
    """Return "yes" where a difference is above 0, "no" where it is below, else "within noise"."""
    return "yes" if low > 0 else "no" if high < 0 else "within noise"
