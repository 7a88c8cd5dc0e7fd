"""The flags of `python -m models.batch`."""

from __future__ import annotations

import argparse
from pathlib import Path

from models import commands
from models.commands.shared_flags import MESH, RUN, add_shared_flags, count

EXAMPLES = """examples:
  python -m models.batch prompts.jsonl --out answers.jsonl
  python -m models.batch prompts.jsonl --out answers.jsonl --model smollm2 --chat --policy snapkv+caote --budget 512
"""


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command's flags."""
    flags = commands.parser(
        "kvjax-batch",
        "models.batch",
        description="Answers a file of prompts by continuous batching: rows of fixed memory that requests share.",
        examples=EXAMPLES,
    )
    flags.add_argument(
        "prompts",
        metavar="FILE",
        help='one JSON object {"prompt": ...} per line, with any "id" that you like; - reads standard input',
    )
    flags.add_argument("--out", type=Path, required=True, help="file of the answers, one JSON object per line")
    flags.add_argument("--rows", type=count, default=8, help="answers that are made at once")
    add_shared_flags(flags, "model", "chat", "template", "policy", "budget", "when", "evict_every")
    add_shared_flags(flags, "networks", *RUN, *MESH)
    flags.add_argument(
        "--longest-prompt",
        type=count,
        help="most tokens of a prompt, which sizes the rows of 'full' and of ratios (default: the model's positions "
        "less the answer)",
    )
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return commands.call(parser(), commands.action("batch"), "models.batch", arguments)
