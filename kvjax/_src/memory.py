"""The bytes that a cache under a budget takes, computed before anything is allocated."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh

from kvjax._src.capacity import ModelSizes
from kvjax._src.chains import policy_of
from kvjax._src.checks import check_count
from kvjax._src.layer_caches import LayerCaches
from kvjax._src.mesh import HEADS, ROWS
from kvjax._src.new_caches import empty_cache
from kvjax._src.policy import Policy
from kvjax._src.quantise import DtypesLike


class Memory(NamedTuple):
    """Bytes of a cache. ``slots`` is the number of slots per head (the mean over heads, in a paged cache).

    ``keys_values`` are the keys and values, with the scales of those of eight bits and a bias per slot where the policy
    fits one; ``positions`` the position of each slot; ``state`` the policy's state; ``pages`` the page table and the
    lists of a paged cache, 0 for a plain one.
    """

    slots: int
    keys_values: int
    positions: int
    state: int
    pages: int

    @property
    def total(self) -> int:
        """Return the sum of all bytes, equal to the cache's ``nbytes``."""
        return self.keys_values + self.positions + self.state + self.pages


def memory(
    policy: Policy | str | None = None,
    *,
    budget: int,
    block: int = 128,
    dtype: DtypesLike = jnp.bfloat16,
    page_size: int = 16,
    mesh: Mesh | AbstractMesh | None = None,
    **sizes: Unpack[ModelSizes],
) -> Memory:
    """Compute the bytes of a cache that holds ``budget`` tokens per head while blocks of ``block`` tokens come in.

    They are those of :func:`kvjax.empty_cache`, whose defaults are smaller: float32, and a block of one token. For a
    full cache, give all tokens as the budget, a block of 0 and no policy. Otherwise the size does not depend on the
    length of the prompt.

    Args:
        policy: a policy or its short name, for its state and its allocation; None or "full" for neither.
        budget: tokens that each head keeps, on average where an allocation is uneven.
        block: tokens per step, which need slots in addition to the budget; at least 1 with a policy.
        mesh: then the bytes are those of one device. Its pages hold the most that its heads may win from the others'.
        dtype, page_size, sizes: as in :func:`kvjax.empty_cache`; 1 layer by default. Windows count only with a policy:
            a full cache keeps all tokens.

    Raises:
        ValueError: if the block is negative, or :func:`kvjax.empty_cache` refuses the arguments.

    Example:
        >>> import kvjax
        >>> llama_1b = dict(layers=16, kv_heads=8, head_dim=64)
        >>> kvjax.memory(**llama_1b, budget=2048).total / 2**20  # MiB, bfloat16
        69.06...
        >>> kvjax.memory(**llama_1b, budget=131_072, block=0).total / 2**20
        4160.0...
        >>> kvjax.memory(**llama_1b, budget=2048, dtype="int8").total / 2**20
        37.18...
    """
    policy = policy_of(policy)
    block = check_count("block", block, 0, "give the tokens of a step, from 0")
    if policy is None:
        budget, block = check_count("budget", budget, 1, "a cache needs at least 1") + block, 1
    if mesh is not None:  # of which only the sizes count
        mesh = AbstractMesh(mesh.axis_sizes, mesh.axis_names, (AxisType.Auto,) * len(mesh.axis_names))
    given: dict[str, Any] = dict(budget=budget, block=block, dtype=dtype, page_size=page_size, mesh=mesh)
    cache = jax.eval_shape(lambda: empty_cache(policy, **given, **sizes))
    data, tensor = (1, 1) if mesh is None else (mesh.shape[name] for name in (ROWS, HEADS))
    parts: Any = cache.layers if isinstance(cache, LayerCaches) else (cache.each_part,)

    def of_device(*leaves: Any) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(leaves)) // (data * tensor)

    one, copies = parts[0], 1 if cache.paged else tensor  # each device along "tensor" has the rows' next positions
    return Memory(
        slots=sum(part.position.size for part in parts) // math.prod(cache.heads_shape),
        keys_values=of_device([part.entries for part in parts]),
        positions=of_device([part.position for part in parts]) + copies * of_device(one.next_position),
        state=of_device([part.state for part in parts]),
        pages=of_device(one.table, one.owner, one.free, one.num_free) if cache.paged else 0,
    )
