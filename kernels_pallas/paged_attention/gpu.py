"""The kernels for GPU: those of ``cache_attention``, which find a slot in the pool through its head's page table.

A program stops at its head's last page.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array

from kernels_pallas.cache_attention.gpu import Storage, attend_heads, beyond
from kernels_pallas.paged_attention.pages import table_ends


def unsupported(query: Any, key: Any, value: Any, position: Any, table: Any, *_: Any, **__: Any) -> str | None:
    """Return why the kernels can't run with these arguments, or None."""
    return beyond(query, key, value, table.shape[1])


def of_heads(query, about, window, key, value, position, table, *floats, **options):
    B, K, M = table.shape
    size = key.shape[1]

    def place(where: tuple[Any, Any], slot: Array) -> tuple[tuple[Array, Array], Array]:
        page = triton.load(where[0].at[slot // size], mask=slot < M * size, other=-1)
        return (jnp.maximum(page, 0), slot % size), page >= 0

    storage = Storage(
        slots=M * size,
        array=pl.BlockSpec(key.shape, lambda *_: (0, 0, 0)),
        numbers=pl.BlockSpec(position.shape, lambda *_: (0, 0)),
        where=(pl.BlockSpec((None, M), lambda h, *_: (h, 0)), pl.BlockSpec((1,), lambda h, *_: (h,))),
        place=place,
        loads=2,
        end=lambda where: where[1][0] * size,
    )
    where = (table.reshape(B * K, M), table_ends(table).reshape(B * K))
    numbers = [position, *floats]
    return attend_heads(query, about, window, key, value, numbers, where, storage, name="paged", **options)
