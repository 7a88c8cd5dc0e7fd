"""Selection without a sort: the best slots of each head, exactly and the same everywhere.

Plain functions of arrays, without a sort or a prefix sum: kernels for TPU and GPU run them as they stand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.checks import check_count, check_tokens


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
        >>> from kernels_pallas.topk import keep_mask
        >>> keep_mask(jnp.array([1.0, 3.0, 2.0]), jnp.array([0, 1, 2]), 2).tolist()
        [False, True, True]
    """
    if scores.shape != position.shape:
        raise ValueError(f"scores {scores.shape} do not fit the slots: expected {position.shape}.")
    live = position >= 0
    budget = jnp.asarray(check_tokens(budget, position.shape[:-1][-2:][:1]), jnp.int32)
    if budget.ndim:
        budget = budget.reshape(-1, *(1,) * min(position.ndim - 2, 1))  # B stands before K; layers stand before B
    budget = jnp.broadcast_to(budget, position.shape[:-1])[..., None]  # [*head, 1]

    ranks = rank(scores, live)
    if excess is not None and check_count("excess", excess, 0, "give a number of tokens, or None") == 1:
        return live & ~(_worst(ranks, position) & (jnp.sum(live, axis=-1, keepdims=True) > budget))
    return best_of_rows(ranks, position, budget)


def rank(scores: Float[Array, "*rows S"], live: Bool[Array, "*rows S"]) -> Int[Array, "*rows S"]:
    """Integers that order like the scores. A live slot beats a free one, even with NaN.

    Example:
        >>> import jax.numpy as jnp
        >>> from kernels_pallas.topk import LOWEST, rank
        >>> (rank(jnp.array([0.0, jnp.nan, 5.0]), jnp.array([True, True, False])) - LOWEST).tolist()
        [-2147483648, 1, 0]
    """
    ordered = jnp.where(live & ~jnp.isnan(scores), _ordered_bits(scores), LOWEST)
    return jnp.where(live, jnp.maximum(ordered, LOWEST + 1), LOWEST)


def best_of_rows(
    ranks: Int[Array, "*rows S"], position: Int[Array, "*rows S"], budget: Int[Array, "*rows 1"]
) -> Bool[Array, "*rows S"]:
    """The live slots of the ``budget`` largest ranks in each row, the more recent of equals.

    Example:
        >>> import jax.numpy as jnp
        >>> from kernels_pallas.topk import best_of_rows
        >>> best_of_rows(jnp.array([[7, 7, 9]]), jnp.array([[4, 1, 0]]), jnp.array([[2]])).tolist()
        [[True, False, True]]
    """
    stays, tied = best(ranks, position, budget, count_rows, lambda x: x)
    return stays | tied


def count_rows(mask: Bool[Array, "*rows S"]) -> Int[Array, "*rows 1"]:
    """How many are True in each row."""
    return jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.int32)


def best(
    ranks: Int[Array, "*rows S"],
    position: Int[Array, "*rows S"],
    budget: Int[Array, "..."],
    count: Callable[[Array], Array],
    of_row: Callable[[Array], Array],
) -> tuple[Bool[Array, "*rows S"], Bool[Array, "*rows S"]]:
    """The largest ranks of each group, up to the budget; and those that tie, even by position, for what is left of it.

    ``count`` counts a mask by groups, ``of_row`` is what a row's group has, ``[*rows, 1]``.
    """
    # No lax.cond around the ties: its predicate would join all heads, and cost a collective on a mesh.
    threshold = of_row(nth_largest(ranks, budget, count, of_row))
    above, tied = ranks > threshold, (ranks == threshold) & (position >= 0)
    age = jnp.where(tied, position, LOWEST)
    oldest = of_row(nth_largest(age, budget - count(above), count, of_row))
    return above | (age > oldest), tied & (age == oldest)


def nth_largest(
    x: Int[Array, "*rows S"], n: Int[Array, "..."], count: Callable[[Array], Array], of_row: Callable[[Array], Array]
) -> Int[Array, "..."]:
    """The n-th largest entry (counted from 1) of each group; int32's lowest where n exceeds its size."""

    def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # the answer lies in [low, high]
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # rounded up, without overflow
        enough = count(x >= of_row(middle)) >= n
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    low = jnp.full(n.shape, LOWEST, jnp.int32)
    high = jnp.full(n.shape, _HIGHEST, jnp.int32)
    return jax.lax.fori_loop(0, 32, halve, (low, high))[0]


def _worst(ranks: Int[Array, "*head S"], position: Int[Array, "*head S"]) -> Bool[Array, "*head S"]:
    """The live slot with the lowest rank, the oldest one among equals."""
    ranks = jnp.where(position >= 0, ranks, _HIGHEST)
    tied = (ranks == jnp.min(ranks, axis=-1, keepdims=True)) & (position >= 0)
    age = jnp.where(tied, position, _HIGHEST)
    return tied & (age == jnp.min(age, axis=-1, keepdims=True))


LOWEST = -(2**31)  # what ranks below everything, and marks a free slot
_HIGHEST = 2**31 - 1


def _ordered_bits(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """An int32 that orders like the float32: -inf first, -0 equal to 0, +inf last."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    bits = jnp.where(bits == LOWEST, 0, bits)  # -0; XLA would take away a "+ 0.0"
    return jnp.where(bits < 0, bits ^ _HIGHEST, bits)
