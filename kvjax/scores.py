"""The links of policies: base scores from the papers, and what may follow them."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt

from kvjax.eviction_error import score as eviction_error
from kvjax.policy import Observation, Policy, Protection, Scores, base_score, no_state, register, written


def _name(make: Any, **arguments: Any) -> str:
    parameters = inspect.signature(make.__wrapped__).parameters
    return written(make.__name__, {name: parameter.default for name, parameter in parameters.items()}, **arguments)


@register
def h2o(*, accumulate: bool = True) -> Policy:
    """Heavy hitters: the attention that a token has received, summed over queries (arXiv 2306.14048).

    Its authors also keep the newest half of the budget: ``h2o+protect(recent=0.5)``.

    Args:
        accumulate: sum over all queries so far; False sums over the current block only, as CAOTE's section 2 writes.

    Example:
        >>> import kvjax
        >>> kvjax.h2o().statistics
        frozenset({'sum'})
    """
    name = _name(h2o, accumulate=accumulate)
    if not accumulate:
        return base_score(name, lambda o: o.columns.sum, statistics=("sum",))

    def init(B: int, K: int, G: int, S: int) -> Array:
        return jnp.zeros((B, K, S, G), jnp.float32)

    def update(_: Scores, state: Array, o: Observation) -> tuple[Scores, Array]:
        state = state + jnp.moveaxis(o.columns.sum, 2, 3)
        return jnp.moveaxis(state, 3, 2), state

    return Policy(name, init, update, frozenset({"sum"}), base=True, nonnegative=True)


@register
def tova(*, heads: Literal["group", "layer"] = "group") -> Policy:
    """The last query's attention (arXiv 2401.06104).

    Args:
        heads: who shares one set of tokens: each query group (as CAOTE uses it), or all heads of a "layer" (as TOVA's
            authors do). With links behind it, the whole chain's scores are averaged over the layer.

    Example:
        >>> import kvjax
        >>> str(kvjax.tova(heads="layer"))
        "tova(heads='layer')"
    """
    if heads not in ("group", "layer"):
        raise ValueError(f"tova: heads is {heads!r}; there are 'group' and 'layer'.")
    name = _name(tova, heads=heads)
    return Policy(
        name,
        no_state,
        lambda _, state, o: (o.columns.last, state),
        frozenset({"last"}),
        base=True,
        nonnegative=True,
        heads=heads,
    )


@register
def snapkv(*, window: int = 32, kernel: int = 5, pooling: Literal["avg", "max"] = "avg") -> Policy:
    """The last queries' mean attention, pooled over neighbouring tokens; their own tokens stay (arXiv 2404.14469).

    Args:
        window: how many of the block's last queries observe; in decode, where a block is one query, that one.
        kernel: width of the pooling over neighbours in position order among the live tokens, an odd number.
        pooling: "avg" or "max".

    Example:
        >>> import kvjax
        >>> kvjax.snapkv(window=16).protections
        (Protection(sinks=0, recent=16),)
    """
    _check_pooling("snapkv", kernel, pooling)
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"snapkv: window is {window!r}; give the number of queries that observe, an int from 1.")

    def score(o: Observation) -> Scores:
        observed = o.columns.window_mean
        own = (o.position >= (o.next_position - window)[:, None, None])[:, :, None]
        pooled = _pool(jnp.where(own, 0, observed), o, kernel, pooling)
        return jnp.where(own, observed, pooled)

    name = _name(snapkv, window=window, kernel=kernel, pooling=pooling)
    return base_score(name, score, statistics=("window_mean",), window=window, protection=Protection(recent=window))


@register
def streaming(*, sinks: int = 4) -> Policy:
    """StreamingLLM: the first tokens and the newest ones (arXiv 2309.17453). Positions stay absolute here.

    Example:
        >>> import kvjax
        >>> str(kvjax.streaming(sinks=8))
        'streaming(sinks=8)'
    """
    _check_protected("streaming", "sinks", sinks)
    name = _name(streaming, sinks=sinks)
    return base_score(name, lambda o: o.position[:, :, None].astype(jnp.float32), protection=Protection(sinks=sinks))


@register
def key_norm() -> Policy:
    """Minus the norm of the key: small keys draw attention (arXiv 2406.11430).

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("key_norm+normalise+caote"))
        'key_norm+normalise+caote'
    """
    return base_score(
        _name(key_norm),
        lambda o: -jnp.linalg.norm(o.key.astype(jnp.float32), axis=-1)[:, :, None],
        nonnegative=False,
    )


@register
def random(*, seed: int = 0) -> Policy:
    """A number drawn once for each token, layer and head: what stays is a uniform sample of the tokens.

    Example:
        >>> import kvjax
        >>> str(kvjax.random(seed=1))
        'random(seed=1)'
    """

    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"random: seed is {seed!r}; give an int in [0, 2**32).")

    def score(o: Observation) -> Scores:
        head = jnp.arange(o.position.shape[1], dtype=jnp.uint32)[None, :, None]
        layer = jnp.asarray(o.layer, jnp.uint32)
        mixed = _mix(jnp.uint32(seed) ^ _mix(layer ^ _mix(head ^ _mix(o.position.astype(jnp.uint32)))))
        return (mixed >> 8).astype(jnp.float32)[:, :, None] / 2**24

    return base_score(_name(random, seed=seed), score)


@register
def caote(*, norm: Literal[1, 2, "inf"] = 2, group: Literal["exact", "mean"] = "exact", fast: bool = False) -> Policy:
    """CAOTE over any non-negative score: what losing a token does to the attention output (arXiv 2504.14051, eq. 20).

    The scores before it, normalised to sum to 1 over the live slots, take the place of attention weights.

    Args:
        norm: the norm of the change, 1, 2 or "inf".
        group: how the query heads of a KV head are joined; see :func:`kvjax.score`.
        fast: FastCAOTE; the link ``fast_caote`` is this with True.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("h2o+caote(group='mean')"))
        "h2o+caote(group='mean')"
    """
    if norm not in (1, 2, "inf") or group not in ("exact", "mean"):
        raise ValueError(f"caote: norm is {norm!r} and group {group!r}; norms are 1, 2, 'inf', groups 'exact', 'mean'.")
    name = _name(fast_caote, norm=norm, group=group) if fast else _name(caote, norm=norm, group=group, fast=fast)

    def update(scores: Scores, state: Any, o: Observation) -> tuple[Scores, Any]:
        weights = _shares(scores, o)
        joined = eviction_error(weights, o.value, fast=fast, norm=norm, group=group, mask=o.live)
        return joined[:, :, None], state

    return Policy(name, no_state, update, needs_nonnegative=True, nonnegative=True)


@register
def fast_caote(*, norm: Literal[1, 2, "inf"] = 2, group: Literal["exact", "mean"] = "exact") -> Policy:
    """FastCAOTE: CAOTE with the mean of the live values in place of the attention output (arXiv 2504.14051, eq. 22).

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("tova+fast_caote"))
        'tova+fast_caote'
    """
    return caote(norm=norm, group=group, fast=True)


@register
def normalise() -> Policy:
    """Scores that sum to 1 over each query head's live slots (CAOTE, eq. 21), shifted first where one is negative.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("key_norm+normalise"))
        'key_norm+normalise'
    """

    def update(scores: Scores, state: Any, o: Observation) -> tuple[Scores, Any]:
        lowest = jnp.min(jnp.where(o.live[:, :, None], scores, jnp.inf), axis=-1, keepdims=True)
        return _shares(scores - jnp.minimum(lowest, 0), o), state

    return Policy(_name(normalise), no_state, update, nonnegative=True)


@register
def pool(*, kernel: int = 5, pooling: Literal["avg", "max"] = "avg") -> Policy:
    """Pools scores over neighbours in position order among the live tokens; zeros stand beyond the ends.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("h2o+pool(kernel=7)"))
        'h2o+pool(kernel=7)'
    """
    _check_pooling("pool", kernel, pooling)
    name = _name(pool, kernel=kernel, pooling=pooling)
    return Policy(name, no_state, lambda scores, state, o: (_pool(scores, o, kernel, pooling), state))


@register
def protect(*, sinks: int | float = 0, recent: int | float = 0) -> Policy:
    """What always stays: the first ``sinks`` and the last ``recent`` tokens.

    Args:
        sinks: a number of tokens (int), or a share of the budget (float in [0, 1]).
        recent: likewise.

    Example:
        >>> import kvjax
        >>> kvjax.protect(sinks=4, recent=0.5).protections[0].counts(64)
        (4, 32)
    """
    for what, amount in (("sinks", sinks), ("recent", recent)):
        _check_protected("protect", what, amount)
    name = _name(protect, sinks=sinks, recent=recent)
    return Policy(name, no_state, lambda scores, state, _: (scores, state), protections=(Protection(sinks, recent),))


def _shares(scores: Scores, o: Observation) -> Scores:
    """Scores divided by their sum over the live slots; 0 in free ones."""
    scores = jnp.where(o.live[:, :, None], scores, 0)
    total = jnp.sum(scores, axis=-1, keepdims=True)
    return scores / jnp.where(total > 0, total, 1)


def _pool(scores: Scores, o: Observation, kernel: int, pooling: str) -> Scores:
    """Pools in the order of positions. Beyond the ends stand zeros (avg) or nothing (max), as in torch."""
    order = jnp.argsort(jnp.where(o.live, o.position, jnp.iinfo(jnp.int32).max), axis=-1)[:, :, None]  # [B, K, 1, S]
    reduce, nothing = (jax.lax.add, 0.0) if pooling == "avg" else (jax.lax.max, -jnp.inf)
    scores = jnp.where(o.live[:, :, None], scores, nothing)
    in_order = jnp.take_along_axis(scores, order, axis=-1)  # free slots come last
    half = kernel // 2
    padding = ((0, 0), (0, 0), (0, 0), (half, half))
    start = jnp.asarray(nothing, in_order.dtype)
    pooled = jax.lax.reduce_window(in_order, start, reduce, (1, 1, 1, kernel), (1, 1, 1, 1), padding)
    pooled = pooled / kernel if pooling == "avg" else pooled
    return jnp.take_along_axis(pooled, jnp.argsort(order, axis=-1), axis=-1)


def _check_pooling(name: str, kernel: int, pooling: str) -> None:
    if not isinstance(kernel, int) or kernel < 1 or kernel % 2 == 0:
        raise ValueError(
            f"{name}: kernel is {kernel!r}; give an odd number from 1, so that a token lies in the middle."
        )
    if pooling not in ("avg", "max"):
        raise ValueError(f"{name}: pooling is {pooling!r}; there are 'avg' and 'max'.")


def _check_protected(name: str, what: str, amount: int | float) -> None:
    if not isinstance(amount, (int, float)) or not amount >= 0 or (isinstance(amount, float) and amount > 1):
        raise ValueError(
            f"{name}: {what} is {amount!r}; give a count (an int from 0) or a share of the budget in [0, 1]."
        )


def _mix(x: UInt[Array, "*shape"]) -> UInt[Array, "*shape"]:
    """A bijective hash of uint32 (the finaliser of MurmurHash3): the same on every backend, for any slot order."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
