"""The definition, in plain JAX: one gather of the chosen rows out of the cache, then attention over them alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
    B, T, N, D = query.shape
    H = slots.shape[1]
    accumulate = jnp.promote_types(query.dtype, jnp.float32)
    read = (slots >= 0)[:, :, None, None]  # [B, H, 1, 1, M]
    key, value = _rows(key, slots, layer), _rows(value, slots, layer)

    grouped = query.reshape(B, T, H, N // H, D)
    logits = scale * jnp.einsum("bthjd,bhmd->bhjtm", grouped, key, preferred_element_type=accumulate)
    logits = jnp.where(read, logits, -jnp.inf)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(peak), peak, 0))
    weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), jnp.finfo(accumulate).tiny)
    value = jnp.where((slots >= 0)[..., None], value, 0)  # 0 * NaN is NaN: what no slot points at must not matter
    # Not "->bthjd": XLA's CPU backend has no bfloat16 product for the operand order that it would make of that.
    out = jnp.einsum("bhjtm,bhmd->bhjtd", weights.astype(value.dtype), value, preferred_element_type=accumulate)
    return jnp.moveaxis(out, 3, 1).reshape(B, T, N, D).astype(query.dtype)


def _rows(
    array: Float[Array, "*L B K S D"], slots: Int[Array, "B H M"], layer: int | Int[Array, ""] | None
) -> Float[Array, "B H M D"]:
    """array[(layer,) b, k, slots[b, h, m]], k the KV head of h, as one gather that is parallel in b and k.

    The batching dimensions are named, so that a cache sharded over them is read without communication.
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
