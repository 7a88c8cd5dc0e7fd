"""Decode steps and blocks of a prompt as `models` compiles them, started as if after a prompt of any length.

A step is timed without feeding its prompt: keys and values are drawn at random, and each head holds tokens at places
spread over the whole prompt, in random order. The cost of a step does not depend on the values. Where a prompt is fed,
it goes through :func:`models.stream`.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int

import kvjax
import models
from benchmarks import measure
from kernels_pallas.order_tokens.reference import by_position
from kvjax._src.cache import PARTS, Entries, map_parts
from kvjax._src.order import Ranked
from kvjax.schedule import Phase, Text
from models.config import Config
from models.options import PAGE_SIZE, Options
from models.parameters import array_shapes
from models.planning import plan_run
from models.prompts import CheckedPrompt
from models.states import start
from models.steps import DecodeState, Run, decode_phase, forward

Kind = Literal["decode", "block"]
# A policy is timed whatever answers it gives.
UNWARNED = functools.partial(warnings.catch_warnings, action="ignore", category=UserWarning)


class Setting(NamedTuple):
    """A case. Without a policy nothing is evicted; the cache holds ``budget`` tokens, or with None the prompt."""

    config: Config
    policy: str | None
    budget: int | None
    batch: int = 1
    block: int = 128
    dtype: DTypeLike = jnp.float32
    page_size: int = PAGE_SIZE

    def held(self, prompt: int) -> int:
        """Return the tokens that each head holds after a prompt."""
        return prompt if self.budget is None else min(self.budget, prompt)


def unbounded(config: Config) -> Config:
    """Return the shape with room for any prompt: a full cache may be longer here than the model's own limit."""
    return dataclasses.replace(config, max_positions=2**30)


def dtype_here() -> DTypeLike:
    """Return bfloat16 on an accelerator, and float32 on a CPU, whose compiler turns bfloat16 into float32 copies."""
    return jnp.bfloat16 if measure.on_accelerator() else jnp.float32


def abstract_model(config: Config, dtype: DTypeLike) -> models.Decoder:
    """Return a decoder of abstract arrays, with room for any prompt."""
    config = unbounded(config)
    shapes = {name: jax.ShapeDtypeStruct(size, dtype) for name, size in array_shapes(config).items()}
    return jax.eval_shape(lambda arrays: models.Decoder(config, arrays), shapes)


def random_model(config: Config, dtype: DTypeLike, *, free: float) -> models.Decoder:
    """Return a decoder with random weights, the same in all layers, and with room for any prompt."""
    needed = measure.tree_bytes(abstract_model(config, dtype))
    measure.check_fits(needed, "the model", free)
    return models.Decoder(unbounded(config), random_arrays(config, dtype))


def random_arrays(config: Config, dtype: DTypeLike) -> dict[str, Array]:
    """Return a decoder's arrays of random weights, the same in all layers: drawing those of one takes a CPU seconds."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def draw(key: Array, size: tuple[int, ...], layers: bool) -> Array:
        return jnp.broadcast_to(0.02 * jax.random.normal(key, size[layers:], dtype), size)

    return {
        name: jnp.ones(size, dtype)
        if name.endswith("norm")
        else draw(jax.random.key(number), size, name.startswith("layers."))
        for number, (name, size) in enumerate(array_shapes(config).items())
    }


def shapes(setting: Setting, prompt: int) -> tuple[Run, DecodeState]:
    """Return a setting's run as `models` plans it, and its state, with abstract arrays; nothing is allocated."""
    keeps = setting.policy is None
    length = setting.held(prompt) if keeps else prompt
    prompts = CheckedPrompt(Text.of(np.zeros((setting.batch, length), np.int8)))
    options = Options(
        setting.policy, None if keeps else setting.budget, setting.block, evict_every=0 if keeps else 1,
        page_size=setting.page_size, reserve=setting.block,
    )  # fmt: skip
    model = abstract_model(setting.config, setting.dtype)
    with UNWARNED():
        run, sizes = plan_run(model, prompts, options)
    projection = jax.eval_shape(functools.partial(models.output_projection, policy=run.plan.policy), model)
    run = dataclasses.replace(run, projection=projection)
    return run, jax.eval_shape(lambda r: start(r, sizes, setting.batch), run)


def check_fits(setting: Setting, prompt: int, free: float) -> None:
    """Raise :class:`benchmarks.measure.DoesNotFit` if weights and cache alone take more memory than is free."""
    run, state = shapes(setting, prompt)
    needed = measure.tree_bytes((run.model, state.cache))
    measure.check_fits(needed, f"the weights and the cache of {description(setting, prompt)}", free)


def description(setting: Setting, prompt: int) -> str:
    """Return a setting in words, for errors."""
    held = f"a full cache of {prompt:,}" if setting.budget is None else f"a budget of {setting.budget:,}"
    return f"{setting.config.num_layers} layers of width {setting.config.hidden_size:,}, batch {setting.batch}, {held}"


class Program(NamedTuple):
    """A compiled step: ``compiled(run, cache, tokens)`` returns the cache, reset to its start, and logits.

    One call does ``calls`` steps. ``run`` and ``cache`` are abstract; ``nbytes`` are the bytes that all of it takes.
    """

    compiled: jax.stages.Compiled
    run: Run
    cache: Any
    tokens: Array
    calls: int
    nbytes: int


def program(kind: Kind, setting: Setting, prompt: int, calls: int, *, free: float) -> Program:
    """Compile ``calls`` decode steps (at most a block of them), or as many blocks, before anything is allocated.

    With a budget, the program does not depend on the prompt's length.
    """
    run, state = shapes(setting, prompt)
    cache, config, keeps = state.cache, run.model.config, setting.policy is None
    tokens = jnp.zeros((setting.batch, 1 if kind == "decode" else setting.block), jnp.int32)

    def loop(run: Run, cache: Any, tokens: Array) -> tuple[Any, Array]:
        start = cache

        def body(_: Int[Array, ""], carry: tuple[Any, Array]) -> tuple[Any, Array]:
            cache, logits = _step(kind, run, carry[0], tokens)
            if keeps and kind == "block":  # the cache has room for one block beyond what it holds
                cache = restart(cache, start)
            return cache, logits

        logits = jnp.zeros((setting.batch, config.vocab_size), jnp.float32)
        cache, logits = jax.lax.fori_loop(0, calls, body, (cache, logits))
        return restart(cache, start), logits

    what = f"{kind} of {description(setting, prompt)}"
    compiled = measure.executable(loop, run, cache, tokens, what=what, free=free, donate=(1,))
    return Program(compiled, run, cache, tokens, calls, measure.program_bytes(compiled))


def _step(kind: Kind, run: Run, cache: Any, tokens: Int[Array, "B m"]) -> tuple[Any, Array]:
    """Feed each row's next tokens, and return the cache and the logits after the last of them."""
    position = cache.next_position[:, None] + jnp.arange(tokens.shape[1])
    phase = Phase(evicts=run.plan.policy is not None) if kind == "block" else decode_phase(run.plan, 1)
    hidden, state = forward(run, DecodeState(cache), tokens, position, phase)
    return state.cache, run.model.logits(hidden[:, -1])


def restart(cache: Any, start: Any) -> Any:
    """Return the cache with the positions that it started from; keys and values stay as they are."""

    def of_part(own: Any, begun: Any) -> Any:
        return dataclasses.replace(own, position=begun.position, next_position=begun.next_position)

    return cache.map(of_part, (start.each_part, PARTS))


def after_prompt(shape: Any, prompt: int, held: int, *, numbers: bool = True) -> kvjax.LayerCaches:
    """Return a cache of random numbers whose heads hold ``held`` tokens each, spread over the prompt in random order.

    All layers hold the same keys and values, or none without ``numbers``. If all tokens of the prompt are held, they
    are in order, as in a full cache. ``shape`` is the abstract cache of a :class:`Program`.
    """

    def of_layer(own: Any, key: Array, drawn: Any) -> Any:
        keys = iter(jax.random.split(key, 64))

        def state(leaf: Any) -> Array:
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                return jnp.zeros(leaf.shape, leaf.dtype)
            return jax.random.uniform(next(keys), leaf.shape, leaf.dtype)

        heads, slots = own.position.shape[:-1], own.num_slots
        place = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (*heads, slots))
        if held < prompt:
            apart = prompt // held
            place = place * apart + jax.random.randint(next(keys), place.shape, 0, apart)
        position = jnp.where(jnp.arange(slots) < held, place, -1)
        if held < prompt:
            position = jax.random.permutation(next(keys), position, axis=-1, independent=True)
        return dataclasses.replace(
            own,
            entries=drawn,
            position=position.astype(jnp.int32),
            next_position=jnp.full(own.next_position.shape, prompt, jnp.int32),
            state=map_parts(
                lambda part: dataclasses.replace(part, rank=by_position(position).rank),
                jax.tree.map(state, own.state),
                Ranked,
            ),
        )

    @jax.jit
    def make() -> Any:
        first, *others = jax.random.split(jax.random.key(0), 1 + len(shape.layers))
        keys = iter(jax.random.split(first, 8))
        of_entries = shape.arrays.entries if numbers else {}
        drawn = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape, leaf.dtype), of_entries)
        return kvjax.LayerCaches(
            tuple(of_layer(own, key, drawn) for own, key in zip(shape.layers, others, strict=True))
        )

    return make()


class Contender(NamedTuple):
    """A program, the length of its prompt, the tokens of it that each head holds, and the program's policy."""

    program: Program
    prompt: int
    held: int
    policy: str | None


def contest(model: models.Decoder, contenders: dict[str, Contender], repetitions: int) -> dict[str, measure.Times]:
    """Time programs in turns; those with equally many slots share keys and values, and each has its own state.

    All programs must have equally many calls.
    """
    shared: dict[int, list[Entries]] = {}

    def with_entries(cache: kvjax.LayerCaches, entries: Sequence[Entries]) -> kvjax.LayerCaches:
        return cache.map(lambda layer, own: dataclasses.replace(layer, entries=own), (entries, PARTS))

    def runner(own: Contender) -> Callable[[], Array]:
        slots = own.program.cache.num_slots
        cache = after_prompt(own.program.cache, own.prompt, own.held, numbers=slots not in shared)
        shared.setdefault(slots, [layer.entries for layer in cache.layers])
        nothing: list[Entries] = [{} for _ in cache.layers]
        rest = [with_entries(cache, nothing)]
        projection = models.output_projection(model, own.policy)
        given = dataclasses.replace(own.program.run, model=model, projection=projection)

        def run() -> Array:
            whole = with_entries(rest[0], shared[slots])
            after, logits = own.program.compiled(given, whole, own.program.tokens)
            shared[slots] = [layer.entries for layer in after.layers]
            rest[0] = with_entries(after, nothing)
            return logits

        return run

    runs = {name: runner(own) for name, own in contenders.items()}
    (calls,) = {own.program.calls for own in contenders.values()}
    return measure.take_turns(runs, repetitions, calls=calls)


class PromptTimes(NamedTuple):
    """The figures of a whole prompt through ``models.stream``."""

    prompt: float  # seconds to the first token
    step: float  # seconds of a following decode step, the median
    compilations: int


def feed(model: models.Decoder, setting: Setting, prompt: int, steps: int = 16) -> PromptTimes:
    """Feed a prompt of random tokens, after a single block of it has compiled all programs."""
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (setting.batch, prompt), np.int32)

    def run(count: int, steps: int) -> tuple[float, float]:
        times = [time.perf_counter()]
        with UNWARNED():
            made = models.stream(
                model, tokens, lengths=np.full(setting.batch, count), policy=setting.policy, budget=setting.budget,
                block=setting.block, max_new_tokens=1 + steps, end=(),
            )  # fmt: skip
        for _ in made:
            times.append(time.perf_counter())
        first, *rest = np.diff(times).tolist()
        return first, statistics.median(rest)

    run(min(prompt, setting.block), steps)
    with measure.compilations() as compiled:
        times = run(prompt, steps)
    return PromptTimes(*times, len(compiled))
