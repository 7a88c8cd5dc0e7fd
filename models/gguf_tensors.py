"""The tensors of a GGUF file as Hugging Face's files have them: their names, and what llama.cpp's converter changes.

It stacks experts, splits or joins projections, leaves axes out, puts heads and their elements in another order, and
stores 1 + weight, or -exp of a decay. All of this is undone as a tensor is read.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Int

from models.checkpoint import Tensor, Window, arranged, file_shape, in_order, part_from, rows_from
from models.config import Config, Recurrence
from models.families import FAMILIES, Gguf, Held
from models.parameters import PARAMETERS, kind_of, layers_with, parameter_shapes, tensor_names

# Parameters whose names do not follow from Hugging Face's.
NAMES = {
    "layers.down": "blk.{}.ffn_down.weight",
    **{f"layers.expert_{part}": f"blk.{{}}.ffn_{part}_exps.weight[{{}}]" for part in ("gate", "up", "down")},
    "layers.choice_bias": "blk.{}.exp_probs_b.bias",
    "layers.choice_scale": "blk.{}.ffn_down_exps.scale",
    "layers.router_scale": "blk.{}.ffn_gate_inp.scale",
    "stream_in": "altup_proj.weight[{}]",
    "stream_out": "altup_unembd_proj.weight[{}]",
    "layers.recurrent_log_decay": "blk.{}.ssm_a",
    "layers.recurrent_decay_bias": "blk.{}.ssm_dt.bias",
    "layers.space_skip": "blk.{}.ssm_d",
}
STACKED = ("_exps.weight", "altup_proj.weight", "altup_unembd_proj.weight")
# Those whose tensors have other axes, with the same numbers in the same order.
RESHAPED = ("recurrent_kernel", "recurrent_log_decay", "shared_router", "space_norm", "space_skip")


def names_of(architecture: str, config: Config) -> dict[str, str]:
    """Return llama.cpp's names of a model's parameters; {} stands for the layer and the expert."""
    renamed = names_in(architecture)
    return {name: NAMES.get(kind_of(name)[0]) or renamed(tensor) for name, tensor in tensor_names(config).items()}


def in_parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a file's tensors with one for each expert, and a latent's keys and values together, as in old files."""
    return _by_expert(_joined_latents(tensors))


def in_hugging_faces_form(
    tensors: Mapping[str, Tensor], names: Mapping[str, str], config: Config, stored: Gguf
) -> dict[str, Tensor]:
    """Return what :func:`in_parts` returned as the decoder has its parameters, which are called as ``names`` say."""
    renamed = names_in(stored.architecture)
    together = {**FAMILIES[config.architecture].fused, **stored.fused}
    fused = {renamed(tensor): parts for tensor, parts in together.items()}
    found = arranged(tensors, config, names, _there(fused, tensors))
    found |= _in_shape(found, names, config)
    if stored.neighbours:
        found |= _in_halves(found, names, config)
    if stored.takes_turns and config.recurrence is not None:
        found |= _by_key_head(found, names, config.recurrence)
    for name, tensor in found.items():
        if config.norm_offset and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
            found[name] = _made(tensor, lambda weight: weight - 1)
        if name.endswith(".ssm_a"):
            found[name] = _made(tensor, lambda decay: np.log(-decay))
    return found


def names_in(architecture: str) -> Callable[[str], str]:
    """Return the function from tensors' Hugging Face names to llama.cpp's; {} stands for the layer and the expert.

    A tensor that llama.cpp does not know of the architecture, such as one of a mix of its layers, is called as Llama's,
    or else as DeepSeek-V2's.
    """
    import gguf

    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    llama, latent = gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.DEEPSEEK2
    maps = [gguf.get_tensor_name_map(number, 1).mapping for number in (known.get(architecture, llama), llama, latent)]

    def renamed(tensor: str) -> str:
        whole = tensor.replace(".experts.{}", ".experts").format(0)
        whole += ".weight" if whole in maps[0] else ""  # a sink's name has no kind in Hugging Face's files
        name, _, kind = whole.rpartition(".")
        _, theirs = next((own[name] for own in maps if name in own), (None, None))
        if theirs is None:  # a part of a tensor
            return tensor
        # One tensor holds a layer's experts; here each of them is one.
        return f"{theirs}.{kind}".replace("blk.0.", "blk.{}.") + "[{}]" * (".experts." in tensor)

    return renamed


def _by_expert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace each tensor of a layer's experts, [X, F, E] or a bias [X, F], by one for each expert; streams as well.

    One that holds gates and what they multiply, [X, 2 F, E], has all rows of an expert's gate first.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if len(tensor.shape) == 3 and name.endswith(STACKED):
            X, rows, columns = tensor.shape
            halves = ("gate", "up") if "gate_up" in name and rows % 2 == 0 else ("gate_up",)
            size = rows // len(halves)
            for at, half in enumerate(halves):
                own = name.replace("gate_up", half)
                parts = (part_from(tensor, x * rows + at * size, (size, columns)) for x in range(X))
                found |= {f"{own}[{x}]": part for x, part in enumerate(parts)}
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


def _made(tensor: Tensor, function: Callable[[np.ndarray], np.ndarray]) -> Tensor:
    """Return a tensor of what a function makes of its numbers."""

    def read(window: Window) -> np.ndarray:
        with np.errstate(all="ignore"):  # numbers that are not finite are reported later
            return function(tensor.read(window))

    return tensor._replace(read=read)


def _joined_latents(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors where a latent's keys, [N, C, plain], and values, [N, value, C], are one, as in old files.

    That has all rows of a head's key, then those of its value.
    """
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(".attn_k_b.weight")]:
        values, together = (name.replace("attn_k_b", part) for part in ("attn_v_b", "attn_kv_b"))
        key, value = found.pop(name), found.pop(values, None)
        if together in tensors:  # some files have both
            continue
        sizes = [tensor.shape for tensor in (key, value) if tensor is not None and len(tensor.shape) == 3]
        if value is None or len(sizes) < 2 or sizes[0][:2] != sizes[1][::2]:
            raise ValueError(f"{name} and {values} are not a key and a value of each head; convert the model again.")
        rows, size = key.shape[2] + value.shape[1], key.shape[1]
        read = functools.partial(_latents, key, value)
        found[together] = key._replace(shape=(key.shape[0] * rows, size), read=read)
    return found


def _latents(key: Tensor, value: Tensor, window: Window) -> np.ndarray:
    """Read a window of what :func:`_joined_latents` returns: whole heads, of which a part is taken."""
    rows, (_, C, plain), V = window[0], key.shape, value.shape[1]
    first, last = rows.start // (plain + V), -(-rows.stop // (plain + V))
    keys = key.read((slice(first * C, last * C), slice(0, plain))).reshape(-1, C, plain)
    values = value.read((slice(first * V, last * V), slice(0, C))).reshape(-1, V, C)
    heads = np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, C)
    return heads[rows.start - first * (plain + V) :][: rows.stop - rows.start, window[1]]


def _there(fused: Mapping[str, Held], tensors: Mapping[str, Tensor]) -> dict[str, Held]:
    """Return those of the tensors that hold several parameters that a file has in any of its layers."""
    kinds = {re.sub(r"^blk\.\d+\.", "blk.{}.", name) for name in tensors}
    return {name: parts for name, parts in fused.items() if name in kinds}


def _in_shape(tensors: Mapping[str, Tensor], names: Mapping[str, str], config: Config) -> dict[str, Tensor]:
    """Return the tensors of ``RESHAPED`` with the axes that they have in Hugging Face's files."""
    found, shapes = dict[str, Tensor](), parameter_shapes(config)
    for name in [f"layers.{part}" for part in RESHAPED if f"layers.{part}" in shapes]:
        shape = file_shape(shapes[name][1:], PARAMETERS[name].groups)
        of_layers = (names[name].format(layer) for layer in layers_with(config, name))
        small = {name: tensors[name] for name in of_layers if name in tensors and len(tensors[name].shape) < 3}
        found |= {name: _reshaped(tensor, shape) for name, tensor in small.items()}
    return found


def _reshaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a small tensor with other axes; one of another size as it is, to be refused."""
    whole = tuple(slice(0, size) for size in tensor.shape)
    if math.prod(tensor.shape) != math.prod(shape):
        return tensor
    return tensor._replace(shape=shape, read=lambda window: tensor.read(whole).reshape(shape)[window])


def _by_key_head(tensors: Mapping[str, Tensor], names: Mapping[str, str], net: Recurrence) -> dict[str, Tensor]:
    """Return the tensors of delta nets with all value heads of a key head together, from those that take turns."""
    heads = np.arange(net.value_heads).reshape(-1, net.key_heads).T.reshape(-1)  # the place of each in the file
    rows = (heads[:, None] * net.value_dim + np.arange(net.value_dim)).reshape(-1)
    before = 2 * net.key_heads * net.key_dim  # of queries and keys
    orders = dict(delta_value=rows, delta_gate=rows, delta_rate=heads, delta_decay=heads)
    orders |= dict(recurrent_log_decay=heads, recurrent_decay_bias=heads)
    orders["recurrent_kernel"] = np.concatenate([np.arange(before), before + rows])
    found: dict[str, Tensor] = {}
    for layer in net.layers:
        for part, order in orders.items():
            name = names[f"layers.{part}"].format(layer)
            if name in tensors and tensors[name].shape[0] == len(order):  # another is refused later
                found[name] = rows_from(tensors[name], order)
        name = names["layers.recurrent_output"].format(layer)
        if name in tensors and tensors[name].shape[1:] == rows.shape:
            found[name] = _columns_from(tensors[name], rows)
    return found


def _columns_from(tensor: Tensor, columns: Int[np.ndarray, "columns"]) -> Tensor:
    """Return a matrix with its columns in another order; whole rows are read."""
    every = slice(0, len(columns))
    return tensor._replace(read=lambda window: tensor.read((window[0], every))[:, columns[window[1]]])
