"""Keys and values in eight bits: vectors of D numbers of one byte each, with one float32 scale each.

A vector is a token's key or value in one head. Its scale is its largest magnitude over the largest number of the dtype,
so that no number is cut off. Vectors are rounded when they enter a cache, each on its own: the result does not depend
on the blocks in which tokens come, and nothing is rounded twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Real

from kvjax._src.checks import is_float, real_array, shown

LARGEST = {"int8": 127, "float8_e4m3fn": 448}  # the dtypes of eight bits, and the largest number that is used of each
DtypesLike = DTypeLike | tuple[DTypeLike, DTypeLike]  # what check_dtypes takes


class Quantised(NamedTuple):
    """Vectors in eight bits; they stand for ``values * scale[..., None]``."""

    values: Real[Array, "*slots D"]
    scale: Float[Array, "*slots"]


class Dtypes(NamedTuple):
    """The dtypes of a cache's keys and values, by name.

    As a text they are one name if both are alike, else two: ``str`` writes it, and :func:`check_dtypes` reads it.
    """

    key: str
    value: str

    def __str__(self) -> str:
        return self.key if self.key == self.value else f"{self.key}/{self.value}"


FLOAT32 = Dtypes("float32", "float32")


def is_quantised(dtype: DTypeLike) -> bool:
    """Return whether vectors of this dtype have a scale."""
    return jnp.dtype(dtype).name in LARGEST


def check_dtype(dtype: Any) -> str:
    """Return the name of a dtype, after a check that keys and values can have it."""
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = ""
    if name not in LARGEST and not (is_float(dtype) and jnp.dtype(dtype).itemsize > 1):
        eight = ", ".join(map(repr, LARGEST))
        raise ValueError(f"dtype is {shown(dtype)}; keys and values are floats, such as 'bfloat16', or {eight}.")
    return name


def check_dtypes(dtype: Any) -> Dtypes:
    """Return the dtypes of keys and of values, after a check of each; one dtype stands for both.

    Args:
        dtype: a dtype; a pair of them, of keys and of values; or the pair as a text, "int8/bfloat16".

    Example:
        >>> from kvjax._src.quantise import check_dtypes
        >>> check_dtypes("int8"), str(check_dtypes(("int8", "bfloat16")))
        (Dtypes(key='int8', value='int8'), 'int8/bfloat16')
    """
    parts = dtype.split("/") if isinstance(dtype, str) else dtype if isinstance(dtype, tuple | list) else [dtype]
    if len(parts) not in (1, 2):
        raise ValueError(f"dtype is {shown(dtype)}; expected one dtype, or keys' and values', such as 'int8/bfloat16'.")
    return Dtypes(check_dtype(parts[0]), check_dtype(parts[-1]))


def quantise(vectors: Float[Array, "*slots D"], dtype: DTypeLike) -> Quantised:
    """Round vectors to eight bits, each with the scale at which its largest magnitude is the dtype's largest number.

    For int8 the error of a number is at most half the scale, 1/254 of the vector's largest magnitude (and rounding of
    float32). One with an infinite number or a NaN becomes NaN. The derivative is zero; see :func:`straight_through`.

    Args:
        vectors: of any dtype of floats; the computation is in float32.
        dtype: "int8" or "float8_e4m3fn".

    Raises:
        ValueError: if the dtype is another.

    Example:
        >>> import jax, kvjax, numpy as np
        >>> values, scale = jax.jit(kvjax.quantise, static_argnums=1)(
        ...     np.float32([[1.0, -2.54, 0.5]]), "int8"
        ... )
        >>> values.tolist(), np.asarray(scale).round(3).tolist()
        ([[50, -127, 25]], [0.02])
    """
    name = check_dtype(dtype)
    if name not in LARGEST:
        raise ValueError(f"dtype is {shown(dtype)}; vectors are rounded to {' or '.join(map(repr, LARGEST))}.")
    vectors = jax.lax.stop_gradient(real_array("vectors", vectors)).astype(jnp.float32)
    scale = jnp.max(jnp.abs(vectors), axis=-1) / LARGEST[name]
    usable = (scale > 0) & (scale < jnp.inf)  # else 0, and 0 times an infinite scale, or a NaN, is NaN
    scaled = jnp.where(usable[..., None], vectors, 0) / jnp.where(usable, scale, 1)[..., None]
    if name == "int8":
        scaled = jnp.clip(jnp.round(scaled), -LARGEST[name], LARGEST[name])
    return Quantised(scaled.astype(dtype), scale)


def dequantise(values: Real[Array, "*slots D"], scale: Float[Array, "*slots"]) -> Float[Array, "*slots D"]:
    """Return the float32 vectors that vectors in eight bits stand for.

    Example:
        >>> import jax, kvjax, numpy as np
        >>> there_and_back = jax.jit(
        ...     lambda x: kvjax.dequantise(*kvjax.quantise(x, "int8"))
        ... )
        >>> there_and_back(np.float32([[127.0, -3.2]])).tolist()
        [[127.0, -3.0]]
    """
    values, scale = real_array("values", values), real_array("scale", scale)
    return values.astype(jnp.float32) * scale[..., None]


def straight_through(vectors: Float[Array, "*slots D"], dtype: DTypeLike) -> Float[Array, "*slots D"]:
    """Round vectors as a cache in eight bits does, but return floats whose derivative is that of the vectors.

    Numbers of eight bits carry no derivative: through a cache of them, none reaches the keys and values. To take one,
    insert these vectors into a cache of floats, which then holds the same numbers. The models do so where their weights
    are traced.

    Example:
        >>> import jax, kvjax, numpy as np
        >>> vectors = np.float32([[127.0, -3.2]])
        >>> jax.jit(jax.grad(lambda x: (kvjax.straight_through(x, "int8") ** 2).sum()))(
        ...     vectors
        ... ).tolist()
        [[254.0, -6.0]]
    """
    vectors = real_array("vectors", vectors)
    rounded = dequantise(*quantise(vectors, dtype)).astype(vectors.dtype)
    return rounded + (vectors - jax.lax.stop_gradient(vectors))  # plus 0, so that nothing is rounded again
