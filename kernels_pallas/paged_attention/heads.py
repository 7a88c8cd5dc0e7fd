"""Conversions for the kernels: the pools stay whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int, Real

from kernels_pallas.cache_attention.heads import in_groups
from kernels_pallas.cache_attention.reference import ColumnStatistics
from kernels_pallas.prepare import given_beside


def on_heads(
    kernel: Callable[..., tuple[Array, ...]],
    query: Float[Array, "B T N D"],
    key: Real[Array, "P page D"],
    value: Real[Array, "P page D"],
    position: Int[Array, "P page"],
    table: Int[Array, "B K M"],
    query_position: Int[Array, "B T"],
    *,
    key_scale: Float[Array, "P page"] | None = None,
    value_scale: Float[Array, "P page"] | None = None,
    bias: Float[Array, "P page"] | None = None,
    **options: Any,
) -> tuple[Float[Array, "B T N D"], ColumnStatistics]:
    """Run a kernel; see :func:`kernels_pallas.paged_attention`."""
    floats, beside = given_beside(key_scale, value_scale, bias)
    arrays = [key, value, position, table, *floats]
    return in_groups(kernel, query, query_position, arrays, beside, kv_heads=table.shape[1], **options)
