"""The tables of the pages, from results: run `python docs/tables.py` whenever results have changed.

README.md and pages under docs report our results. This script writes what stands between `<!-- NAME -->` and
`<!-- end of NAME -->` in them, and the pages of studies, from docs/results; none of it is typed by hand.
`--check` only checks whether the pages are up to date.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS / "results"
sys.path.insert(0, str(DOCS.parent))

from docs import study_pages  # noqa: E402
from docs.study_pages import markdown  # noqa: E402
from evals import claims, report, statistics, studies, study, study_panels  # noqa: E402
from evals.run_settings import RECENCY, full_name  # noqa: E402
from kvjax._src import former_names  # noqa: E402
from kvjax._src.chains import LINKS  # noqa: E402
from kvjax.schedule import moments  # noqa: E402
from models import commands, files  # noqa: E402

MORE = 1.1  # times the bytes of the full cache, from which a policy saves no memory
SHOWN = 3  # policies that a line names beside the best one
STUDIES = ("once", "pooling", "budgets", "long", "fixed-memory", "slots", "ruler", "ruler-block", "beyond")
REAL = "smollm2"  # the folder of results on a real model that belong to no study


def read(name: str) -> dict[str, Any]:
    """Read a file of docs/results."""
    return former_names.renamed_document(json.loads((RESULTS / name).read_text()))


@functools.cache
def judgements() -> dict[str, list[tuple[str, Any]]]:
    """Return the claims of each study as they are judged by its file's scores, corrected for all studies' together."""
    each = {name: study.judge(studies.find(name), read(f"{name}.json")["results"]) for name in STUDIES}
    decided = iter(study.decide([judged for own in each.values() for judged in own]))
    return {name: [next(decided) for _ in own] for name, own in each.items()}


def study_of(name: str) -> str:
    """Make a study's page."""
    return study_pages.page(studies.find(name), read(f"{name}.json"), judgements()[name])


def claim_marks(rows: Sequence[str]) -> str:
    """Make the table of chosen claims of all studies."""
    return study_pages.claim_marks([(studies.find(name), own) for name, own in judgements().items()], rows)


def choice(name: str, question: str) -> str:
    """Make a table of a study: each budget's best policy, those within noise of it, recency, and the full cache.

    Where the best policy holds far more than the full cache, the best of the others follows.
    """
    found, data = studies.find(name), read(f"{name}.json")
    lines, fulls = [], {}
    for panel in study_panels.panels(found, data["results"]):
        if panel.question != question:
            continue
        form, cells = panel.form, study_panels.cells(found, data["results"], panel)
        full = fulls[form] = cells["full", None]
        for budget in sorted({budget for _, budget in cells if budget is not None}):
            own = {policy: cell for (policy, at), cell in cells.items() if at == budget}
            best, line = best_of(own, full, f"{form}, {budget:.0%}")
            lines.append(line)
            if own[best].peak > MORE * full.peak:
                fits = {policy: cell for policy, cell in own.items() if cell.peak <= MORE * full.peak}
                lines.append(best_of(fits, full, f"{form}, {budget:.0%}")[1])
    scores = ", ".join(f"{full.scores.mean():.2f} ({form})" for form, full in fulls.items())
    texts = next(iter(fulls.values())).scores.shape[1]
    text = f"From [{name}](../results/{name}.md): {texts} texts; the full cache has {scores}. {found.note}"
    head = ("model, budget", "best", "score, 95%", "recency", "as full", "held at most", "within noise")
    return f"{text}\n\n{markdown(head, lines)}"


def best_of(own: Mapping[str, study_panels.Cell], full: study_panels.Cell, where: str) -> tuple[str, tuple[str, ...]]:
    """Return the best of the policies with the most samples under a budget, and its line of such a table."""
    most = max(len(cell.samples) for cell in own.values())
    own = {policy: cell for policy, cell in own.items() if len(cell.samples) == most or policy == RECENCY}
    # Among equals the simplest comes first.
    ranked = sorted(own.items(), key=lambda item: (-item[1].scores.mean(), "@" in item[0], len(item[0])))
    ranked = [item for item in ranked if item[0] != RECENCY]
    best, cell = ranked[0]
    mean, low, high = statistics.mean_interval(cell.scores, 0, 1)
    others = [f"`{policy}`" for policy, other in ranked[1:] if within_noise(other, cell)]
    more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
    line = (
        where, f"**`{best}`**", f"{mean:.2f} [{low:.2f}, {high:.2f}]",
        f"{own[RECENCY].scores.mean():.2f}", as_full(cell, full),
        f"{cell.peak:.0f} of {full.peak:.0f} MiB", ", ".join(others[:SHOWN]) + more or "none",
    )  # fmt: skip
    return best, line


def within_noise(cell: study_panels.Cell, best: study_panels.Cell) -> bool:
    """Return whether ``best`` is not clearly better than ``cell`` on the same samples."""
    return statistics.paired_interval(best.less(cell))[1] <= 0


def as_full(cell: study_panels.Cell, full: study_panels.Cell) -> str:
    """Return whether a cell is not worse than the full cache by more than the margin of claims, on the same samples."""
    _, low, high = statistics.paired_interval(cell.less(full))
    return "yes" if low > -claims.MARGIN else "no" if high < -claims.MARGIN else "not shown"


README_LINES = (
    ("fixed-memory", "base", "unknown", 0.25), ("fixed-memory", "adapted", "unknown", 0.25),
    ("fixed-memory", "adapted", "unknown", 0.1), ("once", "adapted", "unknown", 0.25),
    ("once", "base", "known", 0.25), ("once", "adapted", "known", 0.25),
)  # fmt: skip
README_COLUMNS = {
    "newest tokens": ("recency",), "SnapKV": ("snapkv(kernel=7)", "snapkv"),
    "SnapKV + CAOTE": ("snapkv(kernel=7)+caote", "snapkv+caote"), "LaProx": ("laprox",),
    "KVzip": ("kvzip",), "KVgrad": ("kvgrad",),
    "the gate": ("gate",),
}  # fmt: skip


def readme() -> str:
    """Make README's table: a line per study, question and budget, a column per method, and the bytes held at most."""
    heads = ("model, question, evicted, budget", "full cache", *README_COLUMNS, "held at most")
    lines = []
    for name, form, question, budget in README_LINES:
        found, data = studies.find(name), read(f"{name}.json")
        cells = study_panels.cells(found, data["results"], study_panels.Panel(form, question))
        if not cells:
            continue
        full = cells["full", None]
        cells = {key: cell for key, cell in cells.items() if len(cell.samples) == len(full.samples)}
        of_columns = ([cells.get((full_name(name), budget)) for name in names] for names in README_COLUMNS.values())
        own = [next(filter(None, found), None) for found in of_columns]
        most = max(cell.scores.mean() for cell in own if cell is not None)
        held = [cell.peak for cell in own if cell is not None]
        between = " to ".join(dict.fromkeys(f"{most:.0f}" for most in (min(held), max(held))))
        when = report.MOMENTS[found.content["when"]]
        line = [f"{form}, {question}, {when}, {budget:.0%}", share(full, 0)]
        line += ["-" if cell is None else share(cell, most) for cell in own]
        lines.append([*line, f"{between} of {full.peak:.0f} MiB"])
    return markdown(heads, lines)


def share(cell: study_panels.Cell, most: float) -> str:
    """Return a mean score with its interval, bold if it is ``most``."""
    mean, low, high = statistics.mean_interval(cell.scores, 0, 1)
    text = f"**{mean:.2f}**" if mean == most else f"{mean:.2f}"
    return f"{text} [{low:.2f}, {high:.2f}]"


def selections(chosen: Sequence[str]) -> str:
    """Make the table of some selections without eviction: perplexity and co-reference by the tokens left out."""
    perplexity, coref = read("perplexity.json")["results"], read("coref.json")["results"]
    shares = sorted({r["sparsity"] for r in perplexity if r["sparsity"]} & {r["sparsity"] for r in coref})
    heads = [f"{what}, {1 - share:.0%} read" for what in ("perplexity", "co-reference") for share in shares]
    lines = []
    for name in chosen:
        both = [[r for r in results if r["select"].split("(")[0] == name] for results in (perplexity, coref)]
        labels = dict.fromkeys(f"`{r['select']}`" for own in both for r in own)
        cells = [
            next((format(r[field], form) for r in own if r["sparsity"] == share), "")
            for own, field, form in zip(both, ("increase", "accuracy"), ("+.1%", ".2f"), strict=True)
            for share in shares
        ]
        lines.append([", then ".join(labels), *cells])
    full = next(r["accuracy"] for r in coref if r["select"] == "full")
    text = (
        "From [perplexity.json](../results/perplexity.json) (increase over all tokens) and "
        f"[coref.json](../results/coref.json) (names found; all tokens: {full:.2f})."
    )
    return f"{text}\n\n{markdown(['read', *heads], lines)}"


FILTERS, HEADS = (f"file='docs/results/{REAL}/{name}.npy'" for name in ("q-filters", "heads"))
CALIBRATED_POLICIES = {
    "recency": RECENCY, "streaming": "streaming", "key_norm": "key_norm", "q_filters": f"q_filters({FILTERS})",
    "snapkv, kernel 13": "snapkv(kernel=13)", "snapkv @adakv": "snapkv(kernel=13)@adakv",
    "snapkv @duo": f"snapkv(kernel=13)@duo({HEADS},sinks=4,recent=0.25)",
    "snapkv @headkv": f"snapkv(kernel=13)@headkv({HEADS})",
    "snapkv + caote @headkv": f"snapkv(kernel=13)+caote@headkv({HEADS})",
}  # fmt: skip


def calibration() -> str:
    """Make the table of needles on SmolLM2 under methods that measure the model, the best of each column bold."""
    data = read(f"{REAL}/calibrated.json")
    recall = {(r["policy"], r["share"], r["question"]): r["recall"] for r in data["results"]}
    shares = sorted({share for _, share, _ in recall if share is not None})
    settings = [(share, question) for question in ("known", "unknown") for share in shares]
    most = {s: max(recall[policy, *s] for policy in CALIBRATED_POLICIES.values()) for s in settings}
    lines = []
    for name, policy in CALIBRATED_POLICIES.items():
        found = [(recall[policy, *s], most[s]) for s in settings]
        lines.append([name, *(f"**{x:.2f}**" if x == best else f"{x:.2f}" for x, best in found)])
    table = markdown(["policy", *(f"{share:.0%}, {question}" for share, question in settings)], lines)
    full = recall["full", None, "known"]
    note = f"{data['samples']} prompts of {data['settings']['length']} tokens; the full cache has {full:.2f}."
    return f"{table}\n\n{note}"


def eight_bits() -> str:
    """Make the table of recall and bytes on SmolLM2 by question, budget and dtype; "-" where none was run."""
    data = read(f"{REAL}/eight-bits.json")
    given = [r for r in data["results"] if r["cache_dtype"]]
    cells: dict[Any, dict[str, str]] = {}
    for r in sorted(given, key=lambda r: (r["question"], r["budget"] or float("inf"))):
        own = cells.setdefault(f"{r['budget'] or 'all'}, {r['question']}", {})
        own[r["cache_dtype"]] = f"{r['recall']:.2f}, {r['cache_bytes'] / 2**20:.2f} MiB"
    dtypes = list(dict.fromkeys(r["cache_dtype"] for r in given))
    lines = [[name, *(own.get(dtype, "-") for dtype in dtypes)] for name, own in cells.items()]
    policy = next(r["policy"] for r in given if r["budget"])
    note = f"{data['samples']} prompts of {data['settings']['length']} tokens under `{policy}`."
    return f"{markdown(['slots per head, question', *dtypes], lines)}\n\n{note}"


def found_share(r: Mapping[str, Any]) -> float:
    """Return the share of the needles that were found; older files call it recall."""
    return r["score"] if "score" in r else r["recall"]


def better_with_caote(comparisons: Iterable[Mapping[str, Any]]) -> set[tuple[str, Any, str]]:
    """Return where a policy is better at every length than without CAOTE, by policy, budget and moment."""
    verdicts: dict[Any, set[str]] = {}  # of each length; older files compare the lengths together
    for c in comparisons:
        if c["against"] == report.without_caote(c["policy"]):
            verdicts.setdefault((c["policy"], c["budget"], c["when"]), set()).add(c["better"])
    return {setting for setting, found in verdicts.items() if found == {"yes"}}


def needles() -> str:
    """Make the table of needles on the embedded model, bold where CAOTE is better than the same policy without it.

    Shares are means over the lengths, and bold ones are better at each length.
    """
    data = read("needle.json")
    alone = "+protect(recent=0)"
    columns = {"recency": RECENCY} | {
        "h2o": "h2o", "h2o + caote": "h2o+caote", "h2o, none protected": f"h2o{alone}",
        "the same + caote": f"h2o+caote{alone}", "tova": "tova", "tova + caote": "tova+caote",
        "snapkv": "snapkv", "snapkv + caote": "snapkv+caote",
    }  # fmt: skip
    of_lengths: dict[Any, list[float]] = {}
    for r in data["results"]:
        of_lengths.setdefault((r["policy"], r["budget"], r["when"]), []).append(found_share(r))
    recall = {setting: sum(found) / len(found) for setting, found in of_lengths.items()}
    better = better_with_caote(data["comparisons"])
    lines = []
    for when, named in (("block", "after every block"), ("prompt", "once after the prompt")):
        for budget in sorted({b for _, b, w in recall if b is not None and w == when}):
            keys = [(policy, budget, when) for policy in columns.values()]
            cells = [f"**{recall[key]:.2f}**" if key in better else f"{recall[key]:.2f}" for key in keys]
            lines.append([f"{budget}, {named}", *cells])
    return markdown(["budget", *columns], lines)


NAMES = {"rolling_snapkv": "SnapKV, token by token", "h2o+protect(recent=0)": "H2O's sums, token by token",
         "quest": "quest, page 16", "quest(page_size=4)": "quest, page 4",
         "two_levels": "two levels, 20% of the pages",
         "two_levels(pages=0.4)": "two levels, 40% of the pages",
         "two_levels(by='max')": "two levels, 20%, by the largest logit"}  # fmt: skip


def label(select: str) -> str:
    """Return the pages' name of a selection."""
    return NAMES.get(select, select.replace("_", " "))


def predictions(file: str) -> str:
    """Make the table of how well each source predicts which tokens the heads attend to."""
    results = sorted(read(file)["results"], key=lambda r: -r["hit_rate"])
    lines = []
    for r in results:
        form = "**{hit_rate:.3f}**" if r is results[0] else "{hit_rate:.3f}"
        lines.append([label(r["select"]), *(f.format(**r) for f in (form, "{token_accuracy:.3f}", "{mass:.3f}"))])
    return markdown(("source", "hit rate, all queries", "last query (the paper's accuracy)", "attention held"), lines)


VARIANTS = {"mixed": "both texts, layer 0's output", "attention": "both texts, attention's input",
            "prose": "the Bible alone", "code": "Python's documentation alone"}  # fmt: skip
VARIED_ON = {"king-james-bible": "Bible, held out", "python-doc": "Python, held out", "debian-handbook": "handbook"}


def variants(folder: str) -> str:
    """Make the table of predictors by what they were trained on and what they read, on three texts."""
    lines = []
    form = "{hit_rate:.3f} [{hit_rate_interval[0]:.3f}, {hit_rate_interval[1]:.3f}], {token_accuracy:.3f}"
    for name, title in VARIANTS.items():
        found = (read(f"{folder}/{name}-{text}.json")["results"][0] for text in VARIED_ON)
        lines.append([title, *map(form.format_map, found)])
    return markdown(["trained on, reads", *VARIED_ON.values()], lines)


def tuning() -> str:
    """Make the table of fine-tuning on prompts with answers: held-out loss, and needles found, with each cache."""
    runs = {"trained under the policy": "finetune-answers", "trained with the full cache": "finetune-answers-control"}
    losses = {title: read(f"{REAL}/{name}.json") for title, name in runs.items()}
    first = losses["trained under the policy"]
    policy, share = first["settings"]["policy"], first["settings"]["budget"]
    head = ["", *(f"{what}, {of}" for what in ("loss", "found") for of in ("full cache", f"`{policy}`, {share:g}"))]

    def found(file: str) -> list[str]:
        data = read(f"{REAL}/{file}.json")
        rates = [next(r for r in data["results"] if r["question"] == "known" and fits(r)) for fits in (whole, evicted)]
        return [f"{found_share(r):.2f} [{r['low']:.2f}, {r['high']:.2f}]" for r in rates]

    whole = lambda r: r["policy"] == "full"  # noqa: E731
    evicted = lambda r: r["policy"] == policy and r["budget"] in (share, round(share * 512))  # noqa: E731
    loss = lambda when, of: [f"{of[name][when]:.3f}" for name in ("full", policy)]  # noqa: E731
    lines = [("before", *loss("before", first["held_out_loss"]), *found("needle-before"))]
    for title, data in losses.items():
        file = runs[title].replace("finetune", "needle")
        lines.append((title, *loss("after", data["held_out_loss"]), *found(file)))
    return markdown(head, lines)


def by_sparsity(results: Sequence[dict[str, Any]], cell: Callable[[dict[str, Any]], str], rank: str) -> str:
    """Make a table of selections by sparsity, in the order of ``rank`` at the middle sparsity."""
    shares = sorted({r["sparsity"] for r in results if r["sparsity"]})
    found = {(r["select"], r["sparsity"]): r for r in results}
    middle = shares[len(shares) // 2]
    order = sorted((found[select, share][rank], select) for select, share in found if share == middle)
    lines = [[label(select), *(cell(found[select, share]) for share in shares)] for _, select in order]
    return markdown(["selection", *(f"{share:.0%}" for share in shares)], lines)


def compared(data: Mapping[str, Any], sparsity: float) -> str:
    """Return the predictor less each other selection at a sparsity, with intervals."""
    right = {
        (r["select"], r["sparsity"]): np.array(r["correct"]) for r in data["results"] if r.get("task", "all") == "all"
    }
    told = []
    for c in (c for c in data["comparisons"] if c["sparsity"] == sparsity):
        other = None if c["against"] == "full" else sparsity
        mean, low, high = statistics.paired_interval(right[c["select"], sparsity] - right[c["against"], other])
        told.append(f"{label(c['against'])} {mean:+.2f} [{low:+.2f}, {high:+.2f}]")
    return "; ".join(told)


def perplexities(file: str) -> str:
    """Make the table of perplexity by sparsity."""
    data = read(file)
    dense = next(r["perplexity"] for r in data["results"] if r["select"] == "full")
    text = (
        f"[{Path(file).name}]({file}): held-out text, {data['chunks']} chunks of {data['settings']['chunk']} "
        f"tokens; increase over the dense model's {dense:.1f}."
    )
    return f"{text}\n\n{by_sparsity(data['results'], lambda r: f'{r["increase"]:+.1%}', 'increase')}"


def names(file: str, generated: str | None = None) -> str:
    """Make the table of co-reference by sparsity, and compare the predictor with each other on the same samples."""
    data = read(file)
    cell = lambda r: f"{r['accuracy']:.2f} / {r['coverage']:.2f}"  # noqa: E731
    full = next(r for r in data["results"] if r["select"] == "full")
    lines = [r | {"worse": (-r["accuracy"], -r["coverage"])} for r in data["results"] if r["select"] != "full"]
    width = max((r["high"] - r["low"]) / 2 for r in data["results"])
    text = (
        f"[{Path(file).name}]({file}): {data['samples']} samples, teacher-forced; accuracy (whole name) / coverage "
        f"(its tokens). All tokens: {cell(full)}.\n\n{by_sparsity(lines, cell, 'worse')}\n\n"
        f"Half-widths of the 95% intervals are at most {width:.2f}. The predictor less each other, on the same samples "
        f"at 50%: {compared(data, 0.5)}."
    )
    if generated is None:
        return text
    said = [f"{label(r['select'])} {r['accuracy']:.2f}" for r in read(generated)["results"]]
    return (
        f"{text}\n\nGenerated instead of teacher-forced ([{generated}]({generated}), `--mode generate`, 50%; the "
        f"prompt is dense under sources, and evicted from under policies): {', '.join(said)}."
    )


def choice_tasks(file: str) -> str:
    """Make the table of choice tasks under selections, and compare the predictor with each other on all samples."""
    data = read(file)
    tasks = list(dict.fromkeys(r["task"] for r in data["results"]))
    found: dict[Any, dict[str, dict[str, Any]]] = {}
    for r in data["results"]:
        found.setdefault((r["select"], r["sparsity"]), {})[r["task"]] = r
    order = sorted(found.values(), key=lambda own: (own["all"]["sparsity"] or 0, -own["all"]["accuracy"]))
    lines = []
    for own in order:
        whole = own["all"]
        reads = "everything" if whole["sparsity"] is None else f"{label(whole['select'])}, {1 - whole['sparsity']:.0%}"
        cells = [f"{own[task]['accuracy']:.2f}" for task in tasks]
        lines.append([reads, *cells, f"[{whole['low']:.2f}, {whole['high']:.2f}]"])
    sparsities = sorted({c["sparsity"] for c in data["comparisons"]})
    sides = [f"- {sparsity:.0%} left out: {compared(data, sparsity)}" for sparsity in sparsities]
    return (
        f"[{Path(file).name}]({file}): {len(order[0]['all']['correct'])} samples of {data['settings']['chunk']} "
        "tokens; by chance 0.25, of section 0.50.\n\n"
        + markdown(["reads", *tasks, "95%, all"], lines)
        + "\n\nThe predictor less each other, on the same samples:\n\n"
        + "\n".join(sides)
    )


def decode_steps() -> str:
    """Make the table of the time of decode steps that read what the predictor foresees."""
    data = read("selection.json")
    found: dict[tuple[str, float | None], dict[int, dict[str, Any]]] = {}
    for line in data["results"]:
        found.setdefault((line["step"], line["share"]), {})[line["context"]] = line
    contexts = sorted(found["dense", None])
    lines = []
    for (step, share), own in found.items():
        form = "{milliseconds:.1f} ms" + ("" if step == "dense" else " ({ratio:.2f})")
        cells = [form.format_map(own[context]) for context in contexts]
        reads = "all" if step == "dense" else "its own" if share is None else f"{share:.0%}"
        lines.append([STEPS.get(step, step), reads, *cells])
    bytes_of = [r for r in data["results"] if r["share"] == 0.5 and r["context"] == contexts[-1]]
    counted = ", ".join(f"{STEPS[r['step']]} {r['bytes_ratio']:.2f}" for r in bytes_of)
    return (
        "`python -m papers selection` (docs/results/selection.json): one sequence, median of "
        f"{data['results'][0]['repetitions']} steps in turns, over the dense step in brackets.\n\n"
        + markdown(["step", "reads", *(f"{c:,} tokens" for c in contexts)], lines)
        + f"\n\nBytes counted over the dense step's, at 50% of {contexts[-1]:,} tokens: {counted}."
    )


STEPS = {"predictor": "the predictor alone", "separate": "one set per query head", "max": "one set per KV head"}


def entries(page: str) -> dict[str, Any]:
    """Read the TOML file beside a page, which says what its entries mean."""
    return tomllib.loads((DOCS / f"{page}.toml").read_text(encoding="utf-8"))


METHODS, PRESSES, PAGES = entries("methods"), entries("kvpress"), entries("tables")


def presses(kind: str) -> str:
    """Make the table of kvpress' presses: the policy here, and how many kept sets are equal."""
    data = read("parity.json")
    several = any("compared" in press for press in PRESSES[kind])
    lines = []
    for press in PRESSES[kind]:
        names = press.get("compared", ())
        values = [f"values to {data['values'][name]:.0e}" for name in names if name in data["values"]]
        found = [data["tiny"][name] for name in names if name in data["tiny"]]
        sets, same = (sum(kept[count] for kept in found) for count in ("sets", "equal"))
        counted = [f"{same} of {sets}"] if found else []
        here = "; ".join(filter(None, [press.get("here", "not here"), press.get("note")]))
        lines.append([f"`{press['name']}`", here, *([", ".join([*values, *counted])] if several else [])])
    return markdown(("press", "here", "same kept sets")[: 2 + several], lines)


DIFFERENT = {
    "snapkv(kernel=7)+critical@adakv": "attention divides a layer's budget there, the rescored tokens do here",
    "snapkv(kernel=7)@pyramid": "where a twentieth of the budget is less than the window, it is SnapKV there",
    "snapkv(kernel=7)+chunks": "a layer's heads share whole chunks there, fewer tokens, as in `chunks(heads='layer')`",
    "key_norm": "norms that differ by less than 2^-12 tie here, and the newest token stays",
    "curdkv": "norms that differ by less than 2^-12 tie here, and the newest token stays",
    "lagkv(lag=32)": "scores are ranks: of tokens with the same rank the newest stay here, and any there",
}
ROUNDING = "a token or two, whose scores differ by less than 2e-5 of themselves"


def same_questions() -> str:
    """Make the table of kvpress' answers and kept sets beside those of the study "once"."""
    data, found = read("kvpress-answers.json"), studies.find("once")
    ours_of = {(r["model"], r["question"], r["policy"]): r["scores"]["needle"] for r in read("once.json")["results"]}
    forms = {form: [part for part in data["results"] if part["model"] == models[0]]
             for form, models in found.forms.items() if form in ("base", "adapted")}  # fmt: skip
    lines = []
    for policy in data["results"][0]["answers"]:
        line, alike = [f"`{policy}`"], True
        for parts in forms.values():
            pairs = [
                (theirs, ours_of[part["model"], part["question"], full_name(policy)][sample])
                for part in parts
                for sample, theirs in zip(part["samples"], part["answers"][policy], strict=True)
                if theirs != "-"
            ]
            right = [sum(side == "1" for side in sides) for sides in zip(*pairs, strict=True)]
            line += [f"{right[0]}, {right[1]}", f"{sum(a == b for a, b in pairs)} of {len(pairs)}"]
            kept = [part["kept"][policy] for part in parts if policy in part["kept"]]
            sets, same = (sum(of_part[count] for of_part in kept) for count in ("sets", "equal"))
            share = sum(of_part["alike"] * of_part["sets"] for of_part in kept) / max(sets, 1)
            unlike = "" if share > 0.9999 else f" ({share:.2%} alike)"
            line.append(f"{same:,} of {sets:,}{unlike}" if kept else "")
            alike = alike and same == sets
        lines.append([*line, "" if alike else DIFFERENT.get(policy, ROUNDING)])
    (asked,) = {tuple(len(part["samples"]) for part in parts) for parts in forms.values()}
    columns = [f"{form}: {what}" for form in forms for what in ("right there, here", "same answers", "same kept sets")]
    head = ("policy", *columns, "where kept sets differ")
    note = f"{min(asked)} texts, with {max(asked)} questions that come afterwards and {min(asked)} that are known."
    return f"{note}\n\n{markdown(head, lines)}"


def peers() -> str:
    """Make the table of times beside kvpress and transformers, from benchmarks/results/peers-smollm2.json."""
    data = read("../../benchmarks/results/peers-smollm2.json")
    head = ("threads", "budget", "side", "prompt, s", "x", "token, ms", "x", "peak, MiB", "same tokens")
    lines = []
    for r in data["results"]:
        if "llama.cpp" in r["side"]:
            continue
        cells = [r["threads"], r["budget"] or "full", r["side"]]
        for part, unit, form in (("prefill", 1e3, ".2f"), ("decode", 1, ".1f")):
            ratio = r[f"{part}_ratio"]
            cells += [format(r[part]["milliseconds"] / unit, form), "" if ratio is None else f"{ratio:.2f}"]
        cells += [f"{r['peak_bytes'] / 2**20:,.0f}", f"{r['same_tokens']} of {r['tokens']}"]
        lines.append(cells)
    settings = data["settings"]
    return (
        f"SmolLM2-135M-Instruct (Q4_1), a prompt of {settings['prompt']:,} tokens, `snapkv`, {settings['dtype']}, "
        f"{data['cores']} CPU cores; medians of {data['results'][0]['repetitions']} runs that took turns "
        f"(`{data['command']}`).\n\n{markdown(head, lines)}"
    )


def families() -> str:
    """Make the table of model families: their golden files, and the largest difference from transformers' logits."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, golden in read("parity.json")["families"].items():
        found.setdefault(golden["config"], {})[name] = golden
    lines = []
    for config, goldens in sorted(found.items()):
        worst = max(goldens.values(), key=lambda golden: golden["error"])
        names = ", ".join(f"`{name}`" for name in goldens)
        lines.append([f"`{config}`", names, f"{worst['largest']:.1f}", f"{worst['error']:.1e}"])
    return markdown(("transformers' class", "golden files", "largest logit", "largest difference"), lines)


def methods(kind: str) -> str:
    """Make the table of scores or allocations: name, paper, equation, file, and scores in the study "once"."""
    found, data = studies.find("once"), read("once.json")
    cells = {q: study_panels.cells(found, data["results"], study_panels.Panel("base", q)) for q in ("known", "unknown")}
    head = ("short name", "paper", "equation, or what it is", "file", "run as", "25%, known", "25%, unknown")
    lines = []
    for m in METHODS[kind]:
        there = "run" in m and all((full_name(m["run"]), 0.25) in cells[q] for q in cells)
        scores = [f"{cells[q][full_name(m['run']), 0.25].scores.mean():.2f}" if there else "" for q in cells]
        run = f"`{m['run']}`" if there else m.get("note", "")
        lines.append([f"`{m['name']}`", m["paper"], m["where"], f"`{m['file']}`", run, *scores])
    full, floor = (" and ".join(f"{cells[q][key].scores.mean():.2f}" for q in cells) for key in FULL_AND_FLOOR)
    known = "with the question known and unknown"
    note = f"The full cache has {full} {known}, the newest tokens {floor} ([every figure](results/once.md))."
    return f"{markdown(head, lines)}\n\n{note}"


def generations(file: str) -> str:
    """Make the table of what a text's facts and results are worth behind its last token, and of its perplexity."""
    data = read(file)
    full = next(r for r in data["results"] if r["policy"] == "full")
    head, lines = ("policy", "budget", "facts", "results", "of full, both", "perplexity", "MiB"), []
    for r in sorted(data["results"], key=lambda r: (r["budget"] or 0, -r["score"], r.get("increase", 0))):
        told = [f"{r['tasks'][task]['score']:.2f}" for task in ("facts", "results")]
        share = "" if r is full else f"{r['score'] / full['score']:.2f}"
        more = f"{r['perplexity']:.1f}" if r is full else f"{r['increase']:+.1%}"
        cells = (f"`{r['policy']}`", f"{r['budget'] or 'all'}", *told, share, more, f"{r['cache_bytes'] / 2**20:.0f}")
        lines.append(cells)
    settings = data["settings"]
    return (
        f"{settings['samples']} texts of {settings['lengths']} tokens, {settings['facts']} facts and as many results "
        f"each, {settings['model']} (`{data['command']}`; every figure is in [{Path(file).name}](../results/{file})). "
        "Perplexity is that of the full cache, and by how much it grows; so few texts have no interval. Bytes are "
        f"those of one text's buffers.\n\n{markdown(head, lines)}"
    )


FULL_AND_FLOOR = ("full", None), (RECENCY, 0.25)


def evictions() -> str:
    """Make the table of when each paper evicts, as the links declare it, and of the default here."""
    head = ("short name", "prompt, published", "decode, published", "source", "decode here, by default")
    lines = []
    prompt = {"block": "after every block", "prompt": "once, when it is in"}
    steps = {0: "never", 1: "at every step", 128: "every 128 steps"}
    for name, make in LINKS.items():
        link = make()
        if link.published is None or not str(link).startswith((name, "@")):  # another name of a link
            continue
        own = f"`{name}`" if link.base else f"... `+{name}`"
        _, every = moments(link, "block", None) if link.base else ("", None)
        here = "like the score before it" if every is None else steps.get(every, f"every {every} steps")
        when = link.published
        lines.append([own, prompt[when.prompt], steps[when.decode], when.source, here])
    return markdown(head, lines)


def kept_documents() -> str:
    """Make the table of what keeping a compressed document saves, from benchmarks/results/questions.json."""
    data = read("../../benchmarks/results/questions.json")
    settings, results = data["settings"], data["results"]
    ways = {"scratch": "each from scratch", "kept": "on a kept cache", "at once": "at once, `repeat`"}
    head = ("cache", "questions", "seconds for all", "cache of a row, MiB", "in a file, MiB", "right")
    lines = []
    for r in results:
        budget = "full" if r["budget"] is None else f"`{r['policy']}`, {r['budget']:,}"
        sizes = (r["milliseconds"] / 1000, r["cache_bytes"] / 2**20, r["file_bytes"] / 2**20)
        lines.append([budget, ways[r["way"]], *(f"{size:.1f}" for size in sizes), r["right"]])
    same = all(r["same_as_scratch"] for r in results)
    return (
        f"{settings['questions']} questions on one document of {settings['document']:,} tokens, answers of "
        f"{settings['new_tokens']} tokens, {settings['model']} in float32 on {data['cores']} CPU cores, programs "
        f"compiled before (`{data['command']}`). The answers {'are' if same else 'are not all'} those from scratch, "
        "token by token. The questions are not known when the document is compressed.\n\n" + markdown(head, lines)
    )


def roundings(file: str) -> str:
    """Make the table of ways to round keys and values, from what `python -m papers rounding` wrote."""
    data = read(file)
    texts = {text: [r for r in data["results"] if r["text"] == text] for text in data["chunks"]}
    titles = [text.replace("-", " ").title() for text in texts]
    counts = " and ".join(str(count) for count in sorted(set(data["chunks"].values())))
    head = ("keys", "values", "bytes", *(cell for title in titles for cell in (title, "KL")))
    plain = {r["text"]: r for r in data["results"] if r["key"] == "float32" == r["value"]}
    lines = []
    for same in zip(*texts.values(), strict=True):
        if same[0]["key"] == "float32" == same[0]["value"]:
            continue
        increases = (growth(r, plain[r["text"]]) for r in same)
        differences = (f"{r['kl']:.4f}" if r["kl"] < 0.1 else f"{r['kl']:.3f}" for r in same)
        figures = [cell for pair in zip(increases, differences, strict=True) for cell in pair]
        lines.append([same[0]["key"], same[0]["value"], f"{same[0]['bytes']:g}", *figures])
    return (
        f"{counts} chunks of {data['settings']['chunk']} tokens of each text, {data['settings']['model']} in float32, "
        f"D {data['head_dim']} (`{data['command']}`).\n\n{markdown(head, lines)}"
    )


def growth(r: Mapping[str, Any], full: Mapping[str, Any]) -> str:
    """Return by how much the perplexity grew over that of the full cache on the same chunks, with its interval."""
    more = np.subtract(r["by_chunk"], full["by_chunk"])
    found = [math.exp(x) - 1 for x in statistics.mean_interval(more)]
    form = "+.2f" if max(map(abs, found)) < 0.1 else "+.1f"
    mean, low, high = (f"{100 * x:{form}}" for x in found)
    return f"{mean}% [{low}, {high}]"


def parts_of(page: str) -> dict[str, Callable[[], str]]:
    """Return what makes the parts of a page: functions of this file, with the arguments that docs/tables.toml has."""
    listed = {name: entry if isinstance(entry, list) else [entry] for name, entry in PAGES[page].items()}
    return {name: functools.partial(globals()[function], *given) for name, (function, *given) in listed.items()}


def page_text(page: str) -> str:
    """Return a page's text with new contents of its parts; ValueError if it has no place for one."""
    text = (DOCS / page).read_text()
    for name, make in parts_of(page).items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"docs/{page} has no place for {name!r}; put {begin} and {end} into it.")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{make()}\n\n{end}{rest.split(end)[1]}"
    return text


def main(arguments: list[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    flags = argparse.ArgumentParser(prog="python docs/tables.py", description="Write the figures into the pages.")
    flags.add_argument("--check", action="store_true", help="only check whether the pages are up to date")
    parsed = flags.parse_args(arguments)
    return commands.run(lambda: _run(parsed.check), "docs/tables.py")


def _run(check: bool) -> None:
    made = {page: functools.partial(page_text, page) for page in PAGES}
    made |= {f"results/{name}.md": functools.partial(study_of, name) for name in STUDIES}
    for page, make in made.items():
        text, path = make(), DOCS / page
        if path.exists() and text == path.read_text():
            continue
        if check:
            raise ValueError(f"docs/{page} does not match docs/results; run python docs/tables.py.")
        with files.replacing(path) as temporary:
            temporary.write_text(text)
        print(f"written: docs/{page}")


if __name__ == "__main__":
    raise SystemExit(main())
