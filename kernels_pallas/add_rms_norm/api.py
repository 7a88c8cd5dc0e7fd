"""Addition and RMS norm: the call, its checks, and the choice of an implementation."""

from __future__ import annotations

from jaxtyping import Array, Float

from kernels_pallas.dispatch import Implementation, dispatch


def add_rms_norm(
    x: Float[Array, "rows E"],
    parts: Float[Array, "P more E"],
    weight: Float[Array, "E"],
    *,
    epsilon: float,
    offset: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "rows E"], Float[Array, "rows E"]]:
    """Add what a product adds to hidden states, and norm the sum: ``x + sum(parts)``, and its RMS norm.

    Args:
        parts: of the product, summed in float32 and rounded to the dtype of ``x`` before they are added. There may be
            more rows than those of ``x``, which are not read.
        weight: the norm's, of the dtype of ``x``.
        epsilon: is added to the mean of the squares.
        offset: whether the norm multiplies by 1 + weight.

    Returns:
        The sum and its norm, both rounded to the dtype of ``x``.

    Raises:
        ValueError: if shapes do not fit, or the implementation is unknown or for another platform.
        NotImplementedError: if a kernel was given by name and can't run with these arguments.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from kernels_pallas import add_rms_norm
        >>> x, parts = jnp.array([[1.0, 2.0]]), jnp.array([[[1.0, 0.0]], [[1.0, 2.0]]])
        >>> total, normed = jax.jit(lambda *given: add_rms_norm(*given, epsilon=3.5))(
        ...     x, parts, jnp.array([1.0, 2.0])
        ... )
        >>> total.tolist(), normed.round(3).tolist()
        ([[3.0, 4.0]], [[0.75, 2.0]])
    """
    (rows, E), fits = x.shape, parts.ndim == 3
    if not fits or parts.shape[1] < rows or parts.shape[2] != E or weight.shape != (E,):
        raise ValueError(f"hidden states {x.shape}, parts {parts.shape} and weights {weight.shape} do not fit.")
    given = x, parts, weight
    return dispatch("add_rms_norm", *given, epsilon=epsilon, offset=offset, implementation=implementation)
