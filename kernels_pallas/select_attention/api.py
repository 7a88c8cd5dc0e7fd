"""Attention over chosen slots: the call, its checks, and the choice of an implementation."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Float, Int

from kernels_pallas.select_attention import reference

IMPLEMENTATIONS = {"reference": reference.select_attention}


def select_attention(
    query: Float[Array, "B T N D"],
    key: Float[Array, "*L B K S D"],
    value: Float[Array, "*L B K S D"],
    slots: Int[Array, "B H M"],
    *,
    layer: int | Int[Array, ""] | None = None,
    scale: float | None = None,
    implementation: Literal["auto", "reference"] = "auto",
) -> Float[Array, "B T N D"]:
    """Softmax attention over M slots of each head, gathered out of the cache; the other slots are not read.

    The slots alone say what is seen: positions are not looked at, and all T queries see the same (a decode step has
    one). H is N where each query head reads slots of its own, or K where a group reads the same ones; query head n
    reads KV head n // (N / K). What is read of the cache are 2 B H M rows, against the 2 B K S of dense attention.

    Args:
        key, value: one layer's, or all layers' with ``layer``, which are then gathered from without slicing.
        slots: what each head reads, as ``kvjax.select`` gives them, each slot once; -1 is none: its weight is exactly
            0. A head of none at all gives 0.
        layer: which layer of stacked keys and values.
        scale: factor of the logits, D ** -0.5 by default.
        implementation: "auto" takes the fastest that can run here; a named one runs or raises.

    Returns:
        The output in the queries' dtype; the softmax is float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes that do not fit, a missing layer or one too many, an unknown implementation.

    Example:
        >>> import jax.numpy as jnp
        >>> from kernels_pallas import select_attention
        >>> q, k = jnp.ones((1, 1, 2, 1)), jnp.ones((1, 1, 4, 1))
        >>> v = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 4, 1)
        >>> select_attention(q, k, v, jnp.array([[[0, 1], [3, -1]]])).ravel().tolist()
        [1.5, 4.0]
    """
    B, _, N, D = query.shape
    if key.shape != value.shape or key.ndim not in (4, 5) or key.shape[-4::3] != (B, D) or N % key.shape[-3]:
        raise ValueError(
            f"query {query.shape}, key {key.shape} and value {value.shape} do not fit: expected [B, T, N, D] and twice "
            "[B, K, S, D] or [L, B, K, S, D] with N a multiple of K."
        )
    if (key.ndim == 5) != (layer is not None):
        raise ValueError(
            "the keys and values stack layers: say which with layer=."
            if key.ndim == 5
            else "layer= was given, but the keys and values have no layers."
        )
    if isinstance(layer, int) and not 0 <= layer < key.shape[0]:
        raise ValueError(f"layer is {layer}; the keys and values have layers 0 to {key.shape[0] - 1}.")
    if slots.ndim != 3 or slots.shape[0] != B or slots.shape[1] not in (N, key.shape[-3]):
        raise ValueError(
            f"slots {slots.shape} do not fit: expected [B, H, M] with B {B}, and H {N}, one set a query head, or "
            f"{key.shape[-3]}, one a KV head."
        )
    if implementation not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"unknown implementation {implementation!r}; there are auto, {', '.join(IMPLEMENTATIONS)}.")
    run = IMPLEMENTATIONS["reference" if implementation == "auto" else implementation]
    return run(query, key, value, slots, layer=layer, scale=D**-0.5 if scale is None else scale)
