"""The definition, in plain JAX. It holds the block's weights [B, K, G, T, S] while it runs."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Real, Shaped

from kernels_pallas.cache_attention.queries import IN_WINDOW, IS_LAST, describe, queries_entering, ratios
from kernels_pallas.softmax import exponentials, grouped_logits, scaled, sees, weighted_values

STATISTICS = (
    "sum",
    "last",
    "max",
    "window_mean",
    "window_max",
    "window_variance",
    "window_square",
    "window_log",
    "window_place",
    "window_group_square",
)
ONLY_REFERENCE = ("scaled_max", "weights")  # statistics that no kernel computes


class ColumnStatistics(NamedTuple):
    """Statistics of a block's attention weights for each slot, float32; ``None`` where not asked for.

    With ``errors`` all of them are statistics of another number of each query and slot: the squared length of the
    change of the query's output if the slot were gone, ``(a / (1 - a))^2 |x - v|^2`` for its weight a, its value v and
    the output x (CAOTE's theorem 3.2, for each query); ``|x|^2`` where a is 1, for a query that sees nothing gets 0.

    Over the block's valid queries, per query head ``[B, N, S]``: ``sum``, the sum of the weights; ``last``, the weights
    of the last query; and ``max``, the largest weight.

    Over the last ``window`` valid queries of the block (over all of them where there are fewer), per query head: the
    mean ``window_mean``; the largest ``window_max``; the unbiased variance ``window_variance``, 0 for a single query;
    the sum of squares ``window_square``; the sum of ``a log a``, ``window_log``, with ``0 log 0 = 0``; and
    ``window_place``, the mean of the weights times their queries' places, counted from the end (1 for the last). Per KV
    head ``[B, K, S]``: ``window_group_square``, the sum of squares of the group's mean weight.

    And, per query head, ``scaled_max``, the largest product of a weight and its query's ``query_scale``; and
    ``weights``, all of them, ``[B, N, T, S]``, 0 for a padding query.
    """

    sum: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    last: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    max: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    window_mean: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    window_max: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    window_variance: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    window_square: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    window_log: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    window_place: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    window_group_square: Float[Array, "*groups S"] = None  # type: ignore[assignment]
    scaled_max: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    weights: Float[Array, "*heads T S"] = None  # type: ignore[assignment]


def cache_attention(
    query: Float[Array, "B T N D"],
    key: Real[Array, "B K S D"],
    value: Real[Array, "B K S D"],
    key_position: Int[Array, "B K S"],
    query_position: Int[Array, "B T"],
    *,
    statistics: frozenset[str],
    window: int,
    errors: bool = False,
    projection: Float[Array, "K G D F"] | None = None,
    query_scale: Float[Array, "B T"] | None = None,
    sliding_window: Int[Array, ""] | int | None,
    scale: float,
    soft_cap: float | None = None,
    key_scale: Float[Array, "B K S"] | None = None,
    value_scale: Float[Array, "B K S"] | None = None,
    bias: Float[Array, "B K S"] | None = None,
    sink_logits: Float[Array, "N"] | None = None,
) -> tuple[Float[Array, "B T N D"], ColumnStatistics]:
    """See :func:`kernels_pallas.cache_attention.api.cache_attention`."""
    live = key_position >= 0
    visible = sees(query_position[:, None], key_position, sliding_window)
    logits = scaled(grouped_logits(query, key, key_scale), scale, soft_cap)
    if bias is not None:
        logits = logits + bias[:, :, None, None].astype(logits.dtype)
    weights, total = exponentials(logits, visible[:, :, None], sink_logits)
    out = weighted_values(weights, total, value, live, value_scale).astype(query.dtype)
    if not statistics:
        return out, ColumnStatistics()

    about = describe(query_position, window)
    if errors:
        weights, about = queries_entering(weights / total, about, statistics, window)
        weights = _errors(weights, _floats(value, live, value_scale, weights.dtype), projection)
        total = jnp.ones_like(weights[..., :1])
    is_last, place = (about[..., i] for i in (IS_LAST, IN_WINDOW))  # [B, T]
    is_last, seen = is_last > 0, place > 0
    queries = jnp.sum(seen, axis=1)  # [B]
    share = seen.astype(weights.dtype) / jnp.maximum(queries, 1)[:, None].astype(weights.dtype)
    factors = {
        "sum": jnp.ones_like(seen),
        "last": is_last,
        "window_mean": share,
        "window_place": share * place.astype(share.dtype),
    }
    asked = statistics | ({"window_mean"} if "window_variance" in statistics else set())
    factors = {name: factor for name, factor in factors.items() if name in asked}
    columns = _weighted_sums(weights, total, factors) if factors else {}

    if statistics - columns.keys():  # weights are 0 where a query is padding
        columns |= _of_divided(weights / total, columns, statistics, seen, query_scale)
    # [B, K, G or 1, ...] -> N heads, or K groups
    flat = {name: columns[name].reshape(len(query), -1, *columns[name].shape[3:]) for name in statistics}
    return out, ColumnStatistics(**flat)


def _of_divided(
    weights: Float[Array, "B K G T S"],
    sums: dict[str, Float[Array, "B K G S"]],
    statistics: frozenset[str],
    seen: Bool[Array, "B T"],
    query_scale: Float[Array, "B T"] | None,
) -> dict[str, Float[Array, "B K _ *T S"]]:
    """Compute the statistics that are no weighted sums over queries; ``seen`` are the window's queries."""
    columns = {}
    if "weights" in statistics:
        columns["weights"] = weights
    if "scaled_max" in statistics:
        scale = 1 if query_scale is None else query_scale[:, None, None, :, None].astype(weights.dtype)
        columns["scaled_max"] = jnp.max(weights * scale, axis=3)
    if "max" in statistics:
        columns["max"] = jnp.max(weights, axis=3)
    if "window_max" in statistics:
        columns["window_max"] = jnp.max(jnp.where(seen[:, None, None, :, None], weights, 0), axis=3)
    if "window_variance" in statistics:  # around the mean: E[a^2] - E[a]^2 of small weights is all rounding
        deviations = _masked_sum((weights - sums["window_mean"][:, :, :, None]) ** 2, seen)
        others = (jnp.sum(seen, axis=1) - 1)[:, None, None, None]
        columns["window_variance"] = jnp.where(others > 0, deviations / jnp.maximum(others, 1).astype(weights.dtype), 0)
    if "window_square" in statistics:
        columns["window_square"] = _masked_sum(weights**2, seen)
    if "window_log" in statistics:
        columns["window_log"] = _masked_sum(jax.scipy.special.xlogy(weights, weights), seen)
    if "window_group_square" in statistics:
        columns["window_group_square"] = _masked_sum(jnp.mean(weights, axis=2, keepdims=True) ** 2, seen)
    return columns


def _errors(
    weights: Float[Array, "B K G T S"], value: Float[Array, "B K S D"], projection: Float[Array, "K G D F"] | None
) -> Float[Array, "B K G T S"]:
    """Return the squared length of each query's change of output if a slot were gone.

    Where a slot has nearly all of a query's weight, x - v is a small difference and its factor large: the slot of the
    largest weight is told from x number by number, not by the squares' expansion.
    """
    if projection is not None:
        return _joint_errors(weights, value, projection)
    highest = jax.lax.Precision.HIGHEST
    x = jnp.einsum("bkgts,bksd->bkgtd", weights, value, precision=highest)
    products = jnp.einsum("bkgtd,bksd->bkgts", x, value, precision=highest)
    own = jnp.sum(x * x, axis=-1, keepdims=True)
    squared = own - 2 * products + jnp.sum(value * value, axis=-1)[:, :, None, None]
    largest = jnp.argmax(weights, axis=-1)  # [B, K, G, T]
    nearest = jnp.take_along_axis(value[:, :, None, None], largest[..., None, None], axis=4)[..., 0, :]
    is_largest = jnp.arange(weights.shape[-1]) == largest[..., None]
    squared = jnp.where(is_largest, jnp.sum((x - nearest) ** 2, axis=-1, keepdims=True), squared)
    ratio, alone = ratios(weights)
    return ratio**2 * jnp.where(alone, own, jnp.maximum(squared, 0))


def _joint_errors(
    weights: Float[Array, "B K G T S"], value: Float[Array, "B K S D"], projection: Float[Array, "K G D F"]
) -> Float[Array, "B K G T S"]:
    """Return the squares of the changes of a group's heads together, behind their projections, for each head alike."""
    highest = jax.lax.Precision.HIGHEST

    def of_query(row: Float[Array, "B K G S"]) -> Float[Array, "B K S"]:
        x = jnp.einsum("bkgs,bksd->bkgd", row, value, precision=highest)
        (ratio, alone), x = ratios(row[..., None]), x[:, :, :, None]
        moved = ratio * jnp.where(alone, x, value[:, :, None] - x)
        behind = jnp.einsum("bkgsd,kgdf->bksf", moved, projection.astype(row.dtype), precision=highest)
        return jnp.sum(behind * behind, axis=-1)

    squares = jnp.moveaxis(jax.lax.map(of_query, jnp.moveaxis(weights, 3, 0)), 0, 2)  # [B, K, T, S]
    return jnp.broadcast_to(squares[:, :, None], weights.shape)


def _floats(value: Array, live: Array, scale: Array | None, dtype: jnp.dtype) -> Float[Array, "B K S D"]:
    """Return the values of the slots that hold one, 0 elsewhere."""
    value = value.astype(dtype)
    if scale is not None:
        value = value * scale[..., None].astype(dtype)
    return jnp.where(live[..., None], value, 0)


def _weighted_sums(
    weights: Float[Array, "B K G T S"], total: Float[Array, "B K G T 1"], factors: dict[str, Shaped[Array, "B T"]]
) -> dict[str, Float[Array, "B K G S"]]:
    """Sum over queries, weighted by the factors of each name, in one product with the weights before their division."""
    stacked = jnp.stack([factor.astype(weights.dtype) for factor in factors.values()], axis=1)[:, None, None]
    divided = stacked / jnp.swapaxes(total, 3, 4)  # [B, K, G, names, T]
    sums = jnp.einsum("bkgrt,bkgts->bkgrs", divided, weights, precision=jax.lax.Precision.HIGHEST)
    return {name: sums[:, :, :, i] for i, name in enumerate(factors)}


def _masked_sum(x: Float[Array, "B K _ T S"], queries: Bool[Array, "B T"]) -> Float[Array, "B K _ S"]:
    """Sum over the given queries by a reduction, not by a product: XLA fuses x into it and does not store x."""
    return jnp.sum(jnp.where(queries[:, None, None, :, None], x, 0), axis=3)
