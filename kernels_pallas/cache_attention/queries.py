"""What both kernels are told of the queries: their place in the sequence, and which statistics each one enters."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

POSITION, IS_LAST, IN_WINDOW = range(3)


def describe(query_position: Int[Array, "B T"], window: int) -> Int[Array, "B T 3"]:
    """Of each query its position, whether it is the last valid one, and whether the observation window holds it.

    Example:
        >>> import jax.numpy as jnp
        >>> from kernels_pallas.cache_attention.queries import describe
        >>> describe(jnp.array([[7, 8, -1]]), 1).tolist()
        [[[7, 0, 0], [8, 1, 1], [-1, 0, 0]]]
    """
    valid = query_position >= 0
    from_end = jnp.flip(jnp.cumsum(jnp.flip(valid, 1), axis=1), 1)  # 1 at the last valid query, 2 before it
    columns = (query_position, valid & (from_end == 1), valid & (from_end <= window))
    return jnp.stack([column.astype(jnp.int32) for column in columns], axis=-1)
