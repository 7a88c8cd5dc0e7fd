"""`python -m benchmarks NAME`: one subcommand per benchmark."""

from __future__ import annotations

import importlib
from typing import Any

from models import commands
from models.commands.subcommands import run_one

NAMES = (
    "accelerator", "cpu", "decode", "fixed_memory", "gpu_compile", "kernels", "memory", "peers", "prefill", "questions",
    "report", "show", "soak", "tpu_compile",
)  # fmt: skip
BENCHMARKS: dict[str, Any] = {name: importlib.import_module(f"benchmarks.{name}") for name in NAMES}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark that the first argument names, and return the exit code."""
    flags = commands.parser("benchmarks", "benchmarks", description="Speed and memory of kvjax.")
    return run_one(flags, "benchmarks", BENCHMARKS, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
