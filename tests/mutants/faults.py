"""The table of faults: one TOML file per package beside this module.

Each entry has a ``name``, a line of ``why`` (what is wrong then, and for whom), a ``file``, the text ``before``, which
stands in the file once, and the text ``after`` that replaces it. ``found_by`` is a test that finds it, where one is
known.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Each imports only those before it.
PACKAGES = ("kernels_pallas", "kvjax", "models", "evals", "train", "benchmarks", "papers")


class Fault(NamedTuple):
    name: str
    why: str
    file: str
    before: str
    after: str
    found_by: str = ""

    def planted(self, text: str) -> str:
        """Return a file's text with the fault in it."""
        if (count := text.count(self.before)) != 1:
            raise ValueError(
                f"fault {self.name!r}: its text stands {count} times in {self.file}, expected once; "
                f"mend tests/mutants/{Path(self.file).parts[0]}.toml"
            )
        return text.replace(self.before, self.after)


def faults() -> list[Fault]:
    """Return all faults, package by package."""
    tables = [tomllib.loads((HERE / f"{package}.toml").read_text("utf-8")) for package in PACKAGES]
    return [Fault(**entry) for table in tables for entry in table["fault"]]
