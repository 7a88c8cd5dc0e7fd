"""One block of a prompt, or one step of decode: what happens in a layer, and `forward`, through all of them.

`forward` is traced into one program: the layers are scanned, the cache travels in the scan's carry. models/by_layer.py
runs the same `attend` in each layer, but the host calls one compiled layer after the other.

A policy whose allocation gives all heads the same budget runs on a plain cache and evicts layer by layer. Any other
observes all layers first, and evicts from them together.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

import kvjax
from kvjax import Context, Evidence, KVCache, OutputProjection, PagedCache
from models import selecting
from models.butler import Butler, ButlerCache
from models.config import Config
from models.decoder import Decoder, rope_frequencies, rotation
from models.plan import Plan, Rows, cache_heads
from models.selecting import Cache, LayerCarry


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCaches:
    """The caches of all layers in arrays of their own; it is read like the :class:`kvjax.KVCache` that stacks them."""

    layers: tuple[KVCache, ...]

    @property
    def next_position(self) -> Int[Array, "B"]:
        """The absolute position of each row's next token."""
        return self.layers[0].next_position

    @property
    def num_slots(self) -> int:
        """S, the slots of each KV head."""
        return self.layers[0].num_slots

    @property
    def heads_shape(self) -> tuple[int, ...]:
        """``(L, B, K)``."""
        return (len(self.layers), *self.layers[0].heads_shape)

    @property
    def position(self) -> Int[Array, "L B K S"]:
        """The position of the token in each slot, -1 where the slot is free."""
        return jnp.stack([cache.position for cache in self.layers])

    @property
    def key(self) -> Float[Array, "L B K S D"]:
        """All keys: a copy."""
        return jnp.stack([cache.key for cache in self.layers])

    @property
    def value(self) -> Float[Array, "L B K S D"]:
        """All values: a copy."""
        return jnp.stack([cache.value for cache in self.layers])

    @property
    def live(self) -> Array:
        """Says which slots hold a token, bool ``[L, B, K, S]``."""
        return self.position >= 0

    @property
    def num_live(self) -> Int[Array, "L B K"]:
        """How many tokens each head holds."""
        return jnp.sum(self.live, axis=-1, dtype=jnp.int32)

    @property
    def state(self) -> Any:
        """What the policy remembers, of all layers: a copy."""
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(cache.state for cache in self.layers))

    @property
    def positions(self) -> str:
        """What the keys' rotations stand for; see :class:`kvjax.KVCache`."""
        return self.layers[0].positions

    @property
    def nbytes(self) -> int:
        """Bytes that the caches take."""
        return sum(cache.nbytes for cache in self.layers) - (len(self.layers) - 1) * self.next_position.nbytes

    def layer(self, index: int) -> KVCache:
        """One layer's cache."""
        return self.layers[index]

    @property
    def slots(self) -> KVCache:
        """Which slots of all layers hold what, in stacked arrays, without keys and values: enough to say who leaves."""
        position = self.position
        nothing = jnp.zeros((*position.shape, 0))
        return KVCache(nothing, nothing, position, self.next_position)


AnyCache = Cache | LayerCaches


def split(cache: AnyCache) -> AnyCache:
    """Gives each layer of a plain cache arrays of its own; pages stay in their pool."""
    if not isinstance(cache, KVCache):
        return cache
    layers = (cache.layer(index) for index in range(cache.heads_shape[0]))
    # Copied, as all layers share it, but each layer's arrays are donated by themselves.
    return LayerCaches(
        tuple(dataclasses.replace(layer, next_position=jnp.copy(cache.next_position)) for layer in layers)
    )


def stacked(cache: AnyCache) -> Cache:
    """Gives a cache as arrays of all layers. The layers' own are used up, one after the other: both never lie there."""
    if not isinstance(cache, LayerCaches):
        return cache
    next_position = jnp.copy(cache.next_position)

    def stack(*parts: Array) -> Array:
        whole = _stack(parts)
        for part in parts:
            part.delete()
        return whole

    whole = jax.tree.map(stack, *cache.layers)
    return dataclasses.replace(whole, next_position=next_position)


@jax.jit
def _stack(parts: tuple[Array, ...]) -> Array:
    return jnp.stack(parts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """What is carried from block to block and from token to token; donated, it is updated in place.

    ``predictor`` is what the predictor remembers of the tokens, ``source`` what a selection's source does; None and ()
    where there is none.
    """

    cache: AnyCache
    predictor: ButlerCache | None = None
    source: Any = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Run:
    """What stays the same from the first block to the last token."""

    model: Decoder
    rows: Rows
    projection: OutputProjection | None
    butler: Butler | None
    plan: Plan = dataclasses.field(metadata={"static": True})


class Phase(NamedTuple):
    """What kind of block it is; static, so each kind is compiled once.

    ``evicts``: the policy evicts after it. ``compressed``: the context was compressed before it. ``excess`` and
    ``filled``: what is promised of the slots, see :func:`kvjax.evict` and :class:`kvjax.Context`.
    """

    evicts: bool
    compressed: bool = False
    excess: int | None = None
    filled: int | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block:
    """Tokens as every layer meets them; ``position`` is -1 for padding, ``budgets`` None where nothing is evicted."""

    position: Int[Array, "B T"]
    budgets: Int[Array, "B"] | None
    waves: tuple[Array, Array]
    frequency: Float[Array, "rows half"] | None


class Place(NamedTuple):
    """What tells one layer from the others beside its weights; ``number`` counts from 0."""

    number: Int[Array, ""]
    window: Int[Array, ""] | None
    projection: OutputProjection | None


def empty_state(run: Run, batch: int) -> DecodeState:
    """Makes an empty cache, and an empty memory beside it."""
    plan, config = run.plan, run.model.config
    cache = _empty_cache(run.model, plan, batch)
    predictor, source = None, ()
    slots = plan.predictor_slots
    if slots and plan.selection is not None:
        heads = cache_heads(config, plan.policy)
        source = plan.selection.source.init(batch, heads, slots, config.head_dim, layers=config.num_layers)
    if slots and run.butler is not None:  # a policy keeps the importance keys with its tokens, so that they leave, too
        predictor = run.butler.init_cache(batch, slots, importance_keys=plan.selection is not None)
    return DecodeState(cache, predictor, source)


def _empty_cache(model: Decoder, plan: Plan, batch: int) -> Cache:
    config, policy = model.config, plan.policy
    heads = cache_heads(config, policy)

    def init_state(B: int, K: int, S: int) -> Any:
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


def shrink(state: DecodeState, plan: Plan) -> DecodeState:
    """Moves what is left of a cache that held all of the prompt into a smaller one, once it has been evicted from."""
    cache = state.cache
    if plan.when == "prompt" and plan.pages:
        assert isinstance(cache, KVCache)
        cache = kvjax.pack(cache, pages=plan.pages, page_size=plan.page_size, most=plan.slots)
    elif not plan.pages and plan.slots != plan.prompt_slots:
        assert isinstance(cache, KVCache)
        cache = kvjax.compact(cache, plan.slots)
    return dataclasses.replace(state, cache=cache)


def forward(
    run: Run,
    state: DecodeState,
    tokens: Int[Array, "B T"],
    position: Int[Array, "B T"],
    budgets: Int[Array, "B"] | None,
    phase: Phase,
) -> tuple[Float[Array, "B T E"], DecodeState]:
    """Feeds a block, or a token of each row, to all layers in one program.

    Args:
        position: -1 for padding.
        budgets: one per row; None where nothing is evicted.

    Returns:
        The hidden states before the last norm, and the new state.
    """
    model, plan, butler = run.model, run.plan, run.butler
    block = block_of(model.config, plan.policy, position, run.rows.lengths, budgets)

    def attend_at(carry, index, window, query, key, value):
        place = Place(index, window, None if run.projection is None else run.projection.layer(index))
        return *attend(plan, phase, block, place, carry, (query, key, value)), None

    hook = None
    if predicts(plan, phase):
        entered = None if butler is None else selecting.predictor_input(butler, model, tokens)
        hook = functools.partial(selecting.run_predictor, plan.selection is not None, butler, position, entered)
    assert not isinstance(state.cache, LayerCaches)
    together = shared_allocation(plan, phase)
    evidence = None if together is None else Evidence.of_layers(state.cache, together)
    carry = LayerCarry(state.cache, evidence, state.predictor, state.source)
    hidden, carry, _ = model.run(tokens, position, run.rows.lengths, attend_at, carry, after_first=hook)
    cache = carry.cache
    if carry.evidence is not None:
        assert budgets is not None
        cache = kvjax.evict(cache, carry.evidence, budgets)
    return hidden, DecodeState(cache, carry.predictor, carry.source)


def block_of(
    config: Config,
    policy: kvjax.Policy | None,
    position: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    budgets: Int[Array, "B"] | None,
) -> Block:
    """Tokens as every layer meets them, from their positions; frequencies only where the policy reads them."""
    frequency = None
    if policy is not None and (policy.needs.rotary or policy.positions != "absolute"):
        frequency, _ = rope_frequencies(config.rope, config.head_dim, lengths)
    return Block(position, budgets, rotation(config, position, lengths), frequency)


def predicts(plan: Plan, phase: Phase) -> bool:
    """Whether something happens between layer 0 and the others: a predictor speaks, or a selection sets in."""
    return plan.predictor is not None or (plan.selection is not None and phase.compressed)


def shared_allocation(plan: Plan, phase: Phase) -> kvjax.Allocation | None:
    """The allocation by which all layers are evicted from together; None where each is by itself, or none is."""
    uneven = plan.policy is not None and phase.evicts and not plan.policy.allocation.even
    return plan.policy.allocation if plan.policy is not None and uneven else None


def attend(
    plan: Plan,
    phase: Phase,
    block: Block,
    place: Place,
    carry: LayerCarry,
    rows: tuple[Float[Array, "B T N D"], Float[Array, "B T K D"], Float[Array, "B T K D"]],
) -> tuple[Float[Array, "B T N D"], LayerCarry]:
    """One layer's attention over its part of ``carry.cache``, and what the policy makes of it."""
    policy, budgets, cache = plan.policy, block.budgets, carry.cache
    context = Context(
        layer=place.number,
        sliding_window=place.window,
        frequency=block.frequency,
        projection=place.projection,
        predicted=selecting.prediction(plan.predictor, carry, place.number, block.position.shape),
        compressed=phase.compressed,
        filled=phase.filled,
    )
    evidence = carry.evidence
    if plan.selection is not None:
        out, cache, carry = selecting.attend(plan.selection, cache, carry, rows, block.position, context)
    elif policy is None or (phase.evicts and policy.allocation.even):
        out, cache = kvjax.attend(
            cache, *rows, block.position, policy=policy, budget=budgets, excess=phase.excess, context=context
        )
    else:
        out, cache, said = kvjax.observe(cache, *rows, block.position, policy=policy, budget=budgets, context=context)
        if evidence is not None:
            assert said is not None
            evidence = evidence.with_layer(cache, place.number, said)
    return out, dataclasses.replace(carry, cache=cache, evidence=evidence)


def decode_inputs(
    plan: Plan,
    rows: Rows,
    finished: Array,
    next_position: Int[Array, "B"],
    step: Int[Array, ""],
    slots: int,
) -> tuple[Int[Array, "B 1"], Int[Array, "B"] | None]:
    """Positions and budgets of a step of decode; rows that have ended are left as they are."""
    position = jnp.where(finished, -1, next_position)[:, None]
    budgets = rows.decode_budgets
    if plan.evict_every not in (None, 1):
        assert budgets is not None
        budgets = jnp.where(step % plan.evict_every == 0, budgets, slots)
    return position, budgets


def decode_phase(plan: Plan) -> Phase:
    """The phase of all steps of decode."""
    evicts = plan.policy is not None and plan.evict_every is not None
    return Phase(evicts, compressed=True, excess=1 if plan.evict_every == 1 else None)
