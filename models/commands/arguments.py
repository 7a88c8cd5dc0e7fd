"""Command lines: a parser that says errors on one line, the flags that many commands have, and lists as text."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import kvjax
from kvjax.checks import check_share_or_tokens
from kvjax.quantise import check_dtypes
from models.commands.execution import sentence

EXIT_CODES = """exit codes:
  0    done
  2    bad input, a file that can't be read or written, or a full disk; one line on standard error says which
  3    another process of the same run has ended (--coordinator)
  130  interrupted by Ctrl-C
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
    """A parser that reports an error on one line. Its flags have an :class:`Invocation` as ``invocation``."""

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
        named = "default" in text or text is argparse.SUPPRESS or not action.option_strings
        if named or action.default in (None, False, "", argparse.SUPPRESS):
            return action.help
        return f"{text} (default: %(default)s)".strip()


def parser(script: str, module: str, *, description: str, examples: str = "") -> Parser:
    """Build a command's parser, with --version, and with examples and exit codes at the end of its help.

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
    return flags


def epilog(examples: str) -> str:
    """Return the end of a command's help: the examples and the exit codes."""
    return f"{examples.rstrip()}\n\n{EXIT_CODES}".lstrip()


def cache_dtype(text: str) -> str:
    """Return the name of a cache's dtype on a command line, or of its two, as the ``type`` of a flag."""
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


def add_networks_flag(flags: argparse.ArgumentParser) -> None:
    """Add --networks, the folders that :func:`models.networks.load_networks` reads."""
    flags.add_argument(
        "--networks", type=Path, nargs="+", metavar="FOLDER",
        help="folders of small networks that policies and selections read, such as a scorer's for zap (default: the "
        "model's own)",
    )  # fmt: skip


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
    number: Any = text
    for kind in (float, int):
        with contextlib.suppress(ValueError):
            number = kind(text)
    return check_share_or_tokens(number)
