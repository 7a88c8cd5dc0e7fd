"""One call for a document and its questions: it is read and compressed once, then each question is answered."""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np
from jaxtyping import Array

import kvjax
import models
from kvjax import Policy
from kvjax._src.chains import policy_of
from kvjax._src.policy_checks import check_policy_given
from kvjax._src.split_cache import ModelCache
from models import files, selecting
from models.decoder import Decoder
from models.driver import OnBlock
from models.networks import Networks, own_folder, several, shipped
from models.options import AskSettings, Options, options_of
from models.progress import Progress
from models.prompts import kept_of
from models.sampling import Draws, Repetition, Sampling, check_sampling
from models.sizing import checked_budget, full_cache_bytes, share_of
from models.states import without_room
from models.tokenizer import Tokenizer

# What answers like the full cache where no question is known (docs/results/fixed-memory.json): AUTO stands for the gate
# of a model that has one, for POLICY otherwise.
AUTO, GATE, POLICY, BUDGET = "auto", "gate", "repeat", 0.25
OPTIONS = Options(max_new_tokens=128)
UNNOTICED = 2**20  # bytes of caches, more or less, that nobody is warned of
FEW = 0.1  # the largest share of a document of which a warning says that little is answered from it
BETWEEN = "\n\n"  # the document and a question
MARK = "kvjaxtextstandshere"  # a placeholder that shows what a template puts around a message


class Answers(NamedTuple):
    """Holds what :func:`ask` found.

    Attributes:
        answers: the text of each answer, in the order of the questions.
        cache: the compressed cache of the document alone, which :func:`ask` takes in the document's place.
        document_tokens: how many tokens it has seen.
        cache_bytes: its size.
        full_cache_bytes: the size of a cache of all these tokens.
        peak_cache_bytes: the most that caches took at once: while the document was read, or as a question was answered
            in a copy beside the kept cache.
        seconds: to read and compress the document, with compilation; 0 if a cache was given.
        answer_seconds: for each question, likewise; of questions that were answered at once, each one's share.
        seen: which tokens of the vocabulary the document has, [1, V], as :class:`Draws` takes them; None if that is not
            known.
        policy: the name of the policy by which the document was compressed, None if a cache was given.
        repeated: for each answer, whether it was ended because it repeated itself.
    """

    answers: list[str]
    cache: ModelCache
    document_tokens: int
    cache_bytes: int
    full_cache_bytes: int
    peak_cache_bytes: int
    seconds: float
    answer_seconds: list[float]
    seen: np.ndarray | None = None
    policy: str | None = None
    repeated: tuple[bool, ...] = ()


class Watch(NamedTuple):
    """Holds functions that :func:`ask` calls, and when it ends an answer.

    ``on_block`` is called while the document is read, as by :func:`models.stream`; ``on_text`` with each piece of an
    answer, as it comes, or with each whole answer where several are made at once. An answer that says the same three
    times or more is ended, as in ``python -m models.chat``, unless ``may_repeat`` lets it go on.
    """

    on_block: OnBlock | None = None
    on_text: Callable[[str], None] | None = None
    may_repeat: bool = False


NO_WATCH = Watch()
_HERE = (os.path.dirname(__file__) + os.sep,)  # so that a warning names the line that called this package


def ask(
    model: Decoder,
    tokenizer: Tokenizer,
    document: str | Path | ModelCache,
    questions: str | Sequence[str],
    *,
    options: Options | None = None,
    system: str | None = None,
    key: Array | Draws | None = None,
    watch: Watch = NO_WATCH,
    **settings: Unpack[AskSettings],
) -> Answers:
    """Read a document, compress it once, and answer each question from the cache that is kept.

    Document and question are one message of the user in the model's chat template, with an empty line between them; the
    template is cut behind the document. The document is compressed before any question comes. Each is answered in
    a copy of the same cache, in which nothing more is evicted: it grows by the question and its answer.

    Args:
        document: the text, a ``pathlib.Path`` of a file that holds it, or the ``cache`` of an earlier result (or of
            ``kvjax.load_cache``), which is asked again without being read; what concerns the cache then
            changes nothing.
        questions: one question or several; none at all to read the document only.
        options, settings: what to keep, and how to answer; see :class:`Options`. By default at most 128 tokens of an
            answer. The policy is "auto" where neither names one: ``gate`` if a gate is given or ships for the model,
            else ``repeat``, which reads each block of the document twice (docs/how-to/choose-a-policy.md). Of questions
            asked freely a small model answers few, whatever is kept (docs/results/questions.md). A policy without a
            budget keeps a quarter; of a short document a share is at least what the policy protects. "full" keeps all.
            ``batch`` questions are answered at once, which takes as many copies of the cache, twice while they are
            made.
        system: the text of the system message; by default that of the template, if it has one.
            A tokenizer without a template (:meth:`models.Tokenizer.plain`) leaves the template out.
        key: draws the tokens of the answers where the temperature is above 0; :class:`Draws` says with it what a cache
            has seen.
        watch: functions that are called while the document is read, and with each piece of an answer, and whether an
            answer that repeats itself is ended.

    Raises:
        TypeError: a question is no text.
        ValueError: an empty document or question; a chat template that changes them; a policy that scores by a
            predictor, whose memory is not kept; or what :func:`models.prefill` and :func:`models.generate` refuse.

    Example:
        >>> import models
        >>> model, tokenizer = models.load("retriever")
        >>> document = "The code of amber falcon is 4719. The river was calm. "
        >>> document += "The code of silver anchor is 0382."
        >>> question = "Question: what is the code of amber falcon?\\n"
        >>> question += "Answer: the code of amber falcon is"
        >>> found = models.ask(
        ...     model, tokenizer, document, question, policy="keydiff", budget=24,
        ...     block=16, max_new_tokens=4
        ... )
        >>> found.answers
        [' 4719']
    """
    form = Form.of(tokenizer, system)
    tails = [form.question(text) for text in _listed(questions)]
    begun, peak = time.monotonic(), 0
    options = options_of("ask", AskSettings, OPTIONS if options is None else options, settings)
    key, given = key if isinstance(key, Draws) else Draws(key)
    if tails:
        check_sampling(key, **{name: getattr(options, name) for name in Sampling._fields})
    seen, name = None if given is None else np.asarray(given), None
    shown = Progress(quiet=not options.progress)
    options = dataclasses.replace(options, progress=False)  # what is read and answered shows nothing of its own
    with shown:
        if isinstance(document, Path):
            document = files.read_text(document, "document")
        if isinstance(document, str):
            tokens = form.document(document)
            reads = _as_read(model, options, tokenizer, len(tokens))
            _check_room(model, reads.policy, len(tokens), max(map(len, tails), default=0) + options.max_new_tokens)
            name = "full" if reads.policy is None else str(reads.policy)
            seen = np.isin(np.arange(model.config.vocab_size), tokens)[None]
            cache, peak = _read(model, tokens, reads, watch.on_block, shown)
            seconds = time.monotonic() - begun
        else:
            cache, seconds = document, 0.0
        kept = kept_of(model, cache, None, 1)
        answers, took, repeated = [], [], []
        for first in range(0, len(tails), options.batch):
            group, begun = tails[first : first + options.batch], time.monotonic()
            last = first + len(group)
            which = f"answering question{f's {first + 1} to' * (len(group) > 1)} {last} of {len(tails)}"
            of_rows = None if seen is None else np.repeat(seen, len(group), axis=0)
            drawn = Draws(None if key is None else jax.random.fold_in(key, first), of_rows)

            def note(count: int, which: str = which) -> None:
                shown.at(which, count, options.max_new_tokens, "token")

            said, stopped, size = _answer(model, tokenizer, cache, group, options, drawn, watch, note)
            answers += said
            repeated += stopped
            took += [(time.monotonic() - begun) / len(group)] * len(group)
            peak = max(peak, cache.nbytes + size)
    read = int(kept.start[0])
    if tails and (kept.held < read).any():
        room = max(map(len, tails)) + options.max_new_tokens
        _warn_of_peak(peak, full_cache_bytes(model, read + room, kept.dtypes))
    full = full_cache_bytes(model, read, kept.dtypes)
    return Answers(
        answers, cache, read, cache.nbytes, full, max(peak, cache.nbytes), seconds, took, seen, name, tuple(repeated)
    )


def _listed(questions: str | Iterable[str]) -> list[str]:
    listed = list(questions) if isinstance(questions, Iterable) and not isinstance(questions, str) else [questions]
    if not all(isinstance(text, str) for text in listed):
        raise TypeError(f"questions is {questions!r:.80}; expected a text, or a list of texts.")
    return listed


def _as_read(model: Decoder, options: Options, tokenizer: Tokenizer, tokens: int) -> Options:
    """Return the options with which a document of so many tokens is read."""
    asked = automatic(model, options.networks, POLICY) if is_automatic(options.policy) else options.policy
    policy, budget = checked(asked, options.budget, options.block)
    few = budget is not None and (budget if isinstance(budget, float) else budget / tokens) <= FEW
    if few and not str(policy).startswith(GATE):
        warnings.warn(
            f"a budget of {budget} keeps at most a tenth of this document's {tokens:,} tokens, from which "
            "policies other than a gate answer few questions that come later; give 0.25, or measure it on your own.",
            skip_file_prefixes=_HERE,
        )
    if policy is not None and isinstance(budget, float):
        share = int(share_of(np.asarray(tokens), budget))
        budget = budget if sum(policy.protected(share)) <= share else sum(policy.protected(share))
    return dataclasses.replace(options, policy=models.with_repeat_prompt(policy, tokenizer), budget=budget)


def _check_room(model: Decoder, policy: Policy | str | None, document: int, more: int) -> None:
    """Check that a question and its answer may follow a document, before it is read."""
    most, rope = model.config.max_positions, model.config.rope
    whole = f"the document has {document:,} tokens, and a question and its answer take up to {more:,}"
    if policy is None and document + more > most:
        raise ValueError(f"{whole}, but the model has {most:,} positions: shorten it, or give a policy and a budget.")
    turns = rope.original_positions
    if rope.follows_length and document + more > turns and (rope.type == "dynamic" or document <= turns):
        raise ValueError(
            f"{whole}, but this model's rotary frequencies are others for texts beyond {turns:,} tokens, and what was "
            "read with those of a shorter text cannot be asked: shorten the document."
        )


def _read(
    model: Decoder, tokens: list[int], options: Options, on_block: OnBlock | None, shown: Progress
) -> tuple[ModelCache, int]:
    """Read a document, and return its compressed cache and the bytes of the largest one on the way."""
    most = model.config.max_positions
    if options.policy is not None and len(tokens) > most:
        warnings.warn(
            f"the document has {len(tokens):,} tokens, but the model was made for texts of {most:,}; its answers may "
            "be worth little.",
            skip_file_prefixes=_HERE,
        )
    sizes = [0]

    def note(done: int, total: int, cache: ModelCache) -> None:
        sizes.append(cache.nbytes)
        shown.at("reading", done, total, "token")
        if on_block is not None:
            on_block(done, total, cache)

    greedy: dict[str, Any] = dict(max_new_tokens=1, temperature=0.0, repetition_penalty=1.0, evict_every=0)
    ((_, cache),) = models.stream(model, [tokens], options=options, on_block=note, **greedy)
    peak = max(*sizes, cache.nbytes)
    if options.policy is not None:
        _warn_of_peak(peak, full_cache_bytes(model, len(tokens) + options.block, kept_of(model, cache, None, 1).dtypes))
    return without_room(cache, int), peak  # kept for long, and made once


def _answer(
    model: Decoder,
    tokenizer: Tokenizer,
    cache: ModelCache,
    questions: list[list[int]],
    options: Options,
    draws: Draws,
    watch: Watch,
    on_step: Callable[[int], None],
) -> tuple[list[str], list[bool], int]:
    """Answer questions at once, each in a copy of the cache.

    Returns:
        The answers, which were ended because they repeated themselves, and the bytes of all copies.
    """
    ends, on_text = model.config.eos if options.end is None else options.end, watch.on_text or (lambda piece: None)
    nothing_more = dataclasses.replace(
        options, policy=None, budget=None, reading_budget=None, networks=None, cache_dtype=None
    )
    one, rows = len(questions) == 1, range(len(questions))
    copies = cache if one else _copied(cache, len(questions))
    pieces, again = [tokenizer.stream() for _ in rows], [Repetition() for _ in rows]
    said, ended, repeated, size = ["" for _ in rows], [False for _ in rows], [False for _ in rows], 0
    for count, (tokens, grown) in enumerate(
        models.stream(model, questions, options=nothing_more, cache=copies, key=draws), 1
    ):
        size = max(size, grown.nbytes)
        for row in (row for row in rows if not ended[row]):
            token = int(tokens[row])
            piece = "" if token in ends else pieces[row].add(token)
            said[row] += piece
            if one:
                on_text(piece)
            repeated[row] = not watch.may_repeat and again[row].add(token)
            ended[row] = repeated[row] or token in ends
        on_step(count)
        if all(ended):
            break
    for row in rows:
        rest = pieces[row].finish()
        said[row] += rest
        if told := rest if one else said[row]:
            on_text(told)
    return said, repeated, size + (0 if one else copies.nbytes)


_copied = jax.jit(kvjax.repeat, static_argnums=1)


def _warn_of_peak(peak: int, full: int) -> None:
    """Warn if caches took clearly more at once than one of all tokens would."""
    if peak > full + UNNOTICED:
        warnings.warn(
            "caches took more memory at once than one of all tokens would (an answer is made in a copy of what is "
            "kept); give a smaller budget, when='block', or policy='full'.",
            skip_file_prefixes=_HERE,
        )


def is_automatic(policy: Policy | str | None) -> bool:
    """Return whether a policy is left to :func:`automatic`."""
    return policy is None or policy == AUTO


def automatic(
    model: Decoder, networks: Networks, otherwise: str, gate: str = GATE, path: str | Path | None = None
) -> str:
    """Return the policy of a gate if one is given, ships for the model, or is in the folder of its path, or the other.

    Example:
        >>> from models.asking import automatic
        >>> automatic(models.Decoder.tiny(), None, "repeat")
        'repeat'
    """
    if any("score" in network.predicts for network in several(networks)):
        return gate
    found = shipped(model, "gate") if path is None else own_folder(path, model, "gate")
    return otherwise if found is None else gate


def checked(
    policy: Policy | str | None,
    budget: int | float | str | None,
    block: int,
    by_default: tuple[str, int | float] = (POLICY, BUDGET),
) -> tuple[Policy | None, int | float | None]:
    """Return a text's policy and budget after all checks that need no text."""
    policy = policy_of(by_default[0] if is_automatic(policy) else policy)
    if policy is None:
        check_policy_given(policy, budget)
        return None, None
    selecting.check_memory_is_kept(policy, by_default[0])
    return policy, checked_budget(policy, by_default[1] if budget is None else budget, block)


class Form(NamedTuple):
    """Cuts messages as a chat template would; ``before`` is None where there is none."""

    tokenizer: Tokenizer
    system: tuple[dict[str, str], ...] = ()
    before: str | None = None
    after: str = ""

    @classmethod
    def of(cls, tokenizer: Tokenizer, system: str | None) -> Form:
        """Find the text around a message, by the tokenizer's chat template."""
        if tokenizer.chat_template is None:
            if system is not None:
                raise ValueError("a system message needs a chat template, and none is used here; leave system out.")
            return cls(tokenizer)
        form = cls(tokenizer, () if system is None else ({"role": "system", "content": system},))
        before, mark, after = form._rendered(MARK).partition(MARK)
        if not mark or MARK in after:
            raise ValueError("the chat template does not give a message as it is, once; ask with plain text (--plain).")
        return form._replace(before=before, after=after)

    def document(self, text: str) -> list[int]:
        """Return the tokens of a document, with what the template puts before it."""
        text = self._checked("document", text)
        if self.before is None:
            return self.tokenizer.encode(text)
        return self.tokenizer.encode(self.before + text, add_special_tokens=False)

    def question(self, text: str) -> list[int]:
        """Return the tokens of a question behind a document, with the header of the answer."""
        return self.tokenizer.continuation(BETWEEN + self._checked("question", text) + self.after)

    def _checked(self, what: str, text: str) -> str:
        """Return a text without blanks around it, which the template must give as it is."""
        text = text.strip()
        if not text:
            raise ValueError(f"the {what} is empty; give some text.")
        if self.before is not None:
            whole = f"{text}{BETWEEN}{MARK}" if what == "document" else f"{MARK}{BETWEEN}{text}"
            if self._rendered(whole) != self.before + whole + self.after:
                raise ValueError(f"the chat template changes this {what}; ask with plain text (--plain).")
        return text

    def _rendered(self, text: str) -> str:
        return self.tokenizer.chat([*self.system, {"role": "user", "content": text}])
