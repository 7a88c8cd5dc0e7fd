"""The kernel for TPU: attention over the chunks of the cache that hold a chosen slot, the slots between masked out.

Keys are not gathered, for a TPU has no cheap way to read one. Two of bfloat16 share their 32-bit words, so a copy
reads at least 512 bytes; starting a copy takes about 11 cycles of the scalar core, in which the memory of a v5e streams
6 KB. So whole chunks are streamed, as in dense attention, and chunks without a chosen slot are skipped: those outside a
sliding window, or never written. The matrix unit turns the list of slots, in ascending order, into a chunk's mask:
slot 128 i + j is the product of two one-hot vectors, of i and of j.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from kernels_pallas.cache_attention.queries import UNSEEN, start_of
from kernels_pallas.cache_attention.tpu import add_weighted, begin
from kernels_pallas.eight_bits import unread, widened
from kernels_pallas.softmax import product, scaled

SLOTS = 2048  # of a chunk, at most
BYTES = 2**20  # of a chunk's keys, and again of its values, at most
QUERIES = 512  # queries of all heads of a group, at most
CELLS = 512 * 512  # queries x slots computed at a time
LISTED = 256  # slots of the list that are turned into a mask at a time
LIST = 2**21  # slots of all lists of a KV head, at most: they are in VMEM, 4 bytes each, twice
FEW = 32  # below one slot in 32, row by row is faster: 27 cycles per row on a v5e, against 0.94 per slot streamed


def unsupported(query: Any, key: Any, value: Any, slots: Any, **_: Any) -> str | None:
    """Return why the kernel can't run with these arguments, or would be slower than the reference, or None."""
    reason = unread(("float32", "bfloat16"), {"queries": query}, {"keys": key, "values": value})
    if reason is not None:
        return reason
    _, T, N, D = query.shape
    K, S = key.shape[1:3]
    H, M = slots.shape[1:]
    if D > 512:
        return f"the head dim is {D}, but the kernel takes up to 512"
    if T * N // K > QUERIES:
        return f"{T} queries of {N // K} heads read a KV head, but the kernel takes up to {QUERIES} together"
    if H // K * M > LIST:
        return f"{H // K * M} slots are listed for a KV head, but the kernel takes up to {LIST}"
    if FEW * H * M < K * S:
        return f"{M} of {S} slots are so few that the kernel, which reads all between them, would take longer"
    return None


def of_heads(query, key, value, slots, *scales, beside, scale, soft_cap, sinks, interpret):
    B, K, sets, T, G, D = query.shape
    S, R, itemsize = key.shape[2], sets * T * G, max(key.dtype.itemsize, value.dtype.itemsize)
    most = min(SLOTS, CELLS // R, BYTES // (pl.cdiv(D, 128) * 128 * itemsize)) // 128 * 128
    size = min(pl.cdiv(S, 128) * 128, max(most, 128))
    chunks = pl.cdiv(S, size)

    slots = jnp.where(slots < 0, chunks * size, jnp.minimum(slots, S - 1)).reshape(B * K * sets, -1)
    slots = jnp.pad(slots, ((0, 0), (0, -slots.shape[1] % LISTED)), constant_values=chunks * size)
    slots = _in_order(slots).reshape(B * K * sets, -1, LISTED)
    blocks = slots.shape[1]
    start = _starts(slots, size * jnp.arange(chunks + 1)).reshape(B, K, sets, chunks + 1)
    chosen = jnp.any(start[..., 1:] > start[..., :-1], axis=2)  # [B, K, chunks]
    here = jax.lax.cummax(jnp.where(chosen, jnp.arange(chunks), 0), axis=2).reshape(-1)  # which chunk is in VMEM

    of_queries = pl.BlockSpec((None, None, R, D), lambda b, k, c, here: (b, k, 0, 0))
    of_slots = pl.BlockSpec((None, None, size, D), lambda b, k, c, here: (b, k, here[(b * K + k) * chunks + c], 0))
    of_scales = pl.BlockSpec((None, None, 1, size), lambda b, k, c, here: (b, k, 0, here[(b * K + k) * chunks + c]))
    starts = []
    if sinks is not None:
        starts = [jnp.broadcast_to(start_of(sinks).reshape(K, sets, 1, G), (K, sets, T, G)).reshape(K, R, 1)]
    out = pl.pallas_call(
        functools.partial(_attend, beside=beside, size=size, scale=scale, soft_cap=soft_cap),
        out_shape=jax.ShapeDtypeStruct((B, K, R, D), query.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, K, chunks),
            in_specs=[
                pl.BlockSpec(
                    (None, None, sets, chunks + 1), lambda b, k, c, here: (b, k, 0, 0), memory_space=pltpu.SMEM
                ),
                of_queries,
                of_slots,
                of_slots,
                pl.BlockSpec((None, None, sets, blocks, 1, LISTED), lambda b, k, c, here: (b, k, 0, 0, 0, 0)),
                *[of_scales] * len(scales),
                *[pl.BlockSpec((None, R, 1), lambda b, k, c, here: (k, 0, 0))] * len(starts),
            ],
            out_specs=of_queries,
            scratch_shapes=[
                pltpu.VMEM((R, 128), jnp.float32),
                pltpu.VMEM((R, 128), jnp.float32),
                pltpu.VMEM((R, D), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=2**24 + 8 * sets * blocks * LISTED,
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * B * K * R * S * D,
            bytes_accessed=B * K * S * D * (key.dtype.itemsize + value.dtype.itemsize) + 4 * slots.size,
            transcendentals=B * K * R * S,
        ),
        interpret=interpret,
        name="select_attention",
    )(
        here,
        start,
        query.reshape(B, K, R, D),
        key,
        value,
        slots.reshape(B, K, sets, blocks, 1, LISTED),
        *[x[:, :, None] for x in scales],
        *starts,
    )
    return (out.reshape(query.shape),)


def _in_order(slots: Int[Array, "*lists M"]) -> Int[Array, "*lists M"]:
    """Return the slots in ascending order, sorted only where needed: ``kvjax.select`` returns them in order."""
    rising = jnp.all(slots[..., 1:] >= slots[..., :-1])
    return jax.lax.cond(rising, lambda slots: slots, lambda slots: jnp.sort(slots, axis=-1, stable=False), slots)


def _starts(slots: Int[Array, "lists blocks listed"], bounds: Int[Array, "C"]) -> Int[Array, "lists C"]:
    """Count the slots of each list that are below each bound: first whole blocks, then inside a single block."""
    _, blocks, listed = slots.shape
    whole = jnp.sum(slots[:, None, :, -1] < bounds[:, None], axis=-1, dtype=jnp.int32)
    at_bound = jnp.take_along_axis(slots, jnp.minimum(whole, blocks - 1)[..., None], axis=1)  # [lists, C, listed]
    inside = jnp.sum(at_bound < bounds[:, None], axis=-1, dtype=jnp.int32)
    return jnp.minimum(whole * listed + inside, blocks * listed)


def _mask(slots, first, last, origin, size):
    """Return a mask [1, size] of the chunk's slots in the list, of which blocks ``first`` to ``last`` are searched."""
    tall = max(size // 128, 8)

    def add(block, mask):
        near = slots[block] - origin  # [1, LISTED]
        high = near >> 7 == jax.lax.broadcasted_iota(jnp.int32, (tall, LISTED), 0)
        low = near & 127 == jax.lax.broadcasted_iota(jnp.int32, (128, LISTED), 0)
        high, low = (jnp.where(x, 1.0, 0.0).astype(jnp.bfloat16) for x in (high, low))
        return mask + jax.lax.dot_general(high, low, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    mask = jax.lax.fori_loop(first, last, add, jnp.zeros((tall, 128), jnp.float32))
    pieces = [mask[i : i + 1] for i in range(size // 128)]
    return jnp.concatenate(pieces, axis=1) if len(pieces) > 1 else pieces[0]


def _attend(here, start, query, key, value, slots, *refs, beside, size, scale, soft_cap):
    *scales, out, peak, total, acc = refs
    scales, sinks = scales[: sum(beside)], scales[sum(beside) :]
    key_scales, value_scales, _ = beside.split(scales)
    c = pl.program_id(2)
    R, sets = query.shape[0], start.shape[0]

    @pl.when(c == 0)
    def reset():
        begin(sinks, peak, total, acc)

    chosen = start[0, c + 1] > start[0, c]
    for n in range(1, sets):
        chosen = chosen | (start[n, c + 1] > start[n, c])

    @pl.when(chosen)
    def add():
        masks = [
            _mask(slots.at[n], start[n, c] // LISTED, pl.cdiv(start[n, c + 1], LISTED), c * size, size)
            for n in range(sets)
        ]
        spread = [jnp.broadcast_to(mask, (R // sets, size)) for mask in masks]
        visible = (jnp.concatenate(spread, axis=0) if sets > 1 else spread[0]) > 0
        logits = product(query[...], widened(key[...], query.dtype), ((1,), (1,)))
        for ref in key_scales:
            logits = logits * ref[...]  # [1, size]
        logits = jnp.where(visible, scaled(logits, scale, soft_cap), UNSEEN)
        # The content of slots that are not chosen must not matter, and 0 * NaN is NaN.
        any_set = jnp.broadcast_to(functools.reduce(jnp.maximum, masks), (8, size)).T[:, :1] > 0
        like = query.dtype if value.dtype.itemsize == 1 else value.dtype
        v = jnp.where(any_set, value[...].astype(jnp.float32), 0).astype(like)
        add_weighted(logits, visible, v, value_scales, peak, total, acc)

    @pl.when(c == pl.num_programs(2) - 1)
    def finish():
        out[...] = (acc[...] / jnp.maximum(total[:, :1], jnp.finfo(jnp.float32).tiny)).astype(out.dtype)
