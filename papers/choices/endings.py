"""The likelihood of endings of a prompt after the prompt was compressed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvjax
import models
from evals.answering import batches, padded
from evals.loglikelihood import BLOCK, log_probabilities, longest_first, width_in_blocks
from kvjax.chains import policy_of
from kvjax.insertion import Cache
from kvjax.policy import Policy
from kvjax.schedule import moments
from models import hosts
from models.options import EachSettings


class Behind(NamedTuple):
    """The log-probability of each ending of a prompt, summed over its tokens, in nats; and the bytes of the prompt's
    cache after compression and at its largest.
    """

    log_probability: Float[np.ndarray, "n"]
    cache_bytes: int
    peak_cache_bytes: int


def likelihoods(
    model: models.Decoder,
    prompts: Sequence[Sequence[int]],
    ends: Sequence[Sequence[Sequence[int]]],
    held_back: Sequence[int] | None = None,
    *,
    policies: Sequence[tuple[Policy | str | None, int | float | None]] = (("full", None),),
    batch: int = 8,
    width: int = 0,
    on_row: Callable[[int, int, Behind], None] | None = None,
    **settings: Unpack[EachSettings],
) -> list[list[Behind]]:
    """Compute the likelihood of each of a prompt's endings after compression; a prompt is read once for all of them.

    Policies that evict once share the prompt's prefill. Nothing is evicted while an ending is read, as for the tokens
    that :func:`evals.loglikelihood.predict` holds back.

    Args:
        prompts: tokens, at least one per prompt.
        ends: the endings of each prompt: equally many for all prompts, at least one token each.
        held_back: the number of last tokens of each prompt that are fed after the rest was compressed; nothing is
            evicted after them.
        policies: pairs of a policy and its budget; a ratio is one of the prompt.
        batch: the number of prompts per batch.
        width: the least number of prompt tokens that the buffers hold, so that calls share compiled programs.
        on_row: called with the number of a pair, a prompt's number, and its figures as soon as they are known.
        settings: of :func:`models.prefill_each`.

    Returns:
        For each pair, the figures of each prompt.

    Raises:
        ValueError: ``ends`` is not as long as ``prompts``, the prompts differ in their number of endings, or an ending
            is empty.
    """
    counts = {len(row) for row in ends}
    if len(ends) != len(prompts) or len(counts) > 1 or not all(row and all(row) for row in ends):
        raise ValueError(
            f"{len(prompts)} prompts have {len(ends)} lists of {sorted(counts)} endings; give each prompt as many as "
            "the others, each of at least 1 token."
        )
    count, longest = max(counts, default=0), max((len(end) for row in ends for end in row), default=0)
    sizes = [len(prompt) for prompt in prompts]
    width = max(width, *sizes, 0)
    block, when = settings.get("block", BLOCK), settings.get("when") or "prompt"
    room = model.config.max_positions - longest
    found: list[list[Behind | None]] = [[None] * len(prompts) for _ in policies]
    full = [number for number, (policy, _) in enumerate(policies) if policy == "full"]
    # The full cache reserves slots for the endings, and has no use for a question that is held back.
    for together in (full[:1], [number for number in range(len(policies)) if number not in full]):
        asked = [0] * len(prompts) if held_back is None or together == full[:1] else list(held_back)
        fed_width = width_in_blocks(width, min(asked, default=0), block, room)
        for rows, fed in batches(model, longest_first(sizes), batch) if together else ():
            lengths, questions = np.array([sizes[row] for row in fed]), np.array([asked[row] for row in fed])
            each = models.prefill_each(
                model, padded([prompts[row] for row in fed], fed_width), lengths=lengths,
                policies=[policies[number] for number in together],
                question=questions if questions.any() else None,
                **settings | EachSettings(reserve=longest if together == full[:1] else 0),
            )  # fmt: skip
            following = padded([end for row in fed for end in ends[row]], longest)  # [B n, m]
            counted = np.array([len(end) for row in fed for end in ends[row]])
            for number, (cache, last) in zip(together, each, strict=True):
                sums = _sums(model, cache, last, following, counted, count, block)
                size, slots = cache.nbytes // len(fed), cache.position.size
                policy = policies[number][0]
                once = policy == "full" or moments(policy_of(policy), when, 0)[0] == "prompt"
                most = max(slots, math.prod(cache.heads_shape) * width) if once else slots
                for place, row in enumerate(rows):
                    for one in full if number in full else [number]:
                        found[one][row] = behind = Behind(sums[place], size, size * most // slots)
                        if on_row is not None:
                            on_row(one, row, behind)
    return [[behind for behind in rows if behind is not None] for rows in found]


def _sums(
    model: models.Decoder,
    cache: Cache,
    last: Float[Array, "B V"],
    following: Int[np.ndarray, "Bn m"],
    counted: Int[np.ndarray, "Bn"],
    count: int,
    block: int,
) -> Float[np.ndarray, "B n"]:
    """Return the log-probability of each row's ``count`` endings after a cache whose next logits are ``last``."""
    parts = [_first(last, following[:, :1], count)]
    longest = following.shape[1]
    if longest > 1:
        _, hidden = models.hidden_states(
            model, following, lengths=counted, cache=kvjax.repeat(cache, count), block=block
        )
        parts.append(log_probabilities(model, hidden[:, :-1], following[:, 1:], None)[0])
    told = np.concatenate([hosts.fetched(part).astype(np.float64) for part in parts], axis=1)
    return np.where(np.arange(longest) < counted[:, None], told, 0).sum(axis=1).reshape(-1, count)


@functools.partial(jax.jit, static_argnames="count")
def _first(last: Float[Array, "B V"], following: Int[Array, "Bn 1"], count: int) -> Float[Array, "Bn 1"]:
    return jnp.take_along_axis(jnp.repeat(jax.nn.log_softmax(last), count, axis=0), following, axis=1)
