"""Hugging Face's config.json: read as a :class:`models.Config`, and written.

What is special about an architecture is in its row of :data:`BUILT_IN`; the functions above it are used there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypedDict, get_type_hints

from kvjax.checks import check_count, check_types, shown
from models.config import MOST, NO_ROPE, ROPE_TYPES, Config, Rope, check_size
from models.families import FAMILIES, Family

Raw = Mapping[str, Any]
NULLABLE = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")  # null is no missing value there
MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


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


class _RopeFields(TypedDict, total=False):
    """The fields read from its ``rope_scaling`` or ``rope_parameters``."""

    rope_type: str | None
    type: str | None
    rope_theta: float | None
    partial_rotary_factor: float | None
    factor: float | None
    original_max_position_embeddings: float | None
    short_factor: list[float] | None
    long_factor: list[float] | None
    low_freq_factor: float | None
    high_freq_factor: float | None
    beta_fast: float | None
    beta_slow: float | None
    attention_factor: float | None
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool | None


def _positive(name: str, value: float | None, default: float = 1.0) -> float:
    """Return the field's value, or the default for None. Raise ValueError for a value that is not above 0."""
    if value is not None and value <= 0:
        raise ValueError(f"{name} is {value!r}; it must be a number above 0.")
    return float(default if value is None else value)


def _max_positions(raw: Raw) -> int:
    return raw.get("max_position_embeddings") or 2048


# Rotary embeddings, of the model and of single layers.


def _rope(raw: Raw) -> Rope:
    return _read_rope(raw, {})


def _phi3_rope(raw: Raw) -> Rope:
    return _read_rope(raw, {"su": "longrope", "yarn": "longrope"}, partial=True)  # names in the first Phi-3 models


def _gemma3_rope(raw: Raw) -> Rope:
    """Read the rotary embedding of the layers without a window."""
    parameters = raw.get("rope_parameters") or {}
    return _rope({**raw, "rope_parameters": parameters["full_attention"]} if "full_attention" in parameters else raw)


def _read_rope(raw: Raw, names: Mapping[str, str], partial: bool = False) -> Rope:
    """Read a rotary embedding; ``names`` are other names of its types, ``partial`` allows heads rotated in part."""
    max_positions = _max_positions(raw)
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ValueError("rope_parameters (or rope_scaling) must be one object of numbers, the same for all layers.")
    check_types(parameters, get_type_hints(_RopeFields), "rope")

    def either(name: str) -> Any:
        return raw.get(name) if parameters.get(name) is None else parameters[name]

    rotated = either("partial_rotary_factor")
    if rotated not in (None, 1) and not partial:
        raise ValueError(f"partial_rotary_factor is {rotated}; only 1 is supported for {raw['model_type']}.")
    type_ = parameters.get("rope_type") or parameters.get("type") or "default"
    type_ = names.get(type_, type_)
    if type_ not in ROPE_TYPES:
        raise ValueError(f"rope type {type_!r} is not supported; supported are {', '.join(ROPE_TYPES)}.")
    if type_ not in ("default", "yarn", "longrope") and "factor" not in parameters:
        raise ValueError(f"rope type {type_!r} needs a 'factor' in rope_scaling (or rope_parameters); it is missing.")
    original = max_positions if type_ == "dynamic" else either("original_max_position_embeddings")
    original = _positive("original_max_position_embeddings", original, max_positions)
    factor = parameters.get("factor")
    if factor is None and type_ in ("yarn", "longrope"):
        factor = max_positions / original
    return Rope(
        theta=_positive("rope_theta", either("rope_theta"), 10_000.0),
        type=type_,
        factor=_positive("factor", factor),
        original_positions=0 if type_ in ("default", "linear") else int(original),
        low_freq_factor=_positive("low_freq_factor", parameters.get("low_freq_factor")),
        high_freq_factor=_positive("high_freq_factor", parameters.get("high_freq_factor"), 4.0),
        beta_fast=_positive("beta_fast", parameters.get("beta_fast"), 32.0),
        beta_slow=_positive("beta_slow", parameters.get("beta_slow")),
        attention_factor=parameters.get("attention_factor"),
        mscale=parameters.get("mscale"),
        mscale_all_dim=parameters.get("mscale_all_dim"),
        truncate=bool(parameters.get("truncate", True)),
        partial_rotary_factor=_positive("partial_rotary_factor", rotated),
        short_factor=parameters.get("short_factor") or (),
        long_factor=parameters.get("long_factor") or (),
    )


def _gemma3_ropes(raw: Raw) -> dict[str, Any]:
    local = (raw.get("rope_parameters") or {}).get("sliding_attention") or {}
    check_types(local, get_type_hints(_RopeFields), "rope")
    if (type_ := local.get("rope_type") or "default") != "default":
        raise ValueError(f"rope type {type_!r} of layers with a sliding window is not supported; only 'default' is.")
    base = raw["rope_local_base_freq"] if local.get("rope_theta") is None else local["rope_theta"]
    rope = Rope(theta=_positive("rope_local_base_freq", base))
    return {"ropes": tuple(rope if window else None for window in _gemma_windows(raw))}


def _smollm3_ropes(raw: Raw) -> dict[str, Any]:
    rotated, interval, layers = raw.get("no_rope_layers"), raw["no_rope_layer_interval"], raw["num_hidden_layers"]
    check_count("no_rope_layer_interval", interval, 1, "it must be a number of layers")
    if rotated is None:
        rotated = [(layer + 1) % interval for layer in range(layers)]
    if len(rotated) != layers:
        raise ValueError(f"no_rope_layers has {len(rotated)} entries; it must have one for each of {layers} layers.")
    return {"ropes": tuple(None if whether else NO_ROPE for whether in rotated)}


# Sliding windows, one entry per layer.


def _no_windows(raw: Raw) -> tuple[int | None, ...]:
    return (None,) * raw["num_hidden_layers"]


def _one_window(raw: Raw) -> tuple[int | None, ...]:
    return (raw.get("sliding_window"),) * raw["num_hidden_layers"]


def _gemma_windows(raw: Raw) -> tuple[int | None, ...]:
    pattern, types = raw["sliding_window_pattern"], raw.get("layer_types")
    check_count("sliding_window_pattern", pattern, 1, "it must be a number of layers")
    if types is None:
        layers = range(raw["num_hidden_layers"])
        types = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in layers]
    return _windows_of(types, raw.get("sliding_window"))


def _windows_of(types: Any, window: int | None) -> tuple[int | None, ...]:
    return tuple(window if type_ == "sliding_attention" else None for type_ in types)


def _asked_for(raw: Raw, unnamed: Callable[[Raw], tuple[bool, ...]]) -> tuple[int | None, ...]:
    """Return the windows of a model that says whether it has any; ``unnamed`` tells its layers if it names none."""
    window = raw.get("sliding_window")
    if window is None or not raw.get("use_sliding_window", False):
        return _no_windows(raw)
    if raw.get("layer_types") is not None:
        return _windows_of(raw["layer_types"], window)
    return tuple(window if has else None for has in unnamed(raw))


def _qwen_windows(raw: Raw) -> tuple[int | None, ...]:
    def last_ones(raw: Raw) -> tuple[bool, ...]:
        full_layers = raw.get("max_window_layers", 28)
        check_count("max_window_layers", full_layers, 0, "it must be a number of layers")
        return tuple(layer >= full_layers for layer in range(raw["num_hidden_layers"]))

    return _asked_for(raw, last_ones)


def _smollm3_windows(raw: Raw) -> tuple[int | None, ...]:
    return _asked_for(raw, lambda raw: tuple(rope is not None for rope in _smollm3_ropes(raw)["ropes"]))


def _qwen3_moe_windows(raw: Raw) -> tuple[int | None, ...]:
    return _one_window(raw) if raw.get("use_sliding_window", False) else _no_windows(raw)


# Biases of the attention's projections.


def _biases_as_given(raw: Raw) -> tuple[bool, bool]:
    """Return whether queries, keys and values have biases, and whether the output has."""
    return (bool(raw.get("attention_bias", False)),) * 2


def _no_biases(raw: Raw) -> tuple[bool, bool]:
    return False, False


def _qwen2_biases(raw: Raw) -> tuple[bool, bool]:
    return True, False


# What else a family has: fields of Config from a config.json, and back.


def _gemma_factors(raw: Raw) -> dict[str, Any]:
    scalar = _positive("query_pre_attn_scalar", raw["query_pre_attn_scalar"])
    attention = None if scalar == raw["head_dim"] else scalar**-0.5
    names = {"attention_soft_cap": "attn_logit_softcapping", "logits_soft_cap": "final_logit_softcapping"}
    caps = {ours: _positive(name, raw[name]) for ours, name in names.items() if raw.get(name) is not None}
    return {"embedding_multiplier": raw["hidden_size"] ** 0.5, "attention_multiplier": attention} | caps


def _gemma_written(config: Config) -> dict[str, Any]:
    multiplier = config.attention_multiplier
    return {
        "query_pre_attn_scalar": config.head_dim if multiplier is None else round(multiplier**-2, 6),
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.logits_soft_cap,
    }


def _gemma3_written(config: Config) -> dict[str, Any]:
    local = next((rope for rope in config.ropes if rope is not None), config.rope)
    return _gemma_written(config) | {"rope_local_base_freq": local.theta}


def _granite_factors(raw: Raw) -> dict[str, Any]:
    return {name: _positive(name, raw.get(name)) for name in MULTIPLIERS}


def _granite_written(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in MULTIPLIERS} | {"attention_multiplier": _multiplier(config)}


def _smollm3_written(config: Config) -> dict[str, Any]:
    rotated = [rope is None for rope in config.ropes] or [True] * config.num_layers
    return {"no_rope_layers": [int(whether) for whether in rotated]}  # 1 for layers with rotary embedding


def _experts(raw: Raw) -> dict[str, Any]:
    number = raw["num_local_experts"] if raw.get("num_experts") is None else raw["num_experts"]
    return {
        "num_experts": check_count("num_experts", number, 1, "it must be a positive integer"),
        "experts_per_token": raw["num_experts_per_tok"],
        "normalise_experts": bool(raw.get("norm_topk_prob", False)),
    }


def _mixtral_written(config: Config) -> dict[str, Any]:
    return {"num_local_experts": config.num_experts, "num_experts_per_tok": config.experts_per_token}


def _qwen3_moe_experts(raw: Raw) -> dict[str, Any]:
    step, layers = raw.get("decoder_sparse_step"), range(raw["num_hidden_layers"])
    step = check_count("decoder_sparse_step", 1 if step is None else step, 1, "it must be a number of layers")
    dense = {layer for layer in layers if (layer + 1) % step} | set(raw.get("mlp_only_layers") or ())
    sizes = tuple(raw["intermediate_size"] if layer in dense else None for layer in layers)
    return _experts(raw) | {"intermediate_size": raw["moe_intermediate_size"], "dense_sizes": sizes}


def _qwen3_moe_written(config: Config) -> dict[str, Any]:
    more = {"num_experts": config.num_experts, "norm_topk_prob": config.normalise_experts}
    more |= {"moe_intermediate_size": config.intermediate_size, "decoder_sparse_step": 1}
    return _mixtral_written(config) | more | {"mlp_only_layers": list(config.dense_layers)}


class Architecture(NamedTuple):
    """A built-in architecture.

    Attributes:
        name: ``Config.architecture``, and the ``model_type``.
        traits: what each of its models has, as fields of Config.
        defaults: the values that it has where a config.json leaves them out, other than those in from_hugging_face.
        windows: reads the sliding windows.
        biases: reads whether the attention's projections have biases.
        rope: reads the rotary embedding of most layers.
        read: read more fields of Config.
        written: returns the fields of a config.json that ``read`` reads.
    """

    name: str
    traits: Mapping[str, Any] = {}
    defaults: Mapping[str, Any] = {}
    windows: Callable[[Raw], tuple[int | None, ...]] = _no_windows
    biases: Callable[[Raw], tuple[bool, bool]] = _biases_as_given
    rope: Callable[[Raw], Rope] = _rope
    read: tuple[Callable[[Raw], dict[str, Any]], ...] = ()
    written: Callable[[Config], dict[str, Any]] = lambda config: {}


GEMMA: dict[str, Any] = dict(norms="both", norm_offset=True, activation="gelu_tanh")
BUILT_IN = {
    "LlamaForCausalLM": Architecture("llama"),
    "MistralForCausalLM": Architecture(
        "mistral", defaults={"sliding_window": 4096}, windows=_one_window, biases=_no_biases
    ),
    "Qwen2ForCausalLM": Architecture(
        "qwen2", defaults={"sliding_window": 4096}, windows=_qwen_windows, biases=_qwen2_biases
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3",
        traits=dict(query_key_norm=True),
        defaults={"head_dim": 128, "sliding_window": 4096},
        windows=_qwen_windows,
    ),
    "Olmo2ForCausalLM": Architecture(
        "olmo2", traits=dict(norms="after", wide_query_key_norm=True), defaults={"rms_norm_eps": 1e-5}
    ),
    "SmolLM3ForCausalLM": Architecture(
        "smollm3",
        defaults={"no_rope_layer_interval": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True},
        windows=_smollm3_windows,
        read=(_smollm3_ropes,),
        written=_smollm3_written,
    ),
    "GraniteForCausalLM": Architecture(
        "granite", defaults={"attention_multiplier": 1.0}, read=(_granite_factors,), written=_granite_written
    ),
    "Phi3ForCausalLM": Architecture(
        "phi3",
        defaults={"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        windows=_one_window,
        biases=_no_biases,
        rope=_phi3_rope,
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe",
        traits=dict(query_key_norm=True),
        defaults={
            "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_local_experts": 128, "sliding_window": 4096
        },
        windows=_qwen3_moe_windows,
        read=(_qwen3_moe_experts,),
        written=_qwen3_moe_written,
    ),
    "MixtralForCausalLM": Architecture(
        "mixtral",
        defaults={
            "norm_topk_prob": True, "num_experts_per_tok": 2, "num_local_experts": 8, "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
        },
        windows=_one_window,
        biases=_no_biases,
        read=(_experts,),
        written=_mixtral_written,
    ),
    "Gemma2ForCausalLM": Architecture(
        "gemma2",
        traits=GEMMA,
        defaults={
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 256,
            "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 2,
            "tie_word_embeddings": True,
        },
        windows=_gemma_windows,
        read=(_gemma_factors,),
        written=_gemma_written,
    ),
    "Gemma3ForCausalLM": Architecture(
        "gemma3_text",
        traits=GEMMA | dict(query_key_norm=True),
        defaults={
            "head_dim": 256, "query_pre_attn_scalar": 256, "rope_local_base_freq": 10_000.0,
            "rope_theta": 1_000_000.0, "sliding_window": 4096, "sliding_window_pattern": 6, "tie_word_embeddings": True,
        },
        windows=_gemma_windows,
        rope=_gemma3_rope,
        read=(_gemma_factors, _gemma3_ropes),
        written=_gemma3_written,
    ),
}  # fmt: skip
ARCHITECTURES = {theirs: ours.name for theirs, ours in BUILT_IN.items()}
TRAITS = {ours.name: ours.traits for ours in BUILT_IN.values()}


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
        norm_epsilon=_positive("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
        max_positions=_max_positions(raw),
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
    if not math.isclose(_multiplier(config), _multiplier(read), rel_tol=1e-5):
        lost.append("attention_multiplier")
    return sorted(lost)


def _multiplier(config: Config) -> float:
    return config.head_dim**-0.5 if config.attention_multiplier is None else config.attention_multiplier


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
    if architecture.windows is _one_window:
        return raw | {"sliding_window": window}
    if window is not None or architecture.windows is _gemma_windows:
        raw["layer_types"] = ["sliding_attention" if window else "full_attention" for window in config.sliding_windows]
        raw["sliding_window"] = window
    if window is not None and architecture.windows is not _gemma_windows:
        raw["use_sliding_window"] = True
        raw["max_window_layers"] = sum(window is None for window in config.sliding_windows)
    return raw
