"""The built-in families: how each reads its config.json, what it always has, and how it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypedDict, get_type_hints

from kvjax.checks import check_count, check_types
from models.config import NO_ROPE, ROPE_TYPES, Config, Rope

Raw = Mapping[str, Any]
MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


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


def positive(name: str, value: float | None, default: float = 1.0) -> float:
    """Return the field's value, or the default for None. Raise ValueError for a value that is not above 0."""
    if value is not None and value <= 0:
        raise ValueError(f"{name} is {value!r}; it must be a number above 0.")
    return float(default if value is None else value)


def positions_of(raw: Raw) -> int:
    return raw.get("max_position_embeddings") or 2048


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
    max_positions = positions_of(raw)
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
    original = positive("original_max_position_embeddings", original, max_positions)
    factor = parameters.get("factor")
    if factor is None and type_ in ("yarn", "longrope"):
        factor = max_positions / original
    return Rope(
        theta=positive("rope_theta", either("rope_theta"), 10_000.0),
        type=type_,
        factor=positive("factor", factor),
        original_positions=0 if type_ in ("default", "linear") else int(original),
        low_freq_factor=positive("low_freq_factor", parameters.get("low_freq_factor")),
        high_freq_factor=positive("high_freq_factor", parameters.get("high_freq_factor"), 4.0),
        beta_fast=positive("beta_fast", parameters.get("beta_fast"), 32.0),
        beta_slow=positive("beta_slow", parameters.get("beta_slow")),
        attention_factor=parameters.get("attention_factor"),
        mscale=parameters.get("mscale"),
        mscale_all_dim=parameters.get("mscale_all_dim"),
        truncate=bool(parameters.get("truncate", True)),
        partial_rotary_factor=positive("partial_rotary_factor", rotated),
        short_factor=parameters.get("short_factor") or (),
        long_factor=parameters.get("long_factor") or (),
    )


def _gemma3_ropes(raw: Raw) -> dict[str, Any]:
    local = (raw.get("rope_parameters") or {}).get("sliding_attention") or {}
    check_types(local, get_type_hints(_RopeFields), "rope")
    if (type_ := local.get("rope_type") or "default") != "default":
        raise ValueError(f"rope type {type_!r} of layers with a sliding window is not supported; only 'default' is.")
    base = raw["rope_local_base_freq"] if local.get("rope_theta") is None else local["rope_theta"]
    rope = Rope(theta=positive("rope_local_base_freq", base))
    return {"ropes": tuple(rope if window else None for window in gemma_windows(raw))}


def _smollm3_ropes(raw: Raw) -> dict[str, Any]:
    rotated, interval, layers = raw.get("no_rope_layers"), raw["no_rope_layer_interval"], raw["num_hidden_layers"]
    check_count("no_rope_layer_interval", interval, 1, "it must be a number of layers")
    if rotated is None:
        rotated = [(layer + 1) % interval for layer in range(layers)]
    if len(rotated) != layers:
        raise ValueError(f"no_rope_layers has {len(rotated)} entries; it must have one for each of {layers} layers.")
    return {"ropes": tuple(None if whether else NO_ROPE for whether in rotated)}


def _no_windows(raw: Raw) -> tuple[int | None, ...]:
    return (None,) * raw["num_hidden_layers"]


def one_window(raw: Raw) -> tuple[int | None, ...]:
    return (raw.get("sliding_window"),) * raw["num_hidden_layers"]


def gemma_windows(raw: Raw) -> tuple[int | None, ...]:
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
    return one_window(raw) if raw.get("use_sliding_window", False) else _no_windows(raw)


def _biases_as_given(raw: Raw) -> tuple[bool, bool]:
    """Return whether queries, keys and values have biases, and whether the output has."""
    return (bool(raw.get("attention_bias", False)),) * 2


def _no_biases(raw: Raw) -> tuple[bool, bool]:
    return False, False


def _qwen2_biases(raw: Raw) -> tuple[bool, bool]:
    return True, False


def _gemma_factors(raw: Raw) -> dict[str, Any]:
    scalar = positive("query_pre_attn_scalar", raw["query_pre_attn_scalar"])
    attention = None if scalar == raw["head_dim"] else scalar**-0.5
    names = {"attention_soft_cap": "attn_logit_softcapping", "logits_soft_cap": "final_logit_softcapping"}
    caps = {ours: positive(name, raw[name]) for ours, name in names.items() if raw.get(name) is not None}
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
    return {name: positive(name, raw.get(name)) for name in MULTIPLIERS}


def _granite_written(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in MULTIPLIERS} | {"attention_multiplier": multiplier(config)}


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
        "mistral", defaults={"sliding_window": 4096}, windows=one_window, biases=_no_biases
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
        windows=one_window,
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
        windows=one_window,
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
        windows=gemma_windows,
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
        windows=gemma_windows,
        rope=_gemma3_rope,
        read=(_gemma_factors, _gemma3_ropes),
        written=_gemma3_written,
    ),
}  # fmt: skip
ARCHITECTURES = {theirs: ours.name for theirs, ours in BUILT_IN.items()}
TRAITS = {ours.name: ours.traits for ours in BUILT_IN.values()}


def multiplier(config: Config) -> float:
    return config.head_dim**-0.5 if config.attention_multiplier is None else config.attention_multiplier
