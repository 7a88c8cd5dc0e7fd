"""The command line of `python -m models.ask`: a document and questions in, answers out."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import kvjax
import models
from models import commands, files, hosts
from models.asking import POLICY, Answers, Watch, ask, automatic, checked, is_automatic
from models.commands import distributed, provenance
from models.commands.shared_flags import mesh_of, read_input, run_settings, with_template_values
from models.commands.terminal import REPEATED, Screen, policy_in_words, sizes_in_words
from models.networks import load_networks, wanted_by
from models.progress import Progress

EVERY = 5.0  # seconds between lines while the document is read, where there is no terminal


def command(flags: argparse.Namespace) -> None:
    distributed.join(flags)
    if flags.question is None and (flags.document == "-" or hosts.several()):
        raise ValueError("the questions cannot come from standard input here; give them with --question.")
    if not all(question.strip() for question in flags.question or ()):
        raise ValueError("a question is empty; give --question some text.")
    given = [name for name in ("policy", "budget", "reading_budget", "when") if getattr(flags, name) is not None]
    if flags.load is not None and given:
        flag = given[0].replace("_", "-")
        raise ValueError(f"argument --{flag}: not allowed with argument --load, whose document is compressed already.")
    policy, budget, document = None, None, ""
    if flags.load is None:  # checked before the weights are read
        budget = None if flags.budget is None else commands.parse_budget(flags.budget)
        policy, budget = checked(flags.policy, budget, flags.block)
        document = read_input(flags.document, "document")
        if not document.strip():
            raise ValueError(f"the document {flags.document} is empty; give some text.")
    files.check_outputs([flags.save])
    model, tokenizer = models.load(flags.model, dtype=flags.dtype, mesh=mesh_of(flags))
    tokenizer = with_template_values(flags, commands.check_tokenizer(flags.model, tokenizer))
    networks = load_networks(flags.networks, flags.model, model, dtype=flags.dtype)
    if flags.load is None and is_automatic(flags.policy):
        policy, budget = checked(automatic(model, networks, POLICY, path=flags.model), budget, flags.block)
    if not any(wanted_by(policy) <= network.predicts for network in networks):
        networks += load_networks(None, flags.model, model, [wanted_by(policy)], dtype=flags.dtype)
    screen, settings = Screen(), run_settings(flags)
    asker = tokenizer.plain() if flags.plain else tokenizer
    of_read: dict[str, Any] = dict(policy=policy or "full", budget=budget, when=flags.when, networks=networks)
    of_read["reading_budget"] = flags.reading_budget
    shared: dict[str, Any] = dict(system=flags.system, **settings)
    with warnings.catch_warnings(), screen.compiling():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_, **__: screen.say(f"warning: {message}")
        if flags.load is None:
            name = "full" if policy is None else policy.name
            screen.say(f"{flags.model} · {policy_in_words(name, budget)}")
            with Progress(every=EVERY) as shown:
                show = lambda done, total, _: shown.at("reading", done, total, "token")  # noqa: E731
                found = ask(model, asker, document, [], watch=Watch(on_block=show), **of_read, **shared)
        else:
            info = kvjax.cache_info(flags.load)
            name, budget = info["policy"] or "full", info["budget"]
            screen.say(f"{flags.model} · {policy_in_words(name, budget)}")
            cache: Any = kvjax.load_cache(flags.load, model=models.fingerprint(model))
            seen = np.isin(np.arange(model.config.vocab_size), info["seen"])[None] if info["seen"] else None
            found = ask(model, asker, cache, [], key=models.Draws(seen=seen), **shared)
        if flags.save is not None:
            made_with: dict[str, Any] = dict(policy=policy or name, budget=budget, model=models.fingerprint(model))
            if found.seen is not None:
                made_with["seen"] = np.flatnonzero(found.seen).tolist()
            kvjax.save_cache(flags.save, found.cache, **made_with)
        read = f" in {found.seconds:.1f} s" if flags.load is None else ""
        screen.say(f"{found.document_tokens:,} tokens{read} · cache {_sizes(found)}")
        records: list[dict[str, Any]] = []
        peak = found.peak_cache_bytes
        at_once = 1 if flags.question is None and sys.stdin.isatty() else flags.batch
        for group in itertools.batched(_questions(flags), at_once):
            key = jax.random.fold_in(jax.random.key(flags.seed), len(records))
            one, told = len(group) == 1, not flags.json
            if one and told and flags.question is not None:
                screen.say(group[0].strip())
            watch = Watch(on_text=screen.write if one and told else None, may_repeat=flags.may_repeat)
            draws = models.Draws(key, found.seen)
            answered = ask(model, asker, found.cache, group, key=draws, watch=watch, batch=len(group), **shared)
            peak = max(peak, answered.peak_cache_bytes)
            for at, (question, answer) in enumerate(zip(group, answered.answers, strict=True)):
                if told and not one:
                    screen.say(question.strip())
                    screen.write(answer)
                if told:
                    screen.end()
                if told and answered.repeated[at]:
                    screen.say(REPEATED)
                records.append({"question": question, "answer": answer, "seconds": answered.answer_seconds[at]})
        found = found._replace(peak_cache_bytes=peak)
    if flags.json:
        digests = provenance.of_run(model, tokenizer, networks)
        figures = {
            "model": flags.model, "document": flags.document or flags.load, "policy": name, "budget": budget,
            "when": None if flags.load is not None else flags.when or "block",
            "document_tokens": found.document_tokens, "cache_bytes": found.cache_bytes,
            "full_cache_bytes": found.full_cache_bytes, "peak_cache_bytes": peak, "seconds": found.seconds,
            "answers": records,
        }  # fmt: skip
        print(json.dumps(provenance.facts(flags.invocation, flags.seed, digests) | figures))
    elif records:
        seconds = sum(record["seconds"] for record in records)
        screen.say(f"{len(records)} answer{'s' * (len(records) > 1)} in {seconds:.1f} s · cache {_sizes(found)}")


def _questions(flags: argparse.Namespace) -> Iterator[str]:
    """Yield the questions of the flags, else the lines of standard input, which a terminal is asked for."""
    if flags.question is not None:
        yield from flags.question
        return
    shown = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if shown else "")
        except EOFError:
            return
        if line.strip():
            yield line


def _sizes(found: Answers) -> str:
    return sizes_in_words(found.cache_bytes, found.full_cache_bytes, found.peak_cache_bytes)
