"""The way into the kernels and back: queries by the group of their KV head, statistics by query head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.cache_attention.queries import describe
from kernels_pallas.cache_attention.reference import ColumnStatistics
from kernels_pallas.partition import over_heads

_FAR = 2**31 - 1


def span_of(sliding_window: Int[Array, ""] | int | None) -> Int[Array, "1"]:
    """How many positions a query sees, itself included, as the kernels take it.

    Example:
        >>> from kernels_pallas.cache_attention.groups import span_of
        >>> span_of(7).tolist()
        [7]
    """
    return jnp.asarray(_FAR if sliding_window is None else sliding_window, jnp.int32).reshape(1)


def in_groups(
    kernel: Callable[..., tuple[Array, ...]],
    axes: str,
    query: Float[Array, "B T N D"],
    query_position: Int[Array, "B T"],
    arrays: Sequence[tuple[str, Any]],
    *,
    names: tuple[str, ...],
    kv_heads: int,
    window: int,
    split: bool,
) -> tuple[Float[Array, "B T N D"], ColumnStatistics]:
    """Runs a kernel on queries by group.

    Args:
        kernel: ``(query, about, *arrays)`` gives the output, like the queries, and statistics ``[B, K, heads, S]``.
        axes: of the queries as the kernel takes them, some order of "b t k g d".
        arrays: axes and array of all else; see :func:`kernels_pallas.partition.over_heads`.
        names: the statistics that the kernel gives.
        split: whether a mesh may share out rows and KV heads over its devices.

    Example:
        >>> import jax.numpy as jnp
        >>> from kernels_pallas.cache_attention.groups import in_groups
        >>> q, position = jnp.ones((1, 3, 4, 8)), jnp.zeros((1, 3), int)
        >>> options = dict(names=(), kv_heads=2, window=0, split=False)
        >>> in_groups(lambda q, about: (jnp.full(q.shape, q.ndim),), "b k t g d", q, position, [], **options)[0].shape
        (1, 3, 4, 8)
    """
    B, T, N, D = query.shape
    order = ["b t k g d".split().index(axis) for axis in axes.split()]
    grouped = query.reshape(B, T, kv_heads, N // kv_heads, D).transpose(order)
    if split:
        columns = ["b k o s" if name == "window_group_square" else "b k g s" for name in names]
        kernel = over_heads(kernel, [axes, "b t c", *(named for named, _ in arrays)], [axes, *columns])
    out, *found = kernel(grouped, describe(query_position, window), *(array for _, array in arrays))
    flat = (column.reshape(B, -1, column.shape[-1]) for column in found)
    back = sorted(range(len(order)), key=order.__getitem__)
    return out.transpose(back).reshape(B, T, N, D), ColumnStatistics(**dict(zip(names, flat, strict=True)))
