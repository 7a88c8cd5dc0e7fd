"""Read what a kernel is in a GPU's machine code: registers, spills, shared memory, barriers, and how many blocks fit.

XLA writes the PTX of Triton's kernels, and CUDA's ptxas tells what becomes of it. Mosaic compiles its own kernels, each
once in a process, and prints both if asked to.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.launches import Launch

# One multiprocessor of an H100. A block takes 1 KiB of shared memory beside its own; a warp's registers come in units.
REGISTERS, UNIT, WARP, THREADS, BLOCKS = 65_536, 256, 32, 2_048, 32
SHARED, RESERVED = 228 * 1024, 1024
Mosaic = dict[str, "Kernel"]


class Kernel(NamedTuple):
    """A kernel in machine code. Barriers and shuffles are instructions of its PTX; those of a loop count once."""

    name: str
    by: str  # "Triton" or "Mosaic"
    registers: int  # of a thread
    spilled_bytes: int  # stored and loaded because registers did not suffice
    shared_bytes: int  # of a block
    threads: int  # of a block
    barriers: int
    shuffles: int

    @property
    def blocks(self) -> int:
        """Return how many blocks fit on a multiprocessor of an H100 at once."""
        return blocks(self.registers, self.threads, self.shared_bytes)

    def record(self) -> dict[str, Any]:
        """Return it for a results file."""
        return {**self._asdict(), "blocks": self.blocks}


def blocks(registers: int, threads: int, shared: int) -> int:
    """Return how many blocks fit on a multiprocessor of an H100 by registers of a thread, threads and shared bytes.

    Example:
        >>> from benchmarks import machine_code
        >>> machine_code.blocks(128, 256, 0), machine_code.blocks(32, 128, 64_000)
        (2, 3)
    """
    warps = -(-threads // WARP)
    of_warp = -(-registers * WARP // UNIT) * UNIT
    fitting = REGISTERS // of_warp // 4 * 4  # each of four schedulers has its own registers
    return min(fitting // warps, SHARED // (shared + RESERVED), THREADS // (warps * WARP), BLOCKS)


class _Text(NamedTuple):
    threads: int
    barriers: int
    shuffles: int


class _Assembled(NamedTuple):
    registers: int
    spilled_bytes: int
    shared_bytes: int  # known to the compiler; what a launch adds is not


def of_ptx(text: str) -> list[tuple[str, _Text]]:
    """Return name, threads of a block, barriers and shuffles of each kernel in PTX."""
    found = []
    _, *parts = re.split(r"\.entry (\w+)\(", text)
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        sizes = re.search(r"\.(?:req|max)ntid (\d+)(?:, (\d+))?(?:, (\d+))?", body)
        x, y, z = (int(size or 1) for size in sizes.groups()) if sizes else (0, 0, 0)
        barriers = len(re.findall(r"\b(?:bar|barrier)(?:\.cta)?\.sync", body))
        found.append((name, _Text(x * y * z, barriers, len(re.findall(r"\bshfl\.", body)))))
    return found


def of_assembler(text: str) -> list[tuple[str, _Assembled]]:
    """Return name, registers, spilled and static shared bytes of each kernel of which ptxas tells."""
    found = []
    _, *parts = re.split(r"Compiling entry function '(\w+)'", text)
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", body)
        used = re.search(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?", body)
        if spills is None or used is None:
            raise ValueError(f"ptxas says nothing of {name}: {body[:200]!r}")
        found.append((name, _Assembled(int(used[1]), int(spills[1]) + int(spills[2]), int(used[2] or 0))))
    return found


@functools.cache
def assembler() -> Path:
    """Return the path of ptxas, which JAX's plugin for CUDA brings with it."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(folder).glob("*/bin/ptxas")):
            return path
    raise ImportError("ptxas is not installed; install it with: pip install nvidia-cuda-nvcc")


def assembled(path: Path) -> list[tuple[str, _Assembled]]:
    """Assemble a file of PTX, and return what :func:`of_assembler` does."""
    (target,) = re.findall(r"^\.target (\w+)", path.read_text(), re.MULTILINE)
    line = [str(assembler()), "-v", f"-arch={target}", str(path), "-o", os.devnull]
    done = subprocess.run(line, check=True, capture_output=True, text=True)
    return of_assembler(done.stderr)


def triton_kernels(found: Sequence[Launch], folder: Path) -> list[Kernel]:
    """Return Triton's kernels among a program's launches; ``folder`` has XLA's files of PTX."""
    asked = {x.code: x for x in found if x.by == "Triton"}
    kernels = []
    for path in sorted(folder.glob("*.ptx")):
        texts = dict(of_ptx(path.read_text()))
        if not asked.keys() & texts.keys():
            continue
        for name, code in assembled(path):
            if launch := asked.get(name):
                own, shared = texts[name], code.shared_bytes + (launch.shared or 0)
                kernels.append(Kernel(launch.what.removeprefix("kernel "), "Triton", *code[:2], shared, *own))
    return kernels


@contextlib.contextmanager
def lowering(folder: Path) -> Iterator[None]:
    """Let Mosaic write how its kernels are launched into a folder while a program is lowered in the ``with`` block."""
    with _variables(MOSAIC_GPU_DUMP_TO=str(folder)):
        yield


@contextlib.contextmanager
def compiling() -> Iterator[Callable[[], str]]:
    """Let Mosaic print PTX and what ptxas tells while a program is compiled.

    It prints from C++, so the process' own output goes into a file meanwhile. A call of what is yielded returns it.
    """
    flush = ctypes.CDLL(None).fflush
    with _variables(MOSAIC_GPU_DUMP_PTX="1", MOSAIC_GPU_DUMP_PTXAS="1"), tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)

        def printed() -> str:
            flush(None)
            file.seek(0)
            return file.read().decode(errors="replace")

        try:
            yield printed
        finally:
            flush(None)
            os.dup2(kept, 1)
            os.close(kept)


def mosaic_kernels(found: Sequence[Launch], folder: Path, printed: str, known: Mosaic) -> list[Kernel]:
    """Return Mosaic's kernels among a program's launches, and add those that are new to ``known``.

    ``folder`` was that of :func:`lowering`, and ``printed`` comes from :func:`compiling`. What was compiled before in
    this process is not compiled again: ``known`` has it, by hash.
    """
    hashes = dict.fromkeys((x.what.removeprefix("kernel "), x.code or "") for x in found if x.by == "Mosaic")
    texts, codes = of_ptx(printed), of_assembler(printed)
    kernels, counts = [], dict[str, int]()
    sizes = {name: _launched(folder, name) for name, _ in hashes}
    for name, own in hashes:
        place = counts[name] = counts.get(name, -1) + 1  # in the order in which the kernels of a name are lowered
        if own not in known:
            entry = f"{name}_mosaic_gpu_kernel"
            lines = next((each for each in texts if each[0] == entry), None)
            made = next((each for each in codes if each[0] == entry), None)
            if lines is None or made is None:
                raise ValueError(f"the kernel {name} was compiled before in this process, and its code is not known.")
            texts.remove(lines)
            codes.remove(made)
            shared = made[1].shared_bytes + sizes[name][place]
            known[own] = Kernel(name, "Mosaic", *made[1][:2], shared, *lines[1])
        kernels.append(known[own])
    return kernels


def _launched(folder: Path, name: str) -> list[int]:
    """Return the dynamic shared bytes of a name's kernels, in the order in which they were first lowered."""
    paths = folder.glob(f"{name}_*.before_layout_inference.txt")
    numbered = sorted((int(path.name.removeprefix(f"{name}_").split(".")[0]), path) for path in paths)
    texts = dict.fromkeys(path.read_text() for _, path in numbered)
    return [int(size) for text in texts for size in re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", text)]


@contextlib.contextmanager
def _variables(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
