"""From a prompt to an answer inside a fixed cache: prefill by blocks, then decode.

Blocks are aligned to the prompt's end: the first block of a row may be part empty, the last one never is. So a score's
observation window lies in one block, all rows of a batch reach their last token in the same step, and a row meets the
same blocks alone as in any batch. A question that must not be known when the context is compressed comes after it, in
blocks of its own.

A policy whose allocation gives all heads the same budget runs on a plain cache and evicts layer by layer. Any other
runs on a paged cache; its layers are observed first, and evicted from together. A selection evicts nothing: its decode
steps read a part of a full cache (models/guided.py).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

import kvjax
from kvjax import KVCache, OutputProjection, PagedCache, Policy
from kvjax.attention import idle_rows_keep, store_scores
from kvjax.checks import MOST, check_count, check_types, is_known, plain, shown
from kvjax.policy import policy_of
from kvjax.sources import Source
from models import guided
from models.butler import Butler
from models.config import Config
from models.decoder import Decoder, rope_frequencies
from models.guided import Beside, Cache, Guided, Selection

When = Literal["block", "prompt"]
HostOrDevice = Array | np.ndarray
PAGE_SIZE = 16


class Prefilled(NamedTuple):
    """``logits`` of the last token, [B, V], or of all tokens, [B, T, V]."""

    cache: Cache
    logits: Array


class Generation(NamedTuple):
    """``tokens`` [B, max_new_tokens], padded behind each row's end; ``lengths`` [B] counts them, end token included."""

    tokens: Int[Array, "B new"]
    cache: Cache
    lengths: Int[Array, "B"]


class Sampling(NamedTuple):
    """How the next token is chosen: greedy at temperature 0, else drawn from the ``top_k`` or ``top_p`` most likely."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What a run is made of, and its buffers' sizes; one compilation a plan."""

    policy: Policy | None
    slots: int  # of each head, at the end of the prompt and in decode; the most of one head where they differ
    prompt_slots: int  # likewise, while the prompt comes in
    when: When
    evict_every: int | None
    mesh: Mesh | AbstractMesh | None
    pages: int = 0  # of a paged cache
    page_size: int = PAGE_SIZE
    selection: Selection | None = None
    predictor_slots: int = 0  # of what is remembered beside the cache, where there is a predictor or a selection


class _Prompt(NamedTuple):
    """Prompts cut into blocks [n, B, m]: those of the context, and those of a question that comes after it."""

    tokens: np.ndarray
    positions: np.ndarray
    question_tokens: np.ndarray
    question_positions: np.ndarray


class _Rows(NamedTuple):
    """What the rows of a batch differ in, [B]: lengths, budgets, and what they hold in decode."""

    lengths: Int[Array, "B"]
    budgets: Int[Array, "B"] | None
    decode_budgets: Int[Array, "B"] | None


def prefill(
    model: Decoder,
    tokens: Int[HostOrDevice, "B T"],
    lengths: Int[HostOrDevice, "B"] | None = None,
    *,
    policy: Policy | str | None = None,
    budget: int | float | None = None,
    block: int = 128,
    when: When = "block",
    question: int | Int[HostOrDevice, "B"] | None = None,
    reserve: int = 0,
    outputs: Literal["last", "all"] = "last",
    page_size: int = PAGE_SIZE,
    projection: OutputProjection | None = None,
    butler: Butler | None = None,
) -> Prefilled:
    """Runs a prompt through the model block by block, in one compiled program whose memory does not grow with it.

    Args:
        tokens: prompts, padded on the right.
        lengths: how many tokens of each row count; all by default.
        policy: what to keep, a policy or its short name; None or "full" keeps all.
        budget: tokens that each head keeps: a number, or a ratio of the row's prompt (a float in (0, 1]).
        block: tokens a step.
        when: evict after every "block", or once when the "prompt" is in (the block then only bounds the activations).
        question: how many of each row's last tokens come only after the rest has been compressed; they are not
            evicted, so the cache holds that many tokens more than the budget. By default nothing is held back, and a
            policy that evicts once knows the question.
        reserve: slots to leave free for tokens that come later (a full cache only; a budget leaves a block's worth).
        outputs: logits of the "last" token or of "all" tokens; the latter grow with the prompt.
        page_size: slots of a page, where a policy's allocation gives heads different budgets.
        projection: what the policy reads of the output projections, ``output_projection(model, policy)``; made here if
            it isn't given, once a call.
        butler: the predictor that a policy such as ``butler+caote`` scores by.

    Returns:
        The cache and the logits, float32.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, a policy, budget or block that cannot be, or a
            prompt longer than the model's positions when nothing is evicted.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import models
        >>> config = models.Config(64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2)
        >>> model = models.Decoder(config, rngs=nnx.Rngs(0))
        >>> cache, logits = models.prefill(model, jnp.arange(40)[None], policy="h2o+caote", budget=16, block=8)
        >>> logits.shape, cache.num_live.min().item(), cache.num_live.max().item()
        ((1, 64), 16, 16)
    """
    tokens, counts, questions = _check_prompt(model, tokens, lengths, question)
    block = check_count("block", block, 1, "a block has at least 1 token")
    plan, rows = _plan(
        model.config, _mesh_of(model), tokens.shape[1], counts, questions, policy, budget, block, when, None, reserve,
        page_size, butler=butler,
    )  # fmt: skip
    if outputs not in ("last", "all"):
        raise ValueError(f"outputs is {outputs!r}; there are 'last' and 'all'.")
    prompt = _blocks(tokens, counts, questions, block)
    projection = output_projection(model, plan.policy) if projection is None else projection
    held, logits = _prefill(model, prompt, rows, projection, plan, outputs == "all", butler)
    if outputs == "all":  # [n, B, V] of every place in a block -> [B, T, V]
        place = np.zeros(tokens.shape, np.int32)
        positions = [x.swapaxes(0, 1).reshape(len(counts), -1) for x in (prompt.positions, prompt.question_positions)]
        for row, position in enumerate(np.concatenate(positions, axis=1)):
            place[row, position[position >= 0]] = np.flatnonzero(position >= 0)
        logits = jnp.take_along_axis(logits, jnp.asarray(place)[..., None], axis=1)
    return Prefilled(guided.inner(held), logits)


def generate(
    model: Decoder,
    tokens: Int[HostOrDevice, "B T"],
    *,
    lengths: Int[HostOrDevice, "B"] | None = None,
    policy: Policy | str | None = None,
    budget: int | float | None = None,
    block: int = 128,
    select: Source | str | None = None,
    butler: Butler | None = None,
    sinks: int = 4,
    max_new_tokens: int = 64,
    when: When = "block",
    question: int | Int[HostOrDevice, "B"] | None = None,
    evict_every: int | None = 1,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Array | None = None,
    end: tuple[int, ...] | None = None,
    page_size: int = PAGE_SIZE,
    projection: OutputProjection | None = None,
) -> Generation:
    """From prompts to answers in one compiled program: a scan over blocks, then a loop until each row has ended.

    Args:
        tokens, lengths, policy, budget, block, when, question, page_size, projection: see :func:`prefill`.
        select: instead of a policy, what says which tokens a decode step reads: a source of ``kvjax.sources`` or its
            short name, such as "butler", "oracle" or "quest(page_size=16)". Nothing is evicted, the prompt and layer 0
            are dense, and in the other layers each query head reads ``budget`` tokens (an int, or a share of those
            that the layer sees, rounded up) and the ``sinks`` first ones.
        butler: the predictor, for ``select="butler"`` and for policies that score by it, such as ``butler+caote``. It
            remembers every token: 2 r numbers of its own attention (r: E / 8, say) and, for a selection, a key for
            every predicted layer and head. A policy's keys leave with their tokens (:func:`kvjax.butler`).
        sinks: how many of the first tokens a selection always reads, on top of the budget.
        max_new_tokens: how many tokens at most.
        evict_every: evict in decode at every step (1), every n steps (n slots more a head), or never (None).
        temperature: 0 takes the most likely token; above, tokens are drawn with ``key``.
        top_k, top_p: draw only from the k most likely tokens, or from the fewest that hold the share p.
        end: tokens that end a row; the config's by default, () for none.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import models
        >>> config = models.Config(64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2)
        >>> model = models.Decoder(config, rngs=nnx.Rngs(0))
        >>> out = models.generate(model, jnp.arange(40)[None], policy="snapkv(window=8)", budget=16, block=8,
        ...                       max_new_tokens=4)
        >>> out.tokens.shape, out.lengths.tolist(), out.cache.num_live.max().item()
        ((1, 4), [4], 16)
    """
    tokens, counts, questions = _check_prompt(model, tokens, lengths, question)
    sampling = _check_sampling(temperature, top_k, top_p, key)
    max_new_tokens = check_count("max_new_tokens", max_new_tokens, 1, "ask for at least 1")
    block = check_count("block", block, 1, "a block has at least 1 token")
    plan, rows = _plan(
        model.config, _mesh_of(model), tokens.shape[1], counts, questions, policy, budget, block, when, evict_every,
        max_new_tokens, page_size, select=select, sinks=sinks, butler=butler,
    )  # fmt: skip
    if plan.selection is not None:
        questions = np.zeros_like(questions)  # nothing is compressed before they come
    prompt = _blocks(tokens, counts, questions, block)
    projection = output_projection(model, plan.policy) if projection is None else projection
    key = jax.random.key(0) if key is None else key
    end = _check_end(model.config, end)
    out = _generate(model, prompt, rows, projection, key, plan, sampling, max_new_tokens, end, butler)
    return out._replace(cache=guided.inner(out.cache))


def stream(
    model: Decoder,
    tokens: Int[HostOrDevice, "B T"],
    *,
    lengths: Int[HostOrDevice, "B"] | None = None,
    policy: Policy | str | None = None,
    budget: int | float | None = None,
    block: int = 128,
    select: Source | str | None = None,
    butler: Butler | None = None,
    sinks: int = 4,
    max_new_tokens: int = 64,
    when: When = "block",
    question: int | Int[HostOrDevice, "B"] | None = None,
    evict_every: int | None = 1,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Array | None = None,
    end: tuple[int, ...] | None = None,
    on_block: Callable[[int, int], None] | None = None,
    on_cache: Callable[[Cache], None] | None = None,
    page_size: int = PAGE_SIZE,
    projection: OutputProjection | None = None,
) -> Iterator[tuple[np.ndarray, Cache]]:
    """:func:`generate` as an iterator: yields each step's tokens as they come, and the cache behind them.

    The prompt is fed from the host block by block, so one compilation serves prompts of any length under a budget in
    slots (a full cache, a ratio, and ``when="prompt"`` have buffers that depend on it). Rows that have ended yield -1.
    A cache is good until the next step, which writes into it: look at it, or copy what you want to keep.

    Args:
        on_block: called after each block of the prompt with the tokens done and the tokens in all, for progress bars.
        on_cache: called before it with the cache, which is good until the call returns.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import models
        >>> config = models.Config(64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2)
        >>> model = models.Decoder(config, rngs=nnx.Rngs(0))
        >>> prompt = jnp.arange(40)[None]
        >>> steps = list(models.stream(model, prompt, policy="h2o", budget=16, block=8, max_new_tokens=4))
        >>> whole = models.generate(model, prompt, policy="h2o", budget=16, block=8, max_new_tokens=4)
        >>> [int(step[0]) for step, _ in steps] == whole.tokens[0].tolist()
        True
    """
    tokens, counts, questions = _check_prompt(model, tokens, lengths, question)
    sampling = _check_sampling(temperature, top_k, top_p, key)
    max_new_tokens = check_count("max_new_tokens", max_new_tokens, 1, "ask for at least 1")
    block = check_count("block", block, 1, "a block has at least 1 token")
    plan, rows = _plan(
        model.config, _mesh_of(model), tokens.shape[1], counts, questions, policy, budget, block, when, evict_every,
        max_new_tokens, page_size, fit_prompt=False, select=select, sinks=sinks, butler=butler,
    )  # fmt: skip
    if plan.selection is not None:
        questions = np.zeros_like(questions)  # nothing is compressed before they come
    prompt = _blocks(tokens, counts, questions, block)
    projection = output_projection(model, plan.policy) if projection is None else projection
    key = jax.random.key(0) if key is None else key
    end = _check_end(model.config, end)
    return _stream(
        model, prompt, rows, projection, key, plan, sampling, max_new_tokens, end, on_block, on_cache, butler
    )


def output_projection(model: Decoder, policy: Policy | str | None) -> OutputProjection | None:
    """What a policy reads of the model's output projections, for all layers; None if it reads nothing.

    Every run makes it anew unless it is handed over: N D^2 E multiplications a layer, the price of a few tokens.

    Example:
        >>> from flax import nnx
        >>> import models
        >>> config = models.Config(64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2)
        >>> model = models.Decoder(config, rngs=nnx.Rngs(0))
        >>> models.output_projection(model, "laprox@model").gram.shape
        (2, 2, 2, 8, 8)
    """
    policy = policy_of(policy)
    if policy is None or not policy.projections:
        return None
    heads = _cache_heads(model.config, policy)
    kinds = tuple(sorted(policy.projections))
    return jax.jit(kvjax.output_projection, static_argnums=(1, 2))(model.layers.output[...], heads, kinds)


def _stream(model, prompt, rows, projection, key, plan, sampling, max_new_tokens, end, on_block, on_cache, butler):
    cache = _empty_cache(model, plan, prompt.tokens.shape[1], butler)
    logits = jnp.zeros(())
    parts = ((prompt.tokens, prompt.positions, True), (prompt.question_tokens, prompt.question_positions, False))
    for tokens, positions, context in parts:
        for index, (block_tokens, position) in enumerate(zip(tokens, positions, strict=True)):
            if (position < 0).all():
                continue
            evicts = context and (plan.when == "block" or index == len(tokens) - 1)
            cache, newest = _block_step(
                model, cache, block_tokens, position, rows.lengths, rows.budgets, projection, plan.policy, evicts,
                decoding=not context, butler=butler,
            )  # fmt: skip
            logits = newest if context else _newest(position, newest, logits)
            if on_cache is not None:
                on_cache(guided.inner(cache))
            if on_block is not None:
                logits.block_until_ready()
                on_block(int(position.max()) + 1, int(rows.lengths.max()))
        if context:
            cache = _shrink_step(cache, plan)
    if not jnp.isfinite(logits).all():  # else every token would be the first of the vocabulary
        raise ValueError(
            f"the model's logits are NaN or infinite: its weights are not finite, or {model.embedding[...].dtype} is "
            "too narrow for it; load it in another dtype."
        )
    draws = sampling.temperature > 0  # greedy steps need no random numbers, and do not wait for any
    key, draw = jax.random.split(key) if draws else (key, key)
    token = np.asarray(_sample(logits, draw, sampling))
    finished = np.isin(token, end)
    yield token, guided.inner(cache)
    for step in range(1, max_new_tokens):
        if finished.all():
            return
        key, draw = jax.random.split(key) if draws else (key, key)
        cache, drawn = _token_step(
            model, cache, token, finished, rows, projection, draw, step, plan.policy, plan.evict_every, sampling, butler
        )
        token = np.asarray(drawn)
        yield np.where(finished, -1, token), guided.inner(cache)
        finished = finished | np.isin(token, end)


@functools.partial(jax.jit, static_argnames=("policy", "evicts", "decoding"), donate_argnames="cache")
def _block_step(
    model, cache, tokens, position, lengths, budgets, projection, policy, evicts, decoding=False, butler=None
):
    hidden, cache = _run(
        model, cache, tokens, position, lengths, budgets, projection, policy, evicts, decoding=decoding, butler=butler
    )
    return cache, model.logits(hidden[:, -1])


@functools.partial(jax.jit, static_argnames=("policy", "evict_every", "sampling"), donate_argnames="cache")
def _token_step(model, cache, token, finished, rows, projection, key, step, policy, evict_every, sampling, butler=None):
    logits, cache = _decode(model, cache, token, finished, rows, projection, step, policy, evict_every, butler)
    return cache, _sample(logits, key, sampling)


@functools.partial(jax.jit, static_argnames=("plan", "all_logits"))
def _prefill(model, prompt, rows, projection, plan, all_logits=False, butler=None):
    """Blocks [n, B, m] -> cache and logits, [B, V] or, of every place in the blocks, [B, n m, V]."""
    B = prompt.tokens.shape[1]
    cache = _empty_cache(model, plan, B, butler)

    def step(carry, scanned, evicts, decoding=False):
        cache, last = carry
        tokens, position = scanned
        hidden, cache = _run(
            model, cache, tokens, position, rows.lengths, rows.budgets, projection, plan.policy, evicts,
            decoding=decoding, butler=butler,
        )  # fmt: skip
        return (cache, _newest(position, hidden[:, -1], last)), model.logits(hidden) if all_logits else None

    observe = functools.partial(step, evicts=False)
    carry = (cache, jnp.zeros((B, model.config.hidden_size), model.embedding[...].dtype))
    blocks = (prompt.tokens, prompt.positions)
    if plan.when == "block":
        carry, logits = jax.lax.scan(functools.partial(step, evicts=True), carry, blocks)
        logits = [logits]
    else:
        carry, logits = jax.lax.scan(observe, carry, jax.tree.map(lambda x: x[:-1], blocks))
        carry, last = step(carry, jax.tree.map(lambda x: x[-1], blocks), evicts=True)
        logits = [logits, last[None]] if all_logits else []
    cache, hidden = carry
    carry = (_shrink(cache, plan), hidden)
    if prompt.question_tokens.shape[0]:
        question = (prompt.question_tokens, prompt.question_positions)
        carry, more = jax.lax.scan(functools.partial(observe, decoding=True), carry, question)
        logits.append(more)
    cache, hidden = carry
    if not all_logits:
        return cache, model.logits(hidden)
    return cache, jnp.concatenate([x.swapaxes(0, 1).reshape(B, -1, x.shape[-1]) for x in logits], axis=1)


def _newest(position: HostOrDevice, of_block: Float[Array, "B E"], before: Float[Array, "B E"]) -> Float[Array, "B E"]:
    """What the last token of each row gave: a row without one in this block, as without a question, keeps its own."""
    return jnp.where(position[:, -1:] >= 0, of_block, before)


@functools.partial(jax.jit, static_argnames=("plan", "sampling", "max_new_tokens", "end"))
def _generate(model, prompt, rows, projection, key, plan, sampling, max_new_tokens, end, butler=None):
    cache, logits = _prefill(model, prompt, rows, projection, plan, butler=butler)
    B = logits.shape[0]
    pad = model.config.pad if model.config.pad is not None else (model.config.eos or (0,))[0]
    key, draw = jax.random.split(key)
    token = _sample(logits, draw, sampling)
    out = jnp.full((B, max_new_tokens), pad, jnp.int32).at[:, 0].set(token)
    finished = jnp.isin(token, jnp.array(end, jnp.int32))

    def more(loop):
        step, *_, finished, _, _ = loop
        return (step < max_new_tokens) & ~finished.all()

    def advance(loop):
        step, cache, key, token, finished, out, count = loop
        logits, cache = _decode(
            model, cache, token, finished, rows, projection, step, plan.policy, plan.evict_every, butler
        )
        key, draw = jax.random.split(key)
        token = _sample(logits, draw, sampling)
        out = out.at[:, step].set(jnp.where(finished, pad, token))
        count = count + (~finished).astype(jnp.int32)
        finished = finished | jnp.isin(token, jnp.array(end, jnp.int32))
        return step + 1, cache, key, token, finished, out, count

    loop = (jnp.int32(1), cache, key, token, finished, out, jnp.ones(B, jnp.int32))
    _, cache, _, _, _, out, count = jax.lax.while_loop(more, advance, loop)
    return Generation(out, cache, count)


def _decode(model, cache, token, finished, rows, projection, step, policy, evict_every, butler=None):
    """Feeds one token a row; finished rows are left as they are."""
    position = jnp.where(finished, -1, cache.next_position)[:, None]
    budgets, excess = rows.decode_budgets, None
    if evict_every == 1:
        excess = 1
    elif evict_every is not None:
        budgets = jnp.where(step % evict_every == 0, budgets, cache.num_slots)
    evicts = evict_every is not None
    hidden, cache = _run(
        model, cache, token[:, None], position, rows.lengths, budgets, projection, policy, evicts, excess, True, butler
    )
    return model.logits(hidden[:, 0]), cache


def _run(
    model, held, tokens, position, lengths, budgets, projection, policy, evicts, excess=None, decoding=False,
    butler=None,
):  # fmt: skip
    """One block, or one decode step, of all layers; without ``evicts`` the policy only observes."""
    config = model.config
    cache, beside, selection, after_first = held, None, None, None
    if isinstance(held, Guided):
        cache, selection = held.cache, held.selection
        beside = Beside(held.butler, held.source)
        if butler is not None or decoding:
            after_first = guided.foresee(model, butler, tokens, position, keeps=selection is not None)
    frequency = None
    if policy is not None and (policy.rotary or policy.positions != "absolute"):
        frequency, _ = rope_frequencies(config.rope, config.head_dim, lengths)
    together = policy is not None and not policy.allocation.even

    def attend(carry, layer, sliding_window, query, key, value):
        cache, scores, measured, beside = carry
        if selection is not None:
            out, cache, beside = guided.attend(
                selection, cache, beside, query, key, value, position, layer, sliding_window, decoding
            )
            return out, (cache, scores, measured, beside), None
        settings = dict(
            policy=policy,
            budget=budgets,
            layer=layer,
            decoding=decoding,
            sliding_window=sliding_window,
            frequency=frequency,
            projection=None if projection is None else projection.layer(layer),
            predicted=guided.prediction(beside, butler, layer, tokens.shape),
        )
        if evicts and policy is not None and not together:
            out, cache = kvjax.attend(cache, query, key, value, position, excess=excess, **settings)
            return out, (cache, None, None, beside), None
        seen: Any  # None without a policy, but then there is nothing to store
        out, cache, seen = kvjax.observe(cache, query, key, value, position, **settings)
        if scores is not None:
            scores = store_scores(cache, scores, seen.scores, layer)
        if measured is not None:
            measured = measured.at[layer].set(seen.measured)
        return out, (cache, scores, measured, beside), None

    scores = measured = None
    if together and evicts:
        scores = jnp.full(cache.position.shape, -jnp.inf, jnp.float32)
        if policy.allocation.measure is not None:
            measured = jnp.zeros((config.num_layers, tokens.shape[0], policy.allocation.measures), jnp.float32)
    hook = None if after_first is None else lambda x, carry: (*carry[:3], after_first(x, carry[3]))
    hidden, (cache, scores, measured, beside), _ = model.run(
        tokens, position, lengths, attend, (cache, scores, measured, beside), after_first=hook
    )
    if scores is not None:
        cache = kvjax.evict(
            cache,
            scores,
            idle_rows_keep(budgets, position, cache),
            allocation=policy.allocation,
            measured=measured,
            entered=jnp.sum(position >= 0, axis=1),
        )
    if beside is None:
        return hidden, cache
    return hidden, Guided(cache, beside.butler, beside.source, selection)


def _cache_heads(config: Config, policy: Policy | None) -> int:
    """Heads of the cache: KV heads, or query heads where each has a cache of its own."""
    return config.num_heads if policy is not None and policy.heads == "query" else config.num_kv_heads


def _empty_cache(model: Decoder, plan: _Plan, batch: int, butler: Butler | None = None) -> Cache | Guided:
    cache = _empty_slots(model, plan, batch)
    if not plan.predictor_slots:
        return cache
    return guided.start(cache, plan.selection, butler, plan.predictor_slots)


def _empty_slots(model: Decoder, plan: _Plan, batch: int) -> Cache:
    config, policy = model.config, plan.policy
    heads = _cache_heads(config, policy)

    def init_state(B: int, K: int, S: int):
        return () if policy is None else policy.init(B, K, config.num_heads // heads, S, config.head_dim)

    sizes: dict[str, Any] = dict(
        batch=batch,
        kv_heads=heads,
        head_dim=config.head_dim,
        layers=config.num_layers,
        dtype=model.embedding[...].dtype,
        positions="absolute" if policy is None else policy.positions,
    )
    if plan.pages and plan.when == "block":
        return PagedCache.init(
            pages=plan.pages, page_size=plan.page_size, most=plan.slots, init_state=init_state, **sizes
        )
    zeros = init_state(batch, heads, plan.prompt_slots)
    state = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (config.num_layers, *leaf.shape)), zeros)
    cache = KVCache.init(slots=plan.prompt_slots, state=state, **sizes)
    mesh = plan.mesh
    if mesh is None:
        return cache

    def place(leaf: Array) -> Array:
        spec = PartitionSpec("data") if leaf.ndim == 1 else PartitionSpec(None, "data", "tensor")
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(place, cache)


def _shrink(cache: Any, plan: _Plan) -> Any:
    """Once the prompt has been evicted from, what is left of a cache that held all of it moves into a smaller one."""
    if isinstance(cache, Guided):
        return dataclasses.replace(cache, cache=_shrink(cache.cache, plan))
    if plan.when == "prompt" and plan.pages:
        return kvjax.pack(cache, pages=plan.pages, page_size=plan.page_size, most=plan.slots)
    return cache if plan.pages or plan.slots == plan.prompt_slots else kvjax.compact(cache, plan.slots)


_shrink_step = jax.jit(_shrink, static_argnames="plan")


def _sample(logits: Float[Array, "B V"], key: Array, sampling: Sampling) -> Int[Array, "B"]:
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    tiny = float(jnp.finfo(logits.dtype).tiny)
    temperature = min(max(sampling.temperature, tiny), 1 / tiny)  # XLA multiplies by 1 / temperature
    # Seen from the largest, as logits / temperature may be larger than any float; inf - inf would be none.
    largest = jnp.max(logits, axis=-1, keepdims=True)
    scaled = jnp.where(logits == largest, 0, (logits - largest) / temperature)
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    if sampling.top_k is not None or top_p < 1:
        # By the logits themselves, of equals the lower id first: a high temperature makes equals of others, too.
        rank = jnp.argsort(jnp.argsort(logits, axis=-1, descending=True), axis=-1)
    if sampling.top_k is not None:
        scaled = jnp.where(rank < sampling.top_k, scaled, -jnp.inf)
    if top_p < 1:
        descending = jnp.sort(jax.nn.softmax(scaled, axis=-1), axis=-1, descending=True)
        before = jnp.cumsum(descending, axis=-1) - descending
        needed = jnp.sum(before < top_p, axis=-1, keepdims=True)
        scaled = jnp.where(rank < jnp.maximum(needed, 1), scaled, -jnp.inf)
    return jax.random.categorical(key, scaled, axis=-1).astype(jnp.int32)


def _blocks(tokens: np.ndarray, lengths: np.ndarray, questions: np.ndarray, block: int) -> _Prompt:
    """Cuts prompts into blocks that end where the context ends, and the question into blocks that end where it ends.

    On the host: on the device each length of a prompt would compile again.
    """
    context = lengths - questions
    small = max(1, min(block, _question_room(questions)))
    return _Prompt(
        *_cut(tokens, np.zeros_like(context), context, math.ceil((tokens.shape[1] - questions.min()) / block), block),
        *_cut(tokens, context, lengths, math.ceil(questions.max() / small), small),
    )


def _question_room(questions: np.ndarray) -> int:
    """Slots for the longest question, a power of two: few sizes, so few compilations."""
    longest = int(questions.max())
    return _power_of_two(longest) if longest else 0


def _power_of_two(size: int) -> int:
    """The next one from ``size`` on."""
    return 1 << (size - 1).bit_length()


def _cut(
    tokens: np.ndarray, start: np.ndarray, stop: np.ndarray, count: int, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """``count`` blocks [n, B, m] of tokens[start:stop] and their positions; padding stands in front, at position -1."""
    B, T = tokens.shape
    position = np.arange(count * block)[None] - (count * block - stop[:, None])
    aligned = np.take_along_axis(tokens, np.clip(position, 0, T - 1), axis=1)
    position = np.where(position >= start[:, None], position, -1)
    blocks, positions = (x.astype(np.int32).reshape(B, count, block).swapaxes(0, 1) for x in (aligned, position))
    return blocks, positions


def _plan(
    config, mesh, T, lengths, questions, policy, budget, block, when, evict_every, reserve, page_size, fit_prompt=True,
    select=None, sinks=4, butler=None,
) -> tuple[_Plan, _Rows]:  # fmt: skip
    """Checks the arguments of a run and sizes its buffers. ``fit_prompt`` lets a short prompt have fewer slots."""
    reserve = check_count("reserve", reserve, 0, "give a number of slots, from 0")
    if when not in ("block", "prompt"):
        raise ValueError(f"when is {when!r}; there are 'block' and 'prompt'.")
    if evict_every is not None:
        evict_every = check_count("evict_every", evict_every, 1, "give a number of steps from 1, or None for never")
    page_size = check_count("page_size", page_size, 1, "a page has at least 1 slot")
    budget = plain(budget)
    rows = len(lengths)
    if mesh is not None and rows % mesh.shape["data"]:
        ways = mesh.shape["data"]
        raise ValueError(f"data={ways} does not divide the batch of {rows}; give a multiple of {ways} rows, or data=1.")
    policy = policy_of(policy)
    selection = guided.checked_selection(select, policy, budget, sinks, int(lengths.max()), reserve)
    guided.check_butler(config, butler, policy, selection)
    if policy is None:
        positions, most = T + reserve, config.max_positions
        if budget is not None and selection is None:
            raise ValueError(
                f"a budget of {budget} was given without a policy that says what to keep; try 'snapkv+caote'."
            )
        if positions > most:
            raise ValueError(
                f"the prompt and its answer take {positions} positions, but the model has {most}: "
                "shorten the prompt, or give a policy and a budget."
            )
        beside = 0 if selection is None else positions
        plan = _Plan(None, positions, positions, "block", None, mesh, selection=selection, predictor_slots=beside)
        return plan, _Rows(jnp.asarray(lengths), None, None)
    beside = 0
    if butler is not None:
        policy = kvjax.fit_predictor(policy, butler.config.dim)
        beside = T + reserve
        if not fit_prompt:  # few sizes, so few compilations
            beside = _power_of_two(beside)
    if budget is None:
        raise ValueError(f"the policy {policy.name!r} needs a budget: slots per head, or a ratio of the prompt.")
    if isinstance(budget, bool) or not isinstance(budget, int | float) or budget > MOST:
        raise ValueError(
            f"the budget is {shown(budget)}; give slots per head (an int), or a ratio (a float in (0, 1])."
        )
    if isinstance(budget, float) and not 0 < budget <= 1:
        raise ValueError(f"the budget's ratio is {budget}; give a float in (0, 1], or an int for slots per head.")
    if isinstance(budget, float):
        budgets = np.ceil(np.round(budget * lengths, 6)).astype(np.int32)  # 0.07 of 100 is 7, not 7.000000000000001
    else:
        budgets = np.full(lengths.shape, budget, np.int32)
    for row_budget in np.unique(budgets):
        kvjax.check_budget(policy, int(row_budget))
    kvjax.check_block(policy, block)
    largest, asked = int(budgets.max()), _question_room(questions)
    decode_room = reserve if evict_every is None else evict_every
    kept = _Rows(jnp.asarray(lengths), jnp.asarray(budgets), jnp.asarray(budgets + questions, jnp.int32))
    if when == "prompt":
        room, prompt_slots = decode_room, T - int(questions.min())
    else:
        room, prompt_slots = max(block, decode_room), 0
    # No more than all tokens are ever held. A stream's buffers do not depend on the prompt; they only stay sensible.
    sensible = max(_power_of_two(T + reserve), config.max_positions)
    most_slots = T + reserve if fit_prompt else sensible
    if policy.allocation.even:
        slots = min(largest + asked + room, sensible)
        if when == "prompt":
            slots, prompt_slots = (max(slots, prompt_slots),) * 2 if slots >= prompt_slots else (slots, prompt_slots)
        else:
            slots = min(slots, most_slots)
            prompt_slots = slots
        return _Plan(policy, slots, prompt_slots, when, evict_every, mesh, predictor_slots=beside), kept
    if mesh is not None:
        raise ValueError(
            f"{policy.name!r} shares one pool of pages among all heads, which lie on several devices here; take an "
            "allocation that gives all heads the same ('uniform'), or one device."
        )
    heads = config.num_layers * _cache_heads(config, policy)
    most = policy.allocation.most(config.num_layers, heads // config.num_layers, largest + asked) + room
    held = budgets + asked + room
    most, held = min(most, most_slots), np.minimum(held, most_slots)
    pages = kvjax.pages_for(heads * int(held.sum()), rows * heads, page_size)
    return _Plan(policy, most, prompt_slots, when, evict_every, mesh, pages, page_size, predictor_slots=beside), kept


def _mesh_of(model: Decoder) -> Mesh | AbstractMesh | None:
    sharding = getattr(model.embedding[...], "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None


def _check_prompt(
    model: Decoder, tokens: HostOrDevice, lengths: HostOrDevice | None, question: int | HostOrDevice | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if not isinstance(model, Decoder):
        raise ValueError(f"the model is a {type(model).__name__}; give a Decoder, such as models.load gives.")
    if not is_known(*jax.tree.leaves((tokens, lengths, question))):
        raise ValueError(
            "the prompt is traced (by jax.jit, vmap or grad), but it is cut into blocks on the host: call prefill, "
            "generate and stream outside, as they compile themselves; inside, kvjax.attend in model.run works."
        )
    try:
        host = np.asarray(tokens)
    except ValueError:
        raise ValueError("tokens are rows of different lengths; pad them on the right and give lengths=.") from None
    if host.ndim != 2 or not np.issubdtype(host.dtype, np.integer):
        raise ValueError(f"tokens are {host.dtype} {host.shape}; expected integers [B, T].")
    if host.size == 0:
        raise ValueError(f"the prompt is empty (tokens {host.shape}); give at least 1 token a row.")
    B, T = host.shape
    counts = np.full(B, T) if lengths is None else np.asarray(lengths)
    if not np.issubdtype(counts.dtype, np.integer) or counts.shape != (B,) or counts.min() < 1 or counts.max() > T:
        raise ValueError(f"lengths are {counts.tolist()}; expected {B} numbers from 1 (no empty prompt) to {T}.")
    counted = host[np.arange(T) < counts[:, None]]
    vocabulary = model.config.vocab_size
    if counted.min() < 0 or counted.max() >= vocabulary:
        wrong = counted.min() if counted.min() < 0 else counted.max()
        raise ValueError(f"token {wrong} is outside the vocabulary of {vocabulary}; was it made by another tokenizer?")
    questions = np.broadcast_to(np.asarray(0 if question is None else question), (B,))
    if not np.issubdtype(questions.dtype, np.integer) or questions.min() < 0 or (questions >= counts).any():
        raise ValueError(
            f"questions of {questions.tolist()} tokens were given for prompts of {counts.tolist()}; a question is the "
            "last part of its prompt, and some context must stand before it."
        )
    # The tokens stay on the host: on the device each length of a prompt would compile again.
    return host.astype(np.int32), counts.astype(np.int32), questions.astype(np.int32)


def _check_end(config: Config, end: tuple[int, ...] | None) -> tuple[int, ...]:
    if end is None:
        return config.eos
    if not isinstance(end, Iterable):
        raise ValueError(f"end is {shown(end)}; give a tuple of token ids, () for none.")
    return tuple(check_count("a token of end", token, 0, "give a tuple of token ids, () for none") for token in end)


def _check_sampling(temperature: float, top_k: int | None, top_p: float | None, key: Array | None) -> Sampling:
    given = dict(temperature=temperature, top_k=top_k, top_p=top_p)
    sampling = Sampling(**check_types(given, get_type_hints(Sampling)))
    if sampling.temperature < 0:
        raise ValueError(f"temperature is {temperature}; give 0 for the most likely token, or more to draw.")
    if sampling.top_k is not None:
        check_count("top_k", sampling.top_k, 1, "draw from at least 1 token")
    if sampling.top_p is not None and not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p is {top_p}; give a share in (0, 1].")
    if key is not None and not (hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        raise ValueError(f"key is a {type(key).__name__}; give a random key, jax.random.key(0), say.")
    if sampling.temperature > 0 and key is None:
        raise ValueError("temperature is above 0 but no key was given; pass key=jax.random.key(0), say.")
    return sampling
