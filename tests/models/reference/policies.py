"""What a policy's short name means: base scores, what changes them, and what always stays, one layer and row at a time.

Scores are [K, G, P], or [K, 1, P] where they are the same for the group; P counts all positions so far, evicted or not.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.kvjax import contests
from tests.models.reference.choices import LARGEST, TIE, Choices
from tests.models.reference.rotary import rope


class Seen(NamedTuple):
    """One layer behind a block of m tokens: what a score can be computed from."""

    # [K, G, m, P], the block's attention, 0 where a query sees nothing; or a policy's squared changes, see Link.errors
    weights: np.ndarray
    observed: np.ndarray  # [K, G, n, P], likewise of the window's last queries, or all since the last eviction
    received: np.ndarray  # [K, G, P], the attention of all queries so far
    key: np.ndarray  # [K, P, D], rotated as the block met them
    value: np.ndarray  # [K, P, D]
    alone: np.ndarray  # [K, P, D], the values before any were merged into them
    kept: np.ndarray  # [K, P], which tokens have not been evicted
    visible: np.ndarray  # [K, m, P], which token a query of the block sees
    protected: np.ndarray  # [K, P], which stay in any case
    query: np.ndarray  # [K, G, P, D], all queries so far before rotation
    frequency: np.ndarray  # [D / 2], angle per position
    output: np.ndarray  # [K, G, D, E], the layer's output projection
    predicted: tuple[np.ndarray, np.ndarray] | None  # [K, G, m, D'] and [K, G, P, D'], a predictor's queries and keys
    scored: np.ndarray  # [K, P], a scorer's numbers, one for each token
    recited: np.ndarray  # [K, P], the largest attention while the model repeated its prompt; 0 of later tokens
    layer: int
    budget: int  # of the layer
    soft_cap: float | None
    settled: bool  # the prompt was compressed before
    memory: dict  # what the layer's links remember
    choices: Choices
    held: np.ndarray | None  # [K, P], see Choices
    noise: np.ndarray  # [K, P], to write to: what float32 may be off by where a score is a small difference

    def best(self, k: int, scores: np.ndarray, allowed: np.ndarray, number: int) -> np.ndarray:
        """The ``number`` best tokens of one head, [P]; of equals the more recent."""
        at = np.flatnonzero(allowed)
        held = None if self.held is None else self.held[k, at]
        result = np.zeros(len(allowed), bool)
        result[at[self.choices.best(scores[at], at, number, noise=self.noise[k, at], held=held)]] = True
        return result


Scores = np.ndarray
Amount = int | float  # a count, or a share of the budget as a float


class Leaving(NamedTuple):
    """One head at an eviction: what happens to the values of the tokens that leave."""

    key: np.ndarray  # [P, D], as a cache holds them
    value: np.ndarray  # [P, D]
    received: np.ndarray  # [P], the attention of all queries so far, the group's mean
    gone: np.ndarray  # positions
    kept: np.ndarray  # positions
    choices: Choices
    sampled: np.ndarray  # [G, P, D], a query beside each token, times the scale
    since: np.ndarray  # [P], the first position that it does not see
    bias: np.ndarray  # [P]
    head: int
    memory: dict  # what the layer's links remember


class Link(NamedTuple):
    """``score`` is given the scores so far (None in front), and may also return which tokens surely stay; ``protects``
    are numbers of first and last tokens, of which the largest count; None leaves those of the links before.
    """

    score: Callable[[Scores, Seen], Scores | tuple[Scores, np.ndarray]] = lambda scores, seen: scores
    protects: tuple[tuple[Amount | None, Amount | None], ...] = ()
    allocation: tuple[str, dict[str, Any]] = ("uniform", {})  # of a base score, where the name has no other
    heads: str = "group"
    positions: str = "absolute"
    window: int = 0
    # "value" or "output": squared changes of each query's output without a token are seen in place of its attention.
    errors: str | None = None
    largest: bool = False  # whether the largest of the window's counts, as if it had been the only one
    # How many tokens at a time, how many first ones are seen with each, whether only those and the "part" are, and
    # that the largest "weight" counts; or how the derivative of which loss does.
    repeats: tuple[int, int, str, str, str] | None = None
    # The values [P, D] behind an eviction, or these and the biases [P].
    merged: Callable[[Leaving], np.ndarray | tuple[np.ndarray, np.ndarray]] | None = None
    pseudo: tuple[int, str] | None = None  # how many of the prompt's "last" or "first" tokens follow it, for a moment
    corrects: bool = False  # whether attention counts evicted tokens by their moments
    weighs: bool = False  # whether a token that stays counts for several, and scores see its own attention
    whole: bool = False  # whether scores are whole numbers, which float32 does not round


class Policy(NamedTuple):
    links: tuple[Link, ...]
    allocation: str = "uniform"
    options: dict[str, Any] = {}  # noqa: RUF012

    @property
    def heads(self) -> str:
        """Who has one set of tokens: each query "group", all heads of a "layer", or each "query" head."""
        return next((link.heads for link in self.links if link.heads != "group"), "group")

    @property
    def positions(self) -> str:
        return next((link.positions for link in self.links if link.positions != "absolute"), "absolute")

    @property
    def window(self) -> int:
        """How many queries are observed; 0 where none are."""
        own = self.options.get("window") or 32 if self.allocation in ("cake", "d2o") else 0
        return max(link.window for link in self.links) or own

    @property
    def errors(self) -> str | None:
        """Return the changes, where squared changes are seen in place of attention."""
        return next((link.errors for link in reversed(self.links) if link.errors is not None), None)

    @property
    def repeats(self) -> tuple[int, int, str, str, str] | None:
        """The way in which the model repeats its text before the policy evicts, None where it does not."""
        return self.links[0].repeats

    @property
    def merged(self) -> Callable[[Leaving], np.ndarray | tuple[np.ndarray, np.ndarray]] | None:
        """Return what becomes of a head's values in an eviction, None where they stay as they are."""
        return next((link.merged for link in self.links if link.merged is not None), None)

    @property
    def weighs(self) -> bool:
        """Tell whether tokens that stay count for several, and scores see what one of them gets."""
        return any(link.weighs for link in self.links)

    @property
    def whole(self) -> bool:
        """Tell whether float32 holds equal scores of different heads as equal."""
        return self.links[0].whole and all(link.protects or link.positions != "absolute" for link in self.links[1:])

    @property
    def pseudo(self) -> tuple[int, str] | None:
        """The tokens that the model is fed behind its prompt and forgets again, None where there are none."""
        return self.links[0].pseudo

    def protected(self, budget: int) -> tuple[int, int]:
        """How many first and last tokens stay in any case."""
        first = last = 0
        for link in self.links:
            firsts, lasts = ([pair[side] for pair in link.protects if pair[side] is not None] for side in (0, 1))
            first = max(_count(amount, budget) for amount in firsts) if firsts else first
            last = max(_count(amount, budget) for amount in lasts) if lasts else last
        return first, last

    def scores(self, seen: Seen) -> np.ndarray:
        """[K, P]: the chain's, averaged over the group, or over the whole layer."""
        scores, certain = np.zeros(0), np.zeros(seen.kept.shape, bool)
        if any(link.largest for link in self.links):
            seen = seen._replace(observed=seen.observed.max(axis=2, keepdims=True))
        for link in self.links:
            given = link.score(scores, seen)
            scores, own = given if isinstance(given, tuple) else (given, np.zeros_like(certain))
            certain |= own
            seen = seen._replace(protected=seen.protected | own)
        if self.heads == "layer":
            certain = np.broadcast_to(certain.all(axis=0), certain.shape)
            scores = np.broadcast_to(scores.mean(axis=(0, 1)), scores.shape)
        return np.where(certain, LARGEST, scores.mean(axis=1))

    def preference(self, seen: Seen) -> float:
        """Measure a layer for the allocation: the entropy and variance of the window's attention (CAKE), its variance
        over the tokens (D2O), or whether the layer is lazy (SimLayerKV).
        """
        if self.allocation == "simlayer":
            first, last = contests.streaming_counts(
                seen.budget, self.options.get("sinks", 4), self.options.get("recent", 1024)
            )
            at, P = np.arange(seen.kept.shape[1]), seen.kept.shape[1]
            near = seen.kept & ((at < first) | (at >= P - last))
            attention = np.where(near[:, None], seen.weights[:, :, -1], 0).sum(axis=-1).mean()
            threshold = self.options.get("threshold", 0.9)
            return float(not seen.choices.below(np.array([attention]), threshold)[0] and attention != threshold)
        if self.allocation == "d2o":
            rows = seen.observed.mean(axis=2)
            variance = np.zeros(rows.shape[:2])
            for k, g in np.ndindex(*variance.shape):
                x = rows[k, g, seen.kept[k]]
                variance[k, g] = x.var(ddof=1) / x.mean() ** 2 if len(x) > 1 and x.mean() > 0 else 0.0
            return float(contests.d2o_preference(*(variance.reshape(1, -1),) * 3)[0])
        if self.allocation != "cake":
            return 0.0
        rows = np.where(seen.kept & ~seen.protected, np.moveaxis(seen.observed, 0, 2), 0)  # [G, m, K, P]
        entropy = -(rows * np.log(np.where(rows > 0, rows, 1))).sum()
        variance = rows.var(axis=1, ddof=1).sum() if rows.shape[1] > 1 else 0.0
        return max(entropy, 0) ** (1 / self.options.get("space", 1)) * variance ** (1 / self.options.get("time", 1))


def policy(name: str) -> Policy:
    """``h2o+caote@layer`` and the like."""
    chain, _, allocation = name.partition("@")
    tree, links = ast.parse(chain.strip(), mode="eval").body, []
    while isinstance(tree, ast.BinOp):
        links.append(_called(tree.right))
        tree = tree.left
    links.append(_called(tree))
    made = tuple(LINKS[link](**options) for link, options in reversed(links))
    own = _called(ast.parse(allocation.strip(), mode="eval").body) if allocation else made[0].allocation
    return Policy(made, *own)


def _called(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if isinstance(node, ast.Name):
        return node.id, {}
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return node.func.id, {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}


def _count(amount: Amount, budget: int) -> int:
    return amount if isinstance(amount, int) else round(amount * 10_000) * budget // 10_000


ONE_BUDGET: tuple[str, dict[str, Any]] = ("model", {"normalise": False})


# --- base scores -----------------------------------------------------------------------------------------------------


def h2o(*, accumulate: bool = True) -> Link:
    """Attention received from all queries so far, or from those of the block; half is for the newest tokens."""
    return Link(lambda _, seen: seen.received if accumulate else seen.weights.sum(axis=2), ((0, 0.5),))


def tova(*, heads: str = "layer") -> Link:
    """The attention of the newest query."""
    return Link(lambda _, seen: seen.weights[:, :, -1], heads=heads)


def snapkv(*, window: int = 32, kernel: int = 5, pooling: str = "avg") -> Link:
    """Mean attention of the last queries, pooled over what lies before the window; the window itself stays."""

    def score(_: Scores, seen: Seen) -> Scores:
        return _pooled_before(seen.observed.mean(axis=2), seen, window, kernel, pooling)

    return Link(score, ((0, window),), window=window)


def dropkv(*, window: int = 32, kernel: int = 7) -> Link:
    """The squared change of the last queries' outputs without a token, pooled; the window itself stays."""

    def score(_: Scores, seen: Seen) -> Scores:
        return _pooled(seen.observed.mean(axis=2), seen, kernel, "avg")

    return Link(score, ((0, window),), window=window, errors="value")


def dapq(*, window: int = 32, kernel: int = 5, pooling: str = "avg", tokens: str = "last") -> Link:
    """As SnapKV, but what is observed are tokens behind the prompt."""
    return snapkv(window=window, kernel=kernel, pooling=pooling)._replace(pseudo=(window, tokens))


def finch(*, window: int = 32) -> Link:
    """The window's attention, each query's times the number of other tokens before it."""

    def score(_: Scores, seen: Seen) -> Scores:
        n = seen.observed.shape[2]
        others = seen.kept.sum(axis=1)[:, None] - np.arange(n, 0, -1)  # [K, n]
        return (seen.observed * others[:, None, :, None]).mean(axis=2)

    return Link(score, ((0, window),), window=window)


def streaming(*, sinks: int = 4) -> Link:
    """The newer the better."""

    def score(_: Scores, seen: Seen) -> Scores:
        K, P = seen.kept.shape
        return np.broadcast_to(np.arange(P, dtype=np.float64), (K, 1, P))

    return Link(score, ((sinks, 0),), whole=True)


def recency() -> Link:
    """Streaming without sinks."""
    return streaming(sinks=0)


def sage(*, heads: str = "group") -> Link:
    """The last query of a block of the prompt chooses; behind the prompt what it chose stays, the newest roll on."""

    def score(_: Scores, seen: Seen) -> Scores:
        K, P = seen.kept.shape
        if seen.settled:
            state = np.zeros((K, P))
            state[:, : seen.memory["sage"].shape[1]] = seen.memory["sage"]
            return state[:, None]
        quarter, at = seen.budget // 4, np.arange(P)
        scores = seen.weights[:, :, -1].mean(axis=1)
        last = np.broadcast_to(at >= P - max(quarter, 1), (K, P))
        # What was chosen beats what rolls, however little it scored.
        seen.memory["sage"] = np.where(last, 0, np.maximum(scores, np.finfo(np.float32).tiny))
        return scores[:, None]

    return Link(score, ((0.25, 0.25), (0, 1)), heads=heads)


def laprox(
    *, window: int = 32, kernel: int = 7, target: str = "output", gqa: str = "joint", pooled: str = "attention"
) -> Link:
    """|column of the window's attention| * |v W_O|, pooled; the window itself stays."""

    def score(_: Scores, seen: Seen) -> Scores:
        rows = seen.observed
        rows = rows if gqa == "heads" else rows.mean(axis=1, keepdims=True)
        column = np.sqrt((rows**2).sum(axis=2)).mean(axis=1)  # [K, P]
        if target == "value":
            length = np.sqrt((seen.value**2).sum(axis=-1))
        elif target == "output":
            projected = np.einsum("kpd,kgde->kpge", seen.value, seen.output)
            projected = projected.sum(axis=2, keepdims=True) if gqa == "joint" else projected
            length = np.sqrt((projected**2).sum(axis=(2, 3)))
        else:
            length = np.ones(column.shape)
        if pooled == "attention":
            return _pooled_before(column[:, None], seen, window, kernel, "avg") * length[:, None]
        return _pooled_before((column * length)[:, None], seen, window, kernel, "avg")

    return Link(score, ((0, window),), window=window, allocation=("model", {}))


def cake(*, window: int = 32, kernel: int = 5, gamma: float = 200.0) -> Link:
    """Mean and variance of the window's attention, pooled; the window itself stays."""

    def score(_: Scores, seen: Seen) -> Scores:
        rows = seen.observed
        variance = rows.var(axis=2, ddof=1) if rows.shape[2] > 1 else 0
        return _pooled_before(rows.mean(axis=2) + gamma * variance, seen, window, kernel, "avg")

    return Link(score, ((0, window),), window=window, allocation=("cake", {}))


def lava(*, window: int = 32, kernel: int = 7) -> Link:
    """The window's mean attention, pooled by its maximum, times the largest |v|_1 that the head holds."""

    def score(_: Scores, seen: Seen) -> Scores:
        length = np.where(seen.kept, abs(seen.value).sum(axis=-1), 0).max(axis=1)
        observed = _pooled_before(seen.observed.mean(axis=2), seen, window, kernel, "max")
        return observed.max(axis=1, keepdims=True) * length[:, None, None]

    return Link(score, ((0, window),), window=window, allocation=("lava", {}))


def expected_attention(*, future: int = 512, sinks: int = 4, covariance: bool = True, value_norm: bool = True) -> Link:
    """The attention that a normal distribution of queries is expected to pay from the coming positions."""

    def score(_: Scores, seen: Seen) -> Scores:
        P, D = seen.key.shape[1:]
        turn = np.exp(1j * (P + np.arange(future))[:, None] * seen.frequency).mean(axis=0)
        key = seen.key[..., : D // 2] + 1j * seen.key[..., D // 2 :]
        key = np.concatenate([(key * turn.conj()).real, (key * turn.conj()).imag], axis=-1)
        query = seen.query[:, :, sinks:]
        if query.shape[2] == 0:
            return np.zeros((*query.shape[:2], P))
        mean = query.mean(axis=2)
        logits = np.einsum("kgd,kpd->kgp", mean, key) / D**0.5
        if covariance:
            away = query - mean[:, :, None]
            spread = np.einsum("kgtd,kgte->kgde", away, away) / query.shape[2]
            logits = logits + np.einsum("kpd,kgde,kpe->kgp", key, spread, key) / (2 * D)
        counted = (seen.kept & (np.arange(P) >= sinks))[:, None]
        if not counted.any():
            return np.zeros(logits.shape)
        logits = np.where(counted, logits, -np.inf)
        scores = np.exp(logits - logits.max(axis=-1, keepdims=True))
        scores = scores / scores.sum(axis=-1, keepdims=True)
        return scores * np.linalg.norm(seen.value, axis=-1)[:, None] if value_norm else scores

    return Link(score, ((sinks, 0),))


def butler(*, dim: int | None = None) -> Link:
    """The attention that a predictor foresees over the tokens that are left, its mean over the block's queries; in
    layer 0 the real one.
    """

    def score(_: Scores, seen: Seen) -> Scores:
        if seen.predicted is None:
            return seen.weights.mean(axis=2)
        query, key = seen.predicted
        logits = np.einsum("kgtd,kgpd->kgtp", query, key) / query.shape[-1] ** 0.5
        logits = logits if seen.soft_cap is None else seen.soft_cap * np.tanh(logits / seen.soft_cap)
        there = (seen.visible & seen.kept[:, None])[:, None]
        weights = np.where(there, np.exp(logits - logits.max(axis=-1, keepdims=True)), 0)
        total = weights.sum(axis=-1, keepdims=True)
        return (weights / np.where(total > 0, total, 1)).mean(axis=2)

    return Link(score)


def zap() -> Link:
    """The exponential of what a scorer says of the token's hidden state, to 12 bits."""

    def score(_: Scores, seen: Seen) -> Scores:
        scores, seen.noise[:] = _to_12_bits(np.exp(seen.scored))
        return scores[:, None]

    return Link(score, allocation=ONE_BUDGET)


def trimkv() -> Link:
    """A token's age times the logarithm of what each later token leaves, which is the sigmoid of a scorer's number."""

    def score(_: Scores, seen: Seen) -> Scores:
        fading, off = _to_12_bits(np.logaddexp(0, -seen.scored))
        age = fading.shape[1] + 1 - np.arange(fading.shape[1])
        seen.noise[:] = age * off
        return -(age * fading)[:, None]

    return Link(score)


def kvzip(*, chunk: int = 2048, sinks: int = 4, visible: str = "part", normalise: bool = False) -> Link:
    """The largest attention while the model repeats its prompt, or by which lengths it is normalised."""

    def score(_: Scores, seen: Seen) -> Scores:
        # Equal tokens score equally if a sliding window hides what differs before them, but not in float32.
        seen.noise[:] += seen.choices.small * seen.recited
        return seen.recited[:, None]

    repeats = (chunk, sinks, visible, "input" if normalise else "weight", "")
    return Link(score, ((sinks, 0),), repeats=repeats, allocation=ONE_BUDGET)


def kvgrad(
    *, chunk: int = 512, sinks: int = 4, visible: str = "part", measure: str = "norms", loss: str = "hidden"
) -> Link:
    """Score how much a loss feels a token while the model repeats its prompt."""

    def score(_: Scores, seen: Seen) -> Scores:
        seen.noise[:] = seen.choices.small * seen.recited
        return seen.recited[:, None]

    repeats = (chunk, sinks, visible, measure, loss)
    return Link(score, ((sinks, 0),), repeats=repeats, allocation=ONE_BUDGET)


def keydiff() -> Link:
    """Minus the cosine with the mean direction of the keys that are left."""

    def score(_: Scores, seen: Seen) -> Scores:
        unit = seen.key / np.linalg.norm(seen.key, axis=-1, keepdims=True)
        mean = (unit * seen.kept[..., None]).sum(axis=1) / seen.kept.sum(axis=1)[:, None]
        seen.noise[:] = 1e-6  # two keys are equally far from their mean
        return -np.einsum("kpd,kd->kp", unit, mean / np.linalg.norm(mean, axis=-1, keepdims=True))[:, None]

    return Link(score)


def key_norm() -> Link:
    """Minus the norm of the key, to 12 bits."""

    def score(_: Scores, seen: Seen) -> Scores:
        length, seen.noise[:] = _to_12_bits(np.sqrt((seen.key**2).sum(axis=-1)))
        return -length[:, None]

    return Link(score)


def q_filters(*, file: str) -> Link:
    """Minus the product with the head's filter."""

    def score(_: Scores, seen: Seen) -> Scores:
        along = np.load(file)[seen.layer].astype(np.float64)
        seen.noise[:] = 1e-6 * np.linalg.norm(seen.key, axis=-1) * np.linalg.norm(along, axis=-1)[:, None]
        return -np.einsum("kpd,kd->kp", seen.key, along)[:, None]

    return Link(score)


def curdkv(*, sinks: Amount = 4, leverage: str = "product", local_window: int | None = 16) -> Link:
    """Shares of the window's squared lengths of keys and values."""

    def score(_: Scores, seen: Seen) -> Scores:
        result = np.zeros(seen.kept.shape)
        for k, kept in enumerate(seen.kept):
            result[k, kept], seen.noise[k, kept] = leverage_scores(
                seen.key[k, kept], seen.value[k, kept], leverage, local_window
            )
        return result[:, None]

    return Link(score, ((sinks, 0),))


def leverage_scores(
    key: np.ndarray, value: np.ndarray, leverage: str, local_window: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """CurDKV of one head's tokens in order, [n, D] twice; and by how much float32 may be off."""
    n = len(key)
    window = local_window or max(n, 1)
    shares, off = {}, {}
    for name, x in (("key", key), ("value", value)):
        length, either = _to_12_bits((x**2).sum(axis=-1))
        shares[name], off[name] = np.zeros(n), np.zeros(n)
        for start in range(0, n, window):
            part = slice(start, start + window)
            total = length[part].sum() or 1.0
            shares[name][part] = length[part] / total
            off[name][part] = either[part] / total + shares[name][part] * either[part].sum() / total
    match leverage:
        case "product":
            scores = shares["key"] * shares["value"]
            noise = shares["key"] * off["value"] + shares["value"] * off["key"]
        case "mean":
            scores, noise = (shares["key"] + shares["value"]) / 2, (off["key"] + off["value"]) / 2
        case _:
            scores, noise = shares[leverage], off[leverage]
    total = scores.sum() or 1.0
    return scores / total, noise / total


def lagkv(*, sinks: int = 4, lag: int = 128, cross_scoring: bool = False) -> Link:
    """How far a token strays from the next partition's tokens."""

    def score(_: Scores, seen: Seen) -> Scores:
        result = np.zeros(seen.kept.shape)
        for k, kept in enumerate(seen.kept):
            result[k, kept], seen.noise[k, kept] = lag_scores(
                seen.key[k, kept], seen.value[k, kept], sinks, lag, cross_scoring
            )
        return result[:, None]

    return Link(score, ((sinks, lag),))


def lag_scores(
    key: np.ndarray, value: np.ndarray, sinks: int, lag: int, cross_scoring: bool
) -> tuple[np.ndarray, np.ndarray]:
    """LagKV of one head's tokens in order, [n, D] twice; and by how much float32 may be off."""

    def strays(own: np.ndarray, following: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scaled, off = np.zeros(own.shape), np.zeros(own.shape)
        largest = abs(following).max()
        for d, (lowest, highest) in enumerate(zip(following.min(axis=0), following.max(axis=0), strict=True)):
            if highest - lowest > 2**-18 * largest:
                scaled[:, d] = (own[:, d] - lowest) / (highest - lowest)
                off[:, d] = 1e-6 * (abs(own).max() + largest * (1 + abs(scaled[:, d]))) / (highest - lowest)
        power = np.exp(scaled.std(axis=1, ddof=1) - scaled.std(axis=1, ddof=1).max())
        softmax = power / power.sum()
        return softmax, softmax * (1e-6 + 2 * np.linalg.norm(off, axis=1).max())

    n = len(key)
    if n < sinks + 2 * lag:
        return np.where(np.arange(n) < sinks, 1, (np.arange(n) - sinks) / max(n - sinks, 1)), np.zeros(n)
    scores, noise = np.ones(n), np.zeros(n)
    for start in range(sinks, n - 2 * lag + 1, lag):
        own, following = slice(start, start + lag), slice(start + lag, start + 2 * lag)
        (a, off_a), (b, off_b) = strays(key[own], key[following]), strays(value[own], value[following])
        scores[own], noise[own] = (a + b) / 2, (off_a + off_b) / 2
        if not cross_scoring:
            raw, off = scores[own].copy(), noise[own].copy()
            scores[own] = np.argsort(np.argsort(raw, kind="stable")) / lag
            near = abs(raw[:, None] - raw) <= off[:, None] + off
            noise[own] = (near.sum(axis=1) - 1) / lag
    return scores, noise


def _to_12_bits(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rounds to 12 bits behind the leading one; and by how much float32 may round otherwise, half way between two."""
    mantissa, exponent = np.frexp(x)  # mantissa in [0.5, 1)
    steps = mantissa * 2**13
    halfway = abs(steps - np.floor(steps) - 0.5) < 0.05
    return np.ldexp(np.round(steps) / 2**13, exponent), np.where(halfway, np.ldexp(2.0**-12, exponent), 0.0)


def rkv(*, window: int = 8, kernel: int = 7, importance: float = 0.1, threshold: float = 0.5) -> Link:
    """The window's attention to what lies before it, less how alike a key and the other keys are."""

    def score(_: Scores, seen: Seen) -> Scores:
        K, P, D = seen.key.shape
        at, attended, alike = np.arange(P), np.zeros((K, 1, P)), np.zeros((K, P))
        last = seen.query[:, :, -window:]
        query = rope(last, at[P - last.shape[2] :], seen.frequency)
        logits = np.einsum("kgwd,kpd->kgwp", query, seen.key) / D**0.5
        logits = logits if seen.soft_cap is None else seen.soft_cap * np.tanh(logits / seen.soft_cap)
        for k, kept in enumerate(seen.kept):
            before = kept & (at < P - window)
            if before.any():
                largest = logits[k].max(axis=0)[:, before]
                power = np.exp(largest - largest.max(axis=-1, keepdims=True))
                attended[k, 0, before] = (power / power.sum(axis=-1, keepdims=True)).mean(axis=0)
            unit = seen.key[k, kept] / np.linalg.norm(seen.key[k, kept], axis=-1, keepdims=True)
            cosine = unit @ unit.T
            np.fill_diagonal(cosine, 0)
            near = abs(cosine - threshold) < 1e-5
            for row in cosine:
                if (row > threshold).any():
                    row[np.flatnonzero(row > threshold)[-1]] = 0
            power = np.exp(cosine.mean(axis=0))
            alike[k, kept] = power / power.sum()
            seen.noise[k, kept] = 1e-6 + near.any() * 2 / len(unit) * alike[k, kept]
        noise = seen.noise.copy()
        result = importance * _pooled(attended, seen, kernel, "max") - (1 - importance) * alike[:, None]
        seen.noise[:] = noise
        return result

    return Link(score, ((0, window),))


def _last_rows(seen: Seen, window: int) -> np.ndarray:
    """The attention of the last queries over the tokens that are left, [K, G, n, P]."""
    _, P, D = seen.key.shape
    last = seen.query[:, :, -window:]
    own = np.arange(P - last.shape[2], P)
    logits = np.einsum("kgnd,kpd->kgnp", rope(last, own, seen.frequency), seen.key) / D**0.5
    logits = logits if seen.soft_cap is None else seen.soft_cap * np.tanh(logits / seen.soft_cap)
    visible = (seen.kept[:, None] & (np.arange(P) <= own[:, None]))[:, None]
    power = np.where(visible, np.exp(logits - np.where(visible, logits, -np.inf).max(axis=-1, keepdims=True)), 0)
    total = power.sum(axis=-1, keepdims=True)
    return power / np.where(total > 0, total, 1)  # a query may see none that its sliding window has left


def restkv(*, window: int = 32, kernel: int = 5, alpha: float = 0.3, step: int = 2000, per: str = "window") -> Link:
    """The change of the layer's output, of the queries' moving average or its moving average; pooled."""

    def score(_: Scores, seen: Seen) -> Scores:
        rows, P = _last_rows(seen, window), seen.kept.shape[1]
        assert step > P, "the pooling is of one width and moves nowhere"
        n, before = rows.shape[2], seen.kept & (np.arange(P) < P - window)
        shares = alpha * (1 - alpha) ** np.arange(n - 1.0, -1, -1)
        shares[0] = (1 - alpha) ** (n - 1)
        if per == "window":
            rows = np.where(before[:, None], np.einsum("kgnp,n->kgp", rows, shares), 0)[:, :, None]
            shares = np.ones(1)
        behind = np.einsum("kpd,kgde->kgpe", seen.value, seen.output)
        out = np.einsum("kgnp,kgpe->kgne", rows, behind)
        rest = np.maximum(1 - rows, np.finfo(np.float32).eps)
        lengths = np.linalg.norm(out, axis=-1)[..., None] + np.linalg.norm(behind, axis=-1)[:, :, None]
        moved = rows / rest * np.linalg.norm(out[:, :, :, None] - behind[:, :, None], axis=-1)
        moved, off = (np.einsum("kgnp,n->kgp", x, shares) for x in (moved, 1e-6 * rows / rest**2 * lengths))
        result, seen.noise[:] = np.zeros(moved.shape), 0
        for k, counted in enumerate(before):
            there = np.flatnonzero(counted)
            for index, p in enumerate(there):
                near = there[np.clip(np.arange(index - kernel // 2, index + kernel // 2 + 1), 0, len(there) - 1)]
                result[k, :, p] = moved[k][:, near].mean(axis=1)
                seen.noise[k, p] = off[k][:, near].mean() + 1e-6 * result[k, :, p].mean()
        return result

    return Link(score, ((0, window),), window=window)


def defensive(*, window: int = 32, kernel: int = 5) -> Link:
    """The largest attention of a query to what is near a token, at least the mean of these."""

    def score(_: Scores, seen: Seen) -> Scores:
        rows, (K, P) = _last_rows(seen, window), seen.kept.shape
        before = (seen.kept & (np.arange(P) < P - window))[:, None]
        rows = np.where(before, rows.reshape(K, -1, P), 0)
        near = np.where(before, _pooled(rows, seen, kernel, "avg"), 0)
        total, sums = (x.sum(axis=-1, keepdims=True) for x in (rows, near))
        worst = (near / np.where(sums > 0, sums, 1) * total).max(axis=1)
        mean = worst.sum(axis=-1, keepdims=True) / np.maximum(before.sum(axis=-1), 1)
        seen.noise[:] = np.where(worst < (1 - 1e-5) * mean, 0, 2e-6 * worst)  # float32 has one number for all of them
        return np.where(before, np.maximum(worst, mean)[:, None], 0)

    return Link(score, ((0, window),), window=window)


def triattention(*, file: str, future: int = 65536) -> Link:
    """The mean query's logit at positions to come, and lengths in place of what queries differ by, by deviations."""

    def score(_: Scores, seen: Seen) -> Scores:
        D, P = seen.key.shape[2], seen.key.shape[1]
        own = np.load(file)[seen.layer].astype(np.float64)  # [K, G, 3 D / 2]
        mean, length = own[..., : D // 2] + 1j * own[..., D // 2 : D], own[..., D:]
        ahead = P + 2 ** np.arange(future.bit_length())
        turn = np.exp(1j * ahead[:, None] * seen.frequency).mean(axis=0)
        key = seen.key[..., : D // 2] + 1j * seen.key[..., D // 2 :]
        found = np.einsum("kgf,kpf->kgp", mean * turn, key.conj()).real
        found = found + np.einsum("kgf,kpf->kgp", length - abs(mean), abs(key))
        result = np.zeros(found.shape)
        for k, kept in enumerate(seen.kept):
            there = found[k][:, kept]
            deviation = np.maximum(there.std(axis=-1, keepdims=True), 1e-6)
            result[k][:, kept] = (there - there.mean(axis=-1, keepdims=True)) / deviation
            off = 1e-6 * (1 + 1e-2 * ahead[-1]) * abs(mean[k]).max() * abs(key[k]).max()  # of float32's large angles
            seen.noise[k] = off / deviation.min()
        return result.max(axis=1, keepdims=True)

    return Link(score)


def random(*, seed: int = 0) -> Link:
    """A number for each token, head and layer: MurmurHash3's finaliser over the three, the upper 24 bits of it."""
    return Link(lambda _, seen: _drawn(seen, seed)[:, None])


def _drawn(seen: Seen, seed: int) -> np.ndarray:
    def mix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
        x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
        return x ^ (x >> 16)

    K, P = seen.kept.shape
    hashes = [[mix(seed ^ mix(seen.layer ^ mix(k ^ mix(p)))) for p in range(P)] for k in range(K)]
    return np.array(hashes) // 256 / 2**24


# --- what changes scores ---------------------------------------------------------------------------------------------


def normalise() -> Link:
    """Shares of 1; scores that may be negative are lifted first, so that the lowest one is 0."""

    def score(scores: Scores, seen: Seen) -> Scores:
        lowest = np.minimum(np.where(seen.kept[:, None], scores, np.inf).min(axis=-1, keepdims=True), 0)
        lifted = np.where(scores - lowest > TIE * abs(scores), scores - lowest, 0)
        total = np.where(seen.kept[:, None], lifted, 0).sum(axis=-1).mean(axis=1)[:, None]
        seen.noise[:] = seen.noise / np.where(total > 0, total, 1)
        return _shares(lifted, seen)

    return Link(score)


def pool(*, kernel: int = 5, pooling: str = "avg") -> Link:
    return Link(lambda scores, seen: _pooled(scores, seen, kernel, pooling))


def chunks(*, size: int = 20, heads: str = "group") -> Link:
    """The mean over a chunk of the text; what is protected has no part in it."""

    def score(scores: Scores, seen: Seen) -> Scores:
        result, noise = scores + np.zeros((len(seen.kept), 1, 1)), seen.noise.copy()
        for k, counted in enumerate(seen.kept & ~seen.protected):
            for first in range(0, len(counted), size):
                at = first + np.flatnonzero(counted[first : first + size])
                if len(at):
                    result[k][:, at] = scores[k][:, at].mean(axis=1, keepdims=True)
                    seen.noise[k, at] = noise[k, at].mean()
        return result

    return Link(score, heads=heads)


def protect(*, sinks: Amount | None = None, recent: Amount | None = None) -> Link:
    return Link(protects=((sinks, recent),))


def positions(*, kind: str = "compact") -> Link:
    return Link(positions=kind)


def merge(*, similarity: float = 0.0) -> Link:
    """A value goes to that of the most similar key (D2O)."""

    def merged(head: Leaving) -> np.ndarray:
        unit = head.key / np.linalg.norm(head.key, axis=-1, keepdims=True)
        taken: dict[int, list[tuple[float, np.ndarray]]] = {}
        for p in head.gone if len(head.kept) else ():
            cosine = unit[head.kept] @ unit[p]
            nearest = head.choices.best(cosine, head.kept, 1, noise=np.full(len(cosine), 1e-6), open_ties=True)[0]
            near, target = float(cosine[nearest]), int(head.kept[nearest])
            if near > 0 and not (similarity > 0 and head.choices.below(np.array([near]), similarity)[0]):
                own, other = (np.linalg.norm(head.value[q]) for q in (p, target))
                taken.setdefault(target, []).append((near * own / (own + other + 1e-6), head.value[p]))
        result = head.value.copy()
        for target, those in taken.items():
            weights = np.array([1.0] + [w for w, _ in those])
            result[target] = weights @ np.stack([head.value[target]] + [v for _, v in those]) / weights.sum()
        return result

    return Link(merged=merged)


def cam(*, window: int = 32) -> Link:
    """A value is shared among the next tokens, in as far as it was attended to as much as they (CaM)."""

    def merged(head: Leaving) -> np.ndarray:
        result = head.value.copy()
        for p in head.gone:
            next_ones = [q for q in head.kept if q > p][:window]
            if next_ones and head.received[p] > 0:
                mean = head.received[next_ones].mean()
                chance = 1.0 if mean <= head.received[p] else head.received[p] / mean
                result[next_ones] += chance * head.value[p] / len(next_ones)
        return result

    return Link(merged=merged)


def match() -> Link:
    """Give what stays the mass and outputs that sample queries had of all (arXiv 2602.16284, equations 3 and 4)."""

    def merged(head: Leaving) -> tuple[np.ndarray, np.ndarray]:
        value, bias = head.value.copy(), head.bias.copy()
        if len(head.gone) and len(head.kept):
            there = np.sort(np.concatenate([head.gone, head.kept]))
            logits = head.sampled[:, there] @ head.key[there].T + bias[there]  # [G, n, n]
            logits = np.where(there < head.since[there, None], logits, -np.inf).reshape(-1, len(there))
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            chosen = weights[:, np.searchsorted(there, head.kept)]
            factor = _masses(chosen, bias[head.kept])
            share = chosen * factor
            total = share.sum(axis=1, keepdims=True)
            share /= np.where(total > 0, total, 1)
            missing = np.where(total > 0, weights @ value[there] - share @ value[head.kept], 0)
            system, _ = _with_ridge(share)
            value[head.kept] += np.linalg.solve(system, share.T @ missing)
            bias[head.kept] += np.log(factor)
        return value, bias

    return Link(merged=merged)


def moments() -> Link:
    """Scores times how far a value is from what those of the evicted tokens say of its key (arXiv 2606.01563)."""

    def score(scores: Scores, seen: Seen) -> Scores:
        length, D = np.zeros(seen.kept.shape), seen.key.shape[2]
        for k, kept in enumerate(seen.kept):
            moved = seen.value[k] - expected(seen.key[k, ~kept], seen.value[k, ~kept], seen.key[k] / math.sqrt(D))
            length[k] = np.linalg.norm(moved, axis=-1)
        size = np.where(seen.kept, abs(scores).max(axis=1), 0) * abs(seen.value).max()
        seen.noise[:] = seen.noise * length + 1e-6 * size
        return scores * length[:, None]

    return Link(score, corrects=True)


def sample(*, power: float = 2.5, seed: int = 0) -> Link:
    """Keep the largest s ** power / u; what stays with the probability p counts 1 / p times (Duffield and others)."""

    def score(scores: Scores, seen: Seen) -> Scores:
        mean = scores.mean(axis=1)
        weight = np.clip(power * np.log(np.maximum(mean, np.finfo(np.float32).tiny)), -60, 60)
        priority = weight - np.log(_drawn(seen, seed) + 2.0**-25)
        # Both sides of a choice may be off; a score that is near 0 by rounding may be any number below its noise.
        off = power * seen.noise / np.maximum(mean, np.finfo(np.float32).tiny) + 1e-6 * abs(priority)
        seen.noise[:] = np.exp(np.minimum(priority + off, 80)) - np.exp(priority)
        seen.memory["sample"] = weight, np.where(seen.protected, np.inf, priority)
        return np.exp(priority)[:, None]

    def merged(head: Leaving) -> tuple[np.ndarray, np.ndarray]:
        weight, priority = (x[head.head] for x in head.memory["sample"])
        bias, tested = head.bias.copy(), head.gone[np.isfinite(priority[head.gone])]
        threshold = priority[tested].max(initial=-np.inf)
        stays = head.kept[np.isfinite(priority[head.kept]) & (priority[head.kept] > threshold)]
        bias[stays] = np.maximum(bias[stays], threshold - weight[stays])
        return head.value, bias

    return Link(score, merged=merged, weighs=True)


def expected(key: np.ndarray, value: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Attention of vectors [..., D] to tokens [n, D], if exp(x) were 1 + x around the mean logit; 0 without tokens."""
    if not len(key):
        return np.zeros_like(vectors)
    logits = np.einsum("...d,nd->...n", vectors, key - key.mean(axis=0))
    return np.einsum("...n,nd->...d", (1 + logits) / len(key), value)


def _masses(weights: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The factors for which the mass of the chosen [n, t] is nearest 1, near 1 and with a bias within 3 of 0.

    By 128 steps of Nesterov's gradient, begun anew where they lead uphill: so many do not always reach the optimum.
    """
    system, ridge = _with_ridge(weights)
    low, high = (np.exp(np.clip(end - bias, -10, 10)) for end in (-3, 3))
    low, high = np.minimum(low, 1), np.maximum(high, 1)
    wanted = weights.sum(axis=0) + ridge
    found = ahead = np.clip(np.linalg.solve(system, wanted), low, high)
    momentum = 1.0
    for _ in range(128):
        new = np.clip(ahead - (system @ ahead - wanted) / abs(system).sum(axis=0).max(), low, high)
        uphill = (ahead - new) @ (new - found) > 0
        momentum = 1.0 if uphill else momentum
        grown = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        ahead = new if uphill else new + (momentum - 1) / grown * (new - found)
        found, momentum = new, 1.0 if uphill else grown
    return np.where(weights.any(axis=0), found, 1)


def _with_ridge(columns: np.ndarray) -> tuple[np.ndarray, float]:
    """The normal equations' matrix of columns [n, t] with a ridge, and the ridge."""
    gram = columns.T @ columns
    ridge = 1e-3 * gram.diagonal().max(initial=0) + np.finfo(np.float32).tiny
    return gram + ridge * np.eye(len(gram)), ridge


def critical(*, safe: float = 0.5, epsilon: float = 1e-4) -> Link:
    """The best stay; the others count by |v W_O|_1 as well (CriticalKV)."""

    def score(scores: Scores, seen: Seen) -> Scores:
        joined = np.where(seen.kept, scores.mean(axis=1), 0)
        first = np.where(seen.protected, np.inf, joined)
        number = _count(float(safe), seen.budget)
        certain = np.stack([seen.best(k, first[k], seen.kept[k], number) for k in range(len(first))])
        length = abs(np.einsum("kpd,kgde->kpge", seen.alone, seen.output)).sum(axis=-1).mean(axis=-1)
        length, either = _to_12_bits(length)
        seen.noise[:] = (joined + epsilon) * either + seen.noise * length
        return np.minimum((joined + epsilon) * length, LARGEST)[:, None], certain

    return Link(score)


def caote(
    *,
    norm: int | str = 2,
    group: str = "exact",
    fast: bool = False,
    target: str = "value",
    cross: bool = True,
    per: str = "head",
    over: str = "mean",
) -> Link:
    """Theorem 3.2: how far the outputs of the group's heads, or the layer's, move when a token goes."""
    if per == "query":
        joined = _root_of_squares("sum" if (target, group) == ("value", "exact") else "mean", target)
        return joined._replace(largest=over == "max")

    def errors(weights: np.ndarray, k: int, there: np.ndarray, seen: Seen, before: np.ndarray) -> np.ndarray:
        """Of the tokens that are there, whose weights [G, n] need not sum to 1; ``before`` is the weights' noise."""
        V = seen.value[k][there]
        total = weights.sum(axis=1, keepdims=True)
        others = np.stack([np.delete(weights, j, axis=1).sum(axis=1) for j in range(len(V))], axis=1)
        X = np.broadcast_to(V.mean(axis=0), (len(weights), V.shape[1]))
        if not fast:
            X = weights @ V / np.where(total > 0, total, 1)
        moved = (weights / np.where(others > 0, others, 1))[..., None] * (X[:, None] - V)  # [G, n, D]
        if target == "output":
            moved = np.einsum("gnd,gde->gne", moved, seen.output[k])
            moved = moved.sum(axis=0, keepdims=True) if cross else moved
        length = np.linalg.norm(np.concatenate(list(moved), axis=-1), {"inf": np.inf}.get(norm, norm), axis=-1)
        scale = np.linalg.norm(seen.output[k], axis=(1, 2), ord=2)[:, None] if target == "output" else 1.0
        size = abs(V).max() * V.shape[1] ** 0.5
        scale = (scale * weights / np.where(others > 0, others, 1)).sum(axis=0) * size
        seen.noise[k, there] = scale * 1e-6 + size * before[k, there] + 1e-36
        return np.where(((weights > 0) & (others == 0)).any(axis=0), LARGEST, length)

    def score(scores: Scores, seen: Seen) -> Scores:
        weights = _shares(scores, seen)
        weights = weights.mean(axis=1, keepdims=True) if group == "mean" else weights
        if target == "output":  # W_O tells the heads of a group apart, even where their scores do not
            weights = np.broadcast_to(weights, (*seen.output.shape[:2], weights.shape[-1]))
        result, before = np.full(seen.kept.shape, -np.inf), seen.noise.copy()
        for k, kept in enumerate(seen.kept):
            result[k, kept] = errors(weights[k][:, kept], k, kept, seen, before)
        return result[:, None]

    return Link(score)


def _root_of_squares(join: str, target: str) -> Link:
    """Take what the base score makes of squared changes, joined over the group."""

    def score(scores: Scores, seen: Seen) -> Scores:
        squares = getattr(scores, join)(axis=1)
        off = seen.noise * (scores.shape[1] if join == "sum" else 1)
        seen.noise[:] = np.sqrt(squares + off) - np.sqrt(np.maximum(squares - off, 0))
        return np.sqrt(np.maximum(squares, 0))[:, None]

    return Link(score, errors=target)


def fast_caote(**options: Any) -> Link:
    return caote(fast=True, **options)


LINKS: dict[str, Callable[..., Link]] = {
    make.__name__: make
    for make in (
        h2o, tova, snapkv, dropkv, dapq, finch, streaming, sage, laprox, cake, lava, expected_attention, butler, zap,
        trimkv,
        kvzip, kvgrad, recency, keydiff, key_norm, q_filters, curdkv, lagkv, rkv, restkv, defensive, triattention,
        random, normalise, pool, chunks, protect, positions, merge, cam, match, moments, sample,
        critical, caote, fast_caote,
    )
}  # fmt: skip


def _shares(scores: Scores, seen: Seen) -> Scores:
    """CAOTE, eq. 21: h / sum h over the tokens that are there; 0 where float32 has no number so small."""
    scores = np.where(seen.kept[:, None], scores, 0)
    total = scores.sum(axis=-1, keepdims=True)
    shares = scores / np.where(total == 0, 1, total)
    return np.where(shares < np.finfo(np.float32).tiny, 0, shares)


def _pooled(scores: Scores, seen: Seen, kernel: int, pooling: str) -> Scores:
    """The mean (beyond the ends stand zeros) or the maximum of a token's neighbours among those that are left."""
    result, noise = np.zeros(scores.shape), np.zeros(seen.noise.shape)
    for k in range(scores.shape[0]):
        there = np.flatnonzero(seen.kept[k])
        for index, p in enumerate(there):
            window = there[max(0, index - kernel // 2) : index + kernel // 2 + 1]
            near = scores[k][:, window]
            result[k, :, p] = near.sum(axis=1) / kernel if pooling == "avg" else near.max(axis=1)
            noise[k, p] = seen.noise[k, window].max()
    # Sums of the same numbers in another order differ, too.
    seen.noise[:] = noise + (1e-6 * abs(result).mean(axis=1) if pooling == "avg" else 0)
    return result


def _pooled_before(scores: Scores, seen: Seen, window: int, kernel: int, pooling: str) -> Scores:
    """The window's own tokens keep their scores, and count as 0 for their neighbours."""
    before = np.arange(scores.shape[-1]) < scores.shape[-1] - window
    return np.where(before, _pooled(np.where(before, scores, 0), seen, kernel, pooling), scores)
