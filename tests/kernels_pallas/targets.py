"""Lowering and compiling for machines that are not at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.targets import compiled, tpu_chips

_DEVICES = {"tpu": AbstractDevice("TPU v5e", 1, "tpu"), "cuda": AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")}


def on_device(device: AbstractDevice, chips: int = 1) -> Any:
    """A context in which programs are made for an abstract device."""
    mesh = AbstractMesh((chips,), ("tensor",), axis_types=(AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def needs_gpu() -> None:
    """Skips a test where JAX sees no GPU."""
    if jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU, and JAX_PLATFORMS=cuda")


def lowered(platform: str, function: Callable, *arguments: Any) -> str:
    """The program's text for "tpu" or "cuda"; arguments may be shapes."""
    with on_device(_DEVICES[platform]):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def tpu_topology(name: str) -> tuple[Any, ...]:
    """The chips of a topology such as "v5e:2x2"; without libtpu the test is skipped."""
    pytest.importorskip("libtpu")
    return tpu_chips(name)


def compiled_for_tpu(
    topology: str,
    function: Callable,
    *shapes: jax.ShapeDtypeStruct | None,
    specs: Sequence[PartitionSpec] | None = None,
    chips: int = 1,
    donate: Sequence[int] = (),
) -> Any:
    """The executable for a TPU topology, such as "v5e:2x2", with arguments split over ``chips`` by ``specs``."""
    devices = tpu_topology(topology)[:chips]
    mesh = Mesh(np.array(devices), ("tensor",))
    given = [
        None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(shapes, specs or [PartitionSpec()] * len(shapes), strict=True)
    ]
    with on_device(AbstractDevice(devices[0].device_kind, 1, "tpu"), chips):
        return compiled(jax.jit(function, donate_argnums=tuple(donate)).lower(*given))
