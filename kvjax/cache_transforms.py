"""Merging what an eviction took into what stays, for loops of your own."""

from __future__ import annotations

import functools

from kvjax.cache import KVCache
from kvjax.checks import typed
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
