"""The description of the queries for both kernels: each one's position and the statistics that it enters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.softmax import product

POSITION, IS_LAST, IN_WINDOW = range(3)
OF_GROUP = "window_group_square"  # the statistic that is one number for all heads of a group
UNSEEN = -1e30  # the logit of a slot that a query does not see


def start_of(sinks: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return sinks' logits as a kernel's online softmax begins with them, as the largest logit of a sum of 1.

    None is -inf, nor so low that another one's exponential could be lost beside it.
    """
    return jnp.maximum(sinks.astype(jnp.float32), -1e20)


def describe(query_position: Int[Array, "B T"], window: int) -> Int[Array, "B T 3"]:
    """Return each query's position, whether it is the last valid one, and its place in the observation window.

    The place is counted from the end: 1 for the last valid query, 0 outside the window.
    """
    valid = query_position >= 0
    from_end = jnp.flip(jnp.cumsum(jnp.flip(valid, 1), axis=1), 1)  # 1 at the last valid query, 2 before it
    place = jnp.where(valid & (from_end <= window), from_end, 0)
    columns = (query_position, valid & (from_end == 1), place)
    return jnp.stack([column.astype(jnp.int32) for column in columns], axis=-1)


def all_enter(names: Iterable[str]) -> bool:
    """Return whether all queries enter one of the statistics."""
    return bool({"sum", "max"} & set(names))


def first_entering(about: Int[Array, "B T 3"], names: tuple[str, ...]) -> Int[Array, "B"]:
    """Return each row's first query that enters a statistic: 0 where all do, else the window's first."""
    if all_enter(names):
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
) -> tuple[Array, ...]:
    """Compute the column statistics of a block of one query from its logits, their largest, and their sum of exps."""
    weights = jnp.where(logits > UNSEEN, jnp.exp(logits - softmax[..., :1]), 0) / softmax[..., 1:]
    return of_weights(names, weights, logits.shape[2])


def told_apart(name: str) -> str:
    """Return which of the statistics that are equal for a single query is computed in a statistic's place."""
    return "sum" if name in ("last", "max", "window_mean", "window_max", "window_place") else name


def of_weights(
    names: tuple[str, ...], weights: Float[Array, "*heads queries S"], group: int
) -> tuple[Float[Array, "*heads _ S"], ...]:
    """Compute the column statistics of one query from its weights; a kernel for GPU calls it, too.

    The query is the last one and the window's only one, so most statistics are its weights. The first ``group`` rows
    are the heads'; those that pad a kernel's tile have weight 0. A query that is padding has no weights.
    """
    columns = terms(names, weights, True, True, 1.0)  # the last query has the place 1
    columns |= {
        "window_mean": weights,
        "window_variance": jnp.zeros_like(weights),
        OF_GROUP: (jnp.sum(weights, axis=-2, keepdims=True) / group) ** 2,
    }
    return tuple(columns[name] for name in names)


def terms(
    names: Iterable[str], weights: Array, is_last: Array | bool, in_window: Array | bool, place: Array | float
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


def by_head(
    names: Iterable[str], zero: Float[Array, "slots"]
) -> tuple[Any, Callable[..., Any], Callable[[Any], dict[str, Array]]]:
    """Reduce the weights of a head, ``[slots, queries]``, tile by tile of queries: what to start with, add, and finish.

    ``add`` takes what there is, a tile's weights, which query is the last one, each query's place in the window, the
    number of the window's queries, and the head. Means are merged tile by tile (Chan et al.).
    """
    plain = [name for name in names if name not in ("window_mean", "window_variance")]
    merges = len(plain) < len(list(names))
    start = {name: zero for name in plain}, *([zero] * 2 if merges else [None] * 2), jnp.float32(0)

    def add(carry: Any, weights: Array, is_last: Array, nth: Array, here: Array, _: Any) -> Any:
        sums, mean, deviation, before = carry
        added = terms(sums, weights, is_last, nth > 0, nth.astype(jnp.float32))
        sums = {name: with_term(name, x, added[name], axis=1) for name, x in sums.items()}
        if merges:
            seen, both = jnp.where(nth > 0, weights, 0.0), jnp.maximum(before + here, 1.0)
            own_mean = jnp.sum(seen, axis=1) / jnp.maximum(here, 1.0)
            away, apart = own_mean - mean, seen - lax.broadcast_in_dim(own_mean, weights.shape, (0,))
            squares = jnp.sum(jnp.where(nth > 0, apart * apart, 0.0), axis=1)
            deviation = deviation + squares + away * away * (before * here / both)
            mean = mean + away * (here / both)
        return sums, mean, deviation, before + here

    def finish(carry: Any) -> dict[str, Array]:
        sums, mean, deviation, seen = carry
        found = dict(sums)
        if merges:
            found |= {"window_mean": mean, "window_variance": deviation / jnp.maximum(seen - 1, 1.0)}
        if "window_place" in found:
            found["window_place"] = found["window_place"] / jnp.maximum(seen, 1.0)
        return found

    return start, add, finish


def by_group(
    heads: int, nothing: Float[Array, "slots queries"], zero: Float[Array, "slots"]
) -> tuple[Any, Callable[..., Any], Callable[[Any], dict[str, Array]]]:
    """Sum the squares of a group's mean weight as :func:`by_head`, where a tile's heads come one after the other."""

    def add(carry: Any, weights: Array, is_last: Array, nth: Array, here: Array, head: Any) -> Any:
        group, squares = carry
        goes_on = jnp.minimum(head, 1).astype(jnp.float32)
        group = goes_on * group + jnp.where(nth > 0, weights, 0.0)
        whole = heads**-2.0 * jnp.maximum(head - (heads - 2), 0).astype(jnp.float32)  # complete at its last head
        return group, squares + whole * jnp.sum(group * group, axis=1)

    return (nothing, zero), add, lambda carry: {OF_GROUP: carry[1]}
