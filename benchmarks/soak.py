"""Long runs under one budget: many tokens through one cache, many requests through one Engine, many kills of a command.

Memory and the time per block must stay flat, nothing may be compiled on the way, and every answer must be the one that
:func:`models.generate` gives to its prompt alone, whatever is cancelled around it. A file of answers whose command is
killed at random moments, and started again, must end up as if nothing had happened.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import models
from benchmarks import measure
from evals import report
from models import files, fingerprints
from models.commands.shared_flags import add_shared_flags, at_least, count
from models.progress import progress_bar

PARTS = 20  # of each run, one record of figures each
POOL = 200  # prompts that requests are drawn from; each one's answer alone is known
LONGEST, MOST = 256, 16  # tokens of a request's prompt and answer, at most
CANCELLED = 0.05  # the chance, at each step, that some request is cancelled


def _resident_bytes() -> int:
    """Return the bytes of memory that this process holds."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def prompt_parts(model: models.Decoder, tokens: int, policy: str, budget: int, block: int) -> list[dict[str, Any]]:
    """Feed one prompt of so many tokens, drawn at random, and return the figures of each part of it."""
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, tokens), dtype=np.int32)
    records: list[dict[str, Any]] = []
    taken: list[np.ndarray] = []  # seconds of each block, by the clock and by the processor
    clocks = lambda: np.array([time.perf_counter(), time.process_time()])  # noqa: E731
    before = clocks()
    with (
        progress_bar("token", total=tokens, unit_scale=True) as bar,
        measure.compilations() as compiled,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the prompt is longer than the model's positions, on purpose

        def note(done: int, total: int, _: Any) -> None:
            taken.append(clocks() - before)
            bar.update(done - bar.n)
            if done * PARTS // total > len(records):
                wall, work = (1e3 * np.median(taken, axis=0)).tolist()
                records.append(
                    {
                        "run": "tokens", "done": done, "milliseconds": wall, "processor": work,
                        "resident_bytes": _resident_bytes(), "compilations": len(compiled),
                    }
                )  # fmt: skip
                taken.clear()
                compiled.clear()
            before[:] = clocks()

        options: dict[str, Any] = dict(policy=policy, budget=budget, block=block, max_new_tokens=1)
        list(models.stream(model, prompt, on_block=note, **options))
    return records


def request_figures(
    model: models.Decoder, requests: int, rows: int, policy: str, budget: int, block: int
) -> list[dict[str, Any]]:
    """Send requests of random lengths through an Engine, cancel some at random, and return the figures of each part.

    ``wrong`` counts answers that differ from the prompt's answer alone; ``lost`` those that ended without all tokens.
    """
    options: dict[str, Any] = dict(policy=policy, budget=budget, block=block)
    rng = random.Random(0)
    drawn = np.random.default_rng(1)
    lengths = [round(2 ** rng.uniform(2, np.log2(LONGEST))) for _ in range(POOL)]
    prompts = [drawn.integers(4, model.config.vocab_size, length, dtype=np.int32) for length in lengths]
    alone = [
        models.generate(model, prompt[None], max_new_tokens=MOST, **options).tokens[0].tolist()
        for prompt in progress_bar("prompt", over=prompts, desc="alone")
    ]
    engine = models.Engine(model, rows=rows, max_new_tokens=MOST, longest_prompt=LONGEST, **options)
    asked: dict[int, tuple[list[int], list[int]]] = {}  # handle -> the tokens that are right, those that it got
    counts: Counter[str] = Counter()
    found: list[dict[str, Any]] = []
    submitted = 0
    started = time.perf_counter()
    bar = progress_bar("request", total=requests)

    def end(handle: int, what: str) -> None:
        expected, answer = asked.pop(handle)
        counts[what] += 1
        counts["tokens"] += len(answer)
        counts["wrong"] += answer != expected[: len(answer)]
        counts["lost"] += what == "ended" and len(answer) < len(expected)
        bar.update()

    with measure.compilations() as compiled:
        while submitted < requests or asked:
            while submitted < requests and len(asked) < 2 * rows:
                number, most = rng.randrange(POOL), rng.randint(1, MOST)
                handle = engine.submit(prompts[number], max_new_tokens=most)
                asked[handle] = _until_end(alone[number][:most], model.config.eos), []
                submitted += 1
            for made in engine.step():
                asked[made.handle][1].append(made.token)
                if made.ended:
                    end(made.handle, "ended")
            if asked and rng.random() < CANCELLED:
                handle = rng.choice(list(asked))
                engine.cancel(handle)
                end(handle, "cancelled")
            done = counts["ended"] + counts["cancelled"]
            if done * PARTS // requests > len(found):
                seconds = time.perf_counter() - started
                found.append(
                    {
                        "run": "requests", "done": done, "seconds": seconds, "resident_bytes": _resident_bytes(),
                        "compilations": len(compiled), **{name: counts[name] for name in COUNTED},
                    }
                )  # fmt: skip
                compiled.clear()
    bar.close()
    found[-1]["idle"] = engine.idle and bool((np.asarray(jnp.max(engine.cache.position)) < 0).all())
    return found


COUNTED = ("ended", "cancelled", "tokens", "wrong", "lost")
FATES = ("answers", "lost", "twice", "wrong")


def _fates(found: Sequence[str], expected: Sequence[str]) -> dict[str, int]:
    """Count a file's answers, those that were lost, those that are there more than once, and those that differ."""
    lines = [json.loads(line)["line"] for line in found]
    wanted = {json.loads(line)["line"] for line in expected}
    return {
        "answers": len(found),
        "lost": len(wanted - set(lines)),
        "twice": len(lines) - len(set(lines)),
        "wrong": len(set(found) - set(expected)),
    }


def kill_figures(flags: argparse.Namespace, prompts: int = 200) -> list[dict[str, Any]]:
    """Kill `models.batch` at random moments, start it again, and compare its answers with a run's that nothing killed.

    The moments are drawn over the time of the whole run; a file that is done is begun anew.
    """
    rng = random.Random(2)
    counts: Counter[str] = Counter()
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        asked, whole, out = (Path(folder) / name for name in ("prompts.jsonl", "whole.jsonl", "out.jsonl"))
        lengths = [rng.randint(4, 60) for _ in range(prompts)]
        words = ("amber falcon", "silver anchor", "the code of", "is 4719.", "and", "a weight of 12")
        asked.write_text(
            "".join(json.dumps({"prompt": " ".join(rng.choices(words, k=length))}) + "\n" for length in lengths)
        )

        def start(path: Path) -> subprocess.Popen[bytes]:
            given = dict(model=flags.model, policy=flags.policy, budget=flags.budget // 8, rows=flags.rows)
            named = [part for name, value in given.items() for part in (f"--{name}", str(value))]
            command = [sys.executable, "-m", "models.batch", str(asked), "--out", str(path), *named]
            return subprocess.Popen(
                [*command, "--max-new-tokens", str(MOST)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )

        def check(failed: bool) -> None:
            if failed:
                raise RuntimeError(f"models.batch failed on {asked}; run it by hand to see why.")

        def finish(path: Path) -> float:
            started = time.monotonic()
            check(start(path).wait() != 0)
            return time.monotonic() - started

        def compare() -> None:
            counts.update(_fates(out.read_text().splitlines(), expected))
            out.unlink()

        finish(whole)
        expected = whole.read_text().splitlines()
        seconds = finish(out)  # the second start finds its programs compiled, as each start after a kill does
        out.unlink()
        progress = progress_bar("kill", total=flags.kills, desc="kills")
        while len(records) < flags.kills:
            process = start(out)
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(rng.uniform(0, seconds))
            finally:
                process.kill()
                process.wait()
            check(process.returncode > 0)
            if process.returncode == 0:  # it ended before its moment: the file is whole; begin another
                compare()
                continue
            there = out.read_bytes().count(b"\n") if out.exists() else 0
            records.append({"run": "kills", "there": there, **{name: counts[name] for name in FATES}})
            records[-1]["done"] = len(records)
            progress.update()
        progress.close()
        finish(out)
        compare()
        records[-1] |= {name: counts[name] for name in FATES}
    return records


def _until_end(tokens: Sequence[int], end: Sequence[int]) -> list[int]:
    """Return an answer up to its first end token, that one included."""
    places = [place for place, token in enumerate(tokens) if token in end]
    return list(tokens[: places[0] + 1] if places else tokens)


def _flatness(records: Sequence[dict[str, Any]], name: str) -> float:
    """Return how much larger the last quarter's median is than the second quarter's, as a share; 0.0 is flat."""
    quarter = len(records) // 4
    early, late = records[quarter : 2 * quarter], records[-quarter:]
    first, last = (statistics.median(record[name] for record in part) for part in (early, late))
    return last / first - 1


def tables(results: Sequence[dict[str, Any]]) -> dict[str, tuple[report.Table, str]]:
    """Return each run by title: a table with a line for some parts of the run, and a sentence on all."""
    held: list[tuple[str, report.Cell]] = [
        ("MiB held", lambda r: f"{r['resident_bytes'] / 2**20:,.0f}"),
        ("compiled", "{compilations}"),
    ]
    found = {}
    if tokens := [record for record in results if record["run"] == "tokens"]:
        cells = [("tokens fed", "{done:,}"), ("ms a block", "{milliseconds:.2f}"), ("of processor", "{processor:.2f}")]
        table = report.table(_some(tokens), [*cells, *held], left=0)
        found["One prompt through one cache"] = (table, _sentence(tokens, "processor", "processor time of a block"))
    if requests := [record for record in results if record["run"] == "requests"]:
        cells = [("requests", "{done:,}"), ("seconds", "{seconds:,.0f}")]
        table = report.table(_some(requests), [*cells, *held, *((name, f"{{{name}:,}}") for name in COUNTED)], left=0)
        found["Requests through one Engine"] = (table, _sentence(requests))
    if kills := [record for record in results if record["run"] == "kills"]:
        last, busy = kills[-1], sum(record["there"] > 0 for record in kills)
        table = report.table([last], [(name, f"{{{name}:,}}") for name in FATES], left=0)
        said = f"{len(kills)} kills of models.batch, {busy} of them with answers in the file."
        found["Kills of a command"] = (table, said)
    return found


def _some(records: Sequence[dict[str, Any]], lines: int = 5) -> Sequence[dict[str, Any]]:
    """Return at most so many records, evenly spread, the last one among them."""
    apart = -(-len(records) // lines)
    return records[(len(records) - 1) % apart :: apart]


def _sentence(records: Sequence[dict[str, Any]], name: str | None = None, what: str = "") -> str:
    quarter = len(records) // 4
    parts = [] if name is None else [f"{what} {_flatness(records, name):+.1%}"]
    parts.append(f"memory held {_flatness(records, 'resident_bytes'):+.1%}")
    later = sum(record["compilations"] for record in records[quarter:])
    return f"Last quarter against the second: {', '.join(parts)}. Programs compiled after the first quarter: {later}."


def figure(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw memory and time over tokens, and memory over requests."""
    of = {name: [record for record in results if record["run"] == name] for name in ("tokens", "requests")}
    wanted = [
        (records, name, label, run)
        for run, records in of.items()
        if records
        for name, label in (("processor", "ms a block, of processor"), ("resident_bytes", "MiB held by the process"))
        if name in records[0]
    ]
    drawing, axes = report.pyplot().subplots(
        1, len(wanted), figsize=(4 * len(wanted), 3.4), layout="constrained", squeeze=False
    )
    for axis, (records, name, label, run) in zip(axes[0], wanted, strict=True):
        scale = 2**20 if name == "resident_bytes" else 1
        axis.plot([r["done"] for r in records], [r[name] / scale for r in records], color=report.colour(0), marker="o")
        axis.set_ylim(0, 1.15 * max(r[name] for r in records) / scale)
        axis.set_xlabel(f"{run} done", fontsize=9)
        axis.set_title(label, fontsize=10)
        axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g} M" if x >= 1e6 else f"{x / 1e3:g}k" if x else "0")
        report.plain(axis)
    report.save(drawing, path)


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    add_shared_flags(flags, "model", "policy", "block", "plot", policy="snapkv+caote")
    flags.add_argument("--budget", type=at_least(8), default=512, help="slots per head of the long prompt")
    flags.add_argument("--tokens", type=at_least(0), default=1_000_000, help="tokens of the long prompt; 0 for none")
    flags.add_argument("--requests", type=at_least(0), default=10_000, help="requests to the Engine; 0 for none")
    flags.add_argument("--kills", type=at_least(0), default=20, help="kills of models.batch; 0 for none")
    flags.add_argument("--rows", type=count, default=8, help="rows of the Engine; each has an eighth of the budget")
    measure.add_json_flag(flags, "soak")


def command(flags: argparse.Namespace) -> None:
    """Run all, print the tables, write JSON after each and the picture at the end."""
    if flags.plot is not None:
        report.check_plot(flags.plot)
    files.check_outputs([flags.json, flags.plot])
    if not flags.tokens and not flags.requests and not flags.kills:
        raise ValueError("--tokens, --requests and --kills are all 0; give at least one of them.")
    if flags.plot is not None and not flags.tokens and not flags.requests:
        raise ValueError("--plot draws tokens and requests, but both are 0; leave it out.")
    if 0 < flags.tokens < PARTS * flags.block or 0 < flags.requests < PARTS:
        raise ValueError(
            f"each run is reported in {PARTS} parts: give --tokens 0 or at least {PARTS * flags.block}, and "
            f"--requests 0 or at least {PARTS}."
        )
    model, _ = models.load(flags.model, dtype="float32")
    settings = {name: getattr(flags, name) for name in ("model", "policy", "budget", "block", "rows")}
    settings |= {"pool": POOL, "longest": LONGEST, "most": MOST, "load": os.getloadavg()[0]}
    digests = fingerprints.fingerprints(model)

    def records() -> Iterator[dict[str, Any]]:
        if flags.tokens:
            yield from prompt_parts(model, flags.tokens, flags.policy, flags.budget, flags.block)
        if flags.requests:
            budget, block = flags.budget // 8, min(flags.block, 32)
            yield from request_figures(model, flags.requests, flags.rows, flags.policy, budget, block)
        if flags.kills:
            yield from kill_figures(flags)

    results = measure.collect(flags, "soak", settings, records(), digests)
    measure.show(tables(results), flags.json)
    if flags.plot is not None:
        figure(results, flags.plot)
        print(f"picture: {flags.plot}")
