"""Files that are written whole or not at all, by the first of several processes."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


def first() -> bool:
    """Return whether this is the process that prints and writes: the only one, or the first of several."""
    import jax

    # A process by itself is not asked for its number: that would take hold of the devices.
    return not jax.distributed.is_initialized() or jax.process_index() == 0


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary file that becomes ``path`` at the end, or is deleted if an exception is raised.

    A link stays a link: the file that it points to is replaced. A path that is not a regular file (a pipe, a device, a
    stream of this process such as /dev/stdout) is not replaced: the whole content is written into it at the end. Of
    several processes that run together, only the first one writes. The temporary file that a killed process left is
    deleted when the same file is written again.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from kvjax._src.files import replacing
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
    beside = Path(tempfile.gettempdir()) if straight else target.parent
    # Cut, as a long name would leave no room for the part that makes the temporary name unique.
    prefix, suffix = f".{target.stem[:40]}.unfinished-", target.suffix[:16]
    _delete_abandoned(beside, prefix, suffix)
    handle, name = tempfile.mkstemp(dir=beside, prefix=prefix, suffix=suffix)
    temporary = Path(name)
    try:
        with open(handle, "wb") as held:  # its lock says that this process is alive
            if locked(held) is None:
                held.close()  # Windows replaces no file that is open
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


def locked(file: IO[Any]) -> bool | None:
    """Lock a file until it is closed, and tell whether that could be done; None where files have no locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


def _delete_abandoned(folder: Path, prefix: str, suffix: str) -> None:
    """Delete the temporary files of writers that were killed: no process holds their locks."""
    for path in folder.glob(f"{glob.escape(prefix)}????????{glob.escape(suffix)}"):
        with contextlib.suppress(OSError), path.open("r+b") as file:
            if locked(file):
                path.unlink()


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
