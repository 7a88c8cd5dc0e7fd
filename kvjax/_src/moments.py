"""MomentKV (arXiv 2606.01563): moments of the evicted tokens, which say what may follow them and stand in for them.

Each head keeps the number of the tokens that left it, the means of their keys and values, and how values vary with
keys. For a query they give what attention to those tokens would have returned, to the first order in the logits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.paged_attention.pages import table_ends
from kvjax._src.cache import HeadState, KVCache, floats_of, map_parts, part_of_kind
from kvjax._src.observation import Context, Observation
from kvjax._src.paged import PagedCache

QUERIES = 16  # whose logits over a part's slots are held at once
SLOTS = 512  # of a head in pages, which are copied at once
einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Evicted(NamedTuple):
    """Hold a head's moments, a link's state; ``covariance`` is ``sum (v - mean v) (k - mean k)^T``, S~ of the paper."""

    number: HeadState  # [B, K]
    key: HeadState  # [B, K, D], the mean
    value: HeadState  # [B, K, D], the mean
    covariance: HeadState  # [B, K, D, D]

    @staticmethod
    def none(B: int, K: int, G: int, S: int, D: int) -> Evicted:
        """Return the moments of no tokens: all 0."""
        return Evicted(*(HeadState(jnp.zeros((B, K, *rest), jnp.float32)) for rest in ((), (D,), (D,), (D, D))))

    def expected(self, logits: Float[Array, "B K n D"]) -> Float[Array, "B K n D"]:
        """Return the value that attention to the tokens gives vectors which, times a key, are logits (equation 9)."""
        count = jnp.maximum(self.number.value, 1)[..., None, None]
        return self.value.value[:, :, None] + einsum("bkde,bkne->bknd", self.covariance.value / count, logits)


def absorbed(
    state: Any, key: Float[Array, "B K E D"], value: Float[Array, "B K E D"], there: Bool[Array, "B K E"]
) -> Any:
    """Return a policy's state, with the tokens that leave added to the moments.

    The paper adds sums up; means and what is left around them lose no digits when much is alike.
    """
    new = jnp.sum(there, axis=-1).astype(jnp.float32)
    least = jnp.maximum(new, 1)[..., None]

    def of_mean(x: Float[Array, "B K E D"]) -> tuple[Array, Array]:
        mean = jnp.sum(jnp.where(there[..., None], x, 0), axis=2) / least
        return mean, jnp.where(there[..., None], x - mean[:, :, None], 0)

    (key_mean, keys), (value_mean, values) = of_mean(key), of_mean(value)

    def added(old: Evicted) -> Evicted:
        count = old.number.value + new
        share = (new / jnp.maximum(count, 1))[..., None]
        key_step, value_step = share * (key_mean - old.key.value), value_mean - old.value.value
        between = einsum("bkd,bke->bkde", old.number.value[..., None] * value_step, key_step)
        covariance = old.covariance.value + einsum("bksd,bkse->bkde", values, keys) + between
        made = count, old.key.value + key_step, old.value.value + share * value_step, covariance
        return Evicted(*map(HeadState, made))

    return map_parts(added, state, Evicted)


def residuals(state: Evicted, o: Observation) -> Float[Array, "B K S"]:
    """Return how far each token's value is from what the moments expect of its key (equation 10)."""
    key, value = o.live_key, o.live_value
    # The paper's factor, whatever the model's is: queries may come scaled already, but keys do not.
    return jnp.linalg.norm(value - state.expected(key.shape[-1] ** -0.5 * key), axis=-1)


def corrected(
    out: Float[Array, "B T N D"],
    here: KVCache,
    query: Float[Array, "B T N D"],
    position: Int[Array, "B T"],
    context: Context,
) -> Float[Array, "B T N D"]:
    """Return attention's outputs with what the tokens would add that some heads of a layer have evicted (equation 12).

    Their mass is taken to be ``n exp(q . mean k)``, at most what it was. Without a policy that keeps moments, or before
    its first eviction, outputs stay as they are.
    """
    return _corrected(out, here.state, lambda _: floats_of(here), 1, query, position, context)


def corrected_in_pages(
    out: Float[Array, "B T N D"],
    cache: PagedCache,
    layer: int | Int[Array, ""] | None,
    query: Float[Array, "B T N D"],
    position: Int[Array, "B T"],
    context: Context,
) -> Float[Array, "B T N D"]:
    """Return what :func:`corrected` does for a layer of a paged cache, of which it copies one head's pages at a time.

    Heads differ in length, so a head is read in parts up to its own last page.
    """
    if part_of_kind(cache.state, Evicted) is None:
        return out
    table, (B, T, N, D) = cache.layer_table(layer), query.shape
    K, pages = table.shape[1], min(-(-SLOTS // cache.page_size), table.shape[-1])
    table = jnp.pad(table, ((0, 0), (0, 0), (0, -table.shape[-1] % pages)), constant_values=-1)

    def of_head(head: Int[Array, ""], out: Array, query: Array) -> Array:
        own = jax.lax.dynamic_index_in_dim(table, head, 1)  # [B, 1, M]

        def part(number: Int[Array, ""]) -> KVCache:
            held = jax.lax.dynamic_slice_in_dim(own, number * pages, pages, axis=2)
            return floats_of(dataclasses.replace(cache, table=held, state=()).layer())

        ends = -(-jnp.max(table_ends(own)) // pages)
        return _corrected(out, cache.layer(layer, head).state, part, ends, query, position, context)

    heads = (jnp.moveaxis(x.reshape(B, T, K, N // K, D), 2, 0) for x in (out, query))
    new = jax.lax.map(lambda given: of_head(*given), (jnp.arange(K), *heads))
    return jnp.moveaxis(new, 0, 2).reshape(out.shape)


def _corrected(
    out: Float[Array, "B T N D"],
    state: Any,
    part: Callable[[Int[Array, ""]], KVCache],
    parts: int | Int[Array, ""],
    query: Float[Array, "B T N D"],
    position: Int[Array, "B T"],
    context: Context,
) -> Float[Array, "B T N D"]:
    evicted = jax.lax.stop_gradient(part_of_kind(state, Evicted))
    if evicted is None:
        return out
    (B, T, N, D), K = query.shape, evicted.number.value.shape[1]
    logits = (query.astype(jnp.float32) * context.factor(D)).reshape(B, T, K, N // K, D)

    def changed() -> Array:
        mass = _mass(part(jnp.int32(0)), logits, position)
        if not isinstance(parts, int):
            mass = jax.lax.fori_loop(1, parts, lambda i, m: jnp.logaddexp(m, _mass(part(i), logits, position)), mass)
        by_head = jnp.moveaxis(logits, 1, 2).reshape(B, K, -1, D)
        count, rows = jnp.log(evicted.number.value)[:, None, :, None], (B, K, T, N // K, -1)
        lost = count + einsum("btkgd,bkd->btkg", logits, evicted.key.value)
        share = jnp.where(mass > -jnp.inf, jax.nn.sigmoid(lost - mass), 0)[..., None]
        expected = jnp.moveaxis(evicted.expected(by_head).reshape(rows), 2, 1)
        own = out.reshape(logits.shape).astype(jnp.float32)
        return (own + share * (expected - own)).reshape(out.shape).astype(out.dtype)

    return jax.lax.cond(jnp.any(evicted.number.value > 0), changed, lambda: out)


def _mass(here: KVCache, logits: Float[Array, "B T K G D"], position: Int[Array, "B T"]) -> Float[Array, "B T K G"]:
    """Return the logarithm of the attention that some slots get before it is normalised; queries are scaled."""
    live = here.live[:, :, None]
    key = jnp.where(here.live[..., None], here.key.astype(jnp.float32), 0)
    bias = 0 if here.bias is None else here.bias[:, :, None]

    def of_query(row: tuple[Array, Array]) -> Array:
        query, at = row  # [B, K, G, D], [B]
        seen = live & (here.position <= at[:, None, None])[:, :, None]
        return jax.nn.logsumexp(einsum("bkgd,bksd->bkgs", query, key) + bias, axis=-1, where=seen)

    rows = jnp.moveaxis(logits, 1, 0), position.T
    return jnp.moveaxis(jax.lax.map(of_query, rows, batch_size=min(QUERIES, position.shape[1])), 0, 1)
