"""One block of a prompt, or one step of decode: `attend` in one layer, and `forward` through all layers.

`layer_step` is a compiled function that all layers share. Where the host calls `forward`, it calls one compiled layer
after the other; inside `jit` that is one program.

A policy whose allocation gives all heads the same budget evicts layer by layer, from plain caches. Any other observes
all layers first, and then evicts from all of them together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvjax
from kvjax import Context, Evidence, KVCache, LayerCaches, OutputProjection, Reconstructed
from kvjax._src.attention import attend_only, attend_unchecked, observe_unchecked
from kvjax._src.eviction import evict_by
from kvjax._src.layer import LayerBlock
from kvjax._src.quantise import Dtypes
from kvjax._src.split_cache import ModelCache
from kvjax.schedule import HostOrDevice, Phase
from models import selecting
from models.butler import Butler
from models.config import Config
from models.decoder import (
    Decoder,
    Hidden,
    attention_input,
    embed,
    frequencies,
    layer_inputs,
    merged,
    rope_of_layer,
    rotation,
    run_layer,
    run_recurrent,
    summed,
)
from models.gradients import loss_gradient
from models.networks import Network
from models.plan import Plan, Rows
from models.selecting import LayerCarry

Weights = Sequence[dict[str, Array]]  # the arrays of each layer by name


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The state between blocks and between tokens; it is donated, so it is updated in place.

    The states of a hybrid model's layers without a KV cache are in ``cache.recurrent``, so that they go with its rows.
    ``memory`` is that of a network that looks ahead, None without one. ``source`` is the state of a selection's
    source, () without a selection. ``said`` is what each of several policies has said of the cache (``Plan.each``).
    """

    cache: ModelCache
    memory: Any = None
    source: Any = ()
    said: tuple[Evidence, ...] = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Run:
    """Values that stay the same from the first block to the last token; ``network`` is the one that is read, if any.

    ``projection`` has an entry for each layer with a KV cache, and is None where no policy reads it.
    """

    model: Decoder
    rows: Rows
    projection: tuple[OutputProjection, ...] | None
    network: Network | None
    plan: Plan = dataclasses.field(metadata={"static": True})

    @property
    def ahead(self) -> Butler | None:
        """Return the network if it looks ahead."""
        return cast(Butler, self.network) if self.network is not None and self.network.looks_ahead else None

    def pauses(self, phase: Phase) -> bool:
        """Return whether a network looks ahead, or a selection starts, between layer 0 and the others."""
        return self.ahead is not None or (self.plan.selection is not None and phase.compressed)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block:
    """A block, as all layers share it; ``position`` is -1 for padding.

    ``budgets`` are None where nothing is evicted, and a tuple where several policies observe. ``waves`` and
    ``frequencies`` have an entry for each rotary embedding, ``gradient`` one for each layer: see :func:`at_layer`.
    """

    position: Int[Array, "B T"]
    budgets: Any
    waves: tuple[Any, ...]
    frequencies: tuple[Array, ...] | None
    context: Context
    gradient: tuple[Array, ...] | None = None


class Here(NamedTuple):
    """A block as one layer has it; see :class:`Block`."""

    position: Int[Array, "B T"]
    budgets: Any
    waves: tuple[Array, ...]
    context: Context
    layer_input: Array | None = None


def forward(
    run: Run,
    state: DecodeState,
    tokens: Int[HostOrDevice, "B T"],
    position: Int[HostOrDevice, "B T"],
    phase: Phase,
    part: Int[HostOrDevice, "B 3"] | None = None,
    layers: Weights | None = None,
) -> tuple[Float[Array, "B T E"], DecodeState]:
    """Feed a block, or one token per row, to all layers; the given state is donated.

    Args:
        position: -1 for padding.
        part: for a block that repeats a part of the text, see :class:`kvjax.schedule.Step`.
        layers: the model's weights, which a caller of many steps takes from its modules once.

    Returns:
        The hidden states before the last norm, and the new state.
    """
    model, plan, layers = run.model, run.plan, weights_of(run.model) if layers is None else layers
    config, lengths = model.config, run.rows.lengths
    cache: Any = state.cache
    before, states = cache.recurrent, list[Any]()
    if before:  # attention and policies see nothing of them
        state = dataclasses.replace(state, cache=dataclasses.replace(cache, recurrent=()))
    x, block = _entered(config, plan, model.embedding[...], tokens, position, lengths, run.rows.budgets_in(phase), part)
    if part is not None:
        state = _fresh(state, position)
        if plan.repeats is not None and plan.repeats.loss is not None:
            block = _with_gradient(model, plan, state.cache, block, tokens, part, lengths)
    caches: list[Any] = []
    cache, evidence, sources = state.cache, None, []
    ends = model.ends()
    (x, inputs), entered_at = layer_inputs(config, ends, tokens, x), dict[int, Array]()
    if evicts_together(plan, phase):
        evidence = _no_evidence(plan, block, cache)
    carry = LayerCarry(cache, evidence, state.memory, ())
    for number, weights in enumerate(layers):
        if number in config.recurrent_layers:
            x, after = run_recurrent(config, weights, x, block.position, before[len(states)])
            states.append(after)
            continue
        if (source := config.sources[number]) is not None:
            at = config.cached_layers.index(source)
            here = at_layer(config, block, number, None, at, inputs[number])
            filled = filled_slots(phase.filled, caches[at].num_slots) if phase.filled and part is None else None
            x = reading_step(config.at(number), filled, weights, here, x, caches[at], entered_at[source])
            continue
        own, at = phase, number - len(states)  # its place among the layers with a KV cache
        if isinstance(cache, LayerCaches):
            carry = dataclasses.replace(carry, cache=cache.layers[at])
            own = _at_slots(phase, cache.layers[at].num_slots, cache.num_slots)
        if plan.selection is not None:
            carry = dataclasses.replace(carry, source=state.source[at])
        projection = None if run.projection is None else run.projection[at]
        here = at_layer(config, block, number, projection, at, inputs[number])
        if number in config.sources:
            entered_at[number] = with_block(carry.cache, block.position)
        x, carry = layer_step(config.at(number), plan, own, weights, here, x, carry, run.network)
        if number == 0 and run.pauses(phase):
            entered = None if run.ahead is None else run.ahead.entered(model, jnp.asarray(tokens))
            carry = _look_ahead(plan.selection is not None, run.ahead, block.position, entered, summed(x), carry)
        caches.append(carry.cache)
        sources.append(carry.source)
    said: Any = carry.evidence if plan.each and carry.evidence is not None else ()
    cache = LayerCaches(tuple(caches)) if isinstance(cache, LayerCaches) else carry.cache
    if not plan.each and carry.evidence is not None:
        cache = _evict(cache, carry.evidence, block.budgets)
    if before:  # what is repeated leaves again, so the states stay those of the text
        cache = dataclasses.replace(cache, recurrent=tuple(states) if part is None else before)
    x = merged(config, ends, x)
    return x, DecodeState(cache, carry.memory, tuple(sources) if plan.selection is not None else (), said)


def _at_slots(phase: Phase, slots: int, most: int) -> Phase:
    """Return the phase of a layer with so many slots, of at most ``most``; its ``filled`` counts the tokens so far."""
    filled = None if phase.filled is None else filled_slots(phase.filled, slots)
    return phase._replace(filled=filled, slots=most if slots < most else None)


def filled_slots(fed: int, slots: int) -> int | None:
    """Return how many slots ``fed`` tokens may fill, rounded up to quarters of all slots; None for all of them."""
    step = max(-(-slots // 4), 256)
    filled = -(-fed // step) * step
    return filled if filled < slots else None


def weights_of(model: Decoder) -> Weights:
    """Return the arrays of each layer."""
    return [layer.arrays() for layer in model.layers]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _entered(
    config: Config,
    plan: Plan,
    embedding: Float[Array, "V E"],
    tokens: Int[Array, "B T"],
    position: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    budgets: Any,
    part: Int[Array, "B 3"] | None,
) -> tuple[Float[Array, "B T E"], Block]:
    """Return the input of layer 0, and the block, with rotary frequencies, and tokens, only where they are read."""
    read = plan.positions != "absolute" or (plan.policy is not None and plan.policy.needs.rotary)
    context = Context(
        reconstructed=None if part is None or plan.policy is None else Reconstructed.of(part, plan.policy),
        tokens=tokens if plan.repeats is not None and part is None else None,
        soft_cap=config.attention_soft_cap,
    )
    waves, turning = rotation(config, position, lengths), frequencies(config, lengths) if read else None
    return embed(config, embedding, tokens), Block(position, budgets, waves, turning, context)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnames=("x", "carry"))
def layer_step(
    config: Config,
    plan: Plan,
    phase: Phase,
    weights: dict[str, Array],
    here: Here,
    x: Hidden,
    carry: LayerCarry,
    network: Network | None,
) -> tuple[Hidden, LayerCarry]:
    """Run one layer on a block, with what :func:`at_layer` returns for the layer."""
    here = here._replace(context=dataclasses.replace(here.context, sink_logits=weights.get("sink_logits")))
    if network is not None:
        layer: Any = here.context.layer
        carry = selecting.predicted(network, carry, layer, attention_input(config, weights, x))
    if here.context.reconstructed is not None and plan.repeats is not None and plan.repeats.input_length:
        length = jnp.linalg.norm(attention_input(config, weights, x).astype(jnp.float32), axis=-1)
        here = here._replace(context=dataclasses.replace(here.context, input_length=length))

    def attend_here(query, key, value):
        return *attend(plan, phase, here, carry, LayerBlock(query, key, value, here.position)), None

    x, carry, _ = run_layer(config, weights, x, here.waves, attend_here, layer_input=here.layer_input)
    return x, carry


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnames="x")
def reading_step(
    config: Config,
    filled: int | None,
    weights: dict[str, Array],
    here: Here,
    x: Hidden,
    cache: KVCache,
    entered_at: Int[Array, "B K S"],
) -> Hidden:
    """Run one layer that attends to the cache of another, which has seen the block and may have evicted.

    An eviction moves no key, so with the positions that the slots had before it (``entered_at``) the layer's queries
    see what the other layer's saw.
    """
    cache = dataclasses.replace(cache, position=entered_at)
    window, cap = here.context.sliding_window, here.context.soft_cap
    context = Context(sliding_window=window, soft_cap=cap, filled=filled)

    def attend_here(query, key, value):
        return attend_only(cache, query, here.position, context), None, None

    return run_layer(config, weights, x, here.waves, attend_here, layer_input=here.layer_input)[0]


@jax.jit
def with_block(cache: KVCache, position: Int[Array, "B T"]) -> Int[Array, "B K S"]:
    """Return the positions of a cache's slots once a block is in and before any token leaves."""
    return cache.positions_with(position)


def at_layer(
    config: Config,
    block: Block,
    number: int,
    projection: OutputProjection | None = None,
    place: int | None = None,
    layer_input: Float[Array, "B T P"] | None = None,
) -> Here:
    """Return a block as one layer has it, with the layer's number, window and gradient in the context.

    ``place`` is the layer's place among those with a KV cache, which is its number by default.
    """
    window = config.sliding_windows[number]
    own: dict[str, Any] = dict(  # numbers of the host, so that layers that are alike are one program
        layer=np.int32(number if place is None else place),
        sliding_window=None if window is None else np.int32(window),
        projection=projection,
        frequency=None if block.frequencies is None else rope_of_layer(config, number, block.frequencies),
        gradient=None if block.gradient is None else block.gradient[number],
    )
    context = dataclasses.replace(block.context, **own)
    return Here(block.position, block.budgets, rope_of_layer(config, number, block.waves), context, layer_input)


@functools.partial(jax.jit, donate_argnums=0)
def _fresh(state: DecodeState, position: Int[Array, "B T"]) -> DecodeState:
    """Take back the tokens from a block's first position on, which are those of the part that was repeated before."""
    first = jnp.min(jnp.where(position < 0, jnp.iinfo(jnp.int32).max, position), axis=1)
    return dataclasses.replace(state, cache=kvjax.rewind(state.cache, first))


def _with_gradient(
    model: Decoder,
    plan: Plan,
    cache: ModelCache,
    block: Block,
    tokens: Int[HostOrDevice, "B T"],
    part: Int[HostOrDevice, "B 3"],
    lengths: Int[Array, "B"],
) -> Block:
    """Return a block of copies with the gradient of the loss that the policy asks for; ``cache`` is without them."""
    assert plan.repeats is not None
    dtypes = Dtypes(*(b or a for a, b in zip(plan.cache_dtype, plan.rounded_to, strict=True)))
    found = loss_gradient(model, plan.repeats, cache, tokens, block.position, part, lengths, dtypes)
    return dataclasses.replace(block, gradient=found)


def evicts_together(plan: Plan, phase: Phase) -> bool:
    """Return whether evidence of all layers is collected: of an uneven allocation, or of several policies."""
    if plan.policy is None or not phase.evicts:
        return False
    return bool(plan.each) or not plan.policy.allocation.even


@functools.partial(jax.jit, static_argnums=0)
def _no_evidence(plan: Plan, block: Block, cache: ModelCache) -> Any:
    """Make empty evidence of all layers, of the policy or of each of several."""
    end, policies = block.context.end, plan.each or (plan.policy,)
    made = tuple(Evidence.of_layers(cache, p.allocation, end, p.merging) for p in policies if p is not None)
    return made if plan.each else made[0]


def _evict(cache: ModelCache, evidence: Evidence, budgets: Int[Array, "B"]) -> ModelCache:
    """Evict from all layers together."""
    by = evict_by if isinstance(cache, LayerCaches) else _evict_pages
    return by(cache, evidence, budgets)


_evict_pages = jax.jit(evict_by, donate_argnums=0)
_look_ahead = jax.jit(selecting.looked_ahead, static_argnames="keeps", donate_argnames="carry")


def attend(
    plan: Plan, phase: Phase, here: Here, carry: LayerCarry, own: LayerBlock
) -> tuple[Float[Array, "B T N D"], LayerCarry]:
    """Compute one layer's attention over ``carry.cache``, and let the policy observe or evict."""
    policy, cache, evidence = plan.policy, carry.cache, carry.evidence
    of_phase: Any = {name: getattr(phase, name) for name in ("compressed", "filled", "excess", "slots")}
    budgets, context = here.budgets, dataclasses.replace(here.context, predicted=carry.predicted, **of_phase)
    if any(plan.rounded_to):
        own = rounded_block(plan, own)
    if plan.selection is not None:
        out, cache, carry = selecting.attend(plan.selection, cache, carry, own, context)
    elif plan.each:
        out, cache, each = kvjax.observe_each(cache, *own, policies=plan.each, budgets=budgets, context=context)
        if evidence is not None:
            evidence = tuple(old.with_layer(cache, context.layer, new) for old, new in zip(evidence, each, strict=True))
    elif policy is None or (phase.evicts and evidence is None):
        out, cache = attend_unchecked(cache, own, policy, budgets, context)
    else:
        out, cache, said = observe_unchecked(cache, own, policy, budgets, context)
        if evidence is not None:
            assert said is not None
            evidence = evidence.with_layer(cache, context.layer, said)
    return out, dataclasses.replace(carry, cache=cache, evidence=evidence, predicted=None)


def rounded_block(plan: Plan, own: LayerBlock) -> LayerBlock:
    """Round a block's keys and values to eight bits where they are stored as floats for the sake of a derivative."""
    rounded = zip(("key", "value"), plan.rounded_to, strict=True)
    return own._replace(**{name: kvjax.straight_through(getattr(own, name), to) for name, to in rounded if to})


def decode_positions(finished: Array, next_position: Int[Array, "B"]) -> Int[Array, "B 1"]:
    """Return the positions of a decode step; -1 for rows that have ended, so that they do not change."""
    return jnp.where(finished, -1, next_position)[:, None]


def decode_phase(plan: Plan, step: int) -> Phase:
    """Return the phase of a decode step, counted from 1; where tokens are repeated, the copies' step evicts."""
    every = plan.evict_every
    due = every > 0 and step % every == 0 and plan.repeats is None
    return Phase(evicts=due, compressed=True, excess=1 if every == 1 else None)
