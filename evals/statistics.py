"""Intervals and paired comparisons of yes-or-no outcomes."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z = 1.959964  # 95%


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """The 95% interval of a share (Wilson's score interval).

    Outcomes between 0 and 1 may be summed to ``successes``, too: they vary less than yes and no with the same mean, so
    that the interval is then too wide rather than too narrow.

    Example:
        >>> from evals.statistics import wilson
        >>> [round(bound, 3) for bound in wilson(8, 10)]
        [0.49, 0.943]
    """
    if trials < 1:
        raise ValueError("an interval needs at least 1 trial; there is none.")
    share = successes / trials
    centre = (share + Z**2 / (2 * trials)) / (1 + Z**2 / trials)
    half = Z / (1 + Z**2 / trials) * math.sqrt(share * (1 - share) / trials + Z**2 / (4 * trials**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_difference(first: Sequence[bool], second: Sequence[bool]) -> tuple[float, float, float]:
    """Mean of ``second - first`` on the same samples, and its 95% interval.

    The variance has one pseudo-sample of either sign added, so that a handful of equal outcomes is no certainty.

    Example:
        >>> from evals.statistics import paired_difference
        >>> paired_difference([False] * 50, [True] * 25 + [False] * 25)[0]
        0.5
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"{len(first)} and {len(second)} outcomes cannot be paired; give the same samples twice.")
    return mean_interval([int(b) - int(a) for a, b in zip(first, second, strict=True)], pseudo=1.0)


def mean_interval(values: Sequence[float], *, pseudo: float = 0.0) -> tuple[float, float, float]:
    """The mean and its 95% interval, by the normal approximation.

    Args:
        pseudo: adds one pseudo-sample of this size and one of its negative to the variance; 0 adds none.

    Example:
        >>> from evals.statistics import mean_interval
        >>> [round(x, 2) for x in mean_interval([1.0, 2.0, 3.0, 2.0])]
        [2.0, 1.2, 2.8]
    """
    if not values:
        raise ValueError("an interval needs at least 1 value; there is none.")
    mean = sum(values) / len(values)
    spread = [*values, pseudo, -pseudo] if pseudo else list(values)
    centre = sum(spread) / len(spread)
    variance = sum((x - centre) ** 2 for x in spread) / max(len(spread) - 1, 1)
    half = Z * math.sqrt(variance / len(values))
    return mean, mean - half, mean + half


def verdict(low: float, high: float) -> str:
    """ "yes" where a difference is above 0, "no" where it is below, else "within noise".

    Example:
        >>> from evals.statistics import verdict
        >>> verdict(0.1, 0.3), verdict(-0.1, 0.3)
        ('yes', 'within noise')
    """
    return "yes" if low > 0 else "no" if high < 0 else "within noise"
