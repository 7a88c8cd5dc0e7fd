"""The kernel for GPU (Pallas' Triton route): one program per row, which is read once."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kernels_pallas.eight_bits import unread

WIDEST = 16384  # numbers of a row, which a program's registers hold


def unsupported(x: Any, parts: Any, weight: Any, **_: Any) -> str | None:
    """Return why the kernel can't run with these arguments, or None."""
    reason = unread(("float32", "bfloat16", "float16"), {"hidden states": x, "parts": parts}, {})
    if reason is not None:
        return reason
    if weight.dtype != x.dtype:
        return f"the norm's weights are {weight.dtype}, and hidden states {x.dtype}"
    if x.shape[1] > WIDEST:
        return f"rows have {x.shape[1]} numbers, but the kernel takes up to {WIDEST}"
    return None


def of_heads(x, parts, weight, *, epsilon, offset, interpret):
    (rows, E), P = x.shape, len(parts)
    width = pl.next_power_of_2(E)
    of_row = pl.BlockSpec((None, E), lambda r: (r, 0))
    return pl.pallas_call(
        functools.partial(_add, width=width, epsilon=epsilon, offset=offset),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2,
        grid=(rows,),
        in_specs=[of_row, pl.BlockSpec((P, None, E), lambda r: (0, r, 0)), pl.BlockSpec((E,), lambda r: (0,))],
        out_specs=[of_row] * 2,
        compiler_params=triton.CompilerParams(num_warps=min(max(width // 128, 1), 32), num_stages=1),
        interpret=interpret,
        name="add_rms_norm",
    )(x, parts, weight)


def _add(x, parts, weight, total, normed, *, width, epsilon, offset):
    P, E = parts.shape
    column = jax.lax.broadcasted_iota(jnp.int32, (width,), 0)
    inside = column < E

    def read(ref):
        return triton.load(ref, mask=inside, other=0.0).astype(jnp.float32)

    # Unrolled, so that all parts are on their way at once.
    added = sum(read(parts.at[jnp.full_like(column, part), column]) for part in range(P)).astype(x.dtype)
    own = (read(x.at[column]) + added.astype(jnp.float32)).astype(x.dtype)
    triton.store(total.at[column], own, mask=inside)
    wide = own.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.sum(wide * wide) / E + epsilon)
    factor = read(weight.at[column])
    wide = wide * (1 + factor) if offset else factor * wide.astype(x.dtype).astype(jnp.float32)
    triton.store(normed.at[column], wide.astype(x.dtype), mask=inside)
