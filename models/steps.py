"""One block of a prompt, or one step of decode: `attend` in one layer, and `forward` through all layers.

`forward` is traced into one program: the layers are scanned, and the cache is in the scan's carry. models/by_layer.py
runs the same `attend` in each layer, but the host calls one compiled layer after the other.

A policy whose allocation gives all heads the same budget evicts layer by layer from a plain cache. Any other, and any
in pages, observes all layers first, and then evicts from all of them together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import kvjax
from kernels_pallas.dispatch import of_layer
from kvjax import Context, Evidence, OutputProjection, Reconstructed
from kvjax.attention import attend_unchecked, observe_unchecked
from kvjax.eviction import evict_by
from kvjax.insertion import Cache
from kvjax.layer import LayerBlock
from kvjax.quantise import Dtypes
from kvjax.schedule import Phase
from models import selecting
from models.config import Config
from models.decoder import Decoder, frequencies, rope_of_layer, rotation, sliding_windows
from models.gradients import loss_gradient
from models.layer_caches import AnyCache, stacked
from models.networks import LooksAhead, Network
from models.plan import Plan, Rows
from models.selecting import LayerCarry


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The state between blocks and between tokens; it is donated, so it is updated in place.

    ``memory`` is that of a network that looks ahead, None without one. ``source`` is the state of a selection's
    source, () without a selection.
    """

    cache: AnyCache
    memory: Any = None
    source: Any = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Run:
    """Values that stay the same from the first block to the last token; ``network`` is the one that is read, if any."""

    model: Decoder
    rows: Rows
    projection: OutputProjection | None
    network: Network | None
    plan: Plan = dataclasses.field(metadata={"static": True})

    @property
    def ahead(self) -> LooksAhead | None:
        """Return the network if it looks ahead."""
        return cast(LooksAhead, self.network) if self.network is not None and self.network.looks_ahead else None

    def pauses(self, phase: Phase) -> bool:
        """Return whether a network looks ahead, or a selection starts, between layer 0 and the others."""
        return self.ahead is not None or (self.plan.selection is not None and phase.compressed)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block:
    """A block, as all layers share it; ``position`` is -1 for padding, ``budgets`` None where nothing is evicted.

    ``waves`` and the context's frequencies and gradient may differ between layers: see :func:`at_layer`.
    """

    position: Int[Array, "B T"]
    budgets: Int[Array, "B"] | None
    waves: tuple[Array, Array]
    context: Context


def forward(
    run: Run,
    state: DecodeState,
    tokens: Int[Array, "B T"],
    position: Int[Array, "B T"],
    phase: Phase,
    part: Int[Array, "B 3"] | None = None,
) -> tuple[Float[Array, "B T E"], DecodeState]:
    """Feed a block, or one token per row, to all layers in one program.

    Args:
        position: -1 for padding.
        part: for a block that repeats a part of the text, see :class:`kvjax.schedule.Step`.

    Returns:
        The hidden states before the last norm, and the new state.
    """
    model, plan, network = run.model, run.plan, run.network
    block = block_of(model.config, plan, tokens, position, run.rows.lengths, run.rows.budgets_in(phase), part)
    if part is not None:
        state = fresh(state, position)
        block = with_gradient(model, plan, state.cache, block, tokens, part, run.rows.lengths)

    def attend_at(carry, index, window, query, key, value):
        projection = None if run.projection is None else run.projection.layer(index)
        here = at_layer(model.config, block, index, sliding_window=window, projection=projection)
        return *attend(plan, phase, here, carry, LayerBlock(query, key, value, position)), None

    hook = _after_first(run, tokens, position) if run.pauses(phase) else None
    cache: Any = state.cache  # not of layers apart, which models/by_layer.py calls
    evidence = shared_evidence(model.config, plan, block, cache) if evicts_together(plan, phase, cache) else None
    carry = LayerCarry(cache, evidence, state.memory, state.source)
    predict = None if network is None else functools.partial(selecting.predicted, network)
    hidden, carry, _ = model.run(
        tokens, position, run.rows.lengths, attend_at, carry, after_first=hook, before_attention=predict
    )
    cache = carry.cache
    if carry.evidence is not None:
        assert block.budgets is not None
        cache = evict_by(cache, carry.evidence, block.budgets)
    return hidden, DecodeState(cache, carry.memory, carry.source)


def _after_first(
    run: Run, tokens: Int[Array, "B T"], position: Int[Array, "B T"]
) -> Callable[[Float[Array, "B T E"], LayerCarry], LayerCarry]:
    """Return what happens to a block between layer 0 and the others."""
    entered = None if run.ahead is None else run.ahead.entered(run.model, tokens)
    return functools.partial(selecting.looked_ahead, run.plan.selection is not None, run.ahead, position, entered)


def block_of(
    config: Config,
    plan: Plan,
    tokens: Int[Array, "B T"],
    position: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    budgets: Int[Array, "B"] | None,
    part: Int[Array, "B 3"] | None = None,
) -> Block:
    """Return the block that all layers share; with rotary frequencies, and tokens, only where they are read."""
    read = plan.positions != "absolute" or (plan.policy is not None and plan.policy.needs.rotary)
    context = Context(
        frequency=frequencies(config, lengths) if read else None,
        reconstructed=None if part is None or plan.policy is None else Reconstructed.of(part, plan.policy),
        tokens=tokens if plan.repeats is not None and part is None else None,
        soft_cap=config.attention_soft_cap,
    )
    return Block(position, budgets, rotation(config, position, lengths), context)


def fresh(state: DecodeState, position: Int[Array, "B T"]) -> DecodeState:
    """Take back the tokens from a block's first position on, which are those of the part that was repeated before."""
    return dataclasses.replace(state, cache=kvjax.rewind(state.cache, first_of(position)))


def first_of(position: Int[Array, "B T"]) -> Int[Array, "B"]:
    """Return the first position of each row of a block; beyond all positions where there is none."""
    return jnp.min(jnp.where(position < 0, jnp.iinfo(jnp.int32).max, position), axis=1)


def at_layer(config: Config, block: Block, layer: Int[Array, ""], **own: Any) -> Block:
    """Return the block with one layer's rotary embedding and gradient, and other fields of its context, ``own``."""
    waves, frequency = rope_of_layer(config, layer, (block.waves, block.context.frequency))
    gradient = of_layer(block.context.gradient, layer)
    context = dataclasses.replace(block.context, layer=layer, frequency=frequency, gradient=gradient, **own)
    return dataclasses.replace(block, waves=waves, context=context)


def with_gradient(
    model: Decoder,
    plan: Plan,
    cache: AnyCache,
    block: Block,
    tokens: Int[Array, "B T"],
    part: Int[Array, "B 3"],
    lengths: Int[Array, "B"],
) -> Block:
    """Return a block of copies with the gradient of the loss that the policy asks for, if it asks for one.

    ``cache`` is without the copies.
    """
    if plan.repeats is None or plan.repeats.loss is None:
        return block
    dtypes = Dtypes(*(b or a for a, b in zip(plan.cache_dtype, plan.rounded_to, strict=True)))
    found = loss_gradient(model, plan.repeats, stacked(cache), tokens, block.position, part, lengths, dtypes)
    return dataclasses.replace(block, context=dataclasses.replace(block.context, gradient=found))


def evicts_together(plan: Plan, phase: Phase, cache: AnyCache) -> bool:
    """Return whether the policy evicts from all layers together: by an uneven allocation, or in pages."""
    if plan.policy is None or not phase.evicts:
        return False
    return not plan.policy.allocation.even or cache.paged


def shared_evidence(config: Config, plan: Plan, block: Block, cache: Cache) -> Evidence:
    """Make empty evidence of all layers, which are evicted from together."""
    assert plan.policy is not None
    return Evidence.of_layers(
        cache, plan.policy.allocation, block.context.end, sliding_windows(config), plan.policy.merging
    )


def attend(
    plan: Plan, phase: Phase, block: Block, carry: LayerCarry, own: LayerBlock
) -> tuple[Float[Array, "B T N D"], LayerCarry]:
    """Compute one layer's attention over its part of ``carry.cache``, and let the policy observe or evict."""
    policy, budgets, cache, evidence = plan.policy, block.budgets, carry.cache, carry.evidence
    of_phase: Any = dict(compressed=phase.compressed, filled=phase.filled, excess=phase.excess)
    context = dataclasses.replace(block.context, predicted=carry.predicted, **of_phase)
    if any(plan.rounded_to):
        own = rounded_block(plan, own)
    if plan.selection is not None:
        out, cache, carry = selecting.attend(plan.selection, cache, carry, own, context)
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
