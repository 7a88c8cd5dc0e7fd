"""Checks that a policy fits a model, a cache, a block and a budget."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.cache_attention.api import check_statistics
from kvjax._src.cache import HeadState, KVCache, check_all_heads, is_emptied
from kvjax._src.chains import LINKS, policy_of
from kvjax._src.checks import check_count
from kvjax._src.layer import LayerBlock, ask, attend_heads, with_scores
from kvjax._src.observation import Context, Needs
from kvjax._src.paged import PagedCache
from kvjax._src.policy import Policy


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
    if policy is not None and policy.needs.window > block:
        given = f"{policy.name!r} observes the last {policy.needs.window} queries, but a block has {block}"
        raise ValueError(f"{given}: give a block of at least {policy.needs.window}, or a smaller window={block}.")


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
    policy = policy_of(policy)
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


@functools.cache
def check_state(policy: Policy, head_dim: int, K: int, G: int) -> None:
    """Check that each link's state has an entry per slot or head, that the statistics exist, and no score is NaN."""
    check_statistics(policy.needs.statistics, policy.needs.window)
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
    needs = dataclasses.replace(policy.needs, statistics=frozenset(), window=0, over="mean", queries=False)
    if needs not in (Needs(), Needs(errors="value")) or policy.positions != "absolute":
        return
    T = max(policy.needs.window, 4)
    drawn = np.random.default_rng(0).normal(size=(1, T, K * (G + 2), head_dim)).astype(np.float32)
    reference = Context(implementation="reference")

    def nan(drawn: Any) -> Any:
        state = policy.state(1, K, G, T, head_dim)
        cache = KVCache.init(batch=1, kv_heads=K, slots=T, head_dim=head_dim, state=state)
        query, key, value = jnp.split(drawn, [K * G, K * (G + 1)], axis=2)
        block = LayerBlock(query, key, value, jnp.arange(T)[None])
        cache = cache.insert(key, value, block.position)
        _, columns, block, here = attend_heads(cache, block, policy.needs, reference)
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
    if policy.needs.of_text is not None and cache.positions != "absolute":
        raise ValueError(f"{policy.name!r} {policy.needs.of_text} positions in the text, not {cache.positions!r} ones.")
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
