"""The state before the first block, and its cache made smaller after the prompt."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax import KVCache, PagedCache, SplitCache
from kvjax.capacity import rounded_up
from kvjax.insertion import Cache
from kvjax.making import blank
from kvjax.matching import samples_of, without_samples
from kvjax.paged import trimmed, with_room
from kvjax.split import on_mesh
from models import hosts
from models.decoder import Decoder
from models.layer_caches import AnyCache, LayerCaches
from models.plan import Plan, Sizes
from models.steps import DecodeState, Run


def start(run: Run, sizes: Sizes, batch: int, cache: AnyCache | None = None) -> DecodeState:
    """Build the first state: an empty cache, or a kept one resized for the run, and empty predictor and source."""
    plan, config = run.plan, run.model.config
    cache = _empty_cache(run.model, plan, sizes, batch) if cache is None else _with_room(cache, plan, sizes)
    predictor, source = None, ()
    slots = sizes.predictor_slots
    if slots and plan.selection is not None:
        source = plan.selection.source.init(batch, plan.heads, slots, config.head_dim, layers=config.num_layers)
    if slots and run.butler is not None:  # a policy keeps the importance keys with its tokens, to evict them together
        predictor = run.butler.init_cache(batch, slots, importance_keys=plan.selection is not None)
    return DecodeState(cache, predictor, source)


def _empty_cache(model: Decoder, plan: Plan, sizes: Sizes, batch: int) -> Cache:
    config, paged = model.config, sizes.prompt_slots == 0
    return blank(
        plan.policy,
        layers=config.num_layers,
        batch=batch,
        kv_heads=plan.heads,
        group=config.num_heads // plan.heads,
        slots=sizes.slots if paged else sizes.prompt_slots,
        head_dim=config.head_dim,
        dtype=plan.cache_dtype,
        positions=plan.positions,
        pages=sizes.pages if paged else None,
        page_size=sizes.page_size,
        mesh=plan.several if paged else plan.mesh,
    )


def _with_room(cache: AnyCache, plan: Plan, sizes: Sizes) -> AnyCache:
    """Resize a kept cache to the slots, or pages, that a run needs."""
    if isinstance(cache, PagedCache):
        return with_room(cache, pages=sizes.pages, most=sizes.slots)
    if isinstance(cache, SplitCache):
        return cache.map(functools.partial(with_room, pages=sizes.pages, most=sizes.slots))
    if isinstance(cache, LayerCaches):
        return LayerCaches(tuple(_of_size(layer, sizes.prompt_slots) for layer in cache.layers))
    cache = _of_size(cache, sizes.prompt_slots)
    return cache if plan.mesh is None else on_mesh(cache, plan.mesh)


def _of_size(cache: KVCache, slots: int) -> KVCache:
    return cache if cache.num_slots == slots else kvjax.compact(cache, slots)


def shrinks(cache: AnyCache, sizes: Sizes) -> bool:
    """Return whether a cache held the whole prompt, and is larger than the context needs after the eviction."""
    return not isinstance(cache, PagedCache | SplitCache) and (sizes.pages > 0 or sizes.slots != sizes.prompt_slots)


def settled(cache: AnyCache, plan: Plan) -> AnyCache:
    """Drop what a policy remembers for an eviction where there is no other, once the context is in."""
    if plan.when != "prompt" or plan.evict_every:
        return cache
    if isinstance(cache, LayerCaches):
        return LayerCaches(tuple(_without_samples(layer) for layer in cache.layers))
    return _without_samples(cache)


def _without_samples[Kind: (KVCache, PagedCache, SplitCache)](cache: Kind) -> Kind:
    if isinstance(cache, SplitCache) or samples_of(cache.state) is None:
        return cache
    return dataclasses.replace(cache, state=without_samples(cache.state))


def shrink(state: DecodeState, plan: Plan, sizes: Sizes) -> DecodeState:
    """Move the tokens of a cache that held the whole prompt into a smaller one, after the eviction."""
    state = dataclasses.replace(state, cache=settled(state.cache, plan))
    cache: AnyCache = state.cache
    if not shrinks(cache, sizes):
        return state
    assert isinstance(cache, KVCache)
    if sizes.pages:
        given: Any = dict(pages=sizes.pages, page_size=sizes.page_size, most=sizes.slots)
        mesh = plan.several
        cache = kvjax.pack(cache, **given) if mesh is None else SplitCache.pack(cache, mesh=mesh, **given)
    else:
        cache = kvjax.compact(cache, sizes.slots)
    return dataclasses.replace(state, cache=cache)


def without_room(cache: Cache) -> Cache:
    """Return a cache with no more slots, or pages, than its tokens need, rounded up to few sizes."""
    if isinstance(cache, PagedCache):
        pages = rounded_up(len(cache.owner) - int(cache.num_free))
        return _trimmed(cache, pages) if pages < len(cache.owner) else cache
    if isinstance(cache, KVCache):
        slots = rounded_up(int(np.max(hosts.fetched(cache.num_live))))
        return _compact(cache, slots) if slots < cache.num_slots else cache
    return cache


_trimmed = jax.jit(trimmed, static_argnames="pages")
_compact = jax.jit(kvjax.compact, static_argnames="slots")
