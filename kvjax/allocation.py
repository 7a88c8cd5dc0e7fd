"""Allocations: how many slots each head gets. A score ranks tokens; an allocation says which heads compete for slots.

An allocation turns the scores of all layers and heads into a keep mask of fixed total size: for each batch row K times
the sum of the layers' budgets, each of which is the given one or, if that is smaller, the layer's sliding window. It
sees slots in lines, each of one (layer, batch row, head): a plain cache has one per head, a paged one a line per
page, and the same code serves both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax._src.calibration import read_array
from kvjax._src.checks import check_count
from kvjax._src.observation import Observation
from kvjax._src.short_names import called, check_number, check_protected, makers, read, registered
from kvjax._src.topk import best_of_groups, share_of, summed


class Contest(NamedTuple):
    """The slots of all layers and heads, in lines of S, and the budget that they compete for.

    ``scores`` are +inf where a token is protected; ``position`` is -1 where a slot is free. ``layer``, ``batch`` and
    ``head`` are the owner of each line. ``budget`` is the mean number of slots per head of each layer, at most the
    layer's sliding window. ``seen`` are the tokens of the sequence so far, ``entered`` those of this block.
    ``measured`` is what the allocation measured of each head.

    On a mesh each device has a contest of the heads that it holds. ``heads``, the numbers in ``head`` and ``measured``
    are those of the whole layer, and ``axis`` is the mesh axis over which sums and counts are added up; else it is
    None.
    """

    scores: Float[Array, "*heads S"]
    position: Int[Array, "*heads S"]
    layer: Int[Array, "*heads"]
    batch: Int[Array, "*heads"]
    head: Int[Array, "*heads"]
    budget: Int[Array, "L B"]
    seen: Int[Array, "B"]
    entered: Int[Array, "B"]
    measured: Float[Array, "L B K measures"] | None
    layers: int
    heads: int
    axis: str | tuple[()] | None = None

    @property
    def live(self) -> Bool[Array, "*heads S"]:
        """Return a mask of the slots that hold a token."""
        return self.position >= 0

    @property
    def total(self) -> Int[Array, "B"]:
        """Return the slots of all heads together."""
        return jnp.sum(self.budget, axis=0) * self.heads

    @property
    def certain(self) -> Bool[Array, "*heads S"]:
        """Return a mask of the slots that stay whatever the others score: protected, or with a head's whole weight."""
        return self.live & (self.scores >= jnp.finfo(jnp.float32).max)

    def sum(self, x: Array, scope: Scope) -> Array:
        """Sum over the slots of each head ``[L, B, K]``, layer ``[L, B]`` or model ``[B]``."""
        sums = jax.ops.segment_sum(jnp.sum(x, axis=-1).ravel(), self.group(scope).ravel(), self.groups(scope))
        sums = summed(sums, self.axis)
        shape = {"head": (self.layers, -1, self.heads), "layer": (self.layers, -1), "model": (-1,)}[scope]
        return sums.reshape(shape)

    def largest(self, x: Float[Array, "*heads S"], scope: Scope) -> Float[Array, "*heads 1"]:
        """Return the largest number of each line's head, layer or model, as a column beside the slots."""
        group = self.group(scope).ravel()
        most = jax.ops.segment_max(jnp.max(x, axis=-1).ravel(), group, self.groups(scope))
        if self.axis:
            most = jax.lax.pmax(most, self.axis)
        return most[group].reshape(*x.shape[:-1], 1)

    def group(self, scope: Scope) -> Int[Array, "*heads"]:
        """Return the number of the head, layer or model (of each batch row) that each line of slots belongs to."""
        B = self.budget.shape[1]
        if scope == "model":
            return self.batch
        layer = self.layer * B + self.batch
        return layer if scope == "layer" else layer * self.heads + self.head

    def groups(self, scope: Scope) -> int:
        """Return how many heads, layers or models there are, over all batch rows."""
        B = self.budget.shape[1]
        return {"head": self.layers * B * self.heads, "layer": self.layers * B, "model": B}[scope]

    def measured_by(self, name: str) -> Float[Array, "L B K measures"]:
        """Return what the allocation of this name measured."""
        if self.measured is None:
            raise ValueError(f"{name!r} measures each layer first; give evict the evidence of kvjax.observe.")
        return self.measured

    def best(self, scope: Scope, budget: Int[Array, "*groups"]) -> Bool[Array, "*heads S"]:
        """Return a mask of the ``budget`` best slots of each head ``[L, B, K]``, layer ``[L, B]`` or model ``[B]``."""
        head = self.layer * self.heads + self.head  # of tokens with equal positions, the lower layer and head stay
        budget = jnp.asarray(budget).ravel()
        axis = None if scope == "head" else self.axis  # all tokens of a head are on one device
        return best_of_groups(self.scores, self.position, head, self.group(scope), budget, self.groups(scope), axis)


Scope = Literal["head", "layer", "model"]


@dataclasses.dataclass(frozen=True)
class Allocation:
    """A rule for the number of slots of each head; see this module's functions and :func:`parse_allocation`.

    Attributes:
        name: its short name, as written after the ``@`` on a command line.
        keep: returns the keep mask of a contest.
        scope: where tokens of different heads compete for slots: nowhere ("head": budgets are set before tokens are
            compared), within a "layer", or in the whole "model".
        even: whether every head has the same budget, so that a plain cache is enough.
        most: ``most(L, K, budget)``, the largest number of slots that a head can hold.
        measure: measures the attention of a layer's heads, ``measures`` numbers per head.
        statistics: the column statistics that ``measure`` reads.
        window: their observation window, 0 for the policy's.
        needs_nonnegative: whether it divides scores by their sum.
        one_layer: whether a layer can be evicted from without knowing the other layers.
        fills: whether it keeps as many tokens as the budget has room for.
        by_score: whether the best tokens of a head stay in it, so that they may be drawn (:func:`kvjax.sample`).
        alike: whether all heads of a layer have the same number of slots, so that each device of a mesh holds its even
            share of the tokens.
    """

    name: str
    keep: Callable[[Contest], Bool[Array, "*heads S"]]
    scope: Scope
    most: Callable[[int, int, int], int]
    even: bool = False
    measure: Callable[[Observation], Float[Array, "B K measures"]] | None = None
    measures: int = 0
    statistics: frozenset[str] = frozenset()
    window: int = 0
    needs_nonnegative: bool = False
    fills: bool = True
    by_score: bool = True
    alike: bool = False

    @property
    def one_layer(self) -> bool:
        return self.even or self.scope == "layer"

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Allocation({self.name!r})"


CAP = 8.0  # times the mean budget: what a head holds at most, where an allocation has a cap by default
ALLOCATIONS = makers("allocation", "kvjax.allocations", Allocation)


def register(make: Callable[..., Allocation]) -> Callable[..., Allocation]:
    """Register an allocation's maker, as its decorator, as :func:`kvjax.register` does for policies.

    The entry-point group of other packages is ``kvjax.allocations``.
    """
    return registered(ALLOCATIONS, make)


@register
def uniform() -> Allocation:
    """Give each head the same number of slots.

    Example:
        >>> from kvjax import allocation
        >>> allocation.uniform().even
        True
    """
    return Allocation(
        "uniform",
        lambda c: c.best("head", _for_each_head(c.budget, c)),
        scope="head",
        most=lambda L, K, budget: budget,
        even=True,
        alike=True,
    )


@register
def pyramid(*, beta: int | float = 20.0) -> Allocation:
    """Give more slots to the first layers and fewer to the last, linearly (PyramidKV, arXiv 2406.02069).

    With B the mean budget minus the protected tokens, the last layer gets ``B / beta`` and the first ``2 B`` minus
    that. A layer never gets more slots than the sequence has tokens so far; what it cannot use goes to the last layers.

    Args:
        beta: from 1 (all layers alike); larger is steeper. 20 as in its authors' code and in kvpress.

    Example:
        >>> from kvjax import allocation
        >>> allocation.pyramid(beta=10.0).name
        'pyramid(beta=10.0)'
    """
    check_number("pyramid", "beta", beta, 1, 1e6, "a number from 1")

    def keep(c: Contest) -> Array:
        fixed = _protected_of_a_head(c)
        free = jnp.sum(c.budget, axis=0).astype(jnp.float32) / c.layers - fixed.astype(jnp.float32)
        seen = (c.seen - fixed).astype(jnp.float32)
        first = jnp.minimum(free * (2 - 1 / beta), jnp.maximum(seen, free))
        step = jnp.linspace(0, 1, c.layers, dtype=jnp.float32) if c.layers > 1 else jnp.full(1, 0.5, jnp.float32)
        shares = first[None] - (2 * first - 2 * free)[None] * step[:, None]
        return _best_by_layer(c, lambda room, total: shares, 2.0)

    return Allocation("pyramid", keep, scope="head", most=lambda L, K, budget: 2 * budget, alike=True)


@register
def adakv(*, safeguard: int | float = 0.2, cap: int | float | None = CAP) -> Allocation:
    """Take one top-k over all heads of a layer; the best tokens of each head are safe (AdaKV, arXiv 2407.11550).

    Args:
        safeguard: the share of its budget that each head keeps for its own best tokens, in [0, 1]; 0.2 as in its
            authors' code for grouped heads (0.5 without) and in kvpress.
        cap: a head holds at most this many times the mean budget; None for no limit but the layer's total. It bounds
            the page table and the buffer in which one head is read. The papers have no limit.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("snapkv+caote@adakv"))
        'snapkv+caote@adakv'
    """
    check_number("adakv", "safeguard", safeguard, 0, 1, "a share of the budget in [0, 1]")
    _check_cap("adakv", cap)
    return Allocation(
        "adakv", functools.partial(_keep_in_layer, safeguard, cap), scope="layer", most=_most("layer", cap)
    )


@register
def layer(*, cap: int | float | None = CAP) -> Allocation:
    """Take one top-k over all heads of a layer.

    Args:
        cap: see :func:`adakv`.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("h2o + caote @ layer"))
        'h2o+caote@layer'
    """
    _check_cap("layer", cap)
    keep = functools.partial(_keep_in_layer, 0.0, cap)
    return Allocation("layer", keep, scope="layer", most=_most("layer", cap))


@register
def model(*, normalise: bool = True, cap: int | float | None = None) -> Allocation:
    """Take one top-k over all layers and heads (LaProx, arXiv 2605.07234, algorithm 2).

    Args:
        normalise: first divide the scores by their sum over the layer's unprotected tokens (eq. 12).
        cap: see :func:`adakv`; none by default, as in the paper. Give one where memory is reserved before it is known
            who wins: for block by block prefill, on a mesh, and for the buffer in which one head is read.

    Example:
        >>> import kvjax
        >>> kvjax.parse("snapkv@model").allocation.scope
        'model'
    """
    _check_cap("model", cap)

    def keep(c: Contest) -> Array:
        if normalise and c.layers > 1:  # shares of one layer have the order of its scores
            c = c._replace(scores=_shares_of_layer(c))
        return _capped(c, cap).best("model", c.total)

    return Allocation(
        "model", keep, scope="model", most=_most("model", cap),
        needs_nonnegative=normalise,
    )  # fmt: skip


@register
def threshold(*, least: float = 0.01, cap: int | float | None = CAP) -> Allocation:
    """Keep the tokens that score at least a threshold; the budget is only an upper limit (KVzap, arXiv 2601.07891).

    So a text decides how many tokens it needs: ``cache.num_live`` counts them. Where more tokens reach the threshold
    than the budget has room for, the best of all layers and heads stay. A protected token stays in any case. The cache
    has the budget's slots all the same. KVzap also keeps a window, as below.

    Args:
        least: the score that is just kept. It depends on the score: the best one for a task is found by trying.
        cap: see :func:`adakv`.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("zap+protect(recent=128)@threshold(least=0.01)"))
        'zap+protect(recent=128)@threshold'
    """
    check_number("threshold", "least", least, -1e30, 1e30, "a score, from -1e30 to 1e30")
    _check_cap("threshold", cap)

    def keep(c: Contest) -> Array:
        return _capped(c, cap).best("model", c.total) & (c.scores >= least)

    return Allocation("threshold", keep, scope="model", most=_most("model", cap), fills=False)


@register
def cake(
    *, window: int | None = None, space: int | float = 1.0, time: int | float = 1.0, cap: int | float | None = CAP
) -> Allocation:
    """Divide slots among layers by how spread and how changeable their attention is (CAKE, arXiv 2503.12491).

    A layer's share is proportional to its preference ``H ** (1 / space) * V ** (1 / time)``: H is the entropy of the
    window's attention over the evictable tokens, V its variance over the window's queries, each summed. CAKE shrinks
    the layers one by one as their preferences become known (the cascade). A layer's share only falls, and a smaller
    budget keeps a part of what a larger one kept, so the cascade ends with the same tokens as one allocation with all
    preferences. Where no preference can be measured, as with a single query (``evict_every=1``), the layers keep their
    sizes.

    Args:
        window: how many queries observe; the policy's window by default, or 32.
        space: tau_1 of the paper; 1 as in its authors' code (1.6 tuned for Llama-3.1).
        time: tau_2 of the paper; 1 as in its authors' code (0.4 tuned for Llama-3.1).
        cap: see :func:`adakv`.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("snapkv@cake"))
        'snapkv@cake'
    """
    if window is not None:
        check_count("cake: window", window, 2, "a variance needs at least 2 queries")
    for what, exponent in (("space", space), ("time", time)):
        check_number("cake", what, exponent, 1e-6, 1e6, "a number above 0")
    _check_cap("cake", cap)

    def measure(o: Observation) -> Array:
        evictable = (o.live & ~o.protected)[:, :, None]
        columns = (-o.columns.window_log, o.columns.window_variance)
        return jnp.stack([jnp.sum(jnp.where(evictable, x, 0), axis=(2, 3)) for x in columns], axis=-1)

    def keep(c: Contest) -> Array:
        entropy, variance = jnp.moveaxis(jnp.maximum(jnp.sum(c.measured_by("cake"), axis=2), 0), -1, 0)
        preference = entropy ** (1 / space) * variance ** (1 / time)
        held = c.sum(c.live, "layer") // c.heads - (c.entered + _protected_of_a_head(c))[None]
        measured = jnp.sum(preference, axis=0, keepdims=True) > 0
        weight = jnp.where(measured, preference, jnp.maximum(held, 0).astype(preference.dtype))
        return _best_by_layer(c, _in_proportion(weight), cap)

    return Allocation(
        "cake", keep, scope="head", most=lambda L, K, budget: _limit(cap, budget, L * budget),
        measure=measure, measures=2, statistics=frozenset({"window_log", "window_variance"}),
        window=0 if window is None else window, alike=True,
    )  # fmt: skip


@register
def d2o(*, window: int | None = None, cap: int | float | None = CAP) -> Allocation:
    """Give more slots to layers whose attention is dense, by its variance over the tokens (D2O, arXiv 2406.13035).

    The variance of a query head is that of the attention that its tokens get, divided by the mean. It is scaled so that
    of the layer's heads the smallest has 0 and the largest 1, and ``V`` is the mean over the heads. The layers share
    the slots that no protected token takes by ``softmax(-V)``, so no share is more than e times another. This is the
    formula of the authors' code (``modeling_llama3_7b_13b_d2o.py``); the full text of the paper was not at hand. There
    all queries of the prompt are observed, the shares are set once, and the first two layers and the last keep all
    tokens. Here an observation window is read at each eviction, as by :func:`cake`, and all layers share the budget.

    Args:
        window: how many queries observe; the policy's window by default, or 32.
        cap: see :func:`adakv`.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("h2o@d2o"))
        'h2o@d2o'
    """
    if window is not None:
        check_count("d2o: window", window, 1, "give a number of queries")
    _check_cap("d2o", cap)

    def measure(o: Observation) -> Array:
        live = o.live[:, :, None]
        count = jnp.maximum(jnp.sum(live, axis=-1, keepdims=True), 1)
        mean = jnp.sum(jnp.where(live, o.columns.window_mean, 0), axis=-1, keepdims=True) / count
        apart = jnp.where(live, o.columns.window_mean / jnp.where(mean > 0, mean, 1) - 1, 0)
        variance = jnp.sum(apart**2, axis=-1) / jnp.maximum(count[..., 0] - 1, 1)  # [B, K, G]
        return jnp.stack([jnp.min(variance, axis=-1), jnp.mean(variance, axis=-1), jnp.max(variance, axis=-1)], axis=-1)

    def keep(c: Contest) -> Array:
        least, mean, most = jnp.moveaxis(c.measured_by("d2o"), -1, 0)  # [L, B, K]
        low = jnp.min(least, axis=2)
        scaled = (jnp.mean(mean, axis=2) - low) / (jnp.max(most, axis=2) - low + 1e-6)
        return _best_by_layer(c, _in_proportion(jnp.exp(-scaled)), cap)

    return Allocation(
        "d2o", keep, scope="head", most=lambda L, K, budget: _limit(cap, budget, L * budget),
        measure=measure, measures=3, statistics=frozenset({"window_mean"}),
        window=0 if window is None else window, alike=True,
    )  # fmt: skip


@register
def lava(*, cap: int | float | None = CAP) -> Allocation:
    """Divide slots among layers by the entropy of their scores, then take one top-k per layer (LAVa, arXiv 2509.09754).

    Args:
        cap: see :func:`adakv`.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("snapkv@lava"))
        'snapkv@lava'
    """
    _check_cap("lava", cap)

    def keep(c: Contest) -> Array:
        share = jnp.where(c.live & ~c.certain, _shares_of_layer(c), 0)
        entropy = c.sum(-jnp.where(share > 0, share * jnp.log(jnp.where(share > 0, share, 1)), 0), "layer")
        entropy = jnp.where(entropy > 1e-6, entropy, 0)  # that of a single token is rounding, and must not count
        size = c.sum(c.live & ~c.certain, "layer")
        weight = entropy / jnp.log(jnp.maximum(size, 2))
        c = _capped(c, cap)
        return c.best("layer", _layer_budgets(c, _in_proportion(weight), cap, each=c.heads))

    return Allocation("lava", keep, scope="model", most=_most("model", cap), needs_nonnegative=True)


@register
def headkv(
    *, file: str | None = None, content: str | None = None, beta: int | float = 1.5, cap: int | float | None = CAP
) -> Allocation:
    """Give a head the more slots, the more important it is (HeadKV, arXiv 2410.19258).

    With B the budget minus the protected tokens, each head puts ``B / beta`` of its slots into a pool, which is shared
    out in proportion to the heads' importance. Heads keep their own best tokens. The authors measure the importance of
    query heads by needles; here a KV head has one number, such as their mean over the group.

    Args:
        file: the importance of each head ``[L, K]``, from 0, as a .npy or .safetensors file.
        content: a digest of the file, which the name gets; another file of that name is refused.
        beta: from 1 (all slots are shared out). The authors' code takes 1.005 to 10, and 1.5 by default.
        cap: see :func:`adakv`.

    Example:
        >>> import kvjax
        >>> str(kvjax.snapkv() @ "headkv(beta=1.2)")
        'snapkv@headkv(beta=1.2)'
    """
    check_number("headkv", "beta", beta, 1, 1e6, "a number from 1")
    _check_cap("headkv", cap)
    importance = _importance("headkv", file)

    def keep(c: Contest) -> Array:
        weight = jnp.asarray(importance(c.layers, c.heads))
        fixed = _protected_of_a_head(c)
        pooled = jnp.floor((c.budget - fixed).astype(jnp.float32) / beta).astype(jnp.int32)
        least = _for_each_head(c.budget - pooled, c)
        return c.best("head", _head_budgets(c, least, jnp.broadcast_to(weight[:, None], least.shape), cap))

    return Allocation("headkv", keep, scope="head", most=_most_by(importance, cap))


@register
def lukv(*, file: str | None = None, content: str | None = None, cap: int | float | None = CAP) -> Allocation:
    """Give a head the slots that a curve has for it where so much of the text leaves (LU-KV, arXiv 2602.08585).

    The curve says, for 1% to 99% of all tokens that leave, what share of each head's tokens leaves. It is measured once
    for a model and a score, by what later tokens lose; its authors' code makes it. Here the row is that of the budget's
    share of the text so far, and heads get its numbers in proportion, so that they add up to the budget. Heads keep
    their own best tokens. The authors evict once, and always keep 4 first tokens and the last.

    Args:
        file: the curve ``[99, L, K]``, shares in [0, 1], as a .npy or .safetensors file.
        content: a digest of the file, which the name gets; another file of that name is refused.
        cap: see :func:`adakv`.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("expected_attention@lukv(cap=4)"))
        'expected_attention@lukv(cap=4)'
    """
    _check_cap("lukv", cap)
    curve = _curve(file)

    def keep(c: Contest) -> Array:
        mean = jnp.sum(c.budget, axis=0).astype(jnp.float32) / c.layers
        percent = jnp.round(100 * (1 - mean / jnp.maximum(c.seen, 1))).astype(jnp.int32)
        stays = 1 - jnp.asarray(curve(c.layers, c.heads))[jnp.clip(percent, 1, 99) - 1]  # [B, L, K]
        wanted = stays * c.seen[:, None, None] - _protected_of_a_head(c)[:, None, None]
        wanted = jnp.moveaxis(jnp.maximum(wanted, 0), 0, 1)
        return c.best("head", _head_budgets(c, jnp.zeros(wanted.shape, jnp.int32), wanted, cap))

    return Allocation("lukv", keep, scope="head", most=_most_by(curve, cap))


@register
def duo(
    *,
    file: str | None = None,
    content: str | None = None,
    streaming: float = 0.5,
    sinks: int | float = 128,
    recent: int | float = 256,
    cap: int | float | None = CAP,
) -> Allocation:
    """Let the least important heads stream, and give their slots to the others (DuoAttention, arXiv 2410.10819).

    A streaming head keeps its first and its last tokens, whatever they score. The other heads, which retrieve, share
    the rest of the budget; in the paper they keep all tokens. The authors train the importance of the heads;
    ``models.head_scores`` measures it as kvpress does.

    Args:
        file: the importance of each head ``[L, K]``, from 0, as a .npy or .safetensors file.
        content: a digest of the file, which the name gets; another file of that name is refused.
        streaming: the share of the heads that stream, in [0, 1]; 0.5 as in the paper for models with grouped heads.
        sinks: how many first tokens a streaming head keeps: a count, or a share of the budget (float in [0, 1]); 128 as
            in kvpress. It never has more than the budget.
        recent: likewise, of its last tokens; 256 as in kvpress.
        cap: see :func:`adakv`.

    Example:
        >>> import kvjax
        >>> str(kvjax.snapkv() @ "duo(sinks=4,recent=0.2)")
        'snapkv@duo(sinks=4,recent=0.2)'
    """
    check_number("duo", "streaming", streaming, 0, 1, "a share of the heads in [0, 1]")
    check_protected("duo", sinks=sinks, recent=recent)
    _check_cap("duo", cap)
    importance = _importance("duo", file)

    def keep(c: Contest) -> Array:
        heads = importance(c.layers, c.heads)
        least = np.argsort(heads, axis=None, kind="stable")[: round(streaming * heads.size)]
        streams = np.isin(np.arange(heads.size), least).reshape(c.layers, 1, c.heads)
        return _streamed(c, jnp.broadcast_to(streams, (*c.budget.shape, c.heads)), sinks, recent, cap)

    return Allocation("duo", keep, scope="head", most=_most_by(importance, cap), by_score=False)


@register
def simlayer(
    *, threshold: float = 0.9, sinks: int | float = 4, recent: int | float = 1024, cap: int | float | None = CAP
) -> Allocation:
    """Let lazy layers stream, and give their slots to the others (SimLayerKV, arXiv 2410.13846).

    A layer is lazy if the last query gives the first and the last tokens more than ``threshold`` of its attention, on
    average over the heads. All heads of such a layer keep these tokens alone, whatever they score; the other layers
    share the rest of the budget. In the paper the latter keep all tokens, and layers are judged once; here they are
    judged at each eviction. A layer that has streamed has little else to look at, and stays lazy.

    Args:
        threshold: a share of the attention in [0, 1]. 0.9 is that of Llama-3 (0.65 Llama-2, 0.8 Mistral, 0.85 Qwen).
        sinks: how many first tokens a lazy layer keeps: a count, or a share of the budget (float in [0, 1]); 4 as in
            the paper. A head of it never has more than the budget.
        recent: likewise, of its last tokens; 1,024 as in the paper.
        cap: see :func:`adakv`.

    Example:
        >>> import kvjax
        >>> str(kvjax.snapkv() @ "simlayer(recent=0.25)")
        'snapkv@simlayer(recent=0.25)'
    """
    check_number("simlayer", "threshold", threshold, 0, 1, "a share of the attention in [0, 1]")
    check_protected("simlayer", sinks=sinks, recent=recent)
    _check_cap("simlayer", cap)

    def measure(o: Observation) -> Array:
        first, last = (x[:, None, None] for x in _streaming_counts(o.budget, sinks, recent))
        near = o.live & ((o.position < first) | (o.position >= o.next_position[:, None, None] - last))
        return jnp.mean(jnp.sum(jnp.where(near[:, :, None], o.columns.last, 0), axis=3), axis=2, keepdims=True)

    def keep(c: Contest) -> Array:
        lazy = jnp.mean(c.measured_by("simlayer")[..., 0], axis=2) > threshold  # [L, B]
        return _streamed(c, _for_each_head(lazy, c), sinks, recent, cap)

    return Allocation(
        "simlayer", keep, scope="head", most=_most("model", cap), measure=measure, measures=1,
        statistics=frozenset({"last"}), by_score=False,
    )  # fmt: skip


def parse_allocation(name: str | Allocation) -> Allocation:
    """Return the allocation that a short name stands for, as written after the ``@`` of a policy, or one as it is.

    Example:
        >>> from kvjax import allocation
        >>> allocation.parse_allocation("model(normalise=False)").name
        'model(normalise=False)'
    """
    if isinstance(name, Allocation):
        return name
    how = "write it like 'model' or 'adakv(safeguard=0.2)'"
    return called(read(name, "allocation", how), ALLOCATIONS, name.strip(), how)


def _keep_in_layer(safeguard: int | float, cap: int | float | None, c: Contest) -> Array:
    if safeguard:
        own = c.best("head", _for_each_head(share_of(safeguard, c.budget), c))
        c = c._replace(scores=jnp.where(own, jnp.inf, c.scores))
    return _capped(c, cap).best("layer", c.budget * c.heads)


def _capped(c: Contest, cap: int | float | None) -> Contest:
    """Leave only each head's best ``cap * budget`` tokens in the contest."""
    if cap is None:
        return c
    limit = share_of(min(cap, c.layers * c.heads), c.budget)
    allowed = c.best("head", _for_each_head(limit, c))
    return c._replace(position=jnp.where(allowed, c.position, -1))


def _shares_of_layer(c: Contest) -> Float[Array, "*heads S"]:
    """Divide scores by their sum over the layer, without the tokens that are certain to stay."""
    counted = c.live & ~c.certain & (c.scores > -jnp.inf)
    scores = jnp.where(counted, c.scores, 0)
    # Before the sum, which overflows for huge ones; a power of two changes nothing but the exponent.
    scores = jnp.where(c.largest(scores, "layer") > 2.0**64, 2.0**-64 * scores, scores)
    total = c.sum(scores, "layer").ravel()[c.group("layer")][..., None]
    return jnp.where(counted, scores / jnp.where(total > 0, total, 1), c.scores)


def _protected_of_a_head(c: Contest) -> Int[Array, "B"]:
    """Return the largest number of protected tokens that any head holds, at most the budget."""
    protected = c.sum(c.live & (c.scores == jnp.inf), "head")  # [L, B, K]
    return jnp.minimum(jnp.max(protected, axis=(0, 2)), jnp.max(c.budget, axis=0)).astype(jnp.int32)


def _best_by_layer(c: Contest, share: Callable[[Array, Array], Array], cap: int | float | None) -> Array:
    """Keep the best of each head, of which those of a layer have the same slots; see :func:`_layer_budgets`."""
    return c.best("head", _for_each_head(_layer_budgets(c, share, cap, each=1), c))


def _layer_budgets(c: Contest, share: Callable[[Array, Array], Array], cap: int | float | None, each: int) -> Array:
    """Compute the slots of each layer ``[L, B]``, summed over ``each`` of its heads.

    A layer gets its protected slots, and ``share(room, total)`` of the rest in whole numbers. No layer gets more than
    it holds; together they get all of the budget.
    """
    held = c.sum(c.live, "layer") * each // c.heads
    if cap is not None:
        held = jnp.minimum(held, share_of(min(cap, c.layers * c.heads), c.budget) * each)
    return _shared_out(jnp.sum(c.budget, axis=0) * each, held, _protected_of_a_head(c)[None] * each, share)


def _head_budgets(
    c: Contest, least: Int[Array, "L B K"], weight: Float[Array, "L B K"], cap: int | float | None
) -> Int[Array, "L B K"]:
    """Compute the slots of each head: ``least`` and its protected slots, and the rest in proportion to the weights.

    No head gets more than it holds; together they get all of the budget.
    """
    held = c.sum(c.live, "head")
    if cap is not None:
        held = jnp.minimum(held, share_of(min(cap, c.layers * c.heads), c.budget)[..., None])
    least = jnp.maximum(least, _protected_of_a_head(c)[None, :, None])
    held, least, weight = (jnp.moveaxis(x, 2, 1).reshape(-1, x.shape[1]) for x in (held, least, weight))
    slots = _shared_out(c.total, held, least, _in_proportion(weight))
    return jnp.moveaxis(slots.reshape(c.layers, c.heads, -1), 2, 1)


def _shared_out(
    total: Int[Array, "B"], held: Int[Array, "n B"], least: Int[Array, "#n B"], share: Callable[[Array, Array], Array]
) -> Int[Array, "n B"]:
    """Share out a total among n layers or heads: ``least`` to each, and ``share(room, rest)`` of the rest."""
    fixed = jnp.minimum(least, held)
    room = held - fixed
    rest = jnp.minimum(total - jnp.sum(fixed, axis=0), jnp.sum(room, axis=0))
    return fixed + _whole(share(room, rest), room, rest)


def _streamed(
    c: Contest, streams: Bool[Array, "L B K"], sinks: int | float, recent: int | float, cap: int | float | None
) -> Bool[Array, "*heads S"]:
    """Keep first and last tokens in the heads that stream, and the best in the others, which share the other slots."""
    first, last = _streaming_counts(c.budget, sinks, recent)
    least = jnp.where(streams, jnp.minimum(first + last, c.budget)[..., None], 0)
    slots = _head_budgets(c, least, jnp.where(streams, 0.0, 1.0), cap)
    sink = c.position < first[c.layer, c.batch][..., None]
    by_place = jnp.where(sink, jnp.finfo(jnp.float32).max, c.position.astype(jnp.float32))
    number = (c.layer * streams.shape[1] + c.batch) * c.heads + c.head
    streaming = streams.ravel()[number.ravel()].reshape(c.layer.shape)
    replaced = streaming[..., None] & (c.scores != jnp.inf)  # protected tokens stay
    return c._replace(scores=jnp.where(replaced, by_place, c.scores)).best("head", slots)


def _streaming_counts(budget: Int[Array, "*L B"], sinks: int | float, recent: int | float) -> tuple[Array, Array]:
    """Return the numbers of first and last tokens of a head that streams; the newest make way if both do not fit."""
    first, last = (
        jnp.minimum(amount if isinstance(amount, int) else share_of(amount, budget), budget)
        for amount in (sinks, recent)
    )
    return first, jnp.minimum(last, budget - first)


def _importance(name: str, file: str | None) -> Callable[[int, int], Float[np.ndarray, "L K"]]:
    """Return what gives the heads' importance from a file, after a check that it is that of a model with L K heads."""
    heads = None if file is None else read_array(name, file, "L K")
    if heads is not None and (heads < 0).any():
        raise ValueError(f"{name}: {file!r} holds numbers below 0; give the importance of each head, from 0.")

    def of(L: int, K: int) -> Float[np.ndarray, "L K"]:
        if heads is None:
            raise ValueError(f"{name!r} reads how important each head is from a file; write {name}(file='heads.npy').")
        if heads.shape != (L, K):
            raise ValueError(f"{name}: {file!r} has the importance of {heads.shape}; expected [{L}, {K}].")
        return heads

    return of


def _curve(file: str | None) -> Callable[[int, int], Float[np.ndarray, "99 L K"]]:
    """Return what gives LU-KV's curve from a file, after a check that it is that of a model with L K heads."""
    curve = None if file is None else read_array("lukv", file, "99 L K")
    if curve is not None and (len(curve) != 99 or curve.min() < 0 or curve.max() > 1):
        held = f"{file!r} holds numbers {curve.shape} from {curve.min():g} to {curve.max():g}"
        raise ValueError(f"lukv: {held}; give the share that leaves each head, in [0, 1], for 1% to 99%: [99, L, K].")

    def of(L: int, K: int) -> Float[np.ndarray, "99 L K"]:
        if curve is None:
            raise ValueError("'lukv' reads each head's share from a file; write lukv(file='curve.npy').")
        if curve.shape[1:] != (L, K):
            raise ValueError(f"lukv: {file!r} has the shares of {curve.shape[1:]} heads; expected [{L}, {K}].")
        return curve

    return of


def _in_proportion(weight: Float[Array, "L B"]) -> Callable[[Array, Array], Array]:
    return lambda room, total: _filled(room.astype(jnp.float32), weight.astype(jnp.float32), total)


def _filled(room: Float[Array, "L B"], weight: Float[Array, "L B"], total: Int[Array, "B"]) -> Float[Array, "L B"]:
    """Share out the total by the weights, none above its room; what one layer can't take goes to the others."""
    weight = jnp.where(jnp.sum(weight, axis=0, keepdims=True) > 0, weight, 1.0)
    # A layer without weight takes what the others can't.
    weight = jnp.maximum(weight / jnp.sum(weight, axis=0, keepdims=True), 1e-6)

    def pour(_, share):
        full = share >= room
        left = total[None].astype(room.dtype) - jnp.sum(jnp.where(full, room, 0), axis=0, keepdims=True)
        open_weight = jnp.sum(jnp.where(full, 0, weight), axis=0, keepdims=True)
        return jnp.where(full, room, jnp.minimum(room, weight * left / jnp.where(open_weight > 0, open_weight, 1)))

    # Each pass fills at least one more layer, or is the last that changes anything. The first one is outside the loop,
    # as in kernels_pallas/topk.py.
    return jax.lax.fori_loop(0, room.shape[0], pour, pour(0, jnp.zeros_like(room)))


def _whole(shares: Float[Array, "L B"], room: Int[Array, "L B"], total: Int[Array, "B"]) -> Int[Array, "L B"]:
    """Round shares to whole numbers from 0 to ``room`` that add up to the total, which must fit.

    The shares are rounded down, and those that lost most get one more. What exceeds a layer's room goes to the first
    layers that can take it.
    """
    count = jnp.clip(jnp.floor(shares).astype(jnp.int32), 0, room)
    lost = jnp.where(count < room, shares - count.astype(shares.dtype), -jnp.inf)
    rank = jnp.argsort(jnp.argsort(-lost, axis=0), axis=0)
    left = (total - jnp.sum(count, axis=0))[None]
    count += ((count < room) & (rank < left)).astype(jnp.int32)
    left = (total - jnp.sum(count, axis=0))[None]
    count += jnp.clip(left - _before(room - count), 0, room - count)
    return count - jnp.clip(-left - _before(count), 0, count)  # float32 may have rounded huge shares up


def _before(x: Int[Array, "L B"]) -> Int[Array, "L B"]:
    return jnp.cumsum(x, axis=0) - x


def _for_each_head(layers: Shaped[Array, "L B"], c: Contest) -> Shaped[Array, "L B K"]:
    return jnp.broadcast_to(layers[..., None], (*layers.shape, c.heads))


def _most(scope: Scope, cap: int | float | None) -> Callable[[int, int, int], int]:
    return lambda L, K, budget: _limit(cap, budget, budget * K * (L if scope == "model" else 1))


def _most_by(importance: Callable[[int, int], Any], cap: int | float | None) -> Callable[[int, int, int], int]:
    def most(L: int, K: int, budget: int) -> int:
        importance(L, K)  # a file of another model is refused before anything runs
        return _most("model", cap)(L, K, budget)

    return most


def _limit(cap: int | float | None, budget: int, total: int) -> int:
    return total if cap is None else min(total, share_of(cap, budget))


def _check_cap(name: str, cap: int | float | None) -> None:
    if cap is not None:
        check_number(name, "cap", cap, 1, 1e9, "a multiple of the budget from 1, or None for no limit")


UNIFORM = uniform()
