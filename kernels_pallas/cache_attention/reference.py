"""The definition, in plain JAX. It holds the block's weights [B, K, G, T, S] while it runs; no caller sees them."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

STATISTICS = ("sum", "last", "window_mean")


class ColumnStatistics(NamedTuple):
    """What a block's attention weights say of each slot, per query head, float32; ``None`` where not asked for.

    ``sum``: over the block's valid queries. ``last``: the last valid query's row. ``window_mean``: the mean over
    the last ``window`` valid queries of the block (over all of them where there are fewer).
    """

    sum: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    last: Float[Array, "*heads S"] = None  # type: ignore[assignment]
    window_mean: Float[Array, "*heads S"] = None  # type: ignore[assignment]


def cache_attention(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B K S D"],
    value: Float[Array, "B K S D"],
    key_position: Int[Array, "B K S"],
    query_position: Int[Array, "B T"],
    *,
    statistics: frozenset[str],
    window: int,
    sliding_window: Int[Array, ""] | int | None,
    scale: float,
) -> tuple[Float[Array, "B T N D"], ColumnStatistics]:
    """See :func:`kernels_pallas.cache_attention.api.cache_attention`."""
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
    valid = query_position >= 0  # [B, T]
    from_end = jnp.flip(jnp.cumsum(jnp.flip(valid, 1), axis=1), 1)  # 1 at the last valid query, 2 before it
    if "sum" in statistics:
        columns["sum"] = jnp.sum(weights, axis=3)
    if "last" in statistics:
        columns["last"] = _weighted_rows(weights, (valid & (from_end == 1)).astype(accumulate))
    if "window_mean" in statistics:
        seen = valid & (from_end <= window)
        share = seen / jnp.maximum(jnp.sum(seen, axis=1, keepdims=True), 1)
        columns["window_mean"] = _weighted_rows(weights, share)
    columns = {name: column.reshape(B, N, S) for name, column in columns.items()}
    return out.reshape(B, T, N, D).astype(query.dtype), ColumnStatistics(**columns)


def _weighted_rows(weights: Float[Array, "B K G T S"], row_weight: Float[Array, "B T"]) -> Float[Array, "B K G S"]:
    return jnp.einsum("bkgts,bt->bkgs", weights, row_weight.astype(weights.dtype))
