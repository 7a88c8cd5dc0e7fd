"""GGUF files, as llama.cpp reads and writes them: one file with a model's weights, its config and its tokenizer.

Quantised blocks are decoded by the package gguf. Tensors are read and dequantised in parts, so that memory never holds
a second copy of a model.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from kvjax._src import install
from models.checkpoint import Checkpoint, Tensor, Window, refuse_pointer
from models.config import Config
from models.families import Gguf
from models.gguf_config import FREQUENCY_FACTORS, LONG_FACTORS, MORE_LAYERS, SHORT_FACTORS, config_of, family_in
from models.gguf_header import Stored, optional, read_header, truncated
from models.gguf_tensors import in_hugging_faces_form, in_parts, names_of
from models.gguf_tokenizer import tokenizer_of

if TYPE_CHECKING:
    import gguf


IGNORED = "|".join(map(re.escape, (FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS)))  # no parameters


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
        tensors = in_parts({name: _tensor(file, name, tensor) for name, tensor in stored.items()})
        config = config_of(metadata, name, stored_as, tensors)
        names = names_of(stored_as.architecture, config)
        tensors = in_hugging_faces_form(tensors, names, config, stored_as)
        tokenizer = tokenizer_of(metadata, config, file)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return Checkpoint(file, "metadata", config, tokenizer, tensors, names, _ignored(config, stored_as, metadata))


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


def _ignored(config: Config, stored: Gguf, metadata: Mapping[str, Any]) -> re.Pattern[str]:
    """Return the names of tensors that are not read: no parameters, and those of layers that predict later tokens."""
    more = optional(metadata, f"{stored.architecture}.{MORE_LAYERS}", int, 0)
    drafts = "|".join(map(str, range(config.num_layers, config.num_layers + more)))
    sharing = "|".join(map(str, range(config.num_layers - config.shared_layers, config.num_layers)))
    keys = rf"|blk\.({sharing})\.attn_(k|v|k_norm)\.weight" if config.shared_layers else ""
    keys += r"|blk\.\d+\.indexer\..*" if config.most_attended else ""
    return re.compile(IGNORED + (rf"|blk\.({drafts})\..*" if more else "") + keys)
