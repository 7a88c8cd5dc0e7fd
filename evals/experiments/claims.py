"""Claims of the papers, held against outcomes: each a contrast of runs on the same samples, its interval, a verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evals import statistics
from evals.experiments.ablations import Claim, Run
from evals.verdicts import figures, verdict

INTRODUCTION = """\
What the papers say, and whether it holds here: on the embedded model, needle tasks, and as many samples as stand with
each table. A difference is one of recall unless said otherwise, with its 95% interval over samples, the same for both
sides: for one setting Tango's score interval, for a contrast over several a bootstrap over samples (of no width where
all of them agree), and 0 inside unless the sign-flip test says otherwise (evals/statistics.py). *holds*: the interval
lies on the claimed side; *does not*: on the other. What is claimed to be as good, or to change nothing, holds where the
interval lies within 0.1 of 0, and does not where it leaves 0 out. *of*: what is compared, averaged over runs where a
claim is about several. Where all runs answer everything, or nothing, a comparison says little, and is marked. Rows of
*ours* test what is new here. When these files were made every policy evicted at every step of decode (now
`--evict-every 1`); an answer has four or five tokens. Intervals are not corrected for the number of claims: of forty
that are void, one is expected to hold by chance, and one not to."""


def judge(claim: Claim, outcomes: Mapping[Run, Sequence[int]]) -> dict[str, Any]:
    """What the outcomes say of a claim: its difference, the 95% interval, and a verdict.

    A claim of "better" holds where the interval lies above 0 and fails where it lies below. A claim of "same" holds
    where the interval lies within 0.1 of 0, and fails where it leaves 0 out. All else is within noise.

    Example:
        >>> from evals.experiments.claims import judge
        >>> from evals.experiments.ablations import Claim, Run
        >>> a, b = Run("h2o+caote", 0.1), Run("h2o", 0.1)
        >>> judge(Claim("CAOTE", "CAOTE improves H2O", (a,), (b,)), {a: [1] * 50, b: [0] * 50})["verdict"]
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
    """What makes a comparison say little: all of its runs answer everything, or nothing.

    Example:
        >>> from evals.experiments.claims import saturation
        >>> saturation([0.99, 1.0]), saturation([0.4, 1.0]), saturation([0.0, 0.02])
        ('all near 1', '', 'all near 0')
    """
    return "all near 1" if min(recall) > 0.95 else "all near 0" if max(recall) < 0.05 else ""


def markdown(folder: Path) -> str:
    """All claims of the JSON files in a folder, a table a file.

    Raises:
        ValueError: no file with claims.
    """
    parts = [
        "# Claims",
        INTRODUCTION,
    ]
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise ValueError(f"{path} is not JSON; run its study again, or move it elsewhere.") from None
        if not isinstance(data, dict) or not data.get("claims"):
            continue
        measure = data.get("claims_measure", "recall")
        rows = [_row(claim) for claim in data["claims"]]
        parts += [
            f"## {data['title']}",
            f"[{path.name}]({path.name}), {data['samples']} samples a setting, made by `{data['command']}`. "
            f"Differences of {measure}.",
            *([data["caveat"]] if data.get("caveat") else []),
            "\n".join(["| paper | claim | here | difference | of |", "| --- | --- | --- | --- | --- |", *rows]),
        ]
    if len(parts) == 2:
        raise ValueError(f"no file in {folder} holds claims; run a study with --json first.")
    return "\n\n".join(parts) + "\n"


def _row(claim: dict[str, Any]) -> str:
    sides = " and ".join(f"{side:.2f}" for side in claim.get("sides", ()))
    note = f" ({claim['note']})" if claim.get("note") else ""
    cells = (claim["paper"], claim["claim"].replace("\n", " "), claim["verdict"] + note, figures(claim), sides)
    return f"| {' | '.join(cells)} |"
