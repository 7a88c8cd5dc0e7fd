"""The state before the first block, and its cache made smaller after the prompt."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np

import kvjax
from kvjax import LayerCaches, PagedCache, SplitCache
from kvjax._src.border import on_mesh
from kvjax._src.cache import PARTS
from kvjax._src.capacity import CacheSpec, rounded_up
from kvjax._src.matching import without_samples
from kvjax._src.new_caches import blank
from kvjax._src.paged import trimmed
from kvjax._src.split_cache import ModelCache
from models import hosts
from models.plan import Plan
from models.steps import DecodeState, Run


def start(run: Run, sizes: CacheSpec, batch: int, cache: ModelCache | None = None) -> DecodeState:
    """Build the first state: an empty cache, or a kept one resized for the run, and empty memories."""
    plan = run.plan
    cache = _empty_cache(plan, sizes.first) if cache is None else _with_room(cache, plan, sizes)
    return DecodeState(cache, *(_memories(run, batch, plan.memory_slots) if plan.memory_slots else ()))


def _memories(run: Run, batch: int, slots: int) -> tuple[Any, Any]:
    """Return the empty memory of a network that looks ahead, and the empty state of a selection's source."""
    plan, config, memory, source = run.plan, run.model.config, None, ()
    if plan.selection is not None:
        sizes = batch, plan.heads, slots, config.head_dim
        source = tuple(plan.selection.source.init(*sizes) for _ in config.cached_layers)
    if run.ahead is not None:  # a policy keeps the importance keys with its tokens, to evict them together
        memory = run.ahead.init_cache(batch, slots, importance_keys=plan.selection is not None)
    return memory, source


def _empty_cache(plan: Plan, spec: CacheSpec) -> ModelCache:
    if not plan.each:
        return cast(ModelCache, blank(spec))
    of_each: list[Any] = [blank(dataclasses.replace(spec, policy=policy)) for policy in plan.each]
    layers = zip(*(cache.layers for cache in of_each), strict=True)
    each = tuple(dataclasses.replace(own[0], state=tuple(one.state for one in own)) for own in layers)
    return dataclasses.replace(of_each[0], layers=each)


def _with_room(cache: Any, plan: Plan, sizes: CacheSpec) -> ModelCache:
    """Resize a kept cache to the slots, or pages, that a run needs."""
    if cache.paged:
        return cache.map(lambda part: part.resized(sizes.slots, sizes.pages))
    cache = cache.map(lambda own, slots: own.resized(slots), (sizes.first.layer_slots, PARTS))
    return cache if plan.mesh is None else on_mesh(cache, plan.mesh)


def shrinks(cache: ModelCache, sizes: CacheSpec) -> bool:
    """Return whether a cache that held more of the prompt is larger than the context needs after the eviction."""
    if cache.paged:
        return sizes.prompt_pages > sizes.pages
    return sizes.pages > 0 or sizes.layer_slots != cache.layer_slots


def settled(cache: ModelCache, plan: Plan) -> ModelCache:
    """Drop the sample queries of a cache from which nothing more is evicted, once the context is in."""
    if plan.when != "prompt" or plan.evict_every or plan.each:
        return cache
    return cache.map(lambda part: dataclasses.replace(part, state=without_samples(part.state)))


def shrink(state: DecodeState, plan: Plan, sizes: CacheSpec) -> DecodeState:
    """Move the tokens of a cache that held more of the prompt into a smaller one, after the eviction."""
    cache: Any = settled(state.cache, plan)
    if shrinks(cache, sizes) and cache.paged:
        cache = _trimmed(cache, sizes.pages, sizes.slots)
    elif shrinks(cache, sizes):
        cache = _packed(cache, plan, sizes) if sizes.pages else cache.map(_compact, (sizes.layer_slots, PARTS))
    return dataclasses.replace(state, cache=cache)


@functools.partial(jax.jit, static_argnames=("plan", "sizes"))
def _packed(cache: LayerCaches, plan: Plan, sizes: CacheSpec) -> PagedCache | SplitCache:
    given: Any = dict(pages=sizes.pages, page_size=sizes.page_size, most=sizes.slots)
    return kvjax.pack(cache, **given) if plan.several is None else SplitCache.pack(cache, mesh=plan.several, **given)


@functools.singledispatch
def without_room(cache: ModelCache, rounded: Callable[[int], int] = rounded_up) -> ModelCache:
    """Return a cache with no more slots, or pages, than its tokens need, rounded up to few sizes (``int``: not)."""
    return cache


@without_room.register(PagedCache)
def _without_pages(cache: PagedCache, rounded: Callable[[int], int] = rounded_up) -> PagedCache:
    pages = rounded(len(cache.owner) - int(cache.num_free))
    return _trimmed(cache, pages) if pages < len(cache.owner) else cache


@without_room.register(LayerCaches)
def _without_slots(cache: LayerCaches, rounded: Callable[[int], int] = rounded_up) -> LayerCaches:
    held = np.max(hosts.fetched(cache.num_live), axis=(1, 2))
    slots = tuple(min(rounded(max(int(n), 1)), own) for n, own in zip(held, cache.layer_slots, strict=True))
    return cache if slots == cache.layer_slots else cache.map(_compact, (slots, PARTS))


_trimmed = jax.jit(trimmed, static_argnames=("pages", "slots"))
_compact = jax.jit(kvjax.compact, static_argnums=1)
