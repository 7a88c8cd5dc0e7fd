"""A benchmark of five minutes on two CPU cores to compare commits: kernels, decode, prefill and a fed prompt."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

import models
from benchmarks import decode, kernels, measure, prefill, steps
from evals import report
from kvjax._src.former_names import renamed_document
from models import files, fingerprints

POLICY = "h2o+caote"
SIZES = kernels.Sizes(budget=512, block=128, context=8192, loss_tokens=512)
STEPS: dict[str, Any] = {"batches": [1], "budgets": [512], "prompts": [1_000, 100_000], "block": 128}
FULL, FED = [1_000, 8_192, 32_768], [1_000, 100_000]  # prompts of full caches, and those fed to the embedded model


def measurements(timing: measure.Timing, *, tiny: bool = False) -> Iterator[dict[str, Any]]:
    """Measure everything, the most important first, and yield the records."""
    name = "tiny" if tiny else "small"
    sizes = kernels.TINY if tiny else SIZES
    given: dict[str, Any] = decode.TINY if tiny else STEPS
    grid = decode.Grid(shapes=[name], policy=POLICY, **given)
    yield from decode.sweep("decode", grid, timing)
    shipped, _ = models.load("retriever", dtype=jnp.float32)
    setting = steps.Setting(shipped.config, POLICY, grid.budgets[0], block=grid.block)
    for prompt in [32, 64] if tiny else FED:
        yield prefill.prompt_record(shipped, "retriever", setting, prompt)
    yield from decode.sweep("block", grid, timing)
    yield from kernels.sweep([name], [1], sizes, timing)
    yield from decode.sweep("decode", grid._replace(budgets=[], full=[64] if tiny else FULL), timing)


def tables(results: Sequence[dict[str, Any]]) -> dict[str, tuple[report.Table, str]]:
    """Return each part's table and legend by title."""
    operations = [r for r in results if "operation" in r]
    return prefill.tables(results) | (kernels.tables(operations) if operations else {})


def older(path: Path) -> list[dict[str, Any]]:
    """Read the records of an older results file; ValueError for any other file."""
    try:
        document = renamed_document(json.loads(path.read_text()))
        records = document["results"]
        if document["benchmark"] != "cpu" or not all("name" in record for record in records):
            raise KeyError
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"{path} holds no results of `python -m benchmarks cpu --json {path}`.") from None
    return records


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument(
        "--against", type=Path, metavar="OLD.json", help="an older run's figures, to print each row's ratio"
    )
    measure.add_timing_flags(flags, "cpu")


def command(flags: argparse.Namespace) -> None:
    """Measure, print the tables, write JSON, and compare with an older run."""
    files.check_outputs([flags.json])
    old = None if flags.against is None else older(flags.against)
    timing = measure.timing(flags)
    digests = fingerprints.fingerprints(models.load("retriever", dtype=jnp.float32)[0])
    results = measure.collect(flags, "cpu", timing.settings(), measurements(timing, tiny=flags.tiny), digests)
    measure.show(tables(results), flags.json)
    if old is not None:
        print(f"\nAgainst {flags.against}\n\n{measure.ratio_table(results, old)}")
