"""`python -m evals regret` on a tiny model: what it measures, and that a killed run goes on."""

import json

import numpy as np
import pytest

from evals import regret, run_settings, statistics
from evals.__main__ import main

FLAGS = "regret --length 160 --facts 2 --samples 2 --layers 2 --policies tova,sage(heads='query') --budget 40"
FLAGS += " --block 64 --question unknown --exact 6 --nodes 0"


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
            assert np.min(row["heads"]) >= -1e-6, (question, policy)
    exact = rows["unknown", "best"]["exact"]
    assert all(case["tokens"] == 6 and case["lower"] == pytest.approx(case["error"]) for case in exact)
    assert "certified gap of the best found" in told
    records = (tmp_path / "runs" / "samples.jsonl").read_bytes()
    again, _ = run_eval(*flags)
    assert again["results"] == found["results"] and (tmp_path / "runs" / "samples.jsonl").read_bytes() == records


def test_masks_say_which_tokens_each_query_head_reads(tiny):
    model = tiny[0]
    tokens = np.arange(40) % 30 + 3
    settings = [run_settings.Setting(name, 10, "prompt", "known") for name in ("recency", "streaming(sinks=4)")]
    kept = regret.held_tokens(model, tokens, settings, [0, 2], width=48, block=16)
    for setting, first in zip(settings, (0, 4), strict=True):
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
