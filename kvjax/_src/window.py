"""The observation window where queries come one by one: statistics of all queries since the last eviction.

A block with at least as many queries as the window needs no others. A decode step has one query, which is too few for a
method that observes a window; so the statistics of the steps are kept and joined until the next eviction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas import Carried, ColumnStatistics, carry_statistic
from kernels_pallas.dispatch import Implementation
from kvjax._src.cache import HeadState, map_parts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window:
    """Statistics of each slot over the queries since the last eviction.

    ``queries`` counts these queries, ``[*L, B, K]``. ``columns`` are their statistics by name, an array
    ``[*L, B, K, S]`` per query head; they are ignored where ``queries`` is 0.
    """

    queries: HeadState
    columns: dict[str, tuple[Float[Array, "*L B K S"], ...]]

    @classmethod
    def init(cls, names: frozenset[str], B: int, K: int, G: int, S: int) -> Window:
        """Make an empty window for the statistics of these names."""
        columns = {
            name: tuple(jnp.zeros((B, K, S), jnp.float32) for _ in range(1 if name == "window_group_square" else G))
            for name in sorted(names)
        }
        return cls(HeadState(jnp.zeros((B, K), jnp.int32)), columns)


def observed(names: frozenset[str]) -> frozenset[str]:
    """Return the names of the statistics that are observed in a window, and of those that joining them needs."""
    # Joining the variances, or the places, of two groups of queries needs their means.
    more = {"window_mean"} if names & {"window_variance", "window_place"} else set()
    return frozenset(name for name in names if name.startswith("window_")) | more


def join(
    window: Window,
    columns: ColumnStatistics,
    entered: Int[Array, "B"],
    size: int,
    implementation: Implementation = "auto",
) -> tuple[ColumnStatistics, Window]:
    """Join the statistics of a block with those of the queries before it, since the last eviction.

    A row with ``size`` queries or more in the block takes the block's statistics alone; a row without any query keeps
    its own, bit for bit.

    Args:
        columns: the block's statistics, ``[B, K, G, S]``.
        entered: how many queries each row has in the block.
        size: the size of the observation window.
        implementation: that of :func:`kernels_pallas.carry_statistic`.

    Returns:
        The statistics for the scores, and the window to keep.
    """
    before = window.queries.value
    new = jnp.minimum(entered, size)[:, None]
    alone, none = (before == 0) | (new >= size), (new == 0) & (before > 0)
    count = jnp.where(alone, new, before + new)
    counts = jnp.broadcast_arrays(before, new, jnp.maximum(count, 1))
    m, n, both = (x.astype(jnp.float32) for x in counts)
    now = {name: getattr(columns, name) for name in window.columns}

    def carried(name: str) -> Carried:
        factors: Any = (m, n, both) if name == "window_mean" else (1.0, 1.0, 1.0)
        those = zip((0.0, 1.0, 1.0), (1.0, 0.0, 1.0), factors, strict=True)
        of_rows: Any = tuple(jnp.where(alone, a, jnp.where(none, b, c)) for a, b, c in those)
        return carry_statistic(window.columns[name], now[name], of_rows, implementation=implementation)

    def chosen(name: str) -> Carried:
        together = _JOINED[name](old, now, *(x[:, :, None, None] for x in (m, n, both)))
        joined = jnp.where(alone[:, :, None, None], now[name], together)
        joined = jnp.where(none[:, :, None, None], old[name], joined)
        return Carried(joined, tuple(jnp.moveaxis(joined, 2, 0)))

    old = {name: jnp.stack(parts, axis=2) for name, parts in window.columns.items()}
    joined = {name: chosen(name) if name in _JOINED else carried(name) for name in now}
    kept = {name: each.heads for name, each in joined.items()}
    return columns._replace(**{name: each.statistic for name, each in joined.items()}), Window(HeadState(count), kept)


def _places(old: dict[str, Array], now: dict[str, Array], m: Array, n: Array, both: Array) -> Array:
    """Join the places; the new queries come behind the old ones, whose places they raise."""
    return (m * (old["window_place"] + n * old["window_mean"]) + n * now["window_place"]) / both


def _variances(old: dict[str, Array], now: dict[str, Array], m: Array, n: Array, both: Array) -> Array:
    """Join the variances (Chan et al., "Updating formulae and a pairwise algorithm", 1979)."""
    between = (now["window_mean"] - old["window_mean"]) ** 2 * (m * n / both)
    own, new = old["window_variance"] * jnp.maximum(m - 1, 0), now["window_variance"] * jnp.maximum(n - 1, 0)
    return (own + new + between) / jnp.maximum(both - 1, 1)


# How the statistics of m queries and of n more are joined where it is neither a mean nor a sum.
_JOINED: dict[str, Callable[..., Array]] = {
    "window_max": lambda old, now, *_: jnp.maximum(old["window_max"], now["window_max"]),
    "window_place": _places,
    "window_variance": _variances,
}


def begin_anew(state: Any, rows: Bool[Array, "B"]) -> Any:
    """Clear the windows of rows that have just been evicted from, in a cache's state."""

    def forget(part: Window) -> Window:
        return dataclasses.replace(part, queries=HeadState(jnp.where(rows[:, None], 0, part.queries.value)))

    return map_parts(forget, state, Window)
