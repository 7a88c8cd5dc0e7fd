"""Lowering and compiling for machines that are not at hand."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

_DEVICES = {"tpu": AbstractDevice("TPU v5e", 1, "tpu"), "cuda": AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")}


def _mesh(device: AbstractDevice, chips: int = 1) -> Any:
    mesh = AbstractMesh((chips,), ("heads",), axis_types=(AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def needs_gpu() -> None:
    """Skips a test where JAX sees no GPU."""
    if jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU, and JAX_PLATFORMS=cuda")


def lowered(platform: str, function: Callable, *arguments: Any) -> str:
    """The program's text for "tpu" or "cuda"; arguments may be shapes."""
    with _mesh(_DEVICES[platform]):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


@functools.cache
def _topology(name: str) -> Any:
    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    for variable, value in {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}.items():
        os.environ.setdefault(variable, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=name)


def compiled_for_tpu(
    topology: str,
    function: Callable,
    *shapes: jax.ShapeDtypeStruct,
    specs: Sequence[PartitionSpec] | None = None,
    chips: int = 1,
    donate: Sequence[int] = (),
) -> Any:
    """The executable for a TPU topology, such as "v5e:2x2", with arguments split over ``chips`` by ``specs``."""
    devices = _topology(topology).devices[:chips]
    mesh = Mesh(np.array(devices), ("heads",))
    given = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(shapes, specs or [PartitionSpec()] * len(shapes), strict=True)
    ]
    with _mesh(AbstractDevice(devices[0].device_kind, 1, "tpu"), chips):
        return jax.jit(function, donate_argnums=tuple(donate)).lower(*given).compile()
