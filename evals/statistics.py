"""Confidence intervals of shares and means, and comparisons on the same samples. No interval is corrected for multiple
comparisons.

Each kind of figure has one method throughout the project: a share of yes-or-no outcomes has Wilson's interval, a mean
Student's t (:func:`mean_interval`), and a difference of scores on the same samples that of :func:`paired_interval`,
whose bounds and the chance of a verdict (:func:`chance_above`) are one computation.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy
from jaxtyping import Float

Z = 1.959964  # 95%
ONE_SIDE = 0.025  # of a 95% interval
Interval = Callable[[Sequence[float]], tuple[float, float, float]]  # of values: their mean and its bounds


def wilson(successes: float, trials: float) -> tuple[float, float]:
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
    """Return the mean of differences of scores on the same samples, and its 95% interval.

    It holds every mean that :func:`chance_above` rejects in neither direction, so an interval and a verdict cannot
    disagree. Values of which one leaves [-1, 1] are no scores' differences; they have the interval of
    :func:`mean_interval`.

    Args:
        differences: one per sample; or a row per model, of models that differ in the seed of their training: the
            interval then spans those of all models, and is beyond 0 only if each of them is.

    Example:
        >>> from evals.statistics import paired_interval
        >>> [round(x, 2) for x in paired_interval([1, 1, 1, 1, 1, 1, 0, 0])]
        [0.75, 0.24, 1.0]
        >>> [round(x, 2) for x in paired_interval([0] * 60)]
        [0.0, -0.06, 0.06]
    """
    values = np.atleast_2d(np.asarray(differences, np.float64))
    if np.max(np.abs(values), initial=0) > 1:
        return mean_interval(values)
    return float(values.mean()), _lower(values), -_lower(-values)


def _lower(values: Float[np.ndarray, "models samples"]) -> float:
    """Return the least mean that :func:`chance_above` does not reject."""
    beyond = lambda bound: chance_above(values, bound) - ONE_SIDE  # noqa: E731
    most = float(values.mean(axis=1).min())
    return (
        -1.0 if beyond(-1.0) >= 0 else most if beyond(most) <= 0 else float(scipy.optimize.brentq(beyond, -1.0, most))
    )


def chance_above(differences: Sequence[float] | Float[np.ndarray, "models samples"], bound: float) -> float:
    """Return the p-value of the hypothesis that the mean of differences of scores is ``bound`` or less.

    It is that of Student's t, made safe for few samples: the mean counts less the smallest difference that one of them
    shows (for -1, 0 and 1 that is McNemar's test with its continuity correction), and a bound is beyond noise only if
    it is, too, with the least variance that what was not seen can have (:func:`_chances`). So equal samples prove
    little: 76 of them exclude that one in twenty is lost. The p-value of several models is the largest of theirs.

    A test draws samples whose mean is the bound, of the studies' sizes: at most 5% of both sides are rejected for
    differences of -1, 0 and 1 at any rate, and for scores of several answers. Beyond 5% are lopsided differences alone:
    of 60 samples whose mean is 0, 3% of which lose everything where 15% gain a fifth, it rejects 15%.

    Example:
        >>> from evals.statistics import chance_above
        >>> [round(chance_above([0.0] * count, -0.05), 3) for count in (2, 20, 60, 90)]
        [0.4, 0.159, 0.04, 0.016]
    """
    values = np.atleast_2d(np.asarray(differences, np.float64))
    size = values.shape[1]
    if size < 2:
        return 1.0
    seen = np.abs(values)
    smallest = np.min(seen, axis=1, where=seen > 1e-9, initial=np.inf)
    smallest = np.where(np.isinf(smallest), 0, smallest)
    return float(np.max(_chances(values.mean(axis=1), values.std(axis=1, ddof=1), smallest, size, bound)))


def _chances(
    mean: Float[np.ndarray, "*any"],
    deviation: Float[np.ndarray, "*any"],
    smallest: Float[np.ndarray, "*any"],
    size: int,
    bound: float,
) -> Float[np.ndarray, "*any"]:
    """Return the p-values of :func:`chance_above` for means of ``size`` differences; they rise with the bound.

    The standard error of a mean is the samples' own, or the smaller of two that no sample need show, if that is larger:

    - a share q of all samples loses everything, though none of these did: q is what moves the mean to the bound;
    - the true mean d is made by samples that are won or lost whole, a share ``abs(d)`` of all. As any d up to the bound
      is to be excluded, the d that is nearest in standard errors counts.
    """
    gap, above = mean - bound, np.maximum(mean, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        own = (gap - smallest / size) / np.where(deviation > 1e-12, deviation, 0) * size**0.5
        share = gap / (mean + 1)
        lost = np.sqrt(size * share / (1 - share))
        whole = [
            (mean - d) / np.sqrt(np.abs(d) * (1 - np.abs(d)) / size)
            for d in (bound, np.minimum(bound, -above / (1 + 2 * above)))
        ]
        found = np.minimum(own, np.maximum(lost, np.minimum(*whole)))
    return scipy.stats.t.sf(np.where(gap > smallest / size, found, 0.0), size - 1)


def comparison(
    differences: Sequence[float], scale: float = 1.0, interval: Interval = paired_interval
) -> dict[str, Any]:
    """Return the mean of differences on the same samples as fields of a table's line, with its interval and verdict.

    ``interval`` is :func:`mean_interval` for what is no score, such as a relative error: no sample of it is lost whole.
    The mean and its bounds are multiplied by ``scale``.
    """
    mean, low, high = (scale * bound for bound in interval(differences))
    return {"difference": mean, "low": low, "high": high, "better": verdict(low, high)}


def mean_interval(
    values: Sequence[float] | Float[np.ndarray, "models samples"], least: float | None = None, most: float | None = None
) -> tuple[float, float, float]:
    """Return the mean over samples and its 95% interval, Student's t. One value has no interval: both bounds are it.

    Args:
        values: one per sample; or a row per model, whose values are averaged for each sample.
        least: the smallest value that is possible. An interval reaches at least as far as if a share of the samples had
            it that may be missed by chance, Wilson's; so samples that are all equal leave room.
        most: the largest value that is possible, in the same way.

    Example:
        >>> from evals.statistics import mean_interval
        >>> [round(x, 2) for x in mean_interval([1.0, 2.0, 3.0, 2.0])]
        [2.0, 0.7, 3.3]
        >>> [round(x, 2) for x in mean_interval([1.0] * 20, 0, 1)]
        [1.0, 0.82, 1]
    """
    array = np.atleast_2d(np.asarray(values, np.float64)).mean(axis=0)
    if not array.size:
        raise ValueError("there are no values; an interval needs at least 1.")
    mean = float(array.mean())
    if array.size == 1:
        return mean, mean, mean
    t = float(scipy.stats.t.isf(ONE_SIDE, array.size - 1))
    half, missed = t * float(array.std(ddof=1)) / array.size**0.5, t**2 / (array.size + t**2)
    low = mean - half if least is None else max(least, mean - max(half, missed * (mean - least)))
    high = mean + half if most is None else min(most, mean + max(half, missed * (most - mean)))
    return mean, low, high


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


def verdict(low: float, high: float) -> str:
    """Return "yes" where a difference is above 0, "no" where it is below, else "within noise"."""
    return "yes" if low > 0 else "no" if high < 0 else "within noise"
