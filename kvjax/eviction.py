"""Which tokens stay: the `budget` best of each head, or of heads that compete, exactly, without a sort."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.allocation import UNIFORM, Allocation, Contest, parse_allocation
from kvjax.cache import KVCache
from kvjax.checks import check_tokens, plain, real_array
from kvjax.insertion import Cache
from kvjax.paged import PagedCache, release
from kvjax.selection import keep_mask


def evict(
    cache: Cache,
    scores: Float[Array, "*slots"],
    budget: int | Int[Array, ""] | Int[Array, "B"],
    *,
    layer: int | Int[Array, ""] | None = None,
    excess: int | None = None,
    allocation: Allocation | str = UNIFORM,
    measured: Float[Array, "L B measures"] | None = None,
    entered: Int[Array, "B"] | None = None,
) -> Cache:
    """Frees the slots of all but the best tokens. Keys and values stay where they are.

    A paged cache gives back the pages that its heads no longer need; the tokens left in those move.

    Args:
        scores: retention scores, larger = keep, shaped like ``cache.position`` (one layer of it with ``layer``). Free
            slots are ignored; NaN loses to everything; ties go to the more recent token.
        budget: how many tokens each head keeps, on average where heads compete, at least 1; one number or one a row.
        layer: which layer of a stacked plain cache.
        excess: a promise that no head holds more than ``budget + excess`` tokens. With 1, as in decode, a uniform
            selection is an argmin.
        allocation: who gets how many slots, or its short name; see :mod:`kvjax.allocation`.
        measured: what the allocation measured of each layer (:func:`kvjax.observe`); only "cake" asks for it.
        entered: how many tokens of each row came in with this block; only "cake" asks for it.

    Raises:
        ValueError: scores that do not fit the cache, a budget below 1, an allocation over layers with ``layer``.

    Example:
        >>> import jax.numpy as jnp
        >>> import kvjax
        >>> cache = kvjax.KVCache.init(batch=1, kv_heads=1, slots=3, head_dim=2)
        >>> cache = kvjax.insert(cache, jnp.ones((1, 3, 1, 2)), jnp.ones((1, 3, 1, 2)))
        >>> kvjax.evict(cache, jnp.array([[[0.5, 0.1, 0.1]]]), budget=2).position.tolist()
        [[[0, -1, 2]]]
    """
    layer = plain(layer)
    if isinstance(allocation, str):
        allocation = parse_allocation(allocation)
    if not isinstance(allocation, Allocation):
        raise ValueError(f"{allocation!r} is not an allocation; give one of kvjax.allocation, or its short name.")
    if not isinstance(cache, Cache):
        raise ValueError(f"a {type(cache).__name__} was given; evict takes a KVCache or a PagedCache.")
    scores, position = real_array("scores", scores), cache.position
    if isinstance(cache, PagedCache):
        if layer is not None:
            raise ValueError("a paged cache evicts in all its layers at once, as pages are shared; leave layer out.")
    elif layer is not None:
        if len(cache.heads_shape) == 2 or (isinstance(layer, int) and not 0 <= layer < cache.heads_shape[0]):
            raise ValueError(
                f"layer is {layer}, but the cache has the layers {list(range(*cache.heads_shape[:-2] or (0,)))}."
            )
        position = position[layer]
        if not allocation.one_layer:
            raise ValueError(
                f"the allocation {allocation.name!r} compares layers, but layer= names one; "
                "observe all layers first (kvjax.observe), then evict once."
            )
    if scores.shape != position.shape:
        raise ValueError(f"scores {scores.shape} do not fit the slots: expected {position.shape}.")
    budget = check_tokens(budget, cache.next_position.shape)
    if allocation.even and not isinstance(cache, PagedCache):
        stays = keep_mask(scores, position, budget, excess=excess)
    else:
        contest = _contest(cache, scores, position, budget, layer, measured, entered)
        all_fit = (contest.budget >= cache.num_slots)[contest.batch]  # rows that nothing has to leave, as idle ones
        stays = allocation.keep(contest) | (contest.live & all_fit[..., None])
    position = jnp.where(stays, position, -1)
    if isinstance(cache, PagedCache):
        return release(dataclasses.replace(cache, position=position))
    return set_positions(cache, position, layer)


def set_positions(cache: KVCache, position: Int[Array, "*slots"], layer: int | Int[Array, ""] | None = None) -> KVCache:
    """The plain cache, or one layer of it, with other positions: what is -1 there is free now."""
    if layer is not None:
        position = cache.position.at[layer].set(position)
    return dataclasses.replace(cache, position=position)


def _contest(cache, scores, position, budget, layer, measured, entered) -> Contest:
    """Whose each row of slots is: a row a head in a plain cache, a row a page in a paged one."""
    *L, B, K = cache.heads_shape
    layers = L[0] if L and layer is None else 1
    if isinstance(cache, PagedCache):
        head = jnp.maximum(cache.owner, 0)
    else:
        head = jnp.arange(layers * B * K, dtype=jnp.int32).reshape(position.shape[:-1])
    nothing = jnp.zeros(B, jnp.int32)
    return Contest(
        scores=scores,
        position=position,
        layer=head // (B * K),
        batch=head // K % B,
        head=head % K,
        budget=jnp.broadcast_to(jnp.asarray(budget, jnp.int32), (B,)),
        seen=cache.next_position,
        entered=nothing if entered is None else entered,
        measured=measured,
        layers=layers,
        heads=K,
    )
