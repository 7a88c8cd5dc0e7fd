"""The kernels for Hopper GPUs (Pallas' Mosaic route): attention with an online softmax, then its column statistics.

They compute what the Triton kernels of ``gpu`` do. TMA brings tiles of keys and values to shared memory in a pipeline,
and a warpgroup multiplies them by wgmma. A program of the attention has 64 queries of the heads of a group, and
takes tiles of slots in turn with the other programs of its queries. A program of the statistics has a tile of slots and
one query head, so that the sums over queries stay inside a warp. Layouts are given by name: JAX would search for them,
and the search is exponential in what is left open.

They are interpreted against the definition, with a search for races, and were right on an H200.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.cache_attention.heads import span_of
from kernels_pallas.cache_attention.queries import (
    IN_WINDOW,
    IS_LAST,
    OF_GROUP,
    POSITION,
    UNSEEN,
    by_group,
    by_head,
    first_entering,
    of_one_query,
    start_of,
)
from kernels_pallas.dispatch import compute_capability
from kernels_pallas.eight_bits import unread, unread_on_gpu
from kernels_pallas.softmax import of_parts, scaled

TILE = 64  # slots or queries of a tile, as wgmma takes them
STAGES = 4  # tiles of keys and values on their way to shared memory
PROGRAMS = 132  # one for each multiprocessor of an H100 or H200, whose shared memory has room for one at head dim 128
_DESCRIPTION = (POSITION, IS_LAST, IN_WINDOW)
_MATRIX = plgpu.Layout.WGMMA
_OF_ROWS, _OF_COLUMNS = _MATRIX.reduce(1), _MATRIX.reduce(0)  # of vectors: one number for each row, or column
# Tiles in shared memory: of 16 bits, as wgmma reads them, and of 32 bits, for any multiple of 8 slots.
_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
_NARROW = (plgpu.TilingTransform((8, 8)), plgpu.SwizzleTransform(32))  # type: ignore[abstract]


def unsupported(
    query: Any, key: Any, value: Any, *_: Any, errors: bool = False, bias: Any = None, **__: Any
) -> str | None:
    """Return why the kernels can't run with these arguments, or None."""
    if errors:
        return "statistics of errors are asked for, which these kernels do not compute"
    if bias is not None:
        return "a bias per slot is given, which these kernels do not add"
    if not hasattr(plgpu, "InterpretGPUParams"):
        return f"JAX is {jax.__version__}, whose Pallas cannot interpret kernels for Mosaic GPU; take 0.11.2"
    if (capability := compute_capability()) not in (None, 90):
        return f"the compute capability is {capability / 10}, but the kernels use wgmma, which 9.0 alone has"
    if (reason := unread_on_gpu(key, value)) is not None:
        return reason
    arrays = {"queries": query, "keys": key, "values": value}
    if (reason := unread(("bfloat16", "float16"), arrays, {})) is not None:
        return reason
    if len(dtypes := sorted({x.dtype.name for x in arrays.values()})) > 1:
        return f"queries, keys and values are {' and '.join(dtypes)}, but the kernels take one dtype"
    if query.shape[3] not in (64, 128):
        return f"the head dim is {query.shape[3]}, but the kernels take 64 or 128"
    if key.shape[2] % 8:
        return f"there are {key.shape[2]} slots, but the kernels take a multiple of 8"
    if query.shape[2] // key.shape[1] > TILE:
        return f"{query.shape[2] // key.shape[1]} query heads share a KV head, but the kernels take up to {TILE}"
    return None


def slower(*_: Any, **__: Any) -> str:
    """Return why the Triton kernels are faster.

    On an H200 (8B shape, batch 8, 8,320 slots) these take 1.05 ms for a block of 128, 1.52 with statistics, and 0.157
    in decode. Triton's took 0.81, 2.39 and 0.095 when a tile of attention was 1,156 instructions of a warp and one of
    the statistics 1,204; now they are 512 and 494.
    """
    return "by their machine code the Triton kernels are faster on an H100 or H200"


def of_heads(
    query, about, window, key, value, key_position, *, beside, names, errors, scale, soft_cap, sinks, interpret
):
    del beside, errors  # no scales, biases or errors: all are refused
    B, K, S, D = key.shape
    G, T = query.shape[2:4]
    H, R, tiles, span = B * K, G * T, pl.cdiv(S, TILE), span_of(window)
    key, value = (x.reshape(H, S, D) for x in (key, value))
    query = query.reshape(H, G, T, D)
    place = _padded(key_position.reshape(H, S), TILE, -1)
    own = _padded(jnp.tile(about[:, :, POSITION], (1, G)), TILE, -1)
    padded = _padded(query.reshape(H, R, D), TILE, 0, axis=1)
    blocks = padded.shape[1] // TILE
    splits = min(max(PROGRAMS // (H * blocks), 1), pl.cdiv(tiles, STAGES))
    one_query = T == 1 and bool(names)  # its logits take no more memory than the statistics, which follow from them
    options = dict(scale=scale, soft_cap=soft_cap)
    acc, peak, total, *logits = plgpu.kernel(
        functools.partial(_attend, kv_heads=K, **options),
        out_type=[
            jax.ShapeDtypeStruct((H, splits, blocks * TILE, D), jnp.float32),
            *[jax.ShapeDtypeStruct((H, splits, blocks * TILE), jnp.float32)] * 2,
            *[jax.ShapeDtypeStruct((H, 8 * pl.cdiv(G, 8), S), jnp.float32)] * one_query,
        ],
        scratch_types=dict(
            q=plgpu.SMEM((TILE, D), query.dtype, transforms=_SWIZZLED),
            own=plgpu.SMEM((TILE,), jnp.int32),
            weights=plgpu.SMEM((TILE, TILE), query.dtype, transforms=_SWIZZLED),
            results=(
                plgpu.SMEM((TILE, D), jnp.float32),
                *[plgpu.SMEM((TILE,), jnp.float32)] * 2,
            ),
            logits=[plgpu.SMEM((TILE, TILE), jnp.float32, transforms=_NARROW)] * one_query,
            ready=plgpu.Barrier(num_arrivals=2),
        ),
        grid=(H, blocks, splits),
        grid_names=("head", "block", "split"),
        kernel_name="cache_attention",
        interpret=interpret or None,
    )(
        span,
        padded,
        own,
        place,
        jnp.all(place.reshape(H, tiles, TILE) >= 0, axis=2).astype(jnp.int32),
        key,
        value,
    )
    sinks = (
        None if sinks is None else jnp.tile(jnp.repeat(start_of(sinks), T, axis=1), (B, 1))
    )  # [H, R], which XLA adds
    acc, peak, total = (x[:, :, :R] for x in (acc, peak, total))
    out, peak, total = of_parts(acc, peak, total, sinks)
    out = out.astype(query.dtype).reshape(B, K, G, T, D)
    if not names:
        return (out,)
    if one_query:
        softmax = jnp.stack([peak, total], axis=-1).reshape(B, K, G, 2)
        return (out, *of_one_query(names, logits[0][:, :G].reshape(B, K, G, S), softmax))
    norm = (peak + jnp.log(total)).reshape(H, G, T)
    columns = _statistics(query, norm, about, span, place, key, names, options, interpret)
    return (out, *(columns[name].reshape(B, K, -1, S) for name in names))


def _statistics(query, norm, about, span, place, key, names, options, interpret):
    """Run the kernels of the statistics: one for those of a head, one for that of a group."""
    (H, G, _, D), (_, S, _), B = query.shape, key.shape, about.shape[0]
    first = first_entering(about, names)
    query, norm = _padded(query, TILE, 0, axis=2), _padded(norm, TILE, 0)
    about = _padded(about.swapaxes(1, 2), TILE, -1)  # [B, 3, T]
    windows = jnp.sum(about[:, IN_WINDOW].reshape(B, -1, TILE) > 0, axis=2).astype(jnp.float32)  # queries of each tile
    columns: dict[str, jax.Array] = {}
    of_group = tuple(name for name in names if name == OF_GROUP)
    of_head = tuple(name for name in names if name != OF_GROUP)
    for some, own_heads in ((of_head, 1), (of_group, G)):
        if not some:
            continue
        # Whole tiles: a GPU cuts the copy of a vector at the end of the array, not of its row as the interpreter does.
        found = plgpu.kernel(
            functools.partial(_reduce, heads=(H // B, own_heads), names=some, **options),
            out_type=[jax.ShapeDtypeStruct((H, G // own_heads, place.shape[1]), jnp.float32)] * len(some),
            scratch_types=dict(
                k=plgpu.SMEM((TILE, D), query.dtype, transforms=_SWIZZLED),
                place=plgpu.SMEM((TILE,), jnp.int32),
                results=[plgpu.SMEM((TILE,), jnp.float32)] * len(some),
                ready=plgpu.Barrier(num_arrivals=2),
            ),
            grid=(H, G // own_heads, place.shape[1] // TILE),
            grid_names=("head", "query_head", "tile"),
            kernel_name="cache_statistics",
            interpret=interpret or None,
        )(span, first, windows, query, about, norm, place, key)
        columns |= dict(zip(some, (column[:, :, :S] for column in found), strict=True))
    return columns


def _padded(x, size, filler, axis=-1):
    """Pad an axis to a multiple of a size, as TMA fills what is beyond an array with zeros."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % size)
    return jnp.pad(x, widths, constant_values=filler)


def _indices(*names):
    return tuple(lax.axis_index(name) for name in names)


def _quotient(a, b):
    return lax.div(a, jnp.int32(b))


def _vector(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)


def _filled(shape, number, layout):
    return plgpu.layout_cast(jnp.full(shape, number, jnp.float32), layout)


def _of_rows(x, columns=TILE):
    """Repeat a number per row over the columns."""
    return lax.broadcast_in_dim(x, (TILE, columns), (0,))


def _of_columns(x):
    """Repeat a number per column down a matrix."""
    return lax.broadcast_in_dim(x, (TILE, TILE), (1,))


def _product(a, b, columns=TILE):
    """Multiply two matrices in shared memory, and wait for the float32 result in registers."""

    def multiplied(sums):
        plgpu.wgmma(sums, a, b)
        return sums[...]

    return pl.run_scoped(multiplied, plgpu.ACC((TILE, columns), jnp.float32))


def _sees(span, own, place):
    """Return a mask of the slots that queries see, from positions repeated over a tile."""
    age = own - place
    return (place >= 0) & (own >= 0) & (age >= 0) & (age < span)


def _attend(
    span, query, own_positions, places, no_free, key, value, out, peaks, totals, *logits_out,
    kv_heads, scale, soft_cap, q, own, weights, results, logits, ready,
):  # fmt: skip
    D, tiles = query.shape[-1], no_free.shape[1]
    head, block, split = _indices("head", "block", "split")
    splits = out.shape[1]
    queries = pl.ds(block * TILE, TILE)
    plgpu.copy_gmem_to_smem(query.at[head, queries], q, ready)
    plgpu.copy_gmem_to_smem(own_positions.at[_quotient(head, kv_heads), queries], own, ready)
    plgpu.barrier_wait(ready)
    position, sees = _of_rows(_vector(own, _OF_ROWS)), functools.partial(_sees, span[0])

    def tile(i):  # programs take tiles in turn
        return split + i * splits

    def step(index, place, k, v, carry):
        peak, total, acc = carry
        visible = sees(position, _of_columns(_vector(place, _OF_COLUMNS)))
        found = jnp.where(visible, scaled(_product(q, k.T), scale, soft_cap), UNSEEN)
        for ref, mine in zip(logits_out, logits, strict=True):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            mine[...] = found
            plgpu.commit_smem()
            slots = pl.ds(tile(index[0]) * TILE, TILE)
            plgpu.copy_smem_to_gmem(mine.at[pl.ds(0, ref.shape[1])], ref.at[head, :, slots])
        now = jnp.maximum(peak, jnp.max(found, axis=1))
        shares = jnp.where(visible, jnp.exp(found - _of_rows(now)), 0.0)
        shrink = jnp.exp(peak - now)
        weights[...] = shares.astype(weights.dtype)

        @pl.when(no_free[head, tile(index[0])] == 0)
        def _():  # the content of a free slot must not matter, and 0 * NaN is NaN
            live = _of_rows(_vector(place, _OF_ROWS), D) >= 0
            v[...] = jnp.where(live, plgpu.load(v, layout=_MATRIX), jnp.zeros((), v.dtype))

        plgpu.commit_smem()
        acc = _of_rows(shrink, D) * acc + _product(weights, v, D)
        return now, shrink * total + jnp.sum(shares, axis=1), acc

    of_slots = plgpu.BlockSpec((None, TILE, D), lambda i: (head, tile(i), 0), transforms=_SWIZZLED)
    peak, total, acc = plgpu.emit_pipeline(
        step,
        grid=(_quotient(tiles - split + splits - 1, splits),),
        in_specs=[plgpu.BlockSpec((None, TILE), lambda i: (head, tile(i))), of_slots, of_slots],
        max_concurrent_steps=STAGES,
        init_carry=(
            _filled((TILE,), UNSEEN, _OF_ROWS),
            _filled((TILE,), 0, _OF_ROWS),
            _filled((TILE, D), 0, _MATRIX),
        ),
    )(places, key, value)
    for ref, result in zip(results, (acc, peak, total), strict=True):
        ref[...] = result
    plgpu.commit_smem()
    for ref, result in zip((out, peaks, totals), results, strict=True):
        plgpu.copy_smem_to_gmem(result, ref.at[head, split, queries])
    plgpu.wait_smem_to_gmem(0)


def _reduce(
    span, first_query, windows, query, about, norms, places, key, *columns,
    heads, names, scale, soft_cap, k, place, results, ready,
):  # fmt: skip
    (K, own_heads), D = heads, key.shape[-1]
    head, query_head, tile = _indices("head", "query_head", "tile")
    slots, row = pl.ds(tile * TILE, TILE), _quotient(head, K)
    plgpu.copy_gmem_to_smem(key.at[head, slots], k, ready)
    plgpu.copy_gmem_to_smem(places.at[head, slots], place, ready)
    plgpu.barrier_wait(ready)
    position, sees = _of_rows(_vector(place, _OF_ROWS)), functools.partial(_sees, span[0])
    first = _quotient(first_query[row], TILE)
    zero = _filled((TILE,), 0, _OF_ROWS)
    group = names == (OF_GROUP,)
    start, add, finish = by_group(own_heads, _filled((TILE, TILE), 0, _MATRIX), zero) if group else by_head(names, zero)

    def step(index, q, descriptions, norm, carry):
        own, is_last, nth = (_of_columns(_vector(descriptions.at[i], _OF_COLUMNS)) for i in _DESCRIPTION)
        norm = _of_columns(_vector(norm, _OF_COLUMNS))
        plgpu.commit_smem()  # orders these reads before the copy of a later step to the same place
        visible = sees(own, position)
        logits = scaled(_product(k, q.T), scale, soft_cap)
        weights = jnp.exp(jnp.where(visible, logits - norm, UNSEEN))
        return add(carry, weights, is_last > 0, nth, windows[row, first + index[0]], index[1])

    carry = plgpu.emit_pipeline(
        step,
        grid=(query.shape[2] // TILE - first, own_heads),
        in_specs=[
            plgpu.BlockSpec(
                (None, None, TILE, D), lambda i, g: (head, query_head + g, first + i, 0), transforms=_SWIZZLED
            ),
            plgpu.BlockSpec((None, 3, TILE), lambda i, g: (row, 0, first + i)),
            plgpu.BlockSpec((None, None, TILE), lambda i, g: (head, query_head + g, first + i)),
        ],
        max_concurrent_steps=2,
        init_carry=start,
    )(query, about, norms)
    found = finish(carry)
    for name, ref in zip(names, results, strict=True):
        ref[...] = found[name]
    plgpu.commit_smem()
    for ref, result in zip(columns, results, strict=True):
        plgpu.copy_smem_to_gmem(result, ref.at[head, query_head, slots])
    plgpu.wait_smem_to_gmem(0)
