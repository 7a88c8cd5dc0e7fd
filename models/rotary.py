"""Frequencies of rotary embeddings, by their types in transformers: how far each pair of elements turns per token."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.config import Rope


def rope_frequencies(
    rope: Rope, head_dim: int, lengths: Int[Array, "B"] | None = None
) -> tuple[Float[Array, "rows half"], float]:
    """Return the angle per position for each pair of a head's elements, and the factor on cos and sin.

    Args:
        lengths: the sequences' full lengths, read by "dynamic" and "longrope" only.

    Returns:
        Frequencies with one row for all sequences (for "dynamic" and "longrope", one per sequence), and the amplitude
        (1 except for yarn and longrope). Elements that are not rotated have frequency 0.
    """
    plain = 1.0 / rope.theta ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if rope.type == "proportional":
        return jnp.where(jnp.arange(head_dim // 2) < rope.rotated(head_dim) // 2, plain, 0)[None], 1.0
    if rope.partial_rotary_factor != 1:
        whole, rotated = dataclasses.replace(rope, partial_rotary_factor=1.0), rope.rotated(head_dim)
        found, amplitude = rope_frequencies(whole, rotated, lengths) if rotated else (jnp.zeros((1, 0)), 1.0)
        return jnp.pad(found, ((0, 0), (0, (head_dim - rotated) // 2))), amplitude
    if rope.type not in _FREQUENCIES:
        return plain[None], 1.0
    return _FREQUENCIES[rope.type](rope, plain, jnp.zeros(1, jnp.int32) if lengths is None else lengths)


def _linear(rope: Rope, plain: Float[Array, "half"], lengths: Int[Array, "rows"]) -> tuple[Array, float]:
    return plain[None] / rope.factor, 1.0


def _dynamic(rope: Rope, plain: Float[Array, "half"], lengths: Int[Array, "rows"]) -> tuple[Array, float]:
    length = jnp.maximum(lengths, rope.original_positions).astype(jnp.float32)
    growth = rope.factor * length / rope.original_positions - (rope.factor - 1)
    head_dim = 2 * len(plain)
    base = rope.theta * growth ** (head_dim / (head_dim - 2))
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    return 1.0 / base[:, None] ** exponent[None], 1.0


def _llama3(rope: Rope, plain: Float[Array, "half"], lengths: Int[Array, "rows"]) -> tuple[Array, float]:
    wavelength = 2 * math.pi / plain
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = jnp.clip((rope.original_positions / wavelength - low) / (high - low), 0, 1)
    return (plain * (smooth + (1 - smooth) / rope.factor))[None], 1.0


def _longrope(rope: Rope, plain: Float[Array, "half"], lengths: Int[Array, "rows"]) -> tuple[Array, float]:
    longer = lengths > rope.original_positions
    factors = jnp.where(longer[:, None], jnp.array(rope.long_factor), jnp.array(rope.short_factor))
    return plain / factors, _longrope_amplitude(rope)


def _yarn(rope: Rope, plain: Float[Array, "half"], lengths: Int[Array, "rows"]) -> tuple[Array, float]:
    head_dim = 2 * len(plain)

    def dimension_of(rotations: float) -> float:
        turns = rope.original_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretched = jnp.clip((jnp.arange(head_dim // 2, dtype=jnp.float32) - low) / (high - low), 0, 1)
    return (plain * (1 - stretched) + plain / rope.factor * stretched)[None], _yarn_amplitude(rope)


def yarn_scale(rope: Rope, weight: float) -> float:
    """Return YaRN's factor for a context that is ``rope.factor`` times as long."""
    return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0


def _yarn_amplitude(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_scale(rope, rope.mscale) / yarn_scale(rope, rope.mscale_all_dim)
    return yarn_scale(rope, 1.0)


def _longrope_amplitude(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_positions))


_FREQUENCIES = dict(linear=_linear, dynamic=_dynamic, llama3=_llama3, longrope=_longrope, yarn=_yarn)
