"""Find a model's files: a folder that ships, one of the user's, a GGUF file, or one of the hub."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from kvjax._src.checks import nearest, shown
from models import hub, published
from models.block_scaled import FLOAT8, block_of, dequantised, read_part
from models.checkpoint import DTYPES, Checkpoint, Tensor, arranged, opened, refuse_pickle
from models.config import Config
from models.config_json import family_of, from_hugging_face, language_model
from models.families import family_of_architecture
from models.files import first_of, warn_of_unfinished
from models.joined_experts import taken_apart
from models.parameters import tensor_names
from models.tokenizer import Tokenizer, read_object

# Folders inside the package, or in that of smollm2's weights. The answers' adapters differ in their seed.
SHIPPED = {
    "retriever": "retriever",
    "smollm2-answers": "smollm2/answers/1",
    "smollm2-answers-2": "smollm2/answers/2",
    "smollm2-answers-3": "smollm2/answers/3",
    "smollm2-documents": "smollm2/documents",
}
# Files that hold a model's weights, in the order in which transformers looks for them.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# In older checkpoints, where the config says the same; and layers that predict several tokens (Qwen3-Next).
IGNORED = re.compile(r".*\.rotary_emb\.inv_freq|mtp\..*")
# What sees and hears beside a language model.
_SEEING = "vision_tower|visual|multi_modal_projector|audio_tower|embed_vision|embed_audio|vision_embedder"
OTHER_PARTS = re.compile(rf"(model\.)?({_SEEING})\..*|{IGNORED.pattern}")
# What the names of a model's tensors begin with: by itself, without its output matrix, or in a model that also sees.
PREFIXES = ("model.", "", "language_model.model.", "model.language_model.", "language_model.")


def find_folder(path: str | Path) -> Path:
    """Find the folder of a model's files; see :func:`models.load`. A model with a hub name is downloaded."""
    found = find(path)
    return found.parent if found.is_file() else found


def find(path: str | Path, revision: str | None = None) -> Path:
    """Return a model's folder, or its GGUF file."""
    if path in SHIPPED:
        return published.shipped(SHIPPED[str(path)])
    if path in published.PUBLISHED:
        return published.find(str(path))
    folder = Path(os.path.expanduser(path))  # unlike Path.expanduser, this leaves an unknown user's name
    if folder.is_dir():
        warn_of_unfinished(folder)
        return folder
    if folder.is_file():
        if folder.suffix.lower() == ".gguf":
            return folder
        refuse_pickle(folder)
        raise ValueError(f"{path} is a file; give the folder that holds it, with config.json beside the weights.")
    if isinstance(path, str) and hub.NAME.fullmatch(path):
        return hub.find(path, revision)
    wrong = f"there is no folder {path}; give a model's folder, a GGUF file, 'retriever', 'smollm2',"
    near = nearest(str(path), known=[*SHIPPED, *published.PUBLISHED])
    raise FileNotFoundError(f"{wrong} 'smollm2-documents' or a hub name such as Qwen/Qwen3-0.6B.{near}")


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor, after checking that all files are readable and hold what an index says."""
    config = folder / "config.json"
    named = read_object(config).get("transformers_weights")
    file = first_of(folder, WEIGHTS) if named is None else _named(config, named)
    if file is None or file.suffix not in (".safetensors", ".json"):
        for other in sorted(folder.iterdir()):
            refuse_pickle(other)
        raise FileNotFoundError(f"{folder} has neither {' nor '.join(WEIGHTS[:2])}; give a folder with safetensors.")
    if file.suffix == ".safetensors":
        return dict.fromkeys(_tensor_names(file), file)
    weight_map = read_object(file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ValueError(f"{file} has no weight_map from tensors to files; download it again.")
    held = {shard: _tensor_names(_named(file, shard)) for shard in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        if name not in held[shard]:
            raise ValueError(f"{file} puts the tensor {name} in {shard}, which lacks it; download both again.")
    for shard, names in held.items():
        for name in sorted(names):
            if weight_map.setdefault(name, shard) != shard:
                raise ValueError(f"{folder / shard} and {weight_map[name]} both hold {name}; download them again.")
    return {name: folder / shard for name, shard in weight_map.items()}


def _named(file: Path, name: Any) -> Path:
    """Return the file that another one names, after a check that it is there, in the same folder."""
    if not isinstance(name, str) or Path(name).name != name or "\0" in name or len(name) > 200:
        raise ValueError(f"{file} names {shown(name)}, which is not a file of its own folder; download it again.")
    if not (file.parent / name).is_file():
        raise FileNotFoundError(f"{file.parent} lacks the file {name}, which {file.name} names; download it.")
    return file.parent / name


def _tensor_names(file: Path) -> set[str]:
    with opened(file) as tensors:
        return set(tensors.keys())


def read_config(folder: Path) -> Config:
    """Read the config of a checkpoint, with the end tokens of generation_config.json if it exists.

    Chat models stop at tokens that only it names (``<|eot_id|>`` of Llama 3, ``<|endoftext|>`` of Qwen).
    """
    file = folder / "config.json"
    if not file.is_file():
        inside = min(folder.glob("*.gguf"), default=None)
        other = f", or the file {inside}" if inside else ""
        raise FileNotFoundError(f"{folder} has no config.json; give a folder in Hugging Face layout{other}.")
    raw = read_object(file)
    stop = read_object(folder / "generation_config.json").get("eos_token_id")
    if stop is not None:
        raw["eos_token_id"] = stop
    try:
        return from_hugging_face(raw)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def open_folder(folder: Path) -> Checkpoint:
    config = read_config(folder)
    files = _tensor_files(folder)
    tensors = {}
    for file in sorted(set(files.values())):
        with safe_open(file, framework="np") as held:
            for name in (name for name in files if files[name] == file):
                part = held.get_slice(name)
                read = read_part if part.get_dtype() == FLOAT8 else _read_part
                shape = tuple(part.get_shape())
                tensors[name] = Tensor(file, shape, part.get_dtype(), functools.partial(read, file, name))
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
    raw = read_object(folder / "config.json")
    own = language_model(raw)
    family = family_of(own)
    try:
        if (block := block_of(own.get("quantization_config"))) is not None:
            tensors = dequantised(tensors, block)
        tensors = taken_apart(tensors, family.joined_experts is not True) if family.joined_experts else tensors
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    names = tensor_names(config)
    if unknown := family.tensors.keys() - names.keys():
        raise ValueError(f"{folder}: its family names {', '.join(sorted(unknown))}, which are no parameters.")
    names |= family.tensors
    fused = {**family_of_architecture(config.architecture).fused, **family.fused}
    prefix = _prefix(tensors, names)
    names = {name: _renamed(tensor, prefix, tensors) for name, tensor in names.items()}
    fused = {_renamed(tensor, prefix, tensors): parts for tensor, parts in fused.items()}
    if config.tie_embeddings:
        config, tensors = _tied(folder, config, tensors, names)
    try:
        tensors = arranged(tensors, config, names, fused)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    ignored = IGNORED if own is raw else OTHER_PARTS
    if more := own.get("num_nextn_predict_layers"):  # they predict later tokens, as drafts
        numbers = "|".join(map(str, range(config.num_layers, config.num_layers + more)))
        ignored = re.compile(rf"{ignored.pattern}|{re.escape(prefix)}layers\.({numbers})\..*")
    if config.shared_layers:  # those of layers that share others are never read
        numbers = "|".join(map(str, range(config.num_layers - config.shared_layers, config.num_layers)))
        parts = r"self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight"
        ignored = re.compile(rf"{ignored.pattern}|{re.escape(prefix)}layers\.({numbers})\.{parts}")
    if config.most_attended:
        ignored = re.compile(rf"{ignored.pattern}|.*\.self_attn\.indexer\..*")
    return Checkpoint(folder, "config.json", config, tokenizer, tensors, names, ignored)


def _prefix(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> str:
    """Return what the names of a model's tensors begin with in a folder, in place of "model."."""
    norm = names["norm"].removeprefix(PREFIXES[0])
    return next((prefix for prefix in PREFIXES if prefix + norm in tensors), PREFIXES[0])


def _renamed(tensor: str, prefix: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the name of a tensor in a folder; an output matrix may lie within the language model or outside."""
    if tensor.startswith(PREFIXES[0]):
        return prefix + tensor.removeprefix(PREFIXES[0])
    inside = prefix.removesuffix(PREFIXES[0]) + tensor
    return inside if inside in tensors else tensor


def _tied(
    folder: Path, config: Config, tensors: dict[str, Tensor], names: Mapping[str, str]
) -> tuple[Config, dict[str, Tensor]]:
    """Return the config and the tensors of a model whose config ties its output matrix, as transformers reads them.

    An output matrix that equals the embedding is left out, and one that is there instead of it is the embedding. Where
    they differ, both are kept.
    """
    embedding, head = tensors.get(names["embedding"]), tensors.get(names["head"])
    if head is None:
        return config, tensors
    others = {name: tensor for name, tensor in tensors.items() if name != names["head"]}
    if embedding is None:
        return config, {**others, names["embedding"]: head}
    if _same(embedding, head):
        return config, others
    warnings.warn(
        f"{folder / 'config.json'} ties the output matrix to the embedding, but {head.file.name} holds a different "
        f"{names['head']}: it is used, as transformers does; set tie_word_embeddings to false.",
        stacklevel=2,
    )
    return dataclasses.replace(config, tie_embeddings=False), tensors


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two matrices hold the same numbers, by some rows at a time."""
    if one.shape != other.shape or not {one.dtype, other.dtype} <= DTYPES.keys():
        return False
    rows, *rest = (slice(0, size) for size in one.shape)
    step = max(1, 2**24 // math.prod(one.shape[1:]))
    parts = ((slice(first, min(first + step, rows.stop)), *rest) for first in range(0, rows.stop, step))
    return all(np.array_equal(one.read(part), other.read(part)) for part in parts)


def _read_part(file: Path, name: str, window: tuple[slice, ...]) -> np.ndarray:
    # Opened again for each part: the file's pages that were read count as this process's memory until it is closed.
    with safe_open(file, framework="np") as tensors:
        return tensors.get_slice(name)[window]
