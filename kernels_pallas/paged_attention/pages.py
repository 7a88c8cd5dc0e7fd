"""Page tables: each head's pages in order, -1 where there is none. Slot s of a head is in its page s // page."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def laid_out(pool: Shaped[Array, "P page *rest"], table: Int[Array, "*heads M"]) -> Shaped[Array, "*heads S *rest"]:
    """Copy each head's pages one after another to ``S = M * page`` slots, undefined where a head has no page."""
    return jnp.asarray(pool)[table].reshape(*table.shape[:-1], table.shape[-1] * pool.shape[1], *pool.shape[2:])


def slot_positions(position: Int[Array, "P page"], table: Int[Array, "*heads M"]) -> Int[Array, "*heads S"]:
    """Return the positions of each head's tokens, ``S = M * page``; -1 where a slot is free or the head has no page."""
    there = jnp.repeat(table >= 0, position.shape[1], axis=-1)
    return jnp.where(there, laid_out(position, table), -1)


def table_ends(table: Int[Array, "*heads M"]) -> Int[Array, "*heads"]:
    """Return the index after each head's last page in its row of the table."""
    return jnp.max(jnp.where(table >= 0, jnp.arange(1, table.shape[-1] + 1), 0), axis=-1).astype(jnp.int32)
