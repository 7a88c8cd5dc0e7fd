"""Shared by the benchmarks: times, the device's limits, checks of memory before it is allocated, results files."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from evals import report
from models import commands, files
from models.commands import provenance
from models.commands.shared_flags import count
from models.progress import progress_bar

RESULTS = Path(__file__).parent / "results"


class Times(NamedTuple):
    """Milliseconds of one call over all repetitions."""

    milliseconds: float  # the median
    lowest: float
    low: float  # the quartiles
    high: float
    processor: float | None  # the median of all threads' time, steadier on a busy CPU; None on an accelerator
    repetitions: int


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
    """Collect the compilation seconds of each program that is compiled in the ``with`` block."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


class DoesNotFit(ValueError):
    """The error for a program or arrays that take more memory than the device has free."""


def take_turns(
    programs: Mapping[str, Callable[[], Any]], repetitions: int, *, calls: int = 1, progress: bool = False
) -> dict[str, Times]:
    """Time programs after one warm-up call each; they take turns, so that a busy machine slows all of them alike.

    ``calls`` is the number of timed calls inside one call of a program; the times are per timed call.
    """
    if repetitions < 1:
        raise ValueError(f"{repetitions} repetitions were asked for; give at least 1.")
    for run in programs.values():
        jax.block_until_ready(run())
    taken: dict[str, list[float]] = {name: [] for name in programs}
    worked: dict[str, list[float]] = {name: [] for name in programs}
    for _ in progress_bar("turn", over=range(repetitions), quiet=not progress):
        for name, run in programs.items():
            started, working = time.perf_counter(), time.process_time()
            jax.block_until_ready(run())
            taken[name].append(1e3 * (time.perf_counter() - started) / calls)
            worked[name].append(1e3 * (time.process_time() - working) / calls)
    return {name: _summary(own, worked[name]) for name, own in taken.items()}


def _summary(taken: Sequence[float], worked: Sequence[float]) -> Times:
    low, high = (float(x) for x in np.quantile(taken, [0.25, 0.75]))
    processor = None if on_accelerator() else statistics.median(worked)
    return Times(statistics.median(taken), min(taken), low, high, processor, len(taken))


def in_turn(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Return a program that calls ``function(zero, *arguments)`` for each of its arguments, and returns all results.

    ``zero`` is an integer 0 that XLA cannot know to be 0, because it depends on the call before. What depends on it can
    run neither before that call nor beside it. Give each call arrays of its own, as the layers of a decoder have: what
    two calls compute from the same array, XLA computes once.
    """

    def program(*each: Any) -> list[Any]:
        zero, results = jnp.int32(0), list[Any]()
        for arguments in each:
            results.append(function(zero, *arguments))
            leaf = jax.tree.leaves(results[-1])[0]
            zero = (leaf[(0,) * leaf.ndim] < -100_000_000).astype(jnp.int32)  # no position or mean is so small
        return results

    return program


def executable(
    function: Callable[..., Any], *shapes: Any, what: str, free: float, donate: Sequence[int] = ()
) -> jax.stages.Compiled:
    """Compile for abstract arguments; DoesNotFit if they or the program take more than ``free`` bytes.

    ``what`` is the program's name in the error.
    """
    check_fits(tree_bytes(shapes), what, free)
    program = jax.jit(function, donate_argnums=tuple(donate)).lower(*shapes).compile()
    check_fits(program_bytes(program), what, free)
    return program


def check_fits(needed: float, what: str, free: float) -> None:
    """Raise DoesNotFit if ``needed`` bytes are more than are free."""
    if needed > free:
        raise DoesNotFit(
            f"{what} needs {needed / 2**30:,.2f} GiB, but {free / 2**30:,.2f} GiB are free here; give a smaller shape, "
            "batch, budget or prompt."
        )


def reason_of(error: Exception) -> str:
    """Return an error as text for a record: its first line, after its type unless the error is our own."""
    text = (str(error).splitlines() or [""])[0]
    return text if isinstance(error, DoesNotFit | NotImplementedError) else f"{type(error).__name__}: {text}"


def tree_bytes(tree: Any) -> int:
    """Return the bytes of a pytree's arrays or shapes."""
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def program_bytes(program: jax.stages.Compiled) -> int:
    """Return the bytes that a compiled program takes while it runs: arguments, results and temporary arrays."""
    memory: Any = program.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + results


def free_bytes() -> float:
    """Return the bytes that a program may still take on this device; on a CPU, 90% of the available memory."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    memory = Path("/proc/meminfo")
    if memory.is_file() and (available := re.search(r"^MemAvailable:\s+(\d+)", memory.read_text(), re.MULTILINE)):
        return 0.9 * 1024 * int(available[1])
    return 0.5 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_bytes() -> int | None:
    """Return the most bytes that this process has held on the device so far, or None on a CPU, which has no count."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def on_accelerator() -> bool:
    """Return whether programs run on a GPU or TPU."""
    return jax.default_backend() != "cpu"


class Device(NamedTuple):
    """The device's measured limits, from which floors follow: bytes copied per second, and FLOPs per second."""

    copy_bytes: float
    product_flops: float

    def milliseconds(self, numbers_bytes: float, flops: float = 0) -> float:
        """Return the floor in milliseconds of copying so many bytes, or of so many FLOPs if they take longer."""
        return 1e3 * max(numbers_bytes / self.copy_bytes, flops / self.product_flops)


def device(*, tiny: bool = False, repetitions: int = 5) -> Device:
    """Measure one pass over a large array in place (each byte read and written), and a square matrix product.

    The array is 1 GiB on an accelerator and 400 MB on a CPU; the product is bfloat16 of width 8,192 on an accelerator
    and float32 of width 2,048 on a CPU. The best of the repetitions counts, since a limit is what can be reached.
    """
    fast = on_accelerator()
    size = 2**16 if tiny else 2**28 if fast else 10**8  # as large as the weights of a measured model
    width = 64 if tiny else 8192 if fast else 2048
    passes, products = (20, 10) if fast and not tiny else (4, 1)

    @jax.jit
    def copy(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, passes, lambda _, x: -x, x)

    negate, held = jax.jit(copy, donate_argnums=0), [jnp.ones(size, jnp.float32)]

    def roll() -> jax.Array:
        held[0] = negate(held[0])
        return held[0]

    mean = jnp.full((width, width), 1 / width, jnp.bfloat16 if fast else jnp.float32)

    @jax.jit
    def multiply(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, products, lambda _, x: mean @ x, x)

    copied = take_turns({"copy": roll}, repetitions, calls=passes)["copy"].lowest
    multiplied = take_turns({"product": lambda: multiply(mean)}, repetitions, calls=products)["product"]
    return Device(2 * 4 * size / (1e-3 * copied), 2 * width**3 / (1e-3 * multiplied.lowest))


def add_json_flag(flags: argparse.ArgumentParser, name: str) -> None:
    """Add ``--json [PATH]``; without a path, it means benchmarks/results/NAME.json."""
    flags.add_argument(
        "--json", type=Path, nargs="?", const=RESULTS / f"{name}.json", metavar="PATH",
        help=f"write all figures here (benchmarks/results/{name}.json if no path is given)",
    )  # fmt: skip


class Timing(NamedTuple):
    """A benchmark's way to measure: calls per program, repetitions, bytes that may be taken, the device's limits."""

    calls: int
    repetitions: int
    free: float
    limits: Device

    def settings(self) -> dict[str, Any]:
        """Return the settings for a results file."""
        return {"calls": self.calls, "repetitions": self.repetitions, "limits": self.limits._asdict()}


def add_timing_flags(flags: argparse.ArgumentParser, name: str) -> None:
    """Add the flags of a benchmark that times programs; :func:`timing` reads them."""
    flags.add_argument("--calls", type=count, help="calls inside one timed program (default: 16, on a CPU 2)")
    flags.add_argument("--repetitions", type=count, help="runs of a timed program (default: 10, on a CPU 5)")
    flags.add_argument("--memory", type=float, help="GiB that may be taken (default: all free memory)")
    flags.add_argument("--tiny", action="store_true", help="smallest shape and sizes, to check that everything runs")
    add_json_flag(flags, name)


def timing(flags: argparse.Namespace) -> Timing:
    """Check the flags and measure the device's limits."""
    fast = on_accelerator()
    calls = flags.calls if flags.calls is not None else 1 if flags.tiny else 16 if fast else 2
    repetitions = flags.repetitions if flags.repetitions is not None else 1 if flags.tiny else 10 if fast else 5
    if flags.memory is not None and not flags.memory > 0:
        raise ValueError(f"--memory is {flags.memory}; give a number of GiB above 0.")
    free = free_bytes() if flags.memory is None else flags.memory * 2**30
    return Timing(calls, repetitions, free, device(tiny=flags.tiny))


def write(
    flags: argparse.Namespace,
    benchmark: str,
    settings: Mapping[str, Any],
    results: Any,
    digests: Mapping[str, str] = MappingProxyType({}),
    *,
    done: bool = False,
) -> None:
    """Write a benchmark's results and their provenance, if a path was given; ``done``: and print it.

    ``digests`` are those of a model that was loaded; other weights are drawn at random from fixed keys.
    """
    if flags.json is not None:
        flags_of = {"XLA_FLAGS": os.environ["XLA_FLAGS"]} if os.environ.get("XLA_FLAGS") else {}
        found = {"benchmark": benchmark, "settings": {**settings, **flags_of}, "results": results}
        provenance.write(flags, found, digests)
        if done:
            print(f"figures: {flags.json}")


def collect(
    flags: argparse.Namespace,
    benchmark: str,
    settings: Mapping[str, Any],
    records: Iterable[dict[str, Any]],
    digests: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Return the records of a benchmark, all of which are written (:func:`write`) whenever there is another one.

    Until the last one they are in ``X.partial.json``, so that a killed run leaves an earlier ``X.json`` as it was.

    Raises:
        ValueError: nothing was measured, as every record was refused.
    """
    found: list[dict[str, Any]] = []
    partial = argparse.Namespace(**vars(flags) | {"json": flags.json and flags.json.with_suffix(".partial.json")})
    for record in records:
        found.append(record)
        write(partial, benchmark, settings, found, digests)
    if found and all("refused" in record for record in found):
        raise ValueError(found[0]["refused"])
    if found and flags.json is not None:
        partial.json.replace(flags.json)
    return found


def write_page(path: Path, text: str) -> None:
    """Write a page in Markdown, and print its path."""
    with files.replacing(path) as temporary:
        temporary.write_text(text)
    print(f"page: {path}")


def show(tables: Mapping[str, tuple[report.Table, str]], path: Path | None) -> None:
    """Print tables with their legends, and the path of the figures."""
    print("\n\n".join(f"{title}\n\n{table}\n\n{legend}" for title, (table, legend) in tables.items()))
    if path is not None:
        print(f"figures: {path}")


def table(records: Sequence[Mapping[str, Any]], cells: Sequence[tuple[str, report.Cell]], *, left: int) -> report.Table:
    """Return a table as :func:`evals.report.table` does; refused records say so, with the reasons below the table."""

    def unless_refused(place: int, cell: report.Cell) -> report.Cell:
        of = cell.format_map if isinstance(cell, str) else cell
        return lambda r: of(r) if place < left or "refused" not in r else "refused" if place == left else ""

    told = [(head, unless_refused(place, cell)) for place, (head, cell) in enumerate(cells)]
    reasons = dict.fromkeys(f"refused: {r['refused']}" for r in records if "refused" in r)
    return report.table(records, told, left=left, notes=list(reasons))


def whole_numbers(name: str, text: str) -> list[int]:
    """Parse a command line's list of integers from 1."""
    found = commands.split_list(text)
    for part in found:
        if not part.isdecimal() or int(part) < 1:
            raise ValueError(f"{name} has {part!r}; give whole numbers from 1, separated by commas.")
    if not found:
        raise ValueError(f"{name} is {text!r}; give at least one number.")
    return [int(part) for part in found]


def shares(name: str, text: str) -> list[float]:
    """Parse a command line's list of shares between 0 and 1."""
    found = [commands.parse_budget(part) for part in commands.split_list(text)]
    if not found or any(isinstance(share, int) for share in found):
        raise ValueError(f"{name} is {text!r}; give shares of the tokens between 0 and 1, such as 0.5,0.1.")
    return [float(share) for share in found]


def ratio_table(results: Sequence[dict[str, Any]], old: Sequence[dict[str, Any]]) -> report.Table:
    """Return a table of each record's time over its time in an older file; a record of only one file has no ratio."""
    before = {record["name"]: record["milliseconds"] for record in old if record.get("milliseconds")}
    lines = []
    for record in results:
        now, then = record.get("milliseconds"), before.pop(record["name"], None)
        both = now is not None and then is not None
        lines.append((record["name"], _figure(then), _figure(now), f"{now / then:.3f}" if both else ""))
    lines += [(name, _figure(then), "", "") for name, then in before.items()]
    ratios = [float(line[3]) for line in lines if line[3]]
    if ratios:
        lines.append((f"geometric mean of {len(ratios)}", "", "", f"{statistics.geometric_mean(ratios):.3f}"))
    return report.Table(("row", "before ms", "now ms", "now / before"), lines, left=1)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.3f}"
