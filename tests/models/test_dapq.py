"""DapQ: scores by brute force over all that was fed, and its tokens leave no trace, in any layout, batch and turn."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
import models
from models import engine
from models.by_layer import LayerSteps
from models.plan import moments
from tests.kvjax import definitions
from tests.models.test_kvzip import in_order_rows, kept

CONFIG = models.Config(64, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, max_positions=256)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 40))
LENGTHS = np.array([40, 23])
L, K, G, D, N = 2, 2, 2, 8, 6
NAME = f"dapq(window={N},kernel=3)"


@pytest.fixture(scope="module")
def model():
    return models.Decoder(CONFIG, rngs=nnx.Rngs(1))


def dense_rows(model, tokens):
    """Queries [L, T, heads, D], keys and values of a dense run, each layer's as attention takes them."""
    T = len(tokens)

    def keep(carry, layer, window, query, key, value):
        cache = kvjax.KVCache.init(batch=1, kv_heads=K, slots=T, head_dim=D)
        out, _ = kvjax.attend(cache, query, key, value)
        return out, carry, (query[0], key[0], value[0])

    _, _, rows = model.run(jnp.asarray(tokens)[None], jnp.arange(T)[None], jnp.array([T]), keep, 0)
    return [np.asarray(x, np.float64) for x in rows]


def score_by_hand(model, prompt, fed):
    """Brute force [L, K, T]: the mean attention of the tokens behind the prompt, pooled before its last N tokens."""
    T = len(prompt)
    query, key, _ = dense_rows(model, np.concatenate([prompt, fed]))
    at, scores = np.arange(T + len(fed)), np.zeros((L, K, T))
    for layer, k in np.ndindex(L, K):
        rows = [
            definitions.attention_weights(query[layer, t, k * G + g], key[layer, :, k], at, t)[:T]
            for g in range(G)
            for t in range(T, T + len(fed))
        ]
        mean = np.mean(rows, axis=0)
        before = np.where(at[:T] < T - N, mean, 0)
        pooled = definitions.pooled(before, at[:T], 3, "avg")
        scores[layer, k] = np.where(at[:T] < T - N, pooled, np.inf)
    return scores


def best(scores, budget):
    at = np.arange(scores.shape[-1])
    return np.stack([[definitions.kept(head, at, budget) for head in layer] for layer in scores])


@pytest.mark.parametrize("which", ["last", "first"])
def test_the_tokens_that_stay_are_those_of_brute_force(model, which):
    prompt = TOKENS[0]
    fed = prompt[-N:] if which == "last" else prompt[:N]
    expected = best(score_by_hand(model, prompt, fed), 14)
    policy = f"dapq(window={N},kernel=3,tokens={which!r})"
    cache, _ = models.prefill(model, prompt[None], policy=policy, budget=14, block=8)
    np.testing.assert_array_equal(kept(cache, 40)[:, 0], expected)
    assert cache.next_position.tolist() == [40]


def test_the_pseudo_tokens_come_behind_the_context_not_behind_the_question(model):
    prompt = TOKENS[0]
    expected = best(score_by_hand(model, prompt[:37], prompt[37 - N : 37]), 14)
    cache, _ = models.prefill(model, prompt[None], policy=NAME, budget=14, block=8, question=3)
    np.testing.assert_array_equal(kept(cache, 40)[:, 0, :, :37], expected)
    assert kept(cache, 40)[..., 37:].all()


def test_a_prompt_shorter_than_the_window_is_fed_more_than_once(model):
    given = engine.check_prompt(model, TOKENS, np.array([4, 23]), None)
    wanted = kvjax.parse(NAME).needs.reconstruction
    blocks = engine.repeats_of(given, wanted, 8, exact=True)
    assert blocks.tokens[0, 0, -N:].tolist() == [*TOKENS[0, :4], *TOKENS[0, :2]]
    assert blocks.tokens[0, 1, -N:].tolist() == TOKENS[1, 23 - N : 23].tolist()
    assert blocks.positions[0, :, -N:].tolist() == [list(range(4, 4 + N)), list(range(23, 23 + N))]
    assert blocks.parts[0].tolist() == [[0, 4, 4], [0, 23, 23]]


def test_they_leave_no_trace(model):
    cache, logits = models.prefill(model, TOKENS, LENGTHS, policy=NAME, budget=1.0, block=8)
    full, expected = models.prefill(model, TOKENS, LENGTHS, block=8)
    np.testing.assert_allclose(logits, expected, atol=1e-6)
    for what in ("key", "value"):
        ours, theirs = (in_order_rows(c, getattr(c, what)) for c in (cache, full))
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


TOGETHER = dict(policy=f"{NAME}+caote@adakv", budget=14, block=8, question=3)


@pytest.fixture(scope="module")
def together(model):
    return kept(models.prefill(model, TOKENS, LENGTHS, **TOGETHER).cache, 40)


def test_a_row_keeps_the_same_alone_and_in_a_batch(model, together):
    alone, _ = models.prefill(model, TOKENS[1:, :23], **TOGETHER)
    np.testing.assert_array_equal(kept(alone, 40)[:, 0], together[:, 1])


def test_layer_by_layer_the_same_tokens_stay(model, together):
    given = engine.check_prompt(model, TOKENS, LENGTHS, 3)
    options = engine.Options(kvjax.parse(TOGETHER["policy"]), 14, 8)
    run, prompt = engine.prepare(model, given, options, None, None, None)
    state, _ = engine._fed(LayerSteps(run), prompt, None)
    np.testing.assert_array_equal(kept(state.cache, 40), together)


def test_among_many_policies_the_same_tokens_stay(model, together):
    asked = ["streaming", TOGETHER["policy"]]
    _, each = models.prefill_each(model, TOKENS, LENGTHS, policies=asked, budget=14, block=8, question=3)
    np.testing.assert_array_equal(kept(each.cache, 40), together)


def test_a_second_turn_is_observed_with_all_that_came_before(model):
    settings = dict(policy=NAME, budget=1.0, block=8)
    first, _ = models.prefill(model, TOKENS[:1, :24], **settings)
    cache, _ = models.prefill(model, TOKENS[:1, 24:], cache=first, policy=NAME, budget=14, block=8)
    expected = best(score_by_hand(model, TOKENS[0], TOKENS[0, -N:]), 14)
    np.testing.assert_array_equal(kept(cache, 40)[:, 0], expected)


def test_answers_of_the_engine_are_those_of_generate(model):
    settings = dict(policy=NAME, budget=14, block=8, max_new_tokens=3)
    served = models.Engine(model, rows=2, **settings)
    handle = served.submit(TOKENS[0].tolist())
    answer = [made.token for made in served.run() if made.handle == handle]
    assert answer == models.generate(model, TOKENS[:1], **settings).tokens[0].tolist()


def test_cake_may_measure_the_pseudo_queries_and_no_words_are_asked():
    policy = kvjax.parse(f"{NAME}@cake")
    assert policy.needs.window == N and "window_log" in policy.needs.statistics | policy.allocation.statistics
    _, tokenizer = models.load("retriever")
    assert models.with_repeat_prompt(policy, tokenizer) is policy
    for when in ("block", "prompt", "published"):
        assert moments(kvjax.parse("dapq"), when, None) == ("prompt", 0)


@pytest.mark.bad_input
def test_a_block_holds_all_pseudo_tokens(model):
    with pytest.raises(ValueError, match=r"observes the last 6 queries, but a block has 4: give a block of at least 6"):
        models.prefill(model, TOKENS, policy=NAME, budget=14, block=4)


def test_a_row_whose_turn_is_only_a_question_has_no_pseudo_tokens(model):
    settings = dict(policy="dapq(window=4)", budget=16, block=8)
    kept = models.prefill(model, TOKENS[:, :30], **settings).cache
    both = models.prefill(model, TOKENS[:, 30:], cache=kept, question=np.array([3, 10]), **settings)
    one = models.prefill(model, TOKENS[1:, :30], **settings).cache
    alone = models.prefill(model, TOKENS[1:, 30:], cache=one, question=10, **settings)
    np.testing.assert_allclose(both.logits[1], alone.logits[0], atol=1e-4)
