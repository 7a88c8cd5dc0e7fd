"""The flags of `python -m models.ask`."""

from __future__ import annotations

import argparse
from typing import Any

from models import commands
from models.commands.shared_flags import FLAGS, MESH, RUN, add_shared_flags

EXAMPLES = """examples:
  python -m models.ask smollm2 --document docs/examples/document.txt --policy repeat \\
      --question "What is the code of amber falcon?"
  python -m models.ask smollm2 --document book.txt --save book.cache --question "Who?" --question "Where?"
  python -m models.ask smollm2 --load book.cache          # asks for questions, one per line
  python -m models.ask smollm2 --document book.txt --policy repeat --budget 0.25 --json < questions.txt
"""


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command's flags."""
    flags = commands.parser(
        "kvjax-ask",
        "models.ask",
        description="Reads and compresses a document once, and answers questions about it.",
        examples=EXAMPLES,
    )
    flags.add_argument("model", help=FLAGS["model"]["help"])
    source = flags.add_mutually_exclusive_group(required=True)
    source.add_argument("--document", metavar="FILE", help="a UTF-8 text file; - for standard input")
    source.add_argument("--load", metavar="FILE", help="a document that --save wrote, which is not read again")
    flags.add_argument(
        "--question", action="append", metavar="TEXT",
        help="a question; give the flag once for each (default: the lines of standard input)",
    )  # fmt: skip
    flags.add_argument("--save", metavar="FILE", help="write the compressed document into a file (default: no file)")
    budget = "slots per head (512), or a ratio of the document (0.25) (default: 0.25; none for 'full')"
    what = "what to keep; 'auto' is gate for a model that has one, else repeat; 'full' keeps all tokens"
    helps: dict[str, Any] = dict(policy=dict(default=None, help=f"{what} (default: auto)"), budget=dict(help=budget))
    helps["when"] = dict(default=None, help=f"{FLAGS['when']['help']} (default: block)")
    add_shared_flags(flags, "policy", "budget", "reading_budget", "when", "system", "template", **helps)
    flags.add_argument("--plain", action="store_true", help="leave the model's chat template out (default: no)")
    at_once = dict(default=1, help="questions answered at once, each in a copy of the cache")
    add_shared_flags(flags, "networks", "may_repeat", "batch", *RUN, *MESH, max_new_tokens=128, batch=at_once)
    flags.add_argument("--json", action="store_true", help="print one JSON object (default: the answers)")
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return commands.call(parser(), commands.action("ask"), "models.ask", arguments)
