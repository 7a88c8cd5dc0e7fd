"""Rotary embeddings: what turns, and by how much."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np


def rope(x: np.ndarray, at: np.ndarray, frequency: np.ndarray) -> np.ndarray:
    """Turns the complex numbers x[i] + 1j * x[i + D/2] by position times frequency: [..., P, D], [..., P]."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * at[..., None] * frequency)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def inverse_frequencies(rope: Any, D: int, length: int) -> tuple[np.ndarray, Any]:
    """The angle per position of each pair, 1 / theta^(2i/D) where nothing is stretched, and the factor on both.

    Where only a part of the elements is rotated, the pairs of the others have the angle 0.
    """
    if rope.partial_rotary_factor != 1:
        part = round(D * rope.partial_rotary_factor)
        turned, factor = inverse_frequencies(dataclasses.replace(rope, partial_rotary_factor=1.0), part, length)
        rest = np.zeros((D - part) // 2)
        half = np.concatenate([np.full(part // 2, factor), rest + 1])
        return np.concatenate([turned, rest]), np.concatenate([half, half])
    theta = rope.theta
    if rope.type == "dynamic" and length > rope.original_positions:  # longer than the model was trained for
        theta *= (rope.factor * length / rope.original_positions - (rope.factor - 1)) ** (D / (D - 2))
    plain = theta ** (-np.arange(0, D, 2) / D)
    if rope.type == "linear":
        return plain / rope.factor, 1.0
    if rope.type == "llama3":  # long waves are stretched, short ones are not, those between in part
        turns = rope.original_positions * plain / (2 * math.pi)
        part = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
        return part * plain + (1 - part) * plain / rope.factor, 1.0
    if rope.type == "yarn":
        return _yarn(rope, D, plain)
    if rope.type == "longrope":
        factors = rope.long_factor if length > rope.original_positions else rope.short_factor
        amplitude = rope.attention_factor
        if amplitude is None:
            amplitude = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_positions))
        return plain / np.array(factors), amplitude
    assert rope.type in ("default", "dynamic"), rope.type
    return plain, 1.0


def _yarn(rope: Any, D: int, plain: np.ndarray) -> tuple[np.ndarray, float]:
    """YaRN (arXiv 2309.00071), as transformers has it: pairs between two numbers of rotations are stretched in part."""
    first, last = (
        D * math.log(rope.original_positions / (beta * 2 * math.pi)) / (2 * math.log(rope.theta))
        for beta in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, D - 1)
    part = np.clip((np.arange(D // 2) - first) / (last - first if last != first else 0.001), 0, 1)

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0

    amplitude = rope.attention_factor
    if amplitude is None:
        both = rope.mscale and rope.mscale_all_dim
        amplitude = scale(rope.mscale) / scale(rope.mscale_all_dim) if both else scale(1)
    return part * plain / rope.factor + (1 - part) * plain, amplitude
