"""GGUF files, as llama.cpp reads and writes them: one file with a model's weights, its config and its tokenizer.

The header is read here, which is much faster than the package gguf and reports a damaged file in one sentence.
Quantised blocks are decoded by the package gguf. A tensor is read and dequantised by rows, so that memory never holds a
second copy of a model.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import tokenizers
from jaxtyping import Float
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from kvjax import install
from kvjax.checks import shown
from models.checkpoint import Checkpoint, Tensor, arranged, in_order, refuse_pointer, rows_from
from models.config import NO_ROPE, Config, Rope
from models.config_json import TRAITS
from models.decoder import rope_frequencies
from models.tokenizer import Tokenizer

if TYPE_CHECKING:
    import gguf

# llama.cpp's architectures, and ours; a "llama" with experts is our "mixtral".
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
    "granite": "granite",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
NEIGHBOURS = ("llama", "mixtral", "smollm3", "granite")  # families whose neighbouring elements llama.cpp rotates
VERSIONS = (2, 3)
FREQUENCY_FACTORS = "rope_freqs.weight"  # Llama 3.1's rope scaling, as a factor for each frequency
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"  # longrope's
IGNORED = re.compile("|".join(map(re.escape, (FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS))))  # no parameters

# llama.cpp's name of each of the decoder's parameters.
NAMES = {
    "embedding": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "layers.attention_norm": "blk.{}.attn_norm.weight",
    "layers.query": "blk.{}.attn_q.weight",
    "layers.key": "blk.{}.attn_k.weight",
    "layers.value": "blk.{}.attn_v.weight",
    "layers.output": "blk.{}.attn_output.weight",
    "layers.feed_norm": "blk.{}.ffn_norm.weight",
    "layers.gate": "blk.{}.ffn_gate.weight",
    "layers.up": "blk.{}.ffn_up.weight",
    "layers.down": "blk.{}.ffn_down.weight",
    "layers.query_bias": "blk.{}.attn_q.bias",
    "layers.key_bias": "blk.{}.attn_k.bias",
    "layers.value_bias": "blk.{}.attn_v.bias",
    "layers.output_bias": "blk.{}.attn_output.bias",
    "layers.query_norm": "blk.{}.attn_q_norm.weight",
    "layers.key_norm": "blk.{}.attn_k_norm.weight",
    "layers.wide_query_norm": "blk.{}.attn_q_norm.weight",
    "layers.wide_key_norm": "blk.{}.attn_k_norm.weight",
    "layers.attention_post_norm": "blk.{}.post_attention_norm.weight",
    "layers.feed_post_norm": "blk.{}.post_ffw_norm.weight",
    "layers.router": "blk.{}.ffn_gate_inp.weight",
    # One tensor holds a layer's experts; here each of them is one.
    "layers.expert_gate": "blk.{}.ffn_gate_exps.weight[{}]",
    "layers.expert_up": "blk.{}.ffn_up_exps.weight[{}]",
    "layers.expert_down": "blk.{}.ffn_down_exps.weight[{}]",
}
FUSED = {
    "phi3": {
        "blk.{}.attn_qkv.weight": ("layers.query", "layers.key", "layers.value"),
        "blk.{}.ffn_up.weight": ("layers.gate", "layers.up"),
    },
}
ROTATED = re.compile(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)")

# Keys of the architecture that are read, or that have no effect.
KNOWN_KEYS = {
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
    "attention.value_length", "block_count", "context_length", "embedding_length", "feed_forward_length",
    "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.factor", "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "rope.scaling.type", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "tensor_data_layout", "vocab_size",
}  # fmt: skip
# Keys that are read of some architectures only.
OWN_KEYS = {
    "gemma2": {"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"},
    "gemma3": {"attention.sliding_window", "final_logit_softcapping", "rope.freq_base_swa"},
    "granite": {"attention.scale", "embedding_scale", "logit_scale", "residual_scale"},
    "llama": {"expert_count", "expert_used_count"},
    "phi3": {"attention.sliding_window", "rope.scaling.attn_factor"},
    "qwen3moe": {"expert_count", "expert_feed_forward_length", "expert_used_count"},
}
# Other keys, with the value that has no effect.
NEUTRAL_KEYS = {
    "attention.causal": True,
    "attention.sliding_window": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.attn_factor": 1,
    "use_parallel_residual": False,
}

SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<?", 10: "<u8", 11: "<i8", 12: "<f8"
}  # fmt: skip
TEXT, ARRAY = 8, 9
UNSIGNED_32, UNSIGNED_64 = SCALARS[4], SCALARS[10]
WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", list: "a list"}

# Types of tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}"
# The patterns by which each pre-tokenizer splits a text, one after the other.
SPLITS = {
    "default": (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (GPT2,),
    "llama-bpe": (rf"{WORD}|\p{{N}}{{1,3}}|{REST}",),
    "qwen2": (rf"{WORD}|\p{{N}}|{REST}",),
    "smollm": (r"\p{N}", GPT2),
    "gpt-4o": (rf"{CASED}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",),  # Phi-4-mini's
}
SPLITS["dbrx"] = SPLITS["llama-bpe"]  # OLMo-2's
SPLITS["refact"] = SPLITS["smollm"]  # Granite's
SPACE = "▁"  # SentencePiece's
# Tokens that end a turn, for older files that name only the end of a text.
ENDS_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")


class Stored(NamedTuple):
    """A tensor's entry in the header: its shape (rows first), the number of its type, and where its data begin."""

    shape: tuple[int, ...]
    type: int
    offset: int


def open_file(file: Path) -> Checkpoint:
    """Open a GGUF file: read its header and check all that can be known before its weights are read.

    Args:
        file: a model of one of the ``ARCHITECTURES``. A tokenizer.json beside it is used instead of the tokenizer in
            it.

    Returns:
        Its config, its tokenizer (None if it has none), and its tensors, by llama.cpp's names and in Hugging Face's
        order of rows.

    Raises:
        ImportError: the package gguf is not installed.
        ValueError: the file is truncated or corrupted, of another architecture or version, or has a tokenizer, a rope
            scaling or a quantisation that is not supported.

    Example:
        >>> import pathlib, tempfile
        >>> from models.gguf import open_file
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "model.gguf"
        >>> _ = file.write_bytes(b"PK, a zip file")
        >>> open_file(file)
        Traceback (most recent call last):
        ...
        ValueError: ...model.gguf is no GGUF file: it begins with b'PK, ', not with b'GGUF'; download it again.
    """
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ImportError(f"{file} cannot be read: {install.needed(['gguf'], 'gguf')}") from None
    refuse_pointer(file)
    metadata, stored = _header(file)
    try:
        architecture = _architecture(metadata)
        tensors = _by_expert({name: _tensor(file, name, tensor) for name, tensor in stored.items()})
        config = _config(metadata, architecture, tensors)
        tensors = arranged(tensors, config, NAMES, FUSED.get(architecture, {}))
        if config.architecture in NEIGHBOURS:
            tensors = {name: _in_halves(name, tensor, config) for name, tensor in tensors.items()}
        if config.norm_offset:  # llama.cpp stores 1 + weight
            less = {name: t for name, t in tensors.items() if name.endswith("norm.weight")}
            tensors |= {name: t._replace(read=functools.partial(_read_less_1, t.read)) for name, t in less.items()}
        tokenizer = _tokenizer(metadata, config, file)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return Checkpoint(file, "metadata", config, tokenizer, tensors, NAMES, IGNORED)


def read_sampling(file: Path) -> dict[str, Any]:
    """Read the temperature, top_k and top_p that a GGUF file names, {} where it names no temperature.

    Example:
        >>> import pathlib, tempfile
        >>> from models.gguf import read_sampling
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "model.gguf"
        >>> # no tensors, no keys
        >>> _ = file.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
        >>> read_sampling(file)
        {}
    """
    metadata, _ = _header(file)
    names = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p"}
    said = {name: metadata.get(f"general.sampling.{key}") for name, key in names.items()}
    return {} if said["temperature"] is None else said


# The header


def _header(file: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Read all keys with their values, and all tensors with their places in the file."""
    with file.open("rb") as stream:
        reader = _Reader(file, stream)
        magic = reader.take(4)
        if magic != b"GGUF":
            raise ValueError(f"{file} is no GGUF file: it begins with {magic!r}, not with b'GGUF'; download it again.")
        version = reader.number(UNSIGNED_32)
        if version % (1 << 16) == 0:
            raise ValueError(f"{file} is a big-endian GGUF file; only little-endian ones are read: convert it again.")
        if version not in VERSIONS:
            raise ValueError(
                f"{file} is of GGUF version {version}; expected {VERSIONS[0]} or {VERSIONS[1]}: take "
                f"{'a newer kvjax' if version > max(VERSIONS) else 'a file that was converted later'}."
            )
        tensors, keys = reader.number(UNSIGNED_64), reader.number(UNSIGNED_64)
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = reader.text()
            if key in metadata:
                raise reader.damaged(f"the key {key[:60]!r} is there twice")
            metadata[key] = reader.value(reader.number(UNSIGNED_32))
        stored: dict[str, Stored] = {}
        for _ in range(tensors):
            name = reader.text()
            if name in stored:
                raise reader.damaged(f"the tensor {name[:60]!r} is there twice")
            axes = reader.number(UNSIGNED_32)
            if not 1 <= axes <= 4:
                raise reader.damaged(f"the tensor {name[:60]!r} has {axes} axes")
            shape = tuple(reader.number(UNSIGNED_64) for _ in range(axes))[::-1]
            stored[name] = Stored(shape, reader.number(UNSIGNED_32), reader.number(UNSIGNED_64))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise reader.damaged(f"general.alignment is {shown(alignment)}")
        data = -(-stream.tell() // alignment) * alignment
    return metadata, {name: tensor._replace(offset=data + tensor.offset) for name, tensor in stored.items()}


class _Reader:
    """Numbers and texts from a stream that may end too early."""

    def __init__(self, file: Path, stream: BinaryIO):
        self.file, self.stream = file, stream
        self.size = os.fstat(stream.fileno()).st_size

    def take(self, count: int) -> bytes:
        if count > self.size:  # a damaged length must not allocate that much memory
            raise _truncated(self.file)
        found = self.stream.read(count)
        if len(found) < count:
            raise _truncated(self.file)
        return found

    def number(self, kind: str) -> Any:
        dtype = np.dtype(kind)
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def text(self) -> str:
        length = int.from_bytes(self.take(8), "little")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.damaged("a text in its header is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            raise self.damaged(f"a value is of the unknown type {kind}")
        inner, count = self.number(UNSIGNED_32), self.number(UNSIGNED_64)
        if inner == TEXT:
            return [self.text() for _ in range(count)]
        if inner not in SCALARS:
            raise self.damaged(f"a list is of the unknown type {inner}")
        dtype = np.dtype(SCALARS[inner])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def damaged(self, what: str) -> ValueError:
        return ValueError(f"{self.file} is damaged: {what}; download it again.")


def _truncated(file: Path) -> ValueError:
    return ValueError(f"{file} is truncated: it ends within what its header promises; download it again.")


# Tensors


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
            f"{name} is damaged: its rows of {stored.shape[-1]} numbers are not a whole number of blocks of {block} "
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


def _read(
    file: Path, kind: gguf.GGMLQuantizationType, stored: Stored, window: tuple[slice, ...]
) -> Float[np.ndarray, "..."]:
    """Read the numbers within a window, in float32; rows outside it are not read."""
    import gguf

    rows = window[0] if len(window) > 1 else slice(0, 1)  # a vector is one row
    block, bytes_of_block = gguf.GGML_QUANT_SIZES[kind]
    width = stored.shape[-1] // block * bytes_of_block
    count = (rows.stop - rows.start) * width
    data = np.fromfile(file, np.uint8, count, offset=stored.offset + rows.start * width)
    if data.size < count:  # the file was truncated after the header was read
        raise _truncated(file)
    with np.errstate(all="ignore"):  # numbers that are not finite are reported later
        numbers = gguf.quants.dequantize(data.reshape(-1, width), kind)
    return numbers.reshape(-1)[window[0]] if len(window) == 1 else numbers[(slice(None), *window[1:])]


def _by_expert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace each tensor of a layer's experts, [X, rows, columns], by one for each expert."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if len(tensor.shape) == 3 and name.endswith("_exps.weight"):
            rows = tensor.shape[1]
            found |= {f"{name}[{x}]": rows_from(tensor, x * rows, tensor.shape[1:]) for x in range(tensor.shape[0])}
        else:
            found[name] = tensor
    return found


def _read_less_1(read: Callable[[tuple[slice, ...]], np.ndarray], window: tuple[slice, ...]) -> np.ndarray:
    return read(window) - 1


def _in_halves(name: str, tensor: Tensor, config: Config) -> Tensor:
    """Return a query or key projection with each head's rows in Hugging Face's order.

    llama.cpp rotates neighbouring elements, whereas Hugging Face rotates element i with element i + D / 2.
    """
    found = ROTATED.fullmatch(name)
    heads = config.num_heads if found and found[1] == "q" else config.num_kv_heads
    if not found or tensor.shape[0] != heads * config.head_dim:  # a wrong shape is reported later
        return tensor
    return in_order(tensor, np.arange(config.head_dim).reshape(-1, 2).T.reshape(-1))


# The config


def _architecture(metadata: Mapping[str, Any]) -> str:
    architecture = _needed(metadata, "general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"architecture {architecture!r} is not supported in GGUF files; supported are {', '.join(ARCHITECTURES)}."
        )
    pieces = _optional(metadata, "split.count", int, 1)
    if pieces > 1:
        raise ValueError(
            f"it is one of {pieces} pieces of a model; join them first (llama-gguf-split --merge FIRST JOINED)."
        )
    prefix = f"{architecture}."
    for key, value in metadata.items():
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or name in KNOWN_KEYS | OWN_KEYS.get(architecture, set()):
            continue
        if name not in NEUTRAL_KEYS or value != NEUTRAL_KEYS[name]:
            said = " ".join(key.split())  # a damaged name may hold line breaks
            raise ValueError(
                f"its key {said} is {shown(value)}, which is not supported; take another file, or the original folder "
                "with config.json."
            )
    return architecture


def _config(metadata: Mapping[str, Any], architecture: str, tensors: Mapping[str, Tensor]) -> Config:
    size = functools.partial(_size, metadata)
    hidden, heads = size(f"{architecture}.embedding_length"), size(f"{architecture}.attention.head_count")
    head_dim = size(f"{architecture}.attention.key_length", hidden // heads)
    whole = [("attention.value_length", "values"), ("rope.dimension_count", "rotation")]
    for name, what in whole[:1] if architecture == "phi3" else whole:
        other = size(f"{architecture}.{name}", head_dim)
        if other != head_dim:
            raise ValueError(
                f"its key {architecture}.{name} is {other}, but a head has {head_dim} numbers; only models whose "
                f"{what} take a whole head are supported."
            )
    if NAMES["embedding"] not in tensors:
        raise ValueError(f"it lacks the tensor {NAMES['embedding']}; is it complete, and a language model's?")
    positions = size(f"{architecture}.context_length")
    eos = [_id(metadata, name) for name in ("eos", "eot", "eom")]
    layers = size(f"{architecture}.block_count")
    experts = _optional(metadata, f"{architecture}.expert_count", int, 0)
    ours = "mixtral" if architecture == "llama" and experts else ARCHITECTURES[architecture]
    feed_forward = "expert_feed_forward_length" if architecture == "qwen3moe" else "feed_forward_length"
    return Config(
        architecture=ours,
        vocab_size=tensors[NAMES["embedding"]].shape[0],
        hidden_size=hidden,
        intermediate_size=size(f"{architecture}.{feed_forward}"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=size(f"{architecture}.attention.head_count_kv", heads),
        head_dim=head_dim,
        rope=_rope(metadata, architecture, head_dim, positions, tensors),
        norm_epsilon=_positive(metadata, f"{architecture}.attention.layer_norm_rms_epsilon"),
        max_positions=positions,
        tie_embeddings=NAMES["head"] not in tensors,
        attention_bias=architecture == "qwen2" or NAMES["layers.query_bias"].format(0) in tensors,
        output_bias=NAMES["layers.output_bias"].format(0) in tensors,
        bos=_id(metadata, "bos"),
        eos=tuple(dict.fromkeys(token for token in [*eos, *_ends_of_turn(metadata)] if token is not None)),
        pad=_id(metadata, "padding"),
        **TRAITS.get(ours, {}),
        **_features(metadata, architecture, layers, hidden, heads, head_dim),
        **_experts(metadata, architecture, experts, layers, tensors),
    )


def _features(
    metadata: Mapping[str, Any], architecture: str, layers: int, hidden: int, heads: int, head_dim: int
) -> dict[str, Any]:
    """Return the fields that only this architecture has, with llama.cpp's own values for what a file leaves out."""

    def number(name: str, default: float | None = None) -> float | None:
        key = f"{architecture}.{name}"
        return default if metadata.get(key) is None else _positive(metadata, key)

    if architecture == "smollm3":
        return {"ropes": tuple(None if (layer + 1) % 4 else NO_ROPE for layer in range(layers))}
    if architecture == "granite":
        if metadata.get("granite.rope.scaling.finetuned") is False:
            raise ValueError("its key granite.rope.scaling.finetuned is False, a model without rotary embedding.")
        return {
            "embedding_multiplier": number("embedding_scale", 1.0),
            "residual_multiplier": number("residual_scale", 1.0),
            "logits_scaling": number("logit_scale", 1.0),
            "attention_multiplier": number("attention.scale"),
        }
    if architecture == "phi3":
        window = _optional(metadata, "phi3.attention.sliding_window", int, 0) or None
        return {"sliding_windows": (window,) * layers}
    if architecture not in ("gemma2", "gemma3"):
        return {}
    window, pattern = _size(metadata, f"{architecture}.attention.sliding_window", 4096), {"gemma2": 2, "gemma3": 6}
    windows = tuple(window if (layer + 1) % pattern[architecture] else None for layer in range(layers))
    # The factor of the logits is not stored; llama.cpp tells the two largest models by their number of layers.
    largest = layers == {"gemma2": 46, "gemma3": 62}[architecture]
    found: dict[str, Any] = {
        "sliding_windows": windows,
        "embedding_multiplier": hidden**0.5,
        "attention_multiplier": (hidden / heads) ** -0.5 if largest and hidden != heads * head_dim else None,
        "logits_soft_cap": number("final_logit_softcapping", 30.0 if architecture == "gemma2" else None),
    }
    if architecture == "gemma2":
        return found | {"attention_soft_cap": number("attn_logit_softcapping", 50.0)}
    local = Rope(_positive(metadata, "gemma3.rope.freq_base_swa", 10_000.0))
    return found | {"ropes": tuple(local if window else None for window in windows)}


def _experts(
    metadata: Mapping[str, Any], architecture: str, experts: int, layers: int, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    if not experts:
        return {}
    used = _size(metadata, f"{architecture}.expert_used_count")
    found = {"num_experts": experts, "experts_per_token": used, "normalise_experts": True}  # as llama.cpp does
    dense = [NAMES["layers.gate"].format(layer) in tensors for layer in range(min(layers, len(tensors)))]
    if architecture != "qwen3moe" or not any(dense):
        return found
    size = _size(metadata, f"{architecture}.feed_forward_length")
    return found | {"dense_sizes": tuple(size if whether else None for whether in dense)}


def _rope(
    metadata: Mapping[str, Any], architecture: str, head_dim: int, positions: int, tensors: Mapping[str, Tensor]
) -> Rope:
    prefix, factors = f"{architecture}.rope.", tensors.get(FREQUENCY_FACTORS)
    theta = _positive(metadata, f"{prefix}freq_base", 10_000.0)
    if architecture == "phi3":
        return _longrope(metadata, theta, head_dim, positions, tensors)
    kind = _optional(metadata, f"{prefix}scaling.type", str, "linear")
    factor = _positive(metadata, f"{prefix}scaling.factor", _positive(metadata, f"{prefix}scale_linear", 1.0))
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(
            f"its key {prefix}scaling.type is {kind!r}; supported are none, linear and yarn, and Llama 3.1's factors."
        )
    if kind == "none" or (kind == "linear" and factor == 1):
        return Rope(theta) if factors is None else _llama3(theta, head_dim, factors)
    if factors is not None:
        raise ValueError(f"it holds both {FREQUENCY_FACTORS} and {prefix}scaling.type {kind!r}; only one is supported.")
    if kind == "linear":
        return Rope(theta, "linear", factor)
    return Rope(
        theta,
        "yarn",
        factor,
        original_positions=_size(metadata, f"{prefix}scaling.original_context_length", positions),
        beta_fast=_positive(metadata, f"{prefix}scaling.yarn_beta_fast", 32.0),
        beta_slow=_positive(metadata, f"{prefix}scaling.yarn_beta_slow", 1.0),
    )


def _longrope(
    metadata: Mapping[str, Any], theta: float, head_dim: int, positions: int, tensors: Mapping[str, Tensor]
) -> Rope:
    """Return Phi-3's rotary embedding: of a part of each head, and with two tensors of factors for long contexts."""
    partial = _size(metadata, "phi3.rope.dimension_count", head_dim) / head_dim
    if LONG_FACTORS not in tensors or SHORT_FACTORS not in tensors:
        return Rope(theta, partial_rotary_factor=partial)
    original = _size(metadata, "phi3.rope.scaling.original_context_length", positions)
    long, short = (
        tuple(float(str(x)) for x in tensor.read((slice(0, tensor.shape[0]),)).astype(np.float32))
        for tensor in (tensors[LONG_FACTORS], tensors[SHORT_FACTORS])
    )
    amplitude = metadata.get("phi3.rope.scaling.attn_factor")
    return Rope(
        theta,
        "longrope",
        positions / original,
        original_positions=original,
        attention_factor=None if amplitude is None else _positive(metadata, "phi3.rope.scaling.attn_factor"),
        partial_rotary_factor=partial,
        short_factor=short,
        long_factor=long,
    )


def _llama3(theta: float, head_dim: int, factors: Tensor) -> Rope:
    """Find the Llama 3.1 scaling that given factors on the frequencies come from: the file stores nothing else of it.

    All models of that family scale partially between 1 and 4 turns in their original context, a power of two.
    """
    if factors.shape != (head_dim // 2,):
        raise ValueError(
            f"{FREQUENCY_FACTORS} has shape {factors.shape}; a head of {head_dim} requires {head_dim // 2}."
        )
    found = factors.read((slice(0, head_dim // 2),))
    if not np.isfinite(found).all() or found.min() < 1:
        raise ValueError(f"{FREQUENCY_FACTORS} is damaged: it holds numbers below 1 or not finite; download it again.")
    if found.max() == 1:
        return Rope(theta)
    plain = np.asarray(rope_frequencies(Rope(theta), head_dim)[0][0])
    for original in (1 << power for power in range(13, 21)):
        rope = Rope(theta, "llama3", float(found.max()), original)
        ours = plain / np.asarray(rope_frequencies(rope, head_dim)[0][0])
        if np.allclose(ours, found, rtol=1e-4):
            return rope
    raise ValueError(
        f"the factors in {FREQUENCY_FACTORS} are not those of Llama 3.1's rope scaling, the only ones supported; take "
        "the original folder with config.json."
    )


# The tokenizer


def _tokenizer(metadata: Mapping[str, Any], config: Config, file: Path) -> Tokenizer | None:
    beside = file.parent / "tokenizer.json"
    kind = _optional(metadata, "tokenizer.ggml.model", str, "none")
    if kind not in ("gpt2", "llama", "none", "no_vocab") and not beside.is_file():
        raise ValueError(
            f"its tokenizer is of the kind {kind!r}, but only gpt2 (BPE) and llama (SentencePiece) are read; put the "
            "model's tokenizer.json beside the file, which is then used."
        )
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    if len(tokens) > config.vocab_size:
        raise ValueError(
            f"it has {len(tokens)} tokens and embeddings for {config.vocab_size}; is it complete? Download it again."
        )
    ids = {"bos_token": config.bos, "eos_token": _id(metadata, "eos"), "pad_token": config.pad}
    ids["unk_token"] = _id(metadata, "unknown")
    special = {name: tokens[index] for name, index in ids.items() if index is not None and index < len(tokens)}
    template = _optional(metadata, "tokenizer.chat_template", str, None)
    if beside.is_file():
        own = Tokenizer.from_folder(file.parent)
        return Tokenizer(own.backend, special | own.special_tokens, own.chat_template or template)
    if kind in ("none", "no_vocab"):
        return None
    if not tokens:
        raise ValueError("it lacks the key tokenizer.ggml.tokens (a list); put the model's tokenizer.json beside it.")
    types = _list(metadata, "tokenizer.ggml.token_type", int) or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"it has {len(tokens)} tokens and the types of {len(types)}; download it again.")
    make = _byte_level if kind == "gpt2" else _sentencepiece
    backend = make(metadata, tokens, types, special.get("unk_token"))
    added = [
        tokenizers.AddedToken(token, special=type_ != USER_DEFINED, normalized=False)
        for token, type_ in zip(tokens, types, strict=True)
        if token and type_ in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    backend.add_tokens(added)
    _surround(backend, metadata, config, tokens, by_default=kind == "llama" or _pre_tokenizer(metadata) == "llama-bpe")
    return Tokenizer(backend, special, template)


def _byte_level(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], unknown: str | None
) -> tokenizers.Tokenizer:
    """Build a BPE tokenizer over bytes, as GPT-2's."""
    name = _pre_tokenizer(metadata)
    if name not in SPLITS:
        raise ValueError(
            f"its pre-tokenizer is {name!r}, but only {', '.join(SPLITS)} are read; put the model's tokenizer.json "
            "beside the file, which is then used."
        )
    # The space between the two parts is never the first character.
    merges = [(merge[:at], merge[at + 1 :]) for merge in _merges(metadata) if (at := merge.find(" ", 1)) > 0]
    # Unused ids have texts such as [PAD7], which must not be matched in a text.
    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] != UNUSED}
    backend = _bpe(vocabulary, merges, ignore_merges=name == "llama-bpe")
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in SPLITS[name]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], unknown: str | None
) -> tokenizers.Tokenizer:
    """Build a SentencePiece BPE tokenizer, as Llama 2's: the pair whose joint token scores best is joined first."""
    scores = _list(metadata, "tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ValueError(f"it has {len(tokens)} tokens and the scores of {len(scores)}; download it again.")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    joint = [index for index, kind in enumerate(types) if kind in (NORMAL, USER_DEFINED, UNUSED)]
    merges = [
        (tokens[index][:at], tokens[index][at:])
        for index in sorted(joint, key=lambda index: -scores[index])
        for at in range(1, len(tokens[index]))
        if tokens[index][:at] in vocabulary and tokens[index][at:] in vocabulary
    ]
    backend = _bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefixed = _optional(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
    backend.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(SPACE)] if prefixed else []), normalizers.Replace(" ", SPACE)]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefixed else []),
        ]
    )
    return backend


def _bpe(vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(tokenizers.models.BPE(dict(vocabulary), list(merges), **options))
    except Exception as error:  # the library raises nothing narrower
        reason = " ".join(str(error).split())
        raise ValueError(f"its tokens and merges do not form a tokenizer ({reason}); download it again.") from None


def _surround(
    backend: tokenizers.Tokenizer,
    metadata: Mapping[str, Any],
    config: Config,
    tokens: Sequence[str],
    by_default: bool,
) -> None:
    """Add BOS before a text and EOS after it if the file says so."""
    parts: list[str] = ["$A"]
    used = []
    for name, index, default in (("bos", config.bos, by_default), ("eos", _id(metadata, "eos"), False)):
        key = f"tokenizer.ggml.add_{name}_token"
        if not _optional(metadata, key, bool, default and index is not None):
            continue
        if index is None or index >= len(tokens):
            raise ValueError(f"its key {key} is true, and there is no such token; download it again.")
        used.append((tokens[index], index))
        parts = [tokens[index], *parts] if name == "bos" else [*parts, tokens[index]]
    if used:
        second = [part.replace("$A", "$B") for part in parts]
        backend.post_processor = processors.TemplateProcessing(
            single=parts, pair=[*parts, *second], special_tokens=used
        )


def _pre_tokenizer(metadata: Mapping[str, Any]) -> str:
    return _optional(metadata, "tokenizer.ggml.pre", str, "default")


def _merges(metadata: Mapping[str, Any]) -> list[str]:
    return _list(metadata, "tokenizer.ggml.merges", str)


def _ends_of_turn(metadata: Mapping[str, Any]) -> list[int]:
    """Return the control tokens that end a turn in the chat template."""
    template = _optional(metadata, "tokenizer.chat_template", str, "")
    tokens, types = _list(metadata, "tokenizer.ggml.tokens", str), _list(metadata, "tokenizer.ggml.token_type", int)
    used = [text for text in ENDS_OF_TURN if text in template]
    return [index for index, kind in enumerate(types[: len(tokens)]) if kind == CONTROL and tokens[index] in used]


def _id(metadata: Mapping[str, Any], name: str) -> int | None:
    """Return the id of a special token; None without one, which a file may also mark by an id out of range."""
    index = _optional(metadata, f"tokenizer.ggml.{name}_token_id", int, None)
    return None if index is None or not 0 <= index < 2**31 - 1 else index


# Values


def _optional(metadata: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    """Return the value of a key, or the default if it is missing."""
    value = metadata.get(key)
    if value is None:
        return default
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"its key {key} is {shown(value)}; expected {WORDS[kind]}. Convert the model again.")
    return value


def _needed(metadata: Mapping[str, Any], key: str, kind: type) -> Any:
    value = _optional(metadata, key, kind, None)
    if value is None:
        raise ValueError(f"it lacks the key {key} ({WORDS[kind]}); is it a language model's? Convert the model again.")
    return value


def _size(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive integer; if a file has one per layer, they must be equal."""
    value = metadata.get(key)
    if isinstance(value, list) and value:
        if any(other != value[0] for other in value):
            raise ValueError(f"its key {key} differs from layer to layer, which is not supported.")
        metadata = {key: value[0]}
    value = _needed(metadata, key, int) if default is None else _optional(metadata, key, int, default)
    if value < 1:
        raise ValueError(f"its key {key} is {value}; expected a positive integer. Convert the model again.")
    return value


def _positive(metadata: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a number above 0, as it was before the file rounded it to float32."""
    value = _needed(metadata, key, float) if default is None else _optional(metadata, key, float, default)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"its key {key} is {value!r}; expected a number above 0. Convert the model again.")
    return float(str(np.float32(value)))


def _list(metadata: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    """Return a list of values of one kind, [] if the key is missing."""
    values = _optional(metadata, key, list, [])
    if values and type(values[0]) is not kind:  # a file's lists hold values of one type
        raise ValueError(f"its key {key} is a list whose items are not each {WORDS[kind]}. Convert the model again.")
    return values
