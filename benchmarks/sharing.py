"""A study of many policies and budgets, timed: the prompt runs once for each setting, or once for all of them."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import models
from benchmarks import measure
from evals import evaluator, needle, report
from evals.evaluator import Setting
from models import commands, provenance

POLICIES = (
    "streaming", "h2o+protect(recent=0.5)", "h2o+caote+protect(recent=0.5)", "tova", "snapkv", "snapkv+caote",
    "snapkv@adakv", "keydiff", "curdkv", "expected_attention", "lava@lava", "laprox@model",
)  # fmt: skip
LEGEND = """seconds: for the whole study, answers included; first: with compilation of the programs, then: without."""


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("--model", default="smollm2", help="a name or a folder (default %(default)s)")
    flags.add_argument("--policies", default=",".join(POLICIES), help="several by comma (default: twelve)")
    flags.add_argument("--budgets", default="0.1,0.25,0.5", help="several by comma (default %(default)s)")
    flags.add_argument("--length", type=int, default=1024, help="tokens per prompt (default %(default)s)")
    flags.add_argument("--samples", type=int, default=4, help="number of prompts (default %(default)s)")
    flags.add_argument("--seed", type=int, default=0, help="seed of the samples (default %(default)s)")
    measure.add_json_flag(flags, "sharing")


def command(flags: argparse.Namespace) -> None:
    """Run the benchmark."""
    commands.check_outputs([flags.json])
    policies, budgets = commands.split_list(flags.policies), commands.split_list(flags.budgets)
    settings = [
        Setting(policy, commands.parse_budget(budget), "prompt", "after")
        for policy, budget in itertools.product(policies, budgets)
    ]
    model, tokenizer = models.load(flags.model, dtype="float32")
    if tokenizer is None:
        raise ValueError(f"{flags.model} has no tokenizer.json, and text needs one; copy it from the model's source.")
    cells = needle.make_cells(
        tokenizer, lengths=[flags.length], depths=flags.samples, samples=1, facts=10, question="after", seed=flags.seed
    )
    rows = compared(model, cells, settings)
    print(table(rows))
    if flags.json is not None:
        chosen = {
            "model": flags.model,
            "policies": policies,
            "budgets": budgets,
            "length": flags.length,
            "samples": flags.samples,
        }
        measure.write(flags, "sharing", chosen, rows, provenance.fingerprints(model, tokenizer))
        print(f"figures: {flags.json}")


def compared(model: models.Decoder, cells: list[needle.Cell], settings: list[Setting]) -> list[dict[str, Any]]:
    """Run the study both ways, each twice in turns, and return seconds and whether the answers are the same."""
    prompts = [sample for cell in cells for sample in cell.samples]
    new = max(len(sample.answer_tokens) for sample in prompts)
    found: dict[str, list[Any]] = {}

    def way(name: str, sets: list[list[Setting]]) -> Callable[[], None]:
        def study() -> None:
            found[name] = [
                (setting, batch.tokens.tolist())
                for together in sets
                for setting, batch in evaluator.answers_each(
                    model, prompts, together, new_tokens=new, batch=len(prompts)
                )
            ]

        return study

    ways = {"alone": way("alone", [[setting] for setting in settings]), "shared": way("shared", [settings])}
    first = {name: _seconds(study) for name, study in ways.items()}
    then = {name: _seconds(study) for name, study in ways.items()}
    same = sorted(map(str, found["alone"])) == sorted(map(str, found["shared"]))
    return [
        {
            "way": name,
            "settings": len(settings),
            "prompts": len(prompts) * (len(settings) if name == "alone" else len(evaluator.sharing(settings))),
            "first_seconds": first[name],
            "seconds": then[name],
            "times_faster": then["alone"] / then[name],
            "first_times_faster": first["alone"] / first[name],
            "same_answers": same,
        }
        for name in ways
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table with one row per way."""
    head = ("prompt", "settings", "through the model", "first", "faster", "then", "faster", "same answers")
    lines = [
        (
            r["way"],
            str(r["settings"]),
            str(r["prompts"]),
            f"{r['first_seconds']:.1f} s",
            f"{r['first_times_faster']:.1f}",
            f"{r['seconds']:.1f} s",
            f"{r['times_faster']:.1f}",
            "yes" if r["same_answers"] else "no",
        )
        for r in rows
    ]
    return "\n".join([report.columns(head, lines, left=1), LEGEND])


def _seconds(study: Callable[[], None]) -> float:
    begun = time.perf_counter()
    study()
    return time.perf_counter() - begun
