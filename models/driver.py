"""A run from its prompt to its answer: blocks and tokens fed from the host, or all of it inside one program.

Both ways feed the same schedule by :func:`models.steps.forward`. From the host, each block and each token is one
compiled program; on a CPU it is one for each layer (:func:`by_layer`). In one program blocks are scanned, and tokens
made in a loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax._src.capacity import CacheSpec
from kvjax._src.checks import is_known
from kvjax._src.split_cache import ModelCache
from kvjax.schedule import HostOrDevice, Phase, Schedule, Stage, answer_copies
from models import hosts
from models.config import Config
from models.decoder import Decoder, logits_from
from models.options import Options
from models.prompts import CheckedPrompt, tokens_seen
from models.sampling import Draws, Sampling, check_end, check_sampling, sample
from models.states import shrink, start
from models.steps import DecodeState, Run, Weights, decode_phase, decode_positions, forward, weights_of

OnBlock = Callable[[int, int, ModelCache], None]  # takes the tokens done, those of the prompt, and the cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Choice:
    """Settings of an answer: the sampling, the most tokens, and the tokens that end a row."""

    sampling: Sampling
    most: int = dataclasses.field(metadata=dict(static=True))
    end: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))


def choice_of(
    model: Decoder, options: Options, key: Array | Draws | None, prompt: CheckedPrompt
) -> tuple[Choice, Draws]:
    """Check the settings of an answer, and return them with what its first choice of a token needs."""
    key, seen = key if isinstance(key, Draws) else Draws(key)
    sampling = check_sampling(key, **{name: getattr(options, name) for name in Sampling._fields})
    end = model.config.eos if options.end is None else check_end(options.end)
    draws = Draws(
        None if sampling.temperature is None else key,
        None if sampling.repetition_penalty is None else tokens_seen(model, prompt, seen),
    )
    return Choice(sampling, options.max_new_tokens, end), draws


def by_layer(run: Run, key: Array | None = None) -> bool:
    """Return whether the host calls each layer: on one CPU, outside a caller's jit, grad and vmap.

    A program of all layers takes as many times longer to compile as there are layers, and a CPU waits for no call.
    """
    # Under jit the run's lengths are traced even where its model is not.
    leaves = jax.tree.leaves((run, key))
    if not all(isinstance(leaf, jax.Array) for leaf in leaves) or not is_known(*leaves):
        return False
    devices = run.model.embedding[...].devices()
    return run.plan.mesh is None and len(devices) == 1 and {device.platform for device in devices} == {"cpu"}


# From the host.


@functools.partial(jax.jit, static_argnames="phase", donate_argnames="state")
def block_step(
    run: Run,
    state: DecodeState,
    tokens: Int[Array, "B T"],
    position: Int[Array, "B T"],
    phase: Phase,
    part: Int[Array, "B 3"] | None = None,
) -> tuple[Float[Array, "B T E"], DecodeState]:
    """Feed a block in one program."""
    return forward(run, state, tokens, position, phase, part)


@functools.partial(jax.jit, static_argnames="phase", donate_argnames="state")
def token_step(
    run: Run,
    state: DecodeState,
    token: Int[Array, "B"],
    finished: Bool[Array, "B"],
    draws: Draws,
    phase: Phase,
    sampling: Sampling,
) -> tuple[DecodeState, Int[Array, "B"], Draws]:
    """Feed one token per row and choose the next ones in one program.

    The state comes first: JAX gives donated arrays to outputs of their shape in order, each layer's to that layer.
    """
    position = decode_positions(finished, state.cache.next_position)
    hidden, state = forward(run, state, token[:, None], position, phase)
    token, draws = sample(run.model.logits(hidden[:, 0]), draws, sampling)
    return state, token, draws


@functools.partial(jax.jit, static_argnames="config")
def next_token(
    config: Config, ends: dict[str, Array], hidden: Float[Array, "B T E"], draws: Draws, sampling: Sampling
) -> tuple[Int[Array, "B"], Draws, Array]:
    """Choose each row's next token from its last hidden state; return the next draws, and whether logits are finite."""
    logits = logits_from(config, ends, hidden[:, -1])
    return *sample(logits, draws, sampling), jnp.isfinite(logits).all()


_positions = jax.jit(decode_positions)


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps of a run, called from the host; with ``layers``, the model's weights, layer by layer."""

    run: Run
    sizes: CacheSpec
    layers: Weights | None = None

    @classmethod
    def of(cls, run: Run, sizes: CacheSpec, key: Array | None = None) -> Steps:
        """Return the steps of a run, layer by layer where :func:`by_layer` says so."""
        return cls(run, sizes, weights_of(run.model) if by_layer(run, key) else None)

    def start(self, batch: int, cache: ModelCache | None = None) -> DecodeState:
        """Return the first state; a given cache is copied."""
        return _start(self.run, self.sizes, batch, cache)

    def block(
        self,
        state: DecodeState,
        tokens: HostOrDevice,
        position: HostOrDevice,
        phase: Phase,
        part: np.ndarray | None = None,
    ) -> tuple[Float[Array, "B T E"], DecodeState]:
        """Feed a block; the given state is donated."""
        if self.layers is None:
            return block_step(self.run, state, tokens, position, phase._replace(filled=None), part)
        return forward(self.run, state, tokens, position, phase, part, self.layers)

    def fed(
        self, state: DecodeState, token: np.ndarray, finished: np.ndarray, step: int
    ) -> tuple[Float[Array, "B 1 E"], DecodeState]:
        """Feed one token per row; the given state is donated."""
        position = _positions(finished, state.cache.next_position)
        return self.block(state, token[:, None], position, decode_phase(self.run.plan, step))

    def token(
        self, state: DecodeState, token: np.ndarray, finished: np.ndarray, draws: Draws, step: int, sampling: Sampling
    ) -> tuple[Int[Array, "B"], DecodeState, Draws]:
        """Feed one token per row and choose the next ones; the given state is donated."""
        if self.layers is None:
            phase = decode_phase(self.run.plan, step)
            state, chosen, draws = token_step(self.run, state, token, finished, draws, phase, sampling)
            return chosen, state, draws
        model, (hidden, state) = self.run.model, self.fed(state, token, finished, step)
        chosen, draws, _ = next_token(model.config, model.ends(), hidden, draws, sampling)
        return chosen, state, draws

    def repeated(self, state: DecodeState, answer: Int[np.ndarray, "B n"], idle: Bool[np.ndarray, "B"]) -> DecodeState:
        """Have the model repeat the last tokens of an answer, and evict; ``idle`` rows lose nothing."""
        assert self.run.plan.repeats is not None
        end = hosts.fetched(state.cache.next_position)
        tokens, positions, part = answer_copies(self.run.plan.repeats, answer, end, idle)
        return self.block(state, tokens, positions, Phase(evicts=True, compressed=True), part)[1]


@functools.partial(jax.jit, static_argnames=("sizes", "batch"))
def _start(run: Run, sizes: CacheSpec, batch: int, cache: ModelCache | None) -> DecodeState:
    return start(run, sizes, batch, jax.tree.map(jnp.copy, cache))  # else the given arrays would be donated later


def tokens_of(
    steps: Steps,
    prompt: Schedule,
    cache: ModelCache | None,
    logits: Array | None,
    choice: Choice,
    draws: Draws,
    on_block: OnBlock | None = None,
) -> Iterator[tuple[np.ndarray, DecodeState]]:
    """Yield each step's tokens as they come, -1 in rows that have ended, and the state after the step."""
    model = steps.run.model
    state, hidden = feed_prompt(steps, prompt, cache, on_block)
    if logits is None:
        chosen, draws, finite = next_token(model.config, model.ends(), hidden, draws, choice.sampling)
    else:
        (chosen, draws), finite = sample(logits, draws, choice.sampling), jnp.isfinite(logits).all()
    token = hosts.fetched(chosen)
    check_finite(model, finite)
    finished = np.isin(token, choice.end)
    yield token, state
    every = steps.run.plan.evict_every if steps.run.plan.repeats is not None else 0
    fed = [token]  # what the model repeats at the next eviction
    for step in range(1, choice.most):
        if finished.all():
            return
        chosen, state, draws = steps.token(state, token, finished, draws, step, choice.sampling)
        if every and step % every == 0:
            state = steps.repeated(state, np.stack(fed, axis=1), finished)
        token = hosts.fetched(chosen)
        yield np.where(finished, -1, token), state
        finished = finished | np.isin(token, choice.end)
        fed = [*fed, token][-every:] if every else []


def feed_prompt(
    steps: Steps,
    prompt: Schedule,
    cache: ModelCache | None,
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
    steps: Steps, prompt: Schedule, cache: ModelCache | None = None
) -> Generator[
    tuple[ModelCache, Float[Array, "B m E"], np.ndarray] | None, None, tuple[DecodeState, Float[Array, "B 1 E"]]
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
                phase = phase._replace(filled=None if state.cache.paged else fed)
            hidden, state = steps.block(state, tokens, position, phase, part)
            if part is None:
                last, of_text = newest(position, hidden, last), (hidden, position)
            copied = number + 1 < len(blocks) and blocks[number + 1][-1] is not None
            yield None if copied or of_text is None else (state.cache, *of_text)
        if turn == 0:  # the context is in
            state = shrink(state, run.plan, steps.sizes)
    return state, last


def check_finite(model: Decoder, finite: Array) -> None:
    """Check that the logits are finite, where it is known: else every token would be the first of the vocabulary."""
    if is_known(finite) and not finite:
        raise ValueError(
            f"the model's logits are NaN or infinite: its weights are not finite, or {model.embedding[...].dtype} is "
            "too narrow for it; load it in another dtype."
        )


@jax.jit
def newest(
    position: Int[HostOrDevice, "B T"], of_block: Float[Array, "B T E"], before: Float[Array, "B 1 E"]
) -> Float[Array, "B 1 E"]:
    """Return the hidden state of each row's last token; a row without tokens in this block keeps the one before."""
    return jnp.where(position[:, -1:, None] >= 0, of_block[:, -1:], before)


# Inside one program.


@functools.partial(jax.jit, static_argnames=("sizes", "every"))
def prefill_at_once(
    run: Run, sizes: CacheSpec, prompt: Schedule, cache: ModelCache | None, every: bool = False
) -> tuple[DecodeState, Array]:
    """Feed the prompt to the given cache, or to an empty one.

    Returns:
        The state, and the hidden states of the last token, [B, 1, E], or of every place in the blocks, [B, n m, E].
    """
    B = run.rows.lengths.shape[0]
    state = start(run, sizes, B, cache)
    carry: Any = (state, jnp.zeros((B, 1, run.model.config.hidden_size), run.model.embedding[...].dtype))
    of_places = []
    for turn, stages in enumerate(prompt):
        for stage in stages:
            carry, hidden = _over_rounds(run, stage, carry, every)
            of_places += [] if hidden is None else [hidden]
        if turn == 0:  # the context is in
            carry = (shrink(carry[0], run.plan, sizes), carry[1])
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


@functools.partial(jax.jit, static_argnames="sizes")
def generate_at_once(
    run: Run,
    sizes: CacheSpec,
    prompt: Schedule,
    cache: ModelCache | None,
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
        state, token, draws = token_step(run, state, token, finished, draws, phase, choice.sampling)
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
        answer = jax.lax.dynamic_slice_in_dim(tokens, step - 1 - every, every, axis=1)
        assert run.plan.repeats is not None
        copies, position, part = answer_copies(run.plan.repeats, answer, state.cache.next_position, ended, jnp)
        _, state = forward(run, state, copies, position, Phase(evicts=True, compressed=True), part)
        return step, state, *others

    loop = jax.lax.while_loop(lambda loop: more(loop) & ~due(loop), observe, loop)
    return jax.lax.while_loop(lambda loop: more(loop) & due(loop), repeated if run.plan.repeats else evict, loop)


def pad_of(run: Run) -> int:
    """Return the token behind the end of an answer."""
    config = run.model.config
    return config.pad if config.pad is not None else (config.eos or (0,))[0]
