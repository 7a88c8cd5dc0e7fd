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
from safetensors.numpy import save as to_safetensors

from kvjax._src.checks import check_count, shown
from models import hosts
from models.checkpoint import opened, read_dtype, refuse_pickle
from models.config import Config
from models.files import first_of, to_json, write_files
from models.parameters import ROTATED, head_order, parameter_of, parameter_shapes, tensor_names, tensor_of
from models.tokenizer import read_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
FILES = (CONFIG, WEIGHTS)
PREFIX = "base_model.model."
# Fields of PEFT's LoraConfig that do not change the product: what it was made for, trained with and saved by.
FREE = {
    "base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "peft_version",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "ensure_weight_tying",
    "megatron_core", "qalora_group_size", "r", "lora_alpha",
}  # fmt: skip
# The values of others at which a weight is W + scale B A; a field that has no name here must be OFF.
KNOWN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_rslora": (False, True, None),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),  # others change W, or a layer's scale
}
OFF: tuple[Any, ...] = (None, False, [], {})


class LowRank(NamedTuple):
    """Adds ``up @ down`` to a tensor; ``up`` holds the scale."""

    up: Float[np.ndarray, "outputs r"]
    down: Float[np.ndarray, "r inputs"]


class Base(NamedTuple):
    """The model that an adapter was made for: a name or a folder, and a branch, tag or commit on the hub."""

    name: str
    revision: str | None = None


def base_of(folder: Path) -> Base | None:
    """Return the base model of an adapter; None for a folder that is no adapter."""
    if not (folder / CONFIG).is_file():
        return None
    described = read_object(folder / CONFIG)
    name, revision = described.get("base_model_name_or_path"), described.get("revision")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{folder / CONFIG} names no base_model_name_or_path; write the base model's name there.")
    if not isinstance(revision, str | None):
        raise ValueError(f"{folder / CONFIG} has revision = {shown(revision)}; expected a name, or null.")
    return Base(name, revision)


def read(folder: Path, config: Config) -> dict[tuple[str, tuple[int, ...]], LowRank]:
    """Read an adapter: what is added to a parameter of the decoder, at each place that has a tensor of its own."""
    rank, scale = _described(folder / CONFIG)
    tensors = _tensors(folder)
    found, places = {}, {name: (path, place) for path, place, name in _places(config)}
    for name in sorted(name for name in tensors if name.endswith(".lora_A.weight")):
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        down, up = tensors.pop(name), tensors.pop(name.replace(".lora_A.", ".lora_B."), None)
        if module not in places:
            raise ValueError(f"{folder / WEIGHTS} holds {name}, which is no projection of the base model.")
        path, place = places[module]
        if up is None or (path, place) in found:
            fault = "lacks its other half" if up is None else "is there twice"
            raise ValueError(f"{folder / WEIGHTS} holds {name}, which {fault}; save the adapter again.")
        wanted = tuple(map(math.prod, sizes(config, path)))
        if (up.shape, down.shape) != ((wanted[0], rank), (rank, wanted[1])):
            raise ValueError(f"{folder / WEIGHTS}: {module} is {up.shape}, {down.shape}; expected {wanted}, r {rank}.")
        with np.errstate(over="ignore"):
            up, down = up.astype(np.float32) * np.float32(scale), down.astype(np.float32)
        largest = rank * float(np.abs(up).max()) * float(np.abs(down).max())
        if not largest < float(np.finfo(np.float32).max):  # NaN is not, either
            raise ValueError(f"{folder / WEIGHTS}: {module} holds NaN or too large numbers; download it again.")
        if (order := head_order(config)) is not None and path in ROTATED:
            up = up.reshape(-1, len(order), rank)[:, order].reshape(up.shape)
        found[path, place] = LowRank(up, down)
    if tensors or not found:
        held = f"the tensor {min(tensors)}, which is no low-rank matrix" if tensors else "no low-rank matrices"
        raise ValueError(f"{folder / WEIGHTS} holds {held}; only LoRA of projections is read.")
    return found


def _described(file: Path) -> tuple[int, float]:
    """Return the rank of an adapter and the scale of its products, after a check that it is nothing else."""
    described = read_object(file)
    for name in (*KNOWN, *sorted(described.keys() - KNOWN.keys() - FREE)):
        if (given := described.get(name)) not in (known := KNOWN.get(name, OFF)):
            expected = " or ".join(map(repr, known))
            raise ValueError(f"{file} has {name} = {shown(given)}; expected {expected}; or merge_and_unload it first.")
    rank = check_count(f"{file} has a rank that cannot be: r", described.get("r"), 1, "expected at least 1")
    alpha = described.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValueError(f"{file} has lora_alpha = {shown(alpha)}; expected a number.")
    return rank, alpha / (math.sqrt(rank) if described.get("use_rslora") else rank)


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    """Read the tensors of the file that PEFT would read."""
    file = first_of(folder, (WEIGHTS, PICKLED))
    if file is None:
        raise FileNotFoundError(f"{folder} lacks {WEIGHTS}; download it.")
    refuse_pickle(file)
    with opened(file) as held:
        for name in held.keys():  # noqa: SIM118  it is no dict
            read_dtype(file, name, held.get_slice(name).get_dtype())
        return {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118


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
        >>> adapters.base_of(folder).name, len(adapters.read(folder, config))
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
    return [path for path in paths if parameter_of(path).separate == 1 and len(parameter_of(path).groups) == 2]


def sizes(config: Config, path: str) -> tuple[list[int], list[int]]:
    """Return the sizes of a projection's output and input axes."""
    shape = parameter_shapes(config)[path][1:]
    outputs, inputs = ([shape[axis] for axis in group] for group in parameter_of(path).groups)
    return outputs, inputs
