"""Times every side of `python -m benchmarks peers` alike, by the standard library alone."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO


def timed(begin: Callable[[], int], step: Callable[[int], int], steps: int) -> dict[str, Any]:
    """Times a prompt up to its first new token, and the mean of the steps behind it, by the clock and the processor.

    Args:
        begin: reads the prompt; gives the first token.
        step: reads a token; gives the next.
        steps: how many tokens follow the first.

    Returns:
        The four times in seconds, and the tokens.

    Example:
        >>> from benchmarks.peer_timing import timed
        >>> timed(lambda: 1, lambda token: 2 * token, steps=3)["tokens"]
        [1, 2, 4, 8]
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
    """Says which versions run, and answers each line that it reads with a run: lines of JSON.

    Args:
        answers: where to; standard output if None.
    """
    print(json.dumps({"versions": versions, "python": sys.version.split()[0]}), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(run()), file=answers, flush=True)


def keep_to(cores: int) -> None:
    """Runs this process on so many cores at most, where the system can; libraries start as many threads."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


def peak_resident() -> int:
    """Counts the bytes that this process has held at most: weights, cache, interpreter and libraries."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux carries ru_maxrss over from the process that started this one
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
