"""Llama, Mistral, Mixtral, Qwen2 to Qwen3.5, OLMo, SmolLM3, Granite, Phi-3, Gemma, gpt-oss, DeepSeek and their like.

Axes: B batch, T tokens, L layers, N query heads, K KV heads, G = N / K, D head dim, E model dim, F feed-forward,
X experts, V vocabulary.
Each layer has its own arrays, and a Python loop runs one after the other: called from the host, each part of a layer is
a compiled function that all layers share; inside `jit` it is one program. Attention is an argument (`attend`): dense,
over a cache, or any other that the caller passes. A layer without attention has a state in place of a cache
(:func:`run_recurrent`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from kernels_pallas import add_rms_norm, split_heads
from kernels_pallas.add_rms_norm.reference import rms_norm, whole
from kernels_pallas.dispatch import platform
from kvjax import rotate
from kvjax._src.border import implementation_for, mesh_of
from models import altup, delta_net, recurrent, state_space
from models.config import Config, Rope
from models.dense import attention
from models.latent import absorbed_output, project, values_of
from models.parameters import (
    array_shapes,
    check_rngs,
    drawn,
    expert_axes,
    join_weights,
    kind_of,
    parameter_shapes,
)
from models.rotary import rope_frequencies

Carry = TypeVar("Carry")
Output = TypeVar("Output")
# attend(carry, layer's number, sliding window or None, query, key, value) -> attention output, carry, layer's output
Attend = Callable[
    [Carry, int, int | None, Float[Array, "B T N D"], Float[Array, "B T K D"], Any],
    tuple[Float[Array, "B T N D"], Carry, Output],
]

INPUTS = ("input_embedding", "input_projection", "input_norm")  # what each layer's own input is made of
OUTER = (*INPUTS, "stream_in", "stream_out")  # in no layer, in some models
FEW = 128  # tokens of a product whose sums are left to the next kernel, at most
LEAST, MOST = 256, 2048  # rows of weights in a product's part
COLUMNS = 12_288  # of all parts together, at least
# What layers without attention do, by their kind.
MIXES = {"delta_net": delta_net.mix, "state_space": state_space.mix}


class Unsummed(NamedTuple):
    """Hidden states on a GPU, to which a product is yet to be added: the norm that reads them adds its parts."""

    x: Float[Array, "B T E"]
    parts: Float[Array, "P more E"]


Hidden = Float[Array, "B T E"] | Unsummed


class Layer(nnx.Module):
    """One layer: its arrays by name, such as ``qkv``, [E, K, G + 2, D]."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> nnx.Param: ...

    def __init__(self, arrays: dict[str, Array]):
        for name, array in arrays.items():
            setattr(self, name, nnx.Param(array))

    def arrays(self) -> dict[str, Array]:
        """Return the arrays by name."""
        return {name: parameter[...] for name, parameter in vars(self).items() if isinstance(parameter, nnx.Param)}


class Decoder(nnx.Module):
    """A causal language model: tokens in, logits out.

    ``arrays`` are those of ``models.parameters.array_shapes(config)``, by path; ``models.parameters.join_weights``
    makes them of a checkpoint's parameters. Without them they are drawn from ``rngs``, in float32.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> import models
        >>> config = models.Config(
        ...     64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2
        ... )
        >>> model = models.Decoder(config, rngs=nnx.Rngs(0))
        >>> jax.jit(model)(jnp.array([[1, 2, 3]])).shape
        (1, 3, 64)
    """

    def __init__(
        self,
        config: Config,
        arrays: dict[str, Array] | None = None,
        *,
        rngs: nnx.Rngs | None = None,
    ):
        self.config = config
        if arrays is None:
            shapes = parameter_shapes(config)
            arrays = _joined(config, drawn(_random_parameter, shapes, check_rngs(rngs), config.norm_offset))
        if differing := sorted(arrays.keys() ^ array_shapes(config).keys()):
            raise ValueError(
                f"the arrays given and those of the config differ in {', '.join(differing[:3])}, ...; make them of a "
                "checkpoint's parameters with models.parameters.join_weights."
            )
        self.embedding = nnx.Param(arrays["embedding"])
        self.norm = nnx.Param(arrays["norm"])
        self.head = None if config.tie_embeddings else nnx.Param(arrays["head"])
        for name in (name for name in OUTER if name in arrays):
            setattr(self, name, nnx.Param(arrays[name]))
        of_layers: list[dict[str, Array]] = [{} for _ in range(config.num_layers)]
        for path, array in arrays.items():
            if path.startswith("layers."):
                _, number, name = path.split(".")
                of_layers[int(number)][name] = array
        self.layers = nnx.List([Layer(own) for own in of_layers])

    @classmethod
    def tiny(cls) -> Decoder:
        """Make a decoder of two layers, a vocabulary of 64 tokens and random weights, to try things on."""
        return cls(Config(64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2), rngs=nnx.Rngs(0))

    def arrays(self) -> dict[str, Array]:
        """Return the arrays by path, as ``Decoder(config, arrays)`` takes them."""
        found = self.ends()
        for number, layer in enumerate(self.layers):
            found |= {f"layers.{number}.{name}": array for name, array in layer.arrays().items()}
        return found

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Compute the logits of whole sequences by dense causal attention, in float32."""
        T, most = tokens.shape[1], self.config.most_attended
        if most and most < T:
            raise ValueError(
                f"{T} tokens were given, but beyond {most} the model's indexer chooses, which is not read."
            )
        position = jnp.broadcast_to(jnp.arange(T), tokens.shape)

        def attend(carry, layer, sliding_window, query, key, value):
            block = query, key, value
            return attend_densely(self.config, position, sliding_window, *block, self.sink_logits(layer)), carry, None

        hidden, _, _ = self.run(tokens, position, jnp.full(tokens.shape[:1], T), attend, None)
        return self.logits(hidden)

    def run(
        self,
        tokens: Int[Array, "B T"],
        position: Int[Array, "B T"],
        lengths: Int[Array, "B"],
        attend: Attend[Carry, Output],
        carry: Carry,
        *,
        after_first: Callable[[Float[Array, "B T E"], Carry], Carry] | None = None,
        before_attention: Callable[[Carry, int, Float[Array, "B T E"]], Carry] | None = None,
    ) -> tuple[Float[Array, "B T E"], Carry, Output]:
        """Embed the tokens and run every layer with the attention that the caller passes.

        Inside ``jit`` it is one program, whose compilation takes as many times longer as there are layers. Called from
        the host, what comes before and after attention is compiled once; then ``attend`` is best a compiled function.

        Args:
            position: absolute positions, -1 for padding.
            lengths: the sequences' full lengths, which only the rope types dynamic and longrope read: all keys of a
                sequence must be rotated by the same frequencies, whichever block they came in.
            attend: called once per layer with attention, with rotated queries and keys; see ``Attend``. A layer
                that shares keys and values gets those of the other layer. Layers without attention begin with an
                empty state, so the tokens are whole sequences.
            after_first: called with layer 0's output before the other layers run; it may change the carry.
            before_attention: called once per layer with attention, ``before_attention(carry, layer's number, input of
                the attention)``, and returns the carry that ``attend`` gets.

        Returns:
            The hidden states before the last norm, the carry, and the outputs of layers with attention, stacked.
        """
        config, ends, outputs = self.config, self.ends(), []
        x, waves = entered(config, self.embedding[...], tokens, position, lengths)
        (x, inputs), made = layer_inputs(config, ends, tokens, x), dict[int, Any]()

        def attend_here(number: int, carry: Any, query: Array, key: Any, value: Any) -> Any:
            source = config.sources[number]
            if source is not None:
                key, value = made[source]
            elif config.shared_layers:
                made[number] = key, value
            return attend(carry, number, config.sliding_windows[number], query, key, value)

        for number, layer in enumerate(self.layers):
            weights, own = layer.arrays(), config.at(number)
            if number in config.recurrent_layers:
                x, _ = run_recurrent(config, weights, x, position)
                continue
            if before_attention is not None:
                carry = before_attention(carry, number, attention_input(own, weights, x))
            here = rope_of_layer(config, number, waves)
            x, carry, output = run_layer(
                own, weights, x, here, partial(attend_here, number, carry), layer_input=inputs[number]
            )
            outputs.append(output)
            if number == 0 and after_first is not None:
                carry = after_first(summed(x), carry)
        stacked: Any = jax.tree.map(lambda *each: jnp.stack(each), *outputs) if outputs else None
        return merged(config, ends, x), carry, stacked

    def logits(self, hidden: Float[Array, "*rest E"]) -> Float[Array, "*rest V"]:
        """Apply the last norm and the projection to the vocabulary, in float32."""
        return logits_from(self.config, self.ends(), hidden)

    def sink_logits(self, layer: int) -> Float[Array, "N"] | None:
        """Return the logits of a layer's sinks, one per query head; None for a model without."""
        return self.layers[layer].arrays().get("sink_logits")

    def ends(self) -> dict[str, Array]:
        """Return the arrays by name that are in no layer: those that :func:`logits_from` reads."""
        outer = {"embedding": self.embedding, "norm": self.norm} | ({} if self.head is None else {"head": self.head})
        outer |= {name: getattr(self, name) for name in OUTER if hasattr(self, name)}
        return {name: parameter[...] for name, parameter in outer.items()}


def logits_from(config: Config, ends: dict[str, Array], hidden: Float[Array, "*rest E"]) -> Float[Array, "*rest V"]:
    """Compute logits as :meth:`Decoder.logits` does, from a decoder's arrays that are in no layer."""
    hidden = _norm(config, hidden, ends["norm"])
    accumulate = jnp.promote_types(hidden.dtype, jnp.float32)
    weights, axes = (ends["head"], "ev") if "head" in ends else (ends["embedding"], "ve")
    alone = hidden.size == hidden.shape[-1] and platform() == "gpu"
    rows = _eight(hidden.reshape(1, -1)) if alone else hidden
    logits = jnp.einsum(f"...e,{axes}->...v", rows, weights, preferred_element_type=accumulate)
    logits = logits[0].reshape(*hidden.shape[:-1], -1) if alone else logits
    logits, cap = _times(logits, 1 / config.logits_scaling), config.logits_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def output_of_heads(model: Decoder) -> list[Float[Array, "N D E"]]:
    """Return each query head's rows of W_O, for each layer with attention; of latents, what stands behind them."""
    config, layers = model.config, [model.layers[number] for number in model.config.cached_layers]
    if config.latent is not None:
        return [absorbed_output(config, layer.latent_heads[...], layer.output[...]) for layer in layers]
    heads = [(config.num_heads, dim, config.hidden_size) for _, dim in config.cached_heads]
    return [layer.output[...].reshape(shape) for layer, shape in zip(layers, heads, strict=True)]


def check_decoder(model: object) -> None:
    """Check that the model is a decoder."""
    if not isinstance(model, Decoder):
        raise ValueError(f"the model is a {type(model).__name__}; give a Decoder, such as models.load returns.")


def embed(config: Config, embedding: Float[Array, "V E"], tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
    """Return the input of layer 0."""
    return _times(embedding[tokens], config.embedding_multiplier)


def layer_inputs(
    config: Config, ends: dict[str, Array], tokens: Any, x: Float[Array, "B T E"]
) -> tuple[Float[Array, "B T *streams E"], tuple[Float[Array, "B T P"] | None, ...]]:
    """Return layer 0's input, made of embeddings, and what each layer also gets of the tokens: None in most models.

    With AltUp the input is several streams.
    """
    if not config.layer_input_size:
        return x, (None,) * config.num_layers
    return _layer_inputs(config, {name: ends[name] for name in OUTER if name in ends}, jnp.asarray(tokens), x)


@partial(jax.jit, static_argnums=0)
def _layer_inputs(
    config: Config, own: dict[str, Array], tokens: Int[Array, "B T"], x: Float[Array, "B T E"]
) -> tuple[Float[Array, "B T *streams E"], tuple[Float[Array, "B T P"], ...]]:
    if config.layer_input_vocab:
        tokens = jnp.where(tokens < config.layer_input_vocab, tokens, 0)
    P, of_layers = config.layer_input_size, (*x.shape[:2], config.num_layers, config.layer_input_size)
    looked_up = own["input_embedding"][tokens].reshape(of_layers) * P**0.5
    made = ((x @ own["input_projection"]) * config.hidden_size**-0.5).reshape(of_layers)
    both = (_norm(config, made, own["input_norm"]) + looked_up) * 2**-0.5
    x = x if config.altup is None else altup.parted(x, own["stream_in"])
    return x, tuple(both[:, :, layer] for layer in range(config.num_layers))


def merged(config: Config, ends: dict[str, Array], x: Hidden) -> Float[Array, "B T E"]:
    """Return the input of the last norm: the last layer's output, with AltUp's streams merged."""
    return summed(x) if config.altup is None else altup.merged(summed(x), ends["stream_out"])


def rotation(config: Config, position: Int[Array, "B T"], lengths: Int[Array, "B"]) -> tuple[tuple[Array, ...], ...]:
    """Compute cosine and sine of each token's rotary angles, shared by all heads, for each rotary embedding.

    Layers may have different ones: see :func:`rope_of_layer`. Each is [B, T, 1, D / 2]; a third array, [B, T, 1, 1], is
    the factor of the queries where a rotary embedding has one (``Rope.llama_4_scaling_beta``).
    """

    def waves(rope: Rope, head_dim: int) -> tuple[Array, ...]:
        frequency, amplitude = rope_frequencies(rope, head_dim, lengths)  # [B or 1, D / 2]
        angle = jnp.maximum(position, 0)[..., None].astype(frequency.dtype) * frequency[:, None]  # [B, T, D / 2]
        factor = amplitude if rope.partial_rotary_factor == 1 else jnp.where(frequency > 0, amplitude, 1)[:, None, None]
        cos, sin = (factor * wave(angle)[:, :, None] for wave in (jnp.cos, jnp.sin))
        if not rope.llama_4_scaling_beta:
            return cos, sin
        stretches = (jnp.maximum(position, 0) // rope.original_positions)[..., None, None].astype(frequency.dtype)
        return cos, sin, 1 + rope.llama_4_scaling_beta * jnp.log1p(stretches)

    return tuple(waves(*own) for own in config.rotations)


def frequencies(config: Config, lengths: Int[Array, "B"]) -> tuple[Float[Array, "rows half"], ...]:
    """Return the angle per position for each pair of a head's elements, for each rotary embedding."""
    return tuple(rope_frequencies(*own, lengths)[0] for own in config.rotations)


def rope_of_layer(config: Config, layer: int, each: Sequence[Any]) -> Any:
    """Return one layer's entry of what :func:`rotation` or :func:`frequencies` returned."""
    return each[0] if len(each) == 1 else each[config.rotations.index(config.rotation_of(layer))]


@partial(jax.jit, static_argnums=0)
def entered(
    config: Config,
    embedding: Float[Array, "V E"],
    tokens: Int[Array, "B T"],
    position: Int[Array, "B T"],
    lengths: Int[Array, "B"],
) -> tuple[Float[Array, "B T E"], Any]:
    """Return the input of layer 0, and what rotates queries and keys (:func:`rotation`)."""
    return embed(config, embedding, tokens), rotation(config, position, lengths)


def attend_densely(
    config: Config,
    position: Int[Array, "B T"],
    sliding_window: int | Int[Array, ""] | None,
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    sink_logits: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N D"]:
    """Compute one layer's causal attention over whole sequences, with all weights at once."""
    key_position = jnp.broadcast_to(position[:, None], (key.shape[0], key.shape[2], key.shape[1]))
    key, value, cap = key.swapaxes(1, 2), value.swapaxes(1, 2), config.attention_soft_cap
    return attention(query, key, value, key_position, position, sliding_window, cap, sink_logits)


def run_layer[Carry, Output](
    config: Config,
    weights: dict[str, Array],
    x: Hidden,
    waves: tuple[Array, ...],
    attend: Callable[[Array, Any, Any], tuple[Array, Carry, Output]],
    shift: Float[Array, "B T E"] | None = None,
    layer_input: Float[Array, "B T P"] | None = None,
) -> tuple[Hidden, Carry, Output]:
    """Run one layer with the attention that the caller passes, ``attend(query, key, value)``.

    Key and value are None in a layer that shares those of another.

    Args:
        weights: the layer's arrays by name.
        waves: the layer's entry of :func:`rotation`.
        shift: is added to the attention's output, behind W_O, so that a derivative may be taken with respect to it.
        layer_input: the layer's entry of :func:`layer_inputs`.

    Returns:
        The input of the next layer, then the carry and the output that ``attend`` returned. On a GPU the input may be
        :class:`Unsummed`; see :func:`summed`.
    """
    x, gate, query, key, value = _before_attention(config, weights, x, waves)
    out, carry, output = attend(query, key, value)
    return _behind_attention(config, weights, x, out, gate, shift, layer_input), carry, output


@partial(jax.jit, static_argnums=0)
def run_recurrent(
    config: Config,
    weights: dict[str, Array],
    x: Hidden,
    position: Int[Array, "B T"],
    state: recurrent.State | None = None,
) -> tuple[Hidden, recurrent.State]:
    """Run one layer without attention; return the input of the next layer, and the layer's state.

    Args:
        weights, x: see :func:`run_layer`.
        position: -1 for padding.
        state: that of the tokens before the block; None for none.
    """
    net = config.recurrence
    assert net is not None
    x, y = _summed_and_normed(config, x, weights["attention_norm"])
    state = recurrent.empty_state(net, y.shape[0], y.dtype) if state is None else state
    out, state = MIXES[net.kind](net, weights, y, position >= 0, state, config.norm_epsilon)
    return _behind_attention(config, weights | {"output": weights["recurrent_output"]}, x, out), state


@partial(jax.jit, static_argnums=0)
def _before_attention(
    config: Config, weights: dict[str, Array], x: Hidden, waves: tuple[Array, ...]
) -> tuple[Array, Float[Array, "B T N D"] | None, Array, Array | None, Array | None]:
    """Return the layer's input, and compute the output's gate, if any, rotated queries and keys, and values."""
    x, y = _entering(config, weights, x)
    cos, sin, *factor = waves
    others = config.query_key_norm or config.wide_query_key_norm or config.attention_multiplier or config.latent
    others = others or config.value_norm or config.keys_as_values or config.shares
    key: Array | None  # None where a layer shares those of another
    if _by_kernels(x) and not others:
        tokens = x.shape[:2]
        cos, sin = (jnp.broadcast_to(own, (*tokens, 1, own.shape[-1])).reshape(-1, own.shape[-1]) for own in (cos, sin))
        heads = split_heads(_in_parts(y, weights["qkv"]), cos, sin, weights.get("qkv_bias"), dtype=x.dtype)
        query, key, value = (own.reshape(*tokens, *own.shape[1:]) for own in heads)
    else:
        query, key, value = _project(config, weights, y)
        query, key = rotate(query, cos, sin), key if key is None else rotate(key, cos, sin)
    if factor:
        query = (query * factor[0]).astype(query.dtype)
    return x, _gate_of_output(config, weights, y) if config.attention_gate else None, query, key, value


def _gate_of_output(config: Config, weights: dict[str, Array], y: Float[Array, "B T E"]) -> Float[Array, "B T N D"]:
    gate = jnp.einsum("bte,end->btnd", y, weights["query_gate"])
    return jax.nn.sigmoid(gate + along_last(weights["query_gate_bias"], gate) if config.attention_bias else gate)


@partial(jax.jit, static_argnums=0)
def _behind_attention(
    config: Config,
    weights: dict[str, Array],
    x: Float[Array, "B T E"],
    out: Float[Array, "B T *heads"],
    gate: Float[Array, "B T N D"] | None = None,
    shift: Float[Array, "B T E"] | None = None,
    layer_input: Float[Array, "B T P"] | None = None,
) -> Hidden:
    """Add what a layer makes of its attention's output to its input: gate and W_O, feed-forward, the layer's input."""
    if config.latent is not None:
        out = values_of(config, weights, out)
    streams, few = x, config.altup is None and _by_kernels(x)
    if config.altup is not None:
        x = streams[:, :, config.altup.active]
    bare = (
        few and config.norms == "before" and config.residual_multiplier == 1 and not config.layer_scale
    )  # only the product is added

    def added(x: Array, out: Array, post_norm: str) -> Hidden:
        if config.norms != "before":
            out = _norm(config, out, weights[post_norm])
        out = _times(out, config.residual_multiplier)
        return Unsummed(x, out.reshape(1, -1, out.shape[-1])) if few else x + out

    out = (out if gate is None else out * gate).reshape(*out.shape[:2], -1)
    between: Hidden
    if bare and "output_bias" not in weights and shift is None:
        between = Unsummed(x, _in_parts(out, weights["output"]))
    else:
        out = out @ weights["output"]
        if "output_bias" in weights:
            out = out + along_last(weights["output_bias"], out)
        if shift is not None:
            out = out + shift
        between = added(x, out, "attention_post_norm")
    if config.altup is not None:
        beside = altup.low_rank(weights, _norm(config, x, weights["attention_norm"]), config.norm_epsilon)
        between = (summed(between) + beside) * 2**-0.5
    x, y = _summed_and_normed(config, between, None if config.norms == "after" else weights["feed_norm"])
    if bare and "router" not in weights:
        return Unsummed(x, _in_parts(_gate_up(config, weights["gate_up"], y), weights["down"]))
    made = added(x, feed_forward(config, weights, y, x), "feed_post_norm")
    if config.altup is not None:
        streams, made = altup.corrected(config.altup, weights, streams, summed(made), config.norm_epsilon)
    if layer_input is not None:
        x = summed(made)
        out = _GATES[config.activation](x @ weights["input_gate"], layer_input) @ weights["input_up"]
        if config.altup is not None:  # all streams but the first
            return streams.at[:, :, 1:].add(_norm(config, out, weights["input_post_norm"])[:, :, None])
        made = added(x, out, "input_post_norm")
    return _scaled(weights, made)


def _scaled(weights: dict[str, Array], x: Hidden) -> Hidden:
    """Multiply a layer's output by the layer's number, where it has one."""
    if "layer_scale" not in weights:
        return x
    return jax.tree.map(lambda part: part * along_last(weights["layer_scale"], part), x)


def attention_input(config: Config, weights: dict[str, Array], x: Hidden) -> Float[Array, "B T E"]:
    """Return what a layer's queries, keys and values are made of, from the layer's input and its arrays."""
    return _entering(config, weights, x)[1]


def _entering(
    config: Config, weights: dict[str, Array], x: Hidden
) -> tuple[Float[Array, "B T *streams E"], Float[Array, "B T E"]]:
    """Return a layer's hidden states, and the input of its attention; of several streams, their prediction."""
    if config.altup is not None:
        x = altup.predicted(config.altup, weights, summed(x), config.norm_epsilon)
        return x, _norm(config, x[:, :, config.altup.active], weights["attention_norm"])
    return _summed_and_normed(config, x, None if config.norms == "after" else weights["attention_norm"])


def summed(x: Hidden) -> Float[Array, "B T E"]:
    """Return hidden states to which nothing is yet to be added."""
    if not isinstance(x, Unsummed):
        return x
    rows = math.prod(x.x.shape[:2])
    return x.x + whole(x.parts[:, :rows], x.x.dtype).reshape(x.x.shape)


def _summed_and_normed(
    config: Config, x: Hidden, weight: Float[Array, "E"] | None
) -> tuple[Float[Array, "B T E"], Float[Array, "B T E"]]:
    """Return hidden states, and their norm, or themselves where there is no weight."""
    if weight is not None and isinstance(x, Unsummed):
        given = x.x.reshape(-1, x.x.shape[-1]), x.parts, weight
        made = add_rms_norm(*given, epsilon=config.norm_epsilon, offset=config.norm_offset)
        total, normed = (own.reshape(x.x.shape) for own in made)
        return total, normed
    x = summed(x)
    return x, x if weight is None else _norm(config, x, weight)


def _by_kernels(x: Float[Array, "B T E"]) -> bool:
    """Tell whether kernels of a GPU do what stands between products: for few tokens, where no mesh splits anything."""
    return platform() == "gpu" and math.prod(x.shape[:2]) <= FEW and implementation_for("auto", x) == "auto"


def _in_parts(x: Float[Array, "B T E"], weight: Float[Array, "E *out"]) -> Float[Array, "P more *out"]:
    """Multiply few tokens by weights in parts along E, as XLA does on a GPU, but leave their sum to the next kernel.

    A kernel has a row to itself, so as few parts as occupy the GPU, and as XLA does not split again.
    """
    (E, *out), tokens = weight.shape, x.reshape(-1, x.shape[-1])
    P = 1
    while E % (2 * P) == 0 and E >= 2 * LEAST * P and (E > MOST * P or math.prod(out) * P < COLUMNS):
        P *= 2
    return jnp.einsum(
        "rpe,pe...->pr...",
        _eight(tokens).reshape(-1, P, E // P),
        weight.reshape(P, E // P, *out),
        preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
    )


def _eight(rows: Float[Array, "R E"]) -> Float[Array, "rows E"]:
    """Return a single row eight times, which cost a GPU no more.

    Of a single one XLA makes a product and a sum of float32 copies of small weights, cuBLAS such copies of all.
    """
    return jnp.broadcast_to(rows, (8, rows.shape[1])) if len(rows) == 1 else rows


def feed_forward(
    config: Config, weights: dict[str, Array], x: Float[Array, "B T E"], before: Float[Array, "B T E"]
) -> Float[Array, "B T E"]:
    """Apply a layer's feed-forward network, or those experts that the router chooses for each token, and the shared.

    ``before`` is what ``x`` is the norm of.
    """
    if "router" not in weights:
        return _gate_up(config, weights["gate_up"], x) @ weights["down"]
    given = routed = x
    if config.expert_norms:
        given = _norm(config, before, weights["routed_norm"])
        routed = _norm(config, before, weights["router_scale"]) * config.hidden_size**-0.5
    made = _experts(config, weights, given, routed)
    if config.expert_norms:
        made = _norm(config, made, weights["routed_post_norm"])
    if "shared_down" in weights:
        shared = _gate_up(config, weights["shared_gate_up"], x) @ weights["shared_down"]
        if config.expert_norms:
            shared = _norm(config, shared, weights["shared_post_norm"])
        made = made + (jax.nn.sigmoid(x @ weights["shared_router"]) * shared if config.shared_router else shared)
    return made


def _clamped_swiglu(gate: Array, up: Array) -> Array:
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


_GATES: dict[str, Callable[[Array, Array], Array]] = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate) * up,
    "clamped_swiglu": _clamped_swiglu,
}


def _gate_up(config: Config, weight: Float[Array, "E 2 F"], x: Float[Array, "B T E"]) -> Float[Array, "B T F"]:
    return _gated(config, jnp.einsum("bte,ecf->btcf", x, weight))


def _gated(config: Config, gate_up: Float[Array, "*rest 2 F"]) -> Float[Array, "*rest F"]:
    gate, up = gate_up[..., 0, :], gate_up[..., 1, :]
    if config.activation_sparsity:  # the same in all layers that are alike
        gate = altup.sparse(config.activation_sparsity[0], gate)
    return _GATES[config.activation](gate, up)


def _experts(
    config: Config, weights: dict[str, Array], x: Float[Array, "B T E"], routed: Float[Array, "B T E"]
) -> Float[Array, "B T E"]:
    """Apply those experts that the router chooses for each token by its ``routed``.

    The tokens are sorted by expert, so that each expert's weights meet its own tokens in one ragged product. No token
    is dropped, and no expert is copied for a token.
    """
    logits = (routed @ weights["router"]).astype(jnp.promote_types(x.dtype, jnp.float32))
    if config.expert_biases:
        logits = logits + weights["router_bias"].astype(logits.dtype)
    share, expert = _chosen(config, logits, weights.get("choice_bias"))
    if config.expert_norms:
        share = share * weights["choice_scale"][expert]
    own = {name: array for name, array in weights.items() if name.startswith("expert_")}
    mesh = mesh_of(x, own)
    ways = expert_axes(mesh)
    if math.prod(mesh.shape[axis] for axis in ways) == 1:
        return _run_experts(config, own, x, share, expert)

    def on_device(own: dict[str, Array], x: Array, share: Array, expert: Array) -> Array:
        first = jax.lax.axis_index(ways) * own["expert_down"].shape[0]
        mine = (expert - first) % config.num_experts
        return jax.lax.psum(_run_experts(config, own, x, share, mine), ways)

    # Left to itself, XLA brings all experts to all devices of a TPU.
    whole = PartitionSpec("data" if x.shape[0] % mesh.shape.get("data", 1) == 0 else None)
    specs = (PartitionSpec(ways), whole, whole, whole)
    return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=False)(own, x, share, expert)


def _chosen(
    config: Config, logits: Float[Array, "B T X"], choice_bias: Float[Array, "X"] | None
) -> tuple[Float[Array, "B T c"], Int[Array, "B T c"]]:
    """Return the weights and the numbers of each token's experts; see :class:`models.config.Routing`."""
    how, X = config.routing, config.num_experts
    scores = jax.nn.softmax(logits) if how.scores == "softmax" else jax.nn.sigmoid(logits)
    ranked = scores if choice_bias is None else scores + along_last(choice_bias.astype(scores.dtype), scores)
    if how.groups > 1:
        of_groups = ranked.reshape(*ranked.shape[:2], how.groups, -1)
        best = jnp.sum(jax.lax.top_k(of_groups, 1 if how.scores == "softmax" else 2)[0], axis=-1)
        groups = jax.lax.top_k(best, how.groups_per_token)[1]  # [B, T, groups_per_token]
        inside = jnp.any(jnp.arange(X)[:, None] // (X // how.groups) == groups[:, :, None], axis=-1)
        ranked = jnp.where(inside, ranked, -jnp.inf)
    ranked, expert = jax.lax.top_k(ranked, config.experts_per_token)  # [B, T, c]
    share = ranked if choice_bias is None else jnp.take_along_axis(scores, expert, axis=-1)
    if config.normalise_experts:
        share = share / jnp.sum(share, axis=-1, keepdims=True)
    return _times(share, how.multiplier), expert


def _run_experts(
    config: Config,
    weights: dict[str, Array],
    x: Float[Array, "B T E"],
    share: Float[Array, "B T c"],
    expert: Int[Array, "B T c"],
) -> Float[Array, "B T E"]:
    """Sum the outputs of each token's experts, weighted by ``share``; experts from number X on are left out."""
    gate_up, down = weights["expert_gate_up"], weights["expert_down"]
    tokens, c = x.reshape(-1, x.shape[-1]), expert.shape[-1]
    order = jnp.argsort(expert.reshape(-1))  # [B T c], those of an expert side by side
    X, E, _, F = gate_up.shape
    counts = jnp.bincount(expert.reshape(-1), length=X).astype(jnp.int32)  # [X]
    made = jax.lax.ragged_dot(tokens[order // c], gate_up.reshape(X, E, 2 * F), counts).reshape(-1, 2, F)
    if config.expert_biases:
        own = expert.reshape(-1)[order]  # of each row
        made = made + jnp.stack([weights[name][own] for name in ("expert_gate_bias", "expert_up_bias")], axis=1)
    made = jax.lax.ragged_dot(_gated(config, made), down, counts)
    if config.expert_biases:
        made = made + weights["expert_down_bias"][own]
    made = made[jnp.argsort(order)].reshape(*expert.shape, -1)  # [B, T, c, E]
    made = jnp.where((expert < X)[..., None], share[..., None] * made, 0)
    return jnp.sum(made, axis=2).astype(x.dtype)


def _times(x: Float[Array, "*shape"], factor: float) -> Float[Array, "*shape"]:
    return x if factor == 1 else x * factor


def _norm(config: Config, x: Float[Array, "*rest E"], weight: Float[Array, "E"]) -> Float[Array, "*rest E"]:
    return rms_norm(x, weight, config.norm_epsilon, config.norm_offset)


def along_last(array: Float[Array, "*last"], x: Float[Array, "*rest"]) -> Float[Array, "*ones_and_last"]:
    """Reshape an array of the last axes of ``x`` to the rank of ``x``, with axes of size 1 in front."""
    return array.reshape((1,) * (x.ndim - array.ndim) + array.shape)


def _project(config: Config, weights: dict[str, Array], x: Float[Array, "B T E"]) -> tuple[Array, Any, Any]:
    """Compute queries [B, T, N, D], and keys and values [B, T, K, D] where the layer has them, before rotation."""
    if config.latent is not None:
        return project(config, weights, x)
    made = jnp.einsum("bte,ekhd->btkhd", x, weights["qkv"])
    if config.attention_bias:
        made = made + along_last(weights["qkv_bias"], made)
    G = config.num_heads // config.num_kv_heads
    query = made[..., :G, :]
    key, value = (None, None) if config.shares else (made[..., G, :], made[..., -1, :])  # the last two may be one
    query = query.reshape(*x.shape[:2], config.num_heads, config.head_dim)
    if config.query_key_norm or config.wide_query_key_norm:
        query, key = _normed_heads(config, weights, query, key)
    if config.value_norm and value is not None:
        value = _norm(config, value, jnp.ones(value.shape[-1:], value.dtype))
    if config.attention_multiplier is not None:
        query = _times(query, config.attention_multiplier * math.sqrt(config.head_dim))
    return query, key, value


def _normed_heads(config: Config, weights: dict[str, Array], query: Array, key: Any) -> tuple[Array, Any]:
    """Return queries and keys after their norm: of each head alone, or of all heads of a token together."""
    if config.query_key_norm:
        query = _norm(config, query, weights["query_norm"])
        key = None if key is None else _norm(config, key, weights["key_norm"])
    if config.wide_query_key_norm:

        def normed(x: Array, weight: Array) -> Array:
            return _norm(config, x.reshape(*x.shape[:2], -1), weight.reshape(-1)).reshape(x.shape)

        query, key = normed(query, weights["wide_query_norm"]), normed(key, weights["wide_key_norm"])
    return query, key


_joined = jax.jit(join_weights, static_argnums=0)


def _random_parameter(key: Array | None, name: str, shape: tuple[int, ...], norm_offset: bool) -> Array:
    if key is None:
        name = kind_of(name)[0]
        offset = norm_offset and name != "layers.delta_norm"
        is_one = name.endswith("_scale") or (name.endswith("norm") and not offset)
        return jnp.full(shape, 1 if is_one else 0, jnp.float32)
    return (0.02 * jax.random.normal(key, shape)).astype(jnp.float32)
