"""Attention Matching against NumPy and SciPy in float64: biases, values, and what a link does with them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import kvjax
from kernels_pallas import cache_attention, paged_attention
from kvjax._src import matching
from kvjax._src.cache import floats_of

B, K, G, D, S, T, BUDGET = 2, 2, 2, 4, 20, 24, 6


@functools.cache
def given():
    """A cache of S tokens, of which one slot is free, and sample queries that make sharp weights."""
    draw = np.random.default_rng(3)
    key, value = draw.normal(size=(2, B, S - 1, K, D)).astype(np.float32)
    query = (2 * draw.normal(size=(B, T, K * G, D))).astype(np.float32)
    cache = kvjax.KVCache.init(batch=B, kv_heads=K, slots=S, head_dim=D).with_bias()
    return jax.jit(kvjax.insert)(cache, key, value), query


@functools.cache
def matched(budget):
    return jax.jit(functools.partial(kvjax.match_attention, budget=budget))(*given())


def attention(cache, query, position=None):
    """Weights [B, K, T G, S] and outputs in float64; a query at a position sees no token behind it."""
    key, value, bias = (np.asarray(x, np.float64) for x in (cache.key, cache.value, cache.bias))
    live = np.asarray(cache.position) >= 0
    rows = query.reshape(B, T, K, G, D).transpose(0, 2, 1, 3, 4).reshape(B, K, T * G, D).astype(np.float64)
    logits = np.einsum("bkqd,bksd->bkqs", rows, key) * D**-0.5 + bias[:, :, None]
    weights = np.where(live[:, :, None], np.exp(logits), 0)
    if position is not None:
        own = np.repeat(position, G, axis=1)[:, None, :, None]
        weights = np.where(np.asarray(cache.position)[:, :, None] <= own, weights, 0)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights, weights @ np.where(live[..., None], value, 0)


def test_where_nothing_leaves_nothing_changes():
    cache, _ = given()
    small = matched(S)
    live = np.asarray(cache.position) >= 0
    np.testing.assert_allclose(np.asarray(small.bias)[live], 0, atol=1e-3)
    np.testing.assert_allclose(np.asarray(small.value)[live], np.asarray(cache.value)[live], atol=1e-3)


def test_the_tokens_that_stay_are_those_with_the_largest_mean_square_of_weights():
    cache, query = given()
    weights, _ = attention(cache, query)
    best = np.sort(np.argsort(-(weights**2).sum(axis=2), axis=-1)[..., :BUDGET], axis=-1)
    np.testing.assert_array_equal(np.sort(np.asarray(matched(BUDGET).position), axis=-1), best)


def with_ridge(columns):
    """The rows of the least squares with those of the ridge, and the ridge's root."""
    root = np.sqrt(matching.RIDGE * (columns**2).sum(axis=0).max())
    return np.concatenate([columns, root * np.eye(columns.shape[1])]), root


def test_biases_and_values_are_the_least_squares_optimum():
    cache, query = given()
    check_optimum(cache, matched(BUDGET), query, None)


def test_a_cache_that_was_matched_is_matched_with_its_biases_to_what_each_query_sees():
    cache, query = matched(12), given()[1]
    position = np.broadcast_to(12 + np.arange(T, dtype=np.int32) % 8, (B, T))
    match = jax.jit(functools.partial(kvjax.match_attention, budget=BUDGET))
    check_optimum(cache, match(cache, query, position=position), query, position)


def check_optimum(cache, small, query, position):
    """Bounds hold for the whole bias, but for one that was outside of them before."""
    weights, outputs = attention(cache, query, position)
    found = attention(small, query, position)[1]
    slots = np.argmax(np.asarray(small.position)[..., None] == np.asarray(cache.position)[:, :, None], axis=-1)
    for b, k in np.ndindex(B, K):
        slot = slots[b, k]
        own = weights[b, k][:, slot]
        rows, root = with_ridge(own)
        wanted = np.concatenate([np.ones(len(own)), np.full(BUDGET, root)])
        before = np.asarray(cache.bias[b, k], np.float64)[slot]
        low, high = (np.exp(sign * matching.MOST_BIAS - before) for sign in (-1, 1))
        best = scipy.optimize.lsq_linear(rows, wanted, (low, high), tol=1e-12)
        factor = np.exp(np.asarray(small.bias[b, k], np.float64) - before)
        assert (low * 0.999 <= factor).all() and (factor <= high * 1.001).all()
        assert ((rows @ factor - wanted) ** 2).sum() <= 2 * best.cost * (1 + 1e-3) + 1e-6
        share = own * factor
        share /= share.sum(axis=1, keepdims=True)
        rows, root = with_ridge(share)
        value = np.asarray(cache.value[b, k], np.float64)[slot]
        best = np.linalg.lstsq(rows, np.concatenate([outputs[b, k], root * value]), rcond=None)[0]
        np.testing.assert_allclose(small.value[b, k], best, atol=2e-3)
        np.testing.assert_allclose(found[b, k], share @ best, atol=1e-3)


def test_bounds_are_of_the_whole_bias_and_one_outside_of_them_may_stay():
    """One slot has all of the weight: its factor is 1. One has a tenth of it: with the ridge it wants nearly 10."""
    factor = jax.jit(lambda weight, bias: matching.mass_factors(weight[None, None], np.ones(1), bias[None])[0])
    for bias in (-4, 0, 4):
        np.testing.assert_allclose(factor(np.float32(1), np.float32(bias)), 1, rtol=1e-5)
    np.testing.assert_allclose(factor(np.float32(0.1), np.float32(2)), np.e, rtol=1e-5)
    np.testing.assert_allclose(factor(np.float32(0.1), np.float32(0)), (0.1 + 1e-5) / (0.01 + 1e-5), rtol=1e-5)


@pytest.mark.parametrize("budget", [BUDGET, 12])
def test_outputs_are_nearer_than_those_of_the_same_tokens_alone(budget):
    cache, query = given()
    small = matched(budget)
    _, outputs = attention(cache, query)
    slot = np.asarray(small.position)
    values = np.take_along_axis(np.asarray(cache.value), slot[..., None], axis=2)
    plain = {"value": values, "bias": np.zeros(slot.shape, np.float32)}
    alone = dataclasses.replace(small, entries=small.entries | plain)
    errors = [((attention(x, query)[1] - outputs) ** 2).sum(axis=(2, 3)) for x in (small, alone)]
    assert (errors[0] < errors[1]).all() and errors[0].sum() < 0.5 * errors[1].sum()


def test_attention_adds_the_bias_in_slots_and_in_pages():
    (_, query), small = given(), matched(BUDGET)
    expected = attention(small, query)[1].reshape(B, K, T, G, D).transpose(0, 2, 1, 3, 4).reshape(query.shape)
    behind = np.full((B, T), S)
    out, _ = jax.jit(cache_attention)(query, **small.entries, key_position=small.position, query_position=behind)
    np.testing.assert_allclose(out, expected, atol=1e-4)
    pages = jax.jit(functools.partial(kvjax.pack, pages=12, page_size=2, most=BUDGET))(small)
    of_pages = dict(position=pages.position, table=pages.table, query_position=behind)
    out, _ = jax.jit(paged_attention)(query, **pages.entries, **of_pages)
    np.testing.assert_allclose(out, expected, atol=1e-4)


def test_a_token_that_comes_in_has_no_bias_and_one_that_moves_takes_its_own_along():
    small = matched(BUDGET)
    wider = jax.jit(kvjax.compact, static_argnums=1)(small, BUDGET + 1)
    rows = np.ones((B, 1, K, D), np.float32)
    wider = jax.jit(kvjax.insert)(wider, rows, rows)
    np.testing.assert_array_equal(wider.bias[..., :BUDGET], small.bias)
    np.testing.assert_array_equal(wider.bias[..., BUDGET], 0)
    assert floats_of(wider).bias is not None and wider.nbytes == small.nbytes + B * K * (2 * D * 4 + 4 + 4)


# The link, in a run of blocks whose own queries are the sample.


@functools.cache
def after_blocks(name):
    """The cache before the last block's eviction, and the one after it; all queries."""
    policy = kvjax.parse(name)
    draw = np.random.default_rng(8).normal(size=(3, 3, B, 4, K * G, D)).astype(np.float32)
    sizes = dict(batch=B, kv_heads=K, query_heads=K * G, head_dim=D, budget=8, block=4)

    @functools.partial(jax.jit, static_argnames="budget")
    def step(cache, rows, budget=None):
        q, k, v = rows
        return kvjax.attend(cache, 2 * q, k[:, :, :K], v[:, :, :K], policy=policy, budget=budget)[1]

    cache = kvjax.empty_cache(policy, **sizes)
    for rows in draw[:2]:
        cache = step(cache, rows)
    return step(cache, draw[2]), step(cache, draw[2], budget=8), 2 * draw[:, 0]


def test_an_eviction_fits_what_stays_to_the_queries_of_the_tokens():
    before, after, queries = after_blocks("h2o+match")
    plain = after_blocks("h2o")[1]
    np.testing.assert_array_equal(after.position, plain.position)  # the choice is the score's
    weights = queries.transpose(1, 0, 2, 3, 4).reshape(B, 12, K, G, D).transpose(0, 2, 1, 3, 4) * D**-0.5
    state = after.state[1]
    np.testing.assert_array_equal(np.asarray(before.state[1].seen_from), np.asarray(before.position) + 1)
    rounded = np.asarray(jnp.asarray(weights, jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(np.asarray(state.query, np.float32), rounded)  # in slot order, as tokens came in
    fit = jax.jit(functools.partial(matching.fit, most=12))
    for b, k in np.ndindex(B, K):
        stays, samples = np.asarray(after.position[b, k]) >= 0, rounded[b, k].reshape(-1, D)
        now = before.key[b, k], before.value[b, k], np.zeros(12, np.float32), before.position[b, k]
        fitted = fit(*now, stays, samples, np.repeat(np.arange(12), G) + 1)
        for one, other in zip((after.value, after.bias), fitted, strict=True):
            np.testing.assert_allclose(np.asarray(one[b, k])[stays], np.asarray(other)[stays], atol=1e-4)
    assert abs(np.asarray(after.bias)).max() > 0.1


def test_the_query_of_a_token_that_has_left_is_no_sample():
    rng = np.random.default_rng(9)
    key, value, query = (rng.normal(size=shape).astype(np.float32) for shape in ((6, D), (6, D), (6, G, D)))
    position, stays = np.int32([0, 1, 2, 3, 4, -1]), np.arange(6) < 3
    fit = jax.jit(functools.partial(matching.refitted, queries=6))
    fits = [fit(key, value, np.zeros(6, np.float32), position, stays, query, position + 1 + stale)
            for stale in (0, np.int32([0] * 5 + [3]))]  # fmt: skip
    for one, other in zip(*fits, strict=True):
        np.testing.assert_array_equal(one, other)


def head_of(slots):
    """A head of one query head whose tokens are those of its slots; keys, values and queries."""
    rng = np.random.default_rng(10)
    return [rng.normal(size=shape).astype(np.float32) for shape in ((slots, D), (slots, D), (slots, 1, D))]


def test_of_more_samples_than_asked_for_some_from_all_of_the_text_are_taken():
    """Of tokens 0 to 4 those at 0, 5 / 3 and 10 / 3, rounded down; one that was never asked does not count."""
    (key, value, query), position = head_of(6), np.arange(6, dtype=np.int32)
    here, stays = (key, value, np.zeros(6, np.float32), position), position < 3
    found = jax.jit(functools.partial(matching.refitted, queries=3))(*here, stays, query, np.int32([7] * 5 + [0]))
    expected = jax.jit(functools.partial(matching.fit, most=6))(*here, stays, query[[0, 1, 3], 0], np.int32([7] * 3))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kept", [33, 34])  # of 66 slots: as many as the smaller size takes, and one more
def test_every_token_that_stays_is_fitted_whatever_the_static_sizes(kept):
    (key, value, query), position = head_of(66), np.arange(66, dtype=np.int32)
    fitted = jax.jit(functools.partial(matching.refitted, queries=66))
    bias = fitted(key, value, np.zeros(66, np.float32), position, position < kept, query, position + 1)[1]
    np.testing.assert_array_equal(np.asarray(bias) != 0, position < kept)
