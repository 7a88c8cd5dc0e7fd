"""Tokens of the prompt that are fed again after it, observed, and taken back: for KVzip and DapQ."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


class RepeatPrompt(NamedTuple):
    """Token ids that ask a model to repeat its context, part by part.

    The first part follows ``first`` and ``suffix``, any other ``following``, the ``overlap`` tokens before it and
    ``suffix``. ``suffix`` ends the user's turn, in a model for chats, and opens the answer.
    """

    first: tuple[int, ...] = ()
    following: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    overlap: int = 8


NO_WORDS = RepeatPrompt()


@dataclasses.dataclass(frozen=True)
class Reconstruction:
    """Asks for tokens of the prompt to be fed again after it, while the policy observes, and to be taken back.

    For KVzip the model repeats its prompt, ``chunk`` tokens at a time. ``sinks`` first tokens are seen with every
    chunk. ``statistics`` are those that a score reads of the attention while the model repeats, and only then.
    ``prompt`` asks the model to repeat (:func:`models.with_repeat_prompt`).

    For DapQ, where ``pseudo`` is not 0, the prompt's ``tokens``, that many of its last or first ones, are fed once in
    place of the answer to come. They see the whole prompt, and a score reads its own statistics of them.
    """

    chunk: int = 0
    sinks: int = 0
    statistics: frozenset[str] = frozenset()
    prompt: RepeatPrompt = NO_WORDS
    pseudo: int = 0
    tokens: Literal["last", "first"] = "last"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reconstructed:
    """The part of the prompt that a block observes: the tokens at the positions [start, stop) of each row.

    The repeated copies, and what asks for them, are at the positions from ``end`` on, behind the prompt. They attend
    over the whole cache. The statistics are those of attention over the ``sinks`` first tokens, the tokens of the part
    and the copies. The policy does not see the copies, and an eviction drops them.
    """

    start: Int[Array, "B"]
    stop: Int[Array, "B"]
    end: Int[Array, "B"]
    sinks: int = dataclasses.field(default=0, metadata={"static": True})

    def visible(self, position: Int[Array, "*rows S"], row: Int[Array, "*rows"]) -> Int[Array, "*rows S"]:
        """Return the slots' positions, -1 where the statistics leave a slot out; ``row`` is the slots' batch row."""
        start, stop, end = (x[row][..., None] for x in (self.start, self.stop, self.end))
        inside = (position < self.sinks) | ((position >= start) & (position < stop)) | (position >= end)
        return jnp.where(inside, position, -1)
