"""The kernel for GPU (Pallas' Triton route): one program per head of a token, a query, a key or a value."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kernels_pallas.eight_bits import unread

FLOATS = ("float32", "bfloat16", "float16")


def unsupported(parts: Any, cos: Any, sin: Any, bias: Any, *, dtype: str) -> str | None:
    """Return why the kernel can't run with these arguments, or None."""
    numbers = {"parts": parts, "cosines": cos, "sines": sin} | ({} if bias is None else {"biases": bias})
    if dtype not in FLOATS:
        return f"heads are {dtype}, but the kernel makes {', '.join(FLOATS)}"
    return unread(FLOATS, numbers, {})


def of_heads(parts, cos, sin, bias, *, dtype, interpret):
    P, _, K, heads, D = parts.shape
    rows, half = cos.shape
    of_token = pl.BlockSpec((None, half), lambda r, k, h: (r, 0))
    given, specs = [parts, cos, sin], [pl.BlockSpec((P, None, None, None, D), lambda r, k, h: (0, r, k, h, 0))]
    if bias is not None:
        given, specs = [*given, bias], [*specs, pl.BlockSpec((None, None, D), lambda r, k, h: (k, h, 0))]
    of_group = pl.BlockSpec((None, None, heads - 2, D), lambda r, k, h: (r, k, 0, 0))
    of_head = pl.BlockSpec((None, None, D), lambda r, k, h: (r, k, 0))
    query, key, value = pl.pallas_call(
        functools.partial(_split, width=pl.next_power_of_2(half)),
        out_shape=[jax.ShapeDtypeStruct((rows, K, *more, D), dtype) for more in ((heads - 2,), (), ())],
        grid=(rows, K, heads),
        in_specs=[specs[0], of_token, of_token, *specs[1:]],
        out_specs=[of_group, of_head, of_head],
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="split_heads",
    )(*given)
    return query.reshape(rows, -1, D), key, value


def _split(parts, cos, sin, *refs, width):
    *bias, query, key, value = refs
    P, D = parts.shape
    group, head = query.shape[0], pl.program_id(2)
    column = jax.lax.broadcasted_iota(jnp.int32, (width,), 0)
    inside = column < D // 2

    def read(ref):
        return triton.load(ref, mask=inside, other=0.0).astype(jnp.float32)

    def rounded(x):
        return x.astype(query.dtype).astype(jnp.float32)

    def own(column):
        made = rounded(sum(read(parts.at[jnp.full_like(column, part), column]) for part in range(P)))
        for ref in bias:
            made = rounded(made + read(ref.at[column]))
        return made

    first, second = own(column), own(column + D // 2)
    turns = head <= group  # the value, behind queries and key, is not turned
    c, s = (jnp.where(turns, rounded(read(ref.at[column])), still) for ref, still in ((cos, 1.0), (sin, 0.0)))
    at_query = jnp.full_like(column, jnp.minimum(head, group - 1))
    for place, x in ((column, first * c - second * s), (column + D // 2, second * c + first * s)):
        x = x.astype(query.dtype)
        triton.store(query.at[at_query, place], x, mask=inside & (head < group))
        triton.store(key.at[place], x, mask=inside & (head == group))
        triton.store(value.at[place], x, mask=inside & (head == group + 1))
