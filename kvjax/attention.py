"""One block of one layer under a budget: insert, attend, score, evict.

attend         observes, then evicts
observe        inserts the block, attends over all live slots, and has the policy score them
observe_each   has several policies score them at once
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from kernels_pallas import ColumnStatistics, cache_attention, paged_attention
from kernels_pallas.dispatch import platform
from kvjax.cache import HeadState, KVCache, by_position, floats_of, insert_plain, put_back
from kvjax.checks import check_tokens, is_known, plain
from kvjax.eviction import Evidence, evict
from kvjax.insertion import (
    Cache,
    arrays_of,
    batch_rows,
    check_block,
    check_fits,
    checked_block,
    next_positions,
    up_to,
    within,
)
from kvjax.making import excess_of_part
from kvjax.observation import Context, Needs, Observation, Weights
from kvjax.paged import PagedCache, insert_paged, pages_for, write_layer
from kvjax.policy import Policy, check_budget, check_measured, joined, mark_protected, policy_of, update_scores
from kvjax.rotary import move
from kvjax.split import HEADS, PARTS, ROWS, SplitCache
from kvjax.topk import summed
from kvjax.window import join, observed

Budget = int | Int[Array, ""] | Int[Array, "B"]


def attend(
    cache: Cache,
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    position: Int[Array, "B T"] | None = None,
    *,
    policy: Policy | str | None = None,
    budget: Budget | None = None,
    excess: int | None = None,
    context: Context = Context(),
) -> tuple[Float[Array, "B T N D"], Cache]:
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
        excess: a promise that no head will hold more than ``budget + excess`` tokens; see :func:`kvjax.evict`.
        context: what the layer provides: its number in a stacked cache, a sliding window, and so on.

    Returns:
        The attention's output and the cache. Gradients flow through attention, but reverse mode does not support a
        paged cache, whose pages move in a loop of unknown length.

    Raises:
        ValueError: if shapes do not fit; if the tokens do not fit into the cache (under jit, into what a known budget
            leaves free); if a known budget is below 1 or smaller than what the policy protects; or if the allocation
            needs the scores of all layers (use :func:`observe`).

    Example:
        >>> import jax, kvjax
        >>> policy = kvjax.parse("h2o+caote")
        >>> cache = kvjax.KVCache.init(batch=1, kv_heads=1, slots=6, head_dim=4, state=policy.init(1, 1, 2, 6, 4))
        >>> for step in range(3):  # blocks of 2 tokens, of which 4 stay
        ...     q = jax.random.normal(jax.random.key(step), (1, 2, 2, 4))
        ...     out, cache = kvjax.attend(cache, q, q[:, :, :1], q[:, :, 1:], policy=policy, budget=4)
        >>> cache.num_live.tolist(), cache.next_position.tolist()
        ([[4]], [6])
    """
    policy, budget = _checked(cache, query, position, policy, budget, excess, context)
    stacked = len(cache.heads_shape) == 3
    together = stacked and policy is not None and not (policy.allocation.one_layer and isinstance(cache, KVCache))
    if policy is not None and budget is not None and together:
        kind = "plain" if isinstance(cache, KVCache) else "paged"
        raise ValueError(
            f"{policy.name!r} cannot evict from one layer of a {kind} cache of {cache.heads_shape[0]} layers: observe "
            "each layer with kvjax.observe, then evict once."
        )
    out, cache, evidence = _observe(cache, query, key, value, position, policy, budget, context)
    if evidence is None or budget is None:
        return out, cache
    if not isinstance(cache, KVCache):
        empty = Evidence.of_layers(cache, evidence.allocation, merging=evidence.merging)
        evidence = empty.with_layer(cache, None, evidence)
    layer = _index(cache, context)
    return out, evict(cache, evidence, budget, layer=layer, excess=excess, implementation=context.implementation)


def observe(
    cache: Cache,
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    position: Int[Array, "B T"] | None = None,
    *,
    policy: Policy | str | None,
    budget: Budget | None = None,
    context: Context = Context(),
) -> tuple[Float[Array, "B T N D"], Cache, Evidence | None]:
    """Attend and score like :func:`attend`, but evict nothing: for allocations that compare the scores of all layers.

    Tokens that have left ``context.sliding_window`` are freed, unless there is no policy.

    Args:
        budget: the budget that the policy's shares refer to; all slots if None.

    Returns:
        The attention's output, the cache with the block in it, and the policy's evidence on the layer's slots, with
        scores ``[B, K, S]`` as in ``cache.layer(context.layer)`` (None without a policy).

    Example:
        >>> import jax, kvjax
        >>> policy = kvjax.parse("tova(heads='group')@model")
        >>> cache = kvjax.KVCache.init(batch=1, kv_heads=2, slots=4, head_dim=4, layers=3)
        >>> evidence = kvjax.Evidence.of_layers(cache, policy.allocation)
        >>> for layer in range(3):
        ...     q = jax.random.normal(jax.random.key(layer), (1, 4, 2, 4))
        ...     out, cache, said = kvjax.observe(cache, q, q, q, jax.numpy.arange(4)[None], policy=policy,
        ...                                      context=kvjax.Context(layer=layer))
        ...     evidence = evidence.with_layer(cache, layer, said)
        >>> cache = kvjax.evict(cache, evidence, budget=2)
        >>> cache.num_live.sum().item()
        12
    """
    policy, budget = _checked(cache, query, position, policy, budget, None, context)
    out, cache, evidence = _observe(cache, query, key, value, position, policy, budget, context)
    if evidence is not None and isinstance(cache, KVCache):
        layer = _index(cache, context)
        evidence = _with_scores(evidence, cache if layer is None else cache.layer(layer))
    return out, cache, evidence


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

    Attention runs once more for each further size of observation window.

    Args:
        cache: a cache whose ``state`` is a tuple of the policies' states, in their order.
        policies: one or more; a policy may be repeated, for several budgets.
        budgets: for each policy, the budget that its shares refer to.

    Returns:
        The attention's output, the cache with the block in it, and each policy's evidence on the layer's slots.

    Raises:
        ValueError: if there is no policy, the number of budgets differs, or the cache was not made for these policies.

    Example:
        >>> import dataclasses, jax, kvjax
        >>> policies = [kvjax.h2o(), kvjax.parse("tova(heads='group')+caote")]
        >>> cache = kvjax.KVCache.init(batch=1, kv_heads=1, slots=6, head_dim=4)
        >>> cache = dataclasses.replace(cache, state=tuple(policy.state(1, 1, 2, 6, 4) for policy in policies))
        >>> q = jax.random.normal(jax.random.key(0), (1, 6, 2, 4))
        >>> out, cache, said = kvjax.observe_each(cache, q, q[:, :, :1], q[:, :, 1:], policies=policies, budgets=[2, 3])
        >>> [evidence.scores.shape for evidence in said]
        [(1, 1, 6), (1, 1, 6)]
    """
    parsed = [policy_of(policy) for policy in policies]
    chosen = [policy for policy in parsed if policy is not None]
    if len(chosen) < len(parsed) or not chosen or len(budgets) != len(chosen):
        raise ValueError(
            f"{len(chosen)} policies and {len(budgets)} budgets were given; expected one budget for each policy, at "
            "least one policy, and none of them 'full'."
        )
    if not isinstance(cache, KVCache) or not isinstance(cache.state, tuple) or len(cache.state) != len(chosen):
        raise ValueError(
            f"expected a KVCache whose state is a tuple of {len(chosen)}, one state per policy in their order."
        )
    checked = []
    for policy, state, budget in zip(chosen, cache.state, budgets, strict=True):
        own = dataclasses.replace(cache, state=state)
        check_policy(policy, own, query.shape[2] // cache.heads_shape[-1])
        checked.append(_checked(own, query, position, policy, budget, None, context)[1])
    query, key, value, position, context = _prepared(cache, query, key, value, position, context)
    cache, taken = _inserted(cache, key, value, position, context)
    together: dict[int, Needs] = {}
    largest = max(policy.needs.window for policy in chosen)
    for policy in chosen:  # a policy that observes no window joins any
        window = policy.needs.window or largest
        together[window] = together.get(window, Needs()) | policy.needs
    seen = {window: _attention(taken, query, position, needs, context, cache) for window, needs in together.items()}
    said, states, heads = [], [], jnp.arange(cache.heads_shape[-1])
    for policy, state, budget in zip(chosen, taken.state, checked, strict=True):
        _, columns, turned, here = seen[policy.needs.window or largest]
        own = dataclasses.replace(_choosable(here, context), state=state)
        evidence, state = _ask(policy, own, turned, position, columns, heads, _shares_of(cache, budget), context)
        said.append(_with_scores(evidence, own))
        states.append(state)
    return seen[largest][0], _updated(cache, taken, own.position, tuple(states), context), tuple(said)


def _checked(
    cache: Cache,
    query: Float[Array, "B T N D"],
    position: Int[Array, "B T"] | None,
    policy: Policy | str | None,
    budget: Budget | None,
    excess: int | None,
    context: Context,
) -> tuple[Policy | None, Any]:
    """Return the policy and the budget (int32) of a block, after checks that they are valid and that the block fits."""
    policy, T = policy_of(policy), query.shape[1]
    if len(cache.heads_shape) == 3 and context.layer is None:
        raise ValueError("the cache stacks layers; give the number of one with context=kvjax.Context(layer=...).")
    known = not isinstance(cache, SplitCache) and is_known(cache.position, position, context.layer)
    if not known:  # else insert checks the cache's contents
        check_fits(cache, T, position)
    if budget is None:
        return policy, None
    if policy is None:
        raise ValueError(f"a budget of {budget} was given without a policy that says what to keep; try 'snapkv+caote'.")
    if isinstance(plain(budget), float):
        raise ValueError(
            f"the budget is {budget}, a share, but a block does not know the length of its prompt: give "
            "tokens per head, an int."
        )
    B = cache.heads_shape[-2]
    budget = check_tokens(budget, (B,))
    if not is_known(budget):
        return policy, budget
    for number in np.unique(budget):
        check_budget(policy, int(number))
    if not known:
        entering = T if excess is None else min(T, excess)
        _check_room(cache, policy, np.broadcast_to(budget, B), entering, context.sliding_window)
    return policy, np.asarray(budget, np.int32)


def _check_room(
    cache: Cache, policy: Policy, budget: np.ndarray, entering: int, window: int | Int[Array, ""] | None
) -> None:
    """Check that the cache has room for ``entering`` tokens when each head may already hold its budget.

    A block that fills the whole cache can only be the first one, and fits. In a model with sliding windows pages are
    counted for this layer alone: others may have smaller windows.
    """
    if entering == cache.num_slots and isinstance(cache, KVCache):
        return
    if window is not None and is_known(window):
        budget = np.minimum(budget, int(window))
    elif window is not None and not isinstance(cache, KVCache):
        return
    *L, B, K = cache.heads_shape
    layers = L[0] if L else 1
    held = policy.allocation.most(layers, K, int(budget.max()))
    if held + entering > cache.num_slots:
        raise ValueError(
            f"a head may hold {held} tokens when {entering} more come in, but the cache has {cache.num_slots} slots "
            f"per head: make it with {held + entering}, or give a smaller budget or block."
        )
    if not isinstance(cache, KVCache):
        windows = (None,) * layers if window is None else (int(window),)
        devices, ways = cache.ways if isinstance(cache, SplitCache) else (1, 1)
        heads = len(windows) * K // ways  # those of other rows have no pages to give

        def pages(row: int) -> int:
            more = excess_of_part(policy.allocation, K, row, windows, ways) if window is None else 0
            return pages_for(heads * (row + entering) + K // ways * more, heads, cache.page_size)

        needed = max(sum(pages(int(row)) for row in rows) for rows in budget.reshape(devices, -1))
        if needed > cache.num_pages:
            raise ValueError(
                f"{B // devices * heads} heads may hold {np.mean(budget):g} tokens each on average when {entering} "
                f"more come in, for which {needed} pages of {cache.page_size} slots are needed, but the cache has "
                f"{cache.num_pages}: make it with that many (kvjax.pages_for)."
            )


def _observe(
    cache: Cache,
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    position: Int[Array, "B T"] | None,
    policy: Policy | None,
    budget: Budget | None,
    context: Context,
) -> tuple[Float[Array, "B T N D"], Cache, Evidence | None]:
    """Run :func:`observe`; where a policy ends in CAOTE, scores may still be :class:`kvjax.observation.Weights`."""
    *L, _, K = cache.heads_shape
    if policy is not None:
        check_policy(policy, arrays_of(cache), query.shape[2] // K)
        check_measured(policy, L[0] if L else None, cache.all_heads if isinstance(cache, PagedCache) else K)
    if isinstance(cache, SplitCache):
        kv_heads = key.shape[2] if key.ndim == 4 and query.shape[2] == K else K  # a cache of the query heads
        check_block(cache, key, value, position, _index(cache, context), kv_heads)
        return _observe_parts(cache, query, key, value, position, policy, budget, context)
    query, key, value, position, context = _prepared(cache, query, key, value, position, context)
    needs, shares_of = Needs() if policy is None else policy.needs, _shares_of(cache, budget)
    if isinstance(cache, PagedCache):
        cache = insert_paged(cache, key, value, position, _index(cache, context))
        return _observe_pages(cache, query, position, policy, shares_of, context)
    assert isinstance(cache, KVCache)
    cache, taken = _inserted(cache, key, value, position, context)
    out, columns, query, here = _attention(taken, query, position, needs, context, cache)
    if policy is None:
        return out, put_back(cache, taken, _index(cache, context)), None
    here = _choosable(here, context)
    evidence, state = _ask(policy, here, query, position, columns, jnp.arange(K), shares_of, context)
    if not policy.allocation.even:
        evidence = _with_scores(evidence, here)
    return out, _updated(cache, taken, here.position, state, context), evidence


def _observe_parts(
    cache: SplitCache,
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    position: Int[Array, "B T"] | None,
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
        projection=PartitionSpec(HEADS), predicted=heads, reconstructed=rows,
    )  # fmt: skip
    given = {name: spec for name, spec in axes.items() if getattr(context, name) is not None}
    if budget is not None:
        budget = jnp.broadcast_to(jnp.asarray(budget, jnp.int32), (B,))

    def of_part(part: PagedCache, query: Array, key: Array, value: Array, position: Any, budget: Any, context: Context):
        return _observe(part, query, key, value, position, policy, budget, context)

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


def _prepared(
    cache: KVCache | PagedCache,
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    position: Int[Array, "B T"] | None,
    context: Context,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B T K D"], Float[Array, "B T K D"], Int[Array, "B T"], Context]:
    """Return a block's queries, keys, values and positions as insertion and attention take them, and the context."""
    N, layer = query.shape[2], _index(cache, context)
    if position is None:
        position = next_positions(cache, query.shape[1])
    K = cache.heads_shape[-1]
    if key.shape[2] != K and K == N:  # a cache for each query head
        key, value = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (key, value))
    if cache.positions != "absolute" and context.frequency is None:
        raise ValueError(
            f"positions={cache.positions!r} turn keys, but no rotary frequencies were given; hand over "
            "Context(frequency=...), or take positions='absolute' for a model without rotary positions."
        )
    if context.frequency is not None:
        context = dataclasses.replace(context, frequency=jax.lax.stop_gradient(context.frequency))
    if cache.positions == "index":
        query, key = _turn_to_index(_next_index(cache, position, context), query, key, position, context)
    key, value, position, _ = checked_block(cache, key, value, position, layer)
    return query, key, value, position, context


def _shares_of(cache: Cache, budget: Budget | None) -> Int[Array, "B"]:
    """Return the budget that a policy's shares refer to, for each row."""
    B = cache.heads_shape[-2]
    return jnp.broadcast_to(jnp.asarray(cache.num_slots if budget is None else budget, jnp.int32), (B,))


def _layer_of(cache: KVCache | PagedCache, context: Context) -> KVCache:
    """Return the context's layer; XLA copies only those parts of it that are read."""
    layer = _index(cache, context)
    if isinstance(cache, PagedCache):
        return cache.layer(layer)
    return cache if layer is None else cache.layer(layer)


def _inserted(
    cache: KVCache,
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    position: Int[Array, "B T"],
    context: Context,
) -> tuple[KVCache, KVCache]:
    """Insert a block; return the cache with its rows, and the layer, whose other arrays are to be put back."""
    layer = _index(cache, context)
    here = cache if layer is None else cache.layer(layer)
    if layer is not None and platform() != "gpu":
        # Taken out once: if they were read from the stacked arrays several times, XLA would copy those arrays in every
        # layer instead of writing the new ones in place. For a GPU it does not, and each would be a program of its own.
        slot_position, state = jax.lax.optimization_barrier((here.position, here.state))
        here = dataclasses.replace(here, position=slot_position, state=state)
    return insert_plain(cache, here, key, value, position, layer)


def _updated(cache: KVCache, here: KVCache, chosen: Int[Array, "B K S"], state: Any, context: Context) -> KVCache:
    """Return the cache with a layer's positions, of those ``chosen`` where it has a window, and the policy's state."""
    position = chosen if _frees(context) else here.position
    return put_back(cache, dataclasses.replace(here, position=position, state=state), _index(cache, context))


def _frees(context: Context) -> bool:
    """Return whether a block frees what left the sliding window; one that is taken back again must not."""
    return context.sliding_window is not None and context.reconstructed is None


def _choosable(here: KVCache, context: Context) -> KVCache:
    """Return a layer with the tokens that the policy chooses among, those that a query after the block can see."""
    if context.reconstructed is not None:  # the copies are taken back
        return up_to(here, context.reconstructed.end)
    return within(here, context.sliding_window) if context.sliding_window is not None else here


def _attention(
    here: KVCache,
    query: Float[Array, "B T heads D"],
    position: Int[Array, "B T"],
    needs: Needs,
    context: Context,
    cache: KVCache | None,
) -> tuple[Float[Array, "B T heads D"], ColumnStatistics, Float[Array, "B T heads D"], KVCache]:
    """Attend over some heads of a layer; also return the queries and keys with the rotations that attention used.

    Where ``cache`` stacks layers, kernels read keys and values from the stacked arrays: a layer taken out is a copy.
    """
    stack = None if cache is None or _index(cache, context) is None else cache
    if here.positions == "compact":
        here, stack = floats_of(here), None
        query, key = _turn_to_rank(here, query, position, context)
        here = dataclasses.replace(here, rows=here.rows | {"key": key})
    source, layer = (here, None) if stack is None else (stack, context.layer)
    S, filled = here.num_slots, context.filled
    if context.reconstructed is not None:
        at: dict[str, Any] = dict(query_position=position, layer=layer)
        visible = context.reconstructed.visible(here.position, batch_rows(here))
        out, _ = cache_attention(query, **source.rows, key_position=here.position, **at, **_options(Needs(), context))
        _, columns = cache_attention(query, **source.rows, key_position=visible, **at, **_options(needs, context))
        return out, columns, query, here
    if filled is None or filled >= S or stack is not None:
        out, columns = cache_attention(
            query, **source.rows, key_position=here.position, query_position=position, layer=layer,
            **_options(needs, context),
        )  # fmt: skip
        return out, columns, query, here
    rows, slot_position = jax.tree.map(lambda x: x[:, :, :filled], (here.rows, here.position))
    out, columns = cache_attention(
        query, **rows, key_position=slot_position, query_position=position, **_options(needs, context)
    )
    nothing = ((0, 0), (0, 0), (0, S - filled))
    return out, jax.tree.map(lambda column: jnp.pad(column, nothing), columns), query, here


def _options(needs: Needs, context: Context) -> dict[str, Any]:
    """Return the arguments that attention over slots and attention over pages share."""
    statistics = needs.statistics | observed(needs.statistics)
    if needs.reconstruction is not None and context.reconstructed is not None:
        statistics |= needs.reconstruction.statistics
    return dict(
        statistics=statistics,
        window=needs.window,
        sliding_window=context.sliding_window,
        scale=context.scale,
        soft_cap=context.soft_cap,
        implementation=context.implementation,
    )


def _ask(
    policy: Policy,
    here: KVCache,
    query: Float[Array, "B T heads D"],
    position: Int[Array, "B T"],
    columns: ColumnStatistics,
    head: Int[Array, "K"],
    budget: Int[Array, "B"],
    context: Context,
) -> tuple[Evidence, Any]:
    """Have the policy score some heads of a layer, the tokens of which are those that it chooses among.

    Returns:
        Its evidence and its new state.
    """
    here = floats_of(here)
    B, K = here.position.shape[:2]
    entered = jnp.sum(position >= 0, axis=1, dtype=jnp.int32)
    columns = jax.tree.map(lambda column: column.reshape(B, K, -1, column.shape[-1]), columns)
    remembered = here.state
    if observed(policy.needs.statistics):
        window, remembered = here.state
        columns, window = jax.lax.stop_gradient(join(window, columns, entered, policy.needs.window))
    if context.sliding_window is not None:
        budget = jnp.minimum(budget, context.sliding_window)
        columns = jax.tree.map(lambda column: jnp.where(here.live[:, :, None], column, 0), columns)
    observation = Observation(
        columns=columns,
        query=query,
        query_position=position,
        key=here.key,
        value=here.value,
        position=here.position,
        next_position=here.next_position,
        budget=budget,
        head=head,
        context=context,
    )
    # The choice of the tokens that stay is not differentiable: gradients flow through attention alone.
    state, observation = jax.lax.stop_gradient((remembered, mark_protected(policy, observation)))
    scores, new = update_scores(policy, state, observation)
    if observed(policy.needs.statistics):
        new = (window, new)
    state = jax.tree.map(lambda leaf, old: leaf.astype(old.dtype), new, here.state)  # float64 inputs would widen it
    measure = policy.allocation.measure
    evidence = Evidence(
        scores,
        entered=entered,
        protected=observation.protected,
        measured=None if measure is None else measure(observation),
        end=None if context.reconstructed is None else context.reconstructed.end,
        window=None if context.sliding_window is None else jnp.asarray(context.sliding_window, jnp.int32),
        allocation=policy.allocation,
        merging=policy.merging,
    )
    return evidence, state


def _with_scores(evidence: Evidence, here: KVCache) -> Evidence:
    """Compute the scores if the evidence still holds :class:`kvjax.observation.Weights`."""
    if not isinstance(evidence.scores, Weights):
        return evidence
    value = jax.lax.stop_gradient(floats_of(here).value)
    scores = joined(evidence.scores, value, here.live, evidence.protected)
    return dataclasses.replace(evidence, scores=scores)


def _observe_pages(
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
    K, layer = cache.heads_shape[-1], _index(cache, context)
    needs = Needs() if policy is None else policy.needs
    turned = cache.positions == "compact"
    out: Any = None
    columns = ColumnStatistics()
    if not turned:
        table = cache.layer_table(layer)
        at: dict[str, Any] = dict(table=table, query_position=position)
        seen = cache.position
        if context.reconstructed is not None:  # the statistics are of the part that is repeated alone
            seen = context.reconstructed.visible(cache.position, batch_rows(cache))
            out, _ = paged_attention(query, **cache.rows, position=cache.position, **at, **_options(Needs(), context))
        found, columns = paged_attention(query, **cache.rows, position=seen, **at, **_options(needs, context))
        out = found if context.reconstructed is None else out
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
            out, own_columns, mine, here = _attention(here, mine, position, needs, own, None)
            if policy is None:
                return out, (), None
        else:
            out, own_columns = None, heads_of(columns, 1, head)
        assert policy is not None
        # XLA copies only those parts of ``here`` that the policy reads.
        here, number = _choosable(here, own), (cache.first_head + head)[None]
        evidence, state = _ask(policy, here, mine, position, own_columns, number, budget, own)
        return out, state, dataclasses.replace(_with_scores(evidence, here), protected=None)

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
    scores = evidence.scores[:, :, 0].swapaxes(0, 1)
    if policy.heads == "layer":  # all heads hold the same tokens, in the same slots
        mean = summed(jnp.sum(scores / cache.all_heads, axis=1, keepdims=True), cache.axis)
        scores = jnp.broadcast_to(mean, scores.shape)
    measured = None if evidence.measured is None else evidence.measured[:, :, 0].swapaxes(0, 1)
    end, window = jax.tree.map(lambda x: x[0], (evidence.end, evidence.window))
    evidence = dataclasses.replace(
        evidence, scores=scores, entered=evidence.entered[0], measured=measured, end=end, window=window
    )
    if _frees(context):
        assert context.sliding_window is not None
        cache = within(cache, context.sliding_window, layer)
    return out, dataclasses.replace(cache, state=state), evidence


def _index(cache: Cache, context: Context) -> int | Int[Array, ""] | None:
    """Return the context's layer if the cache stacks layers, else None."""
    return context.layer if len(cache.heads_shape) == 3 else None


def check_policy(policy: Policy, cache: KVCache | PagedCache, G: int) -> None:
    """Check that the cache was made for the policy; on a mesh, the stacked parts of the devices."""
    if policy.positions not in ("absolute", cache.positions):
        raise ValueError(
            f"{policy.name!r} wants {policy.positions!r} positions, but the cache's are {cache.positions!r}; make the "
            f"cache with positions={policy.positions!r}."
        )
    if policy.needs.rotary and cache.positions != "absolute":
        raise ValueError(
            f"{policy.name!r} turns queries back by their positions in the text, but the cache's positions are "
            f"{cache.positions!r}; make it with positions='absolute'."
        )
    B, K = cache.heads_shape[-2:]
    made = jax.eval_shape(lambda: policy.state(B, K, G, 1, cache.head_dim))
    expected: Any = jax.tree.structure(made)
    if expected != jax.tree.structure(cache.state):
        raise ValueError(
            f"the cache's state is not that of {policy.name!r}; make the cache for this policy, with kvjax.empty_cache."
        )

    def check(wanted: Any, given: Any) -> None:
        of_head = isinstance(wanted, HeadState)
        if of_head:
            wanted, given = wanted.value, given.value
        shape = (*cache.heads_shape, *wanted.shape[2:]) if of_head else (*cache.position.shape, *wanted.shape[3:])
        if given.shape != shape:
            raise ValueError(
                f"the cache's state has an array of shape {given.shape}, where {policy.name!r} has {shape} in this "
                "cache; make the cache with kvjax.empty_cache."
            )

    jax.tree.map(check, made, cache.state, is_leaf=lambda leaf: isinstance(leaf, HeadState))


def _next_index(cache: KVCache | PagedCache, position: Int[Array, "B T"], context: Context) -> Int[Array, "B K"]:
    """Return the place of a block's first token in each head if places count the tokens that the head holds.

    What has left a sliding window counts whether it is still held or not, so that nothing moves when it is freed.
    """
    here = _layer_of(cache, context)
    if context.sliding_window is None:
        return here.num_live
    # The layers share next_position, so after layer 0 it is behind the block already.
    first = jnp.min(jnp.where(position < 0, jnp.iinfo(jnp.int32).max, position), axis=1)
    first = jnp.minimum(first, cache.next_position)
    left = jnp.maximum(first - context.sliding_window + 1, 0)
    return within(dataclasses.replace(here, next_position=first), context.sliding_window).num_live + left[:, None]


def _turn_to_index(
    first: Int[Array, "B K"],
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    position: Int[Array, "B T"],
    context: Context,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B T K D"]]:
    """Rotate a block as if the positions of its tokens were ``first`` and those behind it."""
    B, T, K, D = key.shape
    assert context.frequency is not None
    valid = position >= 0
    index = first[:, None] + jnp.cumsum(valid, axis=1)[..., None] - 1  # [B, T, K]
    start, end = (jnp.where(valid[..., None], x, 0) for x in (position[..., None], index))
    frequency = context.frequency[:, None, None]  # [B or 1, 1, 1, D / 2]
    grouped = query.reshape(B, T, K, -1, D)
    grouped = move(grouped, start[..., None], end[..., None], frequency[:, :, None])
    return grouped.reshape(query.shape), move(key, start, end, frequency)


def _turn_to_rank(
    here: KVCache, query: Float[Array, "B T heads D"], position: Int[Array, "B T"], context: Context
) -> tuple[Float[Array, "B T heads D"], Float[Array, "B K S D"]]:
    """Rotate queries and keys as if the tokens of each head had consecutive positions."""
    assert context.frequency is not None
    K = here.position.shape[1]
    frequency = context.frequency[:, None, None]
    _, rank = by_position(here.position)
    start, end = (jnp.where(here.live, x, 0) for x in (here.position, rank))
    key = move(here.key, start, end, frequency)
    valid = position >= 0
    before = here.num_live[:, None] - jnp.sum(valid, axis=1)[:, None, None]  # [B, 1, K]: the block is the newest
    own = before + jnp.cumsum(valid, axis=1)[..., None] - 1  # [B, T, K]
    start, end = (jnp.where(valid[..., None], x, 0) for x in (position[..., None], own))
    grouped = query.reshape(*query.shape[:2], K, -1, query.shape[-1])
    grouped = move(grouped, start[..., None], end[..., None], frequency[:, None])
    return grouped.reshape(query.shape), key
