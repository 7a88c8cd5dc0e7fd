"""Training the predictor: its loss and figures, a run that is killed or spread over devices, and bad input."""

from __future__ import annotations

import dataclasses
import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from kernels_pallas import cache_attention, mse_logits
from models import butler as butler_module
from models.butler import Butler, butler_input, load_butler
from tests.models import reference
from tests.tiers import first, matrix, nightly
from train import butler as trainer
from train import loop
from train.butler import Settings, butler_config_of, loss_of, measure, settings_of, train
from train.text import Corpus

CONFIG = models.Config(64, 32, 48, num_layers=3, num_heads=4, num_kv_heads=2, max_positions=64)
SETTINGS = Settings(tokens=12 * 4 * 16, seq_len=16, batch=4, lr=0.02)


@pytest.fixture(scope="module")
def model():
    return reference.decoder(CONFIG, reference.parameters(CONFIG))


@pytest.fixture
def small(tmp_path, model):
    """A folder with a small model, and the shipped tokenizer."""
    config = dataclasses.replace(CONFIG, vocab_size=1536, bos=0, eos=(1,))
    tokenizer = models.load("retriever")[1]
    models.save(tmp_path / "model", reference.decoder(config, reference.parameters(config)), tokenizer.backend)
    return tmp_path / "model"


def parameters_of(butler):
    return {name: np.asarray(getattr(butler, name)[...]) for name in butler_module.parameter_shapes(butler.config)}


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
    true = trainer.selections.last_logits(model, rows)  # [L, B, N, T]
    best = np.argsort(-np.asarray(true), axis=-1)[..., :5]
    assert found["token_accuracy"].tolist() == pytest.approx((best >= 4).mean((1, 2, 3))[1:].tolist())


@nightly  # the loop spreads rows: test_finetune.py
def test_the_model_may_be_sharded_too(small):
    rows, settings, found = np.random.default_rng(0).integers(0, 64, (4, 16)), SETTINGS, []
    config = dataclasses.replace(butler_config_of(CONFIG, hidden=16, dim=8), dropout=0.1)
    for text in ("data=1,tensor=1", "data=2,tensor=2"):
        mesh = models.parse_mesh(text)
        state, step = trainer.init_state(config, settings, mesh), trainer.make_step(config, settings, mesh)
        _, *told = step(models.load(small, mesh=mesh)[0], state, loop.spread(rows, mesh), 0)
        found.append([float(value) for value in told])
    assert found[0] == pytest.approx(found[1], rel=1e-4)  # the loss and the gradient's norm


@nightly  # 120 steps of training
def test_the_loss_falls_and_the_folder_loads(model, tmp_path):
    def rows(position):  # repeated patterns, which attention of random weights can be predicted on
        for index in itertools.count(position["row"] if position else 0):
            pattern = np.random.default_rng(index).integers(0, 64, 5)
            yield np.resize(pattern, 16).astype(np.int32), {"row": index + 1}

    corpus = Corpus(["numbers"], rows, np.stack([row for row, _ in itertools.islice(rows({"row": 10_000}), 4)]))
    config = butler_config_of(model.config, hidden=16, dim=8)
    settings = SETTINGS._replace(tokens=120 * 64)
    butler, summary = train(tmp_path, model, config, corpus, settings, save_every=60, eval_every=60, log_every=1)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    curve = [line["loss"] for line in lines if "loss" in line]
    assert len(curve) == 120 and curve[-1] < 0.3 * curve[0]
    trained, loaded = (parameters_of(own) for own in (butler, load_butler(tmp_path, model)))
    assert all(np.array_equal(array, loaded[name]) for name, array in trained.items())
    figures = summary["figures"]
    assert figures["oracle"]["hit_rate"] == 1.0 and figures["butler"]["hit_rate"] > figures["random"]["hit_rate"] + 0.02
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert list((tmp_path / "events").iterdir())
    assert [line["step"] for line in lines if "held_out/hit_rate" in line] == [60, 120]


def test_published_settings():
    llama = models.Config(128, 2048, 64, num_layers=16, num_heads=32, num_kv_heads=8, max_positions=8192)
    assert settings_of(llama) == Settings(80_000_000, 2048, 1, 1e-3, 0.1, 20.0, 0.01, False, 0)
    published = butler_config_of(llama)
    assert (published.hidden, published.dim, published.published_layout) == (512, 16, True)
    wide = dataclasses.replace(llama, hidden_size=4096)
    assert settings_of(wide).seq_len == 1024
    rate = jax.jit(loop.rate_schedule(Settings(tokens=1000 * 2048)))
    assert [float(rate(step)) for step in (50, 100, 1000)] == pytest.approx([5e-4, 1e-3, 0])


def test_the_embedded_models_predictor_fits_its_file():
    config = models.load("retriever")[0].config
    assert 4 * butler_module.num_parameters(butler_config_of(config, embedded=True)) <= 4 * 2**20


def command(*arguments):
    return trainer.main([str(argument) for argument in arguments])


@matrix
def test_the_command_trains(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trainer, "BASELINES", ("oracle",))
    arguments = ["--model", small, "--data", "python", "--seq-len", 16, "--batch", 2, "--tokens", "96", "--out"]
    assert command(*arguments, tmp_path / "out", "--eval-rows", 2, "--eval-every", 0, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 3 and summary["data"]["names"] == ["python"] and summary["figures"]["oracle"]["mass"] > 0
    assert load_butler(tmp_path / "out", models.load(small)[0]).config.num_layers == 3


@nightly  # five processes, each of which compiles a whole run
def test_killed_is_uninterrupted_bit_for_bit(small, tmp_path):
    words = (
        "--data python --seq-len 16 --batch 2 --tokens 1280 --eval-rows 2 --eval-every 0 --save-every 1 --log-every 1"
    )
    command = [sys.executable, "-m", "train.butler", "--model", str(small), *words.split(), "--out"]

    def start(name):
        return subprocess.Popen([*command, str(tmp_path / name)], cwd=Path(__file__).parents[2])

    assert start("whole").wait() == 0
    for moment in ("checkpoints/*orbax-checkpoint-tmp*", "log.jsonl", "run.json"):  # while one is saved, and later
        killed = start("parts")
        while killed.poll() is None and not list((tmp_path / "parts").glob(moment)):
            time.sleep(0.001)
        killed.kill()
        assert killed.wait() == -signal.SIGKILL
    assert start("parts").wait() == 0
    found = []
    for name in ("whole", "parts"):
        newest = max((tmp_path / name / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
        digest = json.loads((newest / "progress/metadata").read_text())["digest"]  # of the optimiser's state, too
        found.append((digest, (tmp_path / name / "butler.safetensors").read_bytes()))
    assert found[0] == found[1]
