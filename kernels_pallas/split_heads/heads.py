"""Conversions for the kernels: there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Array

from kernels_pallas.split_heads.reference import QueryKeyValue


def on_heads(kernel: Callable[..., tuple[Array, ...]], *arrays: Array | None, **options: Any) -> QueryKeyValue:
    """Run a kernel; see :func:`kernels_pallas.split_heads.api.split_heads`."""
    return QueryKeyValue(*kernel(*arrays, **options))
