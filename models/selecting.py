"""Selection and prediction: a source of importance chooses what a step reads; a predictor scores tokens ahead.

prompt      dense, by blocks; the predictor and the source see every token
a step      layer 0 dense, then the predictor's queries; each other layer reads the slots that `kvjax.select` chose
a policy    whose base score is `butler` gets the predictor's queries and keys of the block, and evicts by them
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import kvjax
from kernels_pallas import select_attention
from kvjax import Context, Evidence, Policy, Prediction, sources
from kvjax.cache import floats_of
from kvjax.checks import check_count, check_share_or_tokens
from kvjax.insertion import Cache
from kvjax.selection import share_of_tokens
from kvjax.sources import Source
from models.butler import Butler, ButlerCache, ButlerConfig, butler_input, importance
from models.config import Config
from models.decoder import Decoder
from models.scorer import Scorer


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

    ``cache`` is that of all layers, or of the one that runs. ``evidence`` is what a policy has returned so far, where
    all layers are evicted from together. ``predictor`` and ``source`` are the states of the predictor and the source.
    ``query`` and ``key`` are the predictor's output for the block (keys only where its cache does not keep them).
    ``score`` is the scorer's for the block in the layer that runs.
    ``first`` and ``previous`` are the true logits of layer 0 and of the previous layer, where the source reads them.
    ``behind_first`` says that layer 0 has run and, if there is a predictor, that it has run too.
    """

    cache: Cache
    evidence: Evidence | None
    predictor: ButlerCache | None
    source: Any
    query: Float[Array, "layers B T N dim"] | None = None
    key: Float[Array, "layers B T N dim"] | None = None
    score: Float[Array, "B T K"] | None = None
    first: Float[Array, "B N T S"] | None = None
    previous: Float[Array, "B N T S"] | None = None
    behind_first: bool = dataclasses.field(default=False, metadata={"static": True})


def predictor_input(butler: Butler, model: Decoder, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"] | None:
    """Return the input of layer 0's attention if the predictor reads it; None if it reads layer 0's output."""
    if butler.config.source != "attention_input":
        return None
    return butler_input(model, tokens, source="attention_input")


def run_predictor(
    keeps: bool,
    butler: Butler | None,
    position: Int[Array, "B T"],
    entered: Float[Array, "B T E"] | None,
    x: Float[Array, "B T E"],
    carry: LayerCarry,
) -> LayerCarry:
    """Run the predictor on a block, between layer 0 and the others.

    Args:
        keeps: whether the predictor's cache keeps the importance keys; else they are passed on with the queries.
        entered: see :func:`predictor_input`.
        x: layer 0's output.
    """
    query, key, memory = None, None, carry.predictor
    if butler is not None and memory is not None:
        x = x if entered is None else entered
        if keeps:
            query, memory = butler.step(memory, x, position)
        else:
            (query, key), memory = butler.advance(memory, x, position)
    return dataclasses.replace(carry, predictor=memory, query=query, key=key, behind_first=True)


def prediction(
    predictor: ButlerConfig | None, carry: LayerCarry, layer: Int[Array, ""], shape: tuple[int, ...]
) -> Prediction | None:
    """Return what is predicted for a block [B, T] in one layer, as a policy reads it; zeros for layer 0's keys."""
    if carry.score is not None:
        return Prediction(score=carry.score)
    if predictor is None or (carry.behind_first and carry.key is None):
        return None
    if not carry.behind_first:
        nothing = jnp.zeros((*shape, predictor.num_heads, predictor.dim))
        return Prediction(nothing, nothing)
    of_layer = (jax.lax.dynamic_index_in_dim(x, layer - 1, keepdims=False) for x in (carry.query, carry.key))
    return Prediction(*of_layer)


def attend(
    selection: Selection,
    cache: Cache,
    carry: LayerCarry,
    rows: tuple[Float[Array, "B T N D"], Float[Array, "B T K D"], Float[Array, "B T K D"]],
    position: Int[Array, "B T"],
    context: Context,
) -> tuple[Float[Array, "B T N D"], Cache, LayerCarry]:
    """Compute one layer's attention: over the chosen slots in a decode step, dense in the prompt and in layer 0."""
    source, layer, (query, key, value) = selection.source, context.layer, rows
    assert layer is not None
    stacked = len(cache.heads_shape) == 3
    memory = source.insert(carry.source, key, position, layer)
    if context.compressed and carry.behind_first:
        cache = kvjax.insert(cache, key, value, position, layer=layer if stacked else None)
        slots = _chosen(selection, cache, memory, carry, query, position, context)
        number = layer if stacked else None
        out = select_attention(query, **cache.arrays.rows, slots=slots, layer=number, soft_cap=context.soft_cap)
    else:
        out, cache, _ = kvjax.observe(cache, query, key, value, position, policy=None, context=context)
    carry = dataclasses.replace(carry, source=memory)
    if context.compressed and source.reads & {"first", "previous"}:
        here = cache.layer(layer if stacked else None)
        true = sources.logits(query, floats_of(here).key)
        if "first" in source.reads and not carry.behind_first:
            carry = dataclasses.replace(carry, first=true)
        if "previous" in source.reads:
            carry = dataclasses.replace(carry, previous=true)
    return out, cache, carry


def _chosen(
    selection: Selection,
    cache: Cache,
    memory: Any,
    carry: LayerCarry,
    query: Float[Array, "B 1 N D"],
    position: Int[Array, "B 1"],
    context: Context,
) -> Int[Array, "B N M"]:
    """Return the slots that each query head reads."""
    source, layer, window = selection.source, context.layer, context.sliding_window
    assert layer is not None
    here = cache.layer(layer if len(cache.heads_shape) == 3 else None)
    slot_position = here.position
    if window is not None:  # tokens outside the layer's window cannot be chosen
        slot_position = jnp.where(position[:, :, None] - slot_position < window, slot_position, -1)
    predicted = None
    if "predicted" in source.reads:
        assert carry.query is not None and carry.predictor is not None
        predicted = importance(carry.query, carry.predictor.importance_key, layer)
    reading = sources.Reading(
        query=query,
        query_position=position,
        position=slot_position,
        layer=layer,
        key=floats_of(here).key if "key" in source.reads else None,
        predicted=predicted,
        first=carry.first,
        previous=carry.previous,
        soft_cap=context.soft_cap,
    )
    of_layer = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False), memory)
    wanted = source.importance(of_layer, reading)[:, :, 0]
    return kvjax.select(wanted, slot_position, selection.budget, sinks=selection.sinks)


def parse_select(select: Source | str | None) -> Source | None:
    """Return the source of a short name; None for "full"."""
    if isinstance(select, str):
        return None if select.strip() == "full" else kvjax.parse_source(select)
    if select is not None and not isinstance(select, Source):
        raise ValueError(f"select is {select!r}; give a source of kvjax.sources or its short name, such as 'oracle'.")
    return select


def asks_for_predictor(policy: Policy | None, source: Source | None) -> str | None:
    """Return which argument needs a predictor, in words; None if none does."""
    if source is not None and "predicted" in source.reads:
        return f"select={source.name!r}"
    if policy is not None and policy.needs.prediction:
        return f"the policy {policy.name!r}"
    return None


def check_memory_is_kept(policy: Policy, instead: str) -> None:
    """Check that a policy remembers nothing outside the cache.

    Raises:
        ValueError: it scores by a predictor; the message names a policy that does not.
    """
    if policy.needs.prediction:
        raise ValueError(
            f"{policy.name!r} scores by a predictor, which remembers tokens outside the cache, so nothing later can "
            f"continue from it; give another policy, such as {instead}."
        )


def checked_selection(
    select: Source | str | None,
    policy: Policy | None,
    budget: int | float | None,
    sinks: int,
    prompt: int,
    answer: int,
) -> Selection | None:
    """Check a run's arguments for selection, and return the selection, None without ``select``.

    Args:
        prompt: the number of tokens of the longest row.
        answer: the number of tokens that may follow.
    """
    source = parse_select(select)
    if source is None:
        return None
    if policy is not None:
        raise ValueError(
            f"both policy={policy.name!r} and select={source.name!r} were given; a policy evicts tokens, a selection "
            "keeps all and reads some of them: choose one."
        )
    if budget is None:
        raise ValueError(
            f"select={source.name!r} needs a budget: the number of tokens that a step reads, or their share (0.5)."
        )
    budget = check_share_or_tokens(budget)
    if not isinstance(budget, float) and budget > prompt + answer:
        raise ValueError(
            f"the budget of {budget} tokens per step is more than the {prompt + answer} tokens in all ({prompt} in the "
            f"prompt, up to {answer} in the answer); give fewer, or leave select out to read them all."
        )
    sinks = check_count("sinks", sinks, 0, "give the number of first tokens that are always read, an int from 0")
    return Selection(source, budget, sinks)


def check_butler(config: Config, butler: Butler | None, policy: Policy | None, selection: Selection | None) -> None:
    """Check that a predictor is given exactly if it is needed, and that it is one of this model."""
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
    _check_same_model("predictor", "num_heads", config, butler.config)


def scored(scorer: Scorer, carry: LayerCarry, layer: Int[Array, ""], x: Float[Array, "B T E"]) -> LayerCarry:
    """Return the carry with the scorer's scores of a block in one layer; ``x`` is the input of its attention."""
    return dataclasses.replace(carry, score=scorer(layer, x))


def check_scorer(config: Config, scorer: Scorer | None, policy: Policy | None) -> None:
    """Check that a scorer is given exactly if the policy reads it, and that it is one of this model."""
    asks = policy is not None and policy.needs.score
    if scorer is None:
        if asks:
            assert policy is not None
            raise ValueError(
                f"the policy {policy.name!r} needs a scorer: pass scorer=models.load_scorer(folder, model), after "
                "training one with python -m train.scorer."
            )
        return
    if not asks:
        raise ValueError(
            "a scorer was given, but no policy scores by it; pass one that does, such as 'zap', or leave scorer out."
        )
    _check_same_model("scorer", "num_kv_heads", config, scorer.config)


def _check_same_model(what: str, heads: str, config: Config, made_for: Any) -> None:
    sizes = ("hidden_size", "num_layers", heads)
    ours, theirs = (tuple(getattr(of, size) for size in sizes) for of in (config, made_for))
    if ours != theirs:
        letters = f"E, L, {'K' if heads == 'num_kv_heads' else 'N'}"
        raise ValueError(
            f"the {what} is of another model, with {letters} = {theirs}; this one has {ours}: train one for it."
        )


def tokens_read(selection: Selection, tokens: int) -> int:
    """Return how many of ``tokens`` tokens a head reads at most in a step."""
    budget = selection.budget
    chosen = share_of_tokens(budget, tokens) if isinstance(budget, float) else budget
    return min(chosen + selection.sinks, tokens)
