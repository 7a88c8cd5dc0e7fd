"""Counts what a decode step launches in one layer on a GPU that is not at hand, in the compiled program.

XLA's compiler for GPUs is in JAX's plugin for CUDA and needs no GPU. What it would time on one, it leaves untuned.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

import kvjax
from benchmarks import measure
from benchmarks.shapes import shape
from benchmarks.targets import executable, gpu_chip
from evals import command_line, report
from models import commands, files
from models.config import Config

LEGEND = """Compiled for an H100, not timed. A launch is an instruction of the layers' loop that becomes a program of
its own: a kernel of this library, a fusion, a copy. A sort counts as one, though it takes several; an instruction of an
inner loop counts once per turn. One launch is the loop's own counter. full: nothing is evicted. MiB: what the launches
read and write if each reads once what it needs; K and V alone are 32 at a budget of 8,192."""
_SILENT = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "fusion-done", "copy-done", "async-done", "custom-call-done",
}  # fmt: skip
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # the operand that holds the updates; the first is what is updated


class Launch(NamedTuple):
    """One launch, or the ``times`` launches of a loop's instruction; ``kernel`` is a Pallas kernel's name, or None."""

    name: str
    kernel: str | None
    times: int
    numbers_bytes: int


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    text: str


def launches(text: str, layers: int) -> list[Launch]:
    """Return the launches of one layer in a compiled program's text, whose layers run in a loop of that many turns."""
    computations = _computations(text)
    for instruction in computations["ENTRY"]:
        if instruction.opcode == "while" and _turns(instruction) == layers:
            return list(_of_computation(computations, _callee(instruction), layers, 1))
    raise ValueError(f"the program has no loop over {layers} layers.")


def _computations(text: str) -> dict[str, list[_Instruction]]:
    found: dict[str, list[_Instruction]] = {}
    own: list[_Instruction] = []
    for line in text.splitlines():
        if opened := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            own = found.setdefault("ENTRY" if opened[1] else opened[2], [])
        line = re.sub(r"/\*.*?\*/", "", line)
        if parts := re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(([^)]*)\)", line):
            operands = tuple(re.findall(r"%([\w.\-]+)", parts[4]))
            own.append(_Instruction(parts[1], parts[2], parts[3], operands, line))
    return found


def _turns(instruction: _Instruction) -> int | None:
    found = re.search(r'known_trip_count":\{"n":"(\d+)"', instruction.text)
    return int(found[1]) if found else None


def _callee(instruction: _Instruction) -> str:
    found = re.search(r"(?:body|to_apply|calls)=%?([\w.\-]+)", instruction.text)
    assert found is not None
    return found[1]


def _of_computation(
    computations: dict[str, list[_Instruction]], name: str, layers: int, times: int
) -> Iterator[Launch]:
    shapes = {i.name: i.shape for i in computations[name]}
    for i in computations[name]:
        if i.opcode in _SILENT:
            continue
        if i.opcode in ("while", "call"):
            turns = _turns(i) or 1
            yield from _of_computation(computations, _callee(i), layers, times * turns)
            continue
        if i.opcode.startswith("fusion"):
            moved = _traffic(computations[_callee(i)])
        else:  # a kernel reads one of the stacked layers
            moved = sum(_bytes_of(x, layers) for x in (*(shapes[x] for x in i.operands), i.shape))
        metadata = re.search(r'op_name="[^"]*?([^"/]+)/pallas_call"', i.text)
        yield Launch(i.name, metadata[1] if metadata else None, times, times * moved)


def _traffic(fused: list[_Instruction]) -> int:
    """Return the bytes that a fusion reads and writes: of what it slices the slices, of what it updates the updates."""
    named = {i.name: i for i in fused}

    def read(x: _Instruction) -> int:
        total = 0
        for user in (i for i in fused if x.name in i.operands):
            updates = user.opcode in _UPDATES and user.operands[0] == x.name
            if user.opcode in ("bitcast", "reshape"):
                total += read(user)
            elif user.opcode in ("slice", "dynamic-slice", "gather") and user.operands[0] == x.name:
                total += _bytes_of(user.shape)
            elif not updates:
                return _bytes_of(x.shape)
        return min(total, _bytes_of(x.shape))

    def written(x: _Instruction) -> int:
        if x.opcode == "tuple":
            return sum(written(named[part]) for part in x.operands)
        if x.opcode in ("bitcast", "reshape") and x.operands:
            return written(named[x.operands[0]])
        return _bytes_of(named[x.operands[_UPDATES[x.opcode]]].shape if x.opcode in _UPDATES else x.shape)

    root = next(i for i in fused if i.text.lstrip().startswith("ROOT"))
    return sum(read(i) for i in fused if i.opcode == "parameter") + written(root)


def _bytes_of(text: str, layers: int | None = None) -> int:
    """Return the bytes of the arrays in a type's text: of stacked layers, those of one."""
    total = 0
    for dtype, sizes in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", text):
        numbers = [int(size) for size in sizes.split(",") if size]
        bits = 8 if dtype == "pred" else int(re.sub(r"^[a-z]+(\d+).*", r"\1", dtype))
        stacked = layers is not None and len(numbers) > 2 and numbers[0] == layers
        total += math.prod(numbers[1:] if stacked else numbers) * bits // 8
    return total


def _decode_layers(config: Config, policy: kvjax.Policy | None, batch: int, budget: int) -> tuple[Any, tuple[Any, ...]]:
    """Return a function that runs a decode step's attention and eviction in all layers, and its arguments' shapes."""
    L, B, K, N, D = config.num_layers, batch, config.num_kv_heads, config.num_heads, config.head_dim
    S = budget + 1

    def make() -> kvjax.KVCache:
        state = () if policy is None else policy.state(B, K, N // K, S, D)
        state = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (L, *leaf.shape)), state)
        return kvjax.KVCache.init(batch=B, kv_heads=K, slots=S, head_dim=D, layers=L, dtype="bfloat16", state=state)

    def run(cache: kvjax.KVCache, x: Any) -> Any:
        position = cache.next_position[:, None]

        def step(carry: Any, layer: Any) -> Any:
            cache, x = carry
            context = kvjax.Context(layer=layer, excess=None if policy is None else 1)
            limits: dict[str, Any] = {} if policy is None else dict(policy=policy, budget=budget)
            x, cache = kvjax.attend(cache, x, x[:, :, :K], x[:, :, -K:], position, context=context, **limits)
            return (cache, x), None

        return jax.lax.scan(step, (cache, x), jnp.arange(L))[0]

    return run, (jax.eval_shape(make), jax.ShapeDtypeStruct((B, 1, N, D), jnp.bfloat16))


def lowering(config: Config, policy: str, batch: int, budget: int, chip: Any = None) -> jax.stages.Lowered:
    """Lower a decode step's attention and eviction for a GPU; ``chip`` is needed to compile it."""
    run, given = _decode_layers(config, kvjax.chains.policy_of(policy), batch, budget)
    if chip is not None:
        own = SingleDeviceSharding(chip)
        given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own), given)
    device = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    mesh = AbstractMesh((1,), ("tensor",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        platforms = None if chip is not None else ("cuda",)
        return jax.jit(run, donate_argnums=0).trace(*given).lower(lowering_platforms=platforms)


def table(results: Sequence[dict[str, Any]]) -> report.Table:
    """Return a table with one line per policy."""
    head = ("shape", "batch", "budget", "policy", "launches", "kernels", "in inner loops", "MiB")
    lines = []
    for r in results:
        found = [Launch(*x) for x in r["launches"]]
        kernels = sum(x.kernel is not None for x in found)
        inner = sum(x.times for x in found if x.times > 1)
        moved = sum(x.numbers_bytes for x in found) / 2**20
        total = sum(x.times for x in found)
        lines.append((r["shape"], r["batch"], f"{r['budget']:,}", r["policy"], total, kernels, inner, f"{moved:.1f}"))
    return report.Table(head, [tuple(map(str, line)) for line in lines], left=4)


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("--shapes", default="llama-3.1-8b")
    flags.add_argument(
        "--policies", default="h2o+caote,snapkv+caote,streaming,full", help="policies; full evicts nothing"
    )
    flags.add_argument("--batch", type=int, default=1)
    flags.add_argument("--budget", type=int, default=8_192)
    flags.add_argument("--json", type=Path, help="write all figures here")


def command(flags: argparse.Namespace) -> None:
    """Compile a decode step for each policy, print the table, and write JSON."""
    files.check_outputs([flags.json])
    command_line.check_least(flags, batch=1, budget=1)
    if not os.environ.get("JAX_PLATFORMS"):  # with the plugin installed, JAX would look for a GPU first
        jax.config.update("jax_platforms", "cpu")
    chip = gpu_chip()
    settings = {"batch": flags.batch, "budget": flags.budget, "device": chip.device_kind, "timed": False}

    def records() -> Iterator[dict[str, Any]]:
        for name, policy in itertools.product(*map(commands.split_list, (flags.shapes, flags.policies))):
            program = lowering(shape(name), policy, flags.batch, flags.budget, chip)
            text = executable(program, {"xla_gpu_autotune_level": 0}).as_text() or ""
            sizes = {"shape": name, "batch": flags.batch, "budget": flags.budget, "policy": policy}
            yield {**sizes, "launches": launches(text, shape(name).num_layers)}

    print(table(measure.collect(flags, "launches", settings, records())))
    print(LEGEND)
    if flags.json is not None:
        print(f"figures: {flags.json}")
