"""Which implementation of an operation runs: the reference, or a kernel where one can."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

Implementation = Literal["auto", "reference", "pallas_tpu", "pallas_gpu"]


class Kernel(NamedTuple):
    """A kernel of an operation: a function called like the reference, in a module that is imported when it is chosen.

    It raises NotImplementedError with a reason for what it can't do.
    """

    platform: Literal["tpu", "gpu"]
    module: str
    function: str

    def run(self, *args: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(self.module), self.function)(*args, **options)


def kernels_of(operation: str) -> dict[str, Kernel]:
    """The kernels of an operation for TPU and GPU, in the modules that all operations have them in."""
    return {
        f"pallas_{platform}": Kernel(platform, f"kernels_pallas.{operation}.{platform}", operation)
        for platform in ("tpu", "gpu")
    }


def dispatch(
    implementation: str, reference: Callable[..., Any], kernels: Mapping[str, Kernel], *args: Any, **options: Any
) -> Any:
    """Runs the reference or a kernel.

    "auto" takes the platform's kernel, and the reference where there is none or the kernel raises
    NotImplementedError; a named one runs or raises.

    Raises:
        ValueError: an implementation that does not exist, or that is not for this platform.
        NotImplementedError: a named kernel that can't do this.

    Example:
        >>> from kernels_pallas.dispatch import dispatch
        >>> dispatch("auto", abs, {}, -1)
        1
    """
    here = platform()
    able = [name for name, kernel in kernels.items() if kernel.platform == here]
    if implementation == "auto":
        for name in able:
            try:
                return kernels[name].run(*args, **options)
            except NotImplementedError:
                pass
        return reference(*args, **options)
    if implementation == "reference":
        return reference(*args, **options)
    if implementation not in kernels:
        raise ValueError(f"unknown implementation {implementation!r}; there are auto, reference, {', '.join(kernels)}.")
    if implementation not in able:
        others = ", ".join(["auto", "reference", *able])
        raise ValueError(
            f"implementation {implementation!r} runs on a {kernels[implementation].platform}, but this is a {here}; "
            f"there are {others} here."
        )
    return kernels[implementation].run(*args, **options)


def check_layer(what: str, ndim: int, layer: Any) -> None:
    """Refuses stacked layers of which none is named, and a layer of what is not stacked.

    Raises:
        ValueError: a missing layer or one too many.

    Example:
        >>> from kernels_pallas.dispatch import check_layer
        >>> check_layer("values", 4, 0)
        Traceback (most recent call last):
            ...
        ValueError: layer= was given, but the values have no layers.
    """
    if ndim == 5 and layer is None:
        raise ValueError(f"the {what} stack layers: say which with layer=.")
    if ndim != 5 and layer is not None:
        raise ValueError(f"layer= was given, but the {what} have no layers.")


def of_layer(x: Array, layer: Int[Array, ""] | int | None) -> Array:
    """One layer of stacked arrays, or the array itself.

    Example:
        >>> import jax.numpy as jnp
        >>> from kernels_pallas.dispatch import of_layer
        >>> int(of_layer(jnp.arange(3), 2)), of_layer(jnp.arange(3), None).shape
        (2, (3,))
    """
    return x if layer is None else jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)


def stacked(x: Array, layer: Int[Array, ""] | int | None) -> tuple[Array, Int[Array, "1"]]:
    """Stacked arrays and the layer's number, as kernels take them: a single layer is a stack of one.

    Example:
        >>> import jax.numpy as jnp
        >>> from kernels_pallas.dispatch import stacked
        >>> stacked(jnp.ones(3), None)[0].shape
        (1, 3)
    """
    return (x[None], jnp.zeros(1, jnp.int32)) if layer is None else (x, jnp.asarray(layer, jnp.int32).reshape(1))


def platform() -> str:
    """What a function traced now will run on: "cpu", "gpu" or "tpu".

    An abstract mesh with an abstract device says so for a program that is lowered or compiled on another machine.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.config.jax_default_device
    name = jax.default_backend() if device is None else getattr(device, "platform", device)
    return "gpu" if name in ("cuda", "rocm") else name
