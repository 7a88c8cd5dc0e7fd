"""The order of each head's tokens in the text: the call, its checks, and the choice of an implementation."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from kernels_pallas.dispatch import Implementation, dispatch
from kernels_pallas.order_tokens.reference import Order


def order_tokens(
    rank: Int[Array, "B K S"],
    position: Int[Array, "B K S"],
    *,
    shifts: bool = False,
    implementation: Implementation = "auto",
) -> Order:
    """Sort each head's slots by the position of their tokens; ranks of the step before make that a count, not a sort.

    Where ranks do not fit the tokens, by more than a step of decode changes, the slots are sorted.

    Args:
        rank: of each token in the order before, from 1 on; 0 for a token that has come in since. At most one token has
            left from between the others, and at most one, the newest, has come in. The ranks of a head's tokens are
            distinct. What a free slot has says nothing.
        position: of the token in each slot, -1 where it is free.
        shifts: whether the oldest tokens may have left, too, so that the first rank is not 1.
        implementation: "auto" takes the fastest one that can run here; one given by name runs or raises.

    Returns:
        Each head's slots in the order of their tokens, and the tokens' ranks.

    Raises:
        ValueError: if the shapes differ, or the implementation is unknown or for another platform.
        NotImplementedError: if a kernel was given by name and can't run with these arguments.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from kernels_pallas import order_tokens
        >>> rank = jnp.array([[[3, 0, 1, 4]]])  # the second one of four has left
        >>> order = jax.jit(order_tokens)(rank, jnp.array([[[5, 9, 0, 7]]]))
        >>> order.rank.tolist(), order.slot.tolist()
        ([[[2, 4, 1, 3]]], [[[2, 0, 3, 1]]])
    """
    rank, position = jnp.asarray(rank, jnp.int32), jnp.asarray(position, jnp.int32)
    if rank.shape != position.shape or position.ndim != 3:
        raise ValueError(f"ranks {rank.shape} and positions {position.shape} do not fit: expected [B, K, S] twice.")
    return dispatch("order_tokens", rank, position, shifts=shifts, implementation=implementation)
