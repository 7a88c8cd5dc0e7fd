"""The table of cases that the tests run: few, of one size, and together every pair of what a case may be.

``table.jsonl`` has a case a line, as ``--case`` takes it. ``python -m tests.campaign.table`` makes it again: it draws
cases as the campaign does and takes, one after the other, the one with most pairs that none before it has, if the
library and the reference agree on it without a choice that rounding could turn.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvjax.allocation import ALLOCATIONS
from tests.campaign.cases import FAMILIES, LINK_NAMES, Case, calibration, draw, from_json
from tests.campaign.checking import Outcome
from tests.campaign.ways import check

FILE = Path(__file__).with_suffix(".jsonl")
SIZES = dict(layers=2, kv_heads=2, group=2, rows=3, block=4, width=21)
CANDIDATES = 10_000
MOST_LINKS = 4
HERE = "<folder>"  # of the campaign's calibration files, which differs from machine to machine

POLICIES = {
    "full": "full",
    "h2o": "sums",
    **dict.fromkeys(("snapkv", "dropkv", "finch", "laprox", "cake", "lava", "rkv", "restkv", "defensive"), "a window"),
    **dict.fromkeys(("tova", "sage"), "one query"),
    **dict.fromkeys(
        ("expected_attention", "keydiff", "key_norm", "q_filters", "curdkv", "lagkv", "triattention"), "keys"
    ),
    **dict.fromkeys(("butler", "zap", "trimkv"), "a network"),
    **dict.fromkeys(("kvzip", "kvgrad", "dapq"), "fed again"),
    **dict.fromkeys(("streaming", "recency", "random"), "positions"),
}
LINKS_OF = {
    **dict.fromkeys(("caote", "fast_caote"), "caote"),
    **dict.fromkeys(("pool", "chunks", "normalise"), "shape"),
    **dict.fromkeys(("critical", "protect"), "order"),
    "positions": "turned",
    **dict.fromkeys(("merge", "cam", "match", "moments", "sample"), "merged"),
}
ALLOCATIONS_OF = {
    "uniform": "even",
    "pyramid": "of layers",
    **dict.fromkeys(("layer", "adakv", "headkv", "lukv", "duo"), "of a layer's heads"),
    **dict.fromkeys(("model", "lava", "threshold", "cake"), "of all heads"),
    **dict.fromkeys(("simlayer", "d2o"), "measured"),
}


def factors(case: Case) -> dict[str, set[str]]:
    """Return what a case is, factor by factor; some have several values."""
    said = case.dimensions()
    often = {0: "never", 1: "every step"}.get(case.evict_every, "every few steps")
    generates = case.entry in ("generate", "stream")
    return {
        "policy": {POLICIES[case.base]},
        "links": {LINKS_OF.get(link, link) for link in said["links"]},
        "allocation": {ALLOCATIONS_OF[said["allocation"][0]]},
        "moment": {f"{case.when}, {often if generates else 'no step'}"},
        "budget": set(said["budget"]),
        "storage": {"floats" if case.cache_dtype is None else "eight bits"},
        "window": set(said["windows"]),
        "question": set(said["question"]),
        "ragged": set(said["ragged"]),
        "mesh": set(said["mesh"]),
        "entry": {case.entry},
    }


def names(case: Case) -> set[str]:
    """Return the names that a case has, each of which some case is to have."""
    said = case.dimensions()
    dense = f"dense layers: {said['dense'][0]}"
    return {case.family, case.base, *said["links"], *said["allocation"], case.rope, str(case.cache_dtype), dense}


def pairs(case: Case) -> set[tuple[str, ...]]:
    """Return the pairs of values of two factors that a case has, and its names."""
    found: set[tuple[str, ...]] = {(name,) for name in names(case)}
    for (one, values), (other, others) in itertools.combinations(factors(case).items(), 2):
        found |= {(one, value, other, its) for value in values for its in others}
    return found


def candidates(count: int = CANDIDATES) -> Iterator[Case]:
    """Draw cases of one size and few links; every fourth is on a mesh, every third in eight bits."""
    for number in range(count):
        case = next(draw(2, number, eight_bits=0.3, meshes=0.25, sizes=SIZES))
        if len(case.links) <= MOST_LINKS and case.tokens in ("random", "distinct"):
            yield case


def covering(cases: Iterable[Case]) -> list[Case]:
    """Choose cases that have all pairs of ``cases``, greedily."""
    left = {case: pairs(case) for case in cases}
    missing = set().union(*left.values())
    chosen = []
    while missing:
        case = max(left, key=lambda one: len(left[one] & missing))
        if not left[case] & missing:
            break  # of some pairs no case is decided
        has = left.pop(case)
        if ran(case).kind == "ok":
            chosen.append(case)
            missing -= has
            print(f"{len(chosen)} cases, {len(missing)} pairs left", flush=True)
    return chosen


@functools.cache
def table() -> tuple[Case, ...]:
    """Return the cases of the file."""
    return tuple(from_json(line.replace(HERE, _folder())) for line in FILE.read_text("utf-8").splitlines())


@functools.cache
def ran(case: Case) -> Outcome:
    """Return what came of a case, which runs once per process."""
    return check(case)


def every_name() -> set[str]:
    """Return the names of all links, allocations and families."""
    return {*LINK_NAMES, *ALLOCATIONS, *FAMILIES}


def _folder() -> str:
    return str(Path(calibration("heads", 1, 1)).parent)


if __name__ == "__main__":
    chosen = covering(candidates())
    FILE.write_text("".join(f"{case}\n" for case in chosen).replace(_folder(), HERE), "utf-8")
    print(f"{len(chosen)} cases, {len(set().union(*map(pairs, chosen)))} pairs and names")
