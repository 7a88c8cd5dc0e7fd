"""CAOTE's scores and the eviction by them in one call, its checks, and the choice of an implementation."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Real

from kernels_pallas.caote_topk.reference import Ends, Group, Kept, Norm
from kernels_pallas.checks import check_count, check_tokens
from kernels_pallas.dispatch import Implementation, check_scale, dispatch

caote_topk_unchecked = functools.partial(dispatch, "caote_topk")  # with a budget for each row


def caote_topk(
    weights: Float[Array, "B K _ S"],
    value: Real[Array, "B K S D"],
    position: Int[Array, "B K S"],
    budget: int | Int[Array, ""] | Int[Array, "B"],
    *,
    value_scale: Float[Array, "B K S"] | None = None,
    protected: Bool[Array, "B K S"] | None = None,
    ends: Ends | None = None,
    fast: bool = False,
    norm: Norm = 2,
    group: Group = "exact",
    excess: int | None = None,
    with_scores: bool = False,
    implementation: Implementation = "auto",
) -> Kept:
    """Free the slots of each head whose eviction changes the attention output least, down to the budget.

    A token's score is CAOTE's error of evicting it (arXiv 2504.14051, eq. 8 and 22). Each head keeps exactly the
    ``budget`` tokens of largest score; of tokens that tie, the more recent ones. The kernels read the values once where
    a head's values fit into the chip's memory, else twice, and write no scores unless asked to.

    Args:
        weights: those of the query heads that share the values, non-negative. Each row is divided by its sum over the
            live slots; those with a weight or a value that is not finite count nowhere, and leave first.
        position: of the token in each slot, -1 where it is free.
        budget: how many tokens each head keeps, at least 1; one number or one per row.
        value_scale: by which each slot's eight bits are multiplied; None for floats.
        protected: slots that stay whatever they score.
        ends: how many of the first and of the last tokens stay, too; without a mask of them, a GPU has one launch less.
        fast, norm, group: as in :func:`kvjax.score`.
        excess: a promise that no head holds more than ``budget + excess`` tokens. With 1, as in decode, the slot to
            free is an argmin.
        with_scores: whether to return the scores, float32, ``+inf`` where protected, ``-inf`` where free.
        implementation: "auto" takes the fastest one that can run here; one given by name runs or raises.

    Returns:
        The positions, -1 where a slot is free now; and the scores, if asked for.

    Raises:
        ValueError: if shapes do not fit, values of eight bits have no scale, the budget is below 1, or the norm, group
            or implementation is unknown.
        NotImplementedError: if a kernel was given by name and can't run with these arguments.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from kernels_pallas import caote_topk
        >>> weights = jnp.array([[[[0.5, 0.25, 0.25]]]])
        >>> value = jnp.array([[[[0.0], [2.0], [-2.0]]]])
        >>> kept = jax.jit(caote_topk)(weights, value, jnp.array([[[0, 1, 2]]]), 1)
        >>> kept.position.tolist()  # of equals the recent one stays
        [[[-1, -1, 2]]]
    """
    B, K, _, S = weights.shape if weights.ndim == 4 else (-1, -1, -1, -1)
    if value.ndim != 4 or value.shape[:3] != (B, K, S) or position.shape != (B, K, S):
        raise ValueError(
            f"weights {weights.shape}, values {value.shape} and positions {position.shape} do not fit: expected "
            "[B, K, G, S], [B, K, S, D] and [B, K, S]."
        )
    check_scale("value", value, value_scale)
    if protected is not None and protected.shape != (B, K, S):
        raise ValueError(f"protected {protected.shape} does not fit: expected {(B, K, S)}, one entry per slot.")
    if ends is not None and any(x.shape != (B,) for x in ends):
        raise ValueError(f"ends are {[x.shape for x in ends]}; expected three arrays {(B,)}, one number per row.")
    if norm not in (1, 2, "inf") or group not in ("exact", "mean"):
        raise ValueError(f"norm is {norm!r} and group {group!r}; expected 1, 2 or 'inf' and 'exact' or 'mean'.")
    budget = jnp.broadcast_to(jnp.asarray(check_tokens(budget, (B,)), jnp.int32), (B,))
    if excess is not None:
        excess = check_count("excess", excess, 0, "give a number of tokens, or None")
    return caote_topk_unchecked(
        weights,
        value,
        position,
        budget,
        protected,
        fast=fast,
        norm=norm,
        group=group,
        excess=excess,
        with_scores=with_scores,
        value_scale=value_scale,
        ends=ends,
        implementation=implementation,
    )
