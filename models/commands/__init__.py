"""Give command lines what they share: parsers, flags that many have, errors on one line, and how a command runs.

The library imports no command.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import os
import shlex
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import kvjax
from kvjax._src import install
from models import files, hosts
from models.commands import distributed
from models.progress import progress_bar as progress_bar

EXIT_CODES = """exit codes:
  0    done
  2    bad input, a file that can't be read or written, or a full disk; one line on standard error says which
  3    another process of the same run has ended (--coordinator)
  130  interrupted by Ctrl-C, or in training by SIGTERM
"""


def shell_line(words: Iterable[str]) -> str:
    """Return words as a line for a shell; a word with single quotes in it stands in double quotes where it can."""
    return " ".join(
        f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word) for word in words
    )


class Invocation(NamedTuple):
    """A command line, and the time.monotonic() at which it began."""

    command: str
    time: float


class Parser(argparse.ArgumentParser):
    """A parser with --import, which reports an error on one line.

    Its flags have an :class:`Invocation` as ``invocation``; ``common`` is the group of those that every command has.
    """

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.common = self.add_argument_group("in every command")
        self.common.add_argument(
            "--import", action=_Import, default=argparse.SUPPRESS, metavar="MODULE",
            help="a module that registers policies or models of your own, such as my_scores for my_scores.py; several "
            "by comma (default: none)",
        )  # fmt: skip

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._asked(parsed).error(f"unrecognized arguments: {' '.join(unknown)}")
        words = sys.argv[1:] if args is None else args
        parsed.invocation = Invocation(f"{self.prog} {shell_line(words)}".rstrip(), time.monotonic())
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
        named = "(default" in text or text is argparse.SUPPRESS or not action.option_strings
        if named or action.nargs == 0 or action.default in (None, "", argparse.SUPPRESS):
            return action.help
        return f"{text} (default: %(default)s)".strip()


def parser(script: str, module: str, *, description: str, examples: str = "") -> Parser:
    """Build a command's parser, with --version, the flag of :func:`keep_compiled`, and an end of its help.

    Args:
        script: the command's name where the package is installed. The help shows this name if it was called by it.
        module: the module of the same command, as the examples call it by ``python -m module``.
    """
    program = script if Path(sys.argv[0]).stem == script else f"python -m {module}"
    flags = Parser(
        prog=program,
        description=description,
        epilog=epilog(examples.replace(f"python -m {module}", program)),
        formatter_class=_Help,
    )
    flags.add_argument("--version", action="version", version=f"kvjax {kvjax.__version__}")
    flags.common.add_argument(
        "--compilation-cache", metavar="FOLDER",
        help="where to keep compiled programs for the next start, or 'off' (default: KVJAX_COMPILATION_CACHE, else "
        "the user's cache)",
    )  # fmt: skip
    return flags


def epilog(examples: str) -> str:
    """Return the end of a command's help: the examples and the exit codes."""
    return f"{examples.rstrip()}\n\n{EXIT_CODES}".lstrip()


class _Import(argparse.Action):
    """Imports the modules that it names as soon as it is read, since later flags may name what they register."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, values)
        try:
            import_modules(values)
        except ImportError as error:
            parser.error(f"--import: {str(error).rstrip('.')}")


def import_modules(names: str) -> None:
    """Import the modules that a text names, several by comma, as ``python -m`` finds them."""
    if "" not in sys.path and os.getcwd() not in sys.path:  # a script's path begins with its own folder
        sys.path.insert(0, os.getcwd())
    for name in split_list(names):
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever the module raises
            raise ImportError(f"{name} cannot be imported ({type(error).__name__}: {sentence(error)}).") from error


def split_list(text: str) -> list[str]:
    """Split a text at commas outside parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def listed(what: str, text: str, example: str) -> list[str]:
    """Split a text like :func:`split_list`, after a check that it names something."""
    found = split_list(text)
    if not found:
        raise ValueError(f"no {what} was given; name at least one, such as {example}.")
    return found


def parse_budget(text: str) -> int | float:
    """Read a budget from a command line: slots per head (from 1), or a ratio of the prompt (in (0, 1])."""
    from kvjax._src.checks import check_share_or_tokens

    number: Any = text
    for kind in (float, int):
        with contextlib.suppress(ValueError):
            number = kind(text)
    return check_share_or_tokens(number)


def run(command: Callable[[], None], name: str) -> int:
    """Run a command and return its exit code: 2 for bad input, after one line that says why, and 130 for Ctrl-C.

    If the command runs in several processes and fails in this one, the process ends here, and with it the others.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print(f"[warning: {message}]", file=sys.stderr)
            code = _run(command, name)
    except BaseException:
        if not hosts.several():
            raise
        traceback.print_exc()
        code = 1
    if code and hosts.several():
        distributed.leave(code)
    return code


def _run(command: Callable[[], None], name: str) -> int:
    import jax

    try:
        command()
    except KeyboardInterrupt as error:
        print(f"\n{name}: {error if error.args else 'interrupted.'}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has closed it, as `| head` does
        if hosts.several():  # an orderly end would wait for the others, which wait for this process
            distributed.leave(0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError) as error:
        print(f"{name}: error: {sentence(error)}", file=sys.stderr)
        return 2
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            if not hosts.several() or not distributed.is_of_the_lost(error):
                raise
            distributed.leave_the_lost(name, error)
        print(
            f"{name}: error: out of memory; give a smaller budget, block or batch, or more devices with --mesh.",
            file=sys.stderr,
        )
        return 2
    return 0


def call(parser: argparse.ArgumentParser, command: Callable[[Any], None], name: str, arguments: Any = None) -> int:
    """Parse a command line by :func:`parser`, run the command, and return the exit code."""
    flags = parser.parse_args(arguments)
    keep_compiled(vars(flags).pop("compilation_cache"))

    def checked() -> None:
        check_extras(arguments)
        command(flags)

    return run(checked, name)


def action(name: str) -> Callable[[Any], None]:
    """Return what a command does once its flags are read, for :func:`call`: its module imports JAX, and only then."""
    return lambda flags: importlib.import_module(f"models.commands.actions.{name}").command(flags)


def extras_of(words: Sequence[str]) -> list[str]:
    """Return the extras that a command line needs: for its picture, and for a model in a GGUF file."""
    needs = {
        "plot": any(word.partition("=")[0] == "--plot" for word in words),
        "gguf": any(word.lower().endswith(".gguf") for word in words),
    }
    return [name for name, needed in needs.items() if needed]


def check_extras(arguments: Sequence[str] | None) -> None:
    """Check that the extras of a command line are installed, before any work; None for this process's arguments."""
    missing = install.missing(*extras_of(sys.argv[1:] if arguments is None else arguments))
    if missing:
        raise ImportError(install.needed(itertools.chain(*missing.values()), *missing))


def keep_compiled(chosen: str | None = None, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Keep compiled programs where later commands and notebooks find them, so that a second start compiles little.

    They are in the user's cache folder. If JAX_COMPILATION_CACHE_DIR is set, JAX uses that folder instead.

    Args:
        chosen: another folder, or "off"; by default the value of KVJAX_COMPILATION_CACHE.

    Returns:
        The folder; None where nothing is kept, or where JAX_COMPILATION_CACHE_DIR is set.
    """
    chosen = chosen or environment.get("KVJAX_COMPILATION_CACHE", "")
    if chosen == "off" or environment.get("JAX_COMPILATION_CACHE_DIR"):
        return None
    import jax

    with contextlib.suppress(OSError):  # no home, or a read-only one: nothing is kept
        folder = Path(chosen) if chosen else files.cache_folder(environment) / "programs"
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        return folder
    return None


@contextlib.contextmanager
def extra(name: str, script: str) -> Iterator[None]:
    """Wrap a command's imports: a missing package ends it with one line and exit code 2, Ctrl-C with 130.

    ``name`` is the extra that installs what ``script`` imports.
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
    """Return an error's message on one line."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        name = str(error.filename)
        return f"{name if len(name) <= 200 else name[:200] + '...'}: {error.strerror[:1].lower()}{error.strerror[1:]}"
    return " ".join(str(error).split()) or type(error).__name__


def check_tokenizer[Found](model: str | Path, tokenizer: Found | None) -> Found:
    """Return the tokenizer that a command of text needs, after a check that the model has one."""
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer.json, and text needs one; copy it from the model's source.")
    return tokenizer
