"""Peak bytes and speed of prompts of growing length inside a cache of fixed size, by policy and moment of eviction.

The bytes are those of the compiled prefill: its arguments, temporary arrays and results, without the weights and the
prompt's own numbers. The seconds are those of ``models.stream`` on random tokens, the second time.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
import warnings
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, get_args

import jax
import numpy as np

import models
from benchmarks import measure
from evals import report
from kvjax._src.chains import policy_of
from kvjax._src.checks import check_names
from kvjax.schedule import When
from models import commands, driver, engine, files, fingerprints
from models.commands.programs import make_room
from models.commands.shared_flags import add_shared_flags, count
from models.networks import load_networks, read_by, wanted_by
from models.prompts import check_prompt

LEGEND = """peak MiB: what the compiled prefill takes beside the weights and the prompt. cache MiB: the largest cache of
the run that was timed; a full cache's slots are a power of two. tokens / s: of the prompt, in one run. full / this:
seconds of a full cache over those of the line, for the same prompt."""
POLICIES = "full,recency,snapkv,kvzip@uniform,repeat"


def peak_bytes(model: models.Decoder, prompt: tuple[int, int], options: models.Options) -> int:
    """Return the bytes that a compiled prefill of so many rows and tokens takes beside weights and prompt."""
    given = check_prompt(model, np.zeros(prompt, np.int32), None, None)
    run, sizes, fed = engine.prepare(model, given, options)
    program = driver.prefill_at_once.lower(run, sizes, fed, None).compile()
    return measure.program_bytes(program) - measure.tree_bytes((run.model, fed))


def timing(model: models.Decoder, prompt: tuple[int, int], options: models.Options) -> dict[str, float]:
    """Feed rows of random tokens; return the seconds to their first tokens, and the bytes of their largest cache."""
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, prompt, np.int32)
    held, start = [0], 0.0
    for _ in range(2):  # the first one compiles
        start = time.perf_counter()
        note = lambda done, total, cache: held.append(cache.nbytes)  # noqa: E731
        list(models.stream(model, tokens, options=options, max_new_tokens=1, on_block=note))
    return {"seconds": time.perf_counter() - start, "cache_bytes": max(held)}


def measurements(
    model: models.Decoder,
    policies: Sequence[str],
    moments: Sequence[Any],
    prompts: Sequence[tuple[int, int]],
    longest: int,
    like: models.Options,
) -> Iterator[dict[str, Any]]:
    """Compile a prefill for each policy, moment and prompt, time those of at most ``longest`` tokens, yield records.

    ``prompts`` are rows that are fed together, and the tokens of each. ``like`` has the budget, the block, and the
    networks that the policies read.
    """
    arms = [(name, when) for name in policies for when in (["block"] if name == "full" else moments)]
    # Policies take turns, so that what slows a machine down for a while slows all of them.
    for prompt, (name, when) in commands.progress_bar("prompt", over=[(n, a) for n in prompts for a in arms]):
        make_room()
        named: dict[str, Any] = {"policy": name, "when": when, "rows": prompt[0], "prompt": prompt[1]}
        named |= {"seconds": None, "cache_bytes": None}
        policy = policy_of(name)
        options = dataclasses.replace(
            like, policy=policy, budget=None if policy is None else like.budget, when=when, evict_every=0,
            networks=read_by(like.networks, policy),
        )  # fmt: skip
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a policy that should choose once chooses by block, on purpose
                named["peak_bytes"] = peak_bytes(model, prompt, options)
                named |= timing(model, prompt, options) if prompt[1] <= longest else {}
        except (ValueError, jax.errors.JaxRuntimeError) as reason:  # longer than the model's positions, or memory
            named["refused"] = measure.reason_of(reason)
        yield named


def table(results: Sequence[dict[str, Any]]) -> report.Table:
    """Return a table with one line per policy, moment and prompt."""
    at = itemgetter("rows", "prompt")
    full = {at(r): r["seconds"] for r in results if r["policy"] == "full"}

    def known(name: str, cell: report.Cell) -> report.Cell:
        return lambda r: "" if r.get(name) is None else cell(r) if callable(cell) else cell.format(**r)

    cells: list[tuple[str, report.Cell]] = [
        ("policy", "{policy}"),
        ("evicts", lambda r: "" if r["policy"] == "full" else "by block" if r["when"] == "block" else "once"),
        ("rows", "{rows}"),
        ("prompt", "{prompt:,}"),
        ("peak MiB", known("peak_bytes", lambda r: f"{r['peak_bytes'] / 2**20:.1f}")),
        ("cache MiB", known("cache_bytes", lambda r: f"{r['cache_bytes'] / 2**20:.1f}")),
        ("tokens / s", known("seconds", lambda r: f"{r['rows'] * r['prompt'] / r['seconds']:,.0f}")),
        (
            "full / this",
            known("seconds", lambda r: f"{before / r['seconds']:.2f}" if (before := full.get(at(r))) else ""),
        ),
    ]
    return measure.table(results, cells, left=2)


def heading(settings: dict[str, Any]) -> str:
    """Return the title of the page's section."""
    return f"Prompts of {settings['model']} inside {settings['budget']} slots per head, {settings['rows']} at a time"


def tables(results: Sequence[dict[str, Any]]) -> dict[str, tuple[report.Table, str]]:
    """Return table and legend, by title."""
    return {"Fixed memory": (table(results), LEGEND)}


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("--policies", default=POLICIES, help="policies, or full")
    flags.add_argument("--budget", type=count, default=512, help="slots per head")
    flags.add_argument("--prompts", default="2048,8192,65536", help="tokens")
    flags.add_argument("--rows", default="1", help="prompts that are fed together")
    flags.add_argument("--longest", type=count, default=8192, help="the longest prompt that is timed")
    add_shared_flags(flags, "model", "moments", "block", "networks", model="smollm2", moments="block,prompt")
    measure.add_json_flag(flags, "fixed_memory")


def command(flags: argparse.Namespace) -> None:
    """Compile and time, print the table, write JSON."""
    files.check_outputs([flags.json])
    policies, moments = commands.split_list(flags.policies), commands.split_list(flags.when)
    check_names("--when", moments, get_args(When))
    wanted = [wanted_by(policy_of(name)) for name in policies]
    sizes = (measure.whole_numbers(f"--{name}", getattr(flags, name)) for name in ("rows", "prompts"))
    prompts = [(rows, tokens) for rows, tokens in itertools.product(*sizes)]
    model, tokenizer = models.load(flags.model)
    networks = load_networks(flags.networks, flags.model, model, wanted)
    like = models.Options(budget=flags.budget, block=flags.block, networks=networks)
    names = ("model", "policies", "when", "budget", "rows", "prompts", "longest", "block")
    settings, digests = {name: getattr(flags, name) for name in names}, fingerprints.fingerprints(model, tokenizer)
    records = measurements(model, policies, moments, prompts, flags.longest, like)
    found = measure.collect(flags, "fixed_memory", settings, records, digests)
    measure.show(tables(found), flags.json)
