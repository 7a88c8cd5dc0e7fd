"""Checks of public functions' arguments before anything is computed: real numbers, counts, budgets, types."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

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
    "is_float",
    "is_known",
    "nearest",
    "plain",
    "real_array",
    "shown",
    "typed",
]


def real_array(what: str, x: Any) -> Array:
    """Return ``x`` as an array of real numbers.

    Example:
        >>> from kvjax.checks import real_array
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

    Example:
        >>> from kvjax.checks import check_share_or_tokens
        >>> check_share_or_tokens(1.5)
        Traceback (most recent call last):
        ...
        ValueError: the budget is 1.5; expected tokens per head (an int from 1) or a share of the tokens (a float ...
    """
    budget = plain(budget)
    number = isinstance(budget, int | float) and not isinstance(budget, bool)
    if not number or not (1 <= budget <= MOST if isinstance(budget, int) else 0 < budget <= 1):
        raise ValueError(
            f"the budget is {shown(budget)}; expected tokens per head (an int from 1) or a share of the tokens (a "
            "float in (0, 1])."
        )
    return budget


def check_types(values: Mapping[str, Any], annotations: Mapping[str, Any], of: str = "") -> dict[str, Any]:
    """Return ``values`` with numbers as Python's own, after a check that each is of its type in ``annotations``.

    Values annotated ``bool``, ``int``, ``float`` (finite; an int is accepted), ``str``, ``None``, ``Literal``, a list,
    a tuple, a class, or a union of those are checked; other annotations, and values without one, are not. The message
    starts with the values' owner, ``of``.
    """
    checked = {}
    for name, value in values.items():
        try:
            checked[name] = _fitted(plain(value), annotations.get(name, Any))
        except _Misfit:
            expected = _words(annotations[name])
            raise ValueError(f"{of}{': ' * bool(of)}{name} is {shown(plain(value))}; {expected}.") from None
    return checked


def typed[F: Callable[..., Any]](function: F) -> F:
    """Decorate a function so that each call checks its arguments against the annotations (:func:`check_types`).

    Example:
        >>> from kvjax.checks import typed
        >>> @typed
        ... def half(x: int, *, up: bool = False):
        ...     return -(-x // 2) if up else x // 2
        >>> half(5, up="no")
        Traceback (most recent call last):
        ...
        ValueError: half: up is 'no'; expected True or False.
    """
    signature = inspect.signature(function)
    hints = functools.cache(lambda: get_type_hints(function))  # late: annotations may name what is defined further down

    @functools.wraps(function)  # Sphinx asks what a partial holds for its module
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{function.__name__}() {error}") from None
        given.arguments.update(check_types(given.arguments, hints(), function.__name__))
        return function(*given.args, **given.kwargs)

    # A partial, in which doctest looks for examples, as it does in a cached function.
    return cast(F, functools.update_wrapper(functools.partial(call), function))


def check_fields(made: Any) -> None:
    """Check a frozen dataclass's fields against their annotations, as its ``__post_init__``."""
    for name, value in check_types(vars(made), get_type_hints(type(made))).items():
        object.__setattr__(made, name, value)


class _Misfit(Exception):
    """A value is not of the annotated type."""


def _fitted(value: Any, annotation: Any) -> Any:
    """Return ``value``, with a list as a tuple where one is annotated, or raise :class:`_Misfit`."""
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind in (Union, types.UnionType):
        for part in parts:
            with contextlib.suppress(_Misfit):
                return _fitted(value, part)
        raise _Misfit
    if kind is Literal:
        for option in parts:  # True == 1, but is none of the numbers
            if isinstance(value, type(option)) and value == option and not isinstance(value, bool):
                return option
        raise _Misfit
    if kind in (list, tuple) and (kind is list or parts[1:] == (...,)):
        return kind(_fitted(plain(part), parts[0]) for part in _fitted(value, list | tuple))
    if annotation in (int, float):
        fits = isinstance(value, int | annotation) and not isinstance(value, bool)
        if not fits or (annotation is float and not abs(value) <= sys.float_info.max):
            raise _Misfit
        return value
    known = isinstance(annotation, type) and annotation.__module__ not in ("typing", "jaxtyping")
    if known and not isinstance(value, annotation):
        raise _Misfit
    return value


def _words(annotation: Any) -> str:
    """Return what was expected, as the end of a sentence."""
    if get_origin(annotation) is Literal:
        return f"expected {', '.join(map(repr, get_args(annotation)[:-1]))} or {get_args(annotation)[-1]!r}"
    return f"expected {_noun(annotation)}"


def _noun(annotation: Any, many: bool = False) -> str:
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind in (Union, types.UnionType):
        return " or ".join(_noun(part, many) for part in parts if part is not int or float not in parts)
    if kind is Literal:
        return " or ".join(map(repr, parts))
    if kind in (list, tuple):
        return f"{'lists' if many else 'a list'} of {_noun(parts[0], many=True)}"
    one, several = _NOUNS.get(annotation, (f"a {getattr(annotation, '__name__', annotation)}",) * 2)
    return several if many else one


_NOUNS: dict[Any, tuple[str, str]] = {
    bool: ("True or False", "True or False"),
    int: ("an integer", "integers"),
    float: ("a finite number", "finite numbers"),
    str: ("a text", "texts"),
    dict: ("an object of named values", "objects of named values"),
    type(None): ("None", "None"),
}


def is_float(dtype: Any) -> bool:
    """Return whether something is, or names, a dtype of floats."""
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False
