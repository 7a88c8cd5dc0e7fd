"""One layer of a cache: attention over some of its heads, and what a policy says of their slots."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import ColumnStatistics, order_tokens
from kernels_pallas.cache_attention.api import cache_attention_unchecked
from kernels_pallas.dispatch import Implementation, platform
from kernels_pallas.order_tokens.reference import by_position
from kvjax._src.border import OF_QUERY_HEADS, OF_ROWS, OF_TOKENS, SAME, axes_of_budget, implementation_for
from kvjax._src.cache import KVCache, floats_of, up_to, within
from kvjax._src.compact_positions import next_index, turn_to_index, turn_to_rank
from kvjax._src.eviction import Budget, Evidence
from kvjax._src.moments import corrected
from kvjax._src.observation import Context, Needs, Observation, Weights
from kvjax._src.paged import PagedCache
from kvjax._src.policy import Policy, ends_of, join_heads, mark_protected, scores_of_weights, update_scores
from kvjax._src.projection import part_of
from kvjax._src.sampling import own_share
from kvjax._src.split_cache import Cache
from kvjax._src.topk import summed
from kvjax._src.window import join, observed


class LayerBlock(NamedTuple):
    """Hold a block in one layer: its queries, keys and values, rotated, and the tokens' positions, -1 for padding."""

    query: Float[Array, "B T N D"]
    key: Float[Array, "B T K D"]
    value: Float[Array, "B T K D"]
    position: Int[Array, "B T"]


def entering(block: LayerBlock, budget: Any, context: Context) -> tuple[tuple[Any, Any], ...]:
    """Return what enters a layer, each with how a mesh splits it; see :func:`kvjax._src.border.enter`."""
    of_text = context.frequency is None or context.frequency.shape[0] == 1  # one row of frequencies for all
    axes: Any = dict(
        layer=SAME, sliding_window=SAME, frequency=SAME if of_text else OF_ROWS, projection=OF_QUERY_HEADS,
        predicted=OF_TOKENS, reconstructed=OF_ROWS, tokens=OF_ROWS, gradient=OF_ROWS, input_length=OF_ROWS,
        sink_logits=OF_QUERY_HEADS,
    )  # fmt: skip
    own = {name: spec for name, spec in axes.items() if getattr(context, name) is not None}
    of_block: Any = LayerBlock(OF_TOKENS, OF_TOKENS, OF_TOKENS, OF_ROWS)
    return (block, of_block), (budget, axes_of_budget(budget)), (context, dataclasses.replace(context, **own))


def prepared(cache: KVCache | PagedCache, block: LayerBlock, context: Context) -> tuple[LayerBlock, Context]:
    """Return a block as insertion and attention take it, and the context."""
    N, K = block.query.shape[2], cache.heads_shape[-1]
    if block.key.shape[2] != K and K == N:  # a cache for each query head
        key, value = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (block.key, block.value))
        block = block._replace(key=key, value=value)
    if context.frequency is not None:
        context = dataclasses.replace(context, frequency=jax.lax.stop_gradient(context.frequency))
    return (block if cache.positions == "absolute" else _turned(cache, block, context)), context


def continues_order(needs: Needs, block: LayerBlock, context: Context) -> bool:
    """Return whether a block is a decode step that continues a policy's order; others sort."""
    return needs.order and block.position.shape[1] == 1 and context.excess == 1


def branches(cache: KVCache | PagedCache, needs: Needs, block: LayerBlock, context: Context) -> bool:
    """Return whether a block's order is made in a branch; under vmap the other one, a sort, would run, too."""
    by_kernel = platform() == "gpu" and _beside_attention(cache, context) == "auto"
    return continues_order(needs, block, context) and not by_kernel


def _turned(cache: KVCache | PagedCache, block: LayerBlock, context: Context) -> LayerBlock:
    """Return a block with the rotations at which it is stored, for a cache that turns keys."""
    context.rotary(f"positions={cache.positions!r} turn keys")
    if cache.positions != "index":
        return block
    first = next_index(own_layer(cache, context), block.position, context)
    query, key = turn_to_index(first, block.query, block.key, block.position, context)
    return block._replace(query=query, key=key)


def shares_of(cache: Cache, budget: Budget | None) -> Int[Array, "B"]:
    """Return the budget that a policy's shares refer to, for each row."""
    B = cache.heads_shape[-2]
    return jnp.broadcast_to(jnp.asarray(cache.num_slots if budget is None else budget, jnp.int32), (B,))


def promises_room(policy: Policy | None, budget: Budget | None, context: Context) -> bool:
    """Return whether the caller promises that the block fits; see ``Context.excess``."""
    return policy is not None and budget is not None and context.excess is not None


def layer_index(cache: Cache, context: Context) -> int | Int[Array, ""] | None:
    """Return the context's layer if the cache has pages of several layers, else None."""
    return context.layer if len(cache.heads_shape) == 3 else None


def own_layer(cache: KVCache | PagedCache, context: Context) -> KVCache:
    """Return a plain cache itself, and of a paged one a copy of the layer, of whose parts XLA makes those it reads."""
    return cache if isinstance(cache, KVCache) else cache.layer(layer_index(cache, context))


def updated(cache: KVCache, chosen: Int[Array, "B K S"], state: Any, context: Context) -> KVCache:
    """Return a cache with a policy's state, and only the tokens ``chosen`` where a sliding window frees others."""
    return dataclasses.replace(cache, position=chosen if frees(context) else cache.position, state=state)


def frees(context: Context) -> bool:
    """Return whether a block frees the tokens behind the sliding window: not if it will be taken back, with no loss."""
    return context.sliding_window is not None and context.reconstructed is None


def choosable(here: KVCache, context: Context) -> KVCache:
    """Return a layer with the tokens that the policy chooses among, those that a query after the block can see."""
    if context.reconstructed is not None:  # the copies are taken back
        return up_to(here, context.reconstructed.end)
    return within(here, context.sliding_window) if context.sliding_window is not None else here


def inserted(cache: KVCache, block: LayerBlock, context: Context, room: bool = False) -> KVCache:
    """Return a plain cache with a block in it; see :meth:`KVCache.insert`."""
    how = _beside_attention(cache, context)
    return cache.insert(block.key, block.value, block.position, room=room, implementation=how)


def _beside_attention(cache: KVCache | PagedCache, context: Context) -> Implementation:
    """Return the implementation of an operation that a kernel of attention, given by name, says nothing of."""
    return "reference" if context.implementation == "reference" else implementation_for("auto", cache)


def attend_heads(
    here: KVCache, block: LayerBlock, needs: Needs, context: Context
) -> tuple[Float[Array, "B T heads D"], ColumnStatistics, LayerBlock, KVCache]:
    """Attend over some heads of a layer; also return the block and the layer with the rotations that attention used."""
    if here.positions == "compact":
        here, query = turn_to_rank(floats_of(here), block.query, block.position, context)
        block = block._replace(query=query)
    if context.filled is not None and context.reconstructed is None:
        out, columns = _attend_first(here, block, needs, context, context.filled)
        return corrected(out, here, block.query, block.position, context), columns, block, here
    given: Any = dict(query_position=block.position)
    attention = functools.partial(
        cache_attention_unchecked, block.query, **here.attended(needs.errors == "value"), **given
    )
    out, columns = attended(lambda slots, **options: attention(key_position=slots, **options), here, needs, context)
    return corrected(out, here, block.query, block.position, context), columns, block, here


def _attend_first(
    here: KVCache, block: LayerBlock, needs: Needs, context: Context, filled: int
) -> tuple[Float[Array, "B T heads D"], ColumnStatistics]:
    """Attend over the first slots of a layer, where the others are free: their statistics are 0."""
    entries = here.attended(needs.errors == "value")
    entries, slot_position = jax.tree.map(lambda x: x[:, :, :filled], (entries, here.position))
    given: Any = dict(key_position=slot_position, query_position=block.position)
    out, columns = cache_attention_unchecked(block.query, **entries, **given, **attention_options(here, needs, context))
    spare = max(here.num_slots - filled, 0)
    return out, jax.tree.map(lambda column: jnp.pad(column, [(0, 0)] * (column.ndim - 1) + [(0, spare)]), columns)


def attended(
    attention: Callable[..., tuple[Array, ColumnStatistics]],
    cache: KVCache | PagedCache,
    needs: Needs,
    context: Context,
) -> tuple[Array, ColumnStatistics]:
    """Attend over all slots; the statistics are those of the part that is observed, where a prompt is repeated."""
    if context.reconstructed is None or context.reconstructed.sinks is None:
        return attention(cache.position, **attention_options(cache, needs, context))
    out, _ = attention(cache.position, **attention_options(cache, Needs(), context))
    visible = context.reconstructed.visible(cache.position, cache.batch_rows())
    return out, attention(visible, **attention_options(cache, needs, context))[1]


def attention_options(cache: KVCache | PagedCache, needs: Needs, context: Context) -> dict[str, Any]:
    """Return the arguments that attention over slots and attention over pages share."""
    statistics = needs.statistics | observed(needs.statistics)
    if needs.reconstruction is not None and context.reconstructed is not None:
        statistics |= needs.reconstruction.statistics
    return dict(
        statistics=statistics,
        window=needs.window,
        errors=needs.errors is not None,
        projection=part_of(context.projection, "factor") if needs.errors == "output" else None,
        query_scale=_query_scale(context),
        sliding_window=context.sliding_window,
        scale=context.factor(cache.head_dim),
        soft_cap=context.soft_cap,
        sink_logits=context.sink_logits,
        implementation=implementation_for(context.implementation, cache),
    )


def _query_scale(context: Context) -> Float[Array, "B T"] | None:
    """Return what each query's weights are multiplied by in the statistic "scaled_max"; None for nothing."""
    if context.gradient is not None:
        return jnp.linalg.norm(context.gradient.astype(jnp.float32), axis=-1)
    if context.input_length is not None:
        return 1 / jnp.maximum(context.input_length.astype(jnp.float32), jnp.finfo(jnp.float32).tiny)
    return None


def ask(
    policy: Policy,
    here: KVCache,
    block: LayerBlock,
    columns: ColumnStatistics,
    head: Int[Array, "K"],
    budget: Int[Array, "B"],
    context: Context,
) -> tuple[Evidence, Any]:
    """Have the policy score some heads of a layer that hold what it chooses among; return evidence and new state."""
    here = floats_of(here)
    B, K = here.position.shape[:2]
    entered = jnp.sum(block.position >= 0, axis=1, dtype=jnp.int32)
    columns = jax.tree.map(lambda column: column.reshape(B, K, -1, *column.shape[2:]), columns)
    order, kept, how = None, here.state, _beside_attention(here, context)
    if policy.needs.order:
        ordered = by_position
        if continues_order(policy.needs, block, context):
            shifts = context.sliding_window is not None
            ordered = functools.partial(order_tokens, kept.rank, shifts=shifts, implementation=how)
        order = ordered(here.position)
        kept = kept.others
    window, remembered = kept if observed(policy.reads.statistics) else (None, kept)
    if window is not None:
        columns, window = jax.lax.stop_gradient(join(window, columns, entered, policy.reads.window, how))
    if context.sliding_window is not None:
        budget = jnp.minimum(budget, context.sliding_window)
    seen = columns
    if frees(context):  # what a block took back sees was seen by its queries, copies too
        columns = _of_live(here, columns)
    of_cache = here.key, here.value, here.position, here.next_position
    own = dataclasses.replace(context, implementation=how)  # that of what links run
    left = None
    if context.sink_logits is not None and policy.needs.errors is None:
        left = _left(policy.needs.statistics, seen, columns, entered)
    if policy.draws:
        columns = own_share(columns, here.bias)
    observation = Observation(
        columns, block.query, block.position, *of_cache, budget, head=head, context=own, order=order, left=left,
    )  # fmt: skip
    # The choice of the tokens that stay is not differentiable: gradients flow through attention alone.
    state, observation = jax.lax.stop_gradient((remembered, mark_protected(policy, observation)))
    scores, stays, new = update_scores(policy, state, observation)
    new = new if window is None else (window, new)
    if order is not None:
        new = dataclasses.replace(here.state, others=new)
    state = jax.tree.map(lambda leaf, old: leaf.astype(old.dtype), new, here.state)  # float64 inputs would widen it
    measure = policy.allocation.measure
    evidence = Evidence(
        scores,
        entered=entered,
        protected=observation.protected,
        ends=ends_of(policy, observation),
        stays=stays,
        rank=None if order is None else order.rank,
        measured=None if measure is None else measure(observation),
        end=context.end,
        window=None if context.sliding_window is None else jnp.asarray(context.sliding_window, jnp.int32),
        allocation=policy.allocation,
        merging=policy.merging,
    )
    return evidence, state


def _left(
    read: frozenset[str], seen: ColumnStatistics, live: ColumnStatistics, queries: Int[Array, "B"]
) -> Float[Array, "B K G 1"] | None:
    """Return the share of the queries' attention that sinks leave to the tokens, in the mean, by what the score reads.

    ``seen`` still has the attention to tokens that have left the sliding window, ``live`` has 0 for them.
    """
    name = next((name for name in ("window_mean", "last", "sum") if name in read), None)
    if name is None:
        return None
    queries = queries[:, None, None, None]
    several = jnp.maximum(queries, 1) if name == "sum" else 1
    whole, left = (jnp.sum(getattr(of, name), axis=3, keepdims=True) / several for of in (seen, live))
    sinks = jnp.maximum(1 - whole, 0)
    return jnp.where(queries > 0, jnp.where(left > 0, left / (left + sinks), 0), 1)


def _of_live(here: KVCache, columns: ColumnStatistics) -> ColumnStatistics:
    """Return the statistics with 0 for the slots that are out of the sliding window."""
    live = lambda column: jnp.expand_dims(here.live, tuple(range(2, column.ndim - 1)))  # noqa: E731
    return jax.tree.map(lambda column: jnp.where(live(column), column, 0), columns)


def heads_joined(policy: Policy, evidence: Evidence, cache: KVCache | PagedCache) -> Evidence:
    """Join what all heads of a layer have said, but for CAOTE's weights; see :func:`kvjax._src.policy.join_heads`."""
    if isinstance(evidence.scores, Weights):
        return evidence
    assert evidence.protected is not None
    over_devices = functools.partial(summed, axis=cache.axis)
    scores = join_heads(policy, evidence.scores, evidence.stays, evidence.protected, cache.all_heads, over_devices)
    return dataclasses.replace(evidence, scores=scores, stays=None)


def with_scores(evidence: Evidence, here: KVCache) -> Evidence:
    """Compute the scores if the evidence still holds :class:`kvjax.Weights`."""
    if not isinstance(evidence.scores, Weights):
        return evidence
    value = jax.lax.stop_gradient(floats_of(here).value)
    scores = scores_of_weights(evidence.scores, value, here.live, evidence.protected)
    return dataclasses.replace(evidence, scores=scores)
