"""From a prompt to an answer inside a fixed cache: prefill by blocks, then decode.

`prefill` and `generate` are one compiled program each, except on a CPU, where the host calls one compiled layer after
the other (models/driver.py). `stream` feeds blocks and tokens from the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvjax
from kvjax import OutputProjection, Policy
from kvjax._src.capacity import CacheSpec
from kvjax._src.chains import policy_of
from kvjax._src.checks import is_known
from kvjax._src.split_cache import ModelCache
from kvjax.schedule import HostOrDevice, Schedule, Text, schedule
from models.decoder import Decoder, output_of_heads
from models.driver import (
    Choice,
    OnBlock,
    Steps,
    check_finite,
    choice_of,
    feed_prompt,
    generate_at_once,
    pad_of,
    prefill_at_once,
    tokens_of,
)
from models.options import AnswerSettings, Options, PromptSettings, options_of
from models.planning import overflowing, plan_run
from models.progress import Progress
from models.prompts import CheckedPrompt, Prefilled, Tokens, cache_heads, check_prompt, kept_of
from models.sampling import Draws
from models.steps import DecodeState, Run


class Hidden(NamedTuple):
    """A cache and the ``hidden`` states of all tokens before the last norm, [B, T, E], for ``model.logits``."""

    cache: ModelCache
    hidden: Float[Array, "B T E"]


class Generation(NamedTuple):
    """``tokens`` [B, max_new_tokens], padded after each row's end; ``lengths`` [B] counts them, with the end token."""

    tokens: Int[Array, "B new"]
    cache: ModelCache
    lengths: Int[Array, "B"]


def prefill(
    model: Decoder,
    tokens: Tokens,
    *,
    lengths: Int[HostOrDevice, "B"] | None = None,
    options: Options | None = None,
    cache: ModelCache | None = None,
    question: int | Int[HostOrDevice, "B"] | None = None,
    **settings: Unpack[PromptSettings],
) -> Prefilled:
    """Run a prompt through the model block by block; under a budget in slots, memory does not grow with the prompt.

    Args:
        tokens: prompts, padded on the right, or a list of rows. Where the cache follows the prompt's length, it follows
            what the rows are padded to: calls of one width share their programs.
        lengths: how many tokens of each row count; all by default.
        options, settings: what to keep, and how; see :class:`Options`.
        cache: a cache that this function, :func:`generate`, :func:`stream` or ``kvjax.load_cache`` returned: the tokens
            follow those that it has seen. It is copied, so it may be given again; it has as many rows as ``tokens``
            (``kvjax.repeat``). The policy is the one that it was made with, or None to evict nothing more. It keeps its
            dtype, and its size if that is large enough.
        question: how many of each row's last tokens are fed only after the rest has been compressed; they are not
            evicted, so the cache holds that many tokens more than the budget. By default nothing is held back, and a
            policy that evicts once knows the question. With ``cache``, all tokens may be the question.

    Returns:
        The cache and the logits of each row's last token, float32; for those of others see :func:`hidden_states`.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, an invalid policy, budget or block, or a prompt
            longer than the model's positions when nothing is evicted.

    Example:
        >>> import models
        >>> model = models.Decoder.tiny()
        >>> cache, logits = models.prefill(
        ...     model, [range(40)], policy="h2o+caote", budget=16, block=8
        ... )
        >>> logits.shape, cache.num_live.min().item(), cache.num_live.max().item()
        ((1, 64), 16, 16)
    """
    options = options_of("prefill", PromptSettings, options, settings, evict_every=0)
    given = check_prompt(model, tokens, lengths, question, cache, options.policy)
    run, sizes, prompt = prepare(model, given, options)
    state, hidden = _feed(run, sizes, prompt, cache)
    return Prefilled(state.cache, logits_of(model, hidden)[:, 0])


def hidden_states(
    model: Decoder,
    tokens: Tokens,
    *,
    lengths: Int[HostOrDevice, "B"] | None = None,
    options: Options | None = None,
    cache: ModelCache | None = None,
    question: int | Int[HostOrDevice, "B"] | None = None,
    **settings: Unpack[PromptSettings],
) -> Hidden:
    """Run a prompt as :func:`prefill` does, and return the hidden states that the head computes all logits from.

    A vocabulary is some hundred times wider than the hidden states: compute the [B, T, V] logits a part at a time.

    Example:
        >>> import models
        >>> model = models.Decoder.tiny()
        >>> cache, hidden = models.hidden_states(
        ...     model, [range(40)], policy="h2o", budget=16, block=8
        ... )
        >>> hidden.shape, model.logits(hidden[:, 8:16]).shape
        ((1, 40, 32), (1, 8, 64))
    """
    options = options_of("hidden_states", PromptSettings, options, settings, evict_every=0)
    given = check_prompt(model, tokens, lengths, question, cache, options.policy)
    run, sizes, prompt = prepare(model, given, options, every=True)
    state, hidden = _feed(run, sizes, prompt, cache, every=True)
    place = np.zeros(given.text.tokens.shape, np.int32)  # of each token among the places of all blocks
    positions = [np.swapaxes(step.positions, 0, 1).reshape(len(place), -1) for step in prompt.text]
    for row, position in enumerate(np.concatenate(positions, axis=1)):
        place[row, position[position >= 0] - given.text.start[row]] = np.flatnonzero(position >= 0)
    return Hidden(state.cache, jnp.take_along_axis(hidden, jnp.asarray(place)[..., None], axis=1))


def generate(
    model: Decoder,
    tokens: Tokens | Prefilled,
    *,
    options: Options | None = None,
    cache: ModelCache | None = None,
    lengths: Int[HostOrDevice, "B"] | None = None,
    question: int | Int[HostOrDevice, "B"] | None = None,
    key: Array | Draws | None = None,
    **settings: Unpack[AnswerSettings],
) -> Generation:
    """Generate answers to prompts: feed the prompt in blocks, then tokens until each row has ended.

    This is one compiled program, except on a CPU (models/driver.py), or with ``progress``.

    Args:
        tokens: prompts as :func:`prefill` takes them, or the result of :func:`prefill`: then only the answer is
            generated, under the same policy, budget and question.
        options, settings: what to keep, and how to answer; see :class:`Options`.
        cache, lengths, question: see :func:`prefill`. The last token of an answer is not in its cache: to continue from
            it, feed that token first.
        key: draws the tokens where the temperature is above 0. :class:`Draws` says with it what a cache has seen.

    Example:
        >>> import models
        >>> model = models.Decoder.tiny()
        >>> out = models.generate(
        ...     model, [range(40)], policy="snapkv(window=8)", budget=16, block=8,
        ...     max_new_tokens=4
        ... )
        >>> out.tokens.shape, out.lengths.tolist(), out.cache.num_live.max().item()
        ((1, 4), [4], 19)
    """
    options = options_of("generate", AnswerSettings, options, settings)
    options = dataclasses.replace(options, reserve=options.max_new_tokens)
    given = check_prompt(model, tokens, lengths, question, cache, options.policy, answers=True)
    cache, logits = tokens if isinstance(tokens, Prefilled) else (cache, None)
    run, sizes, prompt = prepare(model, given, options)
    choice, draws = choice_of(model, options, key, given)
    steps = Steps.of(run, sizes, draws.key)
    if steps.layers is not None or options.progress:
        return _collected(steps.run, choice, _shown(steps, prompt, cache, logits, choice, draws, options.progress))
    state, out, count, finite = generate_at_once(run, sizes, prompt, cache, logits, draws, choice)
    check_finite(model, finite)
    return Generation(out, state.cache, count)


def stream(
    model: Decoder,
    tokens: Tokens | Prefilled,
    *,
    options: Options | None = None,
    cache: ModelCache | None = None,
    lengths: Int[HostOrDevice, "B"] | None = None,
    question: int | Int[HostOrDevice, "B"] | None = None,
    key: Array | Draws | None = None,
    on_block: OnBlock | None = None,
    **settings: Unpack[AnswerSettings],
) -> Iterator[tuple[np.ndarray, ModelCache]]:
    """Yield the tokens of each step of :func:`generate` as they come, with the cache after that step.

    The prompt is fed from the host block by block, so one compilation serves prompts of any length under a budget in
    slots (the buffers of a full cache, of a ratio, and of ``when="prompt"`` depend on the length). Rows that have ended
    yield -1. A cache is valid until the next step, which overwrites it: copy what you want to keep. The last cache
    stays valid.

    Args:
        options, settings, cache, lengths, question, key: see :func:`generate`.
        on_block: called after each block of the prompt with the number of tokens done, that of all tokens, and the
            cache, which is valid until the call returns; for progress bars, and to look on.

    Example:
        >>> import models
        >>> model, prompts = models.Decoder.tiny(), [range(40)]
        >>> steps = models.stream(
        ...     model, prompts, policy="tova", budget=16, block=8, max_new_tokens=4
        ... )
        >>> [cache.num_live.max().item() for tokens, cache in steps]
        [16, 16, 16, 16]
    """
    options = options_of("stream", AnswerSettings, options, settings)
    options = dataclasses.replace(options, reserve=options.max_new_tokens)
    given = check_prompt(model, tokens, lengths, question, cache, options.policy, answers=True)
    cache, logits = tokens if isinstance(tokens, Prefilled) else (cache, None)
    run, sizes, prompt = prepare(model, given, options)
    choice, draws = choice_of(model, options, key, given)
    made = _shown(Steps.of(run, sizes), prompt, cache, logits, choice, draws, options.progress, on_block)
    return ((token, state.cache) for token, state in made)


def output_projection(model: Decoder, policy: Policy | str | None) -> tuple[OutputProjection, ...] | None:
    """Compute what a policy reads of the model's output projections, for each layer; None if it reads nothing.

    Every run computes it again unless it is given: N D^2 E multiplications per layer, the cost of a few tokens.

    Example:
        >>> import models
        >>> model = models.Decoder.tiny()
        >>> [own.joint.shape for own in models.output_projection(model, "laprox")]
        [(2, 8, 8), (2, 8, 8)]
    """
    policy = policy_of(policy)
    if policy is None or not policy.needs.projections:
        return None
    return projections(model, policy.needs.projections, cache_heads(model.config, policy))


def projections(model: Decoder, kinds: frozenset[str], heads: int) -> tuple[OutputProjection, ...]:
    """Compute the given kinds of output projections for each layer and a cache of at most ``heads`` heads."""
    config, kinds_of = model.config, tuple(sorted(kinds))
    of_groups = heads == cache_heads(config, None)  # else each query head has its own cache
    each = (own if of_groups else heads for own, _ in config.cached_heads)
    return tuple(_project(weight, own, kinds_of) for weight, own in zip(output_of_heads(model), each, strict=True))


_project = jax.jit(kvjax.output_projection, static_argnums=(1, 2))


def run_question(model: Decoder, given: CheckedPrompt, options: Options, prefilled: Prefilled) -> Prefilled:
    """Feed the questions that were held back to the context's cache; rows without a question keep their logits."""
    text, cache = given.text, prefilled.cache
    asked = text.questions
    if not asked.any():
        return prefilled
    place = text.context[:, None] + np.arange(asked.max())
    tokens = np.take_along_axis(text.tokens, np.minimum(place, text.tokens.shape[1] - 1), axis=1)
    kept = kept_of(model, cache, policy_of(options.policy), len(asked))
    held_back = CheckedPrompt(Text(tokens, asked, asked, kept.start, kept.pending), kept)
    options = dataclasses.replace(options, projection=None, networks=None)
    run, sizes, prompt = prepare(model, held_back, options)
    state, hidden = _feed(run, sizes, prompt, cache)
    logits = jnp.where(asked[:, None] > 0, logits_of(model, hidden)[:, 0], prefilled.logits)
    return Prefilled(state.cache, logits)


def _feed(
    run: Run, sizes: CacheSpec, prompt: Schedule, cache: ModelCache | None, every: bool = False
) -> tuple[DecodeState, Array]:
    """Feed a prompt by layer or in one program, as the run requires; see :func:`prefill_at_once`."""
    steps = Steps.of(run, sizes)
    if steps.layers is not None:
        of_blocks: list[Array] = []
        state, last = feed_prompt(steps, prompt, cache, on_hidden=of_blocks.append if every else None)
        return state, jnp.concatenate(of_blocks, axis=1) if every else last
    return prefill_at_once(run, sizes, prompt, cache, every)


def prepare(
    model: Decoder, given: CheckedPrompt, options: Options, every: bool = False
) -> tuple[Run, CacheSpec, Schedule]:
    """Check a run's arguments, and return the run, the sizes of its buffers, and its prompts in blocks."""
    run, sizes = plan_run(model, given, options)
    plan, text = run.plan, given.text
    if plan.selection is not None or not given.fed:  # nothing is compressed before the questions
        given = given._replace(text=text._replace(questions=np.zeros_like(text.questions)))
    if run.projection is None and plan.policy is not None and plan.policy.needs.projections:
        run = dataclasses.replace(run, projection=projections(model, plan.policy.needs.projections, plan.heads))
    # No spare blocks: a derivative needs a scan over all blocks, and with ``every`` each block returns hidden states.
    exact = every or not is_known(*jax.tree.leaves((model, run.projection, run.network)))
    return run, sizes, scheduled(given, options, run, exact)


def scheduled(given: CheckedPrompt, options: Options, run: Run, exact: bool = False) -> Schedule:
    """Return what a run feeds, in order."""
    overflows = None if run.plan.repeats is None else overflowing(run.plan, given, options)
    when: Any = dict(when=run.plan.when, overflows=overflows, overfull=run.plan.overfull)
    when["reading"] = run.rows.reading_budgets is not None
    return schedule(given.text, run.plan.policy, block=options.block, exact=exact, **when)


def _shown(
    steps: Steps,
    prompt: Schedule,
    cache: ModelCache | None,
    logits: Array | None,
    choice: Choice,
    draws: Draws,
    progress: bool,
    on_block: OnBlock | None = None,
) -> Iterator[tuple[np.ndarray, DecodeState]]:
    """Yield what :func:`models.driver.tokens_of` does, and show how far it is if ``progress`` says so."""
    with Progress(quiet=not progress) as shown:

        def note(done: int, total: int, cached: ModelCache) -> None:
            shown.at("reading", done, total, "token")
            if on_block is not None:
                on_block(done, total, cached)

        # Without progress nobody need wait for a block.
        made = tokens_of(steps, prompt, cache, logits, choice, draws, note if progress else on_block)
        for step, token in enumerate(made, 1):
            shown.at("answering", step, choice.most, "token")
            yield token


def _collected(run: Run, choice: Choice, made: Iterator[tuple[np.ndarray, DecodeState]]) -> Generation:
    """Return the tokens of all steps as one answer."""
    B, pad = run.rows.lengths.shape[0], pad_of(run)
    out, count, last = np.full((B, choice.most), pad, np.int32), np.zeros(B, np.int32), None
    for step, (token, state) in enumerate(made):
        out[:, step] = np.where(token < 0, pad, token)
        count += token >= 0
        last = state
    assert last is not None
    out, count = jax.device_put((out, count))
    return Generation(out, last.cache, count)


@jax.jit
def logits_of(model: Decoder, hidden: Float[Array, "*rest E"]) -> Float[Array, "*rest V"]:
    return model.logits(hidden)
