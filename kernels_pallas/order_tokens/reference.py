"""The definition, in plain JAX: a sum over a head's ranks finds the one that is missing; a sort, where more are."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from kernels_pallas.insert_token.reference import write_slots

MOST = jnp.iinfo(jnp.int32).max


class Order(NamedTuple):
    """Hold each head's slots in the order of their tokens, and each token's rank in it, counted from 1.

    Behind the last token, ``slot`` has free slots or S. The rank of a free slot says nothing.
    """

    slot: Int[Array, "B K S"]
    rank: Int[Array, "B K S"]

    def sort(self, x: Shaped[Array, "B K _ S"], nothing: float) -> Shaped[Array, "B K _ S"]:
        """Return what slots have, in the order of their tokens; ``nothing`` where there is none."""
        slot = jnp.broadcast_to(self.slot[:, :, None], x.shape)
        return jnp.take_along_axis(x, slot, axis=-1, mode="fill", fill_value=nothing)

    def unsort(self, x: Shaped[Array, "B K _ S"]) -> Shaped[Array, "B K _ S"]:
        """Return what the tokens in their order have, for each slot."""
        place = jnp.broadcast_to(self.rank[:, :, None] - 1, x.shape)
        return jnp.take_along_axis(x, place, axis=-1, mode="clip")


class _Seen(NamedTuple):
    """Hold what a head's ranks are: ``first`` and on, ``tokens`` in all, but for a ``gap``.

    The gap is behind them if no rank is missing. Heads are ``wrong`` where several are, or where more than the newest
    token has none.
    """

    first: Int[Array, "B K 1"]
    gap: Int[Array, "B K 1"]
    tokens: Int[Array, "B K 1"]
    wrong: Bool[Array, "B K 1"]


def order_tokens(rank: Int[Array, "B K S"], position: Int[Array, "B K S"], *, shifts: bool) -> Order:
    """See :func:`kernels_pallas.order_tokens.api.order_tokens`."""
    seen = _look(rank, position, shifts)
    return jax.lax.cond(jnp.any(seen.wrong), lambda: by_position(position), lambda: _by_rank(seen, rank, position))


def by_position(position: Int[Array, "B K S"]) -> Order:
    """Sort the slots by position, the free ones last."""
    slot = jnp.argsort(jnp.where(position >= 0, position, MOST), axis=-1).astype(jnp.int32)
    return Order(slot, _inverse(slot, jnp.zeros_like(position)) + 1)


def _look(rank: Int[Array, "B K S"], position: Int[Array, "B K S"], shifts: bool) -> _Seen:
    """Look at all ranks and positions of a head, once."""
    live, held = position >= 0, jnp.where(position >= 0, rank, 0)

    def over(reduce: Any, x: Array) -> Int[Array, "B K 1"]:
        return reduce(x, axis=-1, keepdims=True)

    add = functools.partial(jnp.sum, dtype=jnp.int32)
    count, total, last = over(add, jnp.minimum(held, 1)), over(add, held), over(jnp.max, held)
    first = over(jnp.min, jnp.where(held > 0, held, MOST)) if shifts else jnp.ones_like(count)
    new = live & (held == 0)
    entered, newest = over(add, new.astype(jnp.int32)), over(jnp.max, jnp.where(held > 0, position, -1))
    older = over(jnp.min, jnp.where(new, position, MOST)) < newest
    return _Seen(first, gap_of(first, count, total), count, is_wrong(first, count, last, entered) | older)


def gap_of(first: Array, count: Array, total: Array) -> Array:
    """Return the missing number of ``count + 1`` in a row, from ``first`` on, of which the others add up to a total."""
    # Their sum modulo 2**32: of two numbers in a row it halves the even one.
    return first * (count + 1) + ((count + 1) >> 1) * (count | 1) - total


def is_wrong(first: Array, count: Array, last: Array, entered: Array) -> Array:
    """Return whether more than one rank is missing, or more than one token has none."""
    return (last > first + count) | (entered > 1)


def continued(rank: Array, first: Array, gap: Array, tokens: Array) -> Array:
    """Return the ranks of the tokens without the gap; one without a rank is the newest."""
    return jnp.where(rank > 0, rank - (first - 1) - (rank > gap).astype(jnp.int32), tokens + 1)


def _by_rank(seen: _Seen, rank: Int[Array, "B K S"], position: Int[Array, "B K S"]) -> Order:
    """Order slots by ranks that are not wrong."""
    S, live = rank.shape[-1], position >= 0
    rank = continued(rank, seen.first, seen.gap, seen.tokens)
    free = jnp.where(live, S, jax.lax.broadcasted_iota(jnp.int32, rank.shape, 2))
    # Without a barrier all that reads these ranks would compute them from the old ones, which they are to overwrite.
    rank, free = jax.lax.optimization_barrier((jnp.where(live, rank, S + 1), free))
    place = rank - 1
    # A TPU writes a scatter's numbers one by one.
    slot = jax.lax.platform_dependent(
        place, free, tpu=lambda place, _: jnp.argsort(place, axis=-1).astype(jnp.int32), default=_inverse
    )
    return Order(slot, rank)


def _inverse(index: Int[Array, "B K S"], operand: Int[Array, "B K S"]) -> Int[Array, "B K S"]:
    """Return the array with x[b, k, index[b, k, s]] = s, and the operand's numbers where there is none."""
    number = jax.lax.broadcasted_iota(jnp.int32, index.shape, 2)
    return write_slots(operand, number, index)
