"""Base scores of papers that score a token by the attention that it gets, or by its position alone.

Scores that read only keys and values are in scores_of_keys.py, those for long generations in scores_of_generations.py,
links that change scores in transforms.py and caote.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt

from kernels_pallas import cache_attention, carry_statistic
from kvjax import allocation
from kvjax._src.cache import HeadState, nth_true
from kvjax._src.chains import base_score, chain, no_state, parse, register
from kvjax._src.checks import MOST, check_count
from kvjax._src.observation import Needs, Observation
from kvjax._src.policy import Policy, Protection, Scores, Timing, allocated
from kvjax._src.projection import part_of
from kvjax._src.reconstruction import Reconstruction, Repeated
from kvjax._src.rotary import rotate, turn
from kvjax._src.short_names import check_number, check_protected
from kvjax._src.transforms import check_kernel, pooled, predicted, predicted_scores, rounded, with_tokens

_LARGEST_LOG = 80.0  # whose exponential, and its inverse, are far from overflow in float32


@register
def h2o(*, accumulate: bool = True) -> Policy:
    """Keep the newest tokens, and those that received most attention, summed over queries (H2O, arXiv 2306.14048).

    Half of the slots are for the newest tokens and half for these heavy hitters, as in its authors' code, which gives
    each a tenth of the prompt. Without the newest ones, ``h2o+protect(recent=0)``, the cache freezes in decode: sums of
    old tokens never fall, so each new token leaves before them. A run warns of it.

    Args:
        accumulate: sum over all queries so far, as in the paper and its authors' code; False sums over the current
            block only, as in CAOTE's section 2.

    Example:
        >>> import kvjax
        >>> kvjax.h2o().needs.statistics
        frozenset({'sum'})
    """
    published = Timing("block", 1, "arXiv 2306.14048: at every step the least heavy token leaves")
    half = Protection(recent=0.5)
    if not accumulate:
        return base_score("h2o", lambda o: o.columns.sum, statistics=("sum",), protection=half, published=published)

    def init(B: int, K: int, G: int, S: int, D: int) -> tuple[Array, ...]:
        return tuple(jnp.zeros((B, K, S), jnp.float32) for _ in range(G))

    def update(_: Scores, state: tuple[Array, ...], o: Observation) -> tuple[Scores, tuple[Array, ...]]:
        return carry_statistic(state, o.columns.sum, (1.0, 1.0, 1.0), implementation=o.context.implementation)

    return Policy(
        "h2o",
        init,
        update,
        Needs(frozenset({"sum"})),
        protection=half,
        base=True,
        nonnegative=True,
        cumulative=True,
        published=published,
    )


@register
def tova(*, heads: Literal["group", "layer"] = "layer") -> Policy:
    """Score a token by the last query's attention (TOVA, arXiv 2401.06104).

    Args:
        heads: which heads share one set of tokens: all heads of a "layer" by their mean attention, as in the paper
            (appendix A and table 3, where it beats one set per head), its authors' code and kvpress; or each query
            "group", as in CAOTE. In a chain, the scores of the whole chain are averaged over the layer. An allocation
            that gives heads different numbers of slots needs "group".

    Example:
        >>> import kvjax
        >>> str(kvjax.tova(heads="group") @ "model")
        "tova(heads='group')@model"
    """
    return Policy(
        "tova",
        no_state,
        lambda _, state, o: (o.columns.last, state),
        Needs(frozenset({"last"})),
        base=True,
        nonnegative=True,
        heads=heads,
        published=Timing("block", 1, "arXiv 2401.06104: at every step the token of the lowest attention leaves"),
    )


@register
def snapkv(*, window: int = 32, kernel: int = 5, pooling: Literal["avg", "max"] = "avg") -> Policy:
    """Score a token by the last queries' mean attention, pooled over its neighbours (SnapKV, arXiv 2404.14469).

    The window's own tokens stay. The paper pools by "max": window 16 and kernel 5 for needles (sections 5.1.1 and 5.2),
    32 and 7 for LongBench (5.3), 64 and 13 for Command-R (5.4); "avg" made no great difference (5.2). The defaults are
    those of its authors' code; kvpress has 64, 5 and "avg".

    On this library's needles a wider kernel is better: among 1, 5, 7 and 13, ``snapkv(kernel=13)`` was chosen for
    SmolLM2-135M-Instruct, on texts of 512 tokens of seed 0 (docs/results/smollm2/window.json): it answers 69% with a
    quarter of the cache, the published width 23%; on RULER 11% against 8%
    (docs/results/smollm2/ruler-pooling.json). Compare methods at settings that none of them was tuned for.

    Args:
        window: how many of the last queries observe; decode steps are joined until there are as many.
        kernel: width of the pooling over neighbours in position order among the live tokens, an odd number.
        pooling: "avg" or "max".

    Example:
        >>> import kvjax
        >>> kvjax.snapkv(window=16).protected(64)
        (0, 16)
    """
    check_kernel("snapkv", kernel)
    return base_score(
        "snapkv",
        lambda o: _pooled_before(o.columns.window_mean, o, window, kernel, pooling),
        statistics=("window_mean",),
        window=window,
        needs=Needs(order=True),
        protection=Protection(recent=window),
        published=Timing("prompt", 0, "arXiv 2404.14469: compresses the prompt, before generation"),
    )


@register
def dropkv(*, window: int = 32, kernel: int = 7) -> Policy:
    """Score a token by how far the last queries' outputs would move without it (DropKV, openreview MqfNzH3TVH).

    For each of the window's queries, with its weight a of the token and its output x, the change is exactly
    ``a / (1 - a) (v - x)``, as CAOTE's theorem 3.2 has it for one query (arXiv 2504.14051). The score is the mean of
    its squared length over queries and the group, pooled over neighbours. ``snapkv+caote`` takes one mean weight and
    one output of all queries in their place. ``snapkv(kernel=7)+caote(per='query')`` is its root, but that
    SnapKV leaves the window's own tokens out of the pooling.

    kvpress adds 1e-6 to 1 - a (pull request 285); here it is as it is, and x itself is the change where a is 1.

    Args:
        window: how many of the last queries observe, and stay; decode steps are joined until there are as many.
        kernel: width of the average pooling over neighbours in position order among the live tokens, an odd number.

    Example:
        >>> import kvjax
        >>> policy = kvjax.parse("dropkv@adakv")
        >>> policy.needs.statistics, policy.needs.errors
        (frozenset({'window_mean'}), 'value')
    """
    check_kernel("dropkv", kernel)

    return base_score(
        "dropkv",
        lambda o: pooled(o.columns.window_mean, o, kernel, "avg"),
        statistics=("window_mean",),
        window=window,
        needs=Needs(errors="value", order=True),
        protection=Protection(recent=window),
        published=Timing("prompt", 0, "openreview MqfNzH3TVH: compresses the prompt, before generation"),
    )


@register
def dapq(
    *,
    window: int = 32,
    kernel: int = 5,
    pooling: Literal["avg", "max"] = "avg",
    tokens: Literal["last", "first"] = "last",
) -> Policy:
    """Score a token by the mean attention of pseudo queries at the positions to come (DapQ, arXiv 2603.11564).

    After the prompt, and once, ``window`` tokens are fed at the positions of the answer's first tokens, observed, and
    taken back: where a query stands decides its attention more than what it says. The rest is :func:`kvjax.snapkv`,
    with the defaults of its kernel and pooling: scores are pooled, and the prompt's last ``window`` tokens stay. So the
    two differ in nothing but where the queries stand.

    This follows the paper's abstract and summaries; its full text could not be read. The pseudo tokens' words, their
    number, the pooling and the protection are our reading. In decode, where ``evict_every`` asks for it, the steps' own
    queries observe.

    Args:
        window: how many pseudo tokens observe; a block has at least as many.
        kernel: width of the pooling over neighbours in position order among the live tokens, an odd number.
        pooling: "avg" or "max".
        tokens: which of the prompt's tokens are fed again: the "last", as SnapKV observes them, or the "first". A
            shorter prompt is fed more than once.

    Example:
        >>> import kvjax
        >>> policy = kvjax.parse("dapq(window=16)+caote@adakv")
        >>> policy.needs.reconstruction.pseudo, policy.protected(64)
        (16, (0, 16))
    """
    check_kernel("dapq", kernel)
    return base_score(
        "dapq",
        lambda o: _pooled_before(o.columns.window_mean, o, window, kernel, pooling),
        statistics=("window_mean",),
        window=window,
        protection=Protection(recent=window),
        needs=Needs(order=True, reconstruction=Reconstruction(pseudo=window, tokens=tokens)),
        published=Timing("prompt", 0, "arXiv 2603.11564, abstract: once, by queries that stand for the answer's"),
    )


@register
def finch(*, window: int = 32) -> Policy:
    """Score a token by the question's attention, each query's weighted by what it sees (FINCH, arXiv 2408.00167).

    The question is the last ``window`` tokens, which stay. A query's weights are multiplied by the number of other
    tokens that the head holds for it, so that queries with more tokens to look at count as much as those with fewer;
    the score is their mean, as in kvpress. ``finch+positions`` rotates keys again, as the paper does.

    In the paper the question follows each chunk of the text. Here the queries are those of a block's own last tokens,
    so the question must end the prompt, and tokens must leave once (``when="prompt"``), for the question to choose.

    Args:
        window: the number of the question's tokens; decode steps are joined until there are as many.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("finch(window=16)+positions"))
        'finch(window=16)+positions'
    """

    def score(o: Observation) -> Scores:
        held = jnp.sum(o.live, axis=-1).astype(jnp.float32)[:, :, None, None]
        return held * o.columns.window_mean - o.columns.window_place  # the query at place p sees held - p others

    return base_score(
        "finch",
        score,
        statistics=("window_mean", "window_place"),
        window=window,
        protection=Protection(recent=window),
        published=Timing("prompt", 0, "arXiv 2408.00167, as in kvpress: once, with the question at the prompt's end"),
    )


@register
def streaming(*, sinks: int = 4) -> Policy:
    """Score a token by its position, so that the newest and the first tokens stay (StreamingLLM, arXiv 2309.17453).

    Keys keep their positions in the text here; ``streaming+positions`` uses positions in the cache, as the paper does.

    Args:
        sinks: how many of the first tokens stay; 4 as in the paper (table 2: more gain little) and in kvpress.

    Example:
        >>> import kvjax
        >>> str(kvjax.streaming(sinks=8))
        'streaming(sinks=8)'
    """
    check_protected("streaming", sinks=sinks)
    return _newest("streaming", sinks) if sinks else recency()


@register
def recency() -> Policy:
    """Score a token by its position, so that the newest tokens alone stay: what any other policy has to beat.

    It is what ``streaming(sinks=0)`` is, under its own name.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("streaming(sinks=0)"))
        'recency'
    """
    return _newest("recency", 0)


@register
def sage(*, heads: Literal["group", "query"] = "group") -> Policy:
    """Let the prompt's last query choose once; after that only the newest tokens change (SAGE-KV, arXiv 2503.08879).

    A quarter of the budget goes to the first tokens (sinks), a quarter to the last (recent), and the rest to the best
    of the middle by the last query's attention. A prompt that comes in blocks is scored again by each block's last
    query. After the prompt, in decode or when a question follows, nothing is scored (``Observation.compressed``): a new
    token enters the recent window, and the window's oldest token leaves; sinks and chosen tokens stay for good. Where a
    prompt is shorter than the budget, the recent window takes the rest of the budget.

    Args:
        heads: which heads choose together: each query "group" by its mean attention, which takes no more memory than
            other policies, or each "query" head for a cache of its own, as in the paper.

    Example:
        >>> import kvjax
        >>> kvjax.protected(kvjax.sage(), 64)
        (16, 16)
    """

    def init(B: int, K: int, G: int, S: int, D: int) -> Array:
        return jnp.zeros((B, K, S), jnp.float32)  # 0 in the recent window: the last tokens, and new ones in decode

    def update(_: Scores, state: Array, o: Observation) -> tuple[Scores, Array]:
        if o.compressed:
            return state[:, :, None], state
        scores = jnp.mean(o.columns.last, axis=2)
        quarter = (o.budget // 4)[:, None, None]
        recent = o.position >= o.next_position[:, None, None] - jnp.maximum(quarter, 1)
        chosen = jnp.where(recent, 0, jnp.maximum(scores, jnp.finfo(jnp.float32).tiny))
        observed = (o.query_position >= 0).any(axis=1)[:, None, None]
        return scores[:, :, None], jnp.where(observed, chosen, state)

    return Policy(
        "sage",
        init,
        update,
        Needs(frozenset({"last"})),
        protection=Protection(sinks=0.25, recent=0.25, least=1),
        base=True,
        nonnegative=True,
        heads=heads,
        published=Timing(
            "prompt", 1, "arXiv 2503.08879: one selection after the prompt, then a rolling window", final=True
        ),
    )


@register
def laprox(
    *,
    window: int = 32,
    kernel: int = 7,
    target: Literal["output", "value", "attention"] = "output",
    gqa: Literal["joint", "group", "heads"] = "joint",
    pooled: Literal["attention", "product"] = "attention",
) -> Policy:
    """Let the model's tokens compete by what they add to a layer's output: attention times ``|v W_O|`` (LaProx).

    The paper is arXiv 2605.07234.

    The score is the 2-norm of the token's column of attention over the last queries, pooled over neighbours, times that
    of ``v W_O`` (eq. 9). The window's own tokens stay, and are left out of the pooling. The whole model has one budget
    (algorithm 2); ``laprox@uniform`` has one for each head. Window 32 and average pooling of 7 are the paper's
    (appendix A; table 7 compares windows), "output" is its equation. A query group has its mean attention there,
    with which a value adds ``v sum_g W_O^g`` to the output, and attention is what it pools; ``gqa`` and ``pooled``
    offer other readings.

    Args:
        window: how many of the last queries observe; decode steps are joined until there are as many.
        kernel: width of the average pooling over neighbours in position order, an odd number.
        target: what the attention is multiplied by: the value's part of the layer's "output", ``|v W_O|``; the "value"
            itself, ``|v|``; or nothing, for "attention" alone.
        gqa: "joint" takes the group's mean attention, and ``|v sum_g W_O^g|`` of its blocks of W_O; "group" takes the
            root of the sum of ``|v W_O^g|^2`` instead; "heads" is "group" but for the mean of the query heads' norms of
            attention.
        pooled: the norm of "attention" before it is multiplied, or the "product" of the two norms.

    Example:
        >>> import kvjax
        >>> sorted(kvjax.laprox().needs.projections)
        ['joint']
    """
    check_kernel("laprox", kernel)

    def score(o: Observation) -> Scores:
        squares = o.columns.window_square if gqa == "heads" else o.columns.window_group_square
        column = jnp.mean(jnp.sqrt(squares), axis=2)
        length = jnp.ones_like(column)
        if target == "value":
            length = jnp.linalg.norm(o.value.astype(jnp.float32), axis=-1)
        elif target == "output":
            length = _projected_length(o, gqa == "joint")
        if pooled == "product":
            return _pooled_before((column * length)[:, :, None], o, window, kernel, "avg")
        return _pooled_before(column[:, :, None], o, window, kernel, "avg") * length[:, :, None]

    projected = {"output": {"joint" if gqa == "joint" else "gram"}}.get(target, ())
    policy = base_score(
        "laprox",
        score,
        statistics=("window_square" if gqa == "heads" else "window_group_square",),
        window=window,
        protection=Protection(recent=window),
        needs=Needs(projections=frozenset(projected), order=True),
        published=Timing("prompt", 0, "arXiv 2605.07234, appendix: once after the prefilling phase"),
    )
    return dataclasses.replace(policy, allocation=allocation.model())


@register
def cake(*, window: int = 32, kernel: int = 5, gamma: float = 200.0) -> Policy:
    """Score a token by the last queries' mean attention and by how much it changes (CAKE, arXiv 2503.12491).

    The score is ``mean + gamma * variance`` over the window's queries, pooled over neighbours; the window's own tokens
    stay. Layers get slots by how spread and how changeable their attention is (:func:`kvjax.allocation.cake`);
    ``cake@uniform`` leaves that out. Window 32, average pooling of 5 and gamma 200 are those of
    its authors' code.

    Args:
        window: how many of the last queries observe, from 2; decode steps are joined until there are as many.
        kernel: width of the average pooling over neighbours in position order, an odd number.
        gamma: weight of the variance.

    Example:
        >>> import kvjax
        >>> sorted(kvjax.cake(window=16).needs.statistics)
        ['window_mean', 'window_variance']
    """
    check_kernel("cake", kernel)
    check_count("cake: window", window, 2, "a variance needs at least 2 queries")
    check_number("cake", "gamma", gamma, 0, 1e30, "a number from 0 to 1e30")

    def score(o: Observation) -> Scores:
        observed = o.columns.window_mean + gamma * o.columns.window_variance
        return _pooled_before(observed, o, window, kernel, "avg")

    policy = base_score(
        "cake",
        score,
        statistics=("window_mean", "window_variance"),
        window=window,
        needs=Needs(order=True),
        protection=Protection(recent=window),
        published=Timing("prompt", 0, "arXiv 2503.12491: while the prompt is prefilled"),
    )
    return dataclasses.replace(policy, allocation=allocation.cake())


@register
def lava(*, window: int = 32, kernel: int = 7) -> Policy:
    """Score a token by the last queries' mean attention times the head's largest value (LAVa, arXiv 2509.09754).

    The mean is pooled by its maximum over neighbours and multiplied by the largest ``|v|_1`` of the head's tokens, one
    number per head; of the group's query heads, the largest product counts. The window's own tokens stay. The heads of
    a layer compete, and layers get slots by the entropy of their scores (:func:`kvjax.allocation.lava`);
    ``lava@uniform`` leaves that out. Window 32 and a kernel of 7 are those of its authors' code on LongBench.

    Args:
        window: how many of the last queries observe; decode steps are joined until there are as many.
        kernel: width of the pooling over neighbours in position order, an odd number.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("lava(window=16)@lava"))
        'lava(window=16)'
    """
    check_kernel("lava", kernel)

    def score(o: Observation) -> Scores:
        length = jnp.sum(jnp.abs(o.value.astype(jnp.float32)), axis=-1)
        largest = jnp.max(jnp.where(o.live, length, 0), axis=-1)[:, :, None, None]
        observed = _pooled_before(o.columns.window_mean, o, window, kernel, "max")
        return jnp.max(observed, axis=2, keepdims=True) * largest

    policy = base_score(
        "lava",
        score,
        statistics=("window_mean",),
        window=window,
        needs=Needs(order=True),
        protection=Protection(recent=window),
        published=Timing("prompt", 0, "arXiv 2509.09754: while the prompt is prefilled"),
    )
    return dataclasses.replace(policy, allocation=allocation.lava())


@register
def expected_attention(
    *, future: int = 512, sinks: int = 4, covariance: bool = True, value_norm: bool = True
) -> Policy:
    """Score a token by the attention that future queries are expected to give it (arXiv 2510.00636).

    Queries before rotation are modelled as normal, with the mean ``m`` and covariance ``C`` of all queries so far, also
    those of evicted tokens and of decode steps. ``R`` is the rotation averaged over the coming positions; a key's logit
    is ``m R'k / sqrt(D) + (R'k)' C (R'k) / 2D``, and the score is the softmax over the remaining tokens, times ``|v|``.
    Positions must be absolute. All defaults are those of kvpress, its authors' code.

    Args:
        future: how many coming positions the rotation is averaged over.
        sinks: how many first tokens stay; neither their queries nor their keys are counted.
        covariance: False leaves ``C`` out.
        value_norm: False leaves ``|v|`` out.

    Raises:
        ValueError: when it runs on a model without rotary positions or with a soft cap of its logits, or without
            frequencies.

    Example:
        >>> import kvjax
        >>> policy = kvjax.parse("expected_attention(future=128)")
        >>> policy.needs.rotary, policy.protected(64)
        (True, (4, 0))
    """
    check_count("expected_attention: future", future, 1, "give a number of coming positions, an int from 1")
    check_count("expected_attention: sinks", sinks, 0, "give a number of first tokens, an int from 0")

    def init(B: int, K: int, G: int, S: int, D: int) -> Any:
        shapes = ((B, K), (B, K, G, D), (B, K, G, D, D))  # how many queries, their mean, their deviations' products
        return tuple(HeadState(jnp.zeros(shape, jnp.float32)) for shape in shapes[: 3 if covariance else 2])

    def update(_: Scores, state: Any, o: Observation) -> tuple[Scores, Any]:
        frequency = o.context.rotary("expected_attention turns queries back to position 0")
        if o.context.soft_cap is not None:
            raise ValueError("expected_attention has no formula for logits with a soft cap; take another score.")
        state = _with_queries(state, o, frequency, sinks)
        count, mean = state[0].value, state[1].value
        key = _turned_back(o, frequency, future)
        scale = o.context.factor(key.shape[-1])
        highest = jax.lax.Precision.HIGHEST
        logits = jnp.einsum("bksd,bkgd->bkgs", key, mean, precision=highest) * scale
        if covariance:
            products = state[2].value / jnp.maximum(count, 1)[..., None, None, None]
            along = jnp.einsum("bksd,bkgde->bkgse", key, products, precision=highest)
            logits = logits + jnp.einsum("bkgse,bkse->bkgs", along, key, precision=highest) * (scale**2 / 2)
        counted = (o.live & (o.position >= sinks))[:, :, None]
        scores = jax.nn.softmax(jnp.where(counted, logits, -jnp.inf), axis=-1)
        if value_norm:
            scores = scores * jnp.linalg.norm(o.value.astype(jnp.float32), axis=-1)[:, :, None]
        return jnp.where(counted, scores, 0), state  # NaN where no token counts

    return Policy(
        "expected_attention",
        init,
        update,
        protection=Protection(sinks=sinks),
        published=Timing("prompt", 0, "arXiv 2510.00636, as in kvpress: the prompt is compressed, before generation"),
        needs=Needs(rotary=True),
        base=True,
        nonnegative=True,
    )


@register
def kvzip(
    *, chunk: int = 2048, sinks: int = 4, visible: Literal["part", "cache"] = "part", normalise: bool = False
) -> Policy:
    """Score a token by the attention that it gets when the model repeats its prompt (KVzip, arXiv 2505.23416).

    The model is asked to repeat the prompt, ``chunk`` tokens at a time. A token's score is the largest weight that a
    query of the group gives it while its chunk is repeated, in attention over the chunk, the first ``sinks`` tokens and
    the repeated ones (section 3). So the score depends on no question. All heads of the model compete by these scores
    as they are, as in the paper; ``kvzip@layer`` lets those of a layer compete, which its authors also offer, and
    ``kvzip@uniform`` none. The model is asked in words with :func:`models.with_repeat_prompt`.

    As published (``when="prompt"``), the whole prompt is held, then repeated and evicted from once. With
    ``when="block"`` each block is repeated as soon as it has come in, then its copies are taken back and the policy
    evicts: the cache never holds more than the budget, a block and its copies, and older tokens keep the scores that
    they got when they came in. The tokens of an answer are repeated ``evict_every`` at a time. What fits the budget is
    not repeated; the cache remembers its tokens, so that a later call can do so. Until then a token scores 0.

    Args:
        chunk: how many tokens are repeated at a time, at most a block with ``when="block"``; 2048 as in the paper and
            in kvpress.
        sinks: how many first tokens always stay, and are seen with every chunk; 4 as in kvpress.
        visible: whether the weights are of attention over the "part" that is repeated, or over the whole "cache".
        normalise: whether a weight is multiplied by ``|v W_O|`` and divided by the length of the input of the query's
            layer, before the largest counts: KVzip+, by which the small networks of KVzap are trained
            (arXiv 2601.07891; ``kvzip_plus_normalization`` in kvpress).

    Raises:
        ValueError: when :func:`kvjax.attend` is to evict after a block that repeats nothing; or when a normalised score
            runs without the input's length, or without the layer's output projection.

    Example:
        >>> import kvjax
        >>> policy = kvjax.parse("kvzip(chunk=512)@layer")
        >>> policy.needs.reconstruction.chunk, policy.protected(64)
        (512, (4, 0))
    """
    check_count("kvzip: chunk", chunk, 1, "give the number of tokens that are repeated at a time, an int from 1")
    check_protected("kvzip", sinks=sinks)
    published = Timing("prompt", 0, "arXiv 2505.23416: once after the prompt, which the model repeats")
    if not normalise:
        needs = Needs(reconstruction=Reconstruction(chunk, sinks, visible, frozenset({"max"})))
        return _while_repeating("kvzip", lambda o: jnp.max(o.columns.max, axis=2), needs, published)

    def seen(o: Observation) -> Float[Array, "B K S"]:
        if o.context.input_length is None:
            raise ValueError(
                "kvzip(normalise=True) divides by the length of the layer's input: run it with models.prefill, or give "
                "Context(input_length=)."
            )
        # An answer's part may be longer than a chunk, but is one block.
        most = max(chunk, o.query.shape[1])
        return _largest_part(o, part_of(o.context.projection, "gram", "kvzip(normalise=True)"), most)

    repeated = Reconstruction(chunk, sinks, visible, frozenset({"scaled_max"}), input_length=True)
    return _while_repeating("kvzip", seen, Needs(projections=frozenset({"gram"}), reconstruction=repeated), published)


CATALYST = "Summarize the previous context highlighting the most important parts."


@register
def prompted(*, text: str = CATALYST, sinks: int = 4) -> Policy:
    """Score a token by the attention that a text behind it gives, fed after each block and taken back.

    So what is kept is what matters for a topic, a person, or the kind of question that will be asked, and the question
    itself may come later. The score is the largest weight that a query of the group gives the token, anew for all
    tokens that are held: the "patched prompt" by which EpiCache keeps a conversation's episodes (arXiv 2509.17396,
    section 3.2), and the catalyst prompt of InfiniPot (arXiv 2410.01518). The heads of a layer compete, as in
    EpiCache. There the weights are of the text's attention to what is held alone; here the text's own tokens share
    them. In decode the text is fed every 64 tokens by default. It becomes tokens with
    :func:`models.with_repeat_prompt`, as :func:`models.ask` and the commands do.

    Args:
        text: what is fed: some words, a question of the kind to come, or a part of the text that stands for an episode;
            by default InfiniPot's, as EpiCache's authors run it.
        sinks: how many first tokens always stay; 4 as for :func:`kvjax.kvzip`.

    Raises:
        ValueError: when :func:`kvjax.attend` is to evict after a block that feeds no text.

    Example:
        >>> import kvjax
        >>> policy = kvjax.prompted(text="names, dates and prices")
        >>> policy.needs.reconstruction.text, policy.protected(64)
        ('names, dates and prices', (4, 0))
    """
    if not text.strip():
        raise ValueError(f"prompted: text is {text!r}; give the words that are fed after each block.")
    check_protected("prompted", sinks=sinks)

    def update(_: Scores | None, state: Array, o: Observation) -> tuple[Scores, Array]:
        if (part := o.context.reconstructed) is not None:
            largest = jnp.maximum(jnp.max(o.columns.max, axis=2), jnp.finfo(jnp.float32).tiny)
            state = jnp.where(o.position < part.end[:, None, None], largest, state)
        return state[:, :, None], state

    return Policy(
        "prompted",
        lambda B, K, G, S, D: jnp.zeros((B, K, S), jnp.float32),
        update,
        Needs(reconstruction=Reconstruction(MOST, sinks, "cache", frozenset({"max"}), text=text)),
        protection=Protection(sinks=sinks),
        base=True,
        nonnegative=True,
        allocation=allocation.layer(cap=None),
        published=Timing("block", 0, "arXiv 2509.17396: after each block, by the attention of an episode's text"),
    )


@register
def kvgrad(
    *,
    chunk: int = 512,
    sinks: int = 4,
    visible: Literal["part", "cache"] = "part",
    measure: Literal["norms", "change"] = "norms",
    loss: Literal["hidden", "tokens"] = "hidden",
) -> Policy:
    """Score a token by how much a loss would feel its absence when the model repeats its prompt (KVgrad).

    The model repeats its prompt as for :func:`kvjax.kvzip`, here as one block per part, and the loss of the repeated
    tokens is differentiated with respect to each layer's attention output. A token's score is the largest, over these
    tokens and the group's heads, of its weight times ``|v W_O|`` times the length of the gradient (openreview
    cg1wTCJjjk, as in kvpress, pull request 279, from where all defaults are; since pull request 286 a ``chunk`` has 256
    tokens there, which was a little better). It bounds the change of the loss, to
    first order, if the token's part of the sum were gone. All heads of the model compete, as for KVzip. It costs a
    forward and a backward pass per part beside KVzip.

    Args:
        chunk: how many tokens are repeated at a time, at most a block with ``when="block"``.
        sinks: how many first tokens always stay, and are seen with every chunk.
        visible: whether the weights are of attention over the "part" that is repeated, or over the whole "cache".
        measure: "norms", the published product, or the "change" itself: the magnitude of the gradient's product with
            the exact change of a head's output, ``a / (1 - a) (x - v) W_O`` (CAOTE's theorem 3.2, arXiv 2504.14051),
            in place of a bound by lengths, and all weights of a block in memory.
        loss: "hidden", the sum of the squared lengths of the last layer's hidden states, as published; or "tokens", the
            cross-entropy of the repeated tokens.

    Raises:
        ValueError: when it runs without the gradient of a copy, or without the layer's output projection; or when
            :func:`kvjax.attend` is to evict after a block that repeats nothing.

    Example:
        >>> import kvjax
        >>> policy = kvjax.parse("kvgrad(chunk=256)")
        >>> policy.needs.reconstruction.loss, policy.needs.projections
        ('hidden', frozenset({'gram'}))
    """
    check_count("kvgrad: chunk", chunk, 1, "give the number of tokens that are repeated at a time, an int from 1")
    check_protected("kvgrad", sinks=sinks)
    kind, statistic = ("gram", "scaled_max") if measure == "norms" else ("weight", "weights")
    return _while_repeating(
        "kvgrad",
        _felt_at_most if measure == "norms" else _felt,
        Needs(
            projections=frozenset({kind}),
            reconstruction=Reconstruction(chunk, sinks, visible, frozenset({statistic}), loss=loss),
        ),
        Timing("prompt", 0, "openreview cg1wTCJjjk, as in kvpress: once after the prompt, which the model repeats"),
    )


@register
def butler(*, dim: int | None = None) -> Policy:
    """Score a token by the attention that a small network predicts (TokenButler, arXiv 2503.07518).

    The score is the mean over the block's queries of the softmax of ``q'.k' / sqrt(dim)`` over the live tokens that a
    query sees. Nothing is predicted for layer 0, which takes the mean of the real attention. A token's predicted key is
    stored and evicted with the token, float32 ``[B, K, S, G, dim]``: N dim numbers per slot of each layer, however long
    the text is.

    Args:
        dim: width of the predictor's queries and keys; ``models.generate`` fills it in (:func:`fit_predictor`).

    Raises:
        ValueError: when it runs without ``dim``, or without a prediction for the block.

    Example:
        >>> import kvjax
        >>> policy = kvjax.butler(dim=16)
        >>> sorted(policy.needs.predicted), policy.init(1, 2, 4, 100, 64).shape
        (['key', 'query'], (1, 2, 100, 4, 16))
    """
    if dim is not None:
        check_count("butler: dim", dim, 1, "give the width of the predictor's keys, an int from 1")

    def init(B: int, K: int, G: int, S: int, D: int) -> Array:
        if dim is None:
            raise ValueError("'butler' needs the width of a predictor's keys: write butler(dim=16), or give networks=.")
        return jnp.zeros((B, K, S, G, dim), jnp.float32)

    def update(_: Scores, state: Array, o: Observation) -> tuple[Scores, Array]:
        query, keys = (predicted(o, name, "butler") for name in ("query", "key"))
        state = _with_predicted_keys(state, o, keys)
        B, K, S, G, width = state.shape
        some = S if o.context.filled is None else min(o.context.filled, S)
        key = jnp.moveaxis(state[:, :, :some], 3, 2).reshape(B, K * G, some, width)
        _, columns = cache_attention(
            query.astype(jnp.float32),
            key,
            key,
            jnp.repeat(o.position[:, :, :some], G, axis=1),
            o.query_position,
            statistics=("sum",),
            sliding_window=o.context.sliding_window,
            soft_cap=o.context.soft_cap,
        )
        importance = jnp.pad(columns.sum.reshape(B, K, G, some), ((0, 0),) * 3 + ((0, S - some),))
        total = jnp.where(o.layer == 0, o.columns.sum, importance)
        queries = jnp.sum(o.query_position >= 0, axis=1)[:, None, None, None]
        return total / jnp.maximum(queries, 1).astype(total.dtype), state

    needs = Needs(frozenset({"sum"}), predicted=frozenset({"query", "key"}))
    return Policy("butler", init, update, needs, base=True, nonnegative=True)


@register
def zap() -> Policy:
    """Score a token by what a small network predicts from its hidden state (KVzap, arXiv 2601.07891).

    The network reads the input of the layer's attention, and predicts the logarithm of an expensive score per KV head,
    such as KVzip's, which it was trained on (``models.load_network``). The score is the exponential of the prediction.
    It is computed once, when the token enters, rounded as in :func:`kvjax.key_norm`, and kept with its slot, in the
    prompt as in decode. All heads of the model compete, as in Fast KVzip (arXiv 2601.17668), whose network is a
    ``models.Scorer`` of the kind "gate", and which always keeps the first four tokens and 2% of the budget for the
    newest: the policy ``gate``. KVzap keeps what scores enough and the newest tokens:
    ``zap+protect(recent=128)@threshold(least=x)``.

    Raises:
        ValueError: when it runs without a prediction for the block.

    Example:
        >>> import kvjax
        >>> kvjax.parse("zap+caote").needs.predicted
        frozenset({'score'})
    """

    def init(B: int, K: int, G: int, S: int, D: int) -> Array:
        return jnp.zeros((B, K, S), jnp.float32)

    def update(_: Scores, state: Array, o: Observation) -> tuple[Scores, Array]:
        score = jnp.exp(jnp.clip(predicted_scores(o, "score", "zap"), -_LARGEST_LOG, _LARGEST_LOG))
        state = with_tokens(state, o, rounded(score))
        return state[:, :, None], state

    return Policy(
        "zap",
        init,
        update,
        Needs(predicted=frozenset({"score"})),
        base=True,
        nonnegative=True,
        allocation=allocation.model(normalise=False),
        published=Timing("block", 1, "arXiv 2601.07891: while the prompt is prefilled, and in decode"),
    )


def fit_predictor(policy: Policy | str, dim: int) -> Policy:
    """Return the policy with the width of a predictor's keys filled in, if its base score reads them.

    Args:
        dim: D', the width of the predictor's queries and keys.

    Raises:
        ValueError: if the policy was made for another width.

    Example:
        >>> import kvjax
        >>> str(kvjax.fit_predictor("butler+caote@layer", dim=16))
        'butler(dim=16)+caote@layer'
    """
    policy = parse(policy) if isinstance(policy, str) else policy
    if "key" not in policy.needs.predicted:
        return policy
    first, *others = policy.links or (policy,)
    fitted = butler(dim=dim)
    if first.chain_name not in (butler().name, fitted.name):
        raise ValueError(f"{policy.name!r} was made for another predictor: this one's keys have a width of {dim}.")
    return allocated(chain(fitted, *others), policy.allocation)


@register
def random(*, seed: int = 0) -> Policy:
    """Score a token by a number drawn once per token, layer and head, so that a uniform sample of the tokens stays.

    Example:
        >>> import kvjax
        >>> str(kvjax.random(seed=1))
        'random(seed=1)'
    """
    check_number("random", "seed", seed, 0, 2**32 - 1, "an int in [0, 2**32)")

    return base_score("random", lambda o: drawn(o, seed)[:, :, None])


def drawn(o: Observation, seed: int) -> Float[Array, "B K S"]:
    """Return a number in [0, 1) for each slot, drawn once per token, layer and head: a multiple of 2**-24."""
    head = jnp.arange(o.position.shape[1]) if o.head is None else o.head
    head = head.astype(jnp.uint32)[None, :, None]
    layer = jnp.asarray(o.layer, jnp.uint32)
    mixed = mix_bits(jnp.uint32(seed) ^ mix_bits(layer ^ mix_bits(head ^ mix_bits(o.position.astype(jnp.uint32)))))
    return (mixed >> 8).astype(jnp.float32) / 2**24


def mix_bits(x: UInt[Array, "*shape"]) -> UInt[Array, "*shape"]:
    """Hash uint32 bijectively (the finaliser of MurmurHash3): the same on every backend, for any slot order."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _while_repeating(name: str, seen: Callable[[Observation], Scores], needs: Needs, published: Timing) -> Policy:
    """Return a base score that is what ``seen`` gives a token [B, K, S] while its part of the text is repeated."""
    wanted = needs.reconstruction
    assert wanted is not None

    def init(B: int, K: int, G: int, S: int, D: int) -> Repeated:
        return Repeated(jnp.zeros((B, K, S), jnp.float32), jnp.zeros((B, K, S), jnp.int32))

    def update(_: Scores | None, state: Repeated, o: Observation) -> tuple[Scores, Repeated]:
        part, (score, token) = o.context.reconstructed, state
        if part is not None:
            start, stop = (x[:, None, None] for x in (part.start, part.stop))
            largest = jnp.maximum(seen(o), jnp.finfo(jnp.float32).tiny)
            score = jnp.where((o.position >= start) & (o.position < stop), jnp.maximum(score, largest), score)
        elif o.context.tokens is not None:
            ids = jnp.broadcast_to(o.context.tokens[..., None], (*o.query_position.shape, token.shape[1]))
            token = with_tokens(token, o, ids)
        return score[:, :, None], Repeated(score, token)

    return Policy(
        name,
        init,
        update,
        needs,
        protection=Protection(sinks=wanted.sinks),
        base=True,
        nonnegative=True,
        allocation=allocation.model(normalise=False),
        published=published,
    )


def _felt_at_most(o: Observation) -> Float[Array, "B K S"]:
    """Return the largest product of a weight, the length of the query's gradient, and that of ``v W_O``."""
    _, gram = _of_gradient(o, "gram")
    return _largest_part(o, gram, o.query.shape[1])  # a part is one block


def _largest_part(o: Observation, gram: Float[Array, "K G D D"], most: int) -> Float[Array, "B K S"]:
    """Return the largest product of a weight, the query's scale, and the length of ``v W_O``.

    It is 0 but for the tokens of the part that is repeated, ``most`` of them at the most.
    """
    part = o.context.reconstructed
    assert part is not None
    inside = (o.position >= part.start[:, None, None]) & (o.position < part.stop[:, None, None])
    order = jnp.arange(1, min(most, inside.shape[2]) + 1)
    slot = nth_true(inside, jnp.broadcast_to(order, (*inside.shape[:2], len(order))))  # [B, K, T], S for none
    value = jnp.take_along_axis(o.value, slot[..., None], axis=2, mode="fill", fill_value=0).astype(jnp.float32)
    largest = jnp.take_along_axis(o.columns.scaled_max, slot[:, :, None], axis=3, mode="fill", fill_value=0)
    squares = jnp.einsum("bktd,kgde,bkte->bkgt", value, gram, value, precision=jax.lax.Precision.HIGHEST)
    felt = jnp.max(largest * jnp.sqrt(jnp.maximum(squares, 0)), axis=2)
    row, head = jnp.ogrid[: len(slot), : slot.shape[1]]
    return jnp.zeros(o.position.shape, felt.dtype).at[row[..., None], head[..., None], slot].set(felt, mode="drop")


def _felt(o: Observation) -> Float[Array, "B K S"]:
    """Return the largest change of the loss, to first order, if a head's output for a query were without the token."""
    gradient, weight = _of_gradient(o, "weight")
    shares, high = o.columns.weights, jax.lax.Precision.HIGHEST
    seen = (shares > 0).any(axis=(2, 3))  # the copies too, and no free slot, which may hold anything
    value = jnp.where(seen[..., None], o.value, 0).astype(jnp.float32)
    along = jnp.einsum("bte,kgde->bkgtd", gradient, weight, precision=high)
    part = jnp.einsum("bkgtd,bksd->bkgts", along, value, precision=high)
    whole = jnp.sum(shares * part, axis=-1, keepdims=True)
    rest = jnp.maximum(1 - shares, jnp.finfo(shares.dtype).eps)
    return jnp.max(jnp.abs(shares / rest * (whole - part)), axis=(2, 3))


def _of_gradient(o: Observation, kind: str) -> tuple[Float[Array, "B T _"], Float[Array, "K G D _"]]:
    """Return a block's gradient and a part of W_O, in float32."""
    if o.context.gradient is None:
        raise ValueError("kvgrad reads the gradient of a loss: run it with models.prefill, or give Context(gradient=).")
    return o.context.gradient.astype(jnp.float32), part_of(o.context.projection, kind, "kvgrad").astype(jnp.float32)


def _newest(name: str, sinks: int) -> Policy:
    return base_score(
        name,
        lambda o: o.position[:, :, None].astype(jnp.float32),
        protection=Protection(sinks=sinks),
        published=Timing("block", 1, "arXiv 2309.17453: a rolling cache"),
    )


def _pooled_before(scores: Scores, o: Observation, window: int, kernel: int, pooling: str) -> Scores:
    """Pool the scores before the observation window; the window's tokens keep their scores and are pooled as zeros."""
    own = (o.position >= (o.next_position - window)[:, None, None])[:, :, None]
    return jnp.where(own, scores, pooled(jnp.where(own, 0, scores), o, kernel, pooling))


def _projected_length(o: Observation, joint: bool) -> Float[Array, "B K S"]:
    """Compute ``|v W_O|`` over a group's blocks: the root of the sum of their squares, or ``|v sum_g W_O^g|``."""
    part = part_of(o.context.projection, "joint" if joint else "gram", "laprox, unless target='value',")
    gram = part if joint else jnp.sum(part, axis=1)  # [K, D, D]
    value = o.value.astype(jnp.float32)
    image = jnp.einsum("bksd,kde->bkse", value, gram, precision=jax.lax.Precision.HIGHEST)
    squares = jnp.sum(image * value, axis=-1)
    return jnp.sqrt(jnp.maximum(squares, 0))


def _with_queries(state: Any, o: Observation, frequency: Float[Array, "rows half"], sinks: int) -> Any:
    """Add the block's queries, turned back to position 0, to the count, the mean and the products of deviations.

    The two parts are joined by their means (Chan, Golub and LeVeque): a second moment minus the squared mean would lose
    small deviations next to a large mean.
    """
    B, T, N, D = o.query.shape
    K = o.key.shape[1]
    counted = o.query_position >= sinks  # padding has position -1
    by = -jnp.maximum(o.query_position, 0)[..., None].astype(jnp.float32)
    query = turn(o.query.astype(jnp.float32), by, frequency[:, None, None])
    query = jnp.where(counted[..., None, None], query, 0).reshape(B, T, K, N // K, D)
    new = jnp.sum(counted, axis=1).astype(jnp.float32)[:, None]  # [B, 1]
    before = state[0].value
    count = before + new
    new_mean = jnp.sum(query, axis=1) / jnp.maximum(new, 1)[..., None, None]
    change = new_mean - state[1].value
    share = (new / jnp.maximum(count, 1))[..., None, None]
    joined = [count, state[1].value + change * share]
    if len(state) == 3:
        highest = jax.lax.Precision.HIGHEST
        deviation = jnp.where(counted[..., None, None, None], query - new_mean[:, None], 0)
        products = jnp.einsum("btkgd,btkge->bkgde", deviation, deviation, precision=highest)
        between = jnp.einsum("bkgd,bkge->bkgde", change, change * before[..., None, None] * share)
        joined.append(state[2].value + products + between)
    return tuple(HeadState(x) for x in joined)


def _with_predicted_keys(state: Array, o: Observation, keys: Array) -> Float[Array, "B K S G dim"]:
    """Return the slots' predicted keys, with those of the block's tokens written to their slots."""
    B, T = o.query_position.shape
    _, K, _, G, dim = state.shape
    if keys.shape != (B, T, K * G, dim):
        raise ValueError(f"predicted keys {keys.shape} do not fit: expected {(B, T, K * G, dim)}.")
    return with_tokens(state, o, keys.reshape(B, T, K, G, dim))


def _turned_back(o: Observation, frequency: Float[Array, "rows half"], future: int) -> Float[Array, "B K S D"]:
    """Compute ``R'k``, where R is the rotation averaged over the coming positions: ``(R q) k = q (R'k)``."""
    coming = o.next_position[:, None] + jnp.arange(future, dtype=jnp.int32)[None]
    angle = coming[..., None].astype(frequency.dtype) * frequency[:, None]  # [B, future, D / 2]
    cos, sin = (jnp.mean(wave(angle), axis=1)[:, None, None] for wave in (jnp.cos, jnp.sin))
    return rotate(o.live_key, cos, -sin)
