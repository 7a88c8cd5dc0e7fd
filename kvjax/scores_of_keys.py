"""Base scores that read a token's key and value, and no attention: key norms, KeyDiff, CurDKV, LagKV."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import by_position
from kvjax.checks import check_count
from kvjax.observation import Observation
from kvjax.policy import Moments, Policy, Protection, Scores, base_score, register
from kvjax.transforms import check_protected, rounded


@register
def key_norm() -> Policy:
    """Scores a token by minus the norm of its key: small keys draw attention (arXiv 2406.11430).

    Its authors leave the first two layers whole; here, as in kvpress, all are evicted from.

    Equal tokens have keys of one length in layer 0, and a norm over queries and keys makes all alike. Norms are
    therefore rounded to 12 bits behind the leading one: those that differ by less, as by the rounding of a rotation or
    of a sum, tie, and the more recent token stays whatever the blocks. Keys that differ by more from one size of block
    to another, as products of matrices may in bfloat16 or on a TPU, can still be chosen differently.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("key_norm+normalise+caote"))
        'key_norm+normalise+caote'
    """
    return base_score(
        "key_norm",
        lambda o: -rounded(jnp.linalg.norm(o.key.astype(jnp.float32), axis=-1))[:, :, None],
        nonnegative=False,
        published=Moments("block", 1, "arXiv 2406.11430: whenever the cache is full"),
    )


@register
def keydiff() -> Policy:
    """Scores a token by minus the cosine of its key and the mean direction of the head's (KeyDiff, arXiv 2504.15364).

    The mean is that of the keys' directions, as in kvpress.

    Example:
        >>> import kvjax
        >>> kvjax.keydiff().nonnegative
        False
    """

    def score(o: Observation) -> Scores:
        key = jnp.where(o.live[..., None], o.key.astype(jnp.float32), 0)  # stale keys must not enter the mean
        direction = _unit(key)
        count = jnp.maximum(jnp.sum(o.live, axis=2), 1).astype(direction.dtype)
        mean = jnp.sum(direction, axis=2, keepdims=True) / count[..., None, None]
        return -jnp.sum(direction * _unit(mean), axis=-1)[:, :, None]

    published = Moments("block", 1, "arXiv 2504.15364: prompts in blocks, then every new token")
    return base_score("keydiff", score, nonnegative=False, published=published)


@register
def curdkv(
    *,
    sinks: int | float = 4,
    leverage: Literal["product", "mean", "key", "value"] = "product",
    local_window: int | None = 16,
) -> Policy:
    """Scores a token by the leverage of its key and its value among its neighbours' (CurDKV, arXiv 2509.15038).

    The tokens that are left stand in the order of their positions and are cut into windows. Within its window a key's
    leverage is ``|k|^2`` over the sum of all, and a value's likewise: the local approximation of the leverage scores of
    a CUR decomposition, as kvpress has it, whose defaults these are, without the random projection that is off there.
    The two are multiplied, and divided by their sum over the head. ``|k|^2`` and ``|v|^2`` are rounded to 12 bits as
    in :func:`kvjax.key_norm`, so that equal tokens of a window tie.

    Args:
        sinks: the first tokens, which stay: a count, or a share of the budget (float in [0, 1]).
        leverage: of the key and the value their "product" or "mean", or one of them alone.
        local_window: how many neighbours a window has; None takes all of the head's tokens for one.

    Example:
        >>> import kvjax
        >>> kvjax.curdkv(leverage="value").protections
        (Protection(sinks=4, recent=0),)
    """
    check_protected("curdkv", "sinks", sinks)
    if local_window is not None:
        check_count("curdkv: local_window", local_window, 1, "give a number of neighbours, an int from 1, or None")

    def score(o: Observation) -> Scores:
        order, place = by_position(o.position)
        squares = (jnp.where(o.live, _squared_length(x), 0) for x in (o.key, o.value))
        key, value = (_shares(jnp.take_along_axis(x, order, axis=-1), local_window) for x in squares)
        scores = _shares({"product": key * value, "mean": (key + value) / 2, "key": key, "value": value}[leverage])
        return jnp.take_along_axis(scores, place, axis=-1)[:, :, None]

    return base_score(
        "curdkv",
        score,
        protection=Protection(sinks=sinks),
        published=Moments("prompt", 0, "arXiv 2509.15038, as in kvpress: the prompt is compressed, before generation"),
    )


@register
def lagkv(*, sinks: int = 4, lag: int = 128, cross_scoring: bool = False) -> Policy:
    """Scores a token by how far it strays from the tokens that come a lag later (LagKV, arXiv 2504.04704).

    Behind the sinks, the tokens are cut into partitions of ``lag`` in the order of their positions. Each element of a
    partition's keys is put on the scale from the smallest to the largest of the next partition's; the standard
    deviation over a key's elements, and its softmax over the partition, say how far it strays. Values do likewise, and
    the mean of both gives a token its rank in the partition: ``rank / lag`` is the score. Sinks, the last whole
    partition and what follows it score 1, for nothing is there to compare them with; where there are fewer than two
    partitions, the newer a token the higher its score. Elements that a partition has all alike say nothing.

    The paper's partitions are those of the text; here they are those of the tokens that are left. After an eviction
    the next one therefore cuts otherwise; a single eviction, behind the prompt, is the one that was published. All
    defaults are kvpress'; its authors' code has 16 sinks and a lag of 1,024.

    Args:
        sinks: the first tokens, which stay.
        lag: how many tokens a partition has, from 2; as many of the newest always stay.
        cross_scoring: the softmax itself is the score, by which partitions and heads compete; by their ranks each
            keeps as many tokens as the others.

    Example:
        >>> import kvjax
        >>> kvjax.lagkv(lag=64).protections
        (Protection(sinks=4, recent=64),)
    """
    check_count("lagkv: sinks", sinks, 0, "give a number of first tokens, an int from 0")
    check_count("lagkv: lag", lag, 2, "a partition has a smallest and a largest number from 2 tokens on")

    def score(o: Observation) -> Scores:
        order, place = by_position(o.position)
        count = jnp.sum(o.live, axis=-1, keepdims=True)
        behind = place - sinks
        recency = behind.astype(jnp.float32) / jnp.maximum(count - sinks, 1).astype(jnp.float32)
        scores = jnp.where((count < sinks + 2 * lag) & (behind >= 0), recency, 1)
        partitions = (order.shape[-1] - sinks) // lag
        if partitions >= 2:
            compared = _by_partition(o, order[..., sinks : sinks + partitions * lag], lag, cross_scoring)
            found = jnp.take_along_axis(compared, jnp.clip(behind, 0, compared.shape[-1] - 1), axis=-1)
            whole = (count - sinks) // lag
            scores = jnp.where((behind >= 0) & (behind < (whole - 1) * lag), found, scores)
        return jnp.where(o.live, scores, 0)[:, :, None]

    return base_score(
        "lagkv",
        score,
        protection=Protection(sinks=sinks, recent=lag),
        published=Moments("prompt", 0, "arXiv 2504.04704, as in kvpress: the prompt is compressed, before generation"),
    )


def _squared_length(x: Float[Array, "B K S D"]) -> Float[Array, "B K S"]:
    return rounded(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1))


def _shares(x: Float[Array, "B K S"], window: int | None = None) -> Float[Array, "B K S"]:
    """Each number over the sum of its window; None is one window of all."""
    B, K, S = x.shape
    window = S if window is None else min(window, S)
    windows = jnp.pad(x, ((0, 0), (0, 0), (0, -S % window))).reshape(B, K, -1, window)
    total = jnp.sum(windows, axis=-1, keepdims=True)
    return (windows / jnp.where(total > 0, total, 1)).reshape(B, K, -1)[..., :S]


def _by_partition(
    o: Observation, slot: Int[Array, "B K cut"], lag: int, cross_scoring: bool
) -> Float[Array, "B K compared"]:
    """The scores of all partitions but the last; the slots stand in order, a multiple of ``lag`` of them."""
    B, K, _ = slot.shape

    def strays(x: Float[Array, "B K S D"]) -> Float[Array, "B K partitions lag"]:
        rows = jnp.take_along_axis(x, slot[..., None], axis=2).astype(jnp.float32)
        rows = rows.reshape(B, K, -1, lag, x.shape[-1])
        own, following = rows[:, :, :-1], rows[:, :, 1:]
        lowest, highest = (f(following, axis=3, keepdims=True) for f in (jnp.min, jnp.max))
        span = highest - lowest
        # Equal tokens have values that are alike but for float32's rounding, which would be scaled up to a score.
        differs = span > 2.0**-18 * jnp.max(jnp.abs(following), axis=(3, 4), keepdims=True)
        scaled = jnp.where(differs, (own - lowest) / jnp.where(differs, span, 1), 0)
        return jax.nn.softmax(jnp.std(scaled, axis=-1, ddof=min(1, x.shape[-1] - 1)), axis=-1)

    scores = (strays(o.key) + strays(o.value)) / 2
    if not cross_scoring:
        scores = jnp.argsort(jnp.argsort(scores, axis=-1), axis=-1).astype(jnp.float32) / lag
    return scores.reshape(B, K, -1)


def _unit(x: Float[Array, "*shape D"]) -> Float[Array, "*shape D"]:
    """Each vector divided by its length; 0 stays 0."""
    length = jnp.linalg.norm(x, axis=-1, keepdims=True)
    return x / jnp.where(length > 0, length, 1)
