"""``python -m tests.mutants --tier default --json FILE``: which tests find faults that are planted on purpose.

Each fault is planted in a copy of the checkout. The test that is known to find it runs first, then those that lie
nearest to its file, those that name its module, and the rest of what imports the file's package, until one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.mutants.faults import PACKAGES, ROOT, Fault, faults

TIERS = {"default": "not matrix and not nightly", "both": "not nightly", "all": ""}


class Outcome(NamedTuple):
    name: str
    file: str
    found_by: str  # the first test that failed, or ""
    state: str  # "found", "survived", or "out of time"
    seconds: float


def nearest(fault: Fault) -> list[str]:
    """Return the tests that `make check` runs after a change of the fault's file."""
    select = runpy.run_path(str(ROOT / ".ci/changed-tests"))["tests_of"]
    return [str(path) for path in select(Path(fault.file))]


def naming(fault: Fault) -> list[str]:
    """Return the test files that name the module of a fault, for their lengths most often first."""
    name, package = Path(fault.file).stem, Path(fault.file).parts[0]
    folders = [f"tests/{above}" for above in PACKAGES[PACKAGES.index(package) :]]
    texts = {path: path.read_text("utf-8") for folder in folders for path in (ROOT / folder).glob("**/test_*.py")}
    shares = {path: len(re.findall(rf"\b{name}\b", text)) / (1 + len(text)) for path, text in texts.items()}
    ranked = sorted((path for path in shares if shares[path]), key=lambda path: (-shares[path], path))
    return [str(path.relative_to(ROOT)) for path in ranked]


def downstream(fault: Fault) -> list[str]:
    """Return all tests and examples of what imports the fault's package, nearest first."""
    package = Path(fault.file).parts[0]
    above = PACKAGES[PACKAGES.index(package) :]
    table = ["tests/campaign"] if package in ("kernels_pallas", "kvjax", "models") else []
    others = ["tests/bad_input", "tests/test_repository.py", "tests/test_documents.py"]
    places = [*table, *(f"tests/{name}" for name in above), *above, *others]
    return [place for place in places if (ROOT / place).exists()]


class Copy:
    """A copy of the checkout, in which one fault after the other is planted and taken back."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in self.listed():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    @staticmethod
    def listed() -> list[str]:
        """Return the files that git tracks or would add."""
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.splitlines()

    def _write(self, file: str, text: str) -> None:
        path = self.folder / file
        path.write_text(text, "utf-8")
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):  # found by time and size alone
            stale.unlink()

    def outcome(self, fault: Fault, tier: str, limit: float) -> Outcome:
        """Plant a fault, run tests until one fails, and take the fault back."""
        start, original = time.monotonic(), (self.folder / fault.file).read_text("utf-8")
        self._write(fault.file, fault.planted(original))
        done: list[str] = []
        try:
            known = [fault.found_by] if fault.found_by else []
            for paths in (known, nearest(fault), naming(fault), downstream(fault)):
                left = limit - (time.monotonic() - start)
                code, test = self._first_failure(paths, done, tier, left)
                done += paths if paths is not known else []
                if code is None:
                    return Outcome(fault.name, fault.file, "", "out of time", time.monotonic() - start)
                if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                    return Outcome(fault.name, fault.file, test, "found", time.monotonic() - start)
            return Outcome(fault.name, fault.file, "", "survived", time.monotonic() - start)
        finally:
            self._write(fault.file, original)

    def _first_failure(self, paths: list[str], done: list[str], tier: str, seconds: float) -> tuple[int | None, str]:
        """Run the tests of ``paths`` but those that are done; return pytest's exit code and the first that failed.

        The exit code is None where the time ran out.
        """
        if not (paths := [path for path in paths if path not in done]):
            return pytest.ExitCode.OK, ""
        if seconds <= 0:
            return None, ""
        ignored = [f"--ignore={path}" for path in done]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", TIERS[tier]]
        command += [*ignored, *paths]
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"), "PYTEST_XDIST_WORKER": "gw0"}
        environment.pop("KVJAX_TIER", None)
        with tempfile.TemporaryFile() as out:
            try:
                code = subprocess.run(
                    command, cwd=self.folder, env=environment, stdout=out, stderr=subprocess.STDOUT, timeout=seconds
                ).returncode
            except subprocess.TimeoutExpired:
                return None, ""
            out.seek(0)
            printed = out.read().decode(errors="replace")
        if code == pytest.ExitCode.USAGE_ERROR:
            raise RuntimeError(f"pytest could not run: {printed.strip()[-500:]}")
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
        return code, failed[1] if failed else printed.strip().splitlines()[-1][:200]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--tier", choices=TIERS, default="default", help="both: default and matrix; all: nightly, too")
    parser.add_argument("--only", nargs="+", default=[], help="faults by name, or files or folders")
    parser.add_argument("--seconds", type=float, default=1200, help="the most that one fault may take")
    parser.add_argument("--jobs", type=int, default=2, help="faults at once")
    parser.add_argument("--json", type=Path, help="writes the outcomes; goes on from a file that is there")
    given = parser.parse_args(arguments)

    chosen = [f for f in faults() if not given.only or f.name in given.only or f.file.startswith(tuple(given.only))]
    done = {}
    if given.json and given.json.exists():
        before = [Outcome(**entry) for entry in json.loads(given.json.read_text())["faults"]]
        done = {outcome.name: outcome for outcome in before if outcome.state != "out of time"}  # those are tried again
    lock = threading.Lock()

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        copies = [Copy(Path(folder, str(number))) for number in range(given.jobs)]

        def run(fault: Fault) -> None:
            with lock:
                copy = copies.pop()
            outcome = copy.outcome(fault, given.tier, given.seconds)
            with lock:
                copies.append(copy)
                done[fault.name] = outcome
                print(f"{outcome.seconds:6.0f} s  {outcome.state:11}  {fault.name}: {outcome.found_by}", flush=True)
                if given.json:
                    entries = [outcome._asdict() for outcome in done.values()]
                    written = given.json.with_suffix(".new")  # a run that is killed leaves the file whole
                    written.write_text(json.dumps({"tier": given.tier, "faults": entries}, indent=1))
                    written.replace(given.json)

        list(pool.map(run, [fault for fault in chosen if fault.name not in done]))
    states = [done[fault.name].state for fault in chosen]
    print(", ".join(f"{states.count(state)} {state}" for state in ("found", "survived", "out of time")))
    return int("survived" in states)


if __name__ == "__main__":
    sys.exit(main())
