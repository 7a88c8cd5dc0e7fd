"""`python -m benchmarks NAME`: one subcommand per benchmark."""

from __future__ import annotations

import importlib
from typing import Any

from models import commands

NAMES = (
    "accelerator", "butler", "cpu", "decode", "fixed_memory", "kernels", "launches", "memory", "peers", "prefill",
    "questions", "report", "selection", "sharing", "soak", "tpu_compile",
)  # fmt: skip
BENCHMARKS: dict[str, Any] = {name: importlib.import_module(f"benchmarks.{name}") for name in NAMES}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark that the first argument names, and return the exit code."""
    flags = commands.Parser(prog="python -m benchmarks", description="Speed and memory of kvjax.")
    names = flags.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, module in BENCHMARKS.items():
        summary = str(module.__doc__).splitlines()[0]
        made = names.add_parser(name, help=summary, description=summary)
        module.add_flags(made)
        commands.add_import_flag(made)
    chosen = flags.parse_args(arguments)

    def command() -> None:
        commands.check_extras(arguments)
        BENCHMARKS[chosen.name].command(chosen)

    return commands.run(command, f"benchmarks {chosen.name}")


if __name__ == "__main__":
    raise SystemExit(main())
