"""Base scores for generations that are longer than the cache: R-KV, TriAttention, TRIM-KV."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.softmax import scaled
from kvjax._src.calibration import read_array
from kvjax._src.chains import base_score, register
from kvjax._src.checks import check_count
from kvjax._src.observation import Needs, Observation
from kvjax._src.policy import Policy, Protection, Scores, Timing
from kvjax._src.rotary import rotate
from kvjax._src.scores_of_keys import unit
from kvjax._src.scores_of_last_queries import LastQueries, no_queries, with_last
from kvjax._src.short_names import check_number
from kvjax._src.transforms import check_kernel, pooled, predicted_scores, rounded, with_tokens

_SLOTS = 256  # of a head's keys that are compared with all of them at a time
_HIGH = jax.lax.Precision.HIGHEST


@register
def rkv(*, window: int = 8, kernel: int = 7, importance: float = 0.1, threshold: float = 0.5) -> Policy:
    """Score a token by the attention that it gets, minus how much its key repeats others (R-KV, arXiv 2505.24133).

    The score is ``importance I - (1 - importance) R``. ``I`` is the attention of the last ``window`` queries to the
    tokens before them: the largest logit of the group's heads, a softmax, the mean over the queries, and the largest of
    ``kernel`` neighbours. ``R`` is the softmax, over the head's tokens, of a key's mean cosine with the other keys; a
    key's cosine with the newest of those that are closer to it than ``threshold`` counts as 0 for that newest one, so
    that of tokens which repeat each other the newest stays. The window's own tokens stay. The last queries are kept
    with the head, and positions must be absolute.

    The authors evict when the prompt is in and then after every 128 tokens. The paper has an ``importance`` (its
    lambda) of 0.1, its code 0.07; all other defaults are the code's. There a key without a close one takes its cosine
    with the first token away, here nothing.

    Args:
        window: how many of the last queries observe, and how many of the last tokens stay.
        kernel: width of the pooling over neighbours in position order among the live tokens, an odd number.
        importance: the share of the attention in the score, in [0, 1].
        threshold: the cosine above which two keys repeat each other, in [0, 1].

    Example:
        >>> import kvjax
        >>> policy = kvjax.parse("rkv(window=16)")
        >>> policy.protected(64), policy.published.decode
        ((0, 16), 128)
    """
    check_kernel("rkv", kernel)
    check_count("rkv: window", window, 1, "give the number of queries that observe, an int from 1")
    check_number("rkv", "importance", importance, 0, 1, "a share in [0, 1]")
    check_number("rkv", "threshold", threshold, 0, 1, "a cosine in [0, 1]")

    def update(_: Scores, state: LastQueries, o: Observation) -> tuple[Scores, LastQueries]:
        state = with_last(state, o)
        attended = pooled(_attended(state, o, window)[:, :, None], o, kernel, "max")
        return importance * attended - (1 - importance) * _repeated(o, threshold)[:, :, None], state

    return Policy(
        "rkv",
        no_queries(window),
        update,
        Needs(queries=True, order=True),
        protection=Protection(recent=window),
        base=True,
        published=Timing("prompt", 128, "arXiv 2505.24133: when the prompt is in, then when a buffer of 128 is full"),
    )


@register
def trimkv() -> Policy:
    """Score a token by what its age leaves of it, which a trained gate foresees (TRIM-KV, arXiv 2512.03324).

    When a token enters, a ``models.RetentionGate`` predicts from its hidden state, for each KV head, the share beta of
    its score that each later token leaves; later on beta^age is left. The score is the logarithm, ``age log(beta)``,
    where the newest token is 2 tokens old, as in the authors' code: a token stays longest whose beta is nearest to 1,
    but each token may be the one that goes. Positions must be absolute.

    In that code each head has the same budget, and evicts when the prompt is in and a buffer of 128 tokens is full.
    Where all heads of the model share their slots there, it is ``trimkv@model(normalise=False)``.

    Raises:
        ValueError: when it runs without a prediction for the block.

    Example:
        >>> import kvjax
        >>> kvjax.trimkv().needs.predicted
        frozenset({'retention'})
    """

    def init(B: int, K: int, G: int, S: int, D: int) -> Array:
        return jnp.zeros((B, K, S), jnp.float32)

    def update(_: Scores, state: Array, o: Observation) -> tuple[Scores, Array]:
        state = with_tokens(state, o, rounded(predicted_scores(o, "retention", "trimkv")))
        age = o.next_position[:, None, None] + 1 - o.position
        return (age * state)[:, :, None], state

    return Policy(
        "trimkv",
        init,
        update,
        Needs(predicted=frozenset({"retention"})),
        base=True,
        published=Timing("prompt", 128, "arXiv 2512.03324, code: after the prompt, then when a buffer of 128 is full"),
    )


@register
def triattention(*, file: str | None = None, content: str | None = None, future: int = 65536) -> Policy:
    """Score a token by the attention that the head's mean query pays it later on (TriAttention, arXiv 2604.04921).

    Before rotation, the queries of a head lie around one centre, whatever the text. The centre's logit for a key, as a
    function of their distance, is a trigonometric series; the score is its mean over the distances at which the key is
    seen 1, 2, 4, ... positions later, up to ``future``. To this is added, over the pairs of elements that are rotated
    together, the key's length times the part of the queries' mean length that the centre does not have. Each query
    head's scores are divided by their standard deviation, after their mean is subtracted; the largest of the group
    counts. This is the authors' code with one choice per layer and head (``per_layer_perhead_pruning``), from the
    centres that ``models.query_centres`` computes. Positions must be absolute.

    In that code the prompt's tokens always stay; here they compete like all others. Its port to vLLM also keeps the
    newest 128 tokens (``triattention(...)+protect(recent=128)``).

    Args:
        file: the centres ``[L, K, G, C]``, C = 3 D / 2, as a .npy or .safetensors file.
        content: a digest of the file, which the name gets; another file of that name is refused.
        future: the most positions ahead; 65,536 as in the authors' code.

    Raises:
        ValueError: if the file cannot be read, or its centres are not the model's; when it runs without a file, or on a
            model without rotary positions.

    Example:
        >>> import kvjax
        >>> kvjax.triattention().needs.rotary  # for file= see models.query_centres
        True
    """
    check_count("triattention: future", future, 1, "give a number of coming positions, an int from 1")
    centres = None if file is None else read_array("triattention", file, "L K G C")

    def init(B: int, K: int, G: int, S: int, D: int) -> tuple[()]:
        if centres is None:
            raise ValueError("triattention reads models.query_centres; write triattention(file='centres.npy').")
        # As in kvjax.q_filters: check_measured counts all KV heads.
        if centres.shape[2:] != (G, 3 * D // 2) or centres.shape[1] % K:
            raise ValueError(f"{file!r} has centres {centres.shape}, not of {K} groups of {G} heads of {D}.")
        return ()

    def score(o: Observation) -> Scores:
        assert centres is not None  # init has checked it
        frequency = o.context.rotary("triattention places the mean query at coming positions")
        heads = jnp.arange(o.key.shape[1]) if o.head is None else o.head
        own = jnp.asarray(centres)[o.layer][heads]  # [K, G, 3 D / 2]
        mean, length = own[..., : o.key.shape[3]], own[..., o.key.shape[3] :]
        key = o.live_key
        cos, sin = _coming(o, frequency, future)
        query = rotate(mean[None], cos[:, None, None], sin[:, None, None])  # [B, K, G, D]
        spread = length - _pair_lengths(mean)
        found = jnp.einsum("bkgd,bksd->bkgs", query, key, precision=_HIGH)
        found = found + jnp.einsum("kgf,bksf->bkgs", spread, _pair_lengths(key), precision=_HIGH)
        live = o.live[:, :, None]
        count = jnp.maximum(jnp.sum(live, axis=-1, keepdims=True), 1)
        away = jnp.where(live, found - jnp.sum(jnp.where(live, found, 0), axis=-1, keepdims=True) / count, 0)
        deviation = jnp.sqrt(jnp.sum(away**2, axis=-1, keepdims=True) / count)
        return jnp.max(away / jnp.maximum(deviation, 1e-6), axis=2, keepdims=True)

    scored = base_score(
        "triattention",
        score,
        needs=Needs(rotary=True),
        nonnegative=False,
        published=Timing("prompt", 128, "arXiv 2604.04921, its authors' code: in decode, after every 128 tokens"),
    )
    return dataclasses.replace(scored, init=init, measured=None if centres is None else centres.shape[:2])


def _attended(state: LastQueries, o: Observation, window: int) -> Float[Array, "B K S"]:
    """Return the mean attention of the last queries to the tokens before them; 0 for the window's own tokens."""
    query, key, place = state.query.value, o.live_key, state.place.value
    before = o.live & (o.position < (o.next_position - window)[:, None, None])
    scale = o.context.factor(key.shape[3])
    logits = jnp.einsum("bkwgd,bksd->bkwgs", query, key, precision=_HIGH)
    largest = jnp.max(scaled(logits, scale, o.context.soft_cap), axis=3)
    seen = before[:, :, None] & (place > 0)[..., None]  # [B, K, window, S]
    weights = jax.nn.softmax(jnp.where(seen, largest, -jnp.inf), axis=-1)  # NaN where nothing is seen
    count = jnp.maximum(jnp.sum(place > 0, axis=2), 1)[..., None]
    return jnp.sum(jnp.where(seen, weights, 0), axis=2) / count


def _repeated(o: Observation, threshold: float) -> Float[Array, "B K S"]:
    """Return the softmax, over a head's tokens, of the mean cosine of a key with the others' keys."""
    B, K, S = o.position.shape
    direction = unit(o.live_key)
    size, pages = min(_SLOTS, S), -(-S // min(_SLOTS, S))
    more = pages * size - S

    def in_parts(x: Array, fill: int) -> Array:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, more)) + ((0, 0),) * (x.ndim - 3), constant_values=fill)
        return jnp.moveaxis(x.reshape(B, K, pages, size, *x.shape[3:]), 2, 0)

    def summed(part: tuple[Float[Array, "B K size D"], Int[Array, "B K size"]]) -> Float[Array, "B K S"]:
        of, at = part
        cosine = jnp.einsum("bkrd,bksd->bkrs", of, direction, precision=_HIGH)
        other = at[..., None] != o.position[:, :, None]
        close = jnp.where(other & (cosine > threshold), o.position[:, :, None], -1)
        newest = jnp.max(close, axis=-1, keepdims=True)
        counts = other & ((newest < 0) | (o.position[:, :, None] != newest))
        return jnp.sum(jnp.where(counts, cosine, 0), axis=2)

    total = jnp.sum(jax.lax.map(summed, (in_parts(direction, 0), in_parts(o.position, -1))), axis=0)
    count = jnp.maximum(jnp.sum(o.live, axis=-1, keepdims=True), 1)
    found = jax.nn.softmax(jnp.where(o.live, total / count, -jnp.inf), axis=-1)
    return jnp.where(o.live, found, 0)


def _coming(
    o: Observation, frequency: Float[Array, "rows half"], future: int
) -> tuple[Float[Array, "B half"], Float[Array, "B half"]]:
    """Return the mean cosines and sines of the rotations 1, 2, 4, ... positions after the next token's."""
    ahead = jnp.asarray([2**i for i in range(future.bit_length())], jnp.int32)
    angle = (o.next_position[:, None] + ahead)[..., None].astype(frequency.dtype) * frequency[:, None]
    cos, sin = (jnp.mean(wave(angle), axis=1) for wave in (jnp.cos, jnp.sin))
    return cos, sin


def _pair_lengths(x: Float[Array, "*shape D"]) -> Float[Array, "*shape half"]:
    """Return the length of each pair of elements that are rotated together."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.sqrt(first**2 + second**2)
