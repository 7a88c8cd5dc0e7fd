"""Conversions for the kernels: rows and heads on one axis."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Array, Int

from kernels_pallas.order_tokens.reference import Order


def on_heads(
    kernel: Callable[..., tuple[Array, Array]],
    rank: Int[Array, "B K S"],
    position: Int[Array, "B K S"],
    *,
    shifts: bool,
) -> Order:
    """Run a kernel; see :func:`kernels_pallas.order_tokens.api.order_tokens`."""
    S = position.shape[-1]
    rank, slot = kernel(rank.reshape(-1, S), position.reshape(-1, S), shifts=shifts)
    return Order(slot.reshape(position.shape), rank.reshape(position.shape))
