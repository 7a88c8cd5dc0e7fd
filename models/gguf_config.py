"""The config of a GGUF file, from its metadata."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvjax.checks import shown
from models.checkpoint import Tensor
from models.config import Config, Rope
from models.families import FAMILIES, Gguf
from models.gguf_header import needed, optional, positive, size_of
from models.gguf_tokenizer import ends_of_turn, id_of
from models.rotary import rope_frequencies

FREQUENCY_FACTORS = "rope_freqs.weight"  # Llama 3.1's rope scaling, as a factor for each frequency
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"  # longrope's

# llama.cpp's name of each of the decoder's parameters.
NAMES = {
    "embedding": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "layers.attention_norm": "blk.{}.attn_norm.weight",
    "layers.query": "blk.{}.attn_q.weight",
    "layers.key": "blk.{}.attn_k.weight",
    "layers.value": "blk.{}.attn_v.weight",
    "layers.output": "blk.{}.attn_output.weight",
    "layers.feed_norm": "blk.{}.ffn_norm.weight",
    "layers.gate": "blk.{}.ffn_gate.weight",
    "layers.up": "blk.{}.ffn_up.weight",
    "layers.down": "blk.{}.ffn_down.weight",
    "layers.query_bias": "blk.{}.attn_q.bias",
    "layers.key_bias": "blk.{}.attn_k.bias",
    "layers.value_bias": "blk.{}.attn_v.bias",
    "layers.output_bias": "blk.{}.attn_output.bias",
    "layers.query_norm": "blk.{}.attn_q_norm.weight",
    "layers.key_norm": "blk.{}.attn_k_norm.weight",
    "layers.wide_query_norm": "blk.{}.attn_q_norm.weight",
    "layers.wide_key_norm": "blk.{}.attn_k_norm.weight",
    "layers.attention_post_norm": "blk.{}.post_attention_norm.weight",
    "layers.feed_post_norm": "blk.{}.post_ffw_norm.weight",
    "layers.router": "blk.{}.ffn_gate_inp.weight",
    # One tensor holds a layer's experts; here each of them is one.
    "layers.expert_gate": "blk.{}.ffn_gate_exps.weight[{}]",
    "layers.expert_up": "blk.{}.ffn_up_exps.weight[{}]",
    "layers.expert_down": "blk.{}.ffn_down_exps.weight[{}]",
}
ROTATED = re.compile(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)")

# Keys of the architecture that are read, or that have no effect.
KNOWN_KEYS = {
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
    "attention.value_length", "block_count", "context_length", "embedding_length", "feed_forward_length",
    "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.factor", "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "rope.scaling.type", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "tensor_data_layout", "vocab_size",
}  # fmt: skip
# Other keys, with the value that has no effect.
NEUTRAL_KEYS = {
    "attention.causal": True,
    "attention.sliding_window": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.attn_factor": 1,
    "use_parallel_residual": False,
}


def family_in(metadata: Mapping[str, Any]) -> tuple[str, Gguf]:
    """Return the family of a file's model, after a check that all its keys are supported: its name and its ``gguf``."""
    architecture = needed(metadata, "general.architecture", str)
    known = _stored()
    if architecture not in known:
        for name in FAMILIES.names():  # an installed package may offer it
            FAMILIES.find(name)
        known = _stored()
    if architecture not in known:
        raise ValueError(
            f"architecture {architecture!r} is not supported in GGUF files; supported are {', '.join(known)}."
        )
    own = known[architecture][1].keys
    pieces = optional(metadata, "split.count", int, 1)
    if pieces > 1:
        raise ValueError(
            f"it is one of {pieces} pieces of a model; join them first (llama-gguf-split --merge FIRST JOINED)."
        )
    prefix = f"{architecture}."
    for key, value in metadata.items():
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or name in KNOWN_KEYS | own:
            continue
        if name not in NEUTRAL_KEYS or value != NEUTRAL_KEYS[name]:
            said = " ".join(key.split())  # a damaged name may hold line breaks
            raise ValueError(
                f"its key {said} is {shown(value)}, which is not supported; take another file, or the original folder "
                "with config.json."
            )
    return known[architecture]


def _stored() -> dict[str, tuple[str, Gguf]]:
    return {gguf.architecture: (name, gguf) for name, (*_, gguf) in FAMILIES.items() if gguf is not None}


def config_of(metadata: Mapping[str, Any], name: str, stored: Gguf, tensors: Mapping[str, Tensor]) -> Config:
    """Return the config of a file whose family, called ``name``, is stored as ``stored`` says."""
    size, architecture = functools.partial(size_of, metadata), stored.architecture
    hidden, heads = size(f"{architecture}.embedding_length"), size(f"{architecture}.attention.head_count")
    head_dim = size(f"{architecture}.attention.key_length", hidden // heads)
    whole = [("attention.value_length", "values"), ("rope.dimension_count", "rotation")]
    for key, what in whole[:1] if stored.partly_rotated else whole:
        other = size(f"{architecture}.{key}", head_dim)
        if other != head_dim:
            raise ValueError(
                f"its key {architecture}.{key} is {other}, but a head has {head_dim} numbers; only models whose "
                f"{what} take a whole head are supported."
            )
    if NAMES["embedding"] not in tensors:
        raise ValueError(f"it lacks the tensor {NAMES['embedding']}; is it complete, and a language model's?")
    eos = [id_of(metadata, end) for end in ("eos", "eot", "eom")]
    read: dict[str, Any] = dict(
        architecture=name,
        vocab_size=tensors[NAMES["embedding"]].shape[0],
        hidden_size=hidden,
        intermediate_size=size(f"{architecture}.{stored.feed_forward}"),
        num_layers=size(f"{architecture}.block_count"),
        num_heads=heads,
        num_kv_heads=size(f"{architecture}.attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_epsilon=positive(metadata, f"{architecture}.attention.layer_norm_rms_epsilon"),
        max_positions=size(f"{architecture}.context_length"),
        tie_embeddings=NAMES["head"] not in tensors,
        attention_bias=NAMES["layers.query_bias"].format(0) in tensors,
        output_bias=NAMES["layers.output_bias"].format(0) in tensors,
        bos=id_of(metadata, "bos"),
        eos=tuple(dict.fromkeys(token for token in [*eos, *ends_of_turn(metadata)] if token is not None)),
        pad=id_of(metadata, "padding"),
    )
    fields = read | dict(stored.fields(metadata, tensors, read))
    if "rope" not in fields:
        fields["rope"] = _rope(metadata, architecture, head_dim, read["max_positions"], tensors)
    return Config(**fields)


def expert_fields(metadata: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return the numbers of experts, {} for a model without them."""
    experts = optional(metadata, f"{architecture}.expert_count", int, 0)
    if not experts:
        return {}
    per_token = size_of(metadata, f"{architecture}.expert_used_count")
    return {"num_experts": experts, "experts_per_token": per_token, "normalise_experts": True}  # as llama.cpp does


def _rope(
    metadata: Mapping[str, Any], architecture: str, head_dim: int, positions: int, tensors: Mapping[str, Tensor]
) -> Rope:
    prefix, factors = f"{architecture}.rope.", tensors.get(FREQUENCY_FACTORS)
    theta = positive(metadata, f"{prefix}freq_base", 10_000.0)
    kind = optional(metadata, f"{prefix}scaling.type", str, "linear")
    factor = positive(metadata, f"{prefix}scaling.factor", positive(metadata, f"{prefix}scale_linear", 1.0))
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(
            f"its key {prefix}scaling.type is {kind!r}; supported are none, linear and yarn, and Llama 3.1's factors."
        )
    if kind == "none" or (kind == "linear" and factor == 1):
        return Rope(theta) if factors is None else _llama3(theta, head_dim, factors)
    if factors is not None:
        raise ValueError(f"it holds both {FREQUENCY_FACTORS} and {prefix}scaling.type {kind!r}; only one is supported.")
    if kind == "linear":
        return Rope(theta, "linear", factor)
    return Rope(
        theta,
        "yarn",
        factor,
        original_positions=size_of(metadata, f"{prefix}scaling.original_context_length", positions),
        beta_fast=positive(metadata, f"{prefix}scaling.yarn_beta_fast", 32.0),
        beta_slow=positive(metadata, f"{prefix}scaling.yarn_beta_slow", 1.0),
    )


def longrope(
    metadata: Mapping[str, Any], architecture: str, tensors: Mapping[str, Tensor], read: Mapping[str, Any]
) -> Rope:
    """Return Phi-3's rotary embedding: of a part of each head, and with two tensors of factors for long contexts."""
    prefix, positions = f"{architecture}.rope.", read["max_positions"]
    theta = positive(metadata, f"{prefix}freq_base", 10_000.0)
    partial = size_of(metadata, f"{prefix}dimension_count", read["head_dim"]) / read["head_dim"]
    if LONG_FACTORS not in tensors or SHORT_FACTORS not in tensors:
        return Rope(theta, partial_rotary_factor=partial)
    original = size_of(metadata, f"{prefix}scaling.original_context_length", positions)
    long, short = (
        tuple(float(str(x)) for x in tensor.read((slice(0, tensor.shape[0]),)).astype(np.float32))
        for tensor in (tensors[LONG_FACTORS], tensors[SHORT_FACTORS])
    )
    amplitude = metadata.get(f"{prefix}scaling.attn_factor")
    return Rope(
        theta,
        "longrope",
        positions / original,
        original_positions=original,
        attention_factor=None if amplitude is None else positive(metadata, f"{prefix}scaling.attn_factor"),
        partial_rotary_factor=partial,
        short_factor=short,
        long_factor=long,
    )


def _llama3(theta: float, head_dim: int, factors: Tensor) -> Rope:
    """Find the Llama 3.1 scaling that given factors on the frequencies come from: the file stores nothing else of it.

    All models of that family scale partially between 1 and 4 turns in their original context, a power of two.
    """
    if factors.shape != (head_dim // 2,):
        raise ValueError(
            f"{FREQUENCY_FACTORS} has shape {factors.shape}; a head of {head_dim} requires {head_dim // 2}."
        )
    found = factors.read((slice(0, head_dim // 2),))
    if not np.isfinite(found).all() or found.min() < 1:
        raise ValueError(f"{FREQUENCY_FACTORS} is damaged: it holds numbers below 1 or not finite; download it again.")
    if found.max() == 1:
        return Rope(theta)
    plain = np.asarray(rope_frequencies(Rope(theta), head_dim)[0][0])
    for original in (1 << power for power in range(13, 21)):
        rope = Rope(theta, "llama3", float(found.max()), original)
        ours = plain / np.asarray(rope_frequencies(rope, head_dim)[0][0])
        if np.allclose(ours, found, rtol=1e-4):
            return rope
    raise ValueError(
        f"the factors in {FREQUENCY_FACTORS} are not those of Llama 3.1's rope scaling, the only ones supported; take "
        "the original folder with config.json."
    )
