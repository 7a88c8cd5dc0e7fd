"""The definition, in plain JAX: one gather of the chosen rows from the cache, then attention over them alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.softmax import exponentials, grouped_logits, weighted_values


def select_attention(
    query: Float[Array, "B T N D"],
    key: Float[Array, "*L B K S D"],
    value: Float[Array, "*L B K S D"],
    slots: Int[Array, "B H M"],
    *,
    layer: int | Int[Array, ""] | None,
    scale: float,
) -> Float[Array, "B T N D"]:
    """See :func:`kernels_pallas.select_attention.api.select_attention`."""
    live = slots >= 0
    key, value = _rows(key, slots, layer), _rows(value, slots, layer)
    weights, total = exponentials(scale * grouped_logits(query, key), live[:, :, None, None])
    return weighted_values(weights, total, value, live).astype(query.dtype)


def _rows(
    array: Float[Array, "*L B K S D"], slots: Int[Array, "B H M"], layer: int | Int[Array, ""] | None
) -> Float[Array, "B H M D"]:
    """Gather array[(layer,) b, k, slots[b, h, m]], where k is the KV head of h, parallel in b and k.

    The batching dimensions are given, so that a cache sharded over them is read without communication.
    """
    *_, B, K, _, D = array.shape
    index = jnp.maximum(slots, 0).reshape(B, K, -1, 1)  # the heads of a group, one after the other
    if layer is not None:
        index = jnp.concatenate([jnp.full_like(index, layer), index], axis=-1)
    indexed = (2,) if layer is None else (0, 3)
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=(3,),
        collapsed_slice_dims=indexed,
        start_index_map=indexed,
        operand_batching_dims=(0, 1) if layer is None else (1, 2),
        start_indices_batching_dims=(0, 1),
    )
    rows = jax.lax.gather(array, index, numbers, slice_sizes=(*(1,) * (array.ndim - 1), D), mode="clip")
    return rows.reshape(*slots.shape, D)
