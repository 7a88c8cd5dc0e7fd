"""What public functions ask of their arguments before anything is computed: arrays of real numbers, counts, budgets."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


def real_array(what: str, x: Any) -> Array:
    """``x`` as an array of real numbers.

    Raises:
        ValueError: text, None, complex numbers, rows of different lengths.

    Example:
        >>> from kvjax.checks import real_array
        >>> real_array("weights", [0.5, 0.5]).shape
        (2,)
        >>> real_array("weights", "half")
        Traceback (most recent call last):
        ...
        ValueError: weights is a str; expected an array of real numbers.
    """
    try:
        array = jnp.asarray(x)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{what} is a {type(x).__name__}; expected an array of real numbers.") from None
    if jnp.issubdtype(array.dtype, jnp.complexfloating) or not (
        jnp.issubdtype(array.dtype, np.number) or array.dtype == bool
    ):
        raise ValueError(f"{what} has the dtype {array.dtype}; expected an array of real numbers.")
    return array


def check_count(what: str, value: Any, least: int, hint: str) -> None:
    """Refuses what is not an integer from ``least``.

    Raises:
        ValueError: naming the argument and its value; ``hint`` ends the sentence.

    Example:
        >>> from kvjax.checks import check_count
        >>> check_count("block", 2.5, 1, "a block has at least 1 token")
        Traceback (most recent call last):
        ...
        ValueError: block is 2.5; a block has at least 1 token.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{what} is {value!r}; {hint}.")


def check_tokens(budget: Any, rows: int) -> None:
    """Refuses a budget that is neither an integer from 1 nor an array of integers, one number for all or one a row.

    Raises:
        ValueError: saying which it was.

    Example:
        >>> from kvjax.checks import check_tokens
        >>> check_tokens(0.5, 1)
        Traceback (most recent call last):
        ...
        ValueError: the budget is 0.5; give tokens per head, an int from 1, or an array of them, one a row.
    """
    if isinstance(budget, int):
        if budget < 1:
            raise ValueError(f"the budget is {budget}; at least 1 token must stay.")
        return
    if not (hasattr(budget, "dtype") and jnp.issubdtype(budget.dtype, jnp.integer)):
        raise ValueError(
            f"the budget is {budget!r}; give tokens per head, an int from 1, or an array of them, one a row."
        )
    if budget.shape not in ((), (rows,)):
        raise ValueError(f"a budget of shape {budget.shape} does not fit: expected {(rows,)}, one number a row.")


def is_float(dtype: Any) -> bool:
    """Whether something is, or names, a dtype of floats.

    Example:
        >>> from kvjax.checks import is_float
        >>> is_float("bfloat16"), is_float("int8"), is_float("float7")
        (True, False, False)
    """
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False
