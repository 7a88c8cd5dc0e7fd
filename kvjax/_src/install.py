"""Look at what is installed: whether the packages beside kvjax are its own, and which of its extras are missing."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {  # of the extras that a command line tells
    "eval": ("rouge", "rouge_score", "math_verify"),
    "train": ("optax", "orbax", "tensorboardX", "zstandard"),
    "plot": ("matplotlib",),
    "gguf": ("gguf",),
}


def line(*extras: str) -> str:
    """Return the command that installs extras: from the checkout that this package is in, else from the index."""
    names = ",".join(extras)
    if not (ROOT / "pyproject.toml").is_file():
        return f"pip install {shlex.quote(f'kvjax[{names}]')}"
    place = "." if Path.cwd() == ROOT else ROOT
    return f"pip install -e {shlex.quote(f'{place}[{names}]')}"


def missing(*extras: str) -> dict[str, list[str]]:
    """Return the packages that are not installed, for each extra that lacks any."""
    lacks = {extra: [name for name in PACKAGES[extra] if importlib.util.find_spec(name) is None] for extra in extras}
    return {extra: names for extra, names in lacks.items() if names}


def needed(packages: Iterable[str], *extras: str) -> str:
    """Return a sentence that names missing packages, and the command that installs the extras with them."""
    *most, last = dict.fromkeys(packages)
    named, many = f"{', '.join(most)} and {last}" if most else last, bool(most)
    return f"{named} {'are' if many else 'is'} not installed; install {'them' if many else 'it'} with: {line(*extras)}."


def check_packages(*names: str) -> None:
    """Check that each of ``names``, such as "models", is found beside this package and not somewhere else.

    The wheel installs top-level packages with common names. A folder of the same name in the working directory, or
    another distribution, can hide them.

    Raises:
        ImportError: another package of that name is found first, or none.
    """
    for name in names:
        spec = importlib.util.find_spec(name)
        wanted = ROOT / name / "__init__.py"
        found = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
        if found != wanted:
            raise ImportError(f"the package {name!r} was found at {found or 'no file'}, not at {wanted}; rename it.")
