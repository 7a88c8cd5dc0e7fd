"""The ranks of a head's tokens in the text, from which a decode step continues their order.

A policy that reads the order (``Needs.order``) keeps each token's rank in the cache's state; an eviction writes them. A
token that has come in since has rank 0, and there is a gap where one has left. In a decode step that is at most one gap
between other tokens, of that eviction, which :func:`kernels_pallas.order_tokens` finds; besides, the oldest may have
left a sliding window, and the newest may have been taken back. Blocks of several tokens sort.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax._src.cache import AnyKind, map_parts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ranked:
    """A policy's state with the ranks of the tokens: 1 or more, and larger for newer ones; 0 for one not ranked yet."""

    rank: Int[Array, "*slots"]
    others: Any


def renewed(cache: AnyKind, state: Any, rank: Int[Array, "*slots"] | None, after: Any, gap: bool) -> Any:
    """Return a cache's state with the ranks of an eviction's evidence; ``after`` are the positions that it leaves.

    Unless it may leave a ``gap``, of one token, the ranks of those that stay count on without any.
    """
    if rank is None:
        return state
    if not gap:
        most = cache.num_slots + 1
        known, head = (after >= 0) & (rank > 0), cache.heads()[..., None]
        stays = jnp.zeros((math.prod(cache.heads_shape), most), jnp.int32)
        stays = stays.at[head, jnp.where(known, rank, most)].set(1, mode="drop", unique_indices=True)
        rank = jnp.where(known, jnp.cumsum(stays, axis=-1, dtype=jnp.int32)[head, rank], 0)
    return map_parts(lambda part: dataclasses.replace(part, rank=rank), state, Ranked)
