"""One block of one layer under a budget: insert, attend, score, evict; or all but the last."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax._src.attention_pages import observe_pages
from kvjax._src.border import OF_TOKENS, enter
from kvjax._src.cache import CACHE, KVCache
from kvjax._src.chains import policy_of
from kvjax._src.eviction import Budget, Evidence, axes_of_evidence, evict_by
from kvjax._src.insertion import checked_block
from kvjax._src.layer import (
    LayerBlock,
    ask,
    attend_heads,
    choosable,
    entering,
    heads_joined,
    inserted,
    layer_index,
    prepared,
    promises_room,
    shares_of,
    updated,
    with_scores,
)
from kvjax._src.layer_caches import LayerCaches, check_layer
from kvjax._src.observation import Context, Needs
from kvjax._src.paged import PagedCache
from kvjax._src.policy import Policy
from kvjax._src.policy_checks import check_measured, check_policy, check_shapes, checked_budget
from kvjax._src.split_cache import Cache

_TOGETHER = (
    "{!r} cannot evict from one layer of a {} cache of {} layers: take '{}@uniform' and a cache made for it, or "
    "kvjax.observe all layers and evict once, as in docs/how-to/your-own-model.md."
)


def attend(
    cache: Cache | LayerCaches,
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    position: Int[Array, "B T"] | None = None,
    *,
    policy: Policy | str | None = None,
    budget: Budget | None = None,
    context: Context = Context(),
) -> tuple[Float[Array, "B T N D"], Any]:
    """Attend over the cache and the block itself, then evict until each head holds at most ``budget`` tokens.

    The tokens are inserted into free slots, the queries see all live slots that are not in their future, the policy
    scores the slots from the block's attention, and the lowest are freed. With T = 1 this is a decode step.

    With a policy, tokens that have left ``context.sliding_window`` are freed first: the policy chooses among those that
    a later query can see, and the budget is at most the window.

    Args:
        cache: a cache with at least T free slots per head, so ``budget + T`` in all; its ``state`` is the policy's.
        query, key, value: of the block's tokens, rotated.
        position: their absolute positions, -1 for padding. By default they continue each row.
        policy: a policy or its short name; with None or "full" all tokens are stored and none is scored.
        budget: tokens that each head keeps (on average, under an uneven allocation), one number or one per row; with
            None the policy observes, but evicts nothing. A share is not accepted, for a block does not know how long
            its prompt is.
        context: what the layer provides: its number in a cache of several layers, a sliding window, and so on.

    Returns:
        The attention's output and the cache. Under jit, a row whose tokens do not fit into the cache is NaN from then
        on, unless ``context.excess`` promises that they do. Gradients flow through attention, but reverse mode does not
        support a paged cache, whose pages move in a loop of unknown length.

    Raises:
        ValueError: if shapes do not fit; if the tokens do not fit into the cache (under jit, into what a known budget
            leaves free); if a known budget is below 1 or smaller than what the policy protects; if the allocation
            needs the scores of all layers (use :func:`observe`); or if the policy scores tokens while they are repeated
            (:func:`kvjax.kvzip`), and this block repeats none.

    Example:
        >>> import functools, jax, kvjax, numpy as np
        >>> policy = "h2o+caote"
        >>> cache = kvjax.empty_cache(
        ...     policy, budget=4, block=2, kv_heads=1, query_heads=2, head_dim=4
        ... )
        >>> attend = jax.jit(functools.partial(kvjax.attend, policy=policy, budget=4))
        >>> # of 2 tokens, of which 4 in all stay
        >>> for block in np.random.default_rng(0).normal(size=(3, 1, 2, 4, 4)):
        ...     query, key, value = block[:, :, :2], block[:, :, 2:3], block[:, :, 3:]
        ...     out, cache = attend(cache, query, key, value)
        >>> cache.num_live.tolist(), cache.next_position.tolist()
        ([[4]], [6])
    """
    if isinstance(cache, LayerCaches):
        number, given, policy = check_layer(cache, context.layer), (query, key, value, position), policy_of(policy)
        if policy is not None and budget is not None and not policy.allocation.one_layer:
            raise ValueError(_TOGETHER.format(policy.name, "plain", len(cache.layers), policy.chain_name))
        own: Any
        context = dataclasses.replace(context, slots=cache.num_slots)
        out, own = attend(cache.layers[number], *given, policy=policy, budget=budget, context=context)
        return out, cache.with_layer(number, own)
    query, key, value = check_shapes(cache, query, key, value)
    policy, budget = checked_budget(cache, query, position, policy, budget, context)
    if policy is not None and budget is not None and len(cache.heads_shape) == 3:
        raise ValueError(_TOGETHER.format(policy.name, "paged", cache.heads_shape[0], policy.chain_name))
    if policy is not None and policy.repeats and budget is not None and context.reconstructed is None:
        raise ValueError(f"{policy.name!r} scores while the text is repeated; run models.prefill.")
    block = _checked(cache, query, key, value, position, policy, context)
    return attend_unchecked(cache, block, policy, budget, context)


def attend_unchecked(
    cache: Any, block: LayerBlock, policy: Policy | None, budget: Budget | None, context: Context
) -> tuple[Float[Array, "B T N D"], Any]:
    """Run :func:`attend` without its checks, for callers that have made the cache for the policy and the block."""

    def of_device(cache: Any, block: LayerBlock, budget: Budget | None, context: Context) -> tuple[Array, Any]:
        out, cache, evidence = _observe(cache, policy, block, budget, context)
        if evidence is None or budget is None:
            return out, cache
        if cache.paged:
            empty = Evidence.of_layers(cache, evidence.allocation, merging=evidence.merging)
            evidence = empty.with_layer(cache, None, evidence)
        elif context.slots is not None and cache.num_slots < context.slots:
            budget = jnp.where(budget > context.slots, budget, jnp.minimum(budget, cache.num_slots))
        return out, evict_by(cache, evidence, budget, excess=context.excess, implementation=context.implementation)

    return enter(cache, of_device, *entering(block, budget, context), outputs=(OF_TOKENS, CACHE))


def attend_only(
    cache: KVCache, query: Float[Array, "B T N D"], position: Int[Array, "B T"], context: Context
) -> Float[Array, "B T N D"]:
    """Attend over a plain cache into which nothing comes, unchecked: the tokens of the queries are in it."""

    def of_device(cache: KVCache, block: LayerBlock, context: Context) -> Array:
        return attend_heads(cache, block, Needs(), context)[0]

    block, _, given = entering(LayerBlock(query, query, query, position), None, context)  # no key or value is read
    return enter(cache, of_device, block, given, outputs=OF_TOKENS)


def observe(
    cache: Cache | LayerCaches,
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    position: Int[Array, "B T"] | None = None,
    *,
    policy: Policy | str | None,
    budget: Budget | None = None,
    context: Context = Context(),
) -> tuple[Float[Array, "B T N D"], Any, Evidence | None]:
    """Attend and score like :func:`attend`, but evict nothing: for allocations that compare the scores of all layers.

    Tokens that have left ``context.sliding_window`` are freed, unless there is no policy.

    Args:
        budget: the budget that the policy's shares refer to; all slots if None.

    Returns:
        The attention's output, the cache with the block in it, and the policy's evidence on the layer's slots, with
        scores ``[B, K, S]`` as in a plain cache, or in ``cache.layer(context.layer)`` (None without a policy).

    Example:
        >>> import jax, kvjax, numpy as np
        >>> policy = kvjax.parse("tova(heads='group')@model")
        >>> layer = kvjax.KVCache.init(batch=1, kv_heads=2, slots=4, head_dim=4)
        >>> cache = kvjax.LayerCaches((layer, layer, layer))
        >>> @jax.jit
        ... def block(cache, queries):
        ...     evidence = kvjax.Evidence.of_layers(cache, policy.allocation)
        ...     for layer, q in enumerate(queries):
        ...         context = kvjax.Context(layer=layer)
        ...         out, cache, said = kvjax.observe(
        ...             cache, q, q, q, policy=policy, context=context
        ...         )
        ...         evidence = evidence.with_layer(cache, layer, said)
        ...     return kvjax.evict(cache, evidence, budget=2)
        >>> cache = block(cache, np.random.default_rng(0).normal(size=(3, 1, 4, 2, 4)))
        >>> cache.num_live.sum().item()
        12
    """
    if isinstance(cache, LayerCaches):
        number, given = check_layer(cache, context.layer), (query, key, value, position)
        own: Any
        out, own, evidence = observe(cache.layers[number], *given, policy=policy, budget=budget, context=context)
        return out, cache.with_layer(number, own), evidence
    left: Any
    query, key, value = check_shapes(cache, query, key, value)
    policy, budget = checked_budget(cache, query, position, policy, budget, context)
    block = _checked(cache, query, key, value, position, policy, context)
    # What excess promises of an eviction says nothing of the blocks that are observed before it.
    out, left, evidence = observe_unchecked(cache, block, policy, budget, dataclasses.replace(context, excess=None))
    if evidence is not None and not cache.paged:
        evidence = with_scores(evidence, left)
    return out, left, evidence


def _checked(
    cache: Cache,
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    position: Int[Array, "B T"] | None,
    policy: Policy | None,
    context: Context,
) -> LayerBlock:
    """Return a block, after checks that it and the policy fit the cache."""
    N, K = query.shape[2], cache.heads_shape[-1]
    if policy is not None:
        check_policy(policy, cache.arrays, N // K)
        check_measured(policy, cache.heads_shape[0] if len(cache.heads_shape) == 3 else None, cache.all_heads)
    layer = layer_index(cache, context)
    promised = context.excess is not None
    key, value, position, _ = checked_block(cache, key, value, position, layer, query_heads=N, promised=promised)
    return LayerBlock(query, key, value, position)


def observe_unchecked(
    cache: Any, block: LayerBlock, policy: Policy | None, budget: Budget | None, context: Context
) -> tuple[Float[Array, "B T N D"], Any, Evidence | None]:
    """Run :func:`observe` without its checks; an even allocation's scores may still be :class:`kvjax.Weights`."""
    evidence = None if policy is None else axes_of_evidence(cache, policy)

    def of_device(cache: Any, *given: Any) -> tuple[Array, Any, Evidence | None]:
        return _observe(cache, policy, *given)

    return enter(cache, of_device, *entering(block, budget, context), outputs=(OF_TOKENS, CACHE, evidence))


@functools.singledispatch
def _observe(
    cache: Any, policy: Policy | None, block: LayerBlock, budget: Budget | None, context: Context
) -> tuple[Float[Array, "B T N D"], Any, Evidence | None]:
    """Observe a block on one device."""
    needs = Needs() if policy is None else policy.reads
    block, context = prepared(cache, block, context)
    cache = inserted(cache, block, context, promises_room(policy, budget, context))
    out, columns, block, here = attend_heads(cache, block, needs, context)
    if policy is None:
        return out, cache, None
    here, heads = choosable(here, context), cache.first_head + jnp.arange(cache.heads_shape[-1])
    evidence, state = ask(policy, here, block, columns, heads, shares_of(cache, budget), context)
    evidence = heads_joined(policy, evidence, cache)
    if not policy.allocation.even:
        evidence = with_scores(evidence, here)
    return out, updated(cache, here.position, state, context), evidence


_observe.register(PagedCache, observe_pages)
