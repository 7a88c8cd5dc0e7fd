"""The tiers of the suite: what has no mark runs by default; ``matrix`` and ``nightly`` hold the products of options."""

from collections.abc import Iterable
from typing import Any

import pytest

matrix = pytest.mark.matrix
nightly = pytest.mark.nightly


def first(count: int, values: Iterable[Any], rest: pytest.MarkDecorator = matrix) -> list[Any]:
    """Return values for ``parametrize``: the first ``count`` run by default, the others with the mark ``rest``.

    ``first(1, first(3, values, rest=nightly))`` has one by default, two in the matrix, and the others nightly.
    """
    return [value if number < count else _marked(value, rest) for number, value in enumerate(values)]


def _marked(value: Any, mark: pytest.MarkDecorator) -> Any:
    if hasattr(value, "marks"):  # a pytest.param
        return pytest.param(*value.values, marks=[*value.marks, mark], id=value.id)
    return pytest.param(*value, marks=mark) if isinstance(value, tuple) else pytest.param(value, marks=mark)
