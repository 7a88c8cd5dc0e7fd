"""A model's output when every head reads only what a selection keeps: teacher-forced, a whole sequence at once.

In every layer but layer 0, query i reads a part of the i + 1 tokens so far: the ``ceil((i + 1)(1 - sparsity))`` tokens
that the selection ranks highest, and the first ``sinks`` tokens beside them. No recent window is forced: a query's own
token competes like the others. So arXiv 2503.07518 simulates decoding: there is no prompt, each query head has its
own set of tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import kvjax
import models
from evals.selections import ORACLE_EVICTION, Heads, Selection, kept_tokens, parse_selection
from kernels_pallas.softmax import scaled
from kvjax import sources
from models.butler import Butler
from models.decoder import frequencies, rope_of_layer
from models.networks import Networks, network_of, read_by

QUERIES_A_CHUNK = 128


class Hits(NamedTuple):
    """A source's choice compared with the oracle's, per layer and query, as means over heads.

    ``share`` is the share of the oracle's tokens that are chosen, ``mass`` the true attention on the chosen tokens.
    """

    share: Float[Array, "L B T"]
    mass: Float[Array, "L B T"]


def hidden_states(
    model: models.Decoder,
    tokens: Int[Array | np.ndarray, "B T"],
    selection: str | Selection,
    sparsity: float,
    *,
    networks: Networks = None,
    sinks: int = 4,
    heads: Heads = "query",
    chunk: int = QUERIES_A_CHUNK,
) -> Float[Array, "B T E"]:
    """Run a teacher-forced forward in which each query reads only what the selection keeps; return its hidden states.

    Each shape and selection is compiled once; the sparsity is an argument of the compiled program. Memory grows with
    ``chunk`` x T for sources and with T for policies, and not with the number of layers.

    Args:
        tokens: whole sequences. Padding after them changes nothing before it.
        selection: a selection, or its short name (evals/selections.py).
        sparsity: the share of the tokens that a query does not read, in [0, 1).
        networks: the network that the selection reads, or several, of which it takes its own.
        sinks: the number of first tokens that are always read, beyond the budget.
        heads: with "query", each query head has its own tokens (the paper); with "group", the heads of a group share
            them under a policy.
        chunk: the number of queries that are computed at a time.

    Raises:
        ValueError: the sparsity is outside [0, 1), the tokens are not [B, T], the predictor is missing, or ``sinks``
            is negative.
    """
    tokens, selection, network = _check(model, tokens, selection, sparsity, networks, chunk)
    if sinks < 0:
        raise ValueError(f"sinks is {sinks}; give at least 0.")
    if heads not in ("query", "group"):
        raise ValueError(f"heads is {heads!r}; expected 'query' or 'group'.")
    kept = kept_tokens(tokens.shape[1], sparsity)
    policy = selection.policy
    if policy is None and selection.name != ORACLE_EVICTION:
        return _selecting(model, tokens, kept, network, selection.source, sinks, chunk)
    if policy is None:
        return _evicting(model, tokens, kept, None, None, None, sinks, chunk)
    if network is not None:
        policy = network.fitted(policy)
    policy = with_sinks(policy, sinks)
    if heads == "query" and policy.heads == "group":
        policy = dataclasses.replace(policy, heads="query")
    projection = models.output_projection(model, policy)
    return _evicting(model, tokens, kept, projection, network, policy, sinks, chunk)


class Simulation(NamedTuple):
    """A selection at a sparsity, and what it reads beside the model; see :func:`hidden_states`."""

    selection: Selection
    sparsity: float = 0.0
    networks: Networks = None
    sinks: int = 4
    heads: Heads = "query"

    def hidden_states(self, model: models.Decoder, tokens: Int[Array | np.ndarray, "B T"]) -> Float[Array, "B T E"]:
        """Return the hidden states of whole sequences."""
        return hidden_states(
            model, tokens, self.selection, self.sparsity, networks=self.networks, sinks=self.sinks, heads=self.heads
        )


DENSE = Simulation(parse_selection("full"))


def hits(
    model: models.Decoder,
    tokens: Int[Array | np.ndarray, "B T"],
    selection: str | Selection,
    sparsity: float,
    *,
    networks: Networks = None,
    chunk: int = QUERIES_A_CHUNK,
) -> Hits:
    """Measure how much of the oracle's choice a source chooses, too, while the model itself runs dense.

    Both sets are the ``ceil((i + 1)(1 - sparsity))`` best tokens of query i by raw logits, without sinks. Layer 0,
    which is never predicted, has figures, too. Errors are those of :func:`hidden_states`, and ValueError where there is
    no source.
    """
    tokens, selection, network = _check(model, tokens, selection, sparsity, networks, chunk)
    if selection.source is None:
        raise ValueError(
            f"{selection.name!r} is not a source of importance; expected one of {', '.join(sources.SOURCES.names())}."
        )
    return _hits(model, tokens, kept_tokens(tokens.shape[1], sparsity), network, selection.source, chunk)


@jax.jit
def last_logits(model: models.Decoder, tokens: Int[Array | np.ndarray, "B T"]) -> Float[Array, "L B N T"]:
    """Return the true attention logits ``q.k / sqrt(D)`` of each sequence's last query, in every layer and head.

    They are those before a model's soft cap.
    """

    def of_layer(layer):
        return layer.dense(QUERIES_A_CHUNK), sources.logits(layer.query[:, -1:], layer.key)[:, :, 0]

    return _run(model, tokens, None, None, of_layer)[1]


@jax.jit
def attention_logits(
    model: models.Decoder, tokens: Int[Array | np.ndarray, "B T"], queries: Int[Array | np.ndarray, "R"]
) -> tuple[Float[Array, "L B N R T"], Float[Array, "L B K T D"]]:
    """Return the attention logits of some queries, -inf for tokens that a query does not see, and all tokens' values.

    The logits are those that the model's softmax reads, with its soft cap. ``queries`` are positions; one of -1 sees
    nothing.
    """
    queries = jnp.broadcast_to(queries, (len(tokens), len(queries)))

    def of_layer(layer):
        query = jnp.take_along_axis(layer.query, jnp.maximum(queries, 0)[..., None, None], axis=1)
        return layer.dense(QUERIES_A_CHUNK), (layer.logits(queries, query), layer.value)

    return _run(model, tokens, None, None, of_layer)[1]


def with_sinks(policy: kvjax.Policy, sinks: int) -> kvjax.Policy:
    """Return the policy that also keeps the first ``sinks`` tokens."""
    if not sinks:
        return policy
    return kvjax.chain(*(policy.links or (policy,)), kvjax.protect(sinks=sinks)) @ policy.allocation


def _check(model, tokens, selection, sparsity, networks, chunk) -> tuple[Array, Selection, Butler | None]:
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; give at least 1 query.")
    if not 0 <= sparsity < 1:
        raise ValueError(f"the sparsity is {sparsity}; give the share of tokens that a query does not read, in [0, 1).")
    selection = parse_selection(selection) if isinstance(selection, str) else selection
    read = read_by(networks, selection.policy, selection.source)
    network = network_of(read, model.config, selection.policy, selection.source)
    if network is not None and not isinstance(network, Butler):
        raise ValueError(
            f"{selection.name!r} reads the {network.name} in each layer, but what is simulated reads only a network "
            "that looks ahead; run it as a policy."
        )
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"the tokens have the shape {tokens.shape}; give [B, T], at least one sequence of one token.")
    return tokens, selection, network


class _Layer:
    """One layer's sequences, read by some queries at a time; ``arrays`` hold the inputs per query."""

    def __init__(self, context: kvjax.Context, parts, source, other):
        query, key, value = parts
        B, T, K, D = key.shape
        self.index: Any = context.layer
        self.sliding_window, self.soft_cap = context.sliding_window, context.soft_cap
        self.source = source
        self.foreseen: Any = (foreseen := context.predicted)
        self.query, self.key, self.value = query, key.swapaxes(1, 2), value.swapaxes(1, 2)  # keys [B, K, T, D]
        self.position = jnp.broadcast_to(jnp.arange(T), (B, T))
        self.slots = jnp.broadcast_to(jnp.arange(T), (B, K, T))
        self.arrays = [query]
        if foreseen is not None:
            self.arrays.append(foreseen.query)
        elif other is not None:
            self.arrays.append(other[0])
            self.other_key = other[1].swapaxes(1, 2)
        if source is not None:
            self.state = source.insert(source.init(B, K, T, D), key, self.position)

    def importance(self, position, query, other_query=None) -> Float[Array, "B N C T"]:
        """Return the importance from the source, -inf for tokens that a query does not see."""
        given: dict[str, Any] = {}
        if "predicted" in self.source.reads:
            given["predicted"] = sources.logits(other_query, self.foreseen.key.swapaxes(1, 2))
        for name in self.source.reads & {"first", "previous"}:
            given[name] = sources.logits(other_query, self.other_key)
        reading = sources.Reading(query, position, self.slots, self.index, key=self.key, **given)
        reading = reading._replace(soft_cap=self.soft_cap)
        of_heads = self.source.importance(self.state, reading)
        of_heads = jnp.repeat(of_heads, query.shape[2] // of_heads.shape[1], axis=1)  # a group may choose together
        return jnp.where(self.visible(position), of_heads, -jnp.inf)

    def visible(self, position: Int[Array, "B C"]) -> Bool[Array, "B 1 C T"]:
        age = position[:, None, :, None] - jnp.arange(self.position.shape[1])[None, None, None]
        seen = (age >= 0) & (position >= 0)[:, None, :, None]
        return seen if self.sliding_window is None else seen & (age < self.sliding_window)

    def logits(self, position, query) -> Float[Array, "B N C T"]:
        """Return the true attention logits, -inf for tokens that a query does not see."""
        return jnp.where(self.visible(position), scaled(sources.logits(query, self.key), 1, self.soft_cap), -jnp.inf)

    def attend(self, logits: Float[Array, "B N C T"]) -> Float[Array, "B C N D"]:
        """Attend to the tokens whose logit is above -inf; the output is 0 for queries that read nothing."""
        B, N, C, T = logits.shape
        K = self.key.shape[1]
        weights = _softmax(logits).reshape(B, K, N // K, C, T).astype(self.value.dtype)
        out = jnp.einsum("bkgct,bktd->bkgcd", weights, self.value, preferred_element_type=logits.dtype)
        return jnp.moveaxis(out, 3, 1).reshape(B, C, N, -1).astype(self.query.dtype)

    def dense(self, chunk: int) -> Float[Array, "B T N D"]:
        """Return the dense attention output of the model itself."""
        return _in_chunks(lambda *some: self.attend(self.logits(*some)), chunk, self.position, self.query)


def _softmax(logits: Float[Array, "*any T"]) -> Float[Array, "*any T"]:
    """Compute the softmax over the last axis, with zeros where all are -inf."""
    peak = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(peak), peak, 0))
    return weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), jnp.finfo(weights.dtype).tiny)


def _in_chunks(function, chunk, position, *arrays):
    """Map ``function(position [B, C], arrays [B, C, ...])`` over all queries; those of padding have position -1."""
    B, T = position.shape
    chunk = min(chunk, T)
    short = -T % chunk

    def cut(array, fill):
        array = jnp.pad(array, ((0, 0), (0, short)) + ((0, 0),) * (array.ndim - 2), constant_values=fill)
        return jnp.moveaxis(array.reshape(B, -1, chunk, *array.shape[2:]), 1, 0)

    parts = (cut(position, -1), *(cut(array, 0) for array in arrays))
    out = jax.lax.map(lambda part: function(*part), parts)
    return jnp.moveaxis(out, 0, 1).reshape(B, T + short, *out.shape[3:])[:, :T]


def _run(model, tokens, network, source, of_layer):
    """Run the model with ``of_layer(layer) -> attention output, output of the layer``; see :class:`_Layer`."""
    B, T = tokens.shape
    config = model.config
    said = None if network is None else network.over_sequences(model, tokens)
    follows = set() if source is None else source.reads & {"first", "previous"}

    def attend(other, index, sliding_window, query, key, value):
        foreseen = None if network is None else network.predict(index, query, said)
        context = kvjax.Context(index, sliding_window, predicted=foreseen, soft_cap=config.attention_soft_cap)
        out, output = of_layer(_Layer(context, (query, key, value), source, other))
        if follows == {"previous"}:
            other = query, key
        elif follows == {"first"}:
            other = jax.tree.map(lambda new, old: jnp.where(index == 0, new, old), (query, key), other)
        return out, other, output

    position = jnp.broadcast_to(jnp.arange(T), (B, T))
    other = None
    if follows:
        shapes = ((B, T, heads, config.head_dim) for heads in (config.num_heads, config.num_kv_heads))
        other = tuple(jnp.zeros(shape, model.embedding[...].dtype) for shape in shapes)
    hidden, _, outputs = model.run(tokens, position, jnp.full(B, T), attend, other)
    return hidden, outputs


@functools.partial(jax.jit, static_argnames=("source", "sinks", "chunk"))
def _selecting(model, tokens, kept, network, source, sinks, chunk):
    def of_layer(layer):
        if source is None:
            return layer.dense(chunk), None

        def of_queries(position, query, *others):
            budget = jnp.asarray(kept)[jnp.maximum(position, 0)]
            reads = kvjax.selected_mask(
                layer.importance(position, query, *others), layer.slots, budget, sinks=sinks, query_position=position
            )
            return layer.attend(jnp.where(reads, layer.logits(position, query), -jnp.inf))

        def selecting():
            return _in_chunks(of_queries, chunk, layer.position, *layer.arrays)

        return _dense_at_first(layer, selecting, chunk), None

    return _run(model, tokens, network, source, of_layer)[0]


@functools.partial(jax.jit, static_argnames=("source", "chunk"))
def _hits(model, tokens, kept, network, source, chunk):
    def of_layer(layer):
        def of_queries(position, query, *others):
            budget = jnp.asarray(kept)[jnp.maximum(position, 0)]

            def best(scores):
                chosen = kvjax.selected_mask(scores, layer.slots, budget, sinks=0, query_position=position)
                return chosen & layer.visible(position)

            true = layer.logits(position, query)
            wanted, chosen = best(true), best(layer.importance(position, query, *others))
            share = jnp.sum(wanted & chosen, axis=-1) / jnp.maximum(jnp.sum(wanted, axis=-1), 1)  # [B, N, C]
            mass = jnp.sum(jnp.where(chosen, _softmax(true), 0), axis=-1)
            return jnp.stack([jnp.mean(share, axis=1), jnp.mean(mass, axis=1)], axis=-1)

        return layer.dense(chunk), _in_chunks(of_queries, chunk, layer.position, *layer.arrays)

    return Hits(*jnp.moveaxis(_run(model, tokens, network, source, of_layer)[1], -1, 0))


@functools.partial(jax.jit, static_argnames=("policy", "sinks", "chunk"))
def _evicting(model, tokens, kept, projection, network, policy, sinks, chunk):
    """Run the model while a policy, or the oracle if it is None, evicts token by token in each layer."""
    config, (B, T) = model.config, tokens.shape
    frequency = None
    if policy is not None and (policy.needs.rotary or policy.positions != "absolute"):
        frequency = frequencies(config, jnp.full(B, T))

    def of_layer(layer):
        def evicting():
            if policy is None:
                return _oracle_evicting(layer, kept, sinks)
            of_this = None if projection is None else projection[layer.index]
            own = None if frequency is None else rope_of_layer(config, layer.index, frequency)
            return _policy_evicting(layer, kept, policy, sinks, own, of_this)

        return _dense_at_first(layer, evicting, chunk), None

    return _run(model, tokens, network, None, of_layer)[0]


def _dense_at_first(layer: _Layer, others: Callable[[], Array], chunk: int) -> Float[Array, "B T N D"]:
    """Return the dense output in layer 0, and that of ``others`` in all other layers."""
    return jax.lax.cond(layer.index == 0, lambda: layer.dense(chunk), others)


def _policy_evicting(layer: _Layer, kept, policy, sinks, frequency, projection) -> Float[Array, "B T N D"]:
    """Run the library's decode steps on a cache of one layer."""
    B, T, N, D = layer.query.shape
    K = N if policy.heads == "query" else layer.key.shape[1]
    cache = kvjax.KVCache.init(
        batch=B, kv_heads=K, slots=T, head_dim=D, dtype=layer.key.dtype, state=policy.init(B, K, N // K, T, D),
        positions=policy.positions,
    )  # fmt: skip

    def step(cache, token):
        query, key, value, predicted, at, budget = token
        out, cache = kvjax.attend(
            cache,
            query[:, None],
            key[:, None],
            value[:, None],
            jnp.full((B, 1), at),
            policy=policy,
            budget=budget + sinks,
            context=kvjax.Context(
                excess=1,
                layer=layer.index,  # the cache holds one layer, but some scores depend on its index
                sliding_window=layer.sliding_window,
                frequency=frequency,
                soft_cap=layer.soft_cap,
                projection=projection,
                predicted=None if predicted is None else jax.tree.map(lambda x: x[:, None], predicted),
                compressed=False,  # there is no prompt before, so each step may score anew
            ),
        )
        return cache, out[:, 0]

    key, value = (jnp.moveaxis(x, 2, 0) for x in (layer.key, layer.value))  # [T, B, K, D]
    predicted = jax.tree.map(lambda x: x.swapaxes(0, 1), layer.foreseen)
    tokens = (layer.query.swapaxes(0, 1), key, value, predicted, jnp.arange(T), jnp.asarray(kept))
    return jax.lax.scan(step, cache, tokens)[1].swapaxes(0, 1)


def _oracle_evicting(layer: _Layer, kept, sinks) -> Float[Array, "B T N D"]:
    """Let each query read the best remaining tokens by its own logits, and evict the others."""
    B, T, N, _ = layer.query.shape
    every = jnp.arange(T)

    def step(left, token):  # left [B, N, T]: tokens that no query has left out, including later ones
        query, at, budget = token
        position = jnp.full((B, 1), at)
        logits = layer.logits(position, query[:, None])
        reads = kvjax.selected_mask(
            logits[:, :, 0], jnp.where(left, every[None, None], -1), jnp.full(B, budget), sinks=sinks,
            query_position=position[:, 0],
        )  # fmt: skip
        out = layer.attend(jnp.where(reads[:, :, None], logits, -jnp.inf))
        return reads | (every > at)[None, None], out[:, 0]

    tokens = (layer.query.swapaxes(0, 1), every, jnp.asarray(kept))
    return jax.lax.scan(step, jnp.ones((B, N, T), bool), tokens)[1].swapaxes(0, 1)
