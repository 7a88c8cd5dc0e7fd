"""Prepare what kernels share: the floats beside keys and values, a derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


class Beside(NamedTuple):
    """Tell which floats there are per slot beside keys and values; kernels get an array of each, one after the other.

    ``key_scale`` and ``value_scale`` are the scales of those of eight bits, ``bias`` is added to a slot's logits.
    """

    key_scale: bool = False
    value_scale: bool = False
    bias: bool = False

    def split(self, arrays: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Split the arrays into the keys' scales, the values' scales and the biases, each none or one."""
        keys, values = int(self.key_scale), int(self.value_scale)
        return arrays[:keys], arrays[keys : keys + values], arrays[keys + values :]


def given_beside(
    key_scale: Array | None, value_scale: Array | None, bias: Array | None = None
) -> tuple[list[Array], Beside]:
    """Return the arrays that there are beside keys and values, and which they are."""
    arrays = (key_scale, value_scale, bias)
    return [x for x in arrays if x is not None], Beside(*(x is not None for x in arrays))


def in_sets(of_heads: Array | None, sets: int) -> Array | None:
    """Return one number per query head, if there are any, by the heads that a kernel takes together, [sets, each]."""
    return None if of_heads is None else of_heads.reshape(sets, -1)


def with_derivative_of(reference: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Give a kernel the reference's derivative with respect to all its floating-point arguments.

    Both take the same arguments and return the same structure. A program that asks for a derivative runs only the
    reference, whose forward pass it needs anyway.
    """

    def run(*args: Any, **options: Any) -> Any:
        given, structure = jax.tree.flatten((args, options))
        arrays = {i: x for i, x in enumerate(given) if isinstance(x, (jax.Array, np.ndarray))}
        smooth = {i: x for i, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        others = {i: x for i, x in arrays.items() if i not in smooth}

        def call(function: Callable[..., Any], arrays: dict[int, Array]) -> Any:
            args, options = jax.tree.unflatten(structure, [arrays.get(i, x) for i, x in enumerate(given)])
            return function(*args, **options)

        @jax.custom_jvp
        def of_arrays(smooth: dict[int, Array], others: dict[int, Array]) -> Any:
            return call(kernel, smooth | others)

        @of_arrays.defjvp
        def jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
            smooth, others = primals
            return jax.jvp(lambda smooth: call(reference, smooth | others), (smooth,), tangents[:1])

        return of_arrays(smooth, others)

    return run
