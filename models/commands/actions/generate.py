"""The command line of `python -m models.generate`: text in, text out, inside a budget."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

import models
from kvjax._src.chains import policy_of
from kvjax._src.checks import MOST
from kvjax._src.policy_checks import check_policy_given
from kvjax._src.split_cache import ModelCache
from kvjax.schedule import moments
from models import commands, hosts, selecting
from models.asking import Form
from models.commands import distributed, provenance
from models.commands.programs import make_room
from models.commands.shared_flags import mesh_of, read_input, read_prompts, run_settings, with_template_values
from models.commands.terminal import sizes_in_words
from models.networks import Network, load_networks, read_by, wanted_by
from models.sizing import checked_budget, full_cache_bytes

PROMPT_FIELDS = {"prompt": str, "question": str, "policy": str, "budget": int | float}


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt with its question, policy and budget; ``line`` is its line in --prompts, None without --prompts."""

    prompt: str
    question: str | None
    policy: str
    budget: int | float | None
    line: int | None = None


class Loaded(NamedTuple):
    """Settings that all prompts of a command share."""

    model: models.Decoder
    tokenizer: models.Tokenizer
    networks: tuple[Network, ...]


def command(flags: argparse.Namespace) -> None:
    for name in ("question", "json"):
        if flags.prompts is not None and getattr(flags, name) not in (None, False):
            raise ValueError(f"argument --{name}: not allowed with argument --prompts.")
    distributed.join(flags)
    if flags.prompts is None:  # checked before the weights are read
        requests = [_only(flags)]
    else:
        requests = read_prompts(flags.prompts, PROMPT_FIELDS, functools.partial(_checked, flags))
    model, tokenizer = models.load(flags.model, dtype=flags.dtype, mesh=mesh_of(flags))
    tokenizer = with_template_values(flags, commands.check_tokenizer(flags.model, tokenizer))
    source = selecting.parse_select(flags.select)
    wanted = [wanted_by(policy_of(request.policy), source) for request in requests]
    networks = load_networks(flags.networks, flags.model, model, wanted, dtype=flags.dtype)
    loaded = Loaded(model, tokenizer, networks)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        if flags.prompts is not None:
            _answer_all(flags, loaded, requests)
        elif flags.json:
            print(_json(flags, provenance.of_run(model, tokenizer, networks), _answer(flags, loaded, requests[0])))
        else:
            figures = _answer(flags, loaded, requests[0], lambda piece: print(piece, end="", flush=True))
            print(flush=True)
            if hosts.first():
                print(_in_words(flags, figures), file=sys.stderr)


def _answer_all(flags: argparse.Namespace, loaded: Loaded, requests: list[Request]) -> None:
    """Print one line of JSON per prompt as soon as it is done. A prompt that fails does not stop the others."""
    digests = provenance.of_run(*loaded)
    failed, bar = 0, commands.progress_bar("prompt", over=requests)
    for request in bar:
        make_room()
        try:
            said = _json(flags, digests, {"line": request.line} | _answer(flags, loaded, request))
        except ValueError as error:
            if hosts.several():  # the others may not have it, and wait for this process
                raise
            said, failed = json.dumps({"line": request.line, "error": commands.sentence(error)}), failed + 1
        with bar.external_write_mode():  # a line of its own beside the bar
            print(said, flush=True)
    if failed:
        raise ValueError(f"{failed} of {len(requests)} prompts failed; the 'error' in their lines says why.")


def _answer(
    flags: argparse.Namespace, loaded: Loaded, request: Request, show: Callable[[str], None] = lambda piece: None
) -> dict[str, Any]:
    """Run a prompt and return its text and figures; ``show`` gets the text in pieces as it is generated."""
    model, tokenizer, networks = loaded
    if flags.chat and request.question is not None:  # one message, which is cut where the question begins
        form = Form.of(tokenizer, None)
        context, question = form.document(request.prompt), form.question(request.question)
    else:
        prompt = tokenizer.chat([{"role": "user", "content": request.prompt}]) if flags.chat else request.prompt
        context = tokenizer.encode(prompt, add_special_tokens=not flags.chat)
        question = [] if request.question is None else tokenizer.continuation(request.question, *context[-1:])
    tokens = [*context, *question]
    begun, blocks, steps, sizes = time.perf_counter(), list[tuple[float, int]](), list[float](), []
    pieces, generated = tokenizer.stream(), []

    def note(done: int, total: int, cache: ModelCache) -> None:
        blocks.append((time.perf_counter(), done))
        sizes.append(cache.nbytes)

    policy = models.with_repeat_prompt(request.policy, tokenizer)
    if request.line is not None:  # other lines may read others
        networks = read_by(networks, policy, selecting.parse_select(flags.select))
    for token, cache in models.stream(
        model,
        [tokens],
        policy=policy,
        budget=request.budget,
        reading_budget=flags.reading_budget,
        select=flags.select,
        networks=networks,
        sinks=flags.sinks,
        when=flags.when,
        question=len(question),
        on_block=note,
        **run_settings(flags),
        key=jax.random.key(flags.seed),
    ):
        steps.append(time.perf_counter())
        sizes.append(cache.nbytes)
        generated.append(int(token[0]))
        if generated[-1] not in model.config.eos:
            show(pieces.add(generated[-1]))
    show(pieces.finish())
    when, evict_every = moments(policy_of(request.policy), flags.when, flags.evict_every)
    return {
        "model": flags.model,
        "policy": request.policy,
        "select": flags.select,
        "budget": request.budget,
        "when": when,
        "evict_every": evict_every,
        "read_share": _read_share(flags, request.budget, len(tokens), len(generated)),
        "cache_dtype": flags.cache_dtype,
        "prompt_tokens": len(tokens),
        "new_tokens": len(generated),
        **_speed(begun, blocks, steps),
        "cache_bytes": sizes[-1],
        "full_cache_bytes": full_cache_bytes(model, len(tokens) + len(generated) - 1, flags.cache_dtype),
        "peak_cache_bytes": max(sizes),
        "text": tokenizer.decode(generated),
        "tokens": generated,
    }


def _json(flags: argparse.Namespace, digests: dict[str, str], figures: dict[str, Any]) -> str:
    return json.dumps(provenance.facts(flags.invocation, flags.seed, digests) | figures)


def _in_words(flags: argparse.Namespace, figures: dict[str, Any]) -> str:
    share, selected = figures["read_share"], ""
    if share is not None:
        selected = f"{flags.select}, budget {figures['budget']:,}, reads at most {share:.1%} of the tokens · "
    sizes = sizes_in_words(figures["cache_bytes"], figures["full_cache_bytes"], figures["peak_cache_bytes"])
    return (
        f"[{figures['prompt_tokens']:,} tokens in, {_rate(figures['prefill_tokens_per_second'])} · "
        f"{figures['new_tokens']:,} out, {_rate(figures['decode_tokens_per_second'])} · "
        f"cache {sizes} · {selected}"
        f"first block and first step, with compilation, {figures['compile_seconds']:.1f} s]"
    )


def _only(flags: argparse.Namespace) -> Request:
    """Return the request with the prompt of --prompt, --prompt-file or standard input."""
    file = "-" if flags.prompt_file is None else flags.prompt_file
    prompt = flags.prompt if flags.prompt is not None else read_input(file, "prompt")
    if not prompt.strip():
        raise ValueError("the prompt is empty; give some text with --prompt, --prompt-file or standard input.")
    return _checked(flags, {"prompt": prompt} | ({} if flags.question is None else {"question": flags.question}))


def _checked(flags: argparse.Namespace, fields: dict[str, Any], line: int | None = None) -> Request:
    """Return the request, with the flags' policy and budget by default, as far as it can be checked before the run."""
    name = fields.get("policy", flags.policy)
    policy = policy_of(name)
    own, given = fields.get("budget"), flags.budget
    budget = None if own is None and given is None else commands.parse_budget(str(given if own is None else own))
    if policy is None and "policy" in fields and own is None and flags.select is None:
        budget = None  # the flags' budget is for prompts with a policy; this one keeps all tokens
    moments(policy, flags.when, flags.evict_every)
    selecting.checked_selection(flags.select, policy, budget, flags.sinks, MOST, 0)
    if flags.select is None:
        check_policy_given(policy, budget)
    if policy is not None:
        checked_budget(policy, budget, flags.block)
    return Request(fields["prompt"], fields.get("question"), name, budget, line)


def _read_share(flags: argparse.Namespace, budget: int | float | None, prompt: int, new: int) -> float | None:
    """Return the share of the tokens that each head of a selecting layer reads at most, over all decode steps."""
    selection = selecting.checked_selection(flags.select, None, budget, flags.sinks, prompt, flags.max_new_tokens)
    if selection is None or new < 2:
        return None
    steps = range(prompt + 1, prompt + new)  # the first token comes from the prompt
    return sum(selecting.tokens_read(selection, tokens) for tokens in steps) / sum(steps)


def _rate(rate: float | None) -> str:
    return "too short to time" if rate is None else f"{rate:,.0f} tokens/s"


def _speed(begun: float, blocks: list[tuple[float, int]], steps: list[float]) -> dict[str, float | None]:
    """Return the rates of a run from its times; the first block and the first step compile, and are timed apart.

    ``blocks`` are the times at which each block of the prompt was done, with the tokens so far.
    """
    (first, before), (last, after) = blocks[0], blocks[-1]
    first_step = steps[1] - steps[0] if len(steps) > 1 else 0.0
    return {
        "prefill_tokens_per_second": (after - before) / (last - first) if len(blocks) > 1 else None,
        "decode_tokens_per_second": (len(steps) - 2) / (steps[-1] - steps[1]) if len(steps) > 2 else None,
        "compile_seconds": first - begun + first_step,
    }
