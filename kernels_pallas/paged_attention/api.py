"""Attention over pages: the call, its checks, and the choice of an implementation."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from jaxtyping import Array, Float, Int, Real

from kernels_pallas.cache_attention.api import check_bias, check_projection, check_sinks, check_statistics
from kernels_pallas.cache_attention.reference import ColumnStatistics
from kernels_pallas.checks import check_soft_cap
from kernels_pallas.dispatch import Implementation, check_scale, dispatch

paged_attention_unchecked = functools.partial(dispatch, "paged_attention")  # statistics are a set, the scale is given


def paged_attention(
    query: Float[Array, "B T N D"],
    key: Real[Array, "P page D"],
    value: Real[Array, "P page D"],
    position: Int[Array, "P page"],
    table: Int[Array, "B K M"],
    query_position: Int[Array, "B T"],
    *,
    key_scale: Float[Array, "P page"] | None = None,
    value_scale: Float[Array, "P page"] | None = None,
    bias: Float[Array, "P page"] | None = None,
    sink_logits: Float[Array, "N"] | None = None,
    statistics: Iterable[str] = (),
    window: int = 0,
    errors: bool = False,
    projection: Float[Array, "K G D F"] | None = None,
    query_scale: Float[Array, "B T"] | None = None,
    sliding_window: Int[Array, ""] | int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B T N D"], ColumnStatistics]:
    """Compute the softmax attention of T queries over the pages of each KV head; positions decide what a query sees.

    The result is that of :func:`kernels_pallas.cache_attention` over ``S = M * page`` slots, where slot s is in the
    head's page ``s // page``. A kernel reads the keys and values of a page in place; the reference copies the pages of
    one head at a time.

    Args:
        key, value, position: a pool of pages that heads of any layer own; position -1 is a free slot.
        table: each head's pages; -1 where it has none, and nothing is read there.

    All other arguments are those of :func:`kernels_pallas.cache_attention`; scales and biases are shaped like the pool.

    Returns:
        The output in the queries' dtype, and the statistics of M * page slots in float32 (float64 for float64 inputs).

    Raises:
        ValueError: as :func:`kernels_pallas.cache_attention`.

    Example:
        >>> import functools, jax, jax.numpy as jnp
        >>> from kernels_pallas import paged_attention
        >>> q, pool = jnp.ones((1, 1, 2, 4)), jnp.ones((3, 2, 4))
        >>> position = jnp.array([[5, 6], [0, -1], [1, 2]])
        >>> table = jnp.array([[[2, 1, -1]]])  # the last page and the one before it
        >>> attention = jax.jit(functools.partial(paged_attention, statistics=["last"]))
        >>> out, columns = attention(q, pool, pool, position, table, jnp.array([[2]]))
        >>> columns.last[0, 0].tolist()
        [0.333, 0.333, 0.333, 0.0, 0.0, 0.0]
    """
    B, T, N, D = query.shape
    if key.shape != value.shape or key.shape[-1] != D or key.ndim != 3 or position.shape != key.shape[:2]:
        raise ValueError(
            f"query {query.shape}, key {key.shape}, value {value.shape} and position {position.shape} do not fit: "
            "expected [B, T, N, D], twice [P, page, D] and [P, page]."
        )
    check_scale("key", key, key_scale)
    check_scale("value", value, value_scale)
    if table.ndim != 3 or table.shape[0] != B or N % table.shape[1]:
        raise ValueError(
            f"the page table {table.shape} does not fit queries {query.shape}: expected [B, K, M] with B {B} and {N} a "
            "multiple of K; take one layer's table."
        )
    check_bias(bias, position.shape)
    check_sinks(sink_logits, N)
    check_projection(projection, errors, (table.shape[1], N // table.shape[1], D))
    if query_position.shape != (B, T):
        raise ValueError(f"query positions {query_position.shape} do not fit: expected {(B, T)}.")
    return paged_attention_unchecked(
        query,
        key,
        value,
        position,
        table,
        query_position,
        statistics=check_statistics(statistics, window),
        window=window,
        errors=errors,
        projection=projection,
        query_scale=query_scale,
        sliding_window=sliding_window,
        scale=D**-0.5 if scale is None else scale,
        soft_cap=check_soft_cap(soft_cap),
        key_scale=key_scale,
        value_scale=value_scale,
        bias=bias,
        sink_logits=sink_logits,
        implementation=implementation,
    )
