"""Attention over chosen slots: the call, its checks, and the choice of an implementation."""

from __future__ import annotations

from jaxtyping import Array, Float, Int, Real

from kernels_pallas.cache_attention.api import check_keys_and_values, check_sinks
from kernels_pallas.checks import check_soft_cap
from kernels_pallas.dispatch import Implementation, dispatch


def select_attention(
    query: Float[Array, "B T N D"],
    key: Real[Array, "B K S D"],
    value: Real[Array, "B K S D"],
    slots: Int[Array, "B H M"],
    *,
    key_scale: Float[Array, "B K S"] | None = None,
    value_scale: Float[Array, "B K S"] | None = None,
    sink_logits: Float[Array, "N"] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "B T N D"]:
    """Compute the softmax attention over M slots of each head; the content of the other slots does not matter.

    Only the slots decide what a query sees: positions are not read, and all T queries see the same slots (a decode step
    has one query). H is N where each query head reads slots of its own, or K where a group reads the same ones; query
    head n reads KV head n // (N / K). Below one chosen slot in 32, "auto" takes the reference on a TPU.

    Args:
        slots: the slots that each head reads, as ``kvjax.select`` returns them, each slot once. -1 stands for no slot:
            its weight is exactly 0. The output of a head with no slot is 0. Any order works; ascending is fastest.

    All other arguments are those of :func:`kernels_pallas.cache_attention`.

    Returns:
        The output in the queries' dtype; the softmax is float32 (float64 for float64 inputs).

    Raises:
        ValueError: if shapes do not fit, vectors of eight bits have no scale, M is 0, or the implementation is unknown
            or for another platform.
        NotImplementedError: if a kernel was given by name and can't run with these arguments.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from kernels_pallas import select_attention
        >>> q, k = jnp.ones((1, 1, 2, 1)), jnp.ones((1, 1, 4, 1))
        >>> v = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 4, 1)
        >>> jax.jit(select_attention)(
        ...     q, k, v, jnp.array([[[0, 1], [3, -1]]])
        ... ).ravel().tolist()
        [1.5, 4.0]
    """
    B, _, N, D = query.shape
    check_keys_and_values(query, key, value, key_scale, value_scale)
    check_sinks(sink_logits, N)
    if slots.ndim != 3 or slots.shape[0] != B or slots.shape[1] not in (N, key.shape[1]) or not slots.shape[2]:
        raise ValueError(
            f"slots {slots.shape} do not fit: expected [B, H, M] with B {B}, H {N}, one set per query head, or "
            f"{key.shape[1]}, one per KV head, and M at least 1."
        )
    return dispatch(
        "select_attention",
        query,
        key,
        value,
        slots,
        scale=D**-0.5 if scale is None else scale,
        soft_cap=check_soft_cap(soft_cap),
        key_scale=key_scale,
        value_scale=value_scale,
        sink_logits=sink_logits,
        implementation=implementation,
    )
