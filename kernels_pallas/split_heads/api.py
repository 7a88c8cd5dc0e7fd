"""Queries, keys and values of a product: the call, its checks, and the choice of an implementation."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels_pallas.dispatch import Implementation, dispatch
from kernels_pallas.split_heads.reference import QueryKeyValue


def split_heads(
    parts: Float[Array, "P more K heads D"],
    cos: Float[Array, "rows half"],
    sin: Float[Array, "rows half"],
    bias: Float[Array, "K heads D"] | None = None,
    *,
    dtype: DTypeLike,
    implementation: Implementation = "auto",
) -> QueryKeyValue:
    """Split a product into queries, keys and values, and rotate queries and keys: element i with element i + D / 2.

    Args:
        parts: of the product, for each KV head those of its N / K query heads, of its key and of its value; summed in
            float32 and rounded. There may be more rows than those of ``cos``, which are not read.
        cos, sin: of each token's angles, D / 2 of them.
        bias: is added before the rotation.
        dtype: of the queries, keys and values.

    Returns:
        The rotated queries ``[rows, N, D]`` and keys ``[rows, K, D]``, and the values.

    Raises:
        ValueError: if shapes do not fit, or the implementation is unknown or for another platform.
        NotImplementedError: if a kernel was given by name and can't run with these arguments.

    Example:
        >>> import functools, jax, jax.numpy as jnp
        >>> from kernels_pallas import split_heads
        >>> parts = jnp.arange(6.0).reshape(1, 1, 1, 3, 2)
        >>> run = jax.jit(functools.partial(split_heads, dtype=jnp.float32))
        >>> heads = run(parts, jnp.zeros((1, 1)), jnp.ones((1, 1)))
        >>> heads.query.tolist(), heads.key.tolist(), heads.value.tolist()
        ([[[-1.0, 0.0]]], [[[-3.0, 2.0]]], [[[4.0, 5.0]]])
    """
    rows, half = cos.shape
    fits = parts.ndim == 5 and parts.shape[1] >= rows and parts.shape[3] > 2 and parts.shape[4] == 2 * half
    if not fits or sin.shape != cos.shape or (bias is not None and bias.shape != parts.shape[2:]):
        wrong = f"parts {parts.shape}, cosines {cos.shape}, sines {sin.shape}"
        raise ValueError(f"{wrong}{'' if bias is None else f' and biases {bias.shape}'} do not fit.")
    given = parts, cos, sin, bias
    return dispatch("split_heads", *given, dtype=jnp.dtype(dtype).name, implementation=implementation)
