"""`python -m evals regret` on a tiny model: what it measures, and that a killed run goes on."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from evals import best_tokens, regret, run_settings, statistics
from evals.__main__ import main
from tests.tiers import matrix

FLAGS = "regret --length 160 --facts 2 --samples 2 --layers 2 --policies tova,sage(heads='query') --budget 40"
FLAGS += " --block 64 --question unknown --exact 6 --nodes 0"


@matrix
def test_a_policy_is_measured_against_the_best_and_a_finished_run_is_read_again(run_eval, tiny_folder, tmp_path):
    flags = [*FLAGS.split(), "--model", str(tiny_folder), "--out", str(tmp_path / "runs")]
    found, told = run_eval(*flags)
    rows = {(row["question"], row["policy"]): row for row in found["results"]}
    assert len(rows) == 4 and found["layers"] == [0, 2]
    for (question, policy), row in rows.items():
        assert row["samples"] == 2 and np.shape(row["heads"]) == (2, 2, 3)
        assert row["low"] <= row["regret"] <= row["high"]
        assert np.mean(row["layers"]) == pytest.approx(row["regret"])
        if policy == "recency":  # one set per KV head, no larger than the best's
            assert np.min(np.array(row["heads"])[..., 0]) >= -1e-6, (question, policy)
    exact = rows["unknown", "best"]["exact"]
    assert all(case["tokens"] == 6 and case["lower"] == pytest.approx(case["error"]) for case in exact)
    assert "certified gap of the best found" in told
    records = (tmp_path / "runs" / "samples.jsonl").read_bytes()
    again, _ = run_eval(*flags)
    assert again["results"] == found["results"] and (tmp_path / "runs" / "samples.jsonl").read_bytes() == records


def test_masks_say_which_tokens_each_query_head_reads(tiny):
    model = tiny[0]
    tokens = np.arange(40) % 30 + 3
    names = ("recency", "streaming(sinks=4)", "key_norm")
    settings = [run_settings.Setting(name, 10, "prompt", "known") for name in names]
    kept = regret.held_tokens(model, tokens, settings, [0, 2], width=48, block=16)
    own, other = kept[settings[2]][:, :2], kept[settings[2]][:, 2:]  # query heads of two KV heads
    assert all((heads == heads[:, :1]).all() and heads.sum() == 2 * 2 * 10 for heads in (own, other))
    assert (own != other).any()
    for setting, first in zip(settings[:2], (0, 4), strict=True):
        expected = np.zeros(48, bool)
        expected[:first] = expected[40 - (10 - first) : 40] = True
        np.testing.assert_array_equal(kept[setting], np.broadcast_to(expected, (2, 4, 48)))


def test_padding_changes_no_error():
    rng = np.random.default_rng(0)
    logits, value = rng.normal(size=(2, 2, 3, 9)), rng.normal(size=(2, 9, 4))
    kept = rng.random((1, 2, 2, 7)) < 0.5
    small = regret.make_heads(logits, value, 7, None, width=7, queries=3)
    large = regret.make_heads(logits, value, 7, None, width=12, queries=5)
    wider = np.pad(kept, ((0, 0), (0, 0), (0, 0), (0, 5)))
    np.testing.assert_allclose(regret.errors(small, kept), regret.errors(large, wider), rtol=1e-12)
    np.testing.assert_allclose(small.energy, large.energy, rtol=1e-12)


def test_rank_correlation_with_ties_is_pearsons_of_mean_ranks():
    a, b = [3.0, 1.0, 1.0, 2.0, 5.0], [2.0, 2.0, 1.0, 4.0, 5.0]
    expected = np.corrcoef([4, 1.5, 1.5, 3, 5], [2.5, 2.5, 1, 4, 5])[0, 1]
    assert statistics.rank_correlation(a, b) == pytest.approx(expected)
    assert np.isnan(statistics.rank_correlation([1, 1], [1, 2]))


def test_regret_is_relative_to_each_layers_outputs_and_mass_to_the_queries_that_count():
    run = SimpleNamespace(layers=[0, 1])
    found = regret._Run.relative(run, np.array([1.0, 2, 3, 4]), np.array([10.0, 20, 4, 10]))
    assert found == pytest.approx((3 / 30 + 7 / 14) / 2)
    weights = np.zeros((2, 1, 3, 4))  # of two heads, and three queries, of which the last is padding
    weights[:, 0, :2] = [[0.5, 0.2, 0.1, 0], [0.1, 0.3, 0, 0.4]]
    kept = np.array([[[True, True, False, False]], [[False, True, False, True]]])
    heads = regret.Heads(best_tokens.Case(weights, None, None), 4)
    found = regret._Run.mass(run, heads, kept, slice(3, 5))
    assert found == pytest.approx([1 - (0.1 + 0.4) / 2, 1 - (0.5 + 0.1 + 0.1) / 2])


def test_a_policy_s_regret_is_its_heads_errors_beyond_the_best_s_by_layer():
    def record(policy, sample, errors, **more):
        about = dict(model="m", budget=8, when="prompt", question="known", length=64, mass=0.5)
        return about | dict(policy=policy, sample=sample, errors=errors, **more)

    energy = [10.0, 30.0, 4.0, 4.0]
    best = [record("best", sample, [1.0, 1.0, 0.0, 1.0], energy=energy) for sample in (0, 1)]
    own = [record("tova", 0, [3.0, 1.0, 2.0, 1.0]), record("tova", 1, [1.0, 5.0, 0.0, 1.0])]
    late = [record("tova", 2, [99.0] * 4)]  # of a prompt whose best is not known yet
    lines = {r["policy"]: r for r in regret.summarise([*best, *own, *late], [0, 5])}
    np.testing.assert_allclose(lines["tova"]["layers"], [(2 / 40 + 4 / 40) / 2, (2 / 8 + 0) / 2])
    assert lines["tova"]["regret"] == pytest.approx(np.mean(lines["tova"]["layers"])) and lines["tova"]["samples"] == 2
    np.testing.assert_allclose(lines["best"]["layers"], [2 / 40, 1 / 8])


def test_the_search_starts_from_the_best_choice_that_fits(monkeypatch):
    """Of two heads with one query head: all tokens do not fit; of the others the second, then the first is best."""
    tried = np.array([[[1, 1, 0, 0], [0, 1, 0, 1]], [[0, 0, 1, 1], [1, 0, 1, 0]], [[1, 1, 1, 1]] * 2], bool)[:, :, None]
    monkeypatch.setattr(regret, "errors", lambda heads, kept: np.array([[3.0, 1.0], [2.0, 4.0], [0.0, 0.0]]))
    monkeypatch.setattr(regret, "_search", lambda cases, budget, starts: starts[:, 0])
    heads = regret.Heads(best_tokens.Case(np.zeros((2, 1, 1, 4)), np.zeros((2, 1, 4, 1)), np.zeros((2, 1, 1, 1))), 4)
    assert regret.search(heads, 2, tried).tolist() == [tried[1, 0, 0].tolist(), tried[0, 1, 0].tolist()]
    assert regret.search(heads, 1, tried).tolist() == [[True, False, False, False]] * 2  # where none fits, the first


def test_recall_is_correlated_with_small_regret():
    lines = [
        dict(model="m", question="known", policy=name, regret=regret, layers=[regret, 1.0 + mass], mass=mass)
        for name, regret, mass in (("a", 0.3, 0.1), ("b", 0.1, 0.2), ("c", 0.2, 0.4), ("d", 9.0, 0.0))
    ]
    recall = {("known", name): score for name, score in (("a", 0.2), ("b", 0.9), ("c", 0.5))}
    (told,) = regret._correlations(lines, recall)
    assert (told["policies"], told["regret"], told["mass"]) == (3, pytest.approx(1), pytest.approx(0.5))
    assert told["layers"] == pytest.approx([1, -0.5])


@pytest.mark.bad_input
def test_recall_comes_from_a_studys_file(tmp_path, capsys):
    path = tmp_path / "study.json"
    row = {"question": "known", "policy": "tova", "model": "retriever", "budget": 0.25, "score": 0.5}
    path.write_text(json.dumps({"results": [row]}))
    assert regret.read_recall(path, "retriever", 0.25) == {("known", "tova"): 0.5}
    assert main(["regret", "--recall", str(path), "--budget", "0.5"]) == 2
    assert "has no recall of 'retriever' at a budget of 0.5" in capsys.readouterr().err
    path.write_text("[]")
    assert main(["regret", "--recall", str(path)]) == 2
    assert "is no JSON file of a study" in capsys.readouterr().err
