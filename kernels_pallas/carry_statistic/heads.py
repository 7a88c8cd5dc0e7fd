"""Conversions for the kernels: rows and heads on one axis."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Array, Float

from kernels_pallas.carry_statistic.reference import Carried


def on_heads(
    kernel: Callable[..., tuple[Array, ...]],
    before: tuple[Float[Array, "B K S"], ...],
    now: Float[Array, "B K G S"],
    factors: tuple[Float[Array, "B K"], ...],
) -> Carried:
    """Run a kernel; see :func:`kernels_pallas.carry_statistic.api.carry_statistic`."""
    B, K, G, S = now.shape
    parts = [x.reshape(B * K, S) for x in before]
    *heads, joined = kernel(parts, now.reshape(B * K, G, S), [x.reshape(B * K) for x in factors])
    return Carried(joined.reshape(now.shape), tuple(x.reshape(B, K, S) for x in heads))
