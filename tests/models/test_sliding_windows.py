"""Layers with a sliding window: they hold what a later query can see, and policies choose among that."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import kvjax
import models
from kvjax import KVCache, PagedCache
from models import Config
from tests.models import tiny
from tests.models.tiny import answers, run
from tests.tiers import first

WINDOWS = (6, None, 9)
CONFIG = Config(
    64, 16, 24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, architecture="qwen3", query_key_norm=True,
    sliding_windows=WINDOWS, max_positions=96,
)  # fmt: skip
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
    return np.asarray(cache.num_live).max(axis=(1, 2))


@pytest.mark.parametrize(
    "policy", first(1, ["keydiff", "streaming(sinks=2)", "h2o+positions(kind='index')", "h2o@pyramid"])
)
def test_a_budget_that_holds_every_window_gives_the_logits_of_the_full_cache(policy):
    result = models.prefill(model(), TOKENS, LENGTHS, policy=policy, outputs="all", **AMPLE)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(np.asarray(result.logits)[row, :length], full(row).logits[:length], atol=1e-4)
    assert isinstance(result.cache, PagedCache)
    assert held(result.cache).tolist() == [5, 40, 8]


@pytest.mark.parametrize(
    ("policy", "when", "layers"),
    first(0, [
        ("snapkv(window=4)", "prompt", True),
        ("h2o+caote", "block", False),
        ("laprox(window=4)+positions@model", "block", False),
    ]),
)  # fmt: skip
def test_such_a_budget_gives_the_answer_of_the_full_cache(policy, when, layers, run_by_layer):
    run_by_layer(layers)
    out = models.generate(model(), TOKENS, lengths=LENGTHS, policy=policy, when=when, max_new_tokens=12, **AMPLE)
    assert answers(out) == [full(row).tokens for row in range(2)]
    assert held(out.cache).tolist() == [5, 51, 8]


@pytest.mark.parametrize(("window", "kept"), first(1, [(3, 2), (5, 4)]), ids=["pages", "plain"])
def test_a_sink_that_left_the_window_protects_nothing(window, kept):
    policy, rng = kvjax.parse("streaming(sinks=2)"), np.random.default_rng(1)
    cache = kvjax.empty_cache(policy, kv_heads=1, query_heads=1, head_dim=4, budget=4, block=2, windows=(window,))
    assert isinstance(cache, KVCache if window > 4 else PagedCache)
    attend = jax.jit(functools.partial(kvjax.attend, policy=policy, budget=4))
    for end in range(2, 13, 2):
        rows = rng.normal(size=(1, 2, 1, 4)).astype(np.float32)
        _, cache = attend(cache, rows, rows, rows, context=kvjax.Context(sliding_window=np.int32(window)))
        position = np.asarray(cache.position)
        assert np.sort(position[position >= 0]).tolist() == list(range(max(0, end - kept), end))


@pytest.mark.parametrize(("policy", "held"), first(1, [("h2o", 2), (None, 6), ("kvzip(sinks=0)", 4)]))
def test_a_full_cache_and_a_block_that_is_taken_back_free_nothing(policy, held):
    sizes = dict(kv_heads=1, query_heads=1, head_dim=4, budget=9)
    cache, rows = kvjax.empty_cache(policy, **sizes), np.ones((1, 2, 1, 4), np.float32)
    observe = jax.jit(functools.partial(kvjax.observe, policy=policy))
    usual = kvjax.Context(sliding_window=3)
    part = kvjax.Reconstructed(*(np.array([x], np.int32) for x in (0, 2, 4)))
    for context in (usual, usual, usual if policy != "kvzip(sinks=0)" else kvjax.Context(None, 3, reconstructed=part)):
        _, cache, _ = observe(cache, rows, rows, rows, context=context)
    assert cache.num_live.tolist() == [[held]]


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


@pytest.mark.parametrize(
    ("settings", "layers"),
    first(0, [(dict(budget=12), False), (dict(budget=0.5, longest_prompt=40), True)]),
    ids=["slots", "ratio"],
)
def test_requests_that_come_and_go_get_the_tokens_that_they_get_alone(settings, layers, run_by_layer):
    """Under a ratio, a short prompt's budget fits the windows, and a long one's takes pages."""
    run_by_layer(layers)
    settings = dict(policy="h2o+caote", block=8, **settings)
    engine = models.Engine(model(), rows=2, max_new_tokens=6, **settings)
    prompts = [TOKENS[0], TOKENS[1, :9], TOKENS[1]]
    handles = [engine.submit(prompt, max_new_tokens=6) for prompt in prompts]
    found = {handle: [] for handle in handles}
    for made in engine.run():
        found[made.handle].append(made.token)
    settings.pop("longest_prompt", None)
    for handle, prompt in zip(handles, prompts, strict=True):
        alone = run(prompt, CONFIG, new_tokens=6, **settings).tokens
        assert found[handle] == alone


@pytest.mark.matrix
def test_turns_in_a_kept_cache_go_on_in_its_pages():
    settings = dict(policy="snapkv(window=4)+caote", budget=12, block=8)
    beginning = models.prefill(model(), TOKENS[:, :24], **settings)
    end = models.prefill(model(), TOKENS[:, 24:], cache=beginning.cache, **settings)
    for row in range(2):
        expected = run(TOKENS[row], CONFIG, **settings).logits[-1]
        np.testing.assert_allclose(np.asarray(end.logits)[row], expected, atol=1e-4)
    assert end.cache.nbytes == beginning.cache.nbytes
    assert held(end.cache).tolist() == [5, 12, 8]


@pytest.mark.matrix
def test_on_several_devices_the_cache_is_plain_and_the_result_the_same():
    settings = dict(lengths=LENGTHS, policy="h2o", budget=12, block=8)
    several, one = (models.prefill(m, TOKENS, **settings) for m in (tiny.on_mesh(CONFIG, 1, 2), model()))
    assert isinstance(several.cache, KVCache) and isinstance(one.cache, PagedCache)
    assert several.cache.num_live.tolist() == one.cache.num_live.tolist()
    np.testing.assert_allclose(several.logits, one.logits, atol=1e-5)
    plain = models.prefill(model(), TOKENS, **settings | dict(budget=6)).cache
    assert isinstance(plain, KVCache)  # no window is smaller than the budget


def of_windows(*windows: int | None) -> models.Decoder:
    sizes = dict(num_layers=len(windows), num_heads=2, num_kv_heads=2, head_dim=8, max_positions=512)
    return tiny.decoder(Config(64, 16, 24, sliding_windows=windows, **sizes))


TEXT = np.random.default_rng(2).integers(0, 64, (1, 320))


@pytest.mark.matrix
def test_a_turn_that_is_evicted_from_once_finds_pages_for_its_blocks():
    small = of_windows(8, None)
    settings = dict(policy="streaming(sinks=2)", budget=40, when="prompt", block=64, page_size=2)
    cache = models.prefill(small, TEXT[:, :100], **settings).cache
    room = kvjax.paged.with_room(cache, pages=4096, most=4096)
    tight, ample = (models.prefill(small, TEXT[:, 100:160], cache=given, **settings) for given in (cache, room))
    np.testing.assert_allclose(tight.logits, ample.logits, atol=1e-5)
    np.testing.assert_array_equal(tight.cache.num_live, ample.cache.num_live)


@pytest.mark.parametrize(
    ("windows", "policy", "live"),
    first(0, [((None, 64), "keydiff@pyramid", [250, 63]), ((64, None), "keydiff@model(normalise=False)", None)]),
)
def test_layers_that_gave_slots_away_grow_back_to_their_windows_in_a_long_answer(windows, policy, live):
    settings = dict(policy=policy, budget=128, block=8, page_size=1, evict_every=0, max_new_tokens=64, end=())
    cache = models.generate(of_windows(*windows), TEXT[:, :300], **settings).cache
    held = np.asarray(cache.num_live)[:, 0]
    assert (held[windows.index(64)] == 63).all()
    if live is not None:
        assert held.tolist() == [[n, n] for n in live]


@pytest.mark.matrix
def test_an_answer_after_a_turn_that_evicted_nothing_finds_pages():
    small = of_windows(8, None)
    settings = dict(policy="keydiff", budget=40, block=8, page_size=1)
    cache = models.prefill(small, TEXT[:, :100], **settings).cache
    fed = models.prefill(small, TEXT[:, 100:228], cache=cache, policy=None, page_size=1)
    out = models.generate(small, fed, evict_every=0, max_new_tokens=60, end=(), **settings)
    assert np.asarray(out.cache.num_live)[1, 0].tolist() == [40 + 128 + 59] * 2


def test_pages_go_on_on_one_device_only():
    config = of_windows(8, None).config
    cache = tiny.empty("h2o", config, budget=40)
    with pytest.raises(ValueError, match="pages are on one device, but the model is on a mesh with data=1"):
        models.prefill(tiny.on_mesh(config, 1, 2), TEXT[:, :20], cache=cache, policy="h2o", budget=40, block=8)


def test_a_paged_cache_goes_on_without_merging():
    cache = tiny.empty("h2o+caote", of_windows(8, None).config, budget=40)
    with pytest.raises(ValueError, match=r"'h2o\+merge' merges values in plain caches, but this cache is paged"):
        models.prefill(of_windows(8, None), TEXT[:, :20], cache=cache, policy="h2o+merge", budget=40, block=8)
