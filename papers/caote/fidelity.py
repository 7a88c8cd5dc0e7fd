"""Fidelity: how far each layer's attention output, and the logits, move when the cache is evicted from.

The answer's tokens are fed after the compressed prompt and after the full cache. The attention outputs of both runs are
compared layer by layer, before the output projection (CAOTE's figure 3) and after it (LaProx's figure 4). A layer's
error includes that of the layers below it.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tqdm import tqdm

import kvjax
import models
from evals import answering, claims, command_line, evaluator, report, run_settings, statistics, tasks
from evals.answering import Feed
from evals.run_settings import RECENCY, Setting
from kvjax._src.split_cache import ModelCache
from models import commands, hosts
from models.commands.programs import make_room
from models.commands.shared_flags import add_shared_flags, count
from models.decoder import frequencies, output_of_heads, rope_of_layer

POLICIES = (
    "h2o",
    "h2o+caote",
    "snapkv(window=8,kernel=7)",
    "snapkv(window=8,kernel=7)+caote",
    "laprox(window=8)",
)
EXAMPLES = """examples:
  python -m papers fidelity --policies "h2o,h2o+caote,snapkv,snapkv+caote" --budgets 128 --plot layers.png
  python -m papers fidelity --policies "laprox" --budgets 0.1 --heads heads.png --json fidelity.json
"""
MEASURES = ("error", "cosine", "output_error", "output_cosine")


class Outputs(NamedTuple):
    """For the tokens after a prompt: each layer's attention output, its projection by W_O, and the logits."""

    attention: Float[Array, "L B T ND"]
    projected: Float[Array, "L B T E"]
    logits: Float[Array, "B T V"]


@jax.jit
def outputs(
    model: models.Decoder,
    cache: ModelCache,
    tokens: Int[Array, "B T"],
    position: Int[Array, "B T"],
    lengths: Int[Array, "B"],
) -> Outputs:
    """Feed tokens after what a cache holds, without eviction, and return their outputs.

    The cache has room for the tokens; positions are -1 for padding; ``lengths`` are those that prefill was given.
    """
    config = model.config
    frequency = None if cache.positions == "absolute" else frequencies(config, lengths)

    def attend(cache, layer, sliding_window, query, key, value):
        own = None if frequency is None else rope_of_layer(config, layer, frequency)
        context = kvjax.Context(
            layer=layer,
            sliding_window=sliding_window,
            frequency=own,
            soft_cap=config.attention_soft_cap,
            sink_logits=model.sink_logits(layer),
        )
        out, cache, _ = kvjax.observe(cache, query, key, value, position, policy=None, context=context)
        return out, cache, out

    hidden, _, attention = model.run(tokens, position, lengths, attend, cache)
    weight = jnp.stack(output_of_heads(model))
    projected = jnp.einsum("lbtnd,lnde->lbte", attention, weight, precision=jax.lax.Precision.HIGHEST)
    return Outputs(attention.reshape(*attention.shape[:3], -1), projected, model.logits(hidden))


def _for_more(cache: ModelCache, tokens: int) -> ModelCache:
    """Return the cache with room for tokens without eviction, which a layer with a sliding window may lack."""

    def of_part(part: Any) -> Any:
        heads = math.prod(part.heads_shape)
        more = kvjax.pages_for(heads * tokens, heads, part.page_size)
        return part.resized(part.num_slots + tokens, part.num_pages + more)

    return cache.map(of_part)


def differences(full: Outputs, evicted: Outputs, valid: np.ndarray) -> dict[str, np.ndarray]:
    """Compare the outputs of two runs: relative L2 error and cosine per layer, and the divergence of the logits.

    All are means over the tokens that are ``valid`` [B, T]: error and cosine ``[B, L]`` before and after W_O, and
    KL(full || evicted) ``[B]``.
    """
    found = {}
    for prefix, one, other in (("", full.attention, evicted.attention), ("output_", full.projected, evicted.projected)):
        a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
        length, other_length = (np.sqrt(np.sum(x * x, axis=-1)) for x in (a, b))
        error = np.sqrt(np.sum((a - b) ** 2, axis=-1)) / np.maximum(length, 1e-30)
        cosine = np.sum(a * b, axis=-1) / np.maximum(length * other_length, 1e-30)
        for name, x in (("error", error), ("cosine", np.minimum(cosine, 1.0))):
            found[prefix + name] = np.sum(np.where(valid, x, 0), axis=-1).T / valid.sum(axis=-1)[:, None]
    p, q = (_log_softmax(np.asarray(x.logits, np.float64)) for x in (full, evicted))
    divergence = np.maximum(np.sum(np.exp(p) * (p - q), axis=-1), 0)  # below 0 by rounding only
    found["kl"] = np.sum(np.where(valid, divergence, 0), axis=-1) / valid.sum(axis=-1)
    return found


def measure(
    model: models.Decoder,
    samples: Sequence[tasks.Sample],
    settings: Sequence[Setting],
    *,
    feed: Feed = answering.FEED,
    progress: tqdm = evaluator.QUIET,
) -> list[dict[str, Any]]:
    """Measure each setting over the samples.

    Returns:
        For each setting: ``layers``, one entry per layer with the means of :func:`differences` and their 95% intervals;
        ``kl`` with its interval; ``retained``, the mean, smallest and largest number of tokens per layer and head; and
        ``by_sample``, the values that the means are taken over.
    """
    collected: list[list[dict[str, np.ndarray]]] = [[] for _ in settings]
    longest = max(len(sample.tokens) for sample in samples)
    most = max(len(sample.answer_tokens) for sample in samples)
    for rows, filled in answering.batches(model, range(len(samples)), feed.batch):
        fed = [samples[row] for row in filled]
        tokens = answering.padded([sample.tokens for sample in fed], longest)
        answers = answering.padded([sample.answer_tokens for sample in fed], most)
        lengths = np.array([len(sample.tokens) for sample in fed], np.int32)
        said = np.array([len(sample.answer_tokens) for sample in fed])
        position = np.where(np.arange(most) < said[:, None], lengths[:, None] + np.arange(most), -1).astype(np.int32)
        questions = np.array([len(sample.tokens) - sample.context_end for sample in fed])
        cache = models.prefill(model, tokens, lengths=lengths, block=feed.block, reserve=most).cache
        full = jax.tree.map(hosts.fetched, outputs(model, cache, answers, position, lengths))
        for setting, found in zip(settings, collected, strict=True):
            make_room()
            progress.set_description(setting.title())
            cache = models.prefill(
                model, tokens, lengths=lengths, policy=feed.aids.policy(setting), budget=setting.budget,
                block=feed.block, when=setting.when, question=questions if setting.question == "unknown" else None,
                reserve=most, cache_dtype=setting.cache_dtype, networks=feed.aids.of(setting),
            ).cache  # fmt: skip
            evicted = outputs(model, _for_more(cache, most), answers, position, lengths)
            shift = differences(full, jax.tree.map(hosts.fetched, evicted), position >= 0)
            shift["retained"] = np.moveaxis(hosts.fetched(cache.num_live), 1, 0)  # [B, L, K]
            found.append({name: x[: len(rows)] for name, x in shift.items()})
            progress.update(len(rows))
    return [_summary(setting, found) for setting, found in zip(settings, collected, strict=True)]


def compare(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Judge the papers' claims in each setting, over all layers and for each layer.

    A policy with CAOTE is closer to the full cache than without it (figure 3 of its paper). LaProx is closer than its
    attention alone and than SnapKV (figure 4 of its paper).
    """
    by_setting = {(r["policy"], r["budget"], r["when"], r["question"]): r for r in results}
    judged = []
    for (policy, *rest), result in by_setting.items():
        pairs = [("CAOTE", report.without_caote(policy), "error", -1)]
        if laprox := re.fullmatch(r"laprox(?:\(((?:window|kernel)=[\w=,]*)?\))?(@.+)?", policy):
            arguments, allocation = f"{laprox[1]}," if laprox[1] else "", laprox[2] or ""
            pooled = arguments if "kernel" in arguments else f"{arguments}kernel=7,"  # LaProx's own pooling
            snapkv = str(kvjax.parse(f"snapkv({pooled[:-1]})"))  # the short name leaves defaults out
            rivals = (f"laprox({arguments}target='attention'){allocation}", snapkv)
            pairs += [("LaProx", other, "output_cosine", 1) for other in rivals]
        for paper, other, kind, sign in pairs:
            if other == policy or (other, *rest) not in by_setting:
                continue
            ours, theirs = (np.array(r["by_sample"][kind]) for r in (result, by_setting[other, *rest]))
            gain = sign * (ours - theirs)  # [samples, L]
            mean, low, high = statistics.mean_interval(gain.mean(axis=1).tolist())
            layers = [claims.better(*statistics.mean_interval(x.tolist())[1:]) for x in gain.T]
            what = "smaller error" if kind == "error" else "larger cosine behind W_O"
            held = f"{layers.count(claims.HOLDS)} of {len(layers)} layers hold, {layers.count(claims.FAILS)} do not"
            where = f"budget {rest[0]}, {report.MOMENTS[rest[1]]}, question {rest[2]}"
            judged.append(
                {
                    "paper": paper,
                    "claim": f"{policy} has a {what} than {other}, {where} ({held})",
                    "expects": "better",
                    "difference": mean,
                    "low": low,
                    "high": high,
                    "verdict": claims.better(low, high),
                    "sides": [float(ours.mean()), float(theirs.mean())],
                    "layers": layers,
                }
            )
    return judged


def _compare_errors(results: Sequence[dict[str, Any]], against: str) -> list[dict[str, Any]]:
    errors = lambda r: (-np.array(r["by_sample"]["error"]).mean(axis=1)).tolist()  # noqa: E731
    evicted = [r for r in results if r["budget"] is not None]  # the full cache has no error
    return report.compare(evicted, against, errors, ("question",), interval=statistics.mean_interval)


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return a table with one line per setting: means over layers, tokens and samples, and the tokens per head."""
    cells: list[tuple[str, report.Cell]] = [
        *report.labels(results),
        ("error", "{error:.3f}"),
        ("cosine", "{cosine:.3f}"),
        ("error W_O", "{output_error:.3f}"),
        ("cosine W_O", "{output_cosine:.3f}"),
        ("KL", "{kl:.3f}"),
        ("95%", "{kl_interval[0]:.3f}..{kl_interval[1]:.3f}"),
        ("tokens", lambda r: f"{np.min(r['retained']['mean']):.0f}..{np.max(r['retained']['mean']):.0f}"),
    ]
    note = "error: |full - evicted| / |full| of the attention output, mean over layers; W_O: after the projection; "
    return report.table(results, cells, left=4, notes=[f"{note}tokens: the smallest and the largest mean of a head"])


def _layer_lines(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw error and cosine over layers, before and after W_O: one line per policy, panels per budget and moment."""
    plt = report.pyplot()
    groups = list(dict.fromkeys(map(report.group, results)))
    if len(groups) > 1:
        groups = [group for group in groups if group[2] is not None]  # the full cache has no budget, and no error
    panels = [
        (f"{place}{name}", f"{title}{behind}")
        for place, behind in (("", ""), ("output_", " behind W_O"))
        for name, title in (("error", "relative error"), ("cosine", "cosine"))
    ]
    figure, axes = plt.subplots(
        len(groups), len(panels), figsize=(13.5, 1.4 + 2.9 * len(groups)), squeeze=False, layout="constrained"
    )
    handles: dict[str, Any] = {}
    policies = [name for name in dict.fromkeys(r["policy"] for r in results) if name not in (RECENCY, "full")]
    bases = list(dict.fromkeys(map(report.without_caote, policies)))  # one colour each, dashed with CAOTE
    for number, group in enumerate(groups):
        for axis, (name, title) in zip(axes[number], panels, strict=True):
            for r in (r for r in results if report.group(r) == group):
                layer = [x["layer"] + 1 for x in r["layers"]]
                if r["policy"] in policies:
                    index = bases.index(report.without_caote(r["policy"]))
                    dashes = "-" if r["policy"] in bases else "--"
                    style = {"color": report.colour(index), "marker": "osv^D"[index % 5], "linestyle": dashes}
                else:
                    style = {"color": "#999999", "marker": "", "linestyle": "-"}
                (line,) = axis.plot(layer, [x[name] for x in r["layers"]], linewidth=1.5, markersize=4, **style)
                bounds = np.array([x[f"{name}_interval"] for x in r["layers"]]).T
                axis.fill_between(layer, *bounds, color=style["color"], alpha=0.12, linewidth=0)
                handles.setdefault("recency" if r["policy"] == RECENCY else r["policy"], line)
            if number == 0:
                axis.set_title(title, fontsize=9.5)
            if number == len(groups) - 1:
                axis.set_xlabel("layer", fontsize=8.5)
            layers = len(results[0]["layers"])
            axis.set_xticks(range(1, layers + 1) if layers <= 12 else [1, *range(5, layers + 1, 5)])
            report.plain(axis)
        axes[number, 0].set_ylabel(report.moment(group), fontsize=8)
    report.legend(figure, handles)
    figure.suptitle("Attention outputs of the answer's tokens: evicted against full cache", fontsize=12)
    report.save(figure, path)


def _head_map(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the tokens that each layer and head retains: the mean over samples as colour, mean and range as numbers."""
    plt = report.pyplot()
    shown = [r for r in results if r["budget"] is not None and np.ptp(r["retained"]["mean"]) > 0] or list(results)
    layers, heads = np.array(shown[0]["retained"]["mean"]).shape
    down = -(-len(shown) // 4)
    across = -(-len(shown) // down)
    figure, axes = plt.subplots(
        down, across, figsize=(0.9 + across * max(2.5, 0.9 + 0.95 * heads), 0.9 + down * (0.9 + 0.36 * layers)),
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for axis in axes.flat[len(shown) :]:
        axis.set_axis_off()
    for axis, r in zip(axes.flat, shown, strict=False):
        held = {name: np.array(r["retained"][name]) for name in ("mean", "smallest", "largest")}
        image = axis.imshow(held["mean"], cmap="viridis", aspect="auto", vmin=0, vmax=max(held["mean"].max(), 1))
        if layers * heads <= 96:  # numbers are readable
            for (layer, head), mean in np.ndenumerate(held["mean"]):
                axis.text(
                    head, layer, f"{mean:.0f}\n{held['smallest'][layer, head]}..{held['largest'][layer, head]}",
                    ha="center", va="center", fontsize=6, linespacing=0.95,
                    color="black" if mean > 0.6 * held["mean"].max() else "white",
                )  # fmt: skip
        axis.set_title(f"{r['policy'].replace('@', chr(10) + '@')}, {report.moment(report.group(r))}", fontsize=7.5)
        axis.set_xticks(range(heads), [str(head + 1) for head in range(heads)], fontsize=7)
        axis.set_yticks(range(layers), [str(layer + 1) for layer in range(layers)], fontsize=7)
        axis.set_xlabel("KV head", fontsize=7.5)
        report.frameless(axis)
        figure.colorbar(image, ax=axis, shrink=0.8, aspect=20).ax.tick_params(labelsize=6)
    for axis in axes[:, 0]:
        axis.set_ylabel("layer", fontsize=7.5)
    figure.suptitle("Tokens retained by each head: mean, smallest..largest over samples", fontsize=11)
    report.save(figure, path)


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("--policies", default=",".join(POLICIES), help="several by comma; 'full' keeps all tokens")
    flags.add_argument("--lengths", default="512", help="tokens per prompt; several by comma, measured together")
    flags.add_argument("--samples", type=count, default=20, help="samples per length, at depths drawn at random")
    flags.add_argument("--facts", type=count, default=10, help="facts per text; one of them is asked for")
    add_shared_flags(flags, "budgets", "questions", "moments", "against", "networks", budgets="0.1", moments="prompt")
    command_line.add_model_flags(flags, batch=20)
    flags.add_argument("--heads", type=Path, help="write the heat map of retained tokens per head here")


def command(flags: argparse.Namespace) -> None:
    """Run the evaluation: check, measure, print the table, write JSON and pictures."""
    settings = run_settings.make_settings(flags)
    run_settings.refuse_selections(settings, "python -m papers predictor accuracy measures what a selection finds")
    lengths = command_line.check_sizes(flags)
    report.check_outputs(flags.json, flags.plot, flags.heads)
    model, tokenizer = command_line.load(flags)
    samples = [
        tasks.needle(flags.seed + 1_000 * index + sample, tokenizer, length, None, flags.facts)
        for index, length in enumerate(lengths)
        for sample in range(flags.samples)
    ]
    aids = evaluator.load_aids(flags, settings, model, tokenizer)
    most = max(len(sample.answer_tokens) for sample in samples)
    feed = Feed(flags.block, flags.batch, aids)
    for setting in settings:
        answering.check_answers(model, samples, setting, new_tokens=most, feed=feed)
    results = []
    with commands.progress_bar("sample", total=len(samples) * len(settings)) as progress:
        for question in dict.fromkeys(setting.question for setting in settings):
            chosen = [setting for setting in settings if setting.question == question]
            results += measure(model, samples, chosen, feed=feed, progress=progress)
        progress.set_description("done")
    compared, errors = compare(results), _compare_errors(results, run_settings.baseline(flags))
    note = "\ndifference of the mean relative errors; positive: closer to the full cache" if errors else ""
    told = "{paper}: {claim}: {verdict} ({difference:+.3f} [{low:+.3f}, {high:+.3f}])"
    judged = "\n".join(map(told.format_map, compared))
    report.show(table(results), report.comparison_table(errors) + note, judged)
    figures = {
        "evaluation": "fidelity",
        "title": "Attention outputs: how close to the full cache's",
        "settings": command_line.settings(flags),
        "samples": len(samples),
        "claims_measure": "the layers' mean relative error or cosine (positive: closer to the full cache)",
        "claims": compared,
        "comparisons": errors,
        "results": results,
    }
    digests = evaluator.digests(model, tokenizer, aids.networks)
    report.write(flags, figures, digests, lambda path: _layer_lines(results, path))
    if flags.heads is not None:
        _head_map(results, flags.heads)
        print(f"picture: {flags.heads}")


def _summary(setting: Setting, found: Sequence[dict[str, np.ndarray]]) -> dict[str, Any]:
    whole = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
    layers = []
    for layer in range(whole["error"].shape[1]):
        told: dict[str, Any] = {"layer": layer}
        for name in MEASURES:
            told[name], low, high = statistics.mean_interval(whole[name][:, layer].tolist())
            told[f"{name}_interval"] = [low, high]
        layers.append(told)
    kl, low, high = statistics.mean_interval(whole["kl"].tolist())
    retained = whole["retained"]
    return {
        **setting.fields(),
        "samples": len(whole["kl"]),
        **{name: float(whole[name].mean()) for name in MEASURES},
        "kl": kl,
        "kl_interval": [low, high],
        "layers": layers,
        "retained": {
            "mean": retained.mean(axis=0).round(2).tolist(),
            "smallest": retained.min(axis=0).tolist(),
            "largest": retained.max(axis=0).tolist(),
        },
        "by_sample": {name: whole[name].round(6).tolist() for name in (*MEASURES, "kl")},
    }


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True))
