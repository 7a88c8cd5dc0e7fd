"""Insertion of one token per row: the call, its checks, and the choice of an implementation."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Array, Int

from kernels_pallas.dispatch import Implementation, dispatch
from kernels_pallas.insert_token.reference import Entries, Inserted


def insert_token(
    entries: Entries,
    position: Int[Array, "B K S"],
    next_position: Int[Array, "B"],
    new: Entries,
    new_position: Int[Array, "B"],
    state: Sequence[Array] = (),
    *,
    room: bool = False,
    implementation: Implementation = "auto",
) -> Inserted:
    """Write one token per row into the first free slot of each head; under jit, where arrays are donated, in place.

    Where a head has no free slot, the token overwrites the last one, with NaN as its key (or the key's scale), so that
    what attends over it is NaN.

    Args:
        entries: arrays ``[B, K, S, ...]`` by name: "key" and "value", and whatever else there is per slot, such as
            "key_scale".
        position: the position of the token in each slot, -1 where it is free.
        next_position: the position of each row's next token.
        new: the token's ``[B, K, ...]``, by the same names and in the same dtypes.
        new_position: its position, -1 for padding, of which nothing is written.
        state: further arrays ``[B, K, S, ...]``, in which the token has zeros.
        room: promises a free slot in each head that a token enters; without one it is left out.

    Returns:
        The arrays with the token, ``next_position`` behind it, its slot in each head, S where there is none, and the
        ``state``.

    Raises:
        ValueError: if arrays do not fit, or the implementation is unknown or for another platform.
        NotImplementedError: if a kernel was given by name and can't run with these arguments.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from kernels_pallas import insert_token
        >>> cache = dict(key=jnp.zeros((1, 1, 3, 2)), value=jnp.zeros((1, 1, 3, 2)))
        >>> token = dict(key=jnp.ones((1, 1, 2)), value=jnp.ones((1, 1, 2)))
        >>> held = jnp.array([[[0, -1, 1]]])
        >>> inserted = jax.jit(insert_token)(
        ...     cache, held, jnp.array([2]), token, jnp.array([2])
        ... )
        >>> inserted.position.tolist(), inserted.slot.tolist()
        ([[[0, 2, 1]]], [[1]])
    """
    B, K, S = position.shape
    for name, array in entries.items():
        own = (array.shape[:3], new[name].shape, new[name].dtype) if name in new else None
        if own != ((B, K, S), (B, K, *array.shape[3:]), array.dtype):
            raise ValueError(f"{name} {array.dtype} {array.shape} does not fit positions {position.shape}, or a token.")
    if next_position.shape != (B,) or new_position.shape != (B,):
        raise ValueError(f"next_position {next_position.shape} and new_position {new_position.shape} are not ({B},).")
    for leaf in state:
        if leaf.shape[:3] != (B, K, S):
            raise ValueError(f"an array {leaf.shape} of the state does not fit positions {position.shape}.")
    given = entries, position, next_position, new, new_position, list(state)
    return dispatch("insert_token", *given, room=room, implementation=implementation)
