"""The paged cache: heads hold different numbers of tokens, in memory for the sum of all.

    entries        keys and values [P, page, D], and scales, as a plain cache stores them (kvjax/_src/cache.py): a pool
                   of pages, each owned by one head of one layer and row
    position       [P, page]      int32, the absolute position of the token in each slot, -1 where the slot is free
    owner          [P]            int32, (layer * B + row) * K + head, -1 where the page is free
    table          [*L, B, K, M]  int32, each head's pages in order, then -1
    free           [P]            int32, a stack: the first num_free entries are the free pages
    next_position  [B]            int32
    state          per-slot arrays [P, page, ...] of a policy; a HeadState is [*L, B, K, ...]
    recurrent      arrays [B, ...] by name for each layer without a KV cache, as in kvjax/_src/layer_caches.py
    axis           the mesh axis that splits a layer's heads, if K are those of one device (split_cache.py); else None

The tokens of a head may be anywhere in its pages. A head takes pages when new tokens find no free slot, and frees pages
when it has more than its tokens need: tokens of its last pages then move into free slots of its first ones. So when
heads exchange slots, at most as many tokens move as were evicted, never the whole cache. Attention reads pages in place
(:func:`kernels_pallas.paged_attention`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from kernels_pallas.paged_attention.pages import laid_out, slot_positions
from kvjax._src.cache import (
    Entries,
    KVCache,
    Pages,
    Positions,
    PyTree,
    Stored,
    as_stored,
    check_heads,
    check_held,
    check_positions,
    count_live,
    empty_entries,
    map_slots,
    map_state,
    nth_true,
    overwriting,
    slots_for,
    unreadable,
)
from kvjax._src.checks import check_count, is_known
from kvjax._src.layer_caches import LayerCaches
from kvjax._src.quantise import DtypesLike, check_dtypes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache(Stored):
    """Keys and values of the tokens that are kept, in pages; the module's docstring has the layout.

    :func:`kvjax.insert`, :func:`kvjax.evict` and :func:`kvjax.attend` take it like a :class:`kvjax.KVCache`.

    Example:
        >>> import jax, kvjax, numpy as np
        >>> cache = kvjax.PagedCache.init(
        ...     batch=1, kv_heads=2, pages=4, page_size=2, most=6, head_dim=2
        ... )
        >>> tokens = np.ones((1, 3, 2, 2))
        >>> cache = jax.jit(kvjax.insert)(cache, tokens, tokens)
        >>> cache.num_live.tolist(), int(cache.num_free)
        ([[3, 3]], 0)
    """

    paged = True

    entries: Entries
    position: Int[Array, "P page"]
    owner: Int[Array, "P"]
    table: Int[Array, "*L B K M"]
    free: Int[Array, "P"]
    num_free: Int[Array, ""]
    next_position: Int[Array, "B"]
    state: PyTree = ()
    recurrent: tuple[dict[str, Array], ...] = ()
    positions: Positions = dataclasses.field(default="absolute", metadata={"static": True})
    axis: str | tuple[()] | None = dataclasses.field(default=None, metadata={"static": True})
    rotated: int | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def init(
        cls,
        *,
        pages: int,
        page_size: int,
        most: int,
        dtype: DtypesLike = jnp.float32,
        init_state: Callable[[int, int, int], PyTree] | None = None,
        positions: Positions = "absolute",
        rotated: int | None = None,
        **heads: Any,
    ) -> PagedCache:
        """Make an empty cache.

        Args:
            pages: the total number of pages; see :func:`pages_for`.
            page_size: slots per page.
            most: the most slots that one head can hold; it sets the width of the page table.
            init_state: ``init_state(B, K, S)``, a policy's ``state`` for one group size and head dim.
            dtype, positions: see :meth:`kvjax.KVCache.init`.
            rotated: see :func:`kvjax.empty_cache`.
            heads: ``batch``, ``kv_heads``, ``head_dim`` and, for several of them, ``layers``; likewise.

        Raises:
            ValueError: if a size is below 1, there are fewer pages than heads, or the dtype or the positions are
                unknown.
        """
        check_positions(positions)
        dtypes = check_dtypes(dtype)
        batch, kv_heads, head_dim, layers = check_heads(**heads)
        sizes = dict(pages=pages, page_size=page_size, most=most)
        pages, page_size, most = (check_count(name, n, 1, "a cache needs at least 1") for name, n in sizes.items())
        stack = () if layers is None else (layers,)
        count = math.prod((*stack, batch, kv_heads))
        if pages < count:
            raise ValueError(f"{pages} pages were given for {count} heads; give at least one per head (see pages_for).")
        state: PyTree = ()
        if init_state is not None:
            state = map_state(
                lambda slots, _: slots.reshape(pages, page_size, *slots.shape[3:]),
                lambda _, heads: jnp.zeros((*stack, *heads.shape), heads.dtype),
                init_state(pages, 1, page_size),
                init_state(batch, kv_heads, 1),
            )
        table_shape = (*stack, batch, kv_heads, -(-most // page_size))
        return cls(
            entries=empty_entries((pages, page_size), head_dim, dtypes, rotated is None),
            position=jnp.full((pages, page_size), -1, jnp.int32),
            owner=jnp.full(pages, -1, jnp.int32),
            table=jnp.full(table_shape, -1, jnp.int32),
            free=jnp.arange(pages - 1, -1, -1, dtype=jnp.int32),
            num_free=jnp.int32(pages),
            next_position=jnp.zeros(batch, jnp.int32),
            state=state,
            positions=positions,
            rotated=rotated,
        )

    @property
    def page_size(self) -> int:
        """Slots per page."""
        return self.position.shape[-1]

    @property
    def num_slots(self) -> int:
        """Return the most slots that one head can hold."""
        return self.table.shape[-1] * self.page_size

    @property
    def heads_shape(self) -> tuple[int, ...]:
        """``(*L, B, K)``."""
        return self.table.shape[:-1]

    @property
    def num_pages(self) -> int:
        """P, the pages of the pool, owned or free."""
        return self.owner.shape[-1]

    @property
    def num_live(self) -> Array:
        """Number of tokens that each head holds, int32 ``[*L, B, K]``."""
        return _live_of_heads(self.position, self.table)

    def heads(self) -> Int[Array, "P"]:
        """Return the head of each page, that of a free page being 0; see :meth:`kvjax.KVCache.heads`."""
        return jnp.maximum(self.owner, 0)

    def insert(
        self,
        key: Array,
        value: Array,
        position: Int[Array, "B T"],
        layer: int | Int[Array, ""] | None = None,
        room: bool = False,
    ) -> PagedCache:
        """Insert tokens as :func:`kvjax.insert` does, into new pages if need be; ``room`` promises that they fit."""
        B, T, K, _ = key.shape
        checked = room or is_known(self.position, self.table, position)
        count = jnp.sum(position >= 0, axis=1, dtype=jnp.int32)
        cache = _take_pages(self, count, -(-T // self.page_size), layer)
        table = cache.layer_table(layer)
        slot_free = jnp.repeat(table >= 0, cache.page_size, axis=2) & (slot_positions(cache.position, table) < 0)
        slot = slots_for(position >= 0, slot_free)
        lost = None
        if not checked:
            slot, lost = overwriting(slot, position >= 0, jnp.sum(table >= 0, axis=-1) * cache.page_size)
            slot = jnp.where(slot < 0, slot_free.shape[2], slot)  # a head with fewer slots than the block has tokens
        page = jnp.take_along_axis(table, slot // cache.page_size, axis=2, mode="fill", fill_value=-1)
        written = (position >= 0)[:, None] & (page >= 0)
        page = jnp.where(written, page, cache.owner.shape[0])  # others are out of bounds
        index = (page, slot % cache.page_size)

        def write(leaf: Array, new: Array) -> Array:
            return leaf.at[index].set(new.astype(leaf.dtype), mode="drop")

        entries = unreadable(as_stored(cache, key.swapaxes(1, 2), value.swapaxes(1, 2)), lost)
        return dataclasses.replace(
            cache,
            entries=jax.tree.map(write, cache.entries, entries),
            position=write(cache.position, jnp.broadcast_to(position[:, None], (B, K, T))),
            next_position=jnp.maximum(cache.next_position, jnp.max(position, axis=1) + 1),
            state=map_slots(lambda leaf: write(leaf, jnp.zeros((B, K, T, *leaf.shape[2:]))), cache.state),
        )

    def lacking(self, position: Int[np.ndarray, "B T"], layer: int | Int[Array, ""] | None = None) -> int:
        """Count the slots, of a head or of whole pages, that new tokens lack; see :meth:`kvjax.KVCache.lacking`."""
        entering = np.sum(position >= 0, axis=1)[:, None]  # [B, 1]
        table = np.asarray(self.table)[() if layer is None else layer]
        live = np.asarray(self.position) >= 0  # NumPy: inside jit, jnp would turn even known arrays into tracers
        wanted = entering + np.where(table >= 0, live.sum(axis=-1)[table], 0).sum(axis=-1)
        pages = np.maximum(-(-wanted // self.page_size) - np.sum(table >= 0, axis=-1), 0).sum() - int(self.num_free)
        return max(int((wanted - self.num_slots).max()), int(pages) * self.page_size)

    def write_layer(
        self, whole: Shaped[Array, "P page *rest"], part: Array, layer: int | Int[Array, ""] | None
    ) -> Shaped[Array, "P page *rest"]:
        """Write what was computed on ``layer(layer)``, ``[B, K, M * page, ...]``, to the layer's pages in a pool."""
        table = self.layer_table(layer)
        part = part.reshape(*table.shape, self.page_size, *part.shape[3:])
        return whole.at[jnp.where(table >= 0, table, self.num_pages)].set(part.astype(whole.dtype), mode="drop")

    def released(self) -> PagedCache:
        """Free the pages that heads no longer need, after moving the tokens that are still in them.

        Afterwards each head has the fewest pages that hold its tokens: the first ones in its row of the table. Only the
        tokens of freed pages move. They move in a loop that does not support reverse-mode differentiation.
        """
        page_size, P = self.page_size, self.owner.shape[0]
        table = self.table.reshape(-1, self.table.shape[-1])  # [H, M], H heads of all layers and rows
        H, M = table.shape
        owned = table >= 0
        tokens = jnp.sum(_page_counts(self, table), axis=-1)
        tail = owned & (jnp.arange(M)[None] >= -(-tokens // page_size)[:, None])
        chunk = 4 * H  # tokens moved per pass; most steps need one pass or none

        def waiting(moved: tuple[PyTree, Array, PyTree]) -> Array:
            return jnp.sum(jnp.where(tail, _page_counts(self, table, moved[1]), 0)) > 0

        def move(moved: tuple[PyTree, Array, PyTree]) -> tuple[PyTree, Array, PyTree]:
            entries, position, state = moved
            counts = _page_counts(self, table, position)
            source = _Places(jnp.where(tail, counts, 0))
            target = _Places(jnp.where(owned & ~tail, page_size - counts, 0))
            number = jnp.arange(chunk, dtype=jnp.int32)
            from_page, from_rank, head = source.find(number)
            # The r-th token that a head has to move goes to the r-th free slot of its first pages.
            to_page, to_rank, _ = target.find(target.first[head] + number - source.first[head])
            ids = table.ravel()
            wanted = number < source.total
            from_page, to_page = ids[from_page], jnp.where(wanted, ids[to_page], P)
            from_slot = nth_true(position[from_page] >= 0, from_rank[:, None] + 1)[:, 0]
            to_slot = nth_true(position[jnp.minimum(to_page, P - 1)] < 0, to_rank[:, None] + 1)[:, 0]

            def shift(leaf: Array) -> Array:
                return leaf.at[to_page, to_slot].set(leaf[from_page, from_slot], mode="drop")

            emptied = jnp.where(wanted, from_page, P)
            return (
                jax.tree.map(shift, entries),
                shift(position).at[emptied, from_slot].set(-1, mode="drop"),
                map_slots(shift, state),
            )

        entries, position, state = jax.lax.while_loop(waiting, move, (self.entries, self.position, self.state))
        given = tail.ravel()
        place = jnp.where(given, self.num_free + jnp.cumsum(given, dtype=jnp.int32) - 1, P)
        ids = table.ravel()
        return dataclasses.replace(
            self,
            entries=entries,
            position=position,
            state=state,
            owner=self.owner.at[jnp.where(given, ids, P)].set(-1, mode="drop"),
            free=self.free.at[place].set(ids, mode="drop"),
            num_free=self.num_free + jnp.sum(given, dtype=jnp.int32),
            table=jnp.where(tail, -1, table).reshape(self.table.shape),
        )

    def resized(self, slots: int, pages: int = 0) -> PagedCache:
        """Return the cache with at least this many pages, and room for as many slots in a head; it never shrinks."""
        P = self.owner.shape[0]
        new, longer = max(pages - P, 0), max(-(-slots // self.page_size) - self.table.shape[-1], 0)

        def grown(leaf: Array, fill: int = 0) -> Array:
            return jnp.pad(leaf, ((0, new), *((0, 0),) * (leaf.ndim - 1)), constant_values=fill)

        free = jax.lax.dynamic_update_slice(grown(self.free), jnp.arange(P, P + new, dtype=jnp.int32), (self.num_free,))
        return dataclasses.replace(
            self,
            entries=jax.tree.map(grown, self.entries),
            position=grown(self.position, -1),
            owner=grown(self.owner, -1),
            table=jnp.pad(self.table, ((0, 0),) * (self.table.ndim - 1) + ((0, longer),), constant_values=-1),
            free=free if new else self.free,
            num_free=self.num_free + new,
            state=map_slots(grown, self.state),
        )

    def layer(self, index: int | Int[Array, ""] | None = None, head: int | Int[Array, ""] | None = None) -> KVCache:
        """Copy a layer, or one head of it, to a plain cache with all slots that its page table can hold."""
        table = self.layer_table(index)
        if head is not None:
            table = jax.lax.dynamic_slice_in_dim(table, head, 1, axis=1)

        def of_slots(leaf: Array) -> Array:
            return laid_out(leaf, table)

        def of_heads(value: Array) -> Array:
            value = value if index is None else value[index]
            return value if head is None else jax.lax.dynamic_slice_in_dim(value, head, 1, axis=1)

        return KVCache(
            entries=jax.tree.map(of_slots, self.entries),
            position=slot_positions(self.position, table),
            next_position=self.next_position,
            state=map_state(of_slots, of_heads, self.state),
            positions=self.positions,
            rotated=self.rotated,
        )

    def in_pages(self, layer: Int[Array, ""], most: int) -> Pages:
        """Return a layer's page table, and the pool, whose pages have the size that they have."""
        return Pages(self.entries, self.position, self.table[layer], self.rotated)

    def layer_table(self, index: int | Int[Array, ""] | None) -> Int[Array, "B K M"]:
        """Return the pages of a layer's heads; ``index`` is None for a cache that does not stack layers."""
        return self.table if index is None else self.table[index]


@jax.jit
def _live_of_heads(position: Int[Array, "P page"], table: Int[Array, "*L B K M"]) -> Int[Array, "*L B K"]:
    return jnp.sum(jnp.where(table >= 0, count_live(position)[table], 0), axis=-1)


def pages_for(slots: int, heads: int, page_size: int) -> int:
    """Return how many pages are enough for ``slots`` tokens of ``heads`` heads, however the heads share them.

    In the worst case, the last page of each head holds one token.

    Example:
        >>> from kvjax import pages_for
        >>> pages_for(slots=1024, heads=8, page_size=16)
        71
    """
    slots = check_count("slots", slots, 0, "give the tokens that they hold")
    heads = check_count("heads", heads, 1, "give the heads of all layers and rows")
    page_size = check_count("page_size", page_size, 1, "a page has at least 1 slot")
    return max(heads, (slots + heads * (page_size - 1)) // page_size)


def pack(cache: KVCache | LayerCaches, *, pages: int, page_size: int, most: int) -> PagedCache:
    """Copy the live tokens of a plain cache into pages, for example after one eviction of a whole prompt.

    Args:
        pages, page_size, most: see :meth:`PagedCache.init`. Under jit, a row with tokens that do not fit is NaN from
            then on.

    Raises:
        ValueError: outside jit, if the tokens do not fit.

    Example:
        >>> import functools, jax, kvjax, numpy as np
        >>> cache = kvjax.KVCache.init(batch=1, kv_heads=2, slots=4, head_dim=1)
        >>> tokens = np.ones((1, 3, 2, 1))
        >>> cache = jax.jit(kvjax.insert)(cache, tokens, tokens)
        >>> jax.jit(functools.partial(kvjax.pack, pages=4, page_size=2, most=4))(
        ...     cache
        ... ).num_live.tolist()
        [[3, 3]]
    """
    pages, page_size, most = (
        check_count(name, size, 1, "a cache needs at least 1")
        for name, size in {"pages": pages, "page_size": page_size, "most": most}.items()
    )
    if not isinstance(cache, KVCache | LayerCaches):
        raise ValueError(f"the cache is a {type(cache).__name__}; expected a plain one, whose tokens go into pages.")
    if isinstance(cache, LayerCaches) and not cache.alike:
        raise ValueError("pages hold tokens of one head dim, and as many heads of each layer, but the layers differ.")
    heads, live, M = cache.heads_shape, cache.live, -(-most // page_size)
    layers = cache.layers if isinstance(cache, LayerCaches) else (cache,)
    need = jnp.minimum(-(-jnp.sum(live, axis=-1, dtype=jnp.int32) // page_size), M)  # [*L, B, K]
    start = (jnp.cumsum(need) - need.ravel()).reshape(heads)
    number = jax.lax.broadcasted_iota(jnp.int32, (*heads, M), len(heads))
    page = start[..., None] + number
    table = jnp.where((number < need[..., None]) & (page < pages), page, -1).astype(jnp.int32)
    used = jnp.minimum(jnp.sum(need), pages).astype(jnp.int32)
    lost = None
    if is_known(live):
        held = np.asarray(live).sum(-1)
        check_held("most", int(held.max()), M * page_size)
        if (wanted := int(np.ceil(held / page_size).sum())) > pages:
            raise ValueError(f"the tokens need {wanted} pages of {page_size} slots, but {pages} were given: give more.")
    else:
        short = jnp.sum(table >= 0, axis=-1) * page_size < jnp.sum(live, axis=-1)
        lost = jnp.broadcast_to(jnp.any(short, axis=-1, keepdims=True), heads).reshape(len(layers), -1)
    ids = jnp.where(table >= 0, table, pages).reshape(len(layers), -1)  # out of bounds: not written
    # Slot s of page m of a head takes the head's (m * page_size + s)-th live token; it is free if there is none.
    order = jnp.broadcast_to(jnp.arange(1, M * page_size + 1), (*heads, M * page_size))
    source = nth_true(live, order).reshape(len(layers), -1, M * page_size)

    def pooled(fill: int, *leaves: Array) -> Array:
        pool = jnp.full((pages, page_size, *leaves[0].shape[3:]), fill, leaves[0].dtype)
        for leaf, own, to in zip(leaves, source, ids, strict=True):
            flat = leaf.reshape(len(own), *leaf.shape[2:])
            moved = flat.at[jnp.arange(len(flat))[:, None], own].get(mode="fill", fill_value=fill)
            pool = pool.at[to].set(moved.reshape(len(to), page_size, *leaf.shape[3:]), mode="drop")
        return pool

    def stored(layer: KVCache, number: int) -> Entries:
        return layer.entries if lost is None else unreadable(layer.entries, lost[number].reshape(heads[-2:]))

    owner = jnp.full(pages, -1, jnp.int32)
    of_head = jnp.repeat(jnp.arange(math.prod(heads), dtype=jnp.int32), M)
    states = [layer.state for layer in layers]
    entries = [stored(layer, number) for number, layer in enumerate(layers)]
    return PagedCache(
        entries=jax.tree.map(functools.partial(pooled, 0), *entries),
        position=pooled(-1, *(layer.position for layer in layers)),
        owner=owner.at[ids.ravel()].set(of_head, mode="drop"),
        table=table,
        free=jnp.arange(pages - 1, -1, -1, dtype=jnp.int32),  # the pages in use are its last entries
        num_free=jnp.int32(pages) - used,
        next_position=cache.next_position,
        state=map_state(
            functools.partial(pooled, 0), lambda *parts: jnp.stack(parts).reshape(*heads, *parts[0].shape[2:]), *states
        ),
        recurrent=cache.recurrent,
        positions=cache.positions,
        rotated=layers[0].rotated,
    )


def trimmed(cache: PagedCache, pages: int, slots: int | None = None) -> PagedCache:
    """Take free pages away from a cache, and room for more than ``slots`` in a head; no token may be in them."""
    most = None if slots is None else -(-slots // cache.page_size)
    P, used = cache.owner.shape[0], cache.owner.shape[0] - cache.num_free
    kept = jnp.argsort(cache.owner < 0, stable=True)[:pages]  # owned pages come first
    place = jnp.zeros(P, jnp.int32).at[kept].set(jnp.arange(pages, dtype=jnp.int32))

    def take(leaf: Array) -> Array:
        return leaf[kept]

    return dataclasses.replace(
        cache,
        entries=jax.tree.map(take, cache.entries),
        position=take(cache.position),
        owner=take(cache.owner),
        table=jnp.where(cache.table >= 0, place[cache.table], -1)[..., :most],
        free=jnp.minimum(jnp.arange(pages, dtype=jnp.int32) + used, pages - 1),
        num_free=pages - used,
        state=map_slots(take, cache.state),
    )


class _Places:
    """A numbering of the tokens (or free slots) in the pages of a table, of which each page has ``counts`` [H, M]."""

    def __init__(self, counts: Int[Array, "H M"]):
        self.per_head = counts.shape[1]
        self.counts = counts.ravel()
        self.ends = jnp.cumsum(self.counts)
        self.total = self.ends[-1]
        heads = jnp.sum(counts, axis=1)
        self.first = jnp.cumsum(heads) - heads  # the number of each head's first token (or slot)

    def find(self, number: Int[Array, "n"]) -> tuple[Array, Array, Array]:
        """Return the place in the flattened table, the rank inside the page, and the head of the tokens (or slots)."""
        place = jnp.minimum(jnp.searchsorted(self.ends, number, side="right"), self.ends.shape[0] - 1)
        return place, number - (self.ends - self.counts)[place], place // self.per_head


def _page_counts(cache: PagedCache, table: Array, position: Array | None = None) -> Array:
    """Count the tokens in each page of the table; 0 where there is no page."""
    live = cache.live if position is None else position >= 0
    return jnp.where(table >= 0, jnp.sum(live, axis=-1, dtype=jnp.int32)[table], 0)


def _take_pages(cache: PagedCache, tokens: Int[Array, "B"], at_most: int, layer: int | Array | None) -> PagedCache:
    """Give each head of a layer the pages that it lacks for ``tokens`` more tokens, at most ``at_most`` pages."""
    table = cache.layer_table(layer)
    B, K, M = table.shape
    P = cache.owner.shape[0]
    have = jnp.sum(table >= 0, axis=-1)  # [B, K]
    room = have * cache.page_size - jnp.sum(_page_counts(cache, table), axis=-1)
    lacking = -(-jnp.maximum(tokens[:, None] - room, 0) // cache.page_size)
    lacking = jnp.minimum(lacking, M - have)
    before = (jnp.cumsum(lacking) - lacking.ravel()).reshape(B, K)
    number = jnp.arange(at_most, dtype=jnp.int32)[None, None]
    rank = before[..., None] + number  # [B, K, at_most]
    taken = (number < lacking[..., None]) & (rank < cache.num_free)
    page = jnp.where(taken, cache.free[jnp.maximum(cache.num_free - 1 - rank, 0)], P)
    place = jnp.where(taken, have[..., None] + number, M)
    index = (jnp.arange(B)[:, None, None], jnp.arange(K)[:, None], place)
    layer_index = () if layer is None else (layer,)
    first = jnp.asarray(0 if layer is None else layer, jnp.int32) * B * K
    head = jnp.arange(B * K, dtype=jnp.int32).reshape(B, K, 1) + first
    return dataclasses.replace(
        cache,
        table=cache.table.at[(*layer_index, *index)].set(page, mode="drop"),
        owner=cache.owner.at[page].set(jnp.broadcast_to(head, page.shape), mode="drop"),
        num_free=cache.num_free - jnp.sum(taken, dtype=jnp.int32),
    )
