"""Shared by the evaluations: settings from flags, prompts answered in batches under a policy, records of each sample.

An evaluation is a list of groups of samples. A setting is a policy, a budget, a moment of eviction, and what is known
of the question. Every setting answers the same samples, one batch after the other. Each answer becomes a record, so
that a killed run can be resumed (:mod:`evals.results`).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

import kvjax
import models
from evals import prose, report, results
from evals.answering import FEED, NO_AIDS, Aids, Batch, Feed, answers_each, check_answers
from evals.command_line import command_text, decisive_flags, load, networks_for
from evals.run_settings import KNOWN_OR_NOT, RECENCY, Setting, baseline, make_settings, sharing_note
from evals.summaries import compare, summarise, task_map
from models import commands, files, fingerprints
from models.commands import provenance
from models.networks import Network

QUIET = tqdm(disable=True)  # the progress of a function that is called without a bar


class TextSample(NamedTuple):
    """A prompt, the references that an answer is compared with, and anything else that its score needs."""

    tokens: list[int]
    context_end: int
    references: tuple[str, ...]
    extra: Any = None


class Answer(NamedTuple):
    """A model's answer: the tokens up to its end token, and their text."""

    tokens: list[int]
    text: str


@dataclasses.dataclass(frozen=True)
class Group:
    """Samples that are answered together: one task at one length.

    Attributes:
        size: the number of samples that ``draw`` returns. They are drawn when they are needed; each call draws again.
        score: maps an answer and its sample to a number in [0, 1].
        end: tokens that end an answer; the model's own by default.
        questions: the group is answered only by settings whose ``question`` is one of these.
        data: a digest of the text or the records that the samples are made of, if these were read.
        probe: raises the errors that ``draw`` would raise, and returns a few of its samples; ``draw`` by default.
        fields: returns what a record has of its sample beside answer and score.
    """

    task: str
    length: int | None
    size: int
    draw: Callable[[], Sequence[Any]]
    new_tokens: int
    score: Callable[[Answer, Any], float]
    end: tuple[int, ...] | None = None
    questions: tuple[str, ...] = KNOWN_OR_NOT
    data: str = ""
    probe: Callable[[], Sequence[Any]] | None = None
    fields: Callable[[Any], Mapping[str, Any]] = lambda sample: {}

    def few(self) -> Sequence[Any]:
        """Return a few of the samples, or raise what keeps them from being drawn."""
        return (self.draw if self.probe is None else self.probe)()

    def first(self, count: int) -> Group:
        """Return the group of the first ``count`` samples."""
        return dataclasses.replace(self, size=min(self.size, count), draw=lambda: self.draw()[:count])


def check_groups(
    model: models.Decoder,
    groups: Sequence[Group],
    settings: Sequence[Setting],
    feed: Feed = FEED,
) -> None:
    """Raise the ValueError that :func:`run` would raise for a group, before the first step of the model."""
    for group in groups:
        samples = group.few()
        for setting in settings:
            if setting.question in group.questions:
                check_answers(model, samples, setting, new_tokens=group.new_tokens, width=_width(group), feed=feed)


def _width(group: Group) -> int:
    return 0 if group.length is None else group.length - group.new_tokens


def run(
    model: models.Decoder,
    tokenizer: models.Tokenizer,
    groups: Sequence[Group],
    settings: Sequence[Setting],
    store: results.Results,
    *,
    labels: Mapping[str, Any] | None = None,
    progress: tqdm = QUIET,
    feed: Feed = FEED,
) -> None:
    """Answer the samples that ``store`` does not hold yet, and add a record for each, batch by batch.

    ``labels`` are fields that every record gets beside its sample and setting, such as the model's name.
    """
    for group in groups:
        asked = [setting for setting in settings if setting.question in group.questions]
        about, missing = open_samples(group, asked, store, labels or {})
        progress.update(sum(group.size - len(rows) for rows in missing.values()))
        if not any(missing.values()):
            continue
        samples = group.draw()
        end = model.config.eos if group.end is None else group.end
        for setting, found in answers_each(
            model, samples, [setting for setting in asked if missing[setting]], new_tokens=group.new_tokens,
            end=end, rows=missing, width=_width(group), feed=feed,
        ):  # fmt: skip
            new = [(place, row) for place, row in enumerate(found.rows) if row in missing[setting]]
            store.add(
                _record(group, samples[row], about[setting], row, found, place, tokenizer, end) for place, row in new
            )
            progress.set_description(f"{group.task}, {setting.title()}")
            progress.update(len(new))


def open_samples(
    group: Group, settings: Sequence[Setting], store: results.Results, labels: Mapping[str, Any]
) -> tuple[dict[Setting, dict[str, Any]], dict[Setting, list[int]]]:
    """Return the fields that all records of a setting share, and the samples that ``store`` does not hold yet."""
    of_group = {**labels, "task": group.task, "length": group.length}
    about = {setting: {**of_group, **setting.fields()} for setting in settings}
    missing = {
        setting: [row for row in range(group.size) if not store.holds({**fields, "sample": row})]
        for setting, fields in about.items()
    }
    return about, missing


def load_aids(
    flags: argparse.Namespace, settings: Sequence[Setting], model: models.Decoder, tokenizer: models.Tokenizer
) -> Aids:
    """Load what the settings need besides the model, from the folders that the flags name or the model's own."""
    return Aids(tokenizer, networks_for(flags, settings, model))


def feed_of(flags: argparse.Namespace, aids: Aids = NO_AIDS) -> Feed:
    """Return how the flags say that prompts are fed, and answers drawn where an evaluation has flags for that."""
    drawn = getattr(flags, "temperature", 0.0), getattr(flags, "top_p", None)
    return Feed(flags.block, flags.batch, aids, *drawn, flags.seed)


def command(
    flags: argparse.Namespace,
    make_groups: Callable[[argparse.Namespace, models.Config, models.Tokenizer], list[Group]],
    *,
    title: str,
    notes: Callable[[argparse.Namespace], list[str]],
    check: Callable[[argparse.Namespace], None],
    short: Mapping[str, str] | None = None,
    answer: Callable[..., None] | None = None,
    picture: Callable[[Sequence[Mapping[str, Any]], Path], None] | None = None,
) -> Sequence[Mapping[str, Any]]:
    """Run an evaluation made of tasks: check, answer samples, print the table, write JSON and picture; return records.

    With ``--out``, a killed run is resumed.

    Args:
        check: checks the evaluation's own flags before the model is loaded.
        notes: returns the lines below the table, such as the sources of the texts.
        short: the tasks' names in the table.
        answer: answers the groups in place of :func:`run`.
        picture: draws the records into a file; by default :func:`evals.summaries.task_map` draws their summary.
    """
    settings = make_settings(flags)
    check(flags)
    report.check_outputs(flags.json, flags.plot)
    store = results.Results(flags.out, flags.name, decisive_flags(flags), command_text(flags))
    store.check()
    model, tokenizer = load(flags)
    groups = make_groups(flags, model.config, tokenizer)
    aids = load_aids(flags, settings, model, tokenizer)
    feed = feed_of(flags, aids)
    check_groups(model, groups, settings, feed)
    with store:
        labels = {"evaluation": flags.name, "model": flags.model}
        asked = [(group.size, [one for one in settings if one.question in group.questions]) for group in groups]
        total = sum(size * len(of_group) for size, of_group in asked)
        fingerprints = digests(model, tokenizer, aids.networks, groups)
        store.check_digests(labels, fingerprints, [network.name for network in aids.networks])
        with commands.progress_bar("sample", total=total) as progress:
            (answer or run)(model, tokenizer, groups, settings, store, labels=labels, progress=progress, feed=feed)
            progress.set_description("done")
        together = None if answer else sharing_note(asked)
        remarks = [*notes(flags), *([] if together is None else [together])]
        lines, compared = summarise(store.records), compare(store.records, baseline(flags))
        told = report.task_table(lines, recency=RECENCY, short=short or {}, notes=remarks)
        report.show(told, report.comparison_table(compared))
        figures = {
            **provenance.facts(flags.invocation, flags.seed, fingerprints),
            "evaluation": flags.name,
            "title": title,
            "settings": decisive_flags(flags),
            "notes": remarks,
            "results": lines,
            "comparisons": compared,
        }
        for path in (flags.json, None if flags.out is None else Path(flags.out) / "figures.json"):
            if path is not None:
                files.write_json(path, figures)
                print(f"figures: {path}")
        if flags.plot is not None:
            if picture is None:
                task_map(lines, flags.plot, title=title, short=short or {})
            else:
                picture(store.records, flags.plot)
            print(f"picture: {flags.plot}")
        return store.records


def digests(
    model: models.Decoder,
    tokenizer: models.Tokenizer,
    networks: Sequence[Network] = (),
    groups: Sequence[Group] = (),
) -> dict[str, str]:
    """Return the fingerprints of everything that figures are made of: the project's version, the built-in prose, model,
    tokenizer and networks, the records of groups, and :func:`models.commands.provenance.of_process`.
    """
    found = {"kvjax": kvjax.__version__, "prose": prose.digest(), **provenance.of_run(model, tokenizer, networks)}
    if any(group.data for group in groups):
        found["data"] = fingerprints.digest([[group.task, group.data] for group in groups])
    return found


def _record(
    group: Group,
    sample: Any,
    about: Mapping[str, Any],
    row: int,
    found: Batch,
    place: int,
    tokenizer: models.Tokenizer,
    end: tuple[int, ...],
) -> dict[str, Any]:
    tokens = found.tokens[place].tolist()
    tokens = tokens[: tokens.index(-1)] if -1 in tokens else tokens
    said = tokens[:-1] if tokens and tokens[-1] in end else tokens
    answer = Answer(said, tokenizer.decode(said))
    return {
        **about,
        "sample": row,
        **group.fields(sample),
        "score": float(group.score(answer, sample)),
        "answer": answer.text,
        "prompt_tokens": len(sample.tokens),
        "new_tokens": len(tokens),
        "cache_bytes": found.cache_bytes,
        "peak_cache_bytes": found.peak_cache_bytes,
        "prefill": [x / len(found.rows) for x in found.prefill],
        "decode": [x / len(found.rows) for x in found.decode],
    }
