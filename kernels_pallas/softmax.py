"""The steps that all reference implementations of attention share, in as few passes as XLA needs on a CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Real


def grouped_logits(
    query: Float[Array, "B T N D"], key: Real[Array, "B K S D"], key_scale: Float[Array, "B K S"] | None = None
) -> Float[Array, "B K G T S"]:
    """Compute the products of queries and keys in float32 (float64 for float64 queries).

    Query head n reads KV head n // (N / K). The products with keys of eight bits are multiplied by the keys' scales.
    """
    B, T, N, D = query.shape
    K, S = key.shape[1:3]
    # Queries first and on one axis: XLA lays out "btkgd,bksd->bkgts" as [.., S, queries] and then reads its columns.
    queries = query.reshape(B, T, K, N // K, D).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, D)
    accumulate = jnp.promote_types(query.dtype, jnp.float32)
    if key_scale is not None:
        key = key.astype(query.dtype)  # exact: a float of 16 bits holds every number of eight bits
    logits = jnp.einsum("bkqd,bksd->bkqs", queries, key, preferred_element_type=accumulate)
    logits = logits if key_scale is None else logits * key_scale[:, :, None]
    return logits.reshape(B, K, N // K, T, S)


def sees(
    query_position: Int[Array, "*#heads T"], key_position: Int[Array, "*#heads S"], sliding_window: Array | int | None
) -> Bool[Array, "*heads T S"]:
    """Return which slots each query sees; see :func:`kernels_pallas.cache_attention`."""
    own, place = query_position[..., :, None], key_position[..., None, :]
    visible = (place >= 0) & (own >= place)  # a query that is padding, at -1, sees nothing
    return visible if sliding_window is None else visible & (own - place < sliding_window)


def scaled(logits: Float[Array, "*shape"], scale: float, soft_cap: float | None) -> Float[Array, "*shape"]:
    """Multiply products of queries and keys by the scale, and bend them to (-soft_cap, soft_cap) if it is given.

    The bent logit is ``soft_cap tanh(scale q.k / soft_cap)``. Kernels call it, too.
    """
    logits = scale * logits
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def product(a: Array, b: Array, dims: tuple[tuple[int], tuple[int]]) -> Array:
    """Multiply two matrices in a kernel, summed in float32 over an axis of each; exactly if either is float32."""
    wide = jnp.promote_types(a.dtype, b.dtype)
    in_float32: Any = dict(
        preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST if wide == jnp.float32 else None
    )
    return jax.lax.dot_general(a.astype(wide), b.astype(wide), (dims, ((), ())), **in_float32)


def exponentials(
    logits: Float[Array, "B K G T S"],
    visible: Bool[Array, "B K #G #T S"],
    sink_logits: Float[Array, "N"] | None = None,
) -> tuple[Float[Array, "B K G T S"], Float[Array, "B K G T 1"]]:
    """Compute exp(logit - peak) of each query, 0 where not visible, and the query's sum, 1 for one that sees nothing.

    Their quotient is the query's weights. The callers divide, for it costs less to divide what is computed from
    weights than the weights. A sink is in the sum alone.
    """
    # Without the barriers XLA would compute the mask twice, for the peak and for exp, and exp once for each consumer.
    logits = jax.lax.optimization_barrier(jnp.where(visible, logits, -jnp.inf))
    peak = jnp.max(logits, axis=-1, keepdims=True)
    if sink_logits is not None:
        sinks = sink_logits.astype(logits.dtype).reshape(*logits.shape[1:3], 1, 1)
        peak = jnp.maximum(peak, sinks)
    peak = jnp.where(jnp.isfinite(peak), peak, 0)
    weights = jax.lax.optimization_barrier(jnp.exp(logits - peak))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sink_logits is not None:
        total = total + jnp.exp(sinks - peak)
    return weights, jnp.where(total == 0, 1, total)


def weighted_values(
    weights: Float[Array, "B K G T S"],
    total: Float[Array, "B K G T 1"],
    value: Real[Array, "B K S D"],
    live: Bool[Array, "B K S"],
    value_scale: Float[Array, "B K S"] | None = None,
) -> Float[Array, "B T N D"]:
    """Sum the live values, weighted by ``weights / total``; the values in free slots do not matter.

    For values of eight bits the weights are multiplied by the values' scales.
    """
    B, K, G, T, S = weights.shape
    if value_scale is not None:
        weights = weights * jnp.where(live, value_scale, 0)[:, :, None, None]
        value = value.astype(weights.dtype)
    value = jnp.where(live[..., None], value, 0)  # 0 * NaN is NaN
    flat = weights.astype(value.dtype).reshape(B, K, G * T, S)
    # Not "->btkgd": XLA would order the operands in a way for which its CPU backend has no bfloat16 product.
    out = jnp.einsum("bkqs,bksd->bkqd", flat, value, preferred_element_type=weights.dtype)
    out = out.reshape(B, K, G, T, -1) / total
    return jnp.moveaxis(out, 3, 1).reshape(B, T, K * G, -1)


def of_parts(
    acc: Float[Array, "H parts R D"],
    peak: Float[Array, "H parts R"],
    total: Float[Array, "H parts R"],
    sinks: Float[Array, "H R"] | None = None,
) -> tuple[Float[Array, "H R D"], Float[Array, "H R"], Float[Array, "H R"]]:
    """Combine the parts of a softmax whose slots programs have shared out: its output, largest logit and sum.

    ``sinks`` are logits that no part has counted; they join the sum.
    """
    whole_peak = jnp.max(peak, axis=1)
    if sinks is not None:
        whole_peak = jnp.maximum(whole_peak, sinks)
    share = jnp.exp(peak - whole_peak[:, None])
    whole_total = jnp.sum(share * total, axis=1)
    if sinks is not None:
        whole_total = whole_total + jnp.exp(sinks - whole_peak)
    whole_total = jnp.maximum(whole_total, jnp.finfo(jnp.float32).tiny)
    return jnp.sum(share[..., None] * acc, axis=1) / whole_total[..., None], whole_peak, whole_total
