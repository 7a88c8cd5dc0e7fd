"""Rows that come and go: one sequence takes a row of a batch's cache, and gives it back."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax._src.border import SAME
from kvjax._src.cache import PARTS, AnyKind, KVCache, check_cache, dtypes_of, map_state, unreadable
from kvjax._src.checks import check_count, is_known
from kvjax._src.paged import PagedCache


def join[C: AnyKind](cache: C, row: int | Int[Array, ""], one: C) -> C:
    """Put a sequence with a cache of its own into a row of a batch's cache; what the row held is lost.

    Args:
        cache: the batch's, plain or paged, of one layer or several; if it is donated, it is updated in place.
        row: which row.
        one: the sequence's, a cache of one row of the same kind, made for the same policy. It may have fewer slots per
            head than the batch's cache. A paged cache needs as many free pages as ``one`` has in use, less those that
            the row gives back; under jit, a row that does not find them is NaN from then on.

    Raises:
        ValueError: if the caches do not fit, or the row is out of range; or, outside jit, if pages are lacking.

    Example:
        >>> import jax, kvjax, numpy as np
        >>> batch = kvjax.KVCache.init(batch=2, kv_heads=1, slots=3, head_dim=1)
        >>> one = kvjax.KVCache.init(batch=1, kv_heads=1, slots=2, head_dim=1)
        >>> one = jax.jit(kvjax.insert)(
        ...     one, np.ones((1, 2, 1, 1)), np.ones((1, 2, 1, 1))
        ... )
        >>> batch = jax.jit(kvjax.join)(batch, 1, one)
        >>> batch.position.tolist(), batch.next_position.tolist()
        ([[[-1, -1, -1]], [[0, 1, -1]]], [0, 2])
    """
    row = _checked_row(cache, row)
    if type(one) is not type(cache):
        raise ValueError(f"the row is a {type(one).__name__}, but the batch a {type(cache).__name__}; give two alike.")
    (head_dim, dtypes), (own_dim, own_dtypes) = (
        (arrays.head_dim, dtypes_of(arrays)) for arrays in (cache.arrays, one.arrays)
    )
    lead, own = cache.heads_shape, one.heads_shape
    structures: list[Any] = [jax.tree.structure(given) for given in (cache, one)]
    alike = (*lead[:-2], 1, lead[-1]) == own and structures[0] == structures[1]
    states = ([leaf.shape[1:] for leaf in jax.tree.leaves(given.recurrent)] for given in (cache, one))
    alike = alike and next(states) == next(states)
    if not alike or cache.ways[1] != one.ways[1] or (head_dim, dtypes) != (own_dim, own_dtypes):
        wrong = f"a cache of {own} heads of dimension {own_dim} in {own_dtypes} does not fit {lead} heads of {head_dim}"
        raise ValueError(f"{wrong} in {dtypes}: expected one row of the same model, policy, positions and dtype.")
    for slots, room in zip(one.layer_slots, cache.layer_slots, strict=True):
        if slots > room:
            raise ValueError(f"the row has {slots} slots per head, the batch {room}; compact it first.")
    joined = cache.map(_write, (row, SAME), (one.each_part, PARTS))
    return joined.map_states(lambda whole, part: _put(whole, part, row, 0), one)


@functools.singledispatch
def _write(cache: Any, row: int | Int[Array, ""], one: KVCache) -> Any:
    """Write a sequence's slots to a row of the batch's cache."""

    _check_states(cache, one)

    def put(whole: Array, part: Array) -> Array:
        return _put(whole, part, row, 0)

    def put_slots(whole: Array, part: Array, fill: int = 0) -> Array:
        widths = [(0, whole.shape[2] - part.shape[2] if axis == 2 else 0) for axis in range(part.ndim)]
        return put(whole, jnp.pad(part, widths, constant_values=fill))

    return dataclasses.replace(
        cache,
        entries=jax.tree.map(put_slots, cache.entries, one.entries),
        position=put_slots(cache.position, one.position, fill=-1),
        next_position=_put(cache.next_position, one.next_position, row, 0),
        state=map_state(put_slots, put, cache.state, one.state),
    )


def _check_states(cache: Any, one: Any) -> None:
    """Check that a policy remembers as much of each slot and head in both caches."""
    slots, heads = cache.position.ndim, len(cache.heads_shape)
    rest = [
        jax.tree.leaves(map_state(lambda x: x.shape[slots:], lambda x: x.shape[heads:], part.state))
        for part in (cache, one)
    ]
    if rest[0] != rest[1]:
        raise ValueError("the row's policy remembers more or less per token than the batch's: give the same to both.")


def leave[C: AnyKind](cache: C, row: int | Int[Array, ""]) -> C:
    """Empty a row of a batch's cache: its slots, or its pages, are free, and its next token has position 0.

    What a policy remembers per head is 0, as in a new cache.

    Args:
        cache: plain or paged, of one layer or several; if it is donated, it is updated in place.
        row: which row.

    Raises:
        ValueError: if the row is out of range.

    Example:
        >>> import jax, kvjax, numpy as np
        >>> cache = kvjax.KVCache.init(batch=2, kv_heads=1, slots=2, head_dim=1)
        >>> cache = jax.jit(kvjax.insert)(
        ...     cache, np.ones((2, 1, 1, 1)), np.ones((2, 1, 1, 1))
        ... )
        >>> jax.jit(kvjax.leave)(cache, 0).position.tolist()
        [[[-1, -1]], [[0, -1]]]
    """
    row = _checked_row(cache, row)
    return cache.map(_free, (row, SAME)).map_states(lambda whole: whole.at[row].set(0))


@functools.singledispatch
def _free(cache: Any, row: int | Int[Array, ""]) -> Any:
    """Free a row's slots."""
    position = cache.position.at[row].set(-1)
    return dataclasses.replace(
        cache,
        position=position,
        next_position=cache.next_position.at[row].set(0),
        state=_forgotten(cache.state, row),
    )


def _forgotten(state: Any, row: Any) -> Any:
    """Return a policy's state with what it remembers of a row's heads at 0; ``row`` is their place."""
    return map_state(lambda slots: slots, lambda heads: heads.at[row].set(0), state)


@_free.register(PagedCache)
def _free_pages(cache: PagedCache, row: int | Int[Array, ""]) -> PagedCache:
    """Free a row's pages."""
    *L, B, K = cache.heads_shape
    mine = (cache.owner >= 0) & (cache.owner // K % B == row)
    position = jnp.where(mine[:, None], -1, cache.position)
    next_position = cache.next_position.at[row].set(0)
    state = _forgotten(cache.state, (*[slice(None)] * len(L), row))
    return dataclasses.replace(cache, position=position, next_position=next_position, state=state).released()


def _checked_row(cache: AnyKind, row: int | Int[Array, ""]) -> int | Int[Array, ""]:
    check_cache(cache)
    rows = cache.heads_shape[-2]
    there = f"the cache has rows 0 to {rows - 1}"
    if is_known(row):
        row = check_count("the row", row, 0, there)
    if row >= rows if isinstance(row, int) else row.shape or not jnp.issubdtype(row.dtype, jnp.integer):
        raise ValueError(f"the row is {row}; {there}.")
    if cache.ways[0] > 1:
        raise ValueError(f"the rows are split over {cache.ways[0]} devices, but one row comes or goes; use data=1.")
    return row


def _put(whole: Array, part: Array, row: int | Int[Array, ""], axis: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), row, axis)


@_write.register(PagedCache)
def _write_pages(cache: PagedCache, row: int | Int[Array, ""], one: PagedCache) -> PagedCache:
    """Copy the pages in use of a sequence's pool to free pages of the batch's pool."""
    if one.page_size != cache.page_size:
        raise ValueError(f"the row has pages of {one.page_size} slots, but the batch of {cache.page_size}.")
    _check_states(cache, one)
    cache = _free_pages(cache, row)
    *L, B, K = cache.heads_shape
    P = cache.owner.shape[0]
    source = one.table  # [*L, 1, K, M']
    number = (jnp.cumsum(source >= 0, dtype=jnp.int32) - 1).reshape(source.shape)
    found, lost = (source >= 0) & (number < cache.num_free), None
    if not is_known(source, cache.num_free):
        lost = jnp.any(found != (source >= 0))
    elif (lacking := int(np.sum(np.asarray(source) >= 0)) - int(cache.num_free)) > 0:
        raise ValueError(f"the row does not fit: {lacking} more free pages are needed; evict first, or add pages.")
    page = jnp.where(found, cache.free[jnp.maximum(cache.num_free - 1 - number, 0)], P)  # out of bounds: not written

    def copy(whole: Array, part: Array) -> Array:
        return whole.at[page].set(part[jnp.maximum(source, 0)], mode="drop")

    def put(whole: Array, part: Array) -> Array:
        return _put(whole, part, row, len(L))

    layer = jnp.arange(L[0] if L else 1, dtype=jnp.int32).reshape(*L, 1, 1, 1)
    head = (layer * B + row) * K + jnp.arange(K, dtype=jnp.int32)[:, None]
    short = cache.table.shape[-1] - source.shape[-1]
    widths = [(0, 0)] * len(L) + [(0, 0), (0, 0), (0, short)]
    table = jnp.pad(jnp.where(found, page, -1), widths, constant_values=-1)
    return dataclasses.replace(
        cache,
        entries=jax.tree.map(copy, cache.entries, unreadable(one.entries, lost)),
        position=copy(cache.position, one.position),
        owner=cache.owner.at[page].set(jnp.broadcast_to(head, page.shape), mode="drop"),
        table=put(cache.table, table),
        num_free=cache.num_free - jnp.sum(found, dtype=jnp.int32),
        next_position=_put(cache.next_position, one.next_position, row, 0),
        state=map_state(copy, put, cache.state, one.state),
    )
