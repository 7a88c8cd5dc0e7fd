"""Writes docs/results/parity.json: how far our results are those of others, for the tables of docs/methods.md.

    python -m tests.models.measure_parity

It counts what the tests of the golden files check: for kvpress the kept sets that are equal, one per layer, head and
budget, and of those that are not the smallest share of tokens in common; for transformers the largest difference of a
logit.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

import kvjax
import models
from tests.models import make_restorekv, test_gates, test_kvpress, test_kvzip, test_restoring
from tests.models.make_golden import GOLDEN, MODELS
from tests.models.make_kvzip import GRADIENT, KEPT, PLUS, TINY
from tests.models.make_smollm2_answers import overlap
from tests.models.test_families import largest_difference

FILE = Path(__file__).resolve().parents[2] / "docs" / "results" / "parity.json"

# The published gates that each press reads, and which heads compete.
GATED = {
    "kvzap": (("kvzap-linear", "head"), ("kvzap-mlp", "head")),
    "dms": (("kvzap-mlp", "threshold"),),
    "fast_kvzip": (("fast-kvzip", "model"), ("fast-kvzip", "layer")),
}


def compared(found: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
    """Count the rows of two masks that are equal; the overlap is the smallest of a row's."""
    shares = overlap(found, expected)
    return {"sets": shares.size, "equal": int((shares == 1).sum()), "overlap": round(float(shares.min()), 4)}


def added(*parts: dict[str, Any]) -> dict[str, Any]:
    """Join counts of one press at several budgets."""
    sums = {name: sum(part[name] for part in parts) for name in ("sets", "equal")}
    return sums | {"overlap": min(part["overlap"] for part in parts)}


def tiny() -> dict[str, Any]:
    """Compare with kvpress in the tiny model of tests/models/kvpress."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for (press, budget), policy in test_kvpress.CASES.items():
        expected = test_kvpress.fixture()[f"{press}/{budget}/kept"]
        if press == "simlayer":  # which measures, so that the run must evict
            tokens = test_kvpress.fixture()["tokens"][None]
            settings = dict(policy=policy, budget=budget, block=64, when="prompt")
            cache, _ = models.prefill(test_kvpress.model(), tokens, **settings)
            found = test_kvzip.kept(cache, tokens.shape[1])[:, 0]
        else:
            found = test_kvpress.kept_by(policy, budget)
        parts.setdefault(press, []).append(compared(found, expected))
    sets = itertools.product(test_kvzip.COMPETE, KEPT[TINY])
    parts["kvzip"] = [compared(*test_kvzip.kept_sets(*given)) for given in sets]
    parts["lukv"] = [compared(*test_kvpress.budgeted(kept)) for kept in test_kvpress.KEPT]
    parts["decoding"] = [compared(*test_kvpress.decoded(press)) for press in test_kvpress.DECODING]
    asked = make_restorekv.KEPT
    parts["restorekv"] = [compared(*test_restoring.sets(test_restoring.prefilled(kept), kept)) for kept in asked]
    for press, file in (("kvzip_plus", PLUS), ("kvgrad", GRADIENT)):
        asked = [(scope, *KEPT[file], file) for scope in test_kvzip.COMPETE]
        parts[press] = [compared(*test_kvzip.kept_sets(*given)) for given in asked]
    for press, scopes in GATED.items():
        parts[press] = [compared(*test_gates.kept_by(*scope)[:2]) for scope in scopes]
    return {press: added(*some) for press, some in parts.items()}


def values() -> dict[str, Any]:
    """Return the largest difference of a merged value from kvpress' MergingPress, and from CAMPress without draws."""
    found = {"merge": (test_kvpress.merged(), "merged"), "cam": (test_kvpress.shared(test_kvpress.T), "shared")}
    fixture = test_kvpress.fixture()
    return {name: float(f"{abs(ours - fixture[theirs]).max():.1g}") for name, (ours, theirs) in found.items()}


def families() -> dict[str, Any]:
    """Return the largest difference of a logit from transformers', by golden file, beside the largest logit."""
    found = {}
    for name, lengths in MODELS.items():
        model, _ = models.load(GOLDEN / name)
        (architecture,) = json.loads((GOLDEN / name / "config.json").read_text())["architectures"]
        stem, _, task = architecture.partition("For")
        config = f"{stem}{'Text' if stem[:6] in ('Gemma3', 'Gemma4') and task == 'CausalLM' else ''}Config"
        error = max(largest_difference(model, name, row) for row in range(len(lengths)))
        golden = np.load(GOLDEN / name / "golden.npz")
        largest = max(float(abs(golden[f"logits_{row}"]).max()) for row in range(len(lengths)))
        found[name] = {"config": config, "error": float(f"{error:.2g}"), "largest": float(f"{largest:.2g}")}
    return found


def main() -> None:
    """Run the comparisons, and write the file."""
    data = {
        "command": "python -m tests.models.measure_parity",
        "versions": {"kvjax": kvjax.__version__, "kvpress": "0.5.5", "transformers": "5.2.0, 5.24.0"},
        "tiny": tiny(),
        "values": values(),
        "families": families(),
    }
    lines = []
    for name, part in data.items():
        if isinstance(part, dict) and name != "versions":
            rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in part.items())
            lines.append(f"{json.dumps(name)}: {{\n{rows}\n}}")
        else:
            lines.append(f"{json.dumps(name)}: {json.dumps(part)}")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
