"""The tables of the pages, from results: run `python docs/tables.py` whenever results have changed.

Pages under docs report our results. This script writes what stands between `<!-- NAME -->` and
`<!-- end of NAME -->` in them, and the tables of studies in CSV, from docs/results; none of it is typed by hand.
`--check` only checks whether the pages are up to date.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats

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

STUDIES = ("caote", "sage", "once", "budgets", "long", "fixed-memory", "questions", "slots", "ruler",
           "ruler-block", "beyond", "allocations")  # fmt: skip
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


def study_parts(name: str) -> dict[str, Callable[[], str]]:
    """Return what makes the parts of a study's page."""
    found, lines = studies.find(name), read(f"{name}.json")["results"]
    of_policies = study_pages.allocations if name == "allocations" else study_pages.scores
    return {
        "scores": lambda: of_policies(found, lines),
        "claims": lambda: study_pages.claims(found, judgements()[name], PAGES["results/CLAIMS.md"]["claims"][1]),
        "made": lambda: study_pages.made(found, read(f"{name}.json")),
    }


def study_files(name: str) -> dict[str, Callable[[], str]]:
    """Return what makes a study's tables in CSV, by file."""
    found, lines = studies.find(name), read(f"{name}.json")["results"]
    return {
        f"results/{name}.csv": lambda: study_pages.scores_csv(found, lines),
        f"results/{name}-claims.csv": lambda: study_pages.claims_csv(found, judgements()[name]),
    }


def claim_marks(rows: Sequence[str]) -> str:
    """Make the table of chosen claims of all studies."""
    return study_pages.claim_marks([(studies.find(name), own) for name, own in judgements().items()], rows)


# The policies that pages name, as files record them.
NAMED = {"`gate`": "gate", "`repeat`": "kvzip", "`window`": "snapkv(kernel=7)+chunks", "newest tokens": RECENCY}
CHOICES = (
    ("fixed-memory", "unknown", 0.1, ("`gate`", "`repeat`")),
    ("fixed-memory", "unknown", 0.25, ("`gate`", "`repeat`", "newest tokens")),
    ("once", "known", 0.25, ("`window`", "`repeat`")),
)
SPOKEN = {"unknown": "later", "known": "known", "block": "by block", "prompt": "once"}


def choices() -> str:
    """Make the table of the policies to choose from: questions answered by both forms of the model, and bytes held."""
    forms = ("base", "adapted")
    head = ("question", "evicts", "budget", "policy", *(f"{form} model" for form in forms), "held at most")
    lines = []
    for name, question, budget, policies in CHOICES:
        found, data = studies.find(name), read(f"{name}.json")
        each = [study_panels.cells(found, data["results"], study_panels.Panel(form, question)) for form in forms]
        if not lines:
            lines.append(("", "never", "all", "full cache", *answered([cells["full", None] for cells in each])))
        place = (SPOKEN[question], SPOKEN[found.content["when"]], f"{budget:.0%}")
        for policy in policies:
            lines.append((*place, policy, *answered([cells[NAMED[policy], budget] for cells in each])))
    return markdown(head, lines)


def answered(cells: Sequence[study_panels.Cell]) -> list[str]:
    """Return the share of questions that each form answers, and the most bytes that a prompt's cache took."""
    most = max(cell.peak for cell in cells)
    return [*(report.percent(cell.scores.mean()) for cell in cells), f"{most:.0f} MiB"]


def found_share(r: Mapping[str, Any]) -> float:
    """Return the share of the needles that were found; older files call it recall."""
    return r["score"] if "score" in r else r["recall"]


NAMES = {"rolling_snapkv": "SnapKV, token by token", "h2o": "h2o, token by token", "quest": "quest, page 16",
         "quest(page_size=4)": "quest, page 4"}  # fmt: skip


def label(select: str) -> str:
    """Return the pages' name of a selection."""
    return NAMES.get(select, select.replace("_", " "))


def predictions(file: str) -> str:
    """Make the table of how well each source predicts which tokens the heads attend to."""
    results = sorted(read(file)["results"], key=lambda r: -r["hit_rate"])
    lines = []
    for r in results:
        form = "**{hit_rate:.1%}**" if r is results[0] else "{hit_rate:.1%}"
        lines.append([label(r["select"]), *(f.format(**r) for f in (form, "{token_accuracy:.1%}", "{mass:.1%}"))])
    return markdown(("source", "hit rate, all queries", "hit rate, last query", "mass"), lines)


def tuning() -> str:
    """Make the table of fine-tuning on prompts with answers: held-out loss, and needles found, with each cache."""
    runs = {"trained under the policy": "finetune-answers", "trained with the full cache": "finetune-answers-control"}
    losses = {title: read(f"{REAL}/{name}.json") for title, name in runs.items()}
    first = losses["trained under the policy"]
    policy, share = first["settings"]["policy"], first["settings"]["budget"]
    head = ["", *(f"{what}, {of}" for what in ("loss", "found") for of in ("full cache", f"{share:.0%}"))]

    def found(file: str) -> list[str]:
        data = read(f"{REAL}/{file}.json")
        rates = [next(r for r in data["results"] if r["question"] == "known" and fits(r)) for fits in (whole, evicted)]
        return [f"{found_share(r):.0%} [{r['low']:.0%}, {r['high']:.0%}]" for r in rates]

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


def perplexities(file: str) -> str:
    """Make the table of perplexity by sparsity."""
    data = read(file)
    dense = next(r["perplexity"] for r in data["results"] if r["select"] == "full")
    text = (
        f"[{Path(file).name}]({file}): held-out text, {data['chunks']} chunks of {data['settings']['chunk']} "
        f"tokens; increase over the dense model's {dense:.1f}."
    )
    return f"{text}\n\n{by_sparsity(data['results'], lambda r: f'{r["increase"]:+.1%}', 'increase')}"


def names(file: str) -> str:
    """Make the table of co-reference by sparsity."""
    data = read(file)
    cell = lambda r: f"{r['accuracy']:.0%} / {r['coverage']:.0%}"  # noqa: E731
    full = next(r for r in data["results"] if r["select"] == "full")
    lines = [r | {"worse": (-r["accuracy"], -r["coverage"])} for r in data["results"] if r["select"] != "full"]
    width = max((r["high"] - r["low"]) / 2 for r in data["results"])
    return (
        f"[{Path(file).name}]({file}): {data['samples']} samples, teacher-forced; whole names / their tokens that are "
        f"right. All tokens: {cell(full)}. Half-widths of the 95% intervals are at most {100 * width:.0f} points.\n\n"
        + by_sparsity(lines, cell, "worse")
    )


def entries(page: str) -> dict[str, Any]:
    """Read the TOML file beside a page, which says what its entries mean."""
    return tomllib.loads((DOCS / f"{page}.toml").read_text(encoding="utf-8"))


METHODS, PRESSES, PAGES = entries("methods"), entries("kvpress"), entries("tables")


def presses(kind: str) -> str:
    """Make the table of kvpress' presses: the policy here, and how many kept sets are equal; then those not here."""
    data = read("parity.json")
    lines, missing = [], []
    for press in PRESSES[kind]:
        note = press.get("note")
        if "here" not in press:
            missing.append(f"`{press['name']}`" + (f" ({note})" if note else ""))
            continue
        names = press.get("compared", ())
        values = [f"values to {data['values'][name]:.0e}" for name in names if name in data["values"]]
        found = [data["tiny"][name] for name in names if name in data["tiny"]]
        sets, same = (sum(kept[count] for kept in found) for count in ("sets", "equal"))
        counted = [f"{same} of {sets}"] if found else []
        here = "; ".join(filter(None, [press["here"], note]))
        lines.append([f"`{press['name']}`", here, ", ".join([*values, *counted])])
    table = markdown(("press", "here", "same kept sets"), lines)
    return f"{table}\n\nNot here: {', '.join(missing)}." if missing else table


DIFFERENT = {
    "snapkv(kernel=7)+critical@adakv": "attention divides a layer's budget there",
    "snapkv(kernel=7)@pyramid": "for small budgets it is SnapKV there",
    "snapkv(kernel=7)+chunks": "heads share whole chunks there, fewer tokens",
    "key_norm": "nearly equal norms tie here",
    "curdkv": "nearly equal norms tie here",
    "lagkv(lag=32)": "of equal ranks the newest stay here, any there",
}


def same_questions() -> str:
    """Make the table of kvpress' answers and kept sets beside those of the study "once"."""
    data = read("kvpress-answers.json")
    ours_of = {(r["model"], r["question"], r["policy"]): r["scores"]["needle"] for r in read("once.json")["results"]}
    answered = [part for part in data["results"] if part["model"] == "smollm2"]
    lines = []
    for policy in data["results"][0]["answers"]:
        pairs = [
            (theirs, ours_of[part["model"], part["question"], full_name(policy)][sample])
            for part in answered
            for sample, theirs in zip(part["samples"], part["answers"][policy], strict=True)
            if theirs != "-"
        ]
        line = [f"`{policy}`", *(f"{np.mean([side == '1' for side in own]):.0%}" for own in zip(*pairs, strict=True))]
        answers = [a == b for a, b in pairs]
        kept = [part["kept"][policy] for part in data["results"] if policy in part["kept"]]
        sets, same = (sum(of_part[count] for of_part in kept) for count in ("sets", "equal"))
        share = sum(of_part["alike"] * of_part["sets"] for of_part in kept) / max(sets, 1)
        unlike = "" if share > 0.9999 else f" ({share:.1%} alike)"
        others = f"; {answers.count(False)} of {len(answers)} answers" if not all(answers) else ""
        line.append(f"{same:,} of {sets:,}{unlike}" if kept else "")
        lines.append([*line, ("" if same == sets else DIFFERENT.get(policy, "")) + others])
    asked = [len(part["samples"]) for part in answered]
    head = ("policy", "there", "here", "same kept sets", "what differs")
    note = f"{min(asked)} texts, with {max(asked)} questions that come later and {min(asked)} that are known."
    return f"{note}\n\n{markdown(head, lines)}"


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
    head = ("short name", "paper", "what it is", "file", "run as", "question known", "question later")
    lines = []
    for m in METHODS[kind]:
        there = "run" in m and all((full_name(m["run"]), 0.25) in cells[q] for q in cells)
        scores = [report.percent(cells[q][full_name(m["run"]), 0.25].scores.mean()) if there else "" for q in cells]
        run = f"`{m['run']}`" if there else m.get("note", "")
        lines.append([f"`{m['name']}`", m["paper"], m["where"], f"`{m['file']}`", run, *scores])
    return markdown(head, lines)


def generations(file: str) -> str:
    """Make the table of what is still known of a text behind its last token, and of its perplexity."""
    data = read(file)
    full, settings = next(r for r in data["results"] if r["policy"] == "full"), data["settings"]
    asked = settings["samples"] * settings["facts"]
    head, lines = ("policy", "slots", "facts", "results", "perplexity", "MiB"), []
    for r in sorted(data["results"], key=lambda r: (r["budget"] or 0, -r["score"], r.get("increase", 0))):
        told = [f"{asked * r['tasks'][task]['score']:.0f} of {asked}" for task in ("facts", "results")]
        more = f"{r['perplexity']:.1f}"
        if r is not full:
            more = f"{r['increase']:+.1%}<br>[{r['increase_low']:+.1%}, {r['increase_high']:+.1%}]"
        lines.append((f"`{r['policy']}`", r["budget"] or "all", *told, more, f"{r['cache_bytes'] / 2**20:.0f}"))
    return (
        f"{settings['samples']} texts of {int(settings['lengths']):,} tokens, {settings['model']} "
        f"([{Path(file).name}](../results/{file})). Perplexity: the full cache's, and by how much it grows, with 95% "
        "intervals.\n\n"
        f"{markdown(head, lines)}"
    )


def evictions() -> str:
    """Make the table of when papers evict, as the links declare it, and of the default here."""
    prompt = {"block": "by block", "prompt": "once"}
    steps = {0: "never", 1: "at every step", 128: "every 128 steps"}
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, make in LINKS.items():
        link = make()
        if link.published is None or not str(link).startswith((name, "@")):  # another name of a link
            continue
        _, every = moments(link, "block", None) if link.base else ("", None)
        here = "as the score before it" if every is None else steps.get(every, f"every {every} steps")
        when = prompt[link.published.prompt], steps[link.published.decode], here
        found.setdefault(when, []).append(f"`{name}`" if link.base else f"`+{name}`")
    lines = [(", ".join(names), *when) for when, names in found.items()]
    return markdown(("methods", "prompt, published", "decode, published", "decode here, by default"), lines)


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


# How a perplexity, or a divergence, is told: by windows, what it is, and how a link changes it.
TOLD = {
    "by_chunk": ("{increase:+.1%}", "{increase:+.1%}", "[{low:+.1%}, {high:+.1%}]"),
    "kl_by_chunk": ("{kl:.3f}", "{kl_difference:+.4f}", "[{kl_low:+.4f}, {kl_high:+.4f}]"),
}


def links_gain(file: str, links: Sequence[str]) -> str:
    """Make the table of what links behind scores change: the perplexity, and the divergence from the full cache.

    What is beyond noise is bold: by a t-test over windows, corrected for the number of the table's comparisons (Holm).
    """
    data = read(file)
    found, settings = {r["policy"]: r for r in data["policies"]}, data["settings"]
    bases = [name for name in found if name != RECENCY and not any(link in name for link in links)]
    compared = {(c["policy"], c["against"]): c for c in data["policy_comparisons"]}
    chances = {}
    for base, field, link in itertools.product(bases, TOLD, links):
        change = np.subtract(found[claims.adding(link, base)][field], found[base][field])
        chances[base, field, link] = float(scipy.stats.ttest_1samp(change, 0).pvalue)
    corrected = dict(zip(chances, claims.holm(list(chances.values())), strict=True))
    lines = []
    for base in bases:
        line = [f"`{base}`"]
        for field, (own, change, interval) in TOLD.items():
            line.append(own.format(**found[base]))
            for link in links:
                form = f"**{change}**" if corrected[base, field, link] < claims.LEVEL else change
                line.append(f"{form}<br>{interval}".format(**compared[claims.adding(link, base), base]))
        lines.append(line)
    named, text = [f"`+{link}`" for link in links], settings["text"].replace("-", " ").title()
    return (
        f"{data['chunks']} windows of {settings['chunk']:,} tokens of the {text}, "
        f"of which the last {settings['stride']} count, with {float(settings['budgets']):.0%} of the tokens "
        f"([{Path(file).name}]({file})). Perplexity: above the full cache's; KL: the divergence from its "
        "predictions, in nats. Then what a link changes, with 95% intervals; bold: beyond noise among all of the table "
        f"(Holm).\n\n{markdown(('score', 'perplexity', *named, 'KL', *named), lines)}"
    )


def blocks_gain(files: Mapping[str, str], link: str) -> str:
    """Make the table of what a link behind scores changes in perplexity, by how much is evicted at once.

    ``files`` are those of :func:`links_gain`, each by what its column is called.
    """
    compared = [{(c["policy"], c["against"]): c for c in read(file)["policy_comparisons"]} for file in files.values()]
    pairs = [pair for pair in compared[0] if pair[0] == claims.adding(link, pair[1])]
    _, change, interval = TOLD["by_chunk"]
    cell = f"{change}<br>{interval}"
    lines = [(f"`{base}`", *(cell.format(**found[policy, base]) for found in compared)) for policy, base in pairs]
    head = (f"`+{link}` changes perplexity", *(f"[{name}]({file})" for name, file in files.items()))
    return markdown(head, lines)


def parts_of(page: str) -> dict[str, Callable[[], str]]:
    """Return what makes the parts of a page: functions of this file, with the arguments that docs/tables.toml has.

    A study's page has its own parts, too.
    """
    study = page.removeprefix("results/").removesuffix(".md")
    own = study_parts(study) if study in STUDIES else {}
    listed = {name: entry if isinstance(entry, list) else [entry] for name, entry in PAGES.get(page, {}).items()}
    return own | {name: functools.partial(globals()[function], *given) for name, (function, *given) in listed.items()}


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
    pages = dict.fromkeys((*PAGES, *(f"results/{name}.md" for name in STUDIES)))
    made: dict[str, Callable[[], str]] = {page: functools.partial(page_text, page) for page in pages}
    for name in STUDIES:
        made |= study_files(name)
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
