"""``python -m tests.campaign --seconds 600 --seed 0``: random cases, and the smallest that fails."""

# ruff: noqa: I001
from __future__ import annotations

import conftest  # noqa: F401  eight devices on the CPU, set before jax is imported

import argparse
import json
import sys
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path

import jax

from tests.campaign.cases import SHARE, Case, from_json, smaller
from tests.campaign.checking import Outcome
from tests.campaign.ways import WAYS, check, draw
from models.commands.programs import make_room, memory_maps


def shrink(case: Case, outcome: Outcome, seconds: float) -> tuple[Case, Outcome]:
    """The smallest case found that fails in the same way: greedily, one dimension after the other."""
    stop, tried = time.monotonic() + seconds, set()
    found = True
    while found:
        found = False
        for other in smaller(case):
            if time.monotonic() > stop:
                return case, outcome
            if str(other) in tried:
                continue
            tried.add(str(other))
            result = check(other)
            if result.kind == outcome.kind:
                case, outcome, found = other, result, True
                break
        jax.clear_caches()
    return case, outcome


def main(arguments: list[str] | None = None) -> int:
    warnings.filterwarnings("ignore", ".*(made to choose once|sums attention over all queries)")
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="how long to draw")
    parser.add_argument("--cases", type=int, help="how many cases, rather than how long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", help="runs one case, as a campaign printed it")
    parser.add_argument(
        "--shrink", type=float, default=300, help="seconds for the search for the smallest failing case"
    )
    parser.add_argument(
        "--eight-bits", type=float, default=SHARE, help="the share of programs with such caches; 1: all"
    )
    parser.add_argument("--way", choices=WAYS, help="draws this way alone")
    parser.add_argument("--json", type=Path, help="writes counts and failures to a file")
    given = parser.parse_args(arguments)
    if given.case:
        outcome = check(from_json(given.case))
        print(outcome.kind, outcome.why)
        return int(outcome.fails)

    start, said = time.monotonic(), time.monotonic()
    kinds: Counter[str] = Counter()
    dimensions: dict[str, Counter[str]] = defaultdict(Counter)
    failures: list[tuple[Case, Outcome]] = []
    undecided: list[tuple[Case, Outcome]] = []
    of_ways: dict[str, Counter[str]] = defaultdict(Counter)
    spent: Counter[str] = Counter()
    program = 0

    def more() -> bool:
        return sum(kinds.values()) < given.cases if given.cases else time.monotonic() - start < given.seconds

    while more():
        for case in draw(given.seed, program, given.eight_bits, only=given.way):
            if not more():
                break
            begun, (way,) = time.monotonic(), case.dimensions()["way"]
            outcome = check(case)
            kinds[outcome.kind] += 1
            of_ways[way][outcome.kind] += 1
            spent[way] += time.monotonic() - begun
            for dimension, values in case.dimensions().items():
                dimensions[dimension].update(set(values))
            if outcome.fails:
                failures.append((case, outcome))
                print(f"{outcome.kind}: {outcome.why}\n    --case '{case}'", flush=True)
            elif outcome.kind != "ok":
                undecided.append((case, outcome))
        program += 1
        if program % 50 == 0:
            jax.clear_caches()
        make_room()
        if time.monotonic() - said > 30:
            said = time.monotonic()
            print(
                f"{said - start:6.0f} s: {sum(kinds.values())} cases, {dict(kinds)}, {memory_maps()} maps", flush=True
            )

    taken = time.monotonic() - start
    for dimension, counts in dimensions.items():
        print(f"{dimension:>12}: " + ", ".join(f"{value} {count}" for value, count in sorted(counts.items())))
    for way, counts in sorted(of_ways.items()):
        said = ", ".join(f"{kind} {count}" for kind, count in counts.items())
        print(f"{way:>12}: {counts.total()} cases in {spent[way]:.0f} s: {said}")
    cases = sum(kinds.values())
    print(f"{cases} cases in {taken:.0f} s ({60 * cases / taken:.0f} a minute), {program} programs, seed {given.seed}")
    print(", ".join(f"{kind} {count}" for kind, count in kinds.items()))
    smallest = None
    if failures:
        least = min(failures, key=lambda failure: len(str(failure[0])))
        smallest = shrink(*least, given.shrink)
        print(f"smallest: {smallest[1].why}\npython -m tests.campaign --case '{smallest[0]}'")
    if given.json:
        report = {
            "seed": given.seed, "seconds": taken, "cases": cases, "programs": program, "kinds": kinds,
            "ways": of_ways,
            "dimensions": dimensions, "smallest": smallest and str(smallest[0]),
            **{
                name: [{"case": str(case), "kind": o.kind, "why": o.why} for case, o in some]
                for name, some in (("failures", failures), ("undecided", undecided))
            },
        }  # fmt: skip
        given.json.write_text(json.dumps(report, indent=1))
    return int(bool(failures))


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)  # no program comes twice
    sys.exit(main())
