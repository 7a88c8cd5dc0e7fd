"""Computes what some methods read of a model from a text, as files: Q-Filters, centres of queries, scores of heads."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import models
from models import commands, files


def command(flags: argparse.Namespace) -> None:
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
