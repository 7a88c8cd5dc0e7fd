"""Kernels on a mesh: batch rows and heads are independent, so each device runs the kernel on its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

SPLIT = {"b": "data", "k": "tensor", "n": "tensor"}  # an array's axis -> the mesh's axis that splits it


def over_heads(
    function: Callable[..., Any], inputs: Sequence[str], outputs: Sequence[str]
) -> Callable[..., tuple[jax.Array, ...]]:
    """The function, on each device of a mesh by itself, with the batch rows and heads that lie there.

    XLA cannot split a kernel by itself. Rows are split over the mesh's axis "data" and heads over "tensor", as
    ``models.decoder.SHARDING`` has them; an array that lies otherwise is moved. ``function`` returns a tuple. Without
    a mesh it just runs.

    Args:
        inputs, outputs: each array's axes, such as "b k s d"; those named b, k or n are split, the others whole.

    Raises:
        NotImplementedError: a mesh that has other axes, or that does not divide the rows or the heads.

    Example:
        >>> import jax.numpy as jnp
        >>> from kernels_pallas.partition import over_heads
        >>> over_heads(lambda x: (x.sum(-1),), ["b k s"], ["b k"])(jnp.ones((1, 2, 3)))[0].tolist()
        [[3.0, 3.0]]
    """

    def split(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        mesh = _mesh_of(arrays)
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


def _mesh_of(arrays: Sequence[jax.Array]) -> Any:
    """The mesh that the arrays lie on, or else the one at hand; empty where there is none."""
    meshes = [jax.typeof(array).sharding.mesh for array in arrays]
    return next((mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh())
