"""Each link of a policy against its formula, transcribed into NumPy over the block's attention weights."""

from __future__ import annotations

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.transforms import _output_length
from tests.kvjax import blocks, definitions
from tests.kvjax.blocks import DIM, B, D, G, K, N, S, T, each_head, heads_of, scores, started
from tests.tiers import first

seeds = st.integers(0, 2**32 - 1)
close = functools.partial(np.testing.assert_allclose, rtol=2e-5)

EVERY_LINK = [
    "h2o",
    "h2o(accumulate=False)+pool(kernel=3)",
    "tova",
    "tova(heads='group')",
    "snapkv(window=2,kernel=3)",
    "snapkv(window=2,kernel=3,pooling='max')",
    "finch(window=2)",
    "streaming(sinks=2)",
    "key_norm",
    "random",
    "tova(heads='group')+caote",
    "h2o+caote(group='mean',norm=1)",
    "h2o+fast_caote",
    "key_norm+normalise+caote(norm='inf')",
    "h2o+normalise+protect(sinks=1,recent=0.5)",
    "h2o+chunks(size=3)+protect(sinks=1,recent=0.5)",
    "sage",
    "sage(split='adaptive')",
    "laprox(window=2,kernel=3)",
    "laprox(window=2,kernel=3,target='value',gqa='heads')",
    "cake(window=2,kernel=3)",
    "lava(window=2,kernel=3)",
    "expected_attention(future=8,sinks=1)",
    "keydiff",
    "butler(dim=3)",
    "tova(heads='group')+critical",
]


def live_of(block: blocks.Block) -> np.ndarray:
    return np.asarray(block.observation.position) >= 0


# Base scores.


def test_h2o_is_the_attention_received_in_all_blocks_so_far():
    policy = kvjax.h2o()
    state, total = started(policy), 0.0
    whole = blocks.make(0)
    for seed in range(3):  # three blocks over the same slots
        block = blocks.make(seed)
        observation = whole.observation._replace(columns=block.observation.columns)
        result, state = blocks.compiled(policy)(state, observation)
        total = total + block.weights
        close(
            np.where(live_of(whole), result, np.nan),
            each_head(whole, lambda b, k, live, total=total: total[b, heads_of(k)].sum(1).mean(0)[live]),
        )


def test_h2o_without_accumulation_is_the_attention_received_in_this_block():
    policy, block = kvjax.h2o(accumulate=False), blocks.make(1)
    expected = each_head(block, lambda b, k, live: block.weights[b, heads_of(k)].sum(1).mean(0)[live])
    close(scores(policy, block), expected)


def test_tova_is_the_last_valid_querys_row_averaged_over_the_group():
    block = blocks.make(2)
    result = scores("tova(heads='group')", block)
    close(result, each_head(block, lambda b, k, live: block.rows(b)[heads_of(k), -1].mean(0)[live]))


def test_tova_over_the_layer_averages_all_heads():
    block = blocks.make(3, same_heads=True)
    result = scores("tova", block)
    close(result, each_head(block, lambda b, k, live: block.rows(b)[:, -1].mean(0)[live]))
    np.testing.assert_array_equal(result[:, 0], result[:, 1])


def test_tova_over_the_layer_averages_what_the_links_behind_it_give():
    block = blocks.make(4, same_heads=True)
    last = np.stack([block.rows(b)[:, -1] for b in range(B)])
    expected = blocks.caote(block, last).mean(1, keepdims=True)
    close(scores("tova+caote", block), np.broadcast_to(expected, (B, K, S)))


@pytest.mark.parametrize(
    ("pooling", "window", "kernel", "seed"),
    first(2, [("avg", 2, 5, 5), ("max", 1, 3, 6), ("max", 2, 5, 5), ("avg", 1, 3, 6), ("max", 3, 1, 5)]),
)  # fmt: skip
def test_snapkv_pools_the_windows_mean_over_neighbours_by_position(pooling, window, kernel, seed):
    block = blocks.make(seed, window=window)

    def formula(b, k, live):
        position = np.asarray(block.observation.position[b, k])
        own = position >= int(block.observation.next_position[b]) - window
        observed = block.rows(b, window)[heads_of(k)].mean(1)
        heads = [definitions.pooled(np.where(own, 0, a), position, kernel, pooling) for a in observed]
        return np.where(own, np.inf, np.mean(heads, 0))[live]

    close(scores(kvjax.snapkv(window=window, kernel=kernel, pooling=pooling), block), each_head(block, formula))


def test_snapkv_as_input_of_caote_gives_the_window_its_observed_attention():
    block = blocks.make(8, window=2)
    per_head = np.zeros((B, N, S))
    own = np.zeros((B, K, S), bool)
    for b, k in np.ndindex(B, K):
        position = np.asarray(block.observation.position[b, k])
        own[b, k] = position >= int(block.observation.next_position[b]) - 2
        for n in range(k * G, (k + 1) * G):
            observed = block.rows(b, 2)[n].mean(0)
            pooled = definitions.pooled(np.where(own[b, k], 0, observed), position, 5, "avg")
            per_head[b, n] = np.where(own[b, k], observed, pooled)
    close(scores("snapkv(window=2,kernel=5)+caote", block), np.where(own, np.inf, blocks.caote(block, per_head)))


@pytest.mark.parametrize("window", first(1, [3, 1]))
def test_finch_weights_each_query_by_the_other_tokens_before_it(window):
    block = blocks.make(9, window=window)

    def formula(b, k, live):
        position = np.asarray(block.observation.position[b, k])
        own = position >= int(block.observation.next_position[b]) - window
        rows = block.rows(b, window)[heads_of(k)]  # [G, queries, S]
        others = len(live) - np.arange(rows.shape[1], 0, -1)
        return np.where(own, np.inf, (rows * others[:, None]).mean(axis=(0, 1)))[live]

    close(scores(kvjax.finch(window=window), block), each_head(block, formula))


def test_streaming_keeps_the_first_tokens_and_prefers_newer_ones():
    block = blocks.make(9)

    def formula(b, k, live):
        position = np.asarray(block.observation.position[b, k])[live].astype(float)
        return np.where(position < 3, np.inf, position)

    np.testing.assert_array_equal(scores("streaming(sinks=3)", block), each_head(block, formula))


def test_key_norm_is_minus_the_length_of_the_key():
    block = blocks.make(10)
    key = np.asarray(block.observation.key, np.float64)
    norms = definitions.rounded(np.linalg.norm(key, axis=-1))
    close(scores("key_norm", block), each_head(block, lambda b, k, live: -norms[b, k, live]))


def test_key_norm_of_a_bfloat16_cache_is_computed_in_float32():
    block = blocks.make(10)
    rounded = np.asarray(block.observation.key).astype(jnp.bfloat16)
    expected = scores("key_norm", block.observation._replace(key=rounded.astype(np.float32)))
    np.testing.assert_array_equal(scores("key_norm", block.observation._replace(key=rounded)), expected)


def random_by_token(seed: int, layer: int = 0, number: int = 0) -> dict[tuple[int, int, int], float]:
    """Scores of `random` by (row, head, position)."""
    block = blocks.make(number)
    result = scores(kvjax.random(seed=seed), blocks.in_context(block.observation, layer=np.int32(layer)))
    position = np.asarray(block.observation.position)
    return {(b, k, int(position[b, k, s])): float(result[b, k, s]) for b, k, s in np.argwhere(position >= 0)}


def test_random_gives_a_token_the_same_number_in_any_slot_and_block():
    first, second = random_by_token(3, number=0), random_by_token(3, number=1)
    shared = first.keys() & second.keys()
    assert len(shared) > 4 and all(first[token] == second[token] for token in shared)


def test_random_does_not_depend_on_the_row():
    drawn = random_by_token(3)
    shared = [token for token in drawn if token[0] == 0 and (1, *token[1:]) in drawn]
    assert shared and all(drawn[token] == drawn[1, *token[1:]] for token in shared)


@pytest.mark.parametrize("other", [{"seed": 4}, {"seed": 3, "layer": 1}], ids=str)
def test_random_differs_by_seed_and_layer(other):
    first, second = random_by_token(3), random_by_token(**other)
    assert sum(first[token] == second[token] for token in first) == 0


def test_random_is_roughly_uniform_and_independent_between_heads():
    count = 4096
    observation = blocks.make(0).observation._replace(
        position=np.broadcast_to(np.arange(count, dtype=np.int32), (1, 2, count)),
        next_position=np.int32([count]),
        budget=np.int32([1]),
    )
    drawn = np.asarray(blocks.compiled(kvjax.random())((), observation)[0])[0]
    assert drawn.min() >= 0 and drawn.max() < 1
    for head in drawn:
        assert abs(np.sort(head) - (np.arange(count) + 0.5) / count).max() < 1.95 / count**0.5  # Kolmogorov, p 0.001
        assert abs(np.corrcoef(head[:-1], head[1:])[0, 1]) < 4 / count**0.5
    assert abs(np.corrcoef(drawn)[0, 1]) < 4 / count**0.5


def foreseen_block(seed, layer=1, window=None):
    """A block behind the first layer, and the predicted keys that its slots held before."""
    block, held = blocks.make(seed), np.random.default_rng(seed).normal(size=(B, K, S, G, DIM))
    observation = blocks.in_context(block.observation, sliding_window=window, layer=np.int32(layer))
    return block._replace(observation=observation), held.astype(np.float32)


def predicted_attention(block, held):
    """The mean over the valid queries of the softmax over the live tokens that a query sees, [B, N, S]."""
    o, mean = block.observation, np.zeros((B, N, S))
    query, key = (np.asarray(x, np.float64) for x in o.context.predicted[:2])
    window = o.context.sliding_window or np.inf
    for b, n in np.ndindex(B, N):
        position = np.asarray(o.position[b, n // G])
        of_slot = np.array(held[b, n // G, :, n % G], np.float64)
        for t in np.flatnonzero(block.valid[b]):
            of_slot[position == int(o.query_position[b, t])] = key[b, t, n]
        for t in np.flatnonzero(block.valid[b]):
            at = int(o.query_position[b, t])
            sees = (position >= 0) & (position <= at) & (position > at - window)
            logits = np.where(sees, of_slot @ query[b, t, n] / DIM**0.5, -np.inf)
            weights = np.exp(logits - logits.max()) if sees.any() else np.zeros(S)
            mean[b, n] += weights / max(weights.sum(), 1e-300) / block.valid[b].sum()
    return mean


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("seed", first(1, [31, 32]))
def test_butler_is_the_mean_predicted_attention_over_the_live_tokens(seed, window):
    block, held = foreseen_block(seed, window=window)
    expected = predicted_attention(block, held)
    result = scores(kvjax.butler(dim=DIM), block, held)
    close(result, each_head(block, lambda b, k, live: expected[b, heads_of(k)].mean(0)[live]), atol=1e-7)


def test_butler_of_the_first_layer_is_the_mean_attention_itself():
    block, held = foreseen_block(33, layer=0)
    result = scores(kvjax.butler(dim=DIM), block, held)
    close(result, each_head(block, lambda b, k, live: block.rows(b)[heads_of(k)].mean(1).mean(0)[live]))


def test_butler_keeps_the_new_keys_where_their_tokens_lie_and_the_others_where_they_are():
    block, held = foreseen_block(34)
    policy, o = kvjax.butler(dim=DIM), block.observation
    _, state = jax.jit(policy.update)(None, held, o)
    expected, key = held.copy(), np.asarray(o.context.predicted.key).reshape(B, T, K, G, DIM)
    for b, k, s in np.argwhere(np.asarray(o.position) >= 0):
        for t in np.flatnonzero(np.asarray(o.query_position[b]) == int(o.position[b, k, s])):
            expected[b, k, s] = key[b, t, k]
    assert (expected != held).any()
    np.testing.assert_array_equal(state, expected)


def test_butler_leaves_out_slots_that_are_not_filled_yet():
    block, held = foreseen_block(36)
    position = np.array(block.observation.position)
    position[:, :, 6:] = -1
    o = block.observation._replace(position=position)
    expected = scores(kvjax.butler(dim=DIM), o, held)
    found = scores(kvjax.butler(dim=DIM), blocks.in_context(o, filled=6), held)
    close(found, expected)


def test_butler_may_be_followed_by_caote():
    block, held = foreseen_block(35)
    state = (held, ())
    result = scores(kvjax.chain(kvjax.butler(dim=DIM), kvjax.caote()), block, state)
    close(result, blocks.caote(block, predicted_attention(block, held)), rtol=1e-4)


def test_butler_without_a_predictor_says_what_is_missing():
    with pytest.raises(ValueError, match=r"nothing was predicted for the block; hand over Context\(predicted="):
        scores(kvjax.butler(dim=DIM), blocks.in_context(blocks.make(0).observation, predicted=None))
    with pytest.raises(ValueError, match=r"their width is not known; write butler\(dim=16\)"):
        kvjax.parse("butler+caote").init(B, K, G, S, D)


def test_a_predictors_width_is_filled_in_once():
    fitted = kvjax.fit_predictor(kvjax.parse("butler+caote@layer"), 16)
    assert str(fitted) == "butler(dim=16)+caote@layer" and fitted.allocation.name == "layer"
    assert kvjax.fit_predictor(fitted, 16) is fitted
    assert kvjax.fit_predictor(kvjax.parse("butler@model"), 16).init(1, 2, 2, 5, 8)[0].shape == (1, 2, 5, 2, 16)
    assert kvjax.fit_predictor(kvjax.parse("h2o"), 16) is kvjax.parse("h2o")
    with pytest.raises(ValueError, match="made for another predictor: this one's keys have a width of 8"):
        kvjax.fit_predictor(fitted, 8)


# Transformations.


@pytest.mark.parametrize(
    ("norm", "group", "fast"),
    first(
        3,
        dict.fromkeys(
            [
                (2, "exact", False), (1, "mean", False), ("inf", "exact", True),
                *itertools.product([1, 2, "inf"], ["exact", "mean"], [False, True]),
            ]
        ),
    ),
)  # fmt: skip
def test_caote_is_the_eviction_error_over_normalised_scores(norm, group, fast):
    block = blocks.make(11)
    policy = kvjax.chain(kvjax.h2o(), kvjax.caote(norm=norm, group=group, fast=fast))
    close(scores(policy, block), blocks.caote(block, block.weights.sum(2), norm=norm, group=group, fast=fast))


def test_normalised_scores_sum_to_one_in_each_query_head():
    block = blocks.make(14)

    def formula(b, k, live):
        received = block.weights[b, heads_of(k)].sum(1)[:, live]
        return (received / received.sum(-1, keepdims=True)).mean(0)

    close(scores("h2o+normalise", block), each_head(block, formula))


@pytest.mark.parametrize("marks", first(1, ["tova(heads='group')+critical(safe=0.5)", "sage(split='adaptive')"]))
def test_tokens_that_are_sure_to_stay_share_the_weight(marks):
    """They score float32's largest number, which has no sum and, to XLA, no reciprocal."""
    block = blocks.make(14)
    sure = scores(marks, block) > 1e38
    heads = sure.any(axis=-1)
    assert heads.any()
    found = scores(f"{marks}+normalise", block)[heads]
    np.testing.assert_allclose(found[sure[heads]], (sure / sure.sum(-1, keepdims=True).clip(1))[sure], rtol=1e-6)
    np.testing.assert_allclose(np.nansum(np.where(sure[heads], 0, found), axis=-1), 0, atol=1e-6)


def test_pooling_and_averaging_tokens_that_are_sure_to_stay_gives_finite_scores():
    block = blocks.make(14)
    largest = float(np.finfo(np.float32).max)
    sure = scores("tova(heads='group')+critical(safe=0.5)", block) > 1e38

    def pooled(b, k, live):
        return definitions.pooled(largest * sure[b, k], block.observation.position[b, k], 3, "avg")[live]

    found = scores("tova(heads='group')+critical(safe=0.5)+pool(kernel=3)", block)
    np.testing.assert_allclose(found, each_head(block, pooled), rtol=1e-6, atol=10)  # the others score as weights do
    same = blocks.make(14, same_heads=True)
    sure = scores("tova(heads='group')+critical(safe=0.5)", same) > 1e38
    assert (sure.sum(axis=1) == K).any()
    averaged = scores("tova+critical(safe=0.5)", same)
    expected = each_head(same, lambda b, k, live: largest * sure[b][:, live].mean(axis=0))
    np.testing.assert_allclose(averaged, expected, rtol=1e-6, atol=10)


def test_normalise_first_lifts_negative_scores_to_zero():
    block = blocks.make(15)

    def formula(b, k, live):
        key = np.asarray(block.observation.key[b, k], np.float64)[live]
        lengths = definitions.rounded(np.linalg.norm(key, axis=-1))
        lifted = lengths.max() - lengths
        return lifted / lifted.sum()

    np.testing.assert_allclose(scores("key_norm+normalise", block), each_head(block, formula), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("pooling", "kernel"), first(2, [("avg", 3), ("max", 21), ("avg", 1), ("max", 3), ("avg", 7), ("avg", 21)])
)
def test_pool_joins_neighbours_by_position_among_the_live_slots(pooling, kernel):
    block = blocks.make(16)

    def formula(b, k, live):
        position = np.asarray(block.observation.position[b, k])
        received = block.weights[b, heads_of(k)].sum(1)
        return np.mean([definitions.pooled(a, position, kernel, pooling) for a in received], 0)[live]

    policy = kvjax.chain(kvjax.h2o(), kvjax.pool(kernel=kernel, pooling=pooling))
    close(scores(policy, block), each_head(block, formula))


def test_max_pooling_of_negative_scores_does_not_see_beyond_the_ends():
    block = blocks.make(17)

    def formula(b, k, live):
        minus = -definitions.rounded(np.linalg.norm(np.asarray(block.observation.key[b, k], np.float64), axis=-1))
        return definitions.pooled(minus, np.asarray(block.observation.position[b, k]), 3, "max")[live]

    close(scores("key_norm+pool(kernel=3,pooling='max')", block), each_head(block, formula))


@pytest.mark.parametrize("size", first(2, [5, 100, 1, 2]))
def test_chunks_take_the_mean_of_the_neighbours_in_the_text_that_are_not_protected(size):
    block = blocks.make(18)

    def formula(b, k, live):
        position = np.asarray(block.observation.position[b, k])
        stays = (position >= 0) & ((position < 3) | (position >= int(block.observation.next_position[b]) - 2))
        received = block.weights[b, heads_of(k)].sum(1).mean(0)
        return np.where(stays, np.inf, definitions.chunk_means(received, position, stays, size))[live]

    close(scores(f"h2o+chunks(size={size})+protect(sinks=3,recent=2)", block), each_head(block, formula))


def test_the_chunks_of_a_layer_are_chosen_by_all_heads():
    block = blocks.make(19, same_heads=True)
    separate = scores("h2o+chunks(size=4)", block)
    together = scores("h2o+chunks(size=4,heads='layer')", block)
    close(together, np.broadcast_to(separate.mean(axis=1, keepdims=True), together.shape))


def test_chunks_with_tokens_that_are_sure_to_stay_have_finite_scores_in_the_order_of_their_number():
    block = blocks.make(14)
    largest = float(np.finfo(np.float32).max)
    sure = scores("tova(heads='group')+critical(safe=0.5)", block) > 1e38

    def formula(b, k, live):
        position = np.asarray(block.observation.position[b, k])
        return definitions.chunk_means(largest * sure[b, k], position, position < 0, 10)[live]

    found = scores("tova(heads='group')+critical(safe=0.5)+chunks(size=10)", block)
    np.testing.assert_allclose(found, each_head(block, formula), rtol=1e-6, atol=10)


keep_11 = jax.jit(functools.partial(kvjax.keep_mask, budget=11))


@hypothesis.given(seed=seeds, size=st.integers(1, 12))
@hypothesis.settings(max_examples=10)
def test_at_most_one_chunk_is_cut_by_an_eviction_and_its_newest_tokens_stay(seed, size):
    rng = np.random.default_rng(seed)
    position = rng.permutation(60)[:24]
    chunk = position // size
    means = rng.random(60).astype(np.float32)[chunk]
    kept = np.asarray(keep_11(means[None], position[None].astype(np.int32)))[0]
    cut = set(chunk[kept]) & set(chunk[~kept])
    assert len(cut) <= 1
    for one in cut:
        assert position[(chunk == one) & kept].min() > position[(chunk == one) & ~kept].max()


@pytest.mark.parametrize(
    ("link", "budget", "sinks", "recent"),
    first(
        5,
        [
            ("protect(sinks=0.25,recent=0.5)", 8, 2, 4),
            ("protect(recent=0.5)", 7, 0, 3),
            ("protect(recent=1)", 6, 0, 1),
            ("protect(recent=1.0)", 6, 0, 6),
            ("protect(sinks=3,recent=1)+protect(sinks=1,recent=2)", 6, 3, 2),
            ("protect(sinks=2)", 6, 2, 0),
            ("protect(recent=3)", 6, 0, 3),
            ("protect(sinks=1,recent=2)", 6, 1, 2),
            ("protect", 6, 0, 0),
        ],
    ),
)
def test_protected_tokens_score_infinity_and_the_others_what_they_did(link, budget, sinks, recent):
    block = blocks.make(18, budget=budget)
    position = np.asarray(block.observation.position)
    next_position = np.asarray(block.observation.next_position)[:, None, None]
    stays = (position < sinks) | (position >= next_position - recent)
    expected = np.where(stays & (position >= 0), np.inf, scores("h2o", block))
    np.testing.assert_array_equal(scores(f"h2o+{link}", block), expected)


def test_a_share_is_of_each_rows_own_budget():
    block = blocks.make(19, next_position=(12, 12))
    result = scores("h2o+protect(recent=0.5)", block.observation._replace(budget=np.int32([4, 10])))
    position = np.asarray(block.observation.position)
    np.testing.assert_array_equal(result == np.inf, position >= np.array([10, 7])[:, None, None])


# What holds for every link.


@pytest.mark.parametrize("name", EVERY_LINK)
@hypothesis.given(seed=seeds)
@hypothesis.settings(max_examples=3)
def test_permuting_the_slots_permutes_the_scores(name, seed):
    block = blocks.make(seed)
    order = np.random.default_rng(seed).permutation(S)
    observation = block.observation._replace(
        columns=type(block.observation.columns)(*(np.asarray(x)[..., order] for x in block.observation.columns)),
        **{name: np.asarray(getattr(block.observation, name))[:, :, order] for name in ("key", "value", "position")},
    )
    np.testing.assert_allclose(scores(name, observation), scores(name, block)[..., order], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", EVERY_LINK)
def test_live_slots_have_scores_whatever_free_slots_hold_and_a_head_without_tokens_spoils_no_other(name):
    block = blocks.make(20)
    live, o = live_of(block), block.observation
    assert not live.all()
    expected = scores(name, block)
    np.testing.assert_array_equal(np.isnan(expected), ~live)
    for bad in (np.nan, np.inf):
        rows = {side: np.where(live[..., None], getattr(o, side), np.float32(bad)) for side in ("key", "value")}
        np.testing.assert_array_equal(scores(name, o._replace(**rows)), expected)
    emptied, *columns = (np.array(x) for x in (o.position, *o.columns))
    emptied[0, 0] = -1
    for column in columns:
        column[0, 0] = 0
    result = scores(name, o._replace(position=emptied, columns=type(o.columns)(*columns)))
    np.testing.assert_array_equal(result[1], expected[1])


@pytest.mark.parametrize(("S", "D"), first(2, [(45, 64), (7, 6), (32, 16), (45, 6), (7, 64)]))
def test_equal_keys_have_one_norm_wherever_they_are_rotated_to(S, D):
    key = np.broadcast_to(np.random.default_rng(D).normal(size=D).astype(np.float32), (1, 1, S, D))
    frequency = (10_000.0 ** -(np.arange(D // 2) / (D // 2))).astype(np.float32)
    position, none = np.arange(S, dtype=np.int32)[None, None], np.zeros((1, 1, 1, D), np.float32)

    @jax.jit
    def norms(key):
        turned = kvjax.turn(key, position, frequency)
        seen = kvjax.Observation(
            None, none, np.array([[S - 1]]), turned, turned, position, np.array([S]), np.array([4])
        )
        return kvjax.retention_scores(kvjax.key_norm(), (), seen)[0]

    assert len(np.unique(norms(key))) == 1


def test_equal_values_have_one_norm_in_critical_however_many_enter():
    rng = np.random.default_rng(0)
    value = np.broadcast_to(rng.normal(size=16).astype(np.float32), (1, 1, 45, 16))
    weight = rng.normal(size=(1, 2, 16, 32)).astype(np.float32)
    lengths = jax.jit(_output_length, static_argnums=2)
    found = [lengths(value[:, :, :T], weight, chunk) for T, chunk in ((1, 128), (7, 128), (45, 128), (45, 4))]
    assert len(np.unique(np.concatenate(found, axis=-1))) == 1


# Bad arguments.


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kvjax.tova(heads="all"), r"tova: heads is 'all'; expected 'group' or 'layer'"),
        (lambda: kvjax.snapkv(window=0), r"snapkv: window is 0; give the number of queries"),
        (lambda: kvjax.snapkv(window=2.0), r"snapkv: window is 2\.0"),
        (lambda: kvjax.snapkv(kernel=4), r"snapkv: kernel is 4; give an odd number from 1"),
        (lambda: kvjax.snapkv(pooling="mean"), r"snapkv: pooling is 'mean'; expected 'avg' or 'max'"),
        (lambda: kvjax.pool(kernel=0), r"pool: kernel is 0; give an odd number"),
        (lambda: kvjax.chunks(size=0), r"chunks: size is 0; give the tokens of a chunk"),
        (lambda: kvjax.chunks(heads="query"), r"chunks: heads is 'query'; expected 'group' or 'layer'"),
        (lambda: kvjax.pool(pooling="sum"), r"pool: pooling is 'sum'"),
        (lambda: kvjax.streaming(sinks=-1), r"streaming: sinks is -1; give a count"),
        (lambda: kvjax.protect(recent=1.5), r"protect: recent is 1\.5; give a count .* or a share .* in \[0, 1\]"),
        (lambda: kvjax.protect(sinks=-1), r"protect: sinks is -1"),
        (lambda: kvjax.protect(recent="half"), r"protect: recent is 'half'"),
        (lambda: kvjax.protect(recent=float("nan")), r"protect: recent is nan"),
        (lambda: kvjax.random(seed=-1), r"random: seed is -1; give an int in \[0, 2\*\*32\)"),
        (lambda: kvjax.random(seed=2**32), r"random: seed is 4294967296"),
        (lambda: kvjax.caote(norm=3), r"caote: norm is 3; expected 1, 2 or 'inf'"),
        (lambda: kvjax.caote(group="sum"), r"caote: group is 'sum'; expected 'exact' or 'mean'"),
        (lambda: kvjax.fast_caote(norm=0), r"caote: norm is 0"),
    ],
)
def test_a_wrong_argument_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
