"""Compute how many slots and pages a cache needs; nothing else computes sizes.

A head holds what an eviction has left, and the tokens that come in before the next one. A plain cache has slots for the
fullest head. A paged cache has pages for all heads together, where they compete for slots or see sliding windows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, Required, TypedDict

import numpy as np
from jaxtyping import Int

from kvjax.allocation import UNIFORM, Allocation
from kvjax.cache import check_heads
from kvjax.checks import check_count
from kvjax.paged import pages_for
from kvjax.policy import Policy

Windows = Sequence[int | None]  # of the layers; None for a layer that sees all positions


class Demand(NamedTuple):
    """The tokens per head that a cache is to hold.

    ``held`` are those of each row after an eviction, on average where heads compete. ``room`` come in before the next
    one, of these ``step`` at once: a layer with a window has slots for them beside its window. No head ever holds more
    than ``limit``, None for no limit.
    """

    held: Int[np.ndarray, "B"]
    room: int
    step: int
    limit: int | None = None


class Capacity(NamedTuple):
    """``slots`` is the most that one head may hold; ``pages`` are those of each device's pool, 0 for a plain cache."""

    slots: int
    pages: int = 0


@dataclasses.dataclass(frozen=True)
class Layout:
    """The heads of a cache, and where they are.

    ``heads`` are those of each layer. ``ways`` are the numbers of devices that split the rows, and the heads.
    """

    heads: int
    windows: tuple[int | None, ...]
    allocation: Allocation = UNIFORM
    page_size: int = 1
    ways: tuple[int, int] = (1, 1)

    def most_held(self, tokens: int, entering: int) -> list[int]:
        """Return the most tokens that a head of each layer holds: ``tokens``, or its window and those that enter."""
        return [tokens if window is None else min(tokens, window + entering) for window in self.windows]

    def excess(self, budget: int) -> int:
        """Return how many tokens more than their mean the heads of one device may hold, summed over the layers.

        In the worst case they win every slot, or as many as ``cap`` lets them hold.
        """
        ways = self.ways[1]
        if self.allocation.alike or ways == 1:
            return 0
        mean = sum(self.most_held(budget, 0))
        most = sum(self.most_held(self.allocation.most(len(self.windows), self.heads, budget), 0))
        return min(ways * mean, most) - mean

    def most_in_a_head(self, held: int, demand: Demand) -> int:
        """Return the most tokens that a head of any layer may hold, where all heads hold ``held`` on average."""
        most = self.allocation.most(len(self.windows), self.heads, held)
        return max(self.most_held(most + demand.room, demand.step))

    def slots_of_rows(self, demand: Demand) -> Int[np.ndarray, "B 1"]:
        """Return the most slots that the heads of a device use together, for each row."""
        limit, slots = math.inf if demand.limit is None else demand.limit, []
        for held in map(int, demand.held):
            within = min(held + demand.room, limit)
            whole = sum(self.most_held(int(within), demand.step)) + self.excess(held)
            slots.append(whole if demand.limit is None else min(whole, sum(self.most_held(demand.limit, demand.step))))
        return np.array(slots)[:, None] * (self.heads // self.ways[1])

    def on_devices(self, held: Int[np.ndarray, "B heads"]) -> Int[np.ndarray, "B ways"]:
        """Sum what the heads of all layers hold over the heads that share a device, for each row."""
        ways = self.ways[1]
        return held.reshape(len(held), -1, ways, self.heads // ways).sum(axis=(1, 3))

    def pages(self, slots: Int[np.ndarray, "B ways"]) -> int:
        """Return the pages of the device that needs most, whose heads use ``slots`` together in each row."""
        rows = len(slots) // self.ways[0]
        fullest = slots.reshape(self.ways[0], rows, -1).sum(axis=1).max()
        return pages_for(int(fullest), rows * self.heads // self.ways[1] * len(self.windows), self.page_size)


def capacity(layout: Layout, demand: Demand, paged: bool) -> Capacity:
    """Return how many slots, and pages, a cache needs.

    Args:
        paged: whether heads have pages; see :func:`in_pages`.

    Example:
        >>> import numpy as np
        >>> from kvjax.capacity import Demand, Layout, capacity
        >>> demand = Demand(held=np.array([24]), room=8, step=8)
        >>> capacity(Layout(heads=2, windows=(None, None)), demand, paged=False)
        Capacity(slots=32, pages=0)
        >>> capacity(Layout(2, (8, None), page_size=16), demand, paged=True)
        Capacity(slots=32, pages=9)
    """
    largest, limit = int(demand.held.max()), math.inf if demand.limit is None else demand.limit
    if not paged:
        return Capacity(int(min(largest + demand.room, limit)))
    slots = min(layout.most_in_a_head(largest, demand), limit)
    return Capacity(int(slots), layout.pages(layout.slots_of_rows(demand)))


def in_pages(policy: Policy, budget: int, windows: Windows) -> bool:
    """Return whether heads hold different numbers of tokens, by the allocation or by a window below the budget."""
    return not policy.allocation.even or min(window or budget for window in windows) < budget


class ModelSizes(TypedDict, total=False):
    """The sizes of a model that its cache follows, as keyword arguments; see :func:`kvjax.empty_cache`."""

    kv_heads: Required[int]
    head_dim: Required[int]
    query_heads: int | None
    layers: int | None
    batch: int
    windows: Windows | None


def model_sizes(
    *,
    kv_heads: int,
    head_dim: int,
    query_heads: int | None = None,
    layers: int | None = None,
    batch: int = 1,
    windows: Windows | None = None,
) -> tuple[int, int, int, int | None, int, tuple[int | None, ...]]:
    """Return :class:`ModelSizes` in order, with their defaults, after a check that they fit each other."""
    batch, kv_heads, head_dim, layers = check_heads(batch, kv_heads, head_dim, layers)
    query_heads = kv_heads if query_heads is None else check_count("query_heads", query_heads, 1, "give at least 1")
    if query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads were given for {kv_heads} KV heads; expected a multiple.")
    return kv_heads, head_dim, query_heads, layers, batch, check_windows(windows, layers or 1)


def check_windows(windows: Windows | None, layers: int) -> tuple[int | None, ...]:
    """Check the sliding windows of the layers, and return one entry per layer, None for a layer without one."""
    if windows is None:
        return (None,) * layers
    if isinstance(windows, str) or not isinstance(windows, Sequence) or len(windows) != layers:
        raise ValueError(f"windows is {windows!r}; expected a size or None for each of {layers} layers.")
    wanted = "a query sees at least 1 position; give None for a layer without a window"
    return tuple(None if window is None else check_count("a window", window, 1, wanted) for window in windows)


def rounded_up(size: int, of_octave: int = 8, beside: int = 0) -> int:
    """Round a size up to one of a few per octave, so that few programs are compiled.

    Args:
        of_octave: how many sizes there are between a power of two and the next one; with 8 at most an eighth is spare.
        beside: other slots of the same buffer, which count for the octave and are not rounded: with them, budgets that
            are powers of two stay as they are.
    """
    step = max((1 << (size + beside).bit_length() - 1) // of_octave, 1)
    return -(-size // step) * step
