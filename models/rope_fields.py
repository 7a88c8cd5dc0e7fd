"""The rotary embedding in a config.json: read as a :class:`models.config.Rope`, and written as a Llama's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, get_type_hints

from kvjax._src.checks import check_types
from models.config import ROPE_TYPES, Rope

Raw = Mapping[str, Any]


class RopeFields(TypedDict, total=False):
    """The fields read from a ``rope_scaling`` or ``rope_parameters``."""

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
    llama_4_scaling_beta: float | None


def positive(name: str, value: float | None, default: float = 1.0) -> float:
    """Return the field's value, or the default for None. Raise ValueError for a value that is not above 0."""
    if value is not None and value <= 0:
        raise ValueError(f"{name} is {value!r}; it must be a number above 0.")
    return float(default if value is None else value)


def positions_of(raw: Raw) -> int:
    return raw.get("max_position_embeddings") or 2048


def reached_by(rope: Rope, positions: int) -> int:
    """Return how many positions a model has: with YaRN its original ones, multiplied (Qwen's configs name these)."""
    return max(positions, int(rope.original_positions * rope.factor)) if rope.type == "yarn" else positions


def read_rope(raw: Raw, names: Mapping[str, str] = {}, partial: bool = False) -> Rope:
    """Read a rotary embedding; ``names`` are other names of its types, ``partial`` allows heads rotated in part."""
    max_positions = positions_of(raw)
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ValueError("rope_parameters (or rope_scaling) must be one object of numbers, the same for all layers.")
    check_types(parameters, get_type_hints(RopeFields), "rope")

    def either(name: str) -> Any:
        return raw.get(name) if parameters.get(name) is None else parameters[name]

    rotated = either("partial_rotary_factor")
    if rotated not in (None, 1) and not partial:
        raise ValueError(f"partial_rotary_factor is {rotated}; only 1 is supported for this family.")
    type_ = parameters.get("rope_type") or parameters.get("type") or "default"
    type_ = names.get(type_, type_)
    if type_ not in ROPE_TYPES:
        raise ValueError(f"rope type {type_!r} is not supported; supported are {', '.join(ROPE_TYPES)}.")
    if type_ not in ("default", "yarn", "longrope") and "factor" not in parameters:
        raise ValueError(f"rope type {type_!r} needs a 'factor' in rope_scaling (or rope_parameters); it is missing.")
    original = max_positions if type_ == "dynamic" else either("original_max_position_embeddings")
    original = positive("original_max_position_embeddings", original, max_positions)
    factor, amplitude = parameters.get("factor"), parameters.get("attention_factor")
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
        attention_factor=None if amplitude is None else positive("attention_factor", amplitude),
        mscale=parameters.get("mscale"),
        mscale_all_dim=parameters.get("mscale_all_dim"),
        truncate=bool(parameters.get("truncate", True)),
        partial_rotary_factor=positive("partial_rotary_factor", rotated),
        short_factor=parameters.get("short_factor") or (),
        long_factor=parameters.get("long_factor") or (),
    )


def rope_written(rope: Rope) -> dict[str, Any]:
    """Return the fields of a Llama's config.json that hold the rotary embedding; it has no longrope."""
    if rope.type in ("default", "longrope"):
        return {"rope_theta": rope.theta}
    scaling: dict[str, Any] = {"rope_type": rope.type, "factor": rope.factor}
    if rope.original_positions and rope.type != "dynamic":
        scaling["original_max_position_embeddings"] = rope.original_positions
    own = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    }.get(rope.type, ())
    scaling |= {name: getattr(rope, name) for name in own if getattr(rope, name) is not None}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}
