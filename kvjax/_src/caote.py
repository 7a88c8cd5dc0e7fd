"""CAOTE as a link of a policy: the eviction error, based on any non-negative score (arXiv 2504.14051)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp

from kernels_pallas.caote_topk.reference import root
from kvjax._src.chains import no_state, register
from kvjax._src.eviction_error import score as eviction_error
from kvjax._src.observation import Needs, Observation, Weights
from kvjax._src.policy import Policy, Scores, Timing
from kvjax._src.projection import OutputProjection, part_of
from kvjax._src.transforms import beside_sinks

Target = Literal["value", "output"]
PUBLISHED = Timing("block", 1, "arXiv 2504.14051, section 2: after each block of the prompt and each new token")


@register
def caote(
    *,
    norm: Literal[1, 2, "inf"] = 2,
    group: Literal["exact", "mean"] = "exact",
    target: Target = "value",
    cross: bool = True,
    per: Literal["head", "query"] = "head",
    over: Literal["mean", "max"] = "mean",
) -> Policy:
    """Score a token by how its eviction changes the attention output (CAOTE over any score, arXiv 2504.14051, eq. 20).

    The preceding non-negative scores, normalised to sum to 1 over the live slots, take the place of attention weights;
    in a model with sinks, to what these leave the tokens. So a head has one output and one error, however many queries
    its scores are made of.

    With ``per="query"`` each query that the base score observes has its own output x and its own error,
    ``a / (1 - a) |x - v|`` for its weight a. The base score reads their squares where it reads weights else, and the
    score is the root of what it makes of them: over ``snapkv`` that of the window's mean, pooled; over ``h2o`` that of
    the sum over all queries so far; over ``kvzip`` the largest error while the prompt is repeated; over ``tova`` the
    last query's, which is what ``caote`` is there. A base score that takes no sum, mean or largest of weights is
    refused. ``over="max"`` takes the window's largest error in place of the mean: a token that one query needs counts
    as much as one that all need. On a TPU or GPU kernels compute the squares, but for those behind W_O.

    Args:
        norm: the norm of the change, 1, 2 (the paper's, eq. 8) or "inf".
        group: how the query heads of a KV head are joined, which the paper does not define; see :func:`kvjax.score`.
        target: "value" measures the heads' outputs, "output" the layer's output after W_O. The latter needs norm 2,
            group "exact", and ``Context.projection``.
        cross: with target="output", whether heads count together, as W_O adds them, or each alone (cheaper).
        per: "head" for one error of a head, or "query" for those of its queries, which needs norm 2, and cross=True.
        over: with per="query", whether a base score that reads a window's mean gets the "mean" of the queries' squared
            errors or the largest ("max"); over others it is refused.

    Example:
        >>> import kvjax
        >>> sorted(kvjax.parse("h2o+caote(target='output')").needs.projections)
        ['factor']
        >>> kvjax.parse("snapkv+caote(per='query')").needs.errors
        'value'
    """
    if per == "query":
        return _per_query(norm, group, target, cross, over)
    if over != "mean":
        raise ValueError("caote: over='max' is the largest error of a window's queries; take it with per='query'.")
    return _caote("caote", norm, group, target, cross)


@register
def fast_caote(
    *,
    norm: Literal[1, 2, "inf"] = 2,
    group: Literal["exact", "mean"] = "exact",
    target: Target = "value",
    cross: bool = True,
) -> Policy:
    """Score as ``caote`` does, with the mean of the live values for the attention output (arXiv 2504.14051, eq. 22).

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("tova+fast_caote"))
        'tova+fast_caote'
    """
    return _caote("fast_caote", norm, group, target, cross)


def _caote(
    name: str, norm: Literal[1, 2, "inf"], group: Literal["exact", "mean"], target: Target, cross: bool
) -> Policy:
    _check_target(norm, group, target, cross)
    fast = name == "fast_caote"
    if target == "output":
        return _behind_output(name, fast, cross)

    def update(scores: Scores, state: Any, o: Observation) -> tuple[Weights | Scores, Any]:
        if o.left is not None:  # the fused operation takes weights that add up to 1
            given: Any = dict(fast=fast, norm=norm, group=group)
            weights, value, live = beside_sinks(scores, o, fast)
            return eviction_error(weights, value, mask=live, **given)[:, :, None, :-1], state
        return Weights(scores, fast, norm, group), state  # normalised where they are read, which saves a pass

    return _link(name, update, Needs())


def _link(name: str, update: Callable[..., Any], needs: Needs) -> Policy:
    return Policy(name, no_state, update, needs, needs_nonnegative=True, nonnegative=True, published=PUBLISHED)


def _behind_output(name: str, fast: bool, cross: bool) -> Policy:
    """Measure the change of the layer's output, behind W_O."""
    kind = "factor" if cross else "gram"

    def update(scores: Scores, state: Any, o: Observation) -> tuple[Scores, Any]:
        # W_O tells the heads of a group apart, even where their scores do not.
        weights, value, live = beside_sinks(scores, o, fast)
        weights = jnp.broadcast_to(weights, (*live.shape[:2], o.query.shape[2] // live.shape[1], live.shape[2]))
        behind = OutputProjection(**{kind: part_of(o.context.projection, kind)})
        given: Any = dict(fast=fast, group="exact", mask=live, cross=cross, projection=behind)
        return eviction_error(weights, value, **given)[:, :, None, : o.position.shape[2]], state

    return _link(name, update, Needs(projections=frozenset({kind})))


def _per_query(
    norm: Literal[1, 2, "inf"],
    group: Literal["exact", "mean"],
    target: Target,
    cross: bool,
    over: Literal["mean", "max"],
) -> Policy:
    """Have the base score read squared errors; what is left to do is to join those of a group."""
    if norm != 2 or not cross:
        raise ValueError(f"caote: per='query' needs norm=2 and cross=True, but they are {norm!r} and {cross}.")
    _check_target(norm, group, target, cross)

    def update(scores: Scores, state: Any, o: Observation) -> tuple[Scores, Any]:
        join = jnp.sum if target == "value" and group == "exact" else jnp.mean
        return root(join(scores, axis=2, keepdims=True)), state

    projections = frozenset({"factor"} if target == "output" else ())
    return _link("caote", update, Needs(errors=target, over=over, projections=projections))


def _check_target(norm: Literal[1, 2, "inf"], group: Literal["exact", "mean"], target: Target, cross: bool) -> None:
    if target == "output" and (norm != 2 or group != "exact"):
        raise ValueError(f"caote: target='output' needs norm=2 and group='exact', but they are {norm!r} and {group!r}.")
    if target == "value" and not cross:
        raise ValueError("caote: cross=False leaves out cross terms in W_O; take it with target='output'.")
