"""The flags that every command runs a model by, and what they give: settings, a mesh, input."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

import models
from models import commands, files, hosts
from models.commands import distributed
from models.sampling import Sampling

MODEL = "'smollm2', 'retriever' (inside the package), a Hugging Face folder, a GGUF file or a hub name"


def add_policy_flags(
    flags: argparse.ArgumentParser, *, budget: str, policy: str = "full", text: str = "prompt"
) -> None:
    """Add --policy, --budget and --when.

    Args:
        budget: the end of the help of --budget.
        policy: the default of --policy.
        text: what is compressed, in one word.
    """
    flags.add_argument(
        "--policy", default=policy,
        help="what to keep, such as snapkv+caote; 'full' keeps all tokens (default: %(default)s)",
    )  # fmt: skip
    flags.add_argument("--budget", help=f"slots per head (512), or a ratio of the {text} (0.25){budget}")
    flags.add_argument(
        "--when", default="block", choices=["block", "prompt", "published"],
        help=f"when to evict: after every block, once after the {text}, or as in the policy's paper (default: "
        "%(default)s)",
    )  # fmt: skip


def add_run_flags(
    flags: argparse.ArgumentParser, max_new_tokens: int, *, evicts: bool = True, published: bool = False
) -> None:
    """Add the flags that every command runs a model by: blocks, evictions during an answer, sampling.

    Args:
        evicts: whether tokens are evicted during an answer.
        published: whether the default temperature is the model's own, None here.
    """
    flags.add_argument("--block", type=int, default=128, help="prompt tokens per step (default: %(default)s)")
    if evicts:
        flags.add_argument(
            "--evict-every",
            type=int,
            metavar="N",
            help="during an answer, evict every N steps, 0 for never (default: 1, or the length of the policy's "
            "observation window)",
        )
    flags.add_argument(
        "--max-new-tokens", type=int, default=max_new_tokens, help="most tokens of an answer (default: %(default)s)"
    )
    default = "the model's published one, with its further limits, else 0" if published else "%(default)s"
    flags.add_argument(
        "--temperature",
        type=float,
        default=None if published else 0.0,
        help=f"0 takes the most likely token (default: {default})",
    )
    flags.add_argument("--top-k", type=int, help="draw from the k most likely tokens (default: all)")
    flags.add_argument(
        "--top-p", type=float, help="draw from the fewest tokens that reach this probability (default: all)"
    )
    flags.add_argument(
        "--min-p", type=float, help="draw from the tokens with this share of the largest probability (default: all)"
    )
    flags.add_argument(
        "--repetition-penalty", type=float, default=None if published else 1.0,
        help="divide the logits of tokens that the text has already, 1 for none (default: "
        f"{'as the temperature' if published else '%(default)s'})",
    )  # fmt: skip
    flags.add_argument(
        "--seed", type=_seed, default=0, help="random seed for a temperature above 0 (default: %(default)s)"
    )
    flags.add_argument(
        "--dtype",
        help="float32, bfloat16 (slow on a CPU) or float16, of the predictor, too (default: the checkpoint's)",
    )
    commands.add_cache_dtype_flag(flags)


def _seed(text: str) -> int:
    seed = int(text)
    if not -(2**63) <= seed < 2**63:
        raise argparse.ArgumentTypeError(f"{text} is not an integer of at most 64 bits")
    return seed


def run_settings(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the values of :func:`add_run_flags` as arguments of :func:`models.stream`, without seed and dtype."""
    names = ("block", "evict_every", "max_new_tokens", *Sampling._fields, "cache_dtype")
    return {name: getattr(flags, name) for name in names if hasattr(flags, name)}


def add_mesh_flags(flags: argparse.ArgumentParser) -> None:
    """Add --mesh, which :func:`mesh_of` reads, and the flags of :func:`models.commands.distributed.join`."""
    flags.add_argument(
        "--mesh",
        help="devices, such as data=2,tensor=4 (default: one device, or tensor over all devices of several processes)",
    )
    distributed.add_flags(flags)


def mesh_of(flags: argparse.Namespace) -> Mesh | None:
    """Return the mesh that --mesh names; without it, all devices of several processes, or None for one process."""
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
