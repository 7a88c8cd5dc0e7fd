"""Layers with a sliding window: they hold what a later query can see, and policies choose among that."""

import functools

import jax
import numpy as np
import pytest

import kvjax
import models
from kvjax import KVCache, PagedCache
from models import engine, states
from models.engine import logits_of
from models.options import Options
from models.prompts import check_prompt
from tests.models import tiny
from tests.models.tiny import LONG, decoder, run
from tests.tiers import first

WINDOWS = (6, None, 9)
CONFIG = tiny.config(num_layers=3, sliding_windows=WINDOWS)  # narrower than the budgets
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 40))
LENGTHS = np.array([40, 23])
AMPLE = dict(budget=56, block=8)  # more tokens than there are: only what has left a window goes


def model() -> models.Decoder:
    return tiny.decoder(CONFIG)


@functools.cache
def full(row: int):
    """The row's dense run, and an answer."""
    return run(TOKENS[row, : LENGTHS[row]], CONFIG, new_tokens=12)


def held(cache) -> np.ndarray:
    """The tokens of the fullest head of each layer."""
    return np.array([(layer >= 0).sum(-1).max() for layer in tiny.positions(cache)])


def test_a_budget_that_holds_every_window_gives_the_logits_of_the_full_cache():
    result = models.hidden_states(model(), TOKENS, lengths=LENGTHS, policy="keydiff", **AMPLE)
    logits = np.asarray(logits_of(model(), result.hidden))
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(logits[row, :length], full(row).logits[:length], atol=1e-4)
    assert isinstance(result.cache, PagedCache)
    assert held(result.cache).tolist() == [5, 40, 8]


@pytest.mark.parametrize(("window", "kept"), first(1, [(3, 2), (5, 4)]), ids=["pages", "plain"])
def test_a_sink_that_left_the_window_protects_nothing(window, kept):
    policy, rng = kvjax.parse("streaming(sinks=2)"), np.random.default_rng(1)
    sizes = dict(layers=None, kv_heads=1, query_heads=1, head_dim=4, windows=(window,))
    cache = tiny.empty(policy, budget=4, block=2, **sizes)
    assert isinstance(cache, KVCache if window > 4 else PagedCache)
    attend = jax.jit(functools.partial(kvjax.attend, policy=policy, budget=4))
    for end in range(2, 13, 2):
        rows = rng.normal(size=(1, 2, 1, 4)).astype(np.float32)
        _, cache = attend(cache, rows, rows, rows, context=kvjax.Context(sliding_window=np.int32(window)))
        position = np.asarray(cache.position)
        assert np.sort(position[position >= 0]).tolist() == list(range(max(0, end - kept), end))


@pytest.mark.parametrize(("policy", "held"), first(1, [("h2o", 2), (None, 6), ("kvzip(sinks=0)", 4)]))
def test_a_full_cache_and_a_block_that_is_taken_back_free_nothing(policy, held):
    sizes = dict(layers=None, kv_heads=1, query_heads=1, head_dim=4, budget=9, block=1, windows=None)
    cache, rows = tiny.empty(policy, **sizes), np.ones((1, 2, 1, 4), np.float32)
    observe = jax.jit(functools.partial(kvjax.observe, policy=policy))
    usual = kvjax.Context(sliding_window=3)
    part = kvjax.Reconstructed(*(np.array([x], np.int32) for x in (0, 2, 4)))
    for context in (usual, usual, usual if policy != "kvzip(sinks=0)" else kvjax.Context(None, 3, reconstructed=part)):
        _, cache, _ = observe(cache, rows, rows, rows, context=context)
    assert (np.asarray(cache.position) >= 0).sum() == held


@pytest.mark.matrix
def test_policies_that_share_a_prompt_free_and_the_full_cache_beside_them_does_not():
    policies = ["full", "h2o", "snapkv(window=4)"]
    whole, _, together = models.prefill_each(model(), TOKENS[:1], policies=policies, budget=12, block=8)
    np.testing.assert_allclose(np.asarray(whole.logits)[0], full(0).logits[39], atol=1e-4)
    assert held(whole.cache).tolist() == [40, 40, 40]
    alone = models.prefill(model(), TOKENS[:1], policy="snapkv(window=4)", budget=12, block=8, when="prompt")
    np.testing.assert_allclose(together.logits, alone.logits, atol=1e-5)
    assert held(together.cache).tolist() == held(alone.cache).tolist() == [5, 12, 8]
    assert together.cache.nbytes == alone.cache.nbytes


@pytest.mark.matrix
def test_requests_that_come_and_go_get_the_tokens_that_they_get_alone(run_by_layer):
    """Under a ratio, a short prompt's budget fits the windows, and a long one's takes pages."""
    settings = dict(policy="h2o+caote", block=8, budget=0.5)
    engine = models.Engine(model(), rows=2, max_new_tokens=6, longest_prompt=40, **settings)
    prompts = [TOKENS[0], TOKENS[1, :9], TOKENS[1]]
    handles = [engine.submit(prompt, max_new_tokens=6) for prompt in prompts]
    found = {handle: [] for handle in handles}
    for made in engine.run():
        found[made.handle].append(made.token)
    for handle, prompt in zip(handles, prompts, strict=True):
        alone = run(prompt, CONFIG, new_tokens=6, **settings).tokens
        assert found[handle] == alone


def of_windows(*windows: int | None) -> models.Decoder:
    return tiny.decoder(tiny.config(num_layers=len(windows), sliding_windows=windows))


TEXT = np.random.default_rng(2).integers(0, 64, (1, 320))


@pytest.mark.matrix
def test_a_turn_that_is_evicted_from_once_finds_pages_for_its_blocks():
    small = of_windows(8, None)
    settings = dict(policy="streaming(sinks=2)", budget=40, when="prompt", block=64, page_size=2)
    cache = models.prefill(small, TEXT[:, :100], **settings).cache
    turn = models.prefill(small, TEXT[:, 100:160], cache=cache, **settings)
    assert np.asarray(turn.cache.num_live)[:, 0].tolist() == [[7, 7], [40, 40]]


@pytest.mark.matrix
def test_layers_that_gave_slots_away_grow_back_to_their_windows_in_a_long_answer():
    settings = dict(budget=128, block=8, page_size=1, evict_every=0, max_new_tokens=64, end=())
    cache = models.generate(of_windows(None, 64), TEXT[:, :300], policy="keydiff@pyramid", **settings).cache
    assert np.asarray(cache.num_live)[:, 0].tolist() == [[250, 250], [63, 63]]


def assert_pages_are_whole(cache):
    """Every page is owned once or free; each head has the fewest pages that hold its tokens."""
    table, free = np.asarray(cache.table), np.asarray(cache.free)[: int(cache.num_free)]
    owned = table[table >= 0]
    assert sorted([*owned.tolist(), *free.tolist()]) == list(range(len(cache.owner)))
    np.testing.assert_array_equal((table >= 0).sum(axis=-1), -(-np.asarray(cache.num_live) // cache.page_size))


@pytest.mark.matrix
def test_a_head_that_wins_all_slots_after_a_long_question_loses_no_token():
    favourite = kvjax.base_score("favourite", lambda o: (o.position + 1e4 * (o.head[:, None] == 0))[:, :, None] + 0.0)
    out = models.generate(
        decoder(), tiny.TOKENS[:1, :40], policy=favourite @ "model(normalise=False)", budget=4, block=4, question=24,
        max_new_tokens=40, page_size=4, end=(),
    )  # fmt: skip
    newest = np.array([out.cache.layer(index).position.max(axis=-1)[0] for index in range(2)])
    assert (newest[:, 0] == 40 + 40 - 2).all()
    assert_pages_are_whole(out.cache)


def test_pages_are_for_the_rows_budgets_not_for_the_largest_one():
    tokens, lengths = np.resize(LONG[0], (4, 200)), np.array([200, 20, 20, 20])
    options = Options("h2o@layer", 0.2, 8, page_size=4)
    own, sizes, _ = engine.prepare(decoder(), check_prompt(decoder(), tokens, lengths, None), options)
    cache = jax.eval_shape(lambda: states.start(own, sizes, 4)).cache
    heads, held = 4, 40 + 4 * 3
    assert cache.position.size <= heads * (held + 4 * 8) + heads * 4 * 4
