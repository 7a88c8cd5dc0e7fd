"""CAOTE: what losing each token does to the attention output (arXiv 2504.14051)."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Norm = Literal[1, 2, "inf"]
Group = Literal["exact", "mean"]


def score(
    A: Float[Array, "*batch S"],
    V: Float[Array, "*values S D"],
    *,
    fast: bool = False,
    norm: Norm = 2,
    mask: Bool[Array, "*values S"] | None = None,
    group: Group | None = None,
) -> Float[Array, "*values S"]:
    r"""The change of the attention output when a token is evicted, for every token (CAOTE, theorem 3.2 and eq. 8).

    With ``X = sum_j A_j v_j``, evicting token j moves the output by exactly ``A_j / (1 - A_j) * |X - v_j|``. Larger
    means: keep. A token that holds all the weight scores the dtype's largest number; a masked token, and one whose
    weight or value is not finite, scores ``-inf`` and takes no part in X.

    Args:
        A: non-negative weights that sum to 1 over the live tokens, ``[*batch, S]``. With ``group``, those of the G query heads
            that share the values, ``[*batch, G, S]``.
        V: values, ``[*batch, S, D]``.
        fast: FastCAOTE (eq. 22): the mean of the live values in place of X.
        norm: the norm of the change: 1, 2 or "inf".
        mask: which tokens are live, ``[*batch, S]``; all by default.
        group: losing a slot changes the outputs of all G query heads that share it. "exact" is the norm of those G
            changes together, ``sqrt(sum_g (A_gj / (1 - A_gj))^2 |X_g - v_j|^2)``; "mean" averages the weights over
            the group first and then takes one head's formula, as the papers' code does.

    Returns:
        Scores ``[*batch, S]`` in float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes that do not match, an unknown norm or group, NaN weights (outside jit).

    Example:
        >>> import jax.numpy as jnp
        >>> import kvjax
        >>> A = jnp.array([0.5, 0.25, 0.25])
        >>> V = jnp.array([[0.0], [2.0], [-2.0]])
        >>> kvjax.score(A, V).round(4).tolist()  # the first token's value is the output itself: losing it costs nothing
        [0.0, 0.6667, 0.6667]
    """
    A, V = jnp.asarray(A), jnp.asarray(V)
    expected = V.shape[:-1] if group is None else (*V.shape[:-2], "G", *V.shape[-2:-1])
    heads = A.shape[:-2] + A.shape[-1:] if group is not None else A.shape
    if V.ndim < 2 or heads != V.shape[:-1]:
        raise ValueError(f"weights {A.shape} and values {V.shape} do not match: for these values expected {expected}.")
    if mask is not None and mask.shape != V.shape[:-1]:
        raise ValueError(f"mask {mask.shape} and values {V.shape} do not match: expected {V.shape[:-1]}.")
    if norm not in (1, 2, "inf"):
        raise ValueError(f"unknown norm {norm!r}; there are 1, 2 and 'inf'.")
    if group not in (None, "exact", "mean"):
        raise ValueError(f"unknown group {group!r}; there are None, 'exact' and 'mean'.")
    if not isinstance(A, jax.core.Tracer) and bool(jnp.isnan(A).any()):
        raise ValueError("the weights contain NaN; softmax over a row without live tokens is the usual cause.")

    dtype = jnp.promote_types(jnp.promote_types(A.dtype, V.dtype), jnp.float32)
    A = A.astype(dtype) if group is not None else A.astype(dtype)[..., None, :]  # [*batch, G, S]
    V = V.astype(dtype)
    live = jnp.isfinite(V).all(-1) & jnp.isfinite(A).all(-2)
    live = live if mask is None else live & mask
    A = jnp.where(live[..., None, :], A, 0)
    V = jnp.where(live[..., None], V, 0)
    if group == "mean":
        A = jnp.mean(A, axis=-2, keepdims=True)

    if fast:
        output = jnp.sum(V, axis=-2) / jnp.maximum(jnp.sum(live, axis=-1), 1)[..., None].astype(dtype)
        output = output[..., None, :]  # [*batch, 1, D]
    else:
        output = jnp.einsum("...gs,...sd->...gd", A, V, precision=jax.lax.Precision.HIGHEST)
    tiny = jnp.finfo(dtype).eps
    growth = A / jnp.maximum(1 - A, tiny)  # how much the other weights gain, times A: [*batch, G, S]
    change = output[..., :, None, :] - V[..., None, :, :]  # [*batch, G, S, D]
    if norm == 1:
        scores = jnp.sum(growth * jnp.sum(jnp.abs(change), axis=-1), axis=-2)
    elif norm == 2:
        scores = _safe_sqrt(jnp.sum(growth**2 * jnp.sum(change**2, axis=-1), axis=-2))
    else:
        scores = jnp.max(growth * jnp.max(jnp.abs(change), axis=-1), axis=-2)
    holds_all = (A >= 1 - tiny).any(-2)
    scores = jnp.where(holds_all, jnp.finfo(dtype).max, scores)
    return jnp.where(live, scores, -jnp.inf)


def _safe_sqrt(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """sqrt whose gradient at 0 is 0, not NaN."""
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), 0)
