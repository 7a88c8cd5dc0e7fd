"""A slot's description for both kernels, in one int32: its position, whether it is protected, whether it is free."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.caote_topk.reference import Ends, Group, shares
from kernels_pallas.topk import best_of_heads, rank

_PROTECTED = 2**30  # beyond every position


def pack(position: Int[Array, "*shape"], protected: Bool[Array, "*shape"] | None) -> Int[Array, "*shape"]:
    """Return -1 for a free slot, else its position, plus 2^30 where it is protected."""
    if protected is None:
        return position
    return jnp.where(protected & (position >= 0), position + _PROTECTED, position)


def is_protected(slot: Int[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Return which of the packed slots are protected."""
    return slot >= _PROTECTED


def with_ends(slot: Int[Array, "B *shape"], ends: Ends | None) -> Int[Array, "B *shape"]:
    """Return packed slots, of which a row's first and last tokens are protected, too."""
    return slot if ends is None else pack(slot, ends.hold(slot) & ~is_protected(slot))


def position_of(slot: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Return the positions of packed slots, -1 where a slot is free."""
    return jnp.where(is_protected(slot), slot - _PROTECTED, slot)


def remaining(
    scores: Float[Array, "*heads S"],
    slot: Int[Array, "*heads S"],
    budget: Int[Array, "*heads 1"],
    excess: int | None,
    bits: int | None = None,
) -> Int[Array, "*heads S"]:
    """Return the positions of packed slots after the eviction, -1 where a slot is free; kernels take 1 as ``bits``."""
    position = position_of(slot)
    stays = best_of_heads(rank(scores, position >= 0), position, budget, excess, bits)
    return jnp.where(stays, position, -1)


def joined_weights(
    weights: Float[Array, "B K _ S"], position: Int[Array, "B K S"], group: Group
) -> Float[Array, "B K _ S"]:
    """Return the weights in float32; for ``group="mean"`` the mean of the heads' shares."""
    weights = weights.astype(jnp.float32)
    if group != "mean":
        return weights
    finite = (position >= 0) & jnp.isfinite(weights).all(axis=2)
    return jnp.mean(shares(weights, finite[:, :, None]), axis=2, keepdims=True)
