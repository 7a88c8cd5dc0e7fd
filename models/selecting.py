"""Selection and prediction: a source of importance chooses what a step reads; a network predicts what a policy reads.

prompt      dense, by blocks; a network that looks ahead and the source see every token
a step      layer 0 dense, then the network looks ahead; each other layer reads the slots that `kvjax.select` chose
a policy    that reads predictions gets those of the block in each layer, before the layer's attention
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import kvjax
from kernels_pallas import select_attention
from kvjax import Context, KVCache, Policy, Prediction, sources
from kvjax._src.border import OF_HEADS, OF_QUERY_HEADS, OF_TOKENS, enter, implementation_for
from kvjax._src.cache import floats_of
from kvjax._src.checks import check_count, check_share_or_tokens
from kvjax._src.layer import LayerBlock
from kvjax._src.selection import share_of_tokens
from kvjax.sources import Source
from models.butler import Butler
from models.networks import Network, remembers


@dataclasses.dataclass(frozen=True)
class Selection:
    """The source that chooses what a decode step reads, and how much it reads: see :func:`kvjax.select`."""

    source: Source
    budget: int | float
    sinks: int
    # Compiled programs are found by equality, and 1 == 1.0, but one token is not all tokens.
    is_share: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_share", isinstance(self.budget, float))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCarry:
    """Values that the layers of one block pass on to each other.

    ``cache`` is that of the layer that runs, or of all where they share pages. ``evidence`` is what the policy, or each
    of several, has returned so far, where all layers are evicted from together. ``memory`` and ``source`` are the
    states of a network that looks ahead and, of the layer that runs, of the source. ``said`` is what the network said
    of the block behind layer 0; ``predicted`` what a network predicts for the block in the layer that runs.
    ``first`` and ``previous`` are the true logits of layer 0 and of the previous layer, where the source reads them.
    ``behind_first`` says that layer 0 has run and, if a network looks ahead, that it has, too.
    """

    cache: Any
    evidence: Any
    memory: Any
    source: Any
    said: Any = None
    predicted: Prediction | None = None
    first: Float[Array, "B N T S"] | None = None
    previous: Float[Array, "B N T S"] | None = None
    behind_first: bool = dataclasses.field(default=False, metadata={"static": True})


def looked_ahead(
    keeps: bool,
    ahead: Butler | None,
    position: Int[Array, "B T"],
    entered: Float[Array, "B T E"] | None,
    x: Float[Array, "B T E"],
    carry: LayerCarry,
) -> LayerCarry:
    """Return the carry behind layer 0, after a network has looked ahead at the block.

    Args:
        keeps: whether the network's memory keeps the importance keys; else they are passed on with the queries.
        entered: what the network reads; None for layer 0's output ``x``.
    """
    said, memory = None, carry.memory
    if ahead is not None and memory is not None:
        said, memory = ahead.look_ahead(memory, x if entered is None else entered, position, importance_keys=keeps)
    return dataclasses.replace(carry, memory=memory, said=said, behind_first=True)


def predicted(network: Network, carry: LayerCarry, layer: Int[Array, ""], x: Float[Array, "B T E"]) -> LayerCarry:
    """Return the carry with what a network predicts for a block in one layer; ``x`` is the input of its attention."""
    return dataclasses.replace(carry, predicted=network.predict(layer, x, carry.said, carry.memory))


def attend(
    selection: Selection, cache: KVCache, carry: LayerCarry, own: LayerBlock, context: Context
) -> tuple[Float[Array, "B T N D"], KVCache, LayerCarry]:
    """Compute one layer's attention: over the chosen slots in a decode step, dense in the prompt and in layer 0."""
    source, (query, key, value, position) = selection.source, own
    memory = source.insert(carry.source, key, position)
    if context.compressed and carry.behind_first:
        cache = kvjax.insert(cache, key, value, position)
        slots = _chosen(selection, cache, memory, carry, query, position, context)
        out = _attend_chosen(cache, query, slots, context)
    else:
        dense = dataclasses.replace(context, predicted=None)  # which the source alone reads
        out, cache, _ = kvjax.observe(cache, query, key, value, position, policy=None, context=dense)
    carry = dataclasses.replace(carry, source=memory)
    if context.compressed and source.reads & {"first", "previous"}:
        true = sources.logits(query, floats_of(cache).key)
        if "first" in source.reads and not carry.behind_first:
            carry = dataclasses.replace(carry, first=true)
        if "previous" in source.reads:
            carry = dataclasses.replace(carry, previous=true)
    return out, cache, carry


def _attend_chosen(
    cache: KVCache, query: Float[Array, "B 1 N D"], slots: Int[Array, "B N M"], context: Context
) -> Float[Array, "B 1 N D"]:
    """Attend over the chosen slots, on a mesh each device over those of its own heads."""

    def of_device(own: KVCache, query: Array, slots: Array, sinks: Array | None) -> Array:
        how: Any = dict(soft_cap=context.soft_cap, sink_logits=sinks, implementation=implementation_for("auto", own))
        return select_attention(query, **own.attended(), slots=slots, **how)

    given = (query, OF_TOKENS), (slots, OF_HEADS), (context.sink_logits, OF_QUERY_HEADS)
    return enter(cache, of_device, *given, outputs=OF_TOKENS)


def _chosen(
    selection: Selection,
    cache: KVCache,
    memory: Any,
    carry: LayerCarry,
    query: Float[Array, "B 1 N D"],
    position: Int[Array, "B 1"],
    context: Context,
) -> Int[Array, "B N M"]:
    """Return the slots that each query head reads."""
    source, layer, window = selection.source, context.layer, context.sliding_window
    assert layer is not None
    slot_position = cache.position
    if window is not None:  # tokens outside the layer's window cannot be chosen
        slot_position = jnp.where(position[:, :, None] - slot_position < window, slot_position, -1)
    predicted = None
    if "predicted" in source.reads:
        assert carry.predicted is not None
        own, keys, *_ = carry.predicted
        assert own is not None and keys is not None
        predicted = sources.logits(own, keys)
    reading = sources.Reading(
        query=query,
        query_position=position,
        position=slot_position,
        layer=layer,
        key=floats_of(cache).key if "key" in source.reads else None,
        predicted=predicted,
        first=carry.first,
        previous=carry.previous,
        soft_cap=context.soft_cap,
    )
    wanted = source.importance(memory, reading)[:, :, 0]
    return kvjax.select(wanted, slot_position, selection.budget, sinks=selection.sinks)


def parse_select(select: Source | str | None) -> Source | None:
    """Return the source of a short name; None for "full"."""
    if isinstance(select, str):
        return None if select.strip() == "full" else kvjax.parse_source(select)
    if select is not None and not isinstance(select, Source):
        raise ValueError(f"select is {select!r}; give a source of kvjax.sources or its short name, such as 'oracle'.")
    return select


def check_memory_is_kept(policy: Policy, instead: str) -> None:
    """Check that a policy reads no network that remembers tokens outside the cache; else name one to give instead."""
    if remembers(policy):
        raise ValueError(f"{policy.name!r} reads a network that remembers tokens; give another, such as {instead}.")


def checked_selection(
    select: Source | str | None,
    policy: Policy | None,
    budget: int | float | str | None,
    sinks: int,
    prompt: int,
    answer: int,
) -> Selection | None:
    """Check a run's arguments for selection, and return the selection, None without ``select``.

    The longest row has ``prompt`` tokens, which ``answer`` tokens may follow.
    """
    source = parse_select(select)
    if source is None:
        return None
    if policy is not None:
        raise ValueError(f"both policy={policy.name!r} and select={source.name!r} were given; choose one.")
    if budget is None:
        raise ValueError(f"select={source.name!r} needs a budget: the tokens that a step reads, or their share (0.5).")
    budget = check_share_or_tokens(budget)
    if not isinstance(budget, float) and budget > prompt + answer:
        raise ValueError(f"the budget of {budget} tokens per step is more than all {prompt + answer}; give fewer.")
    sinks = check_count("sinks", sinks, 0, "give the number of first tokens that are always read, an int from 0")
    return Selection(source, budget, sinks)


def tokens_read(selection: Selection, tokens: int) -> int:
    """Return how many of ``tokens`` tokens a head reads at most in a step."""
    budget = selection.budget
    chosen = share_of_tokens(budget, tokens) if isinstance(budget, float) else budget
    return min(chosen + selection.sinks, tokens)
