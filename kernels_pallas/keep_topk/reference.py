"""The definition, in plain JAX: a search over the scores' bit patterns, and one over the positions that tie."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.topk import best_of_heads, rank


def keep_topk(
    scores: Float[Array, "*L B K S"],
    position: Int[Array, "*L B K S"],
    budget: Int[Array, "B"],
    *,
    excess: int | None,
) -> Int[Array, "*L B K S"]:
    """See :func:`kernels_pallas.keep_topk.api.keep_topk`."""
    each = jnp.broadcast_to(budget[:, None, None], (*position.shape[:-1], 1))
    return jnp.where(best_of_heads(rank(scores, position >= 0), position, each, excess), position, -1)
