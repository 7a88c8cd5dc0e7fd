"""Files that are read whole and written whole, and the user's folder of them."""

from __future__ import annotations

import codecs
import contextlib
import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from kvjax._src.files import first, locked, replacing

LOCK_FILE = ".lock"
# What files begin with that people take for text, and how to get their text.
OTHER_FILES = {
    b"%PDF": ("a PDF", "take its text out first: pdftotext FILE.pdf FILE.txt"),
    b"PK\x03\x04": ("a zip file, as .docx and .epub are", "take its text out first: pandoc -t plain FILE -o FILE.txt"),
    b"\x1f\x8b": ("gzip-compressed", "unpack it first: gunzip FILE.gz"),
    b"\xff\xfe": ("UTF-16", "convert it first: iconv -f UTF-16 -t UTF-8 FILE > FILE.txt"),
    b"\xfe\xff": ("UTF-16", "convert it first: iconv -f UTF-16 -t UTF-8 FILE > FILE.txt"),
}


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return kvjax's folder in the user's cache, or in the folder that XDG_CACHE_HOME names; it need not exist."""
    try:
        return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvjax"
    except RuntimeError:
        raise FileNotFoundError("there is no home folder for the cache; name one with XDG_CACHE_HOME.") from None


def read_text(path: str | Path, what: str) -> str:
    """Read a UTF-8 file of some kind, or a pipe such as ``<(zcat book.gz)``, which holds its text once."""
    try:
        return decoded(Path(path).read_bytes(), str(path))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {what} file {path}; name one that exists.") from None
    except IsADirectoryError:
        raise ValueError(f"the {what} file {path} is a folder; name a file.") from None


def decoded(content: bytes, name: str) -> str:
    """Decode what was read from ``name``, as UTF-8."""
    for start, (kind, advice) in OTHER_FILES.items():
        if content.startswith(start):
            raise ValueError(f"{name} is {kind}, not UTF-8 text; {advice}.")
    try:
        text = content.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        advice = f"convert it first, such as iconv -f LATIN1 -t UTF-8 {name} > text.txt"
        raise ValueError(f"{name} is not UTF-8 text (byte {error.start}); {advice}.") from None
    if "\0" in text:
        raise ValueError(f"{name} is a binary file: it has null bytes (byte {text.index(chr(0))}); give its text.")
    return text


def first_of(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the first file of several that stand for each other, None without one; warn of others that are there."""
    found = [name for name in names if (folder / name).is_file()]
    if len(found) > 1:
        warnings.warn(
            f"{folder / found[0]} is read, as transformers does, and not {' and '.join(found[1:])} beside it; delete "
            "what is out of date.",
            stacklevel=2,
        )
    return folder / found[0] if found else None


def warn_of_unfinished(folder: Path) -> None:
    """Warn if a folder is that of a training run that has not ended: what it holds is of its last checkpoint."""
    run, checkpoints = folder / "run.json", folder / "checkpoints"
    if not run.is_file() or not checkpoints.is_dir() or (folder / "summary.json").exists():
        return
    settings = (json_object(run.read_bytes()) or {}).get("settings", {})
    try:
        steps = f" of {math.ceil(settings['tokens'] / (settings['batch'] * settings['seq_len']))}"
    except (KeyError, TypeError, ZeroDivisionError):
        steps = ""
    done = max((int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal()), default=0)
    warnings.warn(
        f"{folder} is of a training run that has not ended: it holds the checkpoint of step {done}{steps}; run the "
        "same command again to finish it.",
        stacklevel=3,
    )


def write_files(folder: Path, files: Mapping[str, bytes], stale: Iterable[str] = ()) -> None:
    """Write files that belong together: all are complete under temporary names before the first gets its own.

    Args:
        folder: created if it does not exist.
        files: the contents by name.
        stale: old files that would be read beside the new ones or instead of them; they are deleted at the end.
    """
    if not first():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        for name, content in files.items():
            stack.enter_context(replacing(folder / name)).write_bytes(content)
    for name in stale:
        (folder / name).unlink(missing_ok=True)


def write_json(path: str | Path, data: Any) -> None:
    """Write a JSON file completely or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(to_json(data))


def to_json(data: Any, indent: int = 1) -> str:
    """Return JSON in the layout of all our files; those that other libraries read too have an indent of 2."""
    return json.dumps(data, indent=indent, allow_nan=False) + "\n"


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """Return the object that a JSON text holds; None if it holds none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def check_folder(folder: Path) -> None:
    """Check that a folder can be written into, or made, before the long work starts."""
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not above.is_dir():
        what = "it" if above == folder else above
        raise ValueError(f"cannot write into {folder}: {what} is a file; name another folder.")
    if not os.access(above, os.W_OK):
        raise PermissionError(f"cannot write into {above}: permission denied; name another folder.")


def check_outputs(paths: Sequence[str | Path | None]) -> None:
    """Check that the output files can be written, before the long work starts."""
    for path in paths:
        if path is not None:
            with contextlib.suppress(_Probe), replacing(path):
                raise _Probe


class _Probe(Exception):
    pass


def lock(file: IO[Any], folder: Path) -> None:
    """Lock a folder for this process until ``file``, a file in it that is open for writing, is closed."""
    if locked(file) is False:
        raise ValueError(f"another run writes into {folder}; wait until it ends, or name another folder.")
