"""Selection without a sort: the best slots of each head, exact and identical on every backend.

The functions use neither a sort nor a prefix sum, so the kernels for TPU and GPU call them unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.checks import check_count, check_tokens
from kernels_pallas.dispatch import platform


def keep_mask(
    scores: Float[Array, "*head S"],
    position: Int[Array, "*head S"],
    budget: int | Int[Array, ""] | Int[Array, "B"],
    *,
    excess: int | None = None,
) -> Bool[Array, "*head S"]:
    """Return a mask of the ``budget`` best live slots of each head, or of all live slots where there are fewer.

    The smallest score that stays is found digit by digit in the bit patterns of float32, on a CPU with 32 counts over
    S. Ties are broken in the same way over the positions. The result is exact and the same on every backend, and needs
    no sort (0.5 ms against 8 ms for a sort at K 8, S 8,320 on two CPU cores).

    Example:
        >>> import jax, numpy as np
        >>> from kernels_pallas.topk import keep_mask
        >>> jax.jit(keep_mask)(np.float32([1, 3, 2]), np.array([0, 1, 2]), 2).tolist()
        [False, True, True]
    """
    scores, position = jnp.asarray(scores), jnp.asarray(position)
    if scores.shape != position.shape:
        raise ValueError(f"scores {scores.shape} do not fit the slots: expected {position.shape}.")
    live = position >= 0
    budget = jnp.asarray(check_tokens(budget, position.shape[:-1][-2:][:1]), jnp.int32)
    if budget.ndim:
        budget = budget.reshape(-1, *(1,) * min(position.ndim - 2, 1))  # the axes are [.., B, K, S]
    budget = jnp.broadcast_to(budget, position.shape[:-1])[..., None]  # [*head, 1]

    ranks = rank(scores, live)
    if excess is not None:
        excess = check_count("excess", excess, 0, "give a number of tokens, or None")
    return best_of_heads(ranks, position, budget, excess)


def rank(scores: Float[Array, "*heads S"], live: Bool[Array, "*heads S"]) -> Int[Array, "*heads S"]:
    """Return integers in the order of the scores. A live slot ranks above a free one, even if its score is NaN."""
    ordered = jnp.where(live & ~jnp.isnan(scores), _ordered_bits(scores), LOWEST)
    return jnp.where(live, jnp.maximum(ordered, LOWEST + 1), LOWEST)


def best_of_heads(
    ranks: Int[Array, "*heads S"],
    position: Int[Array, "*heads S"],
    budget: Int[Array, "*heads 1"],
    excess: int | None = None,
    bits: int | None = None,
) -> Bool[Array, "*heads S"]:
    """Return a mask of the ``budget`` live slots of largest rank in each head; of equal ranks the more recent stays.

    Where ``excess`` promises that at most one slot is too many, the worst slot is found by an argmin. ``bits`` are
    those of :func:`nth_largest`, by default :func:`bits_here`; a kernel takes 1.
    """
    if excess == 1:
        live = position >= 0
        return live & ~(_worst(ranks, position) & (count_true(live) > budget))
    stays, tied = best(ranks, position, budget, count_true, lambda x: x, bits_here() if bits is None else bits)
    return stays | tied


def count_true(mask: Bool[Array, "*heads S"]) -> Int[Array, "*heads 1"]:
    """Count the True entries of each head."""
    return jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.int32)


def best(
    ranks: Int[Array, "*heads S"],
    position: Int[Array, "*heads S"],
    budget: Int[Array, "..."],
    count: Callable[[Array], Array],
    of_head: Callable[[Array], Array],
    bits: int,
) -> tuple[Bool[Array, "*heads S"], Bool[Array, "*heads S"]]:
    """Return masks of the slots that stay in each group, and of those that tie for what is left of the budget.

    Slots tie if they have the same rank and the same position. ``count`` counts a mask per group; ``of_head`` spreads a
    value per group over the group's heads, ``[*heads, 1]``.
    """
    # No lax.cond around the ties: its predicate would depend on all heads, and cost a collective on a mesh.
    threshold = of_head(nth_largest(lambda least: count(ranks >= of_head(least)), budget, bits))
    above, tied = ranks > threshold, (ranks == threshold) & (position >= 0)
    age = jnp.where(tied, position, LOWEST)
    oldest = of_head(nth_largest(lambda least: count(age >= of_head(least)), budget - count(above), bits))
    return above | (age > oldest), tied & (age == oldest)


def nth_largest(at_least: Callable[[Array], Array], n: Int[Array, "*groups"], bits: int) -> Int[Array, "*groups"]:
    """Return the n-th largest entry (counted from 1) of each group; int32's lowest where n exceeds the group's size,
    and its highest where n is below 1.

    ``at_least`` counts a group's entries that are no smaller than a number of its own. A round finds so many ``bits``
    of the answer, which divide 32, by 2 ** bits - 1 counts.
    """

    def refine(_: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        found, unit = carry  # the leading digits, and what the next digit counts
        if bits == 1:
            found = jnp.where(at_least(found + unit) >= n, found + unit, found)
        else:
            tried = found[..., None] + unit * jnp.arange(1, 2**bits, dtype=jnp.int32)
            enough = jax.vmap(at_least, in_axes=-1, out_axes=-1)(tried) >= n[..., None]
            found += unit * jnp.sum(enough, axis=-1, dtype=jnp.int32)
        return found, jax.lax.shift_right_logical(unit, jnp.int32(bits))

    # Sums wrap around: from the lowest number the largest unit leads to 0.
    begun = jnp.full(n.shape, LOWEST, jnp.int32), jnp.int32(LOWEST if bits == 1 else 1 << (32 - bits))
    # The first step is outside the loop: under shard_map only its results vary as those of all other steps do.
    return jax.lax.fori_loop(1, 32 // bits, refine, refine(0, begun))[0]


def bits_here() -> int:
    """Return how many bits :func:`nth_largest` should find in a round: more where one is a launch or a mesh's sum."""
    return 1 if platform() == "cpu" else 4


def _worst(ranks: Int[Array, "*head S"], position: Int[Array, "*head S"]) -> Bool[Array, "*head S"]:
    """Return a mask of the live slot of lowest rank; of equal ranks the oldest."""
    ranks = jnp.where(position >= 0, ranks, HIGHEST)
    tied = (ranks == jnp.min(ranks, axis=-1, keepdims=True)) & (position >= 0)
    age = jnp.where(tied, position, HIGHEST)
    return tied & (age == jnp.min(age, axis=-1, keepdims=True))


LOWEST = -(2**31)  # ranks below everything else and marks a free slot
HIGHEST = 2**31 - 1


def _ordered_bits(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Return int32 values in the order of the float32 values: -inf first, -0 equal to 0, +inf last."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    bits = jnp.where(bits == LOWEST, 0, bits)  # -0; XLA would remove a "+ 0.0"
    return jnp.where(bits < 0, bits ^ HIGHEST, bits)
