"""Read from XLA's lists what a compiled program launches on a GPU: kernels, copies, library calls.

XLA says what it launches in two files: in the order of execution (a "thunk sequence", indented by loops and CUDA
graphs), and by name. The program's text says what each reads and writes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

LARGE = 2**20  # bytes from which an array is one of weights, keys or values
SECONDS = 2e-6  # of a launch at least
BANDWIDTH, PROCESSORS = 4.0e12, 132  # of an H200: bytes per second, multiprocessors
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # the operand that holds the updates; the first is what is updated
# Kernels that read as many rows of an operand as another has: its number, and the other's; rows are on its second axis
_ROWS_OF = {"kernel add_rms_norm": (1, 0), "kernel split_heads": (0, 1)}
# What the lines below it, further in, are part of
_HELD = ("kWhile", "kCommandBuffer", "kAsyncStart", "kDynamicSliceFusion", "kConditional")


class Launch(NamedTuple):
    """One launch, or the ``times`` launches of a loop's instruction."""

    what: str  # "kernel NAME", a library's name, "triton gemm", "copy", "convert", or its most telling operation
    name: str
    times: int
    in_graph: bool  # is part of a CUDA graph
    blocks: int | None  # None where a library decides
    moved: int  # bytes that it reads and writes, if it reads once what it needs
    by: str | None = None  # of a Pallas kernel: "Triton" or "Mosaic"
    code: str | None = None  # its function in the machine code, or the hash by which Mosaic knows it
    shared: int | None = None  # bytes of shared memory that the launch gives a block

    @property
    def seconds(self) -> float:
        """Return the least seconds: of the launches, and of the bytes at the bandwidth that its blocks can reach."""
        share = 1 if self.blocks is None else min(1, self.blocks / PROCESSORS)
        return self.times * (SECONDS + self.moved / (BANDWIDTH * share))


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    text: str
    is_root: bool


def launches(text: str, sequence: str, names: str) -> list[Launch]:
    """Return the launches of a compiled program, in order.

    Args:
        text: the program, as ``jax.stages.Compiled.as_text`` gives it.
        sequence: XLA's file ``*.thunk_sequence_after_thunk_passes.txt``.
        names: XLA's file ``*.thunk_metadata.txt``.
    """
    computations = _computations(text)
    of_name = {i.name: (i, own) for own in computations.values() for i in own}
    of_number = {int(number): name for name, number in re.findall(r'annotation: "([^"]+)"\s+thunk_id: (\d+)', names)}
    found: list[Launch] = []
    inside: list[tuple[int, str, int]] = []  # (indentation, kind, turns) of what the line is part of
    for line in _by_shortest_branch(sequence.splitlines()):
        parts = re.match(r"(\s*)(\d+): (k\w+)\s+(?:\[.*?\])?\s*(.*)", line)
        if parts is None:  # the computations of a loop's condition, and of its body, begin in the first column
            inside = [held for held in inside if held[1] != "condition"]
            if line.strip() == "condition:" and inside:
                inside.append((inside[-1][0] + 2, "condition", 0))
            continue
        depth, number, thunk, rest = len(parts[1]), int(parts[2]), parts[3], parts[4]
        inside = [held for held in inside if held[0] < depth]
        if (inside and inside[-1][1] in ("kAsyncStart", "kDynamicSliceFusion")) or thunk.endswith("Done"):
            continue  # told by what holds it
        name = of_number.get(number, "")
        instruction, neighbours = of_name.get(name, (None, []))
        times = math.prod(held[2] for held in inside)
        if thunk in _HELD:
            inside.append((depth, thunk, _turns(instruction) if thunk == "kWhile" else 1))
        if thunk in ("kWhile", "kCommandBuffer", "kConditional") or not times:
            continue
        in_graph = any(held[1] == "kCommandBuffer" for held in inside)
        if instruction is None:
            found.append(Launch(thunk, name or rest, times, in_graph, None, 0))
            continue
        fused = _fused(computations, instruction)
        shapes = {i.name: i.shape for i in neighbours}
        # A kernel writes a token into arrays that it updates in place, whose other bytes stay as they are.
        in_place = [int(x) for x in re.findall(r"\{\d*\}: \((\d+), \{\}\)", instruction.text)]
        operands = sum(_bytes(shapes.get(x, "")) for x in instruction.operands)
        operands -= 2 * sum(_bytes(shapes.get(instruction.operands[x], "")) for x in in_place)
        what = "copy" if thunk == "kCopy" else _kind(instruction, fused)
        if rows_of := _ROWS_OF.get(what):
            operands -= _unread(*(shapes.get(instruction.operands[x], "") for x in rows_of))
        moved = _traffic(fused) if fused else operands + _bytes(instruction.shape)
        grid = re.search(r"(\S+) grid: \[(\d+), (\d+), (\d+)\].* shared_memory: (\d+)", rest)
        blocks = math.prod(map(int, grid.groups()[1:4])) if grid else None
        launch = Launch(what, name, times, in_graph, blocks, moved)
        if what.startswith("kernel ") and grid:
            launch = launch._replace(by="Triton", code=grid[1], shared=int(grid[5]))
        elif what.startswith("kernel ") and (
            known := re.search(r'kernel_hash = "((?:[^"\\]|\\.)*)"', instruction.text)
        ):
            launch = launch._replace(by="Mosaic", code=known[1])
        found.append(launch)
    return found


def _by_shortest_branch(lines: Sequence[str]) -> list[str]:
    """Return the lines with the shortest branch alone of each conditional: the others are for what is rare."""
    found: list[str] = []
    rest = list(lines)
    while rest:
        found.append(rest.pop(0))
        if ": kConditional" not in found[-1]:
            continue
        depth = _depth(found[-1])
        branches: list[list[str]] = []
        while rest and _depth(rest[0]) > depth:
            line = rest.pop(0)
            if re.fullmatch(r"\s*\w*branch\w*:\s*", line):
                branches.append([])
            elif branches:
                branches[-1].append(line)
        each = sorted((_by_shortest_branch(branch) for branch in branches), key=len)
        found += each[0] if each else []
    return found


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def weights_moved(found: Sequence[Launch]) -> int:
    """Return the bytes of launches that do nothing but copy or convert a large array."""
    return sum(x.times * x.moved for x in found if x.what in ("copy", "convert") and x.moved >= LARGE)


def _computations(text: str) -> dict[str, list[_Instruction]]:
    found: dict[str, list[_Instruction]] = {}
    own: list[_Instruction] = []
    for line in text.splitlines():
        if opened := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            own = found.setdefault(opened[1], [])
        line = re.sub(r"/\*.*?\*/", "", line)
        if parts := re.match(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*?)\)(?:,|$)", line):
            operands = tuple(re.findall(r"%([\w.\-]+)", parts[5]))
            own.append(_Instruction(parts[2], parts[3], parts[4], operands, line, bool(parts[1])))
    return found


def _turns(loop: _Instruction | None) -> int:
    known = None if loop is None else re.search(r'known_trip_count":\{"n":"(\d+)"', loop.text)
    return int(known[1]) if known else 1


def _fused(computations: dict[str, list[_Instruction]], instruction: _Instruction) -> list[_Instruction]:
    """Return the instructions of a fusion, of the innermost one where it only wraps another; [] of anything else."""
    own = [instruction]
    while own[-1].opcode.startswith("fusion") and (called := re.search(r"calls=%?([\w.\-]+)", own[-1].text)):
        own = computations[called[1]]
    return own if own[-1] is not instruction else []


def _unread(array: str, other: str) -> int:
    """Return the bytes of an array beyond the rows that another has: on its second axis, and on the other's first."""
    held, read = (int(re.findall(r"\d+", shape.partition("[")[2])[axis]) for shape, axis in ((array, 1), (other, 0)))
    return _bytes(array) * (held - read) // held


def _bytes(shape: str) -> int:
    """Return the bytes of the arrays of a shape."""
    total = 0
    for dtype, sizes in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", shape):
        bits = 8 if dtype == "pred" else int(re.sub(r"^[a-z]+(\d+).*", r"\1", dtype))
        total += math.prod(int(x) for x in sizes.split(",") if x) * bits // 8
    return total


def _traffic(fused: Sequence[_Instruction]) -> int:
    """Return the bytes that a fusion reads and writes: of what it slices or updates in place, only that part."""
    named = {i.name: i for i in fused}

    def read(x: _Instruction) -> int:
        total = 0
        for user in (i for i in fused if x.name in i.operands):
            is_first = user.operands[0] == x.name
            if user.opcode in ("bitcast", "reshape"):
                total += read(user)
            elif user.opcode in ("dynamic-slice", "slice", "gather") and is_first:
                total += _bytes(user.shape)
            elif not (user.opcode in _UPDATES and is_first) and user.opcode != "tuple":
                return _bytes(x.shape)
        return min(total, _bytes(x.shape))

    def written(x: _Instruction) -> int:
        if x.opcode == "tuple":
            return sum(written(named[name]) for name in x.operands)
        if x.opcode in ("bitcast", "get-tuple-element") and x.operands:
            source = named[x.operands[0]]
            return _bytes(x.shape) if source.opcode == "parameter" else written(source)
        if x.opcode in _UPDATES:
            return _bytes(named[x.operands[_UPDATES[x.opcode]]].shape)
        return _bytes(re.sub(r"s8\[\d+\]\S*", "", x.shape))  # without a library's workspace

    return sum(read(i) for i in fused if i.opcode == "parameter") + sum(written(i) for i in fused if i.is_root)


def _kind(instruction: _Instruction, fused: Sequence[_Instruction]) -> str:
    text = instruction.text + "".join(i.text for i in fused)
    if library := re.search(r'custom_call_target="(__cublas\$?\w*\$?\w*|__cudnn\S*?)"', text):
        return library[1].strip("_").replace("$", " ")
    if "__triton_nested_gemm" in text or "__triton_gemm" in text:
        return "triton gemm"
    if instruction.opcode == "custom-call":
        kernel = re.search(r'op_name="[^"]*?([^"/]+)/(?:pallas_call|mpmd_map)"', instruction.text)
        return f"kernel {kernel[1]}" if kernel else "custom call"
    silent = {"parameter", "bitcast", "constant", "tuple", "reshape", "get-tuple-element"}
    codes = {i.opcode for i in fused if "[]" not in i.shape} - silent
    if instruction.opcode.startswith("copy") or (codes and codes <= {"dynamic-slice", "slice", "copy", "transpose"}):
        return "copy"
    if codes and codes <= {"convert", "dynamic-slice", "slice"}:
        return "convert"
    if any(i.opcode == "multiply" and _bytes(i.shape) >= 4 * LARGE for i in fused):
        return "product as multiply and reduce"  # of a matrix and a vector
    return next((x for x in ("scatter", "sort", "reduce", "dynamic-update-slice") if x in codes), "elementwise")
