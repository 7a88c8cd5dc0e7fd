"""One attention for several policies that observe the same block."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax._src.border import OF_TOKENS, enter
from kvjax._src.cache import CACHE, KVCache, check_cache
from kvjax._src.chains import policy_of
from kvjax._src.eviction import Budget, Evidence, axes_of_evidence
from kvjax._src.insertion import checked_block
from kvjax._src.layer import (
    LayerBlock,
    ask,
    attend_heads,
    choosable,
    entering,
    heads_joined,
    inserted,
    prepared,
    shares_of,
    updated,
    with_scores,
)
from kvjax._src.observation import Context, Needs
from kvjax._src.policy import Policy
from kvjax._src.policy_checks import check_measured, check_policy, check_shapes, checked_budget


def observe_each(
    cache: KVCache,
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    position: Int[Array, "B T"] | None = None,
    *,
    policies: Sequence[Policy | str],
    budgets: Sequence[Budget],
    context: Context = Context(),
) -> tuple[Float[Array, "B T N D"], KVCache, tuple[Evidence, ...]]:
    """Run :func:`observe` for several policies at once, as long as none of them evicts: attention runs once for all.

    Attention runs once more for each further size of observation window, and for policies that read errors.

    Args:
        cache: a cache whose ``state`` is a tuple of the policies' states, in their order.
        policies: one or more; a policy may be repeated, for several budgets.
        budgets: for each policy, the budget that its shares refer to.

    Returns:
        The attention's output, the cache with the block in it, and each policy's evidence on the layer's slots.

    Raises:
        ValueError: if there is no policy, the number of budgets differs, or the cache was not made for these policies.

    Example:
        >>> import dataclasses, functools, jax, kvjax
        >>> policies = [kvjax.h2o(), kvjax.parse("tova(heads='group')+caote")]
        >>> cache = kvjax.KVCache.init(batch=1, kv_heads=1, slots=6, head_dim=4)
        >>> cache = dataclasses.replace(
        ...     cache, state=tuple(policy.state(1, 1, 2, 6, 4) for policy in policies)
        ... )
        >>> q = jax.random.normal(jax.random.key(0), (1, 6, 2, 4))
        >>> observe = jax.jit(
        ...     functools.partial(kvjax.observe_each, policies=policies, budgets=[2, 3])
        ... )
        >>> out, cache, said = observe(cache, q, q[:, :, :1], q[:, :, 1:])
        >>> [evidence.scores.shape for evidence in said]
        [(1, 1, 6), (1, 1, 6)]
    """
    parsed = [policy_of(policy) for policy in policies]
    chosen = [policy for policy in parsed if policy is not None]
    if len(chosen) < len(parsed) or not chosen or len(budgets) != len(chosen):
        raise ValueError("expected at least one policy, none of them 'full', and one budget for each policy.")
    check_cache(cache)
    if not isinstance(cache, KVCache) or not isinstance(cache.state, tuple) or len(cache.state) != len(chosen):
        raise ValueError(f"expected a KVCache whose state is a tuple of {len(chosen)}, one per policy in their order.")
    query, key, value = check_shapes(cache, query, key, value)
    of_shares = []
    for policy, state, budget in zip(chosen, cache.state, budgets, strict=True):
        own = dataclasses.replace(cache, state=state)
        check_policy(policy, own, query.shape[2] // cache.heads_shape[-1])
        check_measured(policy, None, cache.all_heads)
        of_shares.append(checked_budget(own, query, position, policy, budget, context)[1])
    key, value, position, _ = checked_block(cache, key, value, position, None, query_heads=query.shape[2])
    said = tuple(axes_of_evidence(cache, policy) for policy in chosen)
    entered = entering(LayerBlock(query, key, value, position), tuple(of_shares), context)
    return enter(cache, functools.partial(_observe_each, chosen), *entered, outputs=(OF_TOKENS, CACHE, said))


def _observe_each(
    policies: Sequence[Policy], cache: KVCache, block: LayerBlock, budgets: Sequence[Budget], context: Context
) -> tuple[Float[Array, "B T N D"], KVCache, tuple[Evidence, ...]]:
    """Observe a block on one device."""
    block, context = prepared(cache, block, context)
    cache = inserted(cache, block, context)
    together: dict[Any, Needs] = {}
    largest = max(policy.reads.window for policy in policies)
    for policy in policies:  # a policy that observes no window joins any
        kind = _observed(policy, largest)
        together[kind] = together.get(kind, Needs()) | policy.reads
    seen = {kind: attend_heads(cache, block, needs, context) for kind, needs in together.items()}
    said, states, heads = [], [], cache.first_head + jnp.arange(cache.heads_shape[-1])
    for policy, state, budget in zip(policies, cache.state, budgets, strict=True):
        _, columns, turned, here = seen[_observed(policy, largest)]
        own = dataclasses.replace(choosable(here, context), state=state)
        evidence, state = ask(policy, own, turned, columns, heads, shares_of(cache, budget), context)
        said.append(with_scores(heads_joined(policy, evidence, cache), own))
        states.append(state)
    return next(iter(seen.values()))[0], updated(cache, own.position, tuple(states), context), tuple(said)


def _observed(policy: Policy, largest: int) -> tuple[int, str | None]:
    """Return what tells the statistics of some policies from those of others: their window, and what they are of."""
    return policy.reads.window or largest, policy.reads.errors
