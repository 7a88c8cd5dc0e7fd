"""GGUF files, as llama.cpp reads and writes them: one file with a model's weights, its config and its tokenizer.

Quantised blocks are decoded by the package gguf. Tensors are read and dequantised in parts, so that memory never holds
a second copy of a model.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from kvjax._src import install
from models.checkpoint import Checkpoint, Tensor, Window, arranged, in_order, part_from, refuse_pointer
from models.config import Config
from models.families import FAMILIES
from models.gguf_config import FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS, config_of, family_in
from models.gguf_header import Stored, read_header, truncated
from models.gguf_tokenizer import tokenizer_of
from models.parameters import tensor_names

if TYPE_CHECKING:
    import gguf


IGNORED = re.compile("|".join(map(re.escape, (FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS))))  # no parameters


def open_file(file: Path) -> Checkpoint:
    """Open a GGUF file: read its header and check all that can be known before its weights are read.

    A tokenizer.json beside it is used instead of the tokenizer in it.

    Returns:
        Its config, its tokenizer (None if it has none), and its tensors, by llama.cpp's names and in Hugging Face's
        order of the elements of heads.

    Raises:
        ImportError: the package gguf is not installed.
        ValueError: the file is damaged, or has an architecture, a version, a tokenizer, a rope scaling or a
            quantisation that is not supported.
    """
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ImportError(f"{file} cannot be read: {install.needed(['gguf'], 'gguf')}") from None
    refuse_pointer(file)
    metadata, stored = read_header(file)
    try:
        name, stored_as = family_in(metadata)
        tensors = _by_expert({name: _tensor(file, name, tensor) for name, tensor in stored.items()})
        config = config_of(metadata, name, stored_as, tensors)
        renamed = names_in(stored_as.architecture)
        names = {name: renamed(tensor) for name, tensor in tensor_names(config).items()}
        fused = {renamed(tensor): parts for tensor, parts in FAMILIES[config.architecture].fused.items()}
        tensors = arranged(tensors, config, names, fused)
        if stored_as.neighbours:
            tensors |= _in_halves(tensors, names, config)
        if config.norm_offset:  # llama.cpp stores 1 + weight
            tensors |= {name: _less_1(tensors[name]) for name in tensors if name.endswith("norm.weight")}
        tokenizer = tokenizer_of(metadata, config, file)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return Checkpoint(file, "metadata", config, tokenizer, tensors, names, IGNORED)


def read_sampling(file: Path) -> dict[str, Any]:
    """Read how a GGUF file's tokens are drawn, in the names of a generation_config.json where that has them."""
    metadata, _ = read_header(file)
    prefix = "general.sampling."
    said = {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}
    return {"temperature": said.pop("temp"), "do_sample": True, **said} if "temp" in said else said


def _tensor(file: Path, name: str, stored: Stored) -> Tensor:
    """Return a tensor after checking that its type can be dequantised and that the file holds its data."""
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(stored.type)
    except ValueError:
        raise ValueError(
            f"{name} is stored in type {stored.type}, which the installed package gguf does not know; try a newer one "
            "(pip install --upgrade gguf)."
        ) from None
    if not _is_readable(kind):
        raise ValueError(
            f"{name} is stored as {kind.name}, which the installed gguf cannot dequantise; take a file with another "
            "quantisation, such as Q8_0."
        )
    block, bytes_of_block = gguf.GGML_QUANT_SIZES[kind]
    if stored.shape[-1] % block:
        raise ValueError(
            f"{name} is damaged: its vectors of {stored.shape[-1]} numbers are not a whole number of blocks of {block} "
            f"({kind.name}); download it again."
        )
    size = math.prod(stored.shape) // block * bytes_of_block
    if stored.offset + size > file.stat().st_size:
        raise ValueError(f"it is truncated: it ends before or within {name}; download it again.")
    dtype = kind.name if kind.name in ("F16", "BF16") else "F32"
    return Tensor(file, stored.shape, dtype, functools.partial(_read, file, kind, stored))


@functools.cache
def _is_readable(kind: gguf.GGMLQuantizationType) -> bool:
    """Return whether the package gguf can dequantise this type, by trying one block."""
    import gguf

    try:
        gguf.quants.dequantize(np.zeros(gguf.GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _read(file: Path, kind: gguf.GGMLQuantizationType, stored: Stored, window: Window) -> Float[np.ndarray, "..."]:
    """Read the numbers within a window, in float32; vectors outside it are not read."""
    import gguf

    vectors = window[0] if len(window) > 1 else slice(0, 1)  # a vector is read whole
    block, bytes_of_block = gguf.GGML_QUANT_SIZES[kind]
    width = stored.shape[-1] // block * bytes_of_block
    count = (vectors.stop - vectors.start) * width
    data = np.fromfile(file, np.uint8, count, offset=stored.offset + vectors.start * width)
    if data.size < count:  # the file was truncated after the header was read
        raise truncated(file)
    with np.errstate(all="ignore"):  # numbers that are not finite are reported later
        numbers = gguf.quants.dequantize(data.reshape(-1, width), kind)
    return numbers.reshape(-1)[window[0]] if len(window) == 1 else numbers[(slice(None), *window[1:])]


def names_in(architecture: str) -> Callable[[str], str]:
    """Return the function from tensors' Hugging Face names to llama.cpp's; {} stands for the layer and the expert.

    A tensor that llama.cpp does not know of the architecture, such as one of a mix of its layers, is called as Llama's.
    """
    import gguf

    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    numbers = gguf.MODEL_ARCH.LLAMA, known.get(architecture, gguf.MODEL_ARCH.LLAMA)
    llama, own = (gguf.get_tensor_name_map(number, 1).mapping for number in numbers)

    def renamed(tensor: str) -> str:
        whole = tensor.replace(".experts.{}", ".experts").format(0)
        whole += ".weight" if whole in own else ""  # a sink's name has no kind in Hugging Face's files
        name, _, kind = whole.rpartition(".")
        _, theirs = own.get(name) or llama.get(name) or (None, name)
        # One tensor holds a layer's experts; here each of them is one.
        return f"{theirs}.{kind}".replace("blk.0.", "blk.{}.") + "[{}]" * (".experts." in tensor)

    return renamed


def _by_expert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace each tensor of a layer's experts, [X, F, E] or a bias [X, F], by one for each expert."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if len(tensor.shape) == 3 and name.endswith("_exps.weight"):
            vectors = tensor.shape[1]
            found |= {f"{name}[{x}]": part_from(tensor, x * vectors, tensor.shape[1:]) for x in range(tensor.shape[0])}
        elif name.endswith("_exps.bias"):
            found |= {f"{name}[{x}]": _row(tensor, x) for x in range(tensor.shape[0])}
        else:
            found[name] = tensor
    return found


def _row(tensor: Tensor, x: int) -> Tensor:
    """Return a row of a matrix as a tensor."""
    return tensor._replace(shape=tensor.shape[1:], read=lambda window: tensor.read((slice(x, x + 1), *window))[0])


def _in_halves(tensors: Mapping[str, Tensor], names: Mapping[str, str], config: Config) -> dict[str, Tensor]:
    """Return the query and key projections with the elements of each head in Hugging Face's order.

    llama.cpp rotates neighbouring elements, whereas Hugging Face rotates element i with element i + D / 2.
    """
    order = np.arange(config.head_dim).reshape(-1, 2).T.reshape(-1)
    rotated = [names[f"layers.{part}"] for part in ("query", "key", "query_bias", "key_bias")]
    of_layers = (name.format(layer) for name in rotated for layer in range(config.num_layers))
    return {name: in_order(tensors[name], order) for name in of_layers if name in tensors}


def _less_1(tensor: Tensor) -> Tensor:
    return tensor._replace(read=lambda window: tensor.read(window) - 1)
