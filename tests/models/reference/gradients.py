"""The derivative of a loss of a block with respect to each layer's attention output, by hand, in NumPy float64.

Each function computes a part of a layer again, and returns it with a function that takes the derivative with respect to
the part's output, and returns that with respect to its input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.models.reference.rotary import rope

Back = Callable[[np.ndarray], np.ndarray]


def of_loss(model: Any, tokens: list[int], loss: str, part: int) -> np.ndarray:
    """[L, m, E]: of the block of m ``tokens`` that ``model`` was fed last; ``part`` counts those that are predicted.

    ``loss`` is the sum of the squared hidden states, "hidden", or the cross-entropy of the last ``part`` "tokens".
    """
    x = model.inputs[-1]
    d = 2 * x if loss == "hidden" else _of_cross_entropy(model, x, tokens, part)
    result = []
    for layer in reversed(range(model.config.num_layers)):
        own, d = _of_layer(model, layer, model.inputs[layer], d)
        result.append(own)
    return np.stack(result[::-1])


def _of_cross_entropy(model: Any, x: np.ndarray, tokens: list[int], part: int) -> np.ndarray:
    config, w = model.config, model.w
    y, back = _normed(model, x, w["norm"])
    head = w["head"] if "head" in w else w["embedding"].T
    logits, uncapped = _capped(y @ head / config.logits_scaling, config.logits_soft_cap)
    odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
    d = odds / odds.sum(axis=-1, keepdims=True)
    d[np.arange(len(x) - 1), tokens[1:]] -= 1
    d[: max(len(x) - 1 - part, 0)] = d[-1] = 0  # the last token predicts what is not there
    return back(uncapped(d) @ head.T / config.logits_scaling)


def _of_layer(model: Any, layer: int, x: np.ndarray, d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The derivatives with respect to the layer's attention output and to its input."""
    config, p, factor = model.config, model.of_layer(layer), model.config.residual_multiplier
    after, around = config.norms == "after", config.norms != "before"
    y, of_input = (x, _same) if after else _normed(model, x, p["attention_norm"])
    out, of_attention = _attention(model, layer, p, y)
    normed, of_post = _normed(model, out, p["attention_post_norm"]) if around else (out, _same)
    middle = x + factor * normed
    y, of_norm = (middle, _same) if after else _normed(model, middle, p["feed_norm"])
    fed, of_feed = _experts(model, layer, p, y) if "router" in p else _gated(model, y, p["gate"], p["up"], p["down"])
    of_fed = _normed(model, fed, p["feed_post_norm"])[1] if around else _same
    d = d + of_norm(of_feed(of_fed(factor * d)))
    own = of_post(factor * d)
    return own, d + of_input(of_attention(own))


def _attention(model: Any, layer: int, p: dict[str, np.ndarray], y: np.ndarray) -> tuple[np.ndarray, Back]:
    """A block's attention, whose weights, keys and values the model still has."""
    config, m, P, D = model.config, len(y), model.length, model.config.head_dim
    at, K = np.arange(P - m, P), model.kept.shape[1]
    weights, key, value = model.weights[layer], model.key[layer][:, :P], model.value[layer][:, :P]
    turns = at[None].repeat(config.num_heads, axis=0)
    frequency, amplitude = model.frequency[layer], model.amplitude[layer]
    plain, backs = {}, {}
    for name in ("query", "key"):
        z = np.einsum("te,ehd->htd", y, p[name])
        back: list[Back] = []
        if config.attention_bias:
            z = z + p[f"{name}_bias"][:, None]
        if config.query_key_norm:
            z, of_norm = _normed(model, z, p[f"{name}_norm"])
            back.append(of_norm)
        if config.wide_query_key_norm:
            z, of_norm = _normed(model, z, p[f"wide_{name}_norm"][:, None], axis=(0, 2))
            back.append(of_norm)
        plain[name], backs[name] = z, back
    scale = 1.0 if config.attention_multiplier is None else config.attention_multiplier * math.sqrt(D)
    query = rope(plain["query"] * scale * amplitude, turns, frequency).reshape(K, -1, m, D)
    logits = np.einsum("kgtd,kpd->kgtp", query, key) / math.sqrt(D)
    _, uncapped = _capped(logits, config.attention_soft_cap)
    out = np.einsum("kgtp,kpd->kgtd", weights, value).reshape(-1, m, D)
    out = np.einsum("htd,hde->te", out, p["output"])
    if config.output_bias:
        out = out + p["output_bias"]

    def of_heads(d: np.ndarray, name: str, factor: Any) -> np.ndarray:
        """From rotated queries or keys, [heads, m, D], to the layer's attention input."""
        heads = plain[name].shape[0]
        d = rope(d, -turns[: len(d)], frequency) * factor
        d = d.reshape(heads, -1, m, D).sum(axis=1)
        for back in reversed(backs[name]):
            d = back(d)
        return np.einsum("htd,ehd->te", d, p[name])

    def back(d: np.ndarray) -> np.ndarray:
        d = np.einsum("te,hde->htd", d, p["output"]).reshape(K, -1, m, D)
        of_weights = np.einsum("kgtd,kpd->kgtp", d, value)
        of_logits = weights * (of_weights - (weights * of_weights).sum(axis=-1, keepdims=True))
        of_logits = uncapped(of_logits) / math.sqrt(D)
        of_query = np.einsum("kgtp,kpd->kgtd", of_logits, key).reshape(-1, m, D)
        of_key = np.einsum("kgtp,kgtd->kpd", of_logits, query)[:, at]
        of_value = np.einsum("kgtp,kgtd->kpd", weights, d)[:, at]
        given = of_value.reshape(p["value"].shape[1], -1, m, D).sum(axis=1)
        total = of_heads(of_query, "query", scale * amplitude) + of_heads(of_key, "key", amplitude)
        return total + np.einsum("htd,ehd->te", given, p["value"])

    return out, back


def _gated(model: Any, x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> tuple[np.ndarray, Back]:
    a, b = x @ gate, x @ up
    if model.config.activation == "silu":
        s = 1 / (1 + np.exp(-a))
        act, slope = a * s, s * (1 + a * (1 - s))
    else:
        inner = math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)
        t = np.tanh(inner)
        act = 0.5 * a * (1 + t)
        slope = 0.5 * (1 + t) + 0.5 * a * (1 - t**2) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * a**2)

    def back(d: np.ndarray) -> np.ndarray:
        d = d @ down.T
        return (d * b * slope) @ gate.T + (d * act) @ up.T

    return (act * b) @ down, back


def _experts(model: Any, layer: int, p: dict[str, np.ndarray], x: np.ndarray) -> tuple[np.ndarray, Back]:
    """The experts that the router chose for each token: their choice has no derivative, their shares have one."""
    logits = x @ p["router"]
    share = np.exp(logits - logits.max(axis=-1, keepdims=True))
    share = share / share.sum(axis=-1, keepdims=True)
    result, backs = np.zeros(x.shape), []
    for t, chosen in enumerate(model.routed[layer]):
        names = ("expert_gate", "expert_up", "expert_down")
        parts = [_gated(model, x[t], *(p[name][e] for name in names)) for e in chosen]
        total = share[t, chosen].sum() if model.config.normalise_experts else 1.0
        result[t] = sum(share[t, e] / total * out for e, (out, _) in zip(chosen, parts, strict=True))
        backs.append((chosen, parts, total))

    def back(d: np.ndarray) -> np.ndarray:
        result = np.zeros(x.shape)
        for t, (chosen, parts, total) in enumerate(backs):
            of_share = np.zeros(share.shape[1])
            for e, (out, of_out) in zip(chosen, parts, strict=True):
                result[t] += of_out(share[t, e] / total * d[t])
                of_share[e] = d[t] @ out / total
            if model.config.normalise_experts:
                of_share[chosen] -= (of_share * share[t]).sum() / total
            result[t] += share[t] * (of_share - (of_share * share[t]).sum()) @ p["router"].T
        return result

    return result, back


def _normed(model: Any, x: np.ndarray, weight: np.ndarray, axis: Any = -1) -> tuple[np.ndarray, Back]:
    weight = model.config.norm_offset + weight
    root = 1 / np.sqrt((x**2).mean(axis=axis, keepdims=True) + model.config.norm_epsilon)

    def back(d: np.ndarray) -> np.ndarray:
        d = d * weight
        return root * d - x * root**3 * (x * d).mean(axis=axis, keepdims=True)

    return x * root * weight, back


def _capped(x: np.ndarray, cap: float | None) -> tuple[np.ndarray, Back]:
    if cap is None:
        return x, _same
    bent = np.tanh(x / cap)
    return cap * bent, lambda d: d * (1 - bent**2)


def _same(d: np.ndarray) -> np.ndarray:
    return d
