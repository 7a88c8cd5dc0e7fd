"""Makes policies: base scores, chains of links, and the short names that stand for them."""

from __future__ import annotations

import ast
import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

from kernels_pallas.cache_attention.api import check_statistics
from kvjax._src.checks import check_count
from kvjax._src.former_names import without_tuned
from kvjax._src.observation import Needs, Observation, Weights
from kvjax._src.policy import (
    LINEAR,
    UNPROTECTED,
    Marked,
    Policy,
    Protection,
    PyTree,
    Scores,
    Timing,
    allocated,
    as_scores,
    check_allocation,
    unmarked,
    update_link,
)
from kvjax._src.short_names import called, makers, read, registered
from kvjax.allocation import ALLOCATIONS, Allocation


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


def base_score(
    name: str,
    score: Callable[[Observation], Scores],
    *,
    statistics: tuple[str, ...] = (),
    window: int = 0,
    protection: Protection = UNPROTECTED,
    needs: Needs = Needs(),
    nonnegative: bool = True,
    published: Timing | None = None,
) -> Policy:
    """Make a stateless base score from a function of the observation, which is all that most published scores need.

    Args:
        name: its name in tables.
        score: returns ``[B, K, G, S]`` or, for scores that don't depend on the query head, ``[B, K, 1, S]``.
        statistics: the column statistics that it reads, or "weights": all of the block's attention weights,
            ``[B, K, G, T, S]``, masked, scaled and capped as attention has them. They are for trying things: they take
            memory, and no kernel computes them.
        window: the observation window of the "window_" statistics.
        protection: the tokens that it always keeps.
        needs: what else it reads, such as parts of the layer's output projection.
        nonnegative: whether the scores are never below 0, so that ``caote`` may follow.
        published: when its paper evicts.

    Example:
        >>> import jax.numpy as jnp
        >>> import kvjax
        >>> value_norm = kvjax.base_score(
        ...     "value_norm", lambda o: jnp.linalg.norm(o.value, axis=-1)[:, :, None]
        ... )
        >>> str(kvjax.chain(value_norm, kvjax.protect(sinks=4)))
        'value_norm+protect(sinks=4)'
    """
    least = int(any(statistic.startswith("window_") for statistic in statistics))
    check_count(f"{name}: window", window, least, f"give the number of queries that observe, from {least}")
    return Policy(
        name=name,
        init=no_state,
        update=lambda _, state, observation: (score(observation), state),
        needs=needs | Needs(check_statistics(statistics, window), window),
        protection=protection,
        base=True,
        nonnegative=nonnegative,
        published=published,
    )


def chain(*links: Policy) -> Policy:
    """Chain a base score and links that change its scores; the same links give the same object, as in :func:`parse`.

    The chain has the allocation of the base score, which says how many slots each head gets, until ``policy @ "adakv"``
    gives it another. Of a chain among the links, its own links are taken.

    Raises:
        ValueError: if the first link is not a base score or another one is, two observation windows differ, or
            ``caote`` follows scores that can be negative.

    Example:
        >>> import kvjax
        >>> str(kvjax.chain(kvjax.h2o(), kvjax.protect(recent=0.25)))
        'h2o+protect(recent=0.25)'
        >>> kvjax.chain(kvjax.kvzip(), kvjax.caote()).allocation.name
        'model(normalise=False)'
        >>> str(kvjax.chain(kvjax.h2o(), kvjax.caote()) @ "adakv")
        'h2o+caote@adakv'
    """
    if wrong := [link for link in links if not isinstance(link, Policy)]:
        if isinstance(wrong[0], Allocation):
            name = wrong[0].name
            raise ValueError(f"{name!r} is an allocation, which comes behind the chain; write chain(...) @ {name!r}.")
        given = repr(wrong[0]) if isinstance(wrong[0], str) else f"a {type(wrong[0]).__name__}"
        raise ValueError(f"{given} is no link of a policy; write chain(kvjax.h2o(), kvjax.caote()), or parse a name.")
    policy = _chained(links)
    check_allocation(policy)
    return policy


def _chained(links: tuple[Policy, ...]) -> Policy:
    """Chain links, of which the first one's allocation is not checked: another may take its place."""
    each = tuple(own for link in links for own in link.links or (allocated(link, link.inherited or link.allocation),))
    policy = _chain(each)
    return allocated(policy, links[0].allocation) if links[0].inherited else policy


@functools.cache
def _chain(links: tuple[Policy, ...]) -> Policy:
    name = "+".join(link.name for link in links)
    if not links or not links[0].base:
        first = f"{links[0].name!r} comes first" if links else "nothing was given"
        known = sorted(name for name, make in LINKS.items() if make().base)
        raise ValueError(f"a policy starts with a base score ({', '.join(known)}), but {first}.")
    for index, link in enumerate(links[1:], 1):
        if link.base:
            raise ValueError(f"{name!r} has two base scores, {links[0].name!r} and {link.name!r}; keep one of them.")
        if link.needs_nonnegative and not any(before.nonnegative for before in links[:index]):
            raise ValueError(
                f"{link.name!r} needs non-negative scores, unlike {links[0].name!r}; put 'normalise' between."
            )
    try:
        needs = functools.reduce(operator.or_, (link.needs for link in links))
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None
    if needs.errors is not None:
        _check_errors(name, links, needs)
    if needs.over == "max":
        needs = dataclasses.replace(needs, statistics=needs.statistics - {"window_mean"} | {"window_max"})
    chosen: dict[str, Any] = {}
    for what, usual in (("heads", "group"), ("positions", "absolute")):
        asked = {getattr(link, what) for link in links} - {usual}
        if len(asked) > 1:
            raise ValueError(f"{name!r} asks for {what} {' and '.join(sorted(asked))}; a policy has one of them.")
        chosen[what] = asked.pop() if asked else usual
    mergings = [link.merging for link in links if link.merging is not None]
    if len(mergings) > 1:
        raise ValueError(f"{name!r} merges values twice; keep one of its links that do.")
    if chosen["positions"] != "absolute" and needs.text_positions:
        wanted = f"{name!r} needs keys that are rotated at their positions in the text"
        raise ValueError(f"{wanted}; leave the link 'positions' out.")
    if any(link.draws for link in links):
        _check_sampled(name, links, needs, chosen["heads"])

    def init(B: int, K: int, G: int, S: int, D: int) -> PyTree:
        return tuple(link.init(B, K, G, S, D) for link in links)

    def update(
        scores: Scores | Weights, state: PyTree, observation: Observation
    ) -> tuple[Scores | Weights | Marked, PyTree]:
        states, marked, columns = [], None, observation.columns
        if needs.over == "max":
            observation = observation._replace(columns=columns._replace(window_mean=columns.window_max))
        for link, link_state in zip(links, state, strict=True):
            if link.update is not unchanged:
                given, link_state = update_link(link, as_scores(scores, observation), link_state, observation)
                scores, marked = unmarked(given, marked)
                if isinstance(given, Marked):
                    protected = given.stays if observation.protected is None else observation.protected | given.stays
                    observation = observation._replace(protected=protected)
            states.append(link_state)
        return scores if marked is None else Marked(as_scores(scores, observation), marked), tuple(states)

    return Policy(
        name=name,
        init=init,
        update=update,
        needs=needs,
        protection=functools.reduce(Protection.replaced_by, (link.protection for link in links)),
        links=links,
        base=True,
        nonnegative=any(link.nonnegative for link in links),
        cumulative=any(link.cumulative for link in links),
        published=next((link.published for link in reversed(links) if link.published is not None), None),
        merging=mergings[0] if mergings else None,
        allocation=links[0].allocation,
        **chosen,
    )


def _check_errors(name: str, links: tuple[Policy, ...], needs: Needs) -> None:
    """Check that a base score can read squared errors in place of weights, and that no other link reads weights."""
    base, *others = links
    read = base.needs.all_statistics
    what = None
    if not read:
        what = "reads no attention: no query observes"
    elif base.needs.predicted or not read <= {"sum", "last", "max", "window_mean", "window_place"}:
        what = "reads more of attention than sums, means or the largest of its weights"
    if what is not None:
        raise ValueError(f"{name!r}: per='query' needs errors, but {base.name!r} {what}; take 'snapkv', or per='head'.")
    if needs.over == "max" and read != {"window_mean"}:
        raise ValueError(f"{name!r}: {base.name!r} reads no window's mean, as over='max' asks; take 'snapkv'.")
    if readers := [link.name for link in others if link.needs.statistics]:
        raise ValueError(f"{name!r}: {readers[0]!r} reads attention, but the base score errors; leave one out.")


def _check_sampled(name: str, links: tuple[Policy, ...], needs: Needs, heads: str) -> None:
    """Check that the link which draws the tokens that stay has the last word, and that its scores are a token's own."""
    place = next(i for i, link in enumerate(links) if link.draws)
    own, what = repr(links[place].name), None
    if later := [link.name for link in links[place + 1 :] if link.update is not unchanged]:
        what = f"{later[0]!r} changes scores behind {own}, by which tokens are drawn; put it before"
    elif heads == "layer":
        what = f"{own} draws for each head, but the heads of a layer share their tokens; take heads='group'"
    elif needs.errors is not None or needs.all_statistics - LINEAR:
        what = f"{own} needs scores that are linear in attention; take another score, such as 'h2o' or 'snapkv'"
    if what is not None:
        raise ValueError(f"{name!r}: {what}.")


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
    tree: Any = read(without_tuned(name) if isinstance(name, str) else name, "policy", _HOW)
    parts, allocation = [], None
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.MatMult):  # one link, or a chain in parentheses
        tree, allocation = tree.left, called(tree.right, ALLOCATIONS, name, _HOW)
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        parts.append(tree.right)
        tree = tree.left
    parts.append(tree)
    last = parts[0]  # to which Python's @ belongs, and here to the whole chain
    if allocation is None and isinstance(last, ast.BinOp) and isinstance(last.op, ast.MatMult):
        parts[0], allocation = last.left, called(last.right, ALLOCATIONS, name, _HOW)
    links = [called(part, LINKS, name, _HOW) for part in reversed(parts)]
    policy = _chained(tuple(links)) if len(links) > 1 or not links[0].base else links[0]
    policy = policy if allocation is None else allocated(policy, allocation)
    check_allocation(policy)
    return policy


def policy_of(policy: Policy | str | None) -> Policy | None:
    """Return a policy that is given as itself or by its short name; None for "full"."""
    if isinstance(policy, str):
        return None if policy.strip() == "full" else parse(policy)
    if policy is not None and not isinstance(policy, Policy):
        raise ValueError(f"policy is {policy!r}; give a policy, or its short name, such as 'snapkv+caote'.")
    return policy


_HOW = "write it like 'snapkv(window=16)+caote+protect(sinks=4)' or 'h2o+caote@layer'"


_BUILT_IN = "transforms sampling scores caote scores_of_last_queries methods scores_of_generations scores_of_keys"
LINKS = makers("policy", "kvjax.policies", Policy, tuple(f"kvjax._src.{name}" for name in _BUILT_IN.split()))


def register(make: Callable[..., Policy]) -> Callable[..., Policy]:
    """Register a link's maker, as its decorator: short names find it, and equal arguments give the same object.

    The name of the function is the short name, and its keyword arguments are those that the short name may have. A
    package that offers the function as an entry point in the group ``kvjax.policies`` need not decorate it. It returns
    a :class:`Policy` of its name, such as :func:`base_score` makes; arguments are checked against their annotations.

    Raises:
        ValueError: if another module or an installed package has this name.

    Example:
        >>> import jax.numpy as jnp
        >>> import kvjax
        >>> @kvjax.register
        ... def loudest(*, power: float = 1.0):
        ...     return kvjax.base_score(
        ...         "loudest",
        ...         lambda o: jnp.max(jnp.abs(o.value), axis=-1)[:, :, None] ** power,
        ...     )
        >>> str(kvjax.parse("loudest(power=2.0)+caote"))
        'loudest(power=2.0)+caote'
    """
    return registered(LINKS, make)
