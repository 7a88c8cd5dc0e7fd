"""The bytes that a cache under a budget takes, computed before anything is allocated."""

from __future__ import annotations

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from kvjax.cache import HeadState
from kvjax.capacity import Demand, Layout, ModelSizes, capacity, check_sizes, in_pages
from kvjax.chains import parse
from kvjax.checks import check_count
from kvjax.policy import Policy
from kvjax.policy_checks import check_budget
from kvjax.quantise import DtypesLike, check_dtypes, is_quantised
from kvjax.split import check_mesh


class Memory(NamedTuple):
    """Bytes of a cache. ``slots`` is the number of slots per head (the mean over heads, in a paged cache).

    ``keys_values`` are the keys and values, with the scales of rows of eight bits; ``positions`` the position of each
    slot; ``state`` the policy's state; ``pages`` the page table and the lists of a paged cache, 0 for a plain one.
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
    *,
    budget: int,
    block: int = 128,
    policy: Policy | str | None = None,
    dtype: DtypesLike = jnp.bfloat16,
    page_size: int = 16,
    mesh: Mesh | AbstractMesh | None = None,
    **sizes: Unpack[ModelSizes],
) -> Memory:
    """Compute the bytes of a cache that holds ``budget`` tokens per head while blocks of ``block`` tokens come in.

    For a full cache, give all tokens as the budget, a block of 0 and no policy. Otherwise the size does not depend on
    the length of the prompt.

    Args:
        budget: tokens that each head keeps, on average where an allocation is uneven.
        block: tokens per step, which need slots in addition to the budget.
        policy: a policy or its short name, for its state and its allocation; None for neither.
        dtype: of keys and values: floats, or "int8" or "float8_e4m3fn", with 4 bytes more per row for its scale; or a
            pair of both.
        page_size: slots per page, where the allocation is uneven or a window is smaller than the budget.
        mesh: devices with the axes "data" and "tensor", which split the rows and the KV heads: then the bytes are those
            of one device. Its pages hold the most that its heads may win from those of the others.
        sizes: those of the model and the rows, as in :func:`kvjax.empty_cache`; 1 layer by default. Windows count only
            with a policy: a full cache keeps all tokens.

    Raises:
        ValueError: if a size is below 1, the block is negative, the budget is below what the policy protects, the
            dtype is unknown, there is not one window per layer, or the mesh does not divide the rows or the heads.

    Example:
        >>> import kvjax
        >>> llama_1b = dict(layers=16, kv_heads=8, head_dim=64)
        >>> kvjax.memory(**llama_1b, budget=2048).total / 2**20  # MiB, bfloat16
        69.06...
        >>> kvjax.memory(**llama_1b, budget=131_072, block=0).total / 2**20
        4160.0...
        >>> kvjax.memory(**llama_1b, budget=2048, dtype="int8").total / 2**20
        37.18...
        >>> # three layers of four see the last 512 tokens
        >>> windows = [512, 512, 512, None] * 4
        >>> kvjax.memory(
        ...     **llama_1b, budget=2048, policy="h2o", windows=windows
        ... ).total / 2**20
        33.61...
    """
    kv_heads, head_dim, query_heads, layers, batch, windows = check_sizes(**sizes)
    budget = check_count("budget", budget, 1, "a cache needs at least 1")
    page_size = check_count("page_size", page_size, 1, "a cache needs at least 1")
    block = check_count("block", block, 0, "give the tokens of a step, from 0")
    if not isinstance(policy, Policy | str | None):
        raise ValueError(f"policy is {policy!r}; give a policy, its short name, or None.")
    of_row = sum(head_dim * jnp.dtype(name).itemsize + 4 * is_quantised(name) for name in check_dtypes(dtype))
    policy = parse(policy) if isinstance(policy, str) else policy
    ways = (1, 1) if mesh is None else check_mesh(mesh, batch, kv_heads)
    of_all = np.full(batch, budget)
    batch //= ways[0]
    heads, rows = (layers or 1) * batch * kv_heads // ways[1], 4 * batch
    a_slot, a_head = (0, 0) if policy is None else _state_bytes(policy, query_heads // kv_heads, head_dim)
    if policy is not None:
        check_budget(policy, budget)
    most, pages = budget + block, 0
    if policy is not None:
        layout = Layout(kv_heads, windows, policy.allocation, page_size, ways)
        most, pages = capacity(layout, Demand(of_all, block, block), in_pages(policy, budget, windows))
    slots, extra = heads * most, 0
    if pages:
        slots = pages * page_size
        table = heads * -(-most // page_size)
        extra = 4 * (table + 2 * pages + 1)  # the table; owners and free list; the number of free pages
    return Memory(
        slots=slots // heads,
        keys_values=slots * of_row,
        positions=slots * 4 + rows,
        state=slots * a_slot + heads * a_head,
        pages=extra,
    )


def _state_bytes(policy: Policy, G: int, D: int) -> tuple[int, int]:
    """Return the bytes of a policy's state per slot, and per head."""
    state = jax.eval_shape(lambda: policy.state(1, 1, G, 1, D))
    leaves = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, HeadState))

    def size(leaf) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(leaf))

    of_heads = sum(size(leaf) for leaf in leaves if isinstance(leaf, HeadState))
    return sum(map(size, leaves)) - of_heads, of_heads
