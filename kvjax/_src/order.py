"""The order of a head's tokens in the text: sorted, or in decode continued from the step before.

A policy that reads the order (``Needs.order``) keeps each token's rank in the cache's state; an eviction writes them. A
token that has come in since has rank 0, and there is a gap where one has left. In a decode step that is at most one gap
between other tokens, of that eviction, which a sum finds; besides, the oldest may have left a sliding window, and the
newest may have been taken back. Blocks of several tokens sort.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from kvjax._src.cache import AnyKind, map_parts, write_slots


class Order(NamedTuple):
    """Hold each head's slots in the order of their tokens, and each token's place in it, counted from 0.

    Where there is no token, ``slot`` has a free slot or S. The place of a free slot says nothing.
    """

    slot: Int[Array, "B K S"]
    place: Int[Array, "B K S"]

    def sort(self, x: Shaped[Array, "B K _ S"], nothing: float) -> Shaped[Array, "B K _ S"]:
        """Return what slots have, in the order of their tokens; ``nothing`` where there is none."""
        slot = jnp.broadcast_to(self.slot[:, :, None], x.shape)
        return jnp.take_along_axis(x, slot, axis=-1, mode="fill", fill_value=nothing)

    def unsort(self, x: Shaped[Array, "B K _ S"]) -> Shaped[Array, "B K _ S"]:
        """Return what the tokens in their order have, for each slot."""
        place = jnp.broadcast_to(self.place[:, :, None], x.shape)
        return jnp.take_along_axis(x, place, axis=-1, mode="clip")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ranked:
    """A policy's state with the ranks of the tokens: 1 or more, and larger for newer ones; 0 for one not ranked yet."""

    rank: Int[Array, "*slots"]
    others: Any


class Held(NamedTuple):
    """Hold what the ranks of each head are before a decode step's token comes in: ``first`` and on, but for a ``gap``.

    The gap is behind them where none is missing. Heads are ``wrong`` where more are, or a token has no rank: then the
    slots are sorted.
    """

    first: Int[Array, "B K 1"]
    gap: Int[Array, "B K 1"]
    tokens: Int[Array, "B K 1"]
    wrong: Bool[Array, "B K 1"]

    @classmethod
    def of(cls, rank: Int[Array, "B K S"], position: Int[Array, "B K S"], shifts: bool) -> Held:
        """Look at ranks; ``shifts`` says whether the oldest tokens may have left, so that the first is not 1."""
        most = jnp.iinfo(jnp.int32).max
        held = jnp.where(position >= 0, jnp.where(rank > 0, rank, most), 0)

        def over(reduce: Any, x: Array) -> Int[Array, "B K 1"]:
            return reduce(x, axis=-1, keepdims=True)

        add = functools.partial(jnp.sum, dtype=jnp.int32)
        count, total, last = over(add, jnp.minimum(held, 1)), over(add, held), over(jnp.max, held)
        first = over(jnp.min, jnp.where(held > 0, held, most)) if shifts else jnp.ones_like(count)
        # The sum of the next ``count + 1`` numbers, modulo 2**32: of two numbers in a row it halves the even one.
        whole = first * (count + 1) + ((count + 1) >> 1) * (count | 1)
        return cls(first, whole - total, count, last > first + count)


def by_position(position: Int[Array, "B K S"]) -> Order:
    """Sort the slots by position, the free ones last."""
    slot = jnp.argsort(jnp.where(position >= 0, position, jnp.iinfo(jnp.int32).max), axis=-1).astype(jnp.int32)
    return Order(slot, _inverse(slot, jnp.zeros_like(position)))


def continued(held: Held, rank: Int[Array, "B K S"], position: Int[Array, "B K S"]) -> Order:
    """Continue the order of a step before, whose ranks these are, or sort the slots where some head's are wrong."""
    return jax.lax.cond(jnp.any(held.wrong), lambda: by_position(position), lambda: _by_rank(held, rank, position))


def _by_rank(held: Held, rank: Int[Array, "B K S"], position: Int[Array, "B K S"]) -> Order:
    """Order slots by ranks that are not wrong; the token that has come in is the newest."""
    S, live = rank.shape[-1], position >= 0
    rank = jnp.where(rank > 0, rank - (held.first - 1) - (rank > held.gap).astype(jnp.int32), held.tokens + 1)
    free = jnp.where(live, S, jax.lax.broadcasted_iota(jnp.int32, rank.shape, 2))
    # Without a barrier all that reads these ranks would compute them from the old ones, which they are to overwrite.
    rank, free = jax.lax.optimization_barrier((jnp.where(live, rank, S + 1), free))
    place = rank - 1
    # A TPU writes a scatter's numbers one by one.
    slot = jax.lax.platform_dependent(
        place, free, tpu=lambda place, _: jnp.argsort(place, axis=-1).astype(jnp.int32), default=_inverse
    )
    return Order(slot, place)


def ranks(order: Order) -> Int[Array, "B K S"]:
    """Return the ranks of an order."""
    return order.place + 1


def renewed(cache: AnyKind, state: Any, rank: Int[Array, "*slots"] | None, after: Any, gap: bool) -> Any:
    """Return a cache's state with the ranks of an eviction's evidence; ``after`` are the positions that it leaves.

    Unless it may leave a ``gap``, of one token, the ranks of those that stay count on without any.
    """
    if rank is None:
        return state
    if not gap:
        most = cache.num_slots + 1
        known, head = (after >= 0) & (rank > 0), cache.heads()[..., None]
        stays = jnp.zeros((math.prod(cache.heads_shape), most), jnp.int32)
        stays = stays.at[head, jnp.where(known, rank, most)].set(1, mode="drop", unique_indices=True)
        rank = jnp.where(known, jnp.cumsum(stays, axis=-1, dtype=jnp.int32)[head, rank], 0)
    return map_parts(lambda part: dataclasses.replace(part, rank=rank), state, Ranked)


def _inverse(index: Int[Array, "B K S"], operand: Int[Array, "B K S"]) -> Int[Array, "B K S"]:
    """Return the array with x[b, k, index[b, k, s]] = s, and the operand's numbers where there is none."""
    number = jax.lax.broadcasted_iota(jnp.int32, index.shape, 2)
    return write_slots(operand, number, index)
