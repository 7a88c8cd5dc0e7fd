"""Peaks and speeds of prompts in a cache of fixed size."""

import models
from benchmarks import fixed_memory
from tests.models import reference

CONFIG = models.Config(64, 32, 64, num_layers=1, num_heads=2, num_kv_heads=1, max_positions=256)


def test_under_a_budget_the_peak_is_the_same_for_all_prompts():
    model = reference.decoder(CONFIG)
    found = fixed_memory.measurements(
        model, ["full", "recency"], ["block"], [(1, 64), (1, 128), (1, 512)], 64, models.Options(budget=16, block=8)
    )
    peaks = {name: [r.get("peak_bytes") for r in found if r["policy"] == name] for name in ("full", "recency")}
    assert peaks["full"][0] < peaks["full"][1] and peaks["full"][2] is None  # longer than the model's positions
    assert len(set(peaks["recency"])) == 1
    assert [r["seconds"] is not None for r in found] == [True] * 2 + [False] * 4
    lines = fixed_memory.table(found).splitlines()
    assert lines[2].split()[:2] == ["full", "1"] and "the model has 256" in lines[-1]
