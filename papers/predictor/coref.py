"""Co-reference: a place is named, distractions follow, and the whole name has to be repeated.

This is the task of arXiv 2503.07518 (section 4.2, table 2) on pools of our own, in two modes.

"teacher", as published: one forward over the text followed by the name. Every query reads what the selection keeps
(evals/selections.py), and the answer is the likeliest token at each position of the name. Under a policy, too, each
query head keeps its own tokens.

"generate": the prompt is read in blocks, and the name is decoded greedily. A source selects in decode only, so the
name's first token is the dense model's. A policy evicts after every block of the prompt, down to a share of it that
includes the sinks, and as it does by default in decode. The query heads of a group share their tokens, as everywhere in
the library.

Accuracy is the share of names that are right as a whole, coverage the mean share of a name's tokens that are right.
Quest's pages hold 4 tokens here, as in the paper, unless its name says otherwise.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tqdm import tqdm

import models
from evals import answering, command_line, evaluator, report, selections, simulator, statistics
from evals.selections import Selection
from evals.simulator import Simulation
from kvjax._src.checks import check_names
from kvjax.schedule import moments
from kvjax.sources import PREDICTOR
from models import commands, hosts
from models.commands.programs import make_room
from models.commands.shared_flags import MESH, add_shared_flags, at_least, count
from models.networks import read_by
from papers.predictor import beside, coref_task
from papers.predictor.beside import Panel
from papers.predictor.coref_task import CorefSample

Mode = Literal["teacher", "generate"]
SELECT = f"full,oracle,{PREDICTOR},quest,h2o+protect(recent=0),streaming,random"
PAGE_SIZE = 4
EXAMPLES = """examples:
  python -m papers coref --select full,oracle,quest,h2o,streaming,random --sparsity 0.5
  python -m papers coref --sparsity 0.3,0.5,0.7 --mode teacher,generate --json coref.json --plot coref.png
"""
SNAPKV = "snapkv(window=32,kernel=7,pooling='max')"  # in "generate": its window fits into a block of the prompt


class Setting(NamedTuple):
    """One line of the table. "full" has no sparsity."""

    selection: Selection
    sparsity: float | None
    mode: Mode

    def fields(self) -> dict[str, Any]:
        """Return the setting's fields in a table or a JSON file, with the moments at which a policy really evicts."""
        evicts = self.mode == "generate" and self.selection.policy is not None
        return {
            "select": str(self.selection),
            "sparsity": self.sparsity,
            "mode": self.mode,
            "when": "block" if evicts else None,
            "evicts": list(moments(self.selection.policy, "block", None)) if evicts else None,
        }

    def title(self) -> str:
        sparsity = "" if self.sparsity is None else f", sparsity {self.sparsity:g}"
        return f"{self.selection}{sparsity}, {self.mode}"


def make_settings(select: str, sparsities: Sequence[float], modes: Sequence[Mode]) -> list[Setting]:
    """Return all combinations, checked before any work: some selections can only be simulated."""
    check_names("--mode", modes, get_args(Mode))
    settings = []
    for mode in dict.fromkeys(modes):
        names = commands.split_list(select)
        if mode == "generate":
            names = [SNAPKV if name == "snapkv" else name for name in names]
        for selection in selections.parse_selections(",".join(names), page_size=PAGE_SIZE):
            simulated = selection.name.split("(")[0] in (selections.ORACLE_EVICTION, "rolling_snapkv")
            if mode == "generate" and simulated:
                raise ValueError(f"{selection.name!r} can only be simulated; leave it out, or give --mode teacher.")
            shares: Sequence[float | None] = [None] if selection.name == "full" else sparsities
            settings += [Setting(selection, sparsity, mode) for sparsity in shares]
    return settings


def outcomes(guessed: Sequence[int], wanted: Sequence[int]) -> tuple[bool, float]:
    """Return whether a name is right as a whole, and the share of its tokens that are right."""
    right = [a == b for a, b in zip(guessed, wanted, strict=True)]
    return all(right), sum(right) / len(right)


def measure(
    model: models.Decoder,
    samples: Sequence[CorefSample],
    setting: Setting,
    *,
    like: Simulation = simulator.DENSE,
    block: int = 128,
    batch: int = 10,
    progress: tqdm = evaluator.QUIET,
) -> dict[str, Any]:
    """Answer every sample under one setting; ``like`` has what its selection reads beside the model.

    Returns:
        The setting; ``accuracy`` and ``coverage`` with their Wilson intervals; and per sample ``correct``,
        ``covered``, and the answered tokens ``guessed``.
    """
    widest = max(len(sample.tokens) for sample in samples)
    most = max(len(sample.answer_tokens) for sample in samples)
    guessed: list[list[int]] = []
    for rows, filled in answering.batches(model, range(len(samples)), batch):
        fed = [samples[row] for row in filled]
        if setting.mode == "teacher":
            simulation = like._replace(selection=setting.selection, sparsity=setting.sparsity or 0.0)
            found = _teacher_forced(model, fed, simulation, widest + most)
        else:
            found = _generation(model, fed, setting, widest, most, like, block)
        guessed += [row[: len(sample.answer_tokens)] for row, sample in zip(found[: len(rows)], fed, strict=False)]
        progress.update(len(rows))
    judged = [outcomes(row, sample.answer_tokens) for row, sample in zip(guessed, samples, strict=True)]
    correct, covered = [whole for whole, _ in judged], [share for _, share in judged]
    count = len(samples)
    low, high = statistics.wilson(sum(correct), count)
    coverage_low, coverage_high = statistics.wilson(sum(covered), count)
    return {
        **setting.fields(), "samples": count, "accuracy": sum(correct) / count, "low": low, "high": high,
        "coverage": sum(covered) / count, "coverage_low": coverage_low, "coverage_high": coverage_high,
        "correct": list(map(int, correct)), "covered": covered, "guessed": guessed,
    }  # fmt: skip


def compare(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the selections of :func:`papers.predictor.beside.sides` on the same samples: accuracy and coverage."""
    compared = []
    for r, other, told in beside.sides(results):
        accuracy, coverage = (
            statistics.comparison([ours - theirs for ours, theirs in zip(r[name], other[name], strict=True)])
            for name in ("correct", "covered")
        )
        of_coverage = {f"coverage_{name}": coverage[name] for name in ("difference", "low", "high")}
        told |= {"mode": r["mode"], "evicts": r["evicts"] or other["evicts"]}
        compared.append({**told, **accuracy, **of_coverage})
    return compared


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return a table with one line per selection, mode and sparsity."""
    names = report.labels(results)
    cells = [*names, *report.figure("accuracy", "accuracy"), *_coverage("coverage", ".3f")]
    note = "accuracy: names that are right as a whole; coverage: the mean share of a name's tokens that are right"
    return report.table(results, cells, left=len(names), notes=[note])


def comparison_table(comparisons: Sequence[dict[str, Any]]) -> str:
    """Return a table of the comparisons; the verdict "better" is on accuracy."""
    columns = [*report.figure("accuracy", "difference", "+.3f"), *_coverage("coverage_difference", "+.3f")]
    return report.comparison_table(comparisons, columns)


def _coverage(field: str, form: str) -> list[tuple[str, report.Cell]]:
    return report.figure("coverage", field, form, "coverage_low", "coverage_high")


def dots(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw accuracy and coverage with intervals: two panels per mode."""
    panels = []
    for mode, what in {"teacher": "teacher-forced", "generate": "generated"}.items():
        if own := [r for r in results if r["mode"] == mode]:
            coverage = ("coverage", "coverage_low", "coverage_high")
            accuracy = Panel(f"{what}, accuracy: whole name", own)
            panels.append([accuracy, Panel(f"{what}, coverage: its tokens", own, *coverage)])
    beside.dots(panels, path, title=f"Co-reference: naming the place again ({results[0]['samples']} samples)")


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    selections.add_flags(flags, select=SELECT, sparsity="0.5", batch=10)
    flags.add_argument("--mode", default="teacher", help="teacher, generate; several by comma")
    flags.add_argument("--samples", type=count, default=100)
    add_shared_flags(flags, "block", "seed", *MESH, seed=dict(type=at_least(0)))


def command(flags: argparse.Namespace) -> None:
    """Run the evaluation: check, answer the samples, print the table, write JSON and picture."""
    modes: Any = commands.listed("mode", flags.mode, "--mode generate")
    settings = make_settings(flags.select, selections.parse_sparsities(flags.sparsity), modes)
    report.check_outputs(flags.json, flags.plot)
    model, tokenizer, networks = selections.load(flags, [setting.selection for setting in settings])
    samples = [coref_task.sample(flags.seed + index, tokenizer) for index in range(flags.samples)]

    results = []
    like = simulator.DENSE._replace(networks=networks, sinks=flags.sinks, heads=flags.heads)
    with commands.progress_bar("sample", total=len(samples) * len(settings)) as progress:
        for setting in settings:
            make_room()
            progress.set_description(setting.title())
            results.append(
                measure(model, samples, setting, like=like, block=flags.block, batch=flags.batch, progress=progress)
            )
        progress.set_description("done")
    comparisons = compare(results)
    report.show(table(results), comparison_table(comparisons))
    figures = {
        "evaluation": "coref",
        "settings": command_line.settings(flags),
        "samples": len(samples),
        "results": results,
        "comparisons": comparisons,
    }
    report.write(flags, figures, evaluator.digests(model, tokenizer, networks), lambda path: dots(results, path))


def _teacher_forced(model, samples, simulation, width) -> list[list[int]]:
    tokens = answering.padded([[*sample.tokens, *sample.answer_tokens] for sample in samples], width)
    hidden = simulation.hidden_states(model, tokens)
    most = max(len(sample.answer_tokens) for sample in samples)
    places = np.array([len(sample.tokens) - 1 for sample in samples])[:, None] + np.arange(most)
    likeliest = hosts.fetched(_likeliest(model, hidden, np.minimum(places, width - 1)))
    return [row[: len(sample.answer_tokens)].tolist() for row, sample in zip(likeliest, samples, strict=True)]


@jax.jit
def _likeliest(model: models.Decoder, hidden: Float[Array, "B T E"], places: Int[Array, "B A"]) -> Int[Array, "B A"]:
    return jnp.argmax(model.logits(jnp.take_along_axis(hidden, places[..., None], axis=1)), axis=-1)


def _generation(model, samples, setting, width, most, like, block) -> list[list[int]]:
    tokens = answering.padded([sample.tokens for sample in samples], width)
    lengths = np.array([len(sample.tokens) for sample in samples])
    selection, given = setting.selection, dict[str, Any]()
    if setting.sparsity is not None:
        given["budget"] = round(1 - setting.sparsity, 4)
    if selection.source is not None:
        given.update(select=selection.source, sinks=like.sinks)
    elif selection.policy is not None:  # the sinks are kept, within the budget
        given.update(policy=simulator.with_sinks(selection.policy, like.sinks), when="block")
    given["networks"] = read_by(like.networks, selection.policy, selection.source)
    out = models.generate(model, tokens, lengths=lengths, block=block, max_new_tokens=most, end=(), **given)
    return hosts.fetched(out.tokens).tolist()
