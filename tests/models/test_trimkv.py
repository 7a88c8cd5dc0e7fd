"""TRIM-KV: its gate, its attention while it trains, and what it keeps, as its authors' code has them (make_trimkv.py).

The file is tests/models/kvpress/trimkv.npz.
"""

import functools

import jax
import numpy as np
import pytest

import kvjax
import models
from tests.kvjax.blocks import empty
from tests.models.make_trimkv import BUFFER, FILE, HIDDEN, MEMORY, WEIGHTS, D, E, K, N, T
from tests.models.tiny import CONFIG, decoder
from train.retention import fading_attention


@functools.cache
def fixture():
    with np.load(FILE) as arrays:
        return dict(arrays)


def of_tokens(name):
    """An array of the file with its tokens before its heads."""
    return fixture()[name].swapaxes(1, 2)


def test_a_gate_predicts_what_the_authors_does():
    shape = models.ScorerConfig(E, 1, N, K, HIDDEN, "retention")
    made = {own: fixture()[theirs].T[None] for theirs, own in WEIGHTS.items()}
    gate = models.RetentionGate(shape, jax.device_put(made))
    np.testing.assert_allclose(jax.jit(gate)(0, fixture()["x"]), of_tokens("retention"), rtol=1e-5, atol=1e-7)


def test_attention_while_it_trains_is_the_authors():
    arguments = [of_tokens(name) for name in ("query", "key", "value", "retention")]
    output, number = jax.jit(fading_attention)(*arguments)
    np.testing.assert_allclose(output, fixture()["output"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(number, of_tokens("number"), rtol=1e-5)


def test_what_stays_is_what_the_authors_keep():
    policy = kvjax.trimkv()
    cache = empty(policy, batch=1, kv_heads=K, query_heads=N, head_dim=D, budget=MEMORY, block=BUFFER)

    @jax.jit
    def step(cache, *rows):
        *rows, retention = rows
        context = kvjax.Context(predicted=kvjax.Prediction(retention=retention))
        return kvjax.attend(cache, *rows, policy=policy, budget=MEMORY, context=context)[1]

    rows = [of_tokens(name) for name in ("query", "key", "value", "retention")]
    for number, start in enumerate(range(0, T, BUFFER), 1):
        cache = step(cache, *(row[:, start : start + BUFFER] for row in rows))
        for head, expected in enumerate(fixture()[f"kept/{number}"]):
            position = np.asarray(cache.position[0, head])
            np.testing.assert_array_equal(np.sort(position[position >= 0]), np.sort(expected))


@pytest.mark.matrix
def test_a_model_answers_under_it_with_the_network_of_a_folder(tmp_path):
    """The prompt by block, then a decode step that evicts, too; and the network is found in its folder."""
    shape = models.ScorerConfig.of(CONFIG, 4, "retention")
    made = {name: np.random.default_rng(1).normal(size=size).astype(np.float32) for name, size in shape.shapes.items()}
    models.save_network(tmp_path, models.RetentionGate(shape, jax.device_put(made)), decoder(), "tiny")
    gate = models.load_network(tmp_path, decoder())
    tokens = np.random.default_rng(0).integers(0, 64, (2, 40))
    settings = dict(budget=10, block=8, max_new_tokens=3, evict_every=1)
    found = models.generate(decoder(), tokens, policy="trimkv", networks=gate, **settings)
    assert (np.asarray(found.cache.num_live) == 10).all()
    found = models.generate(decoder(), tokens, policy="trimkv@model(normalise=False)", networks=gate, **settings)
    number = np.asarray(found.cache.num_live)
    assert number.min() < 10 < number.max() and number.mean() == 10
    with pytest.raises(ValueError, match=r"python -m train\.retention"):
        models.generate(decoder(), tokens, policy="trimkv", **settings)
