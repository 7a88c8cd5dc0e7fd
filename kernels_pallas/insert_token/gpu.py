"""The kernel for GPU (Pallas' Triton route): one program per head finds its first free slot and writes there, in place.

What it would take XLA five programs and more to do: a search, a select of positions, a scatter each of keys and values,
the rows' next position, a select for each array of a policy's state. All slots' positions are read, by programs as many
as heads: 33 kB each for 8,320 slots.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kernels_pallas.eight_bits import filler, unread, unread_on_gpu

SLOTS = 16384  # whose positions are read at a time, at most


def unsupported(entries: Any, *_: Any, **__: Any) -> str | None:
    """Return why the kernel can't run with these arguments, or None."""
    others = {name: x for name, x in entries.items() if name not in ("key", "value")}
    vectors = {"keys": entries["key"], "values": entries["value"]}
    reason = unread(("float32", "bfloat16", "float16"), others, vectors)
    return reason or unread_on_gpu(*vectors.values())


def of_heads(arrays, new, state, position, next_position, new_position, *, lost, interpret):
    H, S = position.shape
    K = H // len(next_position)
    step = min(pl.next_power_of_2(S), SLOTS)

    def of_head(x):
        return pl.BlockSpec((None, *x.shape[1:]), lambda h: (h, *(0,) * (x.ndim - 1)))

    of_row = pl.BlockSpec((1,), lambda h: (h // K,))
    written = [*arrays, *state, position, next_position]
    at_written = [*map(of_head, arrays), *map(of_head, state), of_head(position), of_row]
    *made, position, next_position, slot = pl.pallas_call(
        functools.partial(_insert, heads=K, zeros=len(state), step=step, lost=lost),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written] + [jax.ShapeDtypeStruct((H,), jnp.int32)],
        grid=(H,),
        in_specs=[*at_written, *map(of_head, new), of_row],
        out_specs=[*at_written, pl.BlockSpec((1,), lambda h: (h,))],
        input_output_aliases={number: number for number in range(len(written))},
        compiler_params=triton.CompilerParams(num_warps=min(max(step // 512, 4), 32), num_stages=1),
        interpret=interpret,
        name="insert_token",
    )(*written, *new, new_position)
    return made[: len(arrays)], made[len(arrays) :], position, next_position, slot


def _insert(*refs, heads, zeros, step, lost):
    tokens = (len(refs) - 6 - 2 * zeros) // 3
    held = tokens + zeros + 2
    *_, position, next_position = refs[:held]
    *new, new_position = refs[held : held + tokens + 1]
    *arrays, to_position, to_next, to_slot = refs[held + tokens + 1 :]
    (S,) = position.shape
    own = new_position[0]

    def look(i, first):
        slot = i * step + jax.lax.broadcasted_iota(jnp.int32, (step,), 0)
        held = triton.load(position.at[slot], mask=slot < S, other=0)
        return jnp.minimum(first, jnp.where(held < 0, slot, S))

    first = jax.lax.fori_loop(0, pl.cdiv(S, step), look, jnp.full((step,), S, jnp.int32))
    free = jnp.min(first)
    full = free >= S
    slot = jnp.where(full & (lost is not None), S - 1, free)
    enters = (own >= 0) & (slot < S)
    to_slot[0] = jnp.where(enters, slot, S)
    at = jnp.minimum(slot, S - 1)
    of_token: tuple[Any, ...]
    for number, (array, token) in enumerate(itertools.zip_longest(arrays, new)):
        if array.ndim > 1:
            column = jax.lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(array.shape[1]),), 0)
            inside, here, of_token = column < array.shape[1], array.at[jnp.full_like(column, at), column], (column,)
        else:
            inside, here, of_token = True, array.at[at], ()
        if token is None:  # of the state
            vector = jnp.zeros([len(x) for x in of_token], array.dtype)
        elif of_token:
            vector = triton.load(token.at[of_token], mask=inside, other=filler(token.dtype))
        else:
            vector = token[...]
        if number == lost:
            vector = jnp.where(full, jnp.nan, vector).astype(array.dtype)
        triton.store(here, vector, mask=enters & inside)
    triton.store(to_position.at[at], own, mask=enters)

    @pl.when(pl.program_id(0) % heads == 0)
    def move():
        to_next[0] = jnp.maximum(next_position[0], own + 1)
