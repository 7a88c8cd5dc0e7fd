"""The kernels for TPU: those of ``cache_attention``, where a chunk of slots is several pages, each a block of its own.

The page table is in scalar memory and gives each block's index. A block that is the same as in the step before is not
copied again, so where a head has no page, its entry in the table repeats the last page at that entry.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from kernels_pallas.cache_attention import tpu
from kernels_pallas.cache_attention.tpu import Storage, attend_heads
from kernels_pallas.paged_attention.pages import laid_out, slot_positions, table_ends

PAGES = 32  # of a chunk, at most: each takes a copy of its own
CHUNK_BYTES = 8 * 2**20  # of the keys and values of a chunk and of the next one
TABLE_BYTES = 2**19  # of scalar memory


def unsupported(query: Any, key: Any, value: Any, position: Any, table: Any, *_: Any, **__: Any) -> str | None:
    """Return why the kernels can't run with these arguments, or None."""
    size = key.shape[1]
    if size % 8:
        return f"a page has {size} slots, but the kernels take multiples of 8"
    if _unit(size) * size * _slot_bytes(key, value) > CHUNK_BYTES:
        return f"{_unit(size)} pages of {size} slots of {key.shape[2]} numbers do not fit into a chunk"
    if 4 * math.prod(table.shape) > TABLE_BYTES:
        return f"the page table has {math.prod(table.shape)} entries, but the kernels take up to {TABLE_BYTES // 4}"
    return tpu.beyond(query, key, value, table.shape[1])


def of_heads(query, about, window, key, value, position, table, *floats, **options):
    key_position, floats = slot_positions(position, table), tuple(laid_out(x, table) for x in floats)
    K, M = table.shape[1:]
    size, D = key.shape[1:]
    unit = _unit(size)

    def stored(most: int) -> tuple[Storage, tuple[Array, ...]]:
        most = min(most, CHUNK_BYTES // _slot_bytes(key, value)) // size
        pages = max(min(most, PAGES, pl.cdiv(M, unit) * unit) // unit, 1) * unit  # of a chunk
        chunks = pl.cdiv(M, pages)

        def index(i: int) -> Any:
            return lambda b, k, c, table, ends: (table[((b * K + k) * chunks + c) * pages + i], 0, 0)

        blocks = tuple(((None, size, D), index(i)) for i in range(pages))
        storage = Storage(pages * size, blocks, lambda b, k, c, table, ends: c * pages < ends[b * K + k])
        padded = jnp.pad(table, ((0, 0), (0, 0), (0, chunks * pages - M)), constant_values=-1)
        return storage, (_last_there(padded.reshape(-1, pages)).ravel(), table_ends(table).ravel())

    return attend_heads(query, about, window, key, value, key_position, floats, stored, name="paged", **options)


def _last_there(table: Int[Array, "steps pages"]) -> Int[Array, "steps pages"]:
    """Return the table with each -1 replaced by the last page before it in its column, or 0."""
    step = jnp.arange(table.shape[0], dtype=jnp.int32)[:, None]
    last = jax.lax.cummax(jnp.where(table >= 0, step, 0), axis=0)
    return jnp.maximum(jnp.take_along_axis(table, last, axis=0), 0)


def _unit(size: int) -> int:
    """Return the smallest number of pages whose slots fill whole rows of 128 lanes."""
    return 128 // math.gcd(128, size)


def _slot_bytes(key: Any, value: Any) -> int:
    """Return the bytes of a slot's key and value in VMEM, where each is held twice."""
    return 2 * pl.cdiv(key.shape[2], 128) * 128 * (key.dtype.itemsize + value.dtype.itemsize)
