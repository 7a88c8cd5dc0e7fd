"""Attention Matching (arXiv 2602.16284): a small cache whose attention outputs are those of a large one.

A head's tokens are chosen first. Then, for sample queries, each chosen slot gets a bias, so that the attention mass of
the small cache is that of the large one, and a new value, so that its outputs are. Keys stay as they are. With the mass
right, outputs stay right beside tokens that come in later, whose keys no sample query has seen.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas import cache_attention
from kvjax._src.cache import KVCache, compact, floats_of, map_parts, nth_true, part_of_kind, token_at
from kvjax._src.checks import check_count, check_tokens, real_array
from kvjax._src.topk import keep_mask

MOST_BIAS = 3.0  # and least -3.0: the bounds that the authors give for chosen keys
RIDGE = 1e-3  # of the largest slot's share: how strongly biases stay near 0, and values near what they were
STEPS = 128  # of projected gradient
CHUNK = 512  # queries whose weights over all slots are held at once
HIGHEST = jax.lax.Precision.HIGHEST


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Queries:
    """Keep a sample query of each query head in each slot, times the scale of the logits: a link's state.

    ``seen_from`` is one more than the position from which it sees the cache, 0 where a slot has none. The query need
    not be that of the slot's token; the slot is a place to keep it.
    """

    query: Float[Array, "*L B K S G D"]
    seen_from: Int[Array, "*L B K S"]

    @property
    def spent(self) -> bool:
        """Tell whether the queries were dropped (:func:`without_samples`)."""
        return self.query.shape[-1] == 0


class Sampled(NamedTuple):
    """Hold the sample queries of a head over the slots: what the small cache is fitted to.

    ``weights`` are those of the chosen slots in the attention over all, 0 for a query that counts for nothing, whose
    ``counts`` is 0; ``outputs`` are the outputs over all.
    """

    weights: Float[Array, "n t"]
    outputs: Float[Array, "n D"]
    counts: Float[Array, "n"]


def match_attention(
    cache: KVCache,
    query: Float[Array, "B T N D"],
    budget: int,
    *,
    position: Int[Array, "B T"] | None = None,
    scores: Float[Array, "B K S"] | None = None,
    scale: float | None = None,
) -> KVCache:
    """Compact one layer's cache so that the given queries get the outputs, and the attention mass, that they get now.

    Each head keeps the ``budget`` tokens of the largest ``scores`` with their keys (section 3.3 of arXiv 2602.16284).
    Biases are fitted by non-negative least squares on the scale of ``exp``: ``sum_c w_c a_c = 1`` for each query, where
    a are its weights over the whole cache and ``log w`` is in [-3, 3] (equation 3 has the masses themselves; relative
    to the whole each query counts alike). Values are those of least squares under the small cache's weights (equation
    4), with a small ridge towards what they were. Where nothing leaves, nothing changes but by rounding.

    Args:
        cache: of one layer, plain, with ``absolute`` positions.
        query: rotated queries to be expected, such as those of a repetition of the text (section 3.1).
        budget: tokens that each head keeps, an int.
        position: the queries' positions, -1 for padding; a query sees the tokens up to its own. By default all.
        scores: larger = keep; by default the root of the mean square of a token's weights over all queries of the
            group, as the authors' fast variant has it.
        scale: factor of the logits, D ** -0.5 by default.

    Returns:
        A cache of ``budget`` slots, or as many as the given one has if these are fewer, with the new values and a
        ``bias``, float32 and one number for each slot, which attention adds to the logits. A bias that the given cache
        had is part of what is matched.

    Raises:
        ValueError: if the cache is not one plain layer with absolute positions, or the shapes do not fit.

    Example:
        >>> import functools, jax, kvjax, numpy as np
        >>> query, key, value = np.random.default_rng(0).normal(size=(3, 1, 32, 1, 4))
        >>> cache = kvjax.KVCache.init(batch=1, kv_heads=1, slots=32, head_dim=4)
        >>> cache = jax.jit(kvjax.insert)(cache, key, value)
        >>> small = jax.jit(functools.partial(kvjax.match_attention, budget=8))(
        ...     cache, query
        ... )
        >>> small.key.shape, small.bias.shape
        ((1, 1, 8, 4), (1, 1, 8))
    """
    if not isinstance(cache, KVCache) or cache.positions != "absolute" or cache.rotated is not None:
        kind = f"{type(cache).__name__} of {cache.positions!r} positions"
        raise ValueError(f"the cache is a {kind}; give a KVCache of one layer, with keys, values and own positions.")
    query = real_array("queries", query)
    (B, K, S), (rows, T, N, D) = cache.position.shape, query.shape if query.ndim == 4 else (0, 0, 0, 0)
    if rows != B or N % K or cache.head_dim != D:
        raise ValueError(f"queries {query.shape} do not fit a cache of {B} rows, {K} heads of {cache.head_dim}.")
    budget = check_count("the budget", budget, 1, "give tokens per head, an int from 1")
    budget = min(check_tokens(budget), S)
    if position is None:
        position = jnp.broadcast_to(jnp.maximum(cache.next_position, 1)[:, None] - 1, (B, T))
    wide = floats_of(cache.with_bias())
    if scores is None:
        _, columns = cache_attention(
            query, **wide.entries, key_position=cache.position, query_position=position, window=T, scale=scale,
            statistics=["window_square"],
        )  # fmt: skip
        scores = jnp.sum(columns.window_square.reshape(B, K, N // K, S), axis=2)
    stays = keep_mask(scores, cache.position, budget)
    factor = D**-0.5 if scale is None else scale
    queries = (query.astype(jnp.float32) * factor).reshape(B, T, K, N // K, D).transpose(0, 2, 1, 3, 4)
    seen_from = jnp.broadcast_to(position[:, None, :, None], queries.shape[:-1]) + 1

    def of_head(head: tuple[Array, ...]) -> tuple[Array, Array]:
        key, value, bias, live, stays, queries, seen_from = head
        return fit(key, value, bias, live, stays, queries.reshape(-1, D), seen_from.ravel(), budget)

    given = wide.key, wide.value, wide.bias, cache.position, stays, queries, seen_from
    value, bias = jax.lax.map(of_head, jax.tree.map(lambda x: x.reshape(B * K, *x.shape[2:]), given))
    value = value.reshape(wide.value.shape).astype(wide.value.dtype)
    entries = wide.entries | {"value": value, "bias": bias.reshape(B, K, S)}  # floats, also of eight bits
    return compact(dataclasses.replace(cache, entries=entries, position=jnp.where(stays, cache.position, -1)), budget)


def fit(
    key: Float[Array, "S D"],
    value: Float[Array, "S D"],
    bias: Float[Array, "S"],
    position: Int[Array, "S"],
    stays: Bool[Array, "S"],
    query: Float[Array, "n D"],
    seen_from: Int[Array, "n"],
    most: int,
) -> tuple[Float[Array, "S D"], Float[Array, "S"]]:
    """Return one head's values and biases, new where a token stays.

    The sample queries are times the scale; ``seen_from`` is one more than each one's position, 0 for one that does not
    count. ``position`` is that before the eviction. At most ``most`` tokens stay; the cost grows with its square.
    """
    slot = nth_true(stays, jnp.arange(1, most + 1))  # S where there is none
    at = functools.partial(jnp.take, indices=slot, axis=0, mode="fill", fill_value=0)
    key, value = (jnp.where((position >= 0)[:, None], x.astype(jnp.float32), 0) for x in (key, value))
    sampled = _sampled(key, value, bias, position, query, seen_from, slot)
    factor = mass_factors(sampled.weights, sampled.counts, at(bias))
    matched = values(sampled, factor, at(value))
    new_bias = at(bias) + jnp.log(factor)
    return (
        value.at[slot].set(matched, mode="drop"),
        bias.at[slot].set(new_bias, mode="drop"),
    )


def _sampled(key, value, bias, position, query, seen_from, slot) -> Sampled:
    """Attend over all slots, some queries at a time, and keep the weights of the chosen ones."""

    def of_query(row: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        one, since = row
        visible = (position >= 0) & (position < since)
        logits = jnp.where(visible, jnp.matmul(key, one, precision=HIGHEST) + bias, -jnp.inf)
        counts = jnp.any(visible)
        weights = jnp.where(counts, jax.nn.softmax(jnp.where(counts, logits, 0)), 0)
        output = jnp.matmul(weights, value, precision=HIGHEST)
        return jnp.take(weights, slot, mode="fill", fill_value=0), output, counts.astype(jnp.float32)

    sampled = query.astype(jnp.float32), seen_from
    return Sampled(*jax.lax.map(of_query, sampled, batch_size=min(CHUNK, len(query))))


def mass_factors(weights: Float[Array, "n t"], counts: Float[Array, "n"], bias: Float[Array, "t"]) -> Float[Array, "t"]:
    """Return the factors of the chosen slots' exponentials for which their mass is nearest that of all slots.

    They minimise ``|weights w - counts|^2`` and a small ridge towards 1, within bounds for the whole bias.
    """
    system, ridge = _system(weights)
    low, high = (jnp.exp(jnp.clip(sign * MOST_BIAS - bias, -10, 10)) for sign in (-1, 1))
    low, high = jnp.minimum(low, 1), jnp.maximum(high, 1)  # the factor 1, a bias that stays as it is, is allowed
    wanted = jnp.matmul(weights.T, counts, precision=HIGHEST) + ridge
    start = jnp.clip(jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(system), True), wanted), low, high)
    rate = 1 / jnp.max(jnp.sum(jnp.abs(system), axis=0))  # at most 1 / the largest eigenvalue

    def step(carry: tuple[Array, Array, Array], _: None) -> tuple[tuple[Array, Array, Array], None]:
        found, ahead, momentum = carry
        slope = jnp.matmul(system, ahead, precision=HIGHEST) - wanted
        new = jnp.clip(ahead - rate * slope, low, high)
        again = jnp.sum((ahead - new) * (new - found)) > 0  # uphill: begin anew
        momentum = jnp.where(again, 1.0, momentum)
        grown = (1 + jnp.sqrt(1 + 4 * momentum**2)) / 2
        ahead = jnp.where(again, new, new + (momentum - 1) / grown * (new - found))
        return (new, ahead, jnp.where(again, 1.0, grown)), None

    first, _ = step((start, start, jnp.float32(1)), None)  # outside the loop, as in kernels_pallas/topk.py
    (found, _, _), _ = jax.lax.scan(step, first, None, length=STEPS - 1)
    return jnp.where(jnp.any(weights > 0, axis=0), found, 1)


def values(sampled: Sampled, factor: Float[Array, "t"], value: Float[Array, "t D"]) -> Float[Array, "t D"]:
    """Return the values under which the small cache's outputs are nearest those of the large one.

    They minimise ``|X new - outputs|^2`` with X the small cache's weights, and a small ridge towards ``value``.
    """
    mass = sampled.weights * factor
    total = jnp.sum(mass, axis=1, keepdims=True)
    share = mass / jnp.where(total > 0, total, 1)
    rest = jnp.where(total > 0, sampled.outputs - jnp.matmul(share, value, precision=HIGHEST), 0)
    system, _ = _system(share)
    wanted = jnp.matmul(share.T, rest, precision=HIGHEST)
    return value + jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(system), True), wanted)


def _system(columns: Float[Array, "n t"]) -> tuple[Float[Array, "t t"], Float[Array, ""]]:
    """Return the normal equations' matrix with a ridge, and the ridge.

    The ridge is one for all slots: one that grew with a slot's own weights would let a value that the sample queries
    hardly see become anything, and queries that come later see it.
    """
    gram = jnp.matmul(columns.T, columns, precision=HIGHEST)
    ridge = RIDGE * jnp.max(jnp.diagonal(gram)) + jnp.finfo(gram.dtype).tiny
    return gram + ridge * jnp.eye(len(gram), dtype=gram.dtype), ridge


def dropped_bytes(state: Any, group: int, head_dim: int) -> int:
    """Return the bytes that sample queries took per slot until they were dropped; 0 where none were."""
    samples = part_of_kind(state, Queries)
    return group * head_dim * samples.query.dtype.itemsize if samples is not None and samples.spent else 0


def without_samples(state: Any) -> Any:
    """Return a policy's state without its sample queries, which take more than keys and values do."""
    return map_parts(lambda part: Queries(part.query[..., :0, :0], part.seen_from), state, Queries)


def remembered(
    state: Queries,
    query: Float[Array, "B T N D"],
    asked_at: Int[Array, "B T"],
    since: Int[Array, "B T"],
    position: Int[Array, "B K S"],
) -> Queries:
    """Write a block's queries, times the scale, to slots; ``since`` are their own positions.

    Each is kept in the slot of the token at the position ``asked_at``, or nowhere for -1.
    """
    (B, K), (_, T, N, D) = position.shape[:2], query.shape
    token, here = token_at(position, asked_at)
    queries = query.reshape(B, T, K, N // K, D).transpose(0, 2, 1, 3, 4).astype(state.query.dtype)
    queries = jnp.take_along_axis(queries, token[..., None, None], axis=2)
    positions = jnp.take_along_axis(jnp.broadcast_to(since[:, None], (B, K, T)), token, axis=2) + 1
    return Queries(jnp.where(here[..., None, None], queries, state.query), jnp.where(here, positions, state.seen_from))


def refitted(
    key: Float[Array, "S D"],
    value: Float[Array, "S D"],
    bias: Float[Array, "S"],
    position: Int[Array, "S"],
    stays: Bool[Array, "S"],
    query: Float[Array, "S G D"],
    seen_from: Int[Array, "S"],
    queries: int,
) -> tuple[Float[Array, "S D"], Float[Array, "S"]]:
    """Fit one head at an eviction, to at most ``queries`` sample queries of each query head, evenly chosen.

    How many tokens stay is known only when it runs: the smallest of a few static sizes is taken.
    """
    S, G, D = query.shape
    seen_from = jnp.where(position >= 0, seen_from, 0)  # a free slot may have that of a token that has left
    most = min(S, queries)
    count, place = jnp.sum(seen_from > 0), jnp.arange(most)
    evenly = place * (count // most) + place * (count % most) // most  # place * count may overflow
    rank = 1 + jnp.where(count > most, evenly, place)
    slot = nth_true(seen_from > 0, rank)
    sampled = jnp.take(query, slot, axis=0, mode="fill", fill_value=0).reshape(-1, D)
    since = jnp.repeat(jnp.take(seen_from, slot, mode="fill", fill_value=0), G)
    sizes = [S]
    while sizes[0] > 64 and len(sizes) < 6:
        sizes = [-(-sizes[0] // 2), *sizes]
    fits = [functools.partial(fit, most=size) for size in sizes]
    number = jnp.sum(jnp.sum(stays) > jnp.asarray(sizes[:-1], jnp.int32), dtype=jnp.int32) if len(sizes) > 1 else 0
    return jax.lax.switch(number, fits, key, value, bias, position, stays, sampled, since)
