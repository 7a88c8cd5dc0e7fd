"""Exact selection: :func:`keep_mask` per head, ``best_of_groups`` for heads that compete; and shares of a budget."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kernels_pallas.topk import LOWEST, best, best_of_heads, bits_here, keep_mask, nth_largest, rank

__all__ = ["best_of_groups", "best_of_heads", "keep_mask", "rank", "share_of", "summed"]


def best_of_groups(
    scores: Float[Array, "*heads S"],
    position: Int[Array, "*heads S"],
    head: Int[Array, "*heads"],
    group: Int[Array, "*heads"],
    budget: Int[Array, "groups"],
    groups: int,
    axis: str | tuple[()] | None = None,
) -> Bool[Array, "*heads S"]:
    """Return a mask of the ``budget`` best live slots of each group: :func:`keep_mask` with several heads per budget.

    ``head`` and ``group`` are the numbers of each line's head and group; of tokens with the same score and position,
    the one in the lowest head stays. Counts are added up over the mesh ``axis`` that splits the heads, if there is one.
    """

    def count(mask: Array) -> Array:
        counts = jnp.sum(mask, axis=-1, dtype=jnp.int32)
        return summed(jax.ops.segment_sum(counts.ravel(), group.ravel(), groups), axis)

    def of_head(x: Array) -> Array:
        return x[group][..., None]

    ranks, bits = rank(scores, position >= 0), bits_here()
    stays, tied = best(ranks, position, budget, count, of_head, bits)
    # Apart from the position: position * heads + head would overflow in long sequences. A head has one such token.
    order = jnp.where(tied.any(axis=-1), -head, LOWEST)[..., None]
    last = of_head(nth_largest(lambda least: count(order >= of_head(least)), budget - count(stays), bits))
    return stays | (tied & (order >= last))


def summed(x: Shaped[Array, "*shape"], axis: str | tuple[()] | None) -> Shaped[Array, "*shape"]:
    """Return the sum over the devices of a mesh axis, or the array itself for None or (): all is on one device."""
    return jax.lax.psum(x, axis) if axis else x


def share_of(share: int | float, budget: Any) -> Any:
    """Return floor(share * budget), in integers and with the share to four digits: inside jit floats are float32."""
    whole, part = divmod(round(share * 10_000), 10_000)
    return budget * whole + budget // 10_000 * part + budget % 10_000 * part // 10_000
