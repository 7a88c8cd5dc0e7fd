"""The sizes of a run's buffers, from its plan, its prompts and their budgets."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jaxtyping import Int

import kvjax
from kvjax import Policy
from kvjax.allocation import CAP, UNIFORM
from kvjax.capacity import Demand, Layout, capacity, in_pages, rounded_up
from kvjax.checks import check_share_or_tokens
from kvjax.schedule import power_of_two, question_room, words_of
from models.config import Config
from models.options import Options
from models.plan import Plan, Sizes
from models.prompts import CheckedPrompt, Kept, ways_of


def rounded(size: int, options: Options, whole: bool = False) -> int:
    """Round a size up: at most an eighth is spare; a half in a stream, which compiles three programs for each size.

    Args:
        whole: whether the buffer holds the whole prompt. A stream's grows by doubling then, as without a policy.
    """
    few = 1 if whole or options.policy is None else 2
    return rounded_up(size, 8 if options.fit_prompt else few)


def copied(policy: Policy, tokens: int) -> int:
    """Return how many tokens repeat a part of at most ``tokens`` tokens, with those that ask for it; 0 if none do."""
    wanted = policy.needs.reconstruction
    if wanted is None or not tokens:
        return 0
    return wanted.pseudo or min(wanted.chunk, tokens) + words_of(wanted.prompt)


def budgets_of(policy: Policy, options: Options, lengths: np.ndarray) -> np.ndarray:
    """Return each row's budget in slots per head, checked against what the policy protects."""
    budget = checked_budget(policy, options.budget, options.block)
    if isinstance(budget, int):
        return np.full(lengths.shape, budget, np.int32)
    budgets = np.ceil(np.round(budget * lengths, 6)).astype(np.int32)  # 0.07 of 100 is 7, not 7.000000000000001
    for row_budget in np.unique(budgets):
        kvjax.check_budget(policy, int(row_budget))
    return budgets


def checked_budget(policy: Policy, budget: int | float | None, block: int) -> int | float:
    """Return a policy's budget as it can be checked without a prompt, which a share refers to; the block as well."""
    if budget is None:
        raise ValueError(f"the policy {policy.name!r} needs a budget: slots per head, or a ratio of the prompt.")
    budget = check_share_or_tokens(budget)
    if isinstance(budget, int):
        kvjax.check_budget(policy, budget)
    kvjax.check_block(policy, block)
    return budget


def held_of(policy: Policy, kept: Kept) -> np.ndarray:
    """Count the tokens per head of each row as the budget does: in the fullest head, or on average."""
    return kept.held.max(axis=1) if policy.allocation.even else np.ceil(kept.held.mean(axis=1))


def sized(
    config: Config, plan: Plan, prompt: CheckedPrompt, options: Options, budgets: np.ndarray, traced: bool
) -> Sizes:
    """Return the sizes of a run's buffers.

    Through ``traced`` weights a derivative may be taken, which passes through no eviction from pages.
    """
    policy, kept, by_ratio = plan.policy, prompt.kept, isinstance(options.budget, float)
    assert policy is not None
    asked, whole = question_room(prompt.text.questions), plan.when == "prompt" and prompt.fed
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
    # A budget is a number of the run, like a length: near ones share all their sizes, and so their programs.
    few = 4 if not by_ratio else 8 if options.fit_prompt else 2
    held = np.array([rounded_up(int(budget), few, beside=asked + room) for budget in budgets])
    # No head ever holds more than all tokens. A stream's buffers do not depend on the prompt, but have an upper limit.
    # Where heads compete by a ratio, or without a cap, they follow it by powers of two: a head is read at that width.
    all_tokens = prompt.most if prompt.fed else int(prompt.text.start.max())  # as many as one call for all would feed
    if isinstance(options.budget, float) and not options.fit_prompt:
        all_tokens = math.ceil(int(held.max()) / options.budget)
    limit = all_tokens + options.reserve + max(copies, later)
    if not options.fit_prompt:
        limit = _stream_limit(config, policy, prompt, options, int(budgets.max()), limit)
    demand = Demand(held + asked, room, step, limit)
    before = 0  # slots for the whole prompt and its copies
    if whole and (prompt.text.context > 0).any():
        more = prompt.most - int(prompt.text.questions.min()) + copied(policy, prompt.most)
        before = rounded(more, options, whole=True)
    layout = layout_of(config, plan, options.page_size)
    if kept is not None:
        return _resized(plan, layout, prompt, options, demand, before, (copies, asked + decode_room))
    plain = policy.allocation.even and (plan.several is not None or traced)
    slots, pages = capacity(layout, demand, not plain and in_pages(policy, int(budgets.max()), config.sliding_windows))
    if slots >= limit:  # then it follows the prompt's length
        slots = rounded(slots, options)
    if pages:
        return Sizes(slots, before, _pages(layout, demand, options), options.page_size)
    return Sizes(slots, max(slots, before))


def _stream_limit(
    config: Config, policy: Policy, prompt: CheckedPrompt, options: Options, largest: int, limit: int
) -> int:
    """Return the most tokens that a head of a stream's buffers may hold; ``limit`` is what the prompt would need."""
    widest = policy.allocation.most(config.num_layers, config.num_kv_heads, largest)
    if widest > largest and (isinstance(options.budget, float) or widest > CAP * largest):
        return power_of_two(limit)
    return max(power_of_two(prompt.most + options.reserve), config.max_positions)


def _pages(layout: Layout, demand: Demand, options: Options) -> int:
    """Return the pages of each device, rounded where they follow the prompt's length."""
    pages = capacity(layout, demand, paged=True).pages
    assert demand.limit is not None
    return rounded(pages, options) if (demand.held + demand.room).max() >= demand.limit else pages


def _resized(
    plan: Plan,
    layout: Layout,
    prompt: CheckedPrompt,
    options: Options,
    demand: Demand,
    before: int,
    more: tuple[int, int],
) -> Sizes:
    """Size the buffers of a run that continues in a cache, which may hold more than the budget until it evicts.

    ``more`` are the tokens that come in with a block, and those of a question and an answer, before the first eviction.
    """
    assert prompt.kept is not None
    context = int(prompt.text.context.max())
    entering = min(options.block, power_of_two(context)) + more[0] if context else 0  # a question is not repeated
    if (prompt.text.context == 0).any():
        entering = max(entering, more[1])
    resized = _resized_pages if prompt.kept.pages else _resized_slots
    return resized(plan, layout, prompt, options, demand, before, entering)


def _resized_slots(
    plan: Plan, layout: Layout, prompt: CheckedPrompt, options: Options, demand: Demand, before: int, entering: int
) -> Sizes:
    """Size the slots of a run that continues in a plain cache, which keeps its size if it is large enough.

    ``before`` are slots for the whole prompt, if it is evicted from once, else 0; ``entering`` are the tokens that come
    in before the first eviction.
    """
    kept, (slots, _) = prompt.kept, capacity(layout, demand, paged=False)
    assert kept is not None and demand.limit is not None
    if not prompt.fed:  # the size that one call for both prompt and answer would have made
        slots = min(max(int(demand.held.max()), kept.most) + demand.room, demand.limit)
    if slots >= demand.limit:
        slots = rounded(slots, options)
    if not prompt.fed:
        slots = max(kept.slots, slots)
        return Sizes(slots, slots)
    evicted = bool((prompt.text.context > 0).all())
    return with_slots(Sizes(slots, max(slots, before)), options, kept, slots, kept.most + entering, evicted)


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
        if plan.when == "prompt" and (context := int(prompt.text.context.max())):  # all is fed into the same pages
            repeated = copied(policy, prompt.most)
            entering = max(entering, context + repeated)
        # Before its first eviction a layer with a window may hold all that it held, a window and a block.
        new = layout.most_held(entering, max(demand.step, options.block) + repeated)
        together = layout.on_devices(kept.held + np.repeat(new, layout.heads))
        usual = layout.slots_of_rows(demand._replace(limit=None))
        slots = min(max(most, kept.most + entering), demand.limit)
        return with_pages(layout, Sizes(0, before), options, kept, slots, np.maximum(together, usual))
    # The size that one call for both prompt and answer would have made.
    slots = min(max(most, kept.most + demand.room), demand.limit)
    slots = rounded(slots, options) if slots >= demand.limit else slots
    full = demand._replace(held=np.maximum(demand.held, held_of(policy, kept).astype(int)))
    limits = np.repeat([np.inf if window is None else window + demand.step for window in layout.windows], layout.heads)
    grown = np.maximum(kept.held + min(demand.room, 1), np.minimum(kept.held + demand.room, limits)).astype(int)
    pages = _pages(layout, full, options)
    pages = max(kept.pages, pages, layout.pages(layout.on_devices(grown)))
    return Sizes(max(kept.slots, slots), 0, pages, kept.page_size)


def with_slots(sizes: Sizes, options: Options, kept: Kept, slots: int, first: int = 0, evicted: bool = False) -> Sizes:
    """Size the slots of a run that continues in a plain cache, which keeps its size if it is large enough.

    A head needs ``slots`` after the first eviction, and ``first`` before it. Where every row is ``evicted`` from before
    its question, a cache of more than twice the needed size is shrunk.
    """
    needed = max(slots, first)
    usual = kept.slots if kept.slots >= needed else rounded(needed, options)
    before = max(usual, sizes.prompt_slots)
    after = rounded(slots, options) if evicted and before > 2 * slots else usual
    return sizes._replace(slots=after, prompt_slots=before)


def with_pages(
    layout: Layout, sizes: Sizes, options: Options, kept: Kept, most: int, held: Int[np.ndarray, "B ways"]
) -> Sizes:
    """Size the pages of a run that continues in a paged cache, which keeps its size if it is large enough.

    A head holds at most ``most`` tokens, and the heads of a device together ``held`` in each row.
    """
    pages = layout.pages(held)
    pages = kept.pages if kept.pages >= pages else rounded(pages, options)
    slots = kept.slots if kept.slots >= most else rounded(most, options)
    return sizes._replace(slots=slots, pages=pages, page_size=kept.page_size)


def layout_of(config: Config, plan: Plan, page_size: int) -> Layout:
    """Return where the heads of a run's cache are."""
    allocation = UNIFORM if plan.policy is None else plan.policy.allocation
    return Layout(plan.heads, tuple(config.sliding_windows), allocation, page_size, ways_of(plan.mesh))
