"""Selection: which tokens each head reads in a step. Nothing is evicted; the next step may read others.

A row (a query of a head) reads the ``budget`` tokens of the largest importance that it sees, and also the first
``sinks`` tokens (4 in arXiv 2503.07518): at most ``budget + sinks``, fewer where a sink is also among the
best. Free slots and tokens after the query are never read. Ties go to the more recent token, NaN loses to everything.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax._src.cache import nth_true
from kvjax._src.checks import check_count, check_share_or_tokens, check_tokens, plain, real_array
from kvjax._src.topk import keep_mask, share_of

Budget = int | float | Array


def select(
    importance: Float[Array, "B H S"], position: Int[Array, "B K S"], budget: int | float, *, sinks: int = 4
) -> Int[Array, "B H M"]:
    """Return the slots that each head reads in one decode step, as ``kernels_pallas.select_attention`` takes them.

    Args:
        importance: larger = read, on any scale: only its order within a head counts. H is N, where each query head
            reads slots of its own, or K, where a group shares its slots (give the group's maximum, for example).
        position: of the token in each slot, -1 where it is free. A slot that the query must not see, such as one
            outside a sliding window or behind the query, is also given as -1.
        budget: how many tokens a head reads besides the sinks: an int, or a float in (0, 1], the share (to four digits)
            of the tokens that the query sees, rounded up.
        sinks: how many of the first tokens are always read, on top of the budget.

    Returns:
        Slots in ascending order, then -1. M is the most that the budget and the sinks can come to: ``budget + sinks``,
        with a share taken of all S slots, and never more than S.

    Raises:
        ValueError: if shapes do not fit, the budget is below 1 token or a share outside (0, 1], or sinks are negative.

    Example:
        >>> import functools, jax, jax.numpy as jnp
        >>> import kvjax
        >>> importance = jnp.array([[[0.0, 3.0, 1.0, 2.0, 9.0]]])
        >>> position = jnp.array([[[0, 1, 2, 3, -1]]])
        >>> select = functools.partial(kvjax.select, budget=2, sinks=1)
        >>> jax.jit(select)(importance, position).tolist()
        [[[0, 1, 3]]]
    """
    importance = real_array("importance", importance)
    if importance.ndim != 3:
        raise ValueError(f"importance {importance.shape} does not fit: expected [B, H, S], one decode step's.")
    number, sinks = plain(budget), plain(sinks)
    chosen = selected_mask(importance, position, budget, sinks=sinks)
    number = check_share_or_tokens(number) if isinstance(number, str) else number
    if not isinstance(number, int | float):
        raise ValueError(f"the budget is {budget!r}, from which the number of slots M does not follow; give a number.")
    B, H, S = chosen.shape
    size = min(S, sinks + (share_of_tokens(number, S) if isinstance(number, float) else number))
    slots = nth_true(chosen, jnp.broadcast_to(jnp.arange(1, size + 1), (B, H, size)))
    return jnp.where(slots < S, slots, -1)


def selected_mask(
    importance: Float[Array, "B H *T S"],
    position: Int[Array, "B K S"],
    budget: int | float | Int[Array, ""] | Int[Array, "B"] | Int[Array, "B *T"],
    *,
    sinks: int = 4,
    query_position: Int[Array, "B *T"] | None = None,
) -> Bool[Array, "B H *T S"]:
    """Return what :func:`select` reads as a mask: for one step ``[B, H, S]``, for whole sequences ``[B, H, T, S]``.

    On whole sequences each query has the budget of its own step: a share of ``1 - s`` gives row i, which sees i + 1
    tokens, the ``ceil((i + 1)(1 - s))`` of arXiv 2503.07518 at sparsity s.

    Args:
        importance, position, sinks: see :func:`select`.
        budget: see :func:`select`; or an array, with one number for all, per row, or per query.
        query_position: -1 for padding, whose queries read nothing. None, for one step only, if no slot holds a token
            after the query.

    Raises:
        ValueError: as :func:`select`, or if queries of whole sequences have no positions.

    Example:
        >>> import functools, jax, jax.numpy as jnp
        >>> import kvjax
        >>> importance = jnp.zeros((1, 1, 4, 4))  # all equal: the most recent tokens
        >>> every = jnp.arange(4)[None]
        >>> mask = jax.jit(functools.partial(kvjax.selected_mask, budget=0.5, sinks=1))
        >>> mask(importance, every[None], query_position=every)[0, 0].astype(
        ...     int
        ... ).tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]
    """
    importance, position = real_array("importance", importance), real_array("position", position)
    query_position = None if query_position is None else real_array("query_position", query_position)
    budget, sinks = _checked(importance, position, budget, sinks, query_position)
    B, H, *T, S = importance.shape
    K, ones = position.shape[1], (1,) * len(T)
    slot_position = position.reshape(B, K, 1, *ones, S)
    seen = slot_position >= 0
    if query_position is not None:
        seen = seen & (slot_position <= query_position.reshape(B, 1, 1, *T, 1))
    if isinstance(budget, float):
        tokens = jnp.sum(seen, axis=-1, dtype=jnp.int32)
        budget = share_of_tokens(budget, tokens)
    elif not isinstance(budget, int) and budget.ndim:
        budget = budget.reshape(B, 1, 1, *(budget.shape[1:] or ones))
    # Row by row: keep_mask has one budget per batch row, not one per query.
    best = jnp.vectorize(keep_mask, signature="(s),(s),()->(s)")(
        importance.reshape(B, K, H // K, *T, S), jnp.where(seen, slot_position, -1), budget
    )
    return (best | (seen & (slot_position < sinks))).reshape(importance.shape)


def share_of_tokens(share: float, tokens: Any) -> Any:
    """Return ceil(share * tokens), in integers and with the share to four digits, at least 0.0001."""
    return tokens - share_of(min(1 - share, 0.9999), tokens)


def _checked(
    importance: Array, position: Array, budget: Budget, sinks: int, query_position: Array | None
) -> tuple[Budget, int]:
    """Return budget and sinks as Python's numbers, or as arrays of int32, after checks of all arguments."""
    fits = importance.ndim in (3, 4) and position.ndim == 3 and importance.shape[1] % position.shape[1] == 0
    if not fits or importance.shape[:: importance.ndim - 1] != position.shape[::2]:
        given = f"importance {importance.shape} does not fit positions {position.shape}"
        raise ValueError(f"{given}: expected [B, H, S] or [B, H, T, S], and [B, K, S] with H a multiple of K.")
    B, _, *T, _ = importance.shape
    if T and query_position is None:
        raise ValueError(f"importance {importance.shape} has {T[0]} queries; give their positions, query_position=.")
    if query_position is not None and query_position.shape != (B, *T):
        raise ValueError(f"query_position {query_position.shape} does not fit: expected {(B, *T)}, one per query.")
    sinks = check_count("sinks", sinks, 0, "give a number of first tokens, from 0")
    budget = plain(budget)
    if not isinstance(budget, float | str):
        return check_tokens(budget, *dict.fromkeys([(B,), (B, *T)])), sinks
    return check_share_or_tokens(budget), sinks
