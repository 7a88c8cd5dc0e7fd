"""Everything that needs a GPU or TPU, part by part in less than ten minutes: one JSON file and one page.

Each part is a command of its own with a time limit. A part that fails does not stop the others, and a second run
repeats only what failed, what was cut off, or what other code measured. This process leaves the device to the parts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks import measure, peers, report
from benchmarks.shapes import parameter_count, shape
from evals.report import Table
from kvjax._src.checks import check_names
from models import commands, files, fingerprints
from models.commands import provenance
from models.commands.shared_flags import count
from models.folders import SHIPPED
from models.published import PUBLISHED

NAME = "accelerator"
MODELS = (*PUBLISHED, *SHIPPED)
SHAPES = ("llama-3.1-8b", "llama-3.2-3b", "llama-3.2-1b")  # the first one that fits is measured
MOSAIC = "tests/kernels_pallas/test_cache_attention_mosaic.py"  # a process of its own: an error may end a context
PLATFORMS = {"gpu": "cuda,cpu", "tpu": "tpu,cpu", "cpu": "cpu"}  # JAX's names of them
MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
CUBLAS = "--xla_gpu_enable_triton_gemm=false"  # cuBLAS then reads a layer's weights in place
LINES = 40  # of a part's output that are kept
OFTEN = 15  # seconds between two lines on a part's progress where the output is no terminal
PROBE = "import json; from benchmarks.accelerator import machine; print(json.dumps(machine()))"
LEGEND = """seconds: of the part's whole process, with imports and compilation. A part that was cut off has the rows
that it had measured until then."""
Record = dict[str, Any]


class Part(NamedTuple):
    """A command with its time limit; one that measures writes its figures to ``NAME.json`` in the folder of results."""

    name: str
    seconds: int
    words: list[str]
    where: Path | None = None  # the folder that it runs in; None is that of the results
    variables: Mapping[str, str] = MappingProxyType({})

    @property
    def command(self) -> str:
        """Return the command line, without the path of the interpreter."""
        return shlex.join(["python" if word == sys.executable else word for word in self.words])


def machine() -> dict[str, Any]:
    """Return the platform, its memory in bytes, and :func:`models.commands.provenance.environment`."""
    import jax

    return {"platform": jax.default_backend(), "memory": measure.free_bytes(), **provenance.environment()}


def probe() -> dict[str, Any]:
    """Return what :func:`machine` says in a process of its own, as a TPU, or a GPU's memory, belongs to one process."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=report.DOCS.parent, env=os.environ | MEMORY, capture_output=True, text=True
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ValueError(f"JAX cannot start here ({reason}); mend its installation (docs/install.md), then try again.")
    return {**json.loads(done.stdout.splitlines()[-1]), "said": done.stderr.strip()}


def _largest_shape(memory: float, copies: int = 1) -> str:
    """Return the first shape whose weights in bfloat16, times ``copies``, leave 4 GiB free; else the last."""
    fits = (name for name in SHAPES if 2 * copies * parameter_count(shape(name)) + 2**32 <= memory)
    return next(fits, SHAPES[-1])


def parts(here: dict[str, Any], flags: argparse.Namespace) -> list[Part]:
    """Return the parts for a machine (:func:`machine`), the most important first."""
    platform, tiny = here["platform"], ["--tiny"] if flags.tiny else []
    one = "tiny" if flags.tiny else _largest_shape(here["memory"])

    def tests(name: str, seconds: int, *words: str) -> Part:
        pytest = ["-m", "pytest", "-q", "--maxfail", "5", "-m", "accelerator", "-p", "no:cacheprovider", *words]
        return Part(name, seconds, [sys.executable, *pytest], where=report.DOCS.parent)

    def bench(name: str, seconds: int, benchmark: str, *words: str, **variables: str) -> Part:
        words = (sys.executable, "-m", "benchmarks", benchmark, *words, "--json", f"{name}.json")
        return Part(name, seconds, list(words), variables=variables)

    def kernels(name: str, seconds: int, operations: str, *words: str) -> Part:
        # A CPU emulates the kernels: slowly, and in order to try this part.
        emulated = ["--implementations", "reference,pallas_gpu", "--interpret"] if platform == "cpu" else []
        words = ("--shapes", one, "--operations", operations, *words, *emulated, *tiny)
        return bench(name, seconds, "kernels", *words)

    steps = ["--shapes", one, "--budgets", "8192", "--prompts", "8192,1048576", *tiny]
    found = [
        tests("tests", 100, "tests/kernels_pallas", "--ignore", MOSAIC),
        bench("decode", 90, "decode", *steps, "--full", "8192,131072"),
        bench("prefill", 100, "prefill", *steps, "--full", "131072", "--feed", "131072"),
    ]
    if platform == "gpu":
        xla = f"{os.environ.get('XLA_FLAGS', '')} {CUBLAS}".strip()
        found.append(bench("decode-cublas", 60, "decode", *steps, "--full", "8192", XLA_FLAGS=xla))
    python = flags.environment or os.environ.get(peers.KVPRESS.variable)
    if platform != "tpu" and not python and (torch := with_torch()):
        found.append(Part("kvpress", 90, ["bash", "-c", _environment_beside(*torch)]))
        python = "peers/bin/python"
    if platform != "tpu" and python:
        size = ["--prompt", "8192", "--budget", "2048", "--dtype", "bfloat16", "--threads", "8", "--repetitions", "3"]
        few = ["--prompt", "200", "--budget", "80", "--new-tokens", "4", "--threads", "1", "--repetitions", "1"]
        each = "tiny" if tiny else _largest_shape(here["memory"], copies=3)
        side = ["--environment", python, "--device", platform, "--shape", each, *(few if tiny else size)]
        # The parent only writes the checkpoint, and leaves the device's memory to the sides.
        found.append(bench("peers", 150, "peers", *side, JAX_PLATFORMS="cpu"))
    if flags.model:
        size = ["--lengths", "4096", "--samples", "5"]
        few = ["--lengths", "512", "--samples", "1", "--tasks", "niah_single_1"]
        policies = ["--policies", "full,snapkv,snapkv+caote", "--budgets", "0.25", "--when", "prompt"]
        words = [sys.executable, "-m", "evals", "ruler", "--model", flags.model, *policies, *(few if tiny else size)]
        samples = f"ruler-{code()[:8]}"  # answers of other code are not continued
        found.append(Part("ruler", 150, [*words, "--out", samples, "--json", "ruler.json"]))
    found += [
        kernels("kernels", 90, "caote_topk,keep_topk,cache_attention,paged_attention", "--batches", "8"),
        kernels("kernels-select", 60, "select_attention,mse_logits", "--batches", "1"),
    ]
    if platform != "tpu":
        found.append(tests("tests-mosaic", 60, MOSAIC))
    if platform == "gpu":
        by = ["--implementations", "reference,pallas_gpu,pallas_mosaic_gpu"]
        found.append(kernels("kernels-mosaic", 60, "cache_attention", "--batches", "8", *by))
    if flags.tiny:  # a CPU is slow, and has no price by the minute
        return [part._replace(seconds=flags.seconds) for part in found]
    return found


def with_torch() -> tuple[str, str] | None:
    """Return ``python3`` of the path and the folder that it has PyTorch in, None if it has none."""
    python = shutil.which("python3")
    if python is None:
        return None
    look = "import importlib.util, os; print(os.path.dirname(importlib.util.find_spec('torch').origin))"
    found = subprocess.run([python, "-c", look], capture_output=True, text=True)
    return None if found.returncode else (python, str(Path(found.stdout.strip()).parent))


def _environment_beside(python: str, packages: str) -> str:
    """Return the shell command that installs kvpress into the folder ``peers``, and reads PyTorch where it is."""
    here = f"echo {shlex.quote(packages)} >$(echo peers/lib/python*/site-packages)/torch.pth"
    return f"{shlex.quote(python)} -m venv peers && {here} && peers/bin/pip install -q {peers.KVPRESS.packages}"


def code() -> str:
    """Return a digest of the code that the parts run, which may differ from its last commit."""
    root = report.DOCS.parent
    folders = [name for name in provenance.CODE if not name.startswith(":")]
    paths = sorted(path for name in [*folders, "tests/kernels_pallas"] for path in (root / name).rglob("*.py"))
    return fingerprints.digest({str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths})


def run(part: Part, folder: Path, here: dict[str, Any], seconds: float) -> Record:
    """Run a part, and return its record: result, seconds, the last lines of its output, and its figures if it has any.

    The output goes to ``NAME.log``. At the end, all processes that it started are ended.
    """
    root, figures = report.DOCS.parent, folder / f"{part.name}.json"
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "JAX_PLATFORMS": PLATFORMS[here["platform"]],
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),  # a part that is run again compiles little
        **MEMORY,
        **part.variables,
    }
    figures.unlink(missing_ok=True)
    began, log = time.monotonic(), folder / f"{part.name}.log"
    with log.open("wb") as output, contextlib.ExitStack() as stack:
        child = subprocess.Popen(
            part.words, cwd=part.where or folder, env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        stack.callback(_end, child)
        with _progress(part.name, seconds, log) as tell:
            while child.poll() is None and time.monotonic() - began < seconds:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(0.2)
                tell(time.monotonic() - began)
        status = child.poll()
    # A part that leaves the device to its own processes was measured there, too.
    document = json.loads(figures.read_text()) | {"device": here["device"]} if figures.exists() else None
    return {
        "result": "done" if status == 0 else "cut off" if status is None else f"failed with exit code {status}",
        "seconds": round(time.monotonic() - began, 1),
        "output": _last_lines(log),
        "document": document,
    }


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started: as Ctrl-C does, and after five seconds by force."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(5)


@contextlib.contextmanager
def _progress(name: str, limit: float, log: Path) -> Iterator[Callable[[float], None]]:
    """Yield a function that shows a part's seconds and its last line: on a terminal at once, else now and then."""
    terminal, shown = sys.stderr.isatty(), [0.0]

    def tell(seconds: float) -> None:
        if seconds - shown[0] < (1 if terminal else OFTEN):
            return
        shown[0] = seconds
        line = (_last_lines(log, bars=True) or [""])[-1]
        text = f"{name}: {seconds:.0f} s of at most {limit:.0f}: {line}"
        width = shutil.get_terminal_size().columns - 1
        line, end = (f"\r{text[:width]:{width}}", "") if terminal else (f"    {text}", "\n")
        print(line, end=end, file=sys.stderr, flush=True)

    yield tell
    if terminal:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _last_lines(log: Path, *, bars: bool = False) -> list[str]:
    """Return the last lines of a file, without progress bars unless they are asked for."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 2**16))
        lines = file.read().decode(errors="replace").replace("\r", "\n").splitlines()
    return [line for line in lines if line.strip() and (bars or "%|" not in line)][-LINES:]


def table(results: Sequence[Record]) -> Table:
    """Return a table of the parts: what became of them, and how long they took."""
    lines = [(r["part"], r["result"], f"{r['seconds']:.0f}") for r in results]
    return Table(("part", "result", "seconds"), lines, left=2)


def page(document: Record) -> str:
    """Return the page: the parts, the targets, then the tables of each part, or the end of its output."""
    results = document["results"]
    text = f"# {document['device']}\n\n"
    text += f"Made by `{document['command']}`, commit {document['commit']}, jax {document['versions']['jax']}.\n"
    text += f"\n{table(results).markdown()}\n\n{LEGEND}\n"
    found = report.parts_of(document)
    on = ["cpu" if document["device"] == "cpu" else "gpu"]
    text += f"\n## Targets\n\n{report.targets(found, on).markdown()}\n" if found else ""
    measured = {part["file"]: report.section(part) for part in found}
    for record in results:
        told = "\n".join(record["output"])
        shown = measured.get(record["part"], f"## {record['part']}\n\n`{record['command']}`\n")
        if record["part"] not in measured or record["result"] != "done":
            shown += f"\n{record['result']}:\n\n```text\n{told}\n```\n"
        text += f"\n{shown}"
    return text


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("--model", help=f"a model to run RULER on: a folder, {', '.join(MODELS)} (default: no RULER)")
    flags.add_argument(
        peers.KVPRESS.flag, metavar="PYTHON",
        help=f"an interpreter that has kvpress (or {peers.KVPRESS.variable}); by default one is made where python3 has "
        "PyTorch",
    )  # fmt: skip
    flags.add_argument("--parts", help="only these; several by comma (default: all)")
    flags.add_argument("--seconds", type=count, default=560, help="time for all parts")
    flags.add_argument("--tiny", action="store_true", help="smallest shapes, to try all parts, on a CPU too")
    flags.add_argument("--out", type=Path, default=Path("runs/accelerator"), help="the folder")


def command(flags: argparse.Namespace) -> None:
    """Run the parts, and after each write the JSON file and the page."""
    if flags.model and Path(flags.model).exists():
        flags.model = str(Path(flags.model).resolve())
    elif flags.model not in (None, *MODELS):  # said now, and not after the parts before RULER
        raise ValueError(f"--model is {flags.model!r}; expected a model's folder, or {', '.join(MODELS)}.")
    if flags.environment and os.sep in flags.environment:
        flags.environment = str(Path(flags.environment).absolute())  # a link stays one: it names the environment
    here = probe()
    if here["platform"] == "cpu" and not flags.tiny:
        said = f" ({here['said'].splitlines()[-1]})" if here["said"] else ""
        raise ValueError(f"JAX sees no GPU and no TPU here{said}; give --tiny to try all parts on the CPU.")
    found = parts(here, flags)
    wanted = chosen(found, flags.parts)
    flags.out.mkdir(parents=True, exist_ok=True)
    folder = flags.out.resolve()
    with (folder / files.LOCK_FILE).open("ab") as held:
        files.lock(held, folder)
        same = [code(), here["device"], here["versions"]]
        keys = {part.name: fingerprints.digest([part.command, *same]) for part in found}
        failed = _run_all(wanted, keys, folder, here, flags)
    if failed:
        raise ValueError(f"not all parts are done ({'; '.join(failed)}); the same command runs these again.")


def chosen(found: list[Part], names: str | None) -> list[Part]:
    """Return the parts that a flag names, or all."""
    if names is None:
        return found
    asked = commands.listed("part", names, "--parts decode")
    check_names("part", asked, [part.name for part in found])
    return [part for part in found if part.name in asked]


def _run_all(
    wanted: Sequence[Part], keys: dict[str, str], folder: Path, here: dict[str, Any], flags: argparse.Namespace
) -> list[str]:
    """Run the parts, and return those that did not end well.

    ``keys`` has for all parts a digest of what their figures depend on; records with another one are dropped.
    """
    path = folder / f"{NAME}.json"
    facts = {name: here[name] for name in ("device", "cores", "versions", "commit")}
    ends = time.monotonic() + flags.seconds
    before = {name: record for name, record in _records(path).items() if record.get("key") == keys.get(name)}
    records: dict[str, Record] = {}

    def write() -> None:
        kept = before | records
        document = {
            "command": flags.invocation.command, **facts, "benchmark": NAME, "settings": {"memory": here["memory"]},
            "results": [kept[name] for name in keys if name in kept],
        }  # fmt: skip
        files.write_json(path, document)
        with files.replacing(path.with_suffix(".md")) as temporary:
            temporary.write_text(page(document), encoding="utf-8")

    print(f"{here['device']}, {here['memory'] / 2**30:.0f} GiB free, jax {here['versions']['jax']}", flush=True)
    for number, part in enumerate(wanted, 1):
        head = f"[{number}/{len(wanted)}] {part.name}"
        if before.get(part.name, {}).get("result") == "done":
            records[part.name] = before[part.name]
            print(f"{head}: done before, in {before[part.name]['seconds']:.0f} s", flush=True)
            continue
        left = ends - time.monotonic()
        record: Record = {"part": part.name, "command": part.command, "key": keys[part.name]}
        record |= {"result": "not run: no time was left", "seconds": 0.0, "output": [], "document": None}
        if left > 0:
            print(f"{head}: {part.command}", flush=True)
            records[part.name] = record | {"result": "interrupted"}  # what is read if this process ends here
            write()
            try:
                record |= run(part, folder, here, min(part.seconds, left))
            except KeyboardInterrupt:
                print(f"{head}: interrupted; the same command goes on with this part", flush=True)
                raise
        records[part.name] = record
        write()
        print("\n".join([*record["output"], f"{head}: {record['result']}, {record['seconds']:.0f} s", ""]), flush=True)
    write()  # where all was done before, too: parts that there are no more leave the file
    print(f"{table(list(records.values()))}\nfigures: {path}\npage: {path.with_suffix('.md')}", flush=True)
    return [f"{name}: {record['result']}" for name, record in records.items() if record["result"] != "done"]


def _records(path: Path) -> dict[str, Record]:
    """Return the records of an earlier run by part; none if there is no file that holds some."""
    try:
        return {record["part"]: record for record in json.loads(path.read_text())["results"]}
    except (OSError, json.JSONDecodeError, KeyError, TypeError):
        return {}
