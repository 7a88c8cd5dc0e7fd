"""Public names that are imported on first use (PEP 562), so that a command reads its flags before it imports JAX."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any


def on_first_use(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package, whose names in ``__all__`` are imported on first use.

    The package's source says where from, in imports under ``if TYPE_CHECKING``, which type checkers and editors read.
    No module of the package may have a public name: once imported, it would stand in that name's place.
    """
    module = sys.modules[package]

    @functools.cache
    def places() -> dict[str, str]:
        imports = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.ImportFrom)]
        return {alias.name: str(node.module) for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name not in module.__all__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=module)
        place = places()[name]
        is_module = place == package  # `from kvjax import allocation`
        found = importlib.import_module(f"{package}.{name}" if is_module else place)
        setattr(module, name, found if is_module else getattr(found, name))
        return vars(module)[name]

    return get, lambda: sorted({*vars(module), *module.__all__})
