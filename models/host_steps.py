"""A run step by step: the host feeds blocks and tokens, each of which is one compiled program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.checks import is_known
from kvjax.schedule import Phase, Schedule, answer_copies
from models import hosts
from models.by_layer import LayerSteps, next_token, runs_by_layer
from models.decoder import Decoder
from models.layer_caches import AnyCache, stacked
from models.one_program import Choice, newest, next_step
from models.plan import Sizes
from models.sampling import Draws, Sampling, sample
from models.states import settled, shrink, shrinks, start
from models.steps import DecodeState, Run, decode_phase, forward

OnBlock = Callable[[int, int, AnyCache], None]  # takes the tokens done, those of the prompt, and the cache


@functools.partial(jax.jit, static_argnames="phase", donate_argnames="state")
def block_step(
    run: Run,
    state: DecodeState,
    tokens: Int[Array, "B T"],
    position: Int[Array, "B T"],
    phase: Phase,
    part: Int[Array, "B 3"] | None = None,
) -> tuple[Float[Array, "B T E"], DecodeState]:
    return forward(run, state, tokens, position, phase, part)


token_step = jax.jit(next_step, static_argnames=("phase", "sampling"), donate_argnames="state")
_shrink = jax.jit(shrink, static_argnames=("plan", "sizes"))
newest_of = jax.jit(newest)


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
        self, state: DecodeState, tokens: np.ndarray, position: np.ndarray, phase: Phase, part: np.ndarray | None = None
    ) -> tuple[Float[Array, "B T E"], DecodeState]:
        return block_step(self.run, state, tokens, position, phase._replace(filled=None), part)

    def shrink(self, state: DecodeState) -> DecodeState:
        if shrinks(state.cache, self.sizes):
            return _shrink(state, self.run.plan, self.sizes)
        return dataclasses.replace(state, cache=settled(state.cache, self.run.plan))

    def token(
        self, state: DecodeState, token: np.ndarray, finished: np.ndarray, draws: Draws, step: int, sampling: Sampling
    ) -> tuple[Int[Array, "B"], DecodeState, Draws]:
        return token_step(self.run, state, token, finished, draws, decode_phase(self.run.plan, step), sampling)


def steps_of(run: Run, sizes: Sizes) -> ProgramSteps | LayerSteps:
    """Return the steps of a run, as one program each or layer by layer."""
    return LayerSteps(run, sizes) if runs_by_layer(run) else ProgramSteps(run, sizes)


def tokens_of(
    steps: ProgramSteps | LayerSteps,
    prompt: Schedule,
    cache: AnyCache | None,
    logits: Array | None,
    choice: Choice,
    draws: Draws,
    on_block: OnBlock | None = None,
) -> Iterator[tuple[np.ndarray, DecodeState]]:
    """Yield each step's tokens as they come, -1 in rows that have ended, and the state after the step."""
    run = steps.run
    state, hidden = feed_prompt(steps, prompt, cache, on_block)
    if logits is None:
        chosen, draws, finite = next_token(run.model, hidden, draws, choice.sampling)
    else:
        (chosen, draws), finite = sample(logits, draws, choice.sampling), jnp.isfinite(logits).all()
    token = hosts.fetched(chosen)
    check_finite(run.model, finite)
    finished = np.isin(token, choice.end)
    yield token, state
    every, fed = run.plan.evict_every, [token]  # those since the last eviction
    for step in range(1, choice.most):
        if finished.all():
            return
        chosen, state, draws = steps.token(state, token, finished, draws, step, choice.sampling)
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


def feed_prompt(
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


def check_finite(model: Decoder, finite: Array) -> None:
    """Check that the logits are finite, where it is known: else every token would be the first of the vocabulary."""
    if is_known(finite) and not finite:
        raise ValueError(
            f"the model's logits are NaN or infinite: its weights are not finite, or {model.embedding[...].dtype} is "
            "too narrow for it; load it in another dtype."
        )
