"""Checkpoints: a folder in Hugging Face layout, a hub name or a GGUF file becomes a Decoder and a Tokenizer.

Weights are read from safetensors or GGUF only; nothing in a folder is ever executed. Every tensor's name and shape is
checked before the first weight is read, but for an output matrix beside an embedding that a config ties it to: the two
are compared first. Then the decoder's arrays are read, cast and placed one at a time, the largest
first, so that at most one of them is in memory besides the finished ones.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kvjax._src.checks import shown
from models import adapters
from models.checkpoint import Checkpoint, Tensor, Window, file_shape, read_dtype
from models.config import Config
from models.decoder import Decoder
from models.folders import find, open_folder
from models.gguf import open_file, read_sampling
from models.mesh import checked_mesh, place
from models.parameters import array_shapes, known_dtype, parameter_of, parameter_shapes, tensor_of
from models.progress import progress_bar
from models.sampling import Sampling, check_sampling
from models.tokenizer import Tokenizer, read_object

# Fields of generation_config.json that are applied, elsewhere or here, or that choose no token.
SAID = {
    *Sampling._fields, "do_sample", "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id",
    "transformers_version", "_from_model_config", "_commit_hash", "max_length", "max_new_tokens", "use_cache",
    "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "compile_config", "disable_compile",
    "low_memory", "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores",
    "output_logits", "renormalize_logits", "early_stopping", "length_penalty", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind",
    "max_matching_ngram_size", "penalty_last_n", "mirostat_tau", "mirostat_eta", "xtc_threshold",
}  # fmt: skip
# The values of others at which they do nothing; null and nothing never do, and else 0 or false.
NEUTRAL = dict.fromkeys(
    ("typical_p", "top_h", "num_beams", "num_beam_groups", "num_return_sequences", "encoder_repetition_penalty",
     "guidance_scale", "penalty_repeat"), 1,
) | {"forced_bos_token_id": None, "forced_eos_token_id": None}  # fmt: skip


def load(
    path: str | Path,
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> tuple[Decoder, Tokenizer | None]:
    """Load a decoder and its tokenizer.

    Args:
        path: a folder with config.json and safetensors, one file or sharded; a GGUF file (needs gguf); "retriever",
            the model that ships with the package; "smollm2", once `python -m models.get smollm2` has fetched it;
            "smollm2-documents", the same with an adapter that answers questions about a document
            (models/smollm2/documents), and "smollm2-answers", with one that policies are judged on
            (models/smollm2/answers); a name on the Hugging Face hub, such as "Qwen/Qwen3-0.6B" (needs
            huggingface_hub); or the folder of a LoRA adapter in PEFT's files, which is added to the base model that it
            names.
        dtype: the dtype that the weights are cast to, such as "bfloat16"; None keeps the checkpoint's (the dtype of
            most weights, if it mixes several; float32 if they are quantised).
        mesh: devices with axes "data" and "tensor", and "expert" if it has one (see :func:`parse_mesh`), that the
            weights are split over as ``models.parameters`` says; None puts them on the default device. Each process
            reads only the parts of its own devices.
        revision: a branch, tag or commit on the hub.

    Returns:
        The model, and its tokenizer or None without one (no tokenizer.json, or none in the GGUF file).

    Raises:
        FileNotFoundError: no such folder, file or hub name, or a file is missing from it.
        ImportError: the path is a GGUF file, and the package gguf is not installed.
        ValueError: a file cannot be used (corrupted, of another shape or architecture, pickled, with weights that are
            not finite), the dtype is unknown, or the mesh does not divide the heads.

    Example:
        >>> import models
        >>> model, tokenizer = models.load("retriever")
        >>> model.config.num_layers
        6
    """
    checkpoint, target, mesh = _opened(path, dtype, mesh, revision)
    by_name, shapes = parameter_shapes(checkpoint.config), array_shapes(checkpoint.config)
    total = sum(math.prod(shape[: parameter_of(name).separate]) for name, shape in by_name.items())
    # No bar for a model that loads within a second.
    with progress_bar("tensor", total=total, desc="loading", delay=1, leave=False) as bar:
        arrays = {
            path: place(path, shapes[path], checkpoint, target, mesh, bar.update)
            for path in sorted(shapes, key=lambda path: -np.prod(shapes[path]))
        }
    return Decoder(checkpoint.config, arrays), checkpoint.tokenizer


def describe(
    path: str | Path, *, dtype: DTypeLike | None = None, mesh: Mesh | None = None
) -> tuple[Config, Tokenizer | None]:
    """Check a checkpoint as far as possible without reading its weights, and return its config and its tokenizer."""
    checkpoint, *_ = _opened(path, dtype, mesh, None)
    return checkpoint.config, checkpoint.tokenizer


def _opened(
    path: str | Path, dtype: DTypeLike | None, mesh: Mesh | None, revision: str | None
) -> tuple[Checkpoint, np.dtype, Mesh | None]:
    """Return the checkpoint, the weights' dtype and the mesh, all checked."""
    wanted = None if dtype is None else known_dtype(dtype)
    found, adapter = _found(path, revision)
    checkpoint = open_file(found) if found.is_file() else open_folder(found)
    if adapter is not None:
        checkpoint = _adapted(checkpoint, adapter)
    if mesh is not None:
        mesh = checked_mesh(checkpoint.config, mesh)
    stored = _check_tensors(checkpoint)
    return checkpoint, np.dtype(jax.dtypes.canonicalize_dtype(wanted or stored)), mesh


def _found(path: str | Path, revision: str | None = None) -> tuple[Path, Path | None]:
    """Return the folder or the GGUF file of a model, or of an adapter's base model, and the adapter's folder."""
    found = find(path, revision)
    base = adapters.base_of(found)
    if base is None:
        return found, None
    if (found / "config.json").is_file():  # as in transformers, the base model is in the same folder
        return found, found
    below = find(*base)
    if adapters.base_of(below) is not None:
        raise ValueError(f"{found} adapts {base.name}, which is an adapter itself; save the adapted model as a whole.")
    return below, found


def _adapted(checkpoint: Checkpoint, adapter: Path) -> Checkpoint:
    """Return a checkpoint whose tensors are read with an adapter's products added, with a tokenizer that it has."""
    if (adapter / "tokenizer.json").is_file():
        checkpoint = checkpoint._replace(tokenizer=Tokenizer.from_folder(adapter))
    tensors = dict(checkpoint.tensors)
    for (path, layer), low_rank in adapters.read(adapter, checkpoint.config).items():
        name = tensor_of(checkpoint.config, path, checkpoint.names[path], layer)
        if name in tensors:
            tensors[name] = _with_low_rank(tensors[name], low_rank)
    return checkpoint._replace(tensors=tensors)


def _with_low_rank(tensor: Tensor, low_rank: adapters.LowRank) -> Tensor:
    def read(window: Window) -> np.ndarray:
        return tensor.read(window).astype(np.float32) + low_rank.up[window[0]] @ low_rank.down[:, window[1]]

    return tensor._replace(read=read)


def published_sampling(path: str | Path) -> Sampling:
    """Read how a model's authors choose its tokens: greedily, unless its files say that tokens are drawn.

    A folder says so in generation_config.json ("do_sample"), a GGUF file by "general.sampling.temp". What they say
    beside it is applied where :class:`Sampling` has it, and named in a warning otherwise.
    """
    found, _ = _found(path)
    if found.is_file():
        said = read_sampling(found)
    else:
        found = found / "generation_config.json"
        said = read_object(found)
    off: tuple[Any, ...] = (None, "", [], {})
    unknown = [name for name in said if name not in SAID and said[name] not in (*off, NEUTRAL.get(name, 0))]
    if unknown:
        warnings.warn(f"{found} sets {', '.join(unknown)}, which is not applied.", stacklevel=2)
    drawn = {name: value for name in Sampling._fields if (value := said.get(name)) is not None}
    for name in ("top_k", "min_p"):
        if isinstance(drawn.get(name), int | float) and drawn[name] <= 0:  # off, as in transformers and llama.cpp
            del drawn[name]
    sampled = said.get("do_sample")
    if not isinstance(sampled, bool | None):
        raise ValueError(f"{found} has do_sample = {shown(sampled)}; expected true or false.")
    if not sampled:  # then only logits are changed
        drawn = {name: value for name, value in drawn.items() if name == "repetition_penalty"}
    try:
        return check_sampling(jax.random.key(0), **({"temperature": 1.0} if sampled else {}) | drawn)
    except ValueError as error:
        raise ValueError(f"{found}: {error} To choose tokens otherwise, give a temperature.") from None


def _check_tensors(checkpoint: Checkpoint) -> np.dtype:
    """Check every tensor's name, shape and dtype against the config, and return the dtype of most weights."""
    place, described, config, _, tensors, *_ = checkpoint
    if config.num_layers > len(tensors):
        raise ValueError(f"{place} holds {len(tensors)} tensors, too few for the layers of its {described}.")
    stacks = [(name, shape, parameter_of(name)) for name, shape in parameter_shapes(config).items()]
    expected = {
        tensor_of(config, name, checkpoint.names[name], at): file_shape(shape[stored.separate :], stored.groups)
        for name, shape, stored in stacks
        for at in np.ndindex(shape[: stored.separate])
    }
    for name in expected:
        if name not in tensors:
            raise ValueError(f"{place} lacks the tensor {name}, which its {described} requires; is it complete?")
    for name in sorted(tensors.keys() - expected.keys()):
        if not checkpoint.ignored.fullmatch(name):
            raise ValueError(f"{tensors[name].file} holds the tensor {name}, which its {described} does not have.")
    weights: Counter[str] = Counter()
    for name in expected:
        file, shape, dtype, _ = tensors[name]
        if shape != expected[name]:
            raise ValueError(f"{file}: {name} has shape {shape}; its {described} requires {expected[name]}.")
        weights[read_dtype(file, name, dtype)] += int(np.prod(shape))
    return jnp.dtype(weights.most_common(1)[0][0])
