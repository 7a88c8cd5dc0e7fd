"""Which tokens stay: the `budget` best of each head, exactly, without a sort."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import KVCache


def evict(
    cache: KVCache,
    scores: Float[Array, "B K S"],
    budget: int | Int[Array, ""] | Int[Array, "B"],
    *,
    layer: int | Int[Array, ""] | None = None,
    excess: int | None = None,
) -> KVCache:
    """Frees the slots of all but the ``budget`` best tokens of each head. Keys and values stay where they are.

    Args:
        scores: retention scores, larger = keep. Free slots are ignored; NaN loses to everything; ties go to the more
            recent token.
        budget: how many tokens each head keeps, at least 1; one number or one a row.
        layer: which layer of a stacked cache.
        excess: a promise that no head holds more than ``budget + excess`` tokens. With 1, as in decode, the selection
            is an argmin.

    Raises:
        ValueError: scores that do not fit the cache, a budget below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> import kvjax
        >>> cache = kvjax.KVCache.init(batch=1, kv_heads=1, slots=3, head_dim=2)
        >>> cache = kvjax.insert(cache, jnp.ones((1, 3, 1, 2)), jnp.ones((1, 3, 1, 2)))
        >>> kvjax.evict(cache, jnp.array([[[0.5, 0.1, 0.1]]]), budget=2).position.tolist()
        [[[0, -1, 2]]]
    """
    position = cache.position if layer is None else cache.position[layer]
    position = jnp.where(keep_mask(scores, position, budget, excess=excess), position, -1)
    if layer is not None:
        position = cache.position.at[layer].set(position)
    return dataclasses.replace(cache, position=position)


def keep_mask(
    scores: Float[Array, "*head S"],
    position: Int[Array, "*head S"],
    budget: int | Int[Array, ""] | Int[Array, "B"],
    *,
    excess: int | None = None,
) -> Bool[Array, "*head S"]:
    """The ``budget`` best live slots of each head; all of them where no more than that are live.

    The smallest score that stays is found by bisection over the bit patterns of float32, 32 counts over S, and ties
    by bisection over the positions: exact, the same on every backend, and free of sorts (0.5 ms against 8 ms for a
    sort at K 8, S 8,320 on two CPU cores).

    Example:
        >>> import jax.numpy as jnp
        >>> from kvjax import keep_mask
        >>> keep_mask(jnp.array([1.0, 3.0, 2.0]), jnp.array([0, 1, 2]), 2).tolist()
        [False, True, True]
    """
    if scores.shape != position.shape:
        raise ValueError(f"scores {scores.shape} do not fit the slots: expected {position.shape}.")
    if isinstance(budget, int) and budget < 1:
        raise ValueError(f"the budget is {budget}; at least 1 token must stay.")
    live = position >= 0
    budget = jnp.asarray(budget, jnp.int32)
    if budget.ndim:
        budget = budget.reshape(-1, *(1,) * min(position.ndim - 2, 1))  # B stands before K; layers stand before B
    budget = jnp.broadcast_to(budget, position.shape[:-1])  # [*head]

    rank = jnp.where(live & ~jnp.isnan(scores), _ordered_bits(scores), _LOWEST)
    rank = jnp.where(live, jnp.maximum(rank, _LOWEST + 1), _LOWEST)  # a live slot beats a free one, even with NaN
    if excess == 1:
        return live & ~(_worst(rank, position) & (jnp.sum(live, axis=-1) > budget)[..., None])

    # No lax.cond around the ties: its predicate would join all heads, and cost a collective on a mesh.
    threshold = _nth_largest(rank, budget)[..., None]
    above, tied = rank > threshold, (rank == threshold) & live
    room = budget - jnp.sum(above, axis=-1, dtype=jnp.int32)
    recency = jnp.where(tied, position, _LOWEST)
    return above | (tied & (recency >= _nth_largest(recency, room)[..., None]))


def _worst(rank: Int[Array, "*head S"], position: Int[Array, "*head S"]) -> Bool[Array, "*head S"]:
    """The live slot with the lowest rank, the oldest one among equals."""
    rank = jnp.where(position >= 0, rank, jnp.iinfo(jnp.int32).max)
    tied = (rank == jnp.min(rank, axis=-1, keepdims=True)) & (position >= 0)
    age = jnp.where(tied, position, jnp.iinfo(jnp.int32).max)
    return tied & (age == jnp.min(age, axis=-1, keepdims=True))


_LOWEST = jnp.iinfo(jnp.int32).min


def _ordered_bits(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """An int32 that orders like the float32: -inf first, -0 equal to 0, +inf last."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    bits = jnp.where(bits == _LOWEST, 0, bits)  # -0; XLA would take away a "+ 0.0"
    return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)


def _nth_largest(x: Int[Array, "*head S"], n: Int[Array, "*head"]) -> Int[Array, "*head"]:
    """The n-th largest entry (counted from 1) along the last axis; int32's lowest where n exceeds S."""

    def halve(_, bounds):
        low, high = bounds  # the answer lies in [low, high]
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # rounded up, without overflow
        enough = jnp.sum(x >= middle[..., None], axis=-1, dtype=jnp.int32) >= n
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    low = jnp.full(x.shape[:-1], _LOWEST, jnp.int32)
    high = jnp.full(x.shape[:-1], jnp.iinfo(jnp.int32).max, jnp.int32)
    return jax.lax.fori_loop(0, 32, halve, (low, high))[0]
