"""Conversions for the kernels: layers, rows and heads on one axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int


def on_heads(
    kernel: Callable[..., Array],
    scores: Float[Array, "*L B K S"],
    position: Int[Array, "*L B K S"],
    budget: Int[Array, "B"],
    **options: Any,
) -> Int[Array, "*L B K S"]:
    """Run a kernel; see :func:`kernels_pallas.keep_topk.api.keep_topk`."""
    *_, K, S = position.shape
    kept = kernel(scores.reshape(-1, S), position.reshape(-1, S), budget, heads=K, **options)
    return kept.reshape(position.shape)
