"""Conversions for the kernels: weights in float32, joined if asked for, and one number that describes a slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Bool, Float, Int, Real

from kernels_pallas.caote_topk.reference import Group, Kept, Norm
from kernels_pallas.caote_topk.slots import joined_weights, pack


def on_heads(
    kernel: Callable[..., tuple[Array, ...]],
    weights: Float[Array, "B K _ S"],
    value: Real[Array, "B K S D"],
    position: Int[Array, "B K S"],
    budget: Int[Array, "B"],
    protected: Bool[Array, "B K S"] | None,
    *,
    norm: Norm,
    group: Group,
    with_scores: bool,
    value_scale: Float[Array, "B K S"] | None = None,
    **options: Any,
) -> Kept:
    """Run a kernel; see :func:`kernels_pallas.caote_topk`.

    ``norm`` is not passed on: it is 2, the only one that kernels support.
    """
    del norm
    scales = () if value_scale is None else (value_scale,)
    given = joined_weights(weights, position, group), value, pack(position, protected), budget, *scales
    kept, *scores = kernel(*given, with_scores=with_scores, **options)
    return Kept(kept, scores[0] if with_scores else None)
