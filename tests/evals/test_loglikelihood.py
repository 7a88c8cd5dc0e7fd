"""Likelihoods made a part at a time: against whole logits, in bounded memory."""

import jax
import numpy as np
import pytest

from evals import loglikelihood, simulator
from tests.tiers import first, matrix

BATCH, LENGTH = 3, 21


@pytest.fixture
def tokens(tiny):
    return np.random.default_rng(0).integers(0, tiny[0].config.vocab_size, (BATCH, LENGTH)).astype(np.int32)


def random_states(model, seed):
    return np.random.default_rng(seed).normal(size=(BATCH, LENGTH, model.config.hidden_size)).astype(np.float32)


def logs_of(model, hidden):
    logits = np.asarray(jax.jit(lambda hidden: model.logits(hidden))(hidden), np.float64)
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


@pytest.mark.parametrize("places", first(1, [4, 50]))
def test_parts_of_any_size_give_what_the_whole_logits_do(tiny, tokens, monkeypatch, places):
    model = tiny[0]
    monkeypatch.setattr(loglikelihood, "LOGITS_BYTES", places * 8 * BATCH * model.config.vocab_size)
    hidden, reference = random_states(model, 1), random_states(model, 2)
    found = [np.asarray(x) for x in loglikelihood.log_probabilities(model, hidden, tokens, reference)]
    logs, true = logs_of(model, hidden), logs_of(model, reference)
    wanted = np.take_along_axis(logs, tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(found[0], wanted, atol=1e-5)
    np.testing.assert_array_equal(found[1], logs.argmax(-1) == tokens)
    np.testing.assert_allclose(found[2], np.sum(np.exp(true) * (true - logs), axis=-1), atol=1e-5)


def test_the_memory_of_a_long_text_is_bounded(tiny):
    model, places = tiny[0], 8
    shape = jax.ShapeDtypeStruct((1, 4096, model.config.hidden_size), np.float32)
    following = jax.ShapeDtypeStruct((1, 4096), np.int32)
    program = loglikelihood._in_parts.lower(model, shape, following, shape, places).compile()
    a_part = 4 * places * model.config.vocab_size
    assert program.memory_analysis().temp_size_in_bytes < 12 * a_part  # all logits are 512 parts


@matrix
def test_a_reference_is_itself_without_divergence_and_has_to_be_of_the_same_sequences(tiny, tokens):
    model, rows = tiny[0], [row[: 11 + 2 * i].tolist() for i, row in enumerate(np.zeros((2, 20), np.int32) + 5)]
    kept = loglikelihood.predict(model, rows, block=8, batch=1, keep_hidden=True)
    assert [row.hidden.shape[0] for row in kept] == [10, 12] and kept[0].divergence is None
    reference = [row.hidden for row in kept]
    again = loglikelihood.predict(model, rows, block=8, batch=2, reference=reference)
    assert max(row.divergence.max() for row in again) < 1e-5 and again[0].hidden is None
    dense = loglikelihood.simulate(model, rows, simulator.DENSE, block=8, reference=reference)
    assert max(row.divergence.max() for row in dense) < 1e-5
    with pytest.raises(ValueError, match="of other sequences"):
        loglikelihood.predict(model, rows, reference=reference[:1])
