"""Training the predictor: a run that is stopped, killed or spread over devices is one run, and bad input ends well."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import models
from kernels_pallas import cache_attention, mse_logits
from models import butler as butler_module
from models import commands
from models.butler import Butler, butler_input, load_butler
from tests.bad_input.campaign import state_of
from tests.tiers import first, matrix, nightly
from train import butler as trainer
from train import loop
from train.butler import Settings, butler_config_of, loss_of, measure, settings_of, train
from train.text import Corpus

CONFIG = models.Config(64, 32, 48, num_layers=3, num_heads=4, num_kv_heads=2, max_positions=64)
SETTINGS = Settings(tokens=12 * 4 * 16, seq_len=16, batch=4, lr=0.02)


@pytest.fixture(scope="module")
def model():
    return models.Decoder(CONFIG, rngs=nnx.Rngs(3))


@pytest.fixture
def small(tmp_path, model):
    """A folder with a small model, and the shipped tokenizer."""
    config = dataclasses.replace(CONFIG, vocab_size=1536, bos=0, eos=(1,))
    tokenizer = models.load("retriever")[1]
    models.save(tmp_path / "model", models.Decoder(config, rngs=nnx.Rngs(0)), tokenizer.backend)
    return tmp_path / "model"


def numbers(seed=0, wrong_at=None):
    """Rows of repeated patterns, which attention of random weights can be predicted on."""

    def rows(position):
        index = position["row"] if position else 0
        while True:
            if index == wrong_at:
                raise ValueError("line 7 is wrong.")
            rng = np.random.default_rng([seed, index])
            yield np.resize(rng.integers(0, 64, 5), 16).astype(np.int32), {"row": index + 1}
            index += 1

    other = numbers(seed + 100) if seed < 100 else None
    return Corpus(["numbers"], rows, np.stack(_first(other.rows, 4)) if other else np.zeros((1, 16), np.int32))


def _first(rows, count):
    made = rows(None)
    return [next(made)[0] for _ in range(count)]


def run(folder, model, corpus=None, settings=SETTINGS, **options):
    options = dict(save_every=4, eval_every=0, log_every=1) | options
    config = dataclasses.replace(butler_config_of(model.config, hidden=16, dim=8), dropout=0.1)
    return train(folder, model, config, corpus or numbers(), settings, **options)


def parameters_of(butler):
    return {name: np.asarray(getattr(butler, name)[...]) for name in butler_module.parameter_shapes(butler.config)}


def losses(folder):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.parametrize(("source", "causal"), first(1, [("attention_input", True), ("layer0_output", False)]))
def test_the_loss_is_the_mean_of_the_layers_losses(model, source, causal):
    config = dataclasses.replace(butler_config_of(CONFIG, hidden=16), source=source)
    butler = Butler(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (2, 12), 0, 64)
    position = jnp.broadcast_to(jnp.arange(12), tokens.shape)

    def attend(carry, layer, window, query, key, value):
        key_position = jnp.broadcast_to(position[:, None], (2, 2, 12))
        cached = key.swapaxes(1, 2), value.swapaxes(1, 2), key_position, position
        return cache_attention(query, *cached)[0], carry, (query, key)

    @jax.jit
    def losses_of_layers(model, butler):
        of_query, of_key = butler(butler_input(model, tokens, source=source))
        _, _, (query, key) = model.run(tokens, position, jnp.full(2, 12), attend, None)
        return [mse_logits(query[i], key[i], of_query[i - 1], of_key[i - 1], causal=causal) for i in (1, 2)]

    layers = losses_of_layers(model, butler)
    loss = jax.jit(loss_of, static_argnames="causal")(model, butler, tokens, causal=causal)
    assert loss == pytest.approx(float(np.mean(layers)), rel=1e-5)


def test_gradients_flow_to_every_parameter_of_the_predictor(model):
    config = butler_config_of(CONFIG, hidden=16)
    start = parameters_of(Butler(config, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(0), (1, 12), 0, 64)
    gradients = jax.jit(jax.grad(lambda parameters: loss_of(model, Butler(config, parameters), tokens)))(start)
    assert all(np.abs(gradient).max() > 0 for gradient in gradients.values())


@nightly  # several whole runs of training
@pytest.mark.parametrize("sizes", [(None, 40, None), (40, None, 40)])
def test_gradients_flow_in_a_model_where_some_layers_have_experts(sizes):
    config = dataclasses.replace(CONFIG, num_experts=3, experts_per_token=2, dense_sizes=sizes)
    model = models.Decoder(config, rngs=nnx.Rngs(0))
    predictor = Butler(models.ButlerConfig.of(config), rngs=nnx.Rngs(1))
    gradient = jax.jit(jax.grad(lambda butler: loss_of(model, butler, jnp.arange(16).reshape(2, 8))))(predictor)
    assert all(np.isfinite(leaf).all() and np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))


@nightly  # several whole runs of training
def test_the_loss_falls_and_the_folder_loads(model, tmp_path):
    settings = SETTINGS._replace(tokens=120 * 64)
    butler, summary = run(tmp_path, model, settings=settings, save_every=60, eval_every=60)
    curve = losses(tmp_path)
    assert len(curve) == 120 and curve[120] < 0.3 * curve[1]
    loaded = load_butler(tmp_path, model)
    assert all(
        np.array_equal(a, b) for a, b in zip(*(parameters_of(x).values() for x in (butler, loaded)), strict=True)
    )
    figures = summary["figures"]
    assert figures["oracle"]["hit_rate"] == 1.0 and figures["butler"]["hit_rate"] > figures["random"]["hit_rate"] + 0.02
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert list((tmp_path / "events").iterdir())
    held_out = [line for line in (tmp_path / "log.jsonl").read_text().splitlines() if "held_out/hit_rate" in line]
    assert [json.loads(line)["step"] for line in held_out] == [60, 120]


def test_figures_are_those_of_a_brute_force_reading(model):
    butler = Butler(butler_config_of(CONFIG, hidden=16), rngs=nnx.Rngs(0))
    rows = np.asarray(jax.random.randint(jax.random.key(5), (2, 9), 0, 64))
    found = measure(model, butler, rows, "streaming", 0.5)
    true = trainer.selections.last_logits(model, rows)  # [L, B, N, T]
    best = np.argsort(-np.asarray(true), axis=-1)[..., :5]
    assert found["token_accuracy"].tolist() == pytest.approx((best >= 4).mean((1, 2, 3))[1:].tolist())


@matrix
def test_resumed_is_uninterrupted_bit_for_bit(model, tmp_path):
    whole, summary = run(tmp_path / "whole", model)
    said = []
    stopped, nothing = run(tmp_path / "parts", model, stop_after=6)
    assert nothing is None
    resumed, again = run(tmp_path / "parts", model, say=said.append)
    assert said == ["resuming from the checkpoint of step 6"]
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts") and len(losses(tmp_path / "whole")) == 12
    for name, array in parameters_of(whole).items():
        assert np.array_equal(array, parameters_of(resumed)[name]), name
        assert not np.array_equal(array, parameters_of(stopped)[name]), name
    assert again["figures"] == summary["figures"]


@pytest.mark.parametrize("damage", first(0, ["flipped"]) + first(0, ["truncated", "removed"], rest=nightly))
def test_a_damaged_checkpoint_is_left_for_the_one_before(model, tmp_path, damage):
    whole, _ = run(tmp_path / "whole", model)
    run(tmp_path / "parts", model, stop_after=8)
    files = sorted(
        (tmp_path / "parts" / "checkpoints" / "8" / "state").rglob("*"), key=lambda file: file.stat().st_size
    )
    largest = [file for file in files if file.is_file()][-1]
    body = bytearray(largest.read_bytes())
    if damage == "removed":
        largest.unlink()
    else:
        body[len(body) // 2] ^= 255
        largest.write_bytes(body if damage == "flipped" else body[: len(body) // 2])
    said = []
    resumed, _ = run(tmp_path / "parts", model, say=said.append)
    assert "the checkpoint of step 8 is damaged" in said[0] and said[1] == "resuming from the checkpoint of step 4"
    for name, array in parameters_of(whole).items():
        assert np.array_equal(array, parameters_of(resumed)[name]), name


@nightly  # several whole runs of training
def test_a_checkpoint_cut_short_is_left_out(model, tmp_path):
    run(tmp_path, model, stop_after=4)
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(checkpoints / "4", checkpoints / "8.orbax-checkpoint-tmp")
    said = []
    run(tmp_path, model, say=said.append, stop_after=5)
    assert "the checkpoint of step 8 was cut short" in said[0] and said[1] == "resuming from the checkpoint of step 4"


@pytest.mark.parametrize("resume", first(0, [True]) + first(0, [False], rest=nightly))
def test_two_runs_never_write_into_one_folder(model, tmp_path, resume):
    run(tmp_path, model, stop_after=1)
    before = state_of(tmp_path)
    with (tmp_path / commands.LOCK_FILE).open("ab") as held:
        commands.lock(held, tmp_path)
        with pytest.raises(ValueError, match="another run writes into"):
            run(tmp_path, model, resume=resume)
    assert state_of(tmp_path) == before
    run(tmp_path, model, resume=resume)


@matrix
def test_another_run_is_refused_and_nothing_overwritten(model, tmp_path):
    run(tmp_path, model, stop_after=1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    other = models.Decoder(CONFIG, rngs=nnx.Rngs(4))
    with pytest.raises(ValueError, match=r"model weights .* there, .* here"):
        run(tmp_path, other)
    with pytest.raises(ValueError, match=r"settings lr 0\.02 there, 0\.01 here; settings seed 0 there, 1 here"):
        run(tmp_path, model, settings=SETTINGS._replace(lr=0.01, seed=1))
    with pytest.raises(ValueError, match="data held out"):
        run(tmp_path, model, numbers(seed=1))
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    run(tmp_path, other, resume=False, stop_after=2)
    assert list(losses(tmp_path)) == [1, 2]


def test_a_predictor_of_no_run_is_not_overwritten(model, tmp_path):
    models.save_butler(tmp_path, Butler(butler_config_of(CONFIG, hidden=16), rngs=nnx.Rngs(0)), model, "kept")
    with pytest.raises(ValueError, match="which no run in this folder made"):
        run(tmp_path, model, resume=False)


@matrix
def test_a_loss_that_is_not_finite_stops_the_run(model, tmp_path, monkeypatch):
    run(tmp_path, model, stop_after=4)
    kept = {path: path.read_bytes() for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()}
    good = trainer.loss_of

    def bad(model, butler, tokens, **options):
        return good(model, butler, tokens, **options) * jnp.where(tokens[0, 0] == sixth, jnp.nan, 1)

    first = [row[0] for row in _first(numbers().rows, 48)][::4]  # of each step
    sixth = first[6]
    expected = 1 + first.index(sixth, 4)
    monkeypatch.setattr(trainer, "loss_of", bad)
    with pytest.raises(ValueError, match=f"not finite in step {expected}; the checkpoint of step 4 is kept"):
        run(tmp_path, model, log_every=3)
    assert kept == {path: path.read_bytes() for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()}


@nightly  # several whole runs of training
def test_wrong_text_ends_the_run_behind_what_was_learned(model, tmp_path):
    whole, _ = run(tmp_path / "whole", model)
    with pytest.raises(ValueError, match="line 7 is wrong"):
        run(tmp_path / "parts", model, numbers(wrong_at=22))
    said = []
    mended, _ = run(tmp_path / "parts", model, say=said.append)
    assert said == ["resuming from the checkpoint of step 5"]
    assert np.array_equal(parameters_of(whole)["query_in"], parameters_of(mended)["query_in"])


@matrix
def test_a_full_disk_ends_in_a_sentence(model, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    run(tmp_path, model, stop_after=4)
    monkeypatch.setattr(ocp.CheckpointManager, "save", full)
    with pytest.raises(OSError, match=r"could not be written .*No space left.*that of step 4 is kept"):
        run(tmp_path, model)


@matrix
def test_the_model_may_be_sharded_too(small, tmp_path):
    rows = numbers()
    curves = []
    for mesh in ("data=1,tensor=1", "data=2,tensor=2"):
        mesh = models.parse_mesh(mesh)
        run(tmp_path / str(mesh.size), models.load(small, mesh=mesh)[0], rows, mesh=mesh, stop_after=4)
        curves.append(list(losses(tmp_path / str(mesh.size)).values()))
    np.testing.assert_allclose(*curves, rtol=1e-4)


def test_published_settings():
    llama = models.Config(128, 2048, 64, num_layers=16, num_heads=32, num_kv_heads=8, max_positions=8192)
    assert settings_of(llama) == Settings(80_000_000, 2048, 1, 1e-3, 0.1, 20.0, 0.01, False, 0)
    published = butler_config_of(llama)
    assert (published.hidden, published.dim, published.published_layout) == (512, 16, True)
    wide = dataclasses.replace(llama, hidden_size=4096)
    assert settings_of(wide).seq_len == 1024
    rate = loop.rate_schedule(Settings(tokens=1000 * 2048))
    assert [float(rate(step)) for step in (50, 100, 1000)] == pytest.approx([5e-4, 1e-3, 0])


def test_the_embedded_models_predictor_fits_its_file():
    config = models.load("retriever")[0].config
    assert 4 * butler_module.num_parameters(butler_config_of(config, embedded=True)) <= 4 * 2**20


def command(*arguments):
    return trainer.main([str(argument) for argument in arguments])


@matrix
def test_the_command_trains(small, tmp_path, capsys):
    arguments = ["--model", small, "--data", "python", "--seq-len", 16, "--batch", 2, "--tokens", "96", "--out"]
    assert command(*arguments, tmp_path / "out", "--eval-rows", 2, "--eval-every", 0, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 3 and summary["data"]["names"] == ["python"] and summary["figures"]["oracle"]["mass"] > 0
    assert load_butler(tmp_path / "out", models.load(small)[0]).config.num_layers == 3


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--seq-len", 128], "--seq-len is 128; the model takes sequences of 2 to 64 tokens"),
        (["--data", "nowhere.jsonl"], "there is no data file nowhere.jsonl"),
        (["--budget", 1.5], "--budget is 1.5"),
        (["--budget", 0], "--budget is 0.0"),
        (["--tokens", 8], "--tokens is 8; one step of 1 x 64 takes 64"),
        (["--lr", 0], "--lr is 0.0"),
        (["--warmup", 1], "--warmup is 1.0"),
        (["--keep", 0], "--keep is 0"),
        (["--dropout", 1], "dropout is 1.0"),
        (["--dim", 3], "dim is 3"),
        (["--mesh", "data=2"], "a step of 1 rows cannot be spread over data=2"),
        (["--mesh", "data=99"], "needs 99 devices"),
        (["--mesh", ""], "mesh is ''; write it like 'data=2,tensor=4'"),
        (["--processes", 2], "belong together"),
        (["--dtype", "int4"], "is not known"),
        (["--stop-after", 0], "--stop-after is 0"),
    ],
)
def test_bad_flags_end_in_a_sentence_and_2(small, tmp_path, capsys, arguments, sentence):
    usual = ["--model", small, "--data", "python", "--seq-len", 64, "--eval-rows", 2, "--out", tmp_path / "out"]
    assert command(*usual, *arguments) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.startswith("train.butler: error: ") and "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_a_model_needs_data_of_its_own(small, tmp_path, capsys):
    assert command("--model", small, "--out", tmp_path / "out") == 2
    assert "no data was named" in capsys.readouterr().err


def test_a_file_as_out_is_refused(small, tmp_path, capsys):
    (tmp_path / "out").write_text("mine")
    assert command("--model", small, "--data", "python", "--seq-len", 64, "--out", tmp_path / "out") == 2
    assert "it is a file" in capsys.readouterr().err and (tmp_path / "out").read_text() == "mine"


@nightly  # several whole runs of training
def test_killed_is_uninterrupted_bit_for_bit(tmp_path):
    script = Path(__file__).with_name("kill_training.py")
    arguments = ["--kills", "1", "--steps", "12", "--folder", str(tmp_path)]
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same bit for bit" in done.stdout
