"""Describe a checkpoint before its weights are read: its tensors by name, as the decoder has its parameters."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from safetensors import SafetensorError, safe_open

from models.config import Config
from models.families import Fused, parts_and_heads
from models.parameters import ORDERED, PARAMETERS, head_order, layers_with, parameter_shapes
from models.tokenizer import Tokenizer

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # those that are read
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
Window = tuple[slice, ...]  # one slice per axis of a tensor, with known bounds


class Tensor(NamedTuple):
    """A tensor of a checkpoint that has not been read yet."""

    file: Path
    shape: tuple[int, ...]  # in the file
    dtype: str  # by safetensors' name
    read: Callable[[Window], np.ndarray]  # reads the part within a window


class Checkpoint(NamedTuple):
    """All that is known of a checkpoint before its weights are read."""

    place: Path  # its folder or file, for messages
    described: str  # what determines the expected tensors ("config.json" or "metadata"), for messages
    config: Config
    tokenizer: Tokenizer | None
    tensors: Mapping[str, Tensor]  # by their names in the file
    names: Mapping[str, str]  # of the decoder's parameters there; {} stands for the layer, a second {} for the expert
    ignored: re.Pattern[str]  # the names of tensors that may be there and are not read


def arranged(
    tensors: Mapping[str, Tensor],
    config: Config,
    names: Mapping[str, str],
    fused: Fused,
) -> dict[str, Tensor]:
    """Return a checkpoint's tensors as the decoder has its parameters.

    A tensor that holds several parameters becomes one for each of them, and the elements of heads that are rotated in
    part are put in order.

    Args:
        names: see :class:`Checkpoint`.
        fused: as in :class:`models.families.Family`.
    """
    found, shapes = dict(tensors), parameter_shapes(config)
    for template, together in fused.items():
        parts, heads = parts_and_heads(together, config)
        if not shapes.keys() >= set(parts):  # biases that this model lacks
            continue
        starts, stored = [0], {part: file_shape(shapes[part][1:], PARAMETERS[part].groups) for part in parts}
        for count, *_ in stored.values():
            starts.append(starts[-1] + count // heads)  # within a head's rows
        for layer in layers_with(config, parts[0])[: len(tensors)]:
            name = template.format(layer)
            if name not in found:
                raise ValueError(f"it lacks the tensor {name}, which a model of this family has; is it complete?")
            whole = found.pop(name)
            expected = (heads * starts[-1], *stored[parts[0]][1:])
            if whole.shape != expected:
                raise ValueError(f"{name} has shape {whole.shape}; its config requires {expected}.")
            for (part, shape), *own in zip(stored.items(), starts[:-1], starts[1:], strict=True):
                rows = np.arange(heads)[:, None] * starts[-1] + np.arange(*own)
                one = heads == 1
                found[names[part].format(layer)] = part_from(whole, own[0], shape) if one else rows_from(whole, rows)
    if (order := head_order(config)) is not None:
        ordered = [names[name].format(layer) for name in ORDERED for layer in layers_with(config, name)]
        found |= {name: in_order(found[name], order) for name in ordered if name in found}
    return found


def part_from(tensor: Tensor, first: int, shape: tuple[int, ...]) -> Tensor:
    """Return the part of a tensor from ``first`` on along its first axis, as a tensor of the given shape."""

    def read(window: Window) -> np.ndarray:
        return tensor.read((slice(first + window[0].start, first + window[0].stop), *window[1:]))

    return tensor._replace(shape=shape, read=read)


def in_order(tensor: Tensor, order: Int[np.ndarray, "D"]) -> Tensor:
    """Return a tensor whose first axis has the elements of heads, with those of each head in another order.

    ``order`` says which element of the file each one is.
    """
    heads = tensor.shape[0] // len(order)
    return rows_from(tensor, np.arange(heads)[:, None] * len(order) + order)


def rows_from(tensor: Tensor, rows: Int[np.ndarray, "heads D"]) -> Tensor:
    """Return some rows of a tensor, in an order of their own; where they lie far apart they are read run by run."""
    rows = rows.reshape(-1)

    def read(window: Window) -> np.ndarray:
        wanted = rows[window[0]]
        first, last = int(wanted.min()), int(wanted.max()) + 1
        if last - first <= 2 * len(wanted):
            return tensor.read((slice(first, last), *window[1:]))[wanted - first]
        runs = np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1)
        return np.concatenate([tensor.read((slice(int(run[0]), int(run[-1]) + 1), *window[1:])) for run in runs])

    return tensor._replace(shape=(len(rows), *tensor.shape[1:]), read=read)


def refuse_pointer(file: Path) -> None:
    """Check that a file is not a Git LFS pointer, which stands in for weights that were not fetched."""
    with file.open("rb") as stream:
        if stream.read(19) == b"version https://git":
            raise ValueError(f"{file} is a Git LFS pointer, not the weights; fetch them with git lfs pull.")


@contextlib.contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file to read tensors by their names, after a check that it is one."""
    refuse_pointer(file)
    try:
        with safe_open(file, framework="np") as held:
            yield held
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or corrupted ({error}); download or copy it again.") from None


def read_dtype(file: Path, name: str, stored: str) -> str:
    """Return NumPy's name for the dtype of a tensor in a file, after a check that it is one that is read."""
    if stored not in DTYPES:
        raise ValueError(f"{file}: {name} is stored as {stored}; supported are {', '.join(DTYPES)}.")
    return DTYPES[stored]


def refuse_pickle(file: Path) -> None:
    """Check that a file holds no pickled weights."""
    if file.suffix in PICKLES:
        raise ValueError(f"{file} holds pickled weights, which can run code when read; convert them to safetensors.")


def file_shape(shape: tuple[int, ...], groups: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return tuple(int(np.prod([shape[axis] for axis in group])) for group in groups)
