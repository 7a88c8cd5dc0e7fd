"""`python -m evals NAME`: one subcommand per evaluation."""

from __future__ import annotations

import sys
from typing import Any

from models import commands
from models.commands.subcommands import run_one

with commands.extra("eval", "evals"):
    from evals import evaluations

    EVALUATIONS = evaluations.with_own()
EXAMPLES = """examples:
  python -m evals needle --policies full,snapkv,snapkv+caote --budgets 40,128 --json out.json --plot out.png
  python -m evals ruler --lengths 1024 --policies full,snapkv+caote --budgets 0.25 --when prompt --out runs/ruler
  python -m evals NAME --help
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the evaluation that the first argument names, and return the exit code."""
    made = commands.parser(
        "kvjax-eval", "evals", description="Evaluations of models under a KV budget.", examples=EXAMPLES
    )
    early = commands.Parser(prog=made.prog, add_help=False, allow_abbrev=False)
    early.parse_known_args(arguments)  # before the subcommands are known: a module may register one
    words = sys.argv[1:] if arguments is None else arguments
    modules: dict[str, Any] = {}
    for name in dict.fromkeys([*evaluations.NAMES, *EVALUATIONS.names()]):
        if name in EVALUATIONS or name in words:
            try:
                modules[name] = EVALUATIONS.find(name)
            except (ValueError, ImportError) as error:
                made.error(commands.sentence(error).rstrip("."))
        else:  # an installed package's, which is not imported for its help
            modules[name] = f"From {EVALUATIONS.package(name)}."
    return run_one(made, "evals", modules, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
