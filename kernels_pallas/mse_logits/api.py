"""The loss of predicted attention logits: the call, its checks, and the choice of an implementation."""

from __future__ import annotations

from jaxtyping import Array, Bool, Float

from kernels_pallas.dispatch import Implementation, dispatch


def mse_logits(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    predicted_query: Float[Array, "B T N F"],
    predicted_key: Float[Array, "B T M F"],
    valid: Bool[Array, "B T"] | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    block: int = 128,
    implementation: Implementation = "auto",
) -> Float[Array, ""]:
    """Compute the mean over pairs and heads of ``(scale q_i.k_j - q'_i.k'_j / sqrt(F))^2``, a layer's loss.

    The paper (arXiv 2503.07518, section 3.2) takes all T x T pairs, "before causal masking"; ``causal=True`` takes only
    those that a query sees, ``j <= i``. Every pair of every row has the same weight. Query head n reads KV head
    ``n // (N / K)``, and likewise one of the predictor's M key heads (M = N in the paper). Gradients flow only to
    ``predicted_query`` and ``predicted_key``. They are computed together with the loss, so that a backward pass
    through many layers needs none of the model's queries and keys.

    Args:
        query, key: the model's, rotated.
        predicted_query, predicted_key: the predictor's q' and k', rotated.
        valid: which tokens count, all by default; the content of padding does not matter.
        causal: take only the pairs that a query sees.
        scale: factor of the model's logits, D ** -0.5 by default.
        block: tokens per block where ``causal``; time and memory grow with T x block, never with T x T.
        implementation: "auto" takes the fastest one that can run here; one given by name runs or raises.

    Returns:
        The loss in float32 (float64 for float64 inputs), 0 where there is no pair.

    Raises:
        ValueError: if shapes do not fit, the block is below 1, or the implementation is unknown.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from kernels_pallas import mse_logits
        >>> q = k = jnp.ones((1, 3, 1, 4))  # logits of 2
        >>> loss = jax.jit(mse_logits)
        >>> loss(q, k, q / 2, k).item(), loss(q, k, 0 * q, k).item()
        (1.0, 4.0)
    """
    B, T, N, D = query.shape
    if key.shape[:2] != (B, T) or key.shape[3:] != (D,) or N % key.shape[2]:
        given = f"query {query.shape} and key {key.shape}"
        raise ValueError(f"{given} do not fit: expected [B, T, N, D] and [B, T, K, D], N a multiple of K.")
    F = predicted_query.shape[-1]
    if predicted_query.shape != (B, T, N, F) or predicted_key.shape[:2] != (B, T) or predicted_key.shape[3:] != (F,):
        raise ValueError(
            f"predicted query {predicted_query.shape} and key {predicted_key.shape} do not fit a query {query.shape}: "
            f"expected {(B, T, N)} and {(B, T)} in front, and the same last axis."
        )
    if N % predicted_key.shape[2]:
        raise ValueError(f"the predictor's {predicted_key.shape[2]} key heads do not divide the {N} query heads.")
    if valid is not None and valid.shape != (B, T):
        raise ValueError(f"valid {valid.shape} does not fit: expected {(B, T)}, one entry per token.")
    if block < 1:
        raise ValueError(f"block is {block}; a block has at least 1 token.")
    return dispatch(
        "mse_logits",
        query,
        key,
        predicted_query,
        predicted_key,
        valid,
        causal=causal,
        scale=D**-0.5 if scale is None else scale,
        block=block,
        implementation=implementation,
    )
