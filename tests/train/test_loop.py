"""The loop that the trainers share, with a trainer of four numbers: it resumes bit for bit and writes what it says."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from train import butler, finetune, loop, retriever, scorer
from train.butler import Settings
from train.text import Corpus

CONFIG = models.Config(64, 16, 16, num_layers=1, num_heads=1, num_kv_heads=1, max_positions=64)
SETTINGS = Settings(tokens=6 * 2 * 8, seq_len=8, batch=2, lr=0.1)


def rows(position):
    index = position["row"] if position else 0
    while True:
        yield np.random.default_rng(index).integers(0, 64, 8).astype(np.int32), {"row": index + 1}
        index += 1


def trainer(folder):
    """Fit the mean of the rows' tokens, with noise of each step's own."""
    mesh = loop.one_device()

    def objective(model, parameters, tokens, key):
        target = tokens.astype(jnp.float32).reshape(-1, 4).mean(0) + jax.random.normal(key, (4,))
        return jnp.mean((parameters["mean"] - target) ** 2)

    return loop.Trainer(
        command="train.mean",
        trained={"mean": {"size": 4}},
        init=lambda: loop.init_state(lambda: {"mean": jnp.zeros(4)}, SETTINGS, mesh),
        step=loop.make_step(objective, SETTINGS, mesh),
        save=lambda parameters: (folder / "mean.txt").write_text(str(parameters["mean"].tolist())),
        measure=lambda parameters: {"loss": float(jnp.sum(parameters["mean"]))},
        summarise=lambda parameters: ({"mean": parameters["mean"].tolist()}, {"first": float(parameters["mean"][0])}),
        files=("mean.txt",),
    )


def test_any_trainer_resumes_bit_for_bit(tmp_path):
    model = models.Decoder(CONFIG, rngs=nnx.Rngs(0))
    corpus = Corpus(["numbers"], rows, np.zeros((1, 8), np.int32))

    def run(name, **options):
        folder = tmp_path / name
        options = dict(save_every=2, eval_every=3, log_every=1) | options
        return loop.run(folder, trainer(folder), model, corpus, SETTINGS, **options)

    whole, summary = run("whole")
    assert run("parts", stop_after=3)[1] is None
    again, resumed = run("parts")
    assert np.array_equal(whole["mean"], again["mean"]) and resumed["mean"] == summary["mean"]
    assert (tmp_path / "parts" / "mean.txt").read_text() == (tmp_path / "whole" / "mean.txt").read_text()
    described = json.loads((tmp_path / "whole" / "run.json").read_text())
    assert described["mean"] == {"size": 4} and described["made"]["command"] == "train.mean.train(...)"
    lines = [json.loads(line) for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "held_out/loss" in line] == [3, 6]
    assert [line["step"] for line in lines if "learning_rate" in line] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["summary/first"] == summary["mean"][0]


def test_a_run_is_not_resumed_with_a_model_of_another_dtype(tmp_path):
    model = models.Decoder(CONFIG, rngs=nnx.Rngs(0))
    narrow = models.Decoder(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    corpus = Corpus(["numbers"], rows, np.zeros((1, 8), np.int32))
    assert loop.run(tmp_path, trainer(tmp_path), model, corpus, SETTINGS, stop_after=2)[1] is None
    with pytest.raises(ValueError, match='model dtype "float32" there, "bfloat16" here'):
        loop.run(tmp_path, trainer(tmp_path), narrow, corpus, SETTINGS)


@pytest.mark.parametrize("name", ["log.jsonl", "summary.json"])
def test_files_that_no_run_made_stay(name, tmp_path):
    (tmp_path / name).write_text("mine")
    corpus = Corpus(["numbers"], rows, np.zeros((1, 8), np.int32))
    with pytest.raises(ValueError, match=f"holds {name}, which no run in this folder made"):
        loop.run(tmp_path, trainer(tmp_path), models.Decoder(CONFIG, rngs=nnx.Rngs(0)), corpus, SETTINGS)
    assert (tmp_path / name).read_text() == "mine"


def test_what_fails_while_prefetching_is_raised():
    def items():
        yield 1
        raise OSError("no more")

    made = loop.prefetch(items())
    assert next(made) == 1
    with pytest.raises(OSError, match="no more"):
        next(made)
    assert list(loop.prefetch(iter("abc"), size=1)) == ["a", "b", "c"]


@pytest.mark.parametrize("trainer", [butler, scorer, finetune, retriever], ids=lambda module: module.__name__)
def test_every_trainer_imports_modules_of_your_own(trainer, capsys):
    with pytest.raises(SystemExit, match="2"):
        trainer.main(["--import", "no_such_module"])
    assert "--import: no_such_module cannot be imported" in capsys.readouterr().err
