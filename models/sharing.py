"""Runs one prompt for many policies. Until one of them evicts, the model's work is the same, so it is done once.

Policies that evict once, after the prompt, observe the same blocks together (``kvjax.observe_each``); then each evicts
from its own copy of the cache. A policy that cannot share runs alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np
from jaxtyping import Array, Float, Int

import kvjax
from kvjax import Evidence, KVCache, Policy
from kvjax.chains import policy_of
from kvjax.layer import LayerBlock
from kvjax.policy import fits_biases
from kvjax.reconstruction import Reconstruction
from kvjax.schedule import HostOrDevice
from models.decoder import Decoder, sliding_windows
from models.engine import logits_of, prefill, projected, run_question, scheduled
from models.host_steps import newest_of
from models.networks import read_by
from models.options import EachSettings, Options, options_of
from models.plan import Plan, Sizes
from models.planning import plan_run
from models.prompts import CheckedPrompt, Prefilled, Tokens, check_prompt
from models.states import shrink, start
from models.steps import DecodeState, Run, at_layer, block_of, first_of, rounded_block, with_gradient

Asked = Policy | str | None | tuple[Policy | str | None, int | float | None]


class _Arm(NamedTuple):
    """One policy and budget, and the run that it would have alone."""

    options: Options
    run: Run
    sizes: Sizes

    def shares(self, asked: bool) -> bool:
        """Return whether it may share the prompt: nothing is evicted before its end, and no key is rotated again.

        Questions that are held back (``asked``) cannot be fed after a cache where the rope follows the length.
        """
        plan = self.run.plan
        # A policy frees what left a sliding window, and a full cache keeps it.
        late = not any(self.run.model.config.sliding_windows) if plan.policy is None else plan.when == "prompt"
        fixed = not (asked and self.run.model.config.rope.follows_length)
        return late and fixed and self.run.network is None and plan.positions == "absolute"

    @property
    def group(self) -> tuple[int, Reconstruction | None, bool]:
        """Return what arms that share have in common: the heads and arrays of the cache, and what is fed again."""
        plan = self.run.plan
        return plan.heads, None if plan.policy is None else plan.policy.needs.reconstruction, fits_biases(plan.policy)


def prefill_each(
    model: Decoder,
    tokens: Tokens,
    *,
    lengths: Int[HostOrDevice, "B"] | None = None,
    policies: Sequence[Asked],
    options: Options | None = None,
    question: int | Int[HostOrDevice, "B"] | None = None,
    **settings: Unpack[EachSettings],
) -> Iterator[Prefilled]:
    """Run one prompt under many policies and budgets; those that evict once, after the prompt, share the model's work.

    Each result is what :func:`models.prefill` returns for that policy and budget alone, and is made when its turn
    comes: at any time, memory holds the uncompressed cache of the prompt and the cache of one policy. Policies that
    observe the prompt once more after its end, in the same way, share that, too. Policies that evict after every block,
    that read a network, or that rotate keys again run alone.

    Args:
        policies: policies or their short names, None or "full" for all tokens; or pairs of a policy and its budget.
        tokens, lengths, question, options, settings: see :func:`models.prefill`, but ``when`` is "prompt" by default.
            ``budget`` is that of policies that are given without one; each takes the one of the
            ``networks`` that it reads, and computes its own projection.

    Returns:
        An iterator over the results, in the order of ``policies``.

    Raises:
        ValueError: no policy was given, or :func:`models.prefill` would reject one of them. Raised before the model
            runs.

    Example:
        >>> import models
        >>> model = models.Decoder.tiny()
        >>> asked = ["full", "h2o", ("h2o", 0.25), "snapkv(window=8)+caote"]
        >>> each = models.prefill_each(
        ...     model, [range(40)], policies=asked, budget=16, block=8
        ... )
        >>> [cache.num_live.max().item() for cache, _ in each]
        [40, 16, 10, 16]
    """
    options = options_of("prefill_each", EachSettings, options, settings, evict_every=0, projection=None)
    options = dataclasses.replace(options, when="prompt" if options.when is None else options.when)
    if isinstance(policies, str | Policy) or not isinstance(policies, Iterable):
        raise ValueError(f"policies is {policies!r}; give a list of policies, such as ['full', ('snapkv+caote', 256)].")
    pairs = [asked if isinstance(asked, tuple) else (asked, options.budget) for asked in policies]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError(
            f"policies is {list(policies)!r}; give at least one policy, or one pair of a policy and its budget, such "
            "as ['full', ('snapkv+caote', 256)]."
        )
    given = check_prompt(model, tokens, lengths, question)
    arms = []
    for asked, own in pairs:
        policy = policy_of(asked)
        budget = None if policy is None else own
        alone = dataclasses.replace(options, policy=policy, budget=budget, networks=read_by(options.networks, policy))
        arms.append(_Arm(alone, *plan_run(model, given, alone)))
    return _each(model, given, arms)


def _each(model: Decoder, given: CheckedPrompt, arms: Sequence[_Arm]) -> Iterator[Prefilled]:
    groups: dict[Any, list[int]] = {}
    text = given.text
    asked = bool(text.questions.any())
    for number, arm in enumerate(arms):
        if arm.shares(asked):
            groups.setdefault(arm.group, []).append(number)
    seen: dict[Any, _Seen] = {}
    for number, arm in enumerate(arms):
        together = groups.get(arm.group, []) if arm.shares(asked) else []
        if len(together) < 2:
            yield prefill(model, text.tokens, lengths=text.lengths, options=arm.options, question=text.questions)
            continue
        if arm.group not in seen:
            seen[arm.group] = _observe(model, given, [arms[index] for index in together])
        place = together.index(number)
        result = _compressed(model, given, arm, seen[arm.group], place)
        if number == together[-1]:
            del seen[arm.group]
        yield result


class _Seen(NamedTuple):
    """The prompt as all policies of a group have observed it.

    ``cache`` holds all tokens, and as its state a tuple with one state per policy. ``said`` is each policy's evidence
    about the slots of all layers (None for a policy that keeps all). ``logits`` are those of each row's last token.
    """

    cache: KVCache
    said: tuple[Evidence | None, ...]
    logits: Float[Array, "B V"]


def _observe(model: Decoder, given: CheckedPrompt, arms: Sequence[_Arm]) -> _Seen:
    """Feed the context, and what is to be fed again, to the model once, while each policy observes it."""
    first = next((arm for arm in arms if arm.run.plan.policy is not None), arms[0])
    stages = scheduled(given, first.options, first.run).context
    slots = max(arm.sizes.prompt_slots for arm in arms)
    plans = [arm.run.plan for arm in arms]
    kinds = frozenset().union(*(plan.policy.needs.projections for plan in plans if plan.policy is not None))
    projection = projected(model, kinds, plans[0].heads) if kinds else None
    runs = tuple(dataclasses.replace(arm.run, projection=projection) for arm in arms)
    B = len(given.text.lengths)
    cache = _start(runs, Sizes(slots, slots), B)
    last: Any = np.zeros((B, 1, model.config.hidden_size), model.embedding[...].dtype)
    said: tuple[Evidence | None, ...] = ()
    for stage in stages:
        for phase, tokens, position, part in stage:
            hidden, cache, said = _block(runs, cache, tokens, position, part, phase.evicts)
            last = newest_of(position, hidden, last) if part is None else last
    return _Seen(cache, said, logits_of(model, last)[:, 0])


@functools.partial(jax.jit, static_argnames=("sizes", "batch"))
def _start(runs: tuple[Run, ...], sizes: Sizes, batch: int) -> KVCache:
    caches: list[Any] = [start(run, sizes, batch).cache for run in runs]
    return dataclasses.replace(caches[0], state=tuple(cache.state for cache in caches))


@functools.partial(jax.jit, static_argnames="asks", donate_argnames="cache")
def _block(
    runs: tuple[Run, ...],
    cache: KVCache,
    tokens: Int[Array, "B T"],
    position: Int[Array, "B T"],
    part: Int[Array, "B 3"] | None,
    asks: bool,
) -> tuple[Float[Array, "B T E"], KVCache, tuple[Evidence | None, ...]]:
    """Feed a block to all layers, of one model and projection; ``asks`` says whether the policies evict after it."""
    model, projection, lengths = runs[0].model, runs[0].projection, runs[0].rows.lengths
    plans, budgets = tuple(run.plan for run in runs), tuple(run.rows.budgets for run in runs)
    watching = [index for index, plan in enumerate(plans) if plan.policy is not None]
    policies = [policy for plan in plans if (policy := plan.policy) is not None]
    of_whom = next((plan for plan in plans if plan.policy is not None and plan.policy.needs.rotary), plans[0])
    block = block_of(model.config, of_whom, tokens, position, lengths, None, part)
    if part is not None:
        cache = kvjax.rewind(cache, first_of(position))
        block = with_gradient(model, of_whom, cache, block, tokens, part, lengths)
    states, shares = cache.state, [budget for budget in budgets if budget is not None]
    windows = sliding_windows(model.config)
    empty = (Evidence.of_layers(cache, p.allocation, block.context.end, windows, p.merging) for p in policies)
    whole = tuple(empty) if asks else ()

    def attend_at(carry, index, window, query, key, value):
        cache, said = carry
        part = None if projection is None else projection.layer(index)
        context = at_layer(model.config, block, index, sliding_window=window, projection=part, compressed=False).context
        own = rounded_block(plans[0], LayerBlock(query, key, value, position))
        if not policies:
            out, cache, _ = kvjax.observe(cache, *own, policy=None, context=context)
            return out, (cache, said), None
        out, cache, new = kvjax.observe_each(cache, *own, policies=policies, budgets=shares, context=context)
        if said:
            said = tuple(old.with_layer(cache, index, own) for old, own in zip(said, new, strict=True))
        return out, (cache, said), None

    cache = dataclasses.replace(cache, state=tuple(states[index] for index in watching))
    hidden, (cache, said), _ = model.run(tokens, position, lengths, attend_at, (cache, whole))
    after = dict(zip(watching, cache.state, strict=True))
    cache = dataclasses.replace(cache, state=tuple(after.get(index, ()) for index in range(len(plans))))
    by_place = dict(zip(watching, said, strict=True)) if asks else {}
    return hidden, cache, tuple(by_place.get(index) for index in range(len(plans)))


def _compressed(model: Decoder, given: CheckedPrompt, arm: _Arm, seen: _Seen, place: int) -> Prefilled:
    """Evict from one policy's copy of the cache, then feed it the question, if one was held back."""
    sizes = arm.sizes._replace(prompt_slots=seen.cache.num_slots)
    own = dataclasses.replace(seen.cache, state=seen.cache.state[place])
    # Without its policy, the plan equals that of other policies, so they share one compiled program.
    plan = dataclasses.replace(arm.run.plan, policy=None)
    state = _evict(plan, sizes, own, seen.said[place], arm.run.rows.budgets)
    return run_question(model, given, arm.options, Prefilled(state.cache, seen.logits))


@functools.partial(jax.jit, static_argnames=("plan", "sizes"))
def _evict(
    plan: Plan, sizes: Sizes, cache: KVCache, said: Evidence | None, budgets: Int[Array, "B"] | None
) -> DecodeState:
    left = cache if said is None or budgets is None else kvjax.evict(cache, said, budgets)
    return shrink(DecodeState(left), plan, sizes)
