"""Every parameter of the decoder in one table: its axes, how a mesh splits it, and its name in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jax.sharding import PartitionSpec

from models.config import Config

SPLIT = frozenset("NKFV")  # the axes that a mesh's "tensor" axis splits: heads, feed-forward and vocabulary


class Parameter(NamedTuple):
    """One parameter; of all layers, stacked, where its axes begin with L.

    Attributes:
        axes: the axis letters of models/decoder.py.
        tensor: its Hugging Face name, where {} stands for the layer.
        stored: the axes of that tensor, without L; letters joined by "*" share one axis of it.
        wanted: whether a model of a given config has it.
    """

    axes: str
    tensor: str
    stored: str
    wanted: Callable[[Config], bool] = lambda config: True

    @property
    def spec(self) -> PartitionSpec:
        """Its partition on a mesh with axes "data" and "tensor"."""
        return PartitionSpec(*("tensor" if axis in SPLIT else None for axis in self.axes.split()))

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """For each axis of the stored tensor, the indices in ``axes`` (without L) that it holds."""
        ours = self.axes.replace("L ", "").split()
        return tuple(tuple(ours.index(axis) for axis in group.split("*")) for group in self.stored.split())


def _has_biases(config: Config) -> bool:
    return config.attention_bias


def _has_norms(config: Config) -> bool:
    return config.query_key_norm


_LAYER = "model.layers.{}."
PARAMETERS: dict[str, Parameter] = {
    "embedding": Parameter("V E", "model.embed_tokens.weight", "V E"),
    "norm": Parameter("E", "model.norm.weight", "E"),
    "layers.attention_norm": Parameter("L E", _LAYER + "input_layernorm.weight", "E"),
    "layers.query": Parameter("L E N D", _LAYER + "self_attn.q_proj.weight", "N*D E"),
    "layers.key": Parameter("L E K D", _LAYER + "self_attn.k_proj.weight", "K*D E"),
    "layers.value": Parameter("L E K D", _LAYER + "self_attn.v_proj.weight", "K*D E"),
    "layers.output": Parameter("L N D E", _LAYER + "self_attn.o_proj.weight", "E N*D"),
    "layers.feed_norm": Parameter("L E", _LAYER + "post_attention_layernorm.weight", "E"),
    "layers.gate": Parameter("L E F", _LAYER + "mlp.gate_proj.weight", "F E"),
    "layers.up": Parameter("L E F", _LAYER + "mlp.up_proj.weight", "F E"),
    "layers.down": Parameter("L F E", _LAYER + "mlp.down_proj.weight", "E F"),
    "head": Parameter("E V", "lm_head.weight", "V E", lambda config: not config.tie_embeddings),
    "layers.query_bias": Parameter("L N D", _LAYER + "self_attn.q_proj.bias", "N*D", _has_biases),
    "layers.key_bias": Parameter("L K D", _LAYER + "self_attn.k_proj.bias", "K*D", _has_biases),
    "layers.value_bias": Parameter("L K D", _LAYER + "self_attn.v_proj.bias", "K*D", _has_biases),
    "layers.output_bias": Parameter("L E", _LAYER + "self_attn.o_proj.bias", "E", lambda config: config.output_bias),
    "layers.query_norm": Parameter("L D", _LAYER + "self_attn.q_norm.weight", "D", _has_norms),
    "layers.key_norm": Parameter("L D", _LAYER + "self_attn.k_norm.weight", "D", _has_norms),
}
SHARDING = {name: parameter.spec for name, parameter in PARAMETERS.items()}


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter that a model of this config has, by its path in the Decoder.

    Example:
        >>> from models.config import Config
        >>> from models.parameters import parameter_shapes
        >>> parameter_shapes(Config(64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2))["layers.key"]
        (2, 32, 2, 8)
    """
    sizes = dict(
        V=config.vocab_size, E=config.hidden_size, F=config.intermediate_size, L=config.num_layers,
        N=config.num_heads, K=config.num_kv_heads, D=config.head_dim,
    )  # fmt: skip
    wanted = {name: parameter for name, parameter in PARAMETERS.items() if parameter.wanted(config)}
    return {name: tuple(sizes[axis] for axis in parameter.axes.split()) for name, parameter in wanted.items()}
