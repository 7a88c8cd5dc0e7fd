"""Keys and queries turned to other places than those of their tokens in the text: positions "index" and "compact"."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.order_tokens.reference import by_position
from kvjax._src.cache import KVCache, within
from kvjax._src.observation import Context
from kvjax._src.rotary import move


def next_index(here: KVCache, position: Int[Array, "B T"], context: Context) -> Int[Array, "B K"]:
    """Return the place of a block's first token in each head if places count the tokens that the head holds.

    What has left a sliding window counts whether it is still held or not, so that nothing moves when it is freed.
    """
    if context.sliding_window is None:
        return here.num_live
    # The layers share next_position, so after layer 0 it is behind the block already.
    first = jnp.min(jnp.where(position < 0, jnp.iinfo(jnp.int32).max, position), axis=1)
    first = jnp.minimum(first, here.next_position)
    left = jnp.maximum(first - context.sliding_window + 1, 0)
    return within(dataclasses.replace(here, next_position=first), context.sliding_window).num_live + left[:, None]


def turn_to_index(
    first: Int[Array, "B K"],
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    position: Int[Array, "B T"],
    context: Context,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B T K D"]]:
    """Rotate a block as if the positions of its tokens were ``first`` and those behind it."""
    B, T, K, D = key.shape
    valid = position >= 0
    index = first[:, None] + jnp.cumsum(valid, axis=1)[..., None] - 1  # [B, T, K]
    start, end = (jnp.where(valid[..., None], x, 0) for x in (position[..., None], index))
    frequency = context.rotary("a block is turned")[:, None, None]  # [B or 1, 1, 1, D / 2]
    grouped = query.reshape(B, T, K, -1, D)
    grouped = move(grouped, start[..., None], end[..., None], frequency[:, :, None])
    return grouped.reshape(query.shape), move(key, start, end, frequency)


def turn_to_rank(
    here: KVCache, query: Float[Array, "B T heads D"], position: Int[Array, "B T"], context: Context
) -> tuple[KVCache, Float[Array, "B T heads D"]]:
    """Return the layer and queries as if the tokens of each head had consecutive positions."""
    K = here.position.shape[1]
    frequency = context.rotary("keys are turned")[:, None, None]
    rank = by_position(here.position).rank - 1
    start, end = (jnp.where(here.live, x, 0) for x in (here.position, rank))
    key = move(here.key, start, end, frequency)
    valid = position >= 0
    before = here.num_live[:, None] - jnp.sum(valid, axis=1)[:, None, None]  # [B, 1, K]: the block is the newest
    own = before + jnp.cumsum(valid, axis=1)[..., None] - 1  # [B, T, K]
    start, end = (jnp.where(valid[..., None], x, 0) for x in (position[..., None], own))
    grouped = query.reshape(*query.shape[:2], K, -1, query.shape[-1])
    grouped = move(grouped, start[..., None], end[..., None], frequency[:, None])
    return dataclasses.replace(here, entries=here.entries | {"key": key}), grouped.reshape(query.shape)
