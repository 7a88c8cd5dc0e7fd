"""``CausalLM.generate`` of keras-hub under a budget, on Keras' JAX backend, tried with keras-hub 0.32.0.

keras-hub has a door to attention of another engine, through which vLLM serves its models: while it is open, each layer
hands over its rotated queries and keys, and its values. What is behind it here is a cache of kvjax.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax import Policy
from models.outside.keep import Keep, LayerCache, LayerSizes, has_not_moved

TRIED = "0.32.0"
_seeded: contextvars.ContextVar[Any] = contextvars.ContextVar("seeded")  # how many tokens of a prompt come in at once


def under_budget(causal_lm: Any, *, policy: Policy | str, budget: int, block: int = 128) -> Any:
    """Return a CausalLM with the same backbone, whose ``generate`` holds ``budget`` tokens per head.

    Args:
        causal_lm: a Llama, Mistral, Qwen, Qwen 3, Gemma or Gemma 3 of keras-hub, or another whose attention keras-hub
            can hand over.
        policy: a policy or its short name.
        budget: tokens that each head keeps.
        block: tokens of a prompt that go through the model at once.

    Raises:
        ValueError: if Keras does not run on JAX, if the model's attention cannot be handed over, or for a policy that
            :class:`models.outside.keep.Keep` refuses.
        RuntimeError: if the package is a version in which what is replaced has another name.

    Example:
        >>> # lm = under_budget(causal_lm, policy="h2o+caote", budget=2048)
        >>> # lm.generate("...", max_length=100_000)
    """
    import keras

    keep = Keep.of(policy, budget, block)
    if keras.config.backend() != "jax":
        raise ValueError(f"Keras runs on {keras.config.backend()}; set KERAS_BACKEND=jax before it is imported.")
    wanted = {f"CausalLM.{name}": getattr(causal_lm, name, None) for name in ("_build_cache", "call_with_cache")}
    has_not_moved(
        "keras-hub", TRIED, wanted | {f"{_DOOR}.vllm_context_scope": getattr(_door(), "vllm_context_scope", None)}
    )
    if not sizes_of(causal_lm):
        raise ValueError(
            f"keras-hub cannot hand over the attention of {type(causal_lm).__name__}; try a Llama or Gemma 3."
        )
    own = type(causal_lm)(backbone=causal_lm.backbone, preprocessor=causal_lm.preprocessor)
    own.__class__, own.keep = _causal_lm(own.__class__), keep
    if hasattr(causal_lm, "sampler"):
        own.compile(sampler=causal_lm.sampler)
    return own


_DOOR = "keras_hub.src.vllm.context"


def _door() -> Any:
    try:
        return importlib.import_module(_DOOR)
    except ModuleNotFoundError:
        return None


def run(
    causal_lm: Any, attend: Any, caches: list[Any], tokens: Int[Array, "B T"], position: Int[Array, "B T"]
) -> tuple[list[Any], Array]:
    """Run the backbone while attention is handed over; return the caches and the hidden states, [B, T, E].

    Args:
        attend: takes a layer's cache, queries, keys and values, [B, T, heads, D], the scale, and by name the window and
            the soft cap; returns the attention's output and the cache.
    """
    B, T = tokens.shape
    door = _door()

    def handed(cache: Any, query: Any, key: Any, value: Any, scale: Any, head_dim: int, *heads: int, **how: Any) -> Any:
        query, key, value = (x.reshape(B, T, -1, head_dim) for x in (query, key, value))
        out, cache = attend(cache, query, key, value, float(scale), how.get("sliding_window"), how.get("soft_cap"))
        return cache, out.reshape(B * T, -1).astype(query.dtype)

    with door.vllm_context_scope(paged_attention_func=handed, positions=position.reshape(-1), kv_caches=caches):
        tokens = tokens.reshape(-1, 1)  # keras-hub hands over a token per row
        hidden = causal_lm.backbone(dict(token_ids=tokens, padding_mask=jnp.ones_like(tokens)))
        caches = door.get_vllm_context().updated_kv_caches
    return caches, hidden.reshape(B, T, -1)


def sizes_of(causal_lm: Any) -> list[LayerSizes]:
    """Return the sizes of each layer's attention, as they are handed over; [] if they are not."""
    found: list[LayerSizes] = []

    def note(cache: Any, query: Array, key: Array, value: Array, scale: float, window: Any, cap: Any) -> Any:
        found.append(LayerSizes(query.shape[2], key.shape[2], query.shape[3], window))
        return query, cache

    none: list[Any] = [None] * 10_000
    one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    jax.eval_shape(lambda tokens: run(causal_lm, note, none, tokens, tokens)[1], one)
    return found


def _attend(cache: LayerCache, query: Array, key: Array, value: Array, scale: float, window: Any, cap: Any) -> Any:
    return cache.attend(query, key, value, scale=scale, soft_cap=cap)


@functools.cache
def _causal_lm(cls: Any) -> Any:
    class UnderBudget(cls):
        """Runs the same model, with kvjax's cache and attention."""

        def generate_step(self, inputs: Any, stop_token_ids: Any = None) -> Any:
            """Generate as keras-hub does; its loop begins at the last token that all prompts have."""
            token = _seeded.set(jnp.min(jnp.sum(inputs["padding_mask"], axis=-1)) - 1)
            try:
                return super().generate_step(inputs, stop_token_ids)
            finally:
                _seeded.reset(token)

        def _build_cache(self, token_ids: Any, *others: Any, **named: Any) -> Any:
            B, T = token_ids.shape
            caches = self.keep.caches(sizes_of(self), batch=B, dtype=self.compute_dtype)
            position = jnp.broadcast_to(jnp.arange(T), (B, T))
            position = jnp.where(position < _seeded.get(), position, -1)

            def feed(caches: Any, tokens: Any) -> Any:
                return run(self, _attend, caches, tokens, caches[0].position)[0], None

            return None, self.keep.run(feed, caches, position, token_ids)[0]

        def call_with_cache(
            self, token_ids: Any, cache: Any, cache_update_index: Any, *others: Any, **named: Any
        ) -> Any:
            """Feed a token per row, and return the logits, the hidden states and the cache."""
            position = jnp.full(token_ids.shape, cache_update_index, jnp.int32)

            def feed(caches: Any, tokens: Any) -> Any:
                return run(self, _attend, caches, tokens, caches[0].position)

            cache, hidden = self.keep.run(feed, cache, position, token_ids)
            return self.backbone.token_embedding(hidden, reverse=True), hidden, cache

    return UnderBudget
