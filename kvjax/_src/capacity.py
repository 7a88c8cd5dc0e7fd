"""What a cache is made of, and how many slots and pages it needs; nothing else computes sizes.

A head holds what an eviction has left, and the tokens that come in before the next one, but no more than its layer's
sliding window and those that come in at once. A plain cache has slots for the fullest head of each layer. A paged cache
has pages for all heads together, where they compete for slots.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Required, TypedDict

import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Int

from kvjax._src.cache import Positions, check_heads
from kvjax._src.checks import check_count
from kvjax._src.layer_caches import Recurrent
from kvjax._src.paged import pages_for
from kvjax._src.policy import Policy
from kvjax._src.quantise import FLOAT32, Dtypes
from kvjax.allocation import UNIFORM, Allocation

Windows = Sequence[int | None]  # of the layers; None for a layer that sees all positions


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """All that an empty cache is made of; :func:`kvjax._src.new_caches.blank` makes it.

    Example:
        >>> from kvjax._src.capacity import CacheSpec
        >>> spec = CacheSpec(batch=1, kv_heads=2, head_dim=8, windows=(8, None))
        >>> spec = spec.sized([24], room=8)
        >>> spec.layer_slots, spec.slots
        ((16, 32), 32)
    """

    batch: int
    kv_heads: int  # of each layer, at most
    head_dim: int
    group: int = 1  # the query heads that share each
    layers: int | None = None  # those with a KV cache; None for a cache of one layer
    windows: tuple[int | None, ...] = (None,)  # one entry per layer
    policy: Policy | None = None
    dtype: Dtypes = FLOAT32
    positions: Positions = "absolute"
    mesh: Mesh | AbstractMesh | None = None
    page_size: int = 1
    layer_slots: tuple[int, ...] = ()  # per head of each layer; of pages, one number: the most that a head may hold
    rotated: int | None = None  # of a cache of latents, which has no values of its own; see :meth:`Stored.value`
    pages: int = 0  # of each device's pool, 0 for a plain cache
    # Of the cache that a prompt comes into, whole or under a larger budget; () if it is the one that is left.
    prompt_slots: tuple[int, ...] = ()
    prompt_pages: int = 0
    recurrent: Recurrent = ()  # of the layers without a KV cache
    layer_heads: tuple[tuple[int, int], ...] = ()  # the KV heads and head dim of each layer, where layers differ

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """Return the KV heads and the head dim of each layer."""
        return self.layer_heads or ((self.kv_heads, self.head_dim),) * (self.layers or 1)

    @property
    def allocation(self) -> Allocation:
        """Return the policy's allocation; without a policy all heads hold the same number of tokens."""
        return UNIFORM if self.policy is None else self.policy.allocation

    @property
    def first(self) -> CacheSpec:
        """Return the cache that a prompt comes into, which may be larger than the one that is left of it."""
        if not self.prompt_slots:
            return self
        own: Any = dict(layer_slots=self.prompt_slots, pages=self.prompt_pages)
        return dataclasses.replace(self, **own, prompt_slots=(), prompt_pages=0)

    @property
    def slots(self) -> int:
        """Return the most slots that a head has, or may have in pages."""
        return max(self.layer_slots)

    def sized(
        self,
        held: Int[np.ndarray, "B"] | Sequence[int],
        room: int,
        step: int | None = None,
        limit: float = math.inf,
    ) -> CacheSpec:
        """Return the spec with the slots that it needs; where the allocation is uneven, with pages.

        Args:
            held: the tokens per head of each row after an eviction, on average where heads compete.
            room: the tokens that come in before the next eviction.
            step: how many of them come in at once, all by default: a layer with a window has slots for those beside it.
            limit: the most tokens that a head ever holds.
        """
        step = room if step is None else step
        widest = self.allocation.most(len(self.windows), self.kv_heads, int(max(held)))
        slots = most_held(self.windows, min(widest + room, limit), step)
        if self.allocation.even:
            return dataclasses.replace(self, layer_slots=tuple(map(int, slots)), pages=0)
        ways, of_rows, most = ways_of(self.mesh)[1], [], sum(most_held(self.windows, limit, step))
        for tokens in map(int, held):
            more = beyond_mean(self.allocation, self.windows, self.kv_heads, ways, tokens)
            of_rows.append(min(sum(most_held(self.windows, min(tokens + room, limit), step)) + more, most))
        of_devices = np.array(of_rows, int)[:, None] * (self.kv_heads // ways)
        return dataclasses.replace(self, layer_slots=(int(max(slots)),), pages=self.pages_of(of_devices))

    def pages_of(self, slots: Int[np.ndarray, "B ways"]) -> int:
        """Return the pages of the device that needs most, whose heads use ``slots`` together in each row."""
        data, tensor = ways_of(self.mesh)
        rows = len(slots) // data
        fullest = slots.reshape(data, rows, -1).sum(axis=1).max()
        return pages_for(int(fullest), rows * self.kv_heads // tensor * len(self.windows), self.page_size)

    def on_devices(self, held: Int[np.ndarray, "B heads"]) -> Int[np.ndarray, "B ways"]:
        """Sum what the heads of all layers hold over the heads that share a device, for each row."""
        ways = ways_of(self.mesh)[1]
        return held.reshape(len(held), -1, ways, self.kv_heads // ways).sum(axis=(1, 3))


def ways_of(mesh: Mesh | AbstractMesh | None) -> tuple[int, int]:
    """Return how many devices of a mesh split the rows, and the heads of each layer."""
    return (1, 1) if mesh is None else (mesh.shape["data"], mesh.shape["tensor"])


def most_held(windows: Windows, tokens: float, entering: int) -> list[float]:
    """Return the most tokens that a head of each layer holds: ``tokens``, or its window and those that enter."""
    return [tokens if window is None else min(tokens, window + entering) for window in windows]


def beyond_mean(allocation: Allocation, windows: Windows, heads: int, ways: int, budget: int) -> int:
    """Return how many tokens more than their mean the heads of one of ``ways`` devices may hold, in all layers.

    In the worst case they win every slot, or as many as ``cap`` lets them hold.
    """
    if allocation.alike or ways == 1:
        return 0
    mean = sum(most_held(windows, budget, 0))
    most = sum(most_held(windows, allocation.most(len(windows), heads, budget), 0))
    return int(min(ways * mean, most) - mean)


def rounded_up(size: int) -> int:
    """Round a number of tokens up to one of eight per octave, so that few programs are compiled.

    At most an eighth is spare, and powers of two stay as they are.
    """
    step = max((1 << size.bit_length() - 1) // 8, 1)
    return -(-size // step) * step


class ModelSizes(TypedDict, total=False):
    """The sizes of a model that its cache follows, as keyword arguments; see :func:`kvjax.empty_cache`."""

    kv_heads: Required[int | Sequence[int]]
    head_dim: Required[int | Sequence[int]]
    query_heads: int | None
    layers: int | None
    batch: int
    windows: Windows | None
    rotated: int | None
    recurrent: Recurrent


def model_sizes(
    *,
    kv_heads: int | Sequence[int],
    head_dim: int | Sequence[int],
    query_heads: int | None = None,
    layers: int | None = None,
    batch: int = 1,
    windows: Windows | None = None,
    rotated: int | None = None,
    recurrent: Recurrent = (),
) -> CacheSpec:
    """Check :class:`ModelSizes`, and return a spec with them, without slots."""
    each = [_of_layers(name, own, layers) for name, own in dict(kv_heads=kv_heads, head_dim=head_dim).items()]
    made = {(heads, dim): check_heads(batch, heads, dim, layers) for heads, dim in zip(*each, strict=True)}
    batch, _, _, layers = next(iter(made.values()))
    layer_heads = tuple(made[own][1:3] for own in zip(*each, strict=True))
    most, largest = max(heads for heads, _ in layer_heads), max(dim for _, dim in layer_heads)
    N = most if query_heads is None else check_count("query_heads", query_heads, 1, "give at least 1")
    for heads, _ in layer_heads:
        if N % heads:
            raise ValueError(f"{N} query heads were given for {heads} KV heads; expected a multiple.")
    if rotated is not None:
        check_count("rotated", rotated, 0, "give how many numbers of a latent's key are rotated, or None for values")
        if rotated % 2 or largest % 2 or rotated >= largest:
            raise ValueError(f"rotated is {rotated} of {largest} numbers; expected pairs, and fewer than all.")
    if recurrent and layers is None:
        raise ValueError("recurrent was given for a cache of one layer; give the number of layers with a KV cache.")
    others: Any = dict(
        rotated=rotated, recurrent=recurrent, layer_heads=layer_heads if len(set(layer_heads)) > 1 else ()
    )
    return CacheSpec(batch, most, largest, N // most, layers, check_windows(windows, layers or 1), **others)


def _of_layers(name: str, given: Any, layers: int | None) -> tuple[Any, ...]:
    """Return a size of each layer, where one may be given for all."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        return (given,) * (layers if isinstance(layers, int) and layers > 0 else 1)
    if len(given) != (layers or 1):
        raise ValueError(f"{name} has {len(given)} entries for {layers or 1} layers; give one number, or one each.")
    return tuple(given)


def check_windows(windows: Windows | None, layers: int) -> tuple[int | None, ...]:
    """Check the sliding windows of the layers, and return one entry per layer, None for a layer without one."""
    if windows is None:
        return (None,) * layers
    if isinstance(windows, str) or not isinstance(windows, Sequence) or len(windows) != layers:
        raise ValueError(f"windows is {windows!r}; expected a size or None for each of {layers} layers.")
    wanted = "a query sees at least 1 position; give None for a layer without a window"
    return tuple(None if window is None else check_count("a window", window, 1, wanted) for window in windows)
