"""The definition, in plain JAX."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Carried(NamedTuple):
    """Hold a joined statistic as one array, and as an array for each query head, as a cache keeps it.

    With the group as last axis a TPU would pad each slot to 128 numbers.
    """

    statistic: Float[Array, "B K G S"]
    heads: tuple[Float[Array, "B K S"], ...]


def carry_statistic(
    before: tuple[Float[Array, "B K S"], ...], now: Float[Array, "B K G S"], factors: tuple[Float[Array, "B K"], ...]
) -> Carried:
    """See :func:`kernels_pallas.carry_statistic.api.carry_statistic`."""
    own = [x[:, :, None] for x in factors]
    # Without a barrier all that reads the statistic would compute it anew.
    heads = jax.lax.optimization_barrier(tuple(joined(x, now[:, :, g], *own) for g, x in enumerate(before)))
    return Carried(jnp.stack(heads, axis=2), heads)


def joined(before: Array, now: Array, of_before: Array, of_now: Array, over: Array) -> Array:
    """Join numbers; with a factor of 0, what it would multiply may be NaN."""
    return (jnp.where(of_before == 0, 0, of_before * before) + jnp.where(of_now == 0, 0, of_now * now)) / over
