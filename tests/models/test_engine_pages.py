"""Layers with a sliding window, in slots and in pages: they hold what a later query can see, and no more."""

import functools

import jax
import numpy as np
import pytest

import kvjax
import models
from kvjax import KVCache, LayerCaches, PagedCache
from kvjax._src.cache import part_of_kind
from kvjax._src.window import Window
from models import engine, states
from models.engine import logits_of
from models.options import Options
from models.prompts import check_prompt
from tests.models import tiny
from tests.models.tiny import LONG, decoder, run
from tests.tiers import first, matrix

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


SLOTS = (6 + 8, 12 + 8, 9 + 8)  # of the layers, under a budget of 12 in blocks of 8


@pytest.mark.parametrize(("policy", "kind"), [("keydiff", LayerCaches), ("keydiff@layer(cap=1)", PagedCache)])
def test_a_budget_that_holds_every_window_gives_the_logits_of_the_full_cache(policy, kind):
    result = models.hidden_states(model(), TOKENS, lengths=LENGTHS, policy=policy, **AMPLE)
    logits = np.asarray(logits_of(model(), result.hidden))
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(logits[row, :length], full(row).logits[:length], atol=1e-4)
    assert isinstance(result.cache, kind)
    assert held(result.cache).tolist() == [5, 40, 8]


WITH_COPIES = (25, 64, 28)  # 19 for a block and the copies of its tokens beside each window; a power of two


@pytest.mark.parametrize(
    ("policy", "expected_slots"),
    first(
        1,
        [
            ("h2o+caote", SLOTS),
            ("snapkv(window=4)", SLOTS),
            ("kvzip(chunk=3)@uniform", WITH_COPIES),
            ("expected_attention", SLOTS),
        ],
    ),
)
def test_layers_keep_their_slots_through_prompt_and_answer_and_what_the_reference_keeps(policy, expected_slots):
    settings = dict(policy=policy, budget=12, block=8)
    seen = []
    steps = models.stream(
        model(), TOKENS, lengths=LENGTHS, max_new_tokens=12, end=(), **settings,
        on_block=lambda done, total, cache: seen.append((cache.layer_slots, held(cache))),
    )  # fmt: skip
    for _, cache in steps:
        seen.append((cache.layer_slots, held(cache)))
    assert {slots for slots, _ in seen} == {expected_slots}
    assert all((most <= slots).all() for slots, most in seen) and (seen[-1][1][[0, 2]] < [6, 9]).all()
    for row, length in enumerate(LENGTHS):
        tiny.assert_keeps(cache, row, run(TOKENS[row, :length], CONFIG, new_tokens=12, **settings))


@pytest.mark.parametrize(("policy", "copies"), first(1, [("kvzip(chunk=9)@uniform", 8 + 9), ("h2o+caote", 0)]))
def test_a_prompt_that_is_evicted_from_once_takes_a_window_and_a_block_where_there_is_a_window(policy, copies):
    settings = dict(policy=policy, budget=12, block=8, when="prompt")
    given = check_prompt(model(), TOKENS[:1], None, None)
    sizes = engine.prepare(model(), given, Options(**settings))[1]
    assert sizes.prompt_slots == (6 + 8 + copies, kvjax._src.capacity.rounded_up(40 + copies), 9 + 8 + copies)
    out = models.prefill(model(), TOKENS[:1], **settings)
    tiny.assert_keeps(out.cache, 0, run(TOKENS[0], CONFIG, **settings))


@matrix
def test_a_turn_frees_what_a_full_cache_held_behind_the_window():
    """A layer's first block comes in beside all that it held, more than its window and a block."""
    whole = models.prefill(model(), TOKENS[:1, :24], block=8)
    turn = models.prefill(model(), TOKENS[:1, 24:], cache=whole.cache, policy="keydiff", **AMPLE)
    np.testing.assert_allclose(np.asarray(turn.logits)[0], full(0).logits[39], atol=1e-4)
    assert held(turn.cache).tolist() == [5, 40, 8]
    cache = models.prefill(model(), TOKENS[:1, :39], policy="keydiff", **AMPLE).cache
    again = models.prefill(model(), TOKENS[:1, 39:], cache=cache)
    np.testing.assert_allclose(np.asarray(again.logits)[0], full(0).logits[39], atol=1e-4)
    assert held(again.cache).tolist() == [6, 40, 9]  # without a policy nothing is freed


def test_an_eviction_begins_a_window_anew_in_a_layer_of_few_slots_too():
    """And a row that waits, with a budget above all slots, goes on in each layer."""
    policy, sizes = kvjax.parse("snapkv(window=4)"), dict(budget=24, block=4, head_dim=4, kv_heads=1, query_heads=1)
    cache = tiny.empty(policy, batch=2, layers=2, windows=(6, None), **sizes)
    assert cache.layer_slots == (10, 28)
    rows = np.random.default_rng(0).normal(size=(2, 2, 1, 4)).astype(np.float32)

    @jax.jit
    def step(cache, budget):
        for layer, window in enumerate((6, None)):
            context = kvjax.Context(layer=layer, sliding_window=window)
            _, cache = kvjax.attend(cache, rows, rows, rows, policy=policy, budget=budget, context=context)
        return cache

    cache = step(cache, np.array([24, 29]))
    assert [own.state.others[0].queries.value[:, 0].tolist() for own in cache.layers] == [[0, 2], [0, 2]]


@pytest.mark.parametrize("policy", first(1, ["snapkv(window=4)@pyramid", "snapkv(window=4)"]))
def test_where_every_layer_has_a_window_a_budget_above_all_slots_evicts_like_any_other(policy):
    narrow, settings = tiny.config(num_layers=2, sliding_windows=(6, 9)), dict(budget=30, block=8, when="prompt")
    long = dict(policy=policy, max_new_tokens=40, end=(), evict_every=0)  # whose slots do not count before it
    _, cache = next(models.stream(tiny.decoder(narrow), TOKENS[:1], **long, **settings))
    tiny.assert_keeps(cache, 0, run(TOKENS[0], narrow, policy=policy, **settings))
    windows = [part_of_kind(own.state, Window) for own in ((cache,) if cache.paged else cache.layers)]
    assert all((np.asarray(window.queries.value) == 0).all() for window in windows)


SINKS = [  # a policy, a layer's window, the tokens that stay, the kind of cache
    ("streaming(sinks=2)", 3, 2, KVCache),
    ("streaming(sinks=2)@layer(cap=1)", 3, 2, PagedCache),
    ("streaming(sinks=2)", 5, 4, KVCache),
]


@pytest.mark.parametrize(("policy", "window", "kept", "kind"), first(2, SINKS))
def test_a_sink_that_left_the_window_protects_nothing(policy, window, kept, kind):
    policy, rng = kvjax.parse(policy), np.random.default_rng(1)
    sizes = dict(layers=None, kv_heads=1, query_heads=1, head_dim=4, windows=(window,))
    cache = tiny.empty(policy, budget=4, block=2, **sizes)
    assert isinstance(cache, kind)
    attend = jax.jit(functools.partial(kvjax.attend, policy=policy, budget=4))
    for end in range(2, 13, 2):
        rows = rng.normal(size=(1, 2, 1, 4)).astype(np.float32)
        _, cache = attend(cache, rows, rows, rows, context=kvjax.Context(sliding_window=np.int32(window)))
        position = np.asarray(cache.position)
        assert np.sort(position[position >= 0]).tolist() == list(range(max(0, end - kept), end))


@pytest.mark.parametrize(("policy", "held"), first(1, [("h2o", 2), (None, 6), ("kvzip(sinks=0)@uniform", 4)]))
def test_a_full_cache_and_a_block_that_is_taken_back_free_nothing(policy, held):
    sizes = dict(layers=None, kv_heads=1, query_heads=1, head_dim=4, budget=9, block=1, windows=None)
    cache, rows = tiny.empty(policy, **sizes), np.ones((1, 2, 1, 4), np.float32)
    observe = jax.jit(functools.partial(kvjax.observe, policy=policy))
    usual = kvjax.Context(sliding_window=3)
    part = kvjax.Reconstructed(*(np.array([x], np.int32) for x in (0, 2, 4)))
    for context in (
        usual,
        usual,
        usual if policy != "kvzip(sinks=0)@uniform" else kvjax.Context(None, 3, reconstructed=part),
    ):
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
@pytest.mark.parametrize(
    ("policy", "budget", "slots"),
    first(1, [("snapkv(window=4)", 12, SLOTS), ("h2o+caote", 0.5, (14, 28, 17)), ("h2o@layer", 0.5, (48,))]),
)
def test_requests_that_come_and_go_get_the_tokens_that_they_get_alone(policy, budget, slots, run_by_layer):
    settings = dict(policy=policy, block=8, budget=budget)
    engine = models.Engine(model(), rows=2, max_new_tokens=6, longest_prompt=40, **settings)
    prompts = [TOKENS[0], TOKENS[1, :9], TOKENS[1]]
    handles = [engine.submit(prompt, max_new_tokens=6) for prompt in prompts]
    found = {handle: [] for handle in handles}
    assert engine.cache.layer_slots == slots
    for made in engine.run():
        found[made.handle].append(made.token)
    assert engine.cache.layer_slots == slots
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
