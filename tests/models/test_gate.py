"""Fast KVzip's gate: the network is its definition, and what it says decides what zap keeps."""

import jax
import numpy as np
import pytest
from flax import nnx

import models
from models.gate import parameter_shapes
from tests.models.tiny import decoder

TOKENS = np.random.default_rng(0).integers(0, 64, (1, 40))
SHAPE = models.GateConfig(32, num_layers=2, num_heads=4, num_kv_heads=2, dim=4, sinks=3)


def gate():
    random = np.random.default_rng(2)
    drawn = {name: random.normal(size=shape).astype(np.float32) / 2 for name, shape in parameter_shapes(SHAPE).items()}
    return models.Gate(SHAPE, jax.device_put(drawn))


def by_hand(own, x):
    """The share of a token's own weight beside the sinks, one query at a time, in float64."""
    w = {name: np.asarray(getattr(own, name)[...], np.float64)[1] for name in parameter_shapes(SHAPE)}
    score = np.zeros((len(x), 2))

    def normed(row, weight):
        return row / np.sqrt((row**2).mean() + 1e-6) * weight

    for t, k, g in np.ndindex(len(x), 2, 2):
        query = normed(x[t] @ w["query"][:, k, g] + w["query_bias"][k, g], w["query_norm"])
        weights = np.exp(w["sinks"][k] @ query / 2)
        own_weight = np.exp(normed(x[t] @ w["key"][:, k], w["key_norm"]) @ query / 2 + w["bias"][k, g])
        score[t, k] += own_weight / (own_weight + weights.sum()) / 2
    return score


def test_the_network_and_its_loss_are_their_definitions():
    x, true = np.random.default_rng(3).normal(size=(1, 3, 32)), np.random.default_rng(4).uniform(size=(1, 3, 2))
    score = by_hand(gate(), x[0])[None]
    said, loss = jax.jit(lambda own, x, true: (own(1, x), own.loss(1, x, true)))(
        gate(), x.astype(np.float32), true.astype(np.float32)
    )
    np.testing.assert_allclose(said, np.log(score), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss, -(true * np.log(score) + (1 - true) * np.log(1 - score)), rtol=1e-5)


def test_weights_are_drawn_as_torch_draws_those_of_a_linear_map():
    """Evenly up to the root of the inputs' number; norms are 1, biases 0, and sinks lie near 0 but apart."""
    shape = models.GateConfig(64, num_layers=2, num_heads=4, num_kv_heads=2)
    drawn = models.Gate(shape, rngs=nnx.Rngs(0))
    for name in ("query", "key"):
        own = np.abs(getattr(drawn, name)[...])
        assert 0.99 / 8 < own.max() <= 1 / 8 and abs(own.mean() - 1 / 16) < 2e-3
    assert np.std(drawn.sinks[...]) == pytest.approx(0.02, rel=0.1)
    assert all((getattr(drawn, name)[...] == 1).all() for name in ("query_norm", "key_norm"))
    assert not any(getattr(drawn, name)[...].any() for name in ("query_bias", "bias"))


def test_a_gate_is_read_as_it_was_written_and_read_by_zap(tmp_path):
    models.save_network(tmp_path, gate(), decoder(), "a small one")
    again = models.load_network(tmp_path, decoder())
    assert again.config == SHAPE and again.name == "gate"
    for name in parameter_shapes(SHAPE):
        np.testing.assert_array_equal(getattr(again, name)[...], getattr(gate(), name)[...])
    narrow = models.Gate(
        SHAPE, {name: getattr(again, name)[...].astype("bfloat16") for name in parameter_shapes(SHAPE)}
    )
    with jax.numpy_dtype_promotion("strict"):
        kept = models.prefill(decoder(), TOKENS, policy="zap", budget=10, block=8, networks=[narrow]).cache
    assert kept.num_live.max() == 10
