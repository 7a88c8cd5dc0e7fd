"""The paged cache on a mesh: each device has the pages of its own rows and heads, in a pool of its own.

The axis "data" of a mesh splits the rows, and "tensor" the KV heads, as they split a plain cache. Pages are read and
written by the device that owns them, and never leave it. Heads that compete for slots add up counts of tokens
(:class:`kvjax.allocation.Contest`), and heads that share their scores add these up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from kernels_pallas.prepare import SPLIT, mesh_of
from kvjax.cache import PARTS, AnyKind, KVCache, Positions, PyTree
from kvjax.layers import LayerCaches
from kvjax.paged import PagedCache, pack

ROWS, HEADS = SPLIT["b"], SPLIT["k"]
OF_ROWS: Any = PartitionSpec(ROWS)  # [B, ...]
OF_TOKENS: Any = PartitionSpec(ROWS, None, HEADS)  # [B, T, K, D]
SAME = PartitionSpec()  # on all devices


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

        return cls(on_devices(of_device, [cache.map(_axes_of)], PARTS, mesh)(cache))

    def map(self, function: Callable[..., Any], *others: tuple[PyTree, Any]) -> SplitCache:
        """Return the cache after a function has run on each device's part of it; see :meth:`read`."""
        return SplitCache(self.read(function, *others, outputs=PARTS))

    def read(self, function: Callable[..., Any], *others: tuple[PyTree, Any], outputs: Any) -> Any:
        """Return what a function returns for each device's part of the cache; see :meth:`kvjax.KVCache.read`."""
        trees, axes = [tree for tree, _ in others], [axes for _, axes in others]
        mesh = mesh_of(jax.tree.leaves(self.parts))
        if mesh.empty:
            raise ValueError("the cache is split over a mesh, but its arrays are on none; put them back on that mesh.")
        return on_devices(function, [PARTS, *axes], outputs, mesh)(self.parts, *trees)

    @property
    def each_part(self) -> PagedCache:
        """Return the devices' parts, stacked."""
        return self.parts

    def lacking(self, position: Int[np.ndarray, "B T"], layer: int | Int[Array, ""] | None = None) -> int:
        """Count the slots that the fullest device lacks for new tokens; see :meth:`kvjax.KVCache.lacking`."""
        parts, rows = jax.device_get(self.parts), np.split(position, self.ways[0])
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
        return self.read(lambda part: part.next_position, outputs=PartitionSpec(ROWS))

    @property
    @jax.jit
    def num_live(self) -> Int[Array, "*L B K"]:
        """Number of tokens that each head holds."""
        return self.read(lambda part: part.num_live, outputs=_of_heads(self.heads_shape))

    def layer(self, index: int | Int[Array, ""] | None = None) -> KVCache:
        """Copy a layer to a plain cache, as :meth:`kvjax.PagedCache.layer` does; its heads stay on their devices."""
        return _layer(self, index)


ModelCache = LayerCaches | PagedCache | SplitCache  # the cache of all layers of a model


def on_devices(function: Callable[..., Any], inputs: Sequence[Any], outputs: Any, mesh: Any) -> Callable[..., Any]:
    """Wrap a function so that each device of a mesh runs it on its own part of the arguments.

    Args:
        inputs: for each argument how the mesh splits it: ``PARTS`` for a tree with one part per device, which the
            function gets without the axes ``[data, tensor]``; else a PartitionSpec, or a tree of them.
        outputs: likewise for what it returns.
    """

    several = isinstance(outputs, tuple) and not isinstance(outputs, PartitionSpec)

    def of_device(*arguments: Any) -> Any:
        own = (_own(tree) if axes is PARTS else tree for tree, axes in zip(arguments, inputs, strict=True))
        made = function(*own)
        if several:
            return tuple(_stacked(tree) if axes is PARTS else tree for tree, axes in zip(made, outputs, strict=True))
        return _stacked(made) if outputs is PARTS else made

    def spec(axes: Any) -> Any:
        return PartitionSpec(ROWS, HEADS) if axes is PARTS else axes

    _check_automatic(mesh)
    # check_vma: what is the same on all devices of an axis, such as next_position, is not known to be.
    return jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=tuple(map(spec, inputs)),
        out_specs=tuple(map(spec, outputs)) if several else spec(outputs),
        check_vma=False,
    )


def check_mesh(mesh: Mesh | AbstractMesh, batch: int, kv_heads: int) -> tuple[int, int]:
    """Return how many devices split the rows and the heads of a cache, after a check that they divide them."""
    if not {ROWS, HEADS} <= set(mesh.axis_names):
        raise ValueError(f"the mesh has axes {mesh.axis_names}; expected {ROWS!r} for rows and {HEADS!r} for heads.")
    _check_automatic(mesh)
    rows, heads = mesh.shape[ROWS], mesh.shape[HEADS]
    if batch % rows or kv_heads % heads:
        raise ValueError(f"{ROWS}={rows} and {HEADS}={heads} do not divide {batch} rows and {kv_heads} heads.")
    return rows, heads


def on_mesh[Plain: (KVCache, LayerCaches)](cache: Plain, mesh: Mesh | AbstractMesh) -> Plain:
    """Return a plain cache with its rows and heads split over a mesh."""
    _check_automatic(mesh)

    def place(leaf: Array, axes: PartitionSpec) -> Array:
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, axes))

    return jax.tree.map(place, cache, cache.map(_axes_of))


@jax.jit  # as next_position
def _layer(cache: SplitCache, index: Array | None) -> KVCache:
    parts = cache.parts
    heads = PartitionSpec(ROWS, HEADS)
    entries = jax.tree.map(lambda leaf: heads, parts.entries)
    others: Any = dict(position=heads, next_position=PartitionSpec(ROWS), state=heads)
    outputs = KVCache(entries=entries, **others, positions=cache.positions)
    return cache.read(lambda part, index: part.layer(index), (index, PartitionSpec()), outputs=outputs)


def _check_automatic(mesh: Mesh | AbstractMesh) -> None:
    if AxisType.Explicit in mesh.axis_types:
        raise ValueError("the mesh has explicit axes; expected automatic ones, as those of jax.sharding.Mesh.")


def _axes_of(cache: KVCache) -> KVCache:
    """Return how a mesh splits each array of a plain cache."""
    heads = _of_heads(cache.heads_shape)
    axes = jax.tree.map(lambda leaf: heads, cache)
    return dataclasses.replace(axes, next_position=PartitionSpec(ROWS))


def _of_heads(heads: tuple[int, ...]) -> PartitionSpec:
    return PartitionSpec(*(None,) * (len(heads) - 2), ROWS, HEADS)


def _part(cache: PagedCache) -> PagedCache:
    return dataclasses.replace(cache, axis=HEADS)


def _own(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[0, 0], tree)


def _stacked(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[None, None], tree)
