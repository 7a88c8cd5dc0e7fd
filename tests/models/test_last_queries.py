"""ReST-KV and DefensiveKV: their authors' scores of a prompt (file: make_last_queries.py), and windows cut short."""

import functools

import numpy as np
import pytest

from tests.models.make_kvpress import KEPT
from tests.models.make_last_queries import FILE, STEP, WINDOW
from tests.models.test_kvpress import scores_of
from tests.tiers import first

POLICIES = {
    "wide": f"restkv(window={WINDOW},step={STEP})",
    "defensive": f"defensive(window={WINDOW})",
    "window": f"restkv(window={WINDOW})",
    "query": f"restkv(window={WINDOW},per='query')",
}


@functools.cache
def fixture():
    with np.load(FILE) as arrays:
        return dict(arrays)


@pytest.mark.parametrize("name", first(2, POLICIES))
def test_scores_are_those_of_the_authors(name):
    for budget in KEPT:
        expected = fixture().get(name, fixture().get(f"{name}/{budget}"))
        found = scores_of(POLICIES[name], budget)
        assert np.isposinf(found[..., -WINDOW:]).all()
        near = 1e-3 if name == "query" else 1e-4  # in both codes 1 - a loses digits of a query's weight
        np.testing.assert_allclose(found[..., :-WINDOW], expected, rtol=near)
