"""Weights that are read from their files in parts, and put on the devices of a mesh."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.checkpoint import Checkpoint, Tensor, file_shape
from models.config import Config
from models.parameters import axes_of, layers_with, named, names_in, parameter_of, partition, rows_of, tensor_of

CHUNK_BYTES = 1 << 23
TILE = 128


def parse_mesh(text: str) -> Mesh:
    """Build a mesh from a command line's text: "data=2,tensor=4", where an axis that is left out has size 1.

    Args:
        text: how many ways the batch ("data") and the heads ("tensor") are split. In a model with experts these are
            split "tensor" ways too, and "expert" times as many ways where that axis is given; for all else the devices
            along it do the same work.

    Returns:
        A mesh over the first data x expert x tensor devices, partitioned automatically by JAX.

    Raises:
        ValueError: the text is not such a list, needs more devices than there are, or leaves some of several processes
            without work.

    Example:
        >>> from models.mesh import parse_mesh
        >>> dict(parse_mesh("data=1,tensor=1").shape)
        {'data': 1, 'tensor': 1}
    """
    parts = [re.fullmatch(r"\s*(data|expert|tensor)\s*=\s*([1-9]\d*)\s*", part) for part in text.split(",")]
    named = {part[1]: int(part[2]) for part in parts if part}
    if len(named) < len(parts):
        raise ValueError(f"mesh is {text!r}; write it like 'data=2,tensor=4', each axis at most once.")
    axes = tuple(axis for axis in ("data", "expert", "tensor") if axis != "expert" or axis in named)
    sizes = tuple(named.get(axis, 1) for axis in axes)
    devices, needed = jax.devices(), math.prod(sizes)
    if needed > len(devices):
        raise ValueError(f"mesh {text!r} needs {needed} devices, but there are {len(devices)} ({devices[0].platform}).")
    if needed < len(devices) and jax.process_count() > 1:
        raise ValueError(f"mesh {text!r} takes {needed} of the processes' {len(devices)} devices; it must take all.")
    return Mesh(np.array(devices[:needed]).reshape(sizes), axes)


def checked_mesh(config: Config, mesh: Mesh) -> Mesh:
    """Check that a mesh divides the heads, and return it with automatic axes: JAX partitions the decoder."""
    if set(mesh.axis_names) - {"expert"} != {"data", "tensor"}:
        raise ValueError(f"the mesh has axes {', '.join(map(str, mesh.axis_names))}; expected 'data' and 'tensor'.")
    ways = mesh.shape["tensor"]
    split = [(config.num_heads, "query heads"), *((kind.num_kv_heads, "KV heads") for kind in config.kinds)]
    if config.num_experts:
        split.append((config.num_experts, "experts"))
    if config.shared_size:
        split.append((config.shared_size, "shared feed-forward units"))
    if config.dense_sizes or not config.num_experts:
        split.append((config.dense_size, "feed-forward units"))
    for count, what in split:
        if count % ways:
            raise ValueError(f"tensor={ways} does not divide the model's {count} {what}; choose a divisor of {count}.")
    more = mesh.shape.get("expert", 1)
    if more > 1 and (not config.num_experts or config.num_experts % (more * ways)):
        raise ValueError(f"expert={more} and tensor={ways} do not divide the model's {config.num_experts} experts.")
    return Mesh(mesh.devices, mesh.axis_names)


def place(
    path: str,
    shape: tuple[int, ...],
    checkpoint: Checkpoint,
    dtype: np.dtype,
    mesh: Mesh | None,
    advance: Callable[[int], object],
) -> jax.Array:
    """Put one array on its devices. Each shard is read separately, so no device or buffer holds the others."""
    array, layer = named(checkpoint.config, path)
    names = names_in(checkpoint.config, array)
    number = () if layer is None else (layers_with(checkpoint.config, array).index(layer),)
    separate = parameter_of(names[0]).separate - len(number)  # axes of experts

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        parts = index or (slice(None),) * len(shape)
        bounds = [slice(*part.indices(size)) for part, size in zip(parts, shape, strict=True)]
        out = _aligned([part.stop - part.start for part in bounds], dtype)
        for own in names:
            rows, groups = rows_of(checkpoint.config, own), parameter_of(own).groups
            held, whole, within = out, [*shape[separate:]], bounds[separate:]
            if rows is not None:
                held, whole[-2] = out[..., rows, :], rows.stop - rows.start
                groups = groups if len(axes_of(own)) == len(axes_of(array)) else _with_rows(groups)
                within[-2] = slice(0, whole[-2])
            for place in np.ndindex(out.shape[:separate]):
                expert = [part.start + at for part, at in zip(bounds, place, strict=False)]
                source = tensor_of(checkpoint.config, own, checkpoint.names[own], (*number, *expert))
                _read_tensor(source, checkpoint.tensors[source], groups, whole, within, held[place])
                if mesh is None:
                    advance(1)
        return out

    # Wait, so that a copied buffer is freed before the next parameter allocates one.
    if mesh is None:  # uncommitted, like arrays that callers make; else a step on its own output would compile again
        return jax.device_put(read(None)).block_until_ready()
    ways = mesh.shape["tensor"]
    uneven = any(axis in ("V", "Vi") and size % ways for axis, size in zip(axes_of(path), shape, strict=True))
    sharding = NamedSharding(mesh, PartitionSpec() if uneven else partition(path, mesh))
    # Kept by index, as several devices of a process may hold the same part.
    placed = jax.make_array_from_callback(shape, sharding, functools.cache(read)).block_until_ready()
    advance(len(names) * math.prod(shape[:separate]))
    return placed


def _with_rows(groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of a parameter's axes for its rows of an array, where its last axis but one is two axes."""
    both = max(axis for group in groups for axis in group) - 1
    parts = {both: (both, both + 1), both + 1: (both + 2,)}
    return tuple(tuple(part for axis in group for part in parts.get(axis, (axis,))) for group in groups)


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Allocate an array aligned to 64 bytes, which JAX on a CPU uses without a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def _read_tensor(
    source: str,
    tensor: Tensor,
    groups: tuple[tuple[int, ...], ...],
    shape: Sequence[int],
    bounds: list[slice],
    out: np.ndarray,
) -> None:
    """Read the part of one tensor within ``bounds`` (of the decoder's axes) into ``out``, transposed and cast."""
    order = [axis for group in groups for axis in group]
    inner = [int(np.prod([shape[axis] for axis in group[1:]])) for group in groups]
    window = [slice(bounds[g[0]].start * n, bounds[g[0]].stop * n) for g, n in zip(groups, inner, strict=True)]
    view, start = out.transpose(order), window[0].start  # as the file has it
    # One KV group after the other: between them lie the rows of other tensors.
    for rows in view if len(groups[0]) > 1 else [view]:
        rows = rows.reshape(-1, *file_shape(out.shape, groups[1:]), copy=False)
        step = max(1, CHUNK_BYTES * len(rows) // rows.nbytes)
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            _assign(part, tensor.read((slice(start, start + len(part)), *window[1:])))
            start += len(part)
    if not _finite(out):
        raise ValueError(f"{tensor.file}: {source} holds NaN or infinite numbers as {out.dtype}; take a wider dtype.")


def _finite(array: np.ndarray) -> bool:
    """Return whether all numbers are finite: no exponent has all bits set. NumPy's isfinite is slow on 16 bits."""
    bits = array.view(f"u{array.dtype.itemsize}")
    exponent = np.array(np.inf, array.dtype).view(bits.dtype)
    step = max(1, CHUNK_BYTES * len(bits) // bits.nbytes)
    return all((bits[start : start + step] & exponent).max() < exponent for start in range(0, len(bits), step))


def _assign(out: np.ndarray, block: np.ndarray) -> None:
    """Assign ``out[...] = block``; a transposition runs by tiles that fit the CPU's cache, which is much faster."""
    with np.errstate(over="ignore"):  # numbers that become infinite are reported later
        if out.ndim == 1 or out.flags.c_contiguous:
            out[...] = block
            return
        for row in range(0, out.shape[0], TILE):
            for column in range(0, out.shape[1], TILE):
                tile = (slice(row, row + TILE), slice(column, column + TILE))
                out[tile] = np.ascontiguousarray(block[tile])
