"""`python -m evals NAME`: one command, an evaluation each."""

from __future__ import annotations

import argparse

from evals import (
    ablation,
    butler_figures,
    coref,
    fidelity,
    harness,
    infinitebench,
    longbench,
    needle,
    page,
    perplexity,
    ruler,
    sweep,
    view,
)
from models import commands

EVALUATIONS = {
    "needle": needle,
    "ruler": ruler,
    "longbench": longbench,
    "infinitebench": infinitebench,
    "lm_eval": harness,
    "fidelity": fidelity,
    "ablation": ablation,
    "coref": coref,
    "perplexity": perplexity,
    "butler": butler_figures,
    "sweep": sweep,
    "report": page,
    "view": view,
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the evaluation that the first argument names; returns the exit code."""
    flags = argparse.ArgumentParser(prog="python -m evals", description="Evaluations of models under a KV budget.")
    names = flags.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, module in EVALUATIONS.items():
        summary = str(module.__doc__).splitlines()[0]
        module.add_flags(
            names.add_parser(
                name,
                help=summary,
                description=summary,
                epilog=module.EXAMPLES,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    parsed = flags.parse_args(arguments)
    return commands.run(lambda: EVALUATIONS[parsed.name].command(parsed), f"evals {parsed.name}")


if __name__ == "__main__":
    raise SystemExit(main())
