"""Experts that a checkpoint stores together, a layer's in one tensor.

In Qwen3.5 and Gemma 4 ``gate_up_proj`` is [X, 2 F, E], with all rows of gate before those of up, and ``down_proj``
[X, E, F]. In gpt-oss gate and up take turns. Granite 4 has them by rows, as ``input_linear.weight`` and
``output_linear.weight``.
In bfloat16 or float32 ``gate_up_proj`` is [X, E, 2 F] and ``down_proj`` [X, F, E]. In MXFP4 each is two tensors of
bytes: ``_blocks``, [X, outputs, inputs / 32, 16], with two numbers of four bits in a byte, the low one first, and
``_scales``, [X, outputs, inputs / 32], the exponent of two of each 32 numbers plus 127 (OCP Microscaling Formats 1.0).
Numbers are made of them as they are read, a part of one expert at a time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Float, UInt8

from models.checkpoint import Tensor, Window

_TOGETHER = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(_blocks|_scales|_bias)?")
_LINEARS = re.compile(r"(.*\.block_sparse_moe)\.(input|output)_linear\.weight")
_APART = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_HALVES = {"gate_up": ("gate", "up"), "down": ("down",)}  # every how many rows, from which one on
_LINEAR_OF = {"gate_up": "input", "down": "output"}
_FOUR_BITS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_BYTES = np.stack([_FOUR_BITS[np.arange(256) & 15], _FOUR_BITS[np.arange(256) >> 4]], axis=1)


def taken_apart(tensors: Mapping[str, Tensor], by_rows: bool = False) -> dict[str, Tensor]:
    """Return a checkpoint's tensors with those of each expert, ``experts.0.gate_proj.weight``, [F, E], and so on.

    Args:
        by_rows: whether they are stored as in Qwen3.5.

    Raises:
        ValueError: if blocks and scales do not fit each other, or one of them is missing.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if (linear := _LINEARS.fullmatch(name)) is not None:
            (halves,) = (_HALVES[part] for part, own in _LINEAR_OF.items() if own == linear[2])
            found |= _of_rows(name, tensor, f"{linear[1]}.experts", halves)
            continue
        if (named := _TOGETHER.fullmatch(name)) is None:
            found[name] = tensor
            continue
        stem, part, kind = named.groups()
        if kind == "_scales":
            if name.removesuffix(kind) + "_blocks" not in tensors:
                raise ValueError(f"it lacks the blocks of {name}; is it complete?")
            continue
        halves = _HALVES[part]
        if by_rows:
            found |= _of_rows(name, tensor, stem, halves)
            continue
        tensor, read = _by_outputs(name, tensor, kind, tensors)
        X, rows, *columns = tensor.shape
        for x in range(X):
            for first, own in enumerate(halves):
                of_expert = _every(read, x, first, len(halves))
                of_own = tensor._replace(shape=(rows // len(halves), *columns), read=of_expert)
                found[f"{stem}.{x}.{own}_proj.{'bias' if kind == '_bias' else 'weight'}"] = of_own
    return found


def _of_rows(name: str, tensor: Tensor, stem: str, halves: tuple[str, ...]) -> dict[str, Tensor]:
    """Return each expert's tensors from one of all experts, [X, outputs, inputs]."""
    if len(tensor.shape) != 3 or tensor.shape[1] % len(halves):
        raise ValueError(f"{name} has shape {tensor.shape}, which is not that of a layer's experts.")
    X, rows, columns = tensor.shape[0], tensor.shape[1] // len(halves), tensor.shape[2]

    def part(x: int, first: int) -> Tensor:
        def read(window: Window) -> np.ndarray:
            own = slice(first + window[0].start, first + window[0].stop)
            return tensor.read((slice(x, x + 1), own, window[1]))[0]

        return tensor._replace(shape=(rows, columns), read=read)

    return {
        f"{stem}.{x}.{own}_proj.weight": part(x, at * rows) for x in range(X) for at, own in enumerate(halves)
    }  # fmt: skip


def put_together(tensors: Mapping[str, np.ndarray], stored: bool | str = True) -> dict[str, np.ndarray]:
    """Return the tensors of a model with those of a layer's experts in one, as floats; see :func:`taken_apart`.

    Args:
        stored: as ``models.families.Family.joined_experts``: as in gpt-oss (True), "linears" or "only rows".
    """
    found: dict[str, np.ndarray] = {}
    layers: dict[str, dict[tuple[str, ...], np.ndarray]] = defaultdict(dict)
    for name, array in tensors.items():
        if (named := _APART.fullmatch(name)) is None:
            found[name] = array
        else:
            stem, *which = named.groups()
            layers[stem][tuple(which)] = array
    for stem, arrays in layers.items():
        experts = range(1 + max(int(x) for x, *_ in arrays))
        for part, halves in _HALVES.items():
            if stored is not True:
                each = [np.concatenate([arrays[str(x), own, "weight"] for own in halves]) for x in experts]
                linear = f"{stem.removesuffix('.experts')}.{_LINEAR_OF[part]}_linear.weight"
                found[linear if stored == "linears" else f"{stem}.{part}_proj"] = np.stack(each)
                continue
            for kind, ending in (("weight", ""), ("bias", "_bias")):
                each = [np.stack([arrays[str(x), own, kind].T for own in halves], axis=-1) for x in experts]
                joined = np.stack([x.reshape(*x.shape[:-2], -1) for x in each])
                found[f"{stem}.{part}_proj{ending}"] = np.ascontiguousarray(joined)
    return found


Read = Callable[..., np.ndarray]  # (expert, outputs, inputs) -> [outputs, inputs]; a bias has no inputs


def _by_outputs(name: str, tensor: Tensor, kind: str | None, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Read]:
    """Return a tensor of all experts with its outputs first, and what reads a part of one expert."""
    if len(tensor.shape) != {None: 3, "_bias": 2, "_blocks": 4}[kind]:
        raise ValueError(f"{name} has shape {tensor.shape}, which is not that of a layer's experts.")
    if kind == "_bias":
        return tensor, lambda x, rows: tensor.read((slice(x, x + 1), rows))[0]
    if kind is None:
        X, inputs, outputs = tensor.shape
        turned = tensor._replace(shape=(X, outputs, inputs))
        return turned, lambda x, rows, columns: tensor.read((slice(x, x + 1), columns, rows))[0].T
    (X, outputs, groups, size), scales = tensor.shape, tensors.get(name.removesuffix(kind) + "_scales")
    if scales is None:
        raise ValueError(f"it lacks the scales of {name}; is it complete?")
    if size != 16 or scales.shape != (X, outputs, groups) or {tensor.dtype, scales.dtype} != {"U8"}:
        given = f"{name} is {tensor.dtype} {tensor.shape} and its scales {scales.dtype} {scales.shape}"
        raise ValueError(f"{given}; expected bytes, [..., groups, 16] and [..., groups].")

    def read(x: int, rows: slice, columns: slice) -> np.ndarray:
        within = slice(x, x + 1), rows, slice(columns.start // 32, -(-columns.stop // 32))
        (blocks,), (exponents,) = tensor.read((*within, slice(0, size))), scales.read(within)
        start = columns.start % 32
        return dequantised(blocks, exponents)[:, start : start + columns.stop - columns.start]

    return tensor._replace(shape=(X, outputs, 32 * groups), dtype="BF16"), read


def _every(read: Read, expert: int, first: int, step: int) -> Callable[[Window], np.ndarray]:
    """Return what reads a window of every so many rows of an expert, from the first one on."""

    def of_window(window: Window) -> np.ndarray:
        rows, *columns = window
        return read(expert, slice(step * rows.start, step * rows.stop), *columns)[first::step]

    return of_window


def dequantised(
    blocks: UInt8[np.ndarray, "*rows groups 16"], scales: UInt8[np.ndarray, "*rows groups"]
) -> Float[np.ndarray, "*rows inputs"]:
    """Return the numbers that MXFP4 stands for, in float32; bfloat16 holds them exactly."""
    numbers = _BYTES[blocks].reshape(*scales.shape, 32)
    with np.errstate(over="ignore"):  # what becomes infinite is reported later
        made = np.ldexp(numbers, scales.astype(np.int32)[..., None] - 127)
    return made.reshape(*scales.shape[:-1], -1)
