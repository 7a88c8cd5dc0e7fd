"""Policies: chains of score transformations, as an Optax optimizer is a chain of gradient transformations.

A link is a pair of pure functions, `init` and `update`. The first link of a chain is a base score (h2o, snapkv, ...);
the others change its scores (caote, pool, ...) or say what always stays (protect). Scores are [B, K, G, S], one per
query head, or [B, K, 1, S] where a link has joined the group; the end of the chain averages over this axis. An
allocation follows the chain: it decides how many slots each head gets (kvjax/allocation.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kernels_pallas.caote_topk.reference import Ends, errors_of_scores
from kvjax._src.cache import Positions
from kvjax._src.checks import plain
from kvjax._src.merging import Merging
from kvjax._src.observation import Needs, Observation, Weights
from kvjax._src.order import Ranked
from kvjax._src.reconstruction import Reconstruction
from kvjax._src.topk import share_of
from kvjax._src.window import Window, observed
from kvjax.allocation import UNIFORM, Allocation, parse_allocation

PyTree = Any
Heads = Literal["group", "layer", "query"]
Scores = Float[Array, "B K _ S"]  # the third axis is G, or 1 where a link has joined the group


class Protection(NamedTuple):
    """The tokens that always stay: the first ``sinks`` and the last ``recent``; a float is a share of the budget.

    None leaves what the links before it protect: nothing, if they do not. ``least`` of the last tokens stay where
    ``recent`` is a share that has fewer.
    """

    sinks: int | float | None = None
    recent: int | float | None = None
    least: int = 0

    def counts(self, budget: Any) -> tuple[Any, Any]:
        """Return both as numbers of tokens under a budget (an int, or an array of one per row); round shares down."""
        sinks, recent = (x if isinstance(x, int) else share_of(x, budget) for x in (plain(x or 0) for x in self[:2]))
        return sinks, _larger(recent, self.least) if self.least else recent

    def replaced_by(self, later: Protection) -> Protection:
        """Return the protection of a chain that has another link behind this one."""
        sinks = self.sinks if later.sinks is None else later.sinks
        return Protection(sinks, *(self[1:] if later.recent is None else later[1:]))


UNPROTECTED = Protection()
# Statistics of attention that are linear in the weights, so that what a token counts for can be divided out.
LINEAR = frozenset({"sum", "last", "max", "window_mean", "window_max", "window_place", "scaled_max"})


class Marked(NamedTuple):
    """Hold a link's scores and the tokens that it has decided to keep.

    ``scores`` are those of all tokens, which the links behind it read. ``stays`` are tokens that are kept before all
    others, after those that are protected, whatever later links make of their scores. For later links they count as
    protected.
    """

    scores: Scores
    stays: Bool[Array, "B K S"]


class Timing(NamedTuple):
    """When a paper evicts.

    ``prompt``: after every "block" of the prompt, or once, after the whole "prompt". ``decode``: after so many steps, 0
    for never. ``source``: the paper and what it says. ``final``: whether tokens that were chosen once stay for good.
    """

    prompt: Literal["block", "prompt"]
    decode: int
    source: str
    final: bool = False


@dataclasses.dataclass(frozen=True)
class Policy:
    """One link, or a whole chain, of a policy; made by functions such as :func:`kvjax.h2o`, and by :func:`kvjax.chain`.

    Attributes:
        name: its short name, as on a command line.
        init: ``init(B, K, G, S, D) -> state`` of the links, a pytree of zeros whose leaves start with ``[B, K, S]``, or
            with ``[B, K]`` inside a :class:`kvjax.HeadState`; :meth:`state` is that of a cache.
        update: ``update(scores, state, observation) -> (scores, state)``; a base score ignores ``scores``. A link may
            return :class:`kvjax.Marked` scores. The last link may return :class:`kvjax.Weights`, from which
            an eviction computes CAOTE's scores.
        needs: what its links read of an observation; see ``reads``.
        protection: the tokens that always stay.
        links: the links of a chain; () for a single link.
        base: whether it makes scores rather than changing them.
        nonnegative: whether its scores are never negative, as caote needs them. A link that changes scores may leave
            this False if non-negative scores stay non-negative.
        cumulative: whether a token's score is a sum over all queries so far: it never falls, and in decode a new token,
            which few queries have seen, leaves before any old one unless recent tokens are protected.
        needs_nonnegative: whether the scores that it changes must be non-negative.
        heads: which heads share one set of tokens: each query "group", all of a "layer", or each "query" head alone.
        positions: how the cache rotates its keys; see :class:`kvjax.KVCache`.
        allocation: how many slots each head gets.
        inherited: the allocation that the name has without an ``@``; None where that is ``allocation``.
        published: when its paper evicts, None without a paper; a chain takes it from the last link that has one.
        merging: how the values of evicted tokens are folded into those that stay; None for not at all.
        measured: the layers and KV heads of the model that a link's numbers were measured on; None for any model.
    """

    name: str
    init: Callable[[int, int, int, int, int], PyTree]
    update: Callable[[Scores, PyTree, Observation], tuple[Scores | Weights | Marked, PyTree]]
    needs: Needs = Needs()
    protection: Protection = UNPROTECTED
    links: tuple[Policy, ...] = ()
    base: bool = False
    nonnegative: bool = False
    cumulative: bool = False
    needs_nonnegative: bool = False
    heads: Heads = "group"
    positions: Positions = "absolute"
    allocation: Allocation = UNIFORM
    inherited: Allocation | None = None
    published: Timing | None = None
    merging: Merging | None = None
    measured: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Policy({self.name!r})"

    def state(self, B: int, K: int, G: int, S: int, D: int) -> PyTree:
        """Make the initial state, zeros, for a cache of B rows, K heads of G query heads, and S slots of D numbers.

        It is the state of the links, with the statistics of a window before it if the policy observes a window of
        queries, and beside the ranks of the tokens if it reads their order.
        """
        state = self.init(B, K, G, S, D)
        names = observed(self.reads.statistics)
        if names:
            state = Window.init(names, B, K, G, S), state
        return Ranked(jnp.zeros((B, K, S), jnp.int32), state) if self.needs.order else state

    def protected(self, budget: Any) -> tuple[Any, Any]:
        """Return how many first and last tokens always stay under a budget; see :func:`kvjax.protected`."""
        return self.protection.counts(budget)

    @property
    def reads(self) -> Needs:
        """Return what it reads of an observation: what its links need, and what its allocation measures."""
        return _reads(self.name, self.needs, self.allocation)

    @property
    def draws(self) -> bool:
        """Return whether the tokens that stay are drawn, and count for those that left."""
        return self.merging is not None and self.merging.weigh is not None

    @property
    def repeats(self) -> Reconstruction | None:
        """Return what the model is to repeat of its text, by which tokens are scored; None for nothing."""
        wanted = self.needs.reconstruction
        return None if wanted is None or wanted.pseudo else wanted

    @property
    def chain_name(self) -> str:
        """Return the name without the allocation that replaces the inherited one."""
        return self.name if self.inherited is None else self.name.removesuffix(f"@{self.allocation.name}")

    def __matmul__(self, allocation: Allocation | str) -> Policy:
        """Return the policy with another allocation in place of its own, as ``@`` in a short name."""
        policy = allocated(self, parse_allocation(allocation))
        check_allocation(policy)
        return policy


def fits_biases(policy: Policy | None) -> bool:
    """Return whether a policy's cache has a bias per slot, which its evictions set."""
    return policy is not None and policy.merging is not None and policy.merging.biased


@functools.cache
def allocated(policy: Policy, allocation: Allocation) -> Policy:
    """Return the policy with an allocation, as ``policy @ allocation`` and a short name's ``@`` make it.

    It is named only where it is not the one that the policy has from its base score.
    """
    if allocation.name == policy.allocation.name:
        return policy
    plain, inherited = policy.chain_name, policy.inherited or policy.allocation
    if allocation.name == inherited.name:
        return dataclasses.replace(policy, name=plain, allocation=inherited, inherited=None)
    name = f"{plain}@{allocation.name}"
    return dataclasses.replace(policy, name=name, allocation=allocation, inherited=inherited)


def check_allocation(policy: Policy) -> None:
    """Check that an allocation can divide the slots of a policy's chain, whose scores and attention it reads."""
    name, plain, allocation, needs = policy.name, policy.chain_name, policy.allocation, policy.needs
    if not allocation.even and policy.heads == "layer":
        raise ValueError(f"{name!r}: {allocation.name!r} gives heads different numbers; take heads='group'.")
    if allocation.needs_nonnegative and not policy.nonnegative:
        sums = f"{allocation.name!r} divides scores by their sum, but those of {plain!r} may be negative"
        raise ValueError(f"{name!r}: {sums}; put 'normalise' between.")
    repeated = needs.reconstruction is not None and not needs.reconstruction.pseudo
    if allocation.statistics and (repeated or needs.errors is not None):
        raise ValueError(f"{name!r}: {allocation.name!r} measures attention that {plain!r} lacks; take another.")
    if policy.draws and allocation.statistics - LINEAR:
        what = f"{allocation.name!r} measures more of attention than is linear in it, and tokens count for several"
        raise ValueError(f"{name!r}: {what}; take another allocation.")
    if policy.draws and not allocation.by_score:
        what = f"heads of {allocation.name!r} keep tokens by their places, but {plain!r} draws them by their scores"
        raise ValueError(f"{name!r}: {what}; take another allocation.")
    _reads(name, needs, allocation)


@functools.cache
def _reads(name: str, needs: Needs, allocation: Allocation) -> Needs:
    if not allocation.statistics:
        return needs
    window = (allocation.window or needs.window or 32) if observed(allocation.statistics) else 0
    try:
        return needs | Needs(allocation.statistics, window)
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None


def update_scores(
    policy: Policy, state: PyTree, observation: Observation
) -> tuple[Float[Array, "B K S"] | Weights, Bool[Array, "B K S"] | None, PyTree]:
    """Run a policy on a block whose protected slots are marked.

    Returns:
        Each head's scores, its mean over the group, or CAOTE's :class:`kvjax.Weights`; the tokens that links have
        marked; and the new state. See :func:`joined`.
    """
    nothing = jnp.zeros_like(observation.position[:, :, None], jnp.float32)  # a base score ignores it
    update = policy.update if policy.links else functools.partial(update_link, policy)
    scores, state = update(nothing, state, observation)
    if isinstance(scores, Weights) and policy.heads != "layer":
        return scores, None, state
    scores, stays = unmarked(scores, None)
    scores = as_scores(scores, observation)
    if policy.heads == "layer":  # divided before the sum, which overflows for the largest floats
        return jnp.sum(scores / scores.shape[2], axis=2), stays, state
    return jnp.mean(scores, axis=2), stays, state


def join_heads(
    policy: Policy,
    scores: Float[Array, "B K S"],
    stays: Bool[Array, "B K S"] | None,
    protected: Bool[Array, "B K S"],
    heads: int,
    summed: Callable[[Array], Array] = lambda x: x,
) -> Float[Array, "B K S"]:
    """Return the scores that an eviction reads: one for all heads where they share it, and those of marked tokens.

    Where the heads of a layer hold the same tokens, those are marked that all heads have marked; ``heads`` counts them
    on all devices, over which ``summed`` adds up.
    """
    if policy.heads == "layer":
        mean = summed(jnp.sum(scores / heads, axis=1, keepdims=True))
        scores = jnp.broadcast_to(mean, scores.shape)
        if stays is not None:
            stays = summed(jnp.sum(stays, axis=1, keepdims=True, dtype=jnp.int32)) == heads
    if stays is not None:  # as the last step: a link that divided it would make it a number like others
        scores = jnp.where(stays, jnp.finfo(jnp.float32).max, scores)
    return jnp.where(protected, jnp.inf, scores)


def update_link(
    link: Policy, scores: Scores, state: PyTree, observation: Observation
) -> tuple[Scores | Weights | Marked, PyTree]:
    """Run one link on a block, and check that it reads what it asked for, and the shapes of what it returns."""
    columns: Any = _Declared(link.name, observation.columns)
    given, new = link.update(scores, state, observation._replace(columns=columns))
    plain, _ = unmarked(given, None)
    shape = jnp.shape(plain.weights if isinstance(plain, Weights) else plain)
    (B, K, S), heads = observation.position.shape, observation.query.shape[2]
    if shape not in ((B, K, heads // K, S), (B, K, 1, S)):
        raise ValueError(f"{link.name!r} returned scores of shape {shape}; expected {(B, K, heads // K, S)}.")
    before, after = ([jax.tree.structure(x), *map(jnp.shape, jax.tree.leaves(x))] for x in (state, new))
    if before != after:
        raise ValueError(f"{link.name!r} returned a state of other arrays: {before[1:]} became {after[1:]}.")
    return given, new


class _Declared:
    """A block's statistics, of which those that no link has asked for are refused."""

    def __init__(self, name: str, columns: Any):
        self._link, self._columns = name, columns

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._columns, name)
        if found is None and name in type(self._columns)._fields:
            raise ValueError(f"{self._link!r} reads the statistic {name!r}, which nothing asked for; declare it.")
        return found


def unmarked(
    scores: Scores | Weights | Marked, stays: Bool[Array, "B K S"] | None
) -> tuple[Scores | Weights, Bool[Array, "B K S"] | None]:
    """Return what a link gave without its marks, and the tokens that it or a link before it has marked."""
    if not isinstance(scores, Marked):
        return scores, stays
    return scores.scores, scores.stays if stays is None else stays | scores.stays


def as_scores(scores: Scores | Weights, observation: Observation) -> Scores:
    """Return the scores as the next link reads them: computed, if they are still :class:`kvjax.Weights`."""
    if not isinstance(scores, Weights):
        return scores
    return scores_of_weights(scores, observation.value, observation.live, None)[:, :, None]


def scores_of_weights(
    weights: Weights, value: Float[Array, "B K S D"], live: Bool[Array, "B K S"], protected: Bool[Array, "B K S"] | None
) -> Float[Array, "B K S"]:
    """Compute CAOTE's scores from their weights; ``+inf`` where a slot is protected."""
    errors = errors_of_scores(weights.weights, value, live, **weights.kind)
    return errors if protected is None else jnp.where(protected, jnp.inf, errors)


def ends_of(policy: Policy, observation: Observation) -> Ends:
    """Return how many of each row's first and last tokens the policy always keeps."""
    rows, counts = observation.next_position.shape, policy.protected(observation.budget)
    sinks, recent = (jnp.broadcast_to(jnp.asarray(x, jnp.int32), rows) for x in counts)
    return Ends(sinks, recent, observation.next_position)


def mark_protected(policy: Policy, observation: Observation) -> Observation:
    """Return the observation with ``protected`` filled in: the first and last tokens that the policy always keeps."""
    return observation._replace(protected=ends_of(policy, observation).hold(observation.position))


def _larger(a: Any, b: Any) -> Any:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)
