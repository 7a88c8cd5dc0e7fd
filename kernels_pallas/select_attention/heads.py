"""Conversions for the kernels: queries are grouped by KV head and by the set of slots that they read."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Real

from kernels_pallas.prepare import given_beside, in_sets


def on_heads(
    kernel: Callable[..., tuple[Array, ...]],
    query: Float[Array, "B T N D"],
    key: Real[Array, "B K S D"],
    value: Real[Array, "B K S D"],
    slots: Int[Array, "B H M"],
    *,
    scale: float,
    soft_cap: float | None = None,
    key_scale: Float[Array, "B K S"] | None = None,
    value_scale: Float[Array, "B K S"] | None = None,
    sink_logits: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N D"]:
    """Run a kernel; see :func:`kernels_pallas.select_attention`."""
    B, T, N, D = query.shape
    (_, H, M), K = slots.shape, key.shape[1]
    grouped = query.reshape(B, T, K, H // K, N // H, D).transpose(0, 2, 3, 1, 4, 5)  # [B, K, H / K, T, N / H, D]
    scales, beside = given_beside(key_scale, value_scale)
    chosen = slots.astype(jnp.int32).reshape(B, K, H // K, M)
    options = dict(beside=beside, scale=scale, soft_cap=soft_cap, sinks=in_sets(sink_logits, H))
    (out,) = kernel(grouped, key, value, chosen, *scales, **options)
    return out.transpose(0, 3, 1, 2, 4, 5).reshape(B, T, N, D)
