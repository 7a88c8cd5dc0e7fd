"""Adapters: low-rank matrices beside a base model's projections (LoRA, arXiv 2106.09685), in the PEFT library's files.

A folder has adapter_config.json, which names the base model, and adapter_model.safetensors. ``models.load`` reads the
base model's weights W as ``W + scale B A``. Adapters of other kinds are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float
from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.numpy import save as to_safetensors

from models import hosts
from models.config import Config
from models.files import to_json, write_files
from models.parameters import PARAMETERS, ROTATED, head_order, parameter_shapes, tensor_names, tensor_of
from models.tokenizer import read_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)
PREFIX = "base_model.model."
# Fields that change what an adapter computes, and the values that are known here.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None,),
}


class LowRank(NamedTuple):
    """Adds ``up @ down`` to a tensor; ``up`` holds the scale."""

    up: Float[np.ndarray, "outputs r"]
    down: Float[np.ndarray, "r inputs"]


def base_of(folder: Path) -> str | None:
    """Return the name of an adapter's base model; None for a folder that is no adapter."""
    if not (folder / CONFIG).is_file():
        return None
    base = read_object(folder / CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ValueError(f"{folder / CONFIG} names no base_model_name_or_path; write the base model's name there.")
    return base


def read(folder: Path, config: Config) -> dict[tuple[str, tuple[int, ...]], LowRank]:
    """Read an adapter: what is added to a parameter of the decoder, at each place that has a tensor of its own."""
    described = read_object(folder / CONFIG)
    for name, known in PLAIN.items():
        if (given := described.get(name)) not in known:
            raise ValueError(
                f"{folder / CONFIG} has {name} = {given!r}; expected {known[0]!r}: other adapters are not read."
            )
    if not (folder / WEIGHTS).is_file():
        raise FileNotFoundError(f"{folder} lacks {WEIGHTS}; download it.")
    try:
        tensors = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS} is truncated or corrupted ({error}); download it again.") from None
    alpha, root = described.get("lora_alpha"), bool(described.get("use_rslora"))
    if not isinstance(alpha, int | float):
        raise ValueError(f"{folder / CONFIG} has lora_alpha = {alpha!r}; expected a number.")
    found, places = {}, {name: (path, place) for path, place, name in _places(config)}
    for name in sorted(name for name in tensors if name.endswith(".lora_A.weight")):
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        down, up = tensors.pop(name), tensors.pop(name.replace(".lora_A.", ".lora_B."), None)
        if module not in places or up is None:
            raise ValueError(
                f"{folder / WEIGHTS} holds {name}, which is no projection of the base model, or lacks its other half."
            )
        path, place = places[module]
        wanted = tuple(map(math.prod, sizes(config, path)))
        if (*up.shape, *down.shape) != (wanted[0], len(down), len(down), wanted[1]):
            raise ValueError(
                f"{folder / WEIGHTS}: {module} has matrices {up.shape} and {down.shape}; the model's projection is "
                f"{wanted}."
            )
        scale = alpha / (math.sqrt(len(down)) if root else len(down))
        up = up.astype(np.float32) * np.float32(scale)
        if (order := head_order(config)) is not None and path in ROTATED:
            up = up.reshape(-1, len(order), len(down))[:, order].reshape(up.shape)
        found[path, place] = LowRank(up, down.astype(np.float32))
    if tensors or not found:
        held = f"the tensor {min(tensors)}, which is no low-rank matrix" if tensors else "no low-rank matrices"
        raise ValueError(f"{folder / WEIGHTS} holds {held}; only LoRA of projections is read.")
    return found


def save(
    folder: str | Path,
    config: Config,
    low_rank: Mapping[str, Array],
    *,
    base: str,
    scale: float,
) -> None:
    """Write an adapter that ``models.load`` and PEFT read.

    Args:
        folder: created if it does not exist.
        config: the base model's.
        low_rank: "query.A" [L, r, inputs] and "query.B" [L, outputs, r], and so on (:func:`train.lora.init`).
        base: the name of the base model, or its folder.
        scale: the product's factor, alpha / r.

    Example:
        >>> import pathlib, tempfile
        >>> import numpy as np
        >>> import models
        >>> from models import adapters
        >>> config = models.Decoder.tiny().config
        >>> pair = {"key.A": np.ones((2, 3, 32)), "key.B": np.ones((2, 16, 3))}
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> adapters.save(folder, config, pair, base="retriever", scale=2.0)
        >>> adapters.base_of(folder), len(adapters.read(folder, config))
        ('retriever', 2)
    """
    pairs, order = {name: hosts.fetched(array) for name, array in low_rank.items()}, head_order(config)
    tensors, rank = {}, 0
    for path, place, module in _places(config):
        name = path.removeprefix("layers.")
        if f"{name}.A" not in pairs:
            continue
        down, up = (pairs[f"{name}.{which}"][place] for which in "AB")
        rank = len(down)
        if order is not None and path in ROTATED:
            up = up.reshape(-1, len(order), rank)[:, np.argsort(order)].reshape(up.shape)
        for which, matrix in (("A", down), ("B", up)):
            tensors[f"{PREFIX}{module}.lora_{which}.weight"] = np.ascontiguousarray(matrix.astype(np.float32))
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": scale * rank,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    files = {
        WEIGHTS: to_safetensors(tensors, metadata={"format": "pt"}),
        CONFIG: to_json(described, 2).encode(),
    }
    write_files(Path(folder), files)


def _places(config: Config) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield the path, the place and the module's name of each projection."""
    names, shapes = tensor_names(config), parameter_shapes(config)
    for path in projections(config):
        for place in np.ndindex(shapes[path][:1]):
            yield path, place, tensor_of(config, path, names[path], place).removesuffix(".weight")


def projections(config: Config) -> list[str]:
    """Return the paths of a model's projections: the weights of a layer that are one matrix in a checkpoint.

    Those of experts, a matrix each, are none.
    """
    paths = parameter_shapes(config)
    return [path for path in paths if PARAMETERS[path].separate == 1 and len(PARAMETERS[path].groups) == 2]


def sizes(config: Config, path: str) -> tuple[list[int], list[int]]:
    """Return the sizes of a projection's output and input axes."""
    shape = parameter_shapes(config)[path][1:]
    outputs, inputs = ([shape[axis] for axis in group] for group in PARAMETERS[path].groups)
    return outputs, inputs
