"""Perplexity: how well text is predicted under a policy's budget, or when every head reads only a selection's tokens.

The text is cut into chunks (1,024 tokens in arXiv 2503.07518). Each is a sequence of its own that begins with BOS if
the tokenizer has one; a rest that fills no chunk is left out. With ``--stride``, windows of that length slide over
the text. Only the last tokens of each window are counted, as many as the stride; the tokens before them are context.

- Selections (``--select``, ``--sparsity``): see evals/selections.py for what is read.
- Policies (``--policies``, ``--budgets``, ``--block``): the library's own prefill evicts after every block. Each token
  is predicted from its own block and what earlier evictions kept (CAOTE, tables 4 and 8). With ``--when prompt`` the
  context of a window is compressed once, and the window's last tokens (``--stride``) are predicted from what is kept.

The mean Kullback-Leibler divergence of each token's distribution from the dense model's, in nats, is reported as well.
It measures the change of the whole distribution, not only of the token that came, and is 0 where nothing is lost.

Intervals are over chunks. Each line is compared with the dense model, which reads everything, selections are compared
with the predictor, and a policy with CAOTE with the same policy without it: is its perplexity larger, and are its
distributions farther from the dense model's?
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from jaxtyping import Float, Int
from tqdm import tqdm

import kvjax
import models
from evals import (
    answering,
    command_line,
    evaluator,
    loglikelihood,
    report,
    run_settings,
    selections,
    simulator,
    statistics,
    texts,
)
from evals.run_settings import Setting
from evals.selections import Selection
from evals.simulator import Simulation
from kvjax._src.checks import check_names
from kvjax.schedule import When
from kvjax.sources import PREDICTOR
from models import commands
from models.commands.programs import make_room
from models.commands.shared_flags import MESH, add_shared_flags, count

SELECT = f"oracle,{PREDICTOR},quest,h2o+protect(recent=0),snapkv,streaming"
EXAMPLES = """examples:
  python -m evals perplexity --select oracle,quest,h2o,snapkv,streaming --sparsity 0,0.1,...,0.7 --plot out.png
  python -m evals perplexity --policies h2o,h2o+caote,snapkv,snapkv+caote --budgets 64,128,256 --block 32 --plot out.png
  python -m evals perplexity --text king-james-bible --chunk 1024 --stride 256 --sequences 32 --when block,prompt
      --policies h2o,snapkv,snapkv+caote --budgets 0.25
  python -m evals perplexity --model Llama-3.2-1B --networks trained/ --text book.txt --chunk 1024 --sparsity 0.5
"""


class Losses(NamedTuple):
    """For each chunk, the mean negative log-likelihood of its tokens but the first, and their mean divergence from the
    dense model, both in nats. ``hidden`` are the dense model's hidden states, the reference of other settings.
    """

    by_chunk: Float[np.ndarray, "n"]
    divergence: Float[np.ndarray, "n"]
    hidden: list[np.ndarray] | None = None


def make_chunks(
    tokenizer: Any, text: str, length: int, limit: int | None = None, stride: int | None = None
) -> Int[np.ndarray, "n T"]:
    """Cut the text's tokens into sequences of ``length``, each with BOS in front if the tokenizer has one.

    Args:
        tokenizer: has ``encode(text, add_special_tokens)`` and ``bos``.
        limit: the largest number of sequences.
        stride: the number of tokens from one sequence's beginning to the next; by default they follow each other.

    Raises:
        ValueError: the length is below 2, the stride is below 1 or larger than a sequence, or the text does not fill
            one sequence.
    """
    if length < 2:
        raise ValueError(f"a chunk of {length} tokens predicts nothing; give at least 2.")
    if limit is not None and limit < 1:
        raise ValueError(f"{limit} sequences were asked for; give at least 1.")
    first = [] if tokenizer.bos is None else [tokenizer.bos]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    own = length - len(first)
    step = own if stride is None else stride
    if not 1 <= step <= own:
        raise ValueError(f"the stride is {stride}; give 1 to {own}, the chunk's own tokens.")
    if len(tokens) < own:
        raise ValueError(
            f"the text has {len(tokens)} tokens, which do not fill a chunk of {length}; give more text, or a smaller "
            f"--chunk (at most {len(tokens) + len(first)})."
        )
    count = (len(tokens) - own) // step + 1
    count = count if limit is None else min(count, limit)
    return np.array([first + tokens[i * step : i * step + own] for i in range(count)], np.int32)


def losses(
    model: models.Decoder,
    chunks: Int[np.ndarray, "n T"],
    simulation: Simulation = simulator.DENSE,
    *,
    full: Losses | None = None,
    batch: int = 4,
    counted: int | None = None,
    progress: tqdm = evaluator.QUIET,
) -> Losses:
    """Measure a selection, or the dense model.

    ``full`` are the dense model's losses; None measures them, and keeps its hidden states. Only the last ``counted``
    tokens of each chunk count, all by default.
    """
    found = loglikelihood.simulate(
        model, chunks.tolist(), simulation, block=1, batch=batch,
        reference=None if full is None else full.hidden, keep_hidden=full is None, on_row=lambda *_: progress.update(),
    )  # fmt: skip
    return _losses(found, counted)


FEED = answering.Feed(block=32, batch=4)


def policy_losses(
    model: models.Decoder,
    chunks: Int[np.ndarray, "n T"],
    setting: Setting,
    *,
    full: Losses | None = None,
    counted: int | None = None,
    progress: tqdm = evaluator.QUIET,
    feed: answering.Feed = FEED,
) -> Losses:
    """Measure a policy that evicts after every block, or once before the last ``counted`` tokens of each chunk.

    Without ``full``, the dense model's losses, there is no divergence (NaN).

    Raises:
        ValueError: the policy evicts once and ``counted`` is None, so that all tokens would be predicted before it
            does.
    """
    once, aids = _check_compression(setting, counted), feed.aids
    found = loglikelihood.predict(
        model, chunks.tolist(), [counted or 0] * len(chunks) if once else None, policy=aids.policy(setting),
        budget=setting.budget, block=feed.block, when=setting.when, batch=feed.batch, cache_dtype=setting.cache_dtype,
        reference=None if full is None else full.hidden, on_row=lambda *_: progress.update(), networks=aids.of(setting),
    )  # fmt: skip
    return _losses(found, counted)


def _losses(found: Sequence[loglikelihood.TokenPredictions], counted: int | None) -> Losses:
    own = slice(None if counted is None else -counted, None)
    return Losses(
        np.array([-np.mean(row.log_probability[own], dtype=np.float64) for row in found]),
        np.array([_divergence(row, own) for row in found]),
        [row.hidden for row in found if row.hidden is not None] or None,
    )


def _divergence(row: loglikelihood.TokenPredictions, own: slice) -> float:
    if row.hidden is not None:  # the reference itself
        return 0.0
    return math.nan if row.divergence is None else float(np.mean(row.divergence[own], dtype=np.float64))


def measure(
    model: models.Decoder,
    chunks: Int[np.ndarray, "n T"],
    full: Losses,
    chosen: Sequence[Selection],
    sparsities: Sequence[float],
    *,
    like: Simulation = simulator.DENSE,
    progress: tqdm = evaluator.QUIET,
    **options: Any,
) -> list[dict[str, Any]]:
    """Measure each selection at each sparsity; the first is the dense model ("full").

    At sparsity 0 nothing is left out: those have the dense model's figures.

    Args:
        full: the dense model's losses.
        like: has what the selections read beside the model.
        options: see :func:`losses`.

    Returns:
        Lines of ``select``, ``sparsity``, ``perplexity``, ``increase`` over the dense model (a share, by paired chunks)
        and ``kl``, the divergence from it, each of these three with its 95% interval over chunks; and of ``by_chunk``
        and ``kl_by_chunk``, the losses and divergences. With a single chunk, the intervals are None.
    """
    everything = selections.parse_selection("full")
    results = [_line(everything, 0.0, full, full)]
    for selection, sparsity in itertools.product(chosen, sparsities):
        if selection == everything:
            continue
        progress.set_description(f"{selection}, sparsity {sparsity:g}")
        found = full
        if sparsity:
            simulation = like._replace(selection=selection, sparsity=sparsity)
            found = losses(model, chunks, simulation, full=full, progress=progress, **options)
        results.append(_line(selection, sparsity, found, full))
    return results


def measure_policies(
    model: models.Decoder,
    chunks: Int[np.ndarray, "n T"],
    full: Losses,
    settings: Sequence[Setting],
    *,
    feed: answering.Feed = FEED,
    progress: tqdm = evaluator.QUIET,
    **options: Any,
) -> list[dict[str, Any]]:
    """Measure each policy at each budget and moment.

    Lines are like those of :func:`measure`, with the setting, when it evicts, and ``difference``: the perplexity minus
    the dense model's, as in CAOTE's tables.
    """
    results = []
    for setting in settings:
        make_room()
        progress.set_description(f"{setting.policy}, budget {setting.budget}, {setting.when}")
        found = policy_losses(model, chunks, setting, full=full, feed=feed, progress=progress, **options)
        told = {name: setting.fields()[name] for name in ("policy", "budget", "when", "evicts", "cache_dtype")}
        results.append({**told, "block": feed.block, **against(found, full)})
    return results


def compare(results: Sequence[dict[str, Any]], against: str = PREDICTOR) -> list[dict[str, Any]]:
    """Compare each selection's perplexity, and KL, with that of ``against`` at the same sparsity, by paired chunks."""
    others = {r["sparsity"]: r for r in results if r["select"] == against}
    compared = []
    for r in results:
        other = others.get(r["sparsity"])
        if other is None or r["select"] in (against, "full") or not r["sparsity"]:
            continue
        compared.append({"select": r["select"], "against": against, "sparsity": r["sparsity"], **_apart(r, other)})
    return compared


def compare_policies(results: Sequence[dict[str, Any]], against: str = run_settings.RECENCY) -> list[dict[str, Any]]:
    """Compare the perplexity, and KL, of each policy with those of :func:`evals.report.pairs`, by paired chunks."""
    compared = []
    for r, other in report.pairs(results, against):
        told = {name: r[name] for name in ("budget", "when", "evicts")}
        compared.append({"policy": r["policy"], "against": other["policy"], **told, **_apart(r, other)})
    return compared


def _apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Compare two lines: is the one's perplexity larger, and are its distributions farther from the dense model's?"""
    losses, divergences = (np.array(one[name]) - np.array(other[name]) for name in ("by_chunk", "kl_by_chunk"))
    several = len(losses) > 1
    increase, low, high = _ratio(losses, less=1)
    farther, *bounds = statistics.mean_interval(divergences.tolist())
    nearest, farthest = bounds if several else (None, None)
    return {
        "increase": increase,
        "low": low,
        "high": high,
        "kl_difference": farther,
        "kl_low": nearest,
        "kl_high": farthest,
        "larger": _verdict(low, high),
        "farther": _verdict(nearest, farthest),
    }


def _verdict(low: float | None, high: float | None) -> str:
    return "one chunk" if low is None or high is None else statistics.verdict(low, high)


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return a table with one line per selection and sparsity, or policy and budget, compared with the dense model."""

    def unless_full(cell: Callable[[dict[str, Any]], str]) -> report.Cell:
        return lambda r: "" if r.get("select") == "full" else cell(r)

    names = report.labels(results)
    cells: list[tuple[str, report.Cell]] = [
        *names,
        *report.figure("perplexity", "perplexity"),
        *([("difference", "{difference:+.3f}")] if any("policy" in r for r in results) else []),
        ("against full", unless_full("{increase:+.2%}".format_map)),
        ("95%", unless_full(report.between("+.2%", "increase_low", "increase_high"))),
        ("KL", "{kl:.4f}"),
    ]
    return report.table(results, cells, left=len(names))


def ratio_table(comparisons: Sequence[dict[str, Any]]) -> str:
    """Return a table of how much larger each perplexity, and KL, is than that of the one it is compared with."""
    divergence = report.figure("KL", "kl_difference", "+.4f", "kl_low", "kl_high")
    return report.comparison_table(comparisons, [*report.figure("perplexity", "increase", "+.2%"), *divergence])


def perplexity_lines(
    results: Sequence[dict[str, Any]], policies: Sequence[dict[str, Any]], path: Path, *, title: str
) -> None:
    """Draw perplexity over sparsity, and over budgets in one panel per moment, one line per selection or policy.

    Where every panel has a single sparsity or budget, each selection or policy has a point and its interval
    instead. The dense model is a grey line. The axis of lines is logarithmic where the largest value is more than three
    times the smallest.
    """
    dense = next(r for r in results if r["select"] == "full")
    selected = [r for r in results if r["select"] != "full"]
    moments = {"block": "after every block", "prompt": "once, before the tokens that count"}
    reads, keeps = "sparsity: share of the tokens that a query does not read", "budget: slots per head"
    if any(isinstance(r["budget"], float) for r in policies):
        keeps = "budget: slots per head (from 1), or a share of the chunk"
    panels = [(selected, "select", "sparsity", reads, "")] * bool(selected)
    for when in dict.fromkeys(r["when"] for r in policies):
        panels.append(([r for r in policies if r["when"] == when], "policy", "budget", keeps, moments.get(when, when)))
    single = bool(panels) and all(len({r[along] for r in drawn}) == 1 for drawn, _, along, *_ in panels)
    most = max((len(drawn) for drawn, *_ in panels), default=0)
    plt = report.pyplot()
    figure, axes = plt.subplots(
        1, max(len(panels), 1), figsize=(6.4 * max(len(panels), 1), 1.6 + 0.3 * most if single else 5.4),
        layout="constrained", squeeze=False, sharey=not selected, sharex=single,
    )  # fmt: skip
    for axis, (drawn, name, along, label, title_of) in zip(axes[0], panels, strict=False):
        if single:
            _points(axis, dense, drawn, name)
            axis.set_xlabel(f"perplexity, {along} {drawn[0][along]:g}")
        else:
            _panel(axis, dense, drawn, name, along)
            axis.set_xlabel(label)
        axis.set_title(title_of, fontsize=10)
    if single:
        axes[0, 0].invert_yaxis()
    else:
        axes[0, 0].set_ylabel("perplexity")
    figure.suptitle(title, fontsize=10.5)
    report.save(figure, path)


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    selections.add_flags(flags, select=None, sparsity="0,0.1,...,0.7", batch=4)
    flags.add_argument("--policies", help="several by comma; --budgets, --block and --when are theirs")
    flags.add_argument(
        "--against",
        metavar="NAME",
        help="the policy that each policy is compared with, by paired chunks; it is measured, too (default: "
        f"{run_settings.RECENCY}); without --policies, the selection (default: {PREDICTOR}, if it is measured)",
    )
    moments = "evict after every block (block), once before a window's last --stride tokens (prompt), or as in each "
    moments += "policy's paper (published); several by comma"
    add_shared_flags(
        flags, "budgets", "block", "moments", "cache_dtype", *MESH,
        budgets="128,256", block=32, moments=dict(help=moments),
    )  # fmt: skip
    add_text_flags(flags, chunk=512)


def add_text_flags(flags: argparse.ArgumentParser, *, chunk: int) -> None:
    """Add the flags for the text and how it is cut."""
    texts.add_text_flag(flags)
    flags.add_argument("--chunk", type=count, default=chunk, help="tokens per sequence; 1024 as published")
    flags.add_argument(
        "--stride", type=count, help="slide windows of --chunk tokens by so many, and count only their last so many"
    )
    flags.add_argument("--sequences", type=count, help="use at most so many of the text's chunks")


def command(flags: argparse.Namespace) -> None:
    """Run the evaluation: check, measure, print the tables, write JSON and picture."""
    if flags.select is None:
        flags.select = SELECT if flags.policies is None else "full"
    if flags.against is not None and flags.policies is None:
        flags.select += f",{flags.against}"
    if flags.cache_dtype is not None and flags.policies is None:
        raise ValueError("--cache-dtype is for --policies; selections are simulated on whole texts, without a cache.")
    chosen, sparsities = selections.parse_selections(flags.select), selections.parse_sparsities(flags.sparsity)
    settings = [] if flags.policies is None else make_settings(flags)
    report.check_outputs(flags.json, flags.plot)
    text = texts.read_text(flags.text)
    model, tokenizer = command_line.load(flags)
    chunks = chunks_for(model, tokenizer, text, flags)
    aids = answering.Aids(tokenizer, command_line.networks_for(flags, [*chosen, *settings], model))
    digests = evaluator.digests(model, tokenizer, aids.networks) | {"text": texts.digest(text)}
    like = simulator.DENSE._replace(networks=aids.networks, sinks=flags.sinks, heads=flags.heads)
    for setting in settings:  # all settings are checked before the first is run
        models.stream(
            model, chunks[: flags.batch, :-1], policy=aids.policy(setting), budget=setting.budget, block=flags.block,
            when=setting.when, cache_dtype=setting.cache_dtype, networks=aids.of(setting),
            question=flags.stride - 1 if setting.moments[0] == "prompt" else None, max_new_tokens=1, evict_every=0,
        )  # fmt: skip
    simulated = sum(selection.name != "full" for selection in chosen) * sum(map(bool, sparsities))
    with commands.progress_bar("chunk", total=len(chunks) * (1 + simulated + len(settings))) as progress:
        progress.set_description("full")
        shared: dict[str, Any] = dict(counted=flags.stride, progress=progress)
        full = losses(model, chunks, batch=flags.batch, **shared)
        results = measure(model, chunks, full, chosen, sparsities, like=like, batch=flags.batch, **shared)
        feed = answering.Feed(flags.block, flags.batch, aids)
        evicted = measure_policies(model, chunks, full, settings, feed=feed, **shared)
        progress.set_description("done")
    predictor = flags.against is None or bool(settings)
    of_selections = PREDICTOR if predictor else str(selections.parse_selection(flags.against))
    comparisons, gains = compare(results, of_selections), compare_policies(evicted, run_settings.baseline(flags))
    report.show(table(results), ratio_table(comparisons), table(evicted), ratio_table(gains))
    figures = {
        "evaluation": "perplexity",
        "settings": command_line.settings(flags),
        "chunks": len(chunks),
        "results": results,
        "comparisons": comparisons,
        **({"policies": evicted, "policy_comparisons": gains} if evicted else {}),
    }
    title = f"Perplexity ({len(chunks)} chunks of {chunks.shape[1]} tokens)"
    of_budgets = [r for r in evicted if r["budget"] is not None]
    report.write(flags, figures, digests, lambda path: perplexity_lines(results, of_budgets, path, title=title))


def make_settings(flags: argparse.Namespace) -> list[Setting]:
    """Return all combinations of the policies, budgets and moments of a command line, checked before any work.

    The policies begin with the one that the others are compared with.
    """
    against = run_settings.baseline(flags)
    if against.startswith(report.READS):
        raise ValueError(f"--against is {against}; policies are compared with a policy here: give one such as snapkv.")
    names = [against, *commands.listed("policy", flags.policies, "--policies snapkv,snapkv+caote")]
    # The full cache is measured anyway.
    policies = list(dict.fromkeys(str(kvjax.parse(name)) for name in names if name != "full"))
    budgets = [commands.parse_budget(budget) for budget in commands.split_list(flags.budgets)]
    moments: Any = commands.listed("moment", flags.when, "--when prompt")
    check_names("--when", moments, get_args(When))
    run_settings.check_budgets(policies, budgets)
    dtype = getattr(flags, "cache_dtype", None)
    eight_bits_alone = [] if dtype is None else [Setting("full", None, "block", "unknown", 0, dtype)]
    settings = [
        Setting(policy, budget, when, "unknown", 0, dtype)
        for when, budget, policy in itertools.product(dict.fromkeys(moments), budgets, policies)
    ]
    for setting in settings:
        _check_compression(setting, flags.stride)
    return [*eight_bits_alone, *settings]


def chunks_for(model: models.Decoder, tokenizer: Any, text: str, flags: argparse.Namespace) -> Int[np.ndarray, "n T"]:
    """Make the chunks that a command line asks for; ValueError where they are longer than the model takes."""
    if flags.chunk > model.config.max_positions:
        raise ValueError(
            f"--chunk is {flags.chunk}, but the model takes {model.config.max_positions} positions; give fewer."
        )
    return make_chunks(tokenizer, text, flags.chunk, flags.sequences, flags.stride)


def _check_compression(setting: Setting, counted: int | None) -> bool:
    """Return whether a setting compresses once, before the last ``counted`` tokens; ValueError where that is None."""
    once = setting.moments[0] == "prompt"
    if once and counted is None:
        raise ValueError(
            f"{setting.policy!r} evicts once with --when {setting.when}, but all tokens of a chunk are predicted; give "
            "--stride, the number of last tokens of each window to predict after the compression."
        )
    return once


def _line(selection: Selection, sparsity: float, found: Losses, full: Losses) -> dict[str, Any]:
    return {"select": str(selection), "sparsity": sparsity, **against(found, full)}


def against(found: Losses, full: Losses) -> dict[str, Any]:
    """Return the figures of losses, compared with those of the dense model on the same chunks."""
    perplexity, low, high = _ratio(found.by_chunk)
    increase, increase_low, increase_high = _ratio(found.by_chunk - full.by_chunk, less=1)
    whole, _, _ = _ratio(full.by_chunk)
    kl, kl_low, kl_high = statistics.mean_interval(found.divergence.tolist())
    several = len(found.by_chunk) > 1
    return {
        "perplexity": perplexity,
        "low": low,
        "high": high,
        "increase": increase,
        "increase_low": increase_low,
        "increase_high": increase_high,
        "difference": perplexity - whole,
        "kl": kl,
        "kl_low": kl_low if several else None,
        "kl_high": kl_high if several else None,
        "by_chunk": found.by_chunk.tolist(),
        "kl_by_chunk": found.divergence.tolist(),
    }


def _ratio(logarithms: np.ndarray, less: int = 0) -> tuple[float, float | None, float | None]:
    """Return the exponential of the mean less a number, with its 95% interval if there are at least two values."""
    mean, low, high = (math.exp(bound) - less for bound in statistics.mean_interval(logarithms.tolist()))
    return (mean, low, high) if len(logarithms) > 1 else (mean, None, None)


def _points(axis: Any, dense: dict[str, Any], results: list[dict[str, Any]], name: str) -> None:
    axis.axvline(dense["perplexity"], color="#999999", linewidth=1, linestyle="--")
    for place, r in enumerate(results):
        bounds = None
        if r["increase_low"] is not None:  # the interval against the dense model, by paired chunks
            low, high = (dense["perplexity"] * (1 + r[f"increase_{end}"]) for end in ("low", "high"))
            bounds = [[max(r["perplexity"] - low, 0)], [max(high - r["perplexity"], 0)]]
        axis.errorbar(
            r["perplexity"], place, xerr=bounds, fmt="o", color=report.COLOURS[0], markersize=4.5, elinewidth=1.2
        )
    axis.set_yticks(range(len(results)), [r[name] for r in results], fontsize=8.5)
    report.plain(axis, grid="x")


def _panel(axis: Any, dense: dict[str, Any], results: list[dict[str, Any]], name: str, along: str) -> None:
    axis.axhline(dense["perplexity"], color="#999999", linewidth=1, linestyle="--", label="full")
    for index, chosen in enumerate(dict.fromkeys(r[name] for r in results)):
        line = sorted((r for r in results if r[name] == chosen), key=lambda r: r[along])
        colour = report.colour(index)
        style = dict(marker="osv^DPX"[index % 7], linestyle="-" if index < len(report.COLOURS) else ":")
        x, y = [r[along] for r in line], [r["perplexity"] for r in line]
        axis.plot(x, y, color=colour, linewidth=1.5, markersize=4.5, label=chosen, **style)
        if all(r["increase_low"] is not None for r in line):  # the interval against the dense model, by paired chunks
            low, high = ([dense["perplexity"] * (1 + r[f"increase_{end}"]) for r in line] for end in ("low", "high"))
            axis.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
    values = [dense["perplexity"], *(r["perplexity"] for r in results)]
    if max(values) > 3 * min(values):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(report.pyplot().FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(report.pyplot().NullFormatter())
    places = sorted({r[along] for r in results})
    if len(places) <= 12:
        axis.set_xticks(places, [f"{place:g}" for place in places])
    report.plain(axis)
    axis.legend(fontsize=8.5, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
