"""Derivatives of kernels: where one is asked for, the reference runs in the kernel's place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def with_derivative_of(reference: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, with the reference's derivative by all its arguments of floating-point numbers.

    Both take the same positional arrays and give the same structure. A program that asks for a derivative runs the
    reference alone, whose forward pass it needs anyway.

    Example:
        >>> import jax
        >>> from kernels_pallas.derivative import with_derivative_of
        >>> both = with_derivative_of(lambda x: x**2, lambda x: x * x)
        >>> float(both(3.0)), float(jax.grad(both)(3.0))
        (9.0, 6.0)
    """

    @jax.custom_jvp
    def function(*arrays: Any) -> Any:
        return kernel(*arrays)

    @function.defjvp
    def jvp(arrays: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        smooth = [i for i, x in enumerate(arrays) if jax.numpy.issubdtype(jax.numpy.result_type(x), jax.numpy.floating)]

        def of_smooth(*some: Any) -> Any:
            given = list(arrays)
            for i, x in zip(smooth, some, strict=True):
                given[i] = x
            return reference(*given)

        return jax.jvp(of_smooth, tuple(arrays[i] for i in smooth), tuple(tangents[i] for i in smooth))

    return function
