"""Transformations of a whole cache: merging what an eviction took, and leaving out channels of the keys."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import KVCache, floats_of, with_rows
from kvjax.checks import real_array, typed
from kvjax.merging import Merging, folded, most_similar
from kvjax.names import check_number


@typed
def merge(before: KVCache, after: KVCache, *, similarity: float = 0.0) -> KVCache:
    """Fold the values of the evicted tokens into those of the tokens that stayed (D2O, arXiv 2406.13035).

    An evicted token goes to the token of the same head whose key has the largest cosine ``s`` with its own. That value
    becomes ``(v + sum w u) / (1 + sum w)`` over the values u that go there, with ``w = s |u| / (|u| + |v|)``. Keys stay
    as they are. These are the weights of kvpress' ``MergingPress``; D2O also merges keys, and its threshold for the
    cosine moves with the text.

    An eviction leaves keys and values where they are, so the two caches say which tokens went. Where tokens leave block
    by block, each eviction is followed by its own merge; a value that took others in counts as one token from then on.
    A policy does both at once with the link ``merge``: ``snapkv+merge``. The cost is O(S^2) per head.

    Args:
        before: the cache before :func:`kvjax.evict`.
        after: the same cache after it; no token may have come in or moved since.
        similarity: the smallest cosine at which a token is merged, in [0, 1]; 0 as in kvpress.

    Raises:
        ValueError: if the caches are not plain ones of the same shape.

    Example:
        >>> import jax, numpy as np
        >>> import kvjax
        >>> cache = kvjax.KVCache.init(batch=1, kv_heads=1, slots=2, head_dim=1)
        >>> cache = jax.jit(kvjax.insert)(
        ...     cache, np.ones((1, 2, 1, 1)), np.full((1, 2, 1, 1), 4.0)
        ... )
        >>> evicted = jax.jit(kvjax.evict)(cache, np.array([[[0.0, 1.0]]]), budget=1)
        >>> np.asarray(jax.jit(kvjax.merge)(cache, evicted).value).round(
        ...     3
        ... ).ravel().tolist()
        [4.0, 4.0]
    """
    if (before.position.shape, before.head_dim) != (after.position.shape, after.head_dim):
        shapes = " and ".join(str((*cache.position.shape, cache.head_dim)) for cache in (before, after))
        raise ValueError(f"the caches {shapes} differ; give one cache before and after an eviction.")
    check_number("merge", "similarity", similarity, 0, 1, "a cosine in [0, 1]")
    fold = functools.partial(most_similar, similarity=similarity)
    return folded(Merging("merge", fold, (similarity,)), after, before.position, after.position)


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
        >>> import jax, numpy as np
        >>> import kvjax
        >>> cache = kvjax.KVCache.init(batch=1, kv_heads=1, slots=1, head_dim=2)
        >>> cache = jax.jit(kvjax.insert)(
        ...     cache, np.array([[[[1.0, 3.0]]]]), np.ones((1, 1, 1, 2))
        ... )
        >>> np.ravel(jax.jit(kvjax.think)(cache, np.ones((1, 1, 2, 2))).key).tolist()
        [0.0, 3.0]
    """
    if cache.positions != "absolute":
        raise ValueError(
            f"the cache turns its keys to {cache.positions!r} positions, which mixes channels; leave the link "
            "'positions' out."
        )
    check_number("think", "share", share, 0, 1, "a share of the channels in [0, 1]")
    query = real_array("query", query)
    (*lead, K, _), D = cache.position.shape, cache.head_dim
    heads = query.shape[-2] if query.ndim == len(lead) + 3 else 0
    if not heads or heads % K or query.shape[: len(lead)] != tuple(lead) or query.shape[-1] != D:
        raise ValueError(
            f"queries {query.shape} do not fit a cache of keys {(*cache.position.shape, D)}: expected "
            f"({', '.join(map(str, lead))}, T, N, {D}), with a multiple of {K} heads."
        )
    squares = jnp.mean(jnp.square(query.astype(jnp.float32)), axis=-3).reshape(*lead, K, -1, D).mean(axis=-2)
    live = cache.live[..., None]
    lengths = jnp.sum(jnp.where(live, jnp.square(floats_of(cache).key.astype(jnp.float32)), 0), axis=-2)
    scores = squares * lengths / jnp.maximum(jnp.sum(live, axis=-2), 1)
    place = jnp.argsort(jnp.argsort(scores, axis=-1), axis=-1)
    kept = (place >= int(D * share))[..., None, :]
    return dataclasses.replace(cache, rows=with_rows(cache.rows, {"key": jnp.where(kept, cache.key, 0)}))
