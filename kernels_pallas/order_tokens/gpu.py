"""The kernel for GPU (Pallas' Triton route): a program looks at all ranks of a head, then writes them anew, in place.

XLA would take eight programs: two for the sums, three that rewrite ranks, a scatter, and two copies of a step's branch.
The slots of a long head are split over programs, which look in one launch and write in another. Where a head's ranks
are wrong, each of its slots counts the older tokens: slow, and at most once in an answer.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array

from kernels_pallas.order_tokens.reference import MOST, continued, gap_of, is_wrong

SLOTS = 4096  # that are read at a time, at most
MOST_SLOTS = 16_384  # that one program reads: with more it takes longer than a second launch


class _Seen(NamedTuple):
    """Hold what some slots of a head have: number, sum, extremes of their ranks, and of tokens with and without one."""

    count: Any
    total: Any
    last: Any
    first: Any
    entered: Any
    newest: Any  # position of those with a rank
    oldest_new: Any  # position of those without


_NOTHING = _Seen(0, 0, 0, MOST, 0, -1, MOST)
_JOINED = _Seen(jnp.add, jnp.add, jnp.maximum, jnp.minimum, jnp.add, jnp.maximum, jnp.minimum)
_add = functools.partial(jnp.sum, dtype=jnp.int32)
_REDUCED = _Seen(_add, _add, jnp.max, jnp.min, _add, jnp.max, jnp.min)


def unsupported(*_: Any, **__: Any) -> None:
    """Return None: the kernel can run with any arguments."""


def of_heads(rank, position, *, shifts, interpret):
    H, S = position.shape
    step = min(max(pl.next_power_of_2(S), 128), SLOTS)
    parts = 1 if S <= MOST_SLOTS else pl.cdiv(S, step)
    params = triton.CompilerParams(num_warps=max(step // 256, 4), num_stages=1)
    of_head, like = pl.BlockSpec((None, S), lambda h, _: (h, 0)), jax.ShapeDtypeStruct((H, S), jnp.int32)
    of_part = pl.BlockSpec((None, None, len(_NOTHING)), lambda h, p: (h, p, 0))
    of_parts = pl.BlockSpec((None, parts, len(_NOTHING)), lambda h, _: (h, 0, 0))
    options: Any = dict(grid=(H, parts), compiler_params=params, interpret=interpret)
    seen: Any = []
    if parts > 1:
        seen = pl.pallas_call(
            functools.partial(_look, step=step),
            out_shape=[jax.ShapeDtypeStruct((H, parts, len(_NOTHING)), jnp.int32)],
            in_specs=[of_head] * 2,
            out_specs=[of_part],
            name="order_seen",
            **options,
        )(rank, position)
    return pl.pallas_call(
        functools.partial(_order, shifts=shifts, step=step),
        out_shape=[like] * 2,
        in_specs=[*[of_head] * 2, *[of_parts] * len(seen)],
        out_specs=[of_head] * 2,
        input_output_aliases={0: 0},
        name="order_tokens",
        **options,
    )(rank, position, *seen)


def _slots(ranks: Any, positions: Any, turn: Any, step: int) -> tuple[Array, Array, Array]:
    """Load the slots of a turn: their numbers, ranks and positions."""
    (S,) = positions.shape
    slot = turn * step + jax.lax.broadcasted_iota(jnp.int32, (step,), 0)
    position = triton.load(positions.at[slot], mask=slot < S, other=-1)
    return slot, triton.load(ranks.at[slot], mask=slot < S, other=0), position


def _seen(ranks: Any, positions: Any, turn: Any, step: int) -> _Seen:
    """Look at the slots of a turn, one by one."""
    _, rank, position = _slots(ranks, positions, turn, step)
    held, new = (position >= 0) & (rank > 0), (position >= 0) & (rank <= 0)
    known = jnp.where(held, rank, 0)
    least = jnp.where(held, rank, MOST)
    newest, oldest_new = jnp.where(held, position, -1), jnp.where(new, position, MOST)
    return _Seen(held.astype(jnp.int32), known, known, least, new.astype(jnp.int32), newest, oldest_new)


def _joined(found: Any, more: Any) -> _Seen:
    return _Seen(*(join(x, y) for join, x, y in zip(_JOINED, found, more, strict=True)))


def _look(ranks, positions, seen, *, step):
    each = _seen(ranks, positions, pl.program_id(1), step)
    for number, (reduce, x) in enumerate(zip(_REDUCED, each, strict=True)):
        seen[number] = reduce(x)


def _order(ranks, positions, *refs, shifts, step):
    *seen, to_rank, to_slot = refs
    (S,) = positions.shape
    own, turns = pl.program_id(1), 1 if seen else pl.cdiv(S, step)  # of this program

    def look(turn, found):
        return _joined(found, _seen(ranks, positions, turn, step))

    def read(part, found):
        return _joined(found, [seen[0][part, number] for number in range(len(_NOTHING))])

    if seen:
        whole = jax.lax.fori_loop(0, seen[0].shape[0], read, _Seen(*map(jnp.int32, _NOTHING)))
    else:  # every thread has read its ranks before any of these is known, so before one is overwritten
        start = _Seen(*(jnp.full((step,), x, jnp.int32) for x in _NOTHING))
        each = jax.lax.fori_loop(0, turns, look, start)
        whole = _Seen(*(reduce(x) for reduce, x in zip(_REDUCED, each, strict=True)))
    first = whole.first if shifts else jnp.ones_like(whole.count)
    gap = gap_of(first, whole.count, whole.total)
    wrong = is_wrong(first, whole.count, whole.last, whole.entered) | (whole.oldest_new < whole.newest)
    compared = wrong.astype(jnp.int32) * S

    def write(turn, _):
        slot, rank, position = _slots(ranks, positions, own + turn, step)

        def compare(j, older):
            other = triton.load(positions.at[jnp.full_like(slot, j)])
            return older + ((other >= 0) & ((other < position) | ((other == position) & (j < slot)))).astype(jnp.int32)

        counted = jax.lax.fori_loop(0, compared, compare, jnp.ones_like(slot))
        new = jnp.where(compared > 0, counted, continued(rank, first, gap, whole.count))
        new = jnp.where(position >= 0, new, S + 1)
        triton.store(to_rank.at[slot], new, mask=slot < S)
        triton.store(to_slot.at[new - 1], slot, mask=(position >= 0) & (new >= 1) & (new <= S))
        behind = (slot < S) & (slot >= whole.count + whole.entered)
        triton.store(to_slot.at[slot], jnp.full_like(slot, S), mask=behind)
        return 0

    jax.lax.fori_loop(0, turns, write, 0)
