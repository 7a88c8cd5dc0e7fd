"""A run as one program: layers scanned, blocks and tokens in loops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.schedule import HostOrDevice, Phase, Schedule, Stage, answer_copies
from models.decoder import Decoder
from models.layer_caches import AnyCache, stacked
from models.options import Options
from models.plan import Sizes
from models.prompts import CheckedPrompt, tokens_seen
from models.sampling import Draws, Sampling, check_end, check_sampling, sample
from models.states import shrink, start
from models.steps import DecodeState, Run, decode_phase, decode_positions, forward


class Choice(NamedTuple):
    """Settings of an answer: the sampling, the most tokens, and the tokens that end a row."""

    sampling: Sampling
    most: int
    end: tuple[int, ...]


def choice_of(
    model: Decoder, options: Options, key: Array | Draws | None, prompt: CheckedPrompt
) -> tuple[Choice, Draws]:
    """Check the settings of an answer, and return them with what its first choice of a token needs."""
    key, seen = key if isinstance(key, Draws) else Draws(key)
    sampling = check_sampling(key, **{name: getattr(options, name) for name in Sampling._fields})
    end = model.config.eos if options.end is None else check_end(options.end)
    draws = Draws(
        key if sampling.temperature > 0 else None,
        tokens_seen(model, prompt, seen) if sampling.repetition_penalty != 1 else None,
    )
    return Choice(sampling, options.max_new_tokens, end), draws


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
    if not every:
        return carry
    return carry[0], jnp.concatenate([x.swapaxes(0, 1).reshape(B, -1, x.shape[-1]) for x in of_places], axis=1)


def _over_rounds(run: Run, stage: Stage, carry: Any, every: bool) -> tuple[Any, Array | None]:
    """Scan all rounds of a stage, or loop over those that count if ``stage.used`` is given.

    A derivative keeps the cache before each round, and computes the activations of one round at a time again.
    """

    def round(carry, arrays):
        (state, last), of_text = carry, None
        for step, (tokens, position, part) in zip(stage.steps, arrays, strict=True):
            hidden, state = forward(run, state, tokens, position, step.phase, part)
            if part is None:
                last, of_text = newest(position, hidden, last), hidden
        return (state, last), of_text if every else None

    arrays = jax.tree.map(jnp.asarray, tuple(step.arrays for step in stage.steps))
    if stage.used is None:
        return _over_all(round, carry, arrays)

    def body(index, carry):
        return round(carry, jax.tree.map(lambda x: x[index], arrays))[0]

    return jax.lax.fori_loop(0, stage.used, body, carry), None


def _over_all(round: Callable[..., Any], carry: Any, arrays: Any) -> Any:
    if len(jax.tree.leaves(arrays)[0]) != 1:
        return jax.lax.scan(jax.checkpoint(round, prevent_cse=False), carry, arrays)
    carry, hidden = round(carry, jax.tree.map(lambda x: x[0], arrays))
    return carry, None if hidden is None else hidden[None]


def newest(
    position: Int[HostOrDevice, "B T"], of_block: Float[Array, "B T E"], before: Float[Array, "B 1 E"]
) -> Float[Array, "B 1 E"]:
    """Return the hidden state of each row's last token; a row without tokens in this block keeps the one before."""
    return jnp.where(position[:, -1:, None] >= 0, of_block[:, -1:], before)


@functools.partial(jax.jit, static_argnames=("sizes", "choice"))
def generate_at_once(
    run: Run,
    sizes: Sizes,
    prompt: Schedule,
    cache: AnyCache | None,
    logits: Array | None,
    draws: Draws,
    choice: Choice,
) -> tuple[DecodeState, Int[Array, "B new"], Int[Array, "B"], Array]:
    """Feed the prompt and generate: the state, the tokens, their number, and whether the first logits are finite.

    ``logits`` are those of the cache's last token, if the prompt is in the cache already.
    """
    state, hidden = prefill_at_once(run, sizes, prompt, cache)
    logits = run.model.logits(hidden[:, 0]) if logits is None else logits
    B, pad = logits.shape[0], pad_of(run)
    token, draws = sample(logits, draws, choice.sampling)
    out = jnp.full((B, choice.most), pad, jnp.int32).at[:, 0].set(token)
    finished = jnp.isin(token, jnp.array(choice.end, jnp.int32))

    def more(loop):
        step, *_, finished, _, _ = loop
        return (step < choice.most) & ~finished.all()

    def advance(loop, phase):
        step, state, draws, token, finished, out, count = loop
        token, state, draws = next_step(run, state, token, finished, draws, phase, choice.sampling)
        out = out.at[:, step].set(jnp.where(finished, pad, token))
        count = count + (~finished).astype(jnp.int32)
        finished = finished | jnp.isin(token, jnp.array(choice.end, jnp.int32))
        return step + 1, state, draws, token, finished, out, count

    loop = (jnp.int32(1), state, draws, token, finished, out, jnp.ones(B, jnp.int32))
    made = lambda before, after: (after[5], before[4])  # noqa: E731
    _, state, _, _, _, out, count = over_steps(run, choice.most, more, advance, made, loop)
    return state, out, count, jnp.isfinite(logits).all()


def over_steps(
    run: Run, most: int, more: Callable[[Any], Array], advance: Callable[..., Any], made: Callable[..., Any], loop: Any
) -> Any:
    """Loop over the decode steps; ``loop`` begins with the number of the next step, from 1, and the state.

    ``made`` returns the tokens so far, [B, n], and which rows have ended, from ``loop`` before and after a step.
    """
    every = run.plan.evict_every
    if not every or every >= most or (every == 1 and not run.plan.repeats):
        return jax.lax.while_loop(more, functools.partial(advance, phase=decode_phase(run.plan, 1)), loop)
    return jax.lax.while_loop(more, functools.partial(_to_eviction, run, more, advance, made), loop)


def _to_eviction(
    run: Run, more: Callable[[Any], Array], advance: Callable[..., Any], made: Callable[..., Any], loop: Any
) -> Any:
    """Loop over the steps up to one that evicts, and that one: two loops, as a branch would copy the cache."""
    every = run.plan.evict_every
    observe, evict = (functools.partial(advance, phase=decode_phase(run.plan, step)) for step in (every + 1, every))
    due = lambda loop: loop[0] % every == 0  # noqa: E731

    def repeated(before: Any) -> Any:
        step, state, *others = after = observe(before)
        tokens, ended = made(before, after)
        newest = jax.lax.dynamic_slice_in_dim(tokens, step - 1 - every, every, axis=1)
        return step, repeat_answer(run, state, newest, ended), *others

    loop = jax.lax.while_loop(lambda loop: more(loop) & ~due(loop), observe, loop)
    return jax.lax.while_loop(lambda loop: more(loop) & due(loop), repeated if run.plan.repeats else evict, loop)


def repeat_answer(run: Run, state: DecodeState, answer: Int[Array, "B n"], ended: Bool[Array, "B"]) -> DecodeState:
    """Have the model repeat the last tokens that it has made, and evict; rows that have ended lose nothing."""
    assert run.plan.repeats is not None
    tokens, position, part = answer_copies(run.plan.repeats, answer, state.cache.next_position, ended, jnp)
    phase = Phase(evicts=True, compressed=True)
    return forward(run, state, tokens, position, phase, part)[1]


def next_step(
    run: Run,
    state: DecodeState,
    token: Int[Array, "B"],
    finished: Array,
    draws: Draws,
    phase: Phase,
    sampling: Sampling,
) -> tuple[Int[Array, "B"], DecodeState, Draws]:
    position = decode_positions(finished, state.cache.next_position)
    hidden, state = forward(run, state, token[:, None], position, phase)
    token, draws = sample(run.model.logits(hidden[:, 0]), draws, sampling)
    return token, state, draws


def pad_of(run: Run) -> int:
    config = run.model.config
    return config.pad if config.pad is not None else (config.eos or (0,))[0]
