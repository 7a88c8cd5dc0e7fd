"""Gated delta nets (Gated Delta Networks, Yang et al., 2024, arXiv:2412.06464): a kind of :mod:`models.recurrent`.

A token corrects what the memory says of its key (equation 10 there; axes and names are those of models.recurrent):

    u_t = v_t - a_t S_{t-1}^T k_t

a_t = exp(-exp(log_decay) softplus(decay(x_t) + bias)) and b_t = sigmoid(rate(x_t)) are numbers per head. Queries and
keys have length 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kernels_pallas.add_rms_norm.reference import rms_norm
from models.config import Recurrence
from models.recurrent import State, convolved, in_front, linear_attention, put_back


def mix(
    net: Recurrence,
    weights: dict[str, Array],
    x: Float[Array, "B T E"],
    valid: Bool[Array, "B T"],
    state: State,
    epsilon: float = 1e-6,
) -> tuple[Float[Array, "B T JW"], State]:
    """Mix a block's tokens with those before them, as attention does; return what W_O is to multiply, and the state.

    Args:
        weights: the layer's arrays by name.
        valid: the tokens that count, in the order of the text. What stands at the others' places says nothing.
        state: that of the tokens before the block, as this function or :func:`models.recurrent.empty_state` returns it.
        epsilon: that of the norm of the output.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> from models import delta_net, recurrent
        >>> from models.config import Recurrence
        >>> net = Recurrence(
        ...     (0,), key_heads=1, value_heads=2, key_dim=4, value_dim=3, kernel=2
        ... )
        >>> shapes = dict(
        ...     delta_in=(24, 8), recurrent_kernel=(14, 1, 2), recurrent_log_decay=(2,),
        ...     recurrent_decay_bias=(2,), delta_norm=(3,)
        ... )
        >>> weights = {name: np.ones(shape) for name, shape in shapes.items()}
        >>> state = recurrent.empty_state(net, 1, "float32")
        >>> mix = jax.jit(delta_net.mix, static_argnums=0)
        >>> out, state = mix(
        ...     net, weights, jnp.ones((1, 5, 8)), jnp.ones((1, 5), bool), state
        ... )
        >>> out.shape, state["memory"].shape
        ((1, 5, 6), (1, 2, 4, 3))
    """
    (B, T, _), Z, J = x.shape, net.channels, net.value_heads
    x, place = in_front(x, valid)
    count = jnp.sum(valid, axis=1, dtype=jnp.int32)
    made = jnp.einsum("bte,ie->bti", x, weights["delta_in"])
    qkv, gate, rate, decay = jnp.split(made, (Z, Z + J * net.value_dim, made.shape[-1] - J), axis=-1)
    qkv, inputs = convolved(weights["recurrent_kernel"][:, 0], qkv, state["inputs"], count)
    HP = net.key_heads * net.key_dim
    query, key, value = (own.reshape(B, T, n, -1) for own, n in zip(
        jnp.split(qkv, (HP, 2 * HP), axis=-1), (net.key_heads, net.key_heads, J), strict=True
    ))  # fmt: skip
    query, key = (jnp.repeat(_unit(own), J // net.key_heads, axis=2) for own in (query, key))
    counts = (jnp.arange(T) < count[:, None])[..., None]  # the others change nothing
    log_decay, bias = (weights[f"recurrent_{name}"].astype(jnp.float32) for name in ("log_decay", "decay_bias"))
    decay = jnp.where(counts, -jnp.exp(log_decay) * jax.nn.softplus(decay.astype(jnp.float32) + bias), 0)
    rate = jnp.where(counts, jax.nn.sigmoid(rate.astype(jnp.float32)), 0)
    given = query * net.key_dim**-0.5, key, value.astype(jnp.float32), decay, rate, state["memory"]
    out, memory = linear_attention(*given, delta=True)
    out = rms_norm(out.astype(x.dtype), weights["delta_norm"], epsilon, False).reshape(B, T, -1)
    out = (out * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)
    return put_back(out, place), {"inputs": inputs, "memory": memory}


def _unit(x: Float[Array, "*rest P"]) -> Float[Array, "*rest P"]:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
