"""Selection without a sort: the best slots of each head, or of heads that compete, exactly and the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


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

    rank = _rank(scores, live)
    if excess == 1:
        return live & ~(_worst(rank, position) & (jnp.sum(live, axis=-1) > budget)[..., None])
    stays, tied = _best(rank, live, position, budget, lambda x: jnp.sum(x, axis=-1, dtype=jnp.int32), lambda x: x)
    return stays | tied


def best_of_groups(
    scores: Float[Array, "*rows S"],
    position: Int[Array, "*rows S"],
    head: Int[Array, "*rows"],
    group: Int[Array, "*rows"],
    budget: Int[Array, "groups"],
    groups: int,
) -> Bool[Array, "*rows S"]:
    """The ``budget`` best live slots of each group of rows: as :func:`keep_mask`, with several rows for one budget.

    Args:
        head: numbers the heads; between tokens of the same score and position, the lower number stays.
        group: which group each row belongs to.
        groups: how many groups there are.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvjax.selection import best_of_groups
        >>> scores, position = jnp.array([[5.0, 1.0], [4.0, 3.0]]), jnp.array([[0, 1], [0, 1]])
        >>> head, one_group = jnp.arange(2), jnp.zeros(2, int)
        >>> best_of_groups(scores, position, head, one_group, jnp.array([3]), 1).tolist()
        [[True, False], [True, True]]
    """

    def count(mask: Array) -> Array:
        rows = jnp.sum(mask, axis=-1, dtype=jnp.int32)
        return jax.ops.segment_sum(rows.ravel(), group.ravel(), groups)

    def of_row(x: Array) -> Array:
        return x[group]

    live = position >= 0
    stays, tied = _best(_rank(scores, live), live, position, budget, count, of_row)
    # Apart from the position, as position * heads + head would overflow in long sequences. A row holds one such token.
    order = jnp.where(tied.any(axis=-1), -head, _LOWEST)[..., None]
    last = of_row(_nth_largest(order, budget - count(stays), count, of_row))[..., None]
    return stays | (tied & (order >= last))


def share_of(share: int | float, budget: Any) -> Any:
    """floor(share * budget), the share to four digits, in integers: inside jit floats are float32.

    Example:
        >>> from kvjax.selection import share_of
        >>> share_of(0.29, 100)  # in floats 0.29 * 100 is 28.999...
        29
    """
    whole, part = divmod(round(share * 10_000), 10_000)
    return budget * whole + budget // 10_000 * part + budget % 10_000 * part // 10_000


def _rank(scores: Float[Array, "*rows S"], live: Bool[Array, "*rows S"]) -> Int[Array, "*rows S"]:
    """Integers that order like the scores. A live slot beats a free one, even with NaN."""
    rank = jnp.where(live & ~jnp.isnan(scores), _ordered_bits(scores), _LOWEST)
    return jnp.where(live, jnp.maximum(rank, _LOWEST + 1), _LOWEST)


def _best(
    rank: Array, live: Array, position: Array, budget: Array, count: Callable, of_row: Callable
) -> tuple[Array, Array]:
    """The largest ranks of each group, up to the budget; and those that tie, even by position, for what is left of it.

    ``count`` counts a mask by groups, ``of_row`` is a row's group's.
    """
    # No lax.cond around the ties: its predicate would join all heads, and cost a collective on a mesh.
    threshold = of_row(_nth_largest(rank, budget, count, of_row))[..., None]
    above, tied = rank > threshold, (rank == threshold) & live
    age = jnp.where(tied, position, _LOWEST)
    oldest = of_row(_nth_largest(age, budget - count(above), count, of_row))[..., None]
    return above | (age > oldest), tied & (age == oldest)


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


def _nth_largest(x: Int[Array, "*rows S"], n: Array, count: Callable, of_row: Callable) -> Array:
    """The n-th largest entry (counted from 1) of each group; int32's lowest where n exceeds its size."""

    def halve(_, bounds):
        low, high = bounds  # the answer lies in [low, high]
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # rounded up, without overflow
        enough = count(x >= of_row(middle)[..., None]) >= n
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    low = jnp.full(n.shape, _LOWEST, jnp.int32)
    high = jnp.full(n.shape, jnp.iinfo(jnp.int32).max, jnp.int32)
    return jax.lax.fori_loop(0, 32, halve, (low, high))[0]
