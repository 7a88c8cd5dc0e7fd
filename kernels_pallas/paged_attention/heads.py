"""Conversions for the kernels: the pools stay whole, and the page tables give each slot's position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int

from kernels_pallas.cache_attention.heads import in_groups
from kernels_pallas.cache_attention.reference import ColumnStatistics
from kernels_pallas.paged_attention.pages import slot_positions


def on_heads(
    kernel: Callable[..., tuple[Array, ...]],
    query: Float[Array, "B T N D"],
    key: Float[Array, "P page D"],
    value: Float[Array, "P page D"],
    position: Int[Array, "P page"],
    table: Int[Array, "B K M"],
    query_position: Int[Array, "B T"],
    **options: Any,
) -> tuple[Float[Array, "B T N D"], ColumnStatistics]:
    """Run a kernel on each device's rows and KV heads; see :func:`kernels_pallas.paged_attention`."""
    pool = "p z d"
    arrays = [(pool, key), (pool, value), ("b k s", slot_positions(position, table)), ("b k m", table)]
    return in_groups(kernel, query, query_position, arrays, kv_heads=table.shape[1], **options)
