"""Tokens that are fed behind a text, observed, and taken back: its own for KVzip, KVgrad and DapQ, or others."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

if TYPE_CHECKING:
    from kvjax._src.policy import Policy


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
    """Asks for tokens of the text to be fed again, while the policy observes, and to be taken back.

    For KVzip the model repeats its prompt, ``chunk`` tokens at a time: after the whole prompt, or each block after it
    has come in. ``statistics`` are those that a score reads of the attention while the model repeats, and only then.
    They are of the whole cache, or where ``visible`` is "part" of the chunk, the copies, and the ``sinks`` first
    tokens. ``prompt`` asks the model to repeat (:func:`models.with_repeat_prompt`).

    For KVgrad, ``loss`` names what is differentiated while the model repeats a part: "hidden", the squared lengths of
    the last layer's hidden states, or "tokens", the cross-entropy of the repeated tokens. A score reads the gradient as
    ``Context.gradient``: whole if its ``statistics`` are the "weights", else its length for each token. A part is then
    fed as one block, however long the blocks of the text are.

    Where ``text`` is given, the model repeats nothing: these words are fed in place of ``prompt`` and of each part, and
    a score reads their attention to all tokens that are held (:func:`kvjax.prompted`).

    For KVzip+, ``input_length`` asks for ``Context.input_length``, by which each query's weights are divided in the
    statistic "scaled_max".

    For DapQ, where ``pseudo`` is not 0, the prompt's ``tokens``, that many of its last or first ones, are fed once in
    place of the answer to come. They see the whole prompt, and a score reads its own statistics of them.
    """

    chunk: int = 0
    sinks: int = 0
    visible: Literal["part", "cache"] = "part"
    statistics: frozenset[str] = frozenset()
    prompt: RepeatPrompt = NO_WORDS
    text: str = ""
    pseudo: int = 0
    tokens: Literal["last", "first"] = "last"
    loss: Literal["hidden", "tokens"] | None = None
    input_length: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reconstructed:
    """The part of the prompt that a block observes: the tokens at the positions [start, stop) of each row.

    The repeated copies, and what asks for them, are at the positions from ``end`` on, behind the text. They attend
    over the whole cache. The statistics are those of attention over the ``sinks`` first tokens, the tokens of the part
    and the copies; over the whole cache where ``sinks`` is None. The policy does not see the copies, and an eviction
    drops them.
    """

    start: Int[Array, "B"]
    stop: Int[Array, "B"]
    end: Int[Array, "B"]
    sinks: int | None = dataclasses.field(default=0, metadata={"static": True})

    @classmethod
    def of(cls, part: Int[Array, "B 3"], policy: Policy) -> Reconstructed:
        """Return the part of a step of a schedule (:class:`kvjax.schedule.Step`), as its policy observes it."""
        wanted = policy.needs.reconstruction
        assert wanted is not None
        start, stop, end = jnp.asarray(part).T
        return cls(start, stop, end, None if wanted.visible == "cache" else wanted.sinks)

    def visible(self, position: Int[Array, "*heads S"], row: Int[Array, "*heads"]) -> Int[Array, "*heads S"]:
        """Return the slots' positions, -1 where the statistics leave a slot out; ``row`` is the slots' batch row."""
        assert self.sinks is not None, "all slots are visible"
        start, stop, end = (x[row][..., None] for x in (self.start, self.stop, self.end))
        inside = (position < self.sinks) | ((position >= start) & (position < stop)) | (position >= end)
        return jnp.where(inside, position, -1)


class Repeated(NamedTuple):
    """The state of a policy that scores a token while the model repeats it.

    ``score`` is 0 until then. ``token`` is the token's id, so that a later call can have it repeated.
    """

    score: Float[Array, "*heads S"]
    token: Int[Array, "*heads S"]


def unrepeated(
    position: Int[np.ndarray, "B S"], score: Float[np.ndarray, "B S"], token: Int[np.ndarray, "B S"]
) -> tuple[Int[np.ndarray, "_"], ...]:
    """Return each row's tokens from the first on that has no score yet, in position order, by one head's slots."""
    rows = []
    for places, scores, ids in zip(position, score, token, strict=True):
        left = places[(places >= 0) & (scores == 0)]
        own = np.flatnonzero(places >= (left.min() if len(left) else places.max() + 1))
        rows.append(ids[own[np.argsort(places[own])]].astype(np.int32))
    return tuple(rows)
