"""Our dense logits are those of transformers, for every architecture and rope scaling (files: make_golden.py)."""

import dataclasses

import jax
import numpy as np
import pytest

from models.load import load
from tests.models.make_golden import GOLDEN, MODELS
from tests.tiers import first

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


MISREADINGS = {
    "llama3": {"theta": 10_000.0},
    "llama_linear": {"type": "default"},
    "llama_dynamic": {"type": "default"},
    "llama_llama3": {"type": "default"},
    "llama_yarn": {"type": "default"},
    "llama_yarn_untruncated": {"truncate": True},
    "llama_yarn_attention_factor": {"attention_factor": None},
    "llama_yarn_mscale": {"mscale": None},
    "mistral": {"sliding_windows": (17, 17)},
    "qwen2": {"sliding_windows": (16, 16, 16)},
    "qwen2_layer_types": {"sliding_windows": (None, 16)},
    "qwen3_sliding": {"sliding_windows": (None, None)},
    "smollm3": {"ropes": ()},
    "smollm3_sliding": {"sliding_windows": (None, None)},
    "granite": {"residual_multiplier": 1.0},
    "phi3": {"sliding_windows": (None,)},
    "phi4_mini": {"attention_factor": 1.0},
    "qwen3_moe": {"normalise_experts": False},
    "qwen3_moe_sliding": {"experts_per_token": 2},
    "qwen3_moe_mixed": {"dense_sizes": (None, 20, 20, 20, 20, None)},
    "gemma2": {"attention_soft_cap": None},
    "gemma3": {"ropes": ()},
}


@pytest.mark.parametrize("name", first(0, MISREADINGS))
def test_golden_file_would_show_a_misread_config(name):
    model, _ = load(GOLDEN / name)
    change = MISREADINGS[name]
    if hasattr(model.config.rope, next(iter(change))):
        change = {"rope": dataclasses.replace(model.config.rope, **change)}
    model.config = dataclasses.replace(model.config, **change)
    last_row = len(MODELS[name][2]) - 1
    assert largest_difference(model, name, last_row) > 1e-2


def test_golden_files_are_small():
    assert sum(file.stat().st_size for file in GOLDEN.rglob("*") if file.is_file()) < 3_000_000
