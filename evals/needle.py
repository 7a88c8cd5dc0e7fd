"""Needle in a haystack: exact recall of a fact, under each policy and budget, over depths and lengths.

Every policy answers the same samples. Beside the policies stands plain recency, `streaming(sinks=0)`, the line that a
policy has to beat. Evicting after every block (the question is not known yet) and once when the prompt is in (it is)
are different problems, so they are reported side by side. `--question agnostic` holds the closing question back until
the context is compressed: then it is never known.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

import kvjax
import models
from evals import report, statistics, tasks
from models import commands
from models.decoding import When

RECENCY = "streaming(sinks=0)"
POLICIES = ("full", "h2o+protect(recent=0.5)", "h2o+caote+protect(recent=0.5)", "snapkv", "snapkv+caote")
Question = Literal["after", "before", "both", "agnostic"]
PLACEMENTS = ("after", "before", "both", "agnostic")
EXAMPLES = """examples:
  python -m evals needle --policies full,h2o,h2o+caote,snapkv,snapkv+caote --budgets 256,512 --plot needle.png
  python -m evals needle --model path/to/Llama-3.2-1B --lengths 4096,8192 --budgets 0.25 --when prompt --json out.json
"""


@dataclasses.dataclass(frozen=True)
class Cell:
    """The samples of one length and depth, and their prompts' tokens."""

    length: int
    depth: float
    samples: tuple[tasks.Sample, ...]


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of the table."""

    policy: str
    budget: int | float | None
    when: When
    question: Question

    def title(self) -> str:
        budget = "" if self.budget is None else f", budget {self.budget}"
        return f"{self.policy}{budget}, {self.when}, question {self.question}"


def make_cells(
    tokenizer: Any,
    *,
    lengths: Sequence[int],
    depths: int,
    samples: int,
    facts: int,
    question: Question,
    seed: int = 0,
) -> list[Cell]:
    """The samples that every policy answers: ``samples`` for each length and each of ``depths`` depths from 0 to 1.

    Raises:
        ValueError: a number of depths or samples below 1, or a length that cannot hold the facts.
    """
    if depths < 1 or samples < 1:
        raise ValueError(f"{depths} depths and {samples} samples were asked for; give at least 1 of each.")
    placement: tasks.Placement = "after" if question == "agnostic" else question
    cells: list[Cell] = []
    for length, depth in itertools.product(lengths, np.linspace(0, 1, depths) if depths > 1 else [0.5]):
        seeds = [seed + 1_000 * len(cells) + index for index in range(samples)]
        drawn = tuple(tasks.needle(s, tokenizer, length, float(depth), facts, placement) for s in seeds)
        cells.append(Cell(length, float(depth), drawn))
    return cells


def measure(
    model: models.Decoder,
    cells: Sequence[Cell],
    setting: Setting,
    *,
    block: int = 128,
    batch: int = 16,
    progress: tqdm | None = None,
) -> dict[str, Any]:
    """Answers every sample under one setting.

    Returns:
        ``correct`` (a list per cell), recall with its 95% interval, bytes of a sequence's cache at the end and at its
        largest, and tokens per second of prefill and decode, both without the step that compiled.
    """
    rows = [(index, sample) for index, cell in enumerate(cells) for sample in cell.samples]
    everything = [sample for _, sample in rows]
    longest = max(len(sample.tokens) for sample in everything)
    answer_length = max(len(sample.answer_tokens) for sample in everything)
    held_back = setting.question == "agnostic"
    extremes = _extremes(everything, held_back) if held_back or isinstance(setting.budget, float) else []
    correct: list[list[bool]] = [[] for _ in cells]
    rates = {"prefill": _Rate(), "decode": _Rate()}
    # Rows of a batch share a length where they can: empty blocks in front are skipped for the whole batch.
    for start in range(0, len(rows), batch):
        chosen = rows[start : start + batch]
        fed = [sample for _, sample in chosen] + extremes
        fed += fed[:1] * (batch + len(extremes) - len(fed))
        tokens = np.zeros((len(fed), longest), np.int32)
        counts = np.array([len(sample.tokens) for sample in fed])
        for row, sample in enumerate(fed):
            tokens[row, : counts[row]] = sample.tokens
        clock = _BatchClock(rates, int(counts[: len(chosen)].sum()), len(chosen))
        steps = models.stream(
            model,
            tokens,
            lengths=counts,
            policy=setting.policy,
            budget=setting.budget,
            block=block,
            max_new_tokens=answer_length,
            when=setting.when,
            question=np.array([_question_length(sample) for sample in fed]) if held_back else None,
            end=(),
            on_block=clock.block,
        )
        generated = []
        for token, kept in steps:
            generated.append(token)
            clock.token()
            cache = kept
        answers = np.stack(generated, axis=1)
        for row, (index, sample) in enumerate(chosen):
            wanted = sample.answer_tokens
            correct[index].append(answers[row, : len(wanted)].tolist() == list(wanted))
            if progress is not None:
                progress.update()
    hits, total = sum(map(sum, correct)), len(rows)
    low, high = statistics.wilson(hits, total)
    slots = cache.position.size  # of all rows of the batch
    if setting.policy == "full" or setting.when == "prompt":
        slots = max(slots, math.prod(cache.heads_shape) * (longest + answer_length))
    return {
        **dataclasses.asdict(setting),
        "recall": hits / total,
        "low": low,
        "high": high,
        "samples": total,
        "cache_bytes": cache.nbytes // len(fed),
        "peak_cache_bytes": cache.nbytes // len(fed) * slots // cache.position.size,
        "prefill_tokens_per_second": rates["prefill"].value(),
        "decode_tokens_per_second": rates["decode"].value(),
        "cells": [
            {"length": cell.length, "depth": cell.depth, "recall": sum(hit) / len(hit), "correct": list(map(int, hit))}
            for cell, hit in zip(cells, correct, strict=True)
        ],
    }


def compare(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each policy with a CAOTE link: is it better than the same policy without it, on the same samples?

    Where the link takes the group's mean, it is held against the exact form as well.
    """
    by_setting = {(r["policy"], r["budget"], r["when"], r["question"]): r for r in results}
    rows = []
    for (policy, *rest), result in by_setting.items():
        plain = report.without_caote(policy)
        exact = policy.replace("(group='mean')", "")
        for other in (plain, exact):
            if other == policy or (other, *rest) not in by_setting:
                continue
            outcomes = [[c for cell in r["cells"] for c in cell["correct"]] for r in (by_setting[other, *rest], result)]
            mean, low, high = statistics.paired_difference(*outcomes)
            rows.append(
                {
                    "policy": policy,
                    "against": other,
                    **dict(zip(("budget", "when", "question"), rest, strict=True)),
                    "difference": mean,
                    "low": low,
                    "high": high,
                    "better": statistics.verdict(low, high),
                }
            )
    return rows


def add_flags(flags: argparse.ArgumentParser) -> None:
    """The command's flags."""
    flags.add_argument("--model", default="retriever", help="'retriever', a Hugging Face folder, or a hub name")
    flags.add_argument("--policies", default=",".join(POLICIES), help="several by comma; 'full' keeps all")
    flags.add_argument("--budgets", default="256,512", help="slots per head, or ratios of the prompt; several by comma")
    flags.add_argument("--lengths", default="512,1024", help="tokens of a prompt; several by comma")
    flags.add_argument("--depths", type=int, default=5, help="how many depths from 0 to 1")
    flags.add_argument("--samples", type=int, default=8, help="samples for each length and depth")
    flags.add_argument("--facts", type=int, default=10, help="facts in a text, of which one is asked for")
    flags.add_argument(
        "--question",
        default="after",
        help="after, before, both, or agnostic (after, and unknown when the context is compressed); several by comma",
    )
    flags.add_argument("--when", default="block,prompt", help="block, prompt; several by comma")
    flags.add_argument("--block", type=int, default=128)
    flags.add_argument("--batch", type=int, default=16)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--dtype", help="float32, bfloat16 or float16; the checkpoint's by default")
    flags.add_argument("--mesh", help="devices, such as data=2,tensor=4")
    flags.add_argument("--json", type=Path, help="write all figures here")
    flags.add_argument("--plot", type=Path, help="write the heat map here (.png, .svg or .pdf)")


def command(flags: argparse.Namespace) -> None:
    """Runs the evaluation: checks, table, JSON, picture."""
    settings = make_settings(flags)
    lengths = check_sizes(flags)
    if flags.plot is not None:
        report.check_plot(flags.plot)
    commands.check_outputs([flags.json, flags.plot])
    mesh = None if flags.mesh is None else models.parse_mesh(flags.mesh)
    model, tokenizer = models.load(flags.model, dtype=flags.dtype, mesh=mesh)
    if tokenizer is None:
        raise ValueError(f"{flags.model} has no tokenizer.json, and needles are text; copy it from the model's source.")

    started = time.time()
    cells = {
        question: make_cells(
            tokenizer,
            lengths=lengths,
            depths=flags.depths,
            samples=flags.samples,
            facts=flags.facts,
            question=question,
            seed=flags.seed,
        )
        for question in dict.fromkeys(setting.question for setting in settings)
    }
    each = len(lengths) * flags.depths * flags.samples
    results = []
    with tqdm(total=each * len(settings), unit="sample", file=sys.stderr, dynamic_ncols=True) as progress:
        for setting in settings:
            progress.set_description(setting.title())
            results.append(
                measure(
                    model, cells[setting.question], setting, block=flags.block, batch=flags.batch, progress=progress
                )
            )
        progress.set_description("done")
    comparisons = compare(results)
    print(report.table(results, recency=RECENCY))
    if comparisons:
        print()
        print(report.comparison_table(comparisons))
    if flags.json is not None:
        settings_used = {name: str(value) if isinstance(value, Path) else value for name, value in vars(flags).items()}
        commands.write_json(
            flags.json,
            {
                "evaluation": "needle",
                "settings": settings_used,
                "seconds": round(time.time() - started, 1),
                **report.environment(),
                "results": results,
                "comparisons": comparisons,
            },
        )
        print(f"figures: {flags.json}")
    if flags.plot is not None:
        report.heat_map(results, flags.plot, recency=RECENCY)
        print(f"picture: {flags.plot}")


def check_sizes(flags: argparse.Namespace) -> list[int]:
    """The lengths that are asked for, when they and the block and batch can be."""
    lengths = [_positive("length", text) for text in commands.split_list(flags.lengths)]
    if not lengths:
        raise ValueError("no length was given; name at least one, such as --lengths 1024.")
    for name, value in (("block", flags.block), ("batch", flags.batch)):
        if value < 1:
            raise ValueError(f"--{name} is {value}; give at least 1.")
    return lengths


def make_settings(flags: argparse.Namespace) -> list[Setting]:
    """Every combination that is asked for, checked before any work; the full cache has neither budget nor moment."""
    moments: Any
    questions: Any
    policies = commands.split_list(flags.policies)
    budgets = [commands.parse_budget(text) for text in commands.split_list(flags.budgets)]
    moments, questions = commands.split_list(flags.when), commands.split_list(flags.question)
    for what, given, known in (("--when", moments, ("block", "prompt")), ("--question", questions, PLACEMENTS)):
        wrong = [name for name in given if name not in known]
        if wrong or not given:
            raise ValueError(f"{what} is {', '.join(wrong) or 'empty'}; there are {', '.join(known)}.")
    evicting = [str(kvjax.parse(policy)) for policy in policies if policy != "full"]
    if evicting and not budgets:
        raise ValueError("no budget was given; name at least one, such as --budgets 256.")
    if not policies:
        raise ValueError("no policy was given; name at least one, such as --policies full,snapkv+caote.")
    for policy, budget in itertools.product(evicting, budgets):
        if isinstance(budget, int):
            kvjax.check_budget(kvjax.parse(policy), budget)
    settings = []
    for question in questions:
        if "full" in policies:
            settings.append(Setting("full", None, "block", question))
        for when, budget in itertools.product(moments, budgets):
            for policy in dict.fromkeys([RECENCY, *evicting] if evicting else []):
                settings.append(Setting(policy, budget, when, question))
    return settings


def _question_length(sample: tasks.Sample) -> int:
    return len(sample.tokens) - sample.context_end


def _extremes(samples: Sequence[tasks.Sample], held_back: bool) -> list[tasks.Sample]:
    """The longest prompt, and the shortest and longest question: in every batch, they make all batches the same size,
    so that one compilation serves them.
    """
    found = [max(samples, key=lambda sample: len(sample.tokens))]
    if held_back:
        found += [min(samples, key=_question_length), max(samples, key=_question_length)]
    return found


def _positive(name: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"the {name} {text!r} is not a number of tokens; give an integer from 1.")
    return int(text)


class _Rate:
    """Tokens over seconds, summed over batches."""

    def __init__(self) -> None:
        self.tokens, self.seconds = 0.0, 0.0

    def value(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None


class _BatchClock:
    """Adds one batch's prefill and decode to the rates, without the first block and step, which may compile."""

    def __init__(self, rates: dict[str, _Rate], prompt_tokens: int, rows: int) -> None:
        self.rates, self.prompt_tokens, self.rows = rates, prompt_tokens, rows
        self.last: float | None = None
        self.steps, self.done = 0, 0

    def block(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if self.last is not None:
            self.rates["prefill"].tokens += self.prompt_tokens * (done - self.done) / total
            self.rates["prefill"].seconds += now - self.last
        self.last, self.done = now, done

    def token(self) -> None:
        now = time.perf_counter()
        self.steps += 1
        if self.steps > 2 and self.last is not None:
            self.rates["decode"].tokens += self.rows
            self.rates["decode"].seconds += now - self.last
        self.last = now
