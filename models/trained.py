"""The files of a small network that was trained for a model: its weights, its config, and which model it is for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array
from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.numpy import save as to_safetensors

from models import fingerprints
from models.config import Config, described
from models.decoder import Decoder
from models.files import to_json, write_files
from models.load import known_dtype
from models.parameters import parameter_shapes as model_shapes
from models.tokenizer import read_object

# Fields of a model's config that do not affect what its attention reads.
INDIFFERENT = {"bos", "eos", "pad", "max_positions"}


class Kind(NamedTuple):
    """A kind of network.

    ``name`` is that of its files, NAME.safetensors and NAME.json; ``what`` is its name in messages; ``config`` makes
    its config from the fields in the file; ``shapes`` returns the shape of each parameter of a config.
    """

    name: str
    what: str
    config: Callable[..., Any]
    shapes: Callable[[Any], dict[str, tuple[int, ...]]]

    @property
    def files(self) -> tuple[str, str]:
        """Return the names of both files: the weights and the config."""
        return f"{self.name}.safetensors", f"{self.name}.json"


def save(kind: Kind, folder: str | Path, config: Any, parameters: Mapping[str, Any], model: Decoder, name: str) -> None:
    """Write a network and a description of its model. Both files are complete before either gets its name.

    Where several processes hold a model together, all of them call this, and the first one writes.

    Args:
        folder: created if it does not exist.
        parameters: the network's, stored in their own dtype.
        model: the model that it was trained for: its config and a hash of some of its weights are stored, too.
        name: the model's name, for error messages.
    """
    description = {"name": name, **fingerprint(model)}
    if jax.process_index() > 0:
        return
    tensors = {own: np.asarray(jax.device_get(parameters[own])) for own in kind.shapes(config)}
    about = {kind.name: dataclasses.asdict(config), "model": description}
    weights_file, config_file = kind.files
    write_files(Path(folder), {weights_file: to_safetensors(tensors), config_file: to_json(about).encode()})


def load(
    kind: Kind, folder: str | Path, model: Decoder, dtype: DTypeLike | None = None
) -> tuple[Any, dict[str, Array]]:
    """Read the config and the parameters of a network that :func:`save` wrote, checked against its model.

    Args:
        dtype: of the parameters; by default that of the file.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the network is of another model (the message names what differs), or a file is damaged.
    """
    folder = Path(folder)
    weights_file, config_file = kind.files
    for name in (config_file, weights_file):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}; give a folder that models.save_{kind.name} wrote.")
    about = read_object(folder / config_file)
    try:
        config, made_for = kind.config(**about[kind.name]), about["model"]
        theirs, their_weights, their_name = made_for["config"], made_for["weights"], made_for["name"]
        listed = sorted(theirs)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / config_file} describes no {kind.what} ({error}); train or copy it again."
        ) from None
    ours = _described(model.config)
    differing = [name for name in sorted({*ours, *listed}) if ours.get(name) != theirs.get(name)]
    if differing:
        pairs = ", ".join(f"{name} {theirs.get(name)} there and {ours.get(name)} here" for name in differing)
        raise ValueError(
            f"{folder} holds a {kind.what} of another model, {their_name}: {pairs}; train one for this model."
        )
    if their_weights != fingerprint(model)["weights"]:
        raise ValueError(
            f"{folder} holds a {kind.what} of another model, {their_name}, with this one's shape but other weights; "
            "train one for this model."
        )
    try:
        tensors = load_file(folder / weights_file)
    except SafetensorError as error:
        raise ValueError(f"{folder / weights_file} is truncated or corrupted ({error}); copy it again.") from None
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    expected = kind.shapes(config)
    if shapes != expected:
        wrong = sorted(name for name in {*shapes, *expected} if shapes.get(name) != expected.get(name))
        raise ValueError(
            f"{folder / weights_file} does not fit its {config_file} in {', '.join(wrong)}; copy both again."
        )
    wanted = None if dtype is None else known_dtype(dtype)
    return config, {name: jax.device_put(tensor.astype(wanted or tensor.dtype)) for name, tensor in tensors.items()}


def fingerprint(model: Decoder) -> dict[str, Any]:
    """Return what identifies a model, for JSON: its config, and a hash of some of its weights.

    Example:
        >>> from flax import nnx
        >>> import models
        >>> from models.trained import fingerprint
        >>> config = models.Config(
        ...     64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2
        ... )
        >>> sorted(fingerprint(models.Decoder(config, rngs=nnx.Rngs(0))))
        ['config', 'weights']
    """
    hashed = fingerprints.weights(model, model_shapes(model.config))
    return {"config": _described(model.config), "weights": hashed}


def _described(config: Config) -> dict[str, Any]:
    """Return a model's config as JSON values, without the fields that do not matter here."""
    fields = json.loads(json.dumps(described(config)))
    return {name: value for name, value in fields.items() if name not in INDIFFERENT}
