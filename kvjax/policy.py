"""Policies: chains of score transformations, as an Optax optimizer is a chain of gradient transformations.

A link is a pair of pure functions, `init` and `update`. The first link of a chain is a base score (h2o, snapkv, ...);
the others change its scores (caote, pool, ...) or say what always stays (protect). Scores are [B, K, G, S], one per
query head, or [B, K, 1, S] where a link has joined the group; the end of the chain averages over this axis. An
allocation follows the chain: it decides how many slots each head gets (kvjax/allocation.py).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kernels_pallas import STATISTICS
from kvjax.allocation import UNIFORM, Allocation, parse_allocation
from kvjax.cache import Positions
from kvjax.checks import check_count, plain, typed
from kvjax.eviction_error import score as eviction_error
from kvjax.merging import Merging
from kvjax.names import called, makers, registered
from kvjax.observation import Needs, Observation, Reconstruction, Weights
from kvjax.topk import share_of
from kvjax.window import Window, observed

PyTree = Any
Heads = Literal["group", "layer", "query"]
Scores = Float[Array, "B K _ S"]  # the third axis is G, or 1 where a link has joined the group


class Protection(NamedTuple):
    """The tokens that always stay: the first ``sinks`` and the last ``recent``; a float is a share of the budget."""

    sinks: int | float = 0
    recent: int | float = 0

    def counts(self, budget: Any) -> tuple[Any, Any]:
        """Return both as numbers of tokens under a budget (an int, or an array of one per row); round shares down."""
        sinks, recent = (x if isinstance(x, int) else share_of(x, budget) for x in map(plain, self))
        return sinks, recent


class Moments(NamedTuple):
    """When a paper evicts.

    ``prompt``: after every "block" of the prompt, or once, after the whole "prompt". ``decode``: at every step (1) or
    never (0). ``source``: the paper and what it says. ``final``: whether tokens that were chosen once stay for good.
    """

    prompt: Literal["block", "prompt"]
    decode: int
    source: str
    final: bool = False


@dataclasses.dataclass(frozen=True)
class Policy:
    """One link, or a whole chain, of a policy; made by the functions of ``kvjax.scores`` and by :func:`chain`.

    Attributes:
        name: its short name, as on a command line.
        init: ``init(B, K, G, S, D) -> state``, a pytree of zeros whose leaves start with ``[B, K, S]``, or with
            ``[B, K]`` inside a :class:`kvjax.HeadState`.
        update: ``update(scores, state, observation) -> (scores, state)``; a base score ignores ``scores``. The last
            link may return :class:`kvjax.Weights`, from which an eviction computes CAOTE's scores.
        needs: what it reads of an observation.
        protections: the tokens that always stay.
        links: the links of a chain; () for a single link.
        base: whether it makes scores rather than changing them.
        nonnegative: whether its scores are never negative, as caote needs them. A link that changes scores may leave
            this False if non-negative scores stay non-negative.
        needs_nonnegative: whether the scores that it changes must be non-negative.
        comparable: whether scores of different heads are on one scale, so that heads may exchange slots.
        heads: which heads share one set of tokens: each query "group", all of a "layer", or each "query" head alone.
        positions: how the cache rotates its keys; see :class:`kvjax.KVCache`.
        allocation: how many slots each head gets.
        published: when its paper evicts, None without a paper; a chain takes it from the last link that has one.
        merging: how the values of evicted tokens are folded into those that stay; None for not at all.
        measured: the layers and KV heads of the model that a link's numbers were measured on; None for any model.
    """

    name: str
    init: Callable[[int, int, int, int, int], PyTree]
    update: Callable[[Scores, PyTree, Observation], tuple[Scores | Weights, PyTree]]
    needs: Needs = Needs()
    protections: tuple[Protection, ...] = ()
    links: tuple[Policy, ...] = ()
    base: bool = False
    nonnegative: bool = False
    needs_nonnegative: bool = False
    comparable: bool = True
    heads: Heads = "group"
    positions: Positions = "absolute"
    allocation: Allocation = UNIFORM
    published: Moments | None = None
    merging: Merging | None = None
    measured: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.name

    def state(self, B: int, K: int, G: int, S: int, D: int) -> PyTree:
        """Make the initial state, zeros, for a cache of B rows, K heads of G query heads, and S slots of D numbers.

        It is the state of the links, with a :class:`kvjax.window.Window` before it if the policy observes a window of
        queries.
        """
        links = self.init(B, K, G, S, D)
        names = observed(self.needs.statistics)
        return (Window.init(names, B, K, G, S), links) if names else links

    def __matmul__(self, allocation: Allocation | str) -> Policy:
        """Return the policy with another allocation, as ``@`` in a short name."""
        return allocated(self, parse_allocation(allocation) if isinstance(allocation, str) else allocation)


def check_measured(policy: Policy | None, layers: int | None, kv_heads: int) -> None:
    """Raise ValueError if a link of a policy was measured on another model than one of these sizes.

    Args:
        layers: None where one layer stands for itself.
        kv_heads: the heads of the cache: the model's KV heads, or its query heads.

    Example:
        >>> import kvjax
        >>> from kvjax.policy import check_measured
        >>> check_measured(kvjax.h2o(), layers=2, kv_heads=8)
    """
    for link in () if policy is None else policy.links or (policy,):
        if link.measured is None:
            continue
        if layers not in (None, link.measured[0]) or kv_heads % link.measured[1]:
            raise ValueError(
                f"{link.name!r} was measured on a model of {link.measured[0]} layers with {link.measured[1]} KV heads, "
                f"but this one has {layers} with {kv_heads}; measure this model."
            )


def no_state(B: int, K: int, G: int, S: int, D: int) -> tuple[()]:
    """Return an empty state: the ``init`` of a link without state.

    Example:
        >>> import kvjax
        >>> kvjax.no_state(1, 2, 2, 8, 64)
        ()
    """
    return ()


def unchanged(scores: Scores, state: PyTree, observation: Observation) -> tuple[Scores, PyTree]:
    """Return the scores and the state as they are: the ``update`` of a link that changes no scores."""
    return scores, state


@typed
def base_score(
    name: str,
    score: Callable[[Observation], Scores],
    *,
    statistics: tuple[str, ...] = (),
    window: int = 0,
    protection: Protection | None = None,
    projections: tuple[str, ...] = (),
    rotary: bool = False,
    nonnegative: bool = True,
    reconstruction: Reconstruction | None = None,
    published: Moments | None = None,
) -> Policy:
    """Make a stateless base score from a function of the observation, which is all that most published scores need.

    Args:
        name: its name in tables.
        score: returns ``[B, K, G, S]`` or, for scores that don't depend on the query head, ``[B, K, 1, S]``.
        statistics: the column statistics that it reads.
        window: the observation window of the "window_" statistics.
        protection: the tokens that it always keeps.
        projections: the parts that it reads of the layer's output projection (``kvjax.projection.KINDS``).
        rotary: whether it reads the rotary frequencies.
        nonnegative: whether the scores are never below 0, so that ``caote`` may follow.
        reconstruction: the tokens that are fed after the prompt, observed and taken back.
        published: when its paper evicts.

    Example:
        >>> import jax.numpy as jnp
        >>> import kvjax
        >>> value_norm = kvjax.base_score("value_norm", lambda o: jnp.linalg.norm(o.value, axis=-1)[:, :, None])
        >>> str(kvjax.chain(value_norm, kvjax.protect(sinks=4)))
        'value_norm+protect(sinks=4)'
    """
    if unknown := sorted(set(statistics) - set(STATISTICS)):
        raise ValueError(f"{name}: unknown statistics {', '.join(unknown)}; expected some of {', '.join(STATISTICS)}.")
    check_count(f"{name}: window", window, 0, "give the number of queries that observe, from 0")
    return Policy(
        name=name,
        init=no_state,
        update=lambda _, state, observation: (score(observation), state),
        needs=Needs(frozenset(statistics), window, frozenset(projections), rotary, reconstruction=reconstruction),
        protections=() if protection is None else (protection,),
        base=True,
        nonnegative=nonnegative,
        published=published,
    )


@functools.cache
def chain(*links: Policy) -> Policy:
    """Chain a base score and links that change its scores; the same links give the same object, as in :func:`parse`.

    Raises:
        ValueError: if the first link is not a base score or another one is, two observation windows differ, or
            ``caote`` follows scores that can be negative.

    Example:
        >>> import kvjax
        >>> str(kvjax.chain(kvjax.h2o(), kvjax.caote(), kvjax.protect(sinks=4, recent=0.5)))
        'h2o+caote+protect(sinks=4,recent=0.5)'
    """
    if wrong := [link for link in links if not isinstance(link, Policy)]:
        raise ValueError(f"{wrong[0]!r} is no link of a policy; give links such as kvjax.h2o(), or kvjax.parse a name.")
    name = "+".join(link.name for link in links)
    if not links or not links[0].base:
        first = f"{links[0].name!r} comes first" if links else "nothing was given"
        raise ValueError(f"a policy starts with a base score ({', '.join(_base_names())}), but {first}.")
    nonnegative = True
    for index, link in enumerate(links):
        if index and link.base:
            raise ValueError(f"{name!r} has two base scores, {links[0].name!r} and {link.name!r}; keep one of them.")
        if link.needs_nonnegative and not nonnegative:
            raise ValueError(
                f"{link.name!r} needs non-negative scores, which {links[0].name!r} does not give; "
                "put 'normalise' between."
            )
        nonnegative = link.nonnegative if link.base or not link.comparable else nonnegative or link.nonnegative
    try:
        needs = functools.reduce(operator.or_, (link.needs for link in links))
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None
    heads = {link.heads for link in links} - {"group"} or {"group"}
    positions = {link.positions for link in links} - {"absolute"} or {"absolute"}
    for what, choices in (("heads", heads), ("positions", positions)):
        if len(choices) > 1:
            raise ValueError(f"{name!r} asks for {what} {' and '.join(sorted(choices))}; a policy has one of them.")

    mergings = [link.merging for link in links if link.merging is not None]
    if len(mergings) > 1:
        both = " and ".join(merging.name for merging in mergings[:2])
        raise ValueError(f"{name!r} merges values twice, by {both}; keep one of them.")

    comparable = all(link.comparable for link in links)
    if "layer" in heads and not comparable:
        raise ValueError(
            f"{name!r} averages scores over the heads of a layer, but they only order the tokens of one head; "
            "take rounds=1, or heads='group'."
        )
    turned = positions - {"absolute"}
    if turned and needs.rotary:
        raise ValueError(
            f"{name!r} turns queries back by their positions in the text, but the cache's are {turned.pop()!r}; "
            "leave the link 'positions' out."
        )

    def init(B: int, K: int, G: int, S: int, D: int) -> PyTree:
        return tuple(link.init(B, K, G, S, D) for link in links)

    def update(scores: Scores | Weights, state: PyTree, observation: Observation) -> tuple[Scores | Weights, PyTree]:
        states = []
        for link, link_state in zip(links, state, strict=True):
            if link.update is not unchanged:
                scores, link_state = link.update(computed(scores, observation), link_state, observation)
            states.append(link_state)
        return scores, tuple(states)

    return Policy(
        name=name,
        init=init,
        update=update,
        needs=needs,
        protections=sum((link.protections for link in links), ()),
        links=links,
        base=True,
        nonnegative=nonnegative,
        comparable=comparable,
        heads=heads.pop(),
        positions=positions.pop(),
        published=next((link.published for link in reversed(links) if link.published is not None), None),
        merging=mergings[0] if mergings else None,
    )


@functools.cache
def allocated(policy: Policy, allocation: Allocation) -> Policy:
    """Return the policy with an allocation, as ``policy @ allocation`` and a short name's ``@`` make it.

    Raises:
        ValueError: if the allocation needs other scores than the policy has.

    Example:
        >>> import kvjax
        >>> str(kvjax.h2o() @ "layer")
        'h2o@layer'
    """
    if not isinstance(allocation, Allocation):
        raise ValueError(f"{allocation!r} is not an allocation; give one of kvjax.allocation, or its short name.")
    plain = policy.name.split("@")[0]
    name = plain if allocation is UNIFORM else f"{plain}@{allocation.name}"
    if not allocation.even and policy.heads == "layer":
        raise ValueError(
            f"{name!r}: {plain!r} keeps one set of tokens for all heads of a layer, but {allocation.name!r} gives "
            "heads different numbers of slots; take heads='group', or leave the allocation out."
        )
    if not allocation.even and policy.merging is not None:
        raise ValueError(
            f"{name!r}: {policy.merging.name!r} merges values in plain caches, but {allocation.name!r} gives heads "
            "different numbers of slots, in pages; leave the allocation or the link out."
        )
    if allocation.scope != "head" and not policy.comparable:
        raise ValueError(
            f"{name!r}: {allocation.name!r} needs scores that heads can compare, but those of {plain!r} only order the "
            "tokens of one head; leave the allocation out, or take rounds=1."
        )
    if allocation.needs_nonnegative and not policy.nonnegative:
        raise ValueError(
            f"{name!r}: {allocation.name!r} divides scores by their sum, for which they must not be negative, as those "
            f"of {plain!r} can be; put 'normalise' between."
        )
    needs = policy.needs
    if allocation.statistics and needs.reconstruction is not None and not needs.reconstruction.pseudo:
        raise ValueError(
            f"{name!r}: {allocation.name!r} measures the attention of the text's last queries, but {plain!r} evicts "
            "after the model has repeated its prompt; take another allocation."
        )
    if allocation.statistics:
        window = (allocation.window or needs.window or 32) if observed(allocation.statistics) else 0
        own = Needs(allocation.statistics, window)
        try:
            needs = needs | own
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
    return dataclasses.replace(policy, name=name, allocation=allocation, needs=needs)


def retention_scores(policy: Policy, state: PyTree, observation: Observation) -> tuple[Float[Array, "B K S"], PyTree]:
    """Run a policy on a block: return one score per slot, ``+inf`` where it is protected, and the new state.

    Example:
        >>> import jax.numpy as jnp
        >>> import kvjax
        >>> from kernels_pallas import ColumnStatistics
        >>> one = jnp.ones((1, 1, 3, 2))
        >>> seen = kvjax.Observation(ColumnStatistics(), one.swapaxes(1, 2), jnp.array([[0, 1, 2]]), one, one,
        ...                          jnp.array([[[0, 1, 2]]]), jnp.array([3]), jnp.array([2]))
        >>> kvjax.retention_scores(kvjax.streaming(sinks=1), (), seen)[0].tolist()
        [[[inf, 1.0, 2.0]]]
    """
    observation = mark_protected(policy, observation)
    scores, state = update_scores(policy, state, observation)
    if isinstance(scores, Weights):
        scores = joined(scores, observation.value, observation.live, observation.protected)
    return scores, state


def update_scores(
    policy: Policy, state: PyTree, observation: Observation
) -> tuple[Float[Array, "B K S"] | Weights, PyTree]:
    """Run a policy on a block whose protected slots are marked; CAOTE's scores may stay :class:`kvjax.Weights`."""
    nothing = jnp.zeros_like(observation.position[:, :, None], jnp.float32)  # a base score ignores it
    scores, state = policy.update(nothing, state, observation)
    if isinstance(scores, Weights) and policy.heads != "layer":
        return scores, state
    scores = computed(scores, observation)
    if policy.heads == "layer":
        heads = scores.shape[1] * scores.shape[2]  # divided before the sum, which overflows for the largest floats
        scores = jnp.broadcast_to(jnp.sum(scores / heads, axis=(1, 2), keepdims=True), scores.shape)
    return jnp.where(observation.protected, jnp.inf, jnp.mean(scores, axis=2)), state


def computed(scores: Scores | Weights, observation: Observation) -> Scores:
    """Return the scores as the next link reads them: computed, if they are still :class:`kvjax.Weights`."""
    if not isinstance(scores, Weights):
        return scores
    return joined(scores, observation.value, observation.live, None)[:, :, None]


def joined(
    weights: Weights,
    value: Float[Array, "B K S D"],
    live: Bool[Array, "B K S"],
    protected: Bool[Array, "B K S"] | None,
) -> Float[Array, "B K S"]:
    """Compute CAOTE's scores from their weights; ``+inf`` where a slot is protected."""
    errors = eviction_error(
        weights.weights, value, fast=weights.fast, norm=weights.norm, group=weights.group, mask=live
    )
    return errors if protected is None else jnp.where(protected, jnp.inf, errors)


def mark_protected(policy: Policy, observation: Observation) -> Observation:
    """Return the observation with ``protected`` filled in: the first and last tokens that the policy always keeps."""
    sinks, recent = protected(policy, observation.budget)
    position = observation.position
    oldest_recent = observation.next_position - recent
    stays = (position < jnp.reshape(sinks, (-1, 1, 1))) | (position >= jnp.reshape(oldest_recent, (-1, 1, 1)))
    return observation._replace(protected=stays & observation.live)


def protected(policy: Policy, budget: Any) -> tuple[Any, Any]:
    """Return how many first and last tokens a policy always keeps under a budget (an int, or one per row).

    Example:
        >>> import kvjax
        >>> kvjax.protected(kvjax.parse("snapkv(window=16)+protect(sinks=4,recent=0.5)"), 100)
        (4, 50)
    """
    sinks, recent = 0, 0
    for protection in policy.protections:
        more_sinks, more_recent = protection.counts(budget)
        sinks, recent = _larger(sinks, more_sinks), _larger(recent, more_recent)
    return sinks, recent


def check_block(policy: Policy, block: int) -> None:
    """Check that a block is large enough for the policy's observation window.

    Raises:
        ValueError: if the window has more queries than a block.

    Example:
        >>> import kvjax
        >>> kvjax.check_block(kvjax.parse("snapkv"), 16)
        Traceback (most recent call last):
            ...
        ValueError: 'snapkv' observes the last 32 queries, but a block has 16: give a block of at least 32, or a \
smaller window (window=16 in its name).
    """
    block = check_count("block", block, 1, "a block has at least 1 token")
    if policy.needs.window > block:
        raise ValueError(
            f"{policy.name!r} observes the last {policy.needs.window} queries, but a block has {block}: give a block "
            f"of at least {policy.needs.window}, or a smaller window (window={block} in its name)."
        )


def check_budget(policy: Policy, budget: int) -> None:
    """Check that a budget is large enough for the tokens that the policy protects.

    Raises:
        ValueError: if the budget is below 1, or smaller than the number of protected tokens.

    Example:
        >>> import kvjax
        >>> kvjax.check_budget(kvjax.parse("snapkv"), 16)
        Traceback (most recent call last):
            ...
        ValueError: the budget is 16 tokens, but 'snapkv' always keeps 0 first and 32 last ones: give at least 32, \
or protect fewer.
    """
    budget = check_count("the budget", budget, 1, "at least 1 token must stay")
    sinks, recent = protected(policy, budget)
    if sinks + recent > budget:
        raise ValueError(
            f"the budget is {budget} tokens, but {policy.name!r} always keeps {sinks} first and {recent} last ones: "
            f"give at least {sinks + recent}, or protect fewer."
        )


@typed
def parse(name: str) -> Policy:
    """Return the policy that a short name stands for, as command lines write it.

    The same name gives the same object, so that a compiled program is found again. A link that is neither built in nor
    registered is looked for among the installed packages' entry points in the group ``kvjax.policies``.

    Raises:
        ValueError: if a link or an argument is unknown, the links do not make a chain, or two packages have a link.
        ImportError: if a link is from another package, which cannot be imported.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("snapkv(window=16) + fast_caote @ layer"))
        'snapkv(window=16)+fast_caote@layer'
    """
    whole = name
    name, at, behind = name.partition("@")
    allocation = None
    if at:
        try:
            allocation = parse_allocation(behind.strip())
        except ValueError as error:
            raise ValueError(f"{whole!r}: {error}") from None
    try:
        tree = ast.parse(name.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(
            f"the policy {name[:80]!r} is malformed; write links joined by '+', like {_EXAMPLE}."
        ) from None
    links = []
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        links.append(called(tree.right, LINKS, name, f"write links joined by '+', like {_EXAMPLE}"))
        tree = tree.left
    links.append(called(tree, LINKS, name, f"write links joined by '+', like {_EXAMPLE}"))
    links.reverse()
    policy = chain(*links) if len(links) > 1 or not links[0].base else links[0]
    return policy if allocation is None else allocated(policy, allocation)


def policy_of(policy: Policy | str | None) -> Policy | None:
    """Return a policy that is given as itself or by its short name; None for "full".

    Raises:
        ValueError: if it is neither, or the name is unknown.

    Example:
        >>> from kvjax.policy import policy_of
        >>> str(policy_of("h2o + caote")), policy_of("full")
        ('h2o+caote', None)
    """
    if isinstance(policy, str):
        return None if policy.strip() == "full" else parse(policy)
    if policy is not None and not isinstance(policy, Policy):
        raise ValueError(f"policy is {policy!r}; give a policy, or its short name, such as 'snapkv+caote'.")
    return policy


_EXAMPLE = "'snapkv(window=16)+caote+protect(sinks=4)'"
LINKS = makers("policy", "kvjax.policies", Policy)


def register(make: Callable[..., Policy]) -> Callable[..., Policy]:
    """Register a link's maker, as its decorator: short names find it, and equal arguments give the same object.

    The name of the function is the short name, and its keyword arguments are those that the short name may have. A
    package that offers the function as an entry point in the group ``kvjax.policies`` need not decorate it.

    Args:
        make: returns a :class:`Policy` of the function's name, such as :func:`base_score` makes. Its arguments are
            checked against their annotations.

    Returns:
        The function, which now returns the same object for equal arguments.

    Raises:
        ValueError: if another module or an installed package has this name.

    Example:
        >>> import jax.numpy as jnp
        >>> import kvjax
        >>> @kvjax.register
        ... def loudest(*, power: float = 1.0):
        ...     return kvjax.base_score("loudest", lambda o: jnp.max(jnp.abs(o.value), axis=-1)[:, :, None] ** power)
        >>> str(kvjax.parse("loudest(power=2.0)+caote"))
        'loudest(power=2.0)+caote'
    """
    return registered(LINKS, make)


def _base_names() -> list[str]:
    return sorted(name for name, make in LINKS.items() if make().base)


def _larger(a: Any, b: Any) -> Any:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)
