"""Rotary positions: rotating queries and keys, and moving rotated ones to other positions."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from kernels_pallas.split_heads.reference import rotated
from kvjax._src.checks import real_array


def rotate(
    x: Float[Array, "*#batch D"], cos: Float[Array, "*#batch half"], sin: Float[Array, "*#batch half"]
) -> Float[Array, "*batch D"]:
    """Apply the rotary embedding: element i of a head is rotated together with element i + D/2 (Hugging Face's layout).

    Example:
        >>> import jax.numpy as jnp
        >>> from kvjax import rotate
        >>> rotate(jnp.array([1.0, 0.0]), jnp.array([0.0]), jnp.array([1.0])).tolist()
        [0.0, 1.0]
    """
    x, cos, sin = real_array("x", x), real_array("cos", cos), real_array("sin", sin)
    if x.shape[-1:] != (2 * cos.shape[-1],) or cos.shape != sin.shape:
        raise ValueError(f"heads {x.shape} need cosines and sines for each two elements, not {cos.shape}, {sin.shape}.")
    return rotated(x, cos, sin)


def turn(
    x: Float[Array, "*batch D"], by: Num[Array, "*#batch"], frequency: Float[Array, "*#batch half"]
) -> Float[Array, "*batch D"]:
    """Move rotated queries or keys ``by`` positions: what was rotated at p becomes what p + by would have given.

    Rotations are computed in float32 whatever the dtype of ``x``.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvjax import turn
        >>> turn(jnp.array([1.0, 0.0]), jnp.array(0), jnp.array([0.1])).tolist()
        [1.0, 0.0]
    """
    x, by, frequency = real_array("x", x), real_array("by", by), real_array("frequency", frequency)
    angle = by[..., None].astype(frequency.dtype) * frequency
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return rotate(wide, jnp.cos(angle), jnp.sin(angle)).astype(x.dtype)


def move(
    x: Float[Array, "*batch D"],
    start: Num[Array, "*#batch"],
    end: Num[Array, "*#batch"],
    frequency: Float[Array, "*#batch half"],
) -> Float[Array, "*batch D"]:
    """Move rotated queries or keys from position ``start`` to ``end``, exactly however long the sequence.

    :func:`turn` by the difference would keep the rounding error of ``start * frequency``: a tenth of a radian at
    position 2 ** 21. Here the key is turned back by the same rounded angle that it was rotated by.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return turn(turn(wide, -start, frequency), end, frequency).astype(x.dtype)
