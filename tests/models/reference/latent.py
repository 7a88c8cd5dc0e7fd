"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), absorbed and as the paper writes it.

``project`` and ``output`` are what a cache of latents sees; ``logits`` makes keys and values of every head, and knows
no cache but a mask of who sees what.
"""

from __future__ import annotations

from typing import Any

import numpy as np

EPSILON = 1e-6


def _norm(x: np.ndarray, weight: np.ndarray, epsilon: float = EPSILON) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * weight


def _parts(own: Any, p: dict[str, np.ndarray], y: np.ndarray) -> tuple[np.ndarray, ...]:
    """Each head's plain and rotated query [N, T, ..], the latent [T, C] and the key beside it [T, R], not rotated."""
    if own.query:
        small = _norm(y @ p["query_down"] + p.get("query_down_bias", 0), p["query_down_norm"])
        query = np.einsum("tq,qnh->nth", small, p["query_up"])
    else:
        query = np.einsum("te,enh->nth", y, p["latent_query"])
    made = y @ p["latent"] + p.get("latent_bias", 0)
    latent, beside = _norm(made[:, : own.size], p["latent_norm"]), made[:, own.size :]
    return query[..., : own.plain], query[..., own.plain :], latent, beside


def _pairs(own: Any, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two elements of each rotated pair: neighbours, or half of the part apart."""
    return (x[..., ::2], x[..., 1::2]) if own.neighbours else tuple(np.split(x, 2, axis=-1))


def _placed(first: np.ndarray, second: np.ndarray, latent: np.ndarray) -> np.ndarray:
    """The numbers of a head as the decoder lays them out, so that element i is rotated with element i + D / 2."""
    half = latent.shape[-1] // 2
    return np.concatenate([first, latent[..., :half], second, latent[..., half:]], axis=-1)


def project(config: Any, p: dict[str, np.ndarray], y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Absorbed queries [N, T, D], and the key and the value [1, T, D] of all heads, before rotation."""
    own = config.latent
    plain, turned, latent, beside = _parts(own, p, y)
    absorbed = np.einsum("ntp,cnp->ntc", plain, p["latent_heads"][..., : own.plain])
    query = _placed(*_pairs(own, turned), absorbed)
    key = _placed(*_pairs(own, beside), latent)[None]
    nothing = np.zeros((len(y), own.rotated // 2))
    return query, key, _placed(nothing, nothing, latent)[None]


def value(config: Any, key: np.ndarray) -> np.ndarray:
    """The latent's part of a stored key, with 0 for the rotated part."""
    half = np.arange(key.shape[-1]) % (key.shape[-1] // 2)
    return np.where(half < config.latent.rotated // 2, 0, key)


def output(config: Any, parameters: dict[str, np.ndarray]) -> np.ndarray:
    """Return what stands behind the latents: W_UV W_O of each head, [L, N, D, E]."""
    own, found = config.latent, []
    for heads, whole in zip(parameters["layers.latent_heads"], parameters["layers.output"], strict=True):
        of_head = whole.reshape(config.num_heads, own.value, -1)
        behind = np.einsum("cnw,nwe->nec", heads[..., own.plain :], of_head)
        nothing = np.zeros((*behind.shape[:2], own.rotated // 2))
        found.append(_placed(nothing, nothing, behind).swapaxes(1, 2))
    return np.stack(found)


def logits(parameters: dict[str, np.ndarray], config: Any, tokens: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """A dense model without absorption, in float64; ``seen`` [L, 1, T, T] says which query sees which token."""
    w = {name: np.asarray(array, np.float64) for name, array in parameters.items()}
    own, at, x = config.latent, np.arange(len(tokens)), w["embedding"][tokens]
    frequency = config.rope.theta ** (-np.arange(0, own.rotated, 2) / own.rotated)
    turn = np.exp(1j * at[:, None] * frequency)

    def turned(x: np.ndarray) -> np.ndarray:
        first, second = _pairs(own, x)
        return (first + 1j * second) * turn

    for layer in range(config.num_layers):
        p = {name.removeprefix("layers."): a[layer] for name, a in w.items() if name.startswith("layers.")}
        plain, own_turned, latent, beside = _parts(own, p, _norm(x, p["attention_norm"], config.norm_epsilon))
        of_heads = np.einsum("tc,cnu->ntu", latent, p["latent_heads"])
        key, value = of_heads[..., : own.plain], of_heads[..., own.plain :]
        scores = np.einsum("ntp,nsp->nts", plain, key)
        scores += np.einsum("ntr,sr->nts", turned(own_turned), turned(beside).conj()).real
        scores = np.where(seen[layer], scores * config.attention_multiplier, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out = np.einsum("nts,nsw->tnw", weights, value).reshape(len(tokens), -1)
        x = x + out @ p["output"]
        y = _norm(x, p["feed_norm"], config.norm_epsilon)
        gate = y @ p["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ p["up"])) @ p["down"]
    return _norm(x, w["norm"], config.norm_epsilon) @ w["head"]
