"""What a run is made of: its arguments checked, its buffers sized, its prompts cut into blocks.

Blocks are aligned to the prompt's end: the first block of a row may be part empty, the last one never is. So a score's
observation window lies in one block, all rows of a batch reach their last token in the same step, and a row meets the
same blocks alone as in any batch. A question that must not be known when the context is compressed comes after it, in
blocks of its own.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, Int

import kvjax
from kvjax import Policy
from kvjax.checks import MOST, check_count, is_known, plain, shown
from kvjax.policy import policy_of
from kvjax.sources import Source
from models.butler import Butler, ButlerConfig
from models.config import Config
from models.decoder import Decoder
from models.selecting import Selection, check_butler, checked_selection

When = Literal["block", "prompt"]
HostOrDevice = Array | np.ndarray
PAGE_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of :func:`models.generate` that decide what is kept, and where; see there."""

    policy: Policy | str | None = None
    budget: int | float | None = None
    block: int = 128
    when: When = "block"
    evict_every: int | None = None
    select: Source | str | None = None
    sinks: int = 4
    page_size: int = PAGE_SIZE
    reserve: int = 0  # tokens that come after the prompt
    fit_prompt: bool = True  # a short prompt may have fewer slots


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run is made of, and its buffers' sizes; one compilation per plan."""

    policy: Policy | None
    slots: int  # of each head, at the end of the prompt and in decode; the most of one head where they differ
    prompt_slots: int  # likewise, while the prompt comes in
    when: When
    evict_every: int | None
    mesh: Mesh | AbstractMesh | None
    pages: int = 0  # of a paged cache
    page_size: int = PAGE_SIZE
    selection: Selection | None = None
    predictor_slots: int = 0  # of what is remembered beside the cache, where there is a predictor or a selection
    predictor: ButlerConfig | None = None


class Blocks(NamedTuple):
    """Tokens cut into blocks, and their positions, -1 for padding.

    ``used`` says how many blocks count where more were made, so that one program serves many lengths; None for all.
    """

    tokens: Int[HostOrDevice, "n B m"]
    positions: Int[HostOrDevice, "n B m"]
    used: Int[HostOrDevice, ""] | None = None


class Prompt(NamedTuple):
    """Prompts in blocks: those of the context, and those of a question that comes after it."""

    context: Blocks
    question: Blocks


class CheckedPrompt(NamedTuple):
    """Prompts on the host, padded on the right: on the device each length of a prompt would compile again."""

    tokens: np.ndarray
    lengths: np.ndarray
    questions: np.ndarray


class Rows(NamedTuple):
    """What the rows of a batch differ in, [B]: lengths, budgets, and what they hold in decode."""

    lengths: Int[Array, "B"]
    budgets: Int[Array, "B"] | None = None
    decode_budgets: Int[Array, "B"] | None = None


def cache_heads(config: Config, policy: Policy | None) -> int:
    """Heads of the cache: KV heads, or query heads where each has a cache of its own."""
    return config.num_heads if policy is not None and policy.heads == "query" else config.num_kv_heads


def bucketed(size: int) -> int:
    """A size rounded up to one of eight per octave: at most an eighth more, and few programs.

    Example:
        >>> from models.plan import bucketed
        >>> [bucketed(n) for n in (7, 100, 1000, 1024)]
        [7, 104, 1024, 1024]
    """
    step = 1 << max(size.bit_length() - 4, 0)
    return -(-size // step) * step


def blocks_of(prompt: CheckedPrompt, block: int, exact: bool = False) -> Prompt:
    """Cuts prompts into blocks that end where the context ends, and the question into blocks that end where it ends.

    On the host: on the device each length of a prompt would compile again.

    Args:
        exact: no more blocks than the prompt has; else their number is a power of two, and a count says where to stop.
    """
    tokens, lengths, questions = prompt
    context = lengths - questions
    small = max(1, min(block, _question_room(questions)))
    return Prompt(
        _cut(tokens, np.zeros_like(context), context, block, exact), _cut(tokens, context, lengths, small, exact)
    )


def _question_room(questions: np.ndarray) -> int:
    """Slots for the longest question, a power of two: few sizes, so few compilations."""
    longest = int(questions.max())
    return power_of_two(longest) if longest else 0


def power_of_two(size: int) -> int:
    """The next one from ``size`` on."""
    return 1 << (size - 1).bit_length()


def _cut(tokens: np.ndarray, start: np.ndarray, stop: np.ndarray, block: int, exact: bool) -> Blocks:
    """Blocks of tokens[start:stop]; padding stands in front."""
    B, T = tokens.shape
    count = math.ceil((stop - start).max() / block)
    position = np.arange(count * block)[None] - (count * block - stop[:, None])
    aligned = np.take_along_axis(tokens, np.clip(position, 0, T - 1), axis=1)
    position = np.where(position >= start[:, None], position, -1)
    blocks, positions = (x.astype(np.int32).reshape(B, count, block).swapaxes(0, 1) for x in (aligned, position))
    if exact or not count:
        return Blocks(blocks, positions)
    more = ((0, power_of_two(count) - count), (0, 0), (0, 0))
    return Blocks(np.pad(blocks, more), np.pad(positions, more, constant_values=-1), np.asarray(count, np.int32))


def plan_run(model: Decoder, prompt: CheckedPrompt, options: Options, butler: Butler | None) -> tuple[Plan, Rows]:
    """Checks the options of a run against its model and prompts, and sizes its buffers."""
    config, mesh = model.config, mesh_of(model)
    lengths, questions, T = prompt.lengths, prompt.questions, prompt.tokens.shape[1]
    if options.when not in ("block", "prompt"):
        raise ValueError(f"when is {options.when!r}; there are 'block' and 'prompt'.")
    every = options.evict_every
    if every is not None:
        every = check_count("evict_every", every, 1, "give a number of steps from 1, or None for never")
    policy = policy_of(options.policy)
    options = dataclasses.replace(
        options,
        policy=policy,
        budget=plain(options.budget),
        evict_every=every,
        reserve=check_count("reserve", options.reserve, 0, "give a number of slots, from 0"),
        page_size=check_count("page_size", options.page_size, 1, "a page has at least 1 slot"),
    )
    if mesh is not None and len(lengths) % mesh.shape["data"]:
        ways = mesh.shape["data"]
        raise ValueError(
            f"data={ways} does not divide the batch of {len(lengths)}; give a multiple of {ways} rows, or data=1."
        )
    selection = checked_selection(
        options.select, policy, options.budget, options.sinks, int(lengths.max()), options.reserve
    )
    check_butler(config, butler, policy, selection)
    if policy is None:
        return _plan_full(config, mesh, T, prompt, options, selection, butler)
    remembered = 0
    if butler is not None:
        policy = kvjax.fit_predictor(policy, butler.config.dim)
        remembered = bucketed(T + options.reserve)
    budgets = _budgets(policy, options, lengths)
    kept = Rows(*jax.device_put((lengths, budgets, budgets + questions)))
    plan = Plan(
        policy, 0, 0, options.when, options.evict_every, mesh, page_size=options.page_size,
        predictor_slots=remembered, predictor=None if butler is None else butler.config,
    )  # fmt: skip
    return _sized(config, plan, prompt, options, budgets), kept


def _plan_full(
    config: Config,
    mesh: Mesh | AbstractMesh | None,
    T: int,
    prompt: CheckedPrompt,
    options: Options,
    selection: Selection | None,
    butler: Butler | None,
) -> tuple[Plan, Rows]:
    """A run in which nothing is evicted."""
    positions, most = T + options.reserve, config.max_positions
    if options.budget is not None and selection is None:
        raise ValueError(
            f"a budget of {options.budget} was given without a policy that says what to keep; try 'snapkv+caote'."
        )
    if positions > most:
        raise ValueError(
            f"the prompt and its answer take {positions} positions, but the model has {most}: "
            "shorten the prompt, or give a policy and a budget."
        )
    slots = bucketed(positions)
    plan = Plan(
        None, slots, slots, "block", None, mesh, selection=selection,
        predictor_slots=0 if selection is None else slots, predictor=None if butler is None else butler.config,
    )  # fmt: skip
    return plan, Rows(jax.device_put(prompt.lengths))


def _budgets(policy: Policy, options: Options, lengths: np.ndarray) -> np.ndarray:
    """Slots per head of each row, checked against what the policy protects."""
    budget = options.budget
    if budget is None:
        raise ValueError(f"the policy {policy.name!r} needs a budget: slots per head, or a ratio of the prompt.")
    if isinstance(budget, bool) or not isinstance(budget, int | float) or budget > MOST:
        raise ValueError(
            f"the budget is {shown(budget)}; give slots per head (an int), or a ratio (a float in (0, 1])."
        )
    if isinstance(budget, float) and not 0 < budget <= 1:
        raise ValueError(f"the budget's ratio is {budget}; give a float in (0, 1], or an int for slots per head.")
    if isinstance(budget, float):
        budgets = np.ceil(np.round(budget * lengths, 6)).astype(np.int32)  # 0.07 of 100 is 7, not 7.000000000000001
    else:
        budgets = np.full(lengths.shape, budget, np.int32)
    for row_budget in np.unique(budgets):
        kvjax.check_budget(policy, int(row_budget))
    kvjax.check_block(policy, options.block)
    return budgets


def _sized(config: Config, plan: Plan, prompt: CheckedPrompt, options: Options, budgets: np.ndarray) -> Plan:
    """The plan with the sizes of its buffers."""
    policy, T = plan.policy, prompt.tokens.shape[1]
    assert policy is not None
    largest, asked = int(budgets.max()), _question_room(prompt.questions)
    decode_room = options.reserve if plan.evict_every is None else plan.evict_every
    whole = plan.when == "prompt"
    room = decode_room if whole else max(options.block, decode_room)
    prompt_slots = bucketed(T - int(prompt.questions.min())) if whole else 0
    # No more than all tokens are ever held. A stream's buffers do not depend on the prompt; they only stay sensible.
    sensible = max(power_of_two(T + options.reserve), config.max_positions)
    most_slots = T + options.reserve if options.fit_prompt else sensible
    by_ratio = isinstance(options.budget, float)  # then the sizes follow the prompt's length

    def fitted(slots: int) -> int:
        return bucketed(slots) if by_ratio or slots >= most_slots else slots

    if policy.allocation.even:
        slots = fitted(min(largest + asked + room, sensible if whole else most_slots))
        prompt_slots = max(slots, prompt_slots) if whole else slots
        return dataclasses.replace(plan, slots=slots, prompt_slots=prompt_slots)
    if plan.mesh is not None:
        raise ValueError(
            f"{policy.name!r} shares one pool of pages among all heads, which lie on several devices here; take an "
            "allocation that gives all heads the same ('uniform'), or one device."
        )
    heads = cache_heads(config, policy)
    most = policy.allocation.most(config.num_layers, heads, largest + asked) + room
    most = fitted(min(most, most_slots))
    held = np.minimum(budgets + asked + room, most_slots)
    heads *= config.num_layers
    pages = kvjax.pages_for(heads * int(held.sum()), len(budgets) * heads, plan.page_size)
    pages = bucketed(pages) if by_ratio or held.max() >= most_slots else pages
    return dataclasses.replace(plan, slots=most, prompt_slots=prompt_slots, pages=pages)


def mesh_of(model: Decoder) -> Mesh | AbstractMesh | None:
    """The mesh that a model lies on, if it lies on one."""
    sharding = getattr(jax.tree.leaves(model)[0], "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None


def check_prompt(
    model: Decoder, tokens: HostOrDevice, lengths: HostOrDevice | None, question: int | HostOrDevice | None
) -> CheckedPrompt:
    """Prompts, their lengths and those of their questions, or a sentence about what is wrong with them."""
    if not isinstance(model, Decoder):
        raise ValueError(f"the model is a {type(model).__name__}; give a Decoder, such as models.load gives.")
    if not is_known(*jax.tree.leaves((tokens, lengths, question))):
        raise ValueError(
            "the prompt is traced (by jax.jit, vmap or grad), but it is cut into blocks on the host: call prefill, "
            "generate and stream outside, as they compile themselves; inside, kvjax.attend in model.run works."
        )
    try:
        host = np.asarray(tokens)
    except ValueError:
        raise ValueError("tokens are rows of different lengths; pad them on the right and give lengths=.") from None
    if host.ndim != 2 or not np.issubdtype(host.dtype, np.integer):
        raise ValueError(f"tokens are {host.dtype} {host.shape}; expected integers [B, T].")
    if host.size == 0:
        raise ValueError(f"the prompt is empty (tokens {host.shape}); give at least 1 token a row.")
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
    if not np.issubdtype(questions.dtype, np.integer) or questions.min() < 0 or (questions >= counts).any():
        raise ValueError(
            f"questions of {questions.tolist()} tokens were given for prompts of {counts.tolist()}; a question is the "
            "last part of its prompt, and some context must stand before it."
        )
    return CheckedPrompt(host.astype(np.int32), counts.astype(np.int32), questions.astype(np.int32))
