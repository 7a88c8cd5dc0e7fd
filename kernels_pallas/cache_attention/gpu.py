"""The kernels for GPU (Pallas' Triton route): attention with an online softmax, then its column statistics.

A tile has queries of all heads of a group, so that decode fills a tile of the matrix unit with a group's heads. Where
tiles and KV heads alone would leave the chip idle, the slots are split over programs too, and XLA combines their sums.
The statistics are a second kernel over the keys: a program keeps the tile of some slots, goes over the queries that
enter them, computes their weights again from each row's log-sum-exp, and stores one number per head and slot. For a
single query, as in decode, the first kernel returns its logits, 4 G bytes per slot, and the second combines the sums
and computes the statistics from the logits. A :class:`Storage` describes where a head's slots are: one after
another here, in pages for ``paged_attention``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from kernels_pallas.cache_attention.heads import span_of
from kernels_pallas.cache_attention.queries import (
    IN_WINDOW,
    IS_LAST,
    OF_GROUP,
    POSITION,
    UNSEEN,
    all_enter,
    by_group,
    by_head,
    first_entering,
    of_weights,
    squared_changes,
    start_of,
    told_apart,
)
from kernels_pallas.dispatch import compute_capability
from kernels_pallas.eight_bits import filler, unread, unread_on_gpu, widened
from kernels_pallas.prepare import Beside
from kernels_pallas.softmax import of_parts, product, scaled

PROGRAMS = 264  # two for each multiprocessor of an H100 or H200
FINISHED = 512  # slots of a program that combines the sums of a single query
_LEAST = UNSEEN / 10  # what a largest logit begins with, so that the exponential of an unseen one is 0
_LOG2_E = math.log2(math.e)
_TINY = float(jnp.finfo(jnp.float32).tiny)


class Storage(NamedTuple):
    """Locations of the keys and values of a head's slots; a program's first index is its head h."""

    slots: int  # of a head, S
    array: pl.BlockSpec  # of the keys, and of the values
    numbers: pl.BlockSpec  # of the positions, and of the other numbers of which there is one per slot
    where: tuple[pl.BlockSpec, ...]  # of the arrays that ``place`` and ``end`` take as ``where``
    place: Callable[..., tuple[tuple[Array, ...], Array]]  # (where, slots [n]) -> indices to read, and which ones exist
    loads: int = 1  # that wait for each other, before a key or value is here
    end: Callable[..., Array] | None = None  # (where) -> the slot after the head's last one; None where that is S


class _Tiles(NamedTuple):
    """The sizes of tiles and programs."""

    queries: int
    slots: int
    warps: int
    stages: int  # of a loop, see triton.CompilerParams

    @property
    def params(self) -> triton.CompilerParams:
        return triton.CompilerParams(num_warps=self.warps, num_stages=self.stages)


def _tiles(rows: int, width: int, dtype: Any, *, loads: int = 1, of_slots: bool = False) -> _Tiles:
    """Return the tiles of a number of queries, or of the statistics, which keep their slots and walk over queries."""
    queries = max(pl.next_power_of_2(rows), 16)
    if width > 128 or dtype.itemsize > 2:
        deep = queries < 64 and dtype.itemsize == 2 and not of_slots  # there is shared memory for two tiles to come
        return _Tiles(min(queries, 64), 64 if width <= 128 else 32, 4, 1 + (1 + deep) * loads)
    if of_slots:
        return _Tiles(min(queries, 64), 128, 8, 3)
    if queries < 128:
        return _Tiles(queries, 64, 4, 1 + 2 * loads)
    return _Tiles(128, 64 if width > 64 else 128, 8, 1 + 2 * loads)


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


def of_heads(query, about, window, key, value, key_position, *floats, **options):
    B, K, S, D = key.shape
    key, value = (x.reshape(B * K, S, D) for x in (key, value))
    numbers = [x.reshape(B * K, S) for x in (key_position, *floats)]
    storage = Storage(
        slots=S,
        array=pl.BlockSpec((None, S, D), lambda h, *_: (h, 0, 0)),
        numbers=pl.BlockSpec((None, S), lambda h, *_: (h, 0)),
        where=(),
        place=lambda _, slot: ((jnp.minimum(slot, S - 1),), slot < S),
    )
    return attend_heads(query, about, window, key, value, numbers, (), storage, name="cache", **options)


def attend_heads(
    query: Float[Array, "B K G T D"],
    about: Int[Array, "B T 3"],
    window: Int[Array, ""] | int | None,
    key: Array,
    value: Array,
    numbers: list[Array],
    where: tuple[Array, ...],
    storage: Storage,
    *,
    beside: Beside,
    names: tuple[str, ...],
    errors: bool,
    scale: float,
    soft_cap: float | None,
    sinks: Float[Array, "K G"] | None,
    interpret: bool,
    name: str,
) -> tuple[Array, ...]:
    """Run the kernels on keys and values in a storage, and return the output and the named statistics, by group.

    ``numbers`` are the slots' positions and then the floats ``beside`` keys and values, as the storage has them.
    """
    B, K, G, T, D = query.shape
    S, H, R = storage.slots, B * K, T * G
    query = query.transpose(0, 3, 1, 2, 4)  # as the caller has them, so that XLA copies nothing
    position, *floats = numbers
    key_scales, value_scales, biases = beside.split(floats)
    width = max(pl.next_power_of_2(D), 16)
    wide = jnp.dtype(jnp.float32) if errors else query.dtype
    tiles = _tiles(R, width, wide, loads=storage.loads)
    blocks, chunks = pl.cdiv(R, tiles.queries), pl.cdiv(S, tiles.slots)
    programs = max(PROGRAMS * 4 // tiles.warps // (H * blocks), 1)
    if storage.end is not None and T == 1:  # heads end anywhere: four times as many, that end sooner
        programs *= 4
    steps = max(pl.cdiv(chunks, programs), min(chunks, 4))
    splits = pl.cdiv(chunks, steps)
    whole = splits == 1 and T > 1 and not errors  # a program has all slots of its queries, and writes their outputs
    # Exponentials are powers of two, with ``unit`` times a logit as exponent. Logits that nothing bends or shifts
    # are scaled by it alone.
    folds = soft_cap is None and not biases and scale > 0
    unit = _LOG2_E * (scale if folds else 1)
    power = functools.partial(_power, unit, is_nvidia=not interpret and compute_capability() is not None)
    options = dict(storage=storage, width=width, scale=None if folds else scale, soft_cap=soft_cap)
    options |= dict(unit=unit, power=power, has_window=window is not None)

    def of_head(*shape, by=1):
        return pl.BlockSpec((None, *shape), lambda h, *_: (h // by, *(0 for _ in shape)))

    span = [] if window is None else [span_of(window)]
    starts = [] if sinks is None else [sinks]
    of_queries = pl.BlockSpec((None, T, None, G, D), lambda h, *_: (h // K, 0, h % K, 0, 0))
    finishes = T == 1 and not errors
    one_query = finishes and bool(names)  # its logits take no more memory than the statistics, which follow from them
    out, *softmax = pl.pallas_call(
        functools.partial(
            _attend,
            beside=beside,
            steps=steps,
            tiles=tiles,
            whole=whole,
            errors=errors,
            has_sinks=sinks is not None,
            **options,
        ),
        out_shape=[
            *(
                [
                    jax.ShapeDtypeStruct(query.shape, query.dtype),
                    jax.ShapeDtypeStruct((H, G, T), jnp.float32),
                ]
                if whole
                else [
                    jax.ShapeDtypeStruct((H, splits, R, D), jnp.float32),
                    *[jax.ShapeDtypeStruct((H, splits, R), jnp.float32)] * 2,
                ]
            ),
            *[jax.ShapeDtypeStruct((H, R, S), jnp.float32)] * one_query,
        ],
        grid=(H, blocks, splits),
        in_specs=[
            of_queries,
            of_head(T, by=K),
            storage.array,
            storage.array,
            storage.numbers,
            *storage.where,
            *[storage.numbers] * len(floats),
            *[pl.BlockSpec((1,), lambda *_: (0,))] * len(span),
            *[pl.BlockSpec((None, G), lambda h, *_: (h % K, 0))] * len(starts),
        ],
        out_specs=[
            *(
                [of_queries, of_head(G, T)]
                if whole
                else [
                    pl.BlockSpec((None, None, R, D), lambda h, r, s: (h, s, 0, 0)),
                    *[pl.BlockSpec((None, None, R), lambda h, r, s: (h, s, 0))] * 2,
                ]
            ),
            *[of_head(R, S)] * one_query,
        ],
        compiler_params=tiles.params,
        interpret=interpret,
        name=f"{name}_attention",
    )(query, about[:, :, POSITION], key, value, position, *where, *floats, *span, *starts)
    if finishes:
        asked = tuple(dict.fromkeys(told_apart(name) for name in names))
        sizes = [1 if name == OF_GROUP else G for name in asked]
        size = min(FINISHED, max(pl.next_power_of_2(S), 16))
        out, *columns = pl.pallas_call(
            functools.partial(_finish, storage=storage, names=asked, unit=unit, size=size, width=width),
            out_shape=[
                jax.ShapeDtypeStruct((H, R, D), query.dtype),
                *[jax.ShapeDtypeStruct((H, h, S), jnp.float32) for h in sizes],
            ],
            grid=(H, pl.cdiv(S, size) if names else R),
            in_specs=[
                of_head(splits, R, D),
                *[of_head(splits, R)] * 2,
                *[of_head(R, S)] * one_query,
                *storage.where,
            ],
            out_specs=[of_head(R, D), *[of_head(h, S) for h in sizes]],
            compiler_params=triton.CompilerParams(num_warps=4),
            interpret=interpret,
            name=f"{name}_combined",
        )(out, *softmax, *where)
        found = {name: column.reshape(B, K, -1, S) for name, column in zip(asked, columns, strict=True)}
        return (out.reshape(B, K, G, T, D), *(found[told_apart(name)] for name in names))
    if whole:
        (norm,) = softmax
    else:
        peak, total = softmax
        largest = jnp.max(peak, axis=1).reshape(H, T, G).swapaxes(1, 2)
        out, peak, total = of_parts(out, peak * (unit / _LOG2_E), total)
        peak, total = (x.reshape(H, T, G).swapaxes(1, 2) for x in (_LOG2_E * peak, total))
        norm = peak + jnp.log2(total)
        out = out.reshape(B, K, T, G, D).swapaxes(1, 2)
    result = out.astype(query.dtype).transpose(0, 2, 3, 1, 4)
    if not names:
        return (result,)
    tiles = _tiles(T, width, wide, of_slots=True)
    beside = beside._replace(value_scale=beside.value_scale and errors)
    used = (*key_scales, *(value_scales if errors else ()), *biases)
    own = about[:, :, POSITION]
    reach = _reach(own, span[0] if span else None)
    described = jnp.stack([reach, own, *(about[:, :, i] for i in (IS_LAST, IN_WINDOW))], axis=1)
    by_slot: dict[str, Array] = {}
    for some in (tuple(name for name in names if name != OF_GROUP), tuple(name for name in names if name == OF_GROUP)):
        if not some:
            continue
        heads = 1 if some == (OF_GROUP,) else G
        first = [] if all_enter(some) else [first_entering(about, some)]
        columns = pl.pallas_call(
            functools.partial(_reduce, names=some, beside=beside, errors=errors, tiles=tiles, **options),
            out_shape=[jax.ShapeDtypeStruct((H, heads, S), jnp.float32)] * len(some),
            grid=(H, pl.cdiv(S, tiles.slots)),
            in_specs=[
                of_queries,
                of_head(4, T, by=K),
                of_head(G, T),
                storage.array,
                storage.numbers,
                *[of_queries, storage.array, of_head(G, T), of_head(G, T)][: 4 * errors],
                *storage.where,
                *[storage.numbers] * len(used),
                *[pl.BlockSpec((1,), lambda h, *_: (h // K,))] * len(first),
            ],
            out_specs=[of_head(heads, S)] * len(some),
            compiler_params=tiles.params,
            interpret=interpret,
            name=f"{name}_statistics",
        )(
            query, described, norm, key, position, *((out, value, largest, total) if errors else ()),
            *where, *used, *first,
        )  # fmt: skip
        by_slot |= dict(zip(some, columns, strict=True))
    return (result, *(by_slot[name].reshape(B, K, -1, S) for name in names))


def _split(refs, first, second):
    """Split references into the first ones, the next ones, and the others."""
    return refs[:first], refs[first : first + second], refs[first + second :]


def _load(ref, index, there, width):
    """Load the vectors at n places, [n, width]; 0 beyond the ends."""
    column = jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
    at = ref.at[*(i[:, None] for i in index), column]
    masks = [] if there is None else [there[:, None]]
    masks += [column < ref.shape[-1]] * (width > ref.shape[-1])
    if not masks:
        return triton.load(at)
    return triton.load(at, mask=functools.reduce(jnp.logical_and, masks), other=filler(ref.dtype))


def _reach(own, span):
    """Return how many positions each query sees back from its own; none where it is padding."""
    return jnp.where(own < 0, 0, own + 1 if span is None else jnp.minimum(own, span - 1) + 1)


def _sees(own, reach, position):
    """Return a mask of the slots that queries see, by one comparison; ``own`` is None where there is no window.

    It is of the age, or without a window of the position. As unsigned, a negative one is beyond any reach: that of a
    free slot, whose position is -1, or an age below 0.
    """
    return (position if own is None else own - position).astype(jnp.uint32) < reach.astype(jnp.uint32)


def _bent(logits, of_keys, added, scale, soft_cap):
    """Apply the keys' scales, scale, cap and biases, of numbers that are shaped to fit; a scale of None waits."""
    for of_slot in of_keys:
        logits = logits * of_slot
    if scale is not None:
        logits = scaled(logits, scale, soft_cap)
    for of_slot in added:
        logits = logits + of_slot
    return logits


def _power(unit, logits, shift, *, is_nvidia):
    """Compute ``2 ** (unit * logits - shift)``; the shift is broadcast.

    On NVIDIA's GPUs it is two instructions. Of ``jnp.exp2`` Triton makes seven, for the sake of results below 1e-38.
    """
    if not is_nvidia:
        return jnp.exp2(unit * logits - shift)
    number = "0f" + np.float32(unit).tobytes()[::-1].hex()
    code = f"{{ .reg .f32 e; fma.rn.f32 e, $1, {number}, $2; ex2.approx.ftz.f32 $0, e; }}"
    (found,) = triton.elementwise_inline_asm(
        code,
        args=[logits, jnp.broadcast_to(-shift, logits.shape)],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(logits.shape, jnp.float32)],
    )
    return found


def _attend(
    query, own_positions, key, value, positions, *refs,
    storage, beside, errors, whole, steps, tiles, width, scale, soft_cap, unit, power, has_window, has_sinks,
):  # fmt: skip
    where, floats, refs = _split(refs, len(storage.where), sum(beside))
    key_scales, value_scales, biases = beside.split(floats)
    span, sinks, (out, *refs) = _split(refs, int(has_window), int(has_sinks))
    like = jnp.promote_types(query.dtype, jnp.bfloat16)  # the range of float16 is too small for weights times scales
    (T, G, D), S = query.shape, storage.slots
    row = pl.program_id(1) * tiles.queries + jax.lax.broadcasted_iota(jnp.int32, (tiles.queries,), 0)
    t, g, in_block = row // G, row % G, row < T * G
    q = _load(query, (t, g), in_block, width)
    own = triton.load(own_positions.at[t], mask=in_block, other=-1)
    reach = _reach(own, span[0][0] if span else None)
    first = pl.program_id(2) * steps
    if storage.end is not None:
        steps = jnp.clip(pl.cdiv(storage.end(where), tiles.slots) - first, 0, steps)

    start = [jnp.full((tiles.queries,), number, jnp.float32) for number in (_LEAST, 0)]
    for ref in sinks:  # the first of the programs of some queries begins with their sink: a token of no value
        begins, sink = pl.program_id(2) == 0, start_of(triton.load(ref.at[g])) * (_LOG2_E / unit)
        start = [jnp.where(begins, sink, start[0]), jnp.where(begins, 1.0, start[1])]

    def walk(masks):
        """Go over the slots; with ``masks`` the values of free ones do not matter, whatever they are."""

        def step(i, carry):
            peak, total, acc = carry
            slot = (first + i) * tiles.slots + jax.lax.broadcasted_iota(jnp.int32, (tiles.slots,), 0)
            index, there = storage.place(where, slot)
            position = triton.load(positions.at[index], mask=there, other=-1)
            k = widened(_load(key, index, None, width), q.dtype)
            of_keys, added = ([triton.load(x.at[index])[None, :] for x in of] for of in (key_scales, biases))
            logits = _bent(product(q, k, ((1,), (1,))), of_keys, added, scale, soft_cap)
            logits = jnp.where(_sees(own[:, None] if span else None, reach[:, None], position[None, :]), logits, UNSEEN)
            if T == 1 and not errors:
                for ref in refs[2:]:
                    triton.store(ref.at[row[:, None], slot[None, :]], logits, mask=in_block[:, None] & (slot < S)[None])
            now = jnp.maximum(peak, jnp.max(logits, axis=1))
            exact = jnp.exp2(unit * (logits - now[:, None]))  # 1 at the largest logit
            weights = exact if errors else power(logits, (unit * now)[:, None])
            shrink = jnp.exp2(unit * (peak - now))
            total = shrink * total + jnp.sum(weights, axis=1)
            v = widened(_load(value, index, None, width), like)
            if masks:
                v = jnp.where((position >= 0)[:, None], v, 0)
            if errors:  # small differences of outputs
                v = v.astype(jnp.float32)
            for ref in value_scales:
                weights = weights * jnp.where(position >= 0, triton.load(ref.at[index]), 0.0)[None, :]
            acc = shrink[:, None] * acc + product(weights.astype(v.dtype), v, ((1,), (0,)))
            return now, total, acc

        return jax.lax.fori_loop(0, steps, step, (*start, jnp.zeros((tiles.queries, width), jnp.float32)))

    peak, total, acc = walk(masks=False)
    if jnp.issubdtype(value.dtype, jnp.floating):
        # 0 * NaN is NaN. A free slot seldom holds one, so it is looked for in the sums, and they are computed again.
        finite = jnp.min(jnp.where(jnp.abs(acc) < jnp.inf, 1, 0)) > 0
        acc = jax.lax.cond(finite, lambda: acc, lambda: walk(masks=True)[2])
    column = jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
    mask = in_block[:, None] & (column < D)
    if whole:
        total = jnp.maximum(total, _TINY)
        triton.store(out.at[t[:, None], g[:, None], column], (acc / total[:, None]).astype(out.dtype), mask=mask)
        triton.store(refs[0].at[g, t], unit * peak + jnp.log2(total), mask=in_block)
        return
    triton.store(out.at[row[:, None], column], acc, mask=mask)
    for ref, number in zip(refs, (peak, total), strict=False):
        triton.store(ref.at[row], number, mask=in_block)


def _finish(accs, peaks, totals, *refs, storage, names, unit, size, width):
    """Combine the parts' sums of a single query; compute the statistics of some slots from their logits."""
    logits, where, (out, *columns) = _split(refs, int(bool(names)), len(storage.where))
    (splits, R, D), S = accs.shape, storage.slots
    split = jax.lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(splits), 1), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
    program, programs = pl.program_id(1), pl.num_programs(1)

    def softmax(row):  # [1, queries] -> each part's share [splits, queries], the whole's peak and sum [1, queries]
        there = (split < splits) & (row < R)
        peak = triton.load(peaks.at[split, row], mask=there, other=_LEAST)
        whole = jnp.max(peak, axis=0, keepdims=True)
        share = jnp.exp2(unit * (peak - whole))
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
    row, norm = (jnp.reshape(x, (-1, 1)) for x in (row, unit * peak + jnp.log2(total)))
    slot = program * size + jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
    live = slot < (S if storage.end is None else storage.end(where))  # behind the end no logits were written
    x = triton.load(logits[0].at[row, slot], mask=(row < R) & live, other=UNSEEN)
    weights = jnp.exp2(unit * x - norm)
    for ref, found in zip(columns, of_weights(names, weights, R), strict=True):
        of_heads = row if len(found) == len(row) else jnp.zeros((1, 1), jnp.int32)
        triton.store(ref.at[of_heads, slot], found, mask=(of_heads < ref.shape[0]) & (slot < S))


def _reduce(
    query, about, norms, key, positions, *refs,
    storage, names, beside, errors, tiles, width, scale, soft_cap, unit, power, has_window,
):  # fmt: skip
    """Compute the statistics of some slots: go over the heads, and over each one's queries that enter them."""
    of_errors, where, refs = _split(refs, 4 * errors, len(storage.where))
    floats, first, columns = _split(refs, sum(beside), len(refs) - sum(beside) - len(names))
    key_scales, value_scales, biases = beside.split(floats)
    (T, G, _), S = query.shape, storage.slots
    slot = pl.program_id(1) * tiles.slots + jax.lax.broadcasted_iota(jnp.int32, (tiles.slots,), 0)
    index, there = storage.place(where, slot)
    k = widened(_load(key, index, None, width), query.dtype)
    of_keys, added = ([triton.load(x.at[index])[:, None] for x in of] for of in (key_scales, biases))
    position = triton.load(positions.at[index], mask=there, other=-1)
    if errors:  # the content of a free slot must not matter
        v = jnp.where((position >= 0)[:, None], _load(of_errors[1], index, None, width).astype(jnp.float32), 0.0)
        for ref in value_scales:
            v = v * jnp.where(position >= 0, triton.load(ref.at[index]), 0.0)[:, None]
    zero = jnp.zeros((tiles.slots,), jnp.float32)
    of_group = names == (OF_GROUP,)
    group = jnp.zeros((tiles.slots, tiles.queries), jnp.float32)
    start, add, finish = by_group(G, group, zero) if of_group else by_head(names, zero)
    first = first[0][0] // tiles.queries if first else 0
    walks = pl.cdiv(T, tiles.queries) - first  # tiles of each head's queries

    def step(j, carry):
        i, g = jax.lax.div(j, jnp.int32(G if of_group else walks)), jax.lax.rem(j, jnp.int32(G if of_group else walks))
        i, g = (i, g) if of_group else (g, i)
        carry = carry if of_group else jax.tree.map(lambda x, x0: jnp.where(i == 0, x0, x), carry, start)
        t = (first + i) * tiles.queries + jax.lax.broadcasted_iota(jnp.int32, (tiles.queries,), 0)
        head, in_block = jnp.full_like(t, g), None if T % tiles.queries == 0 else t < T
        reach, own, is_last, nth = (
            triton.load(about.at[jnp.full_like(t, i), t], mask=in_block, other=None if in_block is None else 0)[None, :]
            for i in range(4)
        )
        norm = triton.load(norms.at[head, t], mask=in_block, other=None if in_block is None else 0.0)[None, :]
        logits = product(k, _load(query, (t, head), in_block, width), ((1,), (1,)))
        logits = _bent(logits, of_keys, added, scale, soft_cap)
        visible = _sees(own if has_window else None, reach, position[:, None])
        weights = power(logits, norm)
        if errors:  # where a slot has nearly all of the weight, what is left of it counts
            peak, total = (
                triton.load(ref.at[head, t], mask=in_block, other=None if in_block is None else 1.0)[None, :]
                for ref in of_errors[2:]
            )
            power_of = jnp.exp2(unit * (jnp.where(visible, logits, UNSEEN) - peak))
            # A slot with more than half of the weight is the largest, though this sum rounds otherwise than the peak's.
            weights = jnp.where(power_of > 0.5 * total, 1.0, power_of) / total
        weights = jnp.where(visible, weights, 0.0)
        if errors:
            out = _load(of_errors[0], (t, head), in_block, width)
            weights = squared_changes(weights.T, out, v, jnp.sum(v * v, axis=1)[None, :]).T
        here = jnp.sum(jnp.where(nth > 0, 1.0, 0.0))
        carry = add(carry, weights, is_last > 0, nth, here, g)

        @pl.when(j == G * walks - 1 if of_group else i == walks - 1)
        def _():
            for name, ref in zip(names, columns, strict=True):
                of_head = jnp.zeros_like(slot) if of_group else jnp.full_like(slot, g)
                triton.store(ref.at[of_head, slot], finish(carry)[name], mask=slot < S)

        return carry

    count = G * walks
    if storage.end is not None:
        held = storage.end(where) - pl.program_id(1) * tiles.slots
        count *= jnp.clip(held, 0, 1)

        @pl.when(held <= 0)
        def _():
            for ref in columns:
                for g in range(ref.shape[0]):
                    triton.store(ref.at[jnp.full_like(slot, g), slot], zero, mask=slot < S)

    jax.lax.fori_loop(0, count, step, start)
