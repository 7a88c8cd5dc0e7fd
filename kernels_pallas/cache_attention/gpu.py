"""The kernels for GPU (Pallas' Triton route): attention with an online softmax, then its column statistics.

A tile has queries of all heads of a group, so that decode fills a tile of the matrix unit with a group's heads. Where
tiles and KV heads alone would leave the chip idle, the slots are split over programs too, and XLA combines their sums.
The statistics are a second kernel over the keys: a program keeps a few slots, goes over the queries that enter them,
computes their weights again from each row's largest logit and sum, and stores one number per head and slot. For a
single query, as in decode, the first kernel returns its logits, 4 G bytes per slot, and the second combines the sums
and computes the statistics from the logits. A :class:`Storage` describes where a head's slots are: one after
another here, in pages for ``paged_attention``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from kernels_pallas.cache_attention.queries import (
    IN_WINDOW,
    IS_LAST,
    POSITION,
    UNSEEN,
    first_entering,
    of_weights,
    squared_changes,
    terms,
    with_term,
)
from kernels_pallas.eight_bits import filler, unread, unread_on_gpu, widened
from kernels_pallas.prepare import Beside
from kernels_pallas.softmax import of_parts, product, scaled

PROGRAMS = 264  # two for each multiprocessor of an H100 or H200
FINISHED = 512  # slots of a program that combines the sums of a single query
_TINY = float(jnp.finfo(jnp.float32).tiny)


class Storage(NamedTuple):
    """Locations of the keys and values of a head's slots; a program's first index is its head h."""

    array: pl.BlockSpec  # of the keys, and of the values
    where: tuple[pl.BlockSpec, ...]  # of the arrays that ``load`` and ``end`` take as ``where``
    load: Callable[..., Array]  # (ref, where, slots [n], width) -> [n, width]
    end: Callable[..., Array] | None = None  # (where) -> the slot after the head's last one; None where that is S


def unsupported(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> str | None:
    """Return why the kernels can't run with these arguments, or None."""
    return beyond(query, key, value, key.shape[1])


def beyond(query: Any, key: Any, value: Any, kv_heads: int) -> str | None:
    """Return why the kernels can't run with these arguments, whatever the storage, or None."""
    reason = unread(("float32", "bfloat16", "float16"), {"queries": query}, {"keys": key, "values": value})
    if reason is not None or (reason := unread_on_gpu(key, value)) is not None:
        return reason
    if query.shape[3] > 256:
        return f"the head dim is {query.shape[3]}, but the kernels take up to 256"
    if query.shape[2] // kv_heads > 32:
        return f"{query.shape[2] // kv_heads} query heads share a KV head, but the kernels take up to 32"
    return None


def of_heads(query, about, span, key, value, key_position, *floats, **options):
    B, K, S, D = key.shape
    key, value = (x.reshape(B * K, S, D) for x in (key, value))
    storage = Storage(
        array=pl.BlockSpec((None, S, D), lambda h, *_: (h, 0, 0)),
        where=(),
        load=lambda ref, _, slot, width: _load(ref, slot, width),
    )
    return attend_heads(query, about, span, key, value, key_position, floats, (), storage, name="cache", **options)


def attend_heads(
    query: Float[Array, "B K G T D"],
    about: Int[Array, "B T 3"],
    span: Int[Array, "1"],
    key: Array,
    value: Array,
    key_position: Int[Array, "B K S"],
    floats: tuple[Float[Array, "B K S"], ...],
    where: tuple[Array, ...],
    storage: Storage,
    *,
    beside: Beside,
    names: tuple[str, ...],
    errors: bool,
    scale: float,
    soft_cap: float | None,
    interpret: bool,
    name: str,
) -> tuple[Array, ...]:
    """Run the kernels on keys and values in a storage, and return the output and the named statistics, by group."""
    B, K, G, T, D = query.shape
    S, H, R = key_position.shape[2], B * K, T * G
    query, key_position = query.swapaxes(2, 3).reshape(H, R, D), key_position.reshape(H, S)
    floats = tuple(x.reshape(H, S) for x in floats)
    key_scales, value_scales, biases = beside.split(floats)
    width = max(pl.next_power_of_2(D), 16)
    slots = 64 if width <= 128 else 32
    queries = min(max(pl.next_power_of_2(R), 16), 64)
    blocks = pl.cdiv(R, queries)
    splits = min(pl.cdiv(PROGRAMS, H * blocks), pl.cdiv(S, 4 * slots))
    steps = pl.cdiv(pl.cdiv(S, slots), splits)
    params = triton.CompilerParams(num_warps=4, num_stages=2)
    options = dict(G=G, slots=slots, width=width, scale=scale, soft_cap=soft_cap)

    def of_head(*shape, by=1):
        return pl.BlockSpec((None, *shape), lambda h, *_: (h // by, *(0 for _ in shape)))

    scalar = pl.BlockSpec((1,), lambda *_: (0,))
    slot_specs = [storage.array, of_head(S)]
    finishes = T == 1 and not errors
    one_query = finishes and bool(names)  # its logits take no more memory than the statistics, which follow from them
    acc, peak, total, *logits = pl.pallas_call(
        functools.partial(_attend, storage, beside=beside, steps=steps, queries=queries, errors=errors, **options),
        out_shape=[
            jax.ShapeDtypeStruct((H, splits, R, D), jnp.float32),
            *[jax.ShapeDtypeStruct((H, splits, R), jnp.float32)] * 2,
            *[jax.ShapeDtypeStruct((H, R, S), jnp.float32)] * one_query,
        ],
        grid=(H, blocks, splits),
        in_specs=[
            scalar,
            of_head(R, D),
            of_head(T, 3, by=K),
            *slot_specs,
            storage.array,
            *storage.where,
            *[of_head(S)] * len(floats),
        ],
        out_specs=[
            pl.BlockSpec((None, None, R, D), lambda h, r, s: (h, s, 0, 0)),
            *[pl.BlockSpec((None, None, R), lambda h, r, s: (h, s, 0))] * 2,
            *[of_head(R, S)] * one_query,
        ],
        compiler_params=params,
        interpret=interpret,
        name=f"{name}_attention",
    )(span, query, about, key, key_position, value, *where, *floats)
    heads = [1 if name == "window_group_square" else G for name in names]
    if finishes:
        size = min(FINISHED, max(pl.next_power_of_2(S), 16))
        out, *columns = pl.pallas_call(
            functools.partial(_finish, names=names, size=size, width=width),
            out_shape=[
                jax.ShapeDtypeStruct((H, R, D), query.dtype),
                *[jax.ShapeDtypeStruct((H, h, S), jnp.float32) for h in heads],
            ],
            grid=(H, pl.cdiv(S, size) if names else R),
            in_specs=[
                of_head(T, 3, by=K),
                of_head(S),
                of_head(splits, R, D),
                *[of_head(splits, R)] * 2,
                *[of_head(R, S)] * one_query,
            ],
            out_specs=[of_head(R, D), *[of_head(h, S) for h in heads]],
            compiler_params=triton.CompilerParams(num_warps=4),
            interpret=interpret,
            name=f"{name}_combined",
        )(about, key_position, acc, peak, total, *logits)
        return (out.reshape(B, K, G, T, D), *(column.reshape(B, K, -1, S) for column in columns))
    outputs, whole_peak, whole_total = of_parts(acc, peak, total)
    out = outputs.astype(query.dtype).reshape(B, K, T, G, D).swapaxes(2, 3)
    if not names:
        return (out,)
    queries = min(max(pl.next_power_of_2(T), 16), 64)
    of_errors = (outputs, value) if errors else ()
    beside = beside._replace(value_scale=beside.value_scale and errors)
    used = (*key_scales, *(value_scales if errors else ()), *biases)
    columns = pl.pallas_call(
        functools.partial(_reduce, storage, names=names, beside=beside, errors=errors, queries=queries, **options),
        out_shape=[jax.ShapeDtypeStruct((H, h, S), jnp.float32) for h in heads],
        grid=(H, pl.cdiv(S, slots)),
        in_specs=[
            scalar,
            pl.BlockSpec((1,), lambda h, *_: (h // K,)),
            of_head(R, D),
            of_head(T, 3, by=K),
            *slot_specs,
            *[of_head(R)] * 2,
            *[of_head(R, D), storage.array][: len(of_errors)],
            *storage.where,
            *[of_head(S)] * len(used),
        ],
        out_specs=[of_head(h, S) for h in heads],
        compiler_params=params,
        interpret=interpret,
        name=f"{name}_statistics",
    )(
        span, first_entering(about, names), query, about, key, key_position, whole_peak, whole_total,
        *of_errors, *where, *used,
    )  # fmt: skip
    return (out, *(column.reshape(B, K, -1, S) for column in columns))


def _split(refs, first, second):
    """Split references into the first ones, the next ones, and the others."""
    return refs[:first], refs[first : first + second], refs[first + second :]


def _load(ref, row, width):
    """Load some of n vectors, [n, D], as [len(row), width], 0 beyond the ends."""
    column = jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
    there = (row < ref.shape[0])[:, None] & (column < ref.shape[1])
    return triton.load(ref.at[row[:, None], column], mask=there, other=filler(ref.dtype))


def _sees(span, own, position):
    """Return a mask of the slots that each query sees, [queries, slots]."""
    age = own[:, None] - position[None, :]
    return (position >= 0)[None, :] & (own >= 0)[:, None] & (age >= 0) & (age < span[0])


def _floats_of(arrays, slot):
    """Load the floats of slots from each array; 0 beyond the end."""
    return [triton.load(ref.at[slot], mask=slot < ref.shape[0], other=0.0) for ref in arrays]


def _attend(
    storage, span, query, about, key, key_position, value, *refs,
    beside, errors, G, steps, queries, slots, width, scale, soft_cap,
):  # fmt: skip
    where, floats, refs = _split(refs, len(storage.where), sum(beside))
    key_scales, value_scales, biases = beside.split(floats)
    out, peaks, totals, *logits_out = refs
    like = jnp.promote_types(query.dtype, jnp.bfloat16)  # the range of float16 is too small for weights times scales
    (R, D), S = query.shape, key_position.shape[0]
    row = pl.program_id(1) * queries + jax.lax.broadcasted_iota(jnp.int32, (queries,), 0)
    q = _load(query, row, width)
    own = triton.load(about.at[row // G, jnp.full_like(row, POSITION)], mask=row < R, other=-1)
    # Programs take chunks in turn, so that they have equal shares of the slots before the end, wherever it is.
    first, splits = pl.program_id(2), pl.num_programs(2)
    if storage.end is not None:
        steps = pl.cdiv(jnp.maximum(pl.cdiv(storage.end(where), slots) - first, 0), splits)

    def step(i, carry):
        peak, total, acc = carry
        slot = (first + i * splits) * slots + jax.lax.broadcasted_iota(jnp.int32, (slots,), 0)
        position = triton.load(key_position.at[slot], mask=slot < S, other=-1)
        visible = _sees(span, own, position)
        k = widened(storage.load(key, where, slot, width), q.dtype)
        logits = product(q, k, ((1,), (1,)))
        for of_slot in _floats_of(key_scales, slot):
            logits = logits * of_slot[None, :]
        logits = scaled(logits, scale, soft_cap)
        for of_slot in _floats_of(biases, slot):
            logits = logits + of_slot[None, :]
        logits = jnp.where(visible, logits, UNSEEN)
        for ref in logits_out:
            there = (row < R)[:, None] & (slot < S)[None, :]
            triton.store(ref.at[row[:, None], slot[None, :]], logits, mask=there)
        now = jnp.maximum(peak, jnp.max(logits, axis=1))
        weights = jnp.where(visible, jnp.exp(logits - now[:, None]), 0.0)
        # The content of a free slot must not matter, and 0 * NaN is NaN.
        v = jnp.where((position >= 0)[:, None], widened(storage.load(value, where, slot, width), like), 0)
        if errors:  # small differences of outputs
            v = v.astype(jnp.float32)
        shrink, total = jnp.exp(peak - now), jnp.exp(peak - now) * total + jnp.sum(weights, axis=1)
        for of_slot in _floats_of(value_scales, slot):
            weights = jnp.where(visible, weights * of_slot[None, :], 0.0)
        acc = shrink[:, None] * acc + product(weights.astype(v.dtype), v, ((1,), (0,)))
        return now, total, acc

    start = jnp.full((queries,), UNSEEN, jnp.float32), jnp.zeros((queries,), jnp.float32)
    peak, total, acc = jax.lax.fori_loop(0, steps, step, (*start, jnp.zeros((queries, width), jnp.float32)))
    column = jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
    triton.store(out.at[row[:, None], column], acc, mask=(row < R)[:, None] & (column < D))
    triton.store(peaks.at[row], peak, mask=row < R)
    triton.store(totals.at[row], total, mask=row < R)


def _finish(about, key_position, accs, peaks, totals, *refs, names, size, width):
    """Combine the splits' sums of a single query; compute the statistics of some slots from their logits."""
    logits, (out, *columns) = refs[: bool(names)], refs[bool(names) :]
    (splits, R, D), S = accs.shape, key_position.shape[0]
    split = jax.lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(splits), 1), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
    program, programs = pl.program_id(1), pl.num_programs(1)

    def softmax(row):  # [1, queries] -> each split's share [splits, queries], the whole's peak and sum [1, queries]
        there = (split < splits) & (row < R)
        peak = triton.load(peaks.at[split, row], mask=there, other=UNSEEN)
        whole = jnp.max(peak, axis=0, keepdims=True)
        share = jnp.exp(peak - whole)
        total = share * triton.load(totals.at[split, row], mask=there, other=0.0)
        return share, whole, jnp.maximum(jnp.sum(total, axis=0, keepdims=True), _TINY)

    def row_of(i, _):
        row = jnp.full((1, 1), program + i * programs)
        share, _, total = softmax(row)
        there = (split < splits) & (row < R) & (column < D)
        acc = triton.load(accs.at[split, row, column], mask=there, other=0.0)
        acc = jnp.sum(share * acc, axis=0, keepdims=True) / total
        triton.store(out.at[row, column], acc.astype(out.dtype), mask=(row < R) & (column < D))
        return 0

    jax.lax.fori_loop(0, pl.cdiv(R, programs), row_of, 0)
    if not names:
        return
    row = jax.lax.broadcasted_iota(jnp.int32, (1, pl.next_power_of_2(R)), 1)
    _, peak, total = softmax(row)
    row, peak, total = (jnp.reshape(x, (-1, 1)) for x in (row, peak, total))
    slot = program * size + jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
    live = triton.load(key_position.at[slot], mask=slot < S, other=-1) >= 0  # the logits of others may be unwritten
    x = triton.load(logits[0].at[row, slot], mask=(row < R) & (slot < S), other=UNSEEN)
    weights = jnp.where(live & (x > UNSEEN), jnp.exp(x - peak), 0.0) / total
    is_last, in_window = (jnp.full((1, 1), about[0, what] > 0) for what in (IS_LAST, IN_WINDOW))
    for ref, found in zip(columns, of_weights(names, weights, is_last, in_window, R), strict=True):
        of_heads = row if len(found) == len(row) else jnp.zeros((1, 1), jnp.int32)
        triton.store(ref.at[of_heads, slot], found, mask=(of_heads < ref.shape[0]) & (slot < S))


def _reduce(
    storage, span, first_query, query, about, key, key_position, peaks, totals, *refs,
    names, beside, errors, G, slots, queries, width, scale, soft_cap,
):  # fmt: skip
    of_errors, where, refs = _split(refs, 2 * errors, len(storage.where))
    floats, refs = refs[: sum(beside)], refs[sum(beside) :]
    key_scales, value_scales, biases = beside.split(floats)
    T, S = about.shape[0], key_position.shape[0]
    slot = pl.program_id(1) * slots + jax.lax.broadcasted_iota(jnp.int32, (slots,), 0)
    k = widened(storage.load(key, where, slot, width), query.dtype)
    of_keys, added = _floats_of(key_scales, slot), _floats_of(biases, slot)
    position = triton.load(key_position.at[slot], mask=slot < S, other=-1)
    if errors:  # the content of a free slot must not matter
        v = storage.load(of_errors[1], where, slot, width).astype(jnp.float32)
        v = jnp.where((position >= 0)[:, None], v, 0.0)
        for of_slot in _floats_of(value_scales, slot):
            v = v * jnp.where(position >= 0, of_slot, 0.0)[:, None]
    merges = "window_mean" in names or "window_variance" in names
    zero = jnp.zeros((slots,), jnp.float32)

    def step(i, carry):
        sums, means, deviations, before = carry
        sums, means, deviations = {name: list(sums[name]) for name in sums}, list(means), list(deviations)
        t = i * queries + jax.lax.broadcasted_iota(jnp.int32, (queries,), 0)
        own, is_last, in_window = (
            triton.load(about.at[t, jnp.full_like(t, what)], mask=t < T, other=-1)
            for what in (POSITION, IS_LAST, IN_WINDOW)
        )
        place = in_window.astype(jnp.float32)[:, None]
        is_last, in_window = (is_last > 0)[:, None], (in_window > 0)[:, None]
        visible = _sees(span, own, position)
        here = jnp.sum(jnp.where(in_window, 1.0, 0.0))
        both = jnp.maximum(before + here, 1.0)
        group = jnp.zeros((queries, slots), jnp.float32)
        for g in range(G):
            row = t * G + g
            peak = triton.load(peaks.at[row], mask=t < T, other=0.0)
            total = triton.load(totals.at[row], mask=t < T, other=1.0)
            logits = product(_load(query, row, width), k, ((1,), (1,)))
            for of_slot in of_keys:
                logits = logits * of_slot[None, :]
            logits = scaled(logits, scale, soft_cap)
            for of_slot in added:
                logits = logits + of_slot[None, :]
            w = jnp.where(visible, jnp.exp(jnp.where(visible, logits - peak[:, None], 0.0)) / total[:, None], 0.0)
            if errors:
                w = squared_changes(w, _load(of_errors[0], row, width), v, jnp.sum(v * v, axis=1)[None, :])
            for name, term in terms(plain, w, is_last, in_window, place).items():
                sums[name][g] = with_term(name, sums[name][g], term, axis=0)
            w = jnp.where(in_window, w, 0.0)
            group += w
            if merges:  # block by block (Chan et al.)
                mean = jnp.sum(w, axis=0) / jnp.maximum(here, 1.0)
                squares = jnp.sum(jnp.where(in_window, (w - mean[None, :]) ** 2, 0.0), axis=0)
                away = mean - means[g]
                deviations[g] += squares + away * away * (before * here / both)
                means[g] += away * (here / both)
        if "window_group_square" in sums:
            sums["window_group_square"][0] += jnp.sum((group / G) ** 2, axis=0)
        return {name: tuple(sums[name]) for name in sums}, tuple(means), tuple(deviations), before + here

    plain = [name for name in names if name not in ("window_mean", "window_variance")]
    start = {name: (zero,) * (1 if name == "window_group_square" else G) for name in plain}
    merged = (zero,) * (G if merges else 0)
    blocks = pl.cdiv(T, queries)
    if storage.end is not None:
        blocks = jnp.where(pl.program_id(1) * slots < storage.end(where), blocks, 0)
    first = first_query[0] // queries
    columns, means, deviations, seen = jax.lax.fori_loop(first, blocks, step, (start, merged, merged, jnp.float32(0)))
    if "window_place" in columns:
        columns["window_place"] = [x / jnp.maximum(seen, 1.0) for x in columns["window_place"]]
    columns["window_mean"] = means
    columns["window_variance"] = [jnp.where(seen > 1, x / jnp.maximum(seen - 1, 1.0), 0.0) for x in deviations]
    for name, ref in zip(names, refs, strict=True):
        for g, column in enumerate(columns[name]):
            triton.store(ref.at[jnp.full_like(slot, g), slot], column, mask=slot < S)
