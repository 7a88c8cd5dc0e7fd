"""Checkpoints: a folder in Hugging Face layout, a hub name or a GGUF file becomes a Decoder and a Tokenizer.

Weights are read from safetensors or GGUF only; nothing in a folder is ever executed. Every tensor's name and shape is
checked before the first weight is read. Then parameters are read, cast and placed one at a time, the largest first, so
that at most one parameter is in memory besides the finished ones.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from models import adapters, hosts, published
from models.checkpoint import Checkpoint, Tensor, arranged, file_shape, refuse_pointer
from models.config import Config
from models.config_json import family_of, from_hugging_face
from models.decoder import Decoder
from models.gguf import open_file, read_sampling
from models.parameters import (
    FUSED,
    PARAMETERS,
    parameter_shapes,
    partition,
    tensor_names,
    tensor_of,
)
from models.sampling import Sampling, check_sampling
from models.tokenizer import Tokenizer, read_object

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Tensors that are not read: rotary frequencies in older checkpoints, and the output matrix where the config ties it.
IGNORED = re.compile(r"lm_head\.weight|.*\.rotary_emb\.inv_freq")
# Folders inside the package. The adapters of smollm2 differ in their seed.
SHIPPED = {
    "retriever": "retriever",
    "smollm2-answers": "smollm2/answers/1",
    "smollm2-answers-2": "smollm2/answers/2",
    "smollm2-answers-3": "smollm2/answers/3",
}
CHUNK_BYTES = 1 << 23
TILE = 128


def load(
    path: str | Path,
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    revision: str | None = None,
    on_read: Callable[[int], None] | None = None,
) -> tuple[Decoder, Tokenizer | None]:
    """Load a decoder and its tokenizer.

    Args:
        path: a folder with config.json and safetensors, one file or sharded; a GGUF file (needs gguf); "retriever",
            the model that ships with the package; "smollm2", once `python -m models.get smollm2` has fetched it;
            "smollm2-answers", the same with an adapter that looks facts up (models/smollm2/answers); a name on the
            Hugging Face hub, such as "Qwen/Qwen3-0.6B" (needs huggingface_hub); or the folder of a LoRA adapter in
            PEFT's files, which is added to the base model that it names.
        dtype: the dtype that the weights are cast to, such as "bfloat16"; None keeps the checkpoint's (the dtype of
            most weights, if it mixes several; float32 if they are quantised).
        mesh: devices with axes "data" and "tensor", and "expert" if it has one (see :func:`parse_mesh`), that the
            weights are split over as ``models.parameters`` says; None puts them on the default device. Each process
            reads only the parts of its own devices.
        revision: a branch, tag or commit on the hub.
        on_read: called with the bytes of each part of a tensor that this process has read.

    Returns:
        The model, and its tokenizer or None without one (no tokenizer.json, or none in the GGUF file).

    Raises:
        FileNotFoundError: no such folder, file or hub name, or a file is missing from it.
        ImportError: the path is a GGUF file, and the package gguf is not installed.
        ValueError: a file cannot be used (corrupted, of another shape or architecture, pickled, with weights that are
            not finite), the dtype is unknown, or the mesh does not divide the heads.

    Example:
        >>> from models.load import load
        >>> load("no/such/folder/anywhere")
        Traceback (most recent call last):
        ...
        FileNotFoundError: there is no folder no/such/folder/anywhere; give a folder with config.json and safetensors...
    """
    checkpoint, target, mesh = _opened(path, dtype, mesh, revision)
    if on_read is not None:
        counted = {
            name: tensor._replace(read=_counted(tensor.read, on_read)) for name, tensor in checkpoint.tensors.items()
        }
        checkpoint = checkpoint._replace(tensors=counted)
    shapes = parameter_shapes(checkpoint.config)
    with _progress(sum(math.prod(shape[: PARAMETERS[name].separate]) for name, shape in shapes.items())) as advance:
        parameters = {
            name: _place(name, shapes[name], checkpoint, target, mesh, advance)
            for name in sorted(shapes, key=lambda name: -np.prod(shapes[name]))
        }
    return Decoder(checkpoint.config, parameters), checkpoint.tokenizer


def describe(
    path: str | Path, *, dtype: DTypeLike | None = None, mesh: Mesh | None = None, revision: str | None = None
) -> tuple[Config, Tokenizer | None]:
    """Check a checkpoint as far as possible without reading its weights, and return its config and its tokenizer.

    The arguments and errors are those of :func:`load`.

    Example:
        >>> from models.load import describe
        >>> config, tokenizer = describe("retriever")
        >>> config.vocab_size == tokenizer.vocab_size
        True
    """
    checkpoint, *_ = _opened(path, dtype, mesh, revision)
    return checkpoint.config, checkpoint.tokenizer


def _opened(
    path: str | Path, dtype: DTypeLike | None, mesh: Mesh | None, revision: str | None
) -> tuple[Checkpoint, np.dtype, Mesh | None]:
    """Return the checkpoint, the weights' dtype and the mesh, all checked."""
    wanted = None if dtype is None else known_dtype(dtype)
    found = _find(path, revision)
    adapter, base = found, adapters.base_of(found)
    if base is not None:
        found = _find(base, None)
        if adapters.base_of(found) is not None:
            raise ValueError(f"{adapter} adapts {base}, which is an adapter itself; save the adapted model as a whole.")
    checkpoint = open_file(found) if found.is_file() else _open_folder(found)
    if base is not None:
        checkpoint = _adapted(checkpoint, adapter)
    if mesh is not None:
        mesh = _checked_mesh(checkpoint.config, mesh)
    stored = _check_tensors(checkpoint)
    return checkpoint, np.dtype(jax.dtypes.canonicalize_dtype(wanted or stored)), mesh


def _adapted(checkpoint: Checkpoint, adapter: Path) -> Checkpoint:
    """Return a checkpoint whose tensors are read with an adapter's products added."""
    tensors = dict(checkpoint.tensors)
    for (path, place), low_rank in adapters.read(adapter, checkpoint.config).items():
        name = tensor_of(checkpoint.config, path, checkpoint.names[path], place)
        if name in tensors:
            tensors[name] = tensors[name]._replace(read=functools.partial(_read_adapted, tensors[name].read, low_rank))
    return checkpoint._replace(tensors=tensors)


def _read_adapted(
    read: Callable[[tuple[slice, ...]], np.ndarray], low_rank: adapters.LowRank, window: tuple[slice, ...]
) -> np.ndarray:
    return read(window).astype(np.float32) + low_rank.up[window[0]] @ low_rank.down[:, window[1]]


def _open_folder(folder: Path) -> Checkpoint:
    config = read_config(folder)
    files = _tensor_files(folder)
    tensors = {}
    for file in sorted(set(files.values())):
        with safe_open(file, framework="np") as held:
            for name in (name for name in files if files[name] == file):
                part = held.get_slice(name)
                tensors[name] = Tensor(
                    file, tuple(part.get_shape()), part.get_dtype(), functools.partial(_read_part, file, name)
                )
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
    family = family_of(read_object(folder / "config.json"))
    names = tensor_names(config)
    if family is not None:
        if unknown := family.tensors.keys() - names.keys():
            raise ValueError(
                f"{folder}: its family names tensors of {', '.join(sorted(unknown))}, which are no parameters."
            )
        names |= family.tensors
    try:
        tensors = arranged(tensors, config, names, FUSED.get(config.architecture, {}))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    return Checkpoint(folder, "config.json", config, tokenizer, tensors, names, IGNORED)


def _counted(
    read: Callable[[tuple[slice, ...]], np.ndarray], on_read: Callable[[int], None]
) -> Callable[[tuple[slice, ...]], np.ndarray]:
    def told(window: tuple[slice, ...]) -> np.ndarray:
        part = read(window)
        on_read(part.nbytes)
        return part

    return told


def _read_part(file: Path, name: str, window: tuple[slice, ...]) -> np.ndarray:
    # Opened again for each part: the file's pages that were read count as this process's memory until it is closed.
    with safe_open(file, framework="np") as tensors:
        return tensors.get_slice(name)[window]


def read_config(folder: Path) -> Config:
    """Read the config of a checkpoint, with the end tokens of generation_config.json if it exists.

    Chat models stop at tokens that only generation_config.json names (Llama 3's <|eot_id|>, Qwen's <|endoftext|>).

    Args:
        folder: the folder with config.json.

    Raises:
        FileNotFoundError: there is no config.json.
        ValueError: a file is not JSON, or the config is not supported.

    Example:
        >>> import pathlib
        >>> from models.load import read_config
        >>> read_config(pathlib.Path("nowhere"))
        Traceback (most recent call last):
        ...
        FileNotFoundError: nowhere has no config.json; give the folder of a model in Hugging Face layout.
    """
    file = folder / "config.json"
    if not file.is_file():
        inside = min(folder.glob("*.gguf"), default=None)
        other = f", or the file {inside}" if inside else ""
        raise FileNotFoundError(
            f"{folder} has no config.json; give the folder of a model in Hugging Face layout{other}."
        )
    raw = read_object(file)
    stop = read_object(folder / "generation_config.json").get("eos_token_id")
    if stop is not None:
        raw["eos_token_id"] = stop
    try:
        return from_hugging_face(raw)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def published_sampling(path: str | Path, revision: str | None = None) -> Sampling:
    """Read how a model's authors choose its tokens: greedily, unless its files say that tokens are drawn.

    A folder says so in generation_config.json ("do_sample"), a GGUF file by "general.sampling.temp".

    Args:
        path, revision: see :func:`load`.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: a file cannot be used, or names settings that no sampling has.

    Example:
        >>> from models.load import published_sampling
        >>> published_sampling("retriever")
        Sampling(temperature=0.0, top_k=None, top_p=None)
    """
    found = _find(path, revision)
    if found.is_file():
        said = read_sampling(found)
    else:
        found = found / "generation_config.json"
        said = read_object(found)
        if not said.get("do_sample"):
            return Sampling()
    if not said:
        return Sampling()
    top_k, top_p = said.get("top_k"), said.get("top_p")
    off = isinstance(top_k, int) and top_k <= 0
    temperature = said.get("temperature", 1.0)
    try:
        return check_sampling(temperature, None if off else top_k, top_p, jax.random.key(0))
    except ValueError as error:
        raise ValueError(f"{found}: {error} To choose tokens otherwise, give a temperature.") from None


def parse_mesh(text: str) -> Mesh:
    """Build a mesh from a command line's text: "data=2,tensor=4", where an axis that is left out has size 1.

    Args:
        text: how many ways the batch ("data") and the heads ("tensor") are split. In a model with experts these are
            split "tensor" ways too, and "expert" times as many ways where that axis is given; for all else the devices
            along it do the same work.

    Returns:
        A mesh over the first data x expert x tensor devices, partitioned automatically by JAX.

    Raises:
        ValueError: the text is not such a list, needs more devices than there are, or leaves some of several processes
            without work.

    Example:
        >>> from models.load import parse_mesh
        >>> dict(parse_mesh("data=1,tensor=1").shape)
        {'data': 1, 'tensor': 1}
    """
    parts = [re.fullmatch(r"\s*(data|expert|tensor)\s*=\s*([1-9]\d*)\s*", part) for part in text.split(",")]
    named = {part[1]: int(part[2]) for part in parts if part}
    if len(named) < len(parts):
        raise ValueError(f"mesh is {text!r}; write it like 'data=2,tensor=4', each axis at most once.")
    axes = tuple(axis for axis in ("data", "expert", "tensor") if axis != "expert" or axis in named)
    sizes = tuple(named.get(axis, 1) for axis in axes)
    devices, needed = jax.devices(), math.prod(sizes)
    if needed > len(devices):
        raise ValueError(
            f"mesh {text!r} needs {needed} devices, but there {'is' if len(devices) == 1 else 'are'} {len(devices)} "
            f"({devices[0].platform}); lower its numbers."
        )
    if needed < len(devices) and jax.process_count() > 1:
        raise ValueError(f"mesh {text!r} takes {needed} of the processes' {len(devices)} devices; it must take all.")
    return Mesh(np.array(devices[:needed]).reshape(sizes), axes)


def known_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the dtype of weights that a name or a type stands for.

    Raises:
        ValueError: it is none of a model's; float64 needs JAX's 64-bit mode.

    Example:
        >>> from models.load import known_dtype
        >>> str(known_dtype("bfloat16"))
        'bfloat16'
    """
    names = ["bfloat16", "float16", "float32"] + (["float64"] if jax.config.jax_enable_x64 else [])
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        known = None
    if known is None or known.name not in names:
        raise ValueError(f"dtype {dtype!r} is not known; expected one of {', '.join(names)}.")
    return known


def find_folder(path: str | Path, revision: str | None = None) -> Path:
    """Find the folder of a model's files; see :func:`load`. A model with a hub name is downloaded.

    Raises:
        FileNotFoundError: there is no such folder, here or on the hub.
        ValueError: the path is a file other than a GGUF file.

    Example:
        >>> from models.load import find_folder
        >>> find_folder("retriever").name
        'retriever'
    """
    found = _find(path, revision)
    return found.parent if found.is_file() else found


def _find(path: str | Path, revision: str | None) -> Path:
    """Return a model's folder, or its GGUF file."""
    if path in SHIPPED:
        return Path(__file__).parent / SHIPPED[str(path)]
    if path in published.PUBLISHED:
        return published.find(str(path))
    folder = Path(os.path.expanduser(path))  # unlike Path.expanduser, this leaves an unknown user's name
    if folder.is_dir():
        return folder
    if folder.is_file():
        if folder.suffix.lower() == ".gguf":
            return folder
        if folder.suffix in PICKLES:
            raise ValueError(_pickle_message(folder))
        raise ValueError(f"{path} is a file; give the folder that holds it, with config.json beside the weights.")
    if isinstance(path, str) and re.fullmatch(r"\w[\w.-]*/[\w.-]+", path):
        return _download(path, revision)
    raise FileNotFoundError(
        f"there is no folder {path}; give a folder with config.json and safetensors, a GGUF file, 'retriever' for the "
        "model that ships with kvjax, 'smollm2', 'smollm2-answers', or a hub name such as Qwen/Qwen3-0.6B."
    )


def _download(name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise FileNotFoundError(
            f"there is no folder {name}; to download it from the Hugging Face hub, install huggingface_hub: "
            "pip install huggingface_hub."
        ) from None
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=["*.json", "*.safetensors", "*.jinja"],
                # Second copies of the weights, in their authors' layout.
                ignore_patterns=["original/*", "consolidated*"],
            )
        )
    except Exception as error:  # the hub's, the HTTP client's and the disk's errors have no common base
        reason = " ".join(str(error).split()).partition(". ")[0][:200].rstrip(".")
        at = f" at revision {revision}" if revision else ""
        raise FileNotFoundError(
            f"there is no folder {name}, and downloading it from the Hugging Face hub{at} failed "
            f"({type(error).__name__}: {reason}); check the name and the network, or give a folder."
        ) from None


def _pickle_message(file: Path) -> str:
    return (
        f"{file} holds pickled weights, which can run code when read, so they are refused; convert them to safetensors "
        "(transformers' save_pretrained writes it)."
    )


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor, after checking that all shards are readable and hold what the index says."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ValueError(f"{index} has no weight_map from tensors to files; download it again.")
        shards = sorted(set(weight_map.values()))
        for shard in shards:
            if Path(shard).name != shard or "\0" in shard or len(shard) > 200:
                named = repr(shard[:60])
                raise ValueError(f"{index} names {named}, which is not a file of its own folder; download it again.")
            if not (folder / shard).is_file():
                raise FileNotFoundError(f"{folder} lacks the shard {shard}, which {index.name} names; download it.")
        held = {shard: _tensor_names(folder / shard) for shard in shards}
        for name, shard in weight_map.items():
            if name not in held[shard]:
                raise ValueError(f"{index} puts the tensor {name} in {shard}, which lacks it; download both again.")
        return {name: folder / shard for name, shard in weight_map.items()}
    if single.is_file():
        return dict.fromkeys(_tensor_names(single), single)
    for file in sorted(folder.iterdir()):
        if file.suffix in PICKLES:
            raise ValueError(_pickle_message(file))
    raise FileNotFoundError(f"{folder} has neither {single.name} nor {index.name}; give a folder with safetensors.")


def _tensor_names(file: Path) -> set[str]:
    refuse_pointer(file)
    try:
        with safe_open(file, framework="np") as tensors:
            return set(tensors.keys())
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or corrupted ({error}); download it again.") from None


def _check_tensors(checkpoint: Checkpoint) -> np.dtype:
    """Check every tensor's name, shape and dtype against the config, and return the dtype of most weights."""
    place, described, config, _, tensors, *_ = checkpoint
    if config.num_layers > len(tensors):
        raise ValueError(
            f"{place} holds {len(tensors)} tensors, too few for the {config.num_layers} layers of its {described}; is "
            "it complete?"
        )
    stacks = [(name, shape, PARAMETERS[name]) for name, shape in parameter_shapes(config).items()]
    expected = {
        tensor_of(config, name, checkpoint.names[name], at): file_shape(shape[stored.separate :], stored.groups)
        for name, shape, stored in stacks
        for at in np.ndindex(shape[: stored.separate])
    }
    for name in expected:
        if name not in tensors:
            raise ValueError(f"{place} lacks the tensor {name}, which its {described} requires; is it complete?")
    for name in sorted(tensors.keys() - expected.keys()):
        if not checkpoint.ignored.fullmatch(name):
            raise ValueError(
                f"{tensors[name].file} holds the tensor {name}, which the model of its {described} does not have; is "
                f"the {described.removesuffix('.json')} that of these weights?"
            )
    weights: Counter[str] = Counter()
    for name in expected:
        file, shape, dtype, _ = tensors[name]
        if shape != expected[name]:
            raise ValueError(f"{file}: {name} has shape {shape}; its {described} requires {expected[name]}.")
        if dtype not in DTYPES:
            raise ValueError(
                f"{file}: {name} is stored as {dtype}; supported are {', '.join(DTYPES)}. Quantised weights "
                "must be converted first."
            )
        weights[DTYPES[dtype]] += int(np.prod(shape))
    return jnp.dtype(weights.most_common(1)[0][0])


def _checked_mesh(config: Config, mesh: Mesh) -> Mesh:
    """Check that a mesh divides the heads, and return it with automatic axes: JAX partitions the decoder."""
    if set(mesh.axis_names) - {"expert"} != {"data", "tensor"}:
        raise ValueError(
            f"the mesh has axes {', '.join(map(str, mesh.axis_names))}; name them 'data' and 'tensor', and a third "
            "that splits experts 'expert'."
        )
    ways = mesh.shape["tensor"]
    split = [(config.num_heads, "query heads"), (config.num_kv_heads, "KV heads")]
    if config.num_experts:
        split.append((config.num_experts, "experts"))
    if config.dense_sizes or not config.num_experts:
        split.append((config.dense_size, "feed-forward units"))
    for count, what in split:
        if count % ways:
            raise ValueError(f"tensor={ways} does not divide the model's {count} {what}; choose a divisor of {count}.")
    more = mesh.shape.get("expert", 1)
    if more > 1 and not config.num_experts:
        raise ValueError(f"expert={more} splits experts, but this model has none; leave expert out.")
    if config.num_experts % (more * ways):
        raise ValueError(
            f"expert={more} and tensor={ways} split experts {more * ways} ways, which does not divide the model's "
            f"{config.num_experts}; choose a divisor of {config.num_experts // ways} for expert."
        )
    return Mesh(mesh.devices, mesh.axis_names)


@contextlib.contextmanager
def _progress(tensors: int) -> Iterator[Callable[[int], object]]:
    """Show a progress bar over tensors if tqdm is installed and standard error is a terminal."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda count: None
        return
    with tqdm(  # no bar for a model that loads within a second
        desc="loading",
        total=tensors,
        unit="tensor",
        file=sys.stderr,
        delay=1,
        leave=False,
        disable=None if hosts.first() else True,
    ) as bar:
        yield bar.update


def _place(
    name: str,
    shape: tuple[int, ...],
    checkpoint: Checkpoint,
    dtype: np.dtype,
    mesh: Mesh | None,
    advance: Callable[[int], object],
) -> jax.Array:
    """Put one parameter on its devices. Each shard is read separately, so no device or buffer holds the others."""
    parameter = PARAMETERS[name]
    separate = parameter.separate

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        parts = index or (slice(None),) * len(shape)
        bounds = [slice(*part.indices(size)) for part, size in zip(parts, shape, strict=True)]
        out = _aligned([part.stop - part.start for part in bounds], dtype)
        for place in np.ndindex(out.shape[:separate]):
            number = [part.start + at for part, at in zip(bounds, place, strict=False)]
            source = tensor_of(checkpoint.config, name, checkpoint.names[name], number)
            tensor, inner = checkpoint.tensors[source], bounds[separate:]
            _read_tensor(source, tensor, parameter.groups, shape[separate:], inner, out[place])
            if mesh is None:
                advance(1)
        return out

    # Wait, so that a copied buffer is freed before the next parameter allocates one.
    if mesh is None:  # uncommitted, like arrays that callers make; else a step on its own output would compile again
        return jax.device_put(read(None)).block_until_ready()
    uneven = "V" in parameter.axes.split() and checkpoint.config.vocab_size % mesh.shape["tensor"]
    sharding = NamedSharding(mesh, PartitionSpec() if uneven else partition(name, mesh))
    # Kept by index, as several devices of a process may hold the same part.
    array = jax.make_array_from_callback(shape, sharding, functools.cache(read)).block_until_ready()
    advance(math.prod(shape[:separate]))
    return array


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Allocate an array aligned to 64 bytes, which JAX on a CPU uses without a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def _read_tensor(
    source: str,
    tensor: Tensor,
    groups: tuple[tuple[int, ...], ...],
    shape: tuple[int, ...],
    bounds: list[slice],
    out: np.ndarray,
) -> None:
    """Read the part of one tensor within ``bounds`` (of the decoder's axes) into ``out``, transposed and cast."""
    order = [axis for group in groups for axis in group]
    view = out.transpose(order).reshape(file_shape(out.shape, groups), copy=False)  # as the file has it
    inner = [int(np.prod([shape[axis] for axis in group[1:]])) for group in groups]
    window = [slice(bounds[g[0]].start * n, bounds[g[0]].stop * n) for g, n in zip(groups, inner, strict=True)]
    step = max(1, CHUNK_BYTES * len(view) // out.nbytes)
    for first in range(0, len(view), step):
        part = view[first : first + step]
        start = window[0].start + first
        _assign(part, tensor.read((slice(start, start + len(part)), *window[1:])))
    if not _finite(out):
        raise ValueError(
            f"{tensor.file}: {source} holds NaN or infinite numbers as {out.dtype}; download it again, or load it in "
            "a dtype of a wider range."
        )


def _finite(array: np.ndarray) -> bool:
    """Return whether all numbers are finite: no exponent has all bits set. NumPy's isfinite is slow on 16 bits."""
    bits = array.reshape(-1).view(f"u{array.dtype.itemsize}")
    exponent = np.array(np.inf, array.dtype).view(bits.dtype)
    step = CHUNK_BYTES // array.dtype.itemsize
    return all((bits[start : start + step] & exponent).max() < exponent for start in range(0, bits.size, step))


def _assign(out: np.ndarray, block: np.ndarray) -> None:
    """Assign ``out[...] = block``; a transposition runs by tiles that fit the CPU's cache, which is much faster."""
    with np.errstate(over="ignore"):  # numbers that become infinite are reported later
        if out.ndim == 1 or out.flags.c_contiguous:
            out[...] = block
            return
        for row in range(0, out.shape[0], TILE):
            for column in range(0, out.shape[1], TILE):
                tile = (slice(row, row + TILE), slice(column, column + TILE))
                out[tile] = np.ascontiguousarray(block[tile])
