"""The shape of a decoder: one frozen dataclass, read from and written as a Hugging Face config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, get_type_hints

from kvjax.checks import check_count, check_fields, check_types

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
MOST, MOST_LAYERS = 2**31 - 1, 10_000  # MOST: the largest int32
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding: its base and, where the context was extended, its scaling (the names are Hugging Face's).

    ``original_positions`` is the context length that the model was trained with before the extension (llama3, yarn);
    for ``dynamic`` it is the length beyond which the base grows.
    """

    theta: float = 10_000.0
    type: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a Llama-like decoder. Axes: L layers, N query heads, K KV heads, D head dim, E model dim.

    Args:
        architecture: "llama", "mistral", "qwen2" or "qwen3".
        sliding_windows: one entry per layer: the number of positions that it sees, or None for all. () means None for
            every layer.
        attention_bias: whether the query, key and value projections have biases.
        output_bias: whether the attention's output projection has a bias.
        query_key_norm: whether each head's query and key go through an RMS norm before rotation (Qwen3).
        bos, eos, pad: token ids; ``eos`` may hold several.

    Example:
        >>> from models.config import Config
        >>> Config(64, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2).head_dim
        8
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 0
    architecture: str = "llama"
    rope: Rope = Rope()
    norm_epsilon: float = 1e-6
    max_positions: int = 2048
    tie_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    query_key_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in (
            "num_layers",
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "head_dim",
            "max_positions",
        ):
            check_size(name, getattr(self, name))
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads"):
            check_count(name, getattr(self, name), 1, "give a positive integer")
        check_count("num_layers", self.num_layers, 0, "give an integer from 0")  # 0: only what lies outside the layers
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.num_layers)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly: "
                "num_attention_heads must be a multiple of num_key_value_heads."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embedding needs an even head_dim.")
        if len(self.sliding_windows) != self.num_layers:
            raise ValueError(
                f"{len(self.sliding_windows)} sliding windows were given for {self.num_layers} layers; give one each."
            )


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
    low_freq_factor: float | None
    high_freq_factor: float | None
    beta_fast: float | None
    beta_slow: float | None
    attention_factor: float | None
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool | None


def from_hugging_face(raw: Mapping[str, Any]) -> Config:
    """Read a config.json of either transformers generation (``rope_theta``/``rope_scaling`` or ``rope_parameters``).

    Raises:
        ValueError: the architecture, activation or rope type is not supported, or a field is missing.

    Example:
        >>> from models.config import from_hugging_face
        >>> raw = dict(architectures=["LlamaForCausalLM"], vocab_size=8, hidden_size=16, intermediate_size=32,
        ...            num_hidden_layers=1, num_attention_heads=2)
        >>> from_hugging_face(raw).num_kv_heads
        2
    """
    fields = get_type_hints(_Fields)
    names = check_types({"architectures": raw.get("architectures")}, fields)["architectures"] or ["(none)"]
    if names[0] not in ARCHITECTURES:
        raise ValueError(f"architecture {names[0]} is not supported; supported are {', '.join(ARCHITECTURES)}.")
    architecture = ARCHITECTURES[names[0]]
    check_types(raw, fields)
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [name for name in required if raw.get(name) is None]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)} (an integer each); is it a causal language model's?")
    for name in (*required, "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window"):
        if raw.get(name) is not None:
            check_count(name, raw[name], 1, "it must be a positive integer")
            check_size(name, raw[name])
    if raw.get("quantization_config"):
        raise ValueError("quantization_config is set; quantised weights are not supported, load the original ones.")
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act is {activation!r}; only 'silu' is supported.")
    if raw.get("mlp_bias"):
        raise ValueError("mlp_bias is true; feed-forward layers with biases are not supported.")
    heads, layers = raw["num_attention_heads"], raw["num_hidden_layers"]
    max_positions = raw.get("max_position_embeddings") or 2048
    bias = architecture in ("llama", "qwen3") and bool(raw.get("attention_bias", False))
    eos = raw.get("eos_token_id")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        given = raw.get(name)
        ids = given if isinstance(given, list) else [given]
        if any(isinstance(token, int) and abs(token) > MOST for token in ids):
            raise ValueError(f"{name} is beyond {MOST:,}, the largest token id; is the file damaged?")
    default_head_dim = 128 if architecture == "qwen3" else raw["hidden_size"] // heads
    return Config(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or default_head_dim,
        rope=_rope(raw, max_positions),
        norm_epsilon=_positive("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
        max_positions=max_positions,
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=architecture == "qwen2" or bias,
        output_bias=bias,
        query_key_norm=architecture == "qwen3",
        sliding_windows=_sliding_windows(raw, architecture, layers),
        bos=raw.get("bos_token_id"),
        eos=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
        pad=raw.get("pad_token_id"),
    )


def to_hugging_face(config: Config) -> dict[str, Any]:
    """Return the config.json of ``config``, in the form that every transformers release since 4.43 reads."""
    names = {ours: theirs for theirs, ours in ARCHITECTURES.items()}
    raw: dict[str, Any] = {
        "architectures": [names[config.architecture]],
        "model_type": config.architecture,
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
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.output_bias,
        "rope_theta": config.rope.theta,
        "bos_token_id": config.bos,
        "eos_token_id": config.eos[0] if len(config.eos) == 1 else (list(config.eos) or None),
        "pad_token_id": config.pad,
        "torch_dtype": "float32",
    }
    if config.rope.type != "default":
        rope = {"rope_type": config.rope.type, "factor": config.rope.factor}
        if config.rope.original_positions and config.rope.type != "dynamic":
            rope["original_max_position_embeddings"] = config.rope.original_positions
        if config.rope.type == "llama3":
            rope |= {"low_freq_factor": config.rope.low_freq_factor, "high_freq_factor": config.rope.high_freq_factor}
        if config.rope.type == "yarn":
            names_ = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
            rope |= {name: getattr(config.rope, name) for name in names_ if getattr(config.rope, name) is not None}
        raw["rope_scaling"] = rope
    windows = {window for window in config.sliding_windows if window is not None}
    if len(windows) > 1:
        raise ValueError(f"a config.json holds one sliding window size, but this model has {sorted(windows)}.")
    if config.architecture == "mistral":
        raw["sliding_window"] = windows.pop() if windows else None
    elif windows:
        raw["use_sliding_window"], raw["sliding_window"] = True, windows.pop()
        raw["layer_types"] = ["sliding_attention" if window else "full_attention" for window in config.sliding_windows]
        raw["max_window_layers"] = sum(window is None for window in config.sliding_windows)
    return raw


def _rope(raw: Mapping[str, Any], max_positions: int) -> Rope:
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ValueError("rope_parameters (or rope_scaling) must be one object of numbers, the same for all layers.")
    check_types(parameters, get_type_hints(_RopeFields), "rope")

    def either(name: str) -> Any:
        return raw.get(name) if parameters.get(name) is None else parameters[name]

    rotated = either("partial_rotary_factor")
    if rotated not in (None, 1):
        raise ValueError(f"partial_rotary_factor is {rotated}; only 1 is supported (heads that are rotated whole).")
    type_ = parameters.get("rope_type") or parameters.get("type") or "default"
    if type_ not in ROPE_TYPES:
        raise ValueError(f"rope type {type_!r} is not supported; supported are {', '.join(ROPE_TYPES)}.")
    if type_ != "default" and "factor" not in parameters and type_ != "yarn":
        raise ValueError(f"rope type {type_!r} needs a 'factor' in rope_scaling (or rope_parameters); it is missing.")
    original = max_positions if type_ == "dynamic" else either("original_max_position_embeddings")
    original = _positive("original_max_position_embeddings", original, max_positions)
    factor = parameters.get("factor")
    if factor is None and type_ == "yarn":
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
    )


def _positive(name: str, value: float | None, default: float = 1.0) -> float:
    """Return the field's value, or the default for None. Raise ValueError for a value that is not above 0."""
    if value is not None and value <= 0:
        raise ValueError(f"{name} is {value!r}; it must be a number above 0.")
    return float(default if value is None else value)


def check_size(name: str, value: int) -> None:
    """Check that a size is one that a model can have, before anything of that size is made.

    Raises:
        ValueError: more than 10,000 layers, or another size beyond the range of int32.

    Example:
        >>> from models.config import check_size
        >>> check_size("num_hidden_layers", 500_000_000)
        Traceback (most recent call last):
        ...
        ValueError: num_hidden_layers is beyond 10,000, the most that is supported; is the file damaged?
    """
    most = MOST_LAYERS if name in ("num_layers", "num_hidden_layers") else MOST
    if isinstance(value, int) and value > most:
        raise ValueError(f"{name} is beyond {most:,}, the most that is supported; is the file damaged?")


def _sliding_windows(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window", 4096)  # transformers' default
    if architecture == "llama" or window is None:
        return (None,) * layers
    if architecture == "mistral":
        return (window,) * layers
    if not raw.get("use_sliding_window", False):
        return (None,) * layers
    types = raw.get("layer_types")
    if types is None:
        full_layers = raw.get("max_window_layers", 28)
        check_count("max_window_layers", full_layers, 0, "it must be a number of layers")
        types = ["full_attention" if layer < full_layers else "sliding_attention" for layer in range(layers)]
    return tuple(window if type_ == "sliding_attention" else None for type_ in types)
