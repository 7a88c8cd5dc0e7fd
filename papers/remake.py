"""Makes the figures under docs/results again, as papers/remake.toml lists them, and the pages that show them.

Each table of that file is named by what it makes, a file or a folder. ``run`` is a module of this checkout with its
first arguments, or ``program`` a short program; ``minutes`` are core-minutes on two cores; every other entry is a flag.
A list is one argument, joined by commas; a text of several words is several arguments; one that begins with a dot is
the table's name with another ending. JSON files are written by ``--json``, or are what the command prints (``stdout``).
``like`` takes the entries of another table, ``benchmark`` marks what is run with --benchmarks only.

What there is already is not made again: a folder, and a JSON file whose code had no changes. Nor
is data or a network that none of the commands to be run names. So a killed run goes on with the file that it was at.
Run it from a clean, committed checkout, because each file names its commit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evals import sweep, texts
from models import commands, files

ROOT = Path(__file__).resolve().parent.parent
TABLES = Path(__file__).with_suffix(".toml")
OWN = ("run", "program", "minutes", "stdout", "benchmark")
LAST = (["-m", "benchmarks", "report"], ["docs/tables.py"], ["docs/tables.py", "--check"])


def read(path: Path = TABLES) -> dict[str, dict[str, Any]]:
    """Read the tables, each with the entries of the one that it is like.

    Raises:
        ValueError: a table is like one that does not come before it.
    """
    tables: dict[str, dict[str, Any]] = {}
    for name, table in sweep.read(path).items():
        other = table.pop("like", None)
        if other is not None and other not in tables:
            raise ValueError(f"{path}: {name} is like {other!r}; expected a table before it.")
        tables[name] = {**tables.get(other, {}), **table}
    return tables


def arguments(name: str, table: Mapping[str, Any]) -> list[str]:
    """Return the arguments of Python that make a file or a folder."""
    if "program" in table:
        return ["-c", table["program"]]
    line = ["-m", *table["run"].split()]
    for flag, value in table.items():
        if flag in OWN:
            continue
        line.append(f"--{flag}")
        if isinstance(value, list):
            line.append(",".join(map(str, value)))
        elif isinstance(value, str):
            value = value.replace("{texts}", str(texts.place("").parent))
            line += [str(Path(name).with_suffix(value))] if value.startswith(".") else value.split()
        elif value is not True:
            line.append(str(value))
    return line if "json" in table or not name.endswith(".json") else [*line, "--json", name]


def is_there(path: Path) -> bool:
    """Return whether a file or folder need not be made: a JSON file says how it was made, by code without changes."""
    if (path / "run.json").exists():  # of a training run
        return (path / "summary.json").exists()
    if path.suffix != ".json" or not path.exists():
        return path.exists()
    data = json.loads(files.read_text(path, "JSON"))
    return bool("fingerprints" in data and data.get("command")) and not str(data.get("commit")).endswith("changes")


def missing(tables: Mapping[str, Mapping[str, Any]], benchmarks: bool) -> dict[str, list[str]]:
    """Return what is to be made, and the arguments that make it: results, and before them what their commands name."""
    chosen = {name: table for name, table in tables.items() if benchmarks or not table.get("benchmark")}
    absent = {name: arguments(name, table) for name, table in chosen.items() if not is_there(ROOT / name)}
    needed: dict[str, list[str]] = {}
    for name in reversed(absent):
        if "results/" in name or any(name in line for line in needed.values()):
            needed[name] = absent[name]
    return dict(reversed(needed.items()))


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument(
        "--benchmarks", action="store_true",
        help="make benchmarks/results, too: on a quiet machine; peers and tpu_compile need extras",
    )  # fmt: skip
    flags.add_argument("--dry-run", action="store_true", help="print the commands that are left, and run none")


def command(flags: argparse.Namespace) -> None:
    """Make what is not there yet, then the pages.

    Raises:
        ValueError: a command failed; the others have run.
    """
    tables, failed = read(), []
    for name, line in missing(tables, flags.benchmarks).items():
        table = tables[name]
        about = f", about {table['minutes']} core-minutes" if "minutes" in table else ""
        print(f"{name}{about}: {commands.shell_line(['python', *line])}", flush=True)
        if flags.dry_run:
            continue
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        output = subprocess.PIPE if table.get("stdout") else None
        ended = subprocess.run([sys.executable, *line], cwd=ROOT, stdout=output)
        if ended.returncode:
            failed.append(name)
        elif output:
            (ROOT / name).write_bytes(ended.stdout)
    for line in () if flags.dry_run else LAST[not flags.benchmarks :]:
        if subprocess.run([sys.executable, *line], cwd=ROOT).returncode:
            failed.append(line[-1])
    if failed:
        raise ValueError(f"no figures of {', '.join(failed)}; see the errors above, mend them, and run this again.")
