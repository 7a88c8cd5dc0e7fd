"""The command kvjax-train-butler, and `python -m train.butler`: behind a look at whether what it needs is installed."""

from __future__ import annotations

from models import commands


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    with commands.extra("train", "kvjax-train-butler"):
        from train import butler
    return butler.main(arguments)
