"""The choice of an operation's implementation: the reference, or a kernel where one is supported."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax

from kernels_pallas.checks import check_names
from kernels_pallas.prepare import with_derivative_of

# The one table of kernels: "pallas_<file>" is each operation's file kernels_pallas/<operation>/<file>.py. A file's name
# ends with its platform.
Implementation = Literal["auto", "reference", "pallas_tpu", "pallas_mosaic_gpu", "pallas_gpu"]


class Kernel(NamedTuple):
    """An operation's kernel in a file, called like the reference; its module is imported when it runs.

    The module has two functions or three. ``unsupported`` takes the same arguments and returns the reason why the
    kernel can't run, or None; so does ``slower``, if there is one, for the reason why another kernel of the platform is
    the faster one. ``of_heads`` is called by the operation's ``heads.on_heads``.
    """

    operation: str
    file: str

    @property
    def platform(self) -> str:
        """Return the platform that the kernel runs on: the last word of its file's name."""
        return self.file.rpartition("_")[2]

    def slower(self, *args: Any, **options: Any) -> str | None:
        """Return why another kernel of the platform is faster with these arguments, or None."""
        kernel = importlib.import_module(f"kernels_pallas.{self.operation}.{self.file}")
        return kernel.slower(*args, **options) if hasattr(kernel, "slower") else None

    def run(self, *args: Any, interpret: Any = False, **options: Any) -> Any:
        """Run the kernel, with the reference's derivative; raise NotImplementedError with the reason if it can't."""
        kernel, heads = (
            importlib.import_module(f"kernels_pallas.{self.operation}.{name}") for name in (self.file, "heads")
        )
        reason = kernel.unsupported(*args, **options)
        if reason is not None:
            where = f"{self.operation} on a {self.platform.upper()}"
            raise NotImplementedError(f"{where}: {reason}; use implementation='reference'.")
        of_heads = functools.partial(kernel.of_heads, interpret=interpret)
        run = functools.partial(heads.on_heads, of_heads)
        return with_derivative_of(reference_of(self.operation), run)(*args, **options)


@functools.cache
def kernels_of(operation: str) -> dict[str, Kernel]:
    """Return the kernels of an operation whose modules exist, by the name of the implementation."""
    kernels = {
        name: Kernel(operation, name.removeprefix("pallas_"))
        for name in get_args(Implementation)
        if name.startswith("pallas_")
    }
    folder = f"kernels_pallas.{operation}"
    return {name: k for name, k in kernels.items() if importlib.util.find_spec(f"{folder}.{k.file}") is not None}


def dispatch(operation: str, *args: Any, implementation: Implementation, **options: Any) -> Any:
    """Run an operation's reference or one of its kernels.

    "auto" takes the platform's fastest kernel, or the reference where there is none or all raise NotImplementedError.
    An implementation given by name runs or raises: ValueError if it does not exist or is not for this platform,
    NotImplementedError if it can't run with these arguments.
    """
    kernels = kernels_of(operation)
    if implementation not in ("auto", "reference"):
        return _by_name(implementation, kernels).run(*args, **options)
    for kernel in kernels.values() if implementation == "auto" else ():
        if kernel.platform == platform() and kernel.slower(*args, **options) is None:
            try:
                return kernel.run(*args, **options)
            except NotImplementedError:
                pass
    return reference_of(operation)(*args, **options)


def reference_of(operation: str) -> Callable[..., Any]:
    """Return the definition of an operation in plain JAX, which all of its kernels stand for."""
    return getattr(importlib.import_module(f"kernels_pallas.{operation}.reference"), operation)


def _by_name(implementation: str, kernels: Mapping[str, Kernel]) -> Kernel:
    """Return the kernel of this name, after a check that it runs on this platform."""
    check_names("implementation", implementation, ["auto", "reference", *kernels])
    kernel, here = kernels[implementation], platform()
    if kernel.platform != here:
        able = ["auto", "reference", *(name for name, other in kernels.items() if other.platform == here)]
        ran = f"implementation {implementation!r} runs on a {kernel.platform}, but this is a {here}"
        raise ValueError(f"{ran}; expected one of {', '.join(able)}.")
    return kernel


def check_scale(what: str, vectors: Any, scale: Any) -> None:
    """Check that vectors of eight bits have a scale each, and that given scales fit their vectors."""
    if scale is None and vectors.dtype.itemsize == 1:
        raise ValueError(f"{what} is {vectors.dtype}, but {what}_scale is missing; give {vectors.shape[:-1]} scales.")
    if scale is not None and scale.shape != vectors.shape[:-1]:
        raise ValueError(f"{what}_scale is {scale.shape}; expected {vectors.shape[:-1]}, one scale per vector.")


def platform() -> str:
    """Return the platform that a function traced now will run on: "cpu", "gpu" or "tpu".

    For a program that is lowered or compiled on another machine, it is the abstract device of the abstract mesh.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.config.jax_default_device
    name = jax.default_backend() if device is None else getattr(device, "platform", device)
    return "gpu" if name in ("cuda", "rocm") else name


def compute_capability() -> int | None:
    """Return the compute capability of the GPU that a function traced now will run on, 90 for 9.0; None without one."""
    from jax.experimental.pallas import triton

    try:
        return triton.get_gpu_info().compute_capability  # of the abstract device, if there is one
    except (AttributeError, ValueError):  # an old JAX does not say, nor does JAX of a GPU that it does not know
        return None
