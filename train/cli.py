"""The script kvjax-train-butler, which is `python -m train.butler` where the package is installed."""

from __future__ import annotations

from models import commands


def main(arguments: list[str] | None = None) -> int:
    """Runs the command, or says which extra it lacks; returns its exit code."""
    with commands.extra("train", "kvjax-train-butler"):
        from train import butler
    return butler.main(arguments)
