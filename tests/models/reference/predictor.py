"""TokenButler's predictor (arXiv 2503.07518, section 3.1) of one sequence, in NumPy float64."""

from __future__ import annotations

import math

import numpy as np

from tests.models.reference.rotary import rope


def predicted(w: dict[str, np.ndarray], theta: float, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Queries q' and keys k', [L', N, T, D'], of a sequence [T, E]; ``w`` are the parameters by name."""

    def turned(x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        return rope(x, np.arange(x.shape[-2]), theta ** (-np.arange(half) / half))

    reduced = x @ w["reduce"]
    query, key, value = (np.einsum("tr,rnd->ntd", reduced, w[name]) for name in ("query", "key", "value"))
    logits = np.einsum("nid,njd->nij", turned(query), turned(key)) / math.sqrt(query.shape[-1])
    logits = np.where(np.tri(len(x)) > 0, logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    attended = np.einsum("nij,njd->ind", weights / weights.sum(-1, keepdims=True), value).reshape(len(x), -1)
    normed = (attended - attended.mean(-1, keepdims=True)) / np.sqrt(attended.var(-1, keepdims=True) + 1e-5)
    up = (normed * w["norm"] + w["norm_bias"]) @ w["up"] + w["up_bias"]
    x = x + up * (1 + np.vectorize(math.erf)(up / math.sqrt(2))) / 2 @ w["down"] + w["down_bias"]
    query, key = (x @ w[side] for side in ("query_in", "key_in"))
    query, key = (
        np.einsum("th,hlnd->lntd", hidden / (1 + np.exp(-hidden)), w[out])
        for hidden, out in ((query, "query_out"), (key, "key_out"))
    )
    return turned(query), turned(key)
