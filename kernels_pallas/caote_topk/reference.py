"""The definition, in plain JAX: how evicting each token changes the attention output, and which tokens stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Real

from kernels_pallas.topk import best_of_heads, rank

Norm = Literal[1, 2, "inf"]
Group = Literal["exact", "mean"]
# (ratio [*batch, G, S], direction [*batch, G, S, D]) -> the length of their products together, [*batch, S]
Join = Callable[[Array, Array], Array]


class Kept(NamedTuple):
    """The slots after an eviction: ``position`` is -1 where a slot is free, ``scores`` is None unless asked for."""

    position: Int[Array, "B K S"]
    scores: Float[Array, "B K S"] | None


class Ends(NamedTuple):
    """Hold how many of a row's first and last tokens stay whatever they score, and the position of the next one."""

    sinks: Int[Array, "B"]
    recent: Int[Array, "B"]
    next_position: Int[Array, "B"]

    def hold(self, position: Int[Array, "B *slots"]) -> Bool[Array, "B *slots"]:
        """Return a mask of the slots whose tokens are among them."""
        sinks, recent, following = (x.reshape(-1, *(1,) * (position.ndim - 1)) for x in self)
        return (position >= 0) & ((position < sinks) | (position >= following - recent))


def caote_topk(
    weights: Float[Array, "B K G S"],
    value: Real[Array, "B K S D"],
    position: Int[Array, "B K S"],
    budget: Int[Array, "B"],
    protected: Bool[Array, "B K S"] | None,
    *,
    fast: bool,
    norm: Norm,
    group: Group,
    excess: int | None,
    with_scores: bool,
    value_scale: Float[Array, "B K S"] | None = None,
    ends: Ends | None = None,
) -> Kept:
    """See :func:`kernels_pallas.caote_topk.api.caote_topk`."""
    if value_scale is not None:
        value = value.astype(jnp.float32) * value_scale[..., None]
    live = position >= 0
    scores = errors_of_scores(weights, value, live, fast=fast, norm=norm, group=group)
    if protected is not None:
        scores = jnp.where(protected & live, jnp.inf, scores)
    if ends is not None:
        scores = jnp.where(ends.hold(position), jnp.inf, scores)
    each = jnp.broadcast_to(budget[:, None, None], (*live.shape[:2], 1))
    stays = best_of_heads(rank(scores, live), position, each, excess)
    return Kept(jnp.where(stays, position, -1), scores if with_scores else None)


def shares(scores: Float[Array, "*batch S"], counts: Bool[Array, "*#batch S"]) -> Float[Array, "*batch S"]:
    """Divide each row of non-negative scores by its sum over the slots that count; the others get 0, as do all of 0."""
    scores = jnp.where(counts, scores, 0)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    # The largest floats, which mark tokens that are sure to stay, overflow when summed, and their reciprocals, by which
    # XLA divides, are 0. Scaling by a power of two changes nothing but the exponent.
    scale = jnp.where(largest > 2.0**64, 2.0**-64, 1).astype(scores.dtype)
    scores, largest = scale * scores, scale * largest
    is_most = scores == largest  # apart, as beside a share near 1 small ones would be lost one by one
    equal = jnp.sum(is_most, axis=-1, keepdims=True, dtype=scores.dtype)
    total = largest * equal + jnp.sum(jnp.where(is_most, 0, scores), axis=-1, keepdims=True)
    return scores / jnp.where(total > 0, total, 1)


def errors_of_scores(
    scores: Float[Array, "*batch G S"],
    V: Float[Array, "*batch S D"],
    live: Bool[Array, "*batch S"],
    *,
    fast: bool,
    norm: Norm,
    group: Group,
) -> Float[Array, "*batch S"]:
    """Compute CAOTE's scores from any non-negative ones: each row is divided by its sum over the slots that count.

    A slot with a score or a value that is not finite counts nowhere. The mean over a group is that of shares.
    """
    A = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    counts = live & jnp.isfinite(A).all(-2)
    if group == "mean":
        A = jnp.mean(shares(A, counts[..., None, :]), axis=-2, keepdims=True)
    counts &= jnp.isfinite(V).all(-1)
    return eviction_error(shares(A, counts[..., None, :]), V, counts, fast=fast, norm=norm)


def eviction_error(
    A: Float[Array, "*batch G S"],
    V: Float[Array, "*batch S D"],
    live: Bool[Array, "*batch S"],
    *,
    fast: bool = False,
    norm: Norm = 2,
    group: Group = "exact",
    join: Join | None = None,
) -> Float[Array, "*batch S"]:
    """Compute CAOTE's scores (arXiv 2504.14051, theorem 3.2 and eq. 8; FastCAOTE, eq. 22); see :func:`kvjax.score`.

    Args:
        A: the weights of the G query heads that share the values, non-negative; each row sums to 1 over live tokens.
        join: measures the G changes together, in place of the norm; :func:`kvjax.score` measures them after W_O.
    """
    dtype = jnp.promote_types(jnp.promote_types(A.dtype, V.dtype), jnp.float32)
    A, V = A.astype(dtype), V.astype(dtype)
    live = live & jnp.isfinite(V).all(-1) & jnp.isfinite(A).all(-2)
    A = jnp.where(live[..., None, :], A, 0)
    V = jnp.where(live[..., None], V, 0)
    if group == "mean":
        A = jnp.mean(A, axis=-2, keepdims=True)

    # The heaviest token is kept apart: at a weight near 1, both 1 - a and X - v would be lost in rounding.
    heaviest = jnp.argmax(A, axis=-1, keepdims=True)  # [*batch, G, 1]
    is_heaviest = jax.lax.broadcasted_iota(heaviest.dtype, A.shape, A.ndim - 1) == heaviest
    rest = jnp.where(is_heaviest, 0, A)
    weight, rest_weight = (jnp.sum(x, axis=-1, keepdims=True) for x in (A - rest, rest))
    rest_weight = jnp.where(rest_weight > 0, rest_weight, 1)
    dominant = is_heaviest & (A > 0.5)
    left = jnp.where(dominant, rest_weight, jnp.maximum(1 - A, jnp.finfo(dtype).eps))  # what remains without the token

    if fast:
        mean = jnp.sum(V, axis=-2) / jnp.maximum(jnp.sum(live, axis=-1), 1)[..., None].astype(dtype)
        ratio, point = A / left, mean[..., None, None, :]  # [*batch, G, S] and, with 1 for G and S, [*batch, G, S, D]
    else:
        rest_output = jnp.einsum("...gs,...sd->...gd", rest, V, precision=jax.lax.Precision.HIGHEST)
        heaviest_value = jnp.take_along_axis(V, heaviest, axis=-2)  # [*batch, G, D]
        ratio, point = A / left, (rest_output + weight * heaviest_value)[..., None, :]

    if join is not None:
        if not fast:
            ratio = jnp.where(dominant, weight, ratio)
            point = jnp.where(dominant[..., None], (rest_output / rest_weight)[..., None, :], point)
        change = join(ratio, jnp.broadcast_to(point - V[..., None, :, :], (*ratio.shape, V.shape[-1])))
    else:
        changes = ratio * length(point - V[..., None, :, :], norm)
        if not fast:
            without = weight * length(rest_output / rest_weight - heaviest_value, norm)[..., None]
            changes = jnp.where(dominant, without, changes)
        change = _joined(changes, norm)

    holds_all = (A >= 1) | (is_heaviest & (A > 0) & (rest == 0).all(-1, keepdims=True))
    scores = jnp.where(holds_all.any(-2), jnp.finfo(dtype).max, change)
    return jnp.where(live, scores, -jnp.inf)


def length(x: Float[Array, "*shape D"], norm: Norm) -> Float[Array, "*shape"]:
    """Compute the norm along the last axis; for norm 2 its gradient at 0 is 0, not NaN."""
    if norm == 1:
        return jnp.sum(jnp.abs(x), axis=-1)
    if norm == "inf":
        # By index, not by value: where XLA computes a number twice and rounds differently, none equals the maximum.
        place = jnp.argmax(jax.lax.stop_gradient(jnp.abs(x)), axis=-1, keepdims=True)
        return jnp.abs(jnp.take_along_axis(x, place, axis=-1))[..., 0]
    return root(jnp.sum(x**2, axis=-1))


def root(squares: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Compute the square root, with gradient 0 at 0."""
    return jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)


def _joined(changes: Float[Array, "*batch G S"], norm: Norm) -> Float[Array, "*batch S"]:
    """Compute the norm of a group's changes together, scaled so that squares of small ones do not underflow."""
    largest = jnp.max(changes, axis=-2, keepdims=True)
    scale = jax.lax.stop_gradient(jnp.where(largest > 0, largest, 1))
    return scale[..., 0, :] * length((changes / scale).swapaxes(-1, -2), norm)
