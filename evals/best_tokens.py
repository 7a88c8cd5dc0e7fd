r"""The best tokens to keep, in hindsight: how small the error of future attention outputs can be.

A KV head holds S tokens, of which a cache keeps b; its G query heads read them in T queries to come. Query r = (g, t)
gives token j the weight :math:`a_{rj}` of the value :math:`v_{gj}`, over the S tokens and those that come after them,
which always stay; its output is :math:`o_r`. Without the tokens that z marks, the output moves by exactly
:math:`N_r / s_r`, where

.. math:: N_r = \sum_j z_j a_{rj} (o_r - v_{gj}), \quad s_r = 1 - \sum_j z_j a_{rj}, \quad
    error(z) = \sum_r \lvert N_r \rvert^2 / s_r^2.

That is CAOTE's error (arXiv 2504.14051, eq. 8) of a set in place of one token, and of all queries in place of one.

best           greedy from either side, then swaps: a set, and so an upper bound of the smallest error
lower_bound    a certified lower bound: a convex relaxation
bracket        branch and bound between the two: exact if it may go on to the end
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

HIGH = jax.lax.Precision.HIGHEST
FEW = 4096  # so many sets are tried one by one
TRIED = 8  # tokens to take back, where the first of them does not help
GAP = 1e-9  # the relative gap at which a branch and bound ends
SHARE = 16  # a greedy step takes one in so many of the tokens that are left to take


class Case(NamedTuple):
    """Hold what a KV head's future queries read: weights over tokens that they see, values, outputs per query head."""

    weights: Float[Array, "G T S"]
    values: Float[Array, "G S D"]
    outputs: Float[Array, "G T D"]


class Bracket(NamedTuple):
    """Tell that the smallest error of b tokens lies between ``lower`` and ``error``, which is that of ``kept``."""

    kept: Bool[np.ndarray, "S"]
    error: float
    lower: float
    nodes: int


@functools.partial(jax.jit, static_argnames="size")
def make_case(
    logits: Float[Array, "G T A"],
    value: Float[Array, "A D"],
    size: int,
    projection: Float[Array, "G D F"] | None = None,
) -> Case:
    """Make the case of one KV head from the attention logits of its future queries.

    The mean of the values, which moves no output, is taken off values and outputs.

    Args:
        logits: over the A tokens of the whole text, -inf where a query sees no token.
        value: the values of the A tokens.
        size: S, the first tokens, of which some are to be kept.
        projection: W_O of the query heads, or a matrix with the same Gram; None measures the outputs before it.

    Raises:
        ValueError: no token follows the first S, or the shapes do not match.
    """
    G, _, every = logits.shape
    if value.shape[0] != every or not 1 <= size < every:
        raise ValueError(
            f"logits {logits.shape} and values {value.shape} with a size of {size}: expected logits [G, T, A], values "
            "[A, D], and a size from 1 to A - 1, as the queries' own tokens follow it."
        )
    weights = jax.nn.softmax(logits, axis=-1)
    values = jnp.broadcast_to(value, (G, *value.shape))
    if projection is not None:
        values = jnp.einsum("gad,gdf->gaf", values, projection, precision=HIGH)
    outputs = jnp.einsum("gta,gad->gtd", weights, values, precision=HIGH)
    middle = jnp.mean(values, axis=1, keepdims=True)
    return Case(weights[..., :size], (values - middle)[:, :size], outputs - middle)


@jax.jit
def error(case: Case, kept: Bool[Array, "*G S"]) -> Float[Array, ""]:
    """Return the squared error of the outputs, summed over queries and heads, if only ``kept`` of the S tokens stay.

    They are those of all query heads together, ``[S]``, or of each, ``[G, S]``.
    """
    gone, left = _sums(case, jnp.broadcast_to(~kept, (len(case.values), kept.shape[-1])))
    return jnp.sum(jnp.square(gone / left[..., None]))


def _sums(case: Case, evicted: Float[Array, "*G S"]) -> tuple[Float[Array, "G T D"], Float[Array, "G T"]]:
    """Return N and s of the docstring above for tokens that are evicted, or fractions of them."""
    marked = case.weights * evicted[..., None, :]
    share = jnp.sum(marked, axis=-1)
    gone = share[..., None] * case.outputs - jnp.einsum("gts,gsd->gtd", marked, case.values, precision=HIGH)
    return gone, jnp.maximum(1 - share, _tiny(case))


def _tiny(case: Case) -> float:
    return float(jnp.finfo(case.weights.dtype).eps)


def _squares(case: Case) -> Float[Array, "G T S"]:
    """Return ``|a_rj (o_r - v_j)|^2`` of each query and token."""
    own = jnp.sum(jnp.square(case.outputs), -1)[..., None] + jnp.sum(jnp.square(case.values), -1)[:, None]
    both = jnp.einsum("gtd,gsd->gts", case.outputs, case.values, precision=HIGH)
    return jnp.square(case.weights) * jnp.maximum(own - 2 * both, 0)


def _after(case: Case, squares: Array, evicted: Bool[Array, "S"]) -> Float[Array, "S"]:
    """Return the error after one more change: that of evicting each kept token, and of taking back each other one."""
    gone, left = _sums(case, evicted)
    along = jnp.einsum("gtd,gtd->gt", gone, case.outputs, precision=HIGH)[..., None]
    along = case.weights * (along - jnp.einsum("gtd,gsd->gts", gone, case.values, precision=HIGH))
    sign = jnp.where(evicted, -1, 1)
    numerator = jnp.sum(jnp.square(gone), -1)[..., None] + 2 * sign * along + squares
    return jnp.sum(numerator / jnp.square(jnp.maximum(left[..., None] - sign * case.weights, _tiny(case))), (0, 1))


@jax.jit
def improve(case: Case, kept: Bool[Array, "S"], swaps: int = 256) -> Bool[Array, "S"]:
    """Swap kept for evicted tokens while that lowers the error.

    A swap takes back the token that lowers it most and evicts the best other one; where that does not help, each of
    the eight that lower it most is tried.
    """
    squares = _squares(case)

    def swapped(evicted, back):  # the token at ``back`` comes back, and the best other one leaves
        more = evicted.at[back].set(False)
        costs = jnp.where(more, jnp.inf, _after(case, squares, more)).at[back].set(jnp.inf)
        out = jnp.argmin(costs)
        return costs[out], more.at[out].set(True)

    def swap(state):
        evicted, before, _, number = state
        order = jnp.argsort(jnp.where(evicted, _after(case, squares, evicted), jnp.inf))[:TRIED]
        limit = before * (1 - 8 * _tiny(case))

        def each():
            costs, sets = jax.lax.map(lambda back: swapped(evicted, back), order)
            costs = jnp.where(evicted[order], costs, jnp.inf)
            return jnp.min(costs), sets[jnp.argmin(costs)]

        found = swapped(evicted, order[0])
        then, new = jax.lax.cond(found[0] < limit, lambda: found, each)
        better = then < limit
        return jnp.where(better, new, evicted), jnp.where(better, then, before), better, number + 1

    def going_on(state):
        return state[2] & (state[3] < swaps)

    evicted = ~jnp.asarray(kept)
    state = (evicted, error(case, ~evicted), jnp.any(evicted) & jnp.any(~evicted), 0)
    return ~jax.lax.while_loop(going_on, swap, state)[0]


@functools.partial(jax.jit, static_argnames="budget")
def best(case: Case, budget: int, starts: Bool[Array, "n S"] | None = None) -> Bool[Array, "S"]:
    """Search for the ``budget`` tokens of the smallest error: greedy from either side and from ``starts``, with swaps.

    A greedy step takes one in sixteen of the tokens that it has to take yet, at least one. ``starts`` are more sets of
    that size, such as what policies keep.
    """
    squares = _squares(case)
    S = case.weights.shape[-1]

    def towards(evicted, goal):  # the number of evicted tokens goes up or down until it is the goal
        def step(evicted):
            more = goal - jnp.sum(evicted)
            count = jnp.maximum(jnp.abs(more) // SHARE, 1)
            costs = jnp.where(evicted == (more < 0), _after(case, squares, evicted), jnp.inf)
            return evicted ^ (jnp.argsort(jnp.argsort(costs)) < count)

        return jax.lax.while_loop(lambda evicted: jnp.sum(evicted) != goal, step, evicted)

    greedy = [~towards(jnp.full(S, first), S - budget) for first in (False, True)]
    every = jnp.stack([*greedy, *([] if starts is None else starts)])
    every = jax.lax.map(lambda kept: improve(case, kept), every)
    return every[jnp.argmin(jax.lax.map(lambda kept: error(case, kept), every))]


@functools.partial(jax.jit, static_argnames="steps")
def lower_bound(
    case: Case, low: Float[Array, "S"], high: Float[Array, "S"], count: int, start: Float[Array, "S"], steps: int = 200
) -> tuple[Float[Array, ""], Float[Array, "S"]]:
    r"""Return what no set of ``count`` evicted tokens goes below, and the fractions z that come close to it.

    As :math:`s_r` is at most :math:`1 - m_r`, with :math:`m_r` the mass of the ``count`` least read tokens of query r,
    :math:`\sum_r \lvert N_r \rvert^2 / (s_r (1 - m_r))` is at most the error. It is convex in z, so its tangent at any
    z bounds it from below; a linear function's least sum over sets is that of the smallest entries. The z come from
    accelerated projected gradients (FISTA with restarts), and the largest bound on the way is returned.

    Args:
        low, high: bounds of z: 0 and 1, equal to each other for a token that is decided.
        start: the z to start from.
    """
    free, left = low < high, count - jnp.sum(jnp.where(low < high, 0, low))
    dtype = case.weights.dtype

    def least(x: Array) -> Array:  # of each row: the decided tokens, and the smallest of the others
        ordered = jnp.sort(jnp.where(free, x, jnp.inf), axis=-1)
        chosen = jnp.arange(x.shape[-1]) < left
        return jnp.sum(jnp.where(chosen, ordered, 0), -1) + jnp.sum(jnp.where(free, 0, low) * x, -1)

    most = jnp.maximum(1 - least(case.weights), _tiny(case))  # [G, T]
    scale = jnp.sum(_squares(case) / jnp.square(most)[..., None], (0, 1))
    scale = scale + 1e-4 * jnp.mean(scale) + jnp.finfo(dtype).tiny

    def value(z):
        gone, rest = _sums(case, z)
        return jnp.sum(jnp.square(gone) / (rest * most)[..., None])

    def projected(z, weight):  # the nearest allowed point, where the distances of tokens have weights
        def halve(_, ends):
            middle = (ends[0] + ends[1]) / 2
            more = jnp.sum(jnp.clip(z - middle / weight, low, high)) > count
            return jnp.where(more, middle, ends[0]), jnp.where(more, ends[1], middle)

        ends = jnp.min((z - high) * weight), jnp.max((z - low) * weight)
        ends = jax.lax.fori_loop(0, 60, halve, ends)
        return jnp.clip(z - (ends[0] + ends[1]) / 2 / weight, low, high)

    def step(_, state):
        z, y, momentum, size, now, bound = state
        here, slope = jax.value_and_grad(value)(y)
        bound = jnp.maximum(bound, here - jnp.sum(slope * y) + least(slope))
        weight = size * scale
        new = projected(y - slope / weight, weight)
        then = value(new)
        apart = new - y
        fits = then <= here + jnp.sum(slope * apart) + jnp.sum(weight * jnp.square(apart)) / 2 + _tiny(case) * here
        better = fits & (then <= now)
        following = (1 + jnp.sqrt(1 + 4 * jnp.square(momentum))) / 2
        ahead = new + (momentum - 1) / following * (new - z)
        return (
            jnp.where(better, new, z),
            jnp.where(better, ahead, jnp.where(fits, z, y)),
            jnp.where(better, following, jnp.where(fits, 1, momentum)),
            jnp.where(fits, size * 0.9, size * 2),
            jnp.where(better, then, now),
            bound,
        )

    start = projected(jnp.asarray(start, dtype), scale)
    one = jnp.ones((), dtype)
    state = (start, start, one, 20 * one, value(start), 0 * one)
    z, *_, bound = jax.lax.fori_loop(0, steps, step, state)
    return bound, z


_errors = jax.jit(jax.vmap(error, (None, 0)))


def bracket(case: Case, budget: int, *, nodes: int = 1_000_000, steps: int = 200) -> Bracket:
    """Bracket the smallest error of ``budget`` tokens by branch and bound, in float64.

    A node has decided some tokens; :func:`lower_bound` bounds what is below it. The node of the lowest bound is next,
    and its undecided token with the most mass is decided either way. Where few sets are left, all of them are tried.

    Args:
        nodes: how many nodes are opened at most; 1 takes the relaxation alone.
        steps: of each relaxation.

    Raises:
        ValueError: the budget is no number of tokens from 1 to S.
    """
    S = case.weights.shape[-1]
    if not 1 <= budget <= S:
        raise ValueError(f"the budget is {budget}; give a number of the {S} tokens, from 1.")
    with jax.enable_x64(True):
        case = Case(*(jnp.asarray(x, jnp.float64) for x in case))
        return _Search(case, S - budget, steps).run(nodes)


class _Search:
    """The state of a branch and bound."""

    def __init__(self, case: Case, count: int, steps: int):
        self.case, self.count, self.steps = case, count, steps
        self.mass = np.asarray(case.weights).sum((0, 1))
        self.kept = np.asarray(best(case, case.weights.shape[-1] - count))
        self.error = float(error(case, self.kept))
        self.open: list[tuple[float, int, Any, Any, Any]] = []
        self.opened = 0

    def run(self, nodes: int) -> Bracket:
        S = len(self.kept)
        self.look(np.zeros(S), np.ones(S), (~self.kept).astype(float), 0.0)
        while self.open and self.opened < nodes and self.open[0][0] < self.error * (1 - GAP):
            lower, _, low, high, z = heapq.heappop(self.open)
            undecided = np.where(low < high, (np.minimum(z, 1 - z) + 1e-9) * self.mass, -1)
            token = int(np.argmax(undecided))
            for decided in (0.0, 1.0):
                ends = low.copy(), high.copy()
                ends[0][token] = ends[1][token] = decided
                self.look(*ends, z, lower)
        lower = min([self.error, *(node[0] for node in self.open)])
        return Bracket(self.kept, self.error, lower, self.opened)

    def look(self, low: np.ndarray, high: np.ndarray, z: np.ndarray, lower: float) -> None:
        """Bound what is below a node, and keep the node if it may hold a smaller error."""
        free, left = np.flatnonzero(low < high), int(self.count - low[low == high].sum())
        if not 0 <= left <= len(free):
            return
        self.opened += 1
        if math.comb(len(free), left) <= FEW:
            self.try_all(low, free, left)
            return
        found, z = lower_bound(self.case, low, high, self.count, z, steps=self.steps)
        lower, z = max(float(found), lower), np.asarray(z)
        rounded = np.ones(len(z), bool)
        rounded[np.argsort(-z, kind="stable")[: self.count]] = False
        self.consider(np.asarray(improve(self.case, rounded)))
        if lower < self.error:
            heapq.heappush(self.open, (lower, self.opened, low, high, z))

    def try_all(self, low: np.ndarray, free: np.ndarray, left: int) -> None:
        sets = np.array(list(itertools.combinations(free, left)), int).reshape(-1, left)
        kept = np.tile(low == 0, (len(sets), 1))
        np.put_along_axis(kept, sets, False, axis=1)
        kept = np.concatenate([kept, np.repeat(kept[:1], FEW - len(kept), axis=0)])  # one shape, one program
        self.consider(kept[int(np.argmin(_errors(self.case, kept)))])

    def consider(self, kept: np.ndarray) -> None:
        found = float(error(self.case, kept))
        if found < self.error:
            self.kept, self.error = kept, found
