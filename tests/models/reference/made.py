"""Models to test with, and their dense logits in JAX, through which gradients flow."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.butler import Butler, ButlerConfig
from models.config import Config
from models.decoder import Decoder
from models.parameters import join_weights, parameter_shapes
from models.scorer import RetentionGate, Scorer, ScorerConfig
from tests.models.reference.rotary import inverse_frequencies


def parameters(config: Config, seed: int = 0, sharpness: float = 1.5) -> dict[str, np.ndarray]:
    """Random float32 weights that make peaked attention, so that scores lie well apart."""
    random = np.random.default_rng(seed)
    inputs = {"head": config.hidden_size, "layers.output": config.num_heads * config.value_dim}
    of_hidden = ("query", "key", "value", "gate", "up", "router", "expert_gate", "expert_up")
    inputs |= {f"layers.{name}": config.hidden_size for name in of_hidden}
    inputs |= {"layers.down": config.dense_size, "layers.expert_down": config.intermediate_size}
    if config.latent is not None:
        inputs |= {f"layers.{name}": config.hidden_size for name in ("latent", "latent_query", "query_down")}
        inputs |= {"layers.latent_heads": config.latent.size, "layers.query_up": config.latent.query}
    made = {}
    for name, shape in parameter_shapes(config).items():
        draw = random.normal(size=shape)
        if name.endswith("norm"):
            draw = 1 - config.norm_offset + 0.1 * draw
        elif name.endswith("bias"):
            draw *= 0.3
        elif name in inputs:
            draw *= (sharpness if name in ("layers.query", "layers.key") else 1) / math.sqrt(inputs[name])
        made[name] = draw.astype(np.float32)
    return made


def decoder(config: Config, weights: dict[str, np.ndarray] | None = None) -> Decoder:
    weights = parameters(config) if weights is None else weights
    return Decoder(
        config, jax.device_put(join_weights(config, weights))
    )  # jnp.asarray compiles a program for each shape


def butler(config: Config, seed: int = 0) -> Butler:
    """A predictor with every parameter away from where training starts."""
    shape = ButlerConfig.of(config)
    random = np.random.default_rng([seed, 2])
    made = {}
    for name, size in shape.shapes.items():
        draw = 0.5 * random.normal(size=size)
        made[name] = (1 + draw if name == "norm" else draw).astype(np.float32)
    return Butler(shape, jax.device_put(made))


def scorer(config: Config, seed: int = 0) -> Scorer:
    """A linear scorer whose numbers lie well apart."""
    shape = ScorerConfig.of(config, 0)
    random = np.random.default_rng([seed, 3])
    made = {name: random.normal(size=size).astype(np.float32) for name, size in shape.shapes.items()}
    return Scorer(shape, jax.device_put(made))


def retention(config: Config, seed: int = 0) -> RetentionGate:
    """A linear gate of retention, with the numbers of :func:`scorer`."""
    shape = ScorerConfig.of(config, 0, "retention")
    return RetentionGate(shape, {name: getattr(scorer(config, seed), name)[...] for name in shape.shapes})


def masked_logits(weights: dict[str, Any], config: Config, tokens: Any, seen: np.ndarray) -> jax.Array:
    """A dense forward of one sequence in JAX; constants, ``seen`` [L, K, T, T], say which query sees which key."""
    T, K, D = len(tokens), config.num_kv_heads, config.head_dim
    angle = np.arange(T)[:, None] * inverse_frequencies(config.rope, config.head_dim, T)[0]
    cos, sin = jnp.cos(jnp.asarray(angle, jnp.float32)), jnp.sin(jnp.asarray(angle, jnp.float32))

    def normed(x, weight):
        return x * jax.lax.rsqrt((x**2).mean(axis=-1, keepdims=True) + config.norm_epsilon) * weight

    def turned(x):
        a, b = x[..., : D // 2], x[..., D // 2 :]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = weights["embedding"][jnp.asarray(tokens)]
    for layer in range(config.num_layers):
        p = {name.removeprefix("layers."): a[layer] for name, a in weights.items() if name.startswith("layers.")}
        y = normed(x, p["attention_norm"])
        query, key, value = (jnp.einsum("te,ehd->htd", y, p[name]) for name in ("query", "key", "value"))
        if config.query_key_norm:
            query, key = normed(query, p["query_norm"]), normed(key, p["key_norm"])
        query, key = turned(query).reshape(K, -1, T, D), turned(key)
        scores = jnp.einsum("kgtd,kpd->kgtp", query, key) / math.sqrt(D)
        attention = jax.nn.softmax(jnp.where(seen[layer][:, None], scores, -jnp.inf), axis=-1)
        out = jnp.einsum("kgtp,kpd->kgtd", attention, value).reshape(-1, T, D)
        x = x + jnp.einsum("htd,hde->te", out, p["output"].reshape(-1, D, x.shape[-1]))
        y = normed(x, p["feed_norm"])
        x = x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]
    return normed(x, weights["norm"]) @ (weights["head"] if "head" in weights else weights["embedding"].T)
