"""The tables of a results file, as Markdown.

A file of benchmarks/results is found by its name alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import measure, report


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    flags.add_argument("files", type=Path, nargs="+", metavar="FILE", help="results files, such as gpu_compile.json")


def command(flags: argparse.Namespace) -> None:
    """Print the tables of each file."""
    told = set[str]()
    for path in flags.files:
        for document in report.read(path if path.exists() else measure.RESULTS / path):
            print(report.section(document, told))
