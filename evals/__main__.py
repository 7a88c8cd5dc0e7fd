"""`python -m evals NAME`: one subcommand per evaluation."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from models import commands
from models.commands import distributed

# In the order of the help.
NAMES = (
    "needle", "ruler", "longbench", "infinitebench", "booksum", "generation", "mathematics", "lm_eval", "regret",
    "perplexity", "sweep", "study", "report", "view",
)  # fmt: skip
ELSEWHERE = {"lm_eval": "evals.harness", "report": "evals.page"}
EVALUATIONS: dict[str, ModuleType] = {}
with commands.extra("eval", "evals"):
    from evals import evaluations

    for name in NAMES:
        EVALUATIONS[name] = importlib.import_module(ELSEWHERE.get(name, f"evals.{name}"))
        evaluations.register(name, EVALUATIONS[name])
EXAMPLES = """examples:
  python -m evals needle --policies full,snapkv,snapkv+caote --budgets 40,128 --json out.json --plot out.png
  python -m evals ruler --lengths 1024 --policies full,snapkv+caote --budgets 0.25 --when prompt --out runs/ruler
  python -m evals NAME --help
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the evaluation that the first argument names, and return the exit code."""
    flags = commands.parser(
        "kvjax-eval", "evals", description="Evaluations of models under a KV budget.", examples=EXAMPLES
    )
    commands.add_import_flag(flags)
    commands.add_cache_flag(flags)
    early = commands.Parser(prog=flags.prog, add_help=False, allow_abbrev=False)
    commands.add_import_flag(early)
    early.parse_known_args(arguments)  # before the subcommands are known: a module may register one
    names = flags.add_subparsers(dest="name", required=True, metavar="NAME")
    words = sys.argv[1:] if arguments is None else arguments
    known = evaluations.EVALUATIONS
    for name in dict.fromkeys([*EVALUATIONS, *known.names()]):
        if name not in known and name not in words:  # an installed package's, which is not imported for its help
            names.add_parser(name, help=f"From {known.package(name)}.")
            continue
        try:
            found: Any = known.find(name)
        except (ValueError, ImportError) as error:
            flags.error(commands.sentence(error).rstrip("."))
        summary = str(found.__doc__).splitlines()[0]
        made = names.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=commands.epilog(found.EXAMPLES.replace("python -m evals", flags.prog)),
            formatter_class=flags.formatter_class,
        )
        found.add_flags(made)
        commands.add_import_flag(made)
    parsed = flags.parse_args(arguments)
    commands.keep_compiled(vars(parsed).pop("compilation_cache"))
    return commands.run(lambda: _run(known[parsed.name], parsed, words), f"evals {parsed.name}")


def _run(evaluation: Any, flags: argparse.Namespace, words: Sequence[str]) -> None:
    commands.check_extras(words)
    if "coordinator" in flags:
        distributed.join(flags)
    evaluation.command(flags)


if __name__ == "__main__":
    raise SystemExit(main())
