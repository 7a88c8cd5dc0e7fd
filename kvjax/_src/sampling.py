"""Priority sampling: tokens leave at random, and each one that stays counts for those that it stands for.

A token of score s has the weight ``w = s ** power`` and the priority ``w / u``, of a number u in (0, 1) that is drawn
once for it. The largest priorities stay. Let t be the largest priority that leaves a head: a token stays with the
probability ``p = min(1, w / t)``. So with its logit raised by ``-log p``, the two sums that attention divides are, over
the tokens that are held, in the mean those over all tokens (Duffield, Lund and Thorup, J. ACM 54(6), 2007).
"""

from __future__ import annotations

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

_LARGEST_LOG = 60.0  # of a weight, whose priority is then far from overflow in float32


class Priorities(NamedTuple):
    """A link's state: the logarithms of each slot's weight and priority, which is +inf where the token is protected."""

    weight: Float[Array, "*L B K S"]
    priority: Float[Array, "*L B K S"]


@register
def sample(*, power: float = 2.5, seed: int = 0) -> Policy:
    """Evict at random, and let the tokens that stay count for those that left, so that attention is right in the mean.

    Which tokens stay is drawn by priority: one of score s stays with the probability ``p = min(1, s ** power / t)``,
    where t is the largest priority that leaves the head, and its logit is raised by ``-log p``. So tokens of large
    scores stay for sure and count once, and a few of the others stand for all of them. What is drawn for a token is
    drawn once, from its position, head and layer: evictions one after the other, by block and in decode, are as one.
    The estimator is Duffield's, Lund's and Thorup's (J. ACM 54(6), 2007), per head. Nexus Sampling (arXiv 2606.23961)
    draws the tokens that stay, too.

    Scores that observe attention read a token's own, without what its logit was raised by. The state takes float32
    ``[B, K, S]`` twice, the cache once more. Where heads compete, give them scores on one scale, such as those of
    ``zap`` and ``kvzip``: sums of priorities, by which ``@adakv`` and ``@model`` divide, say little.

    Args:
        power: how sharply a score decides; with 1 a token's chance is in proportion to its score. With a larger power
            more stays for sure, and fewer tokens stand for all others: facts are kept better, and the text is predicted
            less as with the full cache. The smaller the share of a text that fits, the larger it should be. 2.5 did
            well for an eighth and a sixteenth.
        seed: of the numbers drawn, an int in [0, 2**32).

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("gate+sample"))
        'gate+sample'
    """
    check_number("sample", "power", power, 0.1, 10, "a number in [0.1, 10]")
    check_number("sample", "seed", seed, 0, 2**32 - 1, "an int in [0, 2**32)")

    def init(B: int, K: int, G: int, S: int, D: int) -> Priorities:
        return Priorities(*(jnp.zeros((B, K, S), jnp.float32) for _ in Priorities._fields))

    def update(scores: Scores, state: Priorities, o: Observation) -> tuple[Scores, Priorities]:
        least = jnp.finfo(jnp.float32).tiny
        weight = jnp.mean(scores, axis=2)
        weight = jnp.clip(power * jnp.log(jnp.maximum(weight, least)), -_LARGEST_LOG, _LARGEST_LOG)
        priority = weight - jnp.log(drawn(o, seed) + 2.0**-25)
        tested = priority if o.protected is None else jnp.where(o.protected, jnp.inf, priority)
        return jnp.exp(priority)[:, :, None], Priorities(weight, tested)

    merging = Merging("sample", biased=True, weigh=_weighed)
    return Policy("sample", init, update, Needs(), needs_nonnegative=True, merging=merging)


def _weighed(state: Any, gone: Bool[Array, "B K S"], bias: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
    """Return the biases after an eviction; of a token whose score changed, the smallest of its probabilities counts."""
    own = part_of_kind(state, Priorities)
    assert own is not None
    tested = jnp.isfinite(own.priority)
    threshold = jnp.max(jnp.where(gone & tested, own.priority, -jnp.inf), axis=-1, keepdims=True)
    passed = tested & (own.priority > threshold)
    return jnp.where(passed, jnp.maximum(bias, threshold - own.weight), bias)


def own_share(columns: ColumnStatistics, bias: Float[Array, "B K S"] | None) -> ColumnStatistics:
    """Return attention's statistics ``[B, K, G, S]`` without the biases, which raise all that are linear in weights."""
    if bias is None:
        return columns
    own = jnp.exp(-bias)[:, :, None]
    return jax.tree.map(lambda column: column * own, columns)
