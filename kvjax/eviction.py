"""Eviction: the `budget` best tokens of each head, or of heads that compete, stay; exact, and without a sort."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.caote_topk.api import caote_topk_unchecked
from kernels_pallas.dispatch import Implementation
from kvjax.allocation import UNIFORM, Allocation, Contest, parse_allocation
from kvjax.cache import PARTS, KVCache, check_all_heads, with_layer
from kvjax.checks import check_count, check_tokens, plain, real_array
from kvjax.insertion import Cache, check_cache
from kvjax.layers import LayerCaches
from kvjax.merging import Merging, folded
from kvjax.observation import Weights
from kvjax.paged import PagedCache
from kvjax.split import OF_ROWS, SAME
from kvjax.topk import keep_mask
from kvjax.window import begin_anew

Budget = int | Int[Array, ""] | Int[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Evidence:
    """A policy's scores of the slots after a block, with all else that :func:`evict` needs besides the budget.

    Attributes:
        scores: retention scores, ``+inf`` where a token is protected, in the shape of the slots; or the
            :class:`Weights` that they are computed from.
        entered: how many tokens of each row came in with the block. A row without any loses nothing.
        protected: the slots that stay whatever their weights; None where ``scores`` mark them.
        stays: the slots that links have marked in some heads of a layer; None where ``scores`` mark them.
        measured: what the allocation measured of the attention, if anything.
        end: the position from which on tokens leave whatever they score, per row; None where all may stay.
        window: the layer's sliding window, or one per layer, which limits its budget; None where no layer has one.
        allocation: how many slots each head gets.
        merging: how the values of evicted tokens are folded into those that stay; None for not at all.

    Example:
        >>> import kvjax
        >>> cache = kvjax.KVCache.init(
        ...     batch=1, kv_heads=2, slots=4, head_dim=4, layers=3
        ... )
        >>> kvjax.Evidence.of_layers(
        ...     cache, kvjax.parse("laprox@model").allocation
        ... ).scores.shape
        (3, 1, 2, 4)
    """

    scores: Float[Array, "*slots"] | Weights
    entered: Int[Array, "B"]
    protected: Bool[Array, "B K S"] | None = None
    stays: Bool[Array, "B K S"] | None = None
    measured: Float[Array, "*L B K measures"] | None = None
    end: Int[Array, "B"] | None = None
    window: Int[Array, "*L"] | None = None
    allocation: Allocation = dataclasses.field(default=UNIFORM, metadata={"static": True})
    merging: Merging | None = dataclasses.field(default=None, metadata={"static": True})

    def spares(self, budget: Budget, slots: int) -> Bool[Array, "B"]:
        """Return a mask of the rows that lose nothing whatever they score, with so many slots per head."""
        enough = (jnp.asarray(budget) >= slots) & self.allocation.fills  # else a token that scores too little leaves
        return (self.entered == 0) | enough

    def waits(self, budget: Budget, slots: int) -> Bool[Array, "B"]:
        """Return a mask of the rows that this eviction leaves out, so that their windows of queries go on.

        A cache may have no more slots than a short text needs. So a budget of all slots is no sign: with it the row
        would have other windows beside longer texts.
        """
        return self.spares(budget, slots + 1)

    @classmethod
    def of_layers(
        cls,
        cache: Cache | LayerCaches,
        allocation: Allocation,
        end: Int[Array, "B"] | None = None,
        window: Int[Array, "L"] | None = None,
        merging: Merging | None = None,
    ) -> Evidence:
        """Make empty evidence for all layers of a cache; :meth:`with_layer` fills it in.

        In a scan, whose carry keeps its structure, ``window`` must be given where layers have sliding windows.
        """
        measures = allocation.measures

        def of_part(part: Any, end: Int[Array, "B"] | None) -> Evidence:
            return cls(
                scores=jnp.full(part.slots_shape, -jnp.inf, jnp.float32),
                entered=jnp.zeros(part.heads_shape[-2], jnp.int32),
                measured=jnp.zeros((*part.heads_shape, measures), jnp.float32) if measures else None,
                end=end,
                window=window,
                allocation=allocation,
                merging=merging,
            )

        return cache.read(of_part, (end, OF_ROWS), outputs=PARTS)

    def with_layer(self, cache: Cache, layer: int | Int[Array, ""] | None, said: Evidence) -> Evidence:
        """Return the evidence with what :func:`kvjax.observe` returned for one layer of the cache."""
        others = (self, PARTS), (layer, SAME), (said, PARTS)
        return cache.read(lambda part, own, layer, said: own._with_layer(part, layer, said), *others, outputs=PARTS)

    def _with_layer(self, cache: KVCache | PagedCache, layer: int | Int[Array, ""] | None, said: Evidence) -> Evidence:
        assert not isinstance(self.scores, Weights) and not isinstance(said.scores, Weights)
        if said.merging != self.merging:
            raise ValueError("the policy merges values otherwise; give Evidence.of_layers(merging=policy.merging).")
        measured = self.measured
        if measured is not None:
            measured = said.measured if layer is None else measured.at[layer].set(said.measured)
        scores = cache.write_layer(self.scores, said.scores, layer)
        window = self.window
        if said.window is not None and layer is None:
            window = said.window
        elif said.window is not None:
            none = jnp.full(cache.heads_shape[0], jnp.iinfo(jnp.int32).max, jnp.int32)
            window = (none if window is None else window).at[layer].set(said.window)
        return dataclasses.replace(
            self, scores=scores, entered=said.entered, measured=measured, end=said.end, window=window
        )


def evict(
    cache: Cache | LayerCaches,
    scores: Float[Array, "*slots"] | Evidence,
    budget: Budget,
    *,
    layer: int | Int[Array, ""] | None = None,
    excess: int | None = None,
    allocation: Allocation | str = UNIFORM,
    implementation: Implementation = "auto",
) -> Any:
    """Free the slots of all but the best tokens. Keys and values stay where they are.

    A paged cache frees the pages that its heads no longer need, after moving the tokens left in them. Where a policy
    observes a window of queries, the next query starts a new window. A row whose budget is above the slots per head
    loses nothing, and its window goes on: so some rows of a batch may be evicted from, and others not.

    Args:
        scores: retention scores, larger = keep, shaped like ``cache.position`` (one layer of it with ``layer``). Free
            slots are ignored; NaN loses to everything; ties go to the more recent token. Or a policy's evidence
            (:func:`kvjax.observe`), which has its own allocation.
        budget: how many tokens each head keeps, on average where heads compete, at least 1; one number or one per row.
            In a layer with a sliding window, which a policy's evidence knows, it is at most the window.
        layer: the layer to evict from in a stacked plain cache.
        excess: a promise that no head holds more than ``budget + excess`` tokens. With 1, as in decode, a uniform
            selection is an argmin.
        allocation: how many slots each head gets: an allocation or its short name; see :mod:`kvjax.allocation`.
        implementation: of an eviction by CAOTE; see :func:`kernels_pallas.caote_topk`.

    Raises:
        ValueError: if scores do not fit the cache, the budget is below 1, or ``layer`` is given with an allocation
            that compares layers.

    Example:
        >>> import jax, kvjax, numpy as np
        >>> cache = kvjax.KVCache.init(batch=1, kv_heads=1, slots=3, head_dim=2)
        >>> cache = jax.jit(kvjax.insert)(
        ...     cache, np.ones((1, 3, 1, 2)), np.ones((1, 3, 1, 2))
        ... )
        >>> jax.jit(kvjax.evict)(
        ...     cache, np.array([[[0.5, 0.1, 0.1]]]), budget=2
        ... ).position.tolist()
        [[[0, -1, 2]]]
    """
    layer = plain(layer)
    check_cache(cache)
    if excess is not None:
        excess = check_count("excess", excess, 0, "give a number of tokens, or None")
    budget = check_tokens(budget, cache.heads_shape[-2:-1])
    if isinstance(scores, Evidence):
        if allocation is not UNIFORM:
            raise ValueError("an allocation was given with a policy's evidence, which has its own; leave it out.")
        evidence = scores
    else:
        allocation, scores = parse_allocation(allocation), real_array("scores", scores)

        def of_part(part: Any, scores: Array) -> Evidence:
            return Evidence(scores, jnp.ones_like(part.next_position), allocation=allocation)

        evidence = cache.read(of_part, (scores, PARTS), outputs=PARTS)
    _check_layer(cache, layer, evidence.allocation)
    check_all_heads(cache, f"the allocation {evidence.allocation.name!r}", not evidence.allocation.even)
    shape = cache.slots_shape if layer is None else cache.slots_shape[1:]
    if isinstance(evidence.scores, Weights):
        of_heads = evidence.scores.weights.shape
        if len(of_heads) != 4 or (*of_heads[:2], of_heads[3]) != shape[-3:]:
            raise ValueError(f"weights {of_heads} do not fit the slots {shape}: expected [B, K, G, S].")
    elif evidence.scores.shape != shape:
        raise ValueError(f"scores {evidence.scores.shape} do not fit the slots: expected {shape}.")
    return evict_by(cache, evidence, budget, layer=layer, excess=excess, implementation=implementation)


def evict_by(cache: Any, evidence: Evidence, budget: Budget, **options: Any) -> Any:
    """Run :func:`evict` by a policy's evidence, without its checks; with its ``layer``, ``excess``, implementation."""
    if isinstance(cache, LayerCaches):
        return _evict_layers(cache, evidence, budget)
    evict = functools.partial(_evict, **options)
    return cache.map(evict, (evidence, PARTS), (budget, OF_ROWS if np.ndim(budget) else SAME))


def _evict_layers(cache: LayerCaches, evidence: Evidence, budget: Budget) -> LayerCaches:
    """Evict from all layers together; called from the host, nothing but positions and states is copied."""
    bare = cache.map(lambda own: dataclasses.replace(own, entries={}))
    left = _evict_slots(bare, dataclasses.replace(evidence, merging=None), budget)
    after = left.map(lambda own, whole: dataclasses.replace(own, entries=whole.entries), (cache.layers, PARTS))
    if evidence.merging is None:
        return after
    fold = functools.partial(_fold, evidence.merging)
    return after.map(lambda own, was: fold(own, was.position, evidence.end), (cache.layers, PARTS))


@jax.jit
def _evict_slots(cache: LayerCaches, evidence: Evidence, budget: Budget) -> LayerCaches:
    left: Any = evict_by(cache.slots, evidence, budget)
    return cache.with_slots(left, ~evidence.waits(budget, cache.num_slots))


@functools.partial(jax.jit, static_argnums=0)
def _fold(merging: Merging, cache: KVCache, before: Int[Array, "B K S"], end: Int[Array, "B"] | None) -> KVCache:
    if end is not None:  # copies leave without a trace
        before = jnp.where(before >= end[:, None, None], -1, before)
    return folded(merging, cache, before, cache.position)


def _evict(
    cache: Any,
    evidence: Evidence,
    budget: Budget,
    layer: int | Int[Array, ""] | None = None,
    excess: int | None = None,
    implementation: Implementation = "auto",
) -> KVCache | PagedCache:
    # A block's statistics say nothing about a row without tokens in it: such a row keeps all. One more than the slots
    # is as good as any larger budget, whose sum over the heads int32 may not hold.
    most = cache.num_slots + 1
    budget = jnp.where(evidence.entered > 0, jnp.minimum(jnp.asarray(budget, jnp.int32), most), most)
    position = cache.position if layer is None else cache.position[layer]
    if evidence.end is not None:
        cache, position = _without_copies(cache, position, evidence.end, layer)
    begins = ~evidence.waits(budget, cache.num_slots)
    cache = dataclasses.replace(cache, state=begin_anew(cache.state, begins, layer))
    if isinstance(evidence.scores, Weights):
        value = jax.lax.stop_gradient(cache.value)
        after = caote_topk_unchecked(
            evidence.scores.weights, value, position, budget, evidence.protected, **evidence.scores.kind,
            excess=excess, with_scores=False, layer=layer, value_scale=cache.value_scale,
            implementation=implementation,
        ).position  # fmt: skip
    elif evidence.allocation.even and not cache.paged:
        after = jnp.where(keep_mask(evidence.scores, position, budget, excess=excess), position, -1)
    else:
        after = _winners(_contest(cache, evidence, position, budget, layer), evidence, budget, cache.num_slots)
    if evidence.merging is not None:
        cache = folded(evidence.merging, cache, position, after, layer, None if cache.paged else excess)
    return dataclasses.replace(cache, position=with_layer(cache.position, after, layer)).released()


def _without_copies(
    cache: Any, position: Int[Array, "*slots"], end: Int[Array, "B"], layer: int | Int[Array, ""] | None
) -> tuple[Any, Int[Array, "*slots"]]:
    """Return the cache and its positions without copies, in this layer only: the others are yet to be evicted from."""
    row = cache.batch_rows() if layer is None else cache.batch_rows()[0]
    position = jnp.where(position >= end[row][..., None], -1, position)
    return dataclasses.replace(cache, next_position=jnp.minimum(cache.next_position, end)), position


def _winners(contest: Contest, evidence: Evidence, budget: Budget, slots: int) -> Int[Array, "*slots"]:
    """Return the positions of the tokens that stay where heads compete; rows that are spared keep all."""
    whole = evidence.spares(budget, slots)
    stays = evidence.allocation.keep(contest) | (contest.live & whole[contest.batch][..., None])
    return jnp.where(stays, contest.position, -1)


def _check_layer(cache: Cache | LayerCaches, layer: int | Int[Array, ""] | None, allocation: Allocation) -> None:
    """Check that the cache and the allocation allow an eviction from one layer."""
    if layer is None:
        return
    if cache.paged:
        raise ValueError("a paged cache evicts in all its layers at once, as pages are shared; leave layer out.")
    if len(cache.heads_shape) == 2 or (isinstance(layer, int) and not 0 <= layer < cache.heads_shape[0]):
        layers = list(range(*cache.heads_shape[:-2] or (0,)))
        raise ValueError(f"layer is {layer}, but the cache has the layers {layers}.")
    if not allocation.one_layer:
        raise ValueError(f"the allocation {allocation.name!r} compares layers, but layer= names one; evict from all.")


def _contest(
    cache: KVCache | PagedCache,
    evidence: Evidence,
    position: Int[Array, "*slots"],
    budget: Budget,
    layer: int | Int[Array, ""] | None,
) -> Contest:
    """Build the contest for the slots; a row of slots is a head in a plain cache, a page in a paged one."""
    *L, B, K = cache.heads_shape
    layers = L[0] if L and layer is None else 1
    head, axis = cache.heads(layer), cache.axis
    assert not isinstance(evidence.scores, Weights)
    measured = evidence.measured
    if measured is not None:
        measured = measured.reshape(layers, B, K, -1)
        if axis:  # a few numbers per head
            measured = jax.lax.all_gather(measured, axis, axis=2, tiled=True)
    budgets = jnp.broadcast_to(jnp.asarray(budget, jnp.int32), (layers, B))
    if evidence.window is not None:
        budgets = jnp.minimum(budgets, evidence.window.reshape(-1, 1))
    return Contest(
        scores=evidence.scores,
        position=position,
        layer=head // (B * K),
        batch=head // K % B,
        head=head % K + cache.first_head,
        budget=budgets,
        seen=cache.next_position,
        entered=evidence.entered,
        measured=measured,
        layers=layers,
        heads=cache.all_heads,
        axis=axis,
    )
