"""The definition, in plain JAX: a product's parts are summed in float32 and rounded once, then added and normed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def add_rms_norm(
    x: Float[Array, "rows E"],
    parts: Float[Array, "P more E"],
    weight: Float[Array, "E"],
    *,
    epsilon: float,
    offset: bool,
) -> tuple[Float[Array, "rows E"], Float[Array, "rows E"]]:
    """See :func:`kernels_pallas.add_rms_norm.api.add_rms_norm`."""
    x = x + whole(parts[:, : len(x)], x.dtype)
    return x, rms_norm(x, weight, epsilon, offset)


def whole(parts: Float[Array, "P *shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    """Sum the parts of a product as one of the whole would: in at least float32, then rounded."""
    return jnp.sum(parts, axis=0, dtype=jnp.promote_types(parts.dtype, jnp.float32)).astype(dtype)


def rms_norm(
    x: Float[Array, "*rest E"], weight: Float[Array, "E"], epsilon: float, offset: bool = False
) -> Float[Array, "*rest E"]:
    """Compute x / sqrt(mean(x^2) + epsilon) * weight, with the mean in at least float32.

    With ``offset`` the factor is 1 + weight, which is also added and multiplied in at least float32.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    weight = weight.reshape((1,) * (x.ndim - 1) + weight.shape)
    if offset:
        return (normed * (1 + weight.astype(normed.dtype))).astype(x.dtype)
    return weight * normed.astype(x.dtype)
