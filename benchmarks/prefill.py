"""Blocks of a prompt and whole prompts, of published shapes with random weights, with budgets and full caches."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from benchmarks import decode, measure, steps
from benchmarks.shapes import shape
from evals import report
from models import commands, files

LEGEND = """A whole prompt of random tokens through models.stream, block by block from the host, to its first token.
seconds: one run, after one block has compiled everything. step ms: median of the decode steps after it, with the host
in between. compiled: how often a block was compiled; later prompts under the same budget need no compilation. full /
budget: seconds of a full cache over those of a budget, for the same prompt."""


def feed_all(grid: decode.Grid, free: float) -> Iterator[dict[str, Any]]:
    """Feed ``grid.prompts`` under budgets, and those of ``grid.full`` into full caches, and yield their records."""
    shapes, batches, budgets, prompts, policy, block, full = grid
    wanted: list[tuple[int | None, int]] = [(budget, prompt) for budget in budgets for prompt in prompts]
    wanted += [(None, prompt) for prompt in full]
    model, held_name = None, ""
    settings = [(name, batch, *one) for name in shapes for batch in batches for one in wanted]
    for name, batch, budget, prompt in commands.progress_bar("prompt", over=settings):
        config, dtype = shape(name), steps.dtype_here()
        setting = steps.Setting(config, None if budget is None else policy, budget, batch, block, dtype)
        try:
            steps.check_fits(setting, prompt, free)
            if name != held_name:
                model, held_name = None, ""  # free the last model's weights before the next are made
                model, held_name = steps.random_model(config, dtype, free=free), name
            yield prompt_record(model, name, setting, prompt)
        except (measure.DoesNotFit, jax.errors.JaxRuntimeError) as reason:
            yield {**decode.labels("feed", name, setting, prompt), "refused": measure.reason_of(reason)}


def prompt_record(model: Any, name: str, setting: steps.Setting, prompt: int) -> dict[str, Any]:
    """Feed one prompt, and return its record."""
    fed = steps.feed(model, setting, prompt)
    return {
        **decode.labels("feed", name, setting, prompt),
        "milliseconds": 1e3 * fed.prompt,
        "step_milliseconds": 1e3 * fed.step,
        "repetitions": 1,
        "compilations": fed.compilations,
        "peak_bytes": measure.peak_bytes(),
    }


def feed_table(results: Sequence[dict[str, Any]]) -> report.Table:
    """Return a table with one line per prompt that was fed."""
    whole = {
        (r["shape"], r["batch"], r["prompt"]): r["milliseconds"]
        for r in results
        if r["budget"] is None and "refused" not in r
    }

    def over_full(r: dict[str, Any]) -> str:
        full = None if r["budget"] is None else whole.get((r["shape"], r["batch"], r["prompt"]))
        return "" if full is None else f"{full / r['milliseconds']:.2f}"

    cells: list[tuple[str, report.Cell]] = [
        *decode.SETTING,
        ("seconds", lambda r: f"{r['milliseconds'] / 1e3:.2f}"),
        ("tokens / s", lambda r: f"{1e3 * r['batch'] * r['prompt'] / r['milliseconds']:,.0f}"),
        ("step ms", "{step_milliseconds:.2f}"),
        ("compiled", "{compilations}"),
        ("full / budget", over_full),
    ]
    return measure.table(results, cells, left=len(decode.SETTING))


def tables(results: Sequence[dict[str, Any]]) -> dict[str, tuple[report.Table, str]]:
    """Return table and legend of blocks, their parts and whole prompts, by title."""
    fed = [r for r in results if r.get("kind") == "feed"]
    return decode.tables(results) | ({"Whole prompts": (feed_table(fed), LEGEND)} if fed else {})


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    decode.add_step_flags(flags, "prefill")
    flags.add_argument("--feed", help="prompts to feed whole, or none (default: 8192,131072; on a CPU 1024)")


def command(flags: argparse.Namespace) -> None:
    """Measure, print the tables, write JSON."""
    files.check_outputs([flags.json])
    grid = decode.step_grid(flags)
    asked = flags.feed or ("8192,131072" if measure.on_accelerator() else "1024")
    fed = [32, 64] if flags.tiny else [] if asked == "none" else measure.whole_numbers("--feed", asked)
    timing = measure.timing(flags)
    settings = {**timing.settings(), **grid._asdict(), "feed": fed}
    whole = feed_all(grid._replace(prompts=fed, full=fed if grid.full else []), timing.free) if fed else ()
    records = itertools.chain(decode.sweep("block", grid, timing), whole)
    measure.show(tables(measure.collect(flags, "prefill", settings, records)), flags.json)
