"""Sources of importance: how important each token is for each head, as logits for :func:`kvjax.select`.

A source has an ``init`` and two pure functions: ``insert`` takes the tokens as they arrive, ``importance`` returns
``[B, H, T, S]`` for T queries and S slots of one layer. H is N, or K where the query heads of a group choose together
(``group``), so that each row of keys and values that is read serves all of them. As nothing is evicted, **slot p holds
position p** (or is free: beyond a row's end).

One decode step, in each layer but the first, after the new token was inserted into the cache:

    state = source.insert(state, key, position, layer)                            # key [B, 1, K, D], rotated
    reading = Reading(query, position, slot_position, layer, key=...)             # what source.reads names, no more
    importance = source.importance(jax.tree.map(lambda x: x[layer], state), reading)     # [B, H, 1, S]
    slots = kvjax.select(importance[:, :, 0], slot_position, budget)

Whole sequences, teacher-forced, give what the steps would give: insert all tokens at once, read with all T queries (or
some of them at a time), and always give the keys, for the last page of a step holds fewer tokens than at the end:

    state = source.insert(source.init(B, K, S, D), key, position)                 # key [B, T, K, D]
    reading = Reading(query, position, slot_position, layer, key=key.swapaxes(1, 2), ...)
    mask = kvjax.selected_mask(source.importance(state, reading), slot_position, budget, query_position=position)

The importance of free slots and of tokens after a query does not count: ``select`` leaves them out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.insert_token.reference import write_slots
from kernels_pallas.softmax import grouped_logits, scaled
from kvjax._src.checks import check_count
from kvjax._src.scores import mix_bits
from kvjax._src.short_names import called, check_number, makers, read, registered

PyTree = Any
PREDICTOR = "butler"  # the source that reads what a small network predicts
# How the query heads of a group choose: each for itself, or together, by their largest logit, their mean logit, or the
# mean of their attention weights.
Group = Literal["separate", "max", "mean", "weights"]


class Reading(NamedTuple):
    """Readable parts of one layer for a source; four of them only where ``Source.reads`` names them.

    ``query`` and ``key`` are rotated; ``query_position`` is -1 for padding, ``position`` -1 where a slot is free.
    ``predicted`` are the predictor's logits for this layer; ``first`` and ``previous`` the true logits (:func:`logits`)
    of layer 0 and of the layer before. ``soft_cap`` is the model's cap of its logits, which counts where the logits of
    several heads are joined.
    """

    query: Float[Array, "B T N D"]
    query_position: Int[Array, "B T"]
    position: Int[Array, "B K S"]
    layer: Int[Array, ""] | int
    key: Float[Array, "B K S D"] | None = None
    predicted: Float[Array, "B N T S"] | None = None
    first: Float[Array, "B N T S"] | None = None
    previous: Float[Array, "B N T S"] | None = None
    soft_cap: float | None = None


@dataclasses.dataclass(frozen=True)
class Source:
    """A source of importance, made by the functions below or by :func:`parse_source`.

    Attributes:
        name: its short name, as on a command line.
        importance: ``importance(state, reading) -> [B, H, T, S]`` in float32; ``state`` is one layer's.
        init: ``init(B, K, S, D) -> state``, of one layer.
        insert: ``insert(state, key [B, T, K, D], position [B, T]) -> state``, for the T tokens that arrive (-1:
            padding, ignored).
        reads: which of ``"key"``, ``"predicted"``, ``"first"`` and ``"previous"`` a decode step must provide.

    Example:
        >>> import kvjax
        >>> source = kvjax.parse_source("previous_layer")
        >>> source.name, sorted(source.reads)
        ('previous_layer', ['previous'])
    """

    name: str
    importance: Callable[[PyTree, Reading], Float[Array, "B H T S"]]
    init: Callable[..., PyTree] = lambda *sizes: ()
    insert: Callable[..., PyTree] = lambda state, *tokens: state
    reads: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Source({self.name!r})"


SOURCES = makers("source", "kvjax.sources", Source)


def register(make: Callable[..., Source]) -> Callable[..., Source]:
    """Register a source's maker, as its decorator, as :func:`kvjax.register` does for policies.

    The entry-point group of other packages is ``kvjax.sources``.
    """
    return registered(SOURCES, make)


def parse_source(name: str) -> Source:
    """Return the source that a short name stands for, as command lines write it.

    The same name gives the same object, so that a compiled program is found again.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse_source("quest(page_size=4)"))
        'quest(page_size=4)'
    """
    how = "write it like 'oracle' or 'quest(page_size=4)'"
    return called(read(name, "source", how), SOURCES, name.strip(), how)


def logits(query: Float[Array, "B T N D"], key: Float[Array, "B K S D"]) -> Float[Array, "B N T S"]:
    """Compute the true logits ``q.k / sqrt(D)``, unmasked, in float32, as ``first`` and ``previous`` hold them.

    A soft cap is not applied: within a head it does not change their order.

    Example:
        >>> import jax, numpy as np
        >>> from kvjax.sources import logits
        >>> jax.jit(logits)(np.ones((1, 1, 2, 4)), np.ones((1, 1, 3, 4))).tolist()
        [[[[2.0, 2.0, 2.0]], [[2.0, 2.0, 2.0]]]]
    """
    B, T, N, D = query.shape
    return D**-0.5 * grouped_logits(query, key).reshape(B, N, T, -1)


def join_group(importance: Float[Array, "B N T S"], reading: Reading, group: Group) -> Float[Array, "B H T S"]:
    """Join the logits of the query heads of each group; "separate" returns them as they are, [B, N, T, S].

    With "weights", the result is the logarithm of the mean over the group of softmax weights over the tokens that a
    query sees.
    """
    if group == "separate":
        return importance
    B, N, T, S = importance.shape
    K = reading.position.shape[1]
    logits = scaled(importance.reshape(B, K, N // K, T, S), 1, reading.soft_cap)
    if group == "max":
        return jnp.max(logits, axis=2)
    if group == "mean":
        return jnp.mean(logits, axis=2)
    position = reading.position[:, :, None, None]
    seen = (position >= 0) & (position <= reading.query_position[:, None, None, :, None])
    weights = jax.nn.log_softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
    return jax.nn.logsumexp(jnp.where(seen, weights, -jnp.inf), axis=2)


@register
def butler(*, group: Group = "separate") -> Source:
    """Use the predictor's logits (TokenButler, version 1 of its paper): ``reading.predicted``.

    Args:
        group: how the query heads of a group choose: each for itself ("separate", the paper), or together, by their
            largest logit ("max"), their mean logit ("mean"), or the mean of the weights that the logits stand for
            ("weights"). Where heads of a group choose for themselves, a step reads up to G times as many keys
            and values as the budget says.

    Example:
        >>> from kvjax import sources
        >>> sorted(sources.butler().reads)
        ['predicted']
    """
    return _given(PREDICTOR, "predicted", "the predictor's logits", group)


@register
def first_layer(*, group: Group = "separate") -> Source:
    """Use layer 0's true logits for every layer (TokenButler, figure 9): ``reading.first``.

    Args:
        group: see :func:`butler`.

    Example:
        >>> from kvjax import sources
        >>> sorted(sources.first_layer().reads)
        ['first']
    """
    return _given("first_layer", "first", "layer 0's logits", group)


@register
def previous_layer(*, group: Group = "separate") -> Source:
    """Use the true logits of the layer before (TokenButler, figure 9): ``reading.previous``.

    Args:
        group: see :func:`butler`.

    Example:
        >>> from kvjax import sources
        >>> sorted(sources.previous_layer().reads)
        ['previous']
    """
    return _given("previous_layer", "previous", "the logits of the layer before", group)


@register
def oracle(*, group: Group = "separate") -> Source:
    """Use the layer's own true logits: it reads every key, so it saves nothing and bounds what selection can do.

    Args:
        group: see :func:`butler`.

    Example:
        >>> from kvjax import sources
        >>> sorted(sources.oracle().reads)
        ['key']
    """

    def importance(_: PyTree, reading: Reading) -> Array:
        true = logits(reading.query, _needed(reading.key, "oracle", "key", "the layer's keys"))
        return join_group(true, reading, group)

    return Source("oracle", importance, reads=frozenset({"key"}))


@register
def streaming() -> Source:
    """Prefer the newest tokens (StreamingLLM, arXiv 2309.17453); the sinks are those of ``select``.

    Example:
        >>> from kvjax import sources
        >>> str(sources.streaming())
        'streaming'
    """

    def importance(_: PyTree, reading: Reading) -> Array:
        T, N = reading.query.shape[1:3]
        B, K, S = reading.position.shape
        newest = reading.position.astype(jnp.float32)[:, :, None, None]
        return jnp.broadcast_to(newest, (B, K, N // K, T, S)).reshape(B, N, T, S)

    return Source("streaming", importance)


@register
def random(*, seed: int = 0) -> Source:
    """Hash (seed, layer, position of the query, query head, slot): the same in a step and on a whole sequence.

    Example:
        >>> from kvjax import sources
        >>> str(sources.random(seed=1))
        'random(seed=1)'
    """
    check_number("random", "seed", seed, 0, 2**32 - 1, "an int in [0, 2**32)")

    def importance(_: PyTree, reading: Reading) -> Array:
        slot = jnp.arange(reading.position.shape[2], dtype=jnp.uint32)[None, None, None]
        head = jnp.arange(reading.query.shape[2], dtype=jnp.uint32)[None, :, None, None]
        query = reading.query_position.astype(jnp.uint32)[:, None, :, None]
        layer = jnp.asarray(reading.layer, jnp.uint32)
        mixed = mix_bits(jnp.uint32(seed) ^ mix_bits(layer ^ mix_bits(head ^ mix_bits(query ^ mix_bits(slot)))))
        return (mixed >> 8).astype(jnp.float32) / 2**24

    return Source("random", importance)


class Bounds(NamedTuple):
    """The smallest and the largest entries of each page's keys, float32; +inf and -inf while the page is empty."""

    smallest: Float[Array, "B K P D"]
    largest: Float[Array, "B K P D"]


@register
def quest(*, page_size: int = 16, group: Group = "separate") -> Source:
    """Bound the logits of each page of tokens from above by its smallest and largest keys (Quest, arXiv 2406.10774).

    The bound ``sum_d max(q_d smallest_d, q_d largest_d) / sqrt(D)`` counts for every token of its page, so whole pages
    are read; of the last page, if the budget only covers a part, the newest tokens are read. Page p holds the positions
    from ``p page_size``. A query's own page holds the tokens up to the query, with the query's own token.

    A decode step reads the pages' bounds and no key. With ``reading.key``, the bounds of a query's own page are
    computed again from the tokens up to the query, so that the state may hold later tokens: for whole sequences.

    Args:
        page_size: tokens per page; 16 as in the paper.
        group: see :func:`butler`.

    Example:
        >>> from kvjax import sources
        >>> str(sources.quest(page_size=4))
        'quest(page_size=4)'
    """
    check_count("quest: page_size", page_size, 1, "give a number of tokens, an int from 1")

    def init(B: int, K: int, S: int, D: int) -> Bounds:
        shape = (B, K, -(-S // page_size), D)
        return Bounds(jnp.full(shape, jnp.inf, jnp.float32), jnp.full(shape, -jnp.inf, jnp.float32))

    def insert(state: Bounds, key: Array, position: Array) -> Bounds:
        B, T, K, _ = key.shape
        page = jnp.where(position >= 0, position // page_size, state.smallest.shape[-2])  # out of bounds: not written
        page = jnp.broadcast_to(page[:, None], (B, K, T))
        keys = key.astype(jnp.float32).swapaxes(1, 2)
        return Bounds(
            write_slots(state.smallest, keys, page, jax.lax.scatter_min),
            write_slots(state.largest, keys, page, jax.lax.scatter_max),
        )

    def importance(state: Bounds, reading: Reading) -> Array:
        B, T, N, D = reading.query.shape
        K, S = reading.position.shape[1:]
        query = reading.query.astype(jnp.float32).reshape(B, T, K, N // K, D)
        bound = _upper_bound(query, state.smallest, state.largest, "btkgd,bkpd->bkgtp")
        if reading.key is not None:
            at = jnp.maximum(reading.query_position, 0)
            own = _page_so_far(reading.key, reading.position, at, page_size)
            own_bound = _upper_bound(query, own.smallest, own.largest, "btkgd,bktd->bkgt")[..., None]
            page = jax.lax.broadcasted_iota(jnp.int32, bound.shape, bound.ndim - 1)
            bound = jnp.where(page == (at // page_size)[:, None, None, :, None], own_bound, bound)
        every = jnp.repeat(bound, page_size, axis=-1)[..., :S]
        return join_group(D**-0.5 * every.reshape(B, N, T, S), reading, group)

    return Source("quest", importance, init, insert)


def _upper_bound(query: Array, smallest: Array, largest: Array, axes: str) -> Array:
    """Compute sum_d max(q_d smallest_d, q_d largest_d) as two products; 0 for an empty page."""
    smallest, largest = (jnp.where(jnp.isfinite(x), x, 0) for x in (smallest, largest))
    highest = jax.lax.Precision.HIGHEST
    above = jnp.einsum(axes, jnp.maximum(query, 0), largest, precision=highest)
    return above + jnp.einsum(axes, jnp.minimum(query, 0), smallest, precision=highest)


def _page_so_far(key: Array, position: Array, at: Int[Array, "B T"], page_size: int) -> Bounds:
    """Return the bounds of each query's own page over its tokens up to the query, ``[B, K, T, D]``."""
    B, K, S, D = key.shape
    short = -S % page_size

    def so_far(accumulate: Callable[..., Array], empty: float) -> Array:
        keys = jnp.where(position[..., None] >= 0, key.astype(jnp.float32), empty)
        keys = jnp.pad(keys, ((0, 0), (0, 0), (0, short), (0, 0)), constant_values=empty)
        running = accumulate(keys.reshape(B, K, -1, page_size, D), axis=3).reshape(B, K, S + short, D)
        return jnp.take_along_axis(running, at[:, None, :, None], axis=2)

    return Bounds(so_far(jax.lax.cummin, jnp.inf), so_far(jax.lax.cummax, -jnp.inf))


def _given(name: str, field: str, what: str, group: Group) -> Source:
    def importance(_: PyTree, reading: Reading) -> Array:
        given = _needed(getattr(reading, field), name, field, what).astype(jnp.float32)
        return join_group(given, reading, group)

    return Source(name, importance, reads=frozenset({field}))


def _needed(array: Array | None, name: str, field: str, what: str) -> Array:
    if array is None:
        raise ValueError(f"{name!r} reads {what}, but none were given; hand them over as {field}=.")
    return array
