"""Joint eviction: tokens that leave together are chosen in rounds, with CAOTE exact for what each round has left.

CAOTE (arXiv 2504.14051, appendix A) treats the m tokens that a block evicts as independent. Here they leave in rounds.
After each round, weights and outputs of the remaining tokens are again a softmax and its output,

    a'_j = a_j / (1 - sum_i a_i)        X' = (X - sum_i a_i v_i) / (1 - sum_i a_i)        over the evicted i,

so the next scores need no new attention, and no pass over |X - v| either: with values centred at a common point,
|X - v|^2 = |X|^2 - 2 X.v + |v|^2 loses nothing to cancellation, |v|^2 stays, and X.v is one thin product per round.
After W_O the same holds for each pair of query heads, with W_O^g W_O^h' between the two factors.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.checks import check_count, typed
from kvjax.eviction_error import Group, joined_change
from kvjax.projection import OutputProjection, measure
from kvjax.topk import keep_mask


@typed
def joint_score(
    A: Float[Array, "*batch G S"],
    V: Float[Array, "*values S D"],
    leaving: int | Int[Array, "*heads"],
    *,
    rounds: int,
    position: Int[Array, "*values S"] | None = None,
    protected: Bool[Array, "*values S"] | None = None,
    fast: bool = False,
    group: Group = "exact",
    projection: OutputProjection | Float[Array, "... G D F"] | None = None,
    cross: bool = True,
) -> Float[Array, "*values S"]:
    """Compute scores whose ``leaving`` lowest tokens are those that CAOTE evicts in rounds, with norm 2.

    Round i (from 0) evicts ``leaving * (i + 1) // rounds - leaving * i // rounds`` of the remaining tokens: those whose
    eviction changes the output of the remaining tokens least, and of tokens that tie the oldest. ``rounds >= leaving``
    is the greedy order, one token at a time.

    Args:
        A, V, fast, group, projection, cross: as in :func:`kvjax.score`; the weights are those of G query heads.
        leaving: how many tokens leave, one number or one per head, ``[*batch]``.
        rounds: a larger number is nearer to the greedy order; each round costs a fraction of :func:`kvjax.score`.
        position: of the tokens, -1 where a slot is free; the slot's index by default.
        protected: tokens that never leave; they count in weights and outputs.

    Returns:
        Scores ``[*batch, S]``. A token that stays has its error in the last round (at least 0, as in
        :func:`kvjax.score`). Those that leave are below 0, in ``[-rounds, -0.5]``: earlier rounds below later ones, and
        each round in its own order. Free slots and tokens that are not finite score ``-inf``; the latter leave first.

    Raises:
        ValueError: if shapes do not match, rounds are below 1, or a projection comes with group="mean".

    Example:
        >>> import functools, jax, numpy as np
        >>> from kvjax.joint_eviction import joint_score
        >>> A = np.array([[0.2, 0.2, 0.2, 0.4]])
        >>> # the first two are alike: one gone, the other counts
        >>> V = np.array([[1.0], [1.0], [-1.1], [-0.45]])
        >>> in_rounds = [
        ...     jax.jit(functools.partial(joint_score, rounds=r))(A, V, 2)
        ...     for r in (1, 2)
        ... ]
        >>> [np.asarray(scores).round(2).tolist() for scores in in_rounds]
        [[-0.5, -0.5, 0.28, 0.3], [-1.5, 0.42, 0.28, -0.5]]
    """
    A, V = jnp.asarray(A), jnp.asarray(V)
    if V.ndim < 2 or A.ndim != V.ndim or (*A.shape[:-2], A.shape[-1]) != V.shape[:-1]:
        raise ValueError(
            f"weights {A.shape} and values {V.shape} do not match: expected weights [*batch, G, S] and values "
            "[*batch, S, D]."
        )
    position = jnp.broadcast_to(jnp.arange(V.shape[-2]), V.shape[:-1]) if position is None else position
    for what, x in (("position", position), ("protected", protected)):
        if x is not None and x.shape != V.shape[:-1]:
            raise ValueError(f"{what} {x.shape} and values {V.shape} do not match: expected {V.shape[:-1]}.")
    check_count("rounds", rounds, 1, "give an int from 1")
    if projection is not None and group != "exact":
        raise ValueError(f"group is {group!r}, but after W_O every head counts: a projection needs group='exact'.")

    dtype = jnp.promote_types(jnp.promote_types(A.dtype, V.dtype), jnp.float32)
    behind = None if projection is None else measure(projection, cross, (*A.shape[:-1], V.shape[-1]), dtype)
    occupied = position >= 0
    live = occupied & jnp.isfinite(V).all(-1) & jnp.isfinite(A).all(-2)
    A = jnp.where(live[..., None, :], A, 0).astype(dtype)
    A = jnp.mean(A, axis=-2, keepdims=True) if group == "mean" else A
    evictable = occupied if protected is None else occupied & ~protected
    leaving = jnp.broadcast_to(jnp.asarray(leaving, jnp.int32), V.shape[:-2])
    terms = _prepare(A, V.astype(dtype), live, fast, behind)
    keep = keep_mask
    for _ in V.shape[:-2]:
        keep = jax.vmap(keep)  # one budget per head

    def one_round(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        gone, result = carry
        scores = jnp.where(live & ~gone, _scores(terms, A, live & ~gone, fast, behind), -jnp.inf)
        candidates = evictable & ~gone
        stay = jnp.sum(candidates, axis=-1) - (leaving * (i + 1) // rounds - leaving * i // rounds)
        goes = candidates & ~keep(scores, jnp.where(candidates, position, -1), jnp.maximum(stay, 0))
        order = jnp.where(goes & live, _within_round(scores, goes & live) - (rounds - i).astype(dtype), -jnp.inf)
        return gone | goes, jnp.where(goes, order, jnp.where(gone, result, scores))

    nobody = jnp.zeros(V.shape[:-1], bool)
    return jax.lax.fori_loop(0, rounds, one_round, (nobody, jnp.zeros(V.shape[:-1], dtype)))[1]


class _Terms(NamedTuple):
    """Terms that stay the same in all rounds, for each of the P pairs (g, h) of query heads that count together.

    ``value`` is 0 where not live; ``centre`` is a point amid the values. ``metric`` is W_O^g W_O^h', None for the
    identity; ``square`` is ``(v - centre) metric (v - centre)'``, one for all pairs where the metric is the identity.
    """

    pairs: tuple[tuple[int, int], ...]
    value: Float[Array, "*values S D"]
    centre: Float[Array, "*values 1 D"]
    metric: Float[Array, "*batch P D D"] | None
    square: Float[Array, "*batch P S"]


def _prepare(A: Array, V: Array, live: Array, fast: bool, behind: OutputProjection | None) -> _Terms:
    pairs = tuple((g, g) for g in range(A.shape[-2]))
    value = jnp.where(live[..., None], V, 0)
    centre = jnp.mean(_mean(live[..., None, :].astype(A.dtype) if fast else A, value), axis=-2, keepdims=True)
    if behind is None:
        square = jnp.where(live, jnp.sum((V - centre) ** 2, axis=-1), 0)  # from V: no second copy of the values
        return _Terms(pairs, value, centre, None, square[..., None, :])
    if behind.factor is None:
        metric = jnp.asarray(behind.gram)
    else:
        pairs = tuple((g, h) for h in range(A.shape[-2]) for g in range(h + 1))
        first, second = (behind.factor[..., jnp.array(side), :, :] for side in zip(*pairs, strict=True))
        metric = jnp.einsum("...df,...ef->...de", first, second, precision=_HIGH)
    centred = jnp.where(live[..., None], V - centre, 0)

    def square_of(one: Array) -> Array:
        return jnp.sum(jnp.einsum("...sd,...de->...se", centred, one, precision=_HIGH) * centred, axis=-1)

    # One pair at a time: together their products would be P times as large as the values.
    squares = jax.lax.map(square_of, jnp.moveaxis(metric, -3, 0))
    return _Terms(pairs, value, centre, metric, jnp.moveaxis(squares, 0, -2))


def _scores(terms: _Terms, A: Array, stay: Array, fast: bool, behind: OutputProjection | None) -> Array:
    """Compute CAOTE's scores of the remaining tokens, as if there had never been others: [*batch, S]."""
    V = terms.value
    A = jnp.where(stay[..., None, :], A, 0)  # [*batch, G, S]
    left = jnp.sum(A, axis=-1, keepdims=True)
    # A token with most of a head's weight is kept apart, as in `score`. Above 3/4 there is at most one per head.
    dominant = 0.75 * left < A
    rest = jnp.where(dominant, 0, A)
    rest_weight = jnp.sum(rest, axis=-1, keepdims=True)
    weight = jnp.sum(A - rest, axis=-1, keepdims=True)
    slot = jnp.sum(
        jnp.where(dominant, jax.lax.broadcasted_iota(jnp.int32, A.shape, A.ndim - 1), 0), axis=-1
    )  # [*batch, G]; 0 where there is none
    dominant_value = jnp.take_along_axis(V, slot[..., None], axis=-2)  # [*batch, G, D]
    without = _mean(rest, V)
    if fast:
        X = jnp.broadcast_to(_mean(stay[..., None, :].astype(A.dtype), V), without.shape)
    else:
        X = (rest_weight * without + weight * dominant_value) / _positive(left)

    ratio = jnp.where(dominant, 0, A / _positive(left - A))
    scale = jnp.max(ratio, axis=-2, keepdims=True)  # so that squares of small ones do not underflow
    ratio = ratio / _positive(scale)
    offset = X - terms.centre
    if terms.metric is None:
        slope, constant = 2 * offset, jnp.sum(offset**2, axis=-1)
    else:
        first, second = (offset[..., jnp.array(side), :] for side in zip(*terms.pairs, strict=True))
        forward = jnp.einsum("...pd,...pde->...pe", first, terms.metric, precision=_HIGH)
        slope = forward + jnp.einsum("...pde,...pe->...pd", terms.metric, second, precision=_HIGH)
        constant = jnp.sum(forward * second, axis=-1)
    # (X_g - v) metric (X_h - v)' of every pair and slot, seen from the centre.
    constant = constant + jnp.sum(slope * terms.centre, axis=-1)
    squares = constant[..., None] - jnp.einsum("...pd,...sd->...ps", slope, V, precision=_HIGH) + terms.square
    total = sum(
        (1 if g == h else 2) * ratio[..., g, :] * ratio[..., h, :] * squares[..., p, :]
        for p, (g, h) in enumerate(terms.pairs)
    )
    scores = scale[..., 0, :] * jnp.sqrt(jnp.maximum(total, 0))

    # The changes by the few tokens that dominate a head, computed directly: [*batch, G heads, G tokens, D].
    weights, dominates = (jnp.take_along_axis(x, slot[..., None, :], axis=-1) for x in (A, dominant))
    if fast:
        ratio = weights / _positive(jnp.where(dominates, rest_weight, left - weights))
        point = X[..., None, :]
    else:
        ratio = weights / _positive(jnp.where(dominates, left, left - weights))
        point = jnp.where(dominates[..., None], without[..., None, :], X[..., None, :])
    direct = joined_change(ratio, point - dominant_value[..., None, :, :], behind)
    direct = jnp.max(jnp.where(dominant, direct[..., None], 0), axis=-2)
    scores = jnp.where(dominant.any(-2), direct, scores)
    holds_all = ((A > 0) & (left <= A)).any(-2)
    return jnp.where(holds_all, jnp.finfo(A.dtype).max, scores)


def _within_round(scores: Array, goes: Array) -> Array:
    """Scale the scores of tokens that leave to [0, 1/2], relative to the largest: float32 tells small ones apart."""
    half = scores / 2
    largest = jnp.max(jnp.where(goes, half, 0), axis=-1, keepdims=True)
    return jnp.where(goes, half / _positive(half + largest), 0)


def _mean(weights: Float[Array, "*batch G S"], V: Float[Array, "*values S D"]) -> Float[Array, "*batch G D"]:
    """Compute the mean of the values under weights that need not sum to 1."""
    total = jnp.einsum("...gs,...sd->...gd", weights, V, precision=_HIGH)
    return total / _positive(jnp.sum(weights, axis=-1, keepdims=True))


def _positive(x: Array) -> Array:
    return jnp.where(x > 0, x, 1)


_HIGH = jax.lax.Precision.HIGHEST
