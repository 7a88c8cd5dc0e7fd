"""Checks of a block before it enters a cache: its budget, and room for its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from kernels_pallas.cache_attention.api import check_projection
from kernels_pallas.checks import check_soft_cap
from kvjax._src.capacity import excess
from kvjax._src.chains import policy_of
from kvjax._src.checks import check_count, check_tokens, is_known, plain, real_array
from kvjax._src.eviction import Budget
from kvjax._src.insertion import Cache, check_cache, check_fits
from kvjax._src.observation import Context
from kvjax._src.paged import pages_for
from kvjax._src.policy import Policy
from kvjax._src.policy_checks import check_budget, check_policy_given
from kvjax._src.projection import part_of


def check_shapes(
    cache: Cache, query: Float[Array, "B T N D"], key: Float[Array, "B T K D"], value: Float[Array, "B T K D"]
) -> tuple[Array, Array, Array]:
    """Return a block's queries, keys and values as arrays, after a check that they fit each other and the cache."""
    check_cache(cache)
    B, K = cache.heads_shape[-2:]
    D = cache.arrays.head_dim
    query, key, value = real_array("query", query), real_array("key", key), real_array("value", value)
    shapes = query.shape, key.shape, value.shape
    fit = all(len(shape) == 4 and shape[0] == B and shape[3] == D for shape in shapes)
    if not fit or key.shape != value.shape or query.shape[1] != key.shape[1]:
        given = f"query {query.shape}, key {key.shape} and value {value.shape} do not fit each other and a cache"
        raise ValueError(f"{given} with B = {B}, K = {K} and D = {D}: expected [B, T, N, D] and twice [B, T, K, D].")
    if query.shape[2] % K:
        raise ValueError(f"the block has {query.shape[2]} query heads; expected a multiple of the cache's {K} heads.")
    return query, key, value


def checked_budget(
    cache: Cache,
    query: Float[Array, "B T N D"],
    position: Int[Array, "B T"] | None,
    policy: Policy | str | None,
    budget: Budget | None,
    context: Context,
) -> tuple[Policy | None, Any]:
    """Return the policy and the budget (int32) of a block, after checks that they are valid and that the block fits."""
    policy, T = policy_of(policy), query.shape[1]
    check_soft_cap(context.soft_cap)
    if context.excess is not None:
        check_count("excess", context.excess, 0, "give a number of tokens, or None")
    known = is_known(cache.position, position, context.layer)
    if not known:  # else insert checks the cache's contents
        check_fits(cache, T, position)
    check_policy_given(policy, budget)
    if policy is not None and policy.needs.errors == "output":
        N, K = query.shape[2], cache.heads_shape[-1]
        check_projection(part_of(context.projection, "factor"), True, (K, N // K, query.shape[3]))
    if policy is None or budget is None:
        return policy, None
    if isinstance(plain(budget), float):
        raise ValueError(f"the budget is {budget}, a share, but of how many tokens a block does not know: give an int.")
    B = cache.heads_shape[-2]
    budget = check_tokens(budget, (B,))
    if not is_known(budget):
        return policy, budget
    for number in np.unique(budget):
        check_budget(policy, int(number))
    if not known:
        entering = T if context.excess is None else min(T, context.excess)
        _check_room(cache, policy, np.broadcast_to(budget, B), entering, context.sliding_window)
    return policy, np.asarray(budget, np.int32)


def _check_room(
    cache: Cache, policy: Policy, budget: np.ndarray, entering: int, window: int | Int[Array, ""] | None
) -> None:
    """Check that the cache has room for ``entering`` tokens when each head may already hold its budget.

    A block that fills the whole cache can only be the first one, and fits. In a model with sliding windows pages are
    counted for this layer alone: others may have smaller windows.
    """
    if entering == cache.num_slots and not cache.paged:
        return
    if window is not None:
        if not is_known(window):
            return
        budget = np.minimum(budget, int(window))
    *L, B, K = cache.heads_shape
    layers = L[0] if L else 1
    held = policy.allocation.most(layers, K, int(budget.max()))
    if held + entering > cache.num_slots:
        wrong = f"a head may hold {held} tokens when {entering} more come in, but the cache has {cache.num_slots} slots"
        raise ValueError(f"{wrong} per head: make it with {held + entering}, or give a smaller budget or block.")
    if cache.paged:
        windows = (None,) * layers if window is None else (int(window),)
        devices, ways = cache.ways
        heads = len(windows) * K // ways  # those of other rows have no pages to give

        def pages(row: int) -> int:
            more = excess(policy.allocation, windows, K, ways, row) if window is None else 0
            return pages_for(heads * (row + entering) + K // ways * more, heads, cache.page_size)

        needed = max(sum(pages(int(row)) for row in rows) for rows in budget.reshape(devices, -1))
        if needed > cache.num_pages:
            given = f"{B // devices * heads} heads may hold {np.mean(budget):g} tokens each and {entering} more"
            raise ValueError(f"{given}: make the cache with {needed} pages, not {cache.num_pages} (kvjax.pages_for).")
