"""Short names: how links and allocations are written on a command line, and how equal names give the same object."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from kvjax.checks import typed


def registered(table: dict[str, Callable[..., Any]], make: Callable[..., Any]) -> Callable[..., Any]:
    """Add a maker to the table of short names; its arguments are checked, and equal ones give the same object.

    Otherwise each call would make a new closure, and ``jit`` would compile again. The name of the object becomes the
    maker's name with its arguments, as :func:`written` writes them.
    """

    @functools.lru_cache(maxsize=None, typed=True)  # protect(recent=1) is not protect(recent=1.0)
    @functools.wraps(make)
    def named(*args: Any, **kwargs: Any) -> Any:
        thing = make(*args, **kwargs)
        if thing.name != make.__name__:  # another maker made and named it: caote(fast=True) is a fast_caote()
            return thing
        return dataclasses.replace(thing, name=written(make, **inspect.signature(make).bind(*args, **kwargs).arguments))

    made = typed(named)  # before the cache, as an argument of a wrong type may not be hashable
    table[make.__name__] = made
    return made


def written(make: Any, **arguments: Any) -> str:
    """Write a registered maker's name with the arguments that differ from the defaults, as :func:`called` reads it."""
    defaults = {key: parameter.default for key, parameter in inspect.signature(make).parameters.items()}
    changed = [f"{key}={value!r}" for key, value in arguments.items() if value != defaults[key]]
    return f"{make.__name__}({','.join(changed)})" if changed else make.__name__


def called(node: ast.expr, table: dict[str, Callable[..., Any]], kind: str, whole: str, how: str) -> Any:
    """Make the object that ``name`` or ``name(argument=value, ...)`` stands for.

    Args:
        kind: the kind of object for error messages, such as "policy"; ``whole`` is the whole text, and ``how`` says how
            to write it.

    Raises:
        ValueError: if a name or an argument is unknown, or a value is not a plain one.
    """
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError(f"the {kind} {whole!r} is malformed; {how}.")
    name = call.func.id
    if name not in table:
        raise ValueError(f"unknown {kind} {name!r} in {whole!r}; expected one of {', '.join(sorted(table))}.")
    try:
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except ValueError:
        raise ValueError(f"{whole!r}: the arguments of {name!r} are not plain values; {how}.") from None
    if len(arguments) < len(call.keywords):
        raise ValueError(f"{whole!r}: {name!r} is given an argument twice.")
    try:
        return table[name](**arguments)
    except TypeError as error:
        raise ValueError(f"{whole!r}: {str(error).replace('()', '')}.") from None


def check_number(name: str, what: str, value: float, low: float, high: float, expected: str) -> None:
    """Check that a number is in [low, high].

    Raises:
        ValueError: with the maker, the argument, its value and what was expected.
    """
    if not low <= value <= high:
        raise ValueError(f"{name}: {what} is {value!r}; give {expected}.")
