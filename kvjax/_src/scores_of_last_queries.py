"""Base scores that read each of the last queries apart: ReST-KV, and the worst case of DefensiveKV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.softmax import scaled
from kvjax._src.cache import HeadState
from kvjax._src.chains import register
from kvjax._src.checks import check_count
from kvjax._src.observation import Needs, Observation
from kvjax._src.policy import Policy, Protection, Scores, Timing
from kvjax._src.projection import part_of
from kvjax._src.short_names import check_number
from kvjax._src.topk import best_of_heads, rank
from kvjax._src.transforms import check_kernel, pooled

_HIGH = jax.lax.Precision.HIGHEST


class LastQueries(NamedTuple):
    """A head's last queries, rotated, and their positions from 1; 0 where there is none yet."""

    query: HeadState  # [B, K, window, G, D]
    place: HeadState  # [B, K, window]


def no_queries(window: int) -> Callable[[int, int, int, int, int], LastQueries]:
    """Return the ``init`` of a policy whose state are a head's last queries."""
    return lambda B, K, G, S, D: LastQueries(
        HeadState(jnp.zeros((B, K, window, G, D), jnp.float32)), HeadState(jnp.zeros((B, K, window), jnp.int32))
    )


def with_last(state: LastQueries, o: Observation) -> LastQueries:
    """Return the last queries of a head behind a block; those of tokens that were taken back leave."""
    B, T = o.query_position.shape
    _, K, window, G, D = state.query.value.shape
    entering = jnp.where(o.query_position >= 0, o.query_position + 1, 0)
    first = jnp.min(jnp.where(entering > 0, entering, jnp.iinfo(jnp.int32).max), axis=1)[:, None, None]
    before = jnp.where(state.place.value < first, state.place.value, 0)
    place = jnp.concatenate([before, jnp.broadcast_to(entering[:, None], (B, K, T))], axis=2)
    new = jnp.moveaxis(o.query.astype(jnp.float32).reshape(B, T, K, G, D), 1, 2)
    query = jnp.concatenate([state.query.value, new], axis=2)
    place, chosen = jax.lax.top_k(place, window)
    query = jnp.take_along_axis(query, chosen[..., None, None], axis=2)
    return LastQueries(HeadState(query), HeadState(place))


@register
def restkv(
    *,
    window: int = 32,
    kernel: int = 5,
    alpha: float = 0.3,
    step: int = 2000,
    per: Literal["window", "query"] = "window",
) -> Policy:
    """Score a token by how a layer's output would move without it, smoothed in time and space (ReST-KV).

    The paper is arXiv 2605.08840. Each query head has one weight a per token, the moving average of the last queries'
    weights, and of the tokens before the window one output x. The score is ``a / (1 - a) |(x - v) W_O|``, pooled over
    neighbours: as many more as attention moved between the halves of the window, and to that side. The group's mean
    counts, where the authors keep tokens for each query head. The window's own tokens stay. The last queries are kept
    with the head, and positions must be absolute.

    All defaults are those of the authors' commands for LongBench.

    Args:
        window: how many of the last queries observe, and how many of the last tokens stay.
        kernel: the least width of the average pooling over neighbours in position order, an odd number.
        alpha: the weight of the newest query in the moving average, in (0, 1].
        step: the pooling takes a neighbour more on each side, and shifts by one, for as many positions as the mean
            place of the best tokens has moved between the first half of the window and the second.
        per: "window" as above; "query" computes the change of each query's own output, and averages the changes.

    Raises:
        ValueError: when it runs without the layer's output projection.

    Example:
        >>> import kvjax
        >>> policy = kvjax.parse("restkv(window=16)@adakv")
        >>> policy.protected(64), policy.needs.projections
        ((0, 16), frozenset({'gram'}))
    """
    check_kernel("restkv", kernel)
    check_number("restkv", "alpha", alpha, 1e-6, 1, "a weight in (0, 1]")
    check_count("restkv: step", step, 1, "give a number of positions, an int from 1")

    def score(state: LastQueries, o: Observation) -> Scores:
        weights, there = _weights(state, o)
        before = _before(o, window)
        shares = _averaging(there, alpha)
        if per == "query":
            out = jnp.einsum("bkgws,bksd->bkgwd", weights, o.live_value, precision=_HIGH)
            moved = jnp.einsum("bkgws,bkw->bkgs", _odds(weights) * _changes_behind(out, o), shares, precision=_HIGH)
        else:
            mean = jnp.where(before, jnp.einsum("bkgws,bkw->bkgs", weights, shares, precision=_HIGH), 0)
            out = jnp.einsum("bkgs,bksd->bkgd", mean, o.live_value, precision=_HIGH)
            moved = _odds(mean) * _changes_behind(out[:, :, :, None], o)[:, :, :, 0]
        drift = _drift(weights, there, o, window)
        return jnp.where(before, _pooled_along(moved, before[:, :, 0], o, kernel // 2, jnp.trunc(drift / step)), 0)

    published = Timing("prompt", 0, "arXiv 2605.08840, its authors' code: compresses the prompt, before generation")
    needs = Needs(window=window, projections=frozenset({"gram"}), queries=True, order=True)
    return _of_last_queries("restkv", window, score, needs, published)


@register
def defensive(*, window: int = 32, kernel: int = 5) -> Policy:
    """Score a token by the most attention that any of the last queries pays it (DefensiveKV, arXiv 2510.13334).

    Each query's weights are pooled over neighbours, and scaled to the sum that they had. The largest counts, over the
    window's queries and the heads of the group; no token scores less than their mean over the tokens, so that what no
    query has seen yet is not ruled out. The window's own tokens stay. The last queries are kept with the head, and
    positions must be absolute.

    It is the aggregation alone; :func:`kvjax.defensivekv` is the method. The defaults are those of the authors' code.

    Args:
        window: how many of the last queries observe, and how many of the last tokens stay.
        kernel: width of the average pooling over neighbours in position order, an odd number.

    Example:
        >>> import kvjax
        >>> kvjax.defensive(window=16).protected(64)
        (0, 16)
    """
    check_kernel("defensive", kernel)

    def score(state: LastQueries, o: Observation) -> Scores:
        weights, _ = _weights(state, o)
        B, K, G, _, S = weights.shape
        before = _before(o, window)
        rows = jnp.where(before, weights.reshape(B, K, G * window, S), 0)
        near = jnp.where(before, pooled(rows, o, kernel, "avg"), 0)
        total, sums = (jnp.sum(x, axis=-1, keepdims=True) for x in (rows, near))
        worst = jnp.max(near / jnp.where(sums > 0, sums, 1) * total, axis=2, keepdims=True)
        mean = jnp.sum(worst, axis=-1, keepdims=True) / jnp.maximum(jnp.sum(before, axis=-1, keepdims=True), 1)
        return jnp.where(before, jnp.maximum(worst, mean), 0)

    published = Timing("prompt", 0, "arXiv 2510.13334, its authors' code: compresses the prompt, before generation")
    return _of_last_queries("defensive", window, score, Needs(window=window, queries=True, order=True), published)


def _of_last_queries(
    name: str, window: int, score: Callable[[LastQueries, Observation], Scores], needs: Needs, published: Timing
) -> Policy:
    """Return a base score of the head's last queries, which are its state."""
    check_count(f"{name}: window", window, 1, "give the number of queries that observe, an int from 1")

    def update(_: Scores, state: LastQueries, o: Observation) -> tuple[Scores, LastQueries]:
        state = with_last(state, o)
        return score(state, o), state

    protection = Protection(recent=window)
    return Policy(name, no_queries(window), update, needs, protection, base=True, nonnegative=True, published=published)


def _before(o: Observation, window: int) -> Bool[Array, "B K 1 S"]:
    """Return which slots hold a token from before the window."""
    return (o.live & (o.position < (o.next_position - window)[:, None, None]))[:, :, None]


def _weights(state: LastQueries, o: Observation) -> tuple[Float[Array, "B K G w S"], Bool[Array, "B K w"]]:
    """Return the last queries' attention over the tokens that are held, the newest query first, and which are there."""
    query, place = state.query.value, state.place.value
    _, K, _, G, D = query.shape
    logits = jnp.einsum("bkwgd,bksd->bkgws", query, o.live_key, precision=_HIGH)
    logits = scaled(logits, o.context.factor(D), o.context.soft_cap)
    seen = (o.live[:, :, None] & (o.position[:, :, None] < place[..., None]))[:, :, None]  # a place is a position + 1
    logits = jnp.where(seen, logits, -jnp.inf)
    sink = jnp.full(K * G, -jnp.inf) if o.context.sink_logits is None else o.context.sink_logits.astype(jnp.float32)
    sink = sink.reshape(1, K, G, 1, 1)
    largest = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), sink)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    power = jnp.exp(logits - largest)
    total = jnp.sum(power, axis=-1, keepdims=True) + jnp.exp(sink - largest)
    return power / jnp.where(total > 0, total, 1), place > 0


def _averaging(there: Bool[Array, "B K w"], alpha: float) -> Float[Array, "B K w"]:
    """Return each query's weight in their moving average, the newest first; the oldest has all that is left."""
    age = jnp.cumsum(there, axis=-1) - 1
    oldest = age == jnp.sum(there, axis=-1, keepdims=True) - 1
    return jnp.where(there, jnp.where(oldest, 1, alpha) * (1 - alpha) ** age.astype(jnp.float32), 0)


def _odds(weights: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return weights / jnp.maximum(1 - weights, jnp.finfo(weights.dtype).eps)


def _changes_behind(out: Float[Array, "B K G w D"], o: Observation) -> Float[Array, "B K G w S"]:
    """Return ``|(x - v) W_O|`` of some outputs x and each slot's value v, one query head of the group at a time."""
    gram = part_of(o.context.projection, "gram", "restkv").astype(jnp.float32)
    value = o.live_value

    def of(of_head: Float[Array, "B K D"], own: Float[Array, "K D D"]) -> Float[Array, "B K S"]:
        away = of_head[:, :, None] - value
        squares = jnp.sum(jnp.einsum("bksd,kde->bkse", away, own, precision=_HIGH) * away, axis=-1)
        return jnp.sqrt(jnp.maximum(squares, 0))

    heads = []
    for g in range(out.shape[2]):
        each = jax.lax.map(lambda x, own=gram[:, g]: of(x, own), jnp.moveaxis(out[:, :, g], 2, 0))
        heads.append(jnp.moveaxis(each, 0, 2))
    return jnp.stack(heads, axis=2)


def _drift(
    weights: Float[Array, "B K G w S"], there: Bool[Array, "B K w"], o: Observation, window: int
) -> Float[Array, "B K G"]:
    """Return by how many positions the best tokens lie later for the first half of the queries than for the second."""
    number = jnp.maximum(o.budget - window, 1)[:, None, None, None]
    shape = weights.shape
    live, position = (jnp.broadcast_to(x[:, :, None, None], shape) for x in (o.live, o.position))
    best = best_of_heads(rank(weights, live), position, jnp.broadcast_to(number, shape[:4])[..., None])
    count = jnp.maximum(jnp.sum(best, axis=-1), 1)
    place = jnp.sum(jnp.where(best, position.astype(jnp.float32), 0), axis=-1) / count
    # The newest queries come first: the second half is the first w - w // 2 of them.
    newer = jnp.arange(shape[3]) < shape[3] - shape[3] // 2

    def mean(part: Bool[Array, "w"]) -> Float[Array, "B K G"]:
        own = (there & part)[:, :, None]
        return jnp.sum(jnp.where(own, place, 0), axis=-1) / jnp.maximum(jnp.sum(own, axis=-1), 1)

    whole = jnp.all(there, axis=-1)[:, :, None]
    return jnp.where(whole, mean(~newer) - mean(newer), 0)


def _pooled_along(
    x: Float[Array, "B K G S"],
    before: Bool[Array, "B K S"],
    o: Observation,
    half: int,
    shift: Float[Array, "B K G"],
) -> Float[Array, "B K G S"]:
    """Average over neighbours in position order, ``half`` or ``shift`` to each side of one that lies ``shift`` later.

    Beyond the ends of the tokens that are pooled, the first ones, the one at the end counts again.
    """
    order = o.ordered
    in_order = order.sort(x, 0.0)
    last = jnp.maximum(jnp.sum(before, axis=-1), 1)[:, :, None, None] - 1
    at = jnp.arange(x.shape[-1]) + shift.astype(jnp.int32)[..., None]
    wide = jnp.maximum(half, jnp.abs(shift).astype(jnp.int32))[..., None]

    def add(j: Int[Array, ""], total: Float[Array, "B K G S"]) -> Float[Array, "B K G S"]:
        one = sum(jnp.take_along_axis(in_order, jnp.clip(at + by, 0, last), axis=-1) for by in (-j, j))
        return total + jnp.where(j <= wide, one, 0)

    middle = jnp.take_along_axis(in_order, jnp.clip(at, 0, last), axis=-1)
    total = jax.lax.fori_loop(1, jnp.max(wide) + 1, add, middle)
    return order.unsort(total / (2 * wide + 1))
