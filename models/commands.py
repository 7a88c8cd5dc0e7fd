"""Shared by all command lines: lists and budgets as text, errors on one line, files that are written whole."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import json
import os
import re
import shlex
import shutil
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import jax

import kvjax
from kvjax import install
from kvjax.checks import check_share_or_tokens
from kvjax.quantise import check_dtypes
from models import hosts

LOCK_FILE = ".lock"
EXIT_CODES = """exit codes:
  0    done
  2    bad input, a file that can't be read or written, or a full disk; one line on standard error says which
  3    another process of the same run has ended (--coordinator)
  130  interrupted by Ctrl-C
"""


def shell_line(words: Iterable[str]) -> str:
    """Return words as a line for a shell; a word with single quotes in it stands in double quotes where it can.

    Example:
        >>> from models import commands
        >>> print(commands.shell_line(["--policy", "tova(heads='group')"]))
        --policy "tova(heads='group')"
    """
    return " ".join(
        f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word) for word in words
    )


class Begun(NamedTuple):
    """A command line, and the time.monotonic() at which it began."""

    command: str
    time: float


class Parser(argparse.ArgumentParser):
    """A parser that reports an error on one line. The flags that it returns have a :class:`Begun` as ``begun``."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._asked(parsed).error(f"unrecognized arguments: {' '.join(unknown)}")
        words = sys.argv[1:] if args is None else args
        parsed.begun = Begun(f"{self.prog} {shell_line(words)}".rstrip(), time.monotonic())
        return parsed

    def _asked(self, parsed: argparse.Namespace) -> argparse.ArgumentParser:
        """Return the parser of the subcommand that was asked for, whose help says which arguments there are."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return action.choices.get(getattr(parsed, action.dest, None) or "", self)
        return self

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        for argument in sys.argv[1:] if args is None else args:
            try:
                argument.encode()
            except UnicodeEncodeError:
                self.error(f"the argument {argument[:60]!a} is not UTF-8 text")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help.\n")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help texts that name every default that they do not name already."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        named = "default" in text or text is argparse.SUPPRESS or not action.option_strings
        if named or action.default in (None, False, "", argparse.SUPPRESS):
            return action.help
        return f"{text} (default: %(default)s)".strip()


def parser(script: str, module: str, *, description: str, examples: str = "") -> Parser:
    """Build a command's parser, with --version, and with examples and exit codes at the end of its help.

    Args:
        script: the command's name where the package is installed. The help shows this name if it was called by it.
        module: the module of the same command, as the examples call it by ``python -m module``.

    Example:
        >>> from models.commands import parser
        >>> flags = parser(
        ...     "kvjax-eval", "evals", description="Evaluations.",
        ...     examples="python -m evals needle"
        ... )
        >>> flags.prog, flags.format_help().splitlines()[-1]
        ('python -m evals', '  130  interrupted by Ctrl-C')
    """
    program = script if Path(sys.argv[0]).stem == script else f"python -m {module}"
    flags = Parser(
        prog=program,
        description=description,
        epilog=epilog(examples.replace(f"python -m {module}", program)),
        formatter_class=_Help,
    )
    flags.add_argument("--version", action="version", version=f"kvjax {kvjax.__version__}")
    return flags


def epilog(examples: str) -> str:
    """Return the end of a command's help: the examples and the exit codes.

    Example:
        >>> from models.commands import epilog
        >>> epilog("examples:\\n  python -m evals needle\\n").splitlines()[3]
        'exit codes:'
    """
    return f"{examples.rstrip()}\n\n{EXIT_CODES}".lstrip()


def run(command: Callable[[], None], name: str) -> int:
    """Run a command and return its exit code: 2 for bad input, after one line that says why, and 130 for Ctrl-C.

    If the command runs in several processes and fails in this one, the process ends here, and with it the others.

    Example:
        >>> from models.commands import run
        >>> run(lambda: None, "kvjax")
        0
    """
    try:
        code = _run(command, name)
    except BaseException:
        if not hosts.several():
            raise
        traceback.print_exc()
        code = 1
    if code and hosts.several():
        hosts.leave(code)
    return code


def _run(command: Callable[[], None], name: str) -> int:
    try:
        command()
    except KeyboardInterrupt as error:
        print(f"\n{name}: {error if error.args else 'interrupted.'}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has closed it, as `| head` does
        if hosts.several():  # an orderly end would wait for the others, which wait for this process
            hosts.leave(0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError) as error:
        print(f"{name}: error: {sentence(error)}", file=sys.stderr)
        return 2
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            if not hosts.several() or not hosts.is_of_the_lost(error):
                raise
            hosts.leave_the_lost(name, error)
        print(
            f"{name}: error: out of memory; give a smaller budget, block or batch, or more devices with --mesh.",
            file=sys.stderr,
        )
        return 2
    return 0


def call(parser: argparse.ArgumentParser, command: Callable[[Any], None], name: str, arguments: Any = None) -> int:
    """Parse a command line with the flag of :func:`add_cache_flag`, run the command, and return the exit code.

    Example:
        >>> from models import commands
        >>> flags = commands.parser("kvjax-eval", "evals", description="Evaluations.")
        >>> commands.add_cache_flag(flags)
        >>> commands.call(
        ...     flags, lambda given: print(sorted(vars(given))), "evals",
        ...     ["--compilation-cache", "off"]
        ... )
        ['begun']
        0
    """
    flags = parser.parse_args(arguments)
    keep_compiled(vars(flags).pop("compilation_cache"))

    def checked() -> None:
        check_extras(arguments)
        command(flags)

    return run(checked, name)


def extras_of(words: Sequence[str]) -> list[str]:
    """Return the extras that a command line needs: for its picture, and for a model in a GGUF file.

    Example:
        >>> from models.commands import extras_of
        >>> extras_of(["needle", "--model", "model.gguf", "--plot=out.png"])
        ['plot', 'gguf']
    """
    needs = {
        "plot": any(word.partition("=")[0] == "--plot" for word in words),
        "gguf": any(word.lower().endswith(".gguf") for word in words),
    }
    return [name for name, needed in needs.items() if needed]


def check_extras(arguments: Sequence[str] | None) -> None:
    """Check that the extras of a command line are installed, before any work; None for this process's arguments.

    Raises:
        ImportError: packages are missing; the message has all of them, and one command that installs them.
    """
    missing = install.missing(*extras_of(sys.argv[1:] if arguments is None else arguments))
    if missing:
        raise ImportError(install.needed(itertools.chain(*missing.values()), *missing))


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return kvjax's folder in the user's cache; it need not exist.

    Raises:
        FileNotFoundError: the user has no home, and XDG_CACHE_HOME names no other folder.

    Example:
        >>> from models.commands import cache_folder
        >>> cache_folder({"XDG_CACHE_HOME": "cache"}).as_posix()
        'cache/kvjax'
    """
    try:
        return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvjax"
    except RuntimeError:
        raise FileNotFoundError(
            "the user's cache folder is unknown, as there is no home folder; name one with XDG_CACHE_HOME."
        ) from None


def cache_dtype(text: str) -> str:
    """Return the name of a cache's dtype on a command line, or of its two, as the ``type`` of a flag.

    Example:
        >>> from models.commands import cache_dtype
        >>> cache_dtype("int8"), cache_dtype("int8/bfloat16")
        ('int8', 'int8/bfloat16')
    """
    try:
        return str(check_dtypes(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removesuffix(".")) from None


def add_cache_dtype_flag(flags: argparse.ArgumentParser) -> None:
    """Add ``--cache-dtype``, the dtype of a cache's keys and values."""
    flags.add_argument(
        "--cache-dtype",
        type=cache_dtype,
        metavar="DTYPE",
        help="keys and values of the cache: float32, bfloat16, float16, int8 or float8_e4m3fn, or two of them, such as "
        "int8/bfloat16 (default: the model's)",
    )


def add_cache_flag(flags: argparse.ArgumentParser) -> None:
    """Add the flag whose value :func:`keep_compiled` takes."""
    flags.add_argument(
        "--compilation-cache", metavar="FOLDER",
        help="where to keep compiled programs for the next start, or 'off' (default: KVJAX_COMPILATION_CACHE, else "
        "the user's cache)",
    )  # fmt: skip


def add_import_flag(flags: argparse.ArgumentParser) -> None:
    """Add --import, which every command has: it imports modules that register policies or models of their own.

    The modules are imported as soon as the flag is read, from where ``python -m`` finds them: the working directory
    first.

    Example:
        >>> import argparse
        >>> from models.commands import add_import_flag
        >>> flags = argparse.ArgumentParser()
        >>> add_import_flag(flags)
        >>> vars(flags.parse_args(["--import", "json,csv"]))
        {'import': 'json,csv'}
    """
    flags.add_argument(
        "--import", action=_Import, default=argparse.SUPPRESS, metavar="MODULE",
        help="a module that registers policies or models of your own, such as my_scores for my_scores.py; several by "
        "comma (default: none)",
    )  # fmt: skip


class _Import(argparse.Action):
    """Imports the modules that it names."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, values)
        try:
            import_modules(values)
        except ImportError as error:
            parser.error(f"--import: {str(error).rstrip('.')}")


def import_modules(names: str) -> None:
    """Import the modules that a text names, several by comma, as ``python -m`` finds them.

    Raises:
        ImportError: with the module that cannot be imported, and why.

    Example:
        >>> from models.commands import import_modules
        >>> import_modules("json, csv")
        >>> import_modules("no_such_module")
        Traceback (most recent call last):
        ...
        ImportError: no_such_module cannot be imported (ModuleNotFoundError: No module named 'no_such_module').
    """
    if "" not in sys.path and os.getcwd() not in sys.path:  # a script's path begins with its own folder
        sys.path.insert(0, os.getcwd())
    for name in split_list(names):
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever the module raises
            raise ImportError(f"{name} cannot be imported ({type(error).__name__}: {sentence(error)}).") from error


def keep_compiled(chosen: str | None = None, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Keep compiled programs where later commands and notebooks find them, so that a second start compiles little.

    They are in the user's cache folder. If JAX_COMPILATION_CACHE_DIR is set, JAX uses that folder instead.

    Args:
        chosen: another folder, or "off"; by default the value of KVJAX_COMPILATION_CACHE.

    Returns:
        The folder; None where nothing is kept, or where JAX_COMPILATION_CACHE_DIR is set.

    Example:
        >>> from models.commands import keep_compiled
        >>> keep_compiled("off") is None
        True
    """
    chosen = chosen or environment.get("KVJAX_COMPILATION_CACHE", "")
    if chosen == "off" or environment.get("JAX_COMPILATION_CACHE_DIR"):
        return None
    with contextlib.suppress(OSError):  # no home, or a read-only one: nothing is kept
        folder = Path(chosen) if chosen else cache_folder(environment) / "programs"
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        return folder
    return None


@contextlib.contextmanager
def extra(name: str, script: str) -> Iterator[None]:
    """Wrap a command's imports: a missing package ends it with one line and exit code 2, Ctrl-C with 130.

    Args:
        name: the extra that installs what is imported.
        script: the command.

    Example:
        >>> from models.commands import extra
        >>> with extra("eval", "kvjax-eval"):
        ...     import json
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = install.missing(*extras_of(sys.argv[1:]))
        packages = [str(error.name), *itertools.chain(*missing.values())]
        print(f"{script}: error: {install.needed(packages, name, *missing)}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(f"\n{script}: interrupted.", file=sys.stderr)
        raise SystemExit(130) from None


def sentence(error: BaseException) -> str:
    """Return an error's message on one line.

    Example:
        >>> from models.commands import sentence
        >>> (
        ...     sentence(ValueError("two\\nlines")),
        ...     sentence(FileNotFoundError(2, "No such file or directory", "a.txt")),
        ... )
        ('two lines', 'a.txt: no such file or directory')
    """
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        name = str(error.filename)
        return f"{name if len(name) <= 200 else name[:200] + '...'}: {error.strerror[:1].lower()}{error.strerror[1:]}"
    return " ".join(str(error).split()) or type(error).__name__


def split_list(text: str) -> list[str]:
    """Split a text at commas outside parentheses.

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


def listed(what: str, text: str, example: str) -> list[str]:
    """Split a text like :func:`split_list`, after a check that it names something.

    Example:
        >>> from models.commands import listed
        >>> listed("task", " , ", "--tasks piqa")
        Traceback (most recent call last):
        ...
        ValueError: no task was given; name at least one, such as --tasks piqa.
    """
    found = split_list(text)
    if not found:
        raise ValueError(f"no {what} was given; name at least one, such as {example}.")
    return found


def parse_budget(text: str) -> int | float:
    """Read a budget from a command line: slots per head, or a ratio of the prompt.

    Raises:
        ValueError: the text is neither an integer from 1 nor a number in (0, 1].

    Example:
        >>> from models.commands import parse_budget
        >>> parse_budget("512"), parse_budget("0.25")
        (512, 0.25)
    """
    number: Any = text
    for kind in (float, int):
        with contextlib.suppress(ValueError):
            number = kind(text)
    return check_share_or_tokens(number)


def read_text(path: str | Path, what: str) -> str:
    """Read a UTF-8 file, or a pipe such as ``<(zcat book.gz)``; a pipe may be read more than once.

    Args:
        what: the kind of file, for error messages.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is a folder, or not UTF-8.

    Example:
        >>> from models.commands import read_text
        >>> read_text("nowhere.txt", "prompt")
        Traceback (most recent call last):
        ...
        FileNotFoundError: there is no prompt file nowhere.txt; name one that exists.
    """
    try:
        return decoded(read_bytes(path), str(path))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {what} file {path}; name one that exists.") from None
    except IsADirectoryError:
        raise ValueError(f"the {what} file {path} is a folder; name a file.") from None


def decoded(content: bytes, name: str) -> str:
    """Decode what was read from ``name``.

    Raises:
        ValueError: it is not UTF-8.

    Example:
        >>> from models.commands import decoded
        >>> decoded(b"caf\\xe9", "menu.txt")
        Traceback (most recent call last):
        ...
        ValueError: menu.txt is not UTF-8 text (byte 3); convert it first.
    """
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

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from models.commands import write_files
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_files(folder, {"a.txt": b"1", "b.txt": b"2"})
        >>> write_files(folder, {"a.txt": b"3"}, stale=["b.txt"])
        >>> [(path.name, path.read_text()) for path in folder.iterdir()]
        [('a.txt', '3')]
    """
    if not hosts.first():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        for name, content in files.items():
            stack.enter_context(replacing(folder / name)).write_bytes(content)
    for name in stale:
        (folder / name).unlink(missing_ok=True)


def lock(file: IO[Any], folder: Path) -> None:
    """Lock a folder for this process until ``file``, a file in it that is open for writing, is closed.

    Raises:
        ValueError: another run has locked it.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from models.commands import LOCK_FILE, lock
        >>> folder = Path(tempfile.mkdtemp())
        >>> with (
        ...     (folder / LOCK_FILE).open("ab") as held,
        ...     (folder / LOCK_FILE).open("ab") as other,
        ... ):
        ...     lock(held, folder)
        ...     lock(other, Path("runs/a"))
        Traceback (most recent call last):
        ...
        ValueError: another run writes into runs/a; wait until it ends, or name another folder.
    """
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


def progress_bar(unit: str, *, total: int | None = None, over: Iterable[Any] | None = None) -> Any:
    """Return a tqdm bar on standard error, or one that stays quiet where that is no terminal.

    Args:
        unit: what is counted, such as "sample".
        total: how many there are, if ``over`` is not given.
        over: an iterable to go through.

    Example:
        >>> from models import commands
        >>> [2 * step for step in commands.progress_bar("step", over=range(3))]
        [0, 2, 4]
    """
    from tqdm import tqdm

    quiet = None if hosts.first() else True  # None is quiet where standard error is no terminal
    return tqdm(over, total=total, unit=unit, file=sys.stderr, dynamic_ncols=True, disable=quiet)


def check_tokenizer[Found](model: str | Path, tokenizer: Found | None) -> Found:
    """Return the tokenizer that was read with a model, for a command that reads or writes text.

    Raises:
        ValueError: the model has none.

    Example:
        >>> from models.commands import check_tokenizer
        >>> check_tokenizer("my/model", None)
        Traceback (most recent call last):
        ...
        ValueError: my/model has no tokenizer.json, and text needs one; copy it from the model's source.
    """
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer.json, and text needs one; copy it from the model's source.")
    return tokenizer


def check_folder(folder: Path) -> None:
    """Check that a folder can be written into, or made, before the long work starts.

    Raises:
        ValueError: it, or what it would lie in, is a file.
        PermissionError: it may not be written into.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from models.commands import check_folder
        >>> check_folder(Path(tempfile.mkdtemp()) / "results" / "first")
    """
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


def write_json(path: str | Path, data: Any) -> None:
    """Write a JSON file completely or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(to_json(data))


def to_json(data: Any) -> str:
    """Return JSON in the layout of all our files.

    Example:
        >>> from models.commands import to_json
        >>> to_json([1])
        '[\\n 1\\n]\\n'
    """
    return json.dumps(data, indent=1, allow_nan=False) + "\n"
