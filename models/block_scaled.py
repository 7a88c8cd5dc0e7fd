"""Weights of eight bits with a scale for each block of rows and columns, as DeepSeek-V3's are published.

Beside ``X.weight``, F8_E4M3 [R, C], stands ``X.weight_scale_inv``, float32 [R / r, C / c] rounded up: a number of the
weight is that of eight bits times its block's scale (arXiv 2412.19437, section 3.3.2). A ``config.json`` names the
block, 128 by 128, as ``weight_block_size``. Numbers are made of both as they are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from models.checkpoint import Tensor, Window

FLOAT8, SCALE = "F8_E4M3", "_scale_inv"


def block_of(quantised: Any) -> tuple[int, int] | None:
    """Return the rows and columns of a block, by the ``quantization_config`` of a config.json; None for other kinds.

    Example:
        >>> from models.block_scaled import block_of
        >>> block_of({"quant_method": "fp8", "weight_block_size": [128, 128]})
        (128, 128)
    """
    if not isinstance(quantised, Mapping) or quantised.get("quant_method") != "fp8":
        return None
    block: Any = quantised.get("weight_block_size")
    sizes = isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    return (block[0], block[1]) if sizes and quantised.get("fmt", "e4m3") == "e4m3" else None


def dequantised(tensors: Mapping[str, Tensor], block: tuple[int, int]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors with numbers in place of those of eight bits and their scales.

    Raises:
        ValueError: if a weight and its scales do not fit each other, or one of them is missing.
    """
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALE)}
    for name in tensors.keys() - found.keys():
        if tensors.get(name.removesuffix(SCALE), tensors[name]).dtype != FLOAT8:
            raise ValueError(f"it lacks the weight in eight bits of {name}; is it complete?")
    for name, tensor in found.items():
        if tensor.dtype == FLOAT8:
            if (scale := tensors.get(name + SCALE)) is None:
                raise ValueError(f"it lacks the scales of {name}; is it complete?")
            found[name] = _numbers(name, tensor, scale, block)
    return found


def _numbers(name: str, tensor: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    wanted = tuple(-(-size // own) for size, own in zip(tensor.shape, block, strict=False))
    if len(tensor.shape) != 2 or scale.shape != wanted or scale.dtype != "F32":
        given = f"{name} is {tensor.shape}, and its scales are {scale.dtype} {scale.shape}"
        raise ValueError(f"{given}; expected F32 {wanted} for blocks of {block[0]} by {block[1]}.")

    def read(window: Window) -> Float[np.ndarray, "rows columns"]:
        whole = tuple(slice(w.start // own, -(-w.stop // own)) for w, own in zip(window, block, strict=True))
        places = [np.arange(w.start, w.stop) // own - w.start // own for w, own in zip(window, block, strict=True)]
        return tensor.read(window).astype(np.float32) * scale.read(whole)[np.ix_(*places)]

    return tensor._replace(dtype="BF16", read=read)


def read_part(file: Path, name: str, window: Window) -> np.ndarray:
    """Read a part of a tensor of eight bits, which the safetensors package does not hand to NumPy."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        described = json.loads(stream.read(length))[name]
    start, shape = 8 + length + described["data_offsets"][0], tuple(described["shape"])
    return np.array(np.memmap(file, np.uint8, "r", start, shape)[window]).view(jnp.float8_e4m3fn)
