"""The flags of `python -m models.calibrate`."""

from __future__ import annotations

from collections.abc import Sequence

from models import commands
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
    return commands.call(flags, commands.action("calibrate"), "models.calibrate", arguments)
