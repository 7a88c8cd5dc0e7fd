"""A learned scorer's folder is read by every evaluation that runs policies."""

import json

import pytest
from flax import nnx

import models
from evals.__main__ import main
from tests.tiers import first, nightly

SIZES = {
    "perplexity": ["--budgets", "32", "--chunk", "64", "--sequences", "1"],
    "fidelity": ["--budgets", "32", "--lengths", "200", "--samples", "1", "--batch", "1"],
    "needle": ["--budgets", "32", "--lengths", "200", "--samples", "1", "--depths", "1", "--batch", "1"],
}


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scorer")
    model, _ = models.load("retriever")
    made = models.Scorer(models.ScorerConfig.of(model.config), rngs=nnx.Rngs(0))
    models.save_scorer(folder, made, model, "retriever")
    return folder


@pytest.mark.parametrize("name", first(0, [*SIZES][:1]) + first(0, [*SIZES][1:], rest=nightly))
def test_a_scorer_is_read_and_named_in_the_figures(name, scorer, tmp_path, capsys):
    out = tmp_path / "out.json"
    given = [name, *SIZES[name], "--policies", "zap", "--block", "32"]
    assert main([*given, "--scorer", str(scorer), "--json", str(out)]) == 0, capsys.readouterr().err
    assert "scorer" in json.loads(out.read_text())["fingerprints"]
