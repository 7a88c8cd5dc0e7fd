"""The evaluations that `python -m evals` runs, and where other packages add theirs.

An evaluation is a module, or anything with the same attributes: a docstring whose first line says what it measures,
``EXAMPLES``, ``add_flags(parser)`` and ``command(flags)``. With ``make_groups`` and ``check``, a sweep may have it too.
docs/how-to/add-an-eval.md says what each of them does. The entry-point group of other packages is
``kvjax.evaluations``; the name of the entry point is the name of the subcommand.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

from kvjax._src.checks import shown
from kvjax._src.registry import Registry

# Those of this package, in the order of the help, and the modules of those that are not named like theirs.
NAMES = (
    "needle", "questions", "ruler", "longbench", "infinitebench", "booksum", "generation", "mathematics", "lm_eval",
    "regret", "perplexity", "sweep", "study", "report", "view",
)  # fmt: skip
MODULES = {"lm_eval": "evals.harness", "report": "evals.page"}
PARTS = ("__doc__", "EXAMPLES", "add_flags", "command")


def _whole(name: str, evaluation: Any) -> Any:
    if missing := [part for part in PARTS if getattr(evaluation, part, None) is None]:
        raise ValueError(f"{shown(evaluation)} lacks {', '.join(missing)}, which an evaluation has.")
    return evaluation


EVALUATIONS: Registry[Any] = Registry("evaluation", "kvjax.evaluations", _whole)


def register(name: str, evaluation: Any) -> None:
    """Add an evaluation under a name, which becomes a subcommand of `python -m evals`.

    Raises:
        ValueError: another module or an installed package has the name, or the evaluation lacks a part.
    """
    is_module = isinstance(evaluation, types.ModuleType)
    EVALUATIONS.add(name, evaluation, source=evaluation.__name__ if is_module else evaluation.__module__)


def with_own() -> Registry[Any]:
    """Return the registry with the evaluations of this package in it, whose modules are imported now at the latest."""
    for name in NAMES:
        if name not in EVALUATIONS:
            register(name, importlib.import_module(MODULES.get(name, f"evals.{name}")))
    return EVALUATIONS
