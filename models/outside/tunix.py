"""Tunix's own sampler under a budget: the package ``google-tunix``, its models in Flax NNX, tried with 0.1.7.

``tunix.generate.sampler.Sampler`` and the rollouts that use it stay as they are; the model that they are given has
another cache. Its weights have the names of the model's own, so a rollout is given new weights as before.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax import Policy
from models.outside.keep import Keep, LayerCache, LayerSizes, has_not_moved

TRIED = "0.1.7"


def under_budget(model: Any, *, policy: Policy | str, budget: int, block: int = 128) -> Any:
    """Return a model of Tunix with the same weights, whose cache holds ``budget`` tokens per head, for its sampler.

    The sampler's ``cache_size`` then bounds the length of a rollout, and takes no memory for keys and values.

    Args:
        model: a Llama 3, Qwen 2, Qwen 3 or Gemma 3 of ``tunix.models``.
        policy: a policy or its short name.
        budget: tokens that each head keeps.
        block: tokens of a prompt that go through the model at once.

    Raises:
        ValueError: if the model is none of these, or for a policy that :class:`models.outside.keep.Keep` refuses.
        RuntimeError: if the package is a version in which what is replaced has another name.

    Example:
        >>> # model = under_budget(llama3, policy="h2o+caote", budget=2048)
        >>> # sampler = Sampler(model, tokenizer, CacheConfig(1_000_000, 32, 8, 128))
    """
    from flax import nnx

    keep = Keep.of(policy, budget, block)
    if type(model).__name__ not in ("Llama3", "Qwen2", "Qwen3", "Gemma3"):
        raise ValueError(f"the model is a {type(model).__name__}; expected a Llama3, Qwen2, Qwen3 or Gemma3 of Tunix.")
    module = sys.modules[type(model).__module__]
    rope = getattr(module, "apply_rope", None) or getattr(module, "apply_rotary_embedding", None)
    attention = [getattr(layer, "attn", None) for layer in getattr(model, "layers", ())]
    output = [getattr(own, "o_proj", None) or getattr(own, "attn_vec_einsum", None) for own in attention]
    wanted = {"apply_rope": rope, "layers[...].attn.o_proj": None if None in output else True}
    has_not_moved("google-tunix", TRIED, {f"{module.__name__}.{name}": found for name, found in wanted.items()})
    own: Any = nnx.merge(*nnx.split(model))
    for layer in own.layers:
        layer.attn.__class__ = _attention(layer.attn.__class__)
    own.__class__, own.keep = _model(own.__class__), keep
    return own


def heads(module: Any, x: Array, cache: LayerCache, named: dict[str, Any]) -> tuple[Array, Array, Array]:
    """Return the queries, keys and values that an ``Attention`` of Tunix makes, rotated."""
    if hasattr(module, "q_proj"):
        query, key, value = module.q_proj(x), module.k_proj(x), module.v_proj(x)
    elif hasattr(module, "qkv_einsum"):
        query, key, value = module.qkv_einsum(x)
    else:
        query, (key, value) = module.q_einsum(x), module.kv_einsum(x)
    if hasattr(module, "q_bias"):
        biases = (bias[...].astype(x.dtype) for bias in (module.q_bias, module.k_bias, module.v_bias))
        query, key, value = (a + b.reshape(a.shape[2:]) for a, b in zip((query, key, value), biases, strict=True))
    for q_norm, k_norm in (("q_norm", "k_norm"), ("_query_norm", "_key_norm")):
        if hasattr(module, q_norm):
            query, key = getattr(module, q_norm)(query), getattr(module, k_norm)(key)
    file = sys.modules[type(module).__mro__[1].__module__]
    if hasattr(file, "apply_rotary_embedding"):
        query, key = (file.apply_rotary_embedding(own, named["sin"], named["cos"]) for own in (query, key))
        return query, key, value
    how = dict(head_dim=module.head_dim)
    if hasattr(module, "rope_base_frequency"):
        how |= dict(base_frequency=module.rope_base_frequency, scale_factor=module.rope_scale_factor)
    query, key = (file.apply_rope(own, cache.position, **how) for own in (query, key))
    return query, key, value


def sizes_of(model: Any) -> list[LayerSizes]:
    """Return the sizes of each layer's attention."""
    made = []
    for layer in model.layers:
        local = getattr(getattr(layer.attn, "attn_type", None), "name", "") == "LOCAL_SLIDING"
        window = layer.attn.sliding_window_size if local else None
        made.append(LayerSizes(model.config.num_heads, model.config.num_kv_heads, model.config.head_dim, window))
    return made


def real_positions(position: Int[Array, "B T"], mask: Bool[Array, "B T S"]) -> Int[Array, "B T"]:
    """Return the positions of a prompt with -1 for its padding, which the last query does not see."""
    T = position.shape[1]
    return position if T == 1 else jnp.where(mask[:, -1, :T], position, -1)


@functools.cache
def _attention(cls: Any) -> Any:
    names = inspect.signature(cls.__call__)

    class Attention(cls):
        """Runs the same attention over a cache of kvjax."""

        def __call__(self, *args: Any, **given: Any) -> Any:
            """Attend over a cache of kvjax, and otherwise as Tunix does."""
            named = names.bind(self, *args, **given).arguments
            x, cache = named["x"], named["cache"]
            if not isinstance(cache, LayerCache):
                return super().__call__(*args, **given)
            scale = getattr(self, "query_pre_attn_scalar", None) or self.scale
            out, cache = cache.attend(*heads(self, x, cache, named), scale=float(scale))
            project = self.o_proj if hasattr(self, "o_proj") else self.attn_vec_einsum
            return cache, project(out.astype(x.dtype))

    return Attention


@functools.cache
def _model(cls: Any) -> Any:
    tokens_name, names = list(inspect.signature(cls.__call__).parameters)[1], inspect.signature(cls.__call__)

    class UnderBudget(cls):
        """Runs the same model, with kvjax's cache and attention."""

        def init_cache(self, batch_size: int, cache_size: int, dtype: Any) -> Any:
            """Make the cache of all layers, whose size does not depend on ``cache_size``."""
            made = self.keep.caches(sizes_of(self), batch=batch_size, dtype=dtype)
            return {f"layer_{own.number}": own for own in made}

        def __call__(self, *args: Any, decode_only_last_token: bool = False, **given: Any) -> Any:
            """Run the model on a prompt in blocks, or on a token per row; without a cache of kvjax, as Tunix does."""
            named = names.bind(self, *args, **given).arguments
            cache, tokens = named.get("cache"), named[tokens_name]
            if cache is None or not isinstance(cache["layer_0"], LayerCache):
                return super().__call__(*args, **given)
            if named.get("images") is not None:
                raise ValueError("images see what follows them; under a budget, give text alone.")
            position = real_positions(named["positions"], named["attention_mask"])

            def feed(caches: Any, tokens: Any) -> Any:
                logits, caches = cls.__call__(self, tokens, caches["layer_0"].position, caches, None)
                return caches, logits

            caches, logits = self.keep.run(feed, cache, position, tokens, last=decode_only_last_token)
            return logits, caches

    # Tunix reads a model's names to learn what it may give: its learner gives segments to one that takes any name.
    last = inspect.signature(UnderBudget.__call__).parameters["decode_only_last_token"]
    given = names.replace(parameters=[*names.parameters.values(), last])
    UnderBudget.__call__.__signature__ = given  # type: ignore[attr-defined]
    return UnderBudget
