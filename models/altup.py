"""Computes what Gemma 3n has in its layers and around them, as transformers' modeling_gemma3n.py does.

AltUp (Baykal et al., 2023, arXiv:2301.13310, section 3): a token has A hidden states, its streams. A layer predicts
each stream from all of them, and reads the prediction of the active one. It adds to each prediction a multiple of the
difference between its output and what it read. The multiples follow from the active stream. Only training clips their
coefficients (``altup_coef_clip``), so here they are as the file has them.

LAuReL (Menghani et al., 2024, arXiv:2411.07501, its variant of low rank): the input of attention also goes through two
narrow matrices.

Statistical top-k (You et al., 2025, arXiv:2506.06644): of a gate's units those above a quantile count, by how far they
are above it. It is the quantile of a normal distribution with their mean and variance, so nothing is sorted.
"""

from __future__ import annotations

import statistics

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.add_rms_norm.reference import rms_norm
from models.config import AltUp

Weights = dict[str, Array]  # a layer's, by name


def parted(x: Float[Array, "B T E"], weights: Float[Array, "more E E"]) -> Float[Array, "B T A E"]:
    """Return a token's streams: its embedding, and what each matrix makes of it, scaled to the same length."""
    return _beside(x, jnp.einsum("bte,aeo->btao", x, weights))


@jax.jit
def merged(x: Float[Array, "B T A E"], weights: Float[Array, "more E E"]) -> Float[Array, "B T E"]:
    """Return the mean of the first stream and of what the matrices make of the others, scaled to its length."""
    return jnp.mean(_beside(x[:, :, 0], jnp.einsum("btae,aeo->btao", x[:, :, 1:], weights)), axis=2)


def _beside(first: Float[Array, "B T E"], others: Float[Array, "B T more E"]) -> Float[Array, "B T A E"]:
    squared, of_others = (jnp.mean(x.astype(jnp.float32) ** 2, axis=-1, keepdims=True) for x in (first, others))
    scaled = others * jnp.sqrt(squared[:, :, None] / jnp.maximum(of_others, 1e-5))
    return jnp.concatenate([first[:, :, None], scaled.astype(first.dtype)], axis=2)


def predicted(own: AltUp, weights: Weights, x: Float[Array, "B T A E"], epsilon: float) -> Float[Array, "B T A E"]:
    """Return the streams as a layer predicts them from its input."""
    multiples = _multiples(weights, "stream_predict", x[:, :, own.active], epsilon)
    multiples = multiples.reshape(*x.shape[:3], own.streams)  # of each prediction, one for each stream
    return x + jnp.einsum("btpa,btae->btpe", multiples, x)


def corrected(
    own: AltUp, weights: Weights, x: Float[Array, "B T A E"], made: Float[Array, "B T E"], epsilon: float
) -> tuple[Float[Array, "B T A E"], Float[Array, "B T E"]]:
    """Correct predicted streams by what the layer made of the active one; return that one scaled, too."""
    multiples = _multiples(weights, "stream_correct", made, epsilon) + 1
    x = x + multiples[..., None] * (made - x[:, :, own.active])[:, :, None]
    return x, x[:, :, own.active] * (weights["stream_scale"] if own.scaled else 1)


def _multiples(weights: Weights, name: str, x: Float[Array, "B T E"], epsilon: float) -> Float[Array, "B T _"]:
    routed = rms_norm(x, weights["stream_norm"], epsilon) / x.shape[-1] @ weights["stream_router"]
    return jnp.tanh(routed.astype(jnp.float32)).astype(x.dtype) @ weights[name]


def low_rank(weights: Weights, x: Float[Array, "B T E"], epsilon: float) -> Float[Array, "B T E"]:
    """Add to the input of attention what two narrow matrices make of it."""
    return x + rms_norm(x @ weights["narrow_down"] @ weights["narrow_up"], weights["narrow_norm"], epsilon)


def sparse(share: float, gate: Float[Array, "*rest F"]) -> Float[Array, "*rest F"]:
    """Return how far each unit is above the quantile of ``share``, and 0 where it is below."""
    wide = gate.astype(jnp.promote_types(gate.dtype, jnp.float32))
    mean, deviation = (of(wide, axis=-1, keepdims=True) for of in (jnp.mean, jnp.std))
    return jax.nn.relu(wide - mean - statistics.NormalDist().inv_cdf(share) * deviation).astype(gate.dtype)
