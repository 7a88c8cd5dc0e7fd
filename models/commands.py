"""What command lines share: lists and budgets as text, errors as one sentence, files that are never half written."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax

import kvjax

EXIT_CODES = """exit codes:
  0    done
  2    bad input, a file that can't be read or written, a full disk: one sentence on standard error says what
  130  interrupted by Ctrl-C
"""


class Begun(NamedTuple):
    """A command as it was given, and when it began, by time.monotonic."""

    command: str
    time: float


class Parser(argparse.ArgumentParser):
    """A parser whose complaint is one line, like every other of a command's; the flags that it gives say what was
    ``begun``, and when.
    """

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed = super().parse_args(args, namespace)
        words = sys.argv[1:] if args is None else args
        parsed.begun = Begun(" ".join([self.prog, *map(shlex.quote, words)]), time.monotonic())
        return parsed

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; {self.prog} --help says what there is.\n")


def parser(script: str, module: str, *, description: str, examples: str = "") -> Parser:
    """A command's parser: with --version, and a help that ends with examples and exit codes.

    Args:
        script: the command's name where the package is installed. The help is written for it if it was called so.
        module: the same command as ``python -m module``, as the examples have it.

    Example:
        >>> from models.commands import parser
        >>> flags = parser("kvjax-eval", "evals", description="Evaluations.", examples="python -m evals needle")
        >>> flags.prog, flags.format_help().splitlines()[-1]
        ('python -m evals', '  130  interrupted by Ctrl-C')
    """
    program = script if Path(sys.argv[0]).stem == script else f"python -m {module}"
    flags = Parser(
        prog=program,
        description=description,
        epilog=epilog(examples.replace(f"python -m {module}", program)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument("--version", action="version", version=f"kvjax {kvjax.__version__}")
    return flags


def epilog(examples: str) -> str:
    """What stands at the end of a command's help.

    Example:
        >>> from models.commands import epilog
        >>> epilog("examples:\\n  python -m evals needle\\n").splitlines()[3]
        'exit codes:'
    """
    return f"{examples.rstrip()}\n\n{EXIT_CODES}".lstrip()


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
        print(f"{name}: error: {sentence(error)}", file=sys.stderr)
        return 2
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(
            f"{name}: error: memory ran out; give a smaller budget, block or batch, or more devices by --mesh.",
            file=sys.stderr,
        )
        return 2
    return 0


@contextlib.contextmanager
def extra(name: str, script: str) -> Iterator[None]:
    """Around the imports of a command: what is not installed ends it with one sentence and code 2, Ctrl-C with 130.

    Args:
        name: the extra that brings what is imported.
        script: the command.

    Example:
        >>> from models.commands import extra
        >>> with extra("eval", "kvjax-eval"):
        ...     import json
    """
    try:
        yield
    except ModuleNotFoundError as error:
        print(
            f"{script}: error: {error.name} is not installed; install it with: pip install 'kvjax[{name}]'.",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(f"\n{script}: interrupted.", file=sys.stderr)
        raise SystemExit(130) from None


def sentence(error: BaseException) -> str:
    """What an error says, on one line.

    Example:
        >>> from models.commands import sentence
        >>> sentence(ValueError("two\\nlines")), sentence(FileNotFoundError(2, "No such file or directory", "a.txt"))
        ('two lines', 'a.txt: no such file or directory')
    """
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror[:1].lower()}{error.strerror[1:]}"
    return " ".join(str(error).split()) or type(error).__name__


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
        ValueError: neither an integer from 1 nor a number in (0, 1].

    Example:
        >>> from models.commands import parse_budget
        >>> parse_budget("512"), parse_budget("0.25")
        (512, 0.25)
    """
    try:
        slots = int(text)
    except ValueError:
        pass
    else:
        if slots < 1:
            raise ValueError(f"the budget is {slots}; at least 1 token must stay.")
        return slots
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
