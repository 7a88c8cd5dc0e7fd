"""Priority sampling: tokens leave at random, and each one that stays counts for those that it stands for.

A token of score s has the priority ``s (1 + r / u)``, of a number u in (0, 1) that is drawn once for it, and a rate r.
The largest priorities stay. Let t be the largest one that leaves a head: a token stays with the probability
``p = min(1, r / (t / s - 1))``. So with its logit raised by ``-log p``, the two sums that attention divides are, over
the tokens that are held, in the mean those over all tokens. Priorities ``s / u`` are those of Duffield, Lund and Thorup
(J. ACM 54(6), 2007); here more of the largest scores stay for sure, and r times as many of the small ones.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kernels_pallas.cache_attention.reference import ColumnStatistics
from kvjax._src.cache import part_of_kind
from kvjax._src.chains import register
from kvjax._src.merging import Merging
from kvjax._src.observation import Needs, Observation
from kvjax._src.policy import Policy, Scores
from kvjax._src.scores import drawn
from kvjax._src.short_names import check_number

_LEAST, _MOST = 1e-25, 1e25  # scores, whose priorities are far from overflow in float32


class Priorities(NamedTuple):
    """A link's state: each slot's score and priority, which is +inf where the token is protected."""

    score: Float[Array, "*L B K S"]
    priority: Float[Array, "*L B K S"]


@register
def sample(*, rate: float = 0.1, seed: int = 0) -> Policy:
    """Evict at random, and let the tokens that stay count for those that left, so that attention is right in the mean.

    A token of score s stays with the probability ``p = min(1, rate / (t / s - 1))``, where t is the largest priority
    that leaves the head, and its logit is raised by ``-log p``. So tokens of large scores stay for sure and count once,
    and a few of the others, about ``rate s / t`` of them, stand for all of those. What is drawn for a token is drawn
    once, from its position, head and layer: evictions one after the other, by block and in decode, are as one. The
    estimator is that of priority sampling (Duffield, Lund and Thorup, J. ACM 54(6), 2007), per head. Nexus Sampling
    (arXiv 2606.23961) draws the tokens that stay, too.

    Scores that observe attention read a token's own, without what its logit was raised by. The state takes float32
    ``[B, K, S]`` twice, the cache once more. Where heads compete, give them scores on one scale, such as those of
    ``zap`` and ``kvzip``: sums of priorities, by which ``@adakv`` and ``@model`` divide, say little.

    Args:
        rate: how many tokens of small scores stay. With a larger one a text is predicted more as with the full cache,
            but a token of middling score may leave.
        seed: of the numbers drawn, an int in [0, 2**32).

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("gate+sample"))
        'gate+sample'
    """
    check_number("sample", "rate", rate, 1e-3, 1e3, "a number in [0.001, 1000]")
    check_number("sample", "seed", seed, 0, 2**32 - 1, "an int in [0, 2**32)")

    def init(B: int, K: int, G: int, S: int, D: int) -> Priorities:
        return Priorities(*(jnp.zeros((B, K, S), jnp.float32) for _ in Priorities._fields))

    def update(scores: Scores, state: Priorities, o: Observation) -> tuple[Scores, Priorities]:
        score = jnp.clip(jnp.mean(scores, axis=2), _LEAST, _MOST)
        priority = score * (1 + rate / (drawn(o, seed) + 2.0**-25))
        tested = priority if o.protected is None else jnp.where(o.protected, jnp.inf, priority)
        return priority[:, :, None], Priorities(score, tested)

    merging = Merging("sample", None, (rate, seed), biased=True, weigh=functools.partial(_weighed, rate=rate))
    return Policy("sample", init, update, Needs(), needs_nonnegative=True, merging=merging)


def _weighed(state: Any, gone: Bool[Array, "B K S"], bias: Float[Array, "B K S"], rate: float) -> Float[Array, "B K S"]:
    """Return the biases after an eviction; of a token whose score changed, the smallest of its probabilities counts."""
    own = part_of_kind(state, Priorities)
    assert own is not None
    tested = jnp.isfinite(own.priority)
    threshold = jnp.max(jnp.where(gone & tested, own.priority, 0), axis=-1, keepdims=True)
    passed = tested & (own.priority > threshold)
    chance = rate / jnp.maximum(threshold / jnp.where(passed, own.score, 1) - 1, rate)
    return jnp.where(passed, jnp.maximum(bias, -jnp.log(chance)), bias)


def own_share(columns: ColumnStatistics, bias: Float[Array, "B K S"] | None) -> ColumnStatistics:
    """Return attention's statistics ``[B, K, G, S]`` without the biases, which raise all that are linear in weights."""
    if bias is None:
        return columns
    own = jnp.exp(-bias)[:, :, None]
    return jax.tree.map(lambda column: column * own, columns)
