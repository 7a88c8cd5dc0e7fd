"""Training a gate of retention: the parts of its loss, that it falls, and what is saved is read."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import models
from tests.models import reference
from tests.models.tiny import CONFIG, decoder
from tests.tiers import matrix
from tests.train.test_scorer import corpus
from train import loop, retention
from train.retention import Settings

MEMORY, T = 4, 16
SETTINGS = Settings(tokens=30 * 4 * T, seq_len=T, batch=4, lr=0.02, memory=MEMORY, bias=3.0)


def gate(bias):
    """One that predicts the same share for every token."""
    shape = models.ScorerConfig.of(CONFIG, 4, "retention")
    made = {name: np.zeros(size, np.float32) for name, size in shape.shapes.items()}
    return models.RetentionGate(shape, jax.device_put(made | {"output_bias": made["output_bias"] + bias}))


@matrix
def test_the_loss_of_a_gate_that_keeps_all_is_that_of_the_text_and_of_what_is_too_much():
    tokens = corpus().held_out
    found = jax.jit(retention.losses_of, static_argnums=3)(decoder(), gate(40.0), tokens, MEMORY)
    _, hidden = models.hidden_states(decoder(), tokens, policy=None)
    logits = np.asarray(decoder().logits(hidden), np.float64)[:, :-1]
    chosen = np.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    assert abs(found.divergence) < 1e-6
    np.testing.assert_allclose(found.text, (np.log(np.exp(logits).sum(axis=-1)) - chosen).mean(), rtol=1e-5)
    number = np.arange(1, T + 1)
    np.testing.assert_allclose(found.over, np.maximum(number - MEMORY, 0).mean() / (T - MEMORY), rtol=1e-5)
    np.testing.assert_allclose(found.held, 2 * [number[MEMORY:].mean()], rtol=1e-5)


@matrix
def test_a_gate_that_forgets_holds_what_a_geometric_series_sums_to():
    found = jax.jit(retention.losses_of, static_argnums=3)(decoder(), gate(0.0), corpus().held_out, MEMORY)
    np.testing.assert_allclose(found.held, 2 * [np.mean([2 - 0.5**n for n in range(MEMORY, T)])], rtol=1e-5)
    assert found.over == 0 and found.divergence > 1e-4


@matrix
def test_the_loss_falls_and_the_folder_loads(model, tmp_path):
    options = loop.Options(save_every=10, eval_every=0, log_every=1)
    config = models.ScorerConfig.of(CONFIG, 8, "retention")
    whole, summary = retention.train(tmp_path, model, config, corpus(), SETTINGS, options=options)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    curve = [line["loss"] for line in lines if "loss" in line]
    assert len(curve) == 30 and np.mean(curve[-5:]) < np.mean(curve[:5])
    loaded = models.load_network(tmp_path, model)
    for name in loaded.config.shapes:
        assert np.array_equal(getattr(whole, name)[...], getattr(loaded, name)[...]), name
    assert summary["figures"]["over"] < 0.25 and len(summary["layers"]["held"]) == 2
    assert "tokens of a memory of 4" in retention.table(summary)


@matrix
def test_the_command_trains(tmp_path, capsys):
    config = dataclasses.replace(CONFIG, vocab_size=1536, bos=0, eos=(1,), max_positions=128)
    models.save(tmp_path / "model", reference.decoder(config), models.load("retriever")[1].backend)
    arguments = ["--model", tmp_path / "model", "--data", "python", "--seq-len", 16, "--batch", 2, "--tokens", "96"]
    arguments += ["--out", tmp_path / "out", "--eval-rows", 2, "--eval-every", 0, "--hidden", 4, "--memory", 4]
    assert retention.main([str(argument) for argument in arguments]) == 0
    assert "tokens of a memory of 4" in capsys.readouterr().out
    assert models.load_network(tmp_path / "out", models.load(tmp_path / "model")[0]).name == "retention"
    arguments[arguments.index("--memory") + 1] = 16
    assert retention.main([str(argument) for argument in arguments]) == 2
    assert "--memory is 16 for rows of 16 tokens" in capsys.readouterr().err


def test_settings_that_forget_nothing_are_refused():
    with pytest.raises(ValueError, match="--memory is 1024 for rows of 1024 tokens"):
        retention.settings_of(dataclasses.replace(CONFIG, max_positions=4096), memory=1024)
    with pytest.raises(ValueError, match="--over is -1"):
        retention.settings_of(dataclasses.replace(CONFIG, max_positions=4096), over=-1.0)
