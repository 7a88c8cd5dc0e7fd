"""Computes what some methods read of a model from a text, as files: Q-Filters, centres of queries, scores of heads."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import models
from models import commands, files
from models.commands.shared_flags import FLAGS, add_shared_flags, count

EXAMPLES = """examples:
  python -m models.calibrate retriever --text book.txt --q-filters filters.npy --heads heads.npy
  python -m models.generate retriever --prompt-file book.txt --policy "q_filters(file='filters.npy')" --budget 256
  python -m models.generate retriever --prompt-file book.txt --policy "snapkv@duo(file='heads.npy')" --budget 512
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    flags = commands.parser(
        "models.calibrate",
        "models.calibrate",
        description="Computes Q-Filters, centres of queries and the scores of heads of a model from a text.",
        examples=EXAMPLES,
    )
    flags.add_argument("model", help=FLAGS["model"]["help"])
    flags.add_argument("--text", required=True, metavar="FILE", help="a UTF-8 text of the kind that the model reads")
    flags.add_argument("--q-filters", metavar="FILE", help="write the filters that q_filters reads, a .npy file")
    flags.add_argument(
        "--centres", metavar="FILE", help="write the centres of queries that triattention reads, a .npy file"
    )
    flags.add_argument("--heads", metavar="FILE", help="write the scores that duo and headkv read, a .npy file")
    flags.add_argument("--rows", type=count, default=8, help="most pieces of the text that are read")
    flags.add_argument("--length", type=count, default=512, help="tokens of a piece")
    add_shared_flags(flags, "dtype")
    return commands.call(flags, _run, "models.calibrate", arguments)


def _run(flags: argparse.Namespace) -> None:
    asked = (
        (flags.q_filters, models.q_filters),
        (flags.centres, models.query_centres),
        (flags.heads, models.head_scores),
    )
    if not any(path for path, _ in asked):
        raise ValueError("there is nothing to compute; give --q-filters FILE, --centres FILE or --heads FILE.")
    for path, _ in asked:
        if path and Path(path).suffix != ".npy":
            raise ValueError(f"{path} is no .npy file; give a name that ends in .npy.")
    files.check_outputs([path for path, _ in asked])
    text = files.read_text(flags.text, "text")
    model, tokenizer = models.load(flags.model, dtype=flags.dtype)
    tokenizer = commands.check_tokenizer(flags.model, tokenizer)
    tokens = np.asarray(tokenizer.encode(text), np.int32)
    length, rows = flags.length, min(flags.rows, len(tokens) // flags.length)
    if not rows:
        raise ValueError(f"{flags.text} has {len(tokens)} tokens, expected at least {length}; give more, or --length.")
    pieces = tokens[: rows * length].reshape(rows, length)
    for path, measure in asked:
        if path:
            measured = measure(model, pieces)
            with files.replacing(path) as temporary, temporary.open("wb") as file:
                np.save(file, measured)
            print(f"{path}: {measured.shape} from {rows} pieces of {length} tokens")
