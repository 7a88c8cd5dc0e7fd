"""Conversions for the kernels: the pools stay whole, and the page tables give each slot's position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int, Real

from kernels_pallas.cache_attention.heads import in_groups
from kernels_pallas.cache_attention.reference import ColumnStatistics
from kernels_pallas.paged_attention.pages import laid_out, slot_positions
from kernels_pallas.prepare import given_scales


def on_heads(
    kernel: Callable[..., tuple[Array, ...]],
    query: Float[Array, "B T N D"],
    key: Real[Array, "P page width"],
    value: Real[Array, "P page D"] | None,
    position: Int[Array, "P page"],
    table: Int[Array, "B K M"],
    query_position: Int[Array, "B T"],
    *,
    key_scale: Float[Array, "P page"] | None = None,
    value_scale: Float[Array, "P page"] | None = None,
    **options: Any,
) -> tuple[Float[Array, "B T N D"], ColumnStatistics]:
    """Run a kernel on each device's rows and KV heads; see :func:`kernels_pallas.paged_attention`."""
    pool = "p z d"
    of_slots = (scale if scale is None else laid_out(scale, table) for scale in (key_scale, value_scale))
    scales, rounded = given_scales(*of_slots)
    arrays = [(pool, key), (pool, value), ("b k s", slot_positions(position, table)), ("b k m", table)]
    arrays += [("b k s", scale) for scale in scales]
    return in_groups(kernel, query, query_position, arrays, rounded, kv_heads=table.shape[1], **options)
