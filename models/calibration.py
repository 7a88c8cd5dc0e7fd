"""Measure a model once, from a text, for what reads it: Q-Filters, centres of queries, scores of heads."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels_pallas.softmax import scaled
from kvjax import rotate
from kvjax._src.checks import check_count, real_array
from kvjax.schedule import HostOrDevice
from models.config import Config, check_alike
from models.decoder import Decoder, attend_densely, rope_of_layer, rotation

# measure(the layer's number, rotated queries, rotated keys) -> what is measured of the layer
Measure = Callable[[int, Float[Array, "B T N D"], Float[Array, "B T K D"]], Array]


def q_filters(model: Decoder, tokens: Int[HostOrDevice, "B T"]) -> Float[np.ndarray, "L K D"]:
    """Compute a model's Q-Filters from a text (arXiv 2503.02812): the main direction of each head's queries.

    It is the first right singular vector of the head's queries over all tokens, rotated as they meet the keys. Its sign
    is such that most queries have a positive product with it. A filter is minus the mean of these vectors over the
    group. The authors take 3,000 of the queries of 20 texts of 2,048 tokens; this takes all of the given ones.

    Args:
        tokens: texts of one length; the attention of one layer holds ``B N T T`` numbers at a time.

    Returns:
        The filters, for ``np.save`` and then :func:`kvjax.q_filters`.

    Example:
        >>> import jax.numpy as jnp
        >>> import models
        >>> model = models.Decoder.tiny()
        >>> models.q_filters(model, jnp.arange(60).reshape(2, 30)).shape
        (2, 2, 8)
    """

    def filters(_: int, query: Float[Array, "B T N D"], key: Float[Array, "B T K D"]) -> Float[Array, "K D"]:
        B, T, N, D = query.shape
        of_heads = query.astype(jnp.float32).reshape(B * T, N, D)
        products = jnp.einsum("tnd,tne->nde", of_heads, of_heads, precision=jax.lax.Precision.HIGHEST)
        main = jnp.linalg.eigh(products)[1][..., -1]  # its values ascend
        positive = jnp.mean(jnp.einsum("tnd,nd->tn", of_heads, main) > 0, axis=0, keepdims=True).T
        towards = jnp.where(positive > 0.5, main, -main)
        return -jnp.mean(towards.reshape(key.shape[2], -1, D), axis=1)

    return _of_layers(model, tokens, filters)


def query_centres(model: Decoder, tokens: Int[HostOrDevice, "B T"]) -> Float[np.ndarray, "L K G C"]:
    """Compute the centres of a model's queries from a text (arXiv 2604.04921), before rotation.

    C = 3 D / 2: a head's mean query, and behind it the mean lengths of its pairs of elements that are rotated together.
    The authors take one text of up to 32,768 tokens, and find that its kind matters little.

    Args:
        tokens: texts of one length; see :func:`q_filters`.

    Returns:
        The centres, for ``np.save`` and then :func:`kvjax.triattention`.

    Example:
        >>> import jax.numpy as jnp
        >>> import models
        >>> model = models.Decoder.tiny()
        >>> models.query_centres(model, jnp.arange(60).reshape(2, 30)).shape
        (2, 2, 2, 12)
    """
    tokens = _texts(tokens)
    waves = _waves(model, tokens.shape[1])

    def centres(layer: int, query: Float[Array, "B T N D"], key: Float[Array, "B T K D"]) -> Float[Array, "K G C"]:
        back = _unrotated(model.config, layer, query, waves)
        first, second = jnp.split(back, 2, axis=-1)
        found = jnp.concatenate([back, jnp.sqrt(first**2 + second**2)], axis=-1)
        return jnp.mean(found, axis=(0, 1)).reshape(key.shape[2], -1, found.shape[3])

    return _of_layers(model, tokens, centres)


def head_scores(model: Decoder, tokens: Int[HostOrDevice, "B T"], *, length: int = 500) -> Float[np.ndarray, "L K"]:
    """Measure how far back each head looks, for the allocations that give such heads more slots.

    A head's mean query and mean key over a text, before rotation, are placed at all of ``length`` positions. The score
    is the mean of the cumulated attention of the last query, over positions from the first on: near 1 where the
    attention lies far back, near 0 where it lies on the newest tokens. It is averaged over texts and over the group.
    This is kvpress' measure for DuoAttention (``on_the_fly_scoring``), in place of the authors' training; kvpress takes
    50 texts.

    Args:
        tokens: texts of one length; see :func:`q_filters`.
        length: the number of positions; 500 as in kvpress.

    Returns:
        The importance of each head, for ``np.save`` and then the allocations ``duo`` and ``headkv``.

    Example:
        >>> import jax.numpy as jnp
        >>> import models
        >>> model = models.Decoder.tiny()
        >>> models.head_scores(model, jnp.arange(60).reshape(2, 30), length=100).shape
        (2, 2)
    """
    length = check_count("length", length, 1, "give a number of positions")
    tokens = _texts(tokens)
    T = tokens.shape[1]
    config = model.config
    of_text, placed = (_waves(model, n) for n in (T, length))

    def mean(layer: int, x: Float[Array, "B T H D"]) -> Float[Array, "B 1 H D"]:
        return jnp.mean(_unrotated(config, layer, x, of_text), axis=1, keepdims=True)

    def scores(layer: int, query: Float[Array, "B T N D"], key: Float[Array, "B T K D"]) -> Float[Array, "K"]:
        B, D = query.shape[0], query.shape[3]
        waves = rope_of_layer(config, layer, placed)[:2]
        last = rotate(mean(layer, query), *(wave[:, -1:] for wave in waves))[:, 0]
        keys = rotate(jnp.broadcast_to(mean(layer, key), (B, length, *key.shape[2:])), *waves)
        grouped = last.reshape(B, key.shape[2], -1, D)
        logits = jnp.einsum("bkgd,btkd->bkgt", grouped, keys, precision=jax.lax.Precision.HIGHEST) / D**0.5
        weights = jax.nn.softmax(scaled(logits, 1, config.attention_soft_cap), axis=-1)
        return jnp.mean(jnp.cumsum(weights, axis=-1), axis=(0, 2, 3))

    return _of_layers(model, tokens, scores)


def _waves(model: Decoder, length: int) -> tuple[tuple[Array, ...], ...]:
    """Return the cosines and sines of the positions of a text, for :func:`rope_of_layer`."""
    config = model.config
    return jax.jit(lambda: rotation(config, jnp.arange(length)[None], jnp.full(1, length)))()


def _unrotated(
    config: Config, layer: int, x: Float[Array, "B T H D"], waves: tuple[tuple[Array, ...], ...]
) -> Float[Array, "B T H D"]:
    """Turn the queries or keys of a text back to position 0; a factor of the queries at their positions stays."""
    cos, sin, *_ = rope_of_layer(config, layer, waves)
    return rotate(x.astype(jnp.float32), cos, -sin) / jnp.tile(cos**2 + sin**2, 2)  # yarn makes them longer


def _texts(tokens: Int[HostOrDevice, "B T"]) -> Int[Array, "B T"]:
    tokens = real_array("tokens", tokens)
    if tokens.ndim != 2 or not tokens.size or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens are {tokens.dtype} of shape {tokens.shape}; expected integers [B, T].")
    return tokens


def _of_layers(model: Decoder, tokens: Int[HostOrDevice, "B T"], measure: Measure) -> np.ndarray:
    """Run the model over whole texts by dense causal attention, and return what is measured of each layer."""
    check_alike(model.config, "what is measured of the layers is one array")

    @jax.jit
    def run(model: Decoder, tokens: Int[Array, "B T"]) -> Array:
        position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def attend(carry, layer, sliding_window, query, key, value):
            out = attend_densely(model.config, position, sliding_window, query, key, value, model.sink_logits(layer))
            return out, carry, measure(layer, query, key)

        return model.run(tokens, position, jnp.full(tokens.shape[:1], tokens.shape[1]), attend, None)[2]

    return np.asarray(run(model, _texts(tokens)))
