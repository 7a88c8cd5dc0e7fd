"""The kernel for GPU (Pallas' Triton route): one program per head reads its ranks twice, and writes them in place.

XLA would take eight programs: two for the sums, three that rewrite ranks, a scatter, and two copies of a step's branch.
Where a head's ranks are wrong, each of its slots counts the older tokens: slow, and seldom.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kernels_pallas.order_tokens.reference import MOST, continued, gap_of, is_wrong

SLOTS = 4096  # that are read at a time, at most
MOST_SLOTS = 16_384  # of a head: reading more takes a multiprocessor longer than XLA's launches take


def unsupported(*_: Any, **__: Any) -> None:
    """Return None: the kernel can run with any arguments."""


def slower(rank: Any, *_: Any, **__: Any) -> str | None:
    """Return why XLA is faster with these arguments, or None."""
    return f"one program reads a head, up to {MOST_SLOTS} slots" if rank.shape[-1] > MOST_SLOTS else None


def of_heads(rank, position, *, shifts, interpret):
    H, S = position.shape
    step = min(max(pl.next_power_of_2(S), 128), SLOTS)
    of_head = pl.BlockSpec((None, S), lambda h: (h, 0))
    return pl.pallas_call(
        functools.partial(_order, shifts=shifts, step=step),
        out_shape=[jax.ShapeDtypeStruct((H, S), jnp.int32)] * 2,
        grid=(H,),
        in_specs=[of_head] * 2,
        out_specs=[of_head] * 2,
        input_output_aliases={0: 0},
        compiler_params=triton.CompilerParams(num_warps=max(step // 256, 4), num_stages=1),
        interpret=interpret,
        name="order_tokens",
    )(rank, position)


def _order(ranks, positions, to_rank, to_slot, *, shifts, step):
    (S,) = positions.shape
    turns = pl.cdiv(S, step)

    def at(i):
        slot = i * step + jax.lax.broadcasted_iota(jnp.int32, (step,), 0)
        position = triton.load(positions.at[slot], mask=slot < S, other=-1)
        return slot, triton.load(ranks.at[slot], mask=slot < S, other=0), position

    def look(i, carry):
        count, total, last, first, entered, newest, oldest_new = carry
        _, rank, position = at(i)
        held, new = (position >= 0) & (rank > 0), (position >= 0) & (rank <= 0)
        return (
            count + held.astype(jnp.int32),
            total + jnp.where(held, rank, 0),
            jnp.maximum(last, jnp.where(held, rank, 0)),
            jnp.minimum(first, jnp.where(held, rank, MOST)),
            entered + new.astype(jnp.int32),
            jnp.maximum(newest, jnp.where(held, position, -1)),
            jnp.minimum(oldest_new, jnp.where(new, position, MOST)),
        )

    start = tuple(jnp.full((step,), x, jnp.int32) for x in (0, 0, 0, MOST, 0, -1, MOST))
    counts, totals, lasts, firsts, entries, newest, oldest_new = jax.lax.fori_loop(0, turns, look, start)
    # Every thread has read its ranks before any of these is known, so before one is overwritten.
    count, total, entered = (jnp.sum(x, dtype=jnp.int32) for x in (counts, totals, entries))
    last, newest, oldest_new = jnp.max(lasts), jnp.max(newest), jnp.min(oldest_new)
    first = jnp.min(firsts) if shifts else jnp.ones_like(count)
    gap = gap_of(first, count, total)
    wrong = is_wrong(first, count, last, entered) | (oldest_new < newest)
    compared = wrong.astype(jnp.int32) * S

    def write(i, _):
        slot, rank, position = at(i)

        def compare(j, older):
            other = triton.load(positions.at[jnp.full_like(slot, j)])
            return older + ((other >= 0) & ((other < position) | ((other == position) & (j < slot)))).astype(jnp.int32)

        counted = jax.lax.fori_loop(0, compared, compare, jnp.ones_like(slot))
        new = jnp.where(compared > 0, counted, continued(rank, first, gap, count))
        new = jnp.where(position >= 0, new, S + 1)
        triton.store(to_rank.at[slot], new, mask=slot < S)
        triton.store(to_slot.at[new - 1], slot, mask=(position >= 0) & (new >= 1) & (new <= S))
        triton.store(to_slot.at[slot], jnp.full_like(slot, S), mask=(slot < S) & (slot >= count + entered))
        return 0

    jax.lax.fori_loop(0, turns, write, 0)
