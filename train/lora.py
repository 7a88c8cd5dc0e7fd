"""LoRA: a low-rank matrix beside each of some projections is trained in place of the projection itself.

``W + (alpha / r) B A`` (Hu et al., arXiv 2106.09685, section 4.1) with alpha = 2 r. A and B are arrays in a dictionary,
added to the weights inside a step; models/adapters.py stores them.

Libraries that attach LoRA to a module's own parameters, such as qwix, do not find ours: a projection's weights are rows
of an array.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from models import adapters
from models.config import Config, check_alike
from models.parameters import PARAMETERS, array_of, join_weights, parameter_shapes, paths_of, split_weights

SCALE = 2.0  # alpha / r


def projections(config: Config) -> list[str]:
    """Return the names of a model's projections (:func:`models.adapters.projections`), without "layers."."""
    return [path.removeprefix("layers.") for path in adapters.projections(config)]


def init(config: Config, rank: int, on: Sequence[str], seed: int) -> dict[str, Array]:
    """Return A [L, r, inputs], drawn at random, and B [L, outputs, r], zeros, for each of the projections."""
    check_alike(config, "the matrices of all layers are stacked")
    made = {}
    for number, name in enumerate(on):
        layers, outputs, inputs = _sizes(config, name)
        key = jax.random.fold_in(jax.random.key(seed), number)
        made[f"{name}.A"] = jax.random.normal(key, (layers, rank, math.prod(inputs))) * math.prod(inputs) ** -0.5
        made[f"{name}.B"] = jnp.zeros((layers, math.prod(outputs), rank))
    return made


def merged(config: Config, arrays: Mapping[str, Array], low_rank: Mapping[str, Array]) -> dict[str, Array]:
    """Return a model's arrays by path with the products of :func:`init`'s matrices added."""
    names = dict.fromkeys(name.partition(".")[0] for name in low_rank)
    paths = [path for name in names for path in paths_of(config, array_of(f"layers.{name}"))]
    weights = split_weights(config, {path: arrays[path] for path in paths})
    for name in names:
        layers, outputs, inputs = _sizes(config, name)
        product = jnp.einsum("lor,lri->loi", low_rank[f"{name}.B"], low_rank[f"{name}.A"])
        outs, ins = PARAMETERS[f"layers.{name}"].groups
        order = np.argsort([*outs, *ins])  # from a checkpoint's order of axes to ours
        product = product.reshape(layers, *outputs, *inputs).transpose(0, *(1 + order))
        whole = weights[f"layers.{name}"]
        weights[f"layers.{name}"] = whole + (SCALE * product).astype(whole.dtype)
    return {**arrays, **join_weights(config, weights)}


def _sizes(config: Config, name: str) -> tuple[int, list[int], list[int]]:
    """Return the number of layers, and the sizes of a projection's output and input axes."""
    path = f"layers.{name}"
    return parameter_shapes(config)[path][0], *adapters.sizes(config, path)
