"""The same checkpoint and prompt through kvpress with transformers and through us: prefill, decode, peak memory.

Each side runs in its own process with equally many threads, and they take turns. kvpress evicts once, after the whole
prompt, and decodes without eviction. "ours, once" does the same work. "ours, by block" is our default: the cache stays
inside the budget, and each new token evicts one. At the budget "full" nothing is evicted: transformers alone, ours, and
llama.cpp if there is one, with the same float32 weights and with those of its file.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kvjax
import models
from benchmarks import measure, steps
from benchmarks.peer_timing import keep_to, peak_resident, serve, timing
from benchmarks.shapes import parameter_count, shape
from evals import command_line, evaluator, report, tasks
from models import commands, files, fingerprints, published
from models.commands.shared_flags import at_least, count
from models.loading import describe

ROOT = Path(__file__).resolve().parent.parent
WINDOW = 64  # SnapKV's window, kvpress' default
OURS: dict[str, dict[str, Any]] = {
    "ours, once": {"when": "prompt", "evict_every": 0},
    "ours, by block": {"when": "block", "evict_every": 1},
}
PEER, FULL_PEER, FULL_OURS = "kvpress", "transformers", "ours"
LEGEND = """ms: median; spread: the middle half of the repetitions; tokens/s: from the median. cpu: the process' share
of all cores, which other processes do not change. held: tokens per KV head after the prompt. ratio: the time of
kvpress (for the full cache: of transformers alone) over this side's, so more than 1 is faster. peak: the most memory
that the process held, with interpreter, libraries and weights (on a GPU: what was allocated there). same: how many of
its first tokens this side has too. keys_values is not among the peers: the package index has none of that name."""


class Environment(NamedTuple):
    """Another interpreter, with packages that ours does not have."""

    package: str  # what it must import
    flag: str  # of the command, that names it
    variable: str  # of the environment, that names it
    packages: str  # what pip installs into it


KVPRESS = Environment("kvpress", "--environment", "KVJAX_PEERS", "torch transformers==5.2.0 kvpress==0.5.5")
LLAMA_CPP = Environment("llama_cpp", "--llama-cpp", "KVJAX_LLAMA_CPP", "llama-cpp-python")


def checked_environment(python: str | None, wanted: Environment = KVPRESS) -> str:
    """Find the interpreter that has the package of a side, or say how to make one (ValueError)."""
    how = (
        f"make one with `python3.11 -m venv peers && peers/bin/pip install {wanted.packages}` and name it with "
        f"{wanted.flag} peers/bin/python or {wanted.variable}=peers/bin/python."
    )
    python = python or os.environ.get(wanted.variable)
    if not python:
        raise ValueError(f"no environment with {wanted.package} was named; {how}")
    if os.sep in python:
        python = str(Path(python).absolute())  # each side starts in the checkout; a link names its environment
    try:
        found = subprocess.run([python, "-c", f"import {wanted.package}"], capture_output=True, text=True, timeout=300)
    except OSError as error:
        raise ValueError(f"{python} cannot be run ({error.strerror}); {how}") from None
    if found.returncode:
        reason = (found.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ValueError(f"{python} cannot import {wanted.package} ({reason}); {how}")
    return python


def sides(given: Mapping[str, Any], kvpress: str, llama_cpp: str | None) -> dict[str, list[str]]:
    """Return the command to start for each side; the first side is the one that the others are compared with.

    ``given`` are the arguments of all sides; a budget of None is the full cache. The others are interpreters.
    """
    full = given["budget"] is None
    started = {FULL_PEER if full else PEER: [kvpress, "-m", "benchmarks.peer_kvpress", json.dumps(given)]}
    for name, options in ({FULL_OURS: {}} if full else OURS).items():
        started[name] = [sys.executable, "-m", "benchmarks.peers", json.dumps({**given, **options})]
    if full and llama_cpp is not None:
        for name, wide in (("llama.cpp", str(Path(given["folder"]) / "wide.gguf")), ("llama.cpp, as stored", None)):
            started[name] = [llama_cpp, "-m", "benchmarks.peer_llama_cpp", json.dumps({**given, "wide": wide})]
    return started


@contextlib.contextmanager
def _started(arguments: Sequence[str], given: Mapping[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """Start a process that answers each line that it reads with a line of JSON, and end it."""
    variables = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(given["threads"]))
    variables["JAX_PLATFORMS"] = "cuda" if given["device"] == "gpu" else "cpu"
    variables["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | variables,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def answers(given: Mapping[str, Any], kvpress: str, llama_cpp: str | None, repetitions: int) -> dict[str, Any]:
    """Run all sides in turns, and return each side's versions and its answers of all repetitions."""

    def read(name: str) -> dict[str, Any]:
        line = workers[name].stdout.readline()
        if not line:
            raise ValueError(f"{name} ended without an answer; see its output above.")
        return json.loads(line)

    with contextlib.ExitStack() as stack:
        commanded = sides(given, kvpress, llama_cpp)
        workers: dict[str, Any] = {name: stack.enter_context(_started(x, given)) for name, x in commanded.items()}
        found: dict[str, Any] = {name: {**read(name), "runs": []} for name in workers}
        for turn in commands.progress_bar("turn", over=range(repetitions + 1)):
            for name, worker in workers.items():
                print("run", file=worker.stdin, flush=True)
                answer = read(name)
                if turn:  # the first turn compiles
                    found[name]["runs"].append(answer)
    return found


def summary(found: Mapping[str, Any], prompt: int) -> list[dict[str, Any]]:
    """Return one record per side: median and quartiles of its times, and its figures compared with the first side's."""
    records: list[dict[str, Any]] = []
    expected = next(iter(found.values()))["runs"][0]["tokens"]
    for name, side in found.items():
        runs = side["runs"]
        record: dict[str, Any] = {"side": name, "versions": side["versions"], "repetitions": len(runs)}
        for what, tokens in (("prefill", prompt), ("decode", 1)):
            taken = [1e3 * run[f"{what}_seconds"] for run in runs]
            low, high = (float(x) for x in np.quantile(taken, [0.25, 0.75]))
            work = statistics.median(1e3 * run[f"{what}_work"] for run in runs)
            middle = statistics.median(taken)
            record[what] = {"milliseconds": middle, "lowest": min(taken), "low": low, "high": high}
            record[what] |= {"work_milliseconds": work, "all": taken, "tokens_a_second": 1e3 * tokens / middle}
            record[f"{what}_ratio"] = records[0][what]["milliseconds"] / middle if records else None
        differ = [i for i, (a, b) in enumerate(zip(runs[0]["tokens"], expected, strict=True)) if a != b]
        record |= {"peak_bytes": max(run["peak_bytes"] for run in runs), "held": runs[0]["held"]}
        record |= {"same_tokens": differ[0] if differ else len(expected), "tokens": len(expected)}
        records.append(record)
    return records


def table(records: Sequence[Mapping[str, Any]], what: str) -> report.Table:
    """Return a table of "prefill" or "decode", with one line per side, budget and number of threads."""
    speed = lambda r: r[what].get("tokens_a_second")  # noqa: E731  older results do not have it
    last: tuple[str, report.Cell] = ("same", "{same_tokens} of {tokens}")
    if what == "prefill":
        last = ("peak MiB", lambda r: f"{r['peak_bytes'] / 2**20:,.0f}")
    cells: list[tuple[str, report.Cell]] = [
        ("side", "{side}"),
        ("held", "{held:,}"),
        ("threads", "{threads}"),
        ("ms", f"{{{what}[milliseconds]:,.1f}}"),
        ("spread", f"{{{what}[low]:,.1f}}..{{{what}[high]:,.1f}}"),
        ("tokens/s", lambda r: "" if speed(r) is None else f"{speed(r):,.1f}"),
        ("cpu", f"{{{what}[work_milliseconds]:,.1f}}"),
        ("ratio", lambda r: "" if r[f"{what}_ratio"] is None else f"{r[f'{what}_ratio']:.2f}"),
        last,
    ]
    return report.table(records, cells, left=1)


def heading(settings: Mapping[str, Any]) -> str:
    """Return the heading of a results file in the report."""
    what = settings.get("model") or f"random weights ({settings['shape']})"
    return f"Beside other libraries: {what}, a prompt of {settings['prompt']:,} tokens"


def tables(records: Sequence[Mapping[str, Any]]) -> dict[str, tuple[report.Table, str]]:
    """Return the tables of the prompt and of a new token by title, with their legend after the last."""
    return {"A prompt": (table(records, "prefill"), ""), "A new token": (table(records, "decode"), LEGEND)}


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    for wanted in (KVPRESS, LLAMA_CPP):
        flags.add_argument(
            wanted.flag, metavar="PYTHON", help=f"an interpreter that has {wanted.package} (or {wanted.variable})"
        )
    flags.add_argument("--shape", help="random weights of this shape (default: small)")
    flags.add_argument("--model", help="a model in place of --shape, such as smollm2, on a text")
    flags.add_argument("--prompt", type=count, default=2_048, help="tokens of the prompt")
    flags.add_argument(
        "--budgets",
        "--budget",
        help="slots per head, or full; several by comma (default: 512; with --model: 256,512,full)",
    )
    flags.add_argument("--new-tokens", type=at_least(2), default=33)
    flags.add_argument("--block", type=at_least(WINDOW), default=128, help="prompt tokens per step of our prefill")
    flags.add_argument("--threads", default="1,2", help="threads per side; several by comma, one after the other")
    flags.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    flags.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    flags.add_argument("--repetitions", type=count, default=7)
    measure.add_json_flag(flags, "peers")


def command(flags: argparse.Namespace) -> None:
    """Make the checkpoint, measure, print the table, write JSON."""
    files.check_outputs([flags.json])
    threads = measure.whole_numbers("--threads", flags.threads)
    budgets = _budgets(flags.budgets or ("256,512,full" if flags.model else "512"))
    _check_longer(flags.prompt, budgets)
    if flags.model and flags.shape:
        raise ValueError(f"both --model {flags.model} and --shape {flags.shape} were given; keep one of them.")
    kvpress, llama_cpp, gguf = checked_environment(flags.environment), None, None
    if flags.llama_cpp or (os.environ.get(LLAMA_CPP.variable) and flags.model):
        llama_cpp, gguf = checked_environment(flags.llama_cpp, LLAMA_CPP), _gguf(flags)
    with tempfile.TemporaryDirectory() as folder:
        parameters, prompt, digests = _inputs(flags, folder, processes=3 if llama_cpp is None else 4)
        _check_longer(len(prompt), budgets)
        shared = {"window": WINDOW}
        shared |= {name: getattr(flags, name) for name in ("block", "new_tokens", "device", "dtype")}
        records = []
        for count, budget in itertools.product(threads, budgets):
            of_both = {"threads": count, "budget": budget}
            given = {"folder": folder, "gguf": gguf, "prompt": prompt, **shared, **of_both}
            found = answers(given, kvpress, llama_cpp, flags.repetitions)
            records += [{**of_both, **record} for record in summary(found, len(prompt))]
    measure.show(tables(records), None)
    settings = {
        **shared,
        "threads": threads,
        "budgets": budgets,
        "model": flags.model,
        "shape": None if flags.model else flags.shape or "small",
        "parameters": parameters,
        "prompt": len(prompt),
        "policy": "snapkv",
        "keys_values": "not on the package index",
        "load": os.getloadavg(),
    }
    measure.write(flags, "peers", settings, records, digests, done=True)


def _inputs(flags: argparse.Namespace, folder: str, processes: int) -> tuple[int, list[int], Mapping[str, str]]:
    """Write the checkpoint that all sides load; return its number of parameters, a prompt, and its fingerprints.

    Random weights get a random prompt, a real model gets a text.
    """
    config = describe(flags.model)[0] if flags.model else shape(flags.shape or "small")
    parameters = parameter_count(config)
    needed = processes * np.dtype(flags.dtype).itemsize * parameters
    measure.check_fits(needed, f"the checkpoint, in {processes} processes,", measure.free_bytes())
    if flags.model:
        model, tokenizer = command_line.load_with_tokenizer(flags.model)
        prompt = tasks.needle(0, tokenizer, flags.prompt).tokens
        digests = evaluator.digests(model, tokenizer)
    else:
        model = models.Decoder(config, steps.random_arrays(config, flags.dtype))
        prompt = np.random.default_rng(0).integers(0, config.vocab_size, flags.prompt).tolist()
        digests = fingerprints.fingerprints(model)
    models.save(folder, model)
    return parameters, prompt, digests


def _budgets(text: str) -> list[int | None]:
    """Parse the budgets, None for the full cache."""
    found: list[int | None] = []
    for part in commands.split_list(text):
        if part != "full" and not (part.isdecimal() and int(part) > WINDOW):
            raise ValueError(f"--budgets has {part}; give at least {WINDOW + 1} slots per head, or full.")
        found.append(None if part == "full" else int(part))
    return found


def _check_longer(prompt: int, budgets: Sequence[int | None]) -> None:
    largest = max((budget for budget in budgets if budget is not None), default=0)
    if prompt <= largest:
        raise ValueError(f"a prompt of {prompt} tokens fits the budget of {largest}; give a longer one.")


def _gguf(flags: argparse.Namespace) -> str:
    """Return the file that llama.cpp reads."""
    if not flags.model or flags.device != "cpu":
        raise ValueError("llama.cpp needs a real model on a CPU here; give --model smollm2, or leave --llama-cpp out.")
    path = published.find(flags.model) if flags.model in published.PUBLISHED else Path(flags.model)
    if path.suffix != ".gguf":
        raise ValueError(f"llama.cpp needs a GGUF file, which {flags.model} is not; leave --llama-cpp out.")
    return str(path.resolve())


def _work() -> None:
    """Run our side, as benchmarks/peer_kvpress.py runs kvpress'."""
    import jax

    given = json.loads(sys.argv[1])
    if given["device"] == "cpu":
        keep_to(given["threads"])  # XLA starts as many threads as its process may use cores
    model, _ = models.load(given["folder"], dtype=given["dtype"])
    prompt, steps = np.array([given["prompt"]], np.int32), given["new_tokens"] - 1
    options: dict[str, Any] = {"block": given["block"], "max_new_tokens": given["new_tokens"], "end": ()}
    if given["budget"] is not None:
        options |= {name: given[name] for name in ("budget", "when", "evict_every")}
        options["policy"] = f"snapkv(window={given['window']},kernel=5)"

    def run() -> dict[str, Any]:
        stream = models.stream(model, prompt, **options)
        last: list[Any] = [None]

        def token() -> int:
            tokens, last[0] = next(stream)
            return int(tokens[0])

        found = timing(token, lambda _: token(), steps)
        peak = measure.peak_bytes()
        held = int((np.asarray(last[0].position)[0, 0, 0] >= 0).sum())
        grown = 0 if given.get("evict_every") else steps
        return {**found, "held": held - grown, "peak_bytes": peak_resident() if peak is None else peak}

    serve(run, {"kvjax": kvjax.__version__, "jax": jax.__version__})


if __name__ == "__main__":
    _work()
