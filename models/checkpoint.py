"""Describe a checkpoint before its weights are read: its tensors by name, as the decoder has its parameters."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from models.config import Config
from models.parameters import PARAMETERS, ROTATED, head_order, parameter_shapes
from models.tokenizer import Tokenizer


class Tensor(NamedTuple):
    """A tensor of a checkpoint that has not been read yet.

    Attributes:
        file: the file that holds it.
        shape: its shape in the file.
        dtype: the dtype of its numbers, by safetensors' name.
        read: reads the part within slices (one per axis, with known bounds).
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[tuple[slice, ...]], np.ndarray]


class Checkpoint(NamedTuple):
    """All that is known of a checkpoint before its weights are read.

    Attributes:
        place: the folder or file, for messages.
        described: what determines the expected tensors ("config.json" or "metadata"), for messages.
        tensors: the tensors by their names in the file.
        names: the name of each of the decoder's parameters there, where {} stands for the layer, a second {} for the
            expert.
        ignored: the names of tensors that may be there and are not read.
    """

    place: Path
    described: str
    config: Config
    tokenizer: Tokenizer | None
    tensors: Mapping[str, Tensor]
    names: Mapping[str, str]
    ignored: re.Pattern[str]


def arranged(
    tensors: Mapping[str, Tensor], config: Config, names: Mapping[str, str], fused: Mapping[str, Sequence[str]]
) -> dict[str, Tensor]:
    """Return a checkpoint's tensors as the decoder has its parameters.

    A tensor that holds several parameters becomes one for each of them, and the elements of heads that are rotated in
    part are put in order.

    Args:
        names: the name of each parameter among the tensors, see :class:`Checkpoint`.
        fused: the names of tensors that hold several parameters, one after the other, and the parameters.

    Raises:
        ValueError: such a tensor is missing, or has another shape than the config requires.
    """
    found, shapes = dict(tensors), parameter_shapes(config)
    for template, parts in fused.items():
        stored = {part: file_shape(shapes[part][1:], PARAMETERS[part].groups) for part in parts}
        for layer in range(min(config.num_layers, len(tensors))):
            name, start = template.format(layer), 0
            if name not in found:
                raise ValueError(f"it lacks the tensor {name}, which a model of this family has; is it complete?")
            whole = found.pop(name)
            expected = (sum(shape[0] for shape in stored.values()), config.hidden_size)
            if whole.shape != expected:
                raise ValueError(f"{name} has shape {whole.shape}; its config requires {expected}.")
            for part, shape in stored.items():
                found[names[part].format(layer)] = part_from(whole, start, shape)
                start += shape[0]
    if (order := head_order(config)) is not None:
        rotated = [names[name].format(layer) for name in ROTATED for layer in range(config.num_layers)]
        found |= {name: in_order(found[name], order) for name in rotated if name in found}
    return found


def part_from(tensor: Tensor, first: int, shape: tuple[int, ...]) -> Tensor:
    """Return the part of a tensor from ``first`` on along its first axis, as a tensor of the given shape."""
    return tensor._replace(shape=shape, read=functools.partial(_read_part_from, tensor.read, first))


def _read_part_from(
    read: Callable[[tuple[slice, ...]], np.ndarray], first: int, window: tuple[slice, ...]
) -> np.ndarray:
    return read((slice(first + window[0].start, first + window[0].stop), *window[1:]))


def in_order(tensor: Tensor, order: Int[np.ndarray, "D"]) -> Tensor:
    """Return a tensor whose first axis has the elements of heads, with the elements of each head in another order.

    Args:
        order: the element of the file that each element is.
    """
    heads = tensor.shape[0] // len(order)
    vectors = (np.arange(heads)[:, None] * len(order) + order).reshape(-1)
    return tensor._replace(read=functools.partial(_read_in_order, tensor.read, vectors))


def _read_in_order(
    read: Callable[[tuple[slice, ...]], np.ndarray], vectors: Int[np.ndarray, "elements"], window: tuple[slice, ...]
) -> np.ndarray:
    wanted = vectors[window[0]]
    first = int(wanted.min())
    return read((slice(first, int(wanted.max()) + 1), *window[1:]))[wanted - first]


def refuse_pointer(file: Path) -> None:
    """Check that a file is not a Git LFS pointer, which stands in for weights that were not fetched.

    Args:
        file: the file that should hold the weights.

    Raises:
        ValueError: it is a pointer.
    """
    with file.open("rb") as stream:
        if stream.read(19) == b"version https://git":
            raise ValueError(f"{file} is a Git LFS pointer, not the weights; fetch them with git lfs pull.")


def file_shape(shape: tuple[int, ...], groups: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return tuple(int(np.prod([shape[axis] for axis in group])) for group in groups)
