"""TokenButler's predictor: how important each token is for each head of each layer, from the model's layer 0 alone.

    x [B, T, E] -> reduce to r -> causal attention -> LayerNorm -> up, GELU, down to E -> + x       (one residual)
                -> two networks E -> hidden -> SiLU -> [L', N, D'], rotated: queries q' and keys k'
    importance of token j to token i, for head n of layer l:  q'_i . k'_j / sqrt(D')                (a logit)

Layer 0 is read in full; the other L' = L - 1 layers are predicted. Details that the paper leaves open follow its public
code (v1): the predictor's own attention also has N heads; rotary embedding has the model's base without its scaling, at
the widths r / N and D'. The predictor computes in its own dtype, not in the model's.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kernels_pallas import cache_attention
from kernels_pallas.softmax import grouped_logits
from kvjax import rotate
from kvjax.checks import check_count, check_names, plain
from models.butler.config import SOURCES, ButlerConfig, Source, parameter_shapes
from models.config import Rope
from models.decoder import Decoder, along_last, attention_input, embed, rope_frequencies
from models.parameters import check_rngs, drawn
from models.parameters import parameter_shapes as model_shapes

QUERIES_A_CHUNK = 512


class Predicted(NamedTuple):
    """Queries q' and keys k' of every predicted layer, rotated; entry l - 1 is the model's layer l."""

    query: Float[Array, "layers B T N dim"]
    key: Float[Array, "layers B T N dim"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ButlerCache:
    """The predictor's cache of all tokens so far. Nothing is evicted from it: position p is in slot p.

    ``key`` and ``value`` are those of its own attention. ``importance_key`` are the k' of every predicted layer, with
    no slots if they are kept elsewhere. Keys are rotated when they are stored, and never again. ``position`` is -1
    where a slot is free.
    """

    key: Float[Array, "B N S width"]
    value: Float[Array, "B N S width"]
    importance_key: Float[Array, "layers B N slots dim"]
    position: Int[Array, "B S"]


class Butler(nnx.Module):
    """TokenButler's predictor (section 3.1); the module's docstring shows what it computes.

    Args:
        config: its shape.
        parameters: an array for each entry of ``parameter_shapes(config)``; Xavier uniform if not given.
        rngs: the source of random parameters (``nnx.Rngs(0)``).
        dtype: the dtype of random parameters.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> import models
        >>> config = models.Config(
        ...     64, 32, 96, num_layers=3, num_heads=4, num_kv_heads=2
        ... )
        >>> butler = models.Butler(models.ButlerConfig.of(config), rngs=nnx.Rngs(0))
        >>> x = jax.random.normal(jax.random.key(0), (1, 6, 32))
        >>> jax.jit(butler)(x).query.shape  # of layers 1 and 2
        (2, 1, 6, 4, 2)
        >>> query, cache = jax.jit(butler.step)(
        ...     butler.init_cache(batch=1, slots=8), x, jnp.arange(6)[None]
        ... )
        >>> models.butler.importance(query, cache.importance_key, layer=2).shape
        (1, 4, 6, 8)
    """

    reduce: nnx.Param
    query: nnx.Param
    key: nnx.Param
    value: nnx.Param
    norm: nnx.Param
    norm_bias: nnx.Param
    up: nnx.Param
    up_bias: nnx.Param
    down: nnx.Param
    down_bias: nnx.Param
    query_in: nnx.Param
    query_out: nnx.Param
    key_in: nnx.Param
    key_out: nnx.Param

    def __init__(
        self,
        config: ButlerConfig,
        parameters: dict[str, Array] | None = None,
        *,
        rngs: nnx.Rngs | None = None,
        dtype: DTypeLike = jnp.float32,
    ):
        self.config = config
        shapes = parameter_shapes(config)
        if parameters is None:
            parameters = drawn(_random_parameter, shapes, check_rngs(rngs), dtype)
        for name in shapes:
            setattr(self, name, nnx.Param(parameters[name]))

    def __call__(
        self,
        x: Float[Array, "B T E"],
        position: Int[Array, "B T"] | None = None,
        *,
        dropout_key: Array | None = None,
    ) -> Predicted:
        """Compute queries and keys of whole sequences, for training and analysis.

        Args:
            x: the input that ``config.source`` names; see :func:`butler_input`.
            position: absolute positions, -1 for padding; 0 to T - 1 by default.
            dropout_key: the random key of dropout in training; without it nothing is dropped.
        """
        position = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2]) if position is None else position

        def attend(query, key, value):
            return attention_in_chunks(query, key.swapaxes(1, 2), value.swapaxes(1, 2), position)

        query, key = self._run(x, position, attend, dropout_key)
        return Predicted(jnp.moveaxis(query, 2, 0), jnp.moveaxis(key, 2, 0))

    def init_cache(self, batch: int, slots: int, *, importance_keys: bool = True) -> ButlerCache:
        """Return an empty cache for sequences of up to ``slots`` tokens: 2 r + L' N D' numbers per token.

        Args:
            importance_keys: whether to keep importance keys; False saves their L' N D' numbers, for :meth:`advance`.

        Raises:
            ValueError: a size below 1.
        """
        batch = check_count("batch", batch, 1, "a cache needs at least 1")
        slots = check_count("slots", slots, 1, "a cache needs at least 1")
        N, width, dtype = self.config.num_heads, self.config.reduced // self.config.num_heads, self.reduce[...].dtype
        return ButlerCache(
            key=jnp.zeros((batch, N, slots, width), dtype),
            value=jnp.zeros((batch, N, slots, width), dtype),
            importance_key=jnp.zeros(
                (self.config.predicted_layers, batch, N, slots if importance_keys else 0, self.config.dim), dtype
            ),
            position=jnp.full((batch, slots), -1, jnp.int32),
        )

    def step(
        self, cache: ButlerCache, x: Float[Array, "B T E"], position: Int[Array, "B T"]
    ) -> tuple[Float[Array, "layers B T N dim"], ButlerCache]:
        """Feed one block of a prompt, or one token; return its queries, and the cache with its keys.

        Args:
            cache: the cache of all tokens before; if it is donated, it is updated in place.
            x: the input that ``config.source`` names, of the new tokens.
            position: their absolute positions, -1 for padding, which is not stored.

        Raises:
            ValueError: the cache has no slot for a position (checked outside jit only; inside, it is not stored).
        """
        predicted, cache = self.advance(cache, x, position)
        row, slot = jnp.arange(position.shape[0])[:, None], _slots(cache, position)
        rows = jnp.moveaxis(predicted.key, 0, 2).astype(cache.importance_key.dtype)  # [B, T, L', N, D']
        importance_key = cache.importance_key.at[:, row, :, slot].set(rows, mode="drop")
        return predicted.query, dataclasses.replace(cache, importance_key=importance_key)

    def advance(
        self, cache: ButlerCache, x: Float[Array, "B T E"], position: Int[Array, "B T"]
    ) -> tuple[Predicted, ButlerCache]:
        """Do what :meth:`step` does, but return the block's importance keys instead of storing them."""
        B, S = cache.position.shape
        if not isinstance(position, jax.core.Tracer) and np.asarray(position).max() >= S:
            raise ValueError(
                f"position {np.asarray(position).max()} does not fit the predictor's cache of {S} slots; make it as "
                "long as the prompt and its answer."
            )
        row, slot = jnp.arange(B)[:, None], _slots(cache, position)
        stored = cache.position.at[row, slot].set(position, mode="drop")
        grown: dict[str, Array] = {}

        def write(array: Array, new: Array) -> Array:
            return array.at[..., row, :, slot, :].set(new.astype(array.dtype), mode="drop")

        def attend(query, key, value):
            grown.update(key=write(cache.key, key), value=write(cache.value, value))
            slots = jnp.broadcast_to(stored[:, None], cache.key.shape[:3])
            return cache_attention(query, grown["key"], grown["value"], slots, position)[0]

        query, key = self._run(x, position, attend, None)
        cache = dataclasses.replace(cache, position=stored, **grown)
        return Predicted(jnp.moveaxis(query, 2, 0), jnp.moveaxis(key, 2, 0)), cache

    def _run(self, x, position, attend, dropout_key) -> tuple[Array, Array]:
        """Compute queries and keys [B, T, L', N, D'], rotated."""
        if x.shape[-1] != self.config.hidden_size:
            raise ValueError(
                f"the input {x.shape} is not the model's: expected [B, T, {self.config.hidden_size}], as butler_input "
                "returns it."
            )
        x = x.astype(self.reduce[...].dtype)
        reduced = x @ self.reduce[...]
        query, key, value = (jnp.einsum("btr,rnd->btnd", reduced, w[...]) for w in (self.query, self.key, self.value))
        query, key = (self._rotate(y, position[..., None]) for y in (query, key))
        y = attend(query, key, value).reshape(reduced.shape)
        y = _layer_norm(y) * along_last(self.norm[...], y) + along_last(self.norm_bias[...], y)
        y = y @ self.up[...]
        y = jax.nn.gelu(y + along_last(self.up_bias[...], y), approximate=False)
        y = y @ self.down[...]
        y = y + along_last(self.down_bias[...], y)
        if dropout_key is not None:
            kept = jax.random.bernoulli(dropout_key, 1 - self.config.dropout, y.shape)
            y = jnp.where(kept, y / (1 - self.config.dropout), 0)
        x = x + y

        def predict(into, out):
            hidden = jax.nn.silu(x @ into[...])
            return self._rotate(jnp.einsum("bth,hlnd->btlnd", hidden, out[...]), position[..., None, None])

        return predict(self.query_in, self.query_out), predict(self.key_in, self.key_out)

    def _rotate(self, x: Float[Array, "*batch width"], position: Int[Array, "*#batch"]) -> Float[Array, "*batch width"]:
        frequency, _ = rope_frequencies(Rope(theta=self.config.rope_theta), x.shape[-1])
        position = jnp.maximum(position, 0)[..., None].astype(frequency.dtype)
        angle = position * along_last(frequency[0], position)
        return rotate(x, jnp.cos(angle), jnp.sin(angle))


def importance(
    query: Float[Array, "layers B T N dim"],
    key: Float[Array, "layers B N S dim"],
    layer: int | Int[Array, ""],
    *,
    position: Int[Array, "B T"] | None = None,
    key_position: Int[Array, "B S"] | None = None,
) -> Float[Array, "B N T S"]:
    """Return one layer's importance logits: the importance of each of S tokens to each of T queries, per head.

    Args:
        query: from :meth:`Butler.step` or :class:`Predicted`.
        key: ``cache.importance_key``, or that of :class:`Predicted` with T and N swapped.
        layer: the model's layer, from 1; layer 0 is not predicted.
        position, key_position: where given, a query's logits of free slots (-1) and of later tokens are -inf.

    Returns:
        Logits in float32 (float64 for float64 inputs).

    Raises:
        ValueError: layer 0, or a layer that the model does not have.

    Example:
        >>> import jax.numpy as jnp
        >>> from models.butler import importance
        >>> importance(jnp.ones((2, 1, 1, 4, 16)), jnp.ones((2, 1, 4, 3, 16)), layer=1)[
        ...     0, 0
        ... ].tolist()
        [[4.0, 4.0, 4.0]]
    """
    layer = plain(layer)
    if isinstance(layer, int) and not 1 <= layer <= query.shape[0]:
        raise ValueError(f"layer is {layer}; layers 1 to {query.shape[0]} are predicted, layer 0 is read in full.")
    query, key = (jax.lax.dynamic_index_in_dim(x, layer - 1, keepdims=False) for x in (query, key))
    logits = grouped_logits(query, key)[:, :, 0] * query.shape[-1] ** -0.5
    if position is None or key_position is None:
        return logits
    seen = (key_position[:, None] >= 0) & (key_position[:, None] <= position[..., None])
    return jnp.where(seen[:, None], logits, -jnp.inf)


def butler_input(
    model: Decoder,
    tokens: Int[Array, "B T"],
    position: Int[Array, "B T"] | None = None,
    *,
    source: Source = "layer0_output",
) -> Float[Array, "B T E"]:
    """Compute the input of a predictor: of whole sequences, or for "attention_input" of any block.

    Args:
        model: the frozen model. Only its layer 0 runs, and for "attention_input" no layer.
        position: absolute positions, -1 for padding; 0 to T - 1 by default. "attention_input" does not read them.
        source: see :class:`ButlerConfig`.

    Raises:
        ValueError: an unknown source.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> import models
        >>> config = models.Config(
        ...     64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2
        ... )
        >>> model = models.Decoder(config, rngs=nnx.Rngs(0))
        >>> jax.jit(models.butler_input)(model, jnp.array([[1, 2, 3]])).shape
        (1, 3, 32)
    """
    check_names("source", source, SOURCES)
    config, layers = model.config, model.layers
    if source == "attention_input":
        first = {name: array[0] for name, array in layers.arrays().items() if name == "attention_norm"}
        return attention_input(config, first, embed(config, model.embedding[...], tokens))
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape) if position is None else position
    alone = dataclasses.replace(
        config, num_layers=1, sliding_windows=config.sliding_windows[:1], ropes=config.ropes[:1],
        dense_sizes=config.dense_sizes[:1], tie_embeddings=True,
    )  # fmt: skip  # tied, so that it has no head: no logits are computed
    names = [name for name in model_shapes(alone) if name.startswith("layers.")]
    first = {name: getattr(layers, name.removeprefix("layers."))[...][:1] for name in names}
    rest = {"embedding": model.embedding[...], "norm": model.norm[...]}

    def attend(carry, layer, sliding_window, query, key, value):
        key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
        out = attention_in_chunks(query, key, value, position, sliding_window, config.attention_soft_cap)
        return out, carry, None

    lengths = jnp.max(position, axis=1) + 1
    return Decoder(alone, first | rest).run(tokens, position, lengths, attend, None)[0]


def attention_in_chunks(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B K T D"],
    value: Float[Array, "B K T D"],
    position: Int[Array, "B T"],
    sliding_window: Int[Array, ""] | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B T N D"]:
    """Compute causal attention of whole sequences without holding the weights of more than one chunk of queries.

    Args:
        position: absolute positions of the queries and the keys, -1 for padding.
        sliding_window: how many tokens a query sees, including its own; all by default.
        soft_cap: see :func:`kernels_pallas.cache_attention`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from models.butler import attention_in_chunks
        >>> value, attend = (
        ...     jnp.arange(3.0).reshape(1, 1, 3, 1),
        ...     jax.jit(attention_in_chunks),
        ... )
        >>> attend(jnp.zeros((1, 3, 2, 1)), value, value, jnp.arange(3)[None])[
        ...     0, :, 0, 0
        ... ].tolist()
        [0.0, 0.5, 1.0]
    """
    B, T = position.shape
    key_position = jnp.broadcast_to(position[:, None], key.shape[:3])

    @jax.checkpoint  # the backward pass computes a chunk's weights again
    def run(chunk):
        query, query_position = chunk
        return cache_attention(
            query, key, value, key_position, query_position, sliding_window=sliding_window, soft_cap=soft_cap
        )[0]

    if T <= QUERIES_A_CHUNK:
        return run((query, position))
    count = -(-T // QUERIES_A_CHUNK)
    padding = (0, count * QUERIES_A_CHUNK - T)
    query = jnp.pad(query, ((0, 0), padding, (0, 0), (0, 0)))
    queries = jnp.moveaxis(query.reshape(B, count, QUERIES_A_CHUNK, *query.shape[2:]), 1, 0)
    positions = jnp.pad(position, ((0, 0), padding), constant_values=-1).reshape(B, count, QUERIES_A_CHUNK)
    out = jax.lax.map(run, (queries, positions.swapaxes(0, 1)))
    return jnp.moveaxis(out, 0, 1).reshape(B, count * QUERIES_A_CHUNK, *query.shape[2:])[:, :T]


def _slots(cache: ButlerCache, position: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Return the slots of tokens; for padding, one beyond the end, where nothing is written."""
    return jnp.where(position >= 0, position, cache.position.shape[1])


def _layer_norm(x: Float[Array, "*rest r"]) -> Float[Array, "*rest r"]:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    return (centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)).astype(x.dtype)


def _random_parameter(key: Array | None, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    if key is None:
        return jnp.full(shape, 1 if name.endswith("norm") else 0, dtype)
    bound = math.sqrt(6 / (shape[0] + math.prod(shape[1:])))
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound).astype(dtype)
