"""Digests that identify a model and its tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from models import decoder, hosts
from models.config import described
from models.parameters import array_of, axes_of, kind_of, parameter_shapes, paths_of, rows_of
from models.tokenizer import Tokenizer


def fingerprints(
    model: decoder.Decoder, tokenizer: Tokenizer | None = None, networks: Iterable[Any] = ()
) -> dict[str, str]:
    """Return digests of a model's config and weights, its tokenizer with special tokens and chat template, and the
    networks beside it, by their names.
    """
    found = {"config": digest(described(model.config)), "weights": weights_of(model)}
    if tokenizer is not None:
        parts: list[Any] = [tokenizer.backend.to_str(), tokenizer.special_tokens, tokenizer.chat_template]
        parts += [tokenizer.template_values] if tokenizer.template_values else []
        found["tokenizer"] = digest(parts)
    return found | {network.name: weights(network, network.config.shapes) for network in networks}


def fingerprint(model: decoder.Decoder) -> str:
    """Return one word that identifies a model, as ``kvjax.save_cache`` takes it: a digest of :func:`fingerprints`.

    Example:
        >>> import models
        >>> len(models.fingerprint(models.Decoder.tiny()))
        16
    """
    return digest(fingerprints(model))


def weights_of(model: decoder.Decoder) -> str:
    """Hash a model's parameters, by their names in checkpoints, as :func:`weights` does."""
    arrays, config = model.arrays(), model.config
    shapes = parameter_shapes(config)
    # Drawn with an axis of heads, as the array had when the first digests were written.
    outputs = {name: config.num_heads for name in shapes if kind_of(name)[0] == "layers.output"}
    shapes |= {name: (shapes[name][0], N, shapes[name][1] // N, config.hidden_size) for name, N in outputs.items()}
    places = _places(shapes)
    for name in outputs:
        layer, head, row, column = places[name]
        places[name] = layer, head * shapes[name][2] + row, column
    layers, found, within = {}, {}, {}
    for name, place in places.items():
        array, rows = array_of(name), rows_of(config, name)
        paths = paths_of(config, array)
        layers[name], within[name] = (np.zeros(1, int), place) if paths == [array] else (place[0], place[1:])
        if rows is not None:
            *before, both, last = within[name]
            group, row = np.divmod(both, rows.stop - rows.start)
            alone = len(axes_of(name)) == len(axes_of(array))  # its array has no axis more
            within[name] = (*before, *(() if alone else (group,)), rows.start + row, last)
        found[name] = [arrays[path] for path in paths]
    numbers = _numbers_at(found, within)
    return _hashed({name: own[layers[name], np.arange(own.shape[1])] for name, own in numbers.items()})


def weights(module: Any, shapes: Mapping[str, Sequence[int]]) -> str:
    """Hash the parameters' names and 64 numbers of each parameter, at fixed places, rounded to bfloat16.

    It reads little of a large model, and is the same in every usual dtype and on every mesh. Another checkpoint, or the
    same one after training, has another hash; changing a few numbers by hand may not change it. ``shapes`` are those of
    the parameters of an ``nnx.Module``, by their names in it.
    """
    numbers = _numbers_at({name: [getattr(module, name)[...]] for name in shapes}, _places(shapes))
    return _hashed({name: own[0] for name, own in numbers.items()})


def _places(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[Any, ...]]:
    drawn = {name: np.random.default_rng(0) for name in shapes}
    return {name: tuple(drawn[name].integers(0, size, 64) for size in shape) for name, shape in shapes.items()}


def _hashed(numbers: Mapping[str, np.ndarray]) -> str:
    found = hashlib.sha256()
    for name in sorted(numbers):
        found.update(name.encode() + numbers[name].astype(jnp.bfloat16).tobytes())
    return found.hexdigest()


def _numbers_at(arrays: dict[str, list[Array]], places: dict[str, tuple[Any, ...]]) -> dict[str, np.ndarray]:
    """Return the numbers at each name's places, of each of its arrays."""
    return {name: hosts.fetched(own) for name, own in _read(arrays, places).items()}


@jax.jit
def _read(arrays: dict[str, list[Array]], places: dict[str, tuple[Any, ...]]) -> dict[str, Array]:
    return {name: jnp.stack([array[places[name]] for array in own]) for name, own in arrays.items()}


def digest(content: Any) -> str:
    """Return a digest of any content that JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
