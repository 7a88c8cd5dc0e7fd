"""The kernels for TPU: attention with an online softmax, and its column statistics in a second pass over the keys.

A tile has queries of all heads of a group, ``[G, T]`` in blocks of T, so that a group reads its keys once. No weight
leaves VMEM. The first kernel also returns each row's largest logit and its sum of exponentials; the second computes
the weights of a chunk of slots again from them, and reduces these over the blocks of queries that enter a statistic. A
single query, as in decode, needs no second kernel: the first returns its logits, 4 G bytes per slot. A
:class:`Storage` describes where a chunk's slots are: one after another here, in pages for ``paged_attention``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas.cache_attention.heads import span_of
from kernels_pallas.cache_attention.queries import (
    IN_WINDOW,
    IS_LAST,
    POSITION,
    UNSEEN,
    first_entering,
    of_one_query,
    squared_changes,
    start_of,
    terms,
    with_term,
)
from kernels_pallas.eight_bits import unread
from kernels_pallas.prepare import Beside
from kernels_pallas.softmax import product, scaled

QUERIES = 512  # of a block of queries, over all heads of a group
CELLS = 512 * 512  # queries x slots computed at a time
SLOTS = 2048  # of a chunk, at most


class Storage(NamedTuple):
    """Locations of the keys and values of a chunk of a head's slots."""

    slots: int  # of a chunk, a multiple of 128
    # Blocks of the keys, and of the values, that make up a chunk one after another: each one's shape, and its index
    # from (row, KV head, chunk, *where); ``where`` are arrays in scalar memory.
    blocks: tuple[tuple[tuple[int | None, ...], Callable[..., tuple[Any, ...]]], ...]
    holds: Callable[..., Any] | None = None  # same arguments -> whether a chunk holds any token; None where all may


def unsupported(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> str | None:
    """Return why the kernels can't run with these arguments, or None."""
    return beyond(query, key, value, key.shape[1])


def beyond(query: Any, key: Any, value: Any, kv_heads: int) -> str | None:
    """Return why the kernels can't run with these arguments, whatever the storage, or None."""
    reason = unread(("float32", "bfloat16"), {"queries": query}, {"keys": key, "values": value})
    if reason is not None:
        return reason
    if query.shape[3] > 512:
        return f"the head dim is {query.shape[3]}, but the kernels take up to 512"
    if query.shape[2] // kv_heads > 64:
        return f"{query.shape[2] // kv_heads} query heads share a KV head, but the kernels take up to 64"
    return None


def of_heads(query, about, window, key, value, key_position, *floats, **options):
    S, D = key.shape[2:]

    def stored(most: int) -> tuple[Storage, tuple[Array, ...]]:
        slots = min(pl.cdiv(S, 128) * 128, most)
        return Storage(slots, (((None, None, slots, D), lambda b, k, c: (b, k, c, 0)),)), ()

    return attend_heads(query, about, window, key, value, key_position, floats, stored, name="cache", **options)


def attend_heads(
    query: Float[Array, "B K G T D"],
    about: Int[Array, "B T 3"],
    window: Int[Array, ""] | int | None,
    key: Array,
    value: Array,
    key_position: Int[Array, "B K S"],
    floats: tuple[Float[Array, "B K S"], ...],
    stored: Callable[[int], tuple[Storage, tuple[Array, ...]]],
    *,
    beside: Beside,
    names: tuple[str, ...],
    errors: bool,
    scale: float,
    soft_cap: float | None,
    sinks: Float[Array, "K G"] | None,
    interpret: Any,
    name: str,
) -> tuple[Array, ...]:
    """Run the kernels on keys and values in a storage, and return the output and the named statistics, by group.

    ``stored`` takes the most slots of a chunk, and returns the storage and the arrays ``where`` for scalar memory.
    """
    B, K, G, T, D = query.shape
    S, span = key_position.shape[2], span_of(window)
    per_head = 1 if T == 1 else min(pl.cdiv(T, 16) * 16, max(QUERIES // G // 16, 1) * 16)  # queries of a block
    blocks, queries = pl.cdiv(T, per_head), G * per_head
    storage, where = stored(max(min(SLOTS, CELLS // queries // 128 * 128), 128))
    slots, pieces = storage.slots, len(storage.blocks)
    chunks = pl.cdiv(S, slots)

    padding = blocks * per_head - T
    query = jnp.pad(query, ((0, 0), (0, 0), (0, 0), (0, padding), (0, 0)))
    query = query.reshape(B, K, G, blocks, per_head, D).swapaxes(2, 3).reshape(B, K, blocks, queries, D)
    about = jnp.pad(about, ((0, 0), (0, padding), (0, 0)), constant_values=-1)
    more = ((0, 0), (0, 0), (0, chunks * slots - S))
    key_position = jnp.pad(key_position, more, constant_values=-1)[:, :, None]
    floats = tuple(jnp.pad(x, more)[:, :, None] for x in floats)
    key_scales, value_scales, biases = beside.split(floats)
    starts = [] if sinks is None else [jnp.repeat(start_of(sinks), per_head, axis=1)[..., None]]

    def specs(order):
        """Return the specs of all inputs; ``order`` sorts a program's indices to (b, k, query block, chunk, *where)."""
        shapes = [
            ((None, None, None, queries, D), lambda b, k, t, c, *_: (b, k, t, 0, 0)),
            ((None, per_head, 3), lambda b, k, t, c, *_: (b, t, 0)),
            ((None, None, 1, slots), lambda b, k, t, c, *_: (b, k, 0, c)),
            ((None, None, None, queries, 128), lambda b, k, t, c, *_: (b, k, t, 0, 0)),
            *((shape, lambda b, k, t, c, *where, f=f: f(b, k, c, *where)) for shape, f in storage.blocks),
        ]
        q, about, position, row, *slot = (pl.BlockSpec(shape, lambda *ids, f=f: f(*order(*ids))) for shape, f in shapes)
        return q, about, position, row, slot

    q_spec, about_spec, position_spec, row_spec, slot_specs = specs(lambda *ids: ids)
    scalar = pl.BlockSpec(memory_space=pltpu.SMEM)
    options: dict[str, Any] = dict(storage=storage, scalars=len(where), per_head=per_head)
    options |= dict(scale=scale, soft_cap=soft_cap)
    # The logits of one query take no more memory than the statistics, which follow from them.
    one_query = T == 1 and bool(names) and not errors
    out, softmax, *logits = pl.pallas_call(
        functools.partial(_attend, beside=beside, errors=errors, has_sinks=sinks is not None, **options),
        out_shape=[
            # Errors are small differences of outputs.
            jax.ShapeDtypeStruct(query.shape, jnp.float32 if errors else query.dtype),
            jax.ShapeDtypeStruct((B, K, blocks, queries, 128), jnp.float32),
            *[jax.ShapeDtypeStruct((B, K, queries, S), jnp.float32)] * one_query,
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(where),
            grid=(B, K, blocks, chunks),
            in_specs=[
                scalar,
                q_spec,
                about_spec,
                *[position_spec] * (1 + len(floats)),
                *[pl.BlockSpec((None, queries, 1), lambda b, k, *_: (k, 0, 0))] * len(starts),
                *slot_specs * 2,
            ],
            out_specs=[
                q_spec,
                row_spec,
                *[pl.BlockSpec((None, None, queries, slots), lambda b, k, t, c, *_: (b, k, 0, c))] * one_query,
            ],
            scratch_shapes=[
                pltpu.VMEM((queries, 128), jnp.float32),
                pltpu.VMEM((queries, 128), jnp.float32),
                pltpu.VMEM((queries, D), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * B * K * queries * blocks * S * D,
            bytes_accessed=B * K * S * D * blocks * (key.dtype.itemsize + value.dtype.itemsize)
            + 2 * query.size * query.dtype.itemsize,
            transcendentals=B * K * queries * blocks * S,
        ),
        interpret=interpret,
        name=f"{name}_attention",
    )(*where, span, query, about, key_position, *floats, *starts, *[key] * pieces, *[value] * pieces)

    columns: tuple[Array, ...] = ()
    if one_query:
        columns = of_one_query(names, logits[0], softmax[:, :, 0, :, :2])
    elif names:
        q_spec, about_spec, position_spec, row_spec, slot_specs = specs(lambda b, k, c, t, *where: (b, k, t, c, *where))
        read, of_errors = ((key, value), (out,)) if errors else ((key,), ())
        beside = beside._replace(value_scale=beside.value_scale and errors)
        used = (*key_scales, *(value_scales if errors else ()), *biases)
        heads = [1 if name == "window_group_square" else G for name in names]
        columns = pl.pallas_call(
            functools.partial(_reduce, names=names, blocks=blocks, beside=beside, errors=errors, **options),
            out_shape=[jax.ShapeDtypeStruct((B, K, h, S), jnp.float32) for h in heads],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(where),
                grid=(B, K, chunks, blocks),
                in_specs=[
                    *[scalar] * 2,
                    q_spec,
                    about_spec,
                    *[position_spec] * (1 + len(used)),
                    row_spec,
                    *[q_spec] * len(of_errors),
                    *slot_specs * len(read),
                ],
                out_specs=[pl.BlockSpec((None, None, h, slots), lambda b, k, c, *_: (b, k, 0, c)) for h in heads],
                scratch_shapes=[
                    pltpu.VMEM((G, slots), jnp.float32),
                    pltpu.VMEM((G, slots), jnp.float32),
                    pltpu.VMEM((1, 128), jnp.float32),
                ],
            ),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
            cost_estimate=pl.CostEstimate(
                flops=2 * B * K * queries * blocks * S * D,
                bytes_accessed=B * K * S * D * key.dtype.itemsize * (1 if blocks == 1 else blocks),
                transcendentals=B * K * queries * blocks * S,
            ),
            interpret=interpret,
            name=f"{name}_statistics",
        )(
            *where, span, first_entering(about, names), query, about, key_position, *used, softmax, *of_errors,
            *[x for x in read for _ in range(pieces)],
        )  # fmt: skip
    out = out.reshape(B, K, blocks, G, per_head, -1).swapaxes(2, 3).reshape(B, K, G, blocks * per_head, -1)
    return (out[:, :, :, :T], *columns)


def _chunk(blocks, narrow_as=None):
    """Join the blocks of a chunk of slots to [slots, D]; numbers of eight bits are converted to ``narrow_as``."""
    dtype = blocks[0].dtype
    half_tile = blocks[0].shape[0] * dtype.itemsize % 32 != 0  # a tile holds lines of 32 bytes one after another
    wide = [ref[...].astype(jnp.float32) if dtype.itemsize == 1 or half_tile else ref[...] for ref in blocks]
    joined = jnp.concatenate(wide) if len(blocks) > 1 else wide[0]
    return joined.astype(narrow_as if dtype.itemsize == 1 else dtype)


def _logits(span, query, about, key, key_position, key_scales, biases, *, per_head, scale, soft_cap):
    """Compute the logits of a block [queries, slots], and a mask of those that a query sees."""
    logits = product(query[...], key, ((1,), (1,)))
    for ref in key_scales:
        logits = logits * ref[...]  # [1, slots]
    position, own = key_position[...], about[:, POSITION : POSITION + 1]  # [1, slots], [per_head, 1]
    age = own - position
    visible = (position >= 0) & (own >= 0) & (age >= 0) & (age < span[0])  # [per_head, slots]
    repeats = query.shape[0] // per_head
    seen = jnp.where(visible, 1.0, 0.0)
    seen = jnp.concatenate([seen] * repeats, axis=0) if repeats > 1 else seen
    logits = scaled(logits, scale, soft_cap)
    for ref in biases:
        logits = logits + ref[...]  # [1, slots]
    return logits, seen > 0


def _when_held(storage, where, chunk, *conditions):
    """Return a decorator that runs its function unless the chunk holds no token, or a condition fails."""
    if storage.holds is not None:
        conditions += (storage.holds(pl.program_id(0), pl.program_id(1), chunk, *where),)
    return pl.when(functools.reduce(jnp.logical_and, conditions)) if conditions else lambda run: run()


def _column(row):
    """Turn a row [1, slots] into a column [slots, 1]."""
    return jnp.broadcast_to(row, (8, row.shape[1])).T[:, :1]


def begin(sinks, peak, total, acc):
    """Begin an online softmax: with the queries' sinks [queries, 1], tokens of no value, or with nothing."""
    peak[...] = jnp.broadcast_to(sinks[0][...], peak.shape) if sinks else jnp.full_like(peak, UNSEEN)
    total[...] = jnp.full_like(total, len(sinks))
    acc[...] = jnp.zeros_like(acc)


def add_weighted(logits, visible, v, value_scales, peak, total, acc):
    """Add the values of a chunk, [slots, D] without NaN, to an online softmax over the slots that are visible."""
    before = peak[:, :1]
    now = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
    weights = jnp.where(visible, jnp.exp(logits - now), 0)
    shrink = jnp.exp(before - now)
    shares = weights
    for ref in value_scales:
        shares = jnp.where(visible, weights * ref[...], 0)
    acc[...] = shrink * acc[...] + product(shares.astype(v.dtype), v, ((1,), (0,)))
    total[...] = jnp.broadcast_to(shrink * total[:, :1] + jnp.sum(weights, axis=1, keepdims=True), total.shape)
    peak[...] = jnp.broadcast_to(now, peak.shape)


def _attend(*refs, errors, has_sinks, storage, scalars, beside, per_head, scale, soft_cap):
    where, (span, query, about, key_position, *others) = refs[:scalars], refs[scalars:]
    floats, others = others[: sum(beside)], others[sum(beside) :]
    sinks, others = others[: int(has_sinks)], others[int(has_sinks) :]
    key_scales, value_scales, biases = beside.split(floats)
    pieces = len(storage.blocks)
    keys, values, others = others[:pieces], others[pieces : 2 * pieces], others[2 * pieces :]
    out, softmax, *logits_out, peak, total, acc = others
    c = pl.program_id(3)

    @pl.when(c == 0)
    def reset():
        begin(sinks, peak, total, acc)

    if storage.holds is not None:
        for ref in logits_out:
            ref[...] = jnp.full_like(ref, UNSEEN)

    @_when_held(storage, where, c)
    def add():
        logits, visible = _logits(
            span, query, about, _chunk(keys, query.dtype), key_position, key_scales, biases,
            per_head=per_head, scale=scale, soft_cap=soft_cap,
        )  # fmt: skip
        logits = jnp.where(visible, logits, UNSEEN)
        for ref in logits_out:
            ref[...] = logits
        # The content of a free slot must not matter, and 0 * NaN is NaN.
        live = _column(jnp.where(key_position[...] >= 0, 1.0, 0.0)) > 0
        value = _chunk(values, query.dtype)
        v = jnp.where(live, value.astype(jnp.float32), 0).astype(jnp.float32 if errors else value.dtype)
        add_weighted(logits, visible, v, value_scales, peak, total, acc)

    @pl.when(c == pl.num_programs(3) - 1)
    def finish():
        tiny = jnp.finfo(jnp.float32).tiny
        out[...] = (acc[...] / jnp.maximum(total[:, :1], tiny)).astype(out.dtype)
        lane = jax.lax.broadcasted_iota(jnp.int32, softmax.shape, 1)
        softmax[...] = jnp.where(lane == 0, peak[...], jnp.maximum(total[...], tiny))


def _reduce(*refs, storage, scalars, beside, names, errors, per_head, scale, soft_cap, blocks):
    where, (span, first_query, query, about, key_position, *others) = refs[:scalars], refs[scalars:]
    key_scales, value_scales, biases = beside.split(others[: sum(beside)])
    softmax, *others = others[sum(beside) :]
    outputs, others, pieces = others[: int(errors)], others[int(errors) :], len(storage.blocks)
    keys, values, sums = others[:pieces], others[pieces : (1 + errors) * pieces], others[(1 + errors) * pieces :]
    columns, (mean, deviations, count) = dict(zip(names, sums, strict=False)), sums[len(names) :]
    t = pl.program_id(3)
    G = query.shape[0] // per_head

    @pl.when(t == 0)
    def reset():
        for ref in sums:
            ref[...] = jnp.zeros_like(ref)

    @_when_held(storage, where, pl.program_id(2), (t + 1) * per_head > first_query[pl.program_id(0)])
    def observe():
        logits, visible = _logits(
            span, query, about, _chunk(keys, query.dtype), key_position, key_scales, biases,
            per_head=per_head, scale=scale, soft_cap=soft_cap,
        )  # fmt: skip
        weights = jnp.where(visible, jnp.exp(logits - softmax[:, :1]), 0) * (1 / softmax[:, 1:2])
        for out in outputs:
            # The content of a free slot must not matter.
            live = _column(jnp.where(key_position[...] >= 0, 1.0, 0.0)) > 0
            v = jnp.where(live, _chunk(values, query.dtype).astype(jnp.float32), 0)
            for ref in value_scales:
                v = v * jnp.where(live, _column(ref[...]), 0)
            squares = product(jnp.ones((8, v.shape[1]), jnp.float32), v * v, ((1,), (1,)))
            weights = squared_changes(weights, out[...], v, squares[:1])
        is_last, in_window = (about[:, i : i + 1] > 0 for i in (IS_LAST, IN_WINDOW))  # [per_head, 1]
        place = about[:, IN_WINDOW : IN_WINDOW + 1].astype(jnp.float32)

        before = count[:1, :1]
        here = jnp.sum(jnp.where(in_window, 1.0, 0.0), axis=0, keepdims=True)
        both = jnp.maximum(before + here, 1)
        group = jnp.zeros_like(weights[:per_head])
        for g in range(G):
            w = weights[g * per_head : (g + 1) * per_head]  # [per_head, slots]
            for name, term in terms(names, w, is_last, in_window, place).items():
                column = columns[name]
                column[g : g + 1, :] = with_term(name, column[g : g + 1, :], term, axis=0, keepdims=True)
            w = jnp.where(in_window, w, 0)
            group += w
            if "window_mean" in columns or "window_variance" in columns:  # merged block by block (Chan et al.)
                own = jnp.sum(w, axis=0, keepdims=True) / jnp.maximum(here, 1)
                squares = jnp.sum(jnp.where(in_window, (w - own) ** 2, 0), axis=0, keepdims=True)
                away = own - mean[g : g + 1, :]
                deviations[g : g + 1, :] += squares + away * away * (before * here / both)
                mean[g : g + 1, :] += away * (here / both)
        if "window_group_square" in columns:
            columns["window_group_square"][...] += jnp.sum((group / G) ** 2, axis=0, keepdims=True)
        count[...] = jnp.broadcast_to(before + here, count.shape)

    @pl.when(t == blocks - 1)
    def finish():
        others = count[:1, :1] - 1
        if "window_mean" in columns:
            columns["window_mean"][...] = mean[...]
        if "window_place" in columns:
            columns["window_place"][...] = columns["window_place"][...] / jnp.maximum(count[:1, :1], 1)
        if "window_variance" in columns:
            columns["window_variance"][...] = jnp.where(others > 0, deviations[...] / jnp.maximum(others, 1), 0)
