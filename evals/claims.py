"""Claims about policies, judged on the samples of a study: a difference, its interval, and a verdict of five kinds.

A claim compares two policies on the same samples in the same places: evaluation, length, budget, moment and question.
Recency in those places is the floor, and the full cache the ceiling. Where neither policy is above the floor beyond
noise, or both lie within noise of the ceiling, nothing is decided. A verdict and its interval are one computation
(:func:`evals.statistics.chance_above`); but verdicts are corrected for the number of their paper's claims (Holm, in
:func:`decide`), and intervals are not.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from jaxtyping import Float

import kvjax
from evals import report, statistics
from evals.run_settings import RECENCY, full_name
from kvjax._src.checks import check_names

HOLDS, FAILS, NOISE, OPEN, ELSEWHERE = "holds", "does not", "not shown", "undecided", "another task"
LEVEL = 0.05
MARGIN = 0.05  # what "as good" and "not worse" allow, stated before the studies were run
PLACE = ("evaluation", "length", "budget", "when", "question")
Expects = Literal["better", "as good", "not worse"]
EXPECTS = {"better": "is better than", "as good": "is as good as", "not worse": "is not worse than"}
ENTRY = ("paper", "says", "link", "to", "policies", "over", "expects", "at", "over_at", "each", "elsewhere")

Sample = tuple[Any, ...]
Scores = Mapping[Sample, float]


class PolicyScores(NamedTuple):
    """The scores by sample of one policy in one place, with one model. ``place`` has the fields ``PLACE``."""

    model: str
    policy: str
    place: tuple[Any, ...]
    scores: Scores


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim that the scores of ``policy`` exceed those of ``over``.

    Attributes:
        paper: whose claim it is.
        says: the paper's setting and figure, for a reader.
        expects: "better" expects a difference above 0, "as good" one within ``MARGIN`` of 0, "not worse" one above
            ``-MARGIN``.
        at: the places that count, by some of their fields.
        over_at: the fields in which the places of ``over`` differ from those of ``policy``.
        each: the fields whose values have a verdict each. Over places that differ in other fields, a sample's scores
            are averaged.
        elsewhere: how the paper's setting differs, such as its task or when it evicts; empty where it does not. A claim
            that fails in another setting than its paper's is called "another task".
    """

    paper: str
    text: str
    policy: str
    over: str
    says: str = ""
    expects: Expects = "better"
    at: tuple[tuple[str, Any], ...] = ()
    over_at: tuple[tuple[str, Any], ...] = ()
    each: tuple[str, ...] = ("question", "when")
    elsewhere: str = ""


class Judgement(NamedTuple):
    """A claim's outcome in some places.

    Attributes:
        where: the values of the claim's ``each``.
        scores: the means of ``policy`` and ``over``.
        floor: recency's mean in the places of ``policy``, None where it was not run; ``ceiling``: the full cache's.
        p: how likely such a difference is by chance, where the claim is just not true (or just true, if it fails);
            ``corrected``: with Holm's correction, by :func:`decide`.
        alone: the verdict of this claim alone; ``verdict``: the same, until :func:`decide` makes it one of many.
    """

    claim: Claim
    where: dict[str, Any]
    places: int
    samples: int
    scores: tuple[float, float]
    floor: float | None
    ceiling: float | None
    difference: float
    low: float
    high: float
    p: float
    corrected: float
    alone: str
    verdict: str


def better(low: float, high: float) -> str:
    """Return the verdict on a claim of a larger value by the interval of the difference, where nothing bounds it."""
    return HOLDS if low > 0 else FAILS if high < 0 else NOISE


def adding(link: str, policy: str) -> str:
    """Return a policy with a link added behind what scores, before what protects and before the allocation."""
    whole = kvjax.parse(policy)
    base = kvjax.parse(whole.chain_name)
    links = [link.name for link in base.links or (base,)]
    name, *_ = link.split("(")
    if name in [part.split("(")[0] for part in links]:
        raise ValueError(f"{policy!r} has the link {name!r} already; name the policy without it.")
    behind = next((i for i, part in enumerate(links) if part.startswith(("protect", "positions"))), len(links))
    allocation = whole.name.removeprefix(whole.chain_name)
    return str(kvjax.parse("+".join([*links[:behind], link, *links[behind:]]) + allocation))


def read(entries: Sequence[Mapping[str, Any]], names: Mapping[str, str] | None = None) -> list[Claim]:
    """Return the claims of a study's tables ``[[claims]]``.

    An entry names a ``link`` and the policies ``to`` which it is added, so that the two sides differ in that link
    alone, or ``policies`` and those that each of them is compared with, ``over``. Policies and links are called by
    ``names``, or else as they are written.

    Raises:
        ValueError: a field is unknown or missing, or a policy cannot be read.
    """
    return [claim for entry in entries for claim in _of_entry(entry, names or {})]


def _of_entry(entry: Mapping[str, Any], names: Mapping[str, str]) -> list[Claim]:
    check_names("field of a claim", list(entry), ENTRY)
    kinds = [set(pair) <= set(entry) for pair in (("link", "to"), ("policies", "over"))]
    if "paper" not in entry or sum(kinds) != 1:
        raise ValueError(
            f"a claim has {', '.join(entry)}; expected paper, and either link and to, or policies and over."
        )
    expects = entry.get("expects", "better")
    check_names("expectation of a claim", expects, EXPECTS)
    called = lambda policy: names.get(full_name(policy), policy)  # noqa: E731
    budgets = [entry.get(name, {}).get("budget") for name in ("at", "over_at")]
    own, other_own = ("" if None in budgets else f" with {_in_words(budget)}" for budget in budgets)
    pairs: Iterable[tuple[str, str, str]]
    if kinds[0]:
        link = entry["link"]
        pairs = [(adding(link, base), base, f"{names.get(link, link)} improves {called(base)}") for base in entry["to"]]
    else:
        both = itertools.product(entry["policies"], entry["over"])
        pairs = [
            (one, other, f"{called(one)}{own} {EXPECTS[expects]} {called(other)}{other_own}") for one, other in both
        ]
    places = {name: tuple(dict(entry.get(name, {})).items()) for name in ("at", "over_at")}
    for name, place in places.items():
        check_names(f"field of a claim's {name}", list(dict(place)), PLACE)
    each = entry.get("each", Claim.each)
    check_names("field of a claim's each", each, PLACE)
    same: dict[str, Any] = dict(expects=cast(Expects, expects), each=tuple(each), **places)
    same |= {name: entry.get(name, "") for name in ("says", "elsewhere")}
    return [Claim(entry["paper"], text, full_name(policy), full_name(over), **same) for policy, over, text in pairs]


def _in_words(budget: float) -> str:
    return f"{100 * budget:g}%" if isinstance(budget, float) else f"{budget} slots"


def judge(claims: Sequence[Claim], found: Iterable[PolicyScores], models: Sequence[str]) -> list[Judgement]:
    """Judge claims, but those that were not run, in their order, by the scores that a form of a model has.

    Of several ``models``, which differ in the seed of their training, a claim holds or fails if it does on each.
    """
    table = {(one.model, one.policy, one.place): one.scores for one in found}
    return [judgement for claim in claims for judgement in _judgements(claim, table, models)]


def decide(judgements: Sequence[Judgement]) -> list[Judgement]:
    """Return judgements with the verdicts that are left when each paper's are corrected for their number (Holm)."""
    corrected = [1.0] * len(judgements)
    for paper in dict.fromkeys(judgement.claim.paper for judgement in judgements):
        own = [index for index, judgement in enumerate(judgements) if judgement.claim.paper == paper]
        for index, chance in zip(own, holm([judgements[index].p for index in own]), strict=True):
            corrected[index] = chance
    return [_decided(judgement, chance) for judgement, chance in zip(judgements, corrected, strict=True)]


def _decided(judgement: Judgement, corrected: float) -> Judgement:
    verdict = judgement.alone
    if verdict != OPEN and corrected >= LEVEL:
        verdict = NOISE
    elif verdict == FAILS and judgement.claim.elsewhere:
        verdict = ELSEWHERE
    return judgement._replace(corrected=corrected, verdict=verdict)


def holm(chances: Sequence[float]) -> list[float]:
    """Return p-values that are corrected for their number: Holm's step-down method.

    Example:
        >>> from evals import claims
        >>> [round(p, 3) for p in claims.holm([0.01, 0.04, 0.03])]
        [0.03, 0.06, 0.06]
    """
    corrected, least = [0.0] * len(chances), 0.0
    for rank, index in enumerate(sorted(range(len(chances)), key=lambda i: chances[i])):
        least = max(least, min(1.0, (len(chances) - rank) * chances[index]))
        corrected[index] = least
    return corrected


def _outcome(expects: Expects, differences: Float[np.ndarray, "models samples"]) -> tuple[str, float]:
    """Return whether a claim holds or fails by itself, whichever is likelier, and its two-sided p-value."""
    above = lambda sign, bound: statistics.chance_above(sign * differences, bound)  # noqa: E731
    margin = 0.0 if expects == "better" else MARGIN
    holds, fails = above(1, -margin), above(-1, margin)
    if expects == "as good":
        holds, fails = max(holds, above(-1, -margin)), min(fails, above(1, margin))
    return (HOLDS, min(1.0, 2 * holds)) if holds < fails else (FAILS, min(1.0, 2 * fails))


def _judgements(claim: Claim, table: Mapping[Any, Scores], models: Sequence[str]) -> list[Judgement]:
    """Return a claim's judgements, one for each value of its ``each`` among the places that both policies have."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for model, policy, values in table:
        place = dict(zip(PLACE, values, strict=True))
        counts = (model, policy) == (models[0], claim.policy) and all(place[name] == value for name, value in claim.at)
        both = (claim.policy, place), (claim.over, place | dict(claim.over_at))
        if counts and all(_there(table, models, *side) for side in both):
            groups.setdefault(tuple(place[name] for name in claim.each), []).append(place)
    found = [_judgement(claim, places, table, models) for places in groups.values()]
    return [judgement for judgement in found if judgement is not None]


def _judgement(
    claim: Claim, places: Sequence[dict[str, Any]], table: Mapping[Any, Scores], models: Sequence[str]
) -> Judgement | None:
    """Return a judgement whose p-value and verdict are not corrected yet.

    None if the policies have no sample in common.
    """
    both = {claim.policy: places, claim.over: [place | dict(claim.over_at) for place in places]}
    paired = _paired(table, models, *both.items())
    if not paired.size:
        return None
    one, other = paired
    difference, low, high = statistics.paired_interval(one - other)
    bounds: dict[str, float | None] = {}
    undecided = False
    for bound in (RECENCY, "full"):
        near = []
        for policy, where in both.items():
            there = all(_there(table, models, bound, place) for place in where)
            if there and (pair := _paired(table, models, (policy, where), (bound, where))).size:
                _, below, above = statistics.paired_interval(pair[0] - pair[1])
                near.append((float(pair[1].mean()), below <= 0 and (above >= 0 or bound == RECENCY)))
        bounds[bound] = near[0][0] if near else None
        undecided |= bound not in both and len(near) == 2 and all(noise for _, noise in near)
    outcome, chance = _outcome(claim.expects, one - other)
    alone = OPEN if undecided else NOISE if chance >= LEVEL else outcome
    return Judgement(
        claim=claim,
        where={name: places[0][name] for name in claim.each},
        places=len(places),
        samples=one.shape[1],
        scores=(float(one.mean()), float(other.mean())),
        floor=bounds[RECENCY],
        ceiling=bounds["full"],
        difference=difference,
        low=low,
        high=high,
        p=chance,
        corrected=chance,
        alone=alone,
        verdict=alone,
    )


def _key(model: str, policy: str, place: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a policy's key in the table of scores: the full cache has no budget, and it and selections no moment."""
    still: dict[str, Any] = {"budget": None} if policy == "full" else {}
    if policy == "full" or policy.startswith(report.READS):
        still["when"] = "block"
    return model, policy, tuple(still.get(name, place[name]) for name in PLACE)


def _there(table: Mapping[Any, Scores], models: Sequence[str], policy: str, place: Mapping[str, Any]) -> bool:
    return all(_key(model, policy, place) in table for model in models)


def _paired(
    table: Mapping[Any, Scores], models: Sequence[str], *sides: tuple[str, Sequence[Mapping[str, Any]]]
) -> Float[np.ndarray, "sides models samples"]:
    """Return the mean score of each sample over the places, without the samples that a side lacks with some model.

    A side is a policy and its places, in the order of the other sides' places.
    """
    collected: dict[Sample, list[list[list[float]]]] = {}
    for places in zip(*(places for _, places in sides), strict=True):
        each = list(zip((policy for policy, _ in sides), places, strict=True))
        found = [[table[_key(model, policy, place)] for model in models] for policy, place in each]
        for sample in set.intersection(*(set(scores) for side in found for scores in side)):
            number = (places[0]["evaluation"], places[0]["length"], *sample)
            collected.setdefault(number, []).append([[scores[sample] for scores in side] for side in found])
    means = [np.mean(scores, axis=0) for _, scores in sorted(collected.items())]
    return np.stack(means, axis=-1) if means else np.zeros((len(sides), len(models), 0))
