"""Choices among continuations after a compressed context (papers/choices/tasks.py), under policies.

A choice is scored by the log-probability of its tokens after the prompt, while nothing more is evicted
(papers/choices/endings.py). By chance, one choice in four is right, and one in two for sections.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

import models
from evals import command_line, evaluator, results, run_settings, texts
from evals.answering import Feed
from evals.run_settings import Setting
from models.commands.programs import make_room
from models.commands.shared_flags import add_shared_flags, count
from papers.choices import endings
from papers.choices.tasks import BY_CHANCE, TASKS, Corpus, Sample, draw, likeliest, read_corpus

EXAMPLES = """examples:
  python -m papers choices --model smollm2 --text king-james-bible --policies full,snapkv,snapkv+caote --budgets 0.25
  python -m papers choices --tasks recall --lengths 512 --question known,unknown --when prompt --plot choices.png
"""
TITLE = "Choices behind a compressed context: the right one found"


def answer(
    model: models.Decoder, samples: Sequence[Sample], settings: Sequence[Setting], rows: Sequence[int], feed: Feed
) -> Iterator[tuple[Setting, int, dict[str, Any]]]:
    """Choose for samples under settings, and yield each setting and row with its record.

    Args:
        samples, settings, rows, feed: see :func:`papers.choices.endings.likelihoods`.

    Returns:
        Records of the ``score`` (1 where the right choice is the likeliest), the index that was ``chosen``, the
        ``log_probability`` of each choice, and the cache's bytes.
    """
    make_room()
    for setting, row, behind in endings.likelihoods(model, samples, settings, rows, feed):
        sample = samples[row]
        chosen = likeliest(sample, behind.log_probability)
        yield setting, row, {
            "score": float(chosen == sample.right), "chosen": chosen, "right": sample.right,
            "log_probability": behind.log_probability.tolist(), "prompt_tokens": len(sample.tokens),
            "cache_bytes": behind.cache_bytes, "peak_cache_bytes": behind.peak_cache_bytes,
        }  # fmt: skip


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    command_line.add_model_flags(flags)
    command_line.add_setting_flags(flags, budgets="0.25,0.5")
    texts.add_text_flag(flags)
    flags.add_argument("--tasks", default="all", help=f"{', '.join(TASKS)}, or all; several by comma")
    flags.add_argument("--lengths", default="512,1024", help="tokens of prompt and choice; several by comma")
    flags.add_argument("--samples", type=count, default=40, help="samples per task and length")
    add_shared_flags(flags, "out")


def command(flags: argparse.Namespace) -> None:
    """Run the evaluation: check, choose, print the table, write JSON and picture; with ``--out`` it can resume."""
    if flags.evict_every not in (None, 0):
        raise ValueError("--evict-every is about generated tokens, but choices generate none; leave it out.")
    flags.evict_every = 0
    settings = run_settings.make_settings(flags)
    run_settings.refuse_selections(settings, "python -m papers predictor choices takes selections with --select")
    run_settings.refuse_reading_budgets(settings, "choices are read after the prompt alone")
    check(flags)
    text = texts.read_text(flags.text)
    groups = functools.partial(make_groups, read_corpus(text), texts.digest(text))
    evaluator.command(flags, groups, title=TITLE, notes=lambda _: [BY_CHANCE], check=check, answer=_answer)


def check(flags: argparse.Namespace) -> None:
    """Check the flags before any work."""
    command_line.check_sizes(flags)
    command_line.choose("--tasks", flags.tasks, list(TASKS))


def make_groups(
    corpus: Corpus, data: str, flags: argparse.Namespace, config: models.Config, tokenizer: models.Tokenizer
) -> list[evaluator.Group]:
    """Make one group per task and length; ``data`` is a digest of the text."""
    groups = []
    chosen = command_line.choose("--tasks", flags.tasks, list(TASKS))
    for task, length in itertools.product(chosen, command_line.check_sizes(flags)):
        samples = [draw(task, i, corpus, tokenizer, length, seed=flags.seed) for i in range(flags.samples)]
        longest = max(len(choice) for sample in samples for choice in sample.choices)
        # The score is that of the likeliest choice, which :func:`answer` computes.
        groups.append(
            evaluator.Group(
                task, length, len(samples), functools.partial(list, samples), longest, lambda *_: 0.0, data=data
            )
        )
    return groups


def _answer(
    model: models.Decoder, tokenizer: models.Tokenizer, groups: Sequence[evaluator.Group], settings: Sequence[Setting],
    store: results.Results, *, labels: dict[str, Any], progress: tqdm, feed: Feed,
) -> None:  # fmt: skip
    """Answer the samples that a store has no record of yet, as :func:`evals.evaluator.run` does for other tasks."""
    for group, together in itertools.product(groups, _of_one_moment(settings)):
        progress.set_description(f"{group.task}, {group.length}, {together[0].title()}")
        about, missing = evaluator.open_samples(group, together, store, labels)
        progress.update(group.size * len(together) - sum(map(len, missing.values())))
        asked = [setting for setting, rows in missing.items() if rows]
        if not asked:
            continue
        for setting, row, record in answer(model, group.draw(), asked, sorted(set().union(*missing.values())), feed):
            if row in missing[setting]:
                store.add([{**about[setting], "sample": row, **record, "prefill": [0, 0], "decode": [0, 0]}])
                progress.update()


def _of_one_moment(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Return the groups of settings that share a prompt, split by their moment."""
    groups: dict[tuple[int, str], list[Setting]] = {}
    for number, together in enumerate(run_settings.sharing(settings)):
        for setting in together:
            groups.setdefault((number, setting.when), []).append(setting)
    return list(groups.values())
