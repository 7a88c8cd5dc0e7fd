"""Decoding with something beside the cache: a predictor, and a source of importance that says what a step reads.

    prompt      dense, by blocks; the predictor and the source see every token
    a step      layer 0 dense, then the predictor's queries; each other layer reads the slots that `kvjax.select` chose
    a policy    whose base score is `butler` gets the predictor's queries and keys of the block, and evicts by them

What they remember travels with the cache, as one :class:`Guided`, and is donated with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import kvjax
from kernels_pallas import select_attention
from kvjax import KVCache, PagedCache, Policy, Prediction, sources
from kvjax.checks import check_count, plain
from kvjax.select import share_of_tokens
from kvjax.sources import Source
from models.butler import Butler, ButlerCache, butler_input, importance
from models.config import Config
from models.decoder import Decoder

Cache = KVCache | PagedCache


@dataclasses.dataclass(frozen=True)
class Selection:
    """Who says what a decode step reads, and how much: see :func:`kvjax.select`."""

    source: Source
    budget: int | float
    sinks: int
    # 1 == 1.0, but one token is not all of them: programs are found by equality.
    is_share: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_share", isinstance(self.budget, float))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guided:
    """A cache, and what a predictor and a source of importance remember beside it."""

    cache: Cache
    butler: ButlerCache | None
    source: Any
    selection: Selection | None = dataclasses.field(metadata={"static": True})

    @property
    def next_position(self) -> Int[Array, "B"]:
        """The cache's."""
        return self.cache.next_position

    @property
    def num_slots(self) -> int:
        """The cache's."""
        return self.cache.num_slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Beside:
    """What the layers of one block hand on to each other beside the cache.

    ``query`` and ``key`` are the predictor's for the block (keys only where its cache does not keep them); ``first``
    and ``previous`` the true logits of layer 0 and of the layer before, where the source reads them; ``behind_first``
    says that layer 0 has run, and that the predictor, if there is one, has spoken.
    """

    butler: ButlerCache | None
    source: Any
    query: Float[Array, "layers B T N dim"] | None = None
    key: Float[Array, "layers B T N dim"] | None = None
    first: Float[Array, "B N T S"] | None = None
    previous: Float[Array, "B N T S"] | None = None
    behind_first: bool = dataclasses.field(default=False, metadata={"static": True})


def start(cache: Cache, selection: Selection | None, butler: Butler | None, slots: int) -> Guided:
    """An empty cache with an empty memory beside it, for texts of up to ``slots`` tokens."""
    B, K = cache.heads_shape[-2:]
    state: Any = ()
    if selection is not None:
        state = selection.source.init(B, K, slots, cache.key.shape[-1], layers=cache.heads_shape[0])
    of_butler = None
    if butler is not None:  # a policy keeps the importance keys with its tokens, so that they are evicted, too
        of_butler = butler.init_cache(B, slots, importance_keys=selection is not None)
    return Guided(cache, of_butler, state, selection)


def inner(cache: Cache | Guided) -> Cache:
    """The cache alone."""
    return cache.cache if isinstance(cache, Guided) else cache


def foresee(
    model: Decoder, butler: Butler | None, tokens: Int[Array, "B T"], position: Int[Array, "B T"], keeps: bool
) -> Callable[[Float[Array, "B T E"], Beside], Beside]:
    """The hook behind layer 0: runs the predictor on the block.

    Args:
        keeps: whether the predictor's cache keeps the importance keys; else they are handed on with the queries.
    """

    def after_first(x: Float[Array, "B T E"], beside: Beside) -> Beside:
        query, key, memory = None, None, beside.butler
        if butler is not None and memory is not None:
            if butler.config.source == "attention_input":
                x = butler_input(model, tokens, source="attention_input")
            if keeps:
                query, memory = butler.step(memory, x, position)
            else:
                (query, key), memory = butler.advance(memory, x, position)
        return dataclasses.replace(beside, butler=memory, query=query, key=key, behind_first=True)

    return after_first


def prediction(beside: Beside | None, butler: Butler | None, layer: Int[Array, ""], shape: tuple[int, int]) -> Any:
    """What the predictor says of a block [B, T] in one layer, as a policy reads it; zeros for layer 0."""
    if beside is None or butler is None:
        return None
    if not beside.behind_first:
        nothing = jnp.zeros((*shape, butler.config.num_heads, butler.config.dim), butler.reduce[...].dtype)
        return Prediction(nothing, nothing)
    of_layer = (jax.lax.dynamic_index_in_dim(x, layer - 1, keepdims=False) for x in (beside.query, beside.key))
    return Prediction(*of_layer)


def attend(
    selection: Selection,
    cache: Cache,
    beside: Beside,
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    position: Int[Array, "B T"],
    layer: Int[Array, ""],
    sliding_window: Int[Array, ""] | None,
    decoding: bool,
) -> tuple[Float[Array, "B T N D"], Cache, Beside]:
    """One layer: dense over the prompt and in layer 0; in a decode step else, over what the source chooses."""
    source = selection.source
    memory = source.insert(beside.source, key, position, layer)
    if decoding and beside.behind_first:
        cache = kvjax.insert(cache, key, value, position, layer=layer)
        slots = _chosen(selection, cache, memory, beside, query, position, layer, sliding_window)
        out = select_attention(query, cache.key, cache.value, slots, layer=layer)
    else:
        out, cache, _ = kvjax.observe(
            cache, query, key, value, position, policy=None, layer=layer, sliding_window=sliding_window
        )
    beside = dataclasses.replace(beside, source=memory)
    if decoding and source.reads & {"first", "previous"}:
        true = sources.logits(query, cache.key[layer])
        if "first" in source.reads and not beside.behind_first:
            beside = dataclasses.replace(beside, first=true)
        if "previous" in source.reads:
            beside = dataclasses.replace(beside, previous=true)
    return out, cache, beside


def _chosen(
    selection: Selection,
    cache: Cache,
    memory: Any,
    beside: Beside,
    query: Float[Array, "B 1 N D"],
    position: Int[Array, "B 1"],
    layer: Int[Array, ""],
    sliding_window: Int[Array, ""] | None,
) -> Int[Array, "B N M"]:
    """The slots that each query head reads."""
    source, slot_position = selection.source, cache.position[layer]
    if sliding_window is not None:  # what the layer cannot see is not there
        slot_position = jnp.where(position[:, :, None] - slot_position < sliding_window, slot_position, -1)
    predicted = None
    if "predicted" in source.reads:
        assert beside.query is not None and beside.butler is not None
        predicted = importance(beside.query, beside.butler.importance_key, layer)
    reading = sources.Reading(
        query=query,
        query_position=position,
        position=slot_position,
        layer=layer,
        key=cache.key[layer] if "key" in source.reads else None,
        predicted=predicted,
        first=beside.first,
        previous=beside.previous,
    )
    of_layer = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False), memory)
    wanted = source.importance(of_layer, reading)[:, :, 0]
    return kvjax.select(wanted, slot_position, selection.budget, sinks=selection.sinks)


def parse_select(select: Source | str | None) -> Source | None:
    """A source from its short name; None for "full"."""
    if isinstance(select, str):
        return None if select.strip() == "full" else kvjax.parse_source(select)
    if select is not None and not isinstance(select, Source):
        raise ValueError(f"select is {select!r}; give a source of kvjax.sources, or its short name, such as 'oracle'.")
    return select


def asks_for_predictor(policy: Policy | None, source: Source | None) -> str | None:
    """What needs a predictor, in words; None where nothing does."""
    if source is not None and "predicted" in source.reads:
        return f"select={source.name!r}"
    if policy is not None and policy.predicted:
        return f"the policy {policy.name!r}"
    return None


def checked_selection(
    select: Source | str | None,
    policy: Policy | None,
    budget: int | float | None,
    sinks: int,
    prompt: int,
    answer: int,
) -> Selection | None:
    """What the arguments of a run say of selection, or a sentence about what is wrong.

    Args:
        prompt: tokens of the longest row.
        answer: tokens that may follow.
    """
    source = parse_select(select)
    if source is None:
        return None
    if policy is not None:
        raise ValueError(
            f"both policy={policy.name!r} and select={source.name!r} were given; a policy evicts tokens and a "
            "selection reads some of all of them: choose one."
        )
    if budget is None:
        raise ValueError(
            f"select={source.name!r} needs a budget: how many tokens a step reads, or which share of them (0.5)."
        )
    budget = plain(budget)
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise ValueError(f"the budget is {budget!r}; give tokens (an int), or a share of them (a float in (0, 1]).")
    if isinstance(budget, float) and not 0 < budget <= 1:
        raise ValueError(f"the budget's share is {budget}; give a float in (0, 1], or an int for tokens.")
    if not isinstance(budget, float) and budget < 1:
        raise ValueError(f"the budget is {budget}; at least 1 token must be read.")
    if not isinstance(budget, float) and budget > prompt + answer:
        raise ValueError(
            f"the budget of {budget} tokens a step is more than the {prompt + answer} that there will be ({prompt} in "
            f"the prompt, up to {answer} in the answer); give fewer, or leave select out to read them all."
        )
    sinks = check_count("sinks", sinks, 0, "give how many first tokens are always read, an int from 0")
    return Selection(source, budget, sinks)


def check_butler(config: Config, butler: Butler | None, policy: Policy | None, selection: Selection | None) -> None:
    """Refuses a predictor that is missing, of another model, or that nothing asks for."""
    asks = asks_for_predictor(policy, None if selection is None else selection.source)
    if butler is None:
        if asks:
            raise ValueError(
                f"{asks} needs a predictor: pass butler=models.load_butler(folder, model), after training one with "
                "python -m train.butler."
            )
        return
    if not asks:
        raise ValueError(
            "a predictor was given, but nothing asks for it; pass select='butler', or a policy that scores by it, such "
            "as 'butler+caote', or leave butler out."
        )
    ours = (config.hidden_size, config.num_layers, config.num_heads)
    theirs = (butler.config.hidden_size, butler.config.num_layers, butler.config.num_heads)
    if ours != theirs:
        raise ValueError(
            f"the predictor is of another model, with E, L, N = {theirs}; this one has {ours}: train one for it."
        )


def tokens_read(selection: Selection, tokens: int) -> int:
    """How many of ``tokens`` tokens a head reads at most in a step."""
    budget = selection.budget
    chosen = share_of_tokens(budget, tokens) if isinstance(budget, float) else budget
    return min(chosen + selection.sinks, tokens)
