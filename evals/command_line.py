"""Give what the command lines of evaluations share: flags, their checks, and the model that they name."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import models
from evals import results
from evals.run_settings import POLICIES
from kvjax._src.checks import check_names
from models import commands
from models.commands.shared_flags import MESH, add_shared_flags, mesh_of
from models.loading import describe as read_description
from models.networks import Network, load_networks


def add_model_flags(flags: argparse.ArgumentParser, **changes: Any) -> None:
    """Add the flags of every evaluation that runs policies; see :func:`models.commands.shared_flags.add_shared_flags`.

    They are the model, how it is fed and spread, and the files of figures and of the picture.
    """
    changes.setdefault("seed", dict(help="random seed; runs whose seeds are less than 1,000 apart may share samples"))
    add_shared_flags(flags, "model", "block", "batch", "seed", "dtype", "json", "plot", *MESH, **changes)


def add_setting_flags(flags: argparse.ArgumentParser, *, budgets: str = "256,512", when: str = "block,prompt") -> None:
    """Add the flags that :func:`evals.run_settings.make_settings` reads."""
    names = ("policies", "allocations", "against", "networks", "budgets", "reading_budget", "moments", "evict_every")
    add_shared_flags(
        flags, *names, "cache_dtype", "questions", policies=",".join(POLICIES), budgets=budgets, moments=when
    )


def check_sizes(flags: argparse.Namespace) -> list[int]:
    """Return the lengths that the flags ask for, checked."""
    lengths = commands.listed("length", flags.lengths, "--lengths 1024")
    if wrong := [text for text in lengths if not text.isdigit() or int(text) < 1]:
        raise ValueError(f"the length {wrong[0]!r} is not a number of tokens; give an integer from 1.")
    return list(map(int, lengths))


def choose(name: str, text: str, known: Sequence[str], default: Sequence[str] | None = None) -> list[str]:
    """Return the checked names on a command line, as ``known`` orders them; 'all' stands for ``default``, or all."""
    given = commands.listed(f"name for {name}", text, f"{name} {known[0]}")
    check_names(name, given, ("all", *known))
    if "all" in given:
        return list(known if default is None else default)
    return [part for part in known if part in given]


def load(flags: argparse.Namespace) -> tuple[models.Decoder, models.Tokenizer]:
    """Load the model and tokenizer that the flags name; see :func:`load_with_tokenizer`."""
    return load_with_tokenizer(flags.model, dtype=flags.dtype, mesh=mesh_of(flags))


def load_with_tokenizer(name: str, **options: Any) -> tuple[models.Decoder, models.Tokenizer]:
    """Load a model and its tokenizer by :func:`models.load`; ValueError where it has no tokenizer."""
    model, tokenizer = models.load(name, **options)
    return model, commands.check_tokenizer(name, tokenizer)


def networks_for(flags: argparse.Namespace, settings: Iterable[Any], model: models.Decoder) -> tuple[Network, ...]:
    """Load the networks of --networks, and the model's own for what else the settings want (``wanted``)."""
    return load_networks(flags.networks, flags.model, model, [one.wanted for one in settings], dtype=flags.dtype)


def describe(flags: argparse.Namespace) -> tuple[models.Config, models.Tokenizer]:
    """Read the config and tokenizer of the model that the flags name, and check them before weights are read."""
    config, tokenizer = read_description(flags.model, dtype=flags.dtype, mesh=mesh_of(flags))
    return config, commands.check_tokenizer(flags.model, tokenizer)


def settings(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the flags in JSON's types."""
    given = {name: value for name, value in vars(flags).items() if name != "invocation"}
    return dict(json.loads(json.dumps(given, default=str)))


def decisive_flags(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that decide the figures, in JSON's types, with digests of the files and folders they name."""
    plain: dict[str, Any] = {}
    for name, value in vars(flags).items():
        if name in results.FREE:
            continue
        several = value if isinstance(value, list) else [value]
        paths = [Path(path) for path in several if isinstance(path, Path) or (name == "data" and path is not None)]
        plain[name] = [str(path) for path in several] if isinstance(value, list | Path) else value
        if paths:
            plain[f"{name} holds"] = [results.fingerprint(path) for path in paths]
    return plain


def command_text(flags: argparse.Namespace) -> str:
    """Return the command line that reproduces these flags, by the program that was called or else `evals`."""
    called = getattr(flags, "invocation", None)
    program = "python -m evals" if called is None else called.command.partition(f" {flags.name}")[0]
    line = [*program.split(), flags.name]
    for name, value in vars(flags).items():
        if name in ("name", "first", "invocation", "out", "json", "plot") or value is None or value is False:
            continue
        line.append(f"--{name.replace('_', '-')}")
        if value is not True:
            line += [str(part) for part in value] if isinstance(value, list) else [str(value)]
    return commands.shell_line(line)
