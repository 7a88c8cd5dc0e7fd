"""Tells what the answers to questions about a text feel: how much each of its tokens matters to them.

A row is a text, questions about it and their answers (train/answers.py). A token's score in a KV head is a product of
its weight, the length of its value, and the length of the gradient with respect to the head's output: the largest, over
what follows the text and over the group's query heads. The gradient is that of the answers' logits, each less the mean
of the vocabulary's. Like KVgrad's score (:func:`kvjax.kvgrad`) it bounds, to first order, what would change if the
token were gone; there the model repeats the text, here it is asked about it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas import cache_attention
from models.decoder import Decoder
from models.dense import attention_in_chunks

MOST = 256  # tokens of a row's answers whose logits count; the first ones


@jax.jit
def felt_by_answers(
    model: Decoder, tokens: Int[Array, "B T"], text: Int[Array, "B"], learned: Bool[Array, "B T-1"]
) -> Float[Array, "L B T K"]:
    """Return how much the answers of each row feel the absence of each token of its text; 0 for what follows it.

    Args:
        text: the number of tokens of each row's text; what follows them asks and answers.
        learned: whether the token after each is an answer's.

    Example:
        >>> import jax.numpy as jnp, models
        >>> from train.asked import felt_by_answers
        >>> answer = jnp.arange(7)[None] == 5  # the seventh token of eight
        >>> text = jnp.array([5])
        >>> felt = felt_by_answers(
        ...     models.Decoder.tiny(), jnp.arange(8)[None], text, answer
        ... )
        >>> felt.shape, bool((felt[:, :, :5] > 0).all()), float(felt[:, :, 5:].max())
        ((2, 1, 8, 2), True, 0.0)
    """
    config, (B, T) = model.config, tokens.shape
    position = jnp.broadcast_to(jnp.arange(T), (B, T))
    behind = position >= text[:, None]
    place = jax.vmap(lambda own: jnp.nonzero(own, size=min(MOST, T - 1), fill_value=T - 1)[0])(learned)

    def answered(shift: Float[Array, "L B T N D"]) -> tuple[Float[Array, ""], tuple[Array, ...]]:
        def attend(_, layer, sliding_window, query, key, value):
            about = (sliding_window, config.attention_soft_cap, model.sink_logits(layer))
            out = attention_in_chunks(query, key, value, position, *about)
            return out + shift[layer], None, (query, key, value)

        hidden, _, seen = model.run(tokens, position, jnp.full(B, T), attend, None)
        logits = model.logits(jnp.take_along_axis(hidden, place[..., None], axis=1))
        right = jnp.take_along_axis(tokens, jnp.minimum(place + 1, T - 1), axis=1)
        own = jnp.take_along_axis(logits, right[..., None], axis=-1)[..., 0] - jnp.mean(logits, axis=-1)
        return jnp.sum(jnp.where(place < T - 1, own, 0)), seen

    nothing = jnp.zeros((config.num_layers, B, T, config.num_heads, config.head_dim), model.embedding[...].dtype)
    gradient, (query, key, value) = jax.grad(answered, has_aux=True)(nothing)
    layers = [number for number in range(config.num_layers) if number not in config.recurrent_layers]
    windows = jnp.array([config.sliding_windows[number] or T for number in layers])
    sinks: Any = [model.sink_logits(number) for number in layers]

    def of_layer(layer: tuple[Any, ...]) -> Float[Array, "B T K"]:
        query, key, value, above, sliding_window, sink_logits = layer
        key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
        at = jnp.broadcast_to(position[:, None], key.shape[:3])
        _, columns = cache_attention(
            query, key, value, at, jnp.where(behind, position, -1), sliding_window=sliding_window,
            soft_cap=config.attention_soft_cap, sink_logits=sink_logits, statistics=["weights"],
            implementation="reference",
        )  # fmt: skip
        length = jnp.linalg.norm(above, axis=-1).swapaxes(1, 2)  # [B, N, T]
        largest = jnp.max(columns.weights.reshape(B, -1, T, T) * length[..., None], axis=2)
        felt = jnp.max(largest.reshape(B, key.shape[1], -1, T), axis=2) * jnp.linalg.norm(value, axis=-1)
        return jnp.where(behind[..., None], 0, felt.swapaxes(1, 2))

    each = None if sinks[0] is None else jnp.stack(sinks)
    return jax.lax.map(of_layer, (query, key, value, gradient[np.array(layers)], windows, each))
