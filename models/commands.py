"""What command lines share: lists and budgets as text, errors as one sentence, files that are never half written."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any


def run(command: Callable[[], None], name: str) -> int:
    """Runs a command; bad input ends in one sentence and exit code 2, Ctrl-C in 130.

    Example:
        >>> from models.commands import run
        >>> run(lambda: None, "kvjax")
        0
    """
    try:
        command()
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    return 0


def split_list(text: str) -> list[str]:
    """Splits at commas outside parentheses and quotes.

    Example:
        >>> from models.commands import split_list
        >>> split_list("full, h2o+protect(sinks=4,recent=0.5)")
        ['full', 'h2o+protect(sinks=4,recent=0.5)']
    """
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def parse_budget(text: str) -> int | float:
    """A budget from a command line: slots per head, or a ratio of the prompt.

    Raises:
        ValueError: neither an integer nor a number in (0, 1].

    Example:
        >>> from models.commands import parse_budget
        >>> parse_budget("512"), parse_budget("0.25")
        (512, 0.25)
    """
    try:
        return int(text)
    except ValueError:
        pass
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio <= 1:
        raise ValueError(f"the budget {text!r} is neither slots per head (an int) nor a ratio of the prompt in (0, 1].")
    return ratio


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary name beside ``path`` that becomes ``path`` when all went well, and vanishes otherwise.

    Raises:
        FileNotFoundError: the folder does not exist.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from models.commands import replacing
        >>> target = Path(tempfile.mkdtemp()) / "note.txt"
        >>> with replacing(target) as temporary:
        ...     _ = temporary.write_text("whole")
        >>> target.read_text()
        'whole'
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist; make it first.")
    if path.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder; name a file.")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(name, 0o666 & ~umask)  # mkstemp's files are private; ours are like any other
    try:
        yield Path(name)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def check_outputs(paths: Sequence[str | Path | None]) -> None:
    """Complains about output files that cannot be written before the long work starts, not after it."""
    for path in paths:
        if path is not None:
            with contextlib.suppress(_Probe), replacing(path):
                raise _Probe


class _Probe(Exception):
    pass


def write_json(path: str | Path, data: Any) -> None:
    """Writes JSON under a temporary name and renames it."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
