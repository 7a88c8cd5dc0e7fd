"""From a prompt to an answer inside a fixed cache: prefill by blocks, then decode.

    prefill     the prompt alone
    generate    prompt and answer
    stream      prompt and answer, tokens as they come

`prefill` and `generate` are one compiled program each, except for large models on a CPU, where the host calls one
compiled layer after the other (models/by_layer.py says why). `stream` feeds blocks and tokens from the host.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import kvjax
from kvjax import OutputProjection, Policy
from kvjax.chains import policy_of
from kvjax.checks import check_count, is_known
from kvjax.schedule import HostOrDevice, Phase, Schedule, Stage, answer_copies, schedule
from models import hosts
from models.by_layer import LayerSteps, next_token, runs_by_layer
from models.decoder import Decoder
from models.layer_caches import AnyCache, stacked, stacked_up
from models.options import AnswerSettings, Options, PromptSettings, options_of
from models.plan import (
    CheckedPrompt,
    Plan,
    Prefilled,
    Sizes,
    Tokens,
    cache_heads,
    check_prompt,
    kept_of,
    overflowing,
    plan_run,
)
from models.sampling import Sampling, check_end, check_sampling, sample
from models.selecting import Cache
from models.states import settled, shrink, shrinks, start
from models.steps import DecodeState, Run, block_budgets, decode_phase, decode_positions, forward

OnBlock = Callable[[int, int, AnyCache], None]  # takes the tokens done, those of the prompt, and the cache


class Hidden(NamedTuple):
    """A cache and the ``hidden`` states of all tokens before the last norm, [B, T, E], for ``model.logits``."""

    cache: Cache
    hidden: Float[Array, "B T E"]


class Generation(NamedTuple):
    """``tokens`` [B, max_new_tokens], padded after each row's end; ``lengths`` [B] counts them, with the end token."""

    tokens: Int[Array, "B new"]
    cache: Cache
    lengths: Int[Array, "B"]


def prefill(
    model: Decoder,
    tokens: Tokens,
    lengths: Int[HostOrDevice, "B"] | None = None,
    *,
    options: Options | None = None,
    cache: AnyCache | None = None,
    question: int | Int[HostOrDevice, "B"] | None = None,
    outputs: Literal["last", "all"] = "last",
    **settings: Unpack[PromptSettings],
) -> Prefilled:
    """Run a prompt through the model block by block; under a budget in slots, memory does not grow with the prompt.

    Args:
        tokens: prompts, padded on the right, or a list of rows.
        lengths: how many tokens of each row count; all by default.
        options, settings: what to keep, and how; see :class:`Options`.
        cache: a cache that this function, :func:`generate`, :func:`stream` or ``kvjax.load_cache`` returned: the tokens
            follow those that it has seen. It is copied, so it may be given again; it has as many rows as ``tokens``
            (``kvjax.repeat``). The policy is the one that it was made with, or None to evict nothing more. It keeps its
            dtype, and its size if that is large enough.
        question: how many of each row's last tokens are fed only after the rest has been compressed; they are not
            evicted, so the cache holds that many tokens more than the budget. By default nothing is held back, and a
            policy that evicts once knows the question. With ``cache``, all tokens may be the question.
        outputs: logits of the "last" token or of "all" tokens. The latter grow with the prompt, much more than
            :func:`hidden_states`.

    Returns:
        The cache and the logits, float32.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, an invalid policy, budget or block, or a prompt
            longer than the model's positions when nothing is evicted.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import models
        >>> config = models.Config(
        ...     64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2
        ... )
        >>> model = models.Decoder(config, rngs=nnx.Rngs(0))
        >>> cache, logits = models.prefill(
        ...     model, jnp.arange(40)[None], policy="h2o+caote", budget=16, block=8
        ... )
        >>> logits.shape, cache.num_live.min().item(), cache.num_live.max().item()
        ((1, 64), 16, 16)
    """
    if outputs not in ("last", "all"):
        raise ValueError(f"outputs is {outputs!r}; expected 'last' or 'all'.")
    every = outputs == "all"
    options = options_of("prefill", PromptSettings, options, settings, evict_every=0)
    given = check_prompt(model, tokens, lengths, question, cache, options.policy)
    run, sizes, prompt = prepare(model, given, options, every)
    kept, hidden = _run_prompt(run, sizes, prompt, given, cache, every)
    logits = logits_of(model, hidden)
    return Prefilled(kept, logits if every else logits[:, 0])


def hidden_states(
    model: Decoder,
    tokens: Tokens,
    lengths: Int[HostOrDevice, "B"] | None = None,
    *,
    options: Options | None = None,
    cache: AnyCache | None = None,
    question: int | Int[HostOrDevice, "B"] | None = None,
    **settings: Unpack[PromptSettings],
) -> Hidden:
    """Run a prompt as :func:`prefill` does, and return the hidden states that the head computes all logits from.

    A vocabulary is some hundred times wider than the hidden states: compute the [B, T, V] logits a part at a time.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import models
        >>> config = models.Config(
        ...     64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2
        ... )
        >>> model = models.Decoder(config, rngs=nnx.Rngs(0))
        >>> cache, hidden = models.hidden_states(
        ...     model, jnp.arange(40)[None], policy="h2o", budget=16, block=8
        ... )
        >>> hidden.shape, model.logits(hidden[:, 8:16]).shape
        ((1, 40, 32), (1, 8, 64))
    """
    options = options_of("hidden_states", PromptSettings, options, settings, evict_every=0)
    given = check_prompt(model, tokens, lengths, question, cache, options.policy)
    run, sizes, prompt = prepare(model, given, options, every=True)
    return Hidden(*_run_prompt(run, sizes, prompt, given, cache, every=True))


def generate(
    model: Decoder,
    tokens: Tokens | Prefilled,
    *,
    options: Options | None = None,
    cache: AnyCache | None = None,
    lengths: Int[HostOrDevice, "B"] | None = None,
    question: int | Int[HostOrDevice, "B"] | None = None,
    key: Array | None = None,
    **settings: Unpack[AnswerSettings],
) -> Generation:
    """Generate answers to prompts: feed the prompt in blocks, then tokens until each row has ended.

    This is one compiled program, except for large layers on a CPU (models/by_layer.py).

    Args:
        tokens: prompts as :func:`prefill` takes them, or the result of :func:`prefill`: then only the answer is
            generated, under the same policy, budget and question.
        options, settings: what to keep, and how to answer; see :class:`Options`.
        cache, lengths, question: see :func:`prefill`. The last token of an answer is not in its cache: to continue from
            it, feed that token first.
        key: draws the tokens where the temperature is above 0.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import models
        >>> config = models.Config(
        ...     64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2
        ... )
        >>> model = models.Decoder(config, rngs=nnx.Rngs(0))
        >>> out = models.generate(
        ...     model, jnp.arange(40)[None], policy="snapkv(window=8)", budget=16,
        ...     block=8, max_new_tokens=4
        ... )
        >>> out.tokens.shape, out.lengths.tolist(), out.cache.num_live.max().item()
        ((1, 4), [4], 19)
    """
    options = _to_answer("generate", options, settings)
    given = check_prompt(model, tokens, lengths, question, cache, options.policy, answers=True)
    cache, logits = tokens if isinstance(tokens, Prefilled) else (cache, None)
    run, sizes, prompt = prepare(model, given, options)
    choice = _Choice.of(model, options, key)
    if runs_by_layer(run, key):
        return _generate_by_layer(LayerSteps(run, sizes), prompt, cache, logits, choice, key)
    state, out, count, finite = _generate(run, sizes, prompt, cache, logits, key if choice.draws else None, choice)
    if is_known(finite):
        check_finite(model, finite)
    return Generation(out, stacked_up(state.cache), count)


def stream(
    model: Decoder,
    tokens: Tokens | Prefilled,
    *,
    options: Options | None = None,
    cache: AnyCache | None = None,
    lengths: Int[HostOrDevice, "B"] | None = None,
    question: int | Int[HostOrDevice, "B"] | None = None,
    key: Array | None = None,
    on_block: OnBlock | None = None,
    **settings: Unpack[AnswerSettings],
) -> Iterator[tuple[np.ndarray, AnyCache]]:
    """Yield the tokens of each step of :func:`generate` as they come, with the cache after that step.

    The prompt is fed from the host block by block, so one compilation serves prompts of any length under a budget in
    slots (the buffers of a full cache, of a ratio, and of ``when="prompt"`` depend on the length). Rows that have ended
    yield -1. A cache is valid until the next step, which overwrites it: copy what you want to keep. The last cache
    stays valid. For large layers on a CPU it is a :class:`models.layer_caches.LayerCaches`, which is read in the same
    way; :func:`models.stacked` turns it into a cache for the functions of kvjax.

    Args:
        options, settings, cache, lengths, question, key: see :func:`generate`.
        on_block: called after each block of the prompt with the number of tokens done, that of all tokens, and the
            cache, which is valid until the call returns; for progress bars, and to look on.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import models
        >>> config = models.Config(
        ...     64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2
        ... )
        >>> model = models.Decoder(config, rngs=nnx.Rngs(0))
        >>> prompt = jnp.arange(40)[None]
        >>> steps = list(
        ...     models.stream(
        ...         model, prompt, policy="h2o", budget=16, block=8, max_new_tokens=4
        ...     )
        ... )
        >>> whole = models.generate(
        ...     model, prompt, policy="h2o", budget=16, block=8, max_new_tokens=4
        ... )
        >>> [int(step[0]) for step, _ in steps] == whole.tokens[0].tolist()
        True
    """
    options = _to_answer("stream", options, settings)
    options = dataclasses.replace(options, fit_prompt=bool(options.fit_prompt))
    given = check_prompt(model, tokens, lengths, question, cache, options.policy, answers=True)
    cache, logits = tokens if isinstance(tokens, Prefilled) else (cache, None)
    run, sizes, prompt = prepare(model, given, options)
    made = _tokens(steps_of(run, sizes), prompt, cache, logits, _Choice.of(model, options, key), key, on_block)
    return ((token, state.cache) for token, state in made)


def _to_answer(function: str, options: Options | None, settings: AnswerSettings) -> Options:
    """Return the options of a call that makes an answer, for which the cache has room."""
    options = options_of(function, AnswerSettings, options, settings)
    most = check_count("max_new_tokens", options.max_new_tokens, 1, "ask for at least 1")
    return dataclasses.replace(options, max_new_tokens=most, reserve=most)


def output_projection(model: Decoder, policy: Policy | str | None) -> OutputProjection | None:
    """Compute what a policy reads of the model's output projections, for all layers; None if it reads nothing.

    Every run computes it again unless it is given: N D^2 E multiplications per layer, the cost of a few tokens.

    Example:
        >>> from flax import nnx
        >>> import models
        >>> config = models.Config(
        ...     64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2
        ... )
        >>> model = models.Decoder(config, rngs=nnx.Rngs(0))
        >>> models.output_projection(model, "laprox@model").gram.shape
        (2, 2, 2, 8, 8)
    """
    policy = policy_of(policy)
    return None if policy is None else projected(model, policy.needs.projections, cache_heads(model.config, policy))


def projected(model: Decoder, kinds: frozenset[str], heads: int) -> OutputProjection | None:
    """Compute the given kinds of output projections for all layers and a cache of ``heads`` heads; None for no kind."""
    if not kinds:
        return None
    return _project(model.layers.output[...], heads, tuple(sorted(kinds)))


_project = jax.jit(kvjax.output_projection, static_argnums=(1, 2))


def run_question(model: Decoder, given: CheckedPrompt, options: Options, prefilled: Prefilled) -> Prefilled:
    """Feed the questions that were held back to the context's cache; rows without a question keep their logits.

    Args:
        given: the whole prompts.
    """
    asked, cache = given.questions, prefilled.cache
    if not asked.any():
        return prefilled
    place = (given.lengths - asked)[:, None] + np.arange(asked.max())
    tokens = np.take_along_axis(given.tokens, np.minimum(place, given.tokens.shape[1] - 1), axis=1)
    kept = kept_of(model, cache, policy_of(options.policy), len(asked))
    options = dataclasses.replace(options, projection=None, networks=None)
    run, sizes, prompt = prepare(model, CheckedPrompt(tokens, asked, asked, kept), options)
    state, hidden = _feed(run, sizes, prompt, cache)
    logits = jnp.where(asked[:, None] > 0, logits_of(model, hidden)[:, 0], prefilled.logits)
    return Prefilled(stacked_up(state.cache), logits)


def _feed(
    run: Run, sizes: Sizes, prompt: Schedule, cache: AnyCache | None, every: bool = False
) -> tuple[DecodeState, Array]:
    """Feed a prompt by layer or in one program, as the run requires; see :func:`prefill_at_once`."""
    if runs_by_layer(run):
        of_blocks: list[Array] = []
        state, last = _feed_prompt(LayerSteps(run, sizes), prompt, cache, on_hidden=of_blocks.append if every else None)
        return state, jnp.concatenate(of_blocks, axis=1) if every else last
    return prefill_at_once(run, sizes, prompt, cache, every)


def _run_prompt(
    run: Run, sizes: Sizes, prompt: Schedule, given: CheckedPrompt, cache: AnyCache | None, every: bool
) -> tuple[Cache, Float[Array, "B T E"]]:
    """Feed a prompt, and return the cache and the hidden states of each row's last token, [B, 1, E], or of all."""
    state, hidden = _feed(run, sizes, prompt, cache, every)
    if every:  # [B, n m, E] of every place in a block -> [B, T, E]
        place = np.zeros(given.tokens.shape, np.int32)
        positions = [np.swapaxes(step.positions, 0, 1).reshape(len(place), -1) for step in prompt.text]
        for row, position in enumerate(np.concatenate(positions, axis=1)):
            place[row, position[position >= 0] - given.start[row]] = np.flatnonzero(position >= 0)
        hidden = jnp.take_along_axis(hidden, jnp.asarray(place)[..., None], axis=1)
    return stacked_up(state.cache), hidden


class _Choice(NamedTuple):
    """Settings of an answer: the sampling, the most tokens, and the tokens that end a row."""

    sampling: Sampling
    most: int
    end: tuple[int, ...]

    @classmethod
    def of(cls, model: Decoder, options: Options, key: Array | None) -> _Choice:
        """Check the settings."""
        sampling = check_sampling(options.temperature, options.top_k, options.top_p, key)
        return cls(sampling, options.max_new_tokens, check_end(model.config, options.end))

    @property
    def draws(self) -> bool:
        return self.sampling.temperature > 0


def prepare(model: Decoder, given: CheckedPrompt, options: Options, every: bool = False) -> tuple[Run, Sizes, Schedule]:
    """Check a run's arguments, and return the run, the sizes of its buffers, and its prompts in blocks."""
    options = dataclasses.replace(options, block=check_count("block", options.block, 1, "a block has at least 1 token"))
    plan, sizes, rows, network = plan_run(model, given, options)
    if plan.selection is not None or not given.fed:
        given = given._replace(questions=np.zeros_like(given.questions))  # nothing is compressed before them
    projection = output_projection(model, plan.policy) if options.projection is None else options.projection
    run = Run(model, rows, projection, network, plan)
    # No spare blocks: a derivative needs a scan over all blocks, and with ``every`` each block returns hidden states.
    exact = every or not is_known(*jax.tree.leaves((model, projection, network)))
    return run, sizes, scheduled(given, options, run, exact)


def scheduled(given: CheckedPrompt, options: Options, run: Run, exact: bool = False) -> Schedule:
    """Return what a run feeds, in order."""
    plan, compresses, answers = run.plan, None, None
    if plan.repeats is not None:
        compresses, answers = overflowing(plan, given, options)
    return schedule(
        given.text, plan.policy, block=options.block, when=plan.when, compresses=compresses, answers=answers,
        overfull=plan.overfull, exact=exact,
    )  # fmt: skip


# One program: layers scanned, blocks and tokens in loops.


@functools.partial(jax.jit, static_argnames=("sizes", "every"))
def prefill_at_once(
    run: Run, sizes: Sizes, prompt: Schedule, cache: AnyCache | None, every: bool = False
) -> tuple[DecodeState, Array]:
    """Feed the prompt to the given cache, or to an empty one.

    Returns:
        The state, and the hidden states of the last token, [B, 1, E], or of every place in the blocks, [B, n m, E].
    """
    model, plan = run.model, run.plan
    B = run.rows.lengths.shape[0]
    state = start(run, sizes, B, None if cache is None else stacked(cache))
    carry: Any = (state, jnp.zeros((B, 1, model.config.hidden_size), model.embedding[...].dtype))
    of_places = []
    for turn, stages in enumerate(prompt):
        for stage in stages:
            carry, hidden = _over_rounds(run, stage, carry, every)
            of_places += [] if hidden is None else [hidden]
        if turn == 0:  # the context is in
            carry = (shrink(carry[0], plan, sizes), carry[1])
    state, last = carry
    if not every:
        return state, last
    return state, jnp.concatenate([x.swapaxes(0, 1).reshape(B, -1, x.shape[-1]) for x in of_places], axis=1)


def _over_rounds(run: Run, stage: Stage, carry: Any, every: bool) -> tuple[Any, Array | None]:
    """Scan all rounds of a stage, or loop over those that count if ``stage.used`` is given.

    A derivative keeps the cache before each round, and computes the activations of one round at a time again.
    """

    def round(carry, arrays):
        (state, last), of_text = carry, None
        for step, (tokens, position, part) in zip(stage.steps, arrays, strict=True):
            budgets = block_budgets(run.rows, step.phase)
            hidden, state = forward(run, state, tokens, position, budgets, step.phase, part)
            if part is None:
                last, of_text = _newest(position, hidden, last), hidden
        return (state, last), of_text if every else None

    arrays = jax.tree.map(jnp.asarray, tuple(step.arrays for step in stage.steps))
    if stage.used is None and len(stage.steps[0].tokens) == 1:
        carry, hidden = round(carry, jax.tree.map(lambda x: x[0], arrays))
        return carry, None if hidden is None else hidden[None]
    if stage.used is None:
        return jax.lax.scan(jax.checkpoint(round, prevent_cse=False), carry, arrays)

    def body(index, carry):
        return round(carry, jax.tree.map(lambda x: x[index], arrays))[0]

    return jax.lax.fori_loop(0, stage.used, body, carry), None


def _newest(
    position: Int[HostOrDevice, "B T"], of_block: Float[Array, "B T E"], before: Float[Array, "B 1 E"]
) -> Float[Array, "B 1 E"]:
    """Return the hidden state of each row's last token; a row without tokens in this block keeps the one before."""
    return jnp.where(position[:, -1:, None] >= 0, of_block[:, -1:], before)


@functools.partial(jax.jit, static_argnames=("sizes", "choice"))
def _generate(
    run: Run,
    sizes: Sizes,
    prompt: Schedule,
    cache: AnyCache | None,
    logits: Array | None,
    key: Array | None,
    choice: _Choice,
) -> tuple[DecodeState, Int[Array, "B new"], Int[Array, "B"], Array]:
    """Feed the prompt and generate: the state, the tokens, their number, and whether the first logits are finite.

    ``logits`` are those of the cache's last token, if the prompt is in the cache already.
    """
    state, hidden = prefill_at_once(run, sizes, prompt, cache)
    logits = run.model.logits(hidden[:, 0]) if logits is None else logits
    B, pad = logits.shape[0], _pad(run)
    key, draw = split_key(key)
    token = sample(logits, draw, choice.sampling)
    out = jnp.full((B, choice.most), pad, jnp.int32).at[:, 0].set(token)
    finished = jnp.isin(token, jnp.array(choice.end, jnp.int32))

    def more(loop):
        step, *_, finished, _, _ = loop
        return (step < choice.most) & ~finished.all()

    def advance(loop, phase):
        step, state, key, token, finished, out, count = loop
        key, draw = split_key(key)
        token, state = _token_step(run, state, token, finished, draw, phase, choice.sampling)
        out = out.at[:, step].set(jnp.where(finished, pad, token))
        count = count + (~finished).astype(jnp.int32)
        finished = finished | jnp.isin(token, jnp.array(choice.end, jnp.int32))
        return step + 1, state, key, token, finished, out, count

    def repeated(loop):
        _, _, _, _, ended, _, _ = loop
        step, state, *others = advance(loop, Phase(evicts=False, compressed=True))
        out = others[-2]
        answer = jax.lax.dynamic_slice_in_dim(out, step - 1 - run.plan.evict_every, run.plan.evict_every, axis=1)
        return step, repeat_answer(run, state, answer, ended), *others

    loop = (jnp.int32(1), state, key, token, finished, out, jnp.ones(B, jnp.int32))
    _, state, _, _, _, out, count = over_steps(run.plan, choice.most, more, advance, repeated, loop)
    return state, out, count, jnp.isfinite(logits).all()


def over_steps(
    plan: Plan,
    most: int,
    more: Callable[[Any], Array],
    advance: Callable[..., Any],
    repeated: Callable[[Any], Any],
    loop: Any,
) -> Any:
    """Loop over the decode steps, which the first entry of ``loop`` counts; those that evict are a separate loop.

    Args:
        repeated: a step after which the last tokens are repeated, and the policy evicts.
    """
    every = plan.evict_every
    observe, evict = decode_phase(plan, every + 1), decode_phase(plan, every)
    if not every or every >= most or (every == 1 and not plan.repeats):
        phase = evict if every == 1 else observe
        return jax.lax.while_loop(more, functools.partial(advance, phase=phase), loop)

    def round(loop):  # a branch would copy the cache
        due = lambda loop: loop[0] % every == 0  # noqa: E731
        last = repeated if plan.repeats else functools.partial(advance, phase=evict)
        loop = jax.lax.while_loop(lambda loop: more(loop) & ~due(loop), functools.partial(advance, phase=observe), loop)
        return jax.lax.while_loop(lambda loop: more(loop) & due(loop), last, loop)

    return jax.lax.while_loop(more, round, loop)


def repeat_answer(run: Run, state: DecodeState, answer: Int[Array, "B n"], ended: Bool[Array, "B"]) -> DecodeState:
    """Have the model repeat the last tokens that it has made, and evict; rows that have ended lose nothing."""
    assert run.plan.repeats is not None
    tokens, position, part = answer_copies(run.plan.repeats, answer, state.cache.next_position, ended, jnp)
    phase = Phase(evicts=True, compressed=True)
    return forward(run, state, tokens, position, run.rows.decode_budgets, phase, part)[1]


def _token_step(
    run: Run,
    state: DecodeState,
    token: Int[Array, "B"],
    finished: Array,
    key: Array | None,
    phase: Phase,
    sampling: Sampling,
) -> tuple[Int[Array, "B"], DecodeState]:
    position = decode_positions(finished, state.cache.next_position)
    hidden, state = forward(run, state, token[:, None], position, run.rows.decode_budgets, phase)
    return sample(run.model.logits(hidden[:, 0]), key, sampling), state


# Step by step: the host feeds blocks and tokens.


@functools.partial(jax.jit, static_argnames="phase", donate_argnames="state")
def block_step(
    run: Run,
    state: DecodeState,
    tokens: Int[Array, "B T"],
    position: Int[Array, "B T"],
    phase: Phase,
    part: Int[Array, "B 3"] | None = None,
) -> tuple[Float[Array, "B T E"], DecodeState]:
    return forward(run, state, tokens, position, block_budgets(run.rows, phase), phase, part)


token_step = jax.jit(_token_step, static_argnames=("phase", "sampling"), donate_argnames="state")
_shrink = jax.jit(shrink, static_argnames=("plan", "sizes"))
newest_of = jax.jit(_newest)


@functools.partial(jax.jit, static_argnames=("sizes", "batch"))
def _start(run: Run, sizes: Sizes, batch: int, cache: AnyCache | None) -> DecodeState:
    return start(run, sizes, batch, None if cache is None else stacked(cache))


class ProgramSteps:
    """The steps of a run, each one compiled program; on a CPU, ``by_layer.LayerSteps`` may be used instead."""

    def __init__(self, run: Run, sizes: Sizes):
        self.run, self.sizes = run, sizes

    def of(self, run: Run, sizes: Sizes) -> ProgramSteps:
        return ProgramSteps(run, sizes)

    def start(self, batch: int, cache: AnyCache | None = None) -> DecodeState:
        return _start(self.run, self.sizes, batch, cache)

    def block(
        self,
        state: DecodeState,
        tokens: np.ndarray,
        position: np.ndarray,
        phase: Phase,
        part: np.ndarray | None = None,
    ) -> tuple[Float[Array, "B T E"], DecodeState]:
        return block_step(self.run, state, tokens, position, phase._replace(filled=None), part)

    def shrink(self, state: DecodeState) -> DecodeState:
        if shrinks(state.cache, self.sizes):
            return _shrink(state, self.run.plan, self.sizes)
        return dataclasses.replace(state, cache=settled(state.cache, self.run.plan))

    def token(
        self, state: DecodeState, token: np.ndarray, finished: np.ndarray, key: Array | None, step: int,
        sampling: Sampling,
    ) -> tuple[Int[Array, "B"], DecodeState]:  # fmt: skip
        return token_step(self.run, state, token, finished, key, decode_phase(self.run.plan, step), sampling)


def steps_of(run: Run, sizes: Sizes) -> ProgramSteps | LayerSteps:
    """Return the steps of a run, as one program each or layer by layer."""
    return LayerSteps(run, sizes) if runs_by_layer(run) else ProgramSteps(run, sizes)


def _tokens(
    steps: ProgramSteps | LayerSteps,
    prompt: Schedule,
    cache: AnyCache | None,
    logits: Array | None,
    choice: _Choice,
    key: Array | None,
    on_block: OnBlock | None = None,
) -> Iterator[tuple[np.ndarray, DecodeState]]:
    """Yield each step's tokens as they come, -1 in rows that have ended, and the state after the step."""
    run = steps.run
    state, hidden = _feed_prompt(steps, prompt, cache, on_block)
    key, draw = split_key(key if choice.draws else None)
    if logits is None:
        chosen, finite = next_token(run.model, hidden, draw, choice.sampling)
    else:
        chosen, finite = sample(logits, draw, choice.sampling), jnp.isfinite(logits).all()
    token = hosts.fetched(chosen)
    check_finite(run.model, finite)
    finished = np.isin(token, choice.end)
    yield token, state
    every, fed = run.plan.evict_every, [token]  # those since the last eviction
    for step in range(1, choice.most):
        if finished.all():
            return
        key, draw = split_key(key)
        chosen, state = steps.token(state, token, finished, draw, step, choice.sampling)
        if run.plan.repeats is not None and every and step % every == 0:
            state = repeated_answer(steps, state, np.stack(fed[-every:], axis=1), finished)
        token = hosts.fetched(chosen)
        yield np.where(finished, -1, token), state
        finished = finished | np.isin(token, choice.end)
        fed = [*fed[1 - every :], token] if every else []


def repeated_answer(
    steps: ProgramSteps | LayerSteps, state: DecodeState, answer: Int[np.ndarray, "B n"], idle: Bool[np.ndarray, "B"]
) -> DecodeState:
    """Have the model repeat the last tokens of an answer, and evict; ``idle`` rows lose nothing."""
    assert steps.run.plan.repeats is not None
    end = hosts.fetched(state.cache.next_position)
    tokens, positions, part = answer_copies(steps.run.plan.repeats, answer, end, idle)
    return steps.block(state, tokens, positions, Phase(evicts=True, compressed=True), part)[1]


def _feed_prompt(
    steps: ProgramSteps | LayerSteps,
    prompt: Schedule,
    cache: AnyCache | None,
    on_block: OnBlock | None = None,
    on_hidden: Callable[[Float[Array, "B m E"]], None] | None = None,
) -> tuple[DecodeState, Float[Array, "B 1 E"]]:
    """Feed the prompt block by block, and return the state after it and the last hidden state of each row."""
    before = np.zeros(1, int) if cache is None else hosts.fetched(cache.next_position)
    total = int(np.max(np.asarray(steps.run.rows.lengths) - before))
    feeding = feed_blocks(steps, prompt, cache)
    while True:
        try:
            fed = next(feeding)
        except StopIteration as end:
            return end.value
        if fed is None:
            continue
        cached, hidden, position = fed
        if on_hidden is not None:
            on_hidden(hidden)
        if on_block is not None:
            hidden.block_until_ready()
            on_block(int(np.max(np.where(position < 0, 0, position + 1 - before[:, None]))), total, cached)


def feed_blocks(
    steps: ProgramSteps | LayerSteps, prompt: Schedule, cache: AnyCache | None = None
) -> Generator[
    tuple[AnyCache, Float[Array, "B m E"], np.ndarray] | None, None, tuple[DecodeState, Float[Array, "B 1 E"]]
]:
    """Feed one block of the prompt per ``next``.

    Yields:
        After each block of the text the cache, valid until the next block, its hidden states, and its positions. Where
        copies of the text follow, this comes behind them, and None before.

    Returns:
        The state after the prompt, and the last hidden state of each row.
    """
    run, fed = steps.run, 0
    B = run.rows.lengths.shape[0]
    state = steps.start(B, cache)
    last: Any = np.zeros((B, 1, run.model.config.hidden_size), run.model.embedding[...].dtype)
    for turn, stages in enumerate(prompt):
        blocks, of_text = [block for stage in stages for block in stage], None
        for number, (phase, tokens, position, part) in enumerate(blocks):
            if turn == 0 and cache is None and part is None:  # slots are filled in order
                fed += position.shape[1]
                phase = phase._replace(filled=filled_slots(fed, steps.sizes.prompt_slots))
            hidden, state = steps.block(state, tokens, position, phase, part)
            if part is None:
                last, of_text = newest_of(position, hidden, last), (hidden, position)
            copied = number + 1 < len(blocks) and blocks[number + 1][-1] is not None
            yield None if copied or of_text is None else (state.cache, *of_text)
        if turn == 0:  # the context is in
            state = steps.shrink(state)
    return state, last


def filled_slots(fed: int, slots: int) -> int | None:
    """Return how many slots ``fed`` tokens may fill, rounded up to quarters of all slots; None for all of them."""
    step = max(-(-slots // 4), 256)
    filled = -(-fed // step) * step
    return filled if filled < slots else None


def _generate_by_layer(
    steps: LayerSteps,
    prompt: Schedule,
    cache: AnyCache | None,
    logits: Array | None,
    choice: _Choice,
    key: Array | None,
) -> Generation:
    run = steps.run
    B, pad = run.rows.lengths.shape[0], _pad(run)
    out, count, last = np.full((B, choice.most), pad, np.int32), np.zeros(B, np.int32), None
    for step, (token, state) in enumerate(_tokens(steps, prompt, cache, logits, choice, key)):
        out[:, step] = np.where(token < 0, pad, token)
        count += token >= 0
        last = state
    assert last is not None
    out, count = jax.device_put((out, count))
    return Generation(out, stacked_up(last.cache), count)


@jax.jit
def logits_of(model: Decoder, hidden: Float[Array, "*rest E"]) -> Float[Array, "*rest V"]:
    return model.logits(hidden)


def check_finite(model: Decoder, finite: Array) -> None:
    """Check that the logits are finite: with others, every token would be the first of the vocabulary."""
    if not finite:
        raise ValueError(
            f"the model's logits are NaN or infinite: its weights are not finite, or {model.embedding[...].dtype} is "
            "too narrow for it; load it in another dtype."
        )


def split_key(key: Array | None) -> tuple[Array | None, Array | None]:
    if key is None:
        return None, None
    key, draw = jax.random.split(key)
    return key, draw


def _pad(run: Run) -> int:
    config = run.model.config
    return config.pad if config.pad is not None else (config.eos or (0,))[0]
