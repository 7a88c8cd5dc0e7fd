"""The kernels for GPU (Pallas' Triton route), one per step:

    1. each program sums its slots' part of the outputs, with its heaviest token apart
    2. each program adds up the head's outputs X, at most `PARTS`, and measures its slots' distances |X - v|
    3. each program computes its slots' scores from them, and in decode, where one token leaves, finds its worst slot
    4. in decode the worst of those is freed; for blocks one program per head selects with the head's scores in its
       registers, and beyond `SELECTED` slots XLA does

V is read twice. Both products, of weights and V and of X and V, are those of the matrix unit, and exact: a float32 is
the sum of three bfloat16. Neither needs to know which values are finite, as one that is not spoils the sum, which is
then computed again with care. |X - v|^2 is |X|^2 - 2 X v + |v|^2, unless that is so small beside its terms that it
would be lost in rounding: then the tile's differences are summed. Shapes are powers of two, with masks, as Triton
needs them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from kernels_pallas.caote_topk.reference import Norm
from kernels_pallas.caote_topk.slots import is_protected, position_of, remaining
from kernels_pallas.eight_bits import EIGHT_BITS, filler, unread, unread_on_gpu, widened
from kernels_pallas.softmax import product
from kernels_pallas.topk import LOWEST, count_true, nth_largest, rank

ELEMENTS = 8192  # of a tile of values
PROGRAMS = 264  # two for each multiprocessor of an H100 or H200; four take 1.2 times as long
PARTS = 16  # of a head at most, for every program of step 2 reads them all
SLOTS = 1024  # of a program in steps 3 and 4, in decode
SELECTED = 32768
NEAR = 1 / 128  # of its terms; a smaller square of a distance has lost more than 7 of 24 bits
_EPS = float(jnp.finfo(jnp.float32).eps)
_LARGEST = float(jnp.finfo(jnp.float32).max)
_HIGHEST = 2**31 - 1  # beyond every rank and position


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

    ``output`` is the weighted sum of the values of all tokens but the heaviest. For FastCAOTE it is the sum of the
    values, in one row, and nothing reads ``heaviest``.
    """

    output: Float[Array, "parts heads D"]
    heaviest: Float[Array, "parts heads D"]
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


def of_heads(weights, value, slot, budget, *scales, fast, excess, with_scores, interpret):
    B, K, G, S = weights.shape
    H, D = B * K, value.shape[3]
    weights, value, slot = weights.reshape(H, G, S), value.reshape(H, S, D), slot.reshape(H, S)
    scales = tuple(x.reshape(H, S) for x in scales)  # of values of eight bits
    width = max(pl.next_power_of_2(D), 16)  # the matrix unit takes no less
    rows = min(max(ELEMENTS // width, 16), max(pl.next_power_of_2(S), 16))
    span = pl.cdiv(pl.cdiv(S, min(pl.cdiv(PROGRAMS, H), PARTS)), rows) * rows
    programs, chunks = pl.cdiv(S, span), pl.cdiv(S, SLOTS)
    heads, one = 1 if fast else G, excess == 1

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((H, *shape), dtype)

    def of_head(*shape):
        return pl.BlockSpec((None, *shape), lambda h, *_: (h, *(0 for _ in shape)))

    def of_program(*shape):
        return pl.BlockSpec((None, None, *shape), lambda h, p: (h, p, *(0 for _ in shape)))

    def call(kernel, name, grid, in_specs, out_specs, out_shape, num_warps=4, **options):
        params = triton.CompilerParams(num_warps=num_warps, num_stages=3)
        kernel = functools.partial(kernel, **options)
        return pl.pallas_call(
            kernel, out_shape, grid=grid, in_specs=in_specs, out_specs=out_specs, compiler_params=params, name=name,
            interpret=interpret,
        )  # fmt: skip

    of_budget = pl.BlockSpec((1,), lambda h, *_: (h // K,))
    of_slots, of_weights, of_values, of_scales = of_head(S), of_head(G, S), of_head(S, D), [of_head(S)] * len(scales)
    shapes = [(heads, width), (heads, width), (G,), (G,), (G,), ()]  # of a _Part
    dtypes = [jnp.float32] * 4 + [jnp.int32, jnp.float32]
    options = dict(scales=len(scales), rows=rows, span=span, fast=fast)
    parts = call(
        _sum_up, "caote_outputs", (H, programs), [of_weights, of_slots, of_values, *of_scales],
        [of_program(*shape) for shape in shapes],
        [array(programs, *shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)],
        **options,
    )(weights, slot, value, *scales)  # fmt: skip
    squares, *heaviest = call(
        _measure, "caote_distances", (H, programs),
        [of_values, *[of_head(programs, *shape) for shape in shapes], *of_scales],
        [of_head(heads, S), *[of_head(G)] * 3],
        [array(heads, S), array(G), array(G), array(G, dtype=jnp.int32)],
        **options,
    )(value, *parts, *scales)  # fmt: skip
    writes = with_scores or not one
    *scores, ranks, positions, slots, live = call(
        _score, "caote_scores", (H, chunks), [of_weights, of_slots, of_head(heads, S), *[of_head(G)] * 3],
        [*[of_slots] * writes, *[of_program()] * len(_Worst._fields)],
        [*[array(S)] * writes, *[array(chunks, dtype=jnp.int32)] * len(_Worst._fields)],
        fast=fast,
    )(weights, slot, squares, *heaviest)  # fmt: skip
    if one:
        (kept,) = call(
            _free_worst, "caote_select", (H, chunks), [of_budget, of_slots, *[of_head(chunks)] * len(_Worst._fields)],
            [of_slots], [array(S, dtype=jnp.int32)],
        )(budget, slot, ranks, positions, slots, live)  # fmt: skip
    elif S > SELECTED:
        kept = remaining(scores[0], slot, jnp.repeat(budget, K)[:, None], excess)
    else:
        size = pl.next_power_of_2(max(S, 128))
        (kept,) = call(
            _select, "caote_select", (H,), [of_budget, of_slots, of_slots], [of_slots], [array(S, dtype=jnp.int32)],
            num_warps=4 if size <= 4096 else 8 if size <= 16384 else 16, size=size,
        )(budget, scores[0], slot)  # fmt: skip
    return (kept.reshape(B, K, S), *[x.reshape(B, K, S) for x in scores[:with_scores]])


def _sum_up(weights, slot, value, *refs, scales, rows, span, fast):
    scales, part = refs[:scales], cast(Any, _Part(*refs[scales:]))
    (G, S), D, (heads, width) = weights.shape, value.shape[1], part.output.shape
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

    none = jnp.zeros((size,), jnp.float32), jnp.full((size,), _HIGHEST, jnp.int32)
    weight, which = jnp.zeros_like(head, jnp.float32), jnp.full_like(head, -1)
    for g, (most, number) in enumerate(jax.lax.fori_loop(0, pl.cdiv(span, size), heavier, (none,) * G)):
        heaviest = jnp.max(most)
        number = jnp.min(jnp.where(most == heaviest, number, _HIGHEST))
        weight, which = jnp.where(head == g, heaviest, weight), jnp.where(head == g, number, which)
    which = jnp.where(which == _HIGHEST, -1, which)

    def add(careful, k, sums):
        output, rest, count = sums
        number = first + k * rows + jax.lax.broadcasted_iota(jnp.int32, (rows,), 0)
        live = triton.load(slot.at[number], mask=number < end, other=-1) >= 0
        there = (head < G)[:, None] & (number < end)[None, :]
        a = triton.load(weights.at[head[:, None], number[None, :]], mask=there, other=0.0)
        v, scale = _load(value, number, column), _scale(scales, number)
        if careful:
            live &= (jnp.max(jnp.where(jnp.abs(a) < jnp.inf, 0, 1), axis=0) == 0) & _finite(v, scale)
            a, v = jnp.where(live[None, :], a, 0.0), jnp.where(live[:, None], v, jnp.zeros_like(v))
            scale = [jnp.where(live, x, 0.0) for x in scale]
        others = jnp.where(number[None, :] == which[:, None], 0.0, a)
        factor = jnp.where((head == 0)[:, None] & live[None, :], 1.0, 0.0) if fast else others
        for x in scale:
            factor *= x[None, :]
        return output + _product(_thirds(factor, v), v, 0), rest + others, count + jnp.where(live, 1.0, 0.0)

    def summed(careful):
        start = (jnp.zeros((len(head), n), jnp.float32) for n in (width, rows))
        return jax.lax.fori_loop(0, span // rows, functools.partial(add, careful), (*start, jnp.zeros((rows,))))

    sums = summed(False)
    spoilt = sum(_some(~(jnp.abs(x) < jnp.inf)) for x in sums[:2])
    output, rest, count = jax.lax.cond(spoilt > 0, lambda: summed(True), lambda: sums)

    there = (which >= 0)[:, None] & (column < D)
    number = jnp.maximum(which, 0)
    v = triton.load(value.at[number[:, None], column], mask=there, other=filler(value.dtype))
    scale = [triton.load(ref.at[number]) for ref in scales]
    # A heaviest token whose value is not finite counts nowhere. No other has more than half, and so must be apart.
    counts = (which >= 0) & _finite(v, scale)
    heaviest = v.astype(jnp.float32)
    for x in scale:
        heaviest *= x[:, None]
    rows_of = (head < heads)[:, None] & (column < width)
    triton.store(part.output.at[head[:, None], column], output, mask=rows_of)
    triton.store(part.heaviest.at[head[:, None], column], jnp.where(counts[:, None], heaviest, 0.0), mask=rows_of)
    triton.store(part.weight.at[head], jnp.where(counts, weight, 0.0), mask=head < G)
    triton.store(part.rest.at[head], jnp.sum(rest, axis=1), mask=head < G)
    triton.store(part.slot.at[head], jnp.where(counts, which, -1), mask=head < G)
    part.tokens[...] = jnp.sum(count)


def _measure(value, *refs, scales, rows, span, fast):
    parts, refs = cast(Any, _Part(*refs[:6])), refs[6:]
    scales, (squares, change, rest, slot) = refs[:scales], refs[scales:]
    (programs, heads, width), G, (S, D) = parts.output.shape, change.shape[0], value.shape
    head, row = _heads(heads), jax.lax.broadcasted_iota(jnp.int32, (width,), 0)
    column, first = row[None, :], pl.program_id(1) * span
    part = jax.lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(programs),), 0)

    def load(ref, g, other=0.0):
        return triton.load(ref.at[part, jnp.full_like(part, g)], mask=part < programs, other=other)

    def load_rows(ref, g):
        place = ref.at[part[:, None], jnp.full_like(part, g)[:, None], column]
        return triton.load(place, mask=(part < programs)[:, None] & (column < width), other=0.0)

    def point_of(g):
        output = jnp.sum(load_rows(parts.output, g), axis=0)
        if fast:
            count = triton.load(parts.tokens.at[part], mask=part < programs, other=0.0)
            return output / jnp.maximum(jnp.sum(count), 1)
        return output + jnp.sum(load(parts.weight, g)[:, None] * load_rows(parts.heaviest, g), axis=0)

    @pl.when(pl.program_id(1) == 0)
    def _apart():
        for g in range(G):
            weight = load(parts.weight, g)
            most = jnp.max(weight)
            is_first = part == jnp.min(jnp.where(weight == most, part, len(part)))
            lighter = jnp.where(is_first, 0.0, weight)
            remains = jnp.sum(load(parts.rest, g) + lighter)
            rest[g], slot[g] = remains, jnp.max(jnp.where(is_first, load(parts.slot, g, -1), -1))
            if not fast:
                heavy = load_rows(parts.heaviest, g)
                others = jnp.sum(load_rows(parts.output, g) + lighter[:, None] * heavy, axis=0)
                heavy = jnp.sum(jnp.where(is_first[:, None], heavy, 0.0), axis=0)
                away = others / jnp.where(remains > 0, remains, 1.0) - heavy
                change[g] = most * jnp.sqrt(jnp.sum(away * away))

    points = jnp.zeros((len(head), width), jnp.float32)
    for g in range(heads):
        points = jnp.where((head == g)[:, None], point_of(g)[None, :], points)
    squared, thirds = jnp.sum(points * points, axis=1), _thirds(points, value)

    def measure(k, _):
        number = first + k * rows + jax.lax.broadcasted_iota(jnp.int32, (rows,), 0)
        v, scale = _load(value, number, column), _scale(scales, number)
        wide = v.astype(jnp.float32)
        products, own = _product(thirds, v, 1), jnp.sum(wide * wide, axis=1)
        for x in scale:
            products, own = products * x[None, :], own * (x * x)
        terms = squared[:, None] + own[None, :]
        square = terms - 2 * products
        unsure = _some(~((square >= NEAR * terms) & (square < jnp.inf)))

        @pl.when(unsure == 0)
        def _as_it_is():
            place = squares.at[head[:, None], number[None, :]]
            triton.store(place, square, mask=(head < heads)[:, None] & (number < S)[None, :])

        @pl.when(unsure > 0)
        def _with_care():
            tile = v.astype(jnp.float32)
            for x in scale:
                tile *= x[:, None]
            tile = jnp.where(jnp.abs(tile) < jnp.inf, tile, jnp.nan)  # told from one whose square overflows

            def of_head(g, _):
                away = jnp.where(column < D, point_of(g)[None, :] - tile, 0.0)
                place = squares.at[jnp.full_like(number, g), number]
                triton.store(place, jnp.sum(away * away, axis=1), mask=number < S)

            jax.lax.fori_loop(0, heads, of_head, None)

    jax.lax.fori_loop(0, span // rows, measure, None)


def _score(weights, slot, squares, change, rest, heaviest, *refs, fast):
    (G, S), size = weights.shape, SLOTS
    scores, worst = refs[: len(refs) - len(_Worst._fields)], refs[len(refs) - len(_Worst._fields) :]
    number = pl.program_id(1) * size + jax.lax.broadcasted_iota(jnp.int32, (size,), 0)
    there = number < S
    packed = triton.load(slot.at[number], mask=there, other=-1)
    a = [triton.load(weights.at[g, number], mask=there, other=0.0) for g in range(G)]
    length = [jnp.sqrt(triton.load(squares.at[g, number], mask=there, other=0.0)) for g in range(squares.shape[0])]
    counts = (packed >= 0) & (length[0] == length[0])  # NaN marks values that are not finite
    for x in a:
        counts &= jnp.abs(x) < jnp.inf
    changes, holds_all = [], jnp.zeros((size,), jnp.bool_)
    for g, x in enumerate(a):
        x, others, is_most = jnp.where(counts, x, 0.0), rest[g], number == heaviest[g]
        dominant = is_most & (x > 0.5)
        remains = jnp.where(others > 0, others, 1.0)
        own = x / jnp.where(dominant, remains, jnp.maximum(1 - x, _EPS)) * length[0 if fast else g]
        changes.append(own if fast else jnp.where(dominant, change[g], own))
        holds_all |= (x >= 1) | (is_most & (x > 0) & (others == 0))
    largest = functools.reduce(jnp.maximum, changes)
    scale = jnp.where(largest > 0, largest, 1.0)  # so that squares of small changes do not underflow
    result = largest if G == 1 else scale * jnp.sqrt(sum((x / scale) ** 2 for x in changes))
    result = jnp.where(counts, jnp.where(holds_all, _LARGEST, result), -jnp.inf)
    result = jnp.where(is_protected(packed), jnp.inf, result)
    for ref in scores:
        triton.store(ref.at[number], result, mask=there)
    for ref, x in zip(worst, _worst_of(result, packed, number), strict=True):
        ref[...] = x


def _worst_of(scores: Array, packed: Array, number: Array) -> _Worst:
    """Return the worst of some slots, of which ``number`` are the numbers."""
    live = packed >= 0
    ranks = jnp.where(live, rank(scores, live), _HIGHEST)
    lowest = jnp.min(ranks)
    ages = jnp.where(live & (ranks == lowest), position_of(packed), _HIGHEST)
    oldest = jnp.min(ages)
    slot = jnp.max(jnp.where(live & (ranks == lowest) & (ages == oldest), number, -1))
    return _Worst(lowest, oldest, slot, jnp.sum(live.astype(jnp.int32)))


def _free_worst(budget, slot, ranks, positions, slots, live, kept):
    programs, S = ranks.shape[0], slot.shape[0]
    part = jax.lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(programs),), 0)

    def load(ref, other):
        return triton.load(ref.at[part], mask=part < programs, other=other)

    rank, position = load(ranks, _HIGHEST), load(positions, _HIGHEST)
    position = jnp.where(rank == jnp.min(rank), position, _HIGHEST)
    worst = jnp.max(jnp.where(position == jnp.min(position), load(slots, -1), -1))
    worst = jnp.where(jnp.sum(load(live, 0)) > budget[0], worst, -1)
    number = pl.program_id(1) * SLOTS + jax.lax.broadcasted_iota(jnp.int32, (SLOTS,), 0)
    held = position_of(triton.load(slot.at[number], mask=number < S, other=-1))
    triton.store(kept.at[number], jnp.where(number == worst, -1, held), mask=number < S)


def _select(budget, scores, slot, kept, *, size):
    S = slot.shape[0]
    number = jax.lax.broadcasted_iota(jnp.int32, (size,), 0)
    score = triton.load(scores.at[number], mask=number < S, other=-jnp.inf)
    packed = triton.load(slot.at[number], mask=number < S, other=-1)
    position, live, left = position_of(packed), packed >= 0, budget[...]
    ranks = rank(score, live)

    def largest(x, n):
        return nth_largest(x, n, count_true, lambda x: x)

    threshold = largest(ranks, left)
    above, tied = ranks > threshold, (ranks == threshold) & live
    left -= count_true(above)
    age = jnp.where(tied, position, LOWEST)
    # As a rule all that tie stay; then the second bisection, over their ages, is left out.
    oldest = jax.lax.cond(
        jnp.sum(tied) > jnp.sum(left), lambda: largest(age, left), lambda: jnp.full_like(left, LOWEST)
    )
    triton.store(kept.at[number], jnp.where(above | (tied & (age >= oldest)), position, -1), mask=number < S)


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
