"""Says what a run feeds, and when it evicts: cuts prompts into blocks, and puts the blocks in order.

Nothing here knows a model. A schedule is a few stages; a stage repeats its steps, round after round, with other tokens
each time. A step feeds one block to all layers: of the text, or a copy of a part of it, which the policy observes and
which then leaves the cache.

    for step in schedule.context:    ...  # then the cache may be made smaller
    for step in schedule.rest:       ...

Blocks are aligned to the prompt's end: the first block of a row may be partly empty, the last one never is. So a
score's observation window lies in one block, all rows of a batch reach their last token in the same step, and a row is
cut into the same blocks alone as in any batch. A question that must not be known when the context is compressed follows
in its own blocks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax._src.checks import check_count
from kvjax._src.policy import Policy
from kvjax._src.reconstruction import Reconstruction

When = Literal["block", "prompt", "published"]
HostOrDevice = Array | np.ndarray
# Tokens of an answer that are repeated at a time: on two cores a block of 64 takes the time of some 6 steps.
REPEATED_STEPS = 64
_NEVER = np.iinfo(np.int32).max


class Phase(NamedTuple):
    """The kind of a step; static, so each kind is compiled once.

    ``evicts``: the policy evicts after it. ``compressed``: the context was compressed before it. ``reading``: more of
    the context follows, for which a cache may hold more than in the end. ``excess``, ``filled`` and ``slots``: what is
    known of the slots, see :func:`kvjax.evict` and :class:`kvjax.Context`.
    """

    evicts: bool
    compressed: bool = False
    reading: bool = False
    excess: int | None = None
    filled: int | None = None
    slots: int | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """One kind of step, with a block of tokens for each round of its stage; ``positions`` are -1 for padding.

    ``parts`` says what a block repeats: the first position of a part of the text, the position behind the part, and the
    position from which on tokens are taken back. None for a block of the text itself.
    """

    tokens: Int[HostOrDevice, "n B m"]
    positions: Int[HostOrDevice, "n B m"]
    parts: Int[HostOrDevice, "n B 3"] | None = None
    phase: Phase = dataclasses.field(default=Phase(evicts=False), metadata={"static": True})

    @property
    def arrays(self) -> tuple[HostOrDevice, HostOrDevice, HostOrDevice | None]:
        """Return what differs between rounds."""
        return self.tokens, self.positions, self.parts

    def rounds(self, start: int | None, stop: int | None) -> Step:
        """Return the step with some of its rounds."""
        tokens, positions, parts = (None if array is None else array[start:stop] for array in self.arrays)
        assert tokens is not None and positions is not None
        return dataclasses.replace(self, tokens=tokens, positions=positions, parts=parts)

    def padded(self, rounds: int) -> Step:
        """Return the step with empty rounds behind its own, up to this many."""
        more = ((0, rounds - len(self.tokens)), (0, 0), (0, 0))
        positions = np.pad(self.positions, more, constant_values=-1)
        parts = None if self.parts is None else np.pad(self.parts, more)
        return dataclasses.replace(self, tokens=np.pad(self.tokens, more), positions=positions, parts=parts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stage:
    """Steps that follow one another in each round.

    ``used`` is the number of rounds that count: there may be more, so that one program serves many lengths. None for
    all.
    """

    steps: tuple[Step, ...]
    used: Int[HostOrDevice, ""] | None = None

    def __iter__(self) -> Iterator[tuple[Phase, np.ndarray, np.ndarray, np.ndarray | None]]:
        """Yield the phase, tokens, positions and part of each block, in order; on the host."""
        count = len(self.steps[0].tokens) if self.used is None else int(self.used)
        for index in range(count):
            for step in self.steps:
                tokens, positions = np.asarray(step.tokens)[index], np.asarray(step.positions)[index]
                yield step.phase, tokens, positions, None if step.parts is None else np.asarray(step.parts)[index]


class Schedule(NamedTuple):
    """The stages of a prompt: those of its context, after which the cache may be made smaller, and those after them."""

    context: tuple[Stage, ...]
    rest: tuple[Stage, ...]

    @property
    def text(self) -> Iterator[Step]:
        """Yield the steps that feed the text itself, in its order."""
        return (step for stage in (*self.context, *self.rest) for step in stage.steps if step.parts is None)


class Text(NamedTuple):
    """The prompts of a run on the host, padded on the right.

    ``questions`` counts each row's last tokens that are held back. ``start`` is the position of each row's first token.
    ``pending`` are the tokens before it that have not been repeated yet, for a policy that repeats them.
    """

    tokens: Int[np.ndarray, "B T"]
    lengths: Int[np.ndarray, "B"]
    questions: Int[np.ndarray, "B"]
    start: Int[np.ndarray, "B"]
    pending: tuple[Int[np.ndarray, "_"], ...] = ()

    @classmethod
    def of(cls, tokens: Int[HostOrDevice, "B T"], lengths: Any = None, questions: Any = 0) -> Text:
        """Return new prompts, all of one length and without questions by default."""
        rows = np.asarray(tokens)
        B, T = rows.shape
        counts, asked = (
            np.broadcast_to(np.asarray(x, np.int32), B) for x in (T if lengths is None else lengths, questions)
        )
        return cls(rows, counts, asked, np.zeros(B, np.int32))

    @property
    def context(self) -> Int[np.ndarray, "B"]:
        """Return the lengths without the questions."""
        return self.lengths - self.questions


def moments(policy: Policy | None, when: When, evict_every: int | None) -> tuple[Literal["block", "prompt"], int]:
    """Return when a run evicts: after every "block" or once after the "prompt", and in decode every how many steps.

    Args:
        when: "published" means as in the policy's paper (:class:`kvjax.Timing`). A policy that observes tokens that
            stand for the answer's (DapQ) evicts once after the prompt, as in its paper, whatever is given.
        evict_every: the number of decode steps between evictions, 0 for never. By default the paper's for "published";
            else the paper's where that is several steps, or the length of the policy's observation window, by whose
            queries it scores, or 1 without either; 64 where the model repeats blocks, and 0 where it repeats its prompt
            once. Links behind the score change nothing.

    Example:
        >>> import kvjax
        >>> from kvjax.schedule import moments
        >>> moments(kvjax.parse("snapkv(window=16)"), "block", None)
        ('block', 16)
        >>> moments(kvjax.parse("snapkv"), "published", None)
        ('prompt', 0)
    """
    if when not in ("block", "prompt", "published"):
        raise ValueError(f"when is {when!r}; expected 'block', 'prompt' or 'published'.")
    if evict_every is not None:
        evict_every = check_count("evict_every", evict_every, 0, "give a number of steps, 0 for never")
    if policy is None:
        return "block", 0
    wanted = policy.needs.reconstruction
    if wanted is not None and wanted.pseudo:
        return "prompt", evict_every or 0
    if when == "published":
        if policy.published is None:
            raise ValueError(f"no paper says when {policy.name!r} evicts; give when='block' or when='prompt'.")
        return policy.published.prompt, policy.published.decode if evict_every is None else evict_every
    usual = policy.reads.window or 1
    score = policy.links[0] if policy.links else policy
    if score.published is not None and score.published.decode > 1:
        usual = score.published.decode
    if wanted is not None:
        usual = REPEATED_STEPS if when == "block" else 0
    return when, usual if evict_every is None else evict_every


def schedule(
    text: Text,
    policy: Policy | None,
    *,
    block: int,
    when: Literal["block", "prompt"] = "block",
    overflows: tuple[Bool[np.ndarray, "B"], Bool[np.ndarray, "B"]] | None = None,
    overfull: bool = False,
    reading: bool = False,
    exact: bool = False,
) -> Schedule:
    """Put the blocks of some prompts in order.

    Args:
        block: tokens per step.
        when: evict after every "block", or once after the "prompt".
        overflows: the rows whose context does not fit the budget, for others need not be repeated; and those whose
            answer may not, so that all that is left of their prompts is repeated before it. By default all rows, and
            no answer.
        overfull: whether the question's last block evicts.
        reading: whether the blocks of the context before the last one have a budget of their own.
        exact: whether to make no more rounds than needed; else their number is a power of two, and ``used`` counts
            those needed.

    Example:
        >>> import numpy as np
        >>> import kvjax
        >>> from kvjax.schedule import Text, schedule
        >>> plan = schedule(
        ...     Text.of(np.arange(20)[None], questions=4), kvjax.parse("kvzip"), block=8
        ... )
        >>> for phase, tokens, positions, part in [*plan.context[0], *plan.rest[0]]:
        ...     print(phase.evicts, positions[0], None if part is None else part[0])
        False [0 1 2 3 4 5 6 7] None
        True [-1 -1 -1 -1 -1 -1 -1 -1  8  9 10 11 12 13 14 15] [0 8 8]
        False [ 8  9 10 11 12 13 14 15] None
        True [16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31] [ 8 16 16]
        False [16 17 18 19] None
    """
    wanted = None if policy is None else policy.needs.reconstruction
    size = block
    if text.start.any() and text.context.any():  # a turn is short: a large block would mostly be padding
        size = turn_block(int(text.context.max()), block)
    context = _cut(text, np.zeros_like(text.context), text.context, size)
    first: list[Stage] = []
    again: list[Stage] = []
    if wanted is not None:
        first, again = _with_copies(text, context, wanted, block, when, overflows, reading, exact)
    elif text.context.any() and when == "block":
        first = _after_blocks(reading, exact, dataclasses.replace(context, phase=Phase(evicts=True)))
    elif text.context.any():
        first = _but_last(context, exact)
    evicts = overfull and (wanted is None or wanted.pseudo > 0)
    rest = _question(text, block, evicts, exact) if text.questions.any() else []
    return Schedule(tuple(first), (*rest, *again))


def _question(text: Text, block: int, evicts: bool, exact: bool) -> list[Stage]:
    question = _cut(text, text.context, text.lengths, max(1, min(block, question_room(text.questions))))
    question = dataclasses.replace(question, phase=Phase(evicts=False, compressed=True))
    return _but_last(question, exact) if evicts else [_stage(exact, question)]


def _with_copies(
    text: Text,
    context: Step,
    wanted: Reconstruction,
    block: int,
    when: Literal["block", "prompt"],
    overflows: tuple[Bool[np.ndarray, "B"], Bool[np.ndarray, "B"]] | None,
    reading: bool,
    exact: bool,
) -> tuple[list[Stage], list[Stage]]:
    """Return the stages that feed the context and repeat it, and those that repeat the rest before an answer."""
    nothing = np.zeros(0, np.int32)
    compresses, answers = (np.ones(len(text.lengths), bool), None) if overflows is None else overflows
    left = text.pending or (nothing,) * len(text.lengths)  # what is still to be repeated
    fed = [row[:count] for row, count in zip(text.tokens, text.context, strict=True)]
    first: list[Stage] = []
    if text.context.any() and (when == "prompt" or wanted.pseudo):
        whole = fed if wanted.pseudo else [np.append(own, more) for own, more in zip(left, fed, strict=True)]
        first.append(_stage(exact, context))
        if wanted.loss is None:
            copies = repeats_of(whole, text.start + text.context, wanted, block, text.start)
        else:  # a loss has one gradient if a part is one block
            longest = power_of_two(max(map(len, whole)))
            copies = repeats_of(whole, text.start + text.context, _of_block(wanted, longest), None, text.start)
        first += _but_last(copies, exact)
        left = (nothing,) * len(left)
    elif text.context.any():
        before = [own if repeats else nothing for own, repeats in zip(left, compresses, strict=True)]
        if any(map(len, before)):
            first += _but_last(repeats_of(before, text.start, _of_block(wanted, block), None), exact)
        parts = _of_block(wanted, context.tokens.shape[-1])
        copied = _repeated(text, context, parts, compresses) if compresses.any() else ()
        first += _after_blocks(reading, exact, context, *copied)
        each = zip(left, fed, compresses, strict=True)
        left = tuple(nothing if repeats else np.append(own, more) for own, more, repeats in each)
    if wanted.pseudo or answers is None:
        return first, []
    asked = (row[fed:length] for row, fed, length in zip(text.tokens, text.context, text.lengths, strict=True))
    each = zip(left, asked, answers, strict=True)
    before = [np.append(own, more) if needs else nothing for own, more, needs in each]
    if not any(map(len, before)):
        return first, []
    copies = repeats_of(before, text.start + text.lengths, _of_block(wanted, block), None)
    return first, _but_last(dataclasses.replace(copies, phase=Phase(evicts=False, compressed=True)), exact)


def _of_block(wanted: Reconstruction, block: int) -> Reconstruction:
    """Return what is asked for with parts no larger than a block."""
    return dataclasses.replace(wanted, chunk=min(wanted.chunk, block))


def copy_size(wanted: Reconstruction, tokens: int) -> int:
    """Return how many tokens at most repeat a part of ``tokens`` tokens, with those that ask the model for it."""
    ask, most = wanted.prompt, min(wanted.chunk, tokens)
    if wanted.text:
        if not ask.first:
            raise ValueError(
                f"the text {wanted.text!r} is fed behind the prompt, but has no tokens yet; give "
                "models.with_repeat_prompt(policy, tokenizer) in place of the policy."
            )
        return len(ask.first) + len(ask.suffix)
    return max(len(ask.first), len(ask.following) + ask.overlap) + len(ask.suffix) + most


def repeats_of(
    rows: Sequence[Int[np.ndarray, "_"]],
    end: Int[np.ndarray, "B"],
    wanted: Reconstruction,
    block: int | None,
    seen: Int[np.ndarray, "B"] | None = None,
) -> Step:
    """Return the blocks that copy each row's tokens, part by part, and stand behind them, from position ``end`` on.

    Each part has as many blocks, which end where it ends. The blocks of a row with fewer parts are empty at first, so
    that all rows end in the last block.

    Args:
        rows: the tokens, which lie right before ``end``.
        block: tokens per step; None for parts of one step.
        seen: how many tokens came before those, for pseudo tokens, which see them as well.
    """
    start = end - np.array([len(row) for row in rows])
    asked = [_asked_parts(row, wanted, 0 if seen is None else int(seen[b])) for b, row in enumerate(rows)]
    most = max(len(parts) for parts in asked)
    width = max(len(part.tokens) for parts in asked for part in parts)
    if block is None:
        block = copy_size(wanted, wanted.chunk)
    each = math.ceil(width / block)
    B, width = len(rows), each * block
    tokens, positions = np.zeros((most, B, width), np.int32), np.full((most, B, width), -1, np.int32)
    parts = np.zeros((most, B, 3), np.int32)
    parts[..., 2] = _NEVER
    for b, row in enumerate(asked):
        for place, part in enumerate(row, most - len(row)):
            length = len(part.tokens)
            tokens[place, b, width - length :] = part.tokens
            positions[place, b, width - length :] = end[b] + np.arange(length)
            parts[place, b] = start[b] + part.start, start[b] + part.stop, end[b]

    def cut(array: np.ndarray) -> np.ndarray:
        return array.reshape(most, B, each, block).swapaxes(1, 2).reshape(most * each, B, block)

    return Step(cut(tokens), cut(positions), np.repeat(parts, each, axis=0))


class _Part(NamedTuple):
    """A part of some tokens, [start, stop), and the tokens that are fed to observe it."""

    start: int
    stop: int
    tokens: np.ndarray


def _asked_parts(row: np.ndarray, wanted: Reconstruction, seen: int) -> list[_Part]:
    """Return the parts of a row's tokens; ``seen`` tokens came before them, in earlier turns."""
    if not len(row):
        return []
    if wanted.pseudo:
        some = row[-wanted.pseudo :] if wanted.tokens == "last" else row
        return [_Part(-seen, len(row), np.resize(some, wanted.pseudo))]  # a shorter context begins anew
    return [
        _Part(start, min(start + wanted.chunk, len(row)), _copy(row, start, start + wanted.chunk, wanted))
        for start in range(0, len(row), wanted.chunk)
    ]


def _copy(row: np.ndarray, start: int, stop: int, wanted: Reconstruction) -> Int[np.ndarray, "_"]:
    """Return row[start:stop] after the tokens that ask for it, or the text that is fed in its place."""
    ask = wanted.prompt
    if wanted.text:
        return np.asarray((*ask.first, *ask.suffix), np.int32)
    before = row[max(start - ask.overlap, 0) : start]
    pieces = (ask.following if start else ask.first, before, ask.suffix, row[start:stop])
    return np.concatenate([np.asarray(piece, np.int32) for piece in pieces])


def _repeated(text: Text, context: Step, wanted: Reconstruction, rows: Bool[np.ndarray, "B"]) -> list[Step]:
    """Return the steps that copy each block of the context right after it, part by part; the last one evicts."""
    positions = np.asarray(context.positions)
    n, B, m = positions.shape
    width, steps = copy_size(wanted, wanted.chunk), []
    for stop in range(m - (m - 1) // wanted.chunk * wanted.chunk, m + 1, wanted.chunk):
        tokens, places = np.zeros((n, B, width), np.int32), np.full((n, B, width), -1, np.int32)
        parts = np.zeros((n, B, 3), np.int32)
        parts[..., 2] = _NEVER
        own = positions[..., max(stop - wanted.chunk, 0) : stop]
        for index, b in zip(*np.nonzero((own[..., -1] >= 0) & rows), strict=True):
            first, last = own[index, b][own[index, b] >= 0][[0, -1]] - text.start[b]
            copy = _copy(text.tokens[b], first, last + 1, wanted)
            end = positions[index, b, -1] + 1
            tokens[index, b, width - len(copy) :] = copy
            places[index, b, width - len(copy) :] = end + np.arange(len(copy))
            parts[index, b] = text.start[b] + first, text.start[b] + last + 1, end
        steps.append(Step(tokens, places, parts, Phase(evicts=stop == m)))
    return steps


def answer_copies(
    wanted: Reconstruction,
    answer: Int[HostOrDevice, "B n"],
    end: Int[HostOrDevice, "B"],
    idle: Bool[HostOrDevice, "B"],
    numpy: Any = np,
) -> tuple[Any, Any, Any]:
    """Return the tokens, positions and part of a step that copies the last tokens of an answer.

    They are asked for as the first part of a text is: the tokens before them may be in no cache any more, so the copy
    cannot be said to start with those.

    Args:
        answer: the tokens, which lie right before the positions ``end``.
        idle: the rows for which nothing is repeated.
        numpy: ``jax.numpy`` inside a compiled program.
    """
    ask, (B, n) = wanted.prompt, answer.shape
    words = numpy.asarray((*ask.first, *ask.suffix), numpy.int32)
    copied = answer[:, :0] if wanted.text else answer
    tokens = numpy.concatenate([numpy.broadcast_to(words, (B, len(words))), copied], axis=1).astype(numpy.int32)
    places = end[:, None] + numpy.arange(tokens.shape[1])
    part = numpy.stack([end - n, end, end], axis=1)
    left_out = numpy.asarray((0, 0, _NEVER))
    positions = numpy.where(idle[:, None], -1, places)
    return tokens, positions.astype(numpy.int32), numpy.where(idle[:, None], left_out, part).astype(numpy.int32)


def _stage(exact: bool, *steps: Step) -> Stage:
    """Return a stage, with empty rounds up to a power of two unless it is to be exact."""
    count = len(steps[0].tokens)
    if exact:
        return Stage(steps)
    rounds = power_of_two(max(count, 1))
    return Stage(tuple(step.padded(rounds) for step in steps), np.asarray(count, np.int32))


def _after_blocks(reading: bool, exact: bool, *steps: Step) -> list[Stage]:
    """Return one stage of all rounds, or two if those before the last one have a budget of their own."""
    return _last_apart(exact, *steps, reading=True) if reading else [_stage(exact, *steps)]


def _but_last(step: Step, exact: bool) -> list[Stage]:
    """Return two stages: all rounds but the last, and the last one, which evicts."""
    return _last_apart(exact, dataclasses.replace(step, phase=step.phase._replace(evicts=True)), evicts=False)


def _last_apart(exact: bool, *steps: Step, **before: bool) -> list[Stage]:
    """Return two stages: all rounds but the last, in phases with the fields of ``before``, and the last one."""
    earlier = (dataclasses.replace(s.rounds(None, -1), phase=s.phase._replace(**before)) for s in steps)
    last = Stage(tuple(step.rounds(-1, None) for step in steps))
    return [last] if exact and len(steps[0].tokens) == 1 else [_stage(exact, *earlier), last]


def question_room(questions: np.ndarray) -> int:
    """Return the slots for the longest question, rounded up to a power of two so that there are few compilations."""
    longest = int(questions.max())
    return power_of_two(longest) if longest else 0


def turn_block(tokens: int, block: int) -> int:
    """Return the block of a turn of so many tokens in a kept cache: a power of two from 32, so that few are compiled.

    Example:
        >>> from kvjax.schedule import turn_block
        >>> [turn_block(tokens, block=128) for tokens in (5, 40, 300)]
        [32, 64, 128]
    """
    return min(block, max(32, power_of_two(tokens)))


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least ``size``."""
    return 1 << (size - 1).bit_length()


def _cut(text: Text, start: np.ndarray, stop: np.ndarray, block: int) -> Step:
    """Cut tokens[start:stop] into blocks, with the padding in front; on the device, each length would be compiled."""
    B, T = text.tokens.shape
    count = math.ceil((stop - start).max() / block)
    place = np.arange(count * block)[None] - (count * block - stop[:, None])
    aligned = np.take_along_axis(text.tokens, np.clip(place, 0, T - 1), axis=1) if count else np.zeros((B, 0))
    position = np.where(place >= start[:, None], text.start[:, None] + place, -1)
    tokens, positions = (x.astype(np.int32).reshape(B, count, block).swapaxes(0, 1) for x in (aligned, position))
    return Step(tokens, positions)
