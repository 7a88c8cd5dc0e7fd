"""The definition, in plain JAX. It holds the block's weights [B, K, G, T, S] while it runs; no caller sees them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.cache_attention.queries import IN_WINDOW, IS_LAST, describe
from kernels_pallas.dispatch import of_layer

STATISTICS = (
    "sum",
    "last",
    "window_mean",
    "window_variance",
    "window_square",
    "window_log",
    "window_group_square",
)


class ColumnStatistics(NamedTuple):
    """What a block's attention weights say of each slot, float32; ``None`` where not asked for.

    Over the block's valid queries, per query head ``[B, N, S]``: ``sum``, and ``last``, the last one's row.

    Over the last ``window`` valid queries of the block (over all of them where there are fewer), per query head: the
    mean ``window_mean``; the unbiased variance ``window_variance``, 0 for a single query; the sum of squares
    ``window_square``; and the sum of ``a log a``, ``window_log``, with ``0 log 0 = 0``. Per KV head ``[B, K, S]``:
    ``window_group_square``, the sum of squares of the group's mean weight.
    """

    sum: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    last: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    window_mean: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    window_variance: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    window_square: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    window_log: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    window_group_square: Float[Array, "*groups S"] = None  # type: ignore[assignment]


def cache_attention(
    query: Float[Array, "B T N D"],
    key: Float[Array, "*L B K S D"],
    value: Float[Array, "*L B K S D"],
    key_position: Int[Array, "B K S"],
    query_position: Int[Array, "B T"],
    *,
    statistics: frozenset[str],
    window: int,
    sliding_window: Int[Array, ""] | int | None,
    scale: float,
    layer: int | Int[Array, ""] | None = None,
) -> tuple[Float[Array, "B T N D"], ColumnStatistics]:
    """See :func:`kernels_pallas.cache_attention.api.cache_attention`."""
    key, value = of_layer(key, layer), of_layer(value, layer)
    B, T, N, D = query.shape
    K, S = key.shape[1], key.shape[2]
    accumulate = jnp.promote_types(query.dtype, jnp.float32)
    grouped = query.reshape(B, T, K, N // K, D)
    logits = scale * jnp.einsum("btkgd,bksd->bkgts", grouped, key, preferred_element_type=accumulate)

    age = query_position[:, None, :, None] - key_position[:, :, None, :]  # [B, K, T, S]
    visible = (key_position >= 0)[:, :, None, :] & (query_position >= 0)[:, None, :, None] & (age >= 0)
    if sliding_window is not None:
        visible &= age < sliding_window
    visible = visible[:, :, None]  # [B, K, 1, T, S]

    logits = jnp.where(visible, logits, -jnp.inf)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(peak), peak, 0))
    weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), jnp.finfo(accumulate).tiny)
    live = (key_position >= 0)[..., None]
    value = jnp.where(live, value, 0)  # 0 * NaN is NaN: what a free slot holds must not matter
    # Not "->btkgd": XLA's CPU backend has no bfloat16 product for the operand order that it would make of that.
    out = jnp.einsum("bkgts,bksd->bkgtd", weights.astype(value.dtype), value, preferred_element_type=accumulate)
    out = jnp.moveaxis(out, 3, 1)

    columns = {}
    is_last, seen = (describe(query_position, window)[..., i] > 0 for i in (IS_LAST, IN_WINDOW))  # [B, T]
    if "sum" in statistics:
        columns["sum"] = jnp.sum(weights, axis=3)
    if "last" in statistics:
        columns["last"] = _weighted_rows(weights, is_last.astype(accumulate))
    queries = jnp.sum(seen, axis=1)  # [B]
    share = seen.astype(accumulate) / jnp.maximum(queries, 1)[:, None].astype(accumulate)
    if "window_mean" in statistics:
        columns["window_mean"] = _weighted_rows(weights, share)
    if "window_variance" in statistics:  # around the mean: of small weights, E[a^2] - E[a]^2 would leave rounding only
        deviations = _sum_of_rows((weights - _weighted_rows(weights, share)[:, :, :, None]) ** 2, seen)
        others = (queries - 1)[:, None, None, None]
        columns["window_variance"] = jnp.where(others > 0, deviations / jnp.maximum(others, 1).astype(accumulate), 0)
    if "window_square" in statistics:
        columns["window_square"] = _sum_of_rows(weights**2, seen)
    if "window_log" in statistics:
        columns["window_log"] = _sum_of_rows(jax.scipy.special.xlogy(weights, weights), seen)
    if "window_group_square" in statistics:
        columns["window_group_square"] = _sum_of_rows(jnp.mean(weights, axis=2, keepdims=True) ** 2, seen)
    columns = {name: column.reshape(B, -1, S) for name, column in columns.items()}  # N heads, or K groups
    return out.reshape(B, T, N, D).astype(query.dtype), ColumnStatistics(**columns)


def _weighted_rows(weights: Float[Array, "B K G T S"], row_weight: Float[Array, "B T"]) -> Float[Array, "B K G S"]:
    return jnp.einsum("bkgts,bt->bkgs", weights, row_weight.astype(weights.dtype))


def _sum_of_rows(x: Float[Array, "B K _ T S"], rows: Bool[Array, "B T"]) -> Float[Array, "B K _ S"]:
    """A reduction, not a product: XLA computes x on the way and stores it nowhere."""
    return jnp.sum(jnp.where(rows[:, None, None, :, None], x, 0), axis=3)
