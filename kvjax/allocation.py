"""Allocations: how many slots each head gets. A score ranks tokens; an allocation says which heads compete for slots.

An allocation turns the scores of all layers and heads into a keep mask of fixed total size, `L * K * budget` tokens per
batch row. It sees slots in rows, each of one (layer, batch row, head): a plain cache has one row per head, a paged one
a row per page, and the same code serves both.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.checks import check_count, typed
from kvjax.names import called, check_number, registered
from kvjax.observation import Observation
from kvjax.topk import best_of_groups, share_of


class Contest(NamedTuple):
    """The slots of all layers and heads, in rows of S, and the budget that they compete for.

    ``scores`` are +inf where a token is protected; ``position`` is -1 where a slot is free. ``layer``, ``batch`` and
    ``head`` are the owner of each row. ``budget`` is the mean number of slots per head, ``seen`` the tokens of the
    sequence so far, ``entered`` those of this block; ``measured`` is what the allocation measured of each layer.
    """

    scores: Float[Array, "*rows S"]
    position: Int[Array, "*rows S"]
    layer: Int[Array, "*rows"]
    batch: Int[Array, "*rows"]
    head: Int[Array, "*rows"]
    budget: Int[Array, "B"]
    seen: Int[Array, "B"]
    entered: Int[Array, "B"]
    measured: Float[Array, "L B measures"] | None
    layers: int
    heads: int

    @property
    def live(self) -> Bool[Array, "*rows S"]:
        """Mask of the slots that hold a token."""
        return self.position >= 0

    @property
    def certain(self) -> Bool[Array, "*rows S"]:
        """Mask of the slots that stay whatever the others score: protected, or holding all the weight of a head."""
        return self.live & (self.scores > jnp.finfo(jnp.float32).max / 2)

    def sum(self, x: Array, scope: Scope) -> Array:
        """Sum over the slots of each head ``[L, B, K]``, layer ``[L, B]`` or model ``[B]``."""
        sums = jax.ops.segment_sum(jnp.sum(x, axis=-1).ravel(), self.group(scope).ravel(), self.groups(scope))
        shape = {"head": (self.layers, -1, self.heads), "layer": (self.layers, -1), "model": (-1,)}[scope]
        return sums.reshape(shape)

    def group(self, scope: Scope) -> Int[Array, "*rows"]:
        """Return the number of the head, layer or model (of each batch row) that each row of slots belongs to."""
        B = self.budget.shape[0]
        if scope == "model":
            return self.batch
        layer = self.layer * B + self.batch
        return layer if scope == "layer" else layer * self.heads + self.head

    def groups(self, scope: Scope) -> int:
        """Return how many heads, layers or models there are, over all batch rows."""
        B = self.budget.shape[0]
        return {"head": self.layers * B * self.heads, "layer": self.layers * B, "model": B}[scope]

    def best(self, scope: Scope, budget: Int[Array, "*groups"]) -> Bool[Array, "*rows S"]:
        """Return a mask of the ``budget`` best slots of each head ``[L, B, K]``, layer ``[L, B]`` or model ``[B]``."""
        head = self.layer * self.heads + self.head  # of tokens with equal positions, the lower layer and head stay
        budget = jnp.asarray(budget).ravel()
        return best_of_groups(self.scores, self.position, head, self.group(scope), budget, self.groups(scope))


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
        measure: measures a layer's attention: ``measures`` numbers that add up over its heads.
        statistics: the column statistics that ``measure`` reads.
        window: their observation window, 0 for the policy's.
        needs_nonnegative: whether it divides scores by their sum.
        one_layer: whether a layer can be evicted from without knowing the other layers.
    """

    name: str
    keep: Callable[[Contest], Bool[Array, "*rows S"]]
    scope: Scope
    most: Callable[[int, int, int], int]
    even: bool = False
    measure: Callable[[Observation], Float[Array, "B measures"]] | None = None
    measures: int = 0
    statistics: frozenset[str] = frozenset()
    window: int = 0
    needs_nonnegative: bool = False

    @property
    def one_layer(self) -> bool:
        return self.even or self.scope == "layer"

    def __str__(self) -> str:
        return self.name


ALLOCATIONS: dict[str, Callable[..., Allocation]] = {}


def _register(make: Callable[..., Allocation]) -> Callable[..., Allocation]:
    return registered(ALLOCATIONS, make)


@_register
def uniform() -> Allocation:
    """Give each head the same number of slots.

    Example:
        >>> from kvjax import allocation
        >>> allocation.uniform().even
        True
    """
    return Allocation(
        "uniform",
        lambda c: c.best("head", jnp.broadcast_to(c.budget[:, None], (c.layers, c.budget.shape[0], c.heads))),
        scope="head",
        most=lambda L, K, budget: budget,
        even=True,
    )


@_register
def pyramid(*, beta: int | float = 20.0) -> Allocation:
    """Give more slots to the first layers and fewer to the last, linearly (PyramidKV, arXiv 2406.02069).

    With B the budget minus the protected tokens, the last layer gets ``B / beta`` and the first ``2 B`` minus that. A
    layer never gets more slots than the sequence has tokens so far; what it cannot use goes to the last layers.

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
        free = (c.budget - fixed).astype(jnp.float32)
        seen = (c.seen - fixed).astype(jnp.float32)
        first = jnp.minimum(free * (2 - 1 / beta), jnp.maximum(seen, free))
        step = jnp.linspace(0, 1, c.layers, dtype=jnp.float32) if c.layers > 1 else jnp.full(1, 0.5, jnp.float32)
        shares = first[None] - (2 * first - 2 * free)[None] * step[:, None]
        return c.best("head", _for_each_head(_layer_budgets(c, lambda room, total: shares, 2.0, each=1), c))

    return Allocation("pyramid", keep, scope="head", most=lambda L, K, budget: 2 * budget)


@_register
def adakv(*, safeguard: int | float = 0.2, cap: int | float | None = 8.0) -> Allocation:
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


@_register
def layer(*, cap: int | float | None = 8.0) -> Allocation:
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


@_register
def model(*, normalise: bool = True, cap: int | float | None = 8.0) -> Allocation:
    """Take one top-k over all layers and heads (LaProx, arXiv 2605.07234, algorithm 2).

    Args:
        normalise: first divide the scores by their sum over the layer's unprotected tokens (eq. 12).
        cap: see :func:`adakv`.

    Example:
        >>> import kvjax
        >>> kvjax.parse("laprox@model").allocation.scope
        'model'
    """
    _check_cap("model", cap)

    def keep(c: Contest) -> Array:
        if normalise:
            c = c._replace(scores=_shares_of_layer(c))
        return _capped(c, cap).best("model", c.budget * c.layers * c.heads)

    return Allocation(
        "model", keep, scope="model", most=_most("model", cap),
        needs_nonnegative=normalise,
    )  # fmt: skip


@_register
def cake(
    *, window: int | None = None, space: int | float = 1.0, time: int | float = 1.0, cap: int | float | None = 8.0
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
        >>> str(kvjax.parse("cake@cake"))
        'cake@cake'
    """
    if window is not None:
        check_count("cake: window", window, 2, "a variance needs at least 2 queries")
    for what, exponent in (("space", space), ("time", time)):
        check_number("cake", what, exponent, 1e-6, 1e6, "a number above 0")
    _check_cap("cake", cap)

    def measure(o: Observation) -> Array:
        evictable = (o.live & ~o.protected)[:, :, None]
        columns = (-o.columns.window_log, o.columns.window_variance)
        return jnp.stack([jnp.sum(jnp.where(evictable, x, 0), axis=(1, 2, 3)) for x in columns], axis=-1)

    def keep(c: Contest) -> Array:
        if c.measured is None:
            raise ValueError(
                "the allocation 'cake' needs its measurements of each layer; give evict the evidence of kvjax.observe "
                "instead of scores."
            )
        entropy, variance = jnp.moveaxis(jnp.maximum(c.measured, 0), -1, 0)
        preference = entropy ** (1 / space) * variance ** (1 / time)
        held = c.sum(c.live, "layer") // c.heads - (c.entered + _protected_of_a_head(c))[None]
        measured = jnp.sum(preference, axis=0, keepdims=True) > 0
        weight = jnp.where(measured, preference, jnp.maximum(held, 0).astype(preference.dtype))
        return c.best("head", _for_each_head(_layer_budgets(c, _in_proportion(weight), cap, each=1), c))

    return Allocation(
        "cake", keep, scope="head", most=lambda L, K, budget: _limit(cap, budget, L * budget),
        measure=measure, measures=2, statistics=frozenset({"window_log", "window_variance"}),
        window=0 if window is None else window,
    )  # fmt: skip


@_register
def lava(*, cap: int | float | None = 8.0) -> Allocation:
    """Divide slots among layers by the entropy of their scores, then take one top-k per layer (LAVa, arXiv 2509.09754).

    Args:
        cap: see :func:`adakv`.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("lava@lava"))
        'lava@lava'
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


@typed
@functools.cache
def parse_allocation(name: str) -> Allocation:
    """Return the allocation that a short name stands for, as written after the ``@`` of a policy.

    Raises:
        ValueError: if the allocation or an argument is unknown.

    Example:
        >>> from kvjax import allocation
        >>> allocation.parse_allocation("model(normalise=False)").name
        'model(normalise=False)'
    """
    how = "write it like 'model' or 'adakv(safeguard=0.2)'"
    try:
        tree = ast.parse(name.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"the allocation {name!r} is malformed; {how}.") from None
    return called(tree, ALLOCATIONS, "allocation", name.strip(), how)


def _keep_in_layer(safeguard: int | float, cap: int | float | None, c: Contest) -> Array:
    if safeguard:
        B = c.budget.shape[0]
        safe = share_of(safeguard, c.budget)
        own = c.best("head", jnp.broadcast_to(safe[:, None], (c.layers, B, c.heads)))
        c = c._replace(scores=jnp.where(own, jnp.inf, c.scores))
    return _capped(c, cap).best("layer", jnp.broadcast_to(c.budget * c.heads, (c.layers, c.budget.shape[0])))


def _capped(c: Contest, cap: int | float | None) -> Contest:
    """Leave only each head's best ``cap * budget`` tokens in the contest."""
    if cap is None:
        return c
    limit = share_of(min(cap, c.layers * c.heads), c.budget)
    allowed = c.best("head", jnp.broadcast_to(limit[:, None], (c.layers, c.budget.shape[0], c.heads)))
    return c._replace(position=jnp.where(allowed, c.position, -1))


def _shares_of_layer(c: Contest) -> Float[Array, "*rows S"]:
    """Divide scores by their sum over the layer, without the tokens that are certain to stay."""
    counted = c.live & ~c.certain & (c.scores > -jnp.inf)
    total = c.sum(jnp.where(counted, c.scores, 0), "layer")
    total = jnp.where(total > 0, total, 1).ravel()[c.group("layer")]
    return jnp.where(counted, c.scores / total[..., None], c.scores)


def _protected_of_a_head(c: Contest) -> Int[Array, "B"]:
    """Return the largest number of protected tokens that any head holds, at most the budget."""
    protected = c.sum(c.live & (c.scores == jnp.inf), "head")  # [L, B, K]
    return jnp.minimum(jnp.max(protected, axis=(0, 2)), c.budget).astype(jnp.int32)


def _layer_budgets(c: Contest, share: Callable[[Array, Array], Array], cap: int | float | None, each: int) -> Array:
    """Compute the slots of each layer ``[L, B]``, summed over ``each`` of its heads.

    A layer gets its protected slots, and ``share(room, total)`` of the rest in whole numbers. No layer gets more than
    it holds; together they get all of the budget.
    """
    held = c.sum(c.live, "layer") * each // c.heads
    if cap is not None:
        held = jnp.minimum(held, share_of(min(cap, c.layers * c.heads), c.budget)[None] * each)
    fixed = jnp.minimum(_protected_of_a_head(c)[None] * each, held)
    room = held - fixed
    total = jnp.minimum(c.budget * each * c.layers - jnp.sum(fixed, axis=0), jnp.sum(room, axis=0))
    return fixed + _whole(share(room, total), room, total)


def _in_proportion(weight: Float[Array, "L B"]) -> Callable[[Array, Array], Array]:
    return lambda room, total: _filled(room.astype(jnp.float32), weight.astype(jnp.float32), total)


def _filled(room: Float[Array, "L B"], weight: Float[Array, "L B"], total: Int[Array, "B"]) -> Float[Array, "L B"]:
    """Share out the total by the weights, none above its room; what one layer can't take goes to the others."""
    weight = jnp.where(jnp.sum(weight, axis=0, keepdims=True) > 0, weight, 1.0)
    weight = jnp.maximum(
        weight / jnp.sum(weight, axis=0, keepdims=True), 1e-6
    )  # a layer without weight takes what the others can't

    def pour(_, share):
        full = share >= room
        left = total[None].astype(room.dtype) - jnp.sum(jnp.where(full, room, 0), axis=0, keepdims=True)
        open_weight = jnp.sum(jnp.where(full, 0, weight), axis=0, keepdims=True)
        return jnp.where(full, room, jnp.minimum(room, weight * left / jnp.where(open_weight > 0, open_weight, 1)))

    # Each pass fills at least one more layer, or is the last that changes anything.
    return jax.lax.fori_loop(0, room.shape[0] + 1, pour, jnp.zeros_like(room))


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


def _for_each_head(layers: Int[Array, "L B"], c: Contest) -> Int[Array, "L B K"]:
    return jnp.broadcast_to(layers[..., None], (*layers.shape, c.heads))


def _most(scope: Scope, cap: int | float | None) -> Callable[[int, int, int], int]:
    return lambda L, K, budget: _limit(cap, budget, budget * K * (L if scope == "model" else 1))


def _limit(cap: int | float | None, budget: int, total: int) -> int:
    return total if cap is None else min(total, share_of(cap, budget))


def _check_cap(name: str, cap: int | float | None) -> None:
    if cap is not None:
        check_number(name, "cap", cap, 1, 1e9, "a multiple of the budget from 1, or None for no limit")


UNIFORM = uniform()
