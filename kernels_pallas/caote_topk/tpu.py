"""The kernel for TPU: a head's values pass through VMEM, and the scores never leave it.

Grid: groups of 8 heads, their heads, two passes (the outputs, then the errors), chunks of the values. Where a head's
values fit into one chunk they are read once, for the second pass finds the block in VMEM; otherwise the second pass
goes through the chunks backwards and reads all but one again. The scores of the 8 heads fill the 8 sublanes of one
scratch buffer, in which the last step selects for all 8 heads.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas.caote_topk.reference import Ends, Norm, shares
from kernels_pallas.caote_topk.slots import is_protected, remaining, with_ends
from kernels_pallas.eight_bits import unread

HEADS = 8  # per selection
STEP = 512  # slots computed at a time
VALUE_BYTES = 4 * 2**20  # of a chunk; two are in flight
VMEM_BYTES = 48 * 2**20
_HIGHEST = jax.lax.Precision.HIGHEST


def unsupported(weights: Any, value: Any, *_: Any, norm: Norm, **__: Any) -> str | None:
    """Return why the kernel can't run with these arguments, or None."""
    if norm != 2:
        return f"norm is {norm!r}, but the kernel measures with norm 2 only"
    if (reason := unread(("float32", "bfloat16"), {"weights": weights}, {"values": value})) is not None:
        return reason
    if value.shape[-1] > 512:
        return f"the head dim is {value.shape[-1]}, but the kernel takes up to 512"
    tiling = _Tiling.of(weights.shape, value)
    if tiling.vmem_bytes > VMEM_BYTES:
        return (
            f"{weights.shape[3]} slots per head take {tiling.vmem_bytes} bytes, but the kernel takes up to {VMEM_BYTES}"
        )
    return None


class _Tiling(NamedTuple):
    """The slots per chunk and the number of chunks, for weights [B, K, G, S]."""

    step: int
    chunk: int
    chunks: int
    vmem_bytes: int

    @classmethod
    def of(cls, weights_shape: tuple[int, ...], value: Any) -> _Tiling:
        G, S = weights_shape[2:]
        step = min(STEP, pl.cdiv(S, 128) * 128)
        row_bytes = pl.cdiv(value.shape[-1], 128) * 128 * value.dtype.itemsize
        steps = pl.cdiv(S, step)
        chunks = pl.cdiv(steps * step * row_bytes, VALUE_BYTES)
        chunk = pl.cdiv(steps, chunks) * step
        padded = chunks * chunk
        scales = 2 * (value.dtype.itemsize == 1)
        # weights, slots, outputs, scratch, temporaries
        sublanes = 2 * pl.cdiv(G, 8) * 8 + (2 + 2 + 2 + 1 + 6 + scales) * HEADS
        computed = 16 * step * row_bytes * (2 if scales else 1)
        return cls(step, chunk, chunks, 2 * chunk * row_bytes + 4 * sublanes * padded + computed)


def of_heads(
    weights: Float[Array, "B K G S"],
    value: Float[Array, "B K S D"],
    slot: Int[Array, "B K S"],
    budget: Int[Array, "B"],
    *scales: Float[Array, "B K S"],
    fast: bool,
    excess: int | None,
    with_scores: bool,
    interpret: Any,
    ends: Ends | None = None,
) -> tuple[Array, ...]:
    B, K, G, S = weights.shape
    D, H = value.shape[3], B * K
    tiling = _Tiling.of(weights.shape, value)
    slot = with_ends(slot, ends)
    padded, groups = tiling.chunk * tiling.chunks, pl.cdiv(H, HEADS)
    # Near 1 here, and divided by the sum over what counts in the kernel, which alone knows which values are finite.
    counts = (slot >= 0) & jnp.isfinite(weights).all(axis=2)
    weights = jnp.where(counts[:, :, None], shares(weights, counts[:, :, None]), jnp.nan)
    weights = jnp.pad(weights.reshape(H, G, S), ((0, 0), (0, 0), (0, padded - S)))
    more = ((0, groups * HEADS - H), (0, padded - S))
    slot = jnp.pad(slot.reshape(H, S), more, constant_values=-1)
    of_slots = [jnp.pad(x.reshape(H, S), more) for x in scales]  # of values of eight bits
    budgets = jnp.broadcast_to(jnp.repeat(budget, K)[:, None], (H, 128))
    budgets = jnp.pad(budgets, (more[0], (0, 0)), constant_values=1)

    def head(g: Array, i: Array) -> Array:
        return jnp.minimum(g * HEADS + i, H - 1)

    def chunk_of(phase: Array, c: Array) -> Array:
        return jnp.where(phase == 0, c, tiling.chunks - 1 - c)

    row = pl.BlockSpec((HEADS, padded), lambda g, i, phase, c: (g, 0))
    row_shape = (groups * HEADS, padded)
    out_shape = [jax.ShapeDtypeStruct(row_shape, jnp.int32)]
    if with_scores:
        out_shape.append(jax.ShapeDtypeStruct(row_shape, jnp.float32))
    sublanes, lanes = pl.cdiv(G, 8) * 8, pl.cdiv(D, 128) * 128
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            scales=len(scales),
            tiling=tiling,
            heads=H,
            fast=fast,
            excess=excess,
            with_scores=with_scores,
        ),
        out_shape=out_shape,
        grid=(groups, HEADS, 2, tiling.chunks),
        in_specs=[
            pl.BlockSpec((HEADS, 128), lambda g, i, phase, c: (g, 0)),
            pl.BlockSpec((None, G, padded), lambda g, i, phase, c: (head(g, i), 0, 0)),
            row,
            pl.BlockSpec((None, tiling.chunk, D), lambda g, i, phase, c: (head(g, i), chunk_of(phase, c), 0)),
            *[row] * len(scales),
        ],
        out_specs=[row] * len(out_shape),
        scratch_shapes=[
            pltpu.VMEM((HEADS, padded), jnp.float32),  # the scores; before that, 1 where a slot takes part
            pltpu.VMEM((sublanes, lanes), jnp.float32),  # the output but for the heaviest token, or the values' sum
            pltpu.VMEM((sublanes, lanes), jnp.float32),  # the heaviest token's value
            pltpu.VMEM((sublanes, 128), jnp.float32),  # the heaviest token's weight
            pltpu.VMEM((sublanes, 128), jnp.float32),  # the weight of all others
            pltpu.VMEM((sublanes, 128), jnp.int32),  # the heaviest token's slot
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=max(16 * 2**20, tiling.vmem_bytes * 5 // 4),
        ),
        cost_estimate=pl.CostEstimate(
            flops=(6 * G + 4) * H * S * D,
            bytes_accessed=H * S * D * value.dtype.itemsize * (1 if tiling.chunks == 1 else 2)
            + 4 * H * S * (G + 2 + with_scores),
            transcendentals=G * H * S,
        ),
        interpret=interpret,
        name="caote_topk",
    )(budgets, weights, slot, value.reshape(H, S, D), *of_slots)
    return tuple(x[:H, :S].reshape(B, K, S) for x in out)


def _kernel(budget, weights, slot, value, *refs, scales, tiling, heads, fast, excess, with_scores):
    scales, refs = refs[:scales], refs[scales:]
    kept, scored = refs[0], refs[1 if with_scores else 0]
    scores, output, heaviest, heaviest_weight, rest_weight, heaviest_slot = refs[2 if with_scores else 1 :]
    i, phase, c = (pl.program_id(axis) for axis in (1, 2, 3))
    G, D, step = weights.shape[0], value.shape[1], tiling.step
    first = jnp.where(phase == 0, c, tiling.chunks - 1 - c) * tiling.chunk
    is_real = pl.program_id(0) * HEADS + i < heads

    def each_step(body):
        def at(k, _):
            local = pl.multiple_of(k * step, step)
            body(pl.multiple_of(first + local, step), local)
            return 0

        jax.lax.fori_loop(0, tiling.chunk // step, at, 0)

    def scaled(x, here):
        """Multiply the columns, one per slot, by the scales of values of eight bits; by 0 where one is not finite."""
        for ref in scales:
            scale = ref[pl.ds(i, 1), here]
            x = x * jnp.where(jnp.abs(scale) < jnp.inf, scale, 0)
        return x

    def number(start):
        return start + jax.lax.broadcasted_iota(jnp.int32, (1, step), 1)

    @pl.when((phase == 0) & (c == 0))
    def reset():
        for ref in (output, heaviest, heaviest_weight, rest_weight, heaviest_slot):
            ref[...] = jnp.zeros_like(ref)
        heaviest_slot[...] -= 1

    @pl.when((phase == 0) & is_real)
    def sum_up():
        def add(start, local):
            here = pl.ds(start, step)
            v = value[pl.ds(local, step), :].astype(jnp.float32)
            finite = jnp.abs(v) < jnp.inf
            v = jnp.where(finite, v, 0)
            takes_part = jnp.min(jnp.where(finite, 1.0, 0.0).T, axis=0, keepdims=True)  # [1, step]
            for scale in scales:
                takes_part *= jnp.where(jnp.abs(scale[pl.ds(i, 1), here]) < jnp.inf, 1.0, 0.0)
            a = weights[:, here]  # [G, step]
            a_is_finite = jnp.abs(a) < jnp.inf
            takes_part *= jnp.min(jnp.where(a_is_finite, 1.0, 0.0), axis=0, keepdims=True)
            takes_part = jnp.where(slot[pl.ds(i, 1), here] >= 0, takes_part, 0)
            scores[pl.ds(i, 1), here] = takes_part
            a = jnp.where(takes_part > 0, a, 0)
            # The heaviest token so far is kept apart; when a heavier one comes, it joins the others.
            most = jnp.max(a, axis=1, keepdims=True)  # [G, 1]
            numbers = number(start)
            which = jnp.min(jnp.where(a == most, numbers, 2**30), axis=1, keepdims=True)
            is_most = numbers == which
            rest = jnp.where(is_most, 0, a)
            heavier = most > heaviest_weight[:G, :1]
            lighter_weight = jnp.where(heavier, heaviest_weight[:G, :1], most)
            rest_sum = rest_weight[:G, :1] + jnp.sum(rest, axis=1, keepdims=True) + lighter_weight
            if fast:
                output[:1, :D] += _product(scaled(takes_part, here), v, value.dtype)
                heaviest[:1, :1] += jnp.sum(takes_part, axis=1, keepdims=True)  # their number
            else:
                both = jnp.concatenate([rest, jnp.where(is_most, 1.0, 0.0)], axis=0)
                both = _product(scaled(both, here), v, value.dtype)
                most_value = both[G:]
                lighter = jnp.where(heavier, heaviest[:G, :D], most_value)
                output[:G, :D] += both[:G] + lighter_weight * lighter
                heaviest[:G, :D] = jnp.where(heavier, most_value, heaviest[:G, :D])
            heaviest_slot[:G, :1] = jnp.where(heavier, which, heaviest_slot[:G, :1])
            heaviest_weight[:G, :1] = jnp.where(heavier, most, heaviest_weight[:G, :1])
            rest_weight[:G, :1] = rest_sum

        each_step(add)

    @pl.when((phase == 1) & is_real)
    def measure():
        most, others = heaviest_weight[:G, :1], rest_weight[:G, :1]
        remains, total = (jnp.where(x > 0, x, 1) for x in (others, most + others))
        if fast:
            point = output[...] / jnp.maximum(heaviest[:1, :1], 1)
        else:
            whole = heaviest_weight[:, :1] + rest_weight[:, :1]
            point = (output[...] + heaviest_weight[:, :1] * heaviest[...]) / jnp.where(whole > 0, whole, 1)
            away = output[:G, :] / remains - heaviest[:G, :]
            without = most / total * jnp.sqrt(jnp.sum(away * away, axis=1, keepdims=True))
        columns = point.T[:D]  # [D, G or more]

        def score(start, local):
            here = pl.ds(start, step)
            v = value[pl.ds(local, step), :].astype(jnp.float32)
            v = scaled(jnp.where(jnp.abs(v) < jnp.inf, v, 0).T, here)  # [D, step]
            takes_part = scores[pl.ds(i, 1), here] > 0
            a = jnp.where(takes_part, weights[:, here], 0)
            is_most = number(start) == heaviest_slot[:G, :1]
            dominant = is_most & (a + a > total)
            ratio = a / jnp.where(dominant, remains, jnp.maximum(total - a, jnp.finfo(jnp.float32).eps * total))
            squares = [_sum_of_squares(columns[:, g : g + 1] - v) for g in range(1 if fast else G)]
            changes = ratio * jnp.sqrt(jnp.concatenate(squares, axis=0) if len(squares) > 1 else squares[0])
            if not fast:
                changes = jnp.where(dominant, without, changes)
            if G > 1:  # scaled, so that squares of small changes do not underflow
                largest = jnp.max(changes, axis=0, keepdims=True)
                scale = jnp.where(largest > 0, largest, 1)
                changes = scale * jnp.sqrt(jnp.sum((changes / scale) ** 2, axis=0, keepdims=True))
            holds_all = jnp.where(a >= total, 1.0, 0.0)
            holds_all = jnp.max(holds_all, axis=0, keepdims=True) > 0
            result = jnp.where(holds_all, jnp.finfo(jnp.float32).max, changes)
            result = jnp.where(takes_part, result, -jnp.inf)
            scores[pl.ds(i, 1), here] = jnp.where(is_protected(slot[pl.ds(i, 1), here]), jnp.inf, result)

        each_step(score)

    @pl.when((i == HEADS - 1) & (phase == 1) & (c == tiling.chunks - 1))
    def select():
        kept[...] = remaining(scores[...], slot[...], budget[:, :1], excess, bits=1)
        if with_scores:
            scored[...] = jnp.where(slot[...] >= 0, scores[...], -jnp.inf)


def _sum_of_squares(x):
    return jnp.sum(x * x, axis=0, keepdims=True)


def _product(left, v, dtype):
    """Compute left [R, step] @ v [step, D] in float32.

    For values of bfloat16 or eight bits one pass of the matrix unit is exact: the left side is split into three parts
    of 8 bits each.
    """
    contract = (((1,), (0,)), ((), ()))
    if dtype != jnp.bfloat16 and dtype.itemsize > 1:
        return jax.lax.dot_general(left, v, contract, precision=_HIGHEST, preferred_element_type=jnp.float32)
    high = _upper_half(left)
    middle = _upper_half(left - high)
    parts = jnp.concatenate([high, middle, left - high - middle], axis=0).astype(jnp.bfloat16)
    product = jax.lax.dot_general(parts, v.astype(jnp.bfloat16), contract, preferred_element_type=jnp.float32)
    R = left.shape[0]
    return product[:R] + product[R : 2 * R] + product[2 * R :]


def _upper_half(x):
    """Truncate float32 to the bits of bfloat16; XLA might remove a conversion to bfloat16 and back."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
