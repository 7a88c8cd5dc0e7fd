"""Checks that a policy fits a model, a cache, a block and a budget."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels_pallas.cache_attention.api import check_sinks, check_statistics
from kernels_pallas.checks import check_soft_cap
from kvjax._src.cache import HeadState, KVCache, check_all_heads, check_cache, is_emptied
from kvjax._src.capacity import beyond_mean
from kvjax._src.chains import LINKS, policy_of
from kvjax._src.checks import check_count, check_tokens, is_known, plain, real_array
from kvjax._src.eviction import Budget
from kvjax._src.insertion import check_fits
from kvjax._src.layer import LayerBlock, ask, attend_heads, with_scores
from kvjax._src.observation import Context, Needs
from kvjax._src.paged import PagedCache, pages_for
from kvjax._src.policy import Policy
from kvjax._src.projection import part_of
from kvjax._src.quantise import Dtypes
from kvjax._src.split_cache import Cache


def check_measured(policy: Policy | None, layers: int | None, kv_heads: int) -> None:
    """Check that each link of a policy was measured on a model of these sizes, or on none.

    ``layers`` is None where one layer stands for itself; ``kv_heads`` are the cache's heads, maybe one per query head.
    """
    for link in () if policy is None else policy.links or (policy,):
        if link.measured and (layers not in (None, link.measured[0]) or kv_heads % link.measured[1]):
            wrong = f"{link.name!r} was measured on a model of {link.measured[0]} layers with {link.measured[1]} KV"
            raise ValueError(f"{wrong} heads, but this one has {layers} with {kv_heads}; measure this model.")


def check_block(policy: Policy | str | None, block: int) -> None:
    """Check that a block is large enough for the policy's observation window.

    Example:
        >>> import kvjax
        >>> kvjax.check_block("snapkv", 16)
        Traceback (most recent call last):
            ...
        ValueError: 'snapkv' observes the last 32 queries, but a block has 16: give a block of at least 32, or a \
smaller window=16.
    """
    policy, block = policy_of(policy), check_count("block", block, 1, "a block has at least 1 token")
    if policy is not None and policy.reads.window > block:
        given = f"{policy.name!r} observes the last {policy.reads.window} queries, but a block has {block}"
        raise ValueError(f"{given}: give a block of at least {policy.reads.window}, or a smaller window={block}.")


def check_policy_given(policy: Policy | None, budget: Any) -> None:
    """Check that a budget comes with a policy."""
    if policy is None and budget is not None:
        raise ValueError(f"a budget of {budget} was given without a policy that says what to keep; try 'snapkv+caote'.")


def protected(policy: Policy | str | None, budget: Any) -> tuple[Any, Any]:
    """Return how many first and last tokens a policy always keeps under a budget (an int, or one per row).

    Example:
        >>> import kvjax
        >>> kvjax.protected("snapkv(window=16)+protect(sinks=4,recent=0.5)", 100)
        (4, 50)
    """
    policy, budget = policy_of(policy), check_tokens(budget, np.shape(budget))
    return (0, 0) if policy is None else policy.protected(budget)


def check_budget(policy: Policy | str | None, budget: int) -> None:
    """Check that a budget is large enough for the tokens that the policy protects.

    Example:
        >>> import kvjax
        >>> kvjax.check_budget("snapkv", 16)
        Traceback (most recent call last):
            ...
        ValueError: the budget is 16 tokens, but 'snapkv' always keeps 0 first and 32 last ones: give at least 32, \
or protect fewer.
    """
    budget = check_count("the budget", budget, 1, "at least 1 token must stay")
    if (policy := policy_of(policy)) is None:
        return
    sinks, recent = policy.protected(budget)
    if sinks + recent > budget:
        given = f"the budget is {budget} tokens, but {policy.name!r} always keeps {sinks} first and {recent} last ones"
        raise ValueError(f"{given}: give at least {sinks + recent}, or protect fewer.")


def check_latents(policy: Policy | None, dtypes: Dtypes) -> None:
    """Check that a policy, and the dtypes of keys and values, are such as a cache of latents can have."""
    if dtypes.key != dtypes.value:
        raise ValueError(f"keys and values are {dtypes}, but of latents they are the same numbers; give one dtype.")
    if policy is not None and policy.heads == "query":
        wrong = f"{policy.name!r} has a cache for each query head, but they share one latent per token;"
        raise ValueError(f"{wrong} take heads='group'.")
    if policy is not None and policy.merging is not None and not policy.draws:
        wrong = f"{policy.name!r} changes the values that stay, but a latent is its own key;"
        raise ValueError(f"{wrong} take a policy that merges nothing.")


@functools.cache
def check_state(policy: Policy, head_dim: int, K: int, G: int) -> None:
    """Check that each link's state has an entry per slot or head, that the statistics exist, and no score is NaN."""
    check_statistics(policy.reads.statistics, policy.reads.window)
    sizes = B, K, G, S, head_dim = (K + 1, K, G, K + 2, head_dim)  # no two of B, K, S alike

    def check(link: Policy, leaf: Any) -> None:
        of_head = isinstance(leaf, HeadState)
        shape = (leaf.value if of_head else leaf).shape
        if shape[: 2 if of_head else 3] != ((B, K) if of_head else (B, K, S)):
            wrong = f"the state of {link.name!r} has an array of shape {shape}, where B, K, G, S, D = {sizes};"
            raise ValueError(f"{wrong} begin with [B, K, S], or with [B, K] in a kvjax.HeadState.")

    for link in policy.links or (policy,):
        made = jax.eval_shape(functools.partial(link.init, *sizes))
        jax.tree.map(functools.partial(check, link), made, is_leaf=lambda leaf: isinstance(leaf, HeadState))
    sources = [LINKS.sources.get(link.name.partition("(")[0], "") for link in policy.links or (policy,)]
    if not all(source.startswith("kvjax.") for source in sources):
        _check_scores(policy, head_dim, K, G)


def _check_scores(policy: Policy, head_dim: int, K: int, G: int) -> None:
    """Check that a policy with a link of the user's own scores a block of random keys and values without a NaN.

    What such a block lacks (W_O, rotations, predictions, repeated text) makes a policy pass untried.
    """
    needs = dataclasses.replace(policy.reads, statistics=frozenset(), window=0, over="mean", queries=False, order=False)
    if needs not in (Needs(), Needs(errors="value")) or policy.positions != "absolute":
        return
    T = max(policy.reads.window, 4)
    drawn = np.random.default_rng(0).normal(size=(1, T, K * (G + 2), head_dim)).astype(np.float32)
    reference = Context(implementation="reference")

    def nan(drawn: Any) -> Any:
        state = policy.state(1, K, G, T, head_dim)
        cache = KVCache.init(batch=1, kv_heads=K, slots=T, head_dim=head_dim, state=state)
        query, key, value = jnp.split(drawn, [K * G, K * (G + 1)], axis=2)
        block = LayerBlock(query, key, value, jnp.arange(T)[None])
        cache = cache.insert(key, value, block.position)
        _, columns, block, here = attend_heads(cache, block, policy.reads, reference)
        evidence, _ = ask(policy, here, block, columns, jnp.arange(K), jnp.full(1, T), reference)
        scores: Any = with_scores(evidence, here).scores
        return jnp.isnan(scores) & here.live

    with jax.disable_jit(False):  # compiled apart: a policy may be used under jit first, and call a kernel of its own
        found = np.asarray(jax.jit(nan).lower(drawn).compile()(drawn))
    if found.any():
        wrong = f"{policy.name!r} scored {int(found.sum())} of {found.size} tokens NaN when it was tried on random keys"
        raise ValueError(f"{wrong} and values; look for 0 / 0 and for 0 * log 0.")


def check_policy(policy: Policy, cache: KVCache | PagedCache, G: int) -> None:
    """Check that the cache was made for the policy; on a mesh, the stacked parts of the devices."""
    if policy.positions not in ("absolute", cache.positions):
        raise ValueError(f"{policy.name!r} wants {policy.positions!r} positions, not the cache's {cache.positions!r}.")
    if policy.needs.text_positions and cache.positions != "absolute":
        wanted = f"{policy.name!r} needs keys that are rotated at their positions in the text ('absolute')"
        raise ValueError(f"{wanted}, but the cache has {cache.positions!r} ones.")
    check_all_heads(cache, repr(policy.name), policy.heads == "layer" or not policy.allocation.even)
    B, K = cache.heads_shape[-2:]
    check_state(policy, cache.head_dim, K, G)
    made = jax.eval_shape(lambda: policy.state(B, K, G, 1, cache.head_dim))
    expected: Any = jax.tree.structure(made)
    if expected != jax.tree.structure(cache.state):
        raise ValueError(f"the cache's state is not that of {policy.name!r}; make the cache with kvjax.empty_cache.")

    def check(wanted: Any, given: Any) -> None:
        of_head = isinstance(wanted, HeadState)
        if of_head:
            wanted, given = wanted.value, given.value
        shape = (*cache.heads_shape, *wanted.shape[2:]) if of_head else (*cache.position.shape, *wanted.shape[3:])
        if given.shape != shape and not is_emptied(given.shape, shape):
            found = f"the cache's state has an array of shape {given.shape}, where {policy.name!r} has {shape}"
            raise ValueError(f"{found}; make the cache with kvjax.empty_cache.")

    jax.tree.map(check, made, cache.state, is_leaf=lambda leaf: isinstance(leaf, HeadState))


def check_shapes(
    cache: Cache, query: Float[Array, "B T N D"], key: Float[Array, "B T K D"], value: Float[Array, "B T K D"]
) -> tuple[Array, Array, Array]:
    """Return a block's queries, keys and values as arrays, after a check that they fit each other and the cache."""
    check_cache(cache)
    B, K = cache.heads_shape[-2:]
    D = cache.arrays.head_dim
    query, key, value = real_array("query", query), real_array("key", key), real_array("value", value)
    for name, array in {"query": query, "key": key, "value": value}.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} is {array.dtype}; give floating-point numbers, such as float32 or bfloat16.")
    shapes = query.shape, key.shape, value.shape
    fit = all(len(shape) == 4 and shape[0] == B and shape[3] == D for shape in shapes)
    if not fit or key.shape != value.shape or query.shape[1] != key.shape[1]:
        given = f"query {query.shape}, key {key.shape} and value {value.shape} do not fit each other and a cache"
        raise ValueError(f"{given} with B = {B}, K = {K} and D = {D}: expected [B, T, N, D] and twice [B, T, K, D].")
    if not query.shape[1]:
        raise ValueError("the block has no tokens; give at least one, with position -1 where a row has none.")
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
    if (sinks := context.sink_logits) is not None:
        check_sinks(real_array("sink_logits", sinks), query.shape[2])
        if not hasattr(sinks, "astype"):
            raise ValueError(f"sink_logits is a {type(sinks).__name__}; give an array.")
    if is_known(context.sliding_window) and context.sliding_window is not None:
        check_count("sliding_window", context.sliding_window, 1, "a query sees at least its own position")
    if context.tokens is not None and np.shape(context.tokens) != query.shape[:2]:
        raise ValueError(f"the context's tokens are {np.shape(context.tokens)}; expected {query.shape[:2]}, ids.")
    if context.excess is not None:
        check_count("excess", context.excess, 0, "give a number of tokens, or None")
    known = is_known(cache.position, position, context.layer)
    if not known:  # else insert checks the cache's contents
        check_fits(cache, T, position)
    check_policy_given(policy, budget)
    if policy is not None:
        _check_projections(policy, context, cache.heads_shape[-1], *query.shape[2:])
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


def _check_projections(policy: Policy, context: Context, K: int, N: int, D: int) -> None:
    """Check that the parts of W_O that a policy reads are of as many heads as the block."""
    for kind in () if context.projection is None else sorted(policy.needs.projections):
        part, heads = part_of(context.projection, kind, policy.name), (K, D) if kind == "joint" else (K, N // K, D)
        if part.ndim != len(heads) + 1 or part.shape[: len(heads)] != heads:
            raise ValueError(f"W_O's {kind!r} is {part.shape}; expected {heads} and one axis more, for these heads.")


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
            more = beyond_mean(policy.allocation, windows, K, ways, row) if window is None else 0
            return pages_for(heads * (row + entering) + K // ways * more, heads, cache.page_size)

        needed = max(sum(pages(int(row)) for row in rows) for rows in budget.reshape(devices, -1))
        if needed > cache.num_pages:
            given = f"{B // devices * heads} heads may hold {np.mean(budget):g} tokens each and {entering} more"
            raise ValueError(f"{given}: make the cache with {needed} pages, not {cache.num_pages} (kvjax.pages_for).")
