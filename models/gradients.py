"""The gradient of a loss with respect to each layer's attention output, while the model repeats its text (KVgrad)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvjax
from kernels_pallas.dispatch import platform
from kernels_pallas.paged_attention.pages import laid_out, slot_positions, table_ends
from kernels_pallas.softmax import scaled, sees
from kvjax._src.cache import KVCache, Pages, floats_of
from kvjax._src.layer import LayerBlock
from kvjax._src.paged import PagedCache
from kvjax._src.quantise import Dtypes, is_quantised
from kvjax._src.reconstruction import Reconstruction
from kvjax._src.split_cache import ModelCache
from kvjax.schedule import HostOrDevice
from models.config import Config
from models.decoder import Decoder, entered, logits_from, rope_of_layer, run_layer, summed

SLOTS = 256  # of a head whose weights are held at a time


def loss_gradient(
    model: Decoder,
    wanted: Reconstruction,
    cache: ModelCache,
    tokens: Int[HostOrDevice, "B T"],
    position: Int[Array, "B T"],
    part: Int[HostOrDevice, "B 3"],
    lengths: Int[Array, "B"],
    dtypes: Dtypes,
) -> tuple[Float[Array, "B T _"], ...]:
    """Differentiate a loss of a block that repeats a part of the text, with respect to each layer's attention output.

    The output is what W_O gives, before it is normalised or added to the hidden states. The cache is a constant, which
    the block's queries see; the block's own keys and values are functions of what comes before them. A forward pass
    keeps each layer's input, from which a backward pass computes the layer again, in the model's dtype.

    Args:
        wanted: its loss is "hidden", the sum of the squared lengths of the tokens' hidden states before the last norm,
            or "tokens", the cross-entropy of the part's tokens, each predicted from those before it.
        cache: all layers, without the block.
        position: -1 for padding, which is in front.
        part: see :class:`kvjax.schedule.Step`; the part's tokens are the block's last ones.
        lengths: the lengths of the texts, which some rotary frequencies follow.
        dtypes: those that the block's keys and values would have in the cache.

    Returns:
        The gradient in each layer, [B, T, E], where a score multiplies weights by it, else its length, [B, T, 1].
    """
    config = model.config
    x, waves = entered(config, model.embedding[...], tokens, position, lengths)
    given, inputs = [], []
    for number, layer in enumerate(model.layers):
        own: Any = cache.layers[number] if isinstance(cache, kvjax.LayerCaches) else cache  # which is on one device
        window: Any = None if (seen := config.sliding_windows[number]) is None else np.int32(seen)
        rope, place = rope_of_layer(config, number, waves), np.int32(number)
        given.append(_Layer(layer.arrays(), rope, own, position, place, window))
        inputs.append(x)
        x = _forward(config, dtypes, given[-1], x)
    above, found = _of_loss(config, wanted, model.ends(), x, tokens, position, part), []
    for here, before in zip(reversed(given), reversed(inputs), strict=True):
        above, shift = _backward(config, dtypes, here, before, above)
        found.append(shift if "weights" in wanted.statistics else _lengths(shift))
    return tuple(reversed(found))


class _Layer(NamedTuple):
    """One layer, the cache that a block attends over there, and the block's positions."""

    weights: dict[str, Array]
    waves: tuple[Array, ...]
    cache: KVCache | PagedCache
    position: Int[Array, "B T"]
    number: Any
    window: Any


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(
    config: Config,
    dtypes: Dtypes,
    layer: _Layer,
    x: Float[Array, "B T E"],
    shift: Float[Array, "B T E"] | None = None,
) -> Float[Array, "B T E"]:
    """Run a layer on a block that attends over a cache without it."""
    # The choice of the tokens that stay is not differentiable.
    weights, held = jax.lax.stop_gradient((layer.weights, layer.cache.in_pages(layer.number, SLOTS)))

    def stored(own: Array, dtype: str) -> Array:
        return kvjax.straight_through(own, dtype) if is_quantised(dtype) else own.astype(dtype)

    def attend(query, key, value):
        block = LayerBlock(query, stored(key, dtypes.key), stored(value, dtypes.value), layer.position)
        sinks = None if (logits := weights.get("sink_logits")) is None else _of_rows(logits, block)
        return _attend_constant(config.attention_soft_cap, held, block, layer.window, sinks), None, None

    return summed(run_layer(config, weights, x, layer.waves, attend, shift)[0])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(
    config: Config, dtypes: Dtypes, layer: _Layer, x: Float[Array, "B T E"], above: Float[Array, "B T E"]
) -> tuple[Float[Array, "B T E"], Float[Array, "B T E"]]:
    """Return the derivative with respect to a layer's input, and to a shift of its attention's output."""
    _, back = jax.vjp(functools.partial(_forward, config, dtypes, layer), x, jnp.zeros_like(x))
    return back(above)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _of_loss(
    config: Config,
    wanted: Reconstruction,
    ends: dict[str, Array],
    hidden: Float[Array, "B T E"],
    tokens: Int[Array, "B T"],
    position: Int[Array, "B T"],
    part: Int[Array, "B 3"],
) -> Float[Array, "B T E"]:
    """Return the derivative of the loss with respect to the hidden states."""
    ends = jax.lax.stop_gradient(ends)

    def loss(hidden: Float[Array, "B T E"]) -> Float[Array, ""]:
        if wanted.loss == "tokens":
            return _cross_entropy(config, ends, hidden, tokens, part)
        wide = hidden.astype(jnp.promote_types(hidden.dtype, jnp.float32))
        return jnp.sum(jnp.where(position[..., None] >= 0, wide**2, 0))

    return jax.grad(loss)(hidden)


@jax.jit
def _lengths(x: Float[Array, "B T E"]) -> Float[Array, "B T 1"]:
    return jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True)


def _cross_entropy(
    config: Config,
    ends: dict[str, Array],
    hidden: Float[Array, "B T E"],
    tokens: Int[Array, "B T"],
    part: Int[Array, "B 3"],
) -> Float[Array, ""]:
    """Return the cross-entropy of the tokens of each row's part, its last ones, summed."""
    T = tokens.shape[1]
    logits = logits_from(config, ends, hidden[:, :-1])
    own = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    counted = jnp.arange(1, T) >= T - (part[:, 1] - part[:, 0])[:, None]
    return jnp.sum(jnp.where(counted, jax.nn.logsumexp(logits, axis=-1) - own, 0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_constant(
    soft_cap: float | None,
    held: Pages,
    block: LayerBlock,
    window: Int[Array, ""] | None,
    sinks: Float[Array, "BK R 1"] | None,
) -> Float[Array, "B T N D"]:
    """Attend over a layer that is a constant, and the block behind it, of which alone a derivative is taken.

    Both directions read a head's slots a few pages at a time, those that it has: the weights of a few are held, never
    of all. The backward pass computes them again from each query's logarithm of the sum of exponentials
    (FlashAttention, arXiv 2205.14135, algorithms 1 and 4).

    Args:
        soft_cap, window: see :func:`kernels_pallas.cache_attention`.
        held: the layer, without the block.
        block: with keys and values as they would be in the cache.
        sinks: logits that each query's softmax begins with; see :func:`_of_rows`.
    """
    return _attended(soft_cap, held, block, window, sinks)[0]


class _Slots(NamedTuple):
    """Some slots of a head; keys and values are 0 where a slot is free."""

    key: Float[Array, "S D"]
    value: Float[Array, "S D"]
    position: Int[Array, "S"]
    bias: Float[Array, "S"] | None = None


def _attended(
    soft_cap: float | None,
    held: Pages,
    block: LayerBlock,
    window: Int[Array, ""] | None,
    sinks: Float[Array, "BK R 1"] | None,
) -> tuple[Float[Array, "B T N D"], tuple[Pages, LayerBlock, Array | None, Array, Array]]:
    """Return the output, and what the backward pass reads."""

    def of_head(table, query, key, value, position, *sinks):
        def with_slots(softmax, slots):
            logits = _logits(soft_cap, window, position, slots, query, slots.key)
            # Without the barriers XLA would compute the logits, and exp, once for each of what reads them.
            out, before, total = softmax
            logits = jax.lax.optimization_barrier(logits)
            peak = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
            from_peak = jnp.where(jnp.isfinite(peak), peak, 0)
            weights = jax.lax.optimization_barrier(jnp.exp(logits - from_peak))
            kept = jnp.exp(before - from_peak)
            out = kept * out + jnp.matmul(weights.astype(slots.value.dtype), slots.value, preferred_element_type=wide)
            return out, peak, kept * total + jnp.sum(weights, axis=1, keepdims=True)

        column = jnp.zeros((len(query), 1), wide)
        peak, total = (sinks[0].astype(wide), column + 1) if sinks else (column - jnp.inf, column)
        softmax = with_slots((jnp.zeros(query.shape, wide), peak, total), _Slots(key, value, position))
        out, peak, total = _over_pages(held, table, with_slots, softmax)
        nothing = total == 0  # for a query that is padding
        total = jnp.where(nothing, 1, total)
        return out / total, jnp.where(nothing, 0, peak) + jnp.log(total)

    wide = jnp.promote_types(block.query.dtype, jnp.float32)
    out, exponent = _each_head(of_head, held, block, *([] if sinks is None else [sinks]))
    return _of_heads(out, block.query).astype(block.query.dtype), (held, block, window, out, exponent)


def _derivative(
    soft_cap: float | None, kept: tuple[Pages, LayerBlock, Array | None, Array, Array], above: Float[Array, "B T N D"]
) -> tuple[None, LayerBlock, None, None]:
    """Return the derivative with respect to the block's queries, keys and values, from that of the output."""
    held, block, window, out, exponent = kept

    def of_head(table, query, key, value, position, out, exponent, above):
        along = jnp.sum(out * above, axis=1, keepdims=True)

        def of_slots(slots):
            logits_of = functools.partial(_logits, soft_cap, window, position, slots)
            logits, back = jax.vjp(logits_of, query, slots.key)
            weights = jax.lax.optimization_barrier(jnp.exp(logits - exponent))
            of_query, of_key = back(weights * (above @ slots.value.T.astype(above.dtype) - along))
            return of_query, of_key, weights.T @ above

        of_query, of_key, of_value = of_slots(_Slots(key, value, position))
        of_query = of_query.astype(out.dtype)
        of_query = _over_pages(held, table, lambda total, slots: total + of_slots(slots)[0], of_query)
        return of_query, of_key, of_value

    K = block.key.shape[2]
    found = _each_head(of_head, held, block, out, exponent, _by_head(above.astype(out.dtype), K))
    query, key, value = (_of_heads(x, like).astype(like.dtype) for x, like in zip(found, block[:3], strict=True))
    return None, LayerBlock(query, key, value, None), None, None  # type: ignore[arg-type]  # positions have none


_attend_constant.defvjp(_attended, _derivative)


def _logits(
    soft_cap: float | None,
    window: Int[Array, ""] | None,
    position: Int[Array, "T"],
    slots: _Slots,
    query: Float[Array, "R D"],
    key: Float[Array, "S D"],
) -> Float[Array, "R S"]:
    """Return the logits of a head's queries, -inf where a slot is not seen; the slots' own keys are not read."""
    wide = jnp.promote_types(query.dtype, jnp.float32)
    logits = jnp.einsum("rd,sd->rs", query, key, preferred_element_type=wide)
    logits = scaled(logits, query.shape[1] ** -0.5, soft_cap)
    if slots.bias is not None:
        logits = logits + slots.bias.astype(wide)
    visible = sees(jnp.tile(position, len(query) // len(position)), slots.position, window)
    return jnp.where(visible, logits, -jnp.inf)


def _over_pages[Carry](
    held: Pages, table: Int[Array, "M"], step: Callable[[Carry, _Slots], Carry], carry: Carry
) -> Carry:
    """Fold a step over the pages that a head has, a few at a time."""
    few = max(1, SLOTS // held.position.shape[1])
    table = jnp.pad(table, (0, -len(table) % few), constant_values=-1)

    def body(number: Array, carry: Carry) -> Carry:
        pages = jax.lax.dynamic_slice_in_dim(table, number * few, few)
        entries = jax.tree.map(lambda pool: laid_out(pool, pages), held.entries)
        position, end = slot_positions(held.position, pages), jnp.zeros(1, jnp.int32)
        here = floats_of(KVCache(entries=entries, position=position, next_position=end, rotated=held.rotated))
        key, value = (jnp.where(here.live[:, None], x, 0) for x in (here.key, here.value))  # 0 * NaN is NaN
        return step(carry, _Slots(key, value, here.position, here.bias))

    return jax.lax.fori_loop(0, -(-table_ends(table) // few), body, carry)


def _each_head(function: Callable[..., tuple[Array, ...]], held: Pages, block: LayerBlock, *others: Array) -> Any:
    """Run a function on the page table and the part of the block of each head: one at a time, but on a GPU or TPU."""
    tables, K = held.table.reshape(-1, held.table.shape[2]), block.key.shape[2]
    arrays = (*(_by_head(x, K) for x in block[:3]), jnp.repeat(block.position, K, axis=0), *others)
    together = None if platform() == "cpu" else len(tables)
    return jax.lax.map(lambda each: function(*each), (tables, *arrays), batch_size=together)


def _by_head(x: Float[Array, "B T heads D"], K: int) -> Float[Array, "BK R D"]:
    """Return the part of each KV head, with the tokens of each of its query heads behind one another."""
    B, T, heads, D = x.shape
    return x.reshape(B, T, K, heads // K, D).transpose(0, 2, 3, 1, 4).reshape(B * K, -1, D)


def _of_rows(of_heads: Float[Array, "N"], block: LayerBlock) -> Float[Array, "BK R 1"]:
    """Return a number per query head for each of the queries that :func:`_by_head` returns."""
    B, T, N, _ = block.query.shape
    return _by_head(jnp.broadcast_to(of_heads[:, None], (B, T, N, 1)), block.key.shape[2])


def _of_heads(x: Float[Array, "BK R D"], like: Float[Array, "B T heads D"]) -> Float[Array, "B T heads D"]:
    """Return what :func:`_by_head` took apart."""
    B, T, heads, D = like.shape
    return x.reshape(B, heads, T, D).swapaxes(1, 2)
