"""Kernels on a mesh: batch rows and heads are independent, so each device runs the kernel on its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

_SHARDED = ("b", "k", "n")  # axes that may be split over devices; the others are brought together


def unsplittable() -> str | None:
    """Why no kernel can be split over the mesh at hand, or None.

    XLA calls back to split a kernel. JAX registers that with a TPU that it finds, not with libtpu alone.

    Example:
        >>> from kernels_pallas.partition import unsplittable
        >>> unsplittable() is None
        True
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    if device is not None and device.platform == "tpu" and mesh.size > 1 and jax.default_backend() != "tpu":
        return f"a program for {mesh.size} chips of a TPU that is not at hand cannot split a kernel over them"
    return None


def over_heads(
    function: Callable[..., Any], inputs: Sequence[str], outputs: Sequence[str]
) -> Callable[..., tuple[jax.Array, ...]]:
    """The function, split over a mesh by batch rows and KV heads alone, whatever else its arguments are split by.

    XLA cannot split a kernel by itself. ``function`` returns a tuple.

    Args:
        inputs, outputs: each array's axes, such as "b k s d"; those named b, k or n may be split.

    Example:
        >>> import jax.numpy as jnp
        >>> from kernels_pallas.partition import over_heads
        >>> over_heads(lambda x: (x.sum(-1),), ["b k s"], ["b k"])(jnp.ones((1, 2, 3)))[0].tolist()
        [[3.0, 3.0]]
    """

    def positional(*arrays: jax.Array) -> tuple[jax.Array, ...]:  # custom_partitioning resolves keywords by signature
        return function(*arrays)

    split = custom_partitioning(positional)
    every = dict.fromkeys(axis for axes in (*inputs, *outputs) for axis in axes.split())
    together = tuple(axis for axis in every if axis not in _SHARDED)

    def partition(mesh: Any, arg_shapes: Any, result_shape: Any) -> Any:
        specs: dict[str, Any] = {}
        for axes, shape in zip(inputs, arg_shapes, strict=True):
            spec = (*shape.sharding.spec, *[None] * len(axes.split()))
            for axis, names in zip(axes.split(), spec, strict=False):
                if axis in _SHARDED and names is not None:
                    specs.setdefault(axis, names)

        def sharding(axes: str) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(specs.get(axis) for axis in axes.split())))

        return mesh, positional, tuple(map(sharding, outputs)), tuple(map(sharding, inputs))

    split.def_partition(
        partition=partition,
        sharding_rule=f"{', '.join(inputs)} -> {', '.join(outputs)}",
        need_replication_factors=together,
    )
    return split
