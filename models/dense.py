"""Dense attention of whole sequences, as training and analysis need it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import cache_attention
from kvjax._src.border import OF_HEADS, OF_QUERY_HEADS, OF_ROWS, OF_TOKENS, SAME, implementation_for, split

QUERIES_A_CHUNK = 512


def attention(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B K S D"],
    value: Float[Array, "B K S D"],
    key_position: Int[Array, "B K S"],
    query_position: Int[Array, "B T"],
    sliding_window: int | Int[Array, ""] | None = None,
    soft_cap: float | None = None,
    sink_logits: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N D"]:
    """Attend over keys and values in no cache, of whose rows and heads each device of a mesh has its own."""

    def of_device(query: Array, *others: Any) -> Array:
        how: Any = dict(soft_cap=soft_cap, implementation=implementation_for("auto", query))
        *block, sliding_window, sink_logits = others
        return cache_attention(query, *block, sliding_window=sliding_window, sink_logits=sink_logits, **how)[0]

    own = (query, OF_TOKENS), (key, OF_HEADS), (value, OF_HEADS), (key_position, OF_HEADS), (query_position, OF_ROWS)
    return split(of_device, *own, (sliding_window, SAME), (sink_logits, OF_QUERY_HEADS), outputs=OF_TOKENS)


def attention_in_chunks(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    position: Int[Array, "B T"],
    sliding_window: Int[Array, ""] | None = None,
    soft_cap: float | None = None,
    sink_logits: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N D"]:
    """Compute causal attention of whole sequences without holding the weights of more than one chunk of queries.

    ``position`` is that of queries and keys, -1 for padding. For the others see :func:`kernels_pallas.cache_attention`.
    """
    B, T = position.shape
    key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
    key_position = jnp.broadcast_to(position[:, None], key.shape[:3])

    @jax.checkpoint  # the backward pass computes a chunk's weights again
    def run(chunk):
        query, query_position = chunk
        return attention(query, key, value, key_position, query_position, sliding_window, soft_cap, sink_logits)

    if T <= QUERIES_A_CHUNK:
        return run((query, position))
    count = -(-T // QUERIES_A_CHUNK)
    padding = (0, count * QUERIES_A_CHUNK - T)
    query = jnp.pad(query, ((0, 0), padding, (0, 0), (0, 0)))
    queries = jnp.moveaxis(query.reshape(B, count, QUERIES_A_CHUNK, *query.shape[2:]), 1, 0)
    positions = jnp.pad(position, ((0, 0), padding), constant_values=-1).reshape(B, count, QUERIES_A_CHUNK)
    out = jax.lax.map(run, (queries, positions.swapaxes(0, 1)))
    return jnp.moveaxis(out, 0, 1).reshape(B, count * QUERIES_A_CHUNK, *query.shape[2:])[:, :T]
