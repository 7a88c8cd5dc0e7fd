"""Run a command: exit codes, errors on one line, missing extras, compiled programs that are kept."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from kvjax import install
from models import files, hosts
from models.commands import distributed


def run(command: Callable[[], None], name: str) -> int:
    """Run a command and return its exit code: 2 for bad input, after one line that says why, and 130 for Ctrl-C.

    If the command runs in several processes and fails in this one, the process ends here, and with it the others.
    """
    try:
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
    """Parse a command line with the flag of :func:`add_cache_flag`, run the command, and return the exit code."""
    flags = parser.parse_args(arguments)
    keep_compiled(vars(flags).pop("compilation_cache"))

    def checked() -> None:
        check_extras(arguments)
        command(flags)

    return run(checked, name)


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


def progress_bar(unit: str, *, total: int | None = None, over: Iterable[Any] | None = None) -> Any:
    """Return a tqdm bar on standard error, or one that stays quiet where that is no terminal.

    Args:
        unit: what is counted, such as "sample".
        total, over: how many there are, or the iterable to go through.
    """
    from tqdm import tqdm

    quiet = None if hosts.first() else True  # None is quiet where standard error is no terminal
    return tqdm(over, total=total, unit=unit, file=sys.stderr, dynamic_ncols=True, disable=quiet)


def check_tokenizer[Found](model: str | Path, tokenizer: Found | None) -> Found:
    """Return the tokenizer that a command of text needs, after a check that the model has one."""
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer.json, and text needs one; copy it from the model's source.")
    return tokenizer
