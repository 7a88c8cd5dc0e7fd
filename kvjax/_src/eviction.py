"""Eviction: the `budget` best tokens of each head, or of heads that compete, stay; exact, and without a sort."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.caote_topk.api import caote_topk_unchecked
from kernels_pallas.caote_topk.reference import Ends
from kernels_pallas.dispatch import Implementation
from kernels_pallas.keep_topk.api import keep_topk_unchecked
from kvjax._src.border import OF_HEADS, OF_ROWS, SAME, axes_of_budget, axes_of_heads, enter, implementation_for
from kvjax._src.cache import CACHE, PARTS, AnyKind, KVCache, check_all_heads, check_cache, part_of_kind
from kvjax._src.checks import check_count, check_tokens, real_array
from kvjax._src.layer_caches import ALIKE, LayerCaches, padded
from kvjax._src.merging import Merging, folded
from kvjax._src.observation import Weights
from kvjax._src.order import Ranked, renewed
from kvjax._src.paged import PagedCache
from kvjax._src.window import begin_anew
from kvjax.allocation import UNIFORM, Allocation, Contest, parse_allocation

Budget = int | Int[Array, ""] | Int[Array, "B"]
ANY_POSITION = np.iinfo(np.int32).max  # the window of a layer that sees all positions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Evidence:
    """A policy's scores of the slots after a block, with all else that :func:`evict` needs besides the budget.

    Attributes:
        scores: retention scores, ``+inf`` where a token is protected, in the shape of the slots; or the
            :class:`Weights` that they are computed from.
        entered: how many tokens of each row came in with the block. A row without any loses nothing.
        protected: the slots that stay whatever their weights; None where ``scores`` mark them.
        ends: which of each row's first and last tokens stay whatever their weights: ``protected`` in numbers, which are
            read in its place.
        stays: the slots that links have marked in some heads of a layer; None where ``scores`` mark them.
        rank: the ranks of the tokens in the order of their positions, which the cache's state keeps behind an eviction;
            None for a policy that does not read the order.
        measured: what the allocation measured of the attention, if anything.
        end: the position from which on tokens leave whatever they score, per row; None where all may stay.
        window: the layer's sliding window, or one per layer, which limits its budget; None where no layer has one.
        allocation: how many slots each head gets.
        merging: how the values of evicted tokens are folded into those that stay; None for not at all.

    Example:
        >>> import kvjax
        >>> layer = kvjax.KVCache.init(batch=1, kv_heads=2, slots=4, head_dim=4)
        >>> cache = kvjax.LayerCaches((layer, layer, layer))
        >>> kvjax.Evidence.of_layers(
        ...     cache, kvjax.parse("laprox").allocation
        ... ).scores.shape
        (3, 1, 2, 4)
    """

    scores: Float[Array, "*slots"] | Weights
    entered: Int[Array, "B"]
    protected: Bool[Array, "B K S"] | None = None
    ends: Ends | None = None
    stays: Bool[Array, "B K S"] | None = None
    rank: Int[Array, "*slots"] | None = None
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
        cache: AnyKind,
        allocation: Allocation,
        end: Int[Array, "B"] | None = None,
        merging: Merging | None = None,
    ) -> Evidence:
        """Make empty evidence for all layers of a cache; :meth:`with_layer` fills it in."""
        measures = allocation.measures

        def of_part(part: Any, end: Int[Array, "B"] | None) -> Evidence:
            ranked = part_of_kind(part.arrays.state, Ranked) is not None
            return cls(
                scores=jnp.full(part.slots_shape, -jnp.inf, jnp.float32),
                entered=jnp.zeros(part.heads_shape[-2], jnp.int32),
                rank=jnp.zeros(part.slots_shape, jnp.int32) if ranked else None,
                measured=jnp.zeros((*part.heads_shape, measures), jnp.float32) if measures else None,
                end=end,
                window=jnp.full(part.heads_shape[:-2], ANY_POSITION, jnp.int32),
                allocation=allocation,
                merging=merging,
            )

        return cache.read(of_part, (end, OF_ROWS), outputs=PARTS)

    def with_layer(self, cache: Any, layer: int | Int[Array, ""] | None, said: Evidence) -> Evidence:
        """Return the evidence with what :func:`kvjax.observe` returned for one layer of the cache.

        A plain layer's scores are written whatever cache is given, its own or that of all layers.
        """
        others = (self, PARTS), (layer, SAME), (said, PARTS)
        return cache.read(lambda part, own, layer, said: own._with_layer(part, layer, said), *others, outputs=PARTS)

    def _with_layer(self, cache: Any, layer: int | Int[Array, ""] | None, said: Evidence) -> Evidence:
        assert not isinstance(self.scores, Weights) and not isinstance(said.scores, Weights)
        if said.merging != self.merging:
            raise ValueError("the policy merges values otherwise; give Evidence.of_layers(merging=policy.merging).")

        def written(whole: Any, own: Any) -> Any:
            return whole if whole is None or own is None else own if layer is None else whole.at[layer].set(own)

        def written_slots(whole: Array | None, own: Array | None, fill: float) -> Any:
            if whole is None or own is None:
                return whole
            if cache.paged:
                return cache.write_layer(whole, own, layer)
            return written(whole, padded(own, whole.shape, fill))  # a layer may have fewer slots or heads than others

        return dataclasses.replace(
            self,
            scores=written_slots(self.scores, said.scores, -jnp.inf),
            rank=written_slots(self.rank, said.rank, 0),
            entered=said.entered,
            measured=written(self.measured, said.measured),
            end=said.end,
            window=written(self.window, said.window),
        )


def evict(
    cache: AnyKind,
    scores: Float[Array, "*slots"] | Evidence,
    budget: Budget,
    *,
    excess: int | None = None,
    allocation: Allocation | str = UNIFORM,
) -> Any:
    """Free the slots of all but the best tokens. Keys and values stay where they are.

    A paged cache frees the pages that its heads no longer need, after moving the tokens left in them. Where a policy
    observes a window of queries, the next query starts a new window. A row whose budget is above the slots per head
    loses nothing, but for an allocation by a threshold, and its window goes on: so some rows of a batch may be evicted
    from, and others not.

    Args:
        scores: retention scores, larger = keep, shaped like ``cache.position``. Free slots are ignored; NaN loses to
            everything; ties go to the more recent token. Or a policy's evidence (:func:`kvjax.observe`), which has its
            own allocation.
        budget: how many tokens each head keeps, on average where heads compete, at least 1; one number or one per row.
            In a layer with a sliding window, which a policy's evidence knows, it is at most the window.
        excess: a promise that no head holds more than ``budget + excess`` tokens. With 1, as in decode, a uniform
            selection is an argmin.
        allocation: how many slots each head gets: an allocation or its short name; see :mod:`kvjax.allocation`.

    Raises:
        ValueError: if scores do not fit the cache, or the budget is below 1.

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
    check_all_heads(cache, f"the allocation {evidence.allocation.name!r}", not evidence.allocation.even)
    if isinstance(cache, LayerCaches) and not evidence.allocation.even and not cache.alike:
        raise ValueError(ALIKE.format(evidence.allocation.name))
    shape = cache.slots_shape
    if (found := getattr(evidence.scores, "shape", None)) != shape:
        raise ValueError(f"scores {found} do not fit the slots: expected {shape}.")
    return evict_by(cache, evidence, budget, excess=excess)


def evict_by(cache: Any, evidence: Evidence, budget: Budget, **options: Any) -> Any:
    """Run :func:`evict` by a policy's evidence, without its checks; with its ``excess`` and implementation."""
    if isinstance(cache, LayerCaches):
        return _evict_layers(cache, evidence, budget)
    return enter(cache, functools.partial(_evict, **options), *_entering(cache, evidence, budget), outputs=CACHE)


def axes_of_evidence(cache: Any, given: Any) -> Any:
    """Return how a mesh splits evidence on a cache; ``given`` is the evidence, or the policy that gives it."""
    if cache.paged:
        return PARTS
    slots: Any = axes_of_heads(cache)
    rows: Any = dict(entered=OF_ROWS, ends=OF_ROWS, end=OF_ROWS)
    others: Any = dict(window=SAME, allocation=given.allocation, merging=given.merging)
    return Evidence(slots, protected=slots, stays=slots, rank=slots, measured=slots, **rows, **others)


def _entering(cache: Any, evidence: Evidence, budget: Budget) -> tuple[tuple[Any, Any], ...]:
    return (evidence, axes_of_evidence(cache, evidence)), (budget, axes_of_budget(budget))


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
    def of_device(cache: LayerCaches, evidence: Evidence, budget: Budget) -> LayerCaches:
        made = _made(cache, evidence, budget)

        def of_layer(own: KVCache, after: Int[Array, "B K S"], rank: Int[Array, "B K S"] | None) -> KVCache:
            after, rank = jax.tree.map(lambda x: x[..., : own.heads_shape[-1], : own.num_slots], (after, rank))
            state = renewed(own, begin_anew(own.state, made.begins), rank, after, gap=False)
            return dataclasses.replace(own, position=after, next_position=made.next_position, state=state)

        each = (None,) * len(cache.layers) if evidence.rank is None else evidence.rank
        return cache.map(of_layer, (made.after, PARTS), (each, PARTS))

    return enter(cache, of_device, *_entering(cache, evidence, budget), outputs=CACHE)


@functools.partial(jax.jit, static_argnums=0)
def _fold(merging: Merging, cache: KVCache, before: Int[Array, "B K S"], end: Int[Array, "B"] | None) -> KVCache:
    if end is not None:  # copies leave without a trace
        before = jnp.where(before >= end[:, None, None], -1, before)
    fold = lambda own, before: folded(merging, own, before, own.position)  # noqa: E731
    return enter(cache, fold, (before, OF_HEADS), outputs=CACHE)


class _Made(NamedTuple):
    """Hold an eviction's outcome: positions ``before`` and ``after`` it, and the rows whose window begins anew."""

    before: Int[Array, "*slots"]
    after: Int[Array, "*slots"]
    next_position: Int[Array, "B"]
    begins: Bool[Array, "B"]


def _made(
    cache: Any, evidence: Evidence, budget: Budget, excess: int | None = None, implementation: Implementation = "auto"
) -> _Made:
    # A block's statistics say nothing about a row without tokens in it: such a row keeps all. One more than the slots
    # is as good as any larger budget, whose sum over the heads int32 may not hold.
    most = cache.num_slots + 1
    budget = jnp.where(evidence.entered > 0, jnp.minimum(jnp.asarray(budget, jnp.int32), most), most)
    position, next_position = cache.position, cache.next_position
    if evidence.end is not None:  # copies of the text leave, whatever they score
        position = jnp.where(position >= evidence.end[cache.batch_rows()][..., None], -1, position)
        next_position = jnp.minimum(next_position, evidence.end)
    if isinstance(evidence.scores, Weights):
        value, protected, ends = jax.lax.stop_gradient(cache.value), evidence.protected, None
        if evidence.ends is not None and evidence.end is None:
            protected, ends = None, evidence.ends
        after = caote_topk_unchecked(
            evidence.scores.weights, value, position, budget, protected, **evidence.scores.kind, ends=ends,
            excess=excess, with_scores=False, value_scale=cache.value_scale,
            implementation=implementation_for(implementation, cache),
        ).position  # fmt: skip
    elif evidence.allocation.even and not cache.paged:
        how: Any = "reference" if implementation == "reference" else implementation_for("auto", cache)
        after = keep_topk_unchecked(evidence.scores, position, budget, excess=excess, implementation=how)
    else:
        contest = _contest(cache, evidence, position, next_position, budget)
        spared = evidence.spares(budget, cache.num_slots)[contest.batch][..., None]
        after = jnp.where(evidence.allocation.keep(contest) | (contest.live & spared), position, -1)
    return _Made(position, after, next_position, ~evidence.waits(budget, cache.num_slots))


def _evict(
    cache: Any,
    evidence: Evidence,
    budget: Budget,
    excess: int | None = None,
    implementation: Implementation = "auto",
) -> KVCache | PagedCache:
    made = _made(cache, evidence, budget, excess, implementation)
    one = excess == 1 and evidence.allocation.even and not cache.paged
    state = renewed(cache, begin_anew(cache.state, made.begins), evidence.rank, made.after, gap=one)
    cache = dataclasses.replace(cache, next_position=made.next_position, state=state)
    if evidence.merging is not None:
        cache = folded(evidence.merging, cache, made.before, made.after, None if cache.paged else excess)
    return dataclasses.replace(cache, position=made.after).released()


def _contest(
    cache: Any,
    evidence: Evidence,
    position: Int[Array, "*slots"],
    next_position: Int[Array, "B"],
    budget: Int[Array, "B"],
) -> Contest:
    """Build the contest for the slots; a row of slots is a head in a plain cache, a page in a paged one."""
    *L, B, K = cache.heads_shape
    layers = L[0] if L else 1
    head, axis = cache.heads(), cache.axis
    assert not isinstance(evidence.scores, Weights)
    measured = evidence.measured
    if measured is not None:
        measured = measured.reshape(layers, B, K, -1)
        if axis:  # a few numbers per head
            measured = jax.lax.all_gather(measured, axis, axis=2, tiled=True)
    budgets = jnp.broadcast_to(budget, (layers, B))
    if evidence.window is not None:
        budgets = jnp.minimum(budgets, evidence.window.reshape(-1, 1))
    return Contest(
        scores=evidence.scores,
        position=position,
        layer=head // (B * K),
        batch=head // K % B,
        head=head % K + cache.first_head,
        budget=budgets,
        seen=next_position,
        entered=evidence.entered,
        measured=measured,
        layers=layers,
        heads=cache.all_heads,
        axis=axis,
    )
