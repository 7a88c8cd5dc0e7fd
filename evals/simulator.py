"""A model's output when every head reads only what a selection keeps: teacher-forced, a whole sequence at once.

In every layer but layer 0, query i reads a part of the i + 1 tokens so far: the ``ceil((i + 1)(1 - sparsity))`` tokens
that the selection ranks highest, and the first ``sinks`` tokens beside them. No recent window is forced: a query's own
token competes like the others. So arXiv 2503.07518 simulates decoding: there is no prompt, each query head has its
own set of tokens.

Decode steps, :func:`models.teacher_forced` with ``select=``, give the same under a source, but not in a layer with a
sliding window, where they read a share of the window, and a query here counts all tokens so far. One after the other,
and compiled for each sparsity, they take 36 s of CPU time for four texts of 256 tokens in the shape of SmolLM2-135M,
and this 5 s. Evictions here have no such steps: a run keeps one budget as the text grows, and evicts in layer 0, too.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import kvjax
import models
from evals.selections import Heads, Selection, kept_tokens, parse_selection
from kernels_pallas.softmax import scaled
from kvjax import sources
from models.butler import Butler
from models.config import check_alike
from models.decoder import frequencies, rope_of_layer
from models.networks import Networks, network_of, read_by

QUERIES_AT_ONCE = 128


class Hits(NamedTuple):
    """A source's choice compared with the oracle's, per layer and query, as means over heads.

    ``share`` is the share of the oracle's tokens that are chosen, ``mass`` the true attention on the chosen tokens.
    """

    share: Float[Array, "L B T"]
    mass: Float[Array, "L B T"]


class Simulation(NamedTuple):
    """A selection at a sparsity, and what it reads beside the model.

    Attributes:
        selection: a selection, or its short name (evals/selections.py).
        sparsity: the share of the tokens that a query does not read, in [0, 1).
        networks: the network that the selection reads, or several, of which it takes its own.
        sinks: the number of first tokens that are always read, beyond the budget.
        heads: with "query", each query head has its own tokens (the paper); with "group", the heads of a group share
            them under a policy.
    """

    selection: str | Selection
    sparsity: float = 0.0
    networks: Networks = None
    sinks: int = 4
    heads: Heads = "query"

    def hidden_states(self, model: models.Decoder, tokens: Int[Array | np.ndarray, "B T"]) -> Float[Array, "B T E"]:
        """Run a teacher-forced forward in which each query reads only what the selection keeps: its hidden states.

        Each shape and selection is compiled once; the sparsity is an argument of what is compiled. Memory grows
        with T, for sources times the queries that are read at once, and not with the number of layers. Padding after
        the sequences changes nothing before it.

        Raises:
            ValueError: the sparsity is outside [0, 1), the tokens are not [B, T], the predictor is missing, or
                ``sinks`` is negative.

        Example:
            >>> import models
            >>> from evals.simulator import Simulation
            >>> model = models.Decoder.tiny()
            >>> Simulation("oracle", 0.5).hidden_states(model, [range(40)]).shape
            (1, 40, 32)
        """
        sinks = self.sinks
        tokens, selection, network = _checked(model, tokens, self.selection, self.sparsity, self.networks)
        if sinks < 0:
            raise ValueError(f"sinks is {sinks}; give at least 0.")
        if self.heads not in ("query", "group"):
            raise ValueError(f"heads is {self.heads!r}; expected 'query' or 'group'.")
        policy = selection.policy
        if policy is not None:
            policy = with_sinks(policy if network is None else network.fitted(policy), sinks)
            if self.heads == "query" and policy.heads == "group":
                policy = dataclasses.replace(policy, heads="query")
            selection = dataclasses.replace(selection, policy=policy)
        projection, kept = models.output_projection(model, policy), kept_tokens(tokens.shape[1], self.sparsity)
        return _simulated(model, tokens, kept, projection, network, selection, sinks)


DENSE = Simulation("full")


def hits(
    model: models.Decoder,
    tokens: Int[Array | np.ndarray, "B T"],
    selection: str | Selection,
    sparsity: float,
    *,
    networks: Networks = None,
) -> Hits:
    """Measure how much of the oracle's choice a source chooses, too, while the model itself runs dense.

    Both sets are the ``ceil((i + 1)(1 - sparsity))`` best tokens of query i by raw logits, without sinks. Layer 0,
    which is never predicted, has figures, too. Errors are those of :meth:`Simulation.hidden_states`, and ValueError
    where there is no source.

    Example:
        >>> import models
        >>> from evals import simulator
        >>> model = models.Decoder.tiny()
        >>> simulator.hits(model, [range(40)], "oracle", 0.5).share.min().item()
        1.0
    """
    tokens, selection, network = _checked(model, tokens, selection, sparsity, networks)
    if selection.source is None:
        raise ValueError(
            f"{selection.name!r} is not a source of importance; expected one of {', '.join(sources.SOURCES.names())}."
        )
    kept = kept_tokens(tokens.shape[1], sparsity)
    return Hits(*jnp.moveaxis(_run(model, tokens, network, selection.source, (_hits,), (kept,))[1], -1, 0))


def last_logits(model: models.Decoder, tokens: Int[Array | np.ndarray, "B T"]) -> Float[Array, "L B N T"]:
    """Return the true attention logits ``q.k / sqrt(D)`` of each sequence's last query, in every layer and head.

    They are those before a model's soft cap.
    """

    return _run(model, jnp.asarray(tokens), None, None, (_last,))[1]


def _last(layer):
    return layer.dense(), sources.logits(layer.query[:, -1:], layer.key)[:, :, 0]


def attention_logits(
    model: models.Decoder, tokens: Int[Array | np.ndarray, "B T"], queries: Int[Array | np.ndarray, "R"]
) -> tuple[Float[Array, "L B N R T"], Float[Array, "L B K T D"]]:
    """Return the attention logits of some queries, -inf for tokens that a query does not see, and all tokens' values.

    The logits are those that the model's softmax reads, with its soft cap. ``queries`` are positions; one of -1 sees
    nothing.

    Raises:
        ValueError: if the model has sinks, whose logits are of no token.
    """
    if model.config.attention_sinks:
        raise ValueError("the model's sinks take a share of its attention that logits do not show; take another model.")
    return _run(model, jnp.asarray(tokens), None, None, (_asked,), (jnp.asarray(queries),))[1]


def _asked(layer, queries):
    asked = jax.vmap(layer.logits, (0, 1), 2)(queries, layer.query[:, jnp.maximum(queries, 0)])
    return layer.dense(), (asked, layer.value)


def with_sinks(policy: kvjax.Policy, sinks: int) -> kvjax.Policy:
    """Return the policy that also keeps the first ``sinks`` tokens, if it keeps fewer, and no share of the budget."""
    own = policy.protection.sinks or 0
    if isinstance(own, float) or own >= sinks:
        return policy
    return kvjax.chain(policy, kvjax.protect(sinks=sinks))


def _checked(model, tokens, selection, sparsity, networks) -> tuple[Array, Selection, Butler | None]:
    if not 0 <= sparsity < 1:
        raise ValueError(f"the sparsity is {sparsity}; give the share of tokens that a query does not read, in [0, 1).")
    selection = parse_selection(selection) if isinstance(selection, str) else selection
    read = read_by(networks, selection.policy, selection.source)
    network = network_of(read, model, selection.policy, selection.source)
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
    """One layer's sequences, of which one query per row is read at a time, [B, N, D], at a position ``at``.

    ``asking`` are the queries and keys [B, T, N, D] whose logits the source reads, if it reads any but the true ones.
    """

    def __init__(self, context: kvjax.Context, query, key, value, source: sources.Source | None, asking):
        B, T, K, D = key.shape
        self.context, self.source, self.length = context, source, T
        self.index: Any = context.layer
        self.query, self.key, self.value = query, key.swapaxes(1, 2), value.swapaxes(1, 2)  # keys [B, K, T, D]
        self.slots = jnp.broadcast_to(jnp.arange(T), (B, K, T))
        if source is not None:
            self.asking, asked = (query, key) if asking is None else asking[:2]
            self.asked = asked.swapaxes(1, 2)
            self.state = source.insert(source.init(B, K, T, D), key, self.slots[:, 0])

    def each(self, read, *more):
        """Map ``read(at, query, of more [B, ...])`` over the queries; the results have them at axis 1."""
        parts = (jnp.arange(self.length), *(array.swapaxes(0, 1) for array in (self.query, *more)))
        return jax.lax.map(lambda part: read(*part), parts, batch_size=QUERIES_AT_ONCE).swapaxes(0, 1)

    def importance(self, at, query, asking) -> Float[Array, "B N T"]:
        """Return the importance from the source, -inf for tokens that a query does not see."""
        assert self.source is not None
        position = jnp.full((len(query), 1), at)
        given: Any = {name: sources.logits(asking[:, None], self.asked) for name in self.source.reads - {"key"}}
        given |= {"key": self.key, "soft_cap": self.context.soft_cap}
        reading = sources.Reading(query[:, None], position, self.slots, self.index, **given)
        of_heads = self.source.importance(self.state, reading)[:, :, 0]
        of_heads = jnp.repeat(of_heads, query.shape[1] // of_heads.shape[1], axis=1)  # a group may choose together
        return jnp.where(self.visible(at), of_heads, -jnp.inf)

    def visible(self, at) -> Bool[Array, "T"]:
        age, window = at - jnp.arange(self.length), self.context.sliding_window
        return (age >= 0) if window is None else (age >= 0) & (age < window)

    def logits(self, at, query) -> Float[Array, "B N T"]:
        """Return the true attention logits, -inf for tokens that a query does not see."""
        true = scaled(sources.logits(query[:, None], self.key)[:, :, 0], 1, self.context.soft_cap)
        return jnp.where(self.visible(at), true, -jnp.inf)

    def best(self, scores, at, kept, sinks, slots=None) -> Bool[Array, "B N T"]:
        """Return the tokens that a query reads by their scores; ``slots`` are all of the layer's by default."""
        slots = self.slots if slots is None else slots
        position = jnp.full(len(scores), at)
        return kvjax.selected_mask(scores, slots, kept[at], sinks=sinks, query_position=position)

    def attend(self, logits: Float[Array, "B N T"]) -> Float[Array, "B N D"]:
        """Attend to the tokens whose logit is above -inf; the output is 0 for queries that read nothing."""
        B, N, T = logits.shape
        K = self.key.shape[1]
        if (sinks := self.context.sink_logits) is not None:
            logits = jnp.concatenate([logits, jnp.broadcast_to(sinks[:, None], (B, N, 1)).astype(logits.dtype)], axis=2)
        weights = _softmax(logits)[..., :T].reshape(B, K, N // K, T).astype(self.value.dtype)
        out = jnp.einsum("bkgt,bktd->bkgd", weights, self.value, preferred_element_type=logits.dtype)
        return out.reshape(B, N, -1).astype(self.query.dtype)

    def dense(self) -> Float[Array, "B T N D"]:
        """Return the dense attention output of the model itself."""
        return self.each(lambda at, query: self.attend(self.logits(at, query)))


def _softmax(logits: Float[Array, "*any T"]) -> Float[Array, "*any T"]:
    """Compute the softmax over the last axis, with zeros where all are -inf."""
    peak = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(peak), peak, 0))
    return weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), jnp.finfo(weights.dtype).tiny)


def _run(model, tokens, network, source, of_layer, given=(), beside=None, first=None):
    """Run the model with a function of each layer, which returns its attention output and its own output.

    ``of_layer`` is the function and what it takes behind the layer that is static; behind that it takes ``given``,
    arrays. It is compiled once for all layers but the first, where ``first`` takes its place. ``beside(number)``
    returns fields of a layer's context.
    """
    B, T = tokens.shape
    config = model.config
    check_alike(config, "what is measured of the layers is one array")
    said = None if network is None else _over_sequences(network, model, tokens)

    def attend(other, number, sliding_window, query, key, value):
        foreseen = None if network is None else _foreseen(network, np.int32(number), query, said)
        own: dict[str, Any] = {} if beside is None else beside(number)
        window: Any = None if sliding_window is None else np.int32(sliding_window)
        layer: Any = np.int32(number)
        own |= dict(soft_cap=config.attention_soft_cap, sink_logits=model.sink_logits(number))
        context = kvjax.Context(layer, window, predicted=foreseen, **own)
        asking = other if foreseen is None else foreseen
        if first is not None and number == 0:
            out, output = _one_layer(first, None, context, (query, key, value), None, ())
        else:
            out, output = _one_layer(of_layer, source, context, (query, key, value), asking, given)
        follows = source is not None and ("previous" in source.reads or ("first" in source.reads and number == 0))
        return out, (query, key) if follows else other, output

    other = None  # the queries and keys of another layer, which the first one has not
    if source is not None and source.reads & {"first", "previous"}:
        shapes = ((B, T, heads, config.head_dim) for heads in (config.num_heads, config.num_kv_heads))
        other = tuple(jnp.zeros(shape, model.embedding[...].dtype) for shape in shapes)
    position = jnp.broadcast_to(jnp.arange(T), (B, T))
    hidden, _, outputs = model.run(tokens, position, jnp.full(B, T), attend, other)
    return hidden, outputs


@functools.partial(jax.jit, static_argnums=(0, 1))
def _one_layer(of_layer, source, context, block, asking, given):
    (function, *how), (query, key, value) = of_layer, block
    return function(_Layer(context, query, key, value, source, asking), *how, *given)


@jax.jit
def _over_sequences(network, model, tokens):
    return network.over_sequences(model, tokens)


@jax.jit
def _foreseen(network, layer, query, said):
    return network.predict(layer, query, said)


def _simulated(model, tokens, kept, projection, network, selection, sinks):
    config, policy, frequency = model.config, selection.policy, None
    if policy is not None and (policy.needs.rotary or policy.positions != "absolute"):
        frequency = frequencies(config, jnp.full(*tokens.shape))

    def beside(number):
        return dict(
            frequency=None if frequency is None else rope_of_layer(config, number, frequency),
            projection=None if projection is None else projection[number],
        )

    run = functools.partial(_run, model, tokens, network, selection.source)
    if selection.name == "full":
        return run((_dense,))[0]
    return run((_chosen, selection, sinks), (kept,), beside, first=(_dense,))[0]


def _dense(layer):
    return layer.dense(), None


def _chosen(layer: _Layer, selection, sinks, kept):
    if selection.source is not None:
        return _selecting(layer, kept, sinks), None
    if selection.policy is None:
        return _oracle_evicting(layer, kept, sinks), None
    context = dataclasses.replace(layer.context, excess=1, compressed=False)  # without a prompt, each step scores anew
    return _policy_evicting(layer, kept, selection.policy, sinks, context), None


def _selecting(layer: _Layer, kept, sinks) -> Float[Array, "B T N D"]:
    """Let each query read the best tokens by the source."""

    def of_query(at, query, asking):
        reads = layer.best(layer.importance(at, query, asking), at, kept, sinks)
        return layer.attend(jnp.where(reads, layer.logits(at, query), -jnp.inf))

    return layer.each(of_query, layer.asking)


def _hits(layer: _Layer, kept):
    def of_query(at, query, asking):
        true = layer.logits(at, query)
        scores = true, layer.importance(at, query, asking)
        wanted, chosen = (layer.best(x, at, kept, 0) & layer.visible(at) for x in scores)
        share = jnp.sum(wanted & chosen, axis=-1) / jnp.maximum(jnp.sum(wanted, axis=-1), 1)  # [B, N]
        mass = jnp.sum(jnp.where(chosen, _softmax(true), 0), axis=-1)
        return jnp.stack([jnp.mean(share, axis=1), jnp.mean(mass, axis=1)], axis=-1)

    return layer.dense(), layer.each(of_query, layer.asking)


def _policy_evicting(layer: _Layer, kept, policy, sinks, context) -> Float[Array, "B T N D"]:
    """Run the library's decode steps on a cache of one layer."""
    B, T, N, D = layer.query.shape
    K = N if policy.heads == "query" else layer.key.shape[1]
    cache = kvjax.KVCache.init(
        batch=B, kv_heads=K, slots=T, head_dim=D, dtype=layer.key.dtype, state=policy.state(B, K, N // K, T, D),
        positions=policy.positions,
    )  # fmt: skip

    def step(cache, token):
        at, budget, query, key, value, predicted = jax.tree.map(lambda x: x[:, None] if x.ndim else x, token)
        out, cache = kvjax.attend(
            cache, query, key, value, jnp.full((B, 1), at), policy=policy, budget=budget + sinks,
            context=dataclasses.replace(context, predicted=predicted),
        )  # fmt: skip
        return cache, out[:, 0]

    own = (layer.query.swapaxes(0, 1), *(jnp.moveaxis(x, 2, 0) for x in (layer.key, layer.value)))
    predicted = jax.tree.map(lambda x: x.swapaxes(0, 1), context.predicted)
    return jax.lax.scan(step, cache, (jnp.arange(T), kept, *own, predicted))[1].swapaxes(0, 1)


def _oracle_evicting(layer: _Layer, kept, sinks) -> Float[Array, "B T N D"]:
    """Let each query read the best remaining tokens by its own logits, and evict the others."""
    B, T, N, _ = layer.query.shape
    every = jnp.arange(T)

    def step(left, token):  # left [B, N, T]: tokens that no query has left out, including later ones
        at, query = token
        logits = layer.logits(at, query)
        reads = layer.best(logits, at, kept, sinks, jnp.where(left, every, -1))
        return reads | (every > at), layer.attend(jnp.where(reads, logits, -jnp.inf))

    return jax.lax.scan(step, jnp.ones((B, N, T), bool), (every, layer.query.swapaxes(0, 1)))[1].swapaxes(0, 1)
