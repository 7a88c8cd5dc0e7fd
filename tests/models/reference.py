"""What blockwise eviction means, in plain NumPy float64, for the tests of :mod:`models.decoding`.

Nothing here comes from kvjax. Every key and value ever made stays, in the order of positions; evicting a token clears
one entry of a mask. One prompt at a time, cut into blocks that end where the prompt ends. The formulae are those of
the papers (CAOTE, H2O, TOVA, SnapKV, StreamingLLM); G query heads share a KV head.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.config import Config
from models.decoder import Decoder, parameter_shapes


class Seen(NamedTuple):
    """One layer after a block: what a score can be computed from. P positions so far, m of them in the block."""

    weights: np.ndarray  # [K, G, m, P], the block's attention; 0 where a query sees nothing
    received: np.ndarray  # [K, G, P], the attention of all queries so far
    key: np.ndarray  # [K, P, D], rotated
    value: np.ndarray  # [K, P, D]
    kept: np.ndarray  # [K, P], which tokens have not been evicted
    layer: int
    output: np.ndarray  # [N, D, E], the layer's output projection


Score = Callable[[Seen], np.ndarray]  # -> [K, G, P], or [K, 1, P] if it is the same for the group
Step = Callable[[np.ndarray, Seen], np.ndarray]
# scores [L, K, P] (+inf: protected), what is kept [L, K, P], the mean budget of a head -> what stays [L, K, P]
Allocate = Callable[[np.ndarray, np.ndarray, int], np.ndarray]


class Policy(NamedTuple):
    """A base score, what changes it, and what always stays (counts, or shares of the budget as floats)."""

    base: Score
    steps: tuple[Step, ...] = ()
    sinks: int | float = 0
    recent: int | float = 0
    shared: bool = False  # one set of tokens for the whole layer
    allocate: Allocate | None = None  # who gets how many slots; each head the same by default

    def __add__(self, step: Step) -> Policy:
        return self._replace(steps=(*self.steps, step))


@dataclasses.dataclass
class Run:
    logits: np.ndarray  # [P, V], of every token that was fed: the prompt, then the answer but for its last token
    kept: np.ndarray  # [L, K, P]
    tokens: list[int]  # the answer
    seen: np.ndarray  # [L, K, P, P], which query saw which token
    gap: float  # the smallest relative distance between a score that stayed and one that went


def run(
    parameters: dict[str, np.ndarray],
    config: Config,
    prompt: Sequence[int],
    *,
    policy: Policy | None = None,
    budget: int | float | None = None,
    block: int = 128,
    when: str = "block",
    question: int = 0,
    new_tokens: int = 0,
    evict_every: int | None = 1,
    end: tuple[int, ...] = (),
) -> Run:
    """One prompt, then a greedy answer. The last ``question`` tokens are fed when the rest was evicted from."""
    if isinstance(budget, float):
        budget = math.ceil(round(budget * len(prompt), 6))
    model = _Model(parameters, config, len(prompt), len(prompt) + new_tokens)
    logits, gap = [], math.inf
    context = len(prompt) - question
    blocks = math.ceil(context / block)
    edges = [0] + [context - (blocks - 1 - i) * block for i in range(blocks)]
    for start, stop in itertools.pairwise(edges):
        logits.append(model.feed(prompt[start:stop]))
        if policy is not None:
            model.hear()
            if when == "block" or stop == context:
                gap = min(gap, model.evict(policy, budget))
    for start in range(context, len(prompt), block):
        logits.append(model.feed(prompt[start : min(start + block, len(prompt))]))
        if policy is not None:
            model.hear()
    if policy is not None:
        budget += question
    answer = []
    for step in range(1, new_tokens + 1):
        answer.append(int(np.argmax(logits[-1][-1])))
        if answer[-1] in end or step == new_tokens:
            break
        logits.append(model.feed(answer[-1:]))
        if policy is not None:
            model.hear()
            if evict_every is not None and step % evict_every == 0:
                gap = min(gap, model.evict(policy, budget))
    P = model.length
    return Run(np.concatenate(logits), model.kept[:, :, :P], answer, model.seen[:, :, :P, :P], gap)


class _Model:
    """A Llama-like decoder that forgets nothing."""

    def __init__(self, parameters: dict[str, np.ndarray], config: Config, prompt_length: int, room: int):
        self.w = {name: np.asarray(array, np.float64) for name, array in parameters.items()}
        self.config = config
        self.length = 0
        self.frequency = inverse_frequencies(config, prompt_length)
        L, K, D = config.num_layers, config.num_kv_heads, config.head_dim
        self.key = np.zeros((L, K, room, D))
        self.value = np.zeros((L, K, room, D))
        self.kept = np.zeros((L, K, room), bool)
        self.seen = np.zeros((L, K, room, room), bool)
        self.received = np.zeros((L, K, config.num_heads // K, room))
        self.weights: list[np.ndarray] = []

    def feed(self, tokens: Sequence[int]) -> np.ndarray:
        """Runs a block through all layers; logits of its tokens."""
        config, w = self.config, self.w
        at = np.arange(self.length, self.length + len(tokens))
        self.length += len(tokens)
        P, K, D = self.length, config.num_kv_heads, config.head_dim
        x = w["embedding"][np.asarray(tokens)]
        self.weights = []
        for layer in range(config.num_layers):
            p = {name.removeprefix("layers."): a[layer] for name, a in w.items() if name.startswith("layers.")}
            y = norm(x, p["attention_norm"], config.norm_epsilon)
            query, key, value = (np.einsum("te,ehd->htd", y, p[name]) for name in ("query", "key", "value"))
            if config.attention_bias:
                query, key = query + p["query_bias"][:, None], key + p["key_bias"][:, None]
                value = value + p["value_bias"][:, None]
            if config.query_key_norm:
                query = norm(query, p["query_norm"], config.norm_epsilon)
                key = norm(key, p["key_norm"], config.norm_epsilon)
            query, key = (rope(z, at, self.frequency) for z in (query, key))
            self.key[layer][:, at], self.value[layer][:, at], self.kept[layer][:, at] = key, value, True

            visible = self.kept[layer][:, None, :P] & (np.arange(P) <= at[:, None])  # [K, m, P]
            if config.sliding_windows[layer]:
                visible &= np.arange(P) > at[:, None] - config.sliding_windows[layer]
            self.seen[layer][:, at, :P] = visible
            query = query.reshape(K, -1, len(tokens), D)
            scores = np.einsum("kgtd,kpd->kgtp", query, self.key[layer][:, :P]) / math.sqrt(D)
            weights = softmax(np.where(visible[:, None], scores, -np.inf))
            self.weights.append(weights)
            out = np.einsum("kgtp,kpd->kgtd", weights, self.value[layer][:, :P]).reshape(-1, len(tokens), D)
            x = x + np.einsum("htd,hde->te", out, p["output"])
            y = norm(x, p["feed_norm"], config.norm_epsilon)
            gate, up = y @ p["gate"], y @ p["up"]
            x = x + (gate / (1 + np.exp(-gate)) * up) @ p["down"]
        return norm(x, w["norm"], config.norm_epsilon) @ (w["head"] if "head" in w else w["embedding"].T)

    def hear(self) -> None:
        """Adds the block's attention to what each token has received so far."""
        for layer, weights in enumerate(self.weights):
            self.received[layer][:, :, : self.length] += weights.sum(axis=2)

    def evict(self, policy: Policy, budget: int) -> float:
        """Keeps the best ``budget`` tokens of every KV head; the smallest relative gap between staying and going."""
        P, gap = self.length, math.inf
        sinks, recent = (x if isinstance(x, int) else math.floor(x * budget) for x in (policy.sinks, policy.recent))
        every_layer = np.empty(self.kept[:, :, :P].shape)
        for layer, weights in enumerate(self.weights):
            kept = self.kept[layer][:, :P]
            received, key, value = self.received[layer][:, :, :P], self.key[layer][:, :P], self.value[layer][:, :P]
            seen = Seen(weights, received, key, value, kept.copy(), layer, self.w["layers.output"][layer])
            scores = policy.base(seen)
            for step in policy.steps:
                scores = step(scores, seen)
            scores = scores.mean(axis=1)  # over the group: [K, P]
            if policy.shared:
                scores = np.broadcast_to(scores.mean(axis=0), scores.shape)
            if policy.allocate is not None:
                always = (np.arange(P) < sinks) | (np.arange(P) >= P - recent)
                every_layer[layer] = np.where(always, np.inf, scores)
                continue
            for head, row in enumerate(scores):
                row = np.where((np.arange(P) < sinks) | (np.arange(P) >= P - recent), np.inf, row)
                ranking = sorted(np.flatnonzero(kept[head]), key=lambda p, row=row: (row[p], p), reverse=True)
                kept[head, ranking[budget:]] = False
                if len(ranking) > budget:
                    stays, goes = row[ranking[budget - 1]], row[ranking[budget]]
                    if math.isfinite(stays) and stays != goes:
                        gap = min(gap, (stays - goes) / max(abs(stays), abs(goes)))
        if policy.allocate is not None:
            self.kept[:, :, :P] = policy.allocate(every_layer, self.kept[:, :, :P].copy(), budget)
        return gap


# --- base scores -----------------------------------------------------------------------------------------------------


def heavy_hitters(seen: Seen) -> np.ndarray:
    """H2O: attention received from all queries so far."""
    return seen.received


def heavy_hitters_of_block(seen: Seen) -> np.ndarray:
    """H2O as CAOTE's section 2 writes it: attention received from the current block."""
    return seen.weights.sum(axis=2)


def last_query(seen: Seen) -> np.ndarray:
    """TOVA: the attention of the newest query."""
    return seen.weights[:, :, -1]


def observed(window: int, kernel: int, pooling: str) -> Score:
    """SnapKV: mean attention of the last queries, pooled over what lies before the window; the window itself stays."""

    def score(seen: Seen) -> np.ndarray:
        mean = seen.weights[:, :, -window:].mean(axis=2)
        before = np.arange(mean.shape[-1]) < mean.shape[-1] - window
        pooled = pooled_over_neighbours(kernel, pooling)(np.where(before, mean, 0), seen)
        return np.where(before, pooled, mean)

    return score


def newest(seen: Seen) -> np.ndarray:
    """StreamingLLM: the newer the better."""
    K, P = seen.kept.shape
    return np.broadcast_to(np.arange(P, dtype=np.float64), (K, 1, P))


def small_keys(seen: Seen) -> np.ndarray:
    """Minus the norm of the key, to 12 bits behind the leading one."""
    mantissa, exponent = np.frexp(np.sqrt((seen.key**2).sum(axis=-1)))  # mantissa in [0.5, 1)
    return -np.ldexp(np.round(mantissa * 2**13) / 2**13, exponent)[:, None]


def drawn(seed: int) -> Score:
    """A number for each token, head and layer: MurmurHash3's finaliser over the three, the upper 24 bits of it."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
        x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
        return x ^ (x >> 16)

    def score(seen: Seen) -> np.ndarray:
        K, P = seen.kept.shape
        hashes = [[mix(seed ^ mix(seen.layer ^ mix(k ^ mix(p)))) for p in range(P)] for k in range(K)]
        return np.array(hashes)[:, None] // 256 / 2**24

    return score


def row_products(window: int) -> Score:
    """LaProx: |column of the group's mean attention| * |v W_O| over the last queries; the window itself stays."""

    def score(seen: Seen) -> np.ndarray:
        column = np.linalg.norm(seen.weights[:, :, -window:].mean(axis=1), axis=1)  # [K, P]
        blocks = seen.output.reshape(len(column), -1, *seen.output.shape[1:])  # [K, G, D, E]
        rows = np.linalg.norm(np.einsum("kpd,kgde->kpge", seen.value, blocks).reshape(*column.shape, -1), axis=-1)
        return (column * rows)[:, None]

    return score


# --- who gets how many slots ------------------------------------------------------------------------------------------


def best(scores: np.ndarray, allowed: np.ndarray, count: int) -> np.ndarray:
    """The ``count`` best of [L, K, P]: by score, then the more recent, then the lower layer and head."""
    layer, head, position = np.nonzero(allowed)
    order = np.lexsort((head, layer, -position, -scores[allowed]))[: max(count, 0)]
    stays = np.zeros(scores.shape, bool)
    stays[layer[order], head[order], position[order]] = True
    return stays


def one_contest(scope: str, normalise: bool = False, safe: float = 0.0) -> Allocate:
    """One top-k over a layer's heads, or over the whole model; each head's best ``safe * budget`` stay."""

    def allocate(scores: np.ndarray, kept: np.ndarray, budget: int) -> np.ndarray:
        L, K, _ = kept.shape
        always = kept & np.isinf(scores)
        if safe:
            for at in np.ndindex(L, K):
                mask = np.zeros_like(kept)
                mask[at] = kept[at]
                always |= best(scores, mask, math.floor(safe * budget))
        if normalise:
            total = np.where(kept & ~always, scores, 0).sum(axis=(1, 2), keepdims=True)
            scores = np.where(always, np.inf, scores / np.where(total > 0, total, 1))
        scores = np.where(always, np.inf, scores)
        if scope == "model":
            return best(scores, kept, L * K * budget)
        stays = np.zeros_like(kept)
        for layer in range(L):
            mask = np.zeros_like(kept)
            mask[layer] = kept[layer]
            stays |= best(scores, mask, K * budget)
        return stays

    return allocate


def fixed(budgets: Callable[[int], Sequence[int]]) -> Allocate:
    """So many slots for each head of a layer."""

    def allocate(scores: np.ndarray, kept: np.ndarray, budget: int) -> np.ndarray:
        stays = np.zeros_like(kept)
        for at in np.ndindex(kept.shape[:2]):
            mask = np.zeros_like(kept)
            mask[at] = kept[at]
            stays |= best(scores, mask, budgets(budget)[at[0]])
        return stays

    return allocate


# --- what changes scores ---------------------------------------------------------------------------------------------


def shares(scores: np.ndarray, seen: Seen) -> np.ndarray:
    """CAOTE, eq. 21: h / sum h over the tokens that are there."""
    scores = np.where(seen.kept[:, None], scores, 0)
    total = scores.sum(axis=-1, keepdims=True)
    return scores / np.where(total == 0, 1, total)


def lifted_shares(scores: np.ndarray, seen: Seen) -> np.ndarray:
    """Shares of scores that may be negative: the lowest one becomes 0 first."""
    lowest = np.where(seen.kept[:, None], scores, np.inf).min(axis=-1, keepdims=True)
    return shares(scores - np.minimum(lowest, 0), seen)


def caote(*, norm: int | float = 2, group: str = "exact", fast: bool = False) -> Step:
    """Theorem 3.2, one token after the other: how far the outputs of the group's heads move when it goes."""

    def step(scores: np.ndarray, seen: Seen) -> np.ndarray:
        weights = shares(scores, seen)
        if group == "mean":
            weights = weights.mean(axis=1, keepdims=True)
        result = np.full(seen.kept.shape, -np.inf)
        for k, p in zip(*np.nonzero(seen.kept), strict=True):
            V = seen.value[k][seen.kept[k]]
            moved = []
            for a in weights[k]:
                X = V.mean(axis=0) if fast else a[seen.kept[k]] @ V
                moved.append(a[p] / (1 - a[p]) * (X - seen.value[k, p]) if a[p] < 1 else np.full_like(X, np.inf))
            result[k, p] = np.linalg.norm(np.concatenate(moved), norm)
        return result[:, None]

    return step


def pooled_over_neighbours(kernel: int, pooling: str) -> Step:
    """The mean (beyond the ends stand zeros) or the maximum of a token's neighbours among those that are left."""

    def step(scores: np.ndarray, seen: Seen) -> np.ndarray:
        result = np.zeros_like(scores)
        for k in range(scores.shape[0]):
            there = np.flatnonzero(seen.kept[k])
            for g in range(scores.shape[1]):
                for index, p in enumerate(there):
                    near = scores[k, g, there[max(0, index - kernel // 2) : index + kernel // 2 + 1]]
                    result[k, g, p] = near.sum() / kernel if pooling == "avg" else near.max()
        return result

    return step


# --- the decoder's parts ---------------------------------------------------------------------------------------------


def norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * weight


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def inverse_frequencies(config: Config, length: int) -> np.ndarray:
    """1 / theta^(2i/D); "dynamic" raises theta once a sequence is longer than the model was trained for."""
    rope, D = config.rope, config.head_dim
    theta = rope.theta
    if rope.type == "dynamic" and length > rope.original_positions:
        theta *= (rope.factor * length / rope.original_positions - (rope.factor - 1)) ** (D / (D - 2))
    elif rope.type not in ("default", "dynamic"):
        raise NotImplementedError(rope.type)
    return theta ** (-np.arange(0, D, 2) / D)


def rope(x: np.ndarray, at: np.ndarray, frequency: np.ndarray) -> np.ndarray:
    """Turns the complex numbers x[i] + 1j * x[i + D/2] by position times frequency."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * at[:, None] * frequency)
    return np.concatenate([turned.real, turned.imag], axis=-1)


# --- models to test with, and gradients ------------------------------------------------------------------------------


def parameters(config: Config, seed: int = 0, sharpness: float = 1.5) -> dict[str, np.ndarray]:
    """Random float32 weights that make peaked attention, so that scores lie well apart."""
    random = np.random.default_rng(seed)
    inputs = {"head": config.hidden_size, "layers.output": config.num_heads * config.head_dim}
    inputs |= {f"layers.{name}": config.hidden_size for name in ("query", "key", "value", "gate", "up")}
    inputs["layers.down"] = config.intermediate_size
    made = {}
    for name, shape in parameter_shapes(config).items():
        draw = random.normal(size=shape)
        if name.endswith("norm"):
            draw = 1 + 0.1 * draw
        elif name.endswith("bias"):
            draw *= 0.3
        elif name in inputs:
            draw *= (sharpness if name in ("layers.query", "layers.key") else 1) / math.sqrt(inputs[name])
        made[name] = draw.astype(np.float32)
    return made


def decoder(config: Config, weights: dict[str, np.ndarray]) -> Decoder:
    return Decoder(config, {name: jnp.asarray(array) for name, array in weights.items()})


def masked_logits(weights: dict[str, Any], config: Config, tokens: Any, seen: np.ndarray) -> jax.Array:
    """A dense forward of one sequence in JAX; constants, ``seen`` [L, K, T, T], say which query sees which key."""
    T, K, D = len(tokens), config.num_kv_heads, config.head_dim
    angle = np.arange(T)[:, None] * inverse_frequencies(config, T)
    cos, sin = jnp.cos(jnp.asarray(angle, jnp.float32)), jnp.sin(jnp.asarray(angle, jnp.float32))

    def normed(x, weight):
        return x * jax.lax.rsqrt((x**2).mean(axis=-1, keepdims=True) + config.norm_epsilon) * weight

    def turned(x):
        a, b = x[..., : D // 2], x[..., D // 2 :]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = weights["embedding"][jnp.asarray(tokens)]
    for layer in range(config.num_layers):
        p = {name.removeprefix("layers."): a[layer] for name, a in weights.items() if name.startswith("layers.")}
        y = normed(x, p["attention_norm"])
        query, key, value = (jnp.einsum("te,ehd->htd", y, p[name]) for name in ("query", "key", "value"))
        if config.query_key_norm:
            query, key = normed(query, p["query_norm"]), normed(key, p["key_norm"])
        query, key = turned(query).reshape(K, -1, T, D), turned(key)
        scores = jnp.einsum("kgtd,kpd->kgtp", query, key) / math.sqrt(D)
        attention = jax.nn.softmax(jnp.where(seen[layer][:, None], scores, -jnp.inf), axis=-1)
        out = jnp.einsum("kgtp,kpd->kgtd", attention, value).reshape(-1, T, D)
        x = x + jnp.einsum("htd,hde->te", out, p["output"])
        y = normed(x, p["feed_norm"])
        x = x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]
    return normed(x, weights["norm"]) @ (weights["head"] if "head" in weights else weights["embedding"].T)
