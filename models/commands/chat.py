"""The flags of `python -m models.chat`."""

from __future__ import annotations

import argparse

from models import commands
from models.commands.shared_flags import FLAGS, RUN, add_shared_flags, count

EXAMPLES = """examples:
  python -m models.chat smollm2 --policy snapkv+caote --budget 1024
  python -m models.chat path/to/Qwen3-0.6B --policy "h2o+protect(sinks=4)" --budget 512 --temperature 0.7
  python -m models.chat smollm2 --load talk.cache

in the conversation:
  /save FILE   write the conversation's cache into a file
  /load FILE   continue the conversation of a file
  /forget      start a new conversation
  /memory      say what the cache holds, and what it takes
  /help        list the commands
  /quit        leave, as Ctrl-D does; Ctrl-C ends an answer
"""


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command's flags."""
    flags = commands.parser(
        "kvjax-chat", "models.chat", description="Chats in the terminal; its memory does not grow.", examples=EXAMPLES
    )
    flags.add_argument("model", help=FLAGS["model"]["help"])
    flags.add_argument(
        "--policy",
        help="what to keep; 'auto' is gate for a model that has one, else window; 'full' keeps all, so memory grows "
        "(default: auto)",
    )
    flags.add_argument("--budget", type=count, help="tokens that each head keeps (default: 1024; none for 'full')")
    flags.add_argument(
        "--load", metavar="FILE",
        help="continue a conversation that /save wrote, with its policy and budget (default: a new conversation)",
    )  # fmt: skip
    own = dict(max_new_tokens=512, temperature=None, repetition_penalty=None)
    add_shared_flags(flags, "may_repeat", "system", "template", "evict_every", *RUN, **own)
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return commands.call(parser(), commands.action("chat"), "models.chat", arguments)
