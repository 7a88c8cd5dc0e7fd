"""Verdicts on a paper's claims, from the confidence interval of a difference, and their written form."""

from __future__ import annotations

from typing import Any

HOLDS, FAILS, OPEN = "holds", "does not", "within noise"
SAME = 0.1  # "as good" allows a difference of this size


def verdict(expects: str, low: float, high: float) -> str:
    """Return the verdict on a claim from the interval of its difference.

    Example:
        >>> from evals.verdicts import verdict
        >>> (
        ...     verdict("better", 0.01, 0.2), verdict("same", -0.05, 0.04),
        ...     verdict("same", -0.2, 0.3)
        ... )
        ('holds', 'holds', 'within noise')
    """
    if expects == "better":
        return HOLDS if low > 0 else FAILS if high < 0 else OPEN
    if low > 0 or high < 0:
        return HOLDS if max(abs(low), abs(high)) <= SAME else FAILS
    return HOLDS if max(abs(low), abs(high)) <= SAME else OPEN


def sentence(claim: dict[str, Any]) -> str:
    """Return a judged claim as one line.

    Example:
        >>> from evals.verdicts import sentence
        >>> sentence(
        ...     {
        ...         "paper": "CAOTE", "claim": "CAOTE improves H2O", "verdict": "holds",
        ...         "difference": 0.1, "low": 0.02, "high": 0.18
        ...     }
        ... )
        'CAOTE: CAOTE improves H2O: holds (+0.10 [+0.02, +0.18])'
    """
    note = f"; {claim['note']}" if claim.get("note") else ""
    return f"{claim['paper']}: {claim['claim']}: {claim['verdict']} ({figures(claim)}{note})"


def figures(claim: dict[str, Any]) -> str:
    """Return the difference and its interval as text, with three digits for a narrow interval and two for others."""
    digits = 2 if claim["high"] - claim["low"] > 0.03 else 3
    return f"{claim['difference']:+.{digits}f} [{claim['low']:+.{digits}f}, {claim['high']:+.{digits}f}]"
