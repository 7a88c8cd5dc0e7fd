"""Gives a decoder of another package its caches under a budget, and attention over them.

A package's model is written for a cache of all tokens. An adapter swaps two things: what makes the cache, for
:meth:`Keep.caches`, and what attends in a layer, for :meth:`LayerCache.attend`. It reads public names of kvjax alone.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import kvjax
from kvjax import Context, KVCache, Policy

_UNFIT = "{!r} {}, which a decoder of another package does not hand over; give a policy such as 'h2o+caote' or 'tova'."


@dataclasses.dataclass(frozen=True)
class LayerSizes:
    """The sizes of one layer of attention; ``window`` is that of a sliding window, None for a layer that sees all."""

    query_heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None


@dataclasses.dataclass(frozen=True)
class Keep:
    """Holds what a decoder keeps: the policy, the tokens per head, and the tokens that come in at once.

    Example:
        >>> from models.outside.keep import Keep, LayerSizes
        >>> keep = Keep.of("h2o+caote", budget=24, block=8)
        >>> caches = keep.caches([LayerSizes(4, 2, 16)] * 2, batch=1, dtype="float32")
        >>> caches[0].cache.key.shape
        (1, 2, 32, 16)
    """

    policy: Policy
    budget: int
    block: int

    @classmethod
    def of(cls, policy: Policy | str, budget: int, block: int = 128) -> Keep:
        """Check a policy, a budget and a block.

        Raises:
            ValueError: if the policy protects more than the budget or observes more than a block; or if it reads what
                no adapter hands over: an uneven allocation, repeated text, a network, or weights or rotations of the
                model.
        """
        parsed = kvjax.parse(policy) if isinstance(policy, str) else policy
        needs = parsed.needs
        for reason, found in {
            "lets heads compete for slots": not parsed.allocation.even,
            "has the model repeat its text": parsed.repeats,
            "reads what a small network predicts": bool(needs.predicted),
            "reads the output projection": bool(needs.projections),
            "reads rotary frequencies": needs.rotary or parsed.positions != "absolute",
        }.items():
            if found:
                raise ValueError(_UNFIT.format(parsed.name, reason))
        kvjax.check_budget(parsed, budget)
        kvjax.check_block(parsed, block)
        return cls(parsed, budget, block)

    @property
    def every(self) -> int:
        """Return how many decode steps come before an eviction: as many as the policy observes, at least 1."""
        return max(self.policy.needs.window, 1)

    def caches(self, layers: Sequence[LayerSizes], *, batch: int, dtype: Any) -> list[LayerCache]:
        """Make the empty cache of each layer, of ``budget + block`` slots per head."""
        room, made = self.block + self.every - 1, []
        for number, own in enumerate(layers):
            sizes: Any = dict(kv_heads=own.kv_heads, query_heads=own.query_heads, head_dim=own.head_dim, batch=batch)
            given: Any = dict(budget=self.budget, block=room, windows=(own.window,), dtype=jnp.dtype(dtype).name)
            cache = kvjax.empty_cache(self.policy, **given, **sizes)
            made.append(LayerCache(cache, jnp.zeros((batch, 0), jnp.int32), number, self, own.window))
        return made

    def run(
        self,
        feed: Callable[[Any, Any], tuple[Any, Any]],
        caches: Any,
        position: Int[Array, "B T"],
        inputs: Any,
        last: bool = False,
    ) -> tuple[Any, Any]:
        """Feed tokens to a model in blocks, so that a prompt of any length takes the memory of one block.

        As in :func:`models.prefill`, a row's last block is whole and its first one may not be. Blocks of padding alone
        are left out.

        Args:
            feed: takes the caches and a block of the inputs, and returns the caches and what the model says of each
                token, a tree of arrays [B, m, ...].
            caches: :class:`LayerCache` of all layers, in any tree.
            position: of the tokens, -1 for padding before or behind a row's tokens.
            inputs: a tree of arrays [B, T, ...].
            last: whether to return what the model says of each row's last token alone.

        Returns:
            The caches, and what the model says, [B, T, ...], or [B, 1, ...] of the last tokens.
        """
        (B, T), m, none = position.shape, self.block, position[:, :0]

        def step(caches: Any, position: Array, inputs: Any) -> tuple[Any, Any]:
            caches, said = feed(at(caches, position), inputs)
            return at(caches, none), said

        if T == 1:
            return step(caches, position, inputs)
        behind = jnp.argmax(position[:, ::-1] >= 0, axis=1)[:, None]  # the padding behind each row's tokens
        count = -(-T // m)
        left = count * m - T

        def shifted(x: Array, by: Array) -> Array:
            place = (jnp.arange(T) + by) % T
            return jnp.take_along_axis(x, place.reshape(B, T, *(1,) * (x.ndim - 2)), axis=1)

        def split(x: Array, fill: int = 0) -> Array:
            rest = [(0, 0), (left, 0)] + [(0, 0)] * (x.ndim - 2)
            return jnp.pad(shifted(x, -behind), rest, constant_values=fill).reshape(B, count, m, *x.shape[2:])

        positions, blocks, caches = split(position, -1), jax.tree.map(split, inputs), at(caches, none)

        def body(number: Array, carry: Any) -> Any:
            caches, said = carry
            own = jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, number, 1, keepdims=False), (positions, blocks)
            )
            caches, new = step(caches, *own)
            if last:
                return caches, jax.tree.map(lambda x: x[:, -1:], new)
            put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=number, axis=1)
            return caches, jax.tree.map(lambda all, own: put(all, own), said, new)

        shapes = jax.eval_shape(step, caches, positions[:, 0], jax.tree.map(lambda x: x[:, 0], blocks))[1]
        kept = (1,) if last else (count, m)
        said = jax.tree.map(lambda x: jnp.zeros((B, *kept, *x.shape[2:]), x.dtype), shapes)
        first = jnp.argmax(jnp.any(positions >= 0, axis=(0, 2)))
        caches, said = jax.lax.fori_loop(first, count, body, (caches, said))
        if last:
            return caches, said
        return caches, jax.tree.map(lambda x: shifted(x.reshape(B, -1, *x.shape[3:])[:, left:], behind), said)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("cache", "position"), meta_fields=("number", "keep", "window")
)
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Holds one layer's cache, and the positions of the block that it is about to see, [B, T], -1 for padding."""

    cache: KVCache
    position: Int[Array, "B T"]
    number: int
    keep: Keep
    window: int | None

    def attend(
        self,
        query: Float[Array, "B T N D"],
        key: Float[Array, "B T K D"],
        value: Float[Array, "B T K D"],
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> tuple[Float[Array, "B T N D"], LayerCache]:
        """Attend over the cache and the block, then evict; ``scale`` and ``soft_cap`` are those of the logits."""
        keep, every, decodes = self.keep, self.keep.every, self.position.shape[1] == 1
        slots, budget = keep.budget + keep.block + every - 1, keep.budget
        if decodes and every > 1:  # a method that observes a window waits until it has as many queries
            full = jnp.max(self.cache.num_live, axis=1) + 1 >= keep.budget + every
            budget = jnp.where(full, keep.budget, slots + 1)  # type: ignore[assignment]
        context = Context(
            layer=self.number, sliding_window=self.window, scale=scale, soft_cap=soft_cap, slots=slots,
            excess=1 if decodes and every == 1 else None,
        )  # fmt: skip
        out, cache = kvjax.attend(
            self.cache, query, key, value, self.position, policy=keep.policy, budget=budget, context=context
        )
        return out, dataclasses.replace(self, cache=cache)


def at(caches: Any, position: Int[Array, "B T"]) -> Any:
    """Return caches that are about to see a block at these positions."""
    return jax.tree.map(
        lambda own: dataclasses.replace(own, position=position), caches, is_leaf=lambda x: isinstance(x, LayerCache)
    )


def nbytes(caches: Any) -> int:
    """Return the bytes of all arrays of a package's cache, or of ours."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))


def has_not_moved(package: str, tried: str, names: dict[str, Any]) -> None:
    """Check that a package still has what its adapter replaces.

    Args:
        package: the distribution's name.
        tried: the version that the adapter was tried with.
        names: what is replaced, None where it was not found.

    Raises:
        RuntimeError: if something was not found; the sentence names the version that is installed.
    """
    missing = [name for name, found in names.items() if found is None]
    if missing:
        version = importlib.metadata.version(package)
        raise RuntimeError(
            f"{package} {version} has no {', '.join(missing)}; this adapter was tried with {package} {tried}: "
            f"install that version."
        )
