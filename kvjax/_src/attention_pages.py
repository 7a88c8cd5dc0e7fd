"""A block of one layer in a paged cache: attention, and what a policy says of the slots."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, Float, Int

from kernels_pallas import ColumnStatistics
from kernels_pallas.paged_attention.api import paged_attention_unchecked
from kvjax._src.cache import Entries, map_state, within
from kvjax._src.eviction import Budget, Evidence
from kvjax._src.layer import (
    LayerBlock,
    ask,
    attend_heads,
    attended,
    branches,
    choosable,
    frees,
    heads_joined,
    layer_index,
    prepared,
    promises_room,
    shares_of,
    with_scores,
)
from kvjax._src.moments import corrected_in_pages
from kvjax._src.observation import Context, Needs
from kvjax._src.paged import PagedCache
from kvjax._src.policy import Policy


def observe_pages(
    cache: PagedCache, policy: Policy | None, block: LayerBlock, budget: Budget | None, context: Context
) -> tuple[Float[Array, "B T N D"], PagedCache, Evidence | None]:
    """Observe a block in a paged cache, whose pages attention reads in place.

    Keys and values that a policy reads are copied one head at a time, as are keys that are turned before attention. A
    policy that reads neither is asked of all heads at once, unless its order is made in a branch.
    """
    needs = Needs() if policy is None else policy.reads
    block, context = prepared(cache, block, context)
    query, key, value, position = block
    (B, T, N, _), K, layer = query.shape, cache.heads_shape[-1], layer_index(cache, context)
    shares = shares_of(cache, budget)
    cache = cache.insert(key, value, position, layer, promises_room(policy, budget, context))
    turned = cache.positions == "compact"

    def heads_of(tree: Any, axis: int, head: Int[Array, ""]) -> Any:
        """Slice one KV head's part out of an axis of KV heads, or of query heads."""

        def take(x: Array) -> Array:
            size = x.shape[axis] // K
            return jax.lax.dynamic_slice_in_dim(x, head * size, size, axis)

        return jax.tree.map(take, tree)

    out: Any = None
    columns = ColumnStatistics()
    if not turned:
        table = cache.layer_table(layer)
        given: Any = dict(table=table, query_position=position)
        attention = functools.partial(
            paged_attention_unchecked, query, **cache.attended(needs.errors == "value"), **given
        )
        out, columns = attended(lambda slots, **options: attention(position=slots, **options), cache, needs, context)
        out = corrected_in_pages(out, cache, layer, query, position, context)
        if policy is None:
            return out, cache, None

    def of_head(head: Int[Array, ""], entries: Entries) -> tuple[Array | None, Any, Evidence | None]:
        own_columns: ColumnStatistics
        here = dataclasses.replace(cache, entries=entries).layer(layer, head)
        mine = block._replace(query=heads_of(query, 2, head))
        own = dataclasses.replace(
            context,
            projection=heads_of(context.projection, 0, head),
            predicted=heads_of(context.predicted, 2, head),
            sink_logits=heads_of(context.sink_logits, 0, head),
        )
        if turned:
            out, own_columns, mine, here = attend_heads(here, mine, needs, own)
            if policy is None:
                return out, (), None
        else:
            out, own_columns = None, heads_of(columns, 1, head)
        assert policy is not None
        # XLA copies only those parts of ``here`` that the policy reads.
        here, number = choosable(here, own), (cache.first_head + head)[None]
        evidence, state = ask(policy, here, mine, own_columns, number, shares, own)
        return out, state, with_scores(evidence, here)

    asked, heads = functools.partial(of_head, entries=cache.entries), jnp.arange(K)
    apart = branches(cache, needs, block, context) or _depends(of_head, heads[0], cache.entries)
    said: Any = jax.lax.map(asked, heads) if apart else jax.vmap(asked)(heads)
    heads_out, state, evidence = said
    if turned:
        out = jnp.moveaxis(heads_out, 0, 2).reshape(B, T, N, -1)
    if evidence is None or policy is None:
        return out, cache, None

    def joined(part: Array) -> Array:
        return part[:, :, 0].swapaxes(0, 1)  # [K, B, 1, ...] -> [B, K, ...]

    state = map_state(
        lambda whole, part: cache.write_layer(whole, joined(part), layer),
        lambda whole, part: joined(part) if layer is None else whole.at[layer].set(joined(part)),
        cache.state,
        state,
    )
    names = ("scores", "protected", "stays", "rank", "measured")  # of each head; the others are alike
    of_heads = {name: jax.tree.map(joined, getattr(evidence, name)) for name in names}
    shared = {name: jax.tree.map(lambda x: x[0], getattr(evidence, name)) for name in ("entered", "end", "window")}
    evidence = dataclasses.replace(evidence, **of_heads, **shared)
    evidence = heads_joined(policy, evidence, cache)
    evidence = dataclasses.replace(evidence, protected=None, ends=None)
    if frees(context):
        assert context.sliding_window is not None
        cache = within(cache, context.sliding_window, layer)
    return out, dataclasses.replace(cache, state=state), evidence


def _depends(function: Callable[..., Any], given: Any, arrays: Any) -> bool:
    """Return whether what a function makes of both arguments depends on the second one's arrays."""
    made = jax.make_jaxpr(function)(given, arrays).jaxpr
    _, used = dce_jaxpr(made, [True] * len(made.outvars))
    return any(used[len(jax.tree.leaves(given)) :])
