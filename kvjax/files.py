"""Files that are written whole or not at all, by the first of several processes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax


def first() -> bool:
    """Return whether this is the process that prints and writes: the only one, or the first of several."""
    # A process by itself is not asked for its number: that would take hold of the devices.
    return not jax.distributed.is_initialized() or jax.process_index() == 0


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary file that becomes ``path`` at the end, or is deleted if an exception is raised.

    A link stays a link: the file that it points to is replaced. A path that is not a regular file (a pipe, a device, a
    stream of this process such as /dev/stdout) is not replaced: the whole content is written into it at the end. Of
    several processes that run together, only the first one writes.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from kvjax.files import replacing
        >>> target = Path(tempfile.mkdtemp()) / "note.txt"
        >>> with replacing(target) as temporary:
        ...     _ = temporary.write_text("whole")
        >>> target.read_text()
        'whole'
    """
    path = Path(path)
    if not first():
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / path.name
        return
    stream = _stream(path)
    target = path if stream is not None or not path.is_symlink() else Path(os.path.realpath(path))
    straight = stream is not None or (target.exists() and not target.is_file())
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {target.parent} does not exist; make it first.")
    if target.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder; name a file.")
    if straight and not os.access(target, os.W_OK):
        raise PermissionError(f"cannot write into {path}: permission denied; name another file.")
    # Cut, as a long name would leave no room for the part that makes the temporary name unique.
    handle, name = tempfile.mkstemp(
        dir=None if straight else target.parent, prefix=f".{target.stem[:40]}.", suffix=target.suffix[-10:]
    )
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        if straight:
            _pour(temporary, target if stream is None else os.dup(stream))
            temporary.unlink()
        else:
            os.chmod(temporary, _mode(target))  # mkstemp's files are private; outputs should have the usual mode
            os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _stream(path: Path) -> int | None:
    """Return the descriptor of the open stream that a path such as /dev/stdout stands for; None for other paths."""
    named = re.fullmatch(r"/dev/(stdout|stderr)|/(?:dev|proc/self)/fd/(\d+)", str(path))
    return None if named is None else {"stdout": 1, "stderr": 2}.get(named[1]) or int(named[2])


def _mode(path: Path) -> int:
    """Return the permissions of a file, or those of a new one if it does not exist."""
    if path.exists():
        return stat.S_IMODE(path.stat().st_mode)
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def _pour(source: Path, into: Path | int) -> None:
    sys.stdout.flush()  # what was printed before comes first
    with source.open("rb") as content, open(into, "wb") as out:
        shutil.copyfileobj(content, out)
