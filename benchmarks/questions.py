"""Many questions about one document: each from scratch, or from a cache that was compressed once and kept."""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kvjax
import models
from benchmarks import measure
from evals import command_line, evaluator, report, tasks
from kvjax._src.split_cache import ModelCache
from models import files
from models.commands.shared_flags import add_shared_flags, count

NEW_TOKENS = 6
LEGEND = """seconds: for all questions and the document, after all programs were compiled; cache: of one row, after an
answer; right: answers that hold the fact's value. scratch, kept: one question after the other; at once: in a batch."""


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    budget = dict(type=count, default=512, help="slots per head")
    add_shared_flags(flags, "model", "policy", "budget", "seed", model="smollm2", policy="curdkv", budget=budget)
    flags.add_argument("--length", type=count, default=1024, help="tokens of the document")
    flags.add_argument("--questions", type=count, default=20, help="number of facts to ask for")
    flags.add_argument("--repetitions", type=count, default=2, help="runs of each way, in turns")
    measure.add_json_flag(flags, "questions")


def command(flags: argparse.Namespace) -> None:
    """Run the benchmark."""
    files.check_outputs([flags.json])
    model, tokenizer = command_line.load_with_tokenizer(flags.model, dtype="float32")
    document, questions, values = quiz(tokenizer, flags.length, flags.questions, flags.seed)
    records = []
    for policy, budget in ((None, None), (flags.policy, flags.budget)):
        records += comparison(model, tokenizer, document, questions, values, policy, budget, flags.repetitions)
    print(table(records), LEGEND, sep="\n\n")
    settings = {"model": flags.model, "document": len(document), "questions": len(questions), "new_tokens": NEW_TOKENS}
    measure.write(flags, "questions", settings, records, evaluator.digests(model, tokenizer), done=True)


def quiz(
    tokenizer: models.Tokenizer, length: int, count: int, seed: int
) -> tuple[list[int], list[list[int]], list[str]]:
    """Make a document that states ``count`` facts, a question about each, and the values that answer them."""
    sample = tasks.needle(seed, tokenizer, length, facts=count)
    context = sample.prompt[: sample.prompt.rindex("\nQuestion:")]
    stated = re.findall(r"the (\w+) of ([a-z]+(?: [a-z]+)?) is (\d{4})\.", context, re.IGNORECASE)
    facts = [tasks.Fact(*found) for found in stated]
    lines = [f"\n{tasks.question(fact)}\n{tasks.cue(fact)}" for fact in facts]
    questions = [tokenizer.continuation(line) for line in lines]
    return sample.tokens[: sample.context_end], questions, [fact.value for fact in facts]


def comparison(
    model: models.Decoder,
    tokenizer: models.Tokenizer,
    document: list[int],
    questions: list[list[int]],
    values: list[str],
    policy: str | None,
    budget: int | None,
    repetitions: int,
) -> list[dict[str, Any]]:
    """Answer all questions in three ways under a policy, and return one record per way."""
    given: dict[str, Any] = dict(policy=policy, budget=budget, when="prompt")
    caches: dict[str, ModelCache] = {}
    found: dict[str, list[list[int]]] = {}

    def answers(name: str, rows: list[list[int]], **more: Any) -> list[list[int]]:
        out = models.generate(model, rows, max_new_tokens=NEW_TOKENS, end=(), **more)
        caches[name] = out.cache
        return np.asarray(out.tokens).tolist()

    def scratch() -> list[list[int]]:
        never = dict(evict_every=0, **given)
        return [answers("scratch", [[*document, *q]], question=len(q), **never)[0] for q in questions]

    def kept() -> list[list[int]]:
        cache = models.prefill(model, [document], **given).cache
        return [answers("kept", [q], cache=cache)[0] for q in questions]

    def at_once() -> list[list[int]]:
        cache = kvjax.repeat(models.prefill(model, [document], **given).cache, len(questions))
        return answers("at once", questions, cache=cache)

    ways: dict[str, Callable[[], list[list[int]]]] = {"scratch": scratch, "kept": kept, "at once": at_once}
    noted = {name: lambda name=name, way=way: found.setdefault(name, way()) for name, way in ways.items()}
    times = measure.take_turns(noted, repetitions, progress=True)
    cache = models.prefill(model, [document], **given).cache
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "document.cache"
        kvjax.save_cache(path, cache, model=models.fingerprint(model), policy=policy or "full", budget=budget)
        file_bytes = path.stat().st_size
    return [
        {
            "policy": policy or "full",
            "budget": budget,
            "way": name,
            **times[name]._asdict(),
            "cache_bytes": caches[name].nbytes // caches[name].heads_shape[1],
            "kept_bytes": cache.nbytes,
            "file_bytes": file_bytes,
            "right": sum(value in tokenizer.decode(own) for value, own in zip(values, tokens, strict=True)),
            "same_as_scratch": tokens == found["scratch"],
        }
        for name, tokens in found.items()
    ]


def table(records: list[dict[str, Any]]) -> report.Table:
    """Return a table with one line per way of asking."""
    cells: list[tuple[str, report.Cell]] = [
        ("policy", "{policy}"),
        ("budget", report.budget),
        ("way", "{way}"),
        ("seconds", lambda r: f"{r['milliseconds'] / 1000:.2f}"),
        ("lowest", lambda r: f"{r['lowest'] / 1000:.2f}"),
        ("cache MiB", lambda r: f"{r['cache_bytes'] / 2**20:.1f}"),
        ("file MiB", lambda r: f"{r['file_bytes'] / 2**20:.1f}"),
        ("right", "{right}"),
        ("as scratch", lambda r: "yes" if r["same_as_scratch"] else "no"),
    ]
    return report.table(records, cells, left=3)
