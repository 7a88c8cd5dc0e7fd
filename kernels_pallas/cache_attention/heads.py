"""Conversions for the kernels: queries are grouped by KV head, and statistics are returned per query head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Real

from kernels_pallas.cache_attention.queries import describe, queries_entering
from kernels_pallas.cache_attention.reference import ONLY_REFERENCE, STATISTICS, ColumnStatistics
from kernels_pallas.prepare import Beside, given_beside, in_sets

_FAR = 2**31 - 1


def span_of(sliding_window: Int[Array, ""] | int | None) -> Int[Array, "1"]:
    """Return how many positions a query sees, itself included, as the kernels take it."""
    return jnp.asarray(_FAR if sliding_window is None else sliding_window, jnp.int32).reshape(1)


def on_heads(
    kernel: Callable[..., tuple[Array, ...]],
    query: Float[Array, "B T N D"],
    key: Real[Array, "B K S D"],
    value: Real[Array, "B K S D"],
    key_position: Int[Array, "B K S"],
    query_position: Int[Array, "B T"],
    *,
    key_scale: Float[Array, "B K S"] | None = None,
    value_scale: Float[Array, "B K S"] | None = None,
    bias: Float[Array, "B K S"] | None = None,
    **options: Any,
) -> tuple[Float[Array, "B T N D"], ColumnStatistics]:
    """Run a kernel; see :func:`kernels_pallas.cache_attention`."""
    floats, beside = given_beside(key_scale, value_scale, bias)
    arrays = [key, value, key_position, *floats]
    return in_groups(kernel, query, query_position, arrays, beside, kv_heads=key.shape[1], **options)


def in_groups(
    kernel: Callable[..., tuple[Array, ...]],
    query: Float[Array, "B T N D"],
    query_position: Int[Array, "B T"],
    arrays: Sequence[Array],
    beside: Beside,
    *,
    kv_heads: int,
    statistics: frozenset[str],
    window: int,
    errors: bool = False,
    projection: Float[Array, "K G D F"] | None = None,
    query_scale: Float[Array, "B T"] | None = None,
    sliding_window: Int[Array, ""] | int | None,
    scale: float,
    soft_cap: float | None = None,
    sink_logits: Float[Array, "N"] | None = None,
) -> tuple[Float[Array, "B T N D"], ColumnStatistics]:
    """Run a kernel on queries grouped by KV head.

    Statistics of errors take a second run, on the queries that enter them alone: they need outputs that are nearer than
    a cache's dtype.

    Args:
        kernel: ``(query [B, K, G, T, D], about, sliding_window, *arrays, beside=, names=, errors=, scale=,
            soft_cap=, sinks=)``, with the sinks' logits [K, G] or None, returns the output, shaped like the queries,
            and each statistic in ``names`` as ``[B, K, heads, S]``. With ``errors`` its output does not matter.
        arrays: all other inputs. The last ones are those that are ``beside`` keys and values.
        query_scale: not read, as no kernel computes the statistic that reads it.
    """
    B, T, N, D = query.shape
    if projection is not None:
        raise NotImplementedError("no kernel measures errors behind W_O; take implementation='reference'.")
    if missing := statistics & set(ONLY_REFERENCE):
        raise NotImplementedError(f"no kernel computes {sorted(missing)}; take implementation='reference'.")
    names = tuple(name for name in STATISTICS if name in statistics)
    grouped, about = (
        query.reshape(B, T, kv_heads, N // kv_heads, D).transpose(0, 2, 3, 1, 4),
        describe(query_position, window),
    )
    options = dict(beside=beside, scale=scale, soft_cap=soft_cap, sinks=in_sets(sink_logits, kv_heads))

    def run(query: Array, about: Array, names: tuple[str, ...], errors: bool) -> tuple[Array, ...]:
        return kernel(query, about, sliding_window, *arrays, names=names, errors=errors, **options)

    out, *found = run(grouped, about, () if errors else names, False)
    if errors and names:
        _, *found = run(*queries_entering(grouped, about, names, window), names, True)
    flat = (column.reshape(B, -1, column.shape[-1]) for column in found)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, D), ColumnStatistics(**dict(zip(names, flat, strict=True)))
