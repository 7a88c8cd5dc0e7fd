"""A statistic that goes on from the queries before: the call, its checks, and the choice of an implementation."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.carry_statistic.reference import Carried
from kernels_pallas.dispatch import Implementation, dispatch


def carry_statistic(
    before: Sequence[Float[Array, "B K S"]],
    now: Float[Array, "B K G S"],
    factors: tuple[Float[Array, "B K"] | float, Float[Array, "B K"] | float, Float[Array, "B K"] | float],
    *,
    implementation: Implementation = "auto",
) -> Carried:
    """Join a statistic of earlier queries with that of new ones: with factors m, n and d, (m before + n now) / d.

    Sums have the factors 1, 1, 1; means of m and of n queries m, n and m + n. Under jit, where arrays are donated, the
    earlier statistic is overwritten in place.

    Args:
        factors: numbers, or one for each head; what is multiplied by 0 does not matter, even NaN.
        before: an array for each of the G query heads of a group.
        now: the statistic of the new queries, in float32.

    Returns:
        The joined statistic, once as one array, and once as an array for each query head.

    Raises:
        ValueError: if shapes do not fit, or the implementation is unknown or for another platform.
        NotImplementedError: if a kernel was given by name and can't run with these arguments.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from kernels_pallas import carry_statistic
        >>> before, now = [jnp.array([[[0.5, 0.5]]])], jnp.array([[[[0.9, 0.1]]]])
        >>> joined = jax.jit(carry_statistic)(before, now, (3.0, 1.0, 4.0))
        >>> joined.statistic.round(3).tolist(), len(joined.heads)
        ([[[[0.6000000238418579, 0.4000000059604645]]]], 1)
    """
    if now.ndim != 4 or [x.shape for x in before] != [(*now.shape[:2], now.shape[3])] * now.shape[2]:
        shapes = [x.shape for x in before]
        raise ValueError(f"{now.shape} and {shapes} do not fit: expected [B, K, G, S], and G arrays [B, K, S].")
    given = tuple(jnp.broadcast_to(jnp.asarray(x, now.dtype), now.shape[:2]) for x in factors)
    return dispatch("carry_statistic", tuple(before), now, given, implementation=implementation)
