"""Checks of public functions' arguments before anything is computed: real numbers, counts, budgets, types."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kernels_pallas.checks import MOST, check_count, check_names, check_tokens, is_known, nearest, plain, shown

__all__ = [
    "MOST",
    "check_count",
    "check_fields",
    "check_names",
    "check_share_or_tokens",
    "check_tokens",
    "check_types",
    "fields_given",
    "is_float",
    "is_known",
    "nearest",
    "plain",
    "real_array",
    "shown",
]


def real_array(what: str, x: Any) -> Array:
    """Return ``x`` as an array of real numbers.

    Example:
        >>> from kvjax._src.checks import real_array
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


def check_share_or_tokens(budget: Any) -> int | float:
    """Return a budget as Python's own number: tokens (an int from 1), or a share of the prompt's (a float in (0, 1]).

    A text such as "25%" is a share.

    Example:
        >>> from kvjax._src.checks import check_share_or_tokens
        >>> check_share_or_tokens(1.5)
        Traceback (most recent call last):
        ...
        ValueError: the budget is 1.5; expected tokens per head (an int from 1) or a share up to 1.0.
        >>> check_share_or_tokens("25%")
        0.25
    """
    given, budget = budget, plain(budget)
    if isinstance(budget, str) and budget.strip().endswith("%"):
        with contextlib.suppress(ValueError):
            budget = float(budget.strip()[:-1]) / 100
    number = isinstance(budget, int | float) and not isinstance(budget, bool)
    if not number or not (1 <= budget <= MOST if isinstance(budget, int) else 0 < budget <= 1):
        raise ValueError(
            f"the budget is {shown(given)}; expected tokens per head (an int from 1) or a share up to 1.0."
        )
    return budget


def check_types(values: Mapping[str, Any], annotations: Mapping[str, Any], of: str = "") -> dict[str, Any]:
    """Return what a file or a short name says as Python's own values, after a check that each has its annotated type.

    An int is a float, and a list becomes a tuple; what has no annotation is not checked. The message starts with the
    values' owner, ``of``.

    Example:
        >>> from kvjax._src.checks import check_types
        >>> check_types({"window": 8.5}, {"window": int | None}, "snapkv")
        Traceback (most recent call last):
        ...
        ValueError: snapkv: window is 8.5; expected int | None.
    """
    checked = {name: tuple(map(plain, x)) if type(x) in (list, tuple) else plain(x) for name, x in values.items()}
    for name, value in checked.items():
        if not _fits(value, annotations.get(name, Any)):
            expected = inspect.formatannotation(annotations[name]).replace("float", "finite float")
            raise ValueError(f"{of}{': ' * bool(of)}{name} is {shown(value)}; expected {expected}.")
    return checked


def check_fields(made: Any) -> None:
    """Check a frozen dataclass's fields against their annotations, as its ``__post_init__``."""
    for name, value in check_types(vars(made), get_type_hints(type(made))).items():
        object.__setattr__(made, name, value)


def _fits(value: Any, annotation: Any) -> bool:
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if kind in (list, tuple):
        return isinstance(value, tuple) and all(_fits(part, parts[0]) for part in value)
    if kind is Literal:  # True == 1, but is none of the numbers
        return any(type(value) is type(option) and value == option for option in parts)
    if annotation in (int, float):
        number = isinstance(value, int | annotation) and not isinstance(value, bool)
        return number and (annotation is int or abs(value) <= sys.float_info.max)
    checked = isinstance(annotation, type) and annotation.__module__ not in ("typing", "jaxtyping")
    return not checked or isinstance(value, annotation)


def fields_given(made: Any) -> str:
    """Return a dataclass as text, with only the fields that are not their defaults.

    Example:
        >>> import kvjax
        >>> from kvjax._src.checks import fields_given
        >>> fields_given(kvjax.Context(layer=2))
        'Context(layer=2)'
    """
    values = {field.name: (getattr(made, field.name), field.default) for field in dataclasses.fields(made)}
    given = (f"{name}={shown(value)}" for name, (value, default) in values.items() if value is not default)
    return f"{type(made).__name__}({', '.join(given)})"


def is_float(dtype: Any) -> bool:
    """Return whether something is, or names, a dtype of floats."""
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False
