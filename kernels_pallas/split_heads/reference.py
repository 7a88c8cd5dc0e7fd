"""The definition, in plain JAX: a product's parts are summed, the biases added, queries and keys rotated."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.add_rms_norm.reference import whole


class QueryKeyValue(NamedTuple):
    """Queries, keys and values of each token."""

    query: Float[Array, "rows N D"]
    key: Float[Array, "rows K D"]
    value: Float[Array, "rows K D"]


def split_heads(
    parts: Float[Array, "P more K heads D"],
    cos: Float[Array, "rows half"],
    sin: Float[Array, "rows half"],
    bias: Float[Array, "K heads D"] | None,
    *,
    dtype: str,
) -> QueryKeyValue:
    """See :func:`kernels_pallas.split_heads.api.split_heads`."""
    made = whole(parts[:, : len(cos)], dtype)
    if bias is not None:
        made = made + bias[None]
    turned = rotated(made[:, :, :-1], cos[:, None, None], sin[:, None, None])
    return QueryKeyValue(turned[:, :, :-1].reshape(len(cos), -1, made.shape[-1]), turned[:, :, -1], made[:, :, -1])


def rotated(
    x: Float[Array, "*#batch D"], cos: Float[Array, "*#batch half"], sin: Float[Array, "*#batch half"]
) -> Float[Array, "*batch D"]:
    """Rotate element i of a head together with element i + D/2, by an angle of each two."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
