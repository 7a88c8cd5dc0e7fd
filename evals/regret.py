"""Regret: how far the tokens that a policy keeps are from the best that could have been kept, in hindsight.

A needle's prompt is read, and a policy keeps a budget of its tokens: of the whole prompt, so that the answer's tokens
are the future, or of the text before the question, so that the question belongs to the future, too. The attention
inputs of the future tokens come from a dense pass of the model over prompt and answer. For each layer and KV head,
:mod:`evals.best_tokens` finds the tokens that keep the future outputs best.

A head's error is the squared change of its query heads' outputs behind W_O, each alone, summed over the future tokens:
W_O weighs heads as the layer does, and what two heads' changes happen to cancel is no merit of a choice. The regret of
a layer is the error of its heads less the best found, relative to the squared distance of their outputs from the mean
value, which is what attention that chooses nothing would give. A policy's one number is the mean over layers and
prompts. The best keeps the budget in every head; a head to which a policy gave more may be below it.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int
from tqdm import tqdm

import kvjax
import models
from evals import (
    answering,
    best_tokens,
    command_line,
    evaluator,
    report,
    results,
    run_settings,
    simulator,
    statistics,
    tasks,
    view,
)
from kvjax._src.chains import policy_of
from kvjax._src.former_names import renamed_document
from models import commands, files
from models.commands.programs import make_room
from models.commands.shared_flags import add_shared_flags, at_least, count
from models.config import check_alike
from models.decoder import output_of_heads

BEST = "best"
AFTER = 16  # future tokens of an exact case
POLICIES = "h2o,tova,snapkv,snapkv+caote,laprox,key_norm"
EXAMPLES = """examples:
  python -m evals regret --policies snapkv,snapkv+caote --budget 0.25 --samples 4 --plot regret.png
  python -m evals regret --model smollm2 --recall docs/results/once.json --out runs/regret --json regret.json
"""


class Heads(NamedTuple):
    """Hold the cases of some layers' KV heads, all of one size.

    ``cases`` are stacked over the heads, ``[H, ...]``; ``tokens`` are the prompt's. What is beyond its tokens and
    queries weighs nothing.
    """

    cases: best_tokens.Case
    tokens: int

    @property
    def energy(self) -> Float[np.ndarray, "H"]:
        """Return the squared distance of each head's outputs from the mean value."""
        return np.sum(np.square(self.cases.outputs, dtype=np.float64), axis=(1, 2, 3))

    def of(self, head: int) -> best_tokens.Case:
        return best_tokens.Case(*(x[head] for x in self.cases))


def make_heads(
    logits: Float[np.ndarray, "H G T A"],
    value: Float[np.ndarray, "H A D"],
    size: int,
    projection: Float[np.ndarray, "H G D F"] | None,
    *,
    width: int,
    queries: int,
) -> Heads:
    """Make the cases of several heads, in float64, and fill them up to ``width`` tokens and so many ``queries``."""
    with jax.enable_x64(True):
        made = []
        for head in range(len(logits)):
            after = None if projection is None else jnp.asarray(projection[head], jnp.float64)
            own_logits, own_value = jnp.asarray(logits[head], jnp.float64), jnp.asarray(value[head], jnp.float64)
            weights, values, outputs = best_tokens.make_case(own_logits, own_value, size, after)
            more, longer = queries - outputs.shape[1], width - size
            made.append(
                best_tokens.Case(
                    jnp.pad(weights, ((0, 0), (0, more), (0, longer))),
                    jnp.pad(values, ((0, 0), (0, longer), (0, 0))),
                    jnp.pad(outputs, ((0, 0), (0, more), (0, 0))),
                )
            )
        return Heads(jax.tree.map(lambda *parts: np.stack(parts), *made), size)


@functools.partial(jax.jit, static_argnames="budget")
def _search(cases: best_tokens.Case, budget: int, starts: Bool[jax.Array, "H n S"]) -> Bool[jax.Array, "H S"]:
    return jax.lax.map(lambda head: best_tokens.best(head[0], budget, head[1]), (cases, starts))


@jax.jit
def _errors(cases: best_tokens.Case, kept: Bool[jax.Array, "n H G S"]) -> Float[jax.Array, "n H"]:
    return jax.lax.map(lambda one: jax.vmap(best_tokens.error)(cases, one), kept)


def errors(heads: Heads, kept: Bool[np.ndarray, "n H G S"]) -> Float[np.ndarray, "n H"]:
    """Return each head's error for each of several choices of tokens, in float64."""
    with jax.enable_x64(True):
        return np.asarray(_errors(heads.cases, kept))


def search(heads: Heads, budget: int, tried: Bool[np.ndarray, "n H G S"]) -> Bool[np.ndarray, "H S"]:
    """Return the best tokens found for each head; the best of the choices ``tried`` that fit is one of the starts."""
    found = errors(heads, tried)
    fits = (tried.sum(-1) <= budget).all(-1) & (tried == tried[:, :, :1]).all((-1, -2))
    found = np.where(fits, found, np.inf)
    starts = tried[np.argmin(found, axis=0), np.arange(tried.shape[1]), 0]
    starts = np.where(np.isfinite(found.min(axis=0))[:, None], starts, np.arange(starts.shape[-1]) < budget)
    cases = jax.tree.map(lambda x: np.asarray(x, np.float32), heads.cases)
    return np.asarray(_search(cases, budget, starts[:, None]))


def held_tokens(
    model: models.Decoder,
    tokens: Int[np.ndarray, "T"],
    settings: Sequence[run_settings.Setting],
    layers: Sequence[int],
    *,
    width: int,
    block: int = 128,
    aids: answering.Aids = answering.NO_AIDS,
    progress: tqdm = evaluator.QUIET,
) -> dict[run_settings.Setting, Bool[np.ndarray, "n N width"]]:
    """Return which tokens of a text the query heads of some layers can still read, under each setting.

    Settings that evict once share the text's prefill.
    """
    found: dict[run_settings.Setting, Any] = {}
    caches: Iterable[models.Prefilled]
    fed, lengths = answering.padded([tokens.tolist()], width), np.array([len(tokens)], np.int32)
    for together in run_settings.sharing(settings):
        if len(together) == 1:
            (setting,) = together
            caches = [
                models.prefill(
                    model, fed, lengths=lengths, policy=aids.policy(setting), budget=setting.budget, block=block,
                    when=setting.when, networks=aids.of(setting),
                )
            ]  # fmt: skip
        else:
            chosen = [(aids.policy(setting), setting.budget) for setting in together]
            caches = models.prefill_each(
                model, fed, lengths=lengths, policies=chosen, when=together[0].when, block=block,
                networks=aids.networks,
            )  # fmt: skip
        for setting, prefilled in zip(together, caches, strict=True):
            progress.set_description(setting.title())
            kept = view.held_tokens(prefilled.cache, width)[list(layers)]
            found[setting] = np.repeat(kept, model.config.num_heads // kept.shape[1], axis=1)
            make_room()
            progress.update(1)
    return found


def projections(model: models.Decoder, target: str) -> Float[np.ndarray, "L N D F"] | None:
    """Return a matrix with the Gram of each query head's block of W_O; None where outputs are measured before it."""
    if target == "value":
        return None
    each = lambda weight: kvjax.output_projection(weight, len(weight), ["factor"]).factor  # noqa: E731
    return np.asarray(jnp.stack([jnp.asarray(each(weight)) for weight in output_of_heads(model)]))[:, :, 0]


class _Run:
    """Hold what all prompts of a run share."""

    def __init__(self, flags, model, tokenizer, settings, aids, store):
        check_alike(model.config, "what is measured of the layers is one array")
        self.flags, self.model, self.settings, self.aids, self.store = flags, model, settings, aids, store
        last = len(model.config.cached_layers) - 1
        self.layers = sorted({round(x) for x in np.linspace(0, last, min(flags.layers, last + 1))})
        self.samples = [
            tasks.needle(flags.seed + sample, tokenizer, flags.length, None, flags.facts)
            for sample in range(flags.samples)
        ]
        self.queries = max(len(s.tokens) + len(s.answer_tokens) - s.context_end for s in self.samples)
        self.projection = projections(model, flags.target)

    def measure(self, progress: tqdm) -> None:
        """Measure each prompt that the store does not hold yet."""
        by_question: dict[str, list[run_settings.Setting]] = {}
        for setting in self.settings:
            by_question.setdefault(setting.question, []).append(setting)
        for number, sample in enumerate(self.samples):
            missing = [q for q in by_question if not self.store.holds(self.record(q, BEST, number, 0.0))]
            progress.update(sum(len(by_question[q]) for q in by_question if q not in missing))
            if not missing:
                continue
            read = self.read(sample)
            for question in missing:
                self.one(question, by_question[question], number, sample, read, progress)

    def read(self, sample: tasks.Sample) -> tuple[np.ndarray, np.ndarray]:
        """Return the logits of an exact case's queries and of the future's, and the values: per layer and KV head."""
        exact = self.flags.exact
        whole = np.array([*sample.tokens, *sample.answer_tokens])
        future = np.arange(sample.context_end, len(whole))
        queries = np.concatenate([np.arange(exact, exact + AFTER), future, np.full(self.queries - len(future), -1)])
        tokens = answering.padded([whole.tolist()], self.flags.length + self.queries)
        found, layers = simulator.attention_logits(self.model, tokens, queries), np.array(self.layers)
        logits, value = (np.asarray(x[layers, 0]) for x in found)  # [n, N, R, T], [n, K, T, D]
        n, _, _, T = logits.shape
        logits = logits.reshape(n * value.shape[1], -1, len(queries), T)
        return logits, value.reshape(-1, *value.shape[2:])

    def heads(self, read, queries: slice, size: int, end: int, width: int) -> Heads:
        logits, value = read
        G = logits.shape[1]
        projection = None
        if self.projection is not None:
            projection = self.projection[self.layers].reshape(len(logits), G, *self.projection.shape[2:])
        most = max(queries.stop - queries.start, self.queries)
        return make_heads(logits[:, :, queries, :end], value[:, :end], size, projection, width=width, queries=most)

    def one(self, question, settings, number, sample, read, progress) -> None:
        """Measure one prompt under all settings of a question."""
        flags, width = self.flags, self.flags.length
        size = sample.context_end if question == "unknown" else len(sample.tokens)
        end = len(sample.tokens) + len(sample.answer_tokens)
        queries = slice(AFTER + size - sample.context_end, AFTER + end - sample.context_end)
        heads = self.heads(read, queries, size, end, width)
        held = held_tokens(
            self.model, np.array(sample.tokens[:size]), settings, self.layers, width=width, block=flags.block,
            aids=self.aids, progress=progress,
        )  # fmt: skip
        progress.set_description("search")
        H, G = heads.cases.weights.shape[:2]
        tried = np.stack([held[setting].reshape(H, G, width) for setting in settings])
        newest = next(place for place, setting in enumerate(settings) if setting.policy == run_settings.RECENCY)
        budget = int(tried[newest].sum(-1).max())
        kept = search(heads, budget, tried)
        of_each = errors(heads, np.concatenate([tried, np.broadcast_to(kept[:, None], (1, H, G, width))]))
        energy = heads.energy
        records = [
            self.record(question, BEST, number, self.relative(of_each[-1], energy), errors=of_each[-1].tolist(),
                        energy=energy.tolist(), kept=budget,
                        mass=float(np.mean(self.mass(heads, kept[:, None], queries))),
                        **self.certified(read, heads, budget, number, question))
        ]  # fmt: skip
        for place, setting in enumerate(settings):
            regret = self.relative(of_each[place] - of_each[-1], energy)
            mass = self.mass(heads, tried[place], queries)
            records.append(
                self.record(
                    question, setting.policy, number, regret, errors=of_each[place].tolist(), mass=float(mass.mean())
                )
            )
        self.store.add([*records[1:], records[0]])  # the best is the mark of a whole prompt

    def relative(self, head_errors: np.ndarray, energy: np.ndarray) -> float:
        """Return the mean over layers of their heads' errors, relative to :attr:`Heads.energy`."""
        errors, whole = (x.reshape(len(self.layers), -1).sum(axis=1) for x in (head_errors, energy))
        return float(np.mean(errors / whole))

    def mass(self, heads: Heads, kept: np.ndarray, queries: slice) -> np.ndarray:
        """Return the mean attention of a head that still reaches tokens that stay."""
        lost = np.sum(heads.cases.weights * ~kept[..., None, :], axis=(1, 2, 3))
        return 1 - lost / (heads.cases.weights.shape[1] * (queries.stop - queries.start))

    def certified(self, read, heads: Heads, budget: int, number: int, question: str) -> dict[str, Any]:
        """Bracket the smallest error of one head per layer of the first prompt, and of exact cases."""
        flags, found = self.flags, {}
        K = len(heads.cases.weights) // len(self.layers)
        some = [layer * K + layer % K for layer in range(len(self.layers))]
        if number == 0 and flags.nodes:
            found["brackets"] = [
                self.told(heads.of(head), budget, self.layers[head // K], head % K, flags.nodes) for head in some
            ]
        if question == self.settings[0].question and flags.exact and number == 0:
            small = self.heads(read, slice(0, AFTER), flags.exact, flags.exact + AFTER, flags.exact)
            tokens = max(1, round(flags.exact * budget / heads.tokens))
            found["exact"] = [
                self.told(small.of(head), tokens, self.layers[head // K], head % K, 1_000) for head in some
            ]
        return found

    def told(self, case: best_tokens.Case, budget: int, layer: int, head: int, nodes: int) -> dict[str, Any]:
        with jax.enable_x64(True):
            searched = float(best_tokens.error(case, best_tokens.best(case, budget)))
        one = best_tokens.bracket(case, budget, nodes=nodes)
        told = {"layer": layer, "head": head, "tokens": case.weights.shape[-1], "kept": budget}
        return told | {"searched": searched, "error": one.error, "lower": one.lower, "nodes": one.nodes}

    def record(self, question: str, policy: str, number: int, score: float, **more: Any) -> dict[str, Any]:
        setting = self.settings[0]
        about = {"model": self.flags.model, "evaluation": "regret", "length": self.flags.length, "policy": policy}
        about |= {"budget": setting.budget, "when": setting.when, "question": question, "task": "needle"}
        return {**about, "sample": number, "score": score, **more}


def summarise(records: Sequence[dict[str, Any]], layers: Sequence[int]) -> list[dict[str, Any]]:
    """Return one line per policy and question: regret with its interval over prompts, overall and per layer and head.

    The line "best" has the errors of the best found, and the brackets and exact cases.
    """
    best = {(r["question"], r["sample"]): r for r in records if r["policy"] == BEST}
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        if (record["question"], record["sample"]) in best:
            grouped.setdefault((record["question"], record["policy"]), []).append(record)
    lines = []
    for (question, policy), found in grouped.items():
        found = sorted(found, key=lambda record: record["sample"])
        n, heads = len(layers), len(found[0]["errors"]) // len(layers)
        per_head = []
        for record in found:
            other = best[question, record["sample"]]
            gap = np.array(record["errors"]) - (0 if policy == BEST else np.array(other["errors"]))
            energy = np.array(other["energy"]).reshape(n, heads).sum(axis=1, keepdims=True)
            per_head.append(gap.reshape(n, heads) / energy)
        samples = np.stack(per_head)  # [samples, n, heads]
        mean, low, high = statistics.mean_interval(samples.sum(-1).mean(-1).tolist())
        spread = [
            [[round(x, 8) for x in statistics.mean_interval(samples[:, i, j].tolist())] for j in range(heads)]
            for i in range(n)
        ]
        r = {name: found[0][name] for name in ("model", "policy", "budget", "when", "question", "length")}
        r |= {"samples": len(found), "regret": mean, "low": low, "high": high}
        r |= {"mass": float(np.mean([record["mass"] for record in found]))}
        r |= {"layers": samples.sum(-1).mean(0).tolist(), "heads": spread}
        for name in ("brackets", "exact"):
            if cases := [case for record in found for case in record.get(name, [])]:
                r[name] = cases
        lines.append(r)
    return lines


def _correlations(lines: Sequence[dict[str, Any]], recall: Mapping[tuple[str, str], float]) -> list[dict[str, Any]]:
    """Correlate, over the policies of each question, recall with small regret and with the attention mass kept."""
    told = []
    for question in dict.fromkeys(r["question"] for r in lines):
        both = [r for r in lines if r["question"] == question and (question, r["policy"]) in recall]
        if len(both) > 2:
            scores = [recall[question, r["policy"]] for r in both]
            layers = -np.array([r["layers"] for r in both])
            found = {"regret": [-r["regret"] for r in both], "median": np.median(layers, axis=1).tolist()}
            found["mass"] = [r["mass"] for r in both]
            of = {name: statistics.rank_correlation(values, scores) for name, values in found.items()}
            each = [statistics.rank_correlation(values.tolist(), scores) for values in layers.T]
            told.append({"model": both[0]["model"], "question": question, "policies": len(both), **of, "layers": each})
    return told


def read_recall(path: Path, model: str, budget: float) -> dict[tuple[str, str], float]:
    """Read the recall of a study's JSON file for one model and budget, by question and policy, or raise ValueError."""
    try:
        lines = renamed_document(json.loads(files.read_text(path, "study's JSON")))["results"]
        found = {
            (r["question"], run_settings.full_name(r["policy"])): float(r["score"])
            for r in lines
            if r["model"] == model and r["budget"] == budget
        }
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{path} is no JSON file of a study; name one that `python -m evals study` wrote.") from None
    if not found:
        raise ValueError(f"{path} has no recall of {model!r} at a budget of {budget}; name another file.")
    return found


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return a table of the policies of each question, the smallest regret first; "best" shows its own error."""
    order = {question: i for i, question in enumerate(dict.fromkeys(r["question"] for r in lines))}
    shown = sorted(lines, key=lambda r: (order[r["question"]], r["policy"] != BEST, r["regret"]))
    names = report.labels(shown)
    cells = [*names, *report.figure("regret", "regret", ".5f"), ("mass", "{mass:.3f}")]
    note = (
        "regret: error less the best found, relative to the outputs' squared distance from the mean value; best: its "
        "own error; mass: the attention that reaches what is kept"
    )
    return report.table(shown, cells, left=len(names), notes=[note])


def _bracket_lines(lines: Sequence[dict[str, Any]]) -> str:
    """Say how far the search may be from the best: the certified gaps of exact and of long cases."""
    told = []
    for r in lines:
        for name in ("exact", "brackets"):
            for what, field in (("certified gap of the best found", "error"), ("of the greedy search", "searched")):
                if cases := r.get(name, []):
                    gaps = [1 - case["lower"] / case[field] if case[field] > 0 else 0.0 for case in cases]
                    told.append(
                        f"{what}, question {r['question']}, {cases[0]['kept']} of {cases[0]['tokens']} tokens, "
                        f"{len(cases)} heads: median {np.median(gaps):.1%}, at most {max(gaps):.1%}"
                    )
    return "\n".join(told)


def heat_map(lines: Sequence[dict[str, Any]], layers: Sequence[int], path: Path) -> None:
    """Draw the regret of each layer and policy as colour, a panel per question, the smallest regret on top."""
    plt = report.pyplot()
    questions = list(dict.fromkeys(r["question"] for r in lines))
    panels = [
        sorted((r for r in lines if r["question"] == q and r["policy"] != BEST), key=lambda r: r["regret"])
        for q in questions
    ]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(len(panels) * (3.4 + 0.3 * len(layers)), 1.4 + 0.2 * max(map(len, panels))),
        squeeze=False, layout="constrained",
    )  # fmt: skip
    every = np.array([value for r in lines for value in r["layers"] if value > 0])
    ends = np.log10([max(every.min(), 1e-6), max(every.max(), 2e-6)])
    for axis, question, found in zip(axes[0], questions, panels, strict=True):
        grid = np.log10(np.maximum([r["layers"] for r in found], 1e-6))
        image = axis.imshow(grid, cmap="viridis_r", vmin=ends[0], vmax=ends[1], aspect="auto")
        axis.set_xticks(range(len(layers)), [str(layer + 1) for layer in layers], fontsize=7)
        axis.set_yticks(range(len(found)), [f"{r['policy']}  {r['regret']:.4f}" for r in found], fontsize=7)
        axis.set_xlabel("layer", fontsize=8)
        axis.set_title(f"question {question}", fontsize=9)
        report.frameless(axis)
    bar = figure.colorbar(image, ax=axes, shrink=0.8, aspect=30)
    bar.set_label("log10 of the regret", fontsize=7.5)
    bar.ax.tick_params(labelsize=7)
    figure.suptitle("Error of future attention outputs beyond the best found", fontsize=11)
    report.save(figure, path)


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("--policies", help="several by comma; by default those of --recall, else a few")
    add_shared_flags(flags, "budget", "questions", budget="0.25", questions="known,unknown")
    flags.add_argument("--length", type=count, default=1024, help="tokens per prompt")
    flags.add_argument("--samples", type=count, default=3, help="prompts, at depths drawn at random")
    flags.add_argument("--facts", type=count, default=10, help="facts per text; one of them is asked for")
    flags.add_argument("--layers", type=count, default=10, help="so many layers, evenly spaced")
    flags.add_argument(
        "--target", choices=("output", "value"), default="output", help="measure outputs after W_O, or before it"
    )
    flags.add_argument(
        "--nodes", type=at_least(0), default=9, help="nodes of branch and bound, one head per layer; 0: none"
    )
    flags.add_argument("--exact", type=at_least(0), default=24, help="tokens of a case solved exactly; 0 for none")
    flags.add_argument("--recall", type=Path, help="a study's JSON file, whose recall is correlated with the regret")
    add_shared_flags(flags, "networks", "model", "block", "seed", "dtype", "json", "plot", "out", seed=100_000)


def _settings(flags: argparse.Namespace, recall: Mapping[tuple[str, str], float]) -> list[run_settings.Setting]:
    names = flags.policies
    if names is None:
        names = ",".join(dict.fromkeys(policy for _, policy in recall)) or POLICIES
    asked = argparse.Namespace(policies=names, budgets=flags.budget, when="prompt", question=flags.question)
    found = run_settings.make_settings(asked)
    run_settings.refuse_selections(found, "a selection keeps all tokens, so it has no regret")
    # What merges tokens keeps no subset of them.
    found = [s for s in found if (policy := policy_of(s.policy)) is not None and policy.merging is None]
    if len({setting.budget for setting in found}) != 1:
        raise ValueError(f"the budget is {flags.budget!r} with the policies {names!r}; give one budget, and policies.")
    return found


def command(flags: argparse.Namespace) -> None:
    """Run the evaluation: check, measure, print table, brackets and correlations, write JSON and picture."""
    if flags.length <= flags.exact + AFTER:
        raise ValueError(f"--length is {flags.length}; give at least {flags.exact + AFTER + 1}.")
    report.check_outputs(flags.json, flags.plot)
    recall = {}
    if flags.recall is not None:
        recall = read_recall(flags.recall, flags.model, commands.parse_budget(flags.budget))
    settings = _settings(flags, recall)
    store = results.Results(flags.out, "regret", command_line.decisive_flags(flags), command_line.command_text(flags))
    store.check()
    model, tokenizer = command_line.load_with_tokenizer(flags.model, dtype=flags.dtype)
    aids = evaluator.load_aids(flags, settings, model, tokenizer)
    digests = evaluator.digests(model, tokenizer, aids.networks)
    with store:
        store.check_digests({"evaluation": "regret", "model": flags.model}, digests)
        run = _Run(flags, model, tokenizer, settings, aids, store)
        with commands.progress_bar("policy", total=len(settings) * flags.samples) as progress:
            run.measure(progress)
            progress.set_description("done")
        lines = summarise(store.records, run.layers)
    correlated = _correlations([r for r in lines if r["policy"] != BEST], recall)
    told = "\n".join(
        f"rank correlation with recall, question {r['question']}, {r['policies']} policies: "
        f"{r['regret']:+.2f} for small regret (median over layers {r['median']:+.2f}, one layer alone "
        f"{min(r['layers']):+.2f} to {max(r['layers']):+.2f}), {r['mass']:+.2f} for the attention mass kept"
        for r in correlated
    )
    heads = model.config.num_kv_heads
    taken = f"{flags.samples} prompts, layers {', '.join(str(x + 1) for x in run.layers)}, {heads} KV heads in each"
    report.show(table(lines), taken, _bracket_lines(lines), told)
    figures = {
        "evaluation": "regret",
        "title": "Regret: the error of future attention outputs beyond the best that could be kept",
        "settings": command_line.settings(flags),
        "layers": run.layers,
        "correlations": correlated,
        "results": lines,
    }
    report.write(flags, figures, digests, lambda path: heat_map(lines, run.layers, path))
