"""Decode steps and blocks compiled for an H100 that is not at hand: what a layer launches and moves, not timed.

XLA's compiler for GPUs is in JAX's plugin for CUDA (4.6 GB) and needs no GPU. A layer's share is the difference between
programs of more and of fewer layers. What XLA would time on a GPU, it leaves untuned.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

import kernels_pallas
from benchmarks import gpu_limits, kernels, launches, machine_code, measure, steps
from benchmarks.launches import Launch
from benchmarks.machine_code import Kernel, Mosaic
from benchmarks.shapes import shape
from benchmarks.targets import executable, gpu_chip
from evals import report
from kernels_pallas.checks import check_names
from kernels_pallas.dispatch import kernels_of
from kvjax.schedule import Phase
from models import commands, driver, files
from models.commands.shared_flags import count
from models.config import Config
from models.fingerprints import digest
from models.sampling import Draws, Sampling
from models.steps import decode_phase

PROGRAMS = ("decode", "block")
POLICIES = ("none", "h2o+caote", "snapkv+caote", "tova", "kvzip@uniform", "kvzip", "laprox")
# Each shape's policies and batches; those of the last three: biases, windows in some layers, a mixture.
ASKED: dict[str, tuple[Sequence[str], Sequence[int]]] = {
    "llama-3.1-8b": (POLICIES, (1, 8)), "llama-3.2-1b": (POLICIES, (1, 8)), "qwen2.5-7b": (POLICIES[:2], (1,)),
    "gemma-3-4b": (POLICIES[:2], (1,)), "qwen3-30b-a3b": (POLICIES[:2], (1,)),
}  # fmt: skip
ALONE, ALONE_BATCH = "llama-3.1-8b", 8  # the sizes at which each operation is compiled alone
OPERATIONS = tuple(name for name in kernels.OPERATIONS if "pallas_gpu" in kernels_of(name))
PER_LAYER = ("sliding_windows", "ropes", "dense_sizes")
MORE = 2  # layers by which a program has more of a kind than the smallest one, which has two in all, or one of each
PACKAGE = Path(kernels_pallas.__file__).parent
LEGEND = """Compiled for an H100, not timed. A launch is a program of its own: a kernel, a fusion, a copy, a library's
call; a loop's launches count once per turn, and of a conditional those of its shortest branch. Launches to least us
are a layer's, the mean of all where layers differ. MiB: what the launches read and write if each reads once what it
needs. weights moved: MiB of large arrays that are only copied or converted. least: the launches at 2 us, and the MiB
at 4.0 TB/s, less where a launch has fewer blocks than the chip has multiprocessors. step: all layers, the embedding
and the head. On a device XLA also tries cuBLAS for each product, and may copy a layer's weights for it, and sorts by
CUB, in fewer launches."""
KERNELS_LEGEND = """Each line is the worst of so many kernels of that name: the one of which the fewest blocks fit on a
multiprocessor at once (blocks), by registers, threads and shared memory. alone: an operation in a program of its own,
in all its cases. spilled: bytes stored and loaded because registers did not suffice. shared: KiB of a block. barriers,
shuffles: instructions of its PTX; those of a loop count once. XLA's own fusions are left out. No figure may become
worse than its limit in benchmarks/gpu_limits.toml, which names what spills, and what fits but once."""


def kinds(config: Config) -> dict[Any, int]:
    """Return how many layers a model has of each kind, by what is their own, in the order of their first layers."""
    own = [value for name in PER_LAYER if (value := getattr(config, name))]
    return collections.Counter(zip(*own, strict=True)) if own else {(): config.num_layers}


def with_layers(config: Config, *counts: int) -> Config:
    """Return the model with so many layers of each of its :func:`kinds`."""
    each = [kind for kind, number in zip(kinds(config), counts, strict=True) for _ in range(number)]
    names = [name for name in PER_LAYER if getattr(config, name)]
    of_layers: Any = {name: tuple(kind[place] for kind in each) for place, name in enumerate(names)}
    return dataclasses.replace(config, **of_layers, num_layers=len(each))


def _mesh() -> AbstractMesh:
    device = AbstractDevice("NVIDIA H100 80GB HBM3", launches.PROCESSORS, "gpu")
    return AbstractMesh((1,), ("tensor",), axis_types=(AxisType.Auto,), abstract_device=device)


def _at(tree: Any, chip: Any) -> Any:
    own = None if chip is None else SingleDeviceSharding(chip)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own), tree)


def lowered(setting: steps.Setting, program: str, chip: Any = None) -> jax.stages.Lowered:
    """Lower a decode step or a block for a GPU; ``chip`` is needed to compile it."""
    rows = setting.batch if program == "decode" else (setting.batch, setting.block)
    token, finished = jnp.zeros(rows, jnp.int32), jnp.zeros(setting.batch, bool)
    with jax.sharding.use_abstract_mesh(_mesh()):  # which kernels "auto" takes, and how a cache is laid out
        run, state = steps.shapes(setting, 131_072)
        run, state, token, finished = _at((run, state, token, finished), chip)
        if program == "decode":
            given = run, state, token, finished, Draws(), decode_phase(run.plan, 1), Sampling()
            traced = driver.token_step.trace(*given)
        else:
            traced = driver.block_step.trace(run, state, token, token, Phase(evicts=setting.policy is not None))
        return traced.lower(lowering_platforms=None if chip is not None else ("cuda",))


def lowered_case(case: kernels.Case, chip: Any) -> jax.stages.Lowered:
    """Lower a case of an operation alone for a GPU."""
    with jax.sharding.use_abstract_mesh(_mesh()):
        given = _at(jax.eval_shape(case.make), chip)
        return jax.jit(partial(case.call, getattr(kernels_pallas, case.operation), 0)).lower(*given)


class Compiled(NamedTuple):
    """Hold what a compiled program launches, its Pallas kernels, and the bytes of its temporary arrays."""

    launches: list[Launch]
    kernels: list[Kernel]
    temporary_bytes: int


def compiled(lower: Callable[[], jax.stages.Lowered], known: Mosaic) -> Compiled:
    """Lower and compile a program; ``known`` are the Mosaic kernels that this process has compiled before."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with machine_code.lowering(folder):
            program = lower()
        dump = {
            "xla_dump_to": name, "xla_dump_hlo_as_text": True, "xla_dump_emitter_re": "ptx", "xla_gpu_autotune_level": 0
        }  # fmt: skip
        with machine_code.compiling() as printed:
            made = executable(program, dump)
            said = printed()

        def dumped(*names: str) -> str:  # the first one that XLA has written, of the largest module
            (paths, *_) = filter(None, (list(folder.glob(f"*.thunk_{name}.txt")) for name in names))
            return max(paths, key=lambda path: path.stat().st_size).read_text()

        lists = dumped("sequence_after_thunk_passes", "sequence"), dumped("metadata")
        found = launches.launches(made.as_text() or "", *lists)
        code = machine_code.triton_kernels(found, folder) + machine_code.mosaic_kernels(found, folder, said, known)
    memory: Any = made.memory_analysis()
    return Compiled(found, code, memory.temp_size_in_bytes)


def figures(found: Sequence[Launch]) -> dict[str, float]:
    """Return what a program launches in numbers."""
    return {
        "launches": sum(x.times for x in found),
        "in_graphs": sum(x.times for x in found if x.in_graph),
        "moved_bytes": sum(x.times * x.moved for x in found),
        "weights_moved_bytes": launches.weights_moved(found),
        "least_seconds": sum(x.seconds for x in found),
    }


def describe(setting: steps.Setting, program: str, chip: Any, known: Mosaic) -> dict[str, Any]:
    """Return the figures of one layer and of the whole step, a layer's launches, and the kernels; or a refusal.

    Where a model has several kinds of layers, a program has more of one kind than the smallest, and a layer is the mean
    over the model's layers.
    """
    begun, numbers = time.perf_counter(), list(kinds(setting.config).values())
    least = [2] if len(numbers) == 1 else [1] * len(numbers)
    sides = [[size + MORE * (place == kind) for place, size in enumerate(least)] for kind in range(len(least))]
    try:
        few, *more = (
            compiled(partial(lowered, setting._replace(config=with_layers(setting.config, *n)), program, chip), known)
            for n in (least, *sides)
        )
    except (NotImplementedError, RuntimeError, ValueError) as reason:
        return {"refused": measure.reason_of(reason).replace(f"{PACKAGE.parent}/", "")}

    def added(of: Callable[[Compiled], collections.Counter[str]], layers: Sequence[int]) -> dict[str, float]:
        total = collections.Counter[str]()
        for side, number in zip(more, layers, strict=True):
            for sign, own in ((1, side), (-1, few)):
                for name, value in of(own).items():
                    total[name] += sign * value * number / MORE  # type: ignore[assignment]
        return dict(total)

    def of_figures(own: Compiled) -> collections.Counter[str]:
        return collections.Counter(figures(own.launches))  # type: ignore[arg-type]

    def of_kinds(own: Compiled) -> collections.Counter[str]:
        each = collections.Counter[str]()
        for x in own.launches:
            each[x.what] += x.times
        return each

    whole = sum(numbers)
    layers = added(of_figures, numbers)
    rest = added(of_figures, [number - size for number, size in zip(numbers, least, strict=True)])
    launched = {what: value / whole for what, value in added(of_kinds, numbers).items() if value > 0}
    return {
        "layer": {name: value / whole for name, value in layers.items()},
        "step": {name: value + rest[name] for name, value in of_figures(few).items()},
        "of_layer": dict(sorted(launched.items(), key=lambda item: -item[1])),
        "kernels": [x.record() for x in sorted({x for side in (few, *more) for x in side.kernels})],
        "temporary_bytes": max(side.temporary_bytes for side in more),
        "compile_seconds": time.perf_counter() - begun,
    }


def kernel_sources(package: Path = PACKAGE) -> dict[str, str]:
    """Return a digest of the code of the kernels for GPUs, one for each operation and one for what they share.

    Comments and docstrings do not count, and every version of Python gives the same.
    """
    found = collections.defaultdict[str, list[Any]](list)
    for path in sorted(package.rglob("*.py")):
        if path.stem != "tpu":
            place = path.relative_to(package.parent)
            found[str(place.parent)].append([path.name, _plain(ast.parse(path.read_text(encoding="utf-8")))])
    return {folder: digest(code) for folder, code in found.items()}


def _plain(node: Any) -> Any:
    """Return a syntax tree without docstrings and empty fields, as lists."""
    if isinstance(node, list):
        return [_plain(x) for x in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, [])]
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
        fields = [(name, value[1:] if name == "body" else value) for name, value in fields]
    return [type(node).__name__, *([name, _plain(value)] for name, value in fields)]


def heading(settings: dict[str, Any]) -> str:
    """Return the title of the section."""
    return f"Compiled for a GPU that is not at hand ({settings['device']})"


def shown(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records for a page: the smaller of two models of a kind is left to the JSON."""
    return [r for r in results if r["shape"] != "llama-3.2-1b"]


def tables(results: Sequence[dict[str, Any]]) -> dict[str, tuple[report.Table, str]]:
    """Return the table of programs and that of kernels, with their legends, by title."""
    programs = [r for r in results if "policy" in r]
    return {"A layer": (table(programs), LEGEND), "Kernels": (kernel_table(results), KERNELS_LEGEND)}


def table(results: Sequence[dict[str, Any]]) -> report.Table:
    """Return a table with one line per program."""
    mib = 2.0**20
    cells: list[tuple[str, report.Cell]] = [
        ("shape", "{shape}"), ("batch", "{batch}"), ("program", "{program}"), ("policy", "{policy}"),
        ("launches", lambda r: f"{r['layer']['launches']:.4g}"),
        ("in graphs", lambda r: f"{r['layer']['in_graphs']:.4g}"),
        ("MiB", lambda r: f"{r['layer']['moved_bytes'] / mib:,.1f}"),
        ("weights moved", lambda r: f"{r['layer']['weights_moved_bytes'] / mib:,.1f}"),
        ("least us", lambda r: f"{1e6 * r['layer']['least_seconds']:,.0f}"),
        ("step: launches", lambda r: f"{r['step']['launches']:,.0f}"),
        ("step: least ms", lambda r: f"{1e3 * r['step']['least_seconds']:,.2f}"),
        ("temporary MiB", lambda r: f"{r['temporary_bytes'] / mib:,.1f}"),
    ]  # fmt: skip
    return measure.table(results, cells, left=4)


def kernel_table(results: Sequence[dict[str, Any]]) -> report.Table:
    """Return a table with one line per kernel and kind of program, that of the worst program."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for r in results:
        for kernel in r.get("kernels", []):
            program = r["program"] if "policy" in r else "alone"
            groups.setdefault((kernel["name"], kernel["by"], program), []).append(kernel)
    lines = []
    for (name, by, program), own in groups.items():
        worst = min(own, key=lambda k: (k["blocks"], -k["spilled_bytes"], -k["registers"]))
        lines.append(worst | {"name": name, "by": by, "program": program, "programs": len(own)})
    cells: list[tuple[str, report.Cell]] = [
        ("kernel", "{name}"), ("by", "{by}"), ("in", "{program}"), ("of", "{programs}"),
        ("registers", "{registers}"), ("spilled", "{spilled_bytes}"),
        ("shared KiB", lambda k: f"{k['shared_bytes'] / 1024:.1f}"), ("threads", "{threads}"),
        ("barriers", "{barriers}"), ("shuffles", "{shuffles}"), ("blocks", "{blocks}"),
    ]  # fmt: skip
    return report.table(sorted(lines, key=lambda k: (k["name"], k["program"], k["by"])), cells, left=3)


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("--shapes", default=",".join(ASKED))
    flags.add_argument(
        "--policies", help=f"none evicts nothing (default: {','.join(POLICIES)}; two of them for the last three shapes)"
    )
    flags.add_argument("--batches", help="(default: 1,8; 1 for the last three shapes)")
    flags.add_argument("--programs", default=",".join(PROGRAMS))
    flags.add_argument("--operations", default=",".join(OPERATIONS), help="compiled alone, too; none: no operation")
    flags.add_argument("--budget", type=count, default=8_192)
    flags.add_argument("--block", type=count, default=128)
    measure.add_json_flag(flags, "gpu_compile")


def asked(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Check the flags and return the programs that they ask for: shape, batch, program and policy."""
    programs = commands.split_list(flags.programs)
    check_names("program", programs, PROGRAMS)
    found = []
    for name in commands.split_list(flags.shapes):
        policies, batches = ASKED.get(name, (POLICIES, (1, 8)))
        policies = policies if flags.policies is None else commands.split_list(flags.policies)
        batches = batches if flags.batches is None else measure.whole_numbers("--batches", flags.batches)
        for batch, program, policy in itertools.product(batches, programs, policies):
            found.append({"shape": name, "batch": batch, "program": program, "policy": policy})
    return found


def setting_of(program: dict[str, Any], budget: int = 8_192, block: int = 128) -> steps.Setting:
    """Return what one of the :func:`asked` programs is compiled for."""
    policy = None if program["policy"] == "none" else program["policy"]
    return steps.Setting(shape(program["shape"]), policy, budget, program["batch"], block, jnp.bfloat16)


def command(flags: argparse.Namespace) -> None:
    """Compile everything, print the tables, write JSON after each program, and lower the limits that can be lower."""
    files.check_outputs([flags.json])
    programs = asked(flags)
    operations = [] if flags.operations == "none" else commands.split_list(flags.operations)
    check_names("operation", operations, OPERATIONS)
    if not os.environ.get("JAX_PLATFORMS"):  # with the plugin installed, JAX would look for a GPU first
        jax.config.update("jax_platforms", "cpu")
    chip = gpu_chip()
    settings = {"budget": flags.budget, "block": flags.block, "device": chip.device_kind, "timed": False}
    sizes = kernels.Sizes(flags.budget, flags.block)
    cases = kernels.cases(shape(ALONE), ALONE_BATCH, sizes, jnp.bfloat16, operations)
    known: Mosaic = {}

    def records() -> Iterator[dict[str, Any]]:
        for program in commands.progress_bar("program", over=programs):
            setting = setting_of(program, flags.budget, flags.block)
            yield program | describe(setting, program["program"], chip, known)
        for case in commands.progress_bar("operation", over=list(cases)):
            names = {"shape": ALONE, "batch": ALONE_BATCH, "program": f"{case.operation} alone, {case.case}"}
            made = compiled(partial(lowered_case, case, chip), known)
            yield names | {
                "kernels": [x.record() for x in sorted(made.kernels)],
                "temporary_bytes": made.temporary_bytes,
            }

    results = measure.collect(flags, "gpu_compile", settings, records(), kernel_sources())
    measure.show(tables(results), flags.json)
    if flags.json == measure.RESULTS / "gpu_compile.json":
        for line in gpu_limits.tighten(results):
            print(line)
