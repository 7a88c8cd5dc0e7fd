"""The kernels for GPU: those of ``cache_attention``, which find a slot's row through its head's page table.

A program stops at its head's last page and loads nothing where the table has no page.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array

from kernels_pallas.cache_attention.gpu import Storage, attend_heads, beyond
from kernels_pallas.eight_bits import filler
from kernels_pallas.paged_attention.pages import table_ends


def unsupported(query: Any, key: Any, value: Any, position: Any, table: Any, *_: Any, **__: Any) -> str | None:
    """Return why the kernels can't run with these arguments, or None."""
    return beyond(query, key, value, table.shape[1])


def of_heads(query, about, span, key, value, key_position, table, *floats, **options):
    B, K, M = table.shape
    size = key.shape[1]
    ends = size * table_ends(table).reshape(B * K)

    def load(ref: Any, where: tuple[Any, Any], slot: Array, width: int) -> Array:
        page = triton.load(where[0].at[slot // size], mask=slot < M * size, other=-1)[:, None]
        column = jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
        there = (page >= 0) & (column < ref.shape[2])
        row = ref.at[jnp.maximum(page, 0), (slot % size)[:, None], column]
        return triton.load(row, mask=there, other=filler(ref.dtype))

    storage = Storage(
        array=pl.BlockSpec(key.shape, lambda *_: (0, 0, 0)),
        where=(pl.BlockSpec((None, M), lambda h, *_: (h, 0)), pl.BlockSpec((1,), lambda h, *_: (h,))),
        load=load,
        end=lambda where: where[1][0],
    )
    where = (table.reshape(B * K, M), ends)
    return attend_heads(query, about, span, key, value, key_position, floats, where, storage, name="paged", **options)
