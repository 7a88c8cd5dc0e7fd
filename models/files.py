"""Files that are read whole and written whole, and the user's folder of them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from models import hosts

LOCK_FILE = ".lock"


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return kvjax's folder in the user's cache, or in the folder that XDG_CACHE_HOME names; it need not exist."""
    try:
        return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvjax"
    except RuntimeError:
        raise FileNotFoundError(
            "the user's cache folder is unknown, as there is no home folder; name one with XDG_CACHE_HOME."
        ) from None


def read_text(path: str | Path, what: str) -> str:
    """Read a UTF-8 file of some kind, or a pipe such as ``<(zcat book.gz)``, which may be read more than once."""
    try:
        return decoded(read_bytes(path), str(path))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {what} file {path}; name one that exists.") from None
    except IsADirectoryError:
        raise ValueError(f"the {what} file {path} is a folder; name a file.") from None


def decoded(content: bytes, name: str) -> str:
    """Decode what was read from ``name``, as UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text (byte {error.start}); convert it first.") from None


def read_bytes(path: str | Path) -> bytes:
    """Read the bytes of a file. A pipe can be read only once, so its bytes are kept."""
    found = os.stat(path)
    if stat.S_ISREG(found.st_mode):
        return Path(path).read_bytes()
    return _of_a_pipe(str(path), found.st_dev, found.st_ino)


@functools.lru_cache(maxsize=16)
def _of_a_pipe(path: str, device: int, inode: int) -> bytes:
    return Path(path).read_bytes()


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary file that becomes ``path`` at the end, or is deleted if an exception is raised.

    A link stays a link: the file that it points to is replaced. A path that is not a regular file (a pipe, a device, a
    stream of this process such as /dev/stdout) is not replaced: the whole content is written into it at the end. Of
    several processes that run together, only the first one writes.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from models.files import replacing
        >>> target = Path(tempfile.mkdtemp()) / "note.txt"
        >>> with replacing(target) as temporary:
        ...     _ = temporary.write_text("whole")
        >>> target.read_text()
        'whole'
    """
    path = Path(path)
    if not hosts.first():
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


def write_files(folder: Path, files: Mapping[str, bytes], stale: Iterable[str] = ()) -> None:
    """Write files that belong together: all are complete under temporary names before the first gets its own.

    Args:
        folder: created if it does not exist.
        files: the contents by name.
        stale: old files that would be read beside the new ones or instead of them; they are deleted at the end.
    """
    if not hosts.first():
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
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another run writes into {folder}; wait until it ends, or name another folder.") from None
    except OSError:  # a file system without locks
        return
