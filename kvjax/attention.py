"""One block of one layer under a budget: insert, attend, score, evict."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels_pallas import ColumnStatistics, cache_attention, paged_attention
from kernels_pallas.dispatch import Implementation
from kvjax.cache import HeadState, KVCache
from kvjax.checks import check_tokens, is_known, plain
from kvjax.eviction import evict, set_positions
from kvjax.insertion import Cache, check_fits, insert, next_positions
from kvjax.paged import PagedCache, pages_for, write_layer
from kvjax.policy import (
    Observation,
    Policy,
    Prediction,
    check_budget,
    mark_protected,
    policy_of,
    remaining_positions,
    retention_scores,
)
from kvjax.projection import OutputProjection
from kvjax.rotary import move


class Observed(NamedTuple):
    """What a policy says of a layer's slots. ``scores`` are ``[B, K, S]`` as in ``cache.layer(index)``; ``measured`` is
    what the policy's allocation asks of each layer, if anything. ``left``, inside :func:`attend`, are the positions
    left where one operation has scored and evicted; there are no scores then.
    """

    scores: Float[Array, "B K S"]
    measured: Float[Array, "B measures"] | None = None
    left: Int[Array, "B K S"] | None = None


class _Leaving(NamedTuple):
    """How many tokens stay where a policy scores and evicts in one; see :func:`kvjax.evict`."""

    budget: Int[Array, "B"]
    excess: int | None


def attend(
    cache: Cache,
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    position: Int[Array, "B T"] | None = None,
    *,
    policy: Policy | str | None = None,
    budget: int | Int[Array, ""] | Int[Array, "B"] | None = None,
    excess: int | None = None,
    layer: int | Int[Array, ""] | None = None,
    sliding_window: Int[Array, ""] | int | None = None,
    scale: float | None = None,
    frequency: Float[Array, "rows half"] | None = None,
    projection: OutputProjection | None = None,
    predicted: Prediction | None = None,
    decoding: bool | None = None,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B T N D"], Cache]:
    """Attention of a block over the cache and itself; afterwards each head holds at most ``budget`` tokens.

    The tokens go into free slots, the queries see all live slots that are not in their future, the policy scores the
    slots by what the block's attention said of them, and the worst are freed. With T = 1 this is a decode step.

    Args:
        cache: a cache with at least T free slots a head, so ``budget + T`` in all; its ``state`` is the policy's.
        query, key, value: of the block's tokens, rotated.
        position: their absolute positions, -1 for padding. By default they continue each row.
        policy: scores tokens: a policy or its short name; None or "full" stores all and scores nothing.
        budget: tokens that each head keeps (on average, under an uneven allocation), one number or one a row; None
            lets the policy observe, but evicts nothing. No share: one block does not know how long its prompt is.
        excess: a promise that no head will hold more than ``budget + excess`` tokens; see :func:`kvjax.evict`.
        layer: which layer of a stacked cache.
        sliding_window: how many positions a query sees; None for all.
        scale: factor of the logits, D ** -0.5 by default.
        frequency: the rotary angle per position of each pair of elements, one row for all or one a row; needed where
            keys are turned (``positions`` of the cache) or a score asks for it.
        projection: what the policy reads of the layer's output projection (:func:`kvjax.output_projection`).
        predicted: what a predictor says of the block in this layer, for a policy that reads it.
        decoding: whether the context was compressed before this block; by default one token is a decode step.
        implementation: of the attention, and of an eviction by CAOTE; see :func:`kernels_pallas.cache_attention` and
            :func:`kernels_pallas.caote_topk`.

    Returns:
        The attention's output and the cache. Gradients flow through it, but not backwards through a paged cache, whose
        pages move in a loop of unknown length.

    Raises:
        ValueError: shapes that do not fit; no room for the tokens (under jit, for a block behind a budget that is
            known); a known budget below 1 or smaller than what the policy protects; an allocation that needs the
            scores of all layers (:func:`observe` them).

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
    policy, budget = _checked(cache, query, position, policy, budget, excess, layer)
    stacked = len(cache.heads_shape) == 3
    together = stacked and policy is not None and not (policy.allocation.one_layer and isinstance(cache, KVCache))
    if policy is not None and budget is not None and together:
        kind = "paged" if isinstance(cache, PagedCache) else "plain"
        raise ValueError(
            f"{policy.name!r} cannot evict from one layer of a {kind} cache of {cache.heads_shape[0]}: observe each "
            "layer with kvjax.observe, then evict once."
        )
    if position is None:
        position = next_positions(cache, query.shape[1])
    leaving = None
    if budget is not None and policy is not None and _evicts_at_once(policy, cache):
        leaving = _Leaving(idle_rows_keep(budget, position, cache), excess)
    out, cache, observed = _observe(
        cache,
        query,
        key,
        value,
        position,
        leaving=leaving,
        policy=policy,
        budget=budget,
        layer=layer,
        sliding_window=sliding_window,
        scale=scale,
        frequency=frequency,
        projection=projection,
        predicted=predicted,
        decoding=decoding,
        implementation=implementation,
    )
    if policy is None or observed is None or budget is None:
        return out, cache
    if observed.left is not None and isinstance(cache, KVCache):
        return out, set_positions(cache, observed.left, layer)
    scores = observed.scores
    if isinstance(cache, PagedCache):
        scores = write_layer(cache, jnp.full(cache.position.shape, -jnp.inf), scores, None)
    return out, evict(
        cache,
        scores,
        idle_rows_keep(budget, position, cache),
        layer=layer,
        excess=excess,
        allocation=policy.allocation,
        measured=None if observed.measured is None else observed.measured[None],
        entered=jnp.sum(position >= 0, axis=1),
    )


def observe(
    cache: Cache,
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    position: Int[Array, "B T"] | None = None,
    *,
    policy: Policy | str | None,
    budget: int | Int[Array, ""] | Int[Array, "B"] | None = None,
    layer: int | Int[Array, ""] | None = None,
    sliding_window: Int[Array, ""] | int | None = None,
    scale: float | None = None,
    frequency: Float[Array, "rows half"] | None = None,
    projection: OutputProjection | None = None,
    predicted: Prediction | None = None,
    decoding: bool | None = None,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B T N D"], Cache, Observed | None]:
    """:func:`attend` without the eviction: for allocations that compare the scores of all layers.

    Args:
        budget: what the policy's shares of the budget refer to; all slots if None.
        decoding: whether the context was compressed before this block; by default one token is a decode step.

    Returns:
        The attention's output, the cache with the block in it, and what the policy says (None without one).

    Example:
        >>> import jax, kvjax
        >>> policy = kvjax.parse("tova@model")
        >>> cache = kvjax.KVCache.init(batch=1, kv_heads=2, slots=4, head_dim=4, layers=3)
        >>> scores = []
        >>> for layer in range(3):
        ...     q = jax.random.normal(jax.random.key(layer), (1, 4, 2, 4))
        ...     out, cache, seen = kvjax.observe(cache, q, q, q, jax.numpy.arange(4)[None], policy=policy, layer=layer)
        ...     scores.append(seen.scores)
        >>> cache = kvjax.evict(cache, jax.numpy.stack(scores), budget=2, allocation=policy.allocation)
        >>> cache.num_live.sum().item()
        12
    """
    policy, budget = _checked(cache, query, position, policy, budget, None, layer)
    return _observe(
        cache,
        query,
        key,
        value,
        position,
        leaving=None,
        policy=policy,
        budget=budget,
        layer=layer,
        sliding_window=sliding_window,
        scale=scale,
        frequency=frequency,
        projection=projection,
        predicted=predicted,
        decoding=decoding,
        implementation=implementation,
    )


def _observe(
    cache,
    query,
    key,
    value,
    position,
    *,
    leaving,
    policy,
    budget,
    layer,
    sliding_window,
    scale,
    frequency,
    projection,
    predicted,
    decoding,
    implementation,
):
    """:func:`observe`; with ``leaving`` the policy also evicts."""
    B, T, N, _ = query.shape
    if position is None:
        position = next_positions(cache, T)
    K = cache.heads_shape[-1]
    if key.shape[2] != K and K == N:  # a cache for each query head
        key, value = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (key, value))
    if cache.positions != "absolute" and frequency is None:
        raise ValueError(
            f"positions={cache.positions!r} turn keys, but no rotary frequencies were given; hand over frequency=, or "
            "take positions='absolute' for a model without rotary positions."
        )
    if policy is not None:
        _check_policy(policy, cache, N // K)
    frequency = None if frequency is None else jax.lax.stop_gradient(frequency)
    if cache.positions == "index":
        query, key = _turn_to_index(cache, query, key, position, frequency, layer)
    cache = insert(cache, key, value, position, layer=layer)
    position = position.astype(jnp.int32)
    look = _Look(
        position,
        policy,
        jnp.broadcast_to(jnp.asarray(cache.num_slots if budget is None else budget, jnp.int32), (B,)),
        jnp.asarray(0 if layer is None else layer, jnp.int32),
        sliding_window,
        scale,
        frequency,
        decoding,
        implementation,
        leaving,
    )
    grouped = query.reshape(B, T, K, N // K, -1)
    foreseen = None
    if predicted is not None:
        foreseen = tuple(x.reshape(B, T, K, N // K, -1) for x in (predicted.query, predicted.key))
    if isinstance(cache, PagedCache):
        return _observe_pages(cache, grouped, look, projection, foreseen, layer)
    here, stack = cache, None
    if layer is not None:
        stack = cache.key, cache.value
        here = cache.layer(layer)
        # Taken out once: read again and again from the stacked arrays, XLA would copy those in every layer rather
        # than write the new positions and state in place.
        slot_position, state = jax.lax.optimization_barrier((here.position, here.state))
        here = dataclasses.replace(here, position=slot_position, state=state)
    out, state, observed = look.at(here, grouped, jnp.arange(K), projection, foreseen, stack)
    if observed is None:
        return out, cache, None
    if layer is not None:
        state = jax.tree.map(lambda whole, part: whole.at[layer].set(part), cache.state, state)
    return out, dataclasses.replace(cache, state=state), observed


def _checked(cache, query, position, policy, budget, excess, layer) -> tuple[Policy | None, Any]:
    """The policy and the budget of a block, as arrays count; refuses what cannot be, and what will not fit."""
    policy, T = policy_of(policy), query.shape[1]
    known = is_known(cache.position, position, layer)  # then insert looks into the cache itself
    if not known:
        check_fits(cache, T, position)
    if budget is None:
        return policy, None
    if policy is None:
        raise ValueError(f"a budget of {budget} was given without a policy that says what to keep; try 'snapkv+caote'.")
    if isinstance(plain(budget), float):
        raise ValueError(
            f"the budget is {budget}, a share, but one block does not know the prompt that it is a share of: give "
            "tokens per head, an int."
        )
    B = cache.heads_shape[-2]
    budget = check_tokens(budget, (B,))
    if not is_known(budget):
        return policy, budget
    for number in np.unique(budget):
        check_budget(policy, int(number))
    if not known:
        _check_room(cache, policy, np.broadcast_to(budget, B), T if excess is None else min(T, excess))
    return policy, np.asarray(budget, np.int32)


def _check_room(cache: Cache, policy: Policy, budget: np.ndarray, entering: int) -> None:
    """Refuses a cache without room for so many tokens more than the budget, when each head may hold its budget.

    A block that fills a whole cache can only be the first, which needs no more.
    """
    if entering == cache.num_slots and isinstance(cache, KVCache):
        return
    *L, B, K = cache.heads_shape
    layers = L[0] if L else 1
    held = policy.allocation.most(layers, K, int(budget.max()))
    if held + entering > cache.num_slots:
        raise ValueError(
            f"a head may hold {held} tokens when {entering} more come in, but the cache has {cache.num_slots} slots a "
            f"head: make it with {held + entering}, or give a smaller budget or block."
        )
    if isinstance(cache, PagedCache):
        needed = pages_for(layers * K * int(np.sum(budget + entering)), layers * B * K, cache.page_size)
        if needed > cache.owner.shape[0]:
            raise ValueError(
                f"{layers * B * K} heads may hold {np.mean(budget):g} tokens each on average when {entering} more come "
                f"in, for which {needed} pages of {cache.page_size} slots are needed, but the cache has "
                f"{cache.owner.shape[0]}: make it with so many (kvjax.pages_for)."
            )


def idle_rows_keep(
    budget: int | Int[Array, ""] | Int[Array, "B"], position: Int[Array, "B T"], cache: Cache
) -> Int[Array, "B"]:
    """The budget, and room for everything in rows without a token in this block: its statistics say nothing of them."""
    return jnp.where((position >= 0).any(axis=1), jnp.asarray(budget, jnp.int32), cache.num_slots)


def store_scores(cache: Cache, scores: Array, of_layer: Float[Array, "B K S"], layer: int | Int[Array, ""]) -> Array:
    """Puts a layer's scores into an array shaped like ``cache.position``."""
    if isinstance(cache, PagedCache):
        return write_layer(cache, scores, of_layer, layer)
    return scores.at[layer].set(of_layer)


def _evicts_at_once(policy: Policy, cache: Cache) -> bool:
    """Whether one operation can score and evict: by CAOTE's errors, each head for itself."""
    return (
        policy.error is not None and policy.heads != "layer" and policy.allocation.even and isinstance(cache, KVCache)
    )


def _check_policy(policy: Policy, cache: Cache, G: int) -> None:
    """Refuses a policy that the cache was not made for."""
    if policy.positions not in ("absolute", cache.positions):
        raise ValueError(
            f"{policy.name!r} wants {policy.positions!r} positions, but the cache's are {cache.positions!r}; make the "
            f"cache with positions={policy.positions!r}."
        )
    if policy.rotary and cache.positions != "absolute":
        raise ValueError(
            f"{policy.name!r} turns queries back by their positions in the text, but the cache's positions are "
            f"{cache.positions!r}; make it with positions='absolute'."
        )
    B, K = cache.heads_shape[-2:]
    made = jax.eval_shape(lambda: policy.init(B, K, G, 1, cache.key.shape[-1]))
    expected: Any = jax.tree.structure(made)
    if expected != jax.tree.structure(cache.state):
        raise ValueError(
            f"the cache's state is not that of {policy.name!r}; make the cache with state=policy.init(B, K, G, S, D)."
        )

    def check(wanted: Any, given: Any) -> None:
        of_head = isinstance(wanted, HeadState)
        if of_head:
            wanted, given = wanted.value, given.value
        shape = (*cache.heads_shape, *wanted.shape[2:]) if of_head else (*cache.position.shape, *wanted.shape[3:])
        if given.shape != shape:
            raise ValueError(
                f"the cache's state has an array of shape {given.shape}, where {policy.name!r} has {shape} in this "
                "cache; make the cache with state=policy.init(B, K, G, S, D), stacked once for each layer where the "
                "cache stacks them."
            )

    jax.tree.map(check, made, cache.state, is_leaf=lambda leaf: isinstance(leaf, HeadState))


class _Look(NamedTuple):
    """A block's queries upon some heads of a layer: attention, then the policy's scores."""

    position: Int[Array, "B T"]
    policy: Policy | None
    budget: Int[Array, "B"]
    layer: Int[Array, ""]
    sliding_window: Any
    scale: float | None
    frequency: Float[Array, "rows half"] | None
    decoding: bool | None
    implementation: Implementation
    leaving: _Leaving | None

    def at(
        self,
        here: KVCache,
        query: Float[Array, "B T K G D"],
        head: Int[Array, "K"],
        projection: OutputProjection | None,
        foreseen: tuple[Array, ...] | None,
        stack: tuple[Array, Array] | None = None,
    ) -> tuple[Float[Array, "B T heads D"], Any, Observed | None]:
        """With ``stack``, the keys and values of all layers, kernels read them there: a layer taken out is a copy."""
        B, T, K, G, D = query.shape
        key = here.key
        if here.positions == "compact":
            query, key = _turn_to_rank(here, query, self.position, self.frequency)
            here, stack = dataclasses.replace(here, key=key), None
        query = query.reshape(B, T, K * G, D)
        keys, values, layer = (here.key, here.value, None) if stack is None else (*stack, self.layer)
        out, columns = cache_attention(query, keys, values, here.position, self.position, layer=layer, **self.options())
        if self.policy is None:
            return out, here.state, None
        state, observed = self.judge(here, query, columns, head, projection, foreseen, stack)
        return out, state, observed

    def options(self) -> dict[str, Any]:
        """Of the attention, over slots or pages."""
        policy = self.policy
        return dict(
            statistics=() if policy is None else policy.statistics,
            window=0 if policy is None else policy.window,
            sliding_window=self.sliding_window,
            scale=self.scale,
            implementation=self.implementation,
        )

    def judge(
        self,
        here: KVCache,
        query: Float[Array, "B T heads D"],
        columns: ColumnStatistics,
        head: Int[Array, "K"],
        projection: OutputProjection | None,
        foreseen: tuple[Array, ...] | None,
        stack: tuple[Array, Array] | None = None,
    ) -> tuple[Any, Observed]:
        """The policy's state and what it says, of the attention's statistics; ``stack`` as for :meth:`at`."""
        policy = self.policy
        assert policy is not None
        B, T, N, _ = query.shape
        K = head.shape[0]
        observation = Observation(
            columns=jax.tree.map(lambda column: column.reshape(B, K, -1, column.shape[-1]), columns),
            query=query,
            query_position=self.position,
            key=here.key,
            value=here.value,
            position=here.position,
            next_position=here.next_position,
            budget=self.budget,
            layer=self.layer,
            head=head,
            frequency=self.frequency,
            output=projection,
        )
        if foreseen is not None:
            rows = (x.reshape(B, T, N, -1) for x in foreseen)
            prediction = Prediction(*rows)._replace(sliding_window=self.sliding_window)
            observation = observation._replace(predicted=prediction)
        # Which tokens stay is a choice, not a function to differentiate: gradients flow through the attention alone.
        before, observation = jax.lax.stop_gradient((here.state, mark_protected(policy, observation)))
        observation = observation._replace(decoding=self.decoding)  # a Python bool, which stop_gradient would trace
        if self.leaving is not None:
            left, state = remaining_positions(
                policy,
                before,
                observation,
                self.leaving.budget,
                excess=self.leaving.excess,
                stack=None if stack is None else (jax.lax.stop_gradient(stack[1]), self.layer),
                implementation=self.implementation,
            )
            return _as_before(state, before), Observed(None, left=left)  # type: ignore[arg-type]
        scores, state = retention_scores(policy, before, observation)
        measure = policy.allocation.measure
        return _as_before(state, before), Observed(scores, None if measure is None else measure(observation))


def _as_before(state: Any, before: Any) -> Any:
    """A policy's state in the dtypes that it had, which float64 inputs would widen."""
    return jax.tree.map(lambda new, old: new.astype(old.dtype), state, before)


def _observe_pages(cache, query, look, projection, foreseen, layer):
    """Attention reads pages where they are; what else a policy reads of them is laid out one head after the other.

    So are keys that are turned before attention.
    """
    B, T, K, G, D = query.shape
    turned = cache.positions == "compact"
    columns = None
    if not turned:
        flat, table = query.reshape(B, T, K * G, D), cache.layer_table(layer)
        out, columns = paged_attention(
            flat, cache.key, cache.value, cache.position, table, look.position, **look.options()
        )
        columns = jax.tree.map(lambda column: column.reshape(B, K, -1, column.shape[-1]), columns)
        if look.policy is None:
            return out, cache, None

    def of_head(head):
        def one(tree, axis):
            return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, head, 1, axis), tree)

        here, mine = cache.layer(layer, head), one(query, 2)
        others = head[None], one(projection, 0), one(foreseen, 2)
        if turned:
            return look.at(here, mine, *others)
        # Of what ``here`` has, XLA lays out what the policy reads.
        return None, *look.judge(here, mine[:, :, 0], jax.tree.map(lambda x: x[:, 0], one(columns, 1)), *others)

    heads_out, state, observed = jax.lax.map(of_head, jnp.arange(K))
    if turned:
        out = jnp.moveaxis(heads_out, 0, 2).reshape(B, T, K * G, D)
    if observed is None:
        return out, cache, None

    def put(whole, part):
        if isinstance(part, HeadState):
            value = part.value[:, :, 0].swapaxes(0, 1)  # [K, B, 1, ...] -> [B, K, ...]
            return HeadState(value if layer is None else whole.value.at[layer].set(value))
        return write_layer(cache, whole, part[:, :, 0].swapaxes(0, 1), layer)

    state = jax.tree.map(put, cache.state, state, is_leaf=lambda leaf: isinstance(leaf, HeadState))
    scores = observed.scores[:, :, 0].swapaxes(0, 1)
    if look.policy.heads == "layer":  # all heads hold the same tokens, in the same slots
        scores = jnp.broadcast_to(jnp.sum(scores / scores.shape[1], axis=1, keepdims=True), scores.shape)
    measured = None if observed.measured is None else jnp.sum(observed.measured, axis=0)
    return out, dataclasses.replace(cache, state=state), Observed(scores, measured)


def _turn_to_index(cache, query, key, position, frequency, layer):
    """Rotates a block as if its positions went on from the number of tokens that each head holds."""
    B, T, K, D = key.shape
    live = cache.num_live if layer is None else cache.num_live[layer]  # [B, K]
    valid = position >= 0
    index = live[:, None] + jnp.cumsum(valid, axis=1)[..., None] - 1  # [B, T, K]
    start, end = (jnp.where(valid[..., None], x, 0) for x in (position[..., None], index))
    frequency = frequency[:, None, None]  # [B or 1, 1, 1, D / 2]
    grouped = query.reshape(B, T, K, -1, D)
    grouped = move(grouped, start[..., None], end[..., None], frequency[:, :, None])
    return grouped.reshape(query.shape), move(key, start, end, frequency)


def _turn_to_rank(here, query, position, frequency):
    """Rotates queries and keys as if the tokens of each head stood one behind the other."""
    order = jnp.argsort(jnp.where(here.live, here.position, jnp.iinfo(jnp.int32).max), axis=-1)
    rank = jnp.argsort(order, axis=-1)  # [B, K, S]
    start, end = (jnp.where(here.live, x, 0) for x in (here.position, rank))
    key = move(here.key, start, end, frequency[:, None, None])
    valid = position >= 0
    before = here.num_live[:, None] - jnp.sum(valid, axis=1)[:, None, None]  # [B, 1, K]: the block is the newest
    own = before + jnp.cumsum(valid, axis=1)[..., None] - 1  # [B, T, K]
    start, end = (jnp.where(valid[..., None], x, 0) for x in (position[..., None], own))
    return move(query, start[..., None], end[..., None], frequency[:, None, None, None]), key
