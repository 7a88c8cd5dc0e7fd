"""Layers with a state of fixed size in place of a KV cache, however long the text is: what all their kinds share.

Axes: B batch, T tokens, E model dim; H heads of queries and keys, P their length, J heads of values, W their length, Z
channels of the convolution (queries, keys and values, side by side), M its inputs.

A kind is linear attention with a decay. Queries, keys and values come out of a short causal convolution over the newest
M tokens. Each head of values has a matrix S [P, W] that maps keys to values. A token first lets it decay, then adds a
value at its key, and reads it by its query; a_t and b_t are numbers per head:

    S_t = a_t S_{t-1} + b_t k_t u_t^T,    o_t = S_t^T q_t

With the state-space model of :mod:`models.state_space` u_t is the token's value; with the delta rule of
:mod:`models.delta_net` it is what the value differs by from what the memory says of the key.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float, Int

from kvjax import RowArray
from kvjax._src.layer_caches import Recurrent
from models.config import Config, Recurrence

CHUNK = 64  # tokens that are computed at once
_einsum = functools.partial(jnp.einsum, precision="highest")
State = dict[str, Array]  # "inputs" [B, M - 1, Z], the newest of the convolution; "memory" [B, J, P, W], float32


def state_arrays(net: Recurrence, dtype: Any) -> tuple[RowArray, ...]:
    """Return what a layer's state is made of in a model of a dtype."""
    inputs = RowArray("inputs", (net.kernel - 1, net.channels), jnp.dtype(dtype).name)
    return inputs, RowArray("memory", (net.value_heads, net.key_dim, net.value_dim), "float32")


def states_of(config: Config, dtype: Any) -> Recurrent:
    """Return what the states of a model's layers without a KV cache are made of; () for a model without such layers."""
    net = config.recurrence
    return () if net is None else (state_arrays(net, dtype),) * len(net.layers)


def empty_state(net: Recurrence, batch: int, dtype: Any) -> State:
    """Return the state before the first token."""
    return {own.name: own.zeros(batch) for own in state_arrays(net, dtype)}


def in_front(
    x: Float[Array, "B T E"], valid: Bool[Array, "B T"]
) -> tuple[Float[Array, "B T E"], Int[Array, "B T"] | None]:
    """Return a block with the tokens that count in front, and where each place of the block is then; None for one."""
    if x.shape[1] == 1:
        return x, None
    order = jnp.argsort(~valid, axis=1, stable=True)
    return jnp.take_along_axis(x, order[..., None], axis=1), jnp.argsort(order, axis=1)


def put_back(x: Float[Array, "B T out"], place: Int[Array, "B T"] | None) -> Float[Array, "B T out"]:
    """Return what was made of a block whose tokens :func:`in_front` moved, in the order of the block."""
    return x if place is None else jnp.take_along_axis(x, place[..., None], axis=1)


def convolved(
    kernel: Float[Array, "Z M"],
    x: Float[Array, "B T Z"],
    before: Float[Array, "B M1 Z"],
    count: Int[Array, "B"],
    bias: Float[Array, "Z"] | None = None,
) -> tuple[Float[Array, "B T Z"], Float[Array, "B M1 Z"]]:
    """Convolve each channel with its newest inputs, and return its SiLU, and the newest inputs after ``count``."""
    (T, M), all_inputs = (x.shape[1], kernel.shape[1]), jnp.concatenate([before.astype(x.dtype), x], axis=1)
    made = sum(all_inputs[:, at : at + T] * kernel[:, at] for at in range(M))
    newest = jnp.take_along_axis(all_inputs, (count[:, None] + jnp.arange(M - 1))[..., None], axis=1)
    return jax.nn.silu(made if bias is None else made + bias), newest.astype(before.dtype)


def linear_attention(
    query: Float[Array, "B T J P"],
    key: Float[Array, "B T J P"],
    value: Float[Array, "B T J W"],
    decay: Float[Array, "B T J"],
    rate: Float[Array, "B T J"],
    memory: Float[Array, "B J P W"],
    *,
    delta: bool,
) -> tuple[Float[Array, "B T J W"], Float[Array, "B J P W"]]:
    """Let tokens write to the memory and read it, one after the other in effect.

    A token with decay 0 and rate 0 leaves it unchanged.

    Args:
        decay: the logarithm of a_t.
        rate: b_t.
        delta: whether what is added is what a value differs by from what the memory says of its key, not the value.
    """
    T, run = query.shape[1], functools.partial(_chunk, delta)
    size = min(CHUNK, T)
    if size == T:
        memory, out = run(memory, (query, key, value, decay, rate))
        return out, memory

    def by_chunks(own: Array) -> Array:
        own = jnp.pad(own, ((0, 0), (0, -T % size), *((0, 0),) * (own.ndim - 2)))
        return own.reshape(own.shape[0], -1, size, *own.shape[2:]).swapaxes(0, 1)

    memory, out = jax.lax.scan(run, memory, tuple(map(by_chunks, (query, key, value, decay, rate))))
    return out.swapaxes(0, 1).reshape(out.shape[1], -1, *out.shape[3:])[:, :T], memory


def _chunk(
    delta: bool, memory: Float[Array, "B J P W"], tokens: tuple[Array, ...]
) -> tuple[Array, Float[Array, "B c J W"]]:
    """Return the memory after some tokens, and what they read.

    Token t adds k_t times b_t u_t. With the decay d_ti from token i to token t, u_t is its value, or by the delta rule
    what is left of the value after what the memory from before the chunk says of its key, and what the tokens i < t of
    the chunk have added. All these corrections solve a triangular system (Gated Delta Networks, section 3.3).
    """
    query, key, value, decay, rate = (own.swapaxes(1, 2) for own in tokens)  # [B, J, c, ...]
    since = jnp.cumsum(decay, axis=-1)  # since the chunk began
    before = jnp.tril(jnp.ones((since.shape[-1],) * 2, bool))
    apart = jnp.exp(jnp.where(before, since[..., :, None] - since[..., None, :], -jnp.inf))  # [B, J, t, i]
    if delta:
        value = value - jnp.exp(since)[..., None] * _einsum("bjtp,bjpw->bjtw", key, memory)
    added = rate[..., None] * value
    if delta and since.shape[-1] > 1:
        system = rate[..., None] * apart * _einsum("bjtp,bjip->bjti", key, key)  # its diagonal is not read
        added = solve_triangular(system, added, lower=True, unit_diagonal=True)
    out = jnp.exp(since)[..., None] * _einsum("bjtp,bjpw->bjtw", query, memory)
    out = out + _einsum("bjti,bjiw->bjtw", apart * _einsum("bjtp,bjip->bjti", query, key), added)
    left = jnp.exp(since[..., -1:] - since)[..., None] * key
    memory = jnp.exp(since[..., -1])[..., None, None] * memory + _einsum("bjtp,bjtw->bjpw", left, added)
    return memory, out.swapaxes(1, 2)
