"""Shared by the evaluations: settings from flags, prompts answered in batches under a policy, records of each sample.

An evaluation is a list of groups of samples. A setting is a policy, a budget, a moment of eviction, and what is known
of the question. Every setting answers the same samples, one batch after the other. Each answer becomes a record, so
that a killed run can be resumed (:mod:`evals.results`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

import jax
import numpy as np
from tqdm import tqdm

import kvjax
import models
from evals import prose, report, results, statistics
from evals.report import READS
from kvjax.allocation import parse_allocation
from kvjax.chains import policy_of
from kvjax.checks import check_names
from kvjax.policy import Policy
from kvjax.schedule import When, moments
from models import commands, fingerprints, selecting
from models.commands import provenance, run_flags
from models.commands.programs import make_room
from models.layer_caches import stacked_up
from models.load import describe as read_description
from models.networks import Network, load_networks, read_by, remembers, wanted_by
from models.selecting import Cache
from models.sizing import copied
from models.states import without_room

RECENCY = "recency"
QUIET = tqdm(disable=True)  # the progress of a function that is called without a bar
POLICIES = ("full", "h2o+protect(recent=0.5)", "h2o+caote+protect(recent=0.5)", "snapkv", "snapkv+caote")
Question = Literal["known", "before", "both", "unknown"]
PLACEMENTS = ("known", "before", "both", "unknown")
KNOWN_OR_NOT = ("known", "unknown")
# Flags that may change when a run is resumed: where it writes, what it runs on, and what is compared.
FREE = ("name", "begun", "out", "json", "plot", "batch", "mesh", "against")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of the table. ``evict_every`` is None for the policy's default, ``cache_dtype`` for the model's dtype.

    ``policy`` is an eviction policy, "full", or a selection such as "select=quest": nothing is evicted, and each decode
    step reads as many tokens per head as the budget says.

    Example:
        >>> from evals.evaluator import Setting
        >>> setting = Setting("select=quest(page_size=4)", 64, "block", "known")
        >>> setting.select, setting.evicting, setting.moments
        ('quest(page_size=4)', None, ('block', 0))
    """

    policy: str
    budget: int | float | None
    when: When
    question: Question
    evict_every: int | None = None
    cache_dtype: str | None = None

    @property
    def select(self) -> str | None:
        """Return the source of a selection; None for "full" and for a policy."""
        return self.policy.removeprefix(READS) if self.policy.startswith(READS) else None

    @property
    def evicting(self) -> Policy | None:
        """Return the policy that evicts; None for "full" and for a selection."""
        return None if self.select is not None else policy_of(self.policy)

    @property
    def moments(self) -> tuple[str, int]:
        """Return when the policy evicts (:func:`kvjax.schedule.moments`): in the prompt, and the decode interval."""
        return moments(self.evicting, self.when, self.evict_every)

    @property
    def wanted(self) -> frozenset[str]:
        """Return what the setting reads of a small network; see :func:`models.networks.wanted_by`."""
        return wanted_by(self.evicting, selecting.parse_select(self.select))

    def row(self) -> dict[str, Any]:
        """Return the fields of the setting's row in a table or a JSON file, with the resolved moments of eviction."""
        return {**dataclasses.asdict(self), "evicts": list(self.moments)}

    def title(self) -> str:
        budget = "" if self.budget is None else f", budget {self.budget}"
        return f"{self.policy}{budget}, {self.when}, question {self.question}"


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


class TextSample(NamedTuple):
    """A prompt, the references that an answer is compared with, and anything else that its score needs."""

    tokens: list[int]
    context_end: int
    references: tuple[str, ...]
    extra: Any = None


class Answer(NamedTuple):
    """A model's answer: the tokens up to its end token, and their text."""

    tokens: list[int]
    text: str


@dataclasses.dataclass(frozen=True)
class Group:
    """Samples that are answered together: one task at one length.

    Attributes:
        size: the number of samples that ``draw`` returns. They are drawn when they are needed; each call draws again.
        score: maps an answer and its sample to a number in [0, 1].
        end: tokens that end an answer; the model's own by default.
        questions: the group is answered only by settings whose ``question`` is one of these.
        data: a digest of the records that the samples are made of, if they were read and not drawn.
        probe: raises the errors that ``draw`` would raise, and returns a few of its samples; ``draw`` by default.
    """

    task: str
    length: int | None
    size: int
    draw: Callable[[], Sequence[Any]]
    new_tokens: int
    score: Callable[[Answer, Any], float]
    end: tuple[int, ...] | None = None
    questions: tuple[str, ...] = PLACEMENTS
    data: str = ""
    probe: Callable[[], Sequence[Any]] | None = None

    def few(self) -> Sequence[Any]:
        """Return a few of the samples, or raise what keeps them from being drawn."""
        return (self.draw if self.probe is None else self.probe)()


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
    """Answer prompts under one setting, batch by batch.

    Args:
        rows: the prompts to answer, all by default.
        options: see :func:`answers_each`.

    Example:
        >>> import models
        >>> from evals import evaluator, tasks
        >>> model, tokenizer = models.load("retriever")
        >>> setting = evaluator.Setting("tova", 64, "block", "known")
        >>> prompts = [tasks.needle(0, tokenizer, 128, facts=2)]
        >>> found = evaluator.answers(
        ...     model, prompts, setting, new_tokens=4, feed=evaluator.Feed(block=32)
        ... )
        >>> [batch.tokens.shape for batch in found]
        [(1, 4)]
    """
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

    Example:
        >>> import models
        >>> from evals import evaluator, tasks
        >>> model, tokenizer = models.load("retriever")
        >>> settings = [
        ...     evaluator.Setting("tova", budget, "prompt", "known")
        ...     for budget in (32, 64)
        ... ]
        >>> prompts = [tasks.needle(0, tokenizer, 128, facts=2)]
        >>> found = evaluator.answers_each(
        ...     model, prompts, settings, new_tokens=4, feed=evaluator.Feed(block=32)
        ... )
        >>> [(setting.budget, batch.tokens.shape) for setting, batch in found]
        [(32, (1, 4)), (64, (1, 4))]
    """
    asked_of = _Asked(model, prompts, new_tokens, feed, end, width)
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
            for fed, clock, steps in asked_of.begun(setting, wanted[setting]):
                yield setting, asked_of.taken(setting, fed, clock, steps)
            continue
        union = sorted(set().union(*(wanted[setting] for setting in together)))
        for number, fed in enumerate(asked_of.fed(together, union)):
            asked = [setting for setting in together if set(fed.rows) & set(wanted[setting])]
            begun = time.perf_counter()
            each = asked_of.prefilled(asked, fed.tokens, fed.lengths, fed.questions)
            seconds = 0.0
            for setting, prefilled in zip(asked, each, strict=True):
                make_room()
                clock = _BatchClock(fed.prompt_tokens, len(fed.rows))
                prefilled.logits.block_until_ready()
                seconds = seconds or time.perf_counter() - begun  # the prompt runs before the first setting's result
                if number:  # the first batch may compile
                    clock.prefill = (float(fed.prompt_tokens), seconds)
                steps = models.stream(
                    model, prefilled, policy=setting.policy, budget=setting.budget, networks=feed.aids.of(setting),
                    block=feed.block, max_new_tokens=new_tokens, when=setting.when, evict_every=setting.evict_every,
                    question=fed.questions, end=end, fit_prompt=True, **feed.drawn(fed.rows),
                )  # fmt: skip
                yield setting, asked_of.taken(setting, fed, clock, steps)


def sharing(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Group the settings that share a prompt's prefill.

    They ask the same question, have caches of one dtype, evict nothing before the end of the prompt, and re-rotate no
    key. A setting that is given twice is answered once.

    Example:
        >>> from evals.evaluator import Setting, sharing
        >>> found = sharing(
        ...     [
        ...         Setting("h2o", b, when, "known")
        ...         for b in (16, 32)
        ...         for when in ("block", "prompt")
        ...     ]
        ... )
        >>> [
        ...     [(setting.budget, setting.when) for setting in together]
        ...     for together in found
        ... ]
        [[(16, 'block')], [(16, 'prompt'), (32, 'prompt')], [(32, 'block')]]
    """
    together: dict[tuple[Any, ...], list[Setting]] = {}
    for setting in dict.fromkeys(settings):
        policy = setting.evicting
        late = policy is None or setting.moments[0] == "prompt"
        shares = (
            setting.select is None
            and late
            and (policy is None or (policy.positions == "absolute" and policy.heads != "query"))
        )
        together.setdefault((setting.question, setting.cache_dtype) if shares else (setting,), []).append(setting)
    return list(together.values())


def saved(settings: Sequence[Setting], samples: int) -> str | None:
    """Return a sentence that says how many prompts were saved by sharing, or None where none was.

    Args:
        samples: the number of samples per setting.

    Example:
        >>> from evals.evaluator import Setting, saved
        >>> saved(
        ...     [Setting("h2o", budget, "prompt", "known") for budget in (16, 32, 64)],
        ...     20,
        ... )
        'shared prompts: 20 went through the model in place of 60'
    """
    passes = len(sharing(settings))
    if passes == len(settings):
        return None
    return f"shared prompts: {passes * samples:,} went through the model in place of {len(settings) * samples:,}"


def check_answers(
    model: models.Decoder,
    prompts: Sequence[Prompt],
    setting: Setting,
    *,
    new_tokens: int,
    block: int = 128,
    batch: int = 16,
    width: int = 0,
    aids: Aids = NO_AIDS,
) -> None:
    """Raise the errors that :func:`answers` would raise under a setting, without a step of the model.

    Raises:
        ValueError: the budget is too small for a prompt, the model does not take the prompts, or the mesh does not
            divide the rows.

    Example:
        >>> import models
        >>> from evals import evaluator, tasks
        >>> model, tokenizer = models.load("retriever")
        >>> setting = evaluator.Setting("snapkv", 0.1, "block", "known")
        >>> evaluator.check_answers(
        ...     model, [tasks.needle(0, tokenizer, 128, facts=2)], setting, new_tokens=4
        ... )
        Traceback (most recent call last):
        ...
        ValueError: the budget is ... tokens, but 'snapkv' always keeps 0 first and 32 last ones: give at least ...
    """
    sizes: list[Callable[[Prompt], int]] = [lambda p: len(p.tokens), _question_length, lambda p: p.context_end]
    each = range(len(prompts))
    rows = {end(each, key=lambda row: size(prompts[row])) for size in sizes for end in (min, max)}
    feed = Feed(block, batch, aids)
    for _ in _Asked(model, prompts, new_tokens, feed, (), width).begun(setting, sorted(rows)):
        pass


class _Fed(NamedTuple):
    """One batch as the model is fed it: some rows of the prompts, and others that fill it up to its size."""

    rows: list[int]
    tokens: np.ndarray
    lengths: np.ndarray  # of what is read together: prompts, or contexts
    questions: np.ndarray | None  # lengths of the questions that are held back

    @property
    def prompt_tokens(self) -> int:
        return int(self.lengths[: len(self.rows)].sum())


@dataclasses.dataclass(frozen=True)
class _Asked:
    """The prompts, and how they are answered under any setting; see :func:`answers_each`."""

    model: models.Decoder
    prompts: Sequence[Prompt]
    new_tokens: int
    feed: Feed
    end: tuple[int, ...] | None
    width: int

    @property
    def block(self) -> int:
        return self.feed.block

    @property
    def batch(self) -> int:
        return self.feed.batch

    @property
    def aids(self) -> Aids:
        return self.feed.aids

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
            batches(self.model, range(len(contexts)), max(1, self.batch // each))
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
            begun, seconds = time.perf_counter(), 0.0
            for setting, kept in self.read(asked, fed, counts, clock):
                make_room()
                jax.block_until_ready(kept)
                seconds = seconds or time.perf_counter() - begun  # the text is read before the first setting's result
                if number:  # the first batch may compile
                    clock.prefill = (float(clock.prompt_tokens), seconds)
                cache = kvjax.repeat(kept, each)
                steps = models.stream(
                    self.model, questions, lengths=np.array([len(tails[row]) for row in rows]), cache=cache,
                    block=self.block, max_new_tokens=self.new_tokens, end=self.end, fit_prompt=True,
                    **self.feed.drawn(told),
                )  # fmt: skip
                yield setting, self.taken(setting, _Fed(told, questions, counts, None), clock, steps)
                clock = _BatchClock(clock.prompt_tokens, len(told))

    def read(
        self, settings: Sequence[Setting], tokens: np.ndarray, lengths: np.ndarray, clock: _BatchClock
    ) -> Iterator[tuple[Setting, Cache]]:
        """Read contexts under settings that share them, and yield what each keeps."""
        if len(settings) > 1:
            each = self.prefilled(settings, tokens, lengths, None)
            yield from ((setting, prefilled.cache) for setting, prefilled in zip(settings, each, strict=True))
            return
        (setting,) = settings
        ((_, cache),) = models.stream(
            self.model, tokens, lengths=lengths, policy=self.aids.policy(setting), budget=setting.budget,
            networks=self.aids.of(setting), when=setting.when, block=self.block, cache_dtype=setting.cache_dtype,
            max_new_tokens=1, evict_every=0, end=(), on_block=clock.block, fit_prompt=True,
        )  # fmt: skip
        yield setting, without_room(stacked_up(cache))

    def prefilled(
        self, settings: Sequence[Setting], tokens: np.ndarray, lengths: np.ndarray, questions: np.ndarray | None
    ) -> Iterator[models.Prefilled]:
        """Run prompts once for settings that share them."""
        return models.prefill_each(
            self.model, tokens, lengths, policies=[(self.aids.policy(setting), setting.budget) for setting in settings],
            when="prompt", block=self.block, question=questions, networks=self.aids.networks,
            cache_dtype=settings[0].cache_dtype,
        )  # fmt: skip

    def fed(self, settings: Sequence[Setting], rows: Sequence[int]) -> Iterator[_Fed]:
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
        for chosen, filled in batches(self.model, rows, self.batch, of=len(prompts)):
            fed = [prompts[row] for row in filled] + extremes
            counts = np.array([len(prompt.tokens) for prompt in fed])
            questions = np.array([_question_length(prompt) for prompt in fed]) if held_back else None
            yield _Fed(chosen, padded([prompt.tokens for prompt in fed], self.longest), counts, questions)

    def begun(
        self, setting: Setting, rows: Sequence[int]
    ) -> Iterator[tuple[_Fed, _BatchClock, Iterator[tuple[np.ndarray, Any]]]]:
        """Yield each batch, its clock, and its checked steps, none of which has run yet."""
        for fed in self.fed([setting], rows):
            clock = _BatchClock(fed.prompt_tokens, len(fed.rows))
            steps = models.stream(
                self.model, fed.tokens, lengths=fed.lengths, policy=self.aids.policy(setting), budget=setting.budget,
                select=setting.select, networks=self.aids.of(setting), block=self.block, max_new_tokens=self.new_tokens,
                when=setting.when, evict_every=setting.evict_every, question=fed.questions, end=self.end,
                cache_dtype=setting.cache_dtype, on_block=clock.block, fit_prompt=True,  # bytes are those of its need
                **self.feed.drawn(fed.rows),
            )  # fmt: skip
            yield fed, clock, steps

    def taken(self, setting: Setting, fed: _Fed, clock: _BatchClock, steps: Iterator[tuple[np.ndarray, Any]]) -> Batch:
        """Run the steps of one batch under one setting, and return what it answered."""
        generated = np.full((len(fed.tokens), self.new_tokens), -1, np.int32)
        for step, (token, kept) in enumerate(steps):
            generated[:, step] = token
            clock.token()
            cache = kept
        size, peak = cache.nbytes // len(fed.tokens), clock.most // len(fed.lengths)
        if (policy := setting.evicting) is None or setting.moments[0] == "prompt":  # what has all tokens, without room
            again = fed.lengths - (0 if fed.questions is None else fed.questions)  # what a policy may have repeated
            held = self.longest + self.new_tokens
            if policy is not None:
                held = max(held, int(again.max()) + copied(policy, int(again.max())))
            each = sum(leaf.nbytes for leaf in jax.tree.leaves(cache) if _per_slot(leaf, cache.position))
            needed = cache.nbytes - each + each // cache.position.size * math.prod(cache.heads_shape) * held
            peak = needed // len(fed.tokens)
            size = min(size, peak) if policy is None else size
        told = generated[: len(fed.rows)], size, max(size, peak)
        return Batch(fed.rows, *told, clock.prefill, clock.decode)


def _per_slot(leaf: Any, position: Any) -> bool:
    """Return whether an array of a cache, or of one of its layers, has an entry for each slot."""
    return position.shape in (leaf.shape[: position.ndim], (len(position), *leaf.shape[: position.ndim - 1]))


def padded(sequences: Sequence[Sequence[int]], width: int = 0) -> np.ndarray:
    """Return sequences of tokens as rows of ``width`` tokens or more, filled up with zeros.

    Example:
        >>> from evals import evaluator
        >>> evaluator.padded([[5], [6, 7]]).tolist()
        [[5, 0], [6, 7]]
    """
    tokens = np.zeros((len(sequences), max(width, *map(len, sequences))), np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    return tokens


def batches(
    model: models.Decoder, rows: Sequence[int], batch: int, of: int = 0
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the rows of each batch, and the rows that are fed: a last batch is filled up with its first row.

    All batches have one size, so they share a compiled program: the smallest that needs no more batches, or on several
    devices, which divide a batch, the one that was given.

    Args:
        of: the number of all rows, from which the size follows, if some of them are answered already.

    Example:
        >>> import models
        >>> from evals import evaluator
        >>> model, _ = models.load("retriever")
        >>> list(evaluator.batches(model, [7, 8, 9, 5, 6], batch=4))
        [([7, 8, 9], [7, 8, 9]), ([5, 6], [5, 6, 5])]
    """
    count, size = max(len(rows), of, 1), batch
    if len(model.embedding[...].sharding.device_set) == 1:
        size = -(-count // -(-count // batch))
    for start in range(0, len(rows), size):
        make_room()
        chosen = list(rows[start : start + size])
        yield chosen, chosen + chosen[:1] * (size - len(chosen))


def check_groups(
    model: models.Decoder,
    groups: Sequence[Group],
    settings: Sequence[Setting],
    *,
    block: int = 128,
    batch: int = 16,
    aids: Aids = NO_AIDS,
) -> None:
    """Check that :func:`run` can answer all groups, before the first step of the model.

    Raises:
        ValueError: samples cannot be drawn, or :func:`check_answers` fails.
    """
    for group in groups:
        samples = group.few()
        for setting in settings:
            if setting.question in group.questions:
                check_answers(
                    model, samples, setting, new_tokens=group.new_tokens, block=block, batch=batch,
                    width=_width(group), aids=aids,
                )  # fmt: skip


def _width(group: Group) -> int:
    return 0 if group.length is None else group.length - group.new_tokens


def run(
    model: models.Decoder,
    tokenizer: models.Tokenizer,
    groups: Sequence[Group],
    settings: Sequence[Setting],
    store: results.Results,
    *,
    labels: Mapping[str, Any] | None = None,
    progress: tqdm = QUIET,
    feed: Feed = FEED,
) -> None:
    """Answer the samples that ``store`` does not hold yet, and add a record for each, batch by batch.

    Args:
        labels: fields that every record gets beside its sample and setting, such as the model's name.
    """
    for group in groups:
        asked = [setting for setting in settings if setting.question in group.questions]
        about, missing = unanswered(group, asked, store, labels or {})
        progress.update(sum(group.size - len(rows) for rows in missing.values()))
        if not any(missing.values()):
            continue
        samples = group.draw()
        end = model.config.eos if group.end is None else group.end
        for setting, found in answers_each(
            model, samples, [setting for setting in asked if missing[setting]], new_tokens=group.new_tokens,
            end=end, rows=missing, width=_width(group), feed=feed,
        ):  # fmt: skip
            new = [(place, row) for place, row in enumerate(found.rows) if row in missing[setting]]
            store.add(
                _record(group, samples[row], about[setting], row, found, place, tokenizer, end) for place, row in new
            )
            progress.set_description(f"{group.task}, {setting.title()}")
            progress.update(len(new))


def unanswered(
    group: Group, settings: Sequence[Setting], store: results.Results, labels: Mapping[str, Any]
) -> tuple[dict[Setting, dict[str, Any]], dict[Setting, list[int]]]:
    """Return the fields that all records of a setting share, and the samples that ``store`` does not hold yet."""
    of_group = {**labels, "task": group.task, "length": group.length}
    about = {setting: {**of_group, **setting.row()} for setting in settings}
    missing = {
        setting: [row for row in range(group.size) if not store.holds({**fields, "sample": row})]
        for setting, fields in about.items()
    }
    return about, missing


def summarise(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per setting and length: the mean of the tasks' means, its 95% interval, and each task's mean.

    The interval is Wilson's over all samples; for scores between 0 and 1 it is conservative. Where records have a
    text's "loss", rows have the "perplexity" of the texts, and its "increase" over the full cache's on the same texts.

    Example:
        >>> from evals import evaluator
        >>> rows = [
        ...     dict(
        ...         task="vt", length=64, policy="full", budget=None, when="block",
        ...         question="known", sample=i, score=score, cache_bytes=8,
        ...         peak_cache_bytes=8, prefill=[0, 0], decode=[6, 2.0]
        ...     )
        ...     for i, score in enumerate([1.0, 0.5])
        ... ]
        >>> row = evaluator.summarise(rows)[0]
        >>> row["score"], row["tasks"], row["decode_tokens_per_second"]
        (0.75, {'vt': {'score': 0.75, 'samples': 2}}, 3.0)
    """
    collected: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        collected.setdefault(tuple(record.get(name) for name in results.ROW), []).append(record)
    rows = []
    losses = {key: {r["text"]: r["loss"] for r in found if "loss" in r} for key, found in collected.items()}
    for key, found in collected.items():
        scores: dict[str, list[float]] = {}
        for record in found:
            scores.setdefault(record["task"], []).append(record["score"])
        means = {task: sum(values) / len(values) for task, values in scores.items()}
        mean = sum(means.values()) / len(means)
        low, high = statistics.wilson(mean * len(found), len(found))
        rows.append(
            {
                **dict(zip(results.ROW, key, strict=True)),
                "evicts": found[0].get("evicts"),
                "score": mean,
                "low": low,
                "high": high,
                "samples": len(found),
                "cache_bytes": round(sum(r["cache_bytes"] for r in found) / len(found)),
                "peak_cache_bytes": round(sum(r["peak_cache_bytes"] for r in found) / len(found)),
                "prefill_tokens_per_second": per_second([r["prefill"] for r in found]),
                "decode_tokens_per_second": per_second([r["decode"] for r in found]),
                "tasks": {task: {"score": means[task], "samples": len(scores[task])} for task in means},
                **_perplexity(losses[key], losses.get((*key[:3], "full", None, "block", key[6]), {})),
            }
        )
    return rows


def _perplexity(losses: Mapping[int, float], full: Mapping[int, float]) -> dict[str, Any]:
    """Return a row's perplexity, and its increase over that of the full cache with its 95% interval over texts."""
    if not losses:
        return {}
    told: dict[str, Any] = {"perplexity": math.exp(sum(losses.values()) / len(losses))}
    more = [loss - full[text] for text, loss in losses.items() if text in full]
    if not more or losses is full:
        return told
    mean, low, high = (math.exp(x) - 1 for x in statistics.paired_interval(more))
    several = len(more) > 1
    return told | dict(increase=mean, increase_low=low if several else None, increase_high=high if several else None)


def compare(records: Sequence[dict[str, Any]], against: str = RECENCY) -> list[dict[str, Any]]:
    """Compare each policy with those of :func:`evals.report.pairs`, on the same samples."""
    scores: dict[tuple[Any, ...], dict[tuple[Any, ...], float]] = {}
    for record in records:
        setting = tuple(record.get(name) for name in results.ROW)
        scores.setdefault(setting, {})[record["task"], record["sample"]] = record["score"]
    settings = [{**dict(zip(results.ROW, setting, strict=True)), "found": found} for setting, found in scores.items()]
    rows = []
    for row, other in report.pairs(settings, against, ("model", "evaluation", "length", "question")):
        if both := [sample for sample in row["found"] if sample in other["found"]]:
            told = {"policy": row["policy"], "against": other["policy"]}
            told |= {name: row[name] for name in results.ROW if name != "policy"}
            rows.append(told | statistics.compared([row["found"][s] - other["found"][s] for s in both]))
    return rows


def task_map(rows: Sequence[dict[str, Any]], path: Path, *, title: str, short: Mapping[str, str]) -> None:
    """Draw each policy's score in each task as colour and number, one panel per moment, budget and length."""
    plt = report.pyplot()
    where = lambda r: (r["model"], r["evaluation"], r["length"], r["question"], r["when"], r["budget"])  # noqa: E731
    groups = list(dict.fromkeys(where(r) for r in rows if r["budget"] is not None)) or [where(rows[0])]
    tasks = list(dict.fromkeys(task for r in rows for task in r["tasks"]))
    shown = [
        [r for r in rows if where(r) == group or (r["budget"] is None and where(r)[:4] == group[:4])]
        for group in groups
    ]
    figure, axes = plt.subplots(
        len(groups), 1, figsize=(3.4 + 0.62 * len(tasks), 0.9 + sum(0.95 + 0.3 * len(found) for found in shown)),
        squeeze=False, layout="constrained", height_ratios=[0.95 + 0.3 * len(found) for found in shown],
    )  # fmt: skip
    for axis, group, found in zip(axes[:, 0], groups, shown, strict=True):
        none = {"score": np.nan}
        grid = np.array([[r["score"], *(r["tasks"].get(task, none)["score"] for task in tasks)] for r in found])
        axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        for (row, column), value in np.ndenumerate(grid):
            if not np.isnan(value):
                axis.text(
                    column, row, f"{value:.2f}", ha="center", va="center", fontsize=7,
                    color="black" if value > 0.6 else "white", fontweight="bold" if column == 0 else "normal",
                )  # fmt: skip
        axis.set_xticks(range(len(tasks) + 1), ["mean", *(short.get(task, task) for task in tasks)], fontsize=7)
        axis.set_yticks(range(len(found)), [_named(r) for r in found], fontsize=7)
        axis.tick_params(length=0)
        for spine in axis.spines.values():
            spine.set_visible(False)
        length = "" if group[2] is None else f"{group[2]:,} tokens, "
        axis.set_title(f"{length}{report.moment(group[3:])}", fontsize=8.5)
    figure.suptitle(title, fontsize=11)
    report.save(figure, path)


def _named(row: Mapping[str, Any]) -> str:
    more = "" if "increase" not in row or row["budget"] is None else f", perplexity {row['increase']:+.1%}"
    return f"{row['policy']}{more}"


def add_model_flags(flags: argparse.ArgumentParser) -> None:
    """Add the flags of every evaluation: the model, and how it is run."""
    flags.add_argument("--model", default="retriever", help="'retriever', a Hugging Face folder, or a hub name")
    flags.add_argument("--block", type=int, default=128, help="prompt tokens per step")
    flags.add_argument("--batch", type=int, default=16, help="samples answered at once")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--dtype", help="float32, bfloat16 (slow on a CPU) or float16; by default the checkpoint's")
    run_flags.add_mesh_flags(flags)
    flags.add_argument("--json", type=Path, help="write all figures here")
    flags.add_argument("--plot", type=Path, help="write the picture here (.png, .svg or .pdf)")


def add_setting_flags(
    flags: argparse.ArgumentParser,
    *,
    budgets: str = "256,512",
    when: str = "block,prompt",
    questions: Sequence[str] = KNOWN_OR_NOT,
) -> None:
    """Add the flags that :func:`make_settings` reads."""
    flags.add_argument(
        "--policies",
        default=",".join(POLICIES),
        help="several by comma; 'full' keeps all tokens; 'select=quest' keeps all, and a step reads a budget of them",
    )
    flags.add_argument(
        "--allocations",
        default="",
        help="how slots are divided among heads, such as uniform,adakv; every policy runs with each; several by comma",
    )
    add_against_flag(flags)
    commands.add_networks_flag(flags)
    flags.add_argument(
        "--budgets", "--budget", default=budgets, help="slots per head, or ratios of the prompt; several by comma"
    )
    flags.add_argument(
        "--when", default=when, help="block, prompt, or published (as in each policy's paper); several by comma"
    )
    flags.add_argument(
        "--evict-every",
        type=int,
        help="evict every n decode steps, 0 for never (default: every step, or once per observation window)",
    )
    commands.add_cache_dtype_flag(flags)
    before = [name for name in questions if name not in KNOWN_OR_NOT]
    flags.add_argument(
        "--question",
        default="known",
        help="known when the context is compressed, or unknown (it comes later)"
        f"{''.join(f', or {name}' for name in before)}; several by comma",
    )


def add_against_flag(flags: argparse.ArgumentParser) -> None:
    """Add --against, which :func:`baseline` reads."""
    flags.add_argument(
        "--against",
        metavar="POLICY",
        help="the policy, 'full' or a selection that each policy is compared with on the same samples; it is run, too "
        f"(default: {RECENCY})",
    )


def baseline(flags: argparse.Namespace) -> str:
    """Return the full name of what each policy is compared with: that of ``--against``, else recency.

    Example:
        >>> import argparse
        >>> from evals import evaluator
        >>> flags = argparse.Namespace(against="select=quest")
        >>> evaluator.baseline(flags), evaluator.baseline(argparse.Namespace())
        ('select=quest', 'recency')
    """
    name = getattr(flags, "against", None)
    return RECENCY if name is None else full_name(name)


def full_name(name: str) -> str:
    """Return the full name of a policy, a selection or "full"."""
    if _selects(name):
        return READS + str(kvjax.parse_source(name.removeprefix(READS)))
    return "full" if name == "full" else str(kvjax.parse(name))


def make_settings(flags: argparse.Namespace, questions: Sequence[str] = PLACEMENTS) -> list[Setting]:
    """Return every combination that the flags ask for, checked; the full cache has neither budget nor moment."""
    moments: Any
    asked: Any
    asked_for = commands.listed("policy", flags.policies, "--policies full,snapkv+caote")
    against = None if getattr(flags, "against", None) is None else baseline(flags)
    reading = [full_name(name) for name in asked_for if _selects(name)]
    policies = [name for name in asked_for if not _selects(name)]
    if against is not None and _selects(against):
        reading.append(against)
    elif against is not None:
        policies.append(against)
    budgets = [commands.parse_budget(text) for text in commands.split_list(flags.budgets)]
    moments = commands.listed("moment", flags.when, "--when prompt")
    asked = commands.listed("place of the question", flags.question, "--question known")
    check_names("--when", moments, get_args(When))
    check_names("--question", asked, questions)
    evicting = [str(kvjax.parse(policy)) for policy in policies if policy != "full"]
    evicting = _allocated(evicting, commands.split_list(getattr(flags, "allocations", "")))
    check_budgets([*evicting, *reading], budgets)
    settings, dtype = [], getattr(flags, "cache_dtype", None)
    for question in asked:
        if "full" in policies:
            settings.append(Setting("full", None, "block", question, cache_dtype=dtype))
        for name, budget in itertools.product(dict.fromkeys(reading), budgets):
            settings.append(Setting(name, budget, "block", question, cache_dtype=dtype))
        for when, budget in itertools.product(moments, budgets):
            for policy in dict.fromkeys([RECENCY, *evicting] if evicting else []):
                settings.append(Setting(policy, budget, when, question, getattr(flags, "evict_every", None), dtype))
    for setting in settings:
        _ = setting.moments  # raises for moments that cannot be, before any work
    return list(dict.fromkeys(settings))


def _selects(name: str) -> bool:
    return name.startswith(READS)


def refuse_selections(settings: Sequence[Setting], instead: str) -> None:
    """Raise ValueError if a setting is a selection, for an evaluation that cannot answer under one."""
    if found := next((setting.policy for setting in settings if setting.select is not None), None):
        raise ValueError(f"{found} was given, but this evaluation takes eviction policies only; {instead}.")


def check_budgets(policies: Sequence[str], budgets: Sequence[int | float]) -> None:
    """Check before any work that every policy can keep every budget.

    Raises:
        ValueError: there is no budget for policies that need one, or one is smaller than what a policy always keeps.
    """
    if policies and not budgets:
        raise ValueError("no budget was given; name at least one, such as --budgets 256.")
    for policy, budget in itertools.product(policies, budgets):
        if isinstance(budget, int) and not _selects(policy):
            kvjax.check_budget(kvjax.parse(policy), budget)


def check_sizes(flags: argparse.Namespace) -> list[int]:
    """Return the lengths that the flags ask for, after a check of them and of the block and the batch."""
    lengths = [positive("length", text) for text in commands.listed("length", flags.lengths, "--lengths 1024")]
    check_least(flags, block=1, batch=1)
    return lengths


def positive(name: str, text: str) -> int:
    """Return a number of tokens from a command line.

    Raises:
        ValueError: the text is not an integer of at least 1.

    Example:
        >>> from evals import evaluator
        >>> evaluator.positive("length", "512")
        512
    """
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"the {name} {text!r} is not a number of tokens; give an integer from 1.")
    return int(text)


def choose(name: str, text: str, known: Sequence[str], default: Sequence[str] | None = None) -> list[str]:
    """Return the names on a command line in the order of ``known``; 'all' stands for ``default``, or for all.

    Raises:
        ValueError: no name is given, or one is not known.

    Example:
        >>> from evals import evaluator
        >>> evaluator.choose("--tasks", "vt,cwe", ("cwe", "fwe", "vt"))
        ['cwe', 'vt']
    """
    given = commands.listed(f"name for {name}", text, f"{name} {known[0]}")
    check_names(name, given, ("all", *known))
    if "all" in given:
        return list(known if default is None else default)
    return [part for part in known if part in given]


def check_least(flags: argparse.Namespace, **least: int) -> None:
    """Raise ValueError if a flag is below its least value; a flag may be None, or not be there.

    Example:
        >>> import argparse
        >>> from evals import evaluator
        >>> evaluator.check_least(
        ...     argparse.Namespace(new_tokens=1, limit=None), new_tokens=2, limit=1
        ... )
        Traceback (most recent call last):
        ...
        ValueError: --new-tokens is 1; give at least 2.
    """
    for name, value in least.items():
        if (given := getattr(flags, name, None)) is not None and given < value:
            raise ValueError(f"--{name.replace('_', '-')} is {given}; give at least {value}.")


def load(flags: argparse.Namespace) -> tuple[models.Decoder, models.Tokenizer]:
    """Load the model and tokenizer that the flags name.

    Raises:
        ValueError: the model has no tokenizer.
    """
    return load_with_tokenizer(flags.model, dtype=flags.dtype, mesh=run_flags.mesh_of(flags))


def load_with_tokenizer(name: str, **options: Any) -> tuple[models.Decoder, models.Tokenizer]:
    """Load a model and its tokenizer with the options of :func:`models.load`.

    Raises:
        ValueError: the model has no tokenizer.
    """
    model, tokenizer = models.load(name, **options)
    return model, commands.check_tokenizer(name, tokenizer)


def load_aids(
    flags: argparse.Namespace, settings: Sequence[Setting], model: models.Decoder, tokenizer: models.Tokenizer
) -> Aids:
    """Load what the settings need besides the model, from the folders that the flags name or the model's own."""
    return Aids(tokenizer, networks_for(flags, settings, model))


def networks_for(flags: argparse.Namespace, settings: Iterable[Any], model: models.Decoder) -> tuple[Network, ...]:
    """Load the networks of --networks, and the model's own for what else the settings want (``wanted``)."""
    return load_networks(flags.networks, flags.model, model, [one.wanted for one in settings], dtype=flags.dtype)


def describe(flags: argparse.Namespace) -> tuple[models.Config, models.Tokenizer]:
    """Read the config and tokenizer of the model that the flags name, and check them before weights are read.

    Raises:
        ValueError: the model has no tokenizer.
    """
    config, tokenizer = read_description(flags.model, dtype=flags.dtype, mesh=run_flags.mesh_of(flags))
    return config, commands.check_tokenizer(flags.model, tokenizer)


def command(
    flags: argparse.Namespace,
    make_groups: Callable[[argparse.Namespace, models.Config, models.Tokenizer], list[Group]],
    *,
    title: str,
    notes: Callable[[argparse.Namespace], list[str]],
    check: Callable[[argparse.Namespace], None],
    short: Mapping[str, str] | None = None,
    answer: Callable[..., None] | None = None,
    read: Mapping[str, str] | None = None,
) -> None:
    """Run an evaluation made of tasks: check, answer samples, print the table, write JSON and picture.

    With ``--out``, a killed run is resumed.

    Args:
        check: checks the evaluation's own flags before the model is loaded.
        notes: returns the lines below the table, such as the sources of the texts.
        short: the tasks' names in the table.
        answer: answers the groups in place of :func:`run`.
        read: fingerprints of what the samples were made from, beside those of :func:`made_of`.
    """
    settings = make_settings(flags, KNOWN_OR_NOT)
    check_least(flags, block=1, batch=1)
    check(flags)
    report.check_outputs(flags.json, flags.plot)
    store = results.Results(flags.out, flags.name, used(flags), written(flags))
    store.check()
    model, tokenizer = load(flags)
    groups = make_groups(flags, model.config, tokenizer)
    aids = load_aids(flags, settings, model, tokenizer)
    check_groups(model, groups, settings, block=flags.block, batch=flags.batch, aids=aids)
    with store:
        labels = {"evaluation": flags.name, "model": flags.model}
        total = sum(group.size for group in groups) * len(settings)
        fingerprints = made_of(model, tokenizer, aids.networks, groups) | dict(read or {})
        store.check_made_of(labels, fingerprints)
        with commands.progress_bar("sample", total=total) as progress:
            (answer or run)(
                model, tokenizer, groups, settings, store, labels=labels, progress=progress,
                feed=Feed(
                    flags.block, flags.batch, aids, getattr(flags, "temperature", 0.0), getattr(flags, "top_p", None),
                    flags.seed,
                ),
            )  # fmt: skip
            progress.set_description("done")
        together = None if answer else saved(settings, sum(group.size for group in groups))
        remarks = [*notes(flags), *([] if together is None else [together])]
        rows, compared = summarise(store.records), compare(store.records, baseline(flags))
        told = report.task_table(rows, recency=RECENCY, short=short or {}, notes=remarks)
        report.show(told, report.comparison_table(compared))
        figures = {
            **provenance.facts(flags.begun, flags.seed, fingerprints),
            "evaluation": flags.name,
            "title": title,
            "settings": used(flags),
            "notes": remarks,
            "results": rows,
            "comparisons": compared,
        }
        for path in (flags.json, None if flags.out is None else flags.out / "figures.json"):
            if path is not None:
                commands.write_json(path, figures)
                print(f"figures: {path}")
        if flags.plot is not None:
            task_map(rows, flags.plot, title=title, short=short or {})
            print(f"picture: {flags.plot}")


def made_of(
    model: models.Decoder,
    tokenizer: models.Tokenizer,
    networks: Sequence[Network] = (),
    groups: Sequence[Group] = (),
) -> dict[str, str]:
    """Return the fingerprints of everything that figures are made of.

    These are the project's version, the built-in prose, the model, its tokenizer, small networks, the
    records that groups were read from, and :func:`models.provenance.of_process`.

    Example:
        >>> import models
        >>> from evals import evaluator
        >>> sorted(evaluator.made_of(*models.load("retriever")))
        ['config', 'kvjax', 'prose', 'tokenizer', 'weights']
    """
    found = {"kvjax": kvjax.__version__, "prose": prose.digest(), **fingerprints.fingerprints(model, tokenizer)}
    found |= provenance.of_process(tokenizer)
    for network in networks:
        found[network.name] = fingerprints.weights(network, network.shapes(network.config))
    if any(group.data for group in groups):
        found["data"] = fingerprints.digest([[group.task, group.data] for group in groups])
    return found


def settings(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the flags in JSON's types."""
    given = {name: value for name, value in vars(flags).items() if name != "begun"}
    return {name: _plain(value) for name, value in given.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def used(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that decide the figures, in JSON's types, with digests of the files and folders they name."""
    plain: dict[str, Any] = {}
    for name, value in vars(flags).items():
        if name in FREE:
            continue
        several = value if isinstance(value, list) else [value]
        paths = [Path(path) for path in several if isinstance(path, Path) or (name == "data" and path is not None)]
        plain[name] = [str(path) for path in several] if isinstance(value, list | Path) else value
        if paths:
            plain[f"{name} holds"] = [results.fingerprint(path) for path in paths]
    return plain


def written(flags: argparse.Namespace, package: str = "evals") -> str:
    """Return the command line that reproduces these flags."""
    line = ["python", "-m", package, flags.name]
    for name, value in vars(flags).items():
        if name in ("name", "begun", "out", "json", "plot") or value is None or value is False:
            continue
        line.append(f"--{name.replace('_', '-')}")
        if value is not True:
            line += [str(part) for part in value] if isinstance(value, list) else [str(value)]
    return commands.shell_line(line)


def _allocated(policies: Sequence[str], allocations: Sequence[str]) -> list[str]:
    """Return every policy that names no allocation with each of ``allocations``, and the others as they are."""
    if not allocations:
        return list(policies)
    names = [str(parse_allocation(name).name) for name in allocations]
    found = []
    for policy in policies:
        whole = [policy] if "@" in policy else [policy if n == "uniform" else f"{policy}@{n}" for n in names]
        found += [str(kvjax.parse(name)) for name in whole]
    return list(dict.fromkeys(found))


def _record(
    group: Group,
    sample: Any,
    about: Mapping[str, Any],
    row: int,
    found: Batch,
    place: int,
    tokenizer: models.Tokenizer,
    end: tuple[int, ...],
) -> dict[str, Any]:
    tokens = found.tokens[place].tolist()
    tokens = tokens[: tokens.index(-1)] if -1 in tokens else tokens
    said = tokens[:-1] if tokens and tokens[-1] in end else tokens
    answer = Answer(said, tokenizer.decode(said))
    return {
        **about,
        "sample": row,
        "score": float(group.score(answer, sample)),
        "answer": answer.text,
        "prompt_tokens": len(sample.tokens),
        "new_tokens": len(tokens),
        "cache_bytes": found.cache_bytes,
        "peak_cache_bytes": found.peak_cache_bytes,
        "prefill": [x / len(found.rows) for x in found.prefill],
        "decode": [x / len(found.rows) for x in found.decode],
    }


def per_second(parts: Sequence[tuple[float, float]]) -> float | None:
    """Return the tokens per second of several pairs of tokens and seconds, or None where no second was measured."""
    tokens, seconds = (sum(part[index] for part in parts) for index in (0, 1))
    return tokens / seconds if seconds else None


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
