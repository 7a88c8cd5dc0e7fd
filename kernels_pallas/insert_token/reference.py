"""The definition, in plain JAX: a search for each head's first free slot, then one scatter for each array."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

Entries = dict[str, Any]  # arrays [B, K, S, ...] by name, or those of tokens; "key" and "value" at least


class Inserted(NamedTuple):
    """A cache after a token per row: its arrays, and the slot that the token has in each head, S where it has none.

    ``state`` are further arrays, whose numbers are 0 for the token.
    """

    entries: Entries
    position: Int[Array, "B K S"]
    next_position: Int[Array, "B"]
    slot: Int[Array, "B K"]
    state: list[Array]


def insert_token(
    entries: Entries,
    position: Int[Array, "B K S"],
    next_position: Int[Array, "B"],
    new: Entries,
    new_position: Int[Array, "B"],
    state: list[Array],
    *,
    room: bool,
) -> Inserted:
    """See :func:`kernels_pallas.insert_token.api.insert_token`."""
    S, valid = position.shape[2], (new_position >= 0)[:, None]
    slot = first_free(position < 0)
    if not room:
        lost = valid & (slot >= S)
        slot, new = jnp.where(lost, S - 1, slot), unreadable(new, lost)
    slot = jnp.where(valid, slot, S)  # out of bounds: not written
    # One slot: a select becomes a part of the programs that read the slots next; a scatter is one of its own.
    is_here = jax.lax.broadcasted_iota(jnp.int32, position.shape, 2) == slot[..., None]

    def entered(leaf: Array) -> Array:
        return jnp.where(is_here.reshape(*is_here.shape, *(1,) * (leaf.ndim - 3)), jnp.zeros((), leaf.dtype), leaf)

    return Inserted(
        {name: write_slots(entries[name], new[name][:, :, None], slot[..., None]) for name in entries},
        jnp.where(is_here, new_position[:, None, None], position),
        jnp.maximum(next_position, new_position + 1),
        slot,
        [entered(leaf) for leaf in state],
    )


def first_free(free: Bool[Array, "B K S"]) -> Int[Array, "B K"]:
    """Return the first free slot of each head; S where there is none."""
    return jnp.min(jnp.where(free, jax.lax.broadcasted_iota(jnp.int32, free.shape, 2), free.shape[2]), axis=-1)


def unreadable(entries: Entries, lost: Bool[Array, "*heads"] | None) -> Entries:
    """Return keys and values with NaN as keys where tokens are lost, so that what attends over them is NaN."""
    if lost is None:
        return entries
    name = marked(entries)
    lost = lost.reshape(*lost.shape, *(1,) * (entries[name].ndim - lost.ndim))
    return entries | {name: jnp.where(lost, jnp.nan, entries[name]).astype(entries[name].dtype)}


def marked(entries: Entries) -> str:
    """Return the name of the array in which NaN marks keys: of keys in eight bits, their scales."""
    return "key_scale" if "key_scale" in entries else "key"


# The slots of one call are distinct. Pages are not, as rows of a call may share them: they take another scatter.
_overwrite = functools.partial(jax.lax.scatter, unique_indices=True)


def write_slots(
    array: Array, new: Array, slot: Int[Array, "B K T"], scatter: Callable[..., Array] = _overwrite
) -> Array:
    """Set array[b, k, slot[b, k, t]] = new[b, k, t], as one scatter that is parallel in b and k.

    The batching dimensions are given, so that a cache sharded over them is updated without communication. With
    ``jax.lax.scatter_min``, for example, the smaller of the old and the new stays.
    """
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(3, new.ndim)),
        inserted_window_dims=(2,),
        scatter_dims_to_operand_dims=(2,),
        operand_batching_dims=(0, 1),
        scatter_indices_batching_dims=(0, 1),
    )
    return scatter(array, slot[..., None], new, numbers, mode="drop")
