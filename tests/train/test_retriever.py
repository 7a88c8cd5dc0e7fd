"""Training: a run that stops and resumes is a run that does not, and what it saves is what it trained."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from evals import coref_task
from models import commands
from models.config import from_hugging_face
from models.decoder import Decoder
from models.save import save
from tests.bad_input.campaign import state_of
from tests.tiers import matrix, nightly
from train import data, retriever
from train.circuit import init_parameters

LEVEL = data.Level(64, facts=(1, 3), filler=(0.0, 0.3), before=0.5, episodes=False)
TINY = (retriever.Phase(2, 8, (0.02, 0.02), LEVEL), retriever.Phase(2, 8, (0.02, 0.01), LEVEL._replace(length=96)))


@pytest.fixture(scope="module")
def tokenizer():
    return data.train_tokenizer()


@pytest.fixture(scope="module")
def config(tokenizer):
    return retriever.make_config(
        tokenizer, hidden_size=32, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16
    )


@matrix
def test_resumed_is_uninterrupted_bit_for_bit(tokenizer, config, tmp_path):
    def run(folder, **options):
        options |= dict(progress=False, evaluate_every=0)
        return retriever.train(tmp_path / folder, config, tokenizer, TINY[:1], **options)

    whole = run("whole")
    run("parts", stop_after=1)
    resumed = run("parts")
    start = init_parameters(config, jax.random.key(0))
    for name in whole:
        assert np.array_equal(whole[name], resumed[name]), name
        assert not np.array_equal(whole[name], start[name]), name
    steps = [line for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines() if "first" in line]
    assert len(steps) == 2


@matrix
def test_a_folder_of_another_run_or_of_one_that_runs_is_refused(tokenizer, config, tmp_path):
    def run(config, seed=0, resume=True):
        options = dict(progress=False, evaluate_every=0, stop_after=1, seed=seed, resume=resume)
        retriever.train(tmp_path, config, tokenizer, TINY, **options)

    run(config)
    with pytest.raises(ValueError, match="seed 0 there, 1 here"):
        run(config, seed=1)
    with pytest.raises(ValueError, match="intermediate_size 32 there, 64 here"):
        run(dataclasses.replace(config, intermediate_size=64))
    before = state_of(tmp_path)
    with (tmp_path / commands.LOCK_FILE).open("ab") as held:
        commands.lock(held, tmp_path)
        for resume in (True, False):
            with pytest.raises(ValueError, match="another run writes into"):
                run(config, resume=resume)
    assert state_of(tmp_path) == before


@nightly  # several whole runs of training
def test_goes_on_from_a_model_behind_the_last_step_of_its_log(tokenizer, config, tmp_path):
    options = dict(progress=False, evaluate_every=0)
    half = retriever.train(tmp_path / "first", config, tokenizer, TINY, stop_after=2, **options)
    model = tmp_path / "model"
    save(model, Decoder(config, jax.device_get(half)), tokenizer)
    (model / "log.jsonl").write_text((tmp_path / "first" / "log.jsonl").read_text())
    whole, again = (retriever.train(tmp_path / "later", config, tokenizer, TINY, begin=model, **options) for _ in "ab")
    for name in half:
        assert np.array_equal(whole[name], again[name]), name
        assert not np.array_equal(whole[name], half[name]), name
    lines = [json.loads(line) for line in (tmp_path / "later" / "log.jsonl").read_text().splitlines()]
    assert [(line["step"], line["length"]) for line in lines] == [(2, 64), (4, 96)]
    with pytest.raises(ValueError, match="first 2 there, 0 here"):
        retriever.train(tmp_path / "later", config, tokenizer, TINY, **options)


def test_a_model_that_the_recipe_did_not_make_is_refused(tokenizer, config, tmp_path):
    save(tmp_path, Decoder(config, init_parameters(config, jax.random.key(0))), tokenizer)
    options = dict(progress=False, evaluate_every=0, begin=tmp_path)
    with pytest.raises(ValueError, match="does not say how far the recipe came"):
        retriever.train(tmp_path / "run", config, tokenizer, TINY, **options)
    other = dataclasses.replace(config, intermediate_size=64)
    with pytest.raises(ValueError, match="another shape or vocabulary"):
        retriever.train(tmp_path / "run", other, tokenizer, TINY, **options)
    assert not (tmp_path / "run").exists()


def test_its_attention_is_the_decoders(tokenizer, config):
    parameters = init_parameters(config, jax.random.key(1))
    parameters["layers.output"] = 0.1 * jax.random.normal(jax.random.key(2), parameters["layers.output"].shape)
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, config.vocab_size, (2, 40))

    @jax.jit
    def logits(parameters):
        model, hidden = retriever.hidden_states(config, parameters, tokens)
        return model.logits(hidden), Decoder(config, parameters)(tokens)

    @jax.jit
    def attention(query, key, value):
        blocks, whole = (retriever.causal_attention(query, key, value, block=b) for b in (16, 64))
        return blocks, whole, jax.nn.dot_product_attention(query, key, value, is_causal=True)

    np.testing.assert_allclose(*logits(parameters), atol=1e-4)
    blocks, whole, expected = attention(*(rng.normal(size=(1, 40, h, 8)).astype(np.float32) for h in (4, 2, 2)))
    np.testing.assert_allclose(blocks, whole, atol=1e-5)
    np.testing.assert_allclose(whole, expected, atol=1e-5)


def test_groups_of_rows_make_the_same_loss(config, tokenizer):
    batch = data.Writer(tokenizer).batch(LEVEL, 8, seed=0, step=0)
    tokens, positions, targets, shares = retriever.arrange(batch, devices=1)
    assert tokens.shape == positions.shape == (2, 4, 64)
    assert shares.sum((0, 1, 2)) == pytest.approx([1, 1, 1, 1, 0], abs=1e-4)
    assert np.array_equal(tokens.reshape(8, 64), batch.tokens) and np.array_equal(targets.reshape(8, 64), batch.targets)


def test_recall_reads_the_answers_places(config, tokenizer):
    parameters = init_parameters(config, jax.random.key(0))
    right = retriever.recall(retriever.make_recall(config), parameters, tokenizer, 128, count=4, facts=2)
    assert right.shape == (4, 4)


def test_names_right_reads_the_names_places(tokenizer):
    samples = [coref_task.sample(5 + i, tokenizer) for i in range(3)]

    def tokens_right(parameters, tokens, places):
        for row, sample in enumerate(samples):
            size = len(sample.answer_tokens)
            assert tokens[row, places[row, :size]].tolist() == sample.answer_tokens
            assert tokens[row, : places[row, 0]].tolist() == sample.tokens
        return places % 2 == 0

    right = retriever.names_right(tokens_right, {}, tokenizer, count=3, seed=5)
    for row, sample in zip(right, samples, strict=True):
        places = np.arange(len(sample.answer_tokens)) + len(sample.tokens)
        np.testing.assert_array_equal(row, places % 2 == 0)


@matrix
def test_the_circuit_looks_up_before_any_training(tokenizer):
    config = retriever.make_config(tokenizer, num_layers=2)
    parameters = init_parameters(config, jax.random.key(0))
    right = retriever.recall(retriever.make_recall(config), parameters, tokenizer, 256, count=16, facts=6)
    assert right.all(-1).mean() > 0.7


def test_a_run_that_goes_on_reads_the_rest_of_its_phases():
    assert list(retriever.plan(TINY, 1)) == [(1, TINY[0]), (2, TINY[1]), (3, TINY[1])]


def test_the_rate_falls_as_the_recipe_says():
    rate = retriever.rate_schedule((retriever.Phase(100, 8, (0.02, 0.02), LEVEL), TINY[1]._replace(steps=10)))
    assert jax.jit(rate)(np.array([9, 60, 100, 105, 110])).tolist() == pytest.approx([0.004, 0.02, 0.02, 0.015, 0.01])


def test_saved_layout_is_hugging_faces(config, tokenizer, tmp_path):
    parameters = init_parameters(config, jax.random.key(0))
    save(tmp_path, Decoder(config, parameters), tokenizer)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    tensors = load_file(tmp_path / "model.safetensors")
    query = parameters["layers.query"][1]  # [E, N, D]
    np.testing.assert_array_equal(tensors["model.layers.1.self_attn.q_proj.weight"], query.reshape(32, 32).T)
    np.testing.assert_array_equal(tensors["model.layers.0.mlp.gate_proj.weight"], parameters["layers.gate"][0].T)
    assert tensors["model.layers.0.self_attn.o_proj.weight"].shape == (32, 32) and "lm_head.weight" not in tensors
    raw = json.loads((tmp_path / "config.json").read_text())
    assert from_hugging_face(raw) == config
