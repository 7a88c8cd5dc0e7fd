"""The slots of largest score in each head: the call, its checks, and the choice of an implementation."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.checks import check_count, check_tokens
from kernels_pallas.dispatch import Implementation, dispatch

keep_topk_unchecked = functools.partial(dispatch, "keep_topk")  # with a budget for each row


def keep_topk(
    scores: Float[Array, "B K S"],
    position: Int[Array, "B K S"],
    budget: int | Int[Array, ""] | Int[Array, "B"],
    *,
    excess: int | None = None,
    implementation: Implementation = "auto",
) -> Int[Array, "B K S"]:
    """Free the slots of each head whose scores are the lowest, down to the budget.

    Each head keeps exactly the ``budget`` tokens of largest score, or all if it holds fewer; of tokens that tie, the
    more recent ones. NaN is the lowest score. Scores are compared as float32.

    Args:
        position: of the token in each slot, -1 where it is free; no two tokens of a head have the same.
        budget: how many tokens each head keeps, at least 1; one number or one per row.
        excess: a promise that no head holds more than ``budget + excess`` tokens. With 1, as in decode, the slot to
            free is an argmin.
        implementation: "auto" takes the fastest one that can run here; one given by name runs or raises.

    Returns:
        The positions in int32, -1 where a slot is free now.

    Raises:
        ValueError: if shapes do not fit, the budget is below 1, or the implementation is unknown.
        NotImplementedError: if a kernel was given by name and can't run with these arguments.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from kernels_pallas import keep_topk
        >>> scores = jnp.array([[[0.5, 0.25, 0.25]]])
        >>> jax.jit(keep_topk)(scores, jnp.array([[[0, 1, 2]]]), 2).tolist()
        [[[0, -1, 2]]]
    """
    scores, position = jnp.asarray(scores), jnp.asarray(position, jnp.int32)
    if scores.ndim != 3 or scores.shape != position.shape:
        raise ValueError(f"scores {scores.shape} and positions {position.shape} do not fit: expected [B, K, S] twice.")
    budget = jnp.broadcast_to(jnp.asarray(check_tokens(budget, scores.shape[:1]), jnp.int32), scores.shape[:1])
    if excess is not None:
        excess = check_count("excess", excess, 0, "give a number of tokens, or None")
    if not position.size:
        return position
    return keep_topk_unchecked(scores, position, budget, excess=excess, implementation=implementation)
