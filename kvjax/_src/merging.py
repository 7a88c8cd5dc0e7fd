"""Merging, the second way to free a slot: an eviction folds the values of the tokens that leave into those that stay.

A policy declares it (``Policy.merging``, by the links ``merge`` and ``cam``), and :func:`kvjax.evict` does it as soon
as it knows which tokens leave. Keys stay as they are. A value that took others in counts as one token from then on, so
what a link remembers of a token, such as CriticalKV's norm, is that of the token alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.caote_topk.reference import length
from kernels_pallas.order_tokens.reference import by_position
from kvjax._src.cache import as_stored, floats_of, map_state, nth_true, part_of_kind
from kvjax._src.matching import Queries, refitted

SMALL = 1e-6  # added to lengths, as in kvpress
TOGETHER = 1 << 22  # numbers up to which all heads are merged at once: a decode step, in which one token leaves each


class Head(NamedTuple):
    """One head at an eviction; keys and values are float32, 0 where no token was.

    ``position`` is that before the eviction, ``stays`` marks the tokens that are left, and ``gone`` has the slots of
    those that are not, S where there are no more. ``received`` is the attention of :class:`Received`, 0 without it.
    ``bias`` is the slots', 0 in a cache without any, and ``sampled`` the queries of
    :class:`kvjax._src.matching.Queries`, None without them.
    """

    key: Float[Array, "S D"]
    value: Float[Array, "S D"]
    position: Int[Array, "S"]
    stays: Bool[Array, "S"]
    gone: Int[Array, "E"]
    received: Float[Array, "S"]
    bias: Float[Array, "S"]
    sampled: Queries | None


@dataclasses.dataclass(frozen=True)
class Merging:
    """Name a way of merging what leaves: into the values that stay, their biases, or the policy's state.

    Two of the same name and parameters are equal.

    Attributes:
        fold: returns a head's new values, and which slots they are new in; None where values stay.
        biased: whether the cache has a bias per slot; ``fold`` or ``weigh`` returns the new ones.
        absorb: (state, keys and values that leave all heads, which of them are there) -> the new state.
        weigh: (state, slots whose tokens leave, biases) -> the new biases. Statistics that such a policy observes are
            those of the tokens themselves, without the biases.
    """

    name: str
    fold: Callable[[Head], tuple[Array, ...]] | None = dataclasses.field(default=None, compare=False)
    parameters: tuple[int | float, ...] = ()
    biased: bool = False
    absorb: Callable[[Any, Array, Array, Array], Any] | None = dataclasses.field(default=None, compare=False)
    weigh: Callable[[Any, Array, Array], Array] | None = dataclasses.field(default=None, compare=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Received:
    """A link's state: the attention that each token has received from all queries, the group's mean."""

    attention: Float[Array, "*L B K S"]


def folded[Part: Any](
    merging: Merging,
    cache: Part,
    before: Int[Array, "*slots"],
    after: Int[Array, "*slots"],
    most: int | None = None,
) -> Part:
    """Return the cache with the values of the tokens that leave merged into those that stay, layer by layer.

    Args:
        before, after: the positions of all slots.
        most: the largest number of tokens that leave a head; None where any number may.
    """
    if not cache.paged:
        return _folded_layer(merging, cache, before, after, None, most)

    def of_layer(index: Int[Array, ""] | None, cache: Any) -> Any:
        was, left = (dataclasses.replace(cache, position=slots).layer(index).position for slots in (before, after))
        return _folded_layer(merging, cache, was, left, index, most)

    *stack, _, _ = cache.heads_shape
    if stack and cache.bias is not None:  # new, it may be the same on all devices, but the loop's carry may not
        bias = jnp.where(after < 0, cache.bias, cache.bias)
        cache = dataclasses.replace(cache, entries=cache.entries | {"bias": bias})
    return jax.lax.fori_loop(0, stack[0], of_layer, cache) if stack else of_layer(None, cache)


def _folded_layer[Part: Any](
    merging: Merging,
    cache: Part,
    before: Int[Array, "B K S"],
    after: Int[Array, "B K S"],
    layer: int | Int[Array, ""] | None,
    most: int | None,
) -> Part:
    """Run :func:`folded` on one layer; a paged cache's is copied to slots, and what is new is written to its pages."""
    here = cache.layer(layer) if cache.paged else cache
    if merging.biased and here.bias is None:
        raise ValueError(f"{merging.name!r} sets biases, but the cache has none; make it with kvjax.empty_cache.")
    gone = (before >= 0) & (after < 0)
    if merging.weigh is not None:
        return _with_entries(cache, {"bias": merging.weigh(here.state, gone, here.bias)}, layer)
    wide = floats_of(here)
    S = before.shape[-1]
    count = jnp.arange(1, 1 + (S if most is None else min(most, S)), dtype=jnp.int32)
    key, value = (jnp.where((before >= 0)[..., None], x.astype(jnp.float32), 0) for x in (wide.key, wide.value))
    slots = nth_true(gone, jnp.broadcast_to(count, (*gone.shape[:-1], len(count))))
    if merging.absorb is not None:
        take = functools.partial(jnp.take_along_axis, indices=slots[..., None], axis=2, mode="fill", fill_value=0)
        cache = _with_state(cache, merging.absorb(here.state, take(key), take(value), slots < S), layer)
    if merging.fold is None:
        return cache
    state, bias = jax.lax.stop_gradient(here.state), here.with_bias().entries["bias"]
    received = part_of_kind(state, Received) or Received(jnp.zeros(before.shape, jnp.float32))
    fields = Head(key, value, before, after >= 0, slots, received.attention, bias, part_of_kind(state, Queries))
    heads = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), fields)
    if slots.size * S <= TOGETHER and not merging.biased:  # which chooses a size for each head
        values, taken, *biases = jax.vmap(merging.fold)(heads)
    else:
        values, taken, *biases = jax.lax.map(merging.fold, heads)  # [E, S] of one head at a time
    stored = as_stored(here, wide.key, values.reshape(wide.value.shape).astype(wide.value.dtype))
    if biases:
        stored["bias"] = biases[0].reshape(before.shape)
    new = taken.reshape(before.shape)

    def put(stored: Array, old: Array) -> Array:
        return jnp.where(new.reshape(*new.shape, *(1,) * (old.ndim - new.ndim)), stored, old)

    names = [name for name in here.entries if name.startswith(("value", "bias"))]
    return _with_entries(cache, {name: put(stored[name], here.entries[name]) for name in names}, layer)


def _with_entries[Part: Any](cache: Part, new: dict[str, Array], layer: int | Int[Array, ""] | None) -> Part:
    """Return a cache with some of a layer's entries replaced, which are laid out in slots."""
    if cache.paged:
        new = {name: cache.write_layer(cache.entries[name], own, layer) for name, own in new.items()}
    return dataclasses.replace(cache, entries=cache.entries | new)


def _with_state[Part: Any](cache: Part, new: Any, layer: int | Int[Array, ""] | None) -> Part:
    """Return a cache with a layer's new state per head."""
    if cache.paged:
        put = lambda whole, own: own if layer is None else whole.at[layer].set(own)  # noqa: E731
        new = map_state(lambda whole, own: whole, put, cache.state, new)
    return dataclasses.replace(cache, state=new)


def most_similar(head: Head, similarity: float) -> tuple[Float[Array, "S D"], Bool[Array, "S"]]:
    """Fold each value into that of the token with the most similar key: D2O, with kvpress' weights."""
    unit = head.key / jnp.maximum(length(head.key, 2)[:, None], SMALL)
    lengths = length(head.value, 2)
    cosine = jnp.matmul(_at(unit, head.gone), unit.T, precision=jax.lax.Precision.HIGHEST)
    cosine = jnp.where(head.stays[None], cosine, -jnp.inf)  # [E, S]
    target, nearest = jnp.argmax(cosine, axis=-1), jnp.max(cosine, axis=-1)
    own = _at(lengths, head.gone)
    weight = jnp.maximum(nearest, 0) * own / (own + lengths[target] + SMALL)
    weight = jnp.where((head.gone < len(unit)) & (nearest >= similarity), weight, 0)
    total = jnp.zeros_like(lengths).at[target].add(weight)
    added = jnp.zeros_like(head.value).at[target].add(weight[:, None] * _at(head.value, head.gone))
    return (head.value + added) / (1 + total)[:, None], total > 0


def next_tokens(head: Head, window: int) -> tuple[Float[Array, "S D"], Bool[Array, "S"]]:
    """Share each value among the ``window`` next tokens that stay, times CaM's probability of a merge."""
    slot, number = (x[0, 0] for x in by_position(head.position[None, None]))
    stays = head.stays[slot].astype(jnp.int32)
    rank = (jnp.cumsum(stays) - stays)[number - 1]  # how many tokens before this one stay
    behind = rank[None] - _at(rank, head.gone)[:, None]  # [E, S]
    near = head.stays[None] & (behind >= 0) & (behind < window) & (head.gone < len(rank))[:, None]
    count = jnp.maximum(jnp.sum(near, axis=-1), 1).astype(jnp.float32)
    mean = jnp.sum(jnp.where(near, head.received[None], 0), axis=-1) / count
    own = _at(head.received, head.gone)
    chance = jnp.where(own < mean, own / jnp.where(mean > 0, mean, 1), jnp.sign(own))
    shares = jnp.where(near, (chance / count)[:, None], 0)
    added = jnp.matmul(shares.T, _at(head.value, head.gone), precision=jax.lax.Precision.HIGHEST)
    return head.value + added, jnp.any(shares > 0, axis=0)


def _at(array: Array, slot: Int[Array, "E"]) -> Array:
    return jnp.take(array, slot, axis=0, mode="fill", fill_value=0)


def rematched(head: Head, queries: int) -> tuple[Float[Array, "S D"], Bool[Array, "S"], Float[Array, "S"]]:
    """Fit values and biases so that sample queries get the outputs that they got before: Attention Matching."""
    assert head.sampled is not None
    if head.sampled.spent:
        raise ValueError("'match' has fitted this cache, and its sample queries are gone: give policy=None.")
    value, bias = refitted(
        head.key, head.value, head.bias, head.position, head.stays, head.sampled.query, head.sampled.seen_from, queries
    )
    return value, head.stays & jnp.any((head.position >= 0) & ~head.stays), bias
