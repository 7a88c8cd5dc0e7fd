"""The kernels for GPU (Pallas' Triton route): online softmax over gathered slots, then the sum of its parts.

A program reads its share of a head's slots, and with them their keys and values, directly from the cache; the
queries that share the slots are those of its tile. In decode a batch of one has far fewer heads than the chip has
multiprocessors, so the slots of a head are split over programs, and a second kernel combines their sums. Where the
query heads of a group read slots of their own, their programs run side by side: slots in ascending order keep them
near each other in the cache, so that the second read of a row that two heads share may hit the L2 cache.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kernels_pallas.cache_attention.queries import start_of
from kernels_pallas.eight_bits import filler, unread, unread_on_gpu, widened
from kernels_pallas.softmax import product, scaled

PROGRAMS = 264  # two for each multiprocessor of an H100 or H200, which run at once
BYTES = 16384  # of the keys, and again of the values, in a program's tile
PARTS = 32  # of a head, combined at a time
_TINY = float(jnp.finfo(jnp.float32).tiny)
_UNSEEN = -1e30  # the logit of slot -1, which is none


def unsupported(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> str | None:
    """Return why the kernels can't run with these arguments, or None."""
    reason = unread(("float32", "bfloat16", "float16"), {"queries": query}, {"keys": key, "values": value})
    if reason is not None or (reason := unread_on_gpu(key, value)) is not None:
        return reason
    if query.shape[3] > 256:
        return f"the head dim is {query.shape[3]}, but the kernels take up to 256"
    return None


def of_heads(query, key, value, slots, *scales, beside, scale, soft_cap, sinks, interpret):
    B, K, each, T, G, D = query.shape
    S, M = key.shape[2], slots.shape[-1]
    H, R = B * K * each, T * G
    key, value = key.reshape(B * K, S, D), value.reshape(B * K, S, D)
    width = max(pl.next_power_of_2(D), 16)
    # At most what fits into a program's registers, at least as many slots as the matrix unit takes.
    step = min(max(BYTES // (width * max(key.dtype.itemsize, value.dtype.itemsize)), 16), 128)
    queries = min(max(pl.next_power_of_2(R), 16), 64)
    blocks = pl.cdiv(R, queries)
    steps = pl.cdiv(pl.cdiv(M, step), min(max(PROGRAMS // (H * blocks), 1), pl.cdiv(M, 4 * step)))
    parts = pl.cdiv(M, steps * step)

    def of_head(*shape, by=1):
        return pl.BlockSpec((None, *shape), lambda h, *_: (h // by, *(0 for _ in shape)))

    scales = tuple(x.reshape(B * K, S) for x in scales)
    sums = pl.pallas_call(
        functools.partial(
            _attend, beside=beside, steps=steps, step=step, queries=queries, width=width, scale=scale, soft_cap=soft_cap
        ),
        out_shape=[
            jax.ShapeDtypeStruct((H, parts, R, D), jnp.float32),
            *[jax.ShapeDtypeStruct((H, parts, R), jnp.float32)] * 2,
        ],
        grid=(H, blocks, parts),
        in_specs=[
            of_head(R, D),
            *[of_head(S, D, by=each)] * 2,
            of_head(M),
            *[of_head(S, by=each)] * len(scales),
        ],
        out_specs=[
            pl.BlockSpec((None, None, R, D), lambda h, r, p: (h, p, 0, 0)),
            *[pl.BlockSpec((None, None, R), lambda h, r, p: (h, p, 0))] * 2,
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="select_attention",
    )(query.reshape(H, R, D), key, value, slots.reshape(H, M), *scales)
    starts = [] if sinks is None else [sinks]
    out = pl.pallas_call(
        functools.partial(_combine, width=width),
        out_shape=jax.ShapeDtypeStruct((H, R, D), query.dtype),
        grid=(H, R),
        in_specs=[
            of_head(parts, R, D),
            *[of_head(parts, R)] * 2,
            *[pl.BlockSpec((None, G), lambda h, *_: (h % (K * each), 0))] * len(starts),
        ],
        out_specs=of_head(R, D),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="select_combine",
    )(*sums, *starts)
    return (out.reshape(query.shape),)


def _attend(query, key, value, slots, *refs, beside, steps, step, queries, width, scale, soft_cap):
    *scales, out, peaks, totals = refs
    key_scales, value_scales, _ = beside.split(scales)
    like = jnp.promote_types(query.dtype, jnp.bfloat16)  # the range of float16 is too small for weights times scales
    (R, D), S, M = query.shape, key.shape[0], slots.shape[0]
    row = pl.program_id(1) * queries + jax.lax.broadcasted_iota(jnp.int32, (queries,), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
    of_queries = (row < R)[:, None] & (column < D)
    q = triton.load(query.at[row[:, None], column], mask=of_queries, other=0)
    first = pl.program_id(2) * (steps * step)

    def add(i, carry):
        peak, total, acc = carry
        nth = first + i * step + jax.lax.broadcasted_iota(jnp.int32, (step,), 0)
        slot = triton.load(slots.at[nth], mask=nth < M, other=-1)
        read = slot >= 0
        # Slot -1 is masked: nothing is read, and its row is 0. A slot beyond the cache is clipped to the last one.
        held = jnp.clip(slot, 0, S - 1)
        there = read[:, None] & (column < D)
        k, v = (triton.load(ref.at[held[:, None], column], mask=there, other=filler(ref.dtype)) for ref in (key, value))
        of_keys, of_values = (
            [triton.load(ref.at[held], mask=read, other=0.0)[None, :] for ref in refs]
            for refs in (key_scales, value_scales)
        )
        logits = product(q, widened(k, q.dtype), ((1,), (1,)))
        for of_slot in of_keys:
            logits = logits * of_slot
        logits = jnp.where(read[None, :], scaled(logits, scale, soft_cap), _UNSEEN)
        now = jnp.maximum(peak, jnp.max(logits, axis=1))
        weights = jnp.where(read[None, :], jnp.exp(logits - now[:, None]), 0.0)
        shrink, total = jnp.exp(peak - now), jnp.exp(peak - now) * total + jnp.sum(weights, axis=1)
        for of_slot in of_values:
            weights = weights * of_slot
        v = widened(v, like)
        acc = shrink[:, None] * acc + product(weights.astype(v.dtype), v, ((1,), (0,)))
        return now, total, acc

    start = jnp.full((queries,), _UNSEEN, jnp.float32), jnp.zeros((queries,), jnp.float32)
    peak, total, acc = jax.lax.fori_loop(0, steps, add, (*start, jnp.zeros((queries, width), jnp.float32)))
    triton.store(out.at[row[:, None], column], acc, mask=of_queries)
    triton.store(peaks.at[row], peak, mask=row < R)
    triton.store(totals.at[row], total, mask=row < R)


def _combine(sums, peaks, totals, *refs, width):
    *sinks, out = refs
    parts, _, D = sums.shape
    row = pl.program_id(1)
    column = jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)

    def add(i, carry):
        peak, total, acc = carry
        part = i * PARTS + jax.lax.broadcasted_iota(jnp.int32, (PARTS,), 0)
        of_row = jnp.full_like(part, row)
        own = triton.load(peaks.at[part, of_row], mask=part < parts, other=_UNSEEN)
        weight = triton.load(totals.at[part, of_row], mask=part < parts, other=0)
        some = triton.load(
            sums.at[part[:, None], of_row[:, None], column], mask=(part < parts)[:, None] & (column < D), other=0
        )
        now = jnp.maximum(peak, jnp.max(own))
        shrink, share = jnp.exp(peak - now), jnp.exp(own - now)
        acc = shrink * acc + jnp.sum(share[:, None] * some, axis=0)
        return now, shrink * total + jnp.sum(share * weight), acc

    start = jnp.float32(_UNSEEN), jnp.float32(0), jnp.zeros((width,), jnp.float32)
    for ref in sinks:  # the head's, a token of no value
        start = start_of(ref[jax.lax.rem(row, jnp.int32(ref.shape[0]))]), jnp.float32(1), start[2]
    _, total, acc = jax.lax.fori_loop(0, pl.cdiv(parts, PARTS), add, start)
    column = jax.lax.broadcasted_iota(jnp.int32, (width,), 0)
    result = (acc / jnp.maximum(total, _TINY)).astype(out.dtype)
    triton.store(out.at[jnp.full_like(column, row), column], result, mask=column < D)
