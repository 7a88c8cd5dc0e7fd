"""Conversions for the kernels: there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Array


def on_heads(kernel: Callable[..., tuple[Array, Array]], *arrays: Array, **options: Any) -> tuple[Array, Array]:
    """Run a kernel; see :func:`kernels_pallas.add_rms_norm.api.add_rms_norm`."""
    return kernel(*arrays, **options)
