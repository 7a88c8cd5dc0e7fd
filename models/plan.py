"""The plan of a run: its arguments are checked, and its buffers are sized.

Which block comes when, and which one evicts, is in kvjax/schedule.py.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, Bool, Int

import kvjax
from kvjax import Policy, Reconstruction
from kvjax.allocation import CAP, UNIFORM
from kvjax.cache import Positions, dtypes_of
from kvjax.capacity import Demand, Layout, capacity, in_pages, rounded_up
from kvjax.chains import policy_of
from kvjax.checks import check_count, check_share_or_tokens, is_known, plain
from kvjax.insertion import is_cache
from kvjax.matching import samples_of
from kvjax.policy import fits_biases
from kvjax.policy_checks import check_measured, check_policy, check_policy_given, check_state
from kvjax.quantise import Dtypes, DtypesLike, check_dtypes, is_quantised
from kvjax.reconstruction import Repeated, unrepeated
from kvjax.schedule import HostOrDevice, Text, When, moments, power_of_two, question_room, words_of
from models import hosts
from models.config import Config, Rope
from models.decoder import Decoder, check_decoder
from models.layer_caches import AnyCache
from models.networks import LooksAhead, Network, network_of, remembers
from models.options import PAGE_SIZE, Options
from models.selecting import Cache, Selection, checked_selection

Tokens = Int[HostOrDevice, "B T"] | Sequence[Sequence[int]]  # rows of one length, or a list of rows
FLOAT32 = Dtypes("float32", "float32")
_HERE = (os.path.dirname(__file__) + os.sep,)  # so that a warning names the line that called this package


class Prefilled(NamedTuple):
    """A cache and ``logits``: those of the last token, [B, V], or of all tokens, [B, T, V]."""

    cache: Cache
    logits: Array


class Sizes(NamedTuple):
    """The sizes of a run's buffers. Only what makes buffers takes them: a step reads the sizes of what it is given."""

    slots: int  # per head, at the end of the prompt and in decode; the largest number where heads differ
    prompt_slots: int  # likewise, while the prompt is fed
    pages: int = 0  # of a paged cache
    page_size: int = PAGE_SIZE
    memory_slots: int = 0  # of a network that looks ahead, and of the selection's source


@dataclasses.dataclass(frozen=True)
class Plan:
    """The checked settings of a run, which are static in each compiled step."""

    policy: Policy | None
    when: Literal["block", "prompt"]
    evict_every: int  # 0 for never
    mesh: Mesh | AbstractMesh | None
    selection: Selection | None = None
    heads: int = 0  # of the cache, in each layer
    positions: Positions = "absolute"
    overfull: bool = False  # a row without context holds more than its budget, so its question's last block evicts
    cache_dtype: Dtypes = FLOAT32
    # Eight bits to which keys, and values, are rounded but not stored, for a derivative.
    rounded_to: tuple[str | None, ...] = (None, None)

    @property
    def repeats(self) -> Reconstruction | None:
        """Return what the model is to repeat as the text comes in, if anything."""
        wanted = None if self.policy is None else self.policy.needs.reconstruction
        return None if wanted is None or wanted.pseudo else wanted

    @property
    def several(self) -> Mesh | AbstractMesh | None:
        """Return the mesh if it has several devices, whose pages are then split; else None."""
        return None if self.mesh is None or self.mesh.size == 1 else self.mesh

    @property
    def ways(self) -> tuple[int, int]:
        """Return the numbers of devices that split the rows, and the heads of each layer."""
        return ways_of(self.mesh) or (1, 1)


class Kept(NamedTuple):
    """Facts about a cache that a run continues from; ``held`` is [B, heads of all layers]."""

    heads: int
    start: np.ndarray
    held: np.ndarray
    slots: int
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

    ``kept`` describes the cache that they continue from, None for new prompts. Where ``tokens`` is ``[B, 0]``, the
    whole prompts are in that cache.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    questions: np.ndarray
    kept: Kept | None = None

    @property
    def start(self) -> np.ndarray:
        """Return the position of each row's first token."""
        return np.zeros_like(self.lengths) if self.kept is None else self.kept.start

    @property
    def text(self) -> Text:
        """Return what a schedule reads."""
        return Text(
            self.tokens, self.lengths, self.questions, self.start, () if self.kept is None else self.kept.pending
        )

    @property
    def fed(self) -> bool:
        """Tell whether there is a token to feed."""
        return self.tokens.shape[1] > 0

    @property
    def most(self) -> int:
        """Return the number of tokens in the fullest head after the prompt, as long as nothing is evicted."""
        return self.tokens.shape[1] + (0 if self.kept is None else self.kept.most)


class Rows(NamedTuple):
    """Values that differ between the rows of a batch, [B]: lengths, budgets, and budgets in decode."""

    lengths: Int[Array, "B"]
    budgets: Int[Array, "B"] | None = None
    decode_budgets: Int[Array, "B"] | None = None


def cache_heads(config: Config, policy: Policy | None) -> int:
    """Return the number of the cache's heads per layer: KV heads, or query heads where each has its own cache."""
    return config.num_heads if policy is not None and policy.heads == "query" else config.num_kv_heads


def _rounded(size: int, options: Options, whole: bool = False) -> int:
    """Round a size up: at most an eighth is spare; a quarter in a stream, whose steps are compiled for each size.

    Args:
        whole: whether the buffer holds the whole prompt. A stream's grows by doubling then, as without a policy.
    """
    few = 1 if whole or options.policy is None else 4
    return rounded_up(size, 8 if options.fit_prompt else few)


def copied(policy: Policy, tokens: int) -> int:
    """Return how many tokens are fed to repeat a part of the text, with those that ask for it; 0 if none are repeated.

    Args:
        tokens: the most tokens of a part.

    Example:
        >>> import kvjax
        >>> from models.plan import copied
        >>> copied(kvjax.parse("kvzip(chunk=64)"), 128), copied(kvjax.parse("h2o"), 128)
        (72, 0)
    """
    wanted = policy.needs.reconstruction
    if wanted is None or not tokens:
        return 0
    return wanted.pseudo or min(wanted.chunk, tokens) + words_of(wanted.prompt)


def plan_run(model: Decoder, prompt: CheckedPrompt, options: Options) -> tuple[Plan, Sizes, Rows, Network | None]:
    """Check the options of a run against its model and prompts, and size its buffers; return its network, too."""
    config, mesh, kept = model.config, mesh_of(model), prompt.kept
    lengths, questions, seen = prompt.lengths, prompt.questions, prompt.start + prompt.lengths
    policy = policy_of(options.policy)
    when, every = moments(policy, "block" if options.when is None else options.when, options.evict_every)
    options = dataclasses.replace(
        options,
        policy=policy,
        budget=plain(options.budget),
        when=when,
        evict_every=every,
        reserve=check_count("reserve", options.reserve, 0, "give a number of slots, from 0"),
        page_size=check_count("page_size", options.page_size, 1, "a page has at least 1 slot"),
        fit_prompt=options.fit_prompt is not False,
    )
    if mesh is not None:
        _check_rows(mesh, len(lengths))
    selection = None
    if options.select is not None:
        most = int(lengths.max())
        selection = checked_selection(options.select, policy, options.budget, options.sinks, most, options.reserve)
    if config.rope.follows_length:
        _check_frequencies(config.rope, prompt, seen, options.reserve)
    traced = not is_known(*jax.tree.leaves(model))
    own = jax.tree.leaves(model.embedding)[0].dtype.name  # so that shapes alone, without arrays, will do
    dtype, rounded_to = _stored(own, options.cache_dtype, traced)
    if kept is not None:
        _check_kept(kept, options, mesh, selection, traced)
        dtype, rounded_to = kept.dtypes, (None, None)
    network = network_of(options.networks, config, policy, None if selection is None else selection.source)
    check_measured(policy, config.num_layers, config.num_kv_heads)
    if policy is not None and mesh is not None and mesh.size > 1:
        _check_no_gradient(policy, mesh)
    if policy is None:
        plan, sizes, rows = _plan_full(config, mesh, prompt, options, selection)
        return dataclasses.replace(plan, cache_dtype=dtype, rounded_to=rounded_to), sizes, rows, network
    remembered = 0
    if network is not None and network.looks_ahead:
        policy = cast(LooksAhead, network).fitted(policy)
        remembered = _rounded(prompt.most + options.reserve, options, whole=True)
    heads = cache_heads(config, policy)
    check_state(policy, config.head_dim, heads, config.num_heads // heads)  # before anything is compiled
    budgets = _budgets(policy, options, seen)
    if not prompt.fed and every > 0:
        _check_held(policy, kept, budgets + questions)
    if policy.published is not None and policy.published.final:
        _warn_of_choices(policy, max(int((lengths - questions).max()), 0), options.block, when, kept is not None)
    plan = Plan(
        policy, when, every, mesh, heads=heads if kept is None else kept.heads,
        positions=policy.positions if kept is None else kept.positions,
        overfull=prompt.fed and every > 0 and _is_overfull(policy, kept, budgets, lengths == questions),
        cache_dtype=dtype, rounded_to=rounded_to,
    )  # fmt: skip
    if fits_biases(policy):
        _check_fitted(
            config, plan, kept is not None and (kept.spent or kept.pages > 0) and bool((lengths > questions).any())
        )
    sizes = _sized(config, plan, prompt, options, budgets, traced)
    # Above the slots a row would wait (Evidence.waits): then its window depended on how long the other rows are.
    most = sizes.slots if policy.allocation.fills else np.iinfo(np.int32).max
    rows = Rows(*jax.device_put((seen, np.minimum(budgets, most), np.minimum(budgets + questions, most))))
    return plan, sizes._replace(memory_slots=remembered), rows, network


def _check_fitted(config: Config, plan: Plan, again: bool) -> None:
    """Check that a policy that fits biases can do so in this run: it needs whole heads, and attention as it is.

    Args:
        again: whether the context goes on in a cache that has been fitted, in pages or without sample queries.
    """
    policy = plan.policy
    assert policy is not None and policy.merging is not None
    name, link = policy.name, policy.merging.name
    if plan.several is not None:
        raise ValueError(f"{name!r}: {link!r} fits the heads of one device, but the model is on a mesh; leave it out.")
    if any(config.sliding_windows) or config.attention_soft_cap is not None:
        what = "sliding windows" if any(config.sliding_windows) else "a cap of its attention logits"
        raise ValueError(f"{name!r}: {link!r} fits attention over all tokens, but this model has {what}; leave it out.")
    if plan.positions != "absolute":
        raise ValueError(
            f"{name!r}: {link!r} fits keys as queries have seen them, but {plan.positions!r} positions turn them "
            "later; leave one of them out."
        )
    if again:
        raise ValueError(
            f"{name!r}: {link!r} has fitted this cache once, and its sample queries are gone: hold the new text back "
            "with question=, or give policy=None, which evicts nothing more."
        )
    if not policy.allocation.even and (plan.when != "prompt" or plan.evict_every):
        raise ValueError(
            f"{name!r}: {link!r} fits plain caches, but {policy.allocation.name!r} has pages after the first eviction; "
            "give when='prompt' and evict_every=0, or leave the allocation out."
        )


def _check_rows(mesh: Mesh | AbstractMesh, rows: int) -> None:
    """Check that a mesh divides the rows of a batch."""
    ways = mesh.shape["data"]
    if rows % ways:
        raise ValueError(f"data={ways} does not divide the batch of {rows}; give a multiple of {ways} rows, or data=1.")


def _check_no_gradient(policy: Policy, mesh: Mesh | AbstractMesh) -> None:
    """Check that a policy on several devices takes no gradient of a loss."""
    wanted = policy.needs.reconstruction
    if wanted is not None and wanted.loss is not None:
        raise ValueError(
            f"{policy.name!r} takes the gradient of a loss, which runs on one device, but the model is on a mesh of "
            f"{mesh.size}: load it on one, or give another policy, such as 'kvzip'."
        )


def _check_kept(
    kept: Kept, options: Options, mesh: Mesh | AbstractMesh | None, selection: Selection | None, traced: bool
) -> None:
    """Check that a run may continue from a cache: nothing was remembered outside it, and it stays as it is stored."""
    if selection is not None or remembers(policy_of(options.policy)):
        what = "a selection" if selection is not None else "the network that the policy reads"
        raise ValueError(
            f"{what} remembers tokens outside the cache, and this memory is not kept: leave cache out, and give the "
            "whole prompt."
        )

    def where(ways: tuple[int, int]) -> str:
        return "one device" if ways == (1, 1) else f"a mesh with data={ways[0]} and tensor={ways[1]}"

    if kept.pages and kept.ways != (ways := ways_of(mesh) or (1, 1)):
        raise ValueError(
            f"the cache's pages are on {where(kept.ways)}, but the model is on {where(ways)}: continue on the "
            "devices that the cache was made on, or leave cache out and give the whole prompt."
        )
    if options.cache_dtype is not None and (names := check_dtypes(options.cache_dtype)) != kept.dtypes:
        raise ValueError(
            f"the cache is of {kept.dtypes}, but cache_dtype is {str(names)!r}: a cache keeps its dtype, so leave "
            "cache_dtype out."
        )
    if traced and any(map(is_quantised, kept.dtypes)):
        raise ValueError(
            f"the weights are traced (by jax.jit, vmap or grad), but a cache of {kept.dtypes} passes no derivative on: "
            "call outside, or continue from a cache of floats."
        )


def _stored(own: str, asked: DtypesLike | None, traced: bool) -> tuple[Dtypes, tuple[str | None, ...]]:
    """Return the dtypes of a new cache, and the eight bits that rows are rounded to but not stored in (Plan).

    Args:
        own: the model's dtype.
        traced: whether a derivative may be taken, which does not pass through eight bits.
    """
    names = Dtypes(own, own) if asked is None else check_dtypes(asked)
    rounded_to = tuple(name if traced and is_quantised(name) else None for name in names)
    return Dtypes(*(own if eight else name for name, eight in zip(names, rounded_to, strict=True))), rounded_to


def overflowing(
    plan: Plan, prompt: CheckedPrompt, options: Options
) -> tuple[Bool[np.ndarray, "B"], Bool[np.ndarray, "B"]]:
    """Return the rows whose contexts do not fit their budgets, and those whose answers may not."""
    assert plan.policy is not None
    budgets = _budgets(plan.policy, options, prompt.start + prompt.lengths)
    held = 0 if prompt.kept is None else _held(plan.policy, prompt.kept)
    context, always = prompt.lengths - prompt.questions, not plan.policy.allocation.fills
    compresses = ((held + context > budgets) | always) & (context > 0)
    after = np.where(compresses, budgets, held + context)
    return compresses, ((after + options.reserve > budgets) | always) & (plan.evict_every > 0)


def _is_overfull(policy: Policy, kept: Kept | None, budgets: np.ndarray, only_asked: np.ndarray) -> bool:
    """Return whether the cache holds more than the budget in a row that gets only a question."""
    return kept is not None and bool((only_asked & (_held(policy, kept) > budgets)).any())


def _check_held(policy: Policy, kept: Kept | None, room: np.ndarray) -> None:
    """Check that an answer has the prompt's budget: a step evicts one token, so it cannot reach a smaller budget."""
    assert kept is not None
    held = _held(policy, kept)
    if (held > room).any():
        row = int(np.argmax(held - room))
        raise ValueError(
            f"the cache holds {int(held[row])} tokens per head, but budget and question sum to {int(room[row])}: give "
            "the same policy, budget and question as to prefill, or evict_every=0."
        )


def _held(policy: Policy, kept: Kept) -> np.ndarray:
    """Count the tokens per head of each row as the budget does: in the fullest head, or on average."""
    return kept.held.max(axis=1) if policy.allocation.even else np.ceil(kept.held.mean(axis=1))


def _warn_of_choices(policy: Policy, context: int, block: int, when: When, goes_on: bool) -> None:
    """Warn if a policy that should choose once, after the prompt, chooses more than once."""
    if when == "block" and context > block:
        warnings.warn(
            f"{policy.name!r} is made to choose once, after the whole prompt, but a prompt of {context} tokens comes "
            f"in blocks of {block}, and each block chooses again among what the last one left: give "
            "when='published', or a block as long as the prompt.",
            skip_file_prefixes=_HERE,
        )
    elif goes_on and context:
        warnings.warn(
            f"{policy.name!r} is made to choose once, but {context} more tokens follow its choice, and it chooses "
            "again among what is left: hold them back with question=, or give no policy.",
            skip_file_prefixes=_HERE,
        )


def _check_frequencies(rope: Rope, prompt: CheckedPrompt, seen: Int[np.ndarray, "B"], reserve: int) -> None:
    """Check that all keys of a text are rotated by the same frequencies, where these depend on its length.

    Args:
        seen: the tokens of each row, with those in the cache.
        reserve: the number of tokens that may follow.
    """
    most, fed_before = rope.original_positions, np.asarray(prompt.start)
    crossing = seen > most
    if rope.type == "longrope":  # longer texts have frequencies of their own, but one set for all lengths
        crossing &= fed_before <= most
    if prompt.kept is not None and prompt.fed and crossing.any():
        raise ValueError(
            f"the text now has {seen[crossing].max()} tokens, but this model's rotary frequencies depend on the text's "
            f"length beyond {most} tokens, and the cache's keys were rotated with those of a shorter text: leave cache "
            "out, and give the whole prompt."
        )
    late = (seen <= most) & (seen + reserve > most)
    if rope.type == "longrope" and late.any():
        raise ValueError(
            f"the text has {seen[late].max()} tokens and up to {reserve} may follow, but this model's rotary "
            f"frequencies change beyond {most} tokens: let at most {most - seen[late].max()} follow, or give a longer "
            "prompt."
        )


def _plan_full(
    config: Config,
    mesh: Mesh | AbstractMesh | None,
    prompt: CheckedPrompt,
    options: Options,
    selection: Selection | None,
) -> tuple[Plan, Sizes, Rows]:
    """Plan a run in which nothing is evicted."""
    held, most, kept = prompt.most + options.reserve, config.max_positions, prompt.kept
    if selection is None:
        check_policy_given(None, options.budget)
    if held > most:
        raise ValueError(
            f"the prompt and its answer take {held} positions, but the model has {most}: "
            "shorten the prompt, or give a policy and a budget."
        )
    slots = min(_rounded(held, options), most)
    sizes = Sizes(slots, slots, memory_slots=0 if selection is None else slots)
    plan = Plan(None, "block", 0, mesh, selection=selection, heads=config.num_kv_heads)
    if kept is not None:
        plan = dataclasses.replace(plan, heads=kept.heads, positions=kept.positions)
        if kept.pages:
            layout = _layout(config, plan, kept.page_size)
            together = layout.on_devices(kept.held + prompt.tokens.shape[1] + options.reserve)
            sizes = _with_pages(layout, sizes, options, kept, slots, together)
        else:
            sizes = _with_slots(sizes, options, kept, slots)
    return plan, sizes, Rows(jax.device_put(prompt.start + prompt.lengths))


def _with_slots(sizes: Sizes, options: Options, kept: Kept, slots: int, first: int = 0, evicted: bool = False) -> Sizes:
    """Size the slots of a run that continues in a plain cache, which keeps its size if it is large enough.

    Args:
        slots: the slots that a head needs after the first eviction.
        first: the slots that it needs before.
        evicted: whether every row is evicted from before its question. A cache of more than twice the needed size is
            shrunk then.
    """
    needed = max(slots, first)
    usual = kept.slots if kept.slots >= needed else _rounded(needed, options)
    before = max(usual, sizes.prompt_slots)
    after = _rounded(slots, options) if evicted and before > 2 * slots else usual
    return sizes._replace(slots=after, prompt_slots=before)


def _with_pages(
    layout: Layout, sizes: Sizes, options: Options, kept: Kept, most: int, held: Int[np.ndarray, "B ways"]
) -> Sizes:
    """Size the pages of a run that continues in a paged cache, which keeps its size if it is large enough.

    Args:
        most: the largest number of tokens that a head may hold.
        held: likewise, that the heads of a device hold together, in each row.
    """
    pages = layout.pages(held)
    pages = kept.pages if kept.pages >= pages else _rounded(pages, options)
    slots = kept.slots if kept.slots >= most else _rounded(most, options)
    return sizes._replace(slots=slots, pages=pages, page_size=kept.page_size)


def _budgets(policy: Policy, options: Options, lengths: np.ndarray) -> np.ndarray:
    """Return each row's budget in slots per head, checked against what the policy protects."""
    budget = checked_budget(policy, options.budget, options.block)
    if isinstance(budget, int):
        return np.full(lengths.shape, budget, np.int32)
    budgets = np.ceil(np.round(budget * lengths, 6)).astype(np.int32)  # 0.07 of 100 is 7, not 7.000000000000001
    for row_budget in np.unique(budgets):
        kvjax.check_budget(policy, int(row_budget))
    return budgets


def checked_budget(policy: Policy, budget: int | float | None, block: int) -> int | float:
    """Return a policy's budget as it can be checked without a prompt, which a share refers to.

    Raises:
        ValueError: there is none, or it is too small for the policy, or the block is.

    Example:
        >>> import kvjax
        >>> from models.plan import checked_budget
        >>> checked_budget(kvjax.parse("snapkv"), 0.25, block=128)
        0.25
    """
    if budget is None:
        raise ValueError(f"the policy {policy.name!r} needs a budget: slots per head, or a ratio of the prompt.")
    budget = check_share_or_tokens(budget)
    if isinstance(budget, int):
        kvjax.check_budget(policy, budget)
    kvjax.check_block(policy, block)
    return budget


def _sized(
    config: Config, plan: Plan, prompt: CheckedPrompt, options: Options, budgets: np.ndarray, traced: bool
) -> Sizes:
    """Return the sizes of a run's buffers.

    Args:
        traced: whether a derivative may be taken, which passes through no eviction from pages.
    """
    policy, kept, by_ratio = plan.policy, prompt.kept, isinstance(options.budget, float)
    assert policy is not None
    asked, whole = question_room(prompt.questions), plan.when == "prompt" and prompt.fed
    # The copies of a block, and of an answer; what is left of a prompt is repeated by blocks before the answer.
    copies, later = (copied(policy, size) if plan.repeats else 0 for size in (options.block, plan.evict_every))
    decode_room = max(plan.evict_every + later, copies) if plan.evict_every else options.reserve
    room = max(options.block + copies, decode_room)
    if whole or not prompt.fed:
        room = decode_room
    elif not options.fit_prompt and plan.evict_every > 1:
        room = options.block + copies + plan.evict_every - 1  # so that another turn fits
    # A layer with a window that gave slots away grows back to its window while the others keep what they took.
    step = min(max(options.block + copies, 1 + later), asked + room) if policy.allocation.even else asked + room
    # No head ever holds more than all tokens. A stream's buffers do not depend on the prompt, but have an upper limit.
    # Where heads compete by a ratio, or without a cap, they follow it by powers of two: a head is read at that width.
    all_tokens = prompt.most if prompt.fed else int(prompt.start.max())  # as many as one call for all would feed
    limit = all_tokens + options.reserve + max(copies, later)
    largest = int(budgets.max())
    widest = policy.allocation.most(config.num_layers, config.num_kv_heads, largest)
    if not options.fit_prompt and widest > largest and (by_ratio or widest > CAP * largest):
        limit = power_of_two(limit)
    elif not options.fit_prompt:
        limit = max(power_of_two(prompt.most + options.reserve), config.max_positions)
    # A budget in slots is a number of the run, like a length: near ones share their sizes, and so their programs.
    held = budgets if by_ratio else np.full_like(budgets, rounded_up(int(budgets[0]), beside=asked + room))
    demand = Demand(held + asked, room, step, limit)
    before = 0  # slots for the whole prompt and its copies
    if whole and (prompt.lengths > prompt.questions).any():
        more = prompt.most - int(prompt.questions.min()) + copied(policy, prompt.most)
        before = _rounded(more, options, whole=True)
    layout = _layout(config, plan, options.page_size)
    if kept is not None:  # it may hold more than the budget until its first eviction
        entering = min(options.block, power_of_two(max(int(prompt.text.context.max()), 1))) + copies
        if (prompt.lengths == prompt.questions).any():
            entering = max(entering, asked + decode_room)
        resized = _resized_pages if kept.pages else _resized_slots
        return resized(plan, layout, prompt, options, demand, before, entering)
    plain = policy.allocation.even and (plan.several is not None or traced)
    slots, pages = capacity(layout, demand, not plain and in_pages(policy, int(budgets.max()), config.sliding_windows))
    if by_ratio or slots >= limit:  # then it follows the prompt's length
        slots = _rounded(slots, options)
    if pages:
        return Sizes(slots, before, _pages(layout, demand, options), options.page_size)
    return Sizes(slots, max(slots, before))


def _pages(layout: Layout, demand: Demand, options: Options) -> int:
    """Return the pages of each device, rounded where they follow the prompt's length."""
    pages = capacity(layout, demand, paged=True).pages
    assert demand.limit is not None
    follows = isinstance(options.budget, float) or (demand.held + demand.room).max() >= demand.limit
    return _rounded(pages, options) if follows else pages


def _resized_slots(
    plan: Plan, layout: Layout, prompt: CheckedPrompt, options: Options, demand: Demand, before: int, entering: int
) -> Sizes:
    """Size the slots of a run that continues in a plain cache, which keeps its size if it is large enough.

    Args:
        before: slots for the whole prompt, if it is evicted from once; else 0.
        entering: the tokens that come in before the first eviction.
    """
    kept, (slots, _) = prompt.kept, capacity(layout, demand, paged=False)
    assert kept is not None and demand.limit is not None
    if not prompt.fed:  # the size that one call for both prompt and answer would have made
        slots = min(max(int(demand.held.max()), kept.most) + demand.room, demand.limit)
    if isinstance(options.budget, float) or slots >= demand.limit:
        slots = _rounded(slots, options)
    if not prompt.fed:
        slots = max(kept.slots, slots)
        return Sizes(slots, slots)
    evicted = bool((prompt.lengths > prompt.questions).all())
    return _with_slots(Sizes(slots, max(slots, before)), options, kept, slots, kept.most + entering, evicted)


def _resized_pages(
    plan: Plan, layout: Layout, prompt: CheckedPrompt, options: Options, demand: Demand, before: int, entering: int
) -> Sizes:
    """Size the pages of a run that continues in a paged cache; see :func:`_resized_slots`."""
    kept, policy = prompt.kept, plan.policy
    assert kept is not None and policy is not None and demand.limit is not None
    layout = dataclasses.replace(layout, page_size=kept.page_size)
    most = layout.most_in_a_head(int(demand.held.max()), demand)
    if prompt.fed:
        repeated = 0
        if plan.when == "prompt":  # all is fed into the same pages
            repeated = copied(policy, prompt.most)
            entering = max(entering, int(prompt.text.context.max()) + repeated)
        # Before its first eviction a layer with a window may hold all that it held, a window and a block.
        new = layout.most_held(entering, max(demand.step, options.block) + repeated)
        together = layout.on_devices(kept.held + np.repeat(new, layout.heads))
        usual = layout.slots_of_rows(demand._replace(limit=None))
        slots = min(max(most, kept.most + entering), demand.limit)
        return _with_pages(layout, Sizes(0, before), options, kept, slots, np.maximum(together, usual))
    # The size that one call for both prompt and answer would have made.
    slots = min(max(most, kept.most + demand.room), demand.limit)
    slots = _rounded(slots, options) if isinstance(options.budget, float) or slots >= demand.limit else slots
    full = demand._replace(held=np.maximum(demand.held, _held(policy, kept).astype(int)))
    limits = np.repeat([np.inf if window is None else window + demand.step for window in layout.windows], layout.heads)
    grown = np.maximum(kept.held + min(demand.room, 1), np.minimum(kept.held + demand.room, limits)).astype(int)
    pages = _pages(layout, full, options)
    pages = max(kept.pages, pages, layout.pages(layout.on_devices(grown)))
    return Sizes(max(kept.slots, slots), 0, pages, kept.page_size)


def _layout(config: Config, plan: Plan, page_size: int) -> Layout:
    """Return where the heads of a run's cache are."""
    allocation = UNIFORM if plan.policy is None else plan.policy.allocation
    return Layout(plan.heads, tuple(config.sliding_windows), allocation, page_size, plan.ways)


def mesh_of(model: Decoder) -> Mesh | AbstractMesh | None:
    """Return the mesh that a model is on, None without one; in a derivative, only one of several devices."""
    leaf = jax.tree.leaves(model)[0]
    known = is_known(leaf)
    sharding = getattr(leaf, "sharding", None) if known else jax.typeof(leaf).sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    return sharding.mesh if known or sharding.mesh.size > 1 else None


def ways_of(mesh: Mesh | AbstractMesh | None) -> tuple[int, int] | None:
    """Return how many devices of a mesh split the rows, and the heads; None for one device.

    Example:
        >>> import jax
        >>> from models.plan import ways_of
        >>> ways_of(jax.sharding.AbstractMesh((1, 1), ("data", "tensor"))) is None
        True
    """
    return None if mesh is None or mesh.size == 1 else (mesh.shape["data"], mesh.shape["tensor"])


def kept_of(model: Decoder, cache: AnyCache, policy: Policy | None, rows: int) -> Kept:
    """Read what a run needs to know about the cache that it continues from, and check it against model and policy."""
    config = model.config
    if is_cache(getattr(cache, "cache", None)):
        raise ValueError(f"the cache is a {type(cache).__name__}; give its .cache.")
    if not is_cache(cache) or len(cache.heads_shape) != 3:
        raise ValueError(
            f"the cache is a {type(cache).__name__}; give what models.prefill or models.generate returned as cache."
        )
    leaves = jax.tree.leaves(cache)
    if not is_known(*leaves):
        raise ValueError("the cache is traced (by jax.jit, vmap or grad); call prefill, generate and stream outside.")
    if any(leaf.is_deleted() for leaf in leaves if isinstance(leaf, jax.Array)):
        raise ValueError("a later step has deleted this cache; continue from the last one that stream yielded.")
    L, B, K = cache.heads_shape
    ours = (config.num_layers, config.head_dim)
    one = cache.arrays
    theirs = (L, one.head_dim)
    if ours != theirs or K not in (config.num_kv_heads, config.num_heads):
        raise ValueError(
            f"the cache is of another model: it has {L} layers and {K} heads of dimension {theirs[1]}, this model has "
            f"{ours[0]} layers and {config.num_kv_heads} KV heads of dimension {ours[1]}."
        )
    if rows != B:
        advice = f": repeat it with kvjax.repeat(cache, {rows})" if B == 1 else ""
        raise ValueError(f"the cache has {B} rows, but {rows} prompts were given{advice}.")
    if policy is not None:
        paged = cache.paged
        if policy.allocation.even == paged and not (paged and any(config.sliding_windows)):
            kind, other = ("paged", "even") if paged else ("plain", "uneven")
            raise ValueError(
                f"the cache is {kind}, but {policy.name!r} divides the slots in an {other} way: give the policy that "
                "the cache was made with, or none."
            )
        if paged and policy.merging is not None and not policy.merging.biased:  # which only questions follow
            raise ValueError(
                f"{policy.name!r} merges values in plain caches, but this cache is paged: give the policy that it was "
                "made with, or none."
            )
        if (policy.heads == "query") != (config.num_kv_heads != K) and config.num_heads != config.num_kv_heads:
            raise ValueError(
                f"the cache holds {K} heads per layer, but {policy.name!r} is for "
                f"{cache_heads(config, policy)}: give the policy that the cache was made with, or none."
            )
        try:
            check_policy(policy, one, config.num_heads // K)
        except ValueError:
            raise ValueError(
                f"the cache's policy state is not that of {policy.name!r}: give the policy that the cache was made "
                "with, or none."
            ) from None
    held = np.moveaxis(hosts.fetched(cache.num_live), 1, 0).reshape(B, L * K)
    start, dtypes = hosts.fetched(cache.next_position), dtypes_of(one)
    sampled = samples_of(one.state)
    spent = sampled is not None and sampled.spent
    kept = Kept(
        K, start, held, cache.num_slots, cache.positions, dtypes, pages=cache.num_pages, page_size=cache.page_size,
        ways=cache.ways, spent=spent,
    )  # fmt: skip
    if policy is not None and Repeated.of(one.state) is not None:
        # A layer without a sliding window, if there is one, holds them all.
        layer = int(np.argmax([np.inf if window is None else window for window in config.sliding_windows]))
        kept = kept._replace(pending=unrepeated(*map(hosts.fetched, _of_a_head(cache, layer))))
    return kept


@functools.partial(jax.jit, static_argnums=1)
def _of_a_head(cache: AnyCache, layer: int) -> tuple[Array, Array, Array]:
    """Return the positions, scores and ids of one head's tokens, for a policy that has the model repeat them."""
    here = cache.layer(layer)
    state = Repeated.of(here.state)
    assert state is not None
    return here.position[:, 0], state.score[:, 0], state.token[:, 0]


def _padded(tokens: Tokens, lengths: HostOrDevice | None) -> tuple[np.ndarray, HostOrDevice | None]:
    """Return rows of tokens as one array, and their lengths."""
    if isinstance(tokens, list | tuple) and lengths is None and all(np.ndim(row) == 1 for row in tokens):
        counts = np.array([len(row) for row in tokens])
        if len(counts) and (counts != counts[0]).any():
            kinds = [np.asarray(row).dtype for row in tokens if len(row)]  # an empty row would be float64
            padded = np.zeros((len(counts), counts.max()), np.result_type(*kinds))
            for row, count, own in zip(padded, counts, tokens, strict=True):
                row[:count] = own
            return padded, counts
    try:
        return np.asarray(tokens), lengths
    except ValueError:
        raise ValueError(
            "tokens are rows of different lengths; give a list of rows, or pad them on the right and give lengths=."
        ) from None


def check_prompt(
    model: Decoder,
    tokens: Tokens | Prefilled,
    lengths: HostOrDevice | None,
    question: int | HostOrDevice | None,
    cache: AnyCache | None = None,
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
        if not answers:
            raise ValueError(
                "these tokens are in a cache already, as prefill returned it: make the answer with models.generate or "
                "stream, or feed more tokens with cache=prefilled.cache."
            )
        return _check_prefilled(model, tokens, lengths, question, cache, policy)
    if not is_known(*jax.tree.leaves((tokens, lengths, question))):
        raise ValueError(
            "the prompt is traced (by jax.jit, vmap or grad), but it is cut into blocks on the host: call prefill, "
            "generate and stream outside, as they are compiled anyway; inside, use kvjax.attend in model.run."
        )
    host, lengths = _padded(tokens, lengths)
    if host.ndim != 2 or not np.issubdtype(host.dtype, np.integer):
        raise ValueError(f"tokens are {host.dtype} {host.shape}; expected integers [B, T].")
    if host.size == 0:
        raise ValueError(f"the prompt is empty (tokens {host.shape}); give at least 1 token per row.")
    B, T = host.shape
    counts = np.full(B, T) if lengths is None else np.asarray(lengths)
    if not np.issubdtype(counts.dtype, np.integer) or counts.shape != (B,) or counts.min() < 1 or counts.max() > T:
        raise ValueError(f"lengths are {counts.tolist()}; expected {B} numbers from 1 (no empty prompt) to {T}.")
    counted = host[np.arange(T) < counts[:, None]]
    vocabulary = model.config.vocab_size
    if counted.min() < 0 or counted.max() >= vocabulary:
        wrong = counted.min() if counted.min() < 0 else counted.max()
        raise ValueError(f"token {wrong} is outside the vocabulary of {vocabulary}; was it made by another tokenizer?")
    questions = np.broadcast_to(np.asarray(0 if question is None else question), (B,))
    kept = None if cache is None else kept_of(model, cache, policy_of(policy), B)
    most = counts - 1 if kept is None else counts
    if not np.issubdtype(questions.dtype, np.integer) or questions.min() < 0 or (questions > most).any():
        raise ValueError(
            f"questions of {questions.tolist()} tokens were given for prompts of {counts.tolist()}; a question is the "
            "last part of its prompt, and some context must come before it."
        )
    return CheckedPrompt(host.astype(np.int32), counts.astype(np.int32), questions.astype(np.int32), kept)


def _check_prefilled(
    model: Decoder,
    given: Prefilled,
    lengths: HostOrDevice | None,
    question: int | HostOrDevice | None,
    cache: AnyCache | None,
    policy: Policy | str | None,
) -> CheckedPrompt:
    """Check prompts that are in a cache already, and the lengths of their questions that were held back."""
    if cache is not None or lengths is not None:
        raise ValueError("the result of prefill has its own cache and lengths; leave cache= and lengths= out.")
    logits = given.logits
    B = given.cache.heads_shape[-2] if is_cache(given.cache) else 0
    kept = kept_of(model, given.cache, policy_of(policy), B)
    if np.shape(logits) != (B, model.config.vocab_size):
        raise ValueError(
            f"the logits are {np.shape(logits)}; expected those of each row's last token, "
            f"{(B, model.config.vocab_size)}, as models.prefill returns them for outputs='last'."
        )
    questions = np.broadcast_to(np.asarray(0 if question is None else question), (B,))
    if not np.issubdtype(questions.dtype, np.integer) or questions.min() < 0 or (questions > kept.start).any():
        raise ValueError(
            f"questions of {questions.tolist()} tokens were given for prompts of {kept.start.tolist()}; a question is "
            "the last part of its prompt."
        )
    nothing = np.zeros((B, 0), np.int32)
    return CheckedPrompt(nothing, np.zeros(B, np.int32), questions.astype(np.int32), kept)
