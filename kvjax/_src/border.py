"""The border between a mesh and its devices: inside it all is one device's own, and nothing knows of a mesh.

The axis "data" of a mesh splits the rows, and "tensor" the KV heads; devices along any other axis work alike. What
attends, inserts or evicts calls :func:`enter`, which runs it by one ``jax.shard_map`` on each device's part of a plain
or a paged cache. There ``cache.axis`` names the axis over which a policy joins the heads of a layer. A cache that is on
no mesh, or in a ``shard_map`` already, is its own part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from kernels_pallas.dispatch import Implementation
from kvjax._src.cache import CACHE, PARTS, AnyKind, PyTree

ROWS, HEADS = "data", "tensor"
OF_ROWS: Any = PartitionSpec(ROWS)  # [B, ...]
OF_HEADS: Any = PartitionSpec(ROWS, HEADS)  # [B, K, ...]
OF_TOKENS: Any = PartitionSpec(ROWS, None, HEADS)  # [B, T, K, ...]
OF_QUERY_HEADS: Any = PartitionSpec(HEADS)  # [N, ...]
SAME: Any = PartitionSpec()  # on all devices


def enter(cache: Any, function: Callable[..., Any], *others: tuple[PyTree, Any], outputs: Any) -> Any:
    """Return what a function returns for each device's part of a cache, or for the whole cache where there is no mesh.

    Args:
        others: what else the function takes, and how a mesh splits it; see :func:`on_devices`.
        outputs: how a mesh splits what it returns; ``CACHE`` for the cache.
    """
    names = [] if cache.paged else _splitting((cache, axes_of(cache)), *others)
    if not names:
        return cache.read(function, *others, outputs=outputs)
    part = _with_axis(cache, HEADS if HEADS in names else cache.axis)
    whole = axes_of(part)
    of_parts = jax.tree.map(lambda own: whole if own is CACHE else own, outputs)
    made = split(function, (part, whole), *others, outputs=of_parts)
    return where(CACHE, lambda own: _with_axis(own, cache.axis), outputs, made)


def split(function: Callable[..., Any], *given: tuple[PyTree, Any], outputs: Any) -> Any:
    """Return what a function returns for each device's part of what is given, in no cache; see :func:`enter`."""
    trees, axes = (tuple(own[at] for own in given) for at in (0, 1))
    names = _splitting(*given)
    return on_devices(function, axes, outputs, mesh_of(*trees), names)(*trees) if names else function(*trees)


def on_devices(
    function: Callable[..., Any], inputs: tuple[Any, ...], outputs: Any, mesh: Any, names: Sequence[str] = (ROWS, HEADS)
) -> Callable[..., Any]:
    """Wrap a function so that each device of a mesh runs it on its own part of the arguments.

    Args:
        inputs: for each argument how the mesh splits it, a PartitionSpec or a tree of them; or ``PARTS`` for what has
            one part per device, which the function gets without the axes ``[data, tensor]``.
        outputs: likewise for what it returns.
        names: the axes of the mesh that split anything.
    """

    def of_device(*arguments: Any) -> Any:
        own = where(PARTS, lambda tree: jax.tree.map(lambda leaf: leaf[0, 0], tree), inputs, arguments)
        return where(PARTS, lambda tree: jax.tree.map(lambda leaf: leaf[None, None], tree), outputs, function(*own))

    def spec(axes: Any) -> PartitionSpec:
        return OF_HEADS if axes is PARTS else PartitionSpec(*(axis if axis in names else None for axis in axes))

    check_automatic(mesh)
    # check_vma: a kernel's outputs, and what is the same along an axis, do not say over which axes they vary.
    specs: Any = jax.tree.map(spec, (inputs, outputs))
    return jax.shard_map(of_device, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)


def where(kind: object, function: Callable[[Any], Any], axes: Any, tree: PyTree) -> Any:
    """Return a tree after a function of its parts that are split in one way, ``PARTS`` or ``CACHE``."""
    return jax.tree.map(lambda own, part: function(part) if own is kind else part, axes, tree)


def axes_of(cache: Any) -> Any:
    """Return how a mesh splits each array of a plain cache, or of the caches of a model's layers."""
    made = cache.map(lambda own: dataclasses.replace(jax.tree.map(lambda _: OF_HEADS, own), next_position=OF_ROWS))
    return made.map_states(lambda _: OF_ROWS)


def axes_of_heads(cache: AnyKind) -> Any:
    """Return how a mesh splits an array ``[*L, B, K, ...]`` of all heads of a cache."""
    return PartitionSpec(*(None,) * (len(cache.heads_shape) - 2), ROWS, HEADS)


def axes_of_budget(budget: Any) -> Any:
    """Return how a mesh splits a budget, one number or one per row, or several such."""
    return jax.tree.map(lambda own: OF_ROWS if np.ndim(own) else SAME, budget)


def mesh_of(*trees: PyTree) -> Any:
    """Return the mesh of some arrays, or else the current abstract mesh, which is empty where none is set."""
    meshes = (jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(trees))
    return next((mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh())


def _splitting(*given: tuple[PyTree, Any]) -> list[str]:
    """Return the axes of the mesh that split what is given: of several devices, whose number divides the arrays' axes.

    A mesh is ours if it has both axes, or no other. What is on another one is XLA's to split.
    """
    trees, axes = [tree for tree, _ in given], [axes for _, axes in given]
    mesh = mesh_of(trees)
    wide = _automatic(mesh)
    ours = {ROWS, HEADS} <= set(mesh.axis_names) or set(wide) <= {ROWS, HEADS}
    if not wide or not ours:
        return []
    leaves = zip(jax.tree.leaves(trees), jax.tree.leaves(jax.tree.broadcast(axes, trees)), strict=True)
    undivided = {name for leaf, own in leaves for at, name in enumerate(own) if leaf.shape[at] % wide.get(name, 1)}
    return [name for name in (ROWS, HEADS) if name in wide and name not in undivided]


def _automatic(mesh: Any) -> dict[str, int]:
    """Return the sizes of a mesh's axes of several devices, but for those of a caller's ``shard_map``."""
    sizes = zip(mesh.shape.items(), mesh.axis_types, strict=True)
    return {name: size for (name, size), kind in sizes if kind != AxisType.Manual and size > 1}


def implementation_for(wanted: Implementation, *trees: PyTree) -> Implementation:
    """Return an operation's implementation: "auto" is the reference where XLA splits arrays, as it cannot a kernel."""
    return "reference" if wanted == "auto" and _automatic(mesh_of(*trees)) else wanted


def check_mesh(mesh: Mesh | AbstractMesh, batch: int, kv_heads: int) -> tuple[int, int]:
    """Return how many devices split the rows and the heads of a cache, after a check that they divide them."""
    if not {ROWS, HEADS} <= set(mesh.axis_names):
        raise ValueError(f"the mesh has axes {mesh.axis_names}; expected {ROWS!r} for rows and {HEADS!r} for heads.")
    check_automatic(mesh)
    rows, heads = mesh.shape[ROWS], mesh.shape[HEADS]
    if batch % rows or kv_heads % heads:
        raise ValueError(f"{ROWS}={rows} and {HEADS}={heads} do not divide {batch} rows and {kv_heads} heads.")
    return rows, heads


def check_automatic(mesh: Mesh | AbstractMesh) -> None:
    """Check that a mesh has no explicit axes."""
    if AxisType.Explicit in mesh.axis_types:
        raise ValueError("the mesh has explicit axes; expected automatic ones, as those of jax.sharding.Mesh.")


def on_mesh[Plain: AnyKind](cache: Plain, mesh: Mesh | AbstractMesh) -> Plain:
    """Return a plain cache with its rows and heads split over a mesh."""
    check_automatic(mesh)

    def place(leaf: Array, axes: PartitionSpec) -> Array:
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, axes))

    return jax.tree.map(place, cache, axes_of(cache))


def _with_axis(cache: Any, axis: Any) -> Any:
    return cache.map(lambda own: dataclasses.replace(own, axis=axis))
