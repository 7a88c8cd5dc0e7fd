"""The cache of a model: a plain cache for each layer, with arrays of its own, so that each can be donated.

What runs on a layer takes ``cache.layers[number]``. A layer with a sliding window may have fewer slots than the others.
What is decided for all layers together reads their positions, stacked, with -1 where a layer has no slot or no head;
keys and values never are. So layers may differ in their KV heads and head dims.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax._src.cache import PARTS, AnyKind, KVCache, Positions, count_live
from kvjax._src.checks import plain

ALIKE = (
    "the allocation {!r} lets heads of all layers compete, which needs layers of one number of KV heads and one head "
    "dim: take a policy that gives all heads the same budget ('@uniform')."
)


class RowArray(NamedTuple):
    """Describe an array of a layer without a KV cache: its name in the layer's state, its shape per row, and dtype.

    Example:
        >>> import kvjax
        >>> kvjax.RowArray("memory", (2, 4), "float32").zeros(3).shape
        (3, 2, 4)
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def zeros(self, batch: int) -> Array:
        """Return the array of a batch before its first token."""
        return jnp.zeros((batch, *self.shape), self.dtype)


Recurrent = tuple[tuple[RowArray, ...], ...]  # the arrays of each layer without a KV cache


def empty_states(recurrent: Recurrent, batch: int) -> tuple[dict[str, Array], ...]:
    """Return the states of the layers without a KV cache before the first token."""
    return tuple({own.name: own.zeros(batch) for own in arrays} for arrays in recurrent)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCaches(AnyKind):
    """Hold the plain caches of a model's layers, in their order.

    In a hybrid model these are the layers with attention. ``recurrent`` are the states of its other layers, in their
    order: arrays ``[B, ...]`` by name, of a size that does not depend on the text. They join, leave and are repeated
    and saved with their row.

    :func:`kvjax.evict`, :func:`kvjax.rewind`, :func:`kvjax.repeat`, :func:`kvjax.join`, :func:`kvjax.leave`,
    :func:`kvjax.compact`, :func:`kvjax.pack` and :func:`kvjax.save_cache` take it; :func:`kvjax.attend` and
    :func:`kvjax.observe` take it with a layer's number; the other functions of kvjax take one of ``layers``.

    Example:
        >>> import kvjax
        >>> layer = kvjax.KVCache.init(batch=1, kv_heads=2, slots=3, head_dim=4)
        >>> cache = kvjax.LayerCaches((layer, layer))
        >>> cache.heads_shape, cache.position.shape
        ((2, 1, 2), (2, 1, 2, 3))
    """

    layers: tuple[KVCache, ...]
    recurrent: tuple[dict[str, Array], ...] = ()

    def map(self, function: Callable[..., Any], *others: tuple[Any, Any]) -> LayerCaches:
        """Return the caches after a function has run on each layer's; ``others`` are the same for all but ``PARTS``."""
        trees = (tree if axes is PARTS else (tree,) * len(self.layers) for tree, axes in others)
        return dataclasses.replace(self, layers=tuple(map(function, self.layers, *trees)))

    @property
    def each_part(self) -> tuple[KVCache, ...]:
        """Return the layers' caches."""
        return self.layers

    @property
    def arrays(self) -> KVCache:
        """Return the first layer's cache, whose entries and state are made like those of the others."""
        return self.layers[0]

    @property
    def axis(self) -> str | tuple[()] | None:
        """Return the mesh axis that splits the heads of each layer; see :class:`kvjax.KVCache`."""
        return self.layers[0].axis

    @property
    def next_position(self) -> Int[Array, "B"]:
        """Return the absolute position of each row's next token."""
        return self.layers[0].next_position

    @property
    def num_slots(self) -> int:
        """S, the slots of each KV head in the layer that has most."""
        return max(self.layer_slots)

    @property
    def layer_slots(self) -> tuple[int, ...]:
        """Return the slots of each KV head in each layer."""
        return tuple(cache.num_slots for cache in self.layers)

    @property
    def heads_shape(self) -> tuple[int, ...]:
        """``(L, B, K)``, with K of the layer that has most KV heads."""
        *rows, _ = self.layers[0].heads_shape
        return (len(self.layers), *rows, max(own.heads_shape[-1] for own in self.layers))

    @property
    def position(self) -> Int[Array, "L B K S"]:
        """Return the position of the token in each slot, -1 where the slot is free or the layer has none: a copy."""
        positions: Any = [cache.position for cache in self.layers]
        if all(isinstance(position, np.ndarray) for position in positions):  # those of the host stay there
            host: Any = np.stack([padded(position, self.slots_shape, -1, np) for position in positions])
            return host
        return _stacked(positions, self.slots_shape)

    @property
    def live(self) -> Bool[Array, "L B K S"]:
        """Return the mask of slots that hold a token."""
        return self.position >= 0

    @property
    def num_live(self) -> Int[Array, "L B K"]:
        """Return the number of tokens that each head holds."""
        return _count_live([cache.position for cache in self.layers], self.heads_shape[-1])

    @property
    def positions(self) -> Positions:
        """Return the kind of positions that keys are rotated to; see :class:`kvjax.KVCache`."""
        return self.layers[0].positions

    @property
    def nbytes(self) -> int:
        """Return the size of the caches in bytes; the rows' next positions, which all layers have, count once."""
        rows = self.next_position
        states = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.recurrent))
        copies = (len(self.layers) - 1) * rows.size * rows.dtype.itemsize
        return sum(own.nbytes for own in self.layers) - copies + states

    @property
    def slots_shape(self) -> tuple[int, ...]:
        """``(L, B, K, S)``, that of :attr:`position`."""
        return (*self.heads_shape, self.num_slots)

    @property
    def alike(self) -> bool:
        """Tell whether all layers have the same KV heads, of one head dim."""
        return len({(own.heads_shape[-1], own.head_dim) for own in self.layers}) == 1

    def layer(self, index: int) -> KVCache:
        """Return one layer's cache."""
        return self.layers[index]

    def with_layer(self, index: int, cache: KVCache) -> LayerCaches:
        """Return the caches with another one of a layer."""
        return dataclasses.replace(self, layers=(*self.layers[:index], cache, *self.layers[index + 1 :]))


def check_layer(cache: LayerCaches, layer: object) -> int:
    """Return a layer's number, after a check that it is one of a model's layers."""
    number, layers = plain(layer), len(cache.layers)
    if not isinstance(number, int) or not 0 <= number < layers:
        raise ValueError(f"the layer is {layer!r}; a cache of separate layers needs a number from 0 to {layers - 1}.")
    return number


def padded(own: Any, shape: tuple[int, ...], fill: float, numpy: Any = jnp) -> Any:
    """Return a layer's array per slot with the heads and slots of a shape ``(..., K, S)``, at least its own."""
    more = [(0, size - have) for size, have in zip(shape[-2:], own.shape[-2:], strict=True)]
    return own if more == [(0, 0)] * 2 else numpy.pad(own, [(0, 0), *more], constant_values=fill)


@functools.partial(jax.jit, static_argnums=1)
def _stacked(positions: list[Int[Array, "B K_ _"]], shape: tuple[int, ...]) -> Int[Array, "L B K S"]:
    return jnp.stack([padded(position, shape, -1) for position in positions])


@functools.partial(jax.jit, static_argnums=1)
def _count_live(positions: list[Int[Array, "B K_ _"]], heads: int) -> Int[Array, "L B K"]:
    counts = [count_live(position) for position in positions]
    return jnp.stack([jnp.pad(own, ((0, 0), (0, heads - own.shape[1]))) for own in counts])
