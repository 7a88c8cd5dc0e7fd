"""The allocations in plain NumPy: sorts over the tokens of one row, as far from the implementation as they can be.

A token is (layer, head, position, score), a kept set is a set of (layer, head, position). An allocation is handed the
``counts`` of tokens that each head was seen to keep, [L, K]; with None it rounds the layers' budgets itself.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

LARGEST = float(np.finfo(np.float32).max)


class Token(NamedTuple):
    layer: int
    head: int
    position: int
    score: float


def best(tokens: list[Token], number: int, *, open_ties: bool = False) -> list[Token]:
    """The first by (score, position), then from the lowest layer and head; NaN is worse than all else."""

    def rank(t: Token) -> tuple:
        score = 0.0 if np.isnan(t.score) else t.score + 0.0
        return not np.isnan(t.score), score, t.position, -t.layer, -t.head

    return sorted(tokens, key=rank, reverse=True)[: max(number, 0)]


class Row(NamedTuple):
    """One batch row of L layers and K heads; ``preference`` is what was measured, [L]. ``best`` chooses; where a
    definition leaves open who wins a tie, it is told so by ``open_ties``. ``windows`` are the layers' sliding windows,
    above which a layer's budget does not go; () for none.
    """

    tokens: list[Token]
    L: int
    K: int
    budget: int
    seen: int
    entered: int = 0
    preference: np.ndarray | None = None
    best: Callable[..., list[Token]] = best
    windows: tuple[int | None, ...] = ()

    @property
    def budgets(self) -> list[int]:
        """Return the budget of each layer, [L]."""
        return [min(self.budget, window or self.budget) for window in self.windows or (None,) * self.L]

    def of(self, layer: int, head: int | None = None) -> list[Token]:
        return [t for t in self.tokens if t.layer == layer and head in (None, t.head)]

    def heads(self):
        return np.ndindex(self.L, self.K)

    @property
    def protected(self) -> int:
        most = max(sum(t.score == np.inf for t in self.of(*head)) for head in self.heads())
        return min(most, max(self.budgets))


def certain(t: Token) -> bool:
    return t.score >= LARGEST


def capped(row: Row, cap: float | None) -> Row:
    if cap is None:
        return row
    limits = share_of_each(cap, row)
    return row._replace(tokens=[t for head in row.heads() for t in row.best(row.of(*head), limits[head[0]])])


def share_of_each(share: float, row: Row) -> np.ndarray:
    """A share, or a multiple, of each layer's budget, [L]."""
    return np.array([int(round(share * 1000) * budget // 1000) for budget in row.budgets])


def shares(row: Row, dtype: type = np.float32) -> Row:
    """Scores divided by their sum over the layer; what is certain stays as it is."""
    tokens = []
    for layer in range(row.L):
        counted = {place(t) for t in row.of(layer) if not certain(t) and t.score > -np.inf}
        total = dtype(sum(np.float64(t.score) for t in row.of(layer) if place(t) in counted)) or dtype(1)
        tokens += [t._replace(score=float(dtype(t.score) / total)) if place(t) in counted else t for t in row.of(layer)]
    return row._replace(tokens=tokens)


def poured(room: np.ndarray, weight: np.ndarray, total: float) -> np.ndarray:
    """A total shared out in proportion to weights, none above its room."""
    weight = np.asarray(weight, float) if np.sum(weight) > 0 else np.ones(len(room))
    weight = np.maximum(weight / weight.sum(), 1e-6)
    share, full = np.zeros(len(room)), np.zeros(len(room), bool)
    while not full.all():
        share = np.where(full, room, weight * (total - room[full].sum()) / weight[~full].sum())
        if not (share > room + 1e-9).any():
            break
        full |= share >= room - 1e-9
    return np.minimum(share, room)


def whole(row: Row, share: np.ndarray, room: np.ndarray, total: int) -> np.ndarray:
    """The shares of the layers rounded down, and one more for those that lost most by it, so that they add up."""
    count = np.clip(np.floor(share).astype(int), 0, room)
    lost = [Token(i, 0, 0, share[i] - count[i]) for i in np.flatnonzero(count < room)]
    for token in row.best(lost, total - count.sum(), open_ties=True):
        count[token.layer] += 1
    for i in range(len(count)):  # what the room forbids goes to the first layers (or heads) that can take it
        count[i] += np.clip(total - count.sum(), -count[i], room[i] - count[i])
    return count


def uniform(row: Row, counts) -> list[Token]:
    return [t for head in row.heads() for t in row.best(row.of(*head), row.budgets[head[0]])]


def layer(row: Row, counts, *, cap: float | None = 8.0) -> list[Token]:
    row = capped(row, cap)
    return [t for one in range(row.L) for t in row.best(row.of(one), row.budgets[one] * row.K)]


def adakv(row: Row, counts, *, safeguard: float = 0.2, cap: float | None = 8.0) -> list[Token]:
    number = share_of_each(safeguard, row)
    safe = [t for head in row.heads() for t in row.best(row.of(*head), number[head[0]])]
    kept = layer(row._replace(tokens=[t._replace(score=np.inf) if t in safe else t for t in row.tokens]), None, cap=cap)
    assert set(map(place, safe)) <= set(map(place, kept))
    return kept


def model(row: Row, counts, *, normalise: bool = True, cap: float | None = 8.0) -> list[Token]:
    row = capped(shares(row, np.float64 if counts is None else np.float32) if normalise else row, cap)
    return row.best(row.tokens, sum(row.budgets) * row.K)


def threshold(row: Row, counts, *, least: float = 0.01, cap: float | None = 8.0) -> list[Token]:
    kept = capped(row, cap)
    return [t for t in row.best(kept.tokens, sum(row.budgets) * row.K) if t.score >= np.float32(least)]


def pyramid(row: Row, counts: np.ndarray, *, beta: float = 20.0) -> list[Token]:
    fixed = row.protected
    free = sum(row.budgets) / row.L - fixed
    first = min(free * (2 - 1 / beta), max(row.seen - fixed, free))
    step = np.linspace(0, 1, row.L) if row.L > 1 else np.array([0.5])
    held = np.array([len(row.of(one)) // row.K for one in range(row.L)])
    held = np.minimum(held, min(2, row.L * row.K) * np.array(row.budgets))
    share, lowest = first - 2 * (first - free) * step, np.minimum(fixed, held)
    expected = np.minimum(share + fixed, held)
    total = min(sum(row.budgets), held.sum()) - lowest.sum()
    each = lowest + whole(row, share, held - lowest, total) if counts is None else counts[:, 0]
    if counts is not None:
        np.testing.assert_array_equal(counts, each[:, None].repeat(row.K, axis=1))
    assert each.sum() == min(sum(row.budgets), held.sum())
    if expected.sum() > each.sum() - 1:  # no layer is short of tokens
        assert (abs(each - expected) < 1 + 1e-3).all()
    return [t for head in row.heads() for t in row.best(row.of(*head), each[head[0]])]


def cake(row: Row, counts: np.ndarray, *, cap: float | None = 8.0, **options) -> list[Token]:
    held = np.array([len(row.of(one)) // row.K for one in range(row.L)])
    weight = row.preference
    if not weight.sum() > 0:
        weight = np.maximum(held - row.entered - row.protected, 0)
    if cap is not None:
        held = np.minimum(held, [int(cap * budget) for budget in row.budgets])
    fixed = np.minimum(row.protected, held)
    total = min(sum(row.budgets), held.sum()) - fixed.sum()
    share = poured(held - fixed, weight, total)
    each = fixed + whole(row, share, held - fixed, total) if counts is None else counts[:, 0]
    if counts is not None:
        np.testing.assert_array_equal(counts, each[:, None].repeat(row.K, axis=1))
    assert each.sum() == min(sum(row.budgets), held.sum())
    assert (abs(each - fixed - share) < 1 + 1e-3).all()
    return [t for head in row.heads() for t in row.best(row.of(*head), each[head[0]])]


def d2o(row: Row, counts: np.ndarray, *, cap: float | None = 8.0, window: int | None = None) -> list[Token]:
    return cake(row, counts, cap=cap)


def d2o_preference(least: np.ndarray, mean: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Variances [L, K] of the query heads, as what exp makes of their mean between the smallest and the largest."""
    low = least.min(axis=1)
    return np.exp(-(mean.mean(axis=1) - low) / (most.max(axis=1) - low + 1e-6))


def lava(row: Row, counts: np.ndarray, *, cap: float | None = 8.0) -> list[Token]:
    weight = []
    for one in range(row.L):
        scores = np.array([t.score for t in row.of(one) if not certain(t) and not np.isnan(t.score)])
        p = scores[scores > 0] / scores[scores > 0].sum()
        weight.append(-(p * np.log(p)).sum() / np.log(max(2, sum(not certain(t) for t in row.of(one)))))
    row = capped(row, cap)
    held = np.array([len(row.of(one)) for one in range(row.L)])
    fixed = np.minimum(row.protected * row.K, held)
    total = min(sum(row.budgets) * row.K, held.sum()) - fixed.sum()
    share = poured(held - fixed, np.array(weight), total)
    each = fixed + whole(row, share, held - fixed, total) if counts is None else counts.sum(1)
    assert each.sum() == total + fixed.sum()
    assert (abs(each - fixed - share) < 1 + 1e-3).all()
    return [t for one in range(row.L) for t in row.best(row.of(one), each[one])]


def of_heads(row: Row, counts, least: np.ndarray, weight: np.ndarray, cap: float | None) -> list[Token]:
    """``least`` slots to each head [L, K], and the rest in proportion to the weights."""
    held = np.array([[len(row.of(one, k)) for k in range(row.K)] for one in range(row.L)])
    if cap is not None:
        held = np.minimum(held, share_of_each(cap, row)[:, None])
    fixed = np.minimum(np.maximum(least, row.protected), held)
    room = (held - fixed).ravel()
    total = min(sum(row.budgets) * row.K - fixed.sum(), room.sum())
    share = poured(room, weight.ravel(), total)
    if counts is None:
        each = fixed + whole(row, share, room, total).reshape(fixed.shape)
    else:
        each = counts
        assert counts.sum() == fixed.sum() + total
        assert (abs(counts - fixed - share.reshape(fixed.shape)) < 1 + 1e-3).all()
    return [t for head in row.heads() for t in row.best(row.of(*head), each[head])]


def headkv(row: Row, counts, *, file: str, beta: float = 1.5, cap: float | None = 8.0) -> list[Token]:
    least = [budget - math.floor((budget - row.protected) / beta) for budget in row.budgets]
    return of_heads(row, counts, np.repeat(np.array(least)[:, None], row.K, axis=1), np.load(file), cap)


def lukv(row: Row, counts, *, file: str, cap: float | None = 8.0) -> list[Token]:
    mean = np.float32(sum(row.budgets)) / np.float32(row.L)
    percent = int(np.round(100 * (1 - mean / np.float32(max(row.seen, 1)))))
    stays = 1 - np.load(file)[min(max(percent, 1), 99) - 1].astype(np.float64)
    wanted = np.maximum(stays * row.seen - row.protected, 0)
    return of_heads(row, counts, np.zeros((row.L, row.K), int), wanted, cap)


def streamed(row: Row, counts, streams: np.ndarray, sinks: float, recent: float, cap: float | None) -> list[Token]:
    """Heads that stream [L, K] keep first and last tokens; the others the best, of what is left of the budget."""
    first, last = np.array([streaming_counts(budget, sinks, recent) for budget in row.budgets]).T
    tokens = [
        t._replace(score=LARGEST if t.position < first[t.layer] else float(t.position))
        if streams[t[:2]] and t.score != np.inf
        else t
        for t in row.tokens
    ]
    least = np.where(streams, (first + last)[:, None], 0)
    return of_heads(row._replace(tokens=tokens), counts, least, np.where(streams, 0.0, 1.0), cap)


def streaming_counts(budget: int, sinks: float, recent: float) -> tuple[int, int]:
    first, last = (x if isinstance(x, int) else int(round(x * 10_000) * budget // 10_000) for x in (sinks, recent))
    first = min(first, budget)
    return first, min(last, budget - first)


def duo(row: Row, counts, *, file: str, streaming=0.5, sinks=128, recent=256, cap: float | None = 8.0) -> list[Token]:
    importance = np.load(file)
    streams = np.zeros(importance.size, bool)
    streams[np.argsort(importance, axis=None, kind="stable")[: round(streaming * importance.size)]] = True
    return streamed(row, counts, streams.reshape(importance.shape), sinks, recent, cap)


def simlayer(row: Row, counts, *, threshold=0.9, sinks=4, recent=1024, cap: float | None = 8.0) -> list[Token]:
    """``preference`` is whether a layer is lazy, 1 or 0."""
    streams = np.broadcast_to(row.preference[:, None] > 0, (row.L, row.K))
    return streamed(row, counts, streams, sinks, recent, cap)


def place(token: Token) -> tuple[int, int, int]:
    return token[:3]


def check(allocation: str, options: dict, row: Row, kept: set[tuple[int, int, int]]) -> None:
    """That an allocation keeps what its definition does. Where a definition leaves the rounding of the layers' budgets
    open, their sizes are read from what was kept, and held against the unrounded ones.
    """
    counts = np.array([[sum(t[:2] == (one, k) for t in kept) for k in range(row.K)] for one in range(row.L)])
    expected = {place(t) for t in DEFINITIONS[allocation](row, counts, **options)}
    assert kept == expected, (allocation, options, sorted(kept - expected), sorted(expected - kept))


DEFINITIONS = {
    f.__name__: f
    for f in (uniform, layer, adakv, model, threshold, pyramid, cake, d2o, lava, headkv, lukv, duo, simlayer)
}
