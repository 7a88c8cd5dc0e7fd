"""Checks that the packages installed beside kvjax are kvjax's own."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def check_packages(*names: str) -> None:
    """Check that each of ``names``, such as "models", is found beside this package and not somewhere else.

    The wheel installs top-level packages with common names. A folder of the same name in the working directory, or
    another distribution, can hide them.

    Raises:
        ImportError: another package of that name is found first, or none.

    Example:
        >>> from kvjax import install
        >>> install.check_packages("models", "kernels_pallas")
    """
    root = Path(__file__).resolve().parents[1]
    for name in names:
        spec = importlib.util.find_spec(name)
        wanted = root / name / "__init__.py"
        found = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
        if found != wanted:
            raise ImportError(
                f"the package {name!r} was found at {found or 'no file'}, expected kvjax's own at {wanted}: rename or "
                "remove the other one, or start Python in another folder."
            )
