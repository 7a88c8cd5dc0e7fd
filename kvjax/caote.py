"""CAOTE as a link of a policy: the eviction error over any non-negative score (arXiv 2504.14051)."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp

from kvjax.checks import check_count
from kvjax.eviction_error import score as eviction_error
from kvjax.joint_eviction import joint_score
from kvjax.names import written
from kvjax.policy import EvictionError, Observation, Policy, Scores, no_state, register
from kvjax.projection import OutputProjection
from kvjax.transforms import shares

Through = Literal["value", "output"]


@register
def caote(
    *,
    norm: Literal[1, 2, "inf"] = 2,
    group: Literal["exact", "mean"] = "exact",
    fast: bool = False,
    through: Through = "value",
    cross: bool = True,
    rounds: int = 1,
) -> Policy:
    """CAOTE over any non-negative score: what losing a token does to the attention output (arXiv 2504.14051, eq. 20).

    The scores before it, normalised to sum to 1 over the live slots, take the place of attention weights.

    Args:
        norm: the norm of the change, 1, 2 or "inf".
        group: how the query heads of a KV head are joined; see :func:`kvjax.score`.
        fast: FastCAOTE; the link ``fast_caote`` is this with True.
        through: "value" measures the heads' outputs, "output" the layer's, behind W_O. The latter needs norm 2, group
            "exact", and ``projection=`` of :func:`kvjax.attend`.
        cross: with through="output", whether heads count together, as they meet in W_O, or each alone (cheaper).
        rounds: evicts the tokens that leave together in so many rounds, each exact for what the one before has left;
            see :func:`kvjax.joint_eviction.joint_score`. 1 is the paper: as if they were independent. With more, the
            scores order the tokens of one head, and heads cannot exchange slots by them. Needs norm 2.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("h2o+caote(group='mean')"))
        "h2o+caote(group='mean')"
        >>> sorted(kvjax.parse("h2o+caote(through='output')").projections)
        ['factor']
    """
    arguments = {"norm": norm, "group": group, "fast": fast, "through": through, "cross": cross, "rounds": rounds}
    if through == "output" and (norm != 2 or group != "exact"):
        raise ValueError(
            f"caote: norm is {norm!r} and group {group!r}, but through='output' measures one vector, the "
            "layer's output: take norm=2 and group='exact'."
        )
    if through == "value" and not cross:
        raise ValueError("caote: cross=False is about heads that meet in W_O; take it with through='output'.")
    check_count("caote: rounds", rounds, 1, "give an int from 1")
    if rounds > 1 and norm != 2:
        raise ValueError(
            f"caote: norm is {norm!r}, but rounds follow the change in norm 2 only; take norm=2 or rounds=1."
        )
    make = fast_caote if fast else caote
    name = written(make, **({k: v for k, v in arguments.items() if k != "fast"} if fast else arguments))
    kind = "factor" if cross else "gram"

    def weigh(scores: Scores, state: Any, o: Observation) -> tuple[Scores, Any]:
        return shares(scores, o), state

    def update(scores: Scores, state: Any, o: Observation) -> tuple[Scores, Any]:
        weights, state = weigh(scores, state, o)
        if through == "output":  # W_O tells the heads of a group apart, even where their scores do not
            G = o.query.shape[2] // o.position.shape[1]
            weights = jnp.broadcast_to(weights, (*weights.shape[:2], G, weights.shape[3]))
        behind = _projection(name, kind, o) if through == "output" else None
        if rounds == 1:
            joined = eviction_error(
                weights, o.value, fast=fast, norm=norm, group=group, mask=o.live, projection=behind, cross=cross
            )
        else:
            leaving = (o.live.sum(-1) - o.budget[:, None]).clip(0)  # [B, K]
            joined = joint_score(
                weights, o.value, leaving, rounds=rounds, position=o.position, protected=o.protected, fast=fast,
                group=group, projection=behind, cross=cross,
            )  # fmt: skip
        return joined[:, :, None], state

    at_once = through == "value" and rounds == 1
    return Policy(
        name,
        no_state,
        update,
        projections=frozenset({kind} if through == "output" else ()),
        needs_nonnegative=True,
        nonnegative=rounds == 1,
        comparable=rounds == 1,
        error=EvictionError(fast, norm, group) if at_once else None,
        weigh=weigh if at_once else None,
    )


@register
def fast_caote(
    *,
    norm: Literal[1, 2, "inf"] = 2,
    group: Literal["exact", "mean"] = "exact",
    through: Through = "value",
    cross: bool = True,
    rounds: int = 1,
) -> Policy:
    """FastCAOTE: CAOTE with the mean of the live values in place of the attention output (arXiv 2504.14051, eq. 22).

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("tova+fast_caote"))
        'tova+fast_caote'
    """
    return caote(norm=norm, group=group, fast=True, through=through, cross=cross, rounds=rounds)


def _projection(name: str, kind: str, o: Observation) -> OutputProjection:
    if o.output is None or getattr(o.output, kind) is None:
        raise ValueError(
            f"{name!r} reads the {kind} of the layer's output projection, which is not there: hand it to attend "
            f"(projection=kvjax.output_projection(weight, kv_heads, policy.projections))."
        )
    return o.output
