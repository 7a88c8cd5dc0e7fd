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

from kernels_pallas import ColumnStatistics
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
    window: Window, columns: ColumnStatistics, entered: Int[Array, "B"], size: int
) -> tuple[ColumnStatistics, Window]:
    """Join the statistics of a block with those of the queries before it, since the last eviction.

    A row with ``size`` queries or more in the block takes the block's statistics alone; a row without any query keeps
    its own, bit for bit.

    Args:
        columns: the block's statistics, ``[B, K, G, S]``.
        entered: how many queries each row has in the block.
        size: the size of the observation window.

    Returns:
        The statistics for the scores, and the window to keep.
    """
    before = window.queries.value
    new = jnp.minimum(entered, size)[:, None]
    alone = (before == 0) | (new >= size)
    count = jnp.where(alone, new, before + new)
    old = {name: jnp.stack(parts, axis=2) for name, parts in window.columns.items()}
    now = {name: getattr(columns, name) for name in old}
    counts = jnp.broadcast_arrays(before, new, jnp.maximum(count, 1))
    m, n, both = (x.astype(jnp.float32)[:, :, None, None] for x in counts)

    def chosen(name: str) -> Array:
        together = _JOINED[name](old, now, m, n, both) if name in _JOINED else old[name] + now[name]
        joined = jnp.where(alone[:, :, None, None], now[name], together)
        return jnp.where((new == 0)[:, :, None, None] & (before > 0)[:, :, None, None], old[name], joined)

    joined = {name: chosen(name) for name in old}
    kept = {name: tuple(jnp.moveaxis(column, 2, 0)) for name, column in joined.items()}
    return columns._replace(**joined), Window(HeadState(count), kept)


def _places(old: dict[str, Array], now: dict[str, Array], m: Array, n: Array, both: Array) -> Array:
    """Join the places; the new queries come behind the old ones, whose places they raise."""
    return (m * (old["window_place"] + n * old["window_mean"]) + n * now["window_place"]) / both


def _variances(old: dict[str, Array], now: dict[str, Array], m: Array, n: Array, both: Array) -> Array:
    """Join the variances (Chan et al., "Updating formulae and a pairwise algorithm", 1979)."""
    between = (now["window_mean"] - old["window_mean"]) ** 2 * (m * n / both)
    own, new = old["window_variance"] * jnp.maximum(m - 1, 0), now["window_variance"] * jnp.maximum(n - 1, 0)
    return (own + new + between) / jnp.maximum(both - 1, 1)


# How the statistics of m queries and of n more are joined; the others are sums.
_JOINED: dict[str, Callable[..., Array]] = {
    "window_mean": lambda old, now, m, n, both: (m * old["window_mean"] + n * now["window_mean"]) / both,
    "window_max": lambda old, now, *_: jnp.maximum(old["window_max"], now["window_max"]),
    "window_place": _places,
    "window_variance": _variances,
}


def begin_anew(state: Any, rows: Bool[Array, "B"]) -> Any:
    """Clear the windows of rows that have just been evicted from, in a cache's state."""

    def forget(part: Window) -> Window:
        return dataclasses.replace(part, queries=HeadState(jnp.where(rows[:, None], 0, part.queries.value)))

    return map_parts(forget, state, Window)
