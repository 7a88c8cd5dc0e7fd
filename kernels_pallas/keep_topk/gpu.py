"""The kernel for GPU (Pallas' Triton route): one program per head selects with the head's scores in its registers.

XLA launches each round of the two searches by itself, in several programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from kernels_pallas.eight_bits import unread
from kernels_pallas.topk import LOWEST, nth_largest, rank

SELECTED = 32768  # slots, at most
CHUNK = 2048  # of a head's slots, which so are padded to no power of two


def unsupported(scores: Any, position: Any, *_: Any, excess: int | None) -> str | None:
    """Return why the kernel can't run with these arguments, or None."""
    del excess
    if position.shape[-1] > SELECTED:
        return f"a head has {position.shape[-1]} slots, but the kernel takes up to {SELECTED}"
    return unread(("float32", "bfloat16", "float16"), {"scores": scores}, {})


def slower(*_: Any, excess: int | None) -> str | None:
    """Return why XLA is faster with these arguments, or None."""
    return "one token leaves, for which XLA needs no bisection" if excess == 1 else None


def of_heads(
    scores: Float[Array, "H S"],
    position: Int[Array, "H S"],
    budget: Int[Array, "B"],
    *,
    heads: int,
    interpret: Any,
    excess: int | None = None,
    position_of: Callable[[Array], Array] = lambda position: position,
) -> Int[Array, "H S"]:
    """Run the kernel; ``position_of`` reads a position out of what ``position`` holds of a slot, negative if free."""
    del excess
    H, S = position.shape
    B = len(budget)
    of_head = pl.BlockSpec((None, S), lambda h: (h, 0))
    size = min(pl.next_power_of_2(max(S, 128)), CHUNK)
    return pl.pallas_call(
        functools.partial(_select, size=size, position_of=position_of),
        out_shape=jax.ShapeDtypeStruct((H, S), jnp.int32),
        grid=(H,),
        in_specs=[pl.BlockSpec((1,), lambda h: (h // heads % B,)), of_head, of_head],
        out_specs=of_head,
        compiler_params=triton.CompilerParams(num_warps=4 if S <= 4096 else 8 if S <= 16384 else 16, num_stages=1),
        interpret=interpret,
        name="keep_topk",
    )(budget, scores, position)


def _count(masks: list[Array]) -> Int[Array, ""]:
    """Count the True entries of several masks: by place, and across threads once."""
    return jnp.sum(sum(jnp.where(x, jnp.int32(1), jnp.int32(0)) for x in masks), dtype=jnp.int32)


def _select(budget, scores, position, kept, *, size, position_of):
    S, left = position.shape[0], budget[0]
    numbers = [first + jax.lax.broadcasted_iota(jnp.int32, (size,), 0) for first in range(0, S, size)]
    score = [triton.load(scores.at[n], mask=n < S, other=-jnp.inf) for n in numbers]
    held = [position_of(triton.load(position.at[n], mask=n < S, other=-1)) for n in numbers]
    ranks = [rank(x, place >= 0) for x, place in zip(score, held, strict=True)]

    def largest(parts, n):
        return nth_largest(lambda least: _count([x >= least for x in parts]), n, bits=1)

    threshold = largest(ranks, left)
    above = [x > threshold for x in ranks]
    tied = [(x == threshold) & (place >= 0) for x, place in zip(ranks, held, strict=True)]
    left -= _count(above)
    ages = [jnp.where(x, y, LOWEST) for x, y in zip(tied, held, strict=True)]
    # As a rule all that tie stay; then the second search, over their ages, is left out.
    # A constant cannot leave a branch here, so it is a minimum.
    oldest = jax.lax.cond(_count(tied) > left, lambda: largest(ages, left), lambda: jnp.minimum(left, LOWEST))
    for n, x, age, place in zip(numbers, above, ages, held, strict=True):
        stays = x | ((age > LOWEST) & (age >= oldest))
        triton.store(kept.at[n], jnp.where(stays, place, -1), mask=n < S)
