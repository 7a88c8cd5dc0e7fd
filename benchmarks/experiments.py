"""Experiments on a device, each with what was predicted before it ran and what followed from it.

The figures are typed from the device's output; the programs that made them are named, and are not part of the project.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evals import report

LEGEND = """The first nine are a decode step of 8 layers of the 8B shape with its head, 8,192 slots, batch 1 and no
policy unless they say so. joined: one matrix for query, key and value, and one for gate and up. unrolled: no loop over
the layers. cuBLAS: with --xla_gpu_enable_triton_gemm=false."""
COLUMNS = {"experiment": "experiment", "predicted": "predicted", "measured": "measured", "follows": "what follows"}


def heading(settings: dict[str, Any]) -> str:
    """Return the title of the section."""
    return f"Experiments on an {settings['device']}"


def tables(results: Sequence[dict[str, Any]]) -> dict[str, tuple[report.Table, str]]:
    """Return the table, with one line per experiment, and its legend by title."""
    lines = [tuple(r[name] for name in COLUMNS) for r in results]
    return {"Predicted and measured": (report.Table(tuple(COLUMNS.values()), lines, left=4), LEGEND)}
