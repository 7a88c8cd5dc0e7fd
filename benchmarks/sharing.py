"""A study of many policies and budgets, timed: the prompt runs once for each setting, or once for all of them."""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

import jax

import models
from benchmarks import measure
from evals import answering, command_line, evaluator, needle, report, run_settings
from evals.run_settings import Setting
from models import commands

POLICIES = (
    "streaming", "h2o+protect(recent=0.5)", "h2o+caote+protect(recent=0.5)", "tova", "snapkv", "snapkv+caote",
    "snapkv@adakv", "keydiff", "curdkv", "expected_attention", "lava@lava", "laprox@model",
)  # fmt: skip
LEGEND = """seconds: for the whole study, answers included; first: with compilation of the programs, then: without."""


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("--model", default="smollm2", help="a name or a folder (default %(default)s)")
    flags.add_argument("--policies", default=",".join(POLICIES), help="several by comma (default: twelve)")
    flags.add_argument("--budgets", "--budget", default="0.1,0.25,0.5", help="several by comma (default %(default)s)")
    flags.add_argument("--length", type=int, default=1024, help="tokens per prompt (default %(default)s)")
    flags.add_argument("--samples", type=int, default=4, help="number of prompts (default %(default)s)")
    flags.add_argument("--seed", type=int, default=0, help="seed of the samples (default %(default)s)")
    measure.add_json_flag(flags, "sharing")


def command(flags: argparse.Namespace) -> None:
    """Run the benchmark."""
    commands.check_outputs([flags.json])
    policies, budgets = commands.split_list(flags.policies), commands.split_list(flags.budgets)
    settings = [
        Setting(policy, commands.parse_budget(budget), "prompt", "known")
        for policy, budget in itertools.product(policies, budgets)
    ]
    model, tokenizer = command_line.load_with_tokenizer(flags.model, dtype="float32")
    cells = needle.make_cells(
        tokenizer, lengths=[flags.length], depths=flags.samples, samples=1, facts=10, question="known", seed=flags.seed
    )
    rows = comparison(model, cells, settings)
    print(table(rows), LEGEND, sep="\n\n")
    chosen = {name: getattr(flags, name) for name in ("model", "length", "samples")}
    chosen |= {"policies": policies, "budgets": budgets}
    measure.write(flags, "sharing", chosen, rows, evaluator.digests(model, tokenizer), done=True)


def comparison(model: models.Decoder, cells: list[needle.Cell], settings: list[Setting]) -> list[dict[str, Any]]:
    """Run the study both ways, and return the seconds of each, and whether the answers are the same.

    Each part of a study runs twice in a row: the first run compiles its programs, the second one uses them. Every
    setting that runs alone is such a part; half of them run before the shared study and half after it. (All settings
    alone need more programs than a process can keep, so a second run of them all would compile again.)
    """
    prompts = [sample for cell in cells for sample in cell.samples]
    new = max(len(sample.answer_tokens) for sample in prompts)
    found: dict[str, list[Any]] = {"alone": [], "shared": []}
    seconds: dict[str, list[float]] = {"alone": [0.0, 0.0], "shared": [0.0, 0.0]}

    def study(way: str, together: list[Setting]) -> None:
        for turn in range(2):
            start = time.perf_counter()
            feed = answering.Feed(batch=len(prompts))
            each = answering.answers_each(model, prompts, together, new_tokens=new, feed=feed)
            answers = [(setting, batch.tokens.tolist()) for setting, batch in each]
            seconds[way][turn] += time.perf_counter() - start
        found[way] += answers

    half = len(settings) // 2
    parts = [[setting] for setting in settings]
    with commands.progress_bar("study", total=len(parts) + 1) as progress:
        for way, together in [*(("alone", part) for part in parts[:half]), ("shared", settings),
                              *(("alone", part) for part in parts[half:])]:  # fmt: skip
            if way == "shared":
                jax.clear_caches()  # or its programs would have to make room for themselves half-way
            study(way, together)
            progress.update()
    same = sorted(map(str, found["alone"])) == sorted(map(str, found["shared"]))
    return [
        {
            "way": way,
            "settings": len(settings),
            "prompts": len(prompts) * (len(settings) if way == "alone" else len(run_settings.sharing(settings))),
            "first_seconds": first,
            "seconds": then,
            "times_faster": seconds["alone"][1] / then,
            "first_times_faster": seconds["alone"][0] / first,
            "same_answers": same,
        }
        for way, (first, then) in seconds.items()
    ]


def table(rows: list[dict[str, Any]]) -> report.Table:
    """Return a table with one row per way."""
    cells: list[tuple[str, report.Cell]] = [
        ("prompt", "{way}"),
        ("settings", "{settings}"),
        ("through the model", "{prompts}"),
        ("first", "{first_seconds:.1f} s"),
        ("faster", "{first_times_faster:.1f}"),
        ("then", "{seconds:.1f} s"),
        ("faster", "{times_faster:.1f}"),
        ("same answers", lambda r: "yes" if r["same_answers"] else "no"),
    ]
    return report.table(rows, cells, left=1)
