"""The kernel for GPU (Pallas' Triton route): one launch, where XLA would take another to join or part the heads."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kernels_pallas.carry_statistic.reference import joined
from kernels_pallas.eight_bits import unread

SLOTS = 1024  # of a program, at most


def unsupported(before: Any, now: Any, factors: Any) -> str | None:
    """Return why the kernel can't run with these arguments, or None."""
    return unread(
        ("float32",), {"statistics": now, **{f"those of head {g} before": x for g, x in enumerate(before)}}, {}
    )


def of_heads(before, now, factors, *, interpret):
    H, G, S = now.shape
    size = min(max(pl.next_power_of_2(S), 128), SLOTS)
    of_slots = pl.BlockSpec((None, S), lambda h, _: (h, 0))
    of_group = pl.BlockSpec((None, G, S), lambda h, _: (h, 0, 0))
    return pl.pallas_call(
        functools.partial(_carry, size=size),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*before, now)],
        grid=(H, pl.cdiv(S, size)),
        in_specs=[*[of_slots] * G, of_group, *[pl.BlockSpec((1,), lambda h, _: (h,))] * 3],
        out_specs=[*[of_slots] * G, of_group],
        input_output_aliases={g: g for g in range(G)},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="carry_statistic",
    )(*before, now, *factors)


def _carry(*refs, size):
    G = refs[-1].shape[0]
    before, (now, *factors), (*heads, together) = refs[:G], refs[G : G + 4], refs[G + 4 :]
    S = now.shape[1]
    slot = pl.program_id(1) * size + jax.lax.broadcasted_iota(jnp.int32, (size,), 0)
    numbers = [jnp.full((size,), x[0]) for x in factors]
    for g in range(G):
        there = slot < S
        old, new = triton.load(before[g].at[slot], mask=there), triton.load(now.at[g, slot], mask=there)
        value = joined(old, new, *numbers)
        triton.store(heads[g].at[slot], value, mask=there)
        triton.store(together.at[g, slot], value, mask=there)
