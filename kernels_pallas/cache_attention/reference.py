"""The definition, in plain JAX. It holds the block's weights [B, K, G, T, S] while it runs."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Real, Shaped

from kernels_pallas.cache_attention.queries import IN_WINDOW, IS_LAST, describe
from kernels_pallas.dispatch import of_layer
from kernels_pallas.prepare import apart
from kernels_pallas.softmax import exponentials, grouped_logits, scaled, weighted_values

STATISTICS = (
    "sum",
    "last",
    "max",
    "window_mean",
    "window_variance",
    "window_square",
    "window_log",
    "window_place",
    "window_group_square",
)
ONLY_REFERENCE = ("max_error", "window_error", "weights")  # statistics that no kernel computes


class ColumnStatistics(NamedTuple):
    """Statistics of a block's attention weights for each slot, float32; ``None`` where not asked for.

    Over the block's valid queries, per query head ``[B, N, S]``: ``sum``, the sum of the weights; ``last``, the weights
    of the last query; ``max``, the largest weight; and ``max_error``, the largest relative change of a query's output
    if the slot were gone, ``a / (1 - a) |x - v| / |x|`` for its weight a, its value v and the output x (CAOTE's
    theorem 3.2, for each query; 1 - a is at least the float's rounding).

    Over the last ``window`` valid queries of the block (over all of them where there are fewer), per query head: the
    mean ``window_mean``; the unbiased variance ``window_variance``, 0 for a single query; the sum of squares
    ``window_square``; the sum of ``a log a``, ``window_log``, with ``0 log 0 = 0``; and ``window_place``, the mean of
    the weights times their queries' places, counted from the end (1 for the last); and ``window_error``, the sum of
    ``(a / (1 - a))^2 |x - v|^2``, the squared change of each query's output if the slot were gone. Per KV head
    ``[B, K, S]``: ``window_group_square``, the sum of squares of the group's mean weight.

    And ``weights``, all of them, per query head ``[B, N, T, S]``, 0 for a padding query.
    """

    sum: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    last: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    max: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    window_mean: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    window_variance: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    window_square: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    window_log: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    window_place: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    window_group_square: Float[Array, "*groups S"] = None  # type: ignore[assignment]
    max_error: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    window_error: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    weights: Float[Array, "*heads T S"] = None  # type: ignore[assignment]


def cache_attention(
    query: Float[Array, "B T N D"],
    key: Real[Array, "*L B K S width"],
    value: Real[Array, "*L B K S D"] | None,
    key_position: Int[Array, "B K S"],
    query_position: Int[Array, "B T"],
    *,
    statistics: frozenset[str],
    window: int,
    sliding_window: Int[Array, ""] | int | None,
    scale: float,
    soft_cap: float | None = None,
    layer: int | Int[Array, ""] | None = None,
    key_scale: Float[Array, "*L B K S"] | None = None,
    value_scale: Float[Array, "*L B K S"] | None = None,
    bias: Float[Array, "*L B K S"] | None = None,
) -> tuple[Float[Array, "B T N D"], ColumnStatistics]:
    """See :func:`kernels_pallas.cache_attention.api.cache_attention`."""
    values = None if value is None else of_layer(value, layer)
    key, value = apart(of_layer(key, layer), values, query.shape[-1])
    key_scale, value_scale, bias = (s if s is None else of_layer(s, layer) for s in (key_scale, value_scale, bias))
    live = key_position >= 0
    age = query_position[:, None, :, None] - key_position[:, :, None, :]  # [B, K, T, S]
    visible = live[:, :, None, :] & (query_position >= 0)[:, None, :, None] & (age >= 0)
    if sliding_window is not None:
        visible &= age < sliding_window
    logits = scaled(grouped_logits(query, key, key_scale), scale, soft_cap)
    if bias is not None:
        logits = logits + bias[:, :, None, None].astype(logits.dtype)
    weights, total = exponentials(logits, visible[:, :, None])
    out = weighted_values(weights, total, value, live, value_scale).astype(query.dtype)
    if not statistics:
        return out, ColumnStatistics()

    is_last, place = (describe(query_position, window)[..., i] for i in (IS_LAST, IN_WINDOW))  # [B, T]
    is_last, seen = is_last > 0, place > 0
    queries = jnp.sum(seen, axis=1)  # [B]
    share = seen.astype(weights.dtype) / jnp.maximum(queries, 1)[:, None].astype(weights.dtype)
    rows = {
        "sum": jnp.ones_like(seen),
        "last": is_last,
        "window_mean": share,
        "window_place": share * place.astype(share.dtype),
    }
    asked = statistics | ({"window_mean"} if "window_variance" in statistics else set())
    rows = {name: row for name, row in rows.items() if name in asked}
    columns = _sums_of_rows(weights, total, rows) if rows else {}

    if statistics - columns.keys():  # weights are 0 where a query is padding
        columns |= _of_divided(weights / total, columns, statistics, seen, window, (value, live, value_scale))
    # [B, K, G or 1, ...] -> N heads, or K groups
    flat = {name: columns[name].reshape(len(query), -1, *columns[name].shape[3:]) for name in statistics}
    return out, ColumnStatistics(**flat)


def _of_divided(
    weights: Float[Array, "B K G T S"],
    sums: dict[str, Float[Array, "B K G S"]],
    statistics: frozenset[str],
    seen: Bool[Array, "B T"],
    window: int,
    values: tuple[Real[Array, "B K S D"], Bool[Array, "B K S"], Float[Array, "B K S"] | None],
) -> dict[str, Float[Array, "B K _ *T S"]]:
    """Compute the statistics that are no sums of rows: they read the weights themselves.

    Args:
        seen: the queries of the observation window, which are at most ``window``.
        values: the values, a mask of the slots that hold one, and the scales of rows of eight bits.
    """
    columns = {}
    if "weights" in statistics:
        columns["weights"] = weights
    if "max" in statistics:
        columns["max"] = jnp.max(weights, axis=3)
    if "max_error" in statistics:
        columns["max_error"] = jnp.max(_errors(weights, *values), axis=3)
    if "window_error" in statistics:
        first = jnp.argsort(~seen, axis=1, stable=True)[:, :window]  # the queries of the window, then others
        own = jnp.take_along_axis(seen, first, axis=1)[:, None, None, :, None]
        rows = jnp.take_along_axis(weights, first[:, None, None, :, None], axis=3)
        columns["window_error"] = _squared_errors(jnp.where(own, rows, 0), *values)
    if "window_variance" in statistics:  # around the mean: E[a^2] - E[a]^2 of small weights is all rounding
        deviations = _sum_of_rows((weights - sums["window_mean"][:, :, :, None]) ** 2, seen)
        others = (jnp.sum(seen, axis=1) - 1)[:, None, None, None]
        columns["window_variance"] = jnp.where(others > 0, deviations / jnp.maximum(others, 1).astype(weights.dtype), 0)
    if "window_square" in statistics:
        columns["window_square"] = _sum_of_rows(weights**2, seen)
    if "window_log" in statistics:
        columns["window_log"] = _sum_of_rows(jax.scipy.special.xlogy(weights, weights), seen)
    if "window_group_square" in statistics:
        columns["window_group_square"] = _sum_of_rows(jnp.mean(weights, axis=2, keepdims=True) ** 2, seen)
    return columns


def _errors(
    weights: Float[Array, "B K G T S"],
    value: Real[Array, "B K S D"],
    live: Bool[Array, "B K S"],
    value_scale: Float[Array, "B K S"] | None,
) -> Float[Array, "B K G T S"]:
    """Return the relative change of each query's output if a slot were gone."""
    value, highest = _floats(value, live, value_scale, weights.dtype), jax.lax.Precision.HIGHEST
    x = jnp.einsum("bkgts,bksd->bkgtd", weights, value, precision=highest)
    products = jnp.einsum("bkgtd,bksd->bkgts", x, value, precision=highest)
    own = jnp.sum(x * x, axis=-1, keepdims=True)
    squared = own - 2 * products + jnp.sum(value * value, axis=-1)[:, :, None, None]
    rest = jnp.maximum(1 - weights, jnp.finfo(weights.dtype).eps)
    own = jnp.where(own > 0, own, 1)  # no output is 0 but a padding query's, whose weights are 0
    return weights / rest * jnp.sqrt(jnp.maximum(squared, 0) / own)


def _squared_errors(
    weights: Float[Array, "B K G T S"],
    value: Real[Array, "B K S D"],
    live: Bool[Array, "B K S"],
    value_scale: Float[Array, "B K S"] | None,
) -> Float[Array, "B K G S"]:
    """Sum the squared changes of the queries' outputs if a slot were gone, query by query.

    Where one slot has nearly all of the weight, x - v is small and its factor large: only differences taken number by
    number are near enough, and those of all queries at once would be [T, S, D].
    """
    value = _floats(value, live, value_scale, weights.dtype)

    def add(total: Array, row: Float[Array, "B K G S"]) -> tuple[Array, None]:
        x = jnp.einsum("bkgs,bksd->bkgd", row, value, precision=jax.lax.Precision.HIGHEST)
        squared = jnp.sum((x[:, :, :, None] - value[:, :, None]) ** 2, axis=-1)
        return total + (row / jnp.maximum(1 - row, jnp.finfo(row.dtype).eps)) ** 2 * squared, None

    return jax.lax.scan(add, jnp.zeros_like(weights[:, :, :, 0]), jnp.moveaxis(weights, 3, 0))[0]


def _floats(value: Array, live: Array, scale: Array | None, dtype: jnp.dtype) -> Float[Array, "B K S D"]:
    """Return the values of the slots that hold one, 0 elsewhere."""
    value = value.astype(dtype)
    if scale is not None:
        value = value * scale[..., None].astype(dtype)
    return jnp.where(live[..., None], value, 0)


def _sums_of_rows(
    weights: Float[Array, "B K G T S"], total: Float[Array, "B K G T 1"], rows: dict[str, Shaped[Array, "B T"]]
) -> dict[str, Float[Array, "B K G S"]]:
    """Sum rows, weighted by the factors of each name, in one product with the weights before their division."""
    factors = jnp.stack([row.astype(weights.dtype) for row in rows.values()], axis=1)[:, None, None]
    factors = factors / jnp.swapaxes(total, 3, 4)  # [B, K, G, names, T]
    sums = jnp.einsum("bkgrt,bkgts->bkgrs", factors, weights, precision=jax.lax.Precision.HIGHEST)
    return {name: sums[:, :, :, i] for i, name in enumerate(rows)}


def _sum_of_rows(x: Float[Array, "B K _ T S"], rows: Bool[Array, "B T"]) -> Float[Array, "B K _ S"]:
    """Sum the given rows by a reduction, not by a product: XLA fuses x into it and does not store x."""
    return jnp.sum(jnp.where(rows[:, None, None, :, None], x, 0), axis=3)
