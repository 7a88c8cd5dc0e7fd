"""Insertion of new tokens into the free slots of a plain or a paged cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax._src.border import OF_ROWS, OF_TOKENS, SAME, enter
from kvjax._src.cache import CACHE, AnyKind, KVCache, check_cache, up_to
from kvjax._src.checks import is_known, plain, real_array
from kvjax._src.layer_caches import LayerCaches
from kvjax._src.split_cache import Cache


def insert[C: AnyKind](
    cache: C,
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    position: Int[Array, "B T"] | None = None,
    *,
    layer: int | Int[Array, ""] | None = None,
) -> C:
    """Write T tokens into free slots; nothing else in the cache moves.

    Args:
        key: rotated keys of the new tokens; cast to the cache's dtype, or rounded to its eight bits.
        value: their values.
        position: their absolute positions, -1 for padding, which is not stored. By default they continue each row.
            No row may hold one of them already, as if they began anew with each block.
        layer: the layer to write to in a paged cache of several.

    Returns:
        The cache with the tokens in it and ``next_position`` moved past them. A paged cache takes pages for the heads
        that have no free slot. Tokens that do not fit are refused; under jit, where only the run knows it, a row whose
        tokens do not fit is NaN from then on: evict first, or give the cache a block more slots than the budget.
        So are queries that see a token whose position a plain cache holds already.

    Raises:
        ValueError: if keys and values do not fit the cache, or if there are more tokens than slots; or, outside jit,
            where the cache's contents are known, than free slots, or if a position comes twice.

    Example:
        >>> import jax, kvjax, numpy as np
        >>> cache = kvjax.KVCache.init(batch=1, kv_heads=1, slots=2, head_dim=1)
        >>> row, insert = np.ones((1, 1, 1, 1)), jax.jit(kvjax.insert)
        >>> np.ravel(insert(insert(cache, row, row), 2 * row, 2 * row).key).tolist()
        [1.0, 2.0]
    """
    check_cache(cache)
    if isinstance(cache, LayerCaches):
        raise ValueError("a cache of separate layers was given: insert into one of cache.layers, and call with_layer.")
    key, value, position, layer = checked_block(cache, key, value, position, layer)
    block = (key, OF_TOKENS), (value, OF_TOKENS), (position, OF_ROWS)
    own = () if layer is None else ((layer, SAME),)
    return enter(cache, lambda part, *block: part.insert(*block), *block, *own, outputs=CACHE)


def checked_block(
    cache: Any,
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    position: Int[Array, "B T"] | None,
    layer: int | Int[Array, ""] | None,
    query_heads: int = 0,
    promised: bool = False,
) -> tuple[Array, Array, Int[Array, "B T"], int | Int[Array, ""] | None]:
    """Return the arguments of :func:`insert` as arrays, after its checks; a cache of ``query_heads`` repeats heads.

    Under jit, a caller that has ``promised`` what fits spares the run the search for positions that come twice.
    """
    key, value = real_array("key", key), real_array("value", value)
    position = None if position is None else real_array("position", position)
    K = cache.heads_shape[-1]
    repeats = query_heads == K and key.ndim == 4 and not K % max(key.shape[2], 1)
    layer = check_entering(cache, key, value, position, layer, key.shape[2] if repeats else K)
    T = key.shape[1]
    given, own = position, () if layer is None else (layer,)
    if position is None:
        position = cache.next_position[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
    if is_known(cache.position, position, layer):
        if (lacking := cache.lacking(np.asarray(position), *own)) > 0:
            raise ValueError(f"{T} tokens do not fit: {lacking} more free slots are needed; evict first.")
        if given is not None:
            with jax.ensure_compile_time_eval():
                twice = np.asarray(_twice(cache, jnp.asarray(position), layer))
            if twice.any():
                row, token = np.argwhere(twice)[0]
                raise ValueError(f"position {int(position[row, token])} of row {row} comes twice; leave position out.")
    else:
        check_fits(cache, T, given)
        if given is not None and isinstance(cache, KVCache) and not promised:
            key = jnp.where(_twice(cache, position, layer)[..., None, None], jnp.nan, key)
    return key, value, position.astype(jnp.int32), layer  # int64, as under x64, would widen the cache


@jax.jit
def _twice(cache: Cache, position: Int[Array, "B T"], layer: int | Int[Array, ""] | None) -> Bool[Array, "B T"]:
    """Return which of a block's tokens have the position of a token of the row's that is held, or that precedes it."""
    slots = (cache if isinstance(cache, KVCache) else cache.layer(layer)).position
    held = (position[:, :, None] == slots.reshape(len(position), 1, -1)).any(axis=2)
    before = jnp.tril(position[:, :, None] == position[:, None], -1).any(axis=2)
    return (position >= 0) & (held | before)


def check_entering(
    cache: Cache,
    key: Array,
    value: Array,
    position: Array | None,
    layer: int | Int[Array, ""] | None,
    kv_heads: int | None = None,
) -> int | Int[Array, ""] | None:
    """Check that new tokens of ``kv_heads`` fit the shapes of a cache; return the layer as a number if it is known."""
    heads = cache.heads_shape
    if (len(heads) == 3) != (layer is not None):
        raise ValueError(f"layer is {layer}, but the cache has {'' if layer is None else 'no '}layers.")
    layer = plain(layer)
    if isinstance(layer, int) and not 0 <= layer < heads[0]:
        raise ValueError(f"layer is {layer}; the cache has layers 0 to {heads[0] - 1}.")
    expected = (heads[-2], heads[-1] if kv_heads is None else kv_heads, cache.arrays.head_dim)
    if key.shape != value.shape or (*key.shape[:1], *key.shape[2:]) != expected:
        given = f"keys {key.shape} and values {value.shape} do not fit a cache"
        raise ValueError(f"{given} with B, K = {expected[:2]} and D = {expected[2]}; give [B, T, K, D].")
    if not key.shape[1]:
        raise ValueError("there are no tokens; give at least one, with position -1 where a row has none.")
    if position is not None and (position.shape != key.shape[:2] or not jnp.issubdtype(position.dtype, jnp.integer)):
        raise ValueError(f"position is {position.dtype} {position.shape}; expected integers {key.shape[:2]}.")
    return layer


def rewind[C: AnyKind](cache: C, position: Int[Array, "B"]) -> C:
    """Take back the tokens from a position on: their slots are free, and the next token gets that position.

    What a policy has learned of other tokens from them stays. Evicted tokens do not come back, nor do those that have
    left a layer's sliding window, nor the queries that a policy dropped for theirs (:func:`kvjax.rkv`).

    Args:
        position: one per row, or one for all, from 0; a row whose ``next_position`` is not larger keeps all.

    Raises:
        ValueError: if ``cache`` is not a cache, or has layers without a KV cache, whose state no token can leave; or if
            there is not one integer per row, or one is negative.

    Example:
        >>> import jax, kvjax, numpy as np
        >>> cache = kvjax.KVCache.init(batch=1, kv_heads=1, slots=4, head_dim=2)
        >>> cache = jax.jit(kvjax.insert)(
        ...     cache, np.ones((1, 3, 1, 2)), np.ones((1, 3, 1, 2))
        ... )
        >>> cache = jax.jit(kvjax.rewind)(cache, np.array([2]))
        >>> cache.position.tolist(), cache.next_position.tolist()
        ([[[0, 1, -1, -1]]], [2])
    """
    check_cache(cache)
    if cache.recurrent:
        raise ValueError("no token can be taken back from layers without a KV cache: keep a copy from before it.")
    position, rows = real_array("position", position), cache.heads_shape[-2]
    if position.shape not in ((), (rows,)) or not jnp.issubdtype(position.dtype, jnp.integer):
        raise ValueError(f"position is {position.dtype} {position.shape}; expected integers ({rows},), one per row.")
    if is_known(position) and (np.asarray(position) < 0).any():
        raise ValueError(f"position is {int(position.min())}; give the first position that is taken back, from 0.")
    end = jnp.broadcast_to(jnp.maximum(position, 0), rows)
    return cache.map(lambda part, end: up_to(part, end).released(), (end, OF_ROWS))


def check_fits(cache: Cache, T: int, position: Int[Array, "B T"] | None) -> None:
    """Check that the cache has enough slots for T tokens; only shapes are read, so the check also works under jit."""
    if not is_known(position):
        return
    entering = T if position is None else int(np.sum(np.asarray(position) >= 0, axis=1).max())
    if entering > cache.num_slots:
        raise ValueError(f"{entering} tokens do not fit: the cache has {cache.num_slots} slots per head.")
