"""Prompts as a run takes them: checked, on the host, and what is known of the cache that they continue."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import LayerCaches, Policy
from kvjax._src.cache import Positions, dtypes_of, is_cache, part_of_kind
from kvjax._src.chains import policy_of
from kvjax._src.checks import is_known
from kvjax._src.matching import Queries
from kvjax._src.policy_checks import check_policy
from kvjax._src.quantise import Dtypes
from kvjax._src.reconstruction import Repeated, unrepeated
from kvjax._src.split_cache import ModelCache
from kvjax.schedule import HostOrDevice, Text
from models import hosts
from models.config import Config
from models.decoder import Decoder, check_decoder
from models.recurrent import states_of

Tokens = Int[HostOrDevice, "B T"] | Sequence[Sequence[int]]  # rows of one length, or a list of rows


class Prefilled(NamedTuple):
    """A cache and the ``logits`` of each row's last token."""

    cache: ModelCache
    logits: Float[Array, "B V"]


class Kept(NamedTuple):
    """Facts about a cache that a run continues from; ``held`` is [B, heads of all layers]."""

    heads: int
    start: np.ndarray
    held: np.ndarray
    layer_slots: tuple[int, ...]  # per head; in pages, the most that one may hold
    positions: Positions
    dtypes: Dtypes
    pages: int = 0  # on each device
    page_size: int = 0
    ways: tuple[int, int] = (1, 1)  # the devices that split the rows and heads of a paged cache
    spent: bool = False  # whether its policy's sample queries have been used and dropped
    pending: tuple[np.ndarray, ...] = ()  # each row's tokens that the model has still to repeat, where it does so

    @property
    def most(self) -> int:
        """Return the number of tokens in its fullest head."""
        return int(self.held.max())


class CheckedPrompt(NamedTuple):
    """Prompts on the host, padded on the right: on the device, each prompt length would be compiled separately.

    ``kept`` describes the cache that they continue from, None for new prompts. Where the text's tokens are ``[B, 0]``,
    the whole prompts are in that cache.
    """

    text: Text
    kept: Kept | None = None

    @property
    def fed(self) -> bool:
        """Tell whether there is a token to feed."""
        return self.text.tokens.shape[1] > 0

    @property
    def padding(self) -> int:
        """Return how many tokens of padding the longest row has."""
        return self.text.tokens.shape[1] - int(self.text.lengths.max())

    @property
    def most(self) -> int:
        """Return the tokens for which the fullest head has room after the prompt, as long as nothing is evicted.

        Rows are as long as they are padded to, so that calls of one width share their programs.
        """
        return self.text.tokens.shape[1] + (0 if self.kept is None else self.kept.most)


def cache_heads(config: Config, policy: Policy | None) -> int:
    """Return the most heads of a layer's cache: KV heads, or query heads where each has its own cache."""
    if policy is not None and policy.heads == "query":
        return config.num_heads
    return max(kind.num_kv_heads for kind in config.kinds)


def kept_of(model: Decoder, cache: ModelCache, policy: Policy | None, rows: int) -> Kept:
    """Read what a run needs to know about the cache that it continues from, and check it against model and policy."""
    config = model.config
    if not is_cache(cache) or len(cache.heads_shape) != 3:
        raise ValueError(f"the cache is a {type(cache).__name__}; give that of models.prefill or models.generate.")
    leaves = jax.tree.leaves(cache)
    if not is_known(*leaves):
        raise ValueError("the cache is traced (by jax.jit, vmap or grad); call prefill, generate and stream outside.")
    if any(leaf.is_deleted() for leaf in leaves if isinstance(leaf, jax.Array)):
        raise ValueError("a later step has deleted this cache; continue from the last one that stream yielded.")
    L, B, K = cache.heads_shape
    one, (heads, ours) = cache.arrays, (cache_heads(config, None), config.cached_heads)
    parts: Any = cache.layers if isinstance(cache, LayerCaches) else (cache,) * L
    theirs = tuple((part.heads_shape[-1], part.arrays.head_dim) for part in parts)
    if theirs not in (ours, tuple((config.num_heads, dim) for _, dim in ours)):
        wrong = f"the cache is of another model: it has {L} layers and {K} heads of dimension {one.head_dim},"
        raise ValueError(f"{wrong} this model {len(ours)} layers and {heads} of {config.head_dim}.")
    states = [{own.name: own.shape for own in each} for each in states_of(config, "float32")]
    if states != [{name: array.shape[1:] for name, array in each.items()} for each in cache.recurrent]:
        raise ValueError("the cache is of another model: its layers without a KV cache have other states.")
    if rows != B:
        advice = f": repeat it with kvjax.repeat(cache, {rows})" if B == 1 else ""
        raise ValueError(f"the cache has {B} rows, but {rows} prompts were given{advice}.")
    if policy is not None:
        paged = cache.paged
        if policy.allocation.even == paged:
            kind, other = ("paged", "even") if paged else ("plain", "uneven")
            wrong = f"the cache is {kind}, but {policy.name!r} divides the slots in an {other} way:"
            raise ValueError(f"{wrong} give the policy that the cache was made with, or none.")
        if (policy.heads == "query") != (heads != K) and config.num_heads != heads:
            raise ValueError(
                f"the cache's {K} heads per layer are not those of {policy.name!r}; give the cache's policy."
            )
        try:
            check_policy(policy, one, config.num_heads // one.heads_shape[-1])
        except ValueError:
            raise ValueError(f"the cache's state is not that of {policy.name!r}; give the cache's policy.") from None
    held = np.moveaxis(hosts.fetched(cache.num_live), 1, 0).reshape(B, L * K)
    start, dtypes = hosts.fetched(cache.next_position), dtypes_of(one)
    sampled = part_of_kind(one.state, Queries)
    spent = sampled is not None and sampled.spent
    kept = Kept(
        K, start, held, cache.layer_slots, cache.positions, dtypes, pages=cache.num_pages, page_size=cache.page_size,
        ways=cache.ways, spent=spent,
    )  # fmt: skip
    if policy is not None and part_of_kind(one.state, Repeated) is not None:
        # A layer without a sliding window, if there is one, holds them all.
        layer = int(np.argmax([np.inf if window is None else window for window in config.cached_windows]))
        kept = kept._replace(pending=unrepeated(*map(hosts.fetched, _of_a_head(cache, layer))))
    return kept


@functools.partial(jax.jit, static_argnums=1)
def _of_a_head(cache: ModelCache, layer: int) -> tuple[Array, Array, Array]:
    """Return the positions, scores and ids of one head's tokens, for a policy that has the model repeat them."""
    here = cache.layer(layer)
    state = part_of_kind(here.state, Repeated)
    assert state is not None
    return here.position[:, 0], state.score[:, 0], state.token[:, 0]


def _padded(tokens: Tokens, lengths: HostOrDevice | None) -> tuple[np.ndarray, HostOrDevice | None]:
    """Return rows of tokens as one array, and their lengths."""
    listed = isinstance(tokens, list | tuple) and lengths is None and all(np.ndim(row) == 1 for row in tokens)
    if listed and len({len(row) for row in tokens}) > 1:
        return _rows_of_a_list(tokens)
    if isinstance(tokens, str) or (isinstance(tokens, list | tuple) and any(isinstance(row, str) for row in tokens)):
        raise ValueError("the prompt is a text; expected rows of tokens, such as [tokenizer.encode(text)].")
    try:
        return np.asarray(tokens), lengths
    except ValueError:
        raise ValueError("tokens are rows of different lengths; give a list of rows, or lengths=.") from None


def _rows_of_a_list(tokens: Any) -> tuple[np.ndarray, np.ndarray]:
    counts = np.array([len(row) for row in tokens])
    kinds = [np.asarray(row).dtype for row in tokens if len(row)]  # an empty row would be float64
    padded = np.zeros((len(counts), counts.max()), np.result_type(*kinds))
    for row, count, own in zip(padded, counts, tokens, strict=True):
        row[:count] = own
    return padded, counts


def check_prompt(
    model: Decoder,
    tokens: Tokens | Prefilled,
    lengths: HostOrDevice | None,
    question: int | HostOrDevice | None,
    cache: ModelCache | None = None,
    policy: Policy | str | None = None,
    *,
    answers: bool = False,
) -> CheckedPrompt:
    """Check prompts, their lengths and their questions' lengths, and return them on the host.

    Args:
        cache: the cache that they continue from.
        policy: the policy of the run, for a check against the cache.
        answers: whether a :class:`Prefilled` may be given in place of tokens, to make its answer.
    """
    check_decoder(model)
    if isinstance(tokens, Prefilled):
        return _check_prefilled(model, tokens, lengths, question, cache, policy, answers)
    if not is_known(*jax.tree.leaves((tokens, lengths, question))):
        wrong = "the prompt is traced (by jax.jit, vmap or grad), but is cut into blocks on the host: call prefill,"
        raise ValueError(f"{wrong} generate and stream outside.")
    host, lengths = _padded(tokens, lengths)
    if host.size == 0:
        raise ValueError(f"the prompt is empty (tokens {host.shape}); give at least 1 token per row.")
    if host.ndim != 2 or not np.issubdtype(host.dtype, np.integer):
        row = "; give a list of rows, such as [tokens]" if host.ndim == 1 else ""
        raise ValueError(f"tokens are {host.dtype} {host.shape}; expected integers [B, T]{row}.")
    B, T = host.shape
    counts = np.full(B, T) if lengths is None else np.asarray(lengths)
    if not np.issubdtype(counts.dtype, np.integer) or counts.shape != (B,) or counts.min() < 1 or counts.max() > T:
        raise ValueError(f"lengths are {counts.tolist()}; expected {B} numbers from 1 (no empty prompt) to {T}.")
    counted, vocabulary = host[np.arange(T) < counts[:, None]], model.config.vocab_size
    outside = counted[(counted < 0) | (counted >= vocabulary)]
    if outside.size:
        raise ValueError(f"token {outside[0]} is outside the vocabulary of {vocabulary}; is it another tokenizer's?")
    kept = None if cache is None else kept_of(model, cache, policy_of(policy), B)
    questions = np.zeros(B, np.int32)
    if question is not None:
        questions = _checked_questions(question, counts, counts - 1 if kept is None else counts)
    behind: Any = (np.zeros_like(questions),) if kept is None else (kept.start, kept.pending)
    return CheckedPrompt(Text(host.astype(np.int32), counts.astype(np.int32), questions, *behind), kept)


def tokens_seen(
    model: Decoder, given: CheckedPrompt, before: Bool[HostOrDevice, "B V"] | None
) -> Bool[np.ndarray, "B V"]:
    """Return which tokens of the vocabulary each row's text has: those of its prompt, and those ``before`` it."""
    tokens, lengths, shape = given.text.tokens, given.text.lengths, (len(given.text.lengths), model.config.vocab_size)
    if given.kept is not None and before is None:
        raise ValueError("a repetition_penalty reads what the cache has seen; give key=models.Draws(key, seen).")
    if before is not None and (np.shape(before) != shape or np.asarray(before).dtype != bool):
        found = f"{np.asarray(before).dtype} {np.shape(before)}"
        raise ValueError(f"seen is {found}; expected bool {shape}: for each prompt, which tokens the cache has seen.")
    seen = np.zeros(shape, bool) if before is None else np.array(before)
    counted = np.arange(tokens.shape[1]) < lengths[:, None]
    seen[np.nonzero(counted)[0], tokens[counted]] = True
    return seen


def _checked_questions(question: int | HostOrDevice, prompts: np.ndarray, most: np.ndarray) -> np.ndarray:
    given = np.asarray(question)
    if given.shape not in ((), prompts.shape):
        raise ValueError(f"question is of shape {given.shape}; give one length, or one for each row.")
    questions = np.broadcast_to(given, prompts.shape)
    if not np.issubdtype(questions.dtype, np.integer) or questions.min() < 0 or (questions > most).any():
        before = ", and some context must come before it" if (most < prompts).any() else ""
        raise ValueError(f"questions of {questions.tolist()} tokens do not fit prompts of {prompts.tolist()}{before}.")
    return questions.astype(np.int32)


def _check_prefilled(
    model: Decoder,
    given: Prefilled,
    lengths: HostOrDevice | None,
    question: int | HostOrDevice | None,
    cache: ModelCache | None,
    policy: Policy | str | None,
    answers: bool,
) -> CheckedPrompt:
    """Check prompts that are in a cache already, and the lengths of their questions that were held back."""
    if not answers:
        raise ValueError("these tokens are in a cache already; make the answer with models.generate.")
    if cache is not None or lengths is not None:
        raise ValueError("the result of prefill has its own cache and lengths; leave cache= and lengths= out.")
    logits = given.logits
    B = given.cache.heads_shape[-2] if is_cache(given.cache) else 0
    kept = kept_of(model, given.cache, policy_of(policy), B)
    if np.shape(logits) != (B, model.config.vocab_size):
        raise ValueError(f"the logits are {np.shape(logits)}; expected {(B, model.config.vocab_size)}.")
    questions = np.zeros(B, np.int32) if question is None else _checked_questions(question, kept.start, kept.start)
    text = Text(np.zeros((B, 0), np.int32), np.zeros(B, np.int32), questions, kept.start, kept.pending)
    return CheckedPrompt(text, kept)
