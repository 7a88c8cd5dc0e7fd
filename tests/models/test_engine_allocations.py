"""Uneven budgets on pages against the masked full cache of the reference: prefill by blocks, then a hundred steps."""

import functools

import jax
import numpy as np
import pytest

import kvjax
import models
from models import Config, engine, states, steps
from models.plan import Options, check_prompt
from models.sampling import Sampling
from tests.models import reference

VOCABULARY = 256
CONFIG = Config(VOCABULARY, 32, 48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=512)
LENGTHS = np.array([200, 163, 9])
TOKENS = np.stack([np.random.default_rng(row).permutation(VOCABULARY)[:200] for row in range(3)])
BLOCK, BUDGET, STEPS = 4, 14, 100
POLICIES = [
    "h2o@layer(cap=None)",
    "h2o+caote+protect(sinks=2,recent=0.25)@model(cap=None)",
    "tova(heads='group')@adakv(cap=None)",
    "laprox(window=4,kernel=1)@model(cap=None)",
    "h2o@model(normalise=False,cap=None)",
]


@functools.cache
def weights():
    return reference.parameters(CONFIG)


@functools.cache
def model():
    return reference.decoder(CONFIG, weights())


def kept_tokens(cache):
    """Positions of each head, bool [L, B, K, 512]; no position may stand in two slots."""
    layers = [cache.layer(index).position for index in range(CONFIG.num_layers)]
    kept = np.stack(layers)[..., None] == np.arange(512)
    assert kept.sum(axis=-2).max() == 1
    return kept.any(axis=-2)


def assert_pages_are_whole(cache):
    """Every page is owned once or free; each head has the fewest pages that hold its tokens."""
    table, free = np.asarray(cache.table), np.asarray(cache.free)[: int(cache.num_free)]
    owned = table[table >= 0]
    assert sorted([*owned.tolist(), *free.tolist()]) == list(range(len(cache.owner)))
    np.testing.assert_array_equal((table >= 0).sum(axis=-1), -(-np.asarray(cache.num_live) // cache.page_size))


@pytest.mark.parametrize(("name", "when"), [*((name, "block") for name in POLICIES[1:]), (POLICIES[0], "prompt")])
def test_fifty_blocks_and_a_hundred_steps_on_pages_are_those_of_a_masked_full_cache(name, when, compiled_steps):
    settings = dict(policy=name, budget=BUDGET, block=BLOCK, when=when, max_new_tokens=STEPS, end=(), page_size=4)
    steps = list(models.stream(model(), TOKENS, lengths=LENGTHS, **settings))
    kinds_of_tokens = 2 if "window" in name else 1  # those after which somebody leaves, once in a window, and others
    assert compiled_steps() == kinds_of_tokens + (1 if when == "block" else 2), "and one for each kind of block"
    answers, cache = np.stack([token for token, _ in steps], axis=1), steps[-1][1]
    assert isinstance(cache, kvjax.PagedCache)
    assert_pages_are_whole(cache)
    kept = kept_tokens(cache)
    assert len(set(np.asarray(cache.num_live)[:, 0].ravel().tolist())) > 1, "the budgets should be uneven"
    for row, length in enumerate(LENGTHS):
        prompt = TOKENS[row, :length]
        run = reference.run(
            weights(), CONFIG, prompt, policy=reference.policy(name), budget=BUDGET, block=BLOCK, when=when,
            new_tokens=STEPS,
        )  # fmt: skip
        assert answers[row].tolist() == run.tokens
        expected = np.pad(run.kept, ((0, 0), (0, 0), (0, 512 - run.kept.shape[-1])))
        np.testing.assert_array_equal(kept[:, row], expected)


@pytest.mark.parametrize("name", POLICIES[1:3])
def test_logits_on_pages_are_those_of_a_masked_full_cache(name):
    out = models.prefill(model(), TOKENS, LENGTHS, policy=name, budget=BUDGET, block=BLOCK, outputs="all", page_size=2)
    policy = reference.policy(name)
    for row, length in enumerate(LENGTHS):
        run = reference.run(weights(), CONFIG, TOKENS[row, :length], policy=policy, budget=BUDGET, block=BLOCK)
        np.testing.assert_allclose(out.logits[row, :length], run.logits, atol=1e-4, rtol=0)


QUESTIONS = [("h2o", "block"), ("h2o@layer(cap=None)", "block"), ("snapkv(window=4,kernel=3)+caote", "prompt")]


@pytest.mark.parametrize("name, when", QUESTIONS)
def test_a_question_comes_after_the_context_was_compressed(name, when):
    questions = np.array([13, 0, 2])  # a row without a question waits until those of the others are in
    settings = dict(lengths=LENGTHS, policy=name, budget=BUDGET, block=BLOCK, when=when, question=questions)
    prefilled = models.prefill(model(), TOKENS, outputs="all", **settings)
    last = models.prefill(model(), TOKENS, **settings).logits
    out = models.generate(model(), TOKENS, max_new_tokens=20, end=(), **settings)
    kept = kept_tokens(out.cache)
    for row, length in enumerate(LENGTHS):
        run = reference.run(
            weights(), CONFIG, TOKENS[row, :length], policy=reference.policy(name), budget=BUDGET, block=BLOCK,
            when=when, question=questions[row], new_tokens=20,
        )  # fmt: skip
        np.testing.assert_allclose(prefilled.logits[row, :length], run.logits[:length], atol=1e-4, rtol=0)
        np.testing.assert_allclose(last[row], run.logits[length - 1], atol=1e-4, rtol=0)
        assert out.tokens[row].tolist() == run.tokens
        np.testing.assert_array_equal(kept[:, row], np.pad(run.kept, ((0, 0), (0, 0), (0, 512 - run.kept.shape[-1]))))


def test_streaming_and_one_program_agree_on_pages():
    settings = dict(lengths=LENGTHS, policy="h2o@model", budget=BUDGET, block=BLOCK, max_new_tokens=12, end=())
    whole = models.generate(model(), TOKENS, **settings)
    steps = np.stack([token for token, _ in models.stream(model(), TOKENS, **settings)], axis=1)
    np.testing.assert_array_equal(whole.tokens, steps)


def test_a_cache_for_each_query_head_holds_the_group_times_as_much():
    settings = dict(lengths=LENGTHS, budget=16, block=8, when="prompt", max_new_tokens=8, end=())
    group, query = (
        models.generate(model(), TOKENS, policy=name, **settings) for name in ("sage", "sage(heads='query')")
    )
    assert group.cache.heads_shape == (3, 3, 2) and query.cache.heads_shape == (3, 3, 4)
    assert query.cache.key.nbytes == 2 * group.cache.key.nbytes
    assert (query.cache.num_live[:, :2] == 16).all()


@pytest.mark.parametrize("kind", ["compact", "index"])
def test_positions_change_nothing_until_something_is_evicted(kind):
    settings = dict(budget=200, block=32, outputs="all")
    plain = models.prefill(model(), TOKENS[:1], policy="tova", **settings)
    other = models.prefill(model(), TOKENS[:1], policy=f"tova+positions(kind='{kind}')", **settings)
    np.testing.assert_allclose(plain.logits, other.logits, atol=1e-4, rtol=0)


def test_the_three_treatments_of_positions_differ_once_something_is_evicted():
    logits = [
        models.prefill(model(), TOKENS[:1], policy=f"sage+positions(kind='{kind}')", budget=32, block=16).logits
        for kind in ("absolute", "compact", "index")
    ]
    assert all(np.abs(a - b).max() > 1e-2 for a, b in ((0, 1), (0, 2), (1, 2)) for a, b in [(logits[a], logits[b])])


def run_of(tokens, policy, budget, block, page_size):
    options = Options(policy, budget, block, evict_every=1, page_size=page_size, reserve=8)
    run, _ = engine.prepare(model(), check_prompt(model(), tokens, None, None), options, None, None)
    return run


def test_a_step_on_pages_donates_every_array_of_the_cache():
    run = run_of(np.zeros((1, 100), np.int32), "h2o@model", 40, 16, 4)
    state = states.start(run, 1)
    step = engine.token_step.lower(
        run, state, np.zeros(1, np.int32), np.zeros(1, bool), None, steps.decode_phase(run.plan, 1), Sampling()
    )
    assert step.compile().memory_analysis().alias_size_in_bytes >= state.cache.key.nbytes + state.cache.value.nbytes


def test_logits_of_a_hundred_steps_on_pages_are_those_of_a_masked_full_cache():
    name, length = "h2o+caote+protect(sinks=2,recent=0.25)@model(cap=None)", 163
    prompt = TOKENS[1, :length]
    expected = reference.run(
        weights(), CONFIG, prompt, policy=reference.policy(name), budget=BUDGET, block=BLOCK, new_tokens=STEPS + 1
    )
    cache, _ = models.prefill(model(), prompt[None], policy=name, budget=BUDGET, block=BLOCK, page_size=4)
    run = run_of(prompt[None], name, BUDGET, BLOCK, 4)

    @functools.partial(jax.jit, donate_argnames="state")
    def step(run, state, token):
        position, phase = state.cache.next_position[:, None], steps.decode_phase(run.plan, 1)
        hidden, state = steps.forward(run, state, token, position, run.rows.decode_budgets, phase)
        return run.model.logits(hidden[:, 0]), state

    state = steps.DecodeState(cache)
    for number, token in enumerate(expected.tokens[:STEPS]):
        logits, state = step(run, state, np.array([[token]], np.int32))
        np.testing.assert_allclose(logits[0], expected.logits[length + number], atol=1e-4, rtol=0)
        assert_pages_are_whole(state.cache)
    assert step._cache_size() == 1


@pytest.mark.parametrize("allocation", ["layer", "model(normalise=False)"])
def test_a_head_that_wins_all_slots_after_a_long_question_loses_no_token(allocation):
    favourite = kvjax.base_score("favourite", lambda o: (o.position + 1e4 * (o.head[:, None] == 0))[:, :, None] + 0.0)
    out = models.generate(
        model(), TOKENS[:1, :40], policy=favourite @ allocation, budget=4, block=4, question=24, max_new_tokens=40,
        page_size=4, end=(),
    )  # fmt: skip
    newest = np.array([out.cache.layer(index).position.max(axis=-1)[0] for index in range(3)])
    assert (newest[:, 0] == 40 + 40 - 2).all()
    assert_pages_are_whole(out.cache)


def test_pages_are_for_the_rows_budgets_not_for_the_largest_one():
    lengths = np.array([200, 20, 20, 20])
    tokens = np.resize(TOKENS[0], (4, 200))
    cache, _ = models.prefill(model(), tokens, lengths, policy="h2o@layer", budget=0.2, block=8, page_size=4)
    heads, held = 6, 40 + 4 * 3
    assert cache.position.size <= heads * (held + 4 * 8) + heads * 4 * 4
    assert cache.num_live.sum(axis=(0, 2)).tolist() == [240, 24, 24, 24]


def test_questions_of_nearby_lengths_share_one_program(each_way, compiled_steps):
    settings = dict(policy="tova(heads='group')@layer", budget=9, block=4, max_new_tokens=3, end=())
    sizes = []
    for question in (5, 7, 8):
        list(models.stream(model(), TOKENS[:1, :60], question=question, **settings))
        sizes.append(compiled_steps())
    assert 0 < sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize(("when", "question"), [("block", 9), ("prompt", 1)])
def test_sage_does_not_choose_anew_when_the_question_comes(when, question):
    settings = dict(policy="sage", budget=16, block=16, when=when)
    asked, _ = models.prefill(model(), TOKENS[:1, :64], question=question, **settings)
    alone, _ = models.prefill(model(), TOKENS[:1, : 64 - question], **settings)
    kept, kept_alone = kept_tokens(asked), kept_tokens(alone)
    np.testing.assert_array_equal(kept[..., : 64 - question], kept_alone[..., : 64 - question])
    for layer in range(3):
        views = [cache.layer(layer) for cache in (asked, alone)]
        states = [dict(zip(v.position.ravel().tolist(), v.state.ravel().tolist(), strict=True)) for v in views]
        assert all(states[0][p] == pytest.approx(states[1][p], rel=1e-4) for p in states[1] if p >= 0)


def test_sage_scores_a_prompt_that_comes_token_by_token():
    kept = [
        kept_tokens(models.prefill(model(), TOKENS[:1, :60], policy=name, budget=16, block=1).cache)
        for name in ("sage", "streaming(sinks=4)")
    ]
    assert (kept[0] != kept[1]).any()


@pytest.mark.parametrize("base", ["laprox(window=4)", "expected_attention"])  # reads the block's weights, reads none
def test_caote_through_the_output_goes_behind_scores_of_both_kinds(base):
    policy = kvjax.parse(f"{base}+caote(target='output')@layer")
    cache, logits = models.prefill(model(), TOKENS[:1, :40], policy=policy, budget=12, block=8)
    assert np.isfinite(logits).all() and (cache.num_live.sum(axis=-1) == 24).all()
