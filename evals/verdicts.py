"""Verdicts on what a paper claims, from the interval of a difference, and how they are written."""

from __future__ import annotations

from typing import Any

HOLDS, FAILS, OPEN = "holds", "does not", "within noise"
SAME = 0.1  # what "as good" may differ by


def verdict(expects: str, low: float, high: float) -> str:
    """Judges a claim by its interval.

    Example:
        >>> from evals.verdicts import verdict
        >>> verdict("better", 0.01, 0.2), verdict("same", -0.05, 0.04), verdict("same", -0.2, 0.3)
        ('holds', 'holds', 'within noise')
    """
    if expects == "better":
        return HOLDS if low > 0 else FAILS if high < 0 else OPEN
    if low > 0 or high < 0:
        return HOLDS if max(abs(low), abs(high)) <= SAME else FAILS
    return HOLDS if max(abs(low), abs(high)) <= SAME else OPEN


def sentence(claim: dict[str, Any]) -> str:
    """Writes a judged claim in one line.

    Example:
        >>> from evals.verdicts import sentence
        >>> sentence({"paper": "CAOTE", "claim": "CAOTE improves H2O", "verdict": "holds",
        ...           "difference": 0.1, "low": 0.02, "high": 0.18})
        'CAOTE: CAOTE improves H2O: holds (+0.10 [+0.02, +0.18])'
    """
    note = f"; {claim['note']}" if claim.get("note") else ""
    return f"{claim['paper']}: {claim['claim']}: {claim['verdict']} ({figures(claim)}{note})"


def figures(claim: dict[str, Any]) -> str:
    """Writes the difference and its interval, with as many digits as its width asks for."""
    digits = 2 if claim["high"] - claim["low"] > 0.03 else 3
    return f"{claim['difference']:+.{digits}f} [{claim['low']:+.{digits}f}, {claim['high']:+.{digits}f}]"
