"""Writes a decoder as a Hugging Face folder: model.safetensors, config.json and, with a tokenizer, tokenizer.json."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save as to_safetensors

from models.config import Config, to_hugging_face
from models.decoder import Decoder

# Our name -> Hugging Face's inside "model.layers.N."; every matrix is stored there as [out, in].
LAYER_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias",
    "value_bias": "self_attn.v_proj.bias",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "output": "self_attn.o_proj.weight",
    "output_bias": "self_attn.o_proj.bias",
    "feed_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


def save(folder: str | Path, model: Decoder, tokenizer: Any = None) -> None:
    """Writes a model so that transformers, and `models.load`, read it. Each file is replaced as a whole or not at all.

    Args:
        folder: made if it is not there.
        model: its weights are stored in the dtype that they have.
        tokenizer: a `tokenizers.Tokenizer`; its post-processor should add BOS.

    Example:
        >>> import tempfile
        >>> from flax import nnx
        >>> from models.config import Config
        >>> from models.decoder import Decoder
        >>> model = Decoder(Config(64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2), rngs=nnx.Rngs(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder, model)
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['config.json', 'model.safetensors']
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = hugging_face_tensors(model)
    raw = to_hugging_face(model.config)
    raw["torch_dtype"] = str(next(iter(tensors.values())).dtype)
    _replace(folder / "model.safetensors", to_safetensors(tensors, metadata={"format": "pt"}))
    _replace(folder / "config.json", _json(raw))
    if tokenizer is not None:
        _replace(folder / "tokenizer.json", tokenizer.to_str(pretty=False).encode())
        _replace(folder / "tokenizer_config.json", _json(_tokenizer_config(model.config, tokenizer)))


def hugging_face_tensors(model: Decoder) -> dict[str, np.ndarray]:
    """Every weight under its Hugging Face name and in its layout.

    >>> from flax import nnx
    >>> model = Decoder(Config(64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2), rngs=nnx.Rngs(0))
    >>> hugging_face_tensors(model)["model.layers.1.self_attn.k_proj.weight"].shape
    (16, 32)
    """
    tensors = {
        "model.embed_tokens.weight": np.asarray(jax.device_get(model.embedding[...])),
        "model.norm.weight": np.asarray(jax.device_get(model.norm[...])),
    }
    if model.head is not None:
        tensors["lm_head.weight"] = np.ascontiguousarray(np.asarray(jax.device_get(model.head[...])).T)
    E = model.config.hidden_size
    for name, parameter in nnx.to_pure_dict(nnx.state(model.layers)).items():
        stacked = np.asarray(jax.device_get(parameter))
        for layer, array in enumerate(stacked):
            tensors[f"model.layers.{layer}.{LAYER_NAMES[name]}"] = np.ascontiguousarray(_LAYOUTS[name](array, E))
    return tensors


_in_first: Callable = lambda array, E: array.reshape(E, -1).T  # noqa: E731  [E, N, D] or [E, F] -> [N * D, E]
_out_last: Callable = lambda array, E: array.reshape(-1, E).T  # noqa: E731  [N, D, E] or [F, E] -> [E, N * D]
_flat: Callable = lambda array, E: array.reshape(-1)  # noqa: E731
_LAYOUTS = {
    **dict.fromkeys(LAYER_NAMES, _flat),
    **dict.fromkeys(("query", "key", "value", "gate", "up"), _in_first),
    **dict.fromkeys(("output", "down"), _out_last),
}


def _tokenizer_config(config: Config, tokenizer: Any) -> dict[str, Any]:
    token = lambda index: None if index is None else tokenizer.id_to_token(index)  # noqa: E731
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token(config.bos),
        "eos_token": token(config.eos[0] if config.eos else None),
        "pad_token": token(config.pad),
        "model_max_length": config.max_positions,
        "clean_up_tokenization_spaces": False,
    }


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)
