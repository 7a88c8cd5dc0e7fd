"""The judge of mathematical answers, math-verify: :mod:`models.limited` runs this file in a process of its own.

What a model wrote can take any time and memory to simplify. math-verify's own limit is an alarm, which only the main
thread may have.
"""

from __future__ import annotations

import logging
import re

import math_verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns where its alarm is off


def equal(answer: str, reference: str, *, boxed: bool = True) -> bool:
    """Return whether two answers are one text, or mean the same to math-verify.

    A letter behind a number is a variable ("5m" is not 5); a unit is longer, or in ``\\\\text``. Numbers in different
    bases differ.

    Args:
        boxed: whether ``answer`` is LaTeX, as ``reference`` is; else it is a text that states its answer somewhere.

    Example:
        >>> from evals import judge
        >>> judge.equal(r"\\pi/2", r"\\frac{\\pi}{2}"), judge.equal("So it is $7$.", "8", boxed=False)
        (True, False)
    """
    one, other = _plain(answer), _plain(reference)
    if boxed and one and one.casefold() == other.casefold():
        return True
    bases = {base for text in (one, other) for base in re.findall(r"\d_\{?(\d+)\}?$", text)}
    found = _parsed(f"${one}$" if boxed else answer)
    return len(bases) < 2 and math_verify.verify(_parsed(f"${other}$"), found, timeout_seconds=None)


def _parsed(text: str) -> list[object]:
    return math_verify.parse(text, parsing_timeout=None)


def _plain(answer: str) -> str:
    """Return an answer without its full stop and ``\\\\text`` around it, and with its last variable in braces."""
    text = answer.strip().strip("$").rstrip(".").strip()
    text = re.sub(r"^\\(?:text|mbox|mathrm|textrm|textbf|mathbf)\s*\{([^{}]*)\}$", r"\1", text)
    return re.sub(r"(?<=[\d})\s])([A-Za-z])$", r"{\1}", text)  # math-verify would take it for a unit
