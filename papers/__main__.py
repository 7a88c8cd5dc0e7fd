"""`python -m papers NAME`: one subcommand per experiment."""

from __future__ import annotations

from models import commands
from models.commands.subcommands import run_one
from papers import remake
from papers.answers import questions
from papers.caote import fidelity
from papers.choices import command as choices
from papers.debian import texts
from papers.kivi import rounding
from papers.predictor import coref, figures, flops, selection

EXPERIMENTS = {
    "predictor": figures, "coref": coref, "choices": choices, "fidelity": fidelity, "flops": flops,
    "selection": selection, "rounding": rounding, "texts": texts,
    "questions": questions, "remake": remake,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the experiment that the first argument names, and return the exit code."""
    flags = commands.parser("papers", "papers", description="The experiments behind the pages.")
    return run_one(flags, "papers", EXPERIMENTS, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
