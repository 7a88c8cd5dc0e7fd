"""The gate of Fast KVzip: a small network per layer that scores each token by its hidden state (arXiv 2601.17668).

    x [B, T, E], the input of the layer's attention
    q = RMSNorm(x W_q + b_q)  [B, T, K, G, d]      k = RMSNorm(x W_k)  [B, T, K, d]
    score [B, T, K] = mean over the group's G queries of  e^z / (e^z + sum over the sinks e^(q.s / sqrt(d)))
                      where z = q.k / sqrt(d) + b, and a KV head has S learned sinks s

It is the weight that a token would give itself, beside the sinks, in attention of low rank, between 0 and 1. It learns
KVzip's scores, which lie there too, or KVgrad's, mapped there, by the binary cross-entropy. Parameters are stacked over
layers, in any dtype; it computes in float32.
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
from models.decoder import rms_norm
from models.networks import register_network
from models.parameters import check_rngs, drawn

EPSILON = 1e-6  # of both norms


@dataclasses.dataclass(frozen=True)
class GateConfig:
    """The shape of a gate.

    Args:
        hidden_size, num_layers, num_heads, num_kv_heads: the model's E, L, N and K.
        dim: d, the width of its queries and keys; 16 as published.
        sinks: S, the sinks of each KV head; 16 as published.

    Example:
        >>> from models.gate import GateConfig
        >>> GateConfig(64, num_layers=3, num_heads=4, num_kv_heads=2).dim
        16
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    dim: int = 16
    sinks: int = 16

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "dim", "sinks"):
            check_count(name, getattr(self, name), 1, "it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads} for {self.num_kv_heads} KV heads; give a multiple of num_kv_heads."
            )

    @classmethod
    def of(cls, model: Config, hidden: int | None = None) -> GateConfig:
        """Return the gate's shape for a model; queries and keys are 16 wide by default, as published."""
        sizes = model.hidden_size, model.num_layers, model.num_heads, model.num_kv_heads
        return cls(*sizes, 16 if hidden is None else hidden)


def parameter_shapes(config: GateConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a gate, by its name in :class:`Gate`."""
    L, E, K, d, S = config.num_layers, config.hidden_size, config.num_kv_heads, config.dim, config.sinks
    G = config.num_heads // K
    return {
        "query": (L, E, K, G, d),
        "query_bias": (L, K, G, d),
        "key": (L, E, K, d),
        "query_norm": (L, d),
        "key_norm": (L, d),
        "sinks": (L, K, S, d),
        "bias": (L, K, G),
    }


@register_network
class Gate(nnx.Module):
    """Predicts each token's retention score, for each KV head of a layer; the module's docstring has the equations.

    ``parameters`` has an array for each entry of ``parameter_shapes(config)``; without it they are drawn from ``rngs``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> import models
        >>> shape = models.GateConfig.of(models.Decoder.tiny().config)
        >>> gate = models.Gate(shape, rngs=nnx.Rngs(0))
        >>> logarithm = jax.jit(gate)(1, jnp.ones((1, 5, 32)))
        >>> logarithm.shape, bool((logarithm < 0).all())
        ((1, 5, 2), True)
    """

    name: ClassVar[str] = "gate"
    predicts: ClassVar[frozenset[str]] = frozenset({"score"})
    Config: ClassVar[type] = GateConfig
    trained_by: ClassVar[str] = "train.scorer"
    looks_ahead: ClassVar[bool] = False
    follows_dtype: ClassVar[bool] = False

    def __init__(self, config: GateConfig, parameters: dict[str, Array] | None = None, *, rngs: nnx.Rngs | None = None):
        self.config = config
        if parameters is None:
            parameters = drawn(_random, parameter_shapes(config), check_rngs(rngs))
        for name in parameter_shapes(config):
            setattr(self, name, nnx.Param(parameters[name]))

    def __call__(self, layer: int | Int[Array, ""], x: Float[Array, "B T E"]) -> Float[Array, "B T K"]:
        """Return the logarithms of the scores of tokens in one layer; ``x`` is the input of the layer's attention."""
        return self._logarithms(layer, x)[0]

    @staticmethod
    def shapes(config: GateConfig) -> dict[str, tuple[int, ...]]:
        return parameter_shapes(config)

    def predict(
        self, layer: int | Int[Array, ""], x: Float[Array, "B T E"], said: Any = None, memory: Any = None
    ) -> Prediction:
        """Return the scores as a policy reads them."""
        return Prediction(score=self(layer, x))

    def loss(
        self, layer: int | Int[Array, ""], x: Float[Array, "B T E"], score: Float[Array, "B T K"]
    ) -> Float[Array, "B T K"]:
        """Return the binary cross-entropy of the predicted score to each token's score, in [0, 1]."""
        present, absent = self._logarithms(layer, x)
        return -(score * present + (1 - score) * absent)

    @staticmethod
    def started(parameters: dict[str, Array], mean: Float[Array, "L K"]) -> dict[str, Array]:
        """Return the parameters that training starts from: those that were drawn."""
        return parameters

    def _logarithms(self, layer: Any, x: Float[Array, "B T E"]) -> tuple[Array, Array]:
        """Return the logarithms of the score and of what it leaves to 1, [B, T, K]."""
        own = {
            name: jax.lax.dynamic_index_in_dim(getattr(self, name)[...], layer, keepdims=False).astype(jnp.float32)
            for name in parameter_shapes(self.config)
        }
        x, scale = x.astype(jnp.float32), self.config.dim**-0.5
        query = jnp.einsum("bte,ekgd->btkgd", x, own["query"]) + own["query_bias"][None, None]
        query = scale * rms_norm(query, own["query_norm"], EPSILON)
        key = rms_norm(jnp.einsum("bte,ekd->btkd", x, own["key"]), own["key_norm"], EPSILON)
        itself = jnp.einsum("btkgd,btkd->btkg", query, key) + own["bias"][None, None]
        sinks = jax.nn.logsumexp(jnp.einsum("btkgd,ksd->btkgs", query, own["sinks"]), axis=-1)
        of_group = math.log(query.shape[3])

        def mean(logarithm: Array) -> Array:
            return jax.nn.logsumexp(logarithm, axis=-1) - of_group

        return mean(jax.nn.log_sigmoid(itself - sinks)), mean(jax.nn.log_sigmoid(sinks - itself))


def _random(key: Array | None, name: str, shape: tuple[int, ...]) -> Array:
    """Draw weights as torch draws those of a linear map, and sinks near 0, as equal ones would stay equal."""
    if name.endswith("norm"):
        return jnp.ones(shape, jnp.float32)
    if key is None or name.endswith("bias"):
        return jnp.zeros(shape, jnp.float32)
    if name == "sinks":
        return 0.02 * jax.random.normal(key, shape, jnp.float32)
    bound = shape[1] ** -0.5
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)
