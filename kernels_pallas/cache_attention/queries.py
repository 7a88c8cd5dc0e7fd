"""The description of the queries for both kernels: each one's position and the statistics that it enters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.softmax import product

POSITION, IS_LAST, IN_WINDOW = range(3)
UNSEEN = -1e30  # the logit of a slot that a query does not see


def describe(query_position: Int[Array, "B T"], window: int) -> Int[Array, "B T 3"]:
    """Return each query's position, whether it is the last valid one, and its place in the observation window.

    The place is counted from the end: 1 for the last valid query, 0 outside the window.
    """
    valid = query_position >= 0
    from_end = jnp.flip(jnp.cumsum(jnp.flip(valid, 1), axis=1), 1)  # 1 at the last valid query, 2 before it
    place = jnp.where(valid & (from_end <= window), from_end, 0)
    columns = (query_position, valid & (from_end == 1), place)
    return jnp.stack([column.astype(jnp.int32) for column in columns], axis=-1)


def first_entering(about: Int[Array, "B T 3"], names: tuple[str, ...]) -> Int[Array, "B"]:
    """Return each row's first query that enters a statistic: 0 where all do, else the window's first."""
    if {"sum", "max"} & set(names):
        return jnp.zeros(about.shape[0], jnp.int32)
    enters = (about[:, :, IS_LAST] > 0) | (about[:, :, IN_WINDOW] > 0)
    return jnp.argmax(enters, axis=1).astype(jnp.int32)


def queries_entering(
    vectors: Float[Array, "B K G T _"], about: Int[Array, "B T 3"], names: Iterable[str], window: int
) -> tuple[Float[Array, "B K G some _"], Int[Array, "B some 3"]]:
    """Return the queries that enter a statistic, and maybe a few more, with their descriptions."""
    most = max(window, 1)
    if {"sum", "max", "scaled_max", "weights"} & set(names) or most >= about.shape[1]:
        return vectors, about
    enters = (about[:, :, IS_LAST] > 0) | (about[:, :, IN_WINDOW] > 0)
    some = jnp.argsort(~enters, axis=1, stable=True)[:, :most]
    vectors = jnp.take_along_axis(vectors, some[:, None, None, :, None], axis=3)
    return vectors, jnp.take_along_axis(about, some[:, :, None], axis=1)


def ratios(weights: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], Bool[Array, "*shape"]]:
    """Return a / (1 - a), and where a is 1 up to a float's rounding; there the ratio is 1.

    A query's output x changes by the ratio times v - x without a slot of value v, and by x itself without its only one.
    """
    rest = 1 - weights
    alone = rest <= float(jnp.finfo(weights.dtype).eps)
    return jnp.where(alone, 1, weights / jnp.where(alone, 1, rest)), alone


def squared_changes(
    weights: Float[Array, "queries S"],
    out: Float[Array, "queries D"],
    value: Float[Array, "S D"],
    squares: Float[Array, "#1 S"],
) -> Float[Array, "queries S"]:
    """Return the squared lengths of the changes of queries' outputs without each of some slots, in a kernel.

    A slot of more than half a query's weight is told from the output number by number: there the expansion of squares
    would lose the small difference of both. A query has at most one such slot. ``squares`` are the values' own.
    """
    products = product(out, value, ((1,), (1,)))
    own = jnp.sum(out * out, axis=1, keepdims=True)
    heavy = weights > 0.5
    nearest = product(jnp.where(heavy, 1.0, 0.0), value, ((1,), (0,)))
    away = jnp.sum((out - nearest) ** 2, axis=1, keepdims=True)
    squared = jnp.where(heavy, away, jnp.maximum(own - 2 * products + squares, 0))
    ratio, alone = ratios(weights)
    return ratio * ratio * jnp.where(alone, own, squared)


def of_one_query(
    names: tuple[str, ...],
    logits: Float[Array, "B K G S"],
    softmax: Float[Array, "B K G 2"],
    about: Int[Array, "B 1 3"],
) -> tuple[Array, ...]:
    """Compute the column statistics of a block of one query from its logits, their largest, and their sum of exps."""
    weights = jnp.where(logits > UNSEEN, jnp.exp(logits - softmax[..., :1]), 0) / softmax[..., 1:]
    is_last, in_window = (about[:, :1, i, None, None] > 0 for i in (IS_LAST, IN_WINDOW))  # [B, 1, 1, 1]
    return of_weights(names, weights, is_last, in_window, logits.shape[2])


def of_weights(
    names: tuple[str, ...],
    weights: Float[Array, "*heads queries S"],
    is_last: Bool[Array, "*#heads #queries #S"],
    in_window: Bool[Array, "*#heads #queries #S"],
    group: int,
) -> tuple[Array, ...]:
    """Compute the column statistics of one query from its weights; a kernel for GPU calls it, too.

    The first ``group`` rows are the heads'; those that pad a kernel's tile have weight 0.
    """
    seen = jnp.where(in_window, weights, 0)
    columns = terms(names, weights, is_last, in_window, 1.0)  # the last query has the place 1
    columns |= {
        "window_mean": seen,
        "window_variance": jnp.zeros_like(weights),
        "window_group_square": (jnp.sum(seen, axis=-2, keepdims=True) / group) ** 2,
    }
    return tuple(columns[name] for name in names)


def terms(
    names: Iterable[str], weights: Array, is_last: Array, in_window: Array, place: Array | float
) -> dict[str, Array]:
    """Return what queries add to column statistics by their weights; a mean is not made of such terms, nor a variance.

    ``place`` is the queries' place in the window, counted from the end. See :func:`with_term`.
    """
    seen = jnp.where(in_window, weights, 0.0)
    of = {
        "sum": lambda: weights,
        "last": lambda: jnp.where(is_last, weights, 0.0),
        "max": lambda: weights,
        "window_max": lambda: seen,
        "window_square": lambda: seen * seen,
        "window_log": lambda: seen * jnp.log(jnp.where(seen > 0, seen, 1.0)),
        "window_place": lambda: seen * place,
    }
    return {name: of[name]() for name in names if name in of}


def with_term(name: str, column: Array, term: Array, **over: Any) -> Array:
    """Return a column statistic with a term of more queries: of their sum, or of the largest where it is a maximum."""
    if name in ("max", "window_max"):
        return jnp.maximum(column, jnp.max(term, **over))
    return column + jnp.sum(term, **over)
