"""Computes what a run that selects does: the decoder under any mask, and the rules of sources without a predictor."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from tests.models.reference.decoder import norm, softmax
from tests.models.reference.rotary import inverse_frequencies, rope


def forward(
    config: Any, weights: dict[str, np.ndarray], tokens: np.ndarray, read: Callable[..., Any]
) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Logits of one row in float64, and each layer's attention logits and mask, [N, T, T].

    ``read(layer, logits of the layers so far, query, key, visible)`` says what layers above 0 read of the visible.
    """
    w = {name: np.asarray(array, np.float64) for name, array in weights.items()}
    group, at = config.num_heads // config.num_kv_heads, np.arange(len(tokens))
    frequency, _ = inverse_frequencies(config.rope, config.head_dim, len(tokens))
    x, logits, masks = w["embedding"][tokens], [], []
    for layer in range(config.num_layers):
        p = {name.removeprefix("layers."): a[layer] for name, a in w.items() if name.startswith("layers.")}
        y = norm(x, p["attention_norm"], config.norm_epsilon)
        query, key, value = (np.einsum("te,ehd->htd", y, p[name]) for name in ("query", "key", "value"))
        query, key = (rope(z, at, frequency) for z in (query, key))
        key, value = (np.repeat(z, group, axis=0) for z in (key, value))
        logits.append(np.einsum("ntd,npd->ntp", query, key) / math.sqrt(config.head_dim))
        visible = at <= at[:, None]
        if config.sliding_windows[layer]:
            visible &= at > at[:, None] - config.sliding_windows[layer]
        visible = np.repeat(visible[None], config.num_heads, axis=0)
        masks.append(visible & read(layer, logits, query, key, visible) if layer else visible)
        attention = softmax(np.where(masks[-1], logits[-1], -np.inf))
        x = x + np.einsum("ntp,npd,nde->te", attention, value, p["output"].reshape(*value.shape[::2], -1))
        y = norm(x, p["feed_norm"], config.norm_epsilon)
        gate, up = y @ p["gate"], y @ p["up"]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ p["down"]
    return norm(x, w["norm"], config.norm_epsilon) @ w["head"], logits, masks


def by_importance(
    importance: Callable[..., np.ndarray], budget: int | float | Fraction, sinks: int, rows: range
) -> Any:
    """Return what these rows read: the best by ``importance(layer, t, query, key, logits so far)``, and sinks."""

    def read(layer: int, logits: list, query: np.ndarray, key: np.ndarray, visible: np.ndarray) -> np.ndarray:
        mask = visible.copy()
        for t in rows:
            wanted = importance(layer, t, query[:, t], key[:, : t + 1], logits)
            for n, scores in enumerate(wanted):
                tokens = np.flatnonzero(visible[n, t])
                mask[n, t] = np.isin(np.arange(visible.shape[-1]), list(best(scores, tokens, budget, sinks)))
        return mask

    return read


def best(scores: Any, tokens: Any, budget: int | float | Fraction, sinks: int) -> set[int]:
    """So many, or such a share, of the tokens: newer ones first among equals; and the first ones."""
    count = budget if isinstance(budget, int) else math.ceil(Fraction(str(budget)) * len(tokens))
    ranked = sorted(tokens, key=lambda p: (scores[p], p), reverse=True)[:count]
    return {int(p) for p in ranked} | {int(p) for p in tokens if p < sinks}


def bounds(query: np.ndarray, key: np.ndarray, size: int) -> np.ndarray:
    """Quest: a page's bound, for each of its tokens."""
    rows = np.empty(key.shape[:2])
    for start in range(0, key.shape[1], size):
        page = key[:, start : start + size]
        largest = np.maximum(query * page.min(axis=1), query * page.max(axis=1))
        rows[:, start : start + size] = largest.sum(axis=-1, keepdims=True)
    return rows


def hashes(seed: int, layer: int, t: int, heads: int) -> np.ndarray:
    def mix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
        x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
        return x ^ (x >> 16)

    return np.array(
        [[mix(seed ^ mix(layer ^ mix(head ^ mix(t ^ mix(p))))) >> 8 for p in range(t + 1)] for head in range(heads)]
    )


def largest_of_group(scores: np.ndarray, group: int = 2) -> np.ndarray:
    return np.repeat(scores.reshape(-1, group, scores.shape[-1]).max(axis=1), group, axis=0)


RULES = {
    "oracle": lambda layer, t, query, key, logits: logits[layer][:, t, : t + 1],
    "oracle(group='max')": lambda layer, t, query, key, logits: largest_of_group(logits[layer][:, t, : t + 1]),
    "quest(page_size=4)": lambda layer, t, query, key, logits: bounds(query, key, 4),
    "first_layer": lambda layer, t, query, key, logits: logits[0][:, t, : t + 1],
    "previous_layer": lambda layer, t, query, key, logits: logits[layer - 1][:, t, : t + 1],
    "random(seed=3)": lambda layer, t, query, key, logits: hashes(3, layer, t, len(query)),
    "streaming": lambda layer, t, query, key, logits: np.tile(np.arange(t + 1), (len(query), 1)),
}
