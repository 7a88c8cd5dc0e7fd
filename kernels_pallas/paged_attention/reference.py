"""The definition, in plain JAX: the pages of one head at a time are copied and attended over as slots of a cache.

Where heads compete, the table is as wide as the most that one head may come to own, of which most own little. So a head
is read at the narrowest of a few widths that holds its pages: one row at a time for a block, all rows together for one
query, where a step of the loop costs more than what it reads.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Real

from kernels_pallas.cache_attention import reference
from kernels_pallas.cache_attention.reference import ColumnStatistics
from kernels_pallas.paged_attention.pages import laid_out, slot_positions, table_ends

NARROWEST = 256  # slots; below it a program for another width costs more to compile than it saves


def paged_attention(
    query: Float[Array, "B T N D"],
    key: Real[Array, "P page D"],
    value: Real[Array, "P page D"],
    position: Int[Array, "P page"],
    table: Int[Array, "B K M"],
    query_position: Int[Array, "B T"],
    *,
    projection: Float[Array, "K G D F"] | None = None,
    query_scale: Float[Array, "B T"] | None = None,
    key_scale: Float[Array, "P page"] | None = None,
    value_scale: Float[Array, "P page"] | None = None,
    bias: Float[Array, "P page"] | None = None,
    sink_logits: Float[Array, "N"] | None = None,
    **options: Any,
) -> tuple[Float[Array, "B T N D"], ColumnStatistics]:
    """See :func:`kernels_pallas.paged_attention.api.paged_attention`."""
    B, T, N, D = query.shape
    K, M = table.shape[1:]
    page = position.shape[1]
    grouped = query.reshape(B, T, K, N // K, D)
    sinks = None if sink_logits is None else sink_logits.reshape(K, N // K)
    widths = [M]
    while -(-widths[-1] // 2) * page >= NARROWEST:
        widths.append(-(-widths[-1] // 2))

    rows = B if T == 1 else 1  # that are read together

    def of_width(pages: Int[Array, "rows 1 M"], head: Int[Array, ""], first: Int[Array, ""], *, width: int) -> Any:
        pages = pages[..., :width]
        own = jax.lax.dynamic_slice_in_dim(grouped, first, rows)
        out, columns = reference.cache_attention(
            jax.lax.dynamic_index_in_dim(own, head, axis=2, keepdims=False),
            laid_out(key, pages),
            laid_out(value, pages),
            slot_positions(position, pages),
            jax.lax.dynamic_slice_in_dim(query_position, first, rows),
            projection=(
                None if projection is None else jax.lax.dynamic_index_in_dim(projection, head, axis=0, keepdims=True)
            ),
            query_scale=None if query_scale is None else jax.lax.dynamic_slice_in_dim(query_scale, first, rows),
            key_scale=None if key_scale is None else laid_out(key_scale, pages),
            value_scale=None if value_scale is None else laid_out(value_scale, pages),
            bias=None if bias is None else laid_out(bias, pages),
            sink_logits=None if sinks is None else jax.lax.dynamic_index_in_dim(sinks, head, keepdims=False),
            **options,
        )
        beyond = (M - width) * page
        return out, jax.tree.map(lambda x: jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, beyond)]), columns)

    def of_head(place: Int[Array, ""]) -> Any:
        head, first = place // (B // rows), place % (B // rows) * rows
        pages = jax.lax.dynamic_slice(table, (first, head, 0), (rows, 1, M))
        wide_enough = jnp.array(widths) >= jnp.max(table_ends(pages))
        branches = [functools.partial(of_width, width=width) for width in widths]
        return jax.lax.switch(jnp.sum(wide_enough) - 1, branches, pages, head, first)

    found = jax.lax.map(of_head, jnp.arange(K * B // rows))
    out, columns = jax.tree.map(lambda x: x.reshape(K, B, *x.shape[2:]), found)  # the columns [K, B, G or 1, ...]
    columns = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(B, -1, *x.shape[3:]), columns)
    return jnp.moveaxis(out, 0, 2).reshape(B, T, N, D), columns
