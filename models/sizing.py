"""The sizes of a run's cache, from its plan, its prompts and their budgets."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import numpy as np

import kvjax
from kvjax import Policy
from kvjax._src.capacity import CacheSpec, most_held, rounded_up
from kvjax._src.checks import check_share_or_tokens
from kvjax._src.quantise import DtypesLike
from kvjax.allocation import CAP
from kvjax.schedule import copy_size, power_of_two, question_room, turn_block
from models.decoder import Decoder
from models.options import Options
from models.plan import Plan
from models.prompts import CheckedPrompt, Kept
from models.recurrent import states_of


def copied(policy: Policy, tokens: int) -> int:
    """Return how many tokens repeat a part of at most ``tokens`` tokens, with those that ask for it; 0 if none do."""
    wanted = policy.needs.reconstruction
    if wanted is None or not tokens:
        return 0
    return wanted.pseudo or copy_size(wanted, tokens)


def budgets_of(policy: Policy, options: Options, lengths: np.ndarray) -> np.ndarray:
    """Return each row's budget in slots per head, checked against what the policy protects."""
    budget = checked_budget(policy, options.budget, options.block)
    if isinstance(budget, int):
        return np.full(lengths.shape, budget, np.int32)
    budgets = share_of(lengths, budget)
    for row_budget in np.unique(budgets):
        kvjax.check_budget(policy, int(row_budget))
    return budgets


def share_of(lengths: np.ndarray, share: float) -> np.ndarray:
    """Return a share of texts in tokens: 0.07 of 100 is 7, not 7.000000000000001, of which the next integer is 8."""
    return np.ceil(np.round(share * lengths, 6)).astype(np.int32)


def reading_of(policy: Policy, options: Options, lengths: np.ndarray, budgets: np.ndarray) -> np.ndarray:
    """Return each row's budget while its prompt is read, checked against the one that it has in the end."""
    wide = budgets_of(policy, dataclasses.replace(options, budget=options.reading_budget), lengths)
    if (wide < budgets).any():
        raise ValueError(
            f"reading_budget is {options.reading_budget!r}, less than the budget, {options.budget!r}: give at least as "
            "much, or leave it out."
        )
    return wide


def checked_budget(policy: Policy, budget: int | float | str | None, block: int) -> int | float:
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
    spec: CacheSpec,
    plan: Plan,
    prompt: CheckedPrompt,
    options: Options,
    budgets: np.ndarray,
    reading: np.ndarray | None = None,
) -> CacheSpec:
    """Return the spec with the slots and pages that a run needs.

    Budgets and whole prompts are rounded up (:func:`kvjax._src.capacity.rounded_up`). Under a budget in slots nothing
    depends on the prompt, but the slots of a head that competes without a cap, which is read at that width, and those
    of a text that is shorter with its answer than the budget: it has as many as the next power of two.
    """
    policy, kept, text, fed = plan.policy, prompt.kept, prompt.text, prompt.fed
    assert policy is not None
    asked, whole = question_room(text.questions), plan.when == "prompt" and fed
    # The copies of a block, and of an answer; what is left of a prompt is repeated by blocks before the answer.
    copies, later = (copied(policy, size) if plan.repeats else 0 for size in (options.block, plan.evict_every))
    answer = max(plan.evict_every + later, copies) if plan.evict_every else options.reserve
    room = answer if whole or reading is not None or not fed else max(options.block + copies, answer)
    # A layer with a window that gave slots away grows back to its window while the others keep what they took.
    step = min(max(options.block + copies, 1 + later), asked + room) if policy.allocation.even else asked + room
    held, largest = [rounded_up(int(budget)) + asked for budget in budgets], int(budgets.max())
    all_tokens = prompt.most if fed else int(text.start.max())  # as many as one call for all would feed
    widest = policy.allocation.most(len(spec.windows), spec.kv_heads, largest)
    follows = isinstance(options.budget, float) or widest > CAP * largest
    most = all_tokens + options.reserve + max(copies, later)
    limit = rounded_up(most) if follows else power_of_two(most) if options.reserve else math.inf
    spec, empty = spec.sized(held, room, step, limit), spec
    if reading is not None:
        wide = empty.sized(
            [rounded_up(int(budget)) for budget in reading], max(options.block + copies, room), step, limit
        )
        return dataclasses.replace(spec, prompt_slots=wide.layer_slots, prompt_pages=wide.pages)
    # What comes in before the first eviction: the whole prompt and its copies, a block, or what follows the prompt.
    entering, context = answer, int(text.context.max())
    repeated = copied(policy, prompt.most) if whole else copies
    if whole and context:
        entering = text.tokens.shape[1] - int(text.questions.min()) + repeated
    elif fed and context:
        entering = turn_block(context, options.block) + repeated
    if kept is None:
        if not whole:
            return spec
        needed, first = (
            [int(n) for n in most_held(spec.windows, tokens, options.block + repeated)]
            for tokens in (entering, rounded_up(entering))
        )
        if spec.pages:
            return dataclasses.replace(spec, prompt_slots=tuple(first))
        larger = any(map(operator.gt, needed, spec.layer_slots))
        return dataclasses.replace(spec, prompt_slots=tuple(map(max, first, spec.layer_slots))) if larger else spec
    if fed and (text.context == 0).any():
        entering = max(entering if context else 0, asked + answer)  # a question is not repeated
    step = max(step, options.block + repeated) if fed else step
    return resized(spec, kept, entering, step, fed and bool((text.context > 0).all()))


def resized(spec: CacheSpec, kept: Kept, entering: int, step: int, evicted: bool = False) -> CacheSpec:
    """Return the spec of a run that continues in a cache, which keeps its size if that is large enough.

    Args:
        entering: the tokens that come into a head before the first eviction.
        step: how many of them a layer with a window holds beside its window.
        evicted: whether every row is evicted from before its question: then a plain cache of more than twice the size
            that is needed later is shrunk.
    """

    def grown(own: int, later: int, needed: int) -> int:
        return max(own, later if needed <= later else rounded_up(needed))

    if kept.pages:
        new = np.repeat(most_held(spec.windows, entering, step), spec.kv_heads).astype(int)
        pages = max(spec.pages, spec.pages_of(spec.on_devices(kept.held + new)))
        pages = kept.pages if kept.pages >= pages else rounded_up(pages)
        most = grown(kept.layer_slots[0], spec.slots, kept.most + entering)
        return dataclasses.replace(spec, layer_slots=(most,), pages=pages)
    held = kept.held.reshape(len(kept.held), len(spec.windows), -1).max(axis=(0, 2)).tolist()
    # From a run without a policy, a layer may hold more than its window, until the first block has come in.
    wide = [None if window is None else max(window, own) for window, own in zip(spec.windows, held, strict=True)]
    needed = [most_held([most], own + entering, step)[0] for most, own in zip(wide, held, strict=True)]
    slots = tuple(map(grown, kept.layer_slots, spec.layer_slots, map(int, needed)))
    if evicted and sum(slots) > 2 * sum(spec.layer_slots):
        return dataclasses.replace(spec, prompt_slots=slots)
    return dataclasses.replace(spec, layer_slots=slots)


def full_cache_bytes(model: Decoder, tokens: int, dtype: DtypesLike | None = None) -> int:
    """Compute the bytes of a cache of so many tokens; ``dtype`` is of keys and values, the model's by default."""
    if not tokens:
        return 0
    config, own = model.config, model.embedding[...].dtype
    heads, dims = zip(*config.cached_heads, strict=True)
    sizes: Any = dict(layers=len(heads), kv_heads=heads, head_dim=dims)
    sizes["rotated"] = None if config.latent is None else config.latent.rotated
    sizes |= dict(recurrent=states_of(config, own))
    return kvjax.memory(**sizes, budget=tokens, block=0, dtype=own if dtype is None else dtype).total
