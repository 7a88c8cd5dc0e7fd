"""The paged cache on a mesh: each device has the pages of its own rows and heads, in a pool of its own.

The axis "data" of a mesh splits the rows, and "tensor" the KV heads, as they split a plain cache. Pages are read and
written by the device that owns them, and never leave it. Heads that compete for slots add up counts of tokens
(:class:`kvjax.allocation.Contest`), and heads that share their scores add these up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Int

from kvjax._src.border import (
    HEADS,
    OF_HEADS,
    OF_ROWS,
    SAME,
    axes_of,
    axes_of_heads,
    check_mesh,
    mesh_of,
    on_devices,
    where,
)
from kvjax._src.cache import CACHE, PARTS, AnyKind, KVCache, Positions, PyTree
from kvjax._src.layer_caches import LayerCaches
from kvjax._src.paged import PagedCache, pack


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitCache(AnyKind):
    """Keys and values in pages, split over the devices of a mesh.

    ``parts`` are the devices' paged caches, stacked: each array has two axes more in front, ``[data, tensor, ...]``. A
    part has the rows and heads of its device, and numbers them, and its pages, from 0.

    :func:`kvjax.insert`, :func:`kvjax.evict`, :func:`kvjax.observe`, :func:`kvjax.attend`, :func:`kvjax.rewind`,
    :func:`kvjax.repeat`, :func:`kvjax.join` and :func:`kvjax.leave` take it like a :class:`kvjax.PagedCache`. Scores
    and evidence are stacked likewise.

    Example:
        >>> import jax
        >>> import kvjax
        >>> mesh = jax.sharding.Mesh([jax.devices()[:1]], ("data", "tensor"))
        >>> heads = dict(batch=1, kv_heads=2, head_dim=8, layers=2)
        >>> cache = kvjax.SplitCache.init(
        ...     mesh=mesh, pages=11, page_size=16, most=32, **heads
        ... )
        >>> cache.heads_shape, cache.parts.key.shape
        ((2, 1, 2), (1, 1, 11, 16, 8))
    """

    parts: PagedCache

    paged = True

    @classmethod
    def init(cls, *, mesh: Mesh | AbstractMesh, batch: int, kv_heads: int, **sizes: Any) -> SplitCache:
        """Make an empty cache.

        Args:
            mesh: devices with the axes "data", which splits the rows, and "tensor", which splits the heads.
            batch, kv_heads: all rows, and all heads of a layer.
            sizes: the other arguments of :meth:`kvjax.PagedCache.init`; ``pages`` is the number of pages per device.

        Raises:
            ValueError: if the mesh lacks an axis or has explicit ones, or does not divide the rows or the heads.
        """
        rows, heads = check_mesh(mesh, batch, kv_heads)

        def of_device() -> PagedCache:
            return _part(PagedCache.init(batch=batch // rows, kv_heads=kv_heads // heads, **sizes))

        return cls(jax.jit(on_devices(of_device, (), PARTS, mesh))())

    @classmethod
    def pack(
        cls, cache: KVCache | LayerCaches, *, mesh: Mesh | AbstractMesh, pages: int, page_size: int, most: int
    ) -> SplitCache:
        """Copy the live tokens of a plain cache into the pages of each device; see :func:`kvjax.pack`."""
        check_mesh(mesh, *cache.heads_shape[-2:])

        def of_device(part: KVCache | LayerCaches) -> PagedCache:
            return _part(pack(part, pages=pages, page_size=page_size, most=most))

        return cls(on_devices(of_device, (axes_of(cache),), PARTS, mesh)(cache))

    def read(self, function: Callable[..., Any], *others: tuple[PyTree, Any], outputs: Any) -> Any:
        """Return what a function returns for each device's part of the cache; see :meth:`kvjax.KVCache.read`."""
        trees, axes = [tree for tree, _ in others], [axes for _, axes in others]
        mesh = mesh_of(jax.tree.leaves(self.parts))
        if mesh.empty:
            raise ValueError("the cache is split over a mesh, but its arrays are on none; put them back on that mesh.")
        of_parts = jax.tree.map(lambda own: PARTS if own is CACHE else own, outputs)
        made = on_devices(function, (PARTS, *axes), of_parts, mesh)(self.parts, *trees)
        return where(CACHE, SplitCache, outputs, made)

    @property
    def each_part(self) -> PagedCache:
        """Return the devices' parts, stacked."""
        return self.parts

    def lacking(self, position: Int[np.ndarray, "B T"], layer: int | Int[Array, ""] | None = None) -> int:
        """Count the slots that the fullest device lacks for new tokens; see :meth:`kvjax.KVCache.lacking`."""
        counted = dataclasses.replace(self.parts, entries={}, state=())  # keys and values stay on their devices
        parts, rows = jax.device_get(counted), np.split(position, self.ways[0])
        own = {at: jax.tree.map(lambda leaf, at=at: leaf[at], parts) for at in np.ndindex(*self.ways)}
        return max(part.lacking(rows[data], layer) for (data, _), part in own.items())

    @property
    def ways(self) -> tuple[int, int]:
        """Return the numbers of devices that split the rows, and the heads."""
        rows, heads = self.parts.num_free.shape
        return rows, heads

    @property
    def heads_shape(self) -> tuple[int, ...]:
        """``(*L, B, K)``, of all devices."""
        (_, _, *L, B, K), (rows, heads) = self.parts.heads_shape, self.ways
        return (*L, rows * B, heads * K)

    @property
    def position(self) -> Int[Array, "data tensor P page"]:
        """Return the position of the token in each slot of the devices' pages, -1 where the slot is free."""
        return self.parts.position

    @property
    def num_slots(self) -> int:
        """Return the most slots that one head can hold."""
        return self.parts.table.shape[-1] * self.page_size

    @property
    def page_size(self) -> int:
        """Slots per page."""
        return self.parts.position.shape[-1]

    @property
    def num_pages(self) -> int:
        """Return the pages of each device's pool, owned or free."""
        return self.parts.num_pages

    @property
    def positions(self) -> Positions:
        """Return the positions that keys are rotated to; see :meth:`kvjax.KVCache.init`."""
        return self.parts.positions

    # Compiled, for a shard_map outside jit runs operation by operation.
    @property
    @jax.jit
    def next_position(self) -> Int[Array, "B"]:
        """Return the absolute position of each row's next token."""
        return self.read(lambda part: part.next_position, outputs=OF_ROWS)

    @property
    @jax.jit
    def num_live(self) -> Int[Array, "*L B K"]:
        """Number of tokens that each head holds."""
        return self.read(lambda part: part.num_live, outputs=axes_of_heads(self))

    def layer(self, index: int | Int[Array, ""] | None = None) -> KVCache:
        """Copy a layer to a plain cache, as :meth:`kvjax.PagedCache.layer` does; its heads stay on their devices."""
        return _layer(self, index)


Cache = KVCache | PagedCache | SplitCache  # of one layer, or of several in pages
ModelCache = LayerCaches | PagedCache | SplitCache  # the cache of all layers of a model


@jax.jit  # as next_position
def _layer(cache: SplitCache, index: Array | None) -> KVCache:
    others: Any = dict(position=OF_HEADS, next_position=OF_ROWS, state=OF_HEADS, positions=cache.positions)
    others["rotated"] = cache.parts.rotated
    outputs = KVCache(entries=jax.tree.map(lambda leaf: OF_HEADS, cache.parts.entries), **others)
    return cache.read(lambda part, index: part.layer(index), (index, SAME), outputs=outputs)


def _part(cache: PagedCache) -> PagedCache:
    return dataclasses.replace(cache, axis=HEADS)
