"""Links that may follow a base score: normalisation, pooling, chunks, protection, merging, CriticalKV, positions."""

from __future__ import annotations

import functools
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.caote_topk.reference import shares
from kvjax._src.cache import Positions, nth_true, token_at
from kvjax._src.chains import no_state, register, unchanged
from kvjax._src.checks import MOST, check_count, check_names
from kvjax._src.matching import Queries, remembered
from kvjax._src.merging import Merging, Received, most_similar, next_tokens, rematched
from kvjax._src.moments import Evicted, absorbed, residuals
from kvjax._src.observation import Context, Needs, Observation
from kvjax._src.policy import Marked, Policy, Protection, Scores, Timing
from kvjax._src.projection import part_of
from kvjax._src.short_names import check_number, check_protected
from kvjax._src.topk import best_of_heads, rank, share_of


@register
def normalise() -> Policy:
    """Divide scores by their sum over each query head's live slots (CAOTE, eq. 21), shifted first if one is below 0.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("key_norm+normalise"))
        'key_norm+normalise'
    """

    def update(scores: Scores, state: Any, o: Observation) -> tuple[Scores, Any]:
        live = o.live[:, :, None]
        counts = live & (scores > -jnp.inf)  # what a link has scored so never stays, and has no share
        lowest = jnp.min(jnp.where(counts, scores, jnp.inf), axis=-1, keepdims=True)
        return jnp.where(live & ~counts, -jnp.inf, shares(scores - jnp.minimum(lowest, 0), counts)), state

    return Policy("normalise", no_state, update, nonnegative=True)


@register
def pool(*, kernel: int = 5, pooling: Literal["avg", "max"] = "avg") -> Policy:
    """Pool scores over neighbours in position order among the live tokens.

    Beyond the ends, "avg" counts zeros and "max" nothing. Kernel 5 and "avg" are those of the SnapKV authors' code.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("h2o+pool(kernel=7)"))
        'h2o+pool(kernel=7)'
    """
    check_kernel("pool", kernel)
    return Policy(
        "pool", no_state, lambda scores, state, o: (pooled(scores, o, kernel, pooling), state), Needs(order=True)
    )


@register
def chunks(*, size: int = 20, heads: Literal["group", "layer"] = "group") -> Policy:
    """Score each token by the mean score of its chunk, so that whole chunks stay or leave (ChunkKV, arXiv 2502.00299).

    A chunk is ``size`` neighbouring tokens of the text, cut from its beginning: those of positions 0 to size - 1 are
    the first one. Protected tokens stay whatever their chunk scores; they keep their own scores, and the mean is that
    of the chunk's other tokens. Of the last chunk that fits the budget only in part, the newest tokens stay.

    The paper evicts once (algorithm 1). Where tokens leave block by block or step by step, the chunks stay the same
    pieces of the text, and a chunk's mean is that of the tokens that it still has.

    Args:
        size: how many tokens a chunk has; 20 as in kvpress.
        heads: which heads keep the same chunks: each query "group", or all of a "layer", as in kvpress.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("snapkv+chunks(size=10)@adakv"))
        'snapkv+chunks(size=10)@adakv'
    """
    check_count("chunks: size", size, 1, "give the tokens of a chunk, an int from 1")
    return Policy(
        "chunks",
        no_state,
        lambda scores, state, o: (_chunk_means(scores, o, size), state),
        Needs(order=True),
        heads=heads,
        published=Timing("prompt", 0, "arXiv 2502.00299, algorithm 1: compresses the prompt, before generation"),
    )


@register
def protect(*, sinks: int | float | None = None, recent: int | float | None = None) -> Policy:
    """Keep the first ``sinks`` and the last ``recent`` tokens, whatever they score, in place of those kept before.

    Args:
        sinks: a number of tokens (int), or a share of the budget (float in [0, 1]). None leaves what the links before
            this one protect; 0 takes it away.
        recent: likewise.

    Example:
        >>> import kvjax
        >>> kvjax.protected("h2o+protect(sinks=4)", 64)
        (4, 32)
        >>> kvjax.protected("h2o+protect(recent=0)", 64)
        (0, 0)
    """
    check_protected("protect", **{what: x for what, x in (("sinks", sinks), ("recent", recent)) if x is not None})
    return Policy("protect", no_state, unchanged, protection=Protection(sinks, recent))


@register
def critical(*, safe: float = 0.5, epsilon: float = 1e-4) -> Policy:
    """Keep the best tokens; score the others by what their values add to the output (CriticalKV, arXiv 2502.03805).

    The preceding scores, averaged over the group, choose the best ``floor(safe * budget)`` tokens of each head, with
    protected tokens first; these stay. The others (and these, for later links) score
    ``(score + epsilon) * |v W_O|_1``, with the 1-norm averaged over the group's blocks of W_O. A token's norm is
    computed once, when the token enters, and rounded as in :func:`kvjax.key_norm`: of equal tokens with a score of 0
    the newest stay.

    Args:
        safe: the share of the budget that the preceding scores decide alone, in [0, 1]; 0.5 as in kvpress.
        epsilon: makes the value count where the score is 0; 1e-4 as in kvpress.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("snapkv+critical(safe=0.25)"))
        'snapkv+critical(safe=0.25)'
    """
    check_number("critical", "safe", safe, 0, 1, "a share of the budget in [0, 1]")
    check_number("critical", "epsilon", epsilon, 0, 1e30, "a number from 0 to 1e30")

    def init(B: int, K: int, G: int, S: int, D: int) -> Array:
        return jnp.zeros((B, K, S), jnp.float32)  # |v W_O|_1 of each slot

    def update(scores: Scores, state: Array, o: Observation) -> tuple[Marked, Array]:
        state = _with_new_norms(state, o)
        joined = jnp.mean(scores, axis=2)
        first = joined if o.protected is None else jnp.where(o.protected, jnp.inf, joined)
        number = share_of(float(safe), o.budget)[:, None]
        # Not keep_mask, which refuses 0 tokens: a small share may round down to 0.
        is_safe = best_of_heads(rank(first, o.live), o.position, jnp.broadcast_to(number, joined.shape[:2])[..., None])
        rescored = jnp.minimum((joined + epsilon) * state, jnp.finfo(jnp.float32).max)
        return Marked(rescored[:, :, None], is_safe), state

    return Policy(
        "critical",
        init,
        update,
        needs=Needs(projections=frozenset({"weight"})),
        needs_nonnegative=True,
        nonnegative=True,
        published=Timing("prompt", 0, "arXiv 2502.03805: after the prompt, before generation"),
    )


@register
def merge(*, similarity: float = 0.0) -> Policy:
    """Fold the values of the tokens that leave into those of the most similar that stay (D2O, arXiv 2406.13035).

    Scores pass unchanged, and so does the choice of the tokens that leave. Each of them goes to the token of its head
    whose key has the largest cosine ``s`` with its own; that value becomes ``(v + sum w u) / (1 + sum w)`` over the
    values u that go there, with kvpress' weights ``w = s |u| / (|u| + |v|)``. Keys stay as they are;
    D2O merges them, too.

    It works in slots and in pages, so with any allocation. An eviction after a block, or after several steps, takes
    O(S^2) time and memory, one head at a time; after every step, when one token leaves, O(S) and a copy of the values.

    Args:
        similarity: the smallest cosine at which a token is merged, in [0, 1]; 0 as in kvpress. D2O's moves with the
            text.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("h2o+caote+merge(similarity=0.5)"))
        'h2o+caote+merge(similarity=0.5)'
    """
    check_number("merge", "similarity", similarity, 0, 1, "a cosine in [0, 1]")
    merging = Merging("merge", functools.partial(most_similar, similarity=similarity), (similarity,))
    return Policy("merge", no_state, unchanged, merging=merging)


@register
def cam(*, window: int = 32) -> Policy:
    """Share the values of the tokens that leave among the next tokens that stay (CaM, ICML 2024, kvpress' CAMPress).

    Scores pass unchanged. Of a token that leaves, each of the ``window`` next tokens that stay, or of the m that there
    are, gets ``p v / m``. CaM merges a token or does not, by a draw with the probability
    ``p = min(1, A / mean(A of those m))``, where A is the attention that a token has received so far. Here p itself is
    the factor, the mean over all draws: no eviction depends on random numbers. kvpress merges only as many tokens as
    came in since the last eviction; here all that leave are merged. CaM is made for decode, where tokens leave one by
    one. Values are added, not averaged: where most of a prompt leaves at once, they grow, and answers suffer.

    Caches and cost are those of ``merge``; A takes float32 ``[B, K, S]`` more.

    Args:
        window: among how many tokens a value is shared, at most; 32 as in kvpress.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("streaming+cam(window=8)"))
        'streaming+cam(window=8)'
    """
    check_count("cam: window", window, 1, "give the number of tokens that share a value, an int from 1")

    def init(B: int, K: int, G: int, S: int, D: int) -> Received:
        return Received(jnp.zeros((B, K, S), jnp.float32))

    def update(scores: Scores, state: Received, o: Observation) -> tuple[Scores, Received]:
        if o.context.reconstructed is not None:  # the text's own queries count
            return scores, state
        return scores, Received(state.attention + jnp.mean(o.columns.sum, axis=2))

    merging = Merging("cam", functools.partial(next_tokens, window=window), (window,))
    return Policy("cam", init, update, Needs(frozenset({"sum"})), merging=merging)


@register
def match(*, queries: int = 1024) -> Policy:
    """Fit the tokens that stay so that sample queries get the outputs of the whole cache (arXiv 2602.16284).

    Scores pass unchanged, and so does the choice of the tokens that leave: Attention Matching with the keys chosen by
    the policy. At an eviction each head's slots get a bias, by which their attention mass is that of all tokens, and
    new values, by which the outputs are (:func:`kvjax.match_attention`). The sample queries are those of a repetition,
    where the policy repeats its prompt (``kvzip+match``), as the paper has it; else the text's own.

    It is made for one eviction after the prompt (``when="prompt"``); by block each eviction fits anew, to the queries
    of the tokens that were still there. Its state takes bfloat16 ``[B, K, S, G, D]``, the queries, which a run drops
    behind its last eviction; a bias stays, float32 ``[B, K, S]``. It fits one head after the other, in O(n S D + n t^2
    + t^3) for n queries and t tokens that stay. A token to which no sample gives much weight may get a large value.

    Args:
        queries: how many sample queries of each query head are used, at most, evenly chosen among those of the tokens.

    Raises:
        ValueError: when it runs in a layer with a sliding window, a cap of its logits or sinks.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("kvzip+match@model"))
        'kvzip+match@model'
    """
    check_count("match: queries", queries, 1, "give the number of sample queries, an int from 1")

    def init(B: int, K: int, G: int, S: int, D: int) -> Queries:
        return Queries(jnp.zeros((B, K, S, G, D), jnp.bfloat16), jnp.zeros((B, K, S), jnp.int32))

    def update(scores: Scores, state: Queries, o: Observation) -> tuple[Scores, Queries]:
        c = _plain("match", o.context)
        if state.spent:
            return scores, state
        at, part = o.query_position, c.reconstructed
        if part is not None:  # a copy's query is kept beside a token of its part, which need not be the one it copies
            start, stop, end = (x[:, None] for x in (part.start, part.stop, part.end))
            own = start + at - end
            at = jnp.where((at >= end) & (own < stop), own, -1)
        scale = c.factor(o.query.shape[-1])
        return scores, remembered(state, o.query * scale, at, o.query_position, o.position)

    merging = Merging("match", functools.partial(rematched, queries=queries), (queries,), biased=True)
    published = Timing("prompt", 0, "arXiv 2602.16284: once, when the context is in")
    return Policy("match", init, update, Needs(queries=True), published=published, merging=merging)


@register
def moments() -> Policy:
    """Keep moments of the evicted tokens: what they foretell may go, and attention gets it back (arXiv 2606.01563).

    Each head keeps, of the n tokens that it has evicted, the means of keys and values and their covariance S. A score,
    which must not be negative, is multiplied by the length of the residual ``v - mean v - S k / (n sqrt(D))`` (equation
    10), with the moments from before the eviction: of the value itself at the first one. Later queries get the output
    ``w f + (1 - w) (mean v + S q / (n sqrt(D)))``, where f is that of the tokens that are held, of mass Z, and
    ``w = Z / (Z + n exp(q . mean k / sqrt(D)))`` (equations 9 and 12).

    The moments take ``4 (D + 1)^2`` bytes per KV head, whatever the budget. A score costs D^2 per slot; a query costs
    its logits a second time, and in pages each head's keys are copied. It works with any allocation.

    Raises:
        ValueError: when it runs in a layer with a sliding window, a cap of its logits or sinks.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("h2o+caote+moments"))
        'h2o+caote+moments'
    """

    def update(scores: Scores, state: Evicted, o: Observation) -> tuple[Scores, Evicted]:
        _plain("moments", o.context)
        return jnp.minimum(scores * residuals(state, o)[:, :, None], jnp.finfo(jnp.float32).max), state

    published = Timing("prompt", 1, "arXiv 2606.01563, algorithm 1: behind the prompt, then at every step")
    merging = Merging("moments", absorb=absorbed)
    needs = Needs(queries=True)  # whose logits the means have, so that keys must not turn
    return Policy("moments", Evicted.none, update, needs, needs_nonnegative=True, published=published, merging=merging)


@register
def positions(*, kind: Positions = "compact") -> Policy:
    """Set how the cache rotates keys once tokens have been evicted; scores pass unchanged.

    Args:
        kind: "compact" or "index"; without this link it is "absolute". See :meth:`kvjax.KVCache.init`.

    Example:
        >>> import kvjax
        >>> kvjax.parse("streaming+positions").positions
        'compact'
    """
    return Policy("positions", no_state, unchanged, positions=kind)


def _plain(link: str, context: Context) -> Context:
    """Return the context of a layer whose attention is softmax over all tokens."""
    if context.sliding_window is not None or context.soft_cap is not None or context.sink_logits is not None:
        raise ValueError(f"{link!r} does not fit layers with a sliding window, a soft cap or sinks; leave it out.")
    return context


def normalised(scores: Scores, o: Observation) -> Scores:
    """Divide scores by their sum over the live slots; free slots get 0."""
    return shares(scores, o.live[:, :, None])


def beside_sinks(scores: Scores, o: Observation, fast: bool) -> tuple[Scores, Array, Array]:
    """Return weights that sum to 1, values, and which are live; where the model has sinks, with these as a last token.

    It has no value; in FastCAOTE's mean value, which counts live tokens, it has the mean of the others.
    """
    weights, value = normalised(scores, o), o.value
    if o.left is None:
        return weights, value, o.live
    left = (o.left if weights.shape[2] > 1 else jnp.mean(o.left, axis=2, keepdims=True)).astype(weights.dtype)
    nothing = jnp.zeros_like(value[..., :1, :])
    if fast:
        nothing = jnp.mean(value, axis=2, where=o.live[..., None], keepdims=True)
    live = jnp.append(o.live, jnp.ones_like(o.live[..., :1]), axis=-1)
    return jnp.append(weights * left, 1 - left, axis=-1), jnp.append(value, nothing, axis=-2), live


def pooled(scores: Scores, o: Observation, kernel: int, pooling: str) -> Scores:
    """Pool scores over the tokens beside each one in the text, as the link :func:`kvjax.pool` does.

    Beyond the ends of the text there are zeros (avg) or nothing (max), as in torch.

    Args:
        scores: ``[B, K, G, S]``.
        o: what the score observes; of it the slots' positions are read.
        kernel: how many neighbours are pooled, an odd number.
        pooling: "avg" or "max".

    Example:
        >>> import jax, jax.numpy as jnp, kvjax
        >>> nothing = dict.fromkeys(kvjax.Observation._fields)
        >>> def pooled(scores, position):
        ...     o = kvjax.Observation(**nothing | {"position": position})
        ...     return kvjax.pooled(scores, o, kernel=3, pooling="max")
        >>> scores = jnp.array([[[[1.0, 0.0, 0.0, 6.0]]]])
        >>> jax.jit(pooled)(scores, jnp.array([[[0, 3, 1, 2]]]))[0, 0, 0].tolist()
        [1.0, 6.0, 6.0, 6.0]
    """
    check_kernel("pooled", kernel)
    check_names("pooling", pooling, ("avg", "max"))
    order = o.ordered
    reduce, nothing = (jax.lax.add, 0.0) if pooling == "avg" else (jax.lax.max, -jnp.inf)
    scores = jnp.where(o.live[:, :, None], scores, nothing)
    in_order = order.sort(scores, nothing)
    half = kernel // 2
    padding = ((0, 0), (0, 0), (0, 0), (half, half))
    start = jnp.asarray(nothing, in_order.dtype)
    if pooling == "avg":
        in_order = in_order / kernel  # before the sum, which overflows for the largest floats
    pooled = jax.lax.reduce_window(in_order, start, reduce, (1, 1, 1, kernel), (1, 1, 1, 1), padding)
    return order.unsort(pooled)


def _chunk_means(scores: Scores, o: Observation, size: int) -> Scores:
    """Replace the score of each unprotected token by the mean over those of its chunk."""
    order = o.ordered
    chunk = order.sort((o.position // size)[:, :, None], -1)
    begins = jnp.diff(chunk, axis=-1, prepend=chunk[..., :1]) != 0
    number = order.unsort(jnp.cumsum(begins, axis=-1))  # of each slot's chunk
    counted = (o.live if o.protected is None else o.live & ~o.protected)[:, :, None]

    def of_chunks(x: Float[Array, "B K _ S"]) -> Float[Array, "B K _ S"]:
        def one_head(x: Array, number: Array) -> Array:
            return jnp.zeros_like(x).at[number].add(x)[number]

        return jax.vmap(jax.vmap(jax.vmap(one_head)))(x, jnp.broadcast_to(number, x.shape))

    counts = jnp.maximum(of_chunks(counted.astype(scores.dtype)), 1)
    # The largest floats, which mark tokens that are sure to stay, overflow when summed.
    scale = jnp.where(jnp.where(counted, scores, 0) > 2.0**64, 2.0**-64, 1).min(axis=-1, keepdims=True)
    means = of_chunks(jnp.where(counted, scores * scale, 0)) / counts
    return jnp.where(counted, jnp.minimum(means / scale, jnp.finfo(scores.dtype).max), scores)


def _with_new_norms(norms: Float[Array, "B K S"], o: Observation) -> Float[Array, "B K S"]:
    """Return the norms ``|v W_O|_1``, with those of the tokens that entered with this block written to their slots."""
    weight = part_of(o.context.projection, "weight", "critical")
    (B, T), K = o.query_position.shape, o.position.shape[1]
    new = o.live & token_at(o.position, o.query_position)[1]
    slot = nth_true(new, jnp.broadcast_to(jnp.arange(1, T + 1), (B, K, T)))  # S, which is dropped, beyond the last
    value = jnp.take_along_axis(o.value, slot[..., None], axis=2, mode="fill", fill_value=0)
    written = jax.vmap(jax.vmap(lambda own, slot, new: own.at[slot].set(new, mode="drop")))
    return written(norms, slot, _output_length(value, weight))


def predicted(o: Observation, name: str, policy: str) -> Array:
    """Return an array of the block's prediction, which the policy cannot do without."""
    found = getattr(o.context.predicted, name, None)
    if found is None:
        raise ValueError(f"{policy!r} reads a network's {name}; hand over Context(predicted=...), or networks=.")
    return cast(Array, found)


def predicted_scores(o: Observation, name: str, policy: str) -> Float[Array, "B T K"]:
    """Return a number of the block's prediction for each token and KV head, in float32."""
    found, expected = predicted(o, name, policy), (*o.query_position.shape, o.position.shape[1])
    if found.shape != expected:
        raise ValueError(f"predicted scores {found.shape} do not fit: expected {expected}.")
    return found.astype(jnp.float32)


def with_tokens(state: Float[Array, "B K S *rest"], o: Observation, new: Float[Array, "B T K *rest"]) -> Array:
    """Return the slots' state, with the new arrays of the block's tokens written to their slots."""
    if o.query_position.shape[1] == 1:  # a select, which becomes a part of what reads the state
        here = o.live & (o.position == o.query_position[:, :, None])
        here = here.reshape(*here.shape, *(1,) * (new.ndim - 3))
        return jnp.where(here, new.swapaxes(1, 2).astype(state.dtype), state)
    token, here = (x.reshape(*x.shape, *(1,) * (new.ndim - 3)) for x in token_at(o.position, o.query_position))
    return jnp.where(here, jnp.take_along_axis(new.swapaxes(1, 2), token, axis=2).astype(state.dtype), state)


def _output_length(
    value: Float[Array, "B K T D"], weight: Float[Array, "K G D E"], chunk: int = 128
) -> Float[Array, "B K T"]:
    """Compute the mean of ``|v W_O|_1`` over the group, a few tokens at a time: each takes G vectors of E numbers."""
    B, K, T, D = value.shape
    chunk = min(chunk, T)
    padding = -T % chunk
    chunks = jnp.pad(value, ((0, 0), (0, 0), (0, padding), (0, 0))).reshape(B, K, -1, chunk, D)
    wide = weight.astype(jnp.float32)

    def length(some: Float[Array, "B K c D"]) -> Float[Array, "B K c"]:
        projected = jnp.einsum("bkcd,kgde->bkgce", some.astype(jnp.float32), wide, precision=jax.lax.Precision.HIGHEST)
        return jnp.mean(jnp.sum(jnp.abs(projected), axis=-1), axis=2)

    lengths = jax.lax.map(length, jnp.moveaxis(chunks, 2, 0))  # [chunks, B, K, chunk]
    return rounded(jnp.moveaxis(lengths, 0, 2).reshape(B, K, -1)[..., :T])


def rounded(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Round to 12 bits after the leading one, so that numbers that only rounding errors tell apart become equal."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=12)


def check_kernel(name: str, kernel: int) -> None:
    if not 1 <= kernel <= MOST or kernel % 2 == 0:
        raise ValueError(f"{name}: kernel is {kernel}; give an odd number from 1, so that it has a centre.")
