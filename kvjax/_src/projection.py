"""The parts of a layer's output projection W_O that scores read: computed once, for all slots and steps.

The G query heads of a KV head pass through G blocks of W_O, each [D, E]. Evicting value v of slot j with weights a_g
changes the layer's output by sum_g a_g v W_O^g, so scores need only W_O^g W_O^h' [D, D], never an [S, E] array.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax._src.checks import check_names, real_array

KINDS = ("weight", "gram", "joint", "factor")


class OutputProjection(NamedTuple):
    """Parts of W_O, float32 but for ``weight``; ``None`` where not asked for.

    ``weight``: W_O itself. ``gram``: ``W_O^g W_O^g'`` of each query head, so ``|v W_O^g|^2 = v gram v'``. ``joint``:
    the same of the sum of a group's blocks, so ``|v sum_g W_O^g|^2 = v joint v'``. ``factor``: F with ``F F' = W W'``
    for the group's stacked ``W [G D, E]``, so ``|u F| = |u W|`` for any ``u [G D]``; its width is ``min(G D, E)``.
    """

    weight: Float[Array, "*L K G D E"] | None = None
    gram: Float[Array, "*L K G D D"] | None = None
    joint: Float[Array, "*L K D D"] | None = None
    factor: Float[Array, "*L K G D F"] | None = None


def output_projection(weight: Float[Array, "*L N D E"], kv_heads: int, kinds: str | Iterable[str]) -> OutputProjection:
    """Compute the parts of W_O that a policy asks for (``policy.needs.projections``).

    Args:
        weight: the output projection, one block ``[D, E]`` per query head.
        kv_heads: K; query head n belongs to KV head ``n // (N / K)``.
        kinds: one name or several, of "weight", "gram", "joint", "factor"; see :class:`OutputProjection`.

    Raises:
        ValueError: if a kind is unknown, or K does not divide the number of query heads.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvjax import output_projection
        >>> output_projection(jnp.ones((4, 3, 16)), 2, ["gram", "factor"]).factor.shape
        (2, 2, 3, 6)
    """
    kinds = frozenset([kinds] if isinstance(kinds, str) else kinds)
    check_names("kind", kinds, KINDS)
    weight = real_array("W_O", weight)
    if weight.ndim < 3 or kv_heads < 1 or weight.shape[-3] % kv_heads:
        raise ValueError(f"W_O {weight.shape} does not fit {kv_heads} KV heads: expected [N, D, E], N a multiple.")
    *L, N, D, E = weight.shape
    G = N // kv_heads
    blocks = weight.reshape(*L, kv_heads, G, D, E)
    wide = blocks.astype(jnp.promote_types(weight.dtype, jnp.float32))
    of_itself = functools.partial(jnp.einsum, "...de,...fe->...df", precision=jax.lax.Precision.HIGHEST)
    gram = joint = factor = None
    if "gram" in kinds:
        gram = of_itself(wide, wide)
    if "joint" in kinds:
        whole = jnp.sum(wide, axis=-3)
        joint = of_itself(whole, whole)
    if "factor" in kinds:
        stacked = wide.reshape(*L, kv_heads, G * D, E)
        triangle = jnp.linalg.qr(stacked.swapaxes(-1, -2), mode="r")  # W' = Q R, so |u W| = |u R'|
        factor = triangle.swapaxes(-1, -2).reshape(*L, kv_heads, G, D, -1)
    return OutputProjection(blocks if "weight" in kinds else None, gram, joint, factor)


def part_of(projection: OutputProjection | None, kind: str, link: str = "caote(target='output')") -> Array:
    """Return a part of a layer's output projection, which a link cannot do without."""
    if projection is not None and not isinstance(projection, OutputProjection):
        raise ValueError(f"the projection is a {type(projection).__name__}; give what kvjax.output_projection returns.")
    part = None if projection is None else getattr(projection, kind)
    if part is None:
        raise ValueError(f"{link} reads W_O's {kind!r}, which is missing: hand over Context(projection=...).")
    return part


def measure(
    projection: OutputProjection | Float[Array, "... G D F"], cross: bool, shape: tuple[int, ...], dtype: Any
) -> OutputProjection:
    """Return what measures a change of G heads after W_O: the factor alone with cross terms, the gram alone without.

    ``projection`` has W_O's parts, or is an array ``[*batch, G, D, F]`` whose Gram is W_O's. With ``cross`` the heads
    count together (``|sum_g u_g W_O^g|``). The changes have the shape ``(*batch, G, D)``.
    """
    own = projection if isinstance(projection, OutputProjection) else OutputProjection(factor=jnp.asarray(projection))
    wide = own.weight if own.factor is None else own.factor
    part = own.gram if not cross and own.gram is not None else wide
    if part is None:
        kind = "factor" if cross else "gram"
        raise ValueError(f"the projection holds no {kind}: make it with kvjax.output_projection(.., kinds={kind!r}).")
    *batch, G, D = shape
    lead = part.shape[:-3]
    broadcasts = len(lead) <= len(batch) and all(n in (1, m) for n, m in zip(lead[::-1], batch[::-1], strict=False))
    if part.ndim < 3 or part.shape[-3:-1] != (G, D) or not broadcasts:
        expected = f"[*batch, {G}, {D}, F], where *batch is {tuple(batch)} or broadcasts to it"
        raise ValueError(f"projection {part.shape} does not fit {G} query heads of dimension {D}: expected {expected}.")
    part = part.astype(dtype)
    if cross:
        return OutputProjection(factor=part)
    if own.gram is not None:
        return OutputProjection(gram=part)
    return OutputProjection(gram=jnp.einsum("...df,...ef->...de", part, part, precision=jax.lax.Precision.HIGHEST))
