"""Vectors of eight bits in the kernels: which dtypes are read, and how a chunk of vectors becomes floats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Real

from kernels_pallas.dispatch import compute_capability

EIGHT_BITS = ("int8", "float8_e4m3fn")
FLOAT8_FROM = 89  # Triton converts float8_e4m3fn from compute capability 8.9 on (Ada, Hopper)


def widened(vectors: Real[Array, "*slots D"], like: DTypeLike) -> Float[Array, "*slots D"]:
    """Return vectors of eight bits as floats of a dtype, in which every one of them is exact; floats as they are."""
    return vectors.astype(jnp.float32).astype(like) if vectors.dtype.itemsize == 1 else vectors


def filler(dtype: DTypeLike) -> int | float:
    """Return 0 as a masked load of Triton takes it: a float for floats, as no int becomes a float of eight bits."""
    return 0.0 if jnp.issubdtype(dtype, jnp.floating) else 0


def unread(floats: Sequence[str], numbers: Mapping[str, Any], vectors: Mapping[str, Any]) -> str | None:
    """Return which array has a dtype that a kernel does not read, as a reason to refuse it; None if all are read.

    ``numbers`` are arrays of ``floats``; ``vectors`` may also be of eight bits.
    """
    for arrays, dtypes in ((numbers, floats), (vectors, (*floats, *EIGHT_BITS))):
        for name, x in arrays.items():
            if x.dtype.name not in dtypes:
                return f"{name} are {x.dtype}, but the kernels take {', '.join(dtypes)}"
    return None


def unread_on_gpu(*vectors: Any) -> str | None:
    """Return why the GPU of this program cannot read vectors, as a reason to refuse them; None if it can."""
    if all(x.dtype != "float8_e4m3fn" for x in vectors):
        return None
    capability = compute_capability()
    if capability is None or capability >= FLOAT8_FROM:
        return None
    return (
        f"keys or values are float8_e4m3fn, which Triton reads from compute capability {FLOAT8_FROM / 10} on, and "
        f"this GPU has {capability / 10}"
    )
