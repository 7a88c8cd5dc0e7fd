"""Digests that identify a model and its tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from models import decoder, hosts
from models.config import described
from models.parameters import parameter_shapes, place_in_array
from models.tokenizer import Tokenizer


def fingerprints(model: decoder.Decoder, tokenizer: Tokenizer | None = None) -> dict[str, str]:
    """Return digests of a model's config and weights, and of its tokenizer with special tokens and chat template."""
    found = {"config": digest(described(model.config)), "weights": weights_of(model)}
    if tokenizer is not None:
        parts = [tokenizer.backend.to_str(), tokenizer.special_tokens, tokenizer.chat_template]
        found["tokenizer"] = digest(parts)
    return found


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
    shapes["layers.output"] = (config.num_layers, config.num_heads, config.head_dim, config.hidden_size)
    places = _places(shapes)
    layer, head, row, column = places["layers.output"]
    places["layers.output"] = layer, head * config.head_dim + row, column
    found = {name: place_in_array(config, name, place) for name, place in places.items()}
    return _hashed({name: (arrays[array], place) for name, (array, place) in found.items()})


def weights(module: Any, shapes: Mapping[str, Sequence[int]]) -> str:
    """Hash the parameters' names and 64 numbers of each parameter, at fixed places, rounded to bfloat16.

    It reads little of a large model, and is the same in every usual dtype and on every mesh. Another checkpoint, or the
    same one after training, has another hash; changing a few numbers by hand may not change it. ``shapes`` are those of
    the parameters of an ``nnx.Module``, by their names in it.
    """
    return _hashed({name: (getattr(module, name)[...], place) for name, place in _places(shapes).items()})


def _places(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[Any, ...]]:
    drawn = {name: np.random.default_rng(0) for name in shapes}
    return {name: tuple(drawn[name].integers(0, size, 64) for size in shape) for name, shape in shapes.items()}


def _hashed(held: Mapping[str, tuple[Array, tuple[Any, ...]]]) -> str:
    arrays, places = ({name: each[i] for name, each in held.items()} for i in (0, 1))
    found, samples = hashlib.sha256(), _numbers_at(arrays, places)
    for name in sorted(held):
        found.update(name.encode() + hosts.fetched(samples[name]).astype(jnp.bfloat16).tobytes())
    return found.hexdigest()


@jax.jit
def _numbers_at(arrays: dict[str, Any], places: dict[str, Any]) -> dict[str, Any]:
    return {name: array[places[name]] for name, array in arrays.items()}


def digest(content: Any) -> str:
    """Return a digest of any content that JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
