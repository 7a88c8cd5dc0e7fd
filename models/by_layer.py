"""A run on a CPU: the host calls one compiled layer after the other.

A scan over stacked layers copies each layer's weights out of the stack before it multiplies by them; on a CPU that is
half of a decode step. Here each layer has its own arrays for weights and cache, and one compiled program serves all
layers. On an accelerator the scan is used (models/steps.py), so that nothing waits for the host.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvjax
from kvjax import Evidence, KVCache, OutputProjection
from kvjax.checks import is_known
from kvjax.layer import LayerBlock
from kvjax.merging import Merging, folded
from kvjax.schedule import HostOrDevice, Phase
from models import selecting
from models.config import Config
from models.decoder import Decoder, attention_input, embed, run_layer, sliding_windows
from models.layer_caches import AnyCache, LayerCaches, split, stacked_up
from models.networks import Network
from models.parameters import layers_with
from models.plan import Plan, Sizes
from models.sampling import Draws, Sampling, sample
from models.selecting import LayerCarry
from models.states import settled, shrink, shrinks, start
from models.steps import (
    Block,
    DecodeState,
    Run,
    at_layer,
    attend,
    block_of,
    decode_phase,
    decode_positions,
    evicts_together,
    fresh,
    shared_evidence,
    with_gradient,
)

# The bytes of a layer's weights above which a call per layer costs less than the scan's copies, on two cores: a step of
# six layers took 4.9 ms as one program and 5.8 by layers at 6 MiB, 7.1 and 6.9 at 11 MiB, 17.7 and 13.2 at 24 MiB.
LARGE_LAYER = 8 << 20


class Layer(NamedTuple):
    """One layer: its parameters by name, and what else differs between layers; ``number`` counts from 0."""

    weights: dict[str, Array]
    number: Int[Array, ""]
    window: Int[Array, ""] | None
    projection: OutputProjection | None


def runs_by_layer(run: Run, key: Array | None = None) -> bool:
    """Return whether the host calls each layer: for large layers on one CPU, outside a caller's jit, grad and vmap."""
    # Under jit the run's lengths are traced even where its model is not.
    leaves = jax.tree.leaves((run, key))
    if not all(isinstance(leaf, jax.Array) for leaf in leaves) or not is_known(*leaves):
        return False
    devices = run.model.embedding[...].devices()
    if run.plan.mesh is not None or {device.platform for device in devices} != {"cpu"} or len(devices) > 1:
        return False
    layers = run.model.layers.arrays().values()
    return sum(array.nbytes for array in layers) >= LARGE_LAYER * run.model.config.num_layers


class LayerSteps:
    """The steps of a run; each calls every layer."""

    def __init__(self, run: Run, sizes: Sizes, layers: tuple[Layer, ...] | None = None):
        self.run, self.sizes = run, sizes
        self.layers = _layers(run) if layers is None else layers

    def of(self, run: Run, sizes: Sizes) -> LayerSteps:
        """Return the steps of another run of the same model and policy."""
        return LayerSteps(run, sizes, self.layers)

    def start(self, batch: int, cache: AnyCache | None = None) -> DecodeState:
        return _start(self.run, self.sizes, batch, cache)

    def block(
        self,
        state: DecodeState,
        tokens: np.ndarray,
        position: HostOrDevice,
        phase: Phase,
        part: np.ndarray | None = None,
    ) -> tuple[Float[Array, "B T E"], DecodeState]:
        """Feed a block; the given state is donated."""
        run = self.run
        x, block = _enter(
            run.model.config, run.plan, run.model.embedding[...], tokens, position, run.rows.lengths,
            run.rows.budgets_in(phase), part,
        )  # fmt: skip
        if part is not None:
            state = _fresh(state, position)
            if run.plan.repeats is not None and run.plan.repeats.loss is not None:
                block = _with_gradient(run.model, run.plan, state.cache, block, tokens, part, run.rows.lengths)
        return self._run(state, tokens, x, block, phase)

    def shrink(self, state: DecodeState) -> DecodeState:
        """Shrink the cache as :func:`models.states.shrink` does, layer by layer where possible."""
        state = dataclasses.replace(state, cache=settled(state.cache, self.run.plan))
        sizes, cache = self.sizes, state.cache
        if not shrinks(cache, sizes):
            return state
        if sizes.pages:
            return _packed(dataclasses.replace(state, cache=stacked_up(cache)), self.run.plan, sizes)
        return dataclasses.replace(state, cache=cache.map(functools.partial(_compact, slots=sizes.slots)))

    def token(
        self,
        state: DecodeState,
        token: np.ndarray,
        finished: np.ndarray,
        draws: Draws,
        step: int,
        sampling: Sampling,
    ) -> tuple[Int[Array, "B"], DecodeState, Draws]:
        """Feed one token per row and choose the next ones; the given state is donated."""
        position = _positions(finished, state.cache.next_position)
        hidden, state = self.block(state, token[:, None], position, decode_phase(self.run.plan, step))
        chosen, draws, _ = next_token(self.run.model, hidden, draws, sampling)
        return chosen, state, draws

    def _run(
        self, state: DecodeState, tokens: HostOrDevice, x: Float[Array, "B T E"], block: Block, phase: Phase
    ) -> tuple[Float[Array, "B T E"], DecodeState]:
        run = self.run
        model, plan = run.model, run.plan
        cache, evidence = state.cache, None
        if evicts_together(plan, phase, cache):
            evidence = _evidence_of_layers(model.config, plan, block, cache)
        carry = LayerCarry(cache.at(0), evidence, state.memory, state.source)
        for number, layer in enumerate(self.layers):
            carry = dataclasses.replace(carry, cache=cache.at(number))
            x, carry = _run_layer(model.config, plan, phase, layer, block, x, carry, run.network)
            if number == 0 and run.pauses(phase):
                entered = None if run.ahead is None else run.ahead.entered(model, jnp.asarray(tokens))
                carry = _look_ahead(plan.selection is not None, run.ahead, block.position, entered, x, carry)
            cache = cache.with_at(number, carry.cache)
        if carry.evidence is not None:
            assert block.budgets is not None
            cache = _evict_together(cache, carry.evidence, block.budgets)
        return x, DecodeState(cache, carry.memory, carry.source)


def _layers(run: Run) -> tuple[Layer, ...]:
    """Split the model's layers into views of the stacked arrays, which take no extra memory on a CPU."""
    config = run.model.config
    windows = sliding_windows(config)
    whole = {name: np.asarray(array) for name, array in run.model.layers.arrays().items()}
    (device,) = run.model.embedding[...].devices()
    layers = []
    with jax.default_device(device):  # uncommitted, like the arrays that callers make
        for index in range(config.num_layers):
            places = {name: layers_with(config, f"layers.{name}") for name in whole}
            weights = {
                name: jax.device_put(array[places[name].index(index)])
                for name, array in whole.items()
                if index in places[name]
            }
            window = None if windows is None else windows[index]
            projection = None if run.projection is None else run.projection.layer(index)
            layers.append(Layer(weights, jax.device_put(np.int32(index)), window, projection))
    return tuple(layers)


@functools.partial(jax.jit, static_argnames=("sizes", "batch"))
def _start(run: Run, sizes: Sizes, batch: int, cache: AnyCache | None) -> DecodeState:
    state = start(run, sizes, batch, cache)
    return dataclasses.replace(state, cache=split(state.cache))


_packed = jax.jit(shrink, static_argnames=("plan", "sizes"))
_compact = jax.jit(kvjax.compact, static_argnames="slots")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _enter(
    config: Config,
    plan: Plan,
    embedding: Float[Array, "V E"],
    tokens: Int[Array, "B T"],
    position: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    budgets: Int[Array, "B"] | None,
    part: Int[Array, "B 3"] | None = None,
) -> tuple[Float[Array, "B T E"], Block]:
    return embed(config, embedding, tokens), block_of(config, plan, tokens, position, lengths, budgets, part)


_positions = jax.jit(decode_positions)
_fresh = jax.jit(fresh, donate_argnames="state")
_with_gradient = jax.jit(with_gradient, static_argnames="plan")  # one program: a block of copies is long


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnames=("x", "carry"))
def _run_layer(
    config: Config,
    plan: Plan,
    phase: Phase,
    layer: Layer,
    block: Block,
    x: Float[Array, "B T E"],
    carry: LayerCarry,
    network: Network | None,
) -> tuple[Float[Array, "B T E"], LayerCarry]:
    weights, number, window, projection = layer
    block = at_layer(config, block, number, sliding_window=window, projection=projection)
    if network is not None:
        carry = selecting.predicted(network, carry, number, attention_input(config, weights, x))

    def attend_here(query, key, value):
        return *attend(plan, phase, block, carry, LayerBlock(query, key, value, block.position)), None

    x, carry, _ = run_layer(config, weights, x, block.waves, attend_here)
    return x, carry


_look_ahead = jax.jit(selecting.looked_ahead, static_argnames="keeps", donate_argnames="carry")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _evidence_of_layers(config: Config, plan: Plan, block: Block, cache: AnyCache) -> Evidence:
    return shared_evidence(config, plan, block, cache.slots)


def _evict_together(cache: AnyCache, evidence: Evidence, budgets: Int[Array, "B"]) -> AnyCache:
    """Evict from all layers together; values are merged layer by layer."""
    if evidence.merging is None or not isinstance(cache, LayerCaches):
        return _evict(cache, evidence, budgets)
    before = [jnp.copy(own.position) for own in cache.layers]
    left = _evict(cache, dataclasses.replace(evidence, merging=None), budgets)
    assert isinstance(left, LayerCaches)
    layers = zip(left.layers, before, strict=True)
    return LayerCaches(tuple(_merged(evidence.merging, own, position, evidence.end) for own, position in layers))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _merged(merging: Merging, cache: KVCache, before: Int[Array, "B K S"], end: Int[Array, "B"] | None) -> KVCache:
    if end is not None:  # copies leave without a trace
        before = jnp.where(before >= end[:, None, None], -1, before)
    return folded(merging, cache, before, cache.position)


@functools.partial(jax.jit, donate_argnames="cache")
def _evict(cache: AnyCache, evidence: Evidence, budgets: Int[Array, "B"]) -> AnyCache:
    """Evict from all layers together."""
    left: Any = kvjax.evict(cache.slots, evidence, budgets)
    return cache.with_slots(left, ~evidence.waits(budgets, cache.num_slots))


@functools.partial(jax.jit, static_argnames="sampling")
def next_token(
    model: Decoder, hidden: Float[Array, "B T E"], draws: Draws, sampling: Sampling
) -> tuple[Int[Array, "B"], Draws, Array]:
    """Choose each row's next token from its last hidden state; return the next draws, and whether logits are finite."""
    logits = model.logits(hidden[:, -1])
    return *sample(logits, draws, sampling), jnp.isfinite(logits).all()
