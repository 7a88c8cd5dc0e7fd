"""Parameters that lie side by side in the decoder's arrays: where each one is, how a mesh splits them, and products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import models
from models import decoder
from models.loading import load
from models.parameters import array_shapes, join_weights, parameter_shapes, partition, split_weights
from tests.models import reference
from tests.models.make_golden import GOLDEN
from tests.models.tiny import CONFIG, config

BIASES = config(attention_bias=True)
MIXED = config(num_experts=4, experts_per_token=2, dense_sizes=(20, None))


def test_a_kv_group_has_its_queries_its_key_and_its_value_side_by_side():
    weights = reference.parameters(BIASES)
    arrays = join_weights(BIASES, weights)
    qkv, gate_up = arrays["layers.1.qkv"], arrays["layers.1.gate_up"]
    query, key, value = (weights[f"layers.{name}"][1] for name in ("query", "key", "value"))
    for group in range(2):
        for row, expected in enumerate([query[:, 2 * group], query[:, 2 * group + 1], key[:, group], value[:, group]]):
            np.testing.assert_array_equal(qkv[:, group, row], expected)
    np.testing.assert_array_equal(arrays["layers.1.qkv_bias"][1, 1], weights["layers.query_bias"][1, 3])
    np.testing.assert_array_equal(gate_up[:, 0], weights["layers.gate"][1])
    np.testing.assert_array_equal(gate_up[:, 1], weights["layers.up"][1])


@pytest.mark.parametrize("config", [CONFIG, BIASES, MIXED], ids=["plain", "biases", "experts"])
def test_what_is_joined_comes_apart_as_it_was(config):
    shapes = parameter_shapes(config)
    weights = {name: np.random.default_rng(0).normal(size=shape) for name, shape in shapes.items()}
    arrays = join_weights(config, weights)
    assert {name: array.shape for name, array in arrays.items()} == array_shapes(config)
    again = split_weights(config, arrays)
    assert again.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(again[name], array, err_msg=name)


def test_a_mesh_splits_kv_groups_feed_forwards_and_experts():
    split = functools.partial(partition, mesh=AbstractMesh((1, 2, 2), ("data", "expert", "tensor")))
    assert split("layers.0.qkv") == P(None, "tensor", None, None)
    assert split("layers.0.qkv_bias") == P("tensor", None, None)
    assert split("layers.1.gate_up") == P(None, None, "tensor")
    assert split("layers.1.expert_gate_up") == P(("expert", "tensor"), None, None, None)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe_mixed"])
def test_each_device_reads_its_part_of_what_is_joined(name):
    whole, parts = (load(GOLDEN / name, mesh=mesh)[0].arrays() for mesh in (None, models.parse_mesh("tensor=2")))
    for array, expected in whole.items():
        np.testing.assert_array_equal(parts[array], expected, err_msg=array)
    held = parts["layers.1.qkv"].addressable_shards[1]
    np.testing.assert_array_equal(held.data, whole["layers.1.qkv"][held.index])
    assert held.data.shape[1] * 2 == whole["layers.1.qkv"].shape[1]


def products(function, *arguments):
    """The shapes of what a program's matrix products multiply."""

    def of(jaxpr):
        for each in jaxpr.eqns:
            if "dot" in each.primitive.name:
                yield [var.aval.shape for var in each.invars]
            elif "jaxpr" in each.params:
                yield from of(each.params["jaxpr"].jaxpr)

    return list(of(jax.make_jaxpr(function)(*arguments).jaxpr))


def test_a_layer_is_four_products():
    model, x = reference.decoder(CONFIG), jnp.zeros((1, 1, 32))
    weights = model.layers[0].arrays()
    (waves,) = jax.jit(decoder.rotation, static_argnums=0)(CONFIG, np.zeros((1, 1), np.int32), np.ones(1, np.int32))

    def layer(x):
        return decoder.run_layer(CONFIG, weights, x, waves, lambda query, key, value: (query, None, None))[0]

    shapes = [second for _, second in products(layer, x)]
    assert shapes == [(32, 2, 4, 8), (32, 32), (32, 2, 48), (48, 32)]


@pytest.mark.parametrize(("platform", "rows"), [("cpu", 1), ("gpu", 8)])
@pytest.mark.parametrize("tied", [True, False])
def test_one_row_meets_the_head_as_eight_on_a_gpu(platform, rows, tied, monkeypatch):
    model = reference.decoder(config(tie_embeddings=tied))
    hidden = np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)
    expected = jax.jit(model.logits)(hidden)
    monkeypatch.setattr(decoder, "platform", lambda: platform)
    for one in (hidden[:1], hidden[None, :1], hidden[0]):
        (((*held, _), _),) = products(model.logits, one)
        assert np.prod(held) == rows
        found = jax.jit(model.logits)(one)
        assert found.shape == (*one.shape[:-1], 256)
        np.testing.assert_allclose(found.reshape(-1), expected[0], rtol=1e-5, atol=1e-5)
    assert products(model.logits, hidden)[0][0] == (3, 32)
