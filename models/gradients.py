"""The gradient of a loss with respect to each layer's attention output, while the model repeats its text (KVgrad)."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import kvjax
from kernels_pallas import cache_attention
from kvjax import Context
from kvjax.cache import floats_of
from kvjax.insertion import Cache
from kvjax.layer import layer_of
from kvjax.quantise import Dtypes, is_quantised
from models.decoder import Decoder


def loss_gradient(
    model: Decoder,
    loss: Literal["hidden", "tokens"],
    cache: Cache,
    tokens: Int[Array, "B T"],
    position: Int[Array, "B T"],
    part: Int[Array, "B 3"],
    lengths: Int[Array, "B"],
    dtypes: Dtypes,
) -> Float[Array, "L B T E"]:
    """Differentiate a loss of a block that repeats a part of the text, with respect to each layer's attention output.

    The output is what W_O gives, before it is normalised or added to the hidden states. The cache is a constant, which
    the block's queries see; the block's own keys and values are functions of what comes before them. One forward and
    one backward pass, in the model's dtype, that hold the activations of one layer at a time.

    Args:
        loss: "hidden", the sum of the squared lengths of the tokens' hidden states before the last norm, or "tokens",
            the cross-entropy of the part's tokens, each predicted from those before it.
        cache: all layers, without the block.
        position: -1 for padding, which is in front.
        part: see :class:`kvjax.schedule.Step`; the part's tokens are the block's last ones.
        lengths: the lengths of the texts, which some rotary frequencies follow.
        dtypes: those that the block's keys and values would have in the cache.
    """
    assert not isinstance(cache, kvjax.SplitCache)  # of several devices, which models.plan refuses
    model, cache = jax.lax.stop_gradient((model, cache))  # the choice of the tokens that stay is not differentiable

    def attend_at(carry, index, window, query, key, value):
        here = floats_of(layer_of(cache, Context(layer=index)))

        def joined(held: Array, own: Array, dtype: str) -> Array:
            own = kvjax.straight_through(own, dtype) if is_quantised(dtype) else own.astype(dtype)
            return jnp.concatenate([held, own.swapaxes(1, 2).astype(held.dtype)], axis=2)

        (B, K), T = here.position.shape[:2], position.shape[1]
        places = jnp.broadcast_to(position[:, None], (B, K, T))
        bias = None if here.bias is None else jnp.pad(here.bias, ((0, 0), (0, 0), (0, T)))
        out, _ = cache_attention(
            query,
            joined(here.key, key, dtypes.key),
            joined(here.value, value, dtypes.value),
            jnp.concatenate([here.position, places], axis=2),
            position,
            sliding_window=window,
            soft_cap=model.config.attention_soft_cap,
            bias=bias,
        )
        return out, carry, None

    def loss_of(shift: Float[Array, "L B T E"]) -> Float[Array, ""]:
        hidden, _, _ = model.run(tokens, position, lengths, attend_at, None, shift=shift)
        if loss == "hidden":
            wide = hidden.astype(jnp.promote_types(hidden.dtype, jnp.float32))
            return jnp.sum(jnp.where(position[..., None] >= 0, wide**2, 0))
        return _cross_entropy(model, hidden, tokens, part)

    config = model.config
    shape = (config.num_layers, *tokens.shape, config.hidden_size)
    return jax.grad(loss_of)(jnp.zeros(shape, model.embedding[...].dtype))


def _cross_entropy(
    model: Decoder, hidden: Float[Array, "B T E"], tokens: Int[Array, "B T"], part: Int[Array, "B 3"]
) -> Float[Array, ""]:
    """Return the cross-entropy of the tokens of each row's part, its last ones, summed."""
    T = tokens.shape[1]
    logits = model.logits(hidden[:, :-1])
    own = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    counted = jnp.arange(1, T) >= T - (part[:, 1] - part[:, 0])[:, None]
    return jnp.sum(jnp.where(counted, jax.nn.logsumexp(logits, axis=-1) - own, 0))
