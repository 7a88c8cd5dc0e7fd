"""Attention Matching in runs: what stays, what is dropped, and where it cannot work."""

import functools

import jax
import numpy as np
import pytest

import kvjax
import models
from tests.campaign.checking import held_of
from tests.models.tiny import DOCUMENT, SETTINGS, assert_keeps, decoder, run

NAME = "kvzip+match"


@functools.cache
def fitted():
    return models.prefill(decoder(), DOCUMENT, policy=NAME, when="prompt", question=4, **SETTINGS)


@pytest.mark.matrix
def test_a_run_keeps_what_the_reference_keeps_with_its_values_and_biases_in_pages():
    (cache, logits), P = fitted(), DOCUMENT.shape[1]
    expected = run(DOCUMENT[0], policy=NAME, when="prompt", question=4, **SETTINGS)
    assert isinstance(cache, kvjax.PagedCache)
    assert_keeps(cache, 0, expected)
    error = np.where(expected.kept[..., None], held_of(cache).value[:, 0, :, :P] - expected.value, 0)
    assert abs(error).max() < 1e-2 * abs(expected.value).max()
    np.testing.assert_allclose(logits[0], expected.logits[-1], atol=1e-2)
    live, newest = np.asarray(cache.position) >= 0, np.asarray(cache.position) >= P - 4
    assert abs(np.asarray(cache.bias)[live]).max() > 0.1
    np.testing.assert_array_equal(np.asarray(cache.bias)[newest], 0)  # the question came in behind


def test_sample_queries_are_gone_behind_the_prompt_and_the_cache_goes_on(tmp_path):
    cache, path = fitted().cache, tmp_path / "fitted.safetensors"
    state = jax.tree.leaves(cache.state, is_leaf=lambda part: isinstance(part, kvjax._src.matching.Queries))[-1]
    assert state.spent
    kvjax.save_cache(path, cache, policy=NAME)
    again = kvjax.load_cache(path, policy=NAME)
    np.testing.assert_array_equal(again.bias, cache.bias)
    asked = dict(policy=NAME, when="prompt", **SETTINGS)
    after = models.prefill(decoder(), DOCUMENT[:, :4], cache=again, question=4, **asked).cache
    assert (np.asarray(after.num_live) == np.asarray(cache.num_live) + 4).all()
    with pytest.raises(
        ValueError, match=r"'match' has fitted this cache once, .* hold the new text back with question="
    ):
        models.prefill(decoder(), DOCUMENT[:, :9], cache=again, **asked)


def test_by_block_another_turn_is_fitted_by_the_queries_that_the_first_one_left():
    """As if both were one prompt."""
    settings = dict(policy="h2o+match", **SETTINGS)
    first = models.prefill(decoder(), DOCUMENT[:, :24], **settings).cache
    cache = models.prefill(decoder(), DOCUMENT[:, 24:40], cache=first, **settings).cache
    expected = run(DOCUMENT[0, :40], **settings)
    assert_keeps(cache, 0, expected)
    found = held_of(cache)
    error = np.where(expected.kept[..., None], found.value[:, 0, :, :40] - expected.value, 0)
    assert abs(error).max() < 1e-2 * abs(expected.value).max()


@pytest.mark.matrix
def test_several_budgets_share_the_prompt_and_keep_no_samples_either():
    policies = [(NAME, SETTINGS["budget"]), (NAME, 2 * SETTINGS["budget"])]
    settings = {name: value for name, value in SETTINGS.items() if name != "budget"}
    each = models.prefill_each(decoder(), DOCUMENT, policies=policies, question=4, **settings)
    cache = next(each).cache
    assert cache.nbytes == fitted().cache.nbytes
    np.testing.assert_array_equal(cache.position, fitted().cache.position)


def test_in_one_program_they_are_fitted_alike(run_by_layer):
    run_by_layer(False)
    cache = fitted.__wrapped__().cache
    np.testing.assert_array_equal(cache.position, fitted().cache.position)
    live = np.asarray(cache.position) >= 0
    for found, expected in ((cache.bias, fitted().cache.bias), (cache.value, fitted().cache.value)):
        np.testing.assert_allclose(np.asarray(found)[live], np.asarray(expected)[live], atol=2e-2)
