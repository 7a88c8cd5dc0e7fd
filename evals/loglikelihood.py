"""How likely a model finds each token of a text, when the cache is compressed or only a part of it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import models
from evals import selections
from evals.selections import Heads, Method
from models.plan import When


class Predicted(NamedTuple):
    """Of each token of a sequence but the first: its log-probability, and whether it was the most likely one."""

    log_probability: Float[np.ndarray, "T"]
    greedy: Bool[np.ndarray, "T"]


def predict(
    model: models.Decoder,
    sequences: Sequence[Sequence[int]],
    held_back: Sequence[int] | None = None,
    *,
    policy: str = "full",
    budget: int | float | None = None,
    block: int = 128,
    when: When = "block",
    batch: int = 8,
    on_row: Callable[[int, Predicted], None] | None = None,
) -> list[Predicted]:
    """What a model says of each token of sequences, given those before it that a policy has kept.

    The logits of a batch's tokens, ``[B, T, V]`` in float32, are held at once.

    Args:
        held_back: how many last tokens of each sequence come after the rest was compressed, and are not evicted from.
        on_row: called with a sequence's number and figures as they come.

    Raises:
        ValueError: a sequence of fewer than two tokens.

    Example:
        >>> import models
        >>> from evals import loglikelihood
        >>> model, tokenizer = models.load("retriever")
        >>> found = loglikelihood.predict(model, [tokenizer.encode("The river was calm.")], block=8)
        >>> found[0].log_probability.shape == (len(tokenizer.encode("The river was calm.")) - 1,)
        True
    """
    asked = [0] * len(sequences) if held_back is None or policy == "full" else list(held_back)
    found: list[Predicted | None] = [None] * len(sequences)
    for rows, fed in _batches(sequences, batch):
        # The last token is predicted and not fed; of those held back, one is predicted by the context's last token.
        lengths = np.array([len(sequences[row]) - 1 for row in fed])
        questions = np.array([min(max(asked[row] - 1, 0), len(sequences[row]) - 2) for row in fed])
        width = int(questions.min()) + -(-int(lengths.max() - questions.min()) // block) * block  # few shapes
        tokens = _padded([sequences[row] for row in fed], width + 1)
        out = models.prefill(
            model,
            tokens[:, :-1],
            lengths,
            policy=policy,
            budget=budget,
            block=block,
            when=when,
            question=questions if questions.any() else None,
            outputs="all",
        )
        _keep(out.logits, tokens, rows, sequences, found, on_row)
    return [predicted for predicted in found if predicted is not None]


def simulate(
    model: models.Decoder,
    sequences: Sequence[Sequence[int]],
    selection: Method,
    sparsity: float,
    *,
    butler: models.Butler | None = None,
    sinks: int = 4,
    heads: Heads = "query",
    block: int = 128,
    batch: int = 8,
    on_row: Callable[[int, Predicted], None] | None = None,
) -> list[Predicted]:
    """What a model says of each token when every row reads only what a selection keeps (see evals/selections.py).

    Args:
        selection, sparsity, butler, sinks, heads: see :func:`evals.selections.simulate`.
        block: sequences are padded to a multiple of it, so that few shapes are compiled.
        on_row: called with a sequence's number and figures as they come.

    Raises:
        ValueError: a sequence of fewer than two tokens.

    Example:
        >>> import models
        >>> from evals import loglikelihood
        >>> from evals.selections import parse_selection
        >>> model, tokenizer = models.load("retriever")
        >>> sequence = tokenizer.encode("The river was calm.")
        >>> found = loglikelihood.simulate(model, [sequence], parse_selection("streaming"), 0.5, block=8)
        >>> found[0].greedy.shape == (len(sequence) - 1,)
        True
    """
    found: list[Predicted | None] = [None] * len(sequences)
    for rows, fed in _batches(sequences, batch):
        longest = max(len(sequences[row]) for row in fed)
        tokens = _padded([sequences[row] for row in fed], -(-longest // block) * block)
        logits = selections.simulate(model, tokens, selection, sparsity, butler=butler, sinks=sinks, heads=heads)
        _keep(logits[:, :-1], tokens, rows, sequences, found, on_row)
    return [predicted for predicted in found if predicted is not None]


def _batches(sequences: Sequence[Sequence[int]], batch: int) -> Iterator[tuple[list[int], list[int]]]:
    """The rows of each batch, the longest first, and with them what fills a last batch up to the same shape."""
    if any(len(sequence) < 2 for sequence in sequences):
        raise ValueError("a sequence has fewer than 2 tokens, so nothing in it is predicted; give longer texts.")
    order = sorted(range(len(sequences)), key=lambda row: -len(sequences[row]))
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        yield rows, rows + rows[:1] * (min(batch, len(order)) - len(rows))


def _padded(sequences: Sequence[Sequence[int]], width: int) -> Int[np.ndarray, "B T"]:
    tokens = np.zeros((len(sequences), width), np.int32)
    for place, sequence in enumerate(sequences):
        tokens[place, : len(sequence)] = sequence
    return tokens


def _keep(
    logits: Float[Array, "B T V"],
    tokens: Int[np.ndarray, "B T1"],
    rows: Sequence[int],
    sequences: Sequence[Sequence[int]],
    found: list[Predicted | None],
    on_row: Callable[[int, Predicted], None] | None,
) -> None:
    chosen, greedy = (np.asarray(x) for x in _chosen(logits, jnp.asarray(tokens[:, 1:])))
    for place, row in enumerate(rows):
        length = len(sequences[row]) - 1
        found[row] = predicted = Predicted(chosen[place, :length], greedy[place, :length])
        if on_row is not None:
            on_row(row, predicted)


@jax.jit
def _chosen(
    logits: Float[Array, "B T V"], following: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    picked = jnp.take_along_axis(logits, following[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == following
