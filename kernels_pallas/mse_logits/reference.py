"""The loss in plain JAX, linear in T, by Gram matrices instead of pairs.

With x_i = (q_i, q'_i) and y_j = (k_j, -k'_j), with the scales included, the difference of two logits is x_i.y_j, and

    sum_ij (x_i.y_j)^2 = sum_ij x_i' y_j y_j' x_i = <sum_i x_i x_i', sum_j y_j y_j'>,

the product of two matrices of D + D' rows. The gradient follows likewise: d/dx_i = 2 x_i' sum_j y_j y_j'. Causal pairs
are those of a block with itself, whose [m, m] differences are computed one by one, and those with all blocks before it,
whose Gram matrices the scan carries. A sum of squared differences becomes a difference of sums, which loses float32's
rounding of the logits' own squares, 1e-7 of their mean. So a loss below about 1e-6 of that mean is noise (tested).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# Here G query heads share a KV head, F is D', and the predictor has a key per query head:
# query [B, T, K, G, D], key [B, T, K, D], predicted query and predicted key [B, T, K, G, F].
Sums = tuple[Float[Array, ""], Float[Array, "B T K G F"], Float[Array, "B T K G F"]]  # loss and its two gradients
Grams = tuple[Float[Array, "B K D D"], Float[Array, "B K G D F"], Float[Array, "B K G F F"]]

# Rounding of inputs to bfloat16 or TF32 would drown the difference of two Gram products.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def mse_logits(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    predicted_query: Float[Array, "B T N F"],
    predicted_key: Float[Array, "B T M F"],
    valid: Bool[Array, "B T"] | None,
    *,
    causal: bool,
    scale: float,
    block: int,
) -> Float[Array, ""]:
    """See :func:`kernels_pallas.mse_logits.api.mse_logits`."""
    B, T, N, D = query.shape
    K, F = key.shape[2], predicted_query.shape[3]
    accumulate = jnp.promote_types(jnp.promote_types(query.dtype, predicted_query.dtype), jnp.float32)
    counted = jnp.ones((B, T), bool) if valid is None else valid

    def prepare(x: Array, factor: float) -> Array:
        return jnp.where(counted[..., None, None], x.astype(accumulate) * factor, 0)  # 0 * NaN would be NaN

    query, key = jax.lax.stop_gradient((prepare(query, scale), prepare(key, 1.0)))
    predicted_query = prepare(predicted_query, F**-0.5).reshape(B, T, K, N // K, F)
    predicted_key = jnp.repeat(prepare(predicted_key, 1.0), N // predicted_key.shape[2], axis=2)
    parts = (query.reshape(B, T, K, N // K, D), key, predicted_query, predicted_key.reshape(B, T, K, N // K, F))

    tokens = jnp.sum(counted, axis=1).astype(accumulate)
    pairs = N * jnp.sum(tokens * (tokens + 1) / 2 if causal else tokens * tokens)
    sums = functools.partial(_seen_pairs, min(block, T)) if causal else _all_pairs
    return _sum(sums, *parts) / jnp.maximum(pairs, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(sums: Callable[..., Sums], query: Array, key: Array, predicted_query: Array, predicted_key: Array) -> Array:
    """Compute the loss's sum over pairs; the same pass gives its gradients, which are all that backward needs."""
    return _forward(sums, query, key, predicted_query, predicted_key)[0]


def _forward(sums, query, key, predicted_query, predicted_key):
    total, *gradients = sums(query, key, predicted_query, predicted_key)
    return jnp.maximum(total, 0), tuple(gradients)  # rounding alone can make it negative


def _backward(sums, gradients, cotangent):
    return None, None, *(cotangent * gradient for gradient in gradients)


_sum.defvjp(_forward, _backward)


def _all_pairs(query: Array, key: Array, predicted_query: Array, predicted_key: Array) -> Sums:
    of_queries, of_keys = _query_grams(query, predicted_query), _key_grams(key, predicted_key)
    return (
        _product(of_queries, of_keys),
        _gradient(query, predicted_query, of_keys),
        _gradient(key[:, :, :, None], predicted_key, of_queries),
    )


def _seen_pairs(block: int, query: Array, key: Array, predicted_query: Array, predicted_key: Array) -> Sums:
    B, T, K, G, F = predicted_query.shape
    count = -(-T // block)

    def cut(x: Array) -> Array:  # [count, B, block, ...]; padding is zero, so it adds nothing
        x = jnp.pad(x, [(0, 0), (0, count * block - T)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, count, block, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(B, count * block, K, G, F)[:, :T]

    seen = jnp.tril(jnp.ones((block, block), bool))

    def run_block(before: Grams, parts):
        query, key, predicted_query, predicted_key = parts
        logits = _einsum("btkgd,bskd->bkgts", query, key)
        difference = jnp.where(seen, logits - _einsum("btkgf,bskgf->bkgts", predicted_query, predicted_key), 0)
        total = jnp.sum(difference**2) + _product(_query_grams(query, predicted_query), before)
        to_query = -2 * _einsum("bkgts,bskgf->btkgf", difference, predicted_key)
        to_key = -2 * _einsum("bkgts,btkgf->bskgf", difference, predicted_query)
        to_query += _gradient(query, predicted_query, before)
        return jax.tree.map(jnp.add, before, _key_grams(key, predicted_key)), (total, to_query, to_key)

    def run_keys(after: Grams, parts):  # from the last block to the first: a key's gradient from later queries
        query, key, predicted_query, predicted_key = parts
        to_key = _gradient(key[:, :, :, None], predicted_key, after)
        return jax.tree.map(jnp.add, after, _query_grams(query, predicted_query)), to_key

    blocks = jax.tree.map(cut, (query, key, predicted_query, predicted_key))
    D = key.shape[-1]
    model, mixed, predictor = (jnp.zeros((B, *shape), key.dtype) for shape in ((K, D, D), (K, G, D, F), (K, G, F, F)))
    nothing: Grams = (model, mixed, predictor)
    _, (totals, to_query, to_key) = jax.lax.scan(run_block, nothing, blocks)
    _, from_later = jax.lax.scan(run_keys, nothing, blocks, reverse=True)
    return jnp.sum(totals), join(to_query), join(to_key + from_later)


def _query_grams(query: Float[Array, "B T K G D"], predicted: Float[Array, "B T K G F"]) -> Grams:
    """Sum q q^T, q q'^T and q' q'^T over tokens; the first also over the group, whose heads share their keys."""
    return (
        _einsum("btkgd,btkge->bkde", query, query),
        _einsum("btkgd,btkgf->bkgdf", query, predicted),
        _einsum("btkgf,btkgh->bkgfh", predicted, predicted),
    )


def _key_grams(key: Float[Array, "B T K D"], predicted: Float[Array, "B T K G F"]) -> Grams:
    return (
        _einsum("btkd,btke->bkde", key, key),
        _einsum("btkd,btkgf->bkgdf", key, predicted),
        _einsum("btkgf,btkgh->bkgfh", predicted, predicted),
    )


def _product(of_queries: Grams, of_keys: Grams) -> Float[Array, ""]:
    """Sum (q.k - q'.k')^2 over all pairs."""
    model, mixed, predictor = (
        jnp.vdot(x, y, precision=jax.lax.Precision.HIGHEST) for x, y in zip(of_queries, of_keys, strict=True)
    )
    return model - 2 * mixed + predictor


def _gradient(x: Float[Array, "B T K #G D"], predicted: Float[Array, "B T K G F"], others: Grams) -> Array:
    """Return what the pairs of these queries (or keys) with all others add to the gradient of the predicted ones."""
    _, mixed, predictor = others
    own = _einsum("btkgf,bkgfh->btkgh", predicted, predictor)
    if x.shape[3] == predicted.shape[3]:
        return 2 * (own - _einsum("btkgd,bkgdf->btkgf", x, mixed))
    return 2 * (own - _einsum("btkd,bkgdf->btkgf", x[:, :, :, 0], mixed))
