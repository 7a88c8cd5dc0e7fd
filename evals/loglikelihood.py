"""The likelihood of each token of a text, when the cache is compressed or only a part of it is read.

The logits of a whole text would be about a hundred times larger than the model's hidden states. So they are computed
from the hidden states in parts of about 64 MB, however long the text is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import kvjax
import models
from evals.answering import batches, padded
from evals.simulator import Simulation
from kvjax.chains import policy_of
from kvjax.insertion import Cache
from kvjax.policy import Policy
from kvjax.schedule import moments
from models import hosts
from models.options import EachSettings, Options, PromptSettings

BLOCK = Options().block
LOGITS_BYTES = 2**26


class TokenPredictions(NamedTuple):
    """For each token of a sequence but the first: its log-probability, and whether it was the most likely one.

    ``divergence`` is the Kullback-Leibler divergence of the model's distribution from the reference's, in nats; None
    without a reference. ``hidden`` are the hidden states of the distributions, if they were asked for; they can serve
    as the reference of other calls.
    """

    log_probability: Float[np.ndarray, "T"]
    greedy: Bool[np.ndarray, "T"]
    divergence: Float[np.ndarray, "T"] | None = None
    hidden: Float[np.ndarray, "T E"] | None = None


def predict(
    model: models.Decoder,
    sequences: Sequence[Sequence[int]],
    held_back: Sequence[int] | None = None,
    *,
    batch: int = 8,
    reference: Sequence[Float[np.ndarray, "T E"]] | None = None,
    keep_hidden: bool = False,
    on_row: Callable[[int, TokenPredictions], Any] | None = None,
    **settings: Unpack[PromptSettings],
) -> list[TokenPredictions]:
    """Predict each token of sequences from the tokens before it that a policy has kept.

    Args:
        sequences: tokens, at least two per sequence.
        held_back: the number of last tokens of each sequence that are fed after the rest was compressed; nothing is
            evicted after them.
        batch: the number of sequences per batch.
        reference: the ``hidden`` of each sequence under another setting, from which divergences are computed.
        keep_hidden: whether to return the hidden states.
        on_row: called with a sequence's number and figures as soon as they are known.
        settings: of :func:`models.prefill`.

    Raises:
        ValueError: a sequence has fewer than two tokens, or :func:`models.prefill` fails.
    """
    whole = settings.get("policy") in (None, "full")
    asked = [0] * len(sequences) if held_back is None or whole else list(held_back)

    def fed_through(fed: list[int]) -> tuple[np.ndarray, Array]:
        # The last token is predicted and not fed; the first one held back is predicted by the context's last token.
        lengths = np.array([len(sequences[row]) - 1 for row in fed])
        questions = np.array([min(max(asked[row] - 1, 0), len(sequences[row]) - 2) for row in fed])
        block = settings.get("block", BLOCK)
        width = _few(int(lengths.max()), int(questions.min()), block, model.config.max_positions)
        tokens, question = padded([sequences[row] for row in fed], width + 1), questions if questions.any() else None
        _, hidden = models.hidden_states(model, tokens[:, :-1], lengths=lengths, question=question, **settings)
        return tokens, hidden

    return _collect(model, sequences, batch, fed_through, reference, keep_hidden, on_row)


def simulate(
    model: models.Decoder,
    sequences: Sequence[Sequence[int]],
    simulation: Simulation,
    *,
    block: int = 128,
    batch: int = 8,
    reference: Sequence[Float[np.ndarray, "T E"]] | None = None,
    keep_hidden: bool = False,
    on_row: Callable[[int, TokenPredictions], Any] | None = None,
) -> list[TokenPredictions]:
    """Predict each token when every row reads only what a selection keeps (see evals/selections.py).

    Args:
        sequences: tokens, at least two per sequence.
        simulation: the selection, its sparsity, and what it reads.
        block: sequences are padded to a multiple of it, so that few shapes are compiled.
        batch, reference, keep_hidden, on_row: see :func:`predict`.

    Raises:
        ValueError: a sequence has fewer than two tokens.
    """

    def fed_through(fed: list[int]) -> tuple[np.ndarray, Array]:
        longest = max(len(sequences[row]) for row in fed)
        tokens = padded([sequences[row] for row in fed], -(-longest // block) * block)
        return tokens, simulation.hidden_states(model, tokens)[:, :-1]

    return _collect(model, sequences, batch, fed_through, reference, keep_hidden, on_row)


class Behind(NamedTuple):
    """The log-probability of each ending of a prompt, summed over its tokens, in nats; and the bytes of the prompt's
    cache after compression and at its largest.
    """

    log_probability: Float[np.ndarray, "n"]
    cache_bytes: int
    peak_cache_bytes: int


def endings(
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
    that :func:`predict` holds back.

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
        fed_width = _few(width, min(asked, default=0), block, room)
        for rows, fed in batches(model, _longest_first(sizes), batch) if together else ():
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
                sums = _ending_log_probabilities(model, cache, last, following, counted, count, block)
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


def _ending_log_probabilities(
    model: models.Decoder,
    cache: Cache,
    last: Float[Array, "B V"],
    following: Int[np.ndarray, "Bn m"],
    counted: Int[np.ndarray, "Bn"],
    count: int,
    block: int,
) -> Float[np.ndarray, "B n"]:
    """Return the log-probability of each row's ``count`` endings after a cache whose next logits are ``last``."""
    parts = [_first_counted(last, following[:, :1], count)]
    longest = following.shape[1]
    if longest > 1:
        _, hidden = models.hidden_states(
            model, following, lengths=counted, cache=kvjax.repeat(cache, count), block=block
        )
        parts.append(log_probabilities(model, hidden[:, :-1], following[:, 1:], None)[0])
    told = np.concatenate([hosts.fetched(part).astype(np.float64) for part in parts], axis=1)
    return np.where(np.arange(longest) < counted[:, None], told, 0).sum(axis=1).reshape(-1, count)


def _collect(
    model: models.Decoder,
    sequences: Sequence[Sequence[int]],
    batch: int,
    fed_through: Callable[[list[int]], tuple[Int[np.ndarray, "B T1"], Float[Array, "B T E"]]],
    reference: Sequence[Float[np.ndarray, "T E"]] | None,
    keep_hidden: bool,
    on_row: Callable[[int, TokenPredictions], Any] | None,
) -> list[TokenPredictions]:
    """Return the predictions of all sequences, batch by batch.

    Args:
        fed_through: returns the tokens of some sequences, and the hidden states before each of them but the first.
    """
    if any(len(sequence) < 2 for sequence in sequences):
        raise ValueError("a sequence has fewer than 2 tokens, so it has nothing to predict; give longer texts.")
    if reference is not None and [len(states) + 1 for states in reference] != [len(row) for row in sequences]:
        raise ValueError(
            "the reference is of other sequences; give the hidden states of these sequences in their order."
        )
    collected: dict[int, TokenPredictions] = {}
    for rows, fed in batches(model, _longest_first([len(sequence) for sequence in sequences]), batch):
        tokens, hidden = fed_through(fed)
        against = None
        if reference is not None:
            against = np.zeros(hidden.shape, hidden.dtype)
            for place, row in enumerate(fed):
                against[place, : len(reference[row])] = reference[row]
        chosen, greedy, *divergence = map(hosts.fetched, log_probabilities(model, hidden, tokens[:, 1:], against))
        states = hosts.fetched(hidden) if keep_hidden else None
        for place, row in enumerate(rows):
            own = slice(None, len(sequences[row]) - 1)
            collected[row] = TokenPredictions(
                chosen[place, own],
                greedy[place, own],
                divergence[0][place, own] if divergence else None,
                None if states is None else states[place, own].copy(),
            )
            if on_row is not None:
                on_row(row, collected[row])
    return [collected[row] for row in range(len(sequences))]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])


def _few(length: int, held_back: int, block: int, most: int) -> int:
    """Round ``length`` up to whole blocks, as far as the model has positions, so that few widths occur."""
    return max(min(held_back + -(-(length - held_back) // block) * block, most), length)


def log_probabilities(
    model: models.Decoder,
    hidden: Float[Array, "B T E"],
    following: Int[np.ndarray, "B T"],
    reference: Float[np.ndarray, "B T E"] | None,
) -> tuple[Array, ...]:
    """Return each following token's log-probability and greediness [B, T], and with a reference the divergence."""
    B, T, _ = hidden.shape
    row = 4 * model.config.vocab_size * B * (1 if reference is None else 2)
    return _in_parts(model, hidden, following, reference, max(1, min(T, LOGITS_BYTES // row)))


@functools.partial(jax.jit, static_argnames="places")
def _in_parts(
    model: models.Decoder,
    hidden: Float[Array, "B T E"],
    following: Int[Array, "B T"],
    reference: Float[Array, "B T E"] | None,
    places: int,
) -> tuple[Array, ...]:
    B, T, _ = hidden.shape

    def body(index: Array, out: tuple[Array, ...]) -> tuple[Array, ...]:
        start = jnp.minimum(index * places, T - places)  # the last part may overlap the one before
        part: Any = lambda x: jax.lax.dynamic_slice_in_dim(x, start, places, axis=1)  # noqa: E731
        logits = model.logits(part(hidden))
        found: tuple[Array, ...] = _chosen(logits, part(following))
        if reference is not None:
            found += (_divergence(logits, model.logits(part(reference))),)
        return jax.tree.map(lambda all, new: jax.lax.dynamic_update_slice_in_dim(all, new, start, axis=1), out, found)

    wide = jnp.promote_types(hidden.dtype, jnp.float32)  # the dtype of logits
    dtypes = (wide, bool) if reference is None else (wide, bool, wide)
    out = tuple(jnp.zeros((B, T), dtype) for dtype in dtypes)
    return jax.lax.fori_loop(0, -(-T // places), body, out)


@functools.partial(jax.jit, static_argnames="count")
def _first_counted(last: Float[Array, "B V"], following: Int[Array, "Bn 1"], count: int) -> Float[Array, "Bn 1"]:
    return _chosen(jnp.repeat(last, count, axis=0)[:, None], following)[0]


def _chosen(
    logits: Float[Array, "B T V"], following: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    picked = jnp.take_along_axis(logits, following[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == following


def _divergence(logits: Float[Array, "B T V"], reference: Float[Array, "B T V"]) -> Float[Array, "B T"]:
    """Return the Kullback-Leibler divergence of ``logits`` from ``reference``, with rounding below 0 cut off."""
    true, other = jax.nn.log_softmax(reference), jax.nn.log_softmax(logits)
    return jnp.maximum(jnp.sum(jnp.exp(true) * (true - other), axis=-1), 0)
