"""Attention over a slot cache: the call, its checks, and the choice of an implementation."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from jaxtyping import Array, Float, Int, Real

from kernels_pallas.cache_attention.reference import ONLY_REFERENCE, STATISTICS, ColumnStatistics
from kernels_pallas.checks import check_names, check_soft_cap
from kernels_pallas.dispatch import Implementation, check_scale, dispatch

cache_attention_unchecked = functools.partial(dispatch, "cache_attention")  # statistics are a set, the scale is given


def cache_attention(
    query: Float[Array, "B T N D"],
    key: Real[Array, "B K S D"],
    value: Real[Array, "B K S D"],
    key_position: Int[Array, "B K S"],
    query_position: Int[Array, "B T"],
    *,
    key_scale: Float[Array, "B K S"] | None = None,
    value_scale: Float[Array, "B K S"] | None = None,
    bias: Float[Array, "B K S"] | None = None,
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
    """Compute the softmax attention of T queries over S slots; positions alone decide which slots a query sees.

    A query at position p sees the slots whose position lies in [0, p] (in (p - sliding_window, p] with a sliding
    window). A slot at position -1 is free: its weight is exactly 0. A query at position -1 is padding: its output is
    0 and no statistic counts it. Query head n reads KV head n // (N / K).

    Args:
        key, value: floats, or numbers of eight bits with scales.
        key_scale, value_scale: by which each key or value of eight bits is multiplied, shaped like them without D; None
            for floats.
        bias: a float per slot that is added to its logits, after scale and cap; None for none.
        sink_logits: a logit per query head that is in the softmax of each of its queries, but has no key and no value:
            the slots' weights, in the output and in all statistics, add up to 1 less its share (gpt-oss); None for
            none. Scale, cap and bias do not apply to it.
        statistics: names from ``STATISTICS``, or from ``ONLY_REFERENCE``, which only the reference computes; see
            :class:`ColumnStatistics`.
        window: the observation window of the "window_" statistics, in queries.
        errors: take the statistics of each query's squared change of output without a slot, in place of its weight.
        projection: with ``errors``, a factor of W_O (:class:`kvjax.OutputProjection`): the change is that of a group's
            heads together, behind it, and the same for all of them. No kernel has it.
        query_scale: a factor of each query's weights in the statistic "scaled_max"; 1 by default.
        sliding_window: how many positions a query sees, itself included; None for all.
        scale: factor of the logits, D ** -0.5 by default.
        soft_cap: a number c that the scaled logits x are bent to, c tanh(x / c) (Gemma 2); None for no cap.
        implementation: "auto" takes the fastest one that can run here; one given by name runs or raises.

    Returns:
        The output in the queries' dtype, and the statistics in float32 (float64 for float64 inputs).

    Raises:
        ValueError: if shapes do not fit, vectors of eight bits have no scale, a statistic or the implementation is
            unknown, or a "window_" statistic has a window below 1.
        NotImplementedError: if a kernel was given by name and can't run with these arguments.

    Example:
        >>> import functools, jax, jax.numpy as jnp
        >>> from kernels_pallas import cache_attention
        >>> q, kv = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 1, 3, 4))
        >>> attention = jax.jit(functools.partial(cache_attention, statistics=["last"]))
        >>> out, columns = attention(
        ...     q, kv, kv, jnp.array([[[0, 1, -1]]]), jnp.array([[1]])
        ... )
        >>> columns.last[0, 0].tolist()
        [0.5, 0.5, 0.0]
    """
    B, T, N, D = query.shape
    check_keys_and_values(query, key, value, key_scale, value_scale)
    slots = key.shape[:3]
    if key_position.shape != slots or query_position.shape != (B, T):
        given = f"positions {key_position.shape} and {query_position.shape}"
        raise ValueError(f"{given} do not fit: expected {slots} for the slots and {(B, T)} for the queries.")
    check_bias(bias, key.shape[:-1])
    check_sinks(sink_logits, N)
    check_projection(projection, errors, (key.shape[1], N // key.shape[1], D))
    return cache_attention_unchecked(
        query,
        key,
        value,
        key_position,
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


def check_keys_and_values(query: Any, key: Any, value: Any, key_scale: Any, value_scale: Any) -> None:
    """Check that queries, keys, values and their scales fit."""
    (B, _, N, D), fits = query.shape, key.shape == value.shape and key.ndim == 4
    if not fits or key.shape[-1] != D or key.shape[0] != B or N % key.shape[1]:
        raise ValueError(
            f"query {query.shape}, key {key.shape} and value {value.shape} do not fit: expected [B, T, N, D] and twice "
            "[B, K, S, D], with N a multiple of K."
        )
    check_scale("key", key, key_scale)
    check_scale("value", value, value_scale)


def check_statistics(statistics: Iterable[str], window: int) -> frozenset[str]:
    """Return the names of statistics as a set.

    Raises:
        ValueError: if a name is unknown, or a "window_" statistic has a window below 1.

    Example:
        >>> from kernels_pallas.cache_attention.api import check_statistics
        >>> check_statistics(["window_mean"], window=0)
        Traceback (most recent call last):
            ...
        ValueError: the observation window is 0; 'window_mean' needs at least 1 query.
    """
    statistics = frozenset(statistics)
    check_names("statistic", statistics, (*STATISTICS, *ONLY_REFERENCE))
    observing = sorted(name for name in statistics if name.startswith("window_"))
    if observing and window < 1:
        raise ValueError(f"the observation window is {window}; {observing[0]!r} needs at least 1 query.")
    return statistics


def check_projection(projection: Any, errors: bool, heads: tuple[int, int, int]) -> None:
    """Check that a projection is that of the errors of these heads, K, G and D."""
    if projection is not None and not errors:
        raise ValueError("a projection was given for statistics of weights; take errors=True, or leave it out.")
    if projection is not None and (projection.ndim != 4 or projection.shape[:3] != heads):
        raise ValueError(f"projection {projection.shape} does not fit: expected [K, G, D, F], with {heads} in front.")


def check_bias(bias: Any, slots: tuple[int, ...]) -> None:
    """Check that there is one float of bias for each slot."""
    if bias is not None and bias.shape != slots:
        raise ValueError(f"the bias is {bias.shape}, but the slots are {slots}: give one float per slot.")


def check_sinks(sink_logits: Any, heads: int) -> None:
    """Check that there is one logit of a sink for each query head."""
    if sink_logits is not None and sink_logits.shape != (heads,):
        raise ValueError(f"sink_logits are {sink_logits.shape}; expected {(heads,)}, one logit per query head.")
