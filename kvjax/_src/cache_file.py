"""A cache as a file: one safetensors file with every array, whose metadata name what the cache was made with.

Arrays have the names of the cache's fields and entries. A policy's arrays are named by their place in the state, such
as ``state[0].value``. Layers have slots, and so arrays, of their own, whose names begin with the layer, as in
``layers[3].key``: this is format 2. In format 1 each array was that of all layers, ``[L, ...]``; caches without layers,
and pages, still have it. The states of layers without a KV cache are named like ``recurrent[0].memory``. One entry of
the metadata, "kvjax_cache", is JSON: the fields of ``_FIELDS``, and a sha256 of these and of the arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors

from kvjax._src.cache import KVCache, Positions, check_cache, is_emptied
from kvjax._src.capacity import CacheSpec
from kvjax._src.chains import policy_of
from kvjax._src.checks import check_share_or_tokens, check_types, is_known, shown
from kvjax._src.files import replacing
from kvjax._src.former_names import former_structure, renamed_document
from kvjax._src.layer_caches import LayerCaches, Recurrent, RowArray
from kvjax._src.new_caches import checked_blank, memory
from kvjax._src.policy import Policy
from kvjax._src.quantise import Dtypes, check_dtypes
from kvjax._src.split_cache import Cache, SplitCache

FORMAT = 2
ENTRY = "kvjax_cache"
MOST_QUERY_HEADS = 256  # of a KV head; no model has more
STORED = {
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float8_e4m3fn", "bfloat16", "float16", "float32", "float64"),
}
FLOAT8 = jnp.dtype("float8_e4m3fn")  # stored as bytes, uint8: the safetensors package has no such array of NumPy
_FIELDS = {
    "format": Literal[1, 2],
    "kvjax": str,
    "kind": Literal["plain", "paged"],
    "page_size": int | None,
    "positions": Positions,
    "dtype": str,  # of keys and values; two with "/" between them where they differ
    "query_heads": int,  # of each head of the cache, which determines the state's structure
    "tokens": list[int],
    "policy": str | None,
    "budget": int | float | None,
    "model": str | None,
}
_LAYER = re.compile(r"^layers\[\d+\]\.")
_RECURRENT = re.compile(r"^recurrent\[(\d+)\]\.(\w+)$")
_STATE = re.compile(r"^(layers\[\d+\]\.)?state(?=[.\[]|$)")
# A file without these tokens is as files were before there were any, and one without "rotated" is of no latents.
_MAY_LACK: dict[str, Any] = {"pending": list[int], "seen": list[int], "rotated": int}


def save_cache(
    path: str | Path,
    cache: Cache | LayerCaches,
    *,
    policy: Policy | str | None = None,
    budget: int | float | None = None,
    model: str | None = None,
    pending: list[int] | tuple[int, ...] = (),
    seen: list[int] | tuple[int, ...] = (),
) -> None:
    """Write a cache to a file, from which :func:`load_cache` makes the same cache, bit for bit, in another process.

    An existing file is replaced only when the new one is complete; if writing fails, it stays as it was. Of several
    processes that run together, only the first one writes.

    Args:
        path: the file; its folder must exist.
        cache: plain or paged, but not split over a mesh.
        policy: the policy that the cache was made for, or its short name; may be left out where it has no state.
        budget: the budget under which it was filled, slots per head or a ratio, for later use.
        model: any text that identifies the model of these keys and values.
        pending: tokens that come next and that the cache has not seen, such as the last one of an answer, for a cache
            of one row; :func:`cache_info` returns them.
        seen: likewise, the tokens that the cache has seen, in any order, for a later repetition penalty.

    Raises:
        ValueError: if ``cache`` is not a cache, is split over a mesh, is not the policy's, was donated, or is traced;
            or if there are tokens of several rows, or negative ones.
        FileNotFoundError: if the folder does not exist.

    Example:
        >>> import kvjax, pathlib, tempfile
        >>> cache = kvjax.empty_cache("h2o", kv_heads=1, head_dim=4, budget=8)
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "book.safetensors"
        >>> kvjax.save_cache(path, cache, policy="h2o", budget=8)
        >>> kvjax.load_cache(path).num_slots, kvjax.cache_info(path)["policy"]
        (9, 'h2o')
    """
    check_cache(cache)
    made_with, tokens = _made_with(policy, budget, model), {"pending": [*map(int, pending)], "seen": [*map(int, seen)]}
    for name, given in tokens.items():
        if given and (len(cache.next_position) != 1 or min(given) < 0):
            raise ValueError(f"{name} is {shown(given)}; expected the tokens of a cache of one row, from 0.")
    with replacing(path) as temporary:  # which refuses a path before any work
        temporary.write_bytes(_content(cache, policy, made_with, tokens))


def _content(cache: Any, policy: Policy | str | None, made_with: dict[str, Any], tokens: dict[str, list[int]]) -> bytes:
    """Return the content of a cache's file."""
    arrays = _arrays(cache)
    paged, layered = cache.paged, isinstance(cache, LayerCaches)
    one = cache.layers[0] if layered else cache
    names = ("key", "key" if one.rotated is not None else "value", "position")
    key, value, position = (_require(arrays, f"layers[0].{x}" if layered else x, "the cache") for x in names)
    next_position = _require(arrays, "next_position", "the cache")
    from kvjax import __version__

    info: dict[str, Any] = made_with | {
        "format": 2 if layered else 1,
        "kvjax": __version__,
        "kind": "paged" if paged else "plain",
        "page_size": position.shape[-1] if paged else None,
        "positions": cache.positions,
        "dtype": str(Dtypes(key.dtype.name, value.dtype.name)),
        "tokens": next_position.tolist(),
    }
    if one.rotated is not None:
        info["rotated"] = one.rotated
    expected_with = functools.partial(_expected, "the cache", arrays, info, policy_of(policy))
    info["query_heads"] = _query_heads(cache, arrays, made_with["policy"], expected_with)
    _check_arrays("the cache", arrays, expected_with(info["query_heads"]))
    arrays = {name: array.view(np.uint8) if array.dtype == FLOAT8 else array for name, array in arrays.items()}
    info |= {name: given for name, given in tokens.items() if given}
    text = json.dumps(info | {"sha256": _digest(info, arrays)}, sort_keys=True)
    return to_safetensors(arrays, metadata={ENTRY: text})


def load_cache(
    path: str | Path, *, policy: Policy | str | None = None, budget: int | float | None = None, model: str | None = None
) -> Any:
    """Read a cache that :func:`save_cache` wrote.

    Args:
        path: the file.
        policy, budget, model: what the cache will be used with. A value that differs from the file's, or that the file
            does not have, is refused. What is left out is taken from the file; :func:`cache_info` returns it.

    Returns:
        The cache, on the default device: of the kind that was saved.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file holds no cache, is damaged, or was made with something else or by a later kvjax; or if
            its policy has no short name and was not given.

    Example:
        >>> import kvjax, pathlib, tempfile
        >>> cache = kvjax.empty_cache("tova", kv_heads=1, head_dim=4, budget=8)
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "book.safetensors"
        >>> kvjax.save_cache(path, cache, policy="tova", model="small")
        >>> kvjax.load_cache(path, policy="tova", model="small").num_slots
        9
    """
    given = _made_with(policy, budget, model)
    info, arrays = _of_layers(f"{path}", *_read(_source(path)))
    dtypes = _dtypes(f"{path}", info)._asdict()
    for name, array in arrays.items():
        if dtypes.get(_LAYER.sub("", name)) == FLOAT8.name:
            arrays[name] = array.view(FLOAT8)
    written, info = info["policy"], _renamed(info)
    _check_given(path, given, info)
    made_for = policy_of(policy) if policy is not None else _named_policy(path, info["policy"])
    arrays = _with_ranks(arrays, made_for)
    expected = _expected(f"{path}", arrays, info, made_for, info["query_heads"])
    if written != info["policy"]:  # the same leaves in the same order, but links of the chain may have come or gone
        former = _expected(f"{path}", arrays, info, policy_of(former_structure(written)), info["query_heads"])
        arrays = dict(zip(expected.arrays, (_require(arrays, name, f"{path}") for name in former.arrays), strict=True))
    _check_arrays(f"{path}", arrays, expected)
    cache = jax.tree.unflatten(expected.structure, [arrays[name] for name in expected.arrays])
    return jax.tree.map(jnp.array, cache.caches if isinstance(cache, _Layers) else cache)


def cache_info(path: str | Path) -> dict[str, Any]:
    """Read the metadata of a cache's file, and none of the arrays, which :func:`load_cache` checks.

    Returns:
        "policy", "budget" and "model" as they were saved, None where they were not; "tokens", how many each row has
        seen; "pending", the tokens that come next, and "seen", those before, [] where none were saved; "kind", "plain"
        or "paged"; "page_size", None without pages; "positions"; "dtype"; "query_heads" of each head of the cache, 1
        where its policy does not show it; "kvjax", the version that wrote it; "format"; "cache_bytes", the size of the
        cache, as its ``nbytes``; "full_cache_bytes", that of a cache with as many heads and this dtype that holds all
        tokens seen.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file holds no cache.

    Example:
        >>> import kvjax, pathlib, tempfile
        >>> cache = kvjax.empty_cache("tova", kv_heads=1, head_dim=4, budget=8)
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "book.safetensors"
        >>> kvjax.save_cache(path, cache, policy="tova", budget=8)
        >>> info = kvjax.cache_info(path)
        >>> info["policy"], info["budget"], info["model"], info["tokens"]
        ('tova', 8, None, [0])
    """
    path = _source(path)
    with _opened(path) as (info, file):
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        states = sum(
            math.prod(shape) * int(slices[name].get_dtype().lstrip("BIUF").split("_")[0]) // 8
            for name, shape in shapes.items()
            if _RECURRENT.fullmatch(name)
        )
    with path.open("rb") as read:
        header = int.from_bytes(read.read(8), "little")
    info = _renamed(info)
    known = {name: info[name] for name in _FIELDS} | {name: info.get(name, []) for name in ("pending", "seen")}
    sizes = {
        "cache_bytes": path.stat().st_size - 8 - header,
        "full_cache_bytes": states + _full_bytes(f"{path}", info, shapes),
    }
    return known | sizes


def _renamed(info: dict[str, Any]) -> dict[str, Any]:
    """Return a file's metadata with the name that its policy has today."""
    return info if info["policy"] is None else renamed_document(info, info["kvjax"])


def _full_bytes(whose: str, info: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Compute the bytes of a cache that holds all tokens that the described one has seen."""
    first = "layers[0]." if _layered(info) else ""
    heads = _require(shapes, "table" if info["kind"] == "paged" else f"{first}position", whose)
    *layers, _, kv_heads, _ = heads
    count = _layers_of(shapes) if first else layers[0] if layers else 1
    sizes: Any = dict(layers=count, kv_heads=kv_heads, head_dim=_require(shapes, f"{first}key", whose)[-1])
    if first:  # whose layers may differ
        names = ("position", "key")
        own = [[(0, 0, *_require(shapes, f"layers[{n}].{name}", whose)) for name in names] for n in range(count)]
        sizes |= dict(kv_heads=[at[-2] for at, _ in own], head_dim=[key[-1] for _, key in own])
    sizes["rotated"] = info.get("rotated")
    dtype = _dtypes(whose, info)
    return sum(memory(**sizes, budget=tokens, block=0, dtype=dtype).total for tokens in info["tokens"] if tokens)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Layers:
    """Layers' caches as a file names them: the rows' next positions, which all layers have, stand beside them."""

    layers: tuple[KVCache, ...]
    next_position: Any
    recurrent: Any

    @property
    def caches(self) -> LayerCaches:
        """Return the caches."""
        layers = tuple(dataclasses.replace(own, next_position=self.next_position) for own in self.layers)
        return LayerCaches(layers, self.recurrent)


def _as_named(cache: Any) -> Any:
    """Return a cache as the tree whose leaves a file names."""
    if not isinstance(cache, LayerCaches):
        return cache
    own: Any = ()
    bare = tuple(dataclasses.replace(layer, next_position=own) for layer in cache.layers)
    return _Layers(bare, cache.next_position, cache.recurrent)


class _Expected(NamedTuple):
    """The structure of a cache: its tree, and its leaves' shapes and dtypes by name, in the tree's order."""

    structure: Any
    arrays: dict[str, jax.ShapeDtypeStruct]


def _made_with(policy: Policy | str | None, budget: int | float | None, model: str | None) -> dict[str, Any]:
    """Return what a cache is made with, as a file stores it; None where it is not given."""
    budget = None if budget is None else check_share_or_tokens(budget)
    made_for = policy_of(policy)
    name = made_for.name if made_for is not None else None if policy is None else "full"
    return check_types({"policy": name, "budget": budget, "model": model}, _FIELDS)


def _arrays(cache: Cache) -> dict[str, np.ndarray]:
    """Copy a cache's arrays to the host, by name."""
    if isinstance(cache, SplitCache):
        raise ValueError("the cache's pages are split over a mesh: save a cache that one device has made.")
    leaves = jax.tree.leaves(cache)
    if not is_known(*leaves):
        raise ValueError("the cache is traced (by jax.jit, vmap or grad): save the one that the function returns.")
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
        raise ValueError("the cache was donated to a compiled function: save the one that this function returned.")
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in _named(_as_named(jax.device_get(cache))).items()}
    for name, array in arrays.items():
        if array.dtype.name not in STORED:
            known = "int8, float8_e4m3fn, bfloat16, float16, float32 or float64"
            raise ValueError(f"the cache's {name} is of {array.dtype}, which a file does not hold; it may be {known}.")
    return arrays


def _of_layers(
    whose: str, info: dict[str, Any], arrays: dict[str, np.ndarray]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return what a file holds as format 2 has it, also of format 1, whose arrays were those of all layers."""
    position = arrays.get("position")
    if info["format"] != 1 or info["kind"] != "plain" or position is None or position.ndim != 4:
        return info, arrays
    apart = {}
    for name, array in arrays.items():
        if name == "next_position":
            apart[name] = array
            continue
        if array.shape[:1] != position.shape[:1] or not position.size:
            raise ValueError(f"{whose}: {name} is {array.dtype} {array.shape}; expected one for each layer.")
        apart |= {f"layers[{number}].{name}": own for number, own in enumerate(array)}
    return info | {"format": 2}, apart


def _with_ranks(arrays: dict[str, np.ndarray], policy: Policy | None) -> dict[str, np.ndarray]:
    """Return what a file holds, also of a cache from before policies kept ranks: 0 says that no token has one yet."""
    positions = {name: array for name, array in arrays.items() if _LAYER.sub("", name) == "position"}
    named = {f"{name.removesuffix('position')}state.rank": array for name, array in positions.items()}
    if policy is None or not policy.needs.order or named.keys() <= arrays.keys():
        return arrays
    beside = {_STATE.sub(r"\1state.others", name): array for name, array in arrays.items()}
    return beside | {name: np.zeros(position.shape, np.int32) for name, position in named.items()}


def _layered(info: Mapping[str, Any]) -> bool:
    """Return whether the arrays of a file are those of layers with slots of their own."""
    return info["format"] == 2 and info["kind"] == "plain"


def _layers_of(arrays: Mapping[str, Any]) -> int:
    return sum(_LAYER.sub("", name) == "position" and name != "position" for name in arrays)


def _named(cache: Any) -> dict[str, Any]:
    """Return the leaves of a cache by the names that a file gives them."""
    leaves = jax.tree_util.tree_leaves_with_path(cache)
    return {
        re.sub(
            r"^(layers\[\d+\]\.)?entries\['(\w+)'\]$|^(recurrent\[\d+\])\['(\w+)'\]$",
            lambda found: f"{found[1] or ''}{found[2]}" if found[2] else f"{found[3]}.{found[4]}",
            jax.tree_util.keystr(path).lstrip("."),
        ): leaf
        for path, leaf in leaves
    }


def _query_heads(
    cache: Cache, arrays: Mapping[str, np.ndarray], policy: str | None, expected_with: Callable[[int], _Expected]
) -> int:
    """Find how many query heads a head of the cache serves, as far as its state shows."""
    structure, shapes = jax.tree.structure(_as_named(cache)), _state_shapes(arrays)
    refusal: ValueError | None = None
    for query_heads in range(1, 2 if policy in (None, "full") else MOST_QUERY_HEADS + 1):
        try:
            expected = expected_with(query_heads)
        except ValueError as error:  # a policy that was measured on a model is for one number alone
            refusal = refusal or error
            continue
        wanted = _state_shapes(expected.arrays)
        if expected.structure == structure and wanted == shapes:
            return query_heads
        if sum(map(math.prod, wanted.values())) > sum(map(math.prod, shapes.values())):
            break  # more query heads never take less
    if refusal is not None:
        raise refusal
    if policy is None:
        raise ValueError("the cache remembers something for a policy, but none was given; hand it over as policy=.")
    raise ValueError(f"the cache's state is not that of {policy!r}; hand over the policy that the cache was made for.")


def _state_shapes(arrays: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items() if _LAYER.sub("", name).startswith("state")}


def _expected(
    whose: str, arrays: Mapping[str, Any], described: Mapping[str, Any], policy: Policy | None, query_heads: int
) -> _Expected:
    """Return the structure of a cache of these sizes under a policy."""
    paged, count = described["kind"] == "paged", _layers_of(arrays)
    each = [f"layers[{number}]." for number in range(max(count, 1))] if _layered(described) else [""]
    key, position = (_require(arrays, f"{each[0]}{name}", whose) for name in ("key", "position"))
    heads = _require(arrays, "table", whose) if paged else position
    *layers, batch, kv_heads, last = heads.shape
    layers = [count] if _layered(described) else layers
    dtypes = _dtypes(whose, described)
    pages, page_size = position.shape if paged else (0, 1)
    slots = [last * page_size, *((0, *_require(arrays, f"{own}position", whose).shape)[-1] for own in each[1:])]
    shapes = [[(0, 0, *_require(arrays, own + name, whose).shape) for name in ("position", "key")] for own in each]
    layer_heads = tuple((at[-2], of_key[-1]) for at, of_key in shapes) if _layered(described) else ()
    kv_heads = max((heads for heads, _ in layer_heads), default=kv_heads)
    spec = CacheSpec(
        batch, kv_heads, key.shape[-1], query_heads, layers[0] if layers else None, policy=policy, dtype=dtypes,
        positions=described["positions"], page_size=page_size, layer_slots=tuple(slots), pages=pages,
        rotated=described.get("rotated"),
        recurrent=_recurrent_in(whose, arrays),
        layer_heads=layer_heads if len(set(layer_heads)) > 1 else (),
    )  # fmt: skip
    tree: list[Any] = []

    def leaves() -> list[Array]:
        cache = _as_named(checked_blank(spec))
        tree[:] = jax.tree.structure(cache), list(_named(cache))
        return jax.tree.leaves(cache)

    shapes = jax.eval_shape(leaves)
    structure, names = tree
    named = dict(zip(names, shapes, strict=True))
    for name, like in named.items():
        if name in arrays and is_emptied(arrays[name].shape, like.shape):
            named[name] = jax.ShapeDtypeStruct(arrays[name].shape, like.dtype)
    return _Expected(structure, named)


def _recurrent_in(whose: str, arrays: Mapping[str, Any]) -> Recurrent:
    """Return what the states of layers without a KV cache are made of."""
    of_layers: dict[int, list[RowArray]] = {}
    for name, array in sorted(arrays.items()):
        if (found := _RECURRENT.fullmatch(name)) is not None:
            of_layers.setdefault(int(found[1]), []).append(RowArray(found[2], array.shape[1:], array.dtype.name))
    if sorted(of_layers) != list(range(len(of_layers))):
        raise ValueError(f"{whose} lacks the states of some of its layers without a KV cache.")
    return tuple(tuple(of_layers[number]) for number in range(len(of_layers)))


def _dtypes(whose: str, described: Mapping[str, Any]) -> Dtypes:
    try:
        return check_dtypes(described["dtype"])
    except ValueError as error:
        raise ValueError(f"{whose} has keys or values that no cache has: {error}") from None


def _require(arrays: Mapping[str, Any], name: str, whose: str) -> Any:
    if name not in arrays:
        raise ValueError(f"{whose} lacks the array {name}.")
    return arrays[name]


def _check_arrays(whose: str, arrays: Mapping[str, np.ndarray], expected: _Expected) -> None:
    """Check that the arrays have the names, shapes and dtypes of a cache of this kind."""
    for name, like in expected.arrays.items():
        array = _require(arrays, name, whose)
        if (array.shape, array.dtype) != (like.shape, like.dtype):
            raise ValueError(f"{whose}: {name} is {array.dtype} {array.shape}; expected {like.dtype} {like.shape}.")
    if more := sorted(arrays.keys() - expected.arrays.keys()):
        raise ValueError(f"{whose} has the array {more[0]}, which this cache does not have.")


def _digest(info: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """Compute a sha256 of a cache's metadata, and of its arrays in the order of their names."""
    found = hashlib.sha256(json.dumps(info, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(array.reshape(-1).view(np.uint8))
    return found.hexdigest()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read the whole file, and check that it holds what was written."""
    with _opened(path) as (info, file):
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if info.pop("sha256") != _digest(info, arrays):
        raise ValueError(f"{path} is damaged: its contents are not those that were written; take another copy.")
    return info, arrays


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[dict[str, Any], Any]]:
    """Open a file for its metadata and its arrays."""
    try:
        with safe_open(path, framework="np") as file:
            yield _metadata(path, file.metadata()), file
    except (SafetensorError, AttributeError, TypeError) as error:  # the latter two: dtypes that NumPy does not have
        why = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} is no safetensors file, or was cut short ({why}).") from None


def _metadata(path: Path, metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """Read a file's metadata, and check the type of each field."""
    if ENTRY not in (metadata or {}):
        raise ValueError(f"{path} is a safetensors file, but holds no cache; name one that kvjax.save_cache wrote.")
    damaged = ValueError(f"{path} is damaged: its metadata cannot be read; take another copy.")
    try:
        info = dict(json.loads((metadata or {})[ENTRY]))
    except (ValueError, TypeError, RecursionError):
        raise damaged from None
    if isinstance(info.get("format"), int) and info["format"] > FORMAT:
        from kvjax import __version__

        raise ValueError(f"{path} has format {info['format']}, of a later kvjax than this {__version__}; install one.")
    fields = _FIELDS | {"sha256": str} | {name: kind for name, kind in _MAY_LACK.items() if name in info}
    if info.keys() != fields.keys():
        raise damaged
    try:
        check_types(info, fields)
    except ValueError:
        raise damaged from None
    if not 1 <= info["query_heads"] <= MOST_QUERY_HEADS:
        raise damaged
    return info


def _check_given(path: str | Path, given: Mapping[str, Any], info: Mapping[str, Any]) -> None:
    """Check that a given policy, budget and model are those in the file."""
    for what, value in given.items():
        said = info[what]
        if value is None or (value == said and type(value) is type(said)):  # 1 slot is not the ratio 1.0
            continue
        if said is None:
            raise ValueError(f"{path} was saved without a {what} to compare {shown(value)} with; leave {what}= out.")
        raise ValueError(f"{path} was saved with the {what} {shown(said)}, not {shown(value)}; leave {what}= out.")


def _named_policy(path: str | Path, name: str | None) -> Policy | None:
    try:
        return policy_of(name)
    except ValueError:
        raise ValueError(f"{path} names the policy {shown(name)}, which cannot be read; give it as policy=.") from None


def _source(path: str | Path) -> Path:
    path = Path(path)
    if path.is_dir() or (path.exists() and not path.is_file()):
        raise ValueError(f"{path} is no file; name one that kvjax.save_cache wrote.")
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}; name one that kvjax.save_cache wrote.")
    return path
