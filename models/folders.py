"""Find a model's files: a folder that ships, one of the user's, a GGUF file, or one of the hub."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from models import published
from models.checkpoint import Checkpoint, Tensor, arranged, refuse_pointer
from models.config import Config
from models.config_json import family_of, from_hugging_face
from models.families import family_of_architecture
from models.parameters import tensor_names
from models.tokenizer import Tokenizer, read_object

# Folders inside the package. The adapters of smollm2 differ in their seed.
SHIPPED = {
    "retriever": "retriever",
    "smollm2-answers": "smollm2/answers/1",
    "smollm2-answers-2": "smollm2/answers/2",
    "smollm2-answers-3": "smollm2/answers/3",
}
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Tensors that are not read: rotary frequencies in older checkpoints, and the output matrix where the config ties it.
IGNORED = re.compile(r"lm_head\.weight|.*\.rotary_emb\.inv_freq")


def find_folder(path: str | Path) -> Path:
    """Find the folder of a model's files; see :func:`models.load`. A model with a hub name is downloaded."""
    found = find(path)
    return found.parent if found.is_file() else found


def find(path: str | Path, revision: str | None = None) -> Path:
    """Return a model's folder, or its GGUF file."""
    if path in SHIPPED:
        return Path(__file__).parent / SHIPPED[str(path)]
    if path in published.PUBLISHED:
        return published.find(str(path))
    folder = Path(os.path.expanduser(path))  # unlike Path.expanduser, this leaves an unknown user's name
    if folder.is_dir():
        return folder
    if folder.is_file():
        if folder.suffix.lower() == ".gguf":
            return folder
        if folder.suffix in PICKLES:
            raise ValueError(_pickle_message(folder))
        raise ValueError(f"{path} is a file; give the folder that holds it, with config.json beside the weights.")
    if isinstance(path, str) and re.fullmatch(r"\w[\w.-]*/[\w.-]+", path):
        return _download(path, revision)
    raise FileNotFoundError(
        f"there is no folder {path}; give a folder with config.json and safetensors, a GGUF file, 'retriever' for the "
        "model that ships with kvjax, 'smollm2', 'smollm2-answers', or a hub name such as Qwen/Qwen3-0.6B."
    )


def _download(name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise FileNotFoundError(
            f"there is no folder {name}; to download it from the Hugging Face hub, install huggingface_hub: "
            "pip install huggingface_hub."
        ) from None
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=["*.json", "*.safetensors", "*.jinja"],
                # Second copies of the weights, in their authors' layout.
                ignore_patterns=["original/*", "consolidated*"],
            )
        )
    except Exception as error:  # the hub's, the HTTP client's and the disk's errors have no common base
        reason = " ".join(str(error).split()).partition(". ")[0][:200].rstrip(".")
        at = f" at revision {revision}" if revision else ""
        raise FileNotFoundError(
            f"there is no folder {name}, and downloading it from the Hugging Face hub{at} failed "
            f"({type(error).__name__}: {reason}); check the name and the network, or give a folder."
        ) from None


def _pickle_message(file: Path) -> str:
    return (
        f"{file} holds pickled weights, which can run code when read, so they are refused; convert them to safetensors "
        "(transformers' save_pretrained writes it)."
    )


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor, after checking that all shards are readable and hold what the index says."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ValueError(f"{index} has no weight_map from tensors to files; download it again.")
        shards = sorted(set(weight_map.values()))
        for shard in shards:
            if Path(shard).name != shard or "\0" in shard or len(shard) > 200:
                named = repr(shard[:60])
                raise ValueError(f"{index} names {named}, which is not a file of its own folder; download it again.")
            if not (folder / shard).is_file():
                raise FileNotFoundError(f"{folder} lacks the shard {shard}, which {index.name} names; download it.")
        held = {shard: _tensor_names(folder / shard) for shard in shards}
        for name, shard in weight_map.items():
            if name not in held[shard]:
                raise ValueError(f"{index} puts the tensor {name} in {shard}, which lacks it; download both again.")
        return {name: folder / shard for name, shard in weight_map.items()}
    if single.is_file():
        return dict.fromkeys(_tensor_names(single), single)
    for file in sorted(folder.iterdir()):
        if file.suffix in PICKLES:
            raise ValueError(_pickle_message(file))
    raise FileNotFoundError(f"{folder} has neither {single.name} nor {index.name}; give a folder with safetensors.")


def _tensor_names(file: Path) -> set[str]:
    refuse_pointer(file)
    try:
        with safe_open(file, framework="np") as tensors:
            return set(tensors.keys())
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or corrupted ({error}); download it again.") from None


def read_config(folder: Path) -> Config:
    """Read the config of a checkpoint, with the end tokens of generation_config.json if it exists.

    Chat models stop at tokens that only it names (``<|eot_id|>`` of Llama 3, ``<|endoftext|>`` of Qwen).
    """
    file = folder / "config.json"
    if not file.is_file():
        inside = min(folder.glob("*.gguf"), default=None)
        other = f", or the file {inside}" if inside else ""
        raise FileNotFoundError(
            f"{folder} has no config.json; give the folder of a model in Hugging Face layout{other}."
        )
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
                tensors[name] = Tensor(
                    file, tuple(part.get_shape()), part.get_dtype(), functools.partial(_read_part, file, name)
                )
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
    family = family_of(read_object(folder / "config.json"))
    names = tensor_names(config)
    if unknown := family.tensors.keys() - names.keys():
        raise ValueError(
            f"{folder}: its family names tensors of {', '.join(sorted(unknown))}, which are no parameters."
        )
    names |= family.tensors
    fused = {**family_of_architecture(config.architecture).fused, **family.fused}
    try:
        tensors = arranged(tensors, config, names, fused)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    return Checkpoint(folder, "config.json", config, tokenizer, tensors, names, IGNORED)


def _read_part(file: Path, name: str, window: tuple[slice, ...]) -> np.ndarray:
    # Opened again for each part: the file's pages that were read count as this process's memory until it is closed.
    with safe_open(file, framework="np") as tensors:
        return tensors.get_slice(name)[window]
