"""The kernels for GPU (Pallas' Triton route), one per step:

    1. each program sums its slots' part of the outputs, with its heaviest token apart
    2. each program adds up the head's outputs X, at most `PARTS`, and scores its slots by their distances |X - v|; in
       decode, where one token leaves, it finds its worst slot
    3. in decode the worst of those is freed; for blocks `keep_topk` selects by the scores, or XLA where it can't

V is read twice. Both products, of weights and V and of V and X, are those of the matrix unit, and exact: a float32 is
the sum of three bfloat16. Neither needs to know which values are finite, as one that is not spoils the sum, which is
then computed again with care. |X - v|^2 is |X|^2 - 2 X v + |v|^2, unless that is so small beside its terms that it
would be lost in rounding: such slots are measured again at the end, by their differences. Weights are divided by their
sum only where a slot is scored; until then a power of two keeps them near 1. Shapes are powers of two, with masks, as
Triton needs them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from kernels_pallas.caote_topk.reference import Ends, Norm
from kernels_pallas.caote_topk.slots import is_protected, position_of, remaining, with_ends
from kernels_pallas.eight_bits import EIGHT_BITS, filler, unread, unread_on_gpu, widened
from kernels_pallas.keep_topk import gpu as selection
from kernels_pallas.softmax import product
from kernels_pallas.topk import HIGHEST, rank

ELEMENTS = 8192  # of a tile of values
PROGRAMS = 264, 396  # of steps 1 and 2: as many as an H100 or H200 runs at once, two or three on a multiprocessor
PARTS = 16, 32  # of a head at most; every program of step 2 reads those of step 1
BUFFERS = 4  # of tiles of values; all but two are on their way
SLOTS = 1024  # of a program in step 3, in decode
CAREFUL = 16  # slots that are measured again at a time, in few registers
NEAR = 1 / 128  # of its terms; a smaller square of a distance has lost more than 7 of 24 bits
_EPS = float(jnp.finfo(jnp.float32).eps)
_LARGEST = float(jnp.finfo(jnp.float32).max)
_SMALL = 2.0**-100  # divided by it, the smallest float has a square


def unsupported(weights: Any, value: Any, *_: Any, norm: Norm, **__: Any) -> str | None:
    """Return why the kernels can't run with these arguments, or None."""
    if norm != 2:
        return f"norm is {norm!r}, but the kernels measure with norm 2 only"
    reason = unread(("float32", "bfloat16", "float16"), {"weights": weights}, {"values": value})
    if reason is not None or (reason := unread_on_gpu(value)) is not None:
        return reason
    if value.shape[-1] > 512:
        return f"the head dim is {value.shape[-1]}, but the kernels take up to 512"
    if weights.shape[2] > 32:
        return f"{weights.shape[2]} query heads share the values, but the kernels take up to 32"
    return None


class _Part(NamedTuple):
    """Sums over the slots of one program, for each of a head's programs: float32 but for ``slot``.

    Weights are multiplied by a power of two, which brings the heaviest near 1. ``point`` is the weighted sum of the
    values, ``others`` that of all tokens but the heaviest. For FastCAOTE ``point`` is the sum of the values, in one
    row, and nothing reads ``others`` and ``heaviest``.
    """

    point: Float[Array, "parts heads D"]
    others: Float[Array, "parts heads D"]
    heaviest: Float[Array, "parts heads D"]
    peak: Float[Array, "parts G"]  # the heaviest weight as it came, which decides by what all are multiplied
    weight: Float[Array, "parts G"]  # of the heaviest
    rest: Float[Array, "parts G"]  # of all others
    slot: Int[Array, "parts G"]  # of the heaviest, -1 for none
    tokens: Float[Array, "parts"]  # their number


class _Worst(NamedTuple):
    """The live slot of lowest rank among some slots, of equal ranks the oldest, and how many of them are live."""

    rank: Int[Array, ""]
    position: Int[Array, ""]
    slot: Int[Array, ""]
    live: Int[Array, ""]


def of_heads(weights, value, slot, budget, *scales, fast, excess, with_scores, interpret, ends=None):
    B, K, G, S = weights.shape
    H, D = B * K, value.shape[3]
    weights, value, slot = weights.reshape(H, G, S), value.reshape(H, S, D), slot.reshape(H, S)
    scales = tuple(x.reshape(H, S) for x in scales)  # of values of eight bits
    width = max(pl.next_power_of_2(D), 16)  # the matrix unit takes no less
    rows = min(max(ELEMENTS // width, 16), max(pl.next_power_of_2(S), 16))
    spans = [
        pl.cdiv(pl.cdiv(S, min(max(most // H, 1), parts)), rows) * rows
        for most, parts in zip(PROGRAMS, PARTS, strict=True)
    ]
    (parts, programs), chunks = (pl.cdiv(S, span) for span in spans), pl.cdiv(S, SLOTS)
    heads, one = 1 if fast else G, excess == 1

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((H, *shape), dtype)

    def of_head(*shape):
        return pl.BlockSpec((None, *shape), lambda h, *_: (h, *(0 for _ in shape)))

    def of_program(*shape):
        return pl.BlockSpec((None, None, *shape), lambda h, p: (h, p, *(0 for _ in shape)))

    def call(kernel, name, grid, in_specs, out_specs, out_shape, aliases=None, **options):
        params = triton.CompilerParams(num_warps=4, num_stages=BUFFERS)
        kernel = functools.partial(kernel, **options)
        return pl.pallas_call(
            kernel, out_shape, grid=grid, in_specs=in_specs, out_specs=out_specs, compiler_params=params, name=name,
            interpret=interpret, input_output_aliases=aliases or {},
        )  # fmt: skip

    of_budget = pl.BlockSpec((1,), lambda h, *_: (h // K,))
    of_slots, of_weights, of_values, of_scales = of_head(S), of_head(G, S), of_head(S, D), [of_head(S)] * len(scales)
    shapes = [(heads, width)] * 3 + [(G,)] * 4 + [()]  # of a _Part
    dtypes = [jnp.float32] * 6 + [jnp.int32, jnp.float32]
    options = dict(scales=len(scales), rows=rows, fast=fast)
    inputs = [of_weights, of_slots, of_values, *of_scales]
    sums = call(
        _sum_up, "caote_outputs", (H, parts), inputs, [of_program(*shape) for shape in shapes],
        [array(parts, *shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)],
        **options, span=spans[0],
    )(weights, slot, value, *scales)  # fmt: skip
    writes = with_scores or not one
    found = call(
        _score, "caote_scores", (H, programs),
        [*inputs, *[of_head(parts, *shape) for shape in shapes], *[of_budget] * len(ends or ())],
        [*[of_slots] * writes, *[of_program()] * (len(_Worst._fields) * one)],
        [*[array(S)] * writes, *[array(programs, dtype=jnp.int32)] * (len(_Worst._fields) * one)],
        **options, span=spans[1], one=one, ends=len(ends or ()),
    )(weights, slot, value, *scales, *sums, *(ends or ()))  # fmt: skip
    scores, worst = found[:writes], found[writes:]
    if one:
        (kept,) = call(
            _free_worst, "caote_select", (H, chunks), [of_budget, of_slots, *[of_head(programs)] * len(_Worst._fields)],
            [of_slots], [array(S, dtype=jnp.int32)], aliases={1: 0},
        )(budget, slot, *worst)  # fmt: skip
    elif selection.unsupported(scores[0], slot, excess=excess) is not None:
        kept = remaining(scores[0], slot, jnp.repeat(budget, K)[:, None], excess)
    else:
        given: Any = dict(heads=K, position_of=position_of, interpret=interpret)
        kept = selection.of_heads(scores[0], slot, budget, **given)
    return (kept.reshape(B, K, S), *[x.reshape(B, K, S) for x in scores[:with_scores]])


def _sum_up(weights, slot, value, *refs, scales, rows, span, fast):
    scales, part = refs[:scales], cast(Any, _Part(*refs[scales:]))
    (G, S), D, (heads, width) = weights.shape, value.shape[1], part.point.shape
    head, column = _heads(G), jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
    first = pl.program_id(1) * span
    end = jnp.minimum(first + span, S)
    size = min(max(4096 // pl.next_power_of_2(G), 128), pl.next_power_of_2(span))

    def heavier(k, found):
        number = first + k * size + jax.lax.broadcasted_iota(jnp.int32, (size,), 0)
        a = [triton.load(weights.at[g, number], mask=number < end, other=0.0) for g in range(G)]
        counts = triton.load(slot.at[number], mask=number < end, other=-1) >= 0
        for x in a:
            counts &= jnp.abs(x) < jnp.inf
        heavy = [counts & (x > most) for x, (most, _) in zip(a, found, strict=True)]
        return tuple(
            (jnp.where(h, x, most), jnp.where(h, number, which))
            for h, x, (most, which) in zip(heavy, a, found, strict=True)
        )

    none = jnp.zeros((size,), jnp.float32), jnp.full((size,), HIGHEST, jnp.int32)
    peak, which = jnp.zeros_like(head, jnp.float32), jnp.full_like(head, -1)
    for g, (most, number) in enumerate(jax.lax.fori_loop(0, pl.cdiv(span, size), heavier, (none,) * G)):
        heaviest = jnp.max(most)
        number = jnp.min(jnp.where(most == heaviest, number, HIGHEST))
        peak, which = jnp.where(head == g, heaviest, peak), jnp.where(head == g, number, which)
    which, unit = jnp.where(which == HIGHEST, -1, which), _unit(peak)

    def add(careful, k, sums):
        output, rest, count = sums
        number = first + k * rows + jax.lax.broadcasted_iota(jnp.int32, (rows,), 0)
        live = triton.load(slot.at[number], mask=number < end, other=-1) >= 0
        there = (head < G)[:, None] & (number < end)[None, :]
        a = triton.load(weights.at[head[:, None], number[None, :]], mask=there, other=0.0)
        v, scale = _load(value, number, column), _scale(scales, number)
        counts = live[None, :] & (number[None, :] != which[:, None])
        if careful:
            live &= (jnp.max(jnp.where(jnp.abs(a) < jnp.inf, 0, 1), axis=0) == 0) & _finite(v, scale)
            counts &= live[None, :]
            v, scale = jnp.where(live[:, None], v, jnp.zeros_like(v)), [jnp.where(live, x, 0.0) for x in scale]
        others = jnp.where(counts, a * unit[:, None], 0.0)
        factor = jnp.where((head == 0)[:, None] & live[None, :], 1.0, 0.0) if fast else others
        for x in scale:
            factor *= x[None, :]
        return output + _product(_thirds(factor, v), v, 0), rest + others, count + jnp.where(live, 1.0, 0.0)

    def summed(careful):
        start = (jnp.zeros((len(head), n), jnp.float32) for n in (width, rows))
        return jax.lax.fori_loop(0, span // rows, functools.partial(add, careful), (*start, jnp.zeros((rows,))))

    sums = summed(False)
    spoilt = sum(_some(~(jnp.abs(x) < jnp.inf)) for x in sums[:2])
    others, rest, count = jax.lax.cond(spoilt > 0, lambda: summed(True), lambda: sums)

    there = (which >= 0)[:, None] & (column < D)
    number = jnp.maximum(which, 0)
    v = triton.load(value.at[number[:, None], column], mask=there, other=filler(value.dtype))
    scale = [triton.load(ref.at[number]) for ref in scales]
    # A heaviest token whose value is not finite counts nowhere.
    counts = (which >= 0) & _finite(v, scale)
    heaviest = v.astype(jnp.float32)
    for x in scale:
        heaviest *= x[:, None]
    heaviest, weight = jnp.where(counts[:, None], heaviest, 0.0), jnp.where(counts, peak * unit, 0.0)
    point = others if fast else others + weight[:, None] * heaviest
    rows_of = (head < heads)[:, None] & (column < width)
    for ref, x in ((part.point, point), (part.others, others), (part.heaviest, heaviest)):
        triton.store(ref.at[head[:, None], column], x, mask=rows_of)
    of_weights = part.peak, part.weight, part.rest, part.slot
    for ref, x in zip(of_weights, (peak, weight, jnp.sum(rest, axis=1), jnp.where(counts, which, -1)), strict=True):
        triton.store(ref.at[head], x, mask=head < G)
    part.tokens[...] = jnp.sum(count)


def _score(weights, slot, value, *refs, scales, rows, span, fast, one, ends):
    scales, parts, refs = refs[:scales], cast(Any, _Part(*refs[scales : scales + 8])), refs[scales + 8 :]
    ends, refs = refs[:ends], refs[ends:]
    written, worst_of = refs[: len(refs) - 4 * one], refs[len(refs) - 4 * one :]
    (programs, _, width), (G, S), D = parts.point.shape, weights.shape, value.shape[1]
    exact = value.dtype in (jnp.bfloat16, *EIGHT_BITS)  # then X has three parts of 8 bits, beside rows of zeros
    copies, least = (4, 8) if exact else (1, 16)
    head = jax.lax.broadcasted_iota(jnp.int32, (max(pl.next_power_of_2(G), least),), 0)
    column, row = (jax.lax.broadcasted_iota(jnp.int32, (1, n), 1) for n in (width, rows))
    first, tiles = pl.program_id(1) * span, span // rows

    def load(ref, p, other=0.0):
        return triton.load(ref.at[p, head], mask=head < G, other=other)

    def load_rows(ref, p):
        there = (head < G)[:, None] & (column < width)
        return triton.load(ref.at[p, jnp.where(fast, 0, head)[:, None], column], mask=there, other=0.0)

    def larger(p, most):
        return jnp.maximum(most, load(parts.peak, p))

    unit = _unit(jax.lax.fori_loop(0, programs, larger, jnp.zeros(head.shape)))

    def join(p, found):
        point, most, rest, which, tokens = found
        factor = unit / _unit(load(parts.peak, p))
        weight = factor * load(parts.weight, p)
        heavier = weight > most
        point += load_rows(parts.point, p) * (1.0 if fast else factor[:, None])
        rest += factor * load(parts.rest, p) + jnp.where(heavier, most, weight)
        which = jnp.where(heavier, load(parts.slot, p, -1), which)
        return point, jnp.where(heavier, weight, most), rest, which, tokens + parts.tokens[p]

    zeros = jnp.zeros(head.shape)
    start = jnp.zeros((len(head), width)), zeros, zeros, jnp.full_like(head, -1), jnp.zeros(())
    point, most, rest, which, tokens = jax.lax.fori_loop(0, programs, join, start)
    total = jnp.where(most + rest > 0, most + rest, 1.0)
    point /= jnp.maximum(tokens, 1.0) if fast else total[:, None]
    dominates = most + most > total  # no other token does
    heavy = jnp.where(dominates, which, -1)
    remains = jnp.where(rest > 0, rest, 1.0)

    def without():
        def join(p, found):
            others, heaviest, most = found
            factor = unit / _unit(load(parts.peak, p))
            weight, own = factor * load(parts.weight, p), load_rows(parts.heaviest, p)
            heavier = (weight > most)[:, None]
            lighter = jnp.minimum(most, weight)[:, None] * jnp.where(heavier, heaviest, own)
            others += factor[:, None] * load_rows(parts.others, p) + lighter
            return others, jnp.where(heavier, own, heaviest), jnp.maximum(weight, most)

        start = (jnp.zeros((len(head), width)),) * 2
        others, heaviest, _ = jax.lax.fori_loop(0, programs, join, (*start, zeros))
        away = others / remains[:, None] - heaviest
        return most / total * jnp.sqrt(jnp.sum(away * away, axis=1))

    change = zeros
    if not fast:
        change = jax.lax.cond(jnp.max(jnp.where(dominates, 1, 0)) > 0, without, lambda: zeros)

    squared = jnp.sum(point * point, axis=1)
    columns = point
    if exact:
        columns = jnp.broadcast_to(point[None], (copies, *point.shape)).reshape(copies * len(head), width)
        copy = jax.lax.broadcasted_iota(jnp.int32, columns.shape, 0) // len(head)
        low, middle, high = _thirds(columns, value)
        columns = jnp.where(copy == 0, low, jnp.where(copy == 1, middle, high))
        columns = jnp.where(copy < 3, columns, jnp.zeros_like(columns))

    def score(a, number, square):
        """Return the scores of slots with these weights and squared distances, inf where one is not finite."""
        x = a * unit[None, :]
        dominant = number[:, None] == heavy[None, :]
        left = jnp.where(dominant, remains[None, :], jnp.maximum(total[None, :] - x, _EPS * total[None, :]))
        own = x / left * jnp.sqrt(square)
        sure = (square < jnp.inf) & (jnp.abs(a) < jnp.inf)
        if not fast:
            own, sure = jnp.where(dominant, change[None, :], own), sure | dominant
        own = jnp.where(sure, jnp.where(x >= total[None, :], _LARGEST, own), jnp.inf)
        largest = jnp.max(own, axis=1)
        inverse = 1 / jnp.maximum(largest, _SMALL)  # so that squares of small changes do not underflow
        scaled = own * inverse[:, None]
        result = largest if G == 1 else jnp.maximum(largest, _SMALL) * jnp.sqrt(jnp.sum(scaled * scaled, axis=1))
        return jnp.where(largest < _LARGEST, jnp.minimum(result, _LARGEST), largest)

    def of_slots(number):
        a = [triton.load(weights.at[g, number], mask=number < S, other=0.0) for g in range(G)]
        packed = triton.load(slot.at[number], mask=number < S, other=-1)
        return *a, with_ends(packed, Ends(*(jnp.broadcast_to(x[0], (1,)) for x in ends)) if ends else None)

    def tile_of(a, tile):
        """Spread weights over a tile; it starts from one that products have made, whose threads it then shares."""
        for g, x in enumerate(a):
            tile = jnp.where(head[None, :] == g, x[:, None], tile)
        return jnp.where(head[None, :] < G, tile, 0.0)

    def finish(result, packed, number, mask, worst):
        """Write the scores of those slots that the mask names, and compare them with the worst so far, one by one."""
        result = jnp.where((packed >= 0) & (result < jnp.inf), result, -jnp.inf)
        result = jnp.where(is_protected(packed), jnp.inf, result)
        for ref in written:
            triton.store(ref.at[number], result, mask=mask & (number < S))
        if not one:
            return worst
        lowest, position, which = worst
        live = packed >= 0
        ranks, age = jnp.where(live & mask, rank(result, live), HIGHEST), position_of(packed)
        worse = (ranks < lowest) | ((ranks == lowest) & (age < position))
        return jnp.where(worse, ranks, lowest), jnp.where(worse, age, position), jnp.where(worse, number, which)

    per = pl.cdiv(tiles, 31)  # tiles that share a bit of a row's flags

    def measure(k, found):
        (*a, packed), flags, live, *worst = found
        number = first + k * rows + jax.lax.broadcasted_iota(jnp.int32, (rows,), 0)
        coming = of_slots(number + rows)  # a turn ahead, as the compiler fetches the values alone early
        v, scale = _load(value, jnp.minimum(number, S - 1), column), _scale(scales, number)
        wide = v.astype(jnp.float32)
        own = jnp.sum(wide * wide, axis=1)
        products = product(widened(v, jnp.bfloat16) if exact else wide, columns, ((1,), (1,)))
        products = jnp.sum(products.reshape(rows, copies, len(head)), axis=1) if exact else products
        for x in scale:
            products, own = products * x[:, None], own * (x * x)
        terms = squared[None, :] + own[:, None]
        square = terms - 2 * products
        result = score(tile_of(a, square), number, jnp.where(square >= NEAR * terms, square, jnp.nan))
        sure = (result < jnp.inf) | (packed < 0)
        worst = finish(result, packed, number, sure, worst)
        flags |= jnp.where(sure, 0, jnp.left_shift(1, k // per))
        return coming, flags, live + jnp.where(packed >= 0, 1, 0), *worst

    def nothing(n):
        none = jnp.full((n,), HIGHEST, jnp.int32)
        return (none, none, jnp.full((n,), -1, jnp.int32)) if one else ()

    zero = jnp.zeros((rows,), jnp.int32)
    start = of_slots(first + jax.lax.broadcasted_iota(jnp.int32, (rows,), 0)), zero, zero, *nothing(rows)
    _, flags, live, *worst = jax.lax.fori_loop(0, tiles, measure, start)

    def again(k, worst):
        flagged = jnp.right_shift(flags, k // per) & 1

        def with_care(j, worst):
            place = j * CAREFUL + jax.lax.broadcasted_iota(jnp.int32, (CAREFUL,), 0)
            unsure = jnp.max(jnp.where(row == place[:, None], flagged[None, :], 0), axis=1) > 0
            number = first + k * rows + place
            v, scale = _load(value, jnp.minimum(number, S - 1), column), _scale(scales, number)
            tile = v.astype(jnp.float32)
            for x in scale:
                tile *= x[:, None]
            tile = jnp.where(jnp.abs(tile) < jnp.inf, tile, jnp.nan)  # told from one whose square overflows

            def of_head(g, square):
                own = jnp.sum(jnp.where(head[:, None] == g, point, 0.0), axis=0)
                away = jnp.where(column < D, own[None, :] - tile, 0.0)
                away = jnp.sum(away * away, axis=1)
                away = jnp.where(away > _LARGEST, _LARGEST, away)
                return jnp.where(head[None, :] == g, away[:, None], square)

            square = jax.lax.fori_loop(0, G, of_head, jnp.zeros((CAREFUL, len(head))))
            *a, packed = of_slots(number)
            return finish(score(tile_of(a, square), number, square), packed, number, unsure, worst)

        def each():
            return jax.lax.fori_loop(0, rows // CAREFUL, with_care, worst)

        return jax.lax.cond(jnp.max(flagged) > 0, each, lambda: worst)

    def afresh():
        return jax.lax.fori_loop(0, tiles, again, nothing(CAREFUL))

    careful = jax.lax.cond(jnp.max(flags) > 0, afresh, lambda: nothing(CAREFUL))
    if one:
        some, others = _worst_of(*worst), _worst_of(*careful)
        takes = (others[0] < some[0]) | ((others[0] == some[0]) & (others[1] < some[1]))
        found = [jnp.where(takes, x, y) for x, y in zip(others, some, strict=True)]
        for ref, x in zip(worst_of, (*found, jnp.sum(live)), strict=True):
            ref[...] = x


def _unit(most: Float[Array, "heads"]) -> Float[Array, "heads"]:
    """Return the power of two that brings positive numbers into [1, 2), or as near as float32 allows."""
    bits = jax.lax.bitcast_convert_type(most, jnp.int32) & 0x7F800000
    return jax.lax.bitcast_convert_type(jnp.maximum(0x7F000000 - bits, 0x00800000), jnp.float32)


def _worst_of(ranks: Array, positions: Array, numbers: Array) -> tuple[Array, Array, Array]:
    """Return the lowest rank of some slots, the oldest position among equal ones, and that slot's number."""
    lowest = jnp.min(ranks)
    ages = jnp.where(ranks == lowest, positions, HIGHEST)
    oldest = jnp.min(ages)
    return lowest, oldest, jnp.max(jnp.where((ranks == lowest) & (ages == oldest), numbers, -1))


def _free_worst(budget, slot, ranks, positions, slots, live, kept):
    programs, S = ranks.shape[0], slot.shape[0]
    part = jax.lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(programs),), 0)

    def load(ref, other):
        return triton.load(ref.at[part], mask=part < programs, other=other)

    rank, position = load(ranks, HIGHEST), load(positions, HIGHEST)
    position = jnp.where(rank == jnp.min(rank), position, HIGHEST)
    worst = jnp.max(jnp.where(position == jnp.min(position), load(slots, -1), -1))
    worst = jnp.where(jnp.sum(load(live, 0)) > budget[0], worst, -1)
    number = pl.program_id(1) * SLOTS + jax.lax.broadcasted_iota(jnp.int32, (SLOTS,), 0)
    held = position_of(triton.load(slot.at[number], mask=number < S, other=-1))
    triton.store(kept.at[number], jnp.where(number == worst, -1, held), mask=number < S)


def _heads(heads: int) -> Int[Array, "heads"]:
    """Return the numbers of heads, as many as the rows of a tile for the matrix unit."""
    return jax.lax.broadcasted_iota(jnp.int32, (max(pl.next_power_of_2(heads), 16),), 0)


def _some(mask: Array) -> Int[Array, ""]:
    """Return 1 if some entry of a matrix is True, else 0."""
    return jnp.max(jnp.max(jnp.where(mask, 1, 0), axis=1))


def _thirds(x: Float[Array, "heads n"], like: Any) -> list[Array]:
    """Return numbers that sum to x, whose products with values like these the matrix unit computes exactly."""
    if like.dtype not in (jnp.bfloat16, *EIGHT_BITS):
        return [x]
    parts = []
    for _ in range(3):
        parts.append(x.astype(jnp.bfloat16))
        x -= parts[-1].astype(jnp.float32)
    return parts[::-1]  # the smallest first


def _product(thirds: list[Array], v: Array, axis: int) -> Array:
    """Multiply a matrix in parts by an axis of a tile of values, in float32."""
    v = widened(v, jnp.bfloat16)
    v = v if len(thirds) > 1 else v.astype(jnp.float32)
    return functools.reduce(jnp.add, [product(x, v, ((1,), (axis,))) for x in thirds])


def _finite(v: Array, scale: list[Array]) -> Array:
    """Return which rows of values, times their scale, are finite."""
    most = jnp.max(jnp.abs(v.astype(jnp.float32)), axis=1)
    for x in scale:
        most *= jnp.abs(x)
    return most < jnp.inf


def _scale(scales: Any, number: Array) -> list[Array]:
    """Load the scales of some slots, if there are any."""
    return [triton.load(ref.at[number], mask=number < ref.shape[0], other=0.0) for ref in scales]


def _load(value: Any, number: Array, column: Array) -> Array:
    """Load the values of some slots, [rows, width]."""
    there = (number < value.shape[0])[:, None] & (column < value.shape[1])
    return triton.load(value.at[number[:, None], column], mask=there, other=filler(value.dtype))
