"""Gated delta nets: linear attention whose state has a fixed size, however long the text is (Yang et al., 2024).

Axes: B batch, T tokens, E model dim; H heads of queries and keys, P their length, J heads of values, W their length, Z
channels of the convolution (queries, keys and values, side by side), M its inputs. Each head of values has a matrix S
[P, W] that maps keys to values. A token first lets it decay, then corrects what it says of the token's key, and reads
it by its query (Gated Delta Networks, arXiv:2412.06464, equation 10):

    S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T,    o_t = S_t^T q_t

a_t = exp(-exp(log_decay) softplus(decay(x_t) + bias)) and b_t = sigmoid(rate(x_t)) are numbers per head. Queries, keys
and values come out of a short causal convolution over the newest M tokens; queries and keys have length 1.

A block of tokens is done by chunks, whose corrections solve a triangular system (section 3.3 of the paper).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.add_rms_norm.reference import rms_norm
from kvjax import RowArray
from kvjax._src.layer_caches import Recurrent
from models.config import Config, DeltaNet

CHUNK = 64  # tokens whose corrections are computed at once
_einsum = functools.partial(jnp.einsum, precision="highest")
State = dict[str, Array]  # "inputs" [B, M - 1, Z], the newest of the convolution; "memory" [B, J, P, W], float32


def state_arrays(net: DeltaNet, dtype: Any) -> tuple[RowArray, ...]:
    """Return what a layer's state is made of in a model of a dtype."""
    inputs = RowArray("inputs", (net.kernel - 1, net.channels), jnp.dtype(dtype).name)
    return inputs, RowArray("memory", (net.value_heads, net.key_dim, net.value_dim), "float32")


def states_of(config: Config, dtype: Any) -> Recurrent:
    """Return what the states of a model's layers without a KV cache are made of; () for a model without such layers."""
    net = config.delta_net
    return () if net is None else (state_arrays(net, dtype),) * len(net.layers)


def empty_state(net: DeltaNet, batch: int, dtype: Any) -> State:
    """Return the state before the first token."""
    return {own.name: own.zeros(batch) for own in state_arrays(net, dtype)}


def mix(
    net: DeltaNet,
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
        state: that of the tokens before the block, such as :func:`empty_state` or this function returns.
        epsilon: that of the norm of the output.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> from models import delta_net
        >>> from models.config import DeltaNet
        >>> net = DeltaNet(
        ...     (0,), key_heads=1, value_heads=2, key_dim=4, value_dim=3, kernel=2
        ... )
        >>> shapes = dict(
        ...     delta_in=(24, 8), delta_kernel=(14, 1, 2), delta_log_decay=(2,),
        ...     delta_decay_bias=(2,), delta_norm=(3,)
        ... )
        >>> weights = {name: np.ones(shape) for name, shape in shapes.items()}
        >>> state = delta_net.empty_state(net, 1, "float32")
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
    qkv, inputs = convolved(weights["delta_kernel"][:, 0], qkv, state["inputs"], count)
    HP = net.key_heads * net.key_dim
    query, key, value = (own.reshape(B, T, n, -1) for own, n in zip(
        jnp.split(qkv, (HP, 2 * HP), axis=-1), (net.key_heads, net.key_heads, J), strict=True
    ))  # fmt: skip
    query, key = (jnp.repeat(_unit(own), J // net.key_heads, axis=2) for own in (query, key))
    counts = (jnp.arange(T) < count[:, None])[..., None]  # the others change nothing
    log_decay, bias = (weights[f"delta_{name}"].astype(jnp.float32) for name in ("log_decay", "decay_bias"))
    decay = jnp.where(counts, -jnp.exp(log_decay) * jax.nn.softplus(decay.astype(jnp.float32) + bias), 0)
    rate = jnp.where(counts, jax.nn.sigmoid(rate.astype(jnp.float32)), 0)
    out, memory = delta_rule(query * net.key_dim**-0.5, key, value.astype(jnp.float32), decay, rate, state["memory"])
    out = rms_norm(out.astype(x.dtype), weights["delta_norm"], epsilon, False).reshape(B, T, -1)
    out = (out * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)
    if place is not None:
        out = jnp.take_along_axis(out, place[..., None], axis=1)
    return out, {"inputs": inputs, "memory": memory}


def in_front(
    x: Float[Array, "B T E"], valid: Bool[Array, "B T"]
) -> tuple[Float[Array, "B T E"], Int[Array, "B T"] | None]:
    """Return a block with the tokens that count in front, and where each place of the block is then; None for one."""
    if x.shape[1] == 1:
        return x, None
    order = jnp.argsort(~valid, axis=1, stable=True)
    return jnp.take_along_axis(x, order[..., None], axis=1), jnp.argsort(order, axis=1)


def convolved(
    kernel: Float[Array, "Z M"], x: Float[Array, "B T Z"], before: Float[Array, "B M1 Z"], count: Int[Array, "B"]
) -> tuple[Float[Array, "B T Z"], Float[Array, "B M1 Z"]]:
    """Convolve each channel with its newest inputs, and return its SiLU, and the newest inputs after ``count``."""
    (T, M), all_inputs = (x.shape[1], kernel.shape[1]), jnp.concatenate([before.astype(x.dtype), x], axis=1)
    made = sum(all_inputs[:, at : at + T] * kernel[:, at] for at in range(M))
    newest = count[:, None] + jnp.arange(M - 1)
    return jax.nn.silu(made), jnp.take_along_axis(all_inputs, newest[..., None], axis=1).astype(before.dtype)


def delta_rule(
    query: Float[Array, "B T J P"],
    key: Float[Array, "B T J P"],
    value: Float[Array, "B T J W"],
    decay: Float[Array, "B T J"],
    rate: Float[Array, "B T J"],
    memory: Float[Array, "B J P W"],
) -> tuple[Float[Array, "B T J W"], Float[Array, "B J P W"]]:
    """Apply the gated delta rule to tokens, one after the other in effect; ``decay`` is the logarithm of a_t."""
    T = query.shape[1]
    size = min(CHUNK, T)
    if size == T:
        memory, out = _chunk(memory, (query, key, value, decay, rate))
        return out, memory

    def by_chunks(own: Array) -> Array:
        own = jnp.pad(own, ((0, 0), (0, -T % size), *((0, 0),) * (own.ndim - 2)))
        return own.reshape(own.shape[0], -1, size, *own.shape[2:]).swapaxes(0, 1)

    memory, out = jax.lax.scan(_chunk, memory, tuple(map(by_chunks, (query, key, value, decay, rate))))
    return out.swapaxes(0, 1).reshape(out.shape[1], -1, *out.shape[3:])[:, :T], memory


def _chunk(memory: Float[Array, "B J P W"], tokens: tuple[Array, ...]) -> tuple[Array, Float[Array, "B c J W"]]:
    """Return the memory after some tokens, and what they read.

    Token t adds k_t u_t^T. With the decay d_ti from token i to token t, u_t is b_t times the value that is left after
    what the memory from before the chunk says of its key, and what the tokens i < t of the chunk have added.
    """
    query, key, value, decay, rate = (own.swapaxes(1, 2) for own in tokens)  # [B, J, c, ...]
    since = jnp.cumsum(decay, axis=-1)  # since the chunk began
    before = jnp.tril(jnp.ones((since.shape[-1],) * 2, bool))
    apart = jnp.exp(jnp.where(before, since[..., :, None] - since[..., None, :], -jnp.inf))  # [B, J, t, i]
    left = value - jnp.exp(since)[..., None] * _einsum("bjtp,bjpw->bjtw", key, memory)
    added = rate[..., None] * left
    if since.shape[-1] > 1:
        system = rate[..., None] * apart * _einsum("bjtp,bjip->bjti", key, key)  # its diagonal is not read
        added = solve_triangular(system, added, lower=True, unit_diagonal=True)
    out = jnp.exp(since)[..., None] * _einsum("bjtp,bjpw->bjtw", query, memory)
    out = out + _einsum("bjti,bjiw->bjtw", apart * _einsum("bjtp,bjip->bjti", query, key), added)
    left = jnp.exp(since[..., -1:] - since)[..., None] * key
    memory = jnp.exp(since[..., -1])[..., None, None] * memory + _einsum("bjtp,bjtw->bjpw", left, added)
    return memory, out.swapaxes(1, 2)


def _unit(x: Float[Array, "*rest P"]) -> Float[Array, "*rest P"]:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
