"""Wrappers that kernels share: the devices of a mesh, a derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

SPLIT = {"b": "data", "k": "tensor", "n": "tensor"}  # an array's axis -> the mesh's axis that splits it


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


def over_heads(
    function: Callable[..., Any], inputs: Sequence[str], outputs: Sequence[str]
) -> Callable[..., tuple[jax.Array, ...]]:
    """Wrap a function so that each device of a mesh runs it on its own batch rows and heads.

    XLA cannot split a kernel by itself, but batch rows and heads are independent. Batch rows are split over the axis
    "data" and heads over "tensor", as ``models.parameters.partition`` splits them; an array that is sharded otherwise
    is moved. ``function`` returns a tuple. Without a mesh it runs as it is.

    Args:
        inputs, outputs: each array's axes, such as "b k s d"; those named b, k or n are split, the others are not.

    Raises:
        NotImplementedError: if the mesh has other axes, or does not divide the rows or the heads.
    """

    def split(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        mesh = mesh_of(arrays)
        ways = {
            name: size
            for (name, size), kind in zip(mesh.shape.items(), mesh.axis_types, strict=True)
            if kind != AxisType.Manual and size > 1
        }
        if not ways:
            return function(*arrays)
        names = set(SPLIT.values())
        if not ways.keys() <= names or AxisType.Explicit in mesh.axis_types:
            raise NotImplementedError(
                f"a kernel is split over automatic axes {' and '.join(sorted(names))} of a mesh, but this one is {mesh}"
            )
        for axes, array in zip(inputs, arrays, strict=True):
            for axis, size in zip(axes.split(), array.shape, strict=True):
                if size % ways.get(SPLIT.get(axis, ""), 1):
                    raise NotImplementedError(f"{ways[SPLIT[axis]]} devices do not divide axis {axis} of {array.shape}")

        def spec(axes: str) -> PartitionSpec:
            return PartitionSpec(*(SPLIT[axis] if SPLIT.get(axis) in ways else None for axis in axes.split()))

        of_devices = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=tuple(map(spec, inputs)),
            out_specs=tuple(map(spec, outputs)),
            check_vma=False,  # a kernel's outputs do not say over which axes they vary
        )
        return of_devices(*arrays)

    return split


def mesh_of(arrays: Sequence[jax.Array]) -> Any:
    """Return the mesh of the arrays, or else the current abstract mesh, which is empty where none is set."""
    meshes = [jax.typeof(array).sharding.mesh for array in arrays]
    return next((mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh())


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
