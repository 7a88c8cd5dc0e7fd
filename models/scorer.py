"""A scorer: a small network per layer that predicts each token's retention score from its hidden state (KVzap).

    x [B, T, E], the input of the layer's attention -> (E -> hidden, GELU) -> K numbers per token, logarithms of scores

Without a hidden layer it is a linear map. Its parameters are stacked over layers, and it computes in float32.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax import Prediction
from kvjax.checks import check_count, check_fields
from models.config import Config
from models.networks import register_network
from models.parameters import check_rngs, drawn

SMALLEST = 1e-8  # a score's logarithm is that of at least this number


@dataclasses.dataclass(frozen=True)
class ScorerConfig:
    """The shape of a scorer.

    Args:
        hidden_size, num_layers, num_kv_heads: the model's E, L and K.
        hidden: the width of the hidden layer; 0 for a linear map.

    Example:
        >>> from models.scorer import ScorerConfig
        >>> ScorerConfig(64, num_layers=3, num_kv_heads=2).hidden
        0
    """

    hidden_size: int
    num_layers: int
    num_kv_heads: int
    hidden: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("hidden_size", "num_layers", "num_kv_heads"):
            check_count(name, getattr(self, name), 1, "it must be at least 1")
        check_count("hidden", self.hidden, 0, "give the width of the hidden layer, 0 for a linear map")

    @classmethod
    def of(cls, model: Config, hidden: int | None = None) -> ScorerConfig:
        """Return the scorer's shape for a model; the hidden layer is E / 8 wide by default, as in KVzap."""
        hidden = math.ceil(model.hidden_size / 8) if hidden is None else hidden
        return cls(model.hidden_size, model.num_layers, model.num_kv_heads, hidden)


def parameter_shapes(config: ScorerConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a scorer, by its name in :class:`Scorer`."""
    L, E, K, H = config.num_layers, config.hidden_size, config.num_kv_heads, config.hidden
    if H == 0:
        return {"output": (L, E, K), "output_bias": (L, K)}
    return {"input": (L, E, H), "input_bias": (L, H), "output": (L, H, K), "output_bias": (L, K)}


@register_network
class Scorer(nnx.Module):
    """Predicts the logarithm of each token's retention score, for each KV head of a layer.

    ``parameters`` has an array for each entry of ``parameter_shapes(config)``; without it they are drawn from ``rngs``.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import models
        >>> shape = models.ScorerConfig.of(models.Decoder.tiny().config)
        >>> models.Scorer(shape, rngs=nnx.Rngs(0))(1, jnp.ones((1, 5, 32))).shape
        (1, 5, 2)
    """

    name: ClassVar[str] = "scorer"
    predicts: ClassVar[frozenset[str]] = frozenset({"score"})
    Config: ClassVar[type] = ScorerConfig
    trained_by: ClassVar[str] = "train.scorer"
    looks_ahead: ClassVar[bool] = False
    follows_dtype: ClassVar[bool] = False

    def __init__(
        self, config: ScorerConfig, parameters: dict[str, Array] | None = None, *, rngs: nnx.Rngs | None = None
    ):
        self.config = config
        if parameters is None:
            parameters = drawn(_random, parameter_shapes(config), check_rngs(rngs))
        for name in parameter_shapes(config):
            setattr(self, name, nnx.Param(parameters[name]))

    def __call__(self, layer: int | Int[Array, ""], x: Float[Array, "B T E"]) -> Float[Array, "B T K"]:
        """Return the scores of tokens in one layer; ``x`` is the input of the layer's attention."""
        own = {
            name: jax.lax.dynamic_index_in_dim(getattr(self, name)[...], layer, keepdims=False)
            for name in parameter_shapes(self.config)
        }
        return apply(own, x)

    def loss(
        self, layer: int | Int[Array, ""], x: Float[Array, "B T E"], score: Float[Array, "B T K"]
    ) -> Float[Array, "B T K"]:
        """Return the squared error of the predicted logarithm of each token's score."""
        return (self(layer, x) - logarithm(score)) ** 2

    @staticmethod
    def started(parameters: dict[str, Array], mean: Float[Array, "L K"]) -> dict[str, Array]:
        """Return the parameters that training starts from: each head predicts its mean logarithm."""
        return parameters | {"output_bias": mean}

    @staticmethod
    def shapes(config: ScorerConfig) -> dict[str, tuple[int, ...]]:
        return parameter_shapes(config)

    def predict(
        self, layer: int | Int[Array, ""], x: Float[Array, "B T E"], said: Any = None, memory: Any = None
    ) -> Prediction:
        """Return the scores as a policy reads them."""
        return Prediction(score=self(layer, x))


def logarithm(score: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the logarithm of a score, of at least ``SMALLEST``."""
    return jnp.log(jnp.maximum(score, SMALLEST))


def apply(parameters: dict[str, Array], x: Float[Array, "B T E"]) -> Float[Array, "B T K"]:
    """Return the scores of tokens by one layer's parameters."""
    x = x.astype(jnp.float32)
    if "input" in parameters:
        x = jax.nn.gelu(x @ parameters["input"] + parameters["input_bias"][None, None], approximate=False)
    return x @ parameters["output"] + parameters["output_bias"][None, None]


def _random(key: Array | None, name: str, shape: tuple[int, ...]) -> Array:
    if key is None:
        return jnp.zeros(shape, jnp.float32)
    return jax.random.normal(key, shape, jnp.float32) / math.sqrt(shape[1])
