"""Caches made for a policy and a budget, their bytes, and caches repeated to ask several questions about a context."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh
from jaxtyping import Array

from kvjax._src.border import HEADS, ROWS, check_mesh, on_mesh
from kvjax._src.cache import AnyKind, KVCache, PyTree, check_cache, check_heads, map_state
from kvjax._src.capacity import CacheSpec, ModelSizes, model_sizes
from kvjax._src.chains import policy_of
from kvjax._src.checks import check_count
from kvjax._src.layer_caches import ALIKE, LayerCaches, empty_states
from kvjax._src.paged import PagedCache
from kvjax._src.policy import Policy, fits_biases
from kvjax._src.policy_checks import check_block, check_budget, check_latents, check_measured, check_state
from kvjax._src.quantise import DtypesLike, check_dtypes
from kvjax._src.split_cache import Cache, SplitCache


def empty_cache(
    policy: Policy | str | None,
    *,
    budget: int,
    block: int = 1,
    dtype: DtypesLike = jnp.float32,
    page_size: int = 16,
    mesh: Mesh | AbstractMesh | None = None,
    **sizes: Unpack[ModelSizes],
) -> Any:
    """Make an empty cache for a policy and a budget: of the right size, with the policy's state.

    Args:
        policy: a policy or its short name; None or "full" for a cache from which nothing is evicted.
        budget: tokens that each head keeps, on average where heads compete; without a policy, all tokens of a sequence.
        block: the most tokens inserted between two evictions; for a prompt fed in blocks, the block size.
        dtype: of keys and values: floats, or "int8" or "float8_e4m3fn" (:func:`kvjax.quantise`); or a pair of both.
        page_size: slots per page, if the cache is paged.
        mesh: devices with the axes "data" and "tensor", which split the rows and the KV heads; None for one device. An
            AbstractMesh will do where only shapes are asked for (``jax.eval_shape``).
        sizes: ``kv_heads``, the heads of the model's keys and values, and ``head_dim``, the length of a key, each
            one number or one of each layer; besides,
            ``query_heads``, a multiple of ``kv_heads`` (as many by default), ``batch`` rows (1), ``layers`` of a model
            (None for a cache of one layer), ``windows``, the layers' sliding windows, one entry per layer, None for a
            layer that sees all positions, and ``recurrent``, for each layer without a KV cache, which the ``layers`` do
            not count, the arrays of its state (:class:`kvjax.RowArray`). ``rotated`` makes a cache of latents
            (DeepSeek's multi-head latent attention, see models/latent.py): it stores the keys alone and reads no values
            that are inserted, for they are the keys without so many rotated numbers, the first half of them in each
            half of a key. Of an attention output these numbers are to be left out.

    Returns:
        A :class:`kvjax.KVCache` of ``budget + block`` slots per head, at most ``window + block`` in a layer with a
        window, or a :class:`kvjax.LayerCaches` with one for each of the ``layers``. Under an uneven allocation, a
        :class:`kvjax.PagedCache` of as many on average; on several devices a :class:`kvjax.SplitCache`, of which each
        device has pages for the most that its heads may hold. Without a policy, a cache of ``budget`` slots.

    Raises:
        ValueError: if a count is below 1, the KV heads do not divide the query heads, the budget is smaller than what
            the policy protects, the block is smaller than its observation window (:func:`kvjax.check_block`), the
            dtype is unknown, there is not one window per layer, or the mesh does not divide the rows or the heads.

    Example:
        >>> import kvjax
        >>> sizes = dict(
        ...     layers=2, kv_heads=2, query_heads=4, head_dim=8, budget=24, block=8
        ... )
        >>> kvjax.empty_cache("h2o+caote", **sizes).layers[0].key.shape
        (1, 2, 32, 8)
        >>> cache = kvjax.empty_cache("h2o@model", **sizes)
        >>> type(cache).__name__, cache.key.shape
        ('PagedCache', (11, 16, 8))
    """
    policy, spec = policy_of(policy), model_sizes(**sizes)
    page_size = check_count("page_size", page_size, 1, "a cache needs at least 1")
    budget = check_count("the budget", budget, 1, "give tokens per head, an int from 1")
    block = check_count("block", block, 1, "a block has at least 1 token")
    if policy is not None and policy.heads == "query":
        N = spec.kv_heads * spec.group
        own = tuple((N, dim) for _, dim in spec.layer_heads)
        spec = dataclasses.replace(spec, kv_heads=N, group=1, layer_heads=own)
    if mesh is not None:
        for heads, _ in dict.fromkeys(spec.heads):
            check_mesh(mesh, spec.batch, heads)
    spec = dataclasses.replace(spec, policy=policy, dtype=check_dtypes(dtype), mesh=mesh, page_size=page_size)
    if policy is None:
        return checked_blank(dataclasses.replace(spec, layer_slots=(budget,) * len(spec.windows)))
    check_budget(policy, budget)
    check_block(policy, block)
    spec = spec.sized([budget] * spec.batch, block)
    return checked_blank(dataclasses.replace(spec, positions=policy.positions))


class Memory(NamedTuple):
    """Bytes of a cache. ``slots`` is the number of slots per head (the mean over heads, in a paged cache).

    ``keys_values`` are the keys and values, with the scales of those of eight bits and a bias per slot where the policy
    fits one; ``positions`` the position of each slot; ``state`` the policy's state; ``pages`` the page table and the
    lists of a paged cache, 0 for a plain one; ``recurrent`` the states of layers without a KV cache, 0 without any.
    """

    slots: int
    keys_values: int
    positions: int
    state: int
    pages: int
    recurrent: int = 0

    @property
    def total(self) -> int:
        """Return the sum of all bytes, equal to the cache's ``nbytes``."""
        return self.keys_values + self.positions + self.state + self.pages + self.recurrent


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
        slots=sum(part.position.size for part in parts) // sum(math.prod(part.heads_shape) for part in parts),
        keys_values=of_device([part.entries for part in parts]),
        positions=of_device([part.position for part in parts]) + copies * of_device(one.next_position),
        state=of_device([part.state for part in parts]),
        pages=of_device(one.table, one.owner, one.free, one.num_free) if cache.paged else 0,
        recurrent=tensor * of_device(cache.recurrent),
    )


def repeat[C: AnyKind](cache: C, n: int) -> C:
    """Copy each row n times, so that n questions can be asked about one context at once.

    Args:
        cache: plain or paged, of one layer or several.
        n: how many rows each row becomes: row r becomes rows r n to r n + n - 1.

    Returns:
        A cache of n times as many rows; a paged one also has n times as many pages.

    Raises:
        ValueError: if ``cache`` is not a cache, or n is below 1.

    Example:
        >>> import jax, kvjax, numpy as np
        >>> cache = kvjax.KVCache.init(batch=2, kv_heads=1, slots=1, head_dim=1)
        >>> tokens = np.array([5.0, 7.0]).reshape(2, 1, 1, 1)
        >>> cache = jax.jit(kvjax.insert)(cache, tokens, tokens)
        >>> np.ravel(jax.jit(kvjax.repeat, static_argnums=1)(cache, 2).key).tolist()
        [5.0, 5.0, 7.0, 7.0]
    """
    check_cache(cache)
    n = check_count("n", n, 1, "give how many rows each row is to become, from 1")
    made = cache.map(functools.partial(_repeated, n=n))  # a device's rows follow one another, and so do their copies
    return made.map_states(functools.partial(jnp.repeat, repeats=n, axis=0))


@functools.singledispatch
def _repeated(cache: Any, n: int) -> Any:
    repeated = functools.partial(jnp.repeat, repeats=n, axis=0)
    return dataclasses.replace(
        cache,
        entries=jax.tree.map(repeated, cache.entries),
        position=repeated(cache.position),
        next_position=jnp.repeat(cache.next_position, n),
        state=jax.tree.map(repeated, cache.state),
    )


@_repeated.register(PagedCache)
def _repeated_pages(cache: PagedCache, n: int) -> PagedCache:
    *_, B, K = cache.heads_shape
    repeated = functools.partial(jnp.repeat, repeats=n, axis=len(cache.heads_shape) - 2)
    P = cache.owner.shape[0]
    copy = jnp.arange(n, dtype=jnp.int32)  # page p of a copy is page copy * P + p

    def pools(leaf: Array) -> Array:
        return jnp.broadcast_to(leaf, (n, *leaf.shape)).reshape(n * P, *leaf.shape[1:])

    row, head = cache.owner // K, cache.owner % K  # of all layers
    owner = (row * n + copy[:, None]) * K + head
    first_page = P * jnp.tile(copy, B)[:, None, None]
    table = repeated(cache.table)
    return dataclasses.replace(
        cache,
        entries=jax.tree.map(pools, cache.entries),
        position=pools(cache.position),
        owner=jnp.where(cache.owner >= 0, owner, -1).reshape(n * P),
        table=jnp.where(table >= 0, table + first_page, -1),
        free=(cache.free[:, None] + P * copy).reshape(n * P),  # all copies' free pages come before any used one
        num_free=n * cache.num_free,
        next_position=jnp.repeat(cache.next_position, n),
        state=map_state(pools, repeated, cache.state),
    )


ONE_DEVICE = (
    "a model with layers without a KV cache keeps its pages on one device: leave the mesh out, or take a policy that "
    "gives all heads the same budget ('@uniform')."
)


def checked_blank(spec: CacheSpec) -> Cache | LayerCaches:
    """Run :func:`blank` after a check of its sizes."""
    check_heads(spec.batch, spec.kv_heads, spec.head_dim, spec.layers)
    check_count("slots", min(spec.layer_slots), 1, "a cache needs at least 1")
    check_measured(spec.policy, spec.layers, spec.kv_heads)
    if spec.rotated is not None:
        check_latents(spec.policy, spec.dtype)
    if spec.policy is not None:
        for heads, dim in dict.fromkeys(spec.heads):
            check_state(spec.policy, dim, heads, spec.kv_heads * spec.group // heads)
    return blank(spec)


def blank(spec: CacheSpec) -> Cache | LayerCaches:
    """Make an empty cache of sizes that are known to fit the policy."""
    policy, mesh, biased = spec.policy, spec.mesh, fits_biases(spec.policy)

    if spec.layer_heads and not spec.allocation.even:
        raise ValueError(ALIKE.format(spec.allocation.name))

    def state(B: int, K: int, S: int, group: int = spec.group, dim: int = spec.head_dim) -> PyTree:
        return () if policy is None else policy.state(B, K, group, S, dim)

    if spec.pages:
        names = ("batch", "kv_heads", "head_dim", "layers", "pages", "page_size", "dtype", "positions", "rotated")
        given = {name: getattr(spec, name) for name in names} | dict(most=spec.slots, init_state=state)
        if mesh is None or mesh.size == 1:
            pages = dataclasses.replace(PagedCache.init(**given), recurrent=empty_states(spec.recurrent, spec.batch))
            return pages.with_bias() if biased else pages
        if spec.recurrent:
            raise ValueError(ONE_DEVICE)
        split = SplitCache.init(mesh=mesh, **given)
        return split.map(lambda part: part.with_bias()) if biased else split

    def layer(slots: int, heads: tuple[int, int]) -> KVCache:
        shape, dim = (spec.batch, heads[0], slots), heads[1]
        own = state(*shape, spec.kv_heads * spec.group // heads[0], dim)
        cache = KVCache.blank(shape, dim, spec.dtype, own, spec.positions, spec.rotated)
        return cache.with_bias() if biased else cache

    if spec.layers is None:
        cache: Any = layer(spec.slots, *spec.heads)
    else:
        cache = LayerCaches(tuple(map(layer, spec.layer_slots, spec.heads)), empty_states(spec.recurrent, spec.batch))
    return cache if mesh is None else on_mesh(cache, mesh)
