"""The definition, in plain JAX: one gather of the chosen slots from the cache, then attention over them alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Real

from kernels_pallas.softmax import exponentials, grouped_logits, scaled, weighted_values


def select_attention(
    query: Float[Array, "B T N D"],
    key: Real[Array, "B K S D"],
    value: Real[Array, "B K S D"],
    slots: Int[Array, "B H M"],
    *,
    scale: float,
    soft_cap: float | None = None,
    key_scale: Float[Array, "B K S"] | None = None,
    value_scale: Float[Array, "B K S"] | None = None,
    sink_logits: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N D"]:
    """See :func:`kernels_pallas.select_attention.api.select_attention`."""
    live = slots >= 0
    key, value = (_gathered(x, slots) for x in (key, value))
    key_scale, value_scale = (
        s if s is None else _gathered(s[..., None], slots)[..., 0] for s in (key_scale, value_scale)
    )
    logits = scaled(grouped_logits(query, key, key_scale), scale, soft_cap)
    weights, total = exponentials(logits, live[:, :, None, None], sink_logits)
    return weighted_values(weights, total, value, live, value_scale).astype(query.dtype)


def _gathered(array: Real[Array, "B K S D"], slots: Int[Array, "B H M"]) -> Real[Array, "B H M D"]:
    """Gather array[b, k, slots[b, h, m]], where k is the KV head of h, parallel in b and k.

    The batching dimensions are given, so that a cache sharded over them is read without communication.
    """
    B, K, _, D = array.shape
    index = jnp.maximum(slots, 0).reshape(B, K, -1, 1)  # the heads of a group, one after the other
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=(3,),
        collapsed_slice_dims=(2,),
        start_index_map=(2,),
        operand_batching_dims=(0, 1),
        start_indices_batching_dims=(0, 1),
    )
    chosen = jax.lax.gather(array, index, numbers, slice_sizes=(1, 1, 1, D), mode="clip")
    return chosen.reshape(*slots.shape, D)
