"""Limits of what programs compiled for a GPU launch, move and spill: gpu_limits.toml, which a test holds up.

`python -m benchmarks gpu_compile --json` lowers a limit where a figure has become better. It never raises one.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from models import files

PATH = Path(__file__).with_name("gpu_limits.toml")
Limits = Mapping[str, Mapping[str, float]]
HEAD = """# What the programs of results/gpu_compile.json must not exceed; tests/benchmarks/test_gpu_limits.py compares.
# `python -m benchmarks gpu_compile --json` lowers a limit where a figure has become better. It never raises one:
# that is done by hand, with the reason in the commit.
"""


class Figure(NamedTuple):
    """A figure with a limit; ``default`` is the limit of what the file does not name, None where it must name it."""

    text: str
    default: float | None
    least: bool = False  # a lower limit


FIGURES = {
    "refused": Figure("1: the program does not compile: none but for", 0),
    "launches": Figure("of a layer", None),
    "moved_mib": Figure("that a layer's launches read and write", None),
    "weights_moved_mib": Figure("of a layer's weights that are only copied or converted: 0 but for", 0),
    "outside_graphs": Figure("of a step's launches that are in no CUDA graph: 0 but for", 0),
    "spilled_bytes": Figure("of a kernel: 0 but for", 0),
    "blocks": Figure("of a kernel that fit on a multiprocessor at once: at least 2 but for", 2, least=True),
}


def figures(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the figures that have limits, by the name of the program, or of kernel and program: the worst of its uses.

    MiB are rounded up to tenths, and launches, of which a mean over layers may have a part, to hundredths.
    """
    found: dict[str, dict[str, float]] = {name: {} for name in FIGURES}
    for r in results:
        if "policy" in r:
            found["refused"][program_name(r)] = int("refused" in r)
        if "layer" in r:
            name, layer, step = program_name(r), r["layer"], r["step"]
            found["launches"][name] = _up(layer["launches"], 100)
            found["moved_mib"][name] = _up(layer["moved_bytes"] / 2**20, 10)
            found["weights_moved_mib"][name] = _up(layer["weights_moved_bytes"] / 2**20, 10)
            found["outside_graphs"][name] = _up(step["launches"] - step["in_graphs"], 100)
        for kernel in r.get("kernels", []):
            name = f"{kernel['name']}, {kernel['by']}, {r['program']}"
            spilled, blocks = found["spilled_bytes"], found["blocks"]
            spilled[name] = max(spilled.get(name, 0), kernel["spilled_bytes"])
            blocks[name] = min(blocks.get(name, math.inf), kernel["blocks"])
    return found


def program_name(record: Mapping[str, Any]) -> str:
    """Return the name of a program in the file of limits."""
    return "{shape} x {batch}, {program}, {policy}".format_map(record)


def _up(value: float, parts: int) -> float:
    rounded = math.ceil(round(value * parts, 3)) / parts
    return int(rounded) if rounded.is_integer() else rounded


def read(path: Path = PATH) -> Limits:
    """Read the file of limits."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def worse(results: Sequence[Mapping[str, Any]], limits: Limits) -> list[str]:
    """Return a sentence for each figure that is worse than its limit, and for each that has none."""
    reasons = {program_name(r): f" ({r['refused']})" for r in results if "refused" in r}
    found = []
    for section, own in figures(results).items():
        _, default, least = FIGURES[section]
        for name, value in own.items():
            limit = limits.get(section, {}).get(name, default)
            if limit is None:
                found.append(f"{name}: {section} is {value:,g} and has no limit.")
            elif (value < limit) if least else (value > limit):
                reason = reasons.get(name, "") if section == "refused" else ""
                found.append(f"{name}: {section} is {value:,g}, its limit {limit:,g}{reason}.")
    return found


def tightened(results: Sequence[Mapping[str, Any]], limits: Limits) -> Limits:
    """Return the limits of these programs: those that there are, or the figures where they are better or new.

    A figure that is worse than a default gets no limit here.
    """
    found: dict[str, dict[str, float]] = {}
    for section, own in figures(results).items():
        _, default, least = FIGURES[section]
        better, each = max if least else min, dict[str, float]()
        for name, value in own.items():
            held = limits.get(section, {}).get(name)
            limit = value if held is None else better(value, held)
            if default is None or (held is not None and better(limit, default) != limit):
                each[name] = limit
        found[section] = each
    return found


def tighten(results: Sequence[Mapping[str, Any]], path: Path = PATH) -> list[str]:
    """Write the tightened limits, and return what :func:`worse` says beside them."""
    limits = tightened(results, read(path) if path.exists() else {})
    with files.replacing(path) as temporary:
        temporary.write_text(text(limits), encoding="utf-8")
    return worse(results, limits)


def text(limits: Limits) -> str:
    """Return limits as the file's text."""
    parts = [HEAD]
    for section, figure in FIGURES.items():
        lines = [f'"{name}" = {limit:g}' for name, limit in limits.get(section, {}).items()]
        parts.append("\n".join([f"[{section}]  # {figure.text}", *lines]) + "\n")
    return "\n".join(parts)
