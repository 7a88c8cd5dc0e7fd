"""The shapes of models that benchmarks run with random weights; nothing is downloaded."""

from __future__ import annotations

import argparse
import math
from typing import Any

import jax

import models
from kvjax._src.checks import check_names
from models import commands
from models.config import Rope
from models.parameters import parameter_shapes


def _llama3(factor: float) -> Rope:
    return Rope(theta=500_000.0, type="llama3", factor=factor, original_positions=8192)


def _local(layers: int, value: Any) -> tuple[Any, ...]:
    """Return the value for the layers of Gemma 3 that have a window, None for each sixth."""
    return tuple(value if (layer + 1) % 6 else None for layer in range(layers))


# From published config.json files; "tiny" is for tests, "small" (100 M parameters) is for a CPU.
SHAPES: dict[str, models.Config] = {
    "llama-3.2-1b": models.Config(
        128_256, 2048, 8192, num_layers=16, num_heads=32, num_kv_heads=8, tie_embeddings=True, rope=_llama3(32),
        norm_epsilon=1e-5, max_positions=131_072,
    ),
    "llama-3.2-3b": models.Config(
        128_256, 3072, 8192, num_layers=28, num_heads=24, num_kv_heads=8, tie_embeddings=True, rope=_llama3(32),
        norm_epsilon=1e-5, max_positions=131_072,
    ),
    "llama-3.1-8b": models.Config(
        128_256, 4096, 14_336, num_layers=32, num_heads=32, num_kv_heads=8, rope=_llama3(8), norm_epsilon=1e-5,
        max_positions=131_072,
    ),
    "qwen3-8b": models.Config(
        151_936, 4096, 12_288, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, architecture="qwen3",
        rope=Rope(theta=1_000_000.0), query_key_norm=True, max_positions=40_960,
    ),
    "qwen3-30b-a3b": models.Config(
        151_936, 2048, 768, num_layers=48, num_heads=32, num_kv_heads=4, head_dim=128, architecture="qwen3_moe",
        rope=Rope(theta=1_000_000.0), query_key_norm=True, num_experts=128, experts_per_token=8, normalise_experts=True,
        max_positions=40_960,
    ),
    "qwen2.5-7b": models.Config(
        152_064, 3584, 18_944, num_layers=28, num_heads=28, num_kv_heads=4, architecture="qwen2",
        rope=Rope(theta=1_000_000.0), attention_bias=True, max_positions=131_072,
    ),
    "gemma-3-4b": models.Config(
        262_208, 2560, 10_240, num_layers=34, num_heads=8, num_kv_heads=4, head_dim=256, architecture="gemma3_text",
        rope=Rope(theta=1_000_000.0, type="linear", factor=8), query_key_norm=True, norms="both", norm_offset=True,
        activation="gelu_tanh", embedding_multiplier=2560**0.5, tie_embeddings=True, sliding_windows=_local(34, 1024),
        ropes=_local(34, Rope()), max_positions=131_072,
    ),
    "small": models.Config(
        32_000, 768, 2048, num_layers=12, num_heads=12, num_kv_heads=4, tie_embeddings=True, max_positions=131_072
    ),
    "tiny": models.Config(256, 128, 192, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, tie_embeddings=True),
}  # fmt: skip
PUBLISHED = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen3-8b")


def shape(name: str) -> models.Config:
    """Return the shape of that name; ValueError for an unknown one."""
    check_names("shape", name, SHAPES)
    return SHAPES[name]


def names_of(flags: argparse.Namespace) -> list[str]:
    """Return the shapes that a command's ``--shapes`` and ``--tiny`` ask for; by default those that suit the device."""
    if flags.tiny:
        return ["tiny"]
    asked = flags.shapes or ("small" if jax.default_backend() == "cpu" else ",".join(PUBLISHED))
    names = commands.split_list(asked)
    for name in names:
        shape(name)
    return names


def parameter_count(config: models.Config) -> int:
    """Return the number of a model's parameters."""
    return sum(math.prod(size) for size in parameter_shapes(config).values())
