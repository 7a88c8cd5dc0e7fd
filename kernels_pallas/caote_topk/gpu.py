"""The kernels for GPU (Pallas' Triton route), one per step: a head's values are split over many programs.

    1. each program sums its slots' part of the outputs and keeps its heaviest token apart
    2. each program combines the head's parts, at most `PARTS`, and scores its slots
    3. in decode, where one token leaves, step 2 writes each program's worst slot, and step 3 frees the worst of those.
       For blocks, step 2 writes the scores, 4 bytes per slot against the 2 D or 4 D bytes of the values, and one
       program per head selects with the head's scores in its registers; beyond `SELECTED` slots XLA selects

V is read twice. Shapes are powers of two, with masks, as Triton needs them. Sums are in float32 and not on the matrix
unit, which two or four query heads would leave almost idle.
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

ELEMENTS = 16384  # of the values, held in a program's registers at a time
PROGRAMS = 264  # two for each multiprocessor of an H100 or H200
PARTS = 32  # of a head at most, for every program of step 2 reads them all
SELECTED = 32768
SLOTS = 1024  # of a program of step 3 in decode
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
    """Sums over the slots of one program, for each of a head's programs: float32 but for ``slot``.

    ``output`` is the weighted sum of the values of all tokens but the heaviest. For FastCAOTE it is the sum of the
    values, and ``heaviest`` holds their number.
    """

    output: Float[Array, "parts heads D"]
    heaviest: Float[Array, "parts heads D"]
    weight: Float[Array, "parts G"]  # of the heaviest
    rest: Float[Array, "parts G"]  # of all others
    slot: Int[Array, "parts G"]  # of the heaviest


class _Whole(NamedTuple):
    """Holds what a query head's scores need of all its tokens."""

    point: Float[Array, "D"]  # that values are compared to
    without: Float[Array, ""]  # the change without the heaviest token
    rest: Float[Array, ""]
    slot: Int[Array, ""]  # of the heaviest


class _Worst(NamedTuple):
    """The live slot of lowest rank among some slots, of equal ranks the oldest, and how many of them are live."""

    rank: Int[Array, ""]
    position: Int[Array, ""]
    slot: Int[Array, ""]
    live: Int[Array, ""]


def of_heads(weights, value, layer, slot, budget, *scales, head_dim, fast, excess, with_scores, interpret):
    del head_dim  # all of a row
    B, K, G, S = weights.shape
    H, (L, D) = B * K, value.shape[::4]
    weights, value, slot = weights.reshape(H, G, S), value.reshape(L, H, S, D), slot.reshape(H, S)
    scales = tuple(x.reshape(H, S) for x in scales)  # of values of eight bits
    width = pl.next_power_of_2(D)
    step = min(max(ELEMENTS // width, 16), pl.next_power_of_2(max(S, 16)))
    chunks = pl.cdiv(S, step)
    steps = pl.cdiv(chunks, min(pl.cdiv(PROGRAMS, H), PARTS))
    programs = pl.cdiv(chunks, steps)
    heads, one = 1 if fast else G, excess == 1
    call = functools.partial(
        pl.pallas_call, interpret=interpret, compiler_params=triton.CompilerParams(num_warps=8, num_stages=2)
    )
    of_head = [
        pl.BlockSpec((1,), lambda h, p: (0,)),
        pl.BlockSpec((None, G, S), lambda h, p: (h, 0, 0)),
        pl.BlockSpec((None, S), lambda h, p: (h, 0)),
        pl.BlockSpec((L, None, S, D), lambda h, p: (0, h, 0, 0)),
    ]
    of_slots = of_head[2]
    of_scales = [of_slots] * len(scales)

    def of_program(*shape):
        return pl.BlockSpec((None, None, *shape), lambda h, p: (h, p, *(0 for _ in shape)))

    def of_programs(*shape):
        return pl.BlockSpec((None, programs, *shape), lambda h, p: (h, 0, *(0 for _ in shape)))

    shapes = [(heads, width), (heads, width), (G,), (G,), (G,)]  # of a _Part
    dtypes = [jnp.float32] * 4 + [jnp.int32]
    parts = call(
        functools.partial(_sum_up, scales=len(scales), step=step, steps=steps, fast=fast),
        out_shape=[jax.ShapeDtypeStruct((H, programs, *x), dtype) for x, dtype in zip(shapes, dtypes, strict=True)],
        grid=(H, programs),
        in_specs=[*of_head, *of_scales],
        out_specs=[of_program(*shape) for shape in shapes],
        name="caote_outputs",
    )(layer, weights, slot, value, *scales)
    writes = with_scores or not one
    worst_shapes = [jax.ShapeDtypeStruct((H, programs), jnp.int32)] * len(_Worst._fields) * one
    found = call(
        functools.partial(_score, scales=len(scales), step=step, steps=steps, fast=fast, one=one),
        out_shape=[*worst_shapes, *[jax.ShapeDtypeStruct((H, S), jnp.float32)] * writes],
        grid=(H, programs),
        in_specs=[*of_head, *(of_programs(*shape) for shape in shapes), *of_scales],
        out_specs=[*[pl.BlockSpec((None, None), lambda h, p: (h, p))] * len(worst_shapes), *[of_slots] * writes],
        name="caote_scores",
    )(layer, weights, slot, value, *parts, *scales)
    worst, scores = found[: len(worst_shapes)], found[len(worst_shapes) :]
    if one:
        kept = call(
            functools.partial(_free_worst, size=min(SLOTS, pl.next_power_of_2(S))),
            out_shape=jax.ShapeDtypeStruct((H, S), jnp.int32),
            grid=(H, pl.cdiv(S, SLOTS)),
            in_specs=[pl.BlockSpec((1,), lambda h, p: (h // K,)), of_slots, *[of_programs()] * len(worst)],
            out_specs=of_slots,
            compiler_params=triton.CompilerParams(num_warps=4),
            name="caote_select",
        )(budget, slot, *worst)
    elif S > SELECTED:
        kept = remaining(scores[0], slot, jnp.repeat(budget, K)[:, None], excess)
    else:
        size = pl.next_power_of_2(max(S, 128))
        kept = call(
            functools.partial(_select, size=size, excess=excess),
            out_shape=jax.ShapeDtypeStruct((H, S), jnp.int32),
            grid=(H,),
            in_specs=[pl.BlockSpec((1,), lambda h: (h // K,)), *[pl.BlockSpec((1, S), lambda h: (h, 0))] * 2],
            out_specs=pl.BlockSpec((1, S), lambda h: (h, 0)),
            compiler_params=triton.CompilerParams(num_warps=4 if size <= 4096 else 8 if size <= 16384 else 16),
            name="caote_select",
        )(budget, scores[0], slot)
    return (kept.reshape(B, K, S), *[x.reshape(B, K, S) for x in scores[:with_scores]])


def _sum_up(layer, weights, slot, value, *refs, scales, step, steps, fast):
    scales, (output, heaviest, weight, rest, where) = refs[:scales], refs[scales:]
    G, (_, S, D) = weights.shape[0], value.shape
    heads, width = output.shape
    column = jax.lax.broadcasted_iota(jnp.int32, (width,), 0)
    first = pl.program_id(1) * (steps * step)

    def row_of(number):
        there, number = (number >= 0) & (column < D), jnp.maximum(number, 0)
        place = value.at[jnp.full_like(column, layer[0]), number, column]
        row = triton.load(place, mask=there, other=filler(value.dtype)).astype(jnp.float32)
        for scale in scales:
            row *= triton.load(scale.at[number])
        return _clean(row)

    def add(k, carry):
        number = first + k * step + jax.lax.broadcasted_iota(jnp.int32, (step,), 0)
        v, part = _values(value, scales, layer[0], number, column)
        a = [triton.load(weights.at[g, number], mask=number < S, other=0.0) for g in range(G)]
        part &= triton.load(slot.at[number], mask=number < S, other=-1) >= 0
        for a_g in a:
            part &= jnp.abs(a_g) < jnp.inf
        outputs, heavy, weight, rest, where = carry
        outputs, heavy, weight, rest, where = list(outputs), list(heavy), list(weight), list(rest), list(where)
        if fast:
            outputs[0] += jnp.sum(jnp.where(part[:, None], v, 0.0), axis=0)
            heavy[0] += jnp.sum(jnp.where(part, 1.0, 0.0))
        for g in range(G):
            a_g = jnp.where(part, a[g], 0.0)
            most = jnp.max(a_g)
            which = jnp.min(jnp.where(a_g == most, number, 2**30))
            others = jnp.where(number == which, 0.0, a_g)
            heavier = most > weight[g]
            lighter = jnp.where(heavier, weight[g], most)
            if not fast:
                most_value = row_of(jnp.where(most > 0, which, -1))
                outputs[g] += jnp.sum(others[:, None] * v, axis=0) + lighter * jnp.where(heavier, heavy[g], most_value)
                heavy[g] = jnp.where(heavier, most_value, heavy[g])
            rest[g] += jnp.sum(others) + lighter
            where[g] = jnp.where(heavier, which, where[g])
            weight[g] = jnp.where(heavier, most, weight[g])
        return tuple(outputs), tuple(heavy), tuple(weight), tuple(rest), tuple(where)

    none = (jnp.zeros((width,), jnp.float32),) * heads
    start = (none, none, (jnp.float32(0),) * G, (jnp.float32(0),) * G, (jnp.int32(-1),) * G)
    outputs, heavy, weights_of, rests, places = jax.lax.fori_loop(0, steps, add, start)
    for r in range(heads):
        output[r, :] = outputs[r]
        heaviest[r, :] = heavy[r]
    for g in range(G):
        weight[g], rest[g], where[g] = weights_of[g], rests[g], places[g]


def _together(parts: _Part, row: int, fast: bool) -> _Whole:
    """Combine the parts of one query head: the heaviest token of all stays apart, the others join the rest."""
    programs, _, width = parts.output.shape
    part = jax.lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(programs),), 0)
    there = part < programs
    column = jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)

    def load(ref, other):
        return triton.load(ref.at[part, jnp.full_like(part, row)], mask=there, other=other)

    def load_parts(ref):
        place = ref.at[part[:, None], jnp.full_like(part, 0 if fast else row)[:, None], column]
        return triton.load(place, mask=there[:, None] & (column < width), other=0.0)

    weights = load(parts.weight, 0.0)
    weight = jnp.max(weights)
    is_first = part == jnp.min(jnp.where(weights == weight, part, len(part)))
    lighter = jnp.where(is_first, 0.0, weights)
    rest = jnp.sum(load(parts.rest, 0.0) + lighter)
    slot = jnp.max(jnp.where(is_first, load(parts.slot, -1), -1))
    outputs, heaviest = load_parts(parts.output), load_parts(parts.heaviest)
    if fast:
        mean = jnp.sum(outputs, axis=0) / jnp.maximum(jnp.sum(heaviest, axis=0), 1)
        return _Whole(mean, jnp.zeros_like(weight), rest, slot)
    output = jnp.sum(outputs + lighter[:, None] * heaviest, axis=0)
    heavy = jnp.sum(jnp.where(is_first[:, None], heaviest, 0.0), axis=0)
    away = output / jnp.where(rest > 0, rest, 1.0) - heavy
    return _Whole(output + weight * heavy, weight * jnp.sqrt(jnp.sum(away * away)), rest, slot)


def _score(layer, weights, slot, value, *refs, scales, step, steps, fast, one):
    parts, refs = _Part(*refs[:5]), refs[5:]
    scales, outs = refs[:scales], refs[scales:]
    G, (_, S, D) = weights.shape[0], value.shape
    column = jax.lax.broadcasted_iota(jnp.int32, (parts.output.shape[2],), 0)
    first = pl.program_id(1) * (steps * step)
    wholes = [_together(parts, g, fast) for g in range(G)]

    def score(k, worst):
        number = first + k * step + jax.lax.broadcasted_iota(jnp.int32, (step,), 0)
        v, part = _values(value, scales, layer[0], number, column)
        a = [triton.load(weights.at[g, number], mask=number < S, other=0.0) for g in range(G)]
        packed = triton.load(slot.at[number], mask=number < S, other=-1)
        part &= packed >= 0
        for a_g in a:
            part &= jnp.abs(a_g) < jnp.inf
        changes, holds_all = [], jnp.zeros((step,), jnp.bool_)
        for g, whole in enumerate(wholes):
            if g == 0 or not fast:
                away = jnp.where(column[None, :] < D, whole.point[None, :] - v, 0.0)
                length = jnp.sqrt(jnp.sum(away * away, axis=1))
            a_g, others = jnp.where(part, a[g], 0.0), whole.rest
            is_most = number == whole.slot
            dominant = is_most & (a_g > 0.5)
            remains = jnp.where(others > 0, others, 1.0)
            change = a_g / jnp.where(dominant, remains, jnp.maximum(1 - a_g, _EPS)) * length
            changes.append(change if fast else jnp.where(dominant, whole.without, change))
            holds_all |= (a_g >= 1) | (is_most & (a_g > 0) & (others == 0))
        largest = functools.reduce(jnp.maximum, changes)
        scale = jnp.where(largest > 0, largest, 1.0)  # so that squares of small changes do not underflow
        result = largest if G == 1 else scale * jnp.sqrt(sum((change / scale) ** 2 for change in changes))
        result = jnp.where(part, jnp.where(holds_all, _LARGEST, result), -jnp.inf)
        result = jnp.where(is_protected(packed), jnp.inf, result)
        for ref in outs[len(worst) :]:
            triton.store(ref.at[number], result, mask=number < S)
        return _worse(worst, _worst_of(result, packed, number)) if one else worst

    none = _Worst(jnp.int32(_HIGHEST), jnp.int32(_HIGHEST), jnp.int32(-1), jnp.int32(0))
    worst = jax.lax.fori_loop(0, steps, score, none if one else ())
    for ref, x in zip(outs[: len(worst)], worst, strict=True):
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


def _worse(a: _Worst, b: _Worst) -> _Worst:
    """Return the worse of two slots, of two groups of slots that are counted together."""
    is_b = (b.rank < a.rank) | ((b.rank == a.rank) & (b.position < a.position))
    worse = _Worst(*(jnp.where(is_b, y, x) for x, y in zip(a, b, strict=True)))
    return worse._replace(live=a.live + b.live)


def _free_worst(budget, slot, ranks, positions, slots, live, kept, *, size):
    programs, S = ranks.shape[0], slot.shape[0]
    part = jax.lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(programs),), 0)

    def load(ref, other):
        return triton.load(ref.at[part], mask=part < programs, other=other)

    rank, position = load(ranks, _HIGHEST), load(positions, _HIGHEST)
    position = jnp.where(rank == jnp.min(rank), position, _HIGHEST)
    worst = jnp.max(jnp.where(position == jnp.min(position), load(slots, -1), -1))
    worst = jnp.where(jnp.sum(load(live, 0)) > budget[0], worst, -1)
    number = pl.program_id(1) * size + jax.lax.broadcasted_iota(jnp.int32, (size,), 0)
    held = position_of(triton.load(slot.at[number], mask=number < S, other=-1))
    triton.store(kept.at[number], jnp.where(number == worst, -1, held), mask=number < S)


def _select(budget, scores, slot, kept, *, size, excess):
    S = slot.shape[1]
    number = jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
    row = jnp.zeros((1, size), jnp.int32)
    score = triton.load(scores.at[row, number], mask=number < S, other=-jnp.inf)
    packed = triton.load(slot.at[row, number], mask=number < S, other=-1)
    left = remaining(score, packed, budget[...][:, None], excess)
    triton.store(kept.at[row, number], left, mask=number < S)


def _values(value, scales, layer, number, column):
    """Load the values of the slots [step, width] in float32, and a mask of the finite ones; others become 0."""
    _, S, D = value.shape
    there = (number < S)[:, None] & (column < D)[None, :]
    place = value.at[jnp.full_like(number, layer)[:, None], number[:, None], column[None, :]]
    v = triton.load(place, mask=there, other=filler(value.dtype)).astype(jnp.float32)
    for scale in scales:
        v *= triton.load(scale.at[number], mask=number < S, other=0.0)[:, None]
    finite = jnp.min(jnp.where(jnp.abs(v) < jnp.inf, 1, 0), axis=1) > 0
    return _clean(v), finite


def _clean(v):
    v = v.astype(jnp.float32)
    return jnp.where(jnp.abs(v) < jnp.inf, v, 0.0)
