"""Compares what each link says of a block, its slots in any order, with the NumPy reference; and what always holds."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax._src import scores_of_generations
from kvjax._src.transforms import _output_length
from tests.kvjax import blocks, definitions
from tests.kvjax.blocks import DIM, B, D, G, K, N, S, T, each_head, scores, started
from tests.models import reference
from tests.models.reference.policies import Seen
from tests.tiers import first

close = functools.partial(np.testing.assert_allclose, rtol=2e-5)

LINKS = """
h2o h2o(accumulate=False)+pool(kernel=3) h2o+pool(kernel=21,pooling='max') tova tova(heads='group')+normalise
tova+caote snapkv(window=2,kernel=5) snapkv(window=3,kernel=3,pooling='max') snapkv(window=2,kernel=5)+caote
finch(window=3) streaming(sinks=3) random(seed=7) key_norm key_norm+normalise+caote(norm='inf')
key_norm+pool(kernel=3,pooling='max') h2o+caote h2o+caote(group='mean',norm=1) h2o+fast_caote(norm='inf')
h2o+caote(target='output') h2o+fast_caote(target='output',cross=False) h2o+chunks(size=5)+protect(sinks=3,recent=2)
h2o+chunks(size=4,heads='layer') h2o+protect(sinks=0.25) h2o+protect(recent=1.0)
h2o+protect(sinks=3,recent=1)+protect(sinks=1,recent=2) sage laprox(window=3)@uniform
laprox(window=2,kernel=3,target='value',gqa='heads',pooled='attention')@uniform
laprox(window=2,kernel=3,gqa='joint')@uniform laprox(window=2,kernel=3,target='attention')@uniform
cake(window=3)@uniform cake(window=9,kernel=1)@uniform lava(window=2,kernel=3)@uniform keydiff
expected_attention(future=8,sinks=1) expected_attention(future=1,covariance=False,value_norm=False)
curdkv(sinks=1,leverage='mean',local_window=3) lagkv(sinks=1,lag=2) rkv(window=3,kernel=3,importance=0.3)
tova(heads='group')+critical(epsilon=0.1)+protect(sinks=2,recent=1) restkv(window=3,kernel=3,per='query')
restkv(window=3,kernel=5,alpha=0.5) defensive(window=3,kernel=3)
""".split()


LARGEST = np.finfo(np.float32).max


def live_of(block: blocks.Block) -> np.ndarray:
    return np.asarray(block.observation.position) >= 0


def seen_by(policy: reference.Policy, block: blocks.Block, b: int) -> Seen:
    """Return what the reference reads of one row: slots become the positions that they hold."""
    o, valid = jax.tree.map(np.asarray, block.observation), block.valid[b]
    position, P = o.position[b], int(o.next_position[b])

    def of_tokens(slots, others: float = 0) -> np.ndarray:
        """[K, S, ...] to [K, P, ...]."""
        tokens = np.full((K, P, *slots.shape[2:]), others, np.float64)
        for k in range(K):
            live = position[k] >= 0
            tokens[k, position[k, live]] = slots[k, live]
        return tokens

    weights = block.weights[b][:, valid].reshape(K, G, -1, S)
    weights = np.moveaxis(of_tokens(np.moveaxis(weights, -1, 1)), 1, -1)
    kept, at, (sinks, recent) = of_tokens(position >= 0) > 0, np.arange(P), policy.protected(int(o.budget[b]))
    query, turns = o.query[b, valid].astype(np.float64), -o.query_position[b, valid, None]
    query = reference.rope(query, turns, o.context.frequency[0])  # before its rotation
    query = np.moveaxis(query.reshape(-1, K, G, D), 0, 2)
    seen = dict.fromkeys(Seen._fields) | dict(
        weights=weights,
        observed=weights[:, :, -policy.window :],
        received=weights.sum(axis=2),
        key=of_tokens(o.key[b], 1),
        value=of_tokens(o.value[b], 1),
        alone=of_tokens(o.value[b], 1),
        kept=kept,
        protected=kept & ((at < sinks) | (at >= P - recent)),
        query=np.pad(query, ((0, 0), (0, 0), (sinks, 0), (0, 0))),  # of the first tokens, whose queries do not count
        frequency=o.context.frequency[0],
        output=np.asarray(o.context.projection.weight, np.float64),
        layer=0,
        budget=int(o.budget[b]),
        settled=False,
        memory={},
        choices=reference.Choices(),
        noise=np.zeros((K, P)),
    )
    return Seen(**seen)


def lengths_of_older(block: blocks.Block) -> np.ndarray:
    """|v W_O|_1 of each slot, the group's mean, as critical remembers it; 0 of the tokens that have just entered."""
    o = jax.tree.map(np.asarray, block.observation)
    lengths = abs(np.einsum("bksd,kgde->bkgse", o.value, o.context.projection.weight, dtype=np.float64)).sum(-1).mean(2)
    older = o.position < (o.next_position - block.valid.sum(1))[:, None, None]
    return np.where(older, definitions.rounded(lengths), 0).astype(np.float32)


@pytest.mark.parametrize("name", LINKS)
def test_a_link_says_of_a_block_what_the_reference_does(name):
    policy = reference.policy(name)
    block = blocks.make(11, window=policy.window or 2, budget=6, same_heads=policy.heads == "layer")
    found = scores(name, block, ((), lengths_of_older(block), ()) if "critical" in name else None)
    assert not np.isnan(found[live_of(block)]).any()
    for b in range(B):
        seen = seen_by(policy, block, b)
        expected = np.where(seen.protected, np.inf, policy.scores(seen))
        for k, s in np.argwhere(live_of(block)[b]):
            p = int(block.observation.position[b, k, s])
            close(found[b, k, s], expected[k, p], rtol=3e-5, atol=seen.noise[k, p] + 2e-6, err_msg=f"{b} {k} {p}")


def test_triattention_says_what_the_reference_does(tmp_path):
    np.save(tmp_path / "centres.npy", np.random.default_rng(0).normal(size=(1, K, G, 3 * D // 2)))
    test_a_link_says_of_a_block_what_the_reference_does(f"triattention(file='{tmp_path}/centres.npy',future=8)")


# Base scores.


def test_key_norm_of_a_bfloat16_cache_is_computed_in_float32():
    block = blocks.make(10)
    rounded = np.asarray(block.observation.key).astype(jnp.bfloat16)
    expected = scores("key_norm", block.observation._replace(key=rounded.astype(np.float32)))
    np.testing.assert_array_equal(scores("key_norm", block.observation._replace(key=rounded)), expected)


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


def test_rkv_forgets_the_queries_of_tokens_that_were_taken_back():
    """Three of positions 4 to 6 are held; after a rewind to 5 one token comes in there, and another row is idle."""
    held = np.arange(B * K * 3 * G * D, dtype=np.float32).reshape(B, K, 3, G, D)
    places = np.broadcast_to(np.int32([7, 6, 5]), (B, K, 3))  # of 6, 5 and 4, counted from 1
    state = scores_of_generations.LastQueries(kvjax.HeadState(held), kvjax.HeadState(places))
    position = np.full((B, T), -1, np.int32)
    position[0, 0] = 5
    seen = blocks.make(34).observation._replace(query_position=position)
    after = jax.jit(scores_of_generations.with_last)(state, seen)
    assert after.place.value[0].tolist() == [[6, 5, 0]] * K
    new = np.asarray(seen.query)[0, 0].reshape(K, G, D)
    np.testing.assert_array_equal(after.query.value[0, :, :2], np.stack([new, held[0, :, 2]], axis=1))
    np.testing.assert_array_equal(after.query.value[1], held[1])
    np.testing.assert_array_equal(after.place.value[1], places[1])


def test_rkv_compares_a_part_of_the_keys_at_a_time(monkeypatch):
    block = blocks.make(34)
    whole = scores("rkv(window=2,kernel=3)", block)
    monkeypatch.setattr(scores_of_generations, "_SLOTS", 4)
    parts = jax.jit(kvjax.rkv(window=2, kernel=3).update)(None, started(kvjax.rkv(window=2)), block.observation)[0]
    live = live_of(block) & np.isfinite(whole)  # what is protected has no score of its own
    close(np.asarray(parts)[:, :, 0][live], whole[live])


def test_keydiff_of_a_zero_key_is_zero():
    block = blocks.make(33)
    zeros = block.observation._replace(key=np.zeros_like(block.observation.key))
    np.testing.assert_array_equal(scores("keydiff", zeros), each_head(block, lambda b, k, live: 0.0))


def test_expected_attention_does_not_lose_a_small_covariance_beside_a_large_mean():
    policy, seen = kvjax.expected_attention(future=4, sinks=0), blocks.make(35).observation
    still = blocks.in_context(seen, frequency=np.zeros((1, D // 2), np.float32))
    rng = np.random.default_rng(35)
    state, past = started(policy), []
    for start in range(0, 40, 4):
        query = (100 + 0.1 * rng.normal(size=(B, 4, N, D))).astype(np.float32)
        past.append(query.astype(np.float64))
        position = np.tile(np.arange(start, start + 4, dtype=np.int32), (B, 1))
        _, state = blocks.compiled(policy)(state, still._replace(query=query, query_position=position))
    queries = np.concatenate(past, axis=1).reshape(B, -1, K, G, D)
    deviation = queries - queries.mean(1, keepdims=True)
    products = np.einsum("btkgd,btkge->bkgde", deviation, deviation)
    np.testing.assert_allclose(state[2].value, products, rtol=1e-2, atol=1e-2 * products.max())


def test_expected_attention_takes_a_scale_of_the_logits_for_queries_that_are_so_much_longer():
    policy, rng = kvjax.expected_attention(), np.random.default_rng(36)
    q, k, v = (rng.normal(size=(1, 3 * T, 1, D)).astype(np.float32) for _ in range(3))
    said = []
    for length, scale in ((1, None), (0.5, 2 * D**-0.5)):
        cache = kvjax.empty_cache(policy, kv_heads=1, head_dim=D, budget=T, block=T)
        context = kvjax.Context(scale=scale, frequency=np.ones((1, D // 2), np.float32))
        step = jax.jit(functools.partial(kvjax.observe, policy=policy, budget=T))
        for at in range(0, 3 * T, T):
            here = slice(at, at + T)
            _, cache, evidence = step(cache, length * q[:, here], k[:, here], v[:, here], context=context)
            cache = jax.jit(kvjax.evict)(cache, evidence, T)
        said.append(evidence.scores)
    close(*said)


@pytest.mark.parametrize("gap", [0, 7])
def test_what_a_network_predicts_of_a_token_is_its_own_whatever_positions_lie_between(gap):
    rng, predicted = np.random.default_rng(38), np.arange(1.0, 5, dtype=np.float32)[None, :, None]
    q, k, v = (rng.normal(size=(1, 4, 1, D)).astype(np.float32) for _ in range(3))
    context = kvjax.Context(predicted=kvjax.Prediction(score=predicted))
    policy, position = kvjax.parse("zap@uniform"), np.array([[0, 1, 2, 3]]) + gap * np.array([0, 0, 1, 1])
    step = jax.jit(functools.partial(kvjax.observe, policy=policy, budget=6))
    cache = kvjax.empty_cache(policy, kv_heads=1, head_dim=D, budget=6, block=4)
    _, cache, evidence = step(cache, q, k, v, position, context=context)
    by_position = {int(p): float(s) for p, s in zip(cache.position[0, 0], evidence.scores[0, 0], strict=True)}
    assert len({by_position[int(p)] for p in position[0]}) == 4
    assert by_position[int(position[0, -1])] == max(by_position.values())


@pytest.mark.parametrize("order", [[1, 2, 4, 5], [4, 5, 1, 2], [5, 1, 4, 2]])
def test_what_a_network_predicts_of_a_token_is_its_own_in_whatever_order_tokens_come(order):
    q, k, v = np.random.default_rng(38).normal(size=(3, 1, 4, 1, D)).astype(np.float32)
    policy = kvjax.parse("zap@uniform")
    step = jax.jit(functools.partial(kvjax.observe, policy=policy, budget=6))
    cache = kvjax.empty_cache(policy, kv_heads=1, head_dim=D, budget=6, block=2)
    for start in (0, 2):
        own = np.array([order[start : start + 2]])
        context = kvjax.Context(predicted=kvjax.Prediction(score=own[..., None].astype(np.float32)))
        _, cache, evidence = step(cache, *(x[:, start : start + 2] for x in (q, k, v)), own, context=context)
    scores = {int(p): float(s) for p, s in zip(cache.position[0, 0], evidence.scores[0, 0], strict=True) if p >= 0}
    assert sorted(scores, key=scores.__getitem__) == [1, 2, 4, 5]


def test_sage_keeps_what_it_chose_in_a_row_without_a_query_in_the_block():
    policy, block = kvjax.sage(), blocks.make(37)
    seen = block.observation
    _, state = blocks.compiled(policy)(started(policy), seen)
    assert (np.asarray(state[1])[np.asarray(seen.position)[1] >= 0] > 0).any()
    query_position, last = np.array(seen.query_position), np.array(seen.columns.last)
    query_position[1], last[1] = -1, 0
    idle = seen._replace(query_position=query_position, columns=seen.columns._replace(last=last))
    np.testing.assert_array_equal(np.asarray(blocks.compiled(policy)(state, idle)[1])[1], np.asarray(state)[1])


def test_butler_leaves_out_slots_that_are_not_filled_yet():
    """Leave those that are filled to whole runs: tests/campaign."""
    seen, held = blocks.make(36).observation, np.random.default_rng(36).normal(size=(B, K, S, G, DIM))
    position, held = np.array(seen.position), held.astype(np.float32)
    position[:, :, 6:] = -1
    o = blocks.in_context(seen, layer=np.int32(1))._replace(position=position)
    expected = scores(kvjax.butler(dim=DIM), o, held)
    found = scores(kvjax.butler(dim=DIM), blocks.in_context(o, filled=6), held)
    close(found, expected)


def test_a_predictors_width_is_filled_in_once():
    fitted = kvjax.fit_predictor(kvjax.parse("butler+caote@layer"), 16)
    assert str(fitted) == "butler(dim=16)+caote@layer" and fitted.allocation.name == "layer"
    assert kvjax.fit_predictor(fitted, 16) is fitted
    assert kvjax.fit_predictor(kvjax.parse("butler@model"), 16).init(1, 2, 2, 5, 8)[0].shape == (1, 2, 5, 2, 16)
    assert kvjax.fit_predictor(kvjax.parse("h2o"), 16) is kvjax.parse("h2o")


# Transformations.


@pytest.mark.parametrize("link", first(2, ["pool(kernel=3)", "normalise", "chunks(size=2)"]))
def test_a_mark_is_no_number_for_the_links_behind_it(link):
    """Show it by a share or a mean, which of float32's largest number would be a number like others."""
    block, marks = blocks.make(14), "tova(heads='group')+critical(safe=0.5)"
    sure = scores(marks, block) == LARGEST
    assert sure.any()
    found = scores(f"{marks}+{link}", block)
    assert (found[sure] == LARGEST).all()
    assert (found[~sure & np.isfinite(found)] < 100).all()


def test_where_all_heads_keep_the_same_tokens_a_mark_is_that_of_all_heads():
    same = blocks.make(14, same_heads=True)
    sure = scores("tova(heads='group')+critical(safe=0.5)", same) == LARGEST
    assert (sure.sum(axis=1) == K).any()
    averaged = scores("tova+critical(safe=0.5)", same)
    np.testing.assert_array_equal(averaged == LARGEST, np.broadcast_to(sure.all(axis=1, keepdims=True), sure.shape))
    assert (averaged[(averaged != LARGEST) & np.isfinite(averaged)] < 100).all()


def test_a_share_is_of_each_rows_own_budget():
    block = blocks.make(19, next_position=(12, 12))
    result = scores("h2o", block.observation._replace(budget=np.int32([4, 10])))
    position = np.asarray(block.observation.position)
    np.testing.assert_array_equal(result == np.inf, position >= np.array([10, 7])[:, None, None])


# What holds for every link.


@pytest.mark.parametrize("name", LINKS)
def test_live_slots_have_scores_whatever_free_slots_hold_and_a_head_without_tokens_spoils_no_other(name):
    block = blocks.make(20)
    live, o = live_of(block), block.observation
    assert not live.all()
    expected = scores(name, block)
    np.testing.assert_array_equal(np.isnan(expected), ~live)
    for bad in (np.nan, np.inf):
        rows = {side: np.where(live[..., None], getattr(o, side), np.float32(bad)) for side in ("key", "value")}
        np.testing.assert_array_equal(scores(name, o._replace(**rows)), expected)
    emptied, columns = jax.tree.map(np.array, (o.position, o.columns))
    emptied[0, 0] = -1
    for column in jax.tree.leaves(columns):
        column[0, 0] = 0
    result = scores(name, o._replace(position=emptied, columns=columns))
    np.testing.assert_array_equal(result[1], expected[1])


def test_equal_keys_have_one_norm_wherever_they_are_rotated_to():
    S, D = 45, 64
    key = np.broadcast_to(np.random.default_rng(D).normal(size=D).astype(np.float32), (1, 1, S, D))
    frequency = (10_000.0 ** -(np.arange(D // 2) / (D // 2))).astype(np.float32)
    position, none = np.arange(S, dtype=np.int32)[None, None], np.zeros((1, 1, 1, D), np.float32)

    @jax.jit
    def norms(key):
        turned = kvjax.turn(key, position, frequency)
        seen = kvjax.Observation(
            None, none, np.array([[S - 1]]), turned, turned, position, np.array([S]), np.array([4])
        )
        return blocks.retention_scores(kvjax.key_norm(), (), seen)[0]

    assert len(np.unique(norms(key))) == 1


def test_equal_values_have_one_norm_in_critical_however_many_enter():
    rng = np.random.default_rng(0)
    value = np.broadcast_to(rng.normal(size=16).astype(np.float32), (1, 1, 45, 16))
    weight = rng.normal(size=(1, 2, 16, 32)).astype(np.float32)
    lengths = jax.jit(_output_length, static_argnums=2)
    found = [lengths(value[:, :, :T], weight, chunk) for T, chunk in ((1, 128), (7, 128), (45, 128), (45, 4))]
    assert len(np.unique(np.concatenate(found, axis=-1))) == 1
