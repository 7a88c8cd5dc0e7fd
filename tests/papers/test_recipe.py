"""Training: a run that stops and resumes is a run that does not, and what it saves is what it trained."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from models.decoder import Decoder
from models.parameters import join_weights
from models.saving import save
from papers.predictor import coref_task
from papers.retriever import data, recipe
from papers.retriever.circuit import init_parameters
from train.loop import Options

LEVEL = data.Level(64, facts=(1, 3), filler=(0.0, 0.3), before=0.5, episodes=False)
TINY = (recipe.Phase(2, 8, (0.02, 0.02), LEVEL), recipe.Phase(2, 8, (0.02, 0.01), LEVEL._replace(length=96)))


@pytest.fixture(scope="module")
def config(tokenizer):
    return recipe.make_config(
        tokenizer, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip


def test_resumed_is_uninterrupted_bit_for_bit(tokenizer, config, tmp_path):
    def run(folder, **options):
        options = Options(eval_every=0, **options)
        return recipe.train(tmp_path / folder, config, tokenizer, TINY[:1], options=options)

    whole = run("whole")
    run("parts", stop_after=1)
    resumed = run("parts")
    start = init_parameters(config, jax.random.key(0))
    for name in whole:
        assert np.array_equal(whole[name], resumed[name]), name
        assert not np.array_equal(whole[name], start[name]), name
    steps = [line for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines() if "first" in line]
    assert len(steps) == 2


def test_a_model_that_the_recipe_did_not_make_is_refused(tokenizer, config, tmp_path):
    save(tmp_path, Decoder(config, join_weights(config, init_parameters(config, jax.random.key(0)))), tokenizer)
    options = dict(begin=tmp_path, options=Options(eval_every=0))
    with pytest.raises(ValueError, match="does not say how far the recipe came"):
        recipe.train(tmp_path / "run", config, tokenizer, TINY, **options)
    other = dataclasses.replace(config, intermediate_size=64)
    with pytest.raises(ValueError, match="another shape or vocabulary"):
        recipe.train(tmp_path / "run", other, tokenizer, TINY, **options)
    assert not (tmp_path / "run").exists()


def test_its_attention_is_the_decoders(tokenizer, config):
    parameters = init_parameters(config, jax.random.key(1))
    parameters["layers.output"] = 0.1 * jax.random.normal(jax.random.key(2), parameters["layers.output"].shape)
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, config.vocab_size, (2, 40))

    @jax.jit
    def logits(parameters):
        model, hidden = recipe.hidden_states(config, parameters, tokens)
        return model.logits(hidden), model(tokens)

    @jax.jit
    def attention(query, key, value):
        blocks, whole = (recipe.causal_attention(query, key, value, block=b) for b in (16, 64))
        return blocks, whole, jax.nn.dot_product_attention(query, key, value, is_causal=True)

    np.testing.assert_allclose(*logits(parameters), atol=1e-4)
    blocks, whole, expected = attention(*(rng.normal(size=(1, 40, h, 8)).astype(np.float32) for h in (4, 2, 2)))
    np.testing.assert_allclose(blocks, whole, atol=1e-5)
    np.testing.assert_allclose(whole, expected, atol=1e-5)


def test_groups_of_rows_make_the_same_loss(config, tokenizer):
    batch = data.Writer(tokenizer).batch(LEVEL, 8, seed=0, step=0)
    tokens, positions, targets, shares = recipe.arrange(batch, devices=1)
    assert tokens.shape == positions.shape == (2, 4, 64)
    assert shares.sum((0, 1, 2)) == pytest.approx([1, 1, 1, 1, 0], abs=1e-4)
    assert np.array_equal(tokens.reshape(8, 64), batch.tokens) and np.array_equal(targets.reshape(8, 64), batch.targets)


def test_devices_add_up_their_gradients_and_losses(monkeypatch, config):
    """Each token's loss is the token times a weight, whose gradient is then the sum of the tokens."""
    monkeypatch.setattr(recipe, "losses", lambda config, weights, tokens, *rest: weights["w"] * tokens)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    tokens, shares = np.arange(8.0).reshape(2, 2, 2), np.ones((2, 2, 2, len(data.KINDS)))
    step, batch = recipe.make_step(config, optax.sgd(1.0), mesh), (tokens, tokens, tokens, shares)
    state = recipe.State({"w": np.float32(3)}, optax.sgd(1.0).init({"w": 0.0}))
    after, parts = step(state, batch, np.eye(len(data.KINDS))[0])
    assert after.parameters["w"] == 3 - tokens.sum()
    assert np.asarray(parts).tolist() == [3 * tokens.sum()] * len(data.KINDS)


def test_recall_reads_the_answers_places(config, tokenizer):
    parameters = init_parameters(config, jax.random.key(0))
    right = recipe.recall(recipe.make_recall(config), parameters, tokenizer, 128, count=4, facts=2)
    assert right.shape == (4, 4)


def test_names_right_reads_the_names_places(tokenizer):
    samples = [coref_task.sample(recipe.HELD_OUT + i, tokenizer) for i in range(3)]

    def tokens_right(parameters, tokens, places):
        for row, sample in enumerate(samples):
            size = len(sample.answer_tokens)
            assert tokens[row, places[row, :size]].tolist() == sample.answer_tokens
            assert tokens[row, : places[row, 0]].tolist() == sample.tokens
        return places % 2 == 0

    right = recipe.names_right(tokens_right, {}, tokenizer, count=3)
    for row, sample in zip(right, samples, strict=True):
        places = np.arange(len(sample.answer_tokens)) + len(sample.tokens)
        np.testing.assert_array_equal(row, places % 2 == 0)


def test_the_circuit_looks_up_before_any_training(tokenizer):
    config = recipe.make_config(tokenizer, num_hidden_layers=2)
    parameters = init_parameters(config, jax.random.key(0))
    right = recipe.recall(recipe.make_recall(config), parameters, tokenizer, 256, count=16, facts=6)
    assert right.all(-1).mean() > 0.7


def test_a_run_that_goes_on_reads_the_rest_of_its_phases():
    assert list(recipe.plan(TINY, 1)) == [(1, TINY[0]), (2, TINY[1]), (3, TINY[1])]


def test_the_rate_falls_as_the_recipe_says():
    rate = recipe.rate_schedule((recipe.Phase(100, 8, (0.02, 0.02), LEVEL), TINY[1]._replace(steps=10)))
    assert jax.jit(rate)(np.array([9, 60, 100, 105, 110])).tolist() == pytest.approx([0.004, 0.02, 0.02, 0.015, 0.01])
