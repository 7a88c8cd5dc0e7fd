"""The config of a GGUF file, from its metadata."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvjax._src.checks import check_count, shown
from models.checkpoint import Tensor
from models.config import Config, Rope
from models.config_json import completed, from_hugging_face
from models.families import FAMILIES, Gguf
from models.gguf_header import needed, optional
from models.gguf_tokenizer import ends_of_turn, id_of
from models.rope_fields import positive
from models.rotary import rope_frequencies

FREQUENCY_FACTORS = "rope_freqs.weight"  # Llama 3.1's rope scaling, as a factor for each frequency
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"  # longrope's

MORE_LAYERS = "nextn_predict_layers"  # how many of the layers, the last, only predict later tokens
UNROTATED = 1e29  # a factor from this on stands for a pair that is not rotated
WINDOWED = "attention.sliding_window_pattern"  # says of each layer whether it has a window

EMBEDDING, HEAD = "token_embd.weight", "output.weight"

# The keys that every architecture's files have, and the fields of a config.json that they become, or the names under
# which :func:`_rope` and the families find them.
NEEDED_KEYS = {
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
}
# Those that they may have, too; of two for one field, the later counts.
KEYS = NEEDED_KEYS | {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "v_head_dim",
    MORE_LAYERS: "num_nextn_predict_layers",
    "rope.dimension_count": "partial_rotary_factor",
    "rope.freq_base": "rope_theta",
    "rope.scale_linear": "factor",
    "rope.scaling.factor": "factor",
    "rope.scaling.finetuned": "finetuned",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.type": "rope_type",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "tensor_data_layout": "tensor_data_layout",
    "vocab_size": "vocab_size",
}
# Values of keys without effect.
NEUTRAL_KEYS = {
    "attention.causal": True,
    "attention.sliding_window": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.attn_factor": 1,
    "use_parallel_residual": False,
}


def family_in(metadata: Mapping[str, Any]) -> tuple[str, Gguf]:
    """Return the family of a file's model, after a check that all its keys are supported: its name and its ``gguf``."""
    architecture = str(needed(metadata, "general.architecture"))
    known = _stored()
    if architecture not in known:
        for name in FAMILIES.names():  # an installed package may offer it
            FAMILIES.find(name)
        known = _stored()
    if architecture not in known:
        raise ValueError(
            f"architecture {architecture!r} is not supported in GGUF files; supported are {', '.join(known)}."
        )
    own = known[architecture][1].keys
    pieces = optional(metadata, "split.count", int, 1)
    if pieces > 1:
        raise ValueError(
            f"it is one of {pieces} pieces of a model; join them first (llama-gguf-split --merge FIRST JOINED)."
        )
    prefix = f"{architecture}."
    for key, value in metadata.items():
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or name in KEYS or name in own:
            continue
        if name not in NEUTRAL_KEYS or value != NEUTRAL_KEYS[name]:
            said = " ".join(key.split())  # a damaged name may hold line breaks
            raise ValueError(
                f"its key {said} is {shown(value)}, which is not supported; take another file, or the original folder "
                "with config.json."
            )
    return known[architecture]


def _stored() -> dict[str, tuple[str, Gguf]]:
    found = {name: family.gguf for name, family in FAMILIES.items()}
    return {gguf.architecture: (name, gguf) for name, gguf in found.items() if gguf is not None}


def config_of(metadata: Mapping[str, Any], name: str, stored: Gguf, tensors: Mapping[str, Tensor]) -> Config:
    """Return the config of a file whose family, called ``name``, is stored as ``stored`` says.

    Its metadata become a config.json, which the family reads as any other.
    """
    raw = _fields(metadata, f"{stored.architecture}.", stored.keys)
    if EMBEDDING not in tensors:
        raise ValueError(f"it lacks the tensor {EMBEDDING}; is it complete, and a language model's?")
    eos = [*(id_of(metadata, end) for end in ("eos", "eot", "eom")), *ends_of_turn(metadata)]
    raw |= {
        "architectures": [FAMILIES[name].architecture or name],
        "vocab_size": tensors[EMBEDDING].shape[0],
        "tie_word_embeddings": HEAD not in tensors,
        "norm_topk_prob": True,  # as llama.cpp does
        "bos_token_id": id_of(metadata, "bos"),
        "eos_token_id": list(dict.fromkeys(token for token in eos if token is not None)),
        "pad_token_id": id_of(metadata, "padding"),
    }
    try:
        config = _read(completed(raw, name), stored, tensors)
    except ValueError as error:
        keys = [key for key, field in {**KEYS, **stored.keys}.items() if re.search(rf"\b{field}\b", str(error))]
        named = " or ".join(f"{stored.architecture}.{key}" for key in keys)
        raise ValueError(f"{error} In the file it is {named}." if keys else str(error)) from None
    query, output = (any(name.endswith(f".attn_{part}.bias") for name in tensors) for part in ("q", "output"))
    biases = query or config.attention_bias
    return dataclasses.replace(config, attention_bias=biases, output_bias=output, source=None)


def _read(raw: dict[str, Any], stored: Gguf, tensors: Mapping[str, Tensor]) -> Config:
    default = raw["hidden_size"] // raw["num_attention_heads"]
    head_dim = raw["head_dim"] = check_count(
        "head_dim", raw.get("head_dim", default), 1, "it must be a positive integer"
    )
    if (other := raw.get("v_head_dim", head_dim)) != head_dim and "kv_lora_rank" not in raw:
        raise ValueError(
            f"v_head_dim is {other}, but a head has {head_dim} numbers; only models whose values take a whole head are "
            "supported."
        )
    raw["rope_parameters"] = _rope(raw, tensors)
    try:
        own = stored.fields(raw, tensors)
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"its keys cannot be read ({type(error).__name__}: {error}); convert it again.") from None
    return from_hugging_face({**raw, **own})


def _fields(metadata: Mapping[str, Any], prefix: str, own: Mapping[str, str]) -> dict[str, Any]:
    """Return what a file's keys say, as fields of a config.json.

    Of a key that differs from layer to layer a field of all architectures has the largest value, one of the family's
    ``own`` all of them.
    """
    found: dict[str, Any] = {}
    for key, field in (*KEYS.items(), *own.items()):
        if (value := metadata.get(prefix + key)) is None:
            continue
        if isinstance(value, list) and value and key != WINDOWED:  # one for each layer
            alike = all(other == value[0] for other in value)
            if not alike and key not in own:
                raise ValueError(f"its key {prefix}{key} differs from layer to layer, which is not supported.")
            value = max(value) if alike or KEYS.get(key) == field else value
        if isinstance(value, float):
            value = _before_rounding(value)
        found[field] = None if value == 0 and key in ("attention.sliding_window", "expert_count") else value
    if type(more := found.get("num_nextn_predict_layers")) is int and type(found.get("num_hidden_layers")) is int:
        found["num_hidden_layers"] -= more
    found.setdefault("intermediate_size", found.get("moe_intermediate_size"))  # where all layers have experts
    for key, field in NEEDED_KEYS.items():
        if found.get(field) is None:
            needed(metadata, prefix + key)
    if found.get("num_local_experts"):
        needed(metadata, prefix + "expert_used_count")
    return found


def _before_rounding(number: Any) -> float:
    """Return a number as it was before the file rounded it to float32."""
    return float(str(np.float32(number)))


def _rope(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a config.json's ``rope_parameters``. ``raw`` has the number of rotated elements, and they the share."""
    head_dim, kind, factor = raw["head_dim"], raw.get("rope_type", "linear"), raw.get("factor", 1.0)
    plain = {"rope_theta": positive("rope_theta", raw.get("rope_theta"), 10_000.0)}
    plain["partial_rotary_factor"] = raw.get("partial_rotary_factor", head_dim) / head_dim
    original = raw.get("original_max_position_embeddings", raw["max_position_embeddings"])
    scaled = plain | {"rope_type": kind, "original_max_position_embeddings": original}
    factors = tensors.get(FREQUENCY_FACTORS)
    lists = [name for name in (LONG_FACTORS, SHORT_FACTORS) if name in tensors]
    if len(lists) == 1:
        raise ValueError(f"of {LONG_FACTORS} and {SHORT_FACTORS} it holds only {lists[0]}; download it again.")
    if lists:
        if kind not in ("longrope", "none", "linear") or factor != 1 or factors is not None:
            raise ValueError(
                f"it holds {LONG_FACTORS} beside another scaling of its rotary embedding (rope_type {kind!r}, factor "
                f"{factor}); only one is supported."
            )
        numbers = {"long_factor": _numbers(tensors[LONG_FACTORS]), "short_factor": _numbers(tensors[SHORT_FACTORS])}
        return scaled | numbers | {"rope_type": "longrope", "attention_factor": raw.get("attention_factor")}
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(
            f"rope_type is {kind!r}; supported are none, linear and yarn, and the factors of Llama 3.1 and of longrope."
        )
    if kind == "none" or (kind == "linear" and factor == 1):
        return plain if factors is None else plain | _scaling(plain["rope_theta"], head_dim, factors)
    if factors is not None:
        raise ValueError(f"it holds both {FREQUENCY_FACTORS} and rope_type {kind!r}; only one is supported.")
    return scaled | {"factor": factor, **{name: raw.get(name) for name in ("beta_fast", "beta_slow")}}


def _numbers(factors: Tensor) -> list[float]:
    return [_before_rounding(x) for x in factors.read((slice(0, factors.shape[0]),))]


def _scaling(theta: float, head_dim: int, factors: Tensor) -> dict[str, Any]:
    """Find the scaling that given factors on the frequencies come from: the file stores nothing else of it.

    It is Gemma 4's, whose last pairs are not rotated, or Llama 3.1's: all models of that family scale partially between
    1 and 4 turns in their original context, a power of two.
    """
    if factors.shape != (head_dim // 2,):
        raise ValueError(
            f"{FREQUENCY_FACTORS} has shape {factors.shape}; a head of {head_dim} requires {head_dim // 2}."
        )
    found = factors.read((slice(0, head_dim // 2),))
    if not np.isfinite(found).all() or found.min() < 1:
        raise ValueError(f"{FREQUENCY_FACTORS} is damaged: it holds numbers below 1 or not finite; download it again.")
    if found.max() == 1:
        return {}
    if set(found.tolist()) == {1.0, found.max()} and found.max() >= UNROTATED:
        return {"rope_type": "proportional", "partial_rotary_factor": float(np.mean(found == 1))}
    plain = np.asarray(rope_frequencies(Rope(theta), head_dim)[0][0])
    for original in (1 << power for power in range(13, 21)):
        rope = Rope(theta, "llama3", float(found.max()), original)
        ours = plain / np.asarray(rope_frequencies(rope, head_dim)[0][0])
        if np.allclose(ours, found, rtol=1e-4):
            return {"rope_type": "llama3", "factor": rope.factor, "original_max_position_embeddings": original}
    raise ValueError(
        f"the factors in {FREQUENCY_FACTORS} are not those of Llama 3.1's rope scaling, the only ones supported; take "
        "the original folder with config.json."
    )
