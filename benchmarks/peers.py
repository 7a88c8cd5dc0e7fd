"""The same checkpoint and prompt through kvpress with transformers and through us: prefill, decode, peak memory.

Each runs in a process of its own, with as many threads, and they take turns. kvpress evicts once, after the whole
prompt, and decodes without evicting; "ours, once" does the same work, and "ours, by block" is how we run by default:
inside the budget all along, one token out for each that comes in.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from tqdm import tqdm

import kvjax
import models
from benchmarks import measure
from benchmarks.peer_kvpress import keep_to, peak_resident
from benchmarks.shapes import parameter_count, shape
from evals import report
from models import commands, provenance

VARIABLE = "KVJAX_PEERS"
VERSIONS = "torch transformers==5.2.0 kvpress==0.5.5"
WINDOW = 64  # of SnapKV, kvpress' default
OURS: dict[str, dict[str, Any]] = {
    "ours, once": {"when": "prompt", "evict_every": 0},
    "ours, by block": {"when": "block", "evict_every": 1},
}
PEER = "kvpress"
LEGEND = """ms: median; spread: what half of the repetitions lie between. cpu: what the process had of all cores, which
other processes do not change. held: tokens of each KV head after the prompt. ratio: kvpress' time over ours, so more
than 1 is ours faster. peak: what the process held at most, interpreter, libraries and weights included (on a GPU what
was allocated there). same: how many of kvpress' first tokens are ours too. keys_values is not among the peers: the
package index has no package of that name."""


def checked_environment(python: str | None) -> str:
    """The interpreter that has kvpress.

    Raises:
        ValueError: none was named, or it lacks kvpress; the message says how to make one.
    """
    how = (
        f"make one with `python3.11 -m venv peers && peers/bin/pip install {VERSIONS}` and name it with "
        f"--environment peers/bin/python or {VARIABLE}=peers/bin/python."
    )
    python = python or os.environ.get(VARIABLE)
    if not python:
        raise ValueError(f"no environment with kvpress was named; {how}")
    try:
        found = subprocess.run([python, "-c", "import kvpress"], capture_output=True, text=True, timeout=300)
    except OSError as error:
        raise ValueError(f"{python} cannot be run ({error.strerror}); {how}") from None
    if found.returncode:
        reason = (found.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ValueError(f"{python} cannot import kvpress ({reason}); {how}")
    return python


class Worker:
    """A process that answers each line with a line of JSON."""

    def __init__(self, name: str, arguments: Sequence[str], threads: int, device: str):
        self.name = name
        count = str(threads)
        variables = {
            "OMP_NUM_THREADS": count,
            "MKL_NUM_THREADS": count,
            "JAX_PLATFORMS": "cuda" if device == "gpu" else "cpu",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | variables,
        )  # fmt: skip

    def read(self) -> dict[str, Any]:
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise ValueError(f"{self.name} ended without an answer; its last words are above.")
        return json.loads(line)

    def ask(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        print("run", file=self.process.stdin, flush=True)
        return self.read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def measured(given: Mapping[str, Any], python: str, repetitions: int) -> dict[str, Any]:
    """All runs: for each side its versions and, of every repetition, what it answered."""
    here = Path(__file__).resolve()
    sides = {PEER: [python, str(here.with_name("peer_kvpress.py")), json.dumps(given)]}
    for name, options in OURS.items():
        sides[name] = [sys.executable, "-m", "benchmarks.peers", json.dumps({**given, **options})]
    with contextlib.ExitStack() as stack:
        workers = {}
        for name, arguments in sides.items():
            workers[name] = Worker(name, arguments, given["threads"], given["device"])
            stack.callback(workers[name].close)
        found: dict[str, Any] = {name: {**worker.read(), "runs": []} for name, worker in workers.items()}
        for turn in tqdm(range(repetitions + 1), unit="turn", file=sys.stderr, dynamic_ncols=True):
            for name, worker in workers.items():
                answer = worker.ask()
                if turn:  # the first compiles
                    found[name]["runs"].append(answer)
    return found


def summarised(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each side: median and quartiles of its times, and its figures against the peer's."""
    rows: list[dict[str, Any]] = []
    for name, side in found.items():
        runs = side["runs"]
        row: dict[str, Any] = {"side": name, "versions": side["versions"], "repetitions": len(runs)}
        for what in ("prefill", "decode"):
            taken = [1e3 * run[f"{what}_seconds"] for run in runs]
            low, high = (float(x) for x in np.quantile(taken, [0.25, 0.75]))
            work = statistics.median(1e3 * run[f"{what}_work"] for run in runs)
            row[what] = {"milliseconds": statistics.median(taken), "lowest": min(taken), "low": low, "high": high}
            row[what] |= {"work_milliseconds": work, "all": taken}
            row[f"{what}_ratio"] = None if not rows else rows[0][what]["milliseconds"] / row[what]["milliseconds"]
        expected = found[PEER]["runs"][0]["tokens"]
        differ = [i for i, (a, b) in enumerate(zip(runs[0]["tokens"], expected, strict=True)) if a != b]
        row |= {"peak_bytes": max(run["peak_bytes"] for run in runs), "held": runs[0]["held"]}
        row |= {"same_tokens": differ[0] if differ else len(expected), "tokens": len(expected)}
        rows.append(row)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row for each side under each number of threads."""
    head = (
        "side", "threads", "prefill ms", "spread", "lowest", "cpu", "ratio", "decode ms", "spread", "lowest", "cpu",
        "ratio", "peak MiB", "held", "same",
    )  # fmt: skip
    lines = []
    for row in rows:
        cells = [str(row["side"]), str(row["threads"])]
        for what in ("prefill", "decode"):
            times, ratio = row[what], row[f"{what}_ratio"]
            cells += [f"{times['milliseconds']:,.1f}", f"{times['low']:,.1f}..{times['high']:,.1f}"]
            cells += [f"{times['lowest']:,.1f}", f"{times['work_milliseconds']:,.1f}"]
            cells.append("" if ratio is None else f"{ratio:.2f}")
        cells += [f"{row['peak_bytes'] / 2**20:,.0f}", str(row["held"]), f"{row['same_tokens']} of {row['tokens']}"]
        lines.append(tuple(cells))
    return report.columns(head, lines, left=1)


def add_flags(flags: argparse.ArgumentParser) -> None:
    """The command's flags."""
    flags.add_argument("--environment", metavar="PYTHON", help=f"an interpreter that has kvpress (or {VARIABLE})")
    flags.add_argument("--shape", default="small")
    flags.add_argument("--prompt", type=int, default=2_048)
    flags.add_argument("--budget", type=int, default=512)
    flags.add_argument("--new-tokens", type=int, default=33)
    flags.add_argument("--block", type=int, default=128, help="of our prefill")
    flags.add_argument("--threads", default="1,2", help="how many threads each side has, one after the other")
    flags.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    flags.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    flags.add_argument("--repetitions", type=int, default=7)
    measure.add_json_flag(flags, "peers")


def command(flags: argparse.Namespace) -> None:
    """Makes the checkpoint, measures, prints the table, writes JSON."""
    commands.check_outputs([flags.json])
    threads = measure.whole_numbers("--threads", flags.threads)
    for name, low in (("block", WINDOW), ("repetitions", 1), ("new_tokens", 2), ("budget", WINDOW + 1)):
        if getattr(flags, name) < low:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(flags, name)}; give at least {low}.")
    if flags.prompt <= flags.budget:
        raise ValueError(f"a prompt of {flags.prompt} tokens fits the budget of {flags.budget}; give a longer one.")
    config = shape(flags.shape)
    python = checked_environment(flags.environment)
    measure.check_fits(3 * 4 * parameter_count(config), "the checkpoint, in three processes,", measure.free_bytes())
    with tempfile.TemporaryDirectory() as folder:
        model = models.Decoder(config, rngs=nnx.Rngs(0))
        models.save(folder, model)
        made_of = provenance.fingerprints(model)
        del model
        given = {
            "folder": folder,
            "prompt": np.random.default_rng(0).integers(0, config.vocab_size, flags.prompt).tolist(),
            "window": WINDOW,
            **{name: getattr(flags, name) for name in ("budget", "block", "new_tokens", "device", "dtype")},
        }
        rows = []
        for count in threads:
            found = measured({**given, "threads": count}, python, flags.repetitions)
            rows += [{"threads": count, **row} for row in summarised(found)]
    print(table(rows))
    print(LEGEND)
    settings = {key: value for key, value in given.items() if key not in ("folder", "prompt")}
    settings |= {
        "threads": threads,
        "shape": flags.shape,
        "parameters": parameter_count(config),
        "prompt": flags.prompt,
    }
    settings |= {"policy": "snapkv", "keys_values": "not on the package index"}
    settings["load"] = os.getloadavg() if hasattr(os, "getloadavg") else None
    measure.write(flags, "peers", settings, rows, made_of)
    if flags.json is not None:
        print(f"figures: {flags.json}")


def _work() -> None:
    """Our side, as benchmarks/peer_kvpress.py is kvpress'."""
    import jax

    given = json.loads(sys.argv[1])
    if given["device"] == "cpu":
        keep_to(given["threads"])  # XLA has as many threads as its process may use cores
    model, _ = models.load(given["folder"], dtype=given["dtype"])
    prompt = np.array([given["prompt"]], np.int32)
    options: dict[str, Any] = {name: given[name] for name in ("budget", "block", "when", "evict_every")}
    options |= {"policy": f"snapkv(window={given['window']})", "max_new_tokens": given["new_tokens"], "end": ()}

    def run() -> dict[str, Any]:
        times, tokens, held, steps = [(time.perf_counter(), time.process_time())], [], 0, given["new_tokens"] - 1
        for token, cache in models.stream(model, prompt, **options):
            tokens.append(int(token[0]))
            if len(tokens) in (1, steps + 1):
                times.append((time.perf_counter(), time.process_time()))
            if len(tokens) == steps + 1:
                held = int((np.asarray(cache.position)[0, 0, 0] >= 0).sum())
        (started, worked), (prefilled, prefill_work), (decoded, decode_work) = times
        peak = measure.peak_bytes()
        return {
            "prefill_seconds": prefilled - started,
            "prefill_work": prefill_work - worked,
            "decode_seconds": (decoded - prefilled) / steps,
            "decode_work": (decode_work - prefill_work) / steps,
            "tokens": tokens,
            "held": held if given["evict_every"] else held - steps,
            "peak_bytes": peak_resident() if peak is None else peak,
        }

    versions = {"kvjax": kvjax.__version__, "jax": jax.__version__}
    print(json.dumps({"versions": versions, "python": sys.version.split()[0]}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(run()), flush=True)


if __name__ == "__main__":
    _work()
