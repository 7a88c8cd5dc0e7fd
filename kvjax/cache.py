"""The cache: a fixed number of slots a KV head, reused as tokens are evicted.

    key, value     [B, K, S, D]   keys rotated at their absolute position; rows of free slots are stale, never read
    position       [B, K, S]      int32, the absolute position of the token in each slot, -1 where the slot is free
    next_position  [B]            int32, the absolute position of each row's next token
    state          a pytree of a policy's per-slot arrays [B, K, S, ...]; a slot's entry is zero when a token enters

Heads hold different tokens, so a slot is not a position. A model stacks its layers in front, [L, B, K, S, D]; the
functions then take `layer=`, and write into the stacked arrays, so that a donated cache is updated in place.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens that are kept; the layout stands at the top of this file.

    Example:
        >>> import jax.numpy as jnp
        >>> import kvjax
        >>> cache = kvjax.KVCache.init(batch=1, kv_heads=1, slots=3, head_dim=2)
        >>> cache = kvjax.insert(cache, jnp.ones((1, 2, 1, 2)), jnp.ones((1, 2, 1, 2)))
        >>> cache.position.tolist(), cache.num_live.tolist(), cache.nbytes
        ([[[0, 1, -1]]], [[2]], 64)
    """

    key: Float[Array, "*L B K S D"]
    value: Float[Array, "*L B K S D"]
    position: Int[Array, "*L B K S"]
    next_position: Int[Array, "B"]
    state: PyTree = ()

    @classmethod
    def init(
        cls,
        *,
        batch: int,
        kv_heads: int,
        slots: int,
        head_dim: int,
        layers: int | None = None,
        dtype: DTypeLike = jnp.float32,
        state: PyTree = (),
    ) -> KVCache:
        """An empty cache. ``state`` is what a policy's ``init`` returned for the same shape.

        Raises:
            ValueError: a size below 1.
        """
        sizes = dict(
            batch=batch, kv_heads=kv_heads, slots=slots, head_dim=head_dim, layers=1 if layers is None else layers
        )
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} is {size}; a cache needs at least 1.")
        shape = (*(() if layers is None else (layers,)), batch, kv_heads, slots)
        return cls(
            key=jnp.zeros((*shape, head_dim), dtype),
            value=jnp.zeros((*shape, head_dim), dtype),
            position=jnp.full(shape, -1, jnp.int32),
            next_position=jnp.zeros(batch, jnp.int32),
            state=state,
        )

    @property
    def num_slots(self) -> int:
        """S, the slots of each KV head, live or free."""
        return self.position.shape[-1]

    @property
    def live(self) -> Array:
        """Which slots hold a token, bool ``[*L, B, K, S]``."""
        return self.position >= 0

    @property
    def num_live(self) -> Array:
        """How many tokens each head holds, int32 ``[*L, B, K]``."""
        return jnp.sum(self.live, axis=-1, dtype=jnp.int32)

    @property
    def nbytes(self) -> int:
        """Bytes that the cache really takes: keys, values, positions and the policy's state."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def layer(self, index: int | Int[Array, ""]) -> KVCache:
        """One layer of a stacked cache."""

        def take(leaf: Array) -> Array:
            return jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)

        return KVCache(
            key=take(self.key),
            value=take(self.value),
            position=take(self.position),
            next_position=self.next_position,
            state=jax.tree.map(take, self.state),
        )


def insert(
    cache: KVCache,
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    position: Int[Array, "B T"] | None = None,
    *,
    layer: int | Int[Array, ""] | None = None,
) -> KVCache:
    """Writes T tokens into free slots; nothing else in the cache moves.

    Args:
        key: rotated keys of the new tokens; cast to the cache's dtype.
        value: their values.
        position: their absolute positions, -1 for padding, which is not stored. By default they continue each row.
        layer: which layer of a stacked cache.

    Returns:
        The cache with the tokens in it and ``next_position`` moved past them. A token for which no slot is free is
        not stored: evict first, or give the cache a block's worth of slots more than the budget.

    Raises:
        ValueError: keys and values that do not fit the cache; more tokens than free slots (outside jit).

    Example:
        >>> import jax.numpy as jnp
        >>> import kvjax
        >>> cache = kvjax.KVCache.init(batch=1, kv_heads=1, slots=2, head_dim=1)
        >>> row = jnp.ones((1, 1, 1, 1))
        >>> kvjax.insert(kvjax.insert(cache, row, row), 2 * row, 2 * row).key.ravel().tolist()
        [1.0, 2.0]
    """
    B, T, K, D = key.shape
    stacked = cache.position.ndim == 4
    if stacked != (layer is not None):
        raise ValueError(
            "the cache stacks layers: say which with layer=."
            if stacked
            else "layer= was given, but the cache has no layers."
        )
    if isinstance(layer, int) and not 0 <= layer < cache.position.shape[0]:
        raise ValueError(f"layer is {layer}; the cache has layers 0 to {cache.position.shape[0] - 1}.")
    if key.shape != value.shape or cache.key.shape[-4:-2] != (B, K) or cache.key.shape[-1] != D:
        raise ValueError(
            f"keys {key.shape} and values {value.shape} do not fit the cache {cache.key.shape}: expected twice "
            "[B, T, K, D] for a cache of [B, K, S, D]."
        )
    if position is None:
        position = cache.next_position[:, None] + jnp.arange(T, dtype=jnp.int32)
    slot_position = cache.position if layer is None else cache.position[layer]
    free = slot_position < 0
    valid = position >= 0
    if not isinstance(slot_position, jax.core.Tracer) and not isinstance(position, jax.core.Tracer):
        lacking = int(jnp.max(jnp.sum(valid, axis=1)[:, None] - jnp.sum(free, axis=-1)))
        if lacking > 0:
            raise ValueError(f"{T} tokens do not fit: {lacking} more free slots are needed; evict first.")
    slot = _nth_true(free, jnp.broadcast_to(jnp.cumsum(valid, axis=1)[:, None], (B, K, T)))
    slot = jnp.where(valid[:, None], slot, cache.num_slots)  # out of bounds: not written

    def write(leaf: Array, rows: Array) -> Array:
        return _write_rows(leaf, rows.astype(leaf.dtype), slot, layer)

    return KVCache(
        key=write(cache.key, key.swapaxes(1, 2)),
        value=write(cache.value, value.swapaxes(1, 2)),
        position=write(cache.position, jnp.broadcast_to(position[:, None], (B, K, T))),
        next_position=jnp.maximum(cache.next_position, jnp.max(position, axis=1) + 1),
        state=jax.tree.map(
            lambda leaf: write(leaf, jnp.zeros((B, K, T, *leaf.shape[slot_position.ndim + stacked :]))), cache.state
        ),
    )


def compact(cache: KVCache, slots: int) -> KVCache:
    """Gathers the live tokens into a smaller cache (or an empty tail into a larger one), in slot order.

    Args:
        slots: slots a head afterwards. Tokens beyond that many live ones are lost: evict to the budget first.

    Example:
        >>> import jax.numpy as jnp
        >>> import kvjax
        >>> cache = kvjax.KVCache.init(batch=1, kv_heads=1, slots=4, head_dim=1)
        >>> rows = jnp.arange(4.0).reshape(1, 4, 1, 1)
        >>> cache = kvjax.evict(kvjax.insert(cache, rows, rows), jnp.array([[[3.0, 0.0, 1.0, 2.0]]]), budget=2)
        >>> kvjax.compact(cache, 2).key.ravel().tolist()
        [0.0, 3.0]
    """
    if slots < 1:
        raise ValueError(f"slots is {slots}; a cache needs at least 1.")
    order = jnp.broadcast_to(jnp.arange(1, slots + 1), (*cache.position.shape[:-1], slots))
    source = _nth_true(cache.live, order)  # [*L, B, K, slots], num_slots where there is no such token

    def gather(leaf: Array, fill: int) -> Array:
        index = source.reshape(*source.shape, *(1,) * (leaf.ndim - source.ndim))
        return jnp.take_along_axis(leaf, index, axis=source.ndim - 1, mode="fill", fill_value=fill)

    return KVCache(
        key=gather(cache.key, 0),
        value=gather(cache.value, 0),
        position=gather(cache.position, -1),
        next_position=cache.next_position,
        state=jax.tree.map(lambda leaf: gather(leaf, 0), cache.state),
    )


def _nth_true(mask: Array, n: Int[Array, "*batch M"]) -> Int[Array, "*batch M"]:
    """Index of the n-th True (counted from 1) along the last axis; the axis' length where there are fewer."""
    flat_count = jnp.cumsum(mask, axis=-1, dtype=jnp.int32)
    find = jnp.searchsorted
    for _ in range(mask.ndim - 1):
        find = jax.vmap(find)
    return find(flat_count, n).astype(jnp.int32)


def _write_rows(array: Array, rows: Array, slot: Int[Array, "B K T"], layer: int | Int[Array, ""] | None) -> Array:
    """array[(layer,) b, k, slot[b, k, t]] = rows[b, k, t], as one scatter that is parallel in b and k.

    The batching dimensions are named, so that a cache sharded over them is updated without communication.
    """
    if layer is None:
        index = slot[..., None]
    else:
        index = jnp.stack([jnp.broadcast_to(jnp.asarray(layer, jnp.int32), slot.shape), slot], axis=-1)
    indexed = (2,) if layer is None else (0, 3)
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(3, rows.ndim)),
        inserted_window_dims=indexed,
        scatter_dims_to_operand_dims=indexed,
        operand_batching_dims=(0, 1) if layer is None else (1, 2),
        scatter_indices_batching_dims=(0, 1),
    )
    return jax.lax.scatter(array, index, rows, numbers, unique_indices=True, mode="drop")
