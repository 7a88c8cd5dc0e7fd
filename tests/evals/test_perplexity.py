"""Perplexity against sparsity: what is computed, against NumPy, and what the command writes and refuses."""

import jax
import numpy as np
import pytest

import models
from evals import answering, perplexity, run_settings, selections, simulator, texts
from models.engine import logits_of
from tests.evals.conftest import TEXT
from tests.evals.test_ruler import tokenizer_of
from tests.models import reference
from tests.tiers import matrix


def setting(policy, budget, when="block"):
    return run_settings.Setting(policy, budget, when, "unknown", 0)


def test_chunks_begin_with_bos_and_leave_the_rest_out():
    tokenizer = tokenizer_of(lambda text: [ord(letter) for letter in text], bos=7)
    assert perplexity.make_chunks(tokenizer, "abcdefg", 3).tolist() == [[7, 97, 98], [7, 99, 100], [7, 101, 102]]
    assert perplexity.make_chunks(tokenizer, "abcdefg", 3, limit=1).tolist() == [[7, 97, 98]]
    tokenizer.bos = None
    assert perplexity.make_chunks(tokenizer, "abcd", 3).tolist() == [[97, 98, 99]]


def test_windows_slide_by_the_stride():
    tokenizer = tokenizer_of(lambda text: [ord(letter) for letter in text], bos=7)
    windows = perplexity.make_chunks(tokenizer, "abcdef", 5, stride=2)
    assert windows.tolist() == [[7, 97, 98, 99, 100], [7, 99, 100, 101, 102]]
    for stride in (0, 5):
        with pytest.raises(ValueError, match=f"the stride is {stride}; give 1 to 4"):
            perplexity.make_chunks(tokenizer, "abcdef", 5, stride=stride)


@pytest.fixture(scope="module")
def dense(tiny):
    """Chunks, and the plain model's log-probabilities after each of their tokens."""
    model, tokenizer, _ = tiny
    chunks = perplexity.make_chunks(tokenizer, TEXT, 24, limit=3, stride=8)
    logits = np.asarray(jax.jit(lambda tokens: model(tokens))(chunks), np.float64)
    return chunks, logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


@matrix
def test_the_loss_is_the_mean_over_the_tokens_that_count(tiny, dense):
    model, (chunks, told) = tiny[0], dense
    losses = -np.take_along_axis(told[:, :-1], chunks[:, 1:, None], axis=-1)[..., 0]
    found = perplexity.losses(model, chunks, batch=2)  # all but the first
    np.testing.assert_allclose(found.by_chunk, losses.mean(axis=1), rtol=1e-5)
    assert found.divergence.tolist() == [0, 0, 0]
    wanted = losses[:, -8:].mean(axis=1)  # of a window the last ones
    np.testing.assert_allclose(perplexity.losses(model, chunks, counted=8).by_chunk, wanted, rtol=1e-5)
    found = perplexity.policy_losses(model, chunks, setting("tova", 24), feed=answering.Feed(8, 4), counted=8)
    np.testing.assert_allclose(found.by_chunk, wanted, rtol=1e-5)


@pytest.mark.matrix
def test_the_divergence_is_that_of_the_full_caches_distributions(tiny, dense):
    model, (chunks, true) = tiny[0], dense
    full, true = perplexity.losses(model, chunks, batch=2, counted=8), true[:, -9:-1]
    found = perplexity.policy_losses(
        model, chunks, setting("h2o", 6, "prompt"), full=full, feed=answering.Feed(4, 2), counted=8
    )
    given = dict(policy="h2o", budget=6, block=4, when="prompt", question=7)
    hidden = models.hidden_states(model, chunks[:, :-1], **given).hidden
    told = np.asarray(logits_of(model, hidden), np.float64)[:, -8:]
    told -= np.log(np.sum(np.exp(told), axis=-1, keepdims=True))
    divergence = np.sum(np.exp(true) * (true - told), axis=-1).mean(axis=-1)
    np.testing.assert_allclose(found.divergence, divergence, rtol=1e-3, atol=1e-7)
    loss = -np.take_along_axis(told, chunks[:, -8:, None], axis=-1)[..., 0].mean(axis=1)
    np.testing.assert_allclose(found.by_chunk, loss, rtol=1e-5)
    assert found.divergence.min() > 1e-6


def test_once_needs_last_tokens_that_come_behind(tiny):
    model, tokenizer, _ = tiny
    chunks = perplexity.make_chunks(tokenizer, TEXT, 24, limit=1)
    with pytest.raises(ValueError, match="give --stride"):
        perplexity.policy_losses(model, chunks, setting("h2o", 8, "prompt"))


def test_caote_is_compared_with_the_same_policy_without_it():
    def row(policy, budget, losses, divergences):
        at = {"budget": budget, "when": "block", "evicts": ["block", 0]}
        return {"policy": policy, **at, "by_chunk": losses, "kl_by_chunk": divergences}

    without, other = row("h2o", 64, [1.0, 2.0], [0.3, 0.5]), row("h2o+caote", 128, [1.0, 1.0], [0.0, 0.0])
    rows = perplexity.compare_policies([without, row("h2o+caote", 64, [0.9, 1.9], [0.2, 0.4001]), other])
    assert [(r["policy"], r["against"], r["budget"]) for r in rows] == [("h2o+caote", "h2o", 64)]
    assert rows[0]["increase"] == pytest.approx(np.exp(-0.1) - 1)
    assert (rows[0]["kl_difference"], rows[0]["farther"]) == (pytest.approx(-0.09995), "no")


@pytest.mark.matrix
def test_rows_hold_the_dense_model_each_selection_and_intervals(tiny):
    model, tokenizer, butler = tiny
    chunks = perplexity.make_chunks(tokenizer, TEXT, 24, limit=4)
    chosen = selections.parse_selections("full,butler,random")
    dense, like = perplexity.losses(model, chunks), simulator.DENSE._replace(networks=butler)
    results = perplexity.measure(model, chunks, dense, chosen, [0.0, 0.5], like=like, batch=4)
    named = [(r["select"], r["sparsity"]) for r in results]
    assert named == [("full", 0.0), ("butler", 0.0), ("butler", 0.5), ("random", 0.0), ("random", 0.5)]
    full, none, half = results[0], results[1], results[2]
    assert (none["perplexity"], none["increase"], none["kl"]) == (full["perplexity"], 0, 0)
    assert 0 < half["kl_low"] < half["kl"] == pytest.approx(np.mean(half["kl_by_chunk"]))
    assert half["perplexity"] == pytest.approx(np.exp(np.mean(half["by_chunk"])))
    ratio = np.exp(np.mean(np.array(half["by_chunk"]) - np.array(full["by_chunk"])))
    assert half["increase"] == pytest.approx(ratio - 1)
    assert half["increase_low"] < half["increase"] < half["increase_high"]
    assert half["low"] < half["perplexity"] < half["high"]


def test_comparisons_are_paired_with_the_predictor_at_the_same_sparsity():
    def row(select, sparsity, losses):
        return {"select": select, "sparsity": sparsity, "by_chunk": losses, "kl_by_chunk": [0.1] * len(losses)}

    like, worse, other = [1.0, 2.0] * 3, [1.2, 2.2] * 3, [0.9, 2.1] * 3
    given = [row(select, sparsity, like) for select in ("full", "butler", "h2o") for sparsity in (0.0, 0.5)]
    given[-1] = row("h2o", 0.5, worse)
    rows = perplexity.compare([*given[:1], *given[2:], *(row("oracle", sparsity, other) for sparsity in (0.5, 0.7))])
    found = [(r["select"], r["sparsity"], r["larger"]) for r in rows]
    assert found == [("h2o", 0.5, "yes"), ("oracle", 0.5, "within noise")]
    assert rows[0]["increase"] == pytest.approx(np.exp(0.2) - 1)
    (alone,) = perplexity.compare([row("butler", 0.5, [1.0]), row("random", 0.5, [2.0])])
    assert alone["larger"] == "one chunk"


def test_the_command_writes_table_json_and_picture(tiny_folder, text_file, run_eval):
    flags = ["--model", str(tiny_folder), "--select", "butler,quest", "--sparsity", "0,0.5", "--text", str(text_file)]
    data, printed = run_eval("perplexity", *flags, "--chunk", "24", "--sequences", "4")
    assert (data["evaluation"], data["chunks"], data["settings"]["chunk"]) == ("perplexity", 4, 24)
    assert [r["select"] for r in data["results"]] == ["full", "butler", "butler", "quest", "quest"]
    assert [(c["select"], c["against"]) for c in data["comparisons"]] == [("quest", "butler")]
    for r in data["results"]:
        assert r["select"] in printed and f"{r['perplexity']:.3f}" in printed


def test_policies_have_a_table_of_their_own(tiny_folder, text_file, run_eval):
    flags = ["--model", str(tiny_folder), "--policies", "full,h2o+caote", "--against", "h2o", "--budgets", "0.5"]
    flags += ["--block", "8", "--when", "prompt", "--stride", "12"]
    data, printed = run_eval("perplexity", *flags, "--text", str(text_file), "--chunk", "24", "--sequences", "2")
    assert [r["select"] for r in data["results"]] == ["full"]
    assert [(r["policy"], r["budget"]) for r in data["policies"]] == [("h2o", 0.5), ("h2o+caote", 0.5)]
    assert [r["evicts"] for r in data["policies"]] == [["prompt", 0]] * 2
    assert "prompt, then never" in printed
    assert data["fingerprints"]["text"] == texts.digest(TEXT)
    dense = data["results"][0]["perplexity"]
    for r in data["policies"]:
        assert r["difference"] == pytest.approx(r["perplexity"] - dense)
        assert f"{r['difference']:+.3f}" in printed and f"{r['kl']:.4f}" in printed
    assert [(r["when"], r["budget"]) for r in data["policy_comparisons"]] == [("prompt", 0.5)]


@matrix
def test_a_scorer_is_read_and_named_in_the_figures(tiny, tiny_folder, text_file, tmp_path, run_eval):
    models.save_network(tmp_path, reference.scorer(tiny[0].config), tiny[0], "tiny")
    flags = ["--model", str(tiny_folder), "--text", str(text_file), "--chunk", "24", "--networks", str(tmp_path)]
    flags += ["--policies", "zap@uniform", "--budgets", "8", "--block", "8", "--sequences", "1"]
    assert "scorer" in run_eval("perplexity", *flags)[0]["fingerprints"]
