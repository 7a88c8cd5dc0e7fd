"""Llama, Mistral, Mixtral, Qwen2 to Qwen3-MoE, OLMo-2, SmolLM3, Granite, Phi-3, Gemma 2 and 3 in one file.

Axes: B batch, T tokens, L layers, N query heads, K KV heads, G = N / K, D head dim, E model dim, F feed-forward,
X experts, V vocabulary.
The layers' arrays are stacked, [L, ...], and run by one `lax.scan`, so 32 layers compile as fast as 2; on a GPU it is
unrolled. Attention is an argument (`attend`): dense, over a cache, or any other that the caller passes. The caller's
state is in the scan's carry, which XLA updates in place; as scanned inputs and outputs it would exist twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from kernels_pallas import cache_attention
from kernels_pallas.dispatch import platform
from kernels_pallas.prepare import mesh_of
from kvjax import rotate
from models.config import Config, Rope
from models.parameters import (
    array_shapes,
    check_rngs,
    drawn,
    expert_axes,
    joined,
    layers_with,
    parameter_shapes,
)
from models.rotary import rope_frequencies

Carry = TypeVar("Carry")
Output = TypeVar("Output")
# attend(carry, layer index, sliding window or None, query, key, value) -> attention output, carry, the layer's output
Attend = Callable[
    [Carry, Int[Array, ""], Int[Array, ""] | None, Float[Array, "B T N D"], Float[Array, "B T K D"], Any],
    tuple[Float[Array, "B T N D"], Carry, Output],
]


class Layers(nnx.Module):
    """The arrays of all layers, stacked; `lax.scan` takes them one layer at a time."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> nnx.Param: ...

    def __init__(self, arrays: dict[str, Array]):
        for name, array in arrays.items():
            setattr(self, name, nnx.Param(array))

    def arrays(self) -> dict[str, Array]:
        """Return the arrays by name, [L, ...]."""
        return {name: parameter[...] for name, parameter in vars(self).items() if isinstance(parameter, nnx.Param)}


class Decoder(nnx.Module):
    """A causal language model: tokens in, logits out.

    ``arrays`` are those of ``models.parameters.array_shapes(config)``, by path; ``models.parameters.joined`` makes them
    of a checkpoint's parameters. Without them they are drawn from ``rngs``, in float32.

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
                f"the arrays given and those of the config differ in {', '.join(differing)}; make them of a "
                "checkpoint's parameters with models.parameters.joined."
            )
        self.embedding = nnx.Param(arrays["embedding"])
        self.norm = nnx.Param(arrays["norm"])
        self.head = None if config.tie_embeddings else nnx.Param(arrays["head"])
        prefix = "layers."
        self.layers = Layers({n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)})

    @classmethod
    def tiny(cls) -> Decoder:
        """Make a decoder of two layers, a vocabulary of 64 tokens and random weights, to try things on."""
        return cls(Config(64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2), rngs=nnx.Rngs(0))

    def arrays(self) -> dict[str, Array]:
        """Return the arrays by path, as ``Decoder(config, arrays)`` takes them."""
        outer = {"embedding": self.embedding, "norm": self.norm} | ({} if self.head is None else {"head": self.head})
        found = {name: parameter[...] for name, parameter in outer.items()}
        return found | {f"layers.{name}": array for name, array in self.layers.arrays().items()}

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Compute the logits of whole sequences by dense causal attention, in float32."""
        T = tokens.shape[1]
        position = jnp.broadcast_to(jnp.arange(T), tokens.shape)

        def attend(carry, layer, sliding_window, query, key, value):
            return attend_densely(self.config, position, sliding_window, query, key, value), carry, None

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
        before_attention: Callable[[Carry, Int[Array, ""], Float[Array, "B T E"]], Carry] | None = None,
    ) -> tuple[Float[Array, "B T E"], Carry, Output]:
        """Embed the tokens and run every layer with the attention that the caller passes.

        Args:
            position: absolute positions, -1 for padding.
            lengths: the sequences' full lengths, which only the rope types dynamic and longrope read: all keys of a
                sequence must be rotated by the same frequencies, whichever block they came in.
            attend: called once per layer with rotated queries and keys; see ``Attend``.
            after_first: called with layer 0's output before the other layers run; it may change the carry. Layer 0 is
                then compiled separately.
            before_attention: called once per layer, ``before_attention(carry, layer index, input of the attention)``,
                and returns the carry that ``attend`` gets.

        Returns:
            The hidden states before the last norm, the carry, and the layers' outputs stacked, [L, ...].
        """
        step, scanned = self.scanned(position, lengths, attend, before_attention)
        state = embed(self.config, self.embedding[...], tokens), carry
        if after_first is not None:
            return _first_apart(step, state, scanned, after_first)
        (x, carry), outputs = jax.lax.scan(step, state, scanned, unroll=_unrolled())
        return x, carry, outputs

    def scanned(
        self,
        position: Int[Array, "B T"],
        lengths: Int[Array, "B"],
        attend: Attend[Carry, Output],
        before_attention: Callable[[Carry, Int[Array, ""], Float[Array, "B T E"]], Carry] | None = None,
    ) -> tuple[Callable[..., Any], Any]:
        """Return the step that runs a layer, and what is scanned over the layers; for the arguments see :meth:`run`.

        ``step((x, carry), scanned, shift=None)`` returns ``((x, carry), output)`` of the layer; for ``shift`` see
        :func:`run_layer`.
        """
        config = self.config
        waves = rotation(config, position, lengths)
        everywhere, feeds = self.layers.arrays(), None
        if config.dense_sizes and config.sparse_layers:
            everywhere, feeds = _by_kind(config, everywhere)

        def step(state, scanned, shift=None):
            x, carry = state
            weights, index, window = scanned
            if before_attention is not None:
                carry = before_attention(carry, index, attention_input(config, weights, x))
            here = rope_of_layer(config, index, waves)
            feed = None if feeds is None else partial(_feed_forward_of, config, feeds, index)
            x, carry, output = run_layer(config, weights, x, here, partial(attend, carry, index, window), feed, shift)
            return (x, carry), output

        return step, (everywhere, jnp.arange(config.num_layers, dtype=jnp.int32), sliding_windows(config))

    def logits(self, hidden: Float[Array, "*rest E"]) -> Float[Array, "*rest V"]:
        """Apply the last norm and the projection to the vocabulary, in float32."""
        hidden = _norm(self.config, hidden, self.norm[...])
        accumulate = jnp.promote_types(hidden.dtype, jnp.float32)
        weights, axes = (self.embedding, "ve") if self.head is None else (self.head, "ev")
        alone = hidden.size == hidden.shape[-1] and platform() == "gpu"
        # For one row XLA makes a float32 copy of all weights on a GPU; the other seven rows cost nothing there.
        rows = jnp.pad(hidden.reshape(1, -1), ((0, 7), (0, 0))) if alone else hidden
        logits = jnp.einsum(f"...e,{axes}->...v", rows, weights[...], preferred_element_type=accumulate)
        logits = logits[0].reshape(*hidden.shape[:-1], -1) if alone else logits
        logits, cap = _times(logits, 1 / self.config.logits_scaling), self.config.logits_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def _unrolled() -> bool:
    """Return whether the layers run one after the other and not in a loop: on a GPU, where a loop parts CUDA graphs.

    XLA's Triton products can read a layer's matrices at a constant place of the stack, and copy what a loop counts.
    """
    return platform() == "gpu"


def _first_apart(step: Callable[..., Any], state: Any, scanned: Any, after_first: Callable[..., Any]) -> Any:
    """Run layer 0, then ``after_first``, then scan the other layers; see :meth:`Decoder.run`."""

    def step_of(state, index):  # by index: a slice of the scanned arrays would be a copy of all layers
        return step(state, jax.tree.map(lambda array: array[index], scanned))

    (x, carry), first = step_of(state, 0)
    others = jnp.arange(1, len(scanned[1]), dtype=jnp.int32)
    (x, carry), rest = jax.lax.scan(step_of, (x, after_first(x, carry)), others, unroll=_unrolled())
    return x, carry, jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, rest)


def output_of_heads(model: Decoder) -> Float[Array, "L N D E"]:
    """Return each query head's rows of W_O."""
    weight, config = model.layers.output[...], model.config
    return weight.reshape(weight.shape[0], config.num_heads, config.head_dim, -1)


def check_decoder(model: object) -> None:
    """Check that the model is a decoder."""
    if not isinstance(model, Decoder):
        raise ValueError(f"the model is a {type(model).__name__}; give a Decoder, such as models.load returns.")


def embed(config: Config, embedding: Float[Array, "V E"], tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
    """Return the input of layer 0."""
    return _times(embedding[tokens], config.embedding_multiplier)


def rotation(config: Config, position: Int[Array, "B T"], lengths: Int[Array, "B"]) -> tuple[Array, Array]:
    """Compute cosine and sine of each token's rotary angles, [B, T, 1, D / 2], shared by all heads.

    They are shared by all layers too, or stacked, [R, B, T, 1, D / 2], where layers have R different rotary embeddings
    (see :func:`rope_of_layer`).
    """

    def waves(rope: Rope) -> tuple[Array, Array]:
        frequency, amplitude = rope_frequencies(rope, config.head_dim, lengths)  # [B or 1, D / 2]
        angle = jnp.maximum(position, 0)[..., None].astype(frequency.dtype) * frequency[:, None]  # [B, T, D / 2]
        factor = amplitude if rope.partial_rotary_factor == 1 else jnp.where(frequency > 0, amplitude, 1)[:, None, None]
        cos, sin = (factor * wave(angle)[:, :, None] for wave in (jnp.cos, jnp.sin))
        return cos, sin

    cos, sin = zip(*map(waves, config.distinct_ropes), strict=True)
    return _stacked(cos), _stacked(sin)


def frequencies(config: Config, lengths: Int[Array, "B"]) -> Float[Array, "*ropes rows half"]:
    """Return the angle per position for each pair of a head's elements, stacked as in :func:`rotation`."""
    return _stacked([rope_frequencies(rope, config.head_dim, lengths)[0] for rope in config.distinct_ropes])


def _stacked(parts: Sequence[Array]) -> Array:
    return parts[0] if len(parts) == 1 else jnp.stack(jnp.broadcast_arrays(*parts))


def rope_of_layer(config: Config, layer: Int[Array, ""], arrays: Any) -> Any:
    """Return one layer's part of the arrays of :func:`rotation` or :func:`frequencies`."""
    ropes = config.distinct_ropes
    if len(ropes) == 1:
        return arrays
    numbers = jnp.array([ropes.index(rope or config.rope) for rope in config.ropes], jnp.int32)
    return jax.tree.map(lambda array: array[numbers[layer]], arrays)


def sliding_windows(config: Config) -> Int[Array, "L"] | None:
    """Return how many positions the queries of each layer see; None where all layers see all positions."""
    if not any(config.sliding_windows):
        return None
    everything = jnp.iinfo(jnp.int32).max
    return jnp.array([window or everything for window in config.sliding_windows], jnp.int32)


def attend_densely(
    config: Config,
    position: Int[Array, "B T"],
    sliding_window: Int[Array, ""] | None,
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
) -> Float[Array, "B T N D"]:
    """Compute one layer's causal attention over whole sequences, with all weights at once."""
    key_position = jnp.broadcast_to(position[:, None], (key.shape[0], key.shape[2], key.shape[1]))
    key, value, cap = key.swapaxes(1, 2), value.swapaxes(1, 2), config.attention_soft_cap
    return cache_attention(query, key, value, key_position, position, sliding_window=sliding_window, soft_cap=cap)[0]


def run_layer[Carry, Output](
    config: Config,
    weights: dict[str, Array],
    x: Float[Array, "B T E"],
    waves: tuple[Array, Array],
    attend: Callable[[Array, Array, Array], tuple[Array, Carry, Output]],
    feed: Callable[[Array], Array] | None = None,
    shift: Float[Array, "B T E"] | None = None,
) -> tuple[Float[Array, "B T E"], Carry, Output]:
    """Run one layer with the attention that the caller passes, ``attend(query, key, value)``.

    Args:
        weights: the layer's arrays by name.
        waves: the layer's cosines and sines; see :func:`rotation`.
        feed: the layer's feed-forward; None for :func:`feed_forward` with these parameters.
        shift: is added to the attention's output, behind W_O, so that a derivative may be taken with respect to it.

    Returns:
        The input of the next layer, then the carry and the output that ``attend`` returned.
    """

    def added(out: Array, post_norm: str) -> Array:
        if config.norms != "before":
            out = _norm(config, out, weights[post_norm])
        return _times(out, config.residual_multiplier)

    query, key, value = _project(config, weights, attention_input(config, weights, x))
    out, carry, output = attend(rotate(query, *waves), rotate(key, *waves), value)
    out = out.reshape(*out.shape[:2], -1) @ weights["output"]
    if config.output_bias:
        out = out + along_last(weights["output_bias"], out)
    if shift is not None:
        out = out + shift
    x = x + added(out, "attention_post_norm")
    y = x if config.norms == "after" else _norm(config, x, weights["feed_norm"])
    out = feed_forward(config, weights, y) if feed is None else feed(y)
    return x + added(out, "feed_post_norm"), carry, output


def attention_input(config: Config, weights: dict[str, Array], x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
    """Return what a layer's queries, keys and values are made of, from the layer's input and its arrays."""
    return x if config.norms == "after" else _norm(config, x, weights["attention_norm"])


def feed_forward(config: Config, weights: dict[str, Array], x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
    """Apply a layer's feed-forward network, or those experts that the router chooses for each token."""
    activation = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu}[config.activation]
    if "router" in weights:
        return _experts(config, weights, x, activation)
    return _gated(jnp.einsum("bte,ecf->btcf", x, weights["gate_up"]), activation) @ weights["down"]


def _gated(gate_up: Float[Array, "*rest 2 F"], activation: Callable[[Array], Array]) -> Float[Array, "*rest F"]:
    return activation(gate_up[..., 0, :]) * gate_up[..., 1, :]


def _experts(
    config: Config, weights: dict[str, Array], x: Float[Array, "B T E"], activation: Callable[[Array], Array]
) -> Float[Array, "B T E"]:
    """Apply those experts that the router chooses for each token.

    The tokens are sorted by expert, so that each expert's weights meet its own tokens in one ragged product. No token
    is dropped, and no expert is copied for a token.
    """
    logits = (x @ weights["router"]).astype(jnp.promote_types(x.dtype, jnp.float32))
    share, expert = jax.lax.top_k(jax.nn.softmax(logits), config.experts_per_token)  # [B, T, c]
    if config.normalise_experts:
        share = share / jnp.sum(share, axis=-1, keepdims=True)
    own = weights["expert_gate_up"], weights["expert_down"]
    mesh = mesh_of((x, *own))
    ways = expert_axes(mesh)
    if math.prod(mesh.shape[axis] for axis in ways) == 1:
        return run_experts(x, share, expert, *own, activation=activation)

    def on_device(x: Array, share: Array, expert: Array, *own: Array) -> Array:
        first = jax.lax.axis_index(ways) * own[0].shape[0]
        mine = (expert - first) % config.num_experts
        return jax.lax.psum(run_experts(x, share, mine, *own, activation=activation), ways)

    # Left to itself, XLA brings all experts to all devices of a TPU.
    whole = PartitionSpec("data" if x.shape[0] % mesh.shape.get("data", 1) == 0 else None)
    specs = (whole,) * 3 + (PartitionSpec(ways),) * 2
    return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=False)(x, share, expert, *own)


def _by_kind(
    config: Config, layers: dict[str, Array]
) -> tuple[dict[str, Array], tuple[dict[str, Array], dict[str, Array]]]:
    """Separate what all layers have from what only those without experts and those with them have."""
    numbers = {name: layers_with(config, f"layers.{name}") for name in layers}

    def of(wanted: Sequence[int]) -> dict[str, Array]:
        return {name: array for name, array in layers.items() if numbers[name] == wanted}

    return of(range(config.num_layers)), (of(config.dense_layers), of(config.sparse_layers))


def _feed_forward_of(
    config: Config, feeds: tuple[dict[str, Array], ...], layer: Int[Array, ""], x: Float[Array, "B T E"]
) -> Float[Array, "B T E"]:
    """Apply one layer's feed-forward; ``feeds`` are the parameters of all layers without experts, and with them."""
    sparse = jnp.array([size is None for size in config.dense_sizes])
    before = jnp.cumsum(sparse) - sparse  # a layer's place among those of its kind
    place = jnp.where(sparse, before, jnp.arange(config.num_layers) - before)[layer]

    def of(stacks: dict[str, Array]) -> Callable[[Array], Array]:  # sliced here: outside, both kinds would be copied
        return lambda x: feed_forward(config, {name: array[place] for name, array in stacks.items()}, x)

    return jax.lax.cond(sparse[layer], of(feeds[1]), of(feeds[0]), x)


def run_experts(
    x: Float[Array, "B T E"],
    share: Float[Array, "B T c"],
    expert: Int[Array, "B T c"],
    gate_up: Float[Array, "X E 2 F"],
    down: Float[Array, "X F E"],
    *,
    activation: Callable[[Array], Array] = jax.nn.silu,
) -> Float[Array, "B T E"]:
    """Sum the outputs of each token's experts, weighted by ``share``; experts from number X on are left out."""
    tokens, c = x.reshape(-1, x.shape[-1]), expert.shape[-1]
    order = jnp.argsort(expert.reshape(-1))  # [B T c], those of an expert side by side
    X, E, _, F = gate_up.shape
    counts = jnp.bincount(expert.reshape(-1), length=X).astype(jnp.int32)  # [X]
    made = jax.lax.ragged_dot(tokens[order // c], gate_up.reshape(X, E, 2 * F), counts)
    made = _gated(made.reshape(-1, 2, F), activation)
    made = jax.lax.ragged_dot(made, down, counts)[jnp.argsort(order)].reshape(*expert.shape, -1)  # [B, T, c, E]
    made = jnp.where((expert < X)[..., None], share[..., None] * made, 0)
    return jnp.sum(made, axis=2).astype(x.dtype)


def _times(x: Float[Array, "*shape"], factor: float) -> Float[Array, "*shape"]:
    return x if factor == 1 else x * factor


def rms_norm(
    x: Float[Array, "*rest E"], weight: Float[Array, "E"], epsilon: float, offset: bool = False
) -> Float[Array, "*rest E"]:
    """Compute x / sqrt(mean(x^2) + epsilon) * weight, with the mean in at least float32.

    With ``offset`` the factor is 1 + weight, which is also added and multiplied in at least float32.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    if offset:
        return (normed * (1 + along_last(weight, x).astype(normed.dtype))).astype(x.dtype)
    return along_last(weight, x) * normed.astype(x.dtype)


def _norm(config: Config, x: Float[Array, "*rest E"], weight: Float[Array, "E"]) -> Float[Array, "*rest E"]:
    return rms_norm(x, weight, config.norm_epsilon, config.norm_offset)


def along_last(array: Float[Array, "*last"], x: Float[Array, "*rest"]) -> Float[Array, "*ones_and_last"]:
    """Reshape an array of the last axes of ``x`` to the rank of ``x``, with axes of size 1 in front."""
    return array.reshape((1,) * (x.ndim - array.ndim) + array.shape)


def _project(config: Config, weights: dict[str, Array], x: Float[Array, "B T E"]) -> tuple[Array, Array, Array]:
    """Compute queries [B, T, N, D], keys and values [B, T, K, D], before rotation."""
    made = jnp.einsum("bte,ekhd->btkhd", x, weights["qkv"])
    if config.attention_bias:
        made = made + along_last(weights["qkv_bias"], made)
    query, key, value = made[..., :-2, :], made[..., -2, :], made[..., -1, :]
    query = query.reshape(*x.shape[:2], config.num_heads, config.head_dim)
    if config.query_key_norm or config.wide_query_key_norm:
        query, key = _normed_heads(config, weights, query, key)
    if config.attention_multiplier is not None:
        query = _times(query, config.attention_multiplier * math.sqrt(config.head_dim))
    return query, key, value


def _normed_heads(config: Config, weights: dict[str, Array], query: Array, key: Array) -> tuple[Array, Array]:
    """Return queries and keys after their norm: of each head alone, or of all heads of a token together."""
    if config.query_key_norm:
        query, key = _norm(config, query, weights["query_norm"]), _norm(config, key, weights["key_norm"])
    if config.wide_query_key_norm:

        def normed(x: Array, weight: Array) -> Array:
            return _norm(config, x.reshape(*x.shape[:2], -1), weight.reshape(-1)).reshape(x.shape)

        query, key = normed(query, weights["wide_query_norm"]), normed(key, weights["wide_key_norm"])
    return query, key


_joined = jax.jit(joined, static_argnums=0)


def _random_parameter(key: Array | None, name: str, shape: tuple[int, ...], norm_offset: bool) -> Array:
    if key is None:
        return jnp.full(shape, 1 if name.endswith("norm") and not norm_offset else 0, jnp.float32)
    return (0.02 * jax.random.normal(key, shape)).astype(jnp.float32)
