"""Writes a decoder as a Hugging Face folder: model.safetensors, config.json and, with a tokenizer, tokenizer.json."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save as to_safetensors

from models import adapters, hosts
from models.checkpoint import file_shape
from models.config import Config
from models.config_json import to_hugging_face
from models.decoder import Decoder
from models.families import family_of_architecture, parts_and_heads
from models.files import to_json, write_files
from models.joined_experts import put_together
from models.parameters import (
    ORDERED,
    PARAMETERS,
    head_order,
    layers_with,
    parameter_of,
    split_weights,
    tensor_names,
    tensor_of,
)
from models.tokenizer import Tokenizer

OF_FILES = ("dtype", "transformers_weights", "quantization_config")  # fields that say how the weights were stored
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def save(folder: str | Path, model: Decoder, tokenizer: Tokenizer | tokenizers.Tokenizer | None = None) -> None:
    """Write a model so that transformers and `models.load` read it, and nothing of a model that was there before.

    All files are complete under temporary names before the first gets its own. Then the former model's shards, their
    index, its generation_config.json and an adapter beside it are removed.

    A model that was read from a folder keeps its config.json; any other is written as a Llama. A model that a Llama
    cannot express is refused.

    Args:
        folder: created if it does not exist.
        model: its weights are stored in their own dtype.
        tokenizer: the tokenizer that `models.load` returned with the model, or a `tokenizers.Tokenizer`, which gets the
            config's special tokens; its post-processor should add BOS. By default a tokenizer in the folder stays.

    Example:
        >>> import os, tempfile
        >>> import models
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     models.save(folder, models.Decoder.tiny())
        ...     sorted(os.listdir(folder))
        ['config.json', 'model.safetensors']
    """
    folder = Path(os.path.expanduser(folder))
    if model.config.most_attended:
        raise ValueError("the model's indexer was not read, so it cannot be saved; keep the folder it was read from.")
    config = to_hugging_face(model.config)
    tensors = _tensors(model, config["model_type"])
    if (stored := family_of_architecture(config["model_type"]).joined_experts) in (True, "linears", "only rows"):
        tensors = put_together(tensors, stored)
    config = {name: value for name, value in config.items() if name not in OF_FILES}
    config["torch_dtype"] = str(tensors["model.norm.weight"].dtype)
    files = {
        "model.safetensors": to_safetensors(tensors, metadata={"format": "pt"}),
        "config.json": to_json(config, 2).encode(),
    }
    if tokenizer is not None:
        tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer(tokenizer)
        files["tokenizer.json"] = tokenizer.backend.to_str(pretty=False).encode()
        files["tokenizer_config.json"] = to_json(_tokenizer_config(model.config, tokenizer), 2).encode()
    write_files(folder, files, [name for name in _stale(folder, tokenizer is not None) if name not in files])


def _stale(folder: Path, tokenizer: bool) -> list[str]:
    """Return the files of the former model that would be read instead of the new ones, or beside them."""
    stale = ["model.safetensors.index.json", "generation_config.json", *adapters.FILES]
    # As in transformers, the shards of a sharded checkpoint are removed with their index.
    stale += [file.name for file in folder.glob("model-*.safetensors") if SHARD.fullmatch(file.name)]
    return [*stale, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"] if tokenizer else stale


def _tensors(model: Decoder, architecture: str) -> dict[str, np.ndarray]:
    """Return every weight under its name in a Hugging Face model of an architecture, and in Hugging Face's layout."""
    names = tensor_names(dataclasses.replace(model.config, architecture=architecture))
    tensors, order = {}, head_order(model.config)
    arrays = {path: hosts.fetched(array) for path, array in model.arrays().items()}
    for path, array in split_weights(model.config, arrays).items():
        if order is not None and path in ORDERED:
            array = array[..., np.argsort(order)]
        groups, separate = parameter_of(path).groups, parameter_of(path).separate
        axes = [axis for group in groups for axis in group]
        for place in np.ndindex(array.shape[:separate]):
            ours, name = array[place], tensor_of(model.config, path, names[path], place)
            tensors[name] = np.ascontiguousarray(ours.transpose(axes).reshape(file_shape(ours.shape, groups)))
    for template, together in family_of_architecture(architecture).fused.items():
        parts, heads = parts_and_heads(together, model.config)
        for layer in layers_with(model.config, parts[0]) if PARAMETERS[parts[0]].wanted(model.config) else ():
            held = [tensors.pop(PARAMETERS[part].tensor.format(layer)) for part in parts]
            of_heads = [part.reshape(heads, len(part) // heads, *part.shape[1:]) for part in held]
            joined = np.concatenate(of_heads, axis=1)
            tensors[template.format(layer)] = joined.reshape(-1, *joined.shape[2:])
    return tensors


def _tokenizer_config(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    def token(index: int | None) -> str | None:
        return None if index is None else tokenizer.backend.id_to_token(index)

    described: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token(config.bos),
        "eos_token": token(config.eos[0] if config.eos else None),
        "pad_token": token(config.pad),
        "model_max_length": config.max_positions,
        "clean_up_tokenization_spaces": False,
    }
    described |= tokenizer.special_tokens
    return described if tokenizer.chat_template is None else described | {"chat_template": tokenizer.chat_template}
