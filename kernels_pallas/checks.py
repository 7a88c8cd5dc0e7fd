"""Checks of counts given as integers of Python, NumPy or JAX. A value that is not traced is checked before use."""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MOST = 2**31 - 1  # what int32 counts
_REPR = reprlib.Repr(maxstring=80, maxother=80)


def is_known(*values: Any) -> bool:
    """Return whether all values are known, that is, none is traced like an argument of a function under jit."""
    return not any(isinstance(value, jax.core.Tracer) for value in values)


def plain(value: Any) -> Any:
    """Return a NumPy or JAX number of known value as a Python number, and anything else unchanged."""
    number = isinstance(value, np.generic | np.ndarray | jax.Array) and value.ndim == 0
    return value.item() if number and is_known(value) else value


def shown(value: Any) -> str:
    """Shorten a value's repr to one line, for error messages."""
    return " ".join(_REPR.repr(value).split())


def check_names(what: str, given: Any, known: Iterable[str]) -> None:
    """Check that a name, or each of several, is a known one.

    Example:
        >>> from kernels_pallas.checks import check_names
        >>> check_names("statistic", ["sum", "median"], ("sum", "last"))
        Traceback (most recent call last):
        ...
        ValueError: unknown statistic 'median'; expected one of sum, last.
    """
    known = list(known)
    names = sorted(set(given)) if isinstance(given, list | tuple | set | frozenset) else [given]
    if wrong := [shown(name) for name in names if name not in known]:
        near = nearest(*[name for name in names if name not in known], known=known)
        raise ValueError(f"unknown {what} {', '.join(wrong)}; expected one of {', '.join(known)}.{near}")


def nearest(*names: Any, known: Iterable[str]) -> str:
    """Ask, for an error message, whether the name nearest to a misspelt one was meant; return "" if none is near.

    Example:
        >>> from kernels_pallas.checks import nearest
        >>> nearest("H20", known=["h2o", "tova"])
        " Did you mean 'h2o'?"
    """
    lower = {name.lower(): name for name in known}
    found = (difflib.get_close_matches(name.lower(), lower, 1, cutoff=0.6) for name in names if isinstance(name, str))
    return next((f" Did you mean {lower[near[0]]!r}?" for near in found if near), "")


def check_count(what: str, value: Any, least: int, hint: str) -> int:
    """Return ``value`` as an int, after a check that it is an integer of at least ``least`` that fits into int32."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{what} is {shown(value)}; {hint}.")
    if value > MOST:
        raise ValueError(f"{what} is {shown(value)}; give at most {MOST}, which is what int32 counts.")
    return value


def check_tokens(budget: Any, *shapes: tuple[int, ...]) -> Any:
    """Return a budget of tokens as an int or as an int32 array; a budget beyond int32 is cut to its largest value.

    An array has no axes, or one of ``shapes``.
    """
    budget = plain(budget)
    if isinstance(budget, int) and not isinstance(budget, bool):
        if budget < 1:
            raise ValueError(f"the budget is {budget}; at least 1 token must stay.")
        return min(budget, MOST)
    if not (hasattr(budget, "dtype") and jnp.issubdtype(budget.dtype, jnp.integer)):
        raise ValueError(f"the budget is {shown(budget)}; give tokens per head, an int from 1, or one for each row.")
    if budget.shape not in ((), *shapes):
        raise ValueError(f"a budget of shape {budget.shape} does not fit: expected {' or '.join(map(str, shapes))}.")
    if not is_known(budget):
        return jnp.clip(budget, 0, min(MOST, jnp.iinfo(budget.dtype).max)).astype(jnp.int32)
    known = np.asarray(budget)
    if (known < 1).any():
        raise ValueError(f"the budget is {shown(known.tolist())}; at least 1 token must stay in each row.")
    return np.minimum(known.astype(np.uint64), MOST).astype(np.int32)


def check_soft_cap(soft_cap: float | None) -> float | None:
    """Check that the cap of logits is a number above 0, or None."""
    if soft_cap is None:
        return None
    known = plain(soft_cap)
    if isinstance(known, bool) or not isinstance(known, int | float) or not 0 < known < math.inf:
        raise ValueError(f"soft_cap is {soft_cap!r}; give a number above 0, or None for logits without a cap.")
    return float(known)
