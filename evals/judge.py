"""The judge of mathematical answers, math-verify: :mod:`models.limited` runs this file in a process of its own.

What a model wrote can take any time and memory to simplify. math-verify's own limit is an alarm, which only the main
thread may have.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import math_verify
import sympy

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns where its alarm is off


def equal(answer: str, reference: str, *, boxed: bool = True) -> bool:
    """Return whether two answers are one text, or mean the same to math-verify.

    A letter behind a number is a variable ("5m" is not 5); a unit is longer, or in ``\\\\text``. Numbers in different
    bases differ; a base that one of them leaves out is the other's.

    Args:
        boxed: whether ``answer`` is LaTeX, as ``reference`` is; else it is a text that states its answer somewhere.

    Example:
        >>> from evals import judge
        >>> judge.equal(r"\\pi/2", r"\\frac{\\pi}{2}")
        True
        >>> judge.equal("So it is $7$.", "8", boxed=False)
        False
    """
    one, other = _plain(answer), _plain(reference)
    if boxed and one and one.casefold() == other.casefold():
        return True
    bases = {base for text in (one, other) for base in re.findall(r"\d_\{?(\d+)\}?$", text)}
    said, wanted = _parsed(one if boxed else answer, boxed), _parsed(other, True)
    same = len(bases) < 2 and math_verify.verify(wanted, said, timeout_seconds=None)
    return same and ("%" in one + other or not _apart(said[0], wanted[0]))


def _parsed(text: str, latex: bool) -> list[Any]:
    """Parse LaTeX as a whole, or else what a text states: from LaTeX in vain, a number inside it would be read."""
    if not latex:
        return math_verify.parse(text, parsing_timeout=None)
    return math_verify.parse(f"${text}$", [math_verify.LatexExtractionConfig()], parsing_timeout=None)


def _apart(one: Any, other: Any) -> bool:
    """Return whether two numbers differ in the sixth decimal, or small ones by a thousandth: math-verify drops that."""
    if not all(isinstance(x, sympy.Expr) and x.is_number and x.is_finite for x in (one, other)):
        return False
    a, b = (x.doit().evalf(30) for x in (one, other))
    return bool(abs(a - b) > 1e-6 * min(1, 1000 * max(abs(a), abs(b))))


def _plain(answer: str) -> str:
    """Return an answer without its full stop and ``\\\\text`` around it, and with its last variable in braces."""
    text = answer.strip().strip("$").rstrip(".").strip()
    text = re.sub(r"^\\(?:text|mbox|mathrm|textrm|textbf|mathbf)\s*\{([^{}]*)\}$", r"\1", text)
    text = re.sub(r"\\mathrm\{([ei])\}", r"\1", text)
    return re.sub(r"(?<=[\d})\s])([A-Za-z])$", r"{\1}", text)  # math-verify would take it for a unit
