"""Base scores that read a token's key and value but no attention: key norms, KeyDiff, Q-Filters, CurDKV, LagKV."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax._src.calibration import read_array
from kvjax._src.chains import base_score, register
from kvjax._src.checks import check_count
from kvjax._src.observation import Observation
from kvjax._src.policy import Policy, Protection, Scores, Timing
from kvjax._src.short_names import check_protected
from kvjax._src.transforms import rounded


@register
def key_norm() -> Policy:
    """Score a token by minus the norm of its key: keys of small norm draw attention (arXiv 2406.11430).

    Its authors evict nothing from the first two layers; here, as in kvpress, tokens are evicted from all layers.

    In layer 0 the keys of equal tokens have equal norms, and in a model that normalises keys all norms are alike. Norms
    are therefore rounded to 12 bits after the leading one: norms that differ by less, as by the rounding of a rotation
    or of a sum, tie, and the more recent token stays whatever the block size. Keys that differ by more from one block
    size to another, as matrix products may in bfloat16 or on a TPU, can still be chosen differently.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("key_norm+normalise+caote"))
        'key_norm+normalise+caote'
    """
    return base_score(
        "key_norm",
        lambda o: -rounded(jnp.linalg.norm(o.key.astype(jnp.float32), axis=-1))[:, :, None],
        nonnegative=False,
        published=Timing("block", 1, "arXiv 2406.11430: whenever the cache is full"),
    )


@register
def keydiff() -> Policy:
    """Score a token by minus the cosine of its key and the head's mean key direction (KeyDiff, arXiv 2504.15364).

    The mean is taken over the keys' directions, as in kvpress.

    Example:
        >>> import kvjax
        >>> kvjax.keydiff().nonnegative
        False
    """

    def score(o: Observation) -> Scores:
        direction = unit(o.live_key)
        count = jnp.maximum(jnp.sum(o.live, axis=2), 1).astype(direction.dtype)
        mean = jnp.sum(direction, axis=2, keepdims=True) / count[..., None, None]
        return -jnp.sum(direction * unit(mean), axis=-1)[:, :, None]

    published = Timing("block", 1, "arXiv 2504.15364: prompts in blocks, then every new token")
    return base_score("keydiff", score, nonnegative=False, published=published)


@register
def q_filters(*, file: str | None = None, content: str | None = None) -> Policy:
    """Score a token by its key along the direction of the head's queries (Q-Filters, arXiv 2503.02812).

    The queries of a head share one main direction, whatever the text. A filter is minus that direction, averaged over
    the group's query heads, and the score is minus the product of key and filter, as in kvpress. ``models.q_filters``
    computes the filters of a model; those that the authors publish have the same form.

    The authors' cache keeps the newest tokens too (``q_filters(...)+protect(recent=64)``); kvpress does not.

    Args:
        file: the filters ``[L, K, D]``, as a .npy or .safetensors file.
        content: a digest of the file, which the name gets; another file of that name is refused.

    Raises:
        ValueError: if the file cannot be read, or its filters are not the model's; when it runs without a file.

    Example:
        >>> import kvjax
        >>> kvjax.q_filters().nonnegative  # for file= see models.q_filters
        False
    """
    filters = None if file is None else read_array("q_filters", file, "L K D")

    def init(B: int, K: int, G: int, S: int, D: int) -> tuple[()]:
        if filters is None:
            raise ValueError("'q_filters' reads a file of models.q_filters; write q_filters(file='filters.npy').")
        # The state of pages is made for one head, or for the heads on one device; check_measured counts all of them.
        if filters.shape[2] != D or filters.shape[1] % K:
            raise ValueError(f"{file!r} has filters {filters.shape}, not of {K} heads of {D}; compute this model's.")
        return ()

    def score(o: Observation) -> Scores:
        assert filters is not None  # init has checked it
        heads = jnp.arange(o.key.shape[1]) if o.head is None else o.head
        along = jnp.asarray(filters)[o.layer][heads][None, :, None]
        return -jnp.sum(o.key.astype(jnp.float32) * along, axis=-1)[:, :, None]

    scored = base_score(
        "q_filters",
        score,
        nonnegative=False,
        published=Timing("block", 1, "arXiv 2503.02812, its authors' code: whenever the cache is full"),
    )
    return dataclasses.replace(scored, init=init, measured=None if filters is None else filters.shape[:2])


@register
def curdkv(
    *,
    sinks: int | float = 4,
    leverage: Literal["product", "mean", "key", "value"] = "product",
    local_window: int | None = 16,
) -> Policy:
    """Score a token by the leverage of its key and its value among its neighbours' (CurDKV, arXiv 2509.15038).

    The remaining tokens are sorted by position and cut into windows. A key's leverage is ``|k|^2`` divided by the sum
    over its window, and likewise for values. This is kvpress' local approximation of the leverage scores of a CUR
    decomposition, with kvpress' defaults and without its random projection, which is off by default. The product of the
    two is divided by its sum over the head. ``|k|^2`` and ``|v|^2`` are rounded to 12 bits as in
    :func:`kvjax.key_norm`, so that equal tokens of a window tie.

    Args:
        sinks: how many first tokens always stay: a count, or a share of the budget (float in [0, 1]).
        leverage: the "product" or the "mean" of the leverages of key and value, or one of them alone.
        local_window: how many neighbours a window has; None takes all tokens of the head as one window.

    Example:
        >>> import kvjax
        >>> kvjax.curdkv(leverage="value").protected(64)
        (4, 0)
    """
    check_protected("curdkv", sinks=sinks)
    if local_window is not None:
        check_count("curdkv: local_window", local_window, 1, "give a number of neighbours, an int from 1, or None")

    def score(o: Observation) -> Scores:
        order = o.ordered
        squares = (jnp.where(o.live, _squared_length(x), 0) for x in (o.key, o.value))
        key, value = (_shares(order.sort(x[:, :, None], 0)[:, :, 0], local_window) for x in squares)
        scores = _shares({"product": key * value, "mean": (key + value) / 2, "key": key, "value": value}[leverage])
        return order.unsort(scores[:, :, None])

    return base_score(
        "curdkv",
        score,
        protection=Protection(sinks=sinks),
        published=Timing("prompt", 0, "arXiv 2509.15038, as in kvpress: the prompt is compressed, before generation"),
    )


@register
def lagkv(*, sinks: int = 4, lag: int = 128, cross_scoring: bool = False) -> Policy:
    """Score a token by how far it differs from the tokens that come a lag later (LagKV, arXiv 2504.04704).

    After the sinks, the tokens are cut into partitions of ``lag`` in the order of their positions. Each element of a
    partition's keys is scaled by the smallest and the largest number of that element in the next partition. A key's
    difference is the standard deviation over its elements, after a softmax over the partition. Values are treated
    likewise, and the mean of both ranks the tokens of the partition: the score is ``rank / lag``. Sinks, the last whole
    partition and what follows it score 1, for there is nothing to compare them with. With fewer than two partitions,
    newer tokens score higher. Elements that are equal in all tokens of the next partition count as 0.

    The paper partitions the text; here the remaining tokens are partitioned. After an eviction the next one therefore
    cuts them differently; a single eviction, after the prompt, is the published method. All defaults are kvpress'; the
    authors' code has 16 sinks and a lag of 1,024.

    Args:
        sinks: how many first tokens always stay.
        lag: how many tokens a partition has, from 2; as many of the newest tokens always stay.
        cross_scoring: use the softmax itself as the score, so that partitions and heads compete; by ranks, all
            partitions keep the same number of tokens.

    Example:
        >>> import kvjax
        >>> kvjax.lagkv(lag=64).protected(128)
        (4, 64)
    """
    check_count("lagkv: sinks", sinks, 0, "give a number of first tokens, an int from 0")
    check_count("lagkv: lag", lag, 2, "give the tokens of a partition, an int from 2")

    def score(o: Observation) -> Scores:
        order, rank = o.ordered
        count = jnp.sum(o.live, axis=-1, keepdims=True)
        behind = rank - 1 - sinks
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
        published=Timing("prompt", 0, "arXiv 2504.04704, as in kvpress: the prompt is compressed, before generation"),
    )


def _squared_length(x: Float[Array, "B K S D"]) -> Float[Array, "B K S"]:
    return rounded(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1))


def _shares(x: Float[Array, "B K S"], window: int | None = None) -> Float[Array, "B K S"]:
    """Divide each number by the sum of its window; None takes all numbers as one window."""
    B, K, S = x.shape
    window = S if window is None else min(window, S)
    windows = jnp.pad(x, ((0, 0), (0, 0), (0, -S % window))).reshape(B, K, -1, window)
    total = jnp.sum(windows, axis=-1, keepdims=True)
    return (windows / jnp.where(total > 0, total, 1)).reshape(B, K, -1)[..., :S]


def _by_partition(
    o: Observation, slot: Int[Array, "B K cut"], lag: int, cross_scoring: bool
) -> Float[Array, "B K compared"]:
    """Compute the scores of all partitions but the last, for slots in order, a multiple of ``lag`` of them."""
    B, K, _ = slot.shape

    def strays(x: Float[Array, "B K S D"]) -> Float[Array, "B K partitions lag"]:
        tokens = jnp.take_along_axis(x, slot[..., None], axis=2, mode="clip").astype(jnp.float32)
        tokens = tokens.reshape(B, K, -1, lag, x.shape[-1])
        own, following = tokens[:, :, :-1], tokens[:, :, 1:]
        lowest, highest = (f(following, axis=3, keepdims=True) for f in (jnp.min, jnp.max))
        span = highest - lowest
        # The values of equal tokens differ only by float32's rounding, which would be scaled up to a score.
        differs = span > 2.0**-18 * jnp.max(jnp.abs(following), axis=(3, 4), keepdims=True)
        scaled = jnp.where(differs, (own - lowest) / jnp.where(differs, span, 1), 0)
        return jax.nn.softmax(jnp.std(scaled, axis=-1, ddof=min(1, x.shape[-1] - 1)), axis=-1)

    scores = (strays(o.key) + strays(o.value)) / 2
    if not cross_scoring:
        scores = jnp.argsort(jnp.argsort(scores, axis=-1), axis=-1).astype(jnp.float32) / lag
    return scores.reshape(B, K, -1)


def unit(x: Float[Array, "*shape D"]) -> Float[Array, "*shape D"]:
    """Divide each vector by its length; 0 stays 0."""
    length = jnp.linalg.norm(x, axis=-1, keepdims=True)
    return x / jnp.where(length > 0, length, 1)
