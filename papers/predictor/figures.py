"""Figures on the predictor of arXiv 2503.07518: its accuracy, and why each head needs its own prediction.

accuracy, layers: the share of the oracle's tokens that a source chooses, too, while the model runs dense (figure 3):
over all layers but the first, and layer by layer. "token accuracy" is that of each sequence's last query: the paper's
classification of the top 50% tokens by the model's attention. The paper does not say which queries it takes; its public
code takes this one. "hit rate" is the mean over all queries, "mass" the true attention on the chosen tokens. No sinks.

agreement: the correlation of the attention logits of each sequence's last query between all heads of all layers,
including layer 0, and its mean over pairs, the cross-head consensus (figure 8). The paper names no coefficient; here it
is Pearson's per sequence, over all tokens up to the query. The share of tokens that the top 50% of two heads have in
common is reported as well; it is 0.5 by chance.

choices: the right ones found in choice tasks made from the text; see papers/predictor/zero_shot.py.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from tqdm import tqdm

import models
from evals import answering, command_line, evaluator, perplexity, report, selections, simulator, statistics, texts
from evals.selections import Selection
from kvjax.sources import PREDICTOR
from models import commands
from models.networks import Networks
from papers.predictor import beside, zero_shot

FIGURES = ("accuracy", "layers", "agreement", "choices")
SOURCES = f"{PREDICTOR},quest,first_layer,previous_layer,streaming,random"
MEASURES = ("token_accuracy", "hit_rate", "mass")
TOP = 0.5
DRAWN = ("correlation", "overlap")  # a number for each two heads, which the picture has and the JSON file leaves out


def accuracies(
    model: models.Decoder,
    chunks: Int[np.ndarray, "n T"],
    chosen: Sequence[Selection],
    sparsities: Sequence[float],
    *,
    networks: Networks = None,
    batch: int = 4,
    progress: tqdm = evaluator.QUIET,
) -> list[dict[str, Any]]:
    """Measure the share of the oracle's tokens that each source finds.

    Returns:
        Lines of ``select``, ``sparsity``, the ``MEASURES`` over all layers but the first with their 95% intervals over
        sequences, and ``layers``, the same for each of these layers.
    """
    results = []
    for selection in chosen:
        for sparsity in sparsities:
            progress.set_description(f"{selection}, sparsity {sparsity:g}")
            parts = []
            for rows, filled in answering.batches(model, range(len(chunks)), batch):
                found = simulator.hits(model, chunks[filled], selection, sparsity, networks=networks)
                share, mass = (np.asarray(x, np.float64)[1:, : len(rows)] for x in found)  # [L - 1, n, T]
                parts.append(np.stack([share[..., -1], share.mean(axis=-1), mass.mean(axis=-1)]))
                progress.update(len(rows))
            by_sequence = np.concatenate(parts, axis=-1)  # [measures, L - 1, n]
            layers = [{"layer": layer, **_intervals(x)} for layer, x in enumerate(by_sequence.swapaxes(0, 1), 1)]
            whole = by_sequence.mean(axis=1)
            named = {"by_sequence": dict(zip(MEASURES, whole.tolist(), strict=True))}
            told = {"select": str(selection), "sparsity": sparsity}
            results.append({**told, **_intervals(whole), "layers": layers, **named})
    return results


def compare(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the predictor's hit rate with each other source's at the same sparsity, by paired sequences."""
    compared = []
    for ours, theirs, told in beside.sides(results):
        both = (np.array(r["by_sequence"]["hit_rate"]) for r in (ours, theirs))
        found = statistics.comparison(np.subtract(*both).tolist(), interval=statistics.mean_interval)
        several = len(ours["by_sequence"]["hit_rate"]) > 1
        compared.append(told | (found if several else found | {"better": "one sequence"}))
    return compared


def agreement(logits: Float[np.ndarray, "L B N T"]) -> dict[str, Any]:
    """Measure how alike the heads' attention logits are, from :func:`evals.simulator.last_logits`.

    Returns:
        ``correlation`` and ``overlap`` [L N, L N], means over sequences; ``consensus`` and ``common``, their means over
        pairs of different heads, with 95% intervals over sequences; and ``layers``, the same means within each layer
        and between it and the next.
    """
    L, B, N, T = logits.shape
    by_head = np.moveaxis(np.asarray(logits, np.float64), 1, 0).reshape(B, L * N, T)
    correlation = np.array([_correlation(logits) for logits in by_head])
    top = np.zeros((B, L * N, T))
    count = int(selections.kept_tokens(T, TOP)[-1])
    newest_first = np.argsort(-by_head[..., ::-1], axis=-1, kind="stable")[..., :count]  # stable: newer tokens win ties
    np.put_along_axis(top, T - 1 - newest_first, 1, axis=-1)
    overlap = top @ top.swapaxes(1, 2) / count
    one, other = np.triu_indices(L * N, 1)
    found: dict[str, Any] = {"heads": N, "correlation": correlation.mean(axis=0).tolist()}
    found |= {"overlap": overlap.mean(axis=0).tolist()}
    layers: list[dict[str, Any]] = [{"layer": layer} for layer in range(L)]
    for name, matrix in (("consensus", correlation), ("common", overlap)):
        pairs = matrix[:, one, other]  # [B, pairs]
        mean, low, high = statistics.mean_interval(pairs.mean(axis=1).tolist())
        found |= {name: mean, f"{name}_interval": [low, high] if B > 1 else None}
        for layer, (place, there) in itertools.product(range(L), (("within", 0), ("next", 1))):
            own = pairs[:, (one // N == layer) & (other // N == layer + there)]
            layers[layer][f"{name}_{place}"] = float(own.mean(axis=0).mean()) if own.size else None
    return found | {"layers": layers}


def accuracy_table(results: Sequence[dict[str, Any]]) -> str:
    """Return a table of the share of the oracle's tokens that each source finds, over all layers but the first."""
    cells: list[tuple[str, report.Cell]] = [("select", "{select}"), ("sparsity", "{sparsity:g}")]
    note = "token accuracy: share of the oracle's tokens that are chosen, for the last query; hit rate: for all "
    note += "queries; mass: attention on the chosen tokens"
    measured = [column for measure in MEASURES for column in _columns(measure)]
    return report.table(results, [*cells, *measured], left=1, notes=[note])


def _columns(measure: str) -> list[tuple[str, report.Cell]]:
    """Return the columns of a measure and its interval."""
    bounds = lambda r: report.interval(r[f"{measure}_interval"], ".3f")  # noqa: E731
    return [(measure.replace("_", " "), f"{{{measure}:.3f}}"), ("95%", bounds)]


def layer_table(results: Sequence[dict[str, Any]]) -> str:
    """Return a table of each source's token accuracy and hit rate, one line per layer; layers are counted from 1."""
    cells: list[tuple[str, report.Cell]] = [
        ("select", "{select}"),
        ("sparsity", "{sparsity:g}"),
        ("layer", lambda r: str(r["layer"] + 1)),
        *_columns("token_accuracy"),
        *_columns("hit_rate"),
        ("mass", "{mass:.3f}"),
    ]
    return report.table([r | layer for r in results for layer in r["layers"]], cells, left=1)


def agreement_table(figures: dict[str, Any]) -> str:
    """Return a table of the consensus within each layer and with the next; below it, that over all pairs of heads."""

    def figure(name: str) -> report.Cell:
        return lambda r: "" if r[name] is None else f"{r[name]:.3f}"

    cells: list[tuple[str, report.Cell]] = [
        ("layer", lambda r: str(r["layer"] + 1)),
        ("correlation within", figure("consensus_within")),
        ("with the next", figure("consensus_next")),
        ("common top 50% within", figure("common_within")),
        ("with the next", figure("common_next")),
    ]
    notes = []
    for name, what in (("consensus", "cross-head consensus (correlation)"), ("common", "common top 50%")):
        bounds = figures[f"{name}_interval"]
        within = f" {report.interval(bounds, '.3f')}" if bounds else ""
        notes.append(f"{what}, all pairs: {figures[name]:.3f}{within}")
    return report.table(figures["layers"], cells, left=0, notes=notes)


def source_lines(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw token accuracy and hit rate over layers: one line per source, one row of panels per sparsity."""
    plt = report.pyplot()
    sparsities = list(dict.fromkeys(r["sparsity"] for r in results))
    names = list(dict.fromkeys(r["select"] for r in results))
    panels = (("token_accuracy", "token accuracy (last query)"), ("hit_rate", "hit rate (all queries)"))
    figure, axes = plt.subplots(
        len(sparsities), 2, figsize=(9, 1.1 + 3 * len(sparsities)), squeeze=False, sharey="row", layout="constrained"
    )
    for row, sparsity in enumerate(sparsities):
        for axis, (measure, title) in zip(axes[row], panels, strict=True):
            for r in (r for r in results if r["sparsity"] == sparsity):
                index = names.index(r["select"])
                layer = [x["layer"] + 1 for x in r["layers"]]
                axis.plot(
                    layer, [x[measure] for x in r["layers"]], color=report.colour(index), marker="osv^DPX"[index % 7],
                    linewidth=1.5, markersize=4.5, label=r["select"],
                )  # fmt: skip
                if all(x[f"{measure}_interval"] for x in r["layers"]):
                    bounds = np.array([x[f"{measure}_interval"] for x in r["layers"]]).T
                    axis.fill_between(layer, *bounds, color=report.colour(index), alpha=0.12, linewidth=0)
            axis.axhline(1 - sparsity, color="#999999", linewidth=1, linestyle="--")
            axis.set_xticks([x["layer"] + 1 for x in results[0]["layers"]])
            report.plain(axis)
            if row == 0:
                axis.set_title(title, fontsize=9.5)
        axes[row][0].set_ylabel(f"found, sparsity {sparsity:g}", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("layer", fontsize=9)
    handles, labels = axes[0][0].get_legend_handles_labels()
    report.legend(figure, dict(zip(labels, handles, strict=True)))
    figure.suptitle("Share of the oracle's tokens that a source chooses (dashed: by chance)", fontsize=11)
    report.save(figure, path)


def agreement_map(figures: dict[str, Any], path: Path) -> None:
    """Draw correlation and common top 50% of all pairs of heads as heat maps, with lines between the layers."""
    plt = report.pyplot()
    heads, layers = figures["heads"], len(figures["layers"])
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.7), layout="constrained")
    panels = (
        ("correlation", f"correlation of logits: mean {figures['consensus']:.2f}", "RdBu_r", -1),
        ("overlap", f"common tokens of the top 50%: mean {figures['common']:.2f}", "viridis", 0),
    )
    for axis, (name, title, colours, lowest) in zip(axes, panels, strict=True):
        image = axis.imshow(np.array(figures[name]), cmap=colours, vmin=lowest, vmax=1, interpolation="nearest")
        for layer in range(1, layers):
            for draw in (axis.axhline, axis.axvline):
                draw(layer * heads - 0.5, color="white" if lowest == 0 else "black", linewidth=0.6)
        step = -(-layers // 16)
        middle = [layer * heads + (heads - 1) / 2 for layer in range(0, layers, step)]
        axis.set_xticks(middle, [str(layer + 1) for layer in range(0, layers, step)], fontsize=8)
        axis.set_yticks(middle, [str(layer + 1) for layer in range(0, layers, step)], fontsize=8)
        axis.tick_params(length=0)
        axis.set_xlabel("heads, by layer", fontsize=9)
        axis.set_title(title, fontsize=9.5)
        figure.colorbar(image, ax=axis, shrink=0.8, aspect=25).ax.tick_params(labelsize=7)
    figure.suptitle("Do heads want the same tokens? The last query of each sequence", fontsize=11)
    report.save(figure, path)


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("figure", choices=FIGURES, help="the figure to make")
    selections.add_flags(flags, select="", sparsity="", batch=4)
    flags.set_defaults(select=None, sparsity=None)
    perplexity.add_text_flags(flags, chunk=256)


def command(flags: argparse.Namespace) -> None:
    """Make one figure: check, measure, print the table, write JSON and picture."""
    if flags.figure == "agreement" and (flags.select or flags.sparsity):
        raise ValueError(
            "agreement compares the model's own heads, which read everything; leave --select and --sparsity out."
        )
    if flags.figure == "choices" and flags.stride is not None:
        raise ValueError("--stride slides windows over a text, but choices are drawn from it; leave it out.")
    names = {"agreement": "full", "choices": zero_shot.SELECT}.get(flags.figure, SOURCES)
    flags.select, flags.sparsity = flags.select or names, flags.sparsity or "0.5"
    chosen, sparsities = selections.parse_selections(flags.select), selections.parse_sparsities(flags.sparsity)
    if flags.figure in ("accuracy", "layers"):
        for selection in chosen:
            if selection.source is None:
                raise ValueError(f"{selection.name!r} is not a source of importance; give sources only (figure 3).")
    report.check_outputs(flags.json, flags.plot)
    text = texts.read_text(flags.text)
    model, tokenizer, networks = selections.load(flags, chosen)
    digests = evaluator.digests(model, tokenizer, networks)
    figures: dict[str, Any]
    told: dict[str, Any] = {"evaluation": f"predictor {flags.figure}", "settings": command_line.settings(flags)}
    if flags.figure == "choices":
        figures = zero_shot.run(flags, text, model, tokenizer, chosen, sparsities, networks)
        report.write(flags, told | figures, digests, lambda path: zero_shot.dots(figures["results"], path))
        return
    chunks = perplexity.chunks_for(model, tokenizer, text, flags)
    if flags.figure == "agreement":
        figures = _agreement_of(model, chunks, flags.batch)
        print(agreement_table(figures))
    else:
        with commands.progress_bar("sequence", total=len(chunks) * len(chosen) * len(sparsities)) as progress:
            results = accuracies(
                model, chunks, chosen, sparsities, networks=networks, batch=flags.batch, progress=progress
            )
            progress.set_description("done")
        figures = {"results": results, "comparisons": compare(results)}
        if flags.figure == "accuracy":
            hits = report.figure("hit rate", "difference", "+.3f")
            report.show(accuracy_table(results), report.comparison_table(figures["comparisons"], hits))
        else:
            print(layer_table(results))
    told["sequences"] = len(chunks)

    def draw(path: Path) -> None:
        if flags.figure == "agreement":
            agreement_map(figures, path)
        else:
            source_lines(figures["results"], path)

    written = {name: value for name, value in figures.items() if name not in DRAWN}
    report.write(flags, told | written, digests, draw)


def _agreement_of(model: models.Decoder, chunks: Int[np.ndarray, "n T"], batch: int) -> dict[str, Any]:
    parts = []
    with commands.progress_bar("sequence", total=len(chunks)) as progress:
        for rows, filled in answering.batches(model, range(len(chunks)), batch):
            parts.append(np.asarray(simulator.last_logits(model, chunks[filled]))[:, : len(rows)])
            progress.update(len(rows))
    return agreement(np.concatenate(parts, axis=1))


def _correlation(logits: Float[np.ndarray, "heads T"]) -> Float[np.ndarray, "heads heads"]:
    """Return Pearson's correlation between heads; it is 0 for a head whose logits are all the same."""
    centred = logits - logits.mean(axis=1, keepdims=True)
    length = np.sqrt(np.sum(centred**2, axis=1, keepdims=True))
    unit = centred / np.where(length > 0, length, 1)
    return unit @ unit.T


def _intervals(by_sequence: Float[np.ndarray, "measures n"]) -> dict[str, Any]:
    """Return the means over sequences, and their intervals if there are at least two sequences."""
    found: dict[str, Any] = {}
    for name, values in zip(MEASURES, by_sequence, strict=True):
        mean, low, high = statistics.mean_interval(values.tolist())
        found |= {name: mean, f"{name}_interval": [low, high] if len(values) > 1 else None}
    return found
