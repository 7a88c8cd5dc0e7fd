"""Lowering and compiling for machines that are not at hand."""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from benchmarks.targets import executable, gpu_chip, tpu_chips
from kernels_pallas.dispatch import Kernel
from tests.tiers import first, nightly

CALLS = {"tpu": ("@tpu_custom_call",), "cuda": ("@__gpu$xla.gpu.triton", "@mosaic_gpu_v2")}
INTERPRETED = {"tpu": pltpu.InterpretParams(), "gpu": True}
platforms = pytest.mark.parametrize("platform", CALLS)
# What lowers compiles, as a rule; the TPU compiler is dear.
topologies = pytest.mark.parametrize("topology", first(1, ["v5e:2x2", "v6e:2x2"], rest=nightly))
DEVICES = {"tpu": AbstractDevice("TPU v5e", 1, "tpu"), "cuda": AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")}


def on_device(device: AbstractDevice, chips: int = 1) -> Any:
    """A context in which programs are made for an abstract device."""
    mesh = AbstractMesh((chips,), ("tensor",), axis_types=(AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def needs(*platforms: str) -> None:
    """Skips a test where JAX computes on none of the platforms."""
    if jax.default_backend() not in platforms:
        pytest.skip(f"needs a {' or '.join(platforms).upper()}, and JAX_PLATFORMS=cuda or tpu")


def run_of(operation: str, name: str) -> Callable:
    """Return the kernel for "tpu" or "gpu", interpreted, or the "reference"."""
    if name == "reference":
        return getattr(importlib.import_module(f"kernels_pallas.{operation}.reference"), operation)
    return functools.partial(Kernel(operation, name).run, interpret=INTERPRETED[name])


@functools.cache
def compiled_run(operation: str, name: str, **options: Any) -> Callable:
    """Return the same as one program for each set of options."""
    return jax.jit(functools.partial(run_of(operation, name), **options))


def run_here(operation: str, arrays: Sequence[Any], *, file: str | None = None, **options: Any) -> tuple[Any, Any]:
    """Return what this GPU or TPU's kernel gives, and the reference; a test of what it cannot do is skipped."""
    reference = run_of(operation, "reference")
    try:
        result = jax.jit(functools.partial(Kernel(operation, file or jax.default_backend()).run, **options))(*arrays)
    except NotImplementedError as reason:
        pytest.skip(str(reason))
    with jax.default_matmul_precision("highest"):
        return result, jax.jit(functools.partial(reference, **options))(*arrays)


def check_attention_here(operation: str, arrays: Sequence[Any], **options: Any) -> None:
    """Checks the output of this GPU or TPU's kernel, and the statistics if it has some, against the reference."""
    found = (x if isinstance(x, tuple) else (x,) for x in run_here(operation, arrays, **options))
    (out, *columns), (expected, *others) = found
    coarse = dict(rtol=2e-2, atol=2e-2) if arrays[0].dtype != np.float32 else dict(rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (out, expected)), **coarse)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6), columns, others)


def lowered(platform: str, function: Callable, *arguments: Any) -> str:
    """The program's text for "tpu" or "cuda"; arguments may be shapes."""
    with on_device(DEVICES[platform]):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def kernels_in(platform: str, function: Callable, *arguments: Any) -> int:
    """How many kernels the program lowered for "tpu" or "cuda" calls."""
    text = lowered(platform, function, *arguments)
    return sum(map(text.count, CALLS[platform]))


def refused(platform: str, operation: str, call: Callable, given: Sequence[Any], reason: str, **options: Any) -> None:
    """Checks that "auto" leaves a call to the reference, and that the kernel by its name says why."""
    assert "custom_call @" not in lowered(platform, call, *given).replace("@Sharding", "")
    run = functools.partial(Kernel(operation, {"cuda": "gpu"}.get(platform, platform)).run, **options)
    with pytest.raises(NotImplementedError, match=f"{reason}.*use implementation='reference'"):
        jax.eval_shape(run, *given)


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
        return executable(jax.jit(function, donate_argnums=tuple(donate)).lower(*given))


def compiled_for_gpu(function: Callable, *shapes: jax.ShapeDtypeStruct) -> Any:
    """The executable for an H100; without JAX's plugin for CUDA the test is skipped."""
    try:
        own = SingleDeviceSharding(gpu_chip())
    except ImportError as reason:
        pytest.skip(str(reason))
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own) for x in shapes]
    with on_device(DEVICES["cuda"]):
        return executable(jax.jit(function).lower(*given), {"xla_gpu_autotune_level": 0})
