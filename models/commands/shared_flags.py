"""The flags that commands share, each defined once, and what they give: settings, a mesh, input."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import models
from models import commands, files, hosts

if TYPE_CHECKING:
    from jax.sharding import Mesh

HOSTS = ("coordinator", "processes", "process_id")  # those that models.commands.distributed.join reads
MESH = ("mesh", *HOSTS)
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
RUN = ("block", "max_new_tokens", *SAMPLING, "seed", "dtype", "cache_dtype")


def at_least(least: int) -> Callable[[str], int]:
    """Return the ``type`` of a flag that is an integer from ``least``.

    Example:
        >>> from models.commands.shared_flags import at_least
        >>> at_least(1)("80e6")
        80000000
    """

    def read(text: str) -> int:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number < 1e15 or number != int(number):
            raise argparse.ArgumentTypeError(f"expected an integer from {least}, not {text!r}")
        return int(number)

    return read


count = at_least(1)


def _seed(text: str) -> int:
    if not text.lstrip("-").isdecimal() or not -(2**63) <= int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"{text} is not an integer of at most 64 bits")
    return int(text)


def _cache_dtype(text: str) -> str:
    from kvjax._src.quantise import check_dtypes

    try:
        return str(check_dtypes(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removesuffix(".")) from None


def _budget(text: str) -> int | float:
    try:
        return commands.parse_budget(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removesuffix(".")) from None


def _template_value(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, such as enable_thinking=false, not {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


# What argparse takes of each flag. A default in parentheses is that of a flag without a value. The others are those of
# models.Options, which would import JAX.
FLAGS: dict[str, dict[str, Any]] = {
    "model": dict(
        default="retriever",
        help="'smollm2', 'retriever' (inside the package), a Hugging Face folder, a GGUF file or a hub name",
    ),
    "policy": dict(default="full", help="what to keep, such as snapkv+caote; 'full' keeps all tokens"),
    "budget": dict(help="slots per head (512), or a ratio of the prompt (0.25) (default: none, for 'full')"),
    "reading_budget": dict(
        type=_budget, metavar="BUDGET",
        help="slots per head, or a ratio, while a prompt is read; its last block evicts to the budget (default: the "
        "budget)",
    ),
    "when": dict(
        default="block", choices=("block", "prompt", "published"),
        help="when to evict: after every block, once after the prompt, or as in the policy's paper",
    ),
    "moments": dict(
        flag="--when", default="block", help="block, prompt, or published (as in each policy's paper); several by comma"
    ),
    "block": dict(type=count, default=128, help="prompt tokens per step"),
    "evict_every": dict(
        type=at_least(0), metavar="N",
        help="during an answer, evict every N steps, 0 for never (default: 1, or the length of the policy's "
        "observation window)",
    ),
    "policies": dict(
        help="several by comma; 'full' keeps all tokens; 'select=quest' keeps all, and a step reads a budget of them"
    ),
    "budgets": dict(flag="--budgets --budget", help="slots per head, or ratios of the prompt; several by comma"),
    "allocations": dict(
        default="",
        help="how slots are divided among heads, such as uniform,adakv; every policy runs with each; several by comma",
    ),
    "questions": dict(
        flag="--question", default="known",
        help="known when the context is compressed, or unknown (it comes later); several by comma",
    ),
    "against": dict(
        metavar="POLICY",
        help="the policy, 'full' or a selection that each policy is compared with on the same samples; it is run, too "
        "(default: recency)",
    ),
    "networks": dict(
        type=Path, nargs="+", metavar="FOLDER",
        help="folders of small networks that policies and selections read, such as a scorer's for zap (default: the "
        "model's own)",
    ),
    "sinks": dict(type=at_least(0), default=4, help="number of first tokens that --select always reads"),
    "max_new_tokens": dict(type=count, default=64, help="most tokens of an answer"),
    "temperature": dict(
        type=float, default=0.0,
        help="0 takes the most likely token (default: the model's published one, with its further limits, else 0)",
    ),
    "top_k": dict(type=count, help="draw from the k most likely tokens (default: all)"),
    "top_p": dict(type=float, help="draw from the fewest tokens that reach this probability (default: all)"),
    "min_p": dict(type=float, help="draw from the tokens with this share of the largest probability (default: all)"),
    "repetition_penalty": dict(
        type=float, default=1.0,
        help="divide the logits of tokens that the text has already, 1 for none (default: as the temperature)",
    ),
    "seed": dict(type=_seed, default=0, help="random seed"),
    "dtype": dict(
        help="float32, bfloat16 (slow on a CPU) or float16, of networks, too (default: the checkpoint's)"
    ),
    "cache_dtype": dict(
        type=_cache_dtype, metavar="DTYPE",
        help="keys and values of the cache: float32, bfloat16, float16, int8 or float8_e4m3fn, or two of them, such as "
        "int8/bfloat16 (default: the model's)",
    ),
    "chat": dict(action="store_true", help="put prompts into the model's chat template (default: no)"),
    "template": dict(
        type=_template_value, action="append", metavar="NAME=VALUE",
        help="a value that the chat template reads, such as enable_thinking=false; JSON or a text; give the flag once "
        "for each (default: none)",
    ),
    "system": dict(help="the text of the system message (default: that of the chat template)"),
    "may_repeat": dict(
        action="store_true", help="let an answer go on that says the same three times or more (default: it is ended)"
    ),
    "batch": dict(type=count, default=16, help="samples answered at once"),
    "out": dict(type=Path, help="a folder for the records; a killed run is resumed there"),
    "json": dict(type=Path, help="write all figures here"),
    "plot": dict(type=Path, help="write the picture here (.png, .svg or .pdf)"),
    "mesh": dict(
        help="devices, such as data=2,tensor=4 (default: one device, or tensor over all devices of several processes)"
    ),
    "coordinator": dict(
        metavar="HOST:PORT",
        help="run on several hosts: address of the first process, the same for all; 'auto' reads the environment of "
        "Slurm, Open MPI, Kubernetes or a TPU pod (default: one process)",
    ),
    "processes": dict(type=int, metavar="N", help="how many processes run together (default: 1)"),
    "process_id": dict(type=int, metavar="I", help="the number of this process, from 0 (default: none)"),
}  # fmt: skip


def add_shared_flags(flags: argparse.ArgumentParser, *names: str, **changes: Any) -> None:
    """Add some of :data:`FLAGS`.

    Args:
        names: of the flags, with _ in place of -.
        changes: other defaults, by the names of the flags, or dictionaries of what else argparse is to take.

    Example:
        >>> from models.commands import Parser
        >>> from models.commands.shared_flags import add_shared_flags
        >>> flags = Parser(prog="example")
        >>> add_shared_flags(flags, "block", "max_new_tokens", block=64)
        >>> flags.parse_args(["--max-new-tokens", "8"]).block
        64
    """
    for name in names:
        change = changes.get(name, {})
        given = FLAGS[name] | (change if isinstance(change, dict) else {"default": change})
        if given.get("default") not in (None, ""):
            given["help"] = given["help"].partition(" (default")[0] + " (default: %(default)s)"
        flags.add_argument(*given.pop("flag", f"--{name.replace('_', '-')}").split(), **given)


def run_settings(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that are arguments of :func:`models.stream`: those of an answer, without seed and dtype."""
    names = ("block", "evict_every", "max_new_tokens", *SAMPLING, "cache_dtype")
    return {name: getattr(flags, name) for name in names if hasattr(flags, name)}


def with_template_values(flags: argparse.Namespace, tokenizer: models.Tokenizer) -> models.Tokenizer:
    """Return the tokenizer with the values of --template, after a check that a chat template will read them."""
    if not flags.template:
        return tokenizer
    if tokenizer.chat_template is None:
        raise ValueError(f"{flags.model} has no chat template, so it takes no values; leave --template out.")
    if not getattr(flags, "chat", True) or getattr(flags, "plain", False):
        raise ValueError("--template is for prompts in the chat template, which is not used here; leave it out.")
    return tokenizer.with_values(**dict(flags.template))


def mesh_of(flags: argparse.Namespace) -> Mesh | None:
    """Return the mesh that --mesh names; without it, all devices of several processes, or None for one process."""
    import jax

    named = getattr(flags, "mesh", None)  # not every evaluation has the flag
    text = f"tensor={jax.device_count()}" if named is None and hosts.several() else named
    return None if text is None else models.parse_mesh(text)


def read_prompts[Made](path: str, kinds: Mapping[str, Any], make: Callable[[dict[str, Any], int], Made]) -> list[Made]:
    """Read a file of prompts, one JSON object per line; an error names its line.

    Args:
        path: see :func:`read_input`.
        kinds: the fields that an object may have, ``prompt`` among them, and their types.
        make: called with the fields and the number of each line, from 1.
    """
    name = "standard input" if path == "-" else path
    made = []
    for number, line in enumerate(read_input(path, "prompts").split("\n"), 1):
        if line.strip():
            try:
                made.append(make(_fields(line, kinds), number))
            except ValueError as error:
                raise ValueError(f"line {number} of {name}: {commands.sentence(error)}") from None
    if not made:
        raise ValueError(f'{name} has no prompts; give a line such as {{"prompt": "Why is the sky blue?"}} for each.')
    return made


def _fields(line: str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of a line of prompts and check their types."""
    fields = files.json_object(line)
    if fields is None:
        raise ValueError('it is no JSON object; expected one such as {"prompt": "Why is the sky blue?"}.')
    for name, value in fields.items():
        if name not in kinds:
            raise ValueError(f"unknown field {name[:60]!r}; expected one of {', '.join(kinds)}.")
        if kinds[name] is not object and (not isinstance(value, kinds[name]) or isinstance(value, bool)):
            kind = "text" if kinds[name] is str else "a number"
            raise ValueError(f"{name} is a JSON {type(value).__name__}; expected {kind}.")
    if not fields.get("prompt", "").strip():
        raise ValueError('the prompt is missing or empty; give some text as "prompt".')
    return fields


def read_input(path: str, what: str) -> str:
    """Read a text file, or standard input, which is called "-"; the first of several processes reads it."""
    return hosts.from_first(
        lambda: files.decoded(sys.stdin.buffer.read(), "standard input") if path == "-" else files.read_text(path, what)
    )
