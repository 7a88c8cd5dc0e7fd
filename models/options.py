"""The settings of a run, apart from what differs from call to call: one value, or keyword arguments."""

from __future__ import annotations

import dataclasses
from typing import Any, TypedDict, get_type_hints

from kvjax import OutputProjection, Policy
from kvjax._src.checks import check_count, check_share_or_tokens, nearest, plain
from kvjax._src.quantise import DtypesLike
from kvjax.schedule import When
from kvjax.sources import Source
from models.networks import Networks

PAGE_SIZE = 16
# Fields that count something: the least that they accept, and what to give.
COUNTS = {
    "block": (1, "a block has at least 1 token"),
    "page_size": (1, "a page has at least 1 slot"),
    "reserve": (0, "give a number of slots, from 0"),
    "max_new_tokens": (1, "ask for at least 1"),
    "batch": (1, "give the number of questions that are answered at once, from 1"),
}


class Settings(TypedDict, total=False):
    """Fields of :class:`Options` as keyword arguments: those that every run has."""

    budget: int | float | str | None
    block: int
    when: When | None
    page_size: int
    cache_dtype: DtypesLike | None
    networks: Networks


class PolicySettings(TypedDict, total=False):
    """Likewise, of a run with one policy."""

    policy: Policy | str | None
    projection: tuple[OutputProjection, ...] | None


class ReadingSettings(TypedDict, total=False):
    """Likewise, of a prompt that is read block by block from its beginning."""

    reading_budget: int | float | str | None


class EachSettings(Settings, total=False):
    """Likewise, of a prompt for several policies."""

    reserve: int


class PromptSettings(EachSettings, PolicySettings, ReadingSettings, total=False):
    """Likewise, of a prompt alone."""


class RequestSettings(TypedDict, total=False):
    """Likewise, of an answer."""

    max_new_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    end: tuple[int, ...] | None


class AskSettings(Settings, PolicySettings, ReadingSettings, RequestSettings, total=False):
    """Likewise, of a document and its questions."""

    progress: bool
    batch: int


class EngineSettings(Settings, PolicySettings, RequestSettings, total=False):
    """Likewise, of requests that come and go."""

    progress: bool
    evict_every: int | None


class DecodeSettings(Settings, PolicySettings, ReadingSettings, total=False):
    """Likewise, of a prompt and the tokens that decode steps feed behind it."""

    evict_every: int | None
    select: Source | str | None
    sinks: int


class AnswerSettings(EngineSettings, DecodeSettings, total=False):
    """Likewise, of a prompt and its answer."""


@dataclasses.dataclass(frozen=True, eq=False)
class Options:
    """Holds the settings of :func:`prefill`, :func:`generate`, :func:`stream` and :class:`Engine`.

    Each of them takes ``options=``, keyword arguments of the same names, or both: the keyword arguments come first. A
    function ignores the fields of ``options`` that it has no use for, such as ``max_new_tokens`` in :func:`prefill`.

    Args:
        policy: what to keep, a policy or its short name; None or "full" keeps all.
        budget: tokens that each head keeps: a number, or a ratio of all that the row has seen (a float in (0, 1], or a
            text such as "25%").
        reading_budget: what each head keeps while a prompt comes in block by block, written like ``budget``, which is
            the default and the least; the last block evicts to ``budget``. What is read beside more tokens is worth
            more: KVzip that keeps a tenth answers half as many facts again if it had a quarter until then.
        block: tokens per step.
        when: evict after every "block", or once after the "prompt" (the block then only bounds the activations); by
            default after the prompt in :func:`prefill_each`, else by block.
            "published" evicts as in the policy's paper; see :class:`kvjax.Timing`. Under "block", ``kvzip`` has the
            model repeat each block as it comes in (:func:`with_repeat_prompt`).
        evict_every: evict in decode at every step (1), every n steps (n more slots per head), or never (0). By default
            as the policy's paper does where that is every few steps (``gate``: 128); for a policy that observes a
            window of n queries every n steps, by all their queries; else at every step.
        select: instead of a policy, the source that chooses the tokens that a decode step reads: a source of
            ``kvjax.sources`` or its short name, such as "oracle" or "quest(page_size=16)". Nothing is
            evicted, the prompt and layer 0 are dense, and in the other layers each query head reads ``budget`` tokens
            (an int, or a share of those that the layer sees, rounded up) and the ``sinks`` first ones.
        sinks: how many of the first tokens a selection always reads, in addition to the budget.
        page_size: slots per page, for a policy whose allocation gives heads different budgets, or a model with a
            sliding window smaller than the budget.
        reserve: slots to leave free for tokens after the prompt (for a full cache; with a budget, those of a block are
            free, and in a layer with a sliding window smaller than the budget no more than those). Where an answer is
            made, as many as it may have.
        cache_dtype: of keys and values: floats, or "int8" or "float8_e4m3fn" (:func:`kvjax.quantise`); or a pair of
            both, such as ("int8", "bfloat16"). The model's dtype by default. Where weights are traced, by jax.jit or
            jax.grad, rows are rounded to eight bits but kept as floats, so that a derivative passes.
        projection: what the policy reads of the output projections, ``output_projection(model, policy)``; if not given,
            every call computes it.
        networks: the small network that the policy or the selection reads, or several, of which it takes its own
            (:func:`load_network`; :mod:`models.networks` lists them). What ships for the model need not be given. One
            that looks ahead remembers every token beside the cache, and its class says in how many numbers.
        max_new_tokens: the largest number of tokens to generate.
        temperature: 0 takes the most likely token; above 0, tokens are drawn with the call's ``key``.
        top_k, top_p: draw only from the k most likely tokens, or from the fewest whose probabilities sum to p.
        min_p: draw only from the tokens that are at least p times as likely as the most likely one.
        repetition_penalty: divides the logits above 0 of all tokens that the prompt or the answer has already, and
            multiplies those below, before a choice (arXiv 1909.05858); 1 for none. It takes a byte per row and token of
            the vocabulary beside the cache. A call that continues from a cache needs :class:`Draws`.
        end: tokens that end a row; the config's by default, () for none.
        progress: show how far prompts and answers are: a bar on a terminal, elsewhere, as in a notebook, a line every
            30 s. :func:`generate` then feeds block by block and token by token from the host.
        batch: how many questions :func:`ask` answers at once, each in a copy of the cache.

    Example:
        >>> import models
        >>> model = models.Decoder.tiny()
        >>> sizes = dict(budget=16, block=8, max_new_tokens=4)
        >>> options = models.Options(policy="tova", **sizes)
        >>> prefilled = models.prefill(model, [range(40)], options=options)
        >>> models.generate(model, prefilled, options=options).tokens.shape
        (1, 4)
    """

    policy: Policy | str | None = None
    budget: int | float | str | None = None
    block: int = 128
    when: When | None = None
    evict_every: int | None = None
    select: Source | str | None = None
    sinks: int = 4
    page_size: int = PAGE_SIZE
    reserve: int = 0
    cache_dtype: DtypesLike | None = None
    projection: tuple[OutputProjection, ...] | None = None
    networks: Networks = None
    max_new_tokens: int = 64
    temperature: float | None = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = 1.0
    end: tuple[int, ...] | None = None
    progress: bool = False
    batch: int = 1
    reading_budget: int | float | str | None = None

    def __post_init__(self) -> None:
        for name in ("budget", "reading_budget"):
            given = getattr(self, name)
            object.__setattr__(self, name, check_share_or_tokens(given) if isinstance(given, str) else plain(given))
        for name, (least, hint) in COUNTS.items():
            object.__setattr__(self, name, check_count(name, getattr(self, name), least, hint))


def options_of(function: str, taken: type, options: Options | None, settings: Any, **fixed: Any) -> Options:
    """Return the options of a call, in which its keyword arguments, ``settings``, come before ``options``.

    Those that the function takes are the fields of ``taken``, a TypedDict; ``fixed`` are fields that it sets itself.
    """
    if not isinstance(options, Options | None):
        raise TypeError(f"options is a {type(options).__name__}; expected a models.Options.")
    known = get_type_hints(taken)
    for name in settings:
        if name not in known:
            raise TypeError(f"{function}() takes no argument {name!r}.{nearest(name, known=known)}")
    options = options or Options()
    if options.select is not None and "select" not in known:
        raise ValueError(f"options.select is {options.select!r}, but {function}() makes no selection; leave it out.")
    return dataclasses.replace(options, **settings, **fixed)
