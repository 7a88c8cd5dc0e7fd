"""Shared by the trainers' commands: their flags, processes, meshes and models."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

import models
from evals import command_line, evaluator
from models import commands, files, hosts
from models.commands import distributed
from models.commands.shared_flags import MESH, add_shared_flags, at_least, count
from models.decoder import Decoder
from models.tokenizer import Tokenizer
from train.loop import Options, Settings
from train.text import Corpus, open_corpus


class FrozenModel(NamedTuple):
    """A frozen model on a mesh; whether it is the embedded one."""

    model: Decoder
    tokenizer: Tokenizer
    mesh: Mesh
    embedded: bool


def parser(
    module: str, *, description: str, examples: str, out: str, seq_len: str, lr: str, script: str = ""
) -> commands.Parser:
    """Build a trainer's parser: the flags of the model, the text, the settings, the run and its devices.

    Args:
        module, description, examples, script: see :func:`models.commands.parser`.
        out: the default folder.
        seq_len, lr: the defaults of these settings, in words; a setting without a flag is None.
    """
    flags = commands.parser(script or module, module, description=description, examples=examples)
    add_shared_flags(flags, "model")
    flags.add_argument("--data", nargs="+", help="files, folders, a hub data set (owner/name[:config]), python")
    flags.add_argument(
        "--eval-data", nargs="+", default=[], help="held-out text (default: the first documents of --data)"
    )
    flags.add_argument("--eval-rows", type=count, default=16, help="held-out rows")
    flags.add_argument("--text-field", default="text", help="field of a JSON line")
    flags.add_argument("--skip-bad-lines", action="store_true", help="leave out and count lines without text")
    flags.add_argument("--tokens", type=count, help="tokens of text in total, such as 80e6")
    flags.add_argument("--seq-len", type=count, help=f"tokens per row (default: {seq_len})")
    flags.add_argument("--batch", type=count, help="rows per step")
    flags.add_argument("--lr", type=float, help=f"the highest learning rate (default: {lr})")
    flags.add_argument("--warmup", type=float, help="share of the steps with a rising learning rate")
    flags.add_argument("--clip", type=float, help="largest global norm of the gradient")
    flags.add_argument("--weight-decay", type=float, help="share of the weights that a step takes off, times its rate")
    flags.add_argument("--out", type=Path, default=Path(out), help="folder for what is trained and its run")
    flags.add_argument("--resume", choices=("auto", "never"), default="auto", help="resume --out's checkpoint")
    flags.add_argument("--save-every", type=count, default=200, help="steps, at most five minutes, between checkpoints")
    flags.add_argument("--keep", type=count, default=2, help="checkpoints kept")
    flags.add_argument("--eval-every", type=at_least(0), default=200, help="steps between measurements; 0: at the end")
    flags.add_argument("--log-every", type=count, default=20, help="steps between lines of the log")
    flags.add_argument("--stop-after", type=count, help="stop early, after this step")
    flags.add_argument(
        "--no-measure", dest="measure", action="store_false", help="leave out the measurements after the last step"
    )
    flags.add_argument("--json", action="store_true", help="print the summary as JSON")
    mesh = dict(help="devices, such as data=4 or data=2,tensor=2; data: rows, tensor: the model")
    dtype = dict(default="float32", help="the frozen model's dtype")
    add_shared_flags(flags, "seed", "dtype", *MESH, seed=dict(default=None), mesh=mesh, dtype=dtype)
    return flags


def load(flags: argparse.Namespace) -> FrozenModel:
    """Check the run's flags, join the other processes, and load the model onto the mesh."""
    files.check_folder(flags.out)
    distributed.join(flags)
    mesh = models.parse_mesh(
        f"data={jax.device_count() if hosts.several() else 1}" if flags.mesh is None else flags.mesh
    )
    embedded = flags.model == "retriever"
    if flags.data is None and not embedded:
        raise ValueError("no data was named; give --data files, folders or a hub data set.")
    model, tokenizer = command_line.load_with_tokenizer(flags.model, dtype=flags.dtype, mesh=mesh)
    return FrozenModel(model, tokenizer, mesh, embedded)


def open_text(flags: argparse.Namespace, tokenizer: Tokenizer, settings: Settings) -> Corpus:
    """Open the text that the flags name; the embedded model's is "python"."""
    return open_corpus(
        flags.data or ["python"], tokenizer, settings.seq_len, eval_names=flags.eval_data, eval_rows=flags.eval_rows,
        field=flags.text_field, skip_bad_lines=flags.skip_bad_lines, seed=settings.seed,
    )  # fmt: skip


def changes_of(flags: argparse.Namespace, made: type[Settings]) -> dict[str, Any]:
    """Return the flags that have the names of a trainer's settings; None where one was not given."""
    return {field.name: getattr(flags, field.name) for field in dataclasses.fields(made)}


def options_of(flags: argparse.Namespace, loaded: FrozenModel, command: str) -> Options:
    """Return the options of :func:`train.loop.run` that the flags give; messages open with the command's name."""

    def say(text: str) -> None:
        if hosts.first():
            print(f"{command}: {text}.", file=sys.stderr)

    return Options(
        name=str(flags.model), invocation=flags.invocation, digests=evaluator.digests(loaded.model, loaded.tokenizer),
        mesh=loaded.mesh, resume=flags.resume == "auto", save_every=flags.save_every, keep=flags.keep,
        eval_every=flags.eval_every, log_every=flags.log_every, stop_after=flags.stop_after, measure=flags.measure,
        progress_bar=True, say=say,
    )  # fmt: skip


def report(flags: argparse.Namespace, summary: dict[str, Any] | None, table: Callable[[dict[str, Any]], str]) -> None:
    """Print the summary of a run as a table or as JSON; None is a run that --stop-after ended."""
    if summary is None:
        print(f"stopped after step {flags.stop_after}; run the same command without --stop-after to resume.")
    elif not flags.measure and not flags.json:
        print(
            f"{summary['tokens']:,} tokens in {summary['seconds']:,.0f} s; run the same command without --no-measure "
            "to measure held-out text."
        )
    else:
        print(json.dumps(summary) if flags.json else table(summary))
