"""Training a scorer: targets are those of the definition, the loss falls, and what is saved is read."""

import dataclasses
import json

import numpy as np
import pytest
from flax import nnx

import kvjax
import models
from tests.models import reference
from tests.models.test_kvzip import in_order, slots_of
from tests.models.tiny import CONFIG, SLIDING, decoder
from tests.tiers import matrix
from train import loop
from train import scorer as trainer
from train.scorer import Settings, measure, train
from train.text import Corpus

SETTINGS = Settings(tokens=30 * 4 * 16, seq_len=16, batch=4, lr=0.02)
PROMPT = kvjax.RepeatPrompt(first=(3, 5))


def rows(position):
    index = position["row"] if position else 0
    while True:
        yield np.random.default_rng(index).integers(0, 64, 16).astype(np.int32), {"row": index + 1}
        index += 1


def corpus():
    return Corpus(["numbers"], rows, np.stack([next(rows({"row": 1000 + i}))[0] for i in range(2)]))


def run(folder, model, kind, settings=SETTINGS, **options):
    options = loop.Options(**dict(save_every=10, eval_every=0, log_every=1) | options)
    config = models.ScorerConfig.of(CONFIG, 8, kind)
    return train(folder, model, config, corpus(), settings, prompt=PROMPT, options=options)


@matrix
@pytest.mark.parametrize(("target", "config"), [("kvzip", SLIDING), ("kvgrad", CONFIG)])
def test_the_target_is_the_score_of_the_policy(target, config):
    model, tokens = decoder(config), np.random.default_rng(0).integers(0, 64, (2, 17))  # in buffers of 18
    policy = trainer.policy_of_target(target, PROMPT)
    cache = models.prefill(model, tokens, policy=policy, budget=17, when="prompt").cache
    raw = in_order(cache, slots_of(cache, lambda own: own.state.score), 17, 0)
    expected = raw if target == "kvzip" else raw / (raw + np.quantile(raw, 0.9, axis=(0, 2, 3), keepdims=True))
    np.testing.assert_allclose(trainer.scores_of(model, tokens, policy).swapaxes(2, 3), expected, rtol=1e-5)


@matrix
@pytest.mark.parametrize(("kind", "size"), [("scorer", 282), ("gate", 1844)])
def test_the_loss_falls_and_the_folder_loads(model, tmp_path, kind, size):
    whole, summary = run(tmp_path, model, kind)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    curve = [line["loss"] for line in lines if "loss" in line]
    assert len(curve) == 30 and np.mean(curve[-5:]) < 0.8 * curve[0]
    loaded = models.load_network(tmp_path, model)
    for name in loaded.config.shapes:
        assert np.array_equal(getattr(whole, name)[...], getattr(loaded, name)[...]), name
    assert summary["figures"]["hit_rate"] > 0.3 and summary["parameters"] == 2 * size
    found = measure(model, whole, corpus().held_out, 0.3, trainer.target_of(model, "kvzip", PROMPT))
    assert summary["layers"]["hit_rate"] == found["hit_rate"].round(6).tolist()
    generated = models.generate(
        model, corpus().held_out, policy="zap@uniform", budget=6, block=8, networks=loaded, max_new_tokens=2
    )
    assert generated.cache.num_live.max() == 6


def counted(tokens):
    """Return a target without scores, of whose rows all tokens count but the last."""
    return lambda row: trainer.Scored(row, np.zeros(0), np.arange(tokens)[None] < tokens - 1)


def test_a_scorer_that_knows_the_scores_is_measured_as_perfect(model, monkeypatch):
    own = models.Scorer(models.ScorerConfig.of(CONFIG, 0), rngs=nnx.Rngs(0))
    scores = np.random.default_rng(0).normal(size=(2, 1, 16, 2))
    monkeypatch.setattr(trainer, "_predicted_and_true", lambda *given: (scores, scores))
    found = measure(model, own, corpus().held_out, 0.5, counted(16))
    assert found["hit_rate"].tolist() == [1, 1] and found["error"].tolist() == [0, 0]
    monkeypatch.setattr(trainer, "_predicted_and_true", lambda *given: (-scores, scores))
    assert measure(model, own, corpus().held_out, 0.2, counted(16))["hit_rate"].tolist() == [0, 0]


def test_figures_of_a_scorer_are_those_by_hand(model, monkeypatch):
    """Of ten tokens a head keeps two, and the row's last one does not count; a layer's figures are over its heads."""
    own = models.Scorer(models.ScorerConfig.of(CONFIG, 0), rngs=nnx.Rngs(0))
    rising, falling = [*range(10), 99], [*range(9, -1, -1), 99]
    half, other_half = [0, 1, 2, 3, 4, 5, 9, 7, 8, 6, -9], [9, 0, 7, 6, 5, 8, 3, 2, 1, 4, -9]  # each finds one of two
    true = np.array([[rising, falling], [rising, falling]], float).swapaxes(1, 2)[:, None]  # [L, 1, T, K]
    predicted = np.array([[half, other_half], [rising, other_half]], float).swapaxes(1, 2)[:, None]
    monkeypatch.setattr(trainer, "_predicted_and_true", lambda *given: (predicted, true))
    found = measure(model, own, corpus().held_out, 0.2, counted(11))
    assert found["hit_rate"].tolist() == [(1 / 2 + 1 / 2) / 2, (1 + 1 / 2) / 2]
    errors = (predicted - true)[:, 0, :10] ** 2
    np.testing.assert_allclose(found["error"], [np.mean(one) for one in errors])
    np.testing.assert_allclose(found["explained"], [1 - np.mean(one) / np.var(np.arange(10)) for one in errors])


@matrix
def test_the_command_trains(tmp_path, capsys):
    config = dataclasses.replace(CONFIG, vocab_size=1536, bos=0, eos=(1,), max_positions=128)
    tokenizer = models.load("retriever")[1]
    models.save(tmp_path / "model", reference.decoder(config), tokenizer.backend)
    arguments = ["--model", tmp_path / "model", "--data", "python", "--seq-len", 16, "--batch", 2, "--tokens", "96"]
    arguments += ["--out", tmp_path / "out", "--eval-rows", 2, "--eval-every", 0, "--hidden", 0]
    assert trainer.main([str(argument) for argument in arguments]) == 0
    assert "target kvzip" in capsys.readouterr().out
    assert models.load_network(tmp_path / "out", models.load(tmp_path / "model")[0]).config.hidden == 0


@matrix
def test_a_gate_is_trained_further_by_what_answers_feel(tmp_path, capsys):
    config = dataclasses.replace(CONFIG, vocab_size=1536, bos=0, eos=(1,), max_positions=128)
    tokenizer = models.load("retriever")[1]
    models.save(tmp_path / "model", reference.decoder(config), tokenizer.backend)
    model = models.load(tmp_path / "model")[0]
    gate = models.Scorer(models.ScorerConfig.of(config, 4, "gate"), rngs=nnx.Rngs(0))
    models.save_network(tmp_path / "gate", gate, model, "tiny")
    rows = [{"prompt": f"The code of the door is {i}. The code?", "answer": f" {i}"} for i in range(10, 40)]
    (tmp_path / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--model", tmp_path / "model", "--network", "gate", "--target", "asked", "--seq-len", 64]
    arguments += [
        "--eval-rows",
        2,
        "--eval-every",
        0,
        "--log-every",
        1,
        "--tokens",
        12 * 64,
        "--lr",
        0.02,
        "--out",
        tmp_path / "out",
    ]
    whole = [*arguments, "--data", tmp_path / "qa.jsonl", "--begin", tmp_path / "gate"]
    assert trainer.main([str(argument) for argument in whole]) == 0
    assert "target asked" in capsys.readouterr().out
    found = models.load_network(tmp_path / "out", model)
    assert found.config.hidden == 4 and not np.array_equal(found.key[...], gate.key[...])
    lines = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    curve = [line["loss"] for line in lines if "loss" in line]
    assert curve[-1] < curve[0]
    assert trainer.main([str(argument) for argument in [*arguments, "--data", "python"]]) == 2
    assert "JSON lines with prompt and answer" in capsys.readouterr().err
