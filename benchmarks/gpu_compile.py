"""Decode steps and blocks compiled for an H100 that is not at hand: what a layer launches and moves, not timed.

XLA's compiler for GPUs is in JAX's plugin for CUDA (4.6 GB) and needs no GPU. A layer's share is the difference between
programs of four and of two layers. What XLA would time on a GPU, it leaves untuned.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from benchmarks import launches, measure, steps
from benchmarks.launches import Launch
from benchmarks.shapes import shape
from benchmarks.targets import executable, gpu_chip
from evals import report
from kernels_pallas.checks import check_names
from kvjax.schedule import Phase
from models import commands, driver, files
from models.commands.shared_flags import count
from models.config import Config
from models.sampling import Draws, Sampling
from models.steps import decode_phase

PROGRAMS = ("decode", "block")
POLICIES = "none,h2o+caote,snapkv+caote,tova,kvzip,laprox@model"
FEW, MORE = 2, 4  # layers of the two programs whose difference is a layer
LEGEND = """Compiled for an H100, not timed. A launch is a program of its own: a kernel, a fusion, a copy, a library's
call; a loop's launches count once per turn. MiB: what they read and write if each reads once what it needs. weights
moved: MiB of large arrays that are only copied or converted. least: the launches at 2 us, and the MiB at 4.0 TB/s, less
where a launch has fewer blocks than the chip has multiprocessors. step: all layers, the embedding and the head. On a
device XLA also tries cuBLAS for each product, and may copy a layer's weights for it."""


def with_layers(config: Config, layers: int) -> Config:
    """Return a model of the first layers of another."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    of_layers: Any = {
        name: value[:layers]
        for name, value in fields.items()
        if isinstance(value, tuple) and len(value) == config.num_layers
    }
    return dataclasses.replace(config, **of_layers, num_layers=layers)


def lowered(setting: steps.Setting, program: str, chip: Any = None) -> jax.stages.Lowered:
    """Lower a decode step or a block for a GPU; ``chip`` is needed to compile it."""
    device = AbstractDevice("NVIDIA H100 80GB HBM3", launches.PROCESSORS, "gpu")
    mesh = AbstractMesh((1,), ("tensor",), axis_types=(AxisType.Auto,), abstract_device=device)
    own = None if chip is None else SingleDeviceSharding(chip)

    def at(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own), tree)

    rows = setting.batch if program == "decode" else (setting.batch, setting.block)
    token, finished = jnp.zeros(rows, jnp.int32), jnp.zeros(setting.batch, bool)
    with jax.sharding.use_abstract_mesh(mesh):  # which kernels "auto" takes, and how a cache is laid out
        run, state = steps.shapes(setting, 131_072)
        run, state, token, finished = map(at, (run, state, token, finished))
        if program == "decode":
            given = run, state, token, finished, Draws(), decode_phase(run.plan, 1), Sampling()
            traced = driver.token_step.trace(*given)
        else:
            traced = driver.block_step.trace(run, state, token, token, Phase(evicts=setting.policy is not None))
        return traced.lower(lowering_platforms=None if chip is not None else ("cuda",))


def compiled(program: jax.stages.Lowered) -> tuple[list[Launch], int]:
    """Compile a program, and return its launches and the bytes of its temporary arrays."""
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, "xla_gpu_autotune_level": 0}
        made = executable(program, dump)

        def dumped(*names: str) -> str:  # the first one that XLA has written, of the largest module
            (paths, *_) = filter(None, (list(Path(folder).glob(f"*.thunk_{name}.txt")) for name in names))
            return max(paths, key=lambda path: path.stat().st_size).read_text()

        lists = dumped("sequence_after_thunk_passes", "sequence"), dumped("metadata")
    memory: Any = made.memory_analysis()
    return launches.launches(made.as_text() or "", *lists), memory.temp_size_in_bytes


def figures(found: Sequence[Launch]) -> dict[str, float]:
    """Return what a program launches in numbers."""
    return {
        "launches": sum(x.times for x in found),
        "in_graphs": sum(x.times for x in found if x.in_graph),
        "moved_bytes": sum(x.times * x.moved for x in found),
        "weights_moved_bytes": launches.weights_moved(found),
        "least_seconds": sum(x.seconds for x in found),
    }


def describe(setting: steps.Setting, program: str, chip: Any) -> dict[str, Any]:
    """Return the figures of one layer and of the whole step, and a layer's launches; or why it does not compile."""
    begun, whole = time.perf_counter(), setting.config.num_layers
    try:
        sides = [
            compiled(lowered(setting._replace(config=with_layers(setting.config, n)), program, chip))
            for n in (FEW, MORE)
        ]
    except (NotImplementedError, RuntimeError, ValueError) as reason:
        return {"refused": measure.reason_of(reason)}
    (few, _), (more, temporary) = sides
    a, b = figures(few), figures(more)
    layer = {name: (b[name] - a[name]) / (MORE - FEW) for name in b}
    step = {name: b[name] + (whole - MORE) * layer[name] for name in b}
    kinds = collections.Counter[str]()
    for sign, side in ((1, more), (-1, few)):
        for x in side:
            kinds[x.what] += sign * x.times
    of_layer = {what: count / (MORE - FEW) for what, count in kinds.most_common() if count > 0}
    seconds = time.perf_counter() - begun
    return {
        "layer": layer, "step": step, "of_layer": of_layer, "temporary_bytes": temporary, "compile_seconds": seconds
    }  # fmt: skip


def table(results: Sequence[dict[str, Any]]) -> report.Table:
    """Return a table with one line per program."""
    mib = 2.0**20
    cells: list[tuple[str, report.Cell]] = [
        ("shape", "{shape}"), ("batch", "{batch}"), ("program", "{program}"), ("policy", "{policy}"),
        ("launches", lambda r: f"{r['layer']['launches']:.0f}"),
        ("in graphs", lambda r: f"{r['layer']['in_graphs']:.0f}"),
        ("MiB", lambda r: f"{r['layer']['moved_bytes'] / mib:,.1f}"),
        ("weights moved", lambda r: f"{r['layer']['weights_moved_bytes'] / mib:,.1f}"),
        ("least us", lambda r: f"{1e6 * r['layer']['least_seconds']:,.0f}"),
        ("step: launches", lambda r: f"{r['step']['launches']:,.0f}"),
        ("step: least ms", lambda r: f"{1e3 * r['step']['least_seconds']:,.2f}"),
        ("temporary MiB", lambda r: f"{r['temporary_bytes'] / mib:,.1f}"),
    ]  # fmt: skip
    return measure.table(results, cells, left=4)


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("--shapes", default="llama-3.1-8b,llama-3.2-1b")
    flags.add_argument("--policies", default=POLICIES, help="none evicts nothing")
    flags.add_argument("--batches", default="1,8")
    flags.add_argument("--programs", default=",".join(PROGRAMS))
    flags.add_argument("--budget", type=count, default=8_192)
    flags.add_argument("--block", type=count, default=128)
    measure.add_json_flag(flags, "gpu_compile")


def command(flags: argparse.Namespace) -> None:
    """Compile everything, print the table, and write JSON after each program."""
    files.check_outputs([flags.json])
    programs, batches = commands.split_list(flags.programs), measure.whole_numbers("--batches", flags.batches)
    check_names("program", programs, PROGRAMS)
    if not os.environ.get("JAX_PLATFORMS"):  # with the plugin installed, JAX would look for a GPU first
        jax.config.update("jax_platforms", "cpu")
    chip = gpu_chip()
    settings = {"budget": flags.budget, "block": flags.block, "device": chip.device_kind, "timed": False}
    asked = list(
        itertools.product(commands.split_list(flags.shapes), batches, programs, commands.split_list(flags.policies))
    )

    def records() -> Iterator[dict[str, Any]]:
        for name, batch, program, policy in commands.progress_bar("program", over=asked):
            chosen = None if policy == "none" else policy
            setting = steps.Setting(shape(name), chosen, flags.budget, batch, flags.block, jnp.bfloat16)
            names = {"shape": name, "batch": batch, "program": program, "policy": policy}
            yield {**names, **describe(setting, program, chip)}

    print(table(measure.collect(flags, "gpu_compile", settings, records())), LEGEND, sep="\n")
    if flags.json is not None:
        print(f"figures: {flags.json}")
