"""The built-in families: how each reads its config.json, what it always has, and what GGUF calls it.

They are registered as a family of another package is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any, Literal, get_type_hints

from kvjax._src.checks import check_count, check_types, shown
from models.config import NO_ROPE, AltUp, Config, GlobalHeads, Latent, Recurrence, Rope, Routing
from models.config_json import completed, config_of
from models.families import Fused, Gguf, HeadByHead, register_family
from models.rope_fields import Raw, RopeFields, positive, read_rope
from models.rotary import yarn_scale

LAYER = "model.layers.{}."
# Fields of several families, by llama.cpp's names.
WINDOW = {"attention.sliding_window": "sliding_window"}
WINDOWS = WINDOW | {"attention.sliding_window_pattern": "windowed"}
EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
MROPE = {"mrope": "default"}  # in a text all three positions of a token are the same
QWEN3_MOE_KEYS = EXPERTS | {"expert_feed_forward_length": "moe_intermediate_size"}


def _windows_of(types: Any, window: int | None) -> tuple[int | None, ...]:
    return tuple(window if type_ == "sliding_attention" else None for type_ in types)


def _types_in_gguf(raw: Raw) -> Raw:
    """Return the types of layers that a file names, one by one."""
    windowed = raw.get("windowed")
    if windowed is None:
        return {}
    if not isinstance(windowed, list) or len(windowed) != raw["num_hidden_layers"]:
        raise ValueError(f"windowed is {shown(windowed)}; expected true or false for each layer.")
    return {"layer_types": ["sliding_attention" if has else "full_attention" for has in windowed]}


def _one_window(raw: Raw) -> tuple[int | None, ...]:
    return (raw.get("sliding_window"),) * raw["num_hidden_layers"]


def _asked_for(raw: Raw, unnamed: Callable[[Raw], tuple[bool, ...]]) -> tuple[int | None, ...]:
    """Return the windows of a model that says whether it has any; ``unnamed`` tells its layers if it names none."""
    window = raw.get("sliding_window")
    if window is None or not raw.get("use_sliding_window", False):
        return ()
    if raw.get("layer_types") is not None:
        return _windows_of(raw["layer_types"], window)
    return tuple(window if has else None for has in unnamed(raw))


def _mixtral_in_gguf(raw: Raw, tensors: Mapping[str, Any]) -> Raw:
    return {"architectures": ["MixtralForCausalLM"]} if raw.get("num_local_experts") else {}  # a llama with experts


register_family(
    "llama",
    lambda raw: config_of(completed(raw, "llama")),
    architecture="LlamaForCausalLM",
    gguf=Gguf("llama", EXPERTS, _mixtral_in_gguf, neighbours=True),
)


def _mistral(raw: Raw) -> Config:
    raw = completed(raw, "mistral", sliding_window=4096)
    return config_of(raw, sliding_windows=_one_window(raw), attention_bias=False, output_bias=False)


register_family("mistral", _mistral, architecture="MistralForCausalLM", inside={"mistral3": "mistral"})


def _ministral(raw: Raw) -> Config:
    raw = completed(raw, "ministral", max_position_embeddings=131_072, sliding_window=4096)
    types = raw.get("layer_types")
    windows = _one_window(raw) if types is None else _windows_of(types, raw.get("sliding_window"))
    return config_of(raw, sliding_windows=windows, attention_bias=False, output_bias=False)


register_family("ministral", _ministral, architecture="MinistralForCausalLM")


MINISTRAL3_ROPE = dict(
    rope_type="yarn", rope_theta=1_000_000.0, factor=16.0, original_max_position_embeddings=16_384, mscale=1.0,
    mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
)  # fmt: skip


def _ministral3(raw: Raw) -> Config:
    raw = completed(
        raw, "ministral3", head_dim=128, max_position_embeddings=262_144, rms_norm_eps=1e-5,
        rope_parameters=MINISTRAL3_ROPE,
    )  # fmt: skip
    parameters, rope = raw.get("rope_scaling") or raw["rope_parameters"], read_rope(raw)
    rope = dataclasses.replace(rope, llama_4_scaling_beta=parameters.get("llama_4_scaling_beta") or 0.0)
    biases = dict(attention_bias=False, output_bias=False)
    return config_of(raw, sliding_windows=_one_window(raw), rope=rope, **biases)


MINISTRAL3_KEYS = {"rope.scaling.yarn_log_multiplier": "mscale_all_dim", "attention.temperature_scale": "beta"}


def _ministral3_in_gguf(raw: Raw, tensors: Mapping[str, Any]) -> Raw:
    own = {"mscale": 1.0, "mscale_all_dim": raw.get("mscale_all_dim"), "llama_4_scaling_beta": raw.get("beta")}
    return {"rope_parameters": raw["rope_parameters"] | own}


register_family(
    "ministral3",
    _ministral3,
    architecture="Ministral3ForCausalLM",
    gguf=Gguf("mistral3", MINISTRAL3_KEYS, _ministral3_in_gguf, neighbours=True),
    inside={"mistral3": "ministral3"},
)


def _mixtral(raw: Raw) -> Config:
    raw = completed(
        raw, "mixtral", norm_topk_prob=True, num_experts_per_tok=2, num_local_experts=8, rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
    )  # fmt: skip
    biases = dict(attention_bias=False, output_bias=False)
    return config_of(raw, sliding_windows=_one_window(raw), **biases, **_experts(raw))


def _experts(raw: Raw) -> dict[str, Any]:
    number = raw["num_local_experts"] if raw.get("num_experts") is None else raw["num_experts"]
    return {
        "num_experts": check_count("num_experts", number, 1, "it must be a positive integer"),
        "experts_per_token": raw["num_experts_per_tok"],
        "normalise_experts": bool(raw.get("norm_topk_prob", False)),
    }


_MIXTRAL = LAYER + "block_sparse_moe."
register_family(
    "mixtral",
    _mixtral,
    {
        "layers.router": _MIXTRAL + "gate.weight",
        "layers.expert_gate": _MIXTRAL + "experts.{}.w1.weight",
        "layers.expert_up": _MIXTRAL + "experts.{}.w3.weight",
        "layers.expert_down": _MIXTRAL + "experts.{}.w2.weight",
    },
    architecture="MixtralForCausalLM",
)


def _qwen2(raw: Raw) -> Config:
    raw = completed(raw, "qwen2", sliding_window=4096)
    rope = read_rope(raw, MROPE)
    return config_of(raw, sliding_windows=_qwen_windows(raw), attention_bias=True, output_bias=False, rope=rope)


def _qwen_windows(raw: Raw) -> tuple[int | None, ...]:
    def last_ones(raw: Raw) -> tuple[bool, ...]:
        full_layers = raw.get("max_window_layers", 28)
        check_count("max_window_layers", full_layers, 0, "it must be a number of layers")
        return tuple(layer >= full_layers for layer in range(raw["num_hidden_layers"]))

    return _asked_for(raw, last_ones)


register_family(
    "qwen2",
    _qwen2,
    architecture="Qwen2ForCausalLM",
    gguf=Gguf("qwen2"),
    inside={"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"},
)


def _qwen3(raw: Raw) -> Config:
    raw = completed(raw, "qwen3", head_dim=128, sliding_window=4096)
    return config_of(raw, query_key_norm=True, sliding_windows=_qwen_windows(raw), rope=read_rope(raw, MROPE))


register_family(
    "qwen3",
    _qwen3,
    architecture="Qwen3ForCausalLM",
    gguf=Gguf("qwen3"),
    inside={"qwen3_vl": "qwen3_vl_text"},
)


def _qwen3_moe(raw: Raw) -> Config:
    raw = completed(
        raw, "qwen3_moe", moe_intermediate_size=768, num_experts_per_tok=8, num_local_experts=128, sliding_window=4096
    )
    windows = _one_window(raw) if raw.get("use_sliding_window", False) else ()
    return config_of(raw, query_key_norm=True, sliding_windows=windows, **_sparse(raw))


def _sparse(raw: Raw) -> dict[str, Any]:
    """Return the experts of a model of which some layers may have one feed-forward network."""
    step, layers = raw.get("decoder_sparse_step"), range(raw["num_hidden_layers"])
    step = check_count("decoder_sparse_step", 1 if step is None else step, 1, "it must be a number of layers")
    dense = {layer for layer in layers if (layer + 1) % step} | set(raw.get("mlp_only_layers") or ())
    sizes = tuple(raw["intermediate_size"] if layer in dense else None for layer in layers)
    return dict(intermediate_size=raw["moe_intermediate_size"], dense_sizes=sizes, **_experts(raw))


def _check_in_gguf(raw: Raw, architecture: str, keys: Mapping[str, str]) -> None:
    """Check that a file has sizes that the family needs."""
    for key, field in keys.items():
        if type(raw.get(field)) is not int or raw[field] < 1:
            raise ValueError(f"it lacks the key {architecture}.{key}, or it is 0; is it a language model's?")


def _dense_in_gguf(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {"mlp_only_layers": [layer for layer in range(len(tensors)) if f"blk.{layer}.ffn_gate.weight" in tensors]}


def _qwen3_moe_in_gguf(raw: Raw, tensors: Mapping[str, Any]) -> Raw:
    _check_in_gguf(raw, "qwen3moe", QWEN3_MOE_KEYS)
    return _dense_in_gguf(tensors)


register_family(
    "qwen3_moe",
    _qwen3_moe,
    architecture="Qwen3MoeForCausalLM",
    gguf=Gguf("qwen3moe", QWEN3_MOE_KEYS, _qwen3_moe_in_gguf),
)


# The sizes of gated delta nets, in the order of Recurrence's fields, and what Qwen3-Next has for them.
DELTA_NET = dict(
    linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
)  # fmt: skip
GATED: dict[str, Any] = dict(attention_gate=True, norm_offset=True, query_key_norm=True)


def _hybrid(raw: Raw, model_type: str, **defaults: Any) -> Config:
    """Read a model of which some layers have a gated delta net in place of attention."""
    made = completed(
        {**raw, "layer_types": None}, model_type, full_attention_interval=4, head_dim=256, partial_rotary_factor=0.25,
        **DELTA_NET, **defaults,
    )  # fmt: skip
    _check_only(made, attn_output_gate=(True, None), output_gate_type=("swish", "silu", None))
    every = check_count("full_attention_interval", made["full_attention_interval"], 1, "it must be a number of layers")
    kinds = Literal["full_attention", "linear_attention"]
    linear = _without_attention(raw, kinds, lambda layer: (layer + 1) % every > 0)
    net = Recurrence(linear, *(made[name] for name in DELTA_NET)) if linear else None
    experts = _sparse(made) if made.get("num_experts") else {}
    if experts:
        experts |= dict(shared_size=made["shared_expert_intermediate_size"], shared_router=True)
    rope, source = read_rope(made, MROPE, partial=True), {**raw, "model_type": model_type}
    return config_of(made, rope=rope, recurrence=net, source=source, **GATED, **experts)


def _check_only(raw: Raw, **known: tuple[Any, ...]) -> None:
    """Check that fields have one of the values that are supported."""
    for name, values in known.items():
        if raw.get(name) not in values:
            expected = " or ".join(repr(value) for value in values if value is not None)
            raise ValueError(f"{name} is {shown(raw[name])}; expected {expected}.")


def _without_attention(raw: Raw, kinds: Any, unnamed: Callable[[int], bool]) -> tuple[int, ...]:
    """Return the layers without attention; ``unnamed`` tells them if ``layer_types`` are not named, ``kinds`` if so."""
    types, layers = raw.get("layer_types"), raw["num_hidden_layers"]
    check_types({"layer_types": types}, {"layer_types": list[kinds] | None})
    if types is None:
        return tuple(layer for layer in range(layers) if unnamed(layer))
    if len(types) != layers:
        raise ValueError(f"layer_types has {len(types)} entries; it must have one for each of {layers} layers.")
    return tuple(layer for layer, kind in enumerate(types) if kind in ("linear_attention", "mamba"))


# Tensors that hold several parameters. In Qwen3-Next those of delta nets, too, hold them head by head.
QUERY_GATE: dict[str, HeadByHead] = {
    LAYER + f"self_attn.q_proj.{kind}": HeadByHead(
        (f"layers.query{end}", f"layers.query_gate{end}"), lambda config: config.num_heads
    )
    for kind, end in (("weight", ""), ("bias", "_bias"))
}
DELTA_IN = LAYER + "linear_attn.in_proj_"
DELTA_PARTS = tuple(f"layers.delta_{part}" for part in ("query", "key", "value", "gate", "rate", "decay"))


def _key_heads(config: Config) -> int:
    assert config.recurrence is not None
    return config.recurrence.key_heads


SHARED_EXPERT = {
    f"layers.shared_{part}": LAYER + f"mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")
}
NEXT_SPARSE = dict(
    decoder_sparse_step=1, moe_intermediate_size=512, norm_topk_prob=True, num_experts=512, num_experts_per_tok=10,
    shared_expert_intermediate_size=512,
)  # fmt: skip
# Of recurrent layers; the file has the size of all value heads together.
STATE_KEYS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.inner_size": "inner",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
}
DELTA_KEYS = STATE_KEYS | {
    "full_attention_interval": "full_attention_interval",
    "attention.recurrent_layers": "recurrent",
    "rope.dimension_sections": "sections",
}
SHARED_KEYS = QWEN3_MOE_KEYS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}


def _delta_in_gguf(architecture: str, sparse: Mapping[str, str] = {}) -> Callable[[Raw, Mapping[str, Any]], Raw]:
    """Return the hook of a model whose layers without attention are told by their tensors."""

    def fields(raw: Raw, tensors: Mapping[str, Any]) -> Raw:
        _check_in_gguf(raw, architecture, {**STATE_KEYS, **sparse})
        kinds = ("full_attention", "linear_attention")
        return _dense_in_gguf(tensors) | {
            "layer_types": [kinds[f"blk.{layer}.ssm_a" in tensors] for layer in range(raw["num_hidden_layers"])],
            "linear_value_head_dim": raw["inner"] // raw["linear_num_value_heads"],
            "num_experts": raw.get("num_local_experts"),
        }

    return fields


QWEN3_5: Fused = {**QUERY_GATE, DELTA_IN + "qkv.weight": DELTA_PARTS[:3]}
register_family(
    "qwen3_next",
    lambda raw: _hybrid(raw, "qwen3_next", **NEXT_SPARSE),
    SHARED_EXPERT,
    fused={
        **QUERY_GATE,
        DELTA_IN + "qkvz.weight": HeadByHead(DELTA_PARTS[:4], _key_heads),
        DELTA_IN + "ba.weight": HeadByHead(DELTA_PARTS[4:], _key_heads),
    },
    architecture="Qwen3NextForCausalLM",
    gguf=Gguf("qwen3next", DELTA_KEYS | SHARED_KEYS, _delta_in_gguf("qwen3next", SHARED_KEYS), fused=QWEN3_5),
)


register_family(
    "qwen3_5_text",
    lambda raw: _hybrid({**raw, "num_experts": None}, "qwen3_5_text"),
    architecture="Qwen3_5ForCausalLM",
    inside={"qwen3_5": "qwen3_5_text"},
    fused=QWEN3_5,
    gguf=Gguf("qwen35", DELTA_KEYS, _delta_in_gguf("qwen35"), takes_turns=True),
)
register_family(
    "qwen3_5_moe_text",
    lambda raw: _hybrid(
        {**raw, "decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": True}, "qwen3_5_moe_text",
        **NEXT_SPARSE | dict(intermediate_size=512, num_experts=256, num_experts_per_tok=8),
    ),
    tensors=SHARED_EXPERT,
    architecture="Qwen3_5MoeForCausalLM",
    inside={"qwen3_5_moe": "qwen3_5_moe_text"},
    joined_experts="rows",
    fused=QWEN3_5,
    gguf=Gguf("qwen35moe", DELTA_KEYS | SHARED_KEYS, _delta_in_gguf("qwen35moe", SHARED_KEYS), takes_turns=True),
)  # fmt: skip


register_family(
    "olmo2",
    lambda raw: config_of(completed(raw, "olmo2", rms_norm_eps=1e-5), norms="after", wide_query_key_norm=True),
    architecture="Olmo2ForCausalLM",
    gguf=Gguf("olmo2", WINDOWS, lambda raw, tensors: _olmo3_in_gguf(raw) if raw.get("sliding_window") else {}),
)


def _olmo3_in_gguf(raw: Raw) -> Raw:
    return {"architectures": ["Olmo3ForCausalLM"], **_types_in_gguf(raw)}  # an olmo2 with windows


def _olmo3(raw: Raw) -> Config:
    raw = completed(raw, "olmo3", rms_norm_eps=1e-5, rope_theta=500_000.0, sliding_window=4096)
    windows = _pattern_windows(raw, 4)
    ropes = _ropes_by_kind(raw, windows, raw["rope_theta"])
    return config_of(raw, norms="after", wide_query_key_norm=True, sliding_windows=windows, **ropes)


def _ropes_by_kind(raw: Raw, windows: tuple[int | None, ...], base: float) -> dict[str, Any]:
    """Return the rotary embeddings of a model whose layers with a window have one of their own, which is not scaled.

    ``base`` is that one's, where ``rope_parameters`` name none.
    """
    parameters = raw.get("rope_parameters") or {}
    kinds = dict.fromkeys(("full_attention", "sliding_attention"), dict | None)
    check_types(parameters, kinds, "rope_parameters")
    if "full_attention" in parameters:
        rope = read_rope({**raw, "rope_parameters": parameters["full_attention"]})
    else:
        rope = read_rope(raw)
    local = parameters.get("sliding_attention") or {}
    check_types(local, get_type_hints(RopeFields), "rope")
    if (type_ := local.get("rope_type") or "default") != "default":
        raise ValueError(f"rope type {type_!r} of layers with a sliding window is not supported; only 'default' is.")
    own = Rope(theta=positive("rope_theta", base if local.get("rope_theta") is None else local["rope_theta"]))
    return {"rope": rope, "ropes": tuple(own if window and own != rope else None for window in windows)}


def _pattern_windows(raw: Raw, pattern: int) -> tuple[int | None, ...]:
    """Return the windows of a model that names its layers' types, or has full attention in every so many."""
    types = raw.get("layer_types")
    if types is None:
        layers = range(raw["num_hidden_layers"])
        types = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in layers]
    return _windows_of(types, raw.get("sliding_window"))


register_family("olmo3", _olmo3, architecture="Olmo3ForCausalLM")


def _exaone4(raw: Raw) -> Config:
    raw = completed(raw, "exaone4", rms_norm_eps=1e-5, sliding_window=4096, sliding_window_pattern=4)
    pattern = raw["sliding_window_pattern"]  # 4, or the same as letters: LLLG
    windows = _pattern_windows(raw, len(pattern) if isinstance(pattern, str) else _checked_pattern(pattern))
    ropes = tuple(None if window or raw["sliding_window"] is None else NO_ROPE for window in windows)
    biases = dict(attention_bias=False, output_bias=False)
    return config_of(raw, norms="after", query_key_norm=True, sliding_windows=windows, ropes=ropes, **biases)


def _checked_pattern(pattern: Any) -> int:
    return check_count("sliding_window_pattern", pattern, 1, "it must be a number of layers")


register_family(
    "exaone4",
    _exaone4,
    architecture="Exaone4ForCausalLM",
    gguf=Gguf(
        "exaone4", WINDOWS, lambda raw, tensors: {"sliding_window": raw.get("sliding_window"), **_types_in_gguf(raw)}
    ),
)


def _seed_oss(raw: Raw) -> Config:
    raw = completed(raw, "seed_oss", attention_bias=True, head_dim=128, max_position_embeddings=524_288)
    return config_of(raw, output_bias=bool(raw.get("attention_out_bias", False)))


register_family("seed_oss", _seed_oss, architecture="SeedOssForCausalLM", gguf=Gguf("seed_oss"))


GPT_OSS_ROPE = dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False)
GPT_OSS: dict[str, Any] = dict(attention_sinks=True, expert_biases=True, activation="clamped_swiglu")


def _gpt_oss(raw: Raw) -> Config:
    quantised = raw.get("quantization_config") or {"quant_method": "mxfp4"}  # which is dequantised as it loads
    for name, value, only in (
        ("quant_method", quantised.get("quant_method"), "mxfp4"), ("swiglu_limit", raw.get("swiglu_limit", 7.0), 7.0)
    ):  # fmt: skip
        if value != only:
            raise ValueError(f"{name} is {shown(value)}; only {only!r} is supported.")
    raw = completed(
        {name: value for name, value in raw.items() if name != "quantization_config"}, "gpt_oss", attention_bias=True,
        head_dim=64, max_position_embeddings=131_072, norm_topk_prob=True, num_experts_per_tok=4, num_local_experts=128,
        rms_norm_eps=1e-5, rope_parameters=GPT_OSS_ROPE, rope_theta=150_000.0, sliding_window=128,
    )  # fmt: skip
    return config_of(raw, sliding_windows=_pattern_windows(raw, 2), **GPT_OSS, **_experts(raw))


register_family(
    "gpt_oss",
    _gpt_oss,
    {"layers.router": LAYER + "mlp.router.weight", "layers.router_bias": LAYER + "mlp.router.bias"},
    architecture="GptOssForCausalLM",
    gguf=Gguf(
        "gpt-oss",
        WINDOW | QWEN3_MOE_KEYS,
        lambda raw, tensors: {"rope_parameters": raw["rope_parameters"] | {"truncate": False}},
    ),
    joined_experts=True,
)


def _smollm3(raw: Raw) -> Config:
    raw = completed(raw, "smollm3", no_rope_layer_interval=4, rope_theta=2_000_000.0, tie_word_embeddings=True)
    rotated, interval, layers = raw.get("no_rope_layers"), raw["no_rope_layer_interval"], raw["num_hidden_layers"]
    check_count("no_rope_layer_interval", interval, 1, "it must be a number of layers")
    if rotated is None:
        rotated = [(layer + 1) % interval for layer in range(layers)]
    if len(rotated) != layers:
        raise ValueError(f"no_rope_layers has {len(rotated)} entries; it must have one for each of {layers} layers.")
    ropes = tuple(None if whether else NO_ROPE for whether in rotated)
    windows = _asked_for(raw, lambda raw: tuple(rope is not None for rope in ropes))
    return config_of(raw, sliding_windows=windows, ropes=ropes)


register_family(
    "smollm3",
    _smollm3,
    architecture="SmolLM3ForCausalLM",
    gguf=Gguf("smollm3", neighbours=True),
)


# Granite's factors, by llama.cpp's names.
MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


MAMBA_KEYS = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.group_count": "mamba_n_groups",
    "ssm.inner_size": "inner",
    "ssm.state_size": "mamba_d_state",
    "ssm.time_step_rank": "mamba_n_heads",
}
HYBRID_KEYS = MULTIPLIERS | MAMBA_KEYS | EXPERTS
HYBRID_KEYS |= {
    "attention.head_count_kv": "kv_heads",  # 0 of layers without attention
    "expert_shared_feed_forward_length": "shared_intermediate_size",
}


def _granite(raw: Raw) -> Config:
    raw = completed(raw, "granite", attention_multiplier=1.0)
    return config_of(raw, **_multipliers(raw))


def _multipliers(raw: Raw) -> dict[str, Any]:
    return {name: positive(name, raw.get(name)) for name in MULTIPLIERS.values()}


def _granite_in_gguf(raw: Raw, tensors: Mapping[str, Any]) -> Raw:
    if raw.get("finetuned") is False:
        raise ValueError("finetuned is False: a model without rotary embedding, which is not supported.")
    return {"attention_multiplier": raw.get("attention_multiplier", raw["head_dim"] ** -0.5)}


register_family(
    "granite",
    _granite,
    architecture="GraniteForCausalLM",
    gguf=Gguf("granite", HYBRID_KEYS, _granite_in_gguf, neighbours=True),  # a Granite 4 without Mamba has them, too
)


# The sizes of state-space layers, in the order of Recurrence's fields, and what Granite 4 has for them.
STATE_SPACE = dict(mamba_n_groups=1, mamba_n_heads=128, mamba_d_state=256, mamba_d_head="auto", mamba_d_conv=4)


def _granite_hybrid(raw: Raw) -> Config:
    made = completed(
        {**raw, "layer_types": None}, "granitemoehybrid", attention_multiplier=1.0, num_experts_per_tok=2,
        num_local_experts=8, shared_intermediate_size=1024, mamba_expand=2, mamba_conv_bias=True, **STATE_SPACE,
    )  # fmt: skip
    limits = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}], None)  # of step sizes, which are no limits
    _check_only(made, mamba_conv_bias=(True,), mamba_proj_bias=(False, None), time_step_limit=limits)
    _check_only(made, position_embedding_type=("rope", "nope", None))
    kinds = Literal["attention", "mamba", "full_attention", "linear_attention"]  # of the hub, and of transformers 5
    net, shared, inner = None, made["shared_intermediate_size"], made["mamba_expand"] * made["hidden_size"]
    if layers := _without_attention(raw, kinds, lambda layer: True):
        if made["mamba_d_head"] == "auto":
            made["mamba_d_head"] = inner // max(made["mamba_n_heads"], 1)
        net = dataclasses.replace(Recurrence(layers, *(made[name] for name in STATE_SPACE)), kind="state_space")
        if (given := net.value_heads * net.value_dim) != inner:
            raise ValueError(f"mamba_n_heads * mamba_d_head is {given}; expected mamba_expand * hidden_size, {inner}.")
    feed = {"intermediate_size": shared}
    if made["num_local_experts"]:
        feed = _experts(made | {"norm_topk_prob": True}) | {"shared_size": shared}
    own: dict[str, Any] = dict(recurrence=net, source={**raw, "model_type": "granitemoehybrid"})
    own["rope"] = read_rope(made) if made.get("position_embedding_type") == "rope" else NO_ROPE
    return config_of(made, **own, **_multipliers(made), **feed)


def _shared_parts(config: Config) -> tuple[str, str]:
    return ("layers.shared_gate", "layers.shared_up") if config.num_experts else ("layers.gate", "layers.up")


def _granite_hybrid_in_gguf(architecture: str) -> Callable[[Raw, Mapping[str, Any]], Raw]:
    def fields(raw: Raw, tensors: Mapping[str, Any]) -> Raw:
        own: dict[str, Any] = dict(attention_multiplier=raw.get("attention_multiplier", raw["head_dim"] ** -0.5))
        own["position_embedding_type"] = "rope" if raw.get("finetuned", True) else "nope"
        own["num_local_experts"] = experts = raw.get("num_local_experts") or 0
        own["shared_intermediate_size"] = raw.get("shared_intermediate_size") or (
            0 if experts else raw["intermediate_size"]
        )
        recurrent = [f"blk.{layer}.ssm_a" in tensors for layer in range(raw["num_hidden_layers"])]
        own["layer_types"] = ["mamba" if is_recurrent else "attention" for is_recurrent in recurrent]
        if any(recurrent):
            _check_in_gguf(raw, architecture, MAMBA_KEYS)
            own["mamba_d_head"] = raw["inner"] // raw["mamba_n_heads"]
            own["mamba_expand"] = raw["inner"] // raw["hidden_size"]
        return own

    return fields


MAMBA = dict(kernel="conv1d.weight", log_decay="A_log", decay_bias="dt_bias", output="out_proj.weight")
SPARSE, SHARED_MLP = LAYER + "block_sparse_moe.", LAYER + "shared_mlp."
register_family(
    "granitemoehybrid",
    _granite_hybrid,
    {
        **{f"layers.recurrent_{part}": LAYER + f"mamba.{name}" for part, name in MAMBA.items()},
        **{f"layers.expert_{part}": SPARSE + f"experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")},
        **dict.fromkeys(("layers.down", "layers.shared_down"), SHARED_MLP + "output_linear.weight"),
        "layers.router": SPARSE + "router.layer.weight",
    },
    fused={SHARED_MLP + "input_linear.weight": _shared_parts},
    architecture="GraniteMoeHybridForCausalLM",
    joined_experts="linears",
    gguf=Gguf("granitehybrid", HYBRID_KEYS, _granite_hybrid_in_gguf("granitehybrid"), neighbours=True),
)
register_family(
    "granitemoe",
    lambda raw: _granite_hybrid(
        {"shared_intermediate_size": 0, "position_embedding_type": "rope"}
        | {**raw, "layer_types": ["attention"] * (raw.get("num_hidden_layers") or 0)}
    ),
    joined_experts="linears",
    gguf=Gguf("granitemoe", HYBRID_KEYS, _granite_hybrid_in_gguf("granitemoe"), neighbours=True),
)


def _phi3(raw: Raw) -> Config:
    raw = completed(raw, "phi3", original_max_position_embeddings=4096, rms_norm_eps=1e-5)
    rope = read_rope(raw, {"su": "longrope", "yarn": "longrope"}, partial=True)  # names in the first Phi-3 models
    return config_of(raw, sliding_windows=_one_window(raw), attention_bias=False, output_bias=False, rope=rope)


def _phi3_in_gguf(raw: Raw, tensors: Mapping[str, Any]) -> Raw:
    if raw.get("rope_type") == "yarn":  # which the first Phi-3 models call longrope
        raise ValueError("rope_type is 'yarn', which is not supported for phi3.")
    return {}


register_family(
    "phi3",
    _phi3,
    fused={
        LAYER + "self_attn.qkv_proj.weight": ("layers.query", "layers.key", "layers.value"),
        LAYER + "mlp.gate_up_proj.weight": ("layers.gate", "layers.up"),
    },
    architecture="Phi3ForCausalLM",
    gguf=Gguf(
        "phi3",
        WINDOW | {"rope.scaling.attn_factor": "attention_factor"},
        _phi3_in_gguf,
    ),
)


GEMMA: dict[str, Any] = dict(norms="both", norm_offset=True, activation="gelu_tanh")
LOGITS_CAP = {"final_logit_softcapping": "final_logit_softcapping"}
GEMMA_TENSORS = {"layers.feed_norm": LAYER + "pre_feedforward_layernorm.weight"}


def _gemma(raw: Raw) -> Config:
    raw = completed(raw, "gemma", head_dim=256, max_position_embeddings=8192, tie_word_embeddings=True)
    return config_of(raw, **GEMMA | {"norms": "before"}, embedding_multiplier=raw["hidden_size"] ** 0.5)


def _gemma2(raw: Raw) -> Config:
    raw = completed(
        raw, "gemma2", attn_logit_softcapping=50.0, final_logit_softcapping=30.0, head_dim=256,
        query_pre_attn_scalar=256, sliding_window=4096, sliding_window_pattern=2, tie_word_embeddings=True,
    )  # fmt: skip
    windows = _pattern_windows(raw, _checked_pattern(raw["sliding_window_pattern"]))
    return config_of(raw, sliding_windows=windows, **GEMMA, **_gemma_factors(raw))


# What the published sizes from 4B on leave out of their text_config.
GEMMA3_SIZES = dict(
    vocab_size=262_208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=131_072,
)  # fmt: skip


def _gemma3(raw: Raw) -> Config:
    raw = completed(
        raw, "gemma3_text", head_dim=256, query_pre_attn_scalar=256, rope_local_base_freq=10_000.0,
        rope_theta=1_000_000.0, sliding_window=4096, sliding_window_pattern=6, tie_word_embeddings=True, **GEMMA3_SIZES,
    )  # fmt: skip
    windows = _pattern_windows(raw, _checked_pattern(raw["sliding_window_pattern"]))
    ropes = _ropes_by_kind(raw, windows, positive("rope_local_base_freq", raw["rope_local_base_freq"]))
    return config_of(raw, query_key_norm=True, sliding_windows=windows, **ropes, **GEMMA, **_gemma_factors(raw))


def _gemma_factors(raw: Raw) -> dict[str, Any]:
    scalar = positive("query_pre_attn_scalar", raw["query_pre_attn_scalar"])
    attention = None if scalar == raw["head_dim"] else scalar**-0.5
    names = {"attention_soft_cap": "attn_logit_softcapping", "logits_soft_cap": "final_logit_softcapping"}
    caps = {ours: positive(name, raw[name]) for ours, name in names.items() if raw.get(name) is not None}
    return {"embedding_multiplier": raw["hidden_size"] ** 0.5, "attention_multiplier": attention} | caps


def _attention_scalar(largest: int) -> Callable[[Raw, Mapping[str, Any]], Raw]:
    """Return the hook for a factor that is not stored: llama.cpp tells the largest model by its number of layers."""

    def fields(raw: Raw, tensors: Mapping[str, Any]) -> Raw:
        if raw.get("sliding_window", 1) is None:
            raise ValueError("sliding_window is 0; it must be a positive integer.")
        of_largest = raw["hidden_size"] / raw["num_attention_heads"]
        return {"query_pre_attn_scalar": of_largest if raw["num_hidden_layers"] == largest else raw["head_dim"]}

    return fields


register_family("gemma", _gemma, architecture="GemmaForCausalLM", gguf=Gguf("gemma"))
register_family(
    "gemma2",
    _gemma2,
    GEMMA_TENSORS,
    architecture="Gemma2ForCausalLM",
    gguf=Gguf(
        "gemma2", WINDOW | LOGITS_CAP | {"attn_logit_softcapping": "attn_logit_softcapping"}, _attention_scalar(46)
    ),
)
register_family(
    "gemma3_text",
    _gemma3,
    GEMMA_TENSORS,
    architecture="Gemma3ForCausalLM",
    gguf=Gguf("gemma3", WINDOW | LOGITS_CAP | {"rope.freq_base_swa": "rope_local_base_freq"}, _attention_scalar(62)),
    inside={"gemma3": "gemma3_text"},
)


GEMMA3N: dict[str, Any] = dict(
    vocab_size=262_400, hidden_size=2048, intermediate_size=16_384, num_hidden_layers=35, num_attention_heads=8,
    num_key_value_heads=2, head_dim=256, max_position_embeddings=32_768, sliding_window=512, tie_word_embeddings=True,
    final_logit_softcapping=30.0, rope_theta=1_000_000.0, rope_local_base_freq=10_000.0, num_kv_shared_layers=15,
    hidden_size_per_layer_input=256, vocab_size_per_layer_input=262_144, altup_num_inputs=4, altup_active_idx=0,
    altup_correct_scale=True, laurel_rank=64,
)  # fmt: skip


def _gemma3n(raw: Raw) -> Config:
    source, layers = {**raw, "model_type": "gemma3n_text"}, raw.get("num_hidden_layers") or 35
    if isinstance(sizes := raw.get("intermediate_size"), list):
        if not sizes or sizes != sizes[:1] * layers:
            raise ValueError(f"intermediate_size is {shown(sizes)}; expected one size for all of {layers} layers.")
        raw = {**raw, "intermediate_size": sizes[0]}
    raw = completed(raw, "gemma3n_text", **GEMMA3N)
    shares, windows = raw.get("activation_sparsity_pattern"), _pattern_windows(raw, 5)
    if shares is None:
        shares = [0.95 if layer < 10 < layers else 0.0 for layer in range(layers)]
    return config_of(
        raw,
        sliding_windows=windows,
        **_ropes_by_kind(raw, windows, positive("rope_local_base_freq", raw["rope_local_base_freq"])),
        activation_sparsity=tuple(map(float, shares)),
        altup=AltUp(raw["altup_num_inputs"], raw["altup_active_idx"], raw["laurel_rank"], raw["altup_correct_scale"]),
        source=source,
        **_with_layer_inputs(raw),
    )


def _with_layer_inputs(raw: Raw) -> dict[str, Any]:
    """Return what Gemma 3n and Gemma 4 have alike: layers with inputs of their own, or that share keys and values."""
    if raw.get("attention_bias"):
        raise ValueError(f"attention_bias is set, which is not supported for {raw['model_type']}.")
    shared, layers, cap = raw["num_kv_shared_layers"], raw["num_hidden_layers"], raw["final_logit_softcapping"]
    if not 0 <= shared < layers:
        raise ValueError(f"num_kv_shared_layers is {shared} of {layers} layers; expected at least one without.")
    size, vocabulary = raw["hidden_size_per_layer_input"] or 0, raw.get("vocab_size_per_layer_input")
    return dict(
        query_key_norm=True,
        value_norm=True,
        shared_layers=shared,
        layer_input_size=size,
        layer_input_vocab=vocabulary if size and vocabulary and vocabulary != raw["vocab_size"] else 0,
        attention_multiplier=1.0,
        embedding_multiplier=raw["hidden_size"] ** 0.5,
        logits_soft_cap=None if cap is None else positive("final_logit_softcapping", cap),
        **GEMMA | {"norm_offset": False},
    )


LAYER_INPUT_KEYS = {
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "rope.freq_base_swa": "rope_local_base_freq",
}
GEMMA3N_KEYS = {
    "activation_sparsity_scale": "sparsity",
    "altup.active_idx": "altup_active_idx",
    "altup.num_inputs": "altup_num_inputs",
}


def _gemma3n_in_gguf(raw: Raw, tensors: Mapping[str, Any]) -> Raw:
    own: dict[str, Any] = dict(laurel_rank=tensors["blk.0.laurel_l.weight"].shape[0], **_types_in_gguf(raw))
    if (scales := raw.get("sparsity")) is not None:  # standard deviations above the mean, of which a share is below
        scales = scales if isinstance(scales, list) else [scales] * raw["num_hidden_layers"]
        shares = [round(NormalDist().cdf(scale), 6) if scale > -9 else 0.0 for scale in scales]
        own["activation_sparsity_pattern"] = shares
    return own | {"vocab_size_per_layer_input": raw["vocab_size"]}  # whose other rows are zeros


register_family(
    "gemma3n_text",
    _gemma3n,
    GEMMA_TENSORS,
    architecture="Gemma3nForCausalLM",
    inside={"gemma3n": "gemma3n_text"},
    gguf=Gguf("gemma3n", WINDOWS | LOGITS_CAP | LAYER_INPUT_KEYS | GEMMA3N_KEYS, _gemma3n_in_gguf),
)


GEMMA4: dict[str, Any] = dict(
    hidden_size=2304, intermediate_size=9216, num_hidden_layers=30, num_attention_heads=8, num_key_value_heads=4,
    head_dim=256, vocab_size=262_144, max_position_embeddings=131_072, sliding_window=512, tie_word_embeddings=True,
    global_head_dim=512, attention_k_eq_v=False, num_kv_shared_layers=0, hidden_size_per_layer_input=256,
    final_logit_softcapping=None,
)  # fmt: skip
GEMMA4_ROPES: dict[str, dict[str, Any]] = {
    "sliding_attention": dict(rope_type="default", rope_theta=10_000.0),
    "full_attention": dict(rope_type="proportional", rope_theta=1_000_000.0, partial_rotary_factor=0.25),
}


def _gemma4(raw: Raw, model_type: str, **defaults: Any) -> Config:
    seen = raw.get("use_bidirectional_attention")  # of an image's tokens, which no text has
    source, own = {**raw, "model_type": model_type}, None if seen == "vision" else seen
    raw = completed({**raw, "use_bidirectional_attention": own}, model_type, **GEMMA4 | defaults)
    windows = _pattern_windows(raw, 6)
    windows = (*windows[:-1], None)  # as in transformers
    own = _global_heads(raw, windows)
    local, whole = _gemma4_ropes(raw)
    alike = _with_layer_inputs(raw)
    return config_of(
        raw,
        sliding_windows=windows,
        rope=local,
        ropes=tuple(whole if window is None else None for window in windows),
        global_heads=None if own == GlobalHeads(raw["num_key_value_heads"], raw["head_dim"]) else own,
        layer_scale=True,
        sharing_size=2 * raw["intermediate_size"] if alike["shared_layers"] and raw.get("use_double_wide_mlp") else 0,
        **(_beside_experts(raw) if raw.get("enable_moe_block") else {}),
        source=source,
        **alike,
    )


def _beside_experts(raw: Raw) -> dict[str, Any]:
    """Return the experts of a model whose every layer also has a feed-forward network that all tokens go through."""
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        check_count(name, raw.get(name), 1, "it must be a positive integer, because enable_moe_block is set")
    sizes = dict(intermediate_size=raw["moe_intermediate_size"], shared_size=raw["intermediate_size"])
    experts = _experts({**raw, "num_experts_per_tok": raw["top_k_experts"], "norm_topk_prob": True})
    return dict(expert_norms=True, **sizes, **experts)


def _global_heads(raw: Raw, windows: tuple[int | None, ...]) -> GlobalHeads:
    """Return the KV heads of the layers without a window, which a file may name layer by layer."""
    shared, heads, dim = bool(raw["attention_k_eq_v"]), raw.get("num_global_key_value_heads"), raw["global_head_dim"]
    found = GlobalHeads(heads if shared and heads is not None else raw["num_key_value_heads"], dim, shared)
    each = raw.get("per_layer_config")
    if each is None:
        return found
    known = {"head_dim": raw["head_dim"], "num_key_value_heads": raw["num_key_value_heads"]}
    layers = {str(layer) for layer, window in enumerate(windows) if window is None}
    made = [known | own for own in each.values()]
    if each.keys() != layers or any(own != made[0] or own.keys() != known.keys() for own in made):
        wrong = "per_layer_config must give the layers with full attention, and only them, one head_dim and one"
        raise ValueError(f"{wrong} num_key_value_heads.")
    return GlobalHeads(made[0]["num_key_value_heads"], made[0]["head_dim"], shared)


def _gemma4_ropes(raw: Raw) -> tuple[Rope, Rope]:
    """Return the rotary embeddings of layers with a window, and of those without."""
    given = raw.get("rope_parameters") or GEMMA4_ROPES
    check_types(given, dict.fromkeys(GEMMA4_ROPES, dict | None), "rope_parameters")
    made = []
    for kind, default in GEMMA4_ROPES.items():
        own = given.get(kind) or default
        check_types(own, get_type_hints(RopeFields), "rope")
        type_, part = own.get("rope_type") or "default", own.get("partial_rotary_factor") or 1.0
        wrong = f"rope_parameters of {kind} have rope_type {type_!r}"
        if type_ not in ("default", "proportional"):
            raise ValueError(f"{wrong}; expected 'default' or 'proportional'.")
        if own.get("factor") not in (None, 1) or (type_ == "default" and part != 1):
            raise ValueError(f"{wrong} and a factor or a partial_rotary_factor; only 'proportional' has the latter.")
        theta = positive("rope_theta", own.get("rope_theta"), default["rope_theta"])
        made.append(Rope(theta, type_, partial_rotary_factor=positive("partial_rotary_factor", part)))
    return made[0], made[1]


GEMMA4_KEYS = WINDOWS | LOGITS_CAP | QWEN3_MOE_KEYS | LAYER_INPUT_KEYS
GEMMA4_KEYS |= {
    "attention.head_count_kv": "kv_heads",
    "attention.key_length_swa": "windowed_key",
    "attention.value_length_swa": "windowed_value",
    "feed_forward_length": "feed_sizes",
    "rope.dimension_count_swa": "windowed_rotated",
}
WINDOWED_SIZES = {key: field for key, field in GEMMA4_KEYS.items() if field.startswith("windowed_")}


def _gemma4_in_gguf(raw: Raw, tensors: Mapping[str, Any]) -> Raw:
    _check_in_gguf(raw, "gemma4", WINDOWED_SIZES)
    types, layers, size = _types_in_gguf(raw).get("layer_types"), raw["num_hidden_layers"], raw["windowed_key"]
    if types is None or any(raw[field] != size for field in WINDOWED_SIZES.values()):
        raise ValueError("its layers with a sliding window are not named, or their heads are not of one size.")
    if raw["rope_parameters"].get("rope_type") != "proportional":
        raise ValueError("it lacks the tensor rope_freqs.weight, or that is no part of each head; convert it again.")
    heads, sizes = (
        each if isinstance(each, list) else [each] * layers for each in (raw["kv_heads"], raw["feed_sizes"])
    )
    heads_of, shared = dict(zip(types, heads, strict=False)), raw.get("num_kv_shared_layers") or 0
    whole = [layer for layer, kind in enumerate(types) if kind == "full_attention"]
    with_values = [layer for layer in whole if f"blk.{layer}.attn_v.weight" in tensors]
    return {
        "layer_types": types,
        "head_dim": size,
        "num_key_value_heads": heads_of.get("sliding_attention"),
        "per_layer_config": {
            str(layer): {"head_dim": raw["head_dim"], "num_key_value_heads": heads_of["full_attention"]}
            for layer in whole
        },
        "attention_k_eq_v": not with_values,
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[-1] != sizes[0],
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": raw.get("hidden_size_per_layer_input", 0),
        "enable_moe_block": bool(raw.get("num_local_experts")),
        "num_experts": raw.get("num_local_experts"),
        "top_k_experts": raw.get("num_experts_per_tok"),
        "rope_parameters": {
            "full_attention": raw["rope_parameters"],
            "sliding_attention": {"rope_theta": raw.get("rope_local_base_freq", 10_000.0)},
        },
    }


GEMMA4_TENSORS = GEMMA_TENSORS | {
    "layers.router": LAYER + "router.proj.weight",
    **{f"layers.expert_{part}": LAYER + f"experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")},
    **{f"layers.shared_{part}": LAYER + f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
}
register_family(
    "gemma4_text",
    lambda raw: _gemma4(raw, "gemma4_text"),
    GEMMA4_TENSORS,
    architecture="Gemma4ForCausalLM",
    joined_experts="only rows",
    inside={"gemma4": "gemma4_text"},
    gguf=Gguf("gemma4", GEMMA4_KEYS, _gemma4_in_gguf),
)
UNIFIED = dict(hidden_size_per_layer_input=0, max_position_embeddings=262_144, sliding_window=1024)
register_family(
    "gemma4_unified_text",
    lambda raw: _gemma4({**raw, "enable_moe_block": False}, "gemma4_unified_text", **UNIFIED),
    GEMMA_TENSORS,
    architecture="Gemma4UnifiedForCausalLM",
    inside={"gemma4_unified": "gemma4_unified_text"},
)


# Sizes that DeepSeek-V2, V3 and GLM-4.7-Flash have where their files leave them out.
LATENT = dict(
    kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    first_k_dense_replace=0, n_group=1, topk_group=1, rope_interleave=True,
)  # fmt: skip


def _latent(raw: Raw, name: str, routing: Routing, only: dict[str, Any], **defaults: Any) -> Config:
    """Return the Config of a model with latent attention and experts; ``only`` are values that fields must have."""
    raw = completed(raw, name, **LATENT | defaults)
    for field, value in (only | {"num_key_value_heads": raw["num_attention_heads"], "moe_layer_freq": 1}).items():
        if raw.get(field, value) not in (None, value):
            raise ValueError(f"{field} is {shown(raw[field])}; only {value!r} is supported for {name}.")
    biases, rope = bool(raw.get("attention_bias", False)), read_rope(raw)
    own = Latent(
        raw["kv_lora_rank"], raw["qk_rope_head_dim"], raw["qk_nope_head_dim"], raw["v_head_dim"],
        raw["q_lora_rank"] or 0, biases, raw["rope_interleave"],
    )  # fmt: skip
    scale = 1.0 if rope.type == "default" or not rope.mscale_all_dim else yarn_scale(rope, rope.mscale_all_dim)
    layers, types = range(raw["num_hidden_layers"]), raw.get("mlp_layer_types")
    if types is not None and len(types) != len(layers):
        raise ValueError(f"mlp_layer_types has {len(types)} entries; expected one for each of {len(layers)} layers.")
    first = raw["first_k_dense_replace"]
    dense = [layer < first if types is None else types[layer] == "dense" for layer in layers]
    multiplier = positive("routed_scaling_factor", raw.get("routed_scaling_factor"))
    return config_of(
        raw,
        latent=own,
        num_kv_heads=1,
        head_dim=own.head_dim,
        rope=dataclasses.replace(rope, partial_rotary_factor=own.rotated / own.head_dim),
        attention_multiplier=(own.plain + own.rotated) ** -0.5 * scale**2,
        attention_bias=False,
        **_experts({**raw, "num_experts": raw["n_routed_experts"]}),
        intermediate_size=raw["moe_intermediate_size"],
        dense_sizes=tuple(raw["intermediate_size"] if is_dense else None for is_dense in dense),
        shared_size=raw["moe_intermediate_size"] * raw["n_shared_experts"],
        routing=dataclasses.replace(routing, multiplier=multiplier),
    )


def _deepseek_v2(raw: Raw) -> Config:
    if (method := raw.get("topk_method") or "greedy") not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"topk_method is {shown(method)}; expected 'greedy' or 'group_limited_greedy'.")
    grouped = method == "group_limited_greedy"
    return _latent(
        raw, "deepseek_v2", _groups(raw, "softmax") if grouped else Routing(),
        {"scoring_func": "softmax", "norm_topk_prob": False, "rope_interleave": True},
        moe_intermediate_size=1407, n_routed_experts=64, n_shared_experts=2,
    )  # fmt: skip


def _groups(raw: Raw, scores: Literal["softmax", "sigmoid"]) -> Routing:
    return Routing(scores, raw.get("n_group") or 1, raw.get("topk_group") or 1)


V3 = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def _deepseek_v3(raw: Raw) -> Config:
    groups = _groups({"n_group": 8, "topk_group": 4} | dict(raw), "sigmoid")
    return _latent(
        raw, "deepseek_v3", groups, V3, first_k_dense_replace=3, moe_intermediate_size=2048, n_routed_experts=256,
        n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8, routed_scaling_factor=2.5,
    )  # fmt: skip


def _glm4_moe_lite(raw: Raw) -> Config:
    return _latent(
        raw, "glm4_moe_lite", _groups(raw, "sigmoid"), V3, q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256,
        first_k_dense_replace=1, moe_intermediate_size=1536, n_routed_experts=64, n_shared_experts=1,
        norm_topk_prob=True, num_experts_per_tok=4, rms_norm_eps=1e-5, routed_scaling_factor=1.8,
    )  # fmt: skip


def _indexed(name: str, model: Callable[..., Config], **defaults: Any) -> Callable[[Raw], Config]:
    """Return what reads a model whose indexer chooses ``index_topk`` tokens: of no more it chooses all."""

    def read(raw: Raw) -> Config:
        most = check_count("index_topk", raw.get("index_topk") or 2048, 1, "it must be a positive integer")
        others = {field: value for field, value in raw.items() if field != "layer_types"}
        made = model({**defaults, **others})
        source = {**(made.source or {}), **raw}
        return dataclasses.replace(made, architecture=name, most_attended=most, source=source)

    return read


GLM5 = dict(
    q_lora_rank=2048, qk_nope_head_dim=192, v_head_dim=256, n_group=1, topk_group=1, rms_norm_eps=1e-5,
    max_position_embeddings=202_752,
)  # fmt: skip


DEEPSEEK_KEYS = QWEN3_MOE_KEYS | {
    "attention.key_length_mla": "qk_head_dim",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.value_length_mla": "v_head_dim",
    "expert_gating_func": "gating",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "normalised",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
    "rope.scaling.yarn_log_multiplier": "log_multiplier",
}
SOFTMAX, SIGMOID = 1, 2  # of experts' scores


def _latent_in_gguf(raw: Raw, tensors: Mapping[str, Any]) -> Raw:
    """Return the fields of DeepSeek-V2 or, with sigmoids as scores, of V3, as which GLM-4.7-Flash is read."""
    _check_in_gguf(raw, "deepseek2", QWEN3_MOE_KEYS | {"rope.dimension_count": "partial_rotary_factor"})
    rotated = raw["partial_rotary_factor"]
    biased = any(name.endswith(".exp_probs_b.bias") for name in tensors)
    gating = raw.get("gating") or (SIGMOID if biased else SOFTMAX)
    if gating not in (SOFTMAX, SIGMOID):
        raise ValueError(f"gating is {shown(gating)}; expected {SOFTMAX} (softmax) or {SIGMOID} (sigmoid).")
    groups, rope = raw.get("n_group") or 1, raw["rope_parameters"] | {"partial_rotary_factor": 1.0}
    if rope.get("rope_type") == "yarn":  # the file has a tenth of mscale_all_dim, and means the same mscale
        scale = round(10 * raw.get("log_multiplier", 0.0), 6)
        rope |= dict(mscale=scale, mscale_all_dim=scale) if scale else dict(attention_factor=1.0)
    return {
        "architectures": ["DeepseekV3ForCausalLM" if gating == SIGMOID else "DeepseekV2ForCausalLM"],
        "num_key_value_heads": raw["num_attention_heads"],
        "qk_nope_head_dim": raw.get("qk_head_dim", raw["head_dim"]) - rotated,
        "qk_rope_head_dim": rotated,
        "q_lora_rank": raw.get("q_lora_rank") or None,
        "n_routed_experts": raw["num_local_experts"],
        "n_shared_experts": raw.get("n_shared_experts", 0),
        "n_group": groups,
        "topk_group": raw.get("topk_group") or 1,
        "topk_method": "noaux_tc" if gating == SIGMOID else "group_limited_greedy" if groups > 1 else "greedy",
        "norm_topk_prob": raw.get("normalised", False),
        "routed_scaling_factor": raw.get("routed_scaling_factor") or 1.0,
        "first_k_dense_replace": raw.get("first_k_dense_replace", 0),
        "rope_parameters": rope,
    }


register_family(
    "deepseek_v2",
    _deepseek_v2,
    architecture="DeepseekV2ForCausalLM",
    gguf=Gguf("deepseek2", DEEPSEEK_KEYS, _latent_in_gguf),
)
register_family("deepseek_v3", _deepseek_v3, architecture="DeepseekV3ForCausalLM")
register_family("kimi_k2", _deepseek_v3)
register_family("glm4_moe_lite", _glm4_moe_lite, architecture="Glm4MoeLiteForCausalLM")
INDEXER_KEYS = {
    "attention.indexer.head_count": "indexer_heads",
    "attention.indexer.key_length": "indexer_size",
    "attention.indexer.top_k": "index_topk",
    "attention.indexer.types": "indexers",
}


def _register_indexed(name: str, architecture: str, stored: str, **defaults: Any) -> None:
    def fields(raw: Raw, tensors: Mapping[str, Any]) -> Raw:
        return {**_latent_in_gguf(raw, tensors), "architectures": [architecture]}

    gguf = Gguf(stored, DEEPSEEK_KEYS | INDEXER_KEYS, fields)
    register_family(name, _indexed(name, _deepseek_v3, **defaults), architecture=architecture, gguf=gguf)


_register_indexed("deepseek_v32", "DeepseekV32ForCausalLM", "deepseek32")
_register_indexed("glm_moe_dsa", "GlmMoeDsaForCausalLM", "glm-dsa", **GLM5)
