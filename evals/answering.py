"""Prompts answered in batches under settings, which share what they can.

Settings that evict nothing before the end of the prompt share its prefill; questions about one context share its
reading.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

import kvjax
import models
from evals.run_settings import Setting, sharing
from kvjax._src.capacity import most_held
from kvjax._src.matching import dropped_bytes
from kvjax._src.policy import Policy
from kvjax._src.split_cache import ModelCache
from models import selecting
from models.commands.programs import make_room
from models.networks import Network, read_by, remembers
from models.sizing import copied
from models.states import without_room


class Aids(NamedTuple):
    """Parts that some policies and selections need besides the model.

    ``tokenizer`` makes the words that ask the model to repeat its prompt (KVzip); ``networks`` are the small networks.
    """

    tokenizer: models.Tokenizer | None = None
    networks: tuple[Network, ...] = ()

    def policy(self, setting: Setting) -> Policy | str | None:
        """Return a setting's policy, with the words that it needs; None for a selection."""
        if self.tokenizer is None or setting.evicting is None:
            return None if setting.select is not None else setting.policy
        return models.with_repeat_prompt(setting.policy, self.tokenizer)

    def of(self, setting: Setting) -> tuple[Network, ...]:
        """Return the networks that a setting reads."""
        return read_by(self.networks, setting.evicting, selecting.parse_select(setting.select))


NO_AIDS = Aids()


class Feed(NamedTuple):
    """Say how prompts are fed: tokens of a block, prompts of a batch, and what policies need besides the model.

    ``temperature``, ``top_p`` and ``seed`` say how the answers' tokens are drawn; at a temperature of 0 they are not.
    """

    block: int = 128
    batch: int = 16
    aids: Aids = NO_AIDS
    temperature: float = 0.0
    top_p: float | None = None
    seed: int = 0

    def drawn(self, rows: Sequence[int]) -> dict[str, Any]:
        """Return how :func:`models.stream` draws the answers of some rows; other rows have other draws."""
        if self.temperature == 0:
            return {}
        key = jax.random.fold_in(jax.random.key(self.seed), rows[0])
        return dict(temperature=self.temperature, top_p=self.top_p, key=key)


FEED = Feed()


class Prompt(Protocol):
    """A prompt's tokens. Those before ``context_end`` are known before the closing question is."""

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def context_end(self) -> int: ...


class Batch(NamedTuple):
    """The answers of one batch: ``tokens`` [rows, new], -1 after a row's end; the bytes of one sequence's cache at the
    end and at its largest; the tokens and seconds of prefill and decode, without the steps that may compile.
    """

    rows: list[int]
    tokens: np.ndarray
    cache_bytes: int
    peak_cache_bytes: int
    prefill: tuple[float, float]
    decode: tuple[float, float]


def answers(
    model: models.Decoder,
    prompts: Sequence[Prompt],
    setting: Setting,
    *,
    rows: Sequence[int] | None = None,
    **options: Any,
) -> Iterator[Batch]:
    """Answer prompts under one setting, batch by batch; see :func:`answers_each`."""
    chosen = None if rows is None else {setting: rows}
    return (batch for _, batch in answers_each(model, prompts, [setting], rows=chosen, **options))


def answers_each(
    model: models.Decoder,
    prompts: Sequence[Prompt],
    settings: Sequence[Setting],
    *,
    new_tokens: int,
    end: tuple[int, ...] | None = (),
    rows: Mapping[Setting, Sequence[int]] | None = None,
    width: int = 0,
    feed: Feed = FEED,
) -> Iterator[tuple[Setting, Batch]]:
    """Answer prompts under several settings; those that evict once, after the prompt, share its prefill.

    Where the question is unknown and every context comes with several questions, a context is read once for all of
    them, and a ratio is one of its tokens.

    Args:
        end: tokens that end an answer; None for the model's own.
        rows: the prompts to answer under each setting, all by default. Buffers are sized by all prompts, so that a
            row's bytes do not depend on which others are answered.
        width: the least number of tokens that the prompts' buffers hold, so that tasks share compiled programs.

    Returns:
        Each batch with its setting. The prefill seconds of a shared prompt are those of all its settings together.
    """
    asked_of = _Job(model, prompts, new_tokens, feed, end, width)
    wanted = {setting: range(len(prompts)) if rows is None else rows[setting] for setting in settings}
    for together in sharing(settings):
        if asked := [setting for setting in together if asked_of.often(setting)]:
            yield from asked_of.each_text(asked, wanted)
        together = [setting for setting in together if setting not in asked]
        if not together:
            continue
        if len(together) == 1:
            (setting,) = together
            make_room()
            for fed, clock, steps in asked_of.starts(setting, wanted[setting]):
                yield setting, asked_of.answer(setting, fed, clock, steps)
            continue
        union = sorted(set().union(*(wanted[setting] for setting in together)))
        for number, fed in enumerate(asked_of.model_batches(together, union)):
            asked = [setting for setting in together if set(fed.rows) & set(wanted[setting])]
            start = time.perf_counter()
            each = asked_of.prefill(asked, fed.tokens, fed.lengths, fed.questions)
            seconds = 0.0
            for setting, prefilled in zip(asked, each, strict=True):
                make_room()
                clock = _BatchClock(fed.prompt_tokens, len(fed.rows))
                prefilled.logits.block_until_ready()
                seconds = seconds or time.perf_counter() - start  # the prompt runs before the first setting's result
                if number:  # the first batch may compile
                    clock.prefill = (float(fed.prompt_tokens), seconds)
                steps = models.stream(
                    model, prefilled, policy=feed.aids.policy(setting), budget=setting.budget,
                    networks=feed.aids.of(setting), block=feed.block, max_new_tokens=new_tokens, when=setting.when,
                    evict_every=setting.evict_every, question=fed.questions, end=end, **feed.drawn(fed.rows),
                )  # fmt: skip
                yield setting, asked_of.answer(setting, fed, clock, steps)


def check_answers(
    model: models.Decoder,
    prompts: Sequence[Prompt],
    setting: Setting,
    *,
    new_tokens: int,
    width: int = 0,
    feed: Feed = FEED,
) -> None:
    """Raise the ValueError that :func:`answers` would raise under a setting, without a step of the model."""
    sizes: list[Callable[[Prompt], int]] = [lambda p: len(p.tokens), _question_length, lambda p: p.context_end]
    each = range(len(prompts))
    rows = {end(each, key=lambda row: size(prompts[row])) for size in sizes for end in (min, max)}
    for _ in _Job(model, prompts, new_tokens, feed, (), width).starts(setting, sorted(rows)):
        pass


class _ModelBatch(NamedTuple):
    """One batch as the model is fed it: some rows of the prompts, and others that fill it up to its size."""

    rows: list[int]
    tokens: np.ndarray
    lengths: np.ndarray  # of what is read together: prompts, or contexts
    questions: np.ndarray | None  # lengths of the questions that are held back

    @property
    def prompt_tokens(self) -> int:
        return int(self.lengths[: len(self.rows)].sum())


@dataclasses.dataclass(frozen=True)
class _Job:
    """The prompts, and how they are answered under any setting; see :func:`answers_each`."""

    model: models.Decoder
    prompts: Sequence[Prompt]
    new_tokens: int
    feed: Feed
    end: tuple[int, ...] | None
    width: int

    @property
    def longest(self) -> int:
        return max(self.width, *(len(prompt.tokens) for prompt in self.prompts))

    @functools.cached_property
    def texts(self) -> list[list[int]]:
        """The prompts that share a context, context by context."""
        found: dict[tuple[int, ...], list[int]] = {}
        for row, prompt in enumerate(self.prompts):
            found.setdefault(tuple(prompt.tokens[: prompt.context_end]), []).append(row)
        return list(found.values())

    def often(self, setting: Setting) -> bool:
        """Return whether contexts are read once for all of their questions: nothing leaves after a context."""
        _, every = setting.moments
        kept = setting.select is None and not remembers(setting.evicting) and (not every or every > self.new_tokens)
        each = {len(rows) for rows in self.texts}
        return setting.question == "unknown" and kept and len(each) == 1 and max(each) > 1

    def each_text(
        self, settings: Sequence[Setting], wanted: Mapping[Setting, Sequence[int]]
    ) -> Iterator[tuple[Setting, Batch]]:
        """Answer prompts that share contexts: each context is read once, and its cache copied for every question."""
        tails = [prompt.tokens[prompt.context_end :] for prompt in self.prompts]
        contexts = [self.prompts[rows[0]].tokens[: self.prompts[rows[0]].context_end] for rows in self.texts]
        widest, longest, each = max(map(len, tails)), max(map(len, contexts)), len(self.texts[0])
        for number, (chosen, filled) in enumerate(
            batches(self.model, range(len(contexts)), max(1, self.feed.batch // each))
        ):
            rows = [row for text in filled for row in self.texts[text]]
            told = rows[: len(chosen) * each]
            asked = [setting for setting in settings if set(told) & set(wanted[setting])]
            if not asked:
                continue
            fed = padded([contexts[text] for text in filled], longest)
            counts = np.array([len(contexts[text]) for text in filled])
            questions = padded([tails[row] for row in rows], widest)
            clock = _BatchClock(int(counts[: len(chosen)].sum()), len(told))
            start, seconds = time.perf_counter(), 0.0
            for setting, kept in self.read(asked, fed, counts, clock):
                make_room()
                jax.block_until_ready(kept)
                seconds = seconds or time.perf_counter() - start  # the text is read before the first setting's result
                if number:  # the first batch may compile
                    clock.prefill = (float(clock.prompt_tokens), seconds)
                cache = kvjax.repeat(kept, each)
                steps = models.stream(
                    self.model, questions, lengths=np.array([len(tails[row]) for row in rows]), cache=cache,
                    block=self.feed.block, max_new_tokens=self.new_tokens, end=self.end,
                    **self.feed.drawn(told),
                )  # fmt: skip
                yield setting, self.answer(setting, _ModelBatch(told, questions, counts, None), clock, steps)
                clock = _BatchClock(clock.prompt_tokens, len(told))

    def read(
        self, settings: Sequence[Setting], tokens: np.ndarray, lengths: np.ndarray, clock: _BatchClock
    ) -> Iterator[tuple[Setting, ModelCache]]:
        """Read contexts under settings that share them, and yield what each keeps."""
        if len(settings) > 1:
            each = self.prefill(settings, tokens, lengths, None)
            yield from ((setting, prefilled.cache) for setting, prefilled in zip(settings, each, strict=True))
            return
        (setting,) = settings
        ((_, cache),) = models.stream(
            self.model, tokens, lengths=lengths, policy=self.feed.aids.policy(setting), budget=setting.budget,
            networks=self.feed.aids.of(setting), when=setting.when, block=self.feed.block, max_new_tokens=1,
            cache_dtype=setting.cache_dtype, evict_every=0, end=(), on_block=clock.block,
            reading_budget=setting.reading_budget,
        )  # fmt: skip
        yield setting, without_room(cache)

    def prefill(
        self, settings: Sequence[Setting], tokens: np.ndarray, lengths: np.ndarray, questions: np.ndarray | None
    ) -> Iterator[models.Prefilled]:
        """Run prompts once for settings that share them."""
        return models.prefill_each(
            self.model, tokens, lengths=lengths, when="prompt",
            policies=[(self.feed.aids.policy(setting), setting.budget) for setting in settings],
            block=self.feed.block, question=questions, networks=self.feed.aids.networks,
            cache_dtype=settings[0].cache_dtype,
        )  # fmt: skip

    def model_batches(self, settings: Sequence[Setting], rows: Sequence[int]) -> Iterator[_ModelBatch]:
        """Make the batches of rows for settings that hold back the same questions."""
        prompts, extremes = self.prompts, list[Prompt]()
        # Rows of similar length share a batch: leading empty blocks are skipped only for a whole batch.
        rows = sorted(rows, key=lambda row: len(prompts[row].tokens))
        held_back = settings[0].question == "unknown"
        # The extremes are in every batch, so that all batches have the same size and share one compilation.
        if held_back or any(isinstance(setting.budget, float) for setting in settings):
            extremes = [max(prompts, key=lambda prompt: len(prompt.tokens))]
        if held_back:
            extremes += [min(prompts, key=_question_length), max(prompts, key=_question_length)]
        for chosen, filled in batches(self.model, rows, self.feed.batch, of=len(prompts)):
            fed = [prompts[row] for row in filled] + extremes
            counts = np.array([len(prompt.tokens) for prompt in fed])
            questions = np.array([_question_length(prompt) for prompt in fed]) if held_back else None
            yield _ModelBatch(chosen, padded([prompt.tokens for prompt in fed], self.longest), counts, questions)

    def starts(
        self, setting: Setting, rows: Sequence[int]
    ) -> Iterator[tuple[_ModelBatch, _BatchClock, Iterator[tuple[np.ndarray, Any]]]]:
        """Yield each batch, its clock, and its checked steps, none of which has run yet."""
        for fed in self.model_batches([setting], rows):
            clock = _BatchClock(fed.prompt_tokens, len(fed.rows))
            steps = models.stream(
                self.model, fed.tokens, lengths=fed.lengths, policy=self.feed.aids.policy(setting),
                budget=setting.budget, select=setting.select, networks=self.feed.aids.of(setting),
                block=self.feed.block, max_new_tokens=self.new_tokens, when=setting.when,
                evict_every=setting.evict_every, question=fed.questions, end=self.end,
                cache_dtype=setting.cache_dtype, on_block=clock.block, reading_budget=setting.reading_budget,
                **self.feed.drawn(fed.rows),
            )  # fmt: skip
            yield fed, clock, steps

    def answer(
        self, setting: Setting, fed: _ModelBatch, clock: _BatchClock, steps: Iterator[tuple[np.ndarray, Any]]
    ) -> Batch:
        """Run the steps of one batch under one setting, and return what it answered."""
        generated = np.full((len(fed.tokens), self.new_tokens), -1, np.int32)
        for step, (token, kept) in enumerate(steps):
            generated[:, step] = token
            clock.token()
            cache = kept
        size, peak = cache.nbytes // len(fed.tokens), clock.most // len(fed.lengths)
        if (policy := setting.evicting) is None or setting.moments[0] == "prompt":  # what has all tokens, without room
            again = fed.lengths - (0 if fed.questions is None else fed.questions)  # what a policy may have repeated
            held, windows, most = self.longest + self.new_tokens, self.model.config.cached_windows, int(again.max())
            layers: list[float] = [held] * len(windows)
            if policy is not None:
                copies = copied(policy, most)
                layers = most_held(windows, max(held, most + copies), self.feed.block + copies)
            one, heads = cache.arrays, self.model.config.num_heads // cache.heads_shape[-1]
            slot = sum(leaf.nbytes for leaf in jax.tree.leaves(one) if _per_slot(leaf, one.position))
            each = slot // one.position.size * slots_of(cache)
            slot = slot // one.position.size + dropped_bytes(one.state, heads, one.head_dim)
            needed = cache.nbytes - each + slot * math.prod(cache.heads_shape[1:]) * int(sum(layers))
            peak = needed // len(fed.tokens)
            size = min(size, peak) if policy is None else size
        told = generated[: len(fed.rows)], size, max(size, peak)
        return Batch(fed.rows, *told, clock.prefill, clock.decode)


def _per_slot(leaf: Any, position: Any) -> bool:
    """Return whether an array of a cache has an entry for each slot."""
    return leaf.shape[: position.ndim] == position.shape


def slots_of(cache: ModelCache) -> int:
    """Return how many slots a cache has in all layers and rows, free ones as well."""
    parts = cache.layers if isinstance(cache, kvjax.LayerCaches) else (cache.arrays,)
    return sum(part.position.size for part in parts)


def padded(sequences: Sequence[Sequence[int]], width: int = 0) -> np.ndarray:
    """Return sequences of tokens as rows of ``width`` tokens or more, filled up with zeros."""
    tokens = np.zeros((len(sequences), max(width, *map(len, sequences))), np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    return tokens


def batches(
    model: models.Decoder, rows: Sequence[int], batch: int, of: int = 0
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the rows of each batch, and the rows that are fed: a last batch is filled up with its first row.

    All batches have one size, so they share a compiled program: the smallest that needs no more batches, or on several
    devices, which divide a batch, the one that was given. If some rows are answered already, it follows from ``of``,
    the number of all.
    """
    count, size = max(len(rows), of, 1), batch
    if len(model.embedding[...].sharding.device_set) == 1:
        size = -(-count // -(-count // batch))
    for start in range(0, len(rows), size):
        make_room()
        chosen = list(rows[start : start + size])
        yield chosen, chosen + chosen[:1] * (size - len(chosen))


def _question_length(prompt: Prompt) -> int:
    return len(prompt.tokens) - prompt.context_end


class _BatchClock:
    """The tokens and seconds of one batch's prefill and decode, without the first block and step, which may compile."""

    def __init__(self, prompt_tokens: int, rows: int) -> None:
        self.prefill, self.decode = (0.0, 0.0), (0.0, 0.0)
        self.prompt_tokens, self.rows = prompt_tokens, rows
        self.last: float | None = None
        self.steps, self.done, self.most = 0, 0, 0  # most: bytes of the largest cache of all rows

    def block(self, done: int, total: int, cache: Any) -> None:
        now = time.perf_counter()
        self.most = max(self.most, cache.nbytes)
        if self.last is not None:
            tokens, seconds = self.prefill
            self.prefill = (tokens + self.prompt_tokens * (done - self.done) / total, seconds + now - self.last)
        self.last, self.done = now, done

    def token(self) -> None:
        now = time.perf_counter()
        self.steps += 1
        if self.steps > 2 and self.last is not None:
            self.decode = (self.decode[0] + self.rows, self.decode[1] + now - self.last)
        self.last = now
