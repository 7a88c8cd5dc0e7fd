"""The shape of a decoder: one frozen dataclass. models/config_json.py reads and writes it as a config.json."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

from kvjax._src.checks import check_count, check_fields

MOST, MOST_LAYERS = 2**31 - 1, 10_000  # MOST: the largest int32
FEATURE = {"feature": True}
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def _feature(default: Any) -> Any:
    """Declare a field for something that most families lack; :func:`described` leaves it out at its default."""
    return dataclasses.field(default=default, metadata=FEATURE)


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding: its base and, where the context was extended, its scaling (the names are Hugging Face's).

    ``original_positions`` is the context length that the model was trained with before the extension (llama3, yarn);
    for ``dynamic`` it is the length beyond which the base grows, for ``longrope`` the length beyond which frequencies
    are divided by ``long_factor`` instead of ``short_factor``. Each of these has a number per rotated pair.
    ``partial_rotary_factor`` is the share of each head's elements that are rotated, 0 for a layer without rotary
    embedding; of type ``proportional`` they have the first frequencies of the whole head (Gemma 4).
    With ``llama_4_scaling_beta`` b the query at position p is multiplied by
    1 + b log(1 + floor(p / original_positions)) (Ministral 3).
    """

    theta: float = 10_000.0
    type: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    partial_rotary_factor: float = _feature(1.0)
    short_factor: tuple[float, ...] = _feature(())
    long_factor: tuple[float, ...] = _feature(())
    llama_4_scaling_beta: float = _feature(0.0)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def follows_length(self) -> bool:
        """Tell whether frequencies depend on the length of the text."""
        return self.type in ("dynamic", "longrope")

    def rotated(self, head_dim: int) -> int:
        """Return how many of a head's elements are rotated."""
        return int(head_dim * self.partial_rotary_factor + 1e-6)  # 64 / 576 of 576 are 64


NO_ROPE = Rope(partial_rotary_factor=0.0)


@dataclasses.dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1); see :mod:`models.latent`.

    Args:
        size: the numbers of the latent that all heads' keys and values are made of (``kv_lora_rank``).
        rotated: the numbers of the one rotated key beside it, and of each query's rotated part (``qk_rope_head_dim``).
        plain: the numbers of a query head that are not rotated (``qk_nope_head_dim``).
        value: the numbers of a head's value, before the output projection (``v_head_dim``).
        query: the numbers that queries are compressed to, with a norm; 0 for none (``q_lora_rank``).
        bias: whether the projections to the latent, and to the compressed query, have biases.
        neighbours: whether a checkpoint rotates neighbouring elements (``rope_interleave``), not two halves.
    """

    size: int
    rotated: int
    plain: int
    value: int
    query: int = 0
    bias: bool = False
    neighbours: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        for name, least in dict(size=1, rotated=1, plain=1, value=1, query=0).items():
            check_size(name, getattr(self, name))
            check_count(f"the latent's {name}", getattr(self, name), least, f"give an integer from {least}")
        if self.size % 2 or self.rotated % 2:
            raise ValueError(f"the latent has {self.size} and {self.rotated} rotated numbers; give even sizes.")

    @property
    def head_dim(self) -> int:
        """Return the numbers of the one key that all query heads share."""
        return self.size + self.rotated


@dataclasses.dataclass(frozen=True)
class Routing:
    """Say how a token's experts are chosen, where it is not by the largest softmax of all (DeepSeek-V2, DeepSeek-V3).

    Args:
        scores: "softmax" over all experts, or the "sigmoid" of each, to which a bias of each expert is added for the
            choice alone (arXiv 2412.19437, eqs. 12 to 16).
        groups: the number of groups of neighbouring experts.
        groups_per_token: the groups that a token's experts are chosen from: those of the largest score (softmax), or of
            the largest sum of two (sigmoid).
        multiplier: a factor of the chosen experts' weights.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    groups_per_token: int = 1
    multiplier: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        check_count("the groups of experts", self.groups, 1, "give at least 1")
        if not 1 <= self.groups_per_token <= self.groups:
            raise ValueError(
                f"{self.groups_per_token} groups of experts per token were given; there are {self.groups}."
            )


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """Layers with a state of fixed size in place of attention, and so without a KV cache (:mod:`models.recurrent`).

    Args:
        layers: the numbers of these layers.
        key_heads, value_heads: how many heads queries and keys have, and values; each key serves as many values.
        key_dim, value_dim: the length of a query and of a key, and of a value.
        kernel: how many inputs the convolution over time sees, the newest included.
        kind: a gated delta net (:mod:`models.delta_net`), or a state-space model (Mamba-2, :mod:`models.state_space`).
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    kind: Literal["delta_net", "state_space"] = "delta_net"

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "kernel"):
            check_size(name, getattr(self, name))
            check_count(name, getattr(self, name), 1, "give a positive integer")
        if self.value_heads % self.key_heads:
            given = f"{self.value_heads} value heads were given for {self.key_heads} key heads"
            raise ValueError(f"{given} of the layers without attention; expected a multiple.")

    @property
    def channels(self) -> int:
        """Return how many numbers of each token the convolution mixes over time: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclasses.dataclass(frozen=True)
class GlobalHeads:
    """The KV heads of layers without a sliding window, where layers with one have others (Gemma 4).

    Args:
        kv_heads: their number in each of these layers.
        head_dim: the length of a query, a key and a value.
        keys_as_values: whether these layers have no projection of their own to values: a value is the key before its
            norm and its rotation.
    """

    kv_heads: int
    head_dim: int
    keys_as_values: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class AltUp:
    """The streams of hidden states between layers, and what is beside attention (Gemma 3n, :mod:`models.altup`).

    Args:
        streams, active: how many there are, and the number of the one that layers read.
        rank: the width of the matrices beside attention (LAuReL).
        scaled: whether each element of the active stream has a factor where the layer's own input comes in.
    """

    streams: int
    active: int
    rank: int
    scaled: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if not (0 <= self.active < self.streams <= MOST and 1 <= self.rank <= MOST):
            given = f"stream {self.active} of {self.streams} is active, and the rank is {self.rank}"
            raise ValueError(f"{given}; expected a number below that of the streams, and a rank from 1.")


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a Llama-like decoder. Axes: L layers, N query heads, K KV heads, D head dim, E model dim.

    Args:
        architecture: a registered family that can be saved, such as "llama".
        rope: the layers' rotary embedding.
        sliding_windows: one entry per layer: the number of positions that it sees, or None for all. () means None for
            every layer.
        attention_bias: whether the query, key and value projections have biases.
        output_bias: whether the attention's output projection has a bias.
        query_key_norm: whether each head's query and key go through an RMS norm before rotation (Qwen3).
        bos, eos, pad: token ids; ``eos`` may hold several.
        wide_query_key_norm: whether queries and keys go through an RMS norm over all heads together (OLMo-2).
        norms: whether the layer norms are applied to the input of attention and feed-forward, to their output before it
            is added to the residual ("after", OLMo-2), or to both (Gemma 2).
        norm_offset: whether norms multiply by 1 + weight (Gemma).
        activation: the feed-forward network's activation function; "clamped_swiglu" is gpt-oss's gate as a whole.
        attention_soft_cap, logits_soft_cap: a number c that attention logits, or the logits of the vocabulary, are bent
            to: c tanh(x / c); None for no cap (Gemma 2).
        ropes: one entry per layer: a rotary embedding of its own, or None for ``rope``. () means None for every layer.
        embedding_multiplier, residual_multiplier: factors of the embeddings, and of what attention and feed-forward add
            to the residual (Granite).
        attention_multiplier: factor of the attention logits; None for head_dim ** -0.5. It is applied to the queries,
            so that whoever reads them computes logits as for any other model.
        logits_scaling: the divisor of the logits of the vocabulary (Granite).
        num_experts, experts_per_token: how many feed-forward networks of ``intermediate_size`` each layer has, and how
            many of them each token goes through; 0 for one that all tokens go through (Mixtral, Qwen3-MoE).
        normalise_experts: whether the weights of a token's experts are divided by their sum.
        expert_biases: whether the router has a bias, and each projection of an expert (gpt-oss).
        attention_sinks: whether each query head has a logit of its own that takes a share of the attention, and has no
            value (gpt-oss).
        shared_router: whether each token weighs what the shared network makes of it by a sigmoid (Qwen3-Next).
        attention_gate: whether the attention's output is multiplied by a sigmoid of its input (Qwen3-Next).
        recurrence: the layers that have a state in place of attention, and so no KV cache; None for none (Qwen3-Next,
            Granite 4).
        dense_sizes: one entry per layer of a model with experts: the size of the one feed-forward network that the
            layer has in their place, the same for all such layers, or None. () means None for every layer.
        shared_size: the size of one more feed-forward network in layers with experts, which all tokens go through; 0
            for none.
        routing: how a token's experts are chosen.
        latent: the sizes of multi-head latent attention, None for attention with a key and a value of each KV head.
            Such a model has one KV head, whose key is the latent and the rotated key beside it.
        most_attended: the most tokens that a cache may hold, because of more the model attends to those that an indexer
            chooses, which is not read (DeepSeek-V3.2, GLM-5); 0 for no limit.
        global_heads: the KV heads of the layers without a sliding window, where the others have ``num_kv_heads`` of
            ``head_dim``; None where all layers are alike (Gemma 4). :meth:`at` is the config as a layer has it.
        keys_as_values: see :class:`GlobalHeads`; of all layers.
        value_norm: whether values go through an RMS norm without a weight (Gemma 4).
        layer_scale: whether each layer has a number that its output is multiplied by (Gemma 4).
        shared_layers: how many layers at the end have no keys and values of their own, and no KV cache: each attends
            to those of the last layer before them that has a window as it has one, or has none (Gemma 4 E2B, E4B).
        sharing_size: the size of the feed-forward network of these layers; 0 for ``intermediate_size``.
        expert_norms: whether the experts, beside a shared network, have norms of their own before and behind, that
            network one behind, the router's input a norm, and each expert's weight a factor (Gemma 4).
        layer_input_size: the length of the vector that each layer gets of a token beside its input; 0 for none
            (Gemma 4 E2B, E4B, Gemma 3n).
        layer_input_vocab: how many tokens have such a vector; the others have that of token 0. 0 for all (Gemma 3n).
        activation_sparsity: one entry per layer: the share of feed-forward units that are to be 0. () means none are.
        altup: see :class:`AltUp`; None for one stream, and nothing beside attention.
        source: the config.json that it was read from, which :func:`models.save` writes again; None without one. Configs
            that differ in nothing else are equal.

    Example:
        >>> from models.config import Config
        >>> Config(
        ...     64, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4,
        ...     num_kv_heads=2
        ... ).head_dim
        8
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 0
    architecture: str = "llama"
    rope: Rope = Rope()
    norm_epsilon: float = 1e-6
    max_positions: int = 2048
    tie_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    query_key_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    wide_query_key_norm: bool = _feature(False)
    norms: Literal["before", "after", "both"] = _feature("before")
    norm_offset: bool = _feature(False)
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"] = _feature("silu")
    attention_soft_cap: float | None = _feature(None)
    logits_soft_cap: float | None = _feature(None)
    ropes: tuple[Rope | None, ...] = _feature(())
    embedding_multiplier: float = _feature(1.0)
    attention_multiplier: float | None = _feature(None)
    residual_multiplier: float = _feature(1.0)
    logits_scaling: float = _feature(1.0)
    num_experts: int = _feature(0)
    experts_per_token: int = _feature(0)
    normalise_experts: bool = _feature(False)
    dense_sizes: tuple[int | None, ...] = _feature(())
    expert_biases: bool = _feature(False)
    attention_sinks: bool = _feature(False)
    shared_size: int = _feature(0)
    routing: Routing = dataclasses.field(default=Routing(), metadata=FEATURE)
    latent: Latent | None = dataclasses.field(default=None, metadata=FEATURE)
    most_attended: int = _feature(0)
    shared_router: bool = _feature(False)
    attention_gate: bool = _feature(False)
    recurrence: Recurrence | None = dataclasses.field(default=None, metadata=FEATURE)
    global_heads: GlobalHeads | None = dataclasses.field(default=None, metadata=FEATURE)
    keys_as_values: bool = _feature(False)
    value_norm: bool = _feature(False)
    layer_scale: bool = _feature(False)
    shared_layers: int = _feature(0)
    sharing_size: int = _feature(0)
    layer_input_size: int = _feature(0)
    expert_norms: bool = _feature(False)
    layer_input_vocab: int = _feature(0)
    activation_sparsity: tuple[float, ...] = _feature(())
    altup: AltUp | None = dataclasses.field(default=None, metadata=FEATURE)
    source: dict | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        counts = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads")
        for name in ("num_layers", *counts, "head_dim", "max_positions", "num_experts", "shared_size"):
            check_size(name, getattr(self, name))
        for name in counts:
            check_count(name, getattr(self, name), 1, "give a positive integer")
        check_count("num_layers", self.num_layers, 0, "give an integer from 0")  # 0: only what lies outside the layers
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.num_layers)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads is {self.num_heads}; give a multiple of num_kv_heads, {self.num_kv_heads}.")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embedding needs an even head_dim.")
        _check_rope(self.rope, self.head_dim)
        check_count("num_experts", self.num_experts, 0, "give the number of experts of each layer, 0 for none")
        check_count("shared_size", self.shared_size, 0, "give a size, or 0 for no shared network")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(f"experts_per_token is {self.experts_per_token}; expected 1 to {self.num_experts}.")
        if not any(self.ropes):
            object.__setattr__(self, "ropes", ())
        if all(size is None for size in self.dense_sizes):
            object.__setattr__(self, "dense_sizes", ())
        if not any(self.activation_sparsity):
            object.__setattr__(self, "activation_sparsity", ())
        for name in ("sliding_windows", "ropes", "dense_sizes", "activation_sparsity"):
            if (given := len(getattr(self, name))) not in (0, self.num_layers):
                raise ValueError(f"{given} {name} were given for {self.num_layers} layers; give one each, or None.")
        if self.dense_sizes:
            self._check_dense_sizes()
        if self.num_experts:
            self._check_routing()
        if self.latent is not None:
            self._check_latent(self.latent)
        if self.recurrent_layers and not 0 < len(self.cached_layers) < self.num_layers:
            wrong = f"the layers without attention are layers {list(self.recurrent_layers)} of {self.num_layers};"
            raise ValueError(f"{wrong} expected numbers of layers, and attention in at least one other.")
        for name in ("shared_layers", "sharing_size", "layer_input_size", "layer_input_vocab"):
            check_count(name, getattr(self, name), 0, "give an integer from 0")
        if any(not 0 <= share < 1 for share in self.activation_sparsity):
            raise ValueError(f"activation_sparsity is {self.activation_sparsity}; give shares from 0, below 1.")
        if self.altup and (self.norms != "both" or self.recurrence or self.num_experts or not self.layer_input_size):
            wrong = "altup was given; expected norms='both' and a layer_input_size with it"
            raise ValueError(f"{wrong}, and neither experts nor a recurrence.")
        if self._differs:
            self._check_kinds()

    def _check_kinds(self) -> None:
        """Check that layers that differ have nothing that is read for layers that are alike only."""
        only: dict[str, Any] = dict(latent=None, recurrence=None, attention_sinks=False, attention_bias=False)
        only |= dict(wide_query_key_norm=False, attention_gate=False, dense_sizes=())
        for name, value in only.items():
            if (given := getattr(self, name)) != value:
                raise ValueError(f"{name} is {given!r}; expected {value!r} in a model whose layers differ.")
        if -1 in self.sources:
            wrong = f"{self.shared_layers} of {self.num_layers} layers share keys and values;"
            raise ValueError(f"{wrong} before them each needs a layer that has a window as it has one, or has none.")

    def _check_routing(self) -> None:
        X, groups = self.num_experts, self.routing.groups
        if X % groups or (groups > 1 and X // groups < 2):
            raise ValueError(f"{X} experts do not make {groups} groups of at least two; give a divisor.")
        if self.experts_per_token > (most := X // groups * self.routing.groups_per_token):
            raise ValueError(
                f"experts_per_token is {self.experts_per_token}, but a token's groups have {most} experts."
            )

    def _check_latent(self, latent: Latent) -> None:
        wanted: dict[str, Any] = dict(num_kv_heads=1, head_dim=latent.head_dim, attention_bias=False, ropes=())
        wanted |= dict(attention_gate=False, recurrence=None)
        for name, value in wanted.items():
            if (given := getattr(self, name)) != value:
                raise ValueError(f"{name} is {given!r}; expected {value!r} with latent attention.")
        if self.query_key_norm or self.wide_query_key_norm or self.attention_sinks:
            raise ValueError("latent attention has norms of its own, and no sinks; leave query_key_norm and such out.")
        if self.rope.rotated(self.head_dim) != latent.rotated:
            raise ValueError(f"partial_rotary_factor is {self.rope.partial_rotary_factor}; give rotated / head_dim.")

    def _check_dense_sizes(self) -> None:
        if not self.num_experts:
            raise ValueError("dense_sizes were given, but the model has no experts; give intermediate_size alone.")
        sizes = {size for size in self.dense_sizes if size is not None}
        for size in sizes:
            check_size("dense_sizes", size)
            check_count("dense_sizes", size, 1, "give a positive integer for each layer without experts")
        if len(sizes) > 1:
            raise ValueError(f"dense_sizes are {sorted(sizes)}; expected one size, because these layers are stacked.")

    def at(self, layer: int) -> Config:
        """Return the config as one layer has it: that of a model whose layers are all like this one."""
        return self._of_layers[layer] if self._differs else self

    @property
    def _differs(self) -> bool:
        sharing = self.shared_layers > 0 and not self.shares
        return self.global_heads is not None or sharing or len(set(self.activation_sparsity)) > 1

    @property
    def shares(self) -> bool:
        """Tell, of a config as a layer has it, whether the layer attends to the keys and values of another."""
        return 0 < self.shared_layers == self.num_layers

    @functools.cached_property
    def sources(self) -> tuple[int | None, ...]:
        """Return the layer whose keys and values each layer attends to; None for its own, -1 where there is none."""
        first, windowed = self.num_layers - self.shared_layers, [own is not None for own in self.sliding_windows]
        last = {kind: max((n for n in range(first) if windowed[n] == kind), default=-1) for kind in (True, False)}
        return tuple(None if n < first else last[windowed[n]] for n in range(self.num_layers))

    @functools.cached_property
    def _of_layers(self) -> tuple[Config, ...]:
        alike = dataclasses.replace(self, global_heads=None, shared_layers=0, sharing_size=0)
        found: list[Config] = []
        own, heads = self.global_heads, dict[str, Any]()
        if own is not None:
            heads |= dict(num_kv_heads=own.kv_heads, head_dim=own.head_dim, keys_as_values=own.keys_as_values)
        size = self.sharing_size or self.intermediate_size
        sharing = dict[str, Any](shared_layers=self.num_layers, intermediate_size=size)
        shares = self.activation_sparsity or (0.0,) * self.num_layers
        for window, source, share in zip(self.sliding_windows, self.sources, shares, strict=True):
            others = ({} if source is None else sharing) | {"activation_sparsity": (share,) * self.num_layers}
            found.append(dataclasses.replace(alike, **({} if window else heads), **others))
        return tuple(found)

    @functools.cached_property
    def kinds(self) -> tuple[Config, ...]:
        """Return the configs of the layers, each once; see :meth:`at`."""
        return tuple(dict.fromkeys(self._of_layers)) if self._differs else (self,)

    @functools.cached_property
    def rotations(self) -> tuple[tuple[Rope, int], ...]:
        """Return the rotary embeddings of all layers, each once, with the head dim; ``rope`` is the first."""
        return tuple(dict.fromkeys(((self.rope, self.head_dim), *map(self.rotation_of, range(self.num_layers)))))

    def rotation_of(self, layer: int) -> tuple[Rope, int]:
        """Return the rotary embedding of a layer, and its head dim."""
        return (self.ropes[layer] if self.ropes else None) or self.rope, self.at(layer).head_dim

    @property
    def cached_heads(self) -> tuple[tuple[int, int], ...]:
        """Return the number of KV heads and the head dim of each layer with a KV cache."""
        return tuple((own.num_kv_heads, own.head_dim) for own in map(self.at, self.cached_layers))

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers that have a state of fixed size in place of a KV cache."""
        return () if self.recurrence is None else self.recurrence.layers

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers with a KV cache."""
        own = range(self.num_layers - self.shared_layers)
        return tuple(layer for layer in own if layer not in self.recurrent_layers)

    @property
    def cached_windows(self) -> tuple[int | None, ...]:
        """Return the sliding windows of the layers with a KV cache; see ``sliding_windows``."""
        return tuple(self.sliding_windows[layer] for layer in self.cached_layers)

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers with one feed-forward network."""
        sparse = set(self.sparse_layers)
        return tuple(layer for layer in range(self.num_layers) if layer not in sparse)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers with experts."""
        dense_sizes = self.dense_sizes or (None,) * self.num_layers
        return tuple(layer for layer, size in enumerate(dense_sizes) if self.num_experts and size is None)

    @property
    def value_dim(self) -> int:
        """Return the numbers of each query head that the output projection multiplies."""
        return self.head_dim if self.latent is None else self.latent.value

    @property
    def dense_size(self) -> int:
        """Return the size of the one feed-forward network of layers without experts."""
        return next((size for size in self.dense_sizes if size is not None), self.intermediate_size)


def check_attention(config: Config, who: str) -> None:
    """Check that all layers have attention of their own, for what reads it in every layer.

    ``who`` begins the sentence if not.
    """
    other = "take a policy that reads neither networks nor gradients, such as 'kvzip@uniform' or 'snapkv+caote'."
    check_alike(config, f"{who} in every layer", other)
    if lacking := len(config.recurrent_layers):
        raise ValueError(
            f"{who} in every layer, but {lacking} of this model's {config.num_layers} layers have no attention: take "
            "a policy that reads neither networks nor gradients, such as 'kvzip' or 'snapkv+caote'."
        )


def check_alike(config: Config, who: str, advice: str = "take another model.") -> None:
    """Check that all layers have the same heads; ``who`` begins the sentence if not, and ``advice`` ends it."""
    if len(config.kinds) > 1 or config.layer_input_size:
        what = "differ in their heads, share keys and values, or have inputs of their own"
        raise ValueError(f"{who}, but this model's layers {what}: {advice}")


def described(config: Config) -> dict[str, Any]:
    """Return the fields of a config for JSON, without features that the model lacks, and without its source.

    So the description of a model stays the same when the decoder learns a new feature.
    """

    def fields(made: Any) -> dict[str, Any]:
        named = {field.name: (field, getattr(made, field.name)) for field in dataclasses.fields(made)}
        return {
            name: fields(value) if dataclasses.is_dataclass(value) else value
            for name, (field, value) in named.items()
            if field.compare and (not field.metadata or value != field.default)
        }

    found = fields(config)
    if config.ropes:
        found["ropes"] = [rope and fields(rope) for rope in config.ropes]
    return found


def _check_rope(rope: Rope, head_dim: int) -> None:
    """Check that the rotated part of a head is made of pairs, and that longrope has a factor for each of them."""
    rotated = rope.rotated(head_dim)
    if not 0 <= rope.partial_rotary_factor <= 1 or rotated % 2:
        raise ValueError(
            f"partial_rotary_factor is {rope.partial_rotary_factor} of {head_dim}; give a share of whole pairs."
        )
    if rope.llama_4_scaling_beta < 0 or (rope.llama_4_scaling_beta and rope.original_positions < 1):
        given = f"{rope.llama_4_scaling_beta} with original_positions {rope.original_positions}"
        raise ValueError(f"llama_4_scaling_beta is {given}; give a number from 0, with the original length.")
    for name in ("short_factor", "long_factor") if rope.type == "longrope" else ():
        factors = getattr(rope, name)
        if len(factors) != rotated // 2 or min(factors, default=1) <= 0:
            raise ValueError(f"{name} has {len(factors)} numbers; expected {rotated // 2} above 0, one per pair.")


def check_size(name: str, value: int) -> None:
    """Check that a size is one that a model can have, before anything of that size is made."""
    most = MOST_LAYERS if name in ("num_layers", "num_hidden_layers") else MOST
    if isinstance(value, int) and value > most:
        raise ValueError(f"{name} is beyond {most:,}, the most that is supported; is the file damaged?")
