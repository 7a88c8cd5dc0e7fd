"""Our dense logits are those of transformers, for every architecture and rope scaling (files: make_golden.py)."""

import jax
import numpy as np
import pytest

from models.load import load
from tests.models.make_golden import GOLDEN, MODELS

logits_of = jax.jit(lambda model, tokens: model(tokens))


def largest_difference(model, name, row=0):
    golden = np.load(GOLDEN / name / "golden.npz")
    logits = logits_of(model, golden[f"tokens_{row}"])
    return float(np.max(np.abs(np.asarray(logits) - golden[f"logits_{row}"])))


# Each family's logits are compared with the reference's in tests/campaign; here, those that differ in kind.
BY_DEFAULT = ("llama_yarn_mscale", "qwen3_sliding", "granite", "olmo2_bias", "qwen3_moe_mixed", "gemma3", "phi3")
ROWS = [(name, row) for name, (_, _, lengths) in MODELS.items() for row in range(len(lengths))]


@pytest.mark.parametrize(
    ("name", "row"),
    [pytest.param(*case, marks=() if case[0] in BY_DEFAULT and not case[1] else pytest.mark.matrix) for case in ROWS],
)
def test_logits_are_those_of_transformers(name, row):
    model, _ = load(GOLDEN / name)
    assert largest_difference(model, name, row) < 1e-4


def test_golden_files_are_small():
    assert sum(file.stat().st_size for file in GOLDEN.rglob("*") if file.is_file()) < 3_000_000
