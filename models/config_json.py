"""Hugging Face's config.json: read as a :class:`models.Config`, and written again, or in Llama's form.

What most families share is here. What one of them has beside it is in its function of :mod:`models.built_in`, which
takes the fields from :func:`completed` and gives its own to :func:`config_of`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, get_type_hints

from kvjax._src.checks import check_count, check_types, shown
from models.block_scaled import block_of
from models.config import MOST, Config, check_size
from models.families import FAMILIES, Family, family_of_architecture
from models.rope_fields import Raw, positions_of, positive, reached_by, read_rope, rope_written

# Fields that count outside a text_config, too, where a model also sees or hears.
OUTSIDE = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "transformers_weights")
# Where null is no missing value.
NULLABLE = (
    "q_lora_rank", "attn_logit_softcapping", "final_logit_softcapping", "sliding_window", "hidden_size_per_layer_input",
)  # fmt: skip


class _Fields(TypedDict, total=False):
    """The fields read from a config.json. ``null`` means a missing field, except in ``NULLABLE``."""

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
    attention_out_bias: bool | None
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
    sliding_window_pattern: int | str | None
    use_bidirectional_attention: bool | str | None
    global_head_dim: int | None
    num_global_key_value_heads: int | None
    attention_k_eq_v: bool | None
    per_layer_config: dict[str, dict[str, int]] | None
    num_kv_shared_layers: int | None
    use_double_wide_mlp: bool | None
    hidden_size_per_layer_input: int | None
    vocab_size_per_layer_input: int | None
    activation_sparsity_pattern: list[float] | None
    altup_num_inputs: int | None
    altup_active_idx: int | None
    altup_correct_scale: bool | None
    laurel_rank: int | None
    enable_moe_block: bool | None
    top_k_experts: int | None
    linear_num_key_heads: int | None
    linear_num_value_heads: int | None
    linear_key_head_dim: int | None
    linear_value_head_dim: int | None
    linear_conv_kernel_dim: int | None
    full_attention_interval: int | None
    mamba_n_heads: int | None
    mamba_n_groups: int | None
    mamba_d_state: int | None
    mamba_d_head: int | str | None
    mamba_d_conv: int | None
    mamba_expand: int | None
    mamba_conv_bias: bool | None
    mamba_proj_bias: bool | None
    position_embedding_type: str | None
    shared_intermediate_size: int | None
    attn_output_gate: bool | None
    output_gate_type: str | None
    shared_expert_intermediate_size: int | None
    num_experts: int | None
    num_local_experts: int | None
    num_experts_per_tok: int | None
    moe_intermediate_size: int | None
    norm_topk_prob: bool | None
    kv_lora_rank: int | None
    q_lora_rank: int | None
    qk_nope_head_dim: int | None
    qk_rope_head_dim: int | None
    v_head_dim: int | None
    rope_interleave: bool | None
    n_routed_experts: int | None
    n_shared_experts: int | None
    first_k_dense_replace: int | None
    moe_layer_freq: int | None
    mlp_layer_types: list[Literal["dense", "sparse"]] | None
    n_group: int | None
    topk_group: int | None
    topk_method: str | None
    scoring_func: str | None
    routed_scaling_factor: float | None
    num_nextn_predict_layers: int | None
    index_topk: int | None
    decoder_sparse_step: int | None
    mlp_only_layers: list[int] | None
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None


def from_hugging_face(raw: Mapping[str, Any]) -> Config:
    """Read a config.json of either transformers generation (``rope_theta``/``rope_scaling`` or ``rope_parameters``).

    Of a model that also sees or hears, the language model's is read: see :func:`language_model`.
    """
    raw = language_model(raw)
    family = family_of(raw)
    called = raw.get("model_type") or family.architecture
    try:
        config = family.config(raw)
    except (LookupError, TypeError, AttributeError) as error:
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"the family {called!r} cannot read it ({said}).") from error
    known = [name for name, family in FAMILIES.items() if family.architecture is not None]
    if not isinstance(config, Config) or config.architecture not in known:
        wrong = f"the family {called!r} returned {shown(config)};"
        raise ValueError(f"{wrong} expected a models.Config of one of the architectures {', '.join(known)}.")
    return config


def completed(raw: Raw, model_type: str, **defaults: Any) -> dict[str, Any]:
    """Return a config.json with what the family has where a field is left out, checked.

    Args:
        model_type: the family's name, which becomes ``Config.architecture``.
        defaults: values of fields of the config.json, where they are not those of Llama.

    Raises:
        ValueError: a field is missing, of a wrong type or beyond its range, or asks for what is not supported.
    """
    check_types(raw, get_type_hints(_Fields))
    missing = {name for name in defaults if name not in raw or (raw[name] is None and name not in NULLABLE)}
    made = {**raw, **{name: defaults[name] for name in missing}, "model_type": model_type}
    _check(made)
    return made


def config_of(raw: Raw, **fields: Any) -> Config:
    """Return the Config of a completed config.json.

    Args:
        raw: what :func:`completed` returned.
        fields: the fields of Config that the family reads in its own way, or always has.

    Example:
        >>> from models.config_json import completed, config_of
        >>> raw = dict(
        ...     vocab_size=8, hidden_size=16, intermediate_size=32,
        ...     num_hidden_layers=1, num_attention_heads=2,
        ... )
        >>> config_of(completed(raw, "llama"), attention_bias=True).attention_bias
        True
    """
    _check_activation(raw, fields.get("activation", "silu"))
    heads, eos, biases = raw["num_attention_heads"], raw.get("eos_token_id"), bool(raw.get("attention_bias", False))
    read: dict[str, Any] = dict(
        architecture=raw["model_type"],
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        norm_epsilon=positive("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
        rope=(rope := fields["rope"] if "rope" in fields else read_rope(raw)),
        max_positions=reached_by(rope, positions_of(raw)),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=biases,
        output_bias=biases,
        bos=raw.get("bos_token_id"),
        eos=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
        pad=raw.get("pad_token_id"),
        source=dict(raw),
    )
    return Config(**read | fields)


def _check(raw: Raw) -> None:
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
    if (quantised := raw.get("quantization_config")) and block_of(quantised) is None:
        only = "only FP8 in blocks, and gpt-oss's MXFP4, are read"
        raise ValueError(f"quantization_config is set, and {only}; convert the weights to bfloat16.")
    for name in ("use_bidirectional_attention", "mlp_bias"):
        if raw.get(name):
            raise ValueError(f"{name} is set, which is not supported; load another model.")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        given = raw.get(name)
        ids = given if isinstance(given, list) else [given]
        if any(isinstance(token, int) and abs(token) > MOST for token in ids):
            raise ValueError(f"{name} is beyond {MOST:,}, the largest token id; is the file damaged?")


def _check_activation(raw: Raw, activation: str) -> None:
    if activation == "gelu_tanh":
        named = raw.get("hidden_activation") or raw.get("hidden_act") or "gelu_pytorch_tanh"
        if named != "gelu_pytorch_tanh":
            raise ValueError(f"hidden_activation is {named!r}; only 'gelu_pytorch_tanh' is supported.")
    elif (raw.get("hidden_act") or "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act is {raw['hidden_act']!r}; only 'silu' is supported.")


def language_model(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of the language model in a model that also sees or hears; any other as it is."""
    around = str(raw.get("model_type"))
    known = {name: family for name, family in FAMILIES.items() if around in family.inside}
    if not known:
        return raw
    inner = raw.get("text_config", raw)  # the first Qwen-VL have the fields of both side by side
    if not isinstance(inner, Mapping):
        raise ValueError(f"text_config is {shown(inner)}; expected the object that describes the language model.")
    given = None if inner is raw else inner.get("model_type")
    for name, family in known.items():
        if given in (None, name, family.inside[around]):
            outside = {field: raw[field] for field in OUTSIDE if raw.get(field) is not None}
            tied = inner.get("tie_word_embeddings") or raw.get("tie_word_embeddings")  # either, as in transformers
            outside |= {} if tied is None else {"tie_word_embeddings": tied}
            return {**inner, **outside, "architectures": [family.architecture], "model_type": name}
    expected = " or ".join(family.inside[around] for family in known.values())
    raise ValueError(f"text_config of a {around} has model_type {shown(given)}; expected {expected}.")


def family_of(raw: Mapping[str, Any]) -> Family:
    """Return the family that reads a config.json: that of its architecture, or else of its ``model_type``.

    A config.json may name the class without an output matrix (LlamaModel), or none; then its ``model_type`` counts.
    """
    fields = {"architectures": raw.get("architectures")}
    named = (check_types(fields, get_type_hints(_Fields))["architectures"] or [None])[0]
    known = {family.architecture: family for family in FAMILIES.values() if family.architecture is not None}
    if named in known:
        return known[named]
    name = raw.get("model_type")
    family = FAMILIES.find(name) if isinstance(name, str) else None
    if family is not None:
        stem = (family.architecture or "").removesuffix("ForCausalLM")
        if not stem or named in (None, f"{stem}Model", f"{stem}TextModel"):
            return family
    given = f"architecture {named}" if named else f"model_type {shown(name)}, without architectures,"
    wrong = f"{given} is not supported; supported are {', '.join(known)},"
    raise ValueError(f"{wrong} and those that models.register_family adds.")


def to_hugging_face(config: Config) -> dict[str, Any]:
    """Return the config.json to save a model with: the one that it was read from, or else one in Llama's form.

    Its ``model_type`` says by whose names the model's tensors are stored.

    Raises:
        ValueError: the config differs from what was read, if it was read at all, and Llama's form cannot hold it.
    """
    raw: dict[str, Any] = {
        "architectures": [family_of_architecture(config.architecture).architecture],
        "model_type": config.architecture,
        "tie_word_embeddings": config.tie_embeddings,
    }
    if config.source is not None and from_hugging_face(config.source | raw) == config:
        return config.source | raw
    raw |= {
        "architectures": [FAMILIES["llama"].architecture],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "max_position_embeddings": config.max_positions,
        "attention_bias": config.output_bias,
        "bos_token_id": config.bos,
        "eos_token_id": config.eos[0] if len(config.eos) == 1 else (list(config.eos) or None),
        "pad_token_id": config.pad,
        **rope_written(config.rope),
    }
    read = dataclasses.replace(from_hugging_face(raw), architecture=config.architecture)
    names = [field.name for field in dataclasses.fields(Config) if field.compare]
    if lost := [name for name in names if getattr(config, name) != getattr(read, name)]:
        raise ValueError(
            f"a model whose config was not read from a config.json, or was changed since, is written as a Llama, which "
            f"cannot hold its {', '.join(lost)}; read the config from its family's config.json "
            "(models.config_json.from_hugging_face)."
        )
    return raw
