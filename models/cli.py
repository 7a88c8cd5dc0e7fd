"""The command line of `python -m models.generate`: text in, text out, inside a budget."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import models
from kvjax.policy import policy_of
from models import commands, provenance, selecting

EXAMPLES = """examples:
  python -m models.generate retriever --prompt-file book.txt --policy h2o+caote --budget 512 --block 128
  python -m models.generate retriever --prompt-file book.txt --policy laprox@model --budget 0.2 --when prompt
  python -m models.generate retriever --prompt-file book.txt --select butler --budget 0.5
  python -m models.generate retriever --prompt-file book.txt --select "quest(page_size=16)" --budget 256 --sinks 4
  python -m models.generate path/to/model --prompt-file book.txt --policy butler+caote --butler butler/ --budget 512
  python -m models.generate path/to/Llama-3.2-1B-Instruct --chat --prompt "Why is the sky blue?" --dtype bfloat16
"""


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = commands.parser(
        "kvjax-generate",
        "models.generate",
        description="Generates text with a KV cache inside a budget.",
        examples=EXAMPLES,
    )
    flags.add_argument("model", help="'retriever' (inside the package), a Hugging Face folder, or a hub name")
    source = flags.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the prompt itself")
    source.add_argument("--prompt-file", type=Path, help="a UTF-8 text file with the prompt; standard input by default")
    flags.add_argument("--question", help="text behind the prompt, not known when the prompt is compressed")
    flags.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    flags.add_argument(
        "--policy", default="full", help="what to keep, such as snapkv+caote; 'full', the default, keeps all"
    )
    flags.add_argument(
        "--select",
        help="evict nothing, but read a part: butler, oracle, quest(page_size=16), first_layer, previous_layer, "
        "random, streaming",
    )
    flags.add_argument("--butler", type=Path, help="a predictor's folder; by default 'butler' inside the model's")
    flags.add_argument("--sinks", type=int, default=4, help="first tokens that --select always reads (default 4)")
    flags.add_argument(
        "--budget",
        help="slots per head (512), or a ratio of the prompt (0.25); with --select the tokens that a step reads, or "
        "their share",
    )
    flags.add_argument("--block", type=int, default=128, help="prompt tokens a step (default 128)")
    flags.add_argument("--when", default="block", choices=["block", "prompt"], help="evict after every block, or once")
    flags.add_argument("--evict-every", type=int, default=1, help="in decode, evict every n steps; 0 for never")
    flags.add_argument("--max-new-tokens", type=int, default=64)
    flags.add_argument("--temperature", type=float, default=0.0, help="0 (default) takes the most likely token")
    flags.add_argument("--top-k", type=int)
    flags.add_argument("--top-p", type=float)
    flags.add_argument("--seed", type=int, default=0, help="for temperature above 0")
    flags.add_argument("--dtype", help="float32, bfloat16 (slow on a CPU) or float16; by default the checkpoint's")
    flags.add_argument("--mesh", help="devices, such as data=2,tensor=4")
    flags.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    commands.add_cache_flag(flags)
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    flags = parser().parse_args(arguments)
    commands.keep_compiled(vars(flags).pop("compilation_cache"))
    return commands.run(lambda: _generate(flags), "models.generate")


def _generate(flags: argparse.Namespace) -> None:
    if not -(2**63) <= flags.seed < 2**63:
        raise ValueError(f"--seed is {flags.seed}; give an integer of at most 64 bits.")
    budget = None if flags.budget is None else commands.parse_budget(flags.budget)
    policy_of(flags.policy), selecting.parse_select(flags.select)  # before the weights are read
    prompt = _read_prompt(flags)
    model, tokenizer = models.load(
        flags.model, dtype=flags.dtype, mesh=None if flags.mesh is None else models.parse_mesh(flags.mesh)
    )
    if tokenizer is None:
        raise ValueError(f"{flags.model} has no tokenizer.json, and text needs one; copy it from the model's source.")
    butler = _load_butler(flags, model)
    text = tokenizer.chat([{"role": "user", "content": prompt}]) if flags.chat else prompt
    tokens = tokenizer.encode(text, add_special_tokens=not flags.chat)
    question = [] if flags.question is None else tokenizer.encode(flags.question, add_special_tokens=False)
    tokens = [*tokens, *question]

    clock = _Clock()
    steps = models.stream(
        model,
        jnp.asarray([tokens], jnp.int32).reshape(1, len(tokens)),
        policy=flags.policy,
        budget=budget,
        select=flags.select,
        butler=butler,
        sinks=flags.sinks,
        block=flags.block,
        max_new_tokens=flags.max_new_tokens,
        when=flags.when,
        question=len(question),
        evict_every=flags.evict_every or None,
        temperature=flags.temperature,
        top_k=flags.top_k,
        top_p=flags.top_p,
        key=jax.random.key(flags.seed),
        on_block=clock.block,
    )
    pieces, generated = tokenizer.stream(), []
    cache_bytes = 0
    for token, cache in steps:
        clock.token()
        cache_bytes = cache.nbytes
        generated.append(int(token[0]))
        if generated[-1] not in model.config.eos and not flags.json:
            print(pieces.add(generated[-1]), end="", flush=True)
    summary = {
        "model": flags.model,
        "policy": flags.policy,
        "select": flags.select,
        "budget": budget,
        "read_share": _read_share(flags, budget, len(tokens), len(generated)),
        "prompt_tokens": len(tokens),
        "new_tokens": len(generated),
        "prefill_tokens_per_second": clock.prefill_rate(),
        "decode_tokens_per_second": clock.decode_rate(),
        "compile_seconds": clock.compile_seconds(),
        "cache_bytes": cache_bytes,
    }
    if flags.json:
        made = provenance.facts(flags.begun, flags.seed, provenance.fingerprints(model, tokenizer))
        print(json.dumps({**made, **summary, "text": tokenizer.decode(generated), "tokens": generated}))
        return
    print(pieces.finish(), flush=True)
    print(
        f"[{len(tokens):,} tokens in, {_rate(clock.prefill_rate())} · "
        f"{len(generated):,} out, {_rate(clock.decode_rate())} · cache {cache_bytes / 2**20:.2f} MiB · "
        f"{_selected(flags, budget, summary['read_share'])}"
        f"first block and first step, with compilation, {clock.compile_seconds():.1f} s]",
        file=sys.stderr,
    )


def _load_butler(flags: argparse.Namespace, model: models.Decoder) -> models.Butler | None:
    """The predictor that --select or --policy asks for, from --butler or from inside the model's folder."""
    if flags.butler is not None:
        return models.load_butler(flags.butler, model)
    policy, source = policy_of(flags.policy), selecting.parse_select(flags.select)
    if selecting.asks_for_predictor(policy, source) is None:
        return None
    return models.own_butler(flags.model, model)


def _read_share(flags: argparse.Namespace, budget: int | float | None, prompt: int, new: int) -> float | None:
    """Of all tokens that were there in the steps, the share that a selecting layer's heads read, at most."""
    selection = selecting.checked_selection(flags.select, None, budget, flags.sinks, prompt, flags.max_new_tokens)
    if selection is None or new < 2:
        return None
    steps = range(prompt + 1, prompt + new)  # the first token comes from the prompt
    return sum(selecting.tokens_read(selection, tokens) for tokens in steps) / sum(steps)


def _selected(flags: argparse.Namespace, budget: int | float | None, share: float | None) -> str:
    if share is None:
        return ""
    return f"{flags.select}, budget {budget:,}, reads at most {share:.1%} of the tokens · "


def _read_prompt(flags: argparse.Namespace) -> str:
    try:
        if flags.prompt is not None:
            text = flags.prompt
        elif flags.prompt_file is not None:
            text = commands.read_text(flags.prompt_file, "prompt")
        else:
            text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt is not UTF-8 text (byte {error.start}); convert it first.") from None
    if not text.strip():
        raise ValueError("the prompt is empty; give some text with --prompt, --prompt-file or standard input.")
    return text


def _rate(rate: float | None) -> str:
    return "too short to time" if rate is None else f"{rate:,.0f} tokens/s"


class _Clock:
    """Times a stream. The first block and the first step compile, so they are kept apart."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.blocks: list[tuple[float, int]] = []
        self.tokens: list[float] = []

    def block(self, done: int, total: int) -> None:
        self.blocks.append((time.perf_counter(), done))

    def token(self) -> None:
        self.tokens.append(time.perf_counter())

    def prefill_rate(self) -> float | None:
        if len(self.blocks) < 2:
            return None
        (first, before), (last, after) = self.blocks[0], self.blocks[-1]
        return (after - before) / (last - first)

    def decode_rate(self) -> float | None:
        return (len(self.tokens) - 2) / (self.tokens[-1] - self.tokens[1]) if len(self.tokens) > 2 else None

    def compile_seconds(self) -> float:
        first_step = self.tokens[1] - self.tokens[0] if len(self.tokens) > 1 else 0.0
        return self.blocks[0][0] - self.start + first_step
