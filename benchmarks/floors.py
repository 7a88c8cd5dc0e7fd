"""Counted floors: the bytes that must be read and the products that must be computed, each by a formula.

A floor counts what every implementation needs: keys, values and weights. Positions (4 bytes per slot), scores and
outputs are left out; they are at most 1% of it. ``width`` is the bytes per number.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from models.config import Config
from models.parameters import parameter_shapes


class Parts(NamedTuple):
    """The parts of a decoder: embedding, last norm and head in ``rest``, and one ``layer``."""

    rest: int
    layer: int


def caote_topk(B: int, K: int, S: int, D: int, width: int, *, fast: bool = False) -> int:
    """Return the bytes of V: read twice for CAOTE, whose |X - v| needs X first; once for FastCAOTE, with norms kept."""
    return (1 if fast else 2) * B * K * S * D * width


def keep_topk(B: int, K: int, S: int) -> int:
    """Return the bytes of a selection's scores and positions, read once, and of the positions that it writes."""
    return 3 * 4 * B * K * S


def keys_and_values(slots: int, D: int, width: int) -> int:
    """Return the bytes of K and V: of a cache's B K S slots, of the slots of the live pages, or of the chosen slots."""
    return 2 * slots * D * width


def attention_flops(B: int, T: int, N: int, S: int, D: int, *, statistics: bool = False) -> int:
    """Return the FLOPs of the products of all queries with all slots: of logits, and of weights with values.

    Statistics that all queries enter need the logits twice: a weight is known when its query's whole sum is, and to
    keep the logits until then would move 8 bytes each, which takes longer.
    """
    return (6 if statistics else 4) * B * T * N * S * D


def mse_bytes(B: int, T: int, N: int, K: int, D: int, F: int, width: int) -> int:
    """Return the bytes of reading the model's and the predictor's queries and keys once, and writing two gradients."""
    return B * T * ((N + K) * D + 4 * N * F) * width


def weight_numbers(config: Config) -> Parts:
    """Return the number of weights that a step reads: all but the embedding's table where it is untied."""
    sizes = {name: math.prod(size) for name, size in parameter_shapes(config).items()}
    layers = sum(count for name, count in sizes.items() if name.startswith("layers."))
    head = sizes["embedding"] if config.tie_embeddings else sizes["head"]
    return Parts(head + sizes["norm"], layers // config.num_layers)


def step_bytes(config: Config, batch: int, tokens: int, width: int) -> tuple[int, int]:
    """Return a step's bytes of weights, and of keys and values, with ``tokens`` cached tokens per head."""
    rest, layer = weight_numbers(config)
    cache = keys_and_values(batch * config.num_kv_heads * tokens, config.head_dim, width)
    return (rest + config.num_layers * layer) * width, config.num_layers * cache


def product_flops(config: Config, tokens: int, slots: int, outputs: int) -> Parts:
    """Return the FLOPs, 2 m n k per product, of ``tokens`` queries over ``slots``, with ``outputs`` tokens' logits."""
    E, N, K, D = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    weights = 2 * E * N * D + 2 * E * K * D + 3 * E * config.intermediate_size
    return Parts(2 * outputs * E * config.vocab_size, 2 * tokens * weights + attention_flops(1, tokens, N, slots, D))


def step_flops(config: Config, batch: int, tokens: int, slots: int) -> int:
    """Return the FLOPs of a block of ``tokens`` per row, with logits for each row's last token.

    Example:
        >>> import models
        >>> from benchmarks import floors
        >>> config = models.Config(10, 4, 8, num_layers=2, num_heads=2, num_kv_heads=1)
        >>> floors.step_flops(config, 3, 1, 3) == 3 * (80 + 2 * 336)
        True
    """
    rest, layer = product_flops(config, tokens, slots, 1)
    return batch * (rest + config.num_layers * layer)
