"""Short names: how links and allocations are written on a command line, and how equal names give the same object."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from kvjax._src.calibration import checked_content
from kvjax._src.checks import MOST, check_types, nearest, shown
from kvjax._src.registry import Registry


def makers[Made](
    kind: str, group: str | None, made: type[Made], built_in: tuple[str, ...] = ()
) -> Registry[Callable[..., Made]]:
    """Return a registry of functions that make things of one kind, which short names call.

    Their arguments are checked, and equal ones give the same object: otherwise each call would make a new closure, and
    ``jit`` would compile again. The name of the object becomes the maker's name with its arguments, as :func:`written`
    writes them. A maker that reads a file has the arguments ``file`` and ``content``: the name then has a digest of
    what the file held, so that results and caches that are found by name are those of the same numbers.
    """

    def prepare(name: str, make: Any) -> Callable[..., Made]:
        if not callable(make) or getattr(make, "__name__", None) != name:
            raise ValueError(f"{name!r} is {shown(make)}; expected a function named {name} that makes a {kind}.")

        signature = inspect.signature(make)
        reads = {"file", "content"} <= signature.parameters.keys()

        @functools.lru_cache(maxsize=None, typed=True)  # protect(recent=1) is not protect(recent=1.0)
        def named(**arguments: Any) -> Any:
            thing: Any = make(**arguments)
            if not issubclass(type(thing), made):
                raise ValueError(f"{name} returned {shown(thing)}; expected a {made.__name__}.")
            if thing.name != name:  # another maker made and named it: streaming(sinks=0) is recency
                return thing
            return dataclasses.replace(thing, name=written(make, **arguments))

        @functools.wraps(make)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                known = list(signature.parameters)
                wrong = [key for key in kwargs if key not in known]
                takes = f"it takes {', '.join(known) or 'no arguments'}.{nearest(*wrong, known=known)}"
                raise TypeError(f"{name}() {error}; {takes}") from None
            given = check_types(given, get_type_hints(make), name)  # before the cache: it may not be hashable
            if reads and given.get("file") is not None:
                given["content"] = checked_content(name, given["file"], given.get("content"))
                given = signature.bind(**given).arguments  # in the order of the signature, as names have them
            defaults = signature.parameters
            return named(**{key: value for key, value in given.items() if value != defaults[key].default})

        return checked

    return Registry(kind, group, prepare, built_in)


def registered(registry: Registry[Callable[..., Any]], make: Callable[..., Any]) -> Callable[..., Any]:
    """Add a maker to a registry under its own name, and return it as it was added."""
    return registry.add(make.__name__, make, source=make.__module__)


def written(make: Any, **arguments: Any) -> str:
    """Write a registered maker's name with the arguments that differ from the defaults, as :func:`called` reads it."""
    defaults = {key: parameter.default for key, parameter in inspect.signature(make).parameters.items()}
    changed = [f"{key}={value!r}" for key, value in arguments.items() if value != defaults[key]]
    return f"{make.__name__}({','.join(changed)})" if changed else make.__name__


def read(text: str, kind: str, how: str) -> ast.expr:
    """Read a short name as an expression of Python's, for :func:`called`; messages say its kind and how to write it."""
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError, AttributeError):  # the last one: no text
        raise ValueError(f"the {kind} {shown(text)} is malformed; {how}.") from None


def called(node: ast.expr, registry: Registry[Callable[..., Any]], whole: str, how: str) -> Any:
    """Make the object that ``name`` or ``name(argument=value, ...)`` stands for; messages quote the whole text."""
    kind = registry.kind
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError(f"the {kind} {whole!r} is malformed; {how}.")
    name = call.func.id
    make = registry.find(name)
    if make is None:
        near = nearest(name, known=registry.names())
        raise ValueError(f"unknown {kind} {name!r} in {whole!r}; expected one of {', '.join(registry.names())}.{near}")
    if call.args:
        value, first = ast.unparse(call.args[0]), next(iter(inspect.signature(make).parameters), None)
        expected = f"{name!r} takes none" if first is None else f"write {name}({first}={value})"
        raise ValueError(f"{whole!r}: {value} has no name, but arguments are given by name: {expected}.")
    try:
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except ValueError:
        raise ValueError(f"{whole!r}: the arguments of {name!r} are not plain values; {how}.") from None
    if len(arguments) < len(call.keywords):
        raise ValueError(f"{whole!r}: {name!r} is given an argument twice.")
    try:
        return make(**arguments)
    except TypeError as error:
        raise ValueError(f"{whole!r}: {str(error).replace('()', '')}") from None


def check_number(name: str, what: str, value: float, low: float, high: float, expected: str) -> None:
    """Check that a number is in [low, high]."""
    if not low <= value <= high:
        raise ValueError(f"{name}: {what} is {value!r}; give {expected}.")


def check_protected(name: str, **amounts: int | float) -> None:
    """Check numbers of first or last tokens, each a count or a share of the budget."""
    for what, amount in amounts.items():
        high = 1 if isinstance(amount, float) else MOST
        check_number(name, what, amount, 0, high, "a count (an int from 0) or a share of the budget in [0, 1]")
