"""Every parameter of the decoder in one table: its axes, how a mesh splits it, and its name in a checkpoint."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Int

from models.config import Config
from models.families import family_of_architecture

SPLIT = ("N", "K", "X", "F", "Fd", "V")  # the axes that a mesh splits: heads, experts, feed-forward and vocabulary


class Parameter(NamedTuple):
    """One parameter; of all layers, stacked, where its axes begin with L.

    Axes are the letters of models/decoder.py; Lx are the layers with experts, Ld the others, and Fd is the feed-forward
    of those.
    """

    axes: str
    tensor: str  # its Hugging Face name in most families; {} stands for the layer, a second {} for the expert
    stored: str  # the axes of that tensor; letters joined by "*" share one axis of it
    wanted: Callable[[Config], bool] = lambda config: True  # whether a model of a given config has it

    @property
    def separate(self) -> int:
        """Count its first axes (layers, experts) that have a tensor for each index."""
        return sum(axis not in self.stored for axis in self.axes.split())

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """For each axis of the stored tensor, the indices in ``axes`` (without the separate ones) that it holds."""
        ours = self.axes.split()[self.separate :]
        return tuple(tuple(ours.index(axis) for axis in group.split("*")) for group in self.stored.split())


def _norms_before(config: Config) -> bool:
    return config.norms != "after"


def _norms_after(config: Config) -> bool:
    return config.norms != "before"


def _is_dense(config: Config) -> bool:
    return not config.num_experts or bool(config.dense_sizes)


def _has_experts(config: Config) -> bool:
    return config.num_experts > 0 and not all(config.dense_sizes or (None,))


_has_biases, _has_norms = operator.attrgetter("attention_bias"), operator.attrgetter("query_key_norm")
_has_wide_norms, _has_output_bias = operator.attrgetter("wide_query_key_norm"), operator.attrgetter("output_bias")
_LAYER = "model.layers.{}."
_EXPERT = _LAYER + "mlp.experts.{}."
PARAMETERS: dict[str, Parameter] = {
    "embedding": Parameter("V E", "model.embed_tokens.weight", "V E"),
    "norm": Parameter("E", "model.norm.weight", "E"),
    "layers.attention_norm": Parameter("L E", _LAYER + "input_layernorm.weight", "E", _norms_before),
    "layers.query": Parameter("L E N D", _LAYER + "self_attn.q_proj.weight", "N*D E"),
    "layers.key": Parameter("L E K D", _LAYER + "self_attn.k_proj.weight", "K*D E"),
    "layers.value": Parameter("L E K D", _LAYER + "self_attn.v_proj.weight", "K*D E"),
    "layers.output": Parameter("L N D E", _LAYER + "self_attn.o_proj.weight", "E N*D"),
    "layers.feed_norm": Parameter("L E", _LAYER + "post_attention_layernorm.weight", "E", _norms_before),
    "layers.gate": Parameter("Ld E Fd", _LAYER + "mlp.gate_proj.weight", "Fd E", _is_dense),
    "layers.up": Parameter("Ld E Fd", _LAYER + "mlp.up_proj.weight", "Fd E", _is_dense),
    "layers.down": Parameter("Ld Fd E", _LAYER + "mlp.down_proj.weight", "E Fd", _is_dense),
    "head": Parameter("E V", "lm_head.weight", "V E", lambda config: not config.tie_embeddings),
    "layers.query_bias": Parameter("L N D", _LAYER + "self_attn.q_proj.bias", "N*D", _has_biases),
    "layers.key_bias": Parameter("L K D", _LAYER + "self_attn.k_proj.bias", "K*D", _has_biases),
    "layers.value_bias": Parameter("L K D", _LAYER + "self_attn.v_proj.bias", "K*D", _has_biases),
    "layers.output_bias": Parameter("L E", _LAYER + "self_attn.o_proj.bias", "E", _has_output_bias),
    "layers.query_norm": Parameter("L D", _LAYER + "self_attn.q_norm.weight", "D", _has_norms),
    "layers.key_norm": Parameter("L D", _LAYER + "self_attn.k_norm.weight", "D", _has_norms),
    "layers.wide_query_norm": Parameter("L N D", _LAYER + "self_attn.q_norm.weight", "N*D", _has_wide_norms),
    "layers.wide_key_norm": Parameter("L K D", _LAYER + "self_attn.k_norm.weight", "K*D", _has_wide_norms),
    "layers.attention_post_norm": Parameter("L E", _LAYER + "post_attention_layernorm.weight", "E", _norms_after),
    "layers.feed_post_norm": Parameter("L E", _LAYER + "post_feedforward_layernorm.weight", "E", _norms_after),
    "layers.router": Parameter("Lx E X", _LAYER + "mlp.gate.weight", "X E", _has_experts),
    "layers.expert_gate": Parameter("Lx X E F", _EXPERT + "gate_proj.weight", "F E", _has_experts),
    "layers.expert_up": Parameter("Lx X E F", _EXPERT + "up_proj.weight", "F E", _has_experts),
    "layers.expert_down": Parameter("Lx X F E", _EXPERT + "down_proj.weight", "E F", _has_experts),
}
ROTATED = ("layers.query", "layers.key")


def partition(name: str, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Return how a mesh splits a parameter: over "tensor", and experts over "expert" as well if the mesh has it."""
    axes = PARAMETERS[name].axes.split()
    first = next((axis for axis in axes if axis in SPLIT), None)  # experts are split, or else what is in them
    ways = expert_axes(mesh) if first == "X" else "tensor"
    return PartitionSpec(*(ways if axis == first else None for axis in axes))


def expert_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Return the axes of a mesh that split the experts, those of size 1 as well."""
    return tuple(axis for axis in ("expert", "tensor") if axis in mesh.axis_names)


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter that a model of this config has, by its path in the Decoder."""
    sizes = dict(
        V=config.vocab_size, E=config.hidden_size, F=config.intermediate_size, L=config.num_layers,
        N=config.num_heads, K=config.num_kv_heads, D=config.head_dim, X=config.num_experts,
        Ld=len(config.dense_layers), Lx=len(config.sparse_layers), Fd=config.dense_size,
    )  # fmt: skip
    wanted = {name: parameter for name, parameter in PARAMETERS.items() if parameter.wanted(config)}
    return {name: tuple(sizes[axis] for axis in parameter.axes.split()) for name, parameter in wanted.items()}


def check_rngs(rngs: nnx.Rngs | None) -> nnx.Rngs:
    """Return the source of random parameters, after a check that there is one."""
    if rngs is None:
        raise ValueError("neither parameters nor rngs were given; pass rngs=nnx.Rngs(0) for random weights.")
    return rngs


def drawn(
    draw: Callable[..., Array], shapes: Mapping[str, tuple[int, ...]], rngs: nnx.Rngs, *options: Any
) -> dict[str, Array]:
    """Make random parameters in one compiled program; operations one by one would be a program for each shape.

    ``draw(key, name, shape, *options)`` returns a parameter; the key of norms and biases is None. Options are hashable.
    """
    keys = {name: rngs.params() for name in shapes if not name.endswith(("norm", "bias"))}
    return _drawn(draw, tuple(shapes.items()), options, keys)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _drawn(draw: Callable[..., Array], shapes: tuple[tuple[str, Any], ...], options: tuple[Any, ...], keys: Any) -> Any:
    return {name: draw(keys.get(name), name, tuple(shape), *options) for name, shape in shapes}


@functools.cache
def layers_with(config: Config, name: str) -> Sequence[int]:
    """Return the numbers of the layers that have a parameter, in the order in which it is stacked."""
    own = {"L": range(config.num_layers), "Ld": config.dense_layers, "Lx": config.sparse_layers}
    return own.get(PARAMETERS[name].axes.split()[0], ())


def tensor_of(config: Config, name: str, tensor: str, place: Sequence[int]) -> str:
    """Return the name of the tensor that holds one place of a stacked parameter.

    ``tensor`` is as in ``Parameter``; ``place`` is along the axes that have a tensor for each index.
    """
    layers = layers_with(config, name)
    return tensor.format(*(layers[place[0]], *place[1:]) if layers else place)


def tensor_names(config: Config) -> dict[str, str]:
    """Return the name of each parameter in a checkpoint in Hugging Face layout, as in ``Parameter.tensor``."""
    names = {name: parameter.tensor for name, parameter in PARAMETERS.items()}
    return {**names, **family_of_architecture(config.architecture).tensors}


def head_order(config: Config) -> Int[np.ndarray, "D"] | None:
    """Return which element of a checkpoint's head each element of a query or key is; None where the order is the same.

    The decoder rotates element i with element i + D/2. Where only R elements of a head are rotated, its pairs from R/2
    on have frequency 0. A checkpoint has the rotated elements first, as two halves, and then the others.
    """
    D, R = config.head_dim, config.rope.rotated(config.head_dim)
    if R in (0, D):
        return None
    pairs, others = np.arange(R).reshape(2, -1), np.arange(R, D).reshape(2, -1)
    return np.concatenate([pairs, others], axis=1).reshape(-1)
