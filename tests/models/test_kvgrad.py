"""KVgrad: kvpress' scores, a derivative by hand in NumPy float64, and KVzip where all lengths are one."""

from __future__ import annotations

import dataclasses
import functools
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import models
from kernels_pallas import ColumnStatistics
from kvjax._src.quantise import Dtypes
from models.gradients import loss_gradient
from tests.models import reference
from tests.models.make_kvzip import GRADIENT
from tests.models.reference import gradients
from tests.models.test_kvzip import LENGTHS, OF_A_LOSS, TOKENS, asking, fixture, in_order, kept, kvpress_model, slots_of
from tests.models.tiny import CONFIG, decoder, weights
from tests.tiers import matrix


def test_scores_are_those_of_kvpress():
    tokens = fixture(GRADIENT)["tokens"][None]
    settings = dict(budget=1.0, block=16, when="prompt")  # a part is one block, whatever the blocks
    cache, _ = models.prefill(kvpress_model(), tokens, policy=asking("kvgrad@uniform", GRADIENT), **settings)
    scores = in_order(cache, slots_of(cache, lambda own: own.state.score), tokens.shape[1], np.nan)[:, 0]
    np.testing.assert_allclose(scores, fixture(GRADIENT)["scores"], rtol=1e-4, atol=1e-6)


def fed_twice(shift=None):
    """The reference behind 12 tokens, 5 of which it was fed again; and those."""
    tokens = TOKENS[0, :12].tolist()
    model = sys.modules["tests.models.reference.decoder"]._Model(
        weights(), CONFIG, None, 12, 17, reference.Choices(), (), None, None, ("float32", "float32"), None
    )
    model.feed(tokens)
    copy = model.copy()
    copy.shift = copy.shift if shift is None else shift
    logits = copy.feed(tokens[4:9])
    return copy, tokens[4:9], logits


def loss_of(loss, shift):
    """Differentiate by the last 3 tokens of the block, in NumPy float64."""
    model, tokens, logits = fed_twice(shift)
    if loss == "hidden":
        return (model.inputs[-1] ** 2).sum()
    return -sum(np.log(reference.softmax(logits[t])[tokens[t + 1]]) for t in (1, 2, 3))


@pytest.mark.parametrize("loss", ["hidden", "tokens"])
def test_the_derivative_by_hand_is_that_of_small_steps(loss):
    model, tokens, _ = fed_twice()
    found = gradients.of_loss(model, tokens, loss, 3)
    for place in ((0, 0, 3), (0, 2, 30), (0, 4, 7), (1, 1, 12), (1, 3, 0)):
        step = np.zeros(found.shape)
        step[place] = 1e-5
        slope = (loss_of(loss, step) - loss_of(loss, -step)) / 2e-5
        assert abs(slope - found[place]) < 1e-7 * abs(found).max()


def gradient(loss, cache):
    wanted = kvjax.Reconstruction(statistics=frozenset({"weights"}), loss=loss)  # whole; padding has no part in it
    arrays = map(np.array, ([[0, 0, *TOKENS[0, 4:9]]], [[-1, -1, *range(12, 17)]], [[6, 9, 12]], [12]))
    run = jax.jit(loss_gradient, static_argnums=(1, 7))
    with mock.patch("models.gradients.SLOTS", 4):
        return np.asarray(run(decoder(), wanted, cache, *arrays, Dtypes("float32", "float32")))


@matrix
def test_a_slot_with_a_bias_far_below_0_is_none_to_the_gradient():
    cache, _ = models.prefill(decoder(), TOKENS[:1, :12], block=12)

    def with_bias(layer):
        far = layer.with_bias().bias.at[..., 3].set(-1e4)
        return dataclasses.replace(layer, entries=layer.entries | {"bias": far})

    biased = cache.map(with_bias)
    without = cache.map(lambda layer: dataclasses.replace(layer, position=layer.position.at[..., 3].set(-1)))
    np.testing.assert_allclose(gradient("hidden", biased), gradient("hidden", without), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", ["hidden", "tokens"])
def test_the_gradient_is_that_by_hand(loss):
    cache, _ = models.prefill(decoder(), TOKENS[:1, :12], block=12)
    pack = jax.jit(functools.partial(kvjax.pack, pages=40, page_size=2, most=20))
    found = gradient(loss, cache if loss == "hidden" else pack(cache))
    model, tokens, _ = fed_twice()
    expected = gradients.of_loss(model, tokens, loss, 3)
    np.testing.assert_allclose(found[:, 0, 2:], expected, atol=1e-5 * abs(expected).max())
    assert not found[:, 0, :2].any()


@pytest.mark.matrix
def test_budgets_share_a_prompt_and_its_gradients():
    asked, settings = [(OF_A_LOSS, 10), (OF_A_LOSS, 14)], dict(block=8, question=3, lengths=LENGTHS)
    each = models.prefill_each(decoder(), TOKENS, policies=asked, **settings)
    for (policy, budget), (cache, _) in zip(asked, each, strict=True):
        alone = models.prefill(decoder(), TOKENS, policy=policy, budget=budget, when="prompt", **settings)
        np.testing.assert_array_equal(kept(cache, 40), kept(alone.cache, 40))


def seen_of(context):
    """One head with two queries that repeat a part of two tokens, whose values are of length 1."""
    shares = np.float32([[0.7, 0.1, 0.2, 0], [0.1, 0.6, 0.2, 0.1]])[None, None, None]
    scaled = shares * np.linalg.norm(context.gradient, axis=2)[:, None, None, :, None]
    columns = ColumnStatistics(max=shares.max(axis=3), scaled_max=scaled.max(axis=3), weights=shares)
    value = np.float32([[1, 0], [0, -1], [0.6, 0.8], [0, 1]])[None, None]
    copies = kvjax.Reconstructed(*(np.array([x]) for x in (0, 2, 2)))
    return kvjax.Observation(
        columns, np.ones((1, 2, 1, 2), np.float32), np.array([[2, 3]]), value, value, np.array([[[0, 1, -1, -1]]]),
        np.array([2]), np.array([2]), context=dataclasses.replace(context, reconstructed=copies),
    )  # fmt: skip


def scores_of(name, seen):
    policy = kvjax.parse(name)
    return np.asarray(jax.jit(lambda: policy.update(None, policy.init(1, 1, 1, 4, 2), seen)[0])())[0, 0, 0]


def test_it_is_kvzip_where_all_lengths_are_one():
    turn = np.float32([[0.6, 0.8], [-0.8, 0.6]])[None, None]
    seen = seen_of(kvjax.Context(gradient=np.float32([[[1, 0], [0.6, 0.8]]]), projection=_projection(turn)))
    np.testing.assert_allclose(scores_of("kvgrad@uniform", seen), scores_of("kvzip@uniform", seen), rtol=1e-6)


def test_a_change_has_a_direction_that_lengths_have_not():
    """Only the first query's loss feels values, only along the first axis, and W_O doubles them."""
    double = 2 * np.eye(2, dtype=np.float32)[None, None]
    seen = seen_of(kvjax.Context(gradient=np.float32([[[3, 0], [0, 0]]]), projection=_projection(double)))
    np.testing.assert_allclose(scores_of("kvgrad@uniform", seen), [0.7 * 3 * 2, 0.1 * 3 * 2, 0, 0], rtol=1e-6)
    x = 0.7 * 1 + 0.2 * 0.6  # the output along the axis, with that of the copies
    change = [0.7 / 0.3 * abs(x - 1), 0.1 / 0.9 * x]
    found = scores_of("kvgrad(measure='change')@uniform", seen)
    np.testing.assert_allclose(found, [3 * 2 * change[0], 3 * 2 * change[1], 0, 0], rtol=1e-5)


def _projection(weight):
    gram = np.einsum("kgde,kgfe->kgdf", weight, weight)
    return kvjax.OutputProjection(weight=weight, gram=gram)


@pytest.mark.parametrize(
    "name",
    ["kvgrad(sinks=0,measure='change')@uniform", "kvgrad(sinks=0)@uniform", "kvzip(sinks=0)@uniform", "dapq(window=2)"],
)
def test_a_window_that_no_position_reaches_changes_no_score(name):
    """Layers without a window have such a one in a model with windows, and copies weigh in the output there, too."""
    policy, rng = kvjax.parse(name), np.random.default_rng(0)
    text, copies = (rng.normal(size=(1, n, 4, 4)).astype(np.float32) for n in (4, 2))
    gradient, weight = (rng.normal(size=shape).astype(np.float32) for shape in ((1, 2, 6), (2, 4, 6)))
    part = kvjax.Reconstructed(*(jnp.array([x]) for x in (0, 2, 4)), sinks=None)

    def scores(window):
        context = kvjax.Context(
            projection=kvjax.output_projection(weight, 1, ["weight", "gram"]), sliding_window=window,
            reconstructed=part, gradient=gradient,
        )  # fmt: skip
        cache = kvjax.empty_cache(policy, kv_heads=1, query_heads=2, head_dim=4, budget=4, block=4)
        cache = kvjax.insert(cache, text[:, :, :1], text[:, :, 1:2])
        return kvjax.observe(
            cache, copies[:, :, :2], copies[:, :, 2:3], copies[:, :, 3:], policy=policy, context=context
        )[2].scores

    plain, windowed = jax.jit(lambda: (scores(None), scores(np.int32(1000))))()
    np.testing.assert_allclose(windowed, plain, rtol=1e-6)
