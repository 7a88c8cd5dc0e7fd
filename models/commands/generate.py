"""The flags of `python -m models.generate`."""

from __future__ import annotations

import argparse

from models import commands
from models.commands.shared_flags import FLAGS, MESH, RUN, add_shared_flags

EXAMPLES = """examples:
  python -m models.generate retriever --prompt-file book.txt --policy "h2o+caote" --budget 512
  python -m models.generate retriever --prompt-file book.txt --policy laprox --budget 0.2 --when prompt
  python -m models.generate retriever --prompt-file book.txt --select "quest(page_size=16)" --budget 256 --sinks 4
  python -m models.generate path/to/model --prompt-file book.txt --policy zap+caote --networks scorer/ --budget 512
  python -m models.generate path/to/Llama-3.2-1B-Instruct --chat --prompt "Why is the sky blue?" --dtype bfloat16
  python -m models.generate smollm2 --chat --prompts prompts.jsonl --policy snapkv+caote --budget 512 > answers.jsonl
"""


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command's flags."""
    flags = commands.parser(
        "kvjax-generate",
        "models.generate",
        description="Generates text with a KV cache inside a budget.",
        examples=EXAMPLES,
    )
    flags.add_argument("model", help=FLAGS["model"]["help"])
    source = flags.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the prompt itself (default: the text of --prompt-file)")
    source.add_argument(
        "--prompt-file", metavar="FILE", help="a UTF-8 text file with the prompt (default: -, standard input)"
    )
    source.add_argument(
        "--prompts",
        metavar="FILE",
        help='many prompts: a file (- for standard input) with one JSON object {"prompt": ...} per line and, '
        'optionally, its "question", "policy" and "budget" (default: those of the flags); prints one line of JSON per '
        "prompt (default: none)",
    )
    flags.add_argument(
        "--question", help="text after the prompt, unknown when the prompt is compressed (default: none)"
    )
    budget = "slots per head (512), or a ratio of the prompt (0.25); with --select, the number or the share of tokens "
    budget += "that a step reads (default: none, for 'full')"
    add_shared_flags(flags, "chat", "template", "policy", "budget", "reading_budget", "when", budget=dict(help=budget))
    flags.add_argument(
        "--select",
        help="evict nothing, but read only some tokens in each step, by a source of importance, such as "
        "quest(page_size=16) (default: none)",
    )
    add_shared_flags(flags, "networks", "sinks", "evict_every", *RUN, *MESH)
    flags.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object instead of text (default: the text, then the figures)",
    )
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return commands.call(parser(), commands.action("generate"), "models.generate", arguments)
