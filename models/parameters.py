"""Every parameter of the decoder in one table: its axes, its name in a checkpoint, and the array that holds it.

Families, checkpoints and adapters know parameters by name ("layers.query"), of all layers, stacked. The decoder
multiplies by arrays of one layer each, known by path ("layers.3.qkv"): the parameters that one vector is multiplied by
lie side by side in one of them, which is one matrix product. What reads a file joins them, and what writes one takes
them apart (:func:`join_weights`, :func:`split_weights`).

In a model whose layers differ, parameters are stacked over the layers of a kind (``Config.kinds``), and those of other
kinds than the first have its number in their names: "layers.query@1".
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from models.config import Config
from models.families import family_of_architecture

# The axes that a mesh splits: heads, experts, feed-forward, vocabulary.
SPLIT = ("N", "ND", "K", "X", "F", "Fd", "Fs", "V", "Vi")
# The axes of all layers, of those with experts and those without, and of those with attention and without.
LAYERS = ("L", "Lx", "Ld", "La", "Lr")


class Parameter(NamedTuple):
    """One parameter by its name in checkpoints; of all layers, stacked, where its axes begin with L.

    Axes are the letters of models/decoder.py; Lx are the layers with experts, Ld the others, and Fd is the feed-forward
    of those, Fs that of the shared experts, P what a layer gets of each token beside its input. ND are the numbers of
    all query heads, on one axis. La are the layers with attention, Lr those without, whose letters are those of
    models/recurrent.py.

    Of latent attention, C is the latent, R the rotated key beside it, Q the compressed query; H are a query head's
    numbers, plain and rotated, and U those that a head's plain key and its value have together.

    Vi are the tokens with inputs of layers. Of AltUp, A and Ai are the streams, A-1 those beside the first, AA their
    pairs, Eo is the model dim behind a matrix, and Y the low rank.
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


def _has_shared(config: Config) -> bool:
    return config.shared_size > 0 and _has_experts(config)


def _is_plain(config: Config) -> bool:
    return config.latent is None


def _has_keys(config: Config) -> bool:
    return config.latent is None and not config.shares


def _has_values(config: Config) -> bool:
    return _has_keys(config) and not config.keys_as_values


def _has_key_norm(config: Config) -> bool:
    return config.query_key_norm and not config.shares


def _has_routed(config: Config) -> bool:
    return config.expert_norms and _has_experts(config)


def _has_inputs(config: Config) -> bool:
    return config.layer_input_size > 0


def _is_latent(config: Config) -> bool:
    return config.latent is not None


def _compresses_queries(config: Config) -> bool:
    return config.latent is not None and config.latent.query > 0


def _has_latent_bias(config: Config) -> bool:
    return config.latent is not None and config.latent.bias


def _has_expert_biases(config: Config) -> bool:
    return config.expert_biases and _has_experts(config)


_has_biases, _has_norms = operator.attrgetter("attention_bias"), operator.attrgetter("query_key_norm")
_has_wide_norms, _has_output_bias = operator.attrgetter("wide_query_key_norm"), operator.attrgetter("output_bias")
_has_sinks, _is_hybrid = operator.attrgetter("attention_sinks"), operator.attrgetter("recurrence")
_has_gate, _has_streams = operator.attrgetter("attention_gate"), operator.attrgetter("altup")


def _has_gate_bias(config: Config) -> bool:
    return config.attention_gate and config.attention_bias


def _has_delta(config: Config) -> bool:
    return config.recurrence is not None and config.recurrence.kind == "delta_net"


def _has_space(config: Config) -> bool:
    return config.recurrence is not None and config.recurrence.kind == "state_space"


def _weighs_shared(config: Config) -> bool:
    return config.shared_router and _has_shared(config)


_LAYER = "model.layers.{}."
_EXPERT, _SHARED = _LAYER + "mlp.experts.{}.", _LAYER + "mlp.shared_experts."
_DELTA, _SPACE, _ALTUP = _LAYER + "linear_attn.", _LAYER + "mamba.", _LAYER + "altup."
PARAMETERS: dict[str, Parameter] = {
    "embedding": Parameter("V E", "model.embed_tokens.weight", "V E"),
    "norm": Parameter("E", "model.norm.weight", "E"),
    "layers.attention_norm": Parameter("L E", _LAYER + "input_layernorm.weight", "E", _norms_before),
    "layers.query": Parameter("La E N D", _LAYER + "self_attn.q_proj.weight", "N*D E", _is_plain),
    "layers.key": Parameter("La E K D", _LAYER + "self_attn.k_proj.weight", "K*D E", _has_keys),
    "layers.value": Parameter("La E K D", _LAYER + "self_attn.v_proj.weight", "K*D E", _has_values),
    "layers.output": Parameter("La ND E", _LAYER + "self_attn.o_proj.weight", "E ND"),
    "layers.feed_norm": Parameter("L E", _LAYER + "post_attention_layernorm.weight", "E", _norms_before),
    "layers.gate": Parameter("Ld E Fd", _LAYER + "mlp.gate_proj.weight", "Fd E", _is_dense),
    "layers.up": Parameter("Ld E Fd", _LAYER + "mlp.up_proj.weight", "Fd E", _is_dense),
    "layers.down": Parameter("Ld Fd E", _LAYER + "mlp.down_proj.weight", "E Fd", _is_dense),
    "head": Parameter("E V", "lm_head.weight", "V E", lambda config: not config.tie_embeddings),
    "layers.query_bias": Parameter("La N D", _LAYER + "self_attn.q_proj.bias", "N*D", _has_biases),
    "layers.key_bias": Parameter("La K D", _LAYER + "self_attn.k_proj.bias", "K*D", _has_biases),
    "layers.value_bias": Parameter("La K D", _LAYER + "self_attn.v_proj.bias", "K*D", _has_biases),
    "layers.output_bias": Parameter("La E", _LAYER + "self_attn.o_proj.bias", "E", _has_output_bias),
    "layers.query_norm": Parameter("La D", _LAYER + "self_attn.q_norm.weight", "D", _has_norms),
    "layers.key_norm": Parameter("La D", _LAYER + "self_attn.k_norm.weight", "D", _has_key_norm),
    "layers.wide_query_norm": Parameter("La N D", _LAYER + "self_attn.q_norm.weight", "N*D", _has_wide_norms),
    "layers.wide_key_norm": Parameter("La K D", _LAYER + "self_attn.k_norm.weight", "K*D", _has_wide_norms),
    "layers.attention_post_norm": Parameter("L E", _LAYER + "post_attention_layernorm.weight", "E", _norms_after),
    "layers.feed_post_norm": Parameter("L E", _LAYER + "post_feedforward_layernorm.weight", "E", _norms_after),
    "layers.router": Parameter("Lx E X", _LAYER + "mlp.gate.weight", "X E", _has_experts),
    "layers.expert_gate": Parameter("Lx X E F", _EXPERT + "gate_proj.weight", "F E", _has_experts),
    "layers.expert_up": Parameter("Lx X E F", _EXPERT + "up_proj.weight", "F E", _has_experts),
    "layers.expert_down": Parameter("Lx X F E", _EXPERT + "down_proj.weight", "E F", _has_experts),
    "layers.router_bias": Parameter("Lx X", _LAYER + "mlp.gate.bias", "X", _has_expert_biases),
    "layers.expert_gate_bias": Parameter("Lx X F", _EXPERT + "gate_proj.bias", "F", _has_expert_biases),
    "layers.expert_up_bias": Parameter("Lx X F", _EXPERT + "up_proj.bias", "F", _has_expert_biases),
    "layers.expert_down_bias": Parameter("Lx X E", _EXPERT + "down_proj.bias", "E", _has_expert_biases),
    "layers.sink_logits": Parameter("La N", _LAYER + "self_attn.sinks", "N", _has_sinks),
    "layers.choice_bias": Parameter(
        "Lx X", _LAYER + "mlp.gate.e_score_correction_bias", "X",
        lambda config: config.routing.scores == "sigmoid" and _has_experts(config),
    ),
    "layers.shared_gate": Parameter("Lx E Fs", _SHARED + "gate_proj.weight", "Fs E", _has_shared),
    "layers.shared_up": Parameter("Lx E Fs", _SHARED + "up_proj.weight", "Fs E", _has_shared),
    "layers.shared_down": Parameter("Lx Fs E", _SHARED + "down_proj.weight", "E Fs", _has_shared),
    "layers.latent": Parameter("L E C+R", _LAYER + "self_attn.kv_a_proj_with_mqa.weight", "C+R E", _is_latent),
    "layers.latent_bias": Parameter("L C+R", _LAYER + "self_attn.kv_a_proj_with_mqa.bias", "C+R", _has_latent_bias),
    "layers.latent_norm": Parameter("L C", _LAYER + "self_attn.kv_a_layernorm.weight", "C", _is_latent),
    "layers.latent_heads": Parameter("L C N U", _LAYER + "self_attn.kv_b_proj.weight", "N*U C", _is_latent),
    "layers.latent_query": Parameter(
        "L E N H", _LAYER + "self_attn.q_proj.weight", "N*H E",
        lambda config: _is_latent(config) and not _compresses_queries(config),
    ),
    "layers.query_down": Parameter("L E Q", _LAYER + "self_attn.q_a_proj.weight", "Q E", _compresses_queries),
    "layers.query_down_bias": Parameter(
        "L Q", _LAYER + "self_attn.q_a_proj.bias", "Q",
        lambda config: _compresses_queries(config) and _has_latent_bias(config),
    ),
    "layers.query_down_norm": Parameter("L Q", _LAYER + "self_attn.q_a_layernorm.weight", "Q", _compresses_queries),
    "layers.query_up": Parameter("L Q N H", _LAYER + "self_attn.q_b_proj.weight", "N*H Q", _compresses_queries),
    "layers.query_gate": Parameter("La E N D", _LAYER + "self_attn.q_gate.weight", "N*D E", _has_gate),
    "layers.query_gate_bias": Parameter("La N D", _LAYER + "self_attn.q_gate.bias", "N*D", _has_gate_bias),
    "layers.shared_router": Parameter("Lx E 1", _LAYER + "mlp.shared_expert_gate.weight", "1 E", _weighs_shared),
    "layers.delta_query": Parameter("Lr HP E", _DELTA + "in_proj_q.weight", "HP E", _has_delta),
    "layers.delta_key": Parameter("Lr HP E", _DELTA + "in_proj_k.weight", "HP E", _has_delta),
    "layers.delta_value": Parameter("Lr JW E", _DELTA + "in_proj_v.weight", "JW E", _has_delta),
    "layers.delta_gate": Parameter("Lr JW E", _DELTA + "in_proj_z.weight", "JW E", _has_delta),
    "layers.delta_rate": Parameter("Lr J E", _DELTA + "in_proj_b.weight", "J E", _has_delta),
    "layers.delta_decay": Parameter("Lr J E", _DELTA + "in_proj_a.weight", "J E", _has_delta),
    "layers.recurrent_kernel": Parameter("Lr Z 1 M", _DELTA + "conv1d.weight", "Z 1 M", _is_hybrid),
    "layers.recurrent_log_decay": Parameter("Lr J", _DELTA + "A_log", "J", _is_hybrid),
    "layers.recurrent_decay_bias": Parameter("Lr J", _DELTA + "dt_bias", "J", _is_hybrid),
    "layers.delta_norm": Parameter("Lr W", _DELTA + "norm.weight", "W", _has_delta),
    "layers.recurrent_output": Parameter("Lr JW E", _DELTA + "out_proj.weight", "E JW", _is_hybrid),
    "layers.space_in": Parameter("Lr Z+JW+J E", _SPACE + "in_proj.weight", "Z+JW+J E", _has_space),
    "layers.space_kernel_bias": Parameter("Lr Z", _SPACE + "conv1d.bias", "Z", _has_space),
    "layers.space_skip": Parameter("Lr J", _SPACE + "D", "J", _has_space),
    "layers.space_norm": Parameter("Lr JW", _SPACE + "norm.weight", "JW", _has_space),
    "layers.router_scale": Parameter("Lx E", _LAYER + "router.scale", "E", _has_routed),
    "layers.choice_scale": Parameter("Lx X", _LAYER + "router.per_expert_scale", "X", _has_routed),
    "layers.routed_norm": Parameter("Lx E", _LAYER + "pre_feedforward_layernorm_2.weight", "E", _has_routed),
    "layers.routed_post_norm": Parameter("Lx E", _LAYER + "post_feedforward_layernorm_2.weight", "E", _has_routed),
    "layers.shared_post_norm": Parameter("Lx E", _LAYER + "post_feedforward_layernorm_1.weight", "E", _has_routed),
    "input_embedding": Parameter("Vi LP", "model.embed_tokens_per_layer.weight", "Vi LP", _has_inputs),
    "input_projection": Parameter("E LP", "model.per_layer_model_projection.weight", "LP E", _has_inputs),
    "input_norm": Parameter("P", "model.per_layer_projection_norm.weight", "P", _has_inputs),
    "layers.input_gate": Parameter("L E P", _LAYER + "per_layer_input_gate.weight", "P E", _has_inputs),
    "layers.input_up": Parameter("L P E", _LAYER + "per_layer_projection.weight", "E P", _has_inputs),
    "layers.input_post_norm": Parameter("L E", _LAYER + "post_per_layer_input_norm.weight", "E", _has_inputs),
    "layers.layer_scale": Parameter("L 1", _LAYER + "layer_scalar", "1", operator.attrgetter("layer_scale")),
    "stream_in": Parameter("A-1 E Eo", "model.altup_projections.{}.weight", "Eo E", _has_streams),
    "stream_out": Parameter("A-1 E Eo", "model.altup_unembed_projections.{}.weight", "Eo E", _has_streams),
    "layers.stream_norm": Parameter("L E", _ALTUP + "router_norm.weight", "E", _has_streams),
    "layers.stream_router": Parameter("L E A", _ALTUP + "modality_router.weight", "A E", _has_streams),
    "layers.stream_predict": Parameter("L A AA", _ALTUP + "prediction_coefs.weight", "AA A", _has_streams),
    "layers.stream_correct": Parameter("L Ai A", _ALTUP + "correction_coefs.weight", "A Ai", _has_streams),
    "layers.stream_scale": Parameter("L E", _ALTUP + "correct_output_scale", "E", _has_streams),
    "layers.narrow_down": Parameter("L E Y", _LAYER + "laurel.linear_left.weight", "Y E", _has_streams),
    "layers.narrow_up": Parameter("L Y E", _LAYER + "laurel.linear_right.weight", "E Y", _has_streams),
    "layers.narrow_norm": Parameter("L E", _LAYER + "laurel.post_laurel_norm.weight", "E", _has_streams),
}  # fmt: skip
ROTATED = ("layers.query", "layers.key")
# Those whose elements are those of heads, in the order in which they are rotated.
ORDERED = (*ROTATED, "layers.query_bias", "layers.key_bias", "layers.query_norm", "layers.key_norm")
_DELTA_IN = ("query", "key", "value", "gate", "rate", "decay")
# The arrays that hold several parameters: their axes, and the parameters, side by side along the axis before the last.
# A KV group has its G queries, its key and its value together, so a mesh splits an array as it would its parameters.
# A kind of layers that lacks one of them has so many rows fewer.
JOINED: dict[str, tuple[str, tuple[str, ...]]] = {
    "layers.qkv": ("La E K G+2 D", ("layers.query", "layers.key", "layers.value")),
    "layers.qkv_bias": ("La K G+2 D", ("layers.query_bias", "layers.key_bias", "layers.value_bias")),
    "layers.gate_up": ("Ld E 2 Fd", ("layers.gate", "layers.up")),
    "layers.expert_gate_up": ("Lx X E 2 F", ("layers.expert_gate", "layers.expert_up")),
    "layers.shared_gate_up": ("Lx E 2 Fs", ("layers.shared_gate", "layers.shared_up")),
    "layers.delta_in": ("Lr I E", tuple(f"layers.delta_{name}" for name in _DELTA_IN)),
}
_ARRAY_OF = {name: array for array, (_, names) in JOINED.items() for name in names}


def kind_of(name: str) -> tuple[str, int]:
    """Return a name without the number of a kind of layers, and this number."""
    base, _, number = name.partition("@")
    return base, int(number or 0)


def _of_kind(base: str, kind: int) -> str:
    return f"{base}@{kind}" if kind else base


def parameter_of(name: str) -> Parameter:
    """Return the parameter of a name, of whichever kind of layers."""
    return PARAMETERS[kind_of(name)[0]]


def array_of(name: str) -> str:
    """Return the name of the arrays, one of each layer, that hold a parameter."""
    base, kind = kind_of(name)
    return _of_kind(_ARRAY_OF.get(base, base), kind)


def names_in(config: Config, array: str) -> tuple[str, ...]:
    """Return the names of the parameters that an array holds."""
    base, kind = kind_of(array)
    if base not in JOINED:
        return (array,)
    own = config.kinds[kind]
    return tuple(_of_kind(name, kind) for name in JOINED[base][1] if PARAMETERS[name].wanted(own))


def paths_of(config: Config, array: str) -> list[str]:
    """Return the paths of the arrays of a name: one for each layer that has it.

    Example:
        >>> import models
        >>> from models.parameters import paths_of
        >>> paths_of(models.Decoder.tiny().config, "layers.qkv")
        ['layers.0.qkv', 'layers.1.qkv']
    """
    if axes_of(array)[0] not in LAYERS:
        return [array]
    return [kind_of(array)[0].replace(".", f".{layer}.", 1) for layer in layers_with(config, array)]


def _base_and_layer(path: str) -> tuple[str, int | None]:
    parts = path.split(".")
    return (kind_of(path)[0], None) if len(parts) < 3 else (f"{parts[0]}.{parts[2]}", int(parts[1]))


def named(config: Config, path: str) -> tuple[str, int | None]:
    """Return the name of an array, and the number of its layer, None for an array that is in no layer."""
    base, layer = _base_and_layer(path)
    return (base if layer is None else _of_kind(base, config.kinds.index(config.at(layer)))), layer


def rows_of(config: Config, name: str) -> slice | None:
    """Return the rows, along the axis before the last, that a parameter has in its array; None if it is alone there."""
    array, kind = array_of(name), config.kinds[kind_of(name)[1]]
    if kind_of(array)[0] not in JOINED:
        return None
    names = names_in(config, array)
    sizes, own = _sizes(kind), [parameter_of(each).axes.split() for each in names]
    if len(own[0]) == len(axes_of(array)):  # they lie along an axis of their own
        counts = [sizes[axes[-2]] for axes in own]
    else:
        counts = [kind.num_heads // kind.num_kv_heads if "N" in axes else 1 for axes in own]
    first = sum(counts[: names.index(name)])
    return slice(first, first + counts[names.index(name)])


def join_weights(config: Config, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoder's arrays by path from parameters by name, of NumPy or JAX.

    Example:
        >>> import numpy as np
        >>> import models
        >>> from models.parameters import split_weights, join_weights, parameter_shapes
        >>> config = models.Decoder.tiny().config
        >>> shapes = parameter_shapes(config)
        >>> shapes["layers.query"], shapes["layers.key"]
        ((2, 32, 4, 8), (2, 32, 2, 8))
        >>> arrays = join_weights(
        ...     config, {name: np.zeros(shape) for name, shape in shapes.items()}
        ... )
        >>> arrays["layers.0.qkv"].shape
        (32, 2, 4, 8)
        >>> split_weights(config, arrays)["layers.query"].shape
        (2, 32, 4, 8)
    """
    shapes, arrays = array_shapes(config), {}
    for array in dict.fromkeys(map(array_of, parameters)):
        held, paths = [parameters[name] for name in names_in(config, array)], paths_of(config, array)
        numbers = np if all(isinstance(each, np.ndarray) for each in held) else jnp
        for place, path in enumerate(paths):
            parts = [each if paths == [array] else each[place] for each in held]
            if kind_of(array)[0] in JOINED:
                *before, _, last = shapes[path]
                parts = [numbers.concatenate([part.reshape(*before, -1, last) for part in parts], axis=-2)]
            (arrays[path],) = parts
    return arrays


def split_weights(config: Config, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters by name that some of the decoder's arrays hold, those of a name from all layers."""
    shapes, found = parameter_shapes(config), {}
    for array in dict.fromkeys(named(config, path)[0] for path in arrays):
        paths = paths_of(config, array)
        held = [arrays[path] for path in paths]
        numbers = np if all(isinstance(each, np.ndarray) for each in held) else jnp
        for name in names_in(config, array):
            rows = rows_of(config, name)
            parts = held if rows is None else [whole[..., rows, :] for whole in held]
            found[name] = parts[0] if paths == [array] else numbers.stack(parts).reshape(shapes[name])
    return found


def axes_of(name: str) -> list[str]:
    """Return the axes of a parameter by its name, or of an array by its path or by its name, of all layers."""
    array, layer = _base_and_layer(name)
    axes = (JOINED[array][0] if array in JOINED else PARAMETERS[array].axes).split()
    return axes if layer is None else axes[1:]


def partition(path: str, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Return how a mesh splits an array: over "tensor", and experts over "expert" as well if the mesh has it."""
    axes = axes_of(path)
    first = next((axis for axis in axes if axis in SPLIT), None)  # experts are split, or else what is in them
    ways = expert_axes(mesh) if first == "X" else "tensor"
    return PartitionSpec(*(ways if axis == first else None for axis in axes))


def expert_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Return the axes of a mesh that split the experts, those of size 1 as well."""
    return tuple(axis for axis in ("expert", "tensor") if axis in mesh.axis_names)


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter that a model of this config has, by name."""
    names = [
        _of_kind(name, number)
        for number, kind in enumerate(config.kinds)
        for name, parameter in PARAMETERS.items()
        if parameter.wanted(kind) and (not number or name.startswith("layers."))
    ]
    return _shapes(config, names)


def array_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of every array that a decoder of this config has, by its path there."""
    arrays = dict.fromkeys(map(array_of, parameter_shapes(config)))
    return _shapes(config, [path for array in arrays for path in paths_of(config, array)])


def _sizes(config: Config) -> dict[str, int]:
    """Return the size of each axis by its letters."""
    sizes = dict(
        V=config.vocab_size, E=config.hidden_size, F=config.intermediate_size,
        N=config.num_heads, K=config.num_kv_heads, D=config.head_dim, X=config.num_experts,
        Fd=config.dense_size, Fs=config.shared_size,
    )  # fmt: skip
    own_rows = sum(PARAMETERS[name].wanted(config) for name in ("layers.key", "layers.value"))
    sizes |= {"1": 1, "2": 2, "G+2": config.num_heads // config.num_kv_heads + own_rows}
    sizes |= {"ND": config.num_heads * config.value_dim}
    sizes |= {"P": config.layer_input_size, "LP": config.num_layers * config.layer_input_size}
    sizes |= {"Vi": config.layer_input_vocab or config.vocab_size, "Eo": config.hidden_size}
    if config.altup is not None:
        A = config.altup.streams
        sizes |= {"A": A, "Ai": A, "A-1": A - 1, "AA": A * A, "Y": config.altup.rank}
    if (own := config.latent) is not None:
        sizes |= {"C": own.size, "C+R": own.head_dim, "Q": own.query, "H": own.plain + own.rotated}
        sizes["U"] = own.plain + own.value
    if (net := config.recurrence) is not None:
        sizes |= dict(J=net.value_heads, W=net.value_dim, Z=net.channels, M=net.kernel)
        sizes |= dict(HP=net.key_heads * net.key_dim, JW=net.value_heads * net.value_dim)
        sizes |= {"Z+JW+J": (most := sizes["Z"] + sizes["JW"] + sizes["J"]), "I": most + sizes["J"]}
    return sizes


def _shapes(config: Config, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters by name, of all layers, or of arrays by path, of one."""
    sizes, found = [_sizes(kind) for kind in config.kinds], {}
    for given in names:
        name, _ = named(config, given) if _base_and_layer(given)[1] is not None else (given, None)
        own = sizes[kind_of(name)[1]] | {axis: len(layers_with(config, name)) for axis in LAYERS}
        found[given] = tuple(own[axis] for axis in axes_of(given))
    return found


def check_rngs(rngs: nnx.Rngs | None) -> nnx.Rngs:
    """Return the source of random parameters, after a check that there is one."""
    if rngs is None:
        raise ValueError("neither parameters nor rngs were given; pass rngs=nnx.Rngs(0) for random weights.")
    return rngs


def drawn(
    draw: Callable[..., Array], shapes: Mapping[str, tuple[int, ...]], rngs: nnx.Rngs, *options: Any
) -> dict[str, Array]:
    """Make random parameters in one compiled program; operations one by one would be a program for each shape.

    ``draw(key, name, shape, *options)`` returns a parameter; the key of norms, biases and scales is None.
    Options are hashable.
    """
    constant = ("norm", "bias", "_scale")
    keys = {name: rngs.params() for name in shapes if not kind_of(name)[0].endswith(constant)}
    return _drawn(draw, tuple(shapes.items()), options, keys)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _drawn(draw: Callable[..., Array], shapes: tuple[tuple[str, Any], ...], options: tuple[Any, ...], keys: Any) -> Any:
    return {name: draw(keys.get(name), name, tuple(shape), *options) for name, shape in shapes}


@functools.cache
def layers_with(config: Config, name: str) -> Sequence[int]:
    """Return the numbers of the layers that have an array or a parameter of a name, in their order."""
    every = range(config.num_layers)
    own = {"L": every, "Ld": config.dense_layers, "Lx": config.sparse_layers, "Lr": config.recurrent_layers}
    own["La"] = [layer for layer in every if layer not in config.recurrent_layers]
    layers, kind = own.get(axes_of(name)[0], ()), kind_of(name)[1]
    return layers if len(config.kinds) == 1 else [at for at in layers if config.at(at) == config.kinds[kind]]


def tensor_of(config: Config, name: str, tensor: str, place: Sequence[int]) -> str:
    """Return the name of the tensor that holds one place of a stacked parameter.

    ``tensor`` is as in ``Parameter``; ``place`` is along the axes that have a tensor for each index.
    """
    layers = layers_with(config, name)
    return tensor.format(*(layers[place[0]], *place[1:]) if layers else place)


def tensor_names(config: Config) -> dict[str, str]:
    """Return the name of each parameter in a checkpoint in Hugging Face layout, as in ``Parameter.tensor``."""
    names = {name: parameter.tensor for name, parameter in PARAMETERS.items()}
    names |= family_of_architecture(config.architecture).tensors
    return {_of_kind(name, kind): tensor for kind in range(len(config.kinds)) for name, tensor in names.items()}


def head_order(config: Config) -> Int[np.ndarray, "D"] | None:
    """Return which element of a checkpoint's head each element of a query or key is; None where the order is the same.

    The decoder rotates element i with element i + D/2. Where only R elements of a head are rotated, its pairs from R/2
    on have frequency 0. A checkpoint has the rotated elements first, as two halves, and then the others.
    """
    D, R = config.head_dim, config.rope.rotated(config.head_dim)
    if R in (0, D) or config.latent is not None:  # models.latent puts the elements in order
        return None
    pairs, others = np.arange(R).reshape(2, -1), np.arange(R, D).reshape(2, -1)
    return np.concatenate([pairs, others], axis=1).reshape(-1)


def known_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the dtype of weights that a name or a type stands for; float64 needs JAX's 64-bit mode."""
    names = ["bfloat16", "float16", "float32"] + (["float64"] if jax.config.jax_enable_x64 else [])
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        known = None
    if known is None or known.name not in names:
        raise ValueError(f"dtype {dtype!r} is not known; expected one of {', '.join(names)}.")
    return known
