"""The script kvjax-train-butler: `python -m train.butler` of an installed package."""

from __future__ import annotations

from models import commands


def main(arguments: list[str] | None = None) -> int:
    """Run the command, or name the extra that it lacks, and return its exit code."""
    with commands.extra("train", "kvjax-train-butler"):
        from train import butler
    return butler.main(arguments)
