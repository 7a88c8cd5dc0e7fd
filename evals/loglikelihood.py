"""The likelihood of each token of a text, when the cache is compressed or only a part of it is read.

The logits of a whole text would be about a hundred times larger than the model's hidden states. So they are computed
from the hidden states in parts of about 64 MB, however long the text is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import models
from evals.answering import batches, padded
from evals.simulator import Simulation
from models import hosts
from models.options import Options, PromptSettings

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
        reference: the ``hidden`` of each sequence under another setting, from which divergences are computed.
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
        width = width_in_blocks(int(lengths.max()), int(questions.min()), block, model.config.max_positions)
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

    Sequences are padded to a multiple of ``block``, so that few shapes are compiled. The other arguments, and errors,
    are those of :func:`predict`.
    """

    def fed_through(fed: list[int]) -> tuple[np.ndarray, Array]:
        longest = max(len(sequences[row]) for row in fed)
        tokens = padded([sequences[row] for row in fed], -(-longest // block) * block)
        return tokens, simulation.hidden_states(model, tokens)[:, :-1]

    return _collect(model, sequences, batch, fed_through, reference, keep_hidden, on_row)


def _collect(
    model: models.Decoder,
    sequences: Sequence[Sequence[int]],
    batch: int,
    fed_through: Callable[[list[int]], tuple[Int[np.ndarray, "B T1"], Float[Array, "B T E"]]],
    reference: Sequence[Float[np.ndarray, "T E"]] | None,
    keep_hidden: bool,
    on_row: Callable[[int, TokenPredictions], Any] | None,
) -> list[TokenPredictions]:
    """Return the predictions of all sequences, batch by batch, from their tokens and the hidden states before them."""
    if any(len(sequence) < 2 for sequence in sequences):
        raise ValueError("a sequence has fewer than 2 tokens, so it has nothing to predict; give longer texts.")
    if reference is not None and [len(states) + 1 for states in reference] != [len(row) for row in sequences]:
        raise ValueError("the reference is of other sequences; give these sequences' hidden states, in order.")
    collected: dict[int, TokenPredictions] = {}
    for rows, fed in batches(model, longest_first([len(sequence) for sequence in sequences]), batch):
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


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Return the numbers of sequences of some lengths, the longest first: those of a batch are then alike."""
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])


def width_in_blocks(length: int, held_back: int, block: int, most: int) -> int:
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


def _chosen(
    logits: Float[Array, "B T V"], following: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    picked = jnp.take_along_axis(logits, following[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == following


def _divergence(logits: Float[Array, "B T V"], reference: Float[Array, "B T V"]) -> Float[Array, "B T"]:
    """Return the Kullback-Leibler divergence of ``logits`` from ``reference``, with rounding below 0 cut off."""
    true, other = jax.nn.log_softmax(reference), jax.nn.log_softmax(logits)
    return jnp.maximum(jnp.sum(jnp.exp(true) * (true - other), axis=-1), 0)
