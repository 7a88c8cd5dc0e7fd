"""A Llama-like decoder in NumPy float64 that keeps every key and value; evicting clears one entry of a mask.

So does leaving a layer's sliding window, under a policy: what no later query sees is not there to choose from.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.kvjax import contests
from tests.models.reference import gradients, latent
from tests.models.reference.choices import LARGEST, NEAR, SMALL, Choices
from tests.models.reference.eight_bits import rounded
from tests.models.reference.policies import Leaving, Policy, Seen, expected
from tests.models.reference.predictor import predicted
from tests.models.reference.rotary import inverse_frequencies, rope

FEED = ("gate", "up", "down", "router", "expert_gate", "expert_up", "expert_down")
OVERLAP = 8  # tokens before a part that the model is fed before it repeats the part


@dataclasses.dataclass
class Run:
    logits: np.ndarray  # [P, V], of every token that was fed: the prompt, then the answer but for its last token
    kept: np.ndarray  # [L, K, P]
    tokens: list[int]  # the answer
    seen: np.ndarray  # [L, K, P, P], which query saw which token
    key: np.ndarray  # [L, K, P, D], as a cache holds them: rotated, "compact" ones at their place in the text
    value: np.ndarray  # [L, K, P, D]
    choices: Choices
    history: list[np.ndarray]  # what was kept behind each block of the prompt, and behind each step


def run(
    parameters: dict[str, np.ndarray],
    config: Any,
    prompt: Sequence[int],
    *,
    policy: Policy | None = None,
    budget: int | float | None = None,
    block: int = 128,
    when: str = "block",
    question: int = 0,
    new_tokens: int = 0,
    evict_every: int | None = None,
    end: tuple[int, ...] = (),
    flips: frozenset[int] = frozenset(),
    held: Sequence[np.ndarray] = (),
    butler: tuple[dict[str, np.ndarray], float] | None = None,
    scorer: dict[str, np.ndarray] | None = None,
    dtypes: tuple[str, str] = ("float32", "float32"),
    known: tuple[np.ndarray, np.ndarray] | None = None,
    loss: tuple[float, float] = (NEAR, SMALL),
    turns: Sequence[int] = (),
) -> Run:
    """One prompt, then a greedy answer. The last ``question`` tokens are fed when the rest was evicted from.

    ``config`` has the fields of ``models.Config``; ``butler`` are a predictor's parameters and its rotary base,
    ``scorer`` those of a linear scorer. ``dtypes`` are those of keys and values: in eight bits rows are rounded when
    they enter, and ``known`` are keys and values [L, K, P, D] that say where numbers half way between two fell, or NaN.
    ``flips`` are choices to make the other way; where rounding may turn a choice, the tokens ``held`` [L, K, P] behind
    the block or step are taken (see ``Choices``, also for ``loss``), the last entry of ``held`` serving those that have
    none. Without ``evict_every`` a policy evicts in decode at every step, or once in as many steps as its window has
    queries. Earlier ``turns`` ended where these say, each a prompt of its own without an answer.
    """
    if isinstance(budget, float):
        budget = math.ceil(round(budget * len(prompt), 6))
    if evict_every is None:
        evict_every = 0 if policy is None else policy.window or 1
        if policy is not None and policy.repeats is not None:
            evict_every = 64 if when == "block" else 0
    choices = Choices(flips, loss)
    repeats, pseudo = (None, None) if policy is None else (policy.repeats, policy.pseudo)
    once = pseudo is not None
    more = len(prompt) + new_tokens + OVERLAP if repeats else pseudo[0] if pseudo else 0
    room = len(prompt) + new_tokens + more
    model = _Model(parameters, config, policy, len(prompt), room, choices, held, butler, scorer, dtypes, known)
    logits, history = [], []
    context = len(prompt) - question
    # Where the model repeats blocks, it need not as long as all tokens fit.
    limit, fills = budget or 0, policy is None or policy.allocation != "threshold"
    compresses = repeats is None or when == "prompt" or context > limit or not fills
    after = min(context, limit)
    ends = [*turns, context]
    assert not turns or not (repeats or pseudo)
    for start, stop in itertools.chain(*(_blocks(*turn, block) for turn in itertools.pairwise([0, *ends]))):
        logits.append(model.feed(prompt[start:stop]))
        if repeats is not None and when == "block" and compresses:
            model.recite(prompt, [(start, stop) for start, stop in _blocks(start, stop, repeats[0])], *repeats[1:])
        if repeats is not None and when == "prompt" and stop == context:
            model.recite(prompt, _parts(0, context, repeats[0]), *repeats[1:])
        if pseudo is not None and stop == context:
            model.look_ahead(prompt[:context], *pseudo)
        if policy is not None and ((when == "block" and not once) or stop in ends) and compresses:
            model.evict(policy, budget, len(history), settled=False)
        history.append(model.kept[:, :, : model.length].copy())
    for start, stop in _blocks(context, len(prompt), block):
        logits.append(model.feed(prompt[start:stop]))
    if policy is not None:
        budget += question
    answer: list[int] = []
    if repeats is not None and evict_every and (after + new_tokens > limit or not fills):  # what has not been repeated
        left = context if when == "prompt" or compresses else 0
        if parts := _parts(left, len(prompt), min(repeats[0], block)):
            model.recite(prompt, parts, *repeats[1:], first=left)
            model.evict(policy, budget, len(history) - 1, settled=False)
    for step in range(1, new_tokens + 1):
        last = logits[-1][-1]
        answer += choices.best(last, -np.arange(len(last)), 1)
        if answer[-1] in end or step == new_tokens:
            break
        logits.append(model.feed(answer[-1:]))
        if policy is not None and evict_every and step % evict_every == 0:
            if repeats is not None:
                P = model.length
                model.recite([*prompt, *answer], [(P - evict_every, P)], *repeats[1:], first=P - evict_every)
            model.evict(policy, budget, len(history), settled=True)
        history.append(model.kept[:, :, : model.length].copy())
    P = model.length
    return Run(
        np.concatenate(logits),
        model.kept[:, :, :P],
        answer,
        model.seen[:, :, :P, :P],
        np.stack([rope(model.plain_key[i, :, :P], model.place[i, :, :P], f) for i, f in enumerate(model.frequency)]),
        model.value[:, :, :P],
        choices,
        history,
    )


def _blocks(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    """Cut a range into blocks that end where it ends; the first may be short."""
    edges = [start, *range(stop - (math.ceil((stop - start) / size) - 1) * size, stop + 1, size)]
    return list(itertools.pairwise(edges)) if stop > start else []


def _parts(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    """Cut a range into parts that begin where it begins; the last may be short."""
    return [(first, min(first + size, stop)) for first in range(start, stop, size)]


class _Model:
    """K counts the heads of the cache: KV heads, or query heads where each has a cache of its own."""

    def __init__(
        self,
        parameters: dict[str, np.ndarray],
        config: Any,
        policy: Policy | None,
        prompt_length: int,
        room: int,
        choices: Choices,
        held: Sequence[np.ndarray],
        butler: tuple[dict[str, np.ndarray], float] | None,
        scorer: dict[str, np.ndarray] | None,
        dtypes: tuple[str, str],
        known: tuple[np.ndarray, np.ndarray] | None,
    ):
        self.w = {name: np.asarray(array, np.float64) for name, array in parameters.items()}
        output = self.w["layers.output"]
        self.w["layers.output"] = (
            output.reshape(len(output), config.num_heads, config.head_dim, -1)
            if config.latent is None
            else latent.output(config, self.w)
        )
        self.config, self.choices, self.held, self.butler = config, choices, held, butler
        self.scorer = scorer
        self.first = np.zeros((0, config.hidden_size))  # layer 0's output
        self.positions = "absolute" if policy is None else policy.positions
        self.length = 0
        self.windows = config.sliding_windows if policy is not None else (None,) * config.num_layers
        ropes = config.ropes or (None,) * config.num_layers
        turns = [inverse_frequencies(rope or config.rope, config.head_dim, prompt_length) for rope in ropes]
        self.frequency, self.amplitude = zip(*turns, strict=True)
        L, N, D = config.num_layers, config.num_heads, config.head_dim
        K = N if policy is not None and policy.heads == "query" else config.num_kv_heads
        self.plain_key = np.zeros((L, K, room, D))  # before rotation
        self.place = np.zeros((L, K, room), int)  # the position that it is stored as
        self.value, self.alone = np.zeros((L, K, room, D)), np.zeros((L, K, room, D))
        self.dtypes = dtypes
        self.known = [np.full((L, K, room, D), np.nan) for _ in dtypes]
        for mine, given in zip(self.known, known or (), strict=False):
            mine[:, :, : given.shape[2]] = given[:, :, :room]
        self.kept = np.zeros((L, K, room), bool)
        self.seen = np.zeros((L, K, room, room), bool)
        self.received = np.zeros((L, K, N // K, room))
        self.bias = np.zeros((L, K, room))  # is added to a token's logits
        # Beside each token a query, times the scale, and the first position that it does not see.
        self.sampled, self.since = np.zeros((L, K, N // K, room, D)), np.zeros((L, room), int)
        self.query = np.zeros((L, K, N // K, room, D))  # before rotation
        self.key = np.zeros((L, K, room, D))  # as the last block's queries met them
        self.weights: list[np.ndarray] = []
        self.errors = None if policy is None else policy.errors
        self.weighs = policy is not None and policy.weighs
        self.corrects = policy is not None and any(link.corrects for link in policy.links)
        self.noticed: list[np.ndarray] = []  # what a policy sees of the last block: its attention, or squared changes
        self.rounding = np.zeros((L, K, room))  # what float32 may be off by in the changes
        self.inputs: list[np.ndarray] = []  # of each layer for the last block, and the last one's output
        self.routed: list[list[list[int]]] = [[] for _ in range(L)]  # the experts of each of its tokens
        self.shift = np.zeros((L, 1, 1))  # is added to each layer's attention output
        self.window = 0 if policy is None else policy.window
        self.observed: list[np.ndarray | None] = [None] * L  # since the last eviction
        self.memory: list[dict] = [{} for _ in range(L)]
        self.scored, self.recited = np.zeros((L, K, room)), np.zeros((L, K, room))

    def feed(self, tokens: Sequence[int]) -> np.ndarray:
        """Runs a block through all layers; logits of its tokens."""
        config, w, m = self.config, self.w, len(tokens)
        at = np.arange(self.length, self.length + m)
        self.length += m
        P, K, D = self.length, self.kept.shape[1], config.head_dim
        x = w["embedding"][np.asarray(tokens)] * config.embedding_multiplier
        self.weights, self.noticed, self.inputs, self.routed = [], [], [], [[] for _ in self.routed]
        for layer in range(config.num_layers):
            p = self.of_layer(layer)
            self.inputs.append(x)
            y = x if config.norms == "after" else self.norm(x, p["attention_norm"])
            if self.scorer is not None:
                own = y @ self.scorer["output"][layer] + self.scorer["output_bias"][layer]
                self.scored[layer][:, at] = own.T
            if config.latent is None:
                query, key, value = (np.einsum("te,ehd->htd", y, p[name]) for name in ("query", "key", "value"))
            else:
                query, key, value = latent.project(config, p, y)
            if config.attention_bias:
                query, key = query + p["query_bias"][:, None], key + p["key_bias"][:, None]
                value = value + p["value_bias"][:, None]
            if config.query_key_norm:
                query, key = self.norm(query, p["query_norm"]), self.norm(key, p["key_norm"])
            if config.wide_query_key_norm:  # over all heads of a token together
                query = self.norm(query, p["wide_query_norm"][:, None], axis=(0, 2))
                key = self.norm(key, p["wide_key_norm"][:, None], axis=(0, 2))
            if config.attention_multiplier is not None:
                query = query * config.attention_multiplier * math.sqrt(D)
            key, value = (np.repeat(z, K // len(z), axis=0) for z in (key, value))
            query, key = (self.amplitude[layer] * z for z in (query.reshape(K, -1, m, D), key))

            held = self.kept[layer].sum(axis=1)[:, None]  # before the block
            if self.windows[layer] and self.positions == "index":  # what has left the window is counted
                held = held + max(at[0] - self.windows[layer] + 1, 0)
            own = at[None] if self.positions == "absolute" else held + np.arange(m)
            place = self.place[layer][:, at] = np.broadcast_to(own if self.positions == "index" else at, key.shape[:2])
            key = self.stored("key", layer, at, rope(key, place, self.frequency[layer]))
            value = self.stored("value", layer, at, value) if config.latent is None else latent.value(config, key)
            self.query[layer][:, :, at], self.value[layer][:, at] = query, value
            self.plain_key[layer][:, at] = rope(key, -place, self.frequency[layer])
            self.alone[layer][:, at] = value
            self.kept[layer][:, at] = True
            kept = self.kept[layer][:, :P]
            place = np.cumsum(kept, axis=1) - 1 if self.positions == "compact" else self.place[layer][:, :P]
            key = self.key[layer][:, :P] = rope(self.plain_key[layer][:, :P], place, self.frequency[layer])
            query = rope(query, np.broadcast_to(own[:, None], query.shape[:3]), self.frequency[layer])

            visible = kept[:, None] & (np.arange(P) <= at[:, None])  # [K, m, P]
            if config.sliding_windows[layer]:
                visible = visible & (np.arange(P) > at[:, None] - config.sliding_windows[layer])
            self.seen[layer][:, at, :P] = visible
            scores = capped(np.einsum("kgtd,kpd->kgtp", query, key) / math.sqrt(D), config.attention_soft_cap)
            scores = scores + self.bias[layer][:, None, None, :P]
            self.sampled[layer][:, :, at], self.since[layer][at] = of_16_bits(query / math.sqrt(D)), at + 1
            weights = softmax(np.where(visible[:, None], scores, -np.inf))
            self.weights.append(weights)
            noticed = weights * np.exp(-self.bias[layer][:, None, None, :P]) if self.weighs else weights
            if self.errors is not None:
                noticed, off = self.changes(layer, weights)
                self.rounding[layer][:, :P] = off
            self.noticed.append(noticed)
            rows, before = noticed[:, :, -self.window :], self.observed[layer]
            if before is not None and m < self.window:
                longer = ((0, 0), (0, 0), (0, 0), (0, P - before.shape[-1]))
                rows = np.concatenate([np.pad(before, longer), rows], axis=2)
            self.observed[layer] = rows
            self.received[layer][:, :, :P] += noticed.sum(axis=2)
            out = np.einsum("kgtp,kpd->kgtd", weights, self.value[layer][:, :P])
            if self.corrects:
                out = corrected(out, scores, visible, query / math.sqrt(D), key, self.value[layer][:, :P], at)
            out = out.reshape(-1, m, D)
            out = np.einsum("htd,hde->te", out, p["output"])
            if config.output_bias:
                out = out + p["output_bias"]
            out = out + self.shift[layer]
            if config.norms != "before":
                out = self.norm(out, p["attention_post_norm"])
            x = x + config.residual_multiplier * out
            out = self.feed_forward(layer, p, x if config.norms == "after" else self.norm(x, p["feed_norm"]))
            if config.norms != "before":
                out = self.norm(out, p["feed_post_norm"])
            x = x + config.residual_multiplier * out
            if layer == 0:
                self.first = np.concatenate([self.first, x])
            if self.windows[layer]:
                self.kept[layer][:, : max(P - self.windows[layer] + 1, 0)] = False
        self.inputs.append(x)
        logits = self.norm(x, w["norm"]) @ (w["head"] if "head" in w else w["embedding"].T)
        return capped(logits / config.logits_scaling, config.logits_soft_cap)

    def of_layer(self, layer: int) -> dict[str, np.ndarray]:
        """A layer's weights; what only the layers with experts have, or only the others, is stacked over those."""
        dense = [size is not None for size in self.config.dense_sizes]
        own = {name.removeprefix("layers."): a for name, a in self.w.items() if name.startswith("layers.")}
        if not any(dense):
            return {name: a[layer] for name, a in own.items()}
        kind = {name: name in ("gate", "up", "down") for name in own if name in FEED}
        place = dense[:layer].count(dense[layer])
        return {
            name: a[place if name in kind else layer]
            for name, a in own.items()
            if name not in kind or kind[name] == dense[layer]
        }

    def output(self, layer: int) -> np.ndarray:
        """A layer's output projection, [K, G, D, E]."""
        whole = self.w["layers.output"][layer]
        return whole.reshape(self.kept.shape[1], -1, *whole.shape[1:])

    def changes(self, layer: int, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The squared lengths of the changes of queries' outputs without a token, like the weights [K, G, m, P].

        Of each head's output, or behind W_O of a group's; and what float32 may be off by in their sums, [K, 1].
        """
        value = self.value[layer][:, None, None, : weights.shape[-1]]  # [K, 1, 1, P, D]
        out = (weights[..., None] * value).sum(axis=3, keepdims=True)
        rest = 1 - weights[..., None]
        alone = rest <= np.finfo(np.float32).eps
        rest, ratio = np.where(alone, 1, rest), weights[..., None] / np.where(alone, 1, rest)
        moved = np.where(alone, out, ratio * (value - out))
        if self.errors == "output":
            moved = np.einsum("kgtpd,kgde->ktpe", moved, self.output(layer))[:, None]
        length = np.linalg.norm(moved, axis=-1)
        lost = (ratio[..., 0] * np.linalg.norm(value, axis=-1)).max(axis=1, keepdims=True)
        off = 1e-6 * length * (length / rest[..., 0] + lost)  # 1 - a and v - x are small differences
        return np.broadcast_to(length**2, weights.shape), off.sum(axis=2).max(axis=(1, 2))[:, None]

    def stored(self, side: str, layer: int, at: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Keys or values [K, m, D] as the cache holds them."""
        number = ("key", "value").index(side)
        return rounded(rows, self.dtypes[number], self.choices, self.known[number][layer][:, at])

    def norm(self, x: np.ndarray, weight: np.ndarray, axis: int | tuple[int, ...] = -1) -> np.ndarray:
        return norm(x, self.config.norm_offset + weight, self.config.norm_epsilon, axis)

    def feed_forward(self, layer: int, p: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
        """The network, or of each token the sum of those that its router chooses, by its weights."""
        act = {"silu": silu, "gelu_tanh": gelu}[self.config.activation]
        if "router" not in p:
            return (act(x @ p["gate"]) * (x @ p["up"])) @ p["down"]
        out = np.zeros(x.shape)
        for t, share in enumerate(softmax(x @ p["router"])):
            chosen = self.choices.best(share, -np.arange(len(share)), self.config.experts_per_token)
            self.routed[layer].append(chosen)
            total = share[chosen].sum() if self.config.normalise_experts else 1.0
            for e in chosen:
                own = (act(x[t] @ p["expert_gate"][e]) * (x[t] @ p["expert_up"][e])) @ p["expert_down"][e]
                out[t] += share[e] / total * own
        return out

    def copy(self) -> _Model:
        """A model that goes on by itself, but whose choices are noted here."""
        return copy.deepcopy(self, {id(self.choices): self.choices})

    def recite(
        self,
        text: Sequence[int],
        parts: list[tuple[int, int]],
        sinks: int,
        visible: str,
        measure: str,
        loss: str = "",
        first: int = 0,
    ) -> None:
        """Has a copy of the model repeat some parts of its text, and notes the largest attention to each token.

        The attention is that over the part, the first ``sinks`` tokens and the repeated ones: of the weights over all
        tokens, these are divided by their sum. Or it is that over all tokens. Those before ``first`` stand before no
        part. By the derivative of a ``loss`` it may be the largest product of attention, of the length that a value has
        behind W_O, and of that of the derivative ("norms"), or the largest "change" of the loss; or in place of the
        derivative's length stands the inverse of that of the layer's "input".
        """
        P = self.length
        for start, stop in parts:
            part = np.arange(start, stop)
            other = self.copy()
            fed = [*text[max(start - OVERLAP, first) : start], *text[start:stop]]
            other.feed(fed)
            felt = gradients.of_loss(other, fed, loss, stop - start) if loss else None
            own, copy = np.arange(start, stop), np.arange(P, P + stop - start)  # not of the copied token, but as many
            self.sampled[:, :, :, own], self.since[:, own] = other.sampled[:, :, :, copy], copy + 1
            at = np.arange(other.length)
            counted = (at < sinks) | np.isin(at, part) | (at >= P) | (visible == "cache")
            for layer, weights in enumerate(other.weights):
                shares = weights / weights[..., counted].sum(axis=-1, keepdims=True) * counted
                if self.errors is not None:
                    shares, off = other.changes(layer, shares)
                    self.rounding[layer][:, part] = off
                behind = np.einsum("kpd,kgde->kgpe", other.value[layer][:, : other.length], self.output(layer))
                length = np.linalg.norm(behind, axis=-1)[:, :, None]
                if measure == "input":
                    x = other.inputs[layer]
                    y = x if self.config.norms == "after" else self.norm(x, self.of_layer(layer)["attention_norm"])
                    shares = shares / np.linalg.norm(y, axis=-1)[:, None] * length
                elif felt is not None:
                    d = felt[layer]
                    if measure == "norms":
                        shares = shares * np.linalg.norm(d, axis=-1)[:, None] * length
                    else:
                        along = np.einsum("te,kgpe->kgtp", d, behind)
                        moved = (shares * along).sum(axis=-1, keepdims=True) - along
                        shares = abs(shares / np.maximum(1 - shares, np.finfo(np.float32).eps) * moved)
                self.recited[layer][:, part] = shares[..., part].max(axis=(1, 2))

    def look_ahead(self, context: Sequence[int], number: int, which: str) -> None:
        """Feeds tokens of the prompt again to a copy of the model; what they attend to in the prompt is observed."""
        some = list(context[-number:] if which == "last" else context[:number])
        other = self.copy()
        other.feed((some * number)[:number])
        self.noticed = [noticed[..., : self.length] for noticed in other.noticed]
        self.observed = [noticed[:, :, -self.window :] for noticed in self.noticed]
        self.rounding[:] = other.rounding.max(axis=-1, keepdims=True)

    def evict(self, policy: Policy, budget: int, number: int, *, settled: bool) -> None:
        """Scores what every layer holds, then keeps as many as the allocation gives."""
        P, at = self.length, np.arange(self.length)
        L, K, _ = self.kept.shape
        held = self.held[min(number, len(self.held) - 1)] if self.held else None
        tokens, noise, preference = [], [], np.zeros(L)
        foreseen = None if self.butler is None else predicted(*self.butler, self.first)
        for layer, weights in enumerate(self.noticed):
            kept = self.kept[layer][:, :P].copy()
            own = min(budget, self.windows[layer] or budget)
            sinks, recent = policy.protected(own)
            stays = (at < sinks) | (at >= P - recent)
            m = weights.shape[2]
            of_layer = None
            if foreseen is not None and layer:
                query, key = (x[layer - 1].reshape(K, -1, P, x.shape[-1]) for x in foreseen)
                of_layer = query[:, :, -m:], key
            seen = Seen(
                weights=weights,
                observed=self.observed[layer],
                received=self.received[layer][:, :, :P],
                key=self.key[layer][:, :P],
                value=self.value[layer][:, :P],
                alone=self.alone[layer][:, :P],
                kept=kept,
                visible=self.seen[layer][:, P - m : P, :P],
                protected=kept & stays,
                query=self.query[layer][:, :, :P],
                frequency=self.frequency[layer],
                output=self.output(layer),
                predicted=of_layer,
                scored=self.scored[layer][:, :P],
                recited=self.recited[layer][:, :P],
                layer=layer,
                budget=own,
                soft_cap=self.config.attention_soft_cap,
                settled=settled,
                memory=self.memory[layer],
                choices=self.choices,
                held=None if held is None else held[layer],
                noise=np.where(alike(self.key[layer][:, :P], kept), 1e-10, 0) + self.rounding[layer][:, :P],
            )
            scores = np.where(seen.protected, np.inf, policy.scores(seen))
            noise.append(np.where(abs(scores) < LARGEST / 2, seen.noise / (abs(scores) + 1e-30), 0))
            preference[layer] = policy.preference(seen)
            tokens += [contests.Token(layer, k, int(p), float(scores[k, p])) for k, p in np.argwhere(kept)]

        def best(tokens: list[contests.Token], number: int, **how: Any) -> list[contests.Token]:
            if not how:  # of tokens, rather than of layers
                off = [noise[t.layer][t.head, t.position] for t in tokens]
                how["noise"] = [x * (abs(t.score) + 1e-30) if x else 0.0 for x, t in zip(off, tokens, strict=True)]
                how["held"] = None if held is None else [held[t[:3]] for t in tokens]
                how["group"] = None if policy.whole else [t[:2] for t in tokens]
            order = [(t.position, -t.layer, -t.head) for t in tokens]
            return [tokens[i] for i in self.choices.best([t.score for t in tokens], order, number, **how)]

        measured = dict(seen=P, entered=weights.shape[2], preference=preference)
        row = contests.Row(tokens, L, K, budget, **measured, best=best, windows=self.windows)
        before = self.kept[:, :, :P].copy()
        self.kept[:, :, :P], self.observed = False, [None] * L
        for token in contests.DEFINITIONS[policy.allocation](row, None, **policy.options):
            self.kept[token.layer, token.head, token.position] = True
        if policy.merged is None:
            return
        for layer, k in np.ndindex(L, K):
            key = rope(self.plain_key[layer, k, :P], self.place[layer, k, :P], self.frequency[layer])
            kept, received = self.kept[layer, k, :P], self.received[layer][k, :, :P].mean(axis=0)
            gone = np.flatnonzero(before[layer, k] & ~kept)
            value = self.value[layer, k, :P].copy()
            samples = self.sampled[layer, k, :, :P], self.since[layer, :P], self.bias[layer, k, :P]
            others = np.flatnonzero(kept), self.choices, *samples, k, self.memory[layer]
            merged = policy.merged(Leaving(key, value, received, gone, *others))
            if isinstance(merged, tuple):
                merged, self.bias[layer, k, :P] = merged
            new = np.flatnonzero((merged != value).any(axis=-1))
            known = self.known[1][layer, k, new]
            self.value[layer, k, new] = rounded(merged[new], self.dtypes[1], self.choices, known)


def corrected(
    out: np.ndarray,
    scores: np.ndarray,
    visible: np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    at: np.ndarray,
) -> np.ndarray:
    """The outputs [K, G, m, D] with the moments of the tokens from before the block that a head has evicted."""
    out = out.copy()
    for k in range(len(out)):
        gone = np.flatnonzero(~visible[k, -1, : at[0]])
        if len(gone):
            mass = np.where(visible[k], np.exp(scores[k]), 0).sum(axis=-1)  # [G, m]
            lost = len(gone) * np.exp(query[k] @ key[k, gone].mean(axis=0))
            foreseen = expected(key[k, gone], value[k, gone], query[k])
            out[k] += (lost / (mass + lost))[..., None] * (foreseen - out[k])
    return out


def alike(key: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Tell whether another token [K, P] has the same key, which float32 computes anew for each; zeros are exact."""
    size = abs(key).max(axis=-1, initial=0)
    apart = abs(key[:, :, None] - key[:, None]).max(axis=-1, initial=0)
    pairs = (apart <= 1e-9 * size[:, None]) & kept[:, :, None] & kept[:, None] & ~np.eye(key.shape[1], dtype=bool)
    return pairs.any(axis=-1) & (size > 0)


def of_16_bits(x: np.ndarray) -> np.ndarray:
    """Round to bfloat16: the upper half of a float32's bits, of two as near the even one."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


def norm(x: np.ndarray, weight: np.ndarray, epsilon: float, axis: int | tuple[int, ...] = -1) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=axis, keepdims=True) + epsilon) * weight


def capped(x: np.ndarray, cap: float | None) -> np.ndarray:
    return x if cap is None else cap * np.tanh(x / cap)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)
