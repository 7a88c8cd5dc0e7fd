"""MomentKV (arXiv 2606.01563): moments of the evicted tokens, which say what may follow them and stand in for them.

Each head keeps the number of the tokens that left it, the means of their keys and values, and how values vary with
keys. For a query they give what attention to those tokens would have returned, to the first order in the logits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax._src.cache import HeadState, KVCache, floats_of, map_parts, part_of_kind
from kvjax._src.observation import Context, Observation

QUERIES = 16  # whose logits over all slots are held at once
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
    key, value = (jnp.where(o.live[..., None], x.astype(jnp.float32), 0) for x in (o.key, o.value))
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
    evicted = jax.lax.stop_gradient(part_of_kind(here.state, Evicted))
    if evicted is None:
        return out
    given = evicted, floats_of(here), query, position, context
    return jax.lax.cond(jnp.any(evicted.number.value > 0), lambda: _corrected(out, *given), lambda: out)


def _corrected(
    out: Float[Array, "B T N D"],
    evicted: Evicted,
    here: KVCache,
    query: Float[Array, "B T N D"],
    position: Int[Array, "B T"],
    context: Context,
) -> Float[Array, "B T N D"]:
    (B, T, N, D), K = query.shape, here.position.shape[1]
    live = here.live[:, :, None]
    key = jnp.where(here.live[..., None], here.key.astype(jnp.float32), 0)
    bias = 0 if here.bias is None else here.bias[:, :, None]
    count = jnp.log(evicted.number.value)[..., None]

    def of_query(row: tuple[Array, Array, Array]) -> Array:
        query, at, out = row  # [B, K, G, D], [B], [B, K, G, D]
        seen = live & (here.position <= at[:, None, None])[:, :, None]
        logits = jnp.where(seen, einsum("bkgd,bksd->bkgs", query, key) + bias, -jnp.inf)
        mass = jax.nn.logsumexp(logits, axis=-1)
        lost = count + einsum("bkgd,bkd->bkg", query, evicted.key.value)
        share = jnp.where(jnp.any(seen, axis=-1), jax.nn.sigmoid(lost - mass), 0)[..., None]
        return out + share * (evicted.expected(query) - out)

    query = query.astype(jnp.float32) * (D**-0.5 if context.scale is None else context.scale)
    rows = (jnp.moveaxis(x.astype(jnp.float32).reshape(B, T, K, N // K, D), 1, 0) for x in (query, out))
    query, rest = rows
    new = jax.lax.map(of_query, (query, position.T, rest), batch_size=min(QUERIES, T))
    return jnp.moveaxis(new, 0, 1).reshape(out.shape).astype(out.dtype)
