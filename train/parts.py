"""Sums over the tokens of a batch that hold the logits of a part of them at a time, also in the derivative."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def summed(of_part: Callable[..., Any], arrays: tuple[Array, ...], places: int) -> Any:
    """Sum what a function returns of parts of arrays [B, T, ...], of ``places`` tokens of each row; padding is 0.

    Example:
        >>> import jax.numpy as jnp
        >>> from train.parts import summed
        >>> float(summed(jnp.sum, (jnp.ones((2, 5)),), places=2))
        10.0
    """
    B, T = arrays[0].shape[:2]
    places = min(places, T)
    parts = -(-T // places)

    def cut(x: Array) -> Array:  # [B, T, ...] -> [parts, B, places, ...]
        x = jnp.pad(x, ((0, 0), (0, parts * places - T), *((0, 0) for _ in x.shape[2:])))
        return x.reshape(B, parts, places, *x.shape[2:]).swapaxes(0, 1)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def add(total: Any, part: tuple[Array, ...]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, of_part(*part)), None

    cuts = tuple(map(cut, arrays))
    first = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(of_part, *(x[0] for x in cuts)))
    return jax.lax.scan(add, first, cuts)[0]
