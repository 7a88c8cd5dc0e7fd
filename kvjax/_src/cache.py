"""The cache: a fixed number of slots per KV head, reused as tokens are evicted.

    entries        the arrays that store keys and values, by name. Computations read floats_of(cache); attention and
                   caote_topk read them as they are:
      key, value   [B, K, S, D]   keys rotated at their absolute position; those of free slots are stale, never read.
      key_scale    [B, K, S]      float32, by which a key of eight bits is multiplied; only for keys of eight bits
      value_scale  [B, K, S]      likewise of the values, which may have another dtype
                   A cache of latents has no values: they are the keys without their rotated part (Stored.value)
      bias         [B, K, S]      float32, added to the logits of a slot; only in a cache for a policy that sets one
                                  (matching.py, sampling.py). It is 0 when a token enters
    position       [B, K, S]      int32, the absolute position of the token in each slot, -1 where the slot is free
    next_position  [B]            int32, the absolute position of each row's next token
    state          a pytree of a policy's per-slot arrays [B, K, S, ...]; a slot's entry is zero when a token enters.
                   A policy's state per head, not per slot, is in a HeadState [B, K, ...]

Heads hold different tokens, so a slot is not a position. A model has such a cache for each layer
(kvjax/_src/layer_caches.py).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Real

from kernels_pallas import insert_token
from kernels_pallas.dispatch import Implementation, platform
from kernels_pallas.insert_token.reference import Entries, first_free, unreadable, write_slots
from kvjax._src.checks import check_count, check_names, is_known
from kvjax._src.quantise import Dtypes, DtypesLike, check_dtypes, dequantise, is_quantised, quantise

PyTree = Any
Positions = Literal["absolute", "compact", "index"]
# How a tree is split that has one part for each part of a cache, of each device or of each layer; and the cache itself.
PARTS, CACHE = object(), object()
COMPARED = 2**27  # pairs that a GPU compares in about 50 microseconds, by count


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadState:
    """A policy's state per head, ``[*L, B, K, ...]``; eviction and insertion do not change it.

    Example:
        >>> import jax.numpy as jnp
        >>> import kvjax
        >>> kvjax.HeadState(jnp.zeros((1, 2, 4))).value.shape
        (1, 2, 4)
    """

    value: Array


def map_state(of_slots: Callable[..., Any], of_heads: Callable[..., Any], state: PyTree, *rest: PyTree) -> PyTree:
    """Apply ``jax.tree.map`` with one function to a state's arrays per slot, and with another to those per head."""

    def apply(leaf: Any, *others: Any) -> Any:
        if isinstance(leaf, HeadState):
            return HeadState(of_heads(leaf.value, *(other.value for other in others)))
        return of_slots(leaf, *others)

    return jax.tree.map(apply, state, *rest, is_leaf=lambda leaf: isinstance(leaf, HeadState))


def map_slots(function: Callable[[Any], Any], state: PyTree) -> PyTree:
    """Apply a function to a state's arrays per slot; the state per head stays as it is."""
    return map_state(function, lambda value: value, state)


def map_parts[Part: Any](function: Callable[[Part], Any], state: PyTree, kind: type[Part]) -> PyTree:
    """Apply a function to the parts of a state that are of a kind, such as a link's own class."""

    def apply(part: Any) -> Any:
        return function(part) if isinstance(part, kind) else part

    return jax.tree.map(apply, state, is_leaf=lambda part: isinstance(part, kind))


def part_of_kind[Part: Any](state: PyTree, kind: type[Part]) -> Part | None:
    """Return the first part of a state that is of a kind, None if there is none."""
    parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, kind))
    return next((part for part in parts if isinstance(part, kind)), None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """Hold a plain cache, or a layer of a paged one, as a page table of each head, and the pool of all pages."""

    entries: Entries
    position: Int[Array, "P page"]
    table: Int[Array, "B K M"]
    rotated: int | None = dataclasses.field(default=None, metadata={"static": True})


class AnyKind:
    """Answer what all kinds of caches do alike; those of several parts (devices, layers) have a ``map`` of their own.

    A verb of :mod:`kvjax` checks its arguments and then runs on each part, by :meth:`map` or :meth:`read`. A part is a
    plain or a paged cache, which says by methods of its own what the two kinds do differently.
    """

    paged = False  # whether the heads of all layers share pages, so that one eviction is of all layers
    num_pages: Any = 0  # of each device's pool
    page_size: Any = 1  # slots per page
    ways: Any = (1, 1)  # the numbers of devices that split the rows, and the heads
    axis: Any = None  # the mesh axis that splits a layer's heads, if K are one device's; () for none
    recurrent: Any = ()  # the states of layers without a KV cache, [B, ...]
    heads_shape: Any  # (*L, B, K)
    num_slots: Any
    position: Any
    next_position: Any

    def map(self, function: Callable[..., Any], *others: tuple[PyTree, Any]) -> Any:
        """Return the cache after a function has run on each of its parts; see :meth:`read`."""
        return self.read(function, *others, outputs=CACHE)

    def read(self, function: Callable[..., Any], *others: tuple[PyTree, Any], outputs: Any) -> Any:
        """Return what a function of a part, and of each device's part of ``others``, returns: here of the cache itself.

        A mesh splits ``others``, arrays or trees, and what is returned as :func:`kvjax._src.border.on_devices` says.
        """
        return function(self, *(tree for tree, _ in others))

    def map_states(self, function: Callable[..., Any], *others: AnyKind) -> Any:
        """Return the cache after a function of each array of ``recurrent``, and of those of ``others``, has run."""
        if not self.recurrent:
            return self
        made = jax.tree.map(function, self.recurrent, *(other.recurrent for other in others))
        return dataclasses.replace(cast(Any, self), recurrent=made)

    @property
    def each_part(self) -> Any:
        """Return what :meth:`map` takes with each part where it is split like the cache: here the cache itself."""
        return self

    @property
    def arrays(self) -> Any:
        """Return a cache that shows what entries and state are made of: on a mesh, the devices' parts, stacked."""
        return self.each_part

    @property
    def layer_slots(self) -> tuple[int, ...]:
        """Return the slots per head of each layer, or one number for all."""
        return (self.num_slots,)

    @property
    def slots_shape(self) -> tuple[int, ...]:
        """The shape of its slots, of whatever they are arranged by."""
        return self.position.shape

    def heads(self) -> Int[Array, "..."]:
        """Return the head, (layer * B + row) * K + head, that each vector of slots belongs to: here in order."""
        return jnp.arange(math.prod(self.heads_shape), dtype=jnp.int32).reshape(self.heads_shape)

    def batch_rows(self) -> Int[Array, "..."]:
        """Return the batch row of each of :meth:`heads`."""
        B, K = self.heads_shape[-2:]
        return self.heads() // K % B

    @property
    def all_heads(self) -> int:
        """Return the heads of a layer, with those on the other devices of a mesh."""
        return self.heads_shape[-1] * (jax.lax.axis_size(self.axis) if self.axis else 1)

    @property
    def first_head(self) -> int | Int[Array, ""]:
        """Return the number of its first head in the layer; not 0 only on a device of a mesh."""
        return jax.lax.axis_index(self.axis) * self.heads_shape[-1] if self.axis else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache: entries with their scales, positions, pages and the policy's state."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))


class Stored(AnyKind):
    """Reads the entries of a plain or a paged cache."""

    entries: Entries
    rotated: int | None  # of a cache of latents: how many numbers of a key are rotated, and no part of its value

    @property
    def key(self) -> Real[Array, "*slots D"]:
        """Return the keys as they are stored."""
        return self.entries["key"]

    @property
    def value(self) -> Real[Array, "*slots D"]:
        """Return the values as they are stored; of a cache of latents, the keys with 0 for their rotated part."""
        return self.entries["value"] if self.rotated is None else latents(self.key, self.rotated)

    @property
    def key_scale(self) -> Float[Array, "*slots"] | None:
        """Return the scales of keys of eight bits, None where keys are floats."""
        return self.entries.get("key_scale")

    @property
    def value_scale(self) -> Float[Array, "*slots"] | None:
        """Return the scales of values of eight bits, None where values are floats."""
        return self.entries.get("value_scale" if self.rotated is None else "key_scale")

    @property
    def bias(self) -> Float[Array, "*slots"] | None:
        """Return what is added to the logits of each slot, None where nothing is."""
        return self.entries.get("bias")

    def attended(self, exact: bool = False) -> Entries:
        """Return the entries as attention takes them: of a cache of latents, with its keys for values.

        Then nothing may read the rotated part of an output. With ``exact`` it is 0, at the price of a copy of the keys.
        """
        if self.rotated is None:
            return self.entries
        scale = {} if self.key_scale is None else {"value_scale": self.key_scale}
        return self.entries | scale | {"value": self.value if exact else self.key}

    def with_bias(self) -> Any:
        """Return the cache with a float per slot that is added to its logits: 0, if it has none yet."""
        if self.bias is not None:
            return self
        zeros = jnp.zeros(self.position.shape, jnp.float32)
        return dataclasses.replace(self, entries=self.entries | {"bias": zeros})  # type: ignore[type-var]

    @property
    def head_dim(self) -> int:
        """Return D, the length of a key and of a value."""
        return self.key.shape[-1]

    @property
    def live(self) -> Bool[Array, "*slots"]:
        """Return a mask of the slots that hold a token, shaped like ``position``."""
        return self.position >= 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache(Stored):
    """Keys and values of the tokens that are kept; the module's docstring has the layout.

    Inside a ``jax.shard_map`` of one's own the heads may be those of one device. A policy that joins the heads of a
    layer has to know: ``dataclasses.replace(cache, axis="tensor")`` names the mesh axis that splits them, ``axis=()``
    says that none does. On a GPU or TPU, whose kernels do not say over which axes they vary, the ``shard_map`` takes
    ``check_vma=False``. Under ``jit`` alone, arrays may be split in any way, and nothing has to be said.

    Example:
        >>> import jax, kvjax, numpy as np
        >>> cache = kvjax.KVCache.init(batch=1, kv_heads=1, slots=3, head_dim=2)
        >>> cache = jax.jit(kvjax.insert)(
        ...     cache, np.ones((1, 2, 1, 2)), np.ones((1, 2, 1, 2))
        ... )
        >>> cache.position.tolist(), cache.num_live.tolist(), cache.nbytes
        ([[[0, 1, -1]]], [[2]], 64)
    """

    entries: Entries
    position: Int[Array, "B K S"]
    next_position: Int[Array, "B"]
    state: PyTree = ()
    positions: Positions = dataclasses.field(default="absolute", metadata={"static": True})
    axis: str | tuple[()] | None = dataclasses.field(default=None, metadata={"static": True})
    rotated: int | None = dataclasses.field(default=None, metadata={"static": True})

    @staticmethod
    def init(
        *,
        batch: int,
        kv_heads: int,
        slots: int,
        head_dim: int,
        dtype: DtypesLike = jnp.float32,
        state: PyTree = (),
        positions: Positions = "absolute",
    ) -> KVCache:
        """Make an empty cache; :func:`kvjax.empty_cache` makes one for a policy.

        Args:
            state: what a policy's ``state`` returned for the same shape.
            dtype: of keys and values: floats, or eight bits, "int8" or "float8_e4m3fn", to which they are rounded when
                they enter (:func:`kvjax.quantise`). A pair, such as ("int8", "bfloat16"), is that of the keys and that
                of the values.
            positions: the positions that keys are rotated to once tokens have been evicted. "absolute": those in the
                text. "compact": at each step, the ranks among the remaining tokens, as in StreamingLLM; keys are
                rotated again. "index": a token's position is the number of tokens in the cache when it enters, and
                stays so; keys are not rotated again. Masks and protections always use positions in the text.

        Raises:
            ValueError: if a size is below 1, or the dtype or the positions are unknown.
        """
        check_positions(positions)
        batch, kv_heads, head_dim, _ = check_heads(batch, kv_heads, head_dim)
        slots = check_count("slots", slots, 1, "a cache needs at least 1")
        return KVCache.blank((batch, kv_heads, slots), head_dim, check_dtypes(dtype), state, positions)

    @classmethod
    def blank(
        cls,
        shape: tuple[int, int, int],
        head_dim: int,
        dtypes: Dtypes,
        state: PyTree,
        positions: Positions,
        rotated: int | None = None,
    ) -> KVCache:
        """Make an empty cache with slots of a shape, ``(B, K, S)``, to which its state is known to fit."""
        return cls(
            entries=empty_entries(shape, head_dim, dtypes, rotated is None),
            position=jnp.full(shape, -1, jnp.int32),
            next_position=jnp.zeros(shape[0], jnp.int32),
            state=state,
            positions=positions,
            rotated=rotated,
        )

    @classmethod
    def of(
        cls,
        key: Real[Array, "B K S D"],
        value: Real[Array, "B K S D"],
        position: Int[Array, "B K S"],
        next_position: Int[Array, "B"],
        **others: Any,
    ) -> KVCache:
        """Make a cache of keys and values that there are already; ``others`` are its state and its positions' kind."""
        if position.ndim != 3:
            raise ValueError(f"position is {position.shape}; a KVCache is of one layer, [B, K, S]. See LayerCaches.")
        return cls(entries=dict(key=key, value=value), position=position, next_position=next_position, **others)

    @property
    def num_slots(self) -> int:
        """S, the slots of each KV head, live or free."""
        return self.position.shape[-1]

    @property
    def heads_shape(self) -> tuple[int, ...]:
        """``(B, K)``."""
        return self.position.shape[:-1]

    @property
    def num_live(self) -> Int[Array, "B K"]:
        """Return the number of tokens that each head holds."""
        return count_live(self.position)

    def insert(
        self,
        key: Array,
        value: Array,
        position: Int[Array, "B T"],
        *,
        room: bool = False,
        implementation: Implementation = "reference",
    ) -> KVCache:
        """Insert tokens as :func:`kvjax.insert` does, which has checked them; ``room`` promises that they fit.

        ``implementation`` is that of :func:`kernels_pallas.insert_token`, which inserts single tokens.
        """
        (B, T, K, _), S = key.shape, self.num_slots
        room = room or is_known(self.position, position)  # where they are known, tokens without room were refused
        new = as_stored(self, key.swapaxes(1, 2), value.swapaxes(1, 2))
        if T == 1:
            own, place = jax.tree.map(lambda x: x[:, :, 0], new), position[:, 0]
            held = self.entries, self.position, self.next_position
            if self.rotated is not None:  # no kernel inserts keys alone
                implementation = "reference"
            state: list[Array] = []
            map_slots(state.append, self.state)
            inserted = insert_token(*held, own, place, state, room=room, implementation=implementation)
            zeroed = iter(inserted.state)
            return dataclasses.replace(
                self,
                entries=inserted.entries,
                position=inserted.position,
                next_position=inserted.next_position,
                state=map_slots(lambda _: next(zeroed), self.state),
            )
        valid = position >= 0
        slot, lost = slots_for(valid, ~self.live), None
        if not room:
            slot, lost = overwriting(slot, valid, S)
        slot = jnp.where(valid[:, None], slot, S)  # out of bounds: not written

        def write(leaf: Array, new: Array) -> Array:
            return write_slots(leaf, new.astype(leaf.dtype), slot)

        return dataclasses.replace(
            self,
            entries=jax.tree.map(write, self.entries, unreadable(new, lost)),
            position=write(self.position, jnp.broadcast_to(position[:, None], (B, K, T))),
            next_position=jnp.maximum(self.next_position, jnp.max(position, axis=1) + 1),
            state=map_slots(lambda leaf: write(leaf, jnp.zeros((B, K, T, *leaf.shape[3:]))), self.state),
        )

    def positions_with(self, position: Int[Array, "B T"]) -> Int[Array, "B K S"]:
        """Return the positions of all slots after an insertion that fits."""
        valid, (B, K, S) = position >= 0, self.position.shape
        slot = jnp.where(valid[:, None], slots_for(valid, ~self.live), S)
        return write_slots(self.position, jnp.broadcast_to(position[:, None], (B, K, valid.shape[1])), slot)

    def lacking(self, position: Int[np.ndarray, "B T"]) -> int:
        """Count the slots that the fullest head lacks for new tokens, on the host; not above 0 where they fit."""
        entering = np.sum(position >= 0, axis=1)[:, None]  # [B, 1]
        return int((entering + np.sum(np.asarray(self.position) >= 0, axis=-1) - self.num_slots).max())

    def released(self) -> KVCache:
        """Return the cache without what its heads no longer need: nothing, as slots are the head's own."""
        return self

    def resized(self, slots: int, pages: int = 0) -> KVCache:
        """Return the cache with this many slots per head."""
        return self if self.num_slots == slots else compact(self, slots)

    def in_pages(self, layer: Int[Array, ""], most: int) -> Pages:
        """Return the cache as if its slots were in pages of at most so many; no slot is copied."""
        page = math.gcd(self.num_slots, most)
        entries = jax.tree.map(lambda leaf: leaf.reshape(-1, page, *leaf.shape[3:]), self.entries)
        position = self.position.reshape(-1, page)
        return Pages(entries, position, jnp.arange(len(position)).reshape(*self.heads_shape, -1), self.rotated)


@jax.jit
def count_live(position: Int[Array, "*heads S"]) -> Int[Array, "*heads"]:
    """Count the slots that hold a token; compiled, so that a look from outside jit is one program."""
    return jnp.sum(position >= 0, axis=-1, dtype=jnp.int32)


def is_cache(given: object) -> bool:
    """Return whether a cache of any kind was given."""
    return isinstance(given, AnyKind)


def check_cache(cache: object) -> None:
    """Check that a cache of any kind was given."""
    if not is_cache(cache):
        raise ValueError(f"a {type(cache).__name__} was given; expected a cache, such as kvjax.empty_cache makes.")


def check_all_heads(cache: AnyKind, who: str, joins: bool) -> None:
    """Check, where something joins the heads of a layer, that a caller's ``shard_map`` has said how it splits them."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if joins and axes and cache.axis is None:
        given = f"{who} joins the heads of a layer, but jax.shard_map over {', '.join(map(str, axes))} may split them"
        raise ValueError(f"{given}: give dataclasses.replace(cache, axis={axes[-1]!r}), or axis=() if it does not.")


def is_emptied(given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether an array of a policy's state has this shape, but empty axes: it was dropped once it was used."""
    return 0 in given and len(given) == len(shape) and all(n in (0, m) for n, m in zip(given, shape, strict=True))


def check_heads(
    batch: int, kv_heads: int, head_dim: int, layers: int | None = None
) -> tuple[int, int, int, int | None]:
    """Return sizes as Python's own numbers, after a check that each is at least 1."""
    sizes = dict(batch=batch, kv_heads=kv_heads, head_dim=head_dim)
    batch, kv_heads, head_dim = (check_count(name, n, 1, "a cache needs at least 1") for name, n in sizes.items())
    if layers is not None:
        layers = check_count("layers", layers, 1, "a cache needs at least 1, or None for no axis of layers")
    return batch, kv_heads, head_dim, layers


def check_positions(positions: str) -> None:
    """Check that a cache knows these positions of rotated keys."""
    check_names("positions", positions, get_args(Positions))


def as_stored(cache: Stored, key: Float[Array, "*slots D"], value: Float[Array, "*slots D"]) -> Entries:
    """Return new tokens' keys and values as the cache stores them: what is to be written to each of its arrays."""
    stored: Entries = {}
    for (name, dtype), vectors in zip(dtypes_of(cache)._asdict().items(), (key, value), strict=True):
        if name not in cache.entries:  # the values of latents
            continue
        if is_quantised(dtype):
            stored[name], stored[f"{name}_scale"] = quantise(vectors, dtype)
        else:
            stored[name] = vectors.astype(dtype)
    if cache.bias is not None:
        stored["bias"] = jnp.zeros(key.shape[:-1], jnp.float32)
    return stored


def empty_entries(slots: tuple[int, ...], head_dim: int, dtypes: Dtypes, values: bool = True) -> Entries:
    """Return the entries of an empty cache with slots of this shape, without values in a cache of latents."""
    own = {name: dtype for name, dtype in dtypes._asdict().items() if values or name == "key"}
    scales = {f"{name}_scale": jnp.zeros(slots, jnp.float32) for name, dtype in own.items() if is_quantised(dtype)}
    return scales | {name: jnp.zeros((*slots, head_dim), dtype) for name, dtype in own.items()}


def latents(key: Real[Array, "*slots D"], rotated: int) -> Real[Array, "*slots D"]:
    """Return keys with 0 for their rotated elements, the first half of ``rotated`` in each half of a key.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvjax._src.cache import latents
        >>> latents(jnp.arange(1, 7), 2).tolist()
        [0, 2, 3, 0, 5, 6]
    """
    half = jnp.arange(key.shape[-1]) % (key.shape[-1] // 2)
    return jnp.where(half < rotated // 2, jnp.zeros((), key.dtype), key)


def dtypes_of(cache: Stored) -> Dtypes:
    """Return the dtypes of a cache's keys and values."""
    return Dtypes(cache.key.dtype.name, cache.entries.get("value", cache.key).dtype.name)


def floats_of[Cache: Any](cache: Cache) -> Cache:
    """Return a cache with keys and values as floats, for whatever computes with them.

    A cache that stores them so is returned as it is. All else is a copy, of eight bits as float32: take a layer, or a
    head, out of a paged cache first.

    Example:
        >>> import kvjax
        >>> cache = kvjax.KVCache.init(
        ...     batch=1, kv_heads=2, slots=3, head_dim=4, dtype="int8"
        ... )
        >>> floats = kvjax.floats_of(cache)
        >>> str(cache.key.dtype), str(floats.key.dtype)
        ('int8', 'float32')
    """
    if not hasattr(cache, "entries"):
        raise ValueError(f"a {type(cache).__name__} has keys and values of several parts; take one, such as a layer.")
    scales = {name.removesuffix("_scale"): x for name, x in cache.entries.items() if name.endswith("_scale")}
    floats = {name: dequantise(cache.entries[name], x) for name, x in scales.items()}
    others = {name: array for name, array in cache.entries.items() if not name.endswith("_scale")}
    return dataclasses.replace(cache, entries=others | floats) if floats else cache


def slots_for(valid: Bool[Array, "B T"], free: Bool[Array, "B K S"]) -> Int[Array, "B K T"]:
    """Return the free slot that each valid token takes, in slot order; S where there is none."""
    if valid.shape[1] == 1:  # the first one needs no search, whose turns are programs of their own on a GPU
        return first_free(free)[..., None]
    count = jnp.cumsum(valid, axis=1, dtype=jnp.int32)
    return nth_true(free, jnp.broadcast_to(count[:, None], (*free.shape[:2], valid.shape[1])))


def overwriting(
    slot: Int[Array, "B K T"], valid: Bool[Array, "B T"], slots: int | Int[Array, "B K"]
) -> tuple[Int[Array, "B K T"], Bool[Array, "B K"]]:
    """Return slots for all tokens, the last ones of heads into which they do not fit, and which heads these are.

    A token that was left out would go unnoticed. So the tokens of such a block overwrite others, and
    :func:`unreadable` makes each query from them on NaN. Where there is no slot, ``slot`` is not below ``slots``.
    """
    last = jnp.broadcast_to(jnp.asarray(slots, jnp.int32), slot.shape[:2])[..., None]
    lost = jnp.any(valid[:, None] & (slot >= last), axis=2)
    count = jnp.cumsum(valid, axis=1, dtype=jnp.int32)[:, None] if valid.shape[1] > 1 else 1
    return jnp.where(lost[..., None], last - count, slot), lost


def up_to[C: Any](cache: C, end: Int[Array, "B"]) -> C:
    """Return the cache without the tokens from a position on; the pages of a paged cache still have their owners."""
    free = cache.position >= end[cache.batch_rows()][..., None]
    return dataclasses.replace(
        cache,
        position=jnp.where(free, -1, cache.position),
        next_position=jnp.minimum(cache.next_position, end.astype(jnp.int32)),
    )


def within[C: Any](cache: C, window: int | Int[Array, ""], layer: int | Int[Array, ""] | None = None) -> C:
    """Return the cache without the tokens that have left a sliding window: no query from the next one on sees them.

    In a paged cache ``layer`` may be the one that has the window; its pages still have their owners.
    """
    gone = cache.position <= (cache.next_position - window)[cache.batch_rows()][..., None]
    if layer is not None:
        B, K = cache.heads_shape[-2:]
        gone &= (cache.heads() // (B * K) == layer)[..., None]
    return dataclasses.replace(cache, position=jnp.where(gone, -1, cache.position))


def compact[Cache: AnyKind](cache: Cache, slots: int) -> Cache:
    """Gather the live tokens, in slot order, into a smaller cache or into a larger one with free slots at the end.

    Args:
        slots: slots per head afterwards: evict to the budget first. Under jit, a row with more live tokens in a head
            is NaN from then on. A layer that has fewer than the others, for its window, grows only with all of them.

    Raises:
        ValueError: for a paged cache, which returns its pages at each eviction; or, outside jit, if a head has more
            live tokens than ``slots``.

    Example:
        >>> import jax, kvjax, numpy as np
        >>> cache = kvjax.KVCache.init(batch=1, kv_heads=1, slots=4, head_dim=1)
        >>> tokens = np.arange(4.0).reshape(1, 4, 1, 1)
        >>> cache = jax.jit(kvjax.insert)(cache, tokens, tokens)
        >>> cache = jax.jit(kvjax.evict)(cache, np.array([[[3.0, 0.0, 1.0, 2.0]]]), 2)
        >>> np.ravel(jax.jit(kvjax.compact, static_argnums=1)(cache, 2).key).tolist()
        [0.0, 3.0]
    """
    slots = check_count("slots", slots, 1, "a cache needs at least 1")
    check_cache(cache)
    if cache.paged:
        raise ValueError("a paged cache gives its free pages back at each eviction; there is nothing to compact.")
    larger = slots > cache.num_slots
    return cache.map(lambda own: _compacted(own, slots if larger else min(slots, own.num_slots)))


def _compacted(cache: KVCache, slots: int) -> KVCache:
    lost = None
    if is_known(cache.position):
        check_held("slots", int((np.asarray(cache.position) >= 0).sum(-1).max()), slots)
    elif slots < cache.num_slots:
        lost = cache.num_live > slots
    order = jnp.broadcast_to(jnp.arange(1, slots + 1), (*cache.position.shape[:-1], slots))
    source = nth_true(cache.live, order)  # [B, K, slots], num_slots where there is no such token

    def gather(leaf: Array, fill: int) -> Array:
        index = source.reshape(*source.shape, *(1,) * (leaf.ndim - source.ndim))
        return jnp.take_along_axis(leaf, index, axis=source.ndim - 1, mode="fill", fill_value=fill)

    return dataclasses.replace(
        cache,
        entries=unreadable(jax.tree.map(lambda leaf: gather(leaf, 0), cache.entries), lost),
        position=gather(cache.position, -1),
        state=map_slots(lambda leaf: gather(leaf, 0), cache.state),
    )


def check_held(what: str, held: int, room: int) -> None:
    """Check that a head's live tokens fit into the slots that a copy has."""
    if held > room:
        raise ValueError(f"{what} is {room}, but a head holds {held} tokens: evict to a smaller budget, or give more.")


def token_at(position: Int[Array, "B K S"], at: Int[Array, "B T"]) -> tuple[Int[Array, "B K S"], Bool[Array, "B K S"]]:
    """Return which of a block's tokens, at the positions ``at``, each slot holds, and whether it holds one of them."""
    same = (position[..., None] == at[:, None, None]) & (at >= 0)[:, None, None]
    number = jnp.max(jnp.where(same, jnp.arange(1, at.shape[1] + 1), 0), axis=-1)  # from 1: one fused reduction
    return jnp.maximum(number - 1, 0), number > 0


def nth_true(mask: Array, n: Int[Array, "*batch M"]) -> Int[Array, "*batch M"]:
    """Return the index of the n-th True (counted from 1) on the last axis; the axis' length where there are fewer."""
    flat_count = jnp.cumsum(mask, axis=-1, dtype=jnp.int32)
    # On a GPU each turn of a search is four programs; one program compares all, unless there are very many.
    at_once = platform() == "gpu" and n.size * mask.shape[-1] <= COMPARED
    find: Any = functools.partial(jnp.searchsorted, method="compare_all" if at_once else "scan")
    for _ in range(mask.ndim - 1):
        find = jax.vmap(find)
    return find(flat_count, n).astype(jnp.int32)
