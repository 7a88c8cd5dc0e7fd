"""The kernels for GPU (Pallas' Triton route), one per step: a head's values are split over many programs.

    1. each program sums its slots' part of the outputs and keeps its heaviest token apart;
       XLA combines the parts of a head, a few numbers each
    2. each program scores its slots: 4 bytes are written per slot, against the 2 D or 4 D bytes of the values
    3. one program per head selects, with the head's scores in its registers; beyond `SELECTED` slots XLA selects

V is read twice. Shapes are powers of two, with masks, as Triton needs them. Sums are in float32 and not on the matrix
unit, which two or four rows would leave almost idle.
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
from kernels_pallas.caote_topk.slots import is_protected, remaining
from kernels_pallas.eight_bits import filler, unread, unread_on_gpu

ELEMENTS = 8192  # of the values, held in a program's registers at a time
SLOTS = 512  # of a program
SELECTED = 32768
_EPS = float(jnp.finfo(jnp.float32).eps)
_LARGEST = float(jnp.finfo(jnp.float32).max)


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
    """Sums over the slots of one program, or of all of a head's programs: float32 but for ``slot``.

    ``output`` is the weighted sum of the values of all tokens but the heaviest. For FastCAOTE it is the sum of the
    values, and ``heaviest`` holds their number.
    """

    output: Float[Array, "... rows D"]
    heaviest: Float[Array, "... rows D"]
    weight: Float[Array, "... G"]  # of the heaviest
    rest: Float[Array, "... G"]  # of all others
    slot: Int[Array, "... G"]  # of the heaviest


def of_heads(weights, value, layer, slot, budget, *scales, head_dim, fast, excess, with_scores, interpret):
    del head_dim  # all of a row
    B, K, G, S = weights.shape
    H, (L, D) = B * K, value.shape[::4]
    weights, value, slot = weights.reshape(H, G, S), value.reshape(L, H, S, D), slot.reshape(H, S)
    scales = tuple(x.reshape(H, S) for x in scales)  # of values of eight bits
    width = pl.next_power_of_2(D)
    step = min(max(ELEMENTS // width, 16), pl.next_power_of_2(max(S, 16)))
    steps = pl.cdiv(min(SLOTS, S), step)
    programs = pl.cdiv(S, steps * step)
    rows = 1 if fast else G
    call = functools.partial(
        pl.pallas_call, interpret=interpret, compiler_params=triton.CompilerParams(num_warps=4, num_stages=2)
    )
    of_head = [
        pl.BlockSpec((1,), lambda h, p: (0,)),
        pl.BlockSpec((None, G, S), lambda h, p: (h, 0, 0)),
        pl.BlockSpec((None, S), lambda h, p: (h, 0)),
        pl.BlockSpec((L, None, S, D), lambda h, p: (0, h, 0, 0)),
    ]
    of_scales = of_head[2:3] * len(scales)

    def of_program(*shape):
        return pl.BlockSpec((None, None, *shape), lambda h, p: (h, p, *(0 for _ in shape)))

    shapes = [(rows, width), (rows, width), (G,), (G,), (G,)]  # of a _Part
    dtypes = [jnp.float32] * 4 + [jnp.int32]
    parts = call(
        functools.partial(_sum_up, scales=len(scales), step=step, steps=steps, fast=fast),
        out_shape=[jax.ShapeDtypeStruct((H, programs, *x), dtype) for x, dtype in zip(shapes, dtypes, strict=True)],
        grid=(H, programs),
        in_specs=[*of_head, *of_scales],
        out_specs=[of_program(*shape) for shape in shapes],
        name="caote_outputs",
    )(layer, weights, slot, value, *scales)
    whole = _together(_Part(*parts), fast)
    point, without = _points(whole, fast)
    of_all = [pl.BlockSpec((None, *x.shape[1:]), lambda h, p, n=x.ndim: (h, *(0,) * (n - 1))) for x in (point, *whole)]
    scores = call(
        functools.partial(_score, step=step, steps=steps, fast=fast),
        out_shape=jax.ShapeDtypeStruct((H, S), jnp.float32),
        grid=(H, programs),
        in_specs=[*of_head, of_all[0], *(of_all[3],) * 4, *of_scales],
        out_specs=pl.BlockSpec((None, S), lambda h, p: (h, 0)),
        name="caote_scores",
    )(layer, weights, slot, value, point, without, whole.weight, whole.rest, whole.slot, *scales)
    budgets = jnp.repeat(budget, K)[:, None]
    if S > SELECTED:
        kept = remaining(scores, slot, budgets, excess)
    else:
        size = pl.next_power_of_2(max(S, 128))
        kept = pl.pallas_call(
            functools.partial(_select, size=size, excess=excess),
            out_shape=jax.ShapeDtypeStruct((H, S), jnp.int32),
            grid=(H,),
            in_specs=[pl.BlockSpec((1, S), lambda h: (h, 0))] * 2 + [pl.BlockSpec((1, 1), lambda h: (h, 0))],
            out_specs=pl.BlockSpec((1, S), lambda h: (h, 0)),
            compiler_params=triton.CompilerParams(num_warps=4 if size <= 4096 else 8 if size <= 16384 else 16),
            interpret=interpret,
            name="caote_select",
        )(scores, slot, budgets)
    if not with_scores:
        return (kept.reshape(B, K, S),)
    return kept.reshape(B, K, S), jnp.where(slot >= 0, scores, -jnp.inf).reshape(B, K, S)


def _sum_up(layer, weights, slot, value, *refs, scales, step, steps, fast):
    scales, (output, heaviest, weight, rest, where) = refs[:scales], refs[scales:]
    G, (_, S, D) = weights.shape[0], value.shape
    rows, width = output.shape
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

    none = (jnp.zeros((width,), jnp.float32),) * rows
    start = (none, none, (jnp.float32(0),) * G, (jnp.float32(0),) * G, (jnp.int32(-1),) * G)
    outputs, heavy, weights_of, rests, places = jax.lax.fori_loop(0, steps, add, start)
    for r in range(rows):
        output[r, :] = outputs[r]
        heaviest[r, :] = heavy[r]
    for g in range(G):
        weight[g], rest[g], where[g] = weights_of[g], rests[g], places[g]


def _together(part: _Part, fast: bool) -> _Part:
    """Combine a head's parts [H, programs, ...]: the heaviest token of all stays apart, the others join the rest."""
    first = jnp.argmax(part.weight, axis=1, keepdims=True)  # [H, 1, G]
    is_first = jnp.arange(part.weight.shape[1])[:, None] == first  # [H, programs, G]
    lighter = jnp.where(is_first, 0, part.weight)
    if fast:
        output, heaviest = part.output.sum(1), part.heaviest.sum(1)
    else:
        output = jnp.sum(part.output + lighter[..., None] * part.heaviest, axis=1)
        heaviest = jnp.sum(jnp.where(is_first[..., None], part.heaviest, 0), axis=1)
    return _Part(
        output,
        heaviest,
        jnp.max(part.weight, axis=1),
        jnp.sum(part.rest + lighter, axis=1),
        jnp.take_along_axis(part.slot, first, axis=1)[:, 0],
    )


def _points(whole: _Part, fast: bool) -> tuple[Array, Array]:
    """Return the points that values are compared to [H, rows, D], and the change without the heaviest token [H, G]."""
    if fast:
        return whole.output / jnp.maximum(whole.heaviest, 1), jnp.zeros_like(whole.weight)
    remains = jnp.where(whole.rest > 0, whole.rest, 1)[..., None]
    away = jnp.sqrt(jnp.sum((whole.output / remains - whole.heaviest) ** 2, axis=-1))
    return whole.output + whole.weight[..., None] * whole.heaviest, whole.weight * away


def _score(layer, weights, slot, value, point, without, weight, rest, where, *refs, step, steps, fast):
    *scales, scores = refs
    G, (_, S, D) = weights.shape[0], value.shape
    column = jax.lax.broadcasted_iota(jnp.int32, (point.shape[1],), 0)
    first = pl.program_id(1) * (steps * step)

    def one(k, _):
        number = first + k * step + jax.lax.broadcasted_iota(jnp.int32, (step,), 0)
        v, part = _values(value, scales, layer[0], number, column)
        a = [triton.load(weights.at[g, number], mask=number < S, other=0.0) for g in range(G)]
        packed = triton.load(slot.at[number], mask=number < S, other=-1)
        part &= packed >= 0
        for a_g in a:
            part &= jnp.abs(a_g) < jnp.inf
        changes, holds_all = [], jnp.zeros((step,), jnp.bool_)
        for g in range(G):
            if g == 0 or not fast:
                away = jnp.where(column[None, :] < D, point[g, :][None, :] - v, 0.0)
                length = jnp.sqrt(jnp.sum(away * away, axis=1))
            a_g, others = jnp.where(part, a[g], 0.0), rest[g]
            is_most = number == where[g]
            dominant = is_most & (a_g > 0.5)
            remains = jnp.where(others > 0, others, 1.0)
            change = a_g / jnp.where(dominant, remains, jnp.maximum(1 - a_g, _EPS)) * length
            changes.append(change if fast else jnp.where(dominant, without[g], change))
            holds_all |= (a_g >= 1) | (is_most & (a_g > 0) & (others == 0))
        largest = functools.reduce(jnp.maximum, changes)
        scale = jnp.where(largest > 0, largest, 1.0)  # so that squares of small changes do not underflow
        result = largest if G == 1 else scale * jnp.sqrt(sum((change / scale) ** 2 for change in changes))
        result = jnp.where(part, jnp.where(holds_all, _LARGEST, result), -jnp.inf)
        result = jnp.where(is_protected(packed), jnp.inf, result)
        triton.store(scores.at[number], result, mask=number < S)
        return 0

    jax.lax.fori_loop(0, steps, one, 0)


def _select(scores, slot, budget, kept, *, size, excess):
    S = slot.shape[1]
    number = jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
    row = jnp.zeros((1, size), jnp.int32)
    score = triton.load(scores.at[row, number], mask=number < S, other=-jnp.inf)
    packed = triton.load(slot.at[row, number], mask=number < S, other=-1)
    triton.store(kept.at[row, number], remaining(score, packed, budget[...], excess), mask=number < S)


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
