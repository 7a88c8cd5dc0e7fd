"""Give what the command lines of evaluations share: flags, their checks, and the model that they name."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import models
from evals import results
from evals.run_settings import POLICIES, RECENCY
from kvjax.checks import check_names
from models import commands
from models.commands import run_flags
from models.load import describe as read_description
from models.networks import Network, load_networks

# Flags that may change when a run is resumed: where it writes, what it runs on, and what is compared.
FREE = ("name", "invocation", "out", "json", "plot", "batch", "mesh", "against")
FLAGS: dict[str, dict[str, Any]] = {
    "model": dict(default="retriever", help="'retriever', a Hugging Face folder, or a hub name"),
    "block": dict(type=int, default=128, help="prompt tokens per step"),
    "batch": dict(type=int, default=16, help="samples answered at once"),
    "seed": dict(type=int, default=0),
    "dtype": dict(help="float32, bfloat16 (slow on a CPU) or float16; by default the checkpoint's"),
    "json": dict(type=Path, help="write all figures here"),
    "plot": dict(type=Path, help="write the picture here (.png, .svg or .pdf)"),
}


def add_shared_flags(flags: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """Add some of the flags that evaluations share (:data:`FLAGS`), with other defaults where they are given."""
    for name in names:
        given = {"default": defaults[name]} if name in defaults else {}
        flags.add_argument(f"--{name}", **FLAGS[name] | given)


def add_model_flags(flags: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add the flags of every evaluation that runs policies: all of :data:`FLAGS`, and how a model is spread."""
    add_shared_flags(flags, *FLAGS, **defaults)
    run_flags.add_mesh_flags(flags)


def add_setting_flags(
    flags: argparse.ArgumentParser,
    *,
    budgets: str = "256,512",
    when: str = "block,prompt",
) -> None:
    """Add the flags that :func:`evals.run_settings.make_settings` reads."""
    flags.add_argument(
        "--policies",
        default=",".join(POLICIES),
        help="several by comma; 'full' keeps all tokens; 'select=quest' keeps all, and a step reads a budget of them",
    )
    flags.add_argument(
        "--allocations",
        default="",
        help="how slots are divided among heads, such as uniform,adakv; every policy runs with each; several by comma",
    )
    add_against_flag(flags)
    commands.add_networks_flag(flags)
    flags.add_argument(
        "--budgets", "--budget", default=budgets, help="slots per head, or ratios of the prompt; several by comma"
    )
    flags.add_argument(
        "--when", default=when, help="block, prompt, or published (as in each policy's paper); several by comma"
    )
    flags.add_argument(
        "--evict-every",
        type=int,
        help="evict every n decode steps, 0 for never (default: every step, or once per observation window)",
    )
    commands.add_cache_dtype_flag(flags)
    flags.add_argument(
        "--question",
        default="known",
        help="known when the context is compressed, or unknown (it comes later); several by comma",
    )


def add_against_flag(flags: argparse.ArgumentParser) -> None:
    """Add --against, which :func:`evals.run_settings.baseline` reads."""
    flags.add_argument(
        "--against",
        metavar="POLICY",
        help="the policy, 'full' or a selection that each policy is compared with on the same samples; it is run, too "
        f"(default: {RECENCY})",
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


def check_least(flags: argparse.Namespace, **least: int) -> None:
    """Raise ValueError if a flag is below its least value; a flag may be None, or not be there."""
    for name, value in least.items():
        if (given := getattr(flags, name, None)) is not None and given < value:
            raise ValueError(f"--{name.replace('_', '-')} is {given}; give at least {value}.")


def load(flags: argparse.Namespace) -> tuple[models.Decoder, models.Tokenizer]:
    """Load the model and tokenizer that the flags name; see :func:`load_with_tokenizer`."""
    return load_with_tokenizer(flags.model, dtype=flags.dtype, mesh=run_flags.mesh_of(flags))


def load_with_tokenizer(name: str, **options: Any) -> tuple[models.Decoder, models.Tokenizer]:
    """Load a model and its tokenizer by :func:`models.load`; ValueError where it has no tokenizer."""
    model, tokenizer = models.load(name, **options)
    return model, commands.check_tokenizer(name, tokenizer)


def networks_for(flags: argparse.Namespace, settings: Iterable[Any], model: models.Decoder) -> tuple[Network, ...]:
    """Load the networks of --networks, and the model's own for what else the settings want (``wanted``)."""
    return load_networks(flags.networks, flags.model, model, [one.wanted for one in settings], dtype=flags.dtype)


def describe(flags: argparse.Namespace) -> tuple[models.Config, models.Tokenizer]:
    """Read the config and tokenizer of the model that the flags name, and check them before weights are read."""
    config, tokenizer = read_description(flags.model, dtype=flags.dtype, mesh=run_flags.mesh_of(flags))
    return config, commands.check_tokenizer(flags.model, tokenizer)


def settings(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the flags in JSON's types."""
    given = {name: value for name, value in vars(flags).items() if name != "invocation"}
    return {name: _plain(value) for name, value in given.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def decisive_flags(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that decide the figures, in JSON's types, with digests of the files and folders they name."""
    plain: dict[str, Any] = {}
    for name, value in vars(flags).items():
        if name in FREE:
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
        if name in ("name", "invocation", "out", "json", "plot") or value is None or value is False:
            continue
        line.append(f"--{name.replace('_', '-')}")
        if value is not True:
            line += [str(part) for part in value] if isinstance(value, list) else [str(value)]
    return commands.shell_line(line)
