"""Training the predictor: its loss and figures, a run that is killed or spread over devices, and bad input."""

import dataclasses
import json
import re
import shlex
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from kernels_pallas import cache_attention, mse_logits
from models.butler import Butler, butler_input
from tests.models import reference, tiny
from tests.tiers import first, matrix
from train import butler as trainer
from train import loop
from train.butler import Settings, butler_config_of, loss_of, measure, settings_of

CONFIG = tiny.config(num_layers=3)  # two layers are predicted


@pytest.fixture
def small(tmp_path, model):
    """A folder with a small model, and the shipped tokenizer."""
    config = dataclasses.replace(CONFIG, vocab_size=1536, bos=0, eos=(1,))
    tokenizer = models.load("retriever")[1]
    models.save(tmp_path / "model", reference.decoder(config), tokenizer.backend)
    return tmp_path / "model"


def parameters_of(butler):
    return {name: np.asarray(getattr(butler, name)[...]) for name in butler.config.shapes}


@pytest.mark.parametrize(("source", "causal"), first(1, [("attention_input", True), ("layer0_output", False)]))
def test_the_loss_is_the_mean_of_the_layers_losses_and_teaches_every_parameter(model, source, causal):
    config = dataclasses.replace(butler_config_of(CONFIG, hidden=16), source=source)
    parameters = parameters_of(Butler(config, rngs=nnx.Rngs(0)))
    tokens = np.random.default_rng(0).integers(0, 64, (2, 12))
    position = np.broadcast_to(np.arange(12), tokens.shape)

    def attend(carry, layer, window, query, key, value):
        key_position = jnp.broadcast_to(position[:, None], (2, 2, 12))
        cached = key.swapaxes(1, 2), value.swapaxes(1, 2), key_position, position
        return cache_attention(query, *cached)[0], carry, (query, key)

    @jax.jit
    def found_and_expected(model, parameters):
        of_query, of_key = Butler(config, parameters)(butler_input(model, tokens, source=source))
        _, _, (query, key) = model.run(jnp.asarray(tokens), position, jnp.full(2, 12), attend, None)
        layers = [mse_logits(query[i], key[i], of_query[i - 1], of_key[i - 1], causal=causal) for i in (1, 2)]
        found = jax.value_and_grad(lambda own: loss_of(model, Butler(config, own), tokens, causal=causal))(parameters)
        return found, layers

    (loss, gradients), layers = found_and_expected(model, parameters)
    assert loss == pytest.approx(np.mean(layers), rel=1e-5)
    assert all(np.abs(gradient).max() > 0 for gradient in gradients.values())


def test_figures_are_those_of_a_brute_force_reading(model):
    butler = Butler(butler_config_of(CONFIG, hidden=16), rngs=nnx.Rngs(0))
    rows = np.asarray(jax.random.randint(jax.random.key(5), (2, 9), 0, 64))
    found = measure(model, butler, rows, "streaming", 0.5)
    true = trainer.simulator.last_logits(model, rows)  # [L, B, N, T]
    best = np.argsort(-np.asarray(true), axis=-1)[..., :5]
    assert found["token_accuracy"].tolist() == pytest.approx((best >= 4).mean((1, 2, 3))[1:].tolist())


def test_published_settings():
    llama = models.Config(128, 2048, 64, num_layers=16, num_heads=32, num_kv_heads=8, max_positions=8192)
    assert settings_of(llama) == Settings(80_000_000, 2048, 1, 1e-3, 0.1, 20.0, 0.01, 0, False)
    published = butler_config_of(llama)
    assert (published.hidden, published.dim, published.published_layout) == (512, 16, True)
    wide = dataclasses.replace(llama, hidden_size=4096)
    assert settings_of(wide).seq_len == 1024
    rate = jax.jit(loop.rate_schedule(Settings(tokens=1000 * 2048)))
    assert [float(rate(step)) for step in (50, 100, 1000)] == pytest.approx([5e-4, 1e-3, 0])


def test_the_embedded_models_predictor_fits_its_file():
    config = models.load("retriever")[0].config
    assert 4 * butler_config_of(config, embedded=True).num_parameters <= 4 * 2**20


def command(*arguments):
    return trainer.main([str(argument) for argument in arguments])


@matrix
def test_the_command_trains(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trainer, "BASELINES", ("oracle",))
    arguments = ["--model", small, "--data", "python", "--seq-len", 16, "--batch", 2, "--tokens", "96", "--out"]
    assert command(*arguments, tmp_path / "out", "--eval-rows", 2, "--eval-every", 0, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 3 and summary["data"]["names"] == ["python"] and summary["figures"]["oracle"]["mass"] > 0
    assert models.load_network(tmp_path / "out", models.load(small)[0]).config.num_layers == 3


@matrix
def test_ctrl_c_ends_the_command_with_the_line_that_resumes_it(small, tmp_path):
    arguments = ["--model", small, "--data", "python", "--seq-len", 16, "--batch", 2, "--tokens", 10**9]
    arguments += ["--save-every", 10**6, "--eval-rows", 2, "--eval-every", 0, "--out", tmp_path / "my out"]
    # A shell's background ignores Ctrl-C, and a child inherits that.
    start = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from train import butler, "
    start += "meter; meter.SECONDS = 0.0; "  # a line for each step
    line = [sys.executable, "-c", start + "sys.exit(butler.main(sys.argv[1:]))"]
    with subprocess.Popen([*line, *map(str, arguments)], stderr=subprocess.PIPE, text=True) as process:
        try:
            said = [next(text for text in process.stderr if "loss=" in text)]
            process.send_signal(signal.SIGINT)
            said += process.stderr.read().splitlines()
        finally:
            process.kill()
    assert process.returncode == 130, said
    step, path, resume = re.fullmatch(
        r"train.butler: interrupted; the checkpoint of step (\d+) is (.+)\. To resume: python -m train.butler (.+)",
        said[-1],
    ).groups()
    assert path == str(tmp_path / "my out" / "checkpoints" / step) and (tmp_path / "my out" / "log.jsonl").exists()
    stop = ["--stop-after", str(int(step) + 1)]
    again = subprocess.run([*line, *shlex.split(resume), *stop], capture_output=True, text=True, check=True)
    assert f"resuming from the checkpoint of step {step}." in again.stderr
