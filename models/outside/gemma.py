"""Gemma's own samplers under a budget: the package ``gemma``, its models in Flax linen, tried with 4.0.1.

``gm.text.Sampler`` and ``gm.text.ChatSampler`` stay as they are; the model that they are given has another cache. The
parameters are the model's own.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

import kvjax
from kvjax import Policy
from models.outside.keep import Keep, LayerCache, LayerSizes, has_not_moved

TRIED = "4.0.1"


def under_budget(model: Any, *, policy: Policy | str, budget: int, block: int = 128) -> Any:
    """Return a model of gemma whose cache holds ``budget`` tokens per head, for gemma's samplers.

    A sampler's ``cache_length`` then bounds the length of the conversation, at one byte per token. A layer with a
    sliding window holds at most its window.

    Args:
        model: ``gm.nn.Gemma3_4B()``, or another Gemma 2, 3 or 4 whose layers share no keys and values.
        policy: a policy or its short name.
        budget: tokens that each head keeps.
        block: tokens of a prompt that go through the model at once.

    Raises:
        ValueError: if the model is none of these, or for a policy that :class:`models.outside.keep.Keep` refuses.
        RuntimeError: if the package is a version in which what is replaced has another name.

    Example:
        >>> # model = under_budget(gm.nn.Gemma3_4B(), policy="h2o+caote", budget=2048)
        >>> # sampler = gm.text.ChatSampler(model=model, params=params)
    """
    keep, kind = Keep.of(policy, budget, block), _check(model)
    names = {field.name for field in dataclasses.fields(model) if field.init} - {"parent", "name"}
    return _under_budget(kind)(**{name: getattr(model, name) for name in names}, keep=keep)


def attend(module: Any, x: Array, cache: LayerCache) -> tuple[Array, LayerCache]:
    """Do what an ``Attention`` of gemma does, over a cache of kvjax; ``module`` is bound to its parameters."""
    rope = importlib.import_module("gemma.gm.math._positional_embeddings").apply_rope
    if getattr(module, "use_qkv_einsum", False):
        query, key, value = module.qkv_einsum("BTD,SNDH->SBTNH", x)
    else:
        query = module.q_einsum("BTD,NDH->BTNH", x)
        if getattr(module, "k_eq_v", False):
            key = value = module.k_einsum("BSD,KDH->BSKH", x)
        else:
            key, value = module.kv_einsum("BSD,CKDH->CBSKH", x)
    norm = "" if hasattr(module, "value_norm") else "_"  # of Gemma 4, of Gemma 3
    if norm == "" or module.use_qk_norm:
        query, key = getattr(module, f"{norm}query_norm")(query), getattr(module, f"{norm}key_norm")(key)
    if norm == "":
        value = module.value_norm(value)
    how = dict(base_frequency=module.rope_base_frequency, scale_factor=module.rope_scale_factor)
    if hasattr(module, "rope_proportion"):
        how["rope_proportion"] = module.rope_proportion
    query, key = (rope(own, cache.position, **how) for own in (query, key))
    scale = getattr(module, "query_pre_attn_scalar", 1.0)
    out, cache = cache.attend(query, key, value, scale=float(scale), soft_cap=module.attn_logits_soft_cap)
    return module.attn_vec_einsum("BTNH,NHD->BTD", out.astype(x.dtype)), cache


def arrays_of(cache: LayerCache) -> dict[str, Array]:
    """Return the arrays of a layer's cache as a dictionary, in an order that survives sorting."""
    return {f"{number:03}": leaf for number, leaf in enumerate(jax.tree.leaves(cache))}


def sizes_of(config: Any) -> list[LayerSizes]:
    """Return the sizes of each layer's attention, of a config of gemma."""
    made = []
    for kind in config.attention_types:
        heads, dim = config.num_kv_heads, config.head_dim
        if kind.name == "GLOBAL" and getattr(config, "global_key_size", None) is not None:
            heads, dim = config.num_global_kv_heads or heads, config.global_key_size
        window = config.sliding_window_size if kind.name == "LOCAL_SLIDING" else None
        made.append(LayerSizes(config.num_heads, heads, dim, window))
    return made


def prompt_positions(tokens: Int[Array, "B T"], position: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Return -1 for padding, and for each row's last token, which gemma's loop feeds again as its first step."""
    real = tokens != 0
    return jnp.where(real & _more_follow(real), position, -1)


def _more_follow(real: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    return jnp.cumsum(real, axis=1) < jnp.sum(real, axis=1, keepdims=True)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("caches", "room"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class Slots:
    """Holds the caches of all layers where gemma looks for keys, [B, cache_length, K, D].

    Gemma cuts its cache to a prompt's length, and writes the part back. Ours is whole in both.
    """

    caches: tuple[LayerCache, ...]
    room: Array  # [B, cache_length, 0, 0], of no bytes

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape that gemma's cache would have, with no heads."""
        return self.room.shape

    def __getitem__(self, key: Any) -> Slots:
        return Slots(self.caches, self.room[key])

    @property
    def at(self) -> _Written:
        """Return what ``at`` of an array is, for ``at[...].set(part)``."""
        return _Written(self)


@dataclasses.dataclass(frozen=True)
class _Written:
    """Takes the caches of a part in place of those of the whole."""

    whole: Slots

    def __getitem__(self, key: Any) -> _Written:
        return self

    def set(self, part: Slots) -> Slots:
        """Return the whole with the caches of the part."""
        return Slots(part.caches, self.whole.room)


def _check(model: Any) -> Any:
    """Return the class of a model, after a check that it can be given another cache."""
    modules = {name: importlib.import_module(name) for name in ("gemma.gm.nn._modules", "gemma.gm.nn.gemma4._modules")}
    wanted = {f"{name}.Attention": getattr(module, "Attention", None) for name, module in modules.items()}
    rope = getattr(importlib.import_module("gemma.gm.math._positional_embeddings"), "apply_rope", None)
    has_not_moved("gemma", TRIED, wanted | {"gemma.gm.math._positional_embeddings.apply_rope": rope})
    if not hasattr(model, "config") or any("gemma3n" in cls.__module__ for cls in type(model).__mro__):
        raise ValueError(f"the model is a {type(model).__name__}; expected a Gemma 2, 3 or 4 of gemma.gm.nn.")
    if getattr(model.config, "kv_cache_sharing_config", None) is not None:
        raise ValueError(f"layers of {type(model).__name__} share keys and values; give a model without such layers.")
    return type(model)


@functools.cache
def _under_budget(cls: Any) -> Any:
    from flax import linen
    from gemma.gm.nn import _modules as before
    from gemma.gm.nn._transformer import Output
    from gemma.gm.nn.gemma4 import _modules as four

    class UnderBudget(cls):
        """Runs the same model, with kvjax's cache and attention."""

        keep: Any = None

        def init_cache(self, *, batch_size: int, dtype: Any, cache_length: int, sharding: Any = None) -> Any:
            """Make a cache as gemma's samplers know it, in whose first layer is that of all layers."""
            caches = self.keep.caches(sizes_of(self.config), batch=batch_size, dtype=dtype)
            room = jnp.zeros((batch_size, cache_length, 0, 0))
            own = dict(k=Slots(tuple(caches), room), v=room, positions=room.reshape(room.shape[:3]))
            return {"layer_0": own | dict(end_index=jnp.zeros(batch_size, jnp.int32))}

        def apply(self, variables: Any, *args: Any, cache: Any = None, **given: Any) -> Any:
            """Run the model on a prompt, or on a token per row; without a cache, as gemma does."""
            if cache is None:
                return super().apply(variables, *args, **given)
            if given.get("images") is not None or given.get("audio") is not None:
                raise ValueError("images and audio see what follows them; under a budget, give text alone.")
            tokens, position, first = args[0] if args else given["tokens"], given["positions"], cache["layer_0"]
            prompt = given.get("return_last_only", False)  # only a prompt asks for it; what it says is not read
            caches, logits = _run(self, prompt, variables, first["k"].caches, position, tokens)
            first = first | dict(k=Slots(caches, first["k"].room), end_index=first["end_index"] + tokens.shape[1])
            return Output(logits=logits, cache={"layer_0": first}, hidden_states=None)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def _run(model: Any, prompt: bool, variables: Any, caches: Any, position: Any, tokens: Any) -> Any:
        def feed(caches: Any, tokens: Any) -> Any:
            names, trees = [f"layer_{own.number}" for own in caches], [jax.tree.structure(own) for own in caches]
            given = dict(zip(names, map(arrays_of, caches), strict=True))  # gemma checks that a cache is of arrays

            def attention(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
                if (
                    not isinstance(context.module, before.Attention | four.Attention)
                    or context.method_name != "__call__"
                ):
                    return call(*args, **kwargs)
                own = jax.tree.unflatten(trees[names.index(context.module.path[0])], args[2].values())
                out, own = attend(context.module, args[0], own)
                return arrays_of(own), out

            with linen.intercept_methods(attention):
                out = cls.apply(
                    model, variables, tokens, positions=caches[0].position, cache=given, attention_mask=None
                )
            made = [
                jax.tree.unflatten(*own) for own in zip(trees, map(dict.values, map(out.cache.get, names)), strict=True)
            ]
            return tuple(made), None if prompt else out.logits

        # A row whose answer has ended is fed on at one position, which is the first of its next prompt.
        caches = tuple(dataclasses.replace(own, cache=kvjax.rewind(own.cache, position[:, 0])) for own in caches)
        return model.keep.run(feed, caches, prompt_positions(tokens, position) if prompt else position, tokens)

    return UnderBudget
