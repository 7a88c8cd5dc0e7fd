"""The cache of a model whose layers are called one by one: separate arrays per layer, so that each can be donated.

On one CPU `stream` yields it (models/by_layer.py); `stacked` makes it one cache with all layers in one array.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import KVCache
from kvjax.cache import AnyKind, Positions, count_live
from kvjax.insertion import Cache
from kvjax.split import PARTS
from kvjax.window import begin_anew


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCaches(AnyKind):
    """The caches of all layers in separate arrays; keys, values and positions are those that :func:`stacked` stacks."""

    layers: tuple[KVCache, ...]

    def map(self, function: Callable[..., Any], *others: tuple[Any, Any]) -> LayerCaches:
        """Return the caches after a function has run on each layer's; ``others`` are the same for all but ``PARTS``."""
        trees = (tree if axes is PARTS else (tree,) * len(self.layers) for tree, axes in others)
        return LayerCaches(tuple(map(function, self.layers, *trees)))

    @property
    def each_part(self) -> tuple[KVCache, ...]:
        """Return the layers' caches."""
        return self.layers

    @property
    def arrays(self) -> KVCache:
        """Return the first layer's cache, whose entries and state are made like those of the others."""
        return self.layers[0]

    def at(self, number: int) -> KVCache:
        """Return one layer's cache."""
        return self.layers[number]

    def with_at(self, number: int, cache: KVCache) -> LayerCaches:
        """Return the caches with another one of a layer."""
        return LayerCaches((*self.layers[:number], cache, *self.layers[number + 1 :]))

    @property
    def next_position(self) -> Int[Array, "B"]:
        """Return the absolute position of each row's next token."""
        return self.layers[0].next_position

    @property
    def num_slots(self) -> int:
        """S, the slots of each KV head."""
        return self.layers[0].num_slots

    @property
    def heads_shape(self) -> tuple[int, ...]:
        """``(L, B, K)``."""
        return (len(self.layers), *self.layers[0].heads_shape)

    @property
    def position(self) -> Int[Array, "L B K S"]:
        """Return the position of the token in each slot, -1 where the slot is free."""
        return jnp.stack([cache.position for cache in self.layers])

    @property
    def key(self) -> Float[Array, "L B K S D"]:
        """All keys: a copy."""
        return jnp.stack([cache.key for cache in self.layers])

    @property
    def value(self) -> Float[Array, "L B K S D"]:
        """All values: a copy."""
        return jnp.stack([cache.value for cache in self.layers])

    @property
    def live(self) -> Array:
        """Return the mask of slots that hold a token, bool ``[L, B, K, S]``."""
        return self.position >= 0

    @property
    def num_live(self) -> Int[Array, "L B K"]:
        """Return the number of tokens that each head holds."""
        return _count_live([cache.position for cache in self.layers])

    @property
    def state(self) -> Any:
        """Return the policy's state of all layers: a copy."""
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(cache.state for cache in self.layers))

    @property
    def positions(self) -> Positions:
        """Return the kind of positions that keys are rotated to; see :class:`kvjax.KVCache`."""
        return self.layers[0].positions

    @property
    def nbytes(self) -> int:
        """Return the size of the caches in bytes."""
        return sum(cache.nbytes for cache in self.layers) - (len(self.layers) - 1) * self.next_position.nbytes

    layer = at

    @property
    def slots(self) -> KVCache:
        """Return the positions of all layers, stacked, without keys and values: enough to decide what to evict."""
        position = self.position
        nothing = jnp.zeros((*position.shape, 0))
        return KVCache.of(nothing, nothing, position, self.next_position)

    def with_slots(self, left: KVCache, begins: Bool[Array, "B"]) -> LayerCaches:
        """Return the caches after an eviction from :attr:`slots`; where a row ``begins``, its window does anew."""
        states, following = (begin_anew(own.state, begins) for own in self.layers), left.next_position
        layers = zip(self.layers, left.position, states, strict=True)
        return LayerCaches(
            tuple(dataclasses.replace(own, position=at, next_position=following, state=new) for own, at, new in layers)
        )


@jax.jit
def _count_live(positions: list[Int[Array, "B K S"]]) -> Int[Array, "L B K"]:
    return jnp.stack([count_live(position) for position in positions])


AnyCache = Cache | LayerCaches


@functools.singledispatch
def split(cache: AnyCache) -> AnyCache:
    """Split a plain cache into separate arrays per layer; a paged cache is returned as it is."""
    return cache


@split.register(KVCache)
def _split_plain(cache: KVCache) -> LayerCaches:
    layers = (cache.layer(index) for index in range(cache.heads_shape[0]))
    # next_position is copied, as all layers share it and each layer's arrays are donated separately.
    return LayerCaches(
        tuple(dataclasses.replace(layer, next_position=jnp.copy(cache.next_position)) for layer in layers)
    )


@functools.singledispatch
def stacked(cache: AnyCache) -> Any:
    """Return a cache with all layers in one array, as the functions of kvjax take it; the given cache stays valid.

    A cache that :func:`models.stream` yields may have separate arrays per layer; any other is returned as it is.

    Example:
        >>> import kvjax, models
        >>> cache = kvjax.KVCache.init(
        ...     batch=1, kv_heads=1, slots=3, head_dim=2, layers=2
        ... )
        >>> models.stacked(cache) is cache
        True
    """
    return cache


@stacked.register(LayerCaches)
def _stacked_layers(cache: LayerCaches) -> KVCache:
    whole = jax.tree.map(lambda *parts: _stack(parts), *cache.layers)
    return dataclasses.replace(whole, next_position=cache.next_position)


@functools.singledispatch
def stacked_up(cache: AnyCache) -> Any:
    """Stack as :func:`stacked` does, but delete each of the layers' arrays once copied, so as not to hold both."""
    return cache


@stacked_up.register(LayerCaches)
def _stacked_up_layers(cache: LayerCaches) -> KVCache:
    next_position = jnp.copy(cache.next_position)

    def stack(*parts: Array) -> Array:
        whole = _stack(parts)
        for part in parts:
            part.delete()
        return whole

    whole = jax.tree.map(stack, *cache.layers)
    return dataclasses.replace(whole, next_position=next_position)


@jax.jit
def _stack(parts: tuple[Array, ...]) -> Array:
    return jnp.stack(parts)
