"""The state before the first block, and its cache made smaller after the prompt."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import kvjax
from kvjax import KVCache, PagedCache, SplitCache
from kvjax.insertion import Cache
from kvjax.making import blank
from kvjax.paged import with_room
from kvjax.split import on_mesh
from models.decoder import Decoder
from models.layer_caches import AnyCache, LayerCaches
from models.plan import Plan
from models.steps import DecodeState, Run


def start(run: Run, batch: int, cache: AnyCache | None = None) -> DecodeState:
    """Build the first state: an empty cache, or a kept one resized for the run, and empty predictor and source."""
    plan, config = run.plan, run.model.config
    cache = _empty_cache(run.model, plan, batch) if cache is None else _with_room(cache, plan)
    predictor, source = None, ()
    slots = plan.predictor_slots
    if slots and plan.selection is not None:
        source = plan.selection.source.init(batch, plan.heads, slots, config.head_dim, layers=config.num_layers)
    if slots and run.butler is not None:  # a policy keeps the importance keys with its tokens, to evict them together
        predictor = run.butler.init_cache(batch, slots, importance_keys=plan.selection is not None)
    return DecodeState(cache, predictor, source)


def _empty_cache(model: Decoder, plan: Plan, batch: int) -> Cache:
    config, paged = model.config, plan.pages > 0 and plan.when == "block"
    return blank(
        plan.policy,
        layers=config.num_layers,
        batch=batch,
        kv_heads=plan.heads,
        group=config.num_heads // plan.heads,
        slots=plan.slots if paged else plan.prompt_slots,
        head_dim=config.head_dim,
        dtype=plan.cache_dtype,
        positions=plan.positions,
        pages=plan.pages if paged else None,
        page_size=plan.page_size,
        mesh=plan.several if paged else plan.mesh,
    )


def _with_room(cache: AnyCache, plan: Plan) -> AnyCache:
    """Resize a kept cache to the slots, or pages, of the plan."""
    if isinstance(cache, PagedCache):
        return with_room(cache, pages=plan.pages, most=plan.slots)
    if isinstance(cache, SplitCache):
        return cache.map(functools.partial(with_room, pages=plan.pages, most=plan.slots))
    if isinstance(cache, LayerCaches):
        return LayerCaches(tuple(_of_size(layer, plan.prompt_slots) for layer in cache.layers))
    cache = _of_size(cache, plan.prompt_slots)
    return cache if plan.mesh is None else on_mesh(cache, plan.mesh)


def _of_size(cache: KVCache, slots: int) -> KVCache:
    return cache if cache.num_slots == slots else kvjax.compact(cache, slots)


def shrink(state: DecodeState, plan: Plan) -> DecodeState:
    """Move the tokens of a cache that held the whole prompt into a smaller one, after the eviction."""
    cache: AnyCache = state.cache
    if isinstance(cache, PagedCache | SplitCache):
        return state
    if plan.when == "prompt" and plan.pages:
        assert isinstance(cache, KVCache)
        sizes: Any = dict(pages=plan.pages, page_size=plan.page_size, most=plan.slots)
        mesh = plan.several
        cache = kvjax.pack(cache, **sizes) if mesh is None else SplitCache.pack(cache, mesh=mesh, **sizes)
    elif not plan.pages and plan.slots != plan.prompt_slots:
        assert isinstance(cache, KVCache)
        cache = kvjax.compact(cache, plan.slots)
    return dataclasses.replace(state, cache=cache)
