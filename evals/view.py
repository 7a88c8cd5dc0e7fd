"""A page of what each policy forgot: one prompt, its tokens shaded by how many heads still hold them.

A slider moves through the blocks of the prompt and the steps of the answer. Layer and head can be chosen, and two
policies stand side by side, each with its answer.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

import kvjax
import models
from evals import command_line, evaluator, page, run_settings, tasks
from kvjax._src.chains import policy_of
from kvjax._src.layer_caches import LayerCaches
from kvjax._src.split_cache import ModelCache
from models import commands, files
from models.commands import provenance
from models.commands.shared_flags import add_shared_flags, count
from models.networks import load_networks, read_by, wanted_by

TEMPLATE = Path(__file__).with_name("view.html")
NEVER = 0xFFFF
EXAMPLES = """examples:
  python -m evals view --html view.html
  python -m evals view --prompt-file book.txt --question "Who baked?" --policies "snapkv,laprox" --budget 0.2
"""


class Trace:
    """The step at which each token entered the cache, and that at which each head lost it; no token ever returns."""

    def __init__(self, layers: int, heads: int, tokens: int) -> None:
        self.steps: list[dict[str, Any]] = []
        self.entered = np.full(tokens, NEVER, np.uint16)
        self.left = np.full((layers, heads, tokens), NEVER, np.uint16)

    def add(self, label: str, fed: int, held: Bool[np.ndarray, "L K tokens"]) -> None:
        """Add a step: the tokens that each head holds when the first ``fed`` tokens have been fed."""
        step = len(self.steps)
        self.steps.append({"label": label, "fed": fed})
        self.entered[:fed] = np.minimum(self.entered[:fed], step)
        gone = ~held & (np.arange(held.shape[-1]) < fed) & (self.left == NEVER)
        self.left[gone] = step


def held_tokens(cache: ModelCache, tokens: int) -> Bool[np.ndarray, "L K tokens"]:
    """Return which of a single sequence's tokens each layer and head holds."""
    L, _, K = cache.heads_shape
    found = np.zeros((L * K, tokens + 1), bool)  # the last column takes free slots
    position = np.asarray(_positions(cache)).reshape(L * K, -1)
    found[np.arange(L * K)[:, None], np.where(position >= 0, position, tokens)] = True
    return found[:, :tokens].reshape(L, K, tokens)


@jax.jit
def _positions(cache: ModelCache) -> Int[Array, "L B K S"]:
    if isinstance(cache, LayerCaches):
        return cache.position
    return jnp.stack([cache.layer(layer).position for layer in range(cache.heads_shape[0])])


def trace(
    model: models.Decoder,
    tokenizer: models.Tokenizer,
    tokens: Sequence[int],
    options: models.Options,
    question: int = 0,
) -> dict[str, Any]:
    """Answer a prompt, and return the tokens that were held after each block and each step.

    The last ``question`` tokens are not known when the prompt is compressed.

    Returns:
        ``answer``; ``pieces`` of the answer's tokens; ``steps``; ``entered`` and ``left`` in base64, 16 bits per
        number.
    """
    length, total = len(tokens), len(tokens) + options.max_new_tokens
    followed: Trace | None = None
    fed = 0

    def after_block(done: int, of: int, cache: Any) -> None:
        nonlocal followed, fed
        if followed is None:
            followed = Trace(cache.heads_shape[0], cache.heads_shape[2], total)
        fed = int(cache.next_position[0])
        inside = fed <= length - question
        first = followed.steps[-1]["fed"] if followed.steps else 0
        what = "block" if inside else "question"
        followed.add(f"{what}, tokens {first + 1} to {fed}", fed, held_tokens(cache, total))

    said: list[int] = []
    steps = models.stream(
        model, np.array([list(tokens)], np.int32), options=options,
        policy=models.with_repeat_prompt(options.policy, tokenizer), question=question, on_block=after_block,
    )  # fmt: skip
    for token, cache in steps:
        if followed is not None and said:
            followed.add(f"answer, step {len(said)}", length + len(said), held_tokens(cache, total))
        said.append(int(token[0]))
    assert followed is not None
    kept = said[:-1] if said and said[-1] in model.config.eos else said
    encode = lambda array: base64.b64encode(array.astype("<u2").tobytes()).decode()  # noqa: E731
    layers, heads, _ = followed.left.shape
    return {
        "policy": options.policy,
        "budget": options.budget,
        "layers": layers,
        "heads": heads,
        "answer": tokenizer.decode(kept),
        "pieces": pieces(tokenizer, said),
        "steps": followed.steps,
        "entered": encode(followed.entered),
        "left": encode(followed.left),
    }


def pieces(tokenizer: models.Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Return the text of each token; "" for one that ends within a character."""
    stream = tokenizer.stream(skip_special_tokens=False)
    return [stream.add(token) for token in tokens]


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("--prompt-file", type=Path, help="a UTF-8 text (default: facts in prose and a question)")
    flags.add_argument("--question", help="text after the prompt that is not known when the prompt is compressed")
    flags.add_argument(
        "--policies", default="full,snapkv,snapkv+caote", help="two or more by comma; 'full' keeps all tokens"
    )
    names = ("budget", "when", "networks", "model", "block", "seed", "dtype", "max_new_tokens")
    add_shared_flags(flags, *names, budget="96", block=64, max_new_tokens=8)
    flags.add_argument("--length", type=count, default=384, help="tokens of the default prompt")
    flags.add_argument("--html", type=Path, required=True, help="write the page here")


def command(flags: argparse.Namespace) -> None:
    """Write the page."""
    names = commands.listed("policy", flags.policies, "--policies full,snapkv+caote")
    policies = list(dict.fromkeys(name if name == "full" else str(kvjax.parse(name)) for name in names))
    budget = commands.parse_budget(flags.budget)
    run_settings.check_budgets([policy for policy in policies if policy != "full"], [budget])
    prompt = None if flags.prompt_file is None else files.read_text(flags.prompt_file, "prompt")
    if prompt is not None and not prompt.strip():
        raise ValueError(f"{flags.prompt_file} is empty; give some text.")
    files.check_outputs([flags.html])
    model, tokenizer = command_line.load(flags)
    reads = [wanted_by(policy_of(policy)) for policy in policies]
    networks = load_networks(flags.networks, flags.model, model, reads, dtype=flags.dtype)
    wanted = None
    if prompt is None:
        sample = tasks.needle(flags.seed, tokenizer, flags.length, 0.3)
        tokens, wanted = sample.tokens, sample.answer
        question = 0 if flags.question is None else len(tokens) - sample.context_end
    else:
        tokens = tokenizer.encode(prompt)
        asked = [] if flags.question is None else tokenizer.continuation(f"\n{flags.question}", *tokens[-1:])
        tokens, question = [*tokens, *asked], len(asked)
    blocks = math.ceil(len(tokens) / flags.block)
    if blocks + flags.max_new_tokens + 2 >= NEVER:
        raise ValueError(f"{len(tokens):,} tokens in blocks of {flags.block} are too many steps; give larger blocks.")
    shared = models.Options(block=flags.block, when=flags.when, max_new_tokens=flags.max_new_tokens)
    runs = [
        dataclasses.replace(
            shared,
            policy=policy,
            budget=None if policy == "full" else budget,
            networks=read_by(networks, policy_of(policy)),
        )
        for policy in policies
    ]
    for options in runs:  # all policies are checked before the first is run
        models.stream(model, np.array([list(tokens)], np.int32), options=options, question=question)
    bar = commands.progress_bar("policy", over=runs)
    traces = [trace(model, tokenizer, tokens, options, question) for options in bar]
    data = {
        "title": "What did each policy forget?",
        "model": flags.model,
        "wanted": wanted,
        "when": flags.when,
        "pieces": pieces(tokenizer, tokens),
        "question": question,
        "traces": traces,
        **provenance.facts(flags.invocation, flags.seed, evaluator.digests(model, tokenizer, networks)),
    }
    with files.replacing(flags.html) as temporary:
        temporary.write_text(page.render(TEMPLATE, data["title"], data), encoding="utf-8")
    for found in traces:
        print(f"{found['policy']}, budget {found['budget'] or 'all'}: {found['answer']!r}")
    print(f"page: {flags.html}" + ("" if wanted is None else f" (the right answer is {wanted})"))
