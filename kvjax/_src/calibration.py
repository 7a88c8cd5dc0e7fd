"""Read files of what was measured of a model before it runs: its Q-Filters, and how important its heads are."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.numpy import load_file

from kvjax._src.checks import is_float


def read_array(name: str, file: str, axes: str) -> Float[np.ndarray, "..."]:
    """Read an array of a model as float32 from a .npy file, or a .safetensors file of one array, as kvpress has them.

    Args:
        name: the link or allocation that reads it, for error messages.
        axes: its axes' letters, such as "L K D".

    Raises:
        ValueError: if there is no such file, or it holds no array of finite numbers with these axes.
    """
    path, expected = Path(file), f"expected a .npy or .safetensors file with one array [{', '.join(axes.split())}]"
    try:
        if path.suffix == ".safetensors":
            arrays = list(load_file(path).values())
        else:
            arrays = [np.asarray(np.load(path, allow_pickle=False))]
    except (OSError, ValueError, EOFError, SafetensorError) as error:
        why = " ".join(str(error).split())[:200]
        raise ValueError(f"{name}: {file!r} cannot be read ({why}); {expected}.") from None
    array = arrays[0] if len(arrays) == 1 else np.array(None)
    if array.ndim != len(axes.split()) or not is_float(array.dtype) or not np.isfinite(array.astype(np.float32)).all():
        raise ValueError(f"{name}: {file!r} holds {array.dtype} {array.shape}; {expected} of finite floats.")
    return array.astype(np.float32)


def checked_content(name: str, file: str, content: str | None) -> str:
    """Return a digest of a file's bytes, after a check that it is ``content``, if a name asks for that."""
    try:
        with Path(file).open("rb") as stream:
            held = hashlib.file_digest(stream, "sha256").hexdigest()[:8]
    except OSError as error:
        why = error.strerror or "it cannot be read"
        raise ValueError(f"{name}: {file!r}: {why}; expected a .npy or .safetensors file.") from None
    if content not in (None, held):
        raise ValueError(f"{name}: {file!r} holds other numbers ({held}) than content={content}; leave that out.")
    return held
