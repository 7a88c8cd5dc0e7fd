"""The definitions in plain NumPy float64, one head at a time, as far from the implementation as they can be."""

from fractions import Fraction

import numpy as np


def length(x: np.ndarray, norm: int | str) -> float:
    return float(np.linalg.norm(np.asarray(x, np.float64).ravel(), {"inf": np.inf}.get(norm, norm)))


def rounded(x: np.ndarray) -> np.ndarray:
    """To 12 bits behind the leading one, as norms are that may tie."""
    mantissa, exponent = np.frexp(x)  # mantissa in [0.5, 1)
    return np.ldexp(np.round(mantissa * 2**13) / 2**13, exponent)


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention_in_fractions(weights: np.ndarray, values: np.ndarray) -> list[Fraction]:
    """Attention output of weights that need not be normalised yet, without rounding: [S], [S, D] -> [D]."""
    total = sum(map(Fraction, weights.tolist()))
    rows = [[Fraction(w) * Fraction(v) for v in row] for w, row in zip(weights.tolist(), values.tolist(), strict=True)]
    return [sum(column) / total for column in zip(*rows, strict=True)]


def error_of_evicting(weights: np.ndarray, values: np.ndarray, token: int) -> np.ndarray:
    """How one head's attention output moves when a token is taken away and the attention done again: [D]."""
    before = attention_in_fractions(weights, values)
    after = attention_in_fractions(np.delete(weights, token), np.delete(values, token, axis=0))
    return np.array([float(b - a) for b, a in zip(before, after, strict=True)])


def eviction_errors(weights: np.ndarray, values: np.ndarray, norm: int | str = 2) -> np.ndarray:
    """Brute force over tokens and over the heads of a group: [G, S] (or [S]) and [S, D] -> [S]."""
    heads = np.atleast_2d(np.asarray(weights, np.float64))
    values = np.asarray(values, np.float64)
    tokens = range(values.shape[0])
    return np.array([length([error_of_evicting(a, values, j) for a in heads], norm) for j in tokens])


def layer_errors(
    weights: np.ndarray, values: np.ndarray, projection: np.ndarray | None, cross: bool = True, fast: bool = False
) -> np.ndarray:
    """Brute force behind W_O: evict, do all heads' attention again, project: [G, S], [S, D], [G, D, E] -> [S]."""
    change = [[error_of_evicting(a, values, j) for a in weights] for j in range(len(values))]
    if fast:
        change = [[a[j] / (1 - a[j]) * (values.mean(0) - values[j]) for a in weights] for j in range(len(values))]
    if projection is None:
        return np.array([length(heads, 2) for heads in change])
    behind = [[x @ w for x, w in zip(heads, projection, strict=True)] for heads in change]
    return np.array([length(np.sum(heads, 0) if cross else heads, 2) for heads in behind])


def fast_caote(weights: np.ndarray, values: np.ndarray, norm: int | str = 2) -> np.ndarray:
    """CAOTE's eq. 22, one head: [S], [S, D] -> [S]."""
    a, v = np.asarray(weights, np.float64), np.asarray(values, np.float64)
    return np.array([a[j] / (1 - a[j]) * length(v.mean(0) - v[j], norm) for j in range(len(a))])


def kept(scores: np.ndarray, position: np.ndarray, budget: int) -> np.ndarray:
    """The `budget` best live slots of one head by (score, position); NaN is worse than all else: [S] -> bool [S]."""
    none = np.isnan(scores)
    rising = np.lexsort((position, np.where(none, 0, scores) + 0.0, ~none, position >= 0))
    best = rising[::-1][: min(budget, int((position >= 0).sum()))]
    return np.isin(np.arange(len(scores)), best)


def attention_weights(
    query: np.ndarray,
    key: np.ndarray,
    key_position: np.ndarray,
    query_position: int,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    bias: np.ndarray | None = None,
    sink: float | None = None,
) -> np.ndarray:
    """One query's weights over one head's slots: [D], [S, D], [S] -> [S]; all 0 where it sees nothing.

    A sink is one more logit of the softmax, whose weight is dropped.
    """
    visible = (key_position >= 0) & (key_position <= query_position) & (query_position >= 0)
    if sliding_window is not None:
        visible &= key_position > query_position - sliding_window
    weights = np.zeros(len(key_position))
    if visible.any():
        logits = key[visible].astype(np.float64) @ query.astype(np.float64)
        logits = logits * (len(query) ** -0.5 if scale is None else scale)
        logits = logits if soft_cap is None else soft_cap * np.tanh(logits / soft_cap)
        logits = logits if bias is None else logits + bias[visible]
        weights[visible] = softmax(logits if sink is None else np.append(logits, sink))[: visible.sum()]
    return weights


def block_weights(
    query: np.ndarray,
    key: np.ndarray,
    key_position: np.ndarray,
    query_position: np.ndarray,
    bias: np.ndarray | None = None,
    sink_logits: np.ndarray | None = None,
    **options: object,
) -> np.ndarray:
    """Weights of a block: [B, T, N, D], [B, K, S, D], [B, K, S], [B, T] -> [B, N, T, S]."""
    B, T, N, _ = query.shape
    K, S = key_position.shape[1:]
    weights = np.zeros((B, N, T, S))
    for b, n, t in np.ndindex(B, N, T):
        k = n // (N // K)
        own = None if bias is None else bias[b, k]
        weights[b, n, t] = attention_weights(
            query[b, t, n], key[b, k], key_position[b, k], query_position[b, t], bias=own,
            sink=None if sink_logits is None else sink_logits[n], **options,
        )  # fmt: skip
    return weights


def weighted_values(weights: np.ndarray, value: np.ndarray, key_position: np.ndarray) -> np.ndarray:
    """[B, N, T, S], [B, K, S, D] -> [B, T, N, D], over the live slots only."""
    B, N, T, _ = weights.shape
    K, _, D = value.shape[1:]
    out = np.zeros((B, T, N, D))
    for b, n, t in np.ndindex(B, N, T):
        k = n // (N // K)
        live = key_position[b, k] >= 0
        out[b, t, n] = weights[b, n, t, live] @ value[b, k, live].astype(np.float64)
    return out


def column_statistics(weights: np.ndarray, valid: np.ndarray, window: int, kv_heads: int) -> dict[str, np.ndarray]:
    """Of a block's weights [B, N, T, S] and which queries count [B, T]: each [B, N, S], or a group's own [B, K, S]."""
    names = ("sum", "last", "max", "window_mean", "window_max", "window_variance", "window_square", "window_log")
    names += ("window_place",)
    B, N, _, S = weights.shape
    result = {name: np.zeros((B, N, S)) for name in names} | {"window_group_square": np.zeros((B, kv_heads, S))}
    for b in range(B):
        rows = weights[b][:, valid[b]]  # [N, queries, S]
        seen = rows[:, -window:]
        if rows.shape[1] == 0:
            continue
        result["sum"][b] = rows.sum(1)
        result["last"][b] = rows[:, -1]
        result["max"][b] = rows.max(1)
        result["window_mean"][b] = seen.mean(1)
        result["window_max"][b] = seen.max(1)
        result["window_variance"][b] = seen.var(1, ddof=1) if seen.shape[1] > 1 else 0
        result["window_square"][b] = (seen**2).sum(1)
        result["window_place"][b] = (seen * np.arange(seen.shape[1], 0, -1)[:, None]).mean(1)
        result["window_log"][b] = (seen * np.log(np.where(seen > 0, seen, 1))).sum(1)
        for k, group in enumerate(np.split(seen, kv_heads)):
            result["window_group_square"][b, k] = (group.mean(0) ** 2).sum(0)
    return result
