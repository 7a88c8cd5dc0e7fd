"""Rows of the retriever's own training, for the trainers: `--import papers.retriever.rows --data retriever`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from models.tokenizer import Tokenizer
from papers.retriever import data
from train.text import WRITTEN

HELD_OUT_SEED = 1_000_000  # added to the seed for held-out rows
# The last level that the embedded model was trained on; a row's length is that of the run.
LEVEL = dict(facts=(4, 28), filler=(0.1, 0.9), before=0.4, episodes=False, prose=0.1, places=0.3)


class Rows(NamedTuple):
    """Rows of the embedded model's own training; see :class:`train.text.Written`."""

    writer: data.Writer
    seed: int
    name: str = "retriever"

    @classmethod
    def of(cls, tokenizer: Tokenizer, seed: int) -> Rows:
        """Return the rows of a seed.

        Raises:
            ValueError: the tokenizer is not that of the embedded model.
        """
        try:
            return cls(data.Writer(tokenizer.backend), seed)
        except ValueError as error:
            raise ValueError(f"--data retriever is text for the embedded model: {error}") from None

    def _row(self, length: int, seed: int, index: int) -> Int[np.ndarray, "T"]:
        level = data.Level(length, **LEVEL)  # type: ignore[arg-type]
        return self.writer.batch(level, 1, seed, index).tokens[0].astype(np.int32)

    def rows(
        self, length: int, position: dict[str, Any] | None
    ) -> Iterator[tuple[Int[np.ndarray, "T"], dict[str, Any]]]:
        """Yield rows of ``length`` ids without end, each with the position after it."""
        index = position["row"] if position else 0
        while True:
            yield self._row(length, self.seed, index), {"row": index + 1}
            index += 1

    def held_out(self, length: int, count: int) -> Int[np.ndarray, "R T"]:
        """Return rows of another seed."""
        return np.stack([self._row(length, self.seed + HELD_OUT_SEED, index) for index in range(count)])


WRITTEN["retriever"] = Rows.of
