"""The tables of the pages, from results: run `python docs/tables.py` whenever results have changed.

README.md and pages under docs report our results. This script writes what stands between `<!-- NAME -->` and
`<!-- end of NAME -->` in them, and all of docs/results/CLAIMS.md, from the JSON files in docs/results; none of it is
typed by hand. `--check` only checks whether the pages are up to date.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS / "results"
sys.path.insert(0, str(DOCS.parent))

from evals import report, statistics, studies, study, study_page  # noqa: E402
from evals.evaluator import RECENCY  # noqa: E402
from evals.experiments import claims  # noqa: E402
from evals.verdicts import FAILS, HOLDS, OPEN, figures  # noqa: E402
from kvjax.chains import LINKS  # noqa: E402
from kvjax.schedule import moments  # noqa: E402
from models import commands  # noqa: E402

SHOWN = 3  # policies that a row names beside the best one
STUDIES = ("fixed-memory",)  # those with a page


class Row(NamedTuple):
    """A policy's outcomes on a file's samples, and the bytes of its cache."""

    policy: str
    correct: list[int]
    cache_bytes: int

    @property
    def recall(self) -> float:
        return sum(self.correct) / len(self.correct)


def read(name: str) -> dict[str, Any]:
    """Read a file of docs/results."""
    return json.loads((RESULTS / name).read_text())


def rows(data: dict[str, Any], **where: Any) -> list[Row]:
    """Return a file's results of one setting."""
    found = [r for r in data["results"] if all(r[name] == value for name, value in where.items())]
    outcomes = [r["correct"] if "correct" in r else [c for cell in r["cells"] for c in cell["correct"]] for r in found]
    return [Row(r["policy"], correct, r["cache_bytes"]) for r, correct in zip(found, outcomes, strict=True)]


def within_noise(row: Row, best: Row) -> bool:
    """Return whether ``best`` is not clearly better than ``row`` on the same samples."""
    return as_good(row.correct, best.correct)


def as_good(scores: Any, best: Any) -> bool:
    """Return whether ``best`` is not clearly better than ``scores`` on the same samples."""
    return statistics.paired_interval(np.subtract(best, scores))[1] <= 0


def decision(budget: str, found: Sequence[Row], full: Row) -> str:
    """Return a line of the decision table: the best policy, those as good within noise, recency, and the full cache."""
    ranked = sorted(
        (row for row in found if row.policy != RECENCY),
        key=lambda row: (-row.recall, "@" in row.policy, len(row.policy)),  # among equals, the simplest first
    )
    best = ranked[0]
    low, high = statistics.wilson(sum(best.correct), len(best.correct))
    others = [f"`{row.policy}`" for row in ranked[1:] if within_noise(row, best)]
    more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
    recency = next((row for row in found if row.policy in (RECENCY, "streaming", "streaming(sinks=4)")), None)
    cells = (
        budget,
        f"**`{best.policy}`**",
        f"{best.recall:.2f} [{low:.2f}, {high:.2f}]",
        "" if recency is None else f"{recency.recall:.2f}",
        "yes" if within_noise(best, full) else "no",
        f"{best.cache_bytes / full.cache_bytes:.0%}",
        ", ".join(others[:SHOWN]) + more or "none",
    )
    return f"| {' | '.join(cells)} |"


COLUMNS = ("budget", "best", "recall, 95%", "recency", "as full", "memory", "as good")
DECISION_HEAD = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}"


def source(name: str, data: dict[str, Any], full: Row) -> str:
    """Return the sentence that names the source of a table's figures."""
    count = len(full.correct)
    return f"From [{name}](../results/{name}): {count} samples per policy; the full cache answers {full.recall:.2f}."


def once() -> str:
    """Make the table of the embedded model, evicting once with the question known."""
    data = read("ablation-budgets.json")
    full = rows(data, policy="full")[0]
    shares = sorted({r["share"] for r in data["results"] if r["share"] is not None})
    lines = [decision(f"{share:.0%}", rows(data, share=share), full) for share in shares]
    return "\n".join([source("ablation-budgets.json", data, full), "", DECISION_HEAD, *lines])


def real(question: str) -> str:
    """Make the table of SmolLM2, evicting once, from all studies of the same prompts."""
    names = [f"{claims.REAL}/{study}.json" for study in ("methods", "newer", "calibrated")]
    studies = [read(name) for name in names]
    data = studies[0]
    full = rows(data, policy="full", question=question)[0]
    lines = []
    for share in sorted({r["share"] for r in data["results"] if r["share"] is not None}):
        found = (row for study in studies for row in rows(study, share=share, question=question))
        lines.append(decision(f"{share:.0%}", list({row.policy: row for row in found}.values()), full))
    links = ", ".join(f"[{name}](../results/{name})" for name in names)
    text = (
        f"From {links}: {len(full.correct)} samples per policy; the full cache answers {full.recall:.2f}. "
        f"SmolLM2-135M-Instruct, prompts of {data['settings']['length']} tokens."
    )
    return "\n".join([text, "", DECISION_HEAD, *lines])


def study_of(name: str) -> str:
    """Make a study's page."""
    found, data = studies.find(name), read(f"{name}.json")
    return study_page.markdown(found, data, study.judge(found, data["results"]), f"{name}.png")


def fixed() -> str:
    """Make the table of the study of fixed memory: the best policy of each budget, those as good, and bytes held."""
    found, data = studies.find("fixed-memory"), read("fixed-memory.json")
    cells = study_page.cells(found, data["results"], "base", "unknown")
    full = cells["full", None]
    columns = ("budget", "best", "score, 95%", "recency", "as full", "held at most", "as good")
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for budget in sorted({budget for _, budget in cells if budget is not None}):
        own = {policy: cell for (policy, at), cell in cells.items() if at == budget}
        best, cell = max(own.items(), key=lambda item: item[1].scores.mean())
        mean, low, high = statistics.mean_interval(cell.scores)
        same = (policy for policy, other in own.items() if policy != best and as_good(other.scores, cell.scores))
        others = [f"`{policy}`" for policy in same]
        row = (
            f"{budget:.0%}", f"**`{best}`**", f"{mean:.2f} [{low:.2f}, {high:.2f}]",
            f"{own[RECENCY].scores.mean():.2f}", "yes" if as_good(cell.scores, full.scores) else "no",
            f"{cell.held:.0f} of {full.held:.0f} MiB", ", ".join(others) or "none",
        )  # fmt: skip
        lines.append(f"| {' | '.join(row)} |")
    text = (
        f"From [fixed-memory](../results/fixed-memory.md): {full.scores.shape[1]} texts; the full cache has "
        f"{full.scores.mean():.2f}. {found.note}"
    )
    return "\n".join([text, "", *lines])


def blocks() -> str:
    """Make the table of the embedded model, evicting after every block."""
    data = read("needle.json")
    full = rows(data, policy="full")[0]
    budgets = sorted({r["budget"] for r in data["results"] if r["budget"] is not None})
    lines = [decision(f"{budget} slots", rows(data, budget=budget, when="block"), full) for budget in budgets]
    lengths = data["settings"]["lengths"].replace(",", " and ")
    text = f"{source('needle.json', data, full)} Prompts of {lengths} tokens."
    return "\n".join([text, "", DECISION_HEAD, *lines])


def unknown() -> str:
    """Make the table of the embedded model, evicting before the question is seen."""
    data = read("ablation-question.json")
    full = rows(data, policy="full")[0]
    share = next(r["share"] for r in data["results"] if r["share"] is not None)
    lines = [
        decision(f"{share:.0%}, question {q}", rows(data, question=q, share=share), full) for q in ("unknown", "known")
    ]
    return "\n".join([source("ablation-question.json", data, full), "", DECISION_HEAD, *lines])


def selections() -> str:
    """Make the table of selections without eviction: perplexity and co-reference by the share of tokens left out."""
    perplexity, coref = read("perplexity.json"), read("coref.json")
    increase = {(r["select"], r["sparsity"]): r["increase"] for r in perplexity["results"]}
    named = {(r["select"], r["sparsity"]): r["accuracy"] for r in coref["results"]}
    chosen = ("oracle", "butler", "quest", "streaming", "random")
    shares = sorted({s for _, s in increase if s} & {s for _, s in named if s})

    def cell(table: dict[tuple[str, float], float], name: str, share: float, form: str) -> str:
        value = next((v for (found, s), v in table.items() if found.split("(")[0] == name and s == share), None)
        return "" if value is None else format(value, form)

    head = " | ".join(
        [f"perplexity, {1 - share:.0%} read" for share in shares]
        + [f"co-reference, {1 - share:.0%} read" for share in shares]
    )
    lines = [f"| read | {head} |", f"| --- |{' --- |' * 2 * len(shares)}"]
    for name in chosen:
        labels = dict.fromkeys(s for s, _ in [*increase, *named] if s.split("(")[0] == name)
        cells = [cell(increase, name, share, "+.1%") for share in shares] + [
            cell(named, name, share, ".2f") for share in shares
        ]
        lines.append(f"| {', then '.join(f'`{label}`' for label in labels)} | {' | '.join(cells)} |")
    full = next(r["accuracy"] for r in coref["results"] if r["select"] == "full")
    text = (
        "From [perplexity.json](../results/perplexity.json) (increase over all tokens) and "
        f"[coref.json](../results/coref.json) (names found; all tokens: {full:.2f})."
    )
    return "\n".join([text, "", *lines])


REAL_POLICIES = {
    "recency": RECENCY, "h2o + caote, half protected": "h2o+caote+protect(recent=0.5)", "tova": "tova",
    "expected_attention": "expected_attention", "keydiff": "keydiff", "curdkv": "curdkv",
    "curdkv + critical @model": "curdkv+critical@model(cap=8.0)", "snapkv, kernel 13": "snapkv(kernel=13)",
    "snapkv + caote": "snapkv(kernel=13)+caote",
    "snapkv, window 16, kernel 13, + caote": "snapkv(window=16,kernel=13)+caote",
    "laprox @model": "laprox@model(cap=8.0)",
    "laprox, kernel 13, @model": "laprox(kernel=13)@model(cap=8.0)",
}  # fmt: skip
NEWER_POLICIES = {
    "recency": RECENCY, "snapkv, kernel 13": "snapkv(kernel=13)", "curdkv": "curdkv", "finch": "finch",
    "chunkkv": "snapkv(kernel=13)+chunks",
    "simlayerkv": "snapkv(kernel=13)@simlayer(recent=0.5)", "kvzip": "kvzip", "kvzip + caote": "kvzip+caote",
    "kvzip @model": "kvzip@model(normalise=False)", "dapq, kernel 13": "dapq(kernel=13)",
    "dapq, kernel 13, first tokens": "dapq(kernel=13,tokens='first')", "dapq + caote": "dapq(kernel=13)+caote",
    "snapkv, kernel 13, merged (d2o)": "snapkv(kernel=13)+merge",
    "snapkv, kernel 13, merged (cam)": "snapkv(kernel=13)+cam", "snapkv @d2o": "snapkv(kernel=13)@d2o",
}  # fmt: skip

FILTERS, HEADS = (f"file='docs/results/{claims.REAL}/{name}.npy'" for name in ("q-filters", "heads"))
CALIBRATED_POLICIES = {
    "recency": RECENCY, "streaming": "streaming", "key_norm": "key_norm", "q_filters": f"q_filters({FILTERS})",
    "snapkv, kernel 13": "snapkv(kernel=13)", "snapkv @adakv": "snapkv(kernel=13)@adakv",
    "snapkv @duo": f"snapkv(kernel=13)@duo({HEADS},sinks=4,recent=0.25)",
    "snapkv @headkv": f"snapkv(kernel=13)@headkv({HEADS})",
    "snapkv + caote @headkv": f"snapkv(kernel=13)+caote@headkv({HEADS})",
}  # fmt: skip
README_POLICIES = {
    name: (REAL_POLICIES | NEWER_POLICIES)[name]
    for name in (
        "recency", "tova", "curdkv", "snapkv, kernel 13", "snapkv, window 16, kernel 13, + caote",
        "laprox, kernel 13, @model",
        "chunkkv", "kvzip @model",
    )
}  # fmt: skip


def real_seen(policies: dict[str, str], *studies: str) -> str:
    """Make the table of needles on SmolLM2 under the named policies, the best of each budget and question bold.

    A policy that has no run for a question has "-". The studies have the same prompts.
    """
    found_in = [read(f"{claims.REAL}/{study}.json") for study in studies]
    data = found_in[0]
    recall = {(r["policy"], r["share"], r["question"]): r["recall"] for part in found_in for r in part["results"]}
    shares = sorted({share for _, share, _ in recall if share is not None})
    settings = [(share, question) for question in ("known", "unknown") for share in shares]
    most = {s: max(recall.get((policy, *s), 0) for policy in policies.values()) for s in settings}
    lines = [
        f"| policy | {' | '.join(f'{share:.0%}, {question}' for share, question in settings)} |",
        f"|{' --- |' * (len(settings) + 1)}",
    ]
    for name, policy in policies.items():
        found = [(recall.get((policy, *s)), most[s]) for s in settings]
        cells = ["-" if x is None else f"**{x:.2f}**" if x == best else f"{x:.2f}" for x, best in found]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    full = recall["full", None, "known"]
    lines += ["", f"{data['samples']} prompts of {data['settings']['length']} tokens; the full cache has {full:.2f}."]
    return "\n".join(lines)


def in_eight_bits() -> str:
    """Make the table of recall and bytes on SmolLM2 by question, budget and dtype; "-" where none was run."""
    data = read(f"{claims.REAL}/eight-bits.json")
    given = [r for r in data["results"] if r["cache_dtype"]]
    dtypes = list(dict.fromkeys(r["cache_dtype"] for r in given))
    found = {
        (r["question"], r["budget"], r["cache_dtype"]): f"{r['recall']:.2f}, {r['cache_bytes'] / 2**20:.2f} MiB"
        for r in given
    }
    lines = [f"| slots per head, question | {' | '.join(dtypes)} |", f"|{' --- |' * (len(dtypes) + 1)}"]
    for question in ("known", "unknown"):
        for budget in sorted({r["budget"] for r in given}, key=lambda budget: budget or float("inf")):
            cells = [found.get((question, budget, dtype), "-") for dtype in dtypes]
            lines.append(f"| {budget or 'all'}, {question} | {' | '.join(cells)} |")
    policy = next(r["policy"] for r in given if r["budget"])
    lines += ["", f"{data['samples']} prompts of {data['settings']['length']} tokens under `{policy}`."]
    return "\n".join(lines)


def at_the_edges() -> str:
    """Make the table of needles on SmolLM2 at the smallest and the largest budgets, bold where a column is best."""
    data = read(f"{claims.REAL}/needle-edges.json")
    recall = {(r["policy"], r["question"], r["budget"]): r["recall"] for r in data["results"]}
    columns = [(question, budget) for question in ("known", "unknown") for budget in (0.05, 0.75)]
    policies = list(dict.fromkeys(r["policy"] for r in data["results"] if r["budget"]))
    best = {column: max(recall[policy, *column] for policy in policies) for column in columns}
    heads = [f"{budget:.0%}, {question}" for question, budget in columns]
    lines = [f"| policy | {' | '.join(heads)} |", f"|{' --- |' * (len(heads) + 1)}"]
    for policy in sorted(policies, key=lambda policy: -sum(recall[policy, *column] for column in columns)):
        values = [recall[policy, *column] for column in columns]
        cells = [
            f"**{value:.2f}**" if value == best[column] else f"{value:.2f}"
            for value, column in zip(values, columns, strict=True)
        ]
        lines.append(f"| {'recency' if policy == RECENCY else f'`{policy}`'} | {' | '.join(cells)} |")
    full = next(r for r in data["results"] if r["policy"] == "full")
    lines += ["", f"{full['samples']} prompts of 1,024 tokens per cell; the full cache has {full['recall']:.2f}."]
    return "\n".join(lines)


def seen() -> str:
    """Make the table of needles on the embedded model, bold where CAOTE is better than the same policy without it."""
    data = read("needle.json")
    protected = "+protect(recent=0.5)"
    columns = {"recency": RECENCY} | {
        "h2o": "h2o", "h2o + caote": "h2o+caote", "h2o, half protected": f"h2o{protected}",
        "the same + caote": f"h2o+caote{protected}", "tova": "tova", "tova + caote": "tova+caote",
        "snapkv": "snapkv", "snapkv + caote": "snapkv+caote",
    }  # fmt: skip
    recall = {(r["policy"], r["budget"], r["when"]): r["recall"] for r in data["results"]}
    better = {
        (c["policy"], c["budget"], c["when"])
        for c in data["comparisons"]
        if c["better"] == "yes" and c["against"] == report.without_caote(c["policy"])
    }
    lines = [f"| budget | {' | '.join(columns)} |", f"|{' --- |' * (len(columns) + 1)}"]
    for when, named in (("block", "after every block"), ("prompt", "once after the prompt")):
        for budget in sorted({b for _, b, w in recall if b is not None and w == when}):
            keys = [(policy, budget, when) for policy in columns.values()]
            cells = [f"**{recall[key]:.2f}**" if key in better else f"{recall[key]:.2f}" for key in keys]
            lines.append(f"| {budget}, {named} | {' | '.join(cells)} |")
    return "\n".join(lines)


NAMES = {"rolling_snapkv": "SnapKV, token by token", "h2o": "h2o, token by token", "quest": "quest, page 16",
         "quest(page_size=4)": "quest, page 4", "two_levels": "two levels, 20% of the pages",
         "two_levels(pages=0.4)": "two levels, 40% of the pages",
         "two_levels(by='max')": "two levels, 20%, by the largest logit"}  # fmt: skip


def named(select: str) -> str:
    """Return the pages' name of a selection."""
    return NAMES.get(select, select.replace("_", " "))


def foreseen(file: str) -> str:
    """Make the table of how well each source predicts which tokens the heads attend to."""
    rows = sorted(read(file)["results"], key=lambda r: -r["hit_rate"])
    lines = ["| source | hit rate, all rows | last row (the paper's accuracy) | attention held |", f"|{' --- |' * 4}"]
    for r in rows:
        rate = f"{r['hit_rate']:.3f}"
        cells = (named(r["select"]), f"**{rate}**" if r is rows[0] else rate)
        lines.append(f"| {' | '.join(cells)} | {r['token_accuracy']:.3f} | {r['mass']:.3f} |")
    return "\n".join(lines)


VARIANTS = {
    "mixed": "both texts, layer 0's output",
    "attention": "both texts, attention's input",
    "prose": "the Bible alone",
    "code": "Python's documentation alone",
}
VARIED_ON = {"king-james-bible": "Bible, held out", "python-doc": "Python, held out", "debian-handbook": "handbook"}


def varied(folder: str) -> str:
    """Make the table of predictors by what they were trained on and what they read, on three texts."""
    lines = [f"| trained on, reads | {' | '.join(VARIED_ON.values())} |", f"|{' --- |' * (len(VARIED_ON) + 1)}"]
    for name, title in VARIANTS.items():
        (found,) = zip(*(read(f"{folder}/{name}-{text}.json")["results"] for text in VARIED_ON), strict=True)
        cells = [
            f"{r['hit_rate']:.3f} [{', '.join(f'{x:.3f}' for x in r['hit_rate_interval'])}], {r['token_accuracy']:.3f}"
            for r in found
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tuned() -> str:
    """Make the table of fine-tuning on prompts with answers: held-out loss, and needles found, with each cache."""
    runs = {"trained under the policy": "finetune-answers", "trained with the full cache": "finetune-answers-control"}
    losses = {title: read(f"{claims.REAL}/{name}.json") for title, name in runs.items()}
    first = losses["trained under the policy"]
    policy, share = first["settings"]["policy"], first["settings"]["budget"]
    head = (
        "",
        "loss, full cache",
        f"loss, `{policy}`, {share:g}",
        "found, full cache",
        f"found, `{policy}`, {share:g}",
    )

    def found(file: str) -> list[str]:
        data = read(f"{claims.REAL}/{file}.json")
        rates = [next(r for r in data["results"] if r["question"] == "known" and fits(r)) for fits in (whole, evicted)]
        return [f"{r['recall']:.2f} [{r['low']:.2f}, {r['high']:.2f}]" for r in rates]

    whole = lambda r: r["policy"] == "full"  # noqa: E731
    evicted = lambda r: r["policy"] == policy and r["budget"] in (share, round(share * 512))  # noqa: E731
    loss = lambda when, of: [f"{of[name][when]:.3f}" for name in ("full", policy)]  # noqa: E731
    rows = [("before", *loss("before", first["held_out_loss"]), *found("methods"))]
    rows += [
        (title, *loss("after", data["held_out_loss"]), *found(runs[title].replace("finetune", "needle")))
        for title, data in losses.items()
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


def by_sparsity(rows: Sequence[dict[str, Any]], cell: Callable[[dict[str, Any]], str], rank: str) -> str:
    """Make a table of selections by sparsity, in the order of ``rank`` at the middle sparsity."""
    shares = sorted({r["sparsity"] for r in rows if r["sparsity"]})
    found = {(r["select"], r["sparsity"]): r for r in rows}
    middle = shares[len(shares) // 2]
    order = sorted(
        {select for select, share in found if share == middle}, key=lambda select: (found[select, middle][rank], select)
    )
    lines = [f"| selection | {' | '.join(f'{share:.0%}' for share in shares)} |", f"|{' --- |' * (len(shares) + 1)}"]
    for select in order:
        lines.append(f"| {named(select)} | {' | '.join(cell(found[select, share]) for share in shares)} |")
    return "\n".join(lines)


def perplexities(file: str) -> str:
    """Make the table of perplexity by sparsity."""
    data = read(file)
    dense = next(r["perplexity"] for r in data["results"] if r["select"] == "full")
    text = (
        f"[{Path(file).name}]({file}): held-out text, {data['chunks']} chunks of {data['settings']['chunk']} "
        f"tokens; increase over the dense model's {dense:.1f}."
    )
    return f"{text}\n\n{by_sparsity(data['results'], lambda r: f'{r["increase"]:+.1%}', 'increase')}"


def names_found(file: str, generated: str | None = None) -> str:
    """Make the table of co-reference by sparsity, and compare the predictor with each other on the same samples."""
    data = read(file)
    cell = lambda r: f"{r['accuracy']:.2f} / {r['coverage']:.2f}"  # noqa: E731
    full = next(r for r in data["results"] if r["select"] == "full")
    rows = [r | {"worse": (-r["accuracy"], -r["coverage"])} for r in data["results"] if r["select"] != "full"]
    sides = [
        f"{named(c['against'])} {c['difference']:+.2f} [{c['low']:+.2f}, {c['high']:+.2f}]"
        for c in data["comparisons"]
        if c["sparsity"] == 0.5
    ]
    width = max((r["high"] - r["low"]) / 2 for r in data["results"])
    text = (
        f"[{Path(file).name}]({file}): {data['samples']} samples, teacher-forced; accuracy (whole name) / coverage "
        f"(its tokens). All tokens: {cell(full)}.\n\n{by_sparsity(rows, cell, 'worse')}\n\n"
        f"Half-widths of the 95% intervals are at most {width:.2f}. The predictor less each other, on the same samples "
        f"at 50%: {'; '.join(sides)}."
    )
    if generated is None:
        return text
    said = [f"{named(r['select'])} {r['accuracy']:.2f}" for r in read(generated)["results"]]
    return (
        f"{text}\n\nGenerated instead of teacher-forced ([{generated}]({generated}), `--mode generate`, 50%; the "
        f"prompt is dense under sources, and evicted from under policies): {', '.join(said)}."
    )


def chosen(file: str) -> str:
    """Make the table of choice tasks under selections, and compare the predictor with each other on all samples."""
    data = read(file)
    tasks = list(dict.fromkeys(r["task"] for r in data["results"]))
    found: dict[Any, dict[str, Row]] = {}
    for r in data["results"]:
        found.setdefault((r["select"], r["sparsity"]), {})[r["task"]] = r
    order = sorted(found.values(), key=lambda own: (own["all"]["sparsity"] or 0, -own["all"]["accuracy"]))
    lines = [f"| reads | {' | '.join(tasks)} | 95%, all |", f"|{' --- |' * (len(tasks) + 2)}"]
    for own in order:
        whole = own["all"]
        reads = "everything" if whole["sparsity"] is None else f"{named(whole['select'])}, {1 - whole['sparsity']:.0%}"
        cells = " | ".join(f"{own[task]['accuracy']:.2f}" for task in tasks)
        lines.append(f"| {reads} | {cells} | [{whole['low']:.2f}, {whole['high']:.2f}] |")
    sides = [
        f"- {sparsity:.0%} left out: "
        + "; ".join(
            f"{named(c['against'])} {c['difference']:+.2f} [{c['low']:+.2f}, {c['high']:+.2f}]"
            for c in data["comparisons"]
            if c["sparsity"] == sparsity
        )
        for sparsity in sorted({c["sparsity"] for c in data["comparisons"]})
    ]
    return (
        f"[{Path(file).name}]({file}): {len(order[0]['all']['correct'])} samples of {data['settings']['chunk']} "
        "tokens; by chance 0.25, of section 0.50.\n\n"
        + "\n".join(lines)
        + "\n\nThe predictor less each other, on the same samples:\n\n"
        + "\n".join(sides)
    )


def steps_foreseen() -> str:
    """Make the table of the time of decode steps that read what the predictor foresees."""
    data = read("../../benchmarks/results/selection.json")
    found: dict[tuple[str, float | None], dict[int, Row]] = {}
    for row in data["results"]:
        found.setdefault((row["step"], row["share"]), {})[row["context"]] = row
    contexts = sorted(found["dense", None])
    lines = [
        f"| step | reads | {' | '.join(f'{c:,} tokens' for c in contexts)} |",
        f"|{' --- |' * (len(contexts) + 2)}",
    ]
    for (step, share), own in found.items():
        cells = [
            f"{own[c]['milliseconds']:.1f} ms" + ("" if step == "dense" else f" ({own[c]['ratio']:.2f})")
            for c in contexts
        ]
        reads = "all" if step == "dense" else "its own" if share is None else f"{share:.0%}"
        lines.append(f"| {STEPS.get(step, step)} | {reads} | {' | '.join(cells)} |")
    bytes_of = [r for r in data["results"] if r["share"] == 0.5 and r["context"] == contexts[-1]]
    counted = ", ".join(f"{STEPS[r['step']]} {r['bytes_ratio']:.2f}" for r in bytes_of)
    return (
        "`python -m benchmarks selection` (benchmarks/results/selection.json): one sequence, median of "
        f"{data['results'][0]['repetitions']} steps in turns, over the dense step in brackets.\n\n"
        + "\n".join(lines)
        + f"\n\nBytes counted over the dense step's, at 50% of {contexts[-1]:,} tokens: {counted}."
    )


STEPS = {
    "dense": "dense",
    "predictor": "the predictor alone",
    "separate": "one set per query head",
    "max": "one set per KV head",
}


class Method(NamedTuple):
    """A row of the methods table; ``judged`` selects its claims by paper and text."""

    name: str
    paper: str
    where: str
    file: str
    judged: Callable[[str, str], bool] | None = None
    note: str = ""
    against: str = ""  # the link in the comparisons of needle.json, for methods without claims of their own


def of(paper: str, *words: str) -> Callable[[str, str], bool]:
    """Return a test for claims of a paper whose text holds one of ``words``; without words, all of its claims."""
    return lambda p, text: p == paper and (not words or any(word in text for word in words))


CAOTE, LAPROX = "[CAOTE](https://arxiv.org/abs/2504.14051)", "[LaProx](https://arxiv.org/abs/2605.07234)"
STREAMING = "[StreamingLLM](https://arxiv.org/abs/2309.17453)"
H2O, TOVA = "[H2O](https://arxiv.org/abs/2306.14048)", "[TOVA](https://arxiv.org/abs/2401.06104)"
OUTPUT = ("through the output", "Through the output", "by values")
SCORES = [
    Method("caote", CAOTE, "eq. 8 and 20", "kvjax/caote.py", of("CAOTE")),
    Method("fast_caote", CAOTE, "eq. 22", "kvjax/caote.py", against="fast_caote"),
    Method("caote(target='output')", "ours", "eq. 8 behind W_O", "kvjax/caote.py", of("ours", *OUTPUT)),
    Method("h2o", H2O, "attention, summed over queries", "kvjax/scores.py", note="a base that CAOTE improves"),
    Method("tova", TOVA, "the layer's attention, last query", "kvjax/scores.py", note="a base of CAOTE"),
    Method(
        "snapkv",
        "[SnapKV](https://arxiv.org/abs/2404.14469)",
        "mean attention of a window, pooled",
        "kvjax/scores.py",
        of("SnapKV"),
    ),
    Method(
        "dapq",
        "[DapQ](https://arxiv.org/abs/2603.11564)",
        "SnapKV's attention, of pseudo queries at the positions to come",
        "kvjax/scores.py",
        of("DapQ"),
        note="none tried",
    ),
    Method("recency", "", "the newest tokens", "kvjax/scores.py", note="a floor"),
    Method("streaming", STREAMING, "first and newest tokens", "kvjax/scores.py", of("StreamingLLM")),
    Method(
        "sage",
        "[SAGE-KV](https://arxiv.org/abs/2503.08879)",
        "attention of the prompt's last query, once",
        "kvjax/scores.py",
        of("SAGE-KV"),
    ),
    Method(
        "finch",
        "[FINCH](https://arxiv.org/abs/2408.00167)",
        "the question's attention times what each query sees",
        "kvjax/scores.py",
        of("FINCH"),
        note="none tried",
    ),
    Method("laprox", LAPROX, "eq. 9, algorithm 1", "kvjax/scores.py", of("LaProx")),
    Method(
        "key_norm",
        "[small keys](https://arxiv.org/abs/2406.11430)",
        "-‖k‖",
        "kvjax/scores_of_keys.py",
        note="a base of KeyDiff",
    ),
    Method(
        "keydiff",
        "[KeyDiff](https://arxiv.org/abs/2504.15364)",
        "-cos(k, mean k)",
        "kvjax/scores_of_keys.py",
        of("KeyDiff"),
    ),
    Method(
        "q_filters",
        "[Q-Filters](https://arxiv.org/abs/2503.02812)",
        "k along the main direction of the head's queries",
        "kvjax/scores_of_keys.py",
        of("Q-Filters"),
        note="none tried",
    ),
    Method(
        "curdkv",
        "[CurDKV](https://arxiv.org/abs/2509.15038)",
        "‖k‖² · ‖v‖², each over the sum of its neighbours'",
        "kvjax/scores_of_keys.py",
        of("CurDKV"),
        note="none tried",
    ),
    Method(
        "lagkv",
        "[LagKV](https://arxiv.org/abs/2504.04704)",
        "spread of k and v on the scale of the next partition, by rank",
        "kvjax/scores_of_keys.py",
        note="none tried",
    ),
    Method("cake", "[CAKE](https://arxiv.org/abs/2503.12491)", "eq. 8", "kvjax/scores.py", of("CAKE")),
    Method(
        "lava", "[LAVa](https://arxiv.org/abs/2509.09754)", "pooled attention · max ‖v‖₁", "kvjax/scores.py", of("LAVa")
    ),
    Method(
        "expected_attention",
        "[Expected Attention](https://arxiv.org/abs/2510.00636)",
        "E[exp(q·k)] ‖v‖",
        "kvjax/scores.py",
        of("Expected Attention"),
    ),
    Method(
        "kvzip",
        "[KVzip](https://arxiv.org/abs/2505.23416)",
        "the largest attention while the model repeats its prompt",
        "kvjax/scores.py",
        of("KVzip"),
        note="none tried",
    ),
    Method(
        "zap",
        "[KVzap](https://arxiv.org/abs/2601.07891)",
        "a small network's prediction from the token's hidden state",
        "kvjax/scores.py",
        note="none tried",
    ),
    Method(
        "butler",
        "[TokenButler](https://arxiv.org/abs/2503.07518)",
        "its logits, as a retention score",
        "kvjax/scores.py",
        note="[its own page](results/TOKENBUTLER.md)",
    ),
    Method("random", "", "a uniform sample", "kvjax/scores.py", note="a floor"),
    Method(
        "critical",
        "[CriticalKV](https://arxiv.org/abs/2502.03805)",
        "score · ‖v W_O‖₁, in two stages",
        "kvjax/transforms.py",
        of("CriticalKV"),
    ),
    Method(
        "positions",
        f"{STREAMING}, SAGE-KV",
        "keys rotated again",
        "kvjax/transforms.py",
        lambda paper, text: "position" in text,
    ),
    Method("normalise", CAOTE, "eq. 21", "kvjax/transforms.py"),
    Method("pool", "SnapKV", "pooling over neighbours", "kvjax/transforms.py", of("ours", "pooling")),
    Method(
        "chunks",
        "[ChunkKV](https://arxiv.org/abs/2502.00299)",
        "mean over a chunk of the text, algorithm 1",
        "kvjax/transforms.py",
        of("ChunkKV"),
        note="none tried",
    ),
    Method(
        "merge",
        "[D2O](https://arxiv.org/abs/2406.13035)",
        "values of what leaves, into the most similar key's",
        "kvjax/merging.py",
        of("D2O", "merging"),
        note="none tried",
    ),
    Method(
        "cam",
        "[CaM](https://openreview.net/forum?id=LCTmppB165)",
        "values of what leaves, shared among the next tokens",
        "kvjax/merging.py",
        of("CaM"),
        note="none tried",
    ),
    Method("protect", "H2O, StreamingLLM", "what always stays", "kvjax/transforms.py"),
]
ALLOCATIONS = [
    Method("@uniform", "", "the same for each head", "kvjax/allocation.py"),
    Method(
        "@adakv",
        "[AdaKV](https://arxiv.org/abs/2407.11550)",
        "a layer's heads compete, a share of each is safe",
        "kvjax/allocation.py",
        of("AdaKV"),
    ),
    Method(
        "@layer",
        "AdaKV",
        "the same without safeguard",
        "kvjax/allocation.py",
        lambda paper, text: "one budget per layer" in text,
    ),
    Method(
        "@model",
        LAPROX,
        "eq. 12, algorithm 2",
        "kvjax/allocation.py",
        lambda paper, text: "one budget for the model" in text or "normalised" in text,
    ),
    Method(
        "@threshold",
        "[KVzap](https://arxiv.org/abs/2601.07891), [DMS](https://arxiv.org/abs/2506.05345)",
        "what scores enough; the budget is a limit",
        "kvjax/allocation.py",
        note="none tried",
    ),
    Method(
        "@pyramid", "[PyramidKV](https://arxiv.org/abs/2406.02069)", "eq. 4", "kvjax/allocation.py", of("PyramidKV")
    ),
    Method("@cake", "CAKE", "eq. 6", "kvjax/allocation.py", of("CAKE")),
    Method(
        "@d2o",
        "[D2O](https://arxiv.org/abs/2406.13035)",
        "layers by the variance of their attention; its authors' code",
        "kvjax/allocation.py",
        of("D2O", "allocation"),
        note="none tried",
    ),
    Method(
        "@headkv",
        "[HeadKV](https://arxiv.org/abs/2410.19258)",
        "by the importance of each head",
        "kvjax/allocation.py",
        of("HeadKV"),
        note="none tried",
    ),
    Method(
        "@duo",
        "[DuoAttention](https://arxiv.org/abs/2410.10819)",
        "the least important heads stream",
        "kvjax/allocation.py",
        of("DuoAttention"),
        note="none tried",
    ),
    Method(
        "@simlayer",
        "[SimLayerKV](https://arxiv.org/abs/2410.13846)",
        "lazy layers stream",
        "kvjax/allocation.py",
        note="none tried",
    ),
    Method("@lava", "LAVa", "layers by the entropy of their scores", "kvjax/allocation.py", of("LAVa")),
]


class Press(NamedTuple):
    """A press of kvpress 0.5.5: what it is called here, and its names in docs/results/parity.json."""

    name: str
    here: str = ""  # empty: not here
    compared: tuple[str, ...] = ()
    note: str = ""


PRESSES = {
    "Scores": [
        Press("ObservedAttentionPress", "`h2o`", ("observed",), "its sums divided by the number of queries"),
        Press("TOVAPress", "`tova+protect(recent=1)`", ("tova",)),
        Press("SnapKVPress", "`snapkv(window=64,kernel=5)`", ("snapkv",), "the default window here is 32"),
        Press("KnormPress", "`key_norm`", ("knorm",)),
        Press("KeyDiffPress", "`keydiff`", ("keydiff",)),
        Press("StreamingLLMPress", "`streaming`", ("streaming",)),
        Press("ExpectedAttentionPress", "`expected_attention`", ("expected", "expected_mean")),
        Press("CURPress", "`curdkv`", ("curdkv", "curdkv_mean", "curdkv_key")),
        Press("LagKVPress", "`lagkv`", ("lagkv", "lagkv_cross")),
        Press("QFilterPress", "`q_filters(file='...')`", ("q_filters",), "its published filters load"),
        Press(
            "FinchPress",
            "`finch(window=n)+positions`",
            ("finch",),
            "n: the question's tokens; compared without `positions`",
        ),
        Press("KVzipPress", "`kvzip@model(normalise=False)`", ("kvzip",), "`layerwise`: `kvzip@layer(cap=None)`"),
        Press("KVzapPress", "`zap`", (), "`python -m train.scorer` makes the small network"),
        Press("RandomPress", "`random`", (), "other numbers"),
        Press("CapPress"),
        Press("CompactorPress"),
        Press("ExpectedAttentionStatsPress", "", (), "`expected_attention` measures the prompt's own queries"),
        Press("FastKVzipPress"),
        Press("KVComposePress"),
        Press("KVgradPress"),
        Press("LeverageScorePress"),
        Press("NonCausalAttnPress"),
        Press("RestoreKVPress"),
    ],
    "Presses around another press": [
        Press("AdaKVPress", "`...@adakv(cap=None)`", ("adakv", "adakv_a0.8")),
        Press("CriticalKVPress", "`...+critical`", ("criticalkv",)),
        Press("CriticalAdaKVPress", "`...+critical@adakv(cap=None)`", (), "not compared"),
        Press(
            "PyramidKVPress",
            "`snapkv@pyramid`",
            ("pyramidkv", "pyramidkv_w8_b4"),
            "compared with betas that end at its last layer",
        ),
        Press(
            "DuoAttentionPress",
            "`...@duo(file='...')`",
            ("duo",),
            "`models.head_scores` measures the heads as its `on_the_fly_scoring`",
        ),
        Press("SimLayerKVPress", "`...@simlayer`", ("simlayer",)),
        Press("ChunkKVPress", "`...+chunks(heads='layer')`", ("chunkkv",)),
        Press("MergingPress", "`...+merge`", ("merge",)),
        Press("CAMPress", "`...+cam`", ("cam",), "the mean of its random draws"),
        Press("KeyRerotationPress", "`...+positions`"),
        Press("ThinKPress", "", (), "it sets channels of the keys to 0, which saves no memory"),
        Press("DMSPress", "`...@threshold(least=x)`"),
        Press("BlockPress", '`when="block"`, `block=128`', (), "the prompt really comes in block by block"),
        Press("DecodingPress", '`when="prompt"`, `evict_every=512`', (), "the budget holds for the prompt, too"),
        Press("PrefillDecodingPress", "`evict_every=n`", (), "the same policy for both"),
        Press("CompressionRatioDecodingPress", "", (), "a budget does not grow with the answer"),
        Press("ComposedPress", "", (), "links of a chain change scores before one eviction: `a+b`"),
        Press("ChunkPress", "", (), "each chunk has a quota of its own there"),
        Press("EntropyGatedChunkKVPress"),
        Press("LUKVPress", "", (), "budgets per head from a file: `...@headkv(file='...')`"),
        Press("PerLayerCompressionPress", "", (), "allocations decide: `@pyramid`, `@cake`, `@d2o`, `@lava`, `@model`"),
    ],
    "To build on": [
        Press("ScorerPress", "`kvjax.base_score`"),
        Press("BasePress", "`kvjax.Policy`"),
        Press(
            "KVPressTextGenerationPipeline",
            "`models.ask`; step by step: `models.prefill`, then `models.generate(cache=...)`",
            (),
            "[compress once](how-to/compress-once.md)",
        ),
    ],
}


def equal(part: dict[str, Any], names: tuple[str, ...], where: str) -> list[str]:
    """Return how many kept sets of a part of parity.json are equal, and how near the others are."""
    found = [part[name] for name in names if name in part]
    if not found:
        return []
    sets, same = (sum(press[count] for press in found) for count in ("sets", "equal"))
    least = min(press["overlap"] for press in found)
    return [f"{same} of {sets}{where}" + ("" if same == sets else f" (the rest {least:.1%} alike)")]


def presses(kind: str) -> str:
    """Make the table of kvpress' presses: the policy here, and how many kept sets are equal."""
    data = read("parity.json")
    compared = any(press.compared for press in PRESSES[kind])
    lines = (
        ["| press | here | same kept sets |", f"|{' --- |' * 3}"] if compared else ["| press | here |", "| --- | --- |"]
    )
    for press in PRESSES[kind]:
        values = [f"values to {data['values'][name]:.0e}" for name in press.compared if name in data["values"]]
        sets = equal(data["tiny"], press.compared, ""), equal(data["smollm2"], press.compared, " in SmolLM2")
        here = "; ".join(filter(None, [press.here or "not here", press.note]))
        same = f" {', '.join([*values, *sets[0], *sets[1]])} |" if compared else ""
        lines.append(f"| `{press.name}` | {here} |{same}")
    return "\n".join(lines)


def peers() -> str:
    """Make the table of times beside kvpress and transformers, from benchmarks/results/peers-smollm2.json."""
    data = read("../../benchmarks/results/peers-smollm2.json")
    lines = [
        "| threads | budget | side | prompt, s | x | token, ms | x | peak, MiB | same tokens |",
        f"|{' --- |' * 9}",
    ]
    for r in data["results"]:
        if "llama.cpp" in r["side"]:
            continue
        cells = [r["threads"], r["budget"] or "full", r["side"]]
        for part, unit, form in (("prefill", 1e3, ".2f"), ("decode", 1, ".1f")):
            ratio = r[f"{part}_ratio"]
            cells += [format(r[part]["milliseconds"] / unit, form), "" if ratio is None else f"{ratio:.2f}"]
        cells += [f"{r['peak_bytes'] / 2**20:,.0f}", f"{r['same_tokens']} of {r['tokens']}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    settings = data["settings"]
    return (
        f"SmolLM2-135M-Instruct, a prompt of {settings['prompt']:,} tokens, `snapkv`, {settings['dtype']}, "
        f"{data['cores']} CPU cores; medians of {data['results'][0]['repetitions']} runs that took turns "
        f"(`{data['command']}`).\n\n" + "\n".join(lines)
    )


def families() -> str:
    """Make the table of model families: their golden files, and the largest difference from transformers' logits."""
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for name, golden in read("parity.json")["families"].items():
        found.setdefault(golden["config"], []).append((name, golden))
    lines = ["| transformers' class | golden files | largest logit | largest difference |", "| --- | --- | --- | --- |"]
    for config, files in sorted(found.items()):
        names = ", ".join(f"`{name}`" for name, _ in files)
        worst = max(files, key=lambda file: file[1]["error"])[1]
        lines.append(f"| `{config}` | {names} | {worst['largest']:.1f} | {worst['error']:.1e} |")
    return "\n".join(lines)


def judged(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Return all claims of a folder in the order of CLAIMS.md."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    of_own = (data for data in found if isinstance(data, dict) and data.get("evaluation") != "study")
    return [claim for data in of_own for claim in data.get("claims") or ()]


def verdicts(method: Method, all_claims: Sequence[dict[str, Any]]) -> str:
    """Return how many of a method's claims hold here, in words."""
    if method.against:
        own = [c for c in read("needle.json")["comparisons"] if c["against"] in report.variants(c["policy"])]
        found = Counter(c["better"] for c in own if method.against in c["policy"])
        words = f"{found['yes']} better, {found['no']} worse, {found['within noise']} within noise"
        return f"against the same score without it: {words}"
    if method.judged is None:
        return method.note
    own = [claim for claim in all_claims if method.judged(claim["paper"], claim["claim"])]
    count = Counter("saturated" if claim.get("note") else claim["verdict"] for claim in own)
    if not count:
        return method.note
    words = (
        (HOLDS, "hold"),
        (FAILS, "fail"),
        (OPEN, "within noise"),
        ("saturated", "too easy or hard"),
    )
    parts = [f"{count[kind]} {word}" for kind, word in words if count[kind]]
    return ", ".join(parts)


def methods(chosen: Sequence[Method]) -> str:
    """Make the table of methods: name, paper, equation, file, and how many of its claims hold here."""
    real, embedded = judged(RESULTS / claims.REAL), judged()
    head = ("short name", "paper", "equation, or what it is", "file", "its claims on SmolLM2")
    head += ("on the embedded model",)
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for m in chosen:
        own = verdicts(m._replace(against="", note=""), real)
        cells = (f"`{m.name}`", m.paper, m.where, f"`{m.file}`", own, verdicts(m, embedded))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def decided(folder: Path = RESULTS) -> str:
    """Make the table of claims with a clear verdict, those that fail first."""
    lines = ["| paper | claim | here | difference |", "| --- | --- | --- | --- |"]
    clear = [claim for claim in judged(folder) if claim["verdict"] != OPEN and not claim.get("note")]
    for claim in sorted(clear, key=lambda claim: (claim["verdict"] != FAILS, claim["paper"])):
        text = claim["claim"].replace("\n", " ")
        lines.append(f"| {claim['paper']} | {text} | {claim['verdict']} | {figures(claim)} |")
    return "\n".join(lines)


def published() -> str:
    """Make the table of when each paper evicts, as the links declare it, and of the default here."""
    lines = [
        "| short name | prompt, published | decode, published | source | decode here, by default |",
        "| --- | --- | --- | --- | --- |",
    ]
    prompt = {"block": "after every block", "prompt": "once, when it is in"}
    steps = {0: "never", 1: "at every step"}
    for name, make in LINKS.items():
        link = make()
        if link.published is None or not str(link).startswith((name, "@")):  # another name of a link
            continue
        own = f"`{name}`" if link.base else f"... `+{name}`"
        _, every = moments(link, "block", None) if link.base else ("", None)
        here = "like the score before it" if every is None else steps.get(every, f"every {every} steps")
        when = link.published
        lines.append(f"| {own} | {prompt[when.prompt]} | {steps[when.decode]} | {when.source} | {here} |")
    return "\n".join(lines)


def kept_and_asked() -> str:
    """Make the table of what keeping a compressed document saves, from benchmarks/results/questions.json."""
    data = read("../../benchmarks/results/questions.json")
    settings, results = data["settings"], data["results"]
    ways = {"scratch": "each from scratch", "kept": "on a kept cache", "at once": "at once, `repeat`"}
    lines = [
        "| cache | questions | seconds for all | cache of a row, MiB | in a file, MiB | right |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        budget = "full" if r["budget"] is None else f"`{r['policy']}`, {r['budget']:,}"
        sizes = (r["milliseconds"] / 1000, r["cache_bytes"] / 2**20, r["file_bytes"] / 2**20)
        lines.append(
            f"| {budget} | {ways[r['way']]} | {sizes[0]:.1f} | {sizes[1]:.1f} | {sizes[2]:.1f} | {r['right']} |"
        )
    same = all(r["same_as_scratch"] for r in results)
    return (
        f"{settings['questions']} questions on one document of {settings['document']:,} tokens, answers of "
        f"{settings['new_tokens']} tokens, {settings['model']} in float32 on {data['cores']} CPU cores, programs "
        f"compiled before (`{data['command']}`). The answers {'are' if same else 'are not all'} those from scratch, "
        "token by token. The questions are not known when the document is compressed.\n\n" + "\n".join(lines)
    )


def roundings(data: dict[str, Any]) -> str:
    """Make the table of ways to round keys and values, from what `python -m evals rounding` wrote."""
    texts = {text: [r for r in data["results"] if r["text"] == text] for text in data["chunks"]}
    titles = [text.replace("-", " ").title() for text in texts]
    counts = " and ".join(str(count) for count in sorted(set(data["chunks"].values())))
    head = ("keys", "values", "bytes", *(cell for title in titles for cell in (title, "KL")))
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for same in zip(*texts.values(), strict=True):
        if same[0]["key"] == "float32" == same[0]["value"]:
            continue
        figures = [cell for r in same for cell in (grown(r), f"{r['kl']:.4f}" if r["kl"] < 0.1 else f"{r['kl']:.3f}")]
        lines.append(f"| {' | '.join((same[0]['key'], same[0]['value'], f'{same[0]["bytes"]:g}', *figures))} |")
    return (
        f"{counts} chunks of {data['settings']['chunk']} tokens of each text, {data['settings']['model']} in float32, "
        f"D {data['head_dim']} (`{data['command']}`).\n\n" + "\n".join(lines)
    )


def grown(r: dict[str, Any]) -> str:
    """Return by how much the perplexity grew, with its interval if there is one."""
    bounds = r["increase_low"], r["increase_high"]
    form = "+.2f" if max(abs(x) for x in (r["increase"], *bounds) if x is not None) < 0.1 else "+.1f"
    mean = f"{100 * r['increase']:{form}}%"
    return mean if None in bounds else f"{mean} [{', '.join(f'{100 * x:{form}}' for x in bounds)}]"


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "../README.md": {"real": lambda: real_seen(README_POLICIES, "methods", "newer")},
    "architecture.md": {"roundings": lambda: roundings(read("smollm2/rounding.json"))},
    "gallery.md": {
        "real": lambda: real_seen(REAL_POLICIES, "methods"),
        "newer": lambda: real_seen(NEWER_POLICIES, "newer"),
        "calibrated": lambda: real_seen(CALIBRATED_POLICIES, "calibrated"),
        "edges": at_the_edges,
        "eight bits": in_eight_bits,
        "seen": seen,
    },
    "results/TOKENBUTLER.md": {
        "foreseen": lambda: foreseen("smollm2/butler-accuracy.json"),
        "foreseen unseen": lambda: foreseen("smollm2/butler-accuracy-handbook.json"),
        "foreseen by pages": lambda: foreseen("smollm2/butler-pages.json"),
        "varied": lambda: varied(f"{claims.REAL}/butler-variants"),
        "perplexities": lambda: perplexities("smollm2/butler-perplexity.json"),
        "names": lambda: names_found("smollm2/coref.json"),
        "choices": lambda: chosen("smollm2/butler-choices.json"),
        "steps": steps_foreseen,
        "foreseen small": lambda: foreseen("butler-accuracy.json"),
        "perplexities small": lambda: perplexities("perplexity.json"),
        "names small": lambda: names_found("coref.json", "coref-generated.json"),
    },
    "how-to/choose-a-policy.md": {
        "real fixed": fixed,
        "real known": lambda: real("known"),
        "real unknown": lambda: real("unknown"),
        "once": once,
        "unknown": unknown,
        "blocks": blocks,
        "selections": selections,
    },
    "how-to/compress-once.md": {"questions": kept_and_asked},
    "how-to/fine-tune.md": {"tuned": tuned},
    "kvpress.md": {
        **{kind.lower(): functools.partial(presses, kind) for kind in PRESSES},
        "peers": peers,
    },
    "reference/models.md": {"families": families},
    "methods.md": {
        "scores": lambda: methods(SCORES),
        "allocations": lambda: methods(ALLOCATIONS),
        "moments": published,
        "decided really": lambda: decided(RESULTS / claims.REAL),
        "decided": decided,
    },
}


def filled(page: str, parts: dict[str, Callable[[], str]]) -> str:
    """Return a page's text with new contents of its parts.

    Raises:
        ValueError: the page has no place for a part.
    """
    text = (DOCS / page).read_text()
    for name, make in parts.items():
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
    made = {page: functools.partial(filled, page, parts) for page, parts in PARTS.items()}
    made |= {f"results/{name}.md": functools.partial(study_of, name) for name in STUDIES}
    for page, make in (made | {"results/CLAIMS.md": functools.partial(claims.markdown, RESULTS)}).items():
        text, path = make(), DOCS / page
        if path.exists() and text == path.read_text():
            continue
        if check:
            raise ValueError(f"docs/{page} does not match docs/results; run python docs/tables.py.")
        with commands.replacing(path) as temporary:
            temporary.write_text(text)
        print(f"written: docs/{page}")


if __name__ == "__main__":
    raise SystemExit(main())
