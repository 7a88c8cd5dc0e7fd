"""The kernels for GPU (Pallas' Triton route), one per step:

    1. each program sums its slots' part of the outputs, with its heaviest token apart
    2. each program adds up the head's outputs, at most `PARTS`, and measures how far its slots' values lie from them
    3. one program per head computes the scores from these distances, and frees the slots of lowest score; beyond
       `SELECTED` slots it only writes the scores, and XLA selects, unless one token leaves

V is read twice; step 3 reads 8 bytes per slot and query head. Inside a loop nothing is summed across threads but, in
step 2, along a value: a sum across a program's warps waits for all of them. Tiles have as few rows as they can, so that
a thread loads the weights of its own rows and no layout is converted. Shapes are powers of two, with masks, as Triton
needs them. Sums are in float32 and not on the matrix unit, which two or four query heads would leave almost idle.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from kernels_pallas.caote_topk.reference import Norm
from kernels_pallas.caote_topk.slots import is_protected, position_of, remaining
from kernels_pallas.eight_bits import filler, unread, unread_on_gpu
from kernels_pallas.topk import rank

ELEMENTS = 2048  # of a tile of values in step 1, which has sums of this size for each query head
AHEAD = 2  # such tiles that are loaded before one is used
MEASURED = 8192  # elements of a tile in step 2
PROGRAMS = 528  # four for each multiprocessor of an H100 or H200
PARTS = 16  # of a head at most, for every program of step 2 reads them all
HEADS = 8  # query heads of a program at most, as each has a tile of sums
SLOTS = 2048  # that step 3 looks at together
SELECTED = 32768
_EPS = float(jnp.finfo(jnp.float32).eps)
_LARGEST = float(jnp.finfo(jnp.float32).max)
_HIGHEST = 2**31 - 1  # beyond every rank and position


def unsupported(weights: Any, value: Any, *_: Any, norm: Norm, head_dim: int | None = None, **__: Any) -> str | None:
    """Return why the kernels can't run with these arguments, or None."""
    if norm != 2:
        return f"norm is {norm!r}, but the kernels measure with norm 2 only"
    reason = unread(("float32", "bfloat16", "float16"), {"weights": weights}, {"values": value})
    if reason is not None or (reason := unread_on_gpu(value)) is not None:
        return reason
    if head_dim not in (None, value.shape[-1]):
        return "keys and values are side by side in one array, but the kernel takes values alone"
    if value.shape[-1] > 512:
        return f"the head dim is {value.shape[-1]}, but the kernels take up to 512"
    if weights.shape[2] > 32:
        return f"{weights.shape[2]} query heads share the values, but the kernels take up to 32"
    return None


class _Part(NamedTuple):
    """What one program found of its slots, for each of a head's programs: float32 but for ``slot``.

    Outputs are sums of weighted values. FastCAOTE needs the sum and the number of all values alone, so there
    ``output`` has one row, and nothing writes or reads the two behind it.
    """

    output: Float[Array, "parts heads D"]
    without: Float[Array, "parts heads D"]  # the output without the heaviest token
    heaviest: Float[Array, "parts heads D"]  # its value
    weight: Float[Array, "parts G"]  # of the heaviest
    rest: Float[Array, "parts G"]  # of all others
    slot: Int[Array, "parts G"]  # of the heaviest, -1 for none
    count: Float[Array, "parts"]  # of tokens


class _Apart(NamedTuple):
    """The heaviest token of a query head, and what the output changes by without it."""

    change: Float[Array, ""]
    rest: Float[Array, ""]
    slot: Int[Array, ""]


class _Worst(NamedTuple):
    """The live slot of lowest rank among those that each lane has seen, of equal ranks the oldest, and their number."""

    rank: Int[Array, "lanes"]
    position: Int[Array, "lanes"]
    slot: Int[Array, "lanes"]
    live: Int[Array, "lanes"]


def of_heads(weights, value, layer, slot, budget, *scales, head_dim, fast, excess, with_scores, interpret):
    del head_dim  # all of a row
    B, K, G, S = weights.shape
    H, (L, D) = B * K, value.shape[::4]
    weights, value, slot = weights.reshape(H, G, S), value.reshape(L, H, S, D), slot.reshape(H, S)
    scales = tuple(x.reshape(H, S) for x in scales)  # of values of eight bits
    width = pl.next_power_of_2(D)
    rows, measured = (min(max(elements // width, 1), pl.next_power_of_2(S)) for elements in (ELEMENTS, MEASURED))
    programs = min(pl.cdiv(PROGRAMS, H), PARTS)
    span = pl.cdiv(pl.cdiv(S, programs), max(rows * AHEAD, measured)) * max(rows * AHEAD, measured)
    programs = pl.cdiv(S, span)  # each has as many slots
    heads = 1 if fast else G
    call = functools.partial(pl.pallas_call, interpret=interpret)
    whole = pl.BlockSpec((1,), lambda h, *_: (0,))
    of_slots = pl.BlockSpec((None, S), lambda h, *_: (h, 0))
    of_weights = pl.BlockSpec((None, G, S), lambda h, *_: (h, 0, 0))
    of_values = pl.BlockSpec((L, None, S, D), lambda h, *_: (0, h, 0, 0))
    of_squares = pl.BlockSpec((None, heads, S), lambda h, *_: (h, 0, 0))
    of_scales = [of_slots] * len(scales)

    def of_program(*shape):
        return pl.BlockSpec((None, None, *shape), lambda h, p, g: (h, p, *(0 for _ in shape)))

    def of_programs(*shape):
        return pl.BlockSpec((None, programs, *shape), lambda h, *_: (h, 0, *(0 for _ in shape)))

    shapes = [*[(heads, width)] * 3, *[(G,)] * 3, ()]  # of a _Part
    dtypes = [*[jnp.float32] * 5, jnp.int32, jnp.float32]
    parts = call(
        functools.partial(_sum_up, scales=len(scales), rows=rows, span=span, fast=fast),
        out_shape=[jax.ShapeDtypeStruct((H, programs, *x), dtype) for x, dtype in zip(shapes, dtypes, strict=True)],
        grid=(H, programs, pl.cdiv(G, HEADS)),
        in_specs=[whole, of_weights, of_slots, of_values, *of_scales],
        out_specs=[of_program(*shape) for shape in shapes],
        compiler_params=triton.CompilerParams(num_warps=4),
        name="caote_outputs",
    )(layer, weights, slot, value, *scales)
    output, without, heaviest, weight, rest, heavy_slot, count = parts
    squares = call(
        functools.partial(_measure, scales=len(scales), rows=measured, span=span, fast=fast),
        out_shape=jax.ShapeDtypeStruct((H, heads, S), jnp.float32),
        grid=(H, programs, pl.cdiv(heads, HEADS)),
        in_specs=[whole, of_values, of_programs(heads, width), of_programs(), *of_scales],
        out_specs=of_squares,
        compiler_params=triton.CompilerParams(num_warps=4),
        name="caote_distances",
    )(layer, value, output, count, *scales)
    one, many = excess == 1, S <= SELECTED
    size = pl.next_power_of_2(max(S, 128))
    size = size if many and not one else min(size, SLOTS)
    turns = pl.cdiv(S, size)
    kept_shape, scores_shape = jax.ShapeDtypeStruct((H, S), jnp.int32), jax.ShapeDtypeStruct((H, S), jnp.float32)
    selects = one or many
    writes = with_scores or not selects
    found = call(
        functools.partial(_select if selects else _write, size=size, turns=turns, fast=fast, excess=excess),
        out_shape=[*[kept_shape] * selects, *[scores_shape] * writes],
        grid=(H,) if selects else (H, turns),
        in_specs=[
            pl.BlockSpec((1,), lambda h, *_: (h // K,)), of_slots, of_weights, of_squares,
            *[of_programs(heads, width)] * 2, *[of_programs(G)] * 3,
        ],
        out_specs=[of_slots] * (selects + writes),
        compiler_params=triton.CompilerParams(num_warps=max(4, min(32, size // 128))),
        name="caote_select" if selects else "caote_scores",
    )(budget, slot, weights, squares, without, heaviest, weight, rest, heavy_slot)  # fmt: skip
    if not selects:
        found = [remaining(found[0], slot, jnp.repeat(budget, K)[:, None], excess), found[0]]
    return tuple(x.reshape(B, K, S) for x in found[: 1 + with_scores])


def _sum_up(layer, weights, slot, value, *refs, scales, rows, span, fast):
    scales, part = refs[:scales], _Part(*refs[scales:])
    G, (_, S, D) = weights.shape[0], value.shape
    width = part.output.shape[1]
    column = jax.lax.broadcasted_iota(jnp.int32, (width,), 0)
    first = pl.program_id(1) * span
    own = [pl.program_id(2) * HEADS + i for i in range(min(G, HEADS))]

    def weights_of(number):
        there = number < S
        a = [triton.load(weights.at[jnp.full_like(number, g), number], mask=there & (g < G), other=0.0) for g in own]
        counts = triton.load(slot.at[number], mask=there, other=-1) >= 0
        for x in a if G <= HEADS else [triton.load(weights.at[g, number], mask=there, other=0.0) for g in range(G)]:
            counts &= jnp.abs(x) < jnp.inf
        return a, counts

    size = min(1024, pl.next_power_of_2(span))  # slots among which the heaviest is looked for together

    def heavier(k, found):
        number = first + k * size + jax.lax.broadcasted_iota(jnp.int32, (size,), 0)
        a, counts = weights_of(jnp.where(number < first + span, number, S))
        a = [jnp.where(counts, x, 0.0) for x in a]
        return tuple((jnp.maximum(x, m), jnp.where(x > m, number, n)) for x, (m, n) in zip(a, found, strict=True))

    none = (jnp.zeros((size,), jnp.float32), jnp.full((size,), _HIGHEST, jnp.int32))
    most = [], []
    for weight, number in jax.lax.fori_loop(0, pl.cdiv(span, size), heavier, (none,) * len(own)):
        heaviest = jnp.max(weight)
        most[0].append(heaviest)
        most[1].append(jnp.min(jnp.where(weight == heaviest, number, _HIGHEST)))

    def add(k, carry):
        outputs, rests, count = carry
        numbers = [first + (k * AHEAD + i) * rows + jax.lax.broadcasted_iota(jnp.int32, (rows,), 0) for i in range(AHEAD)]
        tiles = [_load(value, scales, layer[0], number, column) for number in numbers]
        beside = [weights_of(number) for number in numbers]
        for number, tile, (a, counts) in zip(numbers, tiles, beside, strict=True):
            counts &= jnp.max(jnp.abs(tile), axis=1) < jnp.inf
            tile = jnp.where(counts[:, None], tile, 0.0)
            others = [jnp.where(counts & (number != n), x, 0.0) for x, n in zip(a, most[1], strict=True)]
            factors = [jnp.where(counts, 1.0, 0.0)] if fast else others
            outputs = [x + factor[:, None] * tile for x, factor in zip(outputs, factors, strict=True)]
            rests = [x + y for x, y in zip(rests, others, strict=True)]
            count += jnp.where(counts, 1.0, 0.0)
        return tuple(outputs), tuple(rests), count

    zero = jnp.zeros((rows,), jnp.float32)
    start = (jnp.zeros((rows, width), jnp.float32),) * (1 if fast else len(own)), (zero,) * len(own), zero
    outputs, rests, count = jax.lax.fori_loop(0, span // (rows * AHEAD), add, start)
    part.count[...] = jnp.sum(count)
    for i, (g, weight, number, rest) in enumerate(zip(own, *most, rests, strict=True)):
        there = (number < _HIGHEST) & (column < D)
        place = value.at[jnp.full_like(column, layer[0]), jnp.where(number < _HIGHEST, number, 0), column]
        heaviest = triton.load(place, mask=there, other=filler(value.dtype)).astype(jnp.float32)
        for scale in scales:
            heaviest *= triton.load(scale.at[jnp.where(number < _HIGHEST, number, 0)])
        # Without finite values it counts nowhere, and as no other weighs more than half none needs to be apart.
        counts = (jnp.min(jnp.where(jnp.abs(heaviest) < jnp.inf, 1, 0)) > 0) & (number < _HIGHEST)
        weight, heaviest = jnp.where(counts, weight, 0.0), jnp.where(counts, heaviest, 0.0)

        @pl.when(g < G)
        def _write(i=i, g=g, weight=weight, number=number, rest=rest, heaviest=heaviest, counts=counts):
            if not fast:
                output = jnp.sum(outputs[i], axis=0)
                part.without[g, :] = output
                part.output[g, :] = output + weight * heaviest
                part.heaviest[g, :] = heaviest
            part.weight[g], part.rest[g], part.slot[g] = weight, jnp.sum(rest), jnp.where(counts, number, -1)

    if fast:
        part.output[0, :] = jnp.sum(outputs[0], axis=0)


def _measure(layer, value, output, count, *refs, scales, rows, span, fast):
    scales, squares = refs[:scales], refs[scales]
    (programs, heads, width), (_, S, D) = output.shape, value.shape
    column = jax.lax.broadcasted_iota(jnp.int32, (width,), 0)
    part = jax.lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(programs),), 0)
    first = pl.program_id(1) * span
    own = [pl.program_id(2) * HEADS + i for i in range(min(heads, HEADS))]
    points = []
    for g in own:
        place = output.at[part[:, None], jnp.full_like(part, g)[:, None], column[None, :]]
        there = (part < programs)[:, None] & (g < heads)
        points.append(jnp.sum(triton.load(place, mask=there, other=0.0), axis=0))
    if fast:
        tokens = jnp.sum(triton.load(count.at[part], mask=part < programs, other=0.0))
        points = [points[0] / jnp.maximum(tokens, 1)]

    def measure(k, _):
        number = first + k * rows + jax.lax.broadcasted_iota(jnp.int32, (rows,), 0)
        tile = _load(value, scales, layer[0], number, column)
        tile = jnp.where(jnp.abs(tile) < jnp.inf, tile, jnp.nan)  # told from values whose squares overflow
        for g, point in zip(own, points, strict=True):
            away = point[None, :] - tile
            away = away if D == width else jnp.where(column[None, :] < D, away, 0.0)
            place = squares.at[jnp.full_like(number, g), number]
            triton.store(place, jnp.sum(away * away, axis=1), mask=(number < S) & (g < heads))

    jax.lax.fori_loop(0, span // rows, measure, None)


def _apart(without, heaviest, weights, rests, slots, g: int, fast: bool) -> _Apart:
    """Find the heaviest token of a query head among the heaviest of its parts; the others join the rest."""
    programs, _, width = without.shape
    part = jax.lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(programs),), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
    there = part < programs

    def load(ref, other):
        return triton.load(ref.at[part, jnp.full_like(part, g)], mask=there, other=other)

    def load_rows(ref):
        place = ref.at[part[:, None], jnp.full_like(part, g)[:, None], column]
        return triton.load(place, mask=there[:, None] & (column < width), other=0.0)

    weight = load(weights, 0.0)
    most = jnp.max(weight)
    is_first = part == jnp.min(jnp.where(weight == most, part, len(part)))
    lighter = jnp.where(is_first, 0.0, weight)
    rest = jnp.sum(load(rests, 0.0) + lighter)
    slot = jnp.max(jnp.where(is_first, load(slots, -1), -1))
    if fast:
        return _Apart(most, rest, slot)
    values = load_rows(heaviest)
    output = jnp.sum(load_rows(without) + lighter[:, None] * values, axis=0)
    away = output / jnp.where(rest > 0, rest, 1.0) - jnp.sum(jnp.where(is_first[:, None], values, 0.0), axis=0)
    return _Apart(most * jnp.sqrt(jnp.sum(away * away)), rest, slot)


def _scores_of(number, slot, weights, squares, apart, fast):
    """Return the scores of some slots, and the packed slots."""
    (G, S), there = weights.shape, number < slot.shape[0]
    packed = triton.load(slot.at[number], mask=there, other=-1)
    a = [triton.load(weights.at[g, number], mask=there, other=0.0) for g in range(G)]
    length = [jnp.sqrt(triton.load(squares.at[g, number], mask=there, other=0.0)) for g in range(squares.shape[0])]
    counts = (packed >= 0) & (length[0] == length[0])  # NaN marks values that are not finite
    for x in a:
        counts &= jnp.abs(x) < jnp.inf
    changes, holds_all = [], jnp.zeros(number.shape, jnp.bool_)
    for g, (x, own) in enumerate(zip(a, apart, strict=True)):
        x = jnp.where(counts, x, 0.0)
        is_most = number == own.slot
        dominant = is_most & (x > 0.5)
        remains = jnp.where(own.rest > 0, own.rest, 1.0)
        change = x / jnp.where(dominant, remains, jnp.maximum(1 - x, _EPS)) * length[0 if fast else g]
        changes.append(change if fast else jnp.where(dominant, own.change, change))
        holds_all |= (x >= 1) | (is_most & (x > 0) & (own.rest == 0))
    largest = functools.reduce(jnp.maximum, changes)
    scale = jnp.where(largest > 0, largest, 1.0)  # so that squares of small changes do not underflow
    result = largest if G == 1 else scale * jnp.sqrt(sum((change / scale) ** 2 for change in changes))
    result = jnp.where(counts, jnp.where(holds_all, _LARGEST, result), -jnp.inf)
    return jnp.where(is_protected(packed), jnp.inf, result), packed


def _write(budget, slot, weights, squares, *refs, size, turns, fast, excess):
    parts, scores = refs[:5], refs[5]
    number = pl.program_id(1) * size + jax.lax.broadcasted_iota(jnp.int32, (size,), 0)
    apart = [_apart(*parts, g, fast) for g in range(weights.shape[0])]
    result, _ = _scores_of(number, slot, weights, squares, apart, fast)
    triton.store(scores.at[number], result, mask=number < slot.shape[0])


def _select(budget, slot, weights, squares, *refs, size, turns, fast, excess):
    parts, kept, scores = refs[:5], refs[5], refs[6:]
    S = slot.shape[0]
    apart = [_apart(*parts, g, fast) for g in range(weights.shape[0])]
    lane = jax.lax.broadcasted_iota(jnp.int32, (size,), 0)

    def look(number):
        result, packed = _scores_of(number, slot, weights, squares, apart, fast)
        for ref in scores:
            triton.store(ref.at[number], result, mask=number < S)
        return result, packed

    if excess != 1:
        result, packed = look(lane)
        left = remaining(result[None], packed[None], budget[...][:, None], excess)[0]
        triton.store(kept.at[lane], left, mask=lane < S)
        return

    def worse(k, found):
        number = k * size + lane
        result, packed = look(number)
        live, position = packed >= 0, position_of(packed)
        ranks = rank(result, live)
        is_worse = live & ((ranks < found.rank) | ((ranks == found.rank) & (position < found.position)))
        own = ranks, position, number
        found = (jnp.where(is_worse, x, y) for x, y in zip(own, found[:3], strict=True)), found.live + live
        return _Worst(*found[0], found[1])

    highest = jnp.full((size,), _HIGHEST, jnp.int32)
    found = jax.lax.fori_loop(0, turns, worse, _Worst(highest, highest, highest, jnp.zeros((size,), jnp.int32)))
    position = jnp.where(found.rank == jnp.min(found.rank), found.position, _HIGHEST)
    worst = jnp.min(jnp.where(position == jnp.min(position), found.slot, _HIGHEST))
    worst = jnp.where(jnp.sum(found.live) > budget[0], worst, -1)

    def free(k, _):
        number = k * size + lane
        held = position_of(triton.load(slot.at[number], mask=number < S, other=-1))
        triton.store(kept.at[number], jnp.where(number == worst, -1, held), mask=number < S)

    jax.lax.fori_loop(0, turns, free, None)


def _load(value, scales, layer, number, column):
    """Load the values of the slots [rows, width] in float32."""
    _, S, D = value.shape
    there = (number < S)[:, None] & (column < D)[None, :]
    place = value.at[jnp.full_like(number, layer)[:, None], number[:, None], column[None, :]]
    v = triton.load(place, mask=there, other=filler(value.dtype)).astype(jnp.float32)
    for scale in scales:
        v *= triton.load(scale.at[number], mask=number < S, other=0.0)[:, None]
    return v
