"""Hugging Face's config.json: read as a :class:`models.Config`, and written.

What is special about an architecture is in its row of :data:`BUILT_IN`; the functions above it are used there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, get_type_hints

from kvjax.checks import check_count, check_types, shown
from models.built_in import (
    ARCHITECTURES,
    BUILT_IN,
    Architecture,
    Raw,
    gemma_windows,
    multiplier,
    one_window,
    positions_of,
    positive,
)
from models.config import MOST, Config, check_size
from models.families import FAMILIES, Family

NULLABLE = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")  # null is no missing value there


class _Fields(TypedDict, total=False):
    """The fields read from a config.json. ``null`` means a missing field, except in ``sliding_window``."""

    architectures: list[str] | None
    vocab_size: int | None
    hidden_size: int | None
    intermediate_size: int | None
    num_hidden_layers: int | None
    num_attention_heads: int | None
    num_key_value_heads: int | None
    head_dim: int | None
    hidden_act: str | None
    hidden_activation: str | None
    mlp_bias: bool | None
    attention_bias: bool | None
    tie_word_embeddings: bool | None
    rms_norm_eps: float
    max_position_embeddings: int | None
    rope_theta: float | None
    rope_scaling: dict | None
    rope_parameters: dict | None
    partial_rotary_factor: float | None
    original_max_position_embeddings: float | None
    use_sliding_window: bool | None
    sliding_window: int | None
    max_window_layers: int | None
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None
    no_rope_layers: list[int] | None
    no_rope_layer_interval: int | None
    embedding_multiplier: float | None
    attention_multiplier: float | None
    residual_multiplier: float | None
    logits_scaling: float | None
    query_pre_attn_scalar: float | None
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    rope_local_base_freq: float | None
    sliding_window_pattern: int | None
    use_bidirectional_attention: bool | None
    num_experts: int | None
    num_local_experts: int | None
    num_experts_per_tok: int | None
    moe_intermediate_size: int | None
    norm_topk_prob: bool | None
    decoder_sparse_step: int | None
    mlp_only_layers: list[int] | None
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None


# Rotary embeddings, of the model and of single layers.


# Sliding windows, one entry per layer.


# Biases of the attention's projections.


# What else a family has: fields of Config from a config.json, and back.


def from_hugging_face(raw: Mapping[str, Any]) -> Config:
    """Read a config.json of either transformers generation (``rope_theta``/``rope_scaling`` or ``rope_parameters``).

    Raises:
        ValueError: the architecture, activation or rope type is not supported, or a field is missing.
        ImportError: the ``model_type`` is another package's, which cannot be imported.

    Example:
        >>> from models.config_json import from_hugging_face
        >>> raw = dict(
        ...     architectures=["LlamaForCausalLM"], vocab_size=8, hidden_size=16,
        ...     intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> from_hugging_face(raw).num_kv_heads
        2
    """
    fields = get_type_hints(_Fields)
    name = _architecture(raw)
    if name not in BUILT_IN:
        return _from_another_package(name, raw)
    architecture = BUILT_IN[name]
    check_types(raw, fields)
    missing = {
        name for name in architecture.defaults if name not in raw or (raw[name] is None and name not in NULLABLE)
    }
    raw = {**raw, **{name: architecture.defaults[name] for name in missing}, "model_type": architecture.name}
    _check(raw, architecture)
    heads, eos = raw["num_attention_heads"], raw.get("eos_token_id")
    attention_bias, output_bias = architecture.biases(raw)
    read: dict[str, Any] = dict(
        architecture=architecture.name,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        rope=architecture.rope(raw),
        norm_epsilon=positive("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
        max_positions=positions_of(raw),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=attention_bias,
        output_bias=output_bias,
        sliding_windows=architecture.windows(raw),
        bos=raw.get("bos_token_id"),
        eos=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
        pad=raw.get("pad_token_id"),
        **architecture.traits,
    )
    for more in architecture.read:
        read |= more(raw)
    return Config(**read)


def _check(raw: Raw, architecture: Architecture) -> None:
    """Check that a config.json is complete, that its sizes can be, and that all it asks for is supported."""
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    lacking = [name for name in required if raw.get(name) is None]
    if lacking:
        raise ValueError(f"config.json lacks {', '.join(lacking)} (an integer each); is it a causal language model's?")
    optional = ("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window", "moe_intermediate_size")
    for name in (*required, *optional):
        if raw.get(name) is not None:
            check_count(name, raw[name], 1, "it must be a positive integer")
            check_size(name, raw[name])
    if raw.get("quantization_config"):
        raise ValueError("quantization_config is set; quantised weights are not supported, load the original ones.")
    if architecture.traits.get("activation") == "gelu_tanh":
        activation = raw.get("hidden_activation") or raw.get("hidden_act") or "gelu_pytorch_tanh"
        if activation != "gelu_pytorch_tanh":
            raise ValueError(f"hidden_activation is {activation!r}; only 'gelu_pytorch_tanh' is supported.")
    elif raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act is {raw['hidden_act']!r}; only 'silu' is supported.")
    if raw.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is true; only causal attention is supported.")
    if raw.get("mlp_bias"):
        raise ValueError("mlp_bias is true; feed-forward layers with biases are not supported.")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        given = raw.get(name)
        ids = given if isinstance(given, list) else [given]
        if any(isinstance(token, int) and abs(token) > MOST for token in ids):
            raise ValueError(f"{name} is beyond {MOST:,}, the largest token id; is the file damaged?")


def family_of(raw: Mapping[str, Any]) -> Family | None:
    """Return the family of another package that reads a config.json; None if its architecture is built in, or unknown.

    Example:
        >>> from models.config_json import family_of
        >>> family_of(
        ...     {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        ... ) is None
        True
    """
    name = raw.get("model_type")
    return FAMILIES.find(name) if _architecture(raw) not in BUILT_IN and isinstance(name, str) else None


def _architecture(raw: Mapping[str, Any]) -> str:
    fields = get_type_hints(_Fields)
    return (check_types({"architectures": raw.get("architectures")}, fields)["architectures"] or ["(none)"])[0]


def _from_another_package(architecture: str, raw: Mapping[str, Any]) -> Config:
    family = family_of(raw)
    if family is None:
        raise ValueError(
            f"architecture {architecture} is not supported; supported are {', '.join(ARCHITECTURES)}, and those that "
            "models.register_family adds."
        )
    try:
        config = family.config(raw)
    except (LookupError, TypeError, AttributeError) as error:
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"the family {raw['model_type']!r} cannot read it ({said}).") from error
    if not isinstance(config, Config) or config.architecture not in ARCHITECTURES.values():
        raise ValueError(
            f"the family {raw['model_type']!r} returned {shown(config)}; expected a models.Config of one of the "
            f"architectures {', '.join(ARCHITECTURES.values())}."
        )
    return config


def lost_in_hugging_face(config: Config) -> list[str]:
    """Return the fields that a config.json of the config's architecture cannot hold, and that change what is computed.

    Example:
        >>> from models.config import Config
        >>> from models.config_json import lost_in_hugging_face
        >>> sizes = dict(num_layers=2, num_heads=4, num_kv_heads=2)
        >>> lost_in_hugging_face(Config(64, 32, 96, logits_scaling=8.0, **sizes))
        ['logits_scaling']
        >>> lost_in_hugging_face(
        ...     Config(64, 32, 96, architecture="granite", logits_scaling=8.0, **sizes)
        ... )
        []
    """
    read = from_hugging_face(to_hugging_face(config))
    names = {field.name for field in dataclasses.fields(Config) if field.metadata} - {"attention_multiplier"}
    names |= {"sliding_windows", "query_key_norm", "attention_bias", "output_bias"}
    lost = [name for name in names if getattr(config, name) != getattr(read, name)]
    if not math.isclose(multiplier(config), multiplier(read), rel_tol=1e-5):
        lost.append("attention_multiplier")
    return sorted(lost)


def to_hugging_face(config: Config) -> dict[str, Any]:
    """Return the config.json of ``config``, in the form that every transformers release since 4.43 reads."""
    (name,) = (theirs for theirs, ours in ARCHITECTURES.items() if ours == config.architecture)
    architecture = BUILT_IN[name]
    raw: dict[str, Any] = {
        "architectures": [name],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.dense_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.output_bias,
        "rope_theta": config.rope.theta,
        "bos_token_id": config.bos,
        "eos_token_id": config.eos[0] if len(config.eos) == 1 else (list(config.eos) or None),
        "pad_token_id": config.pad,
        "torch_dtype": "float32",
    }
    if config.rope.partial_rotary_factor != 1:
        raw["partial_rotary_factor"] = config.rope.partial_rotary_factor
    rope: dict[str, Any] = {"rope_type": config.rope.type, "factor": config.rope.factor}
    if config.rope.type == "longrope":
        # transformers 4 accepts these fields alone; the others are written only where they are needed.
        rope = {"type": "longrope", "short_factor": list(config.rope.short_factor)}
        rope["long_factor"] = list(config.rope.long_factor)
        raw["original_max_position_embeddings"] = config.rope.original_positions
        if config.rope.factor != config.max_positions / config.rope.original_positions:
            rope["factor"] = config.rope.factor
        if config.rope.attention_factor is not None:
            rope["attention_factor"] = config.rope.attention_factor
    elif config.rope.original_positions and config.rope.type != "dynamic":
        rope["original_max_position_embeddings"] = config.rope.original_positions
    if config.rope.type == "llama3":
        rope |= {"low_freq_factor": config.rope.low_freq_factor, "high_freq_factor": config.rope.high_freq_factor}
    if config.rope.type == "yarn":
        names_ = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
        rope |= {name: getattr(config.rope, name) for name in names_ if getattr(config.rope, name) is not None}
    if config.rope.type != "default":
        raw["rope_scaling"] = rope
    raw |= architecture.written(config)
    if "hidden_activation" in raw:
        del raw["hidden_act"]
    windows = {window for window in config.sliding_windows if window is not None}
    if len(windows) > 1:
        raise ValueError(f"a config.json holds one sliding window size, but this model has {sorted(windows)}.")
    window = windows.pop() if windows else None
    if architecture.windows is one_window:
        return raw | {"sliding_window": window}
    if window is not None or architecture.windows is gemma_windows:
        raw["layer_types"] = ["sliding_attention" if window else "full_attention" for window in config.sliding_windows]
        raw["sliding_window"] = window
    if window is not None and architecture.windows is not gemma_windows:
        raw["use_sliding_window"] = True
        raw["max_window_layers"] = sum(window is None for window in config.sliding_windows)
    return raw
