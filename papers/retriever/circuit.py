"""Initial weights for training: random weights in which the first two layers can already look things up.

To find the right key is what a small model learns last, after hours on a CPU. The circuit that does it is known
(Olsson et al., In-context Learning and Induction Heads, 2022) and short enough to write down, over random codes for
the tokens. Training then starts from a model that already finds most facts.

The residual stream is divided: one constant element, the token's own code, and one block for the code of the token
1 place back, one for 2 places back, and so on. Layer 0 fills those blocks. Its queries and keys come from the constant
alone, so they depend on position only: they are rotated against each other in RoPE's fastest pairs so that head i peaks
i + 1 places back. In layer 1 a query encodes the newest tokens, and a key the tokens before its own, both in RoPE's
slow pairs, which hardly rotate and so match at any distance. A token thus attends to what followed the same phrase
earlier, and copies that token's code to where the next token is read.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from models.config import Config
from models.parameters import parameter_shapes

CONSTANT = 0.5  # the constant element of each embedding; a token's code has norm 1
STRENGTH = 2.0  # of the circuit's queries and keys before their norm, so that training's first steps do not undo it
SHARPNESS = 1.6  # the weights of those norms; the greatest attention logit is the square of it times sqrt(D)
NOISE = 0.1  # of ordinary random weights, left on the circuit's matrices


@functools.partial(jax.jit, static_argnums=0)
def init_parameters(config: Config, key: Array) -> dict[str, Array]:
    """Return random parameters with the circuit in layers 0 and 1. Nothing else writes to the residual stream.

    The config must have query and key norms, at least two layers, and a head_dim of at least 16.
    """
    E, V = config.hidden_size, config.vocab_size
    key, *subkeys = jax.random.split(key, 1 + len(parameter_shapes(config)))
    parameters = {}
    for (name, shape), subkey in zip(parameter_shapes(config).items(), subkeys, strict=True):
        if name.endswith("norm"):
            parameters[name] = jnp.ones(shape)
        elif name in ("layers.output", "layers.down"):
            parameters[name] = jnp.zeros(shape)
        else:
            parameters[name] = E**-0.5 * jax.random.normal(subkey, shape)

    back, own = _code_sizes(config)
    code_key, shrink_key, match_key = jax.random.split(key, 3)
    codes = jax.random.normal(code_key, (V, own)) * own**-0.5
    embedding = 0.3 * parameters["embedding"]
    parameters["embedding"] = embedding.at[:, 1 : 1 + own].add(codes).at[:, 0].set(CONSTANT)
    # From a token's own code to the shorter code by which it is remembered; norms are kept.
    shrink = jnp.linalg.qr(jax.random.normal(shrink_key, (own, own)))[0][:, :back] * (own / back) ** 0.5

    layers = _remember(config, shrink), _match(config, shrink, match_key)
    for name in ("query", "key", "value", "output"):
        circuit = jnp.stack([layer[name] for layer in layers])
        random = parameters[f"layers.{name}"]
        parameters[f"layers.{name}"] = random.at[:2].multiply(NOISE).at[:2].add(circuit.reshape(2, *random.shape[1:]))
    for name in ("query_norm", "key_norm"):
        parameters[f"layers.{name}"] = parameters[f"layers.{name}"].at[:2].set(SHARPNESS)
    return parameters


def _code_sizes(config: Config) -> tuple[int, int]:
    """Return the size of the block for one earlier token, and of the block for the token itself."""
    E, N, D = config.hidden_size, config.num_heads, config.head_dim
    back = min(3 * E // (4 * N), (E - 1) // (N + 1), D)
    return back, min(E - 1 - N * back, D)


def _blocks(config: Config) -> tuple[slice, list[slice]]:
    """Return the places in the residual stream of the token's own code and of those 1, 2, ... places back."""
    back, own = _code_sizes(config)
    return slice(1, 1 + own), [slice(1 + own + i * back, 1 + own + (i + 1) * back) for i in range(config.num_heads)]


def _angles(config: Config) -> np.ndarray:
    return 1.0 / config.rope.theta ** (np.arange(config.head_dim // 2, dtype=np.float32) / (config.head_dim // 2))


def _remember(config: Config, shrink: Array) -> dict[str, Array]:
    """Build layer 0: head i copies the code of the token i + 1 places back into its block."""
    E, N, K, D = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    token, earlier = _blocks(config)
    back = shrink.shape[1]
    angles = _angles(config)
    fast = (jnp.arange(D // 2) < D // 16).astype(float)
    distances = jnp.arange(1, N + 1)[:, None]
    turned = jnp.concatenate([jnp.cos(distances * angles) * fast, -jnp.sin(distances * angles) * fast], axis=1)
    seen = ((1 + CONSTANT**2) / E) ** 0.5  # undoes the norm before the layer; half in each matrix
    query = jnp.zeros((E, N, D)).at[0].set(STRENGTH * turned)
    key = jnp.zeros((E, K, D)).at[0, :, : D // 2].set(STRENGTH * fast)
    value = jnp.zeros((E, K, D)).at[token, :, :back].set(seen**0.5 * shrink[:, None])
    output = jnp.zeros((N, D, E))
    for i, block in enumerate(earlier):
        output = output.at[i, :back, block].set(seen**0.5 * jnp.eye(back))
    return {"query": query, "key": key, "value": value, "output": output}


def _match(config: Config, shrink: Array, rng: Array) -> dict[str, Array]:
    """Build layer 1: attend to what followed the same tokens, and copy it. Each KV head mixes codes differently."""
    E, N, K, D = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    token, earlier = _blocks(config)
    own, back = shrink.shape
    slow = np.flatnonzero(_angles(config) * 2048 < 2.0)
    elements = np.concatenate([slow, slow + D // 2])
    seen = ((1 + CONSTANT**2 + N) / E) ** 0.5  # undoes the norm before the layer
    query, key, value, output = (jnp.zeros(s) for s in ((E, N, D), (E, K, D), (E, K, D), (N, D, E)))
    for k, subkey in enumerate(jax.random.split(rng, K)):
        random = STRENGTH * back**-0.5 * jax.random.normal(subkey, (N, back, elements.size))
        mix = jnp.zeros((N, back, D)).at[:, :, elements].set(random)
        heads = slice(k * N // K, (k + 1) * N // K)
        query = query.at[token, heads].set((shrink @ mix[0])[:, None])
        for i in range(N):
            key = key.at[earlier[i], k].set(mix[i])
            if i + 1 < N:
                query = query.at[earlier[i], heads].set(mix[i + 1][:, None])
        value = value.at[token, k, :own].set(seen**0.5 * jnp.eye(own))
    output = output.at[:, :own, token].set(seen**0.5 * jnp.eye(own))
    return {"query": query, "key": key, "value": value, "output": output}
