"""Conversions for the kernels: rows and heads on one axis, arrays in a list."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Array, Int

from kernels_pallas.insert_token.reference import Entries, Inserted, marked


def on_heads(
    kernel: Callable[..., tuple[list[Array], list[Array], Array, Array, Array]],
    entries: Entries,
    position: Int[Array, "B K S"],
    next_position: Int[Array, "B"],
    new: Entries,
    new_position: Int[Array, "B"],
    state: list[Array],
    *,
    room: bool,
) -> Inserted:
    """Run a kernel; see :func:`kernels_pallas.insert_token.api.insert_token`."""
    B, K, S = position.shape
    names = list(entries)
    arrays, own = ([tree[name].reshape(B * K, *tree[name].shape[2:]) for name in names] for tree in (entries, new))
    lost = None if room else names.index(marked(entries))
    flat = [leaf.reshape(B * K, S, *(() if leaf.ndim == 3 else (-1,))) for leaf in state if leaf.size]
    made, zeroed, position, next_position, slot = kernel(
        arrays, own, flat, position.reshape(B * K, S), next_position, new_position, lost=lost
    )
    written = {name: x.reshape(entries[name].shape) for name, x in zip(names, made, strict=True)}
    filled = iter(zeroed)
    kept = [next(filled).reshape(leaf.shape) if leaf.size else leaf for leaf in state]
    return Inserted(written, position.reshape(B, K, S), next_position, slot.reshape(B, K), kept)
