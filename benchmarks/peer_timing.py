"""The timing that all sides of `python -m benchmarks peers` share, with the standard library only."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO


def timing(begin: Callable[[], int], step: Callable[[int], int], steps: int) -> dict[str, Any]:
    """Time a prompt up to its first new token, and the mean of the steps after it, by the clock and the processor.

    ``begin`` reads the prompt and returns the first token, ``step`` reads a token and returns the next.
    """
    started, worked = time.perf_counter(), time.process_time()
    tokens = [begin()]
    prefilled, prefill_work = time.perf_counter(), time.process_time()
    for _ in range(steps):
        tokens.append(step(tokens[-1]))
    decoded, decode_work = time.perf_counter(), time.process_time()
    return {
        "prefill_seconds": prefilled - started,
        "prefill_work": prefill_work - worked,
        "decode_seconds": (decoded - prefilled) / steps,
        "decode_work": (decode_work - prefill_work) / steps,
        "tokens": tokens,
    }


def serve(run: Callable[[], dict[str, Any]], versions: dict[str, str], answers: TextIO | None = None) -> None:
    """Write a line of JSON with the versions, and then one with the result of a run for each line that it reads."""
    print(json.dumps({"versions": versions, "python": sys.version.split()[0]}), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(run()), file=answers, flush=True)


def keep_to(cores: int) -> None:
    """Restrict this process to ``cores`` cores, if the system can; libraries then start as many threads."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


def peak_resident() -> int:
    """Return the most bytes that this process has held: weights, cache, interpreter and libraries."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux, ru_maxrss includes the peak of the process that started this one
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
