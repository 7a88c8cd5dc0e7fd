"""Runs one prompt for many policies. Until one of them evicts, the model's work is the same, so it is done once.

Policies that evict once, after the prompt, observe the same blocks together (``kvjax.observe_each``); then each evicts
from its own copy of the cache. A policy that cannot share runs alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import kvjax
from kvjax import Evidence, KVCache, LayerCaches, Policy
from kvjax._src.capacity import CacheSpec
from kvjax._src.chains import policy_of
from kvjax._src.policy import fits_biases
from kvjax._src.reconstruction import Reconstruction
from kvjax.schedule import HostOrDevice, Schedule
from models.decoder import Decoder
from models.driver import Steps, feed_prompt
from models.engine import logits_of, prefill, projections, run_question, scheduled
from models.networks import read_by
from models.options import EachSettings, Options, options_of
from models.planning import plan_run
from models.prompts import CheckedPrompt, Prefilled, Tokens, check_prompt
from models.states import shrink, shrinks
from models.steps import DecodeState, Run

Asked = Policy | str | None | tuple[Policy | str | None, int | float | None]


class _Arm(NamedTuple):
    """One policy and budget, and the run that it would have alone."""

    options: Options
    run: Run
    sizes: CacheSpec

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
    comes: at any time, memory holds the full cache of the prompt and the cache of one policy. Policies that
    observe the prompt once more after its end, in the same way, share that, too. Policies that evict by block, that
    read a network, or that rotate keys again run alone.

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
    options = options_of(
        "prefill_each", EachSettings, options, settings, evict_every=0, projection=None, reading_budget=None
    )
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
        watching = [index for index in together if arms[index].run.plan.policy is not None]
        place = watching.index(number) if number in watching else None
        result = _compressed(model, given, arm, seen[arm.group], place)
        if number == together[-1]:
            del seen[arm.group]
        yield result


class _Seen(NamedTuple):
    """The prompt as all policies of a group have observed it.

    ``cache`` holds all tokens, and as its state a tuple with one state per policy. ``said`` is each policy's evidence
    about the slots of all layers. ``logits`` are those of each row's last token.
    """

    cache: LayerCaches
    said: tuple[Evidence, ...]
    logits: Float[Array, "B V"]


def _observe(model: Decoder, given: CheckedPrompt, arms: Sequence[_Arm]) -> _Seen:
    """Feed the context, and what is to be fed again, to the model once, while each policy observes it."""
    watching = [arm for arm in arms if arm.run.plan.policy is not None]
    policies = tuple(policy for arm in watching if (policy := arm.run.plan.policy) is not None)
    reads = [arm for arm, policy in zip(watching, policies, strict=True) if policy.needs.rotary]
    first = [*reads, *watching, *arms][0]  # all get rotary frequencies if one of the policies reads them
    budgets: Any = tuple(arm.run.rows.budgets for arm in watching)
    kinds = frozenset().union(*(policy.needs.projections for policy in policies))
    run = dataclasses.replace(
        first.run,
        rows=first.run.rows._replace(budgets=budgets),
        projection=projections(model, kinds, first.run.plan.heads) if kinds else None,
        plan=dataclasses.replace(first.run.plan, each=policies),
    )
    slots = zip(*(arm.sizes.first.layer_slots for arm in arms), strict=True)  # of each layer
    sizes = dataclasses.replace(first.sizes.first, layer_slots=tuple(map(max, slots)))
    prompt = Schedule(scheduled(given, first.options, first.run).context, ())
    state, last = feed_prompt(Steps.of(run, sizes), prompt, None)
    assert isinstance(state.cache, LayerCaches)
    return _Seen(state.cache, state.said, logits_of(model, last)[:, 0])


def _compressed(model: Decoder, given: CheckedPrompt, arm: _Arm, seen: _Seen, place: int | None) -> Prefilled:
    """Evict from one policy's copy of the cache, then feed it the question, if one was held back.

    ``place`` is the policy's among those that have observed, None for one that keeps all.
    """
    sizes = dataclasses.replace(arm.sizes, policy=None)

    def of_policy(own: KVCache) -> KVCache:
        return dataclasses.replace(own, state=() if place is None else own.state[place])

    cache: Any = seen.cache.map(of_policy)
    cache = cache.map_states(jnp.copy)
    budgets = arm.run.rows.budgets
    if place is not None and budgets is not None:
        cache = kvjax.evict(cache, seen.said[place], budgets)
    if not shrinks(cache, sizes):  # which else is a copy; the caller may use a result up before the next is made
        cache = jax.tree.map(jnp.copy, cache)
    # Without its policy, the plan equals that of other policies, so they share one compiled program.
    plan = dataclasses.replace(arm.run.plan, policy=None)
    state = shrink(DecodeState(cache), plan, sizes)
    return run_question(model, given, arm.options, Prefilled(state.cache, seen.logits))
