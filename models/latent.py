"""Multi-head latent attention as attention over latents: one KV head, which all query heads share.

DeepSeek-V2 (arXiv 2405.04434, section 2.1) makes of each token a latent c [C], normed, and a key r [R] that is rotated.
Head n has the key (W_UK^n c, r) and the value W_UV^n c. As q (W_UK^n c) = (W_UK^n' q) c, the latent can stand in for
all keys once the query has passed through W_UK, and for all values if the sum of latents passes through W_UV afterwards
("absorbed"). So a cache has one key (c, r) per token, and of it the part c is the value.

The decoder rotates element i of a head with element i + D / 2, so the key and the absorbed query are laid out as
[r's first half, c's first half, r's second half, c's second half], D = C + R, and c's pairs have frequency 0. The value
has 0 in place of r.

Axes: those of models/decoder.py; C the latent, R the rotated part, P the plain part of a query, W a head's value.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.add_rms_norm.reference import rms_norm
from models.config import Config, Latent

EPSILON = 1e-6  # of both norms, whatever the config's is, as in transformers and in DeepSeek's code


def project(
    config: Config, weights: dict[str, Array], x: Float[Array, "B T E"]
) -> tuple[Float[Array, "B T N D"], Float[Array, "B T 1 D"], Float[Array, "B T 1 D"]]:
    """Compute absorbed queries, and keys and values of the one KV head, before rotation."""
    own = _sizes(config)
    query = _queries(own, weights, x)
    absorbed = jnp.einsum("btnp,cnp->btnc", query[..., : own.plain], weights["latent_heads"][..., : own.plain])
    made = x @ weights["latent"]
    if own.bias:
        made = made + weights["latent_bias"].reshape(1, 1, -1)
    latent = rms_norm(made[..., : own.size], weights["latent_norm"], EPSILON, False)[:, :, None]
    rotated = made[..., None, own.size :]
    query = _laid_out(_in_halves(own, query[..., own.plain :]), absorbed)
    if config.attention_multiplier is not None:
        query = query * (config.attention_multiplier * math.sqrt(config.head_dim))
    key = _laid_out(_in_halves(own, rotated), latent)
    return query, key, _laid_out(jnp.zeros_like(rotated), latent)


def _sizes(config: Config) -> Latent:
    assert config.latent is not None
    return config.latent


def _queries(own: Latent, weights: dict[str, Array], x: Float[Array, "B T E"]) -> Float[Array, "B T N H"]:
    """Return each head's query, its plain part first; compressed, normed and expanded where the model does so."""
    if not own.query:
        return jnp.einsum("bte,enh->btnh", x, weights["latent_query"])
    small = x @ weights["query_down"]
    if own.bias:
        small = small + weights["query_down_bias"].reshape(1, 1, -1)
    return jnp.einsum("btq,qnh->btnh", rms_norm(small, weights["query_down_norm"], EPSILON, False), weights["query_up"])


def _in_halves(own: Latent, rotated: Float[Array, "*rest R"]) -> Float[Array, "*rest R"]:
    """Return the rotated part with the elements of a pair half of it apart."""
    return jnp.concatenate([rotated[..., ::2], rotated[..., 1::2]], axis=-1) if own.neighbours else rotated


def _laid_out(rotated: Float[Array, "*rest R"], latent: Float[Array, "*rest C"]) -> Float[Array, "*rest D"]:
    (r, s), (c, d) = (jnp.split(x, 2, axis=-1) for x in (rotated, latent))
    return jnp.concatenate([r, c, s, d], axis=-1)


def latent_of(config: Config, x: Float[Array, "*rest D"]) -> Float[Array, "*rest C"]:
    """Return the latent's part of a key, a value or an attention output, in the latent's order."""
    R, D = _sizes(config).rotated, x.shape[-1]
    return jnp.concatenate([x[..., R // 2 : D // 2], x[..., (D + R) // 2 :]], axis=-1)


def values_of(config: Config, weights: dict[str, Array], out: Float[Array, "B T N D"]) -> Float[Array, "B T N W"]:
    """Return each head's output as the output projection takes it: the sum of latents behind W_UV."""
    own = _sizes(config)
    return jnp.einsum("btnc,cnw->btnw", latent_of(config, out), weights["latent_heads"][..., own.plain :])


@partial(jax.jit, static_argnums=0)
def absorbed_output(
    config: Config, latent_heads: Float[Array, "C N U"], output: Float[Array, "NW E"]
) -> Float[Array, "N D E"]:
    """Return W_UV W_O of each query head: what its sum of values goes through, 0 for the rotated part.

    Scores that measure a change behind W_O (``laprox``, ``caote(target='output')``) read it.
    """
    own = _sizes(config)
    of_heads = output.reshape(config.num_heads, own.value, -1)
    behind = jnp.einsum("cnw,nwe->nec", latent_heads[..., own.plain :], of_heads)
    return _laid_out(jnp.zeros((*behind.shape[:2], own.rotated), behind.dtype), behind).swapaxes(1, 2)
