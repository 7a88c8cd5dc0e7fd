"""Gates in the files that their authors publish: KVzap's and Fast KVzip's, as kvpress loads them.

KVzap (arXiv 2601.07891) is a folder that transformers saved, with one linear map per layer, or two. Fast KVzip (arXiv
2601.17668) is a pickle with each layer's tensors; ``CONVERT`` makes safetensors of it, in which the number of the layer
stands before a tensor's name. Neither says more of its model than the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from models.checkpoint import PICKLES, opened, read_dtype
from models.config import Config
from models.scorer import SIZES, Kind, ScorerConfig

MODEL_TYPE = "kvzap"  # in a config.json that describes such a gate
# The names of a layer's tensors, by those of a scorer's parameters.
LINEAR = {"output": "layers.{}.weight", "output_bias": "layers.{}.bias"}
PERCEPTRON = {
    "input": "layers.{}.0.weight", "input_bias": "layers.{}.0.bias",
    "output": "layers.{}.2.weight", "output_bias": "layers.{}.2.bias",
}  # fmt: skip
GATE = {
    "query": "{}.q_proj.weight", "query_bias": "{}.q_proj.bias", "query_norm": "{}.q_norm.weight",
    "key": "{}.k_proj.weight", "key_norm": "{}.k_norm.weight", "sinks": "{}.k_base", "bias": "{}.b",
}  # fmt: skip
CONVERT = (
    "python -c \"import sys, torch, safetensors.torch as s; s.save_file({f'{i}.{name}': tensor.clone() for i, gate in "
    "enumerate(torch.load(sys.argv[1], map_location='cpu', weights_only=False)['module']) for name, tensor in "
    'gate.items()}, sys.argv[2])"'
)


def read_gate(folder: Path, model: Config) -> tuple[str, ScorerConfig, dict[str, np.ndarray]] | None:
    """Return the kind, the config and the parameters of a published gate, None where a folder has none.

    Raises:
        ValueError: the gate is of a model of other sizes, its file is damaged, or it is a pickle.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        _refuse_pickle(folder)
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{folder} has several files of weights: {names}; give each gate a folder of its own.")
    (file,) = files
    with opened(file) as held:
        found = {name: tuple(held.get_slice(name).get_shape()) for name in held.keys()}  # noqa: SIM118
        of_layer = next((own for own in (LINEAR, PERCEPTRON, GATE) if own[min(own)].format(0) in found), None)
        if of_layer is None:
            return None
        config = _checked(file, found, of_layer, model)
        for name in found:
            read_dtype(file, name, held.get_slice(name).get_dtype())
        parameters = {
            own: np.stack([_read(own, held.get_tensor(of_layer[own].format(layer)), shape) for layer in range(layers)])
            for own, (layers, *shape) in config.shapes.items()
        }
        return config.kind, config, parameters


def _checked(file: Path, found: Mapping[str, tuple[int, ...]], names: Mapping[str, str], model: Config) -> ScorerConfig:
    """Return the config of a gate for a model, whose file must have every tensor of it, and no other."""
    sizes = {size: getattr(model, size) for size in SIZES}
    hidden, sinks = 0, 1
    kind: Kind = "scorer"
    if names is PERCEPTRON:
        hidden = _size(found, names["input_bias"], -1)
    elif names is GATE:
        hidden, sinks, kind = _size(found, names["query_norm"], -1), _size(found, names["sinks"], -2), "gate"
    config = ScorerConfig(**sizes, hidden=hidden, kind=kind, sinks=sinks)
    expected = {
        name.format(layer): _stored(own, config.shapes[own][1:])
        for own, name in names.items()
        for layer in range(model.num_layers)
    }
    for name in sorted({*expected, *found}):
        if found.get(name) != expected.get(name):
            raise ValueError(
                f"{file} is a gate of another model, or damaged: it has {_said(name, found)}, and one of this model, "
                f"with {', '.join(SIZES)} = {list(sizes.values())}, has "
                f"{_said(name, expected)}; give one that was trained for it."
            )
    return config


def _size(found: Mapping[str, tuple[int, ...]], name: str, axis: int) -> int:
    """Return the size of an axis in layer 0, and 1 for what is damaged, which then does not fit."""
    shape = found.get(name.format(0), ())
    return max(1, shape[axis]) if len(shape) >= -axis else 1


def _stored(own: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a layer's tensor in a file: torch has a matrix's outputs first, as one axis."""
    if own in ("input", "output", "query", "key"):
        return math.prod(shape[1:]), shape[0]
    if own == "query_bias":
        return (math.prod(shape),)
    return (shape[0], 1, *shape[1:]) if own in ("sinks", "bias") else shape


def _read(own: str, tensor: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    return (tensor.T if own in ("input", "output", "query", "key") else tensor).reshape(shape)


def _said(name: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    return f"{name} of shape {shapes[name]}" if name in shapes else f"no {name}"


def _refuse_pickle(folder: Path) -> None:
    """Check that a folder holds no pickled gate, which is not read; else say how it is converted."""
    pickle = min((file for file in folder.glob("*") if file.suffix in PICKLES), default=None)
    if pickle is not None:
        target = pickle.with_suffix(".safetensors")
        raise ValueError(
            f"{pickle} is a pickle, which can run code when read. If it is a gate that you trust, convert it where "
            f"torch is installed: {CONVERT} {pickle} {target}"
        )
