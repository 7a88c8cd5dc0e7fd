"""A run finds the network that ships for its model, by the model's fingerprint alone."""

import jax
import numpy as np
import pytest

import models
from kvjax.sources import parse_source
from models.networks import network_of, own_network, shipped
from tests.models.tiny import decoder

BUTLER = parse_source("butler")


@pytest.fixture(scope="module")
def retriever():
    return models.load("retriever")[0]


def test_a_run_finds_what_ships_for_its_model(retriever):
    found = network_of(None, retriever, None, BUTLER)
    expected = own_network("retriever", retriever)
    assert found.config == expected.config
    np.testing.assert_array_equal(found.norm[...], expected.norm[...])


def test_what_is_given_comes_before_what_ships(retriever):
    given = own_network("retriever", retriever, dtype="bfloat16")
    assert network_of([given], retriever, None, BUTLER) is given


def test_a_model_of_other_weights_or_of_none_that_are_known_has_none(retriever):
    arrays = retriever.arrays()
    other = models.Decoder(retriever.config, arrays | {"embedding": 2 * arrays["embedding"]})
    assert shipped(retriever, "butler").name == "butler"
    assert shipped(other, "butler") is None and shipped(decoder()) is None and shipped(retriever, "gate") is None
    traced = []
    jax.eval_shape(lambda model: traced.append(shipped(model)), retriever)
    assert traced == [None]
