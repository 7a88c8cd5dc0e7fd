"""The likelihood of the choices of a sample after its prompt was compressed."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvjax
import models
from evals.answering import Feed, batches, padded, slots_of
from evals.loglikelihood import log_probabilities, longest_first, width_in_blocks
from evals.run_settings import Setting
from kvjax._src.split_cache import ModelCache
from models import hosts
from papers.choices.tasks import Sample


class Behind(NamedTuple):
    """The log-probability of each choice, summed over its tokens, in nats; and the bytes of the prompt's cache after
    compression and at its largest.
    """

    log_probability: Float[np.ndarray, "n"]
    cache_bytes: int
    peak_cache_bytes: int


def likelihoods(
    model: models.Decoder, samples: Sequence[Sample], settings: Sequence[Setting], rows: Sequence[int], feed: Feed
) -> Iterator[tuple[Setting, int, Behind]]:
    """Yield the likelihood of each sample's choices, with its setting and row; a prompt is read once for all of them.

    Settings that evict once share the prompt's prefill. Nothing is evicted while a choice is read, as for the tokens
    that :func:`evals.loglikelihood.predict` holds back.

    Args:
        samples: of one task, so all have equally many choices.
        settings: policies and budgets, of one moment, whose question is known or unknown alike.
        rows: the indices of the samples that are wanted.
        feed: the block, the prompts of a batch, and what the policies need besides the model.
    """
    longest = max(len(choice) for row in rows for choice in samples[row].choices)
    width = max(len(sample.tokens) for sample in samples)  # of all, so that calls share compiled programs
    full = [setting for setting in settings if setting.policy == "full"]
    # The full cache reserves slots for the choices, and has no use for a question that is held back.
    for together in (full[:1], [setting for setting in settings if setting not in full]):
        if not together:
            continue
        whole = together == full[:1]
        held_back = settings[0].question == "unknown" and not whole
        asked = [len(samples[row].tokens) - samples[row].context_end if held_back else 0 for row in rows]
        fed_width = width_in_blocks(width, min(asked), feed.block, model.config.max_positions - longest)
        for places, filled in batches(model, longest_first([len(samples[row].tokens) for row in rows]), feed.batch):
            fed = [samples[rows[place]] for place in filled]
            each = models.prefill_each(
                model, padded([sample.tokens for sample in fed], fed_width),
                lengths=np.array([len(sample.tokens) for sample in fed]),
                policies=[(feed.aids.policy(setting), setting.budget) for setting in together],
                question=np.array([asked[place] for place in filled]) if held_back else None,
                networks=feed.aids.networks, cache_dtype=settings[0].cache_dtype, block=feed.block,
                when=settings[0].when, reserve=longest if whole else 0,
            )  # fmt: skip
            for setting, (cache, last) in zip(together, each, strict=True):
                ends = [choice for sample in fed for choice in sample.choices]
                sums = _sums(model, cache, last, padded(ends, longest), [len(end) for end in ends], feed.block)
                size, slots = cache.nbytes // len(fed), slots_of(cache)
                once = whole or setting.moments[0] == "prompt"
                most = max(slots, math.prod(cache.heads_shape) * width) if once else slots
                for own, place in zip(sums.reshape(len(fed), -1), places, strict=False):
                    for one in full if whole else [setting]:
                        yield one, rows[place], Behind(own, size, size * most // slots)


def _sums(
    model: models.Decoder,
    cache: ModelCache,
    last: Float[Array, "B V"],
    following: Int[np.ndarray, "Bn m"],
    counted: Sequence[int],
    block: int,
) -> Float[np.ndarray, "Bn"]:
    """Return the log-probability of each row's endings after a cache whose next logits are ``last``."""
    count, lengths = len(following) // len(last), np.array(counted)
    parts = [_first(last, following[:, :1], count)]
    if following.shape[1] > 1:
        _, hidden = models.hidden_states(
            model, following, lengths=lengths, cache=kvjax.repeat(cache, count), block=block
        )
        parts.append(log_probabilities(model, hidden[:, :-1], following[:, 1:], None)[0])
    told = np.concatenate([hosts.fetched(part).astype(np.float64) for part in parts], axis=1)
    return np.where(np.arange(told.shape[1]) < lengths[:, None], told, 0).sum(axis=1)


@functools.partial(jax.jit, static_argnames="count")
def _first(last: Float[Array, "B V"], following: Int[Array, "Bn 1"], count: int) -> Float[Array, "Bn 1"]:
    return jnp.take_along_axis(jnp.repeat(jax.nn.log_softmax(last), count, axis=0), following, axis=1)
