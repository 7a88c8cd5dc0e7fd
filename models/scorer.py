"""A scorer: a small network per layer that predicts each token's retention score from its hidden state.

It reads x [B, T, E], the input of the layer's attention, and predicts K numbers per token, logarithms of scores.
There are three kinds. "scorer" is KVzap's (arXiv 2601.07891):

    x -> (E -> hidden, GELU) -> K, or without a hidden layer a linear map

"retention" is TRIM-KV's (arXiv 2512.03324): the same with SiLU, then the logarithm of a sigmoid. It predicts what each
later token leaves of a token's score (:class:`RetentionGate`).

"gate" is Fast KVzip's (arXiv 2601.17668), where d is ``hidden``:

    q = RMSNorm(x W_q + b_q)  [B, T, K, G, d]      k = RMSNorm(x W_k)  [B, T, K, d]
    score [B, T, K] = mean over the group's G queries of  e^z / (e^z + sum over the sinks e^(q.s / sqrt(d)))
                      where z = q.k / sqrt(d) + b, and a KV head has S learned sinks s

A gate's score is the weight that a token would give itself, beside the sinks, in attention of low rank, between 0 and
1. It learns KVzip's scores, which lie there too, or KVgrad's, mapped there. Parameters are stacked over layers, in any
dtype; both kinds compute in float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kernels_pallas.add_rms_norm.reference import rms_norm
from kvjax import Prediction
from kvjax._src.checks import check_count, check_fields
from models.config import Config, check_attention
from models.parameters import check_rngs, drawn

Kind = Literal["gate", "scorer", "retention"]
HIDDEN = {"gate": 16, "retention": 512}  # as published; a scorer's is E / 8
SMALLEST = 1e-8  # a score's logarithm is that of at least this number
EPSILON = 1e-6  # of both norms
KEEPS = 10.0  # the bias of a gate of retention that is not trained yet
SIZES = ("hidden_size", "num_layers", "num_heads", "num_kv_heads")  # of the model, which a network shares


@dataclasses.dataclass(frozen=True)
class ScorerConfig:
    """The shape of a scorer.

    Args:
        hidden_size, num_layers, num_heads, num_kv_heads: the model's E, L, N and K.
        hidden: the width of the hidden layer, 0 for a linear map; of a gate's queries and keys.
        kind: "scorer" (KVzap), "gate" (Fast KVzip) or "retention" (TRIM-KV).
        sinks: S, the sinks of each KV head of a gate; 16 as published.

    Example:
        >>> from models.scorer import ScorerConfig
        >>> ScorerConfig(64, num_layers=3, num_heads=4, num_kv_heads=2).shapes
        {'output': (3, 64, 2), 'output_bias': (3, 2)}
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden: int = 0
    kind: Kind = "scorer"
    sinks: int = 16

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "sinks"):
            check_count(name, getattr(self, name), 1, "it must be at least 1")
        if self.kind == "gate":
            check_count("hidden", self.hidden, 1, "give the width of the gate's queries and keys")
        check_count("hidden", self.hidden, 0, "give the width of the hidden layer, 0 for a linear map")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads} for {self.num_kv_heads} KV heads; give a multiple of num_kv_heads."
            )

    @classmethod
    def of(cls, model: Config, hidden: int | None = None, kind: Kind = "scorer") -> ScorerConfig:
        """Return the shape for a model; by default ``hidden`` is as published: E / 8, 16 for a gate, 512 for one
        of retention.

        Example:
            >>> import models
            >>> models.ScorerConfig.of(models.Decoder.tiny().config).hidden
            4
        """
        check_attention(model, f"a {kind} reads attention")
        published = HIDDEN.get(kind, math.ceil(model.hidden_size / 8))
        sizes = {size: getattr(model, size) for size in SIZES}
        return cls(**sizes, hidden=published if hidden is None else hidden, kind=kind)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter, by its name in :class:`Scorer`."""
        L, E, K, d, S = self.num_layers, self.hidden_size, self.num_kv_heads, self.hidden, self.sinks
        G = self.num_heads // K
        if self.kind == "gate":
            return {
                "query": (L, E, K, G, d),
                "query_bias": (L, K, G, d),
                "key": (L, E, K, d),
                "query_norm": (L, d),
                "key_norm": (L, d),
                "sinks": (L, K, S, d),
                "bias": (L, K, G),
            }
        if d == 0:
            return {"output": (L, E, K), "output_bias": (L, K)}
        return {"input": (L, E, d), "input_bias": (L, d), "output": (L, d, K), "output_bias": (L, K)}


class Scorer(nnx.Module):
    """Predicts the logarithm of each token's retention score, for each KV head of a layer.

    ``parameters`` has an array for each entry of ``config.shapes``; without it they are drawn from ``rngs``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> import models
        >>> shape = models.ScorerConfig.of(models.Decoder.tiny().config, kind="gate")
        >>> gate = models.Scorer(shape, rngs=nnx.Rngs(0))
        >>> logarithm = jax.jit(gate)(1, jnp.ones((1, 5, 32)))
        >>> logarithm.shape, bool((logarithm < 0).all())
        ((1, 5, 2), True)
    """

    predicts: ClassVar[frozenset[str]] = frozenset({"score"})
    trained_by: ClassVar[str] = "train.scorer"
    looks_ahead: ClassVar[bool] = False

    def __init__(
        self, config: ScorerConfig, parameters: dict[str, Array] | None = None, *, rngs: nnx.Rngs | None = None
    ):
        self.config = config
        if parameters is None:
            parameters = drawn(_random, config.shapes, check_rngs(rngs), config.kind)
        for name in config.shapes:
            setattr(self, name, nnx.Param(parameters[name]))

    @property
    def name(self) -> str:
        """The name of its files, that of its kind."""
        return self.config.kind

    def __call__(self, layer: int | Int[Array, ""], x: Float[Array, "B T E"]) -> Float[Array, "B T K"]:
        """Return the logarithms of the scores of tokens in one layer; ``x`` is the input of the layer's attention."""
        own, x = self._of_layer(layer), x.astype(jnp.float32)
        if self.config.kind == "retention":
            return jax.nn.log_sigmoid(_regression(own, x, jax.nn.silu))
        return _gate(own, x)[0] if self.config.kind == "gate" else _regression(own, x)

    def predict(
        self, layer: int | Int[Array, ""], x: Float[Array, "B T E"], said: Any = None, memory: Any = None
    ) -> Prediction:
        """Return the scores as a policy reads them."""
        return Prediction(score=self(layer, x))

    def loss(
        self, layer: int | Int[Array, ""], x: Float[Array, "B T E"], score: Float[Array, "B T K"]
    ) -> Float[Array, "B T K"]:
        """Return the published loss of each token's score: the squared error of its logarithm, or for a gate the
        binary cross-entropy to the score, in [0, 1].
        """
        if self.config.kind == "scorer":
            return (self(layer, x) - logarithm(score)) ** 2
        present, absent = _gate(self._of_layer(layer), x.astype(jnp.float32))
        return -(score * present + (1 - score) * absent)

    def _of_layer(self, layer: int | Int[Array, ""]) -> dict[str, Array]:
        stacked = {name: getattr(self, name)[...] for name in self.config.shapes}
        return {
            name: jax.lax.dynamic_index_in_dim(array, layer, keepdims=False).astype(jnp.float32)
            for name, array in stacked.items()
        }


class RetentionGate(Scorer):
    """Predicts the logarithm of a token's retention, for each KV head of a layer: what each later token leaves of it.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import models
        >>> shape = models.ScorerConfig(32, 1, 4, 2, hidden=8, kind="retention")
        >>> gate = models.RetentionGate(shape, rngs=nnx.Rngs(0))
        >>> gate.predict(0, jnp.ones((1, 5, 32))).retention.shape
        (1, 5, 2)
    """

    predicts: ClassVar[frozenset[str]] = frozenset({"retention"})
    trained_by: ClassVar[str] = "train.retention"

    def predict(
        self, layer: int | Int[Array, ""], x: Float[Array, "B T E"], said: Any = None, memory: Any = None
    ) -> Prediction:
        """Return the retention as a policy reads it."""
        return Prediction(retention=self(layer, x))


def logarithm(score: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the logarithm of a score, of at least ``SMALLEST``."""
    return jnp.log(jnp.maximum(score, SMALLEST))


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def _regression(
    own: dict[str, Array], x: Float[Array, "B T E"], bent: Callable[[Array], Array] = _gelu
) -> Float[Array, "B T K"]:
    if "input" in own:
        x = bent(x @ own["input"] + own["input_bias"][None, None])
    return x @ own["output"] + own["output_bias"][None, None]


def _gate(own: dict[str, Array], x: Float[Array, "B T E"]) -> tuple[Array, Array]:
    """Return the logarithms of the score and of what it leaves to 1, [B, T, K]."""
    query = jnp.einsum("bte,ekgd->btkgd", x, own["query"]) + own["query_bias"][None, None]
    query = query.shape[-1] ** -0.5 * rms_norm(query, own["query_norm"], EPSILON)
    key = rms_norm(jnp.einsum("bte,ekd->btkd", x, own["key"]), own["key_norm"], EPSILON)
    itself = jnp.einsum("btkgd,btkd->btkg", query, key) + own["bias"][None, None]
    sinks = jax.nn.logsumexp(jnp.einsum("btkgd,ksd->btkgs", query, own["sinks"]), axis=-1)
    of_group = math.log(query.shape[3])

    def mean(logarithm: Array) -> Array:
        return jax.nn.logsumexp(logarithm, axis=-1) - of_group

    return mean(jax.nn.log_sigmoid(itself - sinks)), mean(jax.nn.log_sigmoid(sinks - itself))


def _random(key: Array | None, name: str, shape: tuple[int, ...], kind: Kind) -> Array:
    """Draw a gate's weights as torch does those of a linear map, and its sinks near 0: equal ones would stay equal.

    A gate of retention begins with small weights and a bias with which it keeps nearly all, as published.
    """
    if key is None:
        first = KEEPS if kind == "retention" and name == "output_bias" else float(name.endswith("norm"))
        return jnp.full(shape, first, jnp.float32)
    if name == "sinks" or kind == "retention":
        return 0.02 * jax.random.normal(key, shape, jnp.float32)
    bound = shape[1] ** -0.5
    if kind == "gate":
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound)
    return bound * jax.random.normal(key, shape, jnp.float32)
