"""Llama, Mistral, Qwen2, Qwen2.5 and Qwen3 in one file.

Axes: B batch, T tokens, L layers, N query heads, K KV heads, D head dim, E model dim, F feed-forward, V vocabulary.
The layers' parameters are stacked, [L, ...], and run by one `lax.scan`, so 32 layers compile like 2. Attention is an
argument (`attend`): dense, over a cache, or whatever a caller brings. A caller's state travels in the scan's carry,
which XLA updates in place; as scanned inputs and outputs it would exist twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kernels_pallas import cache_attention
from kvjax import rotate
from models.config import Config, Rope

Carry = TypeVar("Carry")
Output = TypeVar("Output")
# attend(carry, layer index, sliding window or None, query, key, value) -> attention output, carry, output of the layer
Attend = Callable[
    [Carry, Int[Array, ""], Int[Array, ""] | None, Float[Array, "B T N D"], Float[Array, "B T K D"], Any],
    tuple[Float[Array, "B T N D"], Carry, Output],
]

# Where each parameter lies on a mesh with axes "data" and "tensor": heads, feed-forward and vocabulary are split.
SHARDING = {
    "embedding": PartitionSpec("tensor", None),
    "head": PartitionSpec(None, "tensor"),
    "norm": PartitionSpec(None),
    "layers.attention_norm": PartitionSpec(None, None),
    "layers.query": PartitionSpec(None, None, "tensor", None),
    "layers.key": PartitionSpec(None, None, "tensor", None),
    "layers.value": PartitionSpec(None, None, "tensor", None),
    "layers.query_bias": PartitionSpec(None, "tensor", None),
    "layers.key_bias": PartitionSpec(None, "tensor", None),
    "layers.value_bias": PartitionSpec(None, "tensor", None),
    "layers.query_norm": PartitionSpec(None, None),
    "layers.key_norm": PartitionSpec(None, None),
    "layers.output": PartitionSpec(None, "tensor", None, None),
    "layers.output_bias": PartitionSpec(None, None),
    "layers.feed_norm": PartitionSpec(None, None),
    "layers.gate": PartitionSpec(None, None, "tensor"),
    "layers.up": PartitionSpec(None, None, "tensor"),
    "layers.down": PartitionSpec(None, "tensor", None),
}


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter that a model of this config has, by its path in the Decoder.

    Example:
        >>> from models.config import Config
        >>> from models.decoder import parameter_shapes
        >>> parameter_shapes(Config(64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2))["layers.key"]
        (2, 32, 2, 8)
    """
    V, E, F, L = config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers
    N, K, D = config.num_heads, config.num_kv_heads, config.head_dim
    shapes = {
        "embedding": (V, E),
        "norm": (E,),
        "layers.attention_norm": (L, E),
        "layers.query": (L, E, N, D),
        "layers.key": (L, E, K, D),
        "layers.value": (L, E, K, D),
        "layers.output": (L, N, D, E),
        "layers.feed_norm": (L, E),
        "layers.gate": (L, E, F),
        "layers.up": (L, E, F),
        "layers.down": (L, F, E),
    }
    if not config.tie_embeddings:
        shapes["head"] = (E, V)
    if config.attention_bias:
        shapes |= {"layers.query_bias": (L, N, D), "layers.key_bias": (L, K, D), "layers.value_bias": (L, K, D)}
    if config.output_bias:
        shapes["layers.output_bias"] = (L, E)
    if config.query_key_norm:
        shapes |= {"layers.query_norm": (L, D), "layers.key_norm": (L, D)}
    return shapes


class Layers(nnx.Module):
    """The parameters of all layers, stacked; `lax.scan` hands them out one layer at a time."""

    attention_norm: nnx.Param
    query: nnx.Param
    key: nnx.Param
    value: nnx.Param
    query_bias: nnx.Param
    key_bias: nnx.Param
    value_bias: nnx.Param
    query_norm: nnx.Param
    key_norm: nnx.Param
    output: nnx.Param
    output_bias: nnx.Param
    feed_norm: nnx.Param
    gate: nnx.Param
    up: nnx.Param
    down: nnx.Param

    def __init__(self, parameters: dict[str, Array]):
        for name, array in parameters.items():
            setattr(self, name, nnx.Param(array))


class Decoder(nnx.Module):
    """A causal language model: tokens in, logits out.

    Args:
        config: the model's shape.
        parameters: an array for each entry of ``parameter_shapes(config)``, by path; drawn at random if not given.
        rngs: the source of random parameters (``nnx.Rngs(0)``).
        dtype: dtype of random parameters.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from models.config import Config
        >>> from models.decoder import Decoder
        >>> model = Decoder(Config(64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2), rngs=nnx.Rngs(0))
        >>> model(jnp.array([[1, 2, 3]])).shape
        (1, 3, 64)
    """

    def __init__(
        self,
        config: Config,
        parameters: dict[str, Array] | None = None,
        *,
        rngs: nnx.Rngs | None = None,
        dtype: DTypeLike = jnp.float32,
    ):
        self.config = config
        shapes = parameter_shapes(config)
        if parameters is None:
            if rngs is None:
                raise ValueError("neither parameters nor rngs were given; pass rngs=nnx.Rngs(0) for random weights.")
            parameters = {name: _random_parameter(rngs, name, shape, dtype) for name, shape in shapes.items()}
        self.embedding = nnx.Param(parameters["embedding"])
        self.norm = nnx.Param(parameters["norm"])
        self.head = None if config.tie_embeddings else nnx.Param(parameters["head"])
        prefix = "layers."
        self.layers = Layers({n.removeprefix(prefix): a for n, a in parameters.items() if n.startswith(prefix)})

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Dense causal forward over whole sequences; logits in float32."""
        T = tokens.shape[1]
        position = jnp.broadcast_to(jnp.arange(T), tokens.shape)

        def attend(carry, layer, sliding_window, query, key, value):
            key_position = jnp.broadcast_to(position[:, None], (key.shape[0], key.shape[2], T))
            key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
            out, _ = cache_attention(query, key, value, key_position, position, sliding_window=sliding_window)
            return out, carry, None

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
    ) -> tuple[Float[Array, "B T E"], Carry, Output]:
        """Embeds the tokens and runs every layer, with the attention that the caller brings.

        Args:
            position: absolute positions, -1 for padding.
            lengths: the sequences' full lengths, which only dynamic rope scaling reads: keys of one sequence must all
                be rotated by the same frequencies, whichever block they came in.
            attend: called once a layer with rotated queries and keys; see ``Attend``.
            after_first: sees layer 0's output before the other layers run, and may change the carry. Layer 0 is then
                compiled apart from the others.

        Returns:
            The hidden states before the last norm, the carry, and the layers' outputs stacked, [L, ...].
        """
        config = self.config
        frequency, amplitude = rope_frequencies(config.rope, config.head_dim, lengths)  # [B or 1, D / 2]
        angle = jnp.maximum(position, 0)[..., None].astype(frequency.dtype) * frequency[:, None]  # [B, T, D / 2]
        cos, sin = (amplitude * wave(angle)[:, :, None] for wave in (jnp.cos, jnp.sin))  # one for all heads
        windows = None
        if any(config.sliding_windows):
            everything = jnp.iinfo(jnp.int32).max
            windows = jnp.array([window or everything for window in config.sliding_windows], jnp.int32)

        def run_layer(state, scanned):
            x, carry = state
            layer, index, window = scanned
            query, key, value = _project(config, layer, rms_norm(x, layer.attention_norm[...], config.norm_epsilon))
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
            out, carry, output = attend(carry, index, window, query, key, value)
            x = x + jnp.einsum("btnd,nde->bte", out, layer.output[...])
            if config.output_bias:
                x = x + along_last(layer.output_bias[...], x)
            y = rms_norm(x, layer.feed_norm[...], config.norm_epsilon)
            gate, up = y @ layer.gate[...], y @ layer.up[...]
            return (x + (jax.nn.silu(gate) * up) @ layer.down[...], carry), output

        scanned = (self.layers, jnp.arange(config.num_layers, dtype=jnp.int32), windows)
        state = self.embedding[...][tokens], carry
        if after_first is None:
            (x, carry), outputs = jax.lax.scan(run_layer, state, scanned)
            return x, carry, outputs

        def run_index(state, index):  # by index: a slice of the scanned arrays would be a copy of all layers
            return run_layer(state, jax.tree.map(lambda array: array[index], scanned))

        (x, carry), first = run_index(state, 0)
        (x, carry), rest = jax.lax.scan(
            run_index, (x, after_first(x, carry)), jnp.arange(1, config.num_layers, dtype=jnp.int32)
        )
        return x, carry, jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, rest)

    def logits(self, hidden: Float[Array, "*rest E"]) -> Float[Array, "*rest V"]:
        """The last norm and the projection to the vocabulary, in float32."""
        hidden = rms_norm(hidden, self.norm[...], self.config.norm_epsilon)
        accumulate = jnp.promote_types(hidden.dtype, jnp.float32)
        if self.head is None:
            return jnp.einsum("...e,ve->...v", hidden, self.embedding[...], preferred_element_type=accumulate)
        return jnp.einsum("...e,ev->...v", hidden, self.head[...], preferred_element_type=accumulate)


def rms_norm(x: Float[Array, "*rest E"], weight: Float[Array, "E"], epsilon: float) -> Float[Array, "*rest E"]:
    """x / sqrt(mean(x^2) + epsilon) * weight; the mean in at least float32."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return along_last(weight, x) * normed.astype(x.dtype)


def along_last(array: Float[Array, "*last"], x: Float[Array, "*rest"]) -> Float[Array, "*ones_and_last"]:
    """An array of the last axes of ``x``, with the axes of size 1 in front that meet the others."""
    return array.reshape((1,) * (x.ndim - array.ndim) + array.shape)


def rope_frequencies(
    rope: Rope, head_dim: int, lengths: Int[Array, "B"] | None = None
) -> tuple[Float[Array, "rows half"], float]:
    """Angle per position for each pair of a head's elements, and the factor on cos and sin.

    Args:
        lengths: the sequences' full lengths, read by "dynamic" only.

    Returns:
        Frequencies with one row for all sequences (one a sequence for "dynamic"), and the amplitude (1 but for yarn).

    Example:
        >>> from models.config import Rope
        >>> from models.decoder import rope_frequencies
        >>> rope_frequencies(Rope(theta=100.0), 4)[0].round(3).tolist()
        [[1.0, 0.10000000149011612]]
    """
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    plain = 1.0 / rope.theta**exponent
    if rope.type == "linear":
        return plain[None] / rope.factor, 1.0
    if rope.type == "dynamic":
        length = jnp.maximum(jnp.zeros(1, jnp.int32) if lengths is None else lengths, rope.original_positions)
        length = length.astype(jnp.float32)
        growth = rope.factor * length / rope.original_positions - (rope.factor - 1)
        base = rope.theta * growth ** (head_dim / (head_dim - 2))
        return 1.0 / base[:, None] ** exponent[None], 1.0
    if rope.type == "llama3":
        wavelength = 2 * math.pi / plain
        low, high = rope.low_freq_factor, rope.high_freq_factor
        smooth = jnp.clip((rope.original_positions / wavelength - low) / (high - low), 0, 1)
        return (plain * (smooth + (1 - smooth) / rope.factor))[None], 1.0
    if rope.type == "yarn":
        return _yarn_frequencies(rope, head_dim, plain)[None], _yarn_amplitude(rope)
    return plain[None], 1.0


def _yarn_frequencies(rope: Rope, head_dim: int, plain: Float[Array, "half"]) -> Float[Array, "half"]:
    def dimension_of(rotations: float) -> float:
        turns = rope.original_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretched = jnp.clip((jnp.arange(head_dim // 2, dtype=jnp.float32) - low) / (high - low), 0, 1)
    return plain * (1 - stretched) + plain / rope.factor * stretched


def _yarn_amplitude(rope: Rope) -> float:
    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _project(config: Config, layer: Layers, x: Float[Array, "B T E"]) -> tuple[Array, Array, Array]:
    """Queries [B, T, N, D], keys and values [B, T, K, D], before rotation."""
    query = jnp.einsum("bte,end->btnd", x, layer.query[...])
    key = jnp.einsum("bte,ekd->btkd", x, layer.key[...])
    value = jnp.einsum("bte,ekd->btkd", x, layer.value[...])
    if config.attention_bias:
        biases = layer.query_bias[...], layer.key_bias[...], layer.value_bias[...]
        query, key, value = (x + along_last(bias, x) for x, bias in zip((query, key, value), biases, strict=True))
    if config.query_key_norm:
        query = rms_norm(query, layer.query_norm[...], config.norm_epsilon)
        key = rms_norm(key, layer.key_norm[...], config.norm_epsilon)
    return query, key, value


def _random_parameter(rngs: nnx.Rngs, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    if name.endswith("norm"):
        return jnp.ones(shape, dtype)
    if name.endswith("bias"):
        return jnp.zeros(shape, dtype)
    return (0.02 * jax.random.normal(rngs.params(), shape)).astype(dtype)
