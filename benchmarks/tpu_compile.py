"""Kernels and whole programs compiled for TPUs that are not at hand: bytes per chip, communication; nothing is timed.

The kernels are compiled in the cases of :mod:`benchmarks.kernels`. The programs are those that the decoder runs, a
decode step and a block of a prompt. Arrays are abstract. A model on several chips is split as the decoder splits it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kernels_pallas
import kvjax
import models
from benchmarks import kernels, measure
from benchmarks.shapes import shape
from benchmarks.targets import executable, tpu_chips
from evals import report
from kernels_pallas.dispatch import kernels_of
from kvjax.schedule import Phase, Text
from models import commands, driver, files
from models.commands.shared_flags import add_shared_flags, count
from models.options import Options
from models.parameters import array_shapes, partition
from models.planning import plan_run
from models.prompts import CheckedPrompt
from models.sampling import Draws, Sampling
from models.states import start
from models.steps import decode_phase

OPERATIONS = tuple(name for name in kernels.OPERATIONS if "pallas_tpu" in kernels_of(name))
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
LEGEND = """Compiled, not timed: nothing here ran on a TPU. arrays: MiB per chip of weights and cache, as counted.
Decode step and block: the bytes that the program takes, over these: its arguments as laid out on the chip, its
temporaries, and results that do not reuse an argument's memory. 1.000 is the floor of a step; a block computes no
logits, and may need less. The worst program has the most temporary MiB; kernels alone are among them. The JSON has
every program, with its kernels and collectives, and the compiler's own estimates of FLOPs, bytes and time."""


class Sizes(NamedTuple):
    """The sizes that a program is compiled for."""

    config: models.Config
    batch: int
    budget: int
    block: int
    prompt: int


def mesh_of(topology: str, config: models.Config | None = None) -> Mesh:
    """Return the decoder's mesh over all chips of a topology; over one of them without a config.

    As many chips as divide the KV heads are along "tensor". Where chips are left, they split experts.
    """
    chips = np.array(tpu_chips(topology))
    if config is None:
        return Mesh(chips[:1].reshape(1, 1), ("data", "tensor"))
    tensor = math.gcd(len(chips), config.num_kv_heads)
    left = len(chips) // tensor
    if left == 1:
        return Mesh(chips.reshape(1, tensor), ("data", "tensor"))
    if config.num_experts % len(chips) or not config.num_experts:
        raise ValueError(
            f"{topology} has {len(chips)} chips, which {config.num_kv_heads} KV heads and {config.num_experts} experts "
            "cannot be split over; name another topology or shape."
        )
    return Mesh(chips.reshape(1, left, tensor), ("data", "expert", "tensor"))


Lower = Callable[[], tuple[jax.stages.Lowered, Any]]  # returns a program, and the arguments that are counted


def lowered_case(case: kernels.Case, mesh: Mesh) -> tuple[jax.stages.Lowered, Any]:
    """Return a case of an operation lowered for one chip, and its arguments."""
    whole = NamedSharding(mesh, PartitionSpec())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # a cache is made for this platform
        shapes = jax.eval_shape(case.make)
        given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), shapes)
        return jax.jit(partial(case.call, getattr(kernels_pallas, case.operation), 0)).lower(*given), given


def lowered_programs(sizes: Sizes, policy: str, mesh: Mesh) -> Iterator[tuple[str, Lower]]:
    """Yield the decoder's step and block for a mesh; of their arguments, weights and cache are counted."""
    config, B = sizes.config, sizes.batch
    arrays = {
        name: jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=NamedSharding(mesh, partition(name, mesh)))
        for name, size in array_shapes(config).items()
    }
    model: Any = models.Decoder(config, arrays)  # type: ignore[arg-type]
    chosen, prompts = kvjax.parse(policy), CheckedPrompt(Text.of(np.zeros((B, sizes.prompt), np.int8)))
    options = Options(chosen, sizes.budget, sizes.block, evict_every=1)
    run, buffers = plan_run(model, prompts, options)
    plan, rows = run.plan, jax.eval_shape(lambda: run.rows)
    projection = jax.eval_shape(lambda m: models.output_projection(m, chosen), model)
    run = dataclasses.replace(run, rows=rows, projection=projection)
    row, token = (jax.ShapeDtypeStruct(size, jnp.int32) for size in ((B, sizes.block), (B,)))
    finished = jax.ShapeDtypeStruct((B,), bool)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # the decoder places its cache when it makes it
        empty = jax.jit(lambda r: start(r, buffers, B)).lower(run)
    placed = executable(empty).output_shardings
    state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), empty.out_info, placed)

    def decode() -> tuple[jax.stages.Lowered, Any]:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            program = driver.token_step.lower(run, state, token, finished, Draws(), decode_phase(plan, 1), Sampling())
        return program, (model, state)

    def block() -> tuple[jax.stages.Lowered, Any]:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            program = driver.block_step.lower(run, state, row, row, Phase(evicts=True))
        return program, (model, state)

    yield "decode step", decode
    yield f"block of {sizes.block}", block


def describe(lower: Lower) -> dict[str, Any]:
    """Compile a program, and return the compiler's figures for it, or the reason why it did not compile."""
    started = time.perf_counter()
    try:
        lowered, arrays = lower()
        program = executable(lowered)
    except (NotImplementedError, RuntimeError, ValueError, TypeError) as error:
        return {"compiles": False, "reason": reason_of(error)}
    memory: Any = program.memory_analysis()
    cost: Any = program.cost_analysis() or {}
    seconds = cost.get("optimal_seconds")
    return {
        "compiles": True,
        "compile_seconds": time.perf_counter() - started,
        "array_bytes": chip_bytes(arrays),
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "new_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "flops": cost.get("flops"),
        "bytes_accessed": cost.get("bytes accessed"),
        "estimated_seconds": seconds if seconds is not None and seconds > 0 else None,
        **counts(program.as_text() or ""),
    }


def reason_of(error: Exception) -> str:
    """Return an error's first lines as one line that fits below a table."""
    text = " ".join(line.strip() for line in str(error).splitlines()[:3] if line.strip())
    return text if len(text) <= 240 else text[:237] + "..."


def chip_bytes(arrays: Any) -> int:
    """Return the bytes of one chip's part of sharded arrays, without padding."""
    leaves = jax.tree.leaves(arrays)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def counts(text: str) -> dict[str, Any]:
    """Count the kernels and collectives in a compiled program's text; those of a loop's body count once."""
    found = Counter(re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", text))
    kernels = text.count('custom_call_target="tpu_custom_call"')
    return {"kernels": kernels, "collectives": {kind: found[kind] for kind in COLLECTIVES if found[kind]}}


def _overhead(result: dict[str, Any]) -> float:
    """Return the bytes that a program takes over the bytes of its arrays."""
    return sum(result[f"{name}_bytes"] for name in ("argument", "temporary", "new")) / result["array_bytes"]


def table(results: list[dict[str, Any]]) -> report.Table:
    """Return a table with one line per model and chip; below it is why some do not compile."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for r in results:
        groups.setdefault((r["shape"], f"{r['chips']} of {r['topology']}"), []).append(r)
    head = "shape|for|worst program|its temporary|compiled|arrays|decode step|block|collectives".split("|")
    lines, reasons = [], []
    for (name, chips), programs in groups.items():
        good = [r for r in programs if r["compiles"]]
        bad = [r for r in programs if not r["compiles"]]
        more = f" ({len(bad) - 1} more like it)" if len(bad) > 1 else ""
        reasons += [f"{name}, {r['program']}, {chips}{more}: {r['reason']}" for r in bad[:1]]
        steps, blocks = ([r for r in good if r["program"].startswith(kind)] for kind in ("decode step", "block of"))
        worst = max(good, key=lambda r: r["temporary_bytes"], default=None)
        most = Counter[str]()
        for r in steps:
            most |= Counter(r["collectives"])
        largest = (worst["program"], f"{worst['temporary_bytes'] / 2**20:,.1f} MiB") if worst else ("", "")
        arrays = f"{max(r['array_bytes'] for r in steps) / 2**20:,.0f}" if steps else ""
        over = (f"{max(map(_overhead, some)):.3f}" if some else "" for some in (steps, blocks))
        collectives = " ".join(f"{count} {kind}" for kind, count in most.items()) or ("none" if steps else "")
        lines.append((name, chips, *largest, f"{len(good)} of {len(programs)}", arrays, *over, collectives))
    return report.Table(head, lines, left=3, notes=reasons)


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("--topologies", default="v5e:2x4,v6e:2x4", help="topologies by libtpu's names")
    flags.add_argument("--shapes", default="llama-3.2-1b,llama-3.2-3b,llama-3.1-8b")
    flags.add_argument(
        "--split", default="llama-3.1-8b,qwen3-30b-a3b", help="shapes whose programs are compiled over all chips"
    )
    flags.add_argument("--policies", default="snapkv+caote", help="policies of the programs")
    flags.add_argument("--budget", type=count, default=8_192)
    add_shared_flags(flags, "batch", "block", batch=1)
    flags.add_argument("--prompt", type=count, default=131_072, help="prompt tokens; select_attention keeps all")
    measure.add_json_flag(flags, "tpu_compile")


def command(flags: argparse.Namespace) -> None:
    """Compile everything, print the table, and write JSON after each program."""
    files.check_outputs([flags.json])
    if not os.environ.get("JAX_PLATFORMS"):  # with libtpu installed, JAX would look for a TPU first
        jax.config.update("jax_platforms", "cpu")
    topologies, policies = commands.split_list(flags.topologies), commands.split_list(flags.policies)
    names, split = commands.split_list(flags.shapes), commands.split_list(flags.split)
    all_sizes = {
        name: Sizes(shape(name), flags.batch, flags.budget, flags.block, flags.prompt)
        for name in dict.fromkeys([*names, *split])
    }
    meshes = {(at, name): mesh_of(at, all_sizes[name].config) for at in topologies for name in split}
    settings = {name: getattr(flags, name) for name in ("batch", "budget", "block", "prompt")}
    settings |= {"libtpu": importlib.metadata.version("libtpu"), "dtype": "bfloat16", "timed": False}

    def programs() -> Iterator[tuple[str, str, str, int, Lower]]:
        sizes = kernels.Sizes(flags.budget, flags.block, context=flags.prompt)
        for topology in topologies:
            one = mesh_of(topology)
            for name in names:
                for case in kernels.cases(shape(name), flags.batch, sizes, settings["dtype"], OPERATIONS):
                    yield name, f"{case.operation}, {case.case}", topology, 1, partial(lowered_case, case, one)
            for name, mesh in [(name, one) for name in names] + [(name, meshes[topology, name]) for name in split]:
                for policy in policies:
                    for program, lower in lowered_programs(all_sizes[name], policy, mesh):
                        yield name, f"{program}, {policy}", topology, mesh.size, lower

    records = (
        {"shape": name, "program": program, "topology": topology, "chips": chips, **describe(lower)}
        for name, program, topology, chips, lower in commands.progress_bar("program", over=programs())
    )
    results = measure.collect(flags, "tpu_compile", settings, records)
    print(table(results), LEGEND, sep="\n")
    if flags.json is not None:
        print(f"figures: {flags.json}")
