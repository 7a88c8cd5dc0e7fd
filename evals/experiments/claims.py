"""The papers' claims, tested on outcomes: each is a contrast of runs on the same samples, with interval and verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evals import report, statistics
from evals.experiments.ablations import Claim, Run
from evals.verdicts import figures, verdict

REAL = "smollm2"  # the folder of the results on a real model
INTRODUCTION = """\
What the papers claim, and whether it holds here: first on a real language model, SmolLM2-135M-Instruct, then on the
embedded model of 1.85 M parameters, then where the two disagree. The embedded model's retrieval was written in by
hand before it was trained (models/retriever/RECIPE.md). Its results test the arithmetic; they say little about
language models.

Claims inside fixed memory are judged by a study, whose page is [fixed-memory](fixed-memory.md). Two contrasts below are
not of like with like: "CAOTE improves TOVA" of the studies of methods and of block sizes compares TOVA for all heads of
a layer with TOVA and CAOTE for each group, and LaProx pools over 7 neighbours there while SnapKV, AdaKV and CriticalKV
pool over 13. Read neither as a verdict.

The prose in prompts was docstrings of Python 3.12 and sentences of a grammar until 2026-11 ("d388c36815e611f5" in the
JSON files); now it is `evals/haystack.txt`.

A difference is one of recall unless stated otherwise. It comes with a 95% interval over samples, which are the same
for both sides: Tango's score interval for one setting, a bootstrap over samples for a contrast over several settings
(its width is zero where all samples agree). The interval includes 0 unless the sign-flip test rejects 0
(evals/statistics.py). *holds*: the interval lies on the claimed side. *does not*: it lies on the other side. A claim
of equality holds where the interval lies within 0.1 of 0, and does not hold where it excludes 0. *of* names what is
compared, averaged over runs where a claim is about several. A comparison is marked where all runs answer everything
or nothing, because it then says little. Rows of *ours* test what is new here. Intervals are not corrected for the
number of claims: of forty claims without an effect, about one holds by chance, and one does not."""
# Evaluations whose comparisons are claims: the title of their table, and what differs.
COMPARED = {
    "perplexity": ("Perplexity of long text", "perplexity, relative to that without CAOTE (positive: lower)"),
    "needle": ("Needles", "recall"),
    "ruler": ("RULER", "the mean score"),
    "choices": ("Choice tasks made from a text", "the mean accuracy"),
}
LEAST = 100  # answers per setting that judge a claim
EMBEDDED = """\
These files were made with earlier defaults: every policy evicted at every step of decode (now `--evict-every 1`; an
answer has four or five tokens), `tova` kept one set of tokens per group of heads (now `tova(heads='group')`), and
`snapkv` without a kernel pooled over 5 neighbours (now 13)."""
NOT_TESTED = """\
## Not tested

- **LongBench and Booksum** (the main tables of CAOTE, SAGE-KV and LaProx) need models of billions of parameters and
  data from a hub. `python -m evals longbench` and `python -m evals booksum` run them as published.
- **Time and memory on a GPU** (LaProx, SAGE-KV, TokenButler): bytes, FLOPs and launches are counted, and CPU times
  measured, in [performance](../performance.md).
- **TokenButler's claims** stand with their verdicts in [TOKENBUTLER.md](TOKENBUTLER.md)."""
# The texts of the same claim, on the real model and on the embedded one.
SAME_CLAIM = (
    ("CAOTE improves H2O (question known)", "CAOTE improves H2O (all budgets)"),
    ("CAOTE improves SnapKV (question known)", "CAOTE improves SnapKV (all budgets)"),
    ("CAOTE improves SnapKV (question unknown)", "question unknown: CAOTE improves SnapKV"),
    ("LaProx is better than AdaKV (question known)", "LaProx is better than AdaKV at 10 to 50%"),
    ("LaProx is better than CAKE (question known)", "LaProx is better than CAKE at 10 to 50%"),
    ("LaProx is better than LAVa (question known)", "LaProx is better than LAVa at 10 to 50%"),
    ("AdaKV is better than SnapKV (question known)", "AdaKV is better than SnapKV (all budgets)"),
    ("AdaKV is better than SnapKV (question unknown)", "question unknown: AdaKV is better than SnapKV"),
    ("CriticalKV is better than AdaKV (question unknown)", "question unknown: CriticalKV is better than AdaKV"),
    ("CAKE is better than SnapKV (question known)", "CAKE is better than SnapKV (all budgets)"),
    ("LAVa is better than AdaKV (question known)", "LAVa is better than AdaKV (all budgets)"),
    ("KeyDiff is better than key norm (question known)", "KeyDiff is better than key norms (all budgets)"),
    (
        "Expected Attention is better than SnapKV (question unknown)",
        "question unknown: Expected Attention is better than SnapKV",
    ),
    (
        "SAGE-KV at 25% is better than StreamingLLM at 50% (question known)",
        "SAGE-KV at 25% is better than StreamingLLM at 50% (2 times the memory)",
    ),
    ("knowing the question helps SnapKV", "knowing the question helps SnapKV"),
)


def judge(claim: Claim, outcomes: Mapping[Run, Sequence[int]]) -> dict[str, Any]:
    """Judge a claim by the outcomes: its difference, the 95% interval, and a verdict.

    A claim of "better" holds where the interval lies above 0 and fails where it lies below. A claim of "same" holds
    where the interval lies within 0.1 of 0, and fails where it lies farther and excludes 0. All else is within noise.

    Example:
        >>> from evals.experiments.claims import judge
        >>> from evals.experiments.ablations import Claim, Run
        >>> a, b = Run("h2o+caote", 0.1), Run("h2o", 0.1)
        >>> judge(
        ...     Claim("CAOTE", "CAOTE improves H2O", (a,), (b,)),
        ...     {a: [1] * 50, b: [0] * 50},
        ... )["verdict"]
        'holds'
    """
    weights = claim.weights()
    counts = {len(outcomes[run]) for _, run in weights}
    if len(counts) != 1:
        raise ValueError(f"the runs of {claim.text!r} have {sorted(counts)} outcomes; a claim needs the same samples.")
    count = counts.pop()
    values = [sum(weight * outcomes[run][i] for weight, run in weights) for i in range(count)]
    mean, low, high = statistics.paired_interval(values)
    recall = {run: sum(outcomes[run]) / count for _, run in weights}
    sides = claim.sides(recall)
    return {
        "paper": claim.paper,
        "claim": claim.text,
        "expects": claim.expects,
        "difference": round(mean, 6),
        "low": round(low, 6),
        "high": round(high, 6),
        "verdict": verdict(claim.expects, low, high),
        "sides": [round(side, 6) for side in sides],
        "note": saturation(list(recall.values())),
    }


def saturation(recall: Sequence[float]) -> str:
    """Return a note where a comparison says little, because all of its runs answer nearly everything, or nothing.

    Example:
        >>> from evals.experiments.claims import saturation
        >>> saturation([0.99, 1.0]), saturation([0.4, 1.0]), saturation([0.0, 0.02])
        ('all near 1', '', 'all near 0')
    """
    return "all near 1" if min(recall) > 0.95 else "all near 0" if max(recall) < 0.05 else ""


def markdown(folder: Path) -> str:
    """Return the page of all claims of a folder's JSON files: its folder ``smollm2`` first, and where both disagree.

    Raises:
        ValueError: no file holds claims.
    """
    real, embedded = _with_claims(folder / REAL, compared=True), _with_claims(folder)
    if not real and not embedded:
        raise ValueError(f"no file in {folder} holds claims; run a study with --json first.")
    parts = ["# Claims", INTRODUCTION]
    if real:
        parts += ["## On SmolLM2", *(part for name, data in real for part in _study(f"{REAL}/{name}", data))]
    if embedded:
        parts += [
            "## On the embedded model",
            EMBEDDED,
            *(part for name, data in embedded for part in _study(name, data)),
        ]
    if differing := _disagreements(real, embedded):
        head = "| paper | claim | SmolLM2 | the embedded model |\n| --- | --- | --- | --- |"
        parts += ["## Where they disagree", "\n".join([head, *differing])]
    return "\n\n".join([*parts, NOT_TESTED]) + "\n"


def _with_claims(folder: Path, compared: bool = False) -> list[tuple[str, dict[str, Any]]]:
    """Read the files of a folder that hold claims, in the order of their names.

    Args:
        compared: whether to read the comparisons of other evaluations as claims (:func:`from_comparisons`).
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise ValueError(f"{path} is not JSON; run its study again, or move it elsewhere.") from None
        if compared and isinstance(data, dict):
            data = {**data, **from_comparisons(data)}
        if isinstance(data, dict) and data.get("claims") and data.get("evaluation") != "study":
            found.append((path.name, data))
    return found


def from_comparisons(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a study for an evaluation that compared policies with and without CAOTE; else nothing.

    Each comparison becomes the claim that CAOTE improves the policy. A fall of perplexity counts as a gain. Fewer than
    100 answers judge no claim.

    Example:
        >>> from evals.experiments.claims import from_comparisons
        >>> where = dict(budget=128, when="block")
        >>> of = {"h2o": 5.0, "h2o+caote": 4.9}
        >>> rows = [
        ...     dict(policy=policy, perplexity=value, **where)
        ...     for policy, value in of.items()
        ... ]
        >>> change = dict(
        ...     policy="h2o+caote", against="h2o", increase=-0.02, low=-0.03,
        ...     high=-0.01, **where
        ... )
        >>> data = dict(
        ...     evaluation="perplexity", settings={}, chunks=9, policies=rows,
        ...     policy_comparisons=[change]
        ... )
        >>> claim = from_comparisons(data)["claims"][0]
        >>> claim["claim"], claim["verdict"], claim["difference"], claim["sides"]
        ('CAOTE improves h2o, budget 128, by block', 'holds', 0.02, [4.9, 5.0])
    """
    if data.get("claims") or data.get("evaluation") not in COMPARED:
        return {}
    title, measure = COMPARED[data["evaluation"]]
    whole = data.get("policies") or data["results"]
    samples = data.get("chunks") or max(row["samples"] for row in whole)
    if not data.get("chunks") and samples < LEAST:
        return {}
    place = lambda row, policy: (policy, *(row.get(name) for name in ("length", "budget", "when", "question")))  # noqa: E731
    figure = next(name for name in ("perplexity", "score", "recall") if name in whole[0])
    value = {place(row, row.get("policy")): row.get(figure) for row in whole}
    named = []
    for row in data.get("policy_comparisons") or data.get("comparisons", ()):
        if row.get("against") not in report.variants(row.get("policy", "")):
            continue
        length = f", {row['length']:,} tokens" if row.get("length") else ""
        change, low, high = row.get("difference"), row["low"], row["high"]
        if change is None:
            change, low, high = -row["increase"], -row["high"], -row["low"]
        where = report.moment((row.get("question", "known"), row["when"], row["budget"]))
        named.append(
            {
                "paper": "CAOTE",
                "claim": f"CAOTE improves {row['against']}{length}, {where}",
                "difference": change,
                "low": low,
                "high": high,
                "verdict": verdict("better", low, high),
                "sides": [value[place(row, row["policy"])], value[place(row, row["against"])]],
            }
        )
    settings = data["settings"]
    of = f", windows of {settings['chunk']:,} tokens" if "chunk" in settings else ""
    if "lengths" in settings:
        of = f", prompts of {' and '.join(f'{int(length):,}' for length in settings['lengths'].split(','))} tokens"
    return {"title": f"{title}{of}", "claims_measure": measure, "samples": samples, "claims": named}


def _study(name: str, data: Mapping[str, Any]) -> list[str]:
    """Return a file's heading, source, caveat and table."""
    measure = data.get("claims_measure", "recall")
    rows = [_row(claim) for claim in data["claims"]]
    return [
        f"### {data['title']}",
        f"[{name}]({name}), {data['samples']} samples per setting, made by `{data['command']}`. "
        f"Differences of {measure}.",
        *([data["caveat"]] if data.get("caveat") else []),
        "\n".join(["| paper | claim | here | difference | of |", "| --- | --- | --- | --- | --- |", *rows]),
    ]


def _disagreements(
    real: Sequence[tuple[str, Mapping[str, Any]]], embedded: Sequence[tuple[str, Mapping[str, Any]]]
) -> list[str]:
    """Return the rows of the claims on which the models' verdicts differ."""
    ours, theirs = (
        {claim["claim"]: claim for _, data in files for claim in data["claims"]} for files in (real, embedded)
    )
    pairs = [(ours[one], theirs[other]) for one, other in SAME_CLAIM if one in ours and other in theirs]
    return [
        f"| {one['paper']} | {one['claim']} | {one['verdict']}, {figures(one)} | {other['verdict']}, {figures(other)} |"
        for one, other in pairs
        if one["verdict"] != other["verdict"]
    ]


def _row(claim: dict[str, Any]) -> str:
    sides = " and ".join(f"{side:.2f}" for side in claim.get("sides", ()))
    note = f" ({claim['note']})" if claim.get("note") else ""
    cells = (claim["paper"], claim["claim"].replace("\n", " "), claim["verdict"] + note, figures(claim), sides)
    return f"| {' | '.join(cells)} |"
