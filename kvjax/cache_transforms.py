"""Transformations of a whole cache: merging what an eviction took, and leaving out channels of the keys."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.cache import KVCache, as_stored, floats_of
from kvjax.checks import real_array, typed
from kvjax.names import check_number

SMALL = 1e-6  # added to lengths, as in kvpress


@typed
def merge(before: KVCache, after: KVCache, *, similarity: float = 0.0) -> KVCache:
    """Fold the values of the evicted tokens into those of the tokens that stayed (D2O, arXiv 2406.13035).

    An evicted token goes to the token of the same head whose key has the largest cosine ``s`` with its own. That value
    becomes ``(v + sum w u) / (1 + sum w)`` over the values u that go there, with ``w = s |u| / (|u| + |v|)``. Keys stay
    as they are. These are the weights of kvpress' ``MergingPress``; D2O also merges keys, and its threshold for the
    cosine moves with the text.

    An eviction leaves keys and values where they are, so the two caches say which tokens went. Where tokens leave block
    by block, each eviction is followed by its own merge; a value that took others in counts as one token from then on.

    Args:
        before: the cache before :func:`kvjax.evict`.
        after: the same cache after it; no token may have come in or moved since.
        similarity: the smallest cosine at which a token is merged, in [0, 1]; 0 as in kvpress.

    Raises:
        ValueError: if the caches are not plain ones of the same shape.

    Example:
        >>> import jax.numpy as jnp
        >>> import kvjax
        >>> cache = kvjax.KVCache.init(batch=1, kv_heads=1, slots=2, head_dim=1)
        >>> cache = kvjax.insert(cache, jnp.ones((1, 2, 1, 1)), jnp.array([4.0, 4.0]).reshape(1, 2, 1, 1))
        >>> evicted = kvjax.evict(cache, jnp.array([[[0.0, 1.0]]]), budget=1)
        >>> kvjax.merge(cache, evicted).value.round(3).ravel().tolist()
        [4.0, 4.0]
    """
    if before.key.shape != after.key.shape:
        raise ValueError(
            f"the caches {before.key.shape} and {after.key.shape} differ; give one cache before and after an eviction."
        )
    check_number("merge", "similarity", similarity, 0, 1, "a cosine in [0, 1]")
    gone = before.live & ~after.live
    wide = floats_of(after)
    arrays = (wide.key, wide.value, gone, after.live)
    heads = tuple(x.reshape(-1, *x.shape[after.position.ndim - 1 :]) for x in arrays)
    merged = jax.lax.map(lambda head: _merged(similarity, *head), heads)  # [S, S] of one head at a time
    rows = as_stored(after, wide.key, merged.reshape(after.value.shape).astype(wide.value.dtype))
    return dataclasses.replace(after, value=rows["value"], value_scale=rows.get("value_scale"))


@typed
def think(cache: KVCache, query: Float[Array, "*L B T N D"], *, share: float = 0.5) -> KVCache:
    """Set the channels of the keys that matter least to 0, one choice per head (ThinK, arXiv 2407.21018).

    A channel's score is the mean square of the queries in it, over tokens and the group, times that of the live keys.
    As in kvpress no memory is saved: the keys keep their shape. Tokens that come in later keep all their channels, as
    in the paper, and so does everything that is read of keys from then on.

    Args:
        cache: a plain cache, stacked or of one layer, whose positions are absolute.
        query: the last rotated queries; 32 per layer in kvpress.
        share: the share of channels to leave out, in [0, 1], rounded down to a number of channels.

    Raises:
        ValueError: if the cache is paged or turns its keys, or the queries do not fit it.

    Example:
        >>> import jax.numpy as jnp
        >>> import kvjax
        >>> cache = kvjax.KVCache.init(batch=1, kv_heads=1, slots=1, head_dim=2)
        >>> cache = kvjax.insert(cache, jnp.array([[[[1.0, 3.0]]]]), jnp.ones((1, 1, 1, 2)))
        >>> kvjax.think(cache, jnp.ones((1, 1, 2, 2))).key.ravel().tolist()
        [0.0, 3.0]
    """
    if cache.positions != "absolute":
        raise ValueError(
            f"the cache turns its keys to {cache.positions!r} positions, which mixes channels; leave the link "
            "'positions' out."
        )
    check_number("think", "share", share, 0, 1, "a share of the channels in [0, 1]")
    query = real_array("query", query)
    *lead, K, _, D = cache.key.shape
    heads = query.shape[-2] if query.ndim == len(lead) + 3 else 0
    if not heads or heads % K or query.shape[: len(lead)] != tuple(lead) or query.shape[-1] != D:
        raise ValueError(
            f"queries {query.shape} do not fit a cache of keys {cache.key.shape}: expected "
            f"({', '.join(map(str, lead))}, T, N, {D}), with a multiple of {K} heads."
        )
    squares = jnp.mean(jnp.square(query.astype(jnp.float32)), axis=-3).reshape(*lead, K, -1, D).mean(axis=-2)
    live = cache.live[..., None]
    lengths = jnp.sum(jnp.where(live, jnp.square(floats_of(cache).key.astype(jnp.float32)), 0), axis=-2)
    scores = squares * lengths / jnp.maximum(jnp.sum(live, axis=-2), 1)
    place = jnp.argsort(jnp.argsort(scores, axis=-1), axis=-1)
    kept = (place >= int(D * share))[..., None, :]
    return dataclasses.replace(cache, key=jnp.where(kept, cache.key, 0))


def _length(x: Float[Array, "S D"]) -> Float[Array, "S"]:
    squares = jnp.sum(x * x, axis=-1)
    some = squares > 0  # a root has no derivative at 0
    return jnp.where(some, jnp.sqrt(jnp.where(some, squares, 1)), 0)


def _merged(
    similarity: float,
    key: Float[Array, "S D"],
    value: Float[Array, "S D"],
    gone: Bool[Array, "S"],
    live: Bool[Array, "S"],
) -> Float[Array, "S D"]:
    """Return one head's values after the merge."""
    wide = jnp.where((live | gone)[:, None], value.astype(jnp.float32), 0)  # stale slots may hold no numbers
    unit = jnp.where((live | gone)[:, None], key.astype(jnp.float32), 0)
    unit = unit / jnp.maximum(_length(unit)[:, None], SMALL)
    cosine = jnp.where(live, jnp.matmul(unit, unit.T, precision=jax.lax.Precision.HIGHEST), -jnp.inf)
    target, nearest = jnp.argmax(cosine, axis=-1), jnp.max(cosine, axis=-1)
    length = _length(wide)
    weight = jnp.maximum(nearest, 0) * length / (length + length[target] + SMALL)
    weight = jnp.where(gone & (nearest >= similarity), weight, 0)
    total = jnp.zeros_like(weight).at[target].add(weight)
    added = jnp.zeros_like(wide).at[target].add(weight[:, None] * wide)
    return jnp.where((total > 0)[:, None], (wide + added) / (1 + total)[:, None], value)
