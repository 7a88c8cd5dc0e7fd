"""CAOTE: how the eviction of each token changes the attention output (arXiv 2504.14051)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from kernels_pallas.caote_topk.reference import Group, Norm, eviction_error, length, root
from kvjax._src.checks import check_types, is_known, real_array
from kvjax._src.projection import OutputProjection, measure

__all__ = ["Group", "joined_change", "score"]

ROUNDING = 0.05  # by which weights of a softmax in bfloat16 may exceed 1 when summed


def score(
    A: Float[Array, "*batch S"],
    V: Float[Array, "*values S D"],
    *,
    fast: bool = False,
    norm: Norm = 2,
    mask: Bool[Array, "*values S"] | None = None,
    group: Group | None = None,
    projection: OutputProjection | Float[Array, "... G D F"] | None = None,
    cross: bool = True,
) -> Float[Array, "*values S"]:
    r"""Compute the change of the attention output when a token is evicted, for every token (CAOTE, theorem 3.2, eq. 8).

    Evicting token j changes the output X by exactly

    .. math:: c_j = \frac{A_j}{1 - A_j} \lVert X - v_j \rVert, \qquad X = \sum_i A_i v_i.

    Tokens of larger score should be kept. A token that holds all the weight scores the dtype's largest number; a masked
    token, and one whose weight or value is not finite, scores ``-inf`` and takes no part in X.

    Args:
        A: non-negative weights that sum to 1 over the live tokens, ``[*batch, S]``. With ``group``, those of the G
            query heads that share the values, ``[*batch, G, S]``.
        V: values, ``[*batch, S, D]``.
        fast: use FastCAOTE (eq. 22), with the mean of the live values in place of X.
        norm: the norm of the change: 1, 2 or "inf".
        mask: which tokens are live, ``[*batch, S]``; all by default.
        group: evicting a slot changes the outputs of all G query heads that share it. "exact" is the norm of those G
            changes together,
            :math:`\sqrt{\sum_g \left(\frac{A_{gj}}{1 - A_{gj}}\right)^2 \lVert X_g - v_j \rVert^2}`;
            "mean" averages the weights over the group first and takes one head's formula, as the papers' code does.
        projection: W_O of the G query heads, ``[*batch, G, D, E]``, or any matrix with the same Gram, such as
            :attr:`OutputProjection.factor`. With it, the score is the change of the layer's output after W_O,
            :math:`\lVert \sum_g \frac{A_{gj}}{1 - A_{gj}} (X_g - v_j) W_O^g \rVert`. Needs ``group="exact"`` and
            norm 2.
        cross: False leaves out the cross terms between query heads,
            :math:`\sqrt{\sum_g \lVert \frac{A_{gj}}{1 - A_{gj}} (X_g - v_j) W_O^g \rVert^2}`, at 1 / G of the
            cost and with no more than :attr:`OutputProjection.gram`.

    Returns:
        Scores ``[*batch, S]`` in float32 (float64 for float64 inputs).

    Raises:
        ValueError: if shapes do not match, the norm or group is unknown, a projection comes with a norm or group that
            it does not support, or weights are NaN, negative, or add up to more than 1. Under jit weights are not
            known: the scores of such weights are wrong, up to the largest number. ``with jax.disable_jit():`` checks
            them there as well.

    Example:
        >>> import jax.numpy as jnp
        >>> import kvjax
        >>> A = jnp.array([0.5, 0.25, 0.25])
        >>> V = jnp.array([[0.0], [2.0], [-2.0]])
        >>> # the first token's value is the output itself: losing it costs nothing
        >>> kvjax.score(A, V).round(4).tolist()
        [0.0, 0.6667, 0.6667]
    """
    check_types({"norm": norm, "group": group}, {"norm": Norm, "group": Group | None})
    A, V = real_array("A", A), real_array("V", V)
    mask = None if mask is None else real_array("mask", mask)
    heads = A.shape if group is None else (*A.shape[:-2], *A.shape[-1:])
    if V.ndim < 2 or not V.shape[-2] or heads != V.shape[:-1] or A.ndim != V.ndim - (group is None):
        expected = f"[*batch, {'S' if group is None else 'G, S'}] and [*batch, S, D], S from 1"
        raise ValueError(f"weights {A.shape} and values {V.shape} do not match: expected {expected}.")
    if mask is not None and (mask.shape != V.shape[:-1] or mask.dtype != bool):
        raise ValueError(f"the mask is {mask.dtype} {mask.shape}; expected bool {V.shape[:-1]}, True for a live token.")
    if projection is not None and (norm != 2 or group != "exact"):
        raise ValueError(f"a projection needs norm=2 and group='exact', but they are {norm!r} and {group!r}.")
    if projection is None and not cross:
        raise ValueError("cross=False leaves out cross terms in W_O; give a projection, or take cross=True.")

    dtype = jnp.promote_types(jnp.promote_types(A.dtype, V.dtype), jnp.float32)
    join = None
    if projection is not None:
        behind = measure(projection, cross, (*A.shape[:-1], V.shape[-1]), dtype)
        join = functools.partial(joined_change, behind=behind)
    if is_known(A, mask):
        _check_weights(np.asarray(A), mask if mask is None or group is None else np.asarray(mask)[..., None, :])
    errors = eviction_error if join is not None or not is_known(A, V, mask) else _errors
    return errors(
        A if group is not None else A[..., None, :],
        V,
        jnp.ones(V.shape[:-1], bool) if mask is None else mask,
        fast=fast,
        norm=norm,
        group="mean" if group == "mean" else "exact",
        join=join,
    )


# Outside jit, one program in place of some fifty operations.
_errors = jax.jit(eviction_error, static_argnames=("fast", "norm", "group", "join"))


def _check_weights(A: np.ndarray, mask: Any) -> None:
    """Check that known weights are those of a softmax; under jit nobody knows them."""
    A = A.astype(np.float32)
    if not A.size:
        return
    if np.isnan(A).any():
        raise ValueError("the weights contain NaN; softmax over a row without live tokens is the usual cause.")
    live = np.where(np.isfinite(A) & (True if mask is None else np.asarray(mask)), A, 0)
    lowest, most = live.min(), live.sum(axis=-1).max()
    if lowest < 0 or most > 1 + ROUNDING:
        what = f"a weight is {lowest:.3g}" if lowest < 0 else f"the weights of a row add up to {most:.3g}"
        raise ValueError(f"{what}; expected weights of a softmax, from 0 and with a sum of 1 over the live tokens.")


def joined_change(
    ratio: Float[Array, "*batch G S"], direction: Float[Array, "*batch G S D"], behind: OutputProjection | None
) -> Float[Array, "*batch S"]:
    """Compute the length of the changes ``ratio * direction`` of G heads together, as they are or after W_O.

    ``behind`` holds the factor of W_O, or the gram, as :func:`kvjax._src.projection.measure` returns them. The ratios
    are scaled so that squares of small ones do not underflow.
    """
    high = jax.lax.Precision.HIGHEST
    largest = jnp.max(ratio, axis=-2, keepdims=True)
    scale = jax.lax.stop_gradient(jnp.where(largest > 0, largest, 1))
    ratio = ratio / scale
    if behind is not None and behind.factor is not None:
        moved = jnp.einsum("...gsd,...gdf->...sf", ratio[..., None] * direction, behind.factor, precision=high)
        return scale[..., 0, :] * length(moved, 2)
    image = direction
    if behind is not None:
        image = jnp.einsum("...gsd,...gde->...gse", direction, behind.gram, precision=high)
    squares = jnp.sum(ratio**2 * jnp.sum(image * direction, axis=-1), axis=-2)
    return scale[..., 0, :] * root(squares)
