"""A block of one layer in a paged cache, on one device or on a mesh: attention and what a policy says of the slots."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from kernels_pallas import ColumnStatistics, paged_attention
from kvjax.cache import HeadState
from kvjax.eviction import Budget, Evidence
from kvjax.insertion import within
from kvjax.layer import (
    ask,
    attend_heads,
    attended,
    choosable,
    frees,
    layer_index,
    of_layer,
    prepared,
    shares_of,
    with_scores,
)
from kvjax.observation import Context, Needs
from kvjax.paged import PagedCache, insert_paged, write_layer
from kvjax.policy import Policy
from kvjax.split import HEADS, PARTS, ROWS, SplitCache
from kvjax.topk import summed


def observe_pages(
    cache: PagedCache,
    query: Float[Array, "B T N D"],
    position: Int[Array, "B T"],
    policy: Policy | None,
    budget: Int[Array, "B"],
    context: Context,
) -> tuple[Float[Array, "B T N D"], PagedCache, Evidence | None]:
    """Observe a block in a paged cache, whose pages attention reads in place.

    What else a policy reads of the pages is copied one head at a time. So are keys that are turned before attention.
    """
    B, T, N, _ = query.shape
    K, layer = cache.heads_shape[-1], layer_index(cache, context)
    needs = Needs() if policy is None else policy.needs
    turned = cache.positions == "compact"
    out: Any = None
    columns = ColumnStatistics()
    if not turned:
        table = cache.layer_table(layer)
        attention = functools.partial(paged_attention, query, **cache.rows, table=table, query_position=position)
        out, columns = attended(lambda slots, **options: attention(position=slots, **options), cache, needs, context)
        if policy is None:
            return out, cache, None

    def heads_of(tree: Any, axis: int, head: Int[Array, ""]) -> Any:
        """Slice one KV head's part out of an axis of KV heads, or of query heads."""

        def take(x: Array) -> Array:
            size = x.shape[axis] // K
            return jax.lax.dynamic_slice_in_dim(x, head * size, size, axis)

        return jax.tree.map(take, tree)

    def of_head(head: Int[Array, ""]) -> tuple[Array | None, Any, Evidence | None]:
        own_columns: ColumnStatistics
        here, mine = cache.layer(layer, head), heads_of(query, 2, head)
        own = dataclasses.replace(
            context, projection=heads_of(context.projection, 0, head), predicted=heads_of(context.predicted, 2, head)
        )
        if turned:
            out, own_columns, mine, here = attend_heads(here, mine, position, needs, own, None)
            if policy is None:
                return out, (), None
        else:
            out, own_columns = None, heads_of(columns, 1, head)
        assert policy is not None
        # XLA copies only those parts of ``here`` that the policy reads.
        here, number = choosable(here, own), (cache.first_head + head)[None]
        evidence, state = ask(policy, here, mine, position, own_columns, number, budget, own)
        return out, state, with_scores(evidence, here)

    heads_out, state, evidence = jax.lax.map(of_head, jnp.arange(K))
    if turned:
        out = jnp.moveaxis(heads_out, 0, 2).reshape(B, T, N, -1)
    if evidence is None or policy is None:
        return out, cache, None

    def put(whole: Any, part: Any) -> Any:
        if isinstance(part, HeadState):
            value = part.value[:, :, 0].swapaxes(0, 1)  # [K, B, 1, ...] -> [B, K, ...]
            return HeadState(value if layer is None else whole.value.at[layer].set(value))
        return write_layer(cache, whole, part[:, :, 0].swapaxes(0, 1), layer)

    state = jax.tree.map(put, cache.state, state, is_leaf=lambda leaf: isinstance(leaf, HeadState))
    names = ("scores", "protected", "stays", "measured")  # of each head; the others are alike
    of_heads = {name: jax.tree.map(lambda x: x[:, :, 0].swapaxes(0, 1), getattr(evidence, name)) for name in names}
    shared = {name: jax.tree.map(lambda x: x[0], getattr(evidence, name)) for name in ("entered", "end", "window")}
    evidence = dataclasses.replace(evidence, **of_heads, **shared)
    evidence = of_layer(policy, evidence, cache.all_heads, functools.partial(summed, axis=cache.axis))
    evidence = dataclasses.replace(evidence, protected=None)
    if frees(context):
        assert context.sliding_window is not None
        cache = within(cache, context.sliding_window, layer)
    return out, dataclasses.replace(cache, state=state), evidence


def observe_parts(
    cache: SplitCache,
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    position: Int[Array, "B T"],
    policy: Policy | None,
    budget: Budget | None,
    context: Context,
) -> tuple[Float[Array, "B T N D"], SplitCache, Evidence | None]:
    """Observe a block on each device of a mesh, for its own rows and heads."""
    B = query.shape[0]
    rows, heads = PartitionSpec(ROWS), PartitionSpec(ROWS, None, HEADS)
    of_text = context.frequency is None or context.frequency.shape[0] == 1  # one row of frequencies for all
    axes: Any = dict(
        layer=PartitionSpec(), sliding_window=PartitionSpec(), frequency=PartitionSpec() if of_text else rows,
        projection=PartitionSpec(HEADS), predicted=heads, reconstructed=rows, tokens=rows,
        gradient=rows,
    )  # fmt: skip
    given = {name: spec for name, spec in axes.items() if getattr(context, name) is not None}
    if budget is not None:
        budget = jnp.broadcast_to(jnp.asarray(budget, jnp.int32), (B,))

    def of_part(part: PagedCache, query: Array, key: Array, value: Array, position: Any, budget: Any, context: Context):
        query, key, value, context = prepared(part, query, key, value, position, context)
        part = insert_paged(part, key, value, position, layer_index(part, context))
        return observe_pages(part, query, position, policy, shares_of(part, budget), context)

    out, parts, evidence = cache.read(
        of_part,
        (query, heads),
        (key, heads),
        (value, heads),
        (position, rows),
        (budget, rows),
        (context, dataclasses.replace(context, **given)),
        outputs=(heads, PARTS, PARTS),
    )
    return out, SplitCache(parts), evidence
