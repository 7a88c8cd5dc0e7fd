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
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

import kvjax
from kvjax import Policy, Prediction, rotate
from kvjax._src.checks import check_count, check_fields, check_names
from models.config import Config, Rope, check_attention
from models.decoder import Decoder, along_last, attention_input, embed
from models.dense import attention, attention_in_chunks
from models.parameters import array_shapes, check_rngs, drawn
from models.rotary import rope_frequencies

Source = Literal["layer0_output", "attention_input"]
SOURCES = ("layer0_output", "attention_input")
# (hidden, D') as published, by the model's E, L and N: Llama-3.2-1B, 3.2-3B, the 7B and 8B models, Qwen2.5-3B.
PUBLISHED = {
    (2048, 16, 32): (512, 16),
    (3072, 28, 24): (1024, 16),
    (4096, 32, 32): (1024, 32),
    (2048, 36, 16): (768, 32),
}
SHARE = 0.01  # of the model's parameters, for a shape that is not published


@dataclasses.dataclass(frozen=True)
class ButlerConfig:
    """The shape of a predictor.

    Args:
        hidden_size, num_layers, num_heads: the model's E, L (including layer 0) and N.
        hidden: the hidden width of the two networks.
        dim: D', the width of the predicted queries and keys.
        reduction: E / r; r is rounded up to a multiple of 2 N, for N heads of even width.
        source: what the predictor reads: layer 0's output, as in the paper, or the normalised embeddings that enter
            layer 0's attention, as in its code.
        rope_theta: the base of both rotary embeddings.
        dropout: the share of the feed-forward's output that training drops.
        published_layout: whether to add the parameters that the public predictor has but never uses (outputs for layer
            0, a LayerNorm of width E), so that parameters are counted as in the paper.

    Example:
        >>> from models.butler import ButlerConfig
        >>> ButlerConfig(64, num_layers=3, num_heads=4, hidden=16, dim=4).reduced
        8
    """

    kind: ClassVar[str] = "butler"

    hidden_size: int
    num_layers: int
    num_heads: int
    hidden: int
    dim: int
    reduction: int = 8
    source: Source = "layer0_output"
    rope_theta: float = 10_000.0
    dropout: float = 0.1
    published_layout: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("hidden_size", "num_heads", "hidden", "dim", "reduction"):
            check_count(name, getattr(self, name), 1, "it must be at least 1")
        check_count("num_layers", self.num_layers, 2, "layer 0 is not predicted, so give at least 2")
        if self.dim % 2:
            raise ValueError(f"dim is {self.dim}; rotary embedding needs an even one.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; give a share in [0, 1).")

    @property
    def reduced(self) -> int:
        """r, the width of the predictor's attention."""
        step = 2 * self.num_heads
        return step * math.ceil(self.hidden_size / self.reduction / step)

    @property
    def predicted_layers(self) -> int:
        """L' = L - 1."""
        return self.num_layers - 1

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter, by its name in :class:`Butler`."""
        E, r, N, H, D = self.hidden_size, self.reduced, self.num_heads, self.hidden, self.dim
        shapes = {
            "reduce": (E, r),
            "query": (r, N, r // N),
            "key": (r, N, r // N),
            "value": (r, N, r // N),
            "norm": (r,),
            "norm_bias": (r,),
            "up": (r, 2 * r),
            "up_bias": (2 * r,),
            "down": (2 * r, E),
            "down_bias": (E,),
            "query_in": (E, H),
            "query_out": (H, self.predicted_layers, N, D),
            "key_in": (E, H),
            "key_out": (H, self.predicted_layers, N, D),
        }
        if self.published_layout:
            unused = {"query": (H, N, D), "key": (H, N, D), "norm": (E,), "norm_bias": (E,)}
            shapes |= {f"unused_{name}": shape for name, shape in unused.items()}
        return shapes

    @property
    def num_parameters(self) -> int:
        """The number of parameters."""
        return _count(self.shapes)

    @classmethod
    def of(cls, model: Config) -> ButlerConfig:
        """Return the predictor's shape for a model: the published one if there is one, else 1% of its parameters.

        D' is then a quarter of the model's D, and ``hidden`` as wide as the share allows, but at least E / 8: in a
        small model the attention and its feed-forward, E^2 / 2, already take the share.

        Example:
            >>> import models
            >>> shape = models.ButlerConfig.of(models.Decoder.tiny().config)
            >>> shape.hidden, shape.dim
            (4, 2)
        """
        check_attention(model, "a butler predicts attention")
        known = PUBLISHED.get((model.hidden_size, model.num_layers, model.num_heads))
        hidden, dim = known or (model.hidden_size, max(2, 2 * round(model.head_dim / 8)))
        config = cls(
            hidden_size=model.hidden_size,
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            hidden=hidden,
            dim=dim,
            rope_theta=model.rope.theta,
            published_layout=known is not None,
        )
        if known:
            return config
        networks = 2 * (config.hidden_size + config.predicted_layers * config.num_heads * dim)  # per unit of hidden
        left = SHARE * _count(array_shapes(model)) - (config.num_parameters - hidden * networks)
        return dataclasses.replace(config, hidden=max(int(left / networks) // 8 * 8, math.ceil(model.hidden_size / 8)))


def _count(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


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

    ``parameters`` has an array for each entry of ``config.shapes``; without it they are drawn, Xavier uniform, from
    ``rngs``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> import models
        >>> shape = models.ButlerConfig.of(models.Decoder.tiny().config)
        >>> butler, x = models.Butler(shape, rngs=nnx.Rngs(0)), jnp.ones((1, 6, 32))
        >>> jax.jit(butler)(x).query.shape  # of layer 1
        (1, 1, 6, 4, 2)
        >>> query, cache = jax.jit(butler.step)(
        ...     butler.init_cache(batch=1, slots=8), x, jnp.arange(6)[None]
        ... )
        >>> query.shape, cache.importance_key.shape
        ((1, 1, 6, 4, 2), (1, 1, 4, 8, 2))
    """

    name: ClassVar[str] = ButlerConfig.kind
    predicts: ClassVar[frozenset[str]] = frozenset({"query", "key"})
    trained_by: ClassVar[str] = "train.butler"
    looks_ahead: ClassVar[bool] = True

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
    ):
        self.config = config
        if parameters is None:
            parameters = drawn(_random_parameter, config.shapes, check_rngs(rngs))
        for name in config.shapes:
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
            return attention_in_chunks(query, key, value, position)

        return self._run(x, position, attend, dropout_key)

    def init_cache(self, batch: int, slots: int, *, importance_keys: bool = True) -> ButlerCache:
        """Return an empty cache for sequences of up to ``slots`` tokens: 2 r + L' N D' numbers per token.

        Without ``importance_keys``, which :meth:`advance` returns, it takes L' N D' numbers less.
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
        keys = jnp.moveaxis(predicted.key, 0, 2).astype(cache.importance_key.dtype)  # [B, T, L', N, D']
        importance_key = cache.importance_key.at[:, row, :, slot].set(keys, mode="drop")
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
            return attention(query, grown["key"], grown["value"], slots, position)

        predicted = self._run(x, position, attend, None)
        return predicted, dataclasses.replace(cache, position=stored, **grown)

    def entered(self, model: Decoder, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"] | None:
        """Return the input of layer 0's attention if the predictor reads it; None if it reads layer 0's output."""
        if self.config.source != "attention_input":
            return None
        return butler_input(model, tokens, source="attention_input")

    def look_ahead(
        self, cache: ButlerCache, x: Float[Array, "B T E"], position: Int[Array, "B T"], *, importance_keys: bool
    ) -> tuple[Any, ButlerCache]:
        """Feed a block, and return its queries, and its keys unless the cache keeps them."""
        if not importance_keys:
            return self.advance(cache, x, position)
        query, cache = self.step(cache, x, position)
        return (query, None), cache

    def over_sequences(self, model: Decoder, tokens: Int[Array, "B T"]) -> Predicted:
        """Return queries and keys of whole sequences."""
        return self(butler_input(model, tokens, source=self.config.source))

    def predict(
        self, layer: int | Int[Array, ""], x: Float[Array, "B T E"], said: Any = None, memory: ButlerCache | None = None
    ) -> Prediction:
        """Return one layer's queries, and its keys: the block's [B, T, N, D'], or all of a cache that keeps them.

        Layer 0 has zeros, as it is not predicted.
        """
        if said is None:
            nothing = jnp.zeros((*x.shape[:2], self.config.num_heads, self.config.dim))
            return Prediction(nothing, nothing)
        query, key = said
        if key is None:
            assert memory is not None
            key = memory.importance_key
        return Prediction(
            *(jax.lax.dynamic_index_in_dim(all_layers, layer - 1, keepdims=False) for all_layers in (query, key))
        )

    def fitted(self, policy: Policy) -> Policy:
        """Return the policy with the width of the predicted keys; see :func:`kvjax.fit_predictor`."""
        return kvjax.fit_predictor(policy, self.config.dim)

    def _run(self, x, position, attend, dropout_key) -> Predicted:
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
            made = self._rotate(jnp.einsum("bth,hlnd->btlnd", hidden, out[...]), position[..., None, None])
            return jnp.moveaxis(made, 2, 0)

        return Predicted(predict(self.query_in, self.query_out), predict(self.key_in, self.key_out))

    def _rotate(self, x: Float[Array, "*batch width"], position: Int[Array, "*#batch"]) -> Float[Array, "*batch width"]:
        frequency, _ = rope_frequencies(Rope(theta=self.config.rope_theta), x.shape[-1])
        position = jnp.maximum(position, 0)[..., None].astype(frequency.dtype)
        angle = position * along_last(frequency[0], position)
        return rotate(x, jnp.cos(angle), jnp.sin(angle))


def butler_input(
    model: Decoder,
    tokens: Int[Array, "B T"],
    *,
    source: Source = "layer0_output",
) -> Float[Array, "B T E"]:
    """Compute the input of a predictor: of whole sequences, or for "attention_input" of any block.

    Only layer 0 of the model runs, and for "attention_input" no layer; for ``source`` see :class:`ButlerConfig`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import models
        >>> model = models.Decoder.tiny()
        >>> jax.jit(models.butler_input)(model, jnp.array([[1, 2, 3]])).shape
        (1, 3, 32)
    """
    check_names("source", source, SOURCES)
    config = model.config
    if source == "attention_input":
        return attention_input(config, model.layers[0].arrays(), embed(config, model.embedding[...], tokens))
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    alone = dataclasses.replace(
        config, num_layers=1, sliding_windows=config.sliding_windows[:1], ropes=config.ropes[:1],
        dense_sizes=config.dense_sizes[:1], tie_embeddings=True,
    )  # fmt: skip  # tied, so that it has no head: no logits are computed
    arrays = model.arrays()
    arrays = {path: arrays[path] for path in array_shapes(alone)}

    def attend(carry, layer, sliding_window, query, key, value):
        given = query, key, value, position, sliding_window, config.attention_soft_cap, model.sink_logits(layer)
        return attention_in_chunks(*given), carry, None

    lengths = jnp.max(position, axis=1) + 1
    return Decoder(alone, arrays).run(tokens, position, lengths, attend, None)[0]


def _slots(cache: ButlerCache, position: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Return the slots of tokens; for padding, one beyond the end, where nothing is written."""
    return jnp.where(position >= 0, position, cache.position.shape[1])


def _layer_norm(x: Float[Array, "*rest r"]) -> Float[Array, "*rest r"]:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    return (centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)).astype(x.dtype)


def _random_parameter(key: Array | None, name: str, shape: tuple[int, ...]) -> Array:
    if key is None:
        return jnp.full(shape, 1 if name.endswith("norm") else 0, jnp.float32)
    bound = math.sqrt(6 / (shape[0] + math.prod(shape[1:])))
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound).astype(jnp.float32)
