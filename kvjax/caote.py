"""CAOTE as a link of a policy: the eviction error, based on any non-negative score (arXiv 2504.14051)."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp

from kvjax.chains import no_state, register
from kvjax.eviction_error import score as eviction_error
from kvjax.observation import Needs, Observation, Weights
from kvjax.policy import Moments, Policy, Scores
from kvjax.projection import OutputProjection
from kvjax.transforms import shares

Target = Literal["value", "output"]


@register
def caote(
    *,
    norm: Literal[1, 2, "inf"] = 2,
    group: Literal["exact", "mean"] = "exact",
    fast: bool = False,
    target: Target = "value",
    cross: bool = True,
) -> Policy:
    """Score a token by how its eviction changes the attention output (CAOTE over any score, arXiv 2504.14051, eq. 20).

    The preceding non-negative scores, normalised to sum to 1 over the live slots, take the place of attention weights.

    Args:
        norm: the norm of the change, 1, 2 (the paper's, eq. 8) or "inf".
        group: how the query heads of a KV head are joined, which the paper does not define; see :func:`kvjax.score`.
        fast: use FastCAOTE; the link ``fast_caote`` is this with True.
        target: "value" measures the heads' outputs, "output" the layer's output after W_O. The latter needs norm 2,
            group "exact", and ``Context.projection``.
        cross: with target="output", whether heads count together, as W_O adds them, or each alone (cheaper).

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("h2o+caote(group='mean')"))
        "h2o+caote(group='mean')"
        >>> sorted(kvjax.parse("h2o+caote(target='output')").needs.projections)
        ['factor']
    """
    if fast:
        return fast_caote(norm=norm, group=group, target=target, cross=cross)
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
    name: str,
    norm: Literal[1, 2, "inf"],
    group: Literal["exact", "mean"],
    target: Target,
    cross: bool,
) -> Policy:
    if target == "output" and (norm != 2 or group != "exact"):
        raise ValueError(
            f"caote: norm is {norm!r} and group {group!r}, but target='output' measures one vector, the "
            "layer's output: take norm=2 and group='exact'."
        )
    if target == "value" and not cross:
        raise ValueError("caote: cross=False leaves out cross terms in W_O; take it with target='output'.")
    kind, fast = "factor" if cross else "gram", name == "fast_caote"

    def update(scores: Scores, state: Any, o: Observation) -> tuple[Scores | Weights, Any]:
        weights = shares(scores, o)
        if target == "value":
            return Weights(weights, fast, norm, group), state
        # W_O tells the heads of a group apart, even where their scores do not.
        G = o.query.shape[2] // o.position.shape[1]
        weights = jnp.broadcast_to(weights, (*weights.shape[:2], G, weights.shape[3]))
        joined = eviction_error(
            weights, o.value, fast=fast, norm=norm, group=group, mask=o.live, projection=_projection(kind, o),
            cross=cross,
        )  # fmt: skip
        return joined[:, :, None], state

    return Policy(
        name,
        no_state,
        update,
        needs=Needs(projections=frozenset({kind} if target == "output" else ())),
        needs_nonnegative=True,
        nonnegative=True,
        published=Moments("block", 1, "arXiv 2504.14051, section 2: after each block of the prompt and each new token"),
    )


def _projection(kind: str, o: Observation) -> OutputProjection:
    projection = o.context.projection
    if projection is None or getattr(projection, kind) is None:
        raise ValueError(
            f"caote(target='output') reads the {kind} of the layer's output projection, which is missing: hand it "
            "to attend (Context(projection=kvjax.output_projection(weight, kv_heads, policy.needs.projections)))."
        )
    return projection
