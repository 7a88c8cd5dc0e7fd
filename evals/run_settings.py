"""The settings of an evaluation: policies, budgets, moments of eviction, and what is known of the question."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal, get_args

import kvjax
from evals.report import READS
from kvjax._src.chains import policy_of
from kvjax._src.checks import check_names
from kvjax._src.policy import Policy
from kvjax.allocation import parse_allocation
from kvjax.schedule import When, moments
from models import commands, selecting
from models.networks import wanted_by

RECENCY = "recency"
POLICIES = ("full", "h2o", "h2o+caote", "snapkv", "snapkv+caote")
Question = Literal["known", "unknown"]
KNOWN_OR_NOT = ("known", "unknown")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One line of the table. ``evict_every`` is None for the policy's default, ``cache_dtype`` for the model's dtype,
    ``reading_budget`` where a policy that evicts by block has one budget while it reads and after it.

    ``policy`` is an eviction policy, "full", or a selection such as "select=quest": nothing is evicted, and each decode
    step reads as many tokens per head as the budget says.

    Example:
        >>> from evals.run_settings import Setting
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
    reading_budget: int | float | None = None

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

    def fields(self) -> dict[str, Any]:
        """Return the setting's fields in a table or a JSON file, with the resolved moments of eviction."""
        return {**dataclasses.asdict(self), "evicts": list(self.moments)}

    def title(self) -> str:
        budget = "" if self.budget is None else f", budget {self.budget}"
        return f"{self.policy}{budget}, {self.when}, question {self.question}"


def sharing(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Group the settings that share a prompt's prefill.

    They ask the same question, have caches of one dtype, evict nothing before the end of the prompt, and re-rotate no
    key. A setting that is given twice is answered once.
    """
    together: dict[tuple[Any, ...], list[Setting]] = {}
    for setting in dict.fromkeys(settings):
        policy = setting.evicting
        late = policy is None or setting.moments[0] == "prompt"
        plain = policy is None or (policy.positions == "absolute" and policy.heads != "query")
        shares = setting.select is None and late and plain
        together.setdefault((setting.question, setting.cache_dtype) if shares else (setting,), []).append(setting)
    return list(together.values())


def sharing_note(asked: Sequence[tuple[int, Sequence[Setting]]]) -> str | None:
    """Return a sentence that says how many prompts were saved by sharing, None without; ``asked`` are the number of
    samples and the settings of each group.

    Example:
        >>> from evals.run_settings import Setting, sharing_note
        >>> two = [Setting("h2o", slots, "prompt", "known") for slots in (16, 64)]
        >>> sharing_note([(20, two)])
        'shared prompts: 20 went through the model in place of 40'
    """
    passes = sum(samples * len(sharing(settings)) for samples, settings in asked)
    alone = sum(samples * len(settings) for samples, settings in asked)
    return None if passes == alone else f"shared prompts: {passes:,} went through the model in place of {alone:,}"


def baseline(flags: argparse.Namespace) -> str:
    """Return the full name of what each policy is compared with: that of ``--against``, else recency."""
    name = getattr(flags, "against", None)
    return RECENCY if name is None else full_name(name)


def full_name(name: str) -> str:
    """Return the full name of a policy, a selection or "full"."""
    if _selects(name):
        return READS + str(kvjax.parse_source(name.removeprefix(READS)))
    return "full" if name == "full" else str(kvjax.parse(name))


def make_settings(flags: argparse.Namespace, questions: Sequence[str] = KNOWN_OR_NOT) -> list[Setting]:
    """Return every combination that the flags ask for, checked; the full cache has neither budget nor moment."""
    asked_for = commands.listed("policy", flags.policies, "--policies full,snapkv+caote")
    against = None if getattr(flags, "against", None) is None else baseline(flags)
    asked_for += [] if against is None else [against]
    reading = [full_name(name) for name in asked_for if _selects(name)]
    policies = [name for name in asked_for if not _selects(name)]
    budgets = [commands.parse_budget(text) for text in commands.split_list(flags.budgets)]
    moments: Any = commands.listed("moment", flags.when, "--when prompt")
    asked: Any = commands.listed("place of the question", flags.question, "--question known")
    check_names("--when", moments, get_args(When))
    check_names("--question", asked, questions)
    evicting = [str(kvjax.parse(policy)) for policy in policies if policy != "full"]
    evicting = _allocated(evicting, commands.split_list(getattr(flags, "allocations", "")))
    check_budgets([*evicting, *reading], budgets)
    settings, dtype, reads = [], getattr(flags, "cache_dtype", None), getattr(flags, "reading_budget", None)
    for question in asked:
        if "full" in policies:
            settings.append(Setting("full", None, "block", question, cache_dtype=dtype))
        for name, budget in itertools.product(dict.fromkeys(reading), budgets):
            settings.append(Setting(name, budget, "block", question, cache_dtype=dtype))
        for when, budget in itertools.product(moments, budgets):
            for policy in dict.fromkeys([RECENCY, *evicting] if evicting else []):
                every = getattr(flags, "evict_every", None)
                settings.append(Setting(policy, budget, when, question, every, dtype, reads))
    for setting in settings:
        _ = setting.moments  # raises for moments that cannot be, before any work
    return list(dict.fromkeys(settings))


def _selects(name: str) -> bool:
    return name.startswith(READS)


def refuse_selections(settings: Sequence[Setting], instead: str) -> None:
    """Raise ValueError if a setting is a selection, for an evaluation that cannot answer under one."""
    if found := next((setting.policy for setting in settings if setting.select is not None), None):
        raise ValueError(f"{found} was given, but this evaluation takes eviction policies only; {instead}.")


def refuse_reading_budgets(settings: Sequence[Setting], instead: str) -> None:
    """Raise ValueError if a setting has a budget of its own for reading, which an evaluation would not use."""
    if any(setting.reading_budget is not None for setting in settings):
        raise ValueError(f"--reading-budget was given, but {instead}; leave it out.")


def check_budgets(policies: Sequence[str], budgets: Sequence[int | float]) -> None:
    """Raise ValueError before any work if a policy cannot keep a budget, or there is none."""
    if policies and not budgets:
        raise ValueError("no budget was given; name at least one, such as --budgets 256.")
    for policy, budget in itertools.product(policies, budgets):
        if isinstance(budget, int) and not _selects(policy):
            kvjax.check_budget(kvjax.parse(policy), budget)


def _allocated(policies: Sequence[str], allocations: Sequence[str]) -> list[str]:
    """Return every policy that names no allocation with each of ``allocations``, and the others as they are."""
    if not allocations:
        return list(policies)
    names = [str(parse_allocation(name).name) for name in allocations]
    found = []
    for policy in policies:
        whole = [policy] if "@" in policy else [f"{policy}@{n}" for n in names]
        found += [str(kvjax.parse(name)) for name in whole]
    return list(dict.fromkeys(found))
