"""Decode steps of published shapes with random weights: with budgets and full caches, after short and long prompts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import kvjax
from benchmarks import floors, measure, steps
from benchmarks.shapes import PUBLISHED, names_of, shape
from evals import report
from models import commands, files
from models.commands.shared_flags import add_shared_flags

POSITION_ONLY = "streaming"  # evicts by position: no scores, no statistics of the attention
TINY = {"budgets": [16], "prompts": [64, 1_000_000], "batches": [1], "block": 8}

LEGEND = """ms: median of one step inside a loop; spread: the middle half of the repetitions. Keys and values are
random, at the positions they have after the prompt; no prompt is fed. All layers are one program, as on an
accelerator (on a CPU large layers run one by one, as in "peers"). floor: time to read the weights and the held keys
and values at the measured copy bandwidth, or, for a block, its products at the measured product rate, whichever is
more. of floor: floor over ms. memory: GiB of the compiled program with its arguments; x counted: that over weights,
cache and policy state. none: nothing is evicted."""

SPLIT_LEGEND = """Differences between programs that took turns. model: nothing is evicted. eviction: the extra time of
evicting by position. scoring: the extra time of the policy over that. together: eviction and scoring over the whole
step. long / short: the step at the longest prompt over the step at the shortest. processor: the same by processor
time of all threads, which other programs on a CPU disturb less."""


class Grid(NamedTuple):
    """All combinations that are timed; ``full`` are prompts after which a full cache is timed, too."""

    shapes: Sequence[str]
    batches: Sequence[int]
    budgets: Sequence[int]
    prompts: Sequence[int]
    policy: str
    block: int = 128
    full: Sequence[int] = ()


def sweep(kind: steps.Kind, grid: Grid, timing: measure.Timing) -> Iterator[dict[str, Any]]:
    """Yield records of all shapes, batches and budgets; one of what does not fit in memory has a refusal."""
    shapes, batches, budgets, prompts, policy, block, full = grid
    settings = [(n, b, budget) for n in shapes for b in batches for budget in (*budgets, *((None,) * bool(full)))]
    model, held_name = None, ""
    for name, batch, budget in commands.progress_bar("setting", over=settings):
        if name != held_name:
            model, held_name = None, name  # free the last model's weights before the next are made
            try:
                model = steps.random_model(shape(name), steps.dtype_here(), free=timing.free)
            except measure.DoesNotFit as reason:
                refused = {"name": f"{kind} {name}", "kind": kind, "shape": name, "batch": batch}
                yield {**refused, "refused": str(reason)}
        if model is None:
            continue
        if budget is None:
            groups = [{"none": [prompt]} for prompt in full]
        else:
            groups = [{policy: list(prompts), POSITION_ONLY: [prompts[0]], "none": [prompts[0]]}]
        for group in groups:
            yield from _measurements(kind, model, name, batch, budget, group, timing, block)


def _measurements(
    kind: steps.Kind, model: Any, name: str, batch: int, budget: int | None, group: dict[str, list[int]],
    timing: measure.Timing, block: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the records of policies that take turns on one cache: each policy's program at each of its prompts."""
    config, dtype = shape(name), steps.dtype_here()
    calls = min(timing.calls, block)
    records: dict[str, dict[str, Any]] = {}
    contenders: dict[str, steps.Contender] = {}
    for policy, prompts in group.items():
        evicts = None if policy == "none" else policy
        setting = steps.Setting(config, evicts, budget, batch, block, dtype)
        program = None
        for prompt in prompts:
            held, told = setting.held(prompt), labels(kind, name, setting, prompt)
            label = told["name"]
            records[label] = told
            try:
                program = program or steps.program(kind, setting, prompt, calls, free=timing.free)
            except measure.DoesNotFit as reason:
                records[label]["refused"] = str(reason)
                continue
            contenders[label] = steps.Contender(program, prompt, held, evicts)
            weights, cache = floors.step_bytes(config, batch, held, np.dtype(dtype).itemsize)
            flops = floors.step_flops(config, batch, block, held) if kind == "block" else 0
            records[label] |= {
                "slots": program.cache.num_slots,
                "floor_milliseconds": timing.limits.milliseconds(weights + cache, flops),
                "floor_bytes": weights + cache,
                "floor_flops": flops,
                "weight_bytes": measure.tree_bytes(model),
                "cache_bytes": measure.tree_bytes(program.cache),
                "compiled_bytes": program.nbytes,
            }
    if contenders:
        before = measure.peak_bytes()
        try:
            for label, times in steps.contest(model, contenders, timing.repetitions).items():
                records[label] |= times._asdict()
        except jax.errors.JaxRuntimeError as reason:  # memory beyond the count
            for label in contenders:
                records[label]["refused"] = measure.reason_of(reason)
        peak = measure.peak_bytes()
        for label in contenders:  # a process' peak never falls, so only a new peak belongs to these programs
            records[label]["peak_bytes"] = peak if before is None or peak is None or peak > before else None
    return list(records.values())


def labels(kind: str, name: str, setting: steps.Setting, prompt: int) -> dict[str, Any]:
    """Return the fields that tell a record apart; ``name`` is the shape's."""
    where = "full cache" if setting.budget is None else f"budget {setting.budget:,}"
    policy = setting.policy or "none"
    return {
        "name": f"{kind} {name} x {setting.batch}, {where}, prompt {prompt:,}, {policy}", "kind": kind, "shape": name,
        "batch": setting.batch, "budget": setting.budget, "prompt": prompt, "policy": policy, "block": setting.block,
    }  # fmt: skip


def parts(results: Sequence[dict[str, Any]], by: str = "milliseconds") -> list[dict[str, Any]]:
    """Split a step for each shape, batch and budget: milliseconds of model, eviction and scoring, and ratios.

    ``by`` is "milliseconds", or "processor" for the processor's time of the records that have it.
    """
    found = []
    timed = [r for r in results if r.get(by) is not None and r.get("budget") is not None]
    for setting in dict.fromkeys((r["shape"], r["batch"], r["budget"]) for r in timed):
        own = [r for r in timed if (r["shape"], r["batch"], r["budget"]) == setting]
        fixed = {r["policy"]: r[by] for r in own if r["policy"] in ("none", POSITION_ONLY)}
        scored = sorted((r for r in own if r["policy"] not in fixed), key=lambda r: r["prompt"])
        if len(fixed) < 2 or not scored:
            continue
        shortest, longest = scored[0][by], scored[-1][by]
        found.append(
            {
                **dict(zip(("shape", "batch", "budget"), setting, strict=True)),
                "policy": scored[0]["policy"],
                "by": by,
                "model": fixed["none"],
                "eviction": fixed[POSITION_ONLY] - fixed["none"],
                "scoring": shortest - fixed[POSITION_ONLY],
                "together": 1 - fixed["none"] / shortest,
                "long_over_short": longest / shortest if len(scored) > 1 else None,
                "prompts": [scored[0]["prompt"], scored[-1]["prompt"]],
            }
        )
    return found


def table(results: Sequence[dict[str, Any]]) -> report.Table:
    """Return a table with one line per step."""
    cells: list[tuple[str, report.Cell]] = [
        *SETTING,
        ("ms", "{milliseconds:.3f}"),
        ("spread", "{low:.3f}..{high:.3f}"),
        ("floor ms", "{floor_milliseconds:.3f}"),
        ("of floor", lambda r: f"{r['floor_milliseconds'] / r['milliseconds']:.0%}"),
        ("memory", lambda r: f"{r['compiled_bytes'] / 2**30:.3f}"),
        ("x counted", lambda r: f"{r['compiled_bytes'] / (r['weight_bytes'] + r['cache_bytes']):.3f}"),
    ]
    return measure.table(results, cells, left=len(SETTING))


def _if_planned(cell: Callable[[dict[str, Any]], str]) -> report.Cell:
    return lambda r: cell(r) if "policy" in r else ""  # a model that does not fit has no settings


SETTING: list[tuple[str, report.Cell]] = [
    ("shape", "{shape}"),
    ("batch", "{batch}"),
    ("budget", _if_planned(lambda r: "full" if r["budget"] is None else f"{r['budget']:,}")),
    ("prompt", _if_planned("{prompt:,}".format_map)),
    ("policy", _if_planned("{policy}".format_map)),
]


def tables(results: Sequence[dict[str, Any]]) -> dict[str, tuple[report.Table, str]]:
    """Return table and legend of each kind's steps and of their parts, by title."""
    found = {}
    for kind, title in (("decode", "A decode step"), ("block", "A block of a prompt")):
        own = [r for r in results if r.get("kind") == kind]
        if own:
            found[title] = (table(own), LEGEND)
        if parts(own):
            found[f"{title}, in parts"] = (split_table(own), SPLIT_LEGEND)
    return found


def split_table(results: Sequence[dict[str, Any]]) -> report.Table:
    """Return a table of where a step's time goes, by the clock and by the processor, per shape, batch and budget."""
    cells: list[tuple[str, report.Cell]] = [
        ("shape", "{shape}"),
        ("batch", "{batch}"),
        ("budget", "{budget:,}"),
        ("policy", "{policy}"),
        ("by", lambda s: "clock" if s["by"] == "milliseconds" else s["by"]),
        ("model ms", "{model:.3f}"),
        ("eviction ms", "{eviction:.3f}"),
        ("scoring ms", "{scoring:.3f}"),
        ("together", "{together:.1%}"),
        ("long / short", lambda s: "" if s["long_over_short"] is None else f"{s['long_over_short']:.3f}"),
    ]
    return report.table([*parts(results), *parts(results, "processor")], cells, left=5)


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    add_step_flags(flags, "decode")


def add_step_flags(flags: argparse.ArgumentParser, name: str) -> None:
    """Add the flags that `decode` and `prefill` have in common."""
    flags.add_argument("--shapes", "--shape", help=f"models' shapes (default: {','.join(PUBLISHED)}; on a CPU small)")
    flags.add_argument("--batches", default="1")
    flags.add_argument("--budgets", "--budget", default="1024,8192")
    flags.add_argument("--prompts", default="8192,131072,1048576", help="prompts per budget; the first in parts, too")
    flags.add_argument("--full", default="8192,32768,131072", help="prompts of full caches, or none")
    add_shared_flags(flags, "policy", "block", policy="h2o+caote")
    measure.add_timing_flags(flags, name)


def step_grid(flags: argparse.Namespace) -> Grid:
    """Check the common flags and return what :func:`sweep` times."""
    if not kvjax.parse(flags.policy).allocation.even:
        raise ValueError(f"--policy is {flags.policy}, but here all heads have the same budget; leave out its '@'.")
    shapes = names_of(flags)
    if wrong := [name for name in shapes if shape(name).num_experts or any(shape(name).sliding_windows)]:
        raise ValueError(
            f"{wrong[0]} has experts or sliding windows, whose floors are not counted; give another of --shapes."
        )
    full = [] if flags.full == "none" else measure.whole_numbers("--full", flags.full)
    lists = {name: measure.whole_numbers(f"--{name}", getattr(flags, name)) for name in ("batches", "budgets")}
    given = {**lists, "prompts": measure.whole_numbers("--prompts", flags.prompts), "full": full, "block": flags.block}
    if flags.tiny:
        given |= TINY | {"full": [64]}
    if min(given["prompts"]) < max(given["budgets"]):
        raise ValueError(
            f"--prompts has {min(given['prompts'])} and --budgets has {max(given['budgets'])}, but a prompt must fill "
            "its budget; give longer prompts or smaller budgets."
        )
    return Grid(shapes=shapes, policy=flags.policy, **given)


def command(flags: argparse.Namespace) -> None:
    """Measure, print the tables, write JSON."""
    files.check_outputs([flags.json])
    grid = step_grid(flags)
    timing = measure.timing(flags)
    settings = {**timing.settings(), **grid._asdict()}
    results = measure.collect(flags, "decode", settings, sweep("decode", grid, timing))
    measure.show(tables(results), flags.json)
