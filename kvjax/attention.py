"""One block of one layer under a budget: insert, attend, score, evict."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import cache_attention
from kvjax.cache import KVCache, insert
from kvjax.eviction import evict
from kvjax.policy import Observation, Policy, check_budget, retention_scores


def attend(
    cache: KVCache,
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    position: Int[Array, "B T"] | None = None,
    *,
    policy: Policy | None = None,
    budget: int | Int[Array, ""] | Int[Array, "B"] | None = None,
    excess: int | None = None,
    layer: int | Int[Array, ""] | None = None,
    sliding_window: Int[Array, ""] | int | None = None,
    scale: float | None = None,
    implementation: Literal["auto", "reference"] = "auto",
) -> tuple[Float[Array, "B T N D"], KVCache]:
    """Attention of a block over the cache and itself; afterwards each head holds at most ``budget`` tokens.

    The tokens go into free slots, the queries see all live slots that are not in their future, the policy scores the
    slots by what the block's attention said of them, and the worst are freed. With T = 1 this is a decode step.

    Args:
        cache: a cache with at least T free slots a head; its ``state`` is the policy's.
        query, key, value: of the block's tokens, rotated.
        position: their absolute positions, -1 for padding. By default they continue each row.
        policy: scores tokens; None stores all and scores nothing.
        budget: tokens that each head keeps, one number or one a row; None lets the policy observe, but evicts nothing.
        excess: a promise that no head will hold more than ``budget + excess`` tokens; see :func:`kvjax.evict`.
        layer: which layer of a stacked cache.
        sliding_window: how many positions a query sees; None for all.
        scale: factor of the logits, D ** -0.5 by default.
        implementation: of the attention; see :func:`kernels_pallas.cache_attention`.

    Returns:
        The attention's output and the cache.

    Raises:
        ValueError: shapes that do not fit, no room for the tokens (outside jit), a budget (an int) below 1 or smaller
            than what the policy protects.

    Example:
        >>> import jax, kvjax
        >>> policy = kvjax.parse("h2o+caote")
        >>> cache = kvjax.KVCache.init(batch=1, kv_heads=1, slots=6, head_dim=4, state=policy.init(1, 1, 2, 6))
        >>> for step in range(3):  # blocks of 2 tokens, of which 4 stay
        ...     q = jax.random.normal(jax.random.key(step), (1, 2, 2, 4))
        ...     out, cache = kvjax.attend(cache, q, q[:, :, :1], q[:, :, 1:], policy=policy, budget=4)
        >>> cache.num_live.tolist(), cache.next_position.tolist()
        ([[4]], [6])
    """
    if policy is not None and isinstance(budget, int):
        check_budget(policy, budget)
    B, T, N, _ = query.shape
    K = key.shape[2]
    if position is None:
        position = cache.next_position[:, None] + jnp.arange(T, dtype=jnp.int32)
    cache = insert(cache, key, value, position, layer=layer)
    here = cache
    if layer is not None:
        here = cache.layer(layer)
        # Taken out once: read again and again from the stacked arrays, XLA would copy those in every layer rather
        # than write the new positions and state in place.
        slot_position, state = jax.lax.optimization_barrier((here.position, here.state))
        here = dataclasses.replace(here, position=slot_position, state=state)
    out, columns = cache_attention(
        query,
        here.key,
        here.value,
        here.position,
        position,
        statistics=() if policy is None else policy.statistics,
        window=0 if policy is None else policy.window,
        sliding_window=sliding_window,
        scale=scale,
        implementation=implementation,
    )
    if policy is None:
        return out, cache
    S = here.num_slots
    slots_to_keep = jnp.broadcast_to(jnp.asarray(S if budget is None else budget, jnp.int32), (B,))
    observation = Observation(
        columns=jax.tree.map(lambda column: column.reshape(B, K, N // K, S), columns),
        query=query,
        query_position=position,
        key=here.key,
        value=here.value,
        position=here.position,
        next_position=here.next_position,
        budget=slots_to_keep,
        layer=jnp.asarray(0 if layer is None else layer, jnp.int32),
    )
    # Which tokens stay is a choice, not a function to differentiate: gradients flow through the attention alone.
    scores, state = retention_scores(policy, *jax.lax.stop_gradient((here.state, observation)))
    if layer is not None:
        state = jax.tree.map(lambda whole, part: whole.at[layer].set(part), cache.state, state)
    cache = dataclasses.replace(cache, state=state)
    if budget is None:
        return out, cache
    # A row without tokens in this block (not begun, or finished) is left as it is: its columns say nothing.
    slots_to_keep = jnp.where((position >= 0).any(axis=1), slots_to_keep, S)
    return out, evict(cache, scores, slots_to_keep, layer=layer, excess=excess)
