"""The kernels for GPU: those of ``cache_attention``, which find a slot's row by its head's page table.

A program goes no further than its head's last page, and loads no row of a page that is not there.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from kernels_pallas.cache_attention.gpu import GROUPED, Storage, attend_heads, unsupported
from kernels_pallas.cache_attention.groups import in_groups, span_of
from kernels_pallas.cache_attention.reference import STATISTICS, ColumnStatistics
from kernels_pallas.derivative import with_derivative_of
from kernels_pallas.paged_attention import reference
from kernels_pallas.paged_attention.pages import slot_positions, table_ends


def paged_attention(
    query: Float[Array, "B T N D"],
    key: Float[Array, "P page D"],
    value: Float[Array, "P page D"],
    position: Int[Array, "P page"],
    table: Int[Array, "B K M"],
    query_position: Int[Array, "B T"],
    *,
    statistics: frozenset[str],
    window: int,
    sliding_window: Int[Array, ""] | int | None,
    scale: float,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N D"], ColumnStatistics]:
    """See :func:`kernels_pallas.paged_attention.api.paged_attention`."""
    reason = unsupported(query, key, value, table.shape[1])
    if reason is not None:
        raise NotImplementedError(f"paged_attention on a GPU: {reason}; implementation='reference' can.")
    names = tuple(name for name in STATISTICS if name in statistics)

    def kernel(query, key, value, position, table, query_position, span):
        run = functools.partial(_of_heads, names=names, scale=scale, interpret=interpret)
        slots = ("b k s", slot_positions(position, table))
        arrays = [("p z d", key), ("p z d", value), slots, ("w", span), ("b k m", table)]
        options = dict(names=names, kv_heads=table.shape[1], window=window, split=not interpret)
        return in_groups(run, GROUPED, query, query_position, arrays, **options)

    def definition(query, key, value, position, table, query_position, span):
        return reference.paged_attention(
            query, key, value, position, table, query_position, statistics=statistics, window=window,
            sliding_window=None if sliding_window is None else span[0], scale=scale,
        )  # fmt: skip

    arrays = (query, key, value, position, table, query_position, span_of(sliding_window))
    return with_derivative_of(definition, kernel)(*arrays)


def _of_heads(query, about, key, value, key_position, span, table, *, names, scale, interpret):
    B, K, M = table.shape
    size = key.shape[1]
    ends = size * table_ends(table).reshape(B * K)

    def load(ref: Any, where: tuple[Any, Any], slot: Array, width: int) -> Array:
        page = triton.load(where[0].at[slot // size], mask=slot < M * size, other=-1)[:, None]
        column = jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
        there = (page >= 0) & (column < ref.shape[2])
        return triton.load(ref.at[jnp.maximum(page, 0), (slot % size)[:, None], column], mask=there, other=0)

    storage = Storage(
        array=pl.BlockSpec(key.shape, lambda *_: (0, 0, 0)),
        where=(pl.BlockSpec((None, M), lambda h, *_: (h, 0)), pl.BlockSpec((1,), lambda h, *_: (h,))),
        load=load,
        end=lambda where: where[1][0],
    )
    options = dict(names=names, scale=scale, interpret=interpret, name="paged")
    where = (table.reshape(B * K, M), ends)
    return attend_heads(query, about, key, value, key_position, span, where, storage, **options)
